"""How long perfkit itself takes, beside its bars.

    python -m benchmarks.speed [--platform P.toml] [--large-logs]

Repetitions are interleaved, so that a busy moment of the machine spreads over all rows.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle, islice, repeat
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
from perfkit.models.collectives import bus_factor, pipelined
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
from perfkit.readers.nccl import parse_nccl_tests, read_nccl_tests
from perfkit.workloads.columns import Accesses, Features, Waits
from perfkit.workloads.graph import Graph, Label

_N = 1_000_000  # sizes in one array
_GPU = "NVIDIA H100 80GB HBM3"
_PROGRAMS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


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
    """Time to import perfkit in a fresh process [s]."""
    code = "import time; t = time.perf_counter(); import perfkit; print(time.perf_counter() - t)"
    words = [sys.executable, "-c", code]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def _log(rows: int, *, program: str = "all_reduce", ranks: int = 8) -> str:
    """A log of a program of nccl-tests inside one node, with 20 µs and 250 GB/s."""
    lines = [
        f"# Collective test starting: {program}_perf",
        f"# nThread 1 nGpus {ranks} minBytes 4096 maxBytes 4096000000",
    ]
    for rank in range(ranks):
        lines.append(f"#  Rank {rank:2d} Group  0 Pid 1 on host device {rank} [0x07] {_GPU}")
    factor = float(bus_factor(program, ranks))
    redop = "sum" if program in ("all_reduce", "reduce_scatter") else "none"
    columns = "time algbw busbw #wrong"
    lines.append(f"# size count type redop root {columns} {columns} ")
    for row in range(1, rows + 1):
        time = 20 + row * 4096 / 250e3
        rate = row * 4.096 / time
        half = f"{time:9.2f} {rate:7.2f} {factor * rate:7.2f}      0"
        lines.append(f"{row * 4096:12d} {row * 1024:12d} float {redop} -1 {half} {half}")
    lines.append("# Avg bus bandwidth : 100\n")
    return "\n".join(lines)


def list_large_logs(folder: Path, share: float = 1.0) -> Iterator[Job]:
    """Logs of many rows, tables and runs, or a share of so many, written into a folder."""
    (folder / "rows.log").write_text(_log(round(100_000 * share)))
    (folder / "tables.log").write_text(_log(30) * round(3_000 * share))
    for name, logs in {"tables": 3_000, "runs": 600}.items():
        (folder / name).mkdir()
        for number in range(round(logs * share)):
            (folder / name / f"{number}.log").write_text(_log(30))
    (folder / "curves").mkdir()
    for program in _PROGRAMS:
        for ranks in range(2, 9):
            log = _log(round(640 * share), program=program, ranks=ranks)
            (folder / "curves" / f"{program}_{ranks}.log").write_text(log)
    names = {
        "read a log of 100,000 rows": "rows.log",
        "read a log of 3,000 tables": "tables.log",
        "read 3,000 logs": "tables",
    }
    for name, file in names.items():
        read = partial(read_nccl_tests, folder / file, progress=False)
        yield Job(name, repeat(read), bar=10.0, slow=True)
    for name in ("runs", "curves"):
        calibrate = partial(
            pk.calibrate, nccl_logs=folder / name, base="h100-sxm-8", progress=False
        )
        text = f"calibrate, 18,000 rows of many {name}"
        yield Job(text, repeat(calibrate), bar=15.0, slow=True)


def _write_trace(path: Path, calls: int) -> None:
    """A trace of one step, with three events a call: a product, its launch and its kernel."""
    args = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    events = [_event("user_annotation", "ProfilerStep#1", 0.0, 20.0 * calls + 10)]
    for call in range(calls):
        begin, link = 5 + 20.125 * call, {"correlation": call + 1}
        operands = {**args, "External id": call, "Sequence number": call}
        events += [
            _event("cpu_op", "aten::mm", begin, 15.0, **operands),
            _event("cuda_runtime", "cudaLaunchKernel", begin + 2, 5.0, **link),
            _event("kernel", "sgemm_64x64", begin + 10, 9.0, stream=7, **link),
        ]
    path.write_text(json.dumps({"traceEvents": events}, indent=1))


def _event(category: str, name: str, begin: float, time: float, **args: Any) -> dict[str, Any]:
    """An event of a trace [µs]."""
    where = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 9, "tid": 9}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": time,
        **where,
        "args": args,
    }


def list_large_traces(folder: Path, share: float = 1.0) -> Iterator[Job]:
    """A trace of 150,000 events with a step of 50,000 operations, or a share of it, written into a
    folder."""
    path = folder / "trace.json"
    _write_trace(path, round(50_000 * share))
    trace = pk.read_trace(path, progress=False)
    read = partial(pk.read_trace, path, progress=False)
    yield Job("read a trace of 150,000 events", repeat(read), bar=1.0, slow=True)
    # a new one has analysed nothing yet
    yield Job("analyse it", repeat(lambda: replace(trace).explain()), bar=1.0, slow=True)
    yield Job("its 50,000 operations as a graph", repeat(trace.record), bar=5.0, slow=True)


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


def _list_predictions(platforms: Sequence[pk.Platform]) -> Iterator[Job]:
    """New and known predictions on each platform."""
    known = draw_check(0)[0].workload
    for number, platform in enumerate(platforms, 1):
        new = _predict_new(number, platform)
        again = repeat(partial(pk.predict, known, platform))
        yield Job(f"DLRM, new, on {platform.name}", new, bar=5e-3)
        yield Job(f"DLRM, again, on {platform.name}", again, bar=5e-3)


def _list_many_ranks() -> Iterator[Job]:
    """Predictions of DLRMs with a table for each of many ranks, none of which a cache has seen."""
    many, some = 65_536, 1_024
    cluster = pk.load_platform("h100-sxm-8x8")

    def predict_alike() -> Iterator[Callable[[], Any]]:
        for number in count(1):
            model = pk.DLRM(batch=16 * many, rows=[1_000_000 + number] * many)
            yield partial(pk.predict, model, cluster.with_nodes(many // 8), ranks=many)

    def predict_unlike() -> Iterator[Callable[[], Any]]:
        for number in count(1):
            tables = pk.draw_tables(some, seed=number)
            rows = [table.rows for table in tables]
            pooling = [table.pooling for table in tables]
            model = pk.DLRM(batch=16 * some, rows=rows, pooling=pooling)
            yield partial(pk.predict, model, cluster.with_nodes(some // 8), ranks=some)

    alike, unlike = predict_alike(), predict_unlike()
    yield Job("DLRM of like tables on 65,536 ranks", alike, bar=10.0, slow=True)
    yield Job("DLRM of 1,024 unlike tables on 1,024 ranks", unlike, bar=5.0, slow=True)


def _list_forms(rng: np.random.Generator) -> Iterator[Job]:
    """Closed forms over a million sizes."""
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

    def time_products() -> Any:
        flops = gemm_flops(m, n, k)
        return roofline_time(flops, gemm_bytes(m, n, k), peak=1e14, bandwidth=1e12)

    curve = partial(pipelined, nbytes, alpha=2e-5, beta=1e-11)
    yield Job("collective, pipelined form", repeat(curve), _N, 1e-6)
    composed = partial(_compose, nbytes)
    yield Job("all_reduce composed over 8 nodes", repeat(composed), _N, 1e-6)
    yield Job("GEMM, smooth roofline", repeat(time_products), _N, 1e-6)
    yield Job("GEMM, additive terms", repeat(partial(additive, sizes, **terms)), _N, 1e-6)


def _make_ranks(rng: np.random.Generator) -> list[RankTimes]:
    """Eight unlike ranks of 10,000 operations, of which 99 are collectives."""
    operations = 10_000
    places = np.arange(100, operations, 100)
    seconds = rng.uniform(1e-6, 1e-4, operations)
    seconds[places] = 0.0  # collectives have their own times
    # always one or two in flight
    ends = np.minimum(places + 150, operations)
    waits = Waits(ends, np.arange(99), np.zeros(99, dtype=bool))
    kinds = np.where(seconds > 0, "elementwise", "collective").tolist()
    labels = tuple(Label("operation", kind, "", "forward", "") for kind in kinds)
    graph = Graph(labels, Features.zeros(operations), Accesses.from_rows(), waits=waits)
    networks = [0 if place % 3 != 1 else 1 for place in range(99)]
    group = RankGroup(graph, (0,), 1.0, {}, networks)
    host = np.full(operations, 10e-6)
    none = np.zeros(operations)
    durations = np.full(99, 1e-3)
    ranks = []
    for slowdown in 1 + np.arange(8) / 10:
        ranks.append(RankTimes(group, slowdown * seconds, host, none, durations))
    return ranks


def _list_simulations(rng: np.random.Generator) -> Iterator[Job]:
    """The event loop on a device and on cores that ranks share."""
    ranks = _make_ranks(rng)
    name = "simulate 8 ranks of 10,000 operations on"
    on_device = partial(simulate, ranks, device=True, contention=0.0)
    on_cores = partial(simulate, ranks, device=False, contention=1.0)
    yield Job(f"{name} a device", repeat(on_device), bar=1.0)
    yield Job(f"{name} shared cores", repeat(on_cores), bar=1.0)


def _sweep(build: Callable[..., Any], grid: Mapping[str, Any]) -> Iterator[Callable[[], Any]]:
    """The same sweep on H100, again and again."""
    return repeat(partial(pk.sweep, build, grid, "h100-sxm-8", progress=False))


def _list_sweeps() -> Iterator[Job]:
    """Sweeps of 10,000 configurations."""
    batches = list(range(8, 808, 8))
    short = list(range(1, 101))
    berts = _sweep(pk.Transformer.bert, {"batch": batches, "sequence": short})
    yield Job("sweep of Transformers on h100-sxm-8", berts, 10_000, 1e-5, slow=True)
    dlrms = _sweep(pk.DLRM, {"batch": batches, "pooling": short})
    yield Job("sweep of DLRMs on h100-sxm-8", dlrms, 10_000, 1e-4 / 3, slow=True)
    # every second sequence is longer than the positions
    mixed = [*range(1, 51), *range(2000, 2050)]
    refused = _sweep(pk.Transformer.bert, {"batch": batches, "sequence": mixed})
    yield Job("sweep, half of it refused", refused, 10_000, 2e-5, slow=True)


def _list_strategies() -> Iterator[Job]:
    """Strategies of GPT-3 175B."""
    gpt = pk.Transformer.preset("gpt3-175b", batch=1536, dtype="bf16", mixed=True, fused=True)
    cluster = "a100-sxm-8x128"
    many = list(islice(cycle(WAYS), 100_000))
    price = repeat(partial(ask_strategies, many))
    yield Job("strategies of GPT-3 175B on 1,024 A100", price, 100_000, 1e-5, slow=True)
    on_all = partial(pk.explore, gpt, cluster, 1024)
    yield Job("explore the same", repeat(on_all), bar=2.0, slow=True)
    on_each = partial(pk.explore, gpt, cluster, [2**power for power in range(3, 11)])
    tried = on_each().tried
    yield Job("explore it on 8 to 1,024", repeat(on_each), tried, 1e-5, slow=True)


def _list_placements() -> Iterator[Job]:
    """A search for a placement."""
    search = partial(
        pk.shard,
        pk.TableSet(pk.draw_tables(856), embedding="fused"),
        pk.load_platform("h100-sxm-8").with_nodes(8),
        ranks=64,
        objective="additive",
        seconds=0.35,
    )
    yield Job("place 856 tables on 64 ranks", repeat(search), bar=1.0, slow=True)


def _list_readers() -> Iterator[Job]:
    """Files of others, those that are here."""
    log = partial(parse_nccl_tests, _log(1000))
    yield Job("read a log of 1,000 rows", repeat(log), bar=0.05)
    with suppress(FileNotFoundError):
        find_database()
        name = "read one system of the kernel database"
        yield Job(name, repeat(_read_system), bar=3.0, slow=True)
    with suppress(ValueError):
        paths = sorted(find_shared_data("traces", "megatron_tp8_a100x8").glob("kineto*"))
        read = partial(_read_ranks, paths)
        name = "read and analyse traces of 8 ranks, 31 MB"
        yield Job(name, repeat(read), bar=1.5, slow=True)


def list_jobs(platforms: Sequence[pk.Platform]) -> list[Job]:
    """Everything that is timed."""
    rng = np.random.default_rng(0)
    return [
        Job("import perfkit, fresh process", repeat(_import), bar=0.5, slow=True),
        *_list_predictions(platforms),
        *_list_many_ranks(),
        *_list_forms(rng),
        *_list_simulations(rng),
        *_list_sweeps(),
        *_list_strategies(),
        *_list_placements(),
        *_list_readers(),
    ]


def _time(job: Job) -> float:
    """Time of the next call of a job [s]."""
    call = next(job.calls)
    start = time.perf_counter()
    result = call()
    if isinstance(result, float):  # a time that another process has measured
        return result
    return time.perf_counter() - start


def time_jobs(jobs: Sequence[Job], *, rounds: int = 35) -> list[dict[str, Any]]:
    """Median and quartiles of each job [s], slow ones a fifth as often."""
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    for turn in range(-1, rounds):  # the first turn warms up
        for job in jobs:
            if job.slow and turn % 5:
                continue
            taken = _time(job)
            if turn >= 0:
                seconds[job.name].append(taken)
    rows = []
    for job in jobs:
        q1, median, q3 = np.percentile(seconds[job.name], [25, 50, 75]) / job.results
        rows.append(
            {
                "name": job.name,
                "median_s": float(median),
                "q1_s": float(q1),
                "q3_s": float(q3),
                "per_second": float(1 / median),
                "bar": job.bar,
                "met": bool(median <= job.bar),
            }
        )
    return rows


_COLUMNS = {
    "what": "{name}",
    "median": "{median_s:time}",
    "quartiles": "{q1_s:time} to {q3_s:time}",
    "per second": "{per_second:.3g}",
    "bar": "{bar:time}",
    "met": "{met}",
}


def _choose_platforms(path: str | None) -> list[pk.Platform]:
    """A node of H100, and the calibration that is named or the first of the gallery."""
    node = pk.load_platform("h100-sxm-8")
    if path:
        return [node, pk.load_platform(path)]
    for file in sorted(find_reference("platforms").glob("*.toml")):
        platform = pk.load_platform(file)
        if platform.context:
            return [node, platform]
    return [node]


def _print_times(jobs: Sequence[Job], rounds: int) -> None:
    """Time jobs and print a table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes outside the fitted ranges
        rows = time_jobs(jobs, rounds=rounds)
    print(lay_out(rows, _COLUMNS, numbers=True))


@command(
    {
        **PLATFORM,
        "--rounds": {"type": int, "default": 35, "help": "repetitions"},
        "--large-logs": {
            "action": "store_true",
            "help": "time large logs and a large trace alone; a minute for five rounds",
        },
    }
)
def main(given: Any) -> None:
    """Time that perfkit itself takes."""
    rounds = int(check_positive("rounds", given.rounds, integer=True))
    with tempfile.TemporaryDirectory() as folder:
        if given.large_logs:
            jobs = [*list_large_logs(Path(folder)), *list_large_traces(Path(folder))]
        else:
            jobs = list_jobs(_choose_platforms(given.platform))
        _print_times(jobs, rounds)
