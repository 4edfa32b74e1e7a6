"""Committed runs of `perfkit check`: errors by family, and the bias of groups that are often
predicted wrong.

    python -m benchmarks.checks zen3-2
"""

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


def format_errors(comparison: Comparison) -> str:
    """Errors by family [%]."""
    rows = [{**row, "family": FAMILIES[row["family"]]} for row in comparison.summary().to_dicts()]
    return lay_out(
        rows,
        {
            "family [errors in %]": "{family}",
            "n": "{n}",
            "geomean": "{geomean:.1f}",
            "mean": "{mean:.1f}",
            "p95": "{p95:.1f}",
            "max": "{max:.0f}",
            "bias": "{bias:+.1f}",
            "floor": "{floor:.1f}",
            "inside": "{inside:.0f}",
        },
        numbers=True,
    )


def format_bias(comparison: Comparison) -> str:
    """Bias of groups of runs, with its standard error [%]."""
    groups = dict[str, list[float]]()
    for run, error in zip(comparison.runs, 100 * comparison.errors, strict=True):
        short, several = run["measured_s"] < _SHORT, run["ranks"] > 1
        own = {
            f"under {1e3 * _SHORT:.0f} ms, one rank": short and not several,
            f"under {1e3 * _SHORT:.0f} ms, two ranks": short and several,
            "two ranks": several,
            "tables above 1 GB": sum(
                table.nbytes for table in getattr(load_model(run), "tables", ())
            )
            > _LARGE,
        }
        for name, belongs in own.items():
            groups.setdefault(name, []).extend([error] * belongs)
    rows = []
    for name, errors in groups.items():
        if len(errors) > 1:
            error = np.std(errors, ddof=1) / np.sqrt(len(errors))
            rows.append({"group": name, "n": len(errors), "bias": np.mean(errors), "error": error})
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
    print(f"as measured\n{format_errors(found)}")
    if any("relative_s" in run for run in found.runs):
        found = found.at_usual_pace()
        print(f"\nat the usual pace of the machine\n{format_errors(found)}")
    print(f"\n{format_bias(found)}")
