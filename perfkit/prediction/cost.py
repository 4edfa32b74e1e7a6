"""From operations to seconds: the time of every operation of a graph on the device of a
platform."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Additive, KernelModel
from perfkit.ground.units import Array
from perfkit.models.caches import miss_share
from perfkit.models.kernels import in_context
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.estimates import check_time
from perfkit.platform.kernels import (
    UnalignedRows,
    find_unaligned_rows,
    list_unaligned,
    slow_unaligned,
)
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import ClassifiedOperations, ClassModel, classify
from perfkit.prediction.lookups import CacheLimits, RowSizes, size_rows
from perfkit.workloads.columns import FEATURES, Features
from perfkit.workloads.graph import Graph

#: Terms of operands that no cache holds.
DISTANT_TERMS = ("beyond_l2", "beyond_l3", "page_walks")
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
    """

    models: tuple[ClassModel, ...]
    seconds: Array
    hot: Array
    cold: Array
    page_walks: Array
    classes: np.ndarray
    totals: Array
    spread: Array

    @property
    def assumed(self) -> np.ndarray:
        """Whether the time of each class rests on an assumption or another machine alone."""
        return np.array([model.is_assumed for model in self.models])


@dataclass(frozen=True, eq=False)
class OperationSizes:
    """Sizes of operations, one element of each array for each; with configurations, a row for each.

    Parameters
    ----------
    features : Features
        What the graphs say of each operation.
    operand_bytes : array
        Bytes of its operands [B].
    rows : RowSizes
        Rows of embedding tables that it touches.
    beyond_l2, beyond_l3 : array
        Bytes of operands and rows that come from beyond each cache; those of rows alone where
        kernels are timed by rooflines [B].
    """

    features: Features
    operand_bytes: Array
    rows: RowSizes
    beyond_l2: Array
    beyond_l3: Array

    def list_terms(self, operations: np.ndarray) -> dict[str, Array]:
        """Sizes of some operations by the names that sums of terms have for them, see
        `perfkit.models.kernels.TERMS`."""
        terms = vars(self.features) | {
            "nbytes": self.operand_bytes,
            "row_bytes": self.rows.row_bytes,
            "unique_bytes": self.rows.unique_bytes,
            "page_walks": self.rows.page_walks,
            "beyond_l2": self.beyond_l2,
            "beyond_l3": self.beyond_l3,
        }
        return {name: values[operations] for name, values in terms.items()}


class RooflineWork(NamedTuple):
    """What rooflines take of operations: one element of each array for each.

    Parameters
    ----------
    flops, nbytes : array
        Work [FLOP] and traffic [B].
    peak, bandwidth : array
        Limits of the device [FLOP/s], [B/s].
    m, n : array
        Rows and columns of products, which tiles cover [-].
    """

    flops: Array
    nbytes: Array
    peak: Array
    bandwidth: Array
    m: Array
    n: Array

    def select(self, operations: np.ndarray) -> "RooflineWork":
        """Take the operations at these positions."""
        return RooflineWork(*(values[operations] for values in self))


class Traffic(NamedTuple):
    """Bytes that kernels move, and how fast.

    Parameters
    ----------
    nbytes, bandwidth : array
        [B], [B/s].
    """

    nbytes: Array
    bandwidth: Array


class IsolatedTimes(NamedTuple):
    """Times of lone kernels.

    Parameters
    ----------
    near, distant : array
        Time of each with all operands near, and what distant operands add [s].
    """

    near: Array
    distant: Array


class AlignedProducts(NamedTuple):
    """Products on tensor cores, which need aligned rows.

    Parameters
    ----------
    operations : array of int
        Their positions [-].
    unaligned : UnalignedRows
        Which of them lack aligned rows.
    """

    operations: np.ndarray
    unaligned: UnalignedRows


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
    products = find_aligned_products(operations, sizes)

    # 3. Time of the lone kernel, with near and with distant operands.
    alone = time_isolated(operations, sizes, products, platform)

    # 4. Time inside an iteration.
    seconds = time_in_iteration(operations, sizes, alone)

    # 5. Time of each class, and how well it is known.
    totals = add_up_classes(graphs, operations, products, seconds, alone.near, platform)

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
                page_walks=sizes.rows.page_walks[of_graph],
                classes=operations.of_operation[of_graph],
                totals=totals.seconds[number],
                spread=totals.spread[number],
            )
        )
    return costs


def size_rooflines(graph: Graph, platform: Platform) -> RooflineWork:
    """Work and traffic of the operations of one rank, as rooflines take them."""
    operations = classify([graph], platform, graph.dtype)
    sizes = size_operations([graph], operations, platform, graph.dtype, ranks=1)
    return find_work(operations, sizes, platform)


def size_operations(
    graphs: Sequence[Graph],
    operations: ClassifiedOperations,
    platform: Platform,
    dtype: str,
    ranks: int,
) -> OperationSizes:
    """Sizes of the operations of all graphs.

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
    sizes : OperationSizes
        One element per operation.
    """
    columns = {name: _join([graph.column(name) for graph in graphs]) for name in FEATURES}
    features = Features(**columns)
    operand_bytes = _join([graph.traffic for graph in graphs])
    limits = CacheLimits.of_rank(platform, ranks)
    rows = size_rows(graphs, features, operand_bytes, limits, dtype)
    sizes = OperationSizes(features, operand_bytes, rows, rows.beyond_l2, rows.beyond_l3)
    if any(isinstance(model.fit, Additive) for model in operations.models):
        return replace(
            sizes,
            beyond_l2=rows.beyond_l2 + _count_distant_bytes(graphs, limits.l2),
            beyond_l3=rows.beyond_l3 + _count_distant_bytes(graphs, limits.l3),
        )
    return sizes


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


def find_work(
    operations: ClassifiedOperations, sizes: OperationSizes, platform: Platform
) -> RooflineWork:
    """Work and traffic of all operations, as rooflines take them."""
    peak = operations.repeat([model.peak for model in operations.models])
    traffic = find_traffic(operations, sizes, platform)
    features = sizes.features
    return RooflineWork(
        flops=features.flops,
        nbytes=traffic.nbytes,
        peak=peak,
        bandwidth=traffic.bandwidth,
        m=features.m,
        n=features.n,
    )


def find_traffic(
    operations: ClassifiedOperations, sizes: OperationSizes, platform: Platform
) -> Traffic:
    """Traffic of kernels under a roofline and its bandwidth; the last cache serves rows alone
    (formulas, table 3.2)."""
    models = operations.models
    levels = platform.device.memory
    main_bandwidth = levels[-1].bandwidth.value if levels[-1].bandwidth else 1e9
    cache_bandwidth = levels[-2].bandwidth if len(levels) > 1 else None
    operand_passes = operations.repeat([model.operand_passes for model in models])
    from_memory = operand_passes * sizes.operand_bytes
    bandwidth = np.broadcast_to(main_bandwidth, from_memory.shape)
    rows = sizes.rows
    if not rows.row_bytes.any():
        return Traffic(from_memory, bandwidth)
    row_passes = operations.repeat([model.row_passes for model in models])
    nbytes = from_memory + row_passes * rows.row_bytes
    bandwidth = np.broadcast_to(main_bandwidth, nbytes.shape)
    if cache_bandwidth is not None:
        from_memory = from_memory + row_passes * rows.beyond_l3
        time_of_memory = from_memory / main_bandwidth
        time_of_cache = (nbytes - from_memory) / cache_bandwidth.value
        time = np.asarray(smooth_maximum(time_of_memory, time_of_cache, sharpness=2.0))
        mean_bandwidth = np.full(nbytes.shape, main_bandwidth)
        np.divide(nbytes, time, out=mean_bandwidth, where=time > 0)
        bandwidth = mean_bandwidth
    return Traffic(nbytes, bandwidth)


def find_aligned_products(
    operations: ClassifiedOperations, sizes: OperationSizes
) -> AlignedProducts:
    """Find the products on tensor cores, and which of them lack aligned rows."""
    models = operations.models
    itemsize = operations.repeat([model.tensor_core_itemsize for model in models])
    is_transposed = operations.repeat([model.variant == "tn" for model in models])
    products = np.flatnonzero(itemsize)
    features = sizes.features
    unaligned = find_unaligned_rows(
        features.m[products],
        features.n[products],
        features.k[products],
        itemsize=itemsize[products],
        is_transposed=is_transposed[products],
    )
    return AlignedProducts(products, unaligned)


def time_isolated(
    operations: ClassifiedOperations,
    sizes: OperationSizes,
    products: AlignedProducts,
    platform: Platform,
) -> IsolatedTimes:
    """Times of all kernels, each alone on the device.

    Parameters
    ----------
    operations : ClassifiedOperations
        Operations, with the fit of each class.
    sizes : OperationSizes
        Their sizes.
    products : AlignedProducts
        Those that take longer without aligned rows.
    platform : Platform
        Where they run.

    Returns
    -------
    times : IsolatedTimes
        Zero for operations that are no kernels. Distant operands add nothing under a roofline: its
        bandwidth is that of the main memory.
    """
    work = find_work(operations, sizes, platform)
    near = np.zeros(sizes.operand_bytes.shape)
    distant = np.zeros((len(operations), *[1] * (operations.dimensions - 1)))
    if any(isinstance(fitted.fit, Additive) for fitted in operations.by_fit):
        distant = np.zeros(near.shape)
    for fit, members, counts_products in operations.by_fit:
        gradients: Array = np.asarray(1.0)
        if counts_products:
            gradients = count_gradients(sizes.features.select(members))
        if fit is None:
            bytes_moved = sizes.operand_bytes[members] + sizes.rows.row_bytes[members]
            near[members] = time_without_model(work.select(members), bytes_moved, platform)
        elif isinstance(fit, Additive):
            times = time_sum_of_terms(fit, sizes.list_terms(members), gradients)
            near[members], distant[members] = times
        else:
            near[members] = time_roofline(fit, work.select(members), gradients)
    layout_passes = [model.layout_passes for model in operations.models]
    if any(layout_passes):
        layout_bytes = operations.repeat(layout_passes) * work.nbytes
        near = near + layout_bytes / work.bandwidth
    near = slow_unaligned_gemms(operations, near, products, platform)

    # further kernels of the operation, or none where it is a part of the one before
    models = operations.models
    launch = operations.repeat([model.launch for model in models])
    near = np.maximum(near + (sizes.features.launches - 1) * launch, 0.0)
    is_kernel = operations.repeat([model.is_kernel for model in models])
    return IsolatedTimes(is_kernel * near, distant)


def time_without_model(work: RooflineWork, bytes_moved: Array, platform: Platform) -> Array:
    """Time of kernels of which nothing like them was measured: at the rates of the datasheet
    [s]."""
    bandwidth = float(platform.device.bandwidth(1e12))
    return np.maximum(bytes_moved / bandwidth, work.flops / work.peak)


def count_gradients(convolutions: Features) -> Array:
    """Matrix products that each convolution takes: its backward pass has one for each gradient
    [-]."""
    sizes = convolutions
    flops_of_product = np.maximum(2.0 * sizes.batch * sizes.m * sizes.n * sizes.k, 1.0)
    return np.maximum(np.round(sizes.flops / flops_of_product), 1.0)


def time_roofline(fit: KernelModel, work: RooflineWork, gradients: Array) -> Array:
    """Times of kernels under a roofline, each of which is so many products [s]."""
    one_product = work._replace(flops=work.flops / gradients, nbytes=work.nbytes / gradients)
    return gradients * fit.time(one_product._asdict())


def time_sum_of_terms(fit: Additive, terms: dict[str, Array], gradients: Array) -> IsolatedTimes:
    """Times of kernels whose costs add up, each of which is so many products: with all operands
    near, and what those that are not add."""
    for name in ("flops", "nbytes", "beyond_l2", "beyond_l3"):
        terms[name] = terms[name] / gradients
    distant = np.zeros(terms["nbytes"].shape)
    for name in DISTANT_TERMS:
        distant += fit.get(name, 0.0) * terms[name]
        terms[name] = np.zeros(terms["nbytes"].shape)
    return IsolatedTimes(near=gradients * fit.time(terms), distant=gradients * distant)


def slow_unaligned_gemms(
    operations: ClassifiedOperations,
    seconds: Array,
    products: AlignedProducts,
    platform: Platform,
) -> Array:
    """Times of kernels [s]; matrix products without aligned rows take longer, batched ones do
    not."""
    if not products.unaligned.of_16_bytes.any():
        return seconds
    models = operations.models
    launch = operations.repeat([model.launch for model in models])
    is_gemm = operations.repeat([model.kind == "gemm" for model in models])
    members = products.operations
    slowed = slow_unaligned(
        seconds[members], products.unaligned, list_unaligned(platform), launch=launch[members]
    )
    seconds = seconds.copy()
    seconds[members] = np.where(is_gemm[members], slowed, seconds[members])
    return seconds


def time_in_iteration(
    operations: ClassifiedOperations, sizes: OperationSizes, alone: IsolatedTimes
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
        "page_walks": sizes.rows.page_walks,
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

    # of the lone kernel: longer times are better known
    of_class = np.array([model.spread_alone for model in models])
    of_class = of_class.reshape(-1, *[1] * (seconds.ndim - 1))
    spread_of_operation = np.broadcast_to(of_class[operations.of_operation], near.shape).copy()
    for fit, members, _ in operations.by_fit:
        if fit is not None and fit.spread_time is not None:
            spread_of_operation[members] = fit.spread_at(near[members])
    total_weight = _sum_groups(weights, group, shape)
    weighted_spread = _sum_groups(weights * spread_of_operation, group, shape)
    spread = np.broadcast_to(of_class, shape).copy()
    np.divide(weighted_spread, total_weight, out=spread, where=total_weight > 0)

    # inside iterations, where these were fitted
    for number, model in enumerate(models):
        if model.is_fitted_in_iterations:
            spread[:, number] = 0.0
        if model.context is not None:
            spread[:, number] = np.hypot(spread[:, number], model.context.spread)

    # of products without aligned rows
    if products.unaligned.of_16_bytes.any():
        unaligned_times = np.zeros(times.shape)
        unaligned_times[products.operations] = (
            times[products.operations] * products.unaligned.of_16_bytes
        )
        share = _sum_groups(unaligned_times, group, shape) / np.maximum(totals, _TINY)
        spread = np.hypot(spread, list_unaligned(platform).spread * share)

    other_axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    largest_times = totals.max(axis=other_axes).tolist()
    largest_spreads = spread.max(axis=other_axes).tolist()
    for model, time, most in zip(models, largest_times, largest_spreads, strict=True):
        check_time(f"{model.kind} on {platform.name!r}", time, most, ())
    return ClassTotals(totals, spread)


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
