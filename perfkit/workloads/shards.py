"""What every rank holds: of the tables of a plan, with who exchanges what, and of weights in shards over ranks.

Weights in shards are gathered layer by layer before they are used, as PyTorch's `fully_shard` has it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from perfkit.workloads.graph import Label
from perfkit.workloads.layers import cast
from perfkit.workloads.operations import Tensor
from perfkit.workloads.placement import BY_ROWS, Plan
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import Tape, accumulate

#: Ways to train on several ranks: copies of all; shards of optimizer states; of gradients too; of weights too.
PARALLEL = ("ddp", "zero1", "zero2", "fsdp")
_STEPS = ("split_with_sizes_copy", "all_gather", "reduce_scatter")


class Held(NamedTuple):
    """What one rank holds, and who exchanges what.

    Parameters
    ----------
    looked : tuple of EmbeddingTable
        Tables and parts of tables that the rank looks up for the whole batch: those whose rows it pools alone, then
        those whose pooled rows are sums over a group, group by group.
    sums : tuple of int
        Number of the group of each of them; -1 for those that it pools alone [-].
    copies : tuple of EmbeddingTable
        Tables that every rank holds and looks up for its own samples.
    widths : tuple of int
        Columns that each rank sends to each other one [-].
    groups : tuple of tuple of int
        All ranks, and then those that add up rows among themselves.
    """

    looked: tuple[EmbeddingTable, ...]
    sums: tuple[int, ...]
    copies: tuple[EmbeddingTable, ...]
    widths: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def share_lookups(table: EmbeddingTable, parts: int, *, first: bool) -> float:
    """Lookups per sample of one part of the rows; the `first` part holds the most popular row.

    Parameters
    ----------
    table : EmbeddingTable
        The whole table.
    parts : int
        Parts of as many rows [-].
    first : bool
        Whether it is the first one.

    Returns
    -------
    pooling : float
        Lookups per sample [-].
    """
    hottest = float(table.distribution.buckets()[0].max())
    return table.pooling * ((1 - hottest) / parts + hottest * first)


def hold_tables(plan: Plan, tables: Sequence[EmbeddingTable]) -> tuple[Held, ...]:
    """Work out what each rank holds.

    Parameters
    ----------
    plan : Plan
        Where every table lies.
    tables : sequence of EmbeddingTable
        The tables.

    Returns
    -------
    held : tuple of Held
        Tables and parts of tables of each rank.
    """
    everyone = tuple(range(plan.ranks))
    split = {p.ranks for p in plan.placements if p.kind in BY_ROWS and len(p.ranks) > 1} - {everyone}
    groups = (everyone, *sorted(split))
    looked: list[list[tuple[int, EmbeddingTable]]] = [[] for _ in everyone]
    copies: list[list[EmbeddingTable]] = [[] for _ in everyone]
    widths = [0] * plan.ranks
    for number, (placement, table) in enumerate(zip(plan.placements, tables, strict=True)):
        members = placement.ranks
        group = groups.index(members) if placement.kind in BY_ROWS and len(members) > 1 else -1
        parts: dict[tuple[int, bool], EmbeddingTable] = {}
        for shard in placement.cut(table, number):
            if placement.kind == "data_parallel":
                copies[shard.rank].append(table)
                continue
            if group:  # sums over all ranks are not exchanged once more
                widths[shard.rank] += shard.columns if group < 0 else shard.columns // len(members)
            own = table if shard.columns is table.dim else replace(table, dim=shard.columns)
            if group >= 0:
                key = (max(shard.rows, 1), shard.first_row == 0)
                if key not in parts:
                    pooling = share_lookups(table, len(members), first=key[1])
                    parts[key] = replace(table, rows=key[0], pooling=pooling)
                own = parts[key]
            looked[shard.rank].append((group, own))
    ordered = [sorted(own, key=itemgetter(0)) for own in looked]
    return tuple(
        Held(tuple(t for _, t in own), tuple(g for g, _ in own), tuple(copied), tuple(widths), groups)
        for own, copied in zip(ordered, copies, strict=True)
    )


class Units:
    """Weights of each layer, and of what is in none: gathered together, and so are their gradients reduced.

    Collectives have streams of their own. In the forward pass the weights of a layer are gathered as soon as those of
    the last but one are unpacked, in the backward pass as soon as those of the one before are; gradients are reduced
    when a layer is through, and the next layer waits for that before it packs its own.

    Parameters
    ----------
    tape : Tape
        An empty tape.
    trained : list of Tensor
        All weights, in the order in which they are met.
    ranks : int
        Ranks that share them [-].
    parallel : str
        One of `PARALLEL` but the first: whether weights stay whole from one micro-batch to the next and gradients are
        reduced with the last (``zero1``), weights stay whole from forward to backward (``zero2``), or not (``fsdp``).
    itemsize : int
        Bytes of a number in a shard, and of a gradient while it is reduced [B].
    """

    def __init__(self, tape: Tape, trained: list[Tensor], ranks: int, parallel: str, itemsize: int) -> None:
        self.tape, self.ranks, self.parallel, self.itemsize = tape, ranks, parallel, itemsize
        tape.trained, tape.due = trained, dict.fromkeys(trained, 0)
        self.weights = {own.layer: [each for each in trained if each.layer == own.layer] for own in trained}
        self.buffers: dict[int, Tensor] = {}

    @contextmanager
    def open(self, layer: int) -> Iterator[None]:
        """Have the weights of a layer whole for what is recorded inside, and their gradients reduced when it is."""
        again, split = self.parallel == "fsdp" and layer >= 0, self.parallel != "zero1"
        if split or not self.tape.kept:
            for each in (-1, 0) if layer < 0 else ():
                self.launch(each, each)
            self.unpack(layer, layer + 2)
        if again and layer + 1 not in self.weights:
            self.launch(layer, layer)
        self.tape.node(partial(self.reduce, layer, split or self.tape.last))
        yield
        if again:
            self.tape.node(partial(self.unpack, layer, layer - 1))

    def launch(self, layer: int, owner: int) -> None:
        """Gather the weights of a layer while another one is at work."""
        tape, weights = self.tape, self.weights[layer]
        before, tape.layer = tape.layer, layer
        for weight in (each for each in weights if each not in tape.shards):
            tape.shards[weight] = tape.tensor(
                -(-weight.shape[0] // self.ranks), *weight.shape[1:], itemsize=self.itemsize
            )
        parts = [tape.shards[weight] for weight in weights]
        count = sum(part.numel for part in parts)
        narrow, self.buffers[layer] = tape.tensor(count), (whole := tape.tensor(count * self.ranks))
        tape.layer, own, tape.bare = owner, whole.view(count), tape.bare + 5 * (tape.phase == "forward")
        if self.itemsize != tape.itemsize:
            tape.emit("_foreach_copy_", "copy", parts, [narrow], "copy_", elements=count, rows=1)
            parts = [narrow]
        tape.emit("all_gather_copy_in", "copy", parts, [own], "copy_", elements=count, rows=1)
        tape.emit("all_gather", "collective", [own], [whole], nbytes=whole.nbytes)
        tape.layer = before

    def unpack(self, layer: int, ahead: int) -> None:
        """Copy gathered weights to memory of their own, and gather those of the layer ahead if there is one."""
        tape, weights, whole = self.tape, self.weights[layer], self.buffers[layer]
        for weight in weights:
            weight.storage = tape.tensor(*weight.shape).storage
        tape.bare += len(weights) + 3 if tape.phase == "forward" else 2
        rows = self.ranks * len(weights)
        tape.emit("split_with_sizes_copy", "copy", [whole], weights, "cat", elements=whole.numel, rows=rows)
        if ahead >= 0 and ahead in self.weights:
            self.launch(ahead, max(layer, 0))

    def reduce(self, layer: int, done: bool) -> None:
        """Sum the gradients of a layer over ranks, each rank its shards, and add them to those of before."""
        tape, weights = self.tape, self.weights[layer]
        if not done:
            tape.gradients |= {w: cast(tape, tape.gradients[w], self.itemsize) for w in weights}
            return
        shards, rows = [tape.shards[weight] for weight in weights], self.ranks * len(weights)
        count = sum(shard.numel for shard in shards)
        flat, own = (tape.tensor(count * size, itemsize=self.itemsize) for size in (self.ranks, 1))
        parts = [tape.gradients.pop(weight) for weight in weights]
        tape.emit("chunk_cat", "copy", parts, [flat], "cat", elements=flat.numel, rows=rows)
        tape.emit("reduce_scatter", "collective", [flat], [own], nbytes=flat.nbytes)
        for shard in shards:
            tape.gradients[shard] = own.view(*shard.shape)
            accumulate(tape, shard)


def list_waits(labels: Sequence[Label]) -> np.ndarray:
    """Where each collective of sharded weights is waited for: positions of an operation and of the collective.

    Gathered weights are unpacked in the order in which they are gathered. Reduced gradients are waited for before the
    next are packed, by the next micro-batch and by the optimizer.
    """
    found = [np.flatnonzero([label[0] == name for label in labels]) for name in _STEPS]
    ends = [n == "chunk_cat" or p == "update" or (n == _STEPS[0] and p == "forward") for n, _, _, p, _ in labels]
    after = np.flatnonzero(ends)[np.searchsorted(np.flatnonzero(ends), found[2])]
    return np.concatenate([found[:2], [after, found[2]]], axis=1).T
