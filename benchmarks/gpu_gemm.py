"""GEMM on GPUs: how the roofline form, fitted on some shapes, predicts those it has not seen, and other GPUs."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from benchmarks import find_shared_data
from benchmarks.gpu_bars import DATASHEETS, POOLED, Judged, pool
from perfkit.fitting import Fit, fit_roofline
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.estimates import FORMS
from perfkit.readers.datasheets import read_datasheet
from perfkit.readers.kernel_database import read_gemms

_DRAWS, _FEW = 20, 32
#: Whose fit is put to which other GPU with the datasheet of that one.
_SWAPS = (
    ("a100_sxm", "h100_sxm"), ("h100_sxm", "a100_sxm"), ("h100_sxm", "h200_sxm"), ("h100_sxm", "b200_sxm"),
    ("b200_sxm", "b300_sxm"), ("b200_sxm", "gb200"), ("h100_sxm", "rtx_pro_6000_server"), ("h100_sxm", "l40s"),
)  # fmt: skip


def _read_shapes(system: str) -> pl.DataFrame:
    """Shapes with who is held out: as the shared measurements say, else a fifth by lot and the largest tenth."""
    if system in POOLED:
        frame = pl.read_csv(find_shared_data("gemm", f"gemm_bf16_{system}.csv"))
        return frame.with_columns(
            seconds=pl.col("latency_us_sglang") * 1e-6, random=pl.col("split_random") == "test",  # of random data
            largest="extrap_top_decile_mnk",
        )  # fmt: skip
    frame = read_gemms(system).filter(pl.col("collector") == "sglang")
    frame = frame.group_by("m", "n", "k").agg(pl.col("seconds").median()).sort("m", "n", "k")
    size, wide = pl.col("m") * pl.col("n") * pl.col("k"), pl.min_horizontal("m", "n", "k") >= 512
    drawn = pl.Series(np.random.default_rng(0).random(len(frame)) < 0.2)
    return frame.with_columns(random=drawn, largest=size >= size.filter(wide).quantile(0.9, "linear"))


def load_shapes(system: str) -> pl.DataFrame:
    """Measured bf16 GEMMs of a system: sizes, times [s], who is held out, no side under 512, work, datasheet's rates.

    Those of A100 and H100 are the shared measurements, any other's from the kernel database.
    """
    frame, device = _read_shapes(system).cast({pl.Int64: pl.Float64}), read_datasheet(DATASHEETS[system]).device
    sizes = [frame[name].to_numpy() for name in "mnk"]
    return frame.with_columns(
        wide=pl.min_horizontal("m", "n", "k") >= 512, flops=gemm_flops(*sizes), nbytes=gemm_bytes(*sizes, itemsize=2),
        peak=pl.lit(device.peaks["bf16"].value), bandwidth=pl.lit(device.main_bandwidth),
    )  # fmt: skip


def _fit(shapes: pl.DataFrame) -> Fit:
    flops, nbytes, seconds = (shapes[name].to_numpy() for name in ("flops", "nbytes", "seconds"))
    return fit_roofline(flops, nbytes, seconds, peak=shapes["peak"][0], bandwidth=shapes["bandwidth"][0])


def _judge(fit: Fit, shapes: pl.DataFrame) -> tuple[Any, Any]:
    """Errors of a fit on shapes, and which lay inside its 80 % interval."""
    sizes = {name: shapes[name].to_numpy() for name in ("flops", "nbytes", "peak", "bandwidth")}
    predicted = np.asarray(FORMS["roofline"](sizes, **fit))
    error = predicted / shapes["seconds"].to_numpy() - 1
    return error, np.abs(np.log1p(error)) <= 1.2816 * fit.spread_at(predicted)


def _judge_all(system: str, shapes: pl.DataFrame) -> Iterator[Judged]:
    """Held-out shapes of a system by quantity and split."""
    wide, held, largest = shapes.filter("wide"), pl.col("random"), pl.col("largest")
    known, random, whole = wide.filter(~held), wide.filter(held), _fit(shapes.filter(~held))
    rng = np.random.default_rng(0)
    few = [_fit(known[rng.choice(len(known), _FEW, replace=False)]) for _ in range(_DRAWS)]
    for quantity, split, fits, rest in (
        ("GEMM", "random fifth", [_fit(known)], random),
        ("GEMM", f"{_FEW} shapes", few, random),
        ("GEMM", "largest tenth", [_fit(wide.filter(~largest))], wide.filter(largest)),
        ("GEMM, any size", "random fifth", [whole], shapes.filter(held)),
        ("GEMM, any size: all sides from 512", "random fifth", [whole], random),
        ("GEMM, any size: a side under 512", "random fifth", [whole], shapes.filter(held & ~pl.col("wide"))),
    ):
        for draw, fit in enumerate(fits):
            yield Judged(system, quantity, "roofline", 4, split, *_judge(fit, rest), draw)


def judge(systems: Sequence[str]) -> list[Judged]:
    """Held-out shapes of each system, of A100 and H100 together, and of fits carried over by swapping datasheets."""
    shapes = {system: load_shapes(system) for system in systems}
    found = pool(one for system, own in shapes.items() for one in _judge_all(system, own))
    for source, target in _SWAPS:
        if source in shapes and target in shapes:
            errors = _judge(_fit(shapes[source].filter(~pl.col("random"))), shapes[target])
            quantity, form = "GEMM, any size: datasheet swapped", f"roofline of {source}"
            found.append(Judged(target, quantity, form, 0, "every shape", *errors))
    return found
