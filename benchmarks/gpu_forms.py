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
    found = list(judged)
    both = {*PAIR} <= {one.system for one in found}
    return found + [one._replace(system=POOLED) for one in found if both and one.system in PAIR]


def make_records(judged: Iterable[Judged]) -> list[dict[str, Any]]:
    """Figures by system, quantity, form and split [%] (means over draws), and whether they meet
    their bar."""
    groups: dict[Any, dict[int, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    for one in judged:
        groups[one[:5]][one.draw].append(one)
    records = []
    for key, draws in groups.items():
        figures = []
        for own in draws.values():
            inside = np.concatenate([one.inside for one in own]).mean()
            errors = summarize_errors(np.concatenate([one.errors for one in own]))
            figures.append(errors | {"inside": 100 * float(inside)})
        names = (*_FIGURES, "bias", "inside")
        means = {name: round(float(np.mean([one[name] for one in figures])), 2) for name in names}
        record = dict(zip(Judged._fields[:5], key, strict=True)) | {
            "n": int(figures[0]["n"]),
            **means,
            "met": None,
        }
        if bar := BARS.get((record["system"], record["quantity"], record["split"])):
            record["bar"] = " / ".join("-" if limit == np.inf else f"{limit:g}" for limit in bar)
            record["met"] = all(
                means[name] <= limit for name, limit in zip(_FIGURES, bar, strict=True)
            )
            if record["system"] == POOLED:
                record["met"] &= INSIDE[0] <= means["inside"] <= INSIDE[1]
        records.append(record)
    return records


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
    operation, ranks = rows["operation"][0], rows["ranks"][0]
    nbytes, seconds = rows["nbytes"].to_numpy(), rows["seconds"].to_numpy()
    with keep_quiet():
        platform = replace(load_platform("h100-sxm-8"), collectives=fits, network=Network(ranks))
        found = platform.price_collective(operation, nbytes, ranks)
    return found.time / seconds - 1, np.abs(np.log(seconds / found.time)) < 1.2816 * found.spread


def judge_sizes(
    frame: pl.DataFrame, fit: Callable[..., CollectiveModel]
) -> Iterator[tuple[Any, Any]]:
    """Fit every other size of a curve and judge the others, for both halves."""
    for rows in frame.partition_by(_CURVE, maintain_order=True):
        for start in (0, 1):
            half, rest = rows.gather_every(2, start), rows.gather_every(2, 1 - start)
            curve = fit(half["nbytes"].to_numpy(), half["seconds"].to_numpy())
            yield _judge_curve({f"{rows['operation'][0]}.{rows['ranks'][0]}": curve}, rest)


def judge_ranks(frame: pl.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Fit 2 and 4 ranks and judge 8 of the same operation, dtype and library, with whatever
    algorithm it uses."""
    for rows in frame.partition_by(
        [name for name in _CURVE if name != "ranks"], maintain_order=True
    ):
        few, eight = rows.filter(pl.col("ranks") < 8), rows.filter(pl.col("ranks") == 8)
        if few["ranks"].n_unique() == 2 and eight.height:
            operation = rows["operation"][0]
            law = fit_over_ranks(
                operation, *(few[name].to_numpy() for name in ("ranks", "nbytes", "seconds"))
            )
            yield _judge_curve({f"{operation}.any": law}, eight)


def judge_collectives(systems: Sequence[str]) -> list[Judged]:
    """Held-out points of collectives by quantity and system."""
    frames, sizes = {system: read_curves(system) for system in systems}, "every other size"
    kinds: list[tuple[str, str, int, str, Callable[[pl.DataFrame], Iterator[tuple[Any, Any]]]]] = [
        ("two parameters", "pipelined, q = 0.6", 2, sizes, partial(judge_sizes, fit=fit_pipelined)),
        ("chosen form", "by left-out sizes", 4, sizes, partial(judge_sizes, fit=fit_collective)),
        ("rank law", "over_ranks, q = 0.6", 4, "2 and 4 ranks to 8", judge_ranks),
    ]
    found = list[Judged]()
    for quantity, form, parameters, split, points in kinds:
        found += pool(
            Judged(system, f"collective, {quantity}", form, parameters, split, *judged)
            for system, frame in frames.items()
            for judged in points(frame)
        )
    return found


# Products.


def load_shapes(system: str) -> pl.DataFrame:
    """Measured bf16 GEMMs of a system: sizes, times [s], what is held out, work and the rates of
    the datasheet.

    `random` and `largest` mark held-out shapes: as the shared measurements say, else a random fifth
    and the largest tenth. `wide` marks shapes without a side under 512.
    """
    wide = pl.min_horizontal("m", "n", "k") >= 512
    if system in PAIR:
        frame = pl.read_csv(find_shared_data("gemm", f"gemm_bf16_{system}.csv")).with_columns(
            seconds=pl.col("latency_us_sglang") * 1e-6,
            random=pl.col("split_random") == "test",
            largest="extrap_top_decile_mnk",
        )
    else:
        frame = read_gemms(system).filter(pl.col("collector") == "sglang")
        frame = frame.group_by("m", "n", "k").agg(pl.col("seconds").median()).sort("m", "n", "k")
        size, drawn = (
            pl.col("m") * pl.col("n") * pl.col("k"),
            np.random.default_rng(0).random(len(frame)) < 0.2,
        )
        largest = size >= size.filter(wide).quantile(0.9, "linear")
        frame = frame.with_columns(random=pl.Series(drawn), largest=largest)
    device, frame = read_datasheet(DATASHEETS[system]).device, frame.cast({pl.Int64: pl.Float64})
    sizes = [frame[name].to_numpy() for name in "mnk"]
    return frame.with_columns(
        wide=wide,
        flops=gemm_flops(*sizes),
        nbytes=gemm_bytes(*sizes, itemsize=2),
        peak=pl.lit(device.peaks["bf16"].value),
        bandwidth=pl.lit(device.main_bandwidth),
    )


def _fit_shapes(shapes: pl.DataFrame) -> Roofline:
    flops, nbytes, seconds = (shapes[name].to_numpy() for name in ("flops", "nbytes", "seconds"))
    return fit_roofline(
        flops, nbytes, seconds, peak=shapes["peak"][0], bandwidth=shapes["bandwidth"][0]
    )


def _judge_shapes(fit: Roofline, shapes: pl.DataFrame) -> tuple[Any, Any]:
    """Errors of a fit on shapes, and which are inside its 80 % interval."""
    sizes = {name: shapes[name].to_numpy() for name in ("flops", "nbytes", "peak", "bandwidth")}
    predicted = fit.time(sizes)
    error = predicted / shapes["seconds"].to_numpy() - 1
    return error, np.abs(np.log1p(error)) <= 1.2816 * fit.spread_at(predicted)


def _judge_splits(system: str, shapes: pl.DataFrame) -> Iterator[Judged]:
    """Held-out shapes of a system by quantity and split."""
    wide, held, largest = shapes.filter("wide"), pl.col("random"), pl.col("largest")
    known, random, whole = wide.filter(~held), wide.filter(held), _fit_shapes(shapes.filter(~held))
    rng = np.random.default_rng(0)
    few = [_fit_shapes(known[rng.choice(len(known), _FEW, replace=False)]) for _ in range(_DRAWS)]
    for quantity, split, fits, rest in (
        ("GEMM", "random fifth", [_fit_shapes(known)], random),
        ("GEMM", f"{_FEW} shapes", few, random),
        ("GEMM", "largest tenth", [_fit_shapes(wide.filter(~largest))], wide.filter(largest)),
        ("GEMM, any size", "random fifth", [whole], shapes.filter(held)),
        ("GEMM, any size: all sides from 512", "random fifth", [whole], random),
        (
            "GEMM, any size: a side under 512",
            "random fifth",
            [whole],
            shapes.filter(held & ~pl.col("wide")),
        ),
    ):
        for draw, fit in enumerate(fits):
            yield Judged(system, quantity, "roofline", 4, split, *_judge_shapes(fit, rest), draw)


def judge_gemms(systems: Sequence[str]) -> list[Judged]:
    """Held-out shapes of each system, of A100 and H100 together, and of fits with the datasheet of
    another GPU."""
    shapes = {system: load_shapes(system) for system in systems}
    found = pool(one for system, own in shapes.items() for one in _judge_splits(system, own))
    for source, target in _SWAPS:
        if source in shapes and target in shapes:
            errors = _judge_shapes(
                _fit_shapes(shapes[source].filter(~pl.col("random"))), shapes[target]
            )
            quantity, form = "GEMM, any size: datasheet swapped", f"roofline of {source}"
            found.append(Judged(target, quantity, form, 0, "every shape", *errors))
    return found


# The command.

_COLUMNS = {
    name: f"{{{name}}}" for name in ("system", "quantity", "split", "form", "parameters", "n")
}
_COLUMNS |= {name: f"{{{name}:.1f}}" for name in _FIGURES}
_COLUMNS |= {"bias": "{bias:+.1f}", "inside": "{inside:.0f}", "bar [%]": "{bar}", "met": "{met}"}


def choose_systems(words: str) -> list[str]:
    """Systems of a comma-separated list; ``all`` are those whose measurements are here."""
    if words != "all":
        return [check_choice("systems", word.strip(), DATASHEETS) for word in words.split(",")]
    try:
        found = set(list_tables()["system"])
    except FileNotFoundError as error:
        print(f"only {' and '.join(PAIR)}: {error}", file=sys.stderr)
        return [*PAIR]
    return [*PAIR, *(system for system in DATASHEETS if system in found and system not in PAIR)]


def list_faults(rows: Sequence[Row], systems: Sequence[str]) -> list[str]:
    """Bars of these systems that are missed or that no record belongs to, in words."""
    keys = {
        tuple(row[name] for name in ("system", "quantity", "split")): row["met"] for row in rows
    }
    wanted = [key for key in BARS if set(key[0].split("+")) <= set(systems)]
    said = {False: "missed", None: "not judged"}
    return [f"{said[keys.get(key)]}: {', '.join(key)}" for key in wanted if not keys.get(key)]


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
    print("".join(f"{fault}\n" for fault in faults), end="", file=sys.stderr)
    return int(bool(faults))
