"""Price collectives: from fits, from textbook algorithms on the links, or composed across nodes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.fitting.parameters import ALGORITHMS, Key, choose_sample, evaluate_collective, spread_beyond
from perfkit.ground.hardware import Link
from perfkit.ground.units import Array, check_choice, check_positive, check_type, format_bytes, format_rate, show
from perfkit.models import collectives as forms
from perfkit.models import hierarchy
from perfkit.platform.estimates import fill_in, find_extrapolations, find_transfers, lacks

_RINGS = ("all_gather", "reduce_scatter", "broadcast", "reduce")
_TEXTBOOK = {"ring": ("all_reduce", *_RINGS), "tree": ("all_reduce", *_RINGS[2:]), "in_network": ("all_reduce",)}
#: Extra spread per doubling of ranks beyond a law, between two counts, beyond one [-]; docs/formulas.md, table 1.4.
LAW, BETWEEN, BEYOND = 0.05, 0.1, 0.15
#: Smallest size that advice to measure names: nearly all transfer on any network [B].
LARGE = 2.0**27
#: First smallest size from which on fits do not show the start-up [B].
LATE = 2.0**20
#: What libraries do across nodes by default.
ACROSS_NODES = {"all_reduce": "two_level", "all_to_all": "flat", "send_recv": "rail", **dict.fromkeys(_RINGS, "ring")}
#: Spread of compositions of measured parts, and of a single pair of ranks [-]; docs/formulas.md, table 1.4.
COMPOSED, PAIR = 0.15, 0.4
#: Spread of start-up and transfer from a datasheet or a textbook [-]; docs/formulas.md, table 1.4.
START, MOVE = 0.9, 0.3
#: Extra spread of an all_reduce over nodes that waits for unseen chunks [-]; docs/formulas.md, table 1.4.
UNSEEN = 0.4


@dataclass(frozen=True)
class CollectiveTime:
    """Times of collectives [s], parts that sum to them, the closed form with its numbers, spread [-] and warnings."""

    time: Array
    terms: Mapping[str, Array] = field(default_factory=dict)
    formula: object = ""  # written out when it is shown
    spread: float | Array = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """Fits that price one operation: each with the ranks it is evaluated for and its weight in their geometric mean.

    `spread` is added to theirs in squares, where `others` are surer theirs holds; `note` says why they are taken.
    """

    operation: str
    parts: tuple[tuple[Fit, int, float], ...]
    spread: float = 0.0
    note: str = ""
    way: str = ""
    others: tuple["Match", ...] = ()

    @property
    def smallest(self) -> float:
        """Smallest message that was fitted [B]."""
        return min(fit.ranges.get("nbytes", (0.0, 0.0))[0] for fit, *_ in self.parts)

    def find_hop(self, ranks: int) -> tuple[float, float]:
        """Latency of a hop [s] and time per byte [s/B] of the link of a ring of so many ranks.

        The latency is what the smallest fitted size takes beyond its transfer, over the steps it makes: the start-up
        itself is a guess where no small size was measured.
        """
        operation, sizes = self.operation, np.array([self.smallest, 1e18])  # one that is nothing but transfer
        first, last = np.prod([evaluate_collective(fit, sizes, operation, p) ** w for fit, p, w in self.parts], axis=0)
        beta, steps = float(last) / 1e18, float(forms.ring_steps(operation, ranks))
        return max(float(first) - beta * self.smallest, 0.0) / steps, beta / float(forms.bus_factor(operation, ranks))

    def price(self, nbytes: Array) -> CollectiveTime:
        """Price with spread; outside the fitted sizes, name the one sample that would help most."""
        operation, both = self.operation, np.stack([nbytes, 0.0 * nbytes])
        time, start = np.prod([evaluate_collective(fit, both, operation, p) ** w for fit, p, w in self.parts], axis=0)
        notes = [self.note] * bool(self.note)
        for fit, count, _ in self.parts:
            low, high = fit.ranges.get("nbytes", (0.0, math.inf))
            near = np.clip(nbytes, 0.98 * low, 1.02 * high) == nbytes  # the same size, rounded to whole elements
            sizes, place = {"nbytes": np.where(near, np.clip(nbytes, low, high), nbytes)}, _place(count, self.way)
            for text in find_extrapolations(f"{operation} on {place}", fit, sizes):
                far = float(np.max(nbytes) if np.max(nbytes) > high else np.min(nbytes))
                sample = format_bytes(choose_sample(fit, far, operation, count))
                notes.append(f"{text}; one {operation} of {sample} on {place} would help most")
            notes += find_transfers(operation, fit)
        spreads = [spread_beyond(fit, nbytes, operation, p) for fit, p, _ in self.parts]
        spread = np.hypot(np.maximum.reduce(spreads), self.spread)
        spread = np.minimum.reduce([spread, *(match.price(nbytes).spread for match in self.others)])
        return CollectiveTime(time, {"start-up": start, "transfer": time - start}, self, spread, tuple(notes))

    def __str__(self) -> str:
        many = len(self.parts) > 1
        return "; ".join(f"{w:.2f} of {p} ranks: " * many + fill_in(fit) for fit, p, w in self.parts)


@dataclass(frozen=True)
class _Fabric:
    """A platform, the largest message that is priced on it [B], ranks of its nodes, and `Network.starts` [-]."""

    platform: Any
    largest: float
    local: int
    starts: float

    def start(self, operation: str, ranks: int, way: str = "") -> float:
        """Start-up of what a library takes for vanishing messages [s]."""
        local, link = 1 if way == "rail" else min(ranks, self.local), self.platform.network.links.get("inter")
        far = {"alpha_rail": link.latency.value / self.starts} if link else {}
        return self.starts * float(hierarchy.start_across(operation, ranks_per_node=local, nodes=ranks / local, **far))

    def lacks(self, operation: str, what: str) -> ValueError:
        """Make the error for what is missing, with what there is."""
        names = {key: Key.parse(key).operation for key in self.platform.collectives}
        return lacks(self.platform, what, [key for key, name in names.items() if name == operation] or names.values())

    def link(self, name: str, operation: str, what: str) -> Link:
        """Find a link of the network."""
        links: Mapping[str, Link] = self.platform.network.links
        if name not in links:
            where = "between" if name == "inter" else "inside"
            raise self.lacks(operation, f"model of {operation} {what} nor a link {where} nodes")
        return links[name]

    def find(self, operation: str, ranks: int, way: str = "") -> Match | None:
        """Find what prices a rank count: its fit, the law over counts if it is not poor, the nearest counts."""
        keys = ((Key.parse(key), fit) for key, fit in self.platform.collectives.items())
        own = {key.ranks: fit for key, fit in keys if (key.operation, key.algorithm) == (operation, way)}
        if ranks in own:
            return Match(operation, ((own[ranks], ranks, 1.0),), way=way)
        size, place = format_bytes(max(self.largest, LARGE)), _place(ranks, way)
        advice = f"; one {operation} of {size} on {place} would help most"
        edge = math.inf if way == "rail" else self.local  # fits inside nodes do not hold across them
        law = own.pop(None, None)
        low, high = law.ranges.get("ranks", (2.0, min(edge, ranks) if way else edge)) if law else (0.0, 0.0)
        found = list[Match]()
        if law and (high <= edge) == (ranks <= edge):
            far = abs(math.log2(ranks / min(max(ranks, low), high)))
            text = f"the law of {operation} was fitted on {low:g} to {high:g} ranks, {ranks} are outside{advice}"
            found.append(Match(operation, ((law, ranks, 1.0),), LAW * far, text if far else "", way))
        usable = {count: fit for count, fit in own.items() if count and (count <= edge) == (ranks <= edge)}
        if usable:
            found.append(_match_nearest(self, operation, ranks, way, usable, advice))
        found.sort(key=lambda match: match.parts[0][0].quality == "poor")
        return replace(found[0], others=tuple(found[1:])) if found else None


def price_collective(
    platform: Any, operation: str, nbytes: Array, ranks: int, algorithm: str | None = None
) -> CollectiveTime:
    """Price collectives of one operation, with what they consist of; no Python warning is raised.

    What is composed is never faster than the links allow; a fit that is says so. Arguments are those of
    `Platform.collective_time`, with sizes that are known to be good; `Platform.collective` says what prices what.
    """
    check_type("operation", operation, str)
    ranks, local = check_positive("ranks", ranks, integer=True), platform.network.ranks_per_node
    way = "" if algorithm is None else check_choice("algorithm", algorithm, ALGORITHMS)
    most = platform.network.nodes if way == "rail" else platform.network.ranks
    if ranks > most:
        where = "with one on each node " * (way == "rail") + f"platform {platform.name!r}"
        raise ValueError(f"ranks is {ranks}; {where} has {most}; choose fewer, or more nodes, as with_nodes(4)")
    sizes = np.asarray(nbytes, dtype=float)
    at = _Fabric(platform, float(np.max(sizes, initial=0.0)), local, platform.network.starts or 1.0)
    known = any(Key.parse(key).operation == operation for key in platform.collectives)
    if not known and not (way and operation in forms.OPERATIONS):
        raise at.lacks(operation, f"model for the collective {show(operation)}")
    if ranks == 1:
        return CollectiveTime(np.zeros(sizes.shape), formula="a single rank has nothing to exchange")
    if way == "rail":
        return _price_rail(at, operation, sizes, ranks)
    if match := at.find(operation, ranks, way):
        return _flag(at, match.price(sizes), operation, sizes, ranks)
    across = ranks > local
    if across and ranks % local:
        raise ValueError(f"ranks is {ranks}; across nodes it must be a multiple of the {local} ranks of a node")
    if not across and way in ("", "two_level"):
        levels = "two levels" if way else f"{ranks} ranks of one node"
        raise at.lacks(operation, f"model for the collective {operation!r} on {levels}")
    found = (_compose if across else _price_textbook)(at, operation, sizes, ranks, way)
    time = np.maximum(found.time, _least(at, operation, sizes, ranks))
    if np.all(time == found.time):
        return found
    return replace(found, time=time, terms={**found.terms, "limit of the link": time - found.time})


def _price_form(form: Callable[[Array], Array], nbytes: Array, formula: str, *notes: str) -> CollectiveTime:
    """Price a form whose parts are the start-up and the transfer."""
    time, start = (np.asarray(form(sizes)) for sizes in (nbytes, 0.0 * nbytes))
    return CollectiveTime(time, {"start-up": start, "transfer": time - start}, formula, notes=notes)


def _match_nearest(at: _Fabric, operation: str, ranks: int, way: str, fits: Mapping[int, Fit], advice: str) -> Match:
    """Between two counts the geometric mean of both times, beyond them the nearest one in proportion."""
    near = min(fits, key=lambda p: abs(math.log(p / ranks)))
    beyond, octaves = [p for p in fits if (p < ranks) != (near < ranks)], abs(math.log2(ranks / near))
    text = f"{operation} was fitted on {', '.join(map(str, sorted(fits)))} ranks; {ranks} are "
    if not beyond:
        scaled = _scale(at, fits[near], operation, ranks, near, way)
        return Match(operation, ((scaled, ranks, 1.0),), BEYOND * octaves, f"{text}scaled from {near}{advice}", way)
    far = min(beyond, key=lambda p: abs(p - ranks))
    weight = math.log(ranks / near) / math.log(far / near)
    parts = ((fits[near], near, 1.0 - weight), (fits[far], far, weight))
    return Match(operation, parts, BETWEEN * octaves, f"{text}interpolated between {near} and {far}{advice}", way)


def _scale(at: _Fabric, fit: Fit, operation: str, ranks: int, near: int, way: str) -> Fit:
    """Scale start-ups and times per byte as the algorithm would, where none is named the one of the library."""
    count = partial(_time_textbook, operation, np.array(1.0), way if way in ("tree", "in_network") else "")
    ends = {"alpha": {"alpha_hop": 1.0, "beta_link": 0.0}, "beta": {"alpha_hop": 0.0, "beta_link": 1.0}}
    factors = {name: float(count(ranks=ranks, **link) / count(ranks=near, **link)) for name, link in ends.items()}
    if way in ("", "rail") and at.platform.device.kind == "cuda":
        factors["alpha"] = at.start(operation, ranks, way) / at.start(operation, near, way)
    parameters = {name: value * factors.get(name.rstrip("012"), 1.0) for name, value in fit.items()}
    return replace(fit, parameters=parameters, stderr={})


def _place(ranks: int, way: str) -> str:
    return f"one rank of each of {ranks} nodes" if way == "rail" else f"{ranks} ranks"


def _time_textbook(operation: str, nbytes: Array, way: str, **sizes: float) -> Array:
    """Time of an algorithm, a ring where none is named, in hop latencies and the link that limits it."""
    if way and operation not in _TEXTBOOK[way]:
        fault = f"a textbook form is known for {', '.join(_TEXTBOOK[way])} and not for {operation}"
        advice = f"leave the algorithm out, or calibrate it as {Key(operation, int(sizes['ranks']), way)}"
        raise ValueError(f"algorithm is {way!r}; {fault}; {advice}")
    if way == "in_network":
        return np.asarray(hierarchy.in_network_all_reduce(nbytes, **sizes))
    form = hierarchy.tree_collective if way == "tree" else forms.ring_collective
    return np.asarray(form(nbytes, operation=operation, **sizes))


def _price_textbook(at: _Fabric, operation: str, nbytes: Array, ranks: int, way: str) -> CollectiveTime:
    """Price an algorithm inside a node from its textbook form and the link."""
    link = at.link("intra", operation, f"by {way}")
    alpha, beta = link.latency.value, 1.0 / link.bandwidth.value
    note = f"{operation} by {way} on {ranks} ranks was not measured: textbook form and the link inside nodes"
    formula = f"{way} of the textbook, alpha_hop = {alpha:.4g} s, beta_link = {beta:.4g} s/B"
    time = partial(_time_textbook, operation, way=way, ranks=ranks, alpha_hop=alpha, beta_link=beta)
    found = _price_form(time, nbytes, formula, note)
    return replace(found, spread=_guess(found.terms["start-up"], found.time))


def _guess(start: Array | float, time: Array) -> Array:
    """Spread of a time that was not measured, by the share of the start-up in it."""
    share = start / time
    return np.hypot(START * share, MOVE * (1.0 - share))


def _least(at: _Fabric, operation: str, nbytes: Array, ranks: int) -> Array:
    """Least time for what must leave or reach a rank, or a node over all its rails, even if switches reduce it."""
    inside, reduced = ranks <= at.local, 2.0 if operation == "all_reduce" else 1.0
    together = 1 if inside or operation in ("all_to_all", "send_recv") else at.local
    factor = forms.bus_factor(operation, ranks if inside else ranks // at.local) / reduced / together
    link = at.platform.network.links.get("intra" if inside else "inter")
    return nbytes * (factor / link.bandwidth.value if link else 0.0)


def _flag(at: _Fabric, found: CollectiveTime, operation: str, nbytes: Array, ranks: int) -> CollectiveTime:
    """Say so where a fit is faster than the datasheet of the link allows."""
    name = "intra" if ranks <= at.local else "inter"
    link = at.platform.network.links.get(name)
    stated = link is not None and link.bandwidth.kind == "datasheet"
    if not stated or np.all(found.time >= 0.98 * _least(at, operation, nbytes, ranks)):
        return found
    rate = format_rate(link.bandwidth.value, "B/s")
    note = f"{operation} on {ranks} ranks: the fit is faster than the {rate} of the {name} link; check its sizes"
    return replace(found, notes=(*found.notes, note))


def _compose(at: _Fabric, operation: str, nbytes: Array, ranks: int, way: str) -> CollectiveTime:
    """Compose a collective over whole nodes from its shares inside a node and between nodes."""
    nodes, way = ranks // at.local, way or ACROSS_NODES[operation]
    rules: dict[str, Callable[..., CollectiveTime]] = {"ring": _ring, "tree": _tree, "rail": _one_rail}
    rules["two_level"] = _choose_protocol if operation == "all_reduce" else _two_level
    rules["flat"] = partial(_two_level, flat=True)
    if way not in rules:
        fault = f"algorithm is {way!r}; across nodes there is no form of it"
        raise ValueError(f"{fault}; leave the algorithm out, or calibrate it as {Key(operation, ranks, way)}")
    found = rules[way](at, operation, nbytes, nodes)
    note = f"{operation} on {ranks} ranks was not measured: composed of its shares inside and between {nodes} nodes"
    measured = any(Key.parse(key)[::2] == (operation, "rail") for key in at.platform.collectives)
    if not measured:
        size = format_bytes(max(at.largest / at.local, LARGE))
        note += f"; one {operation} of {size} on one rank of each node would help most"
    spread = np.maximum(found.spread, PAIR if way == "rail" else COMPOSED)
    if way == "tree" or (way == "ring" and not measured):
        spread = np.maximum(spread, _guess(found.terms["start-up"], found.time))
    return replace(found, spread=spread, notes=tuple(dict.fromkeys((note, *found.notes))))


def _price_rail(at: _Fabric, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price the share between nodes, one rank of each: measured, or as a ring over the link."""
    alpha, known = at.start(operation, nodes, "rail"), "inter" in at.platform.network.links
    if match := at.find(operation, nodes, "rail"):
        found = match.price(nbytes)
        guess = _guess(np.minimum(alpha, found.time), found.time)
        spread = np.minimum(found.spread, guess) if match.note and known else found.spread
        if match.smallest <= LATE:
            return replace(found, spread=spread)
        time = np.maximum(found.time, alpha)  # below the smallest size the start-up is no surer than that of the link
        spread = np.where(nbytes < 0.98 * match.smallest, np.maximum(spread, guess), spread)
        return replace(found, time=time, terms={**found.terms, "unseen start-up": time - found.time}, spread=spread)
    link = at.link("inter", operation, f"over {nodes} nodes")
    beta = float(forms.bus_factor(operation, nodes)) / link.bandwidth.value
    formula = f"pipelined over the link, alpha = {alpha:.4g} s, beta = {beta:.4g} s/B"
    time = forms.pipelined(nbytes, alpha=alpha, beta=beta)
    return CollectiveTime(time, {}, formula, _guess(alpha, time))


def _find_hops(at: _Fabric, operation: str, nodes: int) -> tuple[float, float, float]:
    """Time per byte inside nodes; latency of a hop between them and time per byte of a rail; fits before links."""
    over, inside = f"over {nodes} nodes", 0.0
    if at.local > 1:
        stages = [at.find(stage, at.local) for stage in hierarchy.LEVELS.get(operation, ())]
        betas = [match.find_hop(at.local)[1] for match in stages if match]
        fitted = betas and len(betas) == len(stages)
        inside = sum(betas) / len(betas) if fitted else 1.0 / at.link("intra", operation, over).bandwidth.value
    if match := at.find(operation, nodes, "rail"):
        return inside, *match.find_hop(nodes)
    link = at.link("inter", operation, over)
    return inside, link.latency.value, 1.0 / link.bandwidth.value


def _ring(at: _Fabric, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    if operation in ("all_to_all", "send_recv"):
        raise ValueError(f"algorithm is 'ring'; {operation} goes around no ring; leave the algorithm out")
    local, (inside, hop, rail) = at.local, _find_hops(at, operation, nodes)
    numbers = f"alpha_hop = {hop:.4g} s, beta_intra = {inside:.4g} s/B, beta_rail = {rail:.4g} s/B"
    formula = f"rings over all ranks, {numbers}, q = {hierarchy.OVERLAP:g}"
    steps, far = (float(forms.ring_steps(operation, count)) for count in (local * nodes, nodes))
    hop = at.starts * hierarchy.STEP + far / steps * max(hop - at.starts * hierarchy.STEP, 0.0)
    links = {"ranks_per_node": local, "nodes": nodes, "alpha_hop": hop, "beta_intra": inside, "beta_rail": rail}
    step = _price_rail(at, operation, nbytes / local, nodes)  # in messages as long as those of this ring
    form: Callable[[Any], Any] = partial(hierarchy.ring_across_nodes, operation=operation, **links)
    least, first = at.start(operation, local * nodes), form(0.0)
    time, start = (np.minimum(least + hierarchy.FLAGS * (form(n) - first), form(n)) for n in (nbytes, 0.0 * nbytes))
    return CollectiveTime(time, {"start-up": start, "transfer": time - start}, formula, step.spread, step.notes)


def _tree(at: _Fabric, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    local, (inside, far, rail) = at.local, _find_hops(at, operation, nodes)
    near = at.link("intra", operation, "by tree").latency.value if local > 1 else 0.0
    beta = max(inside, rail / local)
    links: dict[str, Any] = {"ranks": local * nodes, "nodes": nodes, "alpha_hop": near, "alpha_rail": far}
    form = partial(_time_textbook, operation, way="tree", beta_link=beta, **links)
    return _price_form(form, nbytes, f"tree of the textbook, alpha_rail = {far:.4g} s, beta_link = {beta:.4g} s/B")


def _one_rail(at: _Fabric, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price what one pair of ranks on two nodes exchanges."""
    between = _price_rail(at, operation, nbytes, nodes)
    return replace(between, terms={"between nodes": between.time}, formula=f"on one rail: {between.formula}")


def _choose_protocol(at: _Fabric, operation: str, nbytes: Array, nodes: int) -> CollectiveTime:
    """Price two levels; where no start-up was measured, with flags beside the bytes or chunks at each hop of a tree."""
    found, match = _two_level(at, operation, nbytes, nodes), at.find(operation, nodes, "rail")
    if match and match.smallest <= LATE:
        return found
    tree = hierarchy.start_across(operation, ranks_per_node=at.local, nodes=nodes, call=0.0, **hierarchy.CHUNKS)
    flags = _two_level(at, operation, hierarchy.FLAGS * nbytes, nodes).time
    time = np.minimum(flags, hierarchy.overlap_levels(found.time, at.starts * tree))
    spread = np.hypot(found.spread, UNSEEN * (1.0 - found.time / time))
    return replace(found, time=time, terms={**found.terms, "protocol": time - found.time}, spread=spread)


def _two_level(at: _Fabric, operation: str, nbytes: Array, nodes: int, *, flat: bool = False) -> CollectiveTime:
    """Price stages inside nodes and what crosses between them; flat, all pairs exchange their messages at once."""
    local, message, parts = at.local, at.starts * hierarchy.MESSAGE, []
    stages, share = hierarchy.split_levels(operation, nbytes, ranks_per_node=local)
    for stage, size in ([(operation, nbytes / nodes)] if flat else stages) if local > 1 else ():
        match = at.find(stage, local)
        if match is None:
            raise at.lacks(stage, f"model for the collective {stage!r} on {local} ranks of one node")
        parts.append(_flag(at, match.price(size), stage, size, local))
    inside, between = sum((part.time for part in parts), start=0.0 * nbytes), _price_rail(at, operation, share, nodes)
    spread = np.maximum.reduce([np.broadcast_to(part.spread, nbytes.shape) for part in (between, *parts)])
    if flat:
        time = hierarchy.flat_all_to_all(inside, between.time, ranks_per_node=local, nodes=nodes, alpha_message=message)
        rule = f"max(intra, inter + (g - 1) (N - 1) alpha_m), alpha_m = {message:g} s"
        rest = "more messages, less overlap"
    elif operation == "all_to_all":
        memory = at.platform.device.main_bandwidth
        time = hierarchy.two_level_all_to_all(nbytes, inside, between.time, memory_bandwidth=memory)
        rule, rest = f"intra + inter + 4 n / W, W = {memory:.4g} B/s", "copies"
    else:
        time = hierarchy.overlap_levels(inside, between.time)
        rule, rest = f"(intra^q + inter^q)^(1/q), q = {hierarchy.OVERLAP:g}", "overlap"
    terms = {"inside nodes": inside, "between nodes": between.time, rest: time - inside - between.time}
    notes = tuple(text for part in (between, *parts) for text in part.notes)
    return CollectiveTime(time, terms, f"{rule}; inter: {between.formula}", spread, notes)
