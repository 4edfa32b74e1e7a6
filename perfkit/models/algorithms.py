"""Algorithms of collectives by name, and the textbook form of each inside a node. How they are
composed over nodes stands in `perfkit.platform.collectives`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perfkit.ground.units import Values
from perfkit.models.collectives import ring_collective
from perfkit.models.hierarchy import in_network_all_reduce, tree_collective


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of collectives.

    Parameters
    ----------
    name : str
        Name in keys of fits such as ``all_reduce.8.ring``, and in `Platform.with_algorithm`.
    textbook : callable, optional
        Its time inside a node [s], of the bytes of a message and, by name, ``operation``,
        ``ranks``, ``alpha_hop`` [s] and ``beta_link`` [s/B]; None where no form is known.
    operations : tuple of str
        Operations that the textbook form is for, entries of `perfkit.models.collectives.OPERATIONS`.
    needs_nodes : bool
        Whether it only exists across nodes. Inside a node the library chooses.
    """

    name: str
    textbook: Callable[..., Values] | None = None
    operations: tuple[str, ...] = ()
    needs_nodes: bool = False


def _time_in_network(nbytes: Values, *, operation: str, **sizes: Any) -> Values:
    """`in_network_all_reduce`, which is for one operation alone."""
    return in_network_all_reduce(nbytes, **sizes)


#: Algorithms by name. ``two_level`` sends a share on each rail between nodes; ``rail`` is one rank
#: of each node, over the network between nodes.
ALGORITHMS: Mapping[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "ring",
            textbook=ring_collective,
            operations=("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
        ),
        Algorithm(
            "tree", textbook=tree_collective, operations=("all_reduce", "broadcast", "reduce")
        ),
        Algorithm("in_network", textbook=_time_in_network, operations=("all_reduce",)),
        Algorithm("two_level", needs_nodes=True),
        Algorithm("rail", needs_nodes=True),
    )
}
