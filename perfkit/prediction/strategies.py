"""Strategies of parallel training in closed form: time and memory of an iteration, for many
strategies at once."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import join_host
from perfkit.prediction.memory import WORKSPACE
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.micro_batches import (
    MessageCopies,
    MicroBatchTimes,
    PhaseTimes,
    RegionTimes,
    add_gradient_sums,
    compute_attention_again,
    price_micro_batch,
    size_micro_batch,
    time_gradient_sums,
)
from perfkit.prediction.passes import ChunkTimes, PipelineTimes, Schedule, run_iteration
from perfkit.prediction.replicas import (
    ShardedPass,
    UnitMessages,
    UnitTimes,
    time_gathering_forward,
    time_scattering_backward,
)
from perfkit.prediction.stage_replicas import (
    Added,
    AddedOnce,
    Exchange,
    StageKind,
    add_to_each_pass,
    exchange_once,
    slow_passes,
    time_each_micro_batch,
    time_once,
)
from perfkit.prediction.strategy_memory import measure_strategies
from perfkit.prediction.strategy_records import ByRegion, Group, join_groups, map_arrays, select
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, join_errors
from perfkit.workloads.strategy import Strategy, spread_layers
from perfkit.workloads.transformer import Transformer

#: Parts of the time of an iteration.
PARTS = ("work", "tensor", "context", "experts", "host", "stages", "bubble", "replicas", "update")
#: How many times as long as the fastest strategy others may take, so that their passes are run:
#: closed forms were seen to err by up to 20 % (docs/accuracy.md) [-].
NEAR = 1.25
_TINY = 1e-30


def price_strategies(
    model: Transformer,
    platform: Platform,
    strategies: Strategy,
    execution: str | None = None,
    *,
    memory: float = np.inf,
    near: float = NEAR,
) -> dict[str, Array]:
    """Price an iteration for each of many strategies.

    Parameters
    ----------
    model : Transformer
        The model; its batch is over all ranks. Its own settings for sharing, checkpoints and
        micro-batches are ignored.
    platform : Platform
        GPUs. Ranks that share layers are neighbours; then come those that share sequences, experts,
        and the rest of the replicas; stages are furthest apart.
    strategies : Strategy
        Each field an array, with one value for each strategy.
    execution : str, optional
        ``eager`` or ``compiled``.
    memory : float, optional
        What a rank may use [B].
    near : float, optional
        How many times as long as the fastest strategy that fits others may take, so that their
        passes are run where closed forms are rough; infinite to run all of these [-].

    Returns
    -------
    columns : dict of str to array
        ``time`` and its parts, which add up to it: ``work`` of the slowest stage; exposed messages
        of ``tensor``, ``context``, ``experts`` and ``stages``; ``host``; ``bubble``; ``replicas``
        (gradients and weights); ``update`` [s]. ``run``, whether passes were run. ``spread`` of the logarithm of the time [-].
        ``needs``, the memory of the fullest rank, and its parts, see
        `perfkit.prediction.memory.HELD` [B].

    Raises
    ------
    ValueError
        For a CPU.

    Notes
    -----
    The time is that of all micro-batches on the slowest stage, of the bubble, and of what replicas
    exchange that no layer hides. A rank is recorded with its part of one layer; its kernels and
    collectives are priced by the closed forms of `predict`, once for all strategies that cut a
    layer into the same sizes.
    """
    check_device(platform)
    used = strategies.without_idle_zero()
    messages = MessageTimes(platform)
    times = price_micro_batches(model, messages, used, execution)
    iterations = _Iterations(model, messages, used, times, execution or "eager")
    return iterations.add_up(memory, near)


def check_device(platform: Platform) -> None:
    """Check that strategies can be priced on a platform; else a ValueError."""
    if platform.device.kind == "cpu":
        raise ValueError(
            f"platform {platform.name!r} is a CPU; strategies are priced on GPUs, such as h100-sxm-8"
        )


def price_micro_batches(
    model: Transformer, messages: MessageTimes, s: Strategy, execution: str | None
) -> MicroBatchTimes:
    """Price one micro-batch of each of many strategies.

    Parameters
    ----------
    model : Transformer
        The model.
    messages : MessageTimes
        Times of messages on the platform.
    s : Strategy
        Each field an array.
    execution : str or None
        ``eager`` or ``compiled``.

    Returns
    -------
    times : MicroBatchTimes
        An element of each array for each strategy. Backward passes compute attention again where
        checkpoints are ``selective``.

    Notes
    -----
    Strategies whose graphs differ in their sizes alone are priced together, and those of equal sizes
    once.
    """
    structure = (s.checkpoint == "full", s.rows > 1, s.tp > 1, s.replicated)
    structures = np.ravel_multi_index([1 * flags for flags in structure], (2, 2, 2, 2))
    micro_batches = model.batch / (s.dp * s.micro_batch)
    several = np.broadcast_to(micro_batches > 1, structures.shape)
    groups = []
    for number in np.unique(structures):
        members = np.flatnonzero(structures == number)
        different = [s.micro_batch, s.tp, s.cp, s.ep]
        if s.replicated[members[0]]:  # what buckets take depends on their ranks
            different += [s.dp, several]
        sizes = [np.asarray(values, dtype=np.int64)[members] for values in different]
        codes = np.ravel_multi_index(sizes, [values.max() + 1 for values in sizes])
        _, first, rows = np.unique(codes, return_index=True, return_inverse=True)
        chosen = members[first]
        times = price_micro_batch(model, messages, s.select(chosen), several[chosen], execution)
        groups.append(Group(members, rows, times))
    return compute_attention_again(join_groups(groups, len(structures)), s)


class _ShardCopies(NamedTuple):
    """Kernels around messages of replicas that hold shards of the whole model [s].

    Around a message that gathers the weights of a layer, and of all other weights of the slowest
    stage; that gathers those of a layer once more; and that reduces gradients. Then copies of the
    experts of a layer, which are part of each; and those ahead of the messages that gather.
    """

    gather_layer: Array
    gather_ends: Array
    regather_layer: Array
    scatter_layer: Array
    scatter_ends: Array
    reorder: Array
    layer_ahead: Array
    ends_ahead: Array


def _get_phase(region: RegionTimes, phase: int) -> PhaseTimes:
    """The forward pass (0) or the backward pass (1) of a region."""
    return region.backward if phase else region.forward


def _list_phases(region: RegionTimes) -> Array:
    """Kernels of both passes [s]."""
    return np.array([region.forward.device, region.backward.device])


def _list_messages(region: RegionTimes) -> Array:
    """Messages among ranks that share layers, of both passes [s]."""
    return np.array([region.forward.tensor_messages, region.backward.tensor_messages])


def _take_rows(by_region: ByRegion[Array], rows: slice) -> ByRegion[Array]:
    """Some phases of each region."""
    return map_arrays(lambda phases: phases[rows], by_region)


def _list_hosts(region: RegionTimes) -> Array:
    """Calls of the host of both passes [s]."""
    return np.array([region.forward.host, region.backward.host])


class _Iterations:
    """Iterations of many strategies, one element of each array for each of them."""

    def __init__(
        self,
        model: Transformer,
        messages: MessageTimes,
        s: Strategy,
        times: MicroBatchTimes,
        execution: str,
    ) -> None:
        self.execution = execution
        self.model = model
        self.messages = messages
        self.platform = platform = messages.platform
        self.s = s
        self.sizes = size_micro_batch(model, s)
        sums = time_gradient_sums(times, s, self.sizes)
        self.times = add_gradient_sums(times, sums, s)
        #: Sums of shards outside of layers [s].
        self.added_ends = sums.embeddings.shards.device + sums.head.shards.device
        self.micro: Array = self.sizes.micro
        #: Layers of the first stage, of the largest stage between the ends, and of the last stage
        #: [-].
        self.ends: Sequence[Array] = spread_layers(model.layers, s)
        self.layers = self.ends[1]
        network = platform.network
        #: Regions with stages of their own [-].
        self.regions = np.minimum(
            -(-s.ranks * network.regions // network.ranks), np.minimum(network.regions, s.pp)
        )
        #: Share of the speed of kernels that collectives beside them take [-].
        self.contention = dict(platform.context.overlap or {}).get("contention", 0.0)
        #: What was fitted to whole iterations of several ranks.
        self.whole = platform.context.find_iteration(model.family, 2)
        self.weights = self.count_weights()

    def add_up(self, memory: float, near: float) -> dict[str, Array]:
        """Times and their parts [s], spread [-] and memory [B]; passes are run of rough strategies
        that fit in `memory` [B] and take at most `near` times as long as the fastest [-]."""
        terms = self.share_stages()
        inside = sum(terms[name] for name in ("work", "tensor", "context", "experts", "host"))
        # messages of experts come before the kernels of a layer, the host behind a pass
        late = np.where(self.s.pp > 1, terms["host"], 0.0)
        kernels = terms["work"] + terms["host"] - late
        kernel_share = kernels / (inside - terms["experts"] - late)
        terms["replicas"] = self.share_replicas(kernel_share)
        # shards are cast when they are gathered
        in_gathers = self.s.alone & (self.s.zero > 0)
        narrow = np.where(in_gathers, 0.0, self.times.weight_casts.device)
        terms["update"] = (self.times.update.device + narrow) * self.count_updated()
        # the host of a whole replica waits for nothing: it and its device join once
        device = sum(terms.values())
        joined = join_host(device, self.count_host(), self.whole)
        terms["host"] = np.where(self.s.alone, joined - device, terms["host"])
        held = measure_strategies(
            self.model,
            self.s,
            self.sizes,
            self.times,
            self.ends,
            self.weights,
            self.average(),
        )
        needs = sum(held.values()) + WORKSPACE
        time: Any = sum(terms.values())
        run = self.find_rough() & (needs <= memory)
        if run.any():
            fastest = time[needs <= memory].min()
            run = run & (time <= near * fastest)
        if run.any():
            self.run_passes(np.flatnonzero(run), kernel_share, terms)
            time = sum(terms.values())
        return {
            "time": time,
            **terms,
            "run": run,
            "spread": self.estimate_spread(time, terms),
            "needs": needs,
            **held,
        }

    def estimate_spread(self, time: Array, terms: dict[str, Array]) -> Array:
        """Standard deviation of the logarithm of the time [-]."""
        messages = ("tensor", "context", "experts", "stages", "replicas")
        rest: Any = sum(terms[name] for name in messages) / time
        own = self.times.spread * (1 - rest)
        around = self.whole.spread if self.whole else CONTEXT
        known = join_errors(own[np.newaxis], np.zeros(1, dtype=bool), rest, around)
        error = find_host_error(self.platform, self.execution)
        return np.asarray(np.hypot(known, terms["host"] / time * np.log(error)))

    def find_ends(self, by_region: ByRegion[Array]) -> tuple[Array, Array]:
        """What the first and the last stage take more than a stage between them, of a quantity of
        each region."""
        first_layers, _, last_layers = self.ends
        first = by_region.embeddings + (first_layers - self.layers) * by_region.layer
        last = by_region.head + (last_layers - self.layers) * by_region.layer
        return first, last

    def count_weights(self) -> Array:
        """Trained numbers of the largest stage [-]."""
        weights = self.times.list_by_region(lambda region: region.weights)
        first, last = self.find_ends(weights)
        ends = np.maximum(np.maximum(first, last), 0.0)
        ends = np.where(self.holds_both_ends, np.maximum(first, 0.0) + np.maximum(last, 0.0), ends)
        return np.asarray(self.layers * weights.layer + ends)

    @property
    def holds_both_ends(self) -> np.ndarray:
        """Whether a stage is slowed down by embeddings and head: one that holds both, or where
        chunks follow one another."""
        breadth = (self.s.schedule == "breadth_first") | (self.micro <= self.s.pp)
        return np.asarray((self.s.pp == 1) | breadth & (self.s.chunks > 1))

    @cached_property
    def slowest_end(self) -> tuple[Array, Array]:
        """Whether the first stage is slower than the last one, and whether stages between them are
        slower than both."""
        compute = self.times.list_by_region(_list_phases)
        messages = self.times.list_by_region(_list_messages)
        both = map_arrays(np.add, compute, messages)
        first, last = (times.sum(axis=0) for times in self.find_ends(both))
        return first > last, np.maximum(first, last) < 0.0

    def add_slowest(self, by_region: ByRegion[Array]) -> Array:
        """Sum of times over the slowest stage [s]; rows of arrays are phases."""
        first_phases, last_phases = self.find_ends(by_region)
        first, last = first_phases.sum(axis=0), last_phases.sum(axis=0)
        first_is_slower, between_is_slower = self.slowest_end
        slowest = np.where(first_is_slower, first, last)
        slowest = np.where(between_is_slower, 0.0, slowest)
        # GPipe: all forward passes come before all backward ones
        phases = np.maximum(np.maximum(first_phases, last_phases), 0.0).sum(axis=0)
        slowest = np.where(self.s.schedule == "gpipe", phases, slowest)
        both = np.maximum(first, 0.0) + np.maximum(last, 0.0)
        ends = np.where(self.holds_both_ends, both, slowest)
        return np.asarray(self.layers * by_region.layer.sum(axis=0) + ends)

    def add_all(self, by_region: ByRegion[Array]) -> Array:
        """Sum of times over all stages [s]; rows of arrays are phases."""
        ends = by_region.embeddings.sum(axis=0) + by_region.head.sum(axis=0)
        return np.asarray(self.model.layers * by_region.layer.sum(axis=0) + ends)

    def count_updated(self) -> Array:
        """Weights that a rank of the first stage updates, whose iteration ends last [-]."""
        s, times, sizes = self.s, self.times, self.sizes
        first_layers = self.ends[0]
        head = np.where(s.pp > 1, 0.0, times.head.weights)
        weights = first_layers * times.layer.weights + times.embeddings.weights + head
        experts = first_layers * sizes.experts
        shards = (weights - experts) / s.owners + experts / sizes.sharers
        return np.asarray(np.where(s.zero > 0, shards, weights))

    def average(self) -> Array:
        """Mean number of ranks that share a weight; experts have fewer."""
        share = self.layers * self.sizes.experts / self.weights
        return 1.0 / ((1.0 - share) / self.s.owners + share / self.sizes.sharers)

    def hide(
        self, time: Array, compute: Array, pieces: Any, hidden: Any, kernels: Any = 1.0
    ) -> Array:
        """Exposed time of messages that are `hidden` behind kernels, with the slowdown of these;
        else their time."""
        last = time / pieces
        slowed = (
            self.contention * np.minimum(time - last, compute / (1.0 - self.contention)) * kernels
        )
        left = np.maximum(
            partitions.exposed_time(time, compute=compute, pieces=pieces), last + slowed
        )
        return np.asarray(np.where(hidden, left, time))

    def join_passes(self, devices: Sequence[Array], hosts: Sequence[Array]) -> list[Array]:
        """Time that hosts add to each pass of devices that waits for messages [s]."""
        s = self.s
        if not np.any(s.scattered):
            filled = grown = np.ones(len(self.micro))
        else:
            # messages of a single micro-batch are added to its passes alone
            often = [each / self.micro for each in self.count_rounds()]
            copied = self.copy(often[0], *often)
            called = self.count_exchange_host(*often)
            filled = 1.0 + s.scattered * copied / np.maximum(sum(devices), _TINY)
            grown = 1.0 + s.scattered * called / np.maximum(sum(hosts), _TINY)
        apart = []
        for device, host in zip(devices, hosts, strict=True):
            joined = join_host(filled * device, grown * host, self.whole)
            apart.append(np.asarray(joined - filled * device))
        return apart

    def join_all_passes(self, devices: Sequence[Array], hosts: Sequence[Array]) -> Array:
        """Time that hosts add to all passes of devices that wait for no messages [s]."""
        often = [each / self.micro for each in self.count_rounds()]
        device = sum(devices) + self.copy(often[0], *often)
        host = sum(hosts) + self.count_exchange_host(*often)
        return np.asarray(join_host(device, host, self.whole) - device)

    def join_exchanges(
        self, devices: Sequence[Array], hosts: Sequence[Array], layers: Array, end: str
    ) -> tuple[Array, Array]:
        """Time that the host adds to the first forward and to the last backward pass of a chunk of
        a stage, if weights are gathered and gradients reduced once [s]."""
        s, times, sizes = self.s, self.times, self.sizes
        several = (s.dp * s.cp > 1) & ~s.scattered
        weights, units = layers * times.layer.weights, layers
        if end:
            weights, units = weights + getattr(times, end).weights, units + 1.0
        reordered = sizes.gathered * sizes.reordered * layers
        packing = times.packing
        gathers = np.where(several & (s.zero > 0), 1.0, 0.0)
        gathers = gathers / np.where(s.zero > 1, s.chunks, 1.0)
        gathered = gathers * packing * (sizes.gathered * weights + reordered)
        gather_calls = gathers * 2.0 * units * times.call
        # without overlap gradients are reduced when the host waits for nothing any more; those of
        # layers, too, if they are put off
        reduces = np.where(several & s.overlap & (s.schedule != "zero_bubble"), 1.0, 0.0) / s.chunks
        copies = np.where(s.zero > 0, 1.0, 2.0)
        reduced = reduces * packing * (copies * sizes.reduced * weights + reordered)
        reduce_calls = reduces * (1.0 + copies) * units * times.call
        forward = devices[0] / s.chunks + gathered
        backward = devices[1] / s.chunks + reduced
        first = join_host(forward, hosts[0] / s.chunks + gather_calls, self.whole) - forward
        last = join_host(backward, hosts[1] / s.chunks + reduce_calls, self.whole) - backward
        return np.asarray(first), np.asarray(last)

    def add_hosts(self, devices: Sequence[Array], hosts: Sequence[Array]) -> Array:
        """Time that hosts add to the passes of devices [s]: pass by pass where these wait for
        messages, else in all; none for whole replicas, see `count_host`."""
        shared = sum(self.join_passes(devices, hosts))
        if np.any(self.s.pp == 1):
            shared = np.where(self.s.pp > 1, shared, self.join_all_passes(devices, hosts))
        return np.asarray(np.where(self.s.alone, 0.0, shared))

    def count_passes(self) -> tuple[Array, Array]:
        """Chunks of a stage, in units of the largest one; and for how many micro-batches of a stage
        the pipeline waits until the first micro-batch returns to its next chunk.
        """
        longest = np.ceil(self.layers / self.s.chunks)
        known = np.where(
            self.s.schedule == "interleaved", np.minimum(self.micro, self.s.pp), self.micro
        )
        return self.layers / longest, (1.0 - longest / self.layers) * (self.s.pp - known)

    def count_rounds(self) -> tuple[Array, Array, Array]:
        """How often replicas reduce gradients, gather weights, and gather them again in the
        backward pass."""
        each, zero = np.where(self.s.scattered, self.micro, 1.0), self.s.zero
        return each, np.where(zero > 0, each, 0.0), np.where(zero > 2, each, 0.0)

    @cached_property
    def shard_copies(self) -> _ShardCopies:
        """Kernels around messages of replicas that hold shards of the whole model, on the slowest
        stage.

        Notes
        -----
        Copies of shards are divided among the ranks that own them. Those of sums of several
        micro-batches move more bytes than those of gradients as they are computed.
        """
        s, times, sizes = self.s, self.times, self.sizes
        experts = sizes.experts / times.layer.weights
        layer_shard = (1.0 - experts) / s.owners + experts / sizes.sharers
        all_ends = np.maximum(times.embeddings.weights + times.head.weights, 1.0)
        ends_of_stage = (self.weights - self.layers * times.layer.weights) / all_ends
        reorder = sizes.reorders * times.reorder.fixed + sizes.reordered * times.reorder.each
        wider = np.where(sizes.straight, 0.0, sizes.widened - 1.0)

        def copy_layer(copies: MessageCopies) -> Array:
            return copies.whole + copies.divided * layer_shard + reorder

        def copy_ends(copies: MessageCopies) -> Array:
            return copies.whole + copies.divided / s.owners

        def copy_ahead(copies: MessageCopies) -> Array:
            return copies.ahead + copies.divided / s.owners

        layer, ends = times.layer_copies, times.end_copies
        scatter_layer = copy_layer(layer.scatter) + wider * layer.scatter.packing
        scatter_ends = copy_ends(ends.scatter) + wider * ends.scatter.packing
        return _ShardCopies(
            gather_layer=copy_layer(layer.gather),
            gather_ends=ends_of_stage * copy_ends(ends.gather),
            regather_layer=copy_layer(layer.regather),
            scatter_layer=scatter_layer,
            scatter_ends=ends_of_stage * scatter_ends,
            reorder=reorder,
            layer_ahead=copy_ahead(layer.gather),
            ends_ahead=copy_ahead(ends.gather),
        )

    def copy(self, packed: Array, reduced: Array, gathered: Array, again: Array) -> Array:
        """Time of copies around messages for a number of each [s]; whole gradients are packed and
        unpacked."""
        shards = self.shard_copies
        of_layer = shards.scatter_layer * reduced + shards.gather_layer * gathered
        of_layer = of_layer + shards.regather_layer * again
        of_ends = shards.scatter_ends * reduced + shards.gather_ends * gathered
        of_shards = self.layers * of_layer + of_ends
        weights = self.weights
        # ranks that share layers copy each unit in one piece
        sizes = self.sizes
        unpacked = np.where(self.s.zero > 0, 0.0, packed)
        inner = self.layers * self.times.layer.weights / weights
        whole = sizes.reduced * reduced + unpacked + sizes.gathered * (gathered + inner * again)
        reordered = sizes.gathered * self.layers * sizes.reordered / weights
        whole = whole + reordered * (reduced + gathered + again)
        whole = whole * self.times.packing * weights
        copies = np.where(self.s.alone & (self.s.zero > 0), of_shards, whole)
        return np.asarray(np.where(self.s.dp * self.s.cp > 1, copies, 0.0))

    def count_host(self) -> Array:
        """Time of the host in an iteration of a single stage [s]."""
        s, times = self.s, self.times
        replicas = self.count_exchange_host(*self.count_rounds())
        replicas = np.where(s.replicated & s.overlap, times.buckets.host, replicas)
        passes = self.micro * self.pass_hosts
        update = times.update.host + np.where(s.zero > 0, 0.0, times.weight_casts.host)
        return np.asarray(passes + replicas + update)

    def count_exchange_host(self, reduced: Array, gathered: Array, again: Array) -> Array:
        """Time of the host for messages of replicas and the copies around them, for a number of
        each [s]."""
        s, times = self.s, self.times
        layer, ends = times.layer_copies, times.end_copies
        shards = self.layers * again * layer.regather.host
        shards = shards + reduced * (self.layers * layer.scatter.host + ends.scatter.host)
        shards = shards + gathered * (self.layers * layer.gather.host + ends.gather.host)
        # a copy and a message
        whole = 2.0 * (reduced + gathered + again) * (self.layers + 2.0) * times.call
        host = np.where(s.alone & (s.zero > 0), shards, whole)
        return np.asarray(np.where(s.dp * s.cp > 1, host, 0.0))

    def share_experts(self) -> Array:
        """Time of an all_to_all of the tokens of a layer among ranks that share experts [s]."""
        s, stride, routed = self.s, self.s.tp * self.s.cp, self.sizes.routed
        ways = ("", np.where(s.two_level, 1, s.ep)), ("two_level", np.where(s.two_level, s.ep, 1))
        return np.asarray(
            sum(self.messages.time("all_to_all", routed, ep, stride, way) for way, ep in ways)
        )

    def share_stages(self) -> dict[str, Array]:
        """Times of all micro-batches on the slowest stage, of the messages among and around its
        ranks, and bubble."""
        s, times = self.s, self.times
        compute = times.list_by_region(_list_phases)
        messages = times.list_by_region(_list_messages)
        work, works = self.add_slowest(compute), self.add_all(compute)
        slowest_messages = self.add_slowest(messages)
        tensor = self.hide(slowest_messages, work, s.tp, s.tiled)
        tensors = self.hide(self.add_all(messages), works, s.tp, s.tiled)
        # share that is exposed
        left = tensor / np.maximum(slowest_messages, _TINY)
        moved, moves_back = self.share_experts(), 2.0 + 2.0 * (s.checkpoint == "full")
        ring = passed = np.zeros(len(work))
        #: Time of the device and of the host in each pass of the stage with both ends, and of a
        #: stage between them.
        devices, hosts = [list[Array](), list[Array]()], [list[Array](), list[Array]()]
        passes_of_stages = list[_PassTimes]()
        hosts_of_passes = times.list_by_region(_list_hosts)
        sequence_messages, sequence_calls = _share_sequences(self)
        for phase, moves in enumerate((2.0, moves_back)):
            exposed, launched = sequence_messages[phase], sequence_calls[phase]
            embeddings, layer, head = (_get_phase(region, phase) for region in times.regions)
            # attention is computed again with its messages
            again = (phase == 1) & (s.checkpoint != "none")
            passed = again * passed + self.layers * exposed
            one = layer.device + left * layer.tensor_messages
            device = self.layers * (one + moves * moved) + passed
            calls = (1 + again) * launched + moves * (s.ep > 1) * (self.model.experts > 0)
            passes_of_stages.append(
                _PassTimes(
                    layer=device / self.layers,
                    embeddings=embeddings.device + left * embeddings.tensor_messages,
                    head=head.device + left * head.tensor_messages,
                    layer_host=layer.host + calls * times.call,
                    embeddings_host=embeddings.host,
                    head_host=head.host,
                )
            )
            host = self.layers * (layer.host + calls * times.call)
            host += 2.0 * s.chunks * (s.pp > 1) * times.call
            of_phase = slice(phase, phase + 1)
            ends = self.add_slowest(_take_rows(compute, of_phase))
            ends = ends + left * self.add_slowest(_take_rows(messages, of_phase))
            ends = ends - self.layers * one
            host_ends = (
                self.add_slowest(_take_rows(hosts_of_passes, of_phase)) - self.layers * layer.host
            )
            # the ends are in one chunk
            devices[0] += [(1.0 - 1.0 / s.chunks) * device, device / s.chunks + ends]
            hosts[0] += [(1.0 - 1.0 / s.chunks) * host, host / s.chunks + host_ends]
            devices[1].append(device)
            hosts[1].append(host)
            ring = ring + passed
        self.passes = passes_of_stages
        self.pass_hosts = sum(
            self.layers * one.layer_host + one.embeddings_host + one.head_host
            for one in passes_of_stages
        )
        self.lead = moves_back * moved
        moved = self.layers * (2.0 + moves_back) * moved
        shared = ring + moved
        borders = self.borders = _pass_on(self)
        late, later = (
            self.add_hosts(device, host) for device, host in zip(devices, hosts, strict=True)
        )
        self.late = late
        total = works + tensors + shared * s.pp + late + later * (s.pp - 1)
        between = sum(devices[1]) + later
        # where the host makes a stage between the ends the slowest
        late = np.maximum(late, between - sum(devices[0]))
        one_by_one = np.isin(s.schedule, ("1f1b", "zero_bubble")) & (s.pp > 1)
        self.one_by_one = one_by_one
        stages = self.stages = _list_stages(self, passes_of_stages, borders)
        gpipe = (s.schedule == "gpipe") & (s.pp > 1)
        in_full = one_by_one | gpipe
        longest = np.maximum.reduce([stage.forward + stage.backward for stage in stages])
        longest = np.where(gpipe, sum(_find_slowest_passes(stages)), longest)
        late = np.where(in_full, np.maximum(longest - work - tensor - shared, 0.0), late)
        total = np.where(in_full, _add_up_stages(self, stages), total)
        busy = work + tensor + shared + late
        # than the pass beside it
        longer = sum(np.maximum(borders.inside / 2.0 - one, 0.0) for one in devices[1])
        # the ends receive one message, stages between them two
        received = np.where(s.pp > 2, borders.both_sides + between - busy, 0.0)
        received = np.maximum(received, borders.end / 2.0)
        open_ends = np.select(
            [np.isin(s.schedule, partitions.CHUNKED), s.schedule == "gpipe"],
            [0.0, longer],
            received,
        )
        slowest = busy + open_ends
        between_regions = _wait_for_regions(
            self, borders.far, open_ends, devices[1], slowest - between
        )
        open_ends = open_ends + between_regions
        passes, around = self.count_passes()
        total = total + borders.all * passes
        # a chunk starts when the first micro-batch has passed all stages; a stage works on others
        # in the meantime
        round_trip = around * between + (s.chunks - 1) * (borders.all + borders.inside)
        bubble = np.where(s.pp > 1, np.maximum(round_trip, 0.0), 0.0) + partitions.bubble_time(
            total,
            slowest=slowest,
            stages=s.pp,
            chunks=passes,
            micro_batches=self.micro,
            delayed=np.where(
                s.schedule == "zero_bubble", self.layers * times.weight_gradients.device, 0.0
            ),
        )
        chunked = np.isin(s.schedule, partitions.CHUNKED) & (s.pp > 1) & (s.chunks > 1)
        if np.any(chunked):
            both_ends = _pass_both_ends(self, passes_of_stages, borders)
            bubble = np.where(chunked, np.maximum(bubble + both_ends, 0.0), bubble)
        pipeline = _time_pipeline(self, stages, total, borders.all, between_regions)
        if np.any(gpipe):
            all_at_once = _time_gpipe(self, stages, total, borders.inside / 2.0)
            pipeline = np.where(gpipe, all_at_once + self.micro * between_regions, pipeline)
        self.total, self.between_regions, self.pipeline = total, between_regions, pipeline
        rest = pipeline - self.micro * (busy + open_ends)
        bubble = np.where(in_full, np.maximum(rest, 0.0), bubble)
        # messages that weight gradients hide, where these are put off
        hidden = np.where(in_full, np.maximum(-rest, 0.0) / self.micro, 0.0)
        open_ends = np.maximum(open_ends - hidden, 0.0)
        each = {
            "work": work,
            "tensor": tensor,
            "context": ring,
            "experts": moved,
            "host": late,
            "stages": open_ends,
        }
        return {name: self.micro * own for name, own in each.items()} | {"bubble": bubble}

    def share_replicas(self, kernels: Array) -> Array:
        """Exposed messages of gradients and weights among replicas, with the copies around them
        [s].

        `kernels` is the share of a pass that its kernels take, with the host.

        Notes
        -----
        Where gradients are reduced once, the iteration begins with what the first stage waits for
        its weights; other stages gather theirs while they wait for the first micro-batch. It ends
        when the gradients of the first stage have landed, whose last backward pass is the last of
        all. Before that come the last backward passes of the other stages, which copies and
        messages make longer; theirs land while the stages before them compute.
        """
        s = self.s
        gathers, reductions = self.price_exchanges()
        time = np.zeros(len(self.micro))
        shards = s.alone & (s.zero > 0)
        several = (s.dp * s.cp > 1) & ~shards & ~(s.replicated & s.overlap)
        once = np.flatnonzero(several & ~s.scattered)
        if len(once):
            time[once] = time_once(self.select_exchange(once, kernels, gathers, reductions))
        in_turn = self.one_by_one & s.scattered
        often = np.flatnonzero(several & s.scattered & ~in_turn)
        if len(often):
            exchange = self.select_exchange(often, kernels, gathers, reductions)
            time[often] = time_each_micro_batch(exchange)
        if np.any(in_turn):
            everything = np.arange(len(self.micro))
            exchange = self.select_exchange(everything, kernels, gathers, reductions)
            time = np.where(in_turn, self.lengthen_pipeline(exchange), time)
        serial = shards & ~s.overlap
        if np.any(serial):
            reduced, gathered, again = self.count_rounds()
            layers = self.layers * gathers.layer + self.layers * gathers.experts
            ends = gathers.embeddings + gathers.head
            sums = reductions.embeddings + reductions.head
            sums = sums + self.layers * (reductions.layer + reductions.experts)
            messages = reduced * sums + gathered * (layers + ends) + again * layers
            copies = self.copy(reduced, reduced, gathered, again)
            time = np.where(serial, messages + copies, time)
        chosen = np.flatnonzero(shards & s.overlap)
        if len(chosen):
            time[chosen] = self.share_alone(chosen, kernels, gathers, reductions)
        # copies may fill time in which a device waits for its host
        time = np.maximum(time, 0.0)
        return np.asarray(np.where(s.replicated & s.overlap, self.times.buckets.device, time))

    def price_exchanges(self) -> tuple[UnitMessages, UnitMessages]:
        """Messages of the weights and of the gradients of each unit [s]."""
        s, sizes, ranks = self.s, self.sizes, self.s.owners
        shared = np.where(s.zero > 0, ranks, 1)
        gathers = _send(self, "all_gather", sizes.itemsize, shared)
        # with hybrid sharding, the sums of each group are added up over groups
        ways = (
            ("reduce_scatter", shared),
            ("all_reduce", ranks // shared),
            ("all_reduce", s.dp * s.cp // ranks, ranks, shared),
        )
        sent = [_send(self, name, sizes.summed, *how) for name, *how in ways if np.any(how[0] > 1)]
        reductions = np.zeros_like(gathers)
        for messages in sent:
            reductions = reductions + messages
        return UnitMessages(*gathers), UnitMessages(*reductions)

    def select_exchange(
        self, chosen: np.ndarray, kernels: Array, gathers: UnitMessages, reductions: UnitMessages
    ) -> Exchange:
        """What stages exchange, for the chosen strategies."""
        s, sizes, times = self.s, self.sizes, self.times

        def take(values: Any) -> Array:
            return np.broadcast_to(values, len(self.micro))[chosen]

        def take_all(messages: UnitMessages) -> UnitMessages:
            return UnitMessages(*(take(message) for message in messages))

        packing = times.packing * (s.dp * s.cp > 1)
        gathered = packing * sizes.gathered
        reduced = packing * sizes.reduced * np.where(s.zero > 0, 1.0, 2.0)
        reordered = packing * sizes.gathered * sizes.reordered
        weights = times.list_by_region(lambda region: region.weights)
        copies = [
            UnitTimes(
                take(one * weights[0]), take(one * weights[1] + reordered), take(one * weights[2])
            )
            for one in (gathered, reduced)
        ]
        several = s.pp > 1
        between = self.model.layers - self.stages[0].layers - self.stages[2].layers
        # in units of the largest of them
        inner = between / np.maximum(self.stages[1].layers, 1.0)
        # the host of a single stage waits for no messages between passes
        late = np.where(several | s.alone, 0.0, self.late / (2.0 * (self.layers + 2.0)))
        passes = [
            UnitTimes(take(one.embeddings + late), take(one.layer + late), take(one.head + late))
            for one in self.passes
        ]
        counts = (
            np.ones(len(self.micro)),
            np.where(s.pp > 2, inner, 0.0),
            np.where(several, 1.0, 0.0),
        )
        kinds = []
        for index, (stage, count) in enumerate(zip(self.stages, counts, strict=True)):
            hosts = (
                stage.forward_host,
                stage.backward_host,
                stage.first_host,
                stage.last_host,
            )
            kinds.append(
                StageKind(
                    take(count),
                    take(np.maximum(stage.layers, 1.0)),
                    take(np.full(len(self.micro), index == 0)),
                    take(np.where(several, index == 2, index == 0)),
                    *(take(np.where(several, host, 0.0)) for host in hosts),
                )
            )
        return Exchange(
            stages=(kinds[0], kinds[1], kinds[2]),
            micro=take(self.micro),
            chunks=take(s.chunks),
            pp=take(s.pp),
            zero=take(s.zero),
            overlap=take(s.overlap),
            put_off=take((s.schedule == "zero_bubble") & several),
            gpipe=take(s.schedule == "gpipe"),
            breadth_first=take(s.schedule == "breadth_first"),
            forward=passes[0],
            backward=passes[1],
            delayed=take(times.weight_gradients.device),
            gather_copies=copies[0],
            reduce_copies=copies[1],
            gathers=take_all(gathers),
            reductions=take_all(reductions),
            lead=take(self.lead),
            border=take(self.borders.inside / 2.0),
            contention=slow_passes(take(kernels), self.contention),
        )

    def find_rough(self) -> np.ndarray:
        """Whether the closed forms of strategies are rough: layers do not divide into chunks, or stages
        exchange weights or gradients with each micro-batch."""
        s = self.s
        unlike = self.model.layers % (s.pp * s.chunks) != 0
        unlike = unlike | (s.first_layers > 0) | (s.last_layers > 0)
        exchanges_often = s.scattered & (s.dp * s.cp > 1)
        unlike_stages = np.isin(s.schedule, ("gpipe", *partitions.CHUNKED)) & unlike
        rough = (s.pp > 1) & (self.regions <= 1) & (unlike_stages | exchanges_often)
        return np.asarray(rough)

    def run_passes(self, chosen: np.ndarray, kernel_share: Array, terms: dict[str, Array]) -> None:
        """Run the passes of the chosen strategies; the bubble is what their time is longer than
        the other terms, and messages of replicas are shorter if it would be below 0."""
        gathers, reductions = self.price_exchanges()
        exchange = self.select_exchange(chosen, kernel_share, gathers, reductions)
        chunks = _list_chunks(self, chosen, exchange)
        times = _run_pipelines(self, chosen, chunks)
        names = ("work", "tensor", "context", "experts", "host", "stages")
        busy: Any = sum(terms[name][chosen] for name in names)
        waits = np.maximum(times - busy, 0.0)
        replicas = np.minimum(terms["replicas"][chosen], waits)
        terms["replicas"][chosen] = replicas
        terms["bubble"][chosen] = waits - replicas
        short = np.minimum(times / busy, 1.0)
        for name in names:
            terms[name][chosen] = terms[name][chosen] * short

    def lengthen_pipeline(self, exchange: Exchange) -> Array:
        """Time that messages of replicas with each micro-batch add to stages that run 1F1B or H1
        [s]."""
        stages = []
        more: Any = 0.0
        for stage, kind in zip(self.stages, exchange.stages, strict=True):
            added = add_to_each_pass(exchange, kind)
            more = more + kind.number * (added.forward + added.backward + added.weights)
            stages.append(
                stage._replace(
                    forward=stage.forward + added.forward,
                    backward=stage.backward + added.backward + added.weights,
                    delayed=stage.delayed + added.weights,
                    landing=added.landed - added.backward,
                )
            )
        longer = _time_pipeline(
            self,
            (stages[0], stages[1], stages[2]),
            self.total + more,
            self.borders.all,
            self.between_regions,
        )
        return np.asarray(longer - self.pipeline)

    def share_alone(
        self,
        chosen: np.ndarray,
        kernels: Array,
        gathers: UnitMessages,
        reductions: UnitMessages,
    ) -> Array:
        """Time that messages of shards and the copies around them add to the passes of a single
        stage, for the chosen strategies [s].

        `kernels` is their share of a pass.
        """

        def take(values: Any) -> Array:
            return np.broadcast_to(values, len(self.micro))[chosen]

        s = self.s
        contention = self.contention * take(kernels)
        shards = select(self.shard_copies, chosen, len(self.micro))
        count = take(self.layers)
        layer_reduce = take(reductions.layer + reductions.experts)
        layer_gather = take(gathers.layer + gathers.experts)
        ends_reduce = take(reductions.embeddings + reductions.head)
        ends_gather = take(gathers.embeddings + gathers.head)
        gathers_again = take(s.zero > 2)
        scattered = take(s.scattered)
        again = np.where(gathers_again, layer_gather, 0.0)
        forward, backward = (
            ShardedPass(take(one.embeddings), take(one.layer), take(one.head), count)
            for one in self.passes
        )
        alone = [own.alone for own in (forward, backward)]
        # copies of shards ahead of the first two messages, and sums of the last shards, run beside
        # a message that the next pass waits for
        ahead, ahead_of_ends = shards.layer_ahead, shards.ends_ahead
        micro = take(self.micro)
        later = (micro - 1.0) / micro
        beside_gradients = np.where(scattered, later * (ahead_of_ends + ahead), 0.0)
        sums = np.where(scattered, take(self.added_ends), 0.0)
        forward = forward._replace(
            first=forward.first + shards.gather_ends - ahead_of_ends,
            layer=forward.layer + shards.gather_layer,
        )
        gathering, left = time_gathering_forward(
            forward, ends_gather, layer_gather, again, ahead, contention
        )
        gathering = gathering + ahead_of_ends - beside_gradients
        backward = backward._replace(
            first=backward.last,
            last=backward.first - sums,
            layer=backward.layer
            + shards.reorder
            + np.where(gathers_again, shards.regather_layer, 0.0),
        )
        scattering = time_scattering_backward(
            backward,
            ends_reduce,
            layer_reduce,
            again,
            left,
            shards.scatter_layer - shards.reorder,
            shards.scatter_ends,
            sums + beside_gradients,
            contention,
        )
        reduced, gathered = (take(often) for often in self.count_rounds()[:2])
        return np.asarray(gathered * (gathering - alone[0]) + reduced * (scattering - alone[1]))


class _Borders(NamedTuple):
    """Messages of a micro-batch between stages, forth and back [s].

    Over all borders; over the border of the first or last stage; over the slowest border inside a
    region; forth over the one border and back over the other border of a stage between the ends;
    over one between two regions, 0 if stages are in one region; and over a border that lies between
    nodes, and in a node.
    """

    all: Array
    end: Array
    inside: Array
    both_sides: Array
    far: Array
    across: Array
    local: Array


def _pass_on(own: _Iterations) -> _Borders:
    """Price the messages between stages.

    Stages are neighbours: with several stages in a node, only some borders are between nodes.
    """
    s, network, distance = own.s, own.platform.network, own.s.ranks // own.s.pp
    node, region = network.ranks_per_node, network.ranks // network.regions
    two = np.minimum(s.pp, 2)

    def price(count: Array, stride: Array) -> Array:
        return 2.0 * own.messages.time("send_recv", own.sizes.between, count, stride)

    several_nodes = np.minimum(s.ranks, region) > node
    across = price(two, np.where(several_nodes, np.maximum(distance, node), distance))
    local = price(two, distance)
    far = price(np.minimum(own.regions, 2), np.maximum(distance, region))
    # each stage is a region of its own
    separate = (own.regions > 1) & (distance >= region)
    across, local = (np.where(separate, 0.0, message) for message in (across, local))
    borders = s.pp - own.regions  # inside regions
    nodes = -(-s.ranks // node)
    between_nodes = np.where(2 * distance > node, borders, np.minimum(nodes - own.regions, borders))
    between_nodes = np.maximum(between_nodes, 0)
    total = across * between_nodes + local * (borders - between_nodes) + far * (own.regions - 1)
    inside = np.where(between_nodes > 0, across, local)
    end = np.where(2 * distance > node, across, local)
    # of several stages in a node, each has a neighbour in it
    both_sides = np.where(2 * distance > node, inside, (inside + local) / 2.0)
    return _Borders(total, end, inside, both_sides, far, across, local)


def _wait_for_regions(
    own: _Iterations, far: Array, near: Array, passes: Sequence[Array], shorter: Array
) -> Array:
    """Time by which messages between regions, `far`, make a micro-batch longer than others do [s].

    `passes` are those of a stage between the ends, which are `shorter` than those of the slowest
    stage with `near`, the messages that it already waits for [s].

    With 1F1B and H1 a stage takes a message when its last pass has ended, and k stages before the
    end of the pipeline only k + 1 micro-batches are on their way. Other schedules send while they
    compute: the longer of both counts, forth and back one after the other, or both at once
    (interleaved, but for its first passes).
    """
    s, regions, link = own.s, own.regions, own.platform.network.links.get("far")
    trips = np.maximum(0.5, (regions - 1) / (s.pp - s.pp / regions + 1))
    waits = np.maximum(trips * far - np.where(s.pp > regions, shorter, 0.0), 0.0) * (regions > 1)
    # many messages may be on their way
    sent = s.chunks * (far / 2.0 - (link.latency.value if link else 0.0))
    each = [np.maximum(sent - one, 0.0) for one in passes]
    # before both begin
    alone = np.minimum((2.0 * (s.pp - 1) + (s.chunks - 1) * s.pp) / (own.micro * s.chunks), 1.0)
    ways = {"interleaved": alone * sum(each) + (1.0 - alone) * np.maximum(sent - sum(passes), 0.0)}
    ways |= dict.fromkeys(("gpipe", "breadth_first"), np.maximum(sum(each) - near, 0.0))
    return np.select([s.schedule == name for name in ways], list(ways.values()), waits)


def _share_sequences(own: _Iterations) -> tuple[Array, Array]:
    """Exposed messages of a layer among ranks that share sequences [s], and their calls of the host
    [-], by phase.

    Keys and values go around a ring, beside attention, and then their gradients too; or tokens are
    exchanged for heads.
    """
    s, keys = own.s, own.sizes.keys
    step = own.messages.time(
        "send_recv", np.stack([2.0 * keys, 4.0 * keys]), np.minimum(s.cp, 2), s.tp
    )
    swapped = own.messages.time("all_to_all", own.sizes.swapped, np.where(s.ulysses, s.cp, 1), s.tp)
    attention = own.times.attention
    beside = np.stack([attention.forward.device, attention.backward.device])
    hosts = np.stack([attention.forward.host, attention.backward.host])
    passed = (s.cp - 1) * np.maximum(step - beside / s.cp, 0.0)
    # each with its kernel
    calls = (s.cp - 1) * (1.0 + hosts / own.times.call)
    return np.where(s.ulysses, 4.0 * swapped, passed), np.where(s.ulysses, 4.0 * (s.cp > 1), calls)


class _PassTimes(NamedTuple):
    """Times of a pass through one layer, the embeddings and the head, on the device and on its host
    [s]."""

    layer: Array
    embeddings: Array
    head: Array
    layer_host: Array
    embeddings_host: Array
    head_host: Array


class _Stage(NamedTuple):
    """A stage: its position from 0 and its layers [-], times of its two passes with their host, of
    the weight gradients in its backward pass that the schedule puts off, and of the messages that
    it waits for before its passes [s].

    Then by how much the host makes longer the forward pass, the backward pass, the weight gradients
    that are put off, and, of one chunk, the first forward and the last backward pass with messages
    of replicas that are sent once [s]; last what the stage waits for messages of replicas after
    each backward pass [s].
    """

    position: Array
    layers: Array
    forward: Array
    backward: Array
    delayed: Array
    forward_message: Array
    backward_message: Array
    forward_host: Array
    backward_host: Array
    delayed_host: Array
    first_host: Array
    last_host: Array
    landing: Array


def _list_stages(
    own: _Iterations, passes: Sequence[_PassTimes], borders: _Borders
) -> tuple[_Stage, _Stage, _Stage]:
    """The first stage, the last one of the largest between (without layers, if there is none), and
    the last stage.

    Notes
    -----
    Weight gradients that are put off are launched with the next forward pass, for which their host
    counts; behind the last backward pass the host waits for nothing, and only their kernels count.
    """
    s, (first_layers, inner_layers, last_layers) = own.s, own.ends
    inner_layers = np.where(s.pp > 2, inner_layers, 0)
    stated = (s.first_layers > 0) * 1 + (s.last_layers > 0)
    rest = own.model.layers - s.first_layers - s.last_layers
    # stages with one layer more come first
    longer = rest % np.maximum(s.pp - stated, 1)
    last_longer = np.where(s.first_layers > 0, longer, longer - 1)
    position = np.where(last_longer > 0, last_longer, s.pp - 2)
    position = np.clip(position, 1, np.maximum(s.pp - 2, 1))

    def make(position: Array, layers: Array, end: str, received: tuple[Array, Array]) -> _Stage:
        devices, hosts = [], []
        for one in passes:
            device, host = layers * one.layer, layers * one.layer_host
            host = host + 2.0 * s.chunks * (s.pp > 1) * own.times.call
            if end == "embeddings":
                device, host = device + one.embeddings, host + one.embeddings_host
            if end == "head":
                device, host = device + one.head, host + one.head_host
            devices.append(device)
            hosts.append(host)
        delayed = delayed_host = none
        if np.any(put_off):
            delayed = np.where(put_off, layers * own.times.weight_gradients.device, 0.0)
            delayed_calls = np.where(put_off, layers * own.times.weight_gradients.host, 0.0)
            # the weight gradients of a micro-batch are launched with the next forward pass
            [both_host] = own.join_passes([devices[0] + delayed], [hosts[0] + delayed_calls])
            [alone_host] = own.join_passes(devices[:1], hosts[:1])
            delayed_host = np.where(put_off, both_host - alone_host, 0.0)
            devices[1], hosts[1] = devices[1] - delayed, hosts[1] - delayed_calls
        forward_host, backward_host = own.join_passes(devices, hosts)
        first_host, last_host = own.join_exchanges(devices, hosts, layers, end)
        delayed = np.where(layers > 0, delayed + delayed_host, 0.0)
        forward = devices[0] + forward_host
        backward = devices[1] + backward_host + delayed
        forward, backward = (np.where(layers > 0, one, 0.0) for one in (forward, backward))
        return _Stage(
            position,
            layers,
            forward,
            backward,
            delayed,
            *received,
            forward_host,
            backward_host,
            np.where(layers > 0, delayed_host, 0.0),
            first_host,
            last_host,
            none,
        )

    none = np.zeros(len(borders.end))
    put_off = s.schedule == "zero_bubble"
    return (
        make(none, first_layers, "embeddings", (none, borders.end / 2.0)),
        make(position, inner_layers, "", (borders.both_sides / 2.0, borders.both_sides / 2.0)),
        make(s.pp - 1.0, last_layers, "head", (borders.end / 2.0, none)),
    )


class _Spread(NamedTuple):
    """Layers of the chunks of a pipeline: of the first one, of those between with a layer more and
    without, and of the last one; and the position, in all chunks, behind those with more [-]."""

    first: Array
    longer: Array
    shorter: Array
    last: Array
    with_more: Array


def _spread_chunks(layers: int, s: Strategy) -> _Spread:
    """Spread layers over chunks: the first ones have a layer more if they do not divide."""
    stated = (s.first_layers > 0) * 1 + (s.last_layers > 0)
    rest = layers - s.first_layers - s.last_layers
    each, more = np.divmod(rest, np.maximum(s.pp * s.chunks - stated, 1))
    return _Spread(
        first=np.where(s.first_layers > 0, s.first_layers, each + (more > 0)),
        longer=each + 1,
        # of two chunks, none lies between the ends
        shorter=np.maximum(each, 1),
        last=np.where(s.last_layers > 0, s.last_layers, each),
        with_more=more + (s.first_layers > 0),
    )


def _list_chunks(own: _Iterations, chosen: np.ndarray, exchange: Exchange) -> list[ChunkTimes]:
    """Times of the first chunk, with the embeddings; of those between with a layer more and
    without; and of the last one, with the head."""
    spread = _spread_chunks(own.model.layers, own.s)
    kinds = [
        (spread.first, "embeddings"),
        (spread.longer, ""),
        (spread.shorter, ""),
        (spread.last, "head"),
    ]
    return [_time_chunk(own, chosen, exchange, 1.0 * layers, end) for layers, end in kinds]


def _time_chunk(
    own: _Iterations, chosen: np.ndarray, exchange: Exchange, layers: Array, end: str
) -> ChunkTimes:
    """Times of the activities of a chunk of some layers and an end, if it has one, for the chosen
    strategies."""
    s, times = own.s, own.times
    put_off = s.schedule == "zero_bubble"

    def take(values: Array) -> Array:
        return np.broadcast_to(values, len(own.micro))[chosen]

    # of all chunks of a stage, as if they were alike
    devices, hosts = [], []
    for one in own.passes:
        device, host = layers * one.layer, layers * one.layer_host + 2.0 * times.call
        if end == "embeddings":
            device, host = device + one.embeddings, host + one.embeddings_host
        if end == "head":
            device, host = device + one.head, host + one.head_host
        devices.append(s.chunks * device)
        hosts.append(s.chunks * host)
    delayed = np.where(put_off, s.chunks * layers * times.weight_gradients.device, 0.0)
    delayed_calls = np.where(put_off, s.chunks * layers * times.weight_gradients.host, 0.0)
    devices[1], hosts[1] = devices[1] - delayed, hosts[1] - delayed_calls
    forward_copies, backward_copies, weights_copies = _list_exchange_work(own, layers, end)
    forward_host = _add_host(own, devices[0], hosts[0], forward_copies)
    backward_host = _add_host(own, devices[1], hosts[1], backward_copies)
    # the weight gradients of a micro-batch are launched with the next forward pass
    both = _HostedWork(
        delayed + forward_copies.device + weights_copies.device,
        delayed_calls + forward_copies.host + weights_copies.host,
    )
    both_hosts = _add_host(own, devices[0], hosts[0], both)
    delayed_host = np.where(put_off, both_hosts - forward_host, 0.0)
    first_host, last_host = own.join_exchanges(devices, hosts, s.chunks * layers, end)
    chunk = StageKind(
        number=np.ones(len(chosen)),
        layers=take(layers),
        has_embeddings=np.full(len(chosen), end == "embeddings"),
        has_head=np.full(len(chosen), end == "head"),
        forward_host=take(forward_host / s.chunks),
        backward_host=take(backward_host / s.chunks),
        first_host=take(first_host),
        last_host=take(last_host),
    )
    scattered = take(s.scattered)
    often = [np.where(scattered, time, 0.0) for time in add_to_each_pass(exchange, chunk)]
    often_added = Added(*often)
    once = [np.where(scattered, 0.0, time) for time in exchange_once(exchange, chunk)]
    once_added = AddedOnce(*once)
    return ChunkTimes(
        forward=take((devices[0] + forward_host) / s.chunks) + often_added.forward,
        backward=take((devices[1] + backward_host) / s.chunks) + often_added.backward,
        weights=take((delayed + delayed_host) / s.chunks) + often_added.weights,
        reduction=often_added.landed - often_added.backward,
        first_gather=once_added.gathering,
        later_gather=once_added.gathering_later,
        regather=once_added.regathering,
        last_reduction=once_added.reducing,
        tail=once_added.tail,
        queue=once_added.queue,
    )


class _HostedWork(NamedTuple):
    """Work of a pass beside its layers, on the device and on its host [s]."""

    device: Array
    host: Array


def _add_host(own: _Iterations, device: Array, host: Array, more: _HostedWork) -> Array:
    """Time that the host adds to a pass with more work [s]."""
    device = device + more.device
    return np.asarray(join_host(device, host + more.host, own.whole) - device)


def _list_exchange_work(
    own: _Iterations, layers: Array, end: str
) -> tuple[_HostedWork, _HostedWork, _HostedWork]:
    """Copies and calls around messages of replicas with each micro-batch, in the passes of all
    chunks of a stage with as many layers: forward, backward, and that of weight gradients which
    were put off.

    Without overlap the host launches the reductions behind a pass, with the pass that follows.
    """
    s, times, sizes = own.s, own.times, own.sizes
    often = np.where(s.scattered & (s.dp * s.cp > 1), s.chunks, 0.0)
    packing = often * times.packing
    end_weights = getattr(times, end).weights if end else 0.0
    ends = 1.0 if end else 0.0
    layer_copy = packing * (sizes.gathered * times.layer.weights)
    layer_copy = layer_copy + packing * sizes.gathered * sizes.reordered
    end_copy = packing * sizes.gathered * end_weights
    layer_reduce = packing * sizes.reduced * times.layer.weights
    layer_reduce = layer_reduce + packing * sizes.gathered * sizes.reordered
    end_reduce = packing * sizes.reduced * end_weights
    # a copy and a message, and one of experts
    experts_apart = (s.ep > 1) & (own.model.experts > 0)
    layer_calls = often * (2.0 + 1.0 * experts_apart) * times.call
    end_calls = 2.0 * often * ends * times.call
    again = np.where(s.zero > 2, layers, 0.0)
    put_off = s.schedule == "zero_bubble"
    in_backward = np.where(put_off, 0.0, layers)
    in_weights = np.where(put_off, layers, 0.0)
    forward = [layers * layer_copy + end_copy, layers * layer_calls + end_calls]
    backward = [again * layer_copy, again * layer_calls]
    reductions = [in_backward * layer_reduce + end_reduce, in_backward * layer_calls + end_calls]
    weights = [in_weights * layer_reduce, in_weights * layer_calls]
    several = own.micro > 1
    gpipe = s.schedule == "gpipe"
    beside_backward = s.overlap | (gpipe & several)
    beside_forward = ~s.overlap & ~gpipe & several
    for index in range(2):
        forward[index] = forward[index] + np.where(beside_forward, reductions[index], 0.0)
        backward[index] = backward[index] + np.where(beside_backward, reductions[index], 0.0)
    return _HostedWork(*forward), _HostedWork(*backward), _HostedWork(*weights)


def _run_pipelines(own: _Iterations, chosen: np.ndarray, kinds: Sequence[ChunkTimes]) -> Array:
    """Times of the chosen strategies, pass by pass [s]."""
    s = own.s.select(chosen)
    micro = own.micro[chosen]
    across, local = (message[chosen] / 2.0 for message in (own.borders.across, own.borders.local))
    ranks_of_stage = s.ranks // s.pp
    ranks_of_node = own.platform.network.ranks_per_node
    chunks_with_more = _spread_chunks(own.model.layers, s).with_more
    times = np.zeros(len(chosen))
    for index in range(len(chosen)):
        first, longer, shorter, last = (
            ChunkTimes(*(float(times_of_all[index]) for times_of_all in kind)) for kind in kinds
        )
        stages, chunks = int(s.pp[index]), int(s.chunks[index])
        between = range(1, stages * chunks - 1)
        in_order = [longer if place < chunks_with_more[index] else shorter for place in between]
        crosses = _cross_nodes(stages, int(ranks_of_stage[index]), ranks_of_node)
        times[index] = run_iteration(
            Schedule(
                name=str(s.schedule[index]),
                stages=stages,
                micro_batches=int(micro[index]),
                chunks=chunks,
                scattered=bool(s.scattered[index]),
            ),
            PipelineTimes(
                chunks=[first, *in_order, last],
                stages=stages,
                messages=[float(across[index] if far else local[index]) for far in crosses],
            ),
        )
    return times


def _cross_nodes(stages: int, ranks: int, ranks_of_node: int) -> list[bool]:
    """Whether stages of as many ranks each send messages between nodes to the stage behind them,
    the last one to the first one."""
    ends = [(stage * ranks, (stage + 2) * ranks - 1) for stage in range(stages - 1)]
    ends.append((0, stages * ranks - 1))
    return [first // ranks_of_node != last // ranks_of_node for first, last in ends]


def _add_up_stages(own: _Iterations, stages: tuple[_Stage, _Stage, _Stage]) -> Array:
    """Time of a micro-batch on all stages, one after the other, without messages [s]."""
    first, inner, last = (stage.forward + stage.backward for stage in stages)
    between = own.model.layers - stages[0].layers - stages[2].layers
    return np.asarray(first + last + inner * between / np.maximum(stages[1].layers, 1.0))


def _find_slowest_passes(stages: Sequence[_Stage]) -> tuple[Array, Array]:
    """The longest forward pass of all stages, and the longest backward pass [s]."""
    forward = np.maximum.reduce([stage.forward for stage in stages])
    backward = np.maximum.reduce([stage.backward for stage in stages])
    return forward, backward


def _time_gpipe(
    own: _Iterations, stages: tuple[_Stage, _Stage, _Stage], total: Array, message: Array
) -> Array:
    """Time of all micro-batches on stages that run all forward passes before all backward ones
    (GPipe) [s].

    `total` is the time of a micro-batch on all stages with the messages between them, of which
    `message` is the longest.

    Notes
    -----
    The passes of one phase are a flow shop of m equal jobs: a way through it goes from stage to
    stage with one micro-batch and stays on one stage for the other m - 1, so that the longest takes
    the sum of all stages and m - 1 times the slowest. A link between stages, which sends one
    message after another, is a stage like others.
    """
    forward, backward = _find_slowest_passes(stages)
    slowest = np.maximum(forward, message) + np.maximum(backward, message)
    return np.asarray(total + (own.micro - 1.0) * slowest)


def _pass_both_ends(own: _Iterations, passes: Sequence[_PassTimes], borders: _Borders) -> Array:
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
    s, micro = own.s, own.micro
    first_layers, _, last_layers = own.ends
    interleaved = (s.schedule == "interleaved") & (micro > s.pp)
    met = np.where(interleaved, s.pp, micro)
    chunk_changes = np.maximum(s.chunks - 1.0, 1.0)
    _, around = own.count_passes()
    messages = (borders.all + borders.inside) / 2.0
    time = np.zeros(len(micro))
    for one in passes:
        first_end = one.embeddings + (first_layers - own.layers) * one.layer
        last_end = one.head + (last_layers - own.layers) * one.layer
        faster_end = np.maximum(np.minimum(first_end, last_end), 0.0)
        gap = around / chunk_changes * own.layers * one.layer + messages
        taken_off = np.minimum((met - 1.0) * faster_end, np.maximum(gap, 0.0))
        added = np.where(interleaved, met * faster_end, 0.0)
        time = time + added - taken_off
    return time


def _time_pipeline(
    own: _Iterations,
    stages: tuple[_Stage, _Stage, _Stage],
    total: Array,
    messages: Array,
    between_regions: Array,
) -> Array:
    """Time of all micro-batches on stages that run 1F1B or H1 [s].

    `total` is the time of a micro-batch on all stages with the `messages` between them; those
    `between_regions` make each micro-batch of a stage longer.

    Notes
    -----
    Each stage gives a bound, and the largest one is the time. Stage k of p starts when the first
    micro-batch has passed the k stages before it, is busy with m micro-batches, and is followed by
    the last backward pass of these k stages. It waits twice for the stages behind it, which take R
    for a round trip: once until its first micro-batch returns, while it has d = p - 1 - k further
    forward passes to do, and once until its last one returns, while it has as many backward passes
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
    s, micro = own.s, own.micro
    first_stage, inner_stage, last_stage = stages
    first_time, inner_time = (stage.forward + stage.backward for stage in stages[:2])
    time = np.zeros(len(micro))
    for stage in stages:
        position, busy = stage.position, stage.forward + stage.backward
        message = stage.forward_message + stage.backward_message + between_regions
        before = np.where(position > 0, first_time + (position - 1.0) * inner_time, 0.0)
        before = before + position / np.maximum(s.pp - 1.0, 1.0) * messages
        is_first = position == 0
        is_last = position == s.pp - 1
        before = np.where(is_last, total - busy, np.minimum(before, total - busy))
        behind = np.where(is_last, 0.0, total - busy - before)
        stages_behind = s.pp - 1.0 - position
        inner_stages_before = np.maximum(position - 1.0, 0.0)
        inner_stages_behind = np.maximum(stages_behind - 1.0, 0.0)
        meanwhile = np.minimum(stages_behind, micro - 1.0)
        # waits for the stages behind
        delayed_behind = inner_stages_behind * inner_stage.delayed + last_stage.delayed
        round_trip = np.where(is_last, 0.0, behind - delayed_behind)
        forward = stage.forward + stage.forward_message
        backward = stage.backward + stage.backward_message
        first_of_last_passes = np.maximum(micro - 1.0 - meanwhile, position)
        delayed_meanwhile = np.maximum(micro - 1.0 - first_of_last_passes, 0.0)
        not_meanwhile = (meanwhile - delayed_meanwhile) * stage.delayed
        first_wait = np.maximum(round_trip - meanwhile * forward, 0.0)
        last_wait = np.maximum(round_trip - (meanwhile * backward - not_meanwhile), 0.0)
        one_wait = micro <= meanwhile + 1.0
        waits = np.where(one_wait, np.maximum(first_wait, last_wait), first_wait + last_wait)
        # weight gradients that are left after the last backward pass
        delayed_alone = stage.delayed - stage.delayed_host
        left = np.minimum(position + 1.0, micro) * delayed_alone
        last_passes = (first_stage.backward - first_stage.delayed) + inner_stages_before * (
            inner_stage.backward - inner_stage.delayed
        )
        afterwards = last_passes + first_stage.delayed - first_stage.delayed_host
        longer_end = np.where(is_first, 0.0, np.maximum(left - afterwards, 0.0))
        saved = inner_stages_before * inner_stage.delayed + first_stage.delayed_host
        saved = saved + np.where(is_first, 0.0, np.minimum(position + 1.0, micro) * stage.delayed)
        hidden_messages = np.maximum(micro - s.pp, 0.0) * np.minimum(
            stage.forward_message, stage.delayed
        )
        passes = micro * (busy + message + stage.landing) - message - hidden_messages
        passes = passes + np.where(is_first, 0.0, first_stage.landing - stage.landing)
        bound = before + passes + waits + longer_end - saved
        # of two stages, none lies between the ends
        time = np.where(stage.layers > 0, np.maximum(time, bound), time)
    return time


def _send(
    own: _Iterations, operation: str, itemsize: float, ranks: Array, apart: Any = 1, part: Any = 1
) -> Array:
    """Times of messages of weights of the embeddings, of a layer, of the head, and of the experts
    of a layer, which fewer ranks share [s]."""
    s, layer = own.s, own.times.layer.weights
    # those that all replicas hold go with the rest of their layer
    apart_from_layer = (s.ep > 1) & (own.model.experts > 0)
    experts = np.where(apart_from_layer, own.sizes.experts, 0.0)
    few = np.where(apart_from_layer, np.maximum(ranks // s.ep, 1), 1)
    embeddings, head = own.times.embeddings.weights, own.times.head.weights
    # replicas of the whole model send both ends in one message
    together = s.alone & (s.zero > 0)
    sizes = np.stack(
        [
            np.where(together, embeddings + head, embeddings),
            layer - experts,
            np.where(together, 0.0, head),
            experts,
        ]
    )
    near = s.tp * apart * np.ones_like(few)
    rows = 4 if own.model.experts else 3
    messages = np.zeros(sizes.shape)
    messages[:rows] = own.messages.time(
        operation,
        itemsize * sizes[:rows] / part,
        np.stack([ranks, ranks, np.where(together, 1, ranks), few])[:rows],
        np.stack([near, near, near, near * s.ep])[:rows],
    )
    return np.where(sizes > 0, messages, 0.0)
