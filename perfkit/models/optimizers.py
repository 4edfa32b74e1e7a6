"""Optimizers: what each keeps for a weight, and the operations of one update as PyTorch runs them.

Every part of the library reads `OPTIMIZERS`: an optimizer that is added to it has its states in
the memory of predictions and of strategies, its operations in every workload, and its row updates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from perfkit.ground.units import Values, check_choice

#: How PyTorch runs an update: weight by weight; in kernels for lists of weights, by default on a
#: GPU; and in one kernel that does everything.
FORMS = ("eager", "for_each", "fused")
#: The numbers that an optimizer keeps for each weight, by name.
STATES = ("state_1", "state_2")
#: The scales of the blocks of quantized states, by name.
SCALES = ("scale_1", "scale_2")
#: Numbers of a block of quantized states, which has one scale, and bytes of this: bitsandbytes,
#: `init_state` in bitsandbytes/optim/optimizer.py at 06029dd [-], [B].
QUANTIZED_BLOCK = 2048
SCALE_ITEMSIZE = 4
#: Bytes of a number that an optimizer keeps for a row of a table, which is fp32 whatever the table holds
#: (pytorch/FBGEMM, split_table_batched_embeddings_ops_training.py, ``momentum1``) [B].
_ROW_STATE = 4
#: Operands with one number for each weight tensor: its step counter, and the 1 that is added to it.
SINGLE = ("step", "one")


@dataclass(frozen=True)
class ElementwiseStep:
    """One element-wise operation of an update.

    Operands are named ``weight``, ``gradient``, ``state_1`` and ``state_2``, ``scratch_1`` and
    ``scratch_2`` for new tensors of the size of the weight, ``scale_1`` and ``scale_2``, which have
    one number for each block of a quantized state, and ``step`` and ``one``, which have one number
    for each weight tensor.

    Parameters
    ----------
    name : str
        PyTorch's name of the operation.
    reads, writes : tuple of str
        Operands that it reads and writes.
    variant : str
        Class by which a platform times it; empty for the name itself.
    one_weight_each : bool
        Whether a kernel updates a single weight, also where PyTorch works on lists.

    Notes
    -----
    A variant is the name that a capture gives to the operation (`perfkit.workloads.vocabulary`),
    and by which calibrations measure it (`FUNCTIONS` in `perfkit.workloads.measured_functions`): PyTorch's name
    without ``_foreach_``. With one number in place of a second tensor it ends with ``_scalar``, or
    for ``add_`` with ``_scalar_``, as it is another kernel that reads less; ``mul_`` and ``div_``
    are measured with a number and keep their names. A list with a number for each tensor does not
    count as one number. So the eager Adam divides by ``div_scalar``, and the for-each Adagrad
    multiplies gradients by a list of rates: ``mul``, not ``mul_scalar``.

    An operation that no calibration measures, such as ``sign_``, keeps its own name, and `variant`
    stays empty. A CPU then times it by the median of its measured element-wise functions, with a
    wider interval, and predictions of built models warn (`find_stand_in` in
    `perfkit.platform.kernels`). The variant of another operation would hide that. Platforms of
    GPUs time all element-wise operations by one fit and ask for no variant.

    Examples
    --------
    An update that multiplies the gradient by a number and takes the sign of the product:

    >>> scale = ElementwiseStep("mul", ("gradient",), ("scratch_1",), variant="mul_scalar")
    >>> sign = ElementwiseStep("sign_", ("scratch_1",), ("scratch_1",))  # never measured
    >>> optimizer = Optimizer("made-up", states=0, update=(scale, sign))
    >>> [(step.name, step.variant) for step in optimizer.operations("for_each")]
    [('_foreach_mul', 'mul_scalar'), ('_foreach_sign_', 'sign_')]
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    variant: str = ""
    one_weight_each: bool = False

    @property
    def counts_steps(self) -> bool:
        """Whether it updates nothing but the step counters."""
        return self.writes == ("step",)


@dataclass(frozen=True)
class Optimizer:
    """One optimizer: what it keeps for each weight, and the operations of one update.

    Parameters
    ----------
    name : str
        Name by which workloads choose it.
    states : int
        Numbers that it keeps for each weight [-].
    quantized : bool
        Whether states are 8-bit numbers, with an fp32 scale for each `QUANTIZED_BLOCK` of them; else
        they have the format of the weight.
    states_per_row : int
        Numbers that it keeps for each row of a table instead [-].
    update : tuple of ElementwiseStep
        Operations of PyTorch's eager form for one weight tensor, in their order; empty if it only
        updates rows of tables.
    for_each_update : tuple of ElementwiseStep
        Operations of PyTorch's form for lists of weights; empty if they are those of the eager
        form, with the prefix ``_foreach_``.
    fused_kernel : str
        Name of PyTorch's fused kernel; empty if it has none.
    sparse_rows : bool
        Whether it can update the looked-up rows of a table one lookup after the other, without
        first adding up the gradients of the same row.
    updates_rows : bool
        Whether there are kernels that update single rows of tables.
    by_shape : bool
        Whether states and operations of an update depend on the shape of a weight, so that there is
        no list of steps; `perfkit.workloads.weight_updates` has the operations.
    others : str
        Name of the optimizer that updates all weights but the matrices of layers; empty if it
        updates all weights itself.
    host_waits : bool
        Whether the host reads numbers that its updates compute, and waits for them.
    torch_class : str
        Name of its class in ``torch.optim``; empty if there is none that can train a whole model.
    torch_arguments : mapping
        Arguments of that class, beside the learning rate.
    """

    name: str
    states: int
    quantized: bool = False
    states_per_row: int = 0
    update: tuple[ElementwiseStep, ...] = ()
    for_each_update: tuple[ElementwiseStep, ...] = ()
    fused_kernel: str = ""
    sparse_rows: bool = False
    updates_rows: bool = True
    by_shape: bool = False
    others: str = ""
    host_waits: bool = False
    torch_class: str = ""
    torch_arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def forms(self) -> tuple[str, ...]:
        """The entries of `FORMS` in which it can update dense weights."""
        return tuple(
            form for form in FORMS if self.update and (form != "fused" or self.fused_kernel)
        )

    def operations(self, form: str) -> tuple[ElementwiseStep, ...]:
        """Operations of one update in a form.

        Parameters
        ----------
        form : str
            One of `FORMS`.

        Returns
        -------
        operations : tuple of ElementwiseStep
            In their order. Names of the for-each form have its prefix.

        Raises
        ------
        ValueError
            For a form that it does not have, and for an optimizer whose operations depend on the shape
            of a weight.
        """
        if form == "fused" and self.others:  # of the weights that it leaves to another one
            return OPTIMIZERS[self.others].operations(form)
        if form == "fused" and form not in self.forms:
            raise ValueError(
                f"fused is True with optimizer {self.name!r}, which has no kernel for all weights; "
                "take fused=False"
            )
        self._refuse_shapes("operations")
        check_choice(f"form of the optimizer {self.name!r}", form, self.forms)
        if form == "eager":
            return self.update
        if form == "fused":
            return self._list_fused()
        operations = []
        for operation in self.for_each_update or self.update:
            listed = operation
            if not operation.one_weight_each:
                listed = ElementwiseStep(
                    f"_foreach_{operation.name}",
                    operation.reads,
                    operation.writes,
                    operation.variant or operation.name,
                )
            operations.append(listed)
        return tuple(operations)

    @property
    def updates_one_by_one(self) -> bool:
        """Whether a kernel updates a single weight, also where PyTorch works on lists."""
        return any(operation.one_weight_each for operation in self.update)

    def find_itemsize(self, operand: str, itemsize: float) -> float:
        """Bytes of a number of an operand of an update.

        Parameters
        ----------
        operand : str
            As `ElementwiseStep` names it.
        itemsize : float
            Bytes of a number of the weight [B].

        Returns
        -------
        itemsize : float
            That of the weight, or of a state; of the scales of blocks for each number of the weight
            [B].
        """
        if operand in SCALES:
            return SCALE_ITEMSIZE / QUANTIZED_BLOCK
        if operand in STATES and self.quantized:
            return 1.0
        return itemsize

    def kept_bytes(self, itemsize: float) -> float:
        """Bytes that it keeps for each number of a weight.

        Parameters
        ----------
        itemsize : float
            Bytes of a number of the weight that it updates [B].

        Returns
        -------
        nbytes : float
            Of all states [B].

        Raises
        ------
        ValueError
            For an optimizer that keeps other numbers for each shape, see `count_states`.
        """
        self._refuse_shapes("states")
        operands = STATES[: self.states]
        if self.quantized:
            operands += SCALES[: self.states]
        return sum((self.find_itemsize(operand, itemsize) for operand in operands), start=0.0)

    def count_states(self, shape: Sequence[Values], *, is_hidden: bool) -> Values:
        """Count the numbers that it keeps for a weight.

        Parameters
        ----------
        shape : sequence of int or array
            Sizes of the weight [-].
        is_hidden : bool
            Whether it is one of the layers, not of embeddings or head.

        Returns
        -------
        numbers : same kind as the sizes
            Without step counters [-].

        Examples
        --------
        Muon keeps one number for each of a matrix, Adafactor one for each row and column:

        >>> find_optimizer("muon").count_states((64, 192), is_hidden=True)
        12288
        >>> find_optimizer("muon").count_states((64, 192), is_hidden=False)
        24576
        >>> find_optimizer("adafactor").count_states((64, 192), is_hidden=True)
        256
        """
        if self.others and not self.updates_alone(shape, is_hidden=is_hidden):
            return OPTIMIZERS[self.others].count_states(shape, is_hidden=is_hidden)
        if self.by_shape and not self.others and len(shape) > 1:
            rows, columns = prod(shape[:-1]), prod((*shape[:-2], shape[-1]))
            return rows + columns
        return self.states * prod(shape)

    def updates_alone(self, shape: Sequence[Values], *, is_hidden: bool) -> bool:
        """Whether it updates a weight by the operations of its shape, one weight after another.

        Parameters
        ----------
        shape : sequence of int or array
            Sizes of the weight [-].
        is_hidden : bool
            Whether it is one of the layers, not of embeddings or head.

        Returns
        -------
        alone : bool
            False for what `others` updates.
        """
        if not self.others:
            return self.by_shape
        return is_hidden and len(shape) == 2

    def _refuse_shapes(self, what: str) -> None:
        """Raise a ValueError if it keeps and moves other numbers for each shape."""
        if self.by_shape:
            raise ValueError(
                f"{what} of the optimizer {self.name!r} depend on the shape of each weight; take "
                "Optimizer.count_states, or a prediction of a Transformer"
            )

    def _list_fused(self) -> tuple[ElementwiseStep, ...]:
        """The fused kernel, and before it the kernel that adds one to all step counters."""
        trained = ("weight", *STATES[: self.states])
        if not any(operation.counts_steps for operation in self.update):
            return (ElementwiseStep(self.fused_kernel, (*trained, "gradient"), trained),)
        count = ElementwiseStep("_foreach_add_", ("step",), ("step",), "add_scalar_")
        kernel = ElementwiseStep(self.fused_kernel, (*trained, "gradient", "step"), trained)
        return count, kernel

    def update_bytes(
        self, parameters: Values, itemsize: float = 4, form: str = "for_each"
    ) -> Values:
        """Bytes that one dense update reads and writes; the operations are those that predictions
        price.

        Parameters
        ----------
        parameters : int, array or expression
            Parameters updated [-].
        itemsize : float, optional
            Bytes of one number, the same for weight, gradient and state, unless states have a format
            of their own [B].
        form : str, optional
            One of `FORMS`.

        Returns
        -------
        nbytes : same kind as `parameters`
            Bytes read and written, without the step counters [B].

        Raises
        ------
        ValueError
            For an optimizer whose operations depend on the shape of a weight.
        """
        self._refuse_shapes("bytes of an update")
        each = 0.0
        for operation in self.operations(form):
            for operand in operation.reads + operation.writes:
                if operand not in SINGLE:
                    each += self.find_itemsize(operand, itemsize)
        return each * parameters

    def state_bytes(self, rows: Values, dim: Values, itemsize: Values = 4) -> Values:
        """Bytes that it keeps for the rows of a table.

        Parameters
        ----------
        rows, dim : int, array or expression
            Rows and columns of the table [-].
        itemsize : float, array or expression, optional
            Bytes of one number [B].

        Returns
        -------
        nbytes : same kind as `rows`
            As many numbers as weights for each state, or one of fp32 for each row [B].

        Raises
        ------
        ValueError
            For an optimizer that keeps other numbers for each shape.
        """
        self._refuse_shapes("states of tables")
        return 1.0 * rows * (_ROW_STATE * self.states_per_row + 1.0 * self.states * dim * itemsize)

    def row_state_bytes(self, row: Values, access: float) -> Values:
        """Bytes of the states of one row as an update touches them.

        Parameters
        ----------
        row : float, array or expression
            Bytes that move when the row of weights is touched [B].
        access : float
            Smallest access, which a single number for the row takes [B].

        Returns
        -------
        nbytes : same kind as `row`
            Bytes that are read, and as many that are written [B].

        Raises
        ------
        ValueError
            For an optimizer that keeps other numbers for each shape.
        """
        self._refuse_shapes("states of rows")
        return self.states * row + float(access) * self.states_per_row


def _adam_steps(*, decays: bool, for_each: bool) -> tuple[ElementwiseStep, ...]:
    """Operations of Adam; AdamW first decays the weight."""
    count = ElementwiseStep("add_", ("step",), ("step",), "add_scalar_")
    divided = "scratch_2"
    divide = ElementwiseStep("div", ("scratch_1",), (divided,), "div_scalar")
    if for_each:
        count = ElementwiseStep("add_", ("step", "one"), ("step",))
        divided = "scratch_1"
        divide = ElementwiseStep("div_", (divided,), (divided,))
    decay = ElementwiseStep("mul_", ("weight",), ("weight",))
    return (
        count,
        *([decay] if decays else []),
        ElementwiseStep("lerp_", ("state_1", "gradient"), ("state_1",)),
        ElementwiseStep("mul_", ("state_2",), ("state_2",)),
        ElementwiseStep("addcmul_", ("state_2", "gradient"), ("state_2",)),
        ElementwiseStep("sqrt", ("state_2",), ("scratch_1",)),
        divide,
        ElementwiseStep("add_", (divided,), (divided,), "add_scalar_"),
        ElementwiseStep("addcdiv_", ("weight", "state_1", divided), ("weight",)),
    )


def _adagrad_steps(*, for_each: bool) -> tuple[ElementwiseStep, ...]:
    """Operations of Adagrad; the for-each form scales the gradient into a new tensor."""
    count = ElementwiseStep("add_", ("step",), ("step",), "add_scalar_")
    scaled, scale = "gradient", []
    if for_each:
        count = ElementwiseStep("add_", ("step", "one"), ("step",))
        scaled, scale = "scratch_2", [ElementwiseStep("mul", ("gradient",), ("scratch_2",))]
    return (
        count,
        ElementwiseStep("addcmul_", ("state_1", "gradient"), ("state_1",)),
        ElementwiseStep("sqrt", ("state_1",), ("scratch_1",)),
        ElementwiseStep("add_", ("scratch_1",), ("scratch_1",), "add_scalar_"),
        *scale,
        ElementwiseStep("addcdiv_", ("weight", scaled, "scratch_1"), ("weight",)),
    )


_MOMENTUM = (
    ElementwiseStep("mul_", ("state_1",), ("state_1",)),
    ElementwiseStep("add_", ("state_1", "gradient"), ("state_1",)),
    ElementwiseStep("add_", ("weight", "state_1"), ("weight",)),
)

_QUANTIZED_ADAM = (
    ElementwiseStep(
        "optimizer_update_8bit_blockwise",
        ("weight", "gradient", *STATES, *SCALES),
        ("weight", *STATES, *SCALES),
        one_weight_each=True,
    ),
)

#: Optimizers by name. Row-wise Adagrad keeps one number for each row of a table, and has no form
#: for other weights, like sparse Adam.
OPTIMIZERS: dict[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer(
            "sgd",
            states=0,
            update=(ElementwiseStep("add_", ("weight", "gradient"), ("weight",)),),
            fused_kernel="_fused_sgd_",
            sparse_rows=True,
            torch_class="SGD",
        ),
        Optimizer(
            "sgd_momentum",
            states=1,
            update=_MOMENTUM,
            fused_kernel="_fused_sgd_",
            torch_class="SGD",
            torch_arguments=MappingProxyType({"momentum": 0.9}),
        ),
        Optimizer(
            "adagrad",
            states=1,
            update=_adagrad_steps(for_each=False),
            for_each_update=_adagrad_steps(for_each=True),
            fused_kernel="_fused_adagrad_",
            torch_class="Adagrad",
        ),
        Optimizer(
            "adam",
            states=2,
            update=_adam_steps(decays=False, for_each=False),
            for_each_update=_adam_steps(decays=False, for_each=True),
            fused_kernel="_fused_adam_",
            torch_class="Adam",
        ),
        Optimizer(
            "adamw",
            states=2,
            update=_adam_steps(decays=True, for_each=False),
            for_each_update=_adam_steps(decays=True, for_each=True),
            fused_kernel="_fused_adamw_",
            torch_class="AdamW",
        ),
        Optimizer(
            "adamw_8bit",
            states=2,
            quantized=True,
            update=_QUANTIZED_ADAM,
            updates_rows=False,
        ),
        Optimizer("muon", states=1, updates_rows=False, by_shape=True, others="adamw"),
        Optimizer(
            "adafactor",
            states=1,
            updates_rows=False,
            by_shape=True,
            host_waits=True,
            torch_class="Adafactor",
        ),
        Optimizer("rowwise_adagrad", states=0, states_per_row=1),
        Optimizer("sparse_adam", states=2),
    )
}
_FUSED = "_fused"


def list_optimizers(
    *, dense: bool = False, rows: bool = False, by_shape: bool = True
) -> tuple[str, ...]:
    """Names of all optimizers.

    Parameters
    ----------
    dense : bool, optional
        Whether to list only those that can update weights outside of tables.
    rows : bool, optional
        Whether to list only those that can update single rows of tables.
    by_shape : bool, optional
        Whether to list also those whose updates depend on the shape of a weight.

    Returns
    -------
    names : tuple of str
        Keys of `OPTIMIZERS`.
    """
    names = []
    for name, optimizer in OPTIMIZERS.items():
        can_update = bool(optimizer.update) or optimizer.by_shape or not dense
        can_update_rows = optimizer.updates_rows or not rows
        is_wanted = by_shape or not optimizer.by_shape
        if can_update and can_update_rows and is_wanted:
            names.append(name)
    return tuple(names)


def find_optimizer(
    name: str,
    *,
    dense: bool = False,
    rows: bool = False,
    by_shape: bool = True,
    argument: str = "optimizer",
) -> Optimizer:
    """The optimizer of a name.

    Parameters
    ----------
    name : str
        A key of `OPTIMIZERS`, or one followed by ``_fused``, which has the same states.
    dense : bool, optional
        Whether it has to update weights outside of tables.
    rows : bool, optional
        Whether it has to update single rows of tables.
    by_shape : bool, optional
        Whether its updates may depend on the shape of a weight.
    argument : str, optional
        What errors call it.

    Returns
    -------
    optimizer : Optimizer
        Its entry.

    Raises
    ------
    ValueError
        For an unknown name; the message lists the known ones.

    Examples
    --------
    >>> find_optimizer("adamw").states, find_optimizer("adamw").update_bytes(1, form="fused")
    (2, 28.0)
    >>> find_optimizer("rowwise_adagrad", dense=True)
    Traceback (most recent call last):
    ...
    ValueError: optimizer is 'rowwise_adagrad'; known are sgd, sgd_momentum, adagrad, adam, adamw, adamw_8bit, muon, adafactor
    """
    if isinstance(name, str) and not dense:
        name = split_form(name)[0]
    known = list_optimizers(dense=dense, rows=rows, by_shape=by_shape)
    return OPTIMIZERS[check_choice(argument, name, known)]


def split_form(name: str) -> tuple[str, str]:
    """Split a name such as ``adam_fused`` into the optimizer and its form.

    Parameters
    ----------
    name : str
        A key of `OPTIMIZERS`, or one followed by ``_fused``.

    Returns
    -------
    optimizer, form : str
        The key; ``fused``, or else ``for_each``, PyTorch's default on a GPU.

    Examples
    --------
    >>> split_form("adam_fused"), split_form("adam")
    (('adam', 'fused'), ('adam', 'for_each'))
    """
    base = name.removesuffix(_FUSED)
    if name != base and base in OPTIMIZERS and "fused" in OPTIMIZERS[base].forms:
        return base, "fused"
    return name, "for_each"
