"""Strategies of parallel training: closed forms over what one rank does, on arrays with one size for each strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.units import Array
from perfkit.models.partitions import RECOMPUTED, activation_bytes, model_state_bytes
from perfkit.models.pipelines import CHUNKED, bubble_time, exposed_time, held_batches
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import classify, join_host, price_host, spread_classes, time_operations
from perfkit.prediction.memory import WORKSPACE
from perfkit.prediction.ranks import RankTimes, price_group
from perfkit.prediction.uncertainty import CONTEXT, find_host_error
from perfkit.workloads.blocks import UNFUSED, Cut, record_part
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.transformer import Transformer

#: Parts of the time of an iteration.
PARTS = ("work", "tensor", "context", "experts", "host", "stages", "bubble", "replicas", "update")
_REGIONS = ("embeddings", "layers", "head")
#: Error of what ranks spend on each other [-], as in `perfkit.prediction.uncertainty.join_errors`.
_WAITS = 0.3
_TINY = 1e-30
#: Tokens of three sequences on three ranks, the first of all sizes: what a compiler merges is read off these, where no
#: two sizes are equal by chance [-].
_ODD = 1031
#: Communicators of a graph of `perfkit.prediction.stages` that are waited for within a pass: those before this one [-].
PASSED = 3
#: Sizes of a collective as its host sees it: a call that launches a kernel [-].
_CALL = np.isin(FEATURES, ("calls", "launches")).astype(float)[np.newaxis]
#: Where sequences, and ranks that share layers, sequences and experts, stand in a number of 64 bits [-].
_BITS = (45, 30, 15, 0)


def price_strategies(
    model: Transformer, platform: Platform, strategies: Strategy, execution: str | None = None
) -> dict[str, Array]:
    """Price an iteration for every one of many strategies.

    Parameters
    ----------
    model : Transformer
        The model; its batch is over all ranks, and what it says of sharing, recomputation and micro-batches is not
        asked for.
    platform : Platform
        GPUs; ranks that share layers are neighbours, then those that share sequences, experts, and the rest
        of the replicas.
    strategies : Strategy
        Each field an array, with one value for each strategy.
    execution : str, optional
        ``eager`` or ``compiled``.

    Returns
    -------
    columns : dict of str to array
        ``time`` and its parts, which sum to it: ``work`` of the slowest stage, ``tensor``, ``context``, ``experts`` and
        ``stages`` (messages among these that nothing hides), ``host``, ``bubble``, ``replicas`` (gradients and
        weights) and ``update`` [s]; ``spread`` of its logarithm [-]; and ``needs``, the memory of the fullest rank [B].

    Notes
    -----
    Micro-batches times the slowest stage, the bubble, and what replicas exchange that no layer hides. A stage takes
    what one rank's kernels take by the closed forms of `predict`, recorded with its part of each layer, and the
    collectives among them; slower hosts show. Strategies that share the sizes of a layer share its price.
    """
    if platform.device.kind == "cpu":
        raise ValueError(f"platform {platform.name!r} is a CPU; strategies are priced on GPUs; take one, as h100-sxm-8")
    s, parts = strategies, dict[str, Array]()
    structure = (s.checkpoint == "full") + 2 * (s.rows > 1) + 4 * (s.tp > 1)
    for kind in np.unique(structure):
        members = np.flatnonzero(structure == kind)
        shared = (np.asarray(own, dtype=np.int64)[members] for own in (s.micro_batch, s.tp, s.cp, s.ep))
        codes, place = np.unique(sum(own << bits for own, bits in zip(shared, _BITS, strict=True)), return_inverse=True)
        odd = zip((3, 3 if kind & 4 else 1, 1, 1), _BITS, strict=True)
        batch, tensor, context, experts = (np.append(first, 1.0 * (codes >> bits & 0x7FFF)) for first, bits in odd)
        sequence = np.append(_ODD, model.sequence // context[1:])
        cut = Cut(batch, sequence, tensor, tensor if kind & 2 else 1, context, experts)
        for name, values in _price_part(replace(model, checkpoint=bool(kind & 1)), platform, cut, execution).items():
            parts.setdefault(name, np.zeros(len(structure)))[members] = values[1 + place]
    parts["layers.backward"] += np.where(s.checkpoint == "selective", parts["attention.forward"], 0.0)
    micro, layers = model.batch / (s.dp * s.micro_batch), np.ceil(model.layers / s.pp)
    chunks = np.where(np.isin(s.schedule, CHUNKED), s.chunks, 0)
    return _Iterations(model, platform, s, parts, micro, layers, chunks, ITEMSIZE.get(model.dtype, 2)).add_up()


def _price_part(model: Transformer, platform: Platform, cut: Cut, execution: str | None) -> dict[str, Array]:
    """Times of a micro-batch on one rank by region and phase [s], trained numbers [-] and spread, for every cut."""
    graph, weights = record_part(model, cut)
    [graph] = execute([graph], execution)
    classes, models, number = classify([graph], platform, graph.dtype)
    seconds, hot, *_ = time_operations([graph], platform, graph.dtype, 1, models, number)
    names, kinds, variants, phases, modules = (np.array(column) for column in zip(*graph.labels, strict=True))
    exchange, added = np.zeros(seconds.shape), names == "add_"
    for operation in np.unique(names[graph.collectives]):
        rows = np.flatnonzero((names == operation) & (kinds == "collective"))
        nbytes = graph.column("nbytes")[rows]
        exchange[rows] = _price_messages(platform, operation, nbytes, cut.tensor + 0 * nbytes, 1 + 0 * nbytes)
    host = np.add(*price_host(replace(graph, columns={}), platform))
    out = {}
    for name in _REGIONS:
        own = np.char.startswith(modules, name)
        for phase in ("forward", "backward"):
            here = own & (phases == phase)
            out[f"{name}.{phase}"] = seconds[here & ~added].sum(axis=0)
            out[f"{name}.tensor.{phase}"] = exchange[here].sum(axis=0)
            out[f"{name}.host.{phase}"] = host[here].sum()
        out[f"{name}.added"], out[f"{name}.weights"] = seconds[own & added].sum(axis=0), weights[name]
    inside = np.char.startswith(modules, "layers")
    for phase in ("forward", "backward"):
        cores = np.flatnonzero(inside & (phases == phase) & np.isin(kinds, ("bmm", "attention")))
        out[f"attention.{phase}"] = seconds[cores.min() : cores.max() + 1].sum(axis=0)
    out["delayed"] = seconds[inside & (phases == "backward") & (kinds == "gemm") & (variants == "tn")].sum(axis=0)
    for name, own in (("update", (phases == "update") & (modules != "packing")), ("packing", modules == "packing")):
        out[name] = seconds[own].sum(axis=0) / sum(weights.values())
    call = Graph((("all_to_all", "collective", "all_to_all", "forward", ""),), _CALL, np.zeros((0, 4)))
    out["call"] = np.add(*price_host(call, platform))[0]
    often = np.where(inside, float(model.layers), 1.0)
    whole = replace(graph, repeats=often)
    times, spreads, _ = spread_classes(whole, platform, classes, models, number, often[:, None] * seconds, hot)
    # kernels of a kind have one fit and one scale, so that they err together, and so does all that is only assumed
    causes = np.where(models[2]["assumed"] > 0, "", [kind for kind, *_ in classes])
    errors = spreads * times / times.sum(axis=0)
    out["spread"] = np.sqrt(sum(np.square(errors[causes == cause].sum(axis=0)) for cause in np.unique(causes)))
    return {name: np.broadcast_to(values, seconds.shape[1]) for name, values in out.items()}


def _price_messages(platform: Platform, operation: str, nbytes: Array, count: Array, stride: Array) -> Array:
    """Time of collectives of so many ranks at a distance [s].

    An algorithm across nodes may be named behind a dot.
    """
    operation, _, way = operation.partition(".")
    local, time = platform.network.ranks_per_node, np.zeros(nbytes.shape)
    codes = count.astype(np.int64) << 32 | stride.astype(np.int64)
    for code in np.unique(codes[count > 1]):
        ranks, apart = int(code >> 32), int(code & 0xFFFFFFFF)
        own, most = codes == code, min(max(local // apart, 1), ranks)
        if way and local < ranks and most == local:
            time[own] = platform.price_collective(operation, nbytes[own], ranks, way).time
        else:
            time[own] = price_group(platform, operation, nbytes[own], ranks, -(-ranks // most), most).time
    return time


def record_micro_batch(model: Transformer, s: Strategy, execution: str | None) -> tuple[Graph, dict[str, Array]]:
    """Record what a strategy has a rank do, see `perfkit.workloads.blocks.record_part`; the last column is its own."""
    odd = ((3, s.micro_batch), (_ODD, model.sequence // s.cp), (3 if s.tp > 1 else 1, s.tp), (1, s.cp), (1, s.ep))
    compiled = slice(execution != "compiled", None)  # what is merged is read off the first one
    batch, sequence, tensor, context, experts = (np.array(own, dtype=float)[compiled] for own in odd)
    cut = Cut(batch, sequence, tensor, tensor if s.sequence_parallel and s.tp > 1 else 1, context, experts)
    graph, weights = record_part(replace(model, checkpoint=s.checkpoint == "full"), cut)
    found = {name: np.broadcast_to(own, np.shape(batch)) for name, own in weights.items()}
    return execute([graph], execution)[0], found


def count_experts(model: Transformer, s: Strategy) -> Array:
    """Numbers of the experts of a layer on a rank."""
    each = (2 + model.gated) * model.hidden * np.ceil((model.inner or 4 * model.hidden) / s.tp)
    return np.asarray((model.experts // s.ep) * each)


def join_hosts(rank: RankTimes, durations: Array, whole: Fit | None) -> RankTimes:
    """Times of a rank whose host begins each pass with its device, as it waits for messages: both join softly."""
    graph, seconds = rank.kind.graph, rank.seconds.copy()
    marks, own = graph.kernels["host", "host"], graph.collectives
    groups, begins, busy = graph.column("group")[own], np.append(0, marks[:-1] + 1), seconds.copy()
    work = np.delete(np.arange(len(graph)), own)
    beside = seconds[work[np.searchsorted(work, own)]]  # keys go round beside the next kernel
    hides = [graph.labels[place][0] == "send_recv" for place in own]
    busy[[label[0] == "add_" for label in graph.labels]] = 0.0  # sums of gradients
    busy[own] = np.where(groups < PASSED, np.maximum(durations - np.where(hides, beside, 0.0), 0.0), 0.0)
    device, host = (np.add.reduceat(each, begins) for each in (busy, rank.host + rank.spacing))
    rest = [each[marks[-1] + 1 :].sum() for each in (busy, rank.host + rank.spacing)]  # the update is not waited for
    device[-1], host[-1] = device[-1] - rest[0], host[-1] - rest[1]
    seconds[marks] = join_host(device, host, whole) - device
    return replace(rank, seconds=seconds, host=np.zeros(len(graph)), spacing=np.zeros(len(graph)))


@dataclass(frozen=True)
class _Iterations:
    """Iterations from the parts of one rank as `_price_part` finds them, one for each strategy."""

    model: Transformer
    platform: Platform
    s: Strategy
    parts: dict[str, Array]

    micro: Array  # micro-batches
    layers: Array  # of the largest stage
    chunks: Array  # of each stage; 0 where nothing hides its messages
    itemsize: int  # of activations and of weights in use

    @property
    def whole(self) -> Fit | None:
        """What was fitted to whole iterations of several ranks."""
        return self.platform.context.find_iteration(self.model.family, 2)

    @property
    def owners(self) -> Array:
        """Ranks that share what replicas share."""
        return np.asarray(np.where(self.s.shards > 0, self.s.shards, self.s.dp) * self.s.cp)

    @property
    def experts(self) -> Array:
        """Numbers of the experts of a stage on a rank."""
        return np.asarray(self.layers * count_experts(self.model, self.s))

    def average(self, weights: Array) -> Array:
        """Ranks that share a weight on average, as those that share experts share them with fewer others."""
        share = self.experts / weights
        return 1.0 / ((1.0 - share) / self.owners + share / np.maximum(self.owners // self.s.ep, 1))

    def gather(self, *names: str) -> tuple[Array, Array]:
        """What the slowest stage has of some parts, and all stages together."""
        first, one, last = (np.sum([self.parts[f"{region}.{name}"] for name in names], axis=0) for region in _REGIONS)
        ends = np.where(self.s.pp > 1, np.maximum(first, last), first + last)
        return self.layers * one + ends, self.model.layers * one + first + last

    def hide(self, time: Array, compute: Array, pieces: Any, hidden: Any) -> Array:
        """What is left of communication where it is hidden, and what it takes from the kernels beside it."""
        last = time / pieces
        slowed = self.contention * np.minimum(time - last, compute / (1.0 - self.contention))
        left = np.maximum(exposed_time(time, compute=compute, pieces=pieces), last + slowed)
        return np.asarray(np.where(hidden, left, time))

    @property
    def contention(self) -> float:
        """Share that collectives take from kernels beside them."""
        overlap = self.platform.context.overlap
        return float(overlap["contention"]) if overlap else 0.0

    def join(self, devices: Sequence[Array], hosts: Sequence[Array]) -> Array:
        """What hosts add to passes of devices: to each where it waits for messages, else to all together."""
        apart = sum(join_host(device, host, self.whole) for device, host in zip(devices, hosts, strict=True))
        together = join_host(sum(devices), sum(hosts), self.whole)
        return np.asarray(np.where(self.s.pp > 1, apart, together) - sum(devices))

    def share_stages(self) -> dict[str, Array]:
        """Work of micro-batches on the slowest stage, what is among and around it, and the bubble."""
        s, p, m, send = self.s, self.parts, self.model, partial(_price_messages, self.platform, "send_recv")
        work, works = self.gather("forward", "backward")
        tensor, tensors = (self.hide(own, beside, s.tp, s.tiled) for own, beside in zip(
            self.gather("tensor.forward", "tensor.backward"), (work, works), strict=True))  # fmt: skip
        numbers = self.itemsize * s.micro_batch * m.sequence / s.cp
        heads, full = np.ceil((m.kv_heads or m.heads) / s.tp), s.checkpoint == "full"
        apart, routed = s.tp * s.cp, numbers * m.hidden * m.routed * (m.experts > 0)
        moved = sum(_price_messages(self.platform, "all_to_all" + way, routed, np.where(own, s.ep, 1), apart)
                    for way, own in (("", np.logical_not(s.two_level)), (".two_level", s.two_level)))  # fmt: skip
        ring = np.zeros(len(work))
        devices: tuple[list[Array], ...] = ([], [])  # of the last stage, and of those between the ends
        hosts: tuple[list[Array], ...] = ([], [])
        for often, phase, moves in ((2.0, "forward", 2.0), (4.0, "backward", 2.0 + 2.0 * full)):
            width = m.hidden / m.heads * heads  # keys and values, and then their gradients too
            step = send(often * numbers * width, np.minimum(s.cp, 2), s.tp)
            passed = (s.cp - 1) * self.hide(step, p[f"attention.{phase}"] / s.cp, np.inf, True)
            swapped = numbers * (m.hidden / s.tp + width) / 2.0  # mean of queries, keys, values and what comes of them
            swapped = _price_messages(self.platform, "all_to_all", swapped, np.where(s.ulysses, s.cp, 1), s.tp)
            own = self.layers * np.where(s.ulysses, 4.0 * swapped, passed)
            calls = np.where(s.ulysses, 4.0 * (s.cp > 1), 2.0 * (s.cp - 1)) + moves * (s.ep > 1) * (m.experts > 0)
            beside, shared = self.gather(phase)[0], self.gather(f"tensor.{phase}")[0]
            left = tensor / np.maximum(self.gather("tensor.forward", "tensor.backward")[0], _TINY)
            one = p[f"layers.{phase}"] + left * p[f"layers.tensor.{phase}"]
            for place, ends in ((0, beside + left * shared - self.layers * one), (1, 0.0)):  # of the last stage, others
                devices[place].append(self.layers * (one + moves * moved) + own + ends)
                more = self.gather(f"host.{phase}")[0] - self.layers * p[f"layers.host.{phase}"]
                hosts[place].append(self.layers * (p[f"layers.host.{phase}"] + calls * p["call"]) + more * (place == 0))
            ring += own
        moved = self.layers * (4.0 + 2.0 * full) * moved
        message = 2.0 * send(numbers * m.hidden / s.rows, np.minimum(s.pp, 2), s.tp * s.cp * s.dp)
        ring = ring + moved
        late, later = (self.join(device, host) for device, host in zip(devices, hosts, strict=True))
        total = works + tensors + ring * s.pp + late + later * (s.pp - 1)
        late = np.maximum(late, sum(devices[1]) + later - sum(devices[0]))  # where hosts slow others down to more
        open_ends = np.where(self.chunks > 0, 0.0, message)
        slowest = work + tensor + ring + late + open_ends
        chunks = np.maximum(self.chunks, 1)
        total = total + message * (s.pp - 1) * chunks
        delayed = np.where(s.schedule == "zero_bubble", self.layers * p["delayed"], 0.0)
        # of many chunks each waits until the first micro-batch has come round, but for what a stage has to do meanwhile
        busy = np.minimum(self.micro, np.where(s.schedule == "interleaved", s.pp, self.micro)) * slowest / chunks
        round_trip = (chunks - 1) * np.maximum(s.pp * (slowest / chunks + message) - busy, 0.0) * (s.pp > 1)
        return {
            "work": self.micro * work + (self.micro - 1) * self.gather("added")[0], "tensor": self.micro * tensor,
            "context": self.micro * (ring - moved), "experts": self.micro * moved, "host": self.micro * late,
            "stages": self.micro * open_ends,
            "bubble": round_trip + bubble_time(
                total, slowest=slowest, stages=s.pp, chunks=chunks, delayed=delayed, micro_batches=self.micro),
        }  # fmt: skip

    def share_replicas(self, weights: Array, stretch: Array) -> Array:
        """What replicas exchange of gradients and weights, as far as nothing hides it, with the copies around it.

        Passes are so many times as long as their kernels.
        """
        s, wide, breadth = self.s, 4 if self.model.mixed else self.itemsize, self.s.schedule == "breadth_first"
        ranks, layer, one = self.owners, self.parts["layers.weights"], count_experts(self.model, s)

        def send(operation: str, itemsize: float, ranks: Array = ranks, apart: Any = 1, part: Any = 1) -> Array:
            """Messages of all weights, layer by layer: those of experts are of fewer ranks, which are further apart."""
            sizes, few = (layer - one, weights - self.layers * layer), np.maximum(ranks // s.ep, 1)
            out = np.zeros(len(weights))
            counts: tuple[Any, ...] = (self.layers, 1.0)
            for count, size in zip(counts, sizes, strict=True):
                out += count * _price_messages(self.platform, operation, itemsize * size / part, ranks, s.tp * apart)
            if not self.model.experts:
                return np.asarray(out)
            far = s.tp * s.ep * apart
            return out + self.layers * _price_messages(self.platform, operation, itemsize * one / part, few, far)

        forward, backward = (stretch * self.gather(name)[0] for name in ("forward", "backward"))
        groups = s.dp * s.cp // ranks  # of hybrid sharding, which add up what each of them has summed up
        reduce = np.where(s.zero > 0, send("reduce_scatter", wide), send("all_reduce", wide))
        reduce = reduce + send("all_reduce", wide, groups, ranks, np.where(s.zero > 0, ranks, 1))
        gather, each = send("all_gather", self.itemsize), np.where(breadth, 1.0, self.micro)
        chunks = np.maximum(self.chunks, 1)  # the last of which has one micro-batch to hide behind
        window = (np.where(breadth, self.micro * (chunks - 1), 0.0) + 1) / chunks
        late = (s.pp - 1) / chunks  # what each pass does is met once more in every other stage
        often = each + late
        reduced, gathered = np.where(s.zero > 1, often, 1.0), np.choose(s.zero, [0.0, 1.0, often, often])
        again = np.where(s.zero > 2, often, 0.0)
        pieces = weights / np.maximum(layer, weights - self.layers * layer)  # the largest is first or last
        both = reduce + np.where(s.zero > 2, gather, 0.0)  # one after the other
        time = reduced * self.hide(both, window * backward, pieces, s.overlap)
        time += gathered * self.hide(gather, forward, pieces, s.overlap)
        slows = np.where(s.overlap & (s.zero < 2), late, 0.0)  # the last pass of every other stage
        copies = np.where(s.zero > 0, 1.0, 2.0) * (reduced + slows) + gathered + again
        time += np.where(ranks * groups > 1, copies, 0.0) * self.parts["packing"] * weights
        time += slows * self.contention * np.minimum(reduce, window * backward)
        return np.asarray(time)

    def add_up(self) -> dict[str, Array]:
        """Times and their parts [s], spread [-] and memory [B]."""
        terms, weights = self.share_stages(), self.gather("weights")[0]
        inside = sum(terms[name] for name in ("work", "tensor", "context", "experts", "host"))
        terms["replicas"] = self.share_replicas(weights, inside / terms["work"])
        terms["update"] = self.parts["update"] * weights / np.where(self.s.zero > 0, self.average(weights), 1)
        time: Any = sum(terms.values())
        whole = self.whole
        rest = sum(terms[name] for name in ("tensor", "context", "experts", "stages", "replicas")) / time
        errors = (self.parts["spread"] * (1 - rest), _WAITS * rest, whole.spread if whole else CONTEXT,
                  terms["host"] / time * np.log(find_host_error(self.platform)))  # fmt: skip
        spread = np.sqrt(sum(np.square(error) for error in errors))
        return {"time": time, **terms, "spread": spread, "needs": self.measure(weights)}

    def measure(self, weights: Array) -> Array:
        """Memory that the fullest rank reserves [B]: states, activations in flight, a layer at work, and the loss.

        docs/formulas.md, table 9.3, says what PyTorch holds at once.
        """
        s, m, wide = self.s, self.model, 4 if self.model.mixed else self.itemsize
        wide_inner = (m.inner or 4 * m.hidden) * (m.routed if m.experts else 1.0)
        sizes: dict[str, Any] = {
            "heads": m.heads, "kv_share": (m.kv_heads or m.heads) / m.heads, "inner": wide_inner, "gated": m.gated,
            "fused": m.attention not in UNFUSED, "dropout": m.dropout > 0, "tensor": s.tp, "sharing": s.rows,
            "itemsize": self.itemsize,
        }  # fmt: skip
        keep = partial(activation_bytes, s.micro_batch, m.sequence / s.cp, m.hidden, **sizes)
        kept = {name: keep(recompute=name) for name in RECOMPUTED}
        for name in ("none", "selective") if m.experts else ():  # what experts are given and give
            kept[name] = kept[name] + 2.0 * self.itemsize * s.micro_batch * m.sequence / s.cp * m.hidden * m.routed
        each = np.select([s.checkpoint == name for name in kept], list(kept.values()))
        states = wide * (2.0 * (m.optimizer == "adamw") + (m.mixed and self.itemsize < 4))
        ranks, tokens = self.average(weights), s.micro_batch * m.sequence / s.cp
        always = model_state_bytes(weights, ranks=ranks, zero=s.zero, weight=self.itemsize, gradient=0.0, states=states)
        sums = model_state_bytes(weights, ranks=ranks, zero=s.zero, weight=0.0, gradient=wide, states=0.0)
        sums += np.where(s.zero == 1, wide * weights / ranks, 0.0)  # what the optimizer reads
        two, ends = 2.0 * self.parts["layers.weights"], weights - self.layers * self.parts["layers.weights"]
        gathered = np.where(s.zero > 0, np.maximum(ends, two), 0.0) + np.where(s.zero > 2, ends + two, 0.0)
        held = held_batches(self.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
        messages = np.where(s.pp > 1, (2.0 * s.chunks - 1.0) * self.micro + s.chunks * held, 0.0) / s.rows
        whole = np.where(s.rows > 1, 1.0, 0.0)
        always += self.itemsize * (gathered + tokens * m.hidden * messages)
        loss = tokens * m.vocabulary / s.tp * (self.itemsize + wide * np.where(s.tp > 1, 4, 3))
        work = np.where(s.checkpoint == "none", 0.0, kept["none"]) + 3.0 * self.itemsize * tokens * m.hidden * whole
        most, last = self.layers * each * held, self.layers * each * np.where(s.pp > 1, 1.0, held)
        most = np.maximum(most + work, last + loss) + self.itemsize * tokens * m.hidden * whole
        # gradients come while the activations of a single micro-batch go, but for what streams of their own hold
        most = np.where((self.micro > 1) | (s.zero > 1), sums + most, np.maximum(sums, most))
        return np.asarray(always + most + WORKSPACE)
