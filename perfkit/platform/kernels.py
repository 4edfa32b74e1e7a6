"""Fits of kernels: which one times a class, what stands in for it, and what slows products down."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from perfkit.fitting import Additive, KernelModel
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES, Device
from perfkit.ground.units import (
    check_choice,
    check_type,
)
from perfkit.platform.machine import Machine
from perfkit.platform.sequential_kernels import make_fourier, make_sequential

Models: TypeAlias = Mapping[str, KernelModel]
_PRODUCTS, _HALF = ("gemm", "bmm", "attention"), {"bf16", "fp16"}
#: Formats that run on tensor cores of a GPU that has them.
TENSOR = {"tf32", "fp8", "fp4", "int8", *_HALF}
#: Extra spread of products in a format that was not measured: fp8 or fp4, and others [-];
#: docs/formulas.md, table 2.4.
SIGMA_NARROW_FORMAT, SIGMA_OTHER_FORMAT = 1.0, 0.25
#: Share of its peak that tf32 reaches, over the share that half precision reaches [-];
#: docs/formulas.md, table 2.4.
TF32 = 1 / 1.2
#: Time in which a number of the operands of a convolution is moved into the layout of tensor cores,
#: channels_last, and back [s]; docs/formulas.md, table 2.4.
LAYOUT_CONVERSION_TIME = 5.5e-12
#: How often these operands are moved at least, as they are read and written, and at most, as on no
#: device more was seen, at the full bandwidth of the memory [-]; docs/formulas.md, table 2.4.
LEAST_LAYOUT_PASSES, MOST_LAYOUT_PASSES = 2.0, 5.0
#: Columns of the products of attention that take as long as the softmax of a score, from this compute
#: capability on [-]; docs/formulas.md, table 2.4.
SOFTMAX_WIDTHS = {0.0: 0.0, 9.0: 32.0, 10.0: 64.0, 10.3: 32.0, 12.0: 8.0}
#: Multiple to which a kernel of attention pads the width of heads: FlashAttention's, and others [-];
#: docs/formulas.md, table 2.4.
HEAD_MULTIPLES = {"flash2": 32.0, "flash3": 64.0, "efficient": 64.0, "triton": 64.0}
#: Keys of a tile that a causal mask crosses [-]; docs/formulas.md, table 2.4.
CAUSAL_TILE = 128.0


def find_softmax_width(device: Device) -> float:
    """Columns of the products of attention that take as long as the softmax of a score [-]; on devices
    of unknown capability as many as on Hopper."""
    capability = 9.0
    if device.capability is not None:
        capability = device.capability.value
    reached = [least for least in SOFTMAX_WIDTHS if least <= capability]
    return SOFTMAX_WIDTHS[max(reached)]


class Substitute(NamedTuple):
    """What times an operation class that was not measured: another class, slowed down.

    Parameters
    ----------
    measured_class : str
        The other class.
    cpu_share, gpu_share, tensor_core_share : float
        Share of its rate on a CPU core, on a GPU, and on the tensor cores of one [-].
    spread : float
        Extra spread of this guess [-].
    """

    measured_class: str
    cpu_share: float
    gpu_share: float
    tensor_core_share: float
    spread: float

    def find_share(self, fit: KernelModel, dtype: str) -> float:
        """Share of the rate of the class that was measured [-]."""
        if fit.form == "additive":
            return self.cpu_share
        return self.tensor_core_share if dtype in TENSOR else self.gpu_share


#: By the class that was not measured; docs/formulas.md, table 2.4.
SUBSTITUTES = {
    "convolution": Substitute(
        "gemm", cpu_share=0.8, gpu_share=1.0, tensor_core_share=0.7, spread=0.4
    ),
    "pooling": Substitute(
        "elementwise", cpu_share=0.05, gpu_share=0.6, tensor_core_share=0.6, spread=0.8
    ),
}


class GroupedShares(NamedTuple):
    """What one kernel for products of unlike many rows reaches, over a batched product.

    Parameters
    ----------
    compute, memory : float
        Share of its arithmetic rate and of its bandwidth [-].
    spread : float
        Extra spread of the logarithm of the time [-].
    """

    compute: float
    memory: float
    spread: float


#: By the layout of a product of groups; docs/formulas.md, table 2.4. Gradients of weights (``tn``)
#: have a side of few rows.
GROUPED_SHARES = {
    "nn": GroupedShares(compute=1.0, memory=0.67, spread=0.1),
    "nt": GroupedShares(compute=1.0, memory=0.67, spread=0.1),
    "tn": GroupedShares(compute=0.785, memory=0.577, spread=0.1),
}


class ScaledProducts(NamedTuple):
    """What products in fp8 take whose operands have several scales.

    Parameters
    ----------
    recipe : str
        The recipe that has such products.
    slowdown : float
        Time over that of the same product with a scale for each matrix [-].
    least_capability : float
        Compute capability of NVIDIA's GPUs from which on tensor cores have them [-].
    spread : float
        Extra spread of the logarithm of the time [-].
    """

    recipe: str
    slowdown: float
    least_capability: float
    spread: float


#: By the first word of a variant, as ``rowwise.nt``; docs/formulas.md, table 2.4: a scale for a row,
#: for 128 numbers of a row by a square of 128, for 128 numbers of a row each, and for 32 numbers of a
#: row each.
SCALED_PRODUCTS = {
    "rowwise": ScaledProducts("rowwise", slowdown=1.026, least_capability=8.9, spread=0.07),
    "blocks_by_squares": ScaledProducts(
        "blockwise", slowdown=1.078, least_capability=9.0, spread=0.09
    ),
    "blocks_by_blocks": ScaledProducts(
        "blockwise", slowdown=1.357, least_capability=9.0, spread=0.09
    ),
    "mx": ScaledProducts("mxfp8", slowdown=1.0, least_capability=10.0, spread=0.15),
}


class CompiledCast(NamedTuple):
    """What a kernel reaches that a compiler makes of a cast to fp8 which finds its scales.

    Parameters
    ----------
    rate : float
        Bytes that it moves in a second on an H200, which its arithmetic bounds [B/s].
    spread : float
        Extra spread of the logarithm of the time [-].
    """

    rate: float
    spread: float


#: By the kernel of a cast; docs/formulas.md, table 2.4: a scale for a matrix, whose two kernels read it
#: twice, for a row, and for 128 numbers of a row. Casts that are written by hand run as other kernels.
COMPILED_CASTS = {
    "fp8_tensor": CompiledCast(rate=1.17e12, spread=0.15),
    "fp8_row": CompiledCast(rate=1.26e12, spread=0.15),
    "fp8_block": CompiledCast(rate=0.65e12, spread=0.15),
}
#: Kernel that expands frozen weights of 4 bits, the share of the bandwidth of the datasheet at which it
#: moves bytes, and the extra spread of the logarithm of its time [-]; docs/formulas.md, table 2.4.
EXPANSION = "dequantize_4bit"
EXPANSION_SHARE, SIGMA_EXPANSION = 0.275, 0.4
#: Rate of fp32 of the H200 on which these were measured [FLOP/s]; its datasheet.
_PEAK_OF_CASTS = 6.7e13
#: Variants that run other code on a CPU than those that stand in for them where they were not measured, by
#: class; and the extra spread of the logarithm of their time then [-]; docs/formulas.md, table 2.4.
OTHER_CODE = {
    "gemm": ("complex.", "recurrent.", "recurrent_backward."),
    "bmm": ("complex.",),
    "copy": ("index.", "index_put.", "gather.", "scatter_add."),
    "embedding_forward": ("_embedding_bag.",),
    "embedding_backward": ("dense.", "sparse."),
}
SIGMA_OTHER_CODE = 1.0
#: Extra spread of functions that were not measured, such as square roots [-]; docs/formulas.md,
#: table 2.4.
SIGMA_OTHER_FUNCTION = 0.5


def find_kernel(
    kernels: Models, kind: str, *, variant: str = "", dtype: str = "fp32"
) -> tuple[str, KernelModel] | None:
    """Find the fit of a class and its key: that of the variant and format, of the variant, of the
    format, or the class.

    The spread is wider where a fit of products was made in another number format.
    """
    check_type("kind", kind, str)
    check_choice("dtype", dtype, DTYPES)
    head, _, tail = variant.partition(".")  # a compiler replaces an operation by another kernel
    plain = variant.replace("_last", "")  # of a convolution whose layout the fit does not know
    names = dict.fromkeys(filter(None, (variant, plain, head, "" if head == "fused" else tail)))
    finer = [f"{kind}.{name}" for name in names]
    keys = [*(f"{key}.{dtype}" for key in finer), *finer, f"{kind}.{dtype}", kind]
    key = next((key for key in keys if key in kernels), None)
    if key is None:
        return None
    return key, _widen(kernels[key], dtype) if key == kind and kind in _PRODUCTS else kernels[key]


def find_stand_in(
    kernels: Models, kind: str, *, variant: str = "", dtype: str = "fp32"
) -> KernelModel | None:
    """Find the fit of a class; else, with a wide spread, the median of its variants or the fit of
    another class."""
    head, _, plain = variant.partition(".")
    if head in SCALED_PRODUCTS and f"{kind}.{head}" not in kernels:
        fit = find_stand_in(kernels, kind, variant=plain, dtype=dtype)
        scaled = SCALED_PRODUCTS[head]
        return _slow_down(fit, 1.0 / scaled.slowdown, scaled.spread)
    found = find_kernel(kernels, kind, variant=variant, dtype=dtype)
    if found is not None:
        key, measured = found
        if is_other_code(kernels, kind, variant):
            spread = math.hypot(measured.spread, SIGMA_OTHER_CODE)
            return replace(measured, spread=spread, spread_time=None)
        if variant.startswith("grouped.") and "grouped" not in key:
            return _group(kernels, key, measured, variant=variant, dtype=dtype)
        return measured
    others = [
        fit
        for key, fit in kernels.items()
        if Key.parse(key).operation == kind and fit.form == "additive"
    ]
    if others and not kind.startswith(("embedding", "attention")):
        medians = {}
        for name in dict.fromkeys(chain.from_iterable(others)):
            values = [fit.get(name, 0.0) for fit in others]
            medians[name] = float(np.median(values))
        spread = math.hypot(SIGMA_OTHER_FUNCTION, float(np.median([fit.spread for fit in others])))
        note = f"{kind}.{variant} was not measured; its time is the median of {len(others)} measured variants"
        return Additive.build(
            medians,
            spread=spread,
            kind="assumed",
            notes=(note,),
            stands_for=kind,
            source=others[0].source,
            n=others[0].n,
        )
    if kind in ("recurrent", "factorization"):
        products = find_stand_in(kernels, "bmm", variant="nn", dtype=dtype)
        return make_sequential(products, kind, variant, dtype)
    if kind == "fourier":
        return make_fourier(find_stand_in(kernels, "elementwise", variant="mul", dtype=dtype))
    substitute = SUBSTITUTES.get(kind)
    if substitute is None:
        return None
    other = substitute.measured_class
    fit = find_stand_in(kernels, other, variant="nn", dtype=dtype)
    if fit is None:
        return None
    share = substitute.find_share(fit, dtype)
    if fit.form == "additive":
        changed = {name: time / share for name, time in fit.items()}
    else:
        changed = {name: fit[name] * share for name in ("compute_efficiency", "memory_efficiency")}
    spread = substitute.spread
    if variant.endswith(("_depthwise", "_grouped")):
        spread *= 2.0
    note = f"no {kind} was measured; its time assumes {share:.0%} of the rate of {other}"
    return fit.with_values(
        changed,
        spread=math.hypot(spread, fit.spread),
        spread_time=None,
        kind="assumed",
        stands_for=kind,
        notes=(note, *fit.notes),
    )


def is_other_code(kernels: Models, kind: str, variant: str) -> bool:
    """Whether a CPU runs a kernel with other code than the one that was measured and stands in for it.

    Parameters
    ----------
    kernels : mapping of str to KernelModel
        What was measured.
    kind, variant : str
        Class and variant of the kernel.

    Returns
    -------
    is_other : bool
        False on GPUs, whose kernels for these variants are alike, and where the variant itself was measured.
    """
    if kind not in OTHER_CODE or not variant.startswith(OTHER_CODE[kind]):
        return False
    found = find_kernel(kernels, kind, variant=variant)
    if found is None:
        return False
    key, fit = found
    return fit.form == "additive" and key != f"{kind}.{variant}"


def _group(kernels: Models, key: str, fit: KernelModel, *, variant: str, dtype: str) -> KernelModel:
    """Fit of batched products, of this `key`, for products of groups of unlike many rows.

    A narrow format that only plain products were measured in is taken from these.
    """
    narrow = f"gemm.{dtype}"
    if key == "bmm" and DTYPES[dtype] < 2 and narrow in kernels:
        fit = replace(kernels[narrow], spread=math.hypot(fit.spread, kernels[narrow].spread))
    if "memory_efficiency" not in fit:
        return fit
    shares = GROUPED_SHARES[variant.rpartition(".")[2]]
    changed = {
        "compute_efficiency": shares.compute * fit["compute_efficiency"],
        "memory_efficiency": shares.memory * fit["memory_efficiency"],
    }
    spread = math.hypot(shares.spread, fit.spread)
    return fit.with_values(changed, spread=spread, spread_time=None)


def _slow_down(fit: KernelModel | None, share: float, spread: float) -> KernelModel | None:
    """Fit of kernels that reach a share of the rates of others, on a GPU."""
    if fit is None or "memory_efficiency" not in fit:
        return fit
    rates = [name for name in ("compute_efficiency", "memory_efficiency") if name in fit]
    changed = {name: share * fit[name] for name in rates}
    return fit.with_values(changed, spread=math.hypot(spread, fit.spread), spread_time=None)


def limit_compiled_cast(
    fit: KernelModel | None, device: Device, variant: str
) -> KernelModel | None:
    """Limit the fit of element-wise kernels to what a compiler makes of a cast to fp8.

    Parameters
    ----------
    fit : KernelModel or None
        The fit.
    device : Device
        Where the cast runs.
    variant : str
        Its variant, such as ``fused.fp8_row``; all others leave the fit as it is.

    Returns
    -------
    fit : KernelModel or None
        With a share of the bandwidth at which the cast moves what it does on an H200, by the rates of
        fp32 of both; that of the fit, if that is less.
    """
    cast = COMPILED_CASTS.get(variant.removeprefix("fused."))
    if cast is None or not variant.startswith("fused.") or fit is None:
        return fit
    if "memory_efficiency" not in fit or "fp32" not in device.peaks:
        return fit
    rate = cast.rate * device.peaks["fp32"].value / _PEAK_OF_CASTS
    share = rate / (fit["memory_efficiency"] * device.main_bandwidth)
    return _slow_down(fit, min(share, 1.0), cast.spread)


def limit_expansion(fit: KernelModel | None, device: Device, variant: str) -> KernelModel | None:
    """Limit the fit of element-wise kernels to what expansions of frozen weights reach.

    Parameters
    ----------
    fit : KernelModel or None
        The fit.
    device : Device
        Where it runs.
    variant : str
        Its variant; all but `EXPANSION` leave the fit as it is.

    Returns
    -------
    fit : KernelModel or None
        With `EXPANSION_SHARE` of the bandwidth of the datasheet; that of the fit, if that is less.
    """
    if variant != EXPANSION or fit is None or "memory_efficiency" not in fit:
        return fit
    share = EXPANSION_SHARE / fit["memory_efficiency"]
    return _slow_down(fit, min(share, 1.0), SIGMA_EXPANSION)


def check_scaled_products(device: Device, variant: str) -> None:
    """Check that a device has the products that a recipe of fp8 needs.

    Parameters
    ----------
    device : Device
        The device.
    variant : str
        Variant of the product.

    Raises
    ------
    ValueError
        If its tensor cores lack such scales, or if it is not known that they have them.
    """
    scaled = SCALED_PRODUCTS.get(variant.partition(".")[0])
    if scaled is None:
        return
    known = device.capability.value if device.capability is not None else 0.0
    if known < scaled.least_capability:
        least = f"{scaled.least_capability:g}"
        raise ValueError(
            f"fp8_recipe is {scaled.recipe!r}, which is priced on NVIDIA's GPUs from compute capability "
            f"{least} on, and {device.name} has {f'{known:g}' if known else 'none that is known'}; "
            "take 'tensorwise' or 'delayed', or another device"
        )


def _widen(fit: KernelModel, dtype: str) -> KernelModel:
    """Widen the spread of a fit for a number format that was not measured, if its formats are
    known."""
    # both half formats are equally fast
    formats = set(fit.dtypes) | (_HALF if _HALF & set(fit.dtypes) else set())
    if not formats or dtype in formats:
        return fit
    names, narrow = "/".join(sorted(formats)), DTYPES[dtype] < 2
    fit = replace(
        fit,
        kind="assumed",
        spread=math.hypot(fit.spread, SIGMA_NARROW_FORMAT if narrow else SIGMA_OTHER_FORMAT),
        spread_time=None,
    )
    if dtype == "tf32" and formats & _HALF and "compute_efficiency" in fit:
        note = (
            f"fitted in {names}; tf32 is assumed to reach {TF32:.2f} of that share of its own peak"
        )
        slower = {"compute_efficiency": TF32 * fit["compute_efficiency"]}
        return fit.with_values(slower, notes=(note, *fit.notes))
    if narrow:
        text = f"{names}: no product in {dtype} was measured here; fp8 on other GPUs takes twice as long"
        return replace(fit, transferred=(text, *fit.transferred))
    note = f"fitted in {names}; {dtype} is assumed to reach the same share of its peak"
    return replace(fit, notes=(note, *fit.notes))


def find_layout_passes(machine: Machine, kind: str, variant: str, dtype: str) -> float:
    """How many times a convolution moves its operands into the layout of tensor cores and back, at
    the bandwidth of the memory [-].

    Libraries move single numbers: a number of 2 B takes as long as one of 4 B.
    """
    if kind != "convolution" or machine.device.kind == "cpu" or dtype not in TENSOR:
        return 0.0
    if "_last" in variant or variant.endswith("_depthwise"):
        return 0.0
    numbers_per_second = machine.device.main_bandwidth / DTYPES[dtype]
    passes = LAYOUT_CONVERSION_TIME * numbers_per_second
    return min(max(passes, LEAST_LAYOUT_PASSES), MOST_LAYOUT_PASSES)
