"""Updates of one weight after another whose operations depend on its shape: Muon and Adafactor, as
PyTorch runs them."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

from perfkit.ground.units import check_choice
from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.operations import Tensor
from perfkit.workloads.tape import RecordedAccess, RecordedOperation, Tape

#: Steps of the Newton-Schulz iteration of Muon: PyTorch's `torch.optim.Muon`, as in
#: https://kellerjordan.github.io/posts/muon/ [-].
NEWTON_SCHULZ_STEPS = 5
#: Bytes of a number of this iteration, which is bf16 in every precision, and of a number of a step
#: counter, which is fp32 [B].
_BF16 = 2
_COUNTER = 4


class _Variables:
    """Tensors that the variables of a loop over weights hold: one lives until its variable is given
    another one, behind the operation that makes this.

    Parameters
    ----------
    tape : Tape
        What records the update.
    host_waits : bool
        Whether waits of the host for a number are recorded.
    """

    def __init__(self, tape: Tape, *, host_waits: bool) -> None:
        self.tape = tape
        self.host_waits = host_waits
        self.held: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Give a variable the tensor that the last operation has made."""
        before = self.held.get(name)
        if before is not None:
            self._hold(before)
        self.held[name] = tensor

    def leave(self, *names: str) -> None:
        """Hold what some variables have until the last operation, and forget it."""
        for name in names:
            self._hold(self.held.pop(name))

    def _hold(self, tensor: Tensor) -> None:
        """Let the last operation touch a tensor without moving any of it."""
        operation = self.tape.operations[-1]
        layer = tensor.layer if operation.layer is None else operation.layer
        operation.accesses.append(RecordedAccess(tensor.storage, 0.0, False, layer))


def update_by_shape(tape: Tape, optimizer: str, weights: list[Tensor], *, module: str = "") -> None:
    """Update weights one after another, each by the operations of its shape.

    Parameters
    ----------
    tape : Tape
        What records the update; each weight has a gradient on it.
    optimizer : str
        ``muon``, whose weights are matrices, or ``adafactor``.
    weights : list of Tensor
        What is updated, in the order of the model.
    module : str, optional
        Begin of the modules of the operations, which go on with ``.layers`` or ``.ends``, and among
        which no wait of the host is recorded; empty for operations of no module.

    Raises
    ------
    ValueError
        For another optimizer.
    """
    update = _UPDATES[check_choice("optimizer", optimizer, _UPDATES)]
    variables = _Variables(tape, host_waits=not module)
    for weight in weights:
        tape.layer = weight.layer
        if module:
            tape.module = f"{module}.ends" if weight.layer is None else f"{module}.layers"
        update(tape, weight, tape.find_gradient(weight), variables)
    tape.layer = None
    if module:
        tape.module = ""


def measure_scratch(operations: Sequence[RecordedOperation]) -> float:
    """Measure what updates of one weight after another hold beside what is kept.

    Parameters
    ----------
    operations : sequence of RecordedOperation
        Operations of an iteration.

    Returns
    -------
    nbytes : float
        The most at once of the tensors that updates of modules ``update.layers`` and ``update.ends``
        make; 0 if there are none [B].
    """
    updates = [step for step in operations if step.label.module in ("update.layers", "update.ends")]
    sizes: dict[int, float] = {}  # of what is written first
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    kept: set[int] = set()
    for position, step in enumerate(updates):
        for access in step.accesses:
            if access.storage in kept:
                continue
            if access.storage not in sizes:
                if not access.is_write:
                    kept.add(access.storage)
                    continue
                sizes[access.storage] = float(access.nbytes)
                first[access.storage] = position
            last[access.storage] = position
    changes = [0.0] * (len(updates) + 1)
    for storage, nbytes in sizes.items():
        changes[first[storage]] += nbytes
        changes[last[storage] + 1] -= nbytes
    return max(accumulate(changes), default=0.0)


def _update_by_muon(tape: Tape, weight: Tensor, gradient: Tensor, variables: _Variables) -> None:
    """Move the momentum, make it orthogonal, and add it to a matrix, as `torch.optim.Muon`."""
    tape.updates_in_bf16 = True
    momentum, update = tape.like(weight), tape.like(weight)
    tape.elementwise("lerp_", [momentum, gradient], [momentum])
    tape.elementwise("lerp", [gradient, momentum], [update])
    variables.put("update", update)
    orthogonal = _orthogonalize(tape, update, variables)
    variables.put("update", orthogonal)
    tape.elementwise("mul_", [weight], [weight])
    tape.elementwise("add_", [weight, orthogonal], [weight])


def _orthogonalize(tape: Tape, update: Tensor, variables: _Variables) -> Tensor:
    """The Newton-Schulz iteration: x of m rows and n columns, m of them at most n, becomes
    a x + (b x xᵀ + c (x xᵀ)²) x in each step."""
    rows, columns = update.shape
    is_tall = rows > columns  # then it is read as its transpose
    short, long = min(rows, columns), max(rows, columns)
    x = update
    if update.itemsize != _BF16:
        x = tape.tensor(rows, columns, itemsize=_BF16)
        tape.elementwise("_to_copy", [update], [x])
    norm, least = tape.tensor(1, itemsize=_BF16), tape.tensor(1, itemsize=_BF16)
    if is_tall:
        tape.bare += 1
    whole = OperationSizes(elements=x.numel, rows=1, n=x.numel)
    tape.emit("linalg_vector_norm", "rowwise", [x], [norm], whole)
    tape.elementwise("clamp", [norm], [least])
    tape.elementwise("div_", [x, least], [x])
    for number in range(NEWTON_SCHULZ_STEPS):
        is_transposed = is_tall and number == 0
        gram = tape.tensor(short, short, itemsize=_BF16)
        polynomial = tape.tensor(short, short, itemsize=_BF16)
        following = tape.tensor(short, long, itemsize=_BF16)
        tape.bare += 1  # the transpose
        variant = "tn" if is_transposed else "nt"
        sizes = OperationSizes.of_product(short, short, long)
        tape.emit("mm", "gemm", [x, x], [gram], sizes, variant=variant)
        variables.put("gram", gram)
        sizes = OperationSizes.of_product(short, short, short)
        tape.emit("addmm", "gemm", [gram], [polynomial], sizes, variant="nn")
        variables.put("polynomial", polynomial)
        variant = "nt" if is_transposed else "nn"
        sizes = OperationSizes.of_product(short, long, short)
        tape.emit("addmm", "gemm", [x, polynomial], [following], sizes, variant=variant)
        x = following
    variables.leave("gram", "polynomial")
    if is_tall:
        tape.bare += 1
    return x


def _update_by_adafactor(
    tape: Tape, weight: Tensor, gradient: Tensor, variables: _Variables
) -> None:
    """Move the mean squares of rows and columns, or of each number of a vector, and add what follows
    from them to a weight, as the loop of `torch.optim.Adafactor`."""
    counter = tape.tensor(1, itemsize=_COUNTER)
    tape.elementwise("add_", [counter], [counter], "add_scalar_")
    _read_norm(tape, weight, variables)
    if len(weight.shape) > 1:
        estimate = _estimate_by_factors(tape, weight, gradient, variables)
    else:
        variance, squares, estimate = (tape.like(weight) for _ in range(3))
        tape.elementwise("mul", [gradient], [squares])
        variables.put("squares", squares)
        tape.elementwise("lerp_", [variance, squares], [variance])
        tape.copy("clone", [variance], [estimate], rows=1)
        variables.put("estimate", estimate)
    tape.elementwise("clamp_", [estimate], [estimate])
    tape.elementwise("rsqrt_", [estimate], [estimate])
    variables.put("update", estimate)
    tape.elementwise("mul_", [estimate, gradient], [estimate])
    _read_norm(tape, estimate, variables)
    tape.elementwise("add_", [weight, estimate], [weight])


def _estimate_by_factors(
    tape: Tape, weight: Tensor, gradient: Tensor, variables: _Variables
) -> Tensor:
    """The mean squares of a matrix, or of several of one weight: the product of those of its rows and
    of its columns."""
    *matrices, rows, columns = weight.shape
    count = prod(matrices)
    factors = []
    for name, length, others, shape in (
        ("row", rows, columns, (*matrices, rows, 1)),
        ("column", columns, rows, (*matrices, 1, columns)),
    ):
        factor = tape.tensor(*shape, itemsize=weight.itemsize)
        mean = tape.tensor(*shape, itemsize=weight.itemsize)
        sizes = OperationSizes(elements=weight.numel, rows=count * length, n=others)
        tape.emit("linalg_vector_norm", "rowwise", [gradient], [mean], sizes)
        tape.elementwise("pow_", [mean], [mean])
        tape.elementwise("div_", [mean], [mean])
        variables.put(name, mean)
        tape.elementwise("lerp_", [factor, mean], [factor])
        factors.append(factor)
    estimate = tape.like(weight)
    sizes = OperationSizes.of_product(rows, columns, 1)
    if matrices:
        sizes = OperationSizes.of_product(rows, columns, 1, batch=count)
        tape.emit("bmm", "bmm", factors, [estimate], sizes, variant="nn")
    else:
        tape.emit("mm", "gemm", factors, [estimate], sizes, variant="nn")
    variables.put("estimate", estimate)
    mean = tape.tensor(*matrices, 1, 1, itemsize=weight.itemsize)
    sizes = OperationSizes(elements=count * rows, rows=rows, n=count)
    tape.emit("mean", "rowwise", [factors[0]], [mean], sizes)
    tape.elementwise("clamp_", [mean], [mean])
    tape.elementwise("div_", [estimate, mean], [estimate])
    return estimate


def _read_norm(tape: Tape, tensor: Tensor, variables: _Variables) -> None:
    """Find the norm of all numbers of a tensor, which the host waits for and reads."""
    norm = tape.tensor(1, itemsize=tensor.itemsize)
    sizes = OperationSizes(elements=tensor.numel, rows=1, n=tensor.numel)
    tape.emit("linalg_vector_norm", "rowwise", [tensor], [norm], sizes)
    if variables.host_waits:
        tape.emit("to", "transfer", [], [norm], OperationSizes(elements=1), variant="to_host")


_UPDATES: dict[str, Callable[[Tape, Tensor, Tensor, _Variables], None]] = {
    "muon": _update_by_muon,
    "adafactor": _update_by_adafactor,
}
