"""Platforms from data that people already have: logs of nccl-tests, a kernel database, and parts
measured before."""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars as pl

from perfkit.fitting import (
    AttentionRoofline,
    CollectiveModel,
    Fit,
    KernelModel,
    Pipelined,
    Roofline,
    TwoBranch,
    fit_collective,
    fit_over_ranks,
    fit_roofline,
)
from perfkit.fitting.collectives import MISSES, find_miss, find_spread
from perfkit.fitting.parameters import Key
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import DTYPES, Device, Link, Network, Quantity
from perfkit.ground.progress import show_line
from perfkit.ground.results import Table
from perfkit.ground.units import check_choice, check_positive, escape, format_bytes, format_rate
from perfkit.models.collectives import OPERATIONS, bus_factor
from perfkit.models.hierarchy import OVERLAP, start_across
from perfkit.models.roofline import (
    attention_bytes,
    attention_flops,
    attention_work,
    gemm_bytes,
    gemm_flops,
)
from perfkit.platform.collective_costs import (
    ALL_TRANSFER,
    LARGEST_START_UP,
    SIGMA_START_UP,
    FittedCost,
    FittedCurve,
)
from perfkit.platform.collective_fits import (
    CONTRADICTED,
    LOWER_BOUND,
    advise_network,
    find_fitted_cost,
    is_bound,
)
from perfkit.platform.datasheets import HOP, find_adapter, list_datasheets, read_datasheet
from perfkit.platform.file import list_gallery
from perfkit.platform.gallery import find_models, is_same_device, load_platform
from perfkit.platform.kernels import HEAD_MULTIPLES, find_softmax_width
from perfkit.platform.platform import Platform
from perfkit.readers import kernel_database as database
from perfkit.readers.nccl import ONE_RANK, NcclLogs, read_logs

F = TypeVar("F", bound=Fit)
#: Spread above which a fit is called poor [-]; docs/formulas.md, table 1.4.
POOR = 0.25
#: The switch reduces if half precision takes less than this share of the time of int8 [-], from
#: this size on [B].
IN_NETWORK, LARGE = 0.85, 2**26
UNFITTED = "no standard error: not fitted"
#: Number formats to fit, if measured: those of gradients first.
PREFERRED = ("bf16", "fp16", "fp32", "fp64")
#: Sizes whose time over nodes is below this many times that inside them do not show the link
#: between nodes [-]; docs/formulas.md, table 1.4.
HIDDEN = 1.05
#: Where this is so at the largest sizes, the link is only bounded; up to the second, the spread of
#: the stages inside nodes counts [-].
BOUNDED, UNCERTAIN = 1.02, 1.25
#: Collectives whose bytes between nodes are known, whatever the algorithm.
CROSSING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Largest message between nodes that is nothing but start-up, so that it tells the latency of a hop:
#: near it libraries take more channels, see `perfkit.models.collectives.two_branch` [B].
LARGEST_HOP = 2.0**16
#: Spread of a fit of rails that is only a bound [-].
BOUND_SPREAD = 0.3
#: A link between nodes is questionable above this many times its network adapters, or below [-].
TOO_FAST, TOO_SLOW = 1.15, 0.02
#: Bus bandwidth inside a node, over the link of the datasheet, from which a log is doubted [-]:
#: a switch that reduces gives up to 1.1.
TOO_FAST_INSIDE = 1.5
#: Spread of the stages inside nodes [-]: of fits of logs of one node.
INSIDE_SPREAD = 0.06
#: Ratio of times in two logs, at the same sizes, from which on they are of different systems [-].
CONTRADICTION = 1.5
#: Share of a proven bandwidth that a fit may miss as noise [-].
PROVEN = 0.97


def _say_origin(fit: F, source: str, date: str) -> F:
    """Add source, files, formats and date to a fit; mark it as poor if its spread is wide."""
    text = ", ".join(filter(None, (source, *fit.sources, "/".join(sorted(fit.dtypes)))))
    fit = replace(fit, source=text, date=date)
    if fit.spread <= POOR or is_bound(fit):
        return fit
    note = f"poor fit: measurements scatter by {fit.spread:.0%} around this form"
    return replace(fit, quality="poor", notes=(*fit.notes, note))


def _list_logs(rows: Table) -> tuple[str, ...]:
    return tuple(sorted(rows["file"].unique())) if "line" in rows.columns else ()


def fit_curves(
    frame: Table,
    *,
    ranks_per_node: int | None = None,
    source: str = "",
    date: str = "",
    judged: bool = True,
    progress: bool = False,
) -> dict[str, CollectiveModel]:
    """Fit every collective of a tidy frame: one curve per rank count, and a law over several
    counts.

    Names are ``<operation>.<ranks or any>[.<algorithm>]``. The algorithm is ``rail`` if nodes have
    one rank each, and ``in_network`` and ``ring`` if half-precision sums are so much faster than
    int8 that the switch must reduce them. A law is fitted only inside nodes: between nodes the
    algorithm changes with the count. `ranks_per_node` is used where the frame has no nodes. A size
    that a curve misses widens its spread, unless the times are not `judged`.
    """
    rows = _select(frame).filter(pl.col("operation").is_in(OPERATIONS) & (pl.col("seconds") > 0))
    if rows.is_empty():
        known = ", ".join(sorted(frame["operation"].unique())) or "nothing"
        raise ValueError(
            f"frame holds {known}; it must hold times of {', '.join(OPERATIONS)}; pass other logs"
        )
    guess = 1 if ranks_per_node is None else (pl.col("ranks") / ranks_per_node).ceil()
    nodes = pl.coalesce(pl.col("nodes"), guess)
    place = (
        pl.when(nodes == 1)
        .then(pl.lit("inside"))
        .when(nodes == pl.col("ranks"))
        .then(pl.lit("rail"))
    )
    placed = rows.with_columns(place=place.otherwise(pl.lit("across")))
    fits: dict[str, CollectiveModel] = {}
    groups = sorted(placed.group_by("operation", "place"), key=lambda item: str(item[0]))
    curves = placed.select("operation", "place", "ranks").n_unique()
    with show_line("fit curves", curves, progress=progress) as advance:
        for (operation, where), group in groups:
            fits |= _fit_operation(str(operation), str(where), group, judged, advance)
    if not fits:
        raise ValueError(
            "every collective was measured at one size only; a curve needs two or more; run the "
            "test from 8 B on, with -b 8 -e 8G -f 2"
        )
    return {key: _say_origin(fit, source, date) for key, fit in fits.items()}


def _select(frame: Table) -> Table:
    """Rows with bytes, out of place where that was measured, and of sums where there are sums."""
    check_threads()
    rows = frame.filter(pl.col("nbytes") > 0)
    if "in_place" in rows.columns:
        out_of_place = ~pl.col("in_place")
        rows = rows.filter(out_of_place | ~out_of_place.any().over("operation", "ranks"))
    if "redop" in rows.columns:  # training sums; products take another kernel
        is_sum = (pl.col("redop") == "sum").fill_null(False)
        rows = rows.filter(is_sum | ~is_sum.any().over("operation", "ranks"))
    return rows


def _fit_operation(
    operation: str, place: str, rows: Table, judged: bool, advance: Callable[[], None]
) -> dict[str, CollectiveModel]:
    """Fit the curves of one operation by rank count, and the law over the counts inside nodes;
    `advance` is called after each count."""
    fits, law = {}, []
    rail = "rail" if place == "rail" else ""
    for (count,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        advance()
        dtype = _choose_dtype(group)
        if dtype is None:
            size = format_bytes(float(group["nbytes"][0]))
            warnings.warn(
                f"{operation} on {count} ranks has one size, {size}, and is left out: a curve needs "
                "two or more; run the test from 8 B on, with -b 8 -e 8G -f 2",
                stacklevel=5,
            )
            continue
        key, ring = Key(operation, int(count), rail), group.filter(pl.col("dtype") == dtype)
        curve = _fit_curve(
            ring, *_compare_files(ring, f"{operation} on {count} ranks"), judged=judged
        )
        if place != "across":
            curve = _limit_start(curve, ring, operation, 1 if place == "inside" else int(count))
        fits[str(key)] = curve
        if place == "inside" and operation == "all_reduce" and _is_in_network(group):
            ring = group.filter(pl.col("dtype") == "int8")
            fits[f"{key}.ring"] = _fit_curve(
                ring, "int8 takes the ring: the switch does not reduce it", judged=judged
            )
            curve = replace(
                curve, notes=(*curve.notes, "the switch reduces (in-network reduction, NVLS)")
            )
            fits |= {str(key): curve, f"{key}.in_network": curve}
        law.append(ring)
    if len(law) > 1 and place == "inside":
        every = pl.concat(law)
        fit = fit_over_ranks(
            operation,
            *(every[name].to_numpy() for name in ("ranks", "nbytes", "seconds")),
            judged=judged,
        )
        dtypes = tuple(sorted(every["dtype"].unique()))
        fits[f"{operation}.any"] = replace(fit, sources=_list_logs(every), dtypes=dtypes)
    return fits


def _compare_files(rows: Table, what: str) -> tuple[str, ...]:
    """Note and warning of two logs, or two tables of one log, that contradict each other at the
    sizes that both have."""
    if not {"file", "line"} <= set(rows.columns):
        return ()
    rows = _name_runs(rows)
    if rows["file"].n_unique() < 2:
        return ()
    found = _find_contradiction(rows)
    if found is None:
        return ()
    slow, fast, ratio = found
    note = (
        f"{slow} takes {ratio:.2g} times as long as {fast} for {what}: the curve lies between them"
    )
    warnings.warn(f"{note}; use the logs of one system", stacklevel=6)
    return (note,)


class _Contradiction(NamedTuple):
    """Two runs of one collective whose times differ too much."""

    slow: str
    fast: str
    ratio: float  # median over the sizes that both have [-]


def _find_contradiction(rows: Table) -> _Contradiction | None:
    """The two runs with the largest ratio of times above `CONTRADICTION`; None without one.

    A run is compared with all others only if it could be the slow one of such a pair, which its
    times beside the fastest ones of any run tell: thousands of runs of one system are compared with
    the fastest times alone.
    """
    medians = rows.group_by("file", "nbytes").agg(pl.col("seconds").median())
    runs = medians["file"].unique().sort()
    sizes = medians["nbytes"].unique().sort()
    times = np.full((len(runs), len(sizes)), math.nan)
    places = runs.search_sorted(medians["file"]), sizes.search_sorted(medians["nbytes"])
    times[places[0].to_numpy(), places[1].to_numpy()] = medians["seconds"].to_numpy()
    most = _bound_ratios(times)
    worst: _Contradiction | None = None
    for slow in np.argsort(-most, kind="stable"):
        least = CONTRADICTION if worst is None else worst.ratio
        if most[slow] < least:
            break
        ratios = times[slow] / times
        shared = np.isfinite(ratios).sum(axis=1)
        shared[slow] = 0
        ratios = np.where(shared[:, None] >= 2, ratios, -math.inf)
        medians_of_pairs = np.nanmedian(ratios, axis=1)
        ratio = float(medians_of_pairs.max())
        if ratio <= CONTRADICTION:
            continue
        fast = int(np.flatnonzero(medians_of_pairs == ratio)[-1])
        pair = _Contradiction(runs[int(slow)], runs[fast], ratio)
        if worst is None or (pair.ratio, pair.slow) > (worst.ratio, worst.slow):
            worst = pair
    return worst


def _bound_ratios(times: np.ndarray) -> np.ndarray:
    """For each run, shape (runs, sizes), a bound of the median ratio of its times to those of any
    other run at two sizes or more [-]."""
    above_fastest = times / np.nanmin(times, axis=0)
    if not np.isnan(times).any():
        return np.asarray(np.median(above_fastest, axis=1))
    # the median over some of the sizes is at most the mean of the two largest ratios
    largest = np.sort(np.nan_to_num(above_fastest, nan=0.0), axis=1)[:, -2:]
    return np.asarray(largest.mean(axis=1))


def _name_runs(rows: Table) -> Table:
    """Rows whose file says which time it measured their size, if it measured sizes repeatedly."""
    time = pl.int_range(1, pl.len() + 1).over("file", "nbytes", order_by="line")
    # a column of its own: before 1.36, polars takes no window inside a window
    numbered = rows.with_columns(time=time)
    repeated = (pl.col("time") > 1).any().over("file")
    name = pl.when(repeated).then(pl.format("{} (time {})", "file", "time")).otherwise("file")
    return numbered.with_columns(file=name).drop("time")


def _choose_dtype(rows: Table) -> str | None:
    """Number format to fit: a preferred one, or the most frequent; None where none has two sizes."""
    counts = rows.group_by("dtype").agg(pl.col("nbytes").n_unique())
    usable = counts.filter(pl.col("nbytes") > 1)["dtype"].to_list()
    if not usable:
        return None
    preferred = [name for name in PREFERRED if name in usable]
    if preferred:
        return preferred[0]
    return str(rows.filter(pl.col("dtype").is_in(usable))["dtype"].mode().sort()[0])


def _fit_curve(rows: Table, *notes: str, judged: bool) -> CollectiveModel:
    """Fit one curve in one number format."""
    nbytes = rows["nbytes"].to_numpy()
    fit = fit_collective(nbytes, rows["seconds"].to_numpy(), judged=judged)
    least = float(nbytes.min())
    if least > LARGEST_START_UP:
        notes = (
            f"the start-up is a guess: no message under {format_bytes(least)} was measured",
            *notes,
        )
    return replace(
        fit, notes=(*fit.notes, *notes), sources=_list_logs(rows), dtypes=(rows["dtype"][0],)
    )


def _limit_start(
    curve: CollectiveModel, rows: Table, operation: str, nodes: int
) -> CollectiveModel:
    """Bound the time of messages below all measured ones, where no start-up was measured.

    The start-up of a curve through large messages holds whatever slows these down. A smaller message
    needs no more than the start-up of the library, and for each byte what the smallest measured one
    took: a second branch of the curve. It is slower at all measured sizes. A start-up that is that of
    the library within its uncertainty stays.
    """
    if not isinstance(curve, Pipelined):
        return curve
    least, _ = curve.ranges["nbytes"]
    ranks = int(rows["ranks"][0])
    start = float(start_across(operation, ranks_per_node=ranks // nodes, nodes=nodes))
    if least <= LARGEST_START_UP or curve["alpha"] <= start * math.exp(SIGMA_START_UP):
        return curve
    measured = rows.filter(pl.col("nbytes") == least)["seconds"].to_numpy()
    per_byte = float(np.median(measured)) / least
    parameters = {
        "alpha1": start,
        "beta1": per_byte,
        "alpha2": curve["alpha"],
        "beta2": curve["beta"],
        "sharpness": curve["sharpness"],
    }
    errors = {f"{name}2": error for name, error in curve.stderr.items() if name != "sharpness"}
    return TwoBranch.build(
        parameters,
        stderr={"alpha1": SIGMA_START_UP * start} | errors,
        spread=curve.spread,
        bias=curve.bias,
        ranges=curve.ranges,
        n=curve.n,
        notes=(*curve.notes, "below it, the start-up is that of NCCL's tuning table"),
        at_bounds=tuple(f"{name}2" for name in curve.at_bounds),
        quality=curve.quality,
        sources=curve.sources,
        dtypes=curve.dtypes,
    )


def _is_in_network(rows: Table) -> bool:
    """Whether large sums in half precision are much faster than in int8."""
    large = (
        rows.filter(pl.col("nbytes") >= LARGE)
        .group_by("nbytes", "dtype")
        .agg(pl.col("seconds").median())
    )
    wide = large.pivot("dtype", index="nbytes", values="seconds")
    if not {"fp16", "int8"} <= set(wide.columns):
        return False
    ratio = (wide["fp16"] / wide["int8"]).median()
    return isinstance(ratio, float) and ratio < IN_NETWORK


def fit_rails(
    frame: Table, platform: Platform, *, source: str = "", date: str = ""
) -> dict[str, CollectiveModel]:
    """Fit the stage between nodes of all_reduces over whole nodes: ``all_reduce.<nodes>.rail``.

    The stages inside the nodes are removed from the measured times: as both overlap
    (`perfkit.models.hierarchy`), the rest is ``(t^q - t_inside^q)^(1/q)``. Where the largest
    messages leave no rest, the link is hidden: it took the whole time at most, which bounds its
    bandwidth from below, and a note says so. The platform is one node with fits of reduce_scatter
    and all_gather.
    """
    local, fits = platform.network.ranks_per_node, {}
    rows = _select(frame).filter((pl.col("operation") == "all_reduce") & (pl.col("ranks") > local))
    rows = rows.filter(
        pl.col("nodes").fill_null(pl.col("ranks") // local) * local == pl.col("ranks")
    )
    for (ranks,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        if group["nbytes"].n_unique() < 2:
            continue
        nbytes, whole = group["nbytes"].to_numpy().astype(float), group["seconds"].to_numpy()
        stages = [
            platform.collective_time(stage, nbytes, ranks=local)
            for stage in ("reduce_scatter", "all_gather")
        ]
        rails = _separate_rails(nbytes, whole, np.sum(stages, axis=0))
        fit = fit_collective(rails.nbytes / local, rails.seconds, judged=False)
        fit = replace(fit, spread=float(np.hypot(fit.spread, rails.uncertainty)))
        if rails.hidden_from is None:
            fit = _judge_rails(fit, nbytes, whole, np.sum(stages, axis=0), local)
        note = f"the rest of all_reduce on {ranks} ranks without the stages inside the nodes, q = {OVERLAP:g}"
        fit = replace(fit, notes=(*fit.notes, note), sources=_list_logs(group))
        if rails.hidden_from is not None:
            proven = prove_link(group, local)
            size = format_bytes(rails.hidden_from)
            why = f"from {size} on, the stages inside nodes of {platform.name} hide it"
            if rails.share > HIDDEN:
                why += f" (they take {rails.share:.2g} times as long as the whole)"
            fit = _mark_bound(fit, why, 1.0 / proven, int(ranks) // local)
        fits[f"all_reduce.{int(ranks) // local}.rail"] = _say_origin(fit, source, date)
    return fits


def _judge_rails(
    fit: CollectiveModel, nbytes: np.ndarray, whole: np.ndarray, inside: np.ndarray, local: int
) -> CollectiveModel:
    """Note a size whose whole time the curve misses, and widen its spread.

    Where the stages inside nodes take most of the time, the rest is a small difference: the curve
    may be far from it, and the whole time still right.
    """
    rest = fit.time(nbytes / local, "all_reduce", 2)
    fitted = np.log(rest**OVERLAP + inside**OVERLAP) / OVERLAP
    sizes, times = np.log(nbytes), np.log(whole)
    miss = find_miss(sizes, times, fitted, find_spread(times - fitted))
    if miss is None:
        return fit
    spread = max(fit.spread, miss.spread)
    return replace(
        fit,
        spread=spread,
        quality="poor",
        notes=(*fit.notes, f"{miss}, with the stages inside the nodes"),
    )


def prove_link(rows: Table, ranks_per_node: int) -> float:
    """Bandwidth of the link between nodes that measured times prove, 0 where they prove none.

    Parameters
    ----------
    rows : polars.DataFrame
        Collectives, as `perfkit.readers.nccl.read_nccl_tests` returns them.
    ranks_per_node : int
        Ranks of a node, each on its own rail, where the rows have no nodes [-].

    Returns
    -------
    bandwidth : float
        Most bytes that every rail carried in the time of a whole collective; or in what the largest
        size takes longer than the next one, which has no start-up, but at most 3 % more [B/s].

    Notes
    -----
    A node sends and receives at least 2 (N - 1) / N of the bytes of an all_reduce over N nodes (no
    reduction in the switches of the network), (N - 1) / N of an all_gather and a reduce_scatter,
    and each of its ranks (N - 1) / N of an all_to_all.
    """
    nodes = pl.coalesce("nodes", (pl.col("ranks") / ranks_per_node).ceil().cast(pl.Int64))
    across = _select(rows).with_columns(nodes=nodes).filter(pl.col("nodes") > 1)
    best = 0.0
    for (operation, ranks, count), group in across.group_by("operation", "ranks", "nodes"):
        if operation not in CROSSING or int(ranks) % int(count):
            continue
        rails = 1 if operation == "all_to_all" else int(ranks) // int(count)
        share = float(bus_factor(str(operation), int(count))) / rails
        times = group.group_by("nbytes").agg(pl.col("seconds").median()).sort("nbytes")
        sizes = times["nbytes"].to_numpy().astype(float)
        seconds = times["seconds"].to_numpy().astype(float)
        plain = float((share * sizes / seconds).max())
        further = 0.0
        if len(sizes) > 1 and seconds[-1] > seconds[-2]:
            further = share * float((sizes[-1] - sizes[-2]) / (seconds[-1] - seconds[-2]))
        best = max(best, plain, min(further, 1.03 * plain))
    return best


class _Rails(NamedTuple):
    """Times of the stage between nodes, taken from those of whole collectives."""

    nbytes: np.ndarray  # of the whole collective [B]
    seconds: np.ndarray  # of the stage between nodes; an upper bound where it is hidden [s]
    uncertainty: float  # extra spread, because the stages inside nodes are not known exactly [-]
    hidden_from: float | None  # size from which the stages inside hide it; None if they do not [B]
    share: float  # of the whole time that the stages inside take at the largest sizes [-]


def _separate_rails(nbytes: np.ndarray, whole: np.ndarray, inside: np.ndarray) -> _Rails:
    """Remove the stages inside nodes from whole times."""
    rest = np.maximum(whole**OVERLAP - inside**OVERLAP, 0.0) ** (1.0 / OVERLAP)
    ratio = float(np.median((whole / inside)[nbytes >= nbytes.max() / 4]))
    shown = whole > HIDDEN * inside
    if ratio < BOUNDED or len(np.unique(nbytes[shown])) < 2:
        clear = whole >= UNCERTAIN * inside
        hidden_from = float(nbytes[~clear].min())
        return _Rails(nbytes, np.where(clear, rest, whole), 0.0, hidden_from, 1.0 / ratio)
    uncertainty = 0.0
    if ratio < UNCERTAIN:  # a change of the stages inside by 1 % changes the rest by more
        uncertainty = INSIDE_SPREAD / (ratio**OVERLAP - 1.0)
    return _Rails(nbytes[shown], rest[shown], min(uncertainty, 1.0), None, 1.0 / ratio)


def _mark_bound(fit: CollectiveModel, why: str, beta: float, nodes: int) -> CollectiveModel:
    """Give a fit of rails the time per byte that the log proves [s/B], and say that it is a bound."""
    note = f"{LOWER_BOUND} of the link between nodes, which may be faster: {why}"
    last = min((name for name in fit if name.startswith("beta")), key=lambda name: fit[name])
    proven = {last: beta * float(bus_factor("all_reduce", nodes))}
    stderr = {name: error for name, error in fit.stderr.items() if name != last}
    spread = max(fit.spread, BOUND_SPREAD)
    return fit.with_values(
        proven,
        stderr=stderr,
        spread=spread,
        quality="poor",
        notes=(*fit.notes, note),
    )


def fit_kernel(
    rows: Table,
    sizes: Sequence[str],
    flops: pl.Expr,
    nbytes: pl.Expr,
    device: Device,
    dtype: str,
    source: str,
    date: str,
    notes: Sequence[str] = (),
) -> Roofline:
    """Fit a roofline of a device to the medians over rows of the same `sizes`, which are columns of
    the frame."""
    each = rows.group_by(*sizes).agg(pl.col("seconds").median()).sort(*sizes)
    work = each.select(flops, nbytes.alias("nbytes"), "seconds").to_numpy().T
    rates: dict[str, Any] = {"peak": device.peaks[dtype].value, "bandwidth": device.main_bandwidth}
    return _say_origin(fit_roofline(*work, **rates, notes=notes), source, date)


def _floats(*names: str) -> list[pl.Expr]:
    return [pl.col(name).cast(pl.Float64) for name in names]


def fit_gemms(
    frame: Table, device: Device, *, source: str = "", date: str = ""
) -> dict[str, Roofline]:
    """Fit the matrix products of a frame of `perfkit.readers.kernel_database.read_gemms`, each
    number format alone.

    A number format takes its kernel with the most shapes. The key ``gemm`` is half precision; other
    formats have their own, such as ``gemm.fp8``.
    """
    fits = {}
    for (dtype,), group in sorted(frame.group_by("dtype"), key=lambda item: item[0]):
        known = {"nvfp4": "fp4"}.get(dtype, dtype)
        if known not in device.peaks:
            continue
        kernel = group["kernel"].mode().sort()[0] if "kernel" in group.columns else None
        rows = group if kernel is None else group.filter(pl.col("kernel") == kernel)
        m, n, k = _floats(*"mnk")
        nbytes = gemm_bytes(m, n, k, itemsize=DTYPES[known])
        if known in ("fp8", "fp4", "int8"):  # results are in half precision
            nbytes += (2 - DTYPES[known]) * m * n
        text = f"{source}, gemm {dtype}{f' {kernel}' if kernel else ''}".removeprefix(", ")
        fit = fit_kernel(rows, "mnk", gemm_flops(m, n, k), nbytes, device, known, text, date)
        fits[str(Key("gemm", variant="" if known in PREFERRED[:2] else known))] = replace(
            fit, dtypes=(known,)
        )
    if not fits:
        held = f"frame holds products in {', '.join(sorted(set(frame['dtype']))) or 'no number format'}"
        raise ValueError(
            f"{held}; {device.name} has peaks for {', '.join(device.peaks)}; pass others"
        )
    return fits


def fit_attention(
    frame: Table, device: Device, source: str, date: str, notes: Sequence[str] = ()
) -> AttentionRoofline:
    """Fit fused attention over whole sequences, causal and full together.

    Rows of `perfkit.readers.kernel_database.read_attention` with a window, a past, keys in other
    number formats, or head sizes above 256 are left out.
    """
    plain = (
        (pl.col("window") == 0) & (pl.col("past") == 0) & (pl.col("kv_dtype") == pl.col("dtype"))
    )
    rows = frame.filter(plain & (pl.col("head_dim") <= 256) & (pl.col("sequence") >= 32))
    sizes, dtype = (
        ("causal", "batch", "sequence", "heads", "kv_heads", "head_dim"),
        str(rows["dtype"][0]),
    )
    each = rows.group_by(*sizes).agg(pl.col("seconds").median()).sort(*sizes)
    causal, b, s, h, kv, d = each.select(_floats(*sizes)).to_numpy().T
    flops = attention_flops(b, h, s, d, causal=causal)
    tiles = {
        "head_multiple": HEAD_MULTIPLES["flash2"],
        "softmax_width": find_softmax_width(device),
        "diagonal": 0.0,
    }
    fit = fit_roofline(
        attention_work(flops, d, s, **tiles),
        attention_bytes(b, h, s, d, kv_heads=kv, itemsize=DTYPES[dtype]),
        each["seconds"].to_numpy(),
        peak=device.peaks[dtype].value,
        bandwidth=device.main_bandwidth,
        notes=notes,
    )
    return add_tiles(_say_origin(fit, source, date), tiles)


def add_tiles(fit: Roofline, tiles: Mapping[str, float]) -> AttentionRoofline:
    """The form of attention from a roofline that was fitted to the arithmetic of whole tiles."""
    about = {item.name: getattr(fit, item.name) for item in fields(Fit)}
    return AttentionRoofline.build({**fit, **tiles}, stderr=fit.stderr, **about)


def fit_casts(frame: Table, device: Device, source: str, date: str) -> Roofline:
    """Fit kernels that only move memory, from casts that are small or too large for the last cache
    of the device."""
    cache = 0.0
    if len(device.memory) > 1:
        last_cache = device.memory[-2].capacity
        if last_cache is not None:
            cache = last_cache.value
    rows, dtype = (
        frame.filter((pl.col("nbytes") > 4 * cache) | (pl.col("nbytes") < 2**20)),
        next(iter(device.peaks)),
    )
    (nbytes,), notes = (
        _floats("nbytes"),
        ("casts of bf16 to fp8, below 1 MiB and beyond four times the last cache",),
    )
    return fit_kernel(rows, ("nbytes",), 0.0 * nbytes, nbytes, device, dtype, source, date, notes)


def fit_database(
    system: str, device: Device, *, parts: Sequence[str] = (), label: str = "", date: str = ""
) -> tuple[dict[str, CollectiveModel], dict[str, KernelModel]]:
    """Fit the collectives and the kernels of a system in the kernel database, such as ``h100_sxm``.

    `parts` are some of ``collectives``, ``gemm``, ``attention`` and ``elementwise``, by default all
    that the database has; `label` names the database. Products come from the collector sglang,
    which uses random data, in bf16 and, if measured, fp8 and fp4; attention is the forward pass of
    the flash attention of vllm; casts are of plain torch.
    """
    label, held = label or name_database(), set(database.list_tables(system)["table"])
    tables = {
        "collectives": "nccl",
        "gemm": "gemm",
        "attention": "context_attention",
        "elementwise": "scale_matrix",
    }
    asked = [
        check_choice("part", part, tables)
        for part in parts or tables
        if parts or tables[part] in held
    ]
    curves, kernels = dict[str, CollectiveModel](), dict[str, KernelModel]()
    if "collectives" in asked:
        frame = database.read_collectives(system)
        library = f"NCCL {frame['library_version'][0]}, medians over repeats"
        # regular sweeps: their intervals hold sizes left out as they are (benchmarks.gpu_forms)
        source = f"{label}, nccl {system}, {library}"
        curves = fit_curves(frame, source=source, date=date, judged=False)
    unused: list[str] = []
    if "gemm" in asked:
        every = database.read_gemms(system, dtype=None)
        frame = every.filter(pl.col("collector") == "sglang")
        if frame.is_empty():
            unused.append(
                f"matrix products of {_list_collectors(every)}: only those of sglang are used, which "
                "multiplies random numbers (others take less power, so their times are too short)"
            )
        else:
            kernels |= fit_gemms(frame, device, source=f"{label}, {system}", date=date)
    if "attention" in asked:
        # Blackwell's own kernel of flash attention runs only full attention with narrow heads there
        flash = (pl.col("collector") == "vllm") & pl.col("kernel").str.contains(
            "flash_attn|trtllmprefill"
        )
        every = database.read_attention(system)
        frame = every.filter(flash)
        if frame.is_empty():
            unused.append(
                f"attention of {_list_collectors(every)}: only flash attention of vllm is used"
            )
    if "attention" in asked and not frame.is_empty():
        names = "/".join(sorted(frame["kernel"].unique()))
        notes = ["forward only; the backward pass is assumed to reach the same share of the peak"]
        if "fa3" in names or "fa4" in names:
            notes.append(
                "torch's own flash attention is version 2: about half as fast there (arXiv 2407.08608)"
            )
        kernels["attention"] = fit_attention(
            frame, device, f"{label}, {system}, {names}", date, notes
        )
    if "elementwise" in asked:
        every = database.read_casts(system)
        frame = every.filter(pl.col("kernel") == "torch_ops")
        if frame.is_empty():
            unused.append(f"casts of {_list_collectors(every)}: only those of plain torch are used")
        else:
            kernels["elementwise"] = fit_casts(frame, device, f"{label}, {system}, torch_ops", date)
    if unused and not curves and not kernels:
        raise ValueError(f"{system} has nothing that can be used; not used are {'; '.join(unused)}")
    for text in unused:
        warnings.warn(f"{system}: not used are {text}", stacklevel=3)
    return curves, kernels


def _list_collectors(rows: Table) -> str:
    """Name the collectors of rows of the kernel database."""
    return f"collector {', '.join(sorted(map(str, rows['collector'].unique())))}"


def name_database() -> str:
    """Name of the installed kernel database, with its version if that is known."""
    try:
        return f"aiconfigurator-core {version('aiconfigurator-core')} (Apache-2.0)"
    except PackageNotFoundError:
        return "aiconfigurator-core (Apache-2.0)"


def assemble(
    base: Platform,
    *,
    name: str | None = None,
    nodes: int | None = None,
    collectives: Mapping[str, CollectiveModel] | None = None,
    kernels: Mapping[str, KernelModel] | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Platform:
    """Put fitted parts, from `fit_curves` and similar functions, into a platform; other parts are
    unchanged.

    The latency of a link comes from the start-up of a fitted collective over its ring steps, and
    the bandwidth between nodes from the fits of rails. Operations inside a node without a fit take
    the fit of a similar one.
    """
    curves, fits = collectives or {}, dict(kernels or {})
    network = replace(
        base.network, nodes=nodes or base.network.nodes, links=_fit_links(base.network, curves)
    )
    for kind, model in (("bmm", "gemm"), ("rowwise", "elementwise"), ("copy", "elementwise")):
        if (
            model in fits
            and kind not in fits
            and (kind not in base.kernels or base.kernels[kind].kind == "assumed")
        ):
            spread = max(0.35, 1.5 * fits[model].spread)
            fits[kind] = _follow(fits[model], model, spread=spread, spread_time=None, notes=())
    return replace(
        base,
        name=name or base.name,
        network=network,
        collectives=_complete({**base.collectives, **curves}, network.ranks_per_node),
        kernels={**base.kernels, **fits},
        provenance={**base.provenance, **(provenance or {})},
    )


def _follow(fit: F, name: str, **changes: Any) -> F:
    """Fit of an operation that was not measured, from the fit of a similar one."""
    return replace(
        fit, source=f"as {name}: {fit.source}", n=0, kind="assumed", quality="", **changes
    )


def _complete(fits: Mapping[str, CollectiveModel], ranks: int) -> dict[str, CollectiveModel]:
    """Add a broadcast with the start-up and the bus bandwidth of all_gather, if there is no
    broadcast."""
    ranks = next((count for count in range(ranks, 1, -1) if f"all_gather.{count}" in fits), 0)
    gather = fits.get(f"all_gather.{ranks}")
    if gather is None or any(Key.parse(key).operation == "broadcast" for key in fits):
        return dict(fits)
    scale = 1.0 / bus_factor("all_gather", ranks)
    scaled = {
        key: value * (scale if key.startswith("beta") else 1.0) for key, value in gather.items()
    }
    text = f"all_gather.{ranks}, with the same start-up and busbw"
    broadcast = _follow(
        gather.with_values(scaled, stderr={}),
        text,
        spread=max(0.3, gather.spread),
        bias=0.0,
        notes=(UNFITTED,),
        at_bounds=(),
    )
    return {**fits, f"broadcast.{ranks}": broadcast}


def _fit_links(network: Network, fits: Mapping[str, CollectiveModel]) -> dict[str, Link]:
    """Links with the latency of a hop from fitted collectives, and the bandwidth between nodes from
    the rails."""
    links = dict(network.links)
    known = sorted(
        key
        for key in map(Key.parse, fits)
        if key.ranks and key.operation in ("all_gather", "all_reduce")
    )
    for name, algorithm in (("intra", ""), ("inter", "rail")):
        keys = [key for key in known if key.algorithm == algorithm]
        if not keys:
            continue
        key = keys[-1] if algorithm else max(keys[:3], key=lambda key: key.ranks or 0)
        count, fit = key.ranks or 0, fits[str(key)]
        fitted = FittedCost(key.operation, count, (FittedCurve(fit, count),))
        alpha, beta = fitted.invert_ring()
        why = f"{key.operation} on {count} ranks: {fit.source}"
        text = f"what the smallest size takes beyond its transfer, over its ring steps, {why}"
        hop = (
            HOP
            if algorithm and fitted.smallest > LARGEST_HOP
            else Quantity(alpha, "s", "fitted", text, fit.date)
        )
        rate = f"bus bandwidth, {why}"
        if is_bound(fit):
            rate = f"{LOWER_BOUND}, the link may be faster: {rate}"
        wire = Quantity(1.0 / beta, "B/s", "fitted", rate, fit.date, basis="one way per rank")
        links[name] = replace(links[name], latency=hop) if name in links else Link(wire, hop)
    return links


def assemble_sources(
    base: str | Path | Platform | None = None,
    *,
    name: str | None = None,
    nccl_logs: str | Path | Sequence[str | Path] | None = None,
    kernel_database: str | None = None,
    partial: bool = False,
    ranks_per_node: int | None = None,
    date: str = "",
    progress: bool = False,
) -> Platform:
    """Make a platform from logs of nccl-tests, the kernel database and a platform to start from.

    Logs replace fits of the database, and both replace fits of `base`: a gallery name, file or
    platform, by default the gallery's node of the system. Nodes are added if the logs have more,
    with as many ranks as the logs say or `ranks_per_node`. With `partial`, logs are read up to a
    broken line. Another device and unused logs give a warning. `progress` shows a line on a terminal
    where logs and curves take more than two seconds.
    """
    if nccl_logs is None and kernel_database is None:
        raise ValueError(
            "no source is given; name logs of nccl-tests, a system of the kernel database, or both"
        )
    if ranks_per_node is not None:
        ranks_per_node = int(check_positive("ranks_per_node", ranks_per_node, integer=True))
    platform = find_base(kernel_database) if base is None else load_platform(base)
    start, sources = platform.name, []
    if platform.device.kind == "cpu":
        raise ValueError(
            f"base is {start!r}, a CPU; the sources are of GPUs; name a platform such as h100-sxm-8"
        )
    if kernel_database is not None:
        sheets = [read_datasheet(sheet).device.name for sheet in _find_sheets(kernel_database)[-1:]]
        stated = kernel_database.upper().replace("_", " ")
        names = sheets or [stated]
        base_platform = platform
        if not sheets and not is_same_device(stated, platform.device.name):
            model = min(find_models(stated), default=stated)
            device = replace(platform.device, name=f"{model}, peaks assumed")
            platform = replace(
                platform, name=f"{kernel_database}-{platform.network.ranks_per_node}", device=device
            )
        curves, kernels = fit_database(kernel_database, platform.device, date=date)
        # only a fit mixes devices: a database without one is refused above
        compare_devices(f"{kernel_database} is", names, base_platform)
        platform = assemble(platform, collectives=curves, kernels=kernels)
        sources.append(f"{name_database()}, {kernel_database}")
    if nccl_logs is not None:
        platform = _add_logs(platform, nccl_logs, partial, date, ranks_per_node, progress)
        logs = [nccl_logs] if isinstance(nccl_logs, str | Path) else nccl_logs
        sources.append(f"nccl-tests logs in {', '.join(map(str, logs))}")
    return assemble(platform, name=name, provenance={"sources": "; ".join(sources), "base": start})


def compare_devices(what: str, names: Sequence[str], platform: Platform) -> None:
    """Warn about measurements of another device than that of their platform."""
    others = [name for name in names if name and not is_same_device(name, platform.device.name)]
    if others:
        mixed = f"platform {platform.name!r} of {platform.device.name}: it now mixes both"
        warnings.warn(
            f"{what} of {', '.join(map(escape, others))}, {mixed}; take another base, or other sources",
            stacklevel=4,
        )


def _compare_logs(devices: Mapping[str, Sequence[str]]) -> None:
    """Warn about logs of several kinds of GPU, in one file or over all files."""
    for file, names in devices.items():
        kinds = _list_kinds(names)
        if kinds:
            warnings.warn(
                f"{file} lists several kinds of GPU, {kinds}: its times are those of the slowest",
                stacklevel=4,
            )
            return
    kinds = _list_kinds(list(chain.from_iterable(devices.values())))
    if kinds:
        warnings.warn(
            f"the logs are of several kinds of GPU, {kinds}: their curves now mix; "
            "calibrate each kind alone",
            stacklevel=4,
        )


def _list_kinds(names: Sequence[str]) -> str:
    """Devices of different kinds, one name for each; empty where all may be the same."""
    kinds: list[str] = []
    for name in names:
        if not any(is_same_device(name, kind) and is_same_device(kind, name) for kind in kinds):
            kinds.append(name)
    return ", ".join(map(escape, kinds)) if len(kinds) > 1 else ""


def find_base(system: str | None) -> Platform:
    """Find the single node in the gallery for a system of the kernel database.

    Examples
    --------
    >>> find_base("gb200").name, find_base("rtx_pro_6000_server").name
    ('gb200-4', 'rtx-pro-6000-8')
    """
    if system is None:
        raise ValueError(
            "base is missing; name the platform whose collectives the logs replace, such as h100-sxm-8"
        )
    for sheet in _find_sheets(system):
        for ranks in (4, 8):
            if f"{sheet}-{ranks}" in list_gallery():
                return load_platform(f"{sheet}-{ranks}")
    advice = "name the platform to start from, or a system of the kernel database, such as h100_sxm"
    raise ValueError(f"base is missing and the gallery has no node of {system!r}; {advice}")


def _find_sheets(system: str) -> list[str]:
    """Datasheets of a system of the kernel database."""
    return [name for name in list_datasheets() if system.replace("_", "-").startswith(name)]


def _add_logs(
    platform: Platform, logs: Any, partial: bool, date: str, local: int | None, progress: bool
) -> Platform:
    """Replace collectives of a platform by fits of logs, and warn about unused files."""
    read = read_logs(logs, partial=partial, progress=progress)
    frame = _drop_single_ranks(read)
    for file, hosts in read.unequal.items():
        warnings.warn(f"{file}: {hosts}", stacklevel=3)
    even = frame.filter(~pl.col("file").is_in(list(read.unequal)))
    said = {p / n for p, n in even.select("ranks", "nodes").unique().rows() if n and 1 < n < p}
    local = local or (int(min(said)) if len(said) == 1 and min(said) % 1 == 0 else None)
    if local is not None:
        platform = platform.with_nodes(platform.network.nodes, ranks_per_node=local)
    _compare_logs(read.devices)
    names = sorted(set(chain.from_iterable(read.devices.values())))
    frame = _drop_misplaced(frame, platform.network.ranks_per_node)
    _check_inside(platform, frame)
    found = add_curves(platform, frame, source="nccl-tests", date=date, progress=progress)
    fits = {
        key: fit for key, fit in found.collectives.items() if fit != platform.collectives.get(key)
    }
    if fits:
        compare_devices("logs are", names, platform)
    for key, fit in fits.items():
        for note in fit.notes:
            if note.startswith(MISSES):
                warnings.warn(f"{key}: {note}", stacklevel=3)
    found = _note_files(found, fits, _describe_files(read))
    used = set(chain.from_iterable(fit.sources for fit in fits.values()))
    formats = _list_formats(frame)
    unused = frame.filter(~pl.col("file").is_in(list(used))).sort("file", maintain_order=True)
    for rows in unused.partition_by("file", maintain_order=True):
        reason = _explain_unused(rows, formats)
        if reason is not None:
            warnings.warn(f"{rows['file'][0]} is not used: {reason}", stacklevel=3)
    return found


def _describe_files(read: NcclLogs) -> dict[str, str]:
    """What must be known of curves of a log: that its run was told how to exchange, or that its times
    are not those of nccl-tests."""
    notes = {
        file: f"{file} was recorded with {settings}: the curve holds for jobs with it"
        for file, settings in read.settings.items()
    }
    for file, program in read.programs.items():
        if program.unlike is not None:
            note = f"{file} is of {program.name}: {program.unlike}"
            notes[file] = f"{notes[file]}; {note}" if file in notes else note
    return notes


def _note_files(
    platform: Platform, fits: Mapping[str, CollectiveModel], notes: Mapping[str, str]
) -> Platform:
    """Add the notes on files to each curve that comes from them."""
    noted = {}
    for key, fit in fits.items():
        added = [notes[file] for file in fit.sources if file in notes]
        if added:
            noted[key] = replace(fit, notes=(*fit.notes, *added))
    return replace(platform, collectives={**platform.collectives, **noted}) if noted else platform


def _check_inside(platform: Platform, frame: Table) -> None:
    """Warn of times inside a node that the link of the datasheet cannot explain."""
    link = platform.network.links.get("intra")
    if link is None or link.bandwidth.kind != "datasheet":
        return
    nodes = pl.coalesce("nodes", (pl.col("ranks") / platform.network.ranks_per_node).ceil())
    inside = _select(frame).filter(nodes == 1, pl.col("seconds") > 0)
    inside = inside.filter(pl.col("operation").is_in(OPERATIONS))
    fastest = inside.sort("busbw").tail(1)
    if fastest.is_empty() or fastest["busbw"][0] <= TOO_FAST_INSIDE * link.bandwidth.value:
        return
    file, operation, busbw = fastest.select("file", "operation", "busbw").row(0)
    warnings.warn(
        f"{file}: {operation} has a bus bandwidth of {format_rate(busbw, 'B/s')} inside a node, far "
        f"above the {format_rate(link.bandwidth.value, 'B/s')} of the link of "
        f"{platform.device.name}; check the log and the base",
        stacklevel=4,
    )


def _drop_misplaced(frame: Table, ranks_per_node: int) -> Table:
    """Rows without those of ranks that lie on other nodes than those of the platform, which are
    named: their curves would be taken for those of one node, or of several."""
    nodes, ranks = pl.col("nodes"), pl.col("ranks")
    expected = (ranks / ranks_per_node).ceil()
    misplaced = (nodes.is_not_null() & (nodes != expected) & (nodes != ranks)).fill_null(False)
    left_out = frame.filter(misplaced)
    if left_out.is_empty():
        return frame
    places = left_out.select("file", "ranks", "nodes").unique().sort("file", "ranks", "nodes")
    file, count, spread_over = places.row(0)
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    text = (
        f"{file} has {count} ranks on {spread_over} node(s){more}, the platform has nodes of "
        f"{ranks_per_node} ranks; pass logs of one kind of node, or ranks_per_node"
    )
    if len(left_out) == len(frame):
        raise ValueError(text)
    warnings.warn(f"{text}; these rows are not used", stacklevel=4)
    return frame.filter(~misplaced)


def _list_formats(frame: Table) -> dict[tuple[str, int], set[str]]:
    """Number formats of all logs by operation and ranks."""
    formats: dict[tuple[str, int], set[str]] = {}
    for operation, ranks, dtype in frame.select("operation", "ranks", "dtype").unique().rows():
        formats.setdefault((operation, ranks), set()).add(dtype)
    return formats


def _explain_unused(rows: Table, formats: Mapping[tuple[str, int], Collection[str]]) -> str | None:
    """Why no curve comes from a log, beside the number formats of all logs by operation and ranks;
    None where a warning has said it."""
    unknown = sorted(set(rows["operation"]) - set(OPERATIONS))
    if unknown:
        return f"perfkit has no model of its operation {', '.join(unknown)}"
    if _select(rows).is_empty():
        return "it has no message with bytes out of place"
    if all(
        group["nbytes"].n_unique() < 2 for _, group in rows.group_by("operation", "ranks", "dtype")
    ):
        return None
    of_all_logs: set[str] = set()
    for collective in rows.select("operation", "ranks").unique().rows():
        of_all_logs.update(formats[collective])
    if of_all_logs - set(rows["dtype"]):
        return "another log has its collective in a number format that is preferred, such as bf16"
    return "another log has its collective on as many ranks"


def _drop_single_ranks(logs: NcclLogs) -> Table:
    """Rows of logs without tables of one rank, which are named: they hold no exchange."""
    alone = logs.rows.filter(pl.col("ranks") == 1)
    if alone.is_empty():
        return logs.rows
    files = ", ".join(sorted(alone["file"].unique()))
    text = f"{files}: {ONE_RANK}"
    if len(alone) == len(logs.rows):
        raise ValueError(text)
    warnings.warn(text, stacklevel=4)
    return logs.rows.filter(pl.col("ranks") > 1)


def add_curves(
    platform: Platform, frame: Table, *, source: str, date: str, progress: bool = False
) -> Platform:
    """Replace collectives of a platform by fits of a frame, on as many nodes as the frame has."""
    local = platform.network.ranks_per_node
    spans = frame.select(pl.coalesce("nodes", (pl.col("ranks") / local).ceil().cast(pl.Int64)))[
        "nodes"
    ].max()
    fits = fit_curves(frame, ranks_per_node=local, source=source, date=date, progress=progress)
    wider = assemble(platform, nodes=max(platform.network.nodes, int(str(spans))), collectives=fits)
    if not any(Key.parse(key).algorithm == "rail" for key in fits):
        wider = assemble(wider, collectives=fit_rails(frame, wider, source=source, date=date))
        wider = _add_ring_link(wider, fits)
        wider = _add_pairwise_link(wider, fits)
    _check_network(wider)
    return _check_link(wider, prove_link(frame, local))


def _check_network(platform: Platform) -> None:
    """Warn of a platform of several nodes that does not know what joins them."""
    network = platform.network
    has_rail = any(Key.parse(key).algorithm == "rail" for key in platform.collectives)
    if network.nodes > 1 and "inter" not in network.links and not has_rail:
        warnings.warn(
            f"neither the logs nor the base show the link between the {network.nodes} nodes, so "
            f"collectives that are not in the logs have no time there; {advise_network(network.nodes)}",
            stacklevel=5,
        )


def _add_ring_link(platform: Platform, fits: Mapping[str, CollectiveModel]) -> Platform:
    """Take the link between nodes from rings over whole nodes, where no fit of rails shows it.

    A byte of an all_gather or a reduce_scatter takes ``((g - 1)/g beta_i)^q + (beta_r/g)^q`` of a ring
    to the power of 1/q (`perfkit.models.hierarchy.ring_across_nodes`), of which the time inside nodes
    is known. Where that takes nearly all of it, rings do not show the link either.
    """
    local = platform.network.ranks_per_node
    rails = [fit for key, fit in platform.collectives.items() if Key.parse(key).algorithm == "rail"]
    if local == 1 or any(not is_bound(fit) for fit in rails):
        return platform
    for key in map(Key.parse, fits):
        ranks = key.ranks or 0
        if key.operation not in ("all_gather", "reduce_scatter") or key.algorithm or ranks <= local:
            continue
        inside = find_fitted_cost(platform, key.operation, local)
        ring = find_fitted_cost(platform, key.operation, ranks)
        if inside is None or ring is None or ranks % local:
            continue
        beta_inside = (local - 1) / local * inside.invert_ring().beta
        beta_ring = ring.invert_ring().beta
        if beta_ring < UNCERTAIN * beta_inside:
            continue
        rest = (beta_ring**OVERLAP - beta_inside**OVERLAP) ** (1.0 / OVERLAP)
        fit = fits[str(key)]
        text = f"what rings between nodes take beyond those inside, {key}: {fit.source}"
        wire = Quantity(
            1.0 / (local * rest), "B/s", "fitted", text, fit.date, basis="one way per rank"
        )
        known = platform.network.links.get("inter")
        link = Link(wire, HOP) if known is None else replace(known, bandwidth=wire)
        links = {**platform.network.links, "inter": link}
        return replace(platform, network=replace(platform.network, links=links))
    return platform


def _add_pairwise_link(platform: Platform, fits: Mapping[str, CollectiveModel]) -> Platform:
    """Take the link between nodes from an all_to_all over whole nodes, where neither rails nor rings
    show it.

    Each rank sends (N - 1)/N of its bytes to other nodes, which take all of the time
    (`FlatAllToAll`), unless what is inside nodes takes nearly as long. A send_recv shows no link: its
    one pair of ranks leaves most of it unused on healthy systems.
    """
    local = platform.network.ranks_per_node
    rails = [fit for key, fit in platform.collectives.items() if Key.parse(key).algorithm == "rail"]
    known = platform.network.links.get("inter")
    if any(not is_bound(fit) for fit in rails):
        return platform
    if known is not None and known.bandwidth.kind == "fitted":
        return platform
    across = [key for key in map(Key.parse, fits) if (key.ranks or 0) > local]
    for key in across:
        ranks = key.ranks or 0
        if key.operation != "all_to_all" or ranks % local:
            continue
        nodes = ranks // local
        beta = _find_beta(platform, "all_to_all", ranks)
        inside = _find_beta(platform, "all_to_all", local)
        if beta is None or (inside is not None and beta < UNCERTAIN * inside / nodes):
            continue
        bandwidth = float(bus_factor("all_to_all", nodes)) / beta
        fit = fits[str(key)]
        source = f"what an all_to_all sends between nodes, {key}: {fit.source}"
        network = _name_network(platform)
        if network is not None and network.bandwidth > CONTRADICTION * bandwidth:
            source = (
                f"{CONTRADICTED}: {key} shows {format_rate(bandwidth, 'B/s')} for each rank between "
                f"nodes, which is used in place of the {format_rate(network.bandwidth, 'B/s')} of "
                f"{network.name}; an all_gather on these nodes would tell more ({fit.source})"
            )
            warnings.warn(source, stacklevel=5)
        wire = Quantity(bandwidth, "B/s", "fitted", source, fit.date, basis="one way per rank")
        link = Link(wire, HOP) if known is None else replace(known, bandwidth=wire)
        links = {**platform.network.links, "inter": link}
        return replace(platform, network=replace(platform.network, links=links))
    _doubt_pairs(platform, across)
    return platform


def _find_beta(platform: Platform, operation: str, ranks: int) -> float | None:
    """Time of large messages for each byte, from fits; None without one [s/B]."""
    cost = find_fitted_cost(platform, operation, ranks)
    if cost is None:
        return None
    return float(cost.time(np.array([ALL_TRANSFER]))[0]) / ALL_TRANSFER


class _NamedNetwork(NamedTuple):
    """A network between nodes as it was published."""

    name: str
    bandwidth: float  # of each rank, one way [B/s]


def _name_network(platform: Platform) -> _NamedNetwork | None:
    """The network that a platform names, else that of its datasheet; None where neither is known."""
    link = platform.network.links.get("inter")
    if link is not None:
        return _NamedNetwork(link.name or "the link of the base", link.bandwidth.value)
    adapters = _find_adapters(platform)
    if adapters is None:
        return None
    return _NamedNetwork(f"the adapters of {platform.device.name}", adapters)


def _doubt_pairs(platform: Platform, across: Sequence[Key]) -> None:
    """Warn of a send_recv that is far slower than the network, where no log shows the link."""
    network = _name_network(platform)
    for key in across:
        beta = _find_beta(platform, key.operation, key.ranks or 0)
        if key.operation != "send_recv" or beta is None or network is None:
            continue
        if network.bandwidth > CONTRADICTION / beta:
            warnings.warn(
                f"no log shows the link between nodes; {key} has {format_rate(1.0 / beta, 'B/s')}, the "
                f"{format_rate(network.bandwidth, 'B/s')} of {network.name} stay assumed: one pair of "
                "ranks often uses a third of a link; run all_gather_perf on these nodes",
                stacklevel=6,
            )


def _check_link(platform: Platform, proven: float) -> Platform:
    """Keep the fitted link between nodes between what measured times prove and the network adapters
    of the datasheet, and warn where both contradict each other."""
    link = platform.network.links.get("inter")
    if link is None or link.bandwidth.kind != "fitted" or not proven:
        return platform
    adapters = _find_adapters(platform)
    wire, fitted = link.bandwidth, format_rate(link.bandwidth.value, "B/s")
    is_hidden = any(is_bound(fit) for fit in platform.collectives.values())
    is_hidden = is_hidden and not wire.source.startswith(CONTRADICTED)
    if wire.value < PROVEN * proven:
        text = f"measured times prove it, their fit says {fitted}: {wire.source}"
        wire = replace(wire, value=proven, source=text)
    elif is_hidden and adapters is not None and wire.value < adapters:
        text = f"the adapters of the datasheet, as measured times show no limit; {wire.source}"
        wire = replace(wire, value=adapters, kind="datasheet", source=text)
    elif adapters is not None and wire.value > max(adapters, proven):
        text = f"at most the adapters of the datasheet, the fit says {fitted}: {wire.source}"
        wire = replace(wire, value=max(adapters, proven), source=text)
    if adapters is not None:
        _compare_adapters(platform, proven, wire.value, adapters)
    links = {**platform.network.links, "inter": replace(link, bandwidth=wire)}
    return replace(platform, network=replace(platform.network, links=links))


def _find_adapters(platform: Platform) -> float | None:
    """Bandwidth of the network adapters in the datasheet of the device, for each rank [B/s]."""
    try:
        return find_adapter(platform.name, platform.device).bandwidth.value
    except ValueError:
        return None


def _compare_adapters(platform: Platform, proven: float, link: float, adapters: float) -> None:
    """Warn of a link between nodes that no adapter explains [B/s]."""
    usual = f"the {format_rate(adapters, 'B/s')} of the adapters of {platform.device.name}"
    if proven > TOO_FAST * adapters:
        warnings.warn(
            f"the times between nodes need a link of {format_rate(proven, 'B/s')} for each rank, more "
            f"than {usual}; the ranks may have run on one server; check where they ran",
            stacklevel=5,
        )
    if link < TOO_SLOW * adapters:
        warnings.warn(
            f"the link between nodes is {format_rate(link, 'B/s')} for each rank, far below {usual}; "
            "NCCL may have used another network; check it with NCCL_DEBUG=INFO",
            stacklevel=5,
        )
