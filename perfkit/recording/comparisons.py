"""Calls of a step beside each other: the recorded one, further ones like it, and trials in which what
is not known counts otherwise."""

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch

from perfkit.recording.questions import Question
from perfkit.recording.recorder import Recorder
from perfkit.recording.refusals import LIBRARIES, NEEDED, Refused, explain
from perfkit.recording.sandbox import Setting, list_generators
from perfkit.recording.trails import USUAL, EndlessStep, Trail, Trial
from perfkit.recording.values import compute

#: Steps of at most so many operations are always called once more [-].
FEW_OPERATIONS = 500
#: A step is called again until about so many operations, one whose drawn numbers may decide until
#: about so many, and at most so many times [-].
USUAL_OPERATIONS, MOST_OPERATIONS, MOST_CALLS = 4_000, 30_000, 15
#: What a computed number counts as in further calls, if the step reads one.
OTHER_NUMBERS = (1e12, -1e12, 100.0, 1e-3)
#: With so many of the numbers that it compares a computed number with, the step is tried [-].
MOST_BOUNDS = 8
#: What is said of a step that reads a computed number and decides by it.
DECIDED = (
    "capture computes no values, and the step decides by one that it reads in {}; use torch.where, or capture each "
    "branch as a step of its own; of whole numbers that are passed, 16,777,216 at most are known"
)
#: What is said of calls that differ.
DRAWN = (
    "numbers that the step draws decide its operations or their sizes; the graph is one draw: capture the step with other "
    "seeds too, and average"
)
CALLS = "the calls of the step differ, and the graph is the second call alone: {0}; give a step that spans a whole period"
#: Assumption for a step that keeps the best of what it computes.
BETTER = (
    "the step does something else where a computed number is better than the best one so far, in {}; the graph is a call "
    "in which it is not"
)
#: Assumption for an optimizer, such as Adafactor, whose ways differ in single numbers.
SINGLE = (
    "an optimizer decides by a computed number in {}; its ways differ in operations on single numbers alone, and the "
    "graph has one of them"
)
#: Assumption for a tensor whose array was changed.
SHARED_WITH_NUMPY = (
    "an array of NumPy is changed after a tensor was made of it; they share memory, and a capture keeps them apart, so that "
    "sizes and branches may follow from old numbers; make the tensor anew from the array"
)
Step = Callable[[], Any]


class Calls(NamedTuple):
    """The first two calls of a step.

    Parameters
    ----------
    first : Trail
        The first call, which is not recorded.
    recorded : Trail
        The second one, which is.
    drawn : bool
        Whether drawn numbers may have decided the second one.
    """

    first: Trail
    recorded: Trail
    drawn: bool


def record_call(recorder: Recorder, step: Step) -> Calls:
    """Call a step twice, and record the second call.

    An error after a question of the step, such as a check of computed numbers, is taken as the wrong
    answer: the step begins anew with the other one.

    Parameters
    ----------
    recorder : Recorder
        Receives the operations of the second call.
    step : callable
        The step.

    Returns
    -------
    calls : Calls
        What they did.

    Raises
    ------
    ValueError
        For a step that asks without end for something computed.
    """
    first_error: Exception | None = None
    turned: set[Question] = set()
    while True:
        try:
            first, _ = _run(recorder, step)
            recorder.begin()
            recorded, drawn = _run(recorder, step)
            return Calls(first, recorded, drawn)
        except EndlessStep as error:
            raise Refused(NEEDED.format(error.line)) from error
        except Exception as error:
            recorder.on = False
            question = recorder.trail.last_question
            first_error = first_error or error
            if question is None or question in turned or is_of_capture(error):
                raise first_error from None
            turned.add(question)
            recorder.answers[question] = not recorder.answers[question]


def is_of_capture(error: BaseException) -> bool:
    """Whether an error comes from the capture, and not from the step."""
    frames = traceback.extract_tb(error.__traceback__)
    is_raised_here = bool(frames) and frames[-1].filename.startswith(LIBRARIES[1])
    if is_raised_here or isinstance(error, Refused | EndlessStep):
        return True
    return isinstance(error, Exception) and explain(error) is not None


def _read_generators() -> list[Any]:
    """States of the random generators of Python and NumPy, and of PyTorch."""
    _, numbers, place, _, _ = np.random.get_state()
    own = compute(lambda: torch.get_rng_state().numpy().tobytes())
    return [random.getstate(), (np.asarray(numbers).tobytes(), place), own]


def _run(recorder: Recorder, step: Step, trial: Trial = USUAL) -> tuple[Trail, bool]:
    """Call the step: what it did in brief, and whether drawn numbers may have decided it."""
    trail = recorder.follow(trial)
    trail.called = True
    before = _read_generators()
    step()
    if recorder.lost or trail.missed:
        raise Refused(recorder.lost or trail.missed)
    if recorder.values.is_shared_memory_changed():
        recorder.values.notes[SHARED_WITH_NUMPY] = None
    python, numpy, torch_own = before
    python_after, numpy_after, torch_after = _read_generators()
    others_drew = python != python_after or numpy != numpy_after
    return trail, others_drew or (torch_own != torch_after and trail.asked)


class _State(NamedTuple):
    """A random generator, and its state at some moment."""

    generator: Setting
    value: Any


def _read_states(recorder: Recorder) -> list[_State]:
    """States of all generators from which the step may draw: those of the process and its own."""
    generators = list_generators()
    for copy in recorder.values.list_copies():
        generators.append(Setting(copy.get_state, copy.set_state))
    return [_State(generator, compute(generator.read)) for generator in generators]


def _do_draws_decide(
    recorder: Recorder, step: Step, recorded: Trail, other: Trail, states: Sequence[_State]
) -> bool:
    """Whether a call that differs from the recorded one does so by the numbers that it draws, and not
    by its number: further calls that draw the same do the same. What runs for the first time may
    differ from later times."""
    further = []
    for _ in range(2):
        for state in states:
            compute(state.generator.write, state.value)
        further.append(_repeat(recorder, step))
    first, second = further
    if first is None or are_alike(other, first):
        return True
    return not are_alike(recorded, first) and are_alike(first, second)


def _repeat(recorder: Recorder, step: Step) -> Trail | None:
    """One more call, which is not recorded; None if the step cannot be called again."""
    try:
        return _run(recorder, step)[0]
    except (
        Exception,
        SystemExit,
    ):  # such as the end of the data; nothing is learned from this call
        return None


def _try(recorder: Recorder, step: Step, recorded: Trail, trial: Trial) -> Trail | None:
    """What the step does in a trial; None if it ends with an error of its own, such as that of a check
    of a loss that is too large.

    Raises
    ------
    Exception
        If the step needs a value, or does far more than in the recorded call.
    """
    longest = 2 * (len(recorded.operations) + len(recorded.updates)) + FEW_OPERATIONS
    try:
        return _run(recorder, step, trial._replace(longest=longest))[0]
    except SystemExit:  # a check that ends the program
        return None
    except Exception as error:
        if is_of_capture(error):
            raise
        # an item by a computed number, or else the end of the data
        by_number = isinstance(error, IndexError | KeyError) and trial.number != USUAL.number
        if by_number and _repeat(recorder, step) is not None:
            raise EndlessStep from error
        return None


def _does_decide(recorder: Recorder, step: Step, recorded: Trail, number: float) -> bool:
    """Whether the step does something else if the computed numbers that it reads are others."""
    try:
        trail = _try(recorder, step, recorded, Trial(number=number))
    except Exception:
        return True
    return not are_alike(recorded, trail)


def are_alike(one: Trail, other: Trail | None) -> bool:
    """Whether two calls did the same; a call that failed tells nothing."""
    if other is None:
        return True
    return one.operations == other.operations and one.updates == other.updates


def _list_without_numbers(trail: Trail) -> list[Any]:
    """Operations of the optimizers of a call, without those whose results are single numbers."""
    return [(name, shapes) for name, shapes in trail.updates if any(len(shape) for shape in shapes)]


def describe_difference(one: Trail, other: Trail) -> str:
    """In what two calls differ, as a part of a sentence."""
    if one.steps != other.steps:
        return f"optimizers update {one.steps} times in it, and {other.steps} times in a later one"
    first = len(one.operations) + len(one.updates)
    second = len(other.operations) + len(other.updates)
    if first != second:
        return f"it has {first} operations, and a later call {second}"
    return "a later call has other sizes"


def list_bounds(trail: Trail) -> list[float]:
    """The first few numbers that the step compares computed numbers with."""
    distinct = {bound: None for bound in trail.bounds if isfinite(bound)}
    return [*distinct][:MOST_BOUNDS]


def compare_calls(recorder: Recorder, step: Step, calls: Calls, *, rare_update: bool) -> list[str]:
    """Call the step again where its calls may differ, and say so if they do.

    The first call may differ without need, as caches and states of optimizers are made in it. So a
    difference counts only between later calls.

    Parameters
    ----------
    recorder : Recorder
        It follows the calls, and records none of them.
    step : callable
        The step.
    calls : Calls
        Its first two calls.
    rare_update : bool
        Whether the recorded call lacks an update, of which all is said already.

    Returns
    -------
    notes : list of str
        What is to be said.

    Raises
    ------
    ValueError
        If the step decides by a computed number that it reads, or by a question whose answer is not
        known.
    """
    first, recorded = calls.first, calls.recorded
    operations = len(recorded.operations) + len(recorded.updates)
    differs = first.operations != recorded.operations or first.steps != recorded.steps
    fewest = 1 if differs or operations <= FEW_OPERATIONS else 0
    budget = USUAL_OPERATIONS
    if calls.drawn:
        fewest, budget = 2, MOST_OPERATIONS
    difference: str | None = None
    for _ in range(min(MOST_CALLS, max(fewest, budget // max(operations, 1)))):
        states = _read_states(recorder)
        other = _repeat(recorder, step)
        if rare_update and other is not None and other.steps != recorded.steps:
            break
        if other is None or are_alike(recorded, other):
            continue
        if calls.drawn and _do_draws_decide(recorder, step, recorded, other, states):
            return [DRAWN]
        difference = describe_difference(recorded, other)
        if not calls.drawn:
            break
        # what a draw runs for the first time looks like work of this call alone: more calls tell
    if difference is not None:
        return [CALLS.format(difference)]
    if recorded.read:
        for number in _list_numbers(recorded, operations):
            if _does_decide(recorder, step, recorded, number):
                raise Refused(DECIDED.format(recorded.read))
    return [*_try_questions(recorder, step, recorded), *_try_better(recorder, step, recorded)]


def _list_numbers(recorded: Trail, operations: int) -> Sequence[float]:
    """What computed numbers count as in trials."""
    numbers = [*OTHER_NUMBERS]
    if operations > MOST_OPERATIONS and not recorded.bounds:
        return numbers[:1]
    for bound in list_bounds(recorded):
        step_aside = max(1e-6, 1e-6 * abs(bound))
        numbers += [bound - step_aside, bound, bound + step_aside]
    return numbers


def _try_questions(recorder: Recorder, step: Step, recorded: Trail) -> Iterator[str]:
    """Turn the answer of each question of the recorded call, except of checks that raise an error."""
    for question in recorded.questions:
        if question in recorder.checks:
            continue
        try:
            trail = _try(recorder, step, recorded, Trial(turned=question))
        except Exception as error:
            raise Refused(NEEDED.format(question.line)) from error
        if are_alike(recorded, trail) or trail is None:
            continue
        differs_outside = recorded.operations != trail.operations
        if differs_outside or _list_without_numbers(recorded) != _list_without_numbers(trail):
            raise Refused(NEEDED.format(question.line))
        yield SINGLE.format(question.line)


def _try_better(recorder: Recorder, step: Step, recorded: Trail) -> Iterator[str]:
    """Let a number be better than the best one so far."""
    if not recorded.kept:
        return
    try:
        trail = _try(recorder, step, recorded, Trial(better=True))
    except Exception as error:
        raise Refused(NEEDED.format(recorded.kept)) from error
    if not are_alike(recorded, trail):
        yield BETTER.format(recorded.kept)
