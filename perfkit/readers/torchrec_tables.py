"""Tables of TorchRec, whatever told of them: what perfkit makes of their fields, and what it says."""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from perfkit.ground.files import reading
from perfkit.ground.units import show
from perfkit.workloads.table_kernels import FUSED, KEY_VALUE, TABLE_KERNELS, UVM, UVM_CACHING
from perfkit.workloads.tables import EmbeddingTable

#: perfkit's kernel of a table by TorchRec's compute kernel.
_KERNELS = {
    **{kernel.torchrec_name: kernel for kernel in TABLE_KERNELS.values()},
    "dense": FUSED,
    "dense_uvm": UVM,
    "dense_uvm_caching": UVM_CACHING,
    "ssd_virtual_table": KEY_VALUE,
}


class TorchrecTable(NamedTuple):
    """A table of TorchRec; None is what is not known.

    `lookups` are those of a sample over all features of the table.
    """

    place: str
    name: str
    module: str
    rows: int
    dim: int
    itemsize: int
    lookups: float | None = None
    features: int | None = None
    is_pooled: bool | None = None
    is_weighted: bool | None = None
    kernel: str | None = None
    load_factor: float | None = None


def make_tables(found: Sequence[TorchrecTable]) -> tuple[list[EmbeddingTable], list[str]]:
    """Tables of perfkit, and what they leave out.

    Parameters
    ----------
    found : sequence of TorchrecTable
        The tables.

    Returns
    -------
    tables : list of EmbeddingTable
        One for each. A table has the lookups of all its features together.
    notes : list of str
        What is assumed or left out, in words.

    Raises
    ------
    ValueError
        For sizes that cannot be.

    Examples
    --------
    >>> user = TorchrecTable("tables[0]", "user", "sparse", 1000, 64, 2, lookups=5.0, features=2)
    >>> tables, notes = make_tables([user])
    >>> tables[0]
    EmbeddingTable(rows=1000, dim=64, pooling=5.0, exponent=0.0, itemsize=2, name='user')
    >>> notes
    ["several features share 'sparse.user': their lookups are added up, as if a sample took one pooled row of it"]
    """
    tables = []
    for table in found:
        with reading(table.place, "change the table"):
            tables.append(_make_table(table))
    return tables, _list_notes(found)


def warn_of(place: str, notes: Sequence[str], *, stacklevel: int) -> None:
    """Say notes on a source of tables in one warning; nothing if there are none."""
    if notes:
        warnings.warn(f"{place}: {'; '.join(notes)}", UserWarning, stacklevel=stacklevel + 1)


def find_kernel(torchrec_name: str | None) -> str:
    """Name of the kernel of a table by TorchRec's compute kernel; that of device memory if unknown."""
    return _KERNELS.get(torchrec_name or "", FUSED).name


def _make_table(table: TorchrecTable) -> EmbeddingTable:
    """One table of perfkit."""
    lookups = table.lookups
    if lookups is None:
        lookups = float(table.features or 1)
    kernel = find_kernel(table.kernel)
    load_factor = table.load_factor
    if not TABLE_KERNELS[kernel].has_cache:
        load_factor = None
    return EmbeddingTable(
        table.rows,
        table.dim,
        pooling=lookups,
        itemsize=table.itemsize,
        name=table.name,
        module=table.module,
        kernel=kernel,
        load_factor=load_factor,
        weighted=bool(table.is_weighted),
    )


def _list_notes(found: Sequence[TorchrecTable]) -> list[str]:
    """What is assumed or left out, in words."""
    notes = []
    unknown = _name(found, lambda table: table.lookups is None)
    if unknown:
        notes.append(
            f"the pooling factor of {unknown} is not known, and 1 lookup a sample and feature is "
            "taken; pass constraints=, the ParameterConstraints by table"
        )
    shared = _name(found, lambda table: (table.features or 1) > 1)
    if shared:
        notes.append(
            f"several features share {shared}: their lookups are added up, as if a sample took one "
            "pooled row of it"
        )
    unpooled = _name(
        found, lambda table: table.is_pooled is False and table.lookups not in (None, 1)
    )
    if unpooled:
        notes.append(
            f"rows of {unpooled} are not pooled; they are priced as if one pooled row a sample were "
            "exchanged"
        )
    for kernel in dict.fromkeys(table.kernel for table in found):
        if kernel is not None and kernel not in _KERNELS:
            named = _name(found, lambda table, kernel=kernel: table.kernel == kernel)  # type: ignore[misc]
            notes.append(
                f"compute kernel {show(kernel)} of {named} is not known; it is priced as in device "
                "memory"
            )
    return notes


def _name(found: Sequence[TorchrecTable], applies: Callable[[TorchrecTable], bool]) -> str:
    """The tables that something applies to: the only one by its name, or how many and the first;
    empty for none."""
    names = []
    for table in found:
        if applies(table):
            names.append(f"{table.module}.{table.name}".strip(".") or table.place)
    if not names:
        return ""
    if len(names) == 1:
        return show(names[0])
    return f"{len(names)} tables ({show(names[0])} first)"
