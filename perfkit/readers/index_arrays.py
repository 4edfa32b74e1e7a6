"""Recorded indices of embedding lookups: the statistics of each table, from files that cannot run
code."""

import gzip
import math
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from perfkit.ground.files import reading
from perfkit.ground.units import check_choice, check_positive, format_bytes, show
from perfkit.models.distributions import Index, ReuseHistogram, Zipf
from perfkit.models.skew import ZipfFit, bin_accesses, fit_zipf
from perfkit.workloads.tables import EmbeddingTable

_NAMES = ("indices", "offsets", "lengths")
#: Largest file of recorded indices [B]; a published trace of 856 tables has a tenth of this size.
_LARGEST = 2**34
#: Largest ratio of unpacked to packed size, about 10 for indices [-]; and unpacked size that is
#: always allowed [B].
_GROWTH, _ALLOWED = 50, 2**26
#: Most recorded tables [-]; published traces have up to 856.
_MOST_TABLES = 10_000
_FORMS = "only arrays are read; save indices, or indices, offsets and lengths under these names or in this order"


@dataclass(frozen=True)
class IndexStatistics:
    """Statistics of one table in a recorded batch.

    Parameters
    ----------
    bags : int
        Samples [-].
    spread : float
        Standard deviation of the lookups of a sample [-].
    histogram : ReuseHistogram
        Number of rows by how often they were looked up, with the lookups and the rows of the table.
    fit : ZipfFit
        Zipf exponent with its standard error.
    number : int
        Position among the recorded tables [-].
    """

    bags: int
    spread: float
    histogram: ReuseHistogram
    fit: ZipfFit
    number: int = 0

    @property
    def pooling(self) -> float:
        """Mean lookups of a sample [-]."""
        return self.histogram.lookups / self.bags

    @property
    def unique_rows(self) -> float:
        """Distinct rows of the batch [-]."""
        return sum(self.histogram.counts)

    def to_table(
        self, dim: int, *, itemsize: int = 4, law: str = "histogram", name: str = ""
    ) -> EmbeddingTable:
        """Describe the table for predictions.

        Parameters
        ----------
        dim : int
            Columns [-].
        itemsize : int, optional
            Bytes of one number [B].
        law : str, optional
            ``histogram``, the recorded reuse, which is exact up to twice the recorded batch, or
            ``zipf``, the fitted law.
        name : str, optional
            Name; by default the number of the recorded table.

        Returns
        -------
        table : EmbeddingTable
            The table, with rows, pooling and popularity of the recorded batch.
        """
        check_choice("law", law, ("histogram", "zipf"))
        histogram, exponent = self.histogram, self.fit.exponent
        popularity = histogram if law == "histogram" else Zipf(histogram.rows, exponent)
        name = name or f"table {self.number}"
        return EmbeddingTable(
            histogram.rows, dim, self.pooling, exponent, itemsize, name, popularity, self.spread
        )


def read_indices(
    path: str | Path,
    *,
    rows: int | Sequence[int] | None = None,
    tables: int | None = None,
    batch: int | None = None,
) -> list[IndexStatistics]:
    """Read recorded indices from a file of NumPy or PyTorch.

    Parameters
    ----------
    path : str or Path
        ``.npy`` with indices, ``.npz`` with ``indices``, ``offsets`` and ``lengths``, ``.pt`` or
        ``.pt.gz`` with a tensor, or a dictionary or sequence of these three, as in
        facebookresearch/dlrm_datasets.
    rows : int or sequence of int, optional
        As in `count_indices` [-].
    tables : int, optional
        As in `count_indices` [-].
    batch : int, optional
        As in `count_indices` [-].

    Returns
    -------
    statistics : list of IndexStatistics
        One for each table with lookups.

    Raises
    ------
    ValueError
        For a file that is missing, that needs unpickling, or that does not hold indices.
    """
    path = Path(path)
    with reading(path, _FORMS, most=_LARGEST, unpacks=path.name.lower().endswith(".gz")):
        limit = max(_ALLOWED, _GROWTH * path.stat().st_size)
        found = _load(path, limit)
        arrays = found if isinstance(found, Mapping) else dict(zip(_NAMES, found, strict=False))
        if odd := [show(key) for key in arrays if key not in _NAMES]:
            raise ValueError(
                f"{path} holds {', '.join(odd[:5])}; known are {', '.join(_NAMES)}; {_FORMS}"
            )
        if "indices" not in arrays:
            raise ValueError(f"{path} holds no indices; {_FORMS}")
        _check_growth(8 * sum(math.prod(np.shape(array)) for array in arrays.values()), limit)
    with reading(path, _FORMS):
        return count_indices(**arrays, rows=rows, tables=tables, batch=batch)


def count_indices(
    indices: npt.ArrayLike,
    offsets: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    *,
    rows: int | Sequence[int] | None = None,
    tables: int | None = None,
    batch: int | None = None,
) -> list[IndexStatistics]:
    """Count recorded indices: pooling, distinct rows, reuse, and the Zipf law that fits them.

    Parameters
    ----------
    indices : array or tensor of int
        Row numbers, sample after sample and table after table; of shape (samples, lookups) or
        (tables, samples, lookups) where all samples have the same number [-].
    offsets : array or tensor of int, optional
        Where each sample starts in `indices`, with or without the end [-].
    lengths : array or tensor of int, optional
        Lookups of each sample, shape (samples,) or (tables, samples); `offsets` are then not used
        [-].
    rows : int or sequence of int, optional
        Rows of every table or of each; by default the largest index plus one, which may be too few
        [-].
    tables : int, optional
        Tables; by default from the shape of `lengths` or `indices`, otherwise 1 [-].
    batch : int, optional
        Samples, where only a row of indices is given; by default one lookup each [-].

    Returns
    -------
    statistics : list of IndexStatistics
        One for each table with lookups.

    Raises
    ------
    ValueError
        For arrays that do not hold whole numbers, for negative or too large indices, and for parts
        that do not fit together.

    Warns
    -----
    UserWarning
        For tables without lookups, which are left out.

    Examples
    --------
    >>> found, = count_indices([4, 4, 7, 1, 4], offsets=[0, 3], rows=10)
    >>> found.bags, found.pooling, found.unique_rows, found.histogram.counts[:3]
    (2, 2.5, 3.0, (2.0, 0.0, 1.0))
    """
    flat = _check_whole("indices", indices)
    many = _count_lookups(flat, offsets, lengths, tables, batch)
    sizes = (
        [rows] * len(many)
        if rows is None or not isinstance(rows, Sequence | np.ndarray)
        else list(rows)
    )
    if len(sizes) != len(many):
        raise ValueError(
            f"rows has {len(sizes)} entries; it must have one for each of the {len(many)} tables"
        )
    parts, found = np.split(flat.reshape(-1), np.cumsum(many.sum(axis=1))[:-1]), []
    for number, (size, part, bags) in enumerate(zip(sizes, parts, many, strict=True)):
        if not part.size:
            continue
        numbers, accesses = np.unique(part, return_counts=True)
        low, high = int(numbers[0]), int(numbers[-1])
        held = high + 1 if size is None else int(check_positive("rows", size, integer=True))
        if low < 0 or high >= held:
            limit = "0 or more" if low < 0 else f"below the {held} rows"
            raise ValueError(
                f"an index of table {number} is {low if low < 0 else high}; it must be {limit}"
            )
        histogram = bin_accesses(accesses, rows=held)
        found.append(
            IndexStatistics(len(bags), float(bags.std()), histogram, fit_zipf(histogram), number)
        )
    if not found:
        raise ValueError("indices is empty; record at least one lookup")
    if len(found) < len(many):
        warnings.warn(
            f"{len(many) - len(found)} of {len(many)} tables have no lookups and are left out",
            stacklevel=2,
        )
    return found


def _check_whole(name: str, values: Any) -> Index:
    """An array or tensor as an array of whole numbers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # ragged lists, sparse tensors, tensors on a device
        raise ValueError(
            f"{name} is no plain array: {error}; pass a NumPy array or a dense CPU tensor"
        ) from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} is an array of {array.dtype}; it must be of whole numbers (int32 or int64)"
        )
    return array.astype(np.int64, copy=False)


def _count_lookups(
    indices: Index, offsets: Any, lengths: Any, tables: int | None, batch: int | None
) -> Index:
    """Lookups by table and sample."""
    total, many = indices.size, None
    if lengths is not None:
        many = _check_whole("lengths", lengths)
    elif offsets is not None:
        steps = _check_whole("offsets", offsets).reshape(-1)
        if len(steps) == 1 or (len(steps) and steps[-1] != total):  # the end may be missing
            steps = np.append(steps, total)
        many = np.diff(steps)
        if not len(many) or steps[0] != 0 or np.any(many < 0):
            raise ValueError(
                f"offsets must rise from 0 to at most the {total} indices; pass where each sample starts"
            )
    elif indices.ndim in (2, 3):
        many = np.full(indices.shape[:-1], indices.shape[-1])
    tables = len(many) if many is not None and many.ndim == 2 and tables is None else tables
    count = int(
        check_positive(
            "tables", 1 if tables is None else tables, integer=True, maximum=_MOST_TABLES
        )
    )
    if many is None:
        bags = total if batch is None else int(check_positive("batch", batch, integer=True)) * count
        many = np.diff(np.arange(bags + 1) * total // max(bags, 1))
    if np.any(many < 0) or many.sum() != total:
        raise ValueError(
            f"lengths add up to {many.sum()}, none may be negative; there are {total} indices"
        )
    if many.size % count or not many.size:
        raise ValueError(
            f"{many.size} samples do not divide by tables = {count}; pass the number of recorded tables"
        )
    return many.reshape(count, -1)


def _check_growth(size: float, limit: float) -> None:
    """Refuse a small file that unpacks to a very large one."""
    if size > limit:
        allowed = f"a file of its size may unpack to {format_bytes(limit)} at most"
        raise ValueError(f"it unpacks to {format_bytes(size)} or more; {allowed}")


def _load(path: Path, limit: float) -> Mapping[str, Any] | Sequence[Any]:
    """Arrays of a NumPy or PyTorch file; the unpacked size is checked before unpacking."""
    name = path.name.lower()
    if name.endswith(".npy"):
        return [np.load(path, mmap_mode="r", allow_pickle=False)]
    packed: Any = gzip.open if name.endswith(".gz") else open
    with packed(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pickle protocols before it refuses them
        # unpacks up to there
        _check_growth(file.seek(int(limit) + 1) if name.endswith(".gz") else 0, limit)
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                _check_growth(sum(member.file_size for member in archive.infolist()), limit)
        file.seek(0)
        if not name.endswith(".npz"):
            return _load_torch(file)
        return dict(np.load(file, allow_pickle=False))


def _load_torch(file: Any) -> Mapping[str, Any] | Sequence[Any]:
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its own message advises to load it unsafely
        raise ValueError(
            "it is damaged, or it holds more than tensors, which could run code"
        ) from error
    parts = found if isinstance(found, Mapping | list | tuple) else [found]
    values = list(parts.values() if isinstance(parts, Mapping) else parts)
    if len(values) > 3 or not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError("it must hold one to three tensors and nothing else")
    return parts
