"""The level of the software that runs a workload, and what is said of it."""

from typing import Any

from perfkit.fitting import Iteration
from perfkit.platform.platform import Platform

#: Family of the steps that levels are fitted to.
_FAMILY = "transformer"


def find_level(platform: Platform, stack: str, workload: Any) -> Iteration | None:
    """Find the level of a stack on a platform.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    stack : str
        Name of the software.
    workload : Workload or Graph
        What runs: levels are known of Transformers, apart of those with experts.

    Returns
    -------
    level : Iteration or None
        Its ``scale`` is a factor on all times, its spread that of whole iterations; None where no
        level was fitted.
    """
    if workload.family != _FAMILY:
        return None
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
    if workload.family != _FAMILY or not platform.context.stacks:
        return ()
    level = find_level(platform, stack, workload)
    of_experts = " with experts" if _has_experts(workload) else ""
    missing = (
        f"no published step of {stack} in {workload.dtype}{of_experts} on {platform.device.name}"
    )
    if level is None:
        return (f"{missing}: no level",)
    if level.n:
        return ()
    return (f"{missing}: level of other software, with the scatter between stacks",)


def _has_experts(workload: Any) -> bool:
    """Whether it is a Transformer with experts."""
    return bool(getattr(workload, "experts", 0))
