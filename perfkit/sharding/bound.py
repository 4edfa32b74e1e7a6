"""A lower bound of the time of all placements, by Lagrangian relaxation."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.problem import (
    MESSAGES,
    NO_TIME,
    REDUCED,
    Candidates,
    Curve,
    Floors,
    Line,
    Problem,
    Resource,
)

#: How often an interval of bytes is halved at most [-].
_HALVINGS = 12
#: An interval is halved while its line is farther below the curve than this share of the time [-].
_GAP = 1e-4
#: What sums of floats in another order may differ by, relative to them [-].
_ROUNDING = 1e-9
#: Intervals of the exchanged bytes, and the smallest one over the largest [-].
_INTERVALS, _SMALLEST_INTERVAL = 40, 1e-3
#: Prices of a byte that are tried beside the slopes of the lines, and their range over the steepest
#: slope [-].
_PRICES, _LOWEST_PRICE, _HIGHEST_PRICE = 80, 1e-3, 1e2


class LowerBound(NamedTuple):
    """Time that no placement can beat.

    Parameters
    ----------
    time : float
        The bound [s].
    kinds : array of str
        Kind of placement of each unit of tables where it is reached [-].
    set_by_host : bool
        Whether the host sets it.
    """

    time: float
    kinds: np.ndarray
    set_by_host: bool


class Interval(NamedTuple):
    """Bytes of a message in a relaxed problem: at least `low` and at most `high` [B]."""

    low: float
    high: float


class Relaxed(NamedTuple):
    """A relaxed problem: tables can be divided at will, and reduced messages have sizes within
    intervals.

    Parameters
    ----------
    time : float
        Its least time; infinite if no placement has messages within the intervals [s].
    choice : array of int
        Entry of `Floors` for each unit of tables where that time is reached [-].
    intervals : mapping of Resource to Interval
        Bytes of each message that all ranks reduce together.
    gaps : mapping of Resource to float
        How far the line of each of these messages is below its curve there [s].
    """

    time: float
    choice: np.ndarray
    intervals: Mapping[Resource, Interval]
    gaps: Mapping[Resource, float]


class _Exchange(NamedTuple):
    """Least time with the exchange of pooled rows [s], and the price of a byte in it [s/B]."""

    time: float
    price: float


def find_lower_bound(problem: Problem, floors: Floors) -> LowerBound:
    """Time that no placement of these kinds can beat, and the kinds that come near it.

    Notes
    -----
    The fullest rank carries at least the average load of every resource. Each table takes its best
    kind at a price per exchanged byte (Lagrangian relaxation), with lines below the curves of the
    messages on short intervals. Also, some rank carries the largest shard. Where a larger message
    is faster, the fullest rank is charged the fastest of the larger messages.
    """
    rising_curves = {resource: curve.never_falling() for resource, curve in problem.curves.items()}
    rising = replace(problem, curves=rising_curves)
    best = _Relaxation(rising, floors).solve_all()[0]
    least_load = floors.least_of_units(floors.average).sum(axis=0)
    with_largest_shard = rising.time(np.maximum(floors.largest, least_load))
    time_of_largest_shard = float(floors.least_of_units(with_largest_shard).max())
    least_host_time = problem.host_seconds + float(least_load[Resource.HOST])
    host_time = problem.correction * least_host_time
    bound = max(best.time, time_of_largest_shard, host_time)
    set_by_host = host_time > best.time
    choice = best.choice
    if set_by_host:
        choice = floors.cheapest_of_units(floors.average[:, Resource.HOST])
    return LowerBound(bound * (1 - _ROUNDING), floors.kind[choice], set_by_host)


def relax(problem: Problem, candidates: Candidates) -> list[np.ndarray]:
    """Candidates of the units in relaxed problems, the least time first."""
    average = candidates.total_load / problem.costs.ranks
    largest = candidates.shard_load + candidates.hot_row_load
    floors = Floors(candidates.unit, candidates.kind, average, largest)
    return [relaxed.choice for relaxed in _Relaxation(problem, floors).solve_all()]


class _ExchangeLines(NamedTuple):
    """Lines below the curve of the exchange of pooled rows, one for each interval of its bytes.

    Parameters
    ----------
    low, high : array
        Ends of the intervals [B].
    intercepts : array
        Time of each line at 0 B [s].
    slopes : array
        Time of a byte on each line [s/B].
    """

    low: Array
    high: Array
    intercepts: Array
    slopes: Array


@dataclass(eq=False)
class _Relaxation:
    """Relaxed problems by the bytes that ranks reduce."""

    problem: Problem
    floors: Floors
    #: Lines below the curve of the exchange, by the most bytes that it may have [B].
    lines_of_exchange: dict[float, _ExchangeLines] = field(default_factory=dict)

    def __post_init__(self) -> None:
        curves, average = self.problem.curves, self.floors.average
        self.curves = {m.resource: curves.get(m.resource, NO_TIME) for m in MESSAGES}
        seconds = average[:, Resource.FORWARD] + average[:, Resource.BACKWARD]
        # these messages are short enough that one line through 0 does for each
        for resource in (Resource.INDICES, Resource.PARTIAL):
            nbytes = average[:, resource]
            slope = self.curves[resource].slope_below(self.floors.sum_of_largest(nbytes))
            seconds = seconds + slope * nbytes
        #: Time of each entry without pooled rows and reduced messages [s].
        self.seconds = seconds

    def solve_all(self) -> list[Relaxed]:
        """Relaxed problems, the least time first.

        The first ones are with and without each reduced message. The interval with the least time
        is halved as long as its line is far below the curve.
        """
        choices = [self._list_intervals(resource) for resource in REDUCED]
        parts = []
        for intervals in itertools.product(*choices):
            parts.append(self._solve(dict(zip(REDUCED, intervals, strict=True))))
        for _ in range(_HALVINGS):
            parts.sort(key=lambda part: part.time)
            first = parts[0]
            if not first.gaps:
                break
            widest = max(first.gaps, key=lambda resource: first.gaps[resource])
            if first.gaps[widest] < _GAP * first.time:
                break
            low, high = first.intervals[widest]
            middle = math.sqrt(max(low, 1.0) * high)
            halves = []
            for half in (Interval(low, middle), Interval(middle, high)):
                halves.append(self._solve({**first.intervals, widest: half}, first.time))
            parts[:1] = halves
        feasible = [part for part in parts if part.time < np.inf]
        return sorted(feasible, key=lambda part: part.time)

    def _list_intervals(self, resource: Resource) -> tuple[Interval, Interval]:
        """No such message, and all sizes that it may have."""
        nbytes = self.floors.average[:, resource]
        most = self.floors.sum_of_largest(nbytes)
        least = np.min(nbytes, initial=most, where=nbytes > 0)
        return Interval(0.0, 0.0), Interval(least, most)

    def _solve(self, intervals: Mapping[Resource, Interval], at_least: float = 0.0) -> Relaxed:
        """Least time with messages within these intervals; it is at least `at_least` [s]."""
        floors, average = self.floors, self.floors.average
        lines = dict[Resource, Line]()
        for resource, (low, high) in intervals.items():
            lines[resource] = self.curves[resource].line_below(low, high)
        seconds = self.seconds + sum(
            line.slope * average[:, resource] for resource, line in lines.items()
        )
        for resource, interval in intervals.items():
            seconds[average[:, resource] > interval.high] = np.inf
        if not np.isfinite(floors.least_of_units(seconds)).all():
            return Relaxed(np.inf, floors.first_of_unit, intervals, {})
        pooled = average[:, Resource.POOLED]
        exchange = self._relax_exchange(seconds)
        intercepts = sum(line.intercept for line in lines.values())
        time = exchange.time + (self.problem.device_seconds + intercepts)
        choice = floors.cheapest_of_units(seconds + exchange.price * pooled)
        gaps = dict[Resource, float]()
        for resource, (low, high) in intervals.items():
            nbytes = float(np.clip(average[choice, resource].sum(), low, high))
            time_on_curve = float(self.curves[resource](nbytes))
            gaps[resource] = time_on_curve - np.dot(lines[resource], (1, nbytes))
        return Relaxed(max(self.problem.correction * time, at_least), choice, intervals, gaps)

    def _relax_exchange(self, seconds: Array) -> _Exchange:
        """Least time with the exchange of pooled rows, interval by interval.

        `seconds` is the time of each entry of the floors without the exchange [s].

        Notes
        -----
        Within an interval from a to b bytes, a line s + m x is below the curve. For every price p
        of a byte, the least time is at least s + sum_i min_k (t_k + p x_k) - max over x in [a, b]
        of (p - m) x. The highest price takes the best of these bounds.
        """
        floors, curve = self.floors, self.curves[Resource.POOLED]
        pooled = floors.average[:, Resource.POOLED]
        most = floors.sum_of_largest(np.where(np.isfinite(seconds), pooled, 0.0))
        if not most or not curve.seconds.any():
            return _Exchange(float(floors.least_of_units(seconds).sum()), 0.0)
        if most not in self.lines_of_exchange:
            self.lines_of_exchange[most] = _draw_lines(curve, most)
        low, high, intercepts, slopes = self.lines_of_exchange[most]
        prices = _list_prices(slopes)
        least = np.array([floors.least_of_units(seconds + p * pooled).sum() for p in prices])
        excess = prices[:, None] - slopes
        most_expensive = np.where(excess > 0, excess * high, excess * low)
        bounds = intercepts + least[:, None] - most_expensive
        interval = int(np.argmin(bounds.max(axis=0)))
        best_price = int(np.argmax(bounds[:, interval]))
        return _Exchange(float(bounds[:, interval].max()), float(prices[best_price]))


def _draw_lines(curve: Curve, most: float) -> _ExchangeLines:
    """Lines below the curve of the exchange, for up to `most` bytes [B]."""
    sizes = np.geomspace(most * _SMALLEST_INTERVAL, most * (1 + 1e-6), _INTERVALS)
    edges = np.concatenate([[0.0], steady(sizes)])
    low, high = edges[:-1], edges[1:]
    lines = []
    for smallest, largest in zip(low, high, strict=True):
        lines.append(curve.line_below(max(smallest, 1.0), largest))
    intercepts, slopes = np.array(lines).T
    intercepts[0] = min(intercepts[0], 0.0)  # there may be no exchange
    return _ExchangeLines(low, high, intercepts, slopes)


def _list_prices(slopes: Array) -> Array:
    """Prices of a byte that are tried, of both signs [s/B]."""
    # the slope is 0 where all messages are so short that they take the same time
    steepest = float(slopes.max()) or 1.0
    between = np.geomspace(_LOWEST_PRICE * steepest, _HIGHEST_PRICE * steepest, _PRICES)
    prices = np.unique([0.0, *slopes, *steady(between)])
    return np.concatenate([-prices[:0:-1], prices])
