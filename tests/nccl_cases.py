"""Runs of nccl-tests with invented figures, as logs and as cases of a diagnosis.

A curve is a + f n / B: a start-up, and the bytes that each rank moves over a rate. A case has the rows
and facts of its log, what is expected of it, and verdicts by plain rules, so that signatures of causes
are tested apart from what a diagnosis expects.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from perfkit.diagnosis.records import Case, Expectation, Range, Verdict, Word
from perfkit.models.collectives import bus_factor
from perfkit.readers.nccl import LogWarning, read_logs

HEADER = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong"
)
POWERS = tuple(range(3, 34))
#: Largest message of start-ups, and smallest of bandwidth, of these cases [B].
SMALL = 2**16
LARGE = 2**27
#: Slower than expected by this is slow, for small messages and for others [-].
SLOW_SMALL = 1.8
SLOW = 1.12
Curve = Callable[[float], float]


def follow(startup: float, rate: float) -> Curve:
    """Times of messages by the bytes that each rank moves [s]."""
    return lambda moved: startup + moved / rate


@dataclass(frozen=True)
class Run:
    """A run whose log is written."""

    curve: Curve
    device: str = "NVIDIA A100-SXM4-80GB"
    operation: str = "all_reduce"
    hosts: tuple[str, ...] = ("oak-1",)
    local: int = 8
    powers: Sequence[int] = POWERS
    said: tuple[str, ...] = ()
    buses: tuple[str, ...] = ()
    command: str = ""
    in_place: float = 1.0
    wrong: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.local * len(self.hosts)

    def write(self) -> str:
        """The log."""
        name = self.operation.replace("all_to_all", "alltoall")
        lines = [self.command] if self.command else []
        lines += [
            f"# Collective test starting: {name}_perf",
            "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 "
            "iters: 20 agg iters: 1 validation: 1 graph: 0",
            "#",
            "# Using devices",
        ]
        for rank in range(self.ranks):
            host = self.hosts[rank // self.local]
            device = rank % self.local
            bus = self.buses[rank] if self.buses else f"0x{16 * device + 7:02x}"
            kind = self.devices[rank] if self.devices else self.device
            lines.append(
                f"#  Rank {rank:2d} Group  0 Pid {3000 + rank:6d} on {host} device {device:2d} [{bus}] {kind}"
            )
        lines += [*self.said, "#", HEADER]
        factor = float(bus_factor(self.operation, self.ranks))
        reduction = "sum" if self.operation in ("all_reduce", "reduce_scatter") else "none"
        for power in self.powers:
            nbytes = 2**power
            row = f"{nbytes:12d} {nbytes // 4:13d}     float {reduction:>7}      -1"
            wrong = 3 if power in self.wrong else 0
            for share in (1.0, self.in_place):
                seconds = share * self.curve(factor * nbytes)
                algbw = nbytes / seconds / 1e9
                row += f" {1e6 * seconds:12.3f} {algbw:9.4f} {factor * algbw:9.4f} {wrong}"
            lines.append(row)
        lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3", "#"]
        return "\n".join(lines) + "\n"


def say(text: str, host: str = "oak-1", device: int = 0) -> str:
    """A line of NCCL INFO."""
    return f"{host}:900:9{device}1 [{device}] NCCL INFO {text}"


def name_range(nbytes: int) -> Range:
    """The range of a size."""
    if nbytes <= SMALL:
        return Range.LATENCY
    return Range.BANDWIDTH if nbytes >= LARGE else Range.MIDDLE


def make_case(folder: Path, run: Run, usual: Curve, expectation: Expectation) -> Case:
    """The case of a run, beside the curve that is expected of it."""
    path = folder / "run.log"
    path.write_text(run.write(), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogWarning)
        logs = read_logs(path)
    factor = float(bus_factor(run.operation, run.ranks))
    rows = logs.rows.sort("nbytes", "in_place", "line")
    expected = [usual(factor * nbytes) for nbytes in rows["nbytes"]]
    ranges = [name_range(nbytes) for nbytes in rows["nbytes"]]
    words = []
    for seconds, time, busbw, sizes in zip(
        rows["seconds"], expected, rows["busbw"], ranges, strict=True
    ):
        most = SLOW_SMALL if sizes is Range.LATENCY else SLOW
        word = Word.SLOW if seconds > most * time else Word.EXPECTED
        if expectation.limit is not None and busbw > expectation.limit:
            word = Word.TOO_GOOD
        words.append(word)
    rows = rows.with_columns(
        pl.Series("sizes", [sizes.value for sizes in ranges]),
        pl.Series("expected_s", expected),
        pl.Series("low_s", [0.9 * time for time in expected]),
        pl.Series("high_s", [1.1 * time for time in expected]),
        pl.Series("slow_s", [SLOW * time for time in expected]),
        pl.lit(None, pl.Float64).alias("line_share"),
        pl.Series("verdict", [word.value for word in words]),
    )
    verdicts = tuple(
        judge(run.operation, sizes, rows.filter(pl.col("sizes") == sizes.value))
        for sizes in Range
        if sizes.value in rows["sizes"]
    )
    nodes = len(run.hosts)
    (facts,) = logs.facts
    return Case("run.log", run.operation, run.ranks, nodes, rows, facts, expectation, verdicts)


def judge(operation: str, sizes: Range, rows: pl.DataFrame) -> Verdict:
    """The verdict on a range: that of most of its rows, of bandwidth that of the largest size."""
    words = rows["verdict"].to_list()
    word = max(sorted(set(words)), key=words.count)
    if sizes is Range.BANDWIDTH:
        word = words[-1]
    shown = rows.row(0 if sizes is Range.LATENCY else -1, named=True)
    return Verdict(
        operation,
        sizes,
        Word(word),
        rows["nbytes"][0],
        rows["nbytes"][-1],
        shown["nbytes"],
        shown["seconds"],
        shown["busbw"],
        shown["expected_s"],
        shown["low_s"],
        shown["high_s"],
    )
