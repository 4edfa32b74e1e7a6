"""What makes an iteration of training of layers: embeddings, exchanges between ranks, losses and optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

from perfkit.models.distributions import unique_rows
from perfkit.models.embedding import STATE, exact_backward_bytes, row_traffic
from perfkit.workloads.layers import Layers
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import Tensor

__all__ = ["BUCKETS", "Training"]

#: Bytes at which DistributedDataParallel sends off the first bucket of gradients, and every later one [B].
BUCKETS = (2**20, 25 * 2**20)


#: Kernels of a sort by key with what prepares it, as where an index is put on a GPU.
_SORT = 10


class _Reducer:
    """Buckets of one DistributedDataParallel: the open one, those sent off, and gradients yet to come."""

    def __init__(self, due: int) -> None:
        self.due = due
        self.bucket: list[tuple[Tensor, Tensor]] = []
        self.launched: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []


def _exact_traffic(table: EmbeddingTable, bags: int, optimizer: str) -> int:
    """Bytes that a sort and one update of each distinct row with its states move, the gradient of the output aside."""
    lookups, row = round(bags * table.pooling), row_traffic(table.dim, table.itemsize, 32)
    unique = float(unique_rows(table.distribution, lookups))
    whole = exact_backward_bytes(unique, bags, lookups, table.dim, itemsize=table.itemsize)
    state = 32.0 if optimizer == "rowwise_adagrad" else STATE[optimizer] * row
    return round(whole - bags * table.dim * table.itemsize + 2.0 * unique * state)


class Training(Layers):
    """Layers with embedding tables, collectives, losses and optimizer steps.

    Parameters
    ----------
    itemsize : int
        Bytes of one element that products work on [B].
    mixed : bool
        Whether weights, and what is not a product, stay fp32 (autocast).
    reference : bool
        Whether to run as PyTorch did until 1.12.
    overlap : bool
        Whether collectives go on until they are waited for.
    compiled : bool
        Whether what lies between products happens inside them, or in one kernel.
    """

    # -- embeddings --------------------------------------------------------------------------------------------------

    def embedding_bag(self, table: EmbeddingTable, bags: int, *, sparse: bool) -> Tensor:
        """Sum-pooled lookup of one table, with a gradient of one row per lookup or as large as the table."""
        weight, index, out, sizes = self._look_up(table, bags, 8)
        self.emit("_embedding_bag", "embedding_forward", index, [out], **sizes)
        lookups = int(sizes["lookups"])

        def backward() -> None:
            g = self.tensor(lookups if sparse else table.rows, table.dim, itemsize=self.wide)
            reads, variant = [self.gradient(out), *index], "sparse" if sparse else "dense"
            own = {**sizes, "elements": g.numel, "rows": g.shape[0]}
            self.emit("_embedding_bag_backward", "embedding_backward", reads, [g], variant, **own)
            if sparse:
                self._sparse[weight] = {**own, "rows": lookups}
            self.arrive(weight, g)

        self.node(backward)
        return out

    def fused_embeddings(
        self, tables: Sequence[EmbeddingTable], bags: int, *, itemsize: int = 8, exact: str = "", dense: bool = False
    ) -> list[Tensor]:
        """Sum-pooled lookups of all tables by one kernel.

        The backward updates each row for each of its lookups; or, with an optimizer named by `exact`, sorts the lookups
        and updates each distinct row once; or makes a gradient as large as the table (`dense`).
        """
        found = [self._look_up(table, bags, itemsize) for table in tables]
        for number, (_, index, out, sizes) in enumerate(found):
            part = {} if number == 0 else {"launches": 0, "calls": 0}
            self.emit("fused_embeddings", "embedding_forward", index, [out], "fused", **sizes, **part)

        def backward() -> None:
            gradients = []
            for number, (weight, index, out, sizes) in enumerate(found):
                part, reads = {} if number == 0 else {"launches": 0}, [self.gradient(out), *index]
                variant = "dense" if dense else "exact" if exact else "fused"
                writes = [self.tensor(*weight.shape, itemsize=weight.itemsize)] if dense else []
                gradients += [(weight, g) for g in writes]
                if not dense:
                    self._updated.add(weight)
                if variant == "exact":  # all of it is traffic
                    reads.append(self.tensor(_exact_traffic(tables[number], bags, exact), itemsize=1))
                    sizes, part = {**sizes, "lookups": 0}, part or {"launches": _SORT}
                self.emit("fused_embeddings_backward", "embedding_backward", reads, writes, variant, **sizes, **part)
            for weight, gradient in gradients:
                self.arrive(weight, gradient)

        self.node(backward)
        return [out for _, _, out, _ in found]

    def _look_up(
        self, table: EmbeddingTable, bags: int, itemsize: int
    ) -> tuple[Tensor, list[Tensor], Tensor, dict[str, Any]]:
        """Weight, indices and offsets, pooled rows and sizes of a lookup."""
        lookups, number = round(bags * table.pooling), len(self.tables)
        self.tables.append(table)
        weight = self.parameter(table.rows, table.dim, itemsize=table.itemsize)
        self.local.add(weight)
        index = [self.tensor(lookups, itemsize=itemsize), self.tensor(bags, itemsize=itemsize)]
        sizes = {"lookups": lookups, "bags": bags, "dim": table.dim, "table": number, "elements": lookups * table.dim}
        return weight, index, self.tensor(bags, table.dim, itemsize=self.wide, grad=True), sizes

    def embedding(self, weight: Tensor, indices: int, *leading: int) -> Tensor:
        """Lookup of `indices` rows of a dense table; the gradient is as large as the table."""
        rows, dim = weight.shape
        self.use(weight)
        index = self.tensor(indices, itemsize=8)
        out = self.tensor(*leading, dim, itemsize=weight.itemsize, grad=True)
        sizes: dict[str, Any] = {"lookups": indices, "bags": indices, "dim": dim}
        self.emit("embedding", "rowwise", [index], [out], elements=out.numel, rows=indices, n=dim)

        def backward() -> None:
            g = self.tensor(rows, dim, itemsize=weight.itemsize)
            reads = [self.gradient(out), index]
            name = "embedding_dense_backward"
            self.emit(name, "embedding_backward", reads, [g], "dense_rows", elements=g.numel, rows=rows, **sizes)
            self.arrive(weight, g)

        self.node(backward)
        return out

    # -- collectives -------------------------------------------------------------------------------------------------

    def collective(
        self, operation: str, reads: Sequence[Tensor], writes: Sequence[Tensor], nbytes: float, *, group: int = 0
    ) -> int:
        """One collective of a communicator; `nbytes` is its size in the nccl-tests convention. Returns its number."""
        self.emit(operation, "collective", reads, writes, nbytes=nbytes, group=group)
        return sum(label[1] == "collective" for label in self._labels) - 1

    def exchange(
        self,
        send: Tensor | None,
        batch: int,
        widths: Sequence[int],
        nbytes: float,
        *,
        operations: tuple[str, str] = ("all_to_all", "all_to_all"),
        group: int = 0,
    ) -> Callable[[], list[Tensor]]:
        """Launch the exchange of pooled rows: one part of (batch, width) from every rank.

        The other operations are ``reduce_scatter`` and ``all_gather``, for rows that are sums of parts. What is
        returned waits for the parts; on the way back it sends off their gradients, which are waited for here.
        """
        received = self.tensor(batch * sum(widths), itemsize=self.wide, grad=True)
        number = self.collective(operations[0], [send] if send else [], [received], nbytes, group=group)
        back = [self.tensor(*send.shape, itemsize=self.wide)] if send else []
        parts = [Tensor(received.storage, (batch, width), self.wide, True) for width in widths if width]
        launched: list[int] = []

        def accept() -> None:
            self.wait(launched[0])
            if send:
                self.arrive(send, back[0])

        def backward() -> None:
            gradients = [self._clone(self.gradient(part)) for part in reversed(parts)][::-1]
            flat = self.tensor(received.numel, itemsize=self.wide)
            self.emit("cat", "copy", gradients, [flat], elements=flat.numel, rows=len(parts))
            launched.append(self.collective(operations[1], [flat], back, nbytes, group=group))
            if not self.overlap:
                accept()

        def receive() -> list[Tensor]:
            self.wait(number)
            self.node(backward)
            return parts

        if self.overlap:
            self.node(accept)
        return receive

    def all_reduce_gradients(self) -> None:
        """Average the dense gradients over ranks: flattened, reduced in one piece, divided."""
        dense = [w for w in self.trained if w not in self.local]
        flat = self.tensor(sum(w.numel for w in dense), itemsize=self.wide)
        self.emit("cat", "copy", [self._gradients[w] for w in dense], [flat], elements=flat.numel, rows=len(dense))
        self.collective("all_reduce", [flat], [flat], flat.nbytes)
        self.update("div_", flat)
        for weight in dense:
            self._gradients[weight] = flat.view(*weight.shape)

    def share_gradients(self, weights: Sequence[Tensor]) -> None:
        """Average the gradients of these weights over ranks as DistributedDataParallel does, one module of its own.

        Each is copied into a bucket as it arrives, a full bucket is reduced while the backward pass goes on, and at
        its end all are copied back. Buckets are filled in the order of arrival, as from the second iteration on. The
        copies are launched from inside the reducer, without a call of the framework's own.
        """
        reducer = _Reducer(len(weights))
        self._reducers |= dict.fromkeys(weights, reducer)

    def _keep(self, weight: Tensor) -> None:
        super()._keep(weight)
        reducer = self._reducers.get(weight)
        if reducer is None:
            return
        gradient = part = self._gradients[weight]
        if not self.compiled:  # which makes gradients where they are reduced
            part = self.tensor(*weight.shape, itemsize=weight.itemsize)
            self.emit("mul", "elementwise", [gradient], [part], "mul_scalar", elements=part.numel, calls=0)
        reducer.bucket.append((part, gradient))
        reducer.due -= 1
        parts = [own for own, _ in reducer.bucket]
        nbytes = sum(own.nbytes for own in parts)
        if not reducer.due or nbytes >= BUCKETS[bool(reducer.launched)]:
            reducer.launched.append((self.collective("all_reduce", parts, parts, nbytes), reducer.bucket))
            reducer.bucket = []

    def _finish(self) -> None:
        for reducer in dict.fromkeys(self._reducers.values()):
            for number, bucket in reducer.launched:
                self.wait(number)
                for part, gradient in bucket:
                    if part is not gradient:
                        rows = part.numel // part.shape[-1]
                        self.emit("copy_", "copy", [part], [gradient], elements=part.numel, rows=rows, calls=0)

    # -- losses and optimizers ---------------------------------------------------------------------------------------

    def binary_cross_entropy(self, logits: Tensor) -> None:
        """Mean binary cross entropy with logits; in the reference loop the sigmoid and the loss are apart."""
        logits = self.cast(logits, self.wide)
        labels, loss, one = (self.tensor(*shape, itemsize=self.wide) for shape in (logits.shape, (1,), (1,)))
        if self.reference:
            return self._separate_loss(logits, labels, loss, one)
        name = "binary_cross_entropy_with_logits"
        self.emit(name, "elementwise", [logits, labels], [loss], elements=logits.numel)

        def backward() -> None:
            probability = self.elementwise("sigmoid", [logits], logits)
            g = self.elementwise("sub", [probability, labels], logits)
            g = self.elementwise("mul", [g, one], logits)
            self.update("div_", g)
            self.arrive(logits, g)

        self.node(backward)
        self._seed(loss, one)

    def _seed(self, loss: Tensor, one: Tensor) -> None:
        """The gradient of the loss itself, which the backward pass starts with."""
        self.node(lambda: self.emit("ones_like", "copy", [loss], [one], "new_zeros", elements=1))

    def _separate_loss(self, logits: Tensor, labels: Tensor, loss: Tensor, one: Tensor) -> None:
        """Sigmoid, loss of every sample and mean; labels arrive late, loss and predictions are read at once."""
        scores = self.elementwise("sigmoid", [logits], logits)
        self.node(
            lambda: self.arrive(logits, self.elementwise("sigmoid_backward", [self.gradient(scores), scores], scores))
        )
        self.transfer("to_device", labels)
        losses = self.elementwise("binary_cross_entropy", [scores, labels], scores)
        self.emit("mean", "rowwise", [losses], [loss], elements=losses.numel, rows=1, n=losses.numel, calls=0)
        for tensor in (loss, scores):
            self._bare += 1  # detached
            self.transfer("to_host", tensor)

        def backward() -> None:
            g = self.elementwise("binary_cross_entropy_backward", [one, scores, labels], scores)
            self.update("div_", g)
            self.arrive(scores, g)

        self.node(backward)
        self._seed(loss, one)

    def cross_entropy(self, logits: Tensor, rows: int) -> None:
        """Mean cross entropy of `rows` decoded tokens."""
        logits, wide = logits.view(rows, logits.numel // rows), self.wide
        labels = self.tensor(rows, itemsize=8)
        loss, total, one = (self.tensor(1, itemsize=wide) for _ in range(3))
        probability, out = (self.tensor(*logits.shape, grad=True) for _ in range(2))
        self.rowwise("_log_softmax", [logits], [probability], logits)

        def backward() -> None:
            self.rowwise("_log_softmax_backward_data", [self.gradient(probability), probability], [out], logits)
            self.arrive(logits, out)

        self.node(backward)
        scores = self.cast(probability, wide)
        g = self.tensor(*logits.shape, itemsize=wide)
        self.emit("nll_loss_forward", "rowwise", [labels], [loss, total], elements=rows, rows=rows)

        def spread() -> None:
            self.rowwise("nll_loss_backward", [one, labels, total], [g], logits)
            self.arrive(scores, g)

        self.node(spread)
        self._seed(loss, one)

    def zero_gradients(self) -> None:
        """Fill the gradients of the dense weights with zeros, so that the backward adds to them: a kernel each."""
        self.phase, self.module = "backward", ""
        dense = [weight for weight in self.trained if weight not in self.local]
        self._kept = {weight: self.tensor(*weight.shape, itemsize=weight.itemsize) for weight in dense}
        self._pass("zero_", list(self._kept.values()), fresh=True, launches=len(dense))

    def step(self, optimizer: str, *, lists: bool = False, fused: bool = False) -> None:
        """Parameter updates: one weight after the other, in lists of weights, or all by one fused kernel."""
        dense = [w for w in self.trained if w not in self._sparse and w not in self._updated]
        together = lists or fused or self.reference
        for group in [dense] if together else [[weight] for weight in self.trained if weight not in self._updated]:
            if group[0] in self._sparse:
                self._update_rows(group[0])
            elif fused:
                kept = range(int(STATE[optimizer]))
                states = [self.tensor(*w.shape, itemsize=w.itemsize) for w in group for _ in kept]
                gradients = [self._gradients[weight] for weight in group]
                count = sum(w.numel for w in group)
                self._pass(f"_fused_{optimizer}_", [*group, *states], gradients, count=count)
            elif optimizer == "adagrad":
                self._adagrad(group)
            elif optimizer == "sgd":
                launches = len(group) if self.reference else 1
                self._pass("add_", group, [self._gradients[weight] for weight in group], launches=launches)
            else:
                self._adamw(group)
        for weight in self._sparse if together else ():
            self._update_rows(weight)

    def _update_rows(self, weight: Tensor) -> None:
        self.emit("add_", "embedding_update", [self._gradients[weight]], [], "sparse", **self._sparse[weight])

    def _adamw(self, group: Sequence[Tensor]) -> None:
        """The eight passes of AdamW over a list of weights, and the step counters."""
        gradients = [self._gradients[weight] for weight in group]
        first, second, roots, scaled = ([self.tensor(*w.shape, itemsize=w.itemsize) for w in group] for _ in range(4))
        self._pass("add_", [self.tensor(1) for _ in group], variant="add_scalar_")
        self._pass("mul_", group)
        self._pass("lerp_", first, gradients)
        self._pass("mul_", second)
        self._pass("addcmul_", second, gradients)
        self._pass("sqrt", roots, second, fresh=True)
        self._pass("div", scaled, roots, fresh=True, variant="div_scalar")
        self._pass("add_", scaled, variant="add_scalar_")
        self._pass("addcdiv_", group, [*first, *scaled])

    def _adagrad(self, group: Sequence[Tensor]) -> None:
        """The four passes of Adagrad over a weight, five over a list of them, and the step counters."""
        gradients = [self._gradients[weight] for weight in group]
        sums, roots, scaled = ([self.tensor(*w.shape, itemsize=w.itemsize) for w in group] for _ in range(3))
        self._pass("add_", [self.tensor(1) for _ in group], variant="add_scalar_")
        self._pass("addcmul_", sums, gradients)
        self._pass("sqrt", roots, sums, fresh=True)
        self._pass("add_", roots, variant="add_scalar_")
        if len(group) > 1:
            self._pass("mul", scaled, gradients, fresh=True, variant="mul_scalar")
            gradients = scaled
        self._pass("addcdiv_", group, [*gradients, *roots])

    def _pass(
        self,
        name: str,
        targets: Sequence[Tensor],
        reads: Sequence[Tensor] = (),
        *,
        fresh: bool = False,
        variant: str = "",
        launches: int = 1,
        count: int = 0,
    ) -> None:
        """One pass over a list of tensors, in place unless the targets are `fresh`."""
        elements = count or sum(t.numel for t in targets)
        alone = len(targets) == 1 or launches > 1 or name[0] == "_"
        sources = list(reads) if fresh else [*targets, *reads]
        sizes: dict[str, float] = {"elements": elements, "launches": launches}
        self.emit(name if alone else "_foreach_" + name, "elementwise", sources, targets, variant or name, **sizes)
