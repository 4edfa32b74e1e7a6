"""Fuzzer of logs of other benchmarks than nccl-tests: what a table of any of them says of operation,
ranks, size and time is read, whatever stands around it."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from perfkit.models.collectives import bus_factor
from perfkit.readers.nccl import read_nccl_tests
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense


class Sample(NamedTuple):
    """A size and its time."""

    nbytes: int  # of a part of one rank, or of the whole buffer, as the program counts [B]
    seconds: float


class Run(NamedTuple):
    """What a benchmark measured."""

    operation: str
    ranks: int
    samples: tuple[Sample, ...]

    def command(self, program: str) -> str:
        """How it was started."""
        return f"mpirun -n {self.ranks} {program}"

    def algbw(self, sample: Sample, times: int) -> float:
        """Algorithm bandwidth [GB/s]."""
        return times * sample.nbytes / sample.seconds / 1e9

    def busbw(self, sample: Sample, times: int) -> float:
        """Bus bandwidth [GB/s]."""
        return float(bus_factor(self.operation, self.ranks)) * self.algbw(sample, times)


class DialectWriter(NamedTuple):
    """How a benchmark prints a run, and which operations count the part of one rank."""

    write: Callable[[Run, int], Sequence[str]]
    by_part: tuple[str, ...] = ()


NAMES = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reduce_scatter"}


def write_oneccl(run: Run, times: int) -> list[str]:
    """As oneCCL's benchmark."""
    head = "#bytes #repetitions t_min[usec] t_max[usec] t_avg[usec] stddev[%]"
    lines = [f"# Benchmarking: {NAMES[run.operation]}", f"# #processes: {run.ranks}", head]
    for sample in run.samples:
        time = 1e6 * sample.seconds
        lines.append(f"{sample.nbytes} 16 {0.9 * time:.2f} {1.1 * time:.2f} {time:.2f} 0.10")
    return [*lines, "# All done"]


def write_osu(run: Run, times: int) -> list[str]:
    """As the OSU micro-benchmarks."""
    title = NAMES[run.operation].capitalize()
    head = [f"# OSU MPI-CUDA {title} Latency Test v7.1", "# Size       Avg Latency(us)"]
    rows = [f"{sample.nbytes:<12} {1e6 * sample.seconds:.2f}" for sample in run.samples]
    return [run.command("osu"), *head, *rows]


def write_hccl(run: Run, times: int) -> list[str]:
    """As HCCL Test."""
    lines = [run.command(f"./bin/{run.operation}_test -b 8 -e 1G")]
    lines.append("data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:")
    for sample in run.samples:
        rate = run.algbw(sample, times)
        lines.append(f"{sample.nbytes} | {1e6 * sample.seconds:.2f} | {rate:.5f} | success")
    return lines


def write_deepspeed(run: Run, times: int) -> list[str]:
    """As DeepSpeed's benchmark."""
    lines = [f"---- Performance of {run.operation} on {run.ranks} devices -----------------"]
    lines.append("Size (Bytes) Description Duration (us) Throughput (GBps) BusBW (GBps)")
    for sample in run.samples:
        rates = f"{run.algbw(sample, times):.3f} {run.busbw(sample, times):.3f}"
        figures = f"{sample.nbytes // 4}x4 {1e6 * sample.seconds:.3f}"
        lines.append(f"{sample.nbytes} {figures} {rates}")
    return lines


def write_param(run: Run, times: int) -> list[str]:
    """As PARAM's comms.py."""
    lines = [f"\t PARAM COMM environment: {{'world_size': {run.ranks}, 'local_size': {run.ranks}}}"]
    for sample in run.samples:
        time = f"{1e6 * sample.seconds:.1f}"
        rates = f"{run.algbw(sample, times):.3f} {run.busbw(sample, times):.3f}"
        figures = " ".join([time] * 5)
        lines.append(f"\tCOMMS-RES-{run.operation}-float32 {sample.nbytes} 4 {figures} {rates}")
    return lines


WRITERS = (
    DialectWriter(write_oneccl, ("all_gather",)),
    DialectWriter(write_osu, ("all_gather",)),
    DialectWriter(write_hccl),
    DialectWriter(write_deepspeed, ("all_gather",)),
    DialectWriter(write_param),
)
NOISE = ("", "job 17 started", "[2026-01-01 10:00:00,000] [INFO] [launch.py:350] ready", "PASSED")


def draw_run(rng: Rng, operations: Sequence[str]) -> Run:
    """A run of sizes and times that print with all of their digits."""
    powers = range(10, 11 + int(rng.integers(1, 16)))
    samples = []
    for power in powers:
        seconds = round(20 + 2**power / 10 ** rng.uniform(3, 5)) * 1e-6
        samples.append(Sample(2**power, seconds))
    return Run(choose(rng, operations), int(choose(rng, (2, 4, 8, 16))), tuple(samples))


def read_dialect(rng: Rng, folder: Path) -> None:
    """Each row is read once, with operation, ranks, size and time."""
    writer = choose(rng, WRITERS)
    run = draw_run(rng, ("all_reduce", "all_gather"))
    times = run.ranks if run.operation in writer.by_part else 1
    lines = [choose(rng, NOISE), *writer.write(run, times), choose(rng, NOISE)]
    path = folder / choose(rng, ("a.log", "a.txt", "a.results"))
    path.write_text(choose(rng, ("\n", "\r\n")).join(lines), newline="")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = read_nccl_tests(choose(rng, (path, folder)))
    found = frame.select("operation", "ranks", "nbytes", "seconds").rows()
    wanted = [
        (run.operation, run.ranks, times * sample.nbytes, sample.seconds) for sample in run.samples
    ]
    for row, expected in zip(found, wanted, strict=True):
        if row[:3] != expected[:3] or abs(row[3] / expected[3] - 1) > 0.001:
            raise Nonsense(f"{row} for {expected}")


ENTRIES: dict[str, Entry] = {"log-dialects": Entry(read_dialect, 0.3, new=True)}
