"""The lifeline between each rank of a launcher and rank 0, by which all ranks end when one is gone.

Rank 0 leads (`perfkit.measure.leader`): it plans, asks, prints and writes. Every other rank follows
(`perfkit.measure.follower`): it connects to rank 0, waits for jobs, runs them and returns what they
return. This connection, its lifeline, breaks when the process at either end dies, however it dies; so
nobody waits for a rank that is gone, also where NCCL would wait for ten minutes.

A follower sends ``hello``, ``seat``, ``result``, or why it ends: ``failed``, ``interrupted``. Rank 0
sends ``job``, ``go`` and ``end``. Each message is one line of JSON. Here is what both need.
"""

import os
import socket
from datetime import timedelta
from typing import Any

from perfkit.measure.interfaces import connecting_by
from perfkit.measure.launchers import LaunchedRanks
from perfkit.measure.processes import MeasurementError, run_rank
from perfkit.measure.seats import number_gpu
from perfkit.recording import check_torch

#: Time in which all ranks have to arrive; containers of a large job start within minutes [s].
PATIENCE = 300.0
#: Time in which a rank that works may find out by itself that another is gone [s].
GRACE = 2.0
#: Time in which rank 0 may find out why its own work failed [s].
LOOK = 1.0
#: Time after which a rank that waits looks again [s].
TURN = 0.2
#: Time that a rank which failed waits for rank 0 to say so [s].
LAST_WORDS = 15.0
#: Where the store of a run says whose it is.
OWNER = "perfkit, owner"
#: What is said of measurements when a rank is lost.
KEPT = "finished measurements are kept, the same command continues"
#: A silent connection is probed after this time, this often [s], and breaks after so many probes [-].
_IDLE, _INTERVAL, _PROBES = 20, 5, 3
#: Where ports of no service begin [-].
_FIRST_FREE = 20_000


def run_here(
    job: dict[str, Any], launched: LaunchedRanks, store: Any, number: int, interface: str | None
) -> Any:
    """Run one job in this process, as one of the ranks; the cores that it may use stay.

    Parameters
    ----------
    job : dict
        As for `perfkit.measure.processes.run_processes`.
    launched : LaunchedRanks
        Of this rank.
    store : torch.distributed.Store
        Where the ranks meet.
    number : int
        How many jobs these ranks have run before [-].
    interface : str or None
        Network interface by which this rank reaches the others; None leaves it to gloo.

    Returns
    -------
    result : Any
        What the task returns on this rank, as plain JSON.
    """
    import torch
    from torch.distributed import PrefixStore

    local = launched.local_rank
    if job.get("device") == "cuda":
        local = number_gpu(local, torch.cuda.device_count())
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        with connecting_by(interface):
            return run_rank(
                job,
                rank=launched.rank,
                ranks=launched.ranks,
                local=local,
                store=PrefixStore(f"perfkit job {number}", store),
            )
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


def name_key(launched: LaunchedRanks) -> str:
    """Where the store of a run says how rank 0 is reached.

    Parameters
    ----------
    launched : LaunchedRanks
        Of any rank of the run.
    """
    return f"perfkit, {launched.run}"


def open_store(launched: LaunchedRanks, patience: float) -> Any:
    """The store of PyTorch where the ranks meet: that of torchrun, or one of rank 0.

    Parameters
    ----------
    launched : LaunchedRanks
        Of this rank.
    patience : float
        Time in which rank 0 has to be reached [s].

    Returns
    -------
    store : torch.distributed.TCPStore
        Kept by rank 0, unless an agent of torchrun keeps one.

    Raises
    ------
    MeasurementError
        If the port is in use, and if rank 0 cannot be reached.
    """
    # when a rank is gone, PyTorch prints a page about it on each of the others
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    check_torch()
    from torch.distributed import TCPStore

    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_it = launched.rank == 0 and not (launched.launcher == "torchrun" and of_torchrun)
    address, port = launched.address, launched.port
    try:
        return TCPStore(
            address,
            port,
            launched.ranks,
            keeps_it,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        if keeps_it and ("in use" in str(error) or "EADDRINUSE" in str(error)):
            raise MeasurementError(
                f"port {port} of {address} is in use, perhaps by another run; set another one for all "
                f"ranks: export MASTER_PORT={port + 1 if port < 65535 else _FIRST_FREE}"
            ) from error
        first_line = str(error).splitlines()[0]
        raise MeasurementError(
            f"{launched.name} cannot reach {address}, port {port}, where rank 0 should be "
            f"({first_line}); set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port"
        ) from error


def keep_alive(connection: socket.socket) -> None:
    """Let a connection break if the other node does not answer any more.

    Parameters
    ----------
    connection : socket
        Of TCP.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _INTERVAL, "TCP_KEEPCNT": _PROBES}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
