"""Which embedding table lies on which rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfkit.units import check_positive

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Table-wise placement: every table whole on one rank.

    Parameters
    ----------
    ranks : int
        Ranks that hold tables [-].
    owners : tuple of int
        Rank of every table, in table order.

    Raises
    ------
    ValueError
        For an owner outside ``0 … ranks - 1``.

    Examples
    --------
    >>> Plan.round_robin(5, ranks=2).tables_of(0)
    (0, 2, 4)
    """

    ranks: int
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", int(check_positive("ranks", self.ranks, integer=True)))
        for table, owner in enumerate(self.owners):
            if isinstance(owner, bool) or not isinstance(owner, int) or not 0 <= owner < self.ranks:
                raise ValueError(
                    f"table {table} is placed on rank {owner!r}; ranks go from 0 to {self.ranks - 1}; "
                    "give every table the number of an existing rank"
                )

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
    def from_owners(cls, owners: Sequence[int], *, ranks: int) -> "Plan":
        """Placement from any sequence of rank numbers.

        Parameters
        ----------
        owners : sequence of int
            Rank of every table.
        ranks : int
            Number of ranks [-].

        Returns
        -------
        plan : Plan
            The placement.
        """
        if not isinstance(owners, Sequence | np.ndarray):
            raise ValueError(
                f"owners is {owners!r}; it must be a sequence with the rank of every table, such as [0, 1, 0]"
            )
        return cls(ranks, tuple(o.item() if isinstance(o, np.generic) else o for o in owners))

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
        """
        return tuple(table for table, owner in enumerate(self.owners) if owner == rank)
