"""Collectives over all ranks of the process group, each call timed from a barrier to the last rank's end."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from perfkit.measure.reference import Reference

__all__ = ["time_collectives"]


def _call(operation: str, nbytes: int, device: str) -> tuple[Callable[[], Any], int]:
    """One collective of a message size in the nccl-tests convention; returns the size really used."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    n = max(nbytes // 4 // ranks, 1) * ranks
    whole, part = torch.rand(n, device=device), torch.rand(n // ranks, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    return calls[operation], 4 * n


def time_collectives(
    *,
    operations: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    device: str = "cpu",
    progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Time collectives of several sizes, sizes interleaved over several sweeps.

    Parameters
    ----------
    operations : sequence of str
        Names from `perfkit.workloads.graph.COLLECTIVES`.
    sizes : sequence of int
        Message sizes in the nccl-tests convention [B].
    seconds : float
        Time to spend on each size [s].
    device : str
        ``cpu`` (gloo) or ``cuda`` (NCCL).
    progress : callable, optional
        Receives the number of finished measurements.

    Returns
    -------
    rows : list of dict
        Operation, ``nbytes`` [B] and every sample [s] of this rank, and the share of a core that it got [-].
    """
    import torch
    import torch.distributed as dist

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    reference = Reference(device, wait)
    prepared = [(o, *_call(o, s, device)) for o in operations for s in sizes]
    rows: list[dict[str, Any]] = [{"operation": o, "nbytes": n, "samples": []} for o, _, n in prepared]
    done = 0
    for sweep in range(4):
        for row, (_, call, _) in zip(rows, prepared, strict=True):
            call()
            begin, count = time.perf_counter(), 0
            agreed = torch.ones(1, device=device)
            while True:
                dist.barrier()
                start = time.perf_counter()
                call()
                wait()
                row["samples"].append(time.perf_counter() - start)
                count += 1
                if count % 8 == 0:  # rank 0 decides when it is enough, or ranks would wait for each other
                    agreed.fill_(time.perf_counter() - begin < seconds / 4)
                    dist.broadcast(agreed, 0)
                    if not agreed.item():
                        break
            reference()
            if sweep == 3:
                done += 1
                progress(done)
    return [{**row, "core_share": reference.core_share} for row in rows]
