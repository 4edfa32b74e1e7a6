"""Plans: the rank of each embedding table or of its parts, also as JSON and for TorchRec."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.callers import find_stacklevel
from perfkit.ground.files import LARGEST_TEXT, MOST_ROWS, check_values, reading
from perfkit.ground.records import set_fields
from perfkit.ground.renamed import with_old_names
from perfkit.ground.targets import write_text
from perfkit.ground.units import (
    check_choice,
    check_positive,
    check_type,
    coerce,
    count_values,
    escape,
    read_number,
    show,
)
from perfkit.workloads.placement_kinds import (
    KIND_OF_NAME,
    PLACEMENT_KINDS,
    WHOLE,
    PlacementKind,
)
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.table_kernels import FUSED
from perfkit.workloads.tables import EmbeddingTable, TableSet, list_tables, name_tables
from perfkit.workloads.torchrec_format import (
    DEVICES,
    KERNELS,
    MODULE,
    Target,
    check_accepted,
    check_module,
    check_ranks,
    find_node_size,
    list_modules,
    name_kernel,
    read_kernel,
    write_constraint,
    write_entry,
)

_FORMAT = 1
#: Most ranks that store parts of one table [-].
MOST_RANKS = 2**20
#: Where or how each compute kernel of TorchRec stores a table; others are unknown.
_COMPUTE_KERNELS = {
    "dense": "device",
    "fused": "device",
    "fused_uvm": "in host memory",
    "fused_uvm_caching": "in host memory",
    "dense_uvm": "in host memory",
    "dense_uvm_caching": "in host memory",
    "key_value": "in host memory or on an SSD",
    "ssd_virtual_table": "on an SSD",
    "dram_virtual_table": "in host memory",
    "quant": "of fewer bits",
    "quant_uvm": "of fewer bits in host memory",
    "quant_uvm_caching": "of fewer bits in host memory",
}
#: Kind of placement of TorchRec that has no counterpart here.
_GRID = "grid_shard"
#: Fields of a table in a plan of TorchRec that are read.
_READ_FIELDS = ("sharding_type", "compute_kernel", "ranks", "shards")


class Shard(NamedTuple):
    """A part of a table on one rank: number of the table, rank, first row, rows, first column and
    columns."""

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Placement:
    """The ranks that store one table.

    Parameters
    ----------
    kind : str
        A key of `perfkit.workloads.placement_kinds.KIND_OF_NAME`.
    ranks : tuple of int
        Rank of each shard, in the order of rows or columns.
    columns : tuple of int, optional
        Columns of each shard of a table that is split by columns; equal by default [-].
    frequent : int, optional
        Of a ``hybrid`` table alone, and needed there: so many of the most popular rows are copied to
        all ranks. `perfkit.models.distributions.count_frequent_rows` says how many rows a batch
        looks up often [-].

    Raises
    ------
    ValueError
        For an unknown kind, no rank, the same rank twice, columns that do not fit, and frequent rows
        that are missing or belong to another kind.

    Examples
    --------
    >>> Placement("column_wise", (0, 3), columns=(64, 64))
    Placement(kind='column_wise', ranks=(0, 3), columns=(64, 64))
    >>> Placement("hybrid", (0, 1), frequent=100)
    Placement(kind='hybrid', ranks=(0, 1), columns=(), frequent=100)
    """

    kind: str
    ranks: tuple[int, ...]
    columns: tuple[int, ...] = ()
    frequent: int | None = None

    def __repr__(self) -> str:
        fields = f"kind={self.kind!r}, ranks={self.ranks!r}, columns={self.columns!r}"
        if self.frequent is not None:
            fields += f", frequent={self.frequent!r}"
        return f"Placement({fields})"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KIND_OF_NAME)
        places = {name: f"{name} of a {self.kind} placement" for name in ("ranks", "columns")}
        for name, place in places.items():
            check_type(place, getattr(self, name), Sequence)
        # lengths come first: millions of entries are not looked at before they are refused
        ranks, columns = len(self.ranks), len(self.columns)
        if ranks > MOST_RANKS:
            raise ValueError(
                f"a {self.kind} table is on {ranks} ranks; it may be on at most {MOST_RANKS}"
            )
        if self.traits.is_whole and ranks > 1:
            fault = f"a {self.kind} table must be on one rank, not on {show(self.ranks)}"
            raise ValueError(f"{fault}; choose another kind")
        if columns and (not self.traits.splits_columns or columns != ranks):
            fault = f"columns {show(self.columns)} do not belong to a {self.kind} placement on {ranks} ranks"
            split = " and ".join(kind.name for kind in PLACEMENT_KINDS if kind.splits_columns)
            raise ValueError(f"{fault}; give one number for each rank, to {split} only")
        for name, place in places.items():
            set_fields(self, **{name: coerce(place, getattr(self, name), Sequence[int])})
        for rank in self.ranks:
            check_positive(f"rank of a {self.kind} shard", rank, integer=True, zero=True)
        if not ranks or len(set(self.ranks)) < ranks:
            raise ValueError(
                f"a {self.kind} table is on ranks {show(self.ranks)}; name at least one, and none twice"
            )
        for width in self.columns:
            check_positive("columns of a shard", width, integer=True)
        self._check_frequent_rows()

    def _check_frequent_rows(self) -> None:
        """Refuse frequent rows that are missing, or belong to another kind."""
        if not self.traits.copies_frequent_rows:
            if self.frequent is not None:
                fault = f"frequent is {show(self.frequent)} with a {self.kind} placement"
                raise ValueError(f"{fault}; give it to hybrid placements alone, or leave it out")
            return
        if self.frequent is None:
            raise ValueError(
                f"frequent is missing of a {self.kind} placement; give the number of rows that are "
                "copied to all ranks"
            )
        rows = check_positive("frequent", self.frequent, integer=True, zero=True)
        set_fields(self, frequent=int(rows))
        if len(self.ranks) < 2:
            raise ValueError(
                f"a {self.kind} table is on {len(self.ranks)} rank; frequent rows are copied to at "
                "least two; choose table_wise"
            )

    @property
    def traits(self) -> PlacementKind:
        """What its kind does with a table."""
        return KIND_OF_NAME[self.kind]

    @classmethod
    def example(
        cls, kind: PlacementKind, *, ranks: int, ranks_per_node: int, number: int = 0
    ) -> "Placement":
        """A placement of a kind on ranks that are numbered node by node.

        Parameters
        ----------
        kind : PlacementKind
            The kind.
        ranks, ranks_per_node : int
            Ranks, and ranks of a node, which divides them [-].
        number : int
            Examples of consecutive numbers are on different ranks, as far as there are more [-].

        Examples
        --------
        >>> Placement.example(KIND_OF_NAME["table_row_wise"], ranks=8, ranks_per_node=4, number=1)
        Placement(kind='table_row_wise', ranks=(4, 5, 6, 7), columns=())
        """
        size = ranks
        if kind.is_whole:
            size = 1
        elif kind.is_inside_node:
            size = ranks_per_node
        first = number * size % ranks
        return cls(kind.name, tuple(range(first, first + size)))

    def cut(self, table: EmbeddingTable, number: int = 0) -> list[Shard]:
        """Cut a table into the shards of this placement, in the order of `ranks`.

        Rows are cut into blocks of the same height, rounded up; the last blocks can be lower or
        empty. Of a hybrid table each rank has the frequent rows, which come first, and then a block
        of the others, whose heights differ by at most one row; empty ones are left out. A table with
        fewer rows than shards, fewer than are frequent, or other columns than the shards together,
        raises a ValueError.

        Parameters
        ----------
        table : EmbeddingTable
            The table.
        number : int
            Number of the table [-].
        """
        check_type("table", table, EmbeddingTable)
        number = check_positive("number", number, integer=True, zero=True)
        n, name = len(self.ranks), table.name or f"table {number}"
        if self.traits.splits_columns:
            if not self.columns and table.dim % n:
                raise ValueError(
                    f"{name!r} has {table.dim} columns; {n} equal shards need a multiple; give columns"
                )
            widths = self.columns or (table.dim // n,) * n
            if sum(widths) != table.dim:
                raise ValueError(
                    f"the shards of {name!r} have {sum(widths)} columns together; the table {table.dim}"
                )
            parts = zip(self.ranks, accumulate(widths, initial=0), widths, strict=False)
            return [
                Shard(number, rank, 0, table.rows, start, width) for rank, start, width in parts
            ]
        if self.frequent is not None:
            return self._cut_hybrid(table, number, self.frequent)
        if not self.traits.splits_rows:
            return [Shard(number, rank, 0, table.rows, 0, table.dim) for rank in self.ranks]
        if table.rows < n:
            raise ValueError(
                f"{name!r} has {table.rows} rows; it cannot be split by rows over {n} ranks"
            )
        block = -(-table.rows // n)
        tops = [min(i * block, table.rows) for i in range(n + 1)]
        parts = zip(self.ranks, tops, np.diff(tops).tolist(), strict=False)
        return [Shard(number, rank, top, height, 0, table.dim) for rank, top, height in parts]

    def _cut_hybrid(self, table: EmbeddingTable, number: int, frequent: int) -> list[Shard]:
        """Frequent rows on every rank, and blocks of the others."""
        if table.rows < frequent:
            name = table.name or f"table {number}"
            raise ValueError(
                f"{name!r} has {table.rows} rows; its hybrid placement copies {frequent}; give at most "
                "all rows"
            )
        height, rest = divmod(table.rows - frequent, len(self.ranks))
        shards = []
        top = frequent
        for position, rank in enumerate(self.ranks):
            if frequent > 0:
                shards.append(Shard(number, rank, 0, frequent, 0, table.dim))
            rows = height + 1 if position < rest else height
            if rows > 0:
                shards.append(Shard(number, rank, top, rows, 0, table.dim))
            top += rows
        return shards


def _read_rank(owner: Any) -> int | None:
    """The number of a rank; None for what is no whole number."""
    rank = read_number(owner)
    return rank if isinstance(rank, int) else None


@with_old_names(perceptrons="mlps")
@dataclass(frozen=True)
class Plan:
    """The placement of every table.

    Parameters
    ----------
    ranks : int
        Ranks that store tables [-].
    owners : tuple of int or Placement
        For each table its rank, if it is stored whole on one, or its `Placement`.
    names : tuple of str, optional
        Names of the tables, for files; plans that differ only in names are equal.
    mlps : Strategy, optional
        How the ranks share all other weights, by its `tp`, `dp`, `zero` and `shards`; by default
        each has a copy. The ranks of a group of `tp` are neighbours. They share the products of
        pairs of layers, and gather the samples of the group for these.

    Raises
    ------
    ValueError
        For a rank outside ``0 … ranks - 1``, for tables that are not on all ranks although their
        kind is, and for MLPs that are shared in another way or by other ranks.

    Examples
    --------
    >>> Plan.round_robin(5, ranks=2).tables_of(0)
    (0, 2, 4)
    >>> plan = Plan(2, (0, Placement("column_wise", (0, 1))))
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    ranks: int
    owners: tuple[int | Placement, ...]
    names: tuple[str, ...] = field(default=(), compare=False, repr=False)
    mlps: Strategy | None = None

    def __post_init__(self) -> None:
        set_fields(self, ranks=int(check_positive("ranks", self.ranks, integer=True)))
        check_type("owners", self.owners, Sequence)
        count_values("owners", self.owners)
        check_type("names", self.names, Sequence[str])
        if self.names and len(self.names) != len(self.owners):
            raise ValueError(
                f"names has {len(self.names)} entries for {len(self.owners)} tables; give one for each"
            )
        owners: list[Any] = list(self.owners)
        for table, owner in enumerate(owners):
            placed = isinstance(owner, Placement)
            if not placed:
                owners[table] = owner = _read_rank(owner)
            for rank in owner.ranks if placed else (owner,):
                if rank is None or not 0 <= rank < self.ranks:
                    given = show(rank if placed else self.owners[table])
                    fault = f"table {table} is placed on rank {given}; ranks go from 0 to {self.ranks - 1}"
                    raise ValueError(f"{fault}; give every table the number of an existing rank")
            if placed and owner.traits.is_everywhere and len(owner.ranks) < self.ranks:
                fault = f"table {table} is {owner.kind} on {len(owner.ranks)} of {self.ranks} ranks"
                raise ValueError(f"{fault}; it must name all of them")
            if placed and owner.traits.is_whole:
                owners[table] = owner.ranks[0]
        set_fields(self, owners=tuple(owners))
        check_type("mlps", s := self.mlps, Strategy | None)
        if s and (
            any(map(np.ndim, vars(s).values()))
            or s != Strategy(**self.shared)
            or s.ranks != self.ranks
        ):
            raise ValueError(
                f"mlps is {s}; give tp, dp, zero and shards alone, with tp times dp = {self.ranks}"
            )

    @property
    def shared(self) -> dict[str, int]:
        """Fields of the strategy by which ranks share MLPs; empty if each has a copy [-]."""
        return {key: getattr(self.mlps, key) for key in ("tp", "dp", "zero", "shards") if self.mlps}

    @classmethod
    def round_robin(cls, tables: int, *, ranks: int) -> "Plan":
        """Place the tables whole, one rank after the other.

        Parameters
        ----------
        tables : int
            Number of tables [-].
        ranks : int
            Number of ranks [-].
        """
        tables = check_positive("tables", tables, integer=True, maximum=10_000_000)
        ranks = check_positive("ranks", ranks, integer=True)
        return _place_round_robin(tables, ranks)

    @classmethod
    def from_owners(cls, owners: Sequence[int | Placement], *, ranks: int) -> "Plan":
        """A plan from any sequence of ranks and placements.

        Parameters
        ----------
        owners : sequence of int or Placement
            Rank of each table, or its `Placement`.
        ranks : int
            Number of ranks [-].
        """
        return cls(ranks, owners)  # type: ignore[arg-type]

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Placement of every table, in table order."""
        whole: dict[int, Placement] = {}  # tables on the same rank share a placement
        placements = []
        for owner in self.owners:
            if isinstance(owner, Placement):
                placements.append(owner)
                continue
            if owner not in whole:
                whole[owner] = Placement(WHOLE.name, (owner,))
            placements.append(whole[owner])
        return tuple(placements)

    def tables_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the tables on one rank; a table that is not whole on one rank raises a
        ValueError.

        Parameters
        ----------
        rank : int
            Rank number [-].
        """
        rank = check_positive("rank", rank, integer=True, zero=True)
        for table, owner in enumerate(self.owners):
            if isinstance(owner, Placement):
                fault = f"table {table} is {owner.kind}; here every table must be whole on one rank"
                raise ValueError(f"{fault}; price other plans with perfkit.price_plan")
        return tuple(table for table, owner in enumerate(self.owners) if owner == rank)

    def order_rows(self) -> "Plan":
        """The plan with the ranks of each table that is split by rows in their order, as TorchRec has
        them. The first rank has the most popular row, so the time may be another one.

        Examples
        --------
        >>> Plan(2, (Placement("row_wise", (1, 0)), 1)).order_rows().owners
        (Placement(kind='row_wise', ranks=(0, 1), columns=()), 1)
        """
        owners: list[int | Placement] = []
        for owner in self.owners:
            if isinstance(owner, Placement) and owner.traits.splits_rows:
                owner = replace(owner, ranks=tuple(sorted(owner.ranks)))
            owners.append(owner)
        return replace(self, owners=tuple(owners))

    def cut(self, tables: Sequence[EmbeddingTable]) -> list[Shard]:
        """Cut the tables into shards, in their order; tables that do not fit the plan raise a
        ValueError.

        Parameters
        ----------
        tables : sequence of EmbeddingTable
            The tables of this plan.
        """
        tables = list_tables("tables", tables)
        if len(tables) != len(self.owners):
            raise ValueError(
                f"plan places {len(self.owners)} tables; there are {len(tables)}; make a plan for these"
            )
        shards = list[Shard]()
        for number, (placement, table) in enumerate(zip(self.placements, tables, strict=True)):
            shards += placement.cut(table, number)
        return shards

    def to_json(self) -> str:
        """Write the plan as JSON.

        Returns
        -------
        text : str
            ``format``, ``ranks`` and ``tables`` with ``name``, ``kind``, ``ranks``, ``columns`` and
            ``frequent`` [-].
        """
        names = self.names or [f"table {i}" for i in range(len(self.owners))]
        entries = []
        for name, placement in zip(names, self.placements, strict=True):
            entry: dict[str, Any] = {"name": name, "kind": placement.kind, "ranks": placement.ranks}
            if placement.columns:
                entry["columns"] = placement.columns
            if placement.frequent is not None:
                entry["frequent"] = placement.frequent
            entries.append(json.dumps(entry))
        shared = f'"mlps": {json.dumps(self.shared)}, ' if self.shared else ""
        head = f'{{"format": {_FORMAT}, "ranks": {self.ranks}, {shared}"tables": [\n'
        return head + ",\n".join(entries) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, *, origin: str = "plan") -> "Plan":
        """Read a plan from JSON; anything else raises a ValueError with place and reason.

        Parameters
        ----------
        text : str
            Text written by `to_json` [-].
        origin : str, optional
            Name of the text in errors [-].
        """
        from perfkit.ground.schemas import convert  # msgspec takes time to import
        from perfkit.workloads.plan_schema import PlanFile

        with reading(origin, "compare with Plan.round_robin(2, ranks=2).to_json()"):
            check_type("text", text, str)
            check_values(text, "it")
            data = json.loads(text)
            check_type("plan", data, dict)
            if "format" not in data and _looks_like_torchrec(data):
                text = "it is no plan that perfkit wrote, but modules with tables as in TorchRec"
                advice = "read it with json.load and pass the dictionary to Plan.from_torchrec"
                raise ValueError(f"{text}; {advice}")
            if type(data.get("format")) is not int or data["format"] != _FORMAT:
                raise ValueError(
                    f"format is {data.get('format')!r}; this perfkit reads format {_FORMAT}"
                )
            listed = data.get("tables")
            if isinstance(listed, list) and len(listed) > MOST_ROWS:
                raise ValueError(f"tables has {len(listed)} entries; it may have {MOST_ROWS}")
            file = convert(data, PlanFile)
            known: dict[_Entry, Placement] = {}  # tables that lie alike share a placement
            owners = tuple(
                _place(
                    _Entry(entry.kind, entry.ranks, entry.columns, entry.frequent),
                    f"tables[{i}]",
                    known,
                )
                for i, entry in enumerate(file.tables)
            )
            names = tuple(entry.name for entry in file.tables)
            fields = file.mlps or file.perceptrons
            shared = Strategy(**fields) if fields else None
            return cls(file.ranks, owners, names if all(names) else (), shared)

    def save(self, path: str | Path) -> Path:
        """Write the plan to a file, completely or not at all.

        Parameters
        ----------
        path : str or Path
            File to write; an existing one is replaced [-].
        """
        return write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Parameters
        ----------
        path : str or Path
            The file [-].

        Raises
        ------
        ValueError
            For a file that is missing, unreadable or no plan.
        """
        with reading(path, "pass a file that Plan.save has written", most=LARGEST_TEXT):
            return cls.from_json(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))

    def to_torchrec(
        self,
        tables: Sequence[EmbeddingTable],
        *,
        module: str | None = None,
        ranks_per_node: int | None = None,
        device: str = "cuda",
        pooled: bool | None = None,
    ) -> dict[str, Any]:
        """The plan as plain values, as TorchRec writes a ``ShardingPlan``.

        It is a dictionary also where torchrec is installed: a plan is data, as that of `to_json`.
        ``perfkit.workloads.torchrec_format.make_sharding_plan(plan.to_torchrec(tables))`` makes a
        ``ShardingPlan`` of it. `ShardingResult.to_torchrec` gives this ``ShardingPlan`` by itself, and
        with ``plain=True`` the dictionary.

        Parameters
        ----------
        tables : sequence of EmbeddingTable
            The tables of this plan.
        module : str, optional
            Path of the embedding collection in the model; by default that of each table, and for
            tables that name none ``sparse_arch.embedding_bag_collection``, as in TorchRec's DLRM. A
            path that the model lacks is no error in TorchRec: it copies the tables to all ranks. The
            path of a collection that is the whole model is ``""``.
        ranks_per_node : int, optional
            Ranks of a node, by which GPUs are numbered; by default those of a ``table_row_wise``
            table, which fills a node, else all ranks [-].
        device : str, optional
            ``cuda`` or ``cpu``.
        pooled : bool, optional
            Whether the collection is an ``EmbeddingBagCollection``; an ``EmbeddingCollection`` takes
            fewer kinds of placement. By default as each table says.

        Returns
        -------
        plan : dict
            Module to table to ``sharding_type``, ``compute_kernel``, ``ranks`` and, except for copies,
            ``shards``: a list of ``shard_offsets`` and ``shard_sizes`` (rows, columns) and
            ``placement``. Tables with a cache have ``cache_params``.

        Raises
        ------
        ValueError
            For a placement that TorchRec does not have, refuses or understands in another way:
            columns of a shard that are no multiple of 4, rows on ranks that are not in their order,
            ``table_row_wise`` over parts of a node.

        Warns
        -----
        UserWarning
            If the path of the collection is not known, or `module` is another one than tables name.

        Examples
        --------
        >>> plan = Plan(2, (Placement("row_wise", (0, 1)),))
        >>> plan = plan.to_torchrec([EmbeddingTable(10, 16)], module="ebc")
        >>> plan["ebc"]["table 0"]["shards"][1]
        {'shard_offsets': [5, 0], 'shard_sizes': [5, 16], 'placement': 'rank:1/cuda:1'}
        """
        plan, notes = self._write_torchrec(tables, module, ranks_per_node, device, pooled)
        warn_of_paths(notes, stacklevel=2)
        return plan

    def _write_torchrec(
        self,
        tables: Sequence[EmbeddingTable],
        module: str | None,
        ranks_per_node: int | None,
        device: str,
        pooled: bool | None,
    ) -> tuple[dict[str, Any], list[str]]:
        """What `to_torchrec` gives, and what is said of the paths of modules."""
        tables = list_tables("tables", tables)
        check_module(module)
        check_choice("device", device, DEVICES)
        target = Target(self.ranks, self._find_node_size(ranks_per_node, device), device, pooled)
        shards: list[list[Shard]] = [[] for _ in self.owners]
        for shard in self.cut(tables):
            shards[shard.table].append(shard)
        plan: dict[str, Any] = {}
        for number, (table, placement) in enumerate(zip(tables, self.placements, strict=True)):
            path = module
            if path is None:
                path = table.module or MODULE
            name = table.name or f"table {number}"
            entries = plan.setdefault(path, {})
            if name in entries:
                raise ValueError(
                    f"two tables of module {show(path)} are named {show(name)}; leave module out, or "
                    "name them differently"
                )
            widths = [shard.columns for shard in shards[number]]
            check_accepted(name, table, placement.traits, widths, target)
            check_ranks(name, placement.traits, placement.ranks, target)
            boxes = [
                {
                    "shard_offsets": [shard.first_row, shard.first_column],
                    "shard_sizes": [shard.rows, shard.columns],
                    "placement": target.place(shard.rank),
                }
                for shard in shards[number]
            ]
            entries[name] = write_entry(table, placement.traits, placement.ranks, boxes)
        return plan, _note_paths(tables, module)

    def _find_node_size(self, ranks_per_node: int | None, device: str) -> int:
        """Ranks of a node [-]."""
        if ranks_per_node is not None:
            return int(check_positive("ranks_per_node", ranks_per_node, integer=True))
        kinds = [(placement.traits, placement.ranks) for placement in self.placements]
        return find_node_size(self.ranks, kinds, device=device)

    def to_torchrec_constraints(
        self, tables: Sequence[EmbeddingTable], *, pooled: bool | None = None
    ) -> dict[str, dict[str, Any]]:
        """What TorchRec's own planner must keep to place the tables in the kinds of this plan, as
        plain values of ``ParameterConstraints``. It chooses the ranks.

        Parameters
        ----------
        tables : sequence of EmbeddingTable
            The tables of this plan.
        pooled : bool, optional
            Whether the collection is an ``EmbeddingBagCollection``; by default as each table says.

        Returns
        -------
        constraints : dict
            Table to ``sharding_types``, ``compute_kernels``, ``pooling_factors``, for splits by
            columns ``min_partition``, and for tables with a cache ``cache_params``.

        Raises
        ------
        ValueError
            For a placement that TorchRec does not take, and for two tables of one name, which
            TorchRec does not tell apart here.

        Examples
        --------
        >>> plan = Plan(2, (Placement("column_wise", (0, 1)),))
        >>> plan.to_torchrec_constraints([EmbeddingTable(10, 64)])["table 0"]["min_partition"]
        32
        """
        tables = list_tables("tables", tables)
        target = Target(self.ranks, self._find_node_size(None, "cpu"), "cpu", pooled)
        widths: list[list[int]] = [[] for _ in self.owners]
        for shard in self.cut(tables):
            widths[shard.table].append(shard.columns)
        constraints: dict[str, dict[str, Any]] = {}
        for number, (table, placement) in enumerate(zip(tables, self.placements, strict=True)):
            name = table.name or f"table {number}"
            if name in constraints:
                raise ValueError(
                    f"two tables are named {show(name)}; TorchRec has constraints by name; give every "
                    "table a name of its own"
                )
            kind = placement.traits
            check_accepted(name, table, kind, widths[number], target)
            constraints[name] = write_constraint(table, kind, widths[number])
        return constraints

    @classmethod
    def from_torchrec(
        cls, plan: Any, tables: Sequence[EmbeddingTable], *, ranks: int | None = None
    ) -> "Plan":
        """Read a plan of TorchRec, which may have the tables of several modules.

        Several shards by columns on one rank become one, with the sum of their columns.

        Parameters
        ----------
        plan : ShardingPlan, EmbeddingModuleShardingPlan or mapping
            TorchRec's objects; or their JSON, as `to_torchrec` and ``ShardingPlan._serialize`` write
            it: module to table to ``sharding_type``, ``ranks`` and ``shards``.
        tables : sequence of EmbeddingTable
            The tables, by their names, and by their modules where they have some.
        ranks : int, optional
            Number of ranks; by default those of the tables that are on every rank [-].

        Raises
        ------
        ValueError
            For a table that is missing or unknown, for one in two modules that names none, for an
            unknown kind of placement, and where `ranks` is missing and no table is on every rank.

        Warns
        -----
        UserWarning
            For tables whose ``compute_kernel`` is another one than that of the table, or unknown:
            they are priced by the kernel of the table. Also for shards that were joined, and for
            fields that are not used.
        """
        with reading("plan", "compare with Plan.to_torchrec"):
            tables = list_tables("tables", tables)
            entries = _find_entries(list_modules(plan), tables)
            if ranks is None:
                ranks = _count_ranks(entries)
        if ranks is None:
            raise ValueError("no table is on every rank; pass ranks=, the number of ranks")
        with reading("plan", "compare with Plan.to_torchrec"):
            read, notes = _read_torchrec(entries, tables, ranks)
        if notes:
            warnings.warn("; ".join(notes), UserWarning, stacklevel=find_stacklevel())
        return read


def _note_paths(tables: Sequence[EmbeddingTable], module: str | None) -> list[str]:
    """Say which tables have no module, so that a usual path was taken, and which have another one
    than `module`."""
    names = [table.name or f"table {number}" for number, table in enumerate(tables)]
    copies = (
        "TorchRec copies the tables of a path that the model lacks to all ranks, without an error"
    )
    if module is None:
        unplaced = [name for name, table in zip(names, tables, strict=True) if not table.module]
        if not unplaced:
            return []
        return [
            f"the module of {_count(unplaced)} is not known, and {MODULE!r} is taken, as in "
            f"TorchRec's DLRM; {copies}; name the module, or read the tables from the whole model"
        ]
    others = [table for table in tables if table.module not in ("", module)]
    if not others:
        return []
    renamed = [
        name for name, table in zip(names, tables, strict=True) if table.module not in ("", module)
    ]
    return [
        f"module is {show(module)}, and that of {_count(renamed)} is {show(others[0].module)}; {copies}; "
        "leave module out, unless the path has changed since the tables were read"
    ]


def warn_of_paths(notes: Sequence[str], *, stacklevel: int) -> None:
    """Warn of what is said of the paths of modules."""
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=stacklevel + 1)


def take_kernels(tables: TableSet, plan: Any) -> TableSet:
    """The same tables with the compute kernels and load factors of a plan of TorchRec, by which they
    are then priced.

    Parameters
    ----------
    tables : TableSet
        The tables, by their names, and by their modules where they have some.
    plan : ShardingPlan, EmbeddingModuleShardingPlan or mapping
        TorchRec's objects or their JSON, see `Plan.from_torchrec`.

    Returns
    -------
    tables : TableSet
        The tables with the kernels of the plan. Copied tables lie in device memory.

    Raises
    ------
    ValueError
        For a plan of other tables, and for kernels that perfkit does not price.

    Examples
    --------
    >>> from perfkit.workloads.tables import TableSet
    >>> entry = {"sharding_type": "table_wise", "compute_kernel": "fused_uvm", "ranks": [0]}
    >>> tables = TableSet([EmbeddingTable(10, 16, name="a")])
    >>> take_kernels(tables, {"ebc": {"a": entry}}).tables[0].kernel
    'uvm'
    """
    check_type("tables", tables, TableSet)
    return replace(tables, tables=list_with_kernels(plan, tables.tables))


def list_with_kernels(plan: Any, tables: Sequence[EmbeddingTable]) -> tuple[EmbeddingTable, ...]:
    """Tables with the compute kernels and load factors of a plan of TorchRec, see `take_kernels`."""
    with reading("plan", "compare with Plan.to_torchrec"):
        entries = _find_entries(list_modules(plan), tables)
        changed = [
            read_kernel(entry.place, entry.values, table)
            for entry, table in zip(entries, tables, strict=True)
        ]
    return tuple(changed)


def find_ranks(plan: Any, tables: Sequence[EmbeddingTable], ranks: int) -> int | None:
    """Number of ranks of a plan of TorchRec that may not say it.

    Parameters
    ----------
    plan : ShardingPlan, EmbeddingModuleShardingPlan or mapping
        TorchRec's objects or their JSON, see `Plan.from_torchrec`.
    tables : sequence of EmbeddingTable
        The tables, by their names, and by their modules where they have some.
    ranks : int
        Ranks of the platform [-].

    Returns
    -------
    ranks : int or None
        Those of the tables that are on every rank. Where there is none, those of the platform if the
        plan has no rank beyond them, else None [-].

    Raises
    ------
    ValueError
        For a plan of other tables, and for entries that cannot be read.

    Examples
    --------
    >>> entry = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [3]}
    >>> find_ranks({"ebc": {"a": entry}}, [EmbeddingTable(10, 16, name="a")], 8)
    8
    """
    with reading("plan", "compare with Plan.to_torchrec"):
        entries = _find_entries(list_modules(plan), tables)
        counted = _count_ranks(entries)
        if counted is not None:
            return counted
        for entry, table in zip(entries, tables, strict=True):
            named = _read_entry(entry.place, entry.values, table, ranks).ranks
            if max(named, default=0) >= ranks:
                return None
    return ranks


@lru_cache(maxsize=8)
def _place_round_robin(tables: int, ranks: int) -> Plan:
    """The plan of `Plan.round_robin`; those of the last ones are kept."""
    return Plan(ranks, tuple(table % ranks for table in range(tables)))


class _Entry(NamedTuple):
    """The fields of a placement that a file or a dictionary holds, before they are checked."""

    kind: str
    ranks: tuple[int, ...]
    columns: tuple[int, ...] = ()
    frequent: int | None = None


def _place(entry: _Entry, place: str, known: dict[_Entry, Placement]) -> Placement:
    """The placement of an entry, one of those that are known if it is the same."""
    if entry not in known:
        with reading(place, "compare with Plan.to_json"):
            known[entry] = Placement(entry.kind, entry.ranks, entry.columns, entry.frequent)
    return known[entry]


def _looks_like_torchrec(data: Mapping[str, Any]) -> bool:
    """Whether a table of a module has a ``sharding_type``."""
    return any(
        isinstance(entry, Mapping) and "sharding_type" in entry
        for part in data.values()
        if isinstance(part, Mapping)
        for entry in part.values()
    )


def _read_torchrec(
    entries: Sequence["_TorchrecEntry"], tables: Sequence[EmbeddingTable], ranks: int
) -> tuple[Plan, list[str]]:
    """A plan of TorchRec, and what in it is not used."""
    names = name_tables(tables)
    known: dict[_Entry, Placement] = {}
    owners = [
        _place(_read_entry(entry.place, entry.values, table, ranks), entry.place, known)
        for entry, table in zip(entries, tables, strict=True)
    ]
    read = Plan(ranks, tuple(owners), tuple(names))
    notes = _list_unused(names, [entry.values for entry in entries], tables, owners)
    joined, uneven = [], []
    for name, entry, owner, table in zip(names, entries, owners, tables, strict=True):
        shards = entry.values.get("shards") or entry.values.get("ranks") or ()
        if owner.traits.splits_columns and len(shards) > len(owner.ranks):
            joined.append(name)
        if _has_other_rows(entry.values, owner, table):
            uneven.append(name)
    if joined:
        notes.append(
            f"shards of columns of {_count(joined)} that lie on one rank are priced as one; each reads "
            "the indices again"
        )
    if uneven:
        notes.append(f"rows of the shards of {_count(uneven)} are priced as equal blocks")
    return read, notes


def _count_ranks(entries: Sequence["_TorchrecEntry"]) -> int | None:
    """Ranks of the tables that are on every rank; None if there is none [-]."""
    for entry in entries:
        listed = entry.values.get("ranks") or ()
        if _read_kind(entry.place, entry.values).is_everywhere and listed:
            return len(listed)
    return None


class _TorchrecEntry(NamedTuple):
    """A table of a plan of TorchRec, and its place in errors."""

    place: str
    values: Mapping[str, Any]


def _find_entries(
    plan: Mapping[str, Any], tables: Sequence[EmbeddingTable]
) -> list[_TorchrecEntry]:
    """The entry of each table; each entry is that of one table."""
    modules = dict[str, list[str]]()  # by the name of a table
    for module, part in plan.items():
        check_type(f"module {show(module)}", part, Mapping)
        for name, entry in part.items():
            check_type(f"{module}.{name}", entry, Mapping)
            modules.setdefault(name, []).append(module)
    entries = []
    taken = set[tuple[str, str]]()
    for number, table in enumerate(tables):
        name = table.name or f"table {number}"
        module = _find_module(name, table.module, modules.get(name, []))
        if (module, name) in taken:
            raise ValueError(
                f"two tables are {show(f'{module}.{name}')}; every table needs a name of its own"
            )
        taken.add((module, name))
        entries.append(_TorchrecEntry(f"{module}.{name}", plan[module][name]))
    for name, owners in modules.items():
        for module in owners:
            if (module, name) not in taken:
                raise ValueError(f"{show(_name_entry(module, name, owners))} is in the plan only")
    return entries


def _find_module(name: str, module: str, modules: Sequence[str]) -> str:
    """The module of a plan that has a table; `module` is what the table says, empty if nothing."""
    if module in modules:
        return module
    if not modules:
        raise ValueError(f"{show(name)} is in the tables only")
    if len(modules) == 1:
        return modules[0]
    places = " and as ".join(f"{path}.{name}" for path in modules[:2])
    raise ValueError(
        f"{show(name)} is twice in the plan, as {places}; the table must name its module, as "
        f"EmbeddingTable(..., module={modules[0]!r})"
    )


def _name_entry(module: str, name: str, modules: Sequence[str]) -> str:
    """The name of a table of a plan, behind its module where several modules have the name."""
    return name if len(modules) == 1 else f"{module}.{name}"


def _read_entry(
    place: str, entry: Mapping[str, Any], table: EmbeddingTable, ranks_of_plan: int
) -> _Entry:
    """One table of a plan of TorchRec."""
    kind = _read_kind(place, entry)
    listed = entry.get("ranks") or []
    shards = entry.get("shards") or ()
    if kind.is_copied and not listed:  # TorchRec does not use them
        listed = list(range(ranks_of_plan))
    if not kind.is_copied:  # each rank of copies holds all
        _check_shards(place, shards, table)
    shards_tell_ranks = bool(shards) and all("rank" in shard for shard in shards)
    if shards_tell_ranks and kind.splits_columns:
        ranks = coerce(f"{place}.ranks", [shard["rank"] for shard in shards], tuple[int, ...])
        if listed:
            _check_ranks(place, listed, ranks)
    else:
        ranks = coerce(f"{place}.ranks", listed, tuple[int, ...])
        if shards_tell_ranks:
            _check_ranks(place, ranks, [shard["rank"] for shard in shards])
    if not kind.splits_columns:
        return _Entry(kind.name, ranks)
    widths = [shard["sizes"][1] for shard in shards]
    columns = coerce(f"{place}.columns", widths, tuple[int, ...])
    if len(set(ranks)) == len(ranks):
        return _Entry(kind.name, ranks, columns)
    return _join_shards(place, _Entry(kind.name, ranks, columns), table)


def _read_kind(place: str, entry: Mapping[str, Any]) -> PlacementKind:
    """The kind that a table of a plan of TorchRec names."""
    name = coerce(f"{place}.sharding_type", entry.get("sharding_type"), str)
    if name == _GRID:
        raise ValueError(
            f"{place}: sharding_type is {_GRID!r}, shards of rows and of columns, which nothing prices; "
            "place the table in another way"
        )
    kinds = {kind.torchrec_name: kind for kind in PLACEMENT_KINDS if kind.torchrec_name}
    check_choice(f"{place}: sharding_type", name, kinds)
    return kinds[name]


def _join_shards(place: str, entry: _Entry, table: EmbeddingTable) -> _Entry:
    """Join the shards by columns that lie on one rank."""
    count = len(entry.ranks)
    columns = entry.columns
    if not columns and table.dim % count:
        raise ValueError(
            f"{place} has {table.dim} columns; {count} equal shards need a multiple; give shards"
        )
    columns = columns or (table.dim // count,) * count
    if len(columns) != count:
        raise ValueError(f"{place} has {count} ranks and {len(columns)} shards; give one for each")
    widths = dict.fromkeys(entry.ranks, 0)
    for rank, width in zip(entry.ranks, columns, strict=True):
        widths[rank] += width
    return _Entry(entry.kind, tuple(widths), tuple(widths.values()))


def _check_ranks(place: str, listed: Sequence[Any], used: Sequence[Any]) -> None:
    """Refuse a table whose shards lie on other ranks than it names."""
    if set(listed) != set(used):
        raise ValueError(
            f"{place} has ranks {show(listed)} and shards on ranks {show(used)}; "
            "they must be the same"
        )


def _check_shards(place: str, shards: Sequence[Mapping[str, Any]], table: EmbeddingTable) -> None:
    """Refuse shards that do not hold each number of their table once."""
    if not shards or not all("sizes" in shard for shard in shards):
        return
    for shard in shards:
        for name in ("sizes", "offsets"):
            pair = shard.get(name, (0, 0))
            check_type(f"{name} of a shard of {place}", pair, Sequence[int])
            if len(pair) != 2:
                raise ValueError(
                    f"{place} has a shard with {name} {show(pair)}; give rows and columns"
                )
    numbers = 0
    for shard in shards:
        rows, columns = shard["sizes"]
        numbers += rows * columns
    if numbers != table.rows * table.dim:
        raise ValueError(
            f"{place} has shards of {numbers} numbers together, the table has {table.rows} rows and "
            f"{table.dim} columns; read the plan with its own tables"
        )
    begins = [
        tuple(shard["offsets"]) for shard in shards if "offsets" in shard and all(shard["sizes"])
    ]
    if len(set(begins)) < len(begins):
        raise ValueError(f"{place} has two shards at the same offsets; they must not overlap")


def _has_other_rows(entry: Mapping[str, Any], placement: Placement, table: EmbeddingTable) -> bool:
    """Whether the shards of a table that is split by rows have other heights than `Placement.cut`
    gives them."""
    shards = entry.get("shards") or ()
    if not placement.traits.splits_rows or not all("sizes" in shard for shard in shards):
        return False
    heights = sorted(shard["sizes"][0] for shard in shards)
    return bool(shards) and heights != sorted(shard.rows for shard in placement.cut(table))


def _list_unused(
    names: Sequence[str],
    entries: Sequence[Mapping[str, Any]],
    tables: Sequence[EmbeddingTable],
    owners: Sequence[Placement],
) -> list[str]:
    """What perfkit does not use of the tables of a plan of TorchRec, in words."""
    by_kernel, by_field = dict[str, list[str]](), dict[str, list[str]]()
    for name, entry, table, owner in zip(names, entries, tables, owners, strict=True):
        kernel = entry.get("compute_kernel")
        own = name_kernel(table, owner.traits)
        on_device = table.kernel == FUSED.name and _COMPUTE_KERNELS.get(str(kernel)) == "device"
        if kernel not in (None, own) and not on_device:
            by_kernel.setdefault(str(kernel), []).append(name)
        for field_name in _list_unread(entry, table):
            by_field.setdefault(field_name, []).append(name)
    notes = []
    for kernel, of_kernel in by_kernel.items():
        where = _COMPUTE_KERNELS.get(kernel)
        if where is None:
            note = f"compute_kernel {show(kernel)} of {_count(of_kernel)} is unknown"
        else:
            note = f"the plan has {kernel} ({where}) for {_count(of_kernel)}, the tables do not"
        note += "; time and memory are those of EmbeddingTable.kernel"
        if kernel in KERNELS:
            note += "; take_kernels takes those of the plan"
        notes.append(note)
    if by_field:
        listed = ", ".join(
            f"{show(name)} of {_count(of_field)}" for name, of_field in by_field.items()
        )
        notes.append(f"fields that are not used: {escape(listed, 400)}")
    return notes


def _list_unread(entry: Mapping[str, Any], table: EmbeddingTable) -> list[str]:
    """Fields of a table of a plan of TorchRec that are not used."""
    unread = []
    for name, value in entry.items():
        is_known = name in _READ_FIELDS or value is None or value is False
        if name == "cache_params":
            is_known = value == {"load_factor": table.load_factor} or not value
        if not is_known:
            unread.append(str(name))
    return unread


def _count(names: Sequence[str]) -> str:
    """The only table by its name, or how many and the first."""
    if len(names) == 1:
        return show(names[0])
    return f"{len(names)} tables ({show(names[0])} first)"
