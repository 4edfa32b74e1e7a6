"""Measuring processes that start at once: a process that has imported PyTorch forks them.

A new interpreter takes 2 to 4 s to import what measuring needs, longer than most measurements. So
one process, the starter, imports it once, runs nothing, and forks a new process for each rank of
each job. What is measured is the same: each process has memory of its own, is pinned by itself, and
has the settings of `perfkit.measure.processes.ENVIRONMENT`, with which the starter began.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

#: Settings that differ between the processes of one starter.
_OWN_SETTINGS = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
#: What the starter imports; an optimizer of PyTorch imports the last one at its first use.
_IMPORTED = (
    "perfkit.measure.iterations",
    "perfkit.measure.operations",
    "perfkit.measure.timing",
    "torch._dynamo",
)

#: Longest wait for an answer, of which the first comes after all imports [s]; ranks may work as long, see
#: `perfkit.measure.processes.run_processes`.
_LONGEST = 600.0

#: Code of a starter. Linux kills it when its parent ends, see `perfkit.measure.processes.START`.
START = """
import os
from perfkit.measure.starter import end_with, serve
end_with(int(os.environ["PERFKIT_PARENT"]))
from perfkit.measure.processes import work_in
serve(work_in)
"""


class StarterError(RuntimeError):
    """The starter has ended, or does not answer."""


def can_fork() -> bool:
    """Whether this system forks and watches processes as a starter needs it: Linux 5.3 and newer."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an older kernel, or a container that forbids it
        return False
    return True


def end_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends; end it if it has ended already.

    Parameters
    ----------
    parent : int
        Number of the process that must be the parent [-].
    """
    # 1 is PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ForkedProcess:
    """A process that the starter has forked, with the methods of `subprocess.Popen` that
    `perfkit.measure.processes` uses.

    Parameters
    ----------
    starter : Starter
        Its parent.
    pid : int
        Its number [-].
    """

    def __init__(self, starter: "Starter", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._starter = starter
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._find_code(timeout_ms=0)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self._find_code(timeout_ms=None)
        while code is None:
            code = self._find_code(timeout_ms=None)
        return code

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _find_code(self, timeout_ms: int | None) -> int | None:
        """The exit code, if the process ends within this time."""
        if self.returncode is None:
            ends = select.poll()
            ends.register(self._handle, select.POLLIN)
            if not ends.poll(timeout_ms):
                return None
            try:
                self.returncode = self._starter.ask({"ended": self.pid})
            except StarterError:  # Linux has killed its processes with it
                self.returncode = -signal.SIGKILL
            os.close(self._handle)
        return self.returncode


class Starter:
    """Starts measuring processes at once. Its own process begins with the first of them.

    Use it as a context; its process ends with that. Orders and answers pass through a socket, which is
    standard input of its process: what Python prints while it starts and imports is no answer.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._their_socket = socket.socketpair()
        self._socket.settimeout(_LONGEST)
        self._orders = self._socket.makefile("w")
        self._answers = self._socket.makefile("r")

    def __enter__(self) -> "Starter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):  # an order that nobody has read
            self._orders.close()
        self._answers.close()
        self._socket.close()
        self._their_socket.close()

    def start(self, folder: Path, log: Path, settings: Mapping[str, str]) -> ForkedProcess:
        """Start one rank.

        Parameters
        ----------
        folder : Path
            Of its job, see `perfkit.measure.processes.work_in`.
        log : Path
            Receives its output.
        settings : mapping of str to str
            Environment of all ranks with the number of this one.

        Returns
        -------
        process : ForkedProcess
            It runs.

        Raises
        ------
        StarterError
            If the starter has ended, such as without torch, or does not answer.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START],
                env={**settings, "PERFKIT_PARENT": str(os.getpid())},
                stdin=self._their_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            # so that answers end when the process ends
            self._their_socket.close()
        own = {name: settings[name] for name in _OWN_SETTINGS if name in settings}
        pid = self.ask({"folder": str(folder), "log": str(log), "settings": own})
        return ForkedProcess(self, pid)

    def ask(self, order: Mapping[str, Any]) -> int:
        """Send an order to the starter.

        Parameters
        ----------
        order : mapping
            What `serve` knows, as plain JSON.

        Returns
        -------
        answer : int
            Its answer [-].

        Raises
        ------
        StarterError
            If the starter has ended, or does not answer.
        """
        try:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
            return int(self._answers.readline())
        except (OSError, ValueError) as error:
            if (
                self._process is not None
            ):  # so that it never begins work that another process has begun
                self._process.kill()
            raise StarterError("the starter has ended, or does not answer") from error


def serve(work: Callable[[str], NoReturn]) -> NoReturn:
    """Be the starter: import what measuring needs, then answer the orders on standard input, a socket, each
    of them a line of JSON, until it is closed.

    Parameters
    ----------
    work : callable
        What a forked process does with the folder of its job; it does not return.

    Notes
    -----
    An order with ``folder``, ``log`` and ``settings`` forks a process and is answered with its
    number, one with ``ended`` with the exit code of the process of this number.
    """
    import torch

    torch.set_num_threads(1)
    for name in _IMPORTED:
        import_module(name)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            starter = os.getpid()
            answer = os.fork()
            if answer == 0:
                _begin(work, starter, **order)
        os.write(sys.stdin.fileno(), f"{answer}\n".encode())
    os._exit(0)


def _begin(
    work: Callable[[str], NoReturn],
    starter: int,
    *,
    folder: str,
    log: str,
    settings: Mapping[str, str],
) -> NoReturn:
    """Begin the work of a forked process."""
    os.setsid()
    end_with(starter)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(settings)
    work(folder)
