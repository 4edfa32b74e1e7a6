"""Training scripts of others, recorded without a changed line, and compared with their own runs on
the CPU.

python -m benchmarks.scripts --saved reference_data/measured/scripts.json
python -m benchmarks.scripts --folder FOLDER [--only NAME ...] [--json OUT]

The first prints what was seen before. The second records the scripts of a folder, which has a file
scripts.csv with a row for each: its name, its folder inside of FOLDER, the script, its words, those
of its own run on the CPU (none if it cannot run there), and its ranks. Data that a script reads must
be there. Nothing is downloaded, and scripts of others are not kept here.

A script is captured if its operations are those of its own run on the CPU, in order, over the
iteration from its third to its fourth update. Where it cannot run without GPUs, the work of the
operations that PyTorch's counter knows is compared with that counter.
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

from benchmarks.helpers.command import OUT, SAVED, command
from benchmarks.helpers.script_runs import Job, Run
from benchmarks.helpers.tables import lay_out

#: Longest time of one run [s].
_LONGEST = 3600
#: FLOP that PyTorch's counter may give more or less [-]: the bar of the issue that asked for it.
_TOLERANCE = 0.01
#: Ten public scripts that were named on 2026-11-28, before any of them had been run by perfkit. Those
#: of issue trackers and tutorials that were named earlier stand beside them in the table.
NAMED_BEFORE_THEIR_FIRST_RUN = (
    "pytorch/examples: reinforcement_learning/actor_critic.py",
    "pytorch/examples: mnist_rnn/main.py",
    "pytorch/examples: siamese_network/main.py",
    "pytorch/examples: super_resolution/main.py",
    "trl: trl/scripts/sft.py",
    "torch: distributed/tensor/examples/convnext_example.py",
    "torch: distributed/checkpoint/examples/stateful_example.py",
    "cleanrl: ppo.py",
    "ultralytics: yolo detect train",
    "pykeen: pykeen train",
)


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
            return Run(f"it takes more than {_LONGEST} s", False, float(_LONGEST), [], 0)
        if not answer.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
            return Run(f"it ended without an answer: {said[-1]}", False, 0.0, [], 0)
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
    if outcome == "captured" and script.words_on_cpu == "none":
        same = _compare_work(recorded)
    elif outcome == "captured":
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


def _compare_work(recorded: Run) -> str:
    """How the work of a recording is beside PyTorch's counter."""
    if not recorded.counted:
        return "no operation that PyTorch counts"
    ratio = recorded.flops / recorded.counted
    text = f"FLOP {ratio:.3f} of PyTorch's counter"
    return text if abs(ratio - 1) <= _TOLERANCE else f"not shown: {text}"


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


def _print(rows: list[dict[str, Any]]) -> None:
    """Print the table, and how many were captured."""
    shown = [{"first": "", "note": "", **row} for row in rows]
    for row in shown:
        row["note"] = row["note"] or row["said"][:160]
    columns = {
        "script": "{script}",
        "ranks": "{ranks}",
        "outcome": "{outcome}",
        "CPU seconds": "{seconds:.1f}",
        "operations": "{operations}",
        "kinds": "{kinds}",
        "shown by": "{same}",
        "at first": "{first}",
        "why, and what stood in": "{note}",
    }
    print(lay_out(shown, columns))
    captured = [row for row in rows if row["outcome"] == "captured"]
    running = sum(row["outcome"] != "fails by itself" for row in rows)
    equal = sum(row["same"] == "in order" for row in captured)
    counted = sum(row["same"].startswith("FLOP") for row in captured)
    print(
        f"\ncaptured {len(captured)} of {running} that run with this PyTorch: {equal} with the operations of their own run, in order; "
        f"{counted} with the FLOP of PyTorch's counter"
    )


@command(
    {
        "--folder": {"type": Path, "metavar": "FOLDER", "help": "scripts, with their scripts.csv"},
        "--only": {"nargs": "+", "metavar": "NAME", "help": "names of the list; default: all"},
        **SAVED,
        **OUT,
    }
)
def main(options: Any) -> int:
    """Print the table."""
    if options.saved:
        _print([row for file in options.saved for row in json.loads(file.read_text())])
        return 0
    if options.folder is None or not (options.folder / "scripts.csv").is_file():
        print(
            "skipped: --folder names no folder with a scripts.csv; scripts of others are not kept here"
        )
        return 0
    with (options.folder / "scripts.csv").open() as file:
        scripts = [Script(**row) for row in csv.DictReader(file)]
    names = [script.name for script in scripts]
    unknown = [name for name in options.only or [] if name not in names]
    if unknown:
        raise ValueError(f"--only is {unknown[0]!r}; scripts.csv has {', '.join(names)}")
    rows = []
    for script in scripts:
        if options.only and script.name not in options.only:
            continue
        rows.append(_judge(script, options.folder.resolve()))
        print(script.name, rows[-1]["outcome"], file=sys.stderr)
    _print(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0
