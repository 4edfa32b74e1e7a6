"""Times of kernels on a GPU whose steps wait for one another, where a platform did not measure them:
recurrent layers and factorizations of matrices; and Fourier transforms."""

import math
from typing import NamedTuple

from perfkit.fitting import Additive, KernelModel, Roofline, SequentialRoofline
from perfkit.ground.hardware import DTYPES


class StepTimes(NamedTuple):
    """What steps take that wait for one another, see `perfkit.models.roofline.sequential_time`.

    Parameters
    ----------
    per_step, per_depth, per_weight, per_product : float
        Of a step, of an inner number, of a weight, and of a product of two numbers [s].
    compute_share : float
        Share of the arithmetic rate of batched products that the rest of the work reaches [-].
    spread : float
        Extra spread of the logarithm of the time [-].
    """

    per_step: float = 0.0
    per_depth: float = 0.0
    per_weight: float = 0.0
    per_product: float = 0.0
    compute_share: float = 1.0
    spread: float = 0.0


#: Extra spread of recurrent layers, for the GPU that was measured is not known by name [-];
#: docs/formulas.md, table 2.7.
SIGMA_RECURRENT = 0.4
#: Kernels of recurrent layers, by variant; docs/formulas.md, table 2.7.
RECURRENT = {
    "forward.standard": StepTimes(per_step=6.23e-6, per_depth=35.9e-9),
    "backward.standard": StepTimes(per_step=10.2e-6, per_depth=43.2e-9),
    "forward.narrow_gated": StepTimes(
        per_step=0.398e-6, per_weight=21.7e-12, per_product=0.964e-12
    ),
    "backward.narrow_gated": StepTimes(per_step=1.03e-6, per_weight=16.3e-12, per_product=2.36e-12),
    "forward.narrow_plain": StepTimes(
        per_step=0.344e-6, per_weight=9.12e-12, per_product=0.608e-12
    ),
    "backward.narrow_plain": StepTimes(per_step=0.942e-6, per_product=1.73e-12),
    "forward.spilled_gated": StepTimes(per_step=4.10e-6, per_weight=0.37e-12, per_product=6.49e-12),
    "forward.spilled_plain": StepTimes(per_weight=51.9e-12, per_product=4.87e-12),
}
#: Factorizations of matrices, by variant: a step is a matrix, an inner number one of its columns, a
#: weight one of its numbers; docs/formulas.md, table 2.7.
FACTORIZATIONS = {
    "cholesky": StepTimes(per_step=30e-6, per_depth=0.62e-6, compute_share=0.07, spread=0.4),
    "triangular": StepTimes(per_step=15e-6, per_depth=0.37e-6, compute_share=0.3, spread=0.6),
    "qr": StepTimes(per_step=20e-6, per_depth=3.2e-6, compute_share=0.4, spread=0.5),
    "lu": StepTimes(
        per_step=60e-6, per_depth=2.0e-6, per_weight=0.8e-9, compute_share=0.07, spread=0.7
    ),
    "solve": StepTimes(
        per_step=80e-6, per_depth=2.5e-6, per_weight=1.0e-9, compute_share=0.07, spread=0.7
    ),
    "inverse": StepTimes(
        per_step=100e-6, per_depth=3.8e-6, per_weight=1.6e-9, compute_share=0.07, spread=0.5
    ),
    "svd": StepTimes(
        per_step=100e-6, per_depth=22e-6, per_weight=45e-9, compute_share=0.07, spread=0.5
    ),
    "eigh": StepTimes(
        per_step=100e-6, per_depth=13e-6, per_weight=27e-9, compute_share=0.07, spread=0.9
    ),
}
#: Share of the bandwidth of element-wise kernels at which Fourier transforms move numbers, and their
#: extra spread [-]; docs/formulas.md, table 2.7.
FOURIER_SHARE, SIGMA_FOURIER = 0.78, 0.4

#: Where the times come from, by class; all of them: docs/formulas.md, table 2.7.
_SOURCES = {
    "recurrent": "PyTorch pull request 62143, times in xwang233/code-snippet",
    "factorization": "PyTorch pull requests 173515, 173788 and 175898, issue 174674; xwang233/code-snippet",
}
_SAYS = {
    "recurrent": "recurrent layers were not measured here: a step takes what cuDNN takes on another GPU",
    "factorization": "factorizations of matrices (linear algebra) were not measured here: they take what "
    "cuSOLVER takes on other GPUs",
    "fourier": "Fourier transforms were not measured here: each dimension is taken to move all numbers "
    "through the memory once, and five times for lengths over 4,096 or of other factors than 2, 3, 5 and 7",
}


def make_sequential(
    products: KernelModel | None, kind: str, variant: str, dtype: str
) -> KernelModel | None:
    """Make the fit of recurrent layers or of a factorization on a GPU from that of batched products.

    Parameters
    ----------
    products : KernelModel or None
        Fit of products in this number format.
    kind : str
        ``recurrent`` or ``factorization``.
    variant : str
        One of `RECURRENT` or `FACTORIZATIONS`.
    dtype : str
        Number format.

    Returns
    -------
    fit : KernelModel or None
        That of the steps; on a CPU, where each call is a few products, that of the products for
        recurrent layers, and none for factorizations.

    Raises
    ------
    ValueError
        For a variant without constants.
    """
    if products is None or isinstance(products, Additive):
        return products if kind == "recurrent" else None
    known = RECURRENT if kind == "recurrent" else FACTORIZATIONS
    if variant not in known:
        raise ValueError(f"{kind} has no kernel {variant!r}; known are {', '.join(known)}")
    times = known[variant]
    reads_again = kind == "recurrent" and variant.endswith("standard")
    spread = SIGMA_RECURRENT if kind == "recurrent" else times.spread
    return SequentialRoofline.build(
        {
            "launch": products["launch"],
            "compute_efficiency": times.compute_share * products["compute_efficiency"],
            "memory_efficiency": products["memory_efficiency"],
            "sharpness": products["sharpness"],
            "per_step": times.per_step,
            "per_depth": times.per_depth,
            "per_weight": times.per_weight,
            "per_product": times.per_product,
            "weight_bytes": DTYPES[dtype] if reads_again else 0.0,
        },
        spread=math.hypot(spread, products.spread),
        kind="assumed",
        notes=(_SAYS[kind],),
        stands_for=kind,
        source=_SOURCES[kind],
    )


def make_fourier(copies: KernelModel | None) -> KernelModel | None:
    """Make the fit of Fourier transforms on a GPU from that of copies.

    Parameters
    ----------
    copies : KernelModel or None
        Fit of element-wise kernels.

    Returns
    -------
    fit : KernelModel or None
        A share of their rate, with a wider spread; none on a CPU.
    """
    if not isinstance(copies, Roofline):
        return None
    return copies.with_values(
        {"memory_efficiency": FOURIER_SHARE * copies["memory_efficiency"]},
        spread=math.hypot(SIGMA_FOURIER, copies.spread),
        spread_time=None,
        kind="assumed",
        notes=(_SAYS["fourier"],),
        stands_for="fourier",
    )
