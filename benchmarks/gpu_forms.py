"""Collectives and GEMM on GPUs: every form is fitted to a part of public measurements and judged by
the rest.

    python -m benchmarks.gpu_forms --systems all

A100 and H100 come from the folder that PERFKIT_SHARED_DATA names; forms and constants were chosen
on these two. Every other system comes from the kernel database (`pip install
perfkit[kernel-database]`) and is judged in the same way.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import HALF_WIDTH
from benchmarks.helpers.files import find_shared_data
from benchmarks.helpers.tables import Row, lay_out
from perfkit.calibration.checks import summarize_errors
from perfkit.fitting import (
    CollectiveModel,
    Roofline,
    fit_collective,
    fit_over_ranks,
    fit_pipelined,
    fit_roofline,
)
from perfkit.ground.hardware import Network
from perfkit.ground.units import Array, check_choice
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.datasheets import read_datasheet
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.readers.kernel_database import list_tables, read_collectives, read_gemms

#: Systems whose errors are also pooled; all bars hold for both together.
PAIR = ("a100_sxm", "h100_sxm")
POOLED = "+".join(PAIR)
#: Datasheet of perfkit by the name of the system in the data.
DATASHEETS = {f"{chip}_sxm": f"{chip}-sxm" for chip in ("a100", "h100", "h200", "b200", "b300")}
DATASHEETS |= {"gb200": "gb200", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000"}
_FIGURES = ("geomean", "mean", "p95")
#: Largest errors by system, quantity and split [%].
BARS: Mapping[tuple[str, str, str], tuple[float, ...]] = {
    (POOLED, "collective, two parameters", "every other size"): (5, 8, 24),
    (POOLED, "collective, chosen form", "every other size"): (4, 6.5, 18),
    (POOLED, "collective, rank law", "2 and 4 ranks to 8"): (6, 9.5, 25),
    (POOLED, "GEMM", "random fifth"): (5.5, 8.5, 25),
    (POOLED, "GEMM", "32 shapes"): (6.5, 9.5, np.inf),
    (POOLED, "GEMM", "largest tenth"): (6.5, 9, 25),
    ("h200_sxm", "GEMM", "random fifth"): (7, 9.5, np.inf),
}
#: Share of the points of both systems that must be inside the 80 % interval [%].
INSIDE = (70.0, 90.0)
_DRAWS, _FEW = 20, 32
_CURVE = ["operation", "dtype", "ranks", "library_version"]
#: Fits of the first GPU that are judged on the second one, with its datasheet.
_SWAPS = (
    ("a100_sxm", "h100_sxm"),
    ("h100_sxm", "a100_sxm"),
    ("h100_sxm", "h200_sxm"),
    ("h100_sxm", "b200_sxm"),
    ("b200_sxm", "b300_sxm"),
    ("b200_sxm", "gb200"),
    ("h100_sxm", "rtx_pro_6000_server"),
    ("h100_sxm", "l40s"),
)


class Judged(NamedTuple):
    """Errors of held-out points [-], and which points are inside the 80 % interval; `draw` numbers
    random fits."""

    system: str
    quantity: str
    form: str
    parameters: int
    split: str
    errors: Array
    inside: Any
    draw: int = 0


def pool(judged: Iterable[Judged]) -> list[Judged]:
    """These points, and those of A100 and H100 again as one system if both are there."""
    points = list(judged)
    systems = {point.system for point in points}
    if not systems >= {*PAIR}:
        return points
    pooled = [point._replace(system=POOLED) for point in points if point.system in PAIR]
    return points + pooled


def _summarize_draw(points: Sequence[Judged]) -> dict[str, float]:
    """Figures of the points of one draw [%]."""
    inside = np.concatenate([point.inside for point in points]).mean()
    errors = np.concatenate([point.errors for point in points])
    return {**summarize_errors(errors), "inside": 100 * float(inside)}


def _is_met(system: str, means: Mapping[str, float], bar: Sequence[float]) -> bool:
    """Whether the figures of a quantity meet their bar; those of both GPUs together must also have as
    many points in their intervals as they say."""
    is_near = all(means[name] <= limit for name, limit in zip(_FIGURES, bar, strict=True))
    if system != POOLED:
        return is_near
    low, high = INSIDE
    return is_near and low <= means["inside"] <= high


def _make_record(points: Sequence[Judged]) -> dict[str, Any]:
    """Figures of one system, quantity, form and split, as means over draws [%]."""
    draws: dict[int, list[Judged]] = defaultdict(list)
    for point in points:
        draws[point.draw].append(point)
    figures = [_summarize_draw(draw) for draw in draws.values()]
    means = {}
    for name in (*_FIGURES, "bias", "inside"):
        mean = np.mean([draw[name] for draw in figures])
        means[name] = round(float(mean), 2)
    first = points[0]
    record = {
        "system": first.system,
        "quantity": first.quantity,
        "form": first.form,
        "parameters": first.parameters,
        "split": first.split,
        "n": int(figures[0]["n"]),
        **means,
        "met": None,
    }
    bar = BARS.get((first.system, first.quantity, first.split))
    if bar:
        limits = ["-" if limit == np.inf else f"{limit:g}" for limit in bar]
        record["bar"] = " / ".join(limits)
        record["met"] = _is_met(first.system, means, bar)
    return record


def make_records(judged: Iterable[Judged]) -> list[dict[str, Any]]:
    """Figures by system, quantity, form and split [%] (means over draws), and whether they meet
    their bar."""
    groups: dict[Any, list[Judged]] = defaultdict(list)
    for point in judged:
        key = (point.system, point.quantity, point.form, point.parameters, point.split)
        groups[key].append(point)
    return [_make_record(points) for points in groups.values()]


# Collectives.


def read_sweeps(system: str) -> pl.DataFrame:
    """Shared sweeps of A100 or H100: operation, dtype, ranks, library_version, nbytes [B], seconds
    [s]."""
    raw = pl.read_csv(find_shared_data("nccl", f"nccl_{system}.csv"), infer_schema_length=None)
    return raw.select(
        "dtype",
        operation=pl.col("op").replace("alltoall", "all_to_all"),
        ranks="num_gpus",
        library_version="nccl_version_recorded",
        nbytes="message_bytes",
        seconds=pl.col("latency_us") * 1e-6,
    )


def read_curves(system: str) -> pl.DataFrame:
    """Collectives of one system with the columns of `read_sweeps`, medians over repeats."""
    frame = read_sweeps(system) if system in PAIR else read_collectives(system)
    frame = frame.with_columns(pl.col("nbytes").cast(pl.Float64))
    medians = frame.group_by([*_CURVE, "nbytes"]).agg(pl.col("seconds").median())
    return medians.sort([*_CURVE, "nbytes"], nulls_last=True)


def _judge_curve(fits: dict[str, CollectiveModel], rows: pl.DataFrame) -> tuple[Any, Any]:
    """Errors of a platform with these fits on rows of one curve, and which are inside its
    interval."""
    operation = rows["operation"][0]
    ranks = rows["ranks"][0]
    nbytes = rows["nbytes"].to_numpy()
    seconds = rows["seconds"].to_numpy()
    with keep_quiet():
        node = load_platform("h100-sxm-8")
        platform = replace(node, collectives=fits, network=Network(ranks))
        price = platform.price_collective(operation, nbytes, ranks)
    deviations = np.abs(np.log(seconds / price.time))
    return price.time / seconds - 1, deviations < HALF_WIDTH * price.spread


def judge_sizes(
    frame: pl.DataFrame, fit: Callable[..., CollectiveModel]
) -> Iterator[tuple[Any, Any]]:
    """Fit every other size of a curve and judge the others, for both halves."""
    for rows in frame.partition_by(_CURVE, maintain_order=True):
        name = f"{rows['operation'][0]}.{rows['ranks'][0]}"
        for start in (0, 1):
            fitted = rows.gather_every(2, start)
            judged = rows.gather_every(2, 1 - start)
            curve = fit(fitted["nbytes"].to_numpy(), fitted["seconds"].to_numpy())
            yield _judge_curve({name: curve}, judged)


def judge_ranks(frame: pl.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Fit 2 and 4 ranks and judge 8 of the same operation, dtype and library, with whatever
    algorithm it uses."""
    columns = [name for name in _CURVE if name != "ranks"]
    for rows in frame.partition_by(columns, maintain_order=True):
        few = rows.filter(pl.col("ranks") < 8)
        eight = rows.filter(pl.col("ranks") == 8)
        if few["ranks"].n_unique() == 2 and eight.height:
            operation = rows["operation"][0]
            law = fit_over_ranks(
                operation,
                few["ranks"].to_numpy(),
                few["nbytes"].to_numpy(),
                few["seconds"].to_numpy(),
            )
            yield _judge_curve({f"{operation}.any": law}, eight)


class _Form(NamedTuple):
    """A form of collectives: quantity and form in words, its parameters, what is held out, and the
    function that judges the curves of a system."""

    quantity: str
    form: str
    parameters: int
    split: str
    judge: Callable[[pl.DataFrame], Iterator[tuple[Any, Any]]]


_FORMS = (
    _Form(
        "collective, two parameters",
        "pipelined, q = 0.6",
        2,
        "every other size",
        partial(judge_sizes, fit=fit_pipelined),
    ),
    _Form(
        "collective, chosen form",
        "by left-out sizes",
        4,
        "every other size",
        partial(judge_sizes, fit=fit_collective),
    ),
    _Form("collective, rank law", "over_ranks, q = 0.6", 4, "2 and 4 ranks to 8", judge_ranks),
)


def judge_collectives(systems: Sequence[str]) -> list[Judged]:
    """Held-out points of collectives by quantity and system."""
    frames = {system: read_curves(system) for system in systems}
    judged = list[Judged]()
    for form in _FORMS:
        points = list[Judged]()
        about = (form.quantity, form.form, form.parameters, form.split)
        for system, frame in frames.items():
            for errors, inside in form.judge(frame):
                points.append(Judged(system, *about, errors, inside))
        judged += pool(points)
    return judged


# Products.


def _read_shared_shapes(system: str) -> pl.DataFrame:
    """Sizes, times and held-out shapes of A100 or H100, as those who shared them say."""
    frame = pl.read_csv(find_shared_data("gemm", f"gemm_bf16_{system}.csv"))
    return frame.with_columns(
        seconds=pl.col("latency_us_sglang") * 1e-6,
        random=pl.col("split_random") == "test",
        largest="extrap_top_decile_mnk",
    )


def _read_database_shapes(system: str, wide: pl.Expr) -> pl.DataFrame:
    """Sizes, times and held-out shapes of another system: a random fifth, and the largest tenth."""
    frame = read_gemms(system).filter(pl.col("collector") == "sglang")
    frame = frame.group_by("m", "n", "k").agg(pl.col("seconds").median()).sort("m", "n", "k")
    drawn = np.random.default_rng(0).random(len(frame)) < 0.2
    size = pl.col("m") * pl.col("n") * pl.col("k")
    largest = size >= size.filter(wide).quantile(0.9, "linear")
    return frame.with_columns(random=pl.Series(drawn), largest=largest)


def load_shapes(system: str) -> pl.DataFrame:
    """Measured bf16 GEMMs of a system: sizes, times [s], what is held out, work and the rates of
    the datasheet.

    `random` and `largest` mark held-out shapes: as the shared measurements say, else a random fifth
    and the largest tenth. `wide` marks shapes without a side under 512.
    """
    wide = pl.min_horizontal("m", "n", "k") >= 512
    is_shared = system in PAIR
    frame = _read_shared_shapes(system) if is_shared else _read_database_shapes(system, wide)
    frame = frame.cast({pl.Int64: pl.Float64})
    device = read_datasheet(DATASHEETS[system]).device
    sizes = [frame[name].to_numpy() for name in "mnk"]
    return frame.with_columns(
        wide=wide,
        flops=gemm_flops(*sizes),
        nbytes=gemm_bytes(*sizes, itemsize=2),
        peak=pl.lit(device.peaks["bf16"].value),
        bandwidth=pl.lit(device.main_bandwidth),
    )


def _fit_shapes(shapes: pl.DataFrame) -> Roofline:
    return fit_roofline(
        shapes["flops"].to_numpy(),
        shapes["nbytes"].to_numpy(),
        shapes["seconds"].to_numpy(),
        peak=shapes["peak"][0],
        bandwidth=shapes["bandwidth"][0],
    )


def _judge_shapes(fit: Roofline, shapes: pl.DataFrame) -> tuple[Any, Any]:
    """Errors of a fit on shapes, and which are inside its 80 % interval."""
    sizes = {name: shapes[name].to_numpy() for name in ("flops", "nbytes", "peak", "bandwidth")}
    predicted = fit.time(sizes)
    errors = predicted / shapes["seconds"].to_numpy() - 1
    return errors, np.abs(np.log1p(errors)) <= HALF_WIDTH * fit.spread_at(predicted)


class _Split(NamedTuple):
    """A quantity, what is held out, the fits to the rest, and the held-out shapes."""

    quantity: str
    name: str
    fits: Sequence[Roofline]
    shapes: pl.DataFrame


def _list_splits(shapes: pl.DataFrame) -> list[_Split]:
    """Held-out shapes of a system, and the fits that they judge."""
    held_out = pl.col("random")
    wide = shapes.filter("wide")
    known = wide.filter(~held_out)
    random = wide.filter(held_out)
    narrow = shapes.filter(held_out & ~pl.col("wide"))
    to_known = _fit_shapes(known)
    to_any = _fit_shapes(shapes.filter(~held_out))
    to_small = _fit_shapes(wide.filter(~pl.col("largest")))
    rng = np.random.default_rng(0)
    to_few = []
    for _ in range(_DRAWS):
        drawn = rng.choice(len(known), _FEW, replace=False)
        to_few.append(_fit_shapes(known[drawn]))
    return [
        _Split("GEMM", "random fifth", [to_known], random),
        _Split("GEMM", f"{_FEW} shapes", to_few, random),
        _Split("GEMM", "largest tenth", [to_small], wide.filter("largest")),
        _Split("GEMM, any size", "random fifth", [to_any], shapes.filter(held_out)),
        _Split("GEMM, any size: all sides from 512", "random fifth", [to_any], random),
        _Split("GEMM, any size: a side under 512", "random fifth", [to_any], narrow),
    ]


def _judge_splits(system: str, shapes: pl.DataFrame) -> Iterator[Judged]:
    """Held-out shapes of a system by quantity and split."""
    for split in _list_splits(shapes):
        about = (system, split.quantity, "roofline", 4, split.name)
        for draw, fit in enumerate(split.fits):
            errors, inside = _judge_shapes(fit, split.shapes)
            yield Judged(*about, errors, inside, draw)


def judge_gemms(systems: Sequence[str]) -> list[Judged]:
    """Held-out shapes of each system, of A100 and H100 together, and of fits with the datasheet of
    another GPU."""
    shapes = {system: load_shapes(system) for system in systems}
    points = list[Judged]()
    for system, measured in shapes.items():
        points += _judge_splits(system, measured)
    judged = pool(points)
    for source, target in _SWAPS:
        if source in shapes and target in shapes:
            fit = _fit_shapes(shapes[source].filter(~pl.col("random")))
            errors, inside = _judge_shapes(fit, shapes[target])
            about = ("GEMM, any size: datasheet swapped", f"roofline of {source}", 0, "every shape")
            judged.append(Judged(target, *about, errors, inside))
    return judged


# The command.

_COLUMNS = {
    "system": "{system}",
    "quantity": "{quantity}",
    "split": "{split}",
    "form": "{form}",
    "parameters": "{parameters}",
    "n": "{n}",
    **{name: f"{{{name}:.1f}}" for name in _FIGURES},
    "bias": "{bias:+.1f}",
    "inside": "{inside:.0f}",
    "bar [%]": "{bar}",
    "met": "{met}",
}


def choose_systems(words: str) -> list[str]:
    """Systems of a comma-separated list; ``all`` are those whose measurements are here."""
    if words != "all":
        return [check_choice("systems", word.strip(), DATASHEETS) for word in words.split(",")]
    try:
        known = set(list_tables()["system"])
    except FileNotFoundError as error:
        print(f"only {' and '.join(PAIR)}: {error}", file=sys.stderr)
        return [*PAIR]
    others = [system for system in DATASHEETS if system in known and system not in PAIR]
    return [*PAIR, *others]


def list_faults(rows: Sequence[Row], systems: Sequence[str]) -> list[str]:
    """Bars of these systems that are missed or that no record belongs to, in words."""
    met = {}
    for row in rows:
        met[row["system"], row["quantity"], row["split"]] = row["met"]
    faults = []
    for bar in BARS:
        system = bar[0]
        if not set(system.split("+")) <= set(systems) or met.get(bar):
            continue
        word = "missed" if met.get(bar) is False else "not judged"
        faults.append(f"{word}: {', '.join(bar)}")
    return faults


@command(
    {
        "--systems": {
            "default": "all",
            "help": "comma-separated names, or all: every one whose data are here",
        }
    }
)
def main(given: Any) -> int:
    """Errors of GPU forms on held-out measurements."""
    systems = choose_systems(given.systems)
    if {*systems} & {*PAIR}:
        find_shared_data()
    rows = make_records(judge_collectives(systems) + judge_gemms(systems))
    print(lay_out(rows, _COLUMNS))
    faults = list_faults(rows, systems)
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))
