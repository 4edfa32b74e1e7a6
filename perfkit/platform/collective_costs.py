"""Cost models of collectives: times of messages, and how sure they are.

`perfkit.platform.collectives` chooses the cost model of a collective and fills in the numbers of a
machine. What is here only counts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import CollectiveModel
from perfkit.fitting.parameters import Key
from perfkit.ground.units import Array, Values, check_choice, format_bytes, format_rate
from perfkit.models import collectives as forms
from perfkit.models import hierarchy
from perfkit.models.algorithms import ALGORITHMS
from perfkit.platform.estimates import (
    CollectiveTime,
    find_extrapolations,
    find_transfers,
    format_equation,
)

#: Smallest size that advice to measure names: nearly all transfer on any network [B].
MESSAGE_TO_MEASURE = 2.0**27
#: A fit whose smallest size is above this one does not show the start-up [B].
LARGEST_START_UP = 2.0**20
#: Spread of times composed of measured parts, and of a single pair of ranks [-]; docs/formulas.md,
#: table 1.4.
SIGMA_COMPOSED, SIGMA_OF_PAIR = 0.15, 0.4
#: Spread of start-up and transfer from a datasheet or a textbook [-]; docs/formulas.md, table 1.4.
SIGMA_START_UP, SIGMA_TRANSFER = 0.9, 0.3
#: Extra spread for each root of a doubling of nodes beyond those measured [-], and the nodes for which
#: `SIGMA_TRANSFER` holds where none were; docs/formulas.md, table 1.4.
SIGMA_OF_NODES, NODES_OF_LINK = 0.17, 2
#: Spread of messages between regions, whose links nobody measured [-].
SIGMA_BETWEEN_REGIONS = 0.3
#: Extra spread of an all_reduce over nodes that may wait for chunks [-]; docs/formulas.md, table
#: 1.4.
SIGMA_UNSEEN_PROTOCOL = 0.4
#: Spread [-] where all of a start-up turns into transfer, or the reverse, beyond the fitted sizes;
#: docs/formulas.md, table 1.3.
CHANGE = 0.6
#: A message whose start-up is nothing beside its transfer [B].
ALL_TRANSFER = 1e18
#: Relative step of numerical slopes [-].
_STEP = 1e-4
#: Operations in which a rank sends all of its message between nodes or regions. Of the others, the
#: ranks of a node share the message.
UNSHARED = ("all_to_all", "send_recv")


class CollectiveCost(ABC):
    """How long a collective of one operation takes on one group of ranks."""

    @abstractmethod
    def time(self, nbytes: Array) -> Array:
        """Times of messages [s] of some sizes [B]."""

    @abstractmethod
    def price(self, nbytes: Array) -> CollectiveTime:
        """Times of messages of some sizes [B] with their parts, spread and warnings."""


@dataclass(frozen=True, eq=False, repr=False)
class NoExchange(CollectiveCost):
    """A single rank, which has nothing to exchange."""

    def time(self, nbytes: Array) -> Array:
        """No time [s]."""
        return np.zeros(nbytes.shape)

    def price(self, nbytes: Array) -> CollectiveTime:
        """No time, which is certain."""
        return CollectiveTime(self.time(nbytes), formula="a single rank has nothing to exchange")


# Fits.


class RingLink(NamedTuple):
    """A link of a ring.

    Parameters
    ----------
    alpha : float
        Latency of a hop [s].
    beta : float
        Time per byte, one way [s/B].
    """

    alpha: float
    beta: float


@dataclass(frozen=True, eq=False, repr=False)
class FittedCurve:
    """A fit that prices a collective, alone or together with that of another rank count.

    Parameters
    ----------
    fit : CollectiveModel
        Time over the size of a message.
    ranks : int
        Ranks that it is evaluated for [-].
    weight : float, optional
        Its exponent in the geometric mean of all curves [-].
    """

    fit: CollectiveModel
    ranks: int
    weight: float = 1.0

    @property
    def smallest(self) -> float:
        """Smallest message that was fitted [B]."""
        return self.fit.ranges.get("nbytes", (0.0, 0.0))[0]


@dataclass(frozen=True, eq=False, repr=False)
class FittedCost(CollectiveCost):
    """Fits whose weighted geometric mean is the time of a collective.

    Parameters
    ----------
    operation : str
        Such as ``all_reduce``.
    ranks : int
        Ranks that take part [-].
    curves : tuple of FittedCurve
        The fits.
    algorithm : str, optional
        Algorithm that was measured; empty where the library chose one.
    spread : float, optional
        Spread in addition to that of the fits [-].
    note : str, optional
        Why these fits, where none was made on this rank count.
    doubt : str, optional
        What is odd about what was measured.
    alternatives : tuple of FittedCost, optional
        Other fits for the same ranks: the smallest spread of all counts.
    """

    operation: str
    ranks: int
    curves: tuple[FittedCurve, ...]
    algorithm: str = ""
    spread: float = 0.0
    note: str = ""
    doubt: str = ""
    alternatives: tuple["FittedCost", ...] = ()

    @property
    def smallest(self) -> float:
        """Smallest message that was fitted [B]."""
        return min(curve.smallest for curve in self.curves)

    def time(self, nbytes: Array) -> Array:
        """Times of messages [s]."""
        mean = np.ones(np.shape(nbytes))
        for curve in self.curves:
            mean = mean * curve.fit.time(nbytes, self.operation, curve.ranks) ** curve.weight
        return np.asarray(mean)

    def invert_ring(self) -> RingLink:
        """The link of a ring that takes these times: the latency from the smallest fitted size, the
        time per byte from a message so large that its start-up is nothing."""
        sizes = np.array([self.smallest, ALL_TRANSFER])
        time_of_smallest, time_of_largest = self.time(sizes).tolist()
        beta = time_of_largest / ALL_TRANSFER
        steps = float(forms.ring_steps(self.operation, self.ranks))
        hop = max(time_of_smallest - beta * self.smallest, 0.0) / steps
        return RingLink(hop, beta / float(forms.bus_factor(self.operation, self.ranks)))

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with spread; outside what was fitted, the warnings name the one sample that would
        help most."""
        time, start_up = self.time(nbytes), self.time(0.0 * nbytes)
        return CollectiveTime(
            time,
            {"start-up": start_up, "transfer": time - start_up},
            self,
            self._estimate_spread(nbytes),
            self._list_notes(nbytes),
        )

    def _estimate_spread(self, nbytes: Array) -> Array:
        """The largest spread of these fits, or the smallest of the alternatives if that is less."""
        spreads = [
            spread_beyond(curve.fit, nbytes, self.operation, curve.ranks) for curve in self.curves
        ]
        spread = np.hypot(np.maximum.reduce(spreads), self.spread)
        for alternative in self.alternatives:
            spread = np.minimum(spread, alternative._estimate_spread(nbytes))
        return np.asarray(spread)

    def _list_notes(self, nbytes: Array) -> tuple[str, ...]:
        """What makes the times less certain than the fits are."""
        notes = []
        if self.doubt:
            notes.append(self.doubt)
        if self.note:
            size = format_bytes(max(float(np.max(nbytes, initial=0.0)), MESSAGE_TO_MEASURE))
            notes.append(f"{self.note}; {self._advise(size, self.ranks)}")
        for curve in self.curves:
            fit, ranks = curve.fit, curve.ranks
            low, high = fit.ranges.get("nbytes", (0.0, math.inf))
            # a size inside the range, rounded to whole elements, may lie a little outside
            outside = nbytes[(nbytes < 0.98 * low) | (nbytes > 1.02 * high)]
            if outside.size:
                label = f"{self.operation} on {self._describe(ranks)}"
                (text,) = find_extrapolations(label, fit, {"nbytes": outside})
                largest = float(np.max(outside))
                furthest = largest if largest > high else float(np.min(outside))
                sample = format_bytes(choose_sample(fit, furthest, self.operation, ranks))
                notes.append(f"{text}; {self._advise(sample, ranks)}")
            notes += find_transfers(self.operation, fit)
        return tuple(notes)

    def _advise(self, size: str, ranks: int) -> str:
        """The measurement that would help most."""
        return f"one {self.operation} of {size} on {self._describe(ranks)} would help most"

    def _describe(self, ranks: int) -> str:
        """Which ranks take part, in words."""
        if self.algorithm == "rail":
            return f"one rank of each of {ranks} nodes"
        return f"{ranks} ranks"

    def __str__(self) -> str:
        if len(self.curves) == 1:
            return format_equation(self.curves[0].fit)
        return "; ".join(
            f"{curve.weight:.2f} of {curve.ranks} ranks: {format_equation(curve.fit)}"
            for curve in self.curves
        )


@dataclass(frozen=True, eq=False, repr=False)
class ComparedFit(CollectiveCost):
    """A fit beside the bandwidth that a datasheet states for its link.

    Parameters
    ----------
    fitted : FittedCost
        What prices the collective.
    link : str
        Name of the link.
    bandwidth : float
        Its bandwidth [B/s].
    least_beta : float
        Least time per byte of the message over the link [s/B].
    """

    fitted: FittedCost
    link: str
    bandwidth: float
    least_beta: float

    def time(self, nbytes: Array) -> Array:
        """Times of the fit [s]."""
        return self.fitted.time(nbytes)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times of the fit, with a warning where they are too short for the link."""
        priced = self.fitted.price(nbytes)
        if not np.any(priced.time < 0.98 * (nbytes * self.least_beta)):
            return priced
        rate = format_rate(self.bandwidth, "B/s")
        on_ranks = f"{self.fitted.operation} on {self.fitted.ranks} ranks"
        fault = f"{on_ranks}: the fit is faster than the {rate} of the {self.link} link"
        return replace(priced, notes=(*priced.notes, f"{fault}; check its sizes"))


# Outside the sizes that were fitted.


class _Slopes(NamedTuple):
    """How the logarithm of a time changes: by one standard error of each parameter (a row each),
    and with the logarithm of the size, which is the share of the transfer [-]."""

    by_error: Array
    by_size: Array


def _find_slopes(fit: CollectiveModel, nbytes: Array, operation: str, ranks: int) -> _Slopes:
    """Slopes of a fit at some sizes [B], numerically."""
    values = dict(fit)
    log_time = np.log(fit.evaluate(nbytes, operation, ranks, **values))
    by_error = []
    for name, error in fit.stderr.items():
        value = values[name]
        if value <= 0:
            continue
        moved = {**values, name: value * (1 + _STEP)}
        log_moved = np.log(fit.evaluate(nbytes, operation, ranks, **moved))
        by_error.append((log_moved - log_time) * (error / (_STEP * value)))
    if not by_error:
        by_error.append(np.zeros(nbytes.shape))
    log_larger = np.log(fit.evaluate(nbytes * (1 + _STEP), operation, ranks, **values))
    return _Slopes(np.stack(by_error), by_size=(log_larger - log_time) / _STEP)


def spread_beyond(fit: CollectiveModel, nbytes: Values, operation: str, ranks: int) -> Array:
    r"""Spread of measurements around a fitted collective, inside and outside its measured sizes.

    It takes what `CollectiveModel.time` takes, and returns the standard deviation of log(measured /
    predicted) [-].

    Notes
    -----
    With e the share of the transfer in the time, which is the slope of log time over log size,
    beyond the fitted sizes

    .. math:: s^2 = s_{fit}^2 + \sum_i \left(\frac{\partial \ln t}{\partial \theta_i}
    \sigma_i\right)^2 + (0.6\,
       \Delta e)^2

    where the change of e since the last fitted size says how much of the form was never measured.

    Examples
    --------
    >>> from perfkit.fitting import Pipelined
    >>> known = {"alpha": 2e-5, "beta": 5e-12}
    >>> fit = Pipelined.build(known, stderr={"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...                       ranges={"nbytes": (512.0, 2.0**22)})
    >>> spread_beyond(fit, [2.0**20, 2.0**30], "all_reduce", 8).round(2)
    array([0.05, 0.34])
    """
    sizes = np.asarray(nbytes, dtype=float)
    spread = fit.spread_at(fit.time(sizes, operation, ranks))
    low, high = fit.ranges.get("nbytes", (0.0, np.inf))
    outside = (sizes < low) | (sizes > high)
    if not np.any(outside):
        return spread
    far = sizes[outside]
    slopes = _find_slopes(fit, far, operation, ranks)
    slopes_at_edge = _find_slopes(fit, np.clip(far, low, high), operation, ranks)
    from_parameters = np.sum(slopes.by_error**2, axis=0)
    from_form = (CHANGE * (slopes.by_size - slopes_at_edge.by_size)) ** 2
    widened = np.array(spread)
    widened[outside] = np.sqrt(spread[outside] ** 2 + from_parameters + from_form)
    return widened


def choose_sample(fit: CollectiveModel, nbytes: float, operation: str, ranks: int) -> float:
    """Choose the message [B] to measure for a better estimate of a message outside the fitted
    sizes.

    Above the fitted sizes it is the smallest power of two that removes 95 % of the variance that a
    measurement of the message itself would remove. Below them it is the message itself, which is
    the cheapest.

    Notes
    -----
    Standard errors are taken as independent, and the sample as noisy as the fit; `spread_beyond`
    gives the variance. A100 and H100 curves known up to 256 KiB, 1, 4 and 16 MiB predict 512 MiB
    with 80, 38, 22 and 12 % mean error. With the one sample chosen here, of 16 to 256 MiB, the
    errors are 6, 5, 7 and 7 %.

    Examples
    --------
    >>> from perfkit.fitting import Pipelined
    >>> known = {"alpha": 2e-5, "beta": 5e-12}
    >>> fit = Pipelined.build(known, stderr={"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...                       ranges={"nbytes": (512.0, 2.0**22)})
    >>> round(choose_sample(fit, 2.0**30, "all_reduce", 8) / 2**20)
    128
    """
    edge = fit.ranges.get("nbytes", (0.0, nbytes))[1]
    if nbytes <= edge:
        return nbytes
    powers = 2.0 ** np.arange(np.floor(np.log2(max(edge, 1.0))) + 1, np.ceil(np.log2(nbytes)))
    sizes = np.concatenate([[edge], powers, [nbytes]])
    slopes = _find_slopes(fit, sizes, operation, ranks)
    errors, elastic = slopes.by_error, slopes.by_size
    noise = max(fit.spread, 0.01) ** 2
    learnt = np.sum(errors * errors[:, -1:], axis=0) ** 2 / (np.sum(errors**2, axis=0) + noise)
    learnt[0] = 0.0  # the last fitted size is no new sample
    gain = learnt - (CHANGE * (elastic[-1] - elastic)) ** 2
    return float(sizes[1:][np.argmax(gain[1:] - gain[0] >= 0.95 * (gain[-1] - gain[0]))])


# Beyond the nodes that were measured.


def grow_with_nodes(nodes: float, measured: float = NODES_OF_LINK) -> float:
    r"""Extra spread of collectives over more nodes than were measured.

    Parameters
    ----------
    nodes : float
        Nodes that take part [-].
    measured : float, optional
        Nodes that were measured; by default those for which a link of a datasheet is as sure as
        `SIGMA_TRANSFER` says [-].

    Returns
    -------
    spread : float
        To be added in squares; 0 for no more nodes than were measured [-].

    Notes
    -----
    .. math:: s = 0.17 \sqrt{\log_2(N / N_0)}

    A network of more nodes has more switches on the way, whose errors add up like a random walk.
    Fitted to published bus bandwidths of eight systems on 3 to 248 nodes
    (docs/formulas.md, table 1.4).

    Examples
    --------
    >>> [round(grow_with_nodes(nodes), 2) for nodes in (1, 2, 4, 64)]
    [0.0, 0.0, 0.17, 0.38]
    """
    return SIGMA_OF_NODES * math.sqrt(math.log2(max(nodes / measured, 1.0)))


# Forms on the numbers of links.


def guess_spread(start_up: Array | float, time: Array) -> Array:
    """Spread of a time that was not measured, by the share of the start-up in it."""
    share = start_up / time
    return np.hypot(SIGMA_START_UP * share, SIGMA_TRANSFER * (1.0 - share))


def time_textbook(operation: str, nbytes: Array, algorithm: str, **sizes: Any) -> Array:
    """Time of a textbook algorithm [s], a ring where none is named."""
    if not algorithm:
        return np.asarray(forms.ring_collective(nbytes, operation=operation, **sizes))
    textbook = {name: each.textbook for name, each in ALGORITHMS.items() if each.textbook}
    time_inside = textbook[check_choice("algorithm inside a node", algorithm, textbook)]
    able = ALGORITHMS[algorithm].operations
    if operation not in able:
        fault = f"a textbook form is known for {', '.join(able)} and not for {operation}"
        key = Key(operation, int(sizes["ranks"]), algorithm)
        advice = f"leave the algorithm out, or calibrate it as {key}"
        raise ValueError(f"algorithm is {algorithm!r}; {fault}; {advice}")
    return np.asarray(time_inside(nbytes, operation=operation, **sizes))


def _split(cost: CollectiveCost, nbytes: Array) -> tuple[Array, dict[str, Array]]:
    """Times of messages, and their parts: start-up and transfer [s]."""
    time, start_up = cost.time(nbytes), cost.time(0.0 * nbytes)
    return time, {"start-up": start_up, "transfer": time - start_up}


@dataclass(frozen=True, eq=False, repr=False)
class TextbookCost(CollectiveCost):
    """A textbook algorithm on the numbers of a link that was not measured with it.

    Parameters
    ----------
    operation, algorithm : str
        Such as ``all_reduce`` and ``tree``.
    sizes : mapping of str to float
        Ranks and numbers of links, as `time_textbook` takes them.
    formula : str
        The form with its numbers.
    note : str, optional
        A warning.
    """

    operation: str
    algorithm: str
    sizes: Mapping[str, float]
    formula: str
    note: str = ""

    def time(self, nbytes: Array) -> Array:
        """Times of the algorithm [s]."""
        return time_textbook(self.operation, nbytes, self.algorithm, **self.sizes)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with the spread of a guess."""
        time, parts = _split(self, nbytes)
        spread = guess_spread(parts["start-up"], time)
        notes = (self.note,) if self.note else ()
        return CollectiveTime(time, parts, self.formula, spread, notes)


@dataclass(frozen=True, eq=False, repr=False)
class LimitedByLink(CollectiveCost):
    """A cost that is never below what the link allows.

    Parameters
    ----------
    cost : CollectiveCost
        What prices the collective.
    least_beta : float
        Least time per byte of the message over the link [s/B].
    """

    cost: CollectiveCost
    least_beta: float

    def time(self, nbytes: Array) -> Array:
        """Times [s], at least those of the bytes on the link."""
        return np.maximum(self.cost.time(nbytes), nbytes * self.least_beta)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with a part for the limit, where it holds."""
        priced = self.cost.price(nbytes)
        time = np.maximum(priced.time, nbytes * self.least_beta)
        if np.all(time == priced.time):
            return priced
        terms = {**priced.terms, "limit of the link": time - priced.time}
        return replace(priced, time=time, terms=terms)


@dataclass(frozen=True, eq=False, repr=False)
class LimitedByAllReduce(CollectiveCost):
    """A composed collective, which takes no longer than a measured all_reduce on the same ranks: an
    all_reduce contains it.

    Parameters
    ----------
    cost : CollectiveCost
        What prices the collective.
    all_reduce : FittedCost
        The measured all_reduce.
    start_up : float
        Start-up of the collective [s], which stays: a ring has more steps than a tree.
    """

    cost: CollectiveCost
    all_reduce: FittedCost
    start_up: float

    def time(self, nbytes: Array) -> Array:
        """Times [s], at most those of the all_reduce."""
        return self._limit(self.cost.time(nbytes), nbytes)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with a part for the limit, where it holds."""
        priced = self.cost.price(nbytes)
        time = self._limit(priced.time, nbytes)
        if np.all(time == priced.time):
            return priced
        terms = {**priced.terms, "limit of the all_reduce": time - priced.time}
        return replace(priced, time=time, terms=terms)

    def _limit(self, time: Array, nbytes: Array) -> Array:
        most = np.maximum(self.all_reduce.time(nbytes), self.start_up)
        return np.minimum(time, most)


# Between nodes.


@dataclass(frozen=True, eq=False, repr=False)
class FittedRail(CollectiveCost):
    """A stage between nodes with one rank of each, from its fit.

    Parameters
    ----------
    fitted : FittedCost
        Its fits.
    start_up : float
        Start-up of the library over the link [s].
    link_is_known : bool
        Whether the link between nodes is.
    """

    fitted: FittedCost
    start_up: float
    link_is_known: bool

    @property
    def shows_start_up(self) -> bool:
        """Whether messages were measured that are nothing but start-up."""
        return self.fitted.smallest <= LARGEST_START_UP

    def time(self, nbytes: Array) -> Array:
        """Times of the fit [s], at least a start-up."""
        time = self.fitted.time(nbytes)
        if self.shows_start_up:
            return time
        # below the smallest size, the start-up of the link is as good a guess
        return np.maximum(time, self.start_up)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with a spread that is no larger than that of a guess from the link."""
        priced = self.fitted.price(nbytes)
        guess = guess_spread(np.minimum(self.start_up, priced.time), priced.time)
        # a rail that was measured is no less sure than the link of a datasheet for as many nodes
        guess = np.hypot(guess, grow_with_nodes(self.fitted.ranks))
        spread = priced.spread
        if self.fitted.note and self.link_is_known:
            spread = np.minimum(spread, guess)
        if self.shows_start_up:
            return replace(priced, spread=spread)
        time = np.maximum(priced.time, self.start_up)
        is_unseen = nbytes < 0.98 * self.fitted.smallest
        return replace(
            priced,
            time=time,
            terms={**priced.terms, "unseen start-up": time - priced.time},
            spread=np.where(is_unseen, np.maximum(spread, guess), spread),
        )


@dataclass(frozen=True, eq=False, repr=False)
class LinkedRail(CollectiveCost):
    """A stage between nodes with one rank of each, pipelined over the link.

    Parameters
    ----------
    alpha : float
        Start-up [s].
    beta : float
        Time per byte [s/B].
    growth : float, optional
        Extra spread, as more nodes take part than the link is known for [-].
    notes : tuple of str, optional
        Warnings about the link.
    """

    alpha: float
    beta: float
    growth: float = 0.0
    notes: tuple[str, ...] = ()

    def time(self, nbytes: Array) -> Array:
        """Times over the link [s]."""
        return np.asarray(forms.pipelined(nbytes, alpha=self.alpha, beta=self.beta))

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with the spread of a guess."""
        time = self.time(nbytes)
        numbers = f"alpha = {self.alpha:.4g} s, beta = {self.beta:.4g} s/B"
        formula = f"pipelined over the link, {numbers}"
        spread = np.hypot(guess_spread(self.alpha, time), self.growth)
        return CollectiveTime(time, {}, formula, spread, self.notes)


#: A stage between nodes.
RailCost = FittedRail | LinkedRail


@dataclass(frozen=True, eq=False, repr=False)
class PairOnRail(CollectiveCost):
    """One pair of ranks on two nodes.

    Parameters
    ----------
    between : FittedRail or LinkedRail
        The stage between the nodes.
    """

    between: RailCost

    def time(self, nbytes: Array) -> Array:
        """Times between the nodes [s]."""
        return self.between.time(nbytes)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times between the nodes as the only part."""
        priced = self.between.price(nbytes)
        formula = f"on one rail: {priced.formula}"
        return replace(priced, terms={"between nodes": priced.time}, formula=formula)


@dataclass(frozen=True, eq=False, repr=False)
class RingCost(CollectiveCost):
    """Rings over all ranks: with flags beside the bytes where that is faster, else at full
    bandwidth.

    Parameters
    ----------
    operation : str
        Such as ``all_gather``.
    links : mapping of str to float
        Ranks, nodes and numbers of links, as `perfkit.models.hierarchy.ring_across_nodes` takes
        them.
    start_up : float
        Start-up of messages with flags [s].
    formula : str
        The form with its numbers.
    between : FittedRail or LinkedRail
        The stage between nodes, which is as sure as the ring.
    """

    operation: str
    links: Mapping[str, Any]
    start_up: float
    formula: str
    between: RailCost

    def time(self, nbytes: Array) -> Array:
        """Times of the faster ring [s]."""
        at_full_bandwidth = self._go_around(nbytes)
        transfer = at_full_bandwidth - self._go_around(0.0)
        with_flags = self.start_up + hierarchy.FLAGS * transfer
        return np.asarray(np.minimum(with_flags, at_full_bandwidth))

    def _go_around(self, nbytes: Any) -> Any:
        """Times at full bandwidth [s]."""
        return hierarchy.ring_across_nodes(nbytes, operation=self.operation, **self.links)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times as sure as messages between nodes that are as long as those of the ring."""
        time, parts = _split(self, nbytes)
        between = self.between.price(nbytes / self.links["ranks_per_node"])
        return CollectiveTime(time, parts, self.formula, between.spread, between.notes)


@dataclass(frozen=True, eq=False, repr=False)
class TreeCost(TextbookCost):
    """A tree over all ranks, whose spread `ComposedCost` adds."""

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with start-up and transfer."""
        time, parts = _split(self, nbytes)
        return CollectiveTime(time, parts, self.formula)


@dataclass(frozen=True, eq=False, repr=False)
class StagesCost(CollectiveCost):
    """Stages inside nodes and one between them.

    Parameters
    ----------
    operation : str
        Such as ``all_reduce``.
    ranks_per_node, nodes : int
        Ranks that take part [-].
    inside : sequence of CollectiveCost
        Stages inside a node; empty for nodes of one rank.
    between : FittedRail or LinkedRail
        The stage between nodes.
    """

    operation: str
    ranks_per_node: int
    nodes: int
    inside: Sequence[CollectiveCost]
    between: RailCost

    #: Name of what the time is longer or shorter than both stages.
    rest = ""

    def size_stages(self, nbytes: Array) -> tuple[list[Array], Array]:
        """Sizes of messages of each stage inside nodes, and of that between them [B]."""
        stages, share = hierarchy.split_levels(
            self.operation, nbytes, ranks_per_node=self.ranks_per_node
        )
        return [np.asarray(size) for _, size in stages], np.asarray(share)

    @abstractmethod
    def join(self, nbytes: Array, inside: Array, between: Array) -> Array:
        """Times of both together [s]."""

    @abstractmethod
    def write_rule(self) -> str:
        """The rule by which both are joined."""

    def time(self, nbytes: Array) -> Array:
        """Times of all stages [s]."""
        sizes_inside, share = self.size_stages(nbytes)
        inside = 0.0 * nbytes
        for stage, size in zip(self.inside, sizes_inside, strict=False):
            inside = inside + stage.time(size)
        return self.join(nbytes, inside, self.between.time(share))

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with both parts, as sure as the least sure of them."""
        sizes_inside, share = self.size_stages(nbytes)
        stages = [stage.price(size) for stage, size in zip(self.inside, sizes_inside, strict=False)]
        between = self.between.price(share)
        inside = 0.0 * nbytes
        for stage in stages:
            inside = inside + stage.time
        time = self.join(nbytes, inside, between.time)
        terms = {
            "inside nodes": inside,
            "between nodes": between.time,
            self.rest: time - inside - between.time,
        }
        formula = f"{self.write_rule()}; inter: {between.formula}"
        spreads = [np.broadcast_to(part.spread, nbytes.shape) for part in (between, *stages)]
        notes = sum((part.notes for part in (between, *stages)), ())
        return CollectiveTime(time, terms, formula, np.maximum.reduce(spreads), notes)


@dataclass(frozen=True, eq=False, repr=False)
class TwoLevels(StagesCost):
    """Stages that overlap, chunk by chunk."""

    rest = "overlap"

    def join(self, nbytes: Array, inside: Array, between: Array) -> Array:
        """Times of both [s]."""
        return np.asarray(hierarchy.overlap_levels(inside, between))

    def write_rule(self) -> str:
        """The rule by which both are joined."""
        return f"(intra^q + inter^q)^(1/q), q = {hierarchy.OVERLAP:g}"


@dataclass(frozen=True, eq=False, repr=False)
class TwoLevelAllToAll(StagesCost):
    """An all_to_all inside nodes and one between them, with copies.

    Parameters
    ----------
    memory_bandwidth : float
        That of the main memory [B/s].
    """

    memory_bandwidth: float = math.inf

    rest = "copies"

    def join(self, nbytes: Array, inside: Array, between: Array) -> Array:
        """Times of both and of the copies [s]."""
        time = hierarchy.two_level_all_to_all(
            nbytes, inside, between, memory_bandwidth=self.memory_bandwidth
        )
        return np.asarray(time)

    def write_rule(self) -> str:
        """The rule by which both are joined."""
        return f"intra + inter + 4 n / W, W = {self.memory_bandwidth:.4g} B/s"


@dataclass(frozen=True, eq=False, repr=False)
class FlatAllToAll(StagesCost):
    """An all_to_all in which all pairs of ranks exchange their messages at once.

    Parameters
    ----------
    alpha_message : float
        Start-up of each further message between nodes [s].
    chunk : float
        Shorter messages to one rank of another node are sent together [B]; 0 where none are.
    """

    alpha_message: float = 0.0
    chunk: float = 0.0

    rest = "more messages, less overlap"

    def size_stages(self, nbytes: Array) -> tuple[list[Array], Array]:
        """Sizes of messages inside a node, and between nodes [B]."""
        _, share = super().size_stages(nbytes)
        return [nbytes / self.nodes], share

    def join(self, nbytes: Array, inside: Array, between: Array) -> Array:
        """Times of both [s]."""
        messages = hierarchy.start_messages(
            nbytes,
            ranks_per_node=self.ranks_per_node,
            nodes=self.nodes,
            alpha_message=self.alpha_message,
            chunk=self.chunk,
        )
        return np.asarray(hierarchy.flat_all_to_all(inside, between, messages))

    def write_rule(self) -> str:
        """The rule by which both are joined."""
        times = "max(intra, inter + (g - 1) (N - 1) alpha_m"
        if self.chunk:
            times += f" min(1, n / (g N {format_bytes(self.chunk)}))"
        return f"{times}), alpha_m = {self.alpha_message:g} s"


@dataclass(frozen=True, eq=False, repr=False)
class FlaggedTree(CollectiveCost):
    """An all_reduce over nodes whose bytes carry flags.

    Parameters
    ----------
    numbers : mapping of str to float
        What `perfkit.models.hierarchy.pipelined_tree` takes beside the bytes.
    """

    numbers: Mapping[str, Any]

    def time(self, nbytes: Array) -> Array:
        """Times of the tree [s]."""
        return np.asarray(hierarchy.pipelined_tree(nbytes, **self.numbers))

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with start-up and transfer."""
        time, parts = _split(self, nbytes)
        return CollectiveTime(time, parts, "tree of bytes with flags")


@dataclass(frozen=True, eq=False, repr=False)
class ProtocolsCost(CollectiveCost):
    """Two levels whose start-up was not measured, by the fastest protocol: with flags, or with
    chunks at each hop of a tree.

    Parameters
    ----------
    levels : TwoLevels
        The stages.
    tree_start_up : float
        What chunks wait at the hops of the tree [s].
    with_flags : tuple of FlaggedTree
        Protocols with flags.
    """

    levels: TwoLevels
    tree_start_up: float
    with_flags: tuple[FlaggedTree, ...]

    def time(self, nbytes: Array) -> Array:
        """Times of the fastest protocol [s]."""
        return self._choose(nbytes, self.levels.time(nbytes))

    def _choose(self, nbytes: Array, levels: Array) -> Array:
        """Times of the fastest protocol [s], from those of the levels without waits for chunks."""
        fastest = np.asarray(hierarchy.overlap_levels(levels, self.tree_start_up))
        for tree in self.with_flags:
            fastest = np.minimum(fastest, tree.time(nbytes))
        return fastest

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times, less sure the more the protocol adds."""
        priced = self.levels.price(nbytes)
        time = self._choose(nbytes, priced.time)
        share = np.clip(1.0 - priced.time / time, 0.0, 1.0)
        spread = np.hypot(priced.spread, SIGMA_UNSEEN_PROTOCOL * share)
        terms = {**priced.terms, "protocol": time - priced.time}
        return replace(priced, time=time, terms=terms, spread=spread)


@dataclass(frozen=True, eq=False, repr=False)
class ComposedCost(CollectiveCost):
    """A collective over whole nodes that was not measured, with the warning and the spread of that.

    Parameters
    ----------
    cost : CollectiveCost
        Its form.
    operation : str
        Such as ``all_gather``.
    ranks_per_node, nodes : int
        Ranks that take part [-].
    least_spread : float
        Of composed times [-].
    rail_is_measured : bool
        Whether the operation was measured with one rank of each node.
    is_guess : bool
        Whether start-up and transfer are as uncertain as those of a textbook.
    growth : float, optional
        Extra spread of a guess, as more nodes take part than the link is known for [-].
    """

    cost: CollectiveCost
    operation: str
    ranks_per_node: int
    nodes: int
    least_spread: float
    rail_is_measured: bool
    is_guess: bool
    growth: float = 0.0

    def time(self, nbytes: Array) -> Array:
        """Times of the form [s]."""
        return self.cost.time(nbytes)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with the spread of composed ones, and the measurement that would help most."""
        priced = self.cost.price(nbytes)
        what = f"{self.operation} on {self.ranks_per_node * self.nodes} ranks was not measured"
        note = f"{what}: composed of its shares inside and between {self.nodes} nodes"
        if not self.rail_is_measured:
            on_rail = float(np.max(nbytes, initial=0.0))
            if self.operation not in UNSHARED:
                on_rail /= self.ranks_per_node
            size = format_bytes(max(on_rail, MESSAGE_TO_MEASURE))
            note += f"; one {self.operation} of {size} on one rank of each node would help most"
        spread = np.maximum(priced.spread, self.least_spread)
        if self.is_guess:
            start_up = self.cost.time(0.0 * nbytes)
            guess = np.hypot(guess_spread(start_up, priced.time), self.growth)
            spread = np.maximum(spread, guess)
        return replace(priced, spread=spread, notes=tuple(dict.fromkeys((note, *priced.notes))))


# Between regions.


@dataclass(frozen=True, eq=False, repr=False)
class RegionsCost(CollectiveCost):
    """A collective inside regions, and a ring between them.

    Parameters
    ----------
    inside : CollectiveCost
        What prices the collective inside a region.
    operation : str
        Such as ``all_reduce``.
    ranks_of_region, regions : int
        Ranks that take part [-].
    alpha : float
        Latency of the far link [s].
    beta : float
        Its time per byte [s/B].
    """

    inside: CollectiveCost
    operation: str
    ranks_of_region: int
    regions: int
    alpha: float
    beta: float

    def time(self, nbytes: Array) -> Array:
        """Times inside regions and between them [s]."""
        return self.inside.time(nbytes) + self.time_between(nbytes)

    def time_between(self, nbytes: Array) -> Array:
        """Times between regions [s]: one rank of each is on a ring, with its share of the bytes or
        with all of them."""
        share = nbytes if self.operation in UNSHARED else nbytes / self.ranks_of_region
        time = forms.ring_collective(
            share,
            operation=self.operation,
            ranks=self.regions,
            alpha_hop=self.alpha,
            beta_link=self.beta,
        )
        return np.asarray(time)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with both parts."""
        inside, between = self.inside.price(nbytes), self.time_between(nbytes)
        return CollectiveTime(
            time=inside.time + between,
            terms={"inside regions": inside.time, "between regions": between},
            formula=f"inside regions + ring over {self.regions} regions, alpha_far = {self.alpha:.4g} s",
            spread=np.hypot(inside.spread, SIGMA_BETWEEN_REGIONS),
            notes=inside.notes,
        )


@dataclass(frozen=True, eq=False, repr=False)
class SentOnce(CollectiveCost):
    """Tokens that go to the ranks of their experts once, see
    `perfkit.models.experts.dispatched_bytes`.

    Parameters
    ----------
    bandwidth : float
        Of the link that messages are sized for [B/s].
    latency : float
        Until the first byte is there [s].
    """

    bandwidth: float
    latency: float

    def time(self, nbytes: Array) -> Array:
        """Times of the bytes on this link [s]."""
        return np.asarray(self.latency + nbytes / self.bandwidth)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times of the bytes on this link."""
        return CollectiveTime(
            self.time(nbytes),
            formula="tokens once to each node and each rank: latency + bytes / bandwidth",
            spread=SIGMA_COMPOSED,
        )


@dataclass(frozen=True, eq=False, repr=False)
class AsAllGather(CollectiveCost):
    """A message between two ranks that was not measured: an all_gather of the two.

    Parameters
    ----------
    all_gather : CollectiveCost
        What prices it.
    """

    all_gather: CollectiveCost

    def time(self, nbytes: Array) -> Array:
        """Times of the all_gather, to which each rank gives the message [s]."""
        return self.all_gather.time(2.0 * nbytes)

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times of the all_gather."""
        return self.all_gather.price(2.0 * nbytes)
