"""Which embedding table lies on which rank, whole or in parts; the plain value, in and out of JSON and TorchRec."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.resources import LARGEST_TEXT, MOST_ROWS, expect, expect_list, expect_whole, reading, write_text
from perfkit.units import check_positive, check_type, show
from perfkit.workloads.shards import KINDS, SPLIT_BY_COLUMNS, Placement, Shard, expect_placement
from perfkit.workloads.tables import EmbeddingTable, name_tables

__all__ = ["KINDS", "Placement", "Plan", "Shard"]

_EVERYWHERE = ("data_parallel", "row_wise")  # kinds that put a part of a table on every rank
_FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Where every table lies.

    Parameters
    ----------
    ranks : int
        Ranks that hold tables [-].
    owners : tuple of int or Placement
        In table order the rank of a table that lies whole on one, or else its `Placement`.
    names : tuple of str, optional
        Names of the tables, for files; two plans that differ in names alone are the same.

    Raises
    ------
    ValueError
        For a rank outside ``0 … ranks - 1``, and for tables on some ranks that their kind puts on all.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", int(check_positive("ranks", self.ranks, integer=True)))
        check_type("owners", self.owners, Sequence)
        check_type("names", self.names, Sequence[str])
        object.__setattr__(self, "owners", tuple(self._check(i, owner) for i, owner in enumerate(self.owners)))
        if self.names and len(self.names) != len(self.owners):
            raise ValueError(f"names has {len(self.names)} entries for {len(self.owners)} tables; give one a table")

    def _check(self, table: int, owner: Any) -> int | Placement:
        placed = isinstance(owner, Placement)
        for rank in owner.ranks if placed else (owner,):
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
                raise ValueError(
                    f"table {table} is placed on rank {rank!r}; ranks go from 0 to {self.ranks - 1}; "
                    "give every table the number of an existing rank"
                )
        if placed and owner.kind in _EVERYWHERE and len(owner.ranks) < self.ranks:
            raise ValueError(
                f"table {table} is {owner.kind} on {len(owner.ranks)} of {self.ranks} ranks; it must name all of them"
            )
        whole: int | Placement = owner.ranks[0] if placed and owner.kind == "table_wise" else owner
        return whole

    @classmethod
    def round_robin(cls, tables: int, *, ranks: int) -> "Plan":
        """Deal the tables out to the ranks in turn.

        Parameters
        ----------
        tables : int
            Number of tables [-].
        ranks : int
            Number of ranks [-].

        Returns
        -------
        plan : Plan
            The placement.
        """
        counts = {"tables": (tables, 10_000_000), "ranks": (ranks, None)}
        tables, ranks = (int(check_positive(n, v, integer=True, maximum=m)) for n, (v, m) in counts.items())
        return cls(ranks, tuple(table % ranks for table in range(tables)))

    @classmethod
    def from_owners(cls, owners: Sequence[int | Placement], *, ranks: int) -> "Plan":
        """Placement from any sequence of rank numbers.

        Parameters
        ----------
        owners : sequence of int or Placement
            Rank of every table, or its `Placement`.
        ranks : int
            Number of ranks [-].

        Returns
        -------
        plan : Plan
            The placement.
        """
        check_type("owners", owners, Sequence)
        return cls(ranks, tuple(o.item() if isinstance(o, np.generic) else o for o in owners))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placement of every table, in table order."""
        return tuple(o if isinstance(o, Placement) else Placement("table_wise", (o,)) for o in self.owners)

    @property
    def is_table_wise(self) -> bool:
        """Whether every table lies whole on one rank."""
        return not any(isinstance(owner, Placement) for owner in self.owners)

    def tables_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the tables on one rank.

        Parameters
        ----------
        rank : int
            Rank number [-].

        Returns
        -------
        tables : tuple of int
            Table numbers in table order.

        Raises
        ------
        ValueError
            Where a table is not whole on one rank.
        """
        for table, owner in enumerate(self.owners):
            if isinstance(owner, Placement):
                raise ValueError(
                    f"table {table} is {owner.kind}; here every table must lie whole on one rank; "
                    "price other plans with perfkit.price_plan"
                )
        return tuple(table for table, owner in enumerate(self.owners) if owner == rank)

    def cut(self, tables: Sequence[EmbeddingTable]) -> list[Shard]:
        """Cut tables into shards.

        Parameters
        ----------
        tables : sequence of EmbeddingTable
            The tables of this plan.

        Returns
        -------
        shards : list of Shard
            All shards, in table order.

        Raises
        ------
        ValueError
            For another number of tables, or tables that cannot be split like that.
        """
        if len(tables) != len(self.owners):
            raise ValueError(f"plan places {len(self.owners)} tables; there are {len(tables)}; make a plan for these")
        pairs = enumerate(zip(self.placements, tables, strict=True))
        return [shard for i, (placement, table) in pairs for shard in placement.cut(table, i)]

    def to_json(self) -> str:
        """Write the plan as JSON.

        Returns
        -------
        text : str
            ``format``, ``ranks`` and ``tables`` with ``name``, ``kind``, ``ranks`` and ``columns`` [-].
        """
        names = self.names or tuple(f"table {i}" for i in range(len(self.owners)))
        entries = [
            {
                "name": name,
                "kind": p.kind,
                "ranks": list(p.ranks),
                **({"columns": list(p.columns)} if p.columns else {}),
            }
            for name, p in zip(names, self.placements, strict=True)
        ]
        head = f'{{"format": {_FORMAT}, "ranks": {self.ranks}, "tables": [\n'
        return head + ",\n".join(json.dumps(entry) for entry in entries) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, *, origin: str = "plan") -> "Plan":
        """Read a plan from JSON.

        Parameters
        ----------
        text : str
            What `to_json` wrote [-].
        origin : str, optional
            What errors call it [-].

        Returns
        -------
        plan : Plan
            The placement.

        Raises
        ------
        ValueError
            With the place and the reason, for anything that is not a plan of this format.
        """
        with reading(origin, "compare with Plan.round_robin(2, ranks=2).to_json()"):
            data = expect("a table", lambda value: isinstance(value, dict))(json.loads(text), "plan")
            if type(data.get("format")) is not int or data["format"] != _FORMAT:
                raise ValueError(f"format is {data.get('format')!r}; this perfkit reads format {_FORMAT}")
            if set(data) != {"format", "ranks", "tables"}:
                raise ValueError(f"keys are {', '.join(map(str, data))}; they must be format, ranks and tables")
            if isinstance(data["tables"], list) and len(data["tables"]) > MOST_ROWS:
                raise ValueError(f"tables has {len(data['tables'])} entries; it may have {MOST_ROWS}")
            entries = expect_list(expect_placement)(data["tables"], "tables")
            owners, names = (tuple(entry[part] for entry in entries) for part in (0, 1))
            return cls(expect_whole(1)(data["ranks"], "ranks"), owners, names if all(names) else ())

    def save(self, path: str | Path) -> Path:
        """Write the plan to a file, whole or not at all.

        Parameters
        ----------
        path : str or Path
            File to write; an existing one is replaced [-].

        Returns
        -------
        path : Path
            The file [-].
        """
        return write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Parameters
        ----------
        path : str or Path
            The file [-].

        Returns
        -------
        plan : Plan
            The placement.

        Raises
        ------
        ValueError
            For a file that is missing, unreadable or not a plan.
        """
        with reading(path, "pass a file that Plan.save has written", most=LARGEST_TEXT):
            return cls.from_json(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))

    def to_torchrec(self, tables: Sequence[EmbeddingTable], *, module: str = "embeddings") -> dict[str, Any]:
        """Describe the plan as the plain dictionary from which TorchRec plans are built.

        Parameters
        ----------
        tables : sequence of EmbeddingTable
            The tables of this plan.
        module : str, optional
            Path of the embedding collection in the model.

        Returns
        -------
        plan : dict
            Module to table to ``sharding_type``, ``compute_kernel``, ``ranks`` and ``shards``: a list of ``rank``,
            ``offsets`` and ``sizes`` (rows, columns).

        Examples
        --------
        >>> plan = Plan(2, (Placement("row_wise", (0, 1)),)).to_torchrec([EmbeddingTable(10, 16)])
        >>> plan["embeddings"]["table 0"]["shards"][1]
        {'rank': 1, 'offsets': [5, 0], 'sizes': [5, 16]}
        """
        shards: dict[int, list[dict[str, Any]]] = {}
        for s in self.cut(tables):
            box = {"rank": s.rank, "offsets": [s.first_row, s.first_column], "sizes": [s.rows, s.columns]}
            shards.setdefault(s.table, []).append(box)
        return {
            module: {
                name: {
                    "sharding_type": placement.kind,
                    "compute_kernel": "dense" if placement.kind == "data_parallel" else "fused",
                    "ranks": list(placement.ranks),
                    "shards": shards[number],
                }
                for number, (name, placement) in enumerate(zip(name_tables(tables), self.placements, strict=True))
            }
        }

    @classmethod
    @reading("plan", "compare with Plan.to_torchrec")
    def from_torchrec(cls, plan: Mapping[str, Any], tables: Sequence[EmbeddingTable], *, ranks: int) -> "Plan":
        """Read a dictionary such as `to_torchrec` writes, with the tables of all its modules.

        Parameters
        ----------
        plan : mapping
            Module to table to ``sharding_type``, ``ranks`` and, for splits by columns, ``shards``.
        tables : sequence of EmbeddingTable
            The tables, by their names.
        ranks : int
            Number of ranks [-].

        Returns
        -------
        plan : Plan
            The placement.

        Raises
        ------
        ValueError
            For a table that is missing, unknown or placed in a way that perfkit does not know.
        """
        entries = {name: (f"{module}.{name}", entry) for module, part in plan.items() for name, entry in part.items()}
        names = name_tables(tables)
        if odd := set(names) ^ set(entries):
            raise ValueError(f"{show(min(odd))} is in {'the tables' if min(odd) in names else 'the plan'} alone")
        owners = []
        for name in names:
            place, entry = entries[name]
            found: dict[str, Any] = {"kind": entry.get("sharding_type"), "ranks": entry.get("ranks") or []}
            if found["kind"] in SPLIT_BY_COLUMNS:
                found["columns"] = [shard["sizes"][1] for shard in entry.get("shards", ())]
            owners.append(expect_placement(found, place)[0])
        return cls(ranks, tuple(owners), tuple(names))
