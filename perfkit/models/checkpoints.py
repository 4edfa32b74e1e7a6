"""What the backward pass of a layer computes again: nothing, some of its parts, what lies between
saved products, or all of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from perfkit.ground.units import check_choice, show

#: Parts of a layer that may be computed again, in the order in which names of several list them.
CHECKPOINT_PARTS = ("attention", "norms", "activation", "mlp", "experts")
#: Most layers of a chunk that may be computed again; by default all are [-].
EVERY_LAYER = 2**15


@dataclass(frozen=True)
class Checkpoint:
    """What the backward pass of a layer computes again.

    Parameters
    ----------
    name : str
        Its name in strategies.
    parts : tuple of str
        Parts that are computed again, of `CHECKPOINT_PARTS`.
    keeps_input_alone : bool
        Whether the layer keeps only its input.
    saves_products : bool
        Whether the results of every other product, of attention and of reduce_scatter, and the
        scales of whole operands of fp8 are saved, and all else is computed again.
    """

    name: str
    parts: tuple[str, ...] = ()
    keeps_input_alone: bool = False
    saves_products: bool = False

    @property
    def runs_whole_layer(self) -> bool:
        """Whether the layer runs again from its input, so that the host makes all of its calls
        again."""
        return self.keeps_input_alone or self.saves_products

    @property
    def is_in_forward_pass(self) -> bool:
        """Whether the recorded backward pass is that of a layer that computes nothing again: of
        ``selective`` the kernels of attention are added to it."""
        return not self.runs_whole_layer and self.parts in ((), ("attention",))


#: What may be computed again, by names in strategies; parts may also be joined, as in
#: ``norms+activation``.
CHECKPOINTS: Mapping[str, Checkpoint] = MappingProxyType(
    {
        checkpoint.name: checkpoint
        for checkpoint in (
            Checkpoint("none"),
            # Korthikanti et al. 2023, arXiv:2205.05198, section 5; Megatron-LM's core_attn
            Checkpoint("selective", ("attention",)),
            Checkpoint("full", CHECKPOINT_PARTS, keeps_input_alone=True),
            # torchtitan, selective_ac_option "op"; its list of what is saved has aten.max, too
            Checkpoint("per_op", saves_products=True),
            # Megatron-LM, --recompute-modules layernorm, moe_act, mlp and moe
            Checkpoint("norms", ("norms",)),
            Checkpoint("activation", ("activation",)),
            Checkpoint("mlp", ("mlp",)),
            Checkpoint("experts", ("experts",)),
        )
    }
)


def find_checkpoint(name: Any) -> Checkpoint:
    """Find what a name says is computed again.

    Parameters
    ----------
    name : str
        A name in `CHECKPOINTS`, or several of `CHECKPOINT_PARTS` joined by ``+``.

    Returns
    -------
    checkpoint : Checkpoint
        Its record; the parts of a joined name are in the order of `CHECKPOINT_PARTS`.

    Raises
    ------
    ValueError
        For an unknown name, and for a part that is named twice.

    Examples
    --------
    >>> find_checkpoint("activation+norms").name
    'norms+activation'
    >>> find_checkpoint("attention").name
    'selective'
    """
    if isinstance(name, str) and name == "attention":
        return CHECKPOINTS["selective"]
    if not isinstance(name, str) or "+" not in name:
        return CHECKPOINTS[check_choice("checkpoint", name, CHECKPOINTS)]
    named = name.split("+")
    for part in named:
        if part not in CHECKPOINT_PARTS:
            raise ValueError(
                f"checkpoint is {show(name)}, and {show(part)} is no part of a layer; join some of "
                f"{', '.join(CHECKPOINT_PARTS)}"
            )
    if len(set(named)) < len(named):
        raise ValueError(f"checkpoint is {show(name)}; name each part once")
    parts = tuple(part for part in CHECKPOINT_PARTS if part in named)
    return Checkpoint("+".join(parts), parts)


def ask_checkpoints(names: Any, question: Callable[[Checkpoint], Any], dtype: type) -> Any:
    """Ask the record of each name something, once for equal names.

    Parameters
    ----------
    names : str or array of str
        As `find_checkpoint` takes them.
    question : callable
        Takes a `Checkpoint`, and returns a text or a flag.
    dtype : type
        Of its answers, str or bool.

    Returns
    -------
    answers : same kind as `names`
        What it returned for each.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> names = np.array(["none", "per_op", "none"])
    >>> ask_checkpoints(names, lambda checkpoint: checkpoint.saves_products, bool)
    array([False,  True, False])
    """
    if isinstance(names, str):
        return question(find_checkpoint(names))
    distinct, number = np.unique(names, return_inverse=True)
    answers: np.ndarray = np.array(
        [question(find_checkpoint(name)) for name in distinct.tolist()], dtype=dtype
    )
    return answers[number].reshape(np.shape(names))


def check_checkpoints(names: Any) -> Any:
    """Check names of what is computed again.

    Parameters
    ----------
    names : str or array of str
        As `find_checkpoint` takes them.

    Returns
    -------
    names : str or array of str
        The same, with parts in the order of `CHECKPOINT_PARTS`.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> check_checkpoints("activation+norms")
    'norms+activation'
    """
    if not (isinstance(names, np.ndarray) and names.dtype.kind == "U"):
        return find_checkpoint(names).name
    return ask_checkpoints(names, lambda checkpoint: checkpoint.name, str)


def recomputes(names: Any, part: str) -> Any:
    """Find out whether a part of a layer is computed again.

    Parameters
    ----------
    names : str or array of str
        Names in strategies.
    part : str
        One of `CHECKPOINT_PARTS`.

    Returns
    -------
    are : bool or array of bool
        For each name.

    Examples
    --------
    >>> recomputes(np.array(["none", "selective", "full"]), "attention")
    array([False,  True,  True])
    """
    check_choice("part", part, CHECKPOINT_PARTS)
    return ask_checkpoints(names, lambda checkpoint: part in checkpoint.parts, bool)
