"""The level of the software that runs a workload, and what is said of it."""

from typing import Any

from perfkit.fitting import Iteration
from perfkit.platform.machine import OTHERS, StepKind
from perfkit.platform.platform import Platform
from perfkit.workloads.stack import STACKS, Stack

#: Families whose software has levels; those of others are fitted to Transformers alone.
_FAMILIES = ("transformer", "dlrm")
_FITTED = "transformer"


def find_level(platform: Platform, stack: Stack, workload: Any, ranks: int) -> Iteration | None:
    """Find the level of a stack on a platform.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : Stack
        The software. It has a level of its own, or else that of the stack that it names.
    workload : Workload or Graph
        What runs. A Transformer takes the level of other software where neither has one.
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
        return _find_own(platform, stack, workload.dtype, StepKind())
    kind = _find_kind(platform, workload, ranks)
    own = _find_own(platform, stack, workload.dtype, kind)
    if own is not None:
        return own
    return platform.context.find_stack(OTHERS, workload.dtype, kind)


def _find_own(platform: Platform, stack: Stack, dtype: str, kind: StepKind) -> Iteration | None:
    """The level of a stack, or of that whose level it takes; None where neither has one."""
    own = platform.context.find_stack(stack.name, dtype, kind)
    if own is not None or not stack.level_of:
        return own
    return platform.context.find_stack(stack.level_of, dtype, kind)


def note_level(platform: Platform, stack: Stack, workload: Any, ranks: int) -> tuple[str, ...]:
    """A note where levels of software were fitted on a platform, but none to such steps of this
    stack, or of that whose level it takes.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : Stack
        The software.
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
    what = stack.name
    if stack.level_of:
        what += f" or {stack.level_of}"
    what += f" in {workload.dtype}"
    if kind.has_experts:
        what += " with experts"
    if kind.crosses_nodes:
        what += " over several nodes"
    own = _find_own(platform, stack, workload.dtype, kind)
    if own is not None:
        if own.kind != "assumed":
            return ()
        return (f"level of {what} on {platform.name} is assumed, from {own.source}",)
    missing = f"no published step of {what} on {platform.name}"
    if find_level(platform, stack, workload, ranks) is None:
        return (f"{missing}: no level",)
    note = f"{missing}: level of other software, with the scatter between stacks"
    if stack.name not in STACKS and not stack.level_of:
        note += "; a stack with level_of, such as 'fsdp', takes the level of that"
    return (note,)


def _find_kind(platform: Platform, workload: Any, ranks: int) -> StepKind:
    """Whether a Transformer has experts, and its ranks fill more than a node."""
    return StepKind(
        has_experts=bool(getattr(workload, "experts", 0)),
        crosses_nodes=ranks > platform.network.ranks_per_node,
    )
