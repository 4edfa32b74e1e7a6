"""What `make bench` measures: accuracy on held-out runs, how it grows with calibration, and speed."""

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
from perfkit.calibration.commands import run_command
from perfkit.ground.files import find_reference, write_text
from perfkit.ground.units import format_table, format_time
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.prediction.result import Prediction

Row: TypeAlias = Mapping[str, Any]
Options: TypeAlias = Mapping[str, Row]
#: How tables say whether a bar is met.
MET = {True: "yes", False: "NO", None: ""}
#: Options that several benchmarks take.
PLATFORM: Options = {"--platform": {"metavar": "P.toml", "help": "calibration of this machine"}}
OUT: Options = {"--json": {"type": Path, "metavar": "OUT", "help": "file for the figures"}}
SAVED: Options = {"--saved": {"type": Path, "nargs": "+", "metavar": "FILE", "help": "print what was measured before"}}
WRITE: Options = {"--write": {"action": "store_true", "help": "bring reference_data/published up to date"}}
_PREDICTED = ("predicted", "low", "high", "predicted_active")


class AbsentError(ValueError):
    """A source is not there."""


def command(options: Options) -> Callable[[Callable[[Any], int | None]], Callable[..., int]]:
    """Make a function a command line: it takes what is given and returns an exit code, none for 0.

    Where its module is the program, the command runs at once, so it stands last in its file.
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
    """A file or folder of other people's measurements: in PERFKIT_SHARED_DATA, or beside the checkout."""
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
    """The rows of a table, words and numbers, nan where there is none."""

    def convert(text: str) -> str | float:
        try:
            return float(text or "nan")
        except ValueError:
            return text

    return [{key: convert(text) for key, text in row.items()} for row in read_csv(path)]


def read_published(name: str) -> list[dict[str, Any]]:
    """The same of a table of reference_data/published."""
    return read_numbers(find_reference("published", name))


def write_published(name: str, rows: Sequence[Row]) -> None:
    """Bring what perfkit predicts of the rows of such a table up to date: times and intervals [s]."""
    path = find_reference("published", name)
    told = [{key: f"{row[key]:.6g}" if key in _PREDICTED else text for key, text in kept.items()}
            for kept, row in zip(read_csv(path), rows, strict=True)]  # fmt: skip
    write_text(path, write_csv(told))


def save_rows(path: Path | None, rows: Sequence[Row], **more: Any) -> None:
    """Write the rows of a table with their day, machine and versions; without a path, nothing."""
    if path is not None:
        facts = {"date": date.today().isoformat(), "machine": describe_machine(), "versions": list_versions()}
        write_text(path, json.dumps({"format": 1, **facts, **more, "records": rows}, indent=1) + "\n")


def state(found: Prediction, measured: float = math.nan) -> dict[str, float]:
    """A predicted time with its 80 % interval [s], and how far it is from the measured one [-]."""
    low, high = found.interval(0.8)
    return {"predicted": found.time, "low": low, "high": high, "measured": measured, "error": found.time / measured - 1}


def widen(time: float, spread: float, measured: float) -> dict[str, float]:
    """The same of a time [s] whose logarithm has a spread [-]."""
    width, about = np.exp(1.2816 * spread), {"predicted": time, "measured": measured, "error": time / measured - 1}
    return about | {"low": time / width, "high": time * width}


def judge(rows: Sequence[Row]) -> dict[str, float]:
    """Errors of times ``predicted`` against ``measured``, and the share of these from ``low`` to ``high`` [%]."""
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    inside = np.array([row["low"] <= row["measured"] <= row["high"] for row in rows])
    return {**summarize_errors(errors), "inside": 100 * float(inside.mean())}


def is_met(figures: Row, limits: Row) -> bool | None:
    """Whether no figure is above its limit; None where there are none."""
    return all(figures[name] <= limit for name, limit in limits.items()) if limits else None


class _Cells(Formatter):
    """Fills cells: ``time`` puts seconds with their unit, ``.1fms`` in milliseconds; what is met is said in words."""

    def format_field(self, value: Any, spec: str) -> str:
        """The text of one value."""
        if isinstance(value, bool | np.bool_):
            return MET[bool(value)]
        if spec.endswith("ms"):
            return format(1e3 * value, spec[:-2])
        return format_time(value) if spec == "time" else format(value, spec)


def lay_out(rows: Sequence[Row], columns: Mapping[str, str], *, numbers: bool = False) -> str:
    """Rows as text by columns: heads, and cells such as ``"{error:+.1%}"``, empty where a value is missing."""
    cells = _Cells()
    needed = {text: [name for _, name, *_ in cells.parse(text) if name] for text in columns.values()}

    def fill(text: str, row: Row) -> str:
        values = [row.get(name) for name in needed[text]]
        return "" if any(value is None or value != value for value in values) else cells.vformat(text, (), row)

    table = [tuple(fill(text, row) for text in columns.values()) for row in rows]
    return format_table([tuple(columns), *table], numbers=numbers)
