"""Measuring processes: started with clean allocator settings, pinned, one thread each; one task as one rank."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from perfkit.measure.machine import count_cores, gather_facts, list_cores

#: Settings of measuring processes. Without them glibc returns large blocks after every free, so that each fresh output
#: page-faults at a tenth of the memory bandwidth. One thread per rank avoids contention for cores.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip

#: Modules of what measuring processes run: ``time_`` and the name of the task. A job may also name ``module:function``.
_TASKS = {"ladder": "timing", "references": "timing", "collectives": "timing", "kernels": "operations"}
_TASKS |= dict.fromkeys(("iteration", "placements"), "iterations")

#: First code of a measuring process: it ends with the process that started it. 1 is PR_SET_PDEATHSIG (Linux), 9 is
#: SIGKILL.
START = """
import ctypes, os, sys
if hasattr(ctypes.CDLL(None), "prctl"):
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(os.environ["PERFKIT_PARENT"]):
    from perfkit.measure.processes import work_in
    work_in(sys.argv[1])
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


def run_processes(job: dict[str, Any], *, ranks: int = 1, timeout: float = 600.0) -> list[Any]:
    """Run one job in fresh measuring processes and collect what each rank returns.

    Parameters
    ----------
    job : dict
        ``task`` says what to run; the rest are its arguments, as JSON.
    ranks : int
        Processes, joined in one process group over loopback when there are several [-].
    timeout : float
        Seconds before all ranks are stopped [s].

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
    settings = {**os.environ, **ENVIRONMENT, "WORLD_SIZE": str(ranks), "PERFKIT_PARENT": str(os.getpid())}
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if ranks > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        if (loopback := gather_facts()["loopback"].value) is None:
            raise MeasurementError("ranks cannot meet: this machine has no loopback; see ip link, or take one rank")
        settings["GLOO_SOCKET_IFNAME"] = loopback
    with tidy(), tempfile.TemporaryDirectory(prefix="perfkit-") as folder:
        place, processes = Path(folder), list[Any]()
        (place / "job.json").write_text(json.dumps(job))
        start = partial(subprocess.Popen, [sys.executable, "-c", START, folder], stdin=subprocess.DEVNULL)
        try:
            for rank in range(ranks):
                with open(place / f"log.{rank}", "w") as log:
                    own = {**settings, "RANK": str(rank)}
                    processes.append(start(env=own, stdout=log, stderr=log, start_new_session=True))
            _wait(processes, place, timeout)
            return [json.loads((place / f"result.{rank}").read_text()) for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: "list[subprocess.Popen[Any]]", place: Path, timeout: float) -> None:
    """Wait for all ranks; the first failure ends the wait."""
    deadline = time.monotonic() + timeout
    while set(codes := [process.poll() for process in processes]) != {0}:
        for rank, code in enumerate(codes):
            if code:
                said = (place / f"log.{rank}").read_text(errors="replace").strip()
                reason = f"was killed by signal {-code}" if code < 0 else f"stopped with exit code {code}"
                if shutil.disk_usage(place).free < 1e6:
                    reason += f": the disk is full under {place}; free some, or name another folder in TMPDIR"
                last = f"; it said last: {said.splitlines()[-1]}" if said else ""
                text = f"measuring process {rank} {reason}; what was finished is kept, run it again{last}"
                error = MeasurementError(text)
                error.add_note(said[-3000:])
                raise error
        if time.monotonic() > deadline:
            raise MeasurementError(f"measuring took longer than {timeout:.0f} s; try again when it is less busy")
        time.sleep(0.01)


def _run(job: dict[str, Any], meeting: str, local: int) -> list[Any]:
    """Run one task as one of several ranks that meet at a store: on one thread, pinned to a core for CPU work.

    Returns the result of this rank; of ranks that a launcher has started, those of all.
    """
    import torch
    import torch.distributed as dist

    device, rank, ranks = job.get("device", "cpu"), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15")
    if device == "cuda":
        torch.cuda.set_device(local)
    elif hasattr(os, "sched_setaffinity"):
        cores = list_cores()
        os.sched_setaffinity(0, {cores[local % len(cores)]})
    torch.set_num_threads(1)
    if ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, meeting, timeout=timedelta(minutes=10), rank=rank, world_size=ranks)
    name = job["task"]
    task: Any = resolve_name(f"perfkit.measure.{_TASKS[name]}:time_{name}" if name in _TASKS else name)
    results = [task(**{key: value for key, value in job.items() if key != "task"})]
    if ranks > 1:
        if meeting == "env://":
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, results[0])
            results = every
        dist.destroy_process_group()
    return results


def join_ranks(job: dict[str, Any]) -> list[Any]:
    """Run one job in this process as one rank of those that a launcher such as torchrun has started.

    Parameters
    ----------
    job : dict
        As for `run_processes`.

    Returns
    -------
    results : list
        One per rank, the same on all.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        return _run(job, "env://", int(os.environ["LOCAL_RANK"]))
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


def work_in(folder: str) -> NoReturn:
    """Be one measuring process: run the job in a folder, write this rank's result there, and end.

    Parameters
    ----------
    folder : str
        Holds ``job.json``; receives ``result.RANK``.
    """
    code, place, rank = 1, Path(folder), os.environ["RANK"]
    try:
        (result,) = _run(json.loads((place / "job.json").read_text()), f"file://{folder}/store", int(rank))
        (place / f"result.{rank}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written; taking down the threads of a process group can hang or abort
