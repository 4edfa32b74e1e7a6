"""Levels of software stacks on published devices.

The time of a step over its prediction is nearly the same for all steps of one software on one
device in one number format: its level. `reference_data/published/stack_levels.csv` has the levels
that were fitted to published steps (docs/formulas.md, section 10).
"""

import math

from perfkit.fitting import Iteration
from perfkit.ground.files import group_rows
from perfkit.platform.machine import StepKind, name_level

#: Generation of a device, by the start of its name.
GENERATIONS = {
    "v100": "v100",
    "a100": "a100",
    "h100": "h100",
    "h200": "h100",
    "b200": "blackwell",
    "b300": "blackwell",
    "gb200": "blackwell",
    "gb300": "blackwell",
    "l4": "ada",
    "l40s": "ada",
    "tpu": "tpu",
}


def find_generation(system: str) -> str | None:
    """Find the generation of a device.

    Parameters
    ----------
    system : str
        Its name, such as ``h100-sxm``.

    Returns
    -------
    generation : str or None
        That of published steps; None where no generation is known.

    Examples
    --------
    >>> find_generation("gb200-4")
    'blackwell'
    """
    return GENERATIONS.get(system.partition("-")[0])


def read_levels(generation: str | None) -> dict[str, Iteration]:
    """Read the levels of all stacks on a generation of devices.

    Parameters
    ----------
    generation : str or None
        One of `GENERATIONS`; without one nothing is known.

    Returns
    -------
    levels : dict of str to Iteration
        Under the names of `perfkit.platform.machine.name_level`.

    Examples
    --------
    >>> levels = read_levels("a100")
    >>> levels["*.bf16"].spread > levels["fsdp.bf16"].spread
    True
    """
    rows = group_rows("generation", "published", "stack_levels.csv").get(generation or "", [])
    levels = {}
    for row in rows:
        kind = StepKind(row["experts"] == "yes", row["nodes"] == "several")
        name = name_level(row["stack"], row["format"], kind)
        steps = int(row["steps"])
        levels[name] = Iteration.build(
            {"scale": math.exp(float(row["logarithm"]))},
            stderr={"scale": float(row["stderr"])},
            spread=float(row["spread"]),
            n=steps,
            kind="fitted" if steps else "assumed",
            source=f"published steps: {row['source']}",
            date=row["date"],
        )
    return levels
