"""Prices of bytes and seconds at which a relaxed problem has its largest bound: the ellipsoid method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.problem import Resource

#: Most steps to the best prices, and what they may miss of the time, relative to it [-].
_STEPS_OF_PRICES, _CLOSE = 300, 1e-5


class PricedCurve(NamedTuple):
    """Time of a resource by its load on an average rank, within an interval of loads.

    Parameters
    ----------
    resource : Resource
        The resource.
    sizes, seconds : array
        Loads in ascending order, with both ends of the interval [B or s], and the time of each [s].
        Between two of them the time is at least that on the straight line.
    center, radius : float
        Price where the search begins, and how far from it a price is tried [s/B or -].
    least_price : float
        The least price that gives a bound: 0 where the load is only known to be no more than that of
        the curve [s/B or -].
    """

    resource: Resource
    sizes: Array
    seconds: Array
    center: float
    radius: float
    least_price: float = -np.inf

    def find_line(self, load: float, price: float) -> float:
        """Time at a load on the highest line of this slope that stays below the curve [s]."""
        return float(np.min(self.seconds - price * self.sizes)) + price * load


class Priced(NamedTuple):
    """What units choose at some prices.

    Parameters
    ----------
    time : float
        Time of the relaxed problem without what does not depend on tables: a bound [s].
    choice : array of int
        The cheapest of the entries of each unit [-].
    prices : array, shape (curves,)
        Price of each resource [s/B or -].
    loads : array, shape (curves,)
        Load of each resource with this choice [B or s].
    wanted_loads : array, shape (curves,)
        Load of each resource at which its time is least, less its price [B or s].
    steps : int
        How many prices were tried [-].
    """

    time: float
    choice: np.ndarray
    prices: Array
    loads: Array
    wanted_loads: Array
    steps: int = 1


@dataclass(frozen=True, eq=False)
class Entries:
    """Ways to place units of tables that a relaxed problem allows, sorted by unit.

    Parameters
    ----------
    number : array of int
        Their numbers in `Floors` [-].
    first_of_unit : array of int
        Position of the first one of each unit [-].
    seconds : array, shape (entries,)
        Time of each without what has a price [s].
    loads : array, shape (entries, curves)
        Load of each resource that has a price [B or s].
    """

    number: np.ndarray
    first_of_unit: np.ndarray
    seconds: Array
    loads: Array

    @cached_property
    def place_of_unit(self) -> np.ndarray:
        """Place of the unit of each entry among the units [-]."""
        entries_of_unit = np.diff(self.first_of_unit, append=len(self.seconds))
        return np.repeat(np.arange(len(self.first_of_unit)), entries_of_unit)

    def choose(self, prices: Array, curves: Sequence[PricedCurve]) -> Priced:
        """Let each unit choose its cheapest entry at some prices."""
        seconds = self.seconds + self.loads @ prices
        least = np.minimum.reduceat(seconds, self.first_of_unit)
        cheapest = (seconds == least[self.place_of_unit]).nonzero()[0]
        choice = cheapest[cheapest.searchsorted(self.first_of_unit)]
        time = float(least.sum())
        wanted_loads = []
        for curve, price in zip(curves, prices.tolist(), strict=True):
            times = curve.seconds - price * curve.sizes
            smallest = times.argmin()
            wanted_loads.append(curve.sizes[smallest])
            time += float(times[smallest])
        loads = self.loads[choice].sum(axis=0)
        return Priced(time, choice, prices, loads, np.array(wanted_loads))


def find_prices(
    entries: Entries,
    curves: Sequence[PricedCurve],
    enough: float,
) -> Priced:
    """Prices at which the relaxed time is largest; more than `enough` is not looked for [s].

    Notes
    -----
    The time is a concave function of the prices. The loads of the units at some prices, less the
    loads that the curves want at them, are a supergradient: the best prices lie on one side of these.
    So an ellipsoid that has them in it shrinks, step by step (Bland, Goldfarb and Todd, The
    ellipsoid method: a survey, Operations Research 29, 1981). The time at any prices is a bound,
    wherever the steps end.
    """
    center = np.array([curve.center for curve in curves])
    scale = np.array([curve.radius for curve in curves])
    least = np.array([curve.least_price for curve in curves])
    best = priced = entries.choose(np.maximum(center, least), curves)
    if not curves:
        return best
    count = len(curves)
    # in units of the radii
    shape = np.eye(count) * count
    steps = 0
    while steps < _STEPS_OF_PRICES:
        steps += 1
        if priced.time > best.time:
            best = priced
        excess = (priced.loads - priced.wanted_loads) * scale
        is_too_low = center < least
        any_is_too_low = bool(is_too_low.any())
        if any_is_too_low:  # on the other side are prices that give a bound
            excess = np.where(is_too_low, scale, 0.0)
        reach = shape @ excess
        most_gain = math.sqrt(max(float(excess @ reach), 0.0))
        is_close = most_gain <= _CLOSE * best.time and not any_is_too_low
        if is_close or best.time > enough * (1 + _CLOSE) or not most_gain:
            break
        # better prices than the best so far lie beyond the center by this share of the ellipsoid
        depth = 0.0 if any_is_too_low else (best.time - priced.time) / most_gain
        if depth >= 1:
            break
        step = reach / most_gain
        if count == 1:
            center = center + scale * step * (1 + depth) / 2
            shape = shape * ((1 - depth) / 2) ** 2
        else:
            center = center + scale * step * (1 + count * depth) / (count + 1)
            shrink = 2 * (1 + count * depth) / ((count + 1) * (1 + depth))
            growth = count**2 / (count**2 - 1) * (1 - depth**2)
            shape = growth * (shape - shrink * (step[:, None] * step))
        priced = entries.choose(np.maximum(steady(center), least), curves)
    return best._replace(steps=steps)
