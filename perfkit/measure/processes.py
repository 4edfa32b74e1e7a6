"""Measuring processes: clean allocator settings, pinned to a core, one thread, one rank each."""

import json
import os
import re
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
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

from perfkit.measure.machine import count_cores, gather_facts, list_cores
from perfkit.measure.records import write_result
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
        processes: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(ranks):
                with open(folder / f"log.{rank}", "w") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-c", START, folder_name],
                        env={**settings, "RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                processes.append(process)
            _wait(processes, folder, timeout)
            return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: "list[subprocess.Popen[Any]]", folder: Path, timeout: float) -> None:
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


def _run(job: dict[str, Any], meeting: str, local: int) -> list[Any]:
    """Run one task as one rank, on one thread that is pinned to a core for CPU work.

    Returns the result of this rank as plain JSON; the results of all ranks if a launcher has
    started them.
    """
    import torch
    import torch.distributed as dist

    device = job.get("device", "cpu")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
            backend, meeting, timeout=timedelta(minutes=10), rank=rank, world_size=ranks
        )
    arguments = dict(job)
    name = arguments.pop("task")
    if name in _TASKS:
        name = f"perfkit.measure.{_TASKS[name]}:time_{name}"
    task: Any = resolve_name(name)
    results = [write_result(task(**arguments))]
    if ranks > 1:
        if meeting == "env://":
            results_of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(results_of_ranks, results[0])
            results = results_of_ranks
        dist.destroy_process_group()
    return results


class LaunchedRanks(NamedTuple):
    """Where a launcher has started this process: its rank, all ranks, and the ranks of a node."""

    rank: int
    ranks: int
    ranks_per_node: int


def launched_ranks() -> LaunchedRanks | None:
    """Rank, ranks and ranks per node if a launcher has started this process: torchrun, or srun of
    Slurm.

    The variables of srun [1]_ are copied to those of torchrun. The port of the first node depends
    on the job, so that two jobs do not share it, unless ``MASTER_PORT`` is set.

    Returns
    -------
    launched : LaunchedRanks or None
        None without a launcher [-].

    References
    ----------
    .. [1] Slurm 24.05, srun(1), "Output environment variables" (SLURM_STEP_NUM_TASKS and others)
    """
    environment = os.environ
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    by_srun = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if not by_torchrun:
        if not by_srun:
            return None
        _copy_variables_of_srun()
    return LaunchedRanks(
        rank=int(environment["RANK"]),
        ranks=int(environment["WORLD_SIZE"]),
        ranks_per_node=int(environment["LOCAL_WORLD_SIZE"]),
    )


def _copy_variables_of_srun() -> None:
    """Set the variables of torchrun from those of srun."""
    environment = os.environ
    job = environment["SLURM_JOB_ID"]
    tasks, nodes = environment["SLURM_STEP_NUM_TASKS"], environment["SLURM_STEP_NUM_NODES"]
    first_host = re.sub(
        r"^([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,\[]*).*",
        r"\1\2\3",
        environment["SLURM_STEP_NODELIST"],
    )
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = tasks
    environment["LOCAL_WORLD_SIZE"] = str(int(tasks) // int(nodes))
    environment["TORCHELASTIC_RUN_ID"] = job
    environment.setdefault("MASTER_ADDR", first_host)
    environment.setdefault("MASTER_PORT", str(20_000 + int(job) % 10_000))


def join_ranks(job: dict[str, Any]) -> list[Any]:
    """Run one job in this process, as one of the ranks that a launcher such as torchrun has
    started.

    Parameters
    ----------
    job : dict
        As for `run_processes`.

    Returns
    -------
    results : list
        One per rank; every rank returns all of them.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        return _run(job, "env://", int(os.environ["LOCAL_RANK"]))
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


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
        (result,) = _run(job, f"file://{folder}/store", int(rank))
        (Path(folder) / f"result.{rank}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # a normal exit would stop the threads of the process group, which can hang or abort
    os._exit(code)
