"""What `make bench` measures: accuracy on held-out runs, how it grows with calibration, and speed."""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from perfkit.ground.files import write_text
from perfkit.measure.machine import describe_machine, list_versions


def save_rows(path: Path | None, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the rows of a table with their day, machine and versions; without a path, nothing."""
    if path is not None:
        facts = {"date": date.today().isoformat(), "machine": describe_machine(), "versions": list_versions()}
        write_text(path, json.dumps({"format": 1, **facts, **more, "records": rows}, indent=1) + "\n")
