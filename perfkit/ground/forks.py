"""Processes made by fork: Polars answers queries with threads, which such a process does not
have."""

import os
import sys
from contextlib import suppress
from pathlib import Path


class ForkError(RuntimeError):
    """A query in a process made by fork that would wait for ever."""


class _Threads:
    """Whether the threads of Polars ran in the process that this one was forked from."""

    ran_before_fork = False
    lost = False


def _has_polars_threads() -> bool:
    """Whether Polars has started its threads in this process; they start with the first query."""
    if "polars" not in sys.modules:
        return False
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # only Linux tells the names of threads
        return True
    for name in tasks.glob("*/comm"):
        with suppress(OSError):  # a thread that has ended meanwhile
            if name.read_text().startswith("polars-0"):
                return True
    return False


def _look() -> None:
    _Threads.ran_before_fork = _Threads.lost or _has_polars_threads()


def _lose() -> None:
    _Threads.lost = _Threads.ran_before_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_look, after_in_child=_lose)


def check_threads() -> None:
    """Refuse to ask Polars in a process where its answer never comes.

    Raises
    ------
    ForkError
        In a process made by fork from one in which Polars had answered a query.
    """
    if _Threads.lost:
        raise ForkError(
            "this process was made by fork, and Polars, which made tables before the fork, would "
            "wait here for ever; start processes with multiprocessing.get_context('spawn')"
        )
