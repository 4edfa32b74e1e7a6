"""What `gpu_forms` is made of: records of held-out errors, and the bars they are held against."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from perfkit.calibration.checks import summarize_errors
from perfkit.ground.units import Array

#: Errors on held-out points, predicted / measured - 1, and whether each lay inside the 80 % interval.
Judged: TypeAlias = tuple[Array, Any]
#: Errors of A100 and H100 together: all bars hold for these, and forms and constants were chosen on them.
POOLED = "a100_sxm+h100_sxm"
#: Datasheet of perfkit by the name that the data give the system.
DATASHEETS = {f"{chip}_sxm": f"{chip}-sxm" for chip in ("a100", "h100", "h200", "b200", "b300")}
DATASHEETS |= {"gb200": "gb200", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000"}
_FIGURES = ("geomean", "mean", "p95")
#: Errors that may not be exceeded [%], by system, quantity and split.
BARS: Mapping[tuple[str, str, str], tuple[float, ...]] = {
    (POOLED, "collective, two parameters", "every other size"): (5, 8, 24),
    (POOLED, "collective, chosen form", "every other size"): (4, 6.5, 18),
    (POOLED, "collective, rank law", "2 and 4 ranks to 8"): (6, 9.5, 25),
    (POOLED, "GEMM", "random fifth"): (5.5, 8.5, 25),
    (POOLED, "GEMM", "32 shapes"): (6.5, 9.5, np.inf),
    (POOLED, "GEMM", "largest tenth"): (6.5, 9, 25),
    ("h200_sxm", "GEMM", "random fifth"): (7, 9.5, np.inf),
}
#: Share of held-out points of A100 and H100 that an 80 % interval holds [%], where a bar of errors is set.
INSIDE = (70.0, 90.0)


def join(parts: Sequence[Judged]) -> Judged:
    """Several curves or systems together."""
    errors, inside = (np.concatenate(part) for part in zip(*parts, strict=True))
    return errors, inside


def make_record(
    system: str, quantity: str, form: str, parameters: int, split: str, draws: Sequence[Judged]
) -> dict[str, Any]:
    """Figures [%] of held-out points, the mean over the draws, with their bar and whether they keep it."""
    figures = [{**summarize_errors(errors), "inside": 100 * float(np.mean(inside))} for errors, inside in draws]
    means = {name: round(float(np.mean([one[name] for one in figures])), 2) for name in (*_FIGURES, "bias", "inside")}
    about = {"system": system, "quantity": quantity, "form": form, "parameters": parameters, "split": split}
    about |= {"n": int(figures[0]["n"]), **means}
    if (bar := BARS.get((system, quantity, split))) is None:
        return about | {"met": None}
    fine = all(means[name] <= limit for name, limit in zip(_FIGURES, bar, strict=True))
    held = system != POOLED or INSIDE[0] <= means["inside"] <= INSIDE[1]
    return about | {"bar": " / ".join("-" if limit == np.inf else f"{limit:g}" for limit in bar), "met": fine and held}
