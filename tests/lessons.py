"""Reads the lessons of notebooks/ and compares their sentences with what their cells print and assert.

python -m tests.lessons [notebook ...]  lists the sentences that nothing proves
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

#: Code of an answer, and what it prints, in folded Markdown.
_BLOCK = re.compile(r"```(?P<kind>python|text)\n(?P<text>.*?)```", re.DOTALL)
_FORMULA = re.compile(r"\$\$.*?\$\$|\$[^$]*\$", re.DOTALL)
_CITED = re.compile(r"https?://|arXiv|doi")


class Cell(NamedTuple):
    """A cell of a notebook."""

    kind: str  # "markdown" or "code"
    source: str
    outputs: str  # what it printed or returned, as text
    tags: list[str]

    @property
    def code(self) -> str:
        """Its code: of a cell of Markdown, that of its folded answers."""
        return self.source if self.kind == "code" else self._join_blocks("python")

    @property
    def printed(self) -> str:
        """What its code printed or returned."""
        return self.outputs if self.kind == "code" else self._join_blocks("text")

    @property
    def prose(self) -> str:
        """Its sentences."""
        return _BLOCK.sub("", self.source) if self.kind == "markdown" else ""

    def _join_blocks(self, kind: str) -> str:
        blocks = _BLOCK.finditer(self.source)
        return "\n".join(found["text"] for found in blocks if found["kind"] == kind)


class Lesson(NamedTuple):
    """A notebook and its cells."""

    path: Path
    cells: list[Cell]

    def join_sources(self, kind: str) -> str:
        """Text of all cells of a kind."""
        return "\n".join(cell.source for cell in self.cells if cell.kind == kind)

    def join_prose(self) -> str:
        """Sentences of all cells."""
        return "\n".join(cell.prose for cell in self.cells)

    def join_code(self) -> str:
        """Code of all cells and answers."""
        return "\n".join(cell.code for cell in self.cells)

    def join_printed(self) -> str:
        """What all cells and answers print."""
        return "\n".join(cell.printed for cell in self.cells)


def read_lesson(path: Path) -> Lesson:
    """The cells of a notebook."""
    cells = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        outputs = [read_output(output) for output in cell.get("outputs", [])]
        tags = cell["metadata"].get("tags", [])
        cells.append(Cell(cell["cell_type"], "".join(cell["source"]), "\n".join(outputs), tags))
    return Lesson(path, cells)


def read_output(output: dict[str, Any]) -> str:
    """What was printed or returned, as text."""
    if "text" in output:
        return "".join(output["text"])
    return "".join(output.get("data", {}).get("text/plain", ""))


def split_sentences(prose: str) -> list[str]:
    """Sentences without formulas; lines of Markdown end one, too."""
    prose = _FORMULA.sub("", prose)
    return [part.strip() for part in re.split(r"(?<=[.?!:])(?:\*\*)? |\n", prose) if part.strip()]


# Numbers with a unit.

_UNITS = r"(%|times|x|[munµ]?s|[kMGT]i?B(?:/s)?|[kMGT]FLOP(?:/s)?)"
_NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?{_UNITS}(?![\w/]))?")


def find_numbers(text: str) -> Iterator[tuple[str, float, str]]:
    """Numbers as written, their values, and their units."""
    for written, unit in _NUMBER.findall(text):
        yield written, float(written.replace(",", "")), {"x": "times", "us": "µs"}.get(unit, unit)


def find_unproved(prose: str, outputs: str) -> list[str]:
    """Numbers with a unit in prose that no output has, to the digits of the prose; cited sentences
    are excepted.

    A number without a unit in an output (a column of a frame) fits every unit, and as a share also
    ``%``.
    """
    known = list(find_numbers(outputs))
    prose = re.sub(r"`[^`]*`", "", _FORMULA.sub("", prose))
    unproved = []
    for sentence in split_sentences(prose):
        if _CITED.search(sentence):
            continue
        for written, value, unit in find_numbers(sentence):
            digits = len(written.partition(".")[2])
            rounding = 0.5 * 10.0**-digits * (1 + 1e-9)
            values = [other for _, other, of in known if of in ("", unit)]
            if unit == "%":
                values += [100 * other for _, other, of in known if of == ""]
            is_proved = any(abs(other - value) <= rounding for other in values)
            if unit and not is_proved:
                unproved.append(f"{written} {unit}")
    return unproved


# Comparisons in words.

_SHARES = (
    r"(?:a|one|two|three|four|five) (?:half|halves|thirds?|quarters?|fifths?|sixths?|eighths?|tenths?"
    r"|hundredths?|thousandths?)|half"
)
_MULTIPLES = r"twice|thrice|double[sd]?|(?:\w+ )?times (?:as|the|longer|faster|more)|\w+fold"
_COMPARED = r"(?:more|less|fewer|better|worse|\w{2,}er) than|as (?:\w+) as"
_NEAR = r"(?:stays?|lies?|comes?|is|are) (?:near|close to|far from|within|below|above)|(?:nearly|almost)"
#: Words that compare two numbers which a cell has printed, or could have.
COMPARISON = re.compile(rf"\b(?:{_SHARES}|{_MULTIPLES}|{_COMPARED}|{_NEAR})\b", re.IGNORECASE)
#: What looks like a comparison but is none.
_NO_COMPARISON = re.compile(
    r"\b(?:rather than|other than|as (?:well|long|soon|far|much|many|often|such) as"
    r"|one (?:second|half of the))\b",
    re.IGNORECASE,
)


def list_screens(lesson: Lesson) -> list[list[Cell]]:
    """The cells of a lesson by screen; each begins with a heading, each exercise with its number.

    A cell of Markdown may end one screen and begin the next.
    """
    screens: list[list[Cell]] = [[]]
    for cell in lesson.cells:
        if cell.kind == "code":
            screens[-1].append(cell)
            continue
        first, *others = re.split(r"^(?=## |\*\*\d+\.\*\*)", cell.source, flags=re.MULTILINE)
        screens[-1].append(cell._replace(source=first))
        screens += [[cell._replace(source=part)] for part in others]
    return screens


def read_claims(code: str) -> list[str]:
    """What the asserts of a cell claim in words: ``assert 0.3 < share < 0.36, "a third"``."""
    claims = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assert) and isinstance(node.msg, ast.Constant):
            claims.append(str(node.msg.value))
    return claims


def find_unasserted(screen: list[Cell]) -> list[str]:
    """Sentences of a screen that compare what its cells print, though no assert claims it.

    Only sentences after the code count: a question and an estimate stand before it. A sentence is proved
    if the message of an assert of the screen is a part of it and holds its comparison. A sentence with a
    source is excepted, and so is a question.
    """
    claims: list[str] = []
    unasserted = []
    for cell in screen:
        claims += [read_words(claim) for claim in read_claims(cell.code)]
        for sentence in split_sentences(read_prose_after_code(screen, cell)):
            is_excepted = bool(_CITED.search(sentence)) or sentence.endswith("?")
            if not is_excepted and not is_claimed(read_words(sentence), claims):
                unasserted.append(sentence)
    return unasserted


def read_prose_after_code(screen: list[Cell], cell: Cell) -> str:
    """The sentences of a cell that stand after code: of its screen, or of its own answer."""
    before = screen[: [other is cell for other in screen].index(True)]
    if any(other.kind == "code" for other in before):
        return cell.prose
    _, code, after = cell.source.rpartition("```python")
    return _BLOCK.sub("", code + after) if code and cell.kind == "markdown" else ""


def read_words(text: str) -> str:
    """Text without the marks of Markdown."""
    return " ".join(re.sub(r"[*`_]", "", text).split())


def is_claimed(sentence: str, claims: list[str]) -> bool:
    """Whether every comparison of a sentence lies in a claim that is a part of the sentence."""
    excepted = [found.span() for found in _NO_COMPARISON.finditer(sentence)]
    spans = [(sentence.find(claim), claim) for claim in claims if claim in sentence]
    proved = [(start, start + len(claim)) for start, claim in spans]
    for found in COMPARISON.finditer(sentence):
        inside = [(start, end) for start, end in excepted + proved]
        if not any(start <= found.start() and found.end() <= end for start, end in inside):
            return False
    return True


def main() -> None:
    """List the sentences that nothing proves."""
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        lesson = read_lesson(path)
        for number in find_unproved(lesson.join_prose(), lesson.join_printed()):
            print(f"{path.name}: no output has {number}")
        for screen in list_screens(lesson):
            for sentence in find_unasserted(screen):
                print(f"{path.name}: no assert claims: {sentence}")


if __name__ == "__main__":
    main()
