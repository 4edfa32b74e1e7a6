"""Capture of any PyTorch training step: a recorder follows its calls, modules and optimizers in a sandbox."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from perfkit.ground.units import check_choice, check_positive
from perfkit.recording.recorder import Recorder
from perfkit.recording.sandbox import Unknown, find_alive, find_caller, open_sandbox, refuse_lazy, watch_ranks
from perfkit.workloads.graph import Graph

_MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu)
_VALUES = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__)


def _at_home(device: Any) -> Any:
    """Where a fake tensor is stored: autograd knows devices of this build of PyTorch alone."""
    return device if torch.device(device).type == "meta" else "cpu"


class _Calls(TorchFunctionMode):
    """Sees calls of PyTorch as written: which device they name, which ask for values, which start no kernel."""

    def __init__(self, recorder: Recorder, device: str) -> None:
        super().__init__()
        self.recorder, self.accelerator = recorder, device != "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if func in _MOVES:
            args = self._move(func, args, kwargs)
            func = Tensor.to if func is Tensor.cuda else func
        if kwargs.get("device") is not None and not isinstance(kwargs["device"], int):
            kwargs = {**kwargs, "device": _at_home(kwargs["device"])}
        if func in _VALUES:
            return self._ask(func, args, kwargs)
        if func is Tensor.backward:
            recorder.phase, recorder.leading = "backward", True
        operations, views = len(recorder.labels), recorder.viewed
        out = func(*args, **kwargs)
        recorder.bare += recorder.viewed > views and len(recorder.labels) == operations
        return out

    def _transfer(self, direction: str, tensor: Tensor) -> None:
        if self.accelerator and self.recorder.on:
            self.recorder.transfer(direction, tensor)

    def _move(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Keep a tensor where it is, and note what the host would wait for."""
        named = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str | torch.device)]
        there = func is Tensor.cuda or any(torch.device(a).type != "cpu" for a in named)
        if there and not isinstance(args[0], FakeTensor):
            self._transfer("to_device", args[0])
        elif isinstance(args[0], FakeTensor) and (func is Tensor.cpu or (named and not there)):
            self._transfer("to_host", args[0])
        if func is Tensor.cuda:
            return (args[0], "cpu")
        return (args[0], *(_at_home(a) if isinstance(a, str | torch.device) else a for a in args[1:]))

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number that is known, or one that nothing may be decided by."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if find_caller("grad_scaler.py"):
                return 0.0  # nothing overflowed, as in most iterations
            if func is not Tensor.item or not args[0].is_floating_point():
                raise
            self._transfer("to_host", args[0])
            return Unknown(1.0)


def capture(
    make_step: Callable[[], Callable[[], Any]],
    *,
    ranks: int = 1,
    rank: int = 0,
    name: str = "",
    family: str = "",
    device: str = "cpu",
) -> Graph:
    """Capture the operations of a training step, in order, without computing; captures in threads take turns.

    Parameters
    ----------
    make_step : callable
        Builds model and optimizer and returns the step, a callable without arguments. Tensors take no memory, so a
        model may be larger than any machine. A step over an existing module works too and does not change it. Real
        whole numbers, such as indices, stay real, because they decide sizes.
    ranks, rank : int
        Ranks that take part, and which of them is captured [-].
    name, family : str
        Name of the step, and its family of workloads on platforms that were calibrated by families.
    device : str
        ``cpu`` or ``cuda``, where optimizers work on lists of tensors.

    Returns
    -------
    graph : Graph
        Operations of one steady iteration on this rank.

    Raises
    ------
    ValueError
        For a step that depends on computed values (with its line), for a lazy module without input so far, and for
        anything that is no step.

    Warns
    -----
    UserWarning
        If there are several ranks and no collective.

    Examples
    --------
    >>> import torch
    >>> def make_step():
    ...     model = torch.nn.Linear(1000, 1000)
    ...     return lambda: model(torch.randn(32, 1000)).sum().backward()
    >>> capture(make_step).kernels[("gemm", "nt")].size
    1
    """
    check_choice("device", device, ("cpu", "cuda"))
    ranks = int(check_positive("ranks", ranks, integer=True))
    with open_sandbox(ranks, rank, device) as fake:
        recorder = Recorder(fake)
        watched = (
            watch_ranks(recorder.exchanges.wait, partial(setattr, recorder, "agreeing")) if ranks > 1 else nullcontext()
        )
        with watched, _follow(recorder), fake, recorder, _Calls(recorder, device):
            step = make_step()
            if not callable(step):
                raise ValueError(f"make_step returned {step!r}; it must return the step, a callable without arguments")
            step()
            recorder.phase, recorder.on = "forward", True
            step()
            recorder.on = False
            recorder.exchanges.end_backward()
            del step
    graph = recorder.graph(name, family, ranks)
    if ranks > 1 and not len(graph.collectives):
        warnings.warn(
            f"the step has no collective between its {ranks} ranks; for data-parallel training wrap the model in "
            "torch.nn.parallel.DistributedDataParallel inside make_step",
            stacklevel=2,
        )
    return graph


def _find_path(module: nn.Module, parents: dict[int, tuple[nn.Module, str]]) -> str:
    """Path of a module, from the outside in; a wrapper has no name."""
    names: list[str] = []
    while id(module) in parents and len(names) < 64:
        module, name = parents[id(module)]
        names.append(name)
    return ".".join(reversed(names)).removeprefix("module.")


@contextmanager
def _follow(recorder: Recorder) -> Iterator[None]:
    """Report running modules and optimizer steps to the recorder."""
    paths: dict[int, str] = {}

    def enter(module: nn.Module, *_: Any) -> None:
        if id(module) not in paths:
            parents = {id(child): (m, name) for m in find_alive(nn.Module) for name, child in m._modules.items()}
            for each in module.modules():
                paths[id(each)] = _find_path(each, parents)
        recorder.modules.append(paths[id(module)])
        recorder.mark()
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            refuse_lazy(module, paths[id(module)])

    def leave(*_: Any) -> None:
        recorder.modules.pop()
        recorder.mark()

    def update(*_: Any) -> None:
        recorder.phase, recorder.leading = "update", False

    with ExitStack() as hooks:
        hooks.callback(nn.modules.module.register_module_forward_pre_hook(enter).remove)
        hooks.callback(nn.modules.module.register_module_forward_hook(leave, always_call=True).remove)
        hooks.callback(register_optimizer_step_pre_hook(update).remove)
        yield
