"""Logs of many rows, tables and runs: the work grows with their number, no faster."""

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from perfkit.ground import progress
from perfkit.platform import sources
from perfkit.platform.sources import CONTRADICTION
from perfkit.readers.nccl import parse_nccl_tests, read_nccl_tests

HEAD = """# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592
"""
RANKS = "".join(
    f"#  Rank {rank} Group  0 Pid 1 on host device {rank} [0x07] NVIDIA H100 80GB HBM3\n"
    for rank in range(8)
)
COLUMNS = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
END = "# Avg bus bandwidth : 100\n"


def write_log(rows: int, slowdown: float = 1.0) -> str:
    """A log of all_reduce_perf on 8 ranks: 20 µs and 250 GB/s, times a slowdown."""
    lines = []
    for row in range(1, rows + 1):
        nbytes = 4096 * row * row
        time = slowdown * (20 + nbytes / 250e3)
        rate = nbytes / time / 1e3
        half = f"{time:.3f} {rate:.3f} {1.75 * rate:.3f} 0"
        lines.append(f"{nbytes} {nbytes // 4} float sum -1 {half} {half}\n")
    return HEAD + RANKS + COLUMNS + "".join(lines) + END


def count_calls(work: Callable[[], object]) -> int:
    """Calls of functions of Python while something runs."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_work_of_reading_grows_with_rows_and_tables() -> None:
    parse_nccl_tests(write_log(2))  # what is kept for all logs
    for few, many in (
        (write_log(60), write_log(120)),
        (20 * write_log(3), 40 * write_log(3)),
    ):
        calls_of_few = count_calls(lambda text=few: parse_nccl_tests(text))
        calls_of_many = count_calls(lambda text=many: parse_nccl_tests(text))
        assert calls_of_many < 2.1 * calls_of_few


def test_work_of_a_calibration_grows_with_logs(tmp_path: Path) -> None:
    for number in range(12):
        for folder in ("few", "many")[number >= 6 :]:
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{number:02d}.log").write_text(write_log(4))

    def calibrate(folder: str) -> int:
        logs = tmp_path / folder
        return count_calls(lambda: pk.calibrate(nccl_logs=logs, base="h100-sxm-8"))

    calibrate("few")  # what is kept for all calibrations
    assert calibrate("many") < 2.1 * calibrate("few")


# Runs that contradict each other are found without comparing all of them.


def make_runs(times: np.ndarray) -> pl.DataFrame:
    """Rows of runs, shape (runs, sizes); NaN where a run lacks a size."""
    rows = []
    for run, of_run in enumerate(times.tolist()):
        for size, seconds in enumerate(of_run):
            if not math.isnan(seconds):
                rows.append((f"{run:05d}.log", 2**size, seconds))
    return pl.DataFrame(rows, ["file", "nbytes", "seconds"], orient="row")


def compare_all_pairs(times: np.ndarray) -> tuple[str, str, float] | None:
    """The pair of runs with the largest median ratio above the limit, each compared with each."""
    pairs = []
    for slow, of_slow in enumerate(times):
        for fast, of_fast in enumerate(times):
            ratios = (of_slow / of_fast)[~np.isnan(of_slow / of_fast)]
            if slow != fast and len(ratios) >= 2 and np.median(ratios) > CONTRADICTION:
                pairs.append((float(np.median(ratios)), f"{slow:05d}.log", f"{fast:05d}.log"))
    if not pairs:
        return None
    ratio, slow_run, fast_run = max(pairs)
    return slow_run, fast_run, ratio


@pytest.mark.parametrize("missing", [0.0, 0.4])
@pytest.mark.parametrize("scatter", [0.05, 0.3, 0.6])
def test_the_worst_pair_of_runs_is_that_of_all_pairs(missing: float, scatter: float) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        times = np.exp(scatter * rng.standard_normal((9, 4))).round(1 + seed % 2)
        times[rng.random(times.shape) < missing] = math.nan
        rows = make_runs(times)
        found = sources._find_contradiction(rows)
        expected = compare_all_pairs(times)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found[:2] == expected[:2]
            assert found.ratio == pytest.approx(expected[2])


def test_thousands_of_equal_runs_are_compared_with_the_fastest_times_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = 1.0 + 0.05 * np.random.default_rng(0).random((3000, 3))
    monkeypatch.setattr(np, "nanmedian", lambda *_, **__: pytest.fail("runs are compared"))
    assert sources._find_contradiction(make_runs(times)) is None


# What takes long shows a line on a terminal.


class Terminal(io.StringIO):
    """An error stream that a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("delay", "is_shown", "words"),
    [
        (0.0, True, ("read logs", "fit curves")),
        (0.0, False, ()),
        (2.0, True, ()),
    ],
    ids=["long", "told not to", "short"],
)
def test_long_calibrations_show_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float, is_shown: bool, words: tuple
) -> None:
    (tmp_path / "a.log").write_text(write_log(4))
    (tmp_path / "b.log").write_text(write_log(5))
    monkeypatch.setattr(progress, "_DELAY", delay)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    pk.calibrate(nccl_logs=tmp_path, base="h100-sxm-8", progress=is_shown)
    read_nccl_tests(tmp_path, progress=is_shown)
    for word in words:
        assert word in terminal.getvalue()
    if not words:
        assert terminal.getvalue() == ""
