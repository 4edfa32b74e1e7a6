"""Answers as files, and what differs between two of them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).resolve().parent
#: Widest line of a file of answers [-].
WIDTH = 150


class Tolerance(NamedTuple):
    """How far a number may be from the kept one."""

    relative: float
    absolute: float


EXACT = Tolerance(relative=1e-9, absolute=1e-15)
#: Of parts whose numbers are not `EXACT`: steps of a solver depend on the processor.
TOLERANCES = {"fits": Tolerance(relative=1e-6, absolute=1e-9)}


class Difference(NamedTuple):
    """One value that moved: its path, the old and the new value, and by how much (infinite for
    other than numbers)."""

    path: str
    old: Any
    new: Any
    change: float

    @property
    def is_of_words(self) -> bool:
        """Whether only texts differ: one text, or a list of texts such as warnings."""
        return _holds_texts(self.old) and _holds_texts(self.new)


def _holds_texts(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return isinstance(value, str) and value != ABSENT


#: Stands for a value that one of two answers lacks.
ABSENT = "(absent)"


def write(part: str, answers: dict[str, Any]) -> None:
    """Write the answers of a part, a line for what fits into one; long texts stand once, at the
    end."""
    texts: dict[str, str] = {}

    def shorten(text: str) -> str:
        return texts.setdefault(text, f"@{len(texts)}") if len(text) > 40 else text

    short = _swap(answers, shorten)
    listed = {number: text for text, number in texts.items()}
    text = _layout({"answers": short, "texts": listed}, "") + "\n"
    (HOME / f"{part}.json").write_text(text, encoding="utf-8")


def read(part: str) -> dict[str, Any]:
    """Read the answers of a part."""
    data = json.loads((HOME / f"{part}.json").read_text(encoding="utf-8"))
    answers: dict[str, Any] = _swap(data["answers"], lambda text: data["texts"].get(text, text))
    return answers


def _swap(value: Any, change: Any) -> Any:
    """The same with every text changed."""
    if isinstance(value, dict):
        return {key: _swap(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_swap(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _layout(value: Any, indent: str) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= WIDTH:
        return line
    if isinstance(value, dict):
        rows = [
            f"{indent} {json.dumps(key)}: {_layout(each, indent + ' ')}"
            for key, each in value.items()
        ]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if not any(isinstance(each, dict | list) for each in value):
        return line
    rows = [f"{indent} {_layout(each, indent + ' ')}" for each in value]
    return "[\n" + ",\n".join(rows) + f"\n{indent}]"


def compare(part: str, new: dict[str, Any], *, complete: bool) -> list[Difference]:
    """List what differs from the kept answers of a part; unless `complete`, answers that `new`
    lacks are left out."""
    old = read(part)
    if not complete:
        old = {name: value for name, value in old.items() if name in new}
    return list(differences(old, new, tolerance=TOLERANCES.get(part, EXACT)))


def differences(
    old: Any, new: Any, path: str = "", *, tolerance: Tolerance = EXACT
) -> Iterator[Difference]:
    """List what differs; `new` goes through JSON first, so that both are of the same types."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            where = f"{path} / {key}" if path else key
            pair = old.get(key, ABSENT), new.get(key, ABSENT)
            yield from differences(*pair, where, tolerance=tolerance)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}[{number}]", tolerance=tolerance)
    elif type(old) in (int, float) and type(new) in (int, float):
        both_nan = math.isnan(old) and math.isnan(new)
        near = math.isclose(old, new, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
        if not near and not both_nan:
            yield Difference(path, old, new, abs(new / old - 1) if old else math.inf)
    elif type(old) is not type(new) or old != new:
        yield Difference(path, old, new, math.inf)


def report(part: str, found: list[Difference], most: int = 20) -> str:
    """Say what moved: texts first, the same change once, then numbers by how much they moved."""
    numbers = sorted(
        (each for each in found if each.change < math.inf), key=lambda each: -each.change
    )
    others: dict[str, list[str]] = {}
    for each in found:
        if each.change == math.inf:
            old = json.dumps(each.old, ensure_ascii=False)[:300]
            new = json.dumps(each.new, ensure_ascii=False)[:300]
            others.setdefault(f"    {old}\n    {new}", []).append(each.path)
    lines = [f"  {paths[0]}, {len(paths)} in all:\n{change}" for change, paths in others.items()]
    lines += [
        f"  {each.path}: {each.old!r} -> {each.new!r} ({each.change:.2g})" for each in numbers
    ]
    more = [f"  ... {len(lines) - most} more"] if len(lines) > most else []
    summary = f"{part}: {len(numbers)} numbers and {len(found) - len(numbers)} others differ"
    return "\n".join([summary, *lines[:most], *more])
