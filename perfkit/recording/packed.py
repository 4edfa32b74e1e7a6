"""Packed sequences, whose lengths PyTorch reads from memory, past its dispatch."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from perfkit.recording.values import compute


class Run(NamedTuple):
    """Time steps in a row with the same number of sequences.

    Parameters
    ----------
    first, last : int
        The first time step, and the one after the last [-].
    batch : int
        Sequences that reach these time steps [-].
    """

    first: int
    last: int
    batch: int


def find_lengths(batch_sizes: Any) -> Any:
    """Known numbers of sequences of each time step as a real tensor, which recurrent layers read
    past PyTorch's dispatch; anything else as it is."""
    known = getattr(batch_sizes, "constant", None) if isinstance(batch_sizes, FakeTensor) else None
    return batch_sizes if known is None or known.is_floating_point() else known


def list_runs(batches: list[int]) -> list[Run]:
    """Time steps with the same number of sequences, in order; `batches` has that of each step."""
    starts = [
        place for place, batch in enumerate(batches) if not place or batch != batches[place - 1]
    ]
    return [Run(first, last, batches[first]) for first, last in pairwise([*starts, len(batches)])]


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Sequences of a packed one, padded to one length, and their lengths.

    PyTorch's own function of this name writes the lengths past its dispatch. It fills the result,
    and then copies the time steps with the same number of sequences at once: this does the same.

    Parameters
    ----------
    data : Tensor
        Elements of all sequences by time step, (elements, ...).
    batch_sizes : Tensor
        Sequences of each time step, (time steps,).
    batch_first : bool
        Whether sequences are the first dimension of the result.
    padding_value : float
        What is written behind the end of a sequence [-].
    total_length : int
        Time steps of the result; those of the longest sequence if it is not above zero [-].

    Returns
    -------
    padded, lengths : Tensor
        (time steps, sequences, ...) or (sequences, time steps, ...), and (sequences,).

    Raises
    ------
    DataDependentOutputException
        If the lengths are not known.
    """
    known = find_lengths(batch_sizes)
    if isinstance(known, FakeTensor):
        raise DataDependentOutputException(torch.ops.aten._pad_packed_sequence.default)
    batches: list[int] = compute(known.tolist)
    steps = max(len(batches), total_length)
    padded = torch.full(
        (steps, batches[0], *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device
    )
    lengths = [0] * batches[0]
    first_element = 0
    for run in list_runs(batches):
        elements = (run.last - run.first) * run.batch
        part = data[first_element : first_element + elements]
        part = part.view(run.last - run.first, run.batch, *data.shape[1:])
        padded[run.first : run.last, : run.batch].copy_(part)
        first_element += elements
        lengths[: run.batch] = [run.last] * run.batch
    if batch_first:
        padded = padded.transpose(0, 1)
    return padded, torch.tensor(lengths)
