"""Memory of a rank through one iteration: what is allocated and released when, by use."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from perfkit.ground.results import Table
from perfkit.ground.units import Array
from perfkit.platform.platform import Platform
from perfkit.prediction.memory import (
    PARTS,
    Changes,
    StreamChanges,
    hold_at_peak,
    list_changes,
    measure_memory,
)
from perfkit.prediction.simulation import RankTimeline

_GRADIENTS = PARTS.index("gradients")


class _Curve(NamedTuple):
    """What a rank holds after each of some changes.

    Parameters
    ----------
    at : array
        When, by the clock of `perfkit.prediction.memory.BufferLives`; minus infinity for the begin of
        the iteration, infinity for its end [-].
    held : array of shape (moments, uses)
        Bytes by use, in the order of `PARTS` [B].
    """

    at: Array
    held: Array


def find_fullest(timelines: Sequence[RankTimeline], platform: Platform) -> RankTimeline:
    """Find the rank that needs the most memory, the first of equal ones.

    Parameters
    ----------
    timelines : sequence of RankTimeline
        One iteration of each group of ranks.
    platform : Platform
        Where they run.

    Returns
    -------
    fullest : RankTimeline
        The iteration of the rank whose memory `perfkit.prediction.memory.measure_memory` returns.
    """
    return max(timelines, key=lambda timeline: measure_memory([timeline.graph], platform).total)


def list_memory(timeline: RankTimeline, platform: Platform) -> Table:
    """List what a rank holds through an iteration, see `Prediction.memory_over_time`.

    Parameters
    ----------
    timeline : RankTimeline
        One iteration of a rank.
    platform : Platform
        Where it runs.

    Returns
    -------
    frame : polars.DataFrame
        A row for each moment at which memory begins to rise or to fall.

    Raises
    ------
    ValueError
        For a graph of a strategy whose memory is known at its fullest moment alone.
    """
    import polars

    graph = timeline.graph
    if graph.held is not None:
        raise ValueError(
            "memory over time is known where each tensor was recorded; of this strategy only the "
            "fullest moment is known, memory(); predict replicas (dp with zero 0 to 3, without offload "
            "and shards among some of them) or the model itself"
        )
    curve = _follow(list_changes(graph, platform))
    count = len(graph)
    operations = (np.clip(curve.at, 0, 2 * count - 1) // 2).astype(int)
    columns: dict[str, object] = {
        "time_s": _time(timeline, curve.at),
        "operation": operations,
        "phase": [graph.labels[number].phase for number in operations.tolist()],
        "module": [graph.labels[number].module for number in operations.tolist()],
    }
    for number, use in enumerate(PARTS):
        columns[f"{use}_bytes"] = curve.held[:, number]
    columns["total_bytes"] = curve.held.sum(axis=1)
    return polars.DataFrame(columns)


def _follow(changes: StreamChanges) -> _Curve:
    """What is held after each change of the stream of kernels, beside the most of other streams.

    PyTorch does not give memory of one stream to tensors of another, so that what a stream of
    messages has held at most stays its own.
    """
    constant = changes.constant
    for stream in changes.streams[1:]:
        constant = constant + hold_at_peak(changes.part, stream)
    kernels = Changes(np.zeros(0), np.zeros(0, dtype=int), np.zeros(0))
    if changes.streams:
        kernels = changes.streams[0]
    moves = np.zeros((len(kernels.at), len(PARTS)))
    moves[np.arange(len(kernels.at)), changes.part[kernels.buffer]] = kernels.nbytes
    held = constant + np.cumsum(moves, axis=0)
    was_there = np.isneginf(kernels.at)
    begin = constant + moves[was_there].sum(axis=0)
    rises = kernels.nbytes > 0
    turns = np.append(rises[:-1] != rises[1:], True) if len(rises) else rises
    shown = turns & ~was_there
    end = begin
    if len(held):
        end = held[-1]
    before = begin.copy()
    if not changes.has_earlier_gradients:
        # those of this iteration are dropped as the next one begins, by zero_grad
        before[_GRADIENTS] = end[_GRADIENTS]
    return _Curve(
        at=np.concatenate([[-np.inf, -np.inf], kernels.at[shown], [np.inf]]),
        held=np.vstack([before, begin, held[shown], end]),
    )


def _time(timeline: RankTimeline, at: Array) -> Array:
    """Times of moments by the clock of operations [s].

    The host allocates in the order of the program, so that what a collective allocates counts from
    the kernel before it.
    """
    count = len(timeline.starts)
    compute = timeline.compute
    clock = np.full(2 * count + 1, timeline.begin)
    clock[2 * compute] = timeline.starts[compute]
    clock[2 * compute + 1] = timeline.ends[compute]
    clock = np.maximum.accumulate(np.maximum(clock, timeline.begin))
    positions = np.clip(at, 0, 2 * count).astype(int)
    times = np.where(np.isneginf(at), timeline.begin, clock[positions])
    return np.where(np.isposinf(at), timeline.period, times)
