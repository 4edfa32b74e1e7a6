"""Published numbers of machines: datasheets of GPUs, and host overheads T1 to T5 of PyTorch training loops."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from perfkit.ground.files import group_rows, read_rows
from perfkit.ground.hardware import Device, MemoryLevel, Quantity
from perfkit.ground.units import check_choice

#: Terms of the tables of overheads by the names of a platform's host overheads.
_TERMS = {"T1": "gap", "T2": "before_launch", "T3": "after_launch", "T4": "launch", "T5": "between_launches"}
#: Published sets of rows that are used, by term; of T4 all.
_SETS = {"T1": "2022", "T2": "2022", "T3": "2021", "T5": "2021"}
#: Profiler cost inside the published T4 [s]; docs/formulas.md, table 6.1.
_RECORDING = 6e-6
#: Relative uncertainty of the overheads of another machine, all together [-]; docs/formulas.md, table 6.1.
_ELSEWHERE = 0.25
_SOURCE = "host overheads of DLRM training on a V100, reference_data/published/host_overheads.csv"
#: Links between the ranks of a node, the fastest first, and out of it; ``fabric`` is the NVLink of other vendors.
_LINKS = ("NVLink", "fabric", "PCIe", "NIC")


@dataclass(frozen=True)
class Datasheet:
    """Datasheet of one device and of its links.

    Parameters
    ----------
    system : str
        Name in ``reference_data/datasheets.csv``, such as ``h100-sxm`` [-].
    device : Device
        Peaks and memory levels [-].
    links : mapping of str to Quantity
        Bandwidth of ``NVLink``, ``fabric``, ``PCIe`` and ``NIC``, one way per rank, where stated [B/s].
    products : mapping of str to Quantity
        Rate of large matrix products by number format, where it is known or assumed beside the peak [FLOP/s].
    """

    system: str
    device: Device
    links: Mapping[str, Quantity]
    products: Mapping[str, Quantity] = field(default_factory=dict)

    @property
    def wire(self) -> Quantity | None:
        """Bandwidth between the ranks of a node, one way per rank, where stated [B/s]."""
        return next((self.links[name] for name in _LINKS[:3] if name in self.links), None)


def _stated(row: Mapping[str, str]) -> Quantity:
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
    return tuple(group_rows("system", "datasheets.csv"))


def read_datasheet(system: str) -> Datasheet:
    """Read the datasheet of a device.

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
    systems = group_rows("system", "datasheets.csv")
    rows = systems[check_choice("system", system, systems)]
    found = {(row["quantity"], row["dtype"]): _stated(row) for row in rows}
    peaks, products = ({dtype: quantity for (name, dtype), quantity in found.items() if name == kind}
                       for kind in ("peak", "products"))  # fmt: skip
    levels = {name.removesuffix(" capacity"): size for (name, _), size in found.items() if name.endswith(" capacity")}
    memory = tuple(MemoryLevel(x, size, found.get((f"{x} bandwidth", ""))) for x, size in levels.items())
    links = {name: found[f"{name} bandwidth", ""] for name in _LINKS if (f"{name} bandwidth", "") in found}
    device = Device(rows[0]["device"], "cuda", peaks, memory, capability=found.get(("capability", "")))
    return Datasheet(system, device, links, products)


def read_overheads(*, kind: str = "assumed") -> dict[str, Quantity]:
    """Read host overheads of a PyTorch training loop by class of operation, without the known cost of the profiler.

    Parameters
    ----------
    kind : str, optional
        ``measured`` for the machine of the tables, ``assumed`` for any other [-].

    Returns
    -------
    overheads : dict of str to Quantity
        ``gap``, ``launch``, ``bare``, and ``before_launch``, ``after_launch`` and ``between_launches`` for all
        operations and by class, such as ``before_launch.gemm.backward`` [s].

    Notes
    -----
    T1 and T2 are from 2022; their authors subtracted 2 µs for every nested event of the profiler. T3 and T5 were
    published only in 2021, with another PyTorch and profiler. They are scaled by the median ratio of T2 in 2022 to T2
    in 2021. T4 is reduced by the 6 µs that recording a launch costs. A class of several operations has their mean,
    weighted by calls. Other costs of the profiler are still included.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model training on GPUs", 2022,
       arXiv:2201.07821, section 3.4

    Examples
    --------
    >>> overheads = read_overheads()
    >>> overheads["launch"].value < overheads["gap"].value < overheads["before_launch.gemm.backward"].value
    True
    """
    rows = read_rows("published", "host_overheads.csv")
    old, new = ({row["operation"]: float(row["mean"]) for row in rows if (row["term"], row["set"]) == ("T2", year)}
                for year in ("2021", "2022"))  # fmt: skip
    ratios = [new[name] / old[name] for name in old.keys() & new.keys()]
    shrinkage = median(ratios)
    spread = 1.4826 * median(abs(ratio - shrinkage) for ratio in ratios)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        term, value, error, calls = row["term"], *(float(row[key]) for key in ("mean", "deviation", "calls"))
        if not row["class"] or row["set"] != _SETS.get(term, row["set"]):
            continue
        if term == "T4":
            value, error = value - _RECORDING, _RECORDING / 3
        elif term in ("T3", "T5"):
            value, error = value * shrinkage, value * spread
        for name in row["class"].split():
            kept = "bare" if name == "bare" else _TERMS[term]
            for key in (kept,) if name in ("bare", "all") else (f"{kept}.{name}", kept):
                found.setdefault(key, []).append((value, error, calls))
    overheads = {}
    for key, values in sorted(found.items()):
        mean, errors, weights = np.array(values).T
        if kind == "assumed":
            errors = np.maximum(errors, _ELSEWHERE * mean)
        value, stderr = (float(f"{np.average(part, weights=weights):.3g}") for part in (mean, errors))
        overheads[key] = Quantity(value, "s", kind, _SOURCE, "2022-02-01", stderr)
    return overheads
