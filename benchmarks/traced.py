"""Platforms from public traces: what they predict of the same steps, of other ranks, of other jobs,
and of collectives.

python -m benchmarks.traced

A platform from a trace knows the kernels and, where all ranks of a group were traced, the
collectives of its step, so the first table is no blind test. In the other tables nothing is judged
that was fitted. The traces are those of other people, in the folder that PERFKIT_SHARED_DATA names.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.files import find_shared_data
from benchmarks.helpers.tables import Row, lay_out
from perfkit.calibration.collectives import fit_transfers
from perfkit.calibration.fit_traces import calibrate_traces
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
def record(job: str, ranks: int, rank: int) -> tuple[Graph, Array]:
    """Graph of the step of a rank, and what its operations took [s]."""
    return read_job(job, ranks).record(rank)


@cache
def fit_job(job: str, ranks: int = 8) -> pk.Platform:
    """The gallery's platform with what the first ranks of a job show."""
    return calibrate_traces(list_paths(job, ranks), JOBS[job][0])


def compare_step(job: str) -> dict[str, Any]:
    """Means over ranks of the work of the device and of the step: measured, gallery, and from all
    traces [s]."""
    trace, base = read_job(job), JOBS[job][0]
    graphs = [record(job, 8, file.rank)[0] for file in trace.files]
    ranks = None if len(graphs) > 1 else graphs[0].ranks
    worked = (
        trace.idle()
        .select(pl.sum_horizontal("busy_s", "communication_s", "copies_s").mean())
        .item()
    )
    row = {"trace": job, "work": worked, "step": trace.time}
    for name, platform in (
        ("gallery", pk.load_platform(base)),
        ("fitted", fit_job(job)),
    ):
        found = pk.predict(graphs if ranks is None else graphs[0], platform, ranks=ranks)
        row |= {f"work_{name}": found.device_time, f"step_{name}": found.time}
    return row


def sum_kernels(platform: pk.Platform, recorded: tuple[Graph, Array]) -> tuple[float, float]:
    """Predicted and measured sum of the kernels of a recorded step, without collectives, copies to
    the host and kernels whose sizes are not in the trace [s]."""
    graph, seconds = recorded
    found = price([graph], platform, dtype=graph.dtype)[0].seconds
    kernels = ~np.isnan(seconds) & [
        label.kind not in ("collective", "transfer") for label in graph.labels
    ]
    kernels[find_unsized(graph)] = False
    return float(found[kernels].sum()), float(seconds[kernels].sum())


def judge_kernels(known: str, job: str) -> dict[str, Any]:
    """Errors of sums of kernels with fits of rank 0 of one job: in that job of all other ranks,
    else of rank 0 [%]."""
    base, most = JOBS[job][0], 8 if job == known else 1
    files = read_job(job, most).files
    ranks = [file.rank for file in (files[1:] if job == known else files)]
    fitted = fit_job(known, 1)
    row: dict[str, Any] = {"fitted": known, "judged": job, "n": len(ranks)}
    for name, platform in (("gallery", pk.load_platform(base)), ("error", fitted)):
        pairs = [sum_kernels(platform, record(job, most, rank)) for rank in ranks]
        errors = [100 * (predicted / measured - 1) for predicted, measured in pairs]
        row |= {name: np.abs(errors).mean(), f"{name}_bias": np.mean(errors)}
    return row


def compare_kernels() -> list[Row]:
    """Kernels of the other ranks of two jobs, and of every pair of the three jobs on V100."""
    own = [(job, job) for job, (_, _, ranks) in JOBS.items() if ranks > 1]
    volta = [job for job, (base, *_) in JOBS.items() if base == "v100-sxm-8"]
    pairs = [*own, *((known, job) for known in volta for job in volta if job != known)]
    return [judge_kernels(*pair) for pair in pairs]


def find_errors(platform: pk.Platform, met: pl.DataFrame) -> tuple[Array, float]:
    """Size of predicted / measured - 1 of every collective, and the share inside 80 % intervals."""
    groups = met.group_by("iteration", "group", "order", maintain_order=True)
    calls = groups.agg(pl.first("operation", "ranks", "transfer_s"), pl.max("even"))
    errors, inside = [], []
    with keep_quiet():
        for row in calls.to_dicts():
            found = platform.collective(row["operation"], row["even"], ranks=row["ranks"])
            errors.append(found.time / row["transfer_s"] - 1)
            inside.append(found.interval()[0] <= row["transfer_s"] <= found.interval()[1])
    return np.abs(errors), float(np.mean(inside))


def judge_collectives(
    base: str, pairs: Sequence[tuple[pl.DataFrame, pl.DataFrame]]
) -> dict[str, Any]:
    """Mean error and share inside 80 % intervals of the second calls of each pair, once the first
    are fitted [%]."""
    gallery, row = pk.load_platform(base), dict[str, Any]()
    for name in ("gallery", "error"):
        found = [
            find_errors(
                gallery if name == "gallery" else fit_transfers(gallery, known, "traces")[0], left
            )
            for known, left in pairs
        ]
        sizes = [len(errors) for errors, _ in found]
        inside = 100 * np.average([share for _, share in found], weights=sizes)
        row |= {
            name: 100 * np.concatenate([errors for errors, _ in found]).mean(),
            f"{name}_inside": inside,
        }
    return {"n": sum(sizes), **row}


def list_collectives() -> Iterator[dict[str, Any]]:
    """Collectives of two jobs, some of them fitted and others judged."""
    met, order = read_job("DLRM, 8 V100").collectives(), pl.col("order")
    one = [(met.filter(order == each), met.filter(order != each)) for each in range(8)]
    same = [(known, left.filter(operation=known["operation"][0])) for known, left in one]
    cases = {
        "seven of 8 calls": ("the eighth", [(left, known) for known, left in one]),
        "one call": ("others of its operation", same),
    }
    yield from (
        {"fitted": f"DLRM: {known}", "judged": left, **judge_collectives("v100-sxm-8", pairs)}
        for known, (left, pairs) in cases.items()
    )
    met = read_job("GPT forward, 8 A100").collectives()
    large, small = met.filter(nbytes=2.0**26), met.filter(nbytes=2.0**15)
    every = large["order"].unique().sort()
    early = order <= every[39]
    cases = {
        "40 of 81 of 64 MiB": ("the other 41", [(large.filter(early), large.filter(~early))]),
        "one of them": (
            "the other 80",
            [(large.filter(order == i), large.filter(order != i)) for i in every[::10]],
        ),
        "all of them": ("3 of 32 KiB", [(large, small)]),
        "3 of 32 KiB": ("all of 64 MiB", [(small, large)]),
    }
    yield from (
        {"fitted": f"GPT: {known}", "judged": left, **judge_collectives("a100-sxm-8", pairs)}
        for known, (left, pairs) in cases.items()
    )


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
