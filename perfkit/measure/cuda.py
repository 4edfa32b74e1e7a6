"""The part of a calibration that only a GPU can run: probes timed by events, small iterations under the profiler.

Read with care, and run on a CPU with the calls of CUDA replaced, but never yet on a GPU. Of PyTorch's private parts it
needs ``torch.cuda._sleep``, a kernel that spins, and ``torch._scaled_mm``, products in fp8.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from perfkit.measure.kernels import Case
from perfkit.measure.operations import prepare
from perfkit.measure.probes import Probe
from perfkit.measure.samples import load
from perfkit.measure.timing import make_collective
from perfkit.recording.modules import DTYPES, build_step

#: Samples of a probe; calls that the host queues ahead take up to so many cycles of the device each [-].
_SAMPLES, _AHEAD = 5, 200_000
#: Most sets of operands that rotate; iterations before a timing, in it and in a trace [-].
_MOST_SETS, _WARM, _PLAIN, _TRACED = 64, 5, 20, 6
#: PyTorch's names of the number formats of collectives.
_SENT = {"fp16": "float16", "int8": "int8"}


def describe_device(*, device: str = "cuda") -> dict[str, Any]:
    """Describe the device of this process as its driver does: name, memory and last cache [B], clocks [Hz], versions.

    Parameters
    ----------
    device : str, optional
        Torch device.

    Returns
    -------
    facts : dict
        Plain JSON.
    """
    known = torch.cuda.get_device_properties(device)
    clocks = {name: 1e3 * getattr(known, f"{name}_rate", 0) for name in ("clock", "memory_clock")}  # since torch 2.7
    library = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "none"
    facts = {"name": known.name, "memory": known.total_memory, "cache": known.L2_cache_size, **clocks}
    return {**facts, "processors": known.multi_processor_count, "cuda": torch.version.cuda, "nccl": library}


def time_queued(calls: Sequence[Callable[[], Any]], repeats: int, *, alone: bool = True) -> list[float]:
    """Time calls that take turns on the device, without the host: it queues them while the device spins.

    Parameters
    ----------
    calls : sequence of callables
        Run one after another, over and over.
    repeats : int
        Calls of one sample [-].
    alone : bool, optional
        Whether a sample for which the host was too slow may be repeated: not where other ranks wait for this one.

    Returns
    -------
    samples : list of float
        Time of one call [s].
    """
    for call in calls:
        call()
    turns, found, cycles = itertools.cycle(calls), list[float](), _AHEAD * repeats
    while len(found) < _SAMPLES:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for call in itertools.islice(turns, repeats):
            call()
        end.record()
        late = start.query()  # the device began before the host had queued everything
        end.synchronize()
        if late and alone and cycles < 64 * _AHEAD * repeats:
            cycles *= 4
        else:
            found.append(start.elapsed_time(end) * 1e-3 / repeats)
    return found


def _time_kernel(probe: Probe, device: str, cache: float) -> dict[str, Any]:
    """Samples of one kernel; its operands rotate through more than the last cache holds, unless it is to be warm."""
    torch.set_float32_matmul_precision("high" if probe.dtype == "tf32" else "highest")
    rotate = probe.cold and "table_rows" not in probe.sizes  # lookups rotate by themselves, and tables are large
    sets = min(_MOST_SETS, 1 + int(2 * cache / probe.sizes["nbytes"])) if rotate else 1
    calls = list[Callable[[], Any]]()
    while len(calls) < sets:
        if probe.dtype == "fp8":
            calls.append(_multiply_fp8(probe.sizes, device))
        else:
            case = Case(probe.kind, probe.variant, dict(probe.sizes))
            calls += prepare(case, device=device, seed=len(calls), dtype=DTYPES[probe.dtype])[0]
    return {"samples": time_queued(calls, probe.repeats)}


def _multiply_fp8(sizes: Mapping[str, float], device: str) -> Callable[[], Any]:
    """A product of two matrices in fp8 with one scale each; what comes out is bf16."""
    shapes = ((int(sizes[rows]), int(sizes["k"])) for rows in "mn")
    x, w = (torch.rand(shape, device=device).to(torch.float8_e4m3fn) for shape in shapes)
    one = torch.ones((), device=device)
    return partial(torch._scaled_mm, x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _time_collective(probe: Probe, device: str, group: Any) -> dict[str, Any]:
    """Samples of one collective on this rank; all ranks begin together."""
    size, dtype = int(probe.sizes["nbytes"]), _SENT[probe.dtype]
    call, nbytes = make_collective(probe.kind, size, device, dtype=dtype, group=group)
    dist.barrier(group=group)
    return {"samples": time_queued([call], probe.repeats, alone=False), "nbytes": nbytes}


def _time_iteration(probe: Probe, device: str, folder: Path) -> dict[str, Any]:
    """Time of an iteration [s] unprofiled and under the profiler, which sees shapes and no Python stacks; its trace."""
    step, _ = build_step(load(dict(probe.workload)), device=device)
    run, wait = torch.compile(step) if probe.variant == "compiled" else step, torch.cuda.synchronize
    trace = folder / f"{probe.kind}.{probe.variant}.json.gz"

    def clock(count: int, after: Callable[[], Any]) -> float:
        """Time of one of several iterations; `after` follows each, that of the last one untimed."""
        wait()
        begin = time.perf_counter()
        for number in range(count):
            if number:
                after()
            run()
        wait()
        return (time.perf_counter() - begin) / count

    clock(_WARM, lambda: None)
    plain = clock(_PLAIN, lambda: None)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    turns = torch.profiler.schedule(wait=0, warmup=2, active=_TRACED, repeat=1)
    keep = partial(torch.profiler.profile.export_chrome_trace, path=str(trace))
    with torch.profiler.profile(
        activities=activities, schedule=turns, on_trace_ready=keep, record_shapes=True, with_stack=False
    ) as profile:
        for _ in range(2):
            run()
            profile.step()
        traced = clock(_TRACED, profile.step)
        profile.step()
    return {"seconds": plain, "profiled": traced, "trace": str(trace)}


def time_probes(
    *, probes: Sequence[Mapping[str, Any]], folder: str, device: str = "cuda"
) -> list[dict[str, Any] | None]:
    """Answer probes as one of several ranks, which all answer the same ones.

    Parameters
    ----------
    probes : sequence of mapping
        Fields of each `perfkit.measure.probes.Probe`.
    folder : str
        Existing folder for traces.
    device : str, optional
        Torch device.

    Returns
    -------
    answers : list of dict or None
        ``samples`` [s], or ``seconds``, ``profiled`` [s] and ``trace``, or ``failed`` with the reason; None for a probe
        that this rank takes no part in.
    """
    shared = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    groups: dict[tuple[int, ...], Any] = {tuple(range(ranks)): None}
    cache, answers = describe_device(device=device)["cache"], list[dict[str, Any] | None]()
    for probe in (Probe(**fields) for fields in probes):
        if probe.ranks > 1 and probe.members not in groups:  # every rank has to know of every group
            groups[probe.members] = dist.new_group(list(probe.members))
        if rank not in probe.members:
            answers.append(None)
            continue
        try:
            if probe.stage == "kernels":
                answers.append(_time_kernel(probe, device, cache))
            elif probe.stage == "collectives":
                answers.append(_time_collective(probe, device, groups[probe.members]))
            else:
                answers.append(_time_iteration(probe, device, Path(folder)))
        except (RuntimeError, NotImplementedError, ValueError) as error:  # too little memory, or no such kernel
            answers.append({"failed": (str(error).strip() or type(error).__name__).splitlines()[0][:200]})
        torch.cuda.empty_cache()
    return answers
