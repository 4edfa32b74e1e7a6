"""The level of the software that runs a workload, and what is said of it."""

from typing import Any

from perfkit.fitting import Iteration
from perfkit.platform.machine import name_level
from perfkit.platform.platform import Platform

#: Families whose software has levels; those of others are fitted to Transformers alone.
_FAMILIES = ("transformer", "dlrm")
_FITTED = "transformer"


def find_level(platform: Platform, stack: str, workload: Any) -> Iteration | None:
    """Find the level of a stack on a platform.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : str
        Name of the software.
    workload : Workload or Graph
        What runs. A Transformer takes the level of other software where its own has none;
        Transformers with experts have levels of their own.

    Returns
    -------
    level : Iteration or None
        Its ``scale`` is a factor on all times, its spread that of whole iterations; None where no
        level was fitted.
    """
    if workload.family not in _FAMILIES:
        return None
    if workload.family != _FITTED:
        return platform.context.stacks.get(name_level(stack, workload.dtype, has_experts=False))
    return platform.context.find_stack(stack, workload.dtype, has_experts=_has_experts(workload))


def note_level(platform: Platform, stack: str, workload: Any) -> tuple[str, ...]:
    """A note where levels of software were fitted on a platform, but none to this stack in this
    format.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : str
        Name of the software.
    workload : Workload or Graph
        What runs.

    Returns
    -------
    notes : tuple of str
        A sentence, or nothing.
    """
    if workload.family != _FITTED or not platform.context.stacks:
        return ()
    own = name_level(stack, workload.dtype, has_experts=_has_experts(workload))
    if own in platform.context.stacks:
        return ()
    of_experts = " with experts" if _has_experts(workload) else ""
    missing = f"no published step of {stack} in {workload.dtype}{of_experts} on {platform.name}"
    if find_level(platform, stack, workload) is None:
        return (f"{missing}: no level",)
    return (f"{missing}: level of other software, with the scatter between stacks",)


def _has_experts(workload: Any) -> bool:
    """Whether it is a Transformer with experts."""
    return bool(getattr(workload, "experts", 0))
