"""A lower bound of the time of all placements, by Lagrangian relaxation."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.problem import (
    NO_TIME,
    REDUCED,
    Candidates,
    Curve,
    Floors,
    Problem,
    Resource,
)

#: How often an interval of bytes is divided at most [-].
_DIVISIONS = 40
#: An interval is divided while its line is farther below the curve than this share of the time [-].
_GAP = 1e-4
#: Where an interval from 0 is taken to begin and how near to its ends it is not divided, in
#: logarithms of bytes: both relative to its length [-].
_SMALLEST_PART, _MARGIN = 1e-3, 0.05
#: What sums of floats in another order may differ by, relative to them [-].
_ROUNDING = 1e-9
#: Farthest price of a byte that is tried from the slope of its curve, over the steepest slope [-].
_FARTHEST_PRICE = 4.0
#: Most steps to the best prices, and what they may miss of the time, relative to it [-].
_STEPS_OF_PRICES, _CLOSE = 300, 1e-5


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


def find_lower_bound(problem: Problem, floors: Floors) -> LowerBound:
    """Time that no placement of these kinds can beat, and the kinds that come near it.

    Notes
    -----
    The fullest rank carries at least the average load of every resource. Each table takes its best
    kind at a price per byte of each message (Lagrangian relaxation), and the prices are those that
    give the largest bound. This is repeated on shorter and shorter intervals of bytes, as the curves
    of messages are not convex. Also, some rank carries the largest shard. Where a larger message is
    faster, the fullest rank is charged the fastest of the larger messages.
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


@dataclass(eq=False)
class _Relaxation:
    """Relaxed problems by the bytes of messages."""

    problem: Problem
    floors: Floors

    def __post_init__(self) -> None:
        average = self.floors.average
        seconds = average[:, Resource.FORWARD] + average[:, Resource.BACKWARD]
        # these messages are short enough that one line through 0 does
        if Resource.PARTIAL in self.problem.curves:
            nbytes = average[:, Resource.PARTIAL]
            curve = self.problem.curves[Resource.PARTIAL]
            seconds = seconds + curve.slope_below(self.floors.sum_of_largest(nbytes)) * nbytes
        #: Time of each entry without the messages that have a price [s].
        self.seconds = seconds
        #: Least time of the choices so far, of which none is the best for its prices only [s].
        self.least_time = np.inf

    def solve_all(self) -> list[Relaxed]:
        """Relaxed problems, the least time first.

        The first ones are with and without each reduced message. The one with the least time is
        divided in two at the bytes that it chose, as long as its time is far below theirs.
        """
        choices = [self._list_intervals(resource) for resource in self._list_priced_messages()]
        parts = []
        for intervals in itertools.product(*choices):
            parts.append(self._solve(dict(intervals)))
        for _ in range(_DIVISIONS):
            parts.sort(key=lambda part: part.time)
            first = parts[0]
            if not first.gaps:
                break
            widest = max(first.gaps, key=lambda resource: first.gaps[resource])
            if first.gaps[widest] < _GAP * first.time:
                break
            nbytes = float(self.floors.average[first.choice, widest].sum())
            halves = []
            for half in _divide(first.intervals[widest], nbytes):
                halves.append(self._solve({**first.intervals, widest: half}, first.time))
            parts[:1] = halves
        feasible = [part for part in parts if part.time < np.inf]
        return sorted(feasible, key=lambda part: part.time)

    def _list_priced_messages(self) -> list[Resource]:
        """Messages that take time and whose bytes have a price."""
        priced = []
        for resource in (Resource.POOLED, Resource.INDICES, *REDUCED):
            curve = self.problem.curves.get(resource, NO_TIME)
            if curve.seconds.any() and self.floors.average[:, resource].any():
                priced.append(resource)
        return priced

    def _list_intervals(self, resource: Resource) -> list[tuple[Resource, Interval]]:
        """All sizes that a message may have; of a message that all ranks reduce none, and all
        others."""
        nbytes = self.floors.average[:, resource]
        most = self.floors.sum_of_largest(nbytes)
        if resource not in REDUCED:
            return [(resource, Interval(0.0, most))]
        least = float(np.min(nbytes, initial=most, where=nbytes > 0))
        return [(resource, Interval(0.0, 0.0)), (resource, Interval(least, most))]

    def _solve(self, intervals: Mapping[Resource, Interval], at_least: float = 0.0) -> Relaxed:
        """Least time with messages within these intervals; it is at least `at_least` [s]."""
        average = self.floors.average
        allowed = np.ones(len(average), dtype=bool)
        for resource, interval in intervals.items():
            allowed &= average[:, resource] <= interval.high
        units = self.floors.unit[allowed]
        if len(np.unique(units)) < len(self.floors.first_of_unit):
            return Relaxed(np.inf, self.floors.first_of_unit, intervals, {})
        messages = []
        for resource, interval in intervals.items():
            if interval.high > 0:
                messages.append(_cut_curve(self.problem.curves[resource], resource, interval))
        resources = [message.resource for message in messages]
        entries = _Entries(
            np.flatnonzero(allowed),
            np.flatnonzero(np.diff(units, prepend=-1)),
            self.seconds[allowed],
            average[allowed][:, resources],
        )
        best = self._find_prices(entries, messages)
        choice = entries.number[best.choice]
        gaps = dict[Resource, float]()
        for message, price, nbytes in zip(messages, best.prices, best.nbytes, strict=True):
            gaps[message.resource] = message.time_above_line(float(nbytes), float(price))
        time = self.problem.correction * (best.time + self.problem.device_seconds)
        return Relaxed(max(time, at_least), choice, intervals, gaps)

    def _find_prices(self, entries: "_Entries", messages: Sequence["_CutCurve"]) -> "_Priced":
        """Prices of a byte of each message at which the relaxed time is largest.

        Notes
        -----
        The time is a concave function of the prices. What the units send at some prices, less what
        the messages would send at them, is a supergradient: the best prices lie on one side of
        these. So an ellipsoid that has them in it shrinks, step by step (Bland, Goldfarb and Todd,
        The ellipsoid method: a survey, Operations Research 29, 1981). The time at any prices is a
        bound, wherever the steps end. They end where no prices can add much, or where the time is
        more than that of a choice known from before.
        """
        center = np.array([message.slope for message in messages])
        scale = np.array([message.steepest for message in messages])
        best = entries.choose(center, messages)
        if not messages:
            return best
        count = len(messages)
        # in units of the steepest slopes
        shape = np.eye(count) * count * _FARTHEST_PRICE**2
        priced = best
        for _ in range(_STEPS_OF_PRICES):
            if priced.time > best.time:
                best = priced
            self._note_choice(entries.number[priced.choice])
            excess = (priced.nbytes - priced.wanted_bytes) * scale
            reach = shape @ excess
            most_gain = math.sqrt(max(float(excess @ reach), 0.0))
            if most_gain <= _CLOSE * best.time or best.time > self.least_time * (1 + _CLOSE):
                break
            step = reach / most_gain
            if count == 1:
                center = center + scale * step / 2
                shape = shape / 4
            else:
                center = center + scale * step / (count + 1)
                shrunk = shape - 2 / (count + 1) * np.outer(step, step)
                shape = count**2 / (count**2 - 1) * shrunk
            priced = entries.choose(steady(center), messages)
        return best

    def _note_choice(self, choice: np.ndarray) -> None:
        """Lower the least time of the choices so far."""
        loads = self.floors.average[choice].sum(axis=0)
        device_time = loads[Resource.FORWARD] + loads[Resource.BACKWARD]
        device_time += sum(self.problem.time_messages(loads).values())
        self.least_time = min(self.least_time, float(device_time))


class _CutCurve(NamedTuple):
    """Curve of a message within an interval of bytes.

    Parameters
    ----------
    resource : Resource
        The message.
    sizes, seconds : array
        Sizes in ascending order, with both ends of the interval [B], and the time of each [s]; the
        curve is straight between them.
    """

    resource: Resource
    sizes: Array
    seconds: Array

    @property
    def slope(self) -> float:
        """Time of a byte between the ends [s/B]."""
        length = self.sizes[-1] - self.sizes[0]
        return float((self.seconds[-1] - self.seconds[0]) / length) if length else 0.0

    @property
    def steepest(self) -> float:
        """Time of a byte of the largest size, all of the message counted [s/B]."""
        return float(self.seconds.max() / self.sizes[-1])

    def time_above_line(self, nbytes: float, price: float) -> float:
        """How far the curve is above the highest line of this slope that stays below it [s]."""
        nbytes = float(np.clip(nbytes, self.sizes[0], self.sizes[-1]))
        intercept = float(np.min(self.seconds - price * self.sizes))
        return float(np.interp(nbytes, self.sizes, self.seconds)) - (intercept + price * nbytes)


def _cut_curve(curve: Curve, resource: Resource, interval: Interval) -> _CutCurve:
    """Curve of a message within an interval."""
    inside = (curve.nbytes > interval.low) & (curve.nbytes < interval.high)
    sizes = np.unique([interval.low, *curve.nbytes[inside], interval.high])
    return _CutCurve(resource, sizes, curve(sizes))


class _Priced(NamedTuple):
    """What units choose at prices of bytes.

    Parameters
    ----------
    time : float
        Time of the relaxed problem without what does not depend on tables: a bound [s].
    choice : array of int
        The cheapest of the entries of each unit [-].
    prices : array, shape (messages,)
        Price of a byte of each message [s/B].
    nbytes : array, shape (messages,)
        Bytes of each message with this choice [B].
    wanted_bytes : array, shape (messages,)
        Bytes of each message at which its time is least, less their price [B].
    """

    time: float
    choice: np.ndarray
    prices: Array
    nbytes: Array
    wanted_bytes: Array


class _Entries(NamedTuple):
    """Entries of `Floors` that a relaxed problem allows.

    Parameters
    ----------
    number : array of int
        Their numbers in `Floors` [-].
    first_of_unit : array of int
        Position of the first one of each unit [-].
    seconds : array, shape (entries,)
        Time of each without messages [s].
    nbytes : array, shape (entries, messages)
        Bytes of each message [B].
    """

    number: np.ndarray
    first_of_unit: np.ndarray
    seconds: Array
    nbytes: Array

    def choose(self, prices: Array, messages: Sequence[_CutCurve]) -> _Priced:
        """Let each unit choose its cheapest entry at prices of bytes."""
        seconds = self.seconds + self.nbytes @ prices
        least = np.minimum.reduceat(seconds, self.first_of_unit)
        entries_of_unit = np.diff(self.first_of_unit, append=len(seconds))
        cheapest = np.flatnonzero(seconds == np.repeat(least, entries_of_unit))
        position = np.searchsorted(cheapest, self.first_of_unit)
        choice = cheapest[position]
        time = float(least.sum())
        wanted_bytes = np.zeros(len(messages))
        for number, message in enumerate(messages):
            times = message.seconds - prices[number] * message.sizes
            smallest = int(np.argmin(times))
            wanted_bytes[number] = message.sizes[smallest]
            time += float(times[smallest])
        return _Priced(time, choice, prices, self.nbytes[choice].sum(axis=0), wanted_bytes)


def _divide(interval: Interval, nbytes: float) -> tuple[Interval, Interval]:
    """Divide an interval at these bytes, or in its middle where they are near an end."""
    low, high = max(interval.low, _SMALLEST_PART * interval.high), interval.high
    middle = nbytes
    margin = _MARGIN * math.log(high / low)
    if not math.log(low) + margin < math.log(max(nbytes, 1.0)) < math.log(high) - margin:
        middle = math.sqrt(low * high)
    return Interval(interval.low, middle), Interval(middle, interval.high)
