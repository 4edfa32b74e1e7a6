"""What `gpu_forms` is made of: held-out points, records of their errors, and the bars they are held against."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from perfkit.calibration.checks import summarize_errors
from perfkit.ground.units import Array

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


class Judged(NamedTuple):
    """Held-out points of a system: what was fitted with how many parameters and how, and the draw of the fit.

    Of each point the error [-], predicted / measured - 1, and whether it lay inside the 80 % interval.
    """

    system: str
    quantity: str
    form: str
    parameters: int
    split: str
    errors: Array
    inside: Any
    draw: int = 0


def pool(judged: Iterable[Judged]) -> list[Judged]:
    """The same, and those of A100 and H100 once more as one system, where both are there."""
    found, pair = list(judged), POOLED.split("+")
    both = set(pair) <= {one.system for one in found}
    return found + [one._replace(system=POOLED) for one in found if both and one.system in pair]


def make_records(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Figures [%] of points that belong together, the mean over draws, with their bar and whether they keep it."""
    groups: dict[tuple[Any, ...], dict[int, list[Judged]]] = {}
    for one in judged:
        groups.setdefault(one[:5], {}).setdefault(one.draw, []).append(one)
    return [_make_record(key, list(draws.values())) for key, draws in groups.items()]


def _make_record(key: tuple[Any, ...], draws: Sequence[Sequence[Judged]]) -> dict[str, Any]:
    figures = []
    for draw in draws:
        errors, inside = (np.concatenate(part) for part in zip(*(one[5:7] for one in draw), strict=True))
        figures.append({**summarize_errors(errors), "inside": 100 * float(inside.mean())})
    means = {name: round(float(np.mean([one[name] for one in figures])), 2) for name in (*_FIGURES, "bias", "inside")}
    about = dict(zip(Judged._fields[:5], key, strict=True)) | {"n": int(figures[0]["n"]), **means}
    if (bar := BARS.get((about["system"], about["quantity"], about["split"]))) is None:
        return about | {"met": None}
    fine = all(means[name] <= limit for name, limit in zip(_FIGURES, bar, strict=True))
    held = about["system"] != POOLED or INSIDE[0] <= means["inside"] <= INSIDE[1]
    return about | {"bar": " / ".join("-" if limit == np.inf else f"{limit:g}" for limit in bar), "met": fine and held}
