"""Each room says in its docstring what it is for and in which order to read it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import perfkit

pytestmark = pytest.mark.repository
PACKAGE = Path(perfkit.__file__).parent
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
#: How a docstring begins to say where a reader starts.
ORDERS = re.compile(r"reading order|read first|in this order|read `\w+` first", re.IGNORECASE)


def read_docstring(room: Path) -> str:
    """The docstring of a room, on one line."""
    tree = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split())


@cache
def list_definitions() -> frozenset[str]:
    """Functions and classes of all rooms."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
    return frozenset(names)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_in_which_order_to_read_it(room: Path) -> None:
    assert ORDERS.search(read_docstring(room))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_what_a_room_names_in_its_docstring_exists(room: Path) -> None:
    files = {path.stem for path in room.glob("*.py")}
    named = set(re.findall(r"(?<!`)`(\w+)`(?!`)", read_docstring(room)))
    assert named <= files | list_definitions()


def test_a_docstring_without_an_order_is_found() -> None:
    assert not ORDERS.search("Reports: any results as one file that opens without a network.")
