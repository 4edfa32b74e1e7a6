"""Capture of any PyTorch training step: it runs without computing, and a recorder follows its
calls."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader

from perfkit.ground.units import check_positive, show
from perfkit.recording.arguments import (
    DENSE_TABLES,
    MANY_ROWS,
    Training,
    read_amp,
    read_device,
)
from perfkit.recording.comparisons import compare_calls, record_call
from perfkit.recording.exchanges import COMPILED_GRAPHS
from perfkit.recording.flexible import attend, is_flexible, patch_flexible_attention
from perfkit.recording.joined_norms import patch_joined_norms
from perfkit.recording.packed import find_lengths, pad_packed_sequence
from perfkit.recording.patches import Patch, apply_patches, load_batches
from perfkit.recording.places import (
    find_storing_device,
    is_asked_by_program,
    is_number,
    is_own_device,
    names_gpu,
)
from perfkit.recording.precision import pretend_gpu
from perfkit.recording.recorder import Recorder
from perfkit.recording.refusals import (
    MOST_COUNTED,
    OFFLOADED,
    Unknown,
    UnknownArray,
    UnknownIndex,
    check_step,
    find_caller,
    find_line,
    is_called_by_compiled_code,
    refuse,
)
from perfkit.recording.sandbox import (
    close_contexts,
    find_alive,
    leave_usable,
    open_sandbox,
    quieten,
)
from perfkit.recording.scripts_answers import answer_steps
from perfkit.recording.trails import USUAL
from perfkit.recording.values import compute
from perfkit.workloads.graph import Graph
from perfkit.workloads.vocabulary import walk_tensors

#: Methods that ask for the values of a tensor.
_VALUES = {
    getattr(Tensor, name)
    for name in ["item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__"]
}
#: Functions that compare whole tensors.
_COMPARING = (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
#: Recurrent layers and cells that a GPU runs as a few fused kernels.
FUSED_RECURRENT = {"gru", "rnn_tanh", "rnn_relu", "lstm", "gru_cell", "lstm_cell"}
#: Backends of `torch.compile` that merge no kernels.
NOT_MERGING = ("eager", "aot_eager", "aot_eager_decomp_partition", "pre_dispatch_eager")
RECURRENT = (
    "a GPU runs {} as a few fused kernels of cuDNN; the capture has a kernel for each time step and each gate instead, "
    "so that its time is far too long"
)
RECURRENT_FP32 = (
    "autocast leaves {} in fp32 in a capture; a GPU runs it in the precision of autocast"
)
OTHER_BACKEND = (
    "torch.compile with backend={} counts like Inductor, which merges element-wise kernels"
)
COMPILER_OPTIONS = (
    "options of torch.compile are not counted ({}): kernels count as those of its default mode"
)
ONE_GPU = (
    "nn.DataParallel counts as one GPU; to use several, wrap the model in "
    "torch.nn.parallel.DistributedDataParallel and pass ranks="
)
SAVED_ON_HOST = (
    "with save_on_cpu(pin_memory=True) saved tensors are copied to the host as those of memory that is not pinned, and "
    "the host waits for them; a GPU copies them faster, and the host goes on"
)
NON_BLOCKING = "copies with non_blocking=True of memory that is not pinned count like blocking ones, for which the host waits"
QUANTIZED = (
    "quantization_config is not used: weights and products count in the data type of the model"
)
FOREIGN_CODE = (
    "make_step is {}, and transformers has no model for it without code of its own (auto_map), which is not run; build "
    "the model yourself and give it"
)
_HOST = torch.device("cpu")
#: Backend that merges no kernels and replays graphs of them, and Inductor's option for such graphs.
GRAPHING, GRAPHS_OPTION = "cudagraphs", "triton.cudagraphs"
#: The target of `Tensor.cpu`.
_CPU = torch.device("cpu")
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
#: Assumption for data loaders.
READY = "batches of a data loader count as ready when asked for; pass loading=pk.time_loader(loader) to predict"
#: Assumption for tensors that are pinned.
PINNED = "the time that the host takes to pin memory is not counted"
#: Assumption for a step that hands an array to other packages.
ZEROS = "arrays of computed numbers, such as costs to match by, count as zeros; work of the host on them is left out"
#: Assumption for a step of which a part is compiled.
COMPILED = "forward and backward pass are taken to be compiled as a whole; kernels are merged by the compiler's rules"


NO_UPDATE = (
    "the recorded call makes gradients, and {} does not update their weights; if it does so in every n-th call only, "
    "give a step that spans all n"
)
EMPTY = "the step ran no operation of PyTorch in this process; its graph is empty"


#: What a program may ask of the place of a tensor, and the answer from its device.
_QUESTIONS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.get_device: lambda device: -1 if device.index is None else device.index,
    torch.get_device: lambda device: -1 if device.index is None else device.index,
}


class _Calls(TorchFunctionMode):
    """Sees the calls of PyTorch as they are written: devices they name, values they ask for, calls
    without a kernel."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        places = recorder.places
        if func in (torch.device, torch._C._nn._parse_to) and args:
            return self._parse_device(func, args, kwargs)
        asked = (
            func in _QUESTIONS and recorder.accelerator and is_asked_by_program(sys._getframe(1))
        )
        if asked and args and args[0].device.type != "meta":
            return _QUESTIONS[func](places.find_device(args[0]))
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._move(func, args, kwargs, sys._getframe(1))
        if "device" not in kwargs:
            return self._call(func, args, kwargs)
        on_gpu = names_gpu(kwargs["device"])
        if on_gpu and not places.is_answer(kwargs["device"]):
            recorder.name_gpu(kwargs["device"])
        before, place = places.placing, kwargs["device"]
        if on_gpu or (place == _HOST and is_own_device(sys._getframe(1))):
            places.placing = True
        elif place in ("cpu", _HOST):
            places.placing = False
        try:
            storing = find_storing_device(kwargs["device"], sys._getframe(1))
            return self._call(func, args, {**kwargs, "device": storing})
        finally:
            places.placing = before

    def _parse_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A device object, or what `Module.to` reads from its arguments; numbers are those of
        GPUs."""
        if is_number(args[0]):
            args = (torch.device("cuda", args[0]), *args[1:])
        if not self.recorder.places.is_answer(args[0]):
            return func(*args, **kwargs)
        # the same object: to pass on the device of a tensor names no GPU
        return args[0] if func is torch.device else (args[0], *func(*args, **kwargs)[1:])

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch; whatever it answers about devices is settled already."""
        recorder = self.recorder
        if func in _VALUES:
            return self._ask(func, args, kwargs)
        if recorder.accelerator and is_flexible(func):
            return attend(recorder.values, args)
        if func is Tensor.__format__ and not args[0].dim():
            return format(self._ask(Tensor.item, args[:1], {}), *args[1:])
        if func is Tensor.pin_memory:
            return self._pin(args[0])
        if func is Tensor.is_pinned:
            return recorder.places.is_pinned(args[0])
        if kwargs.get("pin_memory") is True:
            return self._pin(self._call(func, args, {**kwargs, "pin_memory": False}))
        if func is torch._C._nn.one_hot:
            return self._spread(*args, **kwargs)
        if func is Tensor.__deepcopy__ and type(args[0]) in (Tensor, FakeTensor):
            return recorder.values.copy_deeply(*args)
        if func is torch.asarray and isinstance(args[0], torch.UntypedStorage):
            return compute(func, *args, **kwargs)  # a file of weights
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            args, kwargs = self._read_elements(func, args, kwargs)
        if getattr(func, "__name__", "") == "_pad_packed_sequence":
            return pad_packed_sequence(*args, **kwargs)
        if func is Tensor.__getitem__:
            args = (args[0], self._read_places(args[1]))
        if func is torch._assert and isinstance(args[0], Tensor):  # else a check of sizes
            return torch._assert(self._ask(Tensor.__bool__, args[:1], {}), *args[1:], **kwargs)
        if func in _COMPARING:
            return self._compare_whole(func, *args, **kwargs)
        if func is Tensor.backward:
            recorder.phase, recorder.leading = "backward", True
        if getattr(func, "__name__", "") in FUSED_RECURRENT and len(args) > 1:
            args = (args[0], find_lengths(args[1]), *args[2:])
        operations, views = len(recorder.labels), recorder.viewed
        out = func(*args, **kwargs)
        if recorder.accelerator and getattr(func, "__name__", "") in FUSED_RECURRENT:
            self._check_recurrent(func.__name__, operations)
        if func == _SET_DATA:
            recorder.values.replace(*args)
        # a function of the backward pass counts as one call of the framework
        if torch._C._current_autograd_node() is None:
            recorder.bare += recorder.viewed > views and len(recorder.labels) == operations
        return out

    def _pin(self, tensor: Any) -> Any:
        """The same tensor, in pinned memory from now on; of one from outside of the capture a
        copy."""
        self.recorder.values.notes[PINNED] = None
        if type(tensor) is Tensor:
            tensor = self.recorder.copy_from_outside(tensor)
        self.recorder.places.note_pinned(tensor)
        return tensor

    def _move(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> Any:
        """Move a tensor between host and GPU, or convert it."""
        recorder, places = self.recorder, self.recorder.places
        if func is Tensor.cpu and recorder.accelerator and find_caller("_fsdp_param.py"):
            refuse(OFFLOADED)
        given = self._list_targets(func, args, kwargs)
        if is_own_device(caller):  # the CPU is what a fake tensor says of itself to PyTorch
            given = [target for target in given if target is _CPU or target != _HOST]
        named = [target for target in given if not places.is_answer(target)]
        to_gpu = any(map(names_gpu, given))
        if any(map(names_gpu, named)):
            recorder.name_gpu(next(filter(names_gpu, named)))
        tensor, options = args[0], args[1:]
        if func is not Tensor.to:
            options, kwargs = (), {**kwargs, "device": "cpu"}
        non_blocking = any(option is True for option in (kwargs.get("non_blocking"), *args[1:]))
        if to_gpu and recorder.on and non_blocking and not places.is_pinned(tensor):
            recorder.values.notes[NON_BLOCKING] = None
        if recorder.accelerator and to_gpu and places.is_on_host(tensor):
            tensor = recorder.move(tensor, to_host=False, host_waits=not non_blocking)
        elif recorder.accelerator and given and not to_gpu and self._takes_to_host(tensor, given):
            tensor = recorder.move(tensor, to_host=True)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": find_storing_device(kwargs["device"], caller)}
        options = tuple(find_storing_device(option, caller) for option in options)
        return self._call(Tensor.to, (tensor, *options), kwargs)

    def _list_targets(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """Devices that a call of `Tensor.to`, `cuda` or `cpu` names."""
        if func is Tensor.cpu:
            return [_CPU]
        targets = [*args[1:2], kwargs.get("device")]
        devices = [each for each in targets if isinstance(each, str | torch.device)]
        devices += [torch.device("cuda", each) for each in targets if is_number(each)]
        if func is Tensor.cuda:
            return devices or ["cuda"]
        like = next((each for each in targets if isinstance(each, Tensor)), kwargs.get("other"))
        if isinstance(like, Tensor) and self.recorder.accelerator:
            devices.append(self.recorder.places.find_device(like))
        return devices

    def _takes_to_host(self, tensor: Any, targets: Sequence[Any]) -> bool:
        """Whether a call that names the CPU as target copies a tensor from the GPU to the host."""
        places = self.recorder.places
        if not isinstance(tensor, FakeTensor) or places.is_on_host(tensor):
            return False
        if not all(target is _CPU or places.means_host(target) for target in targets):
            return False
        # without a GPU, what is made before the step and moved to the CPU is moved nowhere
        return self.recorder.on or bool(places.gpus)

    def _check_recurrent(self, name: str, start: int) -> None:
        """Say where a GPU runs a recurrent layer by other kernels than those that were
        recorded."""
        names = [label.name for label in self.recorder.labels[start:]]
        if any(each.startswith("_cudnn_rnn") for each in names):
            return
        fused = any(each.startswith("mkldnn_rnn_layer") for each in names)
        if names and not fused:
            self.recorder.values.notes[RECURRENT.format(name)] = None
        elif names and torch.is_autocast_enabled("cuda"):
            self.recorder.values.notes[RECURRENT_FP32.format(name)] = None

    def _read_elements(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Arguments of a call that makes a tensor of a list: PyTorch reads the tensors in it, which
        are numbers, one by one."""
        place = 1 if func is Tensor.new_tensor else 0
        if len(args) <= place or not isinstance(args[place], list | tuple):
            return args, kwargs
        tensors = [*walk_tensors(args[place])]
        if not tensors or any(tensor.numel() != 1 for tensor in tensors):
            return args, kwargs
        if kwargs.get("dtype") is None:
            dtype = tensors[0].dtype
            for tensor in tensors[1:]:
                dtype = compute(torch.promote_types, dtype, tensor.dtype)
            kwargs = {**kwargs, "dtype": dtype}
        return (*args[:place], self._read_tree(args[place]), *args[place + 1 :]), kwargs

    def _read_tree(self, tree: Any) -> Any:
        """A tree of lists in which each tensor is replaced by what the step reads of it."""
        if isinstance(tree, list | tuple):
            return [self._read_tree(each) for each in tree]
        return self._ask(Tensor.item, (tree,), {}) if isinstance(tree, Tensor) else tree

    def _compare_whole(
        self, func: Any, one: Tensor, other: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Whether two tensors are equal or close: all of their elements are compared, and read."""
        if func in (torch.allclose, Tensor.allclose):
            same = torch.isclose(one, other, *args, **kwargs)
        elif one.shape != other.shape:
            return False
        else:
            same = torch.eq(one, other)
        return self._ask(Tensor.item, (same.all(),), {})

    def _spread(self, classes: Tensor, num_classes: int = -1) -> Tensor:
        """Rows with a one at these classes, by the operations of real tensors; fake ones would
        compare."""
        if not self.recorder.accelerator:
            classes.aminmax()
        count = int(classes.max()) + 1 if num_classes < 0 else num_classes
        return torch.zeros((*classes.shape, count), dtype=torch.long).scatter_(
            -1, classes.unsqueeze(-1), 1
        )

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The known values of a tensor, or else a number on which no decision may depend."""
        for gather in ("full_tensor", "trigger_wait"):  # of shards, and of results of collectives
            if hasattr(args[0], gather):
                args = (getattr(args[0], gather)(), *args[1:])
        known = None if args[0].requires_grad else self.recorder.values.pretend(args[0]).constant
        if known is not None:
            self.recorder.trail.asked = True
            return compute(func, known, *args[1:], **kwargs)
        if find_caller("grad_scaler.py"):
            self.recorder.read(args[0])
            return 0.0  # nothing overflowed, as in most iterations
        if func is Tensor.__bool__ and find_caller("distributions/distribution.py"):
            self.recorder.read(args[0])
            return True  # its parameters are valid, as in every iteration that goes on
        self.recorder.trail.count_ask()
        dtype = args[0].dtype
        is_number = not (dtype.is_complex or (dtype is torch.bool and func is Tensor.item))
        if func in (Tensor.item, Tensor.__float__) and is_number:
            self.recorder.read(args[0])
            trail = self.recorder.trail
            trail.read = trail.read or find_line()
            if func is Tensor.item and self.recorder.values.choices.find_alternatives(args[0]):
                return self._choose_index(args[0])
            number = trail.count_read()
            return Unknown(number, trail) if func is Tensor.item else number
        is_asked = func is Tensor.__bool__ or (func is Tensor.item and dtype is torch.bool)
        if is_asked and args[0].numel() == 1:
            return self.recorder.decide(args[0])
        if func is Tensor.__int__ and args[0].numel() == 1 and not dtype.is_complex:
            self.recorder.read(args[0])
            trail = self.recorder.trail
            trail.read = trail.read or find_line()
            if self.recorder.values.choices.find_alternatives(args[0]):
                return int(self._choose_index(args[0]))
            return int(Unknown(trail.count_read(), trail))
        if func not in (Tensor.numpy, Tensor.__array__) or dtype.is_complex:
            error = DataDependentOutputException(func)
            self.recorder.note_missed(error)
            raise error
        self.recorder.values.notes[ZEROS] = None
        array = _make_array(args[0], self.recorder.trail.trial.number)
        array.trail, array.line = self.recorder.trail, find_line()
        return array

    def _choose_index(self, tensor: Tensor) -> UnknownIndex:
        """The number of a chosen alternative: one of those that there are."""
        trail = self.recorder.trail
        last = (self.recorder.values.choices.find_alternatives(tensor) or 1) - 1
        return UnknownIndex(int(max(0, min(last, trail.count_read()))), trail)

    def _read_places(self, places: Any) -> Any:
        """Places in a tensor; PyTorch reads one that is a tensor of one computed number."""
        parts = places if isinstance(places, tuple) else (places,)
        choices = self.recorder.values.choices
        read = []
        for part in parts:
            is_number = isinstance(part, FakeTensor) and not part.dim() and part.constant is None
            is_chosen = is_number and choices.find_alternatives(part) is not None
            read.append(self._ask(Tensor.item, (part,), {}) if is_chosen else part)
        return tuple(read) if isinstance(places, tuple) else read[0]


def _make_array(tensor: Tensor, number: float) -> UnknownArray:
    """An array in memory of its own, which represents a tensor of computed numbers: zeros, and in
    trials numbers from zero to a given one."""
    half = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # NumPy has no such types
    dtype = torch.float32 if tensor.dtype in half else tensor.dtype
    zeros = compute(lambda: torch.zeros(tensor.shape, dtype=dtype).numpy().copy())
    array = zeros.view(UnknownArray)
    if number != USUAL.number and array.size:
        numbers = np.linspace(0.0, number, array.size)[::-1].reshape(array.shape)
        if array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            numbers = np.clip(
                numbers, max(limits.min, -MOST_COUNTED), min(limits.max, MOST_COUNTED)
            )
        elif array.dtype.kind == "f":
            numbers = np.clip(numbers, np.finfo(array.dtype).min, np.finfo(array.dtype).max)
        array[...] = numbers
    return array


def _see_calls(recorder: Recorder) -> Any:
    """The mode that sees calls of PyTorch, for code that autograd calls outside of it."""
    modes = _get_current_function_mode_stack()
    seen = any(isinstance(mode, _Calls) for mode in modes)
    return nullcontext() if seen else _Calls(recorder)


def _find_model(given: Any) -> Any:
    """A model, or a function that builds it, also from a configuration of transformers or its file
    or folder."""
    if callable(given):
        return given
    if not (isinstance(given, str | Path) or hasattr(given, "architectures")):
        raise ValueError(
            f"make_step is {show(given)}; it must be a model, what builds it, or a configuration"
        )
    if isinstance(given, str | Path) and not Path(given).exists():
        raise ValueError(
            f"make_step is {show(given)}, no file or folder; nothing is downloaded; give a config.json"
        )
    try:
        package: Any = import_module("transformers")
    except ImportError as error:
        raise ValueError(
            "a configuration needs transformers; install it: pip install 'perfkit[models]'"
        ) from error
    config = _read_configuration(package, given) if isinstance(given, str | Path) else given
    if getattr(config, "quantization_config", None):
        warnings.warn(QUANTIZED, stacklevel=3)
    kinds = [package.AutoModelForPreTraining, package.AutoModelForCausalLM, package.AutoModel]
    if getattr(config, "is_encoder_decoder", False):  # and not its decoder alone
        kinds = [package.AutoModelForSeq2SeqLM, package.AutoModelForSpeechSeq2Seq, *kinds]
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    named = getattr(package, (config.architectures or [""])[0], None)
    if isinstance(named, type) and issubclass(named, nn.Module):
        build, name = partial(named, config), named.__name__
    elif kind is not None:
        build = partial(kind.from_config, config, trust_remote_code=False)
        name = kind._model_mapping[type(config)].__name__
    else:
        raise ValueError(FOREIGN_CODE.format(show(given if isinstance(given, str) else config)))

    def make() -> Any:
        try:
            return build()
        except (ImportError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            if str(error).startswith("capture "):  # a refusal of the capture itself
                raise
            raise ValueError(f"transformers cannot build {name}: {_shorten(error)}") from error

    make.__name__ = name
    return make


def _read_configuration(package: Any, given: str | Path) -> Any:
    """A configuration of transformers from its file or folder. Nothing is downloaded, and code
    that it names is not run."""
    try:
        with quieten():
            return package.AutoConfig.from_pretrained(
                str(given), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:
        text = FOREIGN_CODE.format(show(str(given)))
        if "trust_remote_code" not in str(error):
            text = f"transformers cannot read {show(str(given))}: {_shorten(error)}"
        raise ValueError(text) from error


def _shorten(error: BaseException) -> str:
    """The first line of a message, at most 200 characters of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def describe_dense_gradients(graph: Graph) -> list[str]:
    """What to say of large embedding tables in a step that its user wrote, from the gradients that it
    computes."""
    weights: dict[tuple[str, float], float] = {}  # by module and table
    rows = 0.0
    for position, label in enumerate(graph.labels):
        stem = label.variant.partition(".")[0]
        if label.kind != "embedding_backward" or stem not in ("dense", "dense_rows"):
            continue
        table = (label.module, float(graph.features.table[position]))
        if table not in weights:
            of_table = float(graph.features.rows[position])
            weights[table] = of_table * float(graph.features.dim[position])
            rows += of_table
    if rows < MANY_ROWS or not graph.updated_by:
        return []
    return [DENSE_TABLES.format(f"{sum(weights.values()) / 1e6:,.0f} M", graph.updated_by)]


def capture(
    make_step: Any,
    inputs: Any = None,
    *,
    optimizer: Any = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    amp: Any = None,
    accumulate: int = 1,
    ranks: int = 1,
    rank: int = 0,
    name: str = "",
    family: str = "",
    device: Any = "cpu",
) -> Graph:
    """Record the operations of a training step, in order, without computing. Captures in threads
    take turns.

    Parameters
    ----------
    make_step : callable, torch.nn.Module, configuration, str or Path
        A function that builds model and optimizer and returns the step, a callable without
        arguments. Tensors take no memory, so the model may be larger than any machine. A step over
        an existing module works too; the module is not changed. With `inputs`, give the model or a
        function that builds it: the step is then forward, backward and optimizer. If transformers
        is installed, one of its configurations, or the config.json or folder of one, is a model
        too: the first of its ``architectures``, else the first that exists of
        AutoModelForPreTraining, AutoModelForCausalLM and AutoModel; of an encoder with a decoder of
        AutoModelForSeq2SeqLM and AutoModelForSpeechSeq2Seq.
    inputs : tensor, sequence or mapping, optional
        Arguments of the model.
    optimizer : str, type, callable or torch.optim.Optimizer
        With `inputs`: ``adamw``, ``adam``, ``adagrad``, ``sgd_momentum`` or ``sgd``; or a class, what
        builds an optimizer from weights, or an optimizer of the weights of the model.
    loss : callable, optional
        With `inputs`: computes the loss from the result of the model. By default it is the
        attribute ``loss`` of the result, or else the mean of its numbers.
    amp : str or torch.dtype, optional
        With `inputs`: precision of autocast, ``bf16``, or ``fp16`` with scaled gradients.
    accumulate : int
        With `inputs`: micro-batches of one update, each with these inputs; several ranks average
        gradients with the last one [-].
    ranks, rank : int
        Number of ranks, and the rank that is captured [-]. With `inputs`, which are those of one
        rank, DistributedDataParallel averages the gradients.
    name, family : str
        Name of the step, and its workload family on platforms that were calibrated by family.
    device : str, torch.device or int
        ``cpu`` or ``cuda``, also with a number. For ``cuda``, which needs no GPU, optimizers work on lists of tensors,
        every region of autocast follows CUDA's lists, products may be in TF32, and attention has
        the kernels of an A100.

    Returns
    -------
    graph : Graph
        Operations of one iteration on this rank, after a first one that is not recorded.

    Raises
    ------
    ValueError
        For a step that depends on computed values (the message names the line), that starts
        processes, for anything that is no step, and for attention for which the step allows no kernel.

    Warns
    -----
    UserWarning
        If several ranks have no collective, if rows are chosen by computed scores, if the work of
        an operation has no model, if calls of the step differ, and for every other assumption.

    Notes
    -----
    Some values are known when the step asks for them: small tensors that are passed, filled or
    drawn, real whole numbers, and everything that follows from these alone. If the step asks how
    many rows were chosen by computed scores, as in a mixture of experts, every alternative counts
    as chosen equally often. Computed numbers count as finite if the step asks. An array of computed
    numbers that other packages match or sort holds zeros. Other ranks are taken to hold the numbers
    that this one holds.

    If the step asks whether something computed is true, it gets an answer: the one with which it goes
    on where the other one raises an error, and else that of a step whose result is not better than
    its best one so far.

    The second call of the step is recorded. Further calls follow if the first did something else,
    if the step draws numbers that may decide, if it reads a computed number, or if it asks a question
    to which the answer is not known: they must do the same with other numbers and answers.

    Examples
    --------
    >>> import torch
    >>> capture(torch.nn.Linear(1000, 1000), torch.ones(32, 1000)).kernels[("gemm", "nt")].size
    1
    >>> def make_step():
    ...     model = torch.nn.Linear(1000, 1000)
    ...     return lambda: model(torch.randn(32, 1000)).sum().backward()
    >>> capture(make_step).parameters
    1001000
    """
    device, amp = read_device(device), read_amp(amp)
    of_tables: list[str] = []
    is_trained_here = inputs is not None
    if is_trained_here:
        training = Training(inputs, optimizer, loss, amp, accumulate, ranks, device)
        make_step = _find_model(make_step)
        name = name or getattr(make_step, "__name__", type(make_step).__name__)
        make_step = partial(training.make_step, make_step, of_tables)
    elif isinstance(make_step, nn.Module) or (
        isinstance(make_step, type) and issubclass(make_step, nn.Module)
    ):
        advice = (
            "give its inputs too, as in capture(model, inputs), or a function that returns a step"
        )
        raise ValueError(
            f"make_step is a {getattr(make_step, '__name__', type(make_step).__name__)}; {advice}"
        )
    elif amp is not None:
        raise ValueError(
            f"amp is {amp!r}, and inputs are not given; write torch.autocast({device!r}) into the step"
        )
    elif accumulate != 1:
        raise ValueError(
            f"accumulate is {show(accumulate)}, and inputs are not given; write the loop over micro-batches into the step"
        )
    elif loss is not None:
        raise ValueError(
            f"loss is {show(loss)}, and inputs are not given; compute the loss in the step"
        )
    elif optimizer != "adamw":
        raise ValueError(
            f"optimizer is {show(optimizer)}, and inputs are not given; build it in make_step"
        )
    ranks = int(check_positive("ranks", ranks, integer=True))
    rank = check_rank(rank, ranks)
    recorder = Recorder(accelerator=device != "cpu")
    with open_capture(recorder, ranks, rank), answer_steps(recorder):
        step = make_step()
        check_step(step)
        calls = record_call(recorder, step)
        graph = end_iteration(recorder, name, family, ranks)  # before tensors are released
        if not is_trained_here:
            of_tables += describe_dense_gradients(graph)
        notes = [*graph.notes, *of_tables]
        if not len(graph):
            notes.append(EMPTY)
        unused = list[str]()
        if any(label.phase == "backward" for label in graph.labels):
            unused = find_unused_optimizers(recorder)
        notes += unused
        notes += compare_calls(recorder, step, calls, rare_update=bool(unused))
        graph = replace(graph, notes=tuple(notes))
        del step
    for note in graph.notes:
        warnings.warn(note, stacklevel=2)
    if ranks > 1 and not len(graph.collectives):
        text = f"the step has no collective between its {ranks} ranks; for data-parallel training wrap the model in "
        warnings.warn(
            f"{text}torch.nn.parallel.DistributedDataParallel inside make_step", stacklevel=2
        )
    return graph


def check_rank(rank: int, ranks: int) -> int:
    """The number of the captured rank.

    Parameters
    ----------
    rank, ranks : int
        This rank, and how many there are [-].

    Raises
    ------
    ValueError
        For one that is not among the ranks.
    """
    if check_positive("rank", rank, integer=True, zero=True) >= ranks:
        raise ValueError(f"rank is {rank}; it must be 0 to {ranks - 1}")
    return int(rank)


@contextmanager
def open_capture(recorder: Recorder, ranks: int, rank: int) -> Iterator[None]:
    """Let what follows run without computing, seen by a recorder.

    Parameters
    ----------
    recorder : Recorder
        It is told of operations, modules, optimizers and calls of PyTorch.
    ranks, rank : int
        Number of ranks, and this rank [-].

    Raises
    ------
    ValueError
        For a step that needs a value that is not computed; the message names the line.
    """
    with (
        leave_usable(recorder.values.fake),
        open_sandbox(recorder, ranks, rank),
        _follow(recorder),
        recorder.values.fake,
        recorder,
        _Calls(recorder),
        close_contexts(recorder.values.notes.setdefault),
    ):
        yield


def end_iteration(recorder: Recorder, name: str, family: str, ranks: int) -> Graph:
    """Record no more, and give the graph of what was recorded; see `capture` for its arguments."""
    recorder.on = False
    recorder.exchanges.end_backward()
    graph = recorder.graph(name, family, ranks)
    return replace(graph, updated_by=", ".join(recorder.optimizer_names))


class Backend(NamedTuple):
    """What `torch.compile` was given: the name of its backend, and options of Inductor."""

    name: str
    options: tuple[str, ...]


def _find_backend(compiler: Any) -> Backend:
    """Backend and options behind a callback of PyTorch's compiler; empty where they are hidden."""
    name = ""
    for _ in range(8):
        name = getattr(compiler, "_compiler_name", None) or name
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        if inner is None:
            break
        compiler = inner
    options = getattr(compiler, "config", None)
    chosen = [key for key, value in options.items() if value] if isinstance(options, dict) else []
    return Backend(name, tuple(chosen))


def _list_weights(optimizer: Optimizer) -> list[Any]:
    """Weights of all groups of an optimizer."""
    weights = []
    for group in optimizer.param_groups:
        weights += group["params"]
    return weights


def list_own_weights(recorder: Recorder, optimizer: Optimizer) -> list[Any]:
    """Weights of an optimizer that belong to this capture, or have a gradient of it."""
    own = []
    for weight in _list_weights(optimizer):
        if any(_is_of_capture(recorder, tensor) for tensor in (weight, weight.grad)):
            own.append(weight)
    return own


def _is_of_capture(recorder: Recorder, tensor: Any) -> bool:
    """Whether a tensor, or the shard that it holds, is a fake one of this capture."""
    held = getattr(tensor, "_local_tensor", tensor)
    return getattr(held, "fake_mode", None) is recorder.values.fake


def find_unused_optimizers(recorder: Recorder) -> list[str]:
    """Say that an optimizer of the weights of this step did not update them in the recorded
    call."""
    alive = find_alive(Optimizer)
    weights = {id(optimizer): _list_weights(optimizer) for optimizer in alive}
    updated: set[int] = set()
    for optimizer in alive:
        if id(optimizer) in recorder.optimizers:
            updated.update(map(id, weights[id(optimizer)]))
    for optimizer in alive:
        own = list_own_weights(recorder, optimizer)
        has_gradients = any(getattr(p, "grad", None) is not None for p in own)
        if has_gradients and not any(id(p) in updated for p in own):
            return [NO_UPDATE.format(type(optimizer).__name__)]
    return []


class _LazyTensors:
    """Parameters and buffers of lazy modules, and the fake ones that take their places.

    Parameters
    ----------
    entered : list of Module
        The modules that run now, the innermost one last.
    """

    def __init__(self, entered: list[nn.Module]) -> None:
        self._entered = entered
        # a lazy tensor, which is kept alive, and its replacement, by the identity of the lazy one
        self._sized: dict[int, tuple[Any, Tensor]] = {}

    def materialize(self, lazy: Any, shape: Any, dtype: Any) -> None:
        """Replace a lazy tensor in its module by a fake one, as it cannot become one itself."""
        made = torch.empty(shape, dtype=dtype or lazy.dtype)
        if isinstance(lazy, nn.Parameter):
            made = nn.Parameter(made, lazy.requires_grad)
        self._sized[id(lazy)] = lazy, made
        for module in self._entered[-1].modules():
            holders: list[dict[str, Any]] = [module._parameters, module._buffers]
            for tensors in holders:
                for name, tensor in tensors.items():
                    if tensor is lazy:
                        tensors[name] = made

    def replace_in(self, optimizer: Any) -> None:
        """Let an optimizer that was given lazy parameters update their replacements."""
        if not self._sized:
            return
        for group in optimizer.param_groups:
            group["params"] = [self._sized.get(id(p), (p, p))[1] for p in group["params"]]


class _Compiler:
    """What `torch.compile` compiles in a step. During a capture it runs as it is written.

    Parameters
    ----------
    recorder : Recorder
        It is told which phases are compiled.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.merges = True  # whether the compiler that was met last merges kernels

    def skip(self, callback: Any) -> None:
        """Note what the compiler behind a callback would do, and compile nothing."""
        if not callback:
            return
        backend = _find_backend(callback)
        self.merges = backend.name not in (*NOT_MERGING, GRAPHING)
        notes = self._recorder.values.notes
        if self._recorder.accelerator and (
            backend.name == GRAPHING or GRAPHS_OPTION in backend.options
        ):
            notes[COMPILED_GRAPHS] = None
        if not self.merges:
            return
        notes[COMPILED] = None
        self._recorder.compiled |= {"forward", "backward"}
        if backend.name and backend.name != "inductor":
            notes[OTHER_BACKEND.format(backend.name)] = None
        others = [option for option in backend.options if option != GRAPHS_OPTION]
        if others:
            notes[COMPILER_OPTIONS.format(", ".join(others))] = None


def list_patches(
    recorder: Recorder, lazy_tensors: _LazyTensors, compiler: _Compiler
) -> list[Patch]:
    """Patches by which a recorder follows lazy modules, data loaders, compilers and the backward
    pass."""

    def materialize(lazy: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        lazy_tensors.materialize(lazy, shape, dtype)

    def load(loader: Any) -> Iterator[Any]:
        recorder.values.notes[READY] = None
        for batch in load_batches(loader, recorder.values.notes.setdefault):
            recorder.places.note_batch(batch)
            if loader.pin_memory:
                recorder.places.note_pinned(batch)
            yield batch

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        """Code of the user in the backward pass is seen like that in the forward pass."""
        with _see_calls(recorder):
            out = torch.autograd.graph._engine_run_backward(*args, **kwargs)
        if recorder.at_end_of_backward is not None and torch._C._current_graph_task_id() == -1:
            recorder.at_end_of_backward()
        return out

    def has_no_hooks() -> bool:
        return False

    patches = [
        Patch(
            torch.autograd,
            "_engine_run_backward",
            run_backward,
            reason="devices and values that the backward pass of a step asks for are not seen",
        ),
        Patch(
            UninitializedTensorMixin,
            "materialize",
            materialize,
            reason="lazy modules raise an error, as their tensors cannot become fake ones",
        ),
        Patch(
            DataLoader,
            "__iter__",
            load,
            reason="a data loader starts workers, whose batches have no values in this process",
        ),
        Patch(
            eval_frame,
            "_callback_from_stance",
            compiler.skip,
            reason="torch.compile compiles the step, which takes minutes, and its kernels are not seen",
        ),
        Patch(
            nn.modules.module,
            "_has_any_global_hook",
            has_no_hooks,
            reason="a compiled module warns of the hooks of the capture, which are not those of the user",
        ),
    ]
    if recorder.accelerator:
        patches += [*_patch_saved_tensors(recorder), patch_flexible_attention()]
        patches += patch_joined_norms(recorder)
    return patches


class SavedTensor(NamedTuple):
    """A tensor that is saved for the backward pass.

    Parameters
    ----------
    tensor : Tensor
        It, or its copy on the host.
    is_moved : bool
        Whether it is a copy.
    """

    tensor: Tensor
    is_moved: bool


def _patch_saved_tensors(recorder: Recorder) -> list[Patch]:
    """Hooks of the user for tensors that are saved for the backward pass."""
    save = saved_tensors_hooks.__init__

    def watch_hooks(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        def pack_and_look(tensor: Any) -> Any:
            with _see_calls(recorder):
                return pack_hook(tensor)

        def unpack_and_look(packed: Any) -> Any:
            with _see_calls(recorder):
                return unpack_hook(packed)

        if type(hooks) is saved_tensors_hooks:
            save(hooks, pack_and_look, unpack_and_look)
        else:  # a checkpoint
            save(hooks, pack_hook, unpack_hook)

    def keep_on_host(hooks: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        if pin_memory:
            recorder.values.notes[SAVED_ON_HOST] = None

        def move_to_host(tensor: Tensor) -> SavedTensor:
            if recorder.places.is_on_host(tensor):
                return SavedTensor(tensor, is_moved=False)
            moved = recorder.move(tensor, to_host=True)
            if pin_memory:
                recorder.places.note_pinned(moved)
            return SavedTensor(moved, is_moved=True)

        def move_back(saved: SavedTensor) -> Tensor:
            if not saved.is_moved:
                return saved.tensor
            return recorder.move(saved.tensor, to_host=False, host_waits=not pin_memory)

        save(hooks, move_to_host, move_back)

    reason = "saved tensors that move to the host count as the GPU's without a word"
    return [
        Patch(saved_tensors_hooks, "__init__", watch_hooks, reason),
        Patch(save_on_cpu, "__init__", keep_on_host, reason),
    ]


def _find_paths() -> dict[int, str]:
    """Paths of all modules that are alive, from the module that contains them, by identity."""
    paths: dict[int, str] = {}
    alive = find_alive(nn.Module)
    inner: set[int] = set()
    for module in alive:
        inner.update(map(id, module.children()))
    for root in alive:
        if id(root) in inner:
            continue
        for name, module in root.named_modules():
            path = re.sub(r"(^|\.)_orig_mod\b", "", name.removeprefix("module."))
            paths[id(module)] = path.lstrip(".")
    return paths


@contextmanager
def _follow(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which modules and optimizers run; let calls act as on its device."""
    paths: dict[int, str] = {}
    entered: list[nn.Module] = []
    lazy_tensors = _LazyTensors(entered)
    compiler = _Compiler(recorder)

    def enter(module: nn.Module, *_: Any) -> None:
        if id(module) not in paths:
            paths.update(_find_paths())
        if recorder.accelerator and isinstance(module, nn.DataParallel):
            recorder.values.notes[ONE_GPU] = None
        recorder.modules.append(paths.setdefault(id(module), ""))
        recorder.mark()
        entered.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        if recorder.on:
            recorder.meet(module)
        recorder.modules.pop()
        entered.pop()
        recorder.mark()

    def update(optimizer: Any, *_: Any) -> None:
        recorder.phase, recorder.leading = "update", False
        recorder.trail.updating += 1
        recorder.trail.steps += 1
        if recorder.on:
            recorder.optimizers.add(id(optimizer))
            recorder.optimizer_names[type(optimizer).__name__.lower()] = None
            recorder.check_weights(_list_weights(optimizer))
        # the optimizer is compiled too
        if compiler.merges and is_called_by_compiled_code():
            recorder.compiled.add("update")
        lazy_tensors.replace_in(optimizer)

    def end_update(*_: Any) -> None:
        recorder.trail.updating -= 1

    note = recorder.values.notes.setdefault
    modules = nn.modules.module
    with ExitStack() as hooks:
        hooks.enter_context(apply_patches(list_patches(recorder, lazy_tensors, compiler), note))
        if recorder.accelerator:
            hooks.enter_context(pretend_gpu(note, recorder.places))
        hooks.callback(modules.register_module_forward_pre_hook(enter).remove)
        hooks.callback(modules.register_module_forward_hook(leave, always_call=True).remove)
        hooks.callback(register_optimizer_step_pre_hook(update).remove)
        hooks.callback(register_optimizer_step_post_hook(end_update).remove)
        yield
