"""The level of the software that runs a workload, and what is said of it."""

from typing import Any

from perfkit.fitting import Iteration
from perfkit.platform.machine import StepKind, name_level
from perfkit.platform.platform import Platform

#: Families whose software has levels; those of others are fitted to Transformers alone.
_FAMILIES = ("transformer", "dlrm")
_FITTED = "transformer"


def find_level(platform: Platform, stack: str, workload: Any, ranks: int) -> Iteration | None:
    """Find the level of a stack on a platform.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : str
        Name of the software.
    workload : Workload or Graph
        What runs. A Transformer takes the level of other software where its own has none.
    ranks : int
        Ranks that take part [-].

    Returns
    -------
    level : Iteration or None
        Its ``scale`` is a factor on all times, its spread that of whole iterations; None where no
        level was fitted.
    """
    if workload.family not in _FAMILIES:
        return None
    if workload.family != _FITTED:
        return platform.context.stacks.get(name_level(stack, workload.dtype, StepKind()))
    return platform.context.find_stack(stack, workload.dtype, _find_kind(platform, workload, ranks))


def note_level(platform: Platform, stack: str, workload: Any, ranks: int) -> tuple[str, ...]:
    """A note where levels of software were fitted on a platform, but none to such steps of this
    stack.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : str
        Name of the software.
    workload : Workload or Graph
        What runs.
    ranks : int
        Ranks that take part [-].

    Returns
    -------
    notes : tuple of str
        A sentence, or nothing.
    """
    if workload.family != _FITTED or not platform.context.stacks:
        return ()
    kind = _find_kind(platform, workload, ranks)
    what = f"{stack} in {workload.dtype}"
    if kind.has_experts:
        what += " with experts"
    if kind.crosses_nodes:
        what += " over several nodes"
    own = platform.context.stacks.get(name_level(stack, workload.dtype, kind))
    if own is not None:
        if own.kind != "assumed":
            return ()
        return (f"level of {what} on {platform.name} is assumed, from {own.source}",)
    missing = f"no published step of {what} on {platform.name}"
    if find_level(platform, stack, workload, ranks) is None:
        return (f"{missing}: no level",)
    return (f"{missing}: level of other software, with the scatter between stacks",)


def _find_kind(platform: Platform, workload: Any, ranks: int) -> StepKind:
    """Whether a Transformer has experts, and its ranks fill more than a node."""
    return StepKind(
        has_experts=bool(getattr(workload, "experts", 0)),
        crosses_nodes=ranks > platform.network.ranks_per_node,
    )
