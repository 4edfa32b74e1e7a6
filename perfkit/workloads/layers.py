"""The layers that recommendation and language models are built from, as PyTorch's eager mode runs them."""

from collections.abc import Sequence
from typing import Any

from perfkit.workloads.tape import Tape, Tensor

__all__ = ["Layers"]


class Layers(Tape):
    """A tape that speaks in layers: each call appends the forward operations and registers the backward ones.

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

    # -- elementwise and row-wise ------------------------------------------------------------------------------------

    def elementwise(self, name: str, reads: Sequence[Tensor], like: Tensor, variant: str = "") -> Tensor:
        """One pass over tensors into a fresh one of the shape of `like`."""
        out = self.tensor(*like.shape, itemsize=max(t.itemsize for t in (like, *reads)), grad=True)
        self.emit(name, "elementwise", reads, [out], variant, elements=out.numel)
        return out

    def cast(self, x: Tensor, itemsize: int) -> Tensor:
        """The same numbers in another data type, if it is another; the gradient is cast back."""
        if x.itemsize == itemsize:
            return x
        out = self._cast(x, itemsize)
        if x.grad:
            self.node(lambda: self.arrive(x, self._cast(self.gradient(out), x.itemsize)))
        return out

    def _cast(self, x: Tensor, itemsize: int) -> Tensor:
        out = self.tensor(*x.shape, itemsize=itemsize, grad=x.grad)
        self.emit("_to_copy", "elementwise", [x], [out], elements=out.numel)
        return out

    def update(self, name: str, target: Tensor, *reads: Tensor) -> None:
        """One pass that changes `target` in place."""
        self.emit(name, "elementwise", [target, *reads], [target], elements=target.numel)

    def relu(self, x: Tensor) -> Tensor:
        """Rectified linear unit; a compiler puts it into the products before it, and behind it on the way back."""
        if self.compiled:
            return x
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
            self.arrive(x, self._cast(gradient, x.itemsize) if x.itemsize < gradient.itemsize else gradient)
            if y.grad:
                if len(y.shape) < len(x.shape):
                    gradient = self.column_sum(gradient.view(x.numel // y.numel, y.numel))
                self.arrive(y, self._cast(gradient, y.itemsize) if y.itemsize < gradient.itemsize else gradient)

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
        out = self.tensor(x.shape[-1], itemsize=x.itemsize)
        if not self.compiled:  # by the product that makes x
            self.rowwise("sum", [x], [out], x)
        return out

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax over the last dimension."""
        x = self.cast(x, self.wide)
        y = self.tensor(*x.shape, itemsize=x.itemsize, grad=True)
        self.rowwise("_softmax", [x], [y], x)

        def backward() -> None:
            g = self.tensor(*x.shape, itemsize=x.itemsize)
            self.rowwise("_softmax_backward_data", [self.gradient(y), y], [g], x)
            self.arrive(x, g)

        self.node(backward)
        return y

    def layer_norm(self, x: Tensor) -> Tensor:
        """Layer norm with trained weight and bias."""
        weight, bias = self.parameter(x.shape[-1]), self.parameter(x.shape[-1])
        x, rows, wide = self.cast(x, self.wide), x.numel // x.shape[-1], self.wide
        mean, inverse = self.tensor(rows, itemsize=wide), self.tensor(rows, itemsize=wide)
        y = self.tensor(*x.shape, itemsize=wide, grad=True)
        self.rowwise("native_layer_norm", [x, weight, bias], [y, mean, inverse], x)

        def backward() -> None:
            g, gw, gb = (self.tensor(*t.shape, itemsize=wide) for t in (x, weight, bias))
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
            self.arrive(x, g if lazy else self._clone(g, min(shape[-1], x.shape[-1])))

        self.node(backward)
        return out

    def contiguous(self, x: Tensor, run: int = 0) -> Tensor:
        """A copy of a permuted view with its elements in order, `run` at a time; the gradient passes through."""
        out = self._clone(x, run)
        out.root = x.root
        return out

    def _clone(self, x: Tensor, run: int = 0) -> Tensor:
        out = self.tensor(*x.shape, itemsize=x.itemsize, grad=True)
        self.emit("clone", "copy", [x], [out], elements=x.numel, rows=x.numel // (run or x.shape[-1]))
        return out

    def split(self, x: Tensor, parts: int) -> list[Tensor]:
        """Equal parts of the last dimension as views; their gradients are concatenated."""
        *leading, width = x.shape
        outs = [Tensor(x.storage, (*leading, width // parts), x.itemsize, True) for _ in range(parts)]

        def backward() -> None:
            g = self.tensor(*x.shape, itemsize=x.itemsize)
            reads = [self.gradient(out) for out in outs]
            self.emit("cat", "copy", reads, [g], elements=g.numel, rows=parts * g.numel // width)
            self.arrive(x, g)

        self.node(backward)
        return outs

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenation along the last dimension; the gradients are slices of one tensor."""
        rows, wide = parts[0].shape[0], max(part.itemsize for part in parts)
        out = self.tensor(rows, sum(p.numel // rows for p in parts), itemsize=wide, grad=True)
        self.emit("cat", "copy", parts, [out], elements=out.numel, rows=rows * len(parts))

        def backward() -> None:
            for part in parts:
                if part.grad:
                    gradient = self.gradient(out).view(*part.shape)
                    self.arrive(part, self._cast(gradient, part.itemsize) if part.itemsize < wide else gradient)

        self.node(backward)
        return out

    def lower_triangle(self, x: Tensor) -> Tensor:
        """The entries below the diagonal of a batch of square matrices, gathered by index.

        The backward sorts the indices on a GPU, so that it can add without conflicts: ten kernels.
        """
        batch, n, _ = x.shape
        pairs = n * (n - 1) // 2
        index = [self.tensor(pairs, itemsize=8) for _ in range(2)]
        if self.reference:
            self._slice(x)
            for part in index:
                self.transfer("to_device", part)
        out = self.tensor(batch, pairs, itemsize=x.itemsize, grad=True)
        self.emit("index", "copy", [x, *index], [out], elements=out.numel, rows=batch)

        def backward() -> None:
            zeros, g = (self.tensor(*x.shape, itemsize=x.itemsize) for _ in range(2))
            self.emit("new_zeros", "copy", [], [zeros], elements=x.numel)
            reads = [zeros, *index, self.gradient(out)]
            self.emit("index_put", "copy", reads, [g], elements=out.numel, rows=batch, launches=10)
            self.arrive(x, g)

        self.node(backward)
        return out

    def dot(self, x: Tensor, dense: Tensor) -> Tensor:
        """Products of all pairs of vectors of a sample, behind its dense vector."""
        if self.compiled:
            return self._dot_fused(x, dense)
        self.views(2)  # rows by table, and these transposed
        return self.cat([dense, self.lower_triangle(self.bmm(x, x, "nt"))])

    def _dot_fused(self, x: Tensor, dense: Tensor) -> Tensor:
        """The same by one kernel each way, the gradients of `dense` among those of the vectors."""
        batch, n, k = x.shape
        out = self.tensor(batch, k + n * (n - 1) // 2, grad=True)
        sizes: dict[str, Any] = {"batch": batch, "m": n, "k": k}
        self.emit("dot", "bmm", [x], [out], "nt", flops=2.0 * batch * n * n * k, n=n, **sizes)

        def backward() -> None:
            g = self.tensor(*x.shape)
            reads = [self.gradient(out), x]
            self.emit("dot_backward", "bmm", reads, [g], "nn", flops=2.0 * batch * n * n * k, n=n, **sizes)
            self.arrive(x, g)

        self.node(backward)
        return out

    def _slice(self, x: Tensor) -> None:
        """A slice that takes all of `x`; its gradient is copied into zeros all the same."""
        self._bare += 1

        def backward() -> None:
            zeros = self.tensor(*x.shape, itemsize=x.itemsize)
            self.emit("new_zeros", "copy", [], [zeros], elements=x.numel)
            self.emit("copy_", "copy", [self.gradient(x)], [zeros], elements=x.numel, rows=x.shape[0])

        self.node(backward)

    # -- matrix products ---------------------------------------------------------------------------------------------

    def gemm(self, name: str, layout: str, reads: Sequence[Tensor], m: int, n: int, k: int) -> Tensor:
        """One product of m×k by k×n; `layout` says which operand lies transposed."""
        out = self.tensor(m, n, grad=True)
        if self.reference and name == "addmm":  # the bias is copied to where the product is then added to it
            self.emit("expand", "copy", [reads[0]], [out], "expand", elements=out.numel, rows=m, calls=0)
        self.emit(name, "gemm", reads, [out], layout, flops=2.0 * m * n * k, batch=1, m=m, n=n, k=k)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Linear layer with a weight of outputs × inputs."""
        x, weight = self.cast(x, self.itemsize), self._narrow(weight)
        bias = self._narrow(bias) if bias else None
        n, k = weight.shape
        m = x.numel // k
        y = (
            self.gemm("addmm", "nt", [bias, x, weight], m, n, k)
            if bias
            else self.gemm("mm", "nt", [x, weight], m, n, k)
        )

        def backward() -> None:
            g = self.gradient(y)
            self._bare += 1  # the transposed weight
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

    def _narrow(self, weight: Tensor) -> Tensor:
        """A weight as products take it, cast once an iteration."""
        if weight.itemsize == self.itemsize:
            self.use(weight)
            return weight
        if weight not in self._narrowed:
            self.use(weight)
            self._narrowed[weight] = self.cast(weight, self.itemsize)
        return self._narrowed[weight]

    def cross(self, x: Tensor, layers: int, rank: int) -> Tensor:
        """Low-rank cross layers: the input times a projection to `rank` columns and back, plus what came before."""
        first, n = x, x.shape[-1]
        for _ in range(layers):
            bias, narrow, wide = self.parameter(n), self.parameter(rank, n), self.parameter(n, rank)
            projected = self.linear(self.linear(x, narrow), wide)
            x = self._cross_fused(first, x, projected, bias) if self.compiled else self.add(
                self.multiply(first, self.add(projected, bias)), x
            )  # fmt: skip
        return x

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Product number by number."""
        out = self.elementwise("mul", [x, y], x)

        def backward() -> None:
            gradient = self.gradient(out)
            gx, gy = self.elementwise("mul", [gradient, y], x), self.elementwise("mul", [gradient, x], y)
            self.arrive(x, gx)
            self.arrive(y, gy)

        self.node(backward)
        return out

    def _cross_fused(self, first: Tensor, x: Tensor, projected: Tensor, bias: Tensor) -> Tensor:
        """What follows the products of a cross layer, by one kernel each way."""
        out = self.elementwise("cross", [first, projected, x], x)

        def backward() -> None:
            g = self.gradient(out)
            known = [self.gradient(first)] if first.root in self._gradients else []
            gp, total = self.tensor(*x.shape), self.tensor(*x.shape)
            self.emit("cross_backward", "elementwise", [g, first, projected, *known], [gp, total], elements=g.numel)
            self._gradients[first.root] = total
            for tensor, gradient in ((projected, gp), (bias, self.tensor(*bias.shape)), (x, g)):
                if tensor.root is not first.root:
                    self.arrive(tensor, gradient)

        self.node(backward)
        return out

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
        same, a = a is b, self.cast(a, self.itemsize)
        b = a if same else self.cast(b, self.itemsize)
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
