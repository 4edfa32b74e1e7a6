"""Measuring processes: started with clean allocator settings, pinned, one thread each; timed in interleaved halves."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.measure.machine import count_cores, gather_facts, list_cores
from perfkit.resources import write_text

__all__ = ["ENVIRONMENT", "MeasurementError", "Timing", "check_ranks", "run_processes", "settle", "tidy", "time_calls"]

#: Settings of measuring processes. glibc otherwise returns large blocks to the system after every free, and each fresh
#: output then page-faults at a tenth of the memory bandwidth; one thread per rank keeps neighbours' load out.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


#: What a measuring process does before it loads anything heavy: it binds itself to the process that started it, and
#: goes on only if that one is still there. 1 is PR_SET_PDEATHSIG (Linux), 9 is SIGKILL.
_START = """
import ctypes, os, runpy
if hasattr(ctypes.CDLL(None), "prctl"):
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(os.environ["PERFKIT_PARENT"]):
    runpy.run_module("perfkit.measure.worker", run_name="__main__")
"""


class MeasurementError(RuntimeError):
    """A measuring process failed; the message says what it printed last."""


@contextmanager
def tidy() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into a KeyboardInterrupt with their number, so that processes and folders are cleared.

    Where the program has handlers of its own, or ignores the signals as under nohup, these stay.
    """

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    both = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
    main = threading.current_thread() is threading.main_thread()
    mine = [number for number in both if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def check_ranks(ranks: int, device: str = "cpu", *, crowd: int = 1) -> int:
    """Let a number of ranks through that this machine has cores or GPUs for.

    Parameters
    ----------
    ranks : int
        Processes that measure at once [-].
    device : str, optional
        ``cpu`` or ``cuda``.
    crowd : int, optional
        Ranks that may share a core [-].

    Returns
    -------
    ranks : int
        The same number [-].

    Raises
    ------
    ValueError
        For more ranks than there is room for, and where there is no GPU to measure.
    """
    room, what = crowd * count_cores(), f"{count_cores()} cores that this process may use"
    if device == "cuda":
        import torch

        room = torch.cuda.device_count()
        what = f"{room} GPUs that PyTorch {torch.__version__} can use"
    if ranks > room:
        hint = f"take at most {room}" if room else "measure cpu, or a machine with GPUs; predicting needs none"
        raise ValueError(f"ranks is {ranks}; this machine has {what}; {hint}")
    return ranks


@dataclass(frozen=True)
class Timing:
    """Repeated times of one thing.

    Parameters
    ----------
    median : float
        Median over both halves [s].
    q1, q3 : float
        Quartiles [s].
    halves : tuple of float
        Medians of the even and of the odd samples, which interleave in time [s].
    n : int
        Samples [-].
    cpu_share : float
        CPU time over wall time; below 0.97 the process was pre-empted [-].
    """

    median: float
    q1: float
    q3: float
    halves: tuple[float, float]
    n: int
    cpu_share: float = 1.0

    @classmethod
    def from_samples(cls, seconds: Sequence[float], cpu_share: float = 1.0) -> "Timing":
        """Summary of samples in time order.

        Parameters
        ----------
        seconds : sequence of float
            Samples [s].
        cpu_share : float
            CPU time over wall time [-].

        Returns
        -------
        timing : Timing
            Median, quartiles and halves.
        """
        values = np.asarray(seconds, dtype=float)
        q1, median, q3 = np.percentile(values, [25, 50, 75])
        halves = (float(np.median(values[::2])), float(np.median(values[1::2] if len(values) > 1 else values)))
        return cls(float(median), float(q1), float(q3), halves, len(values), cpu_share)

    @property
    def disagreement(self) -> float:
        """How far the two halves differ, as a share of the smaller one [-]."""
        low, high = sorted(self.halves)
        return high / low - 1.0


def settle(rank: int = 0, *, pin: bool = True) -> None:
    """Make the current process fit for measuring: one thread, pinned to a core, raised in its scheduling group.

    Parameters
    ----------
    rank : int
        Number of the process; ranks spread over the allowed cores [-].
    pin : bool, optional
        Whether to stay on one core; a process that only feeds a GPU need not.
    """
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15")
    if pin and hasattr(os, "sched_setaffinity"):
        cores = list_cores()
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch

    torch.set_num_threads(1)


def time_calls(
    calls: Sequence[Callable[[], Any]],
    *,
    seconds: float,
    minimum: int = 6,
    maximum: int = 400,
    sample: float = 2e-4,
    synchronize: Callable[[], None] | None = None,
) -> Timing:
    """Time callables run in rotation, each sample long enough for the clock.

    Parameters
    ----------
    calls : sequence of callables
        Run one after another, over and over.
    seconds : float
        Time to spend, warm-up aside [s].
    minimum, maximum : int
        Bounds of the number of samples [-].
    sample : float
        Shortest sample; faster calls are grouped [s].
    synchronize : callable, optional
        Waits for a device to finish.

    Returns
    -------
    timing : Timing
        Time of one call [s].
    """
    wait = synchronize or (lambda: None)
    for call in [*calls[:2], *calls[:2]]:
        call()
    wait()
    start = time.perf_counter()
    calls[0]()
    wait()
    once = time.perf_counter() - start
    group = max(1, min(5000, int(sample / max(once, 1e-7))))
    samples: list[float] = []
    position = 0
    begin, cpu = time.perf_counter(), time.process_time()
    while len(samples) < maximum and (len(samples) < minimum or time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        for _ in range(group):
            calls[position]()
            position = (position + 1) % len(calls)
        wait()
        samples.append((time.perf_counter() - start) / group)
    share = (time.process_time() - cpu) / max(time.perf_counter() - begin, 1e-9)
    return Timing.from_samples(samples, share)


def run_processes(
    job: dict[str, Any], *, ranks: int = 1, timeout: float = 600.0, on_line: Callable[[str], None] | None = None
) -> list[Any]:
    """Run one job in fresh measuring processes and collect what each rank returns.

    Parameters
    ----------
    job : dict
        ``task`` names a function of `perfkit.measure.worker`; the rest are its arguments, as JSON.
    ranks : int
        Processes, joined in one process group over loopback when there are several [-].
    timeout : float
        Seconds before all ranks are stopped [s].
    on_line : callable, optional
        Receives each line that rank 0 prints, for progress.

    Returns
    -------
    results : list
        One per rank.

    Raises
    ------
    ValueError
        For more than four ranks on each core, and where there is no GPU to measure.
    MeasurementError
        If a rank fails, dies or runs out of time, or ranks cannot meet; no process is left behind.
    ModuleNotFoundError
        Where torch is not installed.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed; pip install 'perfkit[measure]' brings it", name="torch")
    check_ranks(ranks, job.get("device", "cpu"), crowd=4)
    settings = {**ENVIRONMENT, "WORLD_SIZE": str(ranks), "PERFKIT_PARENT": str(os.getpid())}
    if ranks > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        if (loopback := gather_facts()["loopback"].value) is None:
            raise MeasurementError("ranks cannot meet: this machine has no loopback; see ip link, or take one rank")
        settings["GLOO_SOCKET_IFNAME"] = loopback
    settings["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with tidy(), tempfile.TemporaryDirectory(prefix="perfkit-") as folder:
        place = Path(folder)
        write_text(place / "job.json", json.dumps(job))
        processes = []
        try:
            for rank in range(ranks):
                environment = {**os.environ, **settings, "RANK": str(rank)}
                command = [sys.executable, "-c", _START, folder]
                with open(place / f"log.{rank}", "w") as log:
                    processes.append(
                        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE if rank == 0 else log,
                                         stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, text=True)
                    )  # fmt: skip
            _wait(processes, place, timeout, on_line)
            return [json.loads((place / f"result.{rank}").read_text()) for rank in range(ranks)]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()


def _wait(
    processes: "list[subprocess.Popen[str]]", place: Path, timeout: float, on_line: Callable[[str], None] | None
) -> None:
    """Wait for all ranks; the first failure ends the wait."""
    deadline, output = time.monotonic() + timeout, processes[0].stdout or io.StringIO()
    if processes[0].stdout:
        os.set_blocking(output.fileno(), False)
    while True:
        for line in output.readlines():
            if on_line:
                on_line(line.strip())
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                said = (place / f"log.{rank}").read_text(errors="replace").strip()
                reason = f"was killed by signal {-code}" if code < 0 else f"stopped with exit code {code}"
                if shutil.disk_usage(place).free < 1e6:
                    reason += f": the disk is full under {place}; free some, or name another folder in TMPDIR"
                last = f"; it said last: {said.splitlines()[-1]}" if said else ""
                error = MeasurementError(
                    f"measuring process {rank} {reason}; what was finished is kept, run it again{last}"
                )
                error.add_note(said[-3000:])
                raise error
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"measuring took longer than {timeout:.0f} s; try again when the machine is less busy"
            )
        time.sleep(0.01)
