"""How nbval compares the notebooks of this folder: text is the contract, pictures and standard
error are not."""

import os

import pytest

#: Data of a chart: numbers to the last digit, which differs between processors.
CHART = "application/vnd.vegalite.v5+json"
os.environ.setdefault("PYTHONHASHSEED", "0")  # every kernel inherits it


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Skip outputs that differ between sessions, and hide object addresses."""
    if hasattr(collector, "skip_compare"):  # nbval's notebook file
        collector.skip_compare += ("text/html", "image/svg+xml", CHART, "stderr")
        collector.sanitize_patterns.update({r"0x[0-9a-f]{6,}": "0xADDR"})
