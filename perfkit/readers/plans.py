"""Plans in every form in which people have them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.files import LARGEST_TEXT, check_values, reading
from perfkit.ground.units import escape
from perfkit.readers.planner_statistics import is_list_of_lines
from perfkit.readers.printed_plans import read_plan, take_printed_kernels
from perfkit.workloads.placement import Plan, find_ranks, list_with_kernels
from perfkit.workloads.tables import EmbeddingTable


class PlacedTables(NamedTuple):
    """A plan, and its tables with the kernels that the source of the plan says.

    Parameters
    ----------
    plan : Plan
        In the order of the tables.
    tables : tuple of EmbeddingTable
        The tables.
    says_kernels : bool
        Whether the source says kernels; a `Plan` does not.
    """

    plan: Plan
    tables: tuple[EmbeddingTable, ...]
    says_kernels: bool


def find_plan(
    source: Any,
    tables: Sequence[EmbeddingTable],
    *,
    ranks: int | None = None,
    platform_ranks: int | None = None,
) -> PlacedTables:
    """The plan of these tables in a source of any kind, and the tables with its kernels.

    Parameters
    ----------
    source : Plan, ShardingPlan, mapping, str, Path or sequence of str
        A plan; a plan of TorchRec, as objects or as JSON; a ``.json`` file of either; or what
        TorchRec's planner prints, see `perfkit.read_plan`.
    tables : sequence of EmbeddingTable
        The tables of the plan.
    ranks : int, optional
        Number of ranks, for sources that do not say it [-].
    platform_ranks : int, optional
        Ranks of the platform, which a plan of TorchRec has where `ranks` is missing and no table is
        on every rank, unless the plan has further ranks [-].

    Returns
    -------
    placed : PlacedTables
        Plans of TorchRec say where the rows of each table lie; those of perfkit do not.

    Raises
    ------
    ValueError
        For a source that cannot be read, a plan of other tables, one of other ranks, and kernels that
        perfkit does not know.

    Warns
    -----
    UserWarning
        For what is not used of a plan of TorchRec, see `Plan.from_torchrec`.
    """
    if isinstance(source, Plan):
        placed = PlacedTables(source, tuple(tables), False)
    elif isinstance(source, str | Path) and str(source).lower().endswith(".json"):
        placed = _read_json(Path(source), tables, ranks, platform_ranks)
    elif isinstance(source, str | Path) or is_list_of_lines(source):
        with_kernels = take_printed_kernels(source, tables)
        plan = read_plan(source, tables=with_kernels, ranks=ranks)
        placed = PlacedTables(plan, with_kernels, True)
    else:
        placed = _read_torchrec(source, tables, ranks, platform_ranks)
    if ranks is not None and placed.plan.ranks != ranks:
        raise ValueError(
            f"the plan has {placed.plan.ranks} ranks, and ranks is {ranks}; leave ranks out"
        )
    return placed


def _read_torchrec(
    source: Any,
    tables: Sequence[EmbeddingTable],
    ranks: int | None,
    platform_ranks: int | None,
) -> PlacedTables:
    """A plan of TorchRec's, as objects or as plain values."""
    with_kernels = list_with_kernels(source, tables)
    if ranks is None and platform_ranks is not None:
        ranks = find_ranks(source, with_kernels, platform_ranks)
    return PlacedTables(Plan.from_torchrec(source, with_kernels, ranks=ranks), with_kernels, True)


def _read_json(
    path: Path,
    tables: Sequence[EmbeddingTable],
    ranks: int | None,
    platform_ranks: int | None,
) -> PlacedTables:
    """A plan of perfkit's or of TorchRec's in a file."""
    advice = "pass a file that Plan.save or perfkit shard --out has written"
    with reading(path, advice, most=LARGEST_TEXT):
        text = path.read_bytes().decode("utf-8-sig")
        check_values(text, "it")
        data = json.loads(text)
    origin = escape(path, 200)
    if not isinstance(data, dict) or "format" in data:
        return PlacedTables(Plan.from_json(text, origin=origin), tuple(tables), False)
    with reading(origin, "pass the tables of this plan", told=True):
        return _read_torchrec(data, tables, ranks, platform_ranks)
