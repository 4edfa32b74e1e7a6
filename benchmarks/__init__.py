"""Benchmarks: accuracy on held-out runs and on published measurements, learning, placements,
speed."""

import argparse
import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from string import Formatter
from typing import Any, TypeAlias

import numpy as np

from perfkit.calibration.checks import summarize_errors
from perfkit.commands.running import run_command
from perfkit.ground.files import find_reference
from perfkit.ground.targets import write_text
from perfkit.ground.units import format_table, format_time
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.prediction.result import Prediction

Row: TypeAlias = Mapping[str, Any]
Options: TypeAlias = Mapping[str, Row]
#: Words of tables for whether a bar is met.
MET = {True: "yes", False: "NO", None: ""}
#: Options of several benchmarks.
PLATFORM: Options = {"--platform": {"metavar": "P.toml", "help": "calibration of this machine"}}
OUT: Options = {"--json": {"type": Path, "metavar": "OUT", "help": "file for the figures"}}
SAVED: Options = {
    "--saved": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE",
        "help": "print what was measured before",
    }
}
WRITE: Options = {
    "--write": {"action": "store_true", "help": "bring reference_data/published up to date"}
}
_PREDICTED = ("predicted", "low", "high", "predicted_active")


class AbsentError(ValueError):
    """A source is not there."""


def command(options: Options) -> Callable[[Callable[[Any], int | None]], Callable[..., int]]:
    """Make a command of a function that takes the parsed options and returns an exit code, or None
    for 0.

    If its module is the program, the command runs at once, so it is the last definition of its
    file.
    """

    def make(run: Callable[[Any], int | None]) -> Callable[..., int]:
        name = Path(run.__code__.co_filename).stem.replace("__main__", "benchmarks")

        def main(words: Sequence[str] | None = None) -> int:
            parser = argparse.ArgumentParser(prog=name, description=run.__doc__)
            for option, settings in options.items():
                parser.add_argument(option, **settings)
            given = parser.parse_args(words)
            return run_command(lambda: run(given) or 0, name=name)

        if run.__module__ == "__main__":
            sys.exit(main())
        return main

    return make


def find_shared_data(*parts: str) -> Path:
    """Path of a file or folder of other people's measurements: in PERFKIT_SHARED_DATA, or beside
    the checkout."""
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    folder = Path(os.environ.get("PERFKIT_SHARED_DATA", beside))
    if not (folder / "gemm").is_dir():
        raise AbsentError(
            f"the measurements of A100 and H100 are missing: no folder 'gemm' in {str(folder)!r}; name the folder that "
            "holds 'gemm' and 'nccl' in PERFKIT_SHARED_DATA"
        )
    return folder.joinpath(*parts)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(rows: Sequence[Row]) -> str:
    """Text of a table; the first row has all columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def read_numbers(path: Path) -> list[dict[str, Any]]:
    """The rows of a table with numbers as floats, and nan for an empty cell."""

    def convert(text: str) -> str | float:
        try:
            return float(text or "nan")
        except ValueError:
            return text

    return [{key: convert(text) for key, text in row.items()} for row in read_csv(path)]


def read_published(name: str) -> list[dict[str, Any]]:
    """The rows of a table of reference_data/published, as of `read_numbers`."""
    return read_numbers(find_reference("published", name))


def write_published(name: str, rows: Sequence[Row]) -> None:
    """Write the predicted times and intervals of these rows into a table of
    reference_data/published [s]."""
    path = find_reference("published", name)
    fresh = [
        {key: f"{row[key]:.6g}" if key in _PREDICTED else text for key, text in kept.items()}
        for kept, row in zip(read_csv(path), rows, strict=True)
    ]
    write_text(path, write_csv(fresh))


def save_rows(path: Path | None, rows: Sequence[Row], **more: Any) -> None:
    """Write rows with the date, machine and versions; nothing without a path."""
    if path is not None:
        facts = {
            "date": date.today().isoformat(),
            "machine": describe_machine(),
            "versions": list_versions(),
        }
        write_text(
            path, json.dumps({"format": 1, **facts, **more, "records": rows}, indent=1) + "\n"
        )


def state(found: Prediction, measured: float = math.nan) -> dict[str, float]:
    """Predicted time with its 80 % interval [s], and its error against the measured time [-]."""
    low, high = found.interval(0.8)
    return {
        "predicted": found.time,
        "low": low,
        "high": high,
        "measured": measured,
        "error": found.time / measured - 1,
    }


def widen(time: float, spread: float, measured: float) -> dict[str, float]:
    """The figures of `state` from a time [s] and the standard deviation of its logarithm [-]."""
    width, about = (
        np.exp(1.2816 * spread),
        {"predicted": time, "measured": measured, "error": time / measured - 1},
    )
    return about | {"low": time / width, "high": time * width}


def judge(rows: Sequence[Row]) -> dict[str, float]:
    """Errors of ``predicted`` against ``measured``, and the share of ``measured`` between ``low``
    and ``high`` [%]."""
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    inside = np.array([row["low"] <= row["measured"] <= row["high"] for row in rows])
    return {**summarize_errors(errors), "inside": 100 * float(inside.mean())}


def join_passes(passes: Sequence[Row]) -> dict[str, Any]:
    """Measured time and quartiles of a run of `Comparison`, as the means of its passes [s], and
    their disagreement."""
    median, q1, q3 = (
        float(np.mean([one[key] for one in passes])) for key in ("median", "q1", "q3")
    )
    each = [one["median"] for one in passes]
    about = {"measured_s": median, "measured_q1_s": q1, "measured_q3_s": q3, "flagged": False}
    return about | {"passes_s": each, "noise": max(each) / min(each) - 1}


class _Cells(Formatter):
    """Formats cells: ``time`` gives seconds a unit, ``.1fms`` turns them into milliseconds, truth
    becomes a word."""

    def format_field(self, value: Any, spec: str) -> str:
        """The text of one value."""
        if isinstance(value, bool | np.bool_):
            return MET[bool(value)]
        if spec.endswith("ms"):
            return format(1e3 * value, spec[:-2])
        return format_time(value) if spec == "time" else format(value, spec)


def lay_out(rows: Sequence[Row], columns: Mapping[str, str], *, numbers: bool = False) -> str:
    """Rows as text; columns are heads and cells such as ``"{error:+.1%}"``, empty if a value is
    missing."""
    cells = _Cells()
    needed = {
        text: [name for _, name, *_ in cells.parse(text) if name] for text in columns.values()
    }

    def fill(text: str, row: Row) -> str:
        values = [row.get(name) for name in needed[text]]
        return (
            ""
            if any(value is None or value != value for value in values)
            else cells.vformat(text, (), row)
        )

    table = [tuple(fill(text, row) for text in columns.values()) for row in rows]
    return format_table([tuple(columns), *table], numbers=numbers)
