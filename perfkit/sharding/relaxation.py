"""Relaxed problems of placement, in which tables can be divided at will beside their largest
shards: branch and bound over the bytes of messages and what the fullest rank has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.sharding.prices import Entries, Priced, PricedCurve, find_prices
from perfkit.sharding.problem import (
    DEVICE_RESOURCES,
    NO_TIME,
    REDUCED,
    Curve,
    Floors,
    Problem,
    Resource,
)
from perfkit.workloads.placement_kinds import WHOLE

#: Most prices that are tried for all relaxed problems together, that number times the entries, and
#: how many are tried in small problems: so many, and more for each entry [-].
MOST_STEPS, _MOST_WORK = 15_000, 5e7
_FEWEST_STEPS, _STEPS_OF_ENTRY = 1000, 5
#: It is divided while that may add more than this share of the time [-].
_GAP = 1e-4
#: Where an interval from 0 is taken to begin and how near to its ends it is not divided, in
#: logarithms of bytes: both relative to its length [-].
_SMALLEST_PART, _MARGIN = 1e-3, 0.05
#: Length of an interval that is not divided, relative to its bytes [-].
_SHORTEST = 1e-3
#: What sums of floats in another order may differ by, relative to them [-].
ROUNDING = 1e-9
#: Farthest price of a byte that is tried from the slope of its curve, over the steepest slope; where
#: half of a problem begins with the prices of the whole, this share of it, unless the best ones are
#: farther than a share of that [-].
_FARTHEST_PRICE, _NEARBY, _FAR = 4.0, 0.1, 0.6
#: Shares by which the fullest rank may have more seconds than it must where its limits are divided,
#: and length of an interval of pooled rows within which they are; relative to these [-].
_ROOMS, _NARROW = (0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.08, 0.12), 0.02
#: Shares by which the fullest rank may have more seconds than it must in a choice that is timed, and
#: how often its pooled rows are counted again [-].
_ROOM, _ROUNDS = (0.0, 0.01, 0.04), 2
#: Messages of which each rank sends its own bytes: they last as long as those of the fullest rank.
_SENT = (Resource.POOLED, Resource.PARTIAL, Resource.INDICES)
#: Messages that many plans do without.
_REDUCTIONS = (Resource.PARTIAL, *REDUCED)
#: Resources of which the largest shard counts beside the average rank.
_OF_RANKS = (*DEVICE_RESOURCES, *_SENT)


class Interval(NamedTuple):
    """Values of a variable: at least `low` and at most `high` [B or s]."""

    low: float
    high: float


class Limits(NamedTuple):
    """What the choices of a relaxed problem have in common.

    Parameters
    ----------
    nbytes : mapping of Resource to Interval
        Bytes of each message that takes time: of an average rank, and of pooled rows of the fullest
        one [B].
    fullest : mapping of Resource to Interval
        What the fullest rank has, of seconds beside those of every rank: no shard adds more to its rank
        alone than the upper end, and a rank has at least the lower end [B or s].
    grain : float or None
        Bytes of pooled rows of which each shard has a multiple; None if they may be any [B].
    """

    nbytes: Mapping[Resource, Interval]
    fullest: Mapping[Resource, Interval]
    grain: float | None

    def with_nbytes(self, resource: Resource, interval: Interval) -> "Limits":
        """These limits with another interval for the bytes of a message."""
        return self._replace(nbytes={**self.nbytes, resource: interval})

    def with_fullest(self, resource: Resource, interval: Interval) -> "Limits":
        """These limits with another interval for what the fullest rank has of a resource."""
        return self._replace(fullest={**self.fullest, resource: interval})

    def grain_of(self, resource: Resource) -> float | None:
        """Bytes of which a message has multiples on each rank; None if they may be any [B]."""
        if resource is Resource.POOLED:
            return self.grain
        return None


class Division(NamedTuple):
    """Two halves of a relaxed problem.

    Parameters
    ----------
    seconds : float
        How far its time is below that of its choice, because it is not divided here [s].
    halves : sequence of Limits
        Limits of both.
    """

    seconds: float
    halves: Sequence[Limits]


class Relaxed(NamedTuple):
    """A relaxed problem, solved.

    Parameters
    ----------
    time : float
        Its least time; infinite if no placement keeps the limits [s].
    choice : array of int
        Entry of `Floors` for each unit of tables where that time is reached [-].
    prices : mapping of Resource to float
        Prices at which it is reached [s/B or -].
    division : Division or None
        Where to divide it; None where that gains nothing.
    """

    time: float
    choice: np.ndarray
    prices: Mapping[Resource, float]
    division: Division | None


@dataclass(eq=False)
class Relaxation:
    """Relaxed problems by the bytes of messages and what the fullest rank has, with at most so many
    prices tried."""

    problem: Problem
    floors: Floors
    most_steps: int = MOST_STEPS

    def __post_init__(self) -> None:
        floors = self.floors
        #: Load of an average rank; of the device's seconds without what every rank has.
        self.average = floors.average.copy()
        #: What the largest shard of each entry adds to its rank alone.
        self.alone = np.zeros_like(floors.largest)
        self.alone[:, _OF_RANKS] = floors.largest[:, _OF_RANKS]
        of_every_rank = floors.everywhere[:, DEVICE_RESOURCES]
        self.average[:, DEVICE_RESOURCES] -= of_every_rank
        self.alone[:, DEVICE_RESOURCES] -= of_every_rank
        self.alone = np.maximum(self.alone, 0.0)
        #: Seconds of each entry that every rank has.
        self.everywhere: Array = of_every_rank.sum(axis=1)
        #: Entries that are a whole unit on one rank.
        self.whole: np.ndarray = np.flatnonzero(floors.kind == WHOLE.name)
        #: By resource, the most bytes of pooled rows that a rank exchanges in so many seconds.
        self.light_curves = self._list_light_curves()
        #: Messages that take time.
        self.messages = list[Resource]()
        #: Lines through 0 below the curves of reductions [s/B].
        self.slopes = dict[Resource, float]()
        for resource in (*_SENT, *REDUCED):
            curve = self.problem.curves.get(resource, NO_TIME)
            if curve.seconds.any() and self.average[:, resource].any():
                self.messages.append(resource)
                if resource in _REDUCTIONS:
                    self.slopes[resource] = curve.slope_below(self._find_most(resource))
        self.first_limits = self._list_limits()
        #: Prices that were tried so far [-].
        self.steps = 0
        #: Least time of the choices so far, of which none is the best for its prices only [s].
        self.least_time = np.inf

    def _find_most(self, resource: Resource) -> float:
        """The most that an average rank may have of a resource [B or s]."""
        return self.floors.sum_of_largest(self.average[:, resource])

    def _list_light_curves(self) -> dict[Resource, Curve]:
        """Bytes of pooled rows by seconds of a resource, those first that take fewest for a byte."""
        curves = dict[Resource, Curve]()
        if self.floors.lightest is None:
            return curves
        pooled = self.floors.lightest[:, Resource.POOLED]
        for resource in DEVICE_RESOURCES:
            seconds = self.floors.lightest[pooled > 0, resource]
            nbytes = pooled[pooled > 0]
            order = np.argsort(seconds / nbytes, kind="stable")
            summed = np.cumsum(np.stack([seconds, nbytes])[:, order], axis=1)
            curves[resource] = Curve(*np.concatenate([np.zeros((2, 1)), summed], axis=1))
        return curves

    def _find_unused(self, peak: float, most_seconds: Mapping[Resource, float]) -> Array:
        """Pooled rows that the rank of each entry exchanges less than the fullest rank, as it has no
        seconds left for more; on the average of ranks [B].

        `peak` is the least that the fullest rank exchanges [B], and `most_seconds` the most seconds
        that a rank may have beside those of every rank [s].
        """
        ranks = self.problem.costs.ranks
        exchanged = self.average[self.whole, Resource.POOLED] * ranks
        most_unused = np.zeros(len(self.whole))
        all_large = []
        for resource, curve in self.light_curves.items():
            most = most_seconds[resource]
            seconds = self.alone[self.whole, resource]
            # two such shards do not lie on one rank
            is_large = (seconds > most / 2) & (seconds <= most)
            if not is_large.any():
                continue
            others = np.interp(most - seconds[is_large], curve.nbytes, curve.seconds)
            free = peak - exchanged[is_large] - others
            most_unused[is_large] = np.maximum(most_unused[is_large], free / ranks)
            all_large.append(is_large)
        # but one that is large in the forward pass alone and one that is in the backward pass alone
        # may, and then their rank counts once: only those large in one of the two are counted
        of_whole = np.zeros(len(self.whole))
        for is_large in all_large:
            of_these = np.where(is_large, most_unused, 0.0)
            if of_these.sum() > of_whole.sum():
                of_whole = of_these
        unused = np.zeros(len(self.average))
        unused[self.whole] = of_whole
        return unused

    def _find_unused_within(self, limits: Limits) -> Array:
        """Pooled rows that ranks exchange less than the fullest one within limits, see
        `_find_unused`."""
        if Resource.POOLED not in limits.nbytes:
            return np.zeros(len(self.average))
        peak = limits.nbytes[Resource.POOLED].low + (limits.grain or 0.0)
        return self._find_unused(peak, {r: limits.fullest[r].high for r in DEVICE_RESOURCES})

    def solve_all(self) -> list[Relaxed]:
        """Relaxed problems, the least time first.

        The one with the least time is divided in two where its time is farthest below that of its
        choice: by the bytes of a message, or by what the fullest rank has of a resource.
        """
        seconds = self.everywhere + self.average[:, DEVICE_RESOURCES].sum(axis=1)
        before = Relaxed(0.0, self.floors.cheapest_of_units(seconds), {}, None)
        parts = [self._solve(limits, before) for limits in self.first_limits]
        entries = len(self.average)
        most_steps = min(
            self.most_steps,
            _FEWEST_STEPS + _STEPS_OF_ENTRY * entries,
            _MOST_WORK / entries,
        )
        while self.steps < most_steps:
            parts.sort(key=lambda part: part.time)
            first = parts[0]
            if first.division is None:
                break
            parts[:1] = [self._solve(limits, first) for limits in first.division.halves]
        feasible = [part for part in parts if part.time < np.inf]
        return sorted(feasible, key=lambda part: part.time)

    def _list_limits(self) -> list[Limits]:
        """Limits of the first relaxed problems: where all shards have multiples of the grain of pooled
        rows, and where some have not."""
        any_fullest = {resource: Interval(0.0, np.inf) for resource in _OF_RANKS}
        any_bytes = {}
        for resource in self.messages:
            any_bytes[resource] = Interval(0.0, self._find_most(resource))
            if resource is Resource.POOLED:  # all rows may be on one rank
                total = self.problem.costs.ranks * any_bytes[resource].high
                any_bytes[resource] = Interval(0.0, total)
        limits = Limits(any_bytes, any_fullest, None)
        grain = self.floors.grain
        if grain is None or Resource.POOLED not in self.messages:
            return [limits]
        multiples = math.ceil(any_bytes[Resource.POOLED].high / grain.nbytes * (1 - ROUNDING))
        most = Interval(0.0, multiples * grain.nbytes)
        whole = limits.with_nbytes(Resource.POOLED, most)._replace(grain=grain.nbytes)
        if grain.least_partial == np.inf:
            return [whole]
        broken = limits.with_fullest(Resource.PARTIAL, Interval(grain.least_partial, np.inf))
        return [whole, broken]

    def _solve(self, limits: Limits, nearby: Relaxed) -> Relaxed:
        """Least time within limits, which are stricter than those of a problem nearby."""
        allowed = self._allow(limits)
        unit = self.floors.unit[allowed]
        first_of_unit = np.flatnonzero(np.diff(unit, prepend=-1))
        if len(first_of_unit) < len(self.floors.first_of_unit):
            return nearby._replace(time=np.inf)
        average = self.average.copy()
        average[:, Resource.POOLED] += self._find_unused_within(limits)
        least = np.minimum.reduceat(average[allowed], first_of_unit).sum(axis=0)
        for resource, interval in limits.nbytes.items():
            if least[resource] > interval.high * (1 + ROUNDING):
                return nearby._replace(time=np.inf)
        # each unit has one of its shards
        alone = np.minimum.reduceat(self.alone[allowed], first_of_unit).max(axis=0)
        for resource, interval in limits.fullest.items():
            alone[resource] = max(alone[resource], interval.low)
        curves = self._list_curves(limits, alone, nearby)
        resources = [curve.resource for curve in curves]
        entries = Entries(
            np.flatnonzero(allowed),
            first_of_unit,
            self._add_unpriced_seconds(resources)[allowed],
            average[allowed][:, resources],
        )
        best = self._find_prices(entries, curves, nearby)
        self.steps += best.steps
        choice = entries.number[best.choice]
        self.least_time = min(self.least_time, self._time_entries(choice))
        time = self.problem.correction * (best.time + self.problem.device_seconds)
        of_rank = average[choice].sum(axis=0)
        divisions = self._divide_bytes(limits, of_rank, curves, best.prices, alone)
        divisions += self._divide_shards(limits, choice, alone)
        divisions += self._divide_room(limits, choice, curves, best.prices, alone)
        division = max(divisions, key=lambda each: each.seconds, default=None)
        if division is not None and division.seconds < _GAP * best.time:
            division = None
        prices = dict(zip(resources, best.prices.tolist(), strict=True))
        return Relaxed(max(time, nearby.time), choice, prices, division)

    def _allow(self, limits: Limits) -> np.ndarray:
        """Which entries keep limits."""
        allowed = np.ones(len(self.average), dtype=bool)
        for resource, interval in limits.nbytes.items():
            allowed &= self.average[:, resource] <= interval.high
        for resource, interval in limits.fullest.items():
            allowed &= self.alone[:, resource] <= interval.high
        if limits.grain is not None:
            allowed &= ~self._breaks_grain()
        return allowed

    def _breaks_grain(self) -> np.ndarray:
        """Which entries have shards whose pooled rows are no multiples of the grain."""
        if self.floors.grain is None:
            return np.zeros(len(self.average), dtype=bool)
        return self.floors.grain.breaks

    def _list_curves(self, limits: Limits, alone: Array, nearby: Relaxed) -> list[PricedCurve]:
        """Resources that have a price: messages, and seconds of the device where a shard alone adds
        more to its rank than an average rank has."""
        curves = []
        average = self.average[nearby.choice].sum(axis=0)
        for resource in DEVICE_RESOURCES:
            if alone[resource] > average[resource]:
                sizes = np.array(
                    [0.0, alone[resource], alone[resource] + self._find_most(resource)]
                )
                seconds = np.maximum(sizes, alone[resource])
                curves.append(PricedCurve(resource, sizes, seconds, center=0.5, radius=0.5))
        for resource, interval in limits.nbytes.items():
            has_line = resource in _REDUCTIONS and not interval.low and not alone[resource]
            if interval.high > 0 and not has_line:
                grain = limits.grain_of(resource)
                curves.append(self._cut_curve(resource, interval, alone[resource], grain))
        return curves

    def _find_prices(
        self, entries: Entries, curves: Sequence[PricedCurve], nearby: Relaxed
    ) -> Priced:
        """The best prices: near those of a problem nearby, or where they are not, anywhere."""
        near = []
        for curve in curves:
            if curve.resource in nearby.prices:
                price, radius = nearby.prices[curve.resource], _NEARBY * curve.radius
                near.append(curve._replace(center=price, radius=radius))
            else:
                near.append(curve)
        best = find_prices(entries, near, self.least_time)
        moved = np.abs(best.prices - [curve.center for curve in near])
        is_far = moved > [_FAR * curve.radius for curve in near]
        if not is_far.any():
            return best
        anywhere = find_prices(entries, curves, self.least_time)
        steps = best.steps + anywhere.steps
        return max(best, anywhere, key=lambda priced: priced.time)._replace(steps=steps)

    def _add_unpriced_seconds(self, priced: Sequence[Resource]) -> Array:
        """Time of each entry without the resources that have a price [s]."""
        seconds = self.everywhere.copy()
        for resource in DEVICE_RESOURCES:
            if resource not in priced:
                seconds += self.average[:, resource]
        for resource, slope in self.slopes.items():
            if resource not in priced:
                seconds += slope * self.average[:, resource]
        return seconds

    def _cut_curve(
        self, resource: Resource, interval: Interval, alone: float, grain: float | None
    ) -> PricedCurve:
        """Curve of a message within an interval, where one shard alone has so many bytes."""
        curve = self.problem.curves[resource]
        if grain is None:
            inside = (curve.nbytes > interval.low) & (curve.nbytes < interval.high)
            # the time begins to grow where the bytes pass those of the shard
            corner = float(np.clip(alone, interval.low, interval.high))
            sizes = np.unique([interval.low, *curve.nbytes[inside], corner, interval.high])
            seconds = curve(sizes)
        else:
            low, high = round(interval.low / grain), round(interval.high / grain)
            multiples = np.arange(low, high + 1, dtype=float)
            # sums of floats may be a little more than a multiple
            sizes = multiples * grain * (1 + ROUNDING)
            seconds = curve(multiples * grain)
            if low > 0:  # more than so many multiples are one more
                seconds[0] = seconds[1]
        seconds = np.maximum(seconds, curve(alone))
        length = sizes[-1] - sizes[0]
        slope = float((seconds[-1] - seconds[0]) / length) if length else 0.0
        steepest = float(seconds.max() / sizes[-1])
        least_price = 0.0 if resource is Resource.POOLED else -np.inf
        radius = _FARTHEST_PRICE * steepest
        return PricedCurve(resource, sizes, seconds, slope, radius, least_price)

    def _time_of(
        self, resource: Resource, average: float, alone: float, grain: float | None
    ) -> float:
        """Time of a resource where an average rank has so much of it, and a shard adds so much to its
        rank alone [s]."""
        if resource in DEVICE_RESOURCES:
            return max(average, alone)
        if grain is not None:
            average = _round_up(average, grain)
        return self.problem.curves[resource].time_one(max(average, alone))

    def time_choice(self, choice: np.ndarray) -> float:
        """Time of a choice of entries, if tables can be divided at will beside the largest shards
        [s]."""
        return self.problem.correction * (self._time_entries(choice) + self.problem.device_seconds)

    def _time_entries(self, choice: np.ndarray) -> float:
        """Time of a choice of entries without what does not depend on tables [s]."""
        least = np.inf
        average = self.average[choice].sum(axis=0)
        alone = self.alone[choice].max(axis=0)
        for limits in self.first_limits:
            if limits.grain is not None and self._breaks_grain()[choice].any():
                continue
            lows = alone.copy()
            for resource, interval in limits.fullest.items():
                lows[resource] = max(lows[resource], interval.low)
            for share in _ROOM:
                least = min(least, self._time_with_room(limits, choice, average, lows, share))
        return least

    def _time_with_room(
        self, limits: Limits, choice: np.ndarray, average: Array, alone: Array, room: float
    ) -> float:
        """Time of a choice, where the fullest rank has a little more seconds than it must, relative to
        these [s]."""
        peaks = average.copy()
        peaks[DEVICE_RESOURCES] = (1 + room) * np.maximum(average, alone)[DEVICE_RESOURCES]
        if self.light_curves and Resource.POOLED in self.messages:
            most = {resource: float(peaks[resource]) for resource in DEVICE_RESOURCES}
            for _ in range(_ROUNDS):
                peak = max(peaks[Resource.POOLED], alone[Resource.POOLED])
                if limits.grain is not None:
                    peak = _round_up(peak, limits.grain)
                unused = self._find_unused(peak, most)[choice].sum()
                peaks[Resource.POOLED] = average[Resource.POOLED] + unused
        time = float(self.everywhere[choice].sum())
        for resource in (*DEVICE_RESOURCES, *self.messages):
            grain = limits.grain_of(resource)
            time += self._time_of(resource, float(peaks[resource]), float(alone[resource]), grain)
        return time

    def _divide_bytes(
        self,
        limits: Limits,
        of_rank: Array,
        curves: Sequence[PricedCurve],
        prices: Array,
        alone: Array,
    ) -> list[Division]:
        """Where limits may be divided by the bytes of a message: the curve is above its line at those
        of an average rank."""
        line = {resource: slope * of_rank[resource] for resource, slope in self.slopes.items()}
        for curve, price in zip(curves, prices, strict=True):
            line[curve.resource] = curve.find_line(float(of_rank[curve.resource]), float(price))
        divisions = []
        for resource, interval in limits.nbytes.items():
            grain = limits.grain_of(resource)
            nbytes = float(np.clip(of_rank[resource], interval.low, interval.high))
            gap = self._time_of(resource, nbytes, alone[resource], grain) - line[resource]
            halves = []
            for half in self._divide(resource, interval, nbytes, grain):
                halves.append(limits.with_nbytes(resource, half))
            if halves:
                divisions.append(Division(float(gap), halves))
        return divisions

    def _divide(
        self, resource: Resource, interval: Interval, nbytes: float, grain: float | None
    ) -> Sequence[Interval]:
        """Divide an interval at these bytes, or in its middle where they are near an end; nothing
        where it is too short."""
        if grain is not None:
            low, high = round(interval.low / grain), round(interval.high / grain)
            if high - low < 2:
                return []
            multiple = math.floor(nbytes / grain * (1 - ROUNDING))
            middle = min(max(multiple, low + 1), high - 1) * grain
            return [Interval(interval.low, middle), Interval(middle, interval.high)]
        if not interval.high:
            return []
        if resource in _REDUCTIONS and not interval.low:
            of_entries = self.average[:, resource]
            least = float(np.min(of_entries, initial=interval.high, where=of_entries > 0))
            return [Interval(0.0, 0.0), Interval(least, interval.high)]
        begin, end = max(interval.low, _SMALLEST_PART * interval.high), interval.high
        if end < begin * (1 + _SHORTEST):
            return []
        middle = nbytes
        margin = _MARGIN * math.log(end / begin)
        if not math.log(begin) + margin < math.log(max(nbytes, 1.0)) < math.log(end) - margin:
            middle = math.sqrt(begin * end)
        return [Interval(interval.low, middle), Interval(middle, interval.high)]

    def _divide_shards(self, limits: Limits, choice: np.ndarray, alone: Array) -> list[Division]:
        """Where limits may be divided by what the fullest rank has: the largest shard of a choice takes
        longer than an average rank, and is not counted yet. The middle one of such shards divides: either
        the fullest rank has less, so no rank has this shard, or it has at least as much."""
        divisions = []
        for resource in (*DEVICE_RESOURCES, *self.messages):
            if resource in REDUCED:
                continue
            interval, grain = limits.fullest[resource], limits.grain_of(resource)
            of_rank = float(self.average[choice, resource].sum())
            counted = max(of_rank, float(alone[resource]))
            of_units = self.alone[choice, resource]
            large = np.sort(of_units[of_units > counted])
            if not len(large):
                large = of_units[of_units > alone[resource]]
            if not len(large):
                continue
            gap = self._time_of(resource, of_rank, float(of_units.max()), grain)
            gap -= self._time_of(resource, of_rank, float(alone[resource]), grain)
            middle = float(large[len(large) // 2]) * (1 - ROUNDING)
            halves = []
            for half in (Interval(interval.low, middle), Interval(middle, interval.high)):
                halves.append(limits.with_fullest(resource, half))
            divisions.append(Division(gap, halves))
        return divisions

    def _divide_room(
        self,
        limits: Limits,
        choice: np.ndarray,
        curves: Sequence[PricedCurve],
        prices: Array,
        alone: Array,
    ) -> list[Division]:
        """Where limits may be divided by the most seconds of a rank: with fewer, ranks with a large
        shard exchange less."""
        divisions = list[Division]()
        if Resource.POOLED not in limits.nbytes:
            return divisions
        price = 0.0
        for curve, price_of_curve in zip(curves, prices, strict=True):
            if curve.resource is Resource.POOLED:
                price = float(price_of_curve)
        within = {r: limits.fullest[r].high for r in DEVICE_RESOURCES}
        interval = limits.nbytes[Resource.POOLED]
        peak = interval.low + (limits.grain or 0.0)
        before = self._find_unused(peak, within)[choice].sum()
        pooled = float(self.average[choice, Resource.POOLED].sum())
        if limits.grain is not None:
            pooled = _round_up(pooled, limits.grain)
        pooled = min(pooled, interval.high)
        for resource in self.light_curves:
            seconds = limits.fullest[resource]
            counted = max(
                float(self.average[choice, resource].sum()),
                float(self.alone[choice, resource].max()),
                float(alone[resource]),
            )
            best_gain, middle = 0.0, counted
            for room in _ROOMS:
                most = counted * (1 + room)
                if most < seconds.high:
                    unused = self._find_unused(max(pooled, peak), {**within, resource: most})
                    gain = min(room * counted, price * float(unused[choice].sum() - before))
                    if gain > best_gain:
                        best_gain, middle = gain, most
            if not best_gain:
                continue
            halves = []
            if peak < pooled * (1 - _NARROW) and limits.grain is None:
                nbytes = max((1 - _NARROW / 2) * pooled, interval.low)
                for half in (Interval(interval.low, nbytes), Interval(nbytes, interval.high)):
                    halves.append(limits.with_nbytes(Resource.POOLED, half))
            elif peak < pooled and limits.grain is not None:
                for half in self._divide(Resource.POOLED, interval, pooled, limits.grain):
                    halves.append(limits.with_nbytes(Resource.POOLED, half))
            else:
                for half in (Interval(seconds.low, middle), Interval(middle, seconds.high)):
                    halves.append(limits.with_fullest(resource, half))
            if halves:
                divisions.append(Division(best_gain, halves))
        return divisions


def _round_up(nbytes: float, grain: float) -> float:
    """The next multiple of the grain; sums of floats may be a little more than one [B]."""
    return math.ceil(nbytes / grain * (1 - ROUNDING)) * grain
