"""Answers of exercises: folded Markdown that "Run All" does not show, with code and what it prints.

python notebooks/answers.py [notebook ...]  runs the code of the answers after that of their lesson, and
writes what it prints below it; of docs/teaching.md, the code of its solutions
"""

import ast
import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars

__all__ = ["Answer", "fill_answers", "fill_page", "find_answers", "run_answers"]

HERE = Path(__file__).resolve().parent
#: The code of an answer and what it prints, inside a folded part of a cell of Markdown.
ANSWER = re.compile(r"```python\n(?P<code>.*?)```\n(?P<shown>\n```text\n.*?```\n)?", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """Code of an answer, and what its lesson says that it prints."""

    code: str
    printed: str  # without the last line break


def find_answers(notebook: Any) -> list[Answer]:
    """The answers of a notebook that have code, in their order."""
    answers = []
    for cell in list_exercises(notebook):
        for found in ANSWER.finditer(cell["source"]):
            shown = found["shown"] or ""
            printed = shown.strip().removeprefix("```text\n").removesuffix("```").rstrip("\n")
            answers.append(Answer(found["code"], printed))
    return answers


def list_exercises(notebook: Any) -> list[Any]:
    """Cells of Markdown that fold an answer."""
    return [
        cell
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown" and "<details>" in cell["source"]
    ]


def run_answers(notebook: Any) -> list[str]:
    """What the code of the answers prints, each after the cells of the lesson and the answers
    before it; a last line that is a value is printed.

    Raises
    ------
    Exception
        What the code raises.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    with as_in_a_kernel():
        with contextlib.redirect_stdout(io.StringIO()):
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    exec(compile(cell["source"], "lesson", "exec"), names)
        for answer in find_answers(notebook):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                run_code(answer.code, names)
            printed.append(output.getvalue().rstrip("\n"))
    return printed


def run_code(code: str, names: dict[str, Any]) -> None:
    """Run code as a cell of a notebook; its last line is printed if it is a value."""
    *before, last = ast.parse(code).body
    if isinstance(last, ast.Expr):
        exec(compile(ast.Module(before, []), "answer", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "answer", "eval"), names)
        if value is not None:
            print(value)
    else:
        exec(compile(code, "answer", "exec"), names)


@contextlib.contextmanager
def as_in_a_kernel() -> Iterator[None]:
    """Run as the kernel of a notebook does: in its folder, and with settings that no other lesson has
    changed."""
    before = Path.cwd()
    os.chdir(HERE)
    try:
        with polars.Config(restore_defaults=True), warnings.catch_warnings():
            yield
    finally:
        os.chdir(before)


def fill_answers(notebook: Any) -> None:
    """Write what the code of the answers prints below it, in place."""
    if not find_answers(notebook):
        return
    outputs = iter(run_answers(notebook))
    for cell in list_exercises(notebook):
        cell["source"] = ANSWER.sub(
            lambda found: show_answer(found["code"], next(outputs)), cell["source"]
        )


def fill_page(text: str) -> str:
    """A page of Markdown with what the code of its answers prints; it begins anew for each."""

    def fill(found: re.Match[str]) -> str:
        with as_in_a_kernel(), contextlib.redirect_stdout(io.StringIO()) as output:
            warnings.simplefilter("ignore")
            run_code(found["code"], {"__name__": "__main__"})
        return show_answer(found["code"], output.getvalue().rstrip("\n"))

    return ANSWER.sub(fill, text)


def show_answer(code: str, printed: str) -> str:
    """Code and what it prints, in Markdown."""
    return f"```python\n{code}```\n" + (f"\n```text\n{printed}\n```\n" if printed else "")


def main() -> None:
    """Fill the answers of the notebooks and pages that are named, or of all notebooks."""
    import nbformat
    from refresh import tidy

    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        print(f"{path.name} ...", flush=True)
        if path.suffix == ".md":
            path.write_text(fill_page(path.read_text(encoding="utf-8")), encoding="utf-8")
            continue
        notebook = nbformat.read(path, as_version=4)
        fill_answers(notebook)
        nbformat.write(nbformat.from_dict(tidy(notebook)), path)


if __name__ == "__main__":
    main()
