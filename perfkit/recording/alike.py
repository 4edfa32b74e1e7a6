"""Known numbers that ranks exchange: a capture follows one rank, and takes the others to hold the
same."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Where PyTorch keeps the functions of its collectives.
_COLLECTIVES = "distributed_c10d.py"


def find_reduction() -> str:
    """What the function of PyTorch that calls now makes of numbers, such as ``sum``, as by default and
    in DistributedDataParallel."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        operation = frame.f_locals.get("op")
        is_collective = frame.f_code.co_filename.endswith(_COLLECTIVES)
        if is_collective and isinstance(operation, dist.ReduceOp.RedOpType | dist.ReduceOp):
            return str(operation).rsplit(".", maxsplit=1)[-1].lower()
        frame = frame.f_back
    return "sum"


def exchange(
    collective: str,
    given: Sequence[Tensor],
    counts: Sequence[int],
    ranks: int,
    reduction: str | None,
) -> list[Tensor] | None:
    """Results of a collective, real tensors, if all ranks give the same.

    Parameters
    ----------
    collective : str
        Its name, such as ``all_gather``.
    given : sequence of Tensor
        What this rank gives, real tensors.
    counts : sequence of int
        Numbers of elements of the results [-].
    ranks : int
        Number of ranks [-].
    reduction : str, optional
        What a reduction makes of numbers: ``sum``, ``avg``, ``max`` or ``min``.

    Returns
    -------
    results : list of Tensor, optional
        Flat, with as many elements as `counts` says; None where they do not follow.

    Examples
    --------
    >>> import torch
    >>> exchange("all_gather", [torch.tensor([3, 4])], [4], 2, None)
    [tensor([3, 4, 3, 4])]
    >>> exchange("all_reduce", [torch.tensor([3, 4])], [2], 2, "sum")
    [tensor([6, 8])]
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in given])
    total = sum(counts)
    if collective == "broadcast" and total == flat.numel():
        numbers = flat
    elif collective == "all_gather" and total == ranks * flat.numel():
        numbers = flat.repeat(ranks)
    elif (
        collective == "all_reduce" and total == flat.numel() and reduction in ("max", "min", "avg")
    ):
        numbers = flat
    elif collective == "all_reduce" and total == flat.numel() and reduction == "sum":
        numbers = flat * ranks
    # of equal parts, as counts of tokens are balanced
    elif collective == "all_to_all" and total == flat.numel() and _are_parts_equal(flat, ranks):
        numbers = flat
    else:
        return None
    return [part.clone() for part in numbers.split([*counts])]


def _are_parts_equal(numbers: Tensor, ranks: int) -> bool:
    """Whether the parts for all ranks are the same numbers."""
    if numbers.numel() % ranks:
        return False
    parts = numbers.view(ranks, -1)
    return bool((parts == parts[0]).all())
