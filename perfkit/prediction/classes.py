"""Classes of operations: kernels that share a fit, with all that times them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.fitting import InContext, KernelModel
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import Array, check_choice
from perfkit.platform.kernels import TENSOR, find_layout_passes, find_stand_in
from perfkit.platform.machine import ANY
from perfkit.platform.platform import Platform
from perfkit.workloads.graph import Graph
from perfkit.workloads.vocabulary import pick_attention

#: Bytes that a batch normalization moves, relative to its operands [-]; docs/formulas.md, table
#: 2.2.
OPERAND_PASSES = {"native_batch_norm": 1.5, "native_batch_norm_backward": 5.0 / 3.0}
#: Kernels that read rows of a table and write them, by kind and variant.
_ROW_UPDATES = {("embedding_backward", "fused")}
#: Operations that are not kernels.
_WITHOUT_KERNEL = ("collective", "host")


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
class ClassModel:
    """What times the operations of one class.

    Parameters
    ----------
    kind, variant, dtype : str
        The class, see `KernelClass`.
    fit : KernelModel or None
        Fit of the lone kernel; None where nothing like it was measured.
    context : InContext or None
        Fit of such kernels inside iterations, if there is one.
    in_iteration : InIteration
        Its numbers, or those that leave a kernel as it is.
    is_assumed : bool
        Whether the time rests on an assumption or another machine alone.
    peak : float
        Arithmetic rate of the device in this format [FLOP/s].
    launch : float
        Launch of a kernel on a device [s].
    operand_passes, row_passes : float
        How often a kernel under a roofline moves its operands, and the embedding rows that it
        touches [-].
    layout_passes : float
        How often it moves its operands besides, into the layout of tensor cores and back [-].
    counts_products : bool
        Whether it is a convolution that is timed as matrix products, one for each gradient.
    tensor_core_itemsize : float
        Bytes of a number of a product on tensor cores, which needs aligned rows; 0 for all other
        operations [B].
    """

    kind: str
    variant: str
    dtype: str
    fit: KernelModel | None
    context: InContext | None
    in_iteration: InIteration
    is_assumed: bool
    peak: float
    launch: float
    operand_passes: float
    row_passes: float
    layout_passes: float
    counts_products: bool
    tensor_core_itemsize: float

    @cached_property
    def is_kernel(self) -> bool:
        """Whether its operations are kernels; others take no time here."""
        return self.kind not in _WITHOUT_KERNEL

    @cached_property
    def is_fitted_in_iterations(self) -> bool:
        """Whether iterations in this number format were fitted, so that their spread is known."""
        if self.context is None:
            return False
        return not self.context.dtypes or self.dtype in self.context.dtypes

    @cached_property
    def spread_alone(self) -> float:
        """Spread of the logarithm of the time of the lone kernel [-]."""
        if self.fit is not None:
            return self.fit.spread
        return 0.0 if self.kind == "host" else 1.0

    @cached_property
    def fixed_time(self) -> float:
        """What one of its kernels takes in an iteration, whatever its size [s]."""
        return self.in_iteration.scale * self.launch + self.in_iteration.launch


class FittedOperations(NamedTuple):
    """Operations that one fit times.

    Parameters
    ----------
    fit : KernelModel or None
        The fit; None for operations without one.
    operations : array of int
        Their positions [-].
    counts_products : bool
        Whether they are convolutions that are timed as matrix products.
    """

    fit: KernelModel | None
    operations: np.ndarray
    counts_products: bool


@dataclass(frozen=True, eq=False)
class ClassifiedOperations:
    """Operations of some graphs, one graph after the other, with the class of each.

    Parameters
    ----------
    models : tuple of ClassModel
        What times each class.
    of_operation : array of int
        Position of the class of each operation [-].
    dimensions : int
        Axes of the arrays of their sizes: 2 with configurations, else 1 [-].
    """

    models: tuple[ClassModel, ...]
    of_operation: np.ndarray
    dimensions: int

    def __len__(self) -> int:
        return len(self.of_operation)

    @cached_property
    def by_fit(self) -> list[FittedOperations]:
        """Kernels by the fit that times them; classes may share one."""
        classes_of_fit: dict[int, list[int]] = {}
        for number, model in enumerate(self.models):
            if model.is_kernel:
                classes_of_fit.setdefault(id(model.fit), []).append(number)
        fit_of_class = np.full(len(self.models), -1)
        for classes in classes_of_fit.values():
            fit_of_class[classes] = classes[0]
        fit_of_operation = fit_of_class[self.of_operation]
        by_fit = []
        for classes in classes_of_fit.values():
            operations = np.flatnonzero(fit_of_operation == classes[0])
            if len(operations):
                model = self.models[classes[0]]
                by_fit.append(FittedOperations(model.fit, operations, model.counts_products))
        return by_fit

    def repeat(self, numbers: Sequence[float]) -> Array:
        """The number of its class for each operation; with configurations, in an array of one
        column."""
        values = np.array(numbers, dtype=float)[self.of_operation]
        if self.dimensions > 1:
            return values[:, None]
        return values


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
    has_context = _knows_family(platform, graphs[0].family)
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


def _knows_family(platform: Platform, family: str) -> bool:
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
    on_device = platform.device.kind != "cpu"
    fit = find_stand_in(platform.kernels, kind, variant=variant, dtype=dtype)
    context = None
    if has_context:
        context = platform.context.find(kind, variant.replace("_last", ""), dtype)
    fit_is_assumed = fit is None or fit.kind == "assumed"
    is_assumed = fit_is_assumed if context is None else context.kind == "assumed"
    launch = 0.0
    if fit is not None and on_device:
        launch = fit.get("launch", 0.0)
    updates_rows = kind == "embedding_update" or (kind, variant) in _ROW_UPDATES
    layout_passes = 0.0
    if fit is not None and fit.kind == "assumed":
        layout_passes = find_layout_passes(platform, kind, variant, dtype)
    needs_aligned_rows = on_device and kind in ("gemm", "bmm") and dtype in TENSOR
    return ClassModel(
        kind=kind,
        variant=variant,
        dtype=dtype,
        fit=fit,
        context=context,
        in_iteration=InIteration.from_fit(context),
        is_assumed=is_assumed,
        peak=platform.device.peaks[dtype].value,
        launch=launch,
        operand_passes=OPERAND_PASSES.get(variant.removeprefix("fused."), 1.0),
        row_passes=2.0 if updates_rows else 1.0,
        layout_passes=layout_passes,
        counts_products=fit_is_assumed and kind == "convolution",
        tensor_core_itemsize=DTYPES[dtype] if needs_aligned_rows else 0.0,
    )


def list_attention(graph: Graph, platform: Platform) -> list[str]:
    """Names of the fused kernels of attention that a graph runs on a GPU."""
    names = set[str]()
    for model in classify([graph], platform, graph.dtype).models:
        if model.kind == "attention":
            names.add(model.variant.partition(".")[2])
    return sorted(names - {""})
