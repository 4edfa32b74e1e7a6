"""Iterations of a recorded training loop."""

from dataclasses import dataclass

import numpy as np

from perfkit.workloads.graph import Graph


@dataclass(frozen=True)
class RecordedIteration:
    """One kind of iteration of a loop.

    Parameters
    ----------
    graph : Graph
        Its operations.
    count : int
        How many of the recorded iterations are of this kind [-].
    """

    graph: Graph
    count: int


class RecordedLoop:
    """A training loop, as the iterations that were recorded of it.

    Parameters
    ----------
    name : str
        Name of the loop [-].
    """

    def __init__(self, name: str) -> None:
        self.name = name
        #: Kinds of iterations in the order in which they were met.
        self.iterations: tuple[RecordedIteration, ...] = ()

    @property
    def count(self) -> int:
        """Number of iterations that were recorded [-]."""
        return sum(iteration.count for iteration in self.iterations)

    @property
    def graph(self) -> Graph:
        """The most frequent kind of iteration; of several that are as frequent, the one with the
        median of work.

        Raises
        ------
        ValueError
            If no iteration was recorded.
        """
        if not self.iterations:
            raise ValueError(
                f"{self.name} has no recorded iteration yet; use it after its loop has run"
            )
        most = max(iteration.count for iteration in self.iterations)
        frequent = [each.graph for each in self.iterations if each.count == most]
        frequent.sort(key=count_flops)
        return frequent[(len(frequent) - 1) // 2]

    def describe(self) -> str:
        """How many iterations were recorded, and how they differ, in a sentence."""
        if not self.iterations:
            return f"{self.name}: no iteration was recorded"
        if len(self.iterations) == 1:
            return f"{self.name}: {_count(self.count)} recorded{', all alike' if self.count > 1 else ''}"
        return f"{self.name}: {_count(self.count)} recorded, of {len(self.iterations)} kinds"

    def __repr__(self) -> str:
        return f"<{self.describe()}>"


def count_flops(graph: Graph) -> float:
    """Work of an iteration [FLOP]."""
    return float(np.sum(graph.features.flops))


def _count(iterations: int) -> str:
    """A number of iterations in words."""
    if iterations == 1:
        return "1 iteration"
    return f"{iterations} iterations"
