"""Parts of recommendation and language models, recorded on a tape: layers of
`perfkit.workloads.layer_types` with the casts of mixed precision, and exchanges between ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from perfkit.models.checkpoints import Checkpoint
from perfkit.models.distributions import distinct_rows
from perfkit.models.embedding import exact_backward_bytes, row_traffic
from perfkit.models.optimizers import find_optimizer
from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.fp8 import CAST_SCALED, RECIPES
from perfkit.workloads.layer_types import (
    Add,
    BatchedProduct,
    BinaryCrossEntropy,
    Cast,
    ChunkedCrossEntropy,
    Concatenate,
    Divide,
    Dropout,
    Embedding,
    EmbeddingBag,
    ExactEmbeddingUpdates,
    FusedEmbeddings,
    FusedEmbeddingUpdates,
    GroupedProduct,
    HashEmbeddingUpdates,
    LayerNorm,
    Linear,
    LinearFp8,
    LinearFrozen,
    LinearWithEpilogues,
    LinearWithoutBias,
    Multiply,
    NegativeLogLikelihood,
    PatchEmbedding,
    Relu,
    Repeat,
    RmsNorm,
    Rotate,
    Scale,
    Softmax,
    TableLookup,
    TakePairs,
    Tanh,
    start_backward,
)
from perfkit.workloads.managed_collisions import MANAGED_COLLISIONS
from perfkit.workloads.operations import CAST_ONCE, NT, Tensor, Weight
from perfkit.workloads.sizes import round_size
from perfkit.workloads.symbolic_sizes import SymbolicSize
from perfkit.workloads.tables import INDEX_BYTES, EmbeddingTable, count_bags, list_laws, take_part
from perfkit.workloads.tape import Calls, RecordedOperation, Tape, contiguous

#: Norms of rows by name, see `norm`.
NORMS = ("layer", "rms", "layer_weight", "layer_plain")


def cast(tape: Tape, x: Tensor, itemsize: int) -> Tensor:
    """The same numbers in another data type, or the tensor itself if it has this type already."""
    if x.itemsize == itemsize:
        return x
    return tape.apply(Cast(itemsize), x)


def linear(
    tape: Tape, x: Tensor, weight: Weight, bias: Weight | None = None, *, fp8: bool = False
) -> Tensor:
    """Linear layer; its weight (outputs × inputs) is cast once in an iteration. Products may run in
    `fp8`."""
    x = cast(tape, x, tape.itemsize)
    if weight.frozen_format is not None:
        frozen = [weight] if bias is None else [weight, _narrow(tape, bias)]
        return tape.apply(LinearFrozen(weight.frozen_format), x, *frozen)
    operands = [x, _narrow(tape, weight)]
    if bias is not None:
        operands.append(_narrow(tape, bias))
    if fp8:
        return tape.apply(LinearFp8(), *operands)
    if bias is None:
        return tape.apply(LinearWithoutBias(), *operands)
    return tape.apply(Linear(), *operands)


def embed_patches(tape: Tape, images: Tensor, weight: Weight, bias: Weight, places: Any) -> Tensor:
    """Vectors of so many patches of each image: a convolution, whose operands are cast as those of
    products."""
    images = cast(tape, images, tape.itemsize)
    narrow, narrow_bias = _narrow(tape, weight), _narrow(tape, bias)
    return tape.apply(PatchEmbedding(places), images, narrow, narrow_bias)


def add_adapter(tape: Tape, rank: int, x: Tensor, y: Tensor) -> Tensor:
    """The result `y` of a linear layer plus that of its low-rank adapter (LoRA, arXiv:2106.09685,
    section 4.1): a product to `rank` columns and one back, times a number."""
    down = tape.parameter(rank, x.shape[-1], is_adapter=True)
    up = tape.parameter(y.shape[-1], rank, is_adapter=True)
    adapted = tape.apply(Scale(), linear(tape, linear(tape, x, down), up))
    return tape.apply(Add(), y, adapted)


def _narrow(tape: Tape, weight: Weight) -> Tensor:
    """A weight in the data type of products, cast at its first use in a micro-batch."""
    if weight.narrow is None:
        weight.narrow = cast(tape, weight, tape.itemsize)
    return weight.narrow


class MLPParallelism(NamedTuple):
    """How ranks share MLPs; by default each has a copy.

    Parameters
    ----------
    tensor : int
        Ranks of a group that share products [-].
    group, replicas : int
        Number of this group, and of the group that averages the gradients of what it shares; None
        for no group [-].
    layers : iterator of int
        Number of each layer whose weights are sharded, in the order of use; None for others [-].
    open_unit : callable
        Makes the weights of a layer ready for what is recorded inside.
    """

    tensor: int = 1
    group: int = 0
    replicas: int | None = 0
    layers: Iterator[int | None] = repeat(None)
    open_unit: Callable[[int | None], Any] = nullcontext


def mlp(
    tape: Tape, x: Tensor, widths: Sequence[int], shared: MLPParallelism, *, last_relu: bool
) -> Tensor:
    """Linear layers with rectifiers between them, and behind the last one if `last_relu`.

    If ranks share products, a pair of layers is split by columns and then by rows: its ranks gather
    the samples of their group ahead of it and sum up their parts behind it. A last layer without a
    partner is copied.
    """
    gather, add_up = ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")
    swap = partial(exchange, tape, group=shared.group, whole=True)
    for index, (width, layer) in enumerate(zip(widths, shared.layers, strict=False)):
        tape.layer = layer
        is_last, is_second_of_pair = index + 1 == len(widths), index % 2 == 1
        parts = shared.tensor if is_second_of_pair or not is_last else 1
        if parts > 1 and not is_second_of_pair:
            width //= parts
            x = cast(tape, x, tape.itemsize)
            [x] = swap(x, parts * x.shape[0], x.shape[1:], parts * x.nbytes, operations=gather)()
        with shared.open_unit(layer):
            weight, bias = tape.parameter(width, x.shape[-1]), tape.parameter(width)
            if parts > 1:
                for trained in (weight, bias):
                    if trained.shard is None:  # replicas average what is not in shards
                        trained.group = shared.replicas
            x = linear(tape, x, weight, bias)
        if parts > 1 and is_second_of_pair:
            [x] = swap(x, x.shape[0] // parts, x.shape[1:], x.nbytes, operations=add_up)()
        if last_relu or not is_last:
            x = tape.apply(Relu(), x)
    tape.layer = None
    return x


def mlp_with_epilogues(tape: Tape, x: Tensor, widths: Sequence[int], *, last_relu: bool) -> Tensor:
    """As `mlp` on ranks that do not share it, but products compute bias, rectifier and their
    gradients, see `LinearWithEpilogues`."""
    below = None
    for index, width in enumerate(widths):
        is_last = index + 1 == len(widths)
        weight, bias = tape.parameter(width, x.shape[-1]), tape.parameter(width)
        layer = LinearWithEpilogues(below, has_relu=last_relu or not is_last, is_last=is_last)
        x = tape.apply(layer, x, weight, bias)
        below = layer
    return x


def norm(tape: Tape, kind: str, x: Tensor) -> Tensor:
    """Norm of each row, one of `NORMS`: ``rms`` (root mean square) with a weight; or ``layer`` with
    trained weight and bias, ``layer_weight`` with a weight alone, ``layer_plain`` with neither."""
    width = x.shape[-1]
    if kind == "layer_plain":
        return tape.apply(LayerNorm(), cast(tape, x, tape.wide))
    weight = tape.parameter(width)
    if kind == "rms":
        return tape.apply(RmsNorm(), cast(tape, x, tape.wide), weight)
    if kind == "layer_weight":
        return tape.apply(LayerNorm(), cast(tape, x, tape.wide), weight)
    bias = tape.parameter(width)
    return tape.apply(LayerNorm(), cast(tape, x, tape.wide), weight, bias)


def dropout(tape: Tape, share: float, x: Tensor) -> Tensor:
    """Set a random share of the numbers to zero; a mask says which ones."""
    return tape.apply(Dropout(), x) if share else x


def rotate(tape: Tape, x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs of numbers are complex fp32 numbers, multiplied by the angle of their
    position."""
    rotated = tape.apply(Rotate(), cast(tape, x, 4), angles)
    return cast(tape, rotated, x.itemsize)


def bmm(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """Batched product of (batch, m, k) with (batch, k, n)."""
    return tape.apply(BatchedProduct(), cast(tape, a, tape.itemsize), cast(tape, b, tape.itemsize))


def multiply_groups(tape: Tape, x: Tensor, weights: Tensor, *, fp8: bool = False) -> Tensor:
    """Products of experts: rows (experts, rows, k) with weights (experts, k, n), perhaps in `fp8`."""
    x, weights = cast(tape, x, tape.itemsize), cast(tape, weights, tape.itemsize)
    return tape.apply(GroupedProduct(fp8=fp8), x, weights)


def cap(tape: Tape, x: Tensor) -> Tensor:
    """Numbers that a hyperbolic tangent keeps within a cap: divided by it, and multiplied again
    (Gemma 2, arXiv:2408.00118, section 2)."""
    return tape.apply(Scale(), tape.apply(Tanh(), tape.apply(Divide(), x)))


def count_views(tape: Tape, count: int) -> None:
    """Count views of tensors: so many calls without a kernel forward, and as many backward."""

    def backward() -> None:
        tape.bare += count - 1  # the node itself is one more

    tape.bare += count
    tape.node(backward)


def recompute(
    tape: Tape, run: Callable[[Tensor], Tensor], x: Tensor, checkpoint: Checkpoint
) -> Tensor:
    """Layers that compute again in the backward pass what `checkpoint` says, up to the last result
    that it needs; with ``full`` they keep only their input."""
    nodes, mark = len(tape.nodes), tape.mark_weights()
    begin = len(tape.operations)
    y = run(x)
    forward = tape.operations[begin:]
    del tape.nodes[nodes:]
    for weight in tape.list_weights_since(mark):
        weight.due = 0
        weight.narrow = None

    def backward() -> None:
        tape.reuse_weights(mark)
        tape.calls = Calls.EACH
        begin, first_storage = len(tape.operations), len(tape.storage_layers)
        again = run(x)
        again.root.gradient, y.root.gradient = y.root.gradient, None
        repeated = tape.operations[begin:]
        del tape.operations[begin:]
        needed = len(repeated) - count_unneeded([one.label.name for one in repeated])
        del repeated[needed:]
        if checkpoint.keeps_input_alone:
            tape.operations += repeated
        else:
            _take_saved(tape, forward, repeated, first_storage, checkpoint)

    tape.node(backward)
    return y


def count_unneeded(names: Sequence[str]) -> int:
    """Count the operations at the end of a layer that need not run again: the backward pass of a sum or
    a product does not need its result.

    Parameters
    ----------
    names : sequence of str
        Operations of the forward pass of a layer. Behind its last product is the residual sum, and with
        an adapter its scale and another sum.

    Returns
    -------
    count : int
        The last ones that are left out [-].
    """
    left = list(names)
    for name in ("add", "add", "mul", "mm"):
        if left[-1].endswith(name):
            left.pop()
    return len(names) - len(left)


def _take_saved(
    tape: Tape,
    forward: Sequence[RecordedOperation],
    repeated: Sequence[RecordedOperation],
    first_storage: int,
    checkpoint: Checkpoint,
) -> None:
    """Record those of the `repeated` operations of a layer that run again. What the others would
    write is there from the `forward` pass, and so is what nothing writes, as angles of positions.

    Storages of the repeated layer are numbered from `first_storage` on.
    """
    # weights in fp8 for all micro-batches are there already
    before = [operation for operation in forward if operation.label.name != CAST_ONCE]
    run_again = _find_computed_again(repeated, checkpoint)
    made_again: set[int] = set()
    for operation in run_again:
        made_again.update(access.storage for access in operation.accesses if access.is_write)
    for first, second in zip(before[: len(repeated)], repeated, strict=True):
        for made, repeat_of_it in zip(first.accesses, second.accesses, strict=True):
            storage = repeat_of_it.storage
            if storage < first_storage or storage in made_again or storage == made.storage:
                continue
            tape.saved[storage] = made.storage
    for operation in run_again:
        if checkpoint.saves_products and operation.label.name == CAST_SCALED:
            _take_saved_scale(operation)
        accesses = []
        for access in operation.accesses:
            storage = tape.saved.get(access.storage, access.storage)
            accesses.append(access._replace(storage=storage))
        operation.accesses = accesses
    if checkpoint.saves_products and run_again:
        # PyTorch saves these results whether they are read or not
        again = _choose_computed_again(before, checkpoint)
        for operation, is_again in zip(before, again, strict=True):
            for access in operation.accesses:
                if access.is_write and not is_again:
                    held = access._replace(nbytes=0.0, is_write=False)
                    run_again[0].accesses.append(held)
    tape.operations += run_again


def _take_saved_scale(cast: RecordedOperation) -> None:
    """Let a cast to fp8 that runs again take the scale of its whole operand from the forward pass:
    it finds none, so that it is one kernel, as a cast with a known scale.

    Scales of rows and blocks are found in the pass that casts.
    """
    of_whole_operand = RECIPES["tensorwise"].cast
    if cast.label.variant != of_whole_operand.variant:
        return
    cast.label = cast.label._replace(name="_to_copy", variant="_to_copy")
    passes_for_scale = of_whole_operand.kernels - 1
    cast.accesses = cast.accesses[passes_for_scale:]
    launches = cast.host_calls.launches - passes_for_scale
    cast.host_calls = cast.host_calls._replace(launches=launches)


def _find_computed_again(
    repeated: Sequence[RecordedOperation], checkpoint: Checkpoint
) -> list[RecordedOperation]:
    """Find the operations of a layer that run again, with the calls of those between them that are
    saved, where the whole layer is called."""
    run_again = []
    calls = 0.0
    again = _choose_computed_again(repeated, checkpoint)
    for operation, is_again in zip(repeated, again, strict=True):
        host_calls = operation.host_calls
        if is_again:
            operation.host_calls = host_calls._replace(bare=host_calls.bare + calls)
            calls = 0.0
            run_again.append(operation)
        elif checkpoint.runs_whole_layer:
            calls += host_calls.bare + host_calls.calls
    return run_again


def _choose_computed_again(
    operations: Sequence[RecordedOperation], checkpoint: Checkpoint
) -> list[bool]:
    """Whether each operation of the forward pass of a layer runs again."""
    chosen = []
    products = 0
    for operation in operations:
        is_product = operation.label.kind == "gemm"
        products += is_product
        if not checkpoint.saves_products:
            chosen.append(bool(set(operation.parts) & set(checkpoint.parts)))
        elif is_product:
            chosen.append(products % 2 == 0)
        else:
            is_attention = operation.label.kind == "attention"
            chosen.append(not is_attention and operation.label.name != "reduce_scatter")
    return chosen


def eager_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    causal: bool,
    drop: float,
    capped: bool = False,
) -> Tensor:
    """Attention that stores the scores, perhaps `capped`; heads are copied together, as matmul does
    with permuted views."""
    batch, sequence, hidden = q.shape
    if np.any(k.shape[-1] != hidden):  # several heads of queries share a head of keys and values
        k = tape.apply(Repeat(batch, sequence, hidden), k)
        v = tape.apply(Repeat(batch, sequence, hidden), v)
    count, width = batch * heads, hidden // heads
    q = _regroup(tape, q, width, count, sequence, width)
    v = _regroup(tape, v, width, count, sequence, width)
    k = _regroup(tape, k, width, count, width, sequence, lazy=True)
    scores = tape.apply(Scale(), bmm(tape, contiguous(tape, q), contiguous(tape, k)))
    if capped:
        scores = cap(tape, scores)
    if causal:
        scores = tape.apply(Add(), scores, tape.share_mask(sequence))
    probabilities = tape.apply(Softmax(), cast(tape, scores, tape.wide))
    probabilities = dropout(tape, drop, probabilities)
    mixed = bmm(tape, probabilities, contiguous(tape, v))
    return contiguous(tape, _regroup(tape, mixed, width, batch, sequence, hidden), width)


def _regroup(tape: Tape, x: Tensor, run: Any, *shape: Any, lazy: bool = False) -> Tensor:
    """A permuted view; its gradient is copied back in order at once, or (`lazy`) by the operation
    that reads it."""
    out = Tensor(x.storage, shape, x.itemsize, x.needs_gradient, x.layer)

    def backward() -> None:
        gradient = tape.gradient(out).view(*x.shape)
        if lazy:
            tape.strided.add(gradient.storage)
        tape.pass_on(x, gradient if lazy else contiguous(tape, gradient, run))

    if x.needs_gradient:
        tape.node(backward)
    return out


def cat(tape: Tape, parts: list[Tensor]) -> Tensor:
    """Concatenation along the last dimension; gradients are slices of one tensor."""
    if len(parts) == 1:
        return parts[0]
    return tape.apply(Concatenate(), *parts)


# -- interactions
# ----------------------------------------------------------------------------------------------------


def dot(tape: Tape, x: Tensor, dense: Tensor) -> Tensor:
    """Products of all pairs of vectors of a sample, gathered by index and appended to its dense
    vector.

    On a GPU the backward pass sorts the indices to add without conflicts.
    """
    n = x.shape[1]
    pairs = n * (n - 1) // 2
    count_views(tape, 2)  # vectors by sample, and these transposed
    rows, columns = tape.tensor(pairs, itemsize=8), tape.tensor(pairs, itemsize=8)
    vectors = cast(tape, x, tape.itemsize)
    products = tape.apply(BatchedProduct(NT), vectors, vectors)
    return cat(tape, [dense, tape.apply(TakePairs(), products, rows, columns)])


def cross(tape: Tape, x: Tensor, layers: int, rank: int, shared: MLPParallelism) -> Tensor:
    """Low-rank cross layers: the first input times a projection to `rank` columns and back, plus
    the last result."""
    first, n = x, x.shape[-1]
    for _, layer in zip(range(layers), shared.layers, strict=False):
        tape.layer = layer
        with shared.open_unit(layer):
            bias = tape.parameter(n)
            narrow, wide = tape.parameter(rank, n), tape.parameter(n, rank)
            projected = linear(tape, linear(tape, x, narrow), wide)
            projected = tape.apply(Add(), projected, bias)
            x = tape.apply(Add(), tape.apply(Multiply(), first, projected), x)
    return x


# -- embeddings
# ------------------------------------------------------------------------------------------------------


def look_up(tape: Tape, weight: Tensor, indices: int, *leading: int) -> Tensor:
    """Lookup of `indices` rows of a table; the gradient is as large as the table."""
    index = tape.tensor(indices, itemsize=8)
    return tape.apply(Embedding(*leading), weight, index)


def embedding_bags(
    tape: Tape,
    model: Any,
    tables: Sequence[EmbeddingTable],
    bags: Any,
    *,
    copied: bool = False,
    unpooled: int = 0,
) -> list[Tensor]:
    """Sum-pooled lookups of tables, one bag for each sample.

    With ``separate`` embeddings each table is looked up by a kernel, and its gradient has one row
    per lookup or is as large as the table. Otherwise one kernel looks up all tables of a format. Its backward
    pass updates a row for each of its lookups (``fused``), or sorts the lookups and updates each
    distinct row once (``exact``; ``hash`` searches it in a hash table first). Tables that are `copied`
    to all ranks have gradients as large as themselves, which are averaged. Of the last `unpooled`
    tables, and of those that are not pooled, each row that is looked up is a result of its own. A
    sample has all pooled rows of a table with several features side by side.
    """
    lookups = []
    for position, table in enumerate(tables):
        weight = tape.parameter(table.rows, table.dim, itemsize=table.itemsize)
        weight.table = table
        if not copied:
            weight.group = None
        if weight.table_number is None:  # it is recorded for the first time
            weight.table_number = len(tape.tables)
            tape.tables.append(table)
        count = round_size(bags * table.pooling)
        offsets = count_bags(table, bags)
        results = _count_results(table, offsets, count)
        if position >= len(tables) - unpooled:
            offsets = results = count
        lookups.append(
            TableLookup(
                tape,
                weight,
                weight.table_number,
                count,
                results,
                offsets=offsets,
                weighted=table.weighted,
                number_format=table.number_format,
            )
        )
        if table.managed_collision:
            _remap_ids(tape, table, bags, lookups[-1])
    if model.embedding == "separate":
        sparse = model.sparse and not copied
        looked_up = [
            tape.apply(EmbeddingBag(lookup, sparse=sparse), lookup.weight) for lookup in lookups
        ]
    elif not lookups:
        return []
    else:
        looked_up = _record_kernels(tape, model, tables, lookups, bags, copied, unpooled)
    joined = []
    for table, pooled in zip(tables, looked_up, strict=True):
        joined.append(_join_features(table, pooled, bags))
    return joined


def _count_results(table: EmbeddingTable, bags: Any, lookups: Any) -> Any:
    """Rows that lookups give: their sums, or each of them; arrays say it of several tables."""
    is_pooled: Any = table.pooled
    if isinstance(is_pooled, np.ndarray):
        return np.where(is_pooled, bags, lookups)
    return bags if is_pooled else lookups


def _join_features(table: EmbeddingTable, pooled: Tensor, samples: Any) -> Tensor:
    """The pooled rows of all features of a table, those of a sample side by side."""
    is_pooled: Any = table.pooled
    one_feature = isinstance(table.num_features, int) and table.num_features == 1
    if one_feature or is_pooled is False:
        return pooled
    width: Any = table.num_features * table.dim
    if isinstance(is_pooled, np.ndarray):
        samples = np.where(is_pooled, samples, pooled.shape[0])
        width = np.where(is_pooled, width, table.dim)
    return pooled.view(samples, width)


def _record_kernels(
    tape: Tape,
    model: Any,
    tables: Sequence[EmbeddingTable],
    lookups: Sequence[TableLookup],
    bags: Any,
    copied: bool,
    unpooled: int,
) -> list[Tensor]:
    """Record kernels that look up all tables of a format, see `embedding_bags`."""
    if copied:
        return FusedEmbeddings(lookups).apply(tape)
    if model.embedding == "fused":
        return FusedEmbeddingUpdates(lookups).apply(tape)
    row_bytes = []
    for position, table in enumerate(tables):
        if position < len(tables) - unpooled:
            row_bytes.append(_find_traffic(exact_traffic, table, bags, model.table_optimizer))
        else:
            alone = take_part(table, pooling=1.0)
            row_bytes.append(
                _find_traffic(exact_traffic, alone, lookups[position].bags, model.table_optimizer)
            )
    if model.embedding == "hash":
        return HashEmbeddingUpdates(lookups, row_bytes).apply(tape)
    return ExactEmbeddingUpdates(lookups, row_bytes).apply(tape)


def _remap_ids(tape: Tape, table: EmbeddingTable, bags: Any, lookup: TableLookup) -> None:
    """Map the raw ids of lookups to rows of their table."""
    module = MANAGED_COLLISIONS[table.managed_collision]
    traffic = _find_traffic(remap_traffic, table, bags)
    touched = tape.tensor(traffic - 2 * INDEX_BYTES * lookup.lookups, itemsize=1)
    indices = lookup.inputs[0]
    tape.emit(
        module.name,
        "copy",
        [tape.like(indices), touched],
        [indices],
        OperationSizes(elements=lookup.lookups),
        variant="index",
        launches=module.launches,
    )
    for _ in range(module.host_waits):
        count = tape.tensor(1, itemsize=INDEX_BYTES)
        tape.emit("nonzero", "transfer", [count], [], OperationSizes(elements=1), variant="to_host")


def remap_traffic(table: EmbeddingTable, bags: Any) -> Any:
    """Bytes that move while the raw ids of all lookups are mapped to rows."""
    lookups = round_size(bags * table.pooling)
    module = MANAGED_COLLISIONS[table.managed_collision]
    return np.rint(module.count_traffic(lookups, _count_distinct(table, lookups)))


def _count_distinct(table: EmbeddingTable, lookups: Any) -> Any:
    """Distinct rows among lookups, which may be arrays."""
    shape = np.broadcast_shapes(np.shape(lookups), np.shape(table.rows))
    return distinct_rows(
        list_laws([table], sum(shape)), np.broadcast_to(lookups, shape or 1)
    ).reshape(shape)


def _find_traffic(count: Callable[..., Any], table: EmbeddingTable, bags: Any, *others: Any) -> Any:
    """What a function counts of a table and its bags, a symbolic size if the bags, rows or lookups are."""
    for size in (bags, table.rows, table.pooling):
        if isinstance(size, SymbolicSize):
            return size.expressions.add(count, table, bags, *others)
    return count(table, bags, *others)


def exact_traffic(table: EmbeddingTable, bags: Any, optimizer: str) -> Any:
    """Bytes moved by a sort and one update of each distinct row and its states, without the
    gradient of the output."""
    lookups, row = round_size(bags * table.pooling), row_traffic(table.row_bytes, 1.0, 32)
    unique = _count_distinct(table, lookups)
    whole = exact_backward_bytes(
        unique,
        bags,
        lookups,
        table.row_bytes,
        itemsize=1.0,
        weighted=1.0 * table.weighted,
    )
    state = find_optimizer(optimizer).row_state_bytes(row, 32.0)
    return np.rint(whole - bags * table.row_bytes + 2.0 * unique * state)


def exchange(
    tape: Tape,
    send: Tensor | None,
    batch: int,
    widths: Sequence[int],
    nbytes: float,
    *,
    operations: tuple[str, str] = ("all_to_all", "all_to_all"),
    group: int = 0,
    whole: bool = False,
) -> Callable[[], list[Tensor]]:
    """Launch an exchange of pooled rows; the returned function waits for a part of (batch, width)
    from each rank.

    `operations` are the collectives forward and backward. Rows that are sums of parts take
    ``reduce_scatter`` and ``all_gather``. The backward pass sends the gradients where the parts
    were waited for, and waits for them where the exchange was launched. The gradients of parts are
    slices, which are copied first, unless they are `whole`.
    """
    itemsize, wanted = (send.itemsize, send.needs_gradient) if send else (tape.wide, True)
    received = tape.tensor(batch * sum(widths), itemsize=itemsize, needs_gradient=wanted)
    sent = tape.collective(
        operations[0], [send] if send else [], [received], nbytes=nbytes, group=group
    )
    back = [tape.tensor(*send.shape, itemsize=itemsize)] if send else []
    parts = [
        Tensor(received.storage, (batch, width), itemsize, wanted) for width in widths if width
    ]
    launched: list[int] = []

    def accept() -> None:
        tape.wait_for(launched[0])
        if send:
            tape.pass_on(send, back[0])

    def backward() -> None:
        flat = tape.gradient(parts[0]) if whole else tape.tensor(received.numel, itemsize=itemsize)
        if not whole:
            gradients = [contiguous(tape, tape.gradient(part)) for part in reversed(parts)][::-1]
            tape.copy("cat", gradients, [flat], rows=len(parts))
        launched.append(tape.collective(operations[1], [flat], back, nbytes=nbytes, group=group))
        if not tape.overlap:
            accept()

    def receive() -> list[Tensor]:
        tape.wait_for(sent)
        if wanted:
            tape.node(backward)
        return parts

    if tape.overlap and wanted:
        tape.node(accept)
        if tape.delays_weights:  # they are computed while the gradients are on their way
            tape.node(tape.run_delayed)
    return receive


# -- losses
# ----------------------------------------------------------------------------------------------------------


def binary_cross_entropy(tape: Tape, logits: Tensor) -> None:
    """Mean binary cross entropy with logits."""
    logits = cast(tape, logits, tape.wide)
    labels = tape.like(logits)
    start_backward(tape, tape.apply(BinaryCrossEntropy(), logits, labels))


def chunked_cross_entropy(
    tape: Tape, x: Tensor, weight: Weight, *, chunks: int, itemsize: int, ranks: Any
) -> None:
    """Mean cross entropy of decoded tokens in pieces, from the input and the weight of the head."""
    layer = ChunkedCrossEntropy(chunks, itemsize=itemsize, ranks=ranks)
    start_backward(tape, tape.apply(layer, cast(tape, x, tape.itemsize), _narrow(tape, weight)))


def cross_entropy(tape: Tape, logits: Tensor, rows: int) -> Tensor:
    """Mean cross entropy of `rows` decoded tokens, as a loss."""
    labels, wide = tape.tensor(rows, itemsize=8), max(tape.wide, logits.itemsize)
    logarithms = tape.apply(Softmax(logarithm=True), logits.view(rows, logits.numel // rows))
    return tape.apply(NegativeLogLikelihood(), cast(tape, logarithms, wide), labels)


def add_losses(tape: Tape, losses: Sequence[Tensor]) -> None:
    """Let the backward pass start with the first loss, to which the others are added with a weight."""
    total = losses[0]
    for loss in losses[1:]:
        total = tape.apply(Add(), total, tape.apply(Scale(), loss))
    start_backward(tape, total)
