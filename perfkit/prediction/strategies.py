"""Strategies of parallel training in closed form: time and memory of an iteration, for many
strategies at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import join_host
from perfkit.prediction.memory import HELD, WORKSPACE
from perfkit.prediction.micro_batches import REGIONS, Sizes, price_messages, price_micro_batch
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, join_errors
from perfkit.workloads.blocks import UNFUSED
from perfkit.workloads.strategy import Strategy, spread_layers
from perfkit.workloads.transformer import Transformer

#: Parts of the time of an iteration.
PARTS = ("work", "tensor", "context", "experts", "host", "stages", "bubble", "replicas", "update")
_TINY = 1e-30


def price_strategies(
    model: Transformer, platform: Platform, strategies: Strategy, execution: str | None = None
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

    Returns
    -------
    columns : dict of str to array
        ``time`` and its parts, which add up to it: ``work`` of the slowest stage; exposed messages
        of ``tensor``, ``context``, ``experts`` and ``stages``; ``host``; ``bubble``; ``replicas``
        (gradients and weights); ``update`` [s]. ``spread`` of the logarithm of the time [-].
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
    if platform.device.kind == "cpu":
        raise ValueError(
            f"platform {platform.name!r} is a CPU; strategies are priced on GPUs, such as h100-sxm-8"
        )
    return _Iterations(
        model, platform, strategies, _price_parts(model, platform, strategies, execution)
    ).add_up()


def _price_parts(
    model: Transformer, platform: Platform, s: Strategy, execution: str | None
) -> dict[str, Array]:
    """Times of a micro-batch as `price_micro_batch` names them [s], priced once for strategies of
    the same sizes."""
    parts = dict[str, Array]()
    structure = (s.checkpoint == "full") + 2 * (s.rows > 1) + 4 * (s.tp > 1)
    for kind in np.unique(structure):
        members = np.flatnonzero(structure == kind)
        sizes = [
            np.asarray(own, dtype=np.int64)[members] for own in (s.micro_batch, s.tp, s.cp, s.ep)
        ]
        codes = np.ravel_multi_index(sizes, [own.max() + 1 for own in sizes])
        _, first, place = np.unique(codes, return_index=True, return_inverse=True)
        for name, values in price_micro_batch(
            model, platform, s.select(members[first]), execution
        ).items():
            parts.setdefault(name, np.zeros(len(structure)))[members] = values[place]
    parts["layers.backward"] += np.where(
        s.checkpoint == "selective", parts["attention.forward"], 0.0
    )
    return parts


class _Iterations:
    """Iterations of many strategies, one element of each array for each of them."""

    def __init__(
        self, model: Transformer, platform: Platform, s: Strategy, parts: dict[str, Array]
    ) -> None:
        self.model, self.platform, self.s, self.parts, self.sizes = (
            model,
            platform,
            s,
            parts,
            Sizes(model, s),
        )
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
        held = np.where(s.scattered, s.owners, 1)
        for region in REGIONS:  # the gradients of a single micro-batch are added to nothing
            several = np.where(self.micro > 1, 1.0, 0.0)
            parts[f"{region}.backward"] += several * parts[f"{region}.added"] / held
            parts[f"{region}.host.backward"] += several * parts[f"{region}.host.added"]
        self.weights = self.gather("weights")[0]

    def add_up(self) -> dict[str, Array]:
        """Times and their parts [s], spread [-] and memory [B]."""
        terms, weights = self.share_stages(), self.weights
        inside = sum(terms[name] for name in ("work", "tensor", "context", "experts", "host"))
        terms["replicas"] = self.share_replicas(
            inside / terms["work"], (terms["work"] + terms["host"]) / inside
        )
        terms["update"] = (
            self.parts["update"] * weights / np.where(self.s.zero > 0, self.average(), 1)
        )
        time: Any = sum(terms.values())
        rest: Any = (
            sum(terms[name] for name in ("tensor", "context", "experts", "stages", "replicas"))
            / time
        )
        own, around = (
            self.parts["spread"] * (1 - rest),
            self.whole.spread if self.whole else CONTEXT,
        )
        known = join_errors(own[np.newaxis], np.zeros(1, dtype=bool), rest, around)
        spread = np.hypot(known, terms["host"] / time * np.log(find_host_error(self.platform)))
        held = _measure_memory(self)
        return {
            "time": time,
            **terms,
            "spread": spread,
            "needs": sum(held.values()) + WORKSPACE,
            **held,
        }

    def gather(self, *names: str) -> tuple[Array, Array]:
        """Sum of some parts over the slowest stage, and over all stages."""
        parts = [np.array([self.parts[f"{region}.{name}"] for name in names]) for region in REGIONS]
        first, one, last = (own.sum(axis=0) for own in parts)
        total = self.model.layers * one + first + last
        parts = [
            own + (layers - self.layers) * parts[1]
            for own, layers in zip(parts, self.ends, strict=True)
        ]
        first, _, last = (own.sum(axis=0) for own in parts)
        # GPipe: all forward passes come before all backward ones
        phases = np.maximum(parts[0], parts[2]).sum(axis=0)
        apart = np.where(self.s.schedule == "gpipe", phases, np.maximum(first, last))
        breadth = (self.s.schedule == "breadth_first") | (self.micro <= self.s.pp)
        one_by_one = (self.s.pp == 1) | breadth & (self.s.chunks > 1)
        ends = np.where(one_by_one, first + last, apart)
        return self.layers * one + np.maximum(ends, 0.0), total

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

    def add_hosts(self, devices: Sequence[Array], hosts: Sequence[Array]) -> Array:
        """Time that hosts add to the passes of devices [s]: pass by pass where these wait for
        messages, else in all."""
        often = [each / self.micro for each in self.count_rounds()]
        copied = self.copy(often[0], *often) * self.weights
        called = (
            2.0
            * sum(often)
            * (self.layers + 2.0)
            * np.where(self.s.dp * self.s.cp > 1, self.parts["call"], 0.0)
        )
        filled, grown = 1.0 + copied / sum(devices), 1.0 + called / sum(hosts)
        passes = [
            (filled * device, grown * host) for device, host in zip(devices, hosts, strict=True)
        ]
        apart = sum(join_host(*each, self.whole) for each in passes)
        together = join_host(sum(devices) + copied, sum(hosts) + called, self.whole)
        return np.asarray(np.where(self.s.pp > 1, apart, together) - copied - sum(devices))

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

    def copy(self, packed: Array, reduced: Array, gathered: Array, again: Array) -> Array:
        """Time of copies around messages for a number of each [s]; those of whole gradients are
        packed and unpacked."""
        inner = self.layers * self.parts["layers.weights"] / self.weights  # ends stay whole
        copies = self.sizes.reduced * reduced + np.where(self.s.zero > 0, 0.0, packed)
        copies = copies + self.sizes.gathered * (gathered + inner * again)
        return np.asarray(np.where(self.s.dp * self.s.cp > 1, copies, 0.0) * self.parts["packing"])

    def share_experts(self) -> Array:
        """Time of an all_to_all of the tokens of a layer among ranks that share experts [s]."""
        s, stride, routed = self.s, self.s.tp * self.s.cp, self.sizes.routed
        ways = ("", np.where(s.two_level, 1, s.ep)), ("two_level", np.where(s.two_level, s.ep, 1))
        return np.asarray(
            sum(
                price_messages(self.platform, "all_to_all", routed, ep, stride, way)
                for way, ep in ways
            )
        )

    def share_stages(self) -> dict[str, Array]:
        """Times of all micro-batches on the slowest stage, of the messages among and around its
        ranks, and bubble."""
        s, p = self.s, self.parts
        work, works = self.gather("forward", "backward")
        tensor, tensors = (
            self.hide(own, beside, s.tp, s.tiled)
            for own, beside in zip(
                self.gather("tensor.forward", "tensor.backward"), (work, works), strict=True
            )
        )
        # share that is exposed
        left = tensor / np.maximum(self.gather("tensor.forward", "tensor.backward")[0], _TINY)
        moved, moves_back = self.share_experts(), 2.0 + 2.0 * (s.checkpoint == "full")
        ring = passed = np.zeros(len(work))
        #: Time of the device and of the host in each pass of the stage with both ends, and of a
        #: stage between them.
        devices, hosts = [list[Array](), list[Array]()], [list[Array](), list[Array]()]
        phases = zip(
            ("forward", "backward"), (2.0, moves_back), *_share_sequences(self), strict=True
        )
        for phase, moves, exposed, launched in phases:
            # attention is computed again with its messages
            again = (phase == "backward") & (s.checkpoint != "none")
            passed = again * passed + self.layers * exposed
            one = p[f"layers.{phase}"] + left * p[f"layers.tensor.{phase}"]
            device = self.layers * (one + moves * moved) + passed
            calls = (1 + again) * launched + moves * (s.ep > 1) * (self.model.experts > 0)
            host = self.layers * (p[f"layers.host.{phase}"] + calls * p["call"])
            host += 2.0 * s.chunks * (s.pp > 1) * p["call"]
            ends = (
                self.gather(phase)[0] + left * self.gather(f"tensor.{phase}")[0] - self.layers * one
            )
            host_ends = self.gather(f"host.{phase}")[0] - self.layers * p[f"layers.host.{phase}"]
            # the ends are in one chunk
            devices[0] += [(1.0 - 1.0 / s.chunks) * device, device / s.chunks + ends]
            hosts[0] += [(1.0 - 1.0 / s.chunks) * host, host / s.chunks + host_ends]
            devices[1].append(device)
            hosts[1].append(host)
            ring = ring + passed
        moved = self.layers * (2.0 + moves_back) * moved
        shared = ring + moved
        borders, message, far = _pass_on(self)
        late, later = (
            self.add_hosts(device, host) for device, host in zip(devices, hosts, strict=True)
        )
        total = works + tensors + shared * s.pp + late + later * (s.pp - 1)
        between = sum(devices[1]) + later
        # where the host makes a stage between the ends the slowest
        late = np.maximum(late, between - sum(devices[0]))
        # than the pass beside it
        longer = sum(np.maximum(message / 2.0 - one, 0.0) for one in devices[1])
        open_ends = np.select(
            [np.isin(s.schedule, partitions.CHUNKED), s.schedule == "gpipe"], [0.0, longer], message
        )
        slowest = work + tensor + shared + late + open_ends
        open_ends = open_ends + _wait_for_regions(
            self, far, open_ends, devices[1], slowest - between
        )
        passes, around = self.count_passes()
        total = total + borders * passes - _find_slack(self)
        # a chunk starts when the first micro-batch has passed all stages; a stage works on others
        # in the meantime
        round_trip = around * between + (s.chunks - 1) * (borders + message)
        bubble = np.where(s.pp > 1, np.maximum(round_trip, 0.0), 0.0) + partitions.bubble_time(
            total,
            slowest=slowest,
            stages=s.pp,
            chunks=passes,
            micro_batches=self.micro,
            delayed=np.where(s.schedule == "zero_bubble", self.layers * p["delayed"], 0.0),
        )
        each = {
            "work": work,
            "tensor": tensor,
            "context": ring,
            "experts": moved,
            "host": late,
            "stages": open_ends,
        }
        return {name: self.micro * own for name, own in each.items()} | {"bubble": bubble}

    def share_replicas(self, stretch: Array, kernels: Array) -> Array:
        """Exposed messages of gradients and weights among replicas, with the copies around them
        [s].

        A pass takes `stretch` times as long as its kernels alone; `kernels` is their share of it,
        with the host.
        """
        s, sizes, ranks, weights = self.s, self.sizes, self.s.owners, self.weights
        layer = self.parts["layers.weights"]
        # weight gradients, which only their own pass hides
        put_off = (s.schedule == "zero_bubble") & (s.pp > 1)
        forward, backward = (stretch * self.gather(name)[0] for name in ("forward", "backward"))
        backward = np.where(put_off, stretch * self.layers * self.parts["delayed"], backward)
        shared = np.where(s.zero > 0, ranks, 1)
        # with hybrid sharding, the sums of each group are added up over groups
        ways = (
            ("reduce_scatter", shared),
            ("all_reduce", ranks // shared),
            ("all_reduce", s.dp * s.cp // ranks, ranks, shared),
        )
        reduce = sum(sum(_send(self, name, sizes.summed, *how)) for name, *how in ways)
        inner, whole, routed = _send(self, "all_gather", sizes.itemsize, shared)
        gather, regather = inner + whole + routed, inner + routed
        # breadth-first: the gradients of a chunk hide behind all passes of the next one, those of
        # the last do not
        window = (
            np.where(s.schedule == "breadth_first", self.micro * (s.chunks - 1), 0.0) + 1
        ) / s.chunks
        passes, around = self.count_passes()
        # the last passes of the other stages, one after another, which messages of replicas make
        # longer
        late = (s.pp - 1) / passes + np.where(self.micro == 1, around, 0.0)
        reduced, gathered, again = self.count_rounds()
        ends = np.array([self.parts["embeddings.weights"], self.parts["head.weights"]])
        # the largest piece: ends are not cut in layers
        ends = np.where(s.zero > 1, ends.sum(axis=0), ends.max(axis=0))
        pieces = weights / np.maximum(layer, ends)
        one, none = np.ones(len(weights)), np.zeros(len(weights))

        def cover(time: Array, passed: Array, *copies: Array) -> Array:
            """Exposed time of messages beside a pass and its copies, which are all kernels."""
            copied = self.copy(none, *copies) * weights
            share = (kernels * passed + copied) / (passed + copied)
            return self.hide(time, passed + copied, pieces, s.overlap, share)

        # beside the backward pass gradients are reduced and, with stage 3, weights are gathered
        # again; beside the forward pass weights are gathered; other stages repeat both gathers
        both = reduce + np.where(s.zero > 2, regather, 0.0)
        time = reduced * cover(both, window * backward, one, none, np.where(s.zero > 2, 1.0, 0.0))
        more = late * (s.zero > 1), late * (s.zero > 2)
        time += (gathered + more[0]) * cover(gather, forward, none, one, none)
        time += more[1] * cover(regather, window * backward, none, none, one)
        # copies around messages, and in the last passes of other stages the copies of a layer
        slows = np.where(s.overlap & (s.zero < 2) & ~put_off, late, 0.0)
        time += self.copy(reduced, reduced, gathered + more[0], again + more[1]) * weights
        time += self.copy(slows, slows, none, none) * self.layers * layer
        # the slowdown of the last passes of other stages; nothing is sent before the first piece is
        # complete
        beside = np.maximum(1.0 - passes / pieces, 0.0)
        window = window * backward / (1.0 - self.contention)
        return np.asarray(
            time + slows * self.contention * beside * kernels * np.minimum(reduce, window)
        )


def _pass_on(own: _Iterations) -> tuple[Array, Array, Array]:
    """Messages of a micro-batch between stages, forth and back [s]: over all borders, and over one
    inside a region and between two; the last one is 0 if stages are in one region.
    """
    s, network, distance = own.s, own.platform.network, own.s.ranks // own.s.pp
    node, region = network.ranks_per_node, network.ranks // network.regions
    # beyond a node, some stages are on another one than the next
    apart = np.maximum(distance, np.where(np.minimum(s.ranks, region) > node, node, 1))
    ways = (np.minimum(s.pp, 2), apart), (np.minimum(own.regions, 2), np.maximum(distance, region))
    near, far = (
        2.0 * price_messages(own.platform, "send_recv", own.sizes.between, *way) for way in ways
    )
    # each stage is a region of its own
    near = np.where((own.regions > 1) & (distance >= region), 0.0, near)
    return near * (s.pp - own.regions) + far * (own.regions - 1), near, far


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
    s, p, keys = own.s, own.parts, own.sizes.keys
    step = price_messages(
        own.platform, "send_recv", np.stack([2.0 * keys, 4.0 * keys]), np.minimum(s.cp, 2), s.tp
    )
    swapped = price_messages(
        own.platform, "all_to_all", own.sizes.swapped, np.where(s.ulysses, s.cp, 1), s.tp
    )
    beside, hosts = (
        np.stack([p[f"attention.{kind}{phase}"] for phase in ("forward", "backward")])
        for kind in ("", "host.")
    )
    passed = (s.cp - 1) * np.maximum(step - beside / s.cp, 0.0)
    parts = (s.cp - 1) * (1.0 + hosts / p["call"])  # each with its kernel
    return np.where(s.ulysses, 4.0 * swapped, passed), np.where(s.ulysses, 4.0 * (s.cp > 1), parts)


def _find_slack(own: _Iterations) -> Array:
    """Backward passes that a slow first stage still has to do while the last micro-batch is on
    other stages [s]."""
    s, p, one = own.s, own.parts, own.parts["layers.forward"] + own.parts["layers.backward"]
    first, last = (
        layers * one + p[f"{region}.forward"] + p[f"{region}.backward"]
        for region, layers in (("embeddings", own.ends[0]), ("head", own.ends[2]))
    )
    backward = (np.minimum(s.pp, own.micro) - 1.0) * (
        own.ends[0] * p["layers.backward"] + p["embeddings.backward"]
    )
    return np.where((first > last) & np.isin(s.schedule, ("1f1b", "zero_bubble")), backward, 0.0)


def _send(
    own: _Iterations, operation: str, itemsize: float, ranks: Array, apart: Any = 1, part: Any = 1
) -> Array:
    """Times of messages of weights [s]: layer by layer, of the ends, and of experts, which fewer
    ranks share."""
    s, layer, experts = own.s, own.parts["layers.weights"], own.sizes.experts
    few = np.maximum(ranks // s.ep, 1) if own.model.experts else np.ones_like(ranks)
    sizes = np.stack([layer - experts, own.weights - own.layers * layer, experts])
    distances = s.tp * apart * np.stack([np.ones_like(few), np.ones_like(few), s.ep + 0 * few])
    times = price_messages(
        own.platform, operation, itemsize * sizes / part, np.stack([ranks, ranks, few]), distances
    )
    return times * np.stack([own.layers, np.ones(len(layer)), own.layers])


def _measure_memory(own: _Iterations) -> dict[str, Array]:
    """Memory of the fullest rank without workspaces [B]; docs/formulas.md, table 9.3, says what
    PyTorch holds."""
    s, m, sizes, layer = own.s, own.model, own.sizes, own.parts["layers.weights"]
    tokens, ranks, weights = s.micro_batch * m.sequence / s.cp, own.average(), own.weights
    inputs = sizes.itemsize * tokens * m.hidden  # of a product whose tokens ranks gather
    keep = partial(
        partitions.activation_bytes,
        s.micro_batch,
        m.sequence / s.cp,
        m.hidden,
        heads=m.heads,
        kv_share=(m.kv_heads or m.heads) / m.heads,
        width=m.head_width * m.heads,
        gated=m.gated,
        inner=(m.inner or 4 * m.hidden) * (m.routed if m.experts else 1.0),
        fused=m.attention not in UNFUSED,
        dropout=m.dropout > 0,
        tensor=s.tp,
        sharing=s.rows,
        itemsize=sizes.itemsize,
    )
    given = 2.0 * inputs * m.routed * (m.experts > 0)  # what experts are given and give
    kept = {name: keep(recompute=name) + given * (name != "full") for name in partitions.RECOMPUTED}
    each = np.select([s.checkpoint == name for name in kept], list(kept.values()))
    shared = partial(partitions.model_state_bytes, weights, ranks=ranks, zero=s.zero)
    trained = shared(weight=sizes.itemsize, gradient=0.0, states=0.0)
    sums = shared(weight=0.0, gradient=sizes.wide, states=0.0)
    sums += np.where(s.zero == 1, sizes.wide * weights / ranks, 0.0)  # what the optimizer reads
    numbers = float(find_optimizer(m.optimizer).states)
    if m.mixed and sizes.itemsize < 4:  # fp32 copies of the weights
        numbers += 1.0
    states = shared(weight=0.0, gradient=0.0, states=sizes.wide * numbers)
    two, ends = 2.0 * layer, weights - own.layers * layer
    gathered = np.where(s.zero > 0, np.maximum(ends, two), 0.0) + np.where(
        s.zero > 2, ends + two, 0.0
    )
    held = partitions.held_batches(own.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
    messages = (
        np.where(s.pp > 1, (2.0 * s.chunks - 1.0) * own.micro + s.chunks * held, 0.0) / s.rows
    )
    sent = sizes.itemsize * gathered + inputs * messages
    whole = np.where(s.rows > 1, inputs, 0.0)
    loss = tokens * m.vocabulary / s.tp * (sizes.itemsize + sizes.wide * np.where(s.tp > 1, 4, 3))
    # a layer that is computed again
    work = np.where(s.checkpoint == "none", 0.0, kept["none"]) + 3.0 * whole
    most, last = own.layers * each * held, own.layers * each * np.where(s.pp > 1, 1.0, held)
    most = np.maximum(most + work, last + loss) + whole
    # gradients come while the activations of a single micro-batch go, but for what streams of their
    # own hold
    both = (own.micro > 1) | (s.zero > 1)
    parts = (trained, sums * (both | (sums > most)), states, most * (both | (sums <= most)), sent)
    return dict(zip(HELD, parts, strict=True))
