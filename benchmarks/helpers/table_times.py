"""Published times of lookups and updates of tables, as the shared table has them."""

from collections.abc import Mapping, Sequence

from benchmarks.helpers.files import find_shared_data, read_csv


def read_table_times() -> list[dict[str, str]]:
    """All published times."""
    return list(read_csv(find_shared_data("embedding", "tbe_published.csv")))


def list_optimizers(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The optimizer of the table of each row: only the backward pass that follows says it; empty if
    none does."""
    optimizers = []
    of_next_update = ""
    for row in reversed(rows):
        if row["direction"] == "backward":
            of_next_update = row["optimizer"]
        optimizers.append(of_next_update)
    return optimizers[::-1]
