"""Values that have broken readers before, and damage to bytes, texts and nested values."""

import copy
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Rng: TypeAlias = np.random.Generator

NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    7,
    0.5,
    -0.0,
    1e-308,
    5e-324,
    1e30,
    1e308,
    -1e308,
    math.inf,
    -math.inf,
    math.nan,
    2**31,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    True,
    False,
)
TEXTS: tuple[str, ...] = (
    "",
    " ",
    "a",
    "a\nb",
    "\x1b[31mred\x1b[0m",
    "\r",
    "\x00",
    "\x7f",
    "\x85",
    "\u2028",
    "\u202egnp.exe",
    "\ud800",
    "ü" * 40,
    "x" * 5000,
    "nan",
    "1e400",
    "-inf",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "{0}%s$(id)",
    "𝔘",
    "²",
    "None",
)
NESTED: tuple[Any, ...] = (
    None,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, "a"],
    {"a\nb": 1},
    [[[[[[[[]]]]]]]],
)
JUNK: tuple[Any, ...] = (*NUMBERS, *TEXTS, *NESTED)
#: What files of text are made of.
MARKS = b"{}[]()\"'=#:,.|0123456789eE+-_ NA\n"


def choose(rng: Rng, items: Sequence[Any]) -> Any:
    """One of the items, as it is (NumPy's own choice would turn them into its types)."""
    return items[int(rng.integers(len(items)))]


def junk(rng: Rng) -> Any:
    """A value that most places do not expect."""
    return copy.deepcopy(choose(rng, JUNK))


#: Arguments that are given on average, where there are many.
_GIVEN = 6


def vary(rng: Rng, given: dict[str, Any], odd: float = 0.1) -> dict[str, Any]:
    """Some of the arguments, one of each tuple; one of them is damaged or odd now and then.

    Of many arguments a few are given: nearly all pairs of dozens would be refused before anything
    is computed.
    """
    share = min(0.6, _GIVEN / max(len(given), 1))
    found = {name: draw(rng, value) for name, value in given.items() if rng.random() < share}
    if found and rng.random() < odd:
        name = choose(rng, list(found))
        found[name] = damage_tree(rng, found[name]) if rng.random() < 0.5 else junk(rng)
    return found


def draw(rng: Rng, value: Any) -> Any:
    """One of a tuple, or what a function makes, or the value itself."""
    if isinstance(value, tuple):
        return choose(rng, value)
    return value(rng) if callable(value) else value


def damage_file(rng: Rng, value: Any, write: Callable[[Any], str | bytes] = json.dumps) -> bytes:
    """A valid value as a damaged file: nested values before they are written, texts and bytes as
    such."""
    if isinstance(value, list | dict):
        if rng.random() < 0.7:
            try:
                return _encode(write(damage_tree(rng, value)))
            except Exception:  # what the format cannot hold
                pass
        value = write(value)
    if isinstance(value, str) and rng.random() < 0.7:
        return _encode(damage_text(rng, value))
    marks = MARKS if isinstance(value, str) and rng.random() < 0.7 else b""
    return damage_bytes(rng, _encode(value), marks) if rng.random() < 0.7 else _encode(value)


def _encode(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")


def damage_bytes(rng: Rng, data: bytes, marks: bytes = b"") -> bytes:
    """Change, cut, repeat, insert or replace a piece, once or more; `marks` are inserted, or
    anything."""
    # once, or two to five times in four of ten
    for _ in range(1 + int(rng.integers(10)) // 6 * int(rng.integers(1, 5))):
        start = int(rng.integers(len(data) + 1))
        elsewhere = int(rng.integers(len(data) + 1))
        piece = data[start : start + int(rng.integers(1, 65))]
        after_piece = data[start + len(piece) :]
        after_byte = data[start + 1 :]
        fresh = rng.bytes(int(rng.integers(1, 17)))
        if marks:
            fresh = bytes(choose(rng, marks) for _ in fresh)
        first = (data[start : start + 1] or b"0")[0]
        with_flipped_bit = bytes([first ^ 1 << int(rng.integers(8))])
        odd_byte = choose(rng, (b"\0", b"\xff", b"\n", b"\x1b", b"0", b"9", b'"', fresh[:1]))
        endings = [
            with_flipped_bit + after_byte,
            odd_byte + after_byte,
            after_piece,
            piece * int(rng.integers(2, 10)) + after_piece,
            fresh + piece + after_piece,
            data[elsewhere : elsewhere + len(piece)] + after_piece,
            b"" if rng.random() < 0.3 else piece + after_piece,
        ]
        data = data[:start] + choose(rng, endings)
    return data


def damage_text(rng: Rng, text: str) -> str:
    """Replace numbers and words, swap, repeat and drop lines, insert odd text; once or twice."""
    numbers = [write_number(number) for number in NUMBERS]
    for _ in range(1 + int(rng.integers(8)) // 5):
        lines = text.split("\n")
        at = int(rng.integers(len(lines)))
        elsewhere = int(rng.integers(len(lines)))
        words = lines[at].split(" ")
        place = int(rng.integers(len(words)))
        before, word, after = words[:place], words[place], words[place + 1 :]
        number = choose(rng, numbers)
        odd = choose(rng, (*TEXTS, " " * 300, "e", "-", ",", "[", '"', "="))
        with_number = [*before, number, *after]
        changed_words = [
            with_number,
            with_number,
            [*before, odd, *after],
            [*before, odd, word, *after],
            [*before, word],
        ]
        kind = int(rng.integers(7))
        if kind < len(changed_words):
            lines[at] = " ".join(changed_words[kind])
        elif kind == 5:
            lines[at], lines[elsewhere] = lines[elsewhere], lines[at]
        else:
            repeated = [lines[elsewhere]] * int(rng.integers(1, 4))
            lines[at:at] = repeated
        text = "\n".join(lines)
    return text


def write_number(number: Any) -> str:
    """As Python writes it; the largest integers are one with 400 zeros."""
    if abs(number) < 2**70:
        return repr(number)
    return "1" + "0" * 400


def damage_tree(rng: Rng, tree: Any) -> Any:
    """Nested dicts and lists with one or two values, keys or entries replaced, dropped or moved;
    copied on the way."""
    for _ in range(1 + int(rng.integers(6)) // 4):
        if not isinstance(tree, dict | list) or not tree or rng.random() < 0.02:
            return junk(rng)
        tree = copy.copy(tree)
        node = tree
        while True:  # a walk down to some entry: short ones are as likely as long ones
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key, other = choose(rng, keys), choose(rng, keys)
            below = node[key]
            if not isinstance(below, dict | list) or not below or rng.random() < 0.15:
                break
            node[key] = copy.copy(below)
            node = node[key]
        kind = int(rng.integers(7))
        if is_usual_number(below) and rng.random() < 0.6:
            node[key] = choose(rng, list_near(below) if rng.random() < 0.8 else NUMBERS)
        elif kind < 2:
            node[key] = junk(rng)
        elif kind == 2:
            node[key] = choose(rng, (str(below), [below], {"a": below}, None))
        elif kind == 3:
            del node[key]
        elif kind == 4:
            node[key], node[other] = node[other], node[key]
        elif isinstance(node, list):
            node.insert(key, copy.deepcopy(below))
        else:
            if kind == 5:
                del node[key]
            node[choose(rng, (*TEXTS, str(key).upper(), f"{key}_"))] = below
    return tree


def is_usual_number(value: Any) -> bool:
    """Whether a value is a number that can be multiplied without becoming infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300


def list_near(number: float) -> tuple[float, ...]:
    """Numbers that are near a number, or are often taken for it."""
    return (
        -number,
        number * 1e6,
        number / 1e6,
        number * 2,
        number + 1,
        number - 1,
        number / 2,
        0,
        1,
    )
