"""The critical path of an iteration: what each step had to wait for, on whatever rank and stream."""

from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perfkit.prediction.lanes import Lanes, Place, find_stream
from perfkit.prediction.simulation import Timeline
from perfkit.units import rank_largest
from perfkit.workloads.graph import Graph

if TYPE_CHECKING:
    import polars

__all__ = ["find_critical_path"]

#: Rank, stream, operation, start and end [s] of a part of the critical path.
Step: TypeAlias = tuple[int, str, int, float, float]


class _Walk:
    """Backward through an iteration and those before: what each step had to wait for."""

    def __init__(self, graphs: Sequence[Graph], timeline: Timeline) -> None:
        self.lanes = [Lanes(graph, timeline, rank) for rank, graph in enumerate(graphs)]
        self.tolerance = max(lanes.tolerance for lanes in self.lanes)

    def steps(self) -> Iterator[Step]:
        """Rank, stream, operation, start and end [s] of each step, the last one first; they follow without a gap."""
        rank = rank_largest([lanes.ends.max(initial=-np.inf) for lanes in self.lanes], slack=self.tolerance)[0]
        position, shift = self.lanes[rank].last(self.lanes[rank].ends), 0.0
        time = float(self.lanes[rank].ends[position])
        while True:
            lanes = self.lanes[rank]
            begin = float(lanes.starts[position]) + shift
            yield rank, find_stream(lanes.graph, position), position, begin, time
            time = begin
            if position in lanes.group:
                rank, position = self._latest(rank, position)
                lanes = self.lanes[rank]
            found = self._stream(lanes, position, time - shift)
            if found is None:
                position, shift = yield from self._host(rank, position, shift, time)
                time = float(self.lanes[rank].ends[position]) + shift
            else:
                position, shift = found[0], found[1] + shift

    def _latest(self, rank: int, position: int) -> tuple[int, int]:
        """Rank and position of the part of a collective that was ready last; parts run at the same time."""
        start, end = self.lanes[rank].starts[position], self.lanes[rank].ends[position]
        parts = [
            (float(lanes.waits[place]), other, place)
            for other, lanes in enumerate(self.lanes)
            for place in lanes.collectives[
                (abs(lanes.starts[lanes.collectives] - start) <= self.tolerance)
                & (abs(lanes.ends[lanes.collectives] - end) <= self.tolerance)
            ].tolist()
        ]
        return parts[rank_largest([-wait for wait, _, _ in parts], slack=self.tolerance)[0]][1:]

    def _stream(self, lanes: Lanes, position: int, time: float) -> Place | None:
        """What ended at `time` on a stream that the operation at `position` follows."""
        queue = lanes.before(lanes.members[lanes.group[position]], position) if position in lanes.group else None
        found = (queue or lanes.held(position), lanes.before(lanes.compute, position))
        return next((f for f in found if f and abs(lanes.ends[f[0]] + f[1] - time) <= self.tolerance), None)

    def _host(self, rank: int, position: int, shift: float, time: float) -> Generator[Step, None, Place]:
        """Back along the host's clock, to what the host itself waited for."""
        lanes = self.lanes[rank]
        while True:
            last = (position - 1, 0.0) if position else (len(lanes.graph) - 1, -lanes.period)
            freed = float(lanes.issued[last[0]]) + last[1]
            found = None
            for one in (last, None if lanes.device else lanes.held(position)):
                if one is not None and (one != last or lanes.blocks(last[0])):
                    end = float(lanes.ends[one[0]]) + one[1]
                    found, freed = (one, end) if end >= freed - self.tolerance else (found, freed)
            began = min(freed + shift, time)
            yield rank, "host", position, began, time
            if found is not None:
                return found[0], found[1] + shift
            position, shift, time = last[0], last[1] + shift, began


def find_critical_path(
    graphs: Sequence[Graph], timeline: Timeline, stands: Sequence[tuple[int, ...]] = ()
) -> "polars.DataFrame":
    """What the period consists of: each step began when the one before it had ended, on whatever rank and stream.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    stands : sequence of tuple of int, optional
        Ranks that each stands for, itself first; each for itself, unless given [-].

    Returns
    -------
    frame : polars.DataFrame
        rank, stream (``host`` while an operation is launched), operation, name, kind, phase, module, start_s, end_s
        [s]; one step begins where the one before ends, and all together last one period.

    Notes
    -----
    The path is followed backward from the last operation, over a whole period before it is noted down, so that what one
    rank does at the end of an iteration and makes up for in the next is left out. Steps from before the iteration
    belong to the one before it.
    """
    import polars

    walk, period, steps = _Walk(graphs, timeline), timeline.period, []
    last = max(float(ends.max(initial=-np.inf)) for ends in timeline.ends)
    for rank, stream, position, start, end in islice(walk.steps(), 8 * sum(map(len, graphs))) if period > 0 else ():
        start, end = max(start + period, last - period), min(end + period, last)
        if end <= last - period + walk.tolerance:
            break
        if end > start + walk.tolerance:
            name, kind, _, phase, module = graphs[rank].labels[position]
            steps.append((stands[rank][0] if stands else rank, stream, position, name, kind, phase, module, start, end))
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(steps[::-1], schema=columns, orient="row")
