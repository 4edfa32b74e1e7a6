"""Tables and files that benchmarks read and write."""

import csv
import io
import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.helpers.tables import Row
from perfkit.ground.files import find_reference
from perfkit.ground.targets import write_text
from perfkit.measure.machine import describe_machine, list_versions

#: Columns of published tables that perfkit predicts.
_PREDICTED = ("predicted", "low", "high", "predicted_active")


class AbsentError(ValueError):
    """A source is not there."""


def find_shared_data(*parts: str) -> Path:
    """Path of a file or folder of other people's measurements: in PERFKIT_SHARED_DATA, or beside
    the checkout."""
    checkout = Path(__file__).resolve().parents[2]
    beside = checkout.parent / "shared" / "data"
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


def _read_cell(text: str) -> str | float:
    """A number if the cell holds one, nan if it is empty, else its text."""
    try:
        return float(text or "nan")
    except ValueError:
        return text


def read_numbers(path: Path) -> list[dict[str, Any]]:
    """The rows of a table with numbers as floats, and nan for an empty cell."""
    rows = []
    for cells in read_csv(path):
        rows.append({column: _read_cell(text) for column, text in cells.items()})
    return rows


def read_published(name: str) -> list[dict[str, Any]]:
    """The rows of a table of reference_data/published, as of `read_numbers`."""
    return read_numbers(find_reference("published", name))


def write_published(name: str, rows: Sequence[Row]) -> None:
    """Write the predicted times and intervals of these rows into a table of
    reference_data/published [s]."""
    path = find_reference("published", name)
    table = read_csv(path)
    for cells, row in zip(table, rows, strict=True):
        for column in cells:
            if column in _PREDICTED:
                cells[column] = f"{row[column]:.6g}"
    write_text(path, write_csv(table))


def save_rows(path: Path | None, rows: Sequence[Row], **more: Any) -> None:
    """Write rows with the date, machine and versions; nothing without a path."""
    if path is None:
        return
    content = {
        "format": 1,
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": list_versions(),
        **more,
        "records": rows,
    }
    write_text(path, json.dumps(content, indent=1) + "\n")
