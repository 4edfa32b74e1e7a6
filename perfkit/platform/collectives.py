"""Prices of collectives: from fits, from textbook algorithms on the links, or composed over
nodes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from perfkit.fitting import CollectiveModel, OverRanks
from perfkit.fitting.extrapolation import choose_sample, spread_beyond
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import Link
from perfkit.ground.units import (
    Array,
    check_choice,
    check_positive,
    check_type,
    format_bytes,
    format_rate,
    show,
)
from perfkit.models import collectives as forms
from perfkit.models import hierarchy
from perfkit.platform.estimates import (
    CollectiveTime,
    find_extrapolations,
    find_transfers,
    format_equation,
    missing_data_error,
)
from perfkit.platform.machine import Machine
from perfkit.platform.nodes import advise_nodes

#: Extra spread per doubling of ranks beyond a law, between two counts, beyond one [-];
#: docs/formulas.md, table 1.4.
SIGMA_OF_LAW, SIGMA_BETWEEN_COUNTS, SIGMA_BEYOND_COUNTS = 0.05, 0.1, 0.15
#: Smallest size that advice to measure names: nearly all transfer on any network [B].
MESSAGE_TO_MEASURE = 2.0**27
#: A fit whose smallest size is above this one does not show the start-up [B].
LARGEST_START_UP = 2.0**20
#: Spread of times composed of measured parts, and of a single pair of ranks [-]; docs/formulas.md,
#: table 1.4.
SIGMA_COMPOSED, SIGMA_OF_PAIR = 0.15, 0.4
#: Spread of start-up and transfer from a datasheet or a textbook [-]; docs/formulas.md, table 1.4.
SIGMA_START_UP, SIGMA_TRANSFER = 0.9, 0.3
#: Spread of messages between regions, whose links nobody measured [-].
SIGMA_BETWEEN_REGIONS = 0.3
#: Extra spread of an all_reduce over nodes that may wait for chunks [-]; docs/formulas.md, table
#: 1.4.
SIGMA_UNSEEN_PROTOCOL = 0.4


@dataclass(frozen=True)
class Match:
    """Fits whose weighted geometric mean is the time of a collective on some ranks."""

    operation: str
    ranks: int
    # each fit, the ranks it is evaluated for, and its weight
    parts: tuple[tuple[CollectiveModel, int, float], ...]
    algorithm: str = ""
    spread: float = 0.0  # in addition to the spread of the fits
    note: str = ""  # why these fits, where none was made on this rank count
    # other fits for the same ranks: the smallest spread of all counts
    others: tuple["Match", ...] = ()

    @property
    def smallest(self) -> float:
        """Smallest message that was fitted [B]."""
        return min(fit.ranges.get("nbytes", (0.0, 0.0))[0] for fit, *_ in self.parts)

    def evaluate(self, nbytes: Array) -> Array:
        """Times of messages [s]."""
        times = [fit.time(nbytes, self.operation, p) ** weight for fit, p, weight in self.parts]
        return np.asarray(np.prod(times, axis=0))

    def invert_ring(self) -> tuple[float, float]:
        """Latency of a hop [s], from the smallest fitted size, and time per byte [s/B] of a link,
        if this is a ring."""
        # the last one is nothing but transfer
        first, last = self.evaluate(np.array([self.smallest, 1e18]))
        beta, steps = float(last) / 1e18, float(forms.ring_steps(self.operation, self.ranks))
        hop = max(float(first) - beta * self.smallest, 0.0) / steps
        return hop, beta / float(forms.bus_factor(self.operation, self.ranks))

    def price(self, nbytes: Array) -> CollectiveTime:
        """Price with spread; outside what was fitted, the warnings name the one sample that would
        help most."""
        operation, notes = self.operation, []
        if self.note:
            size = format_bytes(max(float(np.max(nbytes, initial=0.0)), MESSAGE_TO_MEASURE))
            notes.append(
                f"{self.note}; one {operation} of {size} on {self._place(self.ranks)} would help most"
            )
        for fit, ranks, _ in self.parts:
            low, high = fit.ranges.get("nbytes", (0.0, math.inf))
            # the same size, rounded to whole elements
            near = np.clip(nbytes, 0.98 * low, 1.02 * high) == nbytes
            sizes = {"nbytes": np.where(near, np.clip(nbytes, low, high), nbytes)}
            for text in find_extrapolations(f"{operation} on {self._place(ranks)}", fit, sizes):
                far = float(np.max(nbytes) if np.max(nbytes) > high else np.min(nbytes))
                sample = format_bytes(choose_sample(fit, far, operation, ranks))
                notes.append(
                    f"{text}; one {operation} of {sample} on {self._place(ranks)} would help most"
                )
            notes += find_transfers(operation, fit)
        spreads = [spread_beyond(fit, nbytes, operation, ranks) for fit, ranks, _ in self.parts]
        spread = np.hypot(np.maximum.reduce(spreads), self.spread)
        spread = np.minimum.reduce([spread, *(match.price(nbytes).spread for match in self.others)])
        time, start = self.evaluate(nbytes), self.evaluate(0.0 * nbytes)
        return CollectiveTime(
            time, {"start-up": start, "transfer": time - start}, self, spread, tuple(notes)
        )

    def _place(self, ranks: int) -> str:
        return (
            f"one rank of each of {ranks} nodes" if self.algorithm == "rail" else f"{ranks} ranks"
        )

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return format_equation(self.parts[0][0])
        return "; ".join(
            f"{weight:.2f} of {ranks} ranks: {format_equation(fit)}"
            for fit, ranks, weight in self.parts
        )


def _list_fits(machine: Machine, operation: str) -> dict[Key, CollectiveModel]:
    """Fits of an operation by their names."""
    named = ((Key.parse(name), fit) for name, fit in machine.collectives.items())
    return {key: fit for key, fit in named if key.operation == operation}


def find_match(machine: Machine, operation: str, ranks: int, algorithm: str = "") -> Match | None:
    """Find what prices a rank count: its own fit, else the law over counts or the nearest counts,
    poor fits last."""
    own = {
        key.ranks: fit
        for key, fit in _list_fits(machine, operation).items()
        if key.algorithm == algorithm
    }
    if ranks in own:
        return Match(operation, ranks, ((own[ranks], ranks, 1.0),), algorithm)
    # Fits inside nodes do not hold across them, and the other way round.
    edge = math.inf if algorithm == "rail" else machine.network.ranks_per_node
    found = []
    if law := own.pop(None, None):
        low, high = law.ranges.get("ranks", (2.0, min(edge, ranks) if algorithm else edge))
        if (high <= edge) == (ranks <= edge):
            far = abs(math.log2(ranks / min(max(ranks, low), high)))
            text = f"the law of {operation} was fitted on {low:g} to {high:g} ranks, {ranks} are outside"
            found.append(
                Match(
                    operation,
                    ranks,
                    ((law, ranks, 1.0),),
                    algorithm,
                    SIGMA_OF_LAW * far,
                    text if far else "",
                )
            )
    if fits := {
        count: fit for count, fit in own.items() if count and (count <= edge) == (ranks <= edge)
    }:
        found.append(_match_nearest(machine, operation, ranks, algorithm, fits))
    found.sort(key=lambda match: match.parts[0][0].quality == "poor")
    return replace(found[0], others=tuple(found[1:])) if found else None


def _match_nearest(
    machine: Machine,
    operation: str,
    ranks: int,
    algorithm: str,
    fits: Mapping[int, CollectiveModel],
) -> Match:
    """Between two counts the geometric mean of both times, beyond them the nearest fit, scaled."""
    near = min(fits, key=lambda count: abs(math.log(count / ranks)))
    beyond, octaves = (
        [count for count in fits if (count < ranks) != (near < ranks)],
        abs(math.log2(ranks / near)),
    )
    text = f"{operation} was fitted on {', '.join(map(str, sorted(fits)))} ranks; {ranks} are "
    if not beyond:
        scaled = _scale(machine, fits[near], operation, ranks, near, algorithm)
        text += f"scaled from {near}"
        return Match(
            operation,
            ranks,
            ((scaled, ranks, 1.0),),
            algorithm,
            SIGMA_BEYOND_COUNTS * octaves,
            text,
        )
    far = min(beyond, key=lambda count: abs(count - ranks))
    weight = math.log(ranks / near) / math.log(far / near)
    parts = ((fits[near], near, 1.0 - weight), (fits[far], far, weight))
    return Match(
        operation,
        ranks,
        parts,
        algorithm,
        SIGMA_BETWEEN_COUNTS * octaves,
        f"{text}interpolated between {near} and {far}",
    )


def _scale(
    machine: Machine, fit: CollectiveModel, operation: str, ranks: int, near: int, algorithm: str
) -> CollectiveModel:
    """Scale start-ups and times per byte from one rank count to another, as the algorithm does."""
    form = partial(
        _time_textbook,
        operation,
        np.array(1.0),
        algorithm if algorithm in ("tree", "in_network") else "",
    )
    ends = {
        "alpha": {"alpha_hop": 1.0, "beta_link": 0.0},
        "beta": {"alpha_hop": 0.0, "beta_link": 1.0},
    }
    factors = {
        name: float(form(ranks=ranks, **link) / form(ranks=near, **link))
        for name, link in ends.items()
    }
    if algorithm in ("", "rail") and machine.device.kind == "cuda":
        starts = [_find_start(machine, operation, count, algorithm) for count in (ranks, near)]
        factors["alpha"] = starts[0] / starts[1]
    scaled = {name: value * factors.get(name.rstrip("012"), 1.0) for name, value in fit.items()}
    return fit.with_values(scaled, stderr={})


def price_collective(
    machine: Machine, operation: str, nbytes: Array, ranks: int, algorithm: str | None = None
) -> CollectiveTime:
    """Price collectives as `Platform.collective_time` does, with parts, spread and warnings.

    `Platform.collective` says which fit is taken when. Composed times are never below what the
    links allow.
    """
    check_type("operation", operation, str)
    ranks, network = check_positive("ranks", ranks, integer=True), machine.network
    algorithm = "" if algorithm is None else check_choice("algorithm", algorithm, forms.ALGORITHMS)
    most, local = network.nodes if algorithm == "rail" else network.ranks, network.ranks_per_node
    if ranks > most:
        where = "with one on each node " * (algorithm == "rail") + f"platform {machine.name!r}"
        advice = advise_nodes(machine, ranks, each_node=1 if algorithm == "rail" else None)
        raise ValueError(f"ranks is {ranks}; {where} has {most}; {advice}")
    sizes = np.asarray(nbytes, dtype=float)
    if not _list_fits(machine, operation) and not (algorithm and operation in forms.OPERATIONS):
        raise _lacks(machine, operation, f"model for the collective {show(operation)}")
    if ranks == 1:
        return CollectiveTime(
            np.zeros(sizes.shape), formula="a single rank has nothing to exchange"
        )
    if ranks > (size := most // network.regions):
        regions, alone = -(-ranks // size), replace(machine, network=replace(network, regions=1))
        inside = price_collective(alone, operation, sizes, size, algorithm or None)
        return join_regions(machine, inside, operation, sizes, size, regions)
    if algorithm == "rail":
        return _price_rail(machine, operation, sizes, ranks)
    least = _find_least(machine, operation, sizes, ranks)
    if match := find_match(machine, operation, ranks, algorithm):
        found, name = match.price(sizes), "intra" if ranks <= local else "inter"
        link = network.links.get(name)
        if link and link.bandwidth.kind == "datasheet" and np.any(found.time < 0.98 * least):
            rate = format_rate(link.bandwidth.value, "B/s")
            fault = f"{operation} on {ranks} ranks: the fit is faster than the {rate} of the {name} link"
            return replace(found, notes=(*found.notes, f"{fault}; check its sizes"))
        return found
    if ranks > local:
        if ranks % local:
            raise ValueError(
                f"ranks is {ranks}; across nodes it must be a multiple of the {local} ranks of a node"
            )
        found = _compose(machine, operation, sizes, ranks // local, algorithm)
    elif algorithm in ("", "two_level"):
        levels = "two levels" if algorithm else f"{ranks} ranks of one node"
        raise _lacks(machine, operation, f"model for the collective {operation!r} on {levels}")
    else:
        found = _price_textbook(machine, operation, sizes, ranks, algorithm)
    time = np.maximum(found.time, least)
    if np.any(time != found.time):
        terms = {**found.terms, "limit of the link": time - found.time}
        found = replace(found, time=time, terms=terms)
    if ranks > local and not algorithm:
        found = _limit_by_all_reduce(machine, found, operation, sizes, ranks)
    return found


def join_regions(
    machine: Machine,
    inside: CollectiveTime,
    operation: str,
    nbytes: Array,
    local: int,
    regions: int,
) -> CollectiveTime:
    """Add to the time inside regions of `local` ranks each what the far link between them takes.

    One rank of each region is on a ring with its share of the bytes, with ``all_to_all`` and
    ``send_recv`` with all of them, whatever the algorithm inside the regions. So all ranks of a
    region send at once, and the bandwidth of the link is that of each rank. Regions in which one rank
    sends all bytes would take up to `local` times as long between regions.
    """
    link = machine.network.links.get("far")
    if link is None:
        raise ValueError(
            f"platform {machine.name!r} has {regions} regions and no link 'far' between them; "
            "add it, such as .with_link('far', bandwidth=1e9, latency=0.01)"
        )
    alpha, beta = link.latency.value, 1.0 / link.bandwidth.value
    share = nbytes if operation in ("all_to_all", "send_recv") else nbytes / local
    ring = forms.ring_collective(
        share, operation=operation, ranks=regions, alpha_hop=alpha, beta_link=beta
    )
    far = np.asarray(ring)
    return CollectiveTime(
        time=inside.time + far,
        terms={"inside regions": inside.time, "between regions": far},
        formula=f"inside regions + ring over {regions} regions, alpha_far = {alpha:.4g} s",
        spread=np.hypot(inside.spread, SIGMA_BETWEEN_REGIONS),
        notes=inside.notes,
    )


def _limit_by_all_reduce(
    machine: Machine, found: CollectiveTime, operation: str, nbytes: Array, ranks: int
) -> CollectiveTime:
    """Keep a composed collective below a measured all_reduce on the same ranks, which contains it.

    The start-up stays: a ring has more steps than a tree.
    """
    if forms.COLLECTIVES[operation].across_nodes != "ring":
        return found
    whole = machine.collectives.get(str(Key("all_reduce", ranks)))
    if whole is None or isinstance(whole, OverRanks):
        return found
    nodes = ranks // machine.network.ranks_per_node
    start = _compose(machine, operation, np.zeros_like(nbytes), nodes, "").time
    most = np.maximum(whole.time(nbytes, "all_reduce", ranks), start)
    if np.all(found.time <= most):
        return found
    time = np.minimum(found.time, most)
    terms = {**found.terms, "limit of the all_reduce": time - found.time}
    return replace(found, time=time, terms=terms)


def _lacks(machine: Machine, operation: str, what: str) -> ValueError:
    """Error for a missing model, with the fits of the operation, or else the operations that have
    fits."""
    fitted = [str(key) for key in _list_fits(machine, operation)]
    return missing_data_error(
        machine.name, what, fitted or [Key.parse(key).operation for key in machine.collectives]
    )


def _find_link(machine: Machine, name: str, operation: str, what: str) -> Link:
    """Link of the network by name; an error for a missing one says what it is needed for."""
    links = machine.network.links
    if name not in links:
        where = "between" if name == "inter" else "inside"
        raise _lacks(machine, operation, f"model of {operation} {what} nor a link {where} nodes")
    return links[name]


def _find_start(machine: Machine, operation: str, ranks: int, algorithm: str = "") -> float:
    """Start-up of the algorithm that a library takes for vanishing messages [s]."""
    network = machine.network
    local, link = (
        1 if algorithm == "rail" else min(ranks, network.ranks_per_node),
        network.links.get("inter"),
    )
    far = {"alpha_rail": link.latency.value / network.starts} if link else {}
    start = hierarchy.start_across(operation, ranks_per_node=local, nodes=ranks / local, **far)
    return float(network.starts) * float(start)


def _find_least(machine: Machine, operation: str, nbytes: Array, ranks: int) -> Array:
    """Least time for the bytes that leave or reach a rank, or a node over all its rails, even if
    switches reduce."""
    local, reduced = machine.network.ranks_per_node, forms.COLLECTIVES[operation].rounds
    inside = ranks <= local
    together = 1 if inside or operation in ("all_to_all", "send_recv") else local
    factor = forms.bus_factor(operation, ranks if inside else ranks // local) / reduced / together
    link = machine.network.links.get("intra" if inside else "inter")
    return nbytes * (factor / link.bandwidth.value if link else 0.0)


def _price_form(
    form: Callable[[Array], Array], nbytes: Array, formula: str, **more: Any
) -> CollectiveTime:
    """Price a form that consists of a start-up and a transfer."""
    time, start = (np.asarray(form(sizes)) for sizes in (nbytes, 0.0 * nbytes))
    return CollectiveTime(time, {"start-up": start, "transfer": time - start}, formula, **more)


def _time_textbook(operation: str, nbytes: Array, algorithm: str, **sizes: float) -> Array:
    """Time of a textbook algorithm [s], a ring where none is named."""
    with_textbook = [name for own in forms.COLLECTIVES.values() for name in own.textbook]
    if algorithm:
        check_choice("algorithm inside a node", algorithm, [*dict.fromkeys(with_textbook)])
    if algorithm and algorithm not in forms.COLLECTIVES[operation].textbook:
        known = [name for name, own in forms.COLLECTIVES.items() if algorithm in own.textbook]
        fault = f"a textbook form is known for {', '.join(known)} and not for {operation}"
        advice = f"leave the algorithm out, or calibrate it as {Key(operation, int(sizes['ranks']), algorithm)}"
        raise ValueError(f"algorithm is {algorithm!r}; {fault}; {advice}")
    if algorithm == "in_network":
        return np.asarray(hierarchy.in_network_all_reduce(nbytes, **sizes))
    form = hierarchy.tree_collective if algorithm == "tree" else forms.ring_collective
    return np.asarray(form(nbytes, operation=operation, **sizes))


def _price_textbook(
    machine: Machine, operation: str, nbytes: Array, ranks: int, algorithm: str
) -> CollectiveTime:
    """Price an algorithm inside a node from its textbook form and the link."""
    link = _find_link(machine, "intra", operation, f"by {algorithm}")
    alpha, beta = link.latency.value, 1.0 / link.bandwidth.value
    note = f"{operation} by {algorithm} on {ranks} ranks was not measured: textbook form and the link inside nodes"
    formula = f"{algorithm} of the textbook, alpha_hop = {alpha:.4g} s, beta_link = {beta:.4g} s/B"
    form = partial(
        _time_textbook, operation, algorithm=algorithm, ranks=ranks, alpha_hop=alpha, beta_link=beta
    )
    found = _price_form(form, nbytes, formula, notes=(note,))
    return replace(found, spread=_guess(found.terms["start-up"], found.time))


def _guess(start: Array | float, time: Array) -> Array:
    """Spread of a time that was not measured, by the share of the start-up in it."""
    share = start / time
    return np.hypot(SIGMA_START_UP * share, SIGMA_TRANSFER * (1.0 - share))


def _compose(
    machine: Machine, operation: str, nbytes: Array, nodes: int, algorithm: str
) -> CollectiveTime:
    """Compose a collective over whole nodes from its stages inside nodes and between them."""
    local = machine.network.ranks_per_node
    algorithm = algorithm or forms.COLLECTIVES[operation].across_nodes
    if not algorithm:
        raise _lacks(machine, operation, f"model of {operation} over {nodes} nodes")
    if algorithm == "in_network":
        advice = f"leave the algorithm out, or calibrate it as {Key(operation, local * nodes, algorithm)}"
        raise ValueError(
            f"algorithm is 'in_network'; across nodes there is no form of it; {advice}"
        )
    if algorithm == "ring":
        found = _price_ring(machine, operation, nbytes, nodes)
    elif algorithm == "tree":
        found = _price_tree(machine, operation, nbytes, nodes)
    elif algorithm == "rail":  # one pair of ranks on two nodes
        between = _price_rail(machine, operation, nbytes, nodes)
        found = replace(
            between,
            terms={"between nodes": between.time},
            formula=f"on one rail: {between.formula}",
        )
    elif algorithm == "two_level" and operation == "all_reduce":
        found = _choose_protocol(machine, operation, nbytes, nodes)
    elif algorithm == "two_level":
        found = _price_levels(machine, operation, nbytes, nodes)
    elif algorithm == "flat":
        found = _price_levels(machine, operation, nbytes, nodes, flat=True)
    else:
        raise ValueError(f"algorithm is {show(algorithm)}; nothing prices it across nodes yet")
    what = f"{operation} on {local * nodes} ranks was not measured"
    note = f"{what}: composed of its shares inside and between {nodes} nodes"
    measured = any(key.algorithm == "rail" for key in _list_fits(machine, operation))
    if not measured:
        size = format_bytes(max(float(np.max(nbytes, initial=0.0)) / local, MESSAGE_TO_MEASURE))
        note += f"; one {operation} of {size} on one rank of each node would help most"
    spread = np.maximum(found.spread, SIGMA_OF_PAIR if algorithm == "rail" else SIGMA_COMPOSED)
    if algorithm == "tree" or (algorithm == "ring" and not measured):
        spread = np.maximum(spread, _guess(found.terms["start-up"], found.time))
    return replace(found, spread=spread, notes=tuple(dict.fromkeys((note, *found.notes))))


def _price_rail(machine: Machine, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price the stage between nodes, with one rank of each: from its fit, or as a ring over the
    link."""
    alpha, known = (
        _find_start(machine, operation, nodes, "rail"),
        "inter" in machine.network.links,
    )
    if match := find_match(machine, operation, nodes, "rail"):
        found = match.price(nbytes)
        guess = _guess(np.minimum(alpha, found.time), found.time)
        spread = np.minimum(found.spread, guess) if match.note and known else found.spread
        if match.smallest <= LARGEST_START_UP:
            return replace(found, spread=spread)
        # below the smallest size, the start-up of the link is as good a guess
        time = np.maximum(found.time, alpha)
        spread = np.where(nbytes < 0.98 * match.smallest, np.maximum(spread, guess), spread)
        return replace(
            found,
            time=time,
            terms={**found.terms, "unseen start-up": time - found.time},
            spread=spread,
        )
    link = _find_link(machine, "inter", operation, f"over {nodes} nodes")
    beta = float(forms.bus_factor(operation, nodes)) / link.bandwidth.value
    formula = f"pipelined over the link, alpha = {alpha:.4g} s, beta = {beta:.4g} s/B"
    time = forms.pipelined(nbytes, alpha=alpha, beta=beta)
    return CollectiveTime(time, {}, formula, _guess(alpha, time))


def _find_ring_links(machine: Machine, operation: str, nodes: int) -> tuple[float, float, float]:
    """Time per byte inside nodes [s/B], latency of a hop between nodes [s], time per byte of a rail
    [s/B]."""
    local, over, inside = machine.network.ranks_per_node, f"over {nodes} nodes", 0.0
    if local > 1:
        stages = [
            find_match(machine, stage, local) for stage in hierarchy.LEVELS.get(operation, ())
        ]
        betas = [match.invert_ring()[1] for match in stages if match]
        if betas and len(betas) == len(stages):
            inside = sum(betas) / len(betas)
        else:
            inside = 1.0 / _find_link(machine, "intra", operation, over).bandwidth.value
    if match := find_match(machine, operation, nodes, "rail"):
        return inside, *match.invert_ring()
    link = _find_link(machine, "inter", operation, over)
    return inside, link.latency.value, 1.0 / link.bandwidth.value


def _price_ring(machine: Machine, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price rings over all ranks: with flags beside the bytes where that is faster, else at full
    bandwidth."""
    if operation in ("all_to_all", "send_recv"):
        raise ValueError(
            f"algorithm is 'ring'; {operation} goes around no ring; leave the algorithm out"
        )
    local, (inside, hop, rail) = (
        machine.network.ranks_per_node,
        _find_ring_links(machine, operation, nodes),
    )
    numbers = f"alpha_hop = {hop:.4g} s, beta_intra = {inside:.4g} s/B, beta_rail = {rail:.4g} s/B"
    formula = f"rings over all ranks, {numbers}, q = {hierarchy.OVERLAP:g}"
    steps, far = (float(forms.ring_steps(operation, count)) for count in (local * nodes, nodes))
    step = machine.network.starts * hierarchy.STEP
    links = {"ranks_per_node": local, "nodes": nodes, "beta_intra": inside, "beta_rail": rail}
    links["alpha_hop"] = step + far / steps * max(hop - step, 0.0)
    form: Callable[[Any], Any] = partial(hierarchy.ring_across_nodes, operation=operation, **links)
    # an all_reduce goes around twice, each time as a reduce_scatter does
    turns = steps / (local * nodes - 1)
    start, first = turns * _find_start(machine, "reduce_scatter", local * nodes), form(0.0)
    # in messages as long as those of this ring
    between = _price_rail(machine, operation, nbytes / local, nodes)

    def choose(n: Array) -> Array:
        return np.asarray(np.minimum(start + hierarchy.FLAGS * (form(n) - first), form(n)))

    return _price_form(choose, nbytes, formula, spread=between.spread, notes=between.notes)


def _price_tree(machine: Machine, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price a tree over all ranks from its textbook form and the links."""
    local, (inside, far, rail) = (
        machine.network.ranks_per_node,
        _find_ring_links(machine, operation, nodes),
    )
    near = _find_link(machine, "intra", operation, "by tree").latency.value if local > 1 else 0.0
    beta = max(inside, rail / local)
    links: dict[str, Any] = {
        "ranks": local * nodes,
        "nodes": nodes,
        "alpha_hop": near,
        "alpha_rail": far,
    }
    form = partial(_time_textbook, operation, algorithm="tree", beta_link=beta, **links)
    return _price_form(
        form, nbytes, f"tree of the textbook, alpha_rail = {far:.4g} s, beta_link = {beta:.4g} s/B"
    )


def _choose_protocol(machine: Machine, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price two levels; where no start-up was measured, with flags beside the bytes or chunks at
    each hop of a tree."""
    found, match = (
        _price_levels(machine, operation, nbytes, nodes),
        find_match(machine, operation, nodes, "rail"),
    )
    if match and match.smallest <= LARGEST_START_UP:
        return found
    local, starts = machine.network.ranks_per_node, machine.network.starts
    tree = hierarchy.start_across(
        operation, ranks_per_node=local, nodes=nodes, call=0.0, **hierarchy.CHUNKS
    )
    flags = _price_levels(machine, operation, hierarchy.FLAGS * nbytes, nodes).time
    time = np.minimum(flags, hierarchy.overlap_levels(found.time, starts * tree))
    spread = np.hypot(found.spread, SIGMA_UNSEEN_PROTOCOL * (1.0 - found.time / time))
    return replace(
        found, time=time, terms={**found.terms, "protocol": time - found.time}, spread=spread
    )


def _price_levels(
    machine: Machine, operation: str, nbytes: Array, nodes: int, flat: bool = False
) -> CollectiveTime:
    """Price the stages inside nodes and the stage between them; flat, all pairs exchange their
    messages at once."""
    local, message = machine.network.ranks_per_node, machine.network.starts * hierarchy.MESSAGE
    stages, share = hierarchy.split_levels(operation, nbytes, ranks_per_node=local)
    if flat:
        stages = ((operation, nbytes / nodes),)
    parts = (
        [price_collective(machine, stage, size, local) for stage, size in stages]
        if local > 1
        else []
    )
    between = _price_rail(machine, operation, share, nodes)
    inside = sum((part.time for part in parts), start=0.0 * nbytes)
    spread = np.maximum.reduce(
        [np.broadcast_to(part.spread, nbytes.shape) for part in (between, *parts)]
    )
    if flat:
        time = hierarchy.flat_all_to_all(
            inside, between.time, ranks_per_node=local, nodes=nodes, alpha_message=message
        )
        rule = f"max(intra, inter + (g - 1) (N - 1) alpha_m), alpha_m = {message:g} s"
        rest = "more messages, less overlap"
    elif operation == "all_to_all":
        memory = machine.device.main_bandwidth
        time = hierarchy.two_level_all_to_all(nbytes, inside, between.time, memory_bandwidth=memory)
        rule, rest = f"intra + inter + 4 n / W, W = {memory:.4g} B/s", "copies"
    else:
        time = hierarchy.overlap_levels(inside, between.time)
        rule, rest = f"(intra^q + inter^q)^(1/q), q = {hierarchy.OVERLAP:g}", "overlap"
    terms = {
        "inside nodes": inside,
        "between nodes": between.time,
        rest: time - inside - between.time,
    }
    notes = tuple(text for part in (between, *parts) for text in part.notes)
    return CollectiveTime(time, terms, f"{rule}; inter: {between.formula}", spread, notes)
