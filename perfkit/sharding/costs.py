"""What one shard of a table costs in every kind of placement: seconds by phase, bytes of messages
and of memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.fitting import Caches, Iteration
from perfkit.ground.units import Array, steady
from perfkit.models.embedding import row_traffic, state_bytes
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.machine import StepKind, name_level
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import Costs as OperationCosts
from perfkit.prediction.cost import price, price_hosts
from perfkit.prediction.host_tables import start_kernels, time_host_tables
from perfkit.workloads import layers
from perfkit.workloads.columns import Accesses, Features
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph, KernelKey, Label
from perfkit.workloads.iteration import average, make_graph, step
from perfkit.workloads.placement import Plan
from perfkit.workloads.placement_kinds import KIND_OF_NAME, PlacementKind, Reduction
from perfkit.workloads.sizes import alter
from perfkit.workloads.tables import (
    EmbeddingTable,
    TableSet,
    keep_hottest,
    list_formats,
    put_on_device,
    share_lookups,
    take_part,
)
from perfkit.workloads.tape import ITEMSIZE, Tape


class Cost(IntEnum):
    """One cost of a shard: its column in an array of costs.

    The first five are seconds on the rank of the shard. ``POOLED``, ``PARTIAL`` and ``INDICES`` are
    bytes in messages of that rank, the five after them are bytes of its memory, and ``SUMMED`` and
    ``AVERAGED`` are bytes that all ranks reduce together: partial sums of rows, and gradients of
    copied tables.
    """

    LOOKUP = 0
    PACK = 1
    UPDATE = 2
    BACKWARD = 3
    HOST = 4
    POOLED = 5
    PARTIAL = 6
    INDICES = 7
    WEIGHTS = 8
    STATE = 9
    INPUTS = 10
    OUTPUTS = 11
    GRADIENTS = 12
    SUMMED = 13
    AVERAGED = 14

    @property
    def label(self) -> str:
        """Its name in tables and results."""
        return self.name.lower()


#: Seconds of a shard on the device of its rank.
DEVICE_SECONDS = (Cost.LOOKUP, Cost.PACK, Cost.UPDATE, Cost.BACKWARD)
#: Times of a shard on its rank [s].
SECONDS = (*DEVICE_SECONDS, Cost.HOST)
#: Memory of a shard [B].
MEMORY = (Cost.WEIGHTS, Cost.STATE, Cost.INPUTS, Cost.OUTPUTS, Cost.GRADIENTS)
#: Names of all costs of a shard, in the order of the columns of an array of costs.
COLUMNS = tuple(cost.label for cost in Cost)
#: PyTorch's int64 indices and offsets [B].
INDEX_BYTES = 8.0
#: Embeddings whose lookups are sorted, so that each distinct row is updated once.
_UPDATE_ONCE = ("exact", "hash")
#: Lookups of a sample in a shard that has none; a table has more than 0 [-].
_FEWEST_LOOKUPS = 1e-12
#: A table may be copied to all ranks if its gradient is at most this many times its pooled rows
#: [-]; docs/formulas.md, table 8.2.
COPIED = 4.0


class Split(Enum):
    """How all tables are divided, where one shard of each is priced."""

    COLUMNS = "each shard has a share of the columns"
    ROWS = "each shard has a share of the rows, without the most popular row"
    FIRST_ROWS = "each shard has a share of the rows, with the most popular row"
    COPIES = "every rank has the whole table, and looks up its own samples"


class Division(NamedTuple):
    """A split of all tables into shards of one size.

    Parameters
    ----------
    split : Split
        How tables are divided.
    share : float
        Share of the columns of a table in one shard [-].
    parts : int
        Number of shards that the rows are divided into [-].
    worthwhile : bool
        Of copies: whether they are of the tables that are worth copying, or of the others.
    """

    split: Split
    share: float = 1.0
    parts: int = 1
    worthwhile: bool = True


class DividedTables(NamedTuple):
    """One shard of each of some tables.

    Parameters
    ----------
    tables : list of EmbeddingTable
        The shards, as tables of their own.
    samples : int
        Samples that each shard looks up [-].
    copied : bool
        Whether the tables are copied to all ranks.
    cache_scale : float
        How much of the caches the shards may have, over what one rank has [-]. All tables in a
        list stand for those that are spread over all ranks. A GPU looks up one table after another,
        each of which has its cache to itself.
    """

    tables: list[EmbeddingTable]
    samples: int
    copied: bool
    cache_scale: float


class Work(Enum):
    """What an operation on tables does."""

    LOOKUP = "looks up rows and adds them up"
    PACK = "copies the pooled rows into the message"
    OTHER_TRAFFIC = "all other memory traffic of the rank"
    BACKWARD = "passes gradients on to the rows"
    AVERAGE = "averages the gradients of copies"
    UPDATE = "updates the weights"


#: The cost that the time of each work counts in; other traffic is no cost of a table.
_COST_OF_WORK = {
    Work.LOOKUP: Cost.LOOKUP,
    Work.PACK: Cost.PACK,
    Work.BACKWARD: Cost.BACKWARD,
    Work.AVERAGE: Cost.UPDATE,
    Work.UPDATE: Cost.UPDATE,
}


class RecordedTables(NamedTuple):
    """Operations on some tables, and on an empty one at the end.

    Parameters
    ----------
    graph : Graph
        The operations; their sizes are arrays over these tables.
    works : tuple of Work
        What each operation does.
    """

    graph: Graph
    works: tuple[Work, ...]


class SeparateOperations(NamedTuple):
    """Operations on some tables, repeated for each table.

    Parameters
    ----------
    graph : Graph
        All operations.
    rows : array of int, shape (recorded operations, tables + 1)
        Position in `graph` of each recorded operation on each table; the last one is on the empty
        table [-].
    """

    graph: Graph
    rows: np.ndarray


class PricedOperations(NamedTuple):
    """Operations on some tables and their prices.

    Parameters
    ----------
    separate : SeparateOperations
        The operations, repeated for each table.
    works : tuple of Work
        What each recorded operation does.
    priced : perfkit.prediction.cost.Costs
        Times of all operations, before the scale of an iteration.
    """

    separate: SeparateOperations
    works: tuple[Work, ...]
    priced: OperationCosts


@dataclass(frozen=True, eq=False)
class TableTimes:
    """Times of one shard of each of some tables.

    Parameters
    ----------
    seconds : array, shape (tables, 5)
        Times of each table by `SECONDS` [s].
    launch : array, shape (5,)
        Time to start the kernels that work on all tables together, by `SECONDS` [s].
    """

    seconds: Array
    launch: Array


class ShardCosts(NamedTuple):
    """Costs of one shard of each of some tables.

    Parameters
    ----------
    shard : array, shape (tables, 15)
        Costs by `Cost` of a shard without the most popular row [s or B].
    hot_row : array, shape (tables, 15)
        What the most popular row adds to the shard that holds it [s or B].
    """

    shard: Array
    hot_row: Array


class Uncertainty(NamedTuple):
    """How far off the time of a cost may be.

    Parameters
    ----------
    spread : float
        Standard deviation of the logarithm of the time [-].
    is_assumed : bool
        Whether the time rests on an assumption or another machine alone.
    """

    spread: float
    is_assumed: bool


class Costs:
    """Costs of shards of a workload on a platform and number of ranks.

    A shard costs what `perfkit.predict` charges for its operations. Caches are shared as if all
    tables were split in the same way over all ranks. So the cost of a shard does not depend on the
    rest of a plan, and costs add up. Where one kernel works on all tables, a table costs what it
    adds to the kernel, and `launch` is the start of the kernel.

    Parameters
    ----------
    workload : DLRM or TableSet
        Whose tables.
    platform : Platform
        Where they are stored.
    ranks : int
        Number of ranks [-].

    Attributes
    ----------
    ranks_per_node : int
        Ranks that take part in a node [-].
    accelerated : bool
        Whether ranks have a GPU.
    fused : bool
        Whether one kernel looks up all tables of a rank.
    footprint : float
        What else a rank touches [B].
    """

    def __init__(self, workload: DLRM | TableSet, platform: Platform, ranks: int) -> None:
        self.workload = workload
        self.platform = platform
        self.ranks = ranks
        #: What real iterations add; None without such a fit.
        self.iteration: Iteration | None = platform.context.find_iteration("dlrm", ranks)
        #: Level of the software; its scale is part of the correction to predictions.
        self.level: Iteration | None = platform.context.stacks.get(
            name_level("torchrec", getattr(workload, "dtype", "fp32"), StepKind())
        )
        self.ranks_per_node = min(platform.network.ranks_per_node, ranks)
        self.accelerated = platform.device.kind != "cpu"
        self.fused = workload.embedding != "separate"
        #: Formats of the numbers of tables, each of which has kernels of its own where one looks up
        #: all tables of a format [-].
        self.formats = len(list_formats(workload.tables))
        #: Work of a rank without tables; None if there is none.
        self.rest: Graph | None = self._record_rest()
        self.footprint = self.rest.footprint if self.rest else 0.0
        tables = workload.tables
        #: Tables sorted by size, so that their order in the workload does not matter.
        self.order = _sort(tables)
        #: Which tables have pooled rows.
        self.is_pooled = np.array([table.pooled for table in tables], dtype=bool)
        #: Which tables are worth copying to all ranks.
        self.worth_copying = np.array([t.rows <= COPIED * workload.batch for t in tables])
        #: Rank that holds the most popular row of a table split over all ranks: a different one for
        #: each table.
        self.hot_row_rank = np.argsort(self.order, kind="stable") % ranks
        self._known: dict[Division, Array] = {}
        #: Uncertainty of the times of copies, and of all other shards.
        self._uncertainties: dict[bool, dict[Cost, Uncertainty]] = {}

    def _record_rest(self) -> Graph | None:
        """Work of the first rank, with all tables of a DLRM on the other ranks."""
        workload, ranks = self.workload, self.ranks
        if not isinstance(workload, DLRM) or ranks == 1:
            return None
        owners = [1 + number % (ranks - 1) for number in range(len(workload.tables))]
        plan = Plan.from_owners(owners, ranks=ranks)
        return workload.graphs(ranks, plan, accelerator=self.accelerated)[0]

    @property
    def has_inner_nodes(self) -> bool:
        """Whether a node has several ranks, and there are several nodes."""
        return 1 < self.ranks_per_node < self.ranks

    def count_parts(self, kind: PlacementKind) -> int:
        """Most shards of a table under a kind of placement; splits by rows have that many [-]."""
        if kind.is_whole:
            return 1
        if kind.is_inside_node:
            return self.ranks_per_node
        return self.ranks

    @property
    def one_kernel_for_all(self) -> bool:
        """Whether one kernel of a GPU works on all tables of a rank."""
        return self.fused and self.accelerated

    @property
    def scale(self) -> float:
        """Time inside an iteration over the time alone [-]."""
        return self.iteration["scale"] if self.iteration else 1.0

    @property
    def seconds_per_collective(self) -> float:
        """What an iteration adds to each collective [s]."""
        if self.iteration is None:
            return 0.0
        return self.iteration.get("per_collective", 0.0) + self.iteration.get("per_resume", 0.0)

    def launch(self) -> Array:
        """Time to start the kernels that work on all tables of a rank, by `SECONDS` [s]. Each rank
        is taken to have tables of all formats."""
        no_tables = DividedTables([], self.workload.batch, copied=False, cache_scale=1.0)
        launch = self._time(no_tables, self._price_tables(no_tables)).launch
        starts = start_kernels(self.workload.tables)
        launch[Cost.LOOKUP] += self.scale * starts.forward
        launch[Cost.BACKWARD] += self.scale * starts.backward
        return launch

    @cached_property
    def priced_rest(self) -> OperationCosts | None:
        """Times of the work of a rank without tables, before the scale of an iteration; None if
        there is none."""
        if self.rest is None:
            return None
        return self._price_operations(self.rest, self.platform)

    def _price_operations(self, graph: Graph, platform: Platform) -> OperationCosts:
        """Price the operations of one rank."""
        dtype = getattr(self.workload, "dtype", "fp32")
        [priced] = price([graph], platform, dtype=dtype, ranks=self.ranks)
        return priced

    def issue(self, graph: Graph) -> Array:
        """Host time of each operation inside an iteration [s]."""
        if self.iteration and "per_operation" in self.iteration:
            return np.full(len(graph), self.iteration["per_operation"])
        return np.asarray(np.add(*price_hosts([graph], self.platform)[0]))

    def find_uncertainties(self, *, copied: bool) -> dict[Cost, Uncertainty]:
        """How far off the device times of copies may be, or those of all other shards; computed
        once.

        They are those of the fits that price the operations on all tables. The operations of one
        cost have a common error.
        """
        if copied not in self._uncertainties:
            division = Division(Split.COPIES if copied else Split.COLUMNS)
            operations = self._price_tables(self._divide(self.order, division))
            self._uncertainties[copied] = self._join_uncertainties(operations)
        return self._uncertainties[copied]

    def _join_uncertainties(self, operations: PricedOperations) -> dict[Cost, Uncertainty]:
        """How far off the device time of each cost may be, from all its operations."""
        priced = operations.priced
        seconds = dict.fromkeys(DEVICE_SECONDS, 0.0)
        errors = dict.fromkeys(DEVICE_SECONDS, 0.0)
        is_assumed = dict.fromkeys(DEVICE_SECONDS, False)
        for work, rows in zip(operations.works, operations.separate.rows, strict=True):
            label = operations.separate.graph.labels[rows[0]]
            if work is Work.OTHER_TRAFFIC or label.kind == "collective":
                continue
            cost = _COST_OF_WORK[work]
            kernel_class = priced.classes[rows[0]]
            time = float(priced.seconds[rows].sum())
            seconds[cost] += time
            errors[cost] += time * float(priced.spread[kernel_class])
            is_assumed[cost] |= bool(priced.assumed[kernel_class])
        uncertainties = dict[Cost, Uncertainty]()
        for cost, time in seconds.items():
            spread = errors[cost] / time if time else 0.0
            uncertainties[cost] = Uncertainty(spread, is_assumed[cost])
        return uncertainties

    def shards(self, numbers: np.ndarray, kind: str, share: float | Array = 1.0) -> ShardCosts:
        """Costs of one shard of each of these tables.

        Parameters
        ----------
        numbers : array of int
            The tables [-].
        kind : str
            Kind of placement, one of `perfkit.workloads.placement_kinds.KINDS`.
        share : float or array
            Share of the columns that a shard holds, or one for each table [-].
        """
        traits = KIND_OF_NAME[kind]
        if traits.splits_rows:
            return self._price_rows(numbers, traits)
        if traits.is_copied:
            cost = self._price_copies(numbers)
        else:
            cost = self._price_columns(numbers, np.broadcast_to(share, len(numbers)))
        return ShardCosts(cost, np.zeros_like(cost))

    def _price_columns(self, numbers: np.ndarray, shares: Array) -> Array:
        """Costs of one shard of each of these tables, which has a share of the columns."""
        cost = np.zeros((len(numbers), len(Cost)))
        for share in np.unique(shares):
            members = shares == share
            cost[members] = self._price(numbers[members], Division(Split.COLUMNS, float(share)))
        return cost

    def _price_copies(self, numbers: np.ndarray) -> Array:
        """Costs of a copy of each of these tables: those worth copying share the caches, and so do
        all others."""
        cost = np.zeros((len(numbers), len(Cost)))
        worthwhile = self.worth_copying[numbers]
        for wanted in np.unique(worthwhile):
            members = worthwhile == wanted
            division = Division(Split.COPIES, worthwhile=bool(wanted))
            cost[members] = self._price(numbers[members], division)
        return cost

    def _price_rows(self, numbers: np.ndarray, kind: PlacementKind) -> ShardCosts:
        """Costs of one shard of each of these tables, which has a share of the rows."""
        parts = self.count_parts(kind)
        cost = self._price(numbers, Division(Split.ROWS, parts=parts))
        first_shard = self._price(numbers, Division(Split.FIRST_ROWS, parts=parts))
        is_pooled = self.is_pooled[numbers]
        hot_row = np.maximum(first_shard - cost, 0.0)
        hot_row[:, [Cost.WEIGHTS, Cost.STATE]] = 0.0
        hot_row[is_pooled, Cost.POOLED] = 0.0
        partial_sums = np.where(is_pooled, cost[:, Cost.POOLED], 0.0)
        if kind.reduction is Reduction.SUMS_OF_ALL_RANKS:
            cost[is_pooled, Cost.POOLED] = 0.0  # rows that are not added up are exchanged
            cost[:, Cost.SUMMED] = partial_sums
        else:
            # a node reduces its partial sums, then each of its ranks exchanges its part with the
            # other nodes
            cost[:, Cost.PARTIAL] = partial_sums
            cost[is_pooled, Cost.POOLED] = partial_sums[is_pooled] / parts
        return ShardCosts(cost, hot_row)

    def _price(self, numbers: np.ndarray, division: Division) -> Array:
        """Costs of one shard of these tables, where all tables are divided in this way; computed
        once."""
        if division not in self._known:
            shape = (len(self.workload.tables), len(Cost))
            self._known[division] = np.full(shape, np.nan)
        known = self._known[division]
        missing = np.unique(numbers[np.isnan(known[numbers, 0])])
        if not len(missing):
            return known[numbers]
        # Under one kernel of a GPU no table depends on the others; else those divided alike compete
        # for the caches.
        members = missing if self.one_kernel_for_all else self._list_competitors(division)
        divided = self._divide(members, division)
        known[members] = _measure_bytes(self.workload, divided)
        operations = self._price_tables(divided)
        if division == Division(Split.COLUMNS) and len(members) == len(known):
            # their uncertainty is asked for, too, and to price them again would take as long
            self._uncertainties[False] = self._join_uncertainties(operations)
        times = self._time(divided, operations)
        # so that every processor finds the same plan
        known[members, : len(SECONDS)] = steady(times.seconds)
        return known[numbers]

    def _list_competitors(self, division: Division) -> np.ndarray:
        """Tables that are divided alike and compete for the caches."""
        if division.split is Split.COPIES:
            return self.order[self.worth_copying[self.order] == division.worthwhile]
        return self.order

    def _divide(self, members: np.ndarray, division: Division) -> DividedTables:
        """One shard of each of these tables."""
        tables = [self.workload.tables[number] for number in members]
        batch, ranks = self.workload.batch, float(self.ranks)
        if division.split is Split.COPIES:
            samples = max(batch // self.ranks, 1)
            return DividedTables(tables, samples, copied=True, cache_scale=1.0)
        if division.split is Split.COLUMNS:
            share = division.share
            shards = [take_part(t, dim=max(round(t.dim * share), 1)) for t in tables]
            scale = self._share_caches(ranks * share)
            return DividedTables(shards, batch, copied=False, cache_scale=scale)
        parts = division.parts
        with_hot_row = division.split is Split.FIRST_ROWS
        shards = []
        for table in tables:
            # where all lookups go to one row, the other shards have next to none
            lookups = max(share_lookups(table, parts, first=with_hot_row), _FEWEST_LOOKUPS)
            rows = -(-table.rows // parts)
            part = take_part(table, rows=rows, pooling=float(lookups))
            if with_hot_row:
                part = keep_hottest(part, table)
            shards.append(part)
        scale = self._share_caches(ranks / parts)
        return DividedTables(shards, batch, copied=False, cache_scale=scale)

    def _share_caches(self, scale: float) -> float:
        """How much of the caches shards may have that are spread over ranks of a CPU; see
        `DividedTables` [-]."""
        return 1.0 if self.accelerated else scale

    def _price_tables(self, divided: DividedTables) -> PricedOperations:
        """Price the operations on each table, and on an empty one at the end."""
        recorded = _record(self, divided)
        separate = _repeat_for_tables(recorded, divided.tables, self.fused)
        platform = self._scale_caches(divided.cache_scale)
        priced = self._price_operations(separate.graph, platform)
        return PricedOperations(separate, recorded.works, priced)

    def _time(self, divided: DividedTables, operations: PricedOperations) -> TableTimes:
        """Times of each table, and the time to start kernels that work on all of them."""
        device_seconds = self.scale * operations.priced.seconds[operations.separate.rows]
        number_of_tables = len(divided.tables)
        # the last row is of the empty table
        seconds = np.zeros((number_of_tables + 1, len(SECONDS)))
        launch = np.zeros(len(SECONDS))
        for work, rows, device_time in zip(
            operations.works, operations.separate.rows, device_seconds, strict=True
        ):
            operation = rows.min()
            label = operations.separate.graph.labels[operation]
            if work is Work.OTHER_TRAFFIC or label.kind == "collective":
                continue
            cost = _COST_OF_WORK[work]
            host_time = self._time_host(operations.separate.graph, operation)
            time = device_time
            if not self.accelerated:  # the host computes as well
                time, host_time = time + host_time, 0.0
            dense_update = label.kind == "elementwise" and label.phase == "update"
            one_kernel = work in (Work.PACK, Work.AVERAGE)
            if self.accelerated and (self.fused or dense_update):
                one_kernel = True
            if not one_kernel:
                seconds[:, Cost.HOST] += host_time
                seconds[:, cost] += time
                continue
            empty_time = time[-1]
            seconds[:, cost] += np.maximum(time - empty_time, 0.0)
            if label.phase != "update":  # dense weights start that kernel in any case
                kernels = 1
                if work in (Work.LOOKUP, Work.BACKWARD):
                    kernels = self.formats
                launch[cost] += kernels * empty_time
                launch[Cost.HOST] += kernels * host_time
        # a fused backward pass updates the rows as well
        updates_in_backward = self.fused and not divided.copied
        updating = Cost.BACKWARD if updates_in_backward else Cost.UPDATE
        if not updates_in_backward or self.workload.embedding == "fused":
            growth = self._grow_update(divided)
            seconds[:-1, updating] *= growth
        self._add_host_tables(divided, seconds[:-1])
        return TableTimes(seconds[:-1], launch)

    def _add_host_tables(self, divided: DividedTables, seconds: Array) -> None:
        """Add what rows in host memory take to the times of tables [s]."""
        optimizer = self.workload.table_optimizer
        if divided.copied:  # no plan copies them; their gradients are averaged in device memory
            optimizer = ""
        times = time_host_tables(
            divided.tables,
            np.array([divided.samples * float(table.pooling) for table in divided.tables]),
            self.platform,
            ranks=self.ranks,
            optimizer=optimizer,
            sorts=self.workload.embedding in _UPDATE_ONCE,
        )
        seconds[:, Cost.LOOKUP] += self.scale * times.forward
        seconds[:, Cost.BACKWARD] += self.scale * (times.weights + times.backward)

    def _time_host(self, graph: Graph, operation: int) -> float:
        """Host time of an operation that follows one of its own class [s]."""
        label = graph.labels[operation]
        alone = Graph((label,), graph.features.select([operation]), Accesses.from_rows())
        [seconds] = self.issue(alone)
        return seconds

    def _scale_caches(self, scale: float) -> Platform:
        """The platform whose caches and pages of the address buffer are `scale` times as large."""
        memo = self.platform.memo
        scaled = memo.get(("caches", scale))
        if scaled is None:
            l2, l3 = self.platform.cache_capacities
            pages = self.platform.page_entries
            sizes = {"l2": l2 * scale, "l3": l3 * scale}
            if pages < np.inf:
                sizes["pages"] = pages * scale
            context = self.platform.context
            caches = Caches.build({**(context.caches or {}), **sizes})
            scaled = replace(self.platform, context=replace(context, caches=caches))
            memo["caches", scale] = scaled
        return scaled

    def _grow_update(self, divided: DividedTables) -> Array:
        """Bytes that an update moves (gradient, weights, optimizer states), relative to plain SGD
        [-]."""
        sector_bytes = 32.0 if self.accelerated else 64.0
        row_bytes = np.array([float(t.row_bytes) for t in divided.tables])
        traffic = row_traffic(row_bytes, 1, sector_bytes)
        optimizer = find_optimizer(_name_optimizer(self.workload, divided))
        state_traffic = optimizer.row_state_bytes(traffic, sector_bytes)
        gradient = row_bytes + INDEX_BYTES
        return (gradient + 2.0 * (traffic + state_traffic)) / (gradient + 2.0 * traffic)


def _sort(tables: Sequence[EmbeddingTable]) -> np.ndarray:
    """Numbers of the tables sorted by rows, columns, lookups, weights of lookups, bytes of a row and
    law; equal ones stay in their order."""
    sizes = [
        (
            t.num_features,
            t.pooled,
            t.row_bytes,
            t.load_factor or 0.0,
            t.host_bytes,
            t.weighted,
            t.exponent,
            t.pooling,
            t.dim,
            t.rows,
        )
        for t in tables
    ]
    keys = np.array(sizes, dtype=float).T
    # writing a law out takes long, and few tables differ in nothing else
    _, numbers, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    has_twin = counts[numbers.ravel()] > 1
    laws = []
    for table, twin in zip(tables, has_twin, strict=True):
        laws.append(repr(table.law) if table.law and twin else "")
    order_of_laws = np.unique(laws, return_inverse=True)[1]
    return np.lexsort((order_of_laws, *keys))


def _stack_tables(tables: Sequence[EmbeddingTable], itemsize: int) -> EmbeddingTable:
    """The tables, and an empty one at the end, as one whose sizes are arrays; the empty one has
    numbers of `itemsize` [B]."""
    sizes: list[tuple[float, float, float]] = [(t.rows, t.dim, t.pooling) for t in tables]
    sizes.append((1.0, 1.0, 1.0))
    rows, dim, pooling = np.array(sizes).T
    stack = EmbeddingTable(rows, dim, pooling, itemsize=itemsize)
    itemsizes = np.array([*(table.itemsize for table in tables), itemsize])
    if (itemsizes != itemsize).any():
        stack = alter(stack, {"itemsize": itemsizes})
    weighted = np.array([*(table.weighted for table in tables), False])
    if weighted.any():
        stack = alter(stack, {"weighted": weighted})
    num_features = np.array([*(table.num_features for table in tables), 1])
    if (num_features > 1).any():
        stack = alter(stack, {"num_features": num_features})
    pooled = np.array([*(table.pooled for table in tables), True])
    if not pooled.all():
        stack = alter(stack, {"pooled": pooled})
    return stack


def _record(costs: Costs, divided: DividedTables) -> RecordedTables:
    """Record the operations on each table and on an empty one at the end."""
    workload, copied = costs.workload, divided.copied
    count = len(divided.tables)
    is_empty_table = np.arange(count + 1) == count
    narrow = ITEMSIZE[workload.dtype] if isinstance(workload, DLRM) else workload.pooled_itemsize
    tape = Tape(narrow, mixed=getattr(workload, "mixed", False))
    works = list[Work]()

    def note(work: Work) -> None:
        """Say what the operations do that were recorded since the last note."""
        works.extend([work] * (len(tape.operations) - len(works)))

    stack = _stack_tables(divided.tables, workload.tables[0].itemsize)
    samples = float(divided.samples) * ~is_empty_table
    [pooled] = layers.embedding_bags(tape, workload, [stack], samples, copied=copied)
    note(Work.LOOKUP)
    packed = tape.tensor(*pooled.shape, itemsize=pooled.itemsize)
    returned = tape.tensor(*pooled.shape, itemsize=pooled.itemsize)
    tape.bare = 1  # the host makes a view of the pooled rows
    tape.copy("cat", [pooled], [packed], rows=pooled.shape[0])
    note(Work.PACK)
    other_bytes = is_empty_table * costs.footprint * divided.cache_scale
    rest = tape.tensor(other_bytes, itemsize=1)
    tape.emit("clone", "copy", [rest], [returned])
    note(Work.OTHER_TRAFFIC)
    pooled.root.gradient = returned
    tape.backward()
    note(Work.BACKWARD)
    # each gradient is stored before the next one is computed
    last_gradient = tape.operations[-1]
    last_gradient.host_calls = last_gradient.host_calls._replace(bare=tape.bare)
    tape.bare = 0
    if copied:
        average(tape)
        note(Work.AVERAGE)
    step(tape, "sgd", lists=costs.accelerated)
    note(Work.UPDATE)
    graph = make_graph(tape, family=workload.family)
    if workload.embedding in _UPDATE_ONCE and not copied:
        _follow_laws(graph, costs, divided)
    return RecordedTables(graph, tuple(works))


def _follow_laws(graph: Graph, costs: Costs, divided: DividedTables) -> None:
    """Let the traffic of the exact backward pass of each table follow its own law of lookups."""
    variant = costs.workload.embedding
    [backward] = graph.kernels[KernelKey("embedding_backward", variant)]
    last_access = np.flatnonzero(graph.accesses.operation == backward)[-1]
    optimizer = costs.workload.table_optimizer
    traffic = [layers.exact_traffic(t, divided.samples, optimizer) for t in divided.tables]
    graph.accesses.nbytes[last_access] = [*traffic, 0.0]


def _repeat_for_tables(
    recorded: RecordedTables, tables: Sequence[EmbeddingTable], fused: bool
) -> SeparateOperations:
    """Repeat each operation for each table, with its own tensors.

    The backward pass visits separate tables in the reverse order.
    """
    graph = recorded.graph
    count = len(tables) + 1  # with the empty table
    order = np.arange(count)
    rows = np.arange(len(graph))[:, None] * count + order
    if not fused:
        for operation, label in enumerate(graph.labels):
            if label.phase == "backward":
                rows[operation] = rows[operation, ::-1]
    features = Features.zeros(rows.size)
    for name, values in vars(graph.features).items():
        vars(features)[name][rows] = values
    features.table[rows] = order % max(len(tables), 1)
    accesses = graph.accesses
    separate_accesses = Accesses(
        operation=rows[accesses.operation].ravel(),
        buffer=(accesses.buffer[:, None] * count + order).ravel(),
        nbytes=accesses.nbytes.ravel(),
        is_write=np.repeat(accesses.is_write, count),
    ).sort()
    labels = list[Label]()
    for label in graph.labels:
        labels.extend([label] * count)
    separate = Graph(
        tuple(labels),
        features,
        separate_accesses,
        # what rows in host memory add is counted by table, see `Costs._add_host_tables`
        tuple(put_on_device(table) for table in tables),
        family=graph.family,
    )
    return SeparateOperations(separate, rows)


def _name_optimizer(workload: DLRM | TableSet, divided: DividedTables) -> str:
    """What updates tables: that of dense weights if they are copied to all ranks."""
    if divided.copied:
        return workload.optimizer
    return workload.table_optimizer


def _measure_bytes(workload: DLRM | TableSet, divided: DividedTables) -> Array:
    """Bytes of each table by `Cost`; the seconds are still zero."""
    tables, samples = divided.tables, divided.samples
    sizes = [(t.rows, t.dim, t.pooling, t.itemsize, t.row_bytes) for t in tables]
    rows, dim, pooling, itemsize, row_bytes = np.array(sizes, dtype=float).T
    lookups = samples * pooling
    weights = rows * row_bytes
    results = np.array([table.results for table in tables], dtype=float)
    num_features = np.array([table.num_features for table in tables], dtype=float)
    outputs = samples * results * dim * workload.pooled_itemsize
    lookup_bytes = np.array([table.lookup_bytes for table in tables], dtype=float)
    inputs = lookup_bytes * lookups + INDEX_BYTES * samples * num_features
    fused = workload.embedding != "separate"
    if divided.copied or not (workload.sparse or fused):
        weight_gradients = weights
    elif fused:  # the backward pass updates the rows
        weight_gradients = np.zeros_like(weights)
    else:
        weight_gradients = lookups * (dim * workload.pooled_itemsize + INDEX_BYTES)
    costs = np.zeros((len(tables), len(Cost)))
    if divided.copied:
        costs[:, Cost.AVERAGED] = weights
    else:
        costs[:, Cost.POOLED] = outputs
        costs[:, Cost.INDICES] = inputs
    costs[:, Cost.WEIGHTS] = [float(table.device_bytes) for table in tables]
    optimizer = _name_optimizer(workload, divided)
    states = state_bytes(rows, dim, itemsize, optimizer=optimizer)
    if find_optimizer(optimizer).states:  # those for each weight lie where all rows lie
        states = states * np.array([not table.host_bytes for table in tables])
    costs[:, Cost.STATE] = states
    costs[:, Cost.INPUTS] = inputs
    costs[:, Cost.OUTPUTS] = outputs
    costs[:, Cost.GRADIENTS] = outputs + weight_gradients
    return costs
