"""Fits of collectives by name, and what they say about rank counts that were not fitted."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from perfkit.communication.algorithms import scale_ring, scale_textbook
from perfkit.estimates import fill_in, find_extrapolations, find_transfers
from perfkit.fitting import Fit
from perfkit.fitting.extrapolation import choose_sample, evaluate_collective, spread_beyond
from perfkit.models.collectives import OPERATIONS, bus_factor, ring_steps
from perfkit.units import Array, format_bytes

__all__ = [
    "ALGORITHMS",
    "KEY",
    "WAYS",
    "CollectiveTime",
    "Match",
    "evaluate_match",
    "find_hop",
    "find_match",
    "split_key",
]

#: Algorithms a user may ask for: around a ring, up and down a tree, reduced by the switch, or inside nodes and then
#: between them.
ALGORITHMS = ("ring", "tree", "in_network", "two_level")
#: How a collective can have been done: an algorithm, or over the rails between nodes, one rank of each node.
WAYS = (*ALGORITHMS, "rail")
#: Names of collective fits: ``<operation>.<ranks or any>[.<way>]``.
KEY = re.compile(rf"({'|'.join(OPERATIONS)})\.([2-9]|[1-9][0-9]+|any)(?:\.({'|'.join(WAYS)}))?", re.ASCII)
#: Doubt for each doubling of ranks: beyond a law, between two fitted counts, beyond a single count.
LAW, BETWEEN, BEYOND = 0.05, 0.1, 0.25
#: A size that is nearly all transfer on any network; what the advice to measure names at least [B].
LARGE = 2.0**27
_HUGE = np.array(1e18)  # nothing but transfer


@dataclass(frozen=True)
class CollectiveTime:
    """Time of collectives of one operation on one number of ranks.

    Parameters
    ----------
    time : array
        One time per message size [s].
    terms : mapping of str to array
        Parts that sum to `time` [s].
    formula : str
        The closed form with its numbers [-].
    spread : float or array
        Standard deviation of the logarithm of measured over predicted [-].
    notes : tuple of str
        What makes it less sure than the spread says [-].
    """

    time: Array
    terms: Mapping[str, Array] = field(default_factory=dict)
    formula: str = ""
    spread: float | Array = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """Fits that stand for one operation on one number of ranks.

    Parameters
    ----------
    operation : str
        The operation.
    parts : tuple of (Fit, int, float)
        Fits, the ranks each is evaluated for, and its weight in their geometric mean [-].
    doubt : float
        What is added to their spread, in squares [-].
    note : str
        Why they stand for it; empty for a fit of these ranks.
    way : str
        How it was done, one of `WAYS` or empty.
    """

    operation: str
    parts: tuple[tuple[Fit, int, float], ...]
    doubt: float = 0.0
    note: str = ""
    way: str = ""

    def time(self, nbytes: Array) -> Array:
        """Evaluate the fits, weighed."""
        times = [evaluate_collective(fit, nbytes, self.operation, ranks) ** weight for fit, ranks, weight in self.parts]
        return np.asarray(math.prod(times[1:], start=times[0]))


def split_key(key: str) -> tuple[str, int | None, str]:
    """Split the name of a collective fit.

    Parameters
    ----------
    key : str
        Such as ``all_reduce.8`` or ``all_reduce.any.rail`` [-].

    Returns
    -------
    operation : str
        One of `perfkit.models.collectives.OPERATIONS` [-].
    ranks : int or None
        Ranks, None for a law over all counts [-].
    way : str
        One of `WAYS`, empty for what the library chooses by itself [-].

    Raises
    ------
    ValueError
        For a name that is none.

    Examples
    --------
    >>> split_key("all_reduce.8"), split_key("all_gather.any.rail")
    (('all_reduce', 8, ''), ('all_gather', None, 'rail'))
    """
    match = KEY.fullmatch(key)
    if match is None:
        rule = f"<operation>.<ranks or any>[.<way>], such as all_reduce.8; operations are {', '.join(OPERATIONS)}"
        raise ValueError(f"collective {key!r} cannot be read; its name must be {rule}; ways are {', '.join(WAYS)}")
    operation, ranks, way = match.groups()
    return operation, None if ranks == "any" else int(ranks), way or ""


def find_match(
    fits: Mapping[str, Fit], operation: str, ranks: int, way: str, *, edge: float = math.inf, nbytes: float = 0.0
) -> Match | None:
    """Find what stands for a rank count: its fit, the law over counts, the counts around it, the nearest count.

    Parameters
    ----------
    fits : mapping of str to Fit
        Fits by name, see `split_key`.
    operation : str
        Operation, such as ``all_reduce``.
    ranks : int
        Ranks taking part, or nodes on a rail [-].
    way : str
        One of `WAYS`, empty for what the library chooses by itself.
    edge : float, optional
        Ranks of a node: fits inside nodes say nothing about several nodes, and the reverse [-].
    nbytes : float, optional
        The largest message asked for, which advice to measure names [B].

    Returns
    -------
    match : Match or None
        None where no fit is of use.
    """
    suffix = f".{way}" if way else ""
    exact, law = (fits.get(f"{operation}.{name}{suffix}") for name in (ranks, "any"))
    if exact is not None:
        return Match(operation, ((exact, ranks, 1.0),), way=way)
    advice = f"; one {operation} of {format_bytes(max(nbytes, LARGE))} on {_place(ranks, way)} would help most"
    if law is not None:
        low, high = law.ranges.get("ranks", (2.0, edge if edge < math.inf else ranks))
        if (high <= edge) == (ranks <= edge):
            far = abs(math.log2(ranks / min(max(ranks, low), high)))
            text = f"the law of {operation} was fitted on {low:g} to {high:g} ranks, {ranks} are outside{advice}"
            return Match(operation, ((law, ranks, 1.0),), LAW * far, text if far else "", way)
    keys = {split_key(key): fit for key, fit in fits.items()}
    own = {p: fit for (name, p, how), fit in keys.items() if (name, how) == (operation, way) and p is not None}
    usable = {p: fit for p, fit in own.items() if (p <= edge) == (ranks <= edge)}
    return _match_nearest(operation, ranks, way, usable, advice) if usable else None


def _match_nearest(operation: str, ranks: int, way: str, fitted: Mapping[int, Fit], advice: str) -> Match:
    """Between two counts the geometric mean of both times, beyond them the nearest one in proportion."""
    near = min(fitted, key=lambda p: abs(math.log(p / ranks)))
    beyond = [p for p in fitted if (p < ranks) != (near < ranks)]
    octaves = abs(math.log2(ranks / near))
    text = f"{operation} was fitted on {', '.join(map(str, sorted(fitted)))} ranks; {ranks} are "
    if not beyond:
        scaled = _scale(fitted[near], operation, ranks, near, way)
        return Match(operation, ((scaled, ranks, 1.0),), BEYOND * octaves, f"{text}scaled from {near}{advice}", way)
    far = min(beyond, key=lambda p: abs(p - ranks))
    weight = math.log(ranks / near) / math.log(far / near)
    parts = ((fitted[near], near, 1.0 - weight), (fitted[far], far, weight))
    return Match(operation, parts, BETWEEN * octaves, f"{text}interpolated between {near} and {far}{advice}", way)


def _scale(fit: Fit, operation: str, ranks: int, near: int, way: str) -> Fit:
    """Scale start-ups and times per byte as the algorithm would, a ring where it is not known."""
    rule = scale_textbook if way in ("tree", "in_network") else scale_ring
    (start, move), (start_near, move_near) = (rule(operation, count, way) for count in (ranks, near))
    factors = {"alpha": start / start_near, "beta": move / move_near}
    parameters = {name: value * factors.get(name.rstrip("012"), 1.0) for name, value in fit.items()}
    return replace(fit, parameters=parameters, stderr={})


def find_hop(match: Match, *, ranks: int) -> tuple[float, float]:
    """Find latency and bandwidth of the link that a ring goes around, from fits of what it does.

    Parameters
    ----------
    match : Match
        From `find_match`.
    ranks : int
        Ranks of the ring, or nodes on a rail [-].

    Returns
    -------
    alpha_hop : float
        What the smallest fitted size takes beyond its transfer, by the steps it makes; the start-up itself is a guess
        where no small size was measured [s].
    beta_link : float
        Time per byte of the link, one way [s/B].

    Examples
    --------
    >>> fit = Fit("alpha_beta", {"alpha": 63e-6, "beta": 18e-12}, ranges={"nbytes": (2.0**25, 2.0**34)})
    >>> find_hop(Match("all_gather", ((fit, 10, 1.0),)), ranks=10)
    (7e-06, 2e-11)
    """
    small = np.array(min(fit.ranges.get("nbytes", (0.0, 0.0))[0] for fit, *_ in match.parts))
    beta = float(match.time(_HUGE) / _HUGE)
    start = max(float(match.time(small)) - beta * float(small), 0.0)
    steps, traffic = (float(law(match.operation, ranks)) for law in (ring_steps, bus_factor))
    return start / steps, beta / traffic


def _place(ranks: int, way: str) -> str:
    return f"one rank of each of {ranks} nodes" if way == "rail" else f"{ranks} ranks"


def evaluate_match(match: Match, nbytes: Array) -> CollectiveTime:
    """Evaluate fits with their spread, and warn of what lies outside their sizes.

    Parameters
    ----------
    match : Match
        From `find_match`.
    nbytes : array
        Message sizes in the nccl-tests convention [B].

    Returns
    -------
    found : CollectiveTime
        Start-up and transfer, spread, and notes that name the one sample that would help most.
    """
    operation, time, start = match.operation, match.time(nbytes), match.time(0.0 * nbytes)
    notes, spreads = [match.note] if match.note else [], []
    for fit, count, _ in match.parts:
        spreads.append(spread_beyond(fit, nbytes, operation, count))
        low, high = fit.ranges.get("nbytes", (0.0, math.inf))
        near = np.clip(nbytes, 0.98 * low, 1.02 * high) == nbytes  # the same size, rounded to whole elements
        place = _place(count, match.way)
        sizes = {"nbytes": np.where(near, np.clip(nbytes, low, high), nbytes)}
        outside = find_extrapolations(f"{operation} on {place}", fit, sizes)
        if outside:
            far = float(np.max(nbytes) if np.max(nbytes) > high else np.min(nbytes))
            sample = format_bytes(choose_sample(fit, far, operation, count))
            notes += [f"{text}; one {operation} of {sample} on {place} would help most" for text in outside]
        notes += find_transfers(operation, fit)
    weights = [f"{weight:.2f} of {count} ranks: " if len(match.parts) > 1 else "" for _, count, weight in match.parts]
    formula = "; ".join(text + fill_in(fit) for text, (fit, *_) in zip(weights, match.parts, strict=True))
    spread = np.hypot(np.maximum.reduce(spreads), match.doubt)
    return CollectiveTime(time, {"start-up": start, "transfer": time - start}, formula, spread, tuple(notes))
