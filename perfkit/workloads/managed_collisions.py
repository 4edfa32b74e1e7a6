"""Managed collisions of embedding tables: how raw ids, of which there are more than rows, find their rows."""

from dataclasses import dataclass
from typing import Any

from perfkit.ground.units import show

#: Bytes of the smallest access to the memory of a GPU [B].
_SECTOR = 32


@dataclass(frozen=True)
class ManagedCollision:
    """A module that maps raw ids to rows ahead of the lookups.

    Parameters
    ----------
    name : str
        How people ask for it.
    torchrec_name : str
        TorchRec's module.
    row_bytes : int
        Bytes of its buffers for each row of the table [B].
    lookup_bytes : int
        Bytes that its kernels read and write for each lookup, all of whose ids are found [B].
    sectors : int
        Accesses to buffers for each distinct row, of which each moves a sector [-].
    launches : int
        Kernels that it starts [-].
    host_waits : int
        How often its host waits for a number from the device [-].
    """

    name: str
    torchrec_name: str
    row_bytes: int
    lookup_bytes: int
    sectors: int
    launches: int
    host_waits: int

    def count_traffic(self, lookups: Any, unique: Any) -> Any:
        """Bytes that it moves for so many lookups of so many distinct rows [B]."""
        return self.lookup_bytes * lookups + _SECTOR * self.sectors * unique


#: Ids sorted, with the row of each, the count and the last iteration of each (DistanceLFU), of 8 B each.
#: Remapping is a sequence of PyTorch's operations (`_mch_remap`): a search, two gathers, a comparison, three
#: masks, whose sizes the host waits for, and a copy to the history. By their operands these read 84 B and
#: write 66 B a lookup.
ZCH = ManagedCollision(
    "zch",
    "MCHManagedCollisionModule",
    row_bytes=32,
    lookup_bytes=150,
    sectors=3,
    launches=18,
    host_waits=3,
)
#: A hash table of ids of 8 B, and of 4 B that say when to evict each. One kernel reads the id, finds it
#: where it hashes to, notes its time, and writes the row.
MPZCH = ManagedCollision(
    "mpzch",
    "HashZchManagedCollisionModule",
    row_bytes=12,
    lookup_bytes=16,
    sectors=2,
    launches=1,
    host_waits=0,
)
#: All of them, by name.
MANAGED_COLLISIONS = {one.name: one for one in (ZCH, MPZCH)}


def check_managed_collision(name: Any) -> str:
    """Check the name of a module.

    Parameters
    ----------
    name : str
        One of `MANAGED_COLLISIONS`, or empty for a table without one.

    Returns
    -------
    name : str
        The name.

    Raises
    ------
    ValueError
        For any other value.
    """
    if isinstance(name, str) and (name == "" or name in MANAGED_COLLISIONS):
        return name
    names = ", ".join(map(repr, MANAGED_COLLISIONS))
    raise ValueError(
        f"managed_collision is {show(name)}; it must be one of {names}, or empty where ids are rows"
    )
