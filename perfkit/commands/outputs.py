"""What a command gives: text, figures for ``--json`` and results for ``--report``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfkit.ground.targets import check_page, check_target, find_target, write_text
from perfkit.ground.units import escape, format_table, show


@dataclass(frozen=True)
class Answer:
    """What a command found."""

    text: str  # to print
    figures: Any  # for --json
    results: Sequence[Any] = ()  # for --report
    notes: str | None = None  # for --report, before the results


@dataclass(frozen=True)
class OutputFiles:
    """Files that a command writes; None where the option is not given."""

    json_file: str | None  # "-" for standard output
    report: str | None = None
    out: str | None = None  # a platform or a plan, which the command writes itself

    def check(self) -> None:
        """Check before a command runs that each file can be written, and that no two are the
        same."""
        options: dict[Path, str] = {}
        if self.json_file != "-":
            self._check_file("json", self.json_file, options)
        if self.report is not None:
            check_page("report", self.report)
        self._check_file("report", self.report, options)
        self._check_file("out", self.out, options)

    def _check_file(self, option: str, path: str | None, options: dict[Path, str]) -> None:
        """Check one file against those of the options before it."""
        if path is None:
            return
        check_target(option, path)
        target = find_target(option, path)
        if not target.is_file:  # a terminal or /dev/null takes several texts
            return
        if target.file in options:
            first = options[target.file]
            raise ValueError(
                f"{first} and {option} are the same file, {show(path)}; name two files"
            )
        options[target.file] = option

    def write(self, answer: Answer) -> None:
        """Print the answer, and write its figures and its report."""
        figures = json.dumps(answer.figures, indent=1, default=str)
        if self.json_file == "-":
            print(figures)
        elif answer.text:
            print(answer.text)
        written = []
        if self.json_file is not None and self.json_file != "-":
            written.append(write_text(self.json_file, figures + "\n"))
        if self.report is not None and answer.results:
            from perfkit.reports.page import report

            written.append(report(*answer.results, path=self.report, notes=answer.notes))
        if self.json_file != "-":
            for path in written:
                print(f"written to {escape(path, 1000)}")


def list_rows(
    rows: Sequence[Mapping[str, object]], json_file: str | None, below: str | None = None
) -> int:
    """Print rows as a table with a text below it, or write them as JSON: all that a command does
    that lists things."""
    files = OutputFiles(json_file)
    files.check()
    table = [list(rows[0])]
    for row in rows:
        table.append([str(value) for value in row.values()])
    text = format_table(table)
    if below is not None:
        text += f"\n{below}"
    files.write(Answer(text, list(rows)))
    return 0
