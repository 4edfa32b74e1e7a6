"""What `gpu_forms` is made of: records of held-out errors, the bars they are held against, and their table."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import MET
from perfkit.calibration.checks import summarize_errors
from perfkit.ground.units import format_table

#: Errors of A100 and H100 together: all bars hold for these, and forms and constants were chosen on them.
POOLED = "a100_sxm+h100_sxm"
#: Datasheet of perfkit by the name that the data give the system.
DATASHEETS = {f"{chip}_sxm": f"{chip}-sxm" for chip in ("a100", "h100", "h200", "b200", "b300")}
DATASHEETS |= {"gb200": "gb200", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000"}
_FIGURES = ("geomean", "mean", "p95")
#: Errors that may not be exceeded [%], by system, quantity and split; nan where none is set.
BARS: Mapping[tuple[str, str, str], tuple[float, float, float]] = {
    (POOLED, "collective, two parameters", "every other size"): (5, 8, 24),
    (POOLED, "collective, chosen form", "every other size"): (4, 6.5, 18),
    (POOLED, "collective, rank law", "2 and 4 ranks to 8"): (6, 9.5, 25),
    (POOLED, "GEMM", "random fifth"): (5.5, 8.5, 25),
    (POOLED, "GEMM", "32 shapes"): (6.5, 9.5, np.nan),
    (POOLED, "GEMM", "largest tenth"): (6.5, 9, 25),
    ("h200_sxm", "GEMM", "random fifth"): (7, 9.5, np.nan),
}
#: Share of held-out points of A100 and H100 that an 80 % interval holds [%], where a bar of errors is set.
INSIDE = (70.0, 90.0)


class AbsentError(ValueError):
    """A source is not there."""


def find_shared_data() -> Path:
    """Folder of other people's measurements: PERFKIT_SHARED_DATA, or beside the checkout."""
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    folder = Path(os.environ.get("PERFKIT_SHARED_DATA", beside))
    if not (folder / "gemm").is_dir():
        raise AbsentError(
            f"the measurements of A100 and H100 are missing: no folder 'gemm' in {str(folder)!r}; name the folder that "
            "holds 'gemm' and 'nccl' in PERFKIT_SHARED_DATA"
        )
    return folder


def make_record(
    system: str, quantity: str, form: str, parameters: int, split: str, errors: Any, *, inside: Any = None
) -> dict[str, Any]:
    """Figures [%] of predicted / measured - 1 on held-out points, and how many lay inside the 80 % interval."""
    figures = summarize_errors(errors)
    record = {"system": system, "quantity": quantity, "form": form, "parameters": parameters, "split": split}
    record |= {"n": int(figures["n"])} | {name: figures[name] for name in (*_FIGURES, "bias")}
    return record | ({} if inside is None else {"inside": round(100 * float(np.mean(inside)), 1)})


def pool_draws(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record from those of several draws: the mean of each figure."""
    names = [name for name in (*_FIGURES, "bias", "inside") if name in records[0]]
    return {**records[0], **{name: round(float(np.mean([row[name] for row in records])), 2) for name in names}}


def is_met(record: Mapping[str, Any]) -> bool | None:
    """Whether a record keeps its bar; None where it has none."""
    bar = BARS.get((record["system"], record["quantity"], record["split"]))
    if bar is None:
        return None
    fine = all(record[name] <= limit for name, limit in zip(_FIGURES, bar, strict=True) if not np.isnan(limit))
    return fine and (record["system"] != POOLED or INSIDE[0] <= record.get("inside", 80.0) <= INSIDE[1])


def format_records(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as a table, with their bars beside them."""
    heads = ("system", "quantity", "split", "form", "parameters", "n", "geomean", "mean", "p95", "bias", "inside")
    cells: list[tuple[str, ...]] = [(*heads, "bar [%]", "met")]
    for row in records:
        bar = BARS.get((row["system"], row["quantity"], row["split"]), ())
        figures = [f"{row[name]:.1f}" for name in _FIGURES] + [f"{row['bias']:+.1f}"]
        figures += [f"{row['inside']:.0f}" if "inside" in row else ""]
        limits = " / ".join("-" if np.isnan(limit) else f"{limit:g}" for limit in bar)
        cells.append((*(str(row[name]) for name in heads[:6]), *figures, limits, MET[is_met(row)]))
    return format_table(cells)
