"""Fit the classes of isolated kernels: the sizes of the measured kernels, and the closed form of each
class.

Read `size_cases` first, which says how large a measured kernel is; then `fit_each_class`, which fits
each class to its sizes; then `fit_classes`, which adds what all classes know of the caches. The
capacities of the caches are those of `perfkit.calibration.fit_caches`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from perfkit.fitting import Additive
from perfkit.fitting.kernels import fit_residuals
from perfkit.ground.units import Array
from perfkit.measure.records import MeasuredKernel, SizedKernel
from perfkit.models.caches import PAGE, miss_share
from perfkit.models.distributions import Uniform, Zipf
from perfkit.models.embedding import size_lookup
from perfkit.models.kernels import TERMS, term_names

#: Sizes that cases state where they have any, and older files never: rows of elementwise functions
#: of tensors that are broadcast, and numbers of products that lie apart.
_OPTIONAL = ("rows", "elements")
#: Elementwise kernels with little arithmetic, whose time is that of their memory traffic.
_STREAMS = (
    "relu",
    "threshold_backward",
    "add",
    "add_",
    "mul_",
    "mul_scalar",
    "lerp_",
    "addcmul_",
    "addcdiv_",
    "add_scalar_",
)


def count_traffic(kernel: SizedKernel) -> float:
    """Count the bytes that a measured kernel reads and writes: each operand once, but twice if
    changed in place.

    Parameters
    ----------
    kernel : SizedKernel
        Its ``nbytes`` count each operand once [B].

    Returns
    -------
    nbytes : float
        Counted as for the operations of a graph [B].
    """
    nbytes = float(kernel.nbytes)
    if kernel.kind == "elementwise" and kernel.variant.endswith("_"):
        nbytes += 4.0 * float(kernel.sizes["elements"])
    return nbytes


def size_cases(
    kernels: Sequence[SizedKernel], capacities: tuple[float, float], entries: float
) -> dict[str, Array]:
    """Compute the sizes of isolated kernels of one kind for the closed forms; repeated calls find
    data in caches.

    Parameters
    ----------
    kernels : sequence of SizedKernel
        Kernels of one kind and variant.
    capacities : (float, float)
        Effective capacities of the two cache levels [B].
    entries : float
        Effective number of pages in the translation buffer [-].

    Returns
    -------
    sizes : dict of str to array
        As `perfkit.prediction.cost.size_operations` returns them for the operations of an iteration.
    """
    names: dict[str, None] = {}
    for kernel in kernels:
        names.update(dict.fromkeys(kernel.sizes))
    sizes = {}
    for name in names:
        # files of early campaigns have negative numbers of outputs of a pooling
        sizes[name] = np.array([abs(float(kernel.sizes.get(name, 0.0))) for kernel in kernels])
    for name in _OPTIONAL:
        sizes.setdefault(name, np.zeros(len(kernels)))
    kind = kernels[0].kind
    nbytes = np.array([float(kernel.nbytes) for kernel in kernels])
    sizes["nbytes"] = np.array([count_traffic(kernel) for kernel in kernels])
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        sizes[f"beyond_{level}"] = nbytes * miss_share(nbytes, capacity=capacity)
    if not kind.startswith("embedding"):
        return sizes
    pairs = zip(sizes["table_rows"], sizes["exponent"], strict=True)
    laws = [Zipf(int(n), float(exponent)) if exponent else Uniform(int(n)) for n, exponent in pairs]
    found = size_lookup(
        laws,
        sizes["lookups"],
        sizes["dim"],
        capacities=capacities,
        entries=entries,
        dense_bytes=nbytes,
        groups=np.arange(len(kernels)),
        batches=[float(kernel.sizes.get("index_batches", 8.0)) for kernel in kernels],
    )
    sizes |= {
        "row_bytes": found.row_bytes,
        "unique_bytes": found.unique_bytes,
        "page_walks": found.walks,
    }
    # rows of the gradient are still in the caches, where zeros were just written
    if kind == "embedding_backward":
        if kernels[0].variant.partition(".")[0] == "sparse":
            near: Any = 0.0
        else:
            near = miss_share(nbytes / PAGE, capacity=entries)
        return sizes | {"page_walks": near * found.unique}
    for level, share in zip(("l2", "l3"), found.misses, strict=True):
        sizes[f"beyond_{level}"] = sizes[f"beyond_{level}"] + share * found.row_bytes
    return sizes


def list_streams(kernels: Sequence[MeasuredKernel]) -> list[MeasuredKernel]:
    """List the kernels whose time is that of their memory traffic."""
    return [
        kernel for kernel in kernels if kernel.kind == "elementwise" and kernel.variant in _STREAMS
    ]


def fit_each_class(
    measured: Iterable[MeasuredKernel],
    capacities: Mapping[str, float],
    prior: Mapping[str, float] | None = None,
) -> dict[str, Additive]:
    """Fit all classes of kernels; a class with a single size counts as not measured.

    Parameters
    ----------
    measured : iterable of MeasuredKernel
        Kernels of any classes.
    capacities : mapping of str to float
        Effective capacities of the caches ``l2`` and ``l3`` [B], and ``pages`` of the translation
        buffer [-]; without ``pages`` every page is in it.
    prior : mapping of str to float, optional
        Costs that few sizes cannot tell, see `perfkit.fitting.kernels.fit_residuals`.

    Returns
    -------
    fits : dict of str to Additive
        By class.
    """
    groups: dict[str, list[MeasuredKernel]] = {}
    for kernel in measured:
        groups.setdefault(kernel.name, []).append(kernel)
    caches, pages = (capacities["l2"], capacities["l3"]), capacities.get("pages", np.inf)
    fits = {}
    for key, kernels in groups.items():
        if len(kernels) == 1:
            continue
        sizes = size_cases(kernels, caches, pages)
        terms = count_units(key, sizes)
        seconds = np.array([kernel.median for kernel in kernels])
        fits[key] = fit_residuals(terms, seconds, prior=prior, ranges=_find_ranges(sizes))
    return fits


def count_units(key: str, sizes: Mapping[str, Array]) -> dict[str, Array]:
    """Count the units of each term that kernels of one class have.

    Parameters
    ----------
    key : str
        Kind of the kernels, with their variant if it has terms of its own.
    sizes : mapping of str to array
        Sizes of the kernels, of `size_cases`.

    Returns
    -------
    units : dict of str to array
        By term, units of each kernel [-]. A term of `_OPTIONAL` is left out where none has any.
    """
    units = {}
    for term in term_names(*key.split(".", 1)):
        is_absent = term in _OPTIONAL and not sizes[term].any()
        if not is_absent:
            units[term] = np.asarray(TERMS[term](sizes), dtype=float)
    return units


def _find_ranges(sizes: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
    """Smallest and largest size of those that a class has."""
    ranges = {}
    for name in ("flops", "elements", "lookups"):
        values = sizes.get(name)
        if values is not None and values.max() > 0:
            ranges[name] = (float(values.min()), float(values.max()))
    return ranges


def fit_classes(
    kernels: Sequence[MeasuredKernel], capacities: Mapping[str, float]
) -> dict[str, Additive]:
    """Fit all classes of kernels; streams give a prior for bytes beyond the caches, which few sizes
    of another class tell.

    Parameters
    ----------
    kernels : sequence of MeasuredKernel
        Kernels of all classes.
    capacities : mapping of str to float
        As for `fit_each_class`.

    Returns
    -------
    fits : dict of str to Additive
        By class.
    """
    streams = fit_each_class(list_streams(kernels), capacities).values()
    prior = {}
    if streams:
        for name in ("beyond_l2", "beyond_l3"):
            prior[name] = float(np.median([fit.get(name, 0.0) for fit in streams]))
    return fit_each_class(kernels, capacities, prior)


def average_spread(fits: Mapping[str, Additive]) -> float:
    """Average spread of fits; 0 without any [-]."""
    if not fits:
        return 0.0
    return float(np.mean([fit.spread for fit in fits.values()]))
