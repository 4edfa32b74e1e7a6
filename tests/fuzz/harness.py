"""What every fuzzer shares: how inputs are drawn and damaged, what counts as a failure, and what is told of it."""

import copy
import math
import os
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

Rng: TypeAlias = np.random.Generator
#: Makes one input in an empty folder, runs what takes it, and lets every exception escape.
Entry: TypeAlias = Callable[[Rng, Path], None]

#: Longest message [-], CPU time [s] and growth of the peak of memory [B] of one input.
LONGEST, SLOWEST, LARGEST = 1500, 10.0, 1e9
#: An input that takes this long on the clock hangs [s].
PATIENCE = 120.0
PACKAGE = str(Path(__file__).resolve().parents[2] / "perfkit") + os.sep

#: Modules with entries, each a constant ENTRIES.
MODULES = ("tests.fuzz.entries_files", "tests.fuzz.entries_api")

#: Values that have broken readers before, or might.
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 0.5, -0.0, 1e-308, 5e-324, 1e30, 1e308, -1e308, math.inf, -math.inf, math.nan, 2**31, 2**53 + 1,
    2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, True, False,
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "a", "a\nb", "\x1b[31mred\x1b[0m", "\r", "\x00", "\x7f", "\x85", "\u2028", "\u202egnp.exe", "\ud800",
    "ü" * 40, "x" * 5000, "nan", "1e400", "-inf", "../../etc/passwd", "<script>alert(1)</script>", "{0}%s$(id)",
    "𝔘", "²", "None",
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    *NUMBERS,
    *TEXTS,
    None,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, "a"],
    {"a\nb": 1},
    [[[[[[[[]]]]]]]],
)


class Nonsense(AssertionError):
    """A result that cannot be, such as a negative time."""


class Hang(KeyboardInterrupt):
    """An input ran out of patience; no border may catch this."""


def share(fraction: float) -> Callable[[Entry], Entry]:
    """Mark an entry that gets `fraction` times as many inputs as others, because each of them takes long."""

    def mark(entry: Entry) -> Entry:
        entry.share = fraction  # type: ignore[attr-defined]
        return entry

    return mark


def documents(*errors: type[Exception]) -> Callable[[Entry], Entry]:
    """Mark an entry whose code documents more errors than ValueError and OSError."""

    def mark(entry: Entry) -> Entry:
        entry.errors = errors  # type: ignore[attr-defined]
        return entry

    return mark


# Checks of what comes out.


def check_time(low: float, time: float, high: float, *, zero: bool = False) -> None:
    """Hold an estimate against sense: finite, above 0, inside its interval."""
    numbers = (low, time, high)
    if not all(math.isfinite(n) for n in numbers) or time < 0 or (time == 0 and not zero) or not low <= time <= high:
        raise Nonsense(f"time {time!r} s between {low!r} and {high!r}")


def check_prediction(prediction: Any) -> None:
    """Hold a prediction and its views against sense."""
    low, high = prediction.interval(0.8)
    check_time(low, prediction.time, high)
    parts = prediction.breakdown() if callable(prediction.breakdown) else prediction.breakdown
    values = parts["seconds"].to_list() if hasattr(parts, "columns") and "seconds" in parts.columns else []
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise Nonsense(f"parts {values}")
    repr(prediction)


# Damage.


def choose(rng: Rng, items: Sequence[Any]) -> Any:
    """One of the items, as it is (NumPy's own choice would turn them into its types)."""
    return items[int(rng.integers(len(items)))]


def junk(rng: Rng) -> Any:
    """A value that most places do not expect."""
    return copy.deepcopy(choose(rng, JUNK))


def damage_bytes(rng: Rng, data: bytes, *, alphabet: bytes = b"") -> bytes:
    """Flip, cut, repeat, insert, delete or shorten, once or more; `alphabet` is inserted, or anything."""
    found = bytearray(data)
    for _ in range(1 + int(rng.integers(10)) // 6 * int(rng.integers(1, 5))):
        size = len(found)
        start = int(rng.integers(size + 1))
        end = min(size, start + int(rng.integers(1, 65)))
        match int(rng.integers(7)):
            case 0 if size > start:
                found[start] ^= 1 << int(rng.integers(8))
            case 1 if size > start:
                found[start] = choose(rng, (0, 255, 10, 27, 48, 57, 34, int(rng.integers(256))))
            case 2:
                del found[start:end]
            case 3:
                found[start:start] = found[start:end] * int(rng.integers(1, 9))
            case 4:
                fresh = rng.bytes(int(rng.integers(1, 17)))
                found[start:start] = bytes(choose(rng, alphabet) for _ in fresh) if alphabet else fresh
            case 5 if rng.random() < 0.3:
                del found[start:]
            case 6:
                other = int(rng.integers(size + 1))
                found[start:end] = found[other : other + end - start]
    return bytes(found)


def damage_text(rng: Rng, text: str) -> str:
    """Replace numbers and words, swap, repeat and drop lines, insert odd text; once or twice."""
    for _ in range(1 + int(rng.integers(8)) // 5):
        lines = text.split("\n")
        at, other = (int(rng.integers(len(lines))) for _ in range(2))
        words = lines[at].split(" ")
        word = int(rng.integers(len(words)))
        match int(rng.integers(7)):
            case 0 | 1:
                words[word] = str(choose(rng, [repr(n) if abs(n) < 2**70 else "1" + "0" * 400 for n in NUMBERS]))
            case 2:
                words[word] = choose(rng, TEXTS)
            case 3:
                words.insert(word, choose(rng, (*TEXTS, " " * 300, "e", "-", ",", "[", '"', "=")))
            case 4:
                lines[at], lines[other] = lines[other], lines[at]
                words = lines[at].split(" ")
            case 5:
                lines[at:at] = [lines[other]] * int(rng.integers(1, 4))
                words = lines[at].split(" ")
            case 6:
                words = words[: word + 1]
        lines[at] = " ".join(words)
        text = "\n".join(lines)
    return text


def damage_tree(rng: Rng, tree: Any, *, times: int | None = None) -> Any:
    """A copy of nested dicts and lists with one or two values, keys or entries replaced, dropped or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(1 + int(rng.integers(6)) // 4 if times is None else times):
        tree = _damage_once(rng, tree)
    return tree


def _damage_once(rng: Rng, tree: Any) -> Any:
    node, kind = tree, int(rng.integers(8))
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.02:
        return junk(rng)
    while True:  # a walk down to some entry: short ones are as likely as long ones
        key = choose(rng, list(node) if isinstance(node, dict) else range(len(node)))
        below = node[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.15:
            break
        node = below
    if isinstance(below, int | float) and not isinstance(below, bool) and abs(below) < 1e300 and rng.random() < 0.5:
        node[key] = choose(rng, (-below, below * 1e6, below / 1e6, below * 2, below + 1, below - 1, below / 2, 0, 1))
        return tree
    match kind:
        case 0 | 1:
            node[key] = junk(rng)
        case 2 if isinstance(below, int | float):
            node[key] = choose(rng, NUMBERS)
        case 2 | 3:
            node[key] = choose(rng, (str(below), [below], {"a": below}, None))
        case 4:
            del node[key]
        case 5 if isinstance(node, list):
            node.insert(key, copy.deepcopy(below))
        case 5:
            node[choose(rng, TEXTS)] = copy.deepcopy(below)
        case 6 if isinstance(node, dict):
            node[choose(rng, (*TEXTS, str(key).upper(), f"{key}_"))] = node.pop(key)
        case _:
            other = choose(rng, list(node) if isinstance(node, dict) else range(len(node)))
            node[key], node[other] = node[other], node[key]
    return tree


# Running.


@dataclass
class Failure:
    """An input that must not end like this, and how to see it again."""

    entry: str
    seed: int
    number: int
    reason: str
    trace: str = ""

    def __str__(self) -> str:
        again = f"python -m tests.fuzz --entry {self.entry} --seed {self.seed} --input {self.number}"
        return f"{self.reason}\n    {again}"


@dataclass
class Outcome:
    """What became of the inputs of one entry."""

    entry: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    slowest: float = 0.0
    memory: float = 0.0
    seconds: float = 0.0


def run_one(name: str, entry: Entry, seed: int, number: int) -> tuple[str, str, str]:
    """Run one input: ``taken``, ``refused`` or ``failure``, the reason, and where it came from."""
    rng = np.random.default_rng([seed, crc32(name.encode()), number])
    errors = (ValueError, OSError, *getattr(entry, "errors", ()))
    try:
        with TemporaryDirectory(prefix="perfkit-fuzz-") as folder, _guard(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry(rng, Path(folder))
    except Hang:
        return "failure", f"hangs for more than {PATIENCE:g} s", traceback.format_exc()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of Rust are no Exception
        return ("failure" if (reason := _judge(error, errors)) else "refused"), reason, traceback.format_exc()
    return "taken", "", ""


def run(name: str, entry: Entry, count: int, seed: int, *, start: int = 0) -> Outcome:
    """Run `count` inputs of an entry and judge each of them."""
    outcome, begun = Outcome(name), time.process_time()
    for number in range(start, start + count):
        before, peak = time.process_time(), _peak()
        verdict, reason, trace = run_one(name, entry, seed, number)
        spent, grown = time.process_time() - before, _peak() - peak
        if verdict != "failure" and spent > SLOWEST:
            verdict, reason = "failure", f"takes {spent:.0f} s"
        if verdict != "failure" and grown > LARGEST:
            verdict, reason = "failure", f"takes {grown / 1e9:.1f} GB"
        outcome.inputs += 1
        outcome.taken += verdict == "taken"
        outcome.refused += verdict == "refused"
        if verdict == "failure":
            outcome.failures.append(Failure(name, seed, number, reason, trace))
        outcome.slowest, outcome.memory = max(outcome.slowest, spent), max(outcome.memory, grown)
    outcome.seconds = time.process_time() - begun
    return outcome


def deal(entries: dict[str, Entry], count: int) -> dict[str, int]:
    """Inputs of each entry, at least one, by their shares."""
    shares = {name: getattr(entry, "share", 1.0) for name, entry in entries.items()}
    whole = sum(shares.values())
    return {name: max(1, round(count * part / whole)) for name, part in shares.items()}


def gather() -> dict[str, Entry]:
    """All entries by name."""
    found: dict[str, Entry] = {}
    for module in filter(find_spec, MODULES):
        found |= import_module(module).ENTRIES
    return found


def run_named(name: str, count: int, seed: int, start: int) -> Outcome:
    """Run some inputs of an entry, in a process of its own."""
    return run(name, gather()[name], count, seed, start=start)


def hush() -> None:
    """Drop what compiled readers print of their panics."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def merge(into: Outcome, part: Outcome) -> None:
    """Add a part of the inputs of an entry to the others."""
    into.inputs, into.taken, into.refused = (
        into.inputs + part.inputs,
        into.taken + part.taken,
        into.refused + part.refused,
    )
    into.failures += part.failures
    into.slowest, into.memory = max(into.slowest, part.slowest), max(into.memory, part.memory)
    into.seconds += part.seconds


def _judge(error: BaseException, errors: tuple[type[BaseException], ...]) -> str:
    """What is wrong with an exception; nothing where it is a documented one of perfkit's, well told."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, Nonsense):
        return f"nonsense: {text}"
    if not any(frame.filename.startswith(PACKAGE) for frame in traceback.extract_tb(error.__traceback__)):
        return f"the fuzzer itself raised {kind}: {text[:200]!r}"
    if not isinstance(error, errors):
        return f"{kind}: {text[:200]!r}"
    if len(text) > LONGEST:
        return f"{kind} of {len(text)} characters: {text[:100]!r}..."
    if odd := sorted({c for c in text if not c.isprintable()}):
        return f"{kind} with control characters {odd[:5]}: {text[:200]!r}"
    return "" if text.strip() else f"{kind} without a word"


def _peak() -> float:
    """Most memory this process has had [B]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024.0 if os.uname().sysname == "Linux" else 1.0)


@contextmanager
def _guard() -> Iterator[None]:
    """End an input that hangs."""

    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
