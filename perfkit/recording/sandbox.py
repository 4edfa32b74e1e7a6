"""A sandbox in which a training step runs without computing, with every private part of PyTorch that it needs.

Checked with PyTorch 2.13.0 alone. What would have to be looked at first with another version, see `_list_patches`:

===========================================  ==============================================================
part of PyTorch                              what for
===========================================  ==============================================================
torch._subclasses.fake_tensor                tensors without values; `data_ptr` is asked for by deep copies
_meta_registrations._meta_grouped_mm_common  products of groups in formats other than bf16
fake_tensor.CONSTANT_NUMEL_LIMIT             real whole numbers stay known through operations
nn.Module._apply                             conversions swap parameters, which fake ones cannot
nn.init._no_grad_trunc_normal_               draws until all numbers are in range
UninitializedParameter, UninitializedBuffer  what lazy modules hold before their first input
DataLoader._get_iterator                     batches are made for real and in this process
_foreach_utils, optimizer: lists of types    optimizers on a GPU work on lists of tensors
distributed_c10d._world                      ranks that do not exist, in place of those there may be
torch.testing._internal...fake_pg            their store and their process group
Reducer._rebuild_buckets                     DistributedDataParallel reads the bucket sizes it sends
Work.wait                                    where a collective is waited for
_verify_param_shape_across_processes         what a module over ranks asks other ranks first
DeviceMesh.__init__                          ranks of a mesh are known, and its tensors on this machine
torch.cpu, torch.cuda: Stream and others     what goes on beside the compute stream
_clear_sharding_prop_cache                   shards are looked up by meshes that are equal, not the same
_dynamo.eval_frame: _callback_from_stance    what is compiled runs as it is, and whether anything is
TorchDispatchMode._should_skip_dynamo        a compiler need not be kept from the recorder at each of its calls
Tensor._make_subclass                        fake tensors are made without the checks of their constructor
fsdp: the file _fsdp_param.py                whether it is what moves weights to the host
fp32_precision, float32_matmul_precision     number formats of products, put back after a capture
AutocastPrivateUse1, _DisableAutocast        autocast as on a GPU, see `precision.pretend_gpu`
_dispatch_get_registrations, key guards      which operations CUDA autocast changes, and that it does
library._scoped_library, autocast.__enter__  the kernels for it, gone afterwards; regions made before
_cur_sdpa_kernel_backends                    kernels of attention that the step allows
===========================================  ==============================================================
"""

import copy
import gc
import linecache
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, _meta_registrations, nn
from torch._meta_registrations import _meta_grouped_mm_common
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import Optimizer, optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

#: Where number formats of products are set.
_FORMATS = [("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))]
#: Errors of fake tensors where code needs a value, or a size that depends on values.
_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
#: Largest tensor whose values are known if those it is made from are [-].
MOST_KNOWN = 1 << 24
_LAZY: tuple[Any, ...] = (UninitializedParameter, UninitializedBuffer)
#: Held for a whole capture, as its replacements affect the whole process.
_ALONE = threading.RLock()
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["perfkit"]))


# -- what depends on values --------------------------------------------------------------------------------------------


#: What cannot be followed: in which line, and which operation.
_NEEDED = (
    "capture computes no values, and the step needs one in {0}; sizes and branches may depend on whole numbers that "
    "are passed, such as indices and lengths, and on small tensors that are filled or drawn; else write it with "
    "torch.where or fixed sizes, or capture each branch as a step of its own"
)
_UNTOLD = "capture computes no values, and {1} in {0} does not say what it returns; tell torch.library.register_fake"
OFFLOADED = (
    "CPUOffloadPolicy keeps and updates weights on the host, and capture follows a single device, in {0}; leave "
    "offload_policy out: copies between host and device and the host's update are then not in the graph"
)


def refuse(text: str, frames: Any = None, cause: Any = None) -> NoReturn:
    """Say what cannot be followed in the innermost line that is neither PyTorch's nor perfkit's."""
    place = "a place that could not be found"
    for frame in frames or traceback.extract_stack():
        if not frame.filename.startswith((*_LIBRARIES, "<")) or "<doctest" in frame.filename:
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            place = f'{frame.filename}, line {frame.lineno}: "{code}"'
    raise ValueError(text.format(place, getattr(cause, "func", ""))) from cause


class Unknown(float):
    """A number that was not computed: it may be added up and printed, but nothing may be decided by it."""

    def _decide(self, *_: Any) -> NoReturn:
        refuse(_NEEDED)

    def _combine(self, *_: Any) -> "Unknown":
        return Unknown(self)

    __bool__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __round__ = _decide
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combine
    __neg__ = __abs__ = __pow__ = __rpow__ = _combine
    __hash__ = float.__hash__


def find_caller(name: str) -> bool:
    """Whether a file whose path ends so is among those that call, autograd's engine not passed."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith((name, "autograd/graph.py")):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_filename.endswith(name))


# -- state that a step over real modules would leave behind ------------------------------------------------------------


def find_alive(*types: type) -> list[Any]:
    """All objects of these types that Python knows of, but for modules half built and parameters without sizes."""
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, types)}
    alive = [o for o in objects if type(o) in wanted and not is_lazy(o)]
    return [o for o in alive if not isinstance(o, nn.Module) or "_modules" in vars(o)]


def _list_mappings(tree: Any) -> Iterator[dict[Any, Any]]:
    """All dictionaries inside of one and inside of its lists."""
    if isinstance(tree, dict):
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, dict | list):
            yield from _list_mappings(each)


@contextmanager
def compute() -> Iterator[None]:
    """Work on real tensors for real, and record nothing."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _keep_state() -> Iterator[None]:
    """Put back tensors, gradients, modules, optimizers and random numbers of everything that is alive."""
    alive = find_alive(Tensor, nn.Module, Optimizer)
    tensors = [t for t in alive if isinstance(t, Tensor) and not t.is_inference()]
    leaves = [(t, t.grad, t._version) if t.is_leaf and t.requires_grad else (t, None, t._version) for t in tensors]
    owners = [vars(o) for o in alive if not isinstance(o, Tensor)]
    held = [(mapping, dict(mapping)) for own in owners for mapping in _list_mappings(own)]
    classes = [(module, type(module)) for module in alive if isinstance(module, nn.Module)]
    del alive, tensors, owners
    settings: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()), (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
    ]  # fmt: skip
    device = torch.get_default_device()
    try:
        yield
    finally:
        for put_back, value in settings:
            put_back(value)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
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
    """`Module._apply` for fake parameters, which PyTorch would swap, and often cannot; tied ones stay tied."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    holders: list[dict[str, Any]] = [module._parameters, module._buffers]
    for held in holders:
        for key, old in held.items():
            with torch.no_grad():
                new: Any = old if old is None else fn(torch.empty(0, dtype=old.dtype) if is_lazy(old) else old)
            if is_lazy(old):
                make: Any = type(old)
                new = make(old.requires_grad, dtype=new.dtype)
            if new is not old and isinstance(old, nn.Parameter) and isinstance(old, FakeTensor):
                old.data, old.constant = new, None
            elif new is not old:
                trained = isinstance(old, nn.Parameter) and not is_lazy(old)
                held[key] = nn.Parameter(new, old.requires_grad) if trained else new
    return module


def _take_any_format(rule: Callable[..., Tensor], a: Tensor, b: Tensor, *more: Any, **named: Any) -> Tensor:
    """Products of groups: PyTorch's rule for fake tensors takes bf16 alone, its kernels other formats too."""
    return rule(a.to(torch.bfloat16), b.to(torch.bfloat16), *more, **named).to(a.dtype)


def _hold_nothing(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make lazy tensors real ones: they are empty, and no fake tensor can be of their classes."""

    def new(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        with compute():
            return make(*args, **kwargs)

    return new


def load_batches(loader: Any) -> Iterator[Any]:
    """Batches of a data loader, made for real and in this process, whatever workers it has."""
    alone = copy.copy(loader)
    vars(alone).update(num_workers=0, timeout=0, pin_memory=False)
    with compute():
        batches = alone._get_iterator()
    while True:
        with compute():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@contextmanager
def _keep_formats() -> Iterator[None]:
    """Put back number formats of products, for which PyTorch has old settings and new ones."""
    own: Any = torch._C
    settings = [(own._get_float32_matmul_precision, own._set_float32_matmul_precision)]
    settings += [(own._get_cudnn_allow_tf32, own._set_cudnn_allow_tf32)]
    for f in _FORMATS:
        settings.append((partial(own._get_fp32_precision_getter, *f), partial(own._set_fp32_precision_setter, *f)))
    before = [_read(get) for get, _ in settings]
    try:
        yield
    finally:
        for (get, put_back), value in zip(settings, before, strict=True):
            if value is not None and _read(get) != value:
                put_back(value)


def _read(get: Callable[[], Any]) -> Any:
    """A setting; none where PyTorch refuses, as an old and a new one disagree."""
    with suppress(RuntimeError):
        return get()


# -- the sandbox -------------------------------------------------------------------------------------------------------


def _list_patches(recorder: Any) -> list[Any]:
    """What is replaced in PyTorch: owners, and the attributes that they get for a while."""
    types, change = [*optimizer._foreach_supported_types, FakeTensor], torch.UntypedStorage.resize_

    def resize(storage: Any, nbytes: int) -> Any:
        recorder.values.storages.resize(storage, nbytes)
        return change(storage, nbytes)

    names = [*_foreach_utils._get_foreach_kernels_supported_devices(), *(["cpu"] if recorder.accelerator else [])]
    lists = {"_foreach_supported_types": types, "_get_foreach_kernels_supported_devices": lambda: names}
    patches: list[tuple[Any, dict[str, Any]]] = [
        (FakeTensor, {"data_ptr": lambda _: 0}),
        (FakeTensorMode, {"__deepcopy__": lambda mode, _: mode}),  # its weak references cannot be copied
        (fake_tensor, {"CONSTANT_NUMEL_LIMIT": MOST_KNOWN}),
        (_meta_registrations, {"_meta_grouped_mm_common": partial(_take_any_format, _meta_grouped_mm_common)}),
        *((each, {"__new__": staticmethod(_hold_nothing(each.__new__))}) for each in _LAZY),
        (nn.Module, {"_apply": _convert}), (torch.UntypedStorage, {"resize_": resize}),
        (nn.init, {"_no_grad_trunc_normal_": lambda tensor, *_, **__: tensor}),
        (_foreach_utils, lists), (optimizer, lists), (sys, {"excepthook": sys.excepthook}),
    ]  # fmt: skip
    if recorder.accelerator:
        patches += [(place, recorder.exchanges.list_streams()) for place in (torch.cpu, torch.cuda)]
        devices = "_get_capturable_supported_devices"
        patches += [(each, {devices: lambda **_: ["cpu"]}) for each in [*sys.modules.values()]
                    if devices in getattr(each, "__dict__", ())]  # fmt: skip
    if not dist.is_available():
        return patches
    private: Any = torch._C._distributed_c10d
    wait, agree = private.Work.wait, private.Reducer._rebuild_buckets

    def note(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.exchanges.wait(work)
        return wait(work, *args, **kwargs)

    def agreed(own: Any) -> Any:
        with patch.object(recorder, "agreeing", True):
            return agree(own)

    def mesh(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        known = [getattr(each, "constant", each) for each in (*args, *kwargs.values())]  # of ranks
        with _disable_current_modes():
            make(self, "cpu", *known[: len(args)], **dict(zip(kwargs, known[len(args) :], strict=True)))

    make, nothing = DeviceMesh.__init__, lambda *_, **__: None
    return [
        *patches, (DeviceMesh, {"__init__": mesh}), (private.Work, {"wait": note}),
        (private.Reducer, {"_rebuild_buckets": agreed}),
        (distributed, {"_verify_param_shape_across_processes": nothing, "_sync_module_states": nothing}),
    ]  # fmt: skip


def _forget_meshes() -> None:
    """What PyTorch keeps of tensors over ranks, by meshes that are equal but whose process groups are others."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


@contextmanager
def _fake_ranks(ranks: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist, in place of the one there may be."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own: Any = dist.distributed_c10d
    before = own._world
    world = own._world = SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, tags_to_pg={}, pg_to_tag={},
        pg_coalesce_state={}, comms=[], group_count=before.group_count + 10_000, pg_config_info=[],
    )  # fmt: skip
    _forget_meshes()
    try:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore(), group_name="perfkit")
        yield
    finally:
        gc.collect()  # a module over ranks holds on to its process group
        for name in world.pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
        _forget_meshes()
        own._world = before
        own._update_default_pg(before.default_pg)


@contextmanager
def open_sandbox(recorder: Any, ranks: int, rank: int) -> Iterator[None]:
    """Run without computing, alone in the process, and leave nothing behind.

    Parameters
    ----------
    recorder : Recorder
        Whether it is for a GPU, where optimizers work on lists of tensors, and its streams there; it is told what is
        waited for, and is `agreeing` while a module over ranks sends and reads whole numbers.
    ranks, rank : int
        Ranks that take part, and which of them this is [-].

    Raises
    ------
    ValueError
        For what asks for a value that is not computed, naming the line.
    """
    with _ALONE, ExitStack() as stack:
        stack.enter_context(_keep_state())
        stack.enter_context(_keep_formats())
        for owner, values in _list_patches(recorder):
            stack.enter_context(patch.multiple(owner, create=True, **values))
        if dist.is_available() and (ranks > 1 or dist.is_initialized()):
            stack.enter_context(_fake_ranks(ranks, rank))
        try:
            yield
        except _VALUES as error:
            untold = isinstance(error, fake_tensor.UnsupportedOperatorException)
            refuse(_UNTOLD if untold else _NEEDED, traceback.extract_tb(error.__traceback__), error)
