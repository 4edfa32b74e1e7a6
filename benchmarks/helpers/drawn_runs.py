"""One step of a drawn model in a process of its own: run for real, or captured."""

import resource
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.helpers.drawn_builders import Attempt, Drawn, list_attempts, make_step

#: Longest processor time of one process [s], and most memory of its own [B].
LONGEST, MOST_MEMORY = 120, 6 * 2**30
#: Operations that read a number or compute nothing, which a graph does not have.
_NO_WORK = ("_local_scalar_dense", "is_same_size", "lift_fresh", "is_pinned", "_has_compatible")


@dataclass(frozen=True)
class Run:
    """A step that was run or captured.

    Parameters
    ----------
    attempt : Attempt, optional
        How the model was built; None if its step does not run in any way.
    error : str
        Why there are no operations; empty if there are.
    is_refused : bool
        Whether capture refused the step, and no error of another kind ended it.
    operations : tuple of str
        Names in order, without views.
    flops : mapping
        Work by name of the operation, of those that PyTorch has a formula for [FLOP].
    memory : float
        Most bytes of tensors that were alive at once [B].
    seconds : float
        Processor time [s].
    notes : tuple of str
        What the capture assumed.
    """

    attempt: Attempt | None = None
    error: str = ""
    is_refused: bool = False
    operations: tuple[str, ...] = ()
    flops: Mapping[str, float] | None = None
    memory: float = 0.0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def limit() -> None:
    """Limit what this process may take, and let it compute on one thread."""
    import torch

    torch.set_num_threads(1)
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + LONGEST, used + LONGEST + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    warnings.simplefilter("ignore")


def _convolve(args: Any, out: Any) -> float:
    """Work of a convolution: a product and a sum for each weight and each place it is at [FLOP]."""
    images, weight, transposed = args[0], args[1], args[6]
    places = images if transposed else out
    return 2.0 * places.shape[0] * places[0, 0].numel() * weight.numel()


def _convolve_backward(args: Any, out: Any) -> float:
    """Work of the gradients of a convolution; PyTorch's counter counts groups as if there were none
    [FLOP]."""
    gradient, images, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    places = images if transposed else gradient
    work = 2.0 * places.shape[0] * places[0, 0].numel() * weight.numel()
    return work * (int(wanted[0]) + int(wanted[1]))


_CONVOLUTIONS: dict[str, Callable[[Any, Any], float]] = {
    "convolution": _convolve,
    "convolution_backward": _convolve_backward,
}


def _count(step: Callable[[], None]) -> tuple[list[str], dict[str, float], float]:
    """Operations, FLOP and memory of the second call of a step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    from perfkit.workloads.vocabulary import VIEWS, walk_tensors

    names, flops = list[str](), dict[str, float]()
    alive = dict[int, int]()
    most = [0]
    total = [0]

    def forget(key: int) -> None:
        total[0] -= alive.pop(key)

    def follow(tensor: Any) -> None:
        """Count a storage while it is alive."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in alive or storage.device.type == "meta":
            return
        alive[key] = storage.nbytes()
        total[0] += alive[key]
        most[0] = max(most[0], total[0])
        weakref.finalize(storage, forget, key)

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.split("::")[-1]
            for tensor in walk_tensors([args, kwargs, out]):
                follow(tensor)
            if not (name in VIEWS or name in _NO_WORK or func.namespace in ("prim", "profiler")):
                names.append(name)
            formula = flop_registry.get(func._overloadpacket)
            if name in _CONVOLUTIONS:
                flops[name] = flops.get(name, 0.0) + _CONVOLUTIONS[name](args, out)
            elif formula is not None:
                work = formula(*args, **(kwargs or {}), out_val=out)
                flops[name] = flops.get(name, 0.0) + work
            return out

    with Counter():
        step()  # it shows what stays alive
        names.clear()
        flops.clear()
        most[0] = total[0]
        step()
    return names, flops, float(most[0])


def run_for_real(drawn: Drawn) -> Run:
    """Run the step of a drawn model on the CPU, in the first way of building it that works.

    Parameters
    ----------
    drawn : Drawn
        The model.

    Returns
    -------
    run : Run
        Its second step, or the first error of the smallest way.
    """
    limit()
    first_error = ""
    start = time.process_time()
    for attempt in list_attempts(drawn):
        try:
            names, flops, memory = _count(make_step(drawn, attempt))
        except Exception as error:
            first_error = first_error or f"{type(error).__name__}: {error}"
            continue
        seconds = time.process_time() - start
        return Run(attempt, "", False, tuple(names), flops, memory, seconds)
    return Run(error=first_error, seconds=time.process_time() - start)


def capture_step(drawn: Drawn, attempt: Attempt) -> Run:
    """Capture the step of a drawn model.

    Parameters
    ----------
    drawn : Drawn
        The model.
    attempt : Attempt
        How it is built.

    Returns
    -------
    run : Run
        The captured step, or why there is none.
    """
    from torch.utils.flop_counter import flop_registry

    from perfkit.prediction.predictor import predict
    from perfkit.recording.steps import capture

    limit()
    start = time.process_time()
    try:
        graph = capture(lambda: make_step(drawn, attempt))
    except Exception as error:
        own = (
            isinstance(error, ValueError)
            and "perfkit" in traceback.extract_tb(error.__traceback__)[-1].filename
        )
        text = f"{type(error).__name__}: {error}"
        return Run(attempt, text, own, seconds=time.process_time() - start)
    seconds = time.process_time() - start
    counted = {packet.__name__ for packet in flop_registry}
    names = [label.name for label in graph.labels]
    flops = dict[str, float]()
    for name, work in zip(names, graph.features.flops, strict=True):
        if name in counted:
            flops[name] = flops.get(name, 0.0) + float(work)
    memory = float(predict(graph, "zen5-2").memory().total)
    kept = tuple(name for name in names if name not in _NO_WORK)
    return Run(attempt, "", False, kept, flops, memory, seconds, tuple(graph.notes))
