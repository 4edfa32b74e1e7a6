"""Kernels that wait for each row of a table: PyTorch's bag, and hash tables.

What limits them is how many rows a multiprocessor waits for at once. So their constants are those of one
multiprocessor, and a GPU has so many of them; docs/formulas.md, table 3.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from perfkit.fitting import KernelModel, LookupRoofline

#: Exponent of a smooth maximum that is within 0.07 % of the larger of two times [-].
OVERLAPPED = 1e3
#: Variant of the kernels of hash tables.
HASH = "hash"


@dataclass(frozen=True)
class LookupConstants:
    """What a kernel takes on one multiprocessor.

    Parameters
    ----------
    launch : float
        Time without lookups [s].
    per_lookup, per_number : float
        Time of a lookup whatever its width, and of each number of its row [s].
    hit : float
        Time of a row that L2 has, over that of one from memory [-].
    sharpness : float
        Exponent of the smooth maximum of waiting and traffic; 1 adds them [-].
    spread : float
        Standard deviation of the logarithm of the time, on the GPU that was measured [-].
    n : int
        Measurements [-].
    source : str
        Where from.
    """

    launch: float
    per_lookup: float
    per_number: float
    hit: float
    sharpness: float
    spread: float
    n: int
    source: str


#: PyTorch's bag since its change of 2025-11.
BAG = LookupConstants(
    launch=2.2e-6,
    per_lookup=0.0,
    per_number=333e-12,
    hit=0.83,
    sharpness=OVERLAPPED,
    spread=0.16,
    n=8,
    source="perfkit, h100-1: in its own steps, PyTorch 2.11; rows in L2: "
    "rishucoding/reproduce_MICRO24_GPU_DLRM_inference, arXiv 2410.22249",
)
_DYNAMICEMB = (
    "NVIDIA/recsys-examples, corelib/dynamicemb/benchmark/README.md at 6f7281aa, tables in device "
    "memory of versions 1 and 2, in training"
)
#: Hash tables that search a row before they read it, and insert the new ones.
HASH_FORWARD = LookupConstants(
    launch=179e-6,
    per_lookup=63.5e-9,
    per_number=0.0,
    hit=1.0,
    sharpness=1.0,
    spread=0.25,
    n=8,
    source=_DYNAMICEMB,
)
#: Their backward pass, which adds up gradients of the same row and updates it once.
HASH_BACKWARD = LookupConstants(
    launch=347e-6,
    per_lookup=114e-9,
    per_number=0.0,
    hit=1.0,
    sharpness=1.0,
    spread=0.06,
    n=8,
    source=_DYNAMICEMB,
)
#: Classes of kernels and their constants.
_CONSTANTS: Mapping[str, LookupConstants] = {
    "embedding_forward._embedding_bag": BAG,
    f"embedding_forward.{HASH}": HASH_FORWARD,
    f"embedding_backward.{HASH}": HASH_BACKWARD,
}
#: Compute capability of the H100 that was measured [-], and the spread elsewhere: A100 and H100 differ
#: by 13 % [-]; docs/formulas.md, table 3.5.
_MEASURED, _ELSEWHERE = 9.0, 0.3
#: Day on which constants were entered.
_DATE = "2026-11-28"


def make_lookup_kernels(
    kernels: Mapping[str, KernelModel], multiprocessors: float, capability: float | None
) -> dict[str, KernelModel]:
    """Make the fits of kernels that wait for rows, for a GPU.

    Parameters
    ----------
    kernels : mapping of str to KernelModel
        Its fits; bytes reach the share of the bandwidth that lookups have there.
    multiprocessors : float
        How many the GPU has [-].
    capability : float or None
        Compute capability of an NVIDIA GPU [-].

    Returns
    -------
    fits : dict of str to KernelModel
        By class, fitted on GPUs like the one that was measured, assumed elsewhere.
    """
    is_near = capability == _MEASURED
    share = kernels["embedding_forward"]["memory_efficiency"]
    fits: dict[str, KernelModel] = {}
    for key, constants in _CONSTANTS.items():
        spread = constants.spread
        if not is_near:
            spread = (spread**2 + _ELSEWHERE**2) ** 0.5
        fits[key] = LookupRoofline.build(
            {
                "launch": constants.launch,
                "memory_efficiency": share,
                "per_lookup": constants.per_lookup / multiprocessors,
                "per_number": constants.per_number / multiprocessors,
                "hit": constants.hit,
                "sharpness": constants.sharpness,
            },
            spread=spread,
            n=constants.n,
            kind="fitted" if is_near else "assumed",
            source=f"{constants.source}; by {multiprocessors:g} multiprocessors",
            date=_DATE,
            notes=("no standard error: not fitted",),
        )
    return fits


def check_hash(kernels: Mapping[str, KernelModel], name: str, kind: str, variant: str) -> None:
    """Refuse hash tables on a platform that does not know their kernels."""
    if variant == HASH and f"{kind}.{HASH}" not in kernels:
        raise ValueError(
            f"platform {name!r} has no kernel of hash tables; take embedding='exact', or a GPU whose "
            "multiprocessors its datasheet states, such as 'h100-sxm-8'"
        )
