"""Recording of a training loop as it is written: an iteration is what lies between the ends of two
updates of its first optimizer."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from perfkit.ground.units import check_positive
from perfkit.recording.arguments import read_device
from perfkit.recording.comparisons import (
    FEW_OPERATIONS,
    MOST_OPERATIONS,
    OTHER_NUMBERS,
    are_alike,
    list_bounds,
)
from perfkit.recording.places import NEUTRAL, Gpu
from perfkit.recording.recorder import Recorder
from perfkit.recording.refusals import NEEDED
from perfkit.recording.sandbox import find_alive
from perfkit.recording.scripts_answers import answer_scripts
from perfkit.recording.steps import (
    EMPTY,
    check_rank,
    describe_dense_gradients,
    end_iteration,
    find_unused_optimizers,
    list_own_weights,
    open_capture,
)
from perfkit.recording.trails import USUAL, EndlessStep, Trail, Trial
from perfkit.workloads.graph import Graph
from perfkit.workloads.iterations import RecordedIteration, RecordedLoop, count_flops

#: Iterations that are compared unless the caller says otherwise [-].
USUAL_ITERATIONS = 4
#: Further iterations with other numbers in place of those that the loop reads, at most [-].
MOST_PROBES = 8
#: Backward passes without an update of the first optimizer, after which a recording ends [-]. A
#: choice: gradients of so many passes are not added up for one update.
MOST_PASSES = 1024
#: What is said of iterations that differ.
DIFFERENT = (
    "the iterations of the loop differ: {alike} of {count} that were recorded are like the graph; all have {operations} "
    "times its operations, and {work} times its FLOP; a mean over iterations needs the graph of each kind, which "
    "recording.iterations has with its count"
)
#: What is said of a loop of which iterations depend on computed numbers.
DECIDED = (
    "the loop decides by computed numbers, which a capture does not know, after it reads one in {}; the graph is the way "
    "that it takes if they are 1"
)
#: What is said besides of such a loop that reads computed numbers.
MAY_DECIDE = "; the loop may decide by computed numbers, which a capture does not know and counts as 1: it reads one in {}"
#: What is said of a loop that reads computed numbers and ends before it was tried whether they matter.
UNTRIED = (
    "the loop reads a computed number, in {}, and ended before it was tried whether it decides by it; the graph is the "
    "way that it takes if such numbers are 1; let the loop run longer"
)
#: What is said of a loop with one update.
ONE_UPDATE = (
    "the loop has one update; the graph is what lies between its first forward pass and the end of this update, in which "
    "the optimizer makes its states, and lacks what comes before, such as copies of the batch; let the loop run longer"
)
NO_OPTIMIZER = (
    "the loop ended without an update of an optimizer of PyTorch, and an iteration is what lies between two; record a "
    "loop that trains, or capture its step by pk.capture"
)
#: What is said of a loop that updates its weights by itself.
BY_HAND = (
    "the loop has no optimizer of PyTorch; an iteration is what lies between the ends of two backward passes, also if the "
    "gradients of several passes are added up for one update"
)
#: What is said of a loop whose iterations do not end.
STALLED = (
    "{optimizer} in {passes:,} backward passes, and its update ends an iteration; make only optimizers that train, or "
    "record the part of the loop in which this one does"
)
#: What is said of a loop for a GPU that names none.
NO_GPU = (
    "the loop puts nothing on a GPU, and all of it counts as run by one, without copies of batches to it; move model and "
    "batches, as by .to('cuda'), or record it with device='cpu'"
)
NO_COLLECTIVE = (
    "the iteration has no collective between its {} ranks; for data-parallel training wrap the model in "
    "torch.nn.parallel.DistributedDataParallel"
)


class LoopEnds(BaseException):
    """Enough iterations are recorded. It ends the loop, and passes ``except Exception``."""


class Recording(RecordedLoop):
    """Records the training loop that runs in its ``with`` block; see `record`.

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``.
    ranks, rank : int
        Number of ranks, and the rank that is recorded [-].
    iterations : int
        Iterations that are compared, at most [-].
    name : str
        Name of the graph.
    gpu : Gpu
        What the loop is told of its GPU.
    to_packages : bool
        Whether installed packages are told of the GPU, too, and not the code of the user alone.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        ranks: int = 1,
        rank: int = 0,
        iterations: int = USUAL_ITERATIONS,
        name: str = "loop",
        gpu: Gpu = NEUTRAL,
        to_packages: bool = False,
    ) -> None:
        super().__init__(name)
        self._ranks = int(check_positive("ranks", ranks, integer=True))
        self._wanted = int(check_positive("iterations", iterations, integer=True))
        self._rank = check_rank(rank, self._ranks)
        self._gpu = gpu
        self._to_packages = to_packages
        self._device = read_device(device)
        self._stack = ExitStack()
        self._recorder: Recorder | None = None
        self._first: Any = None  # the first optimizer that updates
        self._lone: Graph | None = None  # of what leads to the first update
        self._depth = 0  # how often its method `step` has called itself, as that of a derived class
        self._is_by_hand: bool | None = None  # whether the loop has no optimizer, once it is known
        self._updates = 0  # or backward passes of a loop without an optimizer
        self._passes = 0  # backward passes since the last end of an iteration
        self._refusal = ""  # why there is no iteration
        self._has_read = False  # whether the loop has read a computed number
        self._readings: tuple[str, ...] = ()  # what the loop has read of its GPU
        self._ended_early = False  # whether the loop ended before enough was recorded
        self._is_over = False  # whether enough is recorded
        self._trails: list[Trail] = []  # of each kind of iteration
        self._line = ""  # where the loop first reads a computed number
        self._trials: list[Trial] | None = None  # what probes try
        self._tried = 0  # probes that have begun
        self._operations = 0  # of all iterations together
        self._decides = False
        self._is_doubted = False  # whether the last probe differed, and is tried once more
        self._unused: list[str] = []  # what to say of optimizers that do not update
        self._counts: list[int] = []  # iterations of each kind
        self._graphs: list[Graph] = []  # of each kind

    @property
    def has_placeholders(self) -> bool:
        """Whether the loop has read computed numbers, such as a loss that it prints: they count as 1,
        and mean nothing."""
        return self._has_read

    @property
    def readings(self) -> tuple[str, ...]:
        """Names of what the loop has read of a GPU that is not there, such as ``elapsed_time`` or
        ``max_memory_allocated``: what it got means nothing."""
        return self._readings

    # -- the block

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise ValueError(f"{self.name} was recorded before; make another recording")
        recorder = Recorder(accelerator=self._device != "cpu")
        self._recorder = recorder
        recorder.at_end_of_backward = self._end_backward
        recorder.places.gpu = self._gpu
        recorder.places.tells_packages = self._to_packages
        with ExitStack() as stack:
            stack.enter_context(open_capture(recorder, self._ranks, self._rank))
            stack.enter_context(answer_scripts(recorder, self._ranks, self._rank))
            enter = register_module_forward_pre_hook(self._enter_module)
            stack.callback(enter.remove)
            stack.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_update).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> bool:
        recorder = self._recorder
        if recorder is None:
            return False
        recorder.on = False
        self._ended_early = error is None or isinstance(error, SystemExit)
        if self._is_expected(error):
            self._first = None
            self._stack.__exit__(None, None, None)
            self._finish(recorder)
            return True
        self._first = None
        self._stack.__exit__(kind, error, frames)
        return False

    def _is_expected(self, error: BaseException | None) -> bool:
        """Whether the loop has ended as it should: it was stopped, it was over, or it met a number
        that it checks and that another call has put there."""
        if error is None or isinstance(error, LoopEnds):
            return True
        if isinstance(error, EndlessStep):
            self._decides = True
            self._line = self._line or error.line
            if not self._updates:
                self._refusal = NEEDED.format(error.line)
            return True
        return self._tried > 0 and isinstance(error, Exception | SystemExit)

    # -- updates

    def _enter_module(self, *_: Any) -> None:
        """Begin to record at the first forward pass, in case that one update is all."""
        recorder = self._recorder
        if recorder is None:
            return
        # an evaluation may read numbers of any count of batches
        if len(recorder.modules) == 1 and not torch.is_grad_enabled():
            recorder.trail.asks = 0
        if self._updates or recorder.on or not torch.is_grad_enabled():
            return
        recorder.begin()

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._first is None:
            self._first = optimizer
        if optimizer is self._first:
            self._depth += 1

    def _end_update(self, optimizer: Optimizer, *_: Any) -> None:
        """End an iteration after an update of the first optimizer."""
        recorder = self._recorder
        if optimizer is not self._first or recorder is None:
            return
        self._depth -= 1
        if self._depth == 0:
            self._end_iteration(recorder)

    def _end_backward(self) -> None:
        """End an iteration of a loop without an optimizer after its backward pass. With one, count the
        passes, as it may never update."""
        recorder = self._recorder
        if recorder is None:
            return
        if self._first is None and self._is_by_hand is None:
            # optimizers of other loops may be alive, too
            of_loop = [each for each in find_alive(Optimizer) if list_own_weights(recorder, each)]
            self._is_by_hand = not of_loop
        if self._first is None and self._is_by_hand:
            self._end_iteration(recorder)
            return
        self._passes += 1
        if self._passes >= MOST_PASSES:
            if self._tried > 0:
                raise EndlessStep
            stall = self._describe_stall()
            self._refusal = STALLED.format(optimizer=stall, passes=MOST_PASSES)
            raise LoopEnds

    def _describe_stall(self) -> str:
        """Which optimizer does not update, as the beginning of a sentence."""
        if self._first is None:
            return "no optimizer of the loop has updated"
        return (
            f"{type(self._first).__name__}, the first optimizer that updated, did not do so again"
        )

    def _end_iteration(self, recorder: Recorder) -> None:
        """End an iteration, and begin the next one unless enough are recorded."""
        if recorder.lost:
            raise ValueError(recorder.lost)
        if self._is_over:  # a loop that goes on after all errors
            raise LoopEnds
        self._updates += 1
        self._passes = 0
        trail = recorder.trail
        self._has_read = self._has_read or trail.reads > 0
        if self._tried > 0:
            self._judge(trail)
        elif self._updates > 1:
            self._keep(recorder, trail)
        else:
            self._lone = end_iteration(recorder, self.name, "", self._ranks)
        recorder.follow(self._plan_next(trail))
        recorder.trail.called = True
        if self._tried == 0:
            recorder.begin()

    def _keep(self, recorder: Recorder, trail: Trail) -> None:
        """Keep an iteration, or count it if it is like one before."""
        lines = [trail.read, trail.kept, *(question.line for question in trail.questions)]
        self._line = self._line or next(filter(None, lines), "")
        self._operations += len(trail.operations) + len(trail.updates)
        for place, other in enumerate(self._trails):
            if are_alike(other, trail):
                self._counts[place] += 1
                other.bounds += trail.bounds
                break
        else:
            graph = end_iteration(recorder, self.name, "", self._ranks)
            if not self._graphs:
                self._unused = find_unused_optimizers(recorder)
            self._graphs.append(graph)
            self._trails.append(trail)
            self._counts.append(1)
        recorder.on = False

    def _plan_next(self, trail: Trail) -> Trial:
        """What the next iteration is: one more, a probe of other numbers, or none."""
        count = sum(self._counts)
        is_long = self._operations > MOST_OPERATIONS and count > 1
        if count < self._wanted and not is_long and self._trials is None:
            return USUAL
        if self._trials is None:
            usual = self._usual
            self._trials = self._list_trials(usual) if self._line and usual else []
        is_done = self._tried >= len(self._trials) and not self._is_doubted
        if is_done or self._decides:
            self._is_over = True
            raise LoopEnds
        if self._is_doubted:
            trial = self._trials[self._tried - 1]
        else:
            trial = self._trials[self._tried]
            self._tried += 1
        like = self._usual or trail
        longest = 2 * (len(like.operations) + len(like.updates)) + FEW_OPERATIONS
        return trial._replace(longest=longest)

    def _list_trials(self, recorded: Trail) -> list[Trial]:
        """What computed numbers count as in probes, and the questions that get another answer: if the
        iterations stay the same, nothing depends on them."""
        numbers = [*OTHER_NUMBERS[:2]] if recorded.reads else []
        for bound in list_bounds(recorded):
            step_aside = max(1e-6, 1e-6 * abs(bound))
            numbers += [bound + step_aside, bound - step_aside]
        if self._operations > MOST_OPERATIONS:
            numbers = numbers[:2]
        trials = [Trial(number=number) for number in numbers[:MOST_PROBES]]
        if recorded.kept:
            trials.append(Trial(better=True))
        # errors after the other answer would end the loop
        checks = self._recorder.checks if self._recorder is not None else set()
        return [*trials, *(Trial(turned=q) for q in recorded.questions if q not in checks)]

    def _judge(self, trail: Trail) -> None:
        """Compare an iteration with other numbers with the most frequent one. One like a kind that
        comes back without them, as where every second iteration logs, may have had its turn: the
        next one tells."""
        usual = self._usual
        if usual is None or are_alike(trail, usual):
            self._is_doubted = False
        elif self._comes_back(trail, usual) and not self._is_doubted:
            self._is_doubted = True
        else:
            self._decides = True

    def _comes_back(self, trail: Trail, usual: Trail) -> bool:
        """Whether an iteration is like a kind that was met several times, or after the usual one."""
        for place, other in enumerate(self._trails):
            if are_alike(trail, other):
                return self._counts[place] > 1 or place > self._trails.index(usual)
        return False

    @property
    def _usual(self) -> Trail | None:
        """The most frequent iteration; None if all differ, so that nothing follows from one more."""
        most = max(self._counts, default=0)
        if most < 2 and len(self._counts) > 1:
            return None
        return self._trails[self._counts.index(most)] if self._counts else None

    # -- the result

    def _finish(self, recorder: Recorder) -> None:
        """Make the iterations, with what is to be said of them."""
        if self._refusal:
            raise ValueError(self._refusal)
        if not self._updates:
            raise ValueError(NO_OPTIMIZER)
        self._has_read = self._has_read or recorder.trail.reads > 0
        self._readings = tuple(sorted(recorder.places.readings))
        notes = [*self._unused]
        if self._is_by_hand:
            notes.append(BY_HAND)
        if not self._graphs and self._lone is not None:
            self._graphs, self._counts = [self._lone], [1]
            notes.append(ONE_UPDATE)
        if self._decides:
            notes.append(DECIDED.format(self._line))
        elif self._is_untried():
            notes.append(UNTRIED.format(self._line))
        if not any(map(len, self._graphs)):
            notes.append(EMPTY)
        if recorder.accelerator and not recorder.places.gpus and not self._divides_weights():
            notes.append(NO_GPU)
        if self._ranks > 1 and not any(len(graph.collectives) for graph in self._graphs):
            notes.append(NO_COLLECTIVE.format(self._ranks))
        made = []
        later = dict.fromkeys(recorder.values.notes)
        for graph, count in zip(self._graphs, self._counts, strict=True):
            told = dict.fromkeys([*graph.notes, *later, *describe_dense_gradients(graph), *notes])
            made.append(RecordedIteration(replace(graph, notes=tuple(told)), count))
        self.iterations = tuple(made)
        if len(made) > 1:
            self._say_difference()
        for note in self.graph.notes:
            warnings.warn(note, stacklevel=3)

    def _is_untried(self) -> bool:
        """Whether the loop has ended by itself before all other numbers were tried in place of those
        that it reads. One whose iterations all differ has none to compare a further one with."""
        if not self._ended_early or not self._line or self._usual is None:
            return False
        trials = self._list_trials(self._usual) if self._trials is None else self._trials
        return self._tried < len(trials)

    def _divides_weights(self) -> bool:
        """Whether ranks gather weights, as fully_shard lets them; it moves weights and batches to the
        GPU."""
        names = {label.name for graph in self._graphs for label in graph.labels}
        return "all_gather" in names

    def _say_difference(self) -> None:
        """Add to the graphs how much the iterations differ."""
        chosen = self.graph
        alike = next(each.count for each in self.iterations if each.graph is chosen)
        graphs = [each.graph for each in self.iterations]
        text = DIFFERENT.format(
            alike=alike,
            count=self.count,
            operations=_describe_range([len(graph) for graph in graphs], len(chosen)),
            work=_describe_range(list(map(count_flops, graphs)), count_flops(chosen)),
        )
        if self._line and self._usual is None:
            text += MAY_DECIDE.format(self._line)
        self.iterations = tuple(
            RecordedIteration(replace(each.graph, notes=(*each.graph.notes, text)), each.count)
            for each in self.iterations
        )


def _describe_range(numbers: Sequence[float], own: float) -> str:
    """The least and the largest of some numbers as multiples of one of them."""
    least, most = min(numbers) / max(own, 1), max(numbers) / max(own, 1)
    return f"{least:.3g} to {most:.3g}"
