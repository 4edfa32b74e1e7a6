"""What one call of a step does, in brief, and what computed numbers and questions count as in it."""

from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Any, NamedTuple

from perfkit.recording.questions import Question
from perfkit.recording.refusals import find_line
from perfkit.workloads.vocabulary import walk_tensors

#: Times that one place may ask in a call: more is a loop up to an answer that never comes [-].
MOST_ASKED = 300
#: Computed numbers and answers that a call may ask for; more is such a loop, too [-].
MOST_READ = 10_000
_ORDER = count()


class EndlessStep(Exception):
    """A call of the step does far more than the recorded one, such as a loop up to a computed
    number, or asks the same question again and again.

    Parameters
    ----------
    line : str
        Where it does so; empty where this is not known.
    """

    def __init__(self, line: str = "") -> None:
        super().__init__(line)
        self.line = line


class Trial(NamedTuple):
    """What a call of a step tries: what is not known counts otherwise in it than in the recorded
    call, so that it shows whether anything depends on it.

    Parameters
    ----------
    number : float
        What a computed number counts as where the step reads it [-].
    turned : Question, optional
        The question that gets the other answer.
    better : bool
        Whether a number of this call is better than one of an earlier call, as the best one so far.
    longest : float
        Operations after which the call ends with `EndlessStep` [-].
    """

    number: float = 1.0
    turned: Question | None = None
    better: bool = False
    longest: float = inf


#: The recorded call, and calls that are like it.
USUAL = Trial()


class Trail:
    """What one call of the step does, in brief: enough to see whether two calls do the same.

    Parameters
    ----------
    trial : Trial
        What it tries.
    answers : dict, optional
        Usual answers to questions, which further calls share.
    """

    def __init__(self, trial: Trial = USUAL, answers: dict[Question, bool] | None = None) -> None:
        self.trial = trial
        self.answers: dict[Question, bool] = {} if answers is None else answers
        self.order = next(_ORDER)  # later trails have larger numbers
        self.updating = 0  # how many optimizers are at work now
        self.steps = 0  # calls of optimizers
        self.operations: list[Any] = []  # names and shapes outside of optimizers
        self.updates: list[Any] = []  # the same inside of optimizers
        self.called = False  # whether a call of the step has begun
        self.read = ""  # line where the step first reads a computed number
        self.reads = 0  # how many computed numbers it has read
        self.asks = 0  # how often it has asked for anything computed
        self.bounds: list[float] = []  # what it compares computed numbers with
        self.asked = False  # whether the step asked for a known number
        self.missed = ""  # what it asked for that is not known; it may catch the error, and go on
        self.first_storage = 0  # storages with smaller numbers are of earlier calls
        #: How often each place asks whether something computed is true, in the order of asking.
        self.questions: dict[Question, int] = {}
        self.last_question: Question | None = None
        self.kept = ""  # line where a number of this call is compared with one of an earlier call

    def count_ask(self) -> None:
        """Count that the step asks for something computed: a loop up to such a number has no end."""
        self.asks += 1
        if self.asks > MOST_READ:
            raise EndlessStep(find_line())

    def count_read(self) -> float:
        """What a computed number counts as that the step reads now: in a further call no two are
        equal, so that the largest of several is not always the first."""
        self.reads += 1
        number = self.trial.number
        return number if number == 1.0 else number * (1 + self.reads / 1024)

    def answer(self, question: Question) -> bool:
        """The answer to a question of the step, which has a usual one."""
        self.questions[question] = self.questions.get(question, 0) + 1
        self.last_question = question
        if self.questions[question] > MOST_ASKED:
            raise EndlessStep(question.line)
        usual = self.answers[question]
        return not usual if question == self.trial.turned else usual

    def keep_better(self, line: str) -> bool:
        """Whether a number of this call is better than one of an earlier call."""
        self.kept = self.kept or line
        return self.trial.better

    def append(self, name: str, given: Sequence[Any], out: Any) -> None:
        """Note an operation with the tensors that it is given and its results: a sum has one number,
        however many it adds up."""
        shapes = tuple(tensor.shape for tensor in (*given, *walk_tensors(out)))
        operations = self.updates if self.updating else self.operations
        operations.append((name, shapes))
        if len(operations) > self.trial.longest:
            raise EndlessStep
