"""Host overheads T1 to T5 of PyTorch training loops, from the published tables of a V100."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.helpers.files import read_csv
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import Quantity
from perfkit.ground.units import Array

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


class _Overhead(NamedTuple):
    """Mean of one term of one operation [s], its uncertainty [s], and calls in an iteration [-]."""

    value: float
    stderr: float
    calls: float


def _compare_years(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """T2 of 2022 over T2 of 2021, by operation [-]."""
    means: dict[str, dict[str, float]] = {"2021": {}, "2022": {}}
    for row in rows:
        if row["term"] == "T2":
            means[row["set"]][row["operation"]] = float(row["mean"])
    both = means["2021"].keys() & means["2022"].keys()
    return [means["2022"][name] / means["2021"][name] for name in both]


def _read_row(row: Mapping[str, str], shrinkage: float, spread: float) -> _Overhead:
    """One row without the known cost of the profiler; `shrinkage` is the ratio of the years, `spread`
    its uncertainty [-]."""
    value = float(row["mean"])
    calls = float(row["calls"])
    if row["term"] == "T4":
        return _Overhead(value - _RECORDING, _RECORDING / 3, calls)
    if row["term"] in ("T3", "T5"):
        return _Overhead(value * shrinkage, value * spread, calls)
    return _Overhead(value, float(row["deviation"]), calls)


def _list_keys(term: str, name: str) -> list[str]:
    """Overheads that a row of a class counts to: that of the class, and that of all operations."""
    if name == "bare":
        return ["bare"]
    if name == "all":
        return [_TERMS[term]]
    return [f"{_TERMS[term]}.{name}", _TERMS[term]]


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
    ratios = _compare_years(rows)
    shrinkage = median(ratios)
    spread = 1.4826 * median(abs(ratio - shrinkage) for ratio in ratios)
    measured: dict[str, list[_Overhead]] = {}
    for row in rows:
        term = row["term"]
        if not row["class"] or row["set"] != _SETS.get(term, row["set"]):
            continue
        overhead = _read_row(row, shrinkage, spread)
        for name in row["class"].split():
            for key in _list_keys(term, name):
                measured.setdefault(key, []).append(overhead)
    overheads = {}
    for key, values in sorted(measured.items()):
        means = np.array([overhead.value for overhead in values])
        stderrs = np.array([overhead.stderr for overhead in values])
        weights = [overhead.calls for overhead in values]
        if kind == "assumed":
            stderrs = np.maximum(stderrs, _ELSEWHERE * means)
        value = _average(means, weights)
        stderr = _average(stderrs, weights)
        overheads[key] = Quantity(value, "s", kind, _SOURCE, "2022-02-01", stderr)
    return overheads


def _average(values: Array, weights: Sequence[float]) -> float:
    """Weighted mean with three digits."""
    return float(f"{np.average(values, weights=weights):.3g}")
