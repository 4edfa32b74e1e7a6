"""Training scripts of a folder of yours, recorded without a changed line, and compared with their
own runs on the CPU.

python -m benchmarks.scripts --folder FOLDER [--json OUT]

FOLDER has a file scripts.csv with a row for each script: its name, its folder inside of FOLDER, the
script, its words, those of its own run on the CPU (none if it cannot run there), and its ranks. Data
that a script reads must be there. Nothing is downloaded.
"""

import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.helpers.command import OUT, command
from benchmarks.helpers.script_runs import Job, Run
from benchmarks.helpers.tables import lay_out

#: Longest time of one run [s].
_LONGEST = 600


@dataclass(frozen=True)
class Script:
    """A row of the list.

    Parameters
    ----------
    name : str
        Name in the table.
    folder : str
        Its working folder.
    script : str
        File in this folder.
    words : str
        Its arguments.
    words_on_cpu : str
        Its arguments on a CPU; ``none`` if it cannot run on one.
    ranks : str
        Number of ranks [-].
    """

    name: str
    folder: str
    script: str
    words: str
    words_on_cpu: str
    ranks: str


def _do(job: Job, folder: Path) -> Run:
    """Do a job in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        file, answer = Path(place, "job.json"), Path(place, "answer.json")
        file.write_text(json.dumps({**asdict(job), "answer": str(answer)}))
        root = str(Path(__file__).parents[1])
        paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.helpers.script_runs", str(file)]
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                timeout=_LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Run(f"it takes more than {_LONGEST} s", False, float(_LONGEST), [], 0, 0.0)
        if not answer.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
            return Run(f"it ended without an answer: {said[-1]}", False, 0.0, [], 0, 0.0)
        return Run(**json.loads(answer.read_text()))


def _judge(script: Script, folder: Path) -> dict[str, Any]:
    """The row of the table of one script."""
    ranks = int(script.ranks)
    words, on_cpu = shlex.split(script.words), shlex.split(script.words_on_cpu)
    place = folder / script.folder
    recorded = _do(Job(script.script, words, "cuda", ranks, False, ""), place)
    outcome = "captured"
    if recorded.error:
        outcome = "refused" if recorded.is_refused else "failed"
    same = ""
    if outcome == "captured" and script.words_on_cpu != "none":
        here = _do(Job(script.script, on_cpu, "cpu", 1, False, ""), place)
        real = _do(Job(script.script, on_cpu, "cpu", 1, True, ""), place)
        same = _compare(here, real)
    return {
        "script": script.name,
        "ranks": ranks,
        "outcome": outcome,
        "seconds": recorded.seconds,
        "operations": len(recorded.operations),
        "kinds": recorded.kinds,
        "same": same,
        "said": recorded.error[:160],
    }


def _compare(here: Run, real: Run) -> str:
    """How the operations of a recording are beside those of the real run."""
    if here.error or real.error:
        return f"not run: {(here.error or real.error)[:100]}"
    if here.operations == real.operations:
        return "in order"
    ours, theirs = sorted(here.operations), sorted(real.operations)
    if ours == theirs:
        return "in another order"
    missing = [name for name in dict.fromkeys(theirs) if theirs.count(name) > ours.count(name)]
    added = [name for name in dict.fromkeys(ours) if ours.count(name) > theirs.count(name)]
    text = f"{len(ours)} and {len(theirs)}"
    return (
        f"{text}: lacks {', '.join(missing[:3]) or 'none'}; more {', '.join(added[:3]) or 'none'}"
    )


@command(
    {
        "--folder": {"type": Path, "metavar": "FOLDER", "help": "scripts, with their scripts.csv"},
        **OUT,
    }
)
def main(options: Any) -> int:
    """Print the table."""
    if options.folder is None or not (options.folder / "scripts.csv").is_file():
        print(
            "skipped: --folder names no folder with a scripts.csv; scripts of others are not kept here"
        )
        return 0
    with (options.folder / "scripts.csv").open() as file:
        scripts = [Script(**row) for row in csv.DictReader(file)]
    rows = []
    for script in scripts:
        rows.append(_judge(script, options.folder.resolve()))
        print(script.name, rows[-1]["outcome"], file=sys.stderr)
    columns = {
        "script": "{script}",
        "ranks": "{ranks}",
        "outcome": "{outcome}",
        "CPU seconds": "{seconds:.1f}",
        "operations": "{operations}",
        "kinds": "{kinds}",
        "beside its own run": "{same}",
        "what is said": "{said}",
    }
    print(lay_out(rows, columns))
    captured = sum(row["outcome"] == "captured" for row in rows)
    print(f"\ncaptured {captured} of {len(rows)}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0
