"""One micro-batch of a strategy on one rank: its operations, the sizes of its messages, and the
times of both."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.units import Array
from perfkit.models.checkpoints import (
    EVERY_LAYER,
    Checkpoint,
    ask_checkpoints,
    find_checkpoint,
    recomputes,
)
from perfkit.models.experts import busiest_rank
from perfkit.models.offload import HOST_WORK
from perfkit.models.optimizers import find_optimizer
from perfkit.models.partitions import time_beside
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import (
    Costs,
    HostTimes,
    find_contention,
    join_host,
    price,
    price_hosts,
)
from perfkit.prediction.kept import Moments, find_moments, find_saved, list_lives
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.ranks import RankTimes
from perfkit.prediction.replicas import Gradient, time_buckets
from perfkit.prediction.strategy_records import REGIONS, ByRegion, Quantity, Work, map_arrays
from perfkit.prediction.tiles import expose_tiles, find_tiled_messages
from perfkit.workloads.blocks import InputBytes, RegionWeights, record_part
from perfkit.workloads.columns import Accesses, Features, HostCalls, OperationSizes
from perfkit.workloads.execution import HANDED, execute, refuse_hooks, refuse_waits
from perfkit.workloads.fp8 import find_layout
from perfkit.workloads.graph import STAGE_HOST, Graph, Label
from perfkit.workloads.iteration import fill_buckets
from perfkit.workloads.operations import CAST_ONCE
from perfkit.workloads.rank_share import SHARING_EXPERT, RankShare
from perfkit.workloads.sizes import alter
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.transformer import Transformer

#: Kinds of operations of attention between its projections.
CORES = ("bmm", "attention")
#: Tokens of a sequence in the first column of a recorded graph. A compiler merges what has equal
#: sizes; it is read off this column, where no two sizes are equal by chance [-].
_ODD = 1031
#: Recordings of so many sizes at most, the odd one included, are kept: those of a search are large [-].
_FEW_SIZES = 9
#: Communicators of a graph of `perfkit.prediction.stages`: those below `PASSED` are waited for
#: inside a pass, those from `PAIRS` on connect neighbouring stages [-].
PASSED, PAIRS = 4, 8
#: Communicator of tokens that go to experts beside the passes of other micro-batches [-].
BESIDE = 7
#: Operations of these whose tensors are shards.
ON_SHARDS = ("_foreach_copy_", "all_gather_copy_in", "_to_copy")


def _make_operation(label: Label, host_calls: HostCalls) -> Graph:
    """A single operation, as the host sees it."""
    features = Features.from_rows([OperationSizes()], [host_calls])
    return Graph((label,), features, Accesses.from_rows())


#: A collective: one call that launches one kernel.
_CALL = _make_operation(
    Label("all_to_all", "collective", "all_to_all", "forward", ""), HostCalls(calls=1, launches=1)
)
#: A sum and a cast of a gradient that a hook launches, without a call.
_SUM_IN_HOOK = _make_operation(
    Label("add_", "elementwise", "add_", "backward", ""), HostCalls(launches=1)
)
_CAST_IN_HOOK = _make_operation(
    Label("_to_copy", "elementwise", "_to_copy", "backward", ""), HostCalls(launches=1)
)


class Sizes(NamedTuple):
    """Sizes of a micro-batch and of the messages of its ranks; arrays if a strategy holds many.

    Parameters
    ----------
    micro : array
        Micro-batches of a replica [-].
    itemsize, wide, summed : int
        Bytes of an activation or a weight in use, of a sum of gradients, and of one while ranks
        reduce it [B].
    column : array
        One number of each token of a rank [B].
    between : array
        Activations that a stage sends to the next one [B].
    keys : array
        Keys of a layer [B].
    swapped : array
        Mean of the queries, keys, values and outputs of a layer, which change places with heads
        [B].
    tokens : array
        Tokens of a layer that go to experts, each counted once [B].
    routed : array
        The same, a copy for each of their experts, on the rank that gets most of them [B].
    load : array
        Tokens of this rank over those of the average one [-].
    experts : array
        Numbers of the experts of a layer on a rank [-].
    sharers : array
        Ranks that share these [-].
    straight : array of bool
        Whether gradients are copied for their reduction as they are computed. Otherwise those of
        several micro-batches were added up before [-].
    widened : array
        Bytes that this copy moves for a number, over those that it moves where gradients are copied
        as they are computed [-].
    widened_sums : float
        Bytes that a sum of shards moves, whose gradients were cast before, over those that it moves
        where gradients are added up as they are computed [-].
    gathered, reduced : array
        Bytes that a copy around a gather and one before a reduction move where ranks share layers or
        sequences, relative to a copy of all sums of gradients; 0 for buffers [-].
    reordered, reorders : array
        Numbers of the experts of a layer that are copied once more around each message, as ranks do
        not divide the experts; and the copies [-].
    """

    micro: Array
    itemsize: int
    wide: int
    summed: int
    column: Array
    between: Array
    keys: Array
    swapped: Array
    tokens: Array
    routed: Array
    load: Array
    experts: Array
    sharers: Array
    straight: np.ndarray
    widened: float
    widened_sums: float
    gathered: Array
    reduced: Array
    reordered: Array
    reorders: Array


def size_micro_batch(model: Transformer, s: Strategy) -> Sizes:
    """Sizes of a micro-batch and of the messages of its ranks.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    sizes : Sizes
        Numbers, or arrays with an element for each strategy.
    """
    micro = model.batch / (s.dp * s.micro_batch)
    itemsize = ITEMSIZE.get(model.dtype, 2)
    wide = 4 if model.mixed else itemsize
    summed = ITEMSIZE.get(model.reduce_dtype, wide)
    column = itemsize * s.micro_batch * model.sequence / s.cp
    heads = _size_heads(model, s, column)
    has_experts = model.experts > 0
    matrices = 3 if model.gated else 2
    inner = np.ceil(model.width_of_expert / s.ranks_of_expert)
    experts = (model.experts // s.ep) * (matrices * model.hidden * inner)
    sharers = np.maximum(s.owners * s.tp // (s.ep * s.ranks_of_expert), 1)
    # ranks that share experts with each other send their own tokens
    senders = np.where(s.spreads_experts, s.rows, 1)
    tokens = 0.0 * column
    if has_experts:
        tokens = column * model.hidden / senders
    load = find_loads(model, s)
    # buffers hold sums, also of a single micro-batch, and are messages themselves
    straight = s.scattered | np.equal(micro, 1) & np.logical_not(s.buffers)
    copied = np.where(s.buffers, 0.0, 1.0)
    shares_states = np.greater(s.zero, 0)
    narrower = itemsize / wide
    reduced = np.where(shares_states & straight, (1.0 + narrower) / 2.0, 1.0)
    divided = (model.experts // s.ep) % sharers == 0
    copied_again = shares_states & np.logical_not(divided) & has_experts
    return Sizes(
        micro=micro,
        itemsize=itemsize,
        wide=wide,
        summed=summed,
        column=column,
        between=column * model.hidden / s.rows,
        keys=heads.keys,
        swapped=heads.swapped,
        tokens=tokens,
        routed=tokens * model.routed * load,
        load=load,
        experts=experts,
        sharers=sharers,
        straight=straight,
        widened=(wide + summed) / (itemsize + summed),
        widened_sums=3 * wide / (2 * wide + itemsize),
        gathered=copied * narrower,
        reduced=copied * reduced,
        reordered=np.where(copied_again, experts, 0.0),
        reorders=np.where(copied_again, 1.0 * matrices, 0.0),
    )


class _HeadSizes(NamedTuple):
    """Heads of the micro-batch of a rank: the mean of its keys and values, and the mean of these and
    of queries as ranks exchange them, see `Sizes` [B]."""

    keys: Array
    swapped: Array


def _size_heads(model: Transformer, s: Strategy, column: Array) -> _HeadSizes:
    """Sizes of heads, with `column` bytes for one number of each token."""
    # the mean of keys and values, and of queries and outputs
    head_width = (model.width_of_head + model.width_of_values) / 2
    kv_heads = np.ceil((model.kv_heads or model.heads) / s.tp)
    # heads that are fewer than the ranks that exchange them are repeated
    exchanging = s.ranks_sharing_heads / s.tp
    swapped_keys = column * head_width * np.maximum(kv_heads, exchanging)
    queries = column * (head_width * model.heads / s.tp)
    return _HeadSizes(keys=column * head_width * kv_heads, swapped=(queries + swapped_keys) / 2.0)


def find_loads(model: Transformer, s: Strategy) -> Array:
    """Find how many tokens the busiest rank gets.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    loads : array
        Over those of the average one, for each strategy [-].
    """
    ep = np.asarray(s.ep)
    loads = np.ones(ep.shape)
    imbalance = model.spread_of_tokens
    if not model.experts or imbalance.is_balanced:
        return loads
    for ranks in np.unique(ep).tolist():
        if model.experts % ranks == 0:
            load = busiest_rank(imbalance, model.experts, int(ranks), top_k=model.top_k)
            loads = np.where(ep == ranks, load, loads)
    return loads


def reorders_tokens(model: Transformer, s: Strategy) -> np.ndarray:
    """Find where tokens are put into the order of experts once they are there, and back.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    reorders : array of bool
        Copies for each expert come in the order of the ranks that sent them. Tokens that are sent
        once are copied in the order of experts.
    """
    has_several = model.experts // s.ep > 1
    return np.asarray((s.ep > 1) & has_several & np.equal(s.dispatch, "all_to_all"))


class MicroBatch(NamedTuple):
    """What a rank does, as it is executed and as it was recorded, and by region the numbers of its
    weights, those of them that are trained, those that a gather of all of them sends, and those that
    the optimizer keeps, see `perfkit.workloads.blocks.RecordedPart` [-]; the most that updates of one
    weight after another hold [B]; and what its passes read that they do not make."""

    graph: Graph
    recorded: Graph
    weights: ByRegion[Array]
    trained: ByRegion[Array]
    sent: ByRegion[Array]
    states: ByRegion[Array]
    update_scratch: float
    inputs: InputBytes


class PhaseTimes(NamedTuple):
    """One pass of a micro-batch through a region of the model.

    Parameters
    ----------
    device, host : array
        Time of the kernels, and of the calls of the host that launch them [s].
    tensor_messages : array
        Time of the messages among ranks that share layers, without what tiles hide of them [s].
    """

    device: Array
    host: Array
    tensor_messages: Array


class RegionTimes(NamedTuple):
    """A region of the model: the embeddings, one layer, or the head.

    Parameters
    ----------
    forward, backward : PhaseTimes
        Its passes; the backward pass without sums of gradients.
    gradient_sums : Work
        Sums of its gradients with those of earlier micro-batches [s].
    casts_once : Work
        Casts of its weights to fp8 for all micro-batches, which are not part of its passes [s].
    weights, trained, sent : array
        Numbers of its weights on a rank, those of them that are trained, and those that a gather of all
        of them sends, in the format of layers [-].
    states : array
        Numbers that the optimizer keeps for those that are trained [-].
    saved : array
        Activations of the forward pass that its backward pass reads [B].
    """

    forward: PhaseTimes
    backward: PhaseTimes
    gradient_sums: Work
    casts_once: Work
    weights: Array
    trained: Array
    sent: Array
    states: Array
    saved: Array


class PassWork(NamedTuple):
    """A part of both passes.

    Parameters
    ----------
    forward, backward : Work
        Kernels and calls of each pass [s].
    """

    forward: Work
    backward: Work


class AttentionWork(NamedTuple):
    """Attention of a layer between its projections.

    Parameters
    ----------
    forward, backward : Work
        Kernels and calls of each pass, without what is computed again [s].
    again : Work
        What a backward pass takes that computes the forward pass again [s].
    forward_part, backward_part, again_part : array
        What each of these takes longer for each further kernel, if its one kernel is run in parts;
        0 if it has several, which no part of the keys divides [s].
    """

    forward: Work
    backward: Work
    again: Work
    forward_part: Array
    backward_part: Array
    again_part: Array


class WeightWork(NamedTuple):
    """What is done once with all weights.

    Parameters
    ----------
    device : array
        Time of the kernels for one trained number [s].
    host : array
        Time of the calls for all of them [s].
    """

    device: Array
    host: Array


class ShardWork(NamedTuple):
    """Kernels that work on the shards of a unit of weights.

    Parameters
    ----------
    fixed : array
        Time that they take whatever their size [s].
    divided : array
        What they take beyond that if one rank holds all shards; ranks divide it [s].
    host : array
        Time of the calls [s].
    """

    fixed: Array
    divided: Array
    host: Array


class MessageCopies(NamedTuple):
    """Copies around one message of a unit of weights.

    Parameters
    ----------
    whole : array
        Time of the copies of whole weights or gradients, and what copies of shards take whatever
        their size [s].
    divided : array
        What copies of shards take beyond that if one rank holds all of them; ranks divide it [s].
    packing : array
        What the copies of gradients into the message take by their size; it is part of `whole`
        [s].
    ahead : array
        What the copies of shards ahead of the message take whatever their size; it is part of
        `whole` [s].
    host : array
        Time of the calls [s].
    """

    whole: Array
    divided: Array
    packing: Array
    ahead: Array
    host: Array


class UnitCopies(NamedTuple):
    """What replicas do with a unit whose weights or gradients they share: a layer, or both ends
    together.

    Parameters
    ----------
    gather, regather, scatter : MessageCopies
        Copies around the message that gathers its weights for the forward pass, once more for the
        backward pass, and that reduces its gradients.
    sums : ShardWork
        Sums of the shards of its gradients.
    casts : Work
        Casts of its gradients before they are reduced [s].
    """

    gather: MessageCopies
    regather: MessageCopies
    scatter: MessageCopies
    sums: ShardWork
    casts: Work


class ExpertReorder(NamedTuple):
    """Copies of experts that ranks do not divide, around a message.

    Parameters
    ----------
    fixed : array
        What a copy takes whatever its size [s].
    each : array
        What it takes beyond that for a trained number [s].
    """

    fixed: Array
    each: Array


class MicroBatchTimes(NamedTuple):
    """One micro-batch on one rank, with an element of each array for each strategy.

    Parameters
    ----------
    embeddings, layer, head : RegionTimes
        Passes through each region; a layer stands for all layers.
    attention : AttentionWork
        Attention of a layer between its projections.
    weight_gradients : Work
        Weight gradients of a layer, which a schedule may put off; they are part of its backward
        pass [s].
    update : WeightWork
        What the optimizer does.
    update_scratch : array
        The most that updates of one weight after another hold beside what is kept; 0 for others [B].
    weight_casts : WeightWork
        Copies of the updated weights in the format in which layers work.
    packing : array
        Time of a copy of one gradient to a message [s].
    layer_copies, end_copies : UnitCopies
        What replicas do around messages of a layer, and of both ends together.
    reorder : ExpertReorder
        Copies of the experts of a layer.
    buckets : Work
        What the buckets of DistributedDataParallel add to an iteration [s].
    call : array
        Time in which the host launches a collective [s].
    moments : Moments
        Fullest moments of the memory of a rank [B].
    inputs : InputBytes
        What its passes read that they do not make [B].
    spread : array
        Spread of the logarithm of the time of its kernels [-].
    """

    embeddings: RegionTimes
    layer: RegionTimes
    head: RegionTimes
    attention: AttentionWork
    weight_gradients: Work
    update: WeightWork
    update_scratch: Array
    weight_casts: WeightWork
    packing: Array
    layer_copies: UnitCopies
    end_copies: UnitCopies
    reorder: ExpertReorder
    buckets: Work
    call: Array
    moments: Moments
    inputs: InputBytes
    spread: Array

    @property
    def regions(self) -> tuple[RegionTimes, RegionTimes, RegionTimes]:
        """Embeddings, layer and head."""
        return self.embeddings, self.layer, self.head

    def list_by_region(self, read: Callable[[RegionTimes], Quantity]) -> ByRegion[Quantity]:
        """A quantity of each region.

        Parameters
        ----------
        read : callable
            Takes a region, and returns the quantity.

        Returns
        -------
        quantities : ByRegion
            In the order of the forward pass.
        """
        return ByRegion(read(self.embeddings), read(self.layer), read(self.head))


class _Hosts(NamedTuple):
    """Time of the host, whatever the sizes.

    For each operation of a rank; for each if gradients are not added up; and for a collective, and
    a sum and a cast of a gradient in a hook [s].
    """

    operations: Array
    without_sums: Array
    call: Array
    sum_in_hook: Array
    cast_in_hook: Array


class _Rows(NamedTuple):
    """Operations of a rank, a row each; times have a column for the odd sizes and for each
    strategy.

    Labels of the operations, whether each adds gradients to those of earlier micro-batches, and
    whether its tensors are shards; their kernels and exposed messages [s], what a kernel takes
    whatever its size [s], and hosts.
    """

    names: np.ndarray
    kinds: np.ndarray
    variants: np.ndarray
    phases: np.ndarray
    modules: np.ndarray
    are_sums: np.ndarray
    on_shards: np.ndarray
    device: Array
    tensor_messages: Array
    fixed: Array
    hosts: _Hosts

    def find_region(self, region: str) -> np.ndarray:
        """Whether each operation belongs to a region."""
        return np.char.startswith(self.modules, region)

    def add_device(self, chosen: np.ndarray | slice) -> Array:
        """Time of the chosen kernels [s]."""
        return self.device[chosen].sum(axis=0)

    def add_beyond_fixed(self, chosen: np.ndarray) -> Array:
        """Time of the chosen kernels beyond what they take whatever their size [s]."""
        return self.device[chosen].sum(axis=0) - self.fixed[chosen].sum()


def count_words(model: Transformer, s: Strategy) -> Array:
    """Count the words of the vocabulary that a rank holds, with those that pad it, or all classes of
    images.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    words : array
        [-].
    """
    if model.patch:
        return np.asarray(1.0 * model.classes)
    multiple = model.vocabulary_multiple
    return np.asarray(multiple * np.ceil(model.vocabulary / (multiple * s.tp)))


def count_shards(weights: Any, experts: Any, *, owners: Any, sharers: Any) -> Any:
    """Count the weights that a rank holds of those that ranks share; experts have fewer ranks.

    Parameters
    ----------
    weights : float or array
        All of these weights, or 1 for the share of them that a rank holds [-].
    experts : float or array
        Those that belong to experts, or their share of them [-].
    owners, sharers : int or array
        Ranks that share weights outside of experts, and those of experts [-].

    Returns
    -------
    shards : same kind as `weights`
        Numbers of one rank, or their share [-].

    Examples
    --------
    >>> count_shards(12.0, 4.0, owners=8, sharers=2)
    3.0
    """
    return (weights - experts) / owners + experts / sharers


def fuses_sums(model: Transformer, s: Strategy) -> Any:
    """Find the strategies whose products of weight gradients add to sums.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    fuses : bool or array
        False where gradients are reduced with each micro-batch, so that a rank adds up shards
        alone, and where there are no buffers.
    """
    return np.logical_not(s.scattered) & s.buffers & model.fused_accumulation


def keeps_fp8(model: Transformer, s: Strategy) -> Any:
    """Find the strategies that cast weights to fp8 once in an iteration.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    keeps : bool or array
        False where weights are gathered with each micro-batch, and where there are no buffers.
    """
    return np.logical_not(s.scattered) & s.buffers & (model.keeps_fp8 and model.dtype == "fp8")


def name_recorded(checkpoints: Any) -> Any:
    """Name what recorded layers compute again: nothing where kernels of attention are added to their
    backward pass.

    Parameters
    ----------
    checkpoints : str or array of str
        As `Strategy.checkpoint` names it.

    Returns
    -------
    names : str or array of str
        ``none`` in place of ``selective``.
    """

    def name(checkpoint: Checkpoint) -> str:
        if checkpoint.is_in_forward_pass:
            return "none"
        return checkpoint.name

    return ask_checkpoints(checkpoints, name, str)


def _find_recorded(s: Strategy) -> str:
    """What the layers of strategies that are recorded together compute again."""
    [name] = np.unique(name_recorded(s.checkpoint)).tolist()
    return str(name)


def gathers_fp8(model: Transformer, s: Strategy) -> Any:
    """Find the strategies that gather the weights of products in fp8 in this format.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    gathers : bool or array
        False where nothing is gathered, and where there are buffers, as those of Megatron-LM.
    """
    shares = np.greater(s.zero, 0) & np.logical_not(s.buffers)
    return shares & (model.fp8_gathers and model.dtype == "fp8")


def record_micro_batch(
    model: Transformer,
    s: Strategy,
    execution: str | None,
    *,
    pads_products: bool = True,
    is_first_layer: bool = False,
) -> MicroBatch:
    """Record what a rank does, see `perfkit.workloads.blocks.record_part`: odd sizes first, then
    those of strategies.

    Strategies that are recorded together have the same `name_recorded`; all or none share products and
    tokens, are `replicated`, have `buffers`, `fuses_sums` and `keeps_fp8`; all or none spread experts
    over all ranks of a stage, share products of these, and put tokens into their order.
    """
    shares = np.all(np.greater(s.tp, 1))
    spreads_experts = bool(np.all(s.spreads_experts))
    ranks_of_expert = np.where(spreads_experts, s.ranks_of_expert, 1)
    shares_expert = np.all(ranks_of_expert > 1)
    tensor = _put_odd_first(3 if shares else 1, s.tp)
    cut = RankShare(
        _put_odd_first(3, s.micro_batch),
        _put_odd_first(_ODD, model.sequence // s.cp),
        tensor=tensor,
        rows=tensor if np.all(s.rows > 1) else 1,
        context=_put_odd_first(1, s.cp),
        experts=_put_odd_first(1, s.ep),
        expert_tensor=_put_odd_first(3 if shares_expert else 1, ranks_of_expert),
        spreads_experts=spreads_experts and model.experts > 0,
        reorders=bool(np.all(reorders_tokens(model, s))),
        load=_put_odd_first(1, find_loads(model, s)),
    )
    if execution == "compiled":
        refuse_hooks(model.optimizer_in_backward)
    refuse_waits(model.optimizer, execution)
    recording = _Recording(
        model=_take_one_batch(model),
        cut=cut,
        computed_again=_find_recorded(s),
        execution=execution,
        pads_products=pads_products,
        is_first_layer=is_first_layer,
        replicated=bool(np.all(s.replicated)),
        fuses_sums=bool(np.all(fuses_sums(model, s))),
        keeps_fp8=bool(np.all(keeps_fp8(model, s))),
        gathers_fp8=bool(np.all(gathers_fp8(model, s))),
        has_buffers=bool(np.all(s.buffers)),
    )
    if len(cut.batch) <= _FEW_SIZES:
        return _record_once(recording)
    return _record(recording)


class _Recording(NamedTuple):
    """What decides what is recorded of a micro-batch, see `perfkit.workloads.blocks.record_part`.

    Sizes of `cut` are tuples, with an odd size first. `computed_again` is what layers compute again,
    as `name_recorded` names it.
    """

    model: Transformer
    cut: RankShare
    computed_again: str
    execution: str | None
    pads_products: bool
    is_first_layer: bool
    replicated: bool
    fuses_sums: bool
    keeps_fp8: bool
    gathers_fp8: bool
    has_buffers: bool


def _take_one_batch(model: Transformer) -> Transformer:
    """The model with one of its batches: what a micro-batch does depends on none of them."""
    if np.ndim(model.batch) == 0:
        return model
    first_batch: Any = np.ravel(model.batch)[0]
    return replace(model, batch=int(first_batch))


def _record(recording: _Recording) -> MicroBatch:
    """Record a micro-batch."""
    model, execution = recording.model, recording.execution
    sizes: dict[str, Any] = {
        name: np.array(size)
        for name, size in recording.cut._asdict().items()
        if isinstance(size, tuple)
    }
    cut = recording.cut._replace(**sizes)
    computed_again = recording.computed_again
    # kinds of layers that lack a part compute less again
    recorded_model = alter(
        model,
        {
            "checkpoint": False if computed_again == "none" else computed_again,
            "checkpoint_layers": EVERY_LAYER,
            "checkpoint_group": 1,
        },
    )
    part = record_part(
        recorded_model,
        cut,
        autocast=model.mixed and recording.replicated,
        exchange="buckets" if recording.replicated else "shards",
        fuses_sums=recording.fuses_sums,
        keeps_fp8=recording.keeps_fp8,
        gathers_fp8=recording.gathers_fp8,
        has_buffers=recording.has_buffers,
        is_first_layer=recording.is_first_layer,
    )
    executed = execute([part.graph], execution, pads_products=recording.pads_products)[0]
    if executed.execution == "compiled":
        executed = _hand_weights_to_regions(executed)

    def spread(weights: RegionWeights) -> ByRegion[Array]:
        return ByRegion(*(np.broadcast_to(of_region, len(cut.batch)) for of_region in weights))

    return MicroBatch(
        executed,
        part.graph,
        spread(part.weights),
        spread(part.trained),
        spread(part.sent),
        spread(part.states),
        part.update_scratch,
        InputBytes(*(np.broadcast_to(nbytes, len(cut.batch)) for nbytes in part.inputs)),
    )


#: A tuning, or both roads to the time of one strategy, ask for the same micro-batches again and again.
_record_once = lru_cache(maxsize=64)(_record)


def _put_odd_first(odd: int, sizes: Any) -> tuple[float, ...]:
    """An odd size, and those of strategies behind it."""
    return tuple(np.append(odd, sizes).astype(float).tolist())


def _find_fused_sums(graph: Graph) -> np.ndarray:
    """Whether each operation is a product of a backward pass that adds to what its result holds."""
    accesses = graph.accesses
    adds = np.zeros(len(graph), dtype=bool)
    is_product = np.array(
        [label.kind in ("gemm", "bmm") and label.phase == "backward" for label in graph.labels]
    )
    for row in np.flatnonzero(is_product).tolist():
        of_product = accesses.select(accesses.operation == row)
        written = of_product.buffer[of_product.is_write]
        read = of_product.buffer[~of_product.is_write]
        adds[row] = bool(np.isin(written, read).any())
    return adds


def _hand_weights_to_regions(graph: Graph) -> Graph:
    """Give the calls that weights of compiled code cost to the kernels of their own region, as one
    layer stands for many."""
    bare = graph.features.bare.copy()
    names = np.array([label.name for label in graph.labels])
    adds = _find_fused_sums(graph)
    phases = np.array([label.phase for label in graph.labels])
    modules = np.array([label.module for label in graph.labels])
    regions = [np.char.startswith(modules, region) for region in REGIONS]
    # each weight has a sum of gradients, or a product that adds to it
    sums = (names == "add_") | adds
    weights = [int((of_region & sums).sum()) for of_region in regions]
    for phase in ("forward", "backward"):
        for_weights = (phases == phase) & (bare > 0)
        for of_region, count in zip(regions, weights, strict=True):
            rows = for_weights & of_region
            if rows.any():
                bare[rows] = HANDED * count / rows.sum()
    return replace(graph, features=replace(graph.features, bare=bare))


def price_micro_batch(
    model: Transformer,
    messages: MessageTimes,
    s: Strategy,
    several: Array,
    execution: str | None,
    *,
    pads_products: bool,
) -> MicroBatchTimes:
    """Price one micro-batch of strategies whose graphs differ in their sizes alone.

    Parameters
    ----------
    model : Transformer
        The model.
    messages : MessageTimes
        Times of messages on the platform.
    s : Strategy
        Each field an array.
    several : array of bool
        Whether a strategy has several micro-batches; it matters where replicas share nothing but
        the batch [-].
    execution : str or None
        ``eager``, ``compiled`` or ``graphs``.
    pads_products : bool
        Whether what compiles them pads the sides of products, see `Stack.pads_products`.

    Returns
    -------
    times : MicroBatchTimes
        An element of each array for each strategy, or a number for all of them.
    """
    platform = messages.platform
    micro_batch = record_micro_batch(model, s, execution, pads_products=pads_products)
    graph = micro_batch.graph
    costs = _price_kernels(micro_batch, platform, model.all_layers)
    whole = platform.context.find_iteration(model.family, 2)
    contention = find_contention(platform, whole)
    rows = _list_rows(micro_batch, costs, messages, s, contention)
    lives = list_lives(graph)
    lives_before = lives
    if micro_batch.recorded.execution != graph.execution:
        lives_before = list_lives(micro_batch.recorded)
    saved = find_saved(lives_before)
    weights, trained = micro_batch.weights, micro_batch.trained
    all_trained = trained.embeddings + trained.layer + trained.head
    recomputed = "attention" in find_checkpoint(_find_recorded(s)).parts
    weight_casts = _time_with_weights(rows, rows.modules == "exchange.narrow", all_trained)
    layer_casts = trained.layer * weight_casts.device
    end_casts = (trained.embeddings + trained.head) * weight_casts.device
    embeddings, layer, head = _time_regions(rows, micro_batch, saved)
    times = MicroBatchTimes(
        embeddings=embeddings,
        layer=layer,
        head=head,
        attention=_time_attention(rows, recomputed),
        weight_gradients=_time_weight_gradients(rows),
        update=_time_update(rows, model, trained, _find_reads(graph)),
        update_scratch=np.asarray(micro_batch.update_scratch),
        weight_casts=weight_casts,
        packing=rows.add_device(rows.modules == "exchange.whole") / all_trained,
        layer_copies=_time_unit(rows, "layers", ("layers",), layer_casts),
        end_copies=_time_unit(rows, "ends", ("embeddings", "head"), end_casts),
        reorder=_time_reorder(rows, weights.layer),
        buckets=_time_buckets(model, messages, s, several, graph, rows, contention),
        call=rows.hosts.call,
        moments=find_moments(lives),
        inputs=micro_batch.inputs,
        spread=_estimate_spread(costs),
    )
    if shortens_first_layer(model):
        first = record_micro_batch(
            model, s, execution, pads_products=pads_products, is_first_layer=True
        )
        costs = _price_kernels(first, platform, model.layers)
        rows = _list_rows(first, costs, messages, s, contention)
        times = _shorten_first_layer(times, rows)
    return map_arrays(_leave_out_odd_sizes, times)


def shortens_first_layer(model: Transformer) -> bool:
    """Find out whether the first of several layers does less than others in its backward pass.

    Parameters
    ----------
    model : Transformer
        The model.

    Returns
    -------
    shortens : bool
        With LoRA: the embeddings ahead of it are frozen, and no gradient of its input is wanted.
    """
    return model.lora_rank > 0 and model.layers > 1


def _shorten_first_layer(times: MicroBatchTimes, rows: _Rows) -> MicroBatchTimes:
    """Take from the backward pass of the embeddings what the first layer does less than others: no
    gradient of its input is wanted where embeddings are frozen."""
    first = _time_pass(rows, "layers", "backward")
    layer, embeddings = times.layer.backward, times.embeddings
    backward = embeddings.backward._replace(
        device=embeddings.backward.device + first.device - layer.device,
        host=embeddings.backward.host + first.host - layer.host,
    )
    return times._replace(embeddings=embeddings._replace(backward=backward))


def _leave_out_odd_sizes(values: Array) -> Array:
    """The elements of strategies; a number that is the same for all sizes stays one."""
    if np.ndim(values) == 0:
        return values
    return values[1:]


def _price_kernels(micro_batch: MicroBatch, platform: Platform, layers: int) -> Costs:
    """Price the operations of a rank, whose layer runs as often as there are layers."""
    graph = micro_batch.graph
    repeats = []
    for label in graph.labels:
        of_layer = label.module.startswith("layers") or label.module.endswith(".layers")
        repeats.append(float(layers) if of_layer else 1.0)
    [costs] = price([replace(graph, repeats=np.array(repeats))], platform, dtype=graph.dtype)
    return costs


def _list_rows(
    micro_batch: MicroBatch,
    costs: Costs,
    messages: MessageTimes,
    s: Strategy,
    contention: float,
) -> _Rows:
    """Operations of a rank with what they take on its device and on its host."""
    graph = micro_batch.graph
    labels = graph.labels
    names = np.array([label.name for label in labels])
    are_sums = names == "add_"
    fixed_of_classes = np.array([model.fixed_time for model in costs.models])
    tensor_messages = _time_tensor_messages(graph, messages, s)
    if np.any(s.tiled):
        tensor_messages = _hide_tiles(graph, costs.seconds, tensor_messages, s, contention)
    return _Rows(
        names=names,
        kinds=np.array([label.kind for label in labels]),
        variants=np.array([label.variant for label in labels]),
        phases=np.array([label.phase for label in labels]),
        modules=np.array([label.module for label in labels]),
        are_sums=are_sums,
        on_shards=np.isin(names, ON_SHARDS),
        device=costs.seconds,
        tensor_messages=tensor_messages,
        fixed=fixed_of_classes[costs.classes],
        hosts=_price_hosts(graph, are_sums, messages.platform),
    )


def _time_tensor_messages(graph: Graph, messages: MessageTimes, s: Strategy) -> Array:
    """Times of the messages among ranks that share layers, none of them in tiles, a row for each
    operation [s]."""
    names = np.array([label.name for label in graph.labels])
    modules = np.array([label.module for label in graph.labels])
    ranks = np.append(1, s.tp)
    ranks_of_expert = np.append(1, s.ranks_of_expert)
    times = np.zeros((len(graph), len(ranks)))
    nbytes = np.broadcast_to(graph.column("nbytes"), times.shape)
    is_exchange = np.char.startswith(modules[graph.collectives], "exchange")
    of_layers = graph.collectives[~is_exchange]
    in_experts = graph.features.group[of_layers] == SHARING_EXPERT
    for operation in np.unique(names[of_layers]):
        of_operation = names[of_layers] == operation
        for sharing, chosen in (
            (ranks, of_layers[of_operation & ~in_experts]),
            (ranks_of_expert, of_layers[of_operation & in_experts]),
        ):
            if len(chosen):
                times[chosen] = messages.time(operation, nbytes[chosen], sharing, 1)
    return times


def _hide_tiles(
    graph: Graph, seconds: Array, whole: Array, s: Strategy, contention: float
) -> Array:
    """What kernels do not hide of messages among ranks that share layers, a row for each operation,
    a column for the odd sizes and for each strategy [s].

    `seconds` are the times of the kernels of all operations, `whole` those of all messages if none
    is sent in tiles.
    """
    times = whole.copy()
    ranks = np.append(1, s.tp)
    tiled = np.append(False, s.tiled)
    put_off = np.append(False, s.puts_off_weights)
    for puts_off_weights in (False, True):
        chosen = tiled & (put_off == puts_off_weights)
        for phase in ("forward", "backward"):
            rows = _list_rows_of_pass(graph, phase, without_weights=puts_off_weights)
            for sent in find_tiled_messages([graph.labels[row] for row in rows]):
                message = rows[sent.message]
                beside = seconds[rows[list(sent.kernels)]].sum(axis=0)
                exposed = expose_tiles(whole[message], ranks, beside, sent.way, contention)
                times[message] = np.where(chosen, exposed, times[message])
    return times


def _list_rows_of_pass(graph: Graph, phase: str, *, without_weights: bool) -> np.ndarray:
    """Operations of a pass through a layer, but for sums of gradients, and for gradients of weights
    where these are put off."""
    rows = []
    for row, label in enumerate(graph.labels):
        is_gradient = label.kind == "gemm" and find_layout(label.variant) == "tn"
        is_put_off = without_weights and is_gradient
        if label.phase != phase or not label.module.startswith("layers"):
            continue
        if label.name != "add_" and not is_put_off:
            rows.append(row)
    return np.array(rows, dtype=int)


def _time_regions(
    rows: _Rows, micro_batch: MicroBatch, saved: ByRegion[Array]
) -> ByRegion[RegionTimes]:
    """Both passes through each region, the sums of its gradients, and its weights."""
    times = []
    for region, weights, trained, sent, states, saved_there in zip(
        REGIONS,
        micro_batch.weights,
        micro_batch.trained,
        micro_batch.sent,
        micro_batch.states,
        saved,
        strict=True,
    ):
        of_region = rows.find_region(region)
        sums = of_region & rows.are_sums
        casts = of_region & (rows.names == CAST_ONCE)
        host_of_sums = (rows.hosts.operations - rows.hosts.without_sums)[of_region].sum()
        times.append(
            RegionTimes(
                forward=_time_pass(rows, region, "forward"),
                backward=_time_pass(rows, region, "backward"),
                gradient_sums=Work(rows.add_device(sums), host_of_sums),
                casts_once=Work(rows.add_device(casts), rows.hosts.operations[casts].sum()),
                weights=weights,
                trained=trained,
                sent=sent,
                states=states,
                saved=saved_there,
            )
        )
    return ByRegion(*times)


def _time_pass(rows: _Rows, region: str, phase: str) -> PhaseTimes:
    """A pass through a region, without sums of gradients and casts of weights for all
    micro-batches."""
    of_pass = rows.find_region(region) & (rows.phases == phase) & (rows.names != CAST_ONCE)
    return PhaseTimes(
        device=rows.add_device(of_pass & ~rows.are_sums),
        host=rows.hosts.without_sums[of_pass].sum(),
        tensor_messages=rows.tensor_messages[of_pass].sum(axis=0),
    )


def _time_attention(rows: _Rows, recomputed: bool) -> AttentionWork:
    """Attention between its projections in both passes, and computed again.

    A backward pass that computes the layer again begins with the attention of the forward pass. Where
    that is not recorded, it takes what it takes in the forward pass.
    """
    of_attention = np.char.endswith(rows.modules, "attention") & np.isin(rows.kinds, CORES)
    forward = np.flatnonzero(of_attention & (rows.phases == "forward"))
    backward = np.flatnonzero(of_attention & (rows.phases == "backward"))
    again = forward
    if recomputed:
        again = backward[: len(forward)]
        backward = backward[len(forward) :]

    def add_up(core: np.ndarray) -> Work:
        if not len(core):  # a frozen layer that no gradient passes
            return Work(np.zeros(rows.device.shape[1]), np.zeros(()))
        all_between = slice(core.min(), core.max() + 1)
        return Work(rows.add_device(all_between), rows.hosts.operations[all_between].sum())

    def lengthen(core: np.ndarray) -> Array:
        if not len(core):
            return np.zeros(())
        fixed = rows.fixed[core.min() : core.max() + 1]
        return np.asarray(fixed.sum() if len(fixed) == 1 else 0.0)

    return AttentionWork(
        forward=add_up(forward),
        backward=add_up(backward),
        again=add_up(again),
        forward_part=lengthen(forward),
        backward_part=lengthen(backward),
        again_part=lengthen(again),
    )


def _time_weight_gradients(rows: _Rows) -> Work:
    """Weight gradients of a layer, which a schedule may put off: products of activations, which are
    transposed, with gradients."""
    of_layer = rows.find_region("layers") & (rows.phases == "backward")
    is_gradient = np.array([find_layout(variant) == "tn" for variant in rows.variants.tolist()])
    products = of_layer & (rows.kinds == "gemm") & is_gradient
    return Work(rows.add_device(products), rows.hosts.without_sums[products].sum())


def _find_update(rows: _Rows) -> np.ndarray:
    """Whether each operation belongs to the optimizer."""
    copies = np.isin(rows.modules, ("exchange.whole", "exchange.narrow"))
    return (rows.phases == "update") & ~copies


def _time_with_weights(rows: _Rows, chosen: np.ndarray, weights: Array) -> WeightWork:
    """Time of operations on all weights, for each of them."""
    return WeightWork(rows.add_device(chosen) / weights, rows.hosts.operations[chosen].sum())


def _find_reads(graph: Graph) -> np.ndarray:
    """Whether each operation finds the norm of a whole tensor in an update, which hosts of some
    optimizers read."""
    is_norm = np.array([label.name == "linalg_vector_norm" for label in graph.labels], dtype=bool)
    is_whole = graph.column("rows").reshape(len(graph), -1)[:, 0] == 1
    return is_norm & is_whole & np.array([label.phase == "update" for label in graph.labels])


def _join_between_reads(rows: _Rows, chosen: np.ndarray, reads: np.ndarray) -> Array:
    """Time of the chosen operations if the host waits behind each of some `reads` [s].

    Between two of them it is that of the slower one: the device, which has nothing to do until the first
    call is made, or the host, which also calls for the copy of what it reads; that call takes as long as
    the one of the norm.
    """
    joined = np.zeros(rows.device.shape[1])
    places = np.flatnonzero(chosen)
    ends = np.flatnonzero(reads[places]) + 1
    calls = rows.hosts.operations
    for part in np.split(places, ends):
        if len(part):
            device = rows.add_device(part) + calls[part[0]]
            joined = joined + np.maximum(device, calls[part].sum() + calls[part[-1]])
    return joined


def _time_update(
    rows: _Rows, model: Transformer, trained: ByRegion[Array], reads: np.ndarray
) -> WeightWork:
    """Time of the update for each trained number, and of its calls: of weights that have optimizers,
    kernels or operations of their own, those of all layers."""
    layers = model.layers
    ends = trained.embeddings + trained.head
    in_layer = rows.modules == "update.layers"
    if not in_layer.any():
        update = _time_with_weights(rows, _find_update(rows), ends + trained.layer)
        if not find_optimizer(model.optimizer).updates_one_by_one:
            return update
        # each weight has a sum of gradients
        sums = rows.are_sums & (rows.phases == "backward")
        of_layer = (sums & rows.find_region("layers")).sum()
        more = (sums.sum() + (layers - 1) * of_layer) / max(sums.sum(), 1)
        return update._replace(host=more * update.host)
    in_ends = rows.modules == "update.ends"
    if find_optimizer(model.optimizer).host_waits:
        joined = layers * _join_between_reads(rows, in_layer, reads)
        joined = joined + _join_between_reads(rows, in_ends, reads)
        return WeightWork(joined / (layers * trained.layer + ends), np.zeros(()))
    device = layers * rows.add_device(in_layer) + rows.add_device(in_ends)
    host = layers * rows.hosts.operations[in_layer].sum() + rows.hosts.operations[in_ends].sum()
    return WeightWork(device / (layers * trained.layer + ends), host)


def _time_unit(rows: _Rows, unit: str, regions: Sequence[str], casts: Array) -> UnitCopies:
    """What replicas do around the messages of a unit, which holds some regions.

    Shards are added up, and gradients cast, in hooks of FSDP. `casts` is the time of their kernels
    [s].
    """
    of_unit = np.logical_or.reduce([rows.find_region(region) for region in regions])
    sums = of_unit & rows.are_sums
    host_of_casts = np.zeros(())
    if (rows.modules == "exchange.narrow").any():
        host_of_casts = sums.sum() * rows.hosts.cast_in_hook
    return UnitCopies(
        gather=_time_copies(rows, f"exchange.gather.{unit}"),
        regather=_time_copies(rows, f"exchange.regather.{unit}"),
        scatter=_time_copies(rows, f"exchange.scatter.{unit}"),
        sums=ShardWork(
            fixed=rows.fixed[sums].sum(),
            divided=rows.add_beyond_fixed(sums),
            host=sums.sum() * rows.hosts.sum_in_hook,
        ),
        casts=Work(casts, host_of_casts),
    )


def _time_copies(rows: _Rows, module: str) -> MessageCopies:
    """Copies around the message of a unit, all of which are recorded in one module."""
    copies = rows.modules == module
    on_shards = copies & rows.on_shards
    into_message = copies & (rows.names == "chunk_cat")
    ahead = on_shards & (rows.names != "_to_copy")
    return MessageCopies(
        whole=rows.add_device(copies & ~on_shards) + rows.fixed[on_shards].sum(),
        divided=rows.add_beyond_fixed(on_shards),
        packing=rows.add_beyond_fixed(into_message),
        ahead=rows.fixed[ahead].sum(),
        host=rows.hosts.without_sums[copies].sum(),
    )


def _time_reorder(rows: _Rows, weights: Array) -> ExpertReorder:
    """Copies of experts that ranks do not divide: as the copies of a gathered layer with as many
    `weights`."""
    of_gather = rows.modules == "exchange.gather.layers"
    split = of_gather & (rows.names == "split_with_sizes_copy")
    return ExpertReorder(rows.fixed[split].sum(), rows.add_beyond_fixed(split) / weights)


def _estimate_spread(costs: Costs) -> Array:
    """Spread of the logarithm of the time of all kernels [-].

    Kernels of a kind have one fit and one scale, so that they err together, and so does all that is
    only assumed.
    """
    kinds = [model.kind for model in costs.models]
    causes = np.where(costs.assumed, "", kinds)
    errors = costs.spread * costs.totals / costs.totals.sum(axis=0)
    variance: Any = 0.0
    for cause in np.unique(causes):
        variance = variance + np.square(errors[causes == cause].sum(axis=0))
    return np.asarray(np.sqrt(variance))


def _price_hosts(graph: Graph, are_sums: np.ndarray, platform: Platform) -> _Hosts:
    """Time of the host for the operations of a rank, and for single ones; none where the host launches
    all kernels of an iteration at once."""
    if graph.execution == "graphs":
        nothing = np.zeros(len(graph))
        none = np.zeros(())
        return _Hosts(nothing, nothing, call=none, sum_in_hook=none, cast_in_hook=none)
    executed, without_sums, call, sum_in_hook, cast_in_hook = price_hosts(
        [
            replace(graph, columns={}),
            _leave_out(graph, are_sums),
            _CALL,
            replace(_SUM_IN_HOOK, execution=graph.execution),
            replace(_CAST_IN_HOOK, execution=graph.execution),
        ],
        platform,
    )
    of_others = np.zeros(len(graph))
    of_others[~are_sums] = _add_up_host(without_sums)
    return _Hosts(
        operations=_add_up_host(executed),
        without_sums=of_others,
        call=_add_up_host(call)[0],
        sum_in_hook=_add_up_host(sum_in_hook)[0],
        cast_in_hook=_add_up_host(cast_in_hook)[0],
    )


def _leave_out(graph: Graph, left_out: np.ndarray) -> Graph:
    """A graph without some operations, for its host; calls without a kernel before them are made
    before the next operation."""
    kept = np.flatnonzero(~left_out)
    made_before = np.append(0.0, np.cumsum(graph.features.bare)[kept])
    features = replace(graph.features.select(kept), bare=np.diff(made_before))
    labels = tuple(graph.labels[position] for position in kept.tolist())
    return replace(graph, labels=labels, features=features, columns={})


def _add_up_host(host: HostTimes) -> Array:
    """Time of the host for each operation, with all of its launches [s]."""
    return np.asarray(np.add(*host))


class _RegionGradients(NamedTuple):
    """Gradients of a region in the order in which they are computed, the kernels of its backward
    pass behind the last of them, and the calls of the copies to and from buckets [s]."""

    gradients: list[Gradient]
    rest: Array
    host: Array


def _time_buckets(
    model: Transformer,
    messages: MessageTimes,
    s: Strategy,
    several: np.ndarray,
    graph: Graph,
    rows: _Rows,
    contention: float,
) -> Work:
    """What DistributedDataParallel adds to an iteration: time by which buckets make the last
    backward pass longer, and calls of copies and messages [s].

    Arrays begin with the odd sizes. Both are 0 where nothing is reduced in buckets.
    """
    if not (rows.modules == "exchange.fill").any():
        return Work(np.zeros(()), np.zeros(()))
    replicas = np.append(1, s.dp)
    by_region = _list_gradients(model, graph, rows, np.append(0.0, several))
    gradients, rest = _order_gradients(by_region, model.all_layers)
    buckets = fill_buckets([gradient.nbytes for gradient in gradients])
    in_bucket = [sum(gradient.nbytes for gradient in gradients[bucket]) for bucket in buckets]
    sizes = np.broadcast_to(np.array(in_bucket)[:, np.newaxis], (len(buckets), len(replicas)))
    reductions = messages.time("all_reduce", sizes, replicas, 1)
    time = time_buckets(gradients, buckets, reductions, rest, contention)
    time_without = sum(gradient.work for gradient in gradients) + rest
    host = by_region.head.host + model.all_layers * by_region.layer.host + by_region.embeddings.host
    host = host + len(buckets) * rows.hosts.call
    shares = replicas > 1
    return Work(np.where(shares, time - time_without, 0.0), np.where(shares, host, 0.0))


def _list_gradients(
    model: Transformer, graph: Graph, rows: _Rows, several: Array
) -> ByRegion[_RegionGradients]:
    """Gradients of each region; those of `several` micro-batches are added up before (1, else 0).

    Copies of gradients to buckets and back are recorded in the order of the backward pass.
    """
    fills = np.flatnonzero(rows.modules == "exchange.fill")
    empties = np.flatnonzero(rows.modules == "exchange.empty")
    elements = graph.column("elements")
    if graph.columns:
        elements = elements[:, 0]
    itemsize = ITEMSIZE.get(model.dtype, 2)
    sum_itemsize = 4 if model.mixed else itemsize
    columns = rows.device.shape[1]
    listed = {}
    number = 0
    for region in reversed(REGIONS):
        gradients = []
        work = np.zeros(columns)
        host = 0.0
        of_backward = rows.find_region(region) & (rows.phases == "backward")
        for row in np.flatnonzero(of_backward).tolist():
            if not rows.are_sums[row]:
                work = work + rows.device[row]
                continue
            work = work + several * rows.device[row]
            fill, empty = fills[number], empties[number]
            nbytes = sum_itemsize * float(elements[row])
            gradients.append(Gradient(work, nbytes, rows.device[fill], rows.device[empty]))
            host += rows.hosts.operations[fill] + rows.hosts.operations[empty]
            work = np.zeros(columns)
            number += 1
        listed[region] = _RegionGradients(gradients, work, np.asarray(host))
    return ByRegion(*(listed[region] for region in REGIONS))


def _order_gradients(
    by_region: ByRegion[_RegionGradients], layers: int
) -> tuple[list[Gradient], Array]:
    """All gradients of a backward pass in the order in which they are computed, and the kernels
    behind the last one [s]."""
    gradients = list[Gradient]()
    waiting = np.zeros(by_region.head.rest.shape)
    backward = [by_region.head, *[by_region.layer] * layers, by_region.embeddings]
    for region in backward:
        for index, gradient in enumerate(region.gradients):
            if index == 0:
                gradient = gradient._replace(work=gradient.work + waiting)
                waiting = np.zeros(waiting.shape)
            gradients.append(gradient)
        waiting = waiting + region.rest
    return gradients, waiting


class GradientSums(NamedTuple):
    """Sums of the gradients of a region with those of earlier micro-batches, in the mean of all
    micro-batches.

    Parameters
    ----------
    whole : Work
        If a rank adds up whole gradients: their sums, and casts of those of the first micro-batch
        [s].
    shards : Work
        If it adds up its shards alone [s].
    """

    whole: Work
    shards: Work


def time_gradient_sums(times: MicroBatchTimes, s: Strategy, sizes: Sizes) -> ByRegion[GradientSums]:
    """Sums of gradients over micro-batches.

    Parameters
    ----------
    times : MicroBatchTimes
        One micro-batch of each strategy.
    s : Strategy
        Each field an array.
    sizes : Sizes
        Of the same strategies.

    Returns
    -------
    sums : ByRegion of GradientSums
        Of the embeddings, of one layer, and of the head.

    Notes
    -----
    The gradients of the first of m micro-batches are added to nothing, but where ranks share layers
    or sequences to zeros, as to the buffers of Megatron-LM: there are (m - 1) / m sums for each
    micro-batch, or one; also of a single micro-batch if there are buffers. PyTorch casts the first
    gradients before it reduces them (ZeRO stage 1).
    """
    several = np.where(sizes.micro > 1, 1.0, 0.0)
    sums = np.where(s.alone, (sizes.micro - 1.0) / sizes.micro, several)
    sums = np.where(s.buffers, 1.0, sums)
    casts = np.where(s.alone & (s.zero == 1), several / sizes.micro, 0.0)
    experts = sizes.experts / times.layer.weights
    layer_shard = count_shards(1.0, experts, owners=s.owners, sharers=sizes.sharers)
    end_shard = 1.0 / s.owners
    trained_in_ends = np.maximum(times.embeddings.trained + times.head.trained, 1.0)

    def time_region(
        region: RegionTimes, copies: UnitCopies, shard: Array, part_of_unit: Any
    ) -> GradientSums:
        casts_of_part = casts * part_of_unit
        sums_of_part = sums * part_of_unit
        of_shards = copies.sums.fixed + sizes.widened_sums * copies.sums.divided * shard
        return GradientSums(
            whole=Work(
                sums * region.gradient_sums.device + casts_of_part * copies.casts.device,
                sums * region.gradient_sums.host + casts_of_part * copies.casts.host,
            ),
            shards=Work(sums_of_part * of_shards, sums_of_part * copies.sums.host),
        )

    def time_end(region: RegionTimes) -> GradientSums:
        return time_region(region, times.end_copies, end_shard, region.trained / trained_in_ends)

    return ByRegion(
        embeddings=time_end(times.embeddings),
        layer=time_region(times.layer, times.layer_copies, layer_shard, 1.0),
        head=time_end(times.head),
    )


def add_gradient_sums(
    times: MicroBatchTimes, sums: ByRegion[GradientSums], s: Strategy
) -> MicroBatchTimes:
    """Add sums of gradients to the backward pass.

    Parameters
    ----------
    times : MicroBatchTimes
        One micro-batch of each strategy, without them.
    sums : ByRegion of GradientSums
        What `time_gradient_sums` finds.
    s : Strategy
        Each field an array.

    Returns
    -------
    times : MicroBatchTimes
        With them. A rank adds up its shards where gradients are reduced with each micro-batch, of
        which the host of FSDP alone launches fewer kernels: it does so in hooks.
    """
    in_hooks = s.scattered & s.alone

    def add(region: RegionTimes, added: GradientSums) -> RegionTimes:
        device = np.where(s.scattered, added.shards.device, added.whole.device)
        host = np.where(in_hooks, added.shards.host, added.whole.host)
        backward = region.backward._replace(
            device=region.backward.device + device, host=region.backward.host + host
        )
        return region._replace(backward=backward)

    return times._replace(
        embeddings=add(times.embeddings, sums.embeddings),
        layer=add(times.layer, sums.layer),
        head=add(times.head, sums.head),
    )


def add_casts_once(times: MicroBatchTimes, sizes: Sizes) -> MicroBatchTimes:
    """Add casts of weights to fp8, in the mean of all micro-batches, to the forward pass.

    Parameters
    ----------
    times : MicroBatchTimes
        One micro-batch of each strategy, without them.
    sizes : Sizes
        Of the same strategies.

    Returns
    -------
    times : MicroBatchTimes
        With them.
    """

    def add(region: RegionTimes) -> RegionTimes:
        forward = region.forward._replace(
            device=region.forward.device + region.casts_once.device / sizes.micro,
            host=region.forward.host + region.casts_once.host / sizes.micro,
        )
        return region._replace(forward=forward)

    return times._replace(
        embeddings=add(times.embeddings), layer=add(times.layer), head=add(times.head)
    )


def share_attention_on_ring(times: MicroBatchTimes, s: Strategy) -> MicroBatchTimes:
    """Run attention in parts, where keys go around a ring of ranks.

    Parameters
    ----------
    times : MicroBatchTimes
        One micro-batch of each strategy, with attention in one kernel for each pass.
    s : Strategy
        Each field an array.

    Returns
    -------
    times : MicroBatchTimes
        With a kernel for each part of the keys: what a kernel takes whatever its size counts for
        each.
    """
    further = np.where(s.cp_kind == "ring", s.cp - 1.0, 0.0)
    attention, layer = times.attention, times.layer
    forward = further * attention.forward_part
    backward = further * attention.backward_part
    again = further * attention.again_part
    # those of ``selective`` checkpoints are added later
    is_recorded = recomputes(s.checkpoint, "attention") & (s.checkpoint != "selective")
    in_backward = backward + np.where(is_recorded, again, 0.0)

    def lengthen(work: Work, more: Array) -> Work:
        return work._replace(device=work.device + more)

    return times._replace(
        attention=attention._replace(
            forward=lengthen(attention.forward, forward),
            backward=lengthen(attention.backward, backward),
            again=lengthen(attention.again, again),
        ),
        layer=layer._replace(
            forward=layer.forward._replace(device=layer.forward.device + forward),
            backward=layer.backward._replace(device=layer.backward.device + in_backward),
        ),
    )


def compute_attention_again(times: MicroBatchTimes, s: Strategy) -> MicroBatchTimes:
    """Add attention, with its calls, to the backward pass of ``selective`` checkpoints.

    Parameters
    ----------
    times : MicroBatchTimes
        One micro-batch of each strategy, without them.
    s : Strategy
        Each field an array.

    Returns
    -------
    times : MicroBatchTimes
        With them.
    """
    layer = times.layer
    is_selective = s.checkpoint == "selective"
    again = times.attention.again
    backward = layer.backward._replace(
        device=layer.backward.device + np.where(is_selective, again.device, 0.0),
        host=layer.backward.host + np.where(is_selective, again.host, 0.0),
    )
    return times._replace(layer=layer._replace(backward=backward))


def join_hosts(rank: RankTimes, whole: Iteration | None, contention: float) -> RankTimes:
    """Join the host of a rank of a stage with its device.

    Parameters
    ----------
    rank : RankTimes
        Times of its operations and of its host.
    whole : Iteration or None
        What was fitted to whole iterations of several ranks.
    contention : float
        Share of the speed of kernels that collectives take [-].

    Returns
    -------
    rank : RankTimes
        Times of the same operations; what the host adds to a pass is the time of the operation that
        ends it.

    Notes
    -----
    The host starts each pass with the device, as both wait for the same message.
    """
    graph = rank.group.graph
    # the host joins the device at the end of each pass
    marks = graph.kernels[STAGE_HOST]
    busy = _list_busy(rank, marks, contention)
    calls = rank.host + rank.launch_interval
    begins = np.append(0, marks[:-1] + 1)
    device = np.add.reduceat(busy, begins)
    host = np.add.reduceat(calls, begins)
    # the update is not waited for
    update = slice(marks[-1] + 1, None)
    device[-1] -= busy[update].sum()
    host[-1] -= calls[update].sum()
    seconds = rank.seconds.copy()
    communicators = graph.column("group")[graph.collectives]
    of_ranks = [graph.labels[place].name not in HOST_WORK for place in graph.collectives]
    communicators = communicators[np.array(of_ranks, dtype=bool)]
    if communicators.max(initial=0.0) < PAIRS:  # a single stage waits for no messages
        seconds[marks] = (join_host(device.sum(), host.sum(), whole) - device.sum()) / len(marks)
    else:
        seconds[marks] = join_host(device, host, whole) - device
    none = np.zeros(len(graph))
    return replace(rank, seconds=seconds, host=none, launch_interval=none.copy())


def _list_busy(rank: RankTimes, marks: np.ndarray, contention: float) -> Array:
    """For how long each operation keeps the device: kernels, and what they do not hide of messages
    inside a pass, or beside the passes of other micro-batches [s]."""
    graph = rank.group.graph
    collectives = graph.collectives
    communicators = graph.column("group")[collectives]
    # keys on the ring run beside the next kernel
    names = [graph.labels[place].name for place in collectives]
    on_ring = np.array([name == "send_recv" for name in names], dtype=bool)
    others = np.delete(np.arange(len(graph)), collectives)
    # behind the work of the host there is none
    behind = np.minimum(np.searchsorted(others, collectives), len(others) - 1)
    next_kernels = others[behind]
    ring_time = np.maximum(rank.durations - rank.seconds[next_kernels], 0.0)
    # messages in tiles run beside the kernels before what waits for them
    until_waits = _add_up_until_waits(graph, rank.seconds)
    tile_time = time_beside(rank.durations, compute=until_waits, contention=contention)
    in_pass = np.where(on_ring, ring_time, tile_time)
    busy = rank.seconds.copy()
    busy[collectives] = np.where(communicators < PASSED, in_pass, 0.0)
    is_beside = communicators == BESIDE
    if is_beside.any():
        messages, durations = collectives[is_beside], rank.durations[is_beside]
        busy[messages] = _expose_beside(rank, messages, durations, marks, contention)
    return busy


def _add_up_until_waits(graph: Graph, seconds: Array) -> Array:
    """Time of the kernels between the launch of each collective and what waits for it first [s]."""
    positions = graph.collectives
    done = np.append(0.0, np.cumsum(seconds))
    waiting = np.full(len(positions), len(graph))
    for wait in graph.collective_waits:
        waiting[wait.collective] = min(waiting[wait.collective], wait.operation)
    return np.asarray(done[waiting] - done[positions])


def _expose_beside(
    rank: RankTimes,
    messages: np.ndarray,
    durations: Array,
    marks: np.ndarray,
    contention: float,
) -> Array:
    """What the kernels behind messages beside passes do not hide, and what these take longer beside
    them, for each message [s].

    Each of these is followed by another one, by kernels, or by the host.
    """
    seconds = rank.seconds.copy()
    seconds[rank.group.graph.collectives] = 0.0
    before = np.append(0.0, np.cumsum(seconds))
    ends = np.unique(np.concatenate([messages, marks, [len(seconds)]]))
    end = ends[np.searchsorted(ends, messages, side="right")]
    kernels = before[end] - before[messages]
    longer = np.zeros(len(messages))
    together = 0.0
    for number, duration in enumerate(durations.tolist()):
        together += duration
        if kernels[number] > 0.0:
            longer[number] = time_beside(together, compute=kernels[number], contention=contention)
            together = 0.0
    return longer
