"""A sandbox in which a training step runs without computing, with every private part of PyTorch that it needs.

Checked with PyTorch 2.13.0 alone. What would have to be looked at first with another version:

==========================================  =======  ================================================================
part of PyTorch                             since    what for
==========================================  =======  ================================================================
torch._subclasses.fake_tensor               2.0      tensors without values; `data_ptr` is asked for by deep copies
nn.Module._apply                            1.0      conversions swap parameters, which fake ones cannot
LazyModuleMixin.__init__                    1.8      lazy modules are refused by name
_foreach_utils, optimizer: lists of types   2.1      optimizers on a GPU work on lists of tensors
distributed_c10d._world                     2.1      ranks that do not exist, in place of those there may be
torch.testing._internal...fake_pg           2.1      their store and their process group
Reducer._rebuild_buckets                    1.7      DistributedDataParallel reads the bucket sizes it sends
Work.wait                                   1.6      where a collective is waited for
_verify_param_shape_across_processes        1.9      what a module over ranks asks other ranks first
==========================================  =======  ================================================================
"""

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

#: Errors of fake tensors where code needs a value, or a size that depends on values.
_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
#: Held for a whole capture, as its replacements affect the whole process.
_ALONE = threading.RLock()
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["perfkit"]))


@contextmanager
def _replace(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object or module other attributes for a while."""
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


def _refuse(frames: traceback.StackSummary, cause: BaseException | None = None) -> NoReturn:
    """Name the innermost line that is neither PyTorch's nor perfkit's."""
    place = "a place that could not be found"
    for frame in frames:
        if not frame.filename.startswith((*_LIBRARIES, "<")) or "<doctest" in frame.filename:
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            place = f'{frame.filename}, line {frame.lineno}: "{code}"'
    raise ValueError(
        f"capture computes no values, and the step needs one in {place}; sizes and branches may depend on real whole "
        "numbers, such as indices and lengths made outside of torch, so pass these; else write it with torch.where or "
        "fixed sizes, or capture each branch as a step of its own"
    ) from cause


@contextmanager
def _explain() -> Iterator[None]:
    """Say which line of the step asked for a value that is not computed."""
    try:
        yield
    except _VALUES as error:
        _refuse(traceback.extract_tb(error.__traceback__), error)


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
        _refuse(traceback.extract_stack())

    def _combine(self, *_: Any) -> "Unknown":
        return Unknown(self)

    __bool__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __round__ = _decide
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combine
    __neg__ = __abs__ = __pow__ = __rpow__ = _combine
    __hash__ = float.__hash__


def find_caller(name: str) -> bool:
    """Whether a file is among those that call, autograd's engine not passed.

    Parameters
    ----------
    name : str
        How the file's path ends.

    Returns
    -------
    found : bool
        Whether it calls.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith("autograd/graph.py"):
        if frame.f_code.co_filename.endswith(name):
            return True
        frame = frame.f_back
    return False


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
def _keep_state() -> Iterator[None]:
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
        for module, held, training in modules:
            module.training = training
            for now, before in zip(_held_tensors(module), held, strict=True):
                if set(now) != set(before) or any(now[k] is not before[k] for k in before):
                    now.clear()
                    now.update(before)
        for leaf, gradient in leaves:
            if leaf.grad is not gradient:
                leaf.grad = gradient
        for each, state, groups in optimizers:
            each.state.clear()
            each.state.update(state)
            for group, own in zip(each.param_groups, groups, strict=False):
                group.update(own)
        changed = [(t, v) for t, v in versions if t._version != v]
        if changed:
            torch._C._autograd._unsafe_set_version_counter(*zip(*changed, strict=True))


def _convert_modules() -> Callable[..., nn.Module]:
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
def _fake_ranks(ranks: int, rank: int) -> Iterator[None]:
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
            _replace(sys, excepthook=sys.excepthook),
            _replace(distributed, _verify_param_shape_across_processes=nothing, _sync_module_states=nothing),
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
def watch_ranks(waited: Callable[[Any], None], agreeing: Callable[[bool], None]) -> Iterator[None]:
    """See where collectives are waited for, and when a module over ranks agrees on its buckets.

    Parameters
    ----------
    waited : callable
        Receives each handle that is waited for.
    agreeing : callable
        Receives True when a module over ranks begins to send and read whole numbers, and False when it has done so.

    Yields
    ------
    None
        While both are watched.
    """
    private: Any = torch._C._distributed_c10d
    wait, agree = private.Work.wait, private.Reducer._rebuild_buckets

    def note(work: Any, *args: Any, **kwargs: Any) -> Any:
        waited(work)
        return wait(work, *args, **kwargs)

    def agreed(own: Any) -> Any:
        agreeing(True)
        try:
            return agree(own)
        finally:
            agreeing(False)

    with _replace(private.Work, wait=note), _replace(private.Reducer, _rebuild_buckets=agreed):
        yield


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

    Raises
    ------
    ValueError
        For what asks for a value that is not computed, naming the line.
    """
    with ExitStack() as stack:
        stack.enter_context(_ALONE)
        lists = [*_foreach_utils._get_foreach_kernels_supported_devices(), *(["cpu"] if device == "cuda" else [])]
        for manager in (
            _explain(), _keep_state(),
            _replace(FakeTensor, data_ptr=lambda _: 0),
            _replace(LazyModuleMixin, __init__=lambda module, *_, **__: refuse_lazy(module)),
            _replace(nn.Module, _apply=_convert_modules()),
            _replace(_foreach_utils, _get_foreach_kernels_supported_devices=lambda: lists),
            _replace(optimizer, _get_foreach_kernels_supported_devices=lambda: lists),
        ):  # fmt: skip
            stack.enter_context(manager)
        for types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
            stack.callback(types.remove, FakeTensor)
            types.append(FakeTensor)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dist.is_available() and (ranks > 1 or dist.is_initialized()):
            stack.enter_context(_fake_ranks(ranks, rank))
        yield FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
