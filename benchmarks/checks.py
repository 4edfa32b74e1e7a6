"""Committed runs of `perfkit check`: errors by family, and the bias of groups that are often
predicted wrong.

    python -m benchmarks.checks zen3-2
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.saved_runs import load_model, pool_checks
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.checks import Comparison

#: The families of `perfkit check`, in words.
FAMILIES = {
    "dlrm": "DLRM",
    "transformer": "BERT, GPT-2",
    "convolution": "convolutional nets",
    "xlnet": "XLNet",
    "hybrid": "DLRM, two gloo ranks",
    "ddp": "data-parallel, two gloo ranks",
    "all": "all",
}
#: Times below this are short [s], tables above this are large [B].
_SHORT, _LARGE = 0.02, 1e9
#: Groups of runs whose bias is printed.
_GROUPS = (
    "under 20 ms, one rank",
    "under 20 ms, two ranks",
    "two ranks",
    "tables above 1 GB",
)


def format_errors(comparison: Comparison) -> str:
    """Errors by family [%]."""
    rows = [{**row, "family": FAMILIES[row["family"]]} for row in comparison.summary().to_dicts()]
    return lay_out(
        rows,
        {
            "family [errors in %]": "{family}",
            "n": "{n}",
            "geomean": "{geomean_percent:.1f}",
            "mean": "{mean_percent:.1f}",
            "p95": "{p95_percent:.1f}",
            "max": "{max_percent:.0f}",
            "bias": "{bias_percent:+.1f}",
            "floor": "{floor_percent:.1f}",
            "inside": "{inside_percent:.0f}",
        },
        numbers=True,
    )


def _list_groups(run: Mapping[str, Any]) -> list[str]:
    """Groups of often wrong predictions that a run belongs to."""
    is_short = run["measured_s"] < _SHORT
    has_ranks = run["ranks"] > 1
    tables = getattr(load_model(run), "tables", ())
    groups = []
    if is_short:
        count = "two ranks" if has_ranks else "one rank"
        groups.append(f"under 20 ms, {count}")
    if has_ranks:
        groups.append("two ranks")
    if sum(table.nbytes for table in tables) > _LARGE:
        groups.append("tables above 1 GB")
    return groups


def format_bias(comparison: Comparison) -> str:
    """Bias of groups of runs, with its standard error [%]."""
    groups: dict[str, list[float]] = {name: [] for name in _GROUPS}
    for run, error in zip(comparison.runs, 100 * comparison.errors, strict=True):
        for name in _list_groups(run):
            groups[name].append(error)
    rows = []
    for name, errors in groups.items():
        if len(errors) > 1:
            stderr = np.std(errors, ddof=1) / np.sqrt(len(errors))
            row = {"group": name, "n": len(errors), "bias": np.mean(errors), "error": stderr}
            rows.append(row)
    columns = {
        "group": "{group}",
        "n": "{n}",
        "bias [%]": "{bias:+.1f}",
        "standard error": "{error:.1f}",
    }
    return lay_out(rows, columns, numbers=True)


@command({"name": {"help": "machine, such as zen3-2"}})
def main(given: Any) -> None:
    """Errors of committed runs of check."""
    found = pool_checks(given.name)
    unknown = {run["family"] for run in found.runs} - FAMILIES.keys()
    if unknown:
        raise ValueError(
            f"runs of {given.name!r} are of families {', '.join(sorted(unknown))}, which are no samples of check; steps of "
            "GPUs are shown by `python -m benchmarks.gpu_steps --saved FILE`"
        )
    print(f"as measured\n{format_errors(found)}")
    if any("relative_s" in run for run in found.runs):
        found = found.at_usual_pace()
        print(f"\nat the usual pace of the machine\n{format_errors(found)}")
    print(f"\n{format_bias(found)}")
