"""From a tape to the graph of an iteration: average gradients over ranks, update weights, repeat
layers, reduce gradients in buckets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from perfkit.models.optimizers import (
    QUANTIZED_BLOCK,
    SCALE_ITEMSIZE,
    SCALES,
    Optimizer,
    find_optimizer,
)
from perfkit.workloads.columns import (
    FEATURES,
    Accesses,
    Features,
    HostCalls,
    OperationSizes,
    Owners,
    Size,
    Waits,
    Weights,
)
from perfkit.workloads.graph import Graph, Label
from perfkit.workloads.operations import FP8_PRODUCTS, Tensor, Weight
from perfkit.workloads.structure import OpenGraph, SizeTable
from perfkit.workloads.symbolic_sizes import SymbolicSize
from perfkit.workloads.tape import Calls, LaunchWait, RecordedAccess, Tape
from perfkit.workloads.weight_updates import update_by_shape

#: Bytes at which DistributedDataParallel reduces the first bucket of gradients, and each later one
#: [B].
BUCKETS = (2**20, 25 * 2**20)

#: Bytes of a step counter, which is fp32 in every precision [B].
_COUNTER = 4
#: Operation that unpacks gathered weights, and waits for their collective.
_UNPACK = "split_with_sizes_copy"


def average(tape: Tape) -> None:
    """Average the dense gradients over ranks: copy those of a group to one tensor, reduce it and
    divide it."""
    tape.module = ""
    for group in sorted({w.group for w in tape.trained if w.group is not None}):
        weights = [weight for weight in tape.trained if weight.group == group]
        count, elements = _count(tape, weights)
        flat = tape.tensor(elements, itemsize=tape.wide)
        gradients = [tape.find_gradient(weight) for weight in weights]
        tape.copy("cat", gradients, [flat], rows=count)
        tape.collective("all_reduce", [flat], [flat], nbytes=flat.nbytes, group=group)
        tape.elementwise("div_", [flat], [flat])
        for weight in weights:
            weight.gradient = Tensor(flat.storage, weight.shape, tape.wide, layer=weight.layer)


def step(
    tape: Tape,
    optimizer: str,
    *,
    lists: bool = False,
    fused: bool = False,
    by_region: bool = False,
) -> None:
    """Update the weights: one after the other, in lists, or all by one fused kernel; of some tables
    single rows. `by_region` names the modules of updates by shape ``update.layers`` and
    ``update.ends``, and that of other weights as the latter."""
    tape.module = ""
    # others were updated by the backward pass
    weights = [weight for weight in tape.weights if weight.stored.gradient is not None]
    dense = [weight for weight in weights if weight.row_update is None]
    rows = [weight for weight in weights if weight.row_update is not None]
    chosen = find_optimizer(optimizer)
    if chosen.by_shape:
        module = "update" if by_region else ""
        alone = [weight for weight in dense if _is_updated_alone(chosen, weight)]
        update_by_shape(tape, chosen.name, [weight.stored for weight in alone], module=module)
        dense = [weight for weight in dense if not _is_updated_alone(chosen, weight)]
        weights = dense
        tape.module = "update.ends" if by_region else ""
        if chosen.others:
            chosen = find_optimizer(chosen.others)
    if rows and not chosen.sparse_rows:
        raise ValueError(
            f"optimizer is {optimizer!r}; it updates no single rows of tables; take 'sgd', or dense "
            "gradients"
        )
    if lists or fused:  # single rows come last, in the order in which their gradients were computed
        if dense:
            _update_dense(tape, dense, chosen, "fused" if fused else "for_each")
        for weight in reversed(rows):
            _update_rows(tape, weight)
        return
    for weight in weights:
        if weight.row_update is not None:
            _update_rows(tape, weight)
        else:
            _update_dense(tape, [weight], chosen, "eager")


def _is_updated_alone(optimizer: Optimizer, weight: Weight) -> bool:
    """Whether an optimizer updates a weight by the operations of its shape."""
    return optimizer.updates_alone(weight.shape, is_hidden=weight.layer is not None)


def update_in_backward(tape: Tape, optimizer: str, form: str, weight: Weight) -> None:
    """Update a weight as soon as its gradient is complete, and free this: the weight has an optimizer
    of its own, which a hook of the backward pass runs."""
    module, calls = tape.module, tape.calls
    tape.phase, tape.module, tape.calls = "update", "", Calls.EACH
    _update_dense(tape, [weight], find_optimizer(optimizer), form, in_backward=True)
    weight.gradient = None
    tape.phase, tape.module, tape.calls, tape.layer = "backward", module, calls, weight.layer


def update_one_by_one(tape: Tape, optimizer: str, form: str) -> None:
    """Update each weight by an optimizer of its own, with modules ``update.layers`` and
    ``update.ends``."""
    for weight in tape.trained:
        tape.module = "update.ends" if weight.layer is None else "update.layers"
        _update_dense(tape, [weight], find_optimizer(optimizer), form, in_backward=True)
    tape.module = ""


def _update_rows(tape: Tape, weight: Weight) -> None:
    """Add the gradients of the looked-up rows of a table to these rows, if only these are updated."""
    if weight.row_update is not None:
        gradient = tape.find_gradient(weight)
        tape.emit("add_", "embedding_update", [gradient], [], weight.row_update, variant="sparse")


def finish(
    tape: Tape, model: Any, *, ranks: int, lists: bool, groups: tuple[tuple[int, ...], ...] = ()
) -> OpenGraph:
    """Record the backward pass and the update; gradients are averaged unless it reduces them.
    Returns the graph."""
    tape.backward()
    if ranks > 1 and not tape.overlap:
        average(tape)
    step(tape, model.optimizer, lists=lists, fused=model.fused)
    return make_open_graph(
        tape,
        name=model.name,
        family=model.family,
        dtype=model.dtype,
        ranks=ranks,
        groups=groups,
        optimizer=getattr(model, "table_optimizer", model.optimizer),
        updated_by=model.optimizer,
    )


def _update_dense(
    tape: Tape,
    weights: Sequence[Weight],
    optimizer: Optimizer,
    form: str,
    *,
    in_backward: bool = False,
) -> None:
    """Run the operations of an optimizer on a dense weight or on a list of them; one that is updated
    `in_backward` is a list of its own, which belongs to its layer."""
    listed = form != "eager" and not in_backward
    stored = [weight.stored for weight in weights]
    count, elements = _count(tape, stored) if listed else (1, stored[0].numel)
    tensors: dict[str, list[Tensor]] = {
        "weight": stored,
        "gradient": [tape.find_gradient(tensor) for tensor in stored],
    }
    for operation in optimizer.operations(form):
        for operand in operation.reads + operation.writes:
            if operand not in tensors:
                tensors[operand] = _make_operands(tape, optimizer, operand, stored)
        reads = [*chain.from_iterable(tensors[operand] for operand in operation.reads)]
        writes = [*chain.from_iterable(tensors[operand] for operand in operation.writes)]
        tape.layer = None if listed else stored[0].layer
        size = count if operation.counts_steps else elements
        sizes = OperationSizes(elements=size)
        launches = count if operation.one_weight_each else 1
        tape.bare += launches - 1  # each is a call
        tape.emit(
            operation.name,
            "elementwise",
            reads,
            writes,
            sizes,
            variant=operation.variant,
            launches=launches,
        )
    tape.layer = None
    if listed:
        _note_owners(tape, weights, tensors)


def _note_owners(
    tape: Tape, weights: Sequence[Weight], tensors: Mapping[str, Sequence[Tensor]]
) -> None:
    """Note the modules of the operands of a list-wise update.

    Gradients are left out: averaged ones of several modules share a storage.
    """
    for operand, of_weights in tensors.items():
        if operand not in ("gradient", "one"):
            for weight, tensor in zip(weights, of_weights, strict=True):
                tape.owners[tensor.storage] = weight.module


def _make_operands(
    tape: Tape, optimizer: Optimizer, operand: str, weights: Sequence[Tensor]
) -> list[Tensor]:
    """New tensors for an operand of an update: states, step counters and intermediate results."""
    if operand == "one":
        tape.layer = None
        return [tape.tensor(1, itemsize=_COUNTER)]
    made = []
    for weight in weights:
        tape.layer = weight.layer
        if operand == "step":
            made.append(tape.tensor(1, itemsize=_COUNTER))
        elif operand in SCALES:
            blocks = -(-weight.numel // QUANTIZED_BLOCK)
            made.append(tape.tensor(blocks, itemsize=SCALE_ITEMSIZE))
        else:
            itemsize = int(optimizer.find_itemsize(operand, weight.itemsize))
            made.append(tape.tensor(*weight.shape, itemsize=itemsize))
    return made


def _count(tape: Tape, weights: Sequence[Tensor]) -> tuple[int, Any]:
    """How many weights of all layers the recorded ones represent, and how many numbers these
    have."""
    counts = [tape.repeats if weight.layer == tape.middle else 1 for weight in weights]
    return sum(counts), sum(
        weight.numel * count for weight, count in zip(weights, counts, strict=True)
    )


def make_graph(tape: Tape, **about: Any) -> Graph:
    """The graph of what a tape has recorded with numbers, or with arrays of sizes: features and
    bytes of accesses have another axis then. `about` holds further fields, such as its name."""
    return make_open_graph(tape, **about).fill()


class _Rows(NamedTuple):
    """What a tape has recorded, in columns.

    Parameters
    ----------
    labels : sequence of Label
        Of every operation.
    features : Features
        A row of the table of sizes for each feature and operation.
    accesses : Accesses
        What operations read and write; in place of bytes, rows of the table of sizes.
    buckets : sequence of (int or None)
        Of every operation that reduces one gradient of a bucket, the number of the module in whose
        buckets that is [-].
    """

    labels: Sequence[Label]
    features: Features
    accesses: Accesses
    buckets: Sequence[int | None]


def make_open_graph(tape: Tape, **about: Any) -> OpenGraph:
    """The graph of what a tape has recorded, whose sizes may be symbolic.

    The layer that represents several ones is repeated, and gradients are reduced in buckets. `about`
    holds further fields of the graph, such as its name.
    """
    sizes = SizeTable()
    rows = _list_rows(tape, sizes)
    weights = _list_weights(tape)
    owners = Owners.from_rows([*tape.owners.items()])
    if tape.repeats > 1:
        layout = _lay_out_storages(tape)
        owners = _repeat_owners(tape, layout)
        rows = _repeat(rows, tape, layout)
        weights = _repeat_weights(weights, tape, layout)
    noted: Sequence[LaunchWait] = tape.waits
    if any(weight.bucket is not None for weight in tape.weights):
        rows, noted = _reduce(rows, sizes, noted, grouped=tape.grouped)
    unknown = np.broadcast_to(np.nan, len(rows.labels))
    frame = Graph(
        tuple(rows.labels),
        Features(**dict.fromkeys(FEATURES, unknown)),
        replace(rows.accesses, nbytes=np.broadcast_to(np.nan, len(rows.accesses))),
        tuple(tape.tables),
        _count(tape, tape.trained)[1],
        untouched=_measure_untouched(tape),
        weights=weights,
        owners=owners,
        waits=_list_waits(rows.labels, noted) if tape.overlap or tape.looks_back else None,
        **about,
    )
    if frame.dtype == "fp8":  # only products are
        formats = ("fp8" if label.name in FP8_PRODUCTS else "bf16" for label in rows.labels)
        frame = replace(frame, dtypes=tuple(formats))
    elif tape.updates_in_bf16 and frame.dtype not in ("bf16", "fp16"):
        formats = (_name_format(label, frame.dtype) for label in rows.labels)
        frame = replace(frame, dtypes=tuple(formats))
    return OpenGraph(frame, sizes, rows.features, rows.accesses)


def _name_format(label: Label, dtype: str) -> str:
    """The format of an operation of an iteration in `dtype` whose updates have products in bf16."""
    if label.phase == "update" and label.kind == "gemm":
        return "bf16"
    return dtype


def _list_rows(tape: Tape, sizes: SizeTable) -> _Rows:
    """The operations of a tape in columns; their sizes are added to the table."""
    work = [operation.sizes for operation in tape.operations]
    host_calls = [operation.host_calls for operation in tape.operations]
    features = Features(
        **_number_sizes(OperationSizes._fields, work, sizes),
        **_number_sizes(HostCalls._fields, host_calls, sizes),
    )
    positions: list[int] = []
    touched: list[RecordedAccess] = []
    for position, operation in enumerate(tape.operations):
        positions += [position] * len(operation.accesses)
        touched += operation.accesses
    accesses = Accesses(
        operation=np.array(positions, dtype=np.intp),
        buffer=np.array([access.storage for access in touched], dtype=np.intp),
        nbytes=np.array(sizes.add_all(access.nbytes for access in touched), dtype=np.intp),
        is_write=np.array([access.is_write for access in touched], dtype=bool),
    )
    return _Rows(
        labels=[operation.label for operation in tape.operations],
        features=features,
        accesses=accesses,
        buckets=[operation.bucket for operation in tape.operations],
    )


def _number_sizes(
    names: Sequence[str], records: Sequence[tuple[Size, ...]], sizes: SizeTable
) -> dict[str, np.ndarray]:
    """For each field of the records of all operations, the rows of the table in which its values
    are."""
    numbers = sizes.add_all(chain.from_iterable(records))
    columns = np.array(numbers, dtype=np.intp).reshape(len(records), len(names)).T.copy()
    return dict(zip(names, columns, strict=True))


def _list_weights(tape: Tape) -> Weights:
    """Weights outside of layers, and what a rank stores of frozen ones, which no update touches."""
    rows = []
    for weight in tape.weights:
        if weight.layer is None:
            rows.append((weight.storage, weight.table is not None))
        is_listed = weight.layer is None and weight.shard is None
        if not weight.needs_gradient and not is_listed:
            rows.append((weight.stored.storage, False))
    return Weights.from_rows(rows)


def _measure_untouched(tape: Tape) -> float:
    """Bytes of frozen weights outside of layers that no operation reads as a whole [B]."""
    touched = {access.storage for step in tape.operations for access in step.accesses}
    nbytes = 0.0
    for weight in tape.weights:
        if not weight.needs_gradient and weight.stored.storage not in touched:
            nbytes += float(weight.stored.nbytes)
    return nbytes


class _StorageLayout(NamedTuple):
    """Where the storages of repeated layers are: first those of no layer, then those of one layer
    after the other.

    Parameters
    ----------
    is_outside : array of bool
        Whether each storage is of no layer.
    layer : array of int
        Layer of each storage; 0 where it is of none [-].
    number : array of int
        Number of each storage among those of its layer, or of no layer [-].
    outside, inside : int
        Storages of no layer, and most storages of a layer [-].
    """

    is_outside: np.ndarray
    layer: np.ndarray
    number: np.ndarray
    outside: int
    inside: int


def _lay_out_storages(tape: Tape) -> _StorageLayout:
    """Number the storages of each layer of a tape."""
    counts: dict[int | None, int] = {}  # storages of each layer so far
    number = []
    for layer in tape.storage_layers:
        number.append(counts.get(layer, 0))
        counts[layer] = number[-1] + 1
    outside = counts.pop(None, 0)
    return _StorageLayout(
        is_outside=np.array([layer is None for layer in tape.storage_layers]),
        layer=_number_layers(tape.storage_layers),
        number=np.array(number),
        outside=outside,
        inside=max(counts.values()),
    )


def _number_layers(layers: Sequence[int | None]) -> np.ndarray:
    """Numbers of layers as an array, with 0 for no layer."""
    return np.array([0 if layer is None else layer for layer in layers])


def _repeat(recorded: _Rows, tape: Tape, layout: _StorageLayout) -> _Rows:
    """Repeat the second layer, each time with new storages."""
    layers_of_operations = [operation.layer for operation in tape.operations]
    operations = _unroll(layers_of_operations, tape.repeats)
    positions = np.arange(len(operations.row))
    # where each recorded operation stands in each layer; one that is not repeated, in all of them
    position = np.empty((len(layers_of_operations), tape.repeats + 3), dtype=int)
    position[operations.row] = positions[:, None]
    position[operations.row, operations.layer] = positions

    layers_of_accesses = [
        access.layer for operation in tape.operations for access in operation.accesses
    ]
    unrolled = _unroll(layers_of_accesses, tape.repeats)
    accesses = recorded.accesses.select(unrolled.row)
    recorded_layer = _number_layers(layers_of_accesses)[unrolled.row]
    # a layer may read a storage of another one, which is as far away in each layer
    layer_of_storage = unrolled.layer + layout.layer[accesses.buffer] - recorded_layer
    first_of_layer = layout.outside + layer_of_storage * layout.inside
    first = np.where(layout.is_outside[accesses.buffer], 0, first_of_layer)
    accesses = replace(
        accesses,
        operation=position[accesses.operation, unrolled.layer],
        buffer=layout.number[accesses.buffer] + first,
    )

    labels, buckets = [], []
    renamed: dict[tuple[Label, int], Label] = {}  # many operations of a layer have the same label
    for row, layer in zip(operations.row.tolist(), operations.layer.tolist(), strict=True):
        label, recorded_as = recorded.labels[row], layers_of_operations[row]
        if recorded_as is not None and layer != recorded_as:
            key = (label, layer)
            if key not in renamed:
                module = _rename_module(label.module, recorded_as, layer)
                renamed[key] = Label(label.name, label.kind, label.variant, label.phase, module)
            label = renamed[key]
        labels.append(label)
        buckets.append(recorded.buckets[row])
    return _Rows(labels, recorded.features.select(operations.row), accesses, buckets)


def _repeat_owners(tape: Tape, layout: _StorageLayout) -> Owners:
    """Modules of tensors that are updated in lists, for each of the layers that one represents."""
    buffers: list[int] = []
    modules: list[str] = []
    names: dict[str, list[str]] = {}  # of a recorded module, in all layers that it represents
    for storage, module in tape.owners.items():
        recorded, number = tape.storage_layers[storage], int(layout.number[storage])
        if recorded is None:
            buffers.append(number)
            modules.append(module)
            continue
        layers = _list_layers(recorded, tape.repeats)
        if module not in names:
            names[module] = [_rename_module(module, recorded, layer) for layer in layers]
        modules += names[module]
        buffers += [number + layout.outside + layer * layout.inside for layer in layers]
    return Owners(np.array(buffers, dtype=np.intp), tuple(modules))


def _repeat_weights(weights: Weights, tape: Tape, layout: _StorageLayout) -> Weights:
    """The same weights, those of a layer for each of the layers that it represents."""
    rows: list[tuple[int, bool]] = []
    for storage, is_table in zip(weights.buffer.tolist(), weights.is_table.tolist(), strict=True):
        recorded, number = tape.storage_layers[storage], int(layout.number[storage])
        if recorded is None:
            rows.append((number, is_table))
            continue
        for layer in _list_layers(recorded, tape.repeats):
            rows.append((number + layout.outside + layer * layout.inside, is_table))
    return Weights.from_rows(rows)


def _rename_module(module: str, recorded: int, layer: int) -> str:
    """The module of a `layer` that is called `module` in the recorded one."""
    return module.replace(f"layers.{recorded}", f"layers.{layer}", 1)


def _list_layers(recorded: int, repeats: int) -> range:
    """Numbers of the layers that a recorded one represents: the second one stands for several."""
    if recorded == 0:
        return range(1)
    if recorded == 1:
        return range(1, repeats + 1)
    return range(repeats + recorded - 1, repeats + recorded)


class _Unrolled(NamedTuple):
    """What was recorded of one layer that represents several ones, in the order in which all run.

    Parameters
    ----------
    row : array of int
        Its position among what was recorded [-].
    layer : array of int
        Number of the layer for which it runs; 0 for no layer [-].
    """

    row: np.ndarray
    layer: np.ndarray


def _unroll(layers: Sequence[int | None], repeats: int) -> _Unrolled:
    """Repeat what is of the second layer, from the layers of all that was recorded; backward passes
    run in reverse."""
    is_repeated = np.array([layer == 1 for layer in layers], dtype=bool)
    changes = np.flatnonzero(np.diff(is_repeated, prepend=False, append=False))
    recorded = _number_layers(layers)
    rows, numbers, end_before = [], [], 0
    for start, end in changes.reshape(-1, 2).tolist():
        repeated_layers = np.arange(1, repeats + 1)
        is_forward = layers[start - 1] == 0
        if not is_forward:
            repeated_layers = repeated_layers[::-1]
        rows += [np.arange(end_before, start), np.tile(np.arange(start, end), repeats)]
        numbers += [recorded[end_before:start], np.repeat(repeated_layers, end - start)]
        end_before = end
    row = np.concatenate([*rows, np.arange(end_before, len(layers))])
    layer = np.concatenate([*numbers, recorded[end_before:]])
    is_behind = recorded[row] > 1
    return _Unrolled(row, np.where(is_behind, repeats + recorded[row] - 1, layer))


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
    for end, nbytes in enumerate(sizes, start=1):
        total += nbytes
        limit = later if buckets else first
        if total >= limit:
            buckets.append(slice(begin, end))
            begin, total = end, 0.0
    if begin < len(sizes):
        buckets.append(slice(begin, len(sizes)))
    return buckets


def _reduce(
    rows: _Rows, table: SizeTable, noted: Sequence[LaunchWait], *, grouped: bool
) -> tuple[_Rows, list[LaunchWait]]:
    """Reduce gradients in buckets as DistributedDataParallel does; each module has its own buckets,
    or a single one if they are `grouped`.

    A full bucket is reduced during the backward pass. The first copy back from it waits for that, or
    the update if they are `grouped`, which nothing copies. Buckets are filled in the order in which gradients are computed, as PyTorch does from the second
    iteration on. `noted` are the waits so far; all waits are returned with the operations.
    """
    features = rows.features
    pieces = np.flatnonzero([bucket is not None for bucket in rows.buckets])
    end = [label.phase for label in rows.labels].index("update")
    copies = np.arange(end - len(pieces), end)
    if grouped:
        copies = np.full(len(pieces), end)
    waits = [*noted]
    # the operation of which each one becomes a part
    into = np.arange(len(rows.labels))
    copied = 0
    for in_bucket in _list_buckets(rows, table, pieces, grouped=grouped):
        last = in_bucket[-1]
        into[in_bucket] = last
        features.nbytes[last] = table.add(sum(table[row] for row in features.nbytes[in_bucket]))
        waits.append(LaunchWait(copies[copied], last))
        copied += len(in_bucket)
    remains = into == np.arange(len(into))
    for piece in pieces[~remains[pieces]]:
        calls = table[features.bare[piece]] + table[features.bare[piece + 1]]
        features.bare[piece + 1] = table.add(calls)
    new = np.concatenate([[0], np.cumsum(remains)])
    moved = [
        wait._replace(operation=new[wait.operation], launch=new[wait.launch]) for wait in waits
    ]
    accesses = _merge_accesses(rows.accesses, pieces, new[into])
    remaining = np.flatnonzero(remains).tolist()
    reduced = _Rows(
        labels=[rows.labels[row] for row in remaining],
        features=features.select(remaining),
        accesses=accesses,
        buckets=[rows.buckets[row] for row in remaining],
    )
    return reduced, moved


def _list_buckets(
    rows: _Rows, table: SizeTable, pieces: np.ndarray, *, grouped: bool
) -> list[np.ndarray]:
    """The operations of each bucket: those among `pieces`, each of which reduces one gradient, that
    become one, module by module.

    Raises
    ------
    ValueError
        For symbolic sizes.
    """
    modules = np.array([rows.buckets[piece] for piece in pieces.tolist()])
    buckets = []
    for module in np.unique(modules).tolist():
        of_module = pieces[modules == module]
        sizes = [table[row] for row in rows.features.nbytes[of_module]]
        if any(isinstance(size, SymbolicSize) for size in sizes):
            raise ValueError(
                "sizes of weights are arrays, and which gradients share a bucket depends on them; "
                "take numbers, or pk.sweep"
            )
        if grouped:
            buckets.append(of_module)
        else:
            buckets += [of_module[members] for members in fill_buckets(sizes)]
    return buckets


def _merge_accesses(accesses: Accesses, pieces: np.ndarray, new_operations: np.ndarray) -> Accesses:
    """What operations read and write, by their new numbers: a bucket of pieces is read and then
    written."""
    of_piece = accesses.find_of(pieces)
    merged = replace(accesses, operation=new_operations[accesses.operation])
    order = np.lexsort([of_piece & accesses.is_write, merged.operation])
    return merged.select(order)


def _list_waits(labels: Sequence[Label], noted: Sequence[LaunchWait]) -> Waits:
    """Waits for collectives: those noted, and those for sharded weights.

    Gathered weights are unpacked in the order in which they are gathered. Reduced gradients are
    waited for before the next ones are packed, by the next micro-batch, and by the optimizer; those
    summed up over groups by the last alone.
    """
    collectives = np.flatnonzero([label.kind == "collective" for label in labels])
    launches = np.array([wait.launch for wait in noted], dtype=np.intp)

    def find(name: str) -> np.ndarray:
        """Positions of the operations of a name, without collectives whose wait was noted."""
        return np.setdiff1d(np.flatnonzero([label.name == name for label in labels]), launches)

    split, gather = find(_UNPACK), find("all_gather")
    scatter, add = find("reduce_scatter"), find("all_reduce")
    ends = []
    for position, label in enumerate(labels):
        unpacks_forward = label.name == _UNPACK and label.phase == "forward"
        if label.name == "chunk_cat" or label.phase == "update" or unpacks_forward:
            ends.append(position)
    after = np.array(ends, dtype=np.intp)[np.searchsorted(ends, scatter)]
    update = np.full_like(add, np.argmax([label.phase == "update" for label in labels]))
    waiting = np.array([wait.operation for wait in noted], dtype=np.intp)
    launched = np.concatenate([launches, gather, scatter, add])
    looks_back = np.zeros(len(launched), dtype=bool)
    looks_back[: len(noted)] = [wait.of_previous_iteration for wait in noted]
    return Waits(
        operation=np.concatenate([waiting, split, after, update]),
        collective=np.searchsorted(collectives, launched),
        of_previous_iteration=looks_back,
    )
