"""Which parts of perfkit work with which PyTorch.

python -m benchmarks.versions --pythons PYTHON [PYTHON ...] --json OUT
python -m benchmarks.versions --saved reference_data/measured/torch-versions.json

Each PYTHON is an interpreter of an environment that has perfkit's dependencies, pytest and one release
of PyTorch. Each part (`benchmarks/helpers/version_parts.py`) is done in a process of its own, on a CPU.
Nothing was fitted.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.helpers.command import OUT, command
from benchmarks.helpers.tables import lay_out
from benchmarks.helpers.version_parts import PARTS

_ROOT = Path(__file__).parents[1]


def try_version(python: str, parts: Sequence[str] = ()) -> dict[str, str]:
    """Do parts with an interpreter.

    Parameters
    ----------
    python : str
        The interpreter.
    parts : sequence of str
        Names in `benchmarks.helpers.version_parts.PARTS`; empty for all.

    Returns
    -------
    answers : dict
        ``torch``: its version. Of each part nothing, if it works, or the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answers.json")
        words = [python, "-m", "benchmarks.helpers.version_parts", str(file), *parts]
        paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            words, cwd=_ROOT, env={**os.environ, "PYTHONPATH": paths}, check=False
        )
        if not file.exists():
            return {"torch": "", "import": f"{python} ended with {done.returncode}"}
        answers: dict[str, str] = json.loads(file.read_text())
    return answers


def _print_table(versions: Sequence[Mapping[str, str]]) -> None:
    """Print a row for each part, and what was said where one does not work."""
    rows, said = [], list[str]()
    columns = {"part": "{part}"}
    for number, version in enumerate(versions):
        columns[version["torch"] or f"interpreter {number + 1}"] = f"{{version_{number}}}"
    for part in PARTS:
        row = {"part": part}
        for number, version in enumerate(versions):
            answer = version.get(part, "not tried")
            if not answer:
                word = "works"
            elif answer == "not tried":
                word = answer
            else:
                said.append(answer)
                word = f"fails ({len(said)})"
            row[f"version_{number}"] = word
        rows.append(row)
    print(lay_out(rows, columns))
    for number, text in enumerate(said, start=1):
        print(f"({number}) {text}")


@command(
    {
        "--pythons": {"nargs": "+", "metavar": "PYTHON", "help": "interpreters to try"},
        "--saved": {"type": Path, "metavar": "FILE", "help": "print what was seen before"},
        **OUT,
    }
)
def main(options: Any) -> int:
    """Print the table of versions."""
    if options.saved is not None:
        answers = json.loads(options.saved.read_text())
    elif options.pythons:
        seen = [try_version(python) for python in options.pythons]
        answers = {"date": date.today().isoformat(), "versions": seen}
    else:
        print("skipped: --pythons names no interpreter, and --saved no file")
        return 0
    if options.json is not None:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")
    _print_table(answers["versions"])
    print(f"seen on {answers['date']}")
    return 0
