"""Strategies of parallel training: closed forms over what one rank does, on arrays with one size for each strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import join_host
from perfkit.prediction.memory import HELD, WORKSPACE
from perfkit.prediction.micro_batches import ODD, REGIONS, count_experts, price_messages, price_part, size_copies
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, join_errors
from perfkit.workloads.blocks import UNFUSED, Cut
from perfkit.workloads.strategy import Strategy, spread_layers
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.transformer import Transformer

#: Parts of the time of an iteration.
PARTS = ("work", "tensor", "context", "experts", "host", "stages", "bubble", "replicas", "update")
_TINY = 1e-30
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
        weights) and ``update`` [s]; ``spread`` of its logarithm [-]; ``needs``, the memory of the fullest rank, and
        what it is held for, see `perfkit.prediction.memory.HELD` [B].

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
        sequence = np.append(ODD, model.sequence // context[1:])
        cut = Cut(batch, sequence, tensor, tensor if kind & 2 else 1, context, experts)
        for name, values in price_part(replace(model, checkpoint=bool(kind & 1)), platform, cut, execution).items():
            parts.setdefault(name, np.zeros(len(structure)))[members] = values[1 + place]
    parts["layers.backward"] += np.where(s.checkpoint == "selective", parts["attention.forward"], 0.0)
    micro, ends = model.batch / (s.dp * s.micro_batch), spread_layers(model.layers, s)
    held = np.where(s.scattered, s.owners, 1)
    for name, ranks in [(f"{region}{own}", ranks) for region in REGIONS for own, ranks in ((".", held), (".host.", 1))]:
        # a single gradient is added to nothing
        parts[f"{name}backward"] += np.where(micro > 1, parts[f"{name}added"] / ranks, 0.0)
    chunks = np.where(np.isin(s.schedule, partitions.CHUNKED), s.chunks, 0)
    itemsize, overlap = ITEMSIZE.get(model.dtype, 2), platform.context.overlap
    contention, wide = overlap["contention"] if overlap else 0.0, 4 if model.mixed else itemsize
    return _Iterations(model, platform, s, parts, micro, ends, ends[1], chunks, itemsize, wide, contention).add_up()


@dataclass(frozen=True)
class _Iterations:
    """Iterations from the parts of one rank as `price_part` finds them, one for each strategy."""

    model: Transformer
    platform: Platform
    s: Strategy
    parts: dict[str, Array]

    micro: Array  # micro-batches
    ends: Sequence[Array]  # layers of the first stage, of the largest between, and of the last
    layers: Array  # of the largest between
    chunks: Array  # of each stage; 0 where nothing hides its messages
    itemsize: int  # of activations and of weights in use
    wide: int  # of sums of gradients
    contention: float  # share that collectives take from kernels beside them

    @property
    def whole(self) -> Fit | None:
        """What was fitted to whole iterations of several ranks."""
        return self.platform.context.find_iteration(self.model.family, 2)

    def average(self, weights: Array) -> Array:
        """Ranks that share a weight on average, as those that share experts share them with fewer others."""
        share = self.layers * count_experts(self.model, self.s) / weights
        return 1.0 / ((1.0 - share) / self.s.owners + share / np.maximum(self.s.owners // self.s.ep, 1))

    def gather(self, *names: str) -> tuple[Array, Array]:
        """What the slowest stage has of some parts, and all stages together."""
        parts = [np.array([self.parts[f"{region}.{name}"] for name in names]) for region in REGIONS]
        first, one, last = (own.sum(axis=0) for own in parts)
        total = self.model.layers * one + first + last
        parts = [own + (layers - self.layers) * parts[1] for own, layers in zip(parts, self.ends, strict=True)]
        first, _, last = (own.sum(axis=0) for own in parts)
        phases = np.maximum(parts[0], parts[2]).sum(axis=0)  # forward passes of all micro-batches before backward ones
        apart = np.where(self.s.schedule == "gpipe", phases, np.maximum(first, last))
        breadth = (self.s.schedule == "breadth_first") | (self.micro <= self.s.pp)
        one_by_one = (self.s.pp == 1) | breadth & (self.s.chunks > 1)
        ends = np.where(one_by_one, first + last, apart)
        return self.layers * one + np.maximum(ends, 0.0), total

    def hide(self, time: Array, compute: Array, pieces: Any, hidden: Any, kernels: Any = 1.0) -> Array:
        """What is left of communication where it is hidden, and what it takes from the kernels beside it."""
        last = time / pieces
        slowed = self.contention * np.minimum(time - last, compute / (1.0 - self.contention)) * kernels
        left = np.maximum(partitions.exposed_time(time, compute=compute, pieces=pieces), last + slowed)
        return np.asarray(np.where(hidden, left, time))

    def join(self, devices: Sequence[Array], hosts: Sequence[Array]) -> Array:
        """What hosts add to passes of devices: to each where it waits for messages, else to all together."""
        often = [each / self.micro for each in self.count_rounds()]
        copied = self.copy(often[0], *often) * self.gather("weights")[0]
        called = 2.0 * sum(often) * (self.layers + 2.0) * np.where(self.s.dp * self.s.cp > 1, self.parts["call"], 0.0)
        filled, grown = 1.0 + copied / sum(devices), 1.0 + called / sum(hosts)
        passes = [(filled * device, grown * host) for device, host in zip(devices, hosts, strict=True)]
        apart = sum(join_host(*each, self.whole) for each in passes)
        together = join_host(sum(devices) + copied, sum(hosts) + called, self.whole)
        return np.asarray(np.where(self.s.pp > 1, apart, together) - copied - sum(devices))

    def count_passes(self) -> tuple[Array, Array]:
        """Passes of a micro-batch through a stage, as long as the longest of them, and how many times what a stage does
        for it all others wait until the first micro-batch comes round again.
        """
        longest = np.ceil(self.layers / np.maximum(self.chunks, 1))
        known = np.where(self.s.schedule == "interleaved", np.minimum(self.micro, self.s.pp), self.micro)
        return self.layers / longest, (1.0 - longest / self.layers) * (self.s.pp - known)

    def count_rounds(self) -> tuple[Array, Array, Array]:
        """How often replicas reduce gradients, gather weights, and gather them again."""
        each, zero = np.where(self.s.scattered, self.micro, 1.0), self.s.zero
        return each, np.where(zero > 0, each, 0.0), np.where(zero > 2, each, 0.0)

    def copy(self, packed: Array, reduced: Array, gathered: Array, again: Array) -> Array:
        """Time of copies around messages for a number of each [s]; those of whole gradients are packed and unpacked."""
        one, narrow = size_copies(self.s, self.micro, self.itemsize / self.wide)
        inner = self.layers * self.parts["layers.weights"] / self.gather("weights")[0]  # ends stay whole
        copies = one * reduced + np.where(self.s.zero > 0, 0.0, packed) + narrow * (gathered + inner * again)
        return np.asarray(np.where(self.s.dp * self.s.cp > 1, copies, 0.0) * self.parts["packing"])

    def share_stages(self) -> dict[str, Array]:
        """Work of micro-batches on the slowest stage, what is among and around it, and the bubble."""
        s, p, m = self.s, self.parts, self.model
        work, works = self.gather("forward", "backward")
        tensor, tensors = (self.hide(own, beside, s.tp, s.tiled) for own, beside in zip(
            self.gather("tensor.forward", "tensor.backward"), (work, works), strict=True))  # fmt: skip
        numbers = self.itemsize * s.micro_batch * m.sequence / s.cp
        full, apart, routed = s.checkpoint == "full", s.tp * s.cp, numbers * m.hidden * m.routed * (m.experts > 0)
        moved = sum(price_messages(self.platform, "all_to_all" + way, routed, np.where(own, s.ep, 1), apart)
                    for way, own in (("", np.logical_not(s.two_level)), (".two_level", s.two_level)))  # fmt: skip
        ring, own, chunks = np.zeros(len(work)), np.zeros(len(work)), np.maximum(self.chunks, 1)
        devices, hosts = [list[Array](), list[Array]()], [list[Array](), list[Array]()]  # of the last stage, and others
        for phase, moves in (("forward", 2.0), ("backward", 2.0 + 2.0 * full)):
            passed, launched = _share_sequences(self, phase, numbers)
            again = (phase == "backward") & (s.checkpoint != "none")
            own = again * own + self.layers * passed
            calls = (1 + again) * launched + moves * (s.ep > 1) * (m.experts > 0)
            beside, shared = self.gather(phase)[0], self.gather(f"tensor.{phase}")[0]
            left = tensor / np.maximum(self.gather("tensor.forward", "tensor.backward")[0], _TINY)
            one = p[f"layers.{phase}"] + left * p[f"layers.tensor.{phase}"]
            inner, more = self.layers * (one + moves * moved) + own, self.gather(f"host.{phase}")[0]
            calls = self.layers * (p[f"layers.host.{phase}"] + calls * p["call"])
            calls += 2.0 * chunks * (s.pp > 1) * p["call"]
            ends = beside + left * shared - self.layers * one, more - self.layers * p[f"layers.host.{phase}"]
            for part, device, host in ((1.0 - 1.0 / chunks, 0.0, 0.0), (1.0 / chunks, *ends)):
                devices[0].append(part * inner + device)
                hosts[0].append(part * calls + host)
            devices[1].append(inner)
            hosts[1].append(calls)
            ring += own
        moved = self.layers * (4.0 + 2.0 * full) * moved
        sent, ring = numbers * m.hidden / s.rows, ring + moved
        message = 2.0 * price_messages(self.platform, "send_recv", sent, np.minimum(s.pp, 2), s.ranks // s.pp)
        late, later = (self.join(device, host) for device, host in zip(devices, hosts, strict=True))
        total = works + tensors + ring * s.pp + late + later * (s.pp - 1)
        between = sum(devices[1]) + later  # what a stage between the ends takes
        late = np.maximum(late, between - sum(devices[0]))  # where hosts slow others down to more
        open_ends = np.where(self.chunks > 0, 0.0, message)
        slowest = work + tensor + ring + late + open_ends
        passes, around = self.count_passes()
        total = total + message * (s.pp - 1) * passes - _find_slack(self)
        delayed = np.where(s.schedule == "zero_bubble", self.layers * p["delayed"], 0.0)
        # of many chunks each waits until the first micro-batch has come round, but for what a stage has to do meanwhile
        round_trip = around * between + (chunks - 1) * s.pp * message
        round_trip = np.where(s.pp > 1, np.maximum(round_trip, 0.0), 0.0)
        return {
            "work": self.micro * work, "tensor": self.micro * tensor,
            "context": self.micro * (ring - moved), "experts": self.micro * moved, "host": self.micro * late,
            "stages": self.micro * open_ends,
            "bubble": round_trip + partitions.bubble_time(
                total, slowest=slowest, stages=s.pp, chunks=passes, delayed=delayed, micro_batches=self.micro),
        }  # fmt: skip

    def share_replicas(self, weights: Array, stretch: Array, kernels: Array) -> Array:
        """What replicas exchange of gradients and weights, as far as nothing hides it, with the copies around it.

        Passes are so many times as long as their kernels.
        """
        s, wide, breadth = self.s, self.wide, self.s.schedule == "breadth_first"
        ranks, layer, one = self.s.owners, self.parts["layers.weights"], count_experts(self.model, s)

        def send(
            operation: str, itemsize: float, ranks: Array = ranks, apart: Any = 1, part: Any = 1, ends: float = 1.0
        ) -> Array:
            """Messages of all weights, layer by layer: those of experts are of fewer ranks, which are further apart."""
            sizes, few = (layer - one, weights - self.layers * layer), np.maximum(ranks // s.ep, 1)
            out = np.zeros(len(weights))
            counts: tuple[Any, ...] = (self.layers, ends)
            for count, size in zip(counts, sizes, strict=True):
                out += count * price_messages(self.platform, operation, itemsize * size / part, ranks, s.tp * apart)
            if not self.model.experts:
                return np.asarray(out)
            far = s.tp * s.ep * apart
            return out + self.layers * price_messages(self.platform, operation, itemsize * one / part, few, far)

        put_off = (s.schedule == "zero_bubble") & (s.pp > 1)  # gradients of weights, which come one after another
        forward, backward = (stretch * self.gather(name)[0] for name in ("forward", "backward"))
        backward = np.where(put_off, stretch * self.layers * self.parts["delayed"], backward)
        groups = s.dp * s.cp // ranks  # of hybrid sharding, which add up what each of them has summed up
        reduce = np.where(s.zero > 0, send("reduce_scatter", wide), send("all_reduce", wide))
        reduce = reduce + send("all_reduce", wide, groups, ranks, np.where(s.zero > 0, ranks, 1))
        gather, regather = send("all_gather", self.itemsize), send("all_gather", self.itemsize, ends=0.0)
        chunks = np.maximum(self.chunks, 1)  # the last of which has one micro-batch to hide behind
        window = (np.where(breadth, self.micro * (chunks - 1), 0.0) + 1) / chunks
        passes, around = self.count_passes()
        late = (s.pp - 1) / passes + np.where(self.micro == 1, around, 0.0)  # what the last pass does in other stages
        reduced, gathered, again = self.count_rounds()
        ends = np.array([self.parts["embeddings.weights"], self.parts["head.weights"]])
        ends = np.where(s.zero > 1, ends.sum(axis=0), ends.max(axis=0))  # one hides behind a layer, no more, if at all
        pieces = weights / np.maximum(layer, ends)
        both = reduce + np.where(s.zero > 2, regather, 0.0)  # one after the other
        one, none = np.ones(len(weights)), np.zeros(len(weights))

        def cover(time: Array, passed: Array, *copies: Array) -> Array:
            """What is left of messages beside passes and copies, which are kernels alone."""
            copied = self.copy(none, *copies) * weights
            share = (kernels * passed + copied) / (passed + copied)
            return self.hide(time, passed + copied, pieces, s.overlap, share)

        time = reduced * cover(both, window * backward, one, none, np.where(s.zero > 2, 1.0, 0.0))
        more = late * (s.zero > 1), late * (s.zero > 2)  # gradients are summed up after messages to other stages
        time += (gathered + more[0]) * cover(gather, forward, none, one, none)
        time += more[1] * cover(regather, window * backward, none, none, one)
        slows = np.where(s.overlap & (s.zero < 2) & ~put_off, late, 0.0)  # the last pass of every other stage
        time += self.copy(reduced, reduced, gathered + more[0], again + more[1]) * weights
        time += self.copy(slows, slows, 0.0 * slows, 0.0 * slows) * self.layers * layer
        beside = np.maximum(1.0 - passes / pieces, 0.0)  # nothing is sent while the first piece of a pass is made
        window = window * backward / (1.0 - self.contention)
        time += slows * self.contention * beside * kernels * np.minimum(reduce, window)
        return np.asarray(time)

    def add_up(self) -> dict[str, Array]:
        """Times and their parts [s], spread [-] and memory [B]."""
        terms, weights = self.share_stages(), self.gather("weights")[0]
        inside = sum(terms[name] for name in ("work", "tensor", "context", "experts", "host"))
        kernels = (terms["work"] + terms["host"]) / inside
        terms["replicas"] = self.share_replicas(weights, inside / terms["work"], kernels)
        terms["update"] = self.parts["update"] * weights / np.where(self.s.zero > 0, self.average(weights), 1)
        time: Any = sum(terms.values())
        rest: Any = sum(terms[name] for name in ("tensor", "context", "experts", "stages", "replicas")) / time
        own, around = self.parts["spread"] * (1 - rest), self.whole.spread if self.whole else CONTEXT
        known = join_errors(own[np.newaxis], np.zeros(1, dtype=bool), rest, around)
        spread = np.hypot(known, terms["host"] / time * np.log(find_host_error(self.platform)))
        held = _measure(self, weights)
        return {"time": time, **terms, "spread": spread, "needs": sum(held.values()) + WORKSPACE, **held}


def _find_slack(own: _Iterations) -> Array:
    """Backward passes that a slow first stage still has to do while the last micro-batch is on other stages [s]."""
    s, p, one = own.s, own.parts, own.parts["layers.forward"] + own.parts["layers.backward"]
    first, last = (layers * one + p[f"{region}.forward"] + p[f"{region}.backward"]
                   for region, layers in (("embeddings", own.ends[0]), ("head", own.ends[2])))  # fmt: skip
    backward = own.ends[0] * p["layers.backward"] + p["embeddings.backward"]
    others = np.minimum(s.pp, own.micro) - 1.0
    return np.where((first > last) & np.isin(s.schedule, ("1f1b", "zero_bubble")), others * backward, 0.0)


def _share_sequences(own: _Iterations, phase: str, numbers: Array) -> tuple[Array, Array]:
    """What ranks that share sequences exchange in a layer that nothing hides [s], and calls of the host: keys and
    values go around a ring, and then their gradients too, or sequences are exchanged for heads.
    """
    s, p, m = own.s, own.parts, own.model
    head = m.head_width or m.hidden / m.heads
    width = head * np.ceil((m.kv_heads or m.heads) / s.tp)
    nbytes = (2.0 if phase == "forward" else 4.0) * numbers * width
    step = price_messages(own.platform, "send_recv", nbytes, np.minimum(s.cp, 2), s.tp)
    passed = (s.cp - 1) * np.maximum(step - p[f"attention.{phase}"] / s.cp, 0.0)
    swapped = numbers * (head * m.heads / s.tp + width) / 2.0  # mean of queries, keys, values and what comes of them
    swapped = price_messages(own.platform, "all_to_all", swapped, np.where(s.ulysses, s.cp, 1), s.tp)
    parts = (s.cp - 1) * (1.0 + p[f"attention.host.{phase}"] / p["call"])  # each with its kernel
    return np.where(s.ulysses, 4.0 * swapped, passed), np.where(s.ulysses, 4.0 * (s.cp > 1), parts)


def _measure(own: _Iterations, weights: Array) -> dict[str, Array]:
    """Memory that the fullest rank reserves beside workspaces [B]: activations are those in flight, a layer at work and
    the loss. docs/formulas.md, table 9.3, says what PyTorch holds at once.
    """
    s, m, wide = own.s, own.model, own.wide
    wide_inner = (m.inner or 4 * m.hidden) * (m.routed if m.experts else 1.0)
    sizes: dict[str, Any] = {
        "heads": m.heads, "kv_share": (m.kv_heads or m.heads) / m.heads, "inner": wide_inner, "gated": m.gated,
        "width": m.head_width * m.heads,
        "fused": m.attention not in UNFUSED, "dropout": m.dropout > 0, "tensor": s.tp, "sharing": s.rows,
        "itemsize": own.itemsize,
    }  # fmt: skip
    keep = partial(partitions.activation_bytes, s.micro_batch, m.sequence / s.cp, m.hidden, **sizes)
    kept = {name: keep(recompute=name) for name in partitions.RECOMPUTED}
    for name in ("none", "selective") if m.experts else ():  # what experts are given and give
        kept[name] = kept[name] + 2.0 * own.itemsize * s.micro_batch * m.sequence / s.cp * m.hidden * m.routed
    each = np.select([s.checkpoint == name for name in kept], list(kept.values()))
    each_state = wide * (2.0 * (m.optimizer == "adamw") + (m.mixed and own.itemsize < 4))
    ranks, tokens = own.average(weights), s.micro_batch * m.sequence / s.cp
    shared = partial(partitions.model_state_bytes, weights, ranks=ranks, zero=s.zero)
    trained = shared(weight=own.itemsize, gradient=0.0, states=0.0)
    sums = shared(weight=0.0, gradient=wide, states=0.0)
    states = shared(weight=0.0, gradient=0.0, states=each_state)
    sums += np.where(s.zero == 1, wide * weights / ranks, 0.0)  # what the optimizer reads
    two, ends = 2.0 * own.parts["layers.weights"], weights - own.layers * own.parts["layers.weights"]
    gathered = np.where(s.zero > 0, np.maximum(ends, two), 0.0) + np.where(s.zero > 2, ends + two, 0.0)
    held = partitions.held_batches(own.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
    messages = np.where(s.pp > 1, (2.0 * s.chunks - 1.0) * own.micro + s.chunks * held, 0.0) / s.rows
    whole = np.where(s.rows > 1, 1.0, 0.0)
    sent = own.itemsize * (gathered + tokens * m.hidden * messages)
    loss = tokens * m.vocabulary / s.tp * (own.itemsize + wide * np.where(s.tp > 1, 4, 3))
    work = np.where(s.checkpoint == "none", 0.0, kept["none"]) + 3.0 * own.itemsize * tokens * m.hidden * whole
    most, last = own.layers * each * held, own.layers * each * np.where(s.pp > 1, 1.0, held)
    most = np.maximum(most + work, last + loss) + own.itemsize * tokens * m.hidden * whole
    # gradients come while the activations of a single micro-batch go, but for what streams of their own hold
    both = (own.micro > 1) | (s.zero > 1)
    held = (trained, sums * (both | (sums > most)), states, most * (both | (sums <= most)), sent)
    return dict(zip(HELD, held, strict=True))
