"""Host overheads T1 to T5 of PyTorch training loops, from the published tables of a V100."""

from statistics import median

import numpy as np

from benchmarks.helpers.files import read_csv
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import Quantity

#: Terms of the tables of overheads by the names of a platform's host overheads.
_TERMS = {
    "T1": "gap",
    "T2": "before_launch",
    "T3": "after_launch",
    "T4": "launch",
    "T5": "between_launches",
}
#: Published sets of rows that are used, by term; of T4 all.
_SETS = {"T1": "2022", "T2": "2022", "T3": "2021", "T5": "2021"}
#: Profiler cost inside the published T4 [s]; docs/formulas.md, table 6.1.
_RECORDING = 6e-6
#: Relative uncertainty of the overheads of another machine, all together [-]; docs/formulas.md,
#: table 6.1.
_ELSEWHERE = 0.25
_SOURCE = "host overheads of DLRM training on a V100, reference_data/published/host_overheads.csv"


def read_overheads(*, kind: str = "assumed") -> dict[str, Quantity]:
    """Read host overheads of a PyTorch training loop by class of operation, without the known cost
    of the profiler.

    Parameters
    ----------
    kind : str, optional
        ``measured`` for the machine of the tables, ``assumed`` for any other [-].

    Returns
    -------
    overheads : dict of str to Quantity
        ``gap``, ``launch``, ``bare``, and ``before_launch``, ``after_launch`` and
        ``between_launches`` for all operations and by class, such as
        ``before_launch.gemm.backward`` [s].

    Notes
    -----
    T1 and T2 are from 2022; their authors subtracted 2 µs for every nested event of the profiler.
    T3 and T5 were published only in 2021, with another PyTorch and profiler. They are scaled by the
    median ratio of T2 in 2022 to T2 in 2021. T4 is reduced by the 6 µs that recording a launch
    costs. A class of several operations has their mean, weighted by calls. Other costs of the
    profiler are still included.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model
       training on GPUs", 2022, arXiv:2201.07821, section 3.4

    Examples
    --------
    >>> overheads = read_overheads()
    >>> overheads["launch"].value < overheads["gap"].value < overheads["before_launch.gemm.backward"].value
    True
    """
    rows = read_csv(find_reference("published", "host_overheads.csv"))
    old, new = (
        {
            row["operation"]: float(row["mean"])
            for row in rows
            if (row["term"], row["set"]) == ("T2", year)
        }
        for year in ("2021", "2022")
    )
    ratios = [new[name] / old[name] for name in old.keys() & new.keys()]
    shrinkage = median(ratios)
    spread = 1.4826 * median(abs(ratio - shrinkage) for ratio in ratios)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        term, value, error, calls = (
            row["term"],
            *(float(row[key]) for key in ("mean", "deviation", "calls")),
        )
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
        value, stderr = (
            float(f"{np.average(part, weights=weights):.3g}") for part in (mean, errors)
        )
        overheads[key] = Quantity(value, "s", kind, _SOURCE, "2022-02-01", stderr)
    return overheads
