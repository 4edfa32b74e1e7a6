"""Committed runs of `perfkit check`, pooled: errors by family and the bias of runs that are easily predicted wrong.

python -m benchmarks.checks zen3-2
"""

from typing import Any

import numpy as np

from benchmarks import command, lay_out
from perfkit.calibration.checks import Comparison
from perfkit.ground.files import find_reference
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
    rows = [{**row, "family": FAMILIES[row["family"]]} for row in comparison.summary().to_dicts()]
    return lay_out(rows, {
        "family [errors in %]": "{family}", "n": "{n}", "geomean": "{geomean:.1f}", "mean": "{mean:.1f}",
        "p95": "{p95:.1f}", "max": "{max:.0f}", "bias": "{bias:+.1f}", "floor": "{floor:.1f}", "inside": "{inside:.0f}",
    }, numbers=True)  # fmt: skip


def format_bias(comparison: Comparison) -> str:
    """Bias of groups of runs with its standard error, in percent."""
    groups = dict[str, list[float]]()
    for run, error in zip(comparison.runs, 100 * comparison.errors, strict=True):
        model, ranks = load({key: value for key, value in run["config"].items() if key != "owners"}), run["ranks"]
        own = {
            f"under {1e3 * _SHORT:.0f} ms, one rank": run["measured_s"] < _SHORT and ranks == 1,
            f"under {1e3 * _SHORT:.0f} ms, two ranks": run["measured_s"] < _SHORT and ranks > 1,
            "two ranks": ranks > 1,
            "tables above 1 GB": sum(table.nbytes for table in getattr(model, "tables", ())) > _LARGE,
        }
        for name, belongs in own.items():
            groups.setdefault(name, []).extend([error] * belongs)
    rows = []
    for name, errors in groups.items():
        if len(errors) > 1:
            error = np.std(errors, ddof=1) / np.sqrt(len(errors))
            rows.append({"group": name, "n": len(errors), "bias": np.mean(errors), "error": error})
    columns = {"group": "{group}", "n": "{n}", "bias [%]": "{bias:+.1f}", "standard error": "{error:.1f}"}
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
