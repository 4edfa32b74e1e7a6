"""Price collectives: from fits, from textbook algorithms on the links, or composed across nodes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from perfkit.communication.algorithms import time_textbook
from perfkit.communication.lookup import (
    LARGE,
    WAYS,
    CollectiveTime,
    Match,
    evaluate_match,
    find_hop,
    find_match,
    split_key,
)
from perfkit.fitting import Fit
from perfkit.hardware import Link, Network
from perfkit.models import collectives as forms
from perfkit.models import hierarchy
from perfkit.units import Array, check_choice, check_positive, check_type, format_bytes, format_rate, show

__all__ = ["price_collective"]

#: What libraries do across nodes by default; NCCL knows all_gather and reduce_scatter there as rings only.
ACROSS_NODES = {
    "all_reduce": "two_level",
    **dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "reduce"), "ring"),
    "all_to_all": "flat",
    "send_recv": "rail",
}
#: Spread of compositions of measured parts (80 H100: two levels within 13 % from 256 MiB, rings within 12 % from
#: 512 MiB, but 22 % too fast at 256 MiB and up to 41 % too slow below), and of a single pair of ranks, whose path may
#: cross rails (39 % slower there).
COMPOSED, PAIR = 0.15, 0.4
#: Spread of start-up and transfer that only a datasheet or a textbook tells: all_reduce on two nodes of A100 on EFA
#: takes twice the time when small and 14 % more when large.
START, MOVE = 0.9, 0.3
#: What two levels are less sure of for each halving of the share between nodes below the shortest one measured, up to
#: `START`: all_reduce on 80 H100 is predicted 6, 25, 46 and 64 % too fast from 256 down to 32 MiB.
UNSEEN = 0.35


def price_collective(
    fits: Mapping[str, Fit],
    network: Network,
    operation: str,
    nbytes: Array,
    *,
    ranks: int,
    algorithm: str | None = None,
    memory_bandwidth: float = math.inf,
    owner: str = "platform",
) -> CollectiveTime:
    """Price collectives of one operation.

    Parameters
    ----------
    fits : mapping of str to Fit
        Fits by name, see `perfkit.communication.split_key` [-].
    network : Network
        Nodes and links.
    operation : str
        Operation, such as ``all_reduce`` [-].
    nbytes : array
        Message sizes in the nccl-tests convention [B].
    ranks : int
        Ranks taking part [-].
    algorithm : str, optional
        ``ring``, ``tree``, ``in_network``, ``two_level``, or ``rail`` for one rank of each node; by default what the
        library chose when it was measured, or would choose [-].
    memory_bandwidth : float, optional
        Memory of a rank, for the copies of a two-level all_to_all [B/s].
    owner : str, optional
        What errors call the fits [-].

    Returns
    -------
    found : CollectiveTime
        Time, parts, formula, spread and warnings.

    Raises
    ------
    ValueError
        For an operation or algorithm without a model, or more ranks than the network has.

    Notes
    -----
    In this order: the fit for these ranks, the law over rank counts, the fits for the counts around it or the nearest
    one; across nodes the composition of `perfkit.models.hierarchy`. An algorithm that was asked for and not fitted
    takes its textbook form and the links. What is composed is never faster than the links allow; a fit that is says so.
    """
    check_type("operation", operation, str)
    ranks, most = check_positive("ranks", ranks, integer=True), network.ranks
    if ranks > most:
        raise ValueError(f"ranks is {ranks}; {owner} has {most}; choose fewer ranks or a larger platform")
    way = "" if algorithm is None else check_choice("algorithm", algorithm, WAYS)
    sizes = np.asarray(nbytes, dtype=float)
    pricing = _Pricing(fits, network, owner, memory_bandwidth, float(np.max(sizes, initial=0.0)))
    known = any(split_key(key)[0] == operation for key in fits) or (way and operation in forms.OPERATIONS)
    if not known:
        raise pricing.lacks(operation, f"model for the collective {show(operation)}")
    if ranks == 1:
        return CollectiveTime(np.zeros(sizes.shape), formula="a single rank has nothing to exchange")
    if way == "rail":
        if ranks > network.nodes:
            raise ValueError(f"ranks is {ranks}; with one on each node {owner} has {network.nodes}; choose fewer ranks")
        return pricing.rail(operation, sizes, ranks)
    return pricing.price(operation, sizes, ranks, way)


@dataclass(frozen=True)
class _Pricing:
    """The fits and links of one owner, and the largest message it was asked about."""

    fits: Mapping[str, Fit]
    network: Network
    owner: str
    memory_bandwidth: float
    largest: float

    def lacks(self, operation: str, what: str) -> ValueError:
        own = [key for key in self.fits if split_key(key)[0] == operation]
        have = ", ".join(own or dict.fromkeys(key.partition(".")[0] for key in self.fits)) or "none"
        return ValueError(f"{self.owner} has no {what}; it has {have}; calibrate it or choose another platform")

    def link(self, name: str, operation: str, what: str) -> Link:
        if name not in self.network.links:
            where = "between" if name == "inter" else "inside"
            raise self.lacks(operation, f"model of {operation} {what} nor a link {where} nodes")
        return self.network.links[name]

    def match(self, operation: str, ranks: int, way: str) -> Match | None:
        edge = math.inf if way == "rail" else self.network.ranks_per_node
        return find_match(self.fits, operation, ranks, way, edge=edge, nbytes=self.largest)

    def price(self, operation: str, nbytes: Array, ranks: int, way: str) -> CollectiveTime:
        local = self.network.ranks_per_node
        match = self.match(operation, ranks, way)
        if match is not None:
            return self.flag(evaluate_match(match, nbytes), operation, nbytes, ranks)
        if ranks > local:
            if ranks % local:
                raise ValueError(f"ranks is {ranks}; across nodes it must be a multiple of the {local} ranks of a node")
            return self.bound(self.across(operation, nbytes, ranks // local, way), operation, nbytes, ranks)
        if way in ("", "two_level"):
            levels = "two levels" if way else f"{ranks} ranks of one node"
            raise self.lacks(operation, f"model for the collective {operation!r} on {levels}")
        return self.bound(self.textbook(operation, nbytes, ranks, way), operation, nbytes, ranks)

    def textbook(self, operation: str, nbytes: Array, ranks: int, way: str) -> CollectiveTime:
        """Price an algorithm inside a node from its textbook form and the link."""
        link = self.link("intra", operation, f"by {way}")
        alpha, beta = link.latency.value, 1.0 / link.bandwidth.value
        time, start = (
            time_textbook(operation, n, way, ranks=ranks, alpha_hop=alpha, beta_link=beta) for n in (nbytes, 0 * nbytes)
        )
        notes = (f"{operation} by {way} on {ranks} ranks was not measured: textbook form and the link inside nodes",)
        formula = f"{way} of the textbook, alpha_hop = {alpha:.4g} s, beta_link = {beta:.4g} s/B"
        terms = {"start-up": start, "transfer": time - start}
        return CollectiveTime(time, terms, formula, _doubt(start, time), notes)

    # -- across nodes -------------------------------------------------------------------------------------------------

    def across(self, operation: str, nbytes: Array, nodes: int, way: str) -> CollectiveTime:
        """Compose a collective over whole nodes from its shares inside a node and between nodes."""
        ranks, way = nodes * self.network.ranks_per_node, way or ACROSS_NODES.get(operation, "")
        if not way:
            raise self.lacks(operation, f"model of {operation} over {ranks} ranks and no rule to compose one")
        rules = {
            "ring": self.ring,
            "tree": self.tree,
            "two_level": self.two_level,
            "flat": self.flat,
            "rail": self.one_rail,
        }
        if way not in rules:
            raise ValueError(
                f"algorithm is {way!r}; across nodes there is no form of it; leave the algorithm out, or calibrate it "
                f"as {operation}.{ranks}.{way}"
            )
        found = rules[way](operation, nbytes, nodes)
        note = f"{operation} on {ranks} ranks was not measured: composed of its shares inside and between {nodes} nodes"
        measured = any(split_key(key)[0::2] == (operation, "rail") for key in self.fits)
        if not measured:
            size = format_bytes(max(self.largest / self.network.ranks_per_node, LARGE))
            note += f"; one {operation} of {size} on one rank of each node would help most"
        spread = np.maximum(found.spread, PAIR if way == "rail" else COMPOSED)
        if way == "tree" or (way == "ring" and not measured):
            spread = np.maximum(spread, _doubt(found.terms["start-up"], found.time))
        return replace(found, spread=spread, notes=tuple(dict.fromkeys((note, *found.notes))))

    def rail(self, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
        """Price the share between nodes, one rank of each: measured, or as a ring over the link."""
        match = self.match(operation, nodes, "rail")
        if match is not None:
            return evaluate_match(match, nbytes)
        link = self.link("inter", operation, f"over {nodes} nodes")
        alpha = max(float(forms.ring_steps(operation, nodes)) * link.latency.value, 1e-9)
        beta = float(forms.bus_factor(operation, nodes)) / link.bandwidth.value
        formula = f"pipelined over the link, alpha = {alpha:.4g} s, beta = {beta:.4g} s/B"
        time = forms.pipelined(nbytes, alpha=alpha, beta=beta)
        return CollectiveTime(time, {}, formula, _doubt(alpha, time))

    def beta_inside(self, operation: str, nodes: int) -> float:
        """Time per byte of the link inside nodes, from the fits of the stages where there are all."""
        local = self.network.ranks_per_node
        if local == 1:
            return 0.0
        matches = [self.match(stage, local, "") for stage in hierarchy.LEVELS.get(operation, ())]
        found = [find_hop(match, ranks=local)[1] for match in matches if match is not None]
        if matches and len(found) == len(matches):
            return sum(found) / len(found)
        return 1.0 / self.link("intra", operation, f"over {nodes} nodes").bandwidth.value

    def hop_between(self, operation: str, nodes: int) -> tuple[float, float]:
        """Latency of a hop between nodes, and time per byte of a rail; from the fit on a rail where there is one."""
        match = self.match(operation, nodes, "rail")
        if match is not None:
            return find_hop(match, ranks=nodes)
        link = self.link("inter", operation, f"over {nodes} nodes")
        return link.latency.value, 1.0 / link.bandwidth.value

    def ring(self, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
        if operation in ("all_to_all", "send_recv"):
            raise ValueError(f"algorithm is 'ring'; {operation} goes around no ring; leave the algorithm out")
        local, (hop, rail) = self.network.ranks_per_node, self.hop_between(operation, nodes)
        links = {"alpha_hop": hop, "beta_intra": self.beta_inside(operation, nodes), "beta_rail": rail}
        where = {"operation": operation, "ranks_per_node": local, "nodes": nodes}
        time = hierarchy.ring_across_nodes(nbytes, **where, **links)  # type: ignore[arg-type]
        start = float(forms.ring_steps(operation, local * nodes)) * hop + 0.0 * nbytes
        numbers = ", ".join(
            f"{name} = {value:.4g} {'s' if name == 'alpha_hop' else 's/B'}" for name, value in links.items()
        )
        formula = f"rings over all ranks, {numbers}, q = {hierarchy.OVERLAP:g}"
        step = self.rail(operation, nbytes / local, nodes)  # in messages as long as those of this ring
        return CollectiveTime(time, {"start-up": start, "transfer": time - start}, formula, step.spread, step.notes)

    def tree(self, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
        local, (far, rail) = self.network.ranks_per_node, self.hop_between(operation, nodes)
        near = self.link("intra", operation, "by tree").latency.value if local > 1 else 0.0
        beta = max(self.beta_inside(operation, nodes), rail / local)
        links = {"ranks": local * nodes, "nodes": nodes, "alpha_hop": near, "alpha_rail": far, "beta_link": beta}
        time, start = (time_textbook(operation, n, "tree", **links) for n in (nbytes, 0 * nbytes))  # type: ignore[arg-type]
        formula = f"tree of the textbook, alpha_rail = {far:.4g} s, beta_link = {beta:.4g} s/B"
        return CollectiveTime(time, {"start-up": start, "transfer": time - start}, formula)

    def two_level(self, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
        local = self.network.ranks_per_node
        inside, share = hierarchy.split_levels(operation, nbytes, ranks_per_node=local)
        parts = [self.price(stage, size, local, "") for stage, size in inside] if local > 1 else []
        intra = sum((part.time for part in parts), start=0.0 * nbytes)
        between = self.rail(operation, share, nodes)
        if operation != "all_to_all":
            time, rule = hierarchy.overlap_levels(intra, between.time), "(intra^q + inter^q)^(1/q)"
            found = _compose(time, intra, between, parts, f"{rule}, q = {hierarchy.OVERLAP:g}", "overlap")
            return replace(found, spread=np.hypot(found.spread, self.unseen(operation, share, nodes)))
        memory = self.memory_bandwidth
        time = hierarchy.two_level_all_to_all(nbytes, intra, between.time, memory_bandwidth=memory)
        return _compose(time, intra, between, parts, f"intra + inter + 4 n / W, W = {memory:.4g} B/s", "copies")

    def unseen(self, operation: str, share: Array, nodes: int) -> Array:
        """Spread of shares between nodes that are shorter than all that were measured: their start-up is a guess."""
        match = self.match(operation, nodes, "rail")
        least = min((fit.ranges.get("nbytes", (0.0, 0.0))[0] for fit, *_ in match.parts), default=0.0) if match else 0.0
        halvings = np.log2(max(least, 1.0) / np.clip(share, 1.0, max(least, 1.0)))
        return np.asarray(np.minimum(UNSEEN * halvings, START))

    def flat(self, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
        """Price an all_to_all in which all pairs exchange their messages at once."""
        local, between = self.network.ranks_per_node, self.rail(operation, nbytes, nodes)
        parts = [self.price(operation, nbytes / nodes, local, "")] if local > 1 else []
        intra = sum((part.time for part in parts), start=0.0 * nbytes)
        time = hierarchy.flat_all_to_all(intra, between.time, ranks_per_node=local, nodes=nodes)
        rule = f"max(intra, inter + (g - 1) (N - 1) alpha_m), alpha_m = {hierarchy.MESSAGE:g} s"
        return _compose(time, intra, between, parts, rule, "more messages, less overlap")

    def one_rail(self, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
        """Price what one pair of ranks on two nodes exchanges."""
        between = self.rail(operation, nbytes, nodes)
        return replace(between, terms={"between nodes": between.time}, formula=f"on one rail: {between.formula}")

    # -- what links allow ---------------------------------------------------------------------------------------------

    def least(self, operation: str, nbytes: Array, ranks: int) -> Array:
        """Least time for what must leave or reach a rank, or a node over all its rails, even if switches reduce it."""
        local, links = self.network.ranks_per_node, self.network.links
        inside, reduced = ranks <= local, 2.0 if operation == "all_reduce" else 1.0
        together = 1 if inside or operation in ("all_to_all", "send_recv") else local
        factor = forms.bus_factor(operation, ranks if inside else ranks // local) / reduced / together
        link = links.get("intra" if inside else "inter")
        return nbytes * (factor / link.bandwidth.value if link else 0.0)

    def bound(self, found: CollectiveTime, operation: str, nbytes: Array, ranks: int) -> CollectiveTime:
        """Hold a composed time to what the links allow."""
        time = np.maximum(found.time, self.least(operation, nbytes, ranks))
        if np.all(time == found.time):
            return found
        return replace(found, time=time, terms={**found.terms, "limit of the link": time - found.time})

    def flag(self, found: CollectiveTime, operation: str, nbytes: Array, ranks: int) -> CollectiveTime:
        """Say so where a fit is faster than the datasheet of the link allows."""
        name = "intra" if ranks <= self.network.ranks_per_node else "inter"
        link = self.network.links.get(name)
        if link is None or link.bandwidth.kind != "datasheet":
            return found
        if np.all(found.time >= 0.98 * self.least(operation, nbytes, ranks)):
            return found
        rate = format_rate(link.bandwidth.value, "B/s")
        note = f"{operation} on {ranks} ranks: the fit is faster than the {rate} of the {name} link; check its sizes"
        return replace(found, notes=(*found.notes, note))


def _doubt(start: Array | float, time: Array) -> Array:
    """Spread of a time that was not measured, by the share of the start-up in it."""
    share = start / time
    return np.hypot(START * share, MOVE * (1.0 - share))


def _compose(
    time: Array, intra: Array, between: CollectiveTime, parts: list[CollectiveTime], rule: str, rest: str
) -> CollectiveTime:
    """Put stages together: parts that sum, the widest spread, all notes."""
    terms = {"inside nodes": intra, "between nodes": between.time, rest: time - intra - between.time}
    spread = np.maximum.reduce([np.broadcast_to(part.spread, np.shape(time)) for part in (between, *parts)])
    notes = tuple(text for part in (between, *parts) for text in part.notes)
    return CollectiveTime(time, terms, f"{rule}; inter: {between.formula}", spread, notes)
