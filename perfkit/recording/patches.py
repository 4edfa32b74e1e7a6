"""Temporary changes of PyTorch, Python and the data loader that a capture needs.

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
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, _meta_registrations, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from perfkit.recording.refusals import (
    GROUP_SIZE,
    OTHER_PROGRAM,
    OTHER_THREADS,
    PROCESSES,
    SHARED_WITH_THREADS,
    find_line_of_program,
    refuse,
)
from perfkit.recording.values import compute, is_small
from perfkit.workloads.vocabulary import walk_tensors


class Patch(NamedTuple):
    """One attribute of a class or module that is another one during a capture.

    Parameters
    ----------
    owner : type or module
        What has the attribute.
    name : str
        Name of the attribute. Where this version of PyTorch has none, it is added.
    replacement : object
        Its value during the capture.
    """

    owner: Any
    name: str
    replacement: Any


def list_patches(recorder: Any) -> list[Patch]:
    """All patches of a capture by this recorder, except those of `perfkit.recording.precision` and
    of the hooks of `perfkit.recording.steps`."""
    patches = [
        *_patch_fake_tensors(),
        *_patch_modules(),
        *_patch_storages(recorder),
        *_patch_default_device(recorder),
        *_patch_optimizers(recorder),
        *_patch_programs(recorder),
        *_patch_process_groups(recorder),
    ]
    if recorder.accelerator:
        patches += _patch_gpu(recorder)
    return patches


# -- tensors and modules
# --------------------------------------------------------------------------------------------


def _patch_fake_tensors() -> list[Patch]:
    """What fake tensors lack: an address, copies of their mode, more known values, a rule."""

    def get_no_address(_: Any) -> int:
        return 0

    def get_mode_itself(mode: Any, _: Any) -> Any:
        return mode

    def may_turn_const(_: Any, made: Any) -> bool:
        return is_small(made)

    grouped_product = partial(_take_any_format, _meta_registrations._meta_grouped_mm_common)
    return [
        # Deep copies, of a model for example, ask for addresses; else they raise an error.
        Patch(FakeTensor, "data_ptr", get_no_address),
        # A copy of a tensor keeps its mode, whose weak references cannot be copied.
        Patch(FakeTensorMode, "__deepcopy__", get_mode_itself),
        # PyTorch knows the values of single numbers only. If it asks elsewhere, steps that read
        # masks and lengths are refused.
        Patch(FakeTensorMode, "may_turn_const", may_turn_const),
        # PyTorch's rule takes bf16 only. If it moves, mixtures of experts in fp32 raise an error.
        Patch(_meta_registrations, "_meta_grouped_mm_common", grouped_product),
    ]


def _take_any_format(
    rule: Callable[..., Tensor], a: Tensor, b: Tensor, *more: Any, **named: Any
) -> Tensor:
    """Let grouped products take every number format: PyTorch's rule for fake tensors takes only
    bf16."""
    result = rule(a.to(torch.bfloat16), b.to(torch.bfloat16), *more, **named)
    return result.to(a.dtype)


def _patch_modules() -> list[Patch]:
    """Construction and conversion of modules whose parameters are fake."""

    def skip_drawing(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    return [
        # Fake parameters cannot be swapped: `model.half()` and `model.to(...)` raise an error.
        Patch(nn.Module, "_apply", _convert),
        # It draws until all numbers are in range, which asks for values.
        Patch(nn.init, "_no_grad_trunc_normal_", skip_drawing),
        # A fake tensor cannot be of these classes: lazy modules raise an error.
        Patch(UninitializedParameter, "__new__", _make_real(UninitializedParameter)),
        Patch(UninitializedBuffer, "__new__", _make_real(UninitializedBuffer)),
    ]


def _make_real(kind: Any) -> Callable[..., Any]:
    """The constructor of a lazy class, which makes a real and empty tensor on the CPU."""
    make = kind.__new__

    def make_real(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return compute(make, *args, **kwargs)

    return make_real


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply` for fake parameters, which PyTorch cannot swap; tied parameters stay tied."""
    if recurse:
        for child in module.children():
            child._apply(fn)
    _convert_tensors(module._parameters, fn)
    _convert_tensors(module._buffers, fn)
    return module


def _convert_tensors(tensors: dict[str, Any], fn: Callable[[Tensor], Tensor]) -> None:
    """Convert the parameters or buffers of one module, by name, in place."""
    for name, old in tensors.items():
        if old is None:
            continue
        if is_lazy(old):
            tensors[name] = _convert_lazy(old, fn)
            continue
        with torch.no_grad():
            new: Any = fn(old)
        if new is old:
            continue
        if not isinstance(old, nn.Parameter):
            tensors[name] = new
        elif isinstance(old, FakeTensor):
            changed: Any = old
            changed.data = new
            changed.constant = None
        else:
            tensors[name] = nn.Parameter(new, old.requires_grad)


def _convert_lazy(lazy: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A lazy tensor of the data type that a conversion gives."""
    with torch.no_grad():
        converted = fn(torch.empty(0, dtype=lazy.dtype))
    return type(lazy)(lazy.requires_grad, dtype=converted.dtype)


def _patch_storages(recorder: Any) -> list[Patch]:
    """Sizes of storages, which FSDP changes to free and to gather weights."""
    resize_storage = torch.UntypedStorage.resize_

    def resize(storage: Any, nbytes: int) -> Any:
        recorder.values.storages.resize(storage, nbytes)
        return resize_storage(storage, nbytes)

    # If FSDP resizes in another way, gathered weights count as memory for the whole step.
    return [Patch(torch.UntypedStorage, "resize_", resize)]


def _patch_default_device(recorder: Any) -> list[Patch]:
    """The device of tensors that name none."""
    set_device = torch.set_default_device

    def set_default_device(device: Any) -> None:
        """Set the default device; on a GPU, tensors without a device are placed there."""
        recorder.places.choose_default(device)
        set_device(None if device is None else "cpu")

    # PyTorch would look for a GPU that is not there.
    return [Patch(torch, "set_default_device", set_default_device)]


# -- optimizers
# -----------------------------------------------------------------------------------------------------


def _patch_optimizers(recorder: Any) -> list[Patch]:
    """Lists of types and devices for which optimizers work on lists of tensors.

    If PyTorch decides in another way, optimizers on a GPU update each tensor by itself, and the
    graph has far too many kernels.
    """
    types = [*optimizer._foreach_supported_types, FakeTensor]
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices()]
    if recorder.accelerator:
        devices.append("cpu")

    def list_devices() -> list[str]:
        return devices

    patches = []
    # the modules have names of their own for the same two objects
    for owner in (_foreach_utils, optimizer):
        patches.append(Patch(owner, "_foreach_supported_types", types))
        patches.append(Patch(owner, "_get_foreach_kernels_supported_devices", list_devices))
    return patches


def _list_capturable_devices(supports_xla: bool = True) -> list[str]:
    """Devices whose optimizers keep their counters there; PyTorch may compile this function to
    TorchScript."""
    return ["cpu"]


# -- the GPU
# --------------------------------------------------------------------------------------------------------


def _patch_gpu(recorder: Any) -> list[Patch]:
    """What makes tensors, streams, optimizers and replicas act as on a GPU that is not there."""

    def get_device(tensor: FakeTensor) -> Any:
        return recorder.places.answer(tensor)

    # A step that asks for the device of a tensor would see the CPU.
    patches = [Patch(FakeTensor, "device", property(get_device))]
    # FSDP and steps overlap work by streams, which need a GPU.
    for module in (torch.cpu, torch.cuda):
        for name, replacement in recorder.exchanges.list_streams().items():
            patches.append(Patch(module, name, replacement))
    # Each optimizer imports this function by name. If it has another name, optimizers with
    # capturable=True raise an error.
    name = "_get_capturable_supported_devices"
    for module in [*sys.modules.values()]:
        if name in getattr(module, "__dict__", ()):
            patches.append(Patch(module, name, _list_capturable_devices))
    build = distributed.DistributedDataParallel.__init__

    def build_replica(
        replica: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Build a replica without its devices, which have no such numbers here."""
        build(replica, module, None, None, *args, **kwargs)

    # It refuses numbers of GPUs for a module whose tensors are stored on the CPU.
    patches.append(Patch(distributed.DistributedDataParallel, "__init__", build_replica))
    return patches


# -- other threads, processes and programs
# --------------------------------------------------------------------------


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


def _patch_programs(recorder: Any) -> list[Patch]:
    """Patches that notice threads, processes and programs that the step starts."""
    capturing_thread = threading.get_ident()
    start_thread = threading.Thread.start
    open_program = subprocess.Popen.__init__
    report_failure = threading.excepthook

    def start(thread: Any) -> None:
        if threading.get_ident() == capturing_thread:
            run = thread.run
            line = find_line_of_program()

            def run_and_watch() -> None:
                with _WatchThread(recorder, line):
                    run()

            thread.run = run_and_watch
        start_thread(thread)

    def start_program(program: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == capturing_thread and recorder.trail.called:
            recorder.values.notes[OTHER_PROGRAM.format(find_line_of_program())] = None
        open_program(program, *args, **kwargs)

    def report_other_failures(failure: Any) -> None:
        # the capture itself is refused for this one
        if str(failure.exc_value) != recorder.lost:
            report_failure(failure)

    def refuse_process(*_: Any) -> None:
        refuse(PROCESSES)

    return [
        # Work of other threads, processes and programs would be left out without a word.
        Patch(threading.Thread, "start", start),
        Patch(threading, "excepthook", report_other_failures),
        Patch(subprocess.Popen, "__init__", start_program),
        Patch(BaseProcess, "start", refuse_process),
        # Libraries replace it; afterwards it is as before.
        Patch(sys, "excepthook", sys.excepthook),
    ]


def load_batches(loader: Any) -> Iterator[Any]:
    """Real batches of a data loader, made in this process without its workers."""
    without_workers = copy.copy(loader)
    # the loader itself refuses new values of some of these
    attributes = vars(without_workers)
    attributes["num_workers"] = 0
    attributes["timeout"] = 0
    attributes["pin_memory"] = False
    iterator = compute(without_workers._get_iterator)
    while True:
        batch = compute(next, iterator, None)
        if batch is None:
            return
        yield batch


# -- ranks that do not exist
# ----------------------------------------------------------------------------------------


def _patch_process_groups(recorder: Any) -> list[Patch]:
    """What asks other ranks, and what shows when a step waits for them."""
    private: Any = torch._C._distributed_c10d
    wait_for = private.Work.wait
    rebuild = private.Reducer._rebuild_buckets

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.exchanges.wait(work)
        return wait_for(work, *args, **kwargs)

    def rebuild_buckets(reducer: Any) -> Any:
        with patch.object(recorder, "agreeing", True):
            return rebuild(reducer)

    def ask_nobody(*_: Any, **__: Any) -> None:
        return None

    return [
        # Ranks of a mesh are numbers that must be known, and its tensors are on the CPU. Otherwise
        # sharded steps are refused, as they need values.
        Patch(DeviceMesh, "__init__", _make_mesh(DeviceMesh.__init__)),
        # If PyTorch waits in another way, collectives seem to end with the step.
        Patch(private.Work, "wait", wait),
        # Ranks agree on sizes of buckets and read them. If another method does it, the graph has
        # a collective that belongs to the first iteration alone.
        Patch(private.Reducer, "_rebuild_buckets", rebuild_buckets),
        # DistributedDataParallel compares and copies weights when it is made, as no iteration does.
        Patch(distributed, "_verify_param_shape_across_processes", ask_nobody),
        Patch(distributed, "_sync_module_states", ask_nobody),
    ]


def _make_mesh(make: Callable[..., Any]) -> Callable[..., None]:
    """The constructor of a mesh of known ranks, whose tensors are real and on the CPU."""

    def get_known(argument: Any) -> Any:
        return getattr(argument, "constant", argument)

    def make_mesh(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        known_args = [get_known(argument) for argument in args]
        known_kwargs = {name: get_known(argument) for name, argument in kwargs.items()}
        compute(make, mesh, "cpu", *known_args, **known_kwargs)

    return make_mesh


def _forget_meshes() -> None:
    """Empty a cache of PyTorch whose keys are meshes: an equal mesh of a capture has other process
    groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug

        # its keys are meshes
        propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        # PyTorch 2.9
        clear = getattr(debug, "_clear_sharding_prop_cache", None) or propagate.cache.cache_clear
        clear()


@contextmanager
def fake_ranks(ranks: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist, in place of a real one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    groups: Any = dist.distributed_c10d
    before = groups._world
    world = SimpleNamespace(
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
    groups._world = world
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
        groups._world = before
        groups._update_default_pg(before.default_pg)


def end_group() -> None:
    """End a process group that the step began and left."""
    if dist.is_initialized():
        dist.destroy_process_group()
