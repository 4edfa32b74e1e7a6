"""What the round trip with TorchRec tries: tables, plans, and placements that TorchRec does not take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.tables import EmbeddingTable

#: Ranks of gloo, all on one node [-].
RANKS = 2
BOTH = (0, 1)
BAGS_PATH = "sparse.bags"
HISTORY_PATH = "sparse.history"


def _bag(name: str, rows: int, dim: int, **fields: Any) -> EmbeddingTable:
    return EmbeddingTable(rows, dim, pooling=2.0, name=name, module=BAGS_PATH, **fields)


def _sequence(name: str, rows: int, dim: int) -> EmbeddingTable:
    return EmbeddingTable(rows, dim, name=name, module=HISTORY_PATH)


#: Tables of an ``EmbeddingBagCollection``.
BAGS = (
    _bag("whole", 10, 16),
    _bag("columns", 12, 16),
    _bag("uneven", 9, 32),
    _bag("rows", 11, 8),
    _bag("copied", 7, 8),
    _bag("node_rows", 13, 12),
    _bag("node_columns", 8, 24),
    _bag("host", 10, 16, kernel="uvm"),
    _bag("cached", 10, 16, kernel="uvm_caching", load_factor=0.25),
)
#: Tables of an ``EmbeddingCollection``, whose rows are not pooled and of one width.
SEQUENCES = (
    _sequence("seen", 14, 16),
    _sequence("bought", 6, 16),
    _sequence("liked", 5, 16),
)
TABLES = (*BAGS, *SEQUENCES)


def list_plans() -> dict[str, Plan]:
    """Plans by name, for all tables, without those of searches, which move with each prediction."""
    each_kind = (
        1,
        Placement("column_wise", BOTH, (8, 8)),
        Placement("column_wise", BOTH, (24, 8)),
        Placement("row_wise", BOTH),
        Placement("data_parallel", BOTH),
        Placement("table_row_wise", BOTH),
        Placement("table_column_wise", BOTH, (12, 12)),
        0,
        1,
        Placement("row_wise", BOTH),
        Placement("column_wise", BOTH, (8, 8)),
        1,
    )
    turned = (
        0,
        Placement("column_wise", (1, 0), (8, 8)),
        Placement("table_column_wise", (1, 0), (12, 20)),
        Placement("table_row_wise", BOTH),
        0,
        Placement("row_wise", BOTH),
        Placement("column_wise", (1, 0), (4, 20)),
        Placement("row_wise", BOTH),
        Placement("column_wise", (1, 0), (8, 8)),
        0,
        Placement("column_wise", (1, 0), (8, 8)),
        Placement("row_wise", BOTH),
    )
    return {
        "each kind": Plan(RANKS, each_kind),
        "turned": Plan(RANKS, turned),
        "in turn": Plan.round_robin(len(TABLES), ranks=RANKS),
    }


@dataclass(frozen=True)
class Refusal:
    """A placement that TorchRec refuses, or takes in another way, and that perfkit refuses first.

    Parameters
    ----------
    name : str
        What is wrong.
    table : str
        The table, of `TABLES`.
    entry : dict
        The table in TorchRec's form, as it would be written without a check.
    message : str
        Part of perfkit's message.
    owner : int or Placement
        The same for perfkit.
    settings : dict
        Further arguments of `Plan.to_torchrec`.
    """

    name: str
    table: str
    entry: Mapping[str, Any]
    message: str
    owner: int | Placement
    settings: Mapping[str, Any] = field(default_factory=dict)


def _entry(
    kind: str, *shards: tuple[int, int, int, int, int], kernel: str = "fused"
) -> dict[str, Any]:
    """A table in TorchRec's form; shards are rank, first row, first column, rows and columns."""
    return {
        "sharding_type": kind,
        "compute_kernel": kernel,
        "ranks": [shard[0] for shard in shards],
        "shards": [
            {
                "shard_offsets": [row, column],
                "shard_sizes": [rows, columns],
                "placement": f"rank:{rank}/cpu",
            }
            for rank, row, column, rows, columns in shards
        ],
    }


REFUSALS = (
    Refusal(
        "columns that are no multiple of 4",
        "whole",
        _entry("column_wise", (0, 0, 0, 10, 10), (1, 0, 10, 10, 6)),
        "with a shard of 10 columns; TorchRec's fused kernels take multiples of 4",
        Placement("column_wise", BOTH, (10, 6)),
    ),
    Refusal(
        "a rank outside",
        "whole",
        _entry("table_wise", (2, 0, 0, 10, 16)),
        "is placed on rank 2; ranks go from 0 to 1",
        2,
    ),
    Refusal(
        "table_row_wise over a part of a node",
        "whole",
        _entry("table_row_wise", (0, 0, 0, 10, 16)),
        "which are not all 2 ranks of a node",
        Placement("table_row_wise", (0,)),
    ),
    Refusal(
        "rows on ranks in another order",
        "whole",
        _entry("row_wise", (1, 0, 0, 5, 16), (0, 5, 0, 5, 16)),
        "TorchRec gives blocks of rows to ranks in their order; name them as (0, 1)",
        Placement("row_wise", (1, 0)),
    ),
    Refusal(
        "copies outside of device memory",
        "host",
        {"sharding_type": "data_parallel", "compute_kernel": "fused_uvm", "ranks": [0, 1]},
        "and its kernel is 'uvm'; TorchRec keeps copies in device memory",
        Placement("data_parallel", BOTH),
    ),
    Refusal(
        "rows inside nodes of a table that is not pooled",
        "seen",
        _entry("table_row_wise", (0, 0, 0, 7, 16), (1, 7, 0, 7, 16)),
        "is table_row_wise, and pooled is False; an EmbeddingCollection takes",
        Placement("table_row_wise", BOTH),
        {"pooled": False},
    ),
    Refusal(
        "uneven columns of a table that is not pooled",
        "bought",
        _entry("column_wise", (0, 0, 0, 6, 12), (1, 0, 12, 6, 4)),
        "and pooled is False; an EmbeddingCollection takes shards of equal columns",
        Placement("column_wise", BOTH, (12, 4)),
        {"pooled": False},
    ),
)


def refuse_first(refusal: Refusal) -> str:
    """What perfkit says of it; a RuntimeError if it takes it."""
    [table] = [table for table in TABLES if table.name == refusal.table]
    try:
        Plan(RANKS, (refusal.owner,)).to_torchrec(
            [table], **{"ranks_per_node": RANKS, "device": "cpu", **refusal.settings}
        )
    except ValueError as error:
        return str(error)
    raise RuntimeError(f"perfkit takes {refusal.name}")
