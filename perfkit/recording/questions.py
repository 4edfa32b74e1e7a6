"""Questions that a step asks of computed tensors: whether they are true.

A capture knows no such answer. It takes one, and calls the step again with the other one: a question
on which nothing depends, or of which one answer ends the step with an error, needs no value.
"""

import ast
import linecache
import sys
from dis import opname
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, TypeGuard

from perfkit.recording.refusals import LIBRARIES, find_line

#: Beginnings of names of functions that raise an error unless what they are given is true.
_CHECKING = ("check", "_check", "assert", "_assert", "ensure", "validate", "require")
#: Beginnings of the names of instructions that ask whether something is true.
_ASKING = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
#: Parts of PyTorch, and perfkit, that pass a question on.
_PARTS = ("overrides.py", "_tensor.py", "utils", "_subclasses", "_dynamo", "_compile.py")
_BETWEEN = (*[str(Path(LIBRARIES[0], part)) for part in _PARTS], LIBRARIES[1])
#: The file that calls steps.
_CALLING = str(Path(__file__).with_name("comparisons.py"))
#: Functions that end a program.
_ENDING = ("exit", "_exit", "abort", "fail")


class Place(NamedTuple):
    """Where an instruction stands in its file.

    Parameters
    ----------
    first_line, last_line : int
        Its lines [-].
    first_column, last_column : int
        Its columns in bytes [-].
    """

    first_line: int
    last_line: int
    first_column: int
    last_column: int

    def is_within(self, node: ast.expr) -> bool:
        """Whether the instruction is a part of an expression."""
        begins = (node.lineno, node.col_offset) <= (self.first_line, self.first_column)
        ends = (self.last_line, self.last_column) <= (
            node.end_lineno or node.lineno,
            node.end_col_offset or 0,
        )
        return begins and ends


class Question(NamedTuple):
    """A place of a program that asks whether something computed is true.

    Parameters
    ----------
    file : str
        File of the program.
    place : Place, optional
        Where it stands there. The number of an instruction would not do: Python may fuse two after
        some calls.
    line : str
        How a refusal names the line.
    """

    file: str
    place: Place | None
    line: str


def find_asking_frame() -> FrameType | None:
    """The innermost caller outside of perfkit and of those parts of PyTorch that stand between a
    program and its tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def make_question(frame: FrameType | None) -> Question:
    """The question that this frame asks now."""
    if frame is None:
        return Question("", None, find_line())
    place = _find_place(frame.f_code, frame.f_lasti)
    return Question(frame.f_code.co_filename, place, find_line())


class Check(NamedTuple):
    """What the code of a check says.

    Parameters
    ----------
    passing : bool
        The answer after which the step goes on.
    raises : bool
        Whether the code shows that the other one ends in an error. Of a function that is named as a
        check it does not.
    """

    passing: bool
    raises: bool


def expect_answer(frame: FrameType | None) -> bool | None:
    """The answer by which a step goes on, as its code says: a check that raises an error otherwise.

    Parameters
    ----------
    frame : FrameType
        What asks.

    Returns
    -------
    answer : bool, optional
        None where the code is no check, or cannot be read.
    """
    check = _find_check(frame)
    return None if check is None else check.passing


def must_pass(frame: FrameType | None) -> bool:
    """Whether what this frame asks is a check whose error nothing in the step catches, so that a step
    which goes on has passed it."""
    check = _find_check(frame)
    return check is not None and check.raises and not _is_error_caught(frame)


def _find_check(frame: FrameType | None) -> Check | None:
    """The check that a frame makes now; None where its code is no check, or cannot be read."""
    place = None if frame is None else _find_place(frame.f_code, frame.f_lasti)
    if frame is None or place is None:
        return None
    for node in ast.walk(_read_file(frame.f_code.co_filename)):
        if isinstance(node, ast.Assert) and place.is_within(node.test):
            return Check(_follow_signs(node.test, place, True), raises=True)
        if isinstance(node, ast.If) and place.is_within(node.test):
            if _ends_program(node.body):
                return Check(_follow_signs(node.test, place, False), raises=True)
            if _ends_program(node.orelse):
                return Check(_follow_signs(node.test, place, True), raises=True)
        if (
            isinstance(node, ast.Call)
            and _name_function(node).startswith(_CHECKING)
            and node.args
            and place.is_within(node.args[0])
        ):
            return Check(_follow_signs(node.args[0], place, True), raises=False)
    return None


def _is_error_caught(frame: FrameType | None) -> bool:
    """Whether a frame, or one of its callers up to the call of the step, may catch an error that it
    raises now, and go on."""
    while frame is not None and frame.f_code.co_filename != _CALLING:
        name, line = frame.f_code.co_filename, frame.f_lineno
        # PyTorch and perfkit pass errors of a step on
        if not name.startswith(LIBRARIES):
            for node in ast.walk(_read_file(name)):
                if _catches(node) and node.body[0].lineno <= line <= (
                    node.body[-1].end_lineno or 0
                ):
                    return True
        frame = frame.f_back
    return False


def _catches(node: ast.AST) -> TypeGuard[ast.Try | ast.With]:
    """Whether a statement may catch an error of its body, and go on."""
    if isinstance(node, ast.Try):
        return any(not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
    if isinstance(node, ast.With):
        contexts = [item.context_expr for item in node.items]
        return any(isinstance(c, ast.Call) and _name_function(c) == "suppress" for c in contexts)
    return False


@lru_cache(maxsize=32)
def _read_file(name: str) -> ast.Module:
    """The syntax of a file; empty if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _find_place(code: CodeType, instruction: int) -> Place | None:
    """Where that stands of which an instruction asks whether it is true; None if Python does not
    say.

    A jump asks for what the instruction before it has made, and a call is a question itself.
    """
    number = instruction // 2
    if opname[code.co_code[instruction]].startswith(_ASKING):
        number -= 1
    first, last, begin, end = next(islice(code.co_positions(), max(number, 0), None))
    if first is None or last is None or begin is None or end is None:
        return None
    return Place(first, last, begin, end)


def _follow_signs(test: ast.expr, place: Place, wanted: bool) -> bool:
    """What a part of a test must be, so that the test is as wanted: `not` turns it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _follow_signs(test.operand, place, not wanted)
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            if place.is_within(part):
                return _follow_signs(part, place, wanted)
    return wanted


def _ends_program(body: list[ast.stmt]) -> bool:
    """Whether statements end with an error, or end the program."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Raise):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return _name_function(last.value).startswith(_ENDING)
    return False


def _name_function(call: ast.Call) -> str:
    """The name of a function that is called, without that of its module or object."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
