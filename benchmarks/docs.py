"""Writes the tables of docs/accuracy.md again: what stands below a marked command is what the command prints.

python -m benchmarks --docs
"""

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

from benchmarks.checks import pool_checks
from perfkit.plots import use_svg

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
_BLOCK = re.compile(
    r"(?P<head><!-- python -m benchmarks\.(?P<command>.+?) -->\n\n```text\n)(?P<printed>.*?)(?=```\n)", re.DOTALL
)


def run_benchmark(command: str) -> str | None:
    """What a benchmark prints; None where its data are not here. A missed bar is no failure."""
    name, *words = command.split()
    printed = StringIO()
    with redirect_stdout(printed):
        code = import_module(f"benchmarks.{name}").main(words)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    return "\n".join(lines) + "\n" if any(lines) and code in (0, 1) else None


def fill_page(text: str, run: Callable[[str], str | None] = run_benchmark) -> str:
    """The page with every block printed again; a block whose data are not here stays."""

    def again(block: re.Match[str]) -> str:
        return block["head"] + (run(block["command"]) or block["printed"])

    return _BLOCK.sub(again, text)


def write_page() -> None:
    """Fill docs/accuracy.md, and draw the picture of the README."""
    use_svg()  # in the colours and type of the notebooks
    pool_checks("zen3-2").chart().save(PAGE.with_name("predicted_vs_measured.svg"))
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
