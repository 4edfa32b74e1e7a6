"""How long perfkit takes beside an older commit: processor time of the same calls, in one run.

    python -m benchmarks.beside COMMIT [--rounds N]

The older commit is unpacked into a folder of its own. Two processes, which differ in their
PYTHONPATH and their folder of bytecode alone, take turns, so that a busy moment of the machine
meets both. Imports are timed as a user has them, with stored bytecode, whatever the environment
sets: each commit has a folder of bytecode of its own, which a first start fills that does not count.
"""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.helpers.beside_calls import CALLS, FRESH
from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.ground.units import check_positive, format_time

ROOT = Path(__file__).parents[1]
_SCRIPT = ROOT / "benchmarks" / "helpers" / "beside_calls.py"


class Runner:
    """A process that runs calls of one commit.

    Parameters
    ----------
    checkout : Path
        Folder in which this commit lies.
    bytecode : Path
        Folder in which Python stores its compiled modules.
    """

    def __init__(self, checkout: Path, bytecode: Path) -> None:
        self.checkout = checkout
        threads = dict.fromkeys(("OMP_NUM_THREADS", "POLARS_MAX_THREADS"), "1")
        places = {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": str(bytecode)}
        environment = {**os.environ, **threads, **places}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            env=environment,
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, number: int) -> float:
        """Processor time of one call [s]; an error if the commit has no such call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {number}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise ValueError(f"{name} fails on {self.checkout}; its error is above")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def unpack(commit: str, folder: Path) -> None:
    """Unpack a commit of this repository into a folder."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        reason = packed.stderr.decode().strip().splitlines()[-1]
        raise ValueError(f"commit is {commit!r}; git says {reason}; take one of git log")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


@dataclass(frozen=True)
class Commit:
    """A commit: the folder in which it lies, and the folder of its compiled modules."""

    checkout: Path
    bytecode: Path

    def start(self) -> Runner:
        """A process that runs its calls."""
        return Runner(self.checkout, self.bytecode)


def _time_fresh(commit: Commit, name: str, number: int) -> float:
    """Processor time of a call in a process of its own [s]."""
    runner = commit.start()
    seconds = runner.run(name, number)
    runner.close()
    return seconds


def _warm_up(runners: Sequence[Runner]) -> None:
    """Import modules and load platforms in every process."""
    for name in CALLS:
        if name not in FRESH:
            for runner in runners:
                runner.run(name, 0)


def time_calls(
    checkouts: Sequence[Path], bytecodes: Sequence[Path], rounds: int
) -> dict[str, list[list[float]]]:
    """Time all calls.

    Parameters
    ----------
    checkouts : sequence of Path
        Folders of commits.
    bytecodes : sequence of Path
        Folder of the bytecode of each commit.
    rounds : int
        How often each call is timed [-].

    Returns
    -------
    seconds : dict of str to list of list of float
        By call, and then by commit: one time for each round [s].
    """
    commits = [Commit(*folders) for folders in zip(checkouts, bytecodes, strict=True)]
    for commit in commits:  # stores the bytecode of what a first prediction imports
        _time_fresh(commit, "predict_first", 0)
    seconds: dict[str, list[list[float]]] = {}
    for name in CALLS:
        seconds[name] = [list[float]() for _ in commits]
    runners = [commit.start() for commit in commits]
    try:
        _warm_up(runners)
        for number in range(1, rounds + 1):
            order = list(range(len(commits)))
            if number % 2 == 0:
                order.reverse()
            for name in CALLS:
                for place in order:
                    if name in FRESH:
                        time = _time_fresh(commits[place], name, number)
                    else:
                        time = runners[place].run(name, number)
                    seconds[name][place].append(time)
    finally:
        for runner in runners:
            runner.close()
    return seconds


def format_times(seconds: dict[str, list[list[float]]], commit: str) -> str:
    """Medians of both commits, and their ratio, as a table."""
    rows = []
    for name, (older, newer) in seconds.items():
        before = median(older)
        now = median(newer)
        times = {"before": format_time(before), "now": format_time(now)}
        rows.append({"call": name, **times, "ratio": now / before})
    heads = {"call": "{call}", commit: "{before}", "now": "{now}", "ratio": "{ratio:.2f}"}
    return lay_out(rows, heads)


@command(
    {
        "commit": {"metavar": "COMMIT", "help": "the older commit"},
        "--rounds": {"type": int, "default": 9, "help": "how often each call is timed"},
    }
)
def main(given: Any) -> None:
    """Processor time of perfkit beside an older commit."""
    rounds = int(check_positive("--rounds", given.rounds, integer=True))
    with TemporaryDirectory() as folder:
        older = Path(folder, "older")
        unpack(given.commit, older)
        bytecodes = [Path(folder, "bytecode_older"), Path(folder, "bytecode_now")]
        print(format_times(time_calls([older, ROOT], bytecodes, rounds), given.commit))
