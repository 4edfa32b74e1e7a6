"""Capture of any PyTorch training step: it runs without computing, and a recorder follows its
calls."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from perfkit.ground.units import check_choice, check_positive, show
from perfkit.models.optimizers import find_optimizer
from perfkit.recording import sandbox
from perfkit.recording.modules import DTYPES, make_optimizer
from perfkit.recording.precision import pretend_gpu
from perfkit.recording.recorder import Recorder
from perfkit.recording.sandbox import (
    OFFLOADED,
    Unknown,
    find_alive,
    find_caller,
    load_batches,
    open_sandbox,
    refuse,
)
from perfkit.workloads.graph import Graph
from perfkit.workloads.vocabulary import walk_tensors

#: Methods that ask for the values of a tensor.
_VALUES = {
    getattr(Tensor, name)
    for name in ["item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__"]
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
#: Assumption for data loaders.
READY = "batches of a data loader count as ready when asked for; pass loading=pk.time_loader(loader) to predict"
#: Assumption for tensors that are pinned.
PINNED = "the time that the host takes to pin memory is not counted"
#: Assumption for a step that hands an array to other packages.
ZEROS = "arrays of computed numbers, such as costs to match by, count as zeros; work of the host on them is left out"
#: Assumption for a step of which a part is compiled.
COMPILED = "forward and backward pass are taken to be compiled as a whole; kernels are merged by the compiler's rules"


def _at_home(device: Any) -> Any:
    """The device that stores a fake tensor: the CPU, as autograd knows only devices of this build
    of PyTorch."""
    return (
        "cpu"
        if isinstance(device, str | torch.device) and torch.device(device).type != "meta"
        else device
    )


class _Calls(TorchFunctionMode):
    """Sees the calls of PyTorch as they are written: devices they name, values they ask for, calls
    without a kernel."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            self._move(func, args, kwargs)
            if func is not Tensor.to:
                func, args, kwargs = Tensor.to, args[:1], {**kwargs, "device": "cpu"}
            args = (args[0], *map(_at_home, args[1:]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _at_home(kwargs["device"])}
        if func in _VALUES:
            return self._ask(func, args, kwargs)
        if func is Tensor.pin_memory:
            recorder.values.notes[PINNED] = None
            return args[0]
        if func is torch._C._nn.one_hot:
            return self._spread(*args, **kwargs)
        if func is Tensor.backward:
            recorder.phase, recorder.leading = "backward", True
        operations, views = len(recorder.labels), recorder.viewed
        out = func(*args, **kwargs)
        if func == _SET_DATA:
            recorder.values.replace(*args)
        recorder.bare += recorder.viewed > views and len(recorder.labels) == operations
        return out

    def _move(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record a copy between host and device that the host would wait for; the fake tensor
        itself does not move."""
        if func is Tensor.cpu and self.recorder.accelerator and find_caller("_fsdp_param.py"):
            refuse(OFFLOADED)
        given = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str | torch.device)]
        # A device object of the CPU is what a fake tensor says of itself, so it names no target;
        # the text "cpu" does.
        named = [torch.device(a).type for a in given if a != torch.device("cpu")]
        away = func is Tensor.cuda or any(name != "cpu" for name in named)
        if away != isinstance(args[0], FakeTensor) and (away or named or func is Tensor.cpu):
            self.recorder.transfer("to_device" if away else "to_host", args[0])

    def _spread(self, classes: Tensor, num_classes: int = -1) -> Tensor:
        """Rows with a one at these classes, by the operations of real tensors; fake ones would
        compare."""
        if not self.recorder.accelerator:
            classes.aminmax()
        count = int(classes.max()) + 1 if num_classes < 0 else num_classes
        return torch.zeros((*classes.shape, count), dtype=torch.long).scatter_(
            -1, classes.unsqueeze(-1), 1
        )

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The known values of a tensor, or else a number on which no decision may depend."""
        for gather in ("full_tensor", "trigger_wait"):  # of shards, and of results of collectives
            if hasattr(args[0], gather):
                args = (getattr(args[0], gather)(), *args[1:])
        known = None if args[0].requires_grad else self.recorder.values.pretend(args[0]).constant
        if known is not None:
            return sandbox.compute(func, known, *args[1:], **kwargs)
        if find_caller("grad_scaler.py"):
            self.recorder.transfer("to_host", args[0])
            return 0.0  # nothing overflowed, as in most iterations
        if (
            func not in (Tensor.item, Tensor.numpy, Tensor.__array__)
            or not args[0].is_floating_point()
        ):
            raise DataDependentOutputException(func)
        if func is Tensor.item:
            self.recorder.transfer("to_host", args[0])
            return Unknown(1.0)
        self.recorder.values.notes[ZEROS] = None
        return _make_zeros(args[0])


def _make_zeros(tensor: Tensor) -> sandbox.UnknownArray:
    """An array of zeros in memory of its own, which represents a tensor of computed numbers."""
    half = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # NumPy has no such types
    dtype = torch.float32 if tensor.dtype in half else tensor.dtype
    zeros = sandbox.compute(lambda: torch.zeros(tensor.shape, dtype=dtype).numpy().copy())
    return zeros.view(sandbox.UnknownArray)


def _find_model(given: Any) -> Any:
    """A model, or a function that builds it, also from a configuration of transformers or its file
    or folder."""
    if callable(given):
        return given
    if not (isinstance(given, str | Path) or hasattr(given, "architectures")):
        raise ValueError(
            f"make_step is {show(given)}; it must be a model, what builds it, or a configuration"
        )
    if isinstance(given, str | Path) and not Path(given).exists():
        raise ValueError(
            f"make_step is {show(given)}, no file or folder; nothing is downloaded; give a config.json"
        )
    try:
        package: Any = import_module("transformers")
    except ImportError as error:
        raise ValueError(
            "a configuration needs transformers; install it: pip install 'perfkit[models]'"
        ) from error
    config = package.AutoConfig.from_pretrained(given) if isinstance(given, str | Path) else given
    kinds = [package.AutoModelForPreTraining, package.AutoModelForCausalLM, package.AutoModel]
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[-1])
    own = getattr(package, (config.architectures or [""])[0], None)
    make: Any = partial(own or kind.from_config, config)
    make.__name__ = (own or kind._model_mapping[type(config)]).__name__
    return make


def _train(
    model: Any, inputs: Any, optimizer: str, loss: Any, amp: str | None, ranks: int, device: str
) -> Callable[[], None]:
    """The step of a model with these inputs."""
    module = (model if isinstance(model, nn.Module) else model()).train()
    module = nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
    updates = make_optimizer(optimizer, module.parameters())
    region = torch.autocast(device, DTYPES[amp]) if amp else nullcontext()
    scaler = torch.amp.GradScaler(device, enabled=amp == "fp16")

    def step() -> None:
        updates.zero_grad()
        with region:
            if isinstance(inputs, Mapping):
                out = module(**inputs)
            else:
                out = module(*inputs) if isinstance(inputs, list | tuple) else module(inputs)
            found = loss(out) if loss else getattr(out, "loss", None)
            if found is None:
                numbers = [t.float().mean() for t in walk_tensors(out) if t.is_floating_point()]
                found = sum(numbers[1:], start=numbers[0])
        scaler.scale(found).backward()
        scaler.step(updates)
        scaler.update()

    return step


def capture(
    make_step: Any,
    inputs: Any = None,
    *,
    optimizer: str = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    amp: str | None = None,
    ranks: int = 1,
    rank: int = 0,
    name: str = "",
    family: str = "",
    device: str = "cpu",
) -> Graph:
    """Record the operations of a training step, in order, without computing. Captures in threads
    take turns.

    Parameters
    ----------
    make_step : callable, torch.nn.Module, configuration, str or Path
        A function that builds model and optimizer and returns the step, a callable without
        arguments. Tensors take no memory, so the model may be larger than any machine. A step over
        an existing module works too; the module is not changed. With `inputs`, give the model or a
        function that builds it: the step is then forward, backward and optimizer. If transformers
        is installed, one of its configurations, or the config.json or folder of one, is a model
        too: the first of its ``architectures``, else the first that exists of
        AutoModelForPreTraining, AutoModelForCausalLM and AutoModel.
    inputs : tensor, sequence or mapping, optional
        Arguments of the model.
    optimizer : str
        With `inputs`: ``adamw``, ``adam``, ``adagrad``, ``sgd_momentum`` or ``sgd``.
    loss : callable, optional
        With `inputs`: computes the loss from the result of the model. By default it is the
        attribute ``loss`` of the result, or else the mean of its numbers.
    amp : str, optional
        With `inputs`: precision of autocast, ``bf16``, or ``fp16`` with scaled gradients.
    ranks, rank : int
        Number of ranks, and the rank that is captured [-]. With `inputs`, which are those of one
        rank, DistributedDataParallel averages the gradients.
    name, family : str
        Name of the step, and its workload family on platforms that were calibrated by family.
    device : str
        ``cpu`` or ``cuda``. For ``cuda``, which needs no GPU, optimizers work on lists of tensors,
        every region of autocast follows CUDA's lists, products may be in TF32, and attention has
        the kernels of an A100.

    Returns
    -------
    graph : Graph
        Operations of one iteration on this rank, after a first one that is not recorded.

    Raises
    ------
    ValueError
        For a step that depends on computed values (the message names the line), for anything that
        is no step, and for attention for which the step allows no kernel.

    Warns
    -----
    UserWarning
        If several ranks have no collective, if rows are chosen by computed scores, and for every
        other assumption.

    Notes
    -----
    Some values are known when the step asks for them: small tensors that are passed, filled or
    drawn, real whole numbers, and everything that follows from these alone. If the step asks how
    many rows were chosen by computed scores, as in a mixture of experts, every alternative counts
    as chosen equally often. Computed numbers count as finite if the step asks. An array of computed
    numbers that other packages match or sort holds zeros.

    Examples
    --------
    >>> import torch
    >>> capture(torch.nn.Linear(1000, 1000), torch.ones(32, 1000)).kernels[("gemm", "nt")].size
    1
    >>> def make_step():
    ...     model = torch.nn.Linear(1000, 1000)
    ...     return lambda: model(torch.randn(32, 1000)).sum().backward()
    >>> capture(make_step).parameters
    1001000
    """
    check_choice("amp", "bf16" if amp is None else amp, ("bf16", "fp16"))
    if inputs is not None:
        find_optimizer(optimizer, dense=True)
        make_step = _find_model(make_step)
        name = name or getattr(make_step, "__name__", type(make_step).__name__)
        make_step = partial(_train, make_step, inputs, optimizer, loss, amp, ranks, device)
    elif isinstance(make_step, nn.Module) or (
        isinstance(make_step, type) and issubclass(make_step, nn.Module)
    ):
        advice = (
            "give its inputs too, as in capture(model, inputs), or a function that returns a step"
        )
        raise ValueError(
            f"make_step is a {getattr(make_step, '__name__', type(make_step).__name__)}; {advice}"
        )
    elif amp is not None:
        raise ValueError(
            f"amp is {amp!r}, and inputs are not given; write torch.autocast({device!r}) into the step"
        )
    check_choice("device", device, ("cpu", "cuda"))
    ranks = int(check_positive("ranks", ranks, integer=True))
    recorder = Recorder(accelerator=device != "cpu")
    with (
        open_sandbox(recorder, ranks, rank),
        _follow(recorder),
        recorder.values.fake,
        recorder,
        _Calls(recorder),
    ):
        step = make_step()
        if not callable(step):
            raise ValueError(
                f"make_step returned {step!r}; it must return the step, a callable without arguments"
            )
        step()
        recorder.phase, recorder.on = "forward", True
        recorder.values.storages.begin()
        step()
        recorder.on = False
        recorder.exchanges.end_backward()
        graph = recorder.graph(name, family, ranks)  # before tensors are released
        del step
    for note in graph.notes:
        warnings.warn(note, stacklevel=2)
    if ranks > 1 and not len(graph.collectives):
        text = f"the step has no collective between its {ranks} ranks; for data-parallel training wrap the model in "
        warnings.warn(
            f"{text}torch.nn.parallel.DistributedDataParallel inside make_step", stacklevel=2
        )
    return graph


@contextmanager
def _follow(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which modules and optimizers run; let calls act as on its device."""
    paths: dict[int, str] = {}
    entered: list[nn.Module] = []
    sized: dict[int, tuple[Any, Tensor]] = {}  # lazy tensors and their replacements

    def size(lazy: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """Replace a lazy tensor by a fake one, as it cannot become one itself."""
        made = torch.empty(shape, dtype=dtype or lazy.dtype)
        sized[id(lazy)] = (
            lazy,
            nn.Parameter(made, lazy.requires_grad) if isinstance(lazy, nn.Parameter) else made,
        )
        for module in entered[-1].modules():
            holders: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in holders:
                held.update(
                    {key: sized[id(lazy)][1] for key, tensor in held.items() if tensor is lazy}
                )

    def enter(module: nn.Module, *_: Any) -> None:
        if id(module) not in paths:
            alive = find_alive(nn.Module)
            inner = {id(child) for each in alive for child in each.children()}
            for root in (each for each in alive if id(each) not in inner):
                for name, each in root.named_modules():
                    paths[id(each)] = re.sub(
                        r"(^|\.)_orig_mod\b", "", name.removeprefix("module.")
                    ).lstrip(".")
        recorder.modules.append(paths.setdefault(id(module), ""))
        recorder.mark()
        entered.append(module)

    def leave(*_: Any) -> None:
        recorder.modules.pop()
        entered.pop()
        recorder.mark()

    def load(loader: Any) -> Iterator[Any]:
        recorder.values.notes[READY] = None
        return load_batches(loader)

    def compile_nothing(compiler: Any) -> None:
        if compiler:
            recorder.values.notes[COMPILED] = None
            recorder.compiled |= {"forward", "backward"}

    def update(optimizer: Any, *_: Any) -> None:
        recorder.phase, recorder.leading = "update", False
        if find_caller("_dynamo/eval_frame.py"):  # the optimizer is compiled too
            recorder.compiled.add("update")
        for group in optimizer.param_groups if sized else ():
            group["params"] = [sized.get(id(p), (p, p))[1] for p in group["params"]]

    with ExitStack() as hooks:
        hooks.enter_context(patch.object(UninitializedTensorMixin, "materialize", size))
        hooks.enter_context(patch.object(DataLoader, "__iter__", load))
        hooks.enter_context(patch.object(eval_frame, "_callback_from_stance", compile_nothing))
        # else a compiled module would warn of the hooks below, which are not those of the user
        hooks.enter_context(patch.object(nn.modules.module, "_has_any_global_hook", lambda: False))
        if recorder.accelerator:
            hooks.enter_context(pretend_gpu(recorder.values.notes.setdefault))
        hooks.callback(nn.modules.module.register_module_forward_pre_hook(enter).remove)
        hooks.callback(
            nn.modules.module.register_module_forward_hook(leave, always_call=True).remove
        )
        hooks.callback(register_optimizer_step_pre_hook(update).remove)
        yield
