"""What `make bench` measures: accuracy on held-out runs, how it grows with calibration, and speed."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

from perfkit.calibration.commands import run_command
from perfkit.ground.files import write_text
from perfkit.measure.machine import describe_machine, list_versions

Options: TypeAlias = Mapping[str, Mapping[str, Any]]
#: How tables say whether a bar is met.
MET = {True: "yes", False: "NO", None: ""}
#: Options that several benchmarks take.
PLATFORM: Options = {"--platform": {"metavar": "P.toml", "help": "calibration of this machine"}}
OUT: Options = {"--json": {"type": Path, "metavar": "OUT", "help": "file for the figures"}}


def make_command(name: str, text: str, run: Callable[[Any], int | None], options: Options) -> Callable[..., int]:
    """Make the command line of a benchmark; `run` takes what is given and returns an exit code, none for 0."""

    def main(words: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(prog=name, description=text)
        for option, settings in options.items():
            parser.add_argument(option, **settings)
        given = parser.parse_args(words)
        return run_command(lambda: run(given) or 0, name=name)

    return main


def save_rows(path: Path | None, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the rows of a table with their day, machine and versions; without a path, nothing."""
    if path is not None:
        facts = {"date": date.today().isoformat(), "machine": describe_machine(), "versions": list_versions()}
        write_text(path, json.dumps({"format": 1, **facts, **more, "records": rows}, indent=1) + "\n")
