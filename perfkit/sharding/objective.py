"""What an iteration takes, from what the fullest rank carries of each resource."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from perfkit.sharding.options import Option
from perfkit.sharding.pricing import COLUMNS, RESOURCES, Curve, project
from perfkit.units import Array, steady

__all__ = ["Objective", "OBJECTIVES"]

#: Whole iterations, or the seconds of the tables on each rank alone.
OBJECTIVES = ("iteration", "additive")
_FORWARD, _BACKWARD, _POOLED, _PARTIAL, _INDICES, _HOST, _MEMORY = range(len(RESOURCES))
_ADDED = np.array([float(name in ("lookup", "pack", "update", "backward")) for name in COLUMNS])
_NOTHING = Curve(np.array([0.0, 1e18]), np.zeros(2))


@dataclass(frozen=True, eq=False)
class Objective:
    """Time of an iteration.

    Parameters
    ----------
    kind : str
        One of `OBJECTIVES`.
    dense : float
        Everything else that an iteration does one after the other [s].
    host : float
        Host time of everything else, on a device of its own [s].
    correction : float
        Predicted over modelled time of a plan that both can price [-].
    curves : mapping of str to Curve
        Time of messages: ``pooled`` rows both ways, ``partial`` sums inside nodes both ways, ``rows``: partial sums
        over all ranks both ways, ``gradients`` of copied tables, ``indices``.

    Notes
    -----
    .. math:: t = \\max\\left(t_0 + \\max_r f_r + \\max_r b_r + \\sum_m t_m,\\; \\max_r h_r\\right)

    Lookup and update f and backward b of the slowest rank, messages m one after another, host h. Every collective is
    waited for at once; an exchange takes as long as that of the fullest rank. The time is within a few percent of
    `perfkit.predict`; not so for a DLRM in the ``reference`` loop with large batches, whose host waits for the device
    inside the iteration, nor for a host-bound one of which most ranks hold no table, as what each rank that sends adds
    to the host is taken as for tables dealt out to all. Where collectives overlap, the correction takes what a plan of
    whole tables hides.
    """

    kind: str
    dense: float = 0.0
    host: float = 0.0
    correction: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def curve(self, name: str) -> Curve:
        """Time of one kind of message; none where it is not sent or not counted."""
        return self.curves.get(name, _NOTHING)

    def loads(self, costs: Array) -> Array:
        """Loads by resource; an additive objective has one, in place of the first."""
        out = project(costs)
        if self.kind == "additive":
            out[..., :_MEMORY] = 0.0
            out[..., _FORWARD] = costs @ _ADDED
        return out

    def messages(self, peaks: Array, rows: Array | float = 0.0, gradients: Array | float = 0.0) -> dict[str, Array]:
        """Time of each kind of message [s]."""
        sizes = {"indices": peaks[..., _INDICES], "pooled": peaks[..., _POOLED], "partial": peaks[..., _PARTIAL],
                 "rows": rows, "gradients": gradients}  # fmt: skip
        return {name: self.curve(name)(nbytes) for name, nbytes in sizes.items() if name in self.curves}

    def time(
        self, peaks: Array, rows: Array | float = 0.0, gradients: Array | float = 0.0, *, network: Array | float = 1.0
    ) -> Array:
        """Time of an iteration from the loads of the fullest rank of each resource and the bytes all ranks reduce.

        `network` is a factor on the time of messages.
        """
        messages = network * sum(self.messages(peaks, rows, gradients).values())
        chain = self.dense + peaks[..., _FORWARD] + peaks[..., _BACKWARD] + messages
        return self.correction * np.maximum(chain, self.host + peaks[..., _HOST])

    def parts(self, loads: Array, costs: Array, reduced: Mapping[str, float]) -> dict[str, float]:
        """Parts that sum to the time: what the slowest rank of each phase does, messages, everything else [s]."""
        peaks = loads.max(axis=0)
        total = float(self.time(peaks, **reduced))
        rows = {_FORWARD: ("lookup", "pack", "update"), _BACKWARD: ("backward",)}
        if self.kind == "additive":
            rows = {_FORWARD: ("lookup", "pack", "update", "backward")}
        found = {
            name: float(costs[np.argmax(loads[:, place]), COLUMNS.index(name)])
            for place, names in rows.items()
            for name in names
        }
        words = {"pooled": "exchange of pooled rows", "partial": "partial sums inside nodes", "rows": "partial sums",
                 "gradients": "gradients of copies", "indices": "exchange of indices"}  # fmt: skip
        found |= {words[name]: float(time) for name, time in self.messages(peaks, **reduced).items()}
        if self.dense:
            found["everything else"] = self.dense
        found = {name: self.correction * part for name, part in found.items()}
        found["host"] = total - sum(found.values())
        return {name: part for name, part in found.items() if abs(part) > 1e-12 * total}

    def bound(self, options: Sequence[Sequence[Option]], ranks: int) -> tuple[float, list[list[int]]]:
        """Time that no plan made of these options can beat, and the options of each table that would come closest.

        Notes
        -----
        No rank can carry less than the average of every resource, however tables are divided; which option each table
        then takes is chosen under a price per exchanged byte (Lagrangian relaxation), for lines below the curves of
        the messages on short intervals of the exchange. Nor can any rank carry less than one whole shard.
        """
        table = np.concatenate([np.full(len(own), number) for number, own in enumerate(options)])
        starts = np.flatnonzero(np.diff(table, prepend=-1))
        flat = [option for own in options for option in own]
        average = self.loads(np.array([option.total(ranks) for option in flat])) / ranks
        sizes = {name: np.array([getattr(o, name) for o in flat]) for name in ("rows", "gradients")}
        shared = self._average(average, sizes, starts)
        best = max(min(time for time, _ in shared), self._largest(flat, average, sizes, starts))
        host = float(np.minimum.reduceat(average[:, _HOST], starts).sum())
        return max(best, self.correction * (self.host + host)), [choice for _, choice in sorted(shared)]

    def _largest(self, flat: Sequence[Option], average: Array, sizes: Mapping[str, Array], starts: np.ndarray) -> float:
        """Time with the worst of the tables in its best way, the others divided so as to spare each resource."""
        own = np.array([
            np.max([self.loads(o.everywhere + o.hot), *(self.loads(o.everywhere + s) for s in o.shards)], axis=0)
            for o in flat
        ])  # fmt: skip
        spared = np.minimum.reduceat(average, starts).sum(axis=0)
        return float(np.minimum.reduceat(self.time(np.maximum(own, spared), **sizes), starts).max())

    def _average(self, average: Array, sizes: Mapping[str, Array], starts: np.ndarray) -> list[tuple[float, list[int]]]:
        """Time of an iteration if every table could be divided at will, with and without each way of reducing."""
        seconds = average[:, _FORWARD] + average[:, _BACKWARD]
        for name, part in (("indices", average[:, _INDICES]), ("partial", average[:, _PARTIAL])):
            seconds = seconds + self.curve(name).slope_below(float(np.maximum.reduceat(part, starts).sum())) * part
        found = []
        for used in ((), ("rows",), ("gradients",), ("rows", "gradients")):
            barred = np.any([sizes[name] > 0 for name in sizes if name not in used] or [seconds < 0], axis=0)
            cost, fixed = np.where(barred, np.inf, seconds), 0.0
            for name in used:
                most = float(np.maximum.reduceat(sizes[name], starts).sum())
                least = float(np.min(sizes[name], initial=most, where=sizes[name] > 0))
                start, slope = self.curve(name).line_below(least, most) if most else (0.0, 0.0)
                cost, fixed = cost + slope * sizes[name], fixed + start
            if np.isfinite(np.minimum.reduceat(cost, starts)).all():
                time, price = self._exchange(cost, average[:, _POOLED], starts)
                priced, ends = cost + price * average[:, _POOLED], np.append(starts[1:], len(cost))
                choice = [int(np.argmin(priced[low:high])) for low, high in zip(starts, ends, strict=True)]
                found.append((self.correction * (self.dense + fixed + time), choice))
        return found

    def _exchange(self, cost: Array, pooled: Array, starts: np.ndarray) -> tuple[float, float]:
        """Least cost with the exchange of pooled rows, bounded interval by interval; and what a byte of it costs."""
        curve, most = self.curve("pooled"), np.where(np.isfinite(cost), pooled, 0.0)
        high = float(np.maximum.reduceat(most, starts).sum())
        if not high or not curve.seconds.any():
            return float(np.minimum.reduceat(cost, starts).sum()), 0.0
        edges = np.concatenate([[0.0], steady(np.geomspace(high / 1e3, high, 40))])
        lines = [curve.line_below(max(low, 1.0), up) for low, up in pairwise(edges)]
        steep = max(slope for _, slope in lines)
        prices = np.unique([0.0, *(slope for _, slope in lines), *steady(np.geomspace(1e-3 * steep, 1e2 * steep, 80))])
        prices = np.concatenate([-prices[:0:-1], prices])
        least = np.array([np.minimum.reduceat(cost + p * pooled, starts).sum() for p in prices])
        bounds = []
        for (start, slope), low, up in zip(lines, edges, edges[1:], strict=False):
            start = min(start, 0.0) if low == 0 else start  # nothing at all may be exchanged
            slack = prices - slope
            values = start + least - np.where(slack > 0, slack * up, slack * low)
            bounds.append((float(values.max()), float(prices[np.argmax(values)])))
        return min(bounds)
