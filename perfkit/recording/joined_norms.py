"""Batch norm whose statistics several ranks join, as `torch.nn.SyncBatchNorm` does on GPUs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perfkit.recording.patches import Patch

#: Assumption for such a layer.
JOINED = (
    "SyncBatchNorm counts as BatchNorm with an all_gather of its statistics in the forward pass, which the host waits "
    "for, and an all_reduce in the backward pass; small kernels on these statistics are left out"
)


class _JoinStatistics(torch.autograd.Function):
    """The collectives of one layer; tensors pass unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, recorder: Any) -> Tensor:
        """Gather mean, deviation and count of all ranks [2 channels + 1 numbers]. The host reads which
        ranks had samples: `torch.nn.modules._functions.SyncBatchNorm`."""
        ctx.group, ctx.channels = group, x.shape[1]
        ranks = dist.get_world_size(group)
        statistics = x.new_empty(2 * ctx.channels + 1, dtype=torch.float32)
        gathered = x.new_empty(ranks * len(statistics), dtype=torch.float32)
        dist.all_gather_into_tensor(gathered, statistics, group)
        recorder.transfer("to_host", x.new_empty(ranks, dtype=torch.float32))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Add up two numbers for each channel over the ranks."""
        gradient = gradients[0]
        if ctx.needs_input_grad[0]:
            sums = gradient.new_empty(2 * ctx.channels, dtype=torch.float32)
            dist.all_reduce(sums, group=ctx.group)
        return gradient, None, None


def patch_joined_norms(recorder: Any) -> list[Patch]:
    """Patches of SyncBatchNorm in a capture for a GPU.

    Parameters
    ----------
    recorder : Recorder
        It receives the wait of the host.

    Returns
    -------
    patches : list of Patch
        Of the layer, and of the check by replicas.
    """
    normalize = nn.modules.batchnorm._BatchNorm.forward

    def forward(layer: Any, input: Tensor) -> Tensor:
        """Normalize by the statistics of all ranks; in evaluation by those that are kept."""
        x = input  # as PyTorch names it, for calls by name
        layer._check_input_dim(x)
        layer._check_non_zero_input_channels(x)
        if layer.training and dist.is_initialized():
            group = layer.process_group or dist.group.WORLD
            if dist.get_world_size(group) > 1:
                recorder.values.notes[JOINED] = None
                x = _JoinStatistics.apply(x, group, recorder)
        return normalize(layer, x)

    def pass_handle(replica: Any, module: Any) -> None:
        """Its layers run on the GPU."""

    reason = "layers of SyncBatchNorm refuse tensors that are stored on the CPU"
    return [
        Patch(nn.SyncBatchNorm, "forward", forward, reason),
        Patch(
            DistributedDataParallel,
            "_passing_sync_batchnorm_handle",
            pass_handle,
            reason,
        ),
    ]
