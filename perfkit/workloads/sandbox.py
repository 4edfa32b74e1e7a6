"""Where a training step runs without computing: fake tensors, fake ranks, and everything put back as it was."""

import gc
import linecache
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, optimizer
from torch.utils import _foreach_utils

__all__ = ["Unknown", "explain", "find_alive", "open_sandbox", "refuse_lazy"]

#: What fake tensors raise where a value, or a size that depends on values, is asked for.
_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
#: Held for a whole capture: what it replaces belongs to the process, not to a thread.
_ALONE = threading.RLock()
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["perfkit"]))


@contextmanager
def replace(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object or module stand in for others for a while."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}  # others are inherited
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)


# -- what depends on values --------------------------------------------------------------------------------------------


def find_line(frames: traceback.StackSummary) -> str:
    """The innermost line that is neither PyTorch's nor perfkit's, in words."""
    for frame in reversed(frames):
        if not frame.filename.startswith((*_LIBRARIES, "<")) or "<doctest" in frame.filename:
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f'{frame.filename}, line {frame.lineno}: "{code}"'
    return "a place that could not be found"


def _refuse(place: str, cause: BaseException | None = None) -> NoReturn:
    raise ValueError(
        f"capture computes no values, and the step needs one in {place}; sizes and branches may depend on real whole "
        "numbers, such as indices and lengths made outside of torch, so pass these; else write it with torch.where or "
        "fixed sizes, or capture each branch as a step of its own"
    ) from cause


@contextmanager
def explain() -> Iterator[None]:
    """Say which line of the step asked for a value that is not computed.

    Raises
    ------
    ValueError
        In place of the error of the fake tensor.
    """
    try:
        yield
    except _VALUES as error:
        _refuse(find_line(traceback.extract_tb(error.__traceback__)), error)


def refuse_lazy(module: nn.Module, path: str = "") -> NoReturn:
    """Say that a module does not know its sizes yet, and what to do.

    Parameters
    ----------
    module : Module
        One whose sizes come from its first input.
    path : str, optional
        Where it is in the model.

    Raises
    ------
    ValueError
        Always.
    """
    name = type(module).__name__
    raise ValueError(
        f"{name}{f' {path!r}' if path else ''} is a lazy module, whose sizes are not known before its first input; "
        f"build the model and run one forward before capture, or use {name.removeprefix('Lazy')} with its sizes"
    )


class Unknown(float):
    """A number that was not computed: it may be added up and printed, but nothing may be decided by it."""

    def _decide(self, *_: Any) -> NoReturn:
        _refuse(find_line(traceback.extract_stack()))

    def _combine(self, *_: Any) -> "Unknown":
        return Unknown(self)

    __bool__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __round__ = _decide
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combine
    __neg__ = __abs__ = __pow__ = __rpow__ = _combine
    __hash__ = float.__hash__


# -- state that a step over real modules would leave behind ------------------------------------------------------------


def find_alive(*types: type) -> list[Any]:
    """All objects of these types that Python knows of, but for modules half built and parameters without sizes.

    Parameters
    ----------
    *types : type
        Types, subclasses included.

    Returns
    -------
    objects : list
        In no order that means anything.
    """
    alive = (o for o in gc.get_objects() if issubclass(type(o), types) and not is_lazy(o))
    return [o for o in alive if not isinstance(o, nn.Module) or "_modules" in vars(o)]


def _held_tensors(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers]


@contextmanager
def keep_state() -> Iterator[None]:
    """Put back gradients, parameters, buffers, optimizer states and random numbers of everything that is alive."""
    alive = find_alive(Tensor, nn.Module, Optimizer)
    leaves = [(t, t.grad) for t in alive if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]
    versions = [(t, t._version) for t in alive if isinstance(t, Tensor) and not t.is_inference()]
    modules = [(m, [dict(held) for held in _held_tensors(m)], m.training) for m in alive if isinstance(m, nn.Module)]
    optimizers = [
        (o, {p: dict(s) for p, s in o.state.items()}, [dict(g) for g in o.param_groups])
        for o in alive
        if isinstance(o, Optimizer)
    ]
    del alive
    numbers, drawn, dealt = torch.get_rng_state(), random.getstate(), np.random.get_state()
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(numbers)
        random.setstate(drawn)
        np.random.set_state(dealt)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        for module, held, training in modules:
            module.training = training
            for now, before in zip(_held_tensors(module), held, strict=True):
                if now != before if set(now) != set(before) else any(now[k] is not before[k] for k in before):
                    now.clear()
                    now.update(before)
        for leaf, gradient in leaves:
            if leaf.grad is not gradient:
                leaf.grad = gradient
        for each, state, groups in optimizers:
            each.state.clear()
            each.state.update(state)
            for group, settings in zip(each.param_groups, groups, strict=False):
                group.update(settings)
        changed = [(t, v) for t, v in versions if t._version != v]
        if changed:
            torch._C._autograd._unsafe_set_version_counter(*zip(*changed, strict=True))


def convert_modules() -> Callable[..., nn.Module]:
    """A `Module._apply` for fake parameters, which PyTorch would swap, and often cannot; tied ones stay tied."""
    converted: dict[int, tuple[Tensor, Tensor]] = {}

    def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for held in _held_tensors(module):
            for key, old in held.items():
                if old is None or (id(old) in converted and converted[id(old)][1] is old):
                    continue
                with torch.no_grad():
                    new = converted[id(old)][1] if id(old) in converted else fn(old)
                if new is not old and isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
                    new = nn.Parameter(new, old.requires_grad)
                converted[id(old)] = converted[id(new)] = old, new
                held[key] = new
        return module

    return convert


# -- ranks -------------------------------------------------------------------------------------------------------------


@contextmanager
def fake_ranks(ranks: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist, in place of the one there may be."""
    from torch.distributed import distributed_c10d
    from torch.nn.parallel import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own: Any = distributed_c10d
    world = own._world
    own._world = SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, tags_to_pg={}, pg_to_tag={},
        pg_coalesce_state={}, comms=[], group_count=world.group_count + 10_000, pg_config_info=[],
    )  # fmt: skip
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    try:
        with (
            replace(sys, excepthook=sys.excepthook),
            replace(distributed, _verify_param_shape_across_processes=nothing, _sync_module_states=nothing),
        ):
            dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore(), group_name="perfkit")
            yield
    finally:
        gc.collect()  # a module over ranks holds on to its process group
        for name in own._world.pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)
        own._world = world
        own._update_default_pg(world.default_pg)


@contextmanager
def open_sandbox(ranks: int = 1, rank: int = 0, device: str = "cpu") -> Iterator[FakeTensorMode]:
    """Run without computing, alone in the process, and leave nothing behind.

    Parameters
    ----------
    ranks, rank : int
        Ranks that take part, and which of them this is [-].
    device : str
        ``cpu`` or ``cuda``, where optimizers work on lists of tensors.

    Yields
    ------
    fake : FakeTensorMode
        The mode under which tensors have no data; it is not entered yet.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    lists = [*_foreach_utils._get_foreach_kernels_supported_devices(), *(["cpu"] if device == "cuda" else [])]
    with ExitStack() as stack:
        stack.enter_context(_ALONE)
        stack.enter_context(keep_state())
        stack.enter_context(replace(FakeTensor, data_ptr=lambda _: 0))  # copies of parameters ask where their data lies
        stack.enter_context(replace(LazyModuleMixin, __init__=lambda module, *_, **__: refuse_lazy(module)))
        stack.enter_context(replace(nn.Module, _apply=convert_modules()))
        for owner in (_foreach_utils, optimizer):
            stack.enter_context(replace(owner, _get_foreach_kernels_supported_devices=lambda: lists))
        for types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
            stack.callback(types.remove, FakeTensor)
            types.append(FakeTensor)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dist.is_available() and (ranks > 1 or dist.is_initialized()):
            stack.enter_context(fake_ranks(ranks, rank))
        yield fake
