"""What a micro-batch of a strategy holds in memory: activations and new gradients, from the lives
of the tensors that were recorded."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.memory import find_lives
from perfkit.workloads.graph import Graph

#: Parts of a pass in their order: a phase and a region.
SEGMENTS = (
    ("forward", "embeddings"),
    ("forward", "layers"),
    ("forward", "head"),
    ("backward", "head"),
    ("backward", "layers"),
    ("backward", "embeddings"),
)
#: How long a gradient of a micro-batch is held: until it is added to a sum; until the gradients of
#: its unit are reduced; or until the update.
UNTIL = ("sum", "reduction", "update")


class Moment(NamedTuple):
    """What is held at the fullest moment of a segment [B].

    Parameters
    ----------
    activations : array
        Activations, with all that is freed inside the pass.
    gradients : array
        New gradients of weights.
    """

    activations: Array
    gradients: Array


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
    # what is there before is a weight, a sum of gradients, or an input
    lives = everything.select(np.isfinite(everything.begins))
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


def find_saved(lives: Lives) -> dict[str, Array]:
    """Find the activations of the forward pass that a region reads in the backward pass.

    Parameters
    ----------
    lives : Lives
        Of a micro-batch as it was recorded; a compiler moves operations to other regions.

    Returns
    -------
    saved : dict of str to array
        Activations whose last reader is in the backward pass of ``embeddings``, of the layer
        (``layers``) or of the ``head``, as the input of the layer [B].
    """
    saved = {}
    for name in ("embeddings", "layers", "head"):
        of_region = lives.saved & (lives.regions[lives.end] == name)
        saved[name] = lives.sizes[of_region].sum(axis=0)
    return saved


def find_moments(lives: Lives) -> dict[tuple[str, str, str], Moment]:
    """Find the fullest moment of each segment of a micro-batch.

    Parameters
    ----------
    lives : Lives
        Of a micro-batch as it is executed.

    Returns
    -------
    moments : dict of (str, str, str) to Moment
        By how long gradients are held, see `UNTIL`, which does not matter in the forward pass, by
        phase and by region; with ``packing`` the end of
        the backward pass of the layer.
    """
    regions = lives.regions
    in_backward = lives.phases == "backward"
    segments = {
        (phase, region): np.flatnonzero((lives.phases == phase) & (regions == region))
        for phase, region in SEGMENTS
    }
    places = np.arange(len(regions))[:, np.newaxis]
    new = lives.is_gradient
    alive = (lives.begin[~new] <= places) & (places <= lives.end[~new])
    activations = alive.astype(float) @ lives.sizes[~new]
    begin, end, sizes = lives.begin[new], lives.end[new], lives.sizes[new]
    last = len(regions) - 1
    unit_end = np.full(len(begin), last)
    of_layer = regions[begin] == "layers"
    unit_end[of_layer] = np.flatnonzero(in_backward & (regions == "layers"))[-1]
    held_until = {"sum": end, "reduction": unit_end, "update": np.full(len(end), last)}
    columns = np.arange(sizes.shape[1])
    moments = {}
    for until in UNTIL:
        held = (begin <= places) & (places <= np.maximum(held_until[until], end))
        gradients = held.astype(float) @ sizes
        total = activations + gradients
        layer_end = np.flatnonzero(in_backward & (regions == "layers"))[-1]
        moments[until, "packing", "layers"] = Moment(activations[layer_end], gradients[layer_end])
        for (phase, region), inside in segments.items():
            if phase == "forward" and until != UNTIL[0]:  # without gradients, as the first
                continue
            if not len(inside):  # a compiler has merged its kernels with those of another region
                moments[until, phase, region] = Moment(*np.zeros((2, len(columns))))
                continue
            fullest = inside[np.argmax(total[inside], axis=0)]
            moments[until, phase, region] = Moment(
                activations[fullest, columns], gradients[fullest, columns]
            )
    return moments
