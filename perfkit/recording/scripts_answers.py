"""What a whole script asks besides its step: its ranks, other processes, objects of other ranks,
files of weights."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._subclasses.fake_tensor import FakeTensor

from perfkit.recording.gpu_answers import count_gpus
from perfkit.recording.patches import Patch, apply_patches
from perfkit.recording.places import find_storing_device
from perfkit.recording.refusals import (
    GROUP_SIZE,
    LIBRARIES,
    UnknownArray,
    find_line_of_program,
)

#: What is said of files that hold tensors.
NOT_SAVED = "a file of weights is not written in {}: a capture computes no numbers, and an older file stays as it is"
#: What is said of objects that ranks send each other.
OBJECTS = "objects that ranks send each other by way of the host, as by all_gather_object, count as this rank's own, and take no time"
#: What is said of processes that a script starts for its ranks.
SPAWNED = "the script starts {0} processes in {1}, and the recording is for {2}; give ranks={0}, or let the script start {2}"
#: Attribute of a picture that was made of computed numbers.
_UNKNOWN = "_is_unknown_to_perfkit"
#: Where a rank looks for the first one.
_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


class Writer(NamedTuple):
    """A function that writes tensors into a file.

    Parameters
    ----------
    module, name : str
        Where it is.
    position : int
        Which of its arguments are the data [-].
    """

    module: str
    name: str
    position: int


_WRITERS = (
    Writer("torch", "save", 0),
    Writer("torch.distributed.checkpoint", "save", 0),
    Writer("torch.distributed.checkpoint", "async_save", 0),
    Writer("safetensors.torch", "save_file", 0),
    Writer("safetensors.torch", "save_model", 0),
    Writer("numpy", "save", 1),
)


@contextmanager
def answer_scripts(recorder: Any, ranks: int, rank: int) -> Iterator[None]:
    """Let a script find its ranks and its files.

    Parameters
    ----------
    recorder : Recorder
        Receives notes, and knows the GPU.
    ranks, rank : int
        Number of ranks, and this rank [-].
    """
    note = recorder.values.notes.setdefault
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(patch.dict(os.environ, _name_ranks(recorder, ranks, rank)))
        else:
            stack.enter_context(patch.dict(os.environ))
        stack.enter_context(apply_patches(list_patches(recorder, ranks, rank), note))
        yield


@contextmanager
def answer_steps(recorder: Any) -> Iterator[None]:
    """Let a step that is captured alone find objects of other ranks and its files.

    Parameters
    ----------
    recorder : Recorder
        Receives notes.
    """
    patches = [*_patch_objects(recorder), *_patch_files(recorder, ranks=1)]
    with apply_patches(patches, recorder.values.notes.setdefault):
        yield


def _name_ranks(recorder: Any, ranks: int, rank: int) -> dict[str, str]:
    """Variables of the environment that torchrun and srun set."""
    local = count_gpus(recorder.places.gpu, ranks)
    return {
        **_ADDRESS,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "TORCHELASTIC_RUN_ID": "perfkit",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(ranks),
        "SLURM_LOCALID": str(rank % local),
        "SLURM_NODEID": str(rank // local),
    }


def list_patches(recorder: Any, ranks: int, rank: int) -> list[Patch]:
    """Patches of a script by this recorder; see `answer_scripts` for the arguments."""
    return [
        *_patch_groups(recorder, ranks, rank),
        *_patch_objects(recorder),
        *_patch_processes(ranks, rank),
        *_patch_files(recorder, ranks),
    ]


# -- ranks
# ---------------------------------------------------------------------------------------------------------


def _patch_groups(recorder: Any, ranks: int, rank: int) -> list[Patch]:
    """The process group of a script, which begins and ends it."""
    real, get_backend = dist.init_process_group, dist.get_backend

    def begin(*args: Any, **kwargs: Any) -> None:
        """Begin the group of all ranks, unless it is there."""
        size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
        if size not in (ranks, -1):
            raise ValueError(GROUP_SIZE.format(size, ranks))
        if not dist.is_initialized():
            from torch.testing._internal.distributed.fake_pg import FakeStore

            real("fake", rank=rank, world_size=ranks, store=FakeStore(), group_name="perfkit")

    def end(group: Any = None) -> None:
        """The group ends with the recording."""

    def name_backend(*args: Any, **kwargs: Any) -> Any:
        """Name of the library that a program would use; PyTorch itself is told the truth."""
        if sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
            return get_backend(*args, **kwargs)
        return "nccl" if recorder.accelerator else "gloo"

    reason = "a script begins its process group a second time, or ends it before the recording"
    return [
        Patch(dist, "init_process_group", begin, reason),
        Patch(dist, "destroy_process_group", end, reason),
        Patch(dist, "get_backend", name_backend, reason),
    ]


def _patch_objects(recorder: Any) -> list[Patch]:
    """Exchanges of Python objects, which are answered with those of this rank."""

    def note() -> None:
        recorder.values.notes[OBJECTS] = None

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        note()
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
        note()
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(object_list: Any, *args: Any, **kwargs: Any) -> None:
        note()

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        note()
        if scatter_object_input_list:
            rank = dist.get_rank() % len(scatter_object_input_list)
            scatter_object_output_list[0] = scatter_object_input_list[rank]

    reason = "objects of other ranks are numbers that are not known"
    made = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list)
    return [Patch(dist, each.__name__, each, reason) for each in made]


def _patch_processes(ranks: int, rank: int) -> list[Patch]:
    """Processes that a script starts for its ranks, of which one runs here."""

    def spawn(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        """Run one of the processes here."""
        if nprocs != ranks:
            raise ValueError(SPAWNED.format(nprocs, find_line_of_program(), ranks))
        fn(rank, *args)

    reason = "a script starts processes, which a capture does not follow"
    return [Patch(torch.multiprocessing, "spawn", spawn, reason)]


# -- files
# ---------------------------------------------------------------------------------------------------------


def _holds_no_numbers(tree: Any, depth: int = 8) -> bool:
    """Whether a tree of values has a tensor that was not computed."""
    if isinstance(tree, FakeTensor | UnknownArray):
        return True
    held = getattr(tree, "_local_tensor", None)  # a shard
    if held is not None:
        return _holds_no_numbers(held, depth - 1)
    if not depth:
        return False
    if isinstance(tree, torch.nn.Module):
        return any(_holds_no_numbers(each) for each in tree.state_dict().values())
    if isinstance(tree, Mapping):
        return any(_holds_no_numbers(each, depth - 1) for each in tree.values())
    if isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        return any(_holds_no_numbers(each, depth - 1) for each in tree)
    return False


def _patch_files(recorder: Any, ranks: int) -> list[Patch]:
    """Files of weights: such a file is not written, and is read to where tensors are stored."""
    patches = []
    for writer in _WRITERS:
        # the script may import it later, and packages that are not installed write nothing
        if find_spec(writer.module.partition(".")[0]) is None:
            continue
        is_loaded = writer.module in sys.modules  # to import it takes a second or two
        if writer.module == "torch.distributed.checkpoint" and ranks == 1 and not is_loaded:
            continue
        owner = import_module(writer.module)
        write = _watch_writer(recorder, getattr(owner, writer.name), writer.position)
        reason = "a script replaces its file of weights by one without numbers"
        patches.append(Patch(owner, writer.name, write, reason))
    patches += _patch_pictures(recorder)
    load, find_address = torch.load, torch.UntypedStorage.data_ptr

    def get_address(storage: Any) -> int:
        """The address of a storage, or a number of its own in place of it."""
        try:
            return find_address(storage)
        except RuntimeError:  # it has no contents
            return int(storage._cdata)

    def load_here(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Read a file of weights, whichever GPU they were on."""
        here = find_storing_device(map_location or "cpu", sys._getframe(1))
        return load(f, here, *args, **kwargs)

    return [
        *patches,
        Patch(
            torch,
            "load",
            load_here,
            reason="files of weights on a GPU cannot be read where there is none",
        ),
        Patch(
            torch.UntypedStorage,
            "data_ptr",
            get_address,
            reason="what finds weights that share memory before it saves them raises an error",
        ),
    ]


def _patch_pictures(recorder: Any) -> list[Patch]:
    """Pictures of computed numbers, as torchvision saves them by the package PIL."""
    if find_spec("PIL") is None:
        return []
    pictures: Any = import_module("PIL.Image")
    make, write = pictures.fromarray, pictures.Image.save

    def fromarray(obj: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(obj, *args, **kwargs)
        if isinstance(obj, UnknownArray):
            vars(made)[_UNKNOWN] = True
        return made

    def save(picture: Any, *args: Any, **kwargs: Any) -> None:
        if _UNKNOWN in vars(picture):
            recorder.values.notes[NOT_SAVED.format(find_line_of_program())] = None
        else:
            write(picture, *args, **kwargs)

    reason = "a script replaces its pictures by ones of zeros"
    return [
        Patch(pictures, "fromarray", fromarray, reason),
        Patch(pictures.Image, "save", save, reason),
    ]


def _watch_writer(recorder: Any, write: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A function that writes a file, unless that would hold what was not computed."""

    def write_known(*args: Any, **kwargs: Any) -> Any:
        data = args[position] if len(args) > position else kwargs
        if _holds_no_numbers(data):
            recorder.values.notes[NOT_SAVED.format(find_line_of_program())] = None
            return None
        return write(*args, **kwargs)

    return write_known
