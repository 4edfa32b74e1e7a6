"""From a tape to the graph of an iteration: average gradients over ranks, update weights, repeat
layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from perfkit.models.optimizers import ElementwiseStep, find_optimizer
from perfkit.workloads.columns import Accesses, Features, Waits, Weights
from perfkit.workloads.graph import Graph, Label
from perfkit.workloads.operations import Tensor, Weight
from perfkit.workloads.sizes import Program, Size, alter, count_configurations, map_sizes
from perfkit.workloads.tape import PIECE, Tape

#: Bytes at which DistributedDataParallel reduces the first bucket of gradients, and each later one
#: [B].
BUCKETS = (2**20, 25 * 2**20)

#: Bytes of a step counter, which is fp32 in every precision [B].
_COUNTER = 4
#: Operations of sharded weights that wait for collectives, and these.
_STEPS = ("split_with_sizes_copy", "all_gather", "reduce_scatter", "all_reduce")
_Record = Callable[..., tuple[Graph, ...]]


def record_graphs(
    record: _Record, model: Any, names: tuple[str, ...], *given: Any
) -> tuple[Graph, ...]:
    """Graphs of a model; a structure is recorded once for all values of the sizes of these names,
    and of arrays."""
    if count_configurations(model):
        return _fill_together(record, names, model, *given)
    return _fill(record, names, model, *given)


@lru_cache(maxsize=64)
def _fill(record: _Record, names: tuple[str, ...], model: Any, *given: Any) -> tuple[Graph, ...]:
    """Graphs of one configuration: its structure, which is recorded once with open sizes, with its
    sizes filled in."""
    structure = alter(model, {name: -1 - place for place, name in enumerate(names)})
    program, forms = _record_open(record, structure, *given)
    values = program.run(*(getattr(model, name) for name in names))
    found = {form: form.fill(values) for form in dict.fromkeys(forms)}
    return tuple(found[form] for form in forms)


def _fill_together(
    record: _Record, names: tuple[str, ...], model: Any, *given: Any
) -> tuple[Graph, ...]:
    """Graphs of several configurations, with the values of all open sizes beside them."""
    count, known = count_configurations(model), dict[int, np.ndarray]()
    many = alter(model, {name: np.broadcast_to(getattr(model, name), count) for name in names})

    def number(sizes: np.ndarray) -> int:
        """The same number for the same array."""
        known.setdefault(id(sizes), sizes)
        return -1 - [*known].index(id(sizes))

    program, forms = _record_open(record, map_sizes(many, np.ndarray, number), *given)
    values = program.run(*known.values())
    held = [map_sizes(form.tables, Size, lambda size: values[size.number]) for form in forms]
    return tuple(
        replace(form, sizes=values, tables=own) for form, own in zip(forms, held, strict=True)
    )


@lru_cache(maxsize=128)
def _record_open(record: _Record, structure: Any, *given: Any) -> tuple[Program, tuple[Graph, ...]]:
    """Graphs of a structure, in which a whole number below 0 is an open size, and the program that
    finds the sizes."""
    program = Program()
    return program, record(
        map_sizes(structure, int, lambda n: program.add(None, -1 - n) if n < 0 else n), *given
    )


def average(tape: Tape) -> None:
    """Average the dense gradients over ranks: copy those of a group to one tensor, reduce it and
    divide it."""
    tape.module = ""
    for group in sorted({w.group for w in tape.trained if w.group is not None}):
        own = [weight for weight in tape.trained if weight.group == group]
        count, elements = _count(tape, own)
        flat = tape.tensor(elements, itemsize=tape.wide)
        tape.emit(
            "cat",
            "copy",
            [tape.gradients[weight] for weight in own],
            [flat],
            elements=elements,
            rows=count,
        )
        tape.emit("all_reduce", "collective", [flat], [flat], nbytes=flat.nbytes, group=group)
        tape.emit("div_", "elementwise", [flat], [flat], elements=elements)
        tape.gradients |= {w: Tensor(flat.storage, w.shape, tape.wide, layer=w.layer) for w in own}


def step(tape: Tape, optimizer: str, *, lists: bool = False, fused: bool = False) -> None:
    """Update the weights: one after the other, in lists, or all by one fused kernel; of some tables
    single rows."""
    tape.module = ""
    # others were updated by the backward pass
    weights = [weight for weight in tape.trained if weight.stored in tape.gradients]
    dense = [weight.stored for weight in weights if not weight.updates_rows]
    rows = [weight for weight in weights if weight.updates_rows]
    chosen = find_optimizer(optimizer)
    if rows and not chosen.sparse_rows:
        raise ValueError(
            f"optimizer is {optimizer!r}; it updates no single rows of tables; take 'sgd', or dense "
            "gradients"
        )
    if lists or fused:  # single rows come last, in the order in which their gradients were computed
        if dense:
            operations = chosen.operations("fused" if fused else "for_each")
            _update_dense(tape, dense, operations, listed=True)
        for weight in reversed(rows):
            _update_rows(tape, weight)
        return
    for weight in weights:
        if weight.updates_rows:
            _update_rows(tape, weight)
        else:
            _update_dense(tape, [weight.stored], chosen.operations("eager"), listed=False)


def _update_rows(tape: Tape, weight: Weight) -> None:
    """Add the gradients of the looked-up rows of a table to these rows."""
    gradient = tape.gradients[weight]
    tape.emit("add_", "embedding_update", [gradient], [], "sparse", **weight.row_update)


def finish(
    tape: Tape, model: Any, *, ranks: int, lists: bool, groups: tuple[tuple[int, ...], ...] = ()
) -> Graph:
    """Record the backward pass and the update; gradients are averaged unless it reduces them.
    Returns the graph."""
    tape.backward()
    if ranks > 1 and not tape.overlap:
        average(tape)
    step(tape, model.optimizer, lists=lists, fused=model.fused)
    return make_graph(
        tape,
        name=model.name,
        family=model.family,
        dtype=model.dtype,
        ranks=ranks,
        groups=groups,
        optimizer=model.optimizer,
    )


def _update_dense(
    tape: Tape, weights: Sequence[Tensor], operations: Sequence[ElementwiseStep], *, listed: bool
) -> None:
    """Run the operations of an optimizer on a dense weight or on a list of them."""
    count, elements = _count(tape, weights) if listed else (1, weights[0].numel)
    tensors: dict[str, list[Tensor]] = {
        "weight": [*weights],
        "gradient": [tape.gradients[weight] for weight in weights],
    }
    for operation in operations:
        for operand in operation.reads + operation.writes:
            if operand not in tensors:
                tensors[operand] = _make_operands(tape, operand, weights)
        reads = [tensor for operand in operation.reads for tensor in tensors[operand]]
        writes = [tensor for operand in operation.writes for tensor in tensors[operand]]
        tape.layer = -1 if listed else weights[0].layer
        size = count if operation.counts_steps else elements
        tape.emit(operation.name, "elementwise", reads, writes, operation.variant, elements=size)
    tape.layer = -1


def _make_operands(tape: Tape, operand: str, weights: Sequence[Tensor]) -> list[Tensor]:
    """New tensors for an operand of an update: states, step counters and intermediate results."""
    if operand == "one":
        tape.layer = -1
        return [tape.tensor(1, itemsize=_COUNTER)]
    made = []
    for weight in weights:
        tape.layer = weight.layer
        if operand == "step":
            made.append(tape.tensor(1, itemsize=_COUNTER))
        else:
            made.append(tape.tensor(*weight.shape, itemsize=weight.itemsize))
    return made


def _count(tape: Tape, weights: Sequence[Tensor]) -> tuple[int, Any]:
    """How many weights of all layers the recorded ones represent, and how many numbers these
    have."""
    counts = [tape.repeats if weight.layer == tape.middle else 1 for weight in weights]
    return sum(counts), sum(
        weight.numel * count for weight, count in zip(weights, counts, strict=True)
    )


def make_graph(tape: Tape, **about: Any) -> Graph:
    """The graph of what a tape has recorded; `about` holds further fields of it, such as its name.

    The layer that represents several ones is repeated. If sizes are arrays, features and accesses
    have another axis.
    """
    rows = [
        (position, access.storage, access.nbytes, access.is_write)
        for position, operation in enumerate(tape.operations)
        for access in operation.accesses
    ]
    shapes = (nbytes.shape for _, _, nbytes, _ in rows if isinstance(nbytes, np.ndarray))
    shape = next(shapes, ())
    features = Features.from_rows([operation.sizes for operation in tape.operations], shape)
    accesses = Accesses.from_rows(rows, shape)
    outside = [
        (weight.storage, weight.table is not None) for weight in tape.trained if weight.layer < 0
    ]
    graph = Graph(
        tuple(operation.label for operation in tape.operations),
        features,
        accesses,
        tuple(tape.tables),
        _count(tape, tape.trained)[1],
        weights=Weights.from_rows(outside),
        **about,
    )
    if tape.repeats > 1:
        graph = _repeat(graph, tape)
    noted = [_LaunchWait(operation, launch) for operation, launch in tape.waits]
    if any(weight.bucket is not None for weight in tape.trained):
        graph, noted = _reduce(graph, noted)
    waits = _list_waits(graph, noted) if tape.overlap else None
    # only products are fp8
    formats = ("fp8" if label.name == "_scaled_mm" else "bf16" for label in graph.labels)
    vars(graph).update(waits=waits, dtypes=tuple(formats) if graph.dtype == "fp8" else ())
    return graph


def _repeat(graph: Graph, tape: Tape) -> Graph:
    """Repeat the second layer, each time with new storages."""
    homes, owners = np.array(tape.homes), np.array([own.layer for own in tape.operations])
    holders = np.array([access.layer for own in tape.operations for access in own.accesses])
    # of a storage among those of its layer, or of no layer
    number = np.zeros(len(homes), dtype=int)
    for home in range(-1, homes.max() + 1):
        number[homes == home] = np.arange((homes == home).sum())
    outside, inside = (homes < 0).sum(), number[homes >= 0].max() + 1
    rows, layer = _unroll(owners, tape.repeats)
    # of every operation, for each layer
    place = np.empty((len(owners), tape.repeats + 3), dtype=int)
    place[rows] = np.arange(len(rows))[:, None]
    place[rows, layer] = np.arange(len(rows))
    taken, own = _unroll(holders, tape.repeats)
    accesses, owner = graph.accesses.select(taken), holders[taken]
    home = homes[accesses.buffer]
    of_layer = np.where(home < 0, 0, outside + (own + home - owner) * inside)
    accesses = replace(
        accesses,
        operation=place[accesses.operation, own],
        buffer=number[accesses.buffer] + of_layer,
    )
    weights = replace(graph.weights, buffer=number[graph.weights.buffer])
    named = zip(graph.labels, owners.tolist(), strict=True)
    texts = [label.module.replace(f"layers.{own}", "layers.{}", 1) for label, own in named]
    labels = []
    for row, number_of_layer in zip(rows.tolist(), layer.tolist(), strict=True):
        label, module = graph.labels[row], texts[row].format(number_of_layer)
        labels.append(Label(label.name, label.kind, label.variant, label.phase, module))
    return replace(
        graph,
        labels=tuple(labels),
        features=graph.features.select(rows),
        accesses=accesses,
        weights=weights,
    )


def _unroll(owners: np.ndarray, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in which those of the second layer are repeated, and the layer of each; backward passes
    run in reverse."""
    rows, found, last = [], [], 0
    for start, end in np.flatnonzero(np.diff(owners == 1, prepend=False, append=False)).reshape(
        -1, 2
    ):
        numbers = np.arange(1, repeats + 1)[:: 1 if owners[start - 1] == 0 else -1]
        rows += [np.arange(last, start), np.tile(np.arange(start, end), repeats)]
        found += [owners[last:start], np.repeat(numbers, end - start)]
        last = end
    row = np.concatenate([*rows, np.arange(last, len(owners))])
    layer = np.concatenate([*found, owners[last:]])
    return row, np.where(owners[row] > 1, repeats + owners[row] - 1, layer)


def fill_buckets(sizes: Sequence[float]) -> list[slice]:
    """Fill the buckets of DistributedDataParallel: a bucket is reduced once it is full.

    Parameters
    ----------
    sizes : sequence of float
        Bytes of the gradients of a module, in the order in which they are computed [B].

    Returns
    -------
    buckets : list of slice
        Neighbours in this order that share a bucket.

    Examples
    --------
    >>> fill_buckets([2e6, 2e7, 2e7, 1e6])
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None)]
    """
    first, later = BUCKETS
    buckets = list[slice]()
    begin, total = 0, 0.0
    for place, nbytes in enumerate(sizes):
        total += nbytes
        if total >= (later if buckets else first):
            buckets.append(slice(begin, place + 1))
            begin, total = place + 1, 0.0
    if begin < len(sizes):
        buckets.append(slice(begin, len(sizes)))
    return buckets


class _LaunchWait(NamedTuple):
    """An operation that waits for a collective, both by their positions in the recording."""

    operation: int
    launch: int


def _reduce(graph: Graph, noted: Sequence[_LaunchWait]) -> tuple[Graph, list[_LaunchWait]]:
    """Reduce gradients in buckets as DistributedDataParallel does; each module has its own buckets.

    A full bucket is reduced during the backward pass. The first copy back from it waits for that.
    Buckets are filled in the order in which gradients are computed, as PyTorch does from the second
    iteration on. `noted` are the waits so far; all waits are returned with the graph.
    """
    labels, features, accesses, waits = graph.labels, graph.features, graph.accesses, [*noted]
    pieces = np.flatnonzero([label.name == PIECE for label in labels])
    end = [label.phase for label in labels].index("update")
    copies = np.arange(end - len(pieces), end)
    modules, sizes = features.table[pieces], features.nbytes[pieces].tolist()
    if np.any(features.nbytes[pieces] < 0):
        raise ValueError(
            "sizes of weights are arrays, and which gradients share a bucket depends on them; take "
            "numbers, or pk.sweep"
        )
    kept, into = np.ones(len(labels), dtype=bool), np.arange(len(labels))
    kept[pieces] = False
    begun = 0
    for module in np.unique(modules).tolist():
        own = np.flatnonzero(modules == module)
        for members in fill_buckets([sizes[member] for member in own]):
            held = pieces[own[members]]
            last = held[-1]
            into[held] = last
            kept[last] = True
            features.nbytes[last] = sum(sizes[member] for member in own[members])
            waits.append(_LaunchWait(copies[begun], last))
            begun += len(held)
    for piece in pieces[~kept[pieces]]:
        features.bare[piece + 1] += features.bare[piece]
    features.table[pieces] = 0.0
    new = np.concatenate([[0], np.cumsum(kept)])
    of_piece = accesses.find_of(pieces)
    accesses = replace(accesses, operation=new[into[accesses.operation]])
    # a bucket is read and then written
    order = np.lexsort([of_piece & accesses.is_write, accesses.operation])
    found = [
        Label("all_reduce", "collective", "all_reduce", label.phase, label.module)
        if label.name == PIECE
        else label
        for label, keep in zip(labels, kept, strict=True)
        if keep
    ]
    reduced = replace(
        graph, labels=tuple(found), features=features.select(kept), accesses=accesses.select(order)
    )
    moved = [_LaunchWait(new[wait.operation], new[wait.launch]) for wait in waits]
    return reduced, moved


def _list_waits(graph: Graph, noted: Sequence[_LaunchWait]) -> Waits:
    """Waits for collectives: those noted, and those for sharded weights.

    Gathered weights are unpacked in the order in which they are gathered. Reduced gradients are
    waited for before the next ones are packed, by the next micro-batch, and by the optimizer; those
    summed up over groups by the last alone.
    """
    labels = graph.labels
    found = [np.flatnonzero([label.name == name for label in labels]) for name in _STEPS]
    launches = np.array([wait.launch for wait in noted], dtype=np.intp)
    split, gather, scatter, add = (np.setdiff1d(places, launches) for places in found)
    ends = [
        label.name == "chunk_cat"
        or label.phase == "update"
        or (label.name == _STEPS[0] and label.phase == "forward")
        for label in labels
    ]
    after = np.flatnonzero(ends)[np.searchsorted(np.flatnonzero(ends), scatter)]
    update = np.full_like(add, np.argmax([label.phase == "update" for label in labels]))
    waiting = np.array([wait.operation for wait in noted], dtype=np.intp)
    launched = np.concatenate([launches, gather, scatter, add])
    return Waits(
        operation=np.concatenate([waiting, split, after, update]),
        collective=np.searchsorted(graph.collectives, launched),
        of_previous_iteration=np.zeros(len(launched), dtype=bool),
    )
