"""The recorder of a training step: it appends every operation that PyTorch dispatches to the
columns of a graph."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from perfkit.models.distributions import Zipf, unique_rows
from perfkit.recording.alike import find_reduction
from perfkit.recording.exchanges import (
    COMPILED_GRAPHS,
    GRAPHED,
    Exchanges,
    answer,
    find_ranks,
    name_collective,
)
from perfkit.recording.modules import DTYPES
from perfkit.recording.places import LISTS, Places
from perfkit.recording.questions import (
    Question,
    expect_answer,
    find_asking_frame,
    make_question,
    must_pass,
)
from perfkit.recording.refusals import (
    NEEDED,
    NESTED,
    VALUE_ERRORS,
    explain,
    find_line,
    refuse,
)
from perfkit.recording.trails import USUAL, Trail, Trial
from perfkit.recording.values import Values, are_sparse, compute, is_whole
from perfkit.workloads.columns import (
    Accesses,
    Allocations,
    Features,
    HostCalls,
    OperationSizes,
    Owners,
    Size,
    Weights,
)
from perfkit.workloads.execution import compile_graph
from perfkit.workloads.graph import Graph, Label
from perfkit.workloads.linear_algebra import VARIED_ATTENTION
from perfkit.workloads.row_operations import reads_few_rows
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.vocabulary import (
    SPARSE_SUM,
    SPARSE_UPDATE,
    VIEWS,
    count_bytes,
    find_entry,
    is_unpriced,
    walk_tensors,
)

_NAMES: dict[Any, str] = {
    **{dtype: name for name, dtype in DTYPES.items() if name != "tf32"},
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.complex32: "fp16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}
#: Products whose number format is that of their factors, and not that of their result.
_BY_FACTORS = {
    "_scaled_mm",
    "_scaled_mm_v2",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
    "_int_mm",
}
#: Operations that say which of two numbers is larger.
_ORDERING = ("lt", "le", "gt", "ge")
#: Namespaces of operations that PyTorch itself brings.
_BUILT_IN = ("aten", "prim", "prims", "profiler", "fsdp", "symm_mem", "quantized", "dtensor")
#: PyTorch's switch for products of fp32 in TF32 on a GPU, by operation class.
_SWITCHES = {"gemm": "matmul", "bmm": "matmul", "convolution": "conv", "recurrent": "rnn"}
#: Assumption for operations without a model whose work does not follow from their bytes.
UNKNOWN_WORK = (
    "perfkit has no model of the work of {}: it counts the bytes that they move, and their time may be far too short; "
    "measure them and add their time"
)
#: Assumption for work on tensors of the host.
HOST_WORK = (
    "the step works on tensors of the host before it moves them to the GPU; this work, its gradients and the memory of "
    "these tensors count as the GPU's"
)
#: Assumption for weights on the host in a step that names a GPU.
HOST_WEIGHTS = (
    "weights are trained that the step leaves on the host; they, their update and what is computed with them count as "
    "the GPU's"
)
#: Assumption for a step that names several GPUs.
SEVERAL_GPUS = (
    "the step names several GPUs ({}); a capture follows one rank with one GPU, so that the work of all counts as that "
    "of one, and copies between them are left out"
)
#: What is said of a step without a trained weight.
NOTHING_TRAINED = (
    "no weight is trained: the {} numbers of the weights are frozen (requires_grad=False)"
)
#: The node of autograd that stores the gradient of a weight; DistributedDataParallel hooks into it.
_KEEP = "torch::autograd::AccumulateGrad"
#: Arguments of a fused optimizer that PyTorch declares as written.
_ONLY_READ = ("grads", "state_steps")
#: The device of a tensor, which PyTorch reads several times for each operation.
_DEVICE = torch.ops.prim.device.default


class _Schema:
    """Properties of an operation, found once."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.split("::")[-1]
        self.defaults = [(a.name, a.default_value) for a in schema.arguments]
        changed = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        self.written = tuple(i for i, is_written in enumerate(changed) if is_written)
        #: Written arguments that are not read: they only receive results.
        self.lent = self.written if self.name[-1] != "_" else ()
        self.pointwise = torch.Tag.pointwise in func.tags
        own = func.namespace not in _BUILT_IN and "c10d" not in func.namespace
        #: Whether another package brings it, or the user.
        self.foreign = own
        self.view = self.name in VIEWS or func.namespace in ("prim", "profiler")
        self.collective = name_collective(func)
        #: Whether its result is a view, or else a new tensor whose sizes depend only on those of
        #: its arguments.
        self.aliasing = func.is_view or self.name == "_unsafe_view"
        dynamic = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags}
        plain = not (self.written or self.aliasing or (dynamic and self.name != "index"))
        self.sized = plain and [str(each.type) for each in schema.returns] == ["Tensor"]
        #: Whether it only changes the numbers of its first argument, so that its result is that
        #: argument.
        simple = (
            self.pointwise
            or self.name[:9] == "_foreach_"
            or self.name in ("normal_", "uniform_", "index_add_")
        )
        self.in_place = self.written == (0,) and not self.lent and simple
        #: Whether it is the fused kernel of an optimizer, which changes its arguments and returns
        #: nothing; and the position of the scale of gradients.
        self.fused_update = (
            self.name.startswith("_fused_") and self.name.endswith("_") and not len(schema.returns)
        )
        names = [name for name, _ in self.defaults]
        self.scale = names.index("grad_scale") if "grad_scale" in names else -1

    def complete(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments in the order of the schema, with defaults."""
        if len(args) == len(self.defaults):
            return [*args]
        return [*args, *(kwargs.get(name, default) for name, default in self.defaults[len(args) :])]


#: What masked_fill runs on a GPU, whose time no calibration measures as one: PyTorch's
#: TensorAdvancedIndexing.cpp.
_COPY, _FILL = _Schema(torch.ops.aten.clone.default), _Schema(torch.ops.aten.masked_fill_.Scalar)
#: What a GPU runs for the bias of a convolution, besides the convolution: PyTorch's Convolution.cpp,
#: `_convolution` (`output.add_`) and `convolution_backward` (`grad_output.sum`).
_ADD, _SUM = _Schema(torch.ops.aten.add_.Tensor), _Schema(torch.ops.aten.sum.dim_IntList)


class Recorder(TorchDispatchMode):
    """Appends dispatched operations to columns. It never keeps tensors, as this would change what
    autograd does.

    Parameters
    ----------
    accelerator : bool
        Whether the step is recorded as it runs on a GPU.
    """

    def __init__(self, accelerator: bool) -> None:
        super().__init__()
        self.values = Values()
        self.exchanges = Exchanges(self)
        self.accelerator = accelerator
        self.on = False  # whether operations are appended
        self.agreeing = False  # whether ranks agree on whole numbers, which is no work of the step
        # leading: a backward pass was called and has not begun yet
        self.phase, self.leading = "forward", False
        self.modules: list[str] = []  # paths of the running modules, the innermost one last
        self.compiled: set[str] = set()  # phases that are compiled
        self.places = Places(self.values, accelerator)  # which tensors are on the host
        self._copying = False  # whether a tensor is copied between host and GPU
        # called after each backward pass
        self.at_end_of_backward: Callable[[], None] | None = None
        self.lost = ""  # what a thread of the step does that the capture cannot follow
        self.answers: dict[Question, bool] = {}  # usual answers to questions of the step
        self.checks: set[Question] = set()  # those after whose other answer the step does not go on
        self.trail = Trail(USUAL, self.answers)  # what the present call of the step does, in brief
        self._frozen: dict[int, int] = {}  # weights without a gradient: numbers by storage
        self._weights_of_modules: set[int] = set()  # storages of all parameters of modules
        self._schemas: dict[Any, _Schema] = {}
        # number of the next node of autograd where a module begins or ends
        self._marks: list[tuple[int, str]] = []
        self._node: tuple[int, str] | None = None  # number and name of the running node of autograd
        self._opened = True  # whether the running node has appended an operation
        self._forget_operations()

    def _forget_operations(self) -> None:
        """Begin columns without operations."""
        self.optimizers: set[int] = set()  # identities of those that the recorded call runs
        # names of their classes, in the order of their calls
        self.optimizer_names: dict[str, None] = {}
        # operations whose work has no model, in the order they were met
        self._unpriced: dict[str, None] = {}
        self.labels: list[Label] = []
        self.viewed = 0  # views
        self.bare = 0  # calls of the framework without a kernel
        self._sizes: list[OperationSizes] = []  # of each operation
        self._host_calls: list[HostCalls] = []  # of each operation
        self._accesses: list[tuple[int, int, float, int]] = []
        # storages of tensors that updates in lists use together: a weight, its gradient and states
        self._partners: dict[tuple[int, ...], None] = {}
        self._dtypes: list[str] = []
        self._keys: list[float] = []
        self._tables: list[EmbeddingTable] = []
        self._trained: dict[int, int] = {}
        self._inputs: set[int] = set()  # leaves with a gradient that are no parameters
        # table and bags of the last lookup, by storage of the weight
        self._weights: dict[int, tuple[int, Size]] = {}
        # table, by storage of the indices and rows of the table
        self._indices: dict[tuple[int, int], int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled during a capture; to disable the compiler at each call would take
        long."""
        return False

    @property
    def module(self) -> str:
        """Path of the innermost running module; empty outside of modules."""
        return self.modules[-1] if self.modules else ""

    def mark(self) -> None:
        """Assign the nodes of autograd that are made from now on to the innermost running
        module."""
        self._marks.append((torch._C._autograd._get_sequence_nr(), self.module))

    def _locate(self, tensors: Sequence[Tensor]) -> str:
        """Find the path of the module of an operation; this also updates the phase and counts calls
        of autograd."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            if self._node is not None:
                self._node, self._opened = None, True
            if (
                self.phase == "backward"
                and torch._C._current_graph_task_id() == -1
                and not self.leading
            ):
                self.phase = "update"
                self.exchanges.end_backward()
            if self.phase == "update" and (
                self.modules or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
            ):
                self.phase = "forward"
            return self.module
        number, name = node._sequence_nr(), node.name()
        if self._node != (number, name) or name == _KEEP:
            self.bare += not self._opened
            self._node, self._opened = (number, name), False
            if name == _KEEP:
                held = getattr(node.variable, "_local_tensor", node.variable)
                number_of_leaf = self.values.number(held)
                self._trained[number_of_leaf] = held.numel()
                if not isinstance(node.variable, nn.Parameter):
                    self._inputs.add(number_of_leaf)
        self.phase, self.leading = "backward", False
        if self.modules:  # a checkpoint, which is computed again in the backward pass
            return self.module
        place = bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1
        return self._marks[place][1] if place >= 0 and number < 1 << 62 else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if _is_divided(types):
            if any(issubclass(each, NestedTensor) for each in types):
                refuse(NESTED)
            return NotImplemented
        schema = self._schemas.get(func)
        if schema is None:
            schema = _Schema(func)
            self._schemas[func] = schema
        kwargs, work = kwargs or {}, None
        given = [t for t in walk_tensors([args, kwargs]) if isinstance(t, Tensor)]
        if func.namespace == "c10d":
            out, work = answer(func, args)
            if schema.collective and not self.agreeing:
                self._exchange_known(func, schema, schema.complete(args, kwargs), None)
        elif self.agreeing and (
            all(map(is_whole, given)) if given else kwargs.get("dtype") is torch.int32
        ):
            return compute(func, *args, **kwargs)
        elif schema.name == "clone" and given[0].layout is torch.sparse_coo:
            return args[0].detach()
        else:
            try:
                out = self.values.work_out(func, schema, args, kwargs, given)
            except VALUE_ERRORS as error:
                self.note_missed(error)
                raise
            if schema.collective:
                self._exchange_known(func, schema, schema.complete(args, kwargs), out)
        for made in walk_tensors(out):
            if isinstance(made, FakeTensor) and made.layout in (torch.strided, torch.sparse_coo):
                self.values.number(made)
        if schema.name in _ORDERING:
            self._note_better(given, out)
        if self._copying:
            return out
        self.places.note_result(schema.name, given, out, computed=self.on and not schema.view)
        if not (self.agreeing or schema.view):
            self.trail.append(schema.name, given, out)
        if self.on and not self.agreeing:
            # weights that are exchanged after their update begin no forward pass
            moved = schema.view or func.namespace == "c10d"
            module, complete = self._locate([] if moved else given), schema.complete(args, kwargs)
            if schema.collective:
                self.exchanges.record(schema.collective, func, complete, out, module, work)
            elif schema.name == "wait_tensor":
                self.exchanges.touch(given)
            elif schema.view:
                self.viewed += 1
            elif schema.name == "masked_fill" and self.accelerator:
                # a copy that is then filled: two kernels
                self._append(_COPY, [args[0], None], given[:1], out, module)
                self._append(_FILL, [out, *complete[1:]], [out, *given[1:]], out, module)
                self._host_calls[-1] = self._host_calls[-1]._replace(calls=0)
            elif schema.name == "convolution" and self.accelerator and complete[2] is not None:
                self._append_with_bias(schema, complete, out, module)
            elif schema.name == "convolution_backward" and self.accelerator and complete[10][2]:
                self._append_with_bias_gradient(schema, complete, out, module)
            elif schema.name == "copy_" and self.places.crosses(given):
                to_host = self.places.is_on_host(given[0])
                if to_host:
                    self.transfer("to_host", given[0])
                else:
                    self._fill(given[0], given[1], host_waits=not complete[2])
            elif "c10d" not in func.namespace:
                self._append(schema, complete, given, out, module)
        return out

    def _append(
        self, schema: _Schema, args: list[Any], given: Sequence[Tensor], out: Any, module: str
    ) -> None:
        """Append an operation with the class and sizes that the vocabulary gives it."""
        if schema.name in SPARSE_SUM.names and are_sparse(args[:2]):
            entry = SPARSE_SUM
        elif schema.name in SPARSE_UPDATE.names and are_sparse(args[1:2]):
            entry = SPARSE_UPDATE
        else:
            entry = find_entry(schema.name, pointwise=schema.pointwise)
        is_bare = entry.kind == "other" and schema.foreign
        # a CPU has no model of them
        is_of_gpu = entry.kind in ("factorization", "fourier") and not self.accelerator
        if is_unpriced(schema.name) or is_bare or is_of_gpu:
            self._unpriced[schema.name] = None
        inputs = args
        if schema.lent and entry.kind in ("gemm", "bmm"):  # the result is no factor
            inputs = [each for place, each in enumerate(args) if place not in schema.lent]
        variant = entry.name_variant(schema.name, inputs)
        sizes = entry.sizes(self._read_starts(schema.name, inputs), out)
        if entry.kind.startswith("embedding") and variant != "dense_rows":
            sizes = self._find_table(schema.name, args, sizes)
        unread = {*entry.unread, *schema.lent}
        if reads_few_rows(variant, args, sizes):
            unread.add(0)
        reads = list(walk_tensors([a for i, a in enumerate(args) if i not in unread]))
        written = schema.written
        if schema.fused_update and args[schema.scale] is None:
            # gradients are only written back where they are unscaled, counters never
            written = tuple(i for i in written if schema.defaults[i][0] not in _ONLY_READ)
        writes = list(walk_tensors([args[i] for i in written])) or list(walk_tensors(out))
        if entry is SPARSE_UPDATE:
            reads, writes = [args[1]], []
        elif schema.name in ("_embedding_bag", "all_gather_copy_in"):
            writes = writes[:1]
        finishing = not self._node and torch._C._current_graph_task_id() != -1
        if finishing:
            self.exchanges.touch(reads)
        reduced = self._node is not None and self._node[1] == _KEEP and schema.name == "mul"
        copied_for_reducer = finishing or reduced  # by DistributedDataParallel
        dtype = next(
            (_NAMES[t.dtype] for t in (*walk_tensors(out), *given) if t.dtype in _NAMES), ""
        )
        if schema.name in _BY_FACTORS:
            dtype = _NAMES.get(given[0].dtype, "int8")
        if self.accelerator and dtype == "fp32" and entry.kind in _SWITCHES:
            switch = torch._C._get_fp32_precision_getter("cuda", _SWITCHES[entry.kind])
            dtype = "tf32" if switch == "tf32" else dtype
        self.emit(
            schema.name,
            entry.kind,
            variant,
            module,
            sizes,
            reads,
            writes,
            dtype,
            launches=entry.launches,
            is_call=not copied_for_reducer,
        )
        if self.phase == "update" and schema.name.startswith(LISTS):
            self._note_partners([*args, out])

    def _read_starts(self, name: str, args: list[Any]) -> list[Any]:
        """Arguments of an operation, with lists of numbers in place of tensors that say where samples
        of attention begin, if these are known."""
        places = VARIED_ATTENTION.get(name)
        if places is None:
            return args
        read = [*args]
        for place in (places.starts, places.starts + 1):
            starts = args[place]
            known = None if starts is None else self.values.pretend(starts).constant
            if known is not None:
                read[place] = compute(known.tolist)
        return read

    def _append_with_bias(self, schema: _Schema, args: list[Any], out: Any, module: str) -> None:
        """Append a convolution, and the kernel that adds the bias to its result."""
        x, weight, bias, *others = args
        self._append(schema, [x, weight, None, *others], [x, weight], out, module)
        self._append(_ADD, [out, bias, 1], [out, bias], out, module)
        self._host_calls[-1] = self._host_calls[-1]._replace(calls=0)

    def _append_with_bias_gradient(
        self, schema: _Schema, args: list[Any], out: Any, module: str
    ) -> None:
        """Append the gradients of a convolution, and the kernel that sums up that of its bias."""
        dy, x, weight, *others, wanted = args
        gradient_of_bias = out[2]
        if wanted[0] or wanted[1]:
            others = [*others, [*wanted[:2], False]]
            self._append(schema, [dy, x, weight, *others], [dy, x, weight], out[:2], module)
        other_dimensions = [0, *range(2, dy.dim())]
        summed = [dy, other_dimensions, False, None]
        self._append(_SUM, summed, [dy], gradient_of_bias, module)
        if wanted[0] or wanted[1]:
            self._host_calls[-1] = self._host_calls[-1]._replace(calls=0)

    def _note_partners(self, values: Sequence[Any]) -> None:
        """Note which tensors of the lists of an operation belong together: those with the same
        place in their lists."""
        lists = [list(walk_tensors(value)) for value in values if isinstance(value, list | tuple)]
        longest = max(map(len, lists), default=0)
        for together in zip(*(each for each in lists if len(each) == longest), strict=True):
            self._partners[tuple(self.values.number(tensor) for tensor in together)] = None

    def _find_owners(self, labels: Sequence[Label], accesses: Accesses) -> Owners:
        """Modules of the tensors that are updated in lists: a weight, its gradient or a state is
        used by a module or beside a tensor of which the module is known."""
        owner: dict[int, str] = {}
        for access in accesses:
            if labels[access.operation].module:
                owner.setdefault(access.buffer, labels[access.operation].module)
        rows: dict[int, str] = {}
        # states may be updated before they meet their weight
        for _ in range(2):
            for together in self._partners:
                modules = [owner[number] for number in together if number in owner]
                for number in together if modules else ():
                    rows[number] = owner.setdefault(number, modules[0])
        return Owners.from_rows([*rows.items()])

    def emit(
        self,
        name: str,
        kind: str,
        variant: str,
        module: str,
        sizes: OperationSizes,
        reads: Any,
        writes: Any,
        dtype: str = "",
        *,
        launches: int = 1,
        is_call: bool = True,
    ) -> None:
        """Append one operation to the columns; `is_call` says whether the framework is called for
        it, unless it belongs to the call of the running node anyway."""
        index = len(self.labels)
        self._keys.append(self.exchanges.current.place)
        within_node = self._node and self._opened and not self.modules
        calls = 1 if is_call and not within_node else 0
        self._host_calls.append(HostCalls(launches, calls, self.bare))
        self.bare, self._opened = 0, True
        self.labels.append(Label(name, kind, variant, self.phase, module))
        self._sizes.append(sizes)
        self._dtypes.append(dtype)
        for flag, tensors in enumerate((reads, writes)):
            for tensor in {id(t): t for t in tensors}.values():
                nbytes = count_bytes(tensor)
                if nbytes:
                    self._accesses.append((index, self.values.number(tensor), nbytes, flag))

    def meet(self, module: Any) -> None:
        """Note the weights of a module that has run: whether they are trained or frozen."""
        for parameter in module._parameters.values():
            if isinstance(parameter, Tensor) and not is_lazy(parameter):
                held = getattr(parameter, "_local_tensor", parameter)
                if _is_divided((type(held),)) or is_functorch_wrapped_tensor(held):
                    continue
                number = self.values.number(held)
                self._weights_of_modules.add(number)
                if not parameter.requires_grad:
                    self._frozen[number] = held.numel()

    def _count_weights(self, accesses: Accesses) -> tuple[list[int], list[str]]:
        """Storages of trained and of frozen weights that the graph touches, and what to say of
        them.

        Where modules have weights, a leaf that is no weight, such as an input with a gradient, is
        not trained.
        """
        touched = {*accesses.buffer.tolist()}
        inputs = self._inputs if self._weights_of_modules else set[int]()
        trained = [number for number in self._trained if number not in inputs]
        frozen = [number for number in self._frozen if number in touched]
        notes = []
        backward = any(label.phase == "backward" for label in self.labels)
        if backward and frozen and not trained:
            count = sum(self._frozen[number] for number in frozen)
            notes.append(NOTHING_TRAINED.format(count))
        self._trained = {number: self._trained[number] for number in trained}
        if self.places.are_weights_known() and self.places.are_on_host(trained):
            self.values.notes[HOST_WEIGHTS] = None
        return [*trained, *(number for number in frozen if number not in trained)], notes

    def follow(self, trial: Trial) -> Trail:
        """Begin another call of the step, which tries something."""
        self.trail = Trail(trial, self.answers)
        self.trail.first_storage = self.values.storages.count()
        return self.trail

    def note_missed(self, error: Exception) -> None:
        """Note an error for which the capture is refused, even if the step catches it and goes on."""
        text = explain(error) or NEEDED
        self.trail.missed = text.format(find_line(), getattr(error, "func", ""))

    def decide(self, tensor: Tensor) -> bool:
        """The answer to whether a computed tensor is true."""
        self.read(tensor)
        if self.values.number(tensor) in self.values.of_better:
            return self.trail.keep_better(find_line())
        frame = find_asking_frame()
        question = make_question(frame)
        if question not in self.answers:
            self.answers[question] = bool(expect_answer(frame))
            if must_pass(frame):
                self.checks.add(question)
        return self.trail.answer(question)

    def _note_better(self, given: Sequence[Tensor], out: Any) -> None:
        """Note a comparison of a number of this call with one of an earlier call, such as the best one
        so far."""
        if len(given) != 2 or not isinstance(out, FakeTensor) or out.numel() != 1:
            return
        if any(getattr(tensor, "constant", None) is not None for tensor in (*given, out)):
            return
        numbers = [self.values.number(tensor) for tensor in given]
        earlier = [number < self.trail.first_storage for number in numbers]
        of_weights = not self._weights_of_modules.isdisjoint(numbers)
        if earlier[0] != earlier[1] and not of_weights:
            self.values.of_better.add(self.values.number(out))

    def _exchange_known(self, func: Any, schema: _Schema, args: list[Any], out: Any) -> None:
        """Note what a collective makes of known numbers; `out` are results that are no arguments."""
        # the first of its lists receives results, unless an operation returns new ones
        lists = [[*walk_tensors(each)] for each in args]
        lists = [each for each in lists if each]
        if not lists:  # a barrier
            return
        given, results = lists[-1], lists[0] if out is None else [*walk_tensors(out)]
        reduction = next((each for each in args if isinstance(each, str)), None)
        names = dict(zip((name for name, _ in schema.defaults), args, strict=True))
        self.values.exchange(
            schema.collective,
            given,
            results,
            len(find_ranks(names)),
            find_reduction() if out is None else reduction,
        )

    def begin(self) -> None:
        """Begin the call that is recorded, or another one in place of it."""
        if self.labels:
            self._forget_operations()
            self.exchanges.restart()
        self.phase, self.on = "forward", True
        self.values.storages.begin()

    def name_gpu(self, device: Any) -> None:
        """Note a GPU that the step names."""
        new = self.places.name_gpu(device)
        numbers = sorted(self.places.gpus - {None})
        if self.accelerator and new and len(numbers) > 1:
            for others in range(2, len(numbers)):
                self.values.notes.pop(_list_gpus(numbers[:others]), None)
            self.values.notes[_list_gpus(numbers)] = None

    def check_weights(self, weights: Sequence[Any]) -> None:
        """Say so if an optimizer updates weights on the host, in a step that names a GPU."""
        if not self.places.are_weights_known():
            return
        dense = [w for w in weights if isinstance(w, FakeTensor) and w.layout is torch.strided]
        if self.places.are_on_host([self.values.number(weight) for weight in dense]):
            self.values.notes[HOST_WEIGHTS] = None

    def move(self, tensor: Tensor, *, to_host: bool, host_waits: bool = True) -> Tensor:
        """A copy of a tensor on the other of host and GPU, for which the host waits, unless the
        program wants it not to and the tensor is in pinned memory. Before the step it is free."""
        if not to_host and self.on and self.places.is_computed_on_host(tensor):
            self.values.notes[HOST_WORK] = None
        self._copying = True
        try:
            made = tensor.clone()
        finally:
            self._copying = False
        self.places.note_copy(made, on_host=to_host)
        if to_host:
            self.transfer("to_host", tensor)
        else:
            self._fill(made, tensor, host_waits=host_waits)
        return made

    def copy_from_outside(self, tensor: Tensor) -> Tensor:
        """A copy on the host of a tensor from outside of the capture, which keeps what is known."""
        self._copying = True
        try:
            made: Tensor = self.values.copy_deeply(tensor, {})
        finally:
            self._copying = False
        self.places.note_batch(made)
        return made

    def _fill(self, tensor: Tensor, source: Tensor, *, host_waits: bool) -> None:
        """Append a copy from the host to a tensor of the GPU. The GPU copies pinned memory by
        itself, while the host goes on."""
        if not self.places.is_pinned(source):
            self.transfer("to_device", tensor)
        elif self.accelerator and self.on:
            self.exchanges.copy_inputs(tensor, self.module)
            if host_waits:  # it waits for nothing that takes long
                sizes = OperationSizes(elements=0)
                self.emit("to", "transfer", "to_device", self.module, sizes, [], [], is_call=False)

    def read(self, tensor: Tensor) -> None:
        """The host reads a tensor: it waits for a copy of one on the GPU."""
        if not self.places.is_on_host(tensor):
            self.transfer("to_host", tensor)

    def transfer(self, direction: str, tensor: Tensor) -> None:
        """Append a copy between host and device that the host waits for; on a CPU there is none."""
        if not (self.accelerator and self.on):
            return
        sizes, dtype = OperationSizes(elements=tensor.numel()), _NAMES.get(tensor.dtype, "")
        self.emit("to", "transfer", direction, self.module, sizes, [], [tensor], dtype)

    def _find_table(self, name: str, args: list[Any], sizes: OperationSizes) -> OperationSizes:
        """Sizes of a lookup, or of its backward pass or update, with the number of its table; a new
        table is added."""
        if name == "_embedding_bag_backward":
            rows = args[6]
            similar = (number for (_, size), number in self._indices.items() if size == rows)
            # none in a trace, which holds no indices
            found = self._indices.get((self.values.number(args[1]), rows))
            return sizes._replace(table=next(similar, 0) if found is None else found)
        weight = self.values.number(args[0])
        number, bags = self._weights.get(weight, (0, sizes.lookups))
        if name != "_embedding_bag":
            return sizes._replace(table=number, bags=bags)
        rows, dim = args[0].shape
        if weight not in self._weights:
            number = len(self._tables)
            # a capture knows all sizes as numbers
            lookups, all_bags = cast(float, sizes.lookups), cast(float, sizes.bags)
            pooling = lookups / max(all_bags, 1.0) or 1.0
            exponent = _fit_exponent(self.values.pretend(args[1]).constant, rows)
            table = EmbeddingTable(
                rows, dim, pooling, exponent, args[0].element_size(), f"table {number}"
            )
            self._tables.append(table)
            self.values.laws.setdefault(rows, table.distribution)
        self._weights[weight] = number, sizes.bags
        self._indices[self.values.number(args[1]), rows] = number
        return sizes._replace(table=number)

    def graph(self, name: str, family: str, ranks: int) -> Graph:
        """The recorded graph; operations of side streams stand where the compute stream lets them
        begin."""
        keys = np.array(self._keys, dtype=float)
        order = np.argsort(keys, kind="stable")
        features = Features.from_rows(self._sizes, self._host_calls).select(order)
        accesses = Accesses.from_rows(self._accesses)
        accesses = replace(accesses, operation=np.argsort(order)[accesses.operation]).sort()
        names, labels = (
            [self._dtypes[place] for place in order],
            tuple(self.labels[place] for place in order),
        )
        work = Counter[str]()
        for dtype, flops in zip(names, features.flops + 1.0, strict=True):
            work["fp32" if dtype == "tf32" else dtype] += flops  # not every device has TF32
        del work[""]
        main = max(work, key=lambda dtype: work[dtype], default="fp32")
        trained, notes = self._count_weights(accesses)
        weights = [(number, number in self._weights) for number in trained]
        if self._unpriced:
            notes.append(UNKNOWN_WORK.format(", ".join(self._unpriced)))
        dtypes = tuple(dtype or main for dtype in names)
        graph = Graph(
            labels,
            features,
            accesses,
            tuple(self._tables),
            sum(self._trained.values()),
            name or "step",
            family,
            main,
            dtypes if set(dtypes) - {main} else (),
            ranks,
            self.exchanges.list_groups(ranks),
            self.exchanges.list_waits(keys, order),
            notes=(*self.values.notes, *notes),
            weights=Weights.from_rows(weights),
            owners=self._find_owners(labels, accesses),
            device="cuda" if self.accelerator else "cpu",
            allocations=self._list_allocations(),
        )
        graph = compile_graph(graph, self.compiled) if self.compiled else graph
        if GRAPHED in graph.notes or COMPILED_GRAPHS in graph.notes:
            return replace(graph, execution="graphs")
        return graph

    def _list_allocations(self) -> Allocations:
        """Allocations of the device as a column of the graph; copies on the host are not among
        them."""
        changes = [
            (number, nbytes)
            for number, nbytes in self.values.storages.allocations
            if number not in self.places.copies
        ]
        return Allocations.from_rows(changes)


def _list_gpus(numbers: Sequence[int]) -> str:
    """The note of these GPUs."""
    return SEVERAL_GPUS.format(", ".join(f"cuda:{number}" for number in numbers))


@lru_cache
def _is_divided(types: tuple[type, ...]) -> bool:
    """Whether one of these types holds other tensors, as shards do."""
    return any(hasattr(each, "__tensor_flatten__") for each in types)


def _fit_exponent(indices: Tensor | None, rows: int) -> float:
    """The Zipf exponent that gives this number of distinct indices; 0 if the indices are not
    known."""
    if indices is None or not indices.numel():
        return 0.0
    unique, lookups = int(compute(torch.unique, indices).numel()), indices.numel()
    if unique > 0.98 * float(unique_rows(Zipf(rows, 1e-6), lookups)):
        return 0.0

    def gap(exponent: float) -> float:
        return unique - float(unique_rows(Zipf(rows, exponent), lookups))

    return round(float(brentq(gap, 0.0, 4.0)), 3) if gap(4.0) > 0 else 4.0
