"""Capture of any PyTorch training step: every operation with its sizes, without computing one of them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from perfkit.units import check_choice, check_positive
from perfkit.workloads.graph import Graph
from perfkit.workloads.recorder import Recorder, find_caller
from perfkit.workloads.sandbox import Unknown, explain, find_alive, open_sandbox, refuse_lazy

__all__ = ["capture"]

_MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu)
_VALUES = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__)


def _at_home(device: Any) -> Any:
    """Where a fake tensor lies: autograd knows devices of this build of PyTorch alone."""
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

    def _move(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Keep a tensor where it is, and note what the host would wait for."""
        named = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str | torch.device)]
        there = func is Tensor.cuda or any(torch.device(a).type != "cpu" for a in named)
        if self.accelerator and self.recorder.on and not isinstance(args[0], FakeTensor) and there:
            self.recorder.transfer("to_device", args[0])
        elif (
            self.accelerator
            and self.recorder.on
            and isinstance(args[0], FakeTensor)
            and (func is Tensor.cpu or (named and not there))
        ):
            self.recorder.transfer("to_host", args[0])
        if func is Tensor.cuda:
            return (args[0], "cpu")
        return (args[0], *(_at_home(a) if isinstance(a, str | torch.device) else a for a in args[1:]))

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number that is known, or one that nothing may be decided by."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            tensor = args[0]
            if find_caller("grad_scaler.py"):
                return 0.0  # nothing overflowed, as in most iterations
            if func is not Tensor.item or not tensor.is_floating_point():
                raise
            if self.accelerator and self.recorder.on:
                self.recorder.transfer("to_host", tensor)
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
    """Capture a training step: what it would run, in order, without running it; captures in threads take turns.

    Parameters
    ----------
    make_step : callable
        Builds model and optimizer and returns the step, a callable without arguments. It runs without memory for
        tensors, so that a model may be larger than any machine; a step over a real module works too and leaves it as
        it was. Whole numbers that are real, such as indices, stay real, because they decide sizes.
    ranks, rank : int
        Ranks that take part, and which of them is captured [-].
    name, family : str
        What the step is called, and which workloads it counts among where a platform was calibrated by families.
    device : str
        ``cpu`` or ``cuda``, where optimizers work on lists of tensors.

    Returns
    -------
    graph : Graph
        Operations of one steady iteration on this rank.

    Raises
    ------
    ValueError
        For what depends on values that are not computed, naming the line of the step, for a lazy module that has not
        seen an input, and for what is no step.

    Warns
    -----
    UserWarning
        Where several ranks take part and share nothing.

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
    with open_sandbox(ranks, rank, device) as fake, explain():
        recorder = Recorder(fake)
        exchanging = recorder.rebuild() if ranks > 1 else nullcontext()
        with exchanging, _follow(recorder), fake, recorder, _Calls(recorder, device):
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
            f"the step shares nothing between its {ranks} ranks; for data-parallel training wrap the model in "
            "torch.nn.parallel.DistributedDataParallel inside make_step",
            stacklevel=2,
        )
    return graph


def _find_path(module: nn.Module, parents: dict[int, tuple[nn.Module, str]]) -> str:
    """Names of a module and those it is part of, from the outside in; one that only wraps another has none."""
    names: list[str] = []
    while id(module) in parents and len(names) < 64:
        module, name = parents[id(module)]
        names.append(name)
    return ".".join(reversed(names)).removeprefix("module.")


@contextmanager
def _follow(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module runs, and when an optimizer does."""
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
