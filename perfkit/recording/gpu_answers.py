"""What programs ask of a GPU, and what they are told of one that is not there."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perfkit.recording.patches import Patch
from perfkit.recording.places import Gpu, Places, is_number
from perfkit.recording.refusals import LIBRARIES
from perfkit.recording.values import compute

#: The generator of PyTorch, of which it knows one for the CPU alone.
_GENERATOR = torch.Generator
#: Multiprocessors of an A100, which a program is told of every GPU [-]. NVIDIA A100 Tensor Core GPU
#: Architecture whitepaper, table 1.
_MULTIPROCESSORS = 108
#: Second-level cache of an A100 [B]; the same table.
_CACHE = 40 * 2**20


def count_gpus(gpu: Gpu, ranks: int) -> int:
    """GPUs that one node has for a number of ranks [-]."""
    return min(ranks, gpu.per_node)


def is_called_by_user(frame: Any) -> bool:
    """Whether a call comes from code of the user, and not from an installed package."""
    name = frame.f_code.co_filename
    return "site-packages" not in name and not name.startswith(LIBRARIES)


def _is_told(frame: Any, places: Places) -> bool:
    """Whether a caller is told of the GPU. Packages are only by `places.tells_packages`: they would
    remember that there is one."""
    if places.tells_packages:
        return not frame.f_code.co_filename.startswith(LIBRARIES)
    return is_called_by_user(frame)


def _answer(real: Any, value: Any, places: Places) -> Callable[..., Any]:
    """A function that answers a program with a value, and PyTorch as before."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        if _is_told(sys._getframe(1), places):
            return value
        return real(*args, **kwargs)

    return asked


# -- what there is
# ---------------------------------------------------------------------------------------------------------


def _patch_facts(places: Places) -> list[Patch]:
    """Answers to what programs ask of a GPU before they use one."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    gpu = places.gpu
    count = count_gpus(gpu, ranks)
    major, minor = gpu.capability
    memory = int(gpu.memory)
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=memory,
        multi_processor_count=_MULTIPROCESSORS,
        L2_cache_size=_CACHE,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    answers = [
        (torch.cuda, "is_available", True),
        (torch.cuda, "device_count", count),
        (torch.cuda, "is_initialized", True),
        (torch.cuda, "get_device_name", gpu.name),
        (torch.cuda, "get_device_capability", gpu.capability),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_arch_list", [f"sm_{major}{minor}"]),
        (torch.cuda, "can_device_access_peer", True),
        (torch.cuda, "is_current_stream_capturing", False),
        (torch.accelerator, "is_available", True),
        (torch.accelerator, "device_count", count),
        (torch.accelerator, "current_accelerator", torch.device("cuda")),
        (torch.backends.cuda, "is_built", True),
        (dist, "is_nccl_available", True),
    ]
    reason = "scripts find no GPU, and take another way"
    patches = []
    for owner, name, value in answers:
        # a version without this function has nothing to ask
        asked = _answer(getattr(owner, name, None), value, places)
        patches.append(Patch(owner, name, asked, reason))
    return patches


# -- memory, drivers and settings
# ---------------------------------------------------------------------------------------------------------

#: Functions of `torch.cuda` that change or wait for something in a driver, which is not there.
_WITHOUT_EFFECT = (
    "init",
    "ipc_collect",
    "set_per_process_memory_fraction",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
)
#: The same of `torch.cuda.memory` and of `torch.accelerator`.
_WITHOUT_EFFECT_ON_MEMORY = ("_record_memory_history", "_dump_snapshot")
_WITHOUT_EFFECT_ON_ACCELERATORS = (
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
)
#: Functions of `torch.cuda` and `torch.accelerator` that count bytes in use.
_BYTES_IN_USE = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)
#: Functions of `torch.cuda` that read a sensor.
_SENSORS = ("utilization", "temperature", "power_draw", "clock_rate")


def _patch_driver(places: Places) -> list[Patch]:
    """Questions and settings that need a driver. A program that watches its memory sees that
    nothing is in use; that it has asked is noted."""

    def do_nothing(*_: Any, **__: Any) -> None:
        return None

    def read_nothing(name: str) -> Any:
        def read(*_: Any, **__: Any) -> int:
            places.readings.add(name)
            return 0

        return read

    def get_free(*_: Any, **__: Any) -> tuple[int, int]:
        places.readings.add("mem_get_info")
        memory = int(places.gpu.memory)
        return memory, memory

    def get_no_snapshot(*_: Any, **__: Any) -> list[Any]:
        return []

    def get_stream(device: Any = None) -> Any:
        return torch.cuda.current_stream()

    def choose_stream(stream: Any) -> None:
        torch.cuda.set_stream(stream)

    def get_no_text(*_: Any, **__: Any) -> str:
        return ""

    reason = "steps that watch their memory or set up their GPU look for one that is not there"
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "mem_get_info", get_free),
        (torch.cuda, "memory_snapshot", get_no_snapshot),
        (torch.cuda, "memory_summary", get_no_text),
        (Tensor, "record_stream", do_nothing),
        (torch.accelerator, "current_stream", get_stream),
        (torch.accelerator, "set_stream", choose_stream),
    ]
    changes += [(torch.cuda, name, do_nothing) for name in _WITHOUT_EFFECT]
    changes += [(torch.cuda.memory, name, do_nothing) for name in _WITHOUT_EFFECT_ON_MEMORY]
    changes += [(torch.cuda.profiler, name, do_nothing) for name in ("start", "stop")]
    accelerator = torch.accelerator
    changes += [(accelerator, name, do_nothing) for name in _WITHOUT_EFFECT_ON_ACCELERATORS]
    changes += [(torch.cuda, name, read_nothing(name)) for name in (*_BYTES_IN_USE, *_SENSORS)]
    changes += [(accelerator, name, read_nothing(name)) for name in _BYTES_IN_USE]
    there = [change for change in changes if hasattr(change[0], change[1])]  # PyTorch 2.9 has fewer
    return [Patch(owner, name, value, reason) for owner, name, value in there]


# -- random numbers
# ---------------------------------------------------------------------------------------------------------


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """The type of generators in a capture; those that were made before it are of this type too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class _GpuGenerator(torch.Generator, metaclass=_AnyGenerator):
    """What `torch.Generator` is in a capture for a GPU: it draws on the CPU."""

    named: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator for a device."""
        made: Any = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.named = torch.device("cuda", device) if is_number(device) else torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it was made for."""
        return self.named

    def set_state(self, new_state: Any) -> Any:
        """Set the state; one that is not known, as of another rank, changes nothing."""
        known = getattr(new_state, "constant", new_state)
        return self if known is None else compute(super().set_state, known)


def _patch_random_states() -> list[Patch]:
    """Functions of `torch.cuda` for the state of its random numbers, which are drawn on the
    CPU."""

    def get_rng_state(*_: Any, **__: Any) -> Tensor:
        state: Tensor = compute(torch.get_rng_state)
        return state

    set_here = torch.set_rng_state

    def set_rng_state(new_state: Any, *_: Any, **__: Any) -> None:
        known = getattr(new_state, "constant", new_state)
        if known is not None:
            compute(set_here, known)

    def get_rng_state_all() -> list[Tensor]:
        return [get_rng_state()]

    def set_rng_state_all(new_states: Any) -> None:
        for state in new_states:
            set_rng_state(state)

    reason = "states of random numbers that another rank has sent are not known"
    patches = [
        Patch(owner, "set_rng_state", set_rng_state, reason) for owner in (torch, torch.random)
    ]
    replacements = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "set_rng_state_all": set_rng_state_all,
        "initial_seed": torch.initial_seed,
    }
    reason = "steps that keep the state of random numbers look for a GPU that is not there"
    for owner in (torch.cuda, torch.cuda.random):
        patches += [Patch(owner, name, value, reason) for name, value in replacements.items()]
    return patches


def _patch_current_gpu(places: Places) -> list[Patch]:
    """Number of the current GPU, and what else PyTorch would ask of a driver."""

    def get_current() -> int:
        return places.current

    def choose(device: Any = None) -> int:
        """Change the current GPU; the number of the one before."""
        before = places.current
        number = device
        if isinstance(device, str | torch.device):
            number = torch.device(device).index
        names_one = number is not None and number >= 0
        if names_one:
            places.current = number
        return before

    get_default = torch.get_default_device

    def get_default_device() -> torch.device:
        """The default device, as the program has chosen it."""
        if places.placing and not sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
            return places.find_gpu()
        return get_default()

    reason = "steps that choose a GPU look for one that is not there"
    return [
        Patch(torch.cuda, "current_device", get_current, reason),
        Patch(torch.cuda, "set_device", choose, reason),
        Patch(torch.cuda, "_exchange_device", choose, reason),
        Patch(torch.cuda, "_maybe_exchange_device", choose, reason),
        Patch(torch.accelerator, "current_device_index", get_current, reason),
        Patch(torch.accelerator, "current_device_idx", get_current, reason),
        Patch(torch.accelerator, "set_device_index", choose, reason),
        Patch(torch.accelerator, "set_device_idx", choose, reason),
        Patch(torch, "get_default_device", get_default_device, reason),
        Patch(
            torch,
            "Generator",
            _GpuGenerator,
            reason="a generator of random numbers on a GPU cannot be made",
        ),
    ]


def list_patches(places: Places) -> list[Patch]:
    """Patches by which programs find a GPU, and are answered.

    Parameters
    ----------
    places : Places
        Knows the GPU, and which one of several the program has chosen.
    """
    return [
        *_patch_facts(places),
        *_patch_driver(places),
        *_patch_random_states(),
        *_patch_current_gpu(places),
    ]
