"""From operations to seconds: the time of every operation of a graph on the device of a
platform."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Additive
from perfkit.ground.units import Array
from perfkit.models.caches import miss_share
from perfkit.models.kernels import in_context
from perfkit.platform.estimates import check_time
from perfkit.platform.kernel_times import (
    AlignedProducts,
    IsolatedTimes,
    KernelSizes,
    find_aligned_products,
    find_traffic,
    time_alone,
)
from perfkit.platform.kernels import list_unaligned
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import ClassifiedOperations, ClassModel, classify
from perfkit.prediction.lookups import CacheLimits, RowSizes, size_rows
from perfkit.workloads.columns import FEATURES, Features
from perfkit.workloads.graph import Graph

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
    sizes_of_kernels = list_sizes(operations, sizes, platform)
    products = find_aligned_products(operations, sizes_of_kernels)

    # 3. Time of the lone kernel, with near and with distant operands.
    alone = time_alone(operations, sizes_of_kernels, products, platform)

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
    found = list_sizes(operations, sizes, platform)
    return RooflineWork(found["flops"], found["traffic"], found["peak"], found["bandwidth"])


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


def list_sizes(
    operations: ClassifiedOperations, sizes: OperationSizes, platform: Platform
) -> KernelSizes:
    """Sizes by the names that fits of kernels have for them.

    Under a roofline all operands come from main memory: between two uses of them, an iteration
    touches more than caches hold.
    """
    rows = sizes.rows
    traffic = find_traffic(
        operations, platform, sizes.operand_bytes, rows.row_bytes, rows.beyond_l3
    )
    return vars(sizes.features) | {
        "nbytes": sizes.operand_bytes,
        "row_bytes": rows.row_bytes,
        "unique_bytes": rows.unique_bytes,
        "page_walks": rows.page_walks,
        "beyond_l2": sizes.beyond_l2,
        "beyond_l3": sizes.beyond_l3,
        "traffic": traffic.nbytes,
        "bandwidth": traffic.bandwidth,
        "peak": operations.repeat([model.peak for model in operations.models]),
    }


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
