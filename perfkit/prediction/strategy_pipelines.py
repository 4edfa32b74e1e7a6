"""Pipelines of strategies in closed form: stages, the messages between them, and the bubble."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.prediction.micro_batches import PassWork
from perfkit.prediction.strategy_case import Case
from perfkit.prediction.strategy_hosts import join_exchanges, join_passes
from perfkit.prediction.strategy_passes import MicroBatchParts, Passes, time_stage
from perfkit.prediction.strategy_records import Work


class Borders(NamedTuple):
    """Messages of a micro-batch between stages, forth and back.

    Parameters
    ----------
    all : array
        Over all borders, one after another [s].
    end : array
        Over the border of the first or the last stage [s].
    inside : array
        Over the slowest border inside a region [s].
    both_sides : array
        Forth over the one border and back over the other border of a stage between the ends [s].
    far : array
        Over a border between two regions; 0 if stages are in one region [s].
    across, local : array
        Over a border between nodes, and in a node [s].
    """

    all: Array
    end: Array
    inside: Array
    both_sides: Array
    far: Array
    across: Array
    local: Array


class Stage(NamedTuple):
    """A stage.

    Parameters
    ----------
    position, layers : array
        Its position from 0, and its layers [-].
    forward, backward : array
        Passes of a micro-batch, with their host [s].
    weight_gradients : array
        What the schedule puts off of the backward pass, with its host [s].
    forward_message, backward_message : array
        Messages of other stages that it waits for before each pass [s].
    forward_host, backward_host, weight_gradients_host : array
        What the host adds to each of them [s].
    first_host, last_host : array
        What it adds to the first forward and to the last backward pass of one chunk, with messages
        of replicas that are sent once [s].
    landing : array
        What the stage waits for messages of replicas after each backward pass [s].
    """

    position: Array
    layers: Array
    forward: Array
    backward: Array
    weight_gradients: Array
    forward_message: Array
    backward_message: Array
    forward_host: Array
    backward_host: Array
    weight_gradients_host: Array
    first_host: Array
    last_host: Array
    landing: Array

    @property
    def both_passes(self) -> Array:
        """Forward and backward pass [s]."""
        return self.forward + self.backward


class Stages(NamedTuple):
    """Stages of a pipeline.

    Parameters
    ----------
    first, inner, last : Stage
        The first stage, the last one of the largest between (without layers, if there is none), and
        the last one.
    """

    first: Stage
    inner: Stage
    last: Stage


class BothPasses(NamedTuple):
    """Passes of a micro-batch on one stage.

    Parameters
    ----------
    forward, backward : array
        Time of each [s].
    """

    forward: Array
    backward: Array


class Busy(NamedTuple):
    """A micro-batch on one stage, which waits for no other stage.

    Parameters
    ----------
    slowest, inner : array
        On the slowest stage, and on one between the ends [s].
    """

    slowest: Array
    inner: Array


class Pipeline(NamedTuple):
    """Iterations of pipelines without messages of replicas.

    Parameters
    ----------
    stages : Stages
        Stages.
    borders : Borders
        Messages between them.
    host : array
        What the host adds to a micro-batch on the slowest stage [s].
    stage_messages : array
        Exposed messages between stages, of a micro-batch [s].
    region_messages : array
        By how much messages between regions make a micro-batch longer; they are part of
        `stage_messages` [s].
    all_stages : array
        A micro-batch on all stages, one after another, with messages [s].
    pass_by_pass : array
        All micro-batches, where passes are added up one after another (`Case.is_timed_by_passes`)
        [s].
    bubble : array
        Time in which the slowest stage waits for others [s].
    """

    stages: Stages
    borders: Borders
    host: Array
    stage_messages: Array
    region_messages: Array
    all_stages: Array
    pass_by_pass: Array
    bubble: Array


def time_pipeline(case: Case, parts: MicroBatchParts) -> Pipeline:
    """Time iterations of pipelines.

    Parameters
    ----------
    case : Case
        Strategies.
    parts : MicroBatchParts
        One micro-batch.

    Returns
    -------
    pipeline : Pipeline
        Times without messages of replicas.
    """
    borders = price_borders(case)
    stages = list_stages(case, parts, borders)
    host = host_time(case, parts, stages)
    inner = _time_inner_stage(case, parts)
    busy = Busy(
        slowest=time_slowest_device(case, parts) + host,
        inner=inner.forward + inner.backward + parts.hosts.inner,
    )
    near = _wait_for_neighbours(case, borders, inner, busy)
    far = _wait_for_regions(case, borders.far, near, inner, busy.slowest + near - busy.inner)
    all_stages = _time_all_stages(case, parts, stages, borders)
    pass_by_pass = _time_pass_by_pass(case, stages, borders, all_stages, far)
    waits = pass_by_pass - case.micro * (busy.slowest + near + far)
    chunked = pipeline_bubble(case, parts.passes, borders, busy, near, all_stages)
    # messages that weight gradients hide, where these are put off
    hidden = np.where(case.is_timed_by_passes, np.maximum(-waits, 0.0) / case.micro, 0.0)
    return Pipeline(
        stages=stages,
        borders=borders,
        host=host,
        stage_messages=np.maximum(near + far - hidden, 0.0),
        region_messages=far,
        all_stages=all_stages,
        pass_by_pass=pass_by_pass,
        bubble=np.where(case.is_timed_by_passes, np.maximum(waits, 0.0), chunked),
    )


def price_borders(case: Case) -> Borders:
    """Price the messages between stages.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    borders : Borders
        Of one micro-batch.

    Notes
    -----
    Stages are neighbours: with several stages in a node, only some borders are between nodes.
    """
    s, network = case.s, case.platform.network
    ranks_of_stage = s.ranks // s.pp
    node, region = network.ranks_per_node, network.ranks // network.regions
    two = np.minimum(s.pp, 2)

    def price(count: Array, stride: Array) -> Array:
        return 2.0 * case.messages.time("send_recv", case.sizes.between, count, stride)

    has_nodes = np.minimum(s.ranks, region) > node
    across = price(two, np.where(has_nodes, np.maximum(ranks_of_stage, node), ranks_of_stage))
    local = price(two, ranks_of_stage)
    far = price(np.minimum(case.regions, 2), np.maximum(ranks_of_stage, region))
    # each stage is a region of its own
    separate = (case.regions > 1) & (ranks_of_stage >= region)
    across, local = np.where(separate, 0.0, across), np.where(separate, 0.0, local)
    inside_regions = s.pp - case.regions
    nodes = -(-s.ranks // node)
    fills_node = 2 * ranks_of_stage > node
    between_nodes = np.minimum(nodes - case.regions, inside_regions)
    between_nodes = np.maximum(np.where(fills_node, inside_regions, between_nodes), 0)
    inside = np.where(between_nodes > 0, across, local)
    near = across * between_nodes + local * (inside_regions - between_nodes)
    return Borders(
        all=near + far * (case.regions - 1),
        end=np.where(fills_node, across, local),
        inside=inside,
        # of several stages in a node, each has a neighbour in it
        both_sides=np.where(fills_node, inside, (inside + local) / 2.0),
        far=far,
        across=across,
        local=local,
    )


def list_stages(case: Case, parts: MicroBatchParts, borders: Borders) -> Stages:
    """Time the stages at the ends and the largest one between.

    Parameters
    ----------
    case : Case
        Strategies.
    parts : MicroBatchParts
        One micro-batch.
    borders : Borders
        Messages between stages.

    Returns
    -------
    stages : Stages
        With their hosts.
    """
    none = np.zeros(case.count)
    first = _make_stage(case, parts, case.stage_layers.first, has_embeddings=True)
    inner_layers = np.where(case.s.pp > 2, case.stage_layers.inner, 0)
    inner = _make_stage(case, parts, inner_layers)
    last = _make_stage(case, parts, case.stage_layers.last, has_head=True)
    return Stages(
        first=first._replace(
            position=none, forward_message=none, backward_message=borders.end / 2.0
        ),
        inner=inner._replace(
            position=_find_last_of_largest(case),
            forward_message=borders.both_sides / 2.0,
            backward_message=borders.both_sides / 2.0,
        ),
        last=last._replace(
            position=case.s.pp - 1.0, forward_message=borders.end / 2.0, backward_message=none
        ),
    )


def _find_last_of_largest(case: Case) -> Array:
    """Position of the last one of the largest stages between the ends; those with one layer more
    come first [-]."""
    s = case.s
    stated = np.where(s.first_layers > 0, 1, 0) + np.where(s.last_layers > 0, 1, 0)
    rest = case.all_layers - s.first_layers - s.last_layers
    longer = rest % np.maximum(s.pp - stated, 1)
    last_longer = np.where(s.first_layers > 0, longer, longer - 1)
    position = np.where(last_longer > 0, last_longer, s.pp - 2)
    return np.asarray(np.clip(position, 1, np.maximum(s.pp - 2, 1)))


def _make_stage(
    case: Case,
    parts: MicroBatchParts,
    layers: Array,
    *,
    has_embeddings: bool = False,
    has_head: bool = False,
) -> Stage:
    """A stage with its host, without a position and messages.

    Notes
    -----
    Weight gradients that are put off are launched with the next forward pass, for which their host
    counts; behind the last backward pass the host waits for nothing, and only their kernels count.
    """
    none = np.zeros(case.count)
    work = time_stage(case, parts.passes, layers, has_embeddings=has_embeddings, has_head=has_head)
    gradients = Work(none, none)
    gradients_host = none
    if np.any(case.schedule.puts_off_weights):
        gradients = find_put_off(case, layers)
        gradients_host = _join_put_off(case, work.forward, gradients, parts.exchange)
        work = PassWork(
            forward=work.forward,
            backward=Work(
                work.backward.device - gradients.device, work.backward.host - gradients.host
            ),
        )
    forward_host, backward_host = join_passes(case, work, parts.exchange)
    end_weights = None
    if has_embeddings:
        end_weights = case.times.embeddings.weights
    elif has_head:
        end_weights = case.times.head.weights
    hosts = join_exchanges(case, work, layers, layers / case.s.chunks, end_weights)
    exists = layers > 0
    put_off = np.where(exists, gradients.device + gradients_host, 0.0)
    forward = work.forward.device + forward_host
    backward = work.backward.device + backward_host + put_off
    return Stage(
        position=none,
        layers=layers,
        forward=np.where(exists, forward, 0.0),
        backward=np.where(exists, backward, 0.0),
        weight_gradients=put_off,
        forward_message=none,
        backward_message=none,
        forward_host=forward_host,
        backward_host=backward_host,
        weight_gradients_host=np.where(exists, gradients_host, 0.0),
        first_host=hosts.first,
        last_host=hosts.last,
        landing=none,
    )


def find_put_off(case: Case, layers: Array) -> Work:
    """Find the weight gradients that the schedule puts off.

    Parameters
    ----------
    case : Case
        Strategies.
    layers : array
        Layers whose weights they are [-].

    Returns
    -------
    gradients : Work
        Their kernels and calls; none where nothing is put off [s].
    """
    gradients = case.times.weight_gradients
    return Work(
        np.where(case.schedule.puts_off_weights, layers * gradients.device, 0.0),
        np.where(case.schedule.puts_off_weights, layers * gradients.host, 0.0),
    )


def _join_put_off(case: Case, forward: Work, gradients: Work, exchange: Work) -> Array:
    """Time that the host adds to weight gradients which are launched with the next forward pass
    [s]."""
    both = Work(forward.device + gradients.device, forward.host + gradients.host)
    [added_to_both] = join_passes(case, [both], exchange)
    [added_to_forward] = join_passes(case, [forward], exchange)
    return np.where(case.schedule.puts_off_weights, added_to_both - added_to_forward, 0.0)


def host_time(case: Case, parts: MicroBatchParts, stages: Stages) -> Array:
    """Time that the host adds to a micro-batch on the slowest stage.

    Parameters
    ----------
    case : Case
        Strategies.
    parts : MicroBatchParts
        One micro-batch.
    stages : Stages
        Stages with their hosts.

    Returns
    -------
    time : array
        What the stage that is the slowest with its host takes longer than the one that is the
        slowest without [s].
    """
    forward, backward = _find_slowest_passes(stages)
    longest = np.maximum.reduce([stage.both_passes for stage in stages])
    longest = np.where(case.runs_phase_by_phase, forward + backward, longest)
    added = np.maximum(longest - time_slowest_device(case, parts), 0.0)
    return np.where(case.is_timed_by_passes, added, parts.hosts.either)


def time_slowest_device(case: Case, parts: MicroBatchParts) -> Array:
    """Time of a micro-batch on the device of the slowest stage.

    Parameters
    ----------
    case : Case
        Strategies.
    parts : MicroBatchParts
        One micro-batch.

    Returns
    -------
    time : array
        Its kernels and exposed messages inside of the stage [s].
    """
    in_layers = case.layers * (parts.context.both + parts.experts.both)
    return np.asarray(parts.compute.slowest + parts.tensor.slowest + in_layers)


def _time_inner_stage(case: Case, parts: MicroBatchParts) -> BothPasses:
    """Passes of a micro-batch on the device of a stage between the ends [s]."""
    return BothPasses(
        forward=case.layers * parts.passes.forward.layer.device,
        backward=case.layers * parts.passes.backward.layer.device,
    )


def _find_slowest_passes(stages: Stages) -> BothPasses:
    """The longest forward pass of all stages, and the longest backward pass [s]."""
    return BothPasses(
        forward=np.maximum.reduce([stage.forward for stage in stages]),
        backward=np.maximum.reduce([stage.backward for stage in stages]),
    )


def _time_all_stages(case: Case, parts: MicroBatchParts, stages: Stages, borders: Borders) -> Array:
    """Time of a micro-batch on all stages, one after another, with the messages between them [s].

    Of several chunks of a stage it is that of the largest ones.
    """
    in_layers = case.layers * (parts.context.both + parts.experts.both)
    device = parts.compute.all_stages + parts.tensor.all_stages + in_layers * case.s.pp
    hosts = parts.hosts.slowest + parts.hosts.inner * (case.s.pp - 1)
    inner_layers = case.all_layers - stages.first.layers - stages.last.layers
    inner = stages.inner.both_passes * inner_layers / np.maximum(stages.inner.layers, 1.0)
    stage_by_stage = stages.first.both_passes + stages.last.both_passes + inner
    time = np.where(case.is_timed_by_passes, stage_by_stage, device + hosts)
    return np.asarray(time + borders.all * _count_largest_chunks(case))


def _count_largest_chunks(case: Case) -> Array:
    """Chunks of a stage, in units of the largest one [-]."""
    return np.asarray(case.layers / np.ceil(case.layers / case.s.chunks))


def _count_waiting(case: Case) -> Array:
    """For how many micro-batches of a stage the pipeline waits until the first micro-batch returns to
    its next chunk [-]."""
    in_group = np.minimum(case.micro, case.s.pp)
    in_chunk = np.where(case.schedule.interleaves, in_group, case.micro)
    other_chunks = 1.0 - np.ceil(case.layers / case.s.chunks) / case.layers
    return np.asarray(other_chunks * (case.s.pp - in_chunk))


def _wait_for_neighbours(case: Case, borders: Borders, inner: BothPasses, busy: Busy) -> Array:
    """Exposed messages of a micro-batch between stages of one region [s].

    Notes
    -----
    With 1F1B and H1 stages wait for messages: those at the ends for one, others for two. GPipe sends
    while it computes, and what takes longer than a pass is exposed. The messages of chunks are part
    of the bubble.
    """
    half = borders.inside / 2.0
    longer = np.maximum(half - inner.forward, 0.0) + np.maximum(half - inner.backward, 0.0)
    on_both_sides = borders.both_sides + busy.inner - busy.slowest
    received = np.where(case.s.pp > 2, on_both_sides, 0.0)
    received = np.maximum(received, borders.end / 2.0)
    exposed = np.where(case.schedule.runs_phase_by_phase, longer, received)
    return np.where(case.schedule.has_chunks, 0.0, exposed)


def _wait_for_regions(
    case: Case, far: Array, near: Array, inner: BothPasses, slack: Array
) -> Array:
    """Time by which messages between regions, `far`, make a micro-batch longer than others do [s].

    `inner` are the passes of a stage between the ends, which has some `slack` beside the slowest
    stage with `near`, the messages that it already waits for [s].

    Notes
    -----
    With 1F1B and H1 a stage takes a message when its last pass has ended, and k stages before the
    end of the pipeline only k + 1 micro-batches are on their way. Other schedules send while they
    compute, so that many messages may be on their way: the longer of both counts, forth and back one
    after the other, or both at once (interleaved, but for its first passes).
    """
    s, regions = case.s, case.regions
    latency = find_far_latency(case)
    trips = np.maximum(0.5, (regions - 1) / (s.pp - s.pp / regions + 1))
    waits = np.maximum(trips * far - np.where(s.pp > regions, slack, 0.0), 0.0)
    waits = np.where(regions > 1, waits, 0.0)
    sent = s.chunks * (far / 2.0 - latency)
    one_by_one = np.maximum(sent - inner.forward, 0.0) + np.maximum(sent - inner.backward, 0.0)
    at_once = np.maximum(sent - (inner.forward + inner.backward), 0.0)
    # passes before those of both phases follow one another
    first_passes = case.schedule.passes_ahead * (s.pp - 1) + (s.chunks - 1) * s.pp
    alone = np.minimum(first_passes / (case.micro * s.chunks), 1.0)
    interleaved = alone * one_by_one + (1.0 - alone) * at_once
    waits = np.where(case.schedule.all_forward_first, np.maximum(one_by_one - near, 0.0), waits)
    return np.where(case.schedule.interleaves, interleaved, waits)


def find_far_latency(case: Case) -> float:
    """Find the latency of a message between regions.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    latency : float
        Of the link ``far``; 0 if there is none [s].
    """
    link = case.platform.network.links.get("far")
    return link.latency.value if link else 0.0


def pipeline_bubble(
    case: Case,
    passes: Passes,
    borders: Borders,
    busy: Busy,
    stage_messages: Array,
    all_stages: Array,
) -> Array:
    """Bubble of stages with several chunks.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : Passes
        Passes of a micro-batch through each region.
    borders : Borders
        Messages between stages.
    busy : Busy
        A micro-batch on one stage [s].
    stage_messages : array
        Messages that it waits for [s].
    all_stages : array
        A micro-batch on all stages, one after another, with messages [s].

    Returns
    -------
    bubble : array
        Time in which the slowest stage waits for others; 0 of a single stage [s].

    Notes
    -----
    The bubble is that of even chunks, see `perfkit.models.partitions.bubble_time`. A chunk starts
    when the first micro-batch has passed all stages; a stage works on others in the meantime.
    """
    s = case.s
    round_trip = _count_waiting(case) * busy.inner
    round_trip = round_trip + (s.chunks - 1) * (borders.all + borders.inside)
    weight_gradients = case.layers * case.times.weight_gradients.device
    of_even_chunks = partitions.bubble_time(
        all_stages,
        slowest=busy.slowest + stage_messages,
        stages=s.pp,
        chunks=_count_largest_chunks(case),
        micro_batches=case.micro,
        delayed=np.where(case.schedule.puts_off_weights, weight_gradients, 0.0),
    )
    bubble = np.where(case.has_stages, np.maximum(round_trip, 0.0), 0.0) + of_even_chunks
    chunked = case.schedule.has_chunks & case.has_stages & (s.chunks > 1)
    # passes of a V are always run
    bubble = np.where(case.schedule.is_v_shaped, 0.0, bubble)
    chunked = chunked & ~case.schedule.is_v_shaped
    if np.any(chunked):
        ends = _pass_both_ends(case, passes, borders)
        bubble = np.where(chunked, np.maximum(bubble + ends, 0.0), bubble)
    return np.asarray(bubble)


def _pass_both_ends(case: Case, passes: Passes, borders: Borders) -> Array:
    """Time that embeddings and head of stages with several chunks add to that of the slowest stage
    and the bubble, or take off [s].

    Notes
    -----
    The longest path through all passes of one phase goes from chunk to chunk, v - 1 times. It
    either follows a micro-batch through all stages, which takes p chunks and their messages, or
    stays on its stage for the other m - 1 micro-batches. The difference of both is the gap g = (p -
    m) t + messages. Only a path that stays on a stage once more meets both slow ends with all
    micro-batches: with the faster end, e, it gains (m - 1) e and loses g. The slowest stage counts
    the faster end m times, breadth first and where all forward passes come first, so that
    min((m - 1) e, g) is taken off again. Other interleaved stages meet the faster end in the first
    group of p micro-batches alone: p e, with the gap of their messages.
    """
    s, micro = case.s, case.micro
    interleaved = case.schedule.interleaves & (micro > s.pp)
    met = np.where(interleaved, s.pp, micro)
    chunk_changes = np.maximum(s.chunks - 1.0, 1.0)
    messages = (borders.all + borders.inside) / 2.0
    time = np.zeros(case.count)
    for one_pass in passes:
        layer = one_pass.layer.device
        first_layers = case.stage_layers.first - case.layers
        last_layers = case.stage_layers.last - case.layers
        first_end = one_pass.embeddings.device + first_layers * layer
        last_end = one_pass.head.device + last_layers * layer
        faster_end = np.maximum(np.minimum(first_end, last_end), 0.0)
        gap = _count_waiting(case) / chunk_changes * case.layers * layer + messages
        taken_off = np.minimum((met - 1.0) * faster_end, np.maximum(gap, 0.0))
        added = np.where(interleaved, met * faster_end, 0.0)
        time = time + added - taken_off
    return time


def _time_pass_by_pass(
    case: Case, stages: Stages, borders: Borders, all_stages: Array, region_messages: Array
) -> Array:
    """Time of all micro-batches of stages of one chunk [s]."""
    time = time_alternating(case, stages, borders, all_stages, region_messages)
    if np.any(case.runs_phase_by_phase):
        phase_by_phase = _time_phase_by_phase(case, stages, borders, all_stages)
        time = np.where(
            case.runs_phase_by_phase, phase_by_phase + case.micro * region_messages, time
        )
    return time


def _time_phase_by_phase(case: Case, stages: Stages, borders: Borders, all_stages: Array) -> Array:
    """Time of all micro-batches on stages that run all forward passes before all backward ones
    (GPipe) [s].

    Notes
    -----
    The passes of one phase are a flow shop of m equal jobs: a way through it goes from stage to
    stage with one micro-batch and stays on one stage for the other m - 1, so that the longest takes
    the sum of all stages and m - 1 times the slowest. A link between stages, which sends one
    message after another, is a stage like others.
    """
    message = borders.inside / 2.0
    slowest = _find_slowest_passes(stages)
    forward = np.maximum(slowest.forward, message)
    backward = np.maximum(slowest.backward, message)
    return np.asarray(all_stages + (case.micro - 1.0) * (forward + backward))


def time_alternating(
    case: Case, stages: Stages, borders: Borders, all_stages: Array, region_messages: Array
) -> Array:
    """Time all micro-batches of stages that do a forward and a backward pass in turn (1F1B, H1).

    Parameters
    ----------
    case : Case
        Strategies.
    stages : Stages
        Stages with their hosts.
    borders : Borders
        Messages between them.
    all_stages : array
        A micro-batch on all stages, one after another, with messages [s].
    region_messages : array
        By how much messages between regions make a micro-batch of a stage longer [s].

    Returns
    -------
    time : array
        Of an iteration [s].

    Notes
    -----
    Each stage gives a bound, and the largest one is the time. Stage k of p starts when the first
    micro-batch has passed the k stages before it, is busy with m micro-batches, and is followed by
    the last backward pass of these k stages. It waits twice for the stages behind it, which take R
    for a round trip: once until its first micro-batch returns, while it has d = a (p - 1 - k)
    further forward passes to do, for `Schedule.passes_ahead` a, and once until its last one returns, while it has as many backward passes
    to do: max(0, R - d F) and max(0, R - d B). With m up to d + 1 micro-batches both are the same
    wait. Of the last stage this is (m - 1) S + total, the usual time; of even stages all bounds are
    equal.

    H1 puts off weight gradients, W of each stage and micro-batch: a backward pass is followed by
    those of k micro-batches before. No round trip R waits for them. Stage k has min(k + 1, m) of
    them left when its last backward pass has ended; then follow the last backward passes of the k
    stages before it and W of the first stage, or what it has left itself, whichever is longer. Once
    stages do both passes in turn, in m - p micro-batches, W hides the message before a forward
    pass.
    """
    time = np.zeros(case.count)
    for stage in stages:
        bound = _bound_by_stage(case, stage, stages, borders, all_stages, region_messages)
        # of two stages, none lies between the ends
        time = np.where(stage.layers > 0, np.maximum(time, bound), time)
    return time


def _bound_by_stage(
    case: Case,
    stage: Stage,
    stages: Stages,
    borders: Borders,
    all_stages: Array,
    region_messages: Array,
) -> Array:
    """Time of an iteration if one stage and its waits decide [s]."""
    micro, position = case.micro, stage.position
    message = stage.forward_message + stage.backward_message + region_messages
    before = _time_before(case, stage, stages, borders, all_stages)
    hidden_messages = np.maximum(micro - case.s.pp, 0.0) * np.minimum(
        stage.forward_message, stage.weight_gradients
    )
    passes = micro * (stage.both_passes + message + stage.landing) - message - hidden_messages
    # the iteration ends on the first stage
    passes = passes + np.where(position == 0, 0.0, stages.first.landing - stage.landing)
    waits = _wait_for_stages_behind(case, stage, stages, all_stages - stage.both_passes - before)
    end = _end_after_last_pass(case, stage, stages)
    return np.asarray(before + passes + waits + end)


def _time_before(
    case: Case, stage: Stage, stages: Stages, borders: Borders, all_stages: Array
) -> Array:
    """Time of the first micro-batch before a stage starts, and of the last one behind it, in stages
    before it [s]."""
    position = stage.position
    inner_before = (position - 1.0) * stages.inner.both_passes
    before = np.where(position > 0, stages.first.both_passes + inner_before, 0.0)
    before = before + position / np.maximum(case.s.pp - 1.0, 1.0) * borders.all
    others = all_stages - stage.both_passes
    return np.where(position == case.s.pp - 1, others, np.minimum(before, others))


def _wait_for_stages_behind(case: Case, stage: Stage, stages: Stages, time_behind: Array) -> Array:
    """Time that a stage waits twice for the stages behind it, which take some time for a micro-batch
    [s]."""
    micro, position = case.micro, stage.position
    is_last = position == case.s.pp - 1
    stages_behind = case.s.pp - 1.0 - position
    inner_behind = np.maximum(stages_behind - 1.0, 0.0)
    put_off_behind = inner_behind * stages.inner.weight_gradients + stages.last.weight_gradients
    round_trip = np.where(is_last, 0.0, time_behind - put_off_behind)
    # passes while the stage waits
    meanwhile = np.minimum(case.schedule.passes_ahead * stages_behind, micro - 1.0)
    forward = stage.forward + stage.forward_message
    backward = stage.backward + stage.backward_message
    first_of_last_passes = np.maximum(micro - 1.0 - meanwhile, position)
    put_off_meanwhile = np.maximum(micro - 1.0 - first_of_last_passes, 0.0)
    not_meanwhile = (meanwhile - put_off_meanwhile) * stage.weight_gradients
    first_wait = np.maximum(round_trip - meanwhile * forward, 0.0)
    last_wait = np.maximum(round_trip - (meanwhile * backward - not_meanwhile), 0.0)
    is_one_wait = micro <= meanwhile + 1.0
    return np.where(is_one_wait, np.maximum(first_wait, last_wait), first_wait + last_wait)


def _end_after_last_pass(case: Case, stage: Stage, stages: Stages) -> Array:
    """Time by which weight gradients that were put off make the end of an iteration longer than their
    share of the passes, or shorter if it is below 0 [s]."""
    first, inner = stages.first, stages.inner
    position = stage.position
    is_first = position == 0
    inner_before = np.maximum(position - 1.0, 0.0)
    left = np.minimum(position + 1.0, case.micro)
    left_alone = left * (stage.weight_gradients - stage.weight_gradients_host)
    last_passes = (first.backward - first.weight_gradients) + inner_before * (
        inner.backward - inner.weight_gradients
    )
    afterwards = last_passes + first.weight_gradients - first.weight_gradients_host
    longer_end = np.where(is_first, 0.0, np.maximum(left_alone - afterwards, 0.0))
    saved = inner_before * inner.weight_gradients + first.weight_gradients_host
    saved = saved + np.where(is_first, 0.0, left * stage.weight_gradients)
    return np.asarray(longer_end - saved)
