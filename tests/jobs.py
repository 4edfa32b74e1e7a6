"""Several tasks in one launch of measuring processes, each of which takes seconds to start."""

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
