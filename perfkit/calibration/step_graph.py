"""The graph of a traced step: each operation runs again on tensors of the recorded sizes."""

import ast
import logging
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from perfkit.calibration.activity import list_work
from perfkit.calibration.collectives import checked, list_collectives
from perfkit.calibration.places import list_levels
from perfkit.ground.forks import check_threads
from perfkit.ground.progress import follow
from perfkit.ground.units import Array, show
from perfkit.readers.kineto import DEVICE, TraceFile, find_iterations
from perfkit.recording.recorder import Recorder
from perfkit.workloads.columns import HostCalls, OperationSizes
from perfkit.workloads.graph import PHASES, Graph, Label
from perfkit.workloads.vocabulary import VIEWS, find_entry, walk_tensors

#: Types of tensors by their name in traces.
_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "long int": torch.int64,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "signed char": torch.int8,
    "short": torch.int16,
    "short int": torch.int16,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
}
#: Arguments for the storage and type of results, recorded as numbers that change with versions of
#: PyTorch.
_ABOUT = {"device", "layout", "pin_memory", "memory_format", "generator", "dtype"}
_MISFIT = object()
#: Errors of PyTorch for arguments that an operation does not take.
_REFUSED = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
#: Functions of PyTorch that consist of operations of the vocabulary, or have sizes like them.
#: Nothing else runs: a trace is a file from somewhere, and its names could name any operator.
_COMPOSED_NAMES = """
    _addmm_activation _batch_norm_impl_index _convolution _euclidean_dist _int_mm _scaled_mm _stack
    _trilinear _weight_norm absolute adaptive_avg_pool1d adaptive_max_pool1d add addbmm addr argsort
    avg_pool1d batch_norm bilinear bitwise_and bitwise_or bitwise_xor cdist clip concat concatenate
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d cross cudnn_convolution
    cudnn_convolution_transpose cummax cummin dist divide dropout dstack elu embedding_bag
    feature_dropout flatten floor_divide gelu greater greater_equal grid_sampler grid_sampler_2d
    grid_sampler_3d group_norm hardshrink hardsigmoid hardtanh hstack index_fill inner instance_norm
    isclose isfinite isinf isnan kthvalue layer_norm leaky_relu less less_equal linalg_cross
    linalg_matmul linalg_norm linalg_vecdot linear log_sigmoid log_softmax masked_scatter matmul
    max_pool1d max_pool2d max_pool3d miopen_batch_norm miopen_convolution mish mul multiply nansum
    negative nll_loss2d nll_loss_nd not_equal one_hot outer pad pairwise_distance pdist prelu relu
    remainder renorm reshape rms_norm rsub scaled_dot_product_attention softmax softplus softshrink
    special_log_softmax special_softmax std_mean sub subtract take tensordot thnn_conv2d threshold
    tile to trace true_divide type_as vstack
"""
_COMPOSED = frozenset(_COMPOSED_NAMES.split())
#: Backward functions that run. Others that the vocabulary knows by their ending may end the process
#: where a trace names too few of their tensors, such as those of recurrent cells.
_BACKWARD_NAMES = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _ctc_loss _efficient_attention _embedding_bag
    _embedding_bag_dense _flash_attention _fused_rms_norm _prelu_kernel
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _weight_norm_interface adaptive_max_pool2d
    adaptive_max_pool3d avg_pool2d avg_pool3d batch_norm binary_cross_entropy convolution
    cudnn_batch_norm cumprod diagonal elu embedding embedding_dense gather gelu glu grid_sampler_2d
    grid_sampler_3d hardsigmoid hardswish hardtanh huber_loss index_select leaky_relu linear
    log_sigmoid logit max_pool2d_with_indices max_pool3d_with_indices mish mse_loss
    native_batch_norm native_dropout native_group_norm native_layer_norm nll_loss nll_loss2d
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d select sigmoid silu slice smooth_l1_loss soft_margin_loss softplus softshrink
    tanh threshold trace unfold upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
"""
_BACKWARD = frozenset(f"{name}_backward" for name in _BACKWARD_NAMES.split())
#: Functions that make a tensor from numbers alone, always the same one.
_FACTORIES = frozenset(
    ["arange", "eye", "full", "linspace", "ones", "tril_indices", "triu_indices"]
)
#: Patterns of the vocabulary also fit names that do something else than work on tensors.
_NEVER = ("_test_", "_make_dual", "_fw_primal", "_sobol_engine", "requires_grad", "random_")
#: Types of arguments that hold tensors, and of arguments that are plain data, as schemas name them.
_OF_TENSORS = {"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"}
_OF_DATA = {"int", "float", "bool", "number", "str"}
#: Most dimensions of a tensor, which is PyTorch's own limit, and longest text of an argument [-].
_DIMENSIONS, _LONGEST = 64, 4096


@checked
def record_step(file: TraceFile, *, progress: bool = False) -> tuple[Graph, Array]:
    """Make the graph of one step of a rank from its trace.

    Parameters
    ----------
    file : TraceFile
        Recorded with ``record_shapes``, or with an execution trace beside it.
    progress : bool, optional
        Whether to show a line on a terminal where it takes seconds.

    Returns
    -------
    graph : Graph
        Operations of the middle step of the trace.
    seconds : array
        Device time of each operation; not a number where several operations share one measured time
        [s].

    Raises
    ------
    ValueError
        For a trace without sizes of operands or without a device.

    Notes
    -----
    Each operation runs again on tensors without values, so its sizes are those that
    `perfkit.capture` would find. Kernels, calls of the framework and calls without a kernel are
    counted from the trace. Calls that load data are left out, as in `perfkit.capture`. An operation
    that cannot run again has the kind ``other`` and the bytes of its arguments. Every argument
    counts as a separate tensor, and each collective is waited for at once.
    """
    check_threads()
    steps = find_iterations(file.events).filter(pl.col("kernels") > 0)
    if not file.events["cat"].is_in(DEVICE).any():
        raise ValueError(
            f"{file.source} holds no work of a device; record it with ProfilerActivity.CUDA"
        )
    number = [*steps["iteration"], -1][len(steps) // 2]
    work = list_work(file).filter(pl.col("iteration") == number)
    if not work["operation"].is_in(file.args.find("Input Dims")).any():
        raise ValueError(f"{file.source} {_explain_unsized(file, work)}")
    step = _Step(file, work, number)
    with _apart_from_settings(), step.recorder.values.fake, step.recorder:
        for key in follow("record operations", step.calls, progress=progress):
            step.record(key)
    graph = step.recorder.graph(file.source, "", step.ranks)
    launches, calls, bare, seconds = np.array(step.rows, dtype=float).reshape(-1, 4).T
    features = replace(graph.features, launches=launches, calls=calls, bare=bare)
    groups = () if step.groups in ([], [tuple(range(step.ranks))]) else tuple(step.groups)
    return replace(graph, features=features, groups=groups), seconds


def _explain_unsized(file: TraceFile, work: pl.DataFrame) -> str:
    """Why no size of an operand is known."""
    if (work["operation"] >= 0).any() or not len(work):
        return "holds no sizes of operands; record it with record_shapes=True"
    calls = file.events.filter(pl.col("index_correlation") >= 0, pl.col("stream") < 0)
    if calls["name"].str.contains("GraphLaunch").any():
        return (
            "holds kernels of graphs alone, whose operands no trace has; record a step without "
            "CUDA graphs"
        )
    return (
        "links no kernel to the operator that launched it: numbers of launches (correlation) are "
        "missing, or the clocks of host and device differ; record it again"
    )


@contextmanager
def _apart_from_settings() -> Iterator[None]:
    """Operators that run inside neither depend on settings of PyTorch nor change them."""
    # it reports each overload that refuses arguments
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, dtype = log.disabled, torch.get_default_dtype()
    generators = torch.random.fork_rng(devices=[])
    gradients, precision = torch.no_grad(), torch.autocast("cpu", enabled=False)
    with generators, gradients, precision, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.disabled = True
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            log.disabled = disabled
            torch.set_default_dtype(dtype)


class _Step:
    """Recording of one step, operation by operation in the order of the host."""

    def __init__(self, file: TraceFile, work: pl.DataFrame, number: int) -> None:
        self.recorder = Recorder(accelerator=True)
        self.recorder.leading = True
        self.args = file.args
        self.ranks = file.ranks or 1
        self.names = file.events["name"]
        self.ts = file.events["ts"].to_numpy()
        self.launches = file.events["index_correlation"].to_numpy()
        host = _Host.read(file.events)
        self.outer = host.outer
        self.work = work
        self.phases = work["phase"].to_list()
        self.modules = work["module"].to_list()
        self.seconds = 1e-9 * (work["end"] - work["start"]).to_numpy()
        found = list_collectives([file], [work], {})
        self.collectives = {row["index"]: row for row in found.to_dicts()}
        # the collective of each row of work
        self.meetings = [self.collectives.get(first) for first in work["collective"].to_list()]
        # rows of work by their call: a collective, an operation of the host, or work that has none
        keys = self._find_calls(host)
        self.rows_of_calls: dict[int, list[int]] = {}
        for row, key in enumerate(keys.tolist()):
            self.rows_of_calls.setdefault(key, []).append(row)
        hosts = self._find_hosts(keys)
        order = np.lexsort((keys, self.ts[hosts]))
        self.calls = list(dict.fromkeys(keys[order].tolist()))
        # starts of calls without a kernel
        outer = self.outer[:-1]
        is_outermost = outer == np.arange(len(outer))
        is_busy = np.isin(outer, self.outer[hosts])
        is_of_step = file.events["iteration"].to_numpy() == number
        self.bare = self.ts[is_outermost & is_of_step & ~is_busy].tolist()
        outer_of_keys = self.outer[hosts].tolist()
        self.outer_of_calls = dict(zip(keys.tolist(), outer_of_keys, strict=True))
        self.opened: set[int] = set()
        self.passed = 0
        self.groups: list[tuple[int, ...]] = []
        self.recordings: dict[str, _Recording] = {}  # of calls that were recorded, by their text
        # of each operation: launches, calls, calls without a kernel, time
        self.rows: list[tuple[float, ...]] = []

    def _find_calls(self, host: "_Host") -> Array:
        """The call of each row of work."""
        index, operation = self.work["index"].to_numpy(), self.work["operation"].to_numpy()
        around = host.operator[np.where(operation < 0, self.launches[index], operation)]
        collective = self.work["collective"].to_numpy()
        is_collective = np.isin(collective, list(self.collectives))
        return np.where(is_collective, collective, np.where(around < 0, index, around))

    def _find_hosts(self, keys: Array) -> Array:
        """The host event of operations, or of device work without an operation."""
        return np.where(self.launches[keys] >= 0, self.launches[keys], keys)

    def record(self, key: int) -> None:
        """Record one call with its kernels, and its time on the device [s]."""
        recorder = self.recorder
        rows = self.rows_of_calls[key]
        phase, module = self.phases[rows[0]], self.modules[rows[0]]
        before = len(recorder.labels)
        spent = self.seconds[rows]
        recorder.phase = phase if phase in PHASES else "forward"
        recorder.modules = [] if recorder.phase == "update" else [module]
        meeting = self.meetings[rows[0]]
        if meeting is not None:
            self._record_collective(meeting, module)
            spent = np.full(1, np.nan)
        else:
            call = _Call.read(self.names[key], self.args.get(key, {}))
            _record_once(recorder, call, module, self.recordings)
        outer = self.outer_of_calls[key]
        added = len(recorder.labels) - before
        # the first operation of a call counts the call, and the calls without a kernel before it
        is_call = outer not in self.opened
        self.opened.add(outer)
        passed_before = self.passed
        if outer >= 0:
            self.passed = max(passed_before, bisect_left(self.bare, self.ts[outer]))
        bare = self.passed - passed_before if is_call else 0
        if added == 1 and len(spent) == 1:  # most calls
            self.rows.append((1, is_call, bare, spent[0]))
            return
        calls = np.zeros(added)
        calls[:1] = is_call
        # kernels of one operation each, and all that are left of the last one
        operation_of_kernel = np.minimum(np.arange(len(spent)), added - 1)
        launches = np.bincount(operation_of_kernel, minlength=added)
        times = np.full(added, np.nan)
        if added in (1, len(spent)):
            times = np.bincount(operation_of_kernel, spent, added)
        self.rows += zip(launches, calls, calls * bare, times, strict=True)

    def _record_collective(self, found: Mapping[str, Any], module: str) -> None:
        """Record a collective, from its row of `list_collectives`."""
        ranks = tuple(found["members"] or range(found["ranks"] or self.ranks))
        if ranks not in self.groups:
            self.groups.append(ranks)
        sizes = OperationSizes(nbytes=found["even_bytes"] or 0.0, group=self.groups.index(ranks))
        name = found["operation"]
        self.recorder.emit(name, "collective", name, module, sizes, [], [])


class _Host(NamedTuple):
    """What lies around each event of a trace.

    `outer` is the outermost operator, -1 for none and -2 inside of the loading of data; `operator`
    the innermost operator, nodes of the backward graph aside, -1 for none. Both have one entry more
    for index -1, no event.
    """

    outer: Array
    operator: Array

    @classmethod
    def read(cls, events: pl.DataFrame) -> "_Host":
        """The operators around all events."""
        name = pl.col("name")
        is_operator = pl.col("cat") == "cpu_op"
        is_node = name.str.contains("evaluate_function", literal=True)
        is_loading = name.str.contains("DataLoader", literal=True)
        facts = events.select(
            "parent", operator=is_operator, named=is_operator & ~is_node, loading=is_loading
        )
        parent, operator, named, loading = (column.to_numpy() for column in facts)
        outer = np.full(len(events) + 1, -1)
        innermost = np.full(len(events) + 1, -1)
        for level in list_levels(parent):
            around = outer[parent[level]]
            around = np.where(loading[level], -2, around)
            outer[level] = np.where((around == -1) & operator[level], level, around)
            innermost[level] = np.where(named[level], level, innermost[parent[level]])
        return cls(outer, innermost)


class _Call(NamedTuple):
    """One call of an operator as a trace states it; alike calls do the same work."""

    name: str
    dims: Any
    types: Any
    strides: Any
    texts: Any

    @classmethod
    def read(cls, name: str, arguments: Mapping[str, Any]) -> "_Call":
        """The call, from the arguments of an event."""
        keys = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
        columns = (arguments.get(key) for key in keys)
        return cls(name, *(column if isinstance(column, list) else [] for column in columns))

    def arguments(self, index: int) -> tuple[Any, ...]:
        """Sizes, type, strides and text of one argument; empty where the trace has none."""
        return tuple(column[index] if index < len(column) else "" for column in self[1:])


class _Recording(NamedTuple):
    """What one call added to a recorder, so that alike calls can add the same again."""

    labels: Sequence[Label]
    sizes: Sequence[OperationSizes]
    host_calls: Sequence[HostCalls]
    dtypes: Sequence[str]
    accesses: Sequence[tuple[int, int, float, int]]  # relative to the first operation and storage
    allocations: Sequence[tuple[int, float]]
    storages: int
    has_run: bool  # otherwise it counts by its operands

    @classmethod
    def since(cls, recorder: Recorder, mark: "_Mark", *, has_run: bool) -> "_Recording":
        """All that was added after a mark."""
        storages = recorder.values.storages
        accesses = []
        for index, number, nbytes, flag in recorder._accesses[mark.accesses :]:
            accesses.append((index - mark.operations, number - mark.storages, nbytes, flag))
        allocations = []
        for number, nbytes in storages.allocations[mark.allocations :]:
            allocations.append((number - mark.storages, nbytes))
        return cls(
            labels=recorder.labels[mark.operations :],
            sizes=recorder._sizes[mark.operations :],
            host_calls=recorder._host_calls[mark.operations :],
            dtypes=recorder._dtypes[mark.operations :],
            accesses=accesses,
            allocations=allocations,
            storages=len(storages._held) - mark.storages,
            has_run=has_run,
        )

    def repeat(self, recorder: Recorder, module: str) -> None:
        """Add the same operations once more, in the phase of now and in a module, on new
        storages."""
        storages, mark = recorder.values.storages, _Mark.of(recorder)
        for label in self.labels:
            recorder._keys.append(recorder.exchanges.current.place)
            recorder.labels.append(label._replace(phase=recorder.phase, module=module))
        recorder._sizes += self.sizes
        recorder._host_calls += self.host_calls
        recorder._dtypes += self.dtypes
        for index, number, nbytes, flag in self.accesses:
            access = (index + mark.operations, number + mark.storages, nbytes, flag)
            recorder._accesses.append(access)
        storages._held.extend(0.0 for _ in range(self.storages))
        for number, nbytes in self.allocations:
            storages.allocations.append((number + mark.storages, nbytes))


class _Mark(NamedTuple):
    """How much a recorder holds at one moment."""

    operations: int
    accesses: int
    allocations: int
    storages: int
    tables: int

    @classmethod
    def of(cls, recorder: Recorder) -> "_Mark":
        """How much it holds now."""
        storages = recorder.values.storages
        return cls(
            len(recorder.labels),
            len(recorder._accesses),
            len(storages.allocations),
            len(storages._held),
            len(recorder._tables),
        )


def _record_once(
    recorder: Recorder, call: _Call, module: str, known: dict[str, _Recording]
) -> None:
    """Run a call, or repeat what an alike call recorded; one that cannot run counts as an operation
    of no class with its operands."""
    text = repr(call)
    if text in known:
        recording = known[text]
        recording.repeat(recorder, recorder.module if recording.has_run else module)
        return
    mark = _Mark.of(recorder)
    if call.name.startswith("aten::"):
        operator = call.name.removeprefix("aten::")
        if operator == "contiguous":
            operator = "clone"
        _run(recorder, call._replace(name=operator))
    has_run = len(recorder.labels) > mark.operations
    if not has_run:
        _count_operands(recorder, call, module)
    recording = _Recording.since(recorder, mark, has_run=has_run)
    of_old_storages = any(number < 0 for _, number, _, _ in recording.accesses)
    # a table of embeddings is numbered when it is met
    if not of_old_storages and len(recorder._tables) == mark.tables:
        known[text] = recording


def _count_operands(recorder: Recorder, call: _Call, module: str) -> None:
    """Record a call as an operation of no class with its operands, which are freed after it."""
    # only some rows of a table are read
    tables = {"float", "c10::Half"} if "embedding" in call.name else set[str]()
    read = _list_operands(call, tables)
    recorder.emit(call.name, "other", call.name, module, OperationSizes(), read, [])


def _run(recorder: Recorder, call: _Call) -> None:
    """Run an operation on its recorded arguments; without enough facts nothing is recorded."""
    for overload in _find_overloads(call.name):
        takes = overload._schema.arguments
        try:
            values = [
                _adapt(call.name, argument, *call.arguments(index))
                for index, argument in enumerate(takes)
            ]
        except RuntimeError:  # sizes that no tensor has
            return
        if any(value is _MISFIT for value in values):
            continue
        if call.name not in _FACTORIES and next(walk_tensors(values), None) is None:
            continue
        plain, named = list[Any](), dict[str, Any]()
        for argument, value in zip(takes, values, strict=True):
            if not argument.kwarg_only:
                plain.append(value)
            elif value is not None:
                named[argument.name] = value
        try:
            recorder.on = True
            overload(*plain, **named)
            return
        except _REFUSED:  # the overload takes other arguments, or needs values
            continue
        finally:
            recorder.on = False


@lru_cache(maxsize=4096)
def _find_overloads(name: str) -> tuple[Any, ...]:
    """Overloads of an operator of PyTorch that may run: known ones that take and give tensors."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None or name in VIEWS or name.startswith(_NEVER):
        return ()
    if name.endswith("_backward") and name not in _BACKWARD:
        return ()
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(overload for overload in overloads if _is_known(name, overload))


def _is_known(name: str, overload: Any) -> bool:
    """Whether an overload works on tensors alone, and perfkit knows its operation."""
    pointwise = torch.Tag.pointwise in overload.tags
    priced = find_entry(name, pointwise=pointwise).kind != "other"
    if not (priced or name in _COMPOSED):
        return False
    schema = overload._schema
    takes = [str(argument.type) for argument in schema.arguments]
    gives = [str(result.type) for result in schema.returns]
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    of_tensors = name in _FACTORIES or bool(_OF_TENSORS & {*takes})
    # an operation on a list in place gives nothing
    makes = gives[0] in _OF_TENSORS if gives else writes
    # as many results as a number says could be any number
    unbounded = "List[Tensor]" in gives and not any(kind.startswith("List[") for kind in takes)
    plain = all(
        kind in _OF_TENSORS or re.sub(r"Optional\[|List\[|\]", "", kind) in _OF_DATA
        for kind, argument in zip(takes, schema.arguments, strict=True)
        if argument.name not in _ABOUT
    )
    return of_tensors and makes and plain and not unbounded


def _adapt(name: str, argument: Any, dims: Any, kind: str, stride: Any, text: Any) -> Any:
    """Value of one argument of an overload, or `_MISFIT` if it does not take the recorded type."""
    takes = str(argument.type)
    if kind.startswith("TensorList"):
        if not dims or "Tensor" not in takes or "List" not in takes:
            return _MISFIT
        # such as TensorList[float]
        return [_make(sizes, kind[11:-1]) if sizes else None for sizes in dims]
    if kind in _TYPES:
        if "Tensor" not in takes:
            return _MISFIT
        tensor = _make(dims, kind, stride)
        return [tensor] if "List" in takes else tensor
    if takes == "Tensor":  # backward operations take an empty tensor where none is needed
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        return empty if "backward" in name else _MISFIT
    if "Tensor" in takes or argument.name in _ABOUT:
        return None
    if text and len(str(text)) <= _LONGEST:
        # RecursionError and MemoryError: brackets inside of brackets
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(str(text))
    return argument.default_value


def _list_operands(call: _Call, left_out: Set[str]) -> list[Tensor]:
    """Tensors that a call was given, those in lists included, without types that are left out.

    None where the sizes of one are damaged, so that the call counts as one without sizes.
    """
    operands = []
    for index in range(len(call.types)):
        dims, kind, _, _ = call.arguments(index)
        try:
            if kind in _TYPES and kind not in left_out:
                operands.append(_make(dims, kind))
            elif str(kind).startswith("TensorList") and isinstance(dims, list):
                operands += [_make(sizes, kind[11:-1]) for sizes in dims if sizes]
        except RuntimeError:
            return []
    return operands


def _make(dims: Any, kind: str, stride: Any = ()) -> Tensor:
    """A tensor without values; a RuntimeError of PyTorch for sizes that no tensor has."""
    dtype = _TYPES.get(kind, torch.float32)
    for sizes in (dims, stride or []):
        whole = isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in sizes)
        if not whole or len(sizes) > _DIMENSIONS:
            raise RuntimeError(f"sizes are {show(sizes)}; a tensor has whole numbers")
    if stride:
        return torch.empty_strided(dims, stride, dtype=dtype, device="cpu")
    return torch.empty(dims, dtype=dtype, device="cpu")
