"""A sandbox in which a training step runs without computing.

It uses private parts of PyTorch and was checked with 2.13.0 and 2.14.1; with 2.9.1 captures of
`fully_shard` and of split tensors differ. With another version, look at these first:

===========================================  ==============================================================
part of PyTorch                              what for
===========================================  ==============================================================
torch._subclasses.fake_tensor                tensors without values; deep copies ask for `data_ptr`
_meta_registrations._meta_grouped_mm_common  grouped products in formats other than bf16
FakeTensorMode.may_turn_const                how large a tensor may be whose values stay known
nn.Module._apply                             conversions swap parameters; fake parameters cannot be swapped
nn.init._no_grad_trunc_normal_               it draws until all numbers are in range
UninitializedParameter, UninitializedBuffer  tensors of lazy modules before their first input
DataLoader._get_iterator                     batches are real and made in this process
_foreach_utils, optimizer: lists of types    optimizers on a GPU work on lists of tensors
distributed_c10d._world                      ranks that do not exist, in place of real ones
torch.testing._internal...fake_pg            the store and the process group of these ranks
Reducer._rebuild_buckets                     DistributedDataParallel reads the bucket sizes it sends
Work.wait                                    where the step waits for a collective
_verify_param_shape_across_processes         DistributedDataParallel asks other ranks first
DeviceMesh.__init__                          the ranks of a mesh are known, its tensors on the CPU
torch.cpu, torch.cuda: Stream and others     work beside the compute stream
_clear_sharding_prop_cache                   its keys are meshes, and old and new ones are equal
_dynamo.eval_frame: _callback_from_stance    compiled code runs eagerly, and is noticed
TorchDispatchMode._should_skip_dynamo        PyTorch need not disable its compiler at each call
Tensor._make_subclass                        makes fake tensors without the checks of their constructor
fsdp: the file _fsdp_param.py                whether FSDP moves weights to the host
fp32_precision, float32_matmul_precision     number formats of products, restored after a capture
AutocastPrivateUse1, _DisableAutocast        autocast as on a GPU, see `precision.pretend_gpu`
_dispatch_get_registrations, key guards      the operations that CUDA autocast changes
library._scoped_library, autocast.__enter__  kernels of autocast; regions made before the capture
_cur_sdpa_kernel_backends                    attention kernels that the step allows
===========================================  ==============================================================
"""

import copy
import gc
import linecache
import logging
import operator
import random
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, partialmethod
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, _meta_registrations, nn
from torch._meta_registrations import _meta_grouped_mm_common
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributions import Distribution
from torch.nn.parallel import distributed
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import Optimizer, optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from perfkit.workloads.vocabulary import walk_tensors

#: Backends and operations whose number format can be set.
_FORMATS = [
    ("generic", "all"),
    *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
]
#: Errors of fake tensors when code needs a value, or a size that depends on values.
_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
#: Largest tensors whose values are known, of whole numbers and of others [-]. Sizes and branches
#: hardly depend on large tensors of others, such as masks that are added to scores.
MOST_KNOWN, MOST_DRAWN = 1 << 24, 1 << 20
#: Largest whole number that a computed number counts as [-].
MOST_COUNTED = 100_000
_FAKE_LOGGER = "torch._subclasses.fake_tensor"
_LAZY: tuple[Any, ...] = (UninitializedParameter, UninitializedBuffer)
#: Held during a capture, whose patches affect the whole process.
_ALONE = threading.RLock()
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["perfkit"])
)
#: Folder of Python's own library.
_PYTHON = str(Path(traceback.__file__).parent)


# -- steps that depend on values
# ---------------------------------------------------------------------------------------


#: Messages of `refuse`: {0} is the line of the step, {1} the operation.
_NEEDED = (
    "capture computes no values, and the step needs one in {0}; sizes and branches may depend on whole numbers that "
    "are passed, such as indices and lengths, and on small tensors that are filled or drawn; otherwise use "
    "torch.where or fixed sizes, or capture each branch as a step of its own"
)
_UNTOLD = "capture computes no values, and {1} in {0} has no rule for fake tensors; add torch.library.register_fake"
_NO_RULE = (
    "capture computes no values, and an operation in {0} has no rule for fake tensors of this kind, such as sparse ones; "
    "use dense tensors, or add torch.library.register_fake"
)
#: What PyTorch says of tensors and operations that fake tensors cannot follow.
_NO_RULE_SAID = ("Cannot access storage of", "no fake impl registered")
#: What PyTorch says where it needs a GPU, and what is said of it.
_WITHOUT_GPU = {
    "FSDP needs a non-CPU accelerator device": (
        "FullyShardedDataParallel, the first version of FSDP, is not captured, in {0}; use "
        "torch.distributed.fsdp.fully_shard, which sends the same bytes"
    ),
    "FlexAttention does not support backward on CPU": (
        "the backward pass of flex_attention is a kernel that a compiler makes on a GPU, and is not captured, in {0}; "
        "use torch.nn.functional.scaled_dot_product_attention, with is_causal=True or a mask"
    ),
    "SyncBatchNorm expected input tensor to be on": (
        "SyncBatchNorm joins statistics of several ranks by kernels that only a GPU has, and is not captured, in {0}; "
        "capture with BatchNorm: the graph then lacks, for each layer, an all_gather forward and an all_reduce backward "
        "of two numbers for each channel, and their waits"
    ),
    "type torch.cuda.": (
        "types such as torch.cuda.FloatTensor need a GPU, and a capture has none, in {0}; name the device instead, as in "
        "torch.empty(4, device='cuda')"
    ),
}
_NO_GPU = (
    "the step asks in {0} for what only a GPU can answer, and a capture has none; leave this call out, as it does not "
    "train, and capture again"
)
_NO_GPU_SAID = (
    "Torch not compiled with CUDA enabled",
    "PyTorch was compiled without CUDA support",
    "without ATen_cuda library",
    "Found no NVIDIA driver",
    "has no attribute '_cuda_",
)
PROCESSES = (
    "the step starts another process in {0}, and capture follows only this one; give the step of one rank, and the "
    "number of ranks as ranks="
)
#: What is said of threads that the step starts; {0} is the line that starts them.
OTHER_THREADS = (
    "the step runs PyTorch in other threads, started in {0}; capture follows one thread, so that their work is not in "
    "the graph"
)
SHARED_WITH_THREADS = (
    "the step works with its tensors in another thread, started in {0}, and capture follows one thread; let the step do "
    "this work itself"
)
OTHER_PROGRAM = "the step runs another program in {0}; capture follows this process alone, so that its work is not in the graph"
OFFLOADED = (
    "CPUOffloadPolicy keeps and updates weights on the host, and capture follows a single device, in {0}; leave "
    "offload_policy out: copies between host and device and the host's update are then not in the graph"
)
#: What is said of a step that begins a process group of another size.
GROUP_SIZE = "the step begins a process group of {0} ranks, and ranks is {1}; give ranks={0}"


def find_line(frames: Any = None) -> str:
    """The innermost line outside of PyTorch and perfkit, of these frames or of the callers."""
    place = "a place that could not be found"
    for frame in frames or traceback.extract_stack():
        if not frame.filename.startswith((*_LIBRARIES, "<")) or "<doctest" in frame.filename:
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            place = f'{frame.filename}, line {frame.lineno}: "{code}"'
    return place


def find_line_of_program() -> str:
    """The innermost line of the callers outside of PyTorch, perfkit and Python's own library."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith(_PYTHON) or "site-packages" in frame.filename
    ]
    return find_line(frames)


def refuse(text: str, frames: Any = None, cause: Any = None) -> NoReturn:
    """Raise a ValueError that names the innermost line outside of PyTorch and perfkit."""
    raise ValueError(text.format(find_line(frames), getattr(cause, "func", ""))) from cause


class Unknown(float):
    """A number that was not computed. A step may add it up, compare and print it; what it compares
    with is noted, so that further calls of the step tell whether anything depends on it.

    Parameters
    ----------
    number : float
        What it counts as in this call of the step.
    bounds : list of float
        Receives the numbers that it is compared with.
    """

    bounds: list[float]

    def __new__(cls, number: float, bounds: list[float]) -> Self:
        """A number that counts as this one."""
        made = super().__new__(cls, number)
        made.bounds = bounds
        return made

    def _decide(self, *_: Any, **__: Any) -> NoReturn:
        refuse(_NEEDED)

    def _combine(self, *_: Any) -> "Unknown":
        return Unknown(float(self), self.bounds)

    def _compare(self, compare: Callable[[float, float], bool], other: Any) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented
        if not isinstance(other, Unknown):
            self.bounds.append(float(other))
        return compare(float(self), float(other))

    def __bool__(self) -> bool:
        return self._compare(operator.ne, 0.0)

    def __round__(self, digits: Any = None) -> Any:
        return int(self) if digits is None else self._combine()

    def __int__(self) -> int:
        """A whole number, small enough to count up to."""
        return int(max(-MOST_COUNTED, min(MOST_COUNTED, float(self))))

    def __format__(self, text: str) -> str:
        if text.endswith("d"):  # a count of computed things
            return format(1, text)
        return float.__format__(self, text)

    __lt__ = partialmethod(_compare, operator.lt)
    __le__ = partialmethod(_compare, operator.le)
    __gt__ = partialmethod(_compare, operator.gt)
    __ge__ = partialmethod(_compare, operator.ge)
    __eq__ = partialmethod(_compare, operator.eq)
    __ne__ = partialmethod(_compare, operator.ne)
    __index__ = _decide
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _combine
    )
    __neg__ = __abs__ = __pow__ = __rpow__ = _combine
    __hash__ = float.__hash__


class UnknownArray(np.ndarray[Any, Any]):
    """Numbers that were not computed: compiled code may match or sort them, but a step may not
    decide by them."""

    __array_ufunc__ = __array_function__ = __bool__ = __float__ = __int__ = Unknown._decide
    __getitem__ = __iter__ = item = tolist = Unknown._decide


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor is dense, and small enough to know its values."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.layout is torch.strided and tensor.numel() <= (
        MOST_KNOWN if whole else MOST_DRAWN
    )


def find_caller(name: str) -> bool:
    """Whether code in a file with this ending is among the callers, up to the call of the autograd
    engine."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith((name, "autograd/graph.py")):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_filename.endswith(name))


def is_called_by_compiled_code() -> bool:
    """Whether `torch.compile` would compile what calls this: the nearest of PyTorch's own wrappers
    compiles.

    `torch.compiler.disable` has a wrapper in the same file. Once anything was compiled, PyTorch
    wraps the steps of `SparseAdam` and `LBFGS` in it, for the rest of the process.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("autograd/graph.py"):
            return False
        if code.co_filename.endswith("_dynamo/eval_frame.py"):
            return not code.co_qualname.startswith("DisableContext.")
        frame = frame.f_back
    return False


# -- state that a step would change
# ------------------------------------------------------------------------------------


def find_alive(*types: type) -> list[Any]:
    """All living objects of these types, except lazy parameters and modules whose constructor still
    runs."""
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, types)}
    alive = (o for o in objects if type(o) in wanted and not is_lazy(o))
    return [o for o in alive if not isinstance(o, nn.Module) or "_modules" in vars(o)]


def _list_mappings(tree: Any) -> Iterator[dict[Any, Any]]:
    """A dictionary and all dictionaries inside of it, also in lists."""
    if isinstance(tree, dict):
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, dict | list):
            yield from _list_mappings(each)


def compute(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on real tensors, and record nothing."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


@contextmanager
def quieten() -> Iterator[None]:
    """Keep warnings and log lines of PyTorch and transformers from the user: they speak of fake
    tensors. What matters is said by notes of the capture."""
    loggers = [logging.getLogger(name) for name in ("torch", "transformers", _FAKE_LOGGER)]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for package in ("torch", "transformers", "perfkit.recording"):
            warnings.filterwarnings("ignore", module=rf"{re.escape(package)}(\.|$)")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _keep_settings() -> Iterator[None]:
    """Restore random numbers and settings of PyTorch; number formats of products have settings
    under two names."""
    own: Any = torch._C
    generators: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (own._get_float32_matmul_precision, own._set_float32_matmul_precision),
        (own._get_cudnn_allow_tf32, own._set_cudnn_allow_tf32),
        (own._get_cudnn_benchmark, own._set_cudnn_benchmark),
        (own._get_cudnn_deterministic, own._set_cudnn_deterministic),
        (own._get_flash_sdp_enabled, own._set_sdp_use_flash),
        (own._get_math_sdp_enabled, own._set_sdp_use_math),
        (own._get_mem_efficient_sdp_enabled, own._set_sdp_use_mem_efficient),
        (own._get_cudnn_sdp_enabled, own._set_sdp_use_cudnn),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_num_threads, torch.set_num_threads),
        # the first use of the compiler switches these checks off
        (lambda: Distribution._validate_args, Distribution.set_default_validate_args),
    ]
    read, write = own._get_fp32_precision_getter, own._set_fp32_precision_setter
    settings += [(partial(read, *place), partial(write, *place)) for place in _FORMATS]
    before = [_read(get) for get, _ in settings]
    device = _device.CURRENT_DEVICE
    try:
        yield
    finally:
        if device != _device.CURRENT_DEVICE:
            torch.set_default_device(device)
        for restore, state in generators:
            restore(state)
        for (get, restore), value in zip(settings, before, strict=True):
            if value is not None and _read(get) != value:
                restore(value)


def _read(get: Callable[[], Any]) -> Any:
    """A setting; None if PyTorch refuses to read it, as its old and new names disagree."""
    with suppress(RuntimeError):
        return get()


@contextmanager
def _keep_objects() -> Iterator[None]:
    """Restore gradients, versions of tensors, and attributes and classes of modules and optimizers
    that are alive."""
    alive = find_alive(Tensor, nn.Module, Optimizer)
    tensors = [t for t in alive if isinstance(t, Tensor) and not t.is_inference()]
    leaves = [(t, t.grad if t.is_leaf and t.requires_grad else None, t._version) for t in tensors]
    owners = [vars(o) for o in alive if not isinstance(o, Tensor)]
    held = [(mapping, dict(mapping)) for own in owners for mapping in _list_mappings(own)]
    classes = [(module, type(module)) for module in alive if isinstance(module, nn.Module)]
    del alive, tensors, owners
    try:
        yield
    finally:
        for module, own in classes:
            if type(module) is not own:
                module.__class__ = own
        for now, before in held:
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
                now.clear()
                now.update(before)
        for tensor, gradient, _ in leaves:
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient
        changed = [(tensor, version) for tensor, _, version in leaves if tensor._version != version]
        if changed:
            torch._C._autograd._unsafe_set_version_counter(*zip(*changed, strict=True))


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply` for fake parameters, which PyTorch cannot swap; tied parameters stay tied."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    holders: list[dict[str, Any]] = [module._parameters, module._buffers]
    for held in holders:
        for key, old in held.items():
            with torch.no_grad():
                new: Any = (
                    old
                    if old is None
                    else fn(torch.empty(0, dtype=old.dtype) if is_lazy(old) else old)
                )
            if is_lazy(old):
                make: Any = type(old)
                new = make(old.requires_grad, dtype=new.dtype)
            if new is not old and isinstance(old, nn.Parameter) and isinstance(old, FakeTensor):
                old.data, old.constant = new, None
            elif new is not old:
                trained = isinstance(old, nn.Parameter) and not is_lazy(old)
                held[key] = nn.Parameter(new, old.requires_grad) if trained else new
    return module


def _take_any_format(
    rule: Callable[..., Tensor], a: Tensor, b: Tensor, *more: Any, **named: Any
) -> Tensor:
    """Let grouped products take every number format: PyTorch's rule for fake tensors takes only
    bf16."""
    return rule(a.to(torch.bfloat16), b.to(torch.bfloat16), *more, **named).to(a.dtype)


def _list_capturable_devices(supports_xla: bool = True) -> list[str]:
    """Devices whose optimizers keep their counters there; PyTorch may compile this function to
    TorchScript."""
    return ["cpu"]


def load_batches(loader: Any) -> Iterator[Any]:
    """Real batches of a data loader, made in this process without its workers."""
    alone = copy.copy(loader)
    vars(alone).update(num_workers=0, timeout=0, pin_memory=False)
    batches = compute(alone._get_iterator)
    while (batch := compute(next, batches, None)) is not None:
        yield batch


# -- the sandbox
# -------------------------------------------------------------------------------------------------------


class _WatchThread(TorchFunctionMode):
    """Sees calls of PyTorch in a thread that the step has started.

    Parameters
    ----------
    recorder : Recorder
        Receives the note, or what the capture is refused for.
    line : str
        Where the thread was started.
    """

    def __init__(self, recorder: Any, line: str) -> None:
        super().__init__()
        self.recorder, self.line = recorder, line

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call; one with a tensor of the capture is not followed."""
        if any(isinstance(t, FakeTensor) for t in walk_tensors([args, kwargs or {}])):
            self.recorder.lost = SHARED_WITH_THREADS.format(self.line)
            raise ValueError(self.recorder.lost)
        self.recorder.values.notes[OTHER_THREADS.format(self.line)] = None
        return func(*args, **(kwargs or {}))


def _watch_threads_and_programs(recorder: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Patches that notice threads and programs that the step starts."""
    own = threading.get_ident()
    start, open_program, complain = (
        threading.Thread.start,
        subprocess.Popen.__init__,
        threading.excepthook,
    )

    def begin(thread: Any) -> None:
        if threading.get_ident() == own:
            run, line = thread.run, find_line_of_program()

            def run_and_watch() -> None:
                with _WatchThread(recorder, line):
                    run()

            thread.run = run_and_watch
        start(thread)

    def begin_program(program: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == own and recorder.trail.called:
            recorder.values.notes[OTHER_PROGRAM.format(find_line_of_program())] = None
        open_program(program, *args, **kwargs)

    def complain_of_others(failure: Any) -> None:
        if str(failure.exc_value) != recorder.lost:
            complain(failure)

    return [
        (threading.Thread, {"start": begin}),
        (threading, {"excepthook": complain_of_others}),
        (subprocess.Popen, {"__init__": begin_program}),
    ]


def _list_patches(recorder: Any) -> list[Any]:
    """Patches of PyTorch: owners with their temporary attributes."""
    types, change = [*optimizer._foreach_supported_types, FakeTensor], torch.UntypedStorage.resize_
    set_device = torch.set_default_device

    def set_home(device: Any) -> None:
        """Set the default device; on a GPU, tensors without a device are placed there."""
        recorder.places.choose_default(device)
        set_device(None if device is None else "cpu")

    def resize(storage: Any, nbytes: int) -> Any:
        recorder.values.storages.resize(storage, nbytes)
        return change(storage, nbytes)

    names = [
        *_foreach_utils._get_foreach_kernels_supported_devices(),
        *(["cpu"] if recorder.accelerator else []),
    ]
    lists = {
        "_foreach_supported_types": types,
        "_get_foreach_kernels_supported_devices": lambda: names,
    }
    patches: list[tuple[Any, dict[str, Any]]] = [
        (FakeTensor, {"data_ptr": lambda _: 0}),
        # weak references cannot be copied
        (
            FakeTensorMode,
            {
                "__deepcopy__": lambda mode, _: mode,
                "may_turn_const": lambda _, made: is_small(made),
            },
        ),
        (
            _meta_registrations,
            {"_meta_grouped_mm_common": partial(_take_any_format, _meta_grouped_mm_common)},
        ),
        *(
            (
                each,
                {
                    "__new__": lambda *args, device=None, make=each.__new__, **kwargs: compute(
                        make, *args, **kwargs
                    )
                },
            )
            for each in _LAZY
        ),  # real and empty, as a fake tensor cannot be of these classes
        (nn.Module, {"_apply": _convert}),
        (torch.UntypedStorage, {"resize_": resize}),
        (nn.init, {"_no_grad_trunc_normal_": lambda tensor, *_, **__: tensor}),
        (_foreach_utils, lists),
        (optimizer, lists),
        (sys, {"excepthook": sys.excepthook}),
        (BaseProcess, {"start": lambda *_: refuse(PROCESSES)}),
        (torch, {"set_default_device": set_home}),
        *_watch_threads_and_programs(recorder),
    ]
    if recorder.accelerator:
        patches.append((FakeTensor, {"device": property(lambda t: recorder.places.answer(t))}))
        patches += [(place, recorder.exchanges.list_streams()) for place in (torch.cpu, torch.cuda)]
        devices = "_get_capturable_supported_devices"
        patches += [
            (each, {devices: _list_capturable_devices})
            for each in [*sys.modules.values()]
            if devices in getattr(each, "__dict__", ())
        ]
        build = distributed.DistributedDataParallel.__init__

        def build_replica(
            replica: Any,
            module: Any,
            device_ids: Any = None,
            output: Any = None,
            *args: Any,
            **kw: Any,
        ) -> None:
            kw.pop("output_device", None)
            build(replica, module, None, None, *args, **kw)

        patches.append((distributed.DistributedDataParallel, {"__init__": build_replica}))
    private: Any = torch._C._distributed_c10d
    wait, agree, make = private.Work.wait, private.Reducer._rebuild_buckets, DeviceMesh.__init__

    def note(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.exchanges.wait(work)
        return wait(work, *args, **kwargs)

    def agreed(own: Any) -> Any:
        with patch.object(recorder, "agreeing", True):
            return agree(own)

    def mesh(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        # numbers of ranks
        known = [getattr(each, "constant", each) for each in (*args, *kwargs.values())]
        compute(
            make,
            self,
            "cpu",
            *known[: len(args)],
            **dict(zip(kwargs, known[len(args) :], strict=True)),
        )

    asked = ("_verify_param_shape_across_processes", "_sync_module_states")  # of other ranks
    return [
        *patches,
        (DeviceMesh, {"__init__": mesh}),
        (private.Work, {"wait": note}),
        (private.Reducer, {"_rebuild_buckets": agreed}),
        (distributed, dict.fromkeys(asked, lambda *_, **__: None)),
    ]


def _forget_meshes() -> None:
    """Empty a cache of PyTorch whose keys are meshes: an equal mesh of a capture has other process
    groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug

        known: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        # PyTorch 2.9
        clear = getattr(debug, "_clear_sharding_prop_cache", None) or known.cache.cache_clear
        clear()


@contextmanager
def _fake_ranks(ranks: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist, in place of a real one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own: Any = dist.distributed_c10d
    before = own._world
    world = own._world = SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        comms=[],
        group_count=before.group_count + 10_000,
        pg_config_info=[],
    )
    _forget_meshes()

    def begin(*args: Any, **kwargs: Any) -> None:
        """What a script calls first; the ranks exist already."""
        if kwargs.get("world_size", ranks) not in (ranks, -1):
            raise ValueError(GROUP_SIZE.format(kwargs["world_size"], ranks))

    try:
        dist.init_process_group(
            "fake", rank=rank, world_size=ranks, store=FakeStore(), group_name="perfkit"
        )
        with patch.object(dist, "init_process_group", begin):
            yield
    finally:
        gc.collect()  # DistributedDataParallel holds its process group in a cycle of references
        for name in world.pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
        _forget_meshes()
        own._world = before
        own._update_default_pg(before.default_pg)


def _end_group() -> None:
    """End a process group that the step began and left."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _explain(error: Exception) -> str | None:
    """What to say instead of an error of PyTorch that comes from the capture; None for others."""
    said = str(error)
    for beginning, text in _WITHOUT_GPU.items():
        if beginning in said:
            return text
    if any(part in said for part in _NO_GPU_SAID):
        return _NO_GPU
    if isinstance(error, NotImplementedError | RuntimeError):
        return _NO_RULE if any(part in said for part in _NO_RULE_SAID) else None
    # PyTorch was given a computed number as a size
    return _NEEDED if isinstance(error, TypeError) and Unknown.__name__ in said else None


@contextmanager
def open_sandbox(recorder: Any, ranks: int, rank: int) -> Iterator[None]:
    """Let a step run without computing, alone in the process; afterwards everything is as before.

    Parameters
    ----------
    recorder : Recorder
        It says whether the step is for a GPU, provides streams, and is told about waits and sizes
        of storages. It is `agreeing` while DistributedDataParallel sends and reads whole numbers.
    ranks, rank : int
        Number of ranks, and this rank [-].

    Raises
    ------
    ValueError
        For a step that needs a value that is not computed; the message names the line.
    """
    with _ALONE, ExitStack() as stack:
        stack.enter_context(quieten())
        stack.enter_context(_keep_settings())
        stack.enter_context(_keep_objects())
        for owner, values in _list_patches(recorder):
            stack.enter_context(patch.multiple(owner, create=True, **values))
        if ranks > 1 or dist.is_initialized():
            stack.enter_context(_fake_ranks(ranks, rank))
        else:
            stack.callback(_end_group)
        try:
            yield
        except _VALUES as error:
            untold = isinstance(error, fake_tensor.UnsupportedOperatorException)
            refuse(_UNTOLD if untold else _NEEDED, traceback.extract_tb(error.__traceback__), error)
        except (
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
            AssertionError,
            AttributeError,
        ) as error:
            text = _explain(error)
            if text is None:
                raise
            refuse(text, traceback.extract_tb(error.__traceback__), error)
