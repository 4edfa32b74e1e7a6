"""Embedding tables: how many rows, how wide, how often and how unevenly they are looked up."""

from dataclasses import dataclass

from perfkit.models.caches import Uniform, Zipf
from perfkit.units import check_positive

__all__ = ["EmbeddingTable"]


@dataclass(frozen=True)
class EmbeddingTable:
    """One embedding table and the way samples look into it.

    Parameters
    ----------
    rows : int
        Rows of the table [-].
    dim : int
        Columns of the table [-].
    pooling : float
        Lookups per sample, the pooling factor [-].
    exponent : float
        Zipf exponent of the row popularity, 0 for uniform [-].
    itemsize : int
        Bytes of one number [B].
    name : str
        Name shown in tables and plans.

    Raises
    ------
    ValueError
        For sizes that are not above zero.

    Examples
    --------
    >>> EmbeddingTable(1_000_000, 64, pooling=8).nbytes
    256000000
    """

    rows: int
    dim: int
    pooling: float = 1.0
    exponent: float = 0.0
    itemsize: int = 4
    name: str = ""

    def __post_init__(self) -> None:
        check_positive("rows", self.rows, integer=True)
        check_positive("dim", self.dim, integer=True)
        check_positive("pooling", self.pooling)
        check_positive("exponent", self.exponent, zero=True, maximum=10)
        check_positive("itemsize", self.itemsize, integer=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights [B]."""
        return self.rows * self.dim * self.itemsize

    @property
    def distribution(self) -> "Uniform | Zipf":
        """Distribution of the looked-up rows."""
        return Zipf(self.rows, self.exponent) if self.exponent else Uniform(self.rows)
