"""Classes of operations: kernels that share a fit, with all that times them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.fitting import InContext
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice
from perfkit.platform.kernel_times import ClassifiedKernels, LoneModel, find_lone_model
from perfkit.platform.kernels import SIGMA_OTHER_CODE, is_other_code
from perfkit.platform.machine import ANY
from perfkit.platform.platform import Platform
from perfkit.workloads.graph import Graph, OperationClass, OperationClasses
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.vocabulary import pick_attention

#: Widest heads of FlashAttention-3, as its benchmarks run them (arXiv:2407.08608, figure 5), and of
#: cuDNN's kernel, while PyTorch chooses neither for more than 128 [-].
_WIDEST_FLASH3 = 256.0
#: Compute capabilities on which they run [-].
_FLASH3_ON = (9.0, 10.0)


class KernelClass(NamedTuple):
    """A kernel in a number format.

    Parameters
    ----------
    kind, variant, dtype : str
        See `perfkit.workloads.graph.Operation`; ``dtype`` is the format.
    head_width : float
        Numbers in a head of attention, which decide what kernel runs; 0 for other kernels [-].
    """

    kind: str
    variant: str
    dtype: str
    head_width: float = 0.0


class InIteration(NamedTuple):
    """What an iteration makes of a lone kernel, see `perfkit.models.kernels.in_context`.

    Parameters
    ----------
    scale, cold_scale : float
        Factors on the time with near operands, and on what distant ones add [-].
    launch : float
        Extra time of a call [s].
    page_walks : float
        Time of one page walk [s].
    """

    scale: float = 1.0
    cold_scale: float = 1.0
    launch: float = 0.0
    page_walks: float = 0.0

    @classmethod
    def from_fit(cls, context: InContext | None) -> "InIteration":
        """Numbers of a fit, and those that leave a kernel as it is where there is none."""
        if context is None:
            return cls()
        return cls(**context)


@dataclass(frozen=True, eq=False)
class ClassModel(LoneModel):
    """What times the operations of one class inside iterations; what times them alone is that of
    the platform.

    Parameters
    ----------
    context : InContext or None
        Fit of such kernels inside iterations, if there is one.
    in_iteration : InIteration
        Its numbers, or those that leave a kernel as it is.
    is_assumed : bool
        Whether the time rests on an assumption or another machine alone.
    """

    context: InContext | None
    in_iteration: InIteration
    is_assumed: bool

    @cached_property
    def is_fitted_in_iterations(self) -> bool:
        """Whether iterations in this number format were fitted, so that their spread is known."""
        if self.context is None:
            return False
        return not self.context.dtypes or self.dtype in self.context.dtypes

    @property
    def fixed_time(self) -> float:
        """What one of its kernels takes in an iteration, whatever its size [s]."""
        return self.in_iteration.scale * self.launch + self.in_iteration.launch


@dataclass(frozen=True, eq=False)
class ClassifiedOperations(ClassifiedKernels):
    """Operations of some graphs, one graph after the other, with the class of each.

    Parameters
    ----------
    models : tuple of ClassModel
        What times each class.
    """

    models: tuple[ClassModel, ...]


def check_format(platform: Platform, dtype: str) -> None:
    """Check that a platform has a peak for a number format; errors list those that workloads train in.

    Parameters
    ----------
    platform : Platform
        Where operations run.
    dtype : str
        Number format.

    Raises
    ------
    ValueError
        For a format that the platform has no peak for.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> check_format(load_platform("a100-sxm-8"), "fp8")
    Traceback (most recent call last):
    ...
    ValueError: on a100-sxm-8 dtype is 'fp8'; known are fp64, fp32, tf32, bf16, fp16
    """
    if dtype in platform.device.peaks:
        return
    trained = [name for name in platform.device.peaks if name in (*ITEMSIZE, "fp8")]
    check_choice(f"on {platform.name} dtype", dtype, trained)


def classify(graphs: Sequence[Graph], platform: Platform, dtype: str) -> ClassifiedOperations:
    """Find the class of every operation, and what times each class.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    platform : Platform
        Where they do.
    dtype : str
        Number format of operations without their own, or whose own has no known peak.

    Returns
    -------
    operations : ClassifiedOperations
        All operations.

    Raises
    ------
    ValueError
        For a format that the platform has no peak for.
    """
    check_format(platform, dtype)
    if any(graph.dtypes for graph in graphs):
        kernel_classes, class_of_operation = _list_with_formats(graphs, platform, dtype)
    else:
        classes = join_classes(graphs)
        class_of_operation = classes.of_operation
        kernel_classes = []
        for kind, variant, phase in classes.distinct:
            head_width = 0.0
            if kind == "attention":
                head_width = _find_head_width(graphs, OperationClass(kind, variant, phase))
            kernel_classes.append(KernelClass(kind, variant, dtype, head_width))

    has_context = knows_family(platform, graphs[0].family)
    models: list[ClassModel] = []
    numbers: dict[tuple[str, str, str], int] = {}
    numbers_of_classes = []
    for kernel_class in kernel_classes:
        # looked up once for each platform
        key = (kernel_class, has_context)
        if key not in platform.memo:
            platform.memo[key] = _find_model(platform, kernel_class, has_context=has_context)
        model = platform.memo[key]
        # calls of two phases, and heads of two widths, may run one kernel
        number = numbers.setdefault((model.kind, model.variant, model.dtype), len(models))
        if number == len(models):
            models.append(model)
        numbers_of_classes.append(number)
    of_operation = np.array(numbers_of_classes, dtype=np.intp)[class_of_operation]
    has_configurations = bool(graphs[0].columns) or graphs[0].repeats is not None
    dimensions = 2 if has_configurations else 1
    return ClassifiedOperations(tuple(models), of_operation, dimensions)


def join_classes(graphs: Sequence[Graph]) -> OperationClasses:
    """The operation classes of some graphs, one graph after the other; equal ones are one."""
    if len(graphs) == 1:
        return graphs[0].classes
    numbers: dict[OperationClass, int] = {}
    of_operation = []
    for graph in graphs:
        numbers_of_graph = []
        for operation_class in graph.classes.distinct:
            numbers_of_graph.append(numbers.setdefault(operation_class, len(numbers)))
        of_operation.append(np.array(numbers_of_graph, dtype=np.intp)[graph.classes.of_operation])
    return OperationClasses(list(numbers), np.concatenate(of_operation))


def _find_head_width(graphs: Sequence[Graph], operation_class: OperationClass) -> float:
    """Numbers in a head of the first operation of a class of attention [-]."""
    for graph in graphs:
        if operation_class in graph.classes.distinct:
            number = graph.classes.distinct.index(operation_class)
            first = int(np.argmax(graph.classes.of_operation == number))
            return float(graph.column("k")[first].flat[0])
    raise ValueError(f"no graph has the class {operation_class}")


def _list_with_formats(
    graphs: Sequence[Graph], platform: Platform, dtype: str
) -> tuple[list[KernelClass], np.ndarray]:
    """Kernel classes of graphs whose operations have number formats of their own, and which of them
    each operation has."""
    numbers: dict[KernelClass, int] = {}
    of_operation = []
    for graph in graphs:
        widths = graph.column("k").reshape(len(graph), -1)[:, 0].tolist()
        formats = graph.dtypes or (dtype,) * len(graph)
        for label, own, width in zip(graph.labels, formats, widths, strict=True):
            known = own if own in platform.device.peaks else dtype
            head_width = width if label.kind == "attention" else 0.0
            kernel_class = KernelClass(label.kind, label.variant, known, head_width)
            of_operation.append(numbers.setdefault(kernel_class, len(numbers)))
    return list(numbers), np.array(of_operation, dtype=np.intp)


def _name_attention(platform: Platform, kernel_class: KernelClass) -> str:
    """Variant of attention on a GPU: the named kernel, if the device has it, else the one PyTorch
    chooses for the width of its heads."""
    capability = platform.device.capability.value if platform.device.capability else 0.0
    width = kernel_class.head_width
    half = DTYPES[kernel_class.dtype] <= 2
    available = pick_attention(width, width, half=half, capability=capability)
    phase, _, kernel = kernel_class.variant.partition(".")
    runs_flash3 = half and capability in _FLASH3_ON and width <= _WIDEST_FLASH3
    if kernel == "flash3" and runs_flash3:
        return f"{phase}.{kernel}"
    if kernel != "triton" and kernel not in available:
        kernel = available[0] if available else "efficient"
    return f"{phase}.{kernel}"


def knows_family(platform: Platform, family: str) -> bool:
    """Whether what iterations add holds for workloads of a family: on a GPU, it was fitted to
    some."""
    if platform.device.kind == "cpu" or not family:
        return True
    iterations = platform.context.iterations
    return family in iterations or ANY in iterations


def _find_model(platform: Platform, kernel_class: KernelClass, *, has_context: bool) -> ClassModel:
    """What times one class."""
    kind, variant, dtype, _ = kernel_class
    if kind == "attention" and platform.device.kind != "cpu":
        variant = _name_attention(platform, kernel_class)
    alone = find_lone_model(platform, kind, variant, dtype)
    context = None
    if has_context:
        context = platform.context.find(kind, variant.replace("_last", ""), dtype)
    if context is not None and is_other_code(platform.kernels, kind, variant):
        # iterations tell nothing of code that did not run in them
        context = replace(context, spread=math.hypot(context.spread, SIGMA_OTHER_CODE))
    if context is None:
        is_assumed = alone.fit is None or alone.fit.kind == "assumed"
    else:
        is_assumed = context.kind == "assumed"
    return ClassModel(
        **{field.name: getattr(alone, field.name) for field in fields(alone)},
        context=context,
        in_iteration=InIteration.from_fit(context),
        is_assumed=is_assumed,
    )


def list_attention(graph: Graph, platform: Platform) -> list[str]:
    """Names of the fused kernels of attention that a graph runs on a GPU."""
    names = set[str]()
    for model in classify([graph], platform, graph.dtype).models:
        if model.kind == "attention":
            names.add(model.variant.partition(".")[2])
    return sorted(names - {""})
