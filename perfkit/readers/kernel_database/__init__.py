"""Times of kernels and collectives that others measured: the tables in the package ``aiconfigurator-core``."""

from perfkit.readers.kernel_database.records import read_attention, read_casts, read_collectives, read_gemms
from perfkit.readers.kernel_database.tables import find_database, list_tables, read_table

__all__ = [
    "find_database",
    "list_tables",
    "read_attention",
    "read_casts",
    "read_collectives",
    "read_gemms",
    "read_table",
]
