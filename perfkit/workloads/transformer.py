"""Transformer language models: BERT with a masked-token head and GPT-2, as one training iteration."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from perfkit.units import check_choice, check_positive
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.tape import ITEMSIZE, Tensor, check_switches
from perfkit.workloads.training import Training

__all__ = ["PRESETS", "Transformer"]

#: Published configurations: BERT of arXiv 1810.04805 (vocabulary 30522), GPT-2 (vocabulary 50257).
PRESETS: dict[str, dict[str, int]] = {
    "bert-base": {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 30522, "positions": 512},
    "bert-large": {"layers": 24, "hidden": 1024, "heads": 16, "vocabulary": 30522, "positions": 512},
    "gpt2": {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257, "positions": 1024},
    "gpt2-xl": {"layers": 48, "hidden": 1600, "heads": 25, "vocabulary": 50257, "positions": 1024},
}


@dataclass(frozen=True)
class Transformer:
    """One training iteration of a BERT or GPT-2: forward, cross entropy over all tokens, backward, optimizer.

    Build one with `bert` or `gpt2`. On several ranks it is data-parallel. Dropout is not modelled.

    Parameters
    ----------
    name : str
        Preset or family name.
    causal : bool
        GPT-2 (pre-norm, causal attention) rather than BERT (post-norm, token types, masked-token head).
    batch : int
        Sequences of one iteration over all ranks [-].
    sequence : int
        Tokens of one sequence [-].
    layers : int
        Transformer layers [-].
    hidden : int
        Width [-].
    heads : int
        Attention heads; they divide the width [-].
    vocabulary : int
        Tokens known [-].
    positions : int
        Rows of the position embedding, at least the sequence [-].
    attention : str
        ``fused`` (scaled dot-product attention in one kernel) or ``eager`` (scores in memory).
    dtype : str
        Data type of products, and unless `mixed` of weights, activations and gradients.
    optimizer : str
        ``adamw`` or ``sgd``.
    fused : bool
        Whether the optimizer updates all weights by one kernel.
    mixed : bool
        Whether weights, gradients, optimizer states, norms, softmax and loss stay fp32 while products run in `dtype`
        (autocast); the scaling of an fp16 loss is not modelled.
    overlap : bool
        Whether gradients are reduced in buckets while the backward pass goes on, as DistributedDataParallel does; else
        in one piece after it.
    family : str
        Workload family, by which platforms are calibrated.

    Raises
    ------
    ValueError
        For unknown names, sizes that are not above zero, heads that do not divide the width, or a sequence longer than
        the positions.

    Examples
    --------
    >>> Transformer.bert("bert-base", batch=8, sequence=128).graphs()[0].parameters
    109514298
    """

    name: str
    causal: bool
    batch: int
    sequence: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    attention: str = "fused"
    dtype: str = "fp32"
    optimizer: str = "adamw"
    fused: bool = False
    mixed: bool = False
    overlap: bool = True
    family: str = field(default="transformer", repr=False)

    def __post_init__(self) -> None:
        for key in ("batch", "sequence", "layers", "hidden", "heads", "vocabulary", "positions"):
            most = 10_000 if key == "layers" else None  # every layer is recorded, and memory is finite
            object.__setattr__(self, key, int(check_positive(key, getattr(self, key), integer=True, maximum=most)))
        check_choice("attention", self.attention, ("fused", "eager"))
        check_choice("dtype", self.dtype, ITEMSIZE)
        check_choice("optimizer", self.optimizer, ("adamw", "sgd"))
        check_switches(self.dtype, fused=self.fused, mixed=self.mixed, overlap=self.overlap)
        if self.hidden % self.heads:
            raise ValueError(f"heads is {self.heads}; it must divide hidden, {self.hidden}; change one of them")
        if self.sequence > self.positions:
            raise ValueError(
                f"sequence is {self.sequence}; the model has {self.positions} positions; shorten it or raise positions"
            )

    @classmethod
    def bert(cls, preset: str = "bert-base", *, batch: int = 8, sequence: int = 128, **changes: Any) -> "Transformer":
        """A BERT with a masked-token head.

        Parameters
        ----------
        preset : str
            ``bert-base`` or ``bert-large``.
        batch : int
            Sequences over all ranks [-].
        sequence : int
            Tokens of one sequence [-].
        **changes : int or str
            Further fields of `Transformer` that differ from the preset [-].

        Returns
        -------
        workload : Transformer
            The iteration.
        """
        return cls._preset(preset, "bert", causal=False, batch=batch, sequence=sequence, changes=changes)

    @classmethod
    def gpt2(cls, preset: str = "gpt2", *, batch: int = 8, sequence: int = 1024, **changes: Any) -> "Transformer":
        """A GPT-2.

        Parameters
        ----------
        preset : str
            ``gpt2`` or ``gpt2-xl``.
        batch : int
            Sequences over all ranks [-].
        sequence : int
            Tokens of one sequence [-].
        **changes : int or str
            Further fields of `Transformer` that differ from the preset [-].

        Returns
        -------
        workload : Transformer
            The iteration.
        """
        return cls._preset(preset, "gpt2", causal=True, batch=batch, sequence=sequence, changes=changes)

    @classmethod
    def _preset(
        cls, preset: str, family: str, *, causal: bool, batch: int, sequence: int, changes: dict[str, Any]
    ) -> "Transformer":
        check_choice("preset", preset, [name for name in PRESETS if name.startswith(family)])
        for key in changes:
            switches = ("attention", "dtype", "optimizer", "fused", "mixed", "overlap")
            check_choice("argument", key, [*PRESETS[preset], *switches])
        values = {**PRESETS[preset], **changes}
        changed = any(values[key] != size for key, size in PRESETS[preset].items() if key != "positions")
        return cls(family if changed else preset, causal, batch, sequence, **values)

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        return f"{self.name}, batch {self.batch}, sequence {self.sequence}"

    def graphs(self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False) -> tuple[Graph, ...]:
        """What every rank computes in one iteration: the same on each.

        Parameters
        ----------
        ranks : int
            Ranks [-].
        plan : None
            A Transformer has no tables to place.
        accelerator : bool
            Whether it runs on a device of its own, where the optimizer updates lists of tensors.

        Returns
        -------
        graphs : tuple of Graph
            One per rank.

        Raises
        ------
        ValueError
            If the batch does not divide by the ranks or a plan is given.
        """
        ranks = int(check_positive("ranks", ranks, integer=True))
        if plan is not None:
            raise ValueError("plan is given; a Transformer has no tables to place; leave it out")
        if self.batch % ranks:
            raise ValueError(f"batch is {self.batch}; it must divide by the {ranks} ranks; take a multiple of {ranks}")
        return (_record(self, ranks, accelerator),) * ranks


@lru_cache(maxsize=64)
def _record(model: Transformer, ranks: int, accelerator: bool) -> Graph:
    """Record one rank's iteration."""
    overlap, hidden = model.overlap and ranks > 1, model.hidden
    tape = Training(ITEMSIZE[model.dtype], mixed=model.mixed, overlap=overlap)
    batch, tokens = model.batch // ranks, model.batch // ranks * model.sequence
    tape.module = "embeddings"
    words, places = tape.parameter(model.vocabulary, hidden), tape.parameter(model.positions, hidden)
    x = tape.embedding(words, tokens, batch, model.sequence)
    x = tape.add(x, tape.embedding(places, model.sequence, model.sequence))
    if not model.causal:
        x = tape.add(x, tape.embedding(tape.parameter(2, hidden), tokens, batch, model.sequence))
        x = tape.layer_norm(x)
    for layer in range(model.layers):
        x = _layer(tape, model, x, f"layers.{layer}")
    tape.module = "head"
    if not model.causal:
        x = tape.gelu(tape.linear(x, tape.parameter(hidden, hidden), tape.parameter(hidden)))
    x = tape.layer_norm(x)
    bias = None if model.causal else tape.parameter(model.vocabulary)
    tape.cross_entropy(tape.linear(x, words, bias), tokens)
    if overlap:
        tape.share_gradients(tape.trained)
    tape.backward()
    if ranks > 1 and not overlap:
        tape.all_reduce_gradients()
    tape.step(model.optimizer, lists=accelerator, fused=model.fused)
    return tape.graph(name=model.name, family=model.family, dtype=model.dtype, ranks=ranks)


def _layer(tape: Training, model: Transformer, x: Tensor, module: str) -> Tensor:
    """One Transformer layer: normalised before (GPT-2) or after (BERT) each residual sum."""
    tape.module = module + ".attention"
    if model.causal:
        x = tape.add(x, _attention(tape, model, tape.layer_norm(x)))
    else:
        x = tape.layer_norm(tape.add(x, _attention(tape, model, x)))
    tape.module = module + ".mlp"
    normed = tape.layer_norm(x) if model.causal else x
    wide = tape.linear(normed, tape.parameter(4 * model.hidden, model.hidden), tape.parameter(4 * model.hidden))
    wide = tape.gelu(wide, tanh=model.causal)
    x_out = tape.linear(wide, tape.parameter(model.hidden, 4 * model.hidden), tape.parameter(model.hidden))
    x = tape.add(x, x_out)
    return x if model.causal else tape.layer_norm(x)


def _attention(tape: Training, model: Transformer, x: Tensor) -> Tensor:
    """Self-attention with its projections."""
    hidden = model.hidden
    if model.causal:
        joint = tape.linear(x, tape.parameter(3 * hidden, hidden), tape.parameter(3 * hidden))
        q, k, v = tape.split(joint, 3)
    else:
        q, k, v = (tape.linear(x, tape.parameter(hidden, hidden), tape.parameter(hidden)) for _ in range(3))
    tape.views(6)  # each of the three by heads, and transposed
    if model.attention == "fused":
        mixed = tape.fused_attention(q, k, v, heads=model.heads, causal=model.causal)
    else:
        mixed = _eager_attention(tape, model, q, k, v)
    tape.views(2)
    return tape.linear(mixed, tape.parameter(hidden, hidden), tape.parameter(hidden))


def _eager_attention(tape: Training, model: Transformer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with the scores in memory; heads are gathered by copies, as matmul does with permuted views."""
    batch, sequence, hidden = q.shape
    heads, width = batch * model.heads, hidden // model.heads
    q, v = (tape.regroup(t, heads, sequence, width) for t in (q, v))
    k = tape.regroup(k, heads, width, sequence, lazy=True)
    scores = tape.scale(tape.bmm(tape.contiguous(q), tape.contiguous(k), "nn"))
    if model.causal:
        scores = tape.add(scores, tape.tensor(sequence, sequence))
    mixed = tape.bmm(tape.softmax(scores), tape.contiguous(v), "nn")
    return tape.contiguous(tape.regroup(mixed, batch, sequence, hidden), width)
