"""What runs inside a measuring process: one task, read from a job file, its result written beside it."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.measure import collectives, iteration, kernels, ladder, placements
from perfkit.measure.reference import Reference
from perfkit.measure.runner import settle, time_calls

__all__ = ["join_ranks", "main"]


def measure_kernels(*, cases: list[list[Any]], seconds: float, device: str = "cpu", dtype: str = "fp32") -> list[Any]:
    """Time isolated kernels; one row per case, in order."""
    rows, reference = [], Reference(device, _synchronizer(device))
    before = reference()
    for number, case in enumerate(cases):
        calls, nbytes = kernels.prepare(kernels.Case(*case), device=device, dtype=dtype, seed=number)
        timing = time_calls(calls, seconds=seconds, synchronize=_synchronizer(device))
        if timing.disagreement > 0.1:
            again = time_calls(calls, seconds=seconds, synchronize=_synchronizer(device))
            timing = min(timing, again, key=lambda t: t.disagreement)
        after = reference()
        rows.append(
            {"nbytes": nbytes, **vars(timing), "reference": [float(f"{t:.4g}") for t in np.sqrt(before * after)]}
        )
        before = after
        _progress(number + 1)
    return rows


def measure_iteration(**arguments: Any) -> dict[str, Any]:
    """Time whole training iterations of one workload, and the operations inside them."""
    return iteration.time_iteration(**arguments, synchronize=_synchronizer(arguments.get("device", "cpu")))


def measure_placements(**arguments: Any) -> list[Any]:
    """Time iterations of one workload under several placements of its tables, in turns."""
    return placements.time_placements(**arguments, synchronize=_synchronizer(arguments.get("device", "cpu")))


def measure_collectives(**arguments: Any) -> list[Any]:
    """Time collectives over all ranks."""
    return collectives.time_collectives(**arguments, progress=_progress)


def measure_ladder(*, largest: float, device: str = "cpu") -> list[Any]:
    """Time streams and gathers of growing working sets."""
    return ladder.time_ladder(largest=largest, device=device, synchronize=_synchronizer(device))


def measure_references(*, seconds: float, device: str = "cpu") -> dict[str, Any]:
    """Time nothing but the references, over and over."""
    found: list[Any] = []
    reference, end = Reference(device, _synchronizer(device)), time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        found.append(reference().tolist())
    return {"references": found, "core_share": reference.core_share}


TASKS: dict[str, Callable[..., Any]] = {
    "ladder": measure_ladder,
    "references": measure_references,
    "kernels": measure_kernels,
    "iteration": measure_iteration,
    "collectives": measure_collectives,
    "placements": measure_placements,
}


def _synchronizer(device: str) -> Any:
    import torch

    return torch.cuda.synchronize if device == "cuda" else None


def _progress(done: int) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(done, flush=True)


def _run(job: dict[str, Any], rank: int, ranks: int, meeting: str, local: int) -> Any:
    """Run one task as one of several ranks that meet at a store."""
    device = job.get("device", "cpu")
    settle(local, pin=device == "cpu")
    if device == "cuda":
        import torch

        torch.cuda.set_device(local)
    if ranks > 1:
        import torch.distributed as dist

        wait = timedelta(minutes=10)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, meeting, timeout=wait, rank=rank, world_size=ranks)
    return TASKS[job["task"]](**{key: value for key, value in job.items() if key != "task"})


def join_ranks(job: dict[str, Any]) -> list[Any]:
    """Run one job in this process as one rank of those that a launcher such as torchrun has started.

    Parameters
    ----------
    job : dict
        As for `perfkit.measure.runner.run_processes`.

    Returns
    -------
    results : list
        One per rank, the same on all.
    """
    import torch.distributed as dist

    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        result = _run(job, rank, ranks, "env://", local)
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, result)
        dist.destroy_process_group()
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
    return results


def main(folder: str) -> None:
    """Run the job in a folder and write this rank's result there.

    Parameters
    ----------
    folder : str
        Holds ``job.json``; receives ``result.RANK``.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    result = _run(json.loads((Path(folder) / "job.json").read_text()), rank, ranks, f"file://{folder}/store", rank)
    partial = Path(folder) / f"partial.{rank}"
    partial.write_text(json.dumps(result))
    partial.rename(Path(folder) / f"result.{rank}")
    if ranks > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written; taking down the threads of a process group can hang or abort
