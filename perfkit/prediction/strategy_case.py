"""What the closed forms of strategies start from: one micro-batch of each strategy, its sizes, and
how layers are spread over stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.units import Array, show
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.models.partitions import Schedule, find_schedules
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import find_contention
from perfkit.prediction.levels import find_level
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.micro_batches import (
    MicroBatchTimes,
    RegionTimes,
    Sizes,
    add_casts_once,
    add_gradient_sums,
    compute_attention_again,
    count_shards,
    fuses_sums,
    gathers_fp8,
    keeps_fp8,
    name_recorded,
    price_micro_batch,
    reorders_tokens,
    share_attention_on_ring,
    size_micro_batch,
    time_gradient_sums,
)
from perfkit.prediction.offload import OffloadSizes, size_offload
from perfkit.prediction.strategy_records import ByRegion, Group, join_groups, map_arrays, select
from perfkit.prediction.unlike_layers import PricedKind, mix_layers
from perfkit.workloads.layer_kinds import LayerKind, has_unlike_layers, list_kinds
from perfkit.workloads.stack import Stack, StackedWork
from perfkit.workloads.strategy import Strategy, spread_layers
from perfkit.workloads.transformer import Transformer, check_checkpoint


class StageLayers(NamedTuple):
    """Layers of the stages of a pipeline.

    Parameters
    ----------
    first, inner, last : array
        Of the first stage, of the largest one between the ends, and of the last one; with two
        stages or one, `inner` is the larger of both [-].
    """

    first: Array
    inner: Array
    last: Array


class SlowestEnd(NamedTuple):
    """Which stage of a pipeline is the slowest.

    Parameters
    ----------
    is_first : array of bool
        Whether the first stage takes longer than the last one [-].
    is_between : array of bool
        Whether stages between them take longer than both [-].
    """

    is_first: np.ndarray
    is_between: np.ndarray


@dataclass(frozen=True)
class Case:
    """Many strategies before their iterations are timed; arrays have an element for each.

    Parameters
    ----------
    model : Transformer
        The model.
    messages : MessageTimes
        Times of messages on the platform.
    execution : str
        ``eager``, ``compiled`` or ``graphs``.
    s : Strategy
        Each field an array.
    sizes : Sizes
        Sizes of a micro-batch and its messages.
    times : MicroBatchTimes
        One micro-batch, with sums of gradients in its backward pass. Where some layers are computed
        again and others are not, its layer is the mean of both.
    running : MicroBatchTimes
        The same, whose layer is the last one of a chunk: it is not computed again where others are
        not; for memory.
    saved_again : array
        Activations that a layer which is computed again saves [B].
    end_shard_sums : array
        Sums of shards outside of layers, which are part of these times [s].
    all_layers : array
        Layers of the model, without those that go with the embeddings [-].
    leading, leading_saved : array
        Layers that go with the embeddings, see `perfkit.prediction.unlike_layers` [-], and what these
        keep for the backward pass of a micro-batch [B].
    experts_share : array
        Share of all other layers that has experts [-].
    stage_layers : StageLayers
        Layers of stages.
    slowest_end : SlowestEnd
        Which stage is the slowest.
    weights : array
        Numbers of the weights of the largest stage [-].
    regions : array
        Regions of the network that have stages of their own [-].
    contention : float
        Share of the speed of kernels that collectives beside them take [-].
    whole : Iteration or None
        What was fitted to whole iterations of several ranks.
    level_scale : array
        Factor on all times, the level of the software of each strategy [-].
    level_spread : array
        Spread of the level of the software; nan without one [-].
    as_megatron : array of bool
        Whether Megatron-LM's rules say what is held in memory [-].
    offload : OffloadSizes
        What is copied to hosts and updated there.
    """

    model: Transformer
    messages: MessageTimes
    execution: str
    s: Strategy
    sizes: Sizes
    times: MicroBatchTimes
    running: MicroBatchTimes
    saved_again: Array
    end_shard_sums: Array
    all_layers: Array
    leading: Array
    leading_saved: Array
    experts_share: Array
    stage_layers: StageLayers
    slowest_end: SlowestEnd
    weights: Array
    regions: Array
    contention: float
    whole: Iteration | None
    level_scale: Array
    level_spread: Array
    as_megatron: np.ndarray
    offload: OffloadSizes

    def select(self, chosen: np.ndarray) -> "Case":
        """Take some of the strategies.

        Parameters
        ----------
        chosen : array of int
            Their positions [-].

        Returns
        -------
        case : Case
            These alone.
        """
        return replace(
            self,
            s=self.s.select(chosen),
            sizes=select(self.sizes, chosen, self.count),
            times=select(self.times, chosen, self.count),
            running=select(self.running, chosen, self.count),
            saved_again=self.saved_again[chosen],
            end_shard_sums=self.end_shard_sums[chosen],
            all_layers=self.all_layers[chosen],
            leading=self.leading[chosen],
            leading_saved=self.leading_saved[chosen],
            experts_share=self.experts_share[chosen],
            stage_layers=select(self.stage_layers, chosen, self.count),
            slowest_end=select(self.slowest_end, chosen, self.count),
            weights=self.weights[chosen],
            regions=self.regions[chosen],
            level_scale=self.level_scale[chosen],
            level_spread=self.level_spread[chosen],
            as_megatron=self.as_megatron[chosen],
            offload=select(self.offload, chosen, self.count),
        )

    @property
    def platform(self) -> Platform:
        """Where the ranks are."""
        return self.messages.platform

    @property
    def count(self) -> int:
        """Strategies [-]."""
        return len(self.weights)

    @property
    def micro(self) -> Array:
        """Micro-batches of a replica [-]."""
        return self.sizes.micro

    @property
    def layers(self) -> Array:
        """Layers of the largest stage between the ends [-]."""
        return self.stage_layers.inner

    @cached_property
    def has_replicas(self) -> np.ndarray:
        """Whether several ranks hold the same weights, and exchange gradients."""
        return np.asarray(self.s.dp * self.s.cp > 1)

    @cached_property
    def has_messages(self) -> np.ndarray:
        """Whether gradients go to other ranks or to the host."""
        return np.asarray(self.has_replicas | self.s.offloads_optimizer)

    @cached_property
    def has_stages(self) -> np.ndarray:
        """Whether the model has several stages."""
        return np.asarray(self.s.pp > 1)

    @cached_property
    def has_experts(self) -> np.ndarray:
        """Whether experts are shared by other ranks than the rest of a layer."""
        return np.asarray(self.s.shares_experts & (self.model.experts > 0))

    @cached_property
    def shards_alone(self) -> np.ndarray:
        """Whether replicas share states of the whole model and nothing else, as with FSDP."""
        return np.asarray(self.s.alone & (self.s.zero > 0))

    @cached_property
    def in_buckets(self) -> np.ndarray:
        """Whether gradients are reduced in buckets beside the backward pass, as with
        DistributedDataParallel."""
        return np.asarray(self.s.replicated & self.s.overlap)

    @cached_property
    def schedule(self) -> Schedule:
        """What is known of the schedule of each strategy; each field is an array."""
        return find_schedules(self.s.schedule)

    @cached_property
    def alternates(self) -> np.ndarray:
        """Whether there are several stages, which do a forward and a backward pass in turn."""
        return np.asarray(self.schedule.alternates & self.has_stages)

    @cached_property
    def runs_phase_by_phase(self) -> np.ndarray:
        """Whether there are several stages, which do all forward passes and then all backward
        passes."""
        return np.asarray(self.schedule.runs_phase_by_phase & self.has_stages)

    @cached_property
    def is_timed_by_passes(self) -> np.ndarray:
        """Whether there are several stages, whose passes are added up one after another: those of
        one chunk. Of chunks the bubble is added to the work of the slowest stage."""
        return np.asarray(self.alternates | self.runs_phase_by_phase)

    @cached_property
    def holds_both_ends(self) -> np.ndarray:
        """Whether the first stage holds embeddings and head: a single one, and that of a V."""
        return np.asarray(np.logical_not(self.has_stages) | self.schedule.is_v_shaped)

    @cached_property
    def meets_both_ends(self) -> np.ndarray:
        """Whether embeddings and head both slow down the slowest stage."""
        return _meets_both_ends(self.s, self.micro)


def make_case(platform: Platform, work: StackedWork) -> Case:
    """Price one micro-batch of each strategy, and spread its layers over stages.

    Parameters
    ----------
    platform : Platform
        GPUs.
    work : StackedWork
        The model, strategies whose fields are arrays, how they are executed, and the software.

    Returns
    -------
    case : Case
        What closed forms start from.

    Raises
    ------
    ValueError
        For checkpoints that the model cannot have.
    """
    model, execution = work.workload, work.execution
    strategies: Strategy = work.strategy
    check_checkpoints_of(model, strategies)
    s = strategies.without_idle_zero().settle_checkpoints(model.all_layers)
    messages = MessageTimes(platform)
    pads_products = np.array([stack.pads_products for stack in work.stacks])
    kinds = list_kinds(model)
    layers = [_price_layer(kind, messages, s, execution, pads_products) for kind in kinds]
    mix = mix_layers(model, [layer.priced for layer in layers], s)
    s, sizes, times = mix.s, mix.sizes, mix.times
    running, saved_again = times, times.layer.saved
    if np.any(s.runs_plain_layers):
        # `check_checkpoints_of` refuses several kinds
        [layer] = layers
        running, saved_again = layer.plain, layer.again.layer.saved
    stage_layers = StageLayers(*spread_layers(mix.layers, s))
    whole = platform.context.find_iteration(model.family, 2)
    levels = _find_levels(platform, model, work.stacks, s)
    strategies_shape = np.shape(s.ranks)
    return Case(
        model=model,
        messages=messages,
        execution=execution or "eager",
        s=s,
        sizes=sizes,
        times=times,
        running=running,
        saved_again=saved_again,
        end_shard_sums=layers[0].end_shard_sums,
        all_layers=mix.layers,
        leading=mix.leading,
        leading_saved=mix.leading_saved,
        experts_share=mix.experts_share,
        stage_layers=stage_layers,
        slowest_end=_find_slowest_end(times, stage_layers),
        weights=_count_weights(times, s, sizes, stage_layers),
        regions=_count_regions(platform, s),
        contention=find_contention(platform, whole),
        whole=whole,
        level_scale=np.broadcast_to(levels.scale, strategies_shape),
        level_spread=np.broadcast_to(levels.spread, strategies_shape),
        as_megatron=find_megatron(work.stacks, s),
        offload=size_offload(model, s, sizes, platform),
    )


class _PricedLayer(NamedTuple):
    """A micro-batch of a model whose layers are all of one kind: in the mean of its layers, with a
    layer that is computed again and with one that is not; and sums of shards outside of layers [s]."""

    priced: PricedKind
    again: MicroBatchTimes
    plain: MicroBatchTimes
    end_shard_sums: Array


def _price_layer(
    kind: LayerKind,
    messages: MessageTimes,
    s: Strategy,
    execution: str | None,
    pads_products: np.ndarray,
) -> _PricedLayer:
    """Price a micro-batch whose layers are all of one kind."""
    sizes = size_micro_batch(kind.model, s)
    again = price_micro_batches(kind.model, messages, s, execution, pads_products)
    plain, mean = again, again
    if np.any(s.runs_plain_layers):
        plain = price_micro_batches(
            kind.model, messages, _compute_nothing_again(s), execution, pads_products
        )
        stages = StageLayers(*spread_layers(kind.model.all_layers, s))
        mean = _average_layers(again, plain, share_recomputed(s, stages.inner))
        mean = _run_groups(mean, plain, s, stages.inner)
    sums = time_gradient_sums(mean, s, sizes)
    times = add_casts_once(add_gradient_sums(mean, sums, s), sizes)
    end_shard_sums = sums.embeddings.shards.device + sums.head.shards.device
    return _PricedLayer(PricedKind(kind, sizes, times), again, plain, end_shard_sums)


def check_checkpoints_of(model: Transformer, strategies: Strategy) -> None:
    """Check that the layers of a model can compute again what strategies say.

    Parameters
    ----------
    model : Transformer
        The model.
    strategies : Strategy
        One or many.

    Raises
    ------
    ValueError
        For parts that no layer has, for more layers or larger groups than there are layers, and for
        some layers or groups of several kinds.
    """
    for name in np.unique(strategies.checkpoint).tolist():
        check_checkpoint(model, name)
    too_many = strategies.is_partial & np.greater(strategies.checkpoint_layers, model.all_layers)
    if np.any(too_many):
        wrong = np.broadcast_to(strategies.checkpoint_layers, np.shape(too_many))[too_many][0]
        raise ValueError(
            f"checkpoint_layers is {wrong:g} and the model has {model.all_layers} layers; take at most "
            "these, or leave it out for all of them"
        )
    groups = np.max(strategies.checkpoint_group)
    if groups > model.all_layers:
        raise ValueError(
            f"checkpoint_group is {groups:g} and the model has {model.all_layers} layers; take at most these"
        )
    are_grouped = np.any(strategies.groups_layers)
    if are_grouped and (has_unlike_layers(model) or model.mtp_layers):
        raise ValueError(
            f"checkpoint_group is {show(strategies.checkpoint_group)} and layers of the model are of several "
            "kinds, of which nothing says how many share a group; leave checkpoint_group out"
        )
    are_partial = np.any(strategies.settle_checkpoints(model.all_layers).is_partial)
    if are_partial and has_unlike_layers(model):
        raise ValueError(
            f"checkpoint_layers is {show(strategies.checkpoint_layers)} and layers of the model are of "
            "several kinds, of which nothing says how many go with some; leave checkpoint_layers out"
        )


def share_recomputed(s: Strategy, layers: Array) -> Array:
    """Find the share of the layers of a stage that compute again what `checkpoint` says.

    Parameters
    ----------
    s : Strategy
        Each field an array; see `Strategy.settle_checkpoints`.
    layers : array
        Layers of the stage [-].

    Returns
    -------
    share : array
        min(k c / l, 1), with k `checkpoint_layers` of each of c chunks [-].
    """
    counted = np.minimum(s.checkpoint_layers * s.chunks, layers)
    return np.where(s.is_partial, counted / np.maximum(layers, 1), 1.0)


def _compute_nothing_again(s: Strategy) -> Strategy:
    """The same strategies, of whose layers those that are not computed again stand for all."""
    return replace(s, checkpoint=name_running(s), checkpoint_layers=EVERY_LAYER, checkpoint_group=1)


def name_running(s: Strategy) -> np.ndarray:
    """Name the checkpoints of the last layer of a chunk while it runs.

    Parameters
    ----------
    s : Strategy
        Each field an array.

    Returns
    -------
    names : array of str
        ``none`` where it runs plain, see `Strategy.runs_plain_layers`.
    """
    return np.where(s.runs_plain_layers, "none", s.checkpoint)


def count_groups_of_layers(s: Strategy, layers: Array) -> Array:
    """Count the groups of layers that are computed again together.

    Parameters
    ----------
    s : Strategy
        Each field an array.
    layers : array
        Layers of a stage [-].

    Returns
    -------
    groups : array
        Of the stage; the last one of a chunk may be smaller [-].
    """
    return np.asarray(s.chunks * np.ceil(layers / s.chunks / s.checkpoint_group))


def _run_groups(
    again: MicroBatchTimes, plain: MicroBatchTimes, s: Strategy, layers: Array
) -> MicroBatchTimes:
    """The same where layers are computed again in groups: only the last layer of a group does without
    the result of its forward pass, which the others hand on."""
    share = 1.0 - count_groups_of_layers(s, layers) / np.maximum(layers, 1.0)
    share = np.where(s.groups_layers, share, 0.0)

    def add(forward: Array, of_again: Array, of_plain: Array) -> Array:
        left_out = np.maximum(forward - (of_again - of_plain), 0.0)
        return np.where(share > 0, of_again + share * left_out, of_again)

    layer = again.layer
    backward = map_arrays(add, plain.layer.forward, layer.backward, plain.layer.backward)
    return again._replace(layer=layer._replace(backward=backward))


def _average_layers(
    again: MicroBatchTimes, plain: MicroBatchTimes, share: Array
) -> MicroBatchTimes:
    """Times whose layer is the mean of one that is computed again, of which there is a `share`, and
    one that is not."""

    def average(of_again: Array, of_plain: Array) -> Array:
        return np.where(share < 1.0, share * of_again + (1.0 - share) * of_plain, of_again)

    return map_arrays(average, again, plain)


def _count_regions(platform: Platform, s: Strategy) -> Array:
    """Regions that have stages of their own: those that ranks fill, of which each has a stage at
    least [-]."""
    network = platform.network
    # rounded up
    filled = -(-s.ranks * network.regions // network.ranks)
    return np.minimum(filled, np.minimum(network.regions, s.pp))


def find_megatron(stacks: Sequence[Stack], s: Strategy) -> np.ndarray:
    """Find out whose memory is held by the rules of Megatron-LM: where its software runs, and ranks
    share more than the batch, but neither gradients nor weights.

    Parameters
    ----------
    stacks : sequence of Stack
        The software of each strategy, or one for all.
    s : Strategy
        Each field an array.

    Returns
    -------
    are : array of bool
        For each strategy.
    """
    follows = np.array([stack.memory == "megatron" for stack in stacks])
    return np.asarray(follows & ~s.replicated & (s.zero < 2))


class _Levels(NamedTuple):
    """Levels of the software of strategies: factors on times, and spreads, which are nan without a
    level [-]."""

    scale: Array
    spread: Array


def _find_levels(
    platform: Platform, model: Transformer, stacks: Sequence[Stack], s: Strategy
) -> _Levels:
    """Find the level of the software of each strategy."""
    ranks = np.atleast_1d(s.ranks)
    numbers: dict[Stack, int] = {}
    for stack in stacks:
        if stack not in numbers:
            numbers[stack] = len(numbers)
    of_strategy = np.array([numbers[stack] for stack in stacks])
    of_strategy = np.broadcast_to(of_strategy, len(ranks))
    scales = np.ones(len(ranks))
    spreads = np.full(len(ranks), np.nan)
    for stack, number in numbers.items():
        for count in np.unique(ranks[of_strategy == number]).tolist():
            is_alike = (of_strategy == number) & (ranks == count)
            level = find_level(platform, stack, model, count)
            if level is None:
                continue
            scales[is_alike] = level["scale"]
            spreads[is_alike] = level.spread
    return _Levels(scales, spreads)


def price_micro_batches(
    model: Transformer,
    messages: MessageTimes,
    s: Strategy,
    execution: str | None,
    pads_products: np.ndarray,
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
        ``eager``, ``compiled`` or ``graphs``.
    pads_products : array of bool
        Whether what compiles each strategy pads the sides of products, see `Stack.pads_products`;
        one element for all, or one for each [-].

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
    pads = np.broadcast_to(pads_products & (execution == "compiled"), np.shape(s.ranks))
    structures = _number_structures(model, s, pads)
    micro_batches = model.batch / (s.dp * s.micro_batch)
    several = np.broadcast_to(micro_batches > 1, structures.shape)
    groups = []
    for number in np.unique(structures):
        members = np.flatnonzero(structures == number)
        codes = _number_sizes(s, several, members)
        _, first, rows = np.unique(codes, return_index=True, return_inverse=True)
        chosen = members[first]
        times = price_micro_batch(
            model,
            messages,
            s.select(chosen),
            several[chosen],
            execution,
            pads_products=bool(pads[members[0]]),
        )
        groups.append(Group(members, rows, times))
    times = share_attention_on_ring(join_groups(groups, len(structures)), s)
    return compute_attention_again(times, s)


def _number_structures(model: Transformer, s: Strategy, pads: np.ndarray) -> np.ndarray:
    """Number the graphs of strategies: those with equal numbers differ in their sizes alone [-]."""
    flags = [
        np.unique(name_recorded(s.checkpoint), return_inverse=True)[1],
        s.rows > 1,
        s.tp > 1,
        s.replicated,
        fuses_sums(model, s),
        keeps_fp8(model, s),
        gathers_fp8(model, s),
        s.buffers,
        pads,
    ]
    if model.experts:
        shares_expert = s.spreads_experts & (s.ranks_of_expert > 1)
        flags += [s.spreads_experts, shares_expert, reorders_tokens(model, s)]
    return _number_alike(flags, np.shape(s.ranks))


def _number_sizes(s: Strategy, several: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Number what sets the sizes of those strategies whose graphs have one structure, at `members`:
    those with equal numbers take as long [-]."""
    different = [s.micro_batch, s.tp, s.cp, s.ep, s.etp]
    if np.any(s.tiled):  # tiles hide messages behind other products where these are put off
        different += [s.tiled, s.puts_off_weights]
    if s.replicated[members[0]]:  # what buckets take depends on their ranks
        different += [s.dp, several]
    columns = [np.asarray(column)[members] for column in different]
    return _number_alike(columns, members.shape)


def _number_alike(columns: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Number elements whose columns are all equal alike [-]."""
    counts = [np.broadcast_to(column, shape).astype(np.int64) for column in columns]
    return np.ravel_multi_index(counts, [column.max() + 1 for column in counts])


def stack_compute(region: RegionTimes) -> Array:
    """Time of the kernels of a region in its forward and backward pass, a row each [s]."""
    return np.array([region.forward.device, region.backward.device])


def stack_tensor_messages(region: RegionTimes) -> Array:
    """Time of its messages among ranks that share layers, a row for each pass [s]."""
    return np.array([region.forward.tensor_messages, region.backward.tensor_messages])


def stack_calls(region: RegionTimes) -> Array:
    """Time of its calls of the host, a row for each pass [s]."""
    return np.array([region.forward.host, region.backward.host])


def find_ends(stage_layers: StageLayers, by_region: ByRegion[Array]) -> tuple[Array, Array]:
    """Find what the stages at the ends have more than one between them.

    Parameters
    ----------
    stage_layers : StageLayers
        Layers of stages.
    by_region : ByRegion of array
        A quantity of each region.

    Returns
    -------
    first, last : array
        The quantity in the embeddings and the head, and in the layers by which the first and the
        last stage differ.
    """
    first = by_region.embeddings + (stage_layers.first - stage_layers.inner) * by_region.layer
    last = by_region.head + (stage_layers.last - stage_layers.inner) * by_region.layer
    return first, last


def _meets_both_ends(s: Strategy, micro: Array) -> np.ndarray:
    """Whether embeddings and head both slow down the slowest stage: one that holds both, or of
    chunks that follow one another."""
    schedule = find_schedules(s.schedule)
    follows = schedule.runs_breadth_first | (micro <= s.pp)
    return np.asarray((s.pp == 1) | schedule.is_v_shaped | follows & (s.chunks > 1))


def _find_slowest_end(times: MicroBatchTimes, stage_layers: StageLayers) -> SlowestEnd:
    """Find which stage takes longest with its kernels and its messages."""
    compute = times.list_by_region(stack_compute)
    messages = times.list_by_region(stack_tensor_messages)
    first, last = find_ends(stage_layers, map_arrays(np.add, compute, messages))
    first, last = first.sum(axis=0), last.sum(axis=0)
    return SlowestEnd(is_first=first > last, is_between=np.maximum(first, last) < 0.0)


def _count_weights(
    times: MicroBatchTimes, s: Strategy, sizes: Sizes, stage_layers: StageLayers
) -> Array:
    """Numbers of the weights of the largest stage [-]."""
    weights = times.list_by_region(lambda region: region.weights)
    first, last = find_ends(stage_layers, weights)
    larger = np.maximum(np.maximum(first, last), 0.0)
    both = np.maximum(first, 0.0) + np.maximum(last, 0.0)
    ends = np.where(_meets_both_ends(s, sizes.micro), both, larger)
    return np.asarray(stage_layers.inner * weights.layer + ends)


def add_slowest_end(case: Case, by_region: ByRegion[Array]) -> Array:
    """Find what embeddings, head and unequal layers add to the slowest stage.

    Parameters
    ----------
    case : Case
        Strategies.
    by_region : ByRegion of array
        Times of each region, a row for each pass [s].

    Returns
    -------
    added : array
        Its time beyond that of `Case.layers` layers, in all passes [s].

    Notes
    -----
    With GPipe all forward passes come before all backward ones, and each phase has its own slowest
    stage.
    """
    first_passes, last_passes = find_ends(case.stage_layers, by_region)
    first, last = first_passes.sum(axis=0), last_passes.sum(axis=0)
    slowest = np.where(case.slowest_end.is_first, first, last)
    slowest = np.where(case.slowest_end.is_between, 0.0, slowest)
    phase_by_phase = np.maximum(np.maximum(first_passes, last_passes), 0.0).sum(axis=0)
    slowest = np.where(case.schedule.runs_phase_by_phase, phase_by_phase, slowest)
    both = np.maximum(first, 0.0) + np.maximum(last, 0.0)
    # a frozen first layer takes less than others, which is taken from the embeddings
    both = np.where(case.holds_both_ends, first + last, both)
    return np.asarray(np.where(case.meets_both_ends, both, slowest))


def add_slowest_stage(case: Case, by_region: ByRegion[Array]) -> Array:
    """Add up times of a micro-batch over the slowest stage.

    Parameters
    ----------
    case : Case
        Strategies.
    by_region : ByRegion of array
        Times of each region, a row for each pass [s].

    Returns
    -------
    time : array
        Of the slowest stage [s].
    """
    layers = case.layers * by_region.layer.sum(axis=0)
    return np.asarray(layers + add_slowest_end(case, by_region))


def add_all_stages(case: Case, by_region: ByRegion[Array]) -> Array:
    """Add up times of a micro-batch over all stages.

    Parameters
    ----------
    case : Case
        Strategies.
    by_region : ByRegion of array
        Times of each region, a row for each pass [s].

    Returns
    -------
    time : array
        Of all stages, one after another [s].
    """
    ends = by_region.embeddings.sum(axis=0) + by_region.head.sum(axis=0)
    return np.asarray(case.all_layers * by_region.layer.sum(axis=0) + ends)


def count_updated(case: Case) -> Array:
    """Count the trained weights that a rank of the first stage updates, whose iteration ends last.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    weights : array
        Trained numbers, or those of its shards [-].
    """
    s, times, sizes = case.s, case.times, case.sizes
    head = np.where(case.holds_both_ends, times.head.trained, 0.0)
    weights = case.stage_layers.first * times.layer.trained + times.embeddings.trained + head
    experts = case.stage_layers.first * sizes.experts
    shards = count_shards(weights, experts, owners=s.owners, sharers=sizes.sharers)
    return np.asarray(np.where(s.zero > 0, shards, weights))


def average_owners(case: Case, layers: Array, weights: Array) -> Array:
    """Find the mean number of ranks that share a weight of a stage; experts have fewer.

    Parameters
    ----------
    case : Case
        Strategies.
    layers, weights : array
        Layers of the stage, and the numbers of its weights [-].

    Returns
    -------
    owners : array
        Ranks [-].
    """
    experts = layers * case.sizes.experts / weights
    shard = count_shards(1.0, experts, owners=case.s.owners, sharers=case.sizes.sharers)
    return np.asarray(1.0 / shard)
