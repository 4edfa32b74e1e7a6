"""The part of a calibration that only a GPU can run: probes timed by events, small iterations under
the profiler.

Its timing has run on an H100 and an H200 (PyTorch 2.11, CUDA 13.0), each alone and before `CudaDevice`
stood around it; tests run all of it on a CPU with the CUDA calls replaced. It uses two private functions of PyTorch: ``torch.cuda._sleep``, a kernel that
spins, and ``torch._scaled_mm``, fp8 products.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perfkit.measure.gpu_records import (
    Answer,
    DeviceAnswers,
    DeviceFacts,
    TimedCalls,
    TimedIteration,
)
from perfkit.measure.kernels import Case
from perfkit.measure.operations import prepare
from perfkit.measure.probes import CollectiveProbe, IterationProbe, KernelProbe
from perfkit.measure.probing import run_probes
from perfkit.measure.samples import load
from perfkit.measure.timing import clock, make_collective
from perfkit.recording.modules import DTYPES, build_step

#: Samples of a probe [-].
_SAMPLES = 5
#: Cycles that the device spins while the host queues one call [-].
_AHEAD = 400_000
#: Most sets of operands that rotate [-].
_MOST_SETS = 64
#: Iterations of one sample, and samples after the warm-up [-].
_ITERATIONS = 10
_ROUNDS = 3


def time_queued(calls: Sequence[Callable[[], Any]], count: int) -> list[float]:
    """Time calls in rotation on the device, without the time of the host, which queues them while
    the device spins.

    Parameters
    ----------
    calls : sequence of callables
        Run once to warm up, then one after another.
    count : int
        Calls of one sample [-].

    Returns
    -------
    samples : list of float
        Time of one call [s].
    """
    for call in calls:
        call()
    turns = itertools.cycle(calls)
    samples = []
    for _ in range(_SAMPLES):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD * count)
        start.record()
        for call in itertools.islice(turns, count):
            call()
        end.record()
        end.synchronize()
        milliseconds = start.elapsed_time(end)
        samples.append(milliseconds * 1e-3 / count)
    return samples


@contextmanager
def multiply_in(dtype: str) -> Iterator[None]:
    """Let products of fp32 operands run in TF32 or not, and leave PyTorch's settings as they were.

    Parameters
    ----------
    dtype : str
        ``tf32`` for TF32; any other format for fp32.
    """
    backends = (torch.backends.cuda, torch.backends.mkldnn)
    matmuls = [backend.matmul for backend in backends if hasattr(backend, "matmul")]
    # settings of their own since PyTorch 2.9, which say "none" until somebody sets a precision
    own = [
        (matmul, matmul.fp32_precision) for matmul in matmuls if hasattr(matmul, "fp32_precision")
    ]
    for matmul, _ in own:  # PyTorch refuses to read its older setting where these say otherwise
        matmul.fp32_precision = "ieee"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for matmul, precision in own:
            matmul.fp32_precision = precision


def _time_kernel(probe: KernelProbe, device: str) -> TimedCalls:
    """Time one kernel; cold operands rotate through twice the size of the last cache."""
    with multiply_in(probe.dtype):
        return _time_rotating(probe, device)


def _time_rotating(probe: KernelProbe, device: str) -> TimedCalls:
    """Time one kernel in the number formats that are set."""
    calls, nbytes = _prepare(probe, device)
    sizes = {"nbytes": nbytes, **probe.sizes}
    if probe.cold and len(calls) == 1:  # lookups have several calls already
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        sets = min(_MOST_SETS, 1 + int(2 * cache / nbytes))
        calls = []
        for _ in range(sets):
            more_calls, _ = _prepare(probe, device)
            calls += more_calls
    return TimedCalls(samples=time_queued(calls, probe.calls), sizes=sizes)


def _prepare(probe: KernelProbe, device: str) -> "tuple[list[partial[Any]], float]":
    """Allocate operands; returns the calls that rotate, and the bytes of one call [B]."""
    case = Case(probe.kind, probe.variant, dict(probe.sizes))
    if probe.dtype == "fp8":
        return _multiply_fp8(case, device=device)
    return prepare(case, device=device, dtype=DTYPES[probe.dtype])


def _multiply_fp8(case: Case, *, device: str) -> tuple[list[partial[Any]], float]:
    """Prepare an fp8 product with one scale per matrix and a bf16 result, as `prepare` does for
    other formats."""
    m, n, k = int(case.sizes["m"]), int(case.sizes["n"]), int(case.sizes["k"])
    x = torch.rand((m, k), device=device).to(torch.float8_e4m3fn)
    w = torch.rand((n, k), device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    call = partial(torch._scaled_mm, x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return [call], float(x.numel() + w.numel())


def _time_iteration(probe: IterationProbe, device: str, trace: Path) -> TimedIteration:
    """Time an iteration without and with the profiler [s], and save its trace (shapes, but no
    Python stacks)."""
    step, _ = build_step(load(dict(probe.workload)), device=device)
    run = torch.compile(step) if probe.compiled else step
    numbers = itertools.count()

    def run_marked() -> None:
        with torch.profiler.record_function(f"ProfilerStep#{next(numbers)}"):
            run()

    def time_iterations() -> float:
        return clock([run_marked] * _ITERATIONS, "cuda") / _ITERATIONS

    time_iterations()  # warms up
    seconds = sorted(time_iterations() for _ in range(_ROUNDS))[_ROUNDS // 2]
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, with_stack=False
    ) as profile:
        profiled = time_iterations()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(trace))
    return TimedIteration(seconds=seconds, profiled=profiled, trace=str(trace))


class CudaDevice:
    """A GPU that times probes.

    Parameters
    ----------
    device : str
        Torch device.
    folder : Path
        Folder for traces, made if missing.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder = device, folder
        self.backend = "nccl" if device.startswith("cuda") else None

    def clean(self) -> None:
        """Wait for the device and free its memory; raises what leaves the device unusable."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def time_alone(self, number: int, probe: KernelProbe | IterationProbe) -> Answer:
        """Time a kernel or an iteration; its number in the plan is of no interest."""
        if isinstance(probe, KernelProbe):
            return _time_kernel(probe, self._device)
        trace = self._folder / f"{probe.name}.{probe.execution}.json.gz"
        return _time_iteration(probe, self._device, trace)

    def prepare(self, number: int, probe: CollectiveProbe, group: Any) -> Callable[[], Answer]:
        """Allocate the messages of a collective; the call times it."""
        call, nbytes = make_collective(
            probe.operation,
            int(probe.nbytes),
            self._device,
            dtype="float16" if probe.dtype == "fp16" else probe.dtype,
            group=group,
        )

        def time_messages() -> TimedCalls:
            samples = time_queued([call], probe.calls)
            return TimedCalls(samples=samples, sizes={"nbytes": nbytes})

        return time_messages

    def state_facts(self) -> DeviceFacts:
        """What the driver says of the device."""
        properties = torch.cuda.get_device_properties(self._device)
        kilohertz = getattr(properties, "clock_rate", 0)
        return DeviceFacts(
            name=properties.name,
            memory=properties.total_memory,
            cache=properties.L2_cache_size,
            clock=1e3 * kilohertz if kilohertz else None,
        )


def time_probes(
    *,
    probes: Sequence[Mapping[str, Any]],
    kept: str,
    folder: str,
    ranks_per_node: int,
    device: str = "cuda",
) -> DeviceAnswers:
    """Time all probes of a plan as one rank of a cluster; every rank calls this with the same plan.

    Parameters
    ----------
    probes : sequence of mapping
        What `perfkit.measure.probes.write_probe` makes of each probe.
    kept : str
        File of the `perfkit.measure.folders.Campaign` that keeps finished probes; empty for none.
    folder : str
        Folder for traces, made if missing.
    ranks_per_node : int
        Ranks on each node [-].
    device : str, optional
        Torch device.

    Returns
    -------
    answers : DeviceAnswers
        In the order of the probes. Only rank 0 takes part in all probes and has all answers.
    """
    gpu = CudaDevice(device, Path(folder))
    return run_probes(gpu, probes, kept=kept, ranks_per_node=ranks_per_node)
