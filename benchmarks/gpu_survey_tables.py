"""What `benchmarks.gpu_survey` makes of its times: one file of all passes, and tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.ground.targets import write_text

#: Facts of the machine in the first line of a pass.
_FACTS = ("device", "memory", "cache", "machine", "versions", "date")
#: Columns of the rows of a saved survey.
COLUMNS = ("section", "name", "dtype", "sizes", "median_s", "spread", "failed")


@dataclass(frozen=True)
class Timing:
    """A kernel of a survey with its times.

    Parameters
    ----------
    section, name, dtype : str
        Section of the survey, what ran, and the number format of its operands.
    sizes : mapping of str to float
        What decides the time [-].
    medians : tuple of float
        Median time of each pass [s]; empty if it failed.
    spreads : tuple of float
        Largest over smallest sample of each pass, minus one [-].
    failed : str
        Why it could not run; empty if it did.
    """

    section: str
    name: str
    dtype: str
    sizes: Mapping[str, float]
    medians: tuple[float, ...] = ()
    spreads: tuple[float, ...] = ()
    failed: str = ""

    @property
    def seconds(self) -> float:
        """Mean of the passes [s]."""
        return float(np.mean(self.medians))

    @property
    def noise(self) -> float:
        """Largest over smallest pass, minus one [-]."""
        return max(self.medians) / min(self.medians) - 1


@dataclass(frozen=True)
class Survey:
    """All kernels of a survey, and the facts of the machine: device, memory and cache [B], versions,
    date."""

    facts: Mapping[str, Any]
    timings: tuple[Timing, ...]


def join_survey(files: Sequence[Path]) -> Survey:
    """Join passes over the same kernels, each of which `benchmarks.gpu_survey_points.measure` wrote.

    A kernel counts if every pass has timed it. Facts are those of the first file.
    """
    facts, passes = dict[str, Any](), list[dict[str, Any]]()
    for path in files:
        rows = dict[str, Any]()
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "section" in row:
                key = json.dumps([row[name] for name in ("section", "name", "dtype", "sizes")])
                rows[key] = row
            elif not facts:
                facts = {name: row[name] for name in _FACTS if name in row}
        passes.append(rows)
    timings = []
    for key in sorted(set.intersection(*map(set, passes))):
        same = [each[key] for each in passes]
        section, name, dtype, sizes = json.loads(key)
        if failed := [row["failed"] for row in same if "failed" in row]:
            timings.append(Timing(section, name, dtype, sizes, failed=failed[0]))
            continue
        medians = tuple(float(f"{np.median(row['samples']):.4g}") for row in same)
        spreads = tuple(round(max(row["samples"]) / min(row["samples"]) - 1, 4) for row in same)
        timings.append(Timing(section, name, dtype, sizes, medians, spreads))
    return Survey(facts, tuple(timings))


def write_survey(survey: Survey, path: Path) -> None:
    """Write a survey as JSON, a line for each kernel."""
    head = {"format": 1, **survey.facts, "columns": COLUMNS}
    rows = []
    for timing in survey.timings:
        fields: list[Any] = [timing.section, timing.name, timing.dtype, timing.sizes]
        fields += [timing.medians, timing.spreads, timing.failed]
        rows.append(json.dumps(fields, separators=(",", ":")))
    text = json.dumps(head, indent=1).removesuffix("\n}")
    write_text(path, text + ',\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n")


def read_survey(path: Path) -> Survey:
    """Read what `write_survey` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != 1 or tuple(data.get("columns", ())) != COLUMNS:
        raise ValueError(
            f"saved is {str(path)!r}, which is no survey; name a file that --convert wrote"
        )
    timings = []
    for section, name, dtype, sizes, medians, spreads, failed in data["rows"]:
        timings.append(Timing(section, name, dtype, sizes, tuple(medians), tuple(spreads), failed))
    facts = {name: data[name] for name in _FACTS if name in data}
    return Survey(facts, tuple(timings))


def print_tables(survey: Survey) -> None:
    """Print how many kernels each section has, and how far its passes differ."""
    for section in dict.fromkeys(timing.section for timing in survey.timings):
        noises = [t.noise for t in survey.timings if t.section == section and not t.failed]
        print(f"{section:<14} {len(noises):4d} kernels, passes differ by {np.median(noises):.1%}")
