"""The layers that recommendation and language models are built from, as PyTorch's eager mode runs them."""

from collections.abc import Sequence
from typing import Any

from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import Tape, Tensor

__all__ = ["Layers"]


class Layers(Tape):
    """A tape that speaks in layers: each call appends the forward operations and registers the backward ones.

    Parameters
    ----------
    itemsize : int
        Bytes of one activation, weight or gradient element [B].
    """

    # -- elementwise and row-wise ------------------------------------------------------------------------------------

    def elementwise(self, name: str, reads: Sequence[Tensor], like: Tensor, variant: str = "") -> Tensor:
        """One pass over tensors into a fresh one of the shape of `like`."""
        out = self.tensor(*like.shape, grad=True)
        self.emit(name, "elementwise", reads, [out], variant, elements=out.numel)
        return out

    def update(self, name: str, target: Tensor, *reads: Tensor) -> None:
        """One pass that changes `target` in place."""
        self.emit(name, "elementwise", [target, *reads], [target], elements=target.numel)

    def relu(self, x: Tensor) -> Tensor:
        """Rectified linear unit."""
        y = self.elementwise("relu", [x], x)
        self.node(lambda: self.arrive(x, self.elementwise("threshold_backward", [self.gradient(y), y], x)))
        return y

    def gelu(self, x: Tensor, *, tanh: bool = False) -> Tensor:
        """Gaussian error linear unit, exact or in the tanh approximation."""
        suffix = "_tanh" if tanh else ""
        y = self.elementwise("gelu", [x], x, "gelu" + suffix)

        def backward() -> None:
            self.arrive(x, self.elementwise("gelu_backward", [self.gradient(y), x], x, "gelu_backward" + suffix))

        self.node(backward)
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Sum; `y` may be broadcast over leading dimensions."""
        out = self.elementwise("add", [x, y], x)

        def backward() -> None:
            gradient = self.gradient(out)
            self.arrive(x, gradient)
            if y.grad:
                if y.numel < x.numel:
                    gradient = self.column_sum(gradient.view(x.numel // y.numel, y.numel))
                self.arrive(y, gradient)

        self.node(backward)
        return out

    def scale(self, x: Tensor) -> Tensor:
        """Product with a number."""
        out = self.elementwise("mul", [x], x, "mul_scalar")
        self.node(lambda: self.arrive(x, self.elementwise("mul", [self.gradient(out)], x, "mul_scalar")))
        return out

    def rowwise(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], x: Tensor) -> None:
        """One operation that works row by row over the last dimension of `x`."""
        self.emit(name, "rowwise", reads, writes, elements=x.numel, rows=x.numel // x.shape[-1], n=x.shape[-1])

    def column_sum(self, x: Tensor) -> Tensor:
        """Sum over all but the last dimension, as bias gradients need it."""
        out = self.tensor(x.shape[-1])
        self.rowwise("sum", [x], [out], x)
        return out

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax over the last dimension."""
        y = self.tensor(*x.shape, grad=True)
        self.rowwise("_softmax", [x], [y], x)

        def backward() -> None:
            g = self.tensor(*x.shape)
            self.rowwise("_softmax_backward_data", [self.gradient(y), y], [g], x)
            self.arrive(x, g)

        self.node(backward)
        return y

    def layer_norm(self, x: Tensor) -> Tensor:
        """Layer norm with trained weight and bias."""
        weight, bias = self.parameter(x.shape[-1]), self.parameter(x.shape[-1])
        rows = x.numel // x.shape[-1]
        mean, inverse, y = self.tensor(rows), self.tensor(rows), self.tensor(*x.shape, grad=True)
        self.rowwise("native_layer_norm", [x, weight, bias], [y, mean, inverse], x)

        def backward() -> None:
            g, gw, gb = self.tensor(*x.shape), self.tensor(*weight.shape), self.tensor(*bias.shape)
            reads = [self.gradient(y), x, mean, inverse, weight, bias]
            self.rowwise("native_layer_norm_backward", reads, [g, gw, gb], x)
            for tensor, gradient in ((x, g), (weight, gw), (bias, gb)):
                self.arrive(tensor, gradient)

        self.node(backward)
        return y

    # -- copies ------------------------------------------------------------------------------------------------------

    def regroup(self, x: Tensor, *shape: int, lazy: bool = False) -> Tensor:
        """A permuted view, such as one that gathers attention heads.

        Its gradient is permuted back by a copy, at once or (`lazy`) by the operation that consumes it.
        """
        out = Tensor(x.storage, shape, x.itemsize, True)

        def backward() -> None:
            g = self.gradient(out).view(*x.shape)
            if lazy:
                self._strided.add(g.storage)
            self.arrive(x, g if lazy else self._clone(g))

        self.node(backward)
        return out

    def contiguous(self, x: Tensor) -> Tensor:
        """A copy of a permuted view with its elements in order; the gradient passes through."""
        out = self._clone(x)
        out.root = x.root
        return out

    def _clone(self, x: Tensor) -> Tensor:
        out = self.tensor(*x.shape, grad=True)
        self.emit("clone", "copy", [x], [out], elements=x.numel, rows=x.numel // x.shape[-1])
        return out

    def split(self, x: Tensor, parts: int) -> list[Tensor]:
        """Equal parts of the last dimension as views; their gradients are concatenated."""
        *leading, width = x.shape
        outs = [Tensor(x.storage, (*leading, width // parts), x.itemsize, True) for _ in range(parts)]

        def backward() -> None:
            g = self.tensor(*x.shape)
            reads = [self.gradient(out) for out in outs]
            self.emit("cat", "copy", reads, [g], elements=g.numel, rows=parts * g.numel // width)
            self.arrive(x, g)

        self.node(backward)
        return outs

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenation along the last dimension; the gradients are slices of one tensor."""
        rows = parts[0].shape[0]
        out = self.tensor(rows, sum(p.numel // rows for p in parts), grad=True)
        self.emit("cat", "copy", parts, [out], elements=out.numel, rows=rows * len(parts))

        def backward() -> None:
            gradient = self.gradient(out)
            for part in parts:
                if part.grad:
                    self.arrive(part, gradient.view(*part.shape))

        self.node(backward)
        return out

    def lower_triangle(self, x: Tensor) -> Tensor:
        """The entries below the diagonal of a batch of square matrices, gathered by index."""
        batch, n, _ = x.shape
        pairs = n * (n - 1) // 2
        index = [self.tensor(pairs, itemsize=8) for _ in range(2)]
        out = self.tensor(batch, pairs, grad=True)
        self.emit("index", "copy", [x, *index], [out], elements=out.numel, rows=batch)

        def backward() -> None:
            zeros, g = self.tensor(*x.shape), self.tensor(*x.shape)
            self.emit("new_zeros", "copy", [], [zeros], elements=x.numel)
            reads = [zeros, *index, self.gradient(out)]
            self.emit("index_put", "copy", reads, [g], elements=out.numel, rows=batch)
            self.arrive(x, g)

        self.node(backward)
        return out

    # -- matrix products ---------------------------------------------------------------------------------------------

    def gemm(self, name: str, layout: str, reads: Sequence[Tensor], m: int, n: int, k: int) -> Tensor:
        """One product of m×k by k×n; `layout` says which operand lies transposed."""
        out = self.tensor(m, n, grad=True)
        self.emit(name, "gemm", reads, [out], layout, flops=2.0 * m * n * k, batch=1, m=m, n=n, k=k)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Linear layer with a weight of outputs × inputs."""
        n, k = weight.shape
        m = x.numel // k
        y = (
            self.gemm("addmm", "nt", [bias, x, weight], m, n, k)
            if bias
            else self.gemm("mm", "nt", [x, weight], m, n, k)
        )

        def backward() -> None:
            g = self.gradient(y)
            if g.storage in self._strided:
                g = self._clone(g)
            first = [] if bias else [self.gemm("mm", "tn", [g, x], n, k, m)]
            gx = self.gemm("mm", "nn", [g, weight], m, k, n) if x.grad else None
            gw = first[0] if first else self.gemm("mm", "tn", [g, x], n, k, m)
            if bias:
                self.arrive(bias, self.column_sum(g))
            if gx:
                self.arrive(x, gx.view(*x.shape))
            self.arrive(weight, gw)

        self.node(backward)
        return y.view(*x.shape[:-1], n)

    def mlp(self, x: Tensor, widths: Sequence[int], *, last_relu: bool) -> Tensor:
        """Linear layers with rectifiers in between."""
        for index, width in enumerate(widths):
            x = self.linear(x, self.parameter(width, x.shape[-1]), self.parameter(width))
            if last_relu or index + 1 < len(widths):
                x = self.relu(x)
        return x

    def product(self, layout: str, a: Tensor, b: Tensor, sizes: tuple[int, int, int, int], *shape: int) -> Tensor:
        """One batched product of sizes (batch, m, n, k) into a tensor of `shape`."""
        batch, m, n, k = sizes
        out = self.tensor(*shape, grad=True)
        self.emit("bmm", "bmm", [a, b], [out], layout, flops=2.0 * batch * m * n * k, batch=batch, m=m, n=n, k=k)
        return out

    def bmm(self, a: Tensor, b: Tensor, layout: str) -> Tensor:
        """Batched product of (batch, m, k) with (batch, k, n), or with ``nt`` of (batch, n, k)."""
        batch, m, k = a.shape
        n = b.shape[1] if layout == "nt" else b.shape[2]
        out = self.product(layout, a, b, (batch, m, n, k), batch, m, n)

        def backward() -> None:
            g = self.gradient(out)
            self.arrive(b, self.product("tn", a, g, (batch, k, n, m), *b.shape))
            self.arrive(a, self.product("nn" if layout == "nt" else "nt", g, b, (batch, m, k, n), *a.shape))

        self.node(backward)
        return out

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, causal: bool) -> Tensor:
        """Scaled dot-product attention in one kernel; the backward recomputes the scores."""
        batch, sequence, hidden = q.shape
        statistics = self.tensor(batch, heads, sequence)
        out = self.tensor(*q.shape, grad=True)
        flops = 4.0 * batch * sequence**2 * hidden * (0.5 if causal else 1.0)
        sizes: dict[str, Any] = {"batch": batch * heads, "m": sequence, "n": sequence, "k": hidden // heads}
        variant = "_causal" if causal else ""
        name = "_scaled_dot_product_flash_attention_for_cpu"
        self.emit(name, "attention", [q, k, v], [out, statistics], "forward" + variant, flops=flops, **sizes)

        def backward() -> None:
            grads = [self.tensor(*q.shape) for _ in range(3)]
            reads = [self.gradient(out), q, k, v, out, statistics]
            self.emit(name + "_backward", "attention", reads, grads, "backward" + variant, flops=2.5 * flops, **sizes)
            for tensor, gradient in zip((q, k, v), grads, strict=True):
                self.arrive(tensor, gradient)

        self.node(backward)
        return out

    # -- embeddings --------------------------------------------------------------------------------------------------

    def embedding_bag(self, table: EmbeddingTable, bags: int, *, sparse: bool) -> Tensor:
        """Sum-pooled lookup of one table, with a gradient of one row per lookup or as large as the table."""
        lookups = round(bags * table.pooling)
        sizes: dict[str, Any] = {"lookups": lookups, "bags": bags, "dim": table.dim, "table": len(self.tables)}
        self.tables.append(table)
        weight = self.parameter(table.rows, table.dim)
        self.local.add(weight)
        index = [self.tensor(lookups, itemsize=8), self.tensor(bags, itemsize=8)]
        out = self.tensor(bags, table.dim, grad=True)
        self.emit("_embedding_bag", "embedding_forward", index, [out], elements=lookups * table.dim, **sizes)

        def backward() -> None:
            g = self.tensor(lookups if sparse else table.rows, table.dim)
            reads, variant = [self.gradient(out), *index], "sparse" if sparse else "dense"
            name = "_embedding_bag_backward"
            self.emit(name, "embedding_backward", reads, [g], variant, elements=g.numel, rows=g.shape[0], **sizes)
            self.arrive(weight, g)
            if sparse:
                self._sparse[weight] = {"elements": g.numel, "rows": lookups, **sizes}

        self.node(backward)
        return out

    def embedding(self, weight: Tensor, indices: int, *leading: int, trained: bool = True) -> Tensor:
        """Lookup of `indices` rows of a dense table; the gradient is as large as the table."""
        rows, dim = weight.shape
        index = self.tensor(indices, itemsize=8)
        out = self.tensor(*leading, dim, grad=trained)
        sizes: dict[str, Any] = {"lookups": indices, "bags": indices, "dim": dim}
        self.emit("embedding", "rowwise", [index], [out], elements=out.numel, rows=indices, n=dim)

        def backward() -> None:
            g = self.tensor(rows, dim)
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
        """Mean binary cross entropy with logits."""
        labels, loss, one = self.tensor(*logits.shape), self.tensor(1), self.tensor(1)
        self.elementwise("binary_cross_entropy_with_logits", [logits, labels], logits)

        def backward() -> None:
            self.emit("ones_like", "copy", [loss], [one], "new_zeros", elements=1)
            probability = self.elementwise("sigmoid", [logits], logits)
            g = self.elementwise("sub", [probability, labels], logits)
            g = self.elementwise("mul", [g, one], logits)
            self.update("div_", g)
            self.arrive(logits, g)

        self.node(backward)

    def cross_entropy(self, logits: Tensor, rows: int) -> None:
        """Mean cross entropy of `rows` decoded tokens."""
        logits = logits.view(rows, logits.numel // rows)
        labels, loss, total = self.tensor(rows, itemsize=8), self.tensor(1), self.tensor(1)
        probability = self.tensor(*logits.shape)
        self.rowwise("_log_softmax", [logits], [probability], logits)
        self.emit("nll_loss_forward", "rowwise", [labels], [loss, total], elements=rows, rows=rows)

        def backward() -> None:
            one, g, out = self.tensor(1), self.tensor(*logits.shape), self.tensor(*logits.shape)
            self.emit("ones_like", "copy", [loss], [one], "new_zeros", elements=1)
            self.rowwise("nll_loss_backward", [one, labels, total], [g], logits)
            self.rowwise("_log_softmax_backward_data", [g, probability], [out], logits)
            self.arrive(logits, out)

        self.node(backward)

    def step(self, optimizer: str, *, foreach: bool = False) -> None:
        """Parameter updates as the framework's defaults run them: one by one on a CPU, in lists on a GPU."""
        dense = [weight for weight in self.trained if weight not in self._sparse]
        for group in [dense] if foreach else [[weight] for weight in self.trained]:
            if group[0] in self._sparse:
                reads = [self._gradients[group[0]]]
                self.emit("add_", "embedding_update", reads, [], "sparse", **self._sparse[group[0]])
            elif optimizer == "sgd":
                self._pass("add_", group, [self._gradients[weight] for weight in group])
            else:
                self._adamw(group)
        for weight in self._sparse if foreach else ():
            self.emit("add_", "embedding_update", [self._gradients[weight]], [], "sparse", **self._sparse[weight])

    def _adamw(self, group: Sequence[Tensor]) -> None:
        """The eight passes of AdamW over a list of weights, and the step counters."""
        gradients = [self._gradients[weight] for weight in group]
        first, second = ([self.tensor(*w.shape) for w in group] for _ in range(2))
        counts = [self.tensor(1) for _ in group]
        self._pass("add_", counts, variant="add_scalar_")
        self._pass("mul_", group)
        self._pass("lerp_", first, gradients)
        self._pass("mul_", second)
        self._pass("addcmul_", second, gradients)
        roots = [self.tensor(*w.shape) for w in group]
        self._pass("sqrt", roots, second, fresh=True)
        scaled = [self.tensor(*w.shape) for w in group]
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
    ) -> None:
        """One pass over a list of tensors, in place unless the targets are `fresh`."""
        elements = sum(t.numel for t in targets)
        listed = name if len(targets) == 1 else "_foreach_" + name
        sources = list(reads) if fresh else [*targets, *reads]
        self.emit(listed, "elementwise", sources, targets, variant or name, elements=elements)
