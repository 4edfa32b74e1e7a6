"""Classes of operations: kernels that share a fit, with all that times them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.fitting import InContext
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice
from perfkit.platform.kernel_times import ClassifiedKernels, LoneModel, find_lone_model
from perfkit.platform.machine import ANY
from perfkit.platform.platform import Platform
from perfkit.workloads.graph import Graph
from perfkit.workloads.vocabulary import pick_attention


class KernelClass(NamedTuple):
    """A kernel in a number format.

    Parameters
    ----------
    kind, variant, dtype : str
        See `perfkit.workloads.graph.Operation`; ``dtype`` is the format.
    """

    kind: str
    variant: str
    dtype: str


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
    check_choice("dtype", dtype, platform.device.peaks)
    numbers: dict[KernelClass, int] = {}
    of_operation = []
    for graph in graphs:
        if graph.dtypes:
            kernel_classes, of_graph = _list_with_formats(graph, platform, dtype)
        else:
            kernel_classes = []
            for operation_class in graph.classes.distinct:
                kind, variant, _ = operation_class
                kernel_classes.append(KernelClass(kind, variant, dtype))
            of_graph = graph.classes.of_operation
        if platform.device.kind != "cpu":
            kernel_classes = _name_attention(kernel_classes, of_graph, graph, platform)
        numbers_of_graph = []
        for kernel_class in kernel_classes:
            numbers_of_graph.append(numbers.setdefault(kernel_class, len(numbers)))
        of_operation.append(np.array(numbers_of_graph, dtype=np.intp)[of_graph])
    has_context = knows_family(platform, graphs[0].family)
    models = _find_models(platform, tuple(numbers), has_context=has_context)
    has_configurations = bool(graphs[0].columns) or graphs[0].repeats is not None
    dimensions = 2 if has_configurations else 1
    return ClassifiedOperations(models, np.concatenate(of_operation), dimensions)


def _list_with_formats(
    graph: Graph, platform: Platform, dtype: str
) -> tuple[list[KernelClass], np.ndarray]:
    """Kernel classes of a graph whose operations have number formats of their own, and which of
    them each operation has.

    Attention over heads of another width is listed apart, as it may run another kernel.
    """
    widths = graph.column("k").reshape(len(graph), -1)[:, 0].tolist()
    numbers: dict[tuple[KernelClass, float], int] = {}
    of_operation = []
    for label, own, width in zip(graph.labels, graph.dtypes, widths, strict=True):
        known = own if own in platform.device.peaks else dtype
        kernel_class = KernelClass(label.kind, label.variant, known)
        head_width = width if label.kind == "attention" else 0.0
        of_operation.append(numbers.setdefault((kernel_class, head_width), len(numbers)))
    return [kernel_class for kernel_class, _ in numbers], np.array(of_operation, dtype=np.intp)


def _name_attention(
    kernel_classes: list[KernelClass], of_operation: np.ndarray, graph: Graph, platform: Platform
) -> list[KernelClass]:
    """Say which kernel attention runs: the named one, if the device has it, else the one PyTorch
    chooses for the width of its heads."""
    if not any(kernel_class.kind == "attention" for kernel_class in kernel_classes):
        return kernel_classes
    capability = platform.device.capability.value if platform.device.capability else 0.0
    named_classes = []
    for number, kernel_class in enumerate(kernel_classes):
        if kernel_class.kind == "attention":
            first = int(np.argmax(of_operation == number))
            width = float(graph.column("k")[first].flat[0])
            half = DTYPES[kernel_class.dtype] <= 2
            available = pick_attention(width, width, half=half, capability=capability)
            phase, _, kernel = kernel_class.variant.partition(".")
            if kernel != "triton" and kernel not in available:
                kernel = available[0] if available else "efficient"
            kernel_class = kernel_class._replace(variant=f"{phase}.{kernel}")
        named_classes.append(kernel_class)
    return named_classes


def knows_family(platform: Platform, family: str) -> bool:
    """Whether what iterations add holds for workloads of a family: on a GPU, it was fitted to
    some."""
    if platform.device.kind == "cpu" or not family:
        return True
    iterations = platform.context.iterations
    return family in iterations or ANY in iterations


def _find_models(
    platform: Platform, kernel_classes: tuple[KernelClass, ...], *, has_context: bool
) -> tuple[ClassModel, ...]:
    """What times these classes, and inside iterations only if it `has_context`; looked up once for
    each platform."""
    models = []
    for kernel_class in kernel_classes:
        key = (kernel_class, has_context)
        if key not in platform.memo:
            platform.memo[key] = _find_model(platform, kernel_class, has_context=has_context)
        models.append(platform.memo[key])
    return tuple(models)


def _find_model(platform: Platform, kernel_class: KernelClass, *, has_context: bool) -> ClassModel:
    """What times one class."""
    kind, variant, dtype = kernel_class
    alone = find_lone_model(platform, kind, variant, dtype)
    context = None
    if has_context:
        context = platform.context.find(kind, variant.replace("_last", ""), dtype)
    if context is None:
        is_assumed = alone.fit is None or alone.fit.kind == "assumed"
    else:
        is_assumed = context.kind == "assumed"
    return ClassModel(
        **vars(alone),
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
