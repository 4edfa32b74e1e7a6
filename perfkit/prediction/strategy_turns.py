"""Messages of replicas beside layers of several kinds: the weights of one layer are gathered beside the
kernels of another one, which may be much shorter."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.platform.platform import Platform
from perfkit.prediction.stage_replicas import Exchange, add_to_all_chunks
from perfkit.prediction.strategy_case import Case, make_case
from perfkit.prediction.strategy_passes import add_leading_context
from perfkit.workloads.layer_kinds import LayerKind, list_kinds
from perfkit.workloads.stack import StackedWork


class Neighbours(NamedTuple):
    """A layer in a backward pass, by the kinds of its neighbours.

    Parameters
    ----------
    kernels : object
        Kind of the layer.
    gathered : object
        Kind of the layer whose weights are gathered meanwhile: the one before it in the model.
    reduced : object
        Kind of the layer whose gradients are reduced meanwhile: the one behind it in the model.
    """

    kernels: Any
    gathered: Any
    reduced: Any


def count_neighbours(kinds: Sequence[Any]) -> Counter[Neighbours]:
    """Count the layers of a model with the same neighbours.

    Parameters
    ----------
    kinds : sequence
        The kind of each layer, in the order of the model.

    Returns
    -------
    counts : Counter of Neighbours
        How many there are of each [-].

    Notes
    -----
    The last layer is taken to come before the first one, so that each layer computes once, is gathered
    once and is reduced once. In a forward pass the layer behind is gathered; of two kinds as many
    layers of one come before as behind those of the other.

    Examples
    --------
    >>> count_neighbours("DEDE")
    Counter({Neighbours(kernels='D', gathered='E', reduced='E'): 2, Neighbours(kernels='E', gathered='D', reduced='D'): 2})
    """
    behind = [*kinds[1:], *kinds[:1]]
    before = [*kinds[-1:], *kinds[:-1]]
    return Counter(map(Neighbours, kinds, before, behind))


def find_turns(case: Case) -> np.ndarray:
    """Find the strategies where layers with and without experts take turns, and wait for messages of one
    another.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    chosen : array of bool
        Single stages that gather weights and reduce gradients with each micro-batch, beside their kernels
        [-].
    """
    beside = case.has_messages & case.s.overlap & case.s.scattered
    single = ~case.has_stages & ~case.shards_alone
    # a few first dense layers are not what most layers stand beside
    takes_turns = case.model.experts > 0 and case.model.expert_interval > 1
    return np.asarray(beside & single & takes_turns)


def time_turns(
    platform: Platform,
    work: StackedWork,
    chosen: np.ndarray,
    list_exchange_of: Callable[[Case], Exchange],
) -> Array:
    """Time messages of replicas beside layers of several kinds.

    Parameters
    ----------
    platform : Platform
        GPUs.
    work : StackedWork
        The model, and strategies whose fields are arrays.
    chosen : array of int
        Positions of the strategies, see `find_turns` [-].
    list_exchange_of : callable
        Says what replicas do in an iteration of a model whose layers are all of one kind.

    Returns
    -------
    time : array
        What these messages add to an iteration of each chosen strategy [s].

    Notes
    -----
    In the forward pass, and for gathers in the backward pass, each layer takes max(m, k), of its kernels k
    and of messages m of the next one: for unlike layers the mean of this is more than that of a mean layer.
    Of two kinds in turn with other communicators, a gather of one kind does not wait for reductions of the
    other: a backward pass waits for all gathers, or for gathers and reductions of one communicator behind
    the kernels of its own layers, whichever is longest. Kernels that are slowed by both communicators are
    left to the form of a mean layer.
    """
    model = work.workload
    stacks = work.stacks
    if len(stacks) > 1:
        stacks = tuple(stacks[position] for position in chosen)
    some = work._replace(strategy=work.strategy.select(chosen), stacks=stacks)
    kinds = list_kinds(model)
    of_kind = []
    for kind in kinds:
        case = make_case(platform, some._replace(workload=kind.model))
        of_kind.append(list_exchange_of(add_leading_context(case)))
    counts = count_neighbours(_number_kinds(kinds, model.all_layers))
    forward = np.zeros(len(chosen))
    backward = [np.zeros(len(chosen)) for _ in range(3)]
    for neighbours, count in counts.items():
        share = count / model.all_layers
        gathered = of_kind[neighbours.gathered]
        reduced = of_kind[neighbours.reduced]
        exchange = of_kind[neighbours.kernels]._replace(
            gather_copies=gathered.gather_copies,
            gathers=gathered.gathers,
            reductions=reduced.reductions,
        )
        stage = exchange.kinds.first
        forward = forward + share * add_to_all_chunks(exchange, stage).forward
        for way, messages in enumerate(_list_ways(exchange)):
            backward[way] = backward[way] + share * add_to_all_chunks(messages, stage).landed
    longest = np.maximum.reduce(backward)
    return np.asarray(of_kind[0].micro * (forward + longest))


def _number_kinds(kinds: Sequence[LayerKind], all_layers: int) -> list[int]:
    """Number of the kind of each layer, in the order of the model."""
    kind_of_layer = {}
    for number, kind in enumerate(kinds):
        for layer in kind.layers:
            kind_of_layer[layer] = number
    return [kind_of_layer[layer] for layer in range(all_layers)]


def _list_ways(exchange: Exchange) -> tuple[Exchange, Exchange, Exchange]:
    """Messages of which a backward pass may wait for: those of each communicator alone, and gathers of
    both without reductions of layers, which the next gather on another communicator does not wait for."""
    none = np.zeros_like(exchange.micro)
    gathers, reductions = exchange.gathers, exchange.reductions
    of_layers = exchange._replace(
        gathers=gathers._replace(experts=none), reductions=reductions._replace(experts=none)
    )
    of_experts = exchange._replace(
        gathers=gathers._replace(layer=none), reductions=reductions._replace(layer=none)
    )
    of_gathers = exchange._replace(reductions=reductions._replace(layer=none, experts=none))
    return of_layers, of_experts, of_gathers
