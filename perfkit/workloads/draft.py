"""From a tape to the graph of an iteration: layers repeated, gradients averaged over ranks, weights updated."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from perfkit.models.embedding import STATE
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.tape import PIECE, Tape

#: Bytes at which DistributedDataParallel sends off the first bucket of gradients, and every later one [B].
BUCKETS = (2**20, 25 * 2**20)
#: Layers that are recorded where there are more: the first, the last and one that is repeated.
RECORDED = 3

#: Passes of the optimizers over a weight `w` with its gradient `g`, optimizer states `s` and `t`, a step counter `n`
#: and fresh tensors `a` and `b`: variant and name, and what is read and written. Lists of weights take one more.
PASSES: Mapping[str, tuple[str, ...]] = {
    "sgd": ("add_: w g -> w",),
    "adagrad": (
        "add_.add_scalar_: n -> n", "addcmul_: s g -> s", "sqrt: s -> a", "add_.add_scalar_: a -> a",
        "addcdiv_: w g a -> w",
    ),
    "adagrad in lists": (
        "add_.add_scalar_: n -> n", "addcmul_: s g -> s", "sqrt: s -> a", "add_.add_scalar_: a -> a",
        "mul.mul_scalar: g -> b", "addcdiv_: w b a -> w",
    ),
    "adamw": (
        "add_.add_scalar_: n -> n", "mul_: w -> w", "lerp_: s g -> s", "mul_: t -> t", "addcmul_: t g -> t",
        "sqrt: t -> a", "div.div_scalar: a -> b", "add_.add_scalar_: b -> b", "addcdiv_: w s b -> w",
    ),
}  # fmt: skip
_Label = tuple[str, str, str, str, str]
_COLUMN = {name: index for index, name in enumerate(FEATURES)}
_NBYTES, _ROWS, _TABLE, _ELEMENTS, _BARE = (_COLUMN[n] for n in ("nbytes", "rows", "table", "elements", "bare"))


class Draft:
    """The rows of a graph, of which some are still to come.

    Parameters
    ----------
    tape : Tape
        After its backward pass.
    layers : int
        How many layers there are where the tape has recorded `RECORDED` of them [-].
    """

    def __init__(self, tape: Tape, layers: int = 0) -> None:
        self.tape, self.bare, self.labels, self.waits = tape, tape.bare, tape.labels, tape.waits
        self.features = np.array(tape.features, dtype=float).reshape(-1, len(FEATURES))
        self.accesses = np.array(tape.accesses, dtype=float).reshape(-1, 4)
        #: Of every weight: its storage, that of its gradient, elements, bytes of one, and those of the gradient's.
        self.weights = np.array([
            (weight.storage, kept.storage, weight.numel, weight.itemsize, kept.itemsize)
            for weight in tape.trained for kept in [tape.gradients.get(weight, weight)]
        ], dtype=float).reshape(-1, 5)  # fmt: skip
        self.storages, self.trained = len(tape.storages), np.arange(len(tape.trained))
        if layers > RECORDED:
            self._repeat(layers)
        if tape.buckets:
            self._share()

    def _repeat(self, layers: int) -> None:
        """Repeat the middle one of the layers."""
        owners, homes = np.array(self.tape.layers), np.array(self.tape.storages)
        number = np.zeros(len(homes), dtype=int)  # of a storage within its layer, or within what is in none
        for home in range(-1, RECORDED):
            number[homes == home] = np.arange((homes == home).sum())
        outside, inside = (homes < 0).sum(), number[homes >= 0].max() + 1

        def rename(storages: np.ndarray, owner: np.ndarray, layer: np.ndarray) -> np.ndarray:
            """Storages as a row of a layer names them that was recorded as another one, its owner."""
            home = homes[storages]
            there = np.where(owner < 0, np.where(home == RECORDED - 1, layers - 1, home), layer + home - owner)
            return np.asarray(np.where(home < 0, number[storages], outside + there * inside + number[storages]))

        rows, layer = _unroll(owners, layers)
        heads, tails = [label[:4] for label in self.labels], [label[4][8:] for label in self.labels]
        self.labels = [
            (*heads[row], f"layers.{own}{tails[row]}") if own >= 0 else self.labels[row]
            for row, own in zip(rows.tolist(), layer.tolist(), strict=True)
        ]
        self.features = self.features[rows]
        operation = self.accesses[:, 0].astype(int)
        counts = np.bincount(operation, minlength=len(owners))
        starts = np.cumsum(counts) - counts
        repeats = counts[rows]
        new = np.repeat(np.arange(len(rows)), repeats)
        places = np.arange(len(new)) + np.repeat(starts[rows] - np.cumsum(repeats) + repeats, repeats)
        storages = rename(self.accesses[places, 1].astype(int), owners[rows][new], layer[new])
        self.accesses = np.column_stack([new, storages, self.accesses[places, 2:]])
        owners = homes[self.weights[:, 0].astype(int)]
        rows, layer = _unroll(owners, layers)
        self.trained = rows
        names = [rename(self.weights[rows, column].astype(int), owners[rows], layer) for column in (0, 1)]
        self.weights = np.column_stack([*names, self.weights[rows, 2:]])
        self.storages = outside + layers * inside

    def _share(self) -> None:
        """Average gradients over ranks as DistributedDataParallel does, each of several modules in buckets of its own.

        A bucket is reduced when it is full, while the backward pass goes on, and at its end all are copied back.
        Buckets are filled in the order of arrival, as from the second iteration on. The copies are launched from inside
        the reducer, without a call of the framework's own.
        """
        pieces = np.flatnonzero([label[0] == PIECE for label in self.labels])
        operation = self.accesses[:, 0].astype(int)
        parts = self.accesses[np.searchsorted(operation, pieces), 1]
        gradients = self.accesses[np.searchsorted(operation, pieces - 1), 1]  # what was copied there
        modules, rows, nbytes, elements = (
            self.features[pieces, column] for column in (_TABLE, _ROWS, _NBYTES, _ELEMENTS)
        )
        kept, into = np.ones(len(self.labels), dtype=bool), np.arange(len(self.labels))
        kept[pieces] = False
        buckets = []
        for module in np.unique(modules):
            members = np.flatnonzero(modules == module)
            total, own, first = 0.0, list[int](), True
            for member, size in zip(members.tolist(), nbytes[members].tolist(), strict=True):
                total, own = total + size, [*own, member]
                if total >= BUCKETS[not first] or member == members[-1]:
                    last = pieces[member]
                    into[pieces[own]], kept[last], self.features[last, _NBYTES] = last, True, total
                    buckets.append(own)
                    total, own, first = 0.0, [], False
        for piece in pieces[~kept[pieces]]:
            self.features[piece + 1, _BARE] += self.features[piece, _BARE]
        self.features[pieces[:, None], [_ROWS, _TABLE, _ELEMENTS]] = 0.0
        new = np.cumsum(kept) - 1
        self.features = self.features[kept]
        self.waits = [(int(new[place - 1]) + 1 if place else 0, int(new[sent])) for place, sent in self.waits]
        self.labels = [
            ("all_reduce", "collective", "all_reduce", *label[3:]) if label[0] == PIECE else label
            for label, keep in zip(self.labels, kept, strict=True) if keep
        ]  # fmt: skip
        writes = self.accesses[:, 3] * np.isin(operation, pieces)  # a bucket is read as a whole and then written
        self.accesses[:, 0] = new[into[operation]]
        self.accesses = self.accesses[np.argsort(2 * self.accesses[:, 0] + writes, kind="stable")]
        place = len(self.labels)
        for own in buckets:
            self.waits.append((place, int(new[pieces[own[-1]]])))
            place += 0 if self.tape.compiled else len(own)
        if not self.tape.compiled:
            order = [member for own in buckets for member in own]
            label = ("copy_", "copy", "copy_", "backward", self.tape.module)
            sizes = {"elements": elements[order], "rows": rows[order], "calls": 0.0}
            storages = np.stack([parts[order], gradients[order]], axis=1)
            self._extend([label] * len(order), sizes, storages, nbytes[order, None], [0, 1])

    def _extend(
        self,
        labels: list[_Label],
        sizes: Mapping[str, Any],
        storages: Any,
        nbytes: Any,
        writes: Any,
        *,
        where: Any = None,
    ) -> None:
        """Append operations; accesses are one row an operation, unless `where` tells the operation of each."""
        rows = np.zeros((len(labels), len(FEATURES)))
        for name, value in {"launches": 1.0, "calls": 1.0, **sizes}.items():
            rows[:, _COLUMN[name]] = value
        rows[:1, _BARE], self.bare = self.bare, 0
        where = np.arange(len(labels))[:, None] if where is None else where
        columns = np.broadcast_arrays(len(self.labels) + where, storages, nbytes, writes)
        self.accesses = np.concatenate(
            [self.accesses, np.stack([c.ravel() for c in columns], axis=1, dtype=float, casting="unsafe")]
        )
        self.features, self.labels = np.concatenate([self.features, rows]), [*self.labels, *labels]

    def average(self) -> None:
        """Average the dense gradients over ranks: flattened, reduced in one piece, divided."""
        own = np.flatnonzero([self.tape.trained[index] not in self.tape.local for index in self.trained])
        _, gradients, elements, _, itemsize = self.weights[own].T
        flat, total = self.storages, elements.sum()
        names = ("cat", "copy"), ("all_reduce", "collective"), ("div_", "elementwise")
        labels = [(name, kind, name, "update", "") for name, kind in names]
        whole = total * self.tape.wide
        sizes = {"elements": (total, 0, total), "rows": (len(own), 0, 0), "nbytes": (0, whole, 0)}
        storages, nbytes = [*gradients, *[flat] * 5], [*(elements * itemsize), *[whole] * 5]
        where = np.array([0] * (len(own) + 1) + [1, 1, 2, 2])
        self._extend(labels, sizes, storages, nbytes, [0] * len(own) + [1, 0, 1, 0, 1], where=where)
        self.storages += 1
        self.weights[own, 1], self.weights[own, 4] = flat, self.tape.wide

    def step(self, optimizer: str, *, lists: bool = False, fused: bool = False) -> None:
        """Update weights: one after the other, in lists, or all by one fused kernel; rows where looked up."""
        together = lists or fused
        found = [self.tape.trained[index] for index in self.trained]
        kinds = ["done" if w in self.tape.updated else "sparse" if w in self.tape.sparse else "dense" for w in found]
        order = list(range(len(found)))
        if together:  # rows come last, in the order in which their gradients came
            order.sort(key=lambda index: (kinds[index], -index if kinds[index] == "sparse" else index))
        for kind, members in groupby(order, key=lambda i: kinds[i]):
            if kind == "dense":
                self._update(np.array(list(members)), optimizer, together=together, fused=fused)
            elif kind == "sparse":
                rows = [found[index] for index in members]
                columns = [self.tape.sparse[row] for row in rows]
                sizes = {name: [column[name] for column in columns] for name in columns[0]}
                reads = [self.tape.gradients[row] for row in rows]
                label = ("add_", "embedding_update", "sparse", "update", "")
                storages, nbytes = ([[getattr(g, name)] for g in reads] for name in ("storage", "nbytes"))
                self._extend([label] * len(rows), sizes, storages, nbytes, 0)

    def _update(self, own: np.ndarray, optimizer: str, *, together: bool, fused: bool) -> None:
        """Passes over dense weights."""
        states = "st"[: int(STATE[optimizer])]
        passes = PASSES[optimizer]
        if together and len(own) > 1:
            passes = PASSES.get(f"{optimizer} in lists", passes)
        if fused:
            kept = " ".join(f"w {' '.join(states)}".split())
            passes = (f"_fused_{optimizer}_: {kept} g -> {kept}",)
        storages, gradients, elements, itemsize, narrow = self.weights[own].T
        known = {"w": storages, "g": gradients}
        columns, sizes, labels = [], [], []
        for number, line in enumerate(passes):
            head, _, tensors = line.partition(": ")
            name, _, variant = head.partition(".")
            reads, writes = (part.split() for part in tensors.split(" -> "))
            for tensor in (*reads, *writes):
                if tensor not in known:
                    known[tensor] = self.storages + np.arange(len(own))
                    self.storages += len(own)
            ones = np.ones(len(own))
            for write, tensor in [(0, t) for t in reads] + [(1, t) for t in writes]:
                nbytes = elements * {"n": 0, "g": narrow}.get(tensor, itemsize) + self.tape.itemsize * (tensor == "n")
                columns.append((np.full(len(own), number), known[tensor], nbytes, np.full(len(own), write)))
            sizes.append(elements if writes != ["n"] else ones)
            alone = not together or len(own) == 1 or fused
            labels.append((name if alone else "_foreach_" + name, "elementwise", variant or name, "update", ""))
        table = np.array(columns).transpose(1, 0, 2)  # place, storage, bytes and direction, by access and weight
        if not together:  # weight after weight, each pass an operation
            table = table.transpose(0, 2, 1)
            table[0] += len(labels) * np.arange(len(own))[:, None]
            labels = labels * len(own)
        elements = np.sum(sizes, axis=1) if together else np.transpose(sizes).ravel()
        self._extend(labels, {"elements": elements}, *table[1:], where=table[0])

    def graph(self, **about: Any) -> Graph:
        """The rows as a graph; `about` are further fields of it, such as its name."""
        sent = np.flatnonzero([label[1] == "collective" for label in self.labels])
        waits = np.array([(place, np.searchsorted(sent, row)) for place, row in self.waits], dtype=np.intp).reshape(
            -1, 2
        )
        tables, parameters = tuple(self.tape.tables), sum(self.tape.trained[index].numel for index in self.trained)
        about["waits"] = waits if self.tape.overlap else None
        return Graph(tuple(self.labels), self.features, self.accesses, tables, parameters, **about)


def _unroll(owners: np.ndarray, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with those of the middle layer repeated, and the layer of each; on the way back the last layer is first."""
    rows, found, last = [], [], 0
    edges = np.flatnonzero(np.diff(owners == 1, prepend=False, append=False)).reshape(-1, 2)
    for turn, (start, end) in enumerate(edges):
        numbers = np.arange(1, layers - 1)[:: -1 if turn else 1]
        rows += [np.arange(last, start), np.tile(np.arange(start, end), layers - 2)]
        found += [owners[last:start], np.repeat(numbers, end - start)]
        last = end
    rows.append(np.arange(last, len(owners)))
    found.append(owners[last:])
    row, layer = np.concatenate(rows), np.concatenate(found)
    return row, np.where(owners[row] == RECORDED - 1, layers - 1, layer)
