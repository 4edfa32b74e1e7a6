"""From operations to seconds: the time of every operation on the device of a platform, and of the
call on its host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Additive, Iteration
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import Array
from perfkit.models.caches import miss_share
from perfkit.models.embedding import row_traffic
from perfkit.models.kernels import in_context
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.estimates import check_time
from perfkit.platform.kernel_times import (
    AlignedProducts,
    IsolatedTimes,
    KernelSizes,
    find_aligned_products,
    find_hits,
    find_traffic,
    list_unaligned,
    time_alone,
)
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import ClassifiedOperations, ClassModel, classify, join_classes
from perfkit.prediction.host_tables import add_host_tables
from perfkit.prediction.lookups import CacheLimits, RowSizes, size_rows
from perfkit.workloads.columns import FEATURES, Features
from perfkit.workloads.graph import Graph, OperationClass

_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, eq=False)
class Costs:
    """What the operations of one rank cost; zero for collectives.

    Parameters
    ----------
    models : tuple of ClassModel
        What times each class of operations.
    seconds : array
        Time of each operation inside an iteration [s].
    hot : array
        Time of the lone kernel with all operands near [s].
    cold : array
        What distant operands add to it [s].
    page_walks : array
        Lookups of each operation whose page address is not cached [-].
    classes : array of int
        Position of the class of each operation, whose operations have a common error [-].
    totals : array
        Time of each class [s].
    spread : array
        Spread of the logarithm of this time [-].
    assumed : array of bool
        Whether the time of each class rests on an assumption or another machine alone [-].
    is_unaligned : array of bool
        Whether each operation is a product whose rows in memory are no multiple of 16 B [-].
    """

    models: tuple[ClassModel, ...]
    seconds: Array
    hot: Array
    cold: Array
    page_walks: Array
    classes: np.ndarray
    totals: Array
    spread: Array
    assumed: np.ndarray
    is_unaligned: np.ndarray


class RooflineWork(NamedTuple):
    """What rooflines take of operations: one element of each array for each.

    Parameters
    ----------
    flops, nbytes : array
        Work [FLOP] and traffic [B].
    peak, bandwidth : array
        Limits of the device [FLOP/s], [B/s].
    """

    flops: Array
    nbytes: Array
    peak: Array
    bandwidth: Array


class ClassTotals(NamedTuple):
    """Times of whole classes.

    Parameters
    ----------
    seconds, spread : array, shape (graphs, classes, ...)
        Time of each class [s], and spread of its logarithm [-].
    """

    seconds: Array
    spread: Array


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
    # 1. Classes of operations, and the fit of each.
    operations = classify(graphs, platform, dtype)

    # 2. Sizes, and how much no cache holds.
    sizes = size_operations(graphs, operations, platform, dtype, ranks)
    products = find_aligned_products(operations, sizes, platform)

    # 3. Time of the lone kernel, with near and with distant operands.
    alone = time_alone(operations, sizes, products, platform)

    # 4. Time inside an iteration.
    seconds = time_in_iteration(operations, sizes, alone)

    # 5. What rows of tables in host memory add.
    seconds = add_host_tables(graphs, seconds, platform, ranks=ranks)

    # 6. Time of each class, and how well it is known.
    totals = add_up_classes(graphs, operations, products, seconds, alone.near, platform)

    assumed = np.array([model.is_assumed for model in operations.models], dtype=bool)
    is_unaligned = np.zeros(sizes["nbytes"].shape, dtype=bool)
    is_unaligned[products.operations] = products.is_unaligned
    costs = []
    begin = 0
    for number, graph in enumerate(graphs):
        of_graph = slice(begin, begin + len(graph))
        begin += len(graph)
        costs.append(
            Costs(
                models=operations.models,
                seconds=seconds[of_graph],
                hot=alone.near[of_graph],
                cold=alone.distant[of_graph],
                page_walks=sizes["page_walks"][of_graph],
                classes=operations.of_operation[of_graph],
                totals=totals.seconds[number],
                spread=totals.spread[number],
                assumed=assumed,
                is_unaligned=is_unaligned[of_graph],
            )
        )
    return costs


def size_rooflines(graph: Graph, platform: Platform) -> RooflineWork:
    """Work and traffic of the operations of one rank, as rooflines take them."""
    operations = classify([graph], platform, graph.dtype)
    sizes = size_operations([graph], operations, platform, graph.dtype, ranks=1)
    return RooflineWork(sizes["flops"], sizes["traffic"], sizes["peak"], sizes["bandwidth"])


def size_operations(
    graphs: Sequence[Graph],
    operations: ClassifiedOperations,
    platform: Platform,
    dtype: str,
    ranks: int,
) -> KernelSizes:
    """Sizes of the operations of all graphs, by the names that fits of kernels have for them.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    operations : ClassifiedOperations
        Their operations.
    platform : Platform
        Its caches hold operands and rows.
    dtype : str
        Number format of rows of graphs without tables.
    ranks : int
        Ranks that share the last cache of a CPU [-].

    Returns
    -------
    sizes : mapping of str to array
        One element per operation; with configurations, a row for each.

    Notes
    -----
    Under a roofline all operands come from main memory: between two uses of them, an iteration
    touches more than caches hold. So caches are asked about only where kernels are sums of terms,
    or where they serve rows of tables.
    """
    features = {name: _join([graph.column(name) for graph in graphs]) for name in FEATURES}
    operand_bytes = _join([graph.traffic for graph in graphs])
    widths = find_row_widths(graphs, features, DTYPES[dtype])
    row_bytes = count_row_bytes(features, widths, platform.device.access_granularity)
    sums_terms = any(isinstance(model.fit, Additive) for model in operations.models)
    if sums_terms or platform.has_timed_caches:
        limits = CacheLimits.of_rank(platform, ranks)
        rows = size_rows(graphs, Features(**features), operand_bytes, row_bytes, widths, limits)
    else:
        rows = RowSizes.without_caches(row_bytes)
    traffic = find_traffic(operations, platform, operand_bytes, row_bytes, rows.from_memory)
    beyond_l2, beyond_l3 = rows.beyond_l2, rows.beyond_l3
    if sums_terms:
        beyond_l2 = beyond_l2 + _count_distant_bytes(graphs, limits.l2)
        beyond_l3 = beyond_l3 + _count_distant_bytes(graphs, limits.l3)
    return features | {
        "nbytes": operand_bytes,
        "row_bytes": row_bytes,
        "unique_bytes": rows.unique_bytes,
        "page_walks": rows.page_walks,
        "beyond_l2": beyond_l2,
        "beyond_l3": beyond_l3,
        "hits": find_hits(row_bytes, rows.from_memory),
        "traffic": traffic.nbytes,
        "bandwidth": traffic.bandwidth,
        "peak": operations.repeat([model.peak for model in operations.models]),
    }


def find_row_widths(
    graphs: Sequence[Graph], features: Mapping[str, Array], itemsize: float
) -> Array:
    """Bytes of a row of the table that each operation looks up.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    features : mapping of str to array
        Sizes of all their operations, one graph after the other: ``dim`` and ``table`` [-].
    itemsize : float
        Bytes of a number of rows in graphs without tables [B].

    Returns
    -------
    widths : array
        One element per operation, zero where it looks no rows up [B].
    """
    widths = np.zeros(features["dim"].shape)
    begin = 0
    for graph in graphs:
        of_graph = slice(begin, begin + len(graph))
        begin += len(graph)
        if not graph.tables:
            widths[of_graph] = itemsize * features["dim"][of_graph]
            continue
        # a table is the same in all configurations
        table = features["table"][of_graph].reshape(len(graph), -1)[:, 0].astype(int)
        itemsizes = np.array([one.itemsize for one in graph.tables], dtype=float)[table]
        scales = np.array([one.scale_bytes for one in graph.tables], dtype=float)[table]
        shape = (-1, *[1] * (widths.ndim - 1))
        dim = features["dim"][of_graph]
        widths[of_graph] = itemsizes.reshape(shape) * dim + scales.reshape(shape)
    return widths


def count_row_bytes(features: Mapping[str, Array], widths: Array, granularity: float) -> Array:
    """Bytes of the rows of embedding tables that each operation looks up.

    Parameters
    ----------
    features : mapping of str to array
        Sizes of all operations: ``lookups`` [-].
    widths : array
        Bytes of a row that each operation looks up [B].
    granularity : float
        Smallest access [B].

    Returns
    -------
    row_bytes : array
        One element per operation; zero where no rows are touched [B].
    """
    lookups = features["lookups"]
    row_bytes = np.zeros(lookups.shape)
    touching = np.flatnonzero(lookups.reshape(len(lookups), -1).any(axis=1))
    if len(touching):
        bytes_of_row = row_traffic(widths[touching], 1.0, granularity)
        row_bytes[touching] = lookups[touching] * bytes_of_row
    return row_bytes


def _join(columns: Sequence[Array]) -> Array:
    """One column after the other; a single one is not copied."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns)


def _count_distant_bytes(graphs: Sequence[Graph], capacity: float) -> Array:
    """Bytes of operands of each operation that a cache of this capacity does not hold any more
    [B]."""
    distant = []
    for graph in graphs:
        accesses = graph.accesses
        nbytes = accesses.nbytes * miss_share(graph.distances, capacity=capacity)
        distant.append(np.bincount(accesses.operation, nbytes, len(graph)))
    return np.concatenate(distant)


def time_in_iteration(
    operations: ClassifiedOperations, sizes: KernelSizes, alone: IsolatedTimes
) -> Array:
    """Times of all kernels inside an iteration [s], see `perfkit.models.kernels.in_context`."""
    added = [model.in_iteration for model in operations.models]
    numbers: dict[str, Any] = {
        "scale": operations.repeat([of_class.scale for of_class in added]),
        "cold_scale": operations.repeat([of_class.cold_scale for of_class in added]),
        "launch": operations.repeat([of_class.launch for of_class in added]),
        "page_walks": operations.repeat([of_class.page_walks for of_class in added]),
    }
    near_and_distant = {
        "hot": alone.near,
        "cold": alone.distant,
        "page_walks": sizes["page_walks"],
    }
    is_kernel = operations.repeat([model.is_kernel for model in operations.models])
    return np.asarray(is_kernel * in_context(near_and_distant, **numbers))


def add_up_classes(
    graphs: Sequence[Graph],
    operations: ClassifiedOperations,
    products: AlignedProducts,
    seconds: Array,
    near: Array,
    platform: Platform,
) -> ClassTotals:
    """Time of each class on each rank, and how well it is known.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    operations : ClassifiedOperations
        Their operations.
    products : AlignedProducts
        Those that may lack aligned rows, which makes their times less certain.
    seconds, near : array
        Time of each operation inside an iteration, and alone with near operands [s].
    platform : Platform
        Where they run.

    Returns
    -------
    totals : ClassTotals
        The spread of a class is the mean over the time of its operations.

    Raises
    ------
    ValueError
        For a time that is not finite.
    """
    models = operations.models
    shape = (len(graphs), len(models), *seconds.shape[1:])
    graph_of_operation = np.repeat(np.arange(len(graphs)), [len(graph) for graph in graphs])
    group = len(models) * graph_of_operation + operations.of_operation
    times = seconds
    weights = near
    if graphs[0].repeats is not None:  # one operation stands for several
        repeats = graphs[0].repeats[:, None]
        times = repeats * seconds
        weights = repeats * near
    totals = _sum_groups(times, group, shape)

    spread = _average_lone_spreads(operations, near, weights, group, shape)
    # inside iterations, where these were fitted
    for number, model in enumerate(models):
        if model.is_fitted_in_iterations:
            spread[:, number] = 0.0
        if model.context is not None:
            spread[:, number] = np.hypot(spread[:, number], model.context.spread)

    if products.is_unaligned.any():
        unaligned_times = np.zeros(times.shape)
        unaligned_times[products.operations] = times[products.operations] * products.is_unaligned
        share = _sum_groups(unaligned_times, group, shape) / np.maximum(totals, _TINY)
        of_unaligned = [list_unaligned(platform, model.kind).spread for model in models]
        spread = np.hypot(spread, _make_column(of_unaligned, seconds.ndim) * share)

    other_axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    largest_times = totals.max(axis=other_axes).tolist()
    largest_spreads = spread.max(axis=other_axes).tolist()
    for model, time, most in zip(models, largest_times, largest_spreads, strict=True):
        check_time(f"{model.kind} on {platform.name!r}", time, most, ())
    return ClassTotals(totals, spread)


def _average_lone_spreads(
    operations: ClassifiedOperations,
    near: Array,
    weights: Array,
    group: np.ndarray,
    shape: tuple[int, ...],
) -> Array:
    """Spread of the lone kernels of each class on each rank [-]: the mean over the time of its
    operations, of which longer ones are better known; see `_sum_groups`."""
    of_class = _make_column([model.spread_alone for model in operations.models], near.ndim)
    of_operation = np.broadcast_to(of_class[operations.of_operation], near.shape).copy()
    for fit, members, _ in operations.by_fit:
        if fit is not None and fit.spread_time is not None:
            of_operation[members] = fit.spread_at(near[members])
    total_weight = _sum_groups(weights, group, shape)
    weighted = _sum_groups(weights * of_operation, group, shape)
    spread = np.broadcast_to(of_class, shape).copy()
    np.divide(weighted, total_weight, out=spread, where=total_weight > 0)
    return spread


def _make_column(of_classes: Sequence[float], axes: int) -> Array:
    """A number of each class along the first of some axes; the others are of configurations."""
    return np.array(of_classes).reshape(-1, *[1] * (axes - 1))


def _sum_groups(values: Array, group: np.ndarray, shape: tuple[int, ...]) -> Array:
    """Sum over the operations of each group; `shape` has axes of graphs, classes and
    configurations."""
    groups = shape[0] * shape[1]
    if values.ndim == 1:
        return np.bincount(group, values, groups).astype(float).reshape(shape)
    sums = np.zeros((groups, *shape[2:]))
    for number in np.unique(group):
        sums[number] = values[group == number].sum(axis=0)
    return sums.reshape(shape)


class CallOverheads(NamedTuple):
    """What calls of one class of operations cost the host.

    Parameters
    ----------
    before_launch, after_launch, between_launches : float
        Time of a call up to its first launch (T2), after its last (T3), and between two (T5) [s].
    """

    before_launch: float
    after_launch: float
    between_launches: float


class HostTimes(NamedTuple):
    """Host time of every operation of a rank.

    Parameters
    ----------
    first_launch : array
        Up to its first launch [s].
    later_launches : array
        From there to its last [s].
    """

    first_launch: Array
    later_launches: Array


def price_hosts(graphs: Sequence[Graph], platform: Platform) -> list[HostTimes]:
    """Host time of every operation of some graphs, such as those of several ranks, all in one pass.

    The platform's ``host`` overheads are ``gap`` (T1), ``before_launch`` (T2), ``after_launch``
    (T3), ``launch`` (T4), ``between_launches`` (T5) and ``bare`` (a call without a launch). They
    are the same for all operations or, as ``before_launch.gemm.backward``, those of a class and of
    its phase or variant.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    platform : Platform
        Where they do.

    Returns
    -------
    hosts : list of HostTimes
        Times of each graph.

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
    gap = known.get("gap", 0.0)
    call_without_kernel = known.get("bare", 0.0)
    launch = known.get("launch", 0.0)
    before_launch, after_launch, between_launches = _list_call_overheads(graphs, platform, known)
    calls = _join([graph.column("calls") for graph in graphs])
    launches = _join([graph.column("launches") for graph in graphs])
    calls_without_kernel = _join([graph.column("bare") for graph in graphs])

    first_launch = calls * (gap + before_launch) + launch * np.minimum(launches, 1.0)
    first_launch += calls_without_kernel * (gap + call_without_kernel)
    # a further kernel of the last call; compiled code goes from launch to launch as the framework
    # does from call to call
    lengths = [len(graph) for graph in graphs]
    is_compiled = np.repeat([graph.execution == "compiled" for graph in graphs], lengths)
    until_next_kernel = np.where(is_compiled, np.minimum(between_launches, gap), between_launches)
    first_launch += np.where((calls == 0) & (launches > 0), until_next_kernel, 0.0)
    later_launches = np.maximum(launches - 1, 0.0) * (between_launches + launch)

    hosts = []
    begin = 0
    for length in lengths:
        of_graph = slice(begin, begin + length)
        begin += length
        # what a call does after its last launch delays the next call; the last one delays the first
        opens_call = np.flatnonzero(calls[of_graph])
        delays = after_launch[of_graph][opens_call]
        first_launch[of_graph][opens_call] += np.concatenate([delays[-1:], delays[:-1]])
        hosts.append(HostTimes(first_launch[of_graph], later_launches[of_graph]))
    return hosts


def _list_call_overheads(
    graphs: Sequence[Graph], platform: Platform, known: Mapping[str, float]
) -> Array:
    """What the call of every operation costs [s]: a row for each field of `CallOverheads`."""
    classes = join_classes(graphs)
    overheads = []
    for operation_class in classes.distinct:
        # looked up once for each platform
        key = ("call overheads", operation_class)
        if key not in platform.memo:
            platform.memo[key] = find_overheads(known, operation_class)
        overheads.append(platform.memo[key])
    of_classes = np.array(overheads).reshape(-1, len(CallOverheads._fields))
    return np.asarray(of_classes[classes.of_operation].T)


def find_overheads(known: Mapping[str, float], operation_class: OperationClass) -> CallOverheads:
    """Find what a call costs: of its variant, else of its phase, of its class, or of all calls.

    Parameters
    ----------
    known : mapping of str to float
        Overheads of the host by name, see `price_hosts` [s].
    operation_class : OperationClass
        Class of the call.

    Returns
    -------
    overheads : CallOverheads
        Zero where nothing is known.
    """
    kind, variant, phase = operation_class
    scopes = (f".{kind}.{variant}", f".{kind}.{phase}", f".{kind}", "")
    overheads = []
    for name in CallOverheads._fields:
        overhead = 0.0
        for scope in scopes:
            if name + scope in known:
                overhead = known[name + scope]
                break
        overheads.append(overhead)
    return CallOverheads(*overheads)


def join_host(device: Any, host: Any, iteration_fit: Iteration | None) -> Any:
    """Time of an iteration [s]: that of the slower of device and host, or a smooth maximum where
    steps were fitted."""
    sharpness = np.inf
    if iteration_fit is not None:
        sharpness = iteration_fit.get("sharpness", np.inf)
    return smooth_maximum(device, host, sharpness=sharpness)


def find_contention(platform: Platform, iteration_fit: Iteration | None) -> float:
    """Find what collectives take from kernels beside them.

    Parameters
    ----------
    platform : Platform
        Where both run.
    iteration_fit : Iteration or None
        What was fitted to whole iterations of this family; None if nothing was.

    Returns
    -------
    contention : float
        Share of the rate of kernels [-]. On a GPU, what was fitted to other families does not hold.
    """
    on_device = platform.device.kind != "cpu"
    overlap = platform.context.overlap
    if overlap is not None and (iteration_fit is not None or not on_device):
        return overlap["contention"]
    return 0.0 if on_device else 1.0
