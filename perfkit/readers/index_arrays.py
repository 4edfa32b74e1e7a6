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
#: Largest ratio of unpacked to packed size, about 10 for indices [-].
_GROWTH = 50
#: Unpacked size that is always allowed [B].
_ALLOWED = 2**26
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
        content = _load(path, limit)
        if isinstance(content, Mapping):
            arrays = content
        else:
            arrays = dict(zip(_NAMES, content, strict=False))
        unknown = [show(key) for key in arrays if key not in _NAMES]
        if unknown:
            raise ValueError(
                f"{path} holds {', '.join(unknown[:5])}; known are {', '.join(_NAMES)}; {_FORMS}"
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
    >>> table, = count_indices([4, 4, 7, 1, 4], offsets=[0, 3], rows=10)
    >>> table.bags, table.pooling, table.unique_rows, table.histogram.counts[:3]
    (2, 2.5, 3.0, (2.0, 0.0, 1.0))
    """
    array = _check_whole("indices", indices)
    bags = _count_lookups(array, offsets, lengths, tables, batch)
    count = len(bags)
    rows_of_tables: list[int | None]
    if isinstance(rows, Sequence | np.ndarray):
        rows_of_tables = [*rows]
    else:
        rows_of_tables = [rows for _ in range(count)]
    if len(rows_of_tables) != count:
        raise ValueError(
            f"rows has {len(rows_of_tables)} entries; it must have one for each of the {count} tables"
        )
    ends = np.cumsum(bags.sum(axis=1))
    parts = np.split(array.reshape(-1), ends[:-1])
    statistics = [
        _describe_table(number, part, bags[number], rows_of_tables[number])
        for number, part in enumerate(parts)
        if part.size
    ]
    if not statistics:
        raise ValueError("indices is empty; record at least one lookup")
    if len(statistics) < count:
        warnings.warn(
            f"{count - len(statistics)} of {count} tables have no lookups and are left out",
            stacklevel=2,
        )
    return statistics


def _describe_table(number: int, indices: Index, bags: Index, rows: int | None) -> IndexStatistics:
    """Statistics of one table from its indices and the lookups of each sample."""
    distinct, accesses = np.unique(indices, return_counts=True)
    low = int(distinct[0])
    high = int(distinct[-1])
    table_rows = high + 1 if rows is None else int(check_positive("rows", rows, integer=True))
    if low < 0:
        raise ValueError(f"an index of table {number} is {low}; it must be 0 or more")
    if high >= table_rows:
        raise ValueError(
            f"an index of table {number} is {high}; it must be below the {table_rows} rows"
        )
    histogram = bin_accesses(accesses, rows=table_rows)
    return IndexStatistics(
        bags=len(bags),
        spread=float(bags.std()),
        histogram=histogram,
        fit=fit_zipf(histogram),
        number=number,
    )


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
    total = indices.size
    bags = _read_bags(indices, offsets, lengths)
    if tables is None:
        has_tables = bags is not None and bags.ndim == 2
        tables = len(bags) if bags is not None and has_tables else 1
    count = int(check_positive("tables", tables, integer=True, maximum=_MOST_TABLES))
    if bags is None:
        samples = total
        if batch is not None:
            samples = int(check_positive("batch", batch, integer=True)) * count
        bags = np.diff(np.arange(samples + 1) * total // max(samples, 1))
    if np.any(bags < 0) or bags.sum() != total:
        raise ValueError(
            f"lengths add up to {bags.sum()}, none may be negative; there are {total} indices"
        )
    if bags.size % count or not bags.size:
        raise ValueError(
            f"{bags.size} samples do not divide by tables = {count}; pass the number of recorded tables"
        )
    return bags.reshape(count, -1)


def _read_bags(indices: Index, offsets: Any, lengths: Any) -> Index | None:
    """Lookups of each sample from what was recorded beside, None where nothing tells them."""
    if lengths is not None:
        return _check_whole("lengths", lengths)
    if offsets is not None:
        starts = _check_whole("offsets", offsets).reshape(-1)
        lacks_end = len(starts) == 1 or (len(starts) > 0 and starts[-1] != indices.size)
        if lacks_end:
            starts = np.append(starts, indices.size)
        bags = np.diff(starts)
        if not len(bags) or starts[0] != 0 or np.any(bags < 0):
            raise ValueError(
                f"offsets must rise from 0 to at most the {indices.size} indices; pass where each "
                "sample starts"
            )
        return bags
    if indices.ndim in (2, 3):
        return np.full(indices.shape[:-1], indices.shape[-1])
    return None


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
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its own message advises to load it unsafely
        raise ValueError(
            "it is damaged, or it holds more than tensors, which could run code"
        ) from error
    parts = content if isinstance(content, Mapping | list | tuple) else [content]
    values = list(parts.values()) if isinstance(parts, Mapping) else list(parts)
    if len(values) > 3 or not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError("it must hold one to three tensors and nothing else")
    return parts
