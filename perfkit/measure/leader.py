"""Rank 0 of a launcher: it gives all other ranks their jobs, and knows why one of them is gone.

What it says and hears is in `perfkit.measure.lifelines`.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from perfkit.measure.interfaces import find_interface, is_loopback
from perfkit.measure.launchers import LaunchedRanks, write_start
from perfkit.measure.lifelines import (
    GRACE,
    KEPT,
    LAST_WORDS,
    LOOK,
    OWNER,
    PATIENCE,
    TURN,
    keep_alive,
    name_key,
    open_store,
    run_here,
)
from perfkit.measure.processes import MeasurementError
from perfkit.measure.records import read_record
from perfkit.measure.seats import Seat, check_seats, take_seat

#: Time after which rank 0 names the ranks that it waits for [s].
_TELL = 15.0
#: Longest first message of a rank; other programs may speak to the port [B].
_LONGEST_HELLO = 4096


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

    def __init__(self, launched: LaunchedRanks, *, patience: float = PATIENCE) -> None:
        self.launched = launched
        self._store = open_store(launched, patience)
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
        self._store.set(OWNER, launched.run)
        self._store.set(name_key(launched), json.dumps(place))
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
            result = run_here(job, launched, self._store, self._jobs, interface)
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
            self._condition.wait_for(find, timeout=LOOK)
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
            self._listener.join(timeout=LAST_WORDS)  # until the others have heard it

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
        with self._condition:
            while True:
                missing = [rank for rank in others if not self._has_sent(rank, kind)]
                if not missing:
                    return [self._lines[rank].arrived.pop(kind) for rank in others]
                if self._losses:
                    break
                waited = time.monotonic() - began
                if patience is not None and waited > patience:
                    raise MeasurementError(self._describe_missing(missing, waited))
                if patience is not None and waited > _TELL and not is_told:
                    print(f"perfkit: {self._describe_wait(missing)}", file=sys.stderr)
                    is_told = True
                self._condition.wait(timeout=TURN)
        raise self.explain(MeasurementError("a rank is gone"))

    def _has_sent(self, rank: int, kind: str) -> bool:
        """Whether a rank has sent a message of a kind that was not yet taken."""
        return rank in self._lines and kind in self._lines[rank].arrived

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
            for key, _ in self._selector.select(timeout=TURN):
                if key.fileobj is self._door:
                    connection, _ = self._door.accept()
                    keep_alive(connection)
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
                    f"there; {KEPT}"
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
            text = f"rank {line.rank} on {line.host} failed: {message['failed']}; {KEPT}"
            self._note_loss(Loss(rank=line.rank, text=text, may_follow=True))
        elif "interrupted" in message:
            number = message["interrupted"]
            text = f"rank {line.rank} on {line.host} was interrupted by signal {number}; {KEPT}"
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
            watch = threading.Timer(GRACE, self._give_up)
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


def _list_ranks(ranks: list[int]) -> str:
    """Ranks in words, the first ones where they are many."""
    named = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) == 1:
        return f"rank {named}"
    if len(ranks) > 8:
        named += f" and {len(ranks) - 8} more"
    return f"ranks {named}"
