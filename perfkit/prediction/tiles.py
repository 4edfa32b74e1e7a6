"""Messages of ranks that share layers, and the products that run beside them where ranks exchange
tiles."""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.partitions import time_beside
from perfkit.workloads.fp8 import find_layout
from perfkit.workloads.graph import Label

#: Operations of the messages among ranks that share layers.
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
#: Variants of a product that computes an output, the gradient of an input, and that of a weight.
_OF_OUTPUT, _OF_INPUT, _OF_WEIGHT = "nt", "nn", "tn"


class Way(Enum):
    """How a message and its products run beside each other.

    The products read the tiles that it gathers: the first tile comes before them. They make the
    tiles that it sums up: the last tile follows them. Or neither needs the other.
    """

    GATHERS = "gathers"
    SUMS = "sums"
    INDEPENDENT = "independent"


class TiledMessage(NamedTuple):
    """A message that runs beside products.

    Parameters
    ----------
    message : int
        Its position in a pass [-].
    begin : int
        Position at which it is launched [-].
    kernels : sequence of int
        Positions of the products, with what comes between them [-].
    way : Way
        Which of them needs the other.
    """

    message: int
    begin: int
    kernels: Sequence[int]
    way: Way


class Piece(Enum):
    """What of an operation runs: all of it, one tile of a message, or all other tiles."""

    ALL = "all"
    TILE = "tile"
    OTHERS = "others"


class PlacedOperation(NamedTuple):
    """An operation of a pass, or a part of a message.

    Parameters
    ----------
    position : int
        Position of the operation before messages were sent in tiles [-].
    piece : Piece
        What of it runs.
    is_first : bool
        Whether it is all of it, or the first of two parts.
    """

    position: int
    piece: Piece = Piece.ALL
    is_first: bool = True


class TiledPass(NamedTuple):
    """A pass whose messages are sent in tiles.

    Parameters
    ----------
    operations : list of PlacedOperation
        What runs, in its order.
    waits : dict of int to int
        Position that waits for a collective that is not waited for at once, by that of the
        collective [-].
    """

    operations: list[PlacedOperation]
    waits: dict[int, int]


def find_tiled_messages(labels: Sequence[Label]) -> list[TiledMessage]:
    """Find the messages of a pass through a layer that run beside products, each with its own.

    Parameters
    ----------
    labels : sequence of Label
        Operations of the pass; a backward pass may compute the layer again first.

    Returns
    -------
    messages : list of TiledMessage
        In the order of the pass.

    Notes
    -----
    As with the userbuffers of Transformer Engine [1]_: an all_gather runs beside the products that
    read it, in the backward pass beside the gradient of the input of the second product of a block;
    a reduce_scatter beside the product before it, in the backward pass beside the gradients of the
    weights of the first products (``bulk``). Where a schedule puts these off, beside the gradients
    of their inputs. An all_reduce goes as a reduce_scatter. Products of experts exchange no
    tiles [2]_.

    References
    ----------
    .. [1] NVIDIA Transformer Engine, transformer_engine/pytorch/module/base.py, `initialize_ub`:
       default overlap methods
    .. [2] The same, transformer_engine/pytorch/module/grouped_linear.py: "GroupedLinear doesn't
       support Userbuffer overlap"
    """
    found = []
    for before, operations, after in _split(labels):
        if any(_is_of_experts(labels[position]) for position in operations):
            continue
        of_output = _choose(labels, operations, _OF_OUTPUT)
        of_input = _choose(labels, operations, _OF_INPUT)
        of_weight = _choose(labels, operations, _OF_WEIGHT)
        # the backward pass begins with the second product of a block
        if of_input:
            reading, making = of_input[:1], of_input[1:]
        else:
            reading, making = of_output[:-1], of_output[-1:]
        if before is not None and labels[before].name == "all_gather" and reading:
            begin = min(reading + of_weight[:1])
            kernels = range(reading[0], reading[-1] + 1)
            found.append(TiledMessage(before, begin, kernels, Way.GATHERS))
        if after is None or labels[after].name == "all_gather":
            continue
        if of_input and of_weight[1:]:
            found.append(TiledMessage(after, after, of_weight[1:], Way.INDEPENDENT))
        elif making:
            kernels = range(making[0], after)
            found.append(TiledMessage(after, making[0], kernels, Way.SUMS))
    return found


def _split(labels: Sequence[Label]) -> Iterator[tuple[int | None, range, int | None]]:
    """Operations between messages, with the positions of the message before and behind them."""
    messages: list[int | None] = [None]
    for position, label in enumerate(labels):
        if label.kind == "collective" and label.name in _OPERATIONS:
            messages.append(position)
    messages.append(None)
    for before, after in pairwise(messages):
        begin = 0 if before is None else before + 1
        end = len(labels) if after is None else after
        yield before, range(begin, end), after


def _choose(labels: Sequence[Label], operations: Sequence[int], variant: str) -> list[int]:
    """The products of a variant."""
    return [
        position
        for position in operations
        if labels[position].kind == "gemm" and find_layout(labels[position].variant) == variant
    ]


def _is_of_experts(label: Label) -> bool:
    """Whether an operation is a product of experts, of which a layer has many of one size."""
    return label.kind == "bmm" and label.module.endswith("mlp")


def send_in_tiles(labels: Sequence[Label], waits: Mapping[int, int]) -> TiledPass:
    """Send the messages of a pass through a layer beside the products that they belong to.

    Parameters
    ----------
    labels : sequence of Label
        Operations of the pass.
    waits : mapping of int to int
        Positions that wait for collectives that are not waited for at once, by those of the
        collectives [-].

    Returns
    -------
    tiled : TiledPass
        What runs. Where a message gathers what a product reads, its first tile, which is waited for, then all
        others beside the product. Where it sums up what a product makes, all tiles but the last one
        beside the product, then that one. Where neither needs the other, the message beside the
        products, and behind them the sums of the gradients that they make.
    """
    messages = find_tiled_messages(labels)
    launched = {tiled.begin: tiled for tiled in messages}
    last_tiles = {tiled.message for tiled in messages if tiled.way is Way.SUMS}
    moved: set[int] = set()
    for tiled in messages:
        if tiled.way is Way.GATHERS:
            moved.update([tiled.message, *tiled.kernels])
        elif tiled.way is Way.INDEPENDENT:
            moved.update([tiled.message, *tiled.kernels, *_find_sums(labels, tiled)])
    operations: list[PlacedOperation] = []
    new_waits: dict[int, int] = {}
    places: list[int] = []
    for position in range(len(labels)):
        places.append(len(operations))
        if position in launched:
            _launch(labels, launched[position], operations, new_waits)
        if position in last_tiles:
            operations.append(PlacedOperation(position, Piece.TILE, is_first=False))
        elif position not in moved:
            operations.append(PlacedOperation(position))
    places.append(len(operations))
    new_places = {placed.position: place for place, placed in enumerate(operations)}
    for collective, waiting in waits.items():
        new_waits[new_places[collective]] = places[waiting]
    return TiledPass(operations, new_waits)


def _launch(
    labels: Sequence[Label],
    tiled: TiledMessage,
    operations: list[PlacedOperation],
    waits: dict[int, int],
) -> None:
    """Append what runs where a message is launched."""
    if tiled.way is Way.SUMS:  # its kernels follow, and its last tile
        waits[len(operations)] = len(operations) + len(tiled.kernels) + 1
        operations.append(PlacedOperation(tiled.message, Piece.OTHERS))
        return
    kernels = [PlacedOperation(position) for position in tiled.kernels]
    if tiled.way is Way.GATHERS:
        operations.append(PlacedOperation(tiled.message, Piece.TILE))
        waits[len(operations)] = len(operations) + 1 + len(kernels)
        operations.append(PlacedOperation(tiled.message, Piece.OTHERS, is_first=False))
        operations.extend(kernels)
        return
    waits[len(operations)] = len(operations) + 1 + len(kernels)
    operations.append(PlacedOperation(tiled.message))
    operations.extend(kernels)
    operations.extend(PlacedOperation(position) for position in _find_sums(labels, tiled))


def _find_sums(labels: Sequence[Label], tiled: TiledMessage) -> list[int]:
    """Sums of gradients that a message comes before, as their products run beside it."""
    between = range(tiled.kernels[0], tiled.message)
    return [position for position in between if labels[position].name == "add_"]


def expose_tiles(time: Array, tiles: Array, compute: Array, way: Way, contention: float) -> Array:
    """What a message that is sent in tiles adds to the time of the kernels beside it.

    Parameters
    ----------
    time : array
        Time of the message [s].
    tiles : array
        Number of its tiles, that of the ranks [-].
    compute : array
        Time of the kernels [s].
    way : Way
        Which of them needs the other.
    contention : float
        Share of their rate that kernels lose while it is in flight [-].

    Returns
    -------
    added : array
        Of one tile all, of the others, or of the whole message where neither needs the other, what
        `perfkit.models.partitions.time_beside` says [s].
    """
    one_tile = np.zeros(np.shape(time))
    if way is not Way.INDEPENDENT:
        one_tile = time / tiles
    beside = time_beside(time - one_tile, compute=compute, contention=contention)
    return np.asarray(one_tile + beside)
