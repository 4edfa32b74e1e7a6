"""Measuring processes: clean allocator settings, pinned to a core, one thread, one rank each."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeAlias

from perfkit.measure.machine import count_cores, gather_facts, list_cores
from perfkit.measure.records import write_result
from perfkit.measure.starter import ForkedProcess, Starter, StarterError, can_fork
from perfkit.recording import check_torch

#: Settings of measuring processes. Without them glibc returns large blocks to the system after
#: every free, and each new output causes page faults at a tenth of the memory bandwidth. With one
#: thread per rank, ranks do not share cores.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

#: Module of each task; its function is ``time_`` and the name of the task. A job may also name
#: ``module:function``.
_TASKS = {
    "ladder": "timing",
    "references": "timing",
    "collectives": "timing",
    "kernels": "operations",
    "iteration": "iterations",
    "placements": "iterations",
}

#: Code of a measuring process. Linux kills the process when its parent ends: 1 is PR_SET_PDEATHSIG,
#: 9 is SIGKILL.
START = """
import ctypes, os, sys
if hasattr(ctypes.CDLL(None), "prctl"):
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(os.environ["PERFKIT_PARENT"]):
    from perfkit.measure.processes import work_in
    work_in(sys.argv[1])
"""


class MeasurementError(RuntimeError):
    """A measuring process failed; the message ends with the last line that it printed."""


@contextmanager
def tidy() -> Iterator[None]:
    """Raise SIGTERM and SIGHUP as a KeyboardInterrupt with their number, so that processes and
    folders are removed.

    Handlers that the program has set stay, also those that ignore the signals, as under nohup.
    """

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    signals = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):  # Windows has none
        signals.append(signal.SIGHUP)
    handled = []
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def check_processors(ranks: int, device: str = "cpu") -> int:
    """Check that this machine has enough cores or GPUs for some ranks.

    Parameters
    ----------
    ranks : int
        Processes that measure at the same time [-].
    device : str, optional
        ``cpu`` or ``cuda``.

    Returns
    -------
    ranks : int
        The same number [-].

    Raises
    ------
    ValueError
        For more ranks than cores or GPUs, and for cuda without a GPU.
    """
    most = count_cores()
    what = f"{most} cores that this process may use"
    if device == "cuda":
        check_torch()
        import torch

        most = torch.cuda.device_count()
        what = f"{most} GPUs that PyTorch {torch.__version__} can use"
    if ranks > most:
        hint = "choose device cpu, or a machine with GPUs; predictions need no GPU"
        if most:
            hint = f"take at most {most}"
        raise ValueError(f"ranks is {ranks}; this machine has {what}; {hint}")
    return ranks


def run_processes(job: dict[str, Any], *, ranks: int = 1, timeout: float = 600.0) -> list[Any]:
    """Run one job in fresh measuring processes and collect what each rank returns.

    Parameters
    ----------
    job : dict
        ``task`` names what to run; the other entries are its arguments, as JSON.
    ranks : int
        Processes; several form a process group over loopback [-].
    timeout : float
        Time after which all ranks are stopped [s].

    Returns
    -------
    results : list
        One per rank, as plain JSON; see `perfkit.measure.records.read_record`.

    Raises
    ------
    MeasurementError
        If a rank fails or takes too long, or ranks cannot reach each other; all processes are
        stopped.
    ImportError
        If torch is not installed or too old.
    """
    check_torch()
    settings = {
        **os.environ,
        **ENVIRONMENT,
        "WORLD_SIZE": str(ranks),
        "PERFKIT_PARENT": str(os.getpid()),
    }
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if ranks > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = gather_facts()["loopback"].value
        if loopback is None:
            raise MeasurementError(
                "ranks cannot connect: this machine has no loopback; see ip link, or take one rank"
            )
        settings["GLOO_SOCKET_IFNAME"] = loopback
    with tidy(), tempfile.TemporaryDirectory(prefix="perfkit-") as folder_name:
        folder = Path(folder_name)
        (folder / "job.json").write_text(json.dumps(job))
        processes: list[_Process] = []
        starter = _Shared.starter if job.get("device", "cpu") == "cpu" else None
        try:
            for rank in range(ranks):
                rank_settings = {**settings, "RANK": str(rank)}
                processes.append(_start(starter, folder, folder / f"log.{rank}", rank_settings))
            _wait(processes, folder, timeout)
            return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


_Process: TypeAlias = subprocess.Popen[Any] | ForkedProcess


class _Shared:
    """The starter of `sharing_imports`; None outside."""

    starter: Starter | None = None


@contextmanager
def sharing_imports() -> Iterator[None]:
    """Import what measuring processes need once for all that measure a CPU in this context, where
    the system can, see `perfkit.measure.starter`."""
    before = _Shared.starter
    if before is not None or not can_fork():
        yield
        return
    with Starter() as starter:
        _Shared.starter = starter
        try:
            yield
        finally:
            _Shared.starter = before


def _start(
    starter: Starter | None, folder: Path, log: Path, settings: Mapping[str, str]
) -> _Process:
    """Start one rank: by a starter, or as a new interpreter, which says itself what is wrong."""
    if starter is not None:
        with suppress(StarterError):
            return starter.start(folder, log, settings)
    with open(log, "w") as output:
        return subprocess.Popen(
            [sys.executable, "-c", START, str(folder)],
            env=dict(settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _wait(processes: list[_Process], folder: Path, timeout: float) -> None:
    """Wait until all ranks have ended, or raise an error at the first failure."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise _explain_failure(rank, code, folder)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"measuring took longer than {timeout:.0f} s; repeat it on a less busy machine"
            )
        time.sleep(0.01)


def _explain_failure(rank: int, code: int, folder: Path) -> MeasurementError:
    """The error of a rank that ended with this exit code; a note has the end of its output."""
    output = (folder / f"log.{rank}").read_text(errors="replace").strip()
    reason = f"stopped with exit code {code}"
    if code < 0:
        reason = f"was killed by signal {-code}"
    if shutil.disk_usage(folder).free < 1e6:
        reason += f": the disk is full under {folder}; free some, or name another folder in TMPDIR"
    text = f"measuring process {rank} {reason}; finished measurements are kept, run it again"
    if output:
        text += f"; its last line was: {output.splitlines()[-1]}"
    error = MeasurementError(text)
    error.add_note(output[-3000:])
    return error


def run_rank(
    job: dict[str, Any],
    *,
    rank: int,
    ranks: int,
    local: int,
    meeting: str | None = None,
    store: Any = None,
) -> Any:
    """Run one job in this process as one rank, on one thread that is pinned to a core for CPU work.

    Parameters
    ----------
    job : dict
        As for `run_processes`.
    rank, ranks : int
        This rank, and how many there are [-].
    local : int
        Number of its GPU, or of its core among those that it may use [-].
    meeting : str, optional
        Where the ranks meet, as PyTorch writes it.
    store : torch.distributed.Store, optional
        Where they meet otherwise.

    Returns
    -------
    result : Any
        What the task returns on this rank, as plain JSON.
    """
    import torch
    import torch.distributed as dist

    device = job.get("device", "cpu")
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
        dist.init_process_group(
            backend,
            init_method=meeting,
            store=store,
            timeout=timedelta(minutes=10),
            rank=rank,
            world_size=ranks,
        )
    arguments = dict(job)
    name = arguments.pop("task")
    if name in _TASKS:
        name = f"perfkit.measure.{_TASKS[name]}:time_{name}"
    task: Any = resolve_name(name)
    result = write_result(task(**arguments))
    if ranks > 1:
        dist.destroy_process_group()
    return result


def work_in(folder: str) -> NoReturn:
    """Run the job of a folder as a measuring process, write the result of this rank there, and end
    the process.

    Parameters
    ----------
    folder : str
        Holds ``job.json``; receives ``result.RANK``.
    """
    rank = os.environ["RANK"]
    code = 1
    try:
        job = json.loads((Path(folder) / "job.json").read_text())
        result = run_rank(
            job,
            rank=int(rank),
            ranks=int(os.environ["WORLD_SIZE"]),
            local=int(rank),
            meeting=f"file://{folder}/store",
        )
        (Path(folder) / f"result.{rank}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # a normal exit would stop the threads of the process group, which can hang or abort
    os._exit(code)
