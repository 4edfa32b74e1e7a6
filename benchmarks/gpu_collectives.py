"""Collectives on GPUs: curves, their chosen form and the law over ranks, fitted on one part and judged on the rest."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from benchmarks import find_shared_data
from benchmarks.gpu_bars import POOLED, Judged, pool
from perfkit.fitting import Fit, fit_collective, fit_over_ranks, fit_pipelined
from perfkit.ground.hardware import Network
from perfkit.ground.units import Array
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.readers.kernel_database import read_collectives

Frame = pl.DataFrame
_CURVE = ["operation", "dtype", "ranks", "library_version"]


def read_sweeps(system: str) -> Frame:
    """Shared sweeps of A100 or H100: operation, dtype, ranks, library_version, nbytes [B], seconds."""
    raw = pl.read_csv(find_shared_data("nccl", f"nccl_{system}.csv"), infer_schema_length=None)
    return raw.select(
        "dtype", operation=pl.col("op").replace("alltoall", "all_to_all"), ranks="num_gpus",
        library_version="nccl_version_recorded", nbytes="message_bytes", seconds=pl.col("latency_us") * 1e-6,
    )  # fmt: skip


def read_curves(system: str) -> Frame:
    """Collectives of one system, as of `read_sweeps`, medians over repeats."""
    frame = read_sweeps(system) if system in POOLED.split("+") else read_collectives(system)
    frame = frame.with_columns(pl.col("nbytes").cast(pl.Float64))
    medians = frame.group_by([*_CURVE, "nbytes"]).agg(pl.col("seconds").median())
    return medians.sort([*_CURVE, "nbytes"], nulls_last=True)


def _judge(fits: dict[str, Fit], operation: str, ranks: int, nbytes: Array, seconds: Array) -> tuple[Any, Any]:
    """Errors and coverage of what a platform with these fits would say."""
    with keep_quiet():
        platform = replace(load_platform("h100-sxm-8"), collectives=fits, network=Network(ranks))
        found = platform.price_collective(operation, nbytes, ranks)
    return found.time / seconds - 1, np.abs(np.log(seconds / found.time)) < 1.2816 * found.spread


def _arrays(rows: Frame, *names: str) -> list[Array]:
    return [rows[name].to_numpy() for name in names]


def _every_other_size(frame: Frame, fit: Callable[..., Fit]) -> Iterator[tuple[Any, Any]]:
    """Each half of the sizes of a curve predicts the other."""
    for rows in frame.partition_by(_CURVE, maintain_order=True):
        operation, ranks = rows["operation"][0], rows["ranks"][0]
        nbytes, seconds = _arrays(rows, "nbytes", "seconds")
        for half in (np.arange(len(nbytes)) % 2 == side for side in (0, 1)):
            fits = {f"{operation}.{ranks}": fit(nbytes[half], seconds[half])}
            yield _judge(fits, operation, ranks, nbytes[~half], seconds[~half])


def _two_and_four_to_eight(frame: Frame) -> Iterator[tuple[Any, Any]]:
    """2 and 4 ranks predict 8 of the same operation, dtype and library, whatever algorithm that takes there."""
    for rows in frame.partition_by([name for name in _CURVE if name != "ranks"], maintain_order=True):
        few, eight = rows.filter(pl.col("ranks") < 8), rows.filter(pl.col("ranks") == 8)
        if few["ranks"].n_unique() == 2 and eight.height:
            operation = rows["operation"][0]
            law = fit_over_ranks(operation, *_arrays(few, "ranks", "nbytes", "seconds"))
            yield _judge({f"{operation}.any": law}, operation, 8, *_arrays(eight, "nbytes", "seconds"))


#: Quantity, form as printed, most parameters fitted, split, and what judges one system.
_ROWS: tuple[tuple[str, str, int, str, Callable[[Frame], Iterator[tuple[Any, Any]]]], ...] = (
    ("collective, two parameters", "pipelined, q = 0.6", 2, "every other size",
     partial(_every_other_size, fit=fit_pipelined)),
    ("collective, chosen form", "by left-out sizes", 4, "every other size",
     partial(_every_other_size, fit=fit_collective)),
    ("collective, rank law", "over_ranks, q = 0.6", 4, "2 and 4 ranks to 8", _two_and_four_to_eight),
)  # fmt: skip


def judge(systems: Sequence[str]) -> list[Judged]:
    """Held-out points of each quantity and system, and of A100 and H100 together where both are among the systems."""
    found, frames = list[Judged](), {system: read_curves(system) for system in systems}
    for quantity, form, parameters, split, judge_curves in _ROWS:
        found += pool(Judged(system, quantity, form, parameters, split, *points)
                      for system, own in frames.items() for points in judge_curves(own))  # fmt: skip
    return found
