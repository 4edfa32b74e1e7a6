"""Rules of thumb that place whole tables one after the other: what a search has to be worth more than."""

from collections.abc import Callable, Sequence
from types import MappingProxyType

import numpy as np

from perfkit.models.caches import unique_rows
from perfkit.sharding.board import Board, Snapshot
from perfkit.units import steady
from perfkit.workloads.tables import EmbeddingTable

__all__ = ["BASELINES", "place_greedily"]

_Size = Callable[[EmbeddingTable, int], float]

#: What each rule sorts tables by, the largest first, and balances over ranks; ``random`` draws the rank, ``storage``
#: sorts by bytes and balances seconds. Lookups and sizes as in NeuroShard (arXiv:2305.01868), distinct rows as in the
#: hybrid-parallel DLRM study of arXiv:2404.12674, storage as TorchRec's default partitioner.
BASELINES: MappingProxyType[str, _Size] = MappingProxyType({
    "random": lambda table, batch: 0.0,
    "size": lambda table, batch: float(table.rows * table.dim),
    "lookup": lambda table, batch: table.pooling * table.dim,
    "size-lookup": lambda table, batch: table.pooling * table.dim * float(np.log10(table.rows)),
    "unique-rows": lambda table, batch: float(unique_rows(table.distribution, batch * table.pooling)) * table.dim,
    "storage": lambda table, batch: float(table.nbytes),
})  # fmt: skip


def place_greedily(
    board: Board, name: str, units: Sequence[Sequence[EmbeddingTable]], batch: int, *, seed: int = 0
) -> Snapshot | None:
    """Place tables by a rule of thumb, whole wherever that is allowed.

    Parameters
    ----------
    board : Board
        Cleared first.
    name : str
        A key of `BASELINES`.
    units : sequence of sequence of EmbeddingTable
        Tables that are placed together, in the order of the board's options.
    batch : int
        Samples of an iteration [-].
    seed : int, optional
        Seed of the random rule [-].

    Returns
    -------
    placement : Snapshot or None
        The placement; None where a table finds no rank with room.
    """
    board.expect([0] * len(units))
    rng, ranks = np.random.default_rng([4, seed]), board.rules.ranks
    keys = steady(np.array([sum(BASELINES[name](table, batch) for table in unit) for unit in units]))
    seconds = np.array([board.load[board.items[u, 0]].sum(axis=0)[:2].sum() for u in range(len(units))])
    order = rng.permutation(len(units)) if name == "random" else np.argsort(-keys, kind="stable")
    balanced, carried = (seconds if name == "storage" else keys), np.zeros(ranks)
    for unit in order.tolist():
        shards = board.load[board.items[unit, 0]]
        if len(shards) != 1:  # it may not lie whole on one rank
            found = board.best_ranks(unit, 0)
            if found is None:
                return None
            board.put(unit, 0, found[1])
            continue
        free = np.flatnonzero(~board.barred(unit, shards[0]))
        if not len(free):
            return None
        rank = int(rng.choice(free)) if name == "random" else int(free[np.argmin(carried[free])])
        carried[rank] += balanced[unit]
        board.put(unit, 0, np.array([rank]))
    return board.snapshot()
