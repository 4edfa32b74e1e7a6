"""How long perfkit itself takes, beside its bars.

    python -m benchmarks.speed [--platform P.toml]

Repetitions are interleaved, so that a busy moment of the machine spreads over all rows.
"""

import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import PLATFORM, command
from benchmarks.helpers.files import find_shared_data
from benchmarks.helpers.tables import lay_out
from benchmarks.scale import WAYS, ask_strategies
from perfkit.fitting import TwoBranch
from perfkit.ground.files import find_reference
from perfkit.ground.units import check_positive
from perfkit.measure.samples import draw_check
from perfkit.models.collectives import pipelined
from perfkit.models.kernels import KERNEL_TERMS, additive
from perfkit.models.roofline import gemm_bytes, gemm_flops, roofline_time
from perfkit.prediction.ranks import RankGroup, RankTimes
from perfkit.prediction.simulation import simulate
from perfkit.readers.kernel_database import (
    find_database,
    read_attention,
    read_casts,
    read_collectives,
    read_gemms,
)
from perfkit.readers.nccl import parse_nccl_tests
from perfkit.workloads.columns import Accesses, Features, Waits
from perfkit.workloads.graph import Graph, Label

_N = 1_000_000  # sizes in one array


@dataclass(frozen=True)
class Job:
    """Calls to time one after another, the results of one call, and the bar for one result [s];
    slow ones run less."""

    name: str
    calls: Iterator[Callable[[], Any]]
    results: int = 1
    bar: float = math.inf
    slow: bool = False


def _predict_new(number: int, platform: pk.Platform) -> Iterator[Callable[[], Any]]:
    """Predictions of DLRMs that no cache has seen."""
    for seed in range(1000 * number, 1000 * number + 1000):
        for sample in draw_check(seed, dlrm=10, transformer=0, hybrid=0):
            yield partial(pk.predict, sample.workload, platform)


def _import() -> float:
    code = "import time; t = time.perf_counter(); import perfkit; print(time.perf_counter() - t)"
    return float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def _log(rows: int) -> str:
    """A log of all_reduce_perf on 8 ranks, with 20 µs and 250 GB/s."""
    lines = [
        "# Collective test starting: all_reduce_perf",
        "# nThread 1 nGpus 8 minBytes 4096 maxBytes 4096000000",
    ]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid 1 on host device {rank} [0x07] GPU" for rank in range(8)
    ]
    lines += [f"# size count type redop root {'time algbw busbw #wrong ' * 2}"]
    for row in range(1, rows + 1):
        time = 20 + row * 4096 / 250e3
        half = f"{time:9.2f} {row * 4.096 / time:7.2f} {row * 4.096 * 1.75 / time:7.2f}      0"
        lines.append(f"{row * 4096:12d} {row * 1024:12d} float sum -1 {half} {half}")
    return "\n".join([*lines, "# Avg bus bandwidth : 100"])


def _read_system() -> None:
    """Read all that a platform is fitted to."""
    for read in (read_collectives, read_gemms, read_attention, read_casts):
        read("h100_sxm")


def _read_ranks(paths: Sequence[Path]) -> None:
    """Read and analyse the traces of all ranks."""
    trace = pk.read_trace(paths)
    for look in (trace.breakdown, trace.idle, trace.collectives, trace.stragglers):
        look()


def _compose(nbytes: np.ndarray) -> Any:
    """Price all_reduce in two stages inside nodes of 8 and one stage between 8 nodes."""
    curve = TwoBranch.build({"alpha1": 1e-5, "beta1": 6e-12, "alpha2": 3e-5, "beta2": 3e-12})
    fits = {"reduce_scatter.8": curve, "all_gather.8": curve, "all_reduce.8.rail": curve}
    platform = replace(pk.load_platform("h100-sxm-8"), collectives=fits, network=pk.Network(8, 8))
    return platform.price_collective("all_reduce", nbytes, 64)


def list_jobs(platforms: Sequence[pk.Platform]) -> list[Job]:
    """Everything that is timed."""
    jobs = [Job("import perfkit, fresh process", repeat(_import), bar=0.5, slow=True)]
    again = draw_check(0)[0].workload
    for number, platform in enumerate(platforms, 1):
        jobs.append(Job(f"DLRM, new, on {platform.name}", _predict_new(number, platform), bar=5e-3))
        jobs.append(
            Job(
                f"DLRM, again, on {platform.name}",
                repeat(partial(pk.predict, again, platform)),
                bar=5e-3,
            )
        )
    rng = np.random.default_rng(0)
    nbytes = rng.uniform(1e3, 1e9, _N)
    m, n, k = rng.integers(16, 8192, (3, _N)).astype(float)
    sizes = {
        "m": m,
        "n": n,
        "k": k,
        "batch": np.ones(_N),
        "flops": gemm_flops(m, n, k),
        "beyond_l2": m,
        "beyond_l3": n,
    }
    terms = dict.fromkeys(KERNEL_TERMS["gemm"], 1e-9)
    places, seconds = np.arange(100, 10_000, 100), rng.uniform(1e-6, 1e-4, 10_000)
    seconds[places] = 0.0  # collectives have their own times
    # always one or two in flight
    waits = Waits(np.minimum(places + 150, 10_000), np.arange(99), np.zeros(99, dtype=bool))
    host, none = np.full(10_000, 10e-6), np.zeros(10_000)
    kinds = np.where(seconds > 0, "elementwise", "collective").tolist()
    labels = tuple(Label("operation", kind, "", "forward", "") for kind in kinds)
    graph = Graph(labels, Features.zeros(10_000), Accesses.from_rows(), waits=waits)
    group = RankGroup(graph, (0,), 1.0, {}, [0, 1, 0] * 33)
    durations = np.full(99, 1e-3)
    ranks = [
        RankTimes(group, slow * seconds, host, none, durations) for slow in 1 + np.arange(8) / 10
    ]
    jobs += [
        Job(
            "collective, pipelined form",
            repeat(partial(pipelined, nbytes, alpha=2e-5, beta=1e-11)),
            _N,
            1e-6,
        ),
        Job("all_reduce composed over 8 nodes", repeat(partial(_compose, nbytes)), _N, 1e-6),
        Job(
            "GEMM, smooth roofline",
            repeat(
                lambda: roofline_time(
                    gemm_flops(m, n, k), gemm_bytes(m, n, k), peak=1e14, bandwidth=1e12
                )
            ),
            _N,
            1e-6,
        ),
        Job("GEMM, additive terms", repeat(lambda: additive(sizes, **terms)), _N, 1e-6),
    ]
    for name, how in (("a device", (True, 0.0)), ("shared cores", (False, 1.0))):
        run = partial(simulate, ranks, device=how[0], contention=how[1])
        jobs.append(Job(f"simulate 8 ranks of 10,000 operations on {name}", repeat(run), bar=1.0))
    grids = (
        ("Transformers", pk.Transformer.bert, "sequence", 1e-5),
        ("DLRMs", pk.DLRM, "pooling", 1e-4 / 3),
    )
    for name, build, other, most in grids:
        grid = {"batch": [*range(8, 808, 8)], other: [*range(1, 101)]}
        call = partial(pk.sweep, build, grid, "h100-sxm-8", progress=False)
        jobs.append(Job(f"sweep of {name} on h100-sxm-8", repeat(call), 10_000, most, slow=True))
    # every second sequence is longer than the positions
    grid = {"batch": [*range(8, 808, 8)], "sequence": [*range(1, 51), *range(2000, 2050)]}
    call = partial(pk.sweep, pk.Transformer.bert, grid, "h100-sxm-8", progress=False)
    jobs.append(Job("sweep, half of it refused", repeat(call), 10_000, 2e-5, slow=True))
    gpt = pk.Transformer.preset("gpt3-175b", batch=1536, dtype="bf16", mixed=True, fused=True)
    price = partial(ask_strategies, list(islice(cycle(WAYS), 100_000)))
    explore = partial(pk.explore, gpt, "a100-sxm-8x128", [2**n for n in range(3, 11)])
    jobs += [
        Job("strategies of GPT-3 175B on 1,024 A100", repeat(price), 100_000, 1e-5, slow=True),
        Job(
            "explore the same",
            repeat(partial(pk.explore, gpt, "a100-sxm-8x128", 1024)),
            bar=2.0,
            slow=True,
        ),
        Job("explore it on 8 to 1,024", repeat(explore), explore().tried, 1e-5, slow=True),
    ]
    search = partial(
        pk.shard,
        pk.TableSet(pk.draw_tables(856), embedding="fused"),
        pk.load_platform("h100-sxm-8").with_nodes(8),
        ranks=64,
        objective="additive",
        seconds=0.35,
    )
    jobs.append(Job("place 856 tables on 64 ranks", repeat(search), bar=1.0, slow=True))
    jobs.append(
        Job("read a log of 1,000 rows", repeat(partial(parse_nccl_tests, _log(1000))), bar=0.05)
    )
    with suppress(FileNotFoundError):
        find_database()
        jobs.append(
            Job("read one system of the kernel database", repeat(_read_system), bar=3.0, slow=True)
        )
    with suppress(ValueError):
        paths = sorted(find_shared_data("traces", "megatron_tp8_a100x8").glob("kineto*"))
        read = partial(_read_ranks, paths)
        jobs.append(
            Job("read and analyse traces of 8 ranks, 31 MB", repeat(read), bar=1.5, slow=True)
        )
    return jobs


def time_jobs(jobs: Sequence[Job], *, rounds: int = 35) -> list[dict[str, Any]]:
    """Median and quartiles of each job [s], slow ones a fifth as often."""
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    for turn in range(-1, rounds):  # the first turn warms up
        for job in jobs:
            if job.slow and turn % 5:
                continue
            call, start = next(job.calls), time.perf_counter()
            found = call()  # a float is a time that another process has measured
            taken = found if isinstance(found, float) else time.perf_counter() - start
            seconds[job.name] += [taken] if turn >= 0 else []
    rows = []
    for job in jobs:
        q1, median, q3 = (
            float(q) / job.results for q in np.percentile(seconds[job.name], [25, 50, 75])
        )
        row = {
            "name": job.name,
            "median_s": median,
            "q1_s": q1,
            "q3_s": q3,
            "per_second": 1 / median,
            "bar": job.bar,
        }
        rows.append({**row, "met": median <= job.bar})
    return rows


_COLUMNS = {
    "what": "{name}",
    "median": "{median_s:time}",
    "quartiles": "{q1_s:time} to {q3_s:time}",
    "per second": "{per_second:.3g}",
    "bar": "{bar:time}",
    "met": "{met}",
}


@command(
    {
        **PLATFORM,
        "--rounds": {"type": int, "default": 35, "help": "repetitions"},
    }
)
def main(given: Any) -> None:
    """Time that perfkit itself takes."""
    rounds = int(check_positive("rounds", given.rounds, integer=True))
    gallery = [
        pk.load_platform(path) for path in sorted(find_reference("platforms").glob("*.toml"))
    ]
    calibrated = (
        [pk.load_platform(given.platform)] if given.platform else [p for p in gallery if p.context]
    )
    jobs = list_jobs([pk.load_platform("h100-sxm-8"), *calibrated[:1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes outside the fitted ranges
        rows = time_jobs(jobs, rounds=rounds)
    print(lay_out(rows, _COLUMNS, numbers=True))
