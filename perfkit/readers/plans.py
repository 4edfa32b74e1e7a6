"""Plans in every form in which people have them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfkit.ground.files import LARGEST_TEXT, check_values, reading
from perfkit.ground.units import escape
from perfkit.readers.planner_statistics import is_list_of_lines
from perfkit.readers.printed_plans import read_plan
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable


def find_plan(source: Any, tables: Sequence[EmbeddingTable], *, ranks: int | None = None) -> Plan:
    """The plan of these tables in a source of any kind.

    Parameters
    ----------
    source : Plan, ShardingPlan, mapping, str, Path or sequence of str
        A plan; a plan of TorchRec, as objects or as JSON; a ``.json`` file of either; or what
        TorchRec's planner prints, see `perfkit.read_plan`.
    tables : sequence of EmbeddingTable
        The tables of the plan.
    ranks : int, optional
        Number of ranks, for sources that do not say it [-].

    Returns
    -------
    plan : Plan
        In the order of the tables.

    Raises
    ------
    ValueError
        For a source that cannot be read, a plan of other tables, and one of other ranks.

    Warns
    -----
    UserWarning
        For what is not used of a plan of TorchRec, see `Plan.from_torchrec`.
    """
    if isinstance(source, Plan):
        plan = source
    elif isinstance(source, str | Path) and str(source).lower().endswith(".json"):
        plan = _read_json(Path(source), tables, ranks)
    elif isinstance(source, str | Path) or is_list_of_lines(source):
        plan = read_plan(source, tables=tables, ranks=ranks)
    else:
        plan = Plan.from_torchrec(source, tables, ranks=ranks)
    if ranks is not None and plan.ranks != ranks:
        raise ValueError(f"the plan has {plan.ranks} ranks, and ranks is {ranks}; leave ranks out")
    return plan


def _read_json(path: Path, tables: Sequence[EmbeddingTable], ranks: int | None) -> Plan:
    """A plan of perfkit's or of TorchRec's in a file."""
    advice = "pass a file that Plan.save or perfkit shard --out has written"
    with reading(path, advice, most=LARGEST_TEXT):
        text = path.read_bytes().decode("utf-8-sig")
        check_values(text, "it")
        data = json.loads(text)
    origin = escape(path, 200)
    if not isinstance(data, dict) or "format" in data:
        return Plan.from_json(text, origin=origin)
    with reading(origin, "pass the tables of this plan", told=True):
        return Plan.from_torchrec(data, tables, ranks=ranks)
