"""From operations to seconds: the time of every operation of a graph on the device and on the host
of a platform."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import InContext, Iteration, KernelModel
from perfkit.fitting.models import KERNELS
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import Array, check_choice
from perfkit.models.caches import PAGE, miss_share
from perfkit.models.distributions import Uniform, distinct_rows
from perfkit.models.embedding import row_traffic, size_lookup
from perfkit.models.kernels import in_context
from perfkit.models.roofline import smooth_maximum
from perfkit.platform import kernels as isolated
from perfkit.platform.estimates import check_time
from perfkit.platform.machine import ANY
from perfkit.platform.platform import Platform
from perfkit.workloads.columns import FEATURES
from perfkit.workloads.graph import Graph
from perfkit.workloads.tables import list_laws
from perfkit.workloads.vocabulary import pick_attention

#: Bytes that a batch normalization moves, relative to its operands [-]; docs/formulas.md, table
#: 2.2.
_AGAIN = {"native_batch_norm": 1.5, "native_batch_norm_backward": 5.0 / 3.0}
#: Sizes of embedding rows.
_ROWS = ("row_bytes", "unique_bytes", "page_walks", "rows_l2", "rows_l3")
_UPDATES = {"embedding_update", "embedding_backward.fused"}  # these read rows and write them
DISTANT = ("beyond_l2", "beyond_l3", "page_walks")  # terms of operands that are not near
#: Sizes of kernels that are not timed by terms.
_ROOFLINE = {
    *[
        "batch",
        "m",
        "n",
        "k",
        "flops",
        "nbytes",
        "row_bytes",
        "rows_l3",
        "again",
        "passes",
        "windows",
        "turns",
        "peak",
    ]
}
# parameters of `in_context`
_USUAL = {"scale": 1.0, "cold_scale": 1.0, "launch": 0.0, "page_walks": 0.0}
_UNTIMED = ("collective", "host")  # operations that are not kernels
_TINY = float(np.finfo(float).tiny)


class PricedClass(NamedTuple):
    """Operations that one fit prices: a kernel in a number format."""

    kind: str
    variant: str
    dtype: str


class Models(NamedTuple):
    """What prices operation classes: fits of isolated kernels, what iterations add, and both as
    arrays over classes."""

    classes: tuple[PricedClass, ...]
    fits: list[KernelModel | None]
    contexts: list[InContext | None]
    numbers: dict[str, Array]


@dataclass(frozen=True, eq=False)
class Costs:
    """What the operations of one rank cost; zero for collectives.

    By operation, in program order: `seconds`, the time inside an iteration; `hot`, the time of the
    isolated kernel with all operands near; `cold`, what distant operands add [s]; `page_walks`,
    lookups whose page address is not cached; `classes`, the number of its operation class [-]. By
    class, whose operations have a common error: `totals`, its time [s]; `spread` of the logarithm
    of this time; `assumed`, whether it rests on an assumption or another machine alone.
    """

    models: Models
    seconds: Array
    hot: Array
    cold: Array
    page_walks: Array
    classes: np.ndarray
    totals: Array
    spread: Array
    assumed: np.ndarray


def _size_rows(graph: Graph, **how: Any) -> dict[str, Array]:
    """Embedding rows by operation, see `_size_lookups`; zero for operations that look nothing
    up."""
    lookups = graph.column("lookups")
    touched = np.flatnonzero(lookups.any(axis=tuple(range(1, lookups.ndim))))
    if not len(touched):
        return dict.fromkeys(_ROWS, np.zeros((len(graph), *[1] * (lookups.ndim - 1))))
    how |= {"itemsize": graph.tables[0].itemsize} if graph.tables else {}
    found, out = (
        _size_lookups(graph, touched, **how),
        {name: np.zeros(lookups.shape) for name in _ROWS},
    )
    for name in _ROWS:
        out[name][touched] = found[name]
    return out


def _size_lookups(
    graph: Graph,
    touched: np.ndarray,
    *,
    capacities: Any,
    entries: float,
    granularity: float,
    itemsize: float,
) -> dict[str, Array]:
    """Rows of the operations that touch some: bytes, distinct bytes, page walks, and bytes from
    beyond each cache."""
    counts, dim = graph.column("lookups")[touched], graph.column("dim")[touched]
    kinds = np.array([graph.labels[index].kind for index in touched])
    variants = np.array([graph.labels[index].variant for index in touched])
    out = {name: np.zeros(counts.shape) for name in _ROWS}
    out["row_bytes"] = counts * row_traffic(dim, itemsize, granularity)
    # rows of a gradient that was just zeroed
    distant = miss_share(graph.traffic[touched] / PAGE, capacity=entries)
    words = variants == "dense_rows"  # another operation looked them up; assumed to be uniform
    if words.any() and entries < math.inf:
        even = [Uniform(int(rows)) for rows in graph.column("rows")[touched[words]]]
        out["page_walks"][words] = distant[words] * distinct_rows(even, counts[words])
    forward = kinds == "embedding_forward"
    if not forward.any():
        return out
    number, fused = graph.column("table")[touched], bool((variants == "fused").any())
    # by configuration
    number, given = number.reshape(len(number), -1)[:, 0].astype(int), counts[forward].T
    laws = list_laws(
        [graph.tables[t] for t in number[forward]], len(given) if given.ndim > 1 else 0
    )
    found = size_lookup(
        laws,
        given.ravel(),
        np.broadcast_to(dim, counts.shape)[forward].T.ravel(),
        capacities=capacities,
        entries=entries,
        itemsize=itemsize,
        granularity=granularity,
        dense_bytes=graph.footprint,
        groups=np.repeat(np.arange(given.size // len(given.T)), len(given.T)),
        cold=fused,  # a fused kernel goes from table to table
    )
    own = {
        key: v.reshape(*v.shape[:-1], *given.shape).swapaxes(-1, -given.ndim)
        for key, v in vars(found).items()
    }
    places = {table: place for place, table in enumerate(number[forward])}
    # of the table that each operation works on
    place = np.array([places.get(table, 0) for table in number])
    unique, again = own["unique_bytes"][place], variants == "dense"
    out["unique_bytes"][~words] = unique[~words]
    looked, update = (variants == "fused") if fused else forward, kinds == "embedding_update"
    for level, share, updated in zip(
        ("rows_l2", "rows_l3"), own["misses"], own["update_misses"], strict=True
    ):
        out[level][looked] = (share[place] * out["row_bytes"])[looked]
        out[level][update] = (updated[place] * unique)[update]
    out["page_walks"][forward] = own["walks"]
    out["page_walks"][update] = own["update_walks"][place][update]
    out["page_walks"][again] = (own["unique"][place] * distant)[again]
    return out


def _find_models(platform: Platform, classes: tuple[PricedClass, ...], scaled: bool) -> Models:
    """What prices these classes; contexts only where times are `scaled`."""
    kernels, find = platform.kernels, platform.context.find
    fits = [
        isolated.find_stand_in(kernels, own.kind, variant=own.variant, dtype=own.dtype)
        for own in classes
    ]
    contexts = [
        find(own.kind, own.variant.replace("_last", ""), own.dtype) if scaled else None
        for own in classes
    ]
    rows, (odd, even, _) = [], isolated.list_unaligned(platform)
    for priced, fit, context in zip(classes, fits, contexts, strict=True):
        kind, variant, dtype = priced.kind, priced.variant, priced.dtype
        assumed = fit is None or fit.kind == "assumed"
        row = {
            "form": fit.form if fit else "",
            "timed": float(kind not in _UNTIMED),
            "peak": platform.device.peaks[dtype].value,
            "again": _AGAIN.get(variant.removeprefix("fused."), 1.0),
            "passes": 2.0 if {kind, f"{kind}.{variant}"} & _UPDATES else 1.0,
            "windows": assumed and kind == "convolution",
            "turns": isolated.find_turns(platform, kind, variant, dtype) * assumed,
            "assumed": context.kind == "assumed" if context else assumed,
            "itemsize": DTYPES[dtype]
            * (kind == "gemm" and dtype in isolated.TENSOR and platform.device.kind != "cpu"),
            "turned": variant == "tn",
            "odd": odd,
            "even": even,
            "launch": fit.get("launch", 0.0) if fit and platform.device.kind != "cpu" else 0.0,
        }
        row |= {f"{row['form']}.{name}": value for name, value in (fit or {}).items()}
        rows.append(
            row
            | {f"context.{name}": value for name, value in {**_USUAL, **(context or {})}.items()}
        )
    names = dict.fromkeys(name for row in rows for name in row)
    # a term that a class of kernels lacks costs nothing
    numbers = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}
    return Models(classes, fits, contexts, numbers)


def classify(graphs: Sequence[Graph], platform: Platform, dtype: str) -> tuple[Models, np.ndarray]:
    """Operation classes with what prices them, and the number of the class of every operation.

    An operation in a format whose peak is not known counts as one in `dtype`.
    """
    check_choice("dtype", dtype, platform.device.peaks)
    known: dict[PricedClass, int] = {}
    numbers = []
    for graph in graphs:
        classes, of = graph.classes.distinct, graph.classes.of_operation
        has_attention = any(operation_class.kind == "attention" for operation_class in classes)
        if graph.dtypes:
            formats = [own if own in platform.device.peaks else dtype for own in graph.dtypes]
            keys = [
                PricedClass(classes[number].kind, classes[number].variant, own)
                for number, own in zip(of, formats, strict=True)
            ]
            of = np.arange(len(graph))
        else:
            keys = [PricedClass(own.kind, own.variant, dtype) for own in classes]
        if platform.device.kind != "cpu" and has_attention:
            widths = graph.column("k").reshape(len(graph), -1)[:, 0]
            keys = [
                _find_attention(key, widths[np.argmax(of == n)], platform)
                if key.kind == "attention"
                else key
                for n, key in enumerate(keys)
            ]
        numbers.append(
            np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.intp)[of]
        )
    priced = tuple(known)
    # scales of a GPU are those of the families they were fitted to
    family = graphs[0].family if graphs else ""
    scaled = (
        platform.device.kind == "cpu"
        or not family
        or bool({family, ANY} & {*platform.context.iterations})
    )
    if (scaled, priced) not in platform.memo:
        platform.memo[scaled, priced] = _find_models(platform, priced, scaled)
    return platform.memo[scaled, priced], np.concatenate(numbers)


def _find_attention(key: PricedClass, width: float, platform: Platform) -> PricedClass:
    """The class of attention with its kernel: the named one, if the device has it, else the one
    PyTorch chooses."""
    phase, _, named = key.variant.partition(".")
    device, half = platform.device.capability, DTYPES[key.dtype] <= 2
    taken = pick_attention(width, width, half=half, capability=device.value if device else 0.0)
    kernel = named if named in ("triton", *taken) else [*taken, "efficient"][0]
    return key._replace(variant=f"{phase}.{kernel}")


def list_attention(graph: Graph, platform: Platform) -> list[str]:
    """Names of the fused kernels of attention that a graph runs on a GPU."""
    classes = classify([graph], platform, graph.dtype)[0].classes
    return sorted(
        {own.variant.partition(".")[2] for own in classes if own.kind == "attention"} - {""}
    )


def _size_operations(
    graphs: Sequence[Graph],
    platform: Platform,
    dtype: str,
    ranks: int,
    models: Models,
    number: np.ndarray,
) -> dict[str, Array]:
    """Sizes of every operation, and the parameters of what prices its class."""
    # an axis of configurations
    more = [1] * bool(graphs[0].columns or graphs[0].repeats is not None)
    sizes = {name: values[number].reshape(-1, *more) for name, values in models.numbers.items()}
    caches, granularity = (
        platform.share_caches(ranks),
        64.0 if platform.device.kind == "cpu" else 32.0,
    )
    how = {"entries": platform.page_entries, "granularity": granularity, "itemsize": DTYPES[dtype]}
    rows = [_size_rows(graph, capacities=caches, **how) for graph in graphs]
    join: Any = np.concatenate if len(graphs) > 1 else itemgetter(0)  # which copies nothing
    sizes |= {name: join([graph.column(name) for graph in graphs]) for name in FEATURES}
    sizes |= {name: join([part[name] for part in rows]) for name in rows[0]}
    sizes["nbytes"] = join([graph.traffic for graph in graphs])
    for level, capacity in (
        zip(("l2", "l3"), caches, strict=True) if "additive" in models.numbers["form"] else ()
    ):
        far = []
        for graph in graphs:
            accesses = graph.accesses
            nbytes = accesses.nbytes * miss_share(graph.distances, capacity=capacity)
            far.append(np.bincount(accesses.operation, nbytes, len(graph)))
        sizes[f"beyond_{level}"] = np.concatenate(far) + sizes[f"rows_{level}"]
    return sizes


def size_operations(graph: Graph, platform: Platform) -> dict[str, Array]:
    """Sizes of the operations of one rank as the forms of kernels take them, and the traffic of
    their rooflines."""
    sizes = _size_operations(
        [graph], platform, graph.dtype, 1, *classify([graph], platform, graph.dtype)
    )
    return sizes | find_traffic(sizes, platform)


def price(
    graphs: Sequence[Graph], platform: Platform, *, dtype: str = "fp32", ranks: int = 1
) -> list[Costs]:
    """Price every operation of some graphs, such as those of several ranks, all in one pass.

    `dtype` is the data type of operations without their own. An operation class without a kernel
    model is timed by the bytes it moves. The `ranks` of a CPU share its last cache. The sizes of a
    single graph may be arrays over configurations; then its times are arrays, too.

    Notes
    -----
    Every operand comes from the memory level that its reuse distance in the iteration asks for: the
    difference between ``hot`` and ``cold``. `perfkit.models.kernels.in_context` has what an
    iteration adds beyond that.
    """
    models, number = classify(graphs, platform, dtype)
    sizes = _size_operations(graphs, platform, dtype, ranks, models, number)
    hot, cold = _price_alone(sizes, platform)
    hot = isolated.slow_unaligned(sizes, hot)
    # further kernels of the operation, or none where it is a part of the one before
    hot = sizes["timed"] * np.maximum(hot + (sizes["launches"] - 1) * sizes["launch"], 0.0)
    context: dict[str, Any] = {name: sizes[f"context.{name}"] for name in _USUAL}
    alone = {"hot": hot, "cold": cold, "page_walks": sizes["page_walks"]}
    seconds = sizes["timed"] * in_context(alone, **context)
    ends = np.cumsum([len(graph) for graph in graphs])[:-1]
    columns = [np.split(values, ends) for values in (number, seconds, *alone.values())]
    found = []
    for graph, number, seconds, hot, cold, walks in zip(graphs, *columns, strict=True):
        totals, spread = _add_up_classes(graph, platform, models, number, seconds, hot)
        assumed = models.numbers["assumed"] > 0
        found.append(Costs(models, seconds, hot, cold, walks, number, totals, spread, assumed))
    return found


def find_members(chosen: Any) -> Any:
    """Positions of the chosen members: a slice if they are neighbours, which needs no copy, else
    their numbers."""
    places = np.flatnonzero(chosen)
    begin, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    return slice(begin, end) if end - begin == len(places) else places


def _price_alone(sizes: dict[str, Array], platform: Platform) -> tuple[Array, Array]:
    """Time of isolated kernels with near operands, and what distant operands add: nothing under a
    roofline [s]."""
    hot = np.zeros(sizes["nbytes"].shape)
    cold = np.zeros(hot.shape if "additive" in sizes["form"] else sizes["timed"].shape)
    # operations of configurations are split by the work they have: nothing is computed for work
    # that they lack
    has = [sizes[name].any(axis=1) for name in ("flops", "row_bytes") if hot.ndim > 1]
    keys: list[Any] = [
        *zip(sizes["form"].ravel().tolist(), *(own.tolist() for own in has), strict=True)
    ]
    for key in dict.fromkeys(keys):
        form, members = key[0], find_members([each == key for each in keys])
        part = {
            name: values[members]
            for name, values in sizes.items()
            if form == "additive" or name in _ROOFLINE
        }
        if not form:  # without a model
            moved = (part["nbytes"] + part["row_bytes"]) / float(platform.device.bandwidth(1e12))
            hot[members] = np.maximum(moved, part["flops"] / part["peak"])
            continue
        fit = {
            key.partition(".")[2]: values[members]
            for key, values in sizes.items()
            if key.startswith(f"{form}.")
        }
        if form != "additive":
            part |= find_traffic(part, platform)
        products: Any = 1.0
        turned = part["turns"] * part["nbytes"] / part["bandwidth"] if part["turns"].any() else 0.0
        if part["windows"].any():  # a convolution priced as a product counts once for each gradient
            single = np.maximum(2.0 * part["batch"] * part["m"] * part["n"] * part["k"], 1.0)
            products = np.where(
                part["windows"], np.maximum(np.round(part["flops"] / single), 1.0), 1.0
            )
            part |= {
                name: part[name] / products
                for name in ("flops", "nbytes", *DISTANT[:2])
                if name in part
            }
        hot[members] = total = products * KERNELS[form].evaluate(part, **fit) + turned
        if form == "additive":
            near = {name: values for name, values in fit.items() if name not in DISTANT}
            hot[members] = np.minimum(products * KERNELS[form].evaluate(part, **near), total)
            cold[members] = total - hot[members]
    return hot, cold


def find_traffic(part: dict[str, Array], platform: Platform) -> dict[str, Array]:
    """Traffic of kernels under a roofline and its bandwidth; the last cache serves rows alone
    (formulas, table 3.2)."""
    main, *near = (level.bandwidth for level in platform.device.memory[:-3:-1])
    slow, nbytes = main.value if main else 1e9, part["again"] * part["nbytes"]
    bandwidth = np.broadcast_to(slow, nbytes.shape)
    if part["row_bytes"].any():
        far = nbytes + part["passes"] * part["rows_l3"]
        nbytes = nbytes + part["passes"] * part["row_bytes"]
        bandwidth = np.broadcast_to(slow, nbytes.shape)
        if near and near[0]:
            seconds = np.asarray(
                smooth_maximum(far / slow, (nbytes - far) / near[0].value, sharpness=2.0)
            )
            bandwidth = np.divide(
                nbytes, seconds, out=np.full(nbytes.shape, slow), where=seconds > 0
            )
    return {"nbytes": nbytes, "bandwidth": bandwidth}


def _add_up_classes(
    graph: Graph, platform: Platform, models: Models, number: np.ndarray, seconds: Array, hot: Array
) -> Array:
    """Time of each class [s], and the mean spread of its logarithm [-]."""
    totals, spreads = found = np.zeros((2, len(models.classes), *seconds.shape[1:]))
    priced_by = zip(models.classes, models.fits, models.contexts, strict=True)
    for index, (priced, fit, context) in enumerate(priced_by):
        kind, variant, dtype = priced.kind, priced.variant, priced.dtype
        members = find_members(number == index)
        # to iterations in this format
        fitted = context and (not context.dtypes or dtype in context.dtypes)
        times, weights = seconds[members], hot[members]
        if graph.repeats is not None:
            often = graph.repeats[members, None]
            times, weights = often * times, often * weights
        totals[index], alone = (
            times.sum(axis=0),
            np.asarray(fit.spread if fit else float(kind != "host")),
        )
        if fit and not fitted and fit.spread_time is not None:
            whole, mean = weights.sum(axis=0), (fit.spread_at(hot[members]) * weights).sum(axis=0)
            alone = np.divide(
                mean, whole, out=np.full(np.shape(whole), 1.0 * fit.spread), where=whole > 0
            )
        spreads[index] = np.hypot(context.spread if context else 0.0, 0.0 if fitted else alone)
        if kind in ("gemm", "bmm") and platform.device.kind != "cpu":
            sizes = {name: graph.column(name)[members] for name in "mnk"}
            slow = times * isolated.find_unaligned(platform, kind, variant, dtype, sizes)
            share = slow.sum(axis=0) / np.maximum(totals[index], _TINY)
            spreads[index] = np.hypot(spreads[index], isolated.list_unaligned(platform)[2] * share)
    largest = found.max(axis=tuple(range(2, found.ndim)))  # over configurations
    for priced, time, spread in zip(models.classes, *largest.tolist(), strict=True):
        check_time(f"{priced.kind} on {platform.name!r}", time, spread, ())
    return found


def price_host(graph: Graph, platform: Platform) -> tuple[Array, Array]:
    """Host time of every operation up to its first launch, and from there to its last [s].

    The platform's ``host`` overheads are ``gap`` (T1), ``before_launch`` (T2), ``after_launch``
    (T3), ``launch`` (T4), ``between_launches`` (T5) and ``bare`` (a call without a launch). They
    are the same for all operations or, as ``before_launch.gemm.backward``, those of a class and of
    its phase or variant.

    Notes
    -----
    A call of the framework costs T1 + T2 + T4 up to its first kernel, T5 + T4 for every further one
    and T3 after the last; T3 is counted with the next call. A call without a kernel costs T1 and
    its own time.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model
       training on GPUs", 2022, arXiv:2201.07821, section 3.4 (the five overheads)
    """
    known = {name: quantity.value for name, quantity in platform.host.items()}
    gap, empty, launch = (known.get(name, 0.0) for name in ("gap", "bare", "launch"))
    table = []
    for operation_class in graph.classes.distinct:
        kind, variant, phase = operation_class
        # of the variant, else phase, class
        if (found := platform.memo.get(("host", kind, variant, phase))) is None:
            ends = (f".{kind}.{variant}", f".{kind}.{phase}", f".{kind}", "")
            terms = ("before_launch", "after_launch", "between_launches")
            found = [next((known[t + end] for end in ends if t + end in known), 0.0) for t in terms]
            platform.memo["host", kind, variant, phase] = found
        table.append(found)
    before, after, between = np.array(table).reshape(-1, 3)[graph.classes.of_operation].T
    calls, launches, bare = (graph.column(name) for name in ("calls", "launches", "bare"))
    first = calls * (gap + before) + bare * (gap + empty) + launch * np.minimum(launches, 1.0)
    # compiled code goes from launch to launch as the framework does from call to call
    further = np.minimum(between, gap) if graph.execution == "compiled" else between
    first += np.where((calls == 0) & (launches > 0), further, 0.0)
    opens = np.flatnonzero(calls)
    first[opens] += np.roll(after[opens], int(graph.repeats is None))
    return first, np.maximum(launches - 1, 0.0) * (between + launch)


def join_host(device: Any, host: Any, whole: Iteration | None) -> Any:
    """Time of an iteration [s]: that of the slower of device and host, or a smooth maximum where
    steps were fitted."""
    return smooth_maximum(
        device, host, sharpness=whole.get("sharpness", np.inf) if whole else np.inf
    )
