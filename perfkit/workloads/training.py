"""What makes an iteration of training of layers: embeddings, exchanges between ranks, losses and optimizers."""

from collections.abc import Sequence
from typing import Any

from perfkit.workloads.layers import Layers
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import Tensor

__all__ = ["Training"]


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

    def fused_embeddings(self, tables: Sequence[EmbeddingTable], bags: int, *, itemsize: int = 8) -> list[Tensor]:
        """Sum-pooled lookups of all tables by one kernel; the backward updates each row for each of its lookups."""
        found = [self._look_up(table, bags, itemsize) for table in tables]
        for number, (_, index, out, sizes) in enumerate(found):
            part = {} if number == 0 else {"launches": 0, "calls": 0}
            self.emit("fused_embeddings", "embedding_forward", index, [out], "fused", **sizes, **part)

        def backward() -> None:
            for number, (weight, index, out, sizes) in enumerate(found):
                self._updated.add(weight)
                part, reads = {} if number == 0 else {"launches": 0}, [self.gradient(out), *index]
                self.emit("fused_embeddings_backward", "embedding_backward", reads, [], "fused", **sizes, **part)

        self.node(backward)
        return [out for _, _, out, _ in found]

    def _look_up(
        self, table: EmbeddingTable, bags: int, itemsize: int
    ) -> tuple[Tensor, list[Tensor], Tensor, dict[str, Any]]:
        """Weight, indices and offsets, pooled rows and sizes of a lookup."""
        lookups, number = round(bags * table.pooling), len(self.tables)
        self.tables.append(table)
        weight = self.parameter(table.rows, table.dim)
        self.local.add(weight)
        index = [self.tensor(lookups, itemsize=itemsize), self.tensor(bags, itemsize=itemsize)]
        sizes = {"lookups": lookups, "bags": bags, "dim": table.dim, "table": number, "elements": lookups * table.dim}
        return weight, index, self.tensor(bags, table.dim, itemsize=self.wide, grad=True), sizes

    def embedding(self, weight: Tensor, indices: int, *leading: int, trained: bool = True) -> Tensor:
        """Lookup of `indices` rows of a dense table; the gradient is as large as the table."""
        rows, dim = weight.shape
        index = self.tensor(indices, itemsize=8)
        out = self.tensor(*leading, dim, itemsize=weight.itemsize, grad=trained)
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

    def collective(self, operation: str, reads: Sequence[Tensor], writes: Sequence[Tensor], nbytes: float) -> None:
        """One collective; `nbytes` is its size in the nccl-tests convention."""
        self.emit(operation, "collective", reads, writes, nbytes=nbytes)

    def exchange(self, send: Tensor | None, batch: int, widths: Sequence[int], nbytes: float) -> list[Tensor]:
        """All_to_all of pooled rows: one part of (batch, width) from every rank; the backward sends gradients back."""
        received = self.tensor(batch * sum(widths), grad=True)
        self.collective("all_to_all", [send] if send else [], [received], nbytes)
        parts = [Tensor(received.storage, (batch, width), self.itemsize, True) for width in widths if width]

        def backward() -> None:
            gradients = [self._clone(self.gradient(part)) for part in parts]
            flat = self.tensor(received.numel)
            self.emit("cat", "copy", gradients, [flat], elements=flat.numel, rows=len(parts))
            back = [self.tensor(*send.shape)] if send else []
            self.collective("all_to_all", [flat], back, nbytes)
            if send:
                self.arrive(send, back[0])

        self.node(backward)
        return parts

    def all_reduce_gradients(self) -> None:
        """Average the dense gradients over ranks: flattened, reduced in one piece, divided."""
        dense = [w for w in self.trained if w not in self.local]
        flat = self.tensor(sum(w.numel for w in dense))
        self.emit("cat", "copy", [self._gradients[w] for w in dense], [flat], elements=flat.numel, rows=len(dense))
        self.collective("all_reduce", [flat], [flat], flat.nbytes)
        self.update("div_", flat)
        for weight in dense:
            self._gradients[weight] = flat.view(*weight.shape)

    # -- losses and optimizers ---------------------------------------------------------------------------------------

    def binary_cross_entropy(self, logits: Tensor) -> None:
        """Mean binary cross entropy with logits; in the reference loop the sigmoid and the loss are apart."""
        logits = self.cast(logits, self.wide)
        labels, loss, one = (self.tensor(*shape, itemsize=self.wide) for shape in (logits.shape, (1,), (1,)))
        if self.reference:
            return self._separate_loss(logits, labels, loss, one)
        self.elementwise("binary_cross_entropy_with_logits", [logits, labels], logits)

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
                states = [self.tensor(*w.shape, itemsize=w.itemsize) for w in group for _ in range(2)]
                gradients = [self._gradients[weight] for weight in group]
                self._pass(f"_fused_{optimizer}_", [*group, *(states if optimizer == "adamw" else ())], gradients,
                           count=sum(w.numel for w in group))  # fmt: skip
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
