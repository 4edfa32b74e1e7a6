"""Committed runs of `perfkit check`, pooled: errors by family and the bias of runs that are easily predicted wrong.

python -m benchmarks.checks zen3-2
"""

from typing import Any

import numpy as np

from benchmarks import command
from perfkit.calibration.checks import Comparison
from perfkit.ground.files import find_reference
from perfkit.ground.units import format_table
from perfkit.measure.samples import load

#: The families of `perfkit check`, in words.
FAMILIES = {
    "dlrm": "DLRM", "transformer": "BERT, GPT-2", "convolution": "convolutional nets", "xlnet": "XLNet",
    "hybrid": "DLRM, two gloo ranks", "ddp": "data-parallel, two gloo ranks", "all": "all",
}  # fmt: skip
#: What counts as short [s] and as large [B].
_SHORT, _LARGE = 0.02, 1e9


def pool_checks(name: str) -> Comparison:
    """All committed checks of one machine."""
    return Comparison.load(*sorted(find_reference("measured").glob(f"{name}.check-*.json")))


def format_errors(comparison: Comparison) -> str:
    """Errors by family, in percent."""
    formats = dict.fromkeys(("geomean", "mean", "p95"), ".1f")
    formats |= {"max": ".0f", "bias": "+.1f", "floor": ".1f", "inside": ".0f"}
    rows = [("family [errors in %]", "n", *formats)]
    for row in comparison.summary().to_dicts():
        figures = [format(row[name], style) for name, style in formats.items()]
        rows.append((FAMILIES[row["family"]], f"{row['n']}", *figures))
    return format_table(rows, numbers=True)


def format_bias(comparison: Comparison) -> str:
    """Bias of groups of runs with its standard error, in percent."""
    runs = comparison.runs
    models = [load({key: value for key, value in run["config"].items() if key != "owners"}) for run in runs]
    sizes = [sum(table.nbytes for table in getattr(model, "tables", ())) for model in models]
    groups = {
        f"under {1e3 * _SHORT:.0f} ms, one rank": [r["measured_s"] < _SHORT and r["ranks"] == 1 for r in runs],
        f"under {1e3 * _SHORT:.0f} ms, two ranks": [r["measured_s"] < _SHORT and r["ranks"] > 1 for r in runs],
        "two ranks": [run["ranks"] > 1 for run in runs],
        "tables above 1 GB": [size > _LARGE for size in sizes],
    }
    rows = [("group", "n", "bias [%]", "standard error")]
    for name, chosen in groups.items():
        errors = 100 * comparison.errors[np.array(chosen)]
        if len(errors) > 1:
            error = errors.std(ddof=1) / np.sqrt(len(errors))
            rows.append((name, f"{len(errors)}", f"{errors.mean():+.1f}", f"{error:.1f}"))
    return format_table(rows, numbers=True)


@command({"name": {"help": "machine, such as zen3-2"}})
def main(given: Any) -> None:
    """Errors of committed runs of check."""
    found = pool_checks(given.name)
    print(f"as measured\n{format_errors(found)}")
    if any("relative_s" in run for run in found.runs):
        found = found.at_usual_pace()
        print(f"\nat the usual pace of the machine\n{format_errors(found)}")
    print(f"\n{format_bias(found)}")
