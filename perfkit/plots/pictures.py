"""Pictures of charts, drawn in a process of their own: if drawing fails or crashes, this process
goes on."""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any, NamedTuple, cast

#: Longest time of one picture; 10,000 points take some seconds [s].
PATIENCE = 300.0
#: What the process runs: each line of its input is a call of vl_convert, as JSON. It answers with a
#: line of JSON, the number of bytes or an error, and the bytes.
_PROGRAM = """
import json, sys
import vl_convert
answers = sys.stdout.buffer
for line in sys.stdin.buffer:
    name, arguments = json.loads(line)
    try:
        made = getattr(vl_convert, name)(**arguments)
        content = made.encode() if isinstance(made, str) else made
        head = {"size": len(content)}
    except Exception as error:
        content = b""
        head = {"size": 0, "error": str(error)}
    answers.write(json.dumps(head).encode() + b"\\n" + content)
    answers.flush()
"""


class PictureError(RuntimeError):
    """A picture that could not be drawn; its message is one line."""


class _Painter:
    """The process that draws; it starts with the first picture and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: subprocess.Popen[bytes] | None = None  # it belongs to the parent
        self._owner = 0
        self._lock = threading.Lock()

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process if none runs; a forked child starts one of its own."""
        if self._owner != os.getpid():
            self._inherited, self._process = self._process, None
        elif self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM],
                    env=settings,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise PictureError(
                    f"the process that draws charts cannot start: {error.strerror}"
                ) from error
            self._owner = os.getpid()
        return self._process

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that nobody read
                    stream.close()

    def ask(self, name: str, arguments: dict[str, Any]) -> bytes:
        """Call a function of vl_convert in the process; what it makes, as bytes."""
        with self._lock:
            process = self.start()
            try:
                _send(process, name, arguments)
                answer = _receive(process)
            except (BrokenPipeError, EOFError) as error:
                code = process.wait()
                self.stop()
                raise PictureError(_explain_end(code)) from error
            except BaseException:  # also an interrupt: the answer would be taken for the next one
                self.stop()
                raise
        if answer.error is not None:
            reason = answer.error.strip().split("\n")[0][:200]
            raise PictureError(f"a chart cannot be drawn: {reason}")
        return answer.content


class _Answer(NamedTuple):
    """What the process answers: the content of a file, or why there is none."""

    content: bytes
    error: str | None


def _send(process: "subprocess.Popen[bytes]", name: str, arguments: dict[str, Any]) -> None:
    """Send a call of a function to the process."""
    requests = cast("IO[bytes]", process.stdin)
    requests.write(json.dumps([name, arguments]).encode() + b"\n")
    requests.flush()


def _receive(process: "subprocess.Popen[bytes]") -> _Answer:
    """Read the answer: a line of JSON, and as many bytes as it says."""
    answers = cast("IO[bytes]", process.stdout).fileno()
    deadline = time.monotonic() + PATIENCE
    received = b""
    while b"\n" not in received:
        received += _read_some(answers, deadline)
    line, _, content = received.partition(b"\n")
    head = json.loads(line)
    parts = [content]
    missing = head["size"] - len(content)
    while missing > 0:
        part = _read_some(answers, deadline)
        parts.append(part)
        missing -= len(part)
    error = str(head["error"]) if "error" in head else None
    return _Answer(b"".join(parts), error)


def _read_some(descriptor: int, deadline: float) -> bytes:
    """Wait for the next bytes; an EOFError at the end, a PictureError after the deadline."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise PictureError(f"a chart was not drawn within {PATIENCE:.0f} s")
    content = os.read(descriptor, 2**20)
    if not content:
        raise EOFError
    return content


def _explain_end(code: int) -> str:
    """Why the process that draws may have ended."""
    text = f"the process that draws charts ended with code {code}"
    if code < 0:
        text = f"the process that draws charts was ended by signal {-code}"
    try:
        import resource  # Windows has none

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            text += f"; it may need more than the {limit / 1e9:.0f} GB of ulimit -v"
    except ImportError:
        pass
    return text


_PAINTER = _Painter()
atexit.register(_PAINTER.stop)
if hasattr(os, "register_at_fork"):
    # another thread may have held the lock
    os.register_at_fork(after_in_child=lambda: setattr(_PAINTER, "_lock", threading.Lock()))


def start_painter() -> None:
    """Start the process that draws, so that it gets ready while this one computes."""
    _PAINTER.start()


def draw_picture(spec: str, form: str = "svg", **options: Any) -> bytes:
    """Draw a chart.

    Parameters
    ----------
    spec : str
        The chart in Vega-Lite, as JSON.
    form : str, optional
        ``svg``, ``png`` or ``pdf``.
    **options : object
        Options of vl_convert, such as ``scale``.

    Returns
    -------
    picture : bytes
        Content of a file.

    Raises
    ------
    PictureError
        If it cannot be drawn; this process goes on.
    """
    return _PAINTER.ask(f"vegalite_to_{form}", {"vl_spec": spec, **options})


def bundle_script(snippet: str) -> str:
    """A script with all the code that it imports.

    Raises
    ------
    PictureError
        If it cannot be made; this process goes on.
    """
    return _PAINTER.ask("javascript_bundle", {"snippet": snippet}).decode()
