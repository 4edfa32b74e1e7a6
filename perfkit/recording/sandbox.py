"""A sandbox in which a training step runs without computing.

What it changes in PyTorch for the time of a capture is in `perfkit.recording.patches`.
"""

import gc
import logging
import random
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from perfkit.recording.fakes import Fakes, Left
from perfkit.recording.patches import Patch, apply_patches, end_group, fake_ranks, list_patches
from perfkit.recording.refusals import VALUE_ERRORS, explain, refuse

_FAKE_LOGGER = "torch._subclasses.fake_tensor"
#: Held during a capture, whose patches affect the whole process.
_ALONE = threading.RLock()
#: Errors that PyTorch raises where it meets a fake tensor, or where it needs a GPU.
_EXPLAINED = (
    *VALUE_ERRORS,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    AttributeError,
    IndexError,
)


def find_alive(*types: type) -> list[Any]:
    """All living objects of these types, except lazy parameters and modules whose constructor still
    runs."""
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, types)}
    alive = (o for o in objects if type(o) in wanted and not is_lazy(o))
    return [o for o in alive if not isinstance(o, nn.Module) or "_modules" in vars(o)]


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


# -- settings
# -------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A setting of PyTorch, or the state of a random generator.

    Parameters
    ----------
    read : callable
        Returns its present value.
    write : callable
        Sets it to a value.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def list_generators() -> list[Setting]:
    """States of the random generators of PyTorch, Python and NumPy."""
    return [
        Setting(torch.get_rng_state, torch.set_rng_state),
        Setting(random.getstate, random.setstate),
        Setting(np.random.get_state, np.random.set_state),
    ]


def _list_settings() -> list[Setting]:
    """Settings of PyTorch that a step or a model may change. Number formats of products have
    settings under two names."""
    private: Any = torch._C
    return [
        Setting(torch.get_default_dtype, torch.set_default_dtype),
        Setting(torch.is_grad_enabled, torch.set_grad_enabled),
        Setting(private._get_float32_matmul_precision, private._set_float32_matmul_precision),
        Setting(private._get_cudnn_allow_tf32, private._set_cudnn_allow_tf32),
        Setting(private._get_cudnn_enabled, private._set_cudnn_enabled),
        Setting(private._get_mkldnn_enabled, private._set_mkldnn_enabled),
        Setting(private._get_cudnn_benchmark, private._set_cudnn_benchmark),
        Setting(private._get_cudnn_deterministic, private._set_cudnn_deterministic),
        Setting(private._get_flash_sdp_enabled, private._set_sdp_use_flash),
        Setting(private._get_math_sdp_enabled, private._set_sdp_use_math),
        Setting(private._get_mem_efficient_sdp_enabled, private._set_sdp_use_mem_efficient),
        Setting(private._get_cudnn_sdp_enabled, private._set_sdp_use_cudnn),
        Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        Setting(torch.get_num_threads, torch.set_num_threads),
        Setting(private._is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
        # the first use of the compiler switches these checks off
        Setting(_is_validating, Distribution.set_default_validate_args),
        Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        *_list_autocast_settings(),
        *_list_number_formats(),
    ]


def _list_autocast_settings() -> list[Setting]:
    """Whether autocast is on for each kind of device, and its data type."""
    settings = []
    for kind in ("cpu", "cuda"):
        settings += [
            Setting(
                partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
            ),
            Setting(
                partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
            ),
        ]
    return settings


def _is_validating() -> bool:
    """Whether distributions check their parameters."""
    return Distribution._validate_args


def _list_number_formats() -> list[Setting]:
    """Number formats of the products of each backend, and of all backends."""
    get: Callable[[str, str], Any] = torch._C._get_fp32_precision_getter
    set_format: Callable[[str, str, Any], Any] = torch._C._set_fp32_precision_setter
    formats = [Setting(partial(get, "generic", "all"), partial(set_format, "generic", "all"))]
    for backend in ("cuda", "mkldnn"):
        for operation in ("all", "matmul", "conv", "rnn"):
            read = partial(get, backend, operation)
            write = partial(set_format, backend, operation)
            formats.append(Setting(read, write))
    return formats


@contextmanager
def _keep_settings() -> Iterator[None]:
    """Restore random numbers and settings of PyTorch."""
    generators = [(generator, generator.read()) for generator in list_generators()]
    settings = [(setting, _read(setting)) for setting in _list_settings()]
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # it may hold weights that are gone
        for generator, state in generators:
            generator.write(state)
        for setting, value in settings:
            if value is not None and _read(setting) != value:
                setting.write(value)


@contextmanager
def _keep_default_device() -> Iterator[None]:
    """Restore the device of tensors that name none. PyTorch keeps it below all modes that see its
    calls, also where a region of a device was never left."""
    modes, device = _get_current_function_mode_stack(), _device.CURRENT_DEVICE
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        _set_function_modes(modes)
        _device.CURRENT_DEVICE = device
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default


def _set_function_modes(modes: list[Any]) -> None:
    """Let these modes see calls of PyTorch, the innermost one last."""
    left = _get_current_function_mode_stack()
    if [*map(id, left)] == [*map(id, modes)]:
        return
    for _ in left:
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _read(setting: Setting) -> Any:
    """A setting; None if PyTorch refuses to read it, as its old and new names disagree."""
    with suppress(RuntimeError):
        return setting.read()


# -- objects that a step would change
# -------------------------------------------------------------------------------


class _TensorState(NamedTuple):
    """Gradient and version of a tensor before the capture."""

    tensor: Tensor
    gradient: Tensor | None
    version: int


def _list_mappings(tree: Any) -> Iterator[dict[Any, Any]]:
    """A dictionary and all dictionaries inside of it, also in lists."""
    values = tree
    if isinstance(tree, dict):
        yield tree
        values = tree.values()
    for value in values:
        if isinstance(value, dict | list):
            yield from _list_mappings(value)


class _ObjectStates(NamedTuple):
    """What a step may change in the objects that are alive before the capture."""

    tensors: list[_TensorState]
    mappings: list[tuple[dict[Any, Any], dict[Any, Any]]]  # dictionaries and their contents
    classes: list[tuple[nn.Module, type]]  # modules and their classes


@contextmanager
def _keep_objects() -> Iterator[None]:
    """Restore gradients, versions of tensors, and attributes and classes of modules and optimizers
    that are alive."""
    states = _read_objects()
    try:
        yield
    finally:
        for module, kind in states.classes:
            if type(module) is not kind:
                module.__class__ = kind
        for mapping, contents in states.mappings:
            _restore_mapping(mapping, contents)
        _restore_tensors(states.tensors)


def _read_objects() -> _ObjectStates:
    """States of all tensors, modules and optimizers that are alive."""
    states = _ObjectStates([], [], [])
    for alive in find_alive(Tensor, nn.Module, Optimizer):
        if isinstance(alive, Tensor):
            if not alive.is_inference():
                with suppress(RuntimeError):  # a view that autograd has given up has no state
                    states.tensors.append(_read_state(alive))
            continue
        for mapping in _list_mappings(vars(alive)):
            states.mappings.append((mapping, dict(mapping)))
        if isinstance(alive, nn.Module):
            states.classes.append((alive, type(alive)))
    return states


def _read_state(tensor: Tensor) -> _TensorState:
    """Gradient and version of a tensor; PyTorch warns if the gradient of an inner one is read."""
    gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
    return _TensorState(tensor, gradient, tensor._version)


def _restore_mapping(mapping: dict[Any, Any], contents: dict[Any, Any]) -> None:
    """Give a dictionary the contents that it had, unless it has them still."""
    is_same = mapping.keys() == contents.keys()
    is_same = is_same and all(mapping[key] is value for key, value in contents.items())
    if not is_same:
        mapping.clear()
        mapping.update(contents)


def _restore_tensors(states: list[_TensorState]) -> None:
    """Restore gradients and versions of tensors."""
    changed: list[Tensor] = []
    versions: list[int] = []
    for tensor, gradient, version in states:
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
        if tensor._version != version:
            changed.append(tensor)
            versions.append(version)
    if changed:
        torch._C._autograd._unsafe_set_version_counter(tuple(changed), tuple(versions))


@contextmanager
def leave_usable(fakes: Fakes) -> Iterator[None]:
    """Let fake tensors be used after the capture that made them, such as a loss in a list.

    Parameters
    ----------
    fakes : Fakes
        The mode of the capture.
    """
    try:
        yield
    finally:
        for tensor in find_alive(FakeTensor):
            if tensor.fake_mode is fakes:
                tensor.__class__ = Left


# -- contexts that a step may leave open
# ---------------------------------------------------------------------------------


class _InferenceRegion(NamedTuple):
    """A region of `torch.inference_mode` that a step is in, and whether gradients were recorded
    before it."""

    region: Any
    recorded_gradients: bool


class InferenceModes:
    """Regions of `torch.inference_mode` that a step is in.

    They are regions of `torch.no_grad` in a capture. Without autograd PyTorch hands the recorder
    `linear` or `conv2d` whole, and not the kernels that they run.
    """

    def __init__(self) -> None:
        self._entered: list[_InferenceRegion] = []  # the innermost one last

    def list_patches(self) -> list[Patch]:
        """Patches that tell of regions."""

        def enter(region: Any) -> None:
            self._entered.append(_InferenceRegion(region, torch.is_grad_enabled()))
            torch.set_grad_enabled(not region.mode)

        def leave(region: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None:
            # one that was left at the end of the capture is not left again
            if any(entered.region is region for entered in self._entered):
                self._leave_last()

        def is_enabled() -> bool:
            return bool(self._entered) and self._entered[-1].region.mode

        reason = "work in torch.inference_mode arrives as operations without a model"
        return [
            Patch(torch.inference_mode, "__enter__", enter, reason),
            Patch(torch.inference_mode, "__exit__", leave, reason),
            Patch(torch, "is_inference_mode_enabled", is_enabled, reason),
        ]

    def _leave_last(self) -> None:
        """Leave the innermost region."""
        torch.set_grad_enabled(self._entered.pop().recorded_gradients)

    def leave_all(self) -> None:
        """Leave all regions, the innermost one first."""
        while self._entered:
            self._leave_last()


@contextmanager
def close_contexts(note: Callable[[str], Any]) -> Iterator[None]:
    """Leave the modes of PyTorch that a step has entered and not left, as it ended with an error, or
    as a generator is still inside of them.

    Parameters
    ----------
    note : callable
        Receives what is said of patches.
    """
    modes = _get_current_function_mode_stack()
    operations = len(_get_current_dispatch_mode_stack())
    hooks, depth = _find_saving_hooks(), _count_autocast_regions()
    regions = InferenceModes()
    with apply_patches(regions.list_patches(), note):
        try:
            yield
        finally:
            regions.leave_all()
            _set_function_modes(modes)
            for _ in range(len(_get_current_dispatch_mode_stack()) - operations):
                _pop_mode()
            while _find_saving_hooks() not in (hooks, None):
                torch._C._autograd._pop_saved_tensors_default_hooks()
            for _ in range(_count_autocast_regions() - depth):
                torch.autocast_decrement_nesting()


def _find_saving_hooks() -> Any:
    """The innermost hooks for tensors that are saved for the backward pass; None without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _count_autocast_regions() -> int:
    """How many regions of autocast the process is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


# -- the sandbox
# ----------------------------------------------------------------------------------------------------


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
        stack.enter_context(_keep_default_device())
        stack.enter_context(_keep_settings())
        stack.enter_context(_keep_objects())
        note = recorder.values.notes.setdefault
        stack.enter_context(apply_patches(list_patches(recorder), note))
        if ranks > 1 or dist.is_initialized():
            stack.enter_context(fake_ranks(ranks, rank))
        else:
            stack.callback(end_group)
        try:
            yield
        except _EXPLAINED as error:
            text = explain(error)
            if text is None:
                raise
            refuse(text, traceback.extract_tb(error.__traceback__), error)
