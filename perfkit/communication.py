"""What a collective costs on a network: fits by rank count and way, laws between them, composition across nodes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from perfkit.estimates import fill_in, find_extrapolations, find_transfers
from perfkit.fitting import Fit
from perfkit.hardware import Network
from perfkit.models import collectives as forms
from perfkit.models.roofline import smooth_maximum
from perfkit.units import Array, check_choice, check_positive

__all__ = ["KEY", "WAYS", "CollectiveTime", "price_collective", "split_key"]

#: How a collective can be done: an algorithm, or over the rails between nodes, one rank of each node.
WAYS = ("ring", "tree", "in_network", "rail")
#: Names of collective fits: ``<operation>.<ranks or any>[.<way>]``.
KEY = re.compile(rf"({'|'.join(forms.OPERATIONS)})\.([2-9]|[1-9][0-9]+|any)(?:\.({'|'.join(WAYS)}))?", re.ASCII)
#: Collectives across nodes: the operations inside the node, whether each rank of a node carries its own share of the
#: message on its own rail, and the sharpness with which both resources combine (2.5 fits 10 x 8 H100).
ACROSS_NODES: dict[str, tuple[tuple[str, ...], bool, float]] = {
    "all_reduce": (("reduce_scatter", "all_gather"), True, 2.5),
    "all_gather": (("all_gather",), True, 2.5),
    "reduce_scatter": (("reduce_scatter",), True, 2.5),
    "broadcast": (("broadcast",), True, 2.5),
    "all_to_all": (("all_to_all",), False, math.inf),
}


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
    spread : float
        Standard deviation of the logarithm of measured over predicted [-].
    notes : tuple of str
        What makes it less sure than the spread says [-].
    """

    time: Array
    terms: Mapping[str, Array] = field(default_factory=dict)
    formula: str = ""
    spread: float = 0.0
    notes: tuple[str, ...] = ()


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
        rule = f"<operation>.<ranks or any>[.<way>], such as all_reduce.8; operations are {', '.join(forms.OPERATIONS)}"
        raise ValueError(f"collective {key!r} cannot be read; its name must be {rule}; ways are {', '.join(WAYS)}")
    operation, ranks, way = match.groups()
    return operation, None if ranks == "any" else int(ranks), way or ""


def price_collective(
    fits: Mapping[str, Fit],
    network: Network,
    operation: str,
    nbytes: Array,
    *,
    ranks: int,
    algorithm: str | None = None,
    owner: str = "platform",
) -> CollectiveTime:
    """Price collectives of one operation.

    Parameters
    ----------
    fits : mapping of str to Fit
        Fits by name, see `split_key` [-].
    network : Network
        Nodes and links.
    operation : str
        Operation, such as ``all_reduce`` [-].
    nbytes : array
        Message sizes in the nccl-tests convention [B].
    ranks : int
        Ranks taking part [-].
    algorithm : str, optional
        One of ``ring``, ``tree`` and ``in_network``; by default what the library chose when it was measured [-].
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
    """
    ranks, most = check_positive("ranks", ranks, integer=True), network.ranks
    if ranks > most:
        raise ValueError(f"ranks is {ranks}; {owner} has {most}; choose fewer ranks or a larger platform")
    way = "" if algorithm is None else check_choice("algorithm", algorithm, WAYS[:3])
    keys = {key: split_key(key) for key in fits}
    fitted = {count: fits[key] for key, (name, count, how) in keys.items() if (name, how) == (operation, way) and count}
    if not fitted:
        raise _lacks(owner, f"model for the collective {operation!r}", fits)
    if ranks == 1:
        return CollectiveTime(np.zeros(nbytes.shape), formula="a single rank has nothing to exchange")
    inside = ranks <= network.ranks_per_node
    usable = {count: fit for count, fit in fitted.items() if (count <= network.ranks_per_node) == inside}
    if not usable:
        return _across_nodes(fits, network, operation, nbytes, ranks, owner)
    fit, notes = _at_ranks(operation, ranks, usable)
    form = getattr(forms, fit.form)
    time, start = form(nbytes, **fit), form(0.0 * nbytes, **fit)
    notes += find_extrapolations(f"{operation} on {ranks} ranks", fit, {"nbytes": nbytes})
    notes += find_transfers(operation, fit)
    spread = float(np.mean(fit.spread_at(time)))
    return CollectiveTime(time, {"start-up": start, "transfer": time - start}, fill_in(fit), spread, notes)


def _lacks(owner: str, what: str, fits: Mapping[str, Fit]) -> ValueError:
    have = ", ".join(dict.fromkeys(key.partition(".")[0] for key in fits)) or "none"
    return ValueError(f"{owner} has no {what}; it has {have}; calibrate it or choose another platform")


def _across_nodes(
    fits: Mapping[str, Fit], network: Network, operation: str, nbytes: Array, ranks: int, owner: str
) -> CollectiveTime:
    """Compose a collective over whole nodes from its share inside a node and its share between nodes."""
    local, link = network.ranks_per_node, network.links.get("inter")
    if link is None or operation not in ACROSS_NODES:
        raise _lacks(owner, f"model of {operation} over {ranks} ranks nor a link between nodes", fits)
    if ranks % local:
        raise ValueError(f"ranks is {ranks}; across nodes it must be a multiple of the {local} ranks of a node")
    stages, on_rails, sharpness = ACROSS_NODES[operation]
    nodes, share = ranks // local, nbytes if on_rails else nbytes * local / ranks
    parts = [price_collective(fits, network, stage, share, ranks=local, owner=owner) for stage in stages]
    intra = np.sum([part.time for part in parts], axis=0)
    alpha = max(forms.ring_steps(operation, nodes) * link.latency.value, 1e-9)
    beta = forms.bus_factor(operation, nodes) / link.bandwidth.value
    inter = forms.pipelined(nbytes / local if on_rails else nbytes, alpha=alpha, beta=beta)
    time = smooth_maximum(intra, inter, sharpness=sharpness)
    note = f"{operation} on {ranks} ranks was not measured: composed of its shares inside and between {nodes} nodes"
    notes = (note, *(text for part in parts for text in part.notes))
    rail = f"pipelined, alpha = {alpha:.4g} s, beta = {beta:.4g} s/B"
    formula = f"(intra^q + inter^q)^(1/q), q = {sharpness:g}; inter: {rail}"
    terms = {"inside nodes": intra, "between nodes": inter, "overlap": time - intra - inter}
    return CollectiveTime(time, terms, formula, max(0.25, *(part.spread for part in parts)), notes)


def _at_ranks(operation: str, ranks: int, fitted: Mapping[int, Fit]) -> tuple[Fit, tuple[str, ...]]:
    """Fit for a rank count, from the nearest fitted counts where it was not fitted itself."""
    if ranks in fitted:
        return fitted[ranks], ()
    nearest = min(fitted, key=lambda count: abs(math.log(count / ranks)))
    near = fitted[nearest]
    beyond = [count for count in fitted if (count < ranks) != (nearest < ranks) and fitted[count].form == near.form]
    far = min(beyond, key=lambda count: abs(count - ranks), default=None)
    parameters = {}
    for name, value in near.items():
        law = forms.ring_steps if name.startswith("alpha") else forms.bus_factor if name.startswith("beta") else None
        if law is None:
            parameters[name] = value
            continue
        here, there = law(operation, ranks), law(operation, nearest)
        if far is not None and law(operation, far) != there:
            slope = (fitted[far][name] - value) / (law(operation, far) - there)
            parameters[name] = value + slope * (here - there)
        else:
            parameters[name] = value * here / there
    doubt = (0.25 if far is None else 0.1) * abs(math.log2(ranks / nearest))
    way = f"scaled from {nearest}" if far is None else f"interpolated between {nearest} and {far}"
    note = f"{operation} was fitted on {', '.join(map(str, sorted(fitted)))} ranks; {ranks} are {way}"
    return replace(near, parameters=parameters, stderr={}, spread=math.hypot(near.spread, doubt)), (note,)
