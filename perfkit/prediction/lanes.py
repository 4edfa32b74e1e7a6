"""The streams of one rank: what each operation follows, and why the compute stream stands still before it."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from perfkit.prediction.simulation import Timeline
from perfkit.units import rank_largest
from perfkit.workloads.graph import Graph

__all__ = ["Lanes", "Place", "find_stream"]

#: An operation, and how much later than the one shown its iteration is [s].
Place: TypeAlias = tuple[int, float]
_TOLERANCE = 1e-9  # two times are the same when they differ by less than this part of the period


def find_stream(graph: Graph, position: int) -> str:
    """Name the stream of one operation.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    position : int
        Position of the operation [-].

    Returns
    -------
    stream : str
        ``compute``, or ``communication`` with the number of the communicator where there are several.
    """
    if graph.labels[position][1] != "collective":
        return "compute"
    return f"communication {int(graph.column('group')[position])}" if len(graph.groups) > 1 else "communication"


class Lanes:
    """Streams of one rank as the cycle they are: before the first operation comes the last of the iteration before.

    Parameters
    ----------
    graph : Graph
        What the rank does.
    timeline : Timeline
        What the simulation says of all ranks.
    rank : int
        Which of them it is [-].
    """

    def __init__(self, graph: Graph, timeline: Timeline, rank: int) -> None:
        self.graph, self.period, self.tolerance = graph, timeline.period, _TOLERANCE * timeline.period
        self.starts, self.ends, self.waits = timeline.starts[rank], timeline.ends[rank], timeline.waits[rank]
        self.stalls, self.exposed, self.issued = timeline.stalls[rank], timeline.exposed[rank], timeline.issued[rank]
        self.device, self.transfers = timeline.device, set(graph.transfers.tolist())
        self.collectives = graph.collectives
        self.compute = np.setdiff1d(np.arange(len(graph)), self.collectives)
        groups = graph.column("group")[self.collectives].astype(int)
        self.members = {group: self.collectives[groups == group].tolist() for group in set(groups.tolist())}
        self.group = dict(zip(self.collectives.tolist(), groups.tolist(), strict=True))
        self.awaited: dict[int, list[int]] = {}
        places = self.collectives.tolist()
        rows = graph.waits.tolist() if graph.waits is not None else [(p + 1, i) for i, p in enumerate(places)]
        for place, number in [*rows, *((len(graph), i) for i in set(range(len(places))) - {int(i) for _, i in rows})]:
            self.awaited.setdefault(int(place), []).append(places[int(number)])
        self.stalled: dict[int, list[int]] = {}
        for place in np.flatnonzero(self.stalls > self.tolerance).tolist():
            self.stalled.setdefault(self.next_compute(place), []).append(place)

    def blocks(self, position: int) -> bool:
        """Whether the host goes on only when the operation has ended."""
        return position in self.transfers if self.device else position not in self.group

    def before(self, positions: Sequence[int] | np.ndarray, position: int) -> Place | None:
        """The one of `positions` that comes before, and the shift [s] of its iteration."""
        if not len(positions):
            return None
        place = int(np.searchsorted(positions, position)) - 1
        return int(positions[place]), 0.0 if place >= 0 else -self.period

    def last(self, times: Sequence[float] | np.ndarray) -> int:
        """Number of the last of several times [s], the first one where several are the same."""
        return rank_largest(times, slack=self.tolerance)[0]

    def next_compute(self, position: int) -> int:
        """Place among the compute stream's operations of the one at `position` or the next one after."""
        return int(np.searchsorted(self.compute, position)) % max(len(self.compute), 1)

    def held(self, position: int) -> Place | None:
        """The last collective to end of those the compute stream stood still for since its operation before."""
        found = [
            (one, -self.period if place > position else 0.0)
            for place in self.stalled.get(self.next_compute(position), ())
            for one in self.awaited[place]
        ]
        known = [one for one in found if self.ends[one[0]] + one[1] <= self.starts[position] + self.tolerance]
        return known[self.last([self.ends[one] + shift for one, shift in known])] if known else None

    def rests(self) -> Iterator[tuple[str, int, float]]:
        """Cause, operation and length [s] of every time the compute stream stands still."""
        ends = self.ends[self.compute]
        gaps = np.maximum(self.starts[self.compute] - np.concatenate((ends[-1:] - self.period, ends[:-1])), 0.0)
        for later, places in self.stalled.items() if len(gaps) else ():
            for place in places:
                stall = min(float(self.stalls[place]), float(gaps[later]))
                exposed = min(float(self.exposed[place]), stall)
                gaps[later] -= stall
                cause = self.awaited[place][self.last(self.ends[self.awaited[place]])]
                yield "communication", cause, exposed
                yield "waiting", cause, stall - exposed
        for later in np.flatnonzero(gaps > self.tolerance).tolist():
            yield "host", int(self.compute[later]), float(gaps[later])
