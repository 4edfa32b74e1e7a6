"""GEMM on GPUs: how the roofline form, fitted on some shapes, predicts those it has not seen, and other GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from benchmarks import find_shared_data
from benchmarks.gpu_bars import DATASHEETS, POOLED, Judged, join, make_record
from perfkit.fitting import Fit, fit_roofline
from perfkit.ground.units import Array
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.estimates import FORMS
from perfkit.readers.datasheets import read_datasheet
from perfkit.readers.kernel_database import read_gemms

Mask: TypeAlias = npt.NDArray[np.bool_]

_DRAWS, _FEW = 20, 32
#: Whose fit is put to which other GPU with the datasheet of that one.
_SWAPS = (
    ("a100_sxm", "h100_sxm"), ("h100_sxm", "a100_sxm"), ("h100_sxm", "h200_sxm"), ("h100_sxm", "b200_sxm"),
    ("b200_sxm", "b300_sxm"), ("b200_sxm", "gb200"), ("h100_sxm", "rtx_pro_6000_server"), ("h100_sxm", "l40s"),
)  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """Measured bf16 GEMMs of one system: sizes, times, who is held out, and the rates of its datasheet."""

    m: Array
    n: Array
    k: Array
    seconds: Array
    random: Mask
    largest: Mask
    peak: float
    bandwidth: float

    @property
    def wide(self) -> Mask:
        """Which shapes have no side under 512."""
        return np.asarray(np.minimum(np.minimum(self.m, self.n), self.k) >= 512)

    def work(self, chosen: npt.NDArray[Any]) -> dict[str, Any]:
        """FLOP and bytes of the shapes that are chosen, by mask or index."""
        sizes = (self.m[chosen], self.n[chosen], self.k[chosen])
        return {"flops": gemm_flops(*sizes), "nbytes": gemm_bytes(*sizes, itemsize=2)}

    def fit(self, chosen: npt.NDArray[Any]) -> Fit:
        """Fit the shapes that are chosen."""
        seconds = self.seconds[chosen]
        return fit_roofline(**self.work(chosen), seconds=seconds, peak=self.peak, bandwidth=self.bandwidth)

    def judge(self, fit: Fit, chosen: Mask) -> Judged:
        """Errors of a fit on the shapes that are chosen, and which lay inside its 80 % interval."""
        rates = {"peak": np.asarray(self.peak), "bandwidth": np.asarray(self.bandwidth)}
        predicted = np.asarray(FORMS["roofline"](self.work(chosen) | rates, **fit))
        error = predicted / self.seconds[chosen] - 1
        return error, np.abs(np.log1p(error)) <= 1.2816 * fit.spread_at(predicted)


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


def load_shapes(system: str) -> Shapes:
    """Shapes of a system: A100 and H100 from the shared measurements, any other from the kernel database."""
    frame, device = _read_shapes(system).cast({pl.Int64: pl.Float64}), read_datasheet(DATASHEETS[system]).device
    columns: dict[str, Any] = {name: frame[name].to_numpy() for name in ("m", "n", "k", "seconds", "random", "largest")}
    return Shapes(**columns, peak=device.peaks["bf16"].value, bandwidth=device.main_bandwidth)


def _judge_all(shapes: Shapes) -> dict[tuple[str, str], list[Judged]]:
    """Errors on held-out shapes and which lay inside the interval, by quantity and split, one entry per draw."""
    wide, random, largest = shapes.wide, shapes.random, shapes.largest
    whole = shapes.fit(~random)
    rng, pool = np.random.default_rng(0), np.flatnonzero(wide & ~random)
    few = [shapes.fit(rng.choice(pool, _FEW, replace=False)) for _ in range(_DRAWS)]
    return {
        ("GEMM", "random fifth"): [shapes.judge(shapes.fit(wide & ~random), wide & random)],
        ("GEMM", f"{_FEW} shapes"): [shapes.judge(fit, wide & random) for fit in few],
        ("GEMM", "largest tenth"): [shapes.judge(shapes.fit(wide & ~largest), wide & largest)],
        ("GEMM, any size", "random fifth"): [shapes.judge(whole, random)],
        ("GEMM, any size: all sides from 512", "random fifth"): [shapes.judge(whole, wide & random)],
        ("GEMM, any size: a side under 512", "random fifth"): [shapes.judge(whole, ~wide & random)],
    }


def records(systems: Sequence[str]) -> list[dict[str, Any]]:
    """Records of each system, of A100 and H100 together, and of fits carried over by swapping datasheets."""
    shapes = {system: load_shapes(system) for system in systems}
    judged = {system: _judge_all(each) for system, each in shapes.items()}
    if set(POOLED.split("+")) <= set(systems):
        first, second = (judged[system] for system in POOLED.split("+"))
        judged[POOLED] = {key: list(map(join, zip(first[key], second[key], strict=True))) for key in first}
    rows = [
        make_record(system, quantity, "roofline", 4, split, draws)
        for system, by_key in judged.items() for (quantity, split), draws in by_key.items()
    ]  # fmt: skip
    for source, target in _SWAPS:
        if source in shapes and target in shapes:
            other, fit = shapes[target], shapes[source].fit(~shapes[source].random)
            found, form = other.judge(fit, np.ones(len(other.m), dtype=bool)), f"roofline of {source}"
            rows.append(make_record(target, "GEMM, any size: datasheet swapped", form, 0, "every shape", [found]))
    return rows
