"""How an input of a fuzzer is run, what counts as a failure, and what a result has to keep to."""

import os
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

import perfkit as pk
from tests.fuzz.damage import Rng, choose, vary


class Entry(NamedTuple):
    """One fuzzer: a dict ``ENTRIES`` of these by name, in a file ``entries_*.py`` of this folder,
    is found by itself.

    An input fails when `run` raises anything but a ValueError or OSError of perfkit's own words (one
    printable line of at most `LONGEST` characters), when it raises or returns what makes no sense
    (`Nonsense`; NaN, infinite or negative numbers, see `look`), or when it takes too long or too
    much memory (`SLOWEST`, `LARGEST`, `PATIENCE`).
    """

    #: Makes one input with the random numbers, in an empty folder, and runs what takes it.
    run: Callable[[Rng, Path], Any]
    #: How many inputs it gets, beside other entries.
    share: float = 1.0
    #: Whether it draws a kind of fault that was not drawn before the latest release.
    new: bool = False


#: Longest message [-], CPU time [s] and growth of the peak of memory [B] of one input; it hangs
#: after this [s].
LONGEST = 1500
SLOWEST = 10.0
LARGEST = 1e9
PATIENCE = 120.0
_HOME = TemporaryDirectory(prefix="perfkit-fuzz-")
PACKAGE = str(Path(pk.__file__).parent) + os.sep


class Nonsense(AssertionError):
    """A result that cannot be, such as a negative time."""


class Hang(KeyboardInterrupt):
    """An input ran out of patience; nothing may catch this."""


# Results.

#: Methods that show a result, with arguments to try.
VIEWS: dict[str, dict[str, Any]] = {
    "interval": {"level": (0.5, 0.999)},
    "timeline": {"level": ("module", "stage"), "depth": (None, 1, 2)},
    "modules": {"depth": (None, 1), "rank": (None, 0, 1)},
    "breakdown": {},
    "communication": {},
    "critical_path": {},
    "idle": {},
    "explain": {},
    "table": {},
    "numbers": {},
    "summary": {},
    "as_text": {},
    "parts": {},
    "regrets": {},
    "totals": {},
    "compare": {},
    "next_move": {},
    "_repr_html_": {},
}


def check_account(found: pk.Prediction, rng: Rng) -> None:
    """The account of some kernel of a prediction sums to its time in the timeline."""
    rows = found.timeline().drop_nulls("operation").to_dicts()
    kernels = [row for row in rows if row["kind"] not in ("collective", "host")]
    if not kernels:
        return
    row = choose(rng, kernels)
    account = found.explain_operation(row["operation"], rank=row["rank"])
    total = sum(step.added for step in account.steps)
    seconds = row["end_s"] - row["start_s"]
    if not np.allclose([total, account.time], seconds, rtol=1e-6, atol=1e-8 * found.time):
        raise Nonsense(f"steps of {account!r} sum to {total} s, the timeline has {seconds} s")
    account.explain()


def look(found: Any, rng: Rng) -> None:
    """Hold a result against sense and show it, by one view of many."""
    if isinstance(found, list | tuple):
        for part in found:
            look(part, rng)
    repr(found)
    if isinstance(found, float | np.ndarray):
        times = np.asarray(found)
        if not np.all(np.isfinite(times) & (times >= 0)):
            raise Nonsense(f"times {found}")
    views = [name for name in VIEWS if callable(getattr(found, name, None))]
    if isinstance(found, pk.Prediction):
        if (
            not np.isclose(found.breakdown()["time_s"].sum(), found.time, rtol=1e-9)
            or not found.time > 0
        ):
            raise Nonsense("parts do not sum to the time, or it is 0")
        look([found.lower_bound, found.serial, found.latency, found.spread], rng)
        check_account(found, rng)
    if isinstance(found, pk.Prediction | pk.PlanPrice | pk.Estimate):
        low, high = found.interval()
        if not 0 <= low <= found.time <= high < np.inf:
            raise Nonsense(f"time {found.time!r} s between {low!r} and {high!r}")
    if views:
        name = choose(rng, views)
        getattr(found, name)(**vary(rng, VIEWS[name]))
    if isinstance(found, pk.Exploration):
        table = found.table()
        low, high = table["low_s"].to_numpy(), table["high_s"].to_numpy()
        time = table["time_s"].to_numpy()
        # times that are equal but for rounding keep the order of their strategies
        in_order = np.diff(time) >= -1e-8 * time.max()
        inside = (low > 0) & (low <= time) & (time <= high) & (high < np.inf)
        if not in_order.all() or not inside.all():
            raise Nonsense(f"times {time} between {low} and {high}")
        look(found.front()["needs_bytes"].to_numpy(), rng)
        found.explain()
    if isinstance(found, pk.ShardingResult):
        look(found.prediction, rng)
    if isinstance(found, pk.Plan) and pk.Plan.from_json(found.to_json()) != found:
        raise Nonsense("another plan is read back")
    # writing and reading takes most of the time
    if isinstance(found, pk.Platform) and rng.random() < 0.1:
        text = found.to_toml()
        again = pk.Platform.from_toml(text)
        text_again = again.to_toml()
        if text_again != text and pk.Platform.from_toml(text_again) != again:
            raise Nonsense("another platform is read back")
    if isinstance(found, pk.Platform):
        look(found.gemm(512, 512, 512), rng)


# Running.


def run_one(
    name: str, entry: Entry, seed: int, number: int
) -> tuple[str, str, BaseException | None]:
    """Run one input: ``taken``, ``refused`` or ``failure``, the reason, and the error behind it."""
    rng = np.random.default_rng([seed, crc32(name.encode()), number])
    try:
        with _folder() as folder, _guard(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            look(entry.run(rng, folder), rng)
    except Hang as error:
        return "failure", f"hangs for more than {PATIENCE:g} s", error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of Rust are no Exception
        reason = _judge(error)
        return ("failure" if reason else "refused"), reason, error
    return "taken", "", None


def run(name: str, count: int, seed: int, start: int = 0) -> list[dict[str, Any]]:
    """Run `count` inputs of an entry: what became of each, why, its CPU time [s] and what it added
    to memory [B]."""
    entry, rows = gather()[name], []
    for number in range(start, start + count):
        before, peak = time.process_time(), _peak()
        verdict, reason = run_one(name, entry, seed, number)[:2]
        spent, grown = time.process_time() - before, _peak() - peak
        if spent > SLOWEST or grown > LARGEST:
            verdict, reason = "failure", reason or f"takes {spent:.0f} s and {grown / 1e9:.1f} GB"
        reason = f"{name}: {reason}\n    python -m tests.fuzz --entry {name} --seed {seed} --input {number}"
        rows.append(
            {"entry": name, "verdict": verdict, "reason": reason, "seconds": spent, "bytes": grown}
        )
    return rows


def deal(count: int, names: Iterable[str] = ()) -> dict[str, int]:
    """Inputs of each entry, at least one, by their shares; of all entries, unless named."""
    shares = {name: entry.share for name, entry in gather().items() if name in names or not names}
    return {
        name: max(1, round(count * part / sum(shares.values()))) for name, part in shares.items()
    }


def gather() -> dict[str, Entry]:
    """All entries by name, from every file ``entries_*.py`` beside this one."""
    entries: dict[str, Entry] = {}
    for path in sorted(Path(__file__).parent.glob("entries_*.py")):
        for name, entry in import_module(f"tests.fuzz.{path.stem}").ENTRIES.items():
            if name in entries:
                raise ValueError(f"two fuzzers are named {name}, one of them in {path.name}")
            entries[name] = entry
    return entries


def prepare() -> None:
    """Load what inputs of many entries import, whose time is not theirs; drop what compiled readers
    print of panics."""
    for name in ("torch._dynamo", "scipy.special", "statsmodels.robust.scale"):
        import_module(name)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _judge(error: BaseException) -> str:
    """What is wrong with an exception; nothing where it is one that perfkit documents, in one
    printable line."""
    kind, text = type(error).__name__, str(error)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(file.startswith(PACKAGE) for file in files):
        kind = kind if isinstance(error, Nonsense) else f"the fuzzer itself raised {kind}"
    elif isinstance(error, ValueError) and not files[-1].startswith(PACKAGE):
        kind = f"{kind} of {Path(files[-1]).stem}, which perfkit did not mean"
    elif (
        isinstance(error, ValueError | OSError)
        and text.strip()
        and text.isprintable()
        and len(text) <= LONGEST
    ):
        return ""
    return f"{kind} ({len(text)} characters): {text[:300]!r}"


def _peak() -> float:
    """Most memory this process has had [B]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1024.0 if os.uname().sysname == "Linux" else 1.0
    )


def _stop(*_: Any) -> None:
    raise Hang


@contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder, the working one meanwhile; the same one for all inputs, as making one takes
    long."""
    folder = Path(_HOME.name)
    try:
        with chdir(folder):
            yield folder
    finally:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _guard() -> Iterator[None]:
    """End an input that hangs."""
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
