"""The schema of plans in JSON, as `perfkit.workloads.placement.Plan.to_json` writes them."""

from typing import Any

from perfkit.ground.schemas import Table, convert


class EntryTable(Table):
    """The placement of one table, see `perfkit.workloads.placement.Placement`."""

    kind: str
    ranks: tuple[int, ...]
    columns: tuple[int, ...] = ()
    name: str = ""


class PlanFile(Table):
    """A whole plan."""

    format: int
    ranks: int
    tables: tuple[EntryTable, ...]
    perceptrons: dict[str, int] | None = None


def read_tables(data: dict[str, Any]) -> PlanFile:
    """Check what was read from a plan; a ValueError says where it is wrong."""
    return convert(data, PlanFile)
