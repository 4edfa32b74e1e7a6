"""Recurrent layers in a capture for a GPU: one call of cuDNN for all layers, steps and directions.

References
----------
.. [1] PyTorch 2.13, aten/src/ATen/native/RNN.cpp and aten/src/ATen/native/cudnn/RNN.cpp.
.. [2] PyTorch 2.13, aten/src/ATen/cudnn/AutocastRNN.cpp.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfkit.workloads.recurrent_layers import MODES, read_recurrent

#: Number of a kind of layer in cuDNN, by PyTorch's name.
_NUMBERS = {name: number for number, name in enumerate(MODES)}
#: What converts a tensor to the number format of the region; weights are copied at each call, into
#: one buffer [2]_.
Cast = Callable[[Tensor], Tensor]


def _run_layers(
    name: str,
    cast: Cast,
    data: Tensor,
    states: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    samples: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Call cuDNN as PyTorch does: `samples` of each step where sequences are packed."""
    hidden, cell = states if name == "lstm" else (states, None)
    directions = 2 if bidirectional else 1
    size = cell.shape[2] if cell is not None else hidden.shape[2]
    projected = hidden.shape[2] if hidden.shape[2] != size else 0
    out = torch.ops.aten._cudnn_rnn(
        cast(data),
        [cast(weight) for weight in weights],
        len(weights) // (layers * directions),
        None,
        cast(hidden),
        None if cell is None else cast(cell),
        _NUMBERS[name],
        size,
        projected,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [*samples],
        None,
    )
    return tuple(out[:3]) if name == "lstm" else tuple(out[:2])


def _run_packed(
    name: str,
    cast: Cast,
    data: Tensor,
    samples: Tensor,
    states: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """A layer whose samples are packed, step by step: `samples` of each."""
    return _run_layers(
        name,
        cast,
        data,
        states,
        weights,
        has_biases,
        layers,
        dropout,
        train,
        bidirectional,
        batch_first=False,
        samples=samples.tolist(),
    )


def list_layers(cast: Cast) -> dict[str, Callable[..., Any]]:
    """What takes the place of PyTorch's recurrent layers, by name and overload.

    Parameters
    ----------
    cast : callable
        Converts a tensor to the number format of the region of autocast.

    Returns
    -------
    layers : dict of str to callable
        One for each overload of ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``.
    """
    layers: dict[str, Callable[..., Any]] = {}
    for name in MODES:
        layers[f"{name}.input"] = partial(_run_layers, name, cast)
        layers[f"{name}.data"] = partial(_run_packed, name, cast)
    return layers


def make_results(args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Results of a forward call, by their sizes.

    Parameters
    ----------
    args : sequence
        Complete arguments of ``_cudnn_rnn``.

    Returns
    -------
    results : tuple of Tensor
        Outputs, last states and cells, what the backward pass keeps, and the buffer of weights, which
        is that of the weights themselves.

    Notes
    -----
    The backward pass keeps at least the gates of each step, cells of an LSTM or the product that a
    gate of a GRU scales, and the outputs of all layers but the last. cuDNN does not publish how much
    it keeps; it may be more.
    """
    data, hidden, cell, train = args[0], args[4], args[5], args[12]
    shape = read_recurrent(args, backward=False)
    out = data.new_empty((*data.shape[:-1], shape.outputs * shape.directions))
    last = hidden.new_empty(hidden.shape)
    last_cell = hidden.new_empty(0) if cell is None else cell.new_empty(cell.shape)
    kept = shape.count_kept() * data.element_size() if train else 0
    return (
        out,
        last,
        last_cell,
        data.new_empty(kept, dtype=torch.uint8),
        data.new_empty(0),
    )


def make_gradients(args: Sequence[Any]) -> tuple[Any, ...]:
    """Results of a backward call, by their sizes.

    Parameters
    ----------
    args : sequence
        Complete arguments of ``_cudnn_rnn_backward``.

    Returns
    -------
    gradients : tuple
        Those of inputs, states, cells and weights; None and none where they are not wanted.
    """
    data, weights, hidden, cell, wanted = args[0], args[1], args[4], args[5], args[21]
    of_cell = cell is not None and wanted[2]
    return (
        torch.empty_like(data) if wanted[0] else None,
        torch.empty_like(hidden) if wanted[1] else None,
        torch.empty_like(cell) if of_cell else None,
        [torch.empty_like(weight) for weight in weights] if wanted[3] else [],
    )
