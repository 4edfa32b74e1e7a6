"""Training logs of Megatron-LM, torchtitan, Primus, NeMo and MaxText: the time of an iteration, and
what the log states of its run.

`read_training_log` is the way in: `perfkit.readers.training_lines` finds the lines of steps,
`perfkit.readers.training_facts` the arguments before them, and `perfkit.readers.training_models`
says what these mean.
"""

import os
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import polars as pl

from perfkit.ground.callers import find_stacklevel
from perfkit.ground.files import check_path, check_paths
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Sections, Table, Tabular, write_notes
from perfkit.ground.units import (
    check_choice,
    check_positive,
    check_type,
    escape,
    format_time,
    show,
)
from perfkit.readers.log_text import COLOURS, has_ending, list_files, read_text
from perfkit.readers.measured_jitter import Jitter, find_jitter_of_steps
from perfkit.readers.measured_steps import MeasuredStep
from perfkit.readers.training_facts import find_contradiction, find_facts, find_peak_memory
from perfkit.readers.training_lines import (
    Event,
    StepLine,
    find_events,
    find_step_lines,
    name_refused,
)
from perfkit.readers.training_models import LoggedRun, describe_run
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer
from perfkit.workloads.transformer_presets import find_preset

#: First iterations after each start that do not count, unless told otherwise [-]; docs/formulas.md,
#: table 4.5.
WARM_UP = 10
#: Endings of the files of a folder that are taken for logs.
_SUFFIXES = (".log", ".out", ".txt", ".stdout", ".output")
#: Characters before the first step in which arguments are looked for [-].
_HEAD = 20_000_000
#: How far the parameters of a model may be from those that a log counts, which may be padded or
#: rounded [-].
_PARAMETER_TOLERANCE = 0.02
#: Steps that a report shows [-].
_SHOWN = 50
#: Characters from which on a log shows how far it is read [-].
_LONG = 20_000_000
#: How far the clock of a log may be from its tokens a second [-]; docs/formulas.md, table 4.5.
_CLOCK_TOLERANCE = 0.1
_ADVICE = "name the output of a training run"
_READ = "read are the lines of Megatron-LM, Megatron-Bridge, NeMo, Primus, torchtitan, MaxText and nanoGPT"
#: Fields without which there is no model.
_NEEDED = ("batch", "sequence", "layers", "hidden", "heads", "vocabulary", "positions")
_STRATEGY = tuple(field.name for field in fields(Strategy))
_MODEL = tuple(field.name for field in fields(Transformer) if field.name != "family")


class TrainingLogWarning(UserWarning):
    """A training log contradicts itself, or states something that is not carried over."""


@dataclass(frozen=True)
class TrainingLog(Tabular):
    """What the log of a training run says.

    Parameters
    ----------
    name : str
        Its file.
    dialect : str
        Whose lines of steps it has: ``megatron`` (also Primus and Megatron-Bridge), ``torchtitan``,
        ``nemo``, ``maxtext``, ``megatron-bridge`` or ``nanogpt``.
    steps : polars.DataFrame
        A row for each printed step: iteration; seconds of an iteration [s]; iterations that it is the
        mean of; batch; tokens_per_s_per_gpu, flop_per_s_per_gpu, mfu and memory_bytes [B] where they are
        printed; line; left_out, why it does not count, null where it does.
    configuration : dict of str to value
        What the log states of its run, by its own names.
    run : LoggedRun
        The same in perfkit's words.
    summary : MeasuredStep
        The time of an iteration, and what was printed beside it.
    notes : tuple of str
        What the log contradicts, and what is not carried over.
    """

    report_title = "A training run"

    name: str
    dialect: str
    steps: Table
    configuration: dict[str, Any]
    run: LoggedRun
    summary: MeasuredStep
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Time of an iteration [s]."""
        return self.summary.seconds

    @property
    def ranks(self) -> int | None:
        """GPUs of the run; None where the log does not say [-]."""
        return self.run.ranks

    @property
    def stack(self) -> str | None:
        """The software, one of `perfkit.stacks`."""
        return self.run.stack

    @property
    def execution(self) -> str | None:
        """``eager``, ``compiled`` or ``graphs``; None for what the software does."""
        return self.run.execution

    def workload(self, preset: str | None = None, **given: Any) -> Transformer:
        """The model of the run, as the log states it.

        Parameters
        ----------
        preset : str, optional
            A published model, one of `perfkit models`, whose sizes are taken where the log states
            none.
        **given : value
            Fields of a `Transformer` that the log does not state, or that replace what it states.

        Returns
        -------
        workload : Transformer
            One iteration of it.

        Raises
        ------
        ValueError
            For fields that neither the log states nor are given, by name, and for an unknown preset.

        Warns
        -----
        TrainingLogWarning
            Where it has another number of parameters than the log counts.
        """
        for key in given:
            check_choice("field of a Transformer", key, _MODEL)
        if preset is not None:
            find_preset(preset)  # a wrong name is refused, also where the log states all
        stated = {**self.run.model, **given}
        name = preset or self.run.preset
        missing = [key for key in _NEEDED if key not in stated]
        if missing and name is not None:
            sizes = stated if preset is None else {**_drop_shape(self.run.model), **given}
            return Transformer.preset(name, **sizes)
        if missing:
            examples = ", ".join(f"{key}=..." for key in missing)
            raise ValueError(
                f"{self.name} does not state {', '.join(missing)}; give them, "
                f"log.workload({examples}), or name the model, log.workload('llama-3-8b')"
            )
        stated.setdefault("name", "logged")
        stated.setdefault("causal", True)
        model = Transformer(**stated)
        self._check_parameters(model)
        return model

    def _check_parameters(self, model: Transformer) -> None:
        """Warn of a model with another number of parameters than the software counted."""
        counted = self.run.parameters
        if counted is None:
            return
        built = model.graphs()[0].parameters
        if abs(built / counted - 1) > _PARAMETER_TOLERANCE:
            _warn(
                f"{self.name} counts {counted:,} parameters, and the model that it states has {built:,}; "
                "check its fields, log.workload(), and give those that differ"
            )

    def strategy(self, **given: Any) -> Strategy:
        """How the GPUs of the run shared the model, as the log states it.

        Parameters
        ----------
        **given : value
            Fields of a `Strategy` that the log does not state, or that replace what it states.

        Returns
        -------
        strategy : Strategy
            Of all GPUs.

        Raises
        ------
        ValueError
            Where neither the log nor an argument says how many replicas there are.
        """
        for key in given:
            check_choice("field of a Strategy", key, _STRATEGY)
        stated = {**self.run.strategy, **given}
        if "dp" not in stated:
            raise ValueError(
                f"{self.name} does not state how many GPUs took part; give the replicas, "
                "log.strategy(dp=8), or log.as_run(model, dp=8) as a row for pk.tune"
            )
        return Strategy(**stated)

    def as_run(self, model: Transformer, **given: Any) -> dict[str, Any]:
        """A row for `perfkit.tune`.

        Parameters
        ----------
        model : Transformer
            The model of all runs.
        **given : value
            Fields of a `Strategy` that the log does not state, or that replace what it states.

        Returns
        -------
        row : dict of str to value
            Seconds; the strategy; what the log states of its model that differs from `model`; the
            software.

        Raises
        ------
        ValueError
            For anything but a model, and as `strategy` does.
        """
        if not isinstance(model, Transformer):
            raise ValueError(
                f"model is {show(model)}; it must be the Transformer of all runs, such as log.workload()"
            )
        strategy = self.strategy(**given)
        row: dict[str, Any] = {"seconds": self.seconds}
        for item in fields(Strategy):
            value = getattr(strategy, item.name)
            if value != item.default:
                row[item.name] = value
        for key, value in self.run.model.items():
            if key in ("name", "causal") or key in row or getattr(model, key) == value:
                continue
            row[key] = value
        if self.execution is not None:
            row["execution"] = self.execution
        if self.stack is not None:
            row["stack"] = self.stack
        return row

    def jitter(self) -> Jitter:
        """How much the time that a rank takes for a step can vary, from how the steps vary.

        Returns
        -------
        jitter : Jitter
            A bound, as a log has the time of all ranks together. Its `spread` is the ``jitter`` of
            `Prediction.cost`, which also takes the log itself.

        Raises
        ------
        ValueError
            For a log with one step that counts, or with steps that vary more than ranks of their own could
            make them.
        """
        counted = self.steps.filter(pl.col("left_out").is_null())
        return find_jitter_of_steps(
            self.name, counted["seconds"].to_list(), counted["iterations"].to_list(), self.ranks
        )

    def table(self) -> Table:
        """The steps.

        Returns
        -------
        frame : polars.DataFrame
            As `steps`.
        """
        return self.steps

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        if self.configuration:
            stated = [(key, str(value)) for key, value in self.configuration.items()]
            yield "What the log states", [("name", "value"), *stated]
        yield f"Its first {_SHOWN} steps", self.steps.head(_SHOWN)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        return f"{self.name} ({self.dialect}): {self.summary.describe()}"

    def explain(self) -> str:
        """Say what was read.

        Returns
        -------
        text : str
            The time, why steps were left out, what the log states, what is taken where it is silent,
            and its notes.
        """
        texts = [self.headline()]
        reasons = Counter(self.steps["left_out"].drop_nulls().to_list())
        for reason, count in reasons.items():
            texts.append(f"  left out: {count} of {len(self.steps)} printed steps, {reason}")
        run_fields = {**self.run.model, **self.run.strategy}
        stated = [name for name in run_fields if name not in self.run.taken]
        taken = [name for name in run_fields if name in self.run.taken]
        for said, names in (("stated", stated), ("not stated, taken", taken)):
            if names:
                words = ", ".join(f"{name} {run_fields[name]}" for name in names)
                texts.append(f"  {said}: {words}")
        texts += write_notes("note", self.notes)
        return "\n".join(texts)

    def __repr__(self) -> str:
        return self.headline()


def _drop_shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model beside those that a preset has."""
    kept = ("batch", "sequence", "dtype", "mixed", "optimizer", "fused", "fp8_recipe", "attention")
    return {key: value for key, value in model.items() if key in kept}


# -- reading
# --------------------------------------------------------------------------------------------------


def read_training_log(
    path: str | Path, *, warm_up: int = WARM_UP, progress: bool = True
) -> TrainingLog:
    """Read the log of a training run: Megatron-LM, Megatron-Bridge, NeMo, Primus, torchtitan, MaxText
    or nanoGPT.

    Parameters
    ----------
    path : str or Path
        What the run printed, also compressed with gzip, with colours, or with the prefixes of
        launchers.
    warm_up : int, optional
        First iterations after each start that do not count; at most half of the printed steps of a
        start are left out so [-].
    progress : bool, optional
        Whether long logs show how far they are.

    Returns
    -------
    log : TrainingLog
        Its steps, their median, and what it states of its run.

    Raises
    ------
    ValueError
        For a file without such lines, with what it looks like; and for one with several runs.

    Warns
    -----
    TrainingLogWarning
        Where the log contradicts itself.

    Notes
    -----
    Megatron-LM and torchtitan print means since the time before. One does not count if it holds one of the first
    `warm_up` iterations after a start; if a checkpoint, an evaluation or a profile was written since
    the step before; or if its batch is not that of the last step (a ramp). torchtitan prints no
    times: they follow from tokens a second, batch, sequence and GPUs, or else from its clock.

    Examples
    --------
    >>> import tempfile
    >>> line = " iteration {}/ 50 | elapsed time per iteration (ms): 400.0 | global batch size: 16 |"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "run.log"
    ...     _ = path.write_text("\\n".join(line.format(n) for n in range(1, 51)))
    ...     read_training_log(path).summary.describe()
    '400 ms an iteration; 40 iterations, 10 skipped'
    """
    check_threads()
    check_type("progress", progress, bool)
    warm_up = _check_warm_up(warm_up)
    file = check_path("path", path)
    if file.is_dir():
        raise ValueError(
            f"path is {show(str(path), 200)}, a folder; read_training_logs takes folders and several files"
        )
    text = read_text(file, _ADVICE)
    with _show_progress(file.name, len(text), progress) as note:
        return parse_training_log(text, file=file.name, warm_up=warm_up, note=note)


def read_training_logs(
    paths: str | Path | Sequence[str | Path], *, warm_up: int = WARM_UP, progress: bool = True
) -> list[TrainingLog]:
    """Read several training logs, one for each run, as `read_training_log` does.

    Parameters
    ----------
    paths : str, Path or sequence of them
        Logs, or a folder, whose .log, .out, .txt, .stdout and .output files are read.
    warm_up : int, optional
        As in `read_training_log` [-].
    progress : bool, optional
        Whether long logs show how far they are.

    Returns
    -------
    logs : list of TrainingLog
        One for each file with steps, in the order of their names or as given.

    Raises
    ------
    ValueError
        Where no file has steps.

    Warns
    -----
    TrainingLogWarning
        For each file that is left out, and why.
    """
    check_type("progress", progress, bool)
    warm_up = _check_warm_up(warm_up)
    files = check_paths("paths", paths)
    if isinstance(paths, str | os.PathLike) and files[0].is_dir():
        folder = files[0]
        files = [file for file in list_files(folder) if has_ending(file, _SUFFIXES)]
        if not files:
            raise ValueError(
                f"{show(str(folder), 200)} holds no {', '.join(_SUFFIXES)} file; name the logs one by one"
            )
    logs = []
    faults = []
    for file in files:
        try:
            logs.append(read_training_log(file, warm_up=warm_up, progress=progress))
        except ValueError as error:
            faults.append(str(error))
    if not logs:
        raise ValueError(f"no file holds steps of training; {faults[0]}")
    for fault in faults:
        _warn(f"{fault}; the file is not used")
    return logs


def parse_training_log(
    text: str,
    *,
    file: str = "text",
    warm_up: int = WARM_UP,
    note: Callable[[float], None] | None = None,
) -> TrainingLog:
    """Read the text of a training log, see `read_training_log`.

    Parameters
    ----------
    text : str
        The log.
    file : str, optional
        Its name, for messages.
    warm_up : int, optional
        As in `read_training_log` [-].
    note : callable, optional
        Takes the share of the text that was read.

    Returns
    -------
    log : TrainingLog
        As of `read_training_log`.

    Raises
    ------
    ValueError
        As `read_training_log` does.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text is {show(text)}; it must be the text of a log, a str; read_training_log takes a file"
        )
    warm_up = _check_warm_up(warm_up)
    name = escape(file, 200)
    if "\x1b[" in text:
        text = COLOURS.sub("", text)
    found = find_step_lines(text, note or _ignore)
    if found is None:
        _refuse(name, text)
    events = find_events(text)
    lines, starts = _order_steps(found.lines, events)
    head = _find_head(text, lines[0].line)
    dialect = found.dialect.name
    facts = find_facts(head, dialect)
    _check_one_run(name, text, events, facts.stated, dialect)
    run = describe_run(facts.stated, dialect)
    notes = [*facts.notes, *run.notes]
    spans = [1] * len(lines)
    if found.dialect.is_mean:
        spans = _count_spans(lines, starts)
    steps = _make_steps(name, lines, starts, spans, events, run, warm_up, notes)
    _take_printed_batch(steps, run, notes)
    summary = _summarize(name, steps, run, find_peak_memory(text))
    for text_of_note in notes:
        _warn(f"{name}: {text_of_note}")
    return TrainingLog(name, dialect, steps, dict(facts.stated), run, summary, tuple(notes))


def _check_warm_up(warm_up: int) -> int:
    """Iterations that do not count, checked."""
    return check_positive("warm_up", warm_up, integer=True, zero=True)


def _take_printed_batch(steps: Table, run: LoggedRun, notes: list[str]) -> None:
    """Take the last batch that is printed, which a ramp may not have brought to the stated one."""
    batches = steps["batch"].drop_nulls()
    if batches.is_empty():
        return
    printed = batches[-1]
    stated = run.model.get("batch")
    if stated is not None and stated != printed:
        notes.append(
            f"the arguments state a batch of {stated} and the last step has {printed:g}, which is taken"
        )
    run.model["batch"] = int(printed)


def _ignore(share: float) -> None:
    """Note nothing."""


@contextmanager
def _show_progress(name: str, length: int, wanted: bool) -> Iterator[Callable[[float], None]]:
    """Show how far a long log is read; what is yielded takes the share."""
    if not wanted or length < _LONG:
        yield _ignore
        return
    from tqdm import tqdm

    with tqdm(total=1.0, desc=name, delay=1, bar_format="{desc}: {percentage:.0f} %") as bar:

        def note(share: float) -> None:
            bar.update(share - bar.n)

        yield note


def _warn(text: str) -> None:
    """Warn of a log."""
    warnings.warn(escape(text, 500), TrainingLogWarning, stacklevel=find_stacklevel())


def _refuse(name: str, text: str) -> NoReturn:
    """Say that there are no steps, and what it looks like."""
    known = name_refused(text)
    if known:
        raise ValueError(
            f"{name} is of {known}; it is not read: give pk.tune the seconds of an iteration yourself, "
            "[{'seconds': 1.2, 'dp': 8, ...}]"
        )
    raise ValueError(f"{name} holds no step of a training run; {_READ}; {_ADVICE}")


def _find_head(text: str, line: int) -> str:
    """The text up to the first step."""
    place = 0
    for _ in range(line - 1):
        place = text.find("\n", place) + 1
    return text[max(0, place - _HEAD) : place]


def _check_one_run(
    name: str, text: str, events: Sequence[Event], stated: Mapping[str, Any], dialect: str
) -> None:
    """Refuse a log whose starts have different arguments."""
    starts = [event.line for event in events if event.kind == "start"]
    if dialect == "torchtitan":
        contradiction = find_contradiction(text)
        if contradiction:
            raise ValueError(
                f"{name} holds several runs: {contradiction}; make one file for each run"
            )
        return
    if len(starts) < 2 or "------ arguments ------" not in text:
        return
    lines = text.split("\n")
    for line in starts:
        if "- arguments -" not in lines[line - 1]:
            continue
        block = "\n".join(lines[line - 1 : line + 1_000])
        block = block.partition("end of arguments")[0]
        for key, value in find_facts(block, dialect).stated.items():
            if key in stated and stated[key] != value:
                raise ValueError(
                    f"{name} holds several runs: {key} is {show(stated[key])} at first, and {show(value)} "
                    f"after line {line}; make one file for each run"
                )


def _order_steps(
    lines: Sequence[StepLine], events: Sequence[Event]
) -> tuple[list[StepLine], list[int]]:
    """Steps without those that other ranks print again, and the position of the first step of each
    start."""
    starts_of_log = [event.line for event in events if event.kind == "start"]
    kept: list[StepLine] = []
    starts: list[int] = []
    for line in lines:
        if not kept:
            starts.append(0)
        else:
            begun = bisect_right(starts_of_log, line.line) > bisect_right(
                starts_of_log, kept[-1].line
            )
            if line.iteration == kept[-1].iteration and not begun:
                continue
            if line.iteration < kept[-1].iteration or begun:
                if not begun and len(kept) > 1 and line.iteration == kept[-2].iteration:
                    continue  # a slower rank
                starts.append(len(kept))
        kept.append(line)
    return kept, starts


def _make_steps(
    name: str,
    lines: Sequence[StepLine],
    starts: Sequence[int],
    spans: Sequence[int],
    events: Sequence[Event],
    run: LoggedRun,
    warm_up: int,
    notes: list[str],
) -> Table:
    """A row for each step, with why it does not count."""
    seconds = _find_seconds(name, lines, starts, spans, run, notes)
    batches = [line.batch for line in lines]
    warming = _find_warm_up(lines, starts, spans, warm_up)
    disturbed = _find_disturbed(lines, events)
    printed_batches = [batch for batch in batches if batch is not None]
    reasons: list[str | None] = []
    for place, (time, batch) in enumerate(zip(seconds, batches, strict=True)):
        reason = None
        if place in warming:
            reason = "warm-up"
        elif place in disturbed:
            reason = disturbed[place]
        elif batch is not None and batch != printed_batches[-1]:
            reason = "another batch"
        elif time is None or time <= 0:
            reason = "no time"
        reasons.append(reason)
    if all(reason is not None for reason in reasons):
        _restore(reasons, seconds, notes, name)
    columns: dict[str, Any] = {
        "iteration": [line.iteration for line in lines],
        "seconds": seconds,
        "iterations": spans,
        "batch": batches,
    }
    for key in ("tokens_per_s_per_gpu", "flop_per_s_per_gpu", "mfu"):
        columns[key] = [getattr(line, key) for line in lines]
    columns["memory_bytes"] = [line.memory for line in lines]
    columns["line"] = [line.line for line in lines]
    columns["left_out"] = reasons
    schema = {key: pl.Float64 for key in columns} | {
        "iteration": pl.Int64,
        "iterations": pl.Int64,
        "line": pl.Int64,
        "left_out": pl.String,
    }
    return pl.DataFrame(columns, schema=schema)


def _find_warm_up(
    lines: Sequence[StepLine], starts: Sequence[int], spans: Sequence[int], warm_up: int
) -> set[int]:
    """Steps that hold one of the first iterations after a start, at most half of those of a start."""
    warming = set()
    for begin, end in pairwise([*starts, len(lines)]):
        most = (end - begin) // 2
        first = lines[begin].iteration - spans[begin]
        for place in range(begin, begin + most):
            if lines[place].iteration - spans[place] < first + warm_up:
                warming.add(place)
    return warming


def _restore(
    reasons: list[str | None], seconds: Sequence[float | None], notes: list[str], name: str
) -> None:
    """Let steps beside checkpoints count where there are no others."""
    usable = [place for place, time in enumerate(seconds) if time is not None and time > 0]
    if not usable:
        raise ValueError(
            f"{name} prints no time of a step that is above 0, nor what it follows from; give pk.tune the "
            "seconds of an iteration yourself"
        )
    for kind in ("checkpoint", "evaluation", "profiler", "warm-up", "another batch"):
        places = [place for place in usable if reasons[place] == kind]
        if places:
            for place in places:
                reasons[place] = None
            notes.append(f"all steps are beside a start, a checkpoint or the like; {kind} counts")
            return


def _count_spans(lines: Sequence[StepLine], starts: Sequence[int]) -> list[int]:
    """Iterations that each printed time is the mean of."""
    spans = []
    begins = set(starts)
    for place, line in enumerate(lines):
        if place not in begins:
            spans.append(max(1, line.iteration - lines[place - 1].iteration))
            continue
        next_place = place + 1
        is_last = next_place == len(lines) or next_place in begins
        step = 1 if is_last else max(1, lines[next_place].iteration - line.iteration)
        # the first step alone is printed before each tenth one
        spans.append(1 if line.iteration % step else step)
    return spans


def _find_disturbed(lines: Sequence[StepLine], events: Sequence[Event]) -> dict[int, str]:
    """Steps before which something else happened since the step before, and what."""
    numbers = [line.line for line in lines]
    disturbed: dict[int, str] = {}
    for event in events:
        place = bisect_right(numbers, event.line)
        if event.kind != "start" and 0 < place < len(lines):
            disturbed.setdefault(place, event.kind)
    return disturbed


def _find_seconds(
    name: str,
    lines: Sequence[StepLine],
    starts: Sequence[int],
    spans: Sequence[int],
    run: LoggedRun,
    notes: list[str],
) -> list[float | None]:
    """Time of an iteration of each step [s]: as printed, from tokens a second, or by the clock."""
    if any(line.seconds is not None for line in lines):
        return [line.seconds for line in lines]
    by_clock = _time_by_clock(lines, starts, spans)
    batch, sequence, ranks = run.model.get("batch"), run.model.get("sequence"), run.ranks
    if not (batch and sequence and ranks):
        if all(time is None for time in by_clock):
            missing = [
                key
                for key, value in (("batch", batch), ("sequence", sequence), ("ranks", ranks))
                if not value
            ]
            raise ValueError(
                f"{name} prints tokens a second and no time, and does not state {', '.join(missing)}; keep "
                "the lines before the first step, and the times before each line"
            )
        return by_clock
    tokens = batch * sequence / ranks
    by_tokens: list[float | None] = []
    for line in lines:
        rate = line.tokens_per_s_per_gpu
        by_tokens.append(tokens / rate if rate else None)
    _compare_clock(by_tokens, by_clock, notes)
    return by_tokens


def _time_by_clock(
    lines: Sequence[StepLine], starts: Sequence[int], spans: Sequence[int]
) -> list[float | None]:
    """Time of an iteration by when lines were printed [s]."""
    begins = set(starts)
    times: list[float | None] = []
    for place, line in enumerate(lines):
        before = lines[place - 1].clock
        if place in begins or line.clock is None or before is None:
            times.append(None)
        else:
            times.append((line.clock - before) / spans[place])
    return times


def _compare_clock(
    times: Sequence[float | None], by_clock: Sequence[float | None], notes: list[str]
) -> None:
    """Note where the clock of a log says something else than its tokens a second."""
    ratios = [
        clock / time
        for time, clock in zip(times, by_clock, strict=True)
        if time and clock and clock > 0
    ]
    if len(ratios) < 3:
        return
    ratio = float(np.median(ratios))
    if abs(ratio - 1) > _CLOCK_TOLERANCE:
        typical = float(np.median([time for time in times if time]))
        notes.append(
            f"tokens a second, batch, sequence and GPUs say {format_time(typical)} an iteration, the clock "
            f"of the lines {ratio:.2f} times as much; check batch and GPUs of the log"
        )


def _summarize(name: str, steps: Table, run: LoggedRun, reported: float | None) -> MeasuredStep:
    """The step in few numbers."""
    counted = steps.filter(pl.col("left_out").is_null())
    iterations = int(counted["iterations"].sum())
    seconds = counted["seconds"].to_numpy()
    low, middle, high = np.quantile(seconds, [0.16, 0.5, 0.84]).tolist()
    memory = reported
    printed_memory = counted["memory_bytes"].drop_nulls().to_numpy()
    if len(printed_memory):
        memory = float(printed_memory.max())
    batch, sequence = run.model.get("batch"), run.model.get("sequence")
    printed = counted["batch"].drop_nulls()
    if len(printed):
        batch = int(printed[-1])
    tokens = _find_median(counted, "tokens_per_s_per_gpu")
    if tokens is None and batch and sequence and run.ranks:
        tokens = batch * sequence / (middle * run.ranks)
    return MeasuredStep(
        seconds=middle,
        spread=(high - low) / 2 / middle,
        iterations=iterations,
        skipped=int(steps["iterations"].sum()) - iterations,
        source=name,
        batch=batch,
        micro_batch=run.strategy.get("micro_batch"),
        sequence=sequence,
        ranks=run.ranks,
        dtype=run.model.get("dtype"),
        device=run.device,
        memory=memory,
        tp=run.strategy.get("tp"),
        pp=run.strategy.get("pp"),
        cp=run.strategy.get("cp"),
        dp=run.strategy.get("dp"),
        ep=run.strategy.get("ep"),
        tokens_per_s_per_gpu=tokens,
        flop_per_s_per_gpu=_find_median(counted, "flop_per_s_per_gpu"),
        mfu=_find_median(counted, "mfu"),
    )


def _find_median(steps: Table, column: str) -> float | None:
    """Median of what some steps print; None where none does."""
    values = steps[column].drop_nulls().to_numpy()
    return float(np.median(values)) if len(values) else None


def list_rows(runs: Any, model: Transformer) -> Any:
    """Rows for `perfkit.tune` of runs, some of which may be logs.

    Parameters
    ----------
    runs : object
        What was given as runs.
    model : Transformer
        The model of all runs.

    Returns
    -------
    runs : object
        The same, with a row in place of each log.
    """
    listed = [runs] if isinstance(runs, TrainingLog) else runs
    if not isinstance(listed, list | tuple):
        return listed
    return [run.as_run(model) if isinstance(run, TrainingLog) else run for run in listed]
