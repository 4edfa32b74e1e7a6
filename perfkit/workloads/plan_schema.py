"""The schema of plans in JSON, as `perfkit.workloads.placement.Plan.to_json` writes them."""

from perfkit.ground.schemas import Table


class EntryTable(Table):
    """The placement of one table, see `perfkit.workloads.placement.Placement`."""

    kind: str
    ranks: tuple[int, ...]
    columns: tuple[int, ...] = ()
    frequent: int | None = None
    name: str = ""


class PlanFile(Table):
    """A whole plan."""

    format: int
    ranks: int
    tables: tuple[EntryTable, ...]
    mlps: dict[str, int] | None = None
    perceptrons: dict[str, int] | None = None  # the name of `mlps` before version 0.3
