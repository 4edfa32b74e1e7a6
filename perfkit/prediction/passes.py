"""An iteration of a pipeline, pass by pass: when each pass of each stage begins and ends."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from perfkit.models.partitions import find_schedules, list_steps
from perfkit.models.v_schedules import Step, find_place, find_position

#: Groups of micro-batches, one for each stage, that are run of many; the rest repeats the last of
#: them. For 200 random pipelines whose chunks differ by 10 %, and 200 by a factor of three, the time
#: differs from that of all micro-batches by 0.01 % in mean and 1 % at most (4.1 % with four groups)
#: [-]. Schedules that run more than one pass ahead for each stage behind need as many more: with two,
#: eight groups of 50 random pipelines were up to 4.6 % off, and sixteen 1.2 %.
GROUPS_RUN = 8


class Activity(NamedTuple):
    """What takes time in a pipeline.

    Parameters
    ----------
    kind : str
        A pass: ``forward``, ``backward``, ``weights``, or ``whole``, a backward pass with its gradients
        of weights. Between stages: ``latency`` of a message, and the ``message`` itself. Weights of a
        chunk that are ``gathered``. Messages of gradients that the next pass of the stage waits for:
        ``reduction`` behind a pass, and ``whole_reduction`` behind a whole one. Those that no pass
        waits for: ``tail`` behind the last pass of a chunk, ``queue`` behind the messages of the chunk
        before, and ``landed``, when both have ended. ``lead`` of a stage before its first pass.
    stage, chunk : int
        Where it runs, from 0; a message and its latency are of the border behind stage `stage` [-].
    first, last : bool
        Whether it belongs to the first and to the last micro-batch.
    """

    kind: str
    stage: int
    chunk: int
    first: bool = False
    last: bool = False


class Pipeline(NamedTuple):
    """Passes of an iteration and what each waits for, in an order in which they can be run.

    Parameters
    ----------
    activities : tuple of Activity
        Those that differ.
    events : tuple of tuple of int
        For each event the numbers of three events that come before it, and of its activity. Event
        0 is the begin of the iteration.
    begins, ends : tuple of tuple of int
        By stage: the numbers of the events before its first pass, and of the last events.
    """

    activities: tuple[Activity, ...]
    events: tuple[tuple[int, int, int, int], ...]
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    def run(self, durations: Sequence[float]) -> float:
        """Time of an iteration [s].

        Parameters
        ----------
        durations : sequence of float
            Time of each of `activities` [s].

        Returns
        -------
        time : float
            Longest time of a stage from the begin of its first pass to the end of its last
            activity, after which it begins the next iteration [s].
        """
        ends = [0.0]
        for one, other, third, activity in self.events:
            ends.append(max(ends[one], ends[other], ends[third]) + durations[activity])
        times = []
        for before, last in zip(self.begins, self.ends, strict=True):
            begin = max(ends[event] for event in before)
            end = max(ends[event] for event in last)
            times.append(end - begin)
        return max(times)


class _Stage:
    """A stage while its pipeline is built: its passes, and the last events on it."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.passes = [step for step in steps if step.phase != "weights"]
        #: Steps and passes that are built [-].
        self.built_steps = self.built_passes = 0
        #: Events after which the stage goes on: the last one, and before each pass, the last one
        #: then.
        self.last = 0
        self.before_pass: list[int] = []
        #: Events in which each pass ends.
        self.pass_ends: list[int] = []
        #: Events after which the stage is ready for the next message.
        self.landings: list[int] = []
        #: Event in which the messages of its gradients that no pass waits for have landed.
        self.landed = 0

    def find_last_of_pair(self, number: int) -> int:
        """The pass with whose end a pass sends: itself, or the other one of its pair."""
        return number + 1 if self.passes[number].in_pair else number

    def find_first_of_pair(self, number: int) -> int:
        """The pass with whose begin a pass begins: itself, or the other one of its pair."""
        if number > 0 and self.passes[number - 1].in_pair:
            return number - 1
        return number

    @property
    def is_built(self) -> bool:
        """Whether all of its steps are built."""
        return self.built_steps == len(self.steps)


class _Builder:
    """Builds a `Pipeline`."""

    def __init__(self, shape: "PipelineShape") -> None:
        self.schedule = schedule = find_schedules(shape.schedule)
        self.stages, self.chunks = shape.stages, shape.chunks
        self.micro_batches, self.scattered = shape.micro_batches, shape.scattered
        #: Whether messages are received beside the pass before, and no stage waits for what it
        #: sends.
        self.ahead = schedule.takes_messages_ahead(shape.chunks)
        self.put_off = schedule.puts_off_weights
        self.activities: dict[Activity, int] = {}
        self.events: list[tuple[int, int, int, int]] = []
        self.progress = [
            _Stage(
                list_steps(
                    shape.schedule,
                    stage,
                    stages=shape.stages,
                    micro_batches=shape.micro_batches,
                    chunks=shape.chunks,
                )
            )
            for stage in range(shape.stages)
        ]
        #: Where each pass stands among those of its stage.
        self.numbers = [
            {step.key: number for number, step in enumerate(stage.passes)}
            for stage in self.progress
        ]
        #: Messages by the stage and the pass that send them; the last one of each border and way, of
        #: stages in a V also by chunk.
        self.messages: dict[tuple[int, Step], int] = {}
        self.last_messages: dict[tuple[int, str, int], int] = {}
        self.begins: list[tuple[int, ...]] = [(0,)] * shape.stages

    def add(self, activity: Activity, one: int = 0, other: int = 0, third: int = 0) -> int:
        """Add an event behind up to three others, by default behind the begin of the iteration;
        return its number."""
        number = self.activities.setdefault(activity, len(self.activities))
        self.events.append((one, other, third, number))
        return len(self.events)

    def find_position(self, stage: int, chunk: int) -> int:
        """Where a chunk of a stage is on the way of a forward pass, from 0."""
        is_v_shaped = bool(self.schedule.is_v_shaped)
        return int(find_position(stage, chunk, self.stages, is_v_shaped=is_v_shaped))

    def find_neighbour(self, stage: int, step: Step, *, forth: bool) -> tuple[int, Step] | None:
        """The pass that takes what a pass gives (`forth`), or gives what it takes, with its stage."""
        way = 1 if (step.phase == "forward") == forth else -1
        position = self.find_position(stage, step.chunk) + way
        if not 0 <= position < self.stages * self.chunks:
            return None
        place = find_place(position, self.stages, is_v_shaped=bool(self.schedule.is_v_shaped))
        return place.stage, step.key._replace(chunk=place.chunk)

    def find_message(self, stage: int, step: Step) -> int | None:
        """The event in which the message of a pass arrives; 0 if it sends none, None if something
        before it is not built yet."""
        taker = self.find_neighbour(stage, step, forth=True)
        # the last stage of a V hands micro-batches to itself
        if taker is None or taker[0] == stage:
            return 0
        sent_by = (stage, step.key)
        if sent_by in self.messages:
            return self.messages[sent_by]
        sender = self.progress[stage]
        last_of_pair = sender.find_last_of_pair(self.numbers[stage][step.key])
        if last_of_pair >= sender.built_passes:
            return None
        to_stage, to_step = taker
        ready = self.find_ready(to_stage, to_step)
        if ready is None:
            return None
        border = self.find_border(stage, to_stage, step)
        way_chunk = 0
        if self.schedule.is_v_shaped:
            way_chunk = step.chunk
        way = (border, step.phase, way_chunk)
        message_before = self.last_messages.get(way, 0)
        sent = self.add(Activity("latency", border, 0), sender.pass_ends[last_of_pair])
        event = self.add(Activity("message", border, 0), sent, ready, message_before)
        self.messages[sent_by] = self.last_messages[way] = event
        return event

    def find_ready(self, stage: int, step: Step) -> int | None:
        """The event after which a stage is ready for the message that a pass waits for; None if it is
        not built yet."""
        receiver = self.progress[stage]
        number = self.numbers[stage][step]
        if self.ahead:
            before = receiver.find_first_of_pair(number) - 1
            events = receiver.before_pass
        else:
            before = number - 1
            events = receiver.landings
        if before < 0:
            return 0
        if before >= len(events):
            return None
        return events[before]

    def find_message_to(self, stage: int, step: Step) -> int | None:
        """The event in which the message that a pass waits for arrives, see `find_message`."""
        giver = self.find_neighbour(stage, step, forth=False)
        # the last stage of a V hands micro-batches to itself
        if giver is None or giver[0] == stage:
            return 0
        return self.find_message(*giver)

    def find_border(self, stage: int, to_stage: int, step: Step) -> int:
        """The border that a message crosses, by the stage before it; the last one is that from the last
        stage to the first one."""
        if self.schedule.is_v_shaped:
            return min(stage, to_stage)
        return stage if step.phase == "forward" else to_stage

    def build_step(self, stage: int) -> bool:
        """Build the next step of a stage, if all before it is built; say whether it was."""
        progress = self.progress[stage]
        step = progress.steps[progress.built_steps]
        if step.phase == "weights":
            self.build_weight_gradients(stage, step)
        elif not self.build_pass(stage, step):
            return False
        progress.built_steps += 1
        return True

    def name_activity(self, stage: int, step: Step) -> Activity:
        """The activity of a step of a stage."""
        is_first, is_last = step.micro == 0, step.micro == self.micro_batches - 1
        kind = "whole" if step.whole else step.phase
        return Activity(kind, stage, step.chunk, is_first, is_last)

    def build_weight_gradients(self, stage: int, step: Step) -> None:
        """Build a step of weight gradients that were put off."""
        progress = self.progress[stage]
        activity = self.name_activity(stage, step)
        progress.last = self.add(activity, progress.last)
        if not activity.last or self.scattered:
            return
        if self.schedule.is_v_shaped:
            self.end_reductions(stage, step.chunk, progress.last)
        else:
            progress.landed = self.add(Activity("tail", stage, step.chunk), progress.last)

    def build_pass(self, stage: int, step: Step) -> bool:
        """Build a pass and what its gradients are reduced by, if all before it is built; say whether
        it was."""
        progress = self.progress[stage]
        activity = self.name_activity(stage, step)
        number = progress.built_passes
        first_of_pair = progress.find_first_of_pair(number)
        if len(progress.before_pass) == number and first_of_pair < number:
            progress.before_pass.append(progress.before_pass[first_of_pair])
        elif len(progress.before_pass) == number:
            progress.before_pass.append(progress.last)
        received = self.find_message_to(stage, step)
        sent: int | None = 0
        if number and not self.ahead:
            sent = self.find_message(stage, progress.passes[number - 1])
        if step.in_pair:
            sent = self.find_message_to(stage, progress.passes[number + 1])
        if received is None or sent is None:
            return False
        if number == 0:
            self.begins[stage] = (progress.last, received)
        # stages with chunks wait for nothing that they send
        if activity.first and step.phase == "forward" and step.chunk > 0:
            gathered = self.add(Activity("gathered", stage, step.chunk))
            received = self.add(Activity("landed", stage, 0), received, gathered)
        end = self.add(activity, progress.last, received, sent)
        progress.pass_ends.append(end)
        progress.last = end
        if step.phase == "backward":
            self.reduce_gradients(activity, end)
        progress.landings.append(progress.last)
        progress.built_passes += 1
        return True

    def reduce_gradients(self, activity: Activity, end: int) -> None:
        """Reduce the gradients of a backward pass behind its `end`."""
        stage, chunk = activity.stage, activity.chunk
        progress = self.progress[stage]
        puts_off = self.put_off and activity.kind != "whole"
        if self.scattered and puts_off and activity.last:
            # weight gradients that were put off hide it
            reduced = self.add(Activity("reduction", stage, chunk), end)
            progress.landed = self.add(Activity("landed", stage, 0), reduced, progress.landed)
        elif self.scattered:
            kind = "whole_reduction" if activity.kind == "whole" else "reduction"
            progress.last = self.add(Activity(kind, stage, chunk), end)
        elif activity.last and not puts_off:
            self.end_reductions(stage, chunk, end)

    def end_reductions(self, stage: int, chunk: int, end: int) -> None:
        """Reduce the gradients of a chunk once, behind its last gradients of weights and the messages of
        the chunk before."""
        progress = self.progress[stage]
        tail = self.add(Activity("tail", stage, chunk), end)
        queue = self.add(Activity("queue", stage, chunk), progress.landed)
        progress.landed = self.add(Activity("landed", stage, 0), tail, queue)

    def build(self) -> Pipeline:
        """Build all steps of all stages."""
        waiting = list(range(self.stages))
        while waiting:
            moved = False
            for stage in waiting:
                while not self.progress[stage].is_built and self.build_step(stage):
                    moved = True
            waiting = [stage for stage in waiting if not self.progress[stage].is_built]
            if waiting and not moved:
                raise ValueError(f"stages {waiting} wait for one another; give another schedule")
        ends = []
        for number, progress in enumerate(self.progress):
            last = self.add(Activity("landed", number, 0), progress.last, progress.landed)
            if number > 0:
                last = self.add(Activity("lead", number, 0), last)
            ends.append((last,))
        return Pipeline(tuple(self.activities), tuple(self.events), tuple(self.begins), tuple(ends))


class PipelineShape(NamedTuple):
    """What says which passes a pipeline runs, and in which order.

    Parameters
    ----------
    schedule : str
        Name of the schedule in `perfkit.models.partitions.SCHEDULES`.
    stages, micro_batches, chunks : int
        Stages, micro-batches of an iteration, and chunks of layers of each stage [-].
    scattered : bool
        Whether gradients are reduced with each micro-batch.
    """

    schedule: str
    stages: int
    micro_batches: int
    chunks: int
    scattered: bool


@lru_cache(maxsize=256)
def build_pipeline(shape: PipelineShape) -> Pipeline:
    """Build the passes of an iteration.

    Parameters
    ----------
    shape : PipelineShape
        Which passes, and in which order.

    Returns
    -------
    pipeline : Pipeline
        What each waits for: the pass before it on its stage, and the message of the stage before
        it. If the schedule does not take messages ahead, also what its stage has sent, which the
        next stage takes when its last pass has ended. A message waits for its latency, until the
        next stage is ready, and for the message before it on its border, all at once.
    """
    return _Builder(shape).build()


class ChunkTimes(NamedTuple):
    """Times of a chunk of layers, of one strategy or of many [s].

    Parameters
    ----------
    forward, backward, weights : float or array
        Its passes: forward, backward, and of weight gradients that were put off.
    reduction : float or array
        Messages of gradients behind a backward pass that the stage waits for.
    first_gather, later_gather : float or array
        What gathers of weights add to the forward pass of the first micro-batch, if they are gathered
        once: with the chunk that begins the iteration, and with any other.
    lead : float or array
        How long a stage, but for the first one, gathers weights before its first pass could begin.
    gathered : float or array
        When the weights of a chunk, but for the first one of its stage, are there, so that its first
        forward pass may begin, from the begin of the iteration.
    regather : float or array
        What gathers of weights add to the backward pass of the first micro-batch, if they are
        gathered once.
    last_reduction : float or array
        What reductions of gradients add to the backward pass of the last micro-batch, if they are
        reduced once.
    tail, queue : float or array
        What is left of these messages behind that pass, or behind weight gradients that were put
        off; and all of them, one after another.
    whole, whole_reduction : float or array
        A backward pass with its gradients of weights, where the schedule puts off those of others, and
        messages of gradients behind it that the stage waits for.
    """

    forward: Any
    backward: Any
    weights: Any
    reduction: Any
    first_gather: Any
    later_gather: Any
    lead: Any
    gathered: Any
    regather: Any
    last_reduction: Any
    tail: Any
    queue: Any
    whole: Any = 0.0
    whole_reduction: Any = 0.0


class PipelineTimes(NamedTuple):
    """Times of one pipeline, or of many.

    Parameters
    ----------
    chunks : sequence of ChunkTimes
        Chunks in the order of a forward pass, with a number or an array for each time.
    stages : int
        Stages [-].
    messages : sequence of float or array
        For how long a message from each stage to the next one keeps the border, from the last stage
        to the first one, too [s].
    latencies : sequence of float or array, or None
        How long a message is on its way before, while others may keep the border; None if none
        is [s].
    is_v_shaped : bool
        Whether stages have two chunks in a V.
    """

    chunks: Sequence[ChunkTimes]
    stages: int
    messages: Sequence[Any]
    latencies: Sequence[Any] | None = None
    is_v_shaped: bool = False

    def find(self, activity: Activity) -> float:
        """Time of an activity of one pipeline [s]."""
        position = find_position(
            activity.stage, activity.chunk, self.stages, is_v_shaped=self.is_v_shaped
        )
        chunk = self.chunks[int(position)]
        if activity.kind == "latency":
            return 0.0 if self.latencies is None else float(self.latencies[activity.stage])
        if activity.kind == "message":
            return float(self.messages[activity.stage])
        if activity.kind == "forward":
            time = float(chunk.forward)
            begins_iteration = activity.stage == 0 and activity.chunk == 0
            if activity.first and begins_iteration:
                time += chunk.first_gather
            if activity.first and not begins_iteration:
                time += chunk.later_gather
            return time
        if activity.kind in ("backward", "whole"):
            time = float(chunk.whole if activity.kind == "whole" else chunk.backward)
            if activity.first:
                time += chunk.regather
            if activity.last:
                time += chunk.last_reduction
            return time
        times = {
            "weights": chunk.weights,
            "lead": chunk.lead,
            "gathered": chunk.gathered,
            "reduction": chunk.reduction,
            "whole_reduction": chunk.whole_reduction,
            "tail": chunk.tail,
            "queue": chunk.queue,
            "landed": 0.0,
        }
        return float(times[activity.kind])


def run_iteration(shape: PipelineShape, times: PipelineTimes) -> float:
    """Run an iteration of a pipeline.

    Parameters
    ----------
    shape : PipelineShape
        Its passes and their order.
    times : PipelineTimes
        How long each takes.

    Returns
    -------
    time : float
        From the begin of an iteration to the next one, without the update [s].

    Notes
    -----
    Once the pipeline is full, it repeats itself with every group of p micro-batches. Of many
    micro-batches only `GROUPS_RUN` groups are run (more for schedules that run further ahead), and
    one less; their difference is the time of a group.

    Examples
    --------
    Four even stages of 1 and 2 s take (8 + 3) 3 s:

    >>> chunk = ChunkTimes(1.0, 2.0, *[0.0] * 10)
    >>> times = PipelineTimes([chunk] * 4, 4, [0.0] * 4)
    >>> run_iteration(PipelineShape("1f1b", 4, 8, 1, False), times)
    33.0
    """

    def run(micro_batches: int) -> float:
        pipeline = build_pipeline(shape._replace(micro_batches=micro_batches))
        return pipeline.run([times.find(activity) for activity in pipeline.activities])

    run_fully = shorten(shape)
    if run_fully.groups_left_out == 0:
        return run(shape.micro_batches)
    longer = run(run_fully.micro_batches)
    shorter = run(run_fully.micro_batches - shape.stages)
    return longer + run_fully.groups_left_out * (longer - shorter)


class Shortened(NamedTuple):
    """How many of the micro-batches of an iteration are run.

    Parameters
    ----------
    micro_batches : int
        Micro-batches that are run [-].
    groups_left_out : int
        Groups of as many micro-batches as there are stages that are not; they repeat the last group
        that is run [-].
    """

    micro_batches: int
    groups_left_out: int


def shorten(shape: PipelineShape) -> Shortened:
    """Find how many of the micro-batches of an iteration have to be run.

    Parameters
    ----------
    shape : PipelineShape
        Passes of all of them.

    Returns
    -------
    shortened : Shortened
        Those that are run: as many more than whole groups as there are.
    """
    groups_run = GROUPS_RUN
    schedule = find_schedules(shape.schedule)
    if schedule.alternates:
        groups_run *= max(schedule.passes_ahead, 1)
    left_out = (shape.micro_batches - groups_run * shape.stages) // shape.stages
    if left_out < 2:
        return Shortened(shape.micro_batches, 0)
    return Shortened(shape.micro_batches - left_out * shape.stages, left_out)
