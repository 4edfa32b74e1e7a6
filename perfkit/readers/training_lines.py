"""Lines of training logs that say how long an iteration took, by the software that prints them.

`STEP_DIALECTS` has a record for each form of line. `find_step_lines` reads them, and `find_events` what
stands between them: starts, checkpoints and evaluations.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple

#: Characters of a line that are read [-]: a step has up to 900, and the time of searches grows with
#: their number.
_LONGEST = 4_000
#: Bounds of printed numbers above 0 [-]: others are damaged, as no batch, time or rate is so small or
#: so large in any unit.
_LEAST = 1e-30
_MOST = 1e30
_NUMBER = r"([\d,]*\.?\d+(?:[eE][+-]?\d+)?)"


class PrintedValue(NamedTuple):
    """A value that lines of steps print.

    Parameters
    ----------
    field : str
        Field of `StepLine` that it is.
    marker : str
        Text before it; if it begins with a letter, no letter or digit precedes it.
    unit : float
        What a printed 1 is in base units [-].
    pattern : re.Pattern
        What stands behind the marker; its group is the number.
    """

    field: str
    marker: str
    unit: float = 1.0
    pattern: re.Pattern[str] = re.compile(rf"[\"']? *[:=] *{_NUMBER}")

    def find(self, line: str) -> float | None:
        """Find it in a line.

        Parameters
        ----------
        line : str
            The line.

        Returns
        -------
        value : float or None
            In base units; None where it is not printed, and for a number that cannot be.
        """
        place = line.find(self.marker)
        while place >= 0:
            before = line[place - 1] if place else " "
            is_part = self.marker[0].isalnum() and (before.isalnum() or before in "_-")
            match = self.pattern.match(line, place + len(self.marker))
            if match and not is_part:
                printed = float(match[1].replace(",", ""))
                is_possible = printed == 0 or _LEAST <= printed <= _MOST
                return printed * self.unit if is_possible else None
            place = line.find(self.marker, place + 1)
        return None


class StepDialect(NamedTuple):
    """A form of lines of steps.

    Parameters
    ----------
    name : str
        The software that prints them.
    markers : tuple of str
        Texts of which every such line has one.
    iteration : tuple of re.Pattern
        The group of the first one that matches is the number of the iteration; empty if lines are
        counted.
    values : tuple of PrintedValue
        What else they print; of two for one field the first that is there counts.
    is_mean : bool
        Whether a time is the mean since the line before, and not that of one iteration.
    """

    name: str
    markers: tuple[str, ...]
    iteration: tuple[re.Pattern[str], ...]
    values: tuple[PrintedValue, ...]
    is_mean: bool = False


#: Megatron-LM, megatron/training/training.py, `training_log`, from 2020 to 2026, with the names of
#: Megatron-DeepSpeed, GPT-NeoX, NeMo's Megatron-Bridge, and of Primus (AMD-AGI/Primus, training_log patches),
#: which prints a mean behind each value.
_MEGATRON = StepDialect(
    name="megatron",
    is_mean=True,
    markers=("elapsed time per iteration",),
    iteration=(re.compile(r"\biteration +(\d+)/"),),
    values=(
        PrintedValue("seconds", "elapsed time per iteration (ms)", 1e-3),
        PrintedValue("seconds", "elapsed time per iteration (s)"),
        PrintedValue("batch", "global batch size"),
        PrintedValue("flop_per_s_per_gpu", "throughput per GPU (TFLOP/s/GPU)", 1e12),
        PrintedValue("flop_per_s_per_gpu", "compute per GPU (TFLOP/s/GPU)", 1e12),
        PrintedValue("flop_per_s_per_gpu", "TFLOPs", 1e12),
        PrintedValue("flop_per_s_per_gpu", "approx flops per GPU", 1e12),
        PrintedValue("tokens_per_s_per_gpu", "tokens per GPU (tokens/s/GPU)"),
        PrintedValue("tokens_per_s_per_gpu", "tokens/s/GPU inst/harmonic mean"),
        PrintedValue("tokens_per_s_per_gpu", "Tokens per second per GPU (Tok/s/GPU)"),
        PrintedValue("memory", "hip mem usage/free/total/usage_ratio", 2.0**30),
        PrintedValue("memory", "rocm mem usage/free/total/usage_ratio", 2.0**30),
    ),
)
#: pytorch/torchtitan, torchtitan/components/metrics.py; words (wps) in 2024, tokens since.
_TORCHTITAN = StepDialect(
    name="torchtitan",
    is_mean=True,
    markers=("tps:", "wps:"),
    iteration=(re.compile(r"\bstep: *(\d+)"),),
    values=(
        PrintedValue("tokens_per_s_per_gpu", "tps"),
        PrintedValue("tokens_per_s_per_gpu", "wps"),
        PrintedValue("flop_per_s_per_gpu", "tflops", 1e12),
        PrintedValue("mfu", "mfu", 0.01),
        PrintedValue("memory", "memory", 2.0**30),
    ),
)
#: NeMo 1 (bar of Lightning, lines of DLLogger) and NeMo 2 (MegatronProgressBar). Bars print three
#: digits of `global_step`, so that only one that is whole is taken.
_NEMO = StepDialect(
    name="nemo",
    markers=("train_step_timing in s",),
    iteration=(
        re.compile(r"global_step[\"']?[:=] *(\d+)(?:\.0+)?(?=[\s,|}\]]|$)"),
        re.compile(r"\biteration (\d+)/"),
        re.compile(r"\| *(\d+)/\d+ \["),
        re.compile(r": *(\d+)it \["),
        re.compile(r"\"step\": *(\d+)"),
    ),
    values=(
        PrintedValue("seconds", "train_step_timing in s"),
        PrintedValue("batch", "global_batch_size"),
        PrintedValue("flop_per_s_per_gpu", "TFLOPS_per_GPU", 1e12),
        PrintedValue("flop_per_s_per_gpu", "tflops_per_sec_per_gpu", 1e12),
    ),
)
#: AI-Hypercomputer/maxtext, metric_logger.py.
_MAXTEXT = StepDialect(
    name="maxtext",
    markers=("completed step:",),
    iteration=(re.compile(r"\bcompleted step: *(\d+)"),),
    values=(
        PrintedValue("seconds", "seconds"),
        PrintedValue("flop_per_s_per_gpu", "TFLOP/s/device", 1e12),
        PrintedValue("flop_per_s_per_gpu", "TFLOP/s", 1e12),
        PrintedValue("tokens_per_s_per_gpu", "Tokens/s/device"),
    ),
)
#: Megatron-Bridge where its line of the iteration is missing.
_BRIDGE = StepDialect(
    name="megatron-bridge",
    markers=("MODEL_TFLOP/s/GPU",),
    iteration=(),
    values=(
        PrintedValue("seconds", "Step Time"),
        PrintedValue("flop_per_s_per_gpu", "GPU utilization", 1e12),
    ),
)
#: karpathy/nanoGPT, train.py.
_NANOGPT = StepDialect(
    name="nanogpt",
    markers=("iter ",),
    iteration=(re.compile(r"\biter (\d+): loss [\d.]+, time "),),
    values=(
        PrintedValue("seconds", ", time ", 1e-3, re.compile(rf"{_NUMBER}ms")),
        PrintedValue("mfu", ", mfu ", 0.01, re.compile(rf"{_NUMBER}%")),
    ),
)
#: All forms, those that say most first.
STEP_DIALECTS = (_MEGATRON, _TORCHTITAN, _NEMO, _MAXTEXT, _BRIDGE, _NANOGPT)


class RefusedForm(NamedTuple):
    """Lines that are known and not read."""

    pattern: re.Pattern[str]  # what they look like
    name: str  # whose they are, and why they are not read


#: Forms that are known and not read.
REFUSED = (
    RefusedForm(
        re.compile(r"CurrSamplesPerSec|RunningAvgSamplesPerSec"),
        "DeepSpeed's engine, whose samples a second are averages over several steps",
    ),
    RefusedForm(
        re.compile(r"deepspeed\.autotuning|\bautotuning_results\b|\[autotuner\.py"),
        "DeepSpeed's autotuner, whose experiments have a log each",
    ),
    RefusedForm(
        re.compile(r"[\"']train_runtime[\"']"),
        "Hugging Face's Trainer, whose train_runtime is one time of the whole run with its start",
    ),
    RefusedForm(
        re.compile(r"Train time/batch|\bthroughput/batches_per_sec\b"),
        "MosaicML's Composer, whose rates are averages over a window",
    ),
    RefusedForm(
        re.compile(r"elapsed_time_per_iteration_ms:"), "nanotron, which prints three digits"
    ),
    RefusedForm(
        re.compile(r"\d{1,9}/\d{1,9} \[[^\]\n]{0,100}\d(?:s/it|it/s)"),
        "a progress bar of Lightning or Hugging Face's Trainer, whose it/s are smoothed over many "
        "iterations",
    ),
)

#: What lines between two steps say, and what it means.
_EVENTS = {
    "---------- arguments ----------": "start",
    "Training starts at step": "start",
    "[before the start of training step]": "start",
    "aving checkpoint": "checkpoint",
    "aving a checkpoint": "checkpoint",
    "aving the checkpoint": "checkpoint",
    "aving a full checkpoint": "checkpoint",
    "aving a model weights only checkpoint": "checkpoint",
    "aved checkpoint": "checkpoint",
    "saving model to": "checkpoint",
    ".nemo model saved": "checkpoint",
    "dist-ckpt save strategy": "checkpoint",
    "validation loss at iteration": "evaluation",
    "valuating ": "evaluation",
    "Validation DataLoader": "evaluation",
    "completed eval step": "evaluation",
    "umping profiler traces": "profiler",
    "umping memory snapshot": "profiler",
}
#: Characters of a line in which a launcher says the rank [-].
_PREFIX = 160
_CLOCK = re.compile(r"(\d{4}-\d{2}-\d{2}|\b\d{8})[ T](\d{2}:\d{2}:\d{2})(?:[,.](\d{1,6}))?")
_RANK = re.compile(r"\[rank-?(\d+)(?:/\d+)?\]|\[default(\d+)\]|^ *(\d{1,6}): ")


class StepLine(NamedTuple):
    """A line that says how long an iteration took.

    Parameters
    ----------
    line : int
        Its number in the file [-].
    iteration : int
        Iteration that was the last one [-].
    seconds : float or None
        Time of an iteration, of the mean of several where not each is printed [s].
    batch : float or None
        Sequences of an iteration over all ranks [-].
    tokens_per_s_per_gpu, flop_per_s_per_gpu : float or None
        Rates of a GPU [1/s].
    mfu : float or None
        Share of the peak [-].
    memory : float or None
        Memory of a GPU [B].
    clock : float or None
        When it was printed [s].
    """

    line: int
    iteration: int
    seconds: float | None = None
    batch: float | None = None
    tokens_per_s_per_gpu: float | None = None
    flop_per_s_per_gpu: float | None = None
    mfu: float | None = None
    memory: float | None = None
    clock: float | None = None


class Event(NamedTuple):
    """Something between steps: its line [-] and its kind, ``start``, ``checkpoint``,
    ``evaluation`` or ``profiler``."""

    line: int
    kind: str


class StepLines(NamedTuple):
    """All lines of steps of a text, and their form."""

    dialect: StepDialect
    lines: list[StepLine]


def find_step_lines(text: str, note: Callable[[float], None]) -> StepLines | None:
    """Find the lines of steps.

    Parameters
    ----------
    text : str
        The log, without colours.
    note : callable
        Takes the share of the text that was read.

    Returns
    -------
    steps : StepLines or None
        In the order of the text; of several ranks those of the first one. None if there are none.
    """
    for dialect in STEP_DIALECTS:
        if any(marker in text for marker in dialect.markers):
            lines = _read_lines(text, dialect, note)
            if lines:
                return StepLines(dialect, lines)
    return None


def _read_lines(text: str, dialect: StepDialect, note: Callable[[float], None]) -> list[StepLine]:
    """Lines of steps in one form."""
    values = [value for value in dialect.values if value.marker in text]
    has_clock = not any(value.field == "seconds" for value in values)
    lines: list[StepLine] = []
    kept_rank: str | None = None
    for number, line in _list_marked(text, dialect.markers, note):
        iteration = _find_iteration(line, dialect, len(lines) + 1)
        if iteration is None:
            continue
        if not lines:
            kept_rank = _find_rank(line)
        elif kept_rank is not None and _find_rank(line) not in (None, kept_rank):
            continue
        found: dict[str, float] = {}
        for value in values:
            if value.field not in found:
                printed = value.find(line)
                if printed is not None:
                    found[value.field] = printed
        if has_clock:
            clock = _find_clock(line)
            if clock is not None:
                found["clock"] = clock
        if "seconds" in found or "tokens_per_s_per_gpu" in found:
            lines.append(StepLine(number, iteration, **found))
    return lines


def _list_marked(
    text: str, markers: tuple[str, ...], note: Callable[[float], None]
) -> Iterator[tuple[int, str]]:
    """Number and text of each line with a marker; a bar that is drawn again is a line of its own."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if number % 10_000 == 0:
            note(number / len(lines))
        if not any(marker in line for marker in markers):
            continue
        for part in line.split("\r"):
            if any(marker in part for marker in markers):
                yield number, part[:_LONGEST]


def _find_iteration(line: str, dialect: StepDialect, next_number: int) -> int | None:
    """Number of the iteration of a line; None for a line of something else."""
    if not dialect.iteration:
        return next_number
    for pattern in dialect.iteration:
        match = pattern.search(line)
        if match is not None:
            return int(match[1]) if len(match[1]) < 16 else None
    return None


def _find_rank(line: str) -> str | None:
    """Rank that a launcher put before a line."""
    match = _RANK.search(line[:_PREFIX])
    if match is None:
        return None
    return next(group for group in match.groups() if group is not None)


def _find_clock(line: str) -> float | None:
    """When a line was printed [s]."""
    match = _CLOCK.search(line)
    if match is None:
        return None
    with suppress(ValueError):
        moment = datetime.fromisoformat(f"{match[1]} {match[2]}")
        return (moment - datetime(1970, 1, 1)).total_seconds() + float(f"0.{match[3] or 0}")
    return None


def find_events(text: str) -> list[Event]:
    """Find what stands between steps.

    Parameters
    ----------
    text : str
        The log, without colours.

    Returns
    -------
    events : list of Event
        In the order of the text.
    """
    places: list[tuple[int, str]] = []
    for marker, kind in _EVENTS.items():
        place = text.find(marker)
        while place >= 0:
            places.append((place, kind))
            place = text.find(marker, place + 1)
    if not places:
        return []
    ends = list(accumulate(len(line) + 1 for line in text.split("\n")))
    return [Event(bisect_right(ends, place) + 1, kind) for place, kind in sorted(places)]


def name_refused(text: str) -> str:
    """Name the software of a log that is known and not read.

    Parameters
    ----------
    text : str
        The log.

    Returns
    -------
    name : str
        What it is; empty for none that is known.
    """
    for form in REFUSED:
        if form.pattern.search(text):
            return form.name
    return ""
