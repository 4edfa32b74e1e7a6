"""A stand-in for srun of Slurm on one machine: it runs perfkit once for each task of several invented
nodes, with the variables that Slurm sets for each.

    python tests/fake_srun.py --nodes 2 --ntasks-per-node 2 perfkit calibrate ...

Tasks are forked, so that PyTorch is imported once. As srun without --kill-on-bad-exit, it stops
nothing when a task fails; its own exit code is the highest of the tasks. --kill RANK kills one of
them at its first exchange from probe --at on, as the kernel does when memory is short; with --requeue
the job then runs again, without that.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def list_variables(rank: int, *, nodes: int, local: int, job: int = 4711) -> dict[str, str]:
    """What srun sets for a task; the first node is this machine, the others have names alone."""
    tasks, node = nodes * local, rank // local
    hosts = ["localhost", *(f"node{number:02d}" for number in range(2, nodes + 1))]
    variables: dict[str, Any] = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": 0,
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_JOB_NODELIST": ",".join(hosts),
        "SLURM_STEP_NODELIST": ",".join(hosts),
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": f"{local}(x{nodes})",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank % local,
        "SLURM_NODEID": node,
        "SLURMD_NODENAME": hosts[node],
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(value) for name, value in variables.items()}


def fork_tasks(task: Callable[[], int], *, nodes: int, local: int) -> list[int]:
    """Run a function once for each task; returns their exit codes, negative for signals."""
    children = []
    for rank in range(nodes * local):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.environ.update(list_variables(rank, nodes=nodes, local=local))
                code = task()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = []
    for child in children:
        _, status = os.waitpid(child, 0)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def kill_at(rank: int, probe: int) -> None:
    """Let one rank kill itself at an exchange."""
    from perfkit.measure.replayed import ReplayedDevice

    usual = ReplayedDevice.prepare

    def prepare(self: Any, number: int, *about: Any) -> Any:
        is_first = "SLURM_RESTART_COUNT" not in os.environ
        if is_first and number >= probe and os.environ["SLURM_PROCID"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, number, *about)

    ReplayedDevice.prepare = prepare  # type: ignore[method-assign]


def main() -> int:
    """Run perfkit in all tasks, and return the highest exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int, default=1)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    words = options.command[1:]  # without the name of perfkit
    os.environ["TORCH_CPP_LOG_LEVEL"] = (
        "ERROR"  # read when PyTorch is imported, here before the fork
    )
    import torch.distributed  # noqa: F401

    from perfkit.__main__ import main as run_perfkit

    if options.kill is not None:
        kill_at(options.kill, options.at)

    def start() -> list[int]:
        return fork_tasks(
            lambda: run_perfkit(words), nodes=options.nodes, local=options.ntasks_per_node
        )

    codes = start()
    if options.requeue:
        print(f"the tasks ended with {codes}, the job starts again")
        os.environ["SLURM_RESTART_COUNT"] = "1"
        codes = start()
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
