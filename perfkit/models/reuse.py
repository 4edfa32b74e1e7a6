"""How far apart the uses of a tensor are, in bytes."""

import numpy as np
import numpy.typing as npt

from perfkit.ground.units import Array
from perfkit.models.distributions import Index


def reuse_distances(tensors: npt.ArrayLike, nbytes: npt.ArrayLike) -> Array:
    """Distinct bytes touched since each tensor was last touched, in an endlessly repeated sequence.

    Parameters
    ----------
    tensors : array of int, shape (n,)
        Which tensor each access touches, in program order [-].
    nbytes : array, shape (n,)
        Bytes of each access; a tensor counts with its largest [B].

    Returns
    -------
    distances : array, shape (n,)
        LRU stack distance of each access: the bytes of every tensor touched since, the tensor itself included [B].

    Notes
    -----
    The sequence repeats, so every access has a predecessor. Exact while the bytes of two rounds stay below 2**53. A
    running sum adds the accesses since the last use. Those whose own last use lies inside the window are subtracted
    again: a dominance sum, computed bit by bit in O(n log n) array steps.

    References
    ----------
    .. [1] R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage hierarchies", IBM
       Systems Journal 9(2), 1970. doi:10.1147/sj.92.0078

    Examples
    --------
    >>> reuse_distances([0, 1, 0, 2], [10, 5, 10, 1]).tolist()
    [11.0, 16.0, 15.0, 16.0]
    """
    names, tensor = np.unique(np.asarray(tensors), return_inverse=True)
    sizes = np.zeros(len(names))
    np.maximum.at(sizes, tensor, np.asarray(nbytes, dtype=float))
    n = len(tensor)
    tensor = np.concatenate([tensor, tensor])
    weight = sizes[tensor]
    order = np.argsort(tensor, kind="stable")
    last = np.full(2 * n, -1)
    again = tensor[order[1:]] == tensor[order[:-1]]
    last[order[1:][again]] = order[:-1][again]
    touched = np.cumsum(weight)
    # Rank of the last use, ties in order, so that "last use is later" becomes "rank is higher".
    rank = np.empty(2 * n, dtype=np.int64)
    rank[np.argsort(last, kind="stable")] = np.arange(2 * n)
    twice = _heavier_before(rank, weight)
    here = np.arange(n, 2 * n)
    return np.asarray(touched[here] - touched[last[here]] - twice[here])


def _heavier_before(rank: Index, weight: Array) -> Array:
    """Sum the weights of earlier elements of higher rank: the highest bit in which such a pair differs is 0 here."""
    result = np.zeros(len(rank))
    group = np.zeros(len(rank), dtype=np.int16 if len(rank) < 2**15 else np.int64)  # short integers sort by radix
    order = np.arange(len(rank))  # elements by the bits seen so far, then by position
    for bit in range(int(len(rank) - 1).bit_length() - 1, -1, -1):
        high = ((rank[order] >> bit) & 1).astype(group.dtype)
        summed = np.cumsum(weight[order] * high)
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        before = np.repeat(np.concatenate([[0.0], summed])[starts], np.diff(starts, append=len(rank)))
        result[order] += np.where(high == 0, summed - before, 0.0)
        group = group * 2 + high
        shuffle = np.argsort(group, kind="stable")
        order, group = order[shuffle], group[shuffle]
    return result
