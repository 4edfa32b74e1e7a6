"""Strategies of parallel training: closed forms over what one rank does, on arrays with one size for each strategy."""

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
from perfkit.prediction.ranks import price_group
from perfkit.prediction.uncertainty import CONTEXT, find_host_error
from perfkit.workloads.blocks import UNFUSED, Cut, record_part
from perfkit.workloads.execution import execute
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.transformer import Transformer

#: Parts of the time of an iteration.
PARTS = ("work", "tensor", "context", "experts", "host", "stages", "bubble", "replicas", "update")
_REGIONS = ("embeddings", "layers", "head")
#: Error of what ranks spend on each other [-], as in `perfkit.prediction.uncertainty.join_errors`.
_WAITS = 0.3
#: Tokens of three sequences on three ranks, the first of all sizes: what a compiler merges is read off these, where no
#: two sizes are equal by chance [-].
_ODD = 1031
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
        Where it runs; ranks that share layers are neighbours, then those that share sequences, experts, and the rest
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
        out[f"{name}.added"], out[f"{name}.weights"] = seconds[own & added].sum(axis=0), weights[name]
        out[f"{name}.host"] = host[own].sum()
    inside = np.char.startswith(modules, "layers")
    for phase in ("forward", "backward"):
        cores = np.flatnonzero(inside & (phases == phase) & np.isin(kinds, ("bmm", "attention")))
        out[f"attention.{phase}"] = seconds[cores.min() : cores.max() + 1].sum(axis=0)
    out["delayed"] = seconds[inside & (phases == "backward") & (kinds == "gemm") & (variants == "tn")].sum(axis=0)
    for name, own in (("update", (phases == "update") & (modules != "packing")), ("packing", modules == "packing")):
        out[name] = seconds[own].sum(axis=0) / sum(weights.values())
    often = np.where(inside, float(model.layers), 1.0)
    whole = replace(graph, repeats=often)
    times, spreads, _ = spread_classes(whole, platform, classes, models, number, often[:, None] * seconds, hot)
    # kernels of a kind have one fit and one scale, so that they err together, and so does all that is only assumed
    causes = np.where(models[2]["assumed"] > 0, "", [kind for kind, *_ in classes])
    errors = spreads * times / times.sum(axis=0)
    out["spread"] = np.sqrt(sum(np.square(errors[causes == cause].sum(axis=0)) for cause in np.unique(causes)))
    return {name: np.broadcast_to(values, seconds.shape[1]) for name, values in out.items()}


def _price_messages(platform: Platform, operation: str, nbytes: Array, count: Array, stride: Array) -> Array:
    """Time of collectives of so many ranks at a distance [s]; where nobody timed pairs, both gather what both send.

    An algorithm across nodes may be named behind a dot.
    """
    operation, _, way = operation.partition(".")
    local, time = platform.network.ranks_per_node, np.zeros(nbytes.shape)
    if operation == "send_recv" and not any(key.startswith(operation) for key in platform.collectives):
        operation, nbytes = "all_gather", 2.0 * nbytes
    codes = count.astype(np.int64) << 32 | stride.astype(np.int64)
    for code in np.unique(codes[count > 1]):
        ranks, apart = int(code >> 32), int(code & 0xFFFFFFFF)
        own, most = codes == code, min(max(local // apart, 1), ranks)
        if way and local < ranks and most == local:
            time[own] = platform.price_collective(operation, nbytes[own], ranks, way).time
        else:
            time[own] = price_group(platform, operation, nbytes[own], ranks, -(-ranks // most), most).time
    return time


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
        m = self.model
        each = (2 + m.gated) * m.hidden * np.ceil((m.inner or 4 * m.hidden) / self.s.tp)
        return np.asarray(self.layers * (m.experts // self.s.ep) * each)

    def average(self, weights: Array) -> Array:
        """Ranks that share a weight on average, as those that share experts share them with fewer others."""
        share = self.experts / weights
        return 1.0 / ((1.0 - share) / self.owners + share / np.maximum(self.owners // self.s.ep, 1))

    def gather(self, *names: str) -> tuple[Array, Array]:
        """What the slowest stage has of some parts, and all stages together."""
        first, one, last = (np.sum([self.parts[f"{region}.{name}"] for name in names], axis=0) for region in _REGIONS)
        ends = np.where(self.s.pp > 1, np.maximum(first, last), first + last)
        return self.layers * one + ends, self.model.layers * one + first + last

    def hide(self, time: Array, compute: Array, pieces: Array, hidden: Array) -> Array:
        """What is left of communication where it is hidden, and what it takes from the kernels beside it."""
        overlap = self.platform.context.overlap
        left = np.where(hidden, exposed_time(time, compute=compute, pieces=pieces), time)
        return np.asarray(left + (overlap["contention"] if overlap else 0.0) * (time - left))

    def share_stages(self) -> dict[str, Array]:
        """Work of micro-batches on the slowest stage, what is among and around it, and the bubble."""
        s, p, m, send = self.s, self.parts, self.model, partial(_price_messages, self.platform, "send_recv")
        work, works = self.gather("forward", "backward")
        tensor, tensors = (self.hide(own, beside, s.tp, s.tiled) for own, beside in zip(
            self.gather("tensor.forward", "tensor.backward"), (work, works), strict=True))  # fmt: skip
        numbers = self.itemsize * s.micro_batch * m.sequence / s.cp
        heads, ring = np.ceil((m.kv_heads or m.heads) / s.tp), np.zeros(len(work))
        for often, phase in ((2.0, "forward"), (4.0, "backward")):  # keys and values, and then their gradients too
            width = m.hidden / m.heads * heads
            step = send(often * numbers * width, np.minimum(s.cp, 2), s.tp)
            passed = (s.cp - 1) * np.maximum(step - p[f"attention.{phase}"] / s.cp, 0.0)
            swapped = numbers * (m.hidden / s.tp + width) / 2.0  # mean of queries, keys, values and what comes of them
            swapped = _price_messages(self.platform, "all_to_all", swapped, np.where(s.ulysses, s.cp, 1), s.tp)
            ring += self.layers * np.where(s.ulysses, 4.0 * swapped, passed)
        apart, routed = s.tp * s.cp, numbers * m.hidden * m.routed * (m.experts > 0)
        ways = (_price_messages(self.platform, "all_to_all" + way, routed, np.where(own, s.ep, 1), apart)
                for way, own in (("", np.logical_not(s.two_level)), (".two_level", s.two_level)))  # fmt: skip
        moved = self.layers * (4.0 + 2.0 * (s.checkpoint == "full")) * sum(ways)
        message = 2.0 * send(numbers * m.hidden / s.rows, np.minimum(s.pp, 2), s.tp * s.cp * s.dp)
        ring = ring + moved
        late = join_host(work + tensor + ring, self.gather("host")[0], self.whole) - (work + tensor + ring)
        open_ends = np.where(self.chunks > 0, 0.0, message)
        slowest = work + tensor + ring + late + open_ends
        chunks = np.maximum(self.chunks, 1)
        total = works + tensors + (ring + late) * s.pp + message * (s.pp - 1) * chunks
        delayed = np.where(s.schedule == "zero_bubble", self.layers * p["delayed"], 0.0)
        return {
            "work": self.micro * work + (self.micro - 1) * self.gather("added")[0], "tensor": self.micro * tensor,
            "context": self.micro * (ring - moved), "experts": self.micro * moved, "host": self.micro * late,
            "stages": self.micro * open_ends,
            "bubble": np.asarray(bubble_time(total, slowest=slowest, stages=s.pp, chunks=chunks, delayed=delayed)),
        }  # fmt: skip

    def share_replicas(self, weights: Array) -> Array:
        """What replicas exchange of gradients and weights, as far as nothing hides it, with the copies around it."""
        s, wide, breadth = self.s, 4 if self.model.mixed else self.itemsize, self.s.schedule == "breadth_first"
        ranks, experts = self.owners, self.experts

        def send(operation: str, itemsize: float, ranks: Array = ranks, apart: Any = 1, part: Any = 1) -> Array:
            """Messages of all weights: those of experts are of fewer ranks, which are further apart."""
            time = _price_messages(self.platform, operation, itemsize * (weights - experts) / part, ranks, s.tp * apart)
            if not self.model.experts:
                return time
            few, apart = np.maximum(ranks // s.ep, 1), s.tp * s.ep * apart
            return time + _price_messages(self.platform, operation, itemsize * experts / part, few, apart)

        forward, backward = (self.gather(name)[0] for name in ("forward", "backward"))
        groups = s.dp * s.cp // ranks  # of hybrid sharding, which add up what each of them has summed up
        reduce = np.where(s.zero > 0, send("reduce_scatter", wide), send("all_reduce", wide))
        reduce = reduce + send("all_reduce", wide, groups, ranks, np.where(s.zero > 0, ranks, 1))
        gather, each = send("all_gather", self.itemsize), np.where(breadth, 1.0, self.micro)
        chunks = np.maximum(self.chunks, 1)  # the last of which has one micro-batch to hide behind
        window = (np.where(breadth, self.micro * (chunks - 1), 0.0) + 1) / chunks
        reduced, gathered = np.where(s.zero > 1, each, 1.0), np.choose(s.zero, [0.0, 1.0, each, each])
        again = np.where(s.zero > 2, each, 0.0)
        time = reduced * self.hide(reduce, window * backward, self.layers, s.overlap)
        time += gathered * self.hide(gather, forward, self.layers, s.overlap)
        time += again * self.hide(gather, backward, self.layers, s.overlap)
        copies = np.where(s.zero > 0, 1.0, 2.0) * reduced + gathered + again
        time += np.where(ranks * groups > 1, copies, 0.0) * self.parts["packing"] * weights
        return np.asarray(time)

    def add_up(self) -> dict[str, Array]:
        """Times and their parts [s], spread [-] and memory [B]."""
        terms, weights = self.share_stages(), self.gather("weights")[0]
        terms["replicas"] = self.share_replicas(weights)
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
