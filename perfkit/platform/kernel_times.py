"""Times of kernels alone on a device: the one place where fits, rates and factors become seconds.

Questions to a platform, such as `Platform.gemm`, and predictions of iterations both call `time_alone`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Additive, KernelModel, LookupRoofline
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import Array, Values
from perfkit.platform.kernels import (
    TENSOR,
    check_scaled_products,
    find_layout_passes,
    find_stand_in,
    limit_compiled_cast,
    limit_expansion,
)
from perfkit.platform.lookup_kernels import check_hash
from perfkit.platform.machine import Machine

#: Bytes that a normalization moves, relative to its operands [-]; docs/formulas.md, table 2.2.
OPERAND_PASSES = {
    "native_batch_norm": 1.5,
    "native_batch_norm_backward": 5.0 / 3.0,
    "native_group_norm": 1.5,
    "native_group_norm_backward": 5.0 / 3.0,
}
#: Kernels that read rows of a table and write them, by kind and variant.
_ROW_UPDATES = {("embedding_backward", "fused")}
#: Operations that are not kernels.
_WITHOUT_KERNEL = ("collective", "host")
#: A Fourier transform whose variant is this many passes over its operands, as ``3_passes``.
_PASSES = "_passes"
#: Terms of operands that no cache holds.
DISTANT_TERMS = ("beyond_l2", "beyond_l3", "page_walks")
#: Sizes that are shared among the products of a convolution.
_SHARED_BY_PRODUCTS = ("flops", "nbytes", "beyond_l2", "beyond_l3")
#: Sizes that rooflines take besides their bytes, that say how many products a convolution is, and
#: that time a kernel without a fit.
_ROOFLINE_SIZES = ("flops", "peak", "bandwidth", "m", "n", "k", "rows")
_PRODUCT_SIZES = ("flops", "batch", "m", "n", "k")
#: Sizes of lookups that kernels wait for.
_LOOKUP_SIZES = (*_ROOFLINE_SIZES, "lookups", "dim", "hits")
_BARE_SIZES = ("flops", "nbytes", "row_bytes", "peak")


class UnalignedSlowdown(NamedTuple):
    """How much longer products take whose rows in memory are not aligned, on tensor cores.

    Parameters
    ----------
    of_4_bytes, of_16_bytes : float
        Factor on the time beyond the launch where rows are no multiple of 4 B, and of 16 B [-].
    spread : float
        Extra spread of the logarithm of the time [-].
    """

    of_4_bytes: float
    of_16_bytes: float
    spread: float


#: Slowdowns of single products, each from a compute capability on (0: unknown or older);
#: docs/formulas.md, table 2.4.
UNALIGNED = {
    0.0: UnalignedSlowdown(of_4_bytes=1.0, of_16_bytes=1.0, spread=0.7),
    8.0: UnalignedSlowdown(of_4_bytes=2.9, of_16_bytes=1.7, spread=0.5),
    9.0: UnalignedSlowdown(of_4_bytes=5.7, of_16_bytes=2.9, spread=0.3),
    10.0: UnalignedSlowdown(of_4_bytes=5.7, of_16_bytes=2.9, spread=0.7),
}

#: Those of batched products, alike; docs/formulas.md, table 2.4.
BATCHED_UNALIGNED = {
    0.0: UnalignedSlowdown(of_4_bytes=1.0, of_16_bytes=1.0, spread=0.7),
    8.0: UnalignedSlowdown(of_4_bytes=9.6, of_16_bytes=9.6, spread=0.84),
    8.6: UnalignedSlowdown(of_4_bytes=1.83, of_16_bytes=1.07, spread=0.5),
    9.0: UnalignedSlowdown(of_4_bytes=3.6, of_16_bytes=1.83, spread=0.3),
    10.0: UnalignedSlowdown(of_4_bytes=3.6, of_16_bytes=1.83, spread=0.7),
}
#: Bytes that rows of heads in memory must be a multiple of, and the share of the memory bandwidth at
#: which PyTorch copies queries, keys and values into wider tensors where they are not [-];
#: docs/formulas.md, table 2.4.
HEAD_ALIGNMENT, HEAD_COPIES = 16, 0.32


#: Sizes of kernels by name, one element of each array for each kernel: those of
#: `perfkit.models.kernels.TERMS` for sums of terms, where ``nbytes`` are the operands [B]; for
#: rooflines ``flops`` [FLOP], the ``traffic`` [B], the ``bandwidth`` [B/s] and the ``peak``
#: [FLOP/s]; for convolutions and for alignment ``batch``, ``m``, ``n`` and ``k``; and ``launches``
#: of kernels, 0 for a part of the one before [-].
KernelSizes = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class LoneModel:
    """What times the kernels of one class, alone on the device.

    Parameters
    ----------
    kind, variant, dtype : str
        The class, and the number format.
    fit : KernelModel or None
        Fit of the class; None where nothing like it was measured.
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
    head_itemsize : float
        Bytes of a number of a fused kernel of attention on a GPU, which needs aligned heads; 0 for
        all other operations [B].
    """

    kind: str
    variant: str
    dtype: str
    fit: KernelModel | None
    peak: float
    launch: float
    operand_passes: float
    row_passes: float
    layout_passes: float
    counts_products: bool
    tensor_core_itemsize: float
    head_itemsize: float

    @cached_property
    def is_kernel(self) -> bool:
        """Whether its operations are kernels; others take no time here."""
        return self.kind not in _WITHOUT_KERNEL

    @cached_property
    def spread_alone(self) -> float:
        """Spread of the logarithm of the time of the lone kernel [-]."""
        if self.fit is not None:
            return self.fit.spread
        return 0.0 if self.kind == "host" else 1.0


def find_lone_model(machine: Machine, kind: str, variant: str, dtype: str) -> LoneModel:
    """Find what times the kernels of one class: its fit, a stand-in, or none.

    Parameters
    ----------
    machine : Machine
        A platform.
    kind, variant : str
        The class, see `perfkit.workloads.graph.Operation`.
    dtype : str
        Number format, one of the device's peaks.

    Returns
    -------
    model : LoneModel
        What `time_alone` needs to know of the class.

    Raises
    ------
    ValueError
        For a product of a recipe of fp8 that the device does not have, and for hash tables where
        their kernels are not known.
    """
    check_scaled_products(machine.device, variant)
    check_hash(machine.kernels, machine.name, kind, variant)
    fit = find_stand_in(machine.kernels, kind, variant=variant, dtype=dtype)
    fit = limit_compiled_cast(fit, machine.device, variant)
    fit = limit_expansion(fit, machine.device, variant)
    return make_lone_model(machine, kind, variant, dtype, fit)


def make_lone_model(
    machine: Machine, kind: str, variant: str, dtype: str, fit: KernelModel | None
) -> LoneModel:
    """Take a fit for the kernels of one class, see `find_lone_model`."""
    on_device = machine.device.kind != "cpu"
    is_assumed = fit is None or fit.kind == "assumed"
    launch = 0.0
    if fit is not None and on_device:
        launch = fit.get("launch", 0.0)
    layout_passes = 0.0
    if fit is not None and is_assumed:
        layout_passes = find_layout_passes(machine, kind, variant, dtype)
    updates_rows = kind == "embedding_update" or (kind, variant) in _ROW_UPDATES
    needs_aligned_rows = on_device and kind in ("gemm", "bmm") and dtype in TENSOR
    needs_aligned_heads = on_device and kind == "attention"
    return LoneModel(
        kind=kind,
        variant=variant,
        dtype=dtype,
        fit=fit,
        peak=machine.device.peaks[dtype].value,
        launch=launch,
        operand_passes=_count_passes(kind, variant),
        row_passes=2.0 if updates_rows else 1.0,
        layout_passes=layout_passes,
        counts_products=is_assumed and kind == "convolution",
        tensor_core_itemsize=DTYPES[dtype] if needs_aligned_rows else 0.0,
        head_itemsize=DTYPES[dtype] if needs_aligned_heads else 0.0,
    )


def _count_passes(kind: str, variant: str) -> float:
    """How often a kernel under a roofline moves its operands [-]."""
    if kind == "fourier":
        return float(variant.removesuffix(_PASSES))
    return OPERAND_PASSES.get(variant.removeprefix("fused."), 1.0)


class FittedKernels(NamedTuple):
    """Kernels that one fit times.

    Parameters
    ----------
    fit : KernelModel or None
        The fit; None for kernels without one.
    members : array of int
        Their positions [-].
    counts_products : bool
        Whether they are convolutions that are timed as matrix products.
    """

    fit: KernelModel | None
    members: np.ndarray
    counts_products: bool


@dataclass(frozen=True, eq=False)
class ClassifiedKernels:
    """Kernels with the class of each.

    Parameters
    ----------
    models : tuple of LoneModel
        What times each class.
    of_operation : array of int
        Position of the class of each kernel [-].
    dimensions : int
        Axes of the arrays of their sizes: 2 with configurations, else 1 [-].
    """

    models: tuple[LoneModel, ...]
    of_operation: np.ndarray
    dimensions: int

    @cached_property
    def by_fit(self) -> list[FittedKernels]:
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
            members = np.flatnonzero(fit_of_operation == classes[0])
            if len(members):
                model = self.models[classes[0]]
                by_fit.append(FittedKernels(model.fit, members, model.counts_products))
        return by_fit

    def one_configuration(self, operations: int) -> tuple[int, ...]:
        """Shape of an array for so many operations that is equal in all configurations."""
        return (operations, 1) if self.dimensions > 1 else (operations,)

    def repeat(self, numbers: Sequence[float]) -> Array:
        """The number of its class for each kernel; with configurations, in an array of one
        column."""
        values = np.array(numbers, dtype=float)[self.of_operation]
        if self.dimensions > 1:
            return values[:, None]
        return values


class Traffic(NamedTuple):
    """Bytes that kernels move, and how fast.

    Parameters
    ----------
    nbytes, bandwidth : array
        [B], [B/s].
    """

    nbytes: Array
    bandwidth: Array


class UnalignedRows(NamedTuple):
    """Which products have rows in memory that are no multiple of what a kernel loads at once.

    Parameters
    ----------
    of_4_bytes, of_16_bytes : array of bool
        Whether rows are no multiple of 4 B, and of 16 B.
    """

    of_4_bytes: np.ndarray
    of_16_bytes: np.ndarray


class AlignedProducts(NamedTuple):
    """Products on tensor cores, which need aligned rows.

    Parameters
    ----------
    operations : array of int
        Their positions [-].
    is_unaligned : array of bool
        Whether rows of each are no multiple of 16 B.
    slowdown : array
        How many times as long each takes beyond its launch, because its rows are not aligned [-].
    """

    operations: np.ndarray
    is_unaligned: np.ndarray
    slowdown: Array


class IsolatedTimes(NamedTuple):
    """Times of lone kernels.

    Parameters
    ----------
    near, distant : array
        Time of each with all operands near, and what distant operands add [s].
    """

    near: Array
    distant: Array


def find_traffic(
    kernels: ClassifiedKernels,
    machine: Machine,
    operand_bytes: Array,
    row_bytes: Array,
    rows_beyond_l3: Array,
) -> Traffic:
    """Traffic of kernels under a roofline and its bandwidth; the last cache serves rows alone
    (formulas, table 3.2).

    Parameters
    ----------
    kernels : ClassifiedKernels
        The kernels.
    machine : Machine
        Where they run.
    operand_bytes : array
        Bytes of the operands of each, all from main memory [B].
    row_bytes, rows_beyond_l3 : array
        Bytes of the embedding rows that each touches, and of those that the last cache does not
        hold [B].

    Returns
    -------
    traffic : Traffic
        One element per kernel.
    """
    models = kernels.models
    main_bandwidth = machine.device.main_bandwidth
    cache_bandwidth = machine.device.cache_bandwidth
    operand_passes = kernels.repeat([model.operand_passes for model in models])
    row_passes = kernels.repeat([model.row_passes for model in models])
    of_operands = operand_passes * operand_bytes
    nbytes = of_operands + row_passes * row_bytes
    if cache_bandwidth is None or not row_bytes.any():
        return Traffic(nbytes, np.broadcast_to(main_bandwidth, nbytes.shape))
    from_memory = of_operands + row_passes * rows_beyond_l3
    bandwidth = find_mean_bandwidth(
        main_bandwidth, cache_bandwidth, from_memory, nbytes - from_memory
    )
    return Traffic(nbytes, bandwidth)


def find_hits(row_bytes: Array, from_memory: Array) -> Array:
    """Share of looked-up rows that the last cache has.

    Parameters
    ----------
    row_bytes, from_memory : array
        Bytes of rows that kernels look up, and of those that come from the main memory [B].

    Returns
    -------
    hits : array
        Zero for kernels that look up none [-].
    """
    hits = np.zeros(row_bytes.shape)
    np.divide(row_bytes - from_memory, row_bytes, out=hits, where=row_bytes > 0)
    return hits


def find_mean_bandwidth(
    main_bandwidth: float, cache_bandwidth: float, from_memory: Array, from_cache: Array
) -> Array:
    """Bandwidth of bytes of which a part comes from main memory and the rest from the last cache.

    Parameters
    ----------
    main_bandwidth, cache_bandwidth : float
        Bandwidth of each [B/s].
    from_memory, from_cache : array
        Bytes from each [B].

    Returns
    -------
    bandwidth : array
        That of the main memory where there are no bytes [B/s].
    """
    bandwidth = np.full(from_memory.shape, main_bandwidth)
    time_of_memory = from_memory / main_bandwidth
    # what comes from memory passes through the cache, too
    time_of_cache = (from_memory + from_cache) / cache_bandwidth
    time = np.maximum(time_of_memory, time_of_cache)
    np.divide(from_memory + from_cache, time, out=bandwidth, where=time > 0)
    return bandwidth


def find_unaligned_rows(
    m: Values, n: Values, k: Values, *, itemsize: Values, is_transposed: Any
) -> UnalignedRows:
    """Find matrix products whose rows in memory are not aligned.

    Parameters
    ----------
    m, n, k : float or array
        Rows, columns and inner size [-].
    itemsize : float or array
        Bytes of a number [B].
    is_transposed : bool or array of bool
        Whether the first operand is stored with rows of ``m`` numbers; else they have ``k``.

    Returns
    -------
    rows : UnalignedRows
        A product of one row or column reads its matrix once, as a vector kernel does: it is never
        among them.
    """
    numbers_of_first = np.where(np.asarray(is_transposed), np.asarray(m), np.asarray(k))
    bytes_of_first: Array = numbers_of_first * np.asarray(itemsize)
    bytes_of_second: Array = np.asarray(n) * np.asarray(itemsize)
    is_vector = (np.asarray(m) == 1) | (np.asarray(n) == 1)
    of_4_bytes = (bytes_of_first % 4 > 0) | (bytes_of_second % 4 > 0)
    of_16_bytes = (bytes_of_first % 16 > 0) | (bytes_of_second % 16 > 0)
    return UnalignedRows(of_4_bytes & ~is_vector, of_16_bytes & ~is_vector)


def find_aligned_products(
    kernels: ClassifiedKernels, sizes: KernelSizes, machine: Machine
) -> AlignedProducts:
    """Find the products on tensor cores, and which of them lack aligned rows.

    Without aligned rows they take longer beyond their launch, single and batched ones differently.
    """
    models = kernels.models
    itemsize = kernels.repeat([model.tensor_core_itemsize for model in models])
    products = np.flatnonzero(itemsize)
    if not len(products):
        nothing = np.zeros(kernels.one_configuration(0))
        return AlignedProducts(products, is_unaligned=nothing > 0, slowdown=nothing)
    is_transposed = kernels.repeat([model.variant.endswith("tn") for model in models])
    unaligned = find_unaligned_rows(
        sizes["m"][products],
        sizes["n"][products],
        sizes["k"][products],
        itemsize=itemsize[products],
        is_transposed=is_transposed[products],
    )
    of_models = [list_unaligned(machine, model.kind) for model in models]
    of_4_bytes = kernels.repeat([of_model.of_4_bytes for of_model in of_models])[products]
    of_16_bytes = kernels.repeat([of_model.of_16_bytes for of_model in of_models])[products]
    slowdown = np.where(unaligned.of_16_bytes, of_16_bytes, 1.0)
    slowdown = np.where(unaligned.of_4_bytes, of_4_bytes, slowdown)
    return AlignedProducts(products, unaligned.of_16_bytes, slowdown)


def time_alone(
    kernels: ClassifiedKernels,
    sizes: KernelSizes,
    products: AlignedProducts,
    machine: Machine,
) -> IsolatedTimes:
    """Times of kernels, each alone on the device.

    Parameters
    ----------
    kernels : ClassifiedKernels
        Kernels, with the fit of each class.
    sizes : KernelSizes
        Their sizes.
    products : AlignedProducts
        Those that take longer without aligned rows.
    machine : Machine
        Where they run.

    Returns
    -------
    times : IsolatedTimes
        Zero for operations that are no kernels. Distant operands add nothing under a roofline,
        whose traffic they are part of.
    """
    models = kernels.models
    near = np.zeros(sizes["traffic"].shape)
    distant = np.zeros(kernels.one_configuration(len(kernels.of_operation)))
    if any(isinstance(fitted.fit, Additive) for fitted in kernels.by_fit):
        distant = np.zeros(near.shape)
    for fit, members, counts_products in kernels.by_fit:
        if fit is None:
            near[members] = time_without_model(_select(sizes, _BARE_SIZES, members), machine)
            continue
        work = size_for_fit(fit, sizes, members)
        gradients: Array = np.asarray(1.0)
        if counts_products:
            gradients = count_gradients(_select(sizes, _PRODUCT_SIZES, members))
            work = size_one_product(work, gradients)
        if isinstance(fit, Additive):
            times = time_sum_of_terms(fit, work)
            near[members] = gradients * times.near
            distant[members] = gradients * times.distant
        else:
            near[members] = gradients * fit.time(work)

    # operands that are moved into another layout
    layout_passes = [model.layout_passes for model in models]
    if any(layout_passes):
        near = near + kernels.repeat(layout_passes) * sizes["traffic"] / sizes["bandwidth"]

    near = near + time_copies_of_heads(kernels, sizes)

    # products without aligned rows
    launch = kernels.repeat([model.launch for model in models])
    if products.is_unaligned.any():
        operations = products.operations
        beyond_launch = np.maximum(near[operations] - launch[operations], 0.0)
        near[operations] += (products.slowdown - 1.0) * beyond_launch

    # further kernels of the operation, or none where it is a part of the one before
    near = np.maximum(near + (sizes["launches"] - 1) * launch, 0.0)
    is_kernel = kernels.repeat([model.is_kernel for model in models])
    return IsolatedTimes(is_kernel * near, distant)


def time_copies_of_heads(kernels: ClassifiedKernels, sizes: KernelSizes) -> Array:
    """Time of copies of queries, keys and values whose heads are not aligned [s].

    Fused kernels of attention load 16 B at once. PyTorch copies other heads into wider ones first: it
    fills a wider tensor and copies into it, for three tensors forward, and for as much backward.
    """
    itemsize = kernels.repeat([model.head_itemsize for model in kernels.models])
    if not itemsize.any() or not sizes.keys() >= {"batch", "m", "n", "k"}:
        return np.zeros(kernels.one_configuration(len(kernels.of_operation)))
    width: Array = sizes["k"]
    padded = np.ceil(width * itemsize / HEAD_ALIGNMENT) * HEAD_ALIGNMENT
    rows = sizes["batch"] * (sizes["m"] + 2.0 * sizes["n"])
    nbytes = rows * (width * itemsize + 2.0 * padded)
    is_copied = padded > width * itemsize
    return np.where(is_copied, nbytes / (HEAD_COPIES * sizes["bandwidth"]), 0.0)


def _select(sizes: KernelSizes, names: Iterable[str], members: np.ndarray) -> dict[str, Array]:
    """Take some sizes of some kernels; those that are absent stay so."""
    return {name: sizes[name][members] for name in names if name in sizes}


def time_without_model(sizes: KernelSizes, machine: Machine) -> Array:
    """Time of kernels of which nothing like them was measured: at the rates of the datasheet
    [s]."""
    bandwidth = float(machine.device.bandwidth(1e12))
    bytes_moved = sizes["nbytes"] + sizes["row_bytes"]
    return np.maximum(bytes_moved / bandwidth, sizes["flops"] / sizes["peak"])


def size_for_fit(fit: KernelModel, sizes: KernelSizes, members: np.ndarray) -> dict[str, Array]:
    """Sizes of some kernels as their fit takes them; the bytes of a roofline are its traffic."""
    if isinstance(fit, Additive):
        return _select(sizes, sizes, members)
    names = _LOOKUP_SIZES if isinstance(fit, LookupRoofline) else _ROOFLINE_SIZES
    of_roofline = _select(sizes, names, members)
    of_roofline["nbytes"] = sizes["traffic"][members]
    return of_roofline


def count_gradients(convolutions: KernelSizes) -> Array:
    """Matrix products that each convolution takes: its backward pass has one for each gradient
    [-]."""
    sizes = convolutions
    flops_of_product = 2.0 * sizes["batch"] * sizes["m"] * sizes["n"] * sizes["k"]
    return np.maximum(np.round(sizes["flops"] / np.maximum(flops_of_product, 1.0)), 1.0)


def size_one_product(convolutions: KernelSizes, gradients: Array) -> dict[str, Array]:
    """Sizes of one of the products that each convolution is, which share its work and operands."""
    sizes = dict(convolutions)
    for name in _SHARED_BY_PRODUCTS:
        if name in sizes:
            sizes[name] = sizes[name] / gradients
    return sizes


def time_sum_of_terms(fit: Additive, sizes: KernelSizes) -> IsolatedTimes:
    """Times of kernels whose costs add up: with all operands near, and what those that are not
    add."""
    near_sizes = dict(sizes)
    distant = np.zeros(sizes["traffic"].shape)
    for name in DISTANT_TERMS:
        if name in fit:
            distant += fit[name] * sizes[name]
            near_sizes[name] = np.zeros(distant.shape)
    return IsolatedTimes(near=fit.time(near_sizes), distant=distant)


def list_unaligned(machine: Machine, kind: str) -> UnalignedSlowdown:
    """Slowdown of products whose rows are not aligned, on a GPU like this one; single ones are of
    kind ``gemm``, batched ones ``bmm``."""
    slowdowns = BATCHED_UNALIGNED if kind == "bmm" else UNALIGNED
    capability = machine.device.capability
    known = 0.0 if capability is None else capability.value
    return slowdowns[max(least for least in slowdowns if least <= known)]


def say_unaligned(
    machine: Machine, kind: str, dtype: str, module: str = "", remedy: str = ""
) -> str:
    """Say that products without aligned rows take longer, or, where that was not measured, have a
    wider interval; and what pads them, where that is known."""
    rows = f"{16 / DTYPES[dtype]:g}"
    slowdown = list_unaligned(machine, kind)
    odd, even = slowdown.of_4_bytes, slowdown.of_16_bytes
    products = "batched products" if kind == "bmm" else "products"
    of = f" of module {module!r}" if module else ""
    next_step = f"pad these sizes: {remedy}" if remedy else "pad these sizes"
    text = f"{products} in {dtype}{of} with rows that are no multiple of {rows} numbers"
    if odd > 1:
        most = " times as long"
        if DTYPES[dtype] <= 2 and odd > even:
            most = f" to {odd:g} times as long, odd ones the longest"
        return f"{text} take {even:g}{most}; {next_step}"
    return f"{text} may take twice as long: none was measured; {next_step}"
