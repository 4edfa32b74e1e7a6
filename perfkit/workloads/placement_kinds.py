"""Kinds of placement of embedding tables: what each one is, as a record that everything reads."""

from dataclasses import dataclass
from enum import Enum


class Reach(Enum):
    """Which ranks have a shard of a table."""

    ONE_RANK = "one rank"
    SOME_RANKS = "some ranks"
    EVERY_RANK = "every rank"
    SOME_RANKS_OF_A_NODE = "some ranks of one node"
    EVERY_RANK_OF_A_NODE = "every rank of one node"


class Reduction(Enum):
    """What ranks add up together."""

    SUMS_OF_ALL_RANKS = "partial sums of rows, over all ranks"
    SUMS_INSIDE_NODES = "partial sums of rows, over the ranks of a node, before they are exchanged"
    GRADIENTS = "gradients of copies, over all ranks"


@dataclass(frozen=True)
class PlacementKind:
    """What a kind of placement does with a table.

    A table whose rows and columns are not split is whole on each of its ranks.

    Parameters
    ----------
    name : str
        The name in plans, results and arguments. It is TorchRec's where TorchRec has the kind.
    torchrec_name : str or None
        The ``sharding_type`` in plans of TorchRec. Where it is another word than `name`, plans are
        translated; nothing else has to know of it. None if TorchRec has no such kind.
    reach : Reach
        Which ranks have a shard.
    splits_columns, splits_rows : bool
        What the shards are parts of.
    reduction : Reduction, optional
        What ranks add up together; None if pooled rows are only exchanged.
    copies_frequent_rows : bool
        Whether each rank has a copy of the most popular rows, and a part of the others.
    """

    name: str
    torchrec_name: str | None
    reach: Reach
    splits_columns: bool = False
    splits_rows: bool = False
    reduction: Reduction | None = None
    copies_frequent_rows: bool = False

    def __post_init__(self) -> None:
        if self.splits_columns and self.splits_rows:
            raise ValueError(
                f"{self.name} splits columns and rows; nothing cuts or prices such shards yet: begin "
                "with Placement.cut, list_local_tables and Costs.shards"
            )

    @property
    def is_whole(self) -> bool:
        """Whether one rank has the whole table."""
        return self.reach is Reach.ONE_RANK

    @property
    def is_everywhere(self) -> bool:
        """Whether every rank has a shard."""
        return self.reach is Reach.EVERY_RANK

    @property
    def is_inside_node(self) -> bool:
        """Whether all shards are inside one node."""
        return self.reach in (Reach.SOME_RANKS_OF_A_NODE, Reach.EVERY_RANK_OF_A_NODE)

    @property
    def fills_node(self) -> bool:
        """Whether every rank of a node has a shard."""
        return self.reach is Reach.EVERY_RANK_OF_A_NODE

    @property
    def is_copied(self) -> bool:
        """Whether each of its ranks has all of the table, and looks up its own samples."""
        return self.reduction is Reduction.GRADIENTS and not self.copies_frequent_rows


#: Kinds of placement that searches try. Where two are equally good, they take the first one.
PLACEMENT_KINDS = (
    PlacementKind("table_wise", "table_wise", Reach.ONE_RANK),
    PlacementKind("column_wise", "column_wise", Reach.SOME_RANKS, splits_columns=True),
    PlacementKind(
        "table_column_wise",
        "table_column_wise",
        Reach.SOME_RANKS_OF_A_NODE,
        splits_columns=True,
    ),
    PlacementKind(
        "row_wise",
        "row_wise",
        Reach.EVERY_RANK,
        splits_rows=True,
        reduction=Reduction.SUMS_OF_ALL_RANKS,
    ),
    PlacementKind(
        "table_row_wise",
        "table_row_wise",
        Reach.EVERY_RANK_OF_A_NODE,
        splits_rows=True,
        reduction=Reduction.SUMS_INSIDE_NODES,
    ),
    PlacementKind(
        "data_parallel", "data_parallel", Reach.EVERY_RANK, reduction=Reduction.GRADIENTS
    ),
)
#: Their names.
KINDS = tuple(kind.name for kind in PLACEMENT_KINDS)
#: HugeCTR's ``HybridSparseEmbedding``: frequent rows are copied to all ranks, the others are spread
#: over them. Predictions take it; searches, and prices of plans, do not.
HYBRID = PlacementKind(
    "hybrid",
    None,
    Reach.EVERY_RANK,
    reduction=Reduction.GRADIENTS,
    copies_frequent_rows=True,
)
#: All kinds by name.
KIND_OF_NAME = {kind.name: kind for kind in (*PLACEMENT_KINDS, HYBRID)}
#: The kind of a table that is whole on one rank.
WHOLE = KIND_OF_NAME["table_wise"]
#: The kind of a table that is copied to every rank.
COPIED = KIND_OF_NAME["data_parallel"]
