"""One micro-batch of a strategy on one rank: its operations, the sizes of its messages, and the
times of both."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.units import Array
from perfkit.prediction.cost import HostTimes, join_host, price, price_hosts
from perfkit.prediction.kept import find_moments, find_saved, list_lives
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.ranks import RankTimes
from perfkit.prediction.replicas import Gradient, time_buckets
from perfkit.workloads.blocks import RankShare, record_part
from perfkit.workloads.columns import Accesses, Features, HostCalls, OperationSizes
from perfkit.workloads.execution import HANDED, execute
from perfkit.workloads.graph import STAGE_HOST, Graph, Label
from perfkit.workloads.iteration import fill_buckets
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.transformer import Transformer

#: Parts of a model, in the order of its forward pass.
REGIONS = ("embeddings", "layers", "head")
#: Kinds of operations of attention between its projections.
CORES = ("bmm", "attention")
#: Tokens of a sequence in the first column of a recorded graph. A compiler merges what has equal
#: sizes; it is read off this column, where no two sizes are equal by chance [-].
_ODD = 1031
#: Communicators of a graph of `perfkit.prediction.stages`: those below `PASSED` are waited for
#: inside a pass, those from `PAIRS` on connect neighbouring stages [-].
PASSED, PAIRS = 3, 6
#: What replicas that share states do around their messages, see
#: `perfkit.workloads.blocks.record_part`.
EXCHANGED = ("gather.ends", "gather.layers", "regather.layers", "scatter.ends", "scatter.layers")
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
#: Sums and casts of gradients that hooks launch, without a call.
_IN_HOOKS = tuple(
    _make_operation(Label(name, "elementwise", name, "backward", ""), HostCalls(launches=1))
    for name in ("add_", "_to_copy")
)


class Sizes:
    """Sizes of a micro-batch and of the messages of its ranks; arrays if the strategy holds
    many."""

    def __init__(self, model: Transformer, s: Strategy) -> None:
        #: Micro-batches of a replica [-].
        self.micro = model.batch / (s.dp * s.micro_batch)
        #: Bytes of an activation or a weight in use, of a sum of gradients, and of one while ranks
        #: reduce it [B].
        self.itemsize = ITEMSIZE.get(model.dtype, 2)
        self.wide = 4 if model.mixed else self.itemsize
        self.summed = ITEMSIZE.get(model.reduce_dtype, self.wide)
        #: One number of each token of a rank, and the activations between stages [B].
        self.column = self.itemsize * s.micro_batch * model.sequence / s.cp
        self.between = self.column * model.hidden / s.rows
        #: Keys of a layer, and the mean of queries, keys, values and outputs, which change places
        #: with heads [B].
        head = model.head_width or model.hidden / model.heads
        self.keys = self.column * head * np.ceil((model.kv_heads or model.heads) / s.tp)
        self.swapped = (self.column * (head * model.heads / s.tp) + self.keys) / 2.0
        #: Tokens that go to experts [B]; numbers of the experts of a layer on a rank, and ranks
        #: that share them [-].
        self.routed = self.column * model.hidden * model.routed * (model.experts > 0)
        each = (2 + model.gated) * model.hidden * np.ceil((model.inner or 4 * model.hidden) / s.tp)
        self.experts = (model.experts // s.ep) * each
        self.sharers = np.maximum(s.owners // s.ep, 1)
        #: Whether gradients are copied for their reduction as they are computed. Otherwise those of
        #: several micro-batches were added up before.
        self.straight = s.scattered | np.equal(self.micro, 1)
        #: Bytes that this copy moves for a number, over those that it moves where gradients are
        #: copied as they are computed [-].
        self.widened = (self.wide + self.summed) / (self.itemsize + self.summed)
        #: Bytes that a copy before a reduction and one around a gather move where ranks share layers
        #: or sequences, relative to a copy of all sums of gradients [-].
        self.gathered = self.itemsize / self.wide
        from_new = np.greater(s.zero, 0) & self.straight
        self.reduced = np.where(from_new, (1.0 + self.gathered) / 2.0, 1.0)
        #: Numbers of the experts of a layer that are copied once more around each message, as ranks
        #: do not divide the experts; and the copies [-].
        divided = (model.experts // s.ep) % self.sharers == 0
        copied_again = np.greater(s.zero, 0) & np.logical_not(divided) & (model.experts > 0)
        self.reordered = np.where(copied_again, self.experts, 0.0)
        self.reorders = np.where(copied_again, 2.0 + model.gated, 0.0)


class MicroBatch(NamedTuple):
    """What a rank does, as it is executed and as it was recorded, and its trained numbers by
    region [-]."""

    graph: Graph
    recorded: Graph
    weights: dict[str, Array]


def record_micro_batch(model: Transformer, s: Strategy, execution: str | None) -> MicroBatch:
    """Record what a rank does, see `perfkit.workloads.blocks.record_part`: odd sizes first, then
    those of strategies.

    Strategies that are recorded together have the same `checkpoint`, all or none share products and
    tokens, and all or none are `replicated`.
    """
    shares = np.all(np.greater(s.tp, 1))
    odd = (
        (3, s.micro_batch),
        (_ODD, model.sequence // s.cp),
        (3 if shares else 1, s.tp),
        (1, s.cp),
        (1, s.ep),
    )
    batch, sequence, tensor, context, experts = (np.append(*each).astype(float) for each in odd)
    cut = RankShare(batch, sequence, tensor, tensor if np.all(s.rows > 1) else 1, context, experts)
    recomputed = bool(np.all(np.equal(s.checkpoint, "full")))
    replicated = bool(np.all(s.replicated))
    exchange = "buckets" if replicated else "shards"
    graph, weights = record_part(
        replace(model, checkpoint=recomputed),
        cut,
        autocast=model.mixed and replicated,
        exchange=exchange,
    )
    executed = execute([graph], execution)[0]
    if executed.execution == "compiled":
        executed = _hand_weights_to_regions(executed)
    numbers = {name: np.broadcast_to(own, len(batch)) for name, own in weights.items()}
    return MicroBatch(executed, graph, numbers)


def _hand_weights_to_regions(graph: Graph) -> Graph:
    """Give the calls that weights of compiled code cost to the kernels of their own region, as one
    layer stands for many."""
    bare = graph.features.bare.copy()
    names = np.array([label.name for label in graph.labels])
    phases = np.array([label.phase for label in graph.labels])
    modules = np.array([label.module for label in graph.labels])
    regions = [np.char.startswith(modules, region) for region in REGIONS]
    # each weight has a sum of gradients
    weights = [int((own & (names == "add_")).sum()) for own in regions]
    for phase in ("forward", "backward"):
        for_weights = (phases == phase) & (bare > 0)
        for own, count in zip(regions, weights, strict=True):
            rows = for_weights & own
            if rows.any():
                bare[rows] = HANDED * count / rows.sum()
    return replace(graph, features=replace(graph.features, bare=bare))


def price_micro_batch(
    model: Transformer,
    messages: MessageTimes,
    s: Strategy,
    several: Array,
    execution: str | None,
) -> dict[str, Array | float]:
    """Times of a micro-batch on one rank by region and phase [s], trained numbers [-], and spread,
    on the platform of `messages`: one for each strategy, or one for all.

    `several` says whether a strategy has several micro-batches; it matters where replicas share
    nothing but the batch.
    """
    platform = messages.platform
    graph, recorded, weights = record_micro_batch(model, s, execution)
    inside = np.array(
        [
            label.module.startswith("layers") or label.module.endswith(".layers")
            for label in graph.labels
        ]
    )
    often = np.where(inside, float(model.layers), 1.0)
    [cost] = price([replace(graph, repeats=often)], platform, dtype=graph.dtype)
    seconds = cost.seconds
    names = np.array([label.name for label in graph.labels])
    kinds = np.array([label.kind for label in graph.labels])
    variants = np.array([label.variant for label in graph.labels])
    phases = np.array([label.phase for label in graph.labels])
    modules = np.array([label.module for label in graph.labels])
    inside = np.char.startswith(modules, "layers")
    exchange, added, ranks = np.zeros(seconds.shape), names == "add_", np.append(1, s.tp)
    of_layers = graph.collectives[~np.char.startswith(modules[graph.collectives], "exchange")]
    for operation in np.unique(names[of_layers]):
        own = of_layers[names[of_layers] == operation]
        nbytes = np.broadcast_to(graph.column("nbytes"), (len(graph), len(ranks)))[own]
        exchange[own] = messages.time(operation, nbytes, ranks, 1)
    others = np.flatnonzero(~added)
    # the same for all sizes
    executed, without_sums, call, *in_hooks = price_hosts(
        [
            replace(graph, columns={}),
            _leave_out(graph, added),
            _CALL,
            *(replace(kernel, execution=graph.execution) for kernel in _IN_HOOKS),
        ],
        platform,
    )
    host, call_time = np.add(*executed), _add_up_host(call)
    host_without_sums = np.zeros(len(graph))
    host_without_sums[others] = np.add(*without_sums)
    # what a kernel takes whatever its size
    fixed = np.array([model.fixed_time for model in cost.models])[cost.classes]
    out = {}
    for name in REGIONS:
        own = np.char.startswith(modules, name)
        for phase in ("forward", "backward"):
            here = own & (phases == phase)
            out[f"{name}.{phase}"] = seconds[here & ~added].sum(axis=0)
            out[f"{name}.tensor.{phase}"] = exchange[here].sum(axis=0)
            out[f"{name}.host.{phase}"] = host_without_sums[here].sum()
        out[f"{name}.weights"] = weights[name]
        out[f"{name}.host.added"] = (host - host_without_sums)[own].sum()
        out[f"{name}.added"] = seconds[own & added].sum(axis=0)
        out[f"{name}.added.fixed"] = fixed[own & added].sum()
    again = 0
    for phase in ("forward", "backward"):
        cores = np.flatnonzero(
            np.char.endswith(modules, "attention") & (phases == phase) & np.isin(kinds, CORES)
        )
        cores = cores[again:]  # what is computed again comes first
        core = slice(cores.min(), cores.max() + 1)
        out[f"attention.{phase}"], out[f"attention.host.{phase}"] = (
            seconds[core].sum(axis=0),
            host[core].sum(),
        )
        again = len(cores) if np.all(np.equal(s.checkpoint, "full")) else 0
    put_off = inside & (phases == "backward") & (kinds == "gemm") & (variants == "tn")
    out["delayed"] = seconds[put_off].sum(axis=0)
    out["delayed.host"] = host_without_sums[put_off].sum()
    updates = (phases == "update") & ~np.isin(modules, ("exchange.whole", "exchange.narrow"))
    narrow = modules == "exchange.narrow"
    out["narrow"] = seconds[narrow].sum(axis=0) / sum(weights.values())
    out["narrow.host"] = host[narrow].sum()
    out["update"] = seconds[updates].sum(axis=0) / sum(weights.values())
    out["update.host"] = host[updates].sum()
    out["packing"] = seconds[modules == "exchange.whole"].sum(axis=0) / sum(weights.values())
    # sums and casts of gradients that hooks of FSDP run
    hosts = [_add_up_host(kernel) for kernel in in_hooks]
    for unit, regions in (("layers", ("layers",)), ("ends", ("embeddings", "head"))):
        sums = added & np.logical_or.reduce([np.char.startswith(modules, own) for own in regions])
        out[f"added.{unit}.fixed"] = fixed[sums].sum()
        out[f"added.{unit}.shared"] = seconds[sums].sum(axis=0) - fixed[sums].sum()
        out[f"added.{unit}.host"], widened = (sums.sum() * host_time for host_time in hosts)
        out[f"widened.{unit}"] = out["narrow"] * sum(weights[own] for own in regions)
        out[f"widened.{unit}.host"] = widened if narrow.any() else 0.0
    for way in EXCHANGED:
        own = modules == f"exchange.{way}"
        shards = own & np.isin(names, ON_SHARDS)
        sums = own & (names == "chunk_cat")
        out[way] = seconds[own & ~shards].sum(axis=0) + fixed[shards].sum()
        out[f"{way}.shared"] = seconds[shards].sum(axis=0) - fixed[shards].sum()
        out[f"{way}.summed"] = seconds[sums].sum(axis=0) - fixed[sums].sum()
        # copies ahead of the message
        out[f"{way}.ahead"] = fixed[shards & (names != "_to_copy")].sum()
        out[f"{way}.host"] = host_without_sums[own].sum()
    split = (modules == "exchange.gather.layers") & (names == "split_with_sizes_copy")
    out["reorder.fixed"] = fixed[split].sum()
    out["reorder"] = (seconds[split].sum(axis=0) - fixed[split].sum()) / weights["layers"]
    out["buckets"] = out["buckets.host"] = 0.0
    if (modules == "exchange.fill").any():
        out["buckets"], out["buckets.host"] = _price_buckets(
            model, messages, s, several, graph, seconds, host, call_time
        )
    out["call"] = call_time
    lives = list_lives(graph)
    lives_before = lives if recorded.execution == graph.execution else list_lives(recorded)
    for region, nbytes in find_saved(lives_before).items():
        out[f"kept.{region}"] = nbytes
    for key, moment in find_moments(lives).items():
        out[f"activations.{'.'.join(key)}"] = moment.activations
        if "forward" not in key:
            out[f"gradients.{'.'.join(key)}"] = moment.gradients
    # kernels of a kind have one fit and one scale, so that they err together, and so does all that
    # is only assumed
    kinds_of_classes = [model.kind for model in cost.models]
    causes = np.where(cost.assumed, "", kinds_of_classes)
    errors = cost.spread * cost.totals / cost.totals.sum(axis=0)
    out["spread"] = np.sqrt(
        sum(np.square(errors[causes == cause].sum(axis=0)) for cause in np.unique(causes))
    )
    # without the odd sizes
    return {name: values[1:] if np.ndim(values) else values for name, values in out.items()}


def _leave_out(graph: Graph, left_out: np.ndarray) -> Graph:
    """A graph without some operations, for its host; calls without a kernel before them are made
    before the next operation."""
    kept = np.flatnonzero(~left_out)
    made_before = np.append(0.0, np.cumsum(graph.features.bare)[kept])
    features = replace(graph.features.select(kept), bare=np.diff(made_before))
    labels = tuple(graph.labels[position] for position in kept.tolist())
    return replace(graph, labels=labels, features=features, columns={})


def _add_up_host(alone: HostTimes) -> float:
    """Time of the host for a single operation [s]."""
    return float(np.add(*alone)[0])


def _price_buckets(
    model: Transformer,
    messages: MessageTimes,
    s: Strategy,
    several: np.ndarray,
    graph: Graph,
    seconds: Array,
    host: Array,
    call_time: float,
) -> tuple[Array, Array]:
    """Time that replicas add to the last backward pass, if DistributedDataParallel reduces their
    gradients in buckets, and time of its host, which launches a collective in `call_time` [s].

    Like `seconds`, both begin with the odd sizes.
    """
    replicas = np.append(1, s.dp)
    adds = np.append(0.0, several)
    modules = np.array([label.module for label in graph.labels])
    in_backward = np.array([label.phase == "backward" for label in graph.labels])
    is_sum = np.array([label.name == "add_" for label in graph.labels]) & in_backward
    fills, empties = (np.flatnonzero(modules == f"exchange.{way}") for way in ("fill", "empty"))
    elements = graph.column("elements")[:, 0] if graph.columns else graph.column("elements")
    itemsize = ITEMSIZE.get(model.dtype, 2)
    wide = 4 if model.mixed else itemsize
    by_region: dict[str, list[Gradient]] = {}
    rest: dict[str, Array] = {}
    number = 0
    hosts = 0.0
    for region in reversed(REGIONS):
        of_region = np.char.startswith(modules, region) & in_backward
        often = model.layers if region == "layers" else 1
        by_region[region] = []
        work = np.zeros(seconds.shape[1])
        for place in np.flatnonzero(of_region).tolist():
            if not is_sum[place]:
                work = work + seconds[place]
                continue
            fill, empty = fills[number], empties[number]
            work = work + adds * seconds[place]
            nbytes = wide * float(elements[place])
            by_region[region].append(Gradient(work, nbytes, seconds[fill], seconds[empty]))
            hosts += often * (host[fill] + host[empty])
            work = np.zeros(seconds.shape[1])
            number += 1
        rest[region] = work
    gradients = list[Gradient]()
    waiting = np.zeros(seconds.shape[1])
    for region in reversed(REGIONS):
        for _ in range(model.layers if region == "layers" else 1):
            for place, gradient in enumerate(by_region[region]):
                if place == 0:
                    gradient = gradient._replace(work=gradient.work + waiting)
                    waiting = np.zeros(seconds.shape[1])
                gradients.append(gradient)
            waiting = waiting + rest[region]
    buckets = fill_buckets([own.nbytes for own in gradients])
    in_bucket = np.array([sum(own.nbytes for own in gradients[bucket]) for bucket in buckets])
    sizes = np.broadcast_to(in_bucket[:, np.newaxis], (len(buckets), len(replicas)))
    platform = messages.platform
    reductions = messages.time("all_reduce", sizes, replicas, 1)
    overlap = dict(platform.context.overlap or {})
    time = time_buckets(gradients, buckets, reductions, waiting, overlap.get("contention", 0.0))
    alone = sum(own.work for own in gradients) + waiting
    hosts += len(buckets) * call_time
    shares = replicas > 1
    return np.where(shares, time - alone, 0.0), np.where(shares, hosts, 0.0)


def join_hosts(rank: RankTimes, whole: Iteration | None) -> RankTimes:
    """Times of a rank of a stage; its host starts each pass with the device, as both wait for the
    same message."""
    graph, seconds = rank.group.graph, rank.seconds.copy()
    marks, own = graph.kernels[STAGE_HOST], graph.collectives
    groups, begins, busy = graph.column("group")[own], np.append(0, marks[:-1] + 1), seconds.copy()
    work = np.delete(np.arange(len(graph)), own)
    # keys on the ring run beside the next kernel
    beside = seconds[work[np.searchsorted(work, own)]]
    hides = [graph.labels[place].name == "send_recv" for place in own]
    busy[own] = np.where(
        groups < PASSED, np.maximum(rank.durations - np.where(hides, beside, 0.0), 0.0), 0.0
    )
    device, host = (
        np.add.reduceat(each, begins) for each in (busy, rank.host + rank.launch_interval)
    )
    # the update is not waited for
    rest = [each[marks[-1] + 1 :].sum() for each in (busy, rank.host + rank.launch_interval)]
    device[-1], host[-1] = device[-1] - rest[0], host[-1] - rest[1]
    if groups.max(initial=0.0) < PAIRS:  # a single stage waits for no messages
        seconds[marks] = (join_host(device.sum(), host.sum(), whole) - device.sum()) / len(marks)
    else:
        seconds[marks] = join_host(device, host, whole) - device
    return replace(
        rank, seconds=seconds, host=np.zeros(len(graph)), launch_interval=np.zeros(len(graph))
    )
