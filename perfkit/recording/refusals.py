"""What a capture refuses, and the line of the program that is named for it."""

import inspect
import linecache
import operator
import re
import sys
import traceback
import weakref
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch._subclasses import fake_tensor

#: Errors of fake tensors when code needs a value, or a size that depends on values.
VALUE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
#: Largest whole number that a computed number counts as [-].
MOST_COUNTED = 100_000
#: Folders of PyTorch and perfkit.
LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["perfkit"])
)
#: Folder of Python's own library.
_PYTHON = str(Path(traceback.__file__).parent)

#: Messages of `refuse`: {0} is the line of the step, {1} the operation.
NEEDED = (
    "capture computes no values, and the step needs one in {0}; sizes and branches may depend on whole numbers that "
    "are passed, such as indices and lengths (of 16,777,216 at most), and on small tensors that are filled or drawn (of "
    "1,048,576 numbers at most); otherwise use "
    "torch.where or fixed sizes, or capture each branch as a step of its own"
)
_UNTOLD = "capture computes no values, and {1} in {0} has no rule for fake tensors; add torch.library.register_fake"
_NO_RULE = (
    "capture computes no values, and an operation in {0} has no rule for fake tensors of this kind, such as sparse ones; "
    "use dense tensors, or add torch.library.register_fake"
)
#: What PyTorch says of tensors that fake tensors cannot follow.
_NO_RULE_SAID = ("Cannot access storage of",)
#: What PyTorch says of an operation of the user without a rule, with its name.
_UNTOLD_SAID = re.compile(r"no fake impl registered for <CustomOpDef\(([^)]*)\)>")
#: What is said of a sparse tensor that is made of a dense one.
_TO_SPARSE = (
    "capture computes no values, and how many numbers of a sparse tensor are not zero is one, in {0}; use the dense "
    "tensor, or make the sparse one of its indices and values, as by torch.sparse_coo_tensor, before pk.capture"
)
#: Operations that make one.
_MAKING_SPARSE = ("_to_sparse", "to_sparse")
NESTED = (
    "nested tensors, whose rows have lengths of their own, are not captured, in {0}; pad them to one length, or pack "
    "their rows into one tensor, as variable-length attention takes them"
)
#: What PyTorch says where a fake tensor is nested.
_NESTED_SAID = ("shape_env must not be None", "_nested_")
#: What is said of derivatives forward.
FORWARD_MODE = (
    "derivatives in forward mode, as of torch.func.jvp, jacfwd and forward_ad, leave out products with zeros, which "
    "a capture cannot tell from others, in {0}; use reverse mode: torch.func.vjp, jacrev or backward"
)
#: What is said of a step that takes arguments; {0} is what it is called, {1} are their names.
ARGUMENTS = (
    "the step {0} takes the arguments {1}, and a step takes none; make them in make_step and let the step use them, "
    "as in: return lambda: {0}({1})"
)
#: What is said of FullyShardedDataParallel.
_FIRST_FSDP = (
    "FullyShardedDataParallel, the first version of FSDP, is not captured, in {0}; use "
    "torch.distributed.fsdp.fully_shard, which sends the same bytes"
)
#: What PyTorch says where it needs a GPU, and what is said of it.
_JOINED_ON_CPU = (
    "PyTorch has SyncBatchNorm on GPUs alone, in {0}; capture with device='cuda', or with BatchNorm, which joins no "
    "statistics of ranks"
)
_WITHOUT_GPU = {
    "FSDP needs a non-CPU accelerator device": _FIRST_FSDP,
    "FSDP does not support CPU only execution": _FIRST_FSDP,
    "FlexAttention does not support backward on CPU": (
        "flex_attention has no backward pass on a CPU, in {0}; capture with device='cuda', or use "
        "torch.nn.functional.scaled_dot_product_attention, with is_causal=True or a mask"
    ),
    "SyncBatchNorm expected input tensor to be on": _JOINED_ON_CPU,
    "SyncBatchNorm layers only work with GPU modules": _JOINED_ON_CPU,
    "type torch.cuda.": (
        "types such as torch.cuda.FloatTensor need a GPU, and a capture has none, in {0}; name the device instead, as in "
        "torch.empty(4, device='cuda')"
    ),
}
_NO_GPU = (
    "the step asks in {0} for what only a GPU can answer, and a capture has none; leave this call out, as it does not "
    "train, and capture again"
)
_NO_GPU_SAID = (
    "Torch not compiled with CUDA enabled",
    "PyTorch was compiled without CUDA support",
    "without ATen_cuda library",
    "Found no NVIDIA driver",
    "has no attribute '_cuda_",
)
PROCESSES = (
    "the step starts another process in {0}, and capture follows only this one; give the step of one rank, and the "
    "number of ranks as ranks="
)
#: What is said of threads that the step starts; {0} is the line that starts them.
OTHER_THREADS = (
    "the step runs PyTorch in other threads, started in {0}; capture follows one thread, so that their work is not in "
    "the graph"
)
SHARED_WITH_THREADS = (
    "the step works with its tensors in another thread, started in {0}, and capture follows one thread; let the step do "
    "this work itself"
)
OTHER_PROGRAM = "the step runs another program in {0}; capture follows this process alone, so that its work is not in the graph"
OFFLOADED = (
    "CPUOffloadPolicy keeps and updates weights on the host, and capture follows a single device, in {0}; leave "
    "offload_policy out: copies between host and device and the host's update are then not in the graph"
)
#: What is said of a step that begins a process group of another size.
GROUP_SIZE = "the step begins a process group of {0} ranks, and ranks is {1}; give ranks={0}"


def find_line(frames: Any = None) -> str:
    """The innermost line outside of PyTorch, perfkit and Python's own library, of these frames or of
    the callers."""
    line = "a place that could not be found"
    for frame in frames or traceback.extract_stack():
        is_library = frame.filename.startswith((*LIBRARIES, "<"))
        if frame.filename.startswith(_PYTHON) and "site-packages" not in frame.filename:
            is_library = True
        is_doctest = "<doctest" in frame.filename
        if not is_library or is_doctest:
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            line = f'{name_file(frame.filename)}, line {frame.lineno}: "{code}"'
        # code that was given to exec; Python makes such methods with names of its own
        elif frame.filename == "<string>" and not frame.name.startswith("__"):
            line = f"{frame.name} in {frame.filename}, line {frame.lineno}"
    return line


def name_file(path: str) -> str:
    """A file of a program as messages name it; Jupyter keeps each cell in a file with a name of its own.

    Examples
    --------
    >>> name_file("ipykernel_4711/123456.py"), name_file("train.py")
    ('a cell of this notebook', 'train.py')
    """
    if Path(path).parent.name.startswith("ipykernel_"):
        return "a cell of this notebook"
    return path


def find_line_of_program() -> str:
    """The innermost line of the callers outside of PyTorch, perfkit and Python's own library."""
    return find_line(traceback.extract_stack())


class Refused(ValueError):
    """What a capture does not follow; it names the line, the reason and a way out."""


def refuse(text: str, frames: Any = None, cause: Any = None) -> NoReturn:
    """Raise an error that names the innermost line outside of PyTorch and perfkit."""
    operation = getattr(cause, "func", "")
    raise Refused(text.format(find_line(frames), operation)) from cause


def check_step(step: Any) -> None:
    """Refuse what is no step, and a step that takes arguments.

    Parameters
    ----------
    step : object
        What `make_step` returned.

    Raises
    ------
    ValueError
        For what cannot be called, and for a callable that needs arguments.
    """
    if not callable(step):
        raise ValueError(
            f"make_step returned {step!r}; it must return the step, a callable without arguments"
        )
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # what is not written in Python may tell nothing
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind not in optional
    ]
    if needed:
        name = getattr(step, "__name__", type(step).__name__)
        name = "step" if name == "<lambda>" else name
        raise ValueError(ARGUMENTS.format(name, ", ".join(needed)))


def explain(error: Exception) -> str | None:
    """What to say instead of an error of PyTorch that comes from the capture; None for others."""
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        name = str(error.func)
        if any(part in name for part in _NESTED_SAID):
            return NESTED
        if any(f"aten.{part}" in name for part in _MAKING_SPARSE):
            return _TO_SPARSE
        return _UNTOLD
    if isinstance(error, VALUE_ERRORS):
        return NEEDED
    message = str(error)
    for part, text in _WITHOUT_GPU.items():
        if part in message:
            return text
    if any(part in message for part in _NO_GPU_SAID):
        return _NO_GPU
    if isinstance(error, AssertionError) and any(part in message for part in _NESTED_SAID):
        return NESTED
    untold = _UNTOLD_SAID.search(message)
    if untold is not None:
        return _UNTOLD.replace("{1}", untold[1])
    if isinstance(error, NotImplementedError | RuntimeError):
        has_no_rule = any(part in message for part in _NO_RULE_SAID)
        return _NO_RULE if has_no_rule else None
    # PyTorch was given a computed number as a size
    if isinstance(error, TypeError | IndexError) and Unknown.__name__ in message:
        return NEEDED
    return None


# -- numbers that were not computed
# --------------------------------------------------------------------------------


class Unknown(float):
    """A number that was not computed. A step may add it up, compare and print it; what it compares
    with is noted, so that further calls of the step tell whether anything depends on it.

    Parameters
    ----------
    number : float
        What it counts as in this call of the step [-].
    trail : Trail
        The call in which it was computed; it receives the numbers that it is compared with.
    """

    trail: Any
    _latest: Any = None  # the trail of the number that was made last

    def __new__(cls, number: float, trail: Any = None) -> Self:
        """A number that counts as this one; without a trail it was made of others, as by Python's
        `statistics`, and has that of the last one."""
        made = super().__new__(cls, number)
        if trail is None:
            trail = Unknown._latest()
        else:
            Unknown._latest = weakref.ref(trail)
        made.trail = trail
        return made

    def _decide(self, *_: Any, **__: Any) -> NoReturn:
        refuse(NEEDED)

    def _find_later(self, other: Any) -> Any:
        """The later one of the calls in which this number and another one were computed."""
        if isinstance(other, Unknown) and other.trail.order > self.trail.order:
            return other.trail
        return self.trail

    def _combine(self, *others: Any) -> "Unknown":
        later = self._find_later(others[0] if others else None)
        return Unknown(float(self), later)

    def __deepcopy__(self, _: Any) -> "Unknown":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In a file it is a plain number."""
        return float, (float(self),)

    def _compare(self, compare: Callable[[float, float], bool], other: Any) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented
        if not isinstance(other, Unknown):
            self.trail.bounds.append(float(other))
        elif other.trail is not self.trail:  # the best one so far
            if compare in (operator.eq, operator.ne):
                return compare is operator.ne
            return bool(self._find_later(other).keep_better(find_line()))
        return compare(float(self), float(other))

    def __bool__(self) -> bool:
        return self._compare(operator.ne, 0.0)

    def __round__(self, digits: Any = None) -> Any:
        return int(self) if digits is None else self._combine()

    def __int__(self) -> int:
        """A whole number, small enough to count up to."""
        return int(max(-MOST_COUNTED, min(MOST_COUNTED, float(self))))

    def __format__(self, text: str) -> str:
        if text.endswith("d"):  # a count of computed things
            return format(1, text)
        return float.__format__(self, text)

    __lt__ = partialmethod(_compare, operator.lt)
    __le__ = partialmethod(_compare, operator.le)
    __gt__ = partialmethod(_compare, operator.gt)
    __ge__ = partialmethod(_compare, operator.ge)
    __eq__ = partialmethod(_compare, operator.eq)
    __ne__ = partialmethod(_compare, operator.ne)
    __index__ = _decide
    __add__ = _combine
    __radd__ = _combine
    __sub__ = _combine
    __rsub__ = _combine
    __mul__ = _combine
    __rmul__ = _combine
    __truediv__ = _combine
    __rtruediv__ = _combine
    __neg__ = _combine
    __abs__ = _combine
    __pow__ = _combine
    __rpow__ = _combine
    __hash__ = float.__hash__


class UnknownIndex(int):
    """The number of a chosen alternative, such as a place in a row, which was not computed. A step may
    index by it; what it compares with is noted, as for `Unknown`.

    Parameters
    ----------
    number : int
        What it counts as in this call of the step [-].
    trail : Trail
        The call in which it was computed.
    """

    trail: Any

    def __new__(cls, number: int, trail: Any) -> Self:
        """A number that counts as this one."""
        made = super().__new__(cls, number)
        made.trail = trail
        return made

    def _compare(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        if isinstance(other, int | float) and not isinstance(other, UnknownIndex):
            self.trail.bounds.append(float(other))
        return compare(int(self), other)

    def _combine(self, combine: Callable[[Any, Any], Any], other: Any) -> Any:
        made = combine(int(self), other)
        return UnknownIndex(made, self.trail) if type(made) is int else made

    def _combine_from_right(self, combine: Callable[[Any, Any], Any], other: Any) -> Any:
        made = combine(other, int(self))
        return UnknownIndex(made, self.trail) if type(made) is int else made

    __lt__ = partialmethod(_compare, operator.lt)
    __le__ = partialmethod(_compare, operator.le)
    __gt__ = partialmethod(_compare, operator.gt)
    __ge__ = partialmethod(_compare, operator.ge)
    __eq__ = partialmethod(_compare, operator.eq)
    __ne__ = partialmethod(_compare, operator.ne)
    __add__ = partialmethod(_combine, operator.add)
    __sub__ = partialmethod(_combine, operator.sub)
    __mul__ = partialmethod(_combine, operator.mul)
    __floordiv__ = partialmethod(_combine, operator.floordiv)
    __mod__ = partialmethod(_combine, operator.mod)
    __radd__ = partialmethod(_combine_from_right, operator.add)
    __rsub__ = partialmethod(_combine_from_right, operator.sub)
    __rmul__ = partialmethod(_combine_from_right, operator.mul)
    __hash__ = int.__hash__


class UnknownArray(np.ndarray[Any, Any]):
    """Numbers that were not computed: compiled code may match or sort them, and a step may log them.
    If it does, they are others in further calls of the step, which tell whether anything depends on
    them.

    `trail` is the call of the step that made the array, and `line` says where.
    """

    trail: Any = None
    line: str = ""

    def __array_finalize__(self, source: Any) -> None:
        """Views and results remember where the array was made."""
        self.trail = getattr(source, "trail", None)
        self.line = getattr(source, "line", "")

    def note_use(self) -> None:
        """Note that the step uses the numbers."""
        if self.trail is not None:
            self.trail.read = self.trail.read or self.line

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute with the numbers that the array holds in this call."""
        self.note_use()
        plain = [
            each.view(np.ndarray) if isinstance(each, UnknownArray) else each for each in inputs
        ]
        if "out" in kwargs:
            kwargs["out"] = tuple(
                each.view(np.ndarray) if isinstance(each, UnknownArray) else each
                for each in kwargs["out"]
            )
        result = getattr(ufunc, method)(*plain, **kwargs)
        if not isinstance(result, np.ndarray):
            return result
        array = result.view(UnknownArray)
        array.trail, array.line = self.trail, self.line
        return array

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of NumPy."""
        self.note_use()
        return super().__array_function__(func, types, args, kwargs)


def _note_and_call(name: str) -> Callable[..., Any]:
    """A method of arrays that notes that the step uses the numbers."""
    method = getattr(np.ndarray, name)

    def call(array: UnknownArray, *args: Any, **kwargs: Any) -> Any:
        array.note_use()
        return method(array, *args, **kwargs)

    return call


#: Methods of arrays that hand out numbers, or depend on them, without a function of NumPy.
for _name in [
    "__getitem__",
    "__iter__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "item",
    "tolist",
    "argmax",
    "argmin",
    "argsort",
    "nonzero",
    "searchsorted",
    "sort",
    "tobytes",
]:
    setattr(UnknownArray, _name, _note_and_call(_name))


# -- who calls
# ----------------------------------------------------------------------------------------------------------


def find_caller(name: str) -> bool:
    """Whether code in a file with this ending is among the callers, up to the call of the autograd
    engine."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith((name, "autograd/graph.py")):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_filename.endswith(name))


def is_called_by_compiled_code() -> bool:
    """Whether `torch.compile` would compile what calls this: the nearest of PyTorch's own wrappers
    compiles.

    `torch.compiler.disable` has a wrapper in the same file. Once anything was compiled, PyTorch
    wraps the steps of `SparseAdam` and `LBFGS` in it, for the rest of the process.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("autograd/graph.py"):
            return False
        if code.co_filename.endswith("_dynamo/eval_frame.py"):
            return not code.co_qualname.startswith("DisableContext.")
        frame = frame.f_back
    return False
