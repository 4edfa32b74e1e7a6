"""Mixtures of experts: to how many ranks and nodes a token goes, how long tokens are under way, and
how much more than the average the busiest rank gets."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values
from perfkit.models.roofline import smooth_maximum

#: Name of the operation in which tokens go to ranks once.
DISPATCH = "expert_dispatch"
#: Share of the bandwidth of a link inside a node, and of one between nodes, that tokens get which
#: are sent once (DeepEP) [-]; docs/formulas.md, table 1.5.
SHARE_INSIDE, SHARE_BETWEEN = 0.67, 0.88
#: Random places of experts over which the load of the busiest rank is averaged [-].
_PLACES = 256


@closed_form()
def reached_groups(
    groups: Values,
    *,
    experts: float,
    top_k: int,
    expert_groups: int = 1,
    top_groups: int = 1,
) -> Values:
    r"""Expected number of groups of experts that a token goes to.

    Parameters
    ----------
    groups : float or array
        Groups, such as ranks or nodes, that hold equally many experts [-].
    experts : int
        Experts of a layer [-].
    top_k : int
        Different experts of a token, each as likely as the others [-].
    expert_groups, top_groups : int, optional
        Groups of experts that a router makes, and those of them from which all experts of a token
        are, each group as likely as the others [-].

    Returns
    -------
    reached : same kind as `groups`
        Groups that hold at least one of them [-].

    Notes
    -----
    .. math:: g \left(1 - \prod_{i=0}^{k-1} \frac{E - E/g - i}{E - i}\right)

    Where a router takes T of G groups first (node-limited routing, arXiv:2412.19437, section 2.1.2),
    E T / G experts can be chosen, and c of the groups of a router that lie in one of g are among the T
    with the probability of c hits in T draws without replacement. If g > G, it is E / g experts that
    lie in one of g, with the probability T / G that their group is taken.

    Examples
    --------
    Eight of 256 experts on 16 ranks and on two nodes:

    >>> [round(float(reached_groups(groups, experts=256, top_k=8)), 2) for groups in (16, 2)]
    [6.52, 1.99]

    On eight nodes, and there from four of eight groups, as DeepSeek-V3:

    >>> limited = reached_groups(8, experts=256, top_k=8, expert_groups=8, top_groups=4)
    >>> round(float(reached_groups(8, experts=256, top_k=8)), 2), round(float(limited), 2)
    (5.3, 3.63)
    """
    open_to_token = experts * top_groups / expert_groups
    # of small places, which lie in one group of a router
    taken = top_groups / expert_groups
    small = 1.0 - taken * (1.0 - _miss_all(experts / groups, open_to_token, top_k))
    # of places that hold whole groups of a router, of which some are taken
    held = expert_groups / np.maximum(groups, 1.0)
    large = 0.0
    for hits in range(int(top_groups) + 1):
        hit = _draw_groups(hits, held, expert_groups, top_groups)
        of_hits = hits * experts / expert_groups
        large = large + hit * _miss_all(of_hits, open_to_token, top_k)
    missed = np.where(np.less(groups, expert_groups), large, small)
    return groups * (1.0 - missed)


def _miss_all(in_place: Values, experts: float, top_k: int) -> Values:
    """Probability that none of the experts of a token is one of those in a place [-]."""
    missed = 1.0
    for number in range(int(top_k)):
        left = np.maximum(experts - number, 1.0)
        missed = missed * np.maximum(experts - in_place - number, 0.0) / left
    return missed


def _draw_groups(hits: int, held: Values, groups: int, draws: int) -> Values:
    """Probability that draws of some of the groups, without replacement, hit so many of those that a
    place holds [-]."""
    probability = float(math.comb(int(draws), hits))
    for number in range(int(draws)):
        chosen = held - number
        if number >= hits:
            chosen = groups - held - (number - hits)
        probability = probability * np.maximum(chosen, 0.0) / (groups - number)
    return probability


@closed_form()
def dispatched_bytes(
    nbytes: Values,
    *,
    ranks: float,
    nodes: float,
    experts: float,
    top_k: int,
    inside: float,
    between: float,
    expert_groups: int = 1,
    top_groups: int = 1,
) -> Values:
    r"""Bytes on the links of a rank of tokens that go to the ranks of their experts, each once to a
    node and there once to a rank.

    Parameters
    ----------
    nbytes : float or array
        Tokens of a rank, each counted once [B].
    ranks, nodes : int
        Ranks that share experts, and the nodes that they fill equally [-].
    experts, top_k : int
        Experts of a layer, and those of a token [-].
    inside, between : float
        Bandwidth of the links of a rank inside its node and to other nodes, one way [B/s].
    expert_groups, top_groups : int, optional
        Groups of experts that a router makes, and those to which a token may go, see
        `reached_groups` [-].

    Returns
    -------
    nbytes : same kind as `nbytes`
        Bytes that take as long at the bandwidth of the link between nodes, or inside of the only
        node [B]. Results come back as as many.

    Notes
    -----
    .. math:: n' = n\, W \max\left(\frac{r (1 - 1/g)}{0.67\, W_{in}},\;
              \frac{m (1 - 1/N)}{0.88\, W_{out}}\right)

    with r ranks and m of N nodes that a token reaches, g ranks of a node, and W the bandwidth of
    the link between nodes, or inside of the only one. Messages between nodes go to the rank
    of the same number, which passes them on while others arrive. The shares are those that DeepEP
    states on 8 and 32 H800; on 16 and 64 of them, on H100 and B200 the form comes within 9 % of
    what it states (docs/formulas.md, table 1.5).

    References
    ----------
    .. [1] DeepEP, README.md and docs/legacy.md, https://github.com/deepseek-ai/DeepEP

    Examples
    --------
    4096 tokens of 7168 numbers in bf16 on 32 H800, in ms:

    >>> sent = dispatched_bytes(4096 * 7168 * 2, ranks=32, nodes=4, experts=256, top_k=8, inside=2e11, between=5e10)
    >>> round(float(sent) / 5e10 * 1e3, 2)
    3.62
    """
    routing: dict[str, Any] = {
        "experts": experts,
        "top_k": top_k,
        "expert_groups": expert_groups,
        "top_groups": top_groups,
    }
    reached_ranks = reached_groups(ranks, **routing)
    # the rank that a token comes to needs no link to itself
    ranks_of_node = ranks / nodes
    seconds_inside = reached_ranks * (1.0 - 1.0 / ranks_of_node) / (SHARE_INSIDE * inside)
    if nodes == 1:
        return nbytes * inside * seconds_inside
    reached_nodes = reached_groups(nodes, **routing)
    seconds_between = reached_nodes * (1.0 - 1.0 / nodes) / (SHARE_BETWEEN * between)
    slower = smooth_maximum(seconds_inside, seconds_between, sharpness=math.inf)
    return nbytes * between * slower


class Imbalance(NamedTuple):
    """How tokens are spread over experts.

    Parameters
    ----------
    exponent : float
        Exponent of Zipf's law, which says how many tokens each expert gets; 0 for equally many [-].
    counts : tuple of float
        Tokens of each expert as they were measured; empty to take the law [-].
    """

    exponent: float = 0.0
    counts: tuple[float, ...] = ()

    @classmethod
    def read(cls, imbalance: float | Sequence[float]) -> "Imbalance":
        """Read how tokens are spread over experts.

        Parameters
        ----------
        imbalance : float or sequence of float
            Exponent of Zipf's law, or tokens of each expert [-].

        Returns
        -------
        imbalance : Imbalance
            The same as a record.

        Examples
        --------
        >>> Imbalance.read(0.5).exponent, Imbalance.read((3, 1)).counts
        (0.5, (3.0, 1.0))
        """
        if isinstance(imbalance, int | float):
            return cls(exponent=float(imbalance))
        return cls(counts=tuple(float(count) for count in imbalance))

    @property
    def is_balanced(self) -> bool:
        """Whether all experts get equally many tokens."""
        return self.exponent == 0.0 and not self.counts


def busiest_rank(imbalance: Imbalance, experts: int, ranks: int, *, top_k: int) -> float:
    r"""Tokens of the busiest rank over those of the average one.

    Parameters
    ----------
    imbalance : Imbalance
        How tokens are spread over experts.
    experts : int
        Experts of a layer [-].
    ranks : int
        Ranks that share them; they divide the experts [-].
    top_k : int
        Different experts of a token [-].

    Returns
    -------
    load : float
        1 if all get as many [-].

    Notes
    -----
    Measured counts lie on ranks in their order, equally many experts on each. Which experts Zipf's
    law makes busy is not known: the load is the mean over 256 random places, the same in each call.
    Shares of experts are those of `share_tokens`.

    Examples
    --------
    >>> busiest_rank(Imbalance(counts=(4.0, 2.0, 1.0, 1.0)), 4, 2, top_k=1)
    1.5
    >>> busiest_rank(Imbalance(exponent=1.0), 128, 1, top_k=8)
    1.0
    >>> round(busiest_rank(Imbalance(exponent=1.0), 128, 8, top_k=2), 2)
    2.23
    """
    if imbalance.is_balanced or ranks == 1:
        return 1.0
    if imbalance.counts:
        return _find_largest_share(np.array([imbalance.counts]), ranks)
    return _average_places(imbalance.exponent, experts, ranks, top_k)


def share_tokens(exponent: float, experts: int, top_k: int) -> np.ndarray:
    r"""Shares of all copies of tokens that experts get by Zipf's law, the busiest expert first.

    Parameters
    ----------
    exponent : float
        Exponent of the law [-].
    experts : int
        Experts of a layer [-].
    top_k : int
        Different experts of a token, at most `experts` [-].

    Returns
    -------
    shares : array
        One for each expert; their sum is 1 [-].

    Notes
    -----
    The experts of a token are different ones, so that an expert gets each token at most once: at
    most 1 / `top_k` of all copies. Shares of the law, :math:`p_r \propto r^{-s}`, that are larger are
    cut there, and the others get the rest by the same law, until none is larger.

    Examples
    --------
    Two of eight experts for each token; the busiest would get 65 % of all copies:

    >>> share_tokens(2.0, 8, 2).round(3).tolist()
    [0.5, 0.237, 0.105, 0.059, 0.038, 0.026, 0.019, 0.015]
    """
    most = 1.0 / top_k
    law = np.arange(1.0, experts + 1.0) ** -exponent
    shares = law / law.sum()
    cut = 0
    while cut < top_k and shares[cut] > most:
        cut += 1
        shares[:cut] = most
        rest = law[cut:].sum()
        if rest > 0.0:
            shares[cut:] = (1.0 - cut * most) * law[cut:] / rest
    return shares


def _find_largest_share(tokens: np.ndarray, ranks: int) -> float:
    """Largest share of the tokens of a rank, a row for each place of experts, times the ranks:
    their mean [-]."""
    places = len(tokens)
    of_ranks = tokens.reshape(places, ranks, -1).sum(axis=2)
    return float((of_ranks.max(axis=1) * ranks / of_ranks.sum(axis=1)).mean())


@lru_cache(maxsize=1024)
def _average_places(exponent: float, experts: int, ranks: int, top_k: int) -> float:
    """Mean load of the busiest rank over random places of experts by Zipf's law [-]."""
    tokens = share_tokens(exponent, experts, top_k)
    rng = np.random.default_rng(0)
    places = np.array([rng.permutation(tokens) for _ in range(_PLACES)])
    return _find_largest_share(places, ranks)
