"""From operations to seconds: what every operation of a graph costs on a platform, alone and inside an iteration."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from perfkit.computation import UNMEASURED, find_stand_in, price_kernels
from perfkit.estimates import check_time
from perfkit.fitting import Fit
from perfkit.hardware import DTYPES
from perfkit.models.caches import Uniform, cold_misses, lru_misses, miss_share, page_walks, unique_rows
from perfkit.models.embedding import row_traffic
from perfkit.models.kernels import in_context
from perfkit.models.roofline import smooth_maximum
from perfkit.platform import Platform
from perfkit.units import Array
from perfkit.workloads.graph import FEATURES, Graph

__all__ = ["PAGE", "Costs", "find_context", "find_iteration", "price", "size_operations"]

#: Bytes of a page of memory [B].
PAGE = 4096.0

#: Bytes that normalizations of channels move over those of their operands: the input is read for its statistics and
#: then again, in the backward pass the gradient too. With them the 106 of a ResNet-50 (batch 32) on a V100 run at 0.83
#: and 0.76 of its memory bandwidth (trace resnet50_num_workers_0 of pytorch/kineto, BSD-3).
_AGAIN = {"native_batch_norm": 1.5, "native_batch_norm_backward": 5.0 / 3.0}

_SIZES = {name: index for index, name in enumerate(FEATURES)}


@dataclass(frozen=True)
class Costs:
    """Time of every operation of one rank, in program order.

    Parameters
    ----------
    seconds : array
        Time inside an iteration; zero for collectives [s].
    hot, cold : array
        Time of the isolated kernel with all operands near, and what distant operands add [s].
    page_walks : array
        Lookups whose page address has to be found by a walk [-].
    spread : array
        Standard deviation of the logarithm of each class's time, shared by its operations [-].
    assumed : array of bool
        Whether nothing but an assumption or another machine stands behind the class [-].
    classes : array of int
        Number of the class of each operation: those of one class err alike [-].
    unmodelled : mapping of str to float
        Time of operations priced as plain memory traffic, by name [s].
    stand_ins : mapping of str to float
        Time of operations that another class stands in for, by what stands in [s].
    """

    seconds: Array
    hot: Array
    cold: Array
    page_walks: Array
    spread: Array
    assumed: np.ndarray
    classes: np.ndarray
    unmodelled: Mapping[str, float] = field(default_factory=dict)
    stand_ins: Mapping[str, float] = field(default_factory=dict)


def _rows(
    graph: Graph, capacities: tuple[float, float], entries: float, granularity: float, itemsize: float
) -> dict[str, Array]:
    """Embedding rows by operation: bytes touched, distinct ones, bytes from behind each cache, and page walks."""
    out = {name: np.zeros(len(graph)) for name in ("row_bytes", "unique_bytes", "page_walks", "rows_l2", "rows_l3")}
    touched = np.flatnonzero(graph.column("lookups") > 0)
    if not len(touched):
        return out
    itemsize = graph.tables[0].itemsize if graph.tables else itemsize
    counts, nbytes = graph.column("lookups"), row_traffic(graph.column("dim"), itemsize, granularity)
    out["row_bytes"][touched] = counts[touched] * nbytes[touched]
    kinds, variants = (np.array([graph.labels[i][part] for i in touched]) for part in (1, 2))
    forward = touched[kinds == "embedding_forward"]
    words = touched[variants == "dense_rows"]  # looked up by another operation, and taken as uniform
    sizes = zip(graph.column("rows")[words], counts[words], strict=True)
    distant = miss_share(graph.traffic / PAGE, capacity=entries)  # rows of a gradient that was zeroed just before
    out["page_walks"][words] = distant[words] * [float(unique_rows(Uniform(int(rows)), n)) for rows, n in sizes]
    if not len(forward):
        return out
    number = graph.column("table").astype(int)
    tables = [graph.tables[t] for t in number[forward]]
    laws, lookups, row = [t.distribution for t in tables], counts[forward], nbytes[forward]
    unique, dense = np.array([float(unique_rows(d, n)) for d, n in zip(laws, lookups, strict=True)]), graph.footprint
    distinct, share = np.zeros(len(graph.tables)), np.zeros(len(graph.tables))
    distinct[number[forward]] = unique
    own = distinct[number]  # distinct rows of the table that each operation works on
    tabled = np.array([i for i in touched if graph.labels[i][0] != "embedding_dense_backward"])
    out["unique_bytes"][tabled] = own[tabled] / counts[tabled] * out["row_bytes"][tabled]
    update = touched[kinds == "embedding_update"]  # its rows were looked up earlier in the same iteration
    fused = touched[variants == "fused"]
    for level, capacity in zip(("rows_l2", "rows_l3"), capacities, strict=True):
        if len(fused):  # the kernel goes from table to table, forward and backward, and finds nothing of its last run
            rows = zip(laws, lookups, capacity / row, strict=True)
            misses = np.array([float(cold_misses(law, n, held)) / n for law, n, held in rows])
        else:
            misses = lru_misses(laws, lookups, row, capacity=capacity, dense_bytes=dense)
        share[number[forward]] = misses
        looked = fused if len(fused) else forward
        out[level][looked] = share[number[looked]] * out["row_bytes"][looked]
        again = miss_share(dense + float(unique @ row), capacity=capacity)
        out[level][update] = again * out["unique_bytes"][update]
    out["page_walks"][forward] = lookups * page_walks(laws, lookups, row, entries=entries, dense_bytes=dense)
    pages = np.maximum(np.array([t.nbytes for t in tables], dtype=float) / PAGE, 1.0)
    distance = float((pages * -np.expm1(-unique / pages)).sum()) + dense / PAGE
    out["page_walks"][update] = own[update] * miss_share(distance, capacity=entries)
    gradient = touched[variants == "dense"]
    out["page_walks"][gradient] = own[gradient] * distant[gradient]
    return out


def size_operations(
    graph: Graph,
    *,
    capacities: tuple[float, float],
    entries: float,
    granularity: float = 64.0,
    itemsize: float = 4.0,
) -> dict[str, Array]:
    """Sizes of every operation as the kernel forms take them, with traffic by the cache it comes from.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    capacities : (float, float)
        Bytes that the two cache levels effectively hold [B].
    entries : float
        Pages that the translation buffer effectively holds [-].
    granularity : float
        Smallest access: 64 for the cache lines of a CPU, 32 for the sectors of a GPU [B].
    itemsize : float
        Bytes of one number of a table that a Transformer looks words up in [B].

    Returns
    -------
    sizes : dict of str to array
        `perfkit.workloads.graph.FEATURES`, traffic ``nbytes`` and ``beyond_l2``, ``beyond_l3`` [B], and for embeddings
        ``row_bytes``, ``unique_bytes`` [B] and ``page_walks`` [-].
    """
    sizes = {name: graph.features[:, index] for name, index in _SIZES.items()}
    rows = _rows(graph, capacities, entries, granularity, itemsize)
    operation = graph.accesses[:, 0].astype(np.intp)
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        far = graph.accesses[:, 2] * miss_share(graph.distances, capacity=capacity)
        sizes[f"beyond_{level}"] = np.bincount(operation, weights=far, minlength=len(graph)) + rows[f"rows_{level}"]
    collective = np.array([label[1] == "collective" for label in graph.labels], dtype=bool)
    sizes["nbytes"] = np.where(collective, sizes["nbytes"], graph.traffic)
    return sizes | {name: rows[name] for name in ("row_bytes", "unique_bytes", "page_walks", "rows_l3")}


def find_context(platform: Platform, kind: str, variant: str) -> Fit | None:
    """Context fit of an operation class: its own, or that of all operations of its kind.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    kind : str
        Operation class.
    variant : str
        Finer class.

    Returns
    -------
    fit : Fit or None
        Parameters of `perfkit.models.kernels.in_context`; None on a platform without calibration in context.
    """
    return platform.context.get(f"{kind}.{variant}") or platform.context.get(kind)


def find_iteration(platform: Platform, family: str, ranks: int) -> Fit | None:
    """Fit of whole iterations of a family, of any family where this one was never calibrated.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    family : str
        Workload family.
    ranks : int
        Ranks that take part [-].

    Returns
    -------
    fit : Fit or None
        ``scale`` on all operations, ``per_operation`` host time, what a collective takes longer, ``per_collective``,
        and what computing does after it, ``per_resume`` [s]; None without calibration in context.
    """
    known = platform.context
    alone = known.get(f"iteration.{family}") or known.get("iteration")
    shared = known.get("iteration.parallel") if ranks > 1 else None
    if ranks > 1 and f"iteration.{family}.parallel" in known:
        return known[f"iteration.{family}.parallel"]
    if not (alone and shared):
        return alone
    slower = {name: shared["scale"] * value for name, value in alone.items()}
    more = {name: shared[name] for name in ("per_collective", "per_resume") if name in shared}
    return replace(
        alone, parameters={**slower, **more}, stderr={}, units={**alone.units, **dict.fromkeys(more, "s")},
        spread=math.hypot(alone.spread, shared.spread),
    )  # fmt: skip


def _class_spread(fit: Fit, seconds: Array) -> float:
    """Spread of the operations of a class together, the long ones counting more: they err alike."""
    total = float(seconds.sum())
    return float(fit.spread_at(seconds) @ seconds) / total if total else fit.spread


def price(graph: Graph, platform: Platform, *, dtype: str = "fp32") -> Costs:
    """Price every operation of a graph.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    platform : Platform
        Where it runs.
    dtype : str
        Data type whose peak applies to operations without their own.

    Returns
    -------
    costs : Costs
        Time of each operation; an operation class without a kernel model is timed as traffic and named.

    Notes
    -----
    Every operand comes from the memory level that its reuse distance in the iteration asks for: that is the difference
    between ``hot`` and ``cold``. What an iteration adds beyond is in `perfkit.models.kernels.in_context`.
    """
    device = platform.device.kind != "cpu"
    sizes = size_operations(
        graph, capacities=platform.cache_capacities, entries=platform.page_entries,
        granularity=32.0 if device else 64.0, itemsize=DTYPES[dtype],
    )  # fmt: skip
    n = len(graph)
    hot, cold, seconds, spread, assumed = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool)
    classes = np.zeros(n, dtype=int)
    unmodelled: dict[str, float] = {}
    stand_ins: dict[str, float] = {}
    for number, ((kind, variant, own), members) in enumerate(_classes(graph, platform, dtype)):
        part = {name: values[members] for name, values in sizes.items()}
        fit = find_stand_in(platform.kernels, kind, variant=variant, dtype=own)
        if fit is None:
            hot[members] = (part["nbytes"] + part["row_bytes"]) / float(platform.device.bandwidth(1e12))
            for member in members:
                name = graph.labels[member][0]
                unmodelled[name] = unmodelled.get(name, 0.0) + float(hot[member])
        elif fit.form in ("roofline", "tiled"):  # compute and traffic overlap: there is no cold part to tell apart
            hot[members] = _alone(fit, platform, _traffic(part, kind, variant, platform), kind, own)
        else:
            total = _alone(fit, platform, part, kind, own)
            near = part | {name: np.zeros(len(members)) for name in ("beyond_l2", "beyond_l3", "page_walks")}
            hot[members] = np.minimum(_alone(fit, platform, near, kind, own), total)
            cold[members] = total - hot[members]
        if fit and device:  # further kernels of the operation, or none where it is a part of the one before
            hot[members] = np.maximum(hot[members] + (part["launches"] - 1) * fit.get("launch", 0.0), 0.0)
        context = find_context(platform, kind, variant)
        part = {"hot": hot[members], "cold": cold[members], "page_walks": part["page_walks"]}
        seconds[members] = in_context(part, **(context if context is not None else {}))
        spread[members] = context.spread if context else _class_spread(fit, hot[members]) if fit else 1.0
        check_time(f"{kind} on {platform.name!r}", float(seconds[members].sum()), float(spread[members[0]]), ())
        assumed[members] = context is None and (fit is None or fit.kind == "assumed")
        classes[members] = number
        if fit and fit.notes and UNMEASURED in fit.notes[0]:
            stand_ins[fit.notes[0]] = stand_ins.get(fit.notes[0], 0.0) + float(seconds[members].sum())
    return Costs(seconds, hot, cold, sizes["page_walks"], spread, assumed, classes, unmodelled, stand_ins)


def _classes(graph: Graph, platform: Platform, dtype: str) -> Iterator[tuple[tuple[str, str, str], np.ndarray]]:
    """Operations by class and number format; one the device has no peak for counts as the general format."""
    kinds = ((key, members) for key, members in graph.kernels.items() if key[0] != "collective")
    if not graph.dtypes:
        yield from (((*key, dtype), members) for key, members in kinds)
        return
    formats = np.array([own if own in platform.device.peaks else dtype for own in graph.dtypes])
    for key, members in kinds:
        for own in dict.fromkeys(formats[members]):
            yield (*key, str(own)), members[formats[members] == own]


def _alone(fit: Fit, platform: Platform, part: dict[str, Array], kind: str, dtype: str) -> Array:
    """Time of the isolated kernels; a convolution that a product stands in for is as many products as are wanted."""
    passes: Array = np.ones(1)
    if kind == "convolution" and fit.kind == "assumed":
        product = 2.0 * part["batch"] * part["m"] * part["n"] * part["k"]
        passes = np.maximum(np.round(part["flops"] / np.maximum(product, 1.0)), 1.0)
        part = part | {name: part[name] / passes for name in ("flops", "nbytes", "beyond_l2", "beyond_l3")}
    return passes * price_kernels(fit, platform.device, part, dtype=dtype, capacities=platform.cache_capacities)


def _traffic(part: dict[str, Array], kind: str, variant: str, platform: Platform) -> dict[str, Array]:
    """Traffic of kernels under their roofs and the bandwidth it sees: rows are looked for in the last cache, no more.

    Rows that are found there come at its bandwidth while others come from memory; where it is not known, all come from
    memory. Element- and row-wise kernels of a V100 move 1 to 25 MB at one and the same rate, in its 6 MB L2 or not.
    """
    main, *near = (level.bandwidth for level in platform.device.memory[:-3:-1])
    slow = main.value if main else 1e9
    passes = 2.0 if kind == "embedding_update" or (kind, variant) == ("embedding_backward", "fused") else 1.0
    nbytes, far = (_AGAIN.get(variant, 1.0) * part["nbytes"] + passes * part[rows] for rows in ("row_bytes", "rows_l3"))
    seconds = nbytes / slow
    if near and near[0]:
        seconds = np.asarray(smooth_maximum(far / slow, (nbytes - far) / near[0].value, sharpness=2.0))
    return part | {
        "nbytes": nbytes,
        "bandwidth": np.divide(nbytes, seconds, out=np.full(len(nbytes), slow), where=seconds > 0),
    }
