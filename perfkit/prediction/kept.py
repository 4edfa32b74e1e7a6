"""What a micro-batch of a strategy holds in memory: activations and new gradients, from the lives
of the tensors that were recorded."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.memory import find_lives
from perfkit.prediction.strategy_records import REGIONS, ByRegion
from perfkit.workloads.graph import Graph
from perfkit.workloads.operations import CAST_ONCE


class Moment(NamedTuple):
    """What is held at the fullest moment of a part of a pass [B].

    Parameters
    ----------
    activations : array
        Activations, with all that is freed inside the pass.
    gradients : array
        New gradients of weights.
    """

    activations: Array
    gradients: Array


class BackwardMoments(NamedTuple):
    """Fullest moments of a backward pass.

    Parameters
    ----------
    head, layer, embeddings : Moment
        Of each region.
    layer_end : Moment
        The end of the backward pass of a layer, when its gradients are packed to be reduced.
    """

    head: Moment
    layer: Moment
    layer_end: Moment
    embeddings: Moment


class Moments(NamedTuple):
    """Fullest moments of a micro-batch.

    Parameters
    ----------
    forward : ByRegion
        Activations of the forward pass through each region [B].
    until_sum, until_reduction, until_update : BackwardMoments
        Those of the backward pass, if a gradient is held until it is added to a sum, until the
        gradients of its unit are reduced, or until the update.
    """

    forward: ByRegion[Array]
    until_sum: BackwardMoments
    until_reduction: BackwardMoments
    until_update: BackwardMoments


class Lives(NamedTuple):
    """Lives of the tensors that a micro-batch makes, as positions of operations, and their bytes.

    `saved` are those of the forward pass that the backward pass reads, `is_gradient` the new
    gradients of weights. `phases` and `regions` are those of the operations.
    """

    begin: np.ndarray
    end: np.ndarray
    sizes: Array
    saved: np.ndarray
    is_gradient: np.ndarray
    phases: np.ndarray
    regions: np.ndarray


def list_lives(graph: Graph) -> Lives:
    """Lives of the tensors of a micro-batch before its update, as
    `perfkit.workloads.blocks.record_part` records it or compiled.

    They are those of `perfkit.prediction.memory`, which the memory of a graph is found from. Inputs
    of products that ranks gather are gathered once more for the backward pass.
    """
    count = [label.phase for label in graph.labels].index("update")
    labels = graph.labels[:count]
    names = np.array([label.name for label in labels])
    phases = np.array([label.phase for label in labels])
    regions = np.array([label.module.partition(".")[0] for label in labels])
    accesses = graph.accesses.select(graph.accesses.operation < count)
    passes = replace(
        graph,
        labels=labels,
        features=graph.features.select(slice(count)),
        accesses=accesses,
        columns={},
        dtypes=(),
    )
    buffers = int(accesses.buffer.max()) + 1
    everything = find_lives(passes, is_gradient=np.zeros(buffers, dtype=bool))
    # what is there before is a weight, a sum of gradients, or an input; weights in fp8 that are cast
    # once are there from the first micro-batch on
    of_casts = accesses.select(accesses.find_of(np.flatnonzero(names == CAST_ONCE)))
    is_kept = np.isin(everything.buffers, of_casts.buffer[of_casts.is_write])
    lives = everything.select(np.isfinite(everything.begins) & ~is_kept)
    begin = (lives.begins // 2).astype(int)
    end = np.minimum(lives.ends // 2, count - 1).astype(int)
    buffer = lives.buffers
    forward_end = int(np.flatnonzero(phases == "forward")[-1])
    gathered = (names[begin] == "all_gather") & (begin <= forward_end)
    used = accesses.select(accesses.operation <= forward_end)
    last_forward = np.zeros(buffers, dtype=int)
    np.maximum.at(last_forward, used.buffer, used.operation)
    end = np.where(gathered, last_forward[buffer], end)
    # each sum of gradients reads the sum and a gradient
    sums = np.flatnonzero((names == "add_") & (phases == "backward"))
    of_sums = accesses.select(accesses.find_of(sums))
    totals = of_sums.buffer[of_sums.is_write]
    gradients = np.setdiff1d(of_sums.buffer, totals)
    is_gradient = np.isin(buffer, gradients) & (begin > forward_end)
    sizes = np.array(np.broadcast_arrays(*(graph.buffers[number] for number in buffer)))
    saved = (begin <= forward_end) & (end > forward_end)
    return Lives(begin, end, sizes, saved, is_gradient, phases, regions)


def find_saved(lives: Lives) -> ByRegion[Array]:
    """Find the activations of the forward pass that a region reads in the backward pass.

    Parameters
    ----------
    lives : Lives
        Of a micro-batch as it was recorded; a compiler moves operations to other regions.

    Returns
    -------
    saved : ByRegion
        Activations whose last reader is in the backward pass of the region, as the input of the
        layer [B].
    """
    saved = []
    for name in REGIONS:
        of_region = lives.saved & (lives.regions[lives.end] == name)
        saved.append(lives.sizes[of_region].sum(axis=0))
    return ByRegion(*saved)


def find_moments(lives: Lives) -> Moments:
    """Find the fullest moments of a micro-batch.

    Parameters
    ----------
    lives : Lives
        Of a micro-batch as it is executed.

    Returns
    -------
    moments : Moments
        One for each phase and region, and for how long gradients are held.
    """
    operations = np.arange(len(lives.regions))[:, np.newaxis]
    is_activation = ~lives.is_gradient
    begin, end = lives.begin[is_activation], lives.end[is_activation]
    alive = (begin <= operations) & (operations <= end)
    activations = alive.astype(float) @ lives.sizes[is_activation]
    last = len(lives.regions) - 1
    layer_end = np.flatnonzero((lives.phases == "backward") & (lives.regions == "layers"))[-1]
    made = lives.begin[lives.is_gradient]
    added = lives.end[lives.is_gradient]
    # the gradients of a layer are one unit, those of both ends another
    reduced = np.where(lives.regions[made] == "layers", layer_end, last)
    updated = np.full(len(made), last)
    return Moments(
        forward=_find_forward_moments(lives, activations),
        until_sum=_find_backward_moments(lives, activations, added),
        until_reduction=_find_backward_moments(lives, activations, reduced),
        until_update=_find_backward_moments(lives, activations, updated),
    )


def _find_forward_moments(lives: Lives, activations: Array) -> ByRegion[Array]:
    """Activations at the fullest moment of each region of a forward pass [B]."""
    fullest = []
    for region in REGIONS:
        rows = np.flatnonzero((lives.phases == "forward") & (lives.regions == region))
        fullest.append(_find_fullest(rows, activations, np.zeros(activations.shape)).activations)
    return ByRegion(*fullest)


def _find_backward_moments(
    lives: Lives, activations: Array, held_until: np.ndarray
) -> BackwardMoments:
    """Fullest moments of a backward pass whose gradients are `held_until` some operations, or as
    long as they are read."""
    made = lives.begin[lives.is_gradient]
    read = lives.end[lives.is_gradient]
    operations = np.arange(len(lives.regions))[:, np.newaxis]
    held = (made <= operations) & (operations <= np.maximum(held_until, read))
    gradients = held.astype(float) @ lives.sizes[lives.is_gradient]

    def find(region: str) -> Moment:
        return _find_fullest(find_rows(region), activations, gradients)

    def find_rows(region: str) -> np.ndarray:
        return np.flatnonzero((lives.phases == "backward") & (lives.regions == region))

    layer_end = find_rows("layers")[-1]
    return BackwardMoments(
        head=find("head"),
        layer=find("layers"),
        layer_end=Moment(activations[layer_end], gradients[layer_end]),
        embeddings=find("embeddings"),
    )


def _find_fullest(rows: np.ndarray, activations: Array, gradients: Array) -> Moment:
    """The fullest moment of some operations; empty if a compiler has merged all of them with those
    of another region."""
    count = activations.shape[1]
    if not len(rows):
        return Moment(np.zeros(count), np.zeros(count))
    held = activations + gradients
    fullest = rows[np.argmax(held[rows], axis=0)]
    columns = np.arange(count)
    return Moment(activations[fullest, columns], gradients[fullest, columns])
