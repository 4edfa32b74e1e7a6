"""GEMM on GPUs: how the roofline form, fitted on some shapes, predicts those it has not seen, and other GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_bars import DATASHEETS, POOLED, find_shared_data, make_record, pool_draws
from perfkit.fitting import Fit, fit_roofline
from perfkit.ground.units import Array
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.estimates import FORMS
from perfkit.readers.datasheets import read_datasheet

Mask: TypeAlias = npt.NDArray[np.bool_]
_Judged: TypeAlias = list[tuple[Array, Mask]]

_DRAWS, _FEW = 20, 32
#: Whose fit is put to which other GPU with the datasheet of that one.
_SWAPS = (
    ("a100_sxm", "h100_sxm"), ("h100_sxm", "a100_sxm"), ("h100_sxm", "h200_sxm"), ("h100_sxm", "b200_sxm"),
    ("b200_sxm", "b300_sxm"), ("b200_sxm", "gb200"), ("h100_sxm", "rtx_pro_6000_server"), ("h100_sxm", "l40s"),
)  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """Measured bf16 GEMMs of one system: sizes, times, the rates of its datasheet, and who is held out."""

    system: str
    m: Array
    n: Array
    k: Array
    seconds: Array
    random: Mask
    largest: Mask
    peak: float
    bandwidth: float

    @property
    def work(self) -> dict[str, Array]:
        """FLOP and bytes of each shape."""
        sizes = (self.m, self.n, self.k)
        return {"flops": gemm_flops(*sizes), "nbytes": gemm_bytes(*sizes, itemsize=2)}

    @property
    def wide(self) -> Mask:
        """Which shapes have no side under 512."""
        return np.asarray(np.minimum(np.minimum(self.m, self.n), self.k) >= 512)

    def fit(self, chosen: npt.NDArray[Any]) -> Fit:
        """Fit the shapes that are chosen, by mask or index."""
        work = {name: values[chosen] for name, values in self.work.items()}
        return fit_roofline(**work, seconds=self.seconds[chosen], peak=self.peak, bandwidth=self.bandwidth)

    def judge(self, fit: Fit, chosen: Mask) -> tuple[Array, Mask]:
        """Errors of a fit on the shapes that are chosen, and which lay inside its 80 % interval."""
        work = {name: values[chosen] for name, values in self.work.items()}
        rates = {"peak": np.asarray(self.peak), "bandwidth": np.asarray(self.bandwidth)}
        predicted = np.asarray(FORMS["roofline"](work | rates, **fit))
        error = predicted / self.seconds[chosen] - 1
        return error, np.abs(np.log1p(error)) <= 1.2816 * fit.spread_at(predicted)


def _read_shared(folder: Path, system: str) -> dict[str, Any]:
    import polars

    frame = polars.read_csv(folder / "gemm" / f"gemm_bf16_{system}.csv")
    columns = {name: frame[name].to_numpy().astype(float) for name in ("m", "n", "k")}
    columns["seconds"] = frame["latency_us_sglang"].to_numpy() * 1e-6  # random data, as in training
    columns["random"] = (frame["split_random"] == "test").to_numpy()
    return columns | {"largest": frame["extrap_top_decile_mnk"].to_numpy()}


def _read_database(system: str) -> dict[str, Any]:
    """Median of each shape over repeats, a fifth by lot, and what is as large as the largest tenth of wide ones."""
    import polars

    from perfkit.readers.kernel_database import read_gemms

    frame = read_gemms(system).filter(polars.col("collector") == "sglang")
    frame = frame.group_by("m", "n", "k").agg(polars.col("seconds").median()).sort("m", "n", "k")
    columns = {name: frame[name].to_numpy().astype(float) for name in ("m", "n", "k", "seconds")}
    size = columns["m"] * columns["n"] * columns["k"]
    wide = np.minimum(np.minimum(columns["m"], columns["n"]), columns["k"]) >= 512
    columns["random"] = np.random.default_rng(0).random(len(size)) < 0.2
    return columns | {"largest": size >= np.quantile(size[wide], 0.9)}


def load_shapes(system: str) -> Shapes:
    """Shapes of a system: A100 and H100 from the shared measurements, any other from the kernel database."""
    columns = _read_shared(find_shared_data(), system) if system in POOLED else _read_database(system)
    device = read_datasheet(DATASHEETS[system]).device
    bandwidth = device.memory[-1].bandwidth
    if bandwidth is None:
        raise ValueError(f"the datasheet of {system} has no memory bandwidth; add it to reference_data/datasheets.csv")
    return Shapes(system, **columns, peak=device.peaks["bf16"].value, bandwidth=bandwidth.value)


def _judge_all(shapes: Shapes) -> dict[tuple[str, str], _Judged]:
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


def _join(first: _Judged, second: _Judged) -> _Judged:
    """Two systems together, draw by draw."""
    pairs = zip(first, second, strict=True)
    return [(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])) for a, b in pairs]


def _record(system: str, key: tuple[str, str], draws: _Judged) -> dict[str, Any]:
    quantity, split = key
    rows = [make_record(system, quantity, "roofline", 4, split, error, inside=inside) for error, inside in draws]
    return pool_draws(rows)


def _swap(source: Shapes, target: Shapes) -> dict[str, Any]:
    """What the fit of one GPU says of another whose datasheet numbers are put in, and how much too narrow it is."""
    fit, every = source.fit(~source.random), np.ones(len(target.m), dtype=bool)
    error, inside = target.judge(fit, every)
    form, quantity = f"roofline of {source.system}", "GEMM, any size: datasheet swapped"
    return make_record(target.system, quantity, form, 0, "every shape", error, inside=inside)


def records(systems: Sequence[str]) -> list[dict[str, Any]]:
    """Records of each system, of A100 and H100 together, and of fits carried over by swapping datasheets."""
    shapes = {system: load_shapes(system) for system in systems}
    judged = {system: _judge_all(each) for system, each in shapes.items()}
    if set(POOLED.split("+")) <= set(systems):
        first, second = (judged[system] for system in POOLED.split("+"))
        judged[POOLED] = {key: _join(first[key], second[key]) for key in first}
    rows = [_record(system, key, draws) for system, by_key in judged.items() for key, draws in by_key.items()]
    pairs = [(source, target) for source, target in _SWAPS if source in shapes and target in shapes]
    return rows + [_swap(shapes[source], shapes[target]) for source, target in pairs]
