"""Platforms from public traces: what they predict of the same steps, of other ranks, of other jobs,
and of collectives.

python -m benchmarks.traced

A platform from a trace knows the kernels and, where all ranks of a group were traced, the
collectives of its step, so the first table is no blind test. In the other tables nothing is judged
that was fitted. The traces are those of other people, in the folder that PERFKIT_SHARED_DATA names.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.files import find_shared_data
from benchmarks.helpers.tables import Row, lay_out
from perfkit.calibration.collectives import fit_transfers
from perfkit.calibration.fit_traces import fit_trace
from perfkit.calibration.traces import find_unsized
from perfkit.ground.units import Array
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.cost import price
from perfkit.workloads.graph import Graph

#: Jobs: platform of the gallery, files of a rank, and ranks of the traces.
JOBS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "DLRM, 8 V100": (
        "v100-sxm-8",
        tuple(f"dlrm_v100x8_param/{kind}_rank{{}}.json.gz" for kind in ("kineto", "et")),
        8,
    ),
    "GPT forward, 8 A100": ("a100-sxm-8", ("megatron_tp8_a100x8/kineto_rank{}.json.gz",), 8),
    "recommender, 1 of 2 V100": ("v100-sxm-8", ("rec_v100x2_rank1_hta.json.gz",), 1),
    "ResNet-50, V100": ("v100-sxm-8", ("resnet50_v100x1_workers0.json.gz",), 1),
    "BERT-small, H100": ("h100-sxm-8", ("gaunernst_bert-small-uncased_h100.json.gz",), 1),
}


def list_paths(job: str, ranks: int = 8) -> list[Path]:
    """Traces of the first ranks of a job."""
    _, files, most = JOBS[job]
    return [
        find_shared_data("traces", file.format(rank))
        for file in files
        for rank in range(min(ranks, most))
    ]


@cache
def read_job(job: str, ranks: int = 8) -> pk.Trace:
    """Traces of the first ranks of a job."""
    return pk.read_trace(list_paths(job, ranks))


@cache
def record(job: str, rank: int | None) -> tuple[Graph, Array]:
    """Graph of the step of a rank, and what its operations took [s]; nothing of other ranks."""
    return read_job(job).record(rank)


@cache
def fit_job(job: str, ranks: int = 8) -> pk.Platform:
    """The gallery's platform with what the first ranks of a job show."""
    base = pk.load_platform(JOBS[job][0])
    return fit_trace(read_job(job, ranks), base, base.name, record=partial(record, job))


def _find_work(trace: Any) -> float:
    """Mean time that ranks compute, communicate and copy [s]."""
    busy = pl.sum_horizontal("busy_s", "communication_s", "copies_s")
    return float(trace.idle().select(busy.mean()).item())


def compare_step(job: str) -> dict[str, Any]:
    """Means over ranks of the work of the device and of the step: measured, gallery, and from all
    traces [s]."""
    trace = read_job(job)
    graphs = [record(job, file.rank)[0] for file in trace.files]
    row = {"trace": job, "work": _find_work(trace), "step": trace.time}
    platforms = {"gallery": pk.load_platform(JOBS[job][0]), "fitted": fit_job(job)}
    for name, platform in platforms.items():
        if len(graphs) > 1:
            prediction = pk.predict(graphs, platform)
        else:
            prediction = pk.predict(graphs[0], platform, ranks=graphs[0].ranks)
        row[f"work_{name}"] = prediction.device_time
        row[f"step_{name}"] = prediction.time
    return row


def sum_kernels(platform: pk.Platform, recorded: tuple[Graph, Array]) -> tuple[float, float]:
    """Predicted and measured sum of the kernels of a recorded step, without collectives, copies to
    the host and kernels whose sizes are not in the trace [s]."""
    graph, seconds = recorded
    (costs,) = price([graph], platform, dtype=graph.dtype)
    computes = [label.kind not in ("collective", "transfer") for label in graph.labels]
    kernels = ~np.isnan(seconds) & computes
    kernels[find_unsized(graph)] = False
    return float(costs.seconds[kernels].sum()), float(seconds[kernels].sum())


def judge_kernels(known: str, job: str) -> dict[str, Any]:
    """Errors of sums of kernels with fits of rank 0 of one job: in that job of all other ranks,
    else of rank 0 [%]."""
    most = 8 if job == known else 1
    ranks = [file.rank for file in read_job(job, most).files]
    if job == known:
        ranks = ranks[1:]
    row: dict[str, Any] = {"fitted": known, "judged": job, "n": len(ranks)}
    platforms = {"gallery": pk.load_platform(JOBS[job][0]), "error": fit_job(known, 1)}
    for name, platform in platforms.items():
        errors = []
        for rank in ranks:
            predicted, measured = sum_kernels(platform, record(job, rank))
            errors.append(100 * (predicted / measured - 1))
        row[name] = np.abs(errors).mean()
        row[f"{name}_bias"] = np.mean(errors)
    return row


def compare_kernels() -> list[Row]:
    """Kernels of the other ranks of two jobs, and of every pair of the three jobs on V100."""
    pairs = [(job, job) for job, (_, _, ranks) in JOBS.items() if ranks > 1]
    volta = [job for job, (base, *_) in JOBS.items() if base == "v100-sxm-8"]
    pairs += permutations(volta, 2)
    return [judge_kernels(known, job) for known, job in pairs]


def find_errors(platform: pk.Platform, met: pl.DataFrame) -> tuple[Array, float]:
    """Size of predicted / measured - 1 of every collective, and the share inside 80 % intervals."""
    groups = met.group_by("iteration", "group", "order", maintain_order=True)
    calls = groups.agg(pl.first("operation", "ranks", "transfer_s"), pl.max("even_bytes"))
    errors, inside = [], []
    with keep_quiet():
        for row in calls.to_dicts():
            measured = row["transfer_s"]
            estimate = platform.collective(row["operation"], row["even_bytes"], ranks=row["ranks"])
            low, high = estimate.interval()[:2]
            errors.append(estimate.time / measured - 1)
            inside.append(low <= measured <= high)
    return np.abs(errors), float(np.mean(inside))


def _pool(judged: Sequence[tuple[Array, float]]) -> tuple[float, float]:
    """Mean error of all calls, and the share of them inside their intervals [%]."""
    errors = np.concatenate([sizes for sizes, _ in judged])
    counts = [len(sizes) for sizes, _ in judged]
    inside = np.average([share for _, share in judged], weights=counts)
    return 100 * errors.mean(), 100 * inside


def judge_collectives(
    base: str, pairs: Sequence[tuple[pl.DataFrame, pl.DataFrame]]
) -> dict[str, Any]:
    """Mean error and share inside 80 % intervals of the second calls of each pair, once the first
    are fitted [%]."""
    gallery = pk.load_platform(base)
    by_gallery, by_fit = [], []
    for known, left in pairs:
        fitted = fit_transfers(gallery, known, "traces")[0]
        by_gallery.append(find_errors(gallery, left))
        by_fit.append(find_errors(fitted, left))
    of_gallery, in_gallery = _pool(by_gallery)
    error, inside = _pool(by_fit)
    return {
        "n": sum(len(errors) for errors, _ in by_fit),
        "gallery": of_gallery,
        "gallery_inside": in_gallery,
        "error": error,
        "error_inside": inside,
    }


class Case(NamedTuple):
    """Collectives that are fitted and that are judged, in words, and each pair of both."""

    fitted: str
    judged: str
    pairs: Sequence[tuple[pl.DataFrame, pl.DataFrame]]


def _list_dlrm_cases() -> list[Case]:
    """The eight calls of the DLRM."""
    calls = read_job("DLRM, 8 V100").collectives()
    order = pl.col("order")
    to_eighth, to_same = [], []
    for number in range(8):
        one = calls.filter(order == number)
        others = calls.filter(order != number)
        to_eighth.append((others, one))
        to_same.append((one, others.filter(operation=one["operation"][0])))
    return [
        Case("DLRM: seven of 8 calls", "the eighth", to_eighth),
        Case("DLRM: one call", "others of its operation", to_same),
    ]


def _list_gpt_cases() -> list[Case]:
    """The calls of GPT: 81 of 64 MiB and three of 32 KiB."""
    calls = read_job("GPT forward, 8 A100").collectives()
    order = pl.col("order")
    large = calls.filter(nbytes=2.0**26)
    small = calls.filter(nbytes=2.0**15)
    orders = large["order"].unique().sort()
    is_early = order <= orders[39]
    halves = (large.filter(is_early), large.filter(~is_early))
    single = []
    for number in orders[::10]:
        single.append((large.filter(order == number), large.filter(order != number)))
    return [
        Case("GPT: 40 of 81 of 64 MiB", "the other 41", [halves]),
        Case("GPT: one of them", "the other 80", single),
        Case("GPT: all of them", "3 of 32 KiB", [(large, small)]),
        Case("GPT: 3 of 32 KiB", "all of 64 MiB", [(small, large)]),
    ]


def list_collectives() -> Iterator[dict[str, Any]]:
    """Collectives of two jobs, some of them fitted and others judged."""
    for base, cases in (("v100-sxm-8", _list_dlrm_cases()), ("a100-sxm-8", _list_gpt_cases())):
        for case in cases:
            figures = judge_collectives(base, case.pairs)
            yield {"fitted": case.fitted, "judged": case.judged, **figures}


_STEPS = {
    "trace": "{trace}",
    "work": "{work:time}",
    "by gallery": "{work_gallery:time}",
    "from its traces": "{work_fitted:time}",
    "step": "{step:time}",
    "step by gallery": "{step_gallery:time}",
    "step from its traces": "{step_fitted:time}",
}
_PAIR = {"fitted": "{fitted}", "judged": "{judged}", "n": "{n}"}
_KERNELS = _PAIR | {
    "gallery: mean": "{gallery:.1f}",
    "gallery: bias": "{gallery_bias:+.1f}",
    "fitted: mean": "{error:.1f}",
    "fitted: bias": "{error_bias:+.1f}",
}
_COLLECTIVES = _PAIR | {
    "gallery: mean": "{gallery:.1f}",
    "gallery: inside 80 %": "{gallery_inside:.0f}",
    "fitted: mean": "{error:.1f}",
    "fitted: inside 80 %": "{error_inside:.0f}",
}


@command({})
def main(given: Any) -> None:
    """Platforms from public traces, beside those of the gallery."""
    find_shared_data()
    with keep_quiet():
        print(lay_out([compare_step(job) for job in JOBS], _STEPS))
        print(f"\nkernels, errors [%]\n{lay_out(compare_kernels(), _KERNELS)}")
        print(
            f"\ncollectives, errors and shares [%]\n{lay_out([*list_collectives()], _COLLECTIVES)}"
        )
