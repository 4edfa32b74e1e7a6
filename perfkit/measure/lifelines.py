"""Ranks that a launcher has started work for rank 0, and all of them end when one is gone.

Rank 0 leads: it plans, asks, prints and writes. Every other rank follows: it connects to rank 0,
waits for jobs, runs them and returns what they return. This connection, its lifeline, breaks when
the process at either end dies, however it dies; so nobody waits for a rank that is gone, also where
NCCL would wait for ten minutes.

A follower sends ``hello``, ``seat``, ``result``, or why it ends: ``failed``, ``interrupted``. Rank 0
sends ``job``, ``go`` and ``end``. Each message is one line of JSON.
"""

import json
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from perfkit.measure.interfaces import connecting_by, find_interface, is_loopback
from perfkit.measure.launchers import LaunchedRanks, write_start
from perfkit.measure.processes import MeasurementError, run_rank
from perfkit.measure.records import read_record, write_record
from perfkit.measure.seats import Seat, check_seats, number_gpu, take_seat
from perfkit.recording import check_torch

#: Time in which all ranks have to arrive; containers of a large job start within minutes [s].
_PATIENCE = 300.0
#: Time after which rank 0 names the ranks that it waits for [s].
_TELL = 15.0
#: Time in which a rank that works may find out by itself that another is gone [s].
_GRACE = 2.0
#: Time in which rank 0 may find out why its own work failed [s].
_LOOK = 1.0
#: Time after which the thread of rank 0 looks whether it is still needed [s].
_TURN = 0.2
#: Time that a rank which failed waits for rank 0 to say so [s].
_LAST_WORDS = 15.0
#: Where the store of a run says whose it is.
_OWNER = "perfkit, owner"
_KEPT = "finished measurements are kept, the same command continues"
#: Longest first message of a rank; other programs may speak to the port [B].
_LONGEST_HELLO = 4096
#: A silent connection is probed after this time, this often [s], and breaks after so many probes [-].
_IDLE, _INTERVAL, _PROBES = 20, 5, 3


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A rank that ended before rank 0 did.

    Parameters
    ----------
    rank : int
        The rank [-].
    text : str
        What happened, with its host.
    signal : int or None
        The signal that interrupted it, if one did [-].
    may_follow : bool
        Whether this may be what another loss has caused: an error, such as a closed connection.
    """

    rank: int
    text: str
    signal: int | None = None
    may_follow: bool = False


@dataclass
class _Line:
    """The lifeline of one rank, as rank 0 sees it."""

    connection: socket.socket
    rank: int | None = None
    host: str = "an unknown host"
    unread: bytes = b""
    is_open: bool = True
    arrived: dict[str, Any] = field(default_factory=dict)


class Leader:
    """Rank 0 of a launcher, with the lifelines of all others.

    Parameters
    ----------
    launched : LaunchedRanks
        What the launcher says to rank 0.
    patience : float, optional
        Time in which all ranks have to arrive [s].

    Raises
    ------
    MeasurementError
        If the port is in use, and if ranks do not arrive.
    """

    def __init__(self, launched: LaunchedRanks, *, patience: float = _PATIENCE) -> None:
        self.launched = launched
        self._store = _open_store(launched, patience)
        self._condition = threading.Condition()
        self._lines: dict[int, _Line] = {}
        self._losses: list[Loss] = []
        self._cause: Loss | None = None
        self._jobs = 0
        self._works = False
        self._is_over = False
        self._told = threading.Event()
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._door = socket.create_server(
            ("", 0), family=family, backlog=launched.ranks, dualstack_ipv6=both
        )
        self._selector.register(self._door, selectors.EVENT_READ)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        place = {"port": self._door.getsockname()[1], "token": self._token}
        self._store.set(_OWNER, launched.run)
        self._store.set(_name_key(launched), json.dumps(place))
        try:
            self._wait_for("hello", patience)
        except BaseException:
            self.end(2)
            raise

    # -- what rank 0 does

    def run(self, job: dict[str, Any]) -> list[Any]:
        """Run one job on all ranks, this one included.

        Parameters
        ----------
        job : dict
            As for `perfkit.measure.processes.run_processes`.

        Returns
        -------
        results : list
            What each rank returned, as plain JSON.

        Raises
        ------
        ValueError
            For ranks that do not sit as they should, see
            `perfkit.measure.seats.check_seats`.
        MeasurementError
            If a rank fails or is gone.
        """
        launched = self.launched
        device = job.get("device", "cpu")
        self._send({"job": job})
        seats = [take_seat(launched, device)]
        seats += [read_record(Seat, row, "seat") for row in self._wait_for("seat")]
        check_seats(seats, launched)
        interface = self._find_interface()
        self._send({"go": self._jobs, "interface": interface})
        self._works = True
        try:
            result = _run_here(job, launched, self._store, self._jobs, interface)
        except Exception as error:
            raise self.explain(error) from error
        finally:
            self._works = False
        self._jobs += 1
        return [result, *self._wait_for("result")]

    def explain(self, error: BaseException) -> BaseException:
        """Why work failed here: because another rank is gone, if one is.

        Parameters
        ----------
        error : BaseException
            What was raised here.

        Returns
        -------
        error : BaseException
            One that names the other rank, or the same.
        """
        loss = self._find_cause()
        self._told.set()
        if loss is None:
            return error
        if loss.signal is not None:
            return KeyboardInterrupt(loss.signal)
        return MeasurementError(loss.text)

    def _find_interface(self) -> str | None:
        """The interface that leads to other nodes; None where all ranks are on this one."""
        if self.launched.nodes == 1:
            return None
        for line in self._lines.values():
            address = line.connection.getsockname()[0]
            if not is_loopback(address):
                return find_interface(address)
        return None

    def _find_cause(self) -> Loss | None:
        """The loss that came first, or shortly after it one that nothing else explains; None if no
        rank is lost."""

        def find() -> Loss | None:
            return next((loss for loss in self._losses if not loss.may_follow), None)

        with self._condition:
            self._condition.wait_for(find, timeout=_LOOK)
            if self._cause is None and self._losses:
                self._cause = find() or self._losses[0]
            return self._cause

    def end(self, code: int, answer: Any = None) -> None:
        """End all other ranks.

        Parameters
        ----------
        code : int
            Exit code for all of them [-].
        answer : optional
            What they return, as plain JSON.
        """
        culprit = self._cause.rank if self._cause else 0
        self._is_over = True
        self._send({"end": code, "culprit": culprit, "answer": answer})
        self._told.set()
        for line in [*self._lines.values()]:
            with suppress(OSError):
                line.connection.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._listener:
            self._listener.join(timeout=_LAST_WORDS)  # until the others have heard it

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message to all other ranks; those that are gone are noticed by their silence."""
        text = json.dumps(message).encode() + b"\n"
        for line in [*self._lines.values()]:
            with suppress(OSError):
                line.connection.sendall(text)

    def _wait_for(self, kind: str, patience: float | None = None) -> list[Any]:
        """Wait until every other rank has sent a message of a kind; returns them by rank."""
        others = range(1, self.launched.ranks)
        began = time.monotonic()
        is_told = False

        def list_missing() -> list[int]:
            return [
                rank
                for rank in others
                if rank not in self._lines or kind not in self._lines[rank].arrived
            ]

        with self._condition:
            while missing := list_missing():
                if self._losses:
                    break
                waited = time.monotonic() - began
                if patience is not None and waited > patience:
                    raise MeasurementError(self._describe_missing(missing, waited))
                if patience is not None and waited > _TELL and not is_told:
                    print(f"perfkit: {self._describe_wait(missing)}", file=sys.stderr)
                    is_told = True
                self._condition.wait(timeout=_TURN)
            else:
                return [self._lines[rank].arrived.pop(kind) for rank in others]
        raise self.explain(MeasurementError("a rank is gone"))

    def _describe_wait(self, missing: list[int]) -> str:
        launched = self.launched
        return (
            f"{_list_ranks(missing)} of {launched.ranks} have not arrived at {launched.address}, "
            f"port {launched.port}, yet; waiting"
        )

    def _describe_missing(self, missing: list[int], waited: float) -> str:
        launched = self.launched
        line = write_start(launched.launcher, launched.ranks_per_node)
        return (
            f"{_list_ranks(missing)} of {launched.ranks} did not arrive at {launched.address}, port "
            f"{launched.port}, within {waited:.0f} s; what they printed says why; they were expected "
            f"from {line}"
        )

    # -- what its thread does

    def _listen(self) -> None:
        """Read what the other ranks send, until they are gone."""
        while not self._is_over or any(line.is_open for line in self._lines.values()):
            for key, _ in self._selector.select(timeout=_TURN):
                if key.fileobj is self._door:
                    connection, _ = self._door.accept()
                    _keep_alive(connection)
                    line = _Line(connection)
                    self._selector.register(connection, selectors.EVENT_READ, line)
                else:
                    self._read(key.data)
        for key in [*self._selector.get_map().values()]:
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _read(self, line: _Line) -> None:
        """Read what a rank has sent; nothing means that it is gone."""
        try:
            data = line.connection.recv(2**16)
        except OSError:
            data = b""
        line.unread += data
        is_ours = line.rank is not None
        try:
            while b"\n" in line.unread:
                message, line.unread = line.unread.split(b"\n", 1)
                self._take(line, json.loads(message))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            data = b""  # another program speaks here
        if not is_ours and len(line.unread) > _LONGEST_HELLO:
            data = b""
        if not data:
            self._selector.unregister(line.connection)
            line.connection.close()
            line.is_open = False
            if line.rank is not None:
                text = (
                    f"rank {line.rank} on {line.host} is gone without a word: it was killed, or its "
                    "node failed; look at its last output, at the memory of the host and at dmesg "
                    f"there; {_KEPT}"
                )
                self._note_loss(Loss(rank=line.rank, text=text))

    def _take(self, line: _Line, message: dict[str, Any]) -> None:
        """Take one message of a rank."""
        if "hello" in message:
            is_known = message["hello"] in self._lines  # ranks of another run at the same port
            if message["token"] != self._token or is_known:
                raise ValueError("not one of ours")
            with self._condition:
                line.rank, line.host = message["hello"], message["host"]
                self._lines[line.rank] = line
                line.arrived["hello"] = line.host
                self._condition.notify_all()
        elif line.rank is None:
            return
        elif "failed" in message:
            text = f"rank {line.rank} on {line.host} failed: {message['failed']}; {_KEPT}"
            self._note_loss(Loss(rank=line.rank, text=text, may_follow=True))
        elif "interrupted" in message:
            number = message["interrupted"]
            text = f"rank {line.rank} on {line.host} was interrupted by signal {number}; {_KEPT}"
            self._note_loss(Loss(rank=line.rank, text=text, signal=number))
        else:
            with self._condition:
                line.arrived.update(message)
                self._condition.notify_all()

    def _note_loss(self, loss: Loss) -> None:
        """Note that a rank has ended; rank 0 ends, too, if it does not do so by itself."""
        if self._is_over:
            return
        with self._condition:
            if any(known.rank == loss.rank for known in self._losses):
                return  # it has said why before it ended
            self._losses.append(loss)
            self._condition.notify_all()
            is_first = len(self._losses) == 1
        if is_first and self._works:
            watch = threading.Timer(_GRACE, self._give_up)
            watch.daemon = True
            watch.start()

    def _give_up(self) -> None:
        """End this process, which waits inside of a collective that no rank will finish."""
        if self._told.is_set() or not self._works:
            return
        loss = self._find_cause()
        if loss is None:
            return
        print(f"\nperfkit: {loss.text}", file=sys.stderr, flush=True)
        self.end(2)
        os._exit(2 if loss.signal is None else 128 + loss.signal)


class Follower:
    """A rank other than the first, with its lifeline to rank 0.

    Parameters
    ----------
    launched : LaunchedRanks
        What the launcher says to this rank.
    patience : float, optional
        Time in which rank 0 has to be reached [s].

    Raises
    ------
    MeasurementError
        If rank 0 cannot be reached, or if another run uses its port.
    """

    def __init__(self, launched: LaunchedRanks, *, patience: float = _PATIENCE) -> None:
        self.launched = launched
        self._store = _open_store(launched, patience)
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._works = False
        place = self._find_door(patience)
        try:
            self._connection = socket.create_connection(
                (launched.address, place["port"]), timeout=patience
            )
        except OSError as error:
            raise MeasurementError(
                f"{launched.name} cannot reach rank 0 at {launched.address}, port {place['port']} "
                f"({error.strerror or error}); open all ports between the nodes of a job"
            ) from error
        self._connection.settimeout(None)
        self._address: str = self._connection.getsockname()[0]
        _keep_alive(self._connection)
        self._say({"hello": launched.rank, "host": launched.host, "token": place["token"]})
        threading.Thread(target=self._listen, daemon=True).start()

    def _find_door(self, patience: float) -> dict[str, Any]:
        """Where rank 0 listens."""
        launched, key = self.launched, _name_key(self.launched)
        deadline = time.monotonic() + patience
        while not self._store.check([key]):
            owner = launched.run
            if self._store.check([_OWNER]):
                owner = self._store.get(_OWNER).decode()
            if owner != launched.run:
                raise MeasurementError(
                    f"{launched.name} found {owner} at {launched.address}, port {launched.port}, and "
                    f"not its own {launched.run}; set MASTER_PORT to a free port, the same for all ranks"
                )
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"{launched.name} found no rank 0 of {launched.run} at {launched.address}, port "
                    f"{launched.port}, within {patience:.0f} s; what rank 0 printed says why; if "
                    "another program uses this port, set MASTER_PORT to a free one"
                )
            time.sleep(_TURN)
        place: dict[str, Any] = json.loads(self._store.get(key))
        return place

    def work(self) -> "Ending":
        """Run the jobs of rank 0 until it ends.

        Returns
        -------
        ending : Ending
            How it ended.

        Raises
        ------
        MeasurementError
            With rank and host, if this rank failed, or if rank 0 is gone.
        """
        try:
            while True:
                message = self._messages.get()
                if "end" in message:
                    return self._finish(message)
                self._take_part(message["job"])
        except KeyboardInterrupt as interrupt:
            self._say({"interrupted": interrupt.args[0] if interrupt.args else 2})
            raise
        except _EndedEarlyError as early:
            return self._finish(early.message)
        except Exception as error:
            self._works = False
            self._say({"failed": str(error) or type(error).__name__})
            message = self._wait_for_end()
            if message["end"] is not None and message["culprit"] == self.launched.rank:
                raise MeasurementError(f"{self.launched.name}: {error}") from error
            return self._finish(message)

    def _take_part(self, job: dict[str, Any]) -> None:
        """Run one job, once rank 0 has seen where all ranks sit."""
        launched = self.launched
        self._say({"seat": write_record(take_seat(launched, job.get("device", "cpu")))})
        message = self._messages.get()
        if "end" in message:
            raise _EndedEarlyError(message)
        self._works = True
        # ranks on the node of rank 0 may have reached it by loopback
        interface = message["interface"]
        if interface is not None and not is_loopback(self._address):
            interface = find_interface(self._address)
        result = _run_here(job, launched, self._store, message["go"], interface)
        self._works = False
        self._say({"result": result})

    def _finish(self, message: dict[str, Any]) -> "Ending":
        """What rank 0 said at its end."""
        self._works = False
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if message["end"] is None and self.launched.rank == 1:  # one of all says it
            print(file=sys.stderr)  # below the bar that rank 0 has left
            raise MeasurementError(
                f"rank 0 on {self.launched.address} is gone without a word; look at its last output, "
                f"at the memory of the host and at dmesg there; {_KEPT}"
            )
        if message["end"] is None:
            return Ending(code=2, answer=None)
        if message["end"]:
            time.sleep(_LOOK)  # launchers stop rank 0 when another rank ends; it may speak first
        return Ending(code=message["end"], answer=message["answer"])

    def _wait_for_end(self) -> dict[str, Any]:
        """The end that rank 0 says after this rank has failed."""
        deadline = time.monotonic() + _LAST_WORDS
        while True:
            try:
                message = self._messages.get(timeout=max(deadline - time.monotonic(), 0.1))
            except queue.Empty:
                return _GONE
            if "end" in message:
                return message

    def _say(self, message: dict[str, Any]) -> None:
        """Send a message to rank 0; if it is gone, the thread that listens notices."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        """Put what rank 0 sends into the queue, until it is gone."""
        unread = b""
        while True:
            try:
                data = self._connection.recv(2**16)
            except OSError:
                data = b""
            if not data:
                self._put(_GONE)
                return
            unread += data
            while b"\n" in unread:
                text, unread = unread.split(b"\n", 1)
                self._put(json.loads(text))

    def _put(self, message: dict[str, Any]) -> None:
        """Queue a message. At an end, this rank ends, too, if it does not do so by itself."""
        self._messages.put(message)
        if "end" in message and self._works:
            time.sleep(_GRACE)
            if self._works:
                os._exit(message["end"] or 2)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How rank 0 ended.

    Parameters
    ----------
    code : int
        Its exit code [-].
    answer : Any
        What it left for the other ranks, as plain JSON.
    """

    code: int
    answer: Any


class _EndedEarlyError(Exception):
    """Rank 0 ended before a job began."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__("rank 0 has ended")
        self.message = message


#: What a follower reads when rank 0 is gone.
_GONE: dict[str, Any] = {"end": None, "culprit": 0, "answer": None}


@contextmanager
def lead(launched: LaunchedRanks) -> Iterator[Leader]:
    """Lead all ranks of a launcher, and end them with this block.

    Parameters
    ----------
    launched : LaunchedRanks
        Of rank 0.

    Yields
    ------
    leader : Leader
        All other ranks have arrived, and wait for jobs. Without a call of its ``end`` they end
        well, or with code 2 after an error.
    """
    leader = Leader(launched)
    try:
        yield leader
    except BaseException as error:
        reason = error
        if isinstance(error, KeyboardInterrupt):  # launchers stop rank 0 when another rank ends
            reason = leader.explain(error)
        leader.end(2)
        if reason is not error:
            raise reason from error
        raise
    if not leader._is_over:
        leader.end(0)


# -- both
# ----------------------------------------------------------------------------------------------------


def _run_here(
    job: dict[str, Any], launched: LaunchedRanks, store: Any, number: int, interface: str | None
) -> Any:
    """Run one job in this process, as one of the ranks; the cores that it may use stay."""
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


def _name_key(launched: LaunchedRanks) -> str:
    """Where the store of a run says how rank 0 is reached."""
    return f"perfkit, {launched.run}"


def _open_store(launched: LaunchedRanks, patience: float) -> Any:
    """The store of PyTorch where the ranks meet: that of torchrun, or one of rank 0."""
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


#: Where ports of no service begin [-].
_FIRST_FREE = 20_000


def _keep_alive(connection: socket.socket) -> None:
    """Let a connection break if the other node does not answer any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _INTERVAL, "TCP_KEEPCNT": _PROBES}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _list_ranks(ranks: list[int]) -> str:
    """Ranks in words, the first ones where they are many."""
    named = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) == 1:
        return f"rank {named}"
    if len(ranks) > 8:
        named += f" and {len(ranks) - 8} more"
    return f"ranks {named}"
