"""DLRMs in the training loop of their authors, as in PyTorch until 1.12.

Inputs, labels and the indices of the interaction are copied from pageable memory, and the loss is
read before the backward pass; the host waits for each of these copies. Gradients are zeroed and
then added to, biases are copied to the outputs of their products, and each weight is updated by its
own kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfkit.workloads.columns import Kind, OperationSizes
from perfkit.workloads.dlrm import DLRM, list_local_tables, order_weights, record_layers
from perfkit.workloads.graph import Graph
from perfkit.workloads.iteration import make_graph
from perfkit.workloads.layers import MLPParallelism
from perfkit.workloads.operations import Tensor, Weight
from perfkit.workloads.placement import Plan
from perfkit.workloads.tape import ITEMSIZE, Tape

__all__ = ["EagerDLRM"]

_NO_SIZES = OperationSizes()


class _EagerTape(Tape):
    """A tape with kernels that later versions of PyTorch do not need."""

    def __init__(self, itemsize: int) -> None:
        super().__init__(itemsize)
        self.index = 4

    def emit(
        self,
        name: str,
        kind: Kind,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        sizes: OperationSizes = _NO_SIZES,
        *,
        variant: str = "",
        launches: int = 1,
        is_call: bool = True,
    ) -> int:
        """Append one operation, and before it the kernels that it needs."""
        if name == "addmm":
            copied = OperationSizes(elements=writes[0].numel, rows=sizes.m)
            super().emit("expand", "copy", [reads[0]], [writes[0]], copied, is_call=False)
        elif name == "index":  # of a slice that is the whole tensor
            self.bare += 1
            self.node(lambda: self._fill(reads[0]))
            for part in reads[1:]:
                self.transfer("to_device", part)
        return super().emit(
            name, kind, reads, writes, sizes, variant=variant, launches=launches, is_call=is_call
        )

    def transfer(self, direction: str, tensor: Tensor) -> None:
        """A copy through pageable memory."""
        sizes = OperationSizes(elements=tensor.numel)
        self.emit("to", "transfer", [], [tensor], sizes, variant=direction)

    def _fill(self, x: Tensor) -> None:
        """The gradient of a slice is copied into zeros."""
        zeros = self.tensor(*x.shape)
        self.copy("new_zeros", [], [zeros])
        self.copy("copy_", [self.gradient(x)], [zeros], rows=x.shape[0])

    def zero(self) -> list[Weight]:
        """Zero the gradients of the dense weights."""
        dense = [weight for weight in self.trained if weight.table is None]
        for weight in dense:
            weight.gradient_sum = self.tensor(*weight.shape)
        self.phase, self.module = "backward", ""
        elements = sum(weight.numel for weight in dense)
        self.emit(
            "zero_",
            "elementwise",
            [],
            [weight.gradient_sum for weight in dense if weight.gradient_sum is not None],
            OperationSizes(elements=elements),
            launches=len(dense),
        )
        return dense

    def keep(self, weight: Weight) -> None:
        """Add a gradient to the zeros."""
        total = weight.gradient_sum
        if total is None:
            super().keep(weight)
            return
        self.elementwise("accumulate", [total, self.find_gradient(weight)], [total])
        weight.gradient = total

    def loss(self, logits: Tensor) -> None:
        """Sigmoid, loss of every sample and mean; labels are copied here, loss and predictions are
        read at once."""
        scores, losses = self.tensor(*logits.shape, needs_gradient=True), self.tensor(*logits.shape)
        labels, loss, one = (self.tensor(*shape) for shape in (logits.shape, (1,), (1,)))
        n = logits.numel

        def back(name: str, reads: Sequence[Tensor], target: Tensor, *, mean: bool = False) -> None:
            gradient = self.tensor(*logits.shape)
            self.emit(name, "elementwise", reads, [gradient], OperationSizes(elements=n))
            if mean:
                self.elementwise("div_", [gradient], [gradient])
            self.pass_on(target, gradient)

        self.elementwise("sigmoid", [logits], [scores])
        self.node(lambda: back("sigmoid_backward", [self.gradient(scores), scores], logits))
        self.transfer("to_device", labels)
        self.elementwise("binary_cross_entropy", [scores, labels], [losses])
        one_row = OperationSizes(elements=n, rows=1, n=n)
        self.emit("mean", "rowwise", [losses], [loss], one_row, is_call=False)
        for tensor in (loss, scores):
            self.bare += 1  # detached
            self.transfer("to_host", tensor)
        self.node(
            lambda: back("binary_cross_entropy_backward", [one, scores, labels], scores, mean=True)
        )
        self.node(lambda: self.copy("ones_like", [loss], [one], "new_zeros"))


@dataclass(frozen=True)
class EagerDLRM:
    """A DLRM with fused lookups on one GPU."""

    model: DLRM
    family: str = "dlrm"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def graphs(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = True
    ) -> tuple[Graph, ...]:
        """The graph of one iteration on the GPU."""
        model = self.model
        (held,), tape = (
            list_local_tables(model.place(plan, 1), model.tables),
            _EagerTape(ITEMSIZE[model.dtype]),
        )
        inputs = tape.tensor(model.batch, model.features)
        lookups = sum(round(model.batch * table.pooling) for table in model.tables)
        offsets = model.batch * len(model.tables) + 1
        for part in (inputs, *(tape.tensor(n, itemsize=4) for n in (lookups, offsets))):
            tape.transfer("to_device", part)
        logits = record_layers(tape, MLPParallelism(), model, held, inputs)
        order_weights(tape)
        tape.loss(logits)
        dense = tape.zero()
        tape.backward()
        tape.module, elements = "", sum(weight.numel for weight in dense)
        reads = [*dense, *(tape.find_gradient(weight) for weight in dense)]
        sizes = OperationSizes(elements=elements)
        tape.emit("add_", "elementwise", reads, dense, sizes, launches=len(dense))
        return (make_graph(tape, name=model.name, family=self.family, dtype=model.dtype),)
