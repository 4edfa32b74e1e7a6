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
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _device

from perfkit.recording.patches import apply_patches, end_group, fake_ranks, list_patches
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


def _list_generators() -> list[Setting]:
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
        Setting(private._get_cudnn_benchmark, private._set_cudnn_benchmark),
        Setting(private._get_cudnn_deterministic, private._set_cudnn_deterministic),
        Setting(private._get_flash_sdp_enabled, private._set_sdp_use_flash),
        Setting(private._get_math_sdp_enabled, private._set_sdp_use_math),
        Setting(private._get_mem_efficient_sdp_enabled, private._set_sdp_use_mem_efficient),
        Setting(private._get_cudnn_sdp_enabled, private._set_sdp_use_cudnn),
        Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        Setting(torch.get_num_threads, torch.set_num_threads),
        # the first use of the compiler switches these checks off
        Setting(_is_validating, Distribution.set_default_validate_args),
        *_list_number_formats(),
    ]


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
    generators = [(generator, generator.read()) for generator in _list_generators()]
    settings = [(setting, _read(setting)) for setting in _list_settings()]
    device = _device.CURRENT_DEVICE
    try:
        yield
    finally:
        if device != _device.CURRENT_DEVICE:
            torch.set_default_device(device)
        for generator, state in generators:
            generator.write(state)
        for setting, value in settings:
            if value is not None and _read(setting) != value:
                setting.write(value)


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
