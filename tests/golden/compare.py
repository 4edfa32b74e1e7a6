"""Answers as files, and what differs between two of them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).resolve().parent
RELATIVE, ABSOLUTE, WIDTH = 1e-9, 1e-15, 150


class Difference(NamedTuple):
    """One value that moved: its path, the old and the new value, and by how much (infinite for
    other than numbers)."""

    path: str
    old: Any
    new: Any
    change: float


def write(part: str, answers: dict[str, Any]) -> None:
    """Write the answers of a part, a line for what fits into one; long texts stand once, at the
    end."""
    texts: dict[str, str] = {}
    short = _swap(
        answers, lambda text: texts.setdefault(text, f"@{len(texts)}") if len(text) > 40 else text
    )
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
    return (
        "[\n"
        + ",\n".join(f"{indent} {_layout(each, indent + ' ')}" for each in value)
        + f"\n{indent}]"
    )


def differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """List what differs; `new` goes through JSON first, so that both are of the same types."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            where = f"{path} / {key}" if path else key
            yield from differences(old.get(key, "(absent)"), new.get(key, "(absent)"), where)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif type(old) in (int, float) and type(new) in (int, float):
        if not math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE) and not (
            old != old and new != new
        ):
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
            old, new = (
                json.dumps(value, ensure_ascii=False)[:300] for value in (each.old, each.new)
            )
            others.setdefault(f"    {old}\n    {new}", []).append(each.path)
    lines = [f"  {paths[0]}, {len(paths)} in all:\n{change}" for change, paths in others.items()]
    lines += [
        f"  {each.path}: {each.old!r} -> {each.new!r} ({each.change:.2g})" for each in numbers
    ]
    more = [f"  ... {len(lines) - most} more"] if len(lines) > most else []
    summary = f"{part}: {len(numbers)} numbers and {len(found) - len(numbers)} others differ"
    return "\n".join([summary, *lines[:most], *more])
