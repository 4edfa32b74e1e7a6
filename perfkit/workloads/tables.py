"""Embedding tables, with their sizes and lookups, and sets of tables."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from perfkit.ground.number_formats import read_dtype
from perfkit.ground.records import set_fields
from perfkit.ground.results import Table, Tabular
from perfkit.ground.units import (
    check_choice,
    check_positive,
    check_type,
    coerce,
    format_bytes,
    read_number,
    show,
)
from perfkit.models.distributions import (
    Buckets,
    Distribution,
    Uniform,
    Zipf,
    join_buckets,
    spread_rows,
    unique_rows,
)
from perfkit.models.optimizers import find_optimizer
from perfkit.workloads.managed_collisions import MANAGED_COLLISIONS, check_managed_collision
from perfkit.workloads.sizes import check_number, check_size, select_sizes
from perfkit.workloads.table_kernels import FUSED, LOAD_FACTOR, TABLE_KERNELS

#: Bytes of a number in each format that tables have [B]. Sizes alone stand for the first of them.
NUMBER_FORMATS = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
_FORMAT_OF_SIZE = {8: "fp64", 4: "fp32", 2: "fp16", 1: "fp8"}
#: Formats that kernels write pooled rows in.
OUTPUT_FORMATS = ("fp32", "fp16", "bf16")
#: Fewest bytes of a number of these formats [B].
_NARROWEST_OUTPUT = min(NUMBER_FORMATS[name] for name in OUTPUT_FORMATS)
#: Bytes of scale and bias of a row, which FBGEMM keeps beside its numbers [B].
_SCALE_BYTES = {"int8": 8}
#: Bytes of an index and of an offset, which are int64 in PyTorch, and of the weight of a lookup, which
#: is fp32 in TorchRec whatever the table holds: FBGEMM's ``indice_weights`` [B].
INDEX_BYTES, SAMPLE_WEIGHT_BYTES = 8, 4


@dataclass(frozen=True)
class EmbeddingTable:
    """One embedding table and its lookups.

    Parameters
    ----------
    rows : int
        Rows of the table [-].
    dim : int
        Columns of the table [-].
    pooling : float
        Lookups per sample, the pooling factor; those of all its features together [-].
    exponent : float
        Zipf exponent of the row popularity, 0 for uniform [-].
    itemsize : int, optional
        Bytes of one number; by default those of `dtype`, and 4 without one [B].
    name : str
        Name shown in tables and plans.
    law : Uniform, Zipf or ReuseHistogram, optional
        Distribution of the looked-up rows, if more is known than an exponent. It has as many rows
        as the table, or more if this table is a part of a larger one.
    spread : float
        Standard deviation of the lookups of a sample, which no prediction uses [-].
    kernel : str
        Where the rows lie, in TorchRec's words: ``fused`` (device memory), ``uvm`` (host memory),
        ``uvm_caching`` (host memory, with a cache in device memory) or ``key_value`` (an SSD). On a
        CPU all rows lie in host memory, and only ``fused`` is taken.
    load_factor : float, optional
        Share of the rows that the cache in device memory holds, for ``uvm_caching`` and
        ``key_value`` alone; 0.2 where it is not given, as in TorchRec's planner and FBGEMM [-].
    module : str
        Path of the module that has the table, as ``sparse.ebc`` in a model of TorchRec. Tables of
        several modules may share a name.
    weighted : bool
        Whether each lookup has a weight by which its row is multiplied, as with TorchRec's
        ``is_weighted``. Weights come with the indices and are not trained.
    managed_collision : str
        What maps raw ids to rows ahead of the lookups: ``zch`` (TorchRec's
        ``MCHManagedCollisionModule``) or ``mpzch`` (``HashZchManagedCollisionModule``); empty where
        ids are rows. Evictions, whose number nobody states, are left out.
    pooled : bool
        Whether the rows of a sample are added up, as in TorchRec's ``EmbeddingBagCollection``. Those of
        an ``EmbeddingCollection`` are not: a sample gets a row for each lookup, also of tables that are
        split by rows. It takes fewer kinds of placement, and `perfkit.shard` leaves out the others.
    dtype : str
        Format of the numbers: ``fp64``, ``fp32``, ``fp16``, ``bf16``, ``fp8``, or ``int8``, whose rows
        have 8 B of scale and bias more. By default that of `itemsize`, where 2 B are ``fp16`` and 1 B
        is ``fp8``. One kernel looks up tables of one format.
    num_features : int
        Features that look up rows of the table, TorchRec's ``feature_names``: a sample gets a pooled
        row for each of them [-].

    Raises
    ------
    ValueError
        For sizes that are not above zero, a format of another size than `itemsize`, a law of fewer
        rows than the table, an unknown kernel,
        and a load factor that is not above 0 and at most 1, or of a kernel without a cache.

    Examples
    --------
    >>> EmbeddingTable(1_000_000, 64, pooling=8).nbytes
    256000000
    >>> EmbeddingTable(1_000_000, 64, dtype="int8").row_bytes
    72
    >>> EmbeddingTable(1_000_000, 64, kernel="uvm_caching").load_factor
    0.2
    >>> EmbeddingTable(1000, 16, law=Zipf(1000, 1.1, heavy_hitters=(0.3,))).exponent
    1.1
    """

    rows: int
    dim: int
    pooling: float = 1.0
    exponent: float = 0.0
    itemsize: int = None  # type: ignore[assignment]  # which is set at once
    name: str = ""
    law: Distribution | None = field(default=None, repr=False)
    spread: float = field(default=0.0, repr=False)
    kernel: str = field(default=FUSED.name, repr=False)
    load_factor: float | None = field(default=None, repr=False)
    module: str = field(default="", repr=False)
    weighted: bool = field(default=False, repr=False)
    managed_collision: str = field(default="", repr=False)
    pooled: bool = field(default=True, repr=False)
    dtype: str = field(default="", repr=False)
    num_features: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype != "":
            dtype = read_dtype("dtype", dtype, NUMBER_FORMATS)
        set_fields(self, dtype=dtype, itemsize=_find_itemsize(dtype, self.itemsize))
        for size in ("rows", "dim", "itemsize"):  # Python integers do not overflow
            set_fields(self, **{size: check_size(size, getattr(self, size))})
        pooling = check_number("pooling", self.pooling)
        if not isinstance(pooling, np.ndarray):
            pooling = read_number(self.pooling)
        set_fields(self, pooling=pooling)
        num_features = int(check_positive("num_features", self.num_features, integer=True))
        set_fields(self, num_features=num_features)
        check_positive("exponent", self.exponent, zero=True, maximum=10)
        set_fields(self, exponent=read_number(self.exponent))
        check_type("name", self.name, str)
        check_type("module", self.module, str)
        check_positive("spread", self.spread, zero=True)
        set_fields(self, spread=read_number(self.spread))
        check_type("weighted", self.weighted, bool)
        check_type("pooled", self.pooled, bool)
        check_managed_collision(self.managed_collision)
        set_fields(self, load_factor=_check_load_factor(self.kernel, self.load_factor))
        if self.law is None:
            return
        check_type("law", self.law, Distribution)
        if self.law.rows < self.rows:
            raise ValueError(
                f"law has {self.law.rows} rows, the table has {self.rows}; make a law of all its rows"
            )
        if isinstance(self.law, Zipf) and not self.exponent:
            set_fields(self, exponent=float(self.law.exponent))

    def __repr__(self) -> str:
        shown = [item.name for item in fields(self) if item.repr]
        if not has_one_feature(self):
            shown.append("num_features")
        return f"EmbeddingTable({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def nbytes(self) -> int:
        """Bytes of the weights [B]."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, with its scale and bias if it has them [B]."""
        return self.dim * self.itemsize + self.scale_bytes

    @property
    def results(self) -> Any:
        """Rows that a sample gets: one for each feature, or each lookup if rows are not pooled [-]."""
        return self.num_features if self.pooled else self.pooling

    @property
    def scale_bytes(self) -> int:
        """Bytes of scale and bias of one row [B]."""
        return _SCALE_BYTES.get(self.dtype, 0)

    @property
    def number_format(self) -> str:
        """Format of the numbers; one that was not given follows from their size."""
        if self.dtype:
            return self.dtype
        known = _FORMAT_OF_SIZE.get(self.itemsize) if isinstance(self.itemsize, int) else None
        return known or f"{self.itemsize} B"

    @property
    def id_bytes(self) -> int:
        """Bytes of what maps raw ids to rows [B]."""
        if self.managed_collision:
            return self.rows * MANAGED_COLLISIONS[self.managed_collision].row_bytes
        return 0

    @property
    def lookup_bytes(self) -> int:
        """Bytes of what says one lookup: an index, and its weight if lookups have one [B]."""
        if self.weighted:
            return INDEX_BYTES + SAMPLE_WEIGHT_BYTES
        return INDEX_BYTES

    @property
    def device_bytes(self) -> Any:
        """Bytes of the weights in device memory: all of them, or what a cache holds [B]."""
        if TABLE_KERNELS[self.kernel].is_on_device:
            return self.nbytes
        return (self.load_factor or 0.0) * self.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights that lie beyond device memory, those in its cache included [B]."""
        if TABLE_KERNELS[self.kernel].is_on_device:
            return 0
        return self.nbytes

    @cached_property
    def distribution(self) -> Distribution:
        """Distribution of the looked-up rows."""
        if self.law is not None:
            return self.law.resize(self.rows)
        return Zipf(self.rows, self.exponent) if self.exponent else Uniform(self.rows)


def _find_itemsize(dtype: str, itemsize: Any) -> Any:
    """Bytes of one number of a table, from its format if that is given [B]."""
    if not dtype:
        return 4 if itemsize is None else itemsize
    known = NUMBER_FORMATS[dtype]
    if itemsize is not None and read_number(itemsize) != known:
        raise ValueError(
            f"itemsize is {show(itemsize)} and dtype {dtype!r}, whose numbers have {known} B; take "
            f"itemsize={known}, or another dtype"
        )
    return known


def _check_load_factor(kernel: str, load_factor: Any) -> float | None:
    """Check the kernel of a table, and the share of its rows that a cache holds [-]."""
    known = TABLE_KERNELS[check_choice("kernel", kernel, TABLE_KERNELS)]
    if not known.has_cache:
        if load_factor is None:
            return None
        caching = " and ".join(name for name, one in TABLE_KERNELS.items() if one.has_cache)
        raise ValueError(
            f"load_factor is {show(load_factor)} with kernel {kernel!r}, which has no cache; give it "
            f"with {caching} only"
        )
    if load_factor is None:
        return LOAD_FACTOR
    return float(check_positive("load_factor", load_factor, maximum=1))


def put_on_device(table: EmbeddingTable) -> EmbeddingTable:
    """A table like another one whose rows all lie in device memory."""
    if TABLE_KERNELS[table.kernel].is_on_device:
        return table
    on_device = take_part(table)
    vars(on_device).update(kernel=FUSED.name, load_factor=None)
    return on_device


def take_part(
    table: EmbeddingTable,
    *,
    rows: int | None = None,
    dim: int | None = None,
    pooling: float | None = None,
) -> EmbeddingTable:
    """A table like another one with fewer rows, columns or lookups.

    The table has been checked, and a part of it needs no check: of thousands of tables in dozens of
    ways to split them, checks would take most of the time.

    Examples
    --------
    >>> take_part(EmbeddingTable(1000, 64, 2.0), dim=32)
    EmbeddingTable(rows=1000, dim=32, pooling=2.0, exponent=0.0, itemsize=4, name='')
    """
    part = object.__new__(EmbeddingTable)
    vars(part).update(vars(table))
    if rows is not None:
        vars(part).pop("distribution", None)
    changes = {"rows": rows, "dim": dim, "pooling": pooling}
    vars(part).update({name: size for name, size in changes.items() if size is not None})
    return part


@dataclass(frozen=True)
class TableSet(Tabular):
    """Tables that every sample of a batch looks up, to search a placement when the rest of the
    model is not known.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        The tables; unnamed ones are numbered.
    batch : int
        Samples of one iteration over all ranks [-].
    embedding : str
        ``separate`` (one bag operation a table) or ``fused`` (one kernel for all tables of a rank).
    sparse : bool
        Whether the gradient of a table holds one row per lookup instead of the whole table.
    optimizer : str
        What updates the rows, a key of `perfkit.models.optimizers.OPTIMIZERS`.
    name : str
        Name shown in results.
    output_dtype : str
        Format of pooled rows and their gradients, in which they are exchanged; by default that of the
        table with the largest numbers, and ``fp32`` if all have numbers of 1 B, which kernels do not
        write. FBGEMM, and so TorchRec, takes ``fp32`` where nobody says another ``output_dtype``,
        whatever the tables hold.

    Raises
    ------
    ValueError
        For no table, two tables of one name, more lookups per sample than rows, and unknown
        settings.

    Examples
    --------
    >>> TableSet(draw_tables(100, seed=0), batch=65536)
    TableSet('tables': 100 tables, 19.6 GB, 1,450 lookups a sample, batch 65,536)
    """

    report_title = "Embedding tables that every sample of a batch looks up"

    tables: tuple[EmbeddingTable, ...]
    batch: int = 65536
    embedding: str = "separate"
    sparse: bool = True
    optimizer: str = "sgd"
    name: str = "tables"
    output_dtype: str = ""
    #: Workload family, by which platforms are calibrated.
    family: ClassVar[str] = "dlrm"

    def __post_init__(self) -> None:
        tables = self.tables
        check_type("tables", tables, Sequence[EmbeddingTable])
        if not len(tables):
            raise ValueError("tables is empty; it must hold at least one EmbeddingTable")
        names = name_tables(tables)
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(
                f"two tables are named {show(twice)}; every table needs a name of its own"
            )
        for name, table in zip(names, tables, strict=True):
            if table.pooling <= table.rows * table.num_features:
                continue
            fault = f"pooling of {show(name)} is {table.pooling:g}; it must be at most"
            if table.num_features > 1:
                fault = f"{fault} {table.num_features} times"
            meant = "pooling is the mean number of lookups of one sample, not of the batch"
            raise ValueError(f"{fault} its {table.rows} rows; {meant}")
        set_fields(self, batch=check_positive("batch", self.batch, integer=True))
        check_choice("embedding", self.embedding, ("separate", "fused"))
        find_optimizer(self.optimizer, rows=True)
        check_type("sparse", self.sparse, bool)
        check_type("name", self.name, str)
        check_type("output_dtype", self.output_dtype, str)
        if self.output_dtype:
            check_choice("output_dtype", self.output_dtype, OUTPUT_FORMATS)
        set_fields(self, tables=tuple(tables))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights [B]."""
        return sum(table.nbytes for table in self.tables)

    @property
    def pooled_itemsize(self) -> int:
        """Bytes of a number of pooled rows, and of their gradients [B]."""
        if self.output_dtype:
            return NUMBER_FORMATS[self.output_dtype]
        largest = max(table.itemsize for table in self.tables)
        if largest < _NARROWEST_OUTPUT:
            return NUMBER_FORMATS["fp32"]  # as FBGEMM where nobody says another format
        return largest

    def table(self) -> Table:
        """The tables as a Polars frame.

        Returns
        -------
        frame : polars.DataFrame
            name, rows [-], dim [-], pooling [-], exponent [-], nbytes [B] and unique_rows of a
            batch [-]; num_features [-], where a table has more than one.
        """
        import polars

        rows: list[dict[str, Any]] = [
            {
                "name": name,
                "rows": t.rows,
                "dim": t.dim,
                "pooling": float(t.pooling),
                "exponent": float(t.exponent),
                "nbytes": float(t.nbytes),
                "unique_rows": float(unique_rows(t.distribution, self.batch * t.pooling)),
            }
            for name, t in zip(name_tables(self.tables), self.tables, strict=True)
        ]
        if not all(map(has_one_feature, self.tables)):
            for row, table in zip(rows, self.tables, strict=True):
                row["num_features"] = table.num_features
        return polars.DataFrame(rows)

    def __iter__(self) -> Iterator[EmbeddingTable]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def table_optimizer(self) -> str:
        """What updates the rows, by the name that a `DLRM` has for it."""
        return self.optimizer

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        lookups = f"{sum(table.pooling for table in self.tables):,.0f} lookups a sample, batch {self.batch:,}"
        features = ""
        if not all(map(has_one_feature, self.tables)):
            features = f"{sum(table.num_features for table in self.tables):,} features, "
        size = format_bytes(self.nbytes)
        return f"{self.name!r}: {len(self.tables)} tables, {size}, {features}{lookups}"

    def __repr__(self) -> str:
        return f"TableSet({self.headline()})"


def list_formats(tables: Sequence[EmbeddingTable]) -> list[str]:
    """Formats of the numbers of tables, each once: FBGEMM has a kernel for each.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        The tables.

    Returns
    -------
    formats : list of str
        In the order of the tables.

    References
    ----------
    .. [1] meta-pytorch/torchrec, torchrec/distributed/embedding_sharding.py, ``group_tables``

    Examples
    --------
    >>> wide, narrow = EmbeddingTable(1000, 64), EmbeddingTable(10, 16, dtype="fp16")
    >>> list_formats([wide, narrow, wide])
    ['fp32', 'fp16']
    """
    return list(dict.fromkeys(table.number_format for table in tables))


def count_bags(table: EmbeddingTable, samples: Any) -> Any:
    """Sums of rows of so many samples: one for each feature of each sample [-]."""
    if has_one_feature(table):
        return samples
    return samples * table.num_features


def has_one_feature(table: EmbeddingTable) -> bool:
    """Whether a single feature looks up rows of a table."""
    return isinstance(table.num_features, int) and table.num_features == 1


def name_tables(tables: Sequence[EmbeddingTable]) -> list[str]:
    """Names of tables; a table without a name is called by its number.

    Where tables of several modules have one name, their module comes before it.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        The tables.

    Returns
    -------
    names : list of str
        One for each.

    Examples
    --------
    >>> user = EmbeddingTable(1000, 64, name="user", module="sparse.bags")
    >>> name_tables([user, EmbeddingTable(10, 16)])
    ['user', 'table 1']
    >>> name_tables([user, EmbeddingTable(500, 64, name="user", module="history")])
    ['sparse.bags.user', 'history.user']
    """
    names = [table.name or f"table {number}" for number, table in enumerate(tables)]
    if len(set(names)) == len(names):
        return names
    counts = Counter(names)
    for number, table in enumerate(tables):
        if counts[names[number]] > 1 and table.module:
            names[number] = f"{table.module}.{names[number]}"
    return names


def list_tables(name: str, tables: Any) -> tuple[EmbeddingTable, ...]:
    """The tables of a set or sequence of tables; a ValueError for anything else."""
    if isinstance(tables, TableSet):
        return tables.tables
    check_type(name, tables, Sequence[EmbeddingTable])
    return tuple(tables)


def share_lookups(table: EmbeddingTable, parts: int, *, first: bool) -> float:
    """Lookups per sample of one of several equal parts of the rows; the `first` one holds the most
    popular row.

    Parameters
    ----------
    table : EmbeddingTable
        The whole table.
    parts : int
        Parts of as many rows [-].
    first : bool
        Whether it is the first part.

    Returns
    -------
    pooling : float
        Lookups per sample [-].
    """
    hottest = float(table.distribution.buckets()[0].max())
    return table.pooling * ((1 - hottest) / parts + hottest * first)


def keep_hottest(part: EmbeddingTable, whole: EmbeddingTable) -> EmbeddingTable:
    """A part of the rows with the most popular one, whose law says so where this row decides.

    Lookups of this row come on top of a share of all others. Where rows lie in host memory, a cache
    or the link serves them again and again, and they cost next to nothing.

    Parameters
    ----------
    part : EmbeddingTable
        A part of the rows.
    whole : EmbeddingTable
        The whole table.

    Returns
    -------
    part : EmbeddingTable
        The same one if it lies in device memory, or if its law is known in full.
    """
    has_law = whole.law is not None or not whole.exponent
    if not part.host_bytes or has_law or part.rows < 2:
        return part
    hottest = float(whole.distribution.buckets()[0].max()) * whole.pooling / part.pooling
    law = Zipf(part.rows, part.exponent, heavy_hitters=(min(hottest, 1.0),))
    return replace(part, law=law)


def list_laws(
    tables: Sequence[EmbeddingTable], configurations: int = 0
) -> Sequence[Distribution] | Buckets:
    """Distribution of the looked-up rows of each table, for each configuration where sizes are
    arrays.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        The tables.
    configurations : int
        Number of configurations, 0 if sizes are numbers [-].

    Returns
    -------
    laws : sequence of Distribution, or Buckets
        The input of `perfkit.models.embedding.size_lookup`.
    """
    if not configurations:
        return [table.distribution for table in tables]
    if any(table.law for table in tables):
        return join_buckets(
            [select_sizes(t, i).distribution for i in range(configurations) for t in tables]
        )
    rows = [
        np.broadcast_to(np.asarray(table.rows, dtype=float), configurations) for table in tables
    ]
    exponents = np.tile([table.exponent for table in tables], configurations)
    return spread_rows(np.stack(rows, axis=1).ravel(), exponents, np.zeros(exponents.shape))


def draw_tables(
    n: int, *, seed: int = 0, correlation: float = 0.0, itemsize: int = 4
) -> tuple[EmbeddingTable, ...]:
    """Draw tables like those of production models: sizes over four decades, most with few lookups
    and some with many.

    Rows are 10^U(3, 7) and columns 16, 32, 64 or 128. Pooling is log-normal around 8 with a spread
    of e, clipped to 1 to 64. The Zipf exponent is U(0, 1.2).

    Parameters
    ----------
    n : int
        Number of tables [-].
    seed : int, optional
        Seed; equal seeds give equal tables [-].
    correlation : float, optional
        Correlation of the logarithms of rows and pooling before they are clipped, between -1 and 1
        [-].
    itemsize : int, optional
        Bytes of one number [B].

    Returns
    -------
    tables : tuple of EmbeddingTable
        The tables, named ``table 0``, ``table 1``, ...

    Raises
    ------
    ValueError
        For a number of tables that is not above zero, or a correlation outside -1 to 1.

    Notes
    -----
    A Gaussian copula correlates rows and pooling; it leaves the distribution of each as it is.

    Examples
    --------
    >>> draw_tables(3, seed=1)[0]
    EmbeddingTable(rows=106662, dim=16, pooling=15.91, exponent=0.9, itemsize=4, name='table 0')
    """
    n = int(check_positive("n", n, integer=True, maximum=10_000_000))
    correlation = coerce("correlation", correlation, float)
    if not -1 <= correlation <= 1:
        raise ValueError(f"correlation is {show(correlation)}; it must be between -1 and 1")
    rng = np.random.default_rng([3, int(check_positive("seed", seed, integer=True, zero=True))])
    first, second = rng.standard_normal((2, n))
    normal = NormalDist()
    rows = [10 ** (3 + 4 * normal.cdf(z)) for z in first.tolist()]
    pooling = np.exp(math.log(8) + correlation * first + math.sqrt(1 - correlation**2) * second)
    dims, exponents = rng.choice((16, 32, 64, 128), n), rng.uniform(0, 1.2, n)
    columns = (rows, dims.tolist(), np.clip(pooling, 1, 64).tolist(), exponents.tolist())
    return tuple(
        EmbeddingTable(round(r), d, round(p, 2), round(e, 2), itemsize, f"table {i}")
        for i, (r, d, p, e) in enumerate(zip(*columns, strict=True))
    )
