"""Training steps around PyTorch modules: loss, backward, gradients averaged over ranks, optimizer."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["assemble_step", "share_gradients"]


def share_gradients(module: nn.Module) -> nn.Module:
    """Let gradients be averaged over ranks in buckets, while the backward pass goes on.

    Parameters
    ----------
    module : torch.nn.Module
        One without trained numbers has nothing to share.

    Returns
    -------
    module : torch.nn.Module
        The same one inside `DistributedDataParallel`; every rank keeps statistics of its own.
    """
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return DistributedDataParallel(module, forward_sync_buffers=False)
    return DistributedDataParallel(module, broadcast_buffers=False)  # torch before 2.13


def assemble_step(
    module: nn.Module,
    batches: Sequence[tuple[Sequence[Any], Any]],
    loss_of: Callable[[Tensor, Any], Tensor],
    *,
    optimizer: str,
    momentum: float = 0.0,
    reduced: Sequence[nn.Parameter] = (),
) -> Callable[[], None]:
    """The training step of a module, ready to be called over and over.

    Parameters
    ----------
    module : torch.nn.Module
        What is trained.
    batches : sequence of (inputs, labels)
        Take turns.
    loss_of : callable
        Loss from outputs and labels.
    optimizer : str
        ``sgd``, ``adamw`` or ``adagrad``.
    momentum : float
        Of ``sgd`` [-].
    reduced : sequence of torch.nn.Parameter
        Weights whose gradients are averaged over the ranks in one piece, after the backward pass.

    Returns
    -------
    step : callable
        Zeroes gradients, runs forward, backward and the optimizer.
    """
    if optimizer in ("adamw", "adagrad"):
        make = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adagrad
        chosen: torch.optim.Optimizer = make(module.parameters(), lr=1e-4)
    else:
        chosen = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=momentum)
    count = 0

    def step() -> None:
        nonlocal count
        inputs, labels = batches[count % len(batches)]
        count += 1
        chosen.zero_grad()
        loss_of(module(*inputs), labels).backward()
        if reduced:
            _all_reduce(reduced)
        chosen.step()

    return step


def _all_reduce(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients in one flat piece."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)
