"""A rank of a launcher other than the first: it runs the jobs of rank 0, and ends when that ends.

What it says and hears is in `perfkit.measure.lifelines`.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from perfkit.measure.interfaces import find_interface, is_loopback
from perfkit.measure.launchers import LaunchedRanks
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
from perfkit.measure.records import write_record
from perfkit.measure.seats import take_seat


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

    def __init__(self, launched: LaunchedRanks, *, patience: float = PATIENCE) -> None:
        self.launched = launched
        self._store = open_store(launched, patience)
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
        keep_alive(self._connection)
        self._say({"hello": launched.rank, "host": launched.host, "token": place["token"]})
        threading.Thread(target=self._listen, daemon=True).start()

    def _find_door(self, patience: float) -> dict[str, Any]:
        """Where rank 0 listens."""
        launched, key = self.launched, name_key(self.launched)
        deadline = time.monotonic() + patience
        while not self._store.check([key]):
            owner = launched.run
            if self._store.check([OWNER]):
                owner = self._store.get(OWNER).decode()
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
            time.sleep(TURN)
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
        result = run_here(job, launched, self._store, message["go"], interface)
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
                f"at the memory of the host and at dmesg there; {KEPT}"
            )
        if message["end"] is None:
            return Ending(code=2, answer=None)
        if message["end"]:
            time.sleep(LOOK)  # launchers stop rank 0 when another rank ends; it may speak first
        return Ending(code=message["end"], answer=message["answer"])

    def _wait_for_end(self) -> dict[str, Any]:
        """The end that rank 0 says after this rank has failed."""
        deadline = time.monotonic() + LAST_WORDS
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
            time.sleep(GRACE)
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
