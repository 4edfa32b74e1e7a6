"""Temporary changes of PyTorch, Python and the data loader that a capture needs.

A `Patch` says what it replaces, why, and with which versions of PyTorch it was checked. If a version
lacks what a patch replaces, the capture goes on without it and says so; where the replacement calls
the original, such as that of ``Work.wait``, the capture ends with Python's AttributeError, which
names what is missing. With a new version run
`tests/test_patches.py` first: it names each part that has gone or takes other arguments. Captures
of `fully_shard` and of split tensors differ with 2.9.1 from those with 2.13.0 and 2.14.1.

Captures also use private parts that they do not replace:

===========================================  ==============================================================
part of PyTorch                              what for
===========================================  ==============================================================
torch._subclasses.fake_tensor                tensors without values
DataLoader._get_iterator                     batches are real and made in this process
distributed_c10d._world                      ranks that do not exist, in place of real ones
torch.testing._internal...fake_pg            the store and the process group of these ranks
_clear_sharding_prop_cache                   its keys are meshes, and old and new ones are equal
TorchDispatchMode._should_skip_dynamo        PyTorch need not disable its compiler at each call
Tensor._make_subclass                        makes fake tensors without the checks of their constructor
fsdp: the file _fsdp_param.py                whether FSDP moves weights to the host
fp32_precision, float32_matmul_precision     number formats of products, restored after a capture
AutocastPrivateUse1, _DisableAutocast        autocast as on a GPU, see `precision.pretend_gpu`
_dispatch_get_registrations, key guards      the operations that CUDA autocast changes
library._scoped_library                      kernels of autocast
_cur_sdpa_kernel_backends                    attention kernels that the step allows
===========================================  ==============================================================
"""

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, _meta_registrations, nn
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias
from torch.nn.parallel import distributed
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from perfkit.recording.fakes import Fakes, make_keyless
from perfkit.recording.refusals import (
    GROUP_SIZE,
    OTHER_PROGRAM,
    OTHER_THREADS,
    PROCESSES,
    SHARED_WITH_THREADS,
    find_line_of_program,
    refuse,
)
from perfkit.recording.scripts_data import make_real
from perfkit.recording.values import compute, is_small
from perfkit.workloads.vocabulary import walk_tensors


class Versions(NamedTuple):
    """A range of versions of PyTorch.

    Parameters
    ----------
    first, last : tuple of int
        Major and minor number of the oldest and of the newest version.
    """

    first: tuple[int, int]
    last: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.first[0]}.{self.first[1]} to {self.last[0]}.{self.last[1]}"


#: Versions that have what patches replace, with the same arguments: compared in the sources of
#: 2.9.1, 2.13.0 and 2.14.1.
CHECKED = Versions((2, 9), (2, 14))
#: What is said of a part that this version of PyTorch lacks.
GONE = (
    "PyTorch {version} has no {part}, which a capture replaces: {reason}; install a version from {versions}, with which "
    "this was checked"
)


class Patch(NamedTuple):
    """One attribute of a class or module that is another one during a capture.

    Parameters
    ----------
    owner : type or module
        What has the attribute.
    name : str
        Name of the attribute.
    replacement : object
        Its value during the capture.
    reason : str
        What happens without the patch.
    added : bool
        Whether PyTorch has no such attribute.
    versions : Versions
        Versions of PyTorch with which it was checked.
    """

    owner: Any
    name: str
    replacement: Any
    reason: str
    added: bool = False
    versions: Versions = CHECKED

    @property
    def path(self) -> str:
        """Full name of what is replaced."""
        owner = self.owner.__name__
        if isinstance(self.owner, type):
            owner = f"{self.owner.__module__}.{self.owner.__qualname__}"
        return f"{owner}.{self.name}"


@contextmanager
def apply_patches(patches: Sequence[Patch], note: Callable[[str], Any]) -> Iterator[None]:
    """Replace attributes, and restore them afterwards.

    Parameters
    ----------
    patches : sequence of Patch
        What to replace, in this order.
    note : callable
        Receives what is said of attributes that this version of PyTorch lacks.
    """
    with ExitStack() as stack:
        for each in patches:
            if not each.added and not hasattr(each.owner, each.name):
                note(
                    GONE.format(
                        version=torch.__version__,
                        part=each.path,
                        reason=each.reason,
                        versions=each.versions,
                    )
                )
                continue
            change = patch.object(each.owner, each.name, each.replacement, create=each.added)
            stack.enter_context(change)
        yield


def list_patches(recorder: Any) -> list[Patch]:
    """Patches of a capture by this recorder. Those that autocast and questions about a GPU need are
    in `perfkit.recording.precision`, those of hooks and compilers in `perfkit.recording.steps`."""
    patches = [
        *_patch_fake_tensors(),
        *_patch_modules(),
        *_patch_attention(),
        *_patch_compilers(),
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

    def may_turn_const(_: Any, t: Any) -> bool:
        return is_small(t)

    make_new = FakeTensor.__new__

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """A fake tensor, or a parameter of one, as of `type(parameter)(parameter.to("meta"))`."""
        first = args[0] if args else None
        if not isinstance(first, FakeTensor):
            if cls is FakeTensor and isinstance(first, Fakes):
                return make_keyless(make_new, *args, **kwargs)
            return make_new(cls, *args, **kwargs)
        needs_gradient = bool(kwargs.get("requires_grad", first.requires_grad))
        if kwargs.get("_is_param", False):
            return torch.nn.Parameter(first, needs_gradient)
        return first.detach().requires_grad_(needs_gradient)

    grouped_product = partial(_take_any_format, _meta_registrations._meta_grouped_mm_common)
    return [
        Patch(
            FakeTensor,
            "data_ptr",
            get_no_address,
            reason="deep copies, of a model for example, ask for addresses and raise an error",
        ),
        Patch(
            FakeTensor,
            "__new__",
            make,
            reason="models that are loaded from a file cannot make their parameters on the meta device first",
        ),
        Patch(
            FakeTensorMode,
            "__deepcopy__",
            get_mode_itself,
            reason="a copy of a tensor copies its mode too, whose weak references cannot be copied",
            added=True,
        ),
        Patch(
            FakeTensorMode,
            "may_turn_const",
            may_turn_const,
            reason="PyTorch knows the values of single numbers only, so that steps that read masks and lengths are refused",
        ),
        Patch(
            _meta_registrations,
            "_meta_grouped_mm_common",
            grouped_product,
            reason="PyTorch's rule takes bf16 only, so that mixtures of experts in fp32 raise an error",
        ),
    ]


def _take_any_format(
    rule: Callable[..., Tensor], mat_a: Tensor, mat_b: Tensor, *more: Any, **named: Any
) -> Tensor:
    """Let grouped products take every number format: PyTorch's rule for fake tensors takes only
    bf16."""
    result = rule(mat_a.to(torch.bfloat16), mat_b.to(torch.bfloat16), *more, **named)
    return result.to(mat_a.dtype)


def _patch_modules() -> list[Patch]:
    """Construction and conversion of modules whose parameters are fake."""

    def skip_drawing(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    patches = [
        Patch(
            nn.Module,
            "_apply",
            _convert,
            reason="fake parameters cannot be swapped: model.half() and model.to(...) raise an error",
        ),
        Patch(
            nn.init,
            "_no_grad_trunc_normal_",
            skip_drawing,
            reason="it draws until all numbers are in range, so that it asks for values and is refused",
        ),
    ]
    for kind in (UninitializedParameter, UninitializedBuffer):
        patches.append(
            Patch(
                kind,
                "__new__",
                _make_real(kind),
                reason="a fake tensor cannot be of this class: lazy modules raise an error",
            )
        )
    return patches


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


def _patch_attention() -> list[Patch]:
    """Biases of attention that are tensors by name only."""

    def make_bias(*arguments: Any) -> Any:
        kind = arguments[0]
        return compute(lambda: Tensor._make_subclass(kind, torch.empty(0)))

    return [
        Patch(
            CausalBias,
            "__new__",
            make_bias,
            reason="a fake tensor cannot be of this class: causal biases raise an error",
        )
    ]


def _patch_compilers() -> list[Patch]:
    """Checks that a compiler has compiled."""

    def count_as_compiled(_: int) -> int:
        return 1

    name = "set_fullgraph_compiled_frame_count"
    if not hasattr(eval_frame, name):  # PyTorch 2.9 does not check
        return []
    reason = (
        "torch.compile with fullgraph=True raises an error, as nothing is compiled in a capture"
    )
    return [Patch(eval_frame, name, count_as_compiled, reason)]


def _patch_storages(recorder: Any) -> list[Patch]:
    """Sizes of storages, which FSDP changes to free and to gather weights."""
    resize_storage = torch.UntypedStorage.resize_

    def resize(storage: Any, nbytes: int) -> Any:
        recorder.values.storages.resize(storage, nbytes)
        return resize_storage(storage, nbytes)

    reason = "weights that FSDP gathers count as memory for the whole step"
    return [Patch(torch.UntypedStorage, "resize_", resize, reason)]


def _patch_default_device(recorder: Any) -> list[Patch]:
    """The device of tensors that name none."""
    set_device = torch.set_default_device

    def set_default_device(device: Any) -> None:
        """Set the default device; on a GPU, tensors without a device are placed there."""
        recorder.places.choose_default(device)
        set_device(None if device is None else "cpu")

    reason = "PyTorch looks for a GPU that is not there"
    return [Patch(torch, "set_default_device", set_default_device, reason)]


# -- optimizers
# -----------------------------------------------------------------------------------------------------


def _patch_optimizers(recorder: Any) -> list[Patch]:
    """Lists of types and devices for which optimizers work on lists of tensors."""
    types = [*optimizer._foreach_supported_types, FakeTensor]
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices()]
    if recorder.accelerator:
        devices.append("cpu")

    def list_devices() -> list[str]:
        return devices

    reason = (
        "optimizers on a GPU update each tensor by itself, and the graph has far too many kernels"
    )
    patches = []
    # the modules have names of their own for the same two objects
    for owner in (_foreach_utils, optimizer):
        patches.append(Patch(owner, "_foreach_supported_types", types, reason))
        patches.append(Patch(owner, "_get_foreach_kernels_supported_devices", list_devices, reason))
    return patches


def _list_capturable_devices(supports_xla: bool = True) -> list[str]:
    """Devices whose optimizers keep their counters there; PyTorch may compile this function to
    TorchScript."""
    return ["cpu"]


# -- the GPU
# --------------------------------------------------------------------------------------------------------


#: What `torch.cpu` has of the streams of `torch.cuda`.
_STREAMS_OF_CPU = frozenset(["Stream", "Event", "stream", "synchronize", "current_stream"])


def _patch_gpu(recorder: Any) -> list[Patch]:
    """What makes tensors, streams, optimizers and replicas act as on a GPU that is not there."""

    def get_device(tensor: FakeTensor) -> Any:
        return recorder.places.answer(tensor)

    patches = [
        Patch(
            FakeTensor,
            "device",
            property(get_device),
            reason="a step that asks for the device of a tensor sees the CPU",
        ),
        *_patch_streams(recorder),
    ]
    name = "_get_capturable_supported_devices"
    # each optimizer imports this function by name
    owners = {optimizer: None}
    for module in [*sys.modules.values()]:
        if name in getattr(module, "__dict__", ()):
            owners[module] = None
    for owner in owners:
        patches.append(
            Patch(
                owner,
                name,
                _list_capturable_devices,
                reason="optimizers with capturable=True raise an error",
            )
        )
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

    patches.append(
        Patch(
            distributed.DistributedDataParallel,
            "__init__",
            build_replica,
            reason="it refuses numbers of GPUs for a module whose tensors are stored on the CPU",
        )
    )
    return patches


def _patch_streams(recorder: Any) -> list[Patch]:
    """Streams, events and graphs of a GPU. FSDP takes those of `torch.cpu` for tensors on the
    CPU."""
    reason = "FSDP and steps that overlap work by streams look for a GPU that is not there"
    patches = []
    for name, replacement in recorder.exchanges.list_streams().items():
        patches.append(Patch(torch.cuda, name, replacement, reason))
        if name in _STREAMS_OF_CPU:
            patches.append(Patch(torch.cpu, name, replacement, reason))
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

    left_out = "its work is left out without a word"
    return [
        Patch(threading.Thread, "start", start, left_out),
        Patch(
            threading,
            "excepthook",
            report_other_failures,
            reason="a failure for which the capture is refused is also printed",
        ),
        Patch(subprocess.Popen, "__init__", start_program, left_out),
        Patch(BaseProcess, "start", refuse_process, left_out),
        Patch(
            sys,
            "excepthook",
            sys.excepthook,
            reason="what libraries put in its place during a capture stays there",
        ),
    ]


def load_batches(loader: Any, note: Callable[[str], Any]) -> Iterator[Any]:
    """Real batches of a data loader, made in this process without its workers.

    A data set that was made during the capture may hold tensors without contents. If it cannot make
    a batch of them, it gets real ones; `note` receives what is said of these.
    """
    without_workers = copy.copy(loader)
    # the loader itself refuses new values of some of these
    attributes = vars(without_workers)
    attributes["num_workers"] = 0
    attributes["timeout"] = 0
    attributes["pin_memory"] = False
    iterator = compute(without_workers._get_iterator)
    try:
        batch = compute(next, iterator, None)
    except Exception:
        if not make_real([loader.dataset, loader.collate_fn], note):
            raise
        iterator = compute(without_workers._get_iterator)
        batch = compute(next, iterator, None)
    while batch is not None:
        yield batch
        batch = compute(next, iterator, None)


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

    no_iteration = (
        "when DistributedDataParallel is made, it compares and copies weights, as no iteration does"
    )
    return [
        Patch(
            DeviceMesh,
            "__init__",
            _make_mesh(DeviceMesh.__init__),
            reason="ranks of a mesh are unknown numbers, so that sharded steps are refused",
        ),
        Patch(
            private.Work,
            "wait",
            wait,
            reason="collectives seem to end with the step, as nothing shows where it waits for them",
        ),
        Patch(
            private.Reducer,
            "_rebuild_buckets",
            rebuild_buckets,
            reason="the graph has a collective of bucket sizes, which belongs to the first iteration alone",
        ),
        Patch(distributed, "_verify_param_shape_across_processes", ask_nobody, no_iteration),
        Patch(distributed, "_sync_module_states", ask_nobody, no_iteration),
    ]


def _make_mesh(make: Callable[..., Any]) -> Callable[..., None]:
    """The constructor of a mesh of known ranks, whose tensors are real and on the CPU."""

    def get_known(argument: Any) -> Any:
        return getattr(argument, "constant", argument)

    def make_mesh(made: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        known_args = [get_known(argument) for argument in args]
        known_kwargs = {name: get_known(argument) for name, argument in kwargs.items()}
        compute(make, made, "cpu", *known_args, **known_kwargs)

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
