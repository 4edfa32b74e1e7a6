"""The placement problem: units of tables are its variables, and the time of an iteration is what
it minimizes, subject to memory and constraints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, join_errors
from perfkit.sharding.costs import DEVICE_SECONDS, MEMORY, Cost, Costs
from perfkit.workloads.placement import Plan
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS, PlacementKind, Reduction


class Resource(IntEnum):
    """What the shards of a rank share: its column in an array of loads.

    ``FORWARD`` and ``BACKWARD`` are seconds of the device, and ``HOST`` is seconds of the host. No
    collective is between update and lookup, so both are part of ``FORWARD``. ``MEMORY`` is bytes.
    The others are bytes of messages: pooled rows, partial sums inside nodes, indices, partial sums
    over all ranks, and gradients of copies.
    """

    FORWARD = 0
    BACKWARD = 1
    POOLED = 2
    PARTIAL = 3
    INDICES = 4
    ROWS = 5
    GRADIENTS = 6
    HOST = 7
    MEMORY = 8

    @property
    def label(self) -> str:
        """Its name in results."""
        return self.name.lower()


#: Resources that are seconds of the device.
DEVICE_RESOURCES = [Resource.FORWARD, Resource.BACKWARD]


class Message(NamedTuple):
    """A kind of message that the tables need.

    Parameters
    ----------
    resource : Resource
        Its bytes in an array of loads.
    part : str
        Name of its part of the time.
    collectives : tuple of str
        Collectives that send it, forward and backward.
    inside_nodes : bool
        Whether it stays inside a node.
    """

    resource: Resource
    part: str
    collectives: tuple[str, ...]
    inside_nodes: bool = False


#: All kinds of messages of tables.
MESSAGES = (
    Message(Resource.INDICES, "exchange of indices", ("all_to_all",)),
    Message(Resource.POOLED, "exchange of pooled rows", ("all_to_all", "all_to_all")),
    Message(
        Resource.PARTIAL,
        "partial sums inside nodes",
        ("reduce_scatter", "all_gather"),
        inside_nodes=True,
    ),
    Message(Resource.ROWS, "partial sums", ("reduce_scatter", "all_gather")),
    Message(Resource.GRADIENTS, "gradients of copies", ("all_reduce",)),
)
#: Messages that all ranks reduce together.
REDUCED = (Resource.ROWS, Resource.GRADIENTS)
#: Standard deviation of the logarithm of the time of work without tables that is no kernel of its
#: own: reduced dense gradients, and the start of kernels that work on all tables [-].
_SPREAD_OF_THE_REST = 0.3
#: The message that carries what ranks add up.
MESSAGE_OF_REDUCTION = {
    Reduction.SUMS_OF_ALL_RANKS: Resource.ROWS,
    Reduction.SUMS_INSIDE_NODES: Resource.PARTIAL,
    Reduction.GRADIENTS: Resource.GRADIENTS,
}


@dataclass(frozen=True, eq=False)
class Objective:
    """What a search minimizes.

    Parameters
    ----------
    name : str
        How people ask for it.
    costs : mapping of Resource to tuple of Cost
        The costs of a shard that load each resource.
    has_messages : bool
        Whether messages between ranks take time.
    """

    name: str
    costs: Mapping[Resource, tuple[Cost, ...]]
    has_messages: bool

    @cached_property
    def matrix(self) -> Array:
        """Loads of every resource by a unit of every cost, shape (costs, resources) [-]."""
        matrix = np.zeros((len(Cost), len(Resource)))
        for resource, costs in self.costs.items():
            matrix[list(costs), resource] = 1.0
        return matrix


_ITERATION = Objective(
    "iteration",
    {
        Resource.FORWARD: (Cost.LOOKUP, Cost.PACK, Cost.UPDATE),
        Resource.BACKWARD: (Cost.BACKWARD,),
        Resource.POOLED: (Cost.POOLED,),
        Resource.PARTIAL: (Cost.PARTIAL,),
        Resource.INDICES: (Cost.INDICES,),
        Resource.ROWS: (Cost.SUMMED,),
        Resource.GRADIENTS: (Cost.AVERAGED,),
        Resource.HOST: (Cost.HOST,),
        Resource.MEMORY: MEMORY,
    },
    has_messages=True,
)
_ADDITIVE = Objective(
    "additive",
    {Resource.FORWARD: DEVICE_SECONDS, Resource.MEMORY: MEMORY},
    has_messages=False,
)
#: Objectives by name: the time of an iteration, or of the tables alone without messages.
OBJECTIVES = {objective.name: objective for objective in (_ITERATION, _ADDITIVE)}


@dataclass(frozen=True, eq=False)
class Curve:
    """Time of a message by its size, as a table; 0 B take no time.

    Parameters
    ----------
    nbytes, seconds : array
        Sizes in ascending order [B], and the time of each [s].
    """

    nbytes: Array
    seconds: Array

    def __call__(self, nbytes: Array | float) -> Array:
        return np.where(np.asarray(nbytes) > 0, np.interp(nbytes, self.nbytes, self.seconds), 0.0)

    def time_one(self, nbytes: float) -> float:
        """Time of one message [s]."""
        if nbytes <= 0:
            return 0.0
        return float(np.interp(nbytes, self.nbytes, self.seconds))

    def slope_below(self, high: float) -> float:
        """Slope of the steepest line through 0 that stays below the curve up to `high` [s/B].

        Between two sizes of the table the time is a straight line, and it is least per byte at one
        of its ends: at a size of the table, or at `high`.
        """
        sizes = np.unique(np.minimum(self.nbytes, max(high, 1.0)))
        return float(np.min(self(sizes) / np.maximum(sizes, 1.0)))

    def never_falling(self) -> "Curve":
        """The curve below this one that no larger message is faster on.

        A message of at least so many bytes takes at least this time, also where another protocol
        makes a larger message faster.
        """
        least_of_larger = np.minimum.accumulate(self.seconds[::-1])[::-1]
        return Curve(self.nbytes, least_of_larger)


#: The curve of messages that take no time.
NO_TIME = Curve(np.array([0.0, 1e18]), np.zeros(2))


def _first_of_units(unit: np.ndarray) -> np.ndarray:
    """Position of the first entry of each unit, in entries that are sorted by unit."""
    return np.flatnonzero(np.diff(unit, prepend=-1))


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidate placements of each unit of tables, sorted by unit.

    Parameters
    ----------
    unit : array of int
        The unit of each candidate [-].
    kind : array of str
        Kind of placement [-].
    shards : array of int
        Number of shards [-].
    on_every_rank : array of bool
        Whether every rank has one of the shards; else the search chooses their ranks [-].
    shard_load : array, shape (candidates, resources)
        Load of one shard by `Resource` [s or B].
    hot_row_load : array, shape (candidates, resources)
        What the shard with the most popular row carries in addition [s or B].
    hot_row_rank : array of int
        Rank of that shard, if every rank has one; else it is the first shard [-].
    """

    unit: np.ndarray
    kind: np.ndarray
    shards: np.ndarray
    on_every_rank: np.ndarray
    shard_load: Array
    hot_row_load: Array
    hot_row_rank: np.ndarray

    @cached_property
    def first_of_unit(self) -> np.ndarray:
        """First candidate of each unit."""
        return _first_of_units(self.unit)

    @property
    def total_load(self) -> Array:
        """Load of each candidate on all ranks together, by `Resource` [s or B]."""
        return self.shards[:, None] * self.shard_load + self.hot_row_load

    def least_of_units(self, values: Array) -> Array:
        """Smallest value among the candidates of each unit."""
        return np.asarray(np.minimum.reduceat(values, self.first_of_unit))

    def choose_kinds(self, kinds: np.ndarray) -> np.ndarray:
        """First candidate of a kind, which is given for each unit; the first candidate of the unit
        where it has none of that kind."""
        chosen = self.first_of_unit.copy()
        for kind in np.unique(kinds):
            first = self.first_of_unit.copy()
            # in reverse order, so that the first one of a unit is written last
            candidates = np.flatnonzero(self.kind == kind)[::-1]
            first[self.unit[candidates]] = candidates
            chosen = np.where(kinds == kind, first, chosen)
        return chosen


class Grain(NamedTuple):
    """Bytes of pooled rows of which every shard has a multiple, but for some splits by rows inside
    nodes.

    Parameters
    ----------
    nbytes : float
        The bytes [B].
    breaks : array of bool, shape (entries,)
        Whether the shards of an entry of `Floors` have other parts.
    least_partial : float
        Bytes of partial sums on the fullest rank if any shard has another part, also one of a table
        whose entries do not say so; infinite if there is none [B].
    """

    nbytes: float
    breaks: np.ndarray
    least_partial: float


@dataclass(frozen=True, eq=False)
class Floors:
    """Least loads of every way to place each unit of tables, sorted by unit.

    Unlike `Candidates` they cover all that `perfkit.price_plan` takes within the constraints: copies
    and splits of all tables, and shards of any number of columns that is allowed.

    Parameters
    ----------
    unit : array of int
        The unit of each entry [-].
    kind : array of str
        Kind of placement [-].
    average : array, shape (entries, resources)
        No plan of that kind gives a rank less than this on the mean of all ranks [s or B].
    everywhere : array, shape (entries, resources)
        No plan of that kind gives any rank less than this [s or B].
    largest : array, shape (entries, resources)
        No plan of that kind gives every rank less than this: some rank carries at least that
        [s or B].
    grain : Grain or None
        Bytes of pooled rows in whole multiples; None where they may be any.
    lightest : array, shape (units, resources), or None
        Loads of each unit on all ranks together, if every shard took as few seconds for a byte of its
        pooled rows as the one that takes fewest; None where no table takes half as long as an average
        rank [s or B].
    """

    unit: np.ndarray
    kind: np.ndarray
    average: Array
    everywhere: Array
    largest: Array
    grain: Grain | None = None
    lightest: Array | None = None

    @cached_property
    def first_of_unit(self) -> np.ndarray:
        """First entry of each unit."""
        return _first_of_units(self.unit)

    def least_of_units(self, values: Array) -> Array:
        """Smallest value among the entries of each unit."""
        return np.asarray(np.minimum.reduceat(values, self.first_of_unit))

    def cheapest_of_units(self, values: Array) -> np.ndarray:
        """First entry of each unit that has the smallest value."""
        least = self.least_of_units(values)
        cheapest = np.flatnonzero(values == least[self.unit])
        _, first = np.unique(self.unit[cheapest], return_index=True)
        return cheapest[first]

    def sum_of_largest(self, values: Array) -> float:
        """Sum over units of the largest value among their entries."""
        return float(np.maximum.reduceat(values, self.first_of_unit).sum())


@dataclass(frozen=True, eq=False)
class Constraints:
    """What a placement must keep, with tables by number.

    Parameters
    ----------
    unit_of_table : array of int
        Unit of each table; tables of one unit share a rank [-].
    pinned : mapping of int to int
        Units whose rank is given, and that rank [-].
    apart : sequence of tuple of int
        Groups of units that do not share a rank [-].
    allowed : mapping of str to array of bool
        By kind of placement, which tables may be placed so.
    min_columns : array of int, optional
        Least columns of a shard of each table that is split by columns; None if any number will do
        [-].
    """

    unit_of_table: np.ndarray
    pinned: Mapping[int, int] = field(default_factory=dict)
    apart: Sequence[tuple[int, ...]] = ()
    allowed: Mapping[str, np.ndarray] = field(default_factory=dict)
    min_columns: np.ndarray | None = None

    @cached_property
    def units(self) -> list[list[int]]:
        """Tables of each unit."""
        ends = np.cumsum(np.bincount(self.unit_of_table))[:-1]
        tables = np.argsort(self.unit_of_table, kind="stable")
        return [members.tolist() for members in np.split(tables, ends)]

    def count_column_shards(self, columns: Array) -> Array:
        """Most shards by columns of each table, which has so many columns [-]."""
        if self.min_columns is None:
            return columns
        return np.asarray(columns // self.min_columns)

    def list_conflicts(self, unit: int) -> list[int]:
        """Units that must be apart from this one; one may be named twice."""
        conflicts = []
        for group in self.apart:
            if unit in group:
                conflicts += [other for other in group if other != unit]
        return conflicts

    def allow_move(self, table: int, rank: int, plan: Plan) -> bool:
        """Whether a shard of a table may move to a rank while the rest of the plan stays."""
        unit = self.unit_of_table[table]
        if unit in self.pinned or len(self.units[unit]) > 1:
            return False
        for other_unit in self.list_conflicts(unit):
            for other_table in self.units[other_unit]:
                if rank in plan.placements[other_table].ranks:
                    return False
        return True


@dataclass(frozen=True, eq=False)
class TimeParts:
    """Parts of the time of a plan, which sum to it.

    Parameters
    ----------
    tables : mapping of Cost to float
        Phases of the slowest ranks [s].
    messages : mapping of Resource to float
        Time of each kind of message [s].
    everything_else : float
        All work without tables [s].
    host_work : float
        All work of the slowest host, which runs beside the device [s].
    total : float
        Time of the plan [s].
    """

    tables: Mapping[Cost, float]
    messages: Mapping[Resource, float]
    everything_else: float
    host_work: float
    total: float

    @cached_property
    def _parts_on_device(self) -> dict[str, float]:
        """All parts by name, but for the host [s]."""
        parts = {cost.label: time for cost, time in self.tables.items()}
        for message in MESSAGES:
            if message.resource in self.messages:
                parts[message.part] = self.messages[message.resource]
        parts["everything else"] = self.everything_else
        return parts

    @property
    def on_device(self) -> float:
        """What the device takes where it waits for no host [s]."""
        return sum(self._parts_on_device.values())

    @property
    def host(self) -> float:
        """What the device waits for the host [s]."""
        return self.total - self.on_device

    def by_name(self) -> dict[str, float]:
        """The parts by name that are more than rounding of the total [s]."""
        parts = {**self._parts_on_device, "host": self.host}
        return {name: time for name, time in parts.items() if abs(time) > 1e-12 * self.total}


class _Error(NamedTuple):
    """How far off a time may be.

    Parameters
    ----------
    seconds : float
        Standard deviation of the time [s].
    is_assumed : bool
        Whether the time rests on an assumption or another machine alone.
    """

    seconds: float
    is_assumed: bool


@dataclass(frozen=True, eq=False)
class Problem:
    """What has to be placed, and what it costs.

    The time of an iteration follows from the loads of the ranks:

    .. math:: t = c \\max\\left(t_0 + \\max_r f_r + \\max_r b_r + \\sum_m t_m,\\; h_0 + \\max_r
    h_r\\right)

    Here f is lookup and update and b is backward of a rank, t_m is the time of a message, and h is
    the time of the host; t_0 and h_0 are work without tables. Messages follow one after another,
    each as long as that of the fullest rank. The correction c is the predicted over the modelled
    time of one plan; it covers the overlap of collectives.

    `perfkit.predict` has one term that this time lacks: each host copies the pooled rows of every
    rank that sends some, and here as many ranks send as in that one plan, at most one for each
    table. A search could not bound a term that depends on the whole plan so closely. Where the host
    sets the time, both differ by that copy (20 µs on an H100) for every rank more or fewer, and
    otherwise by up to 2 %, and 6 % with tables split by rows, whose calls are counted for a pair of
    tables; a test holds this.

    Parameters
    ----------
    costs : Costs
        What shards cost.
    constraints : Constraints
        What a placement must keep.
    objective : Objective
        What is minimized.
    capacity : float
        Memory of a rank for tables; 0 where everything else alone does not fit [B].
    reserved : float
        Memory of a rank that everything else takes, with what is kept free [B].
    memory : float
        Memory of a rank [B].
    device_seconds, host_seconds : float
        All work without tables, on the device and on the host [s].
    correction : float
        The factor c [-].
    curves : mapping of Resource to Curve
        Time of each kind of message that the platform has a model of.
    host_seconds_of_message : mapping of Resource to float
        What a host takes for a kind of message, however many tables it carries [s].
    missing_models : mapping of Resource to str
        Why the platform cannot price the other kinds of messages.
    memory_of_platform : bool
        Whether the memory of a rank is that of the platform, as nobody gave it.
    kept_free : float
        Memory of a rank that stays free for what is not counted [B].
    """

    costs: Costs
    constraints: Constraints
    objective: Objective
    capacity: float
    reserved: float
    memory: float
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    correction: float = 1.0
    curves: Mapping[Resource, Curve] = field(default_factory=dict)
    host_seconds_of_message: Mapping[Resource, float] = field(default_factory=dict)
    missing_models: Mapping[Resource, str] = field(default_factory=dict)
    memory_of_platform: bool = False
    kept_free: float = 0.0

    def find_loads(self, costs: Array) -> Array:
        """Loads by `Resource` from costs by `Cost` [s or B]; the additive objective puts all seconds
        into the first."""
        return costs @ self.objective.matrix

    def time_messages(self, peaks: Array) -> dict[Resource, Array]:
        """Time of each kind of message, from the largest load of each resource [s]."""
        return {
            message.resource: self.curves[message.resource](peaks[..., message.resource])
            for message in MESSAGES
            if message.resource in self.curves
        }

    def time(self, peaks: Array) -> Array:
        """Time of an iteration from the largest load of each resource [s]."""
        device_time = self.device_seconds + peaks[..., Resource.FORWARD]
        device_time = device_time + peaks[..., Resource.BACKWARD]
        device_time = device_time + sum(self.time_messages(peaks).values())
        return self.correction * np.maximum(device_time, self._time_host(peaks))

    def _time_host(self, peaks: Array) -> Array:
        """Time of the slowest host, before the correction [s]."""
        host_time_of_messages = sum(
            time * (peaks[..., resource] > 0)
            for resource, time in self.host_seconds_of_message.items()
        )
        host_time: Array = self.host_seconds + peaks[..., Resource.HOST] + host_time_of_messages
        return host_time

    def break_down(self, costs: Array) -> TimeParts:
        """Parts that sum to the time, from the costs of ranks: phases of the slowest ranks,
        messages, the rest."""
        loads = self.find_loads(costs)
        peaks = loads.max(axis=0)
        tables = dict[Cost, float]()
        for resource in DEVICE_RESOURCES:
            slowest_rank = np.argmax(loads[:, resource])
            for cost in self.objective.costs.get(resource, ()):
                tables[cost] = self.correction * float(costs[slowest_rank, cost])
        messages = dict[Resource, float]()
        for resource, time in self.time_messages(peaks).items():
            messages[resource] = self.correction * float(time)
        everything_else = self.correction * self.device_seconds
        host_time = self.correction * float(self._time_host(peaks))
        return TimeParts(tables, messages, everything_else, host_time, float(self.time(peaks)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of placement that the platform can price: it has a model of their messages."""
        return tuple(kind.name for kind in PLACEMENT_KINDS if self._can_price(kind))

    def _can_price(self, kind: PlacementKind) -> bool:
        """Whether the platform has a model of the messages of a kind of placement."""
        if not self.objective.has_messages:
            # what other kinds are for is to save messages, or to need them
            return kind.reduction is None and not kind.is_inside_node
        if kind.reduction is None:
            return True
        return MESSAGE_OF_REDUCTION[kind.reduction] in self.curves

    @property
    def left_out(self) -> dict[str, str]:
        """Why a kind of placement cannot be priced on this platform and number of ranks, by
        kind."""
        reasons = {}
        for kind in PLACEMENT_KINDS:
            # where all ranks are one node, or each is a node, these are the same as other kinds
            if kind.is_inside_node and not self.costs.has_inner_nodes:
                continue
            if kind.reduction is None:
                continue
            message = MESSAGE_OF_REDUCTION[kind.reduction]
            if message in self.missing_models:
                reasons[kind.name] = self.missing_models[message]
        return reasons

    def estimate_spread(self, parts: TimeParts, costs_of_copies: Array) -> float:
        """Standard deviation of the logarithm of the time of a plan [-].

        Where whole iterations were fitted, it is theirs. Else the fits of kernels of tables, all
        other work, messages, iterations around the sum of their kernels, and hosts have independent
        errors, as in a prediction. `costs_of_copies` are those of all copied tables on a rank
        [s or B].
        """
        level = self.costs.level
        if self.costs.iteration is not None:
            return self.costs.iteration.spread if level is None else level.spread
        if not parts.total:
            return 0.0
        errors = self._list_errors(parts, costs_of_copies)
        time_of_messages = sum(parts.messages.values())
        time_of_kernels = parts.everything_else + sum(parts.tables.values())
        of_device = join_errors(
            np.array([error.seconds for error in errors]) / parts.total,
            np.array([error.is_assumed for error in errors]),
            time_of_messages / parts.total,
            (CONTEXT if level is None else level.spread) * time_of_kernels / parts.total,
        )
        return math.hypot(float(of_device), self._spread_by_host(parts))

    def _list_errors(self, parts: TimeParts, costs_of_copies: Array) -> list[_Error]:
        """How far off the times of kernels may be, class by class."""
        errors = []
        for cost, time in parts.tables.items():
            time_of_copies = min(self.correction * float(costs_of_copies[cost]), time)
            for copied, seconds in ((True, time_of_copies), (False, time - time_of_copies)):
                if seconds > 0:
                    uncertainty = self.costs.find_uncertainties(copied=copied)[cost]
                    errors.append(_Error(uncertainty.spread * seconds, uncertainty.is_assumed))
        other_time = parts.everything_else
        rest = self.costs.priced_rest
        if rest is not None and other_time > 0:
            seconds_of_classes = self.correction * self.costs.scale * rest.totals
            other_time -= float(seconds_of_classes.sum())
            errors_of_classes = (rest.spread * seconds_of_classes).tolist()
            for error, is_assumed in zip(errors_of_classes, rest.assumed.tolist(), strict=True):
                errors.append(_Error(error, is_assumed))
        errors.append(_Error(_SPREAD_OF_THE_REST * max(other_time, 0.0), is_assumed=False))
        return errors

    def _spread_by_host(self, parts: TimeParts) -> float:
        """Spread of the time because all host times may be too short or too long together: half of
        what lies between the logarithms of both times [-]."""
        host_error = find_host_error(self.costs.platform)
        longest = max(parts.on_device, parts.host_work * host_error)
        shortest = max(parts.on_device, parts.host_work / host_error)
        return math.log(longest / shortest) / 2
