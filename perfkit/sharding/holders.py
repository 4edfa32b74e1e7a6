"""Which rank holds which tables, as rows of text."""

import re
from collections.abc import Sequence

import numpy as np

from perfkit.ground.units import Array, format_bytes, format_ranks, format_time
from perfkit.workloads.placement import Placement
from perfkit.workloads.placement_kinds import WHOLE

#: A name that ends with a number.
_NUMBERED = re.compile(r"(.*?)(\d+)")
#: Most names that a rank or a kind of placement is shown with [-].
_MOST_NAMES = 24


def list_holders(
    names: Sequence[str],
    placements: Sequence[Placement],
    device_seconds: Array,
    memory: Array,
) -> list[Sequence[str]]:
    """Rows of text, heads first: each rank with what it holds.

    Parameters
    ----------
    names : sequence of str
        Names of the tables.
    placements : sequence of Placement
        Where each is stored.
    device_seconds : array
        What the device of each rank takes to look up, to pool and to update, shape (ranks,) [s].
    memory : array
        Memory of the tables of each rank, shape (ranks,) [B].

    Returns
    -------
    rows : list of sequence of str
        rank, memory, device and tables; those that all ranks share or copy are left out, see
        `describe_shared`.
    """
    ranks = len(memory)
    rows: list[Sequence[str]] = [["rank", "memory", "device", "tables of its own"]]
    for rank in range(ranks):
        of_kind: dict[str, list[str]] = {}
        for name, placement in zip(names, placements, strict=True):
            if rank in placement.ranks and not _is_on_all(placement, ranks):
                of_kind.setdefault(placement.kind, []).append(name)
        texts = []
        for kind, tables in of_kind.items():
            named = name_together(tables)
            texts.append(named if kind == WHOLE.name else f"{kind}: {named}")
        held = "; ".join(texts) or "–"
        seconds = float(device_seconds[rank])
        rows.append([str(rank), format_bytes(float(memory[rank])), format_time(seconds), held])
    return rows


def describe_shared(names: Sequence[str], placements: Sequence[Placement], ranks: int) -> list[str]:
    """Say which tables all ranks share or copy, a line for each kind of placement."""
    if ranks == 1:
        return []
    of_kind: dict[str, list[str]] = {}
    for name, placement in zip(names, placements, strict=True):
        if _is_on_all(placement, ranks):
            of_kind.setdefault(placement.kind, []).append(name)
    return [f"on all ranks, {kind}: {name_together(tables)}" for kind, tables in of_kind.items()]


def _is_on_all(placement: Placement, ranks: int) -> bool:
    return ranks > 1 and len(np.unique(placement.ranks)) == ranks


def name_together(names: Sequence[str]) -> str:
    """Names in a line; those that differ in the number at their end share what comes before it.

    Examples
    --------
    >>> name_together(["table 1", "table 5", "table 6", "table 7", "user"])
    'table 1, 5-7, user'
    """
    shown = list(names[:_MOST_NAMES])
    numbers: dict[str, list[int]] = {}
    for name in shown:
        numbered = _NUMBERED.fullmatch(name)
        # a number with zeros before it would lose them
        if numbered is not None and str(int(numbered[2])) == numbered[2]:
            numbers.setdefault(numbered[1], []).append(int(numbered[2]))
        else:
            numbers.setdefault(name, [])
    texts = [f"{start}{format_ranks(ends)}" for start, ends in numbers.items()]
    if len(names) > len(shown):
        texts.append(f"and {len(names) - len(shown)} more")
    return ", ".join(texts)
