"""Datasheets: peak rates, memories and links of GPUs as their makers state them, every number with basis and source."""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from perfkit.hardware import Device, MemoryLevel, Quantity
from perfkit.resources import find_reference
from perfkit.units import check_choice

__all__ = ["COLUMNS", "Datasheet", "list_datasheets", "read_datasheet", "read_rows"]

COLUMNS = ("system", "device", "quantity", "dtype", "value", "unit", "basis", "kind", "source", "date", "note")
#: What a number says of its basis, so that nobody has to guess: by the last word of its quantity, unit and first words.
_BASES = {
    "peak": ("FLOP/s", r"dense\b.+|dense"),
    "capacity": ("B", r".*\b(GB|GiB|MiB|KiB)\b.*|as the .+"),
    "memory": ("B/s", r"reads and writes together.*"),
    "link": ("B/s", r"one way.*"),
    "multiprocessors": ("-", r".+"),
    "power": ("W", r".+"),
}
_LINKS = ("NVLink", "PCIe", "NIC")


@dataclass(frozen=True)
class Datasheet:
    """What is stated of one device and of its links.

    Parameters
    ----------
    system : str
        Name in ``reference_data/datasheets.csv``, such as ``h100-sxm`` [-].
    device : Device
        Peaks and memory levels [-].
    links : mapping of str to Quantity
        Bandwidth of ``NVLink``, ``PCIe`` and ``NIC``, one way per rank, where stated [B/s].
    power : Quantity
        Most that the device draws [W].
    """

    system: str
    device: Device
    links: Mapping[str, Quantity]
    power: Quantity


def read_rows(path: str | Path | None = None) -> list[dict[str, str]]:
    """Read a table of datasheet numbers and check that each says what it is.

    Parameters
    ----------
    path : str or Path, optional
        CSV file with `COLUMNS`; by default the one that ships with perfkit [-].

    Returns
    -------
    rows : list of dict
        One entry per number, as text.

    Raises
    ------
    ValueError
        With file, line and reason, for a number without value, unit, basis, source with a link, or date.
    """
    path = Path(path) if path else find_reference("datasheets.csv")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has the columns {reader.fieldnames}; they must be {', '.join(COLUMNS)}")
        rows = list(reader)
    for line, row in enumerate(rows, 2):
        for fault in _find_faults(row):
            raise ValueError(f"{path}, line {line}: {row['system']} {row['quantity']} {row['dtype']} {fault}")
    return rows


def _find_faults(row: Mapping[str, str]) -> list[str]:
    """What keeps a number from being used, in words."""
    last, first = row["quantity"].rpartition(" ")[2], row["quantity"].partition(" ")[0]
    part = ("link" if first in _LINKS else "memory") if last == "bandwidth" else last
    if part not in _BASES:
        return [f"is not known; quantities end on {', '.join(_BASES)} or bandwidth"]
    unit, basis = _BASES[part]
    try:
        value = float(row["value"])
    except ValueError:
        value = math.nan
    checks = {
        f"has the value {row['value']!r}; it must be a number above 0": math.isfinite(value) and value > 0,
        f"has the unit {row['unit']!r}; it must be {unit}": row["unit"] == unit,
        f"has the basis {row['basis']!r}; it must read like {basis}": re.fullmatch(basis, row["basis"]),
        f"has the kind {row['kind']!r}; it must be datasheet or assumed": row["kind"] in ("datasheet", "assumed"),
        f"has the source {row['source']!r}; it must hold a link, or name a package and file": re.search(
            r"https://\S+\.\S+|aiconfigurator-core \S+ .*\.yaml", row["source"]
        ),
        f"has the date {row['date']!r}; it must be a day, such as 2026-11-21": re.fullmatch(
            r"\d{4}-\d\d-\d\d", row["date"]
        ),
    }
    return [fault for fault, fine in checks.items() if not fine]


@lru_cache(maxsize=1)
def _shipped() -> dict[str, list[dict[str, str]]]:
    systems: dict[str, list[dict[str, str]]] = {}
    for row in read_rows():
        systems.setdefault(row["system"], []).append(row)
    return systems


def _quantity(row: Mapping[str, str]) -> Quantity:
    source = "; ".join(text for text in (row["source"], row["note"]) if text)
    return Quantity(float(row["value"]), row["unit"], row["kind"], source, row["date"], basis=row["basis"])


def list_datasheets() -> tuple[str, ...]:
    """List the devices whose datasheets ship with perfkit.

    Returns
    -------
    systems : tuple of str
        Names for `read_datasheet` [-].

    Examples
    --------
    >>> list_datasheets()[:3]
    ('a100-sxm', 'a100-sxm-40gb', 'h100-sxm')
    """
    return tuple(_shipped())


def read_datasheet(system: str) -> Datasheet:
    """Read what is stated of a device.

    Parameters
    ----------
    system : str
        One of `list_datasheets` [-].

    Returns
    -------
    datasheet : Datasheet
        Device and links [-].

    Raises
    ------
    ValueError
        For an unknown system.

    Examples
    --------
    >>> h200 = read_datasheet("h200-sxm")
    >>> h200.device.peaks["bf16"].value / 1e12, h200.links["NVLink"].value / 1e9
    (989.5, 450.0)
    """
    rows = _shipped()[check_choice("system", system, _shipped())]
    found = {(row["quantity"], row["dtype"]): _quantity(row) for row in rows}
    peaks = {dtype: quantity for (name, dtype), quantity in found.items() if name == "peak"}
    levels = [name.removesuffix(" capacity") for name, _ in found if name.endswith(" capacity")]
    memory = tuple(
        MemoryLevel(name, found[f"{name} capacity", ""], found.get((f"{name} bandwidth", ""))) for name in levels
    )
    links = {name: found[f"{name} bandwidth", ""] for name in _LINKS if (f"{name} bandwidth", "") in found}
    return Datasheet(system, Device(rows[0]["device"], "cuda", peaks, memory), links, found["power", ""])
