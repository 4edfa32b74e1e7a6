"""Several tasks in one launch of measuring processes, each of which takes seconds to start."""

import os
import signal
import time
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from perfkit.measure.processes import run_processes


def run_tasks(tasks: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What a measuring process runs: functions by their names, with arguments."""
    return [resolve_name(name)(**given) for name, given in tasks]


def run_together(task: str, jobs: Sequence[dict[str, Any]], ranks: int) -> list[tuple[Any, ...]]:
    """Run one task with several sets of arguments; for each of them the results of all ranks."""
    job = {"task": "tests.jobs:run_tasks", "tasks": [(task, given) for given in jobs]}
    return list(zip(*run_processes(job, ranks=ranks, timeout=180), strict=True))


class _Past:
    """Jobs that this process has run."""

    jobs = 0


def look() -> dict[str, Any]:
    """What a measuring process sees of itself."""
    import torch

    _Past.jobs += 1
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "leader": os.getsid(0),
        "jobs": _Past.jobs,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "settings": dict(os.environ),
    }


def kill() -> None:
    """End as if the system had no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Never end."""
    time.sleep(300)
