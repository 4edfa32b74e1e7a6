"""Host overheads T1 to T5 of PyTorch training loops, from published tables, by class of operation."""

import csv
from collections.abc import Sequence
from functools import lru_cache
from statistics import median

import numpy as np

from perfkit.hardware import Quantity
from perfkit.resources import find_reference

__all__ = ["read_overheads"]

#: Terms of the tables by the names of a platform's host overheads.
_TERMS = {"T1": "gap", "T2": "before_launch", "T3": "after_launch", "T4": "launch", "T5": "between_launches"}
#: What the profiler adds to a launch that it records, of which T4 still holds all: 2 µs for the host event and 4 µs for
#: the device's tracing interface, as the authors' analysis takes it off (owensgroup/ml_perf_model, analysis/utils.py).
_RECORDING = 6e-6
#: Doubt of overheads taken over from another machine, all of them together. Host-bound Megatron-DeepSpeed runs on A100
#: nodes (721 runs of VIA-Research/vTrain, MIT) settle at 3.1 to 3.3 ms for a layer forward, recomputed and backward,
#: whatever its size; a GPT layer priced with these tables takes 4.0 ms, 20 to 30 % more, and hosts have become faster.
_ELSEWHERE = 0.25
_SOURCE = "host overheads of DLRM training on a V100, reference_data/published/host_overheads.csv"


@lru_cache(maxsize=1)
def _read() -> tuple[dict[str, str], ...]:
    with open(find_reference("published", "host_overheads.csv"), newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def _find_shrinkage(rows: Sequence[dict[str, str]]) -> tuple[float, float]:
    """How T2 of 2022 compares with T2 of 2021: median over operations, and its robust spread."""
    by_set = {year: {r["operation"]: float(r["mean"]) for r in rows if (r["term"], r["set"]) == ("T2", year)}
              for year in ("2021", "2022")}  # fmt: skip
    ratios = [by_set["2022"][name] / by_set["2021"][name] for name in by_set["2021"].keys() & by_set["2022"].keys()]
    middle = median(ratios)
    return middle, 1.4826 * median(abs(ratio - middle) for ratio in ratios)


def read_overheads(*, kind: str = "assumed") -> dict[str, Quantity]:
    """Host overheads of a PyTorch training loop by class of operation, profiler cost removed as far as it is known.

    Parameters
    ----------
    kind : str, optional
        What the numbers rest on: ``measured`` for the machine of the tables, ``assumed`` for any other [-].

    Returns
    -------
    overheads : dict of str to Quantity
        ``gap``, ``launch``, ``bare``, and ``before_launch``, ``after_launch`` and ``between_launches`` for all
        operations and by class, such as ``before_launch.gemm.backward`` [s].

    Notes
    -----
    T1 and T2 are those of 2022, from which 2 µs for every nested event that the profiler recorded were taken off. T3
    and T5 were published in 2021 only, with another PyTorch and profiler; they are scaled by what T2 fell from 2021 to
    2022, the median over operations. From T4 the 6 µs are taken off that recording a launch costs. Classes of several
    operations take their mean, weighted by calls. What the profiler added beyond stays in.

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
    rows = _read()
    shrinkage, doubt = _find_shrinkage(rows)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        value, calls = float(row["mean"]), float(row["calls"])
        old = (row["term"], row["set"]) in (("T3", "2021"), ("T5", "2021"))
        if not row["class"] or ((row["set"] == "2021") != old and row["term"] != "T4"):
            continue
        if row["term"] == "T4":
            value, error = value - _RECORDING, _RECORDING / 3
        else:
            value, error = (value * shrinkage, value * doubt) if old else (value, float(row["deviation"]))
        for name in row["class"].split():
            term = "bare" if name == "bare" else _TERMS[row["term"]]
            keys = (term,) if name in ("bare", "all") else (f"{term}.{name}", term)
            for key in keys:
                found.setdefault(key, []).append((value, error, calls))
    return {key: _quantity(values, kind) for key, values in sorted(found.items())}


def _quantity(values: Sequence[tuple[float, float, float]], kind: str) -> Quantity:
    mean, error, calls = np.array(values).T
    if kind == "assumed":
        error = np.maximum(error, _ELSEWHERE * mean)
    value, stderr = (float(f"{np.average(part, weights=calls):.3g}") for part in (mean, error))
    return Quantity(value, "s", kind, _SOURCE, "2022-02-01", stderr)
