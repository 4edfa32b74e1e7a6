"""Logs of nccl-tests and rccl-tests, old and new, as one frame.

`read_logs` is the way in: files become text, `perfkit.readers.nccl_tables` finds the tables in it,
and `_read_table` tells operation and ranks of each, from what the log names or from its figures.
"""

import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from perfkit.ground.files import LARGEST_TEXT, check_paths, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.number_formats import spell_dtype
from perfkit.ground.progress import follow
from perfkit.ground.units import check_type, escape, show
from perfkit.models.collectives import COLLECTIVES, OPERATIONS, bus_factor
from perfkit.readers.collective_rows import (
    COLUMNS,
    CollectiveRow,
    MisfitError,
    Program,
    make_frame,
    number_lines,
)
from perfkit.readers.dialects import BenchmarkDialect, find_dialect, holds_dialect, name_foreign
from perfkit.readers.log_facts import LogFacts, Setting
from perfkit.readers.log_text import COLOURS, has_ending, list_files, read_text
from perfkit.readers.nccl_facts import gather_facts, gather_file_facts
from perfkit.readers.nccl_json import holds_report, read_reports
from perfkit.readers.nccl_tables import (
    ADVICE,
    HEADER,
    NAMES,
    Communicator,
    Half,
    Table,
    find_tables,
    list_lines,
)
from perfkit.readers.rank_bounds import bound_factors, bound_ranks

#: Endings of the files of a folder that are taken for logs; others are where a table is in them.
_SUFFIXES = (".log", ".out", ".txt", ".dat", ".nccl", ".stdout")
#: What to name where a file cannot be read.
_FILE = "name the output of nccl-tests"
#: Bytes of a file of a folder in which the head of a table is looked for [B].
_SEARCHED = 2**20
_REDUCING = {name for name, collective in COLLECTIVES.items() if collective.reduces}
_ROOTED = {name for name, collective in COLLECTIVES.items() if collective.has_root}
#: Half of the last printed digit of a time, and a bit more for rounding [s].
_HALF_DIGIT = 0.00501e-6
_NCCL_TESTS = Program("nccl-tests")
#: What a table of one rank means, and the next step.
ONE_RANK = (
    "a table of one rank holds no exchange; if mpirun or srun started several ranks, build "
    "nccl-tests with MPI=1; on one node, run it with -g and the number of GPUs"
)
#: What a run prints of a report that it writes.
_WRITTEN = re.compile(r"# Writing JSON output to (\S{1,400})")
_GPU = re.compile(r"\bdevice +\d+ +\[[^\]\n]*\] +(\S[^\r\n]*)")
#: Variables that take a way of the data from NCCL, or its choice of an algorithm.
_SWITCHES_OFF = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_DISABLE"}
_SWITCHES_ON = {"NCCL_NVLS_ENABLE"}
_CHOICES = {"NCCL_ALGO", "NCCL_PROTO"}


class LogWarning(UserWarning):
    """A log contradicts itself, reports wrong results, or was read in part."""


class _Content(NamedTuple):
    """What one log holds."""

    frames: list[pl.DataFrame]
    misfit: str | None  # the first line that does not fit, and why
    unequal: str  # hosts with unequal numbers of ranks, empty for none
    settings: str  # variables that told NCCL how to exchange, empty for none
    facts: tuple[LogFacts, ...]  # one for each run
    program: Program
    devices: tuple[str, ...] = ()  # that the reader found, by another benchmark than nccl-tests


class NcclLogs(NamedTuple):
    """What logs of nccl-tests hold: their rows, and the devices and hosts that each file names."""

    rows: pl.DataFrame  # as `parse_nccl_tests` returns them
    devices: dict[str, tuple[str, ...]]  # by file, as printed, sorted
    unequal: dict[str, str]  # files whose hosts hold unequal numbers of ranks, and which
    settings: dict[str, str]  # files of runs that were told how to exchange, and by which variables
    facts: tuple[LogFacts, ...]  # what each run says besides its table, in the order of `rows`
    programs: dict[str, Program]  # by file, which benchmark wrote it


class _Bounds(NamedTuple):
    """Bounds of the bus factor, busbw / algbw, of each half of the rows, within the printed
    digits."""

    low: np.ndarray
    high: np.ndarray
    torn: np.ndarray  # whether a half contradicts itself


class _OperationName(NamedTuple):
    """Operation of a table, and why it is uncertain, empty where it is not."""

    operation: str
    note: str = ""


class _ReadTable(NamedTuple):
    """Rows of a table before the first one that contradicts the others, and the error of that
    one."""

    rows: pl.DataFrame
    misfit: MisfitError | None


# -- operation and ranks of a table
# --------------------------------------------------------------------------------------------------


def _bound_factor(halves: Sequence[Half]) -> _Bounds:
    """Bounds of the bus factor of printed rows."""
    nbytes = np.array([half.nbytes for half in halves])
    seconds = np.array([half.seconds for half in halves])
    algbw = np.array([half.algbw for half in halves])
    busbw = np.array([half.busbw for half in halves])
    algbw_half = np.array([half.algbw_half for half in halves])
    busbw_half = np.array([half.busbw_half for half in halves])
    rounding = 1e9 * (algbw_half * (seconds + _HALF_DIGIT) + algbw * _HALF_DIGIT)
    contradicts = abs(1e9 * algbw * seconds - nbytes) > 0.05 * nbytes + rounding
    torn = contradicts | ((nbytes == 0) & (algbw > 0))
    low, high = bound_factors(algbw, algbw_half, busbw, busbw_half)
    return _Bounds(np.where(torn, 0.0, low), np.where(torn, np.inf, high), torn)


def _agrees(bounds: _Bounds, operation: str, ranks: int) -> np.ndarray:
    """Halves whose bounds hold the bus factor of so many ranks; all of an unknown program."""
    if operation not in OPERATIONS:
        return np.ones(len(bounds.low), dtype=bool)
    factor = float(bus_factor(operation, ranks))
    return np.asarray((bounds.low <= factor) & (factor <= bounds.high))


def _fits(bounds: _Bounds, operation: str, ranks: int) -> bool:
    """Whether the bus factor of most rows is that of so many ranks."""
    telling = np.isfinite(bounds.high)
    return bool(not telling.any() or _agrees(bounds, operation, ranks)[telling].mean() > 0.5)


def _name_operation(table: Table, bounds: _Bounds, file: str) -> _OperationName:
    """Operation from the label, from columns and figures, or from the file name."""
    if table.label:
        return _OperationName(table.label)
    ranks = table.count().ranks
    fitting = [name for name in _list_candidates(table) if _may_be(name, bounds, ranks)]
    if len(fitting) == 1:
        return _OperationName(fitting[0])
    which = " or ".join(fitting) or "none known"
    name = _find_name_of_file(file)
    if name in fitting:
        note = f"it may be {which}; only the name of the file says {name}"
        return _OperationName(name, note)
    if ranks == 1:
        raise ValueError(ONE_RANK)
    if ranks and not fitting:
        raise ValueError(
            f"the list of devices names {ranks} ranks, no operation of so many has these "
            "figures; lines of the list may be missing"
        )
    raise ValueError(
        f"the operation is not named, by its figures it is {which}; put its name into the name of "
        "the file, such as all_gather.log"
    )


def _list_candidates(table: Table) -> list[str]:
    """Operations that print the columns of a table, and check the halves that it has checked."""
    first = table.halves[0]
    names = set(OPERATIONS)
    names = names & _ROOTED if first.root >= 0 else names - _ROOTED
    names = names & {*_REDUCING, "send_recv"} if first.redop else names - _REDUCING
    # in old logs only all_to_all has an empty column
    if "root" not in table.leading and not first.redop:
        has_empty_column = "redop" in table.leading
        names &= {"all_to_all"} if has_empty_column else {"all_gather", "send_recv"}
    has_both_halves = not table.is_in_place and any(half.in_place for half in table.halves[:2])
    if has_both_halves and first.wrong >= 0:
        # these two cannot work in place, so it is not checked there
        only_out_of_place = {"all_to_all", "send_recv"}
        is_unchecked = math.isnan(table.halves[1].wrong)
        names = names & only_out_of_place if is_unchecked else names - only_out_of_place
    return [name for name in OPERATIONS if name in names]


def _may_be(operation: str, bounds: _Bounds, ranks: int) -> bool:
    """Whether figures are those of an operation, of so many ranks where they are known."""
    if ranks:
        return _fits(bounds, operation, ranks)
    return bound_ranks(bounds.low.max(), bounds.high.min(), operation).most > 0


def _find_name_of_file(file: str) -> str:
    """The operation whose name is in the name of a file, the longest one; empty for none."""
    letters = re.sub(r"[^a-z]", "", Path(file).stem.lower())
    contained = [name for name in NAMES if name in letters]
    if not contained:
        return ""
    return NAMES[max(contained, key=len)]


def _count_ranks(table: Table, bounds: _Bounds, operation: str) -> Communicator:
    """Ranks and nodes that took part, from the list of devices or from the bus factor."""
    communicator = table.count()
    if communicator.ranks:
        return communicator
    low, high = bound_ranks(bounds.low.max(), bounds.high.min(), operation)
    # ranks come in multiples of the GPUs of a process
    step = table.gpus
    if high < math.inf and (low - 1) // step < high // step:
        low = step * math.ceil(low / step)
        high = high // step * step
    if low == high:
        return Communicator(low, None)
    if high == math.inf and low <= step and step > 1:
        return Communicator(step, None)
    raise ValueError(
        f"the log lists no ranks, by busbw / algbw they are {low} to {high:g}; keep its lines "
        "'#  Rank  0 ... device'"
    )


# -- rows and notes of a table
# --------------------------------------------------------------------------------------------------


def _describe_stray(lines: Sequence[int]) -> str:
    """Say which rows after the closing line are left out."""
    if len(lines) == 1:
        which = f"1 row after its closing line (line {lines[0]}) is left out"
    else:
        span = f"lines {lines[0]} to {lines[-1]}"
        which = f"{len(lines)} rows after its closing line ({span}) are left out"
    return f"{which}: no header says which run they belong to; use one file for each run"


def _read_table(table: Table, file: str) -> _ReadTable:
    """Rows of a table, see `_ReadTable`; warns of other problems."""
    halves = table.halves
    bounds = _bound_factor(halves)
    where = f"{file} {table.place} {halves[0].line}"
    try:
        name, note = _name_operation(table, bounds, file)
        ranks, nodes = _count_ranks(table, bounds, name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    fits = _fits(bounds, name, ranks)
    notes = [note] if note else []
    if not fits:
        notes.append(f"busbw / algbw does not fit {name} of {ranks} ranks; check the log")
    for text in [*notes, *_list_notes(table)]:
        warnings.warn(escape(f"{where}: {text}", 500), LogWarning, stacklevel=4)
    misfit = None
    if name in OPERATIONS:
        contradicts = bounds.torn | (fits & ~_agrees(bounds, name, ranks))
        if contradicts.any():
            worst = int(contradicts.argmax())
            reason = "busbw / algbw is not that of the other rows"
            if bounds.torn[worst]:
                reason = "algbw is not size / time"
            misfit = MisfitError(halves[worst].line, halves[worst].text, reason, place=table.place)
            halves = [half for half in halves if half.line < halves[worst].line]
    return _ReadTable(_make_frame(halves, file, name, ranks, nodes), misfit)


def _list_notes(table: Table) -> list[str]:
    """What a reader must know of a table, whatever its operation."""
    notes = []
    wrong = table.wrong_lines
    if wrong:
        notes.append(
            f"{len(wrong)} results hold wrong values (the first in {table.place} {wrong[0]}); do not trust them"
        )
    elif table.failed:
        notes.append("its closing line says FAILED: results were wrong; do not trust the times")
    if table.stray:
        notes.append(_describe_stray(table.stray))
    if table.unread:
        words = show(" ".join(table.unread), 60)
        notes.append(f"words after the figures of a row are not used: {words}")
    return notes


def _make_frame(
    halves: Sequence[Half], file: str, operation: str, ranks: int, nodes: int | None
) -> pl.DataFrame:
    """Halves of rows with the columns of a frame, in base units."""
    nbytes = np.array([half.nbytes for half in halves], dtype=float)
    seconds = np.array([half.seconds for half in halves], dtype=float)
    algbw = 1e9 * np.array([half.algbw for half in halves], dtype=float)
    busbw = 1e9 * np.array([half.busbw for half in halves], dtype=float)
    if operation in OPERATIONS:  # size and time have more digits than the printed bandwidth
        algbw = np.divide(nbytes, seconds, out=algbw, where=seconds > 0)
        busbw = float(bus_factor(operation, ranks)) * algbw
    count = len(halves)
    return pl.DataFrame(
        {
            "operation": [operation] * count,
            "ranks": np.full(count, ranks),
            "nodes": [nodes] * count,
            "dtype": [spell_dtype(half.dtype) for half in halves],
            "redop": [half.redop for half in halves],
            "nbytes": nbytes.astype(np.int64),
            "seconds": seconds,
            "algbw": algbw,
            "busbw": busbw,
            "in_place": [half.in_place for half in halves],
            "file": [file] * count,
            "line": [half.line for half in halves],
        },
        schema=COLUMNS,
    )


# -- one log
# --------------------------------------------------------------------------------------------------


def _read_text(name: str, text: str, partial: bool) -> _Content:
    """Frames of the tables of one log, and what does not fit in it."""
    file = escape(name, 200)
    dialect = find_dialect(text)
    if dialect is not None and not HEADER.search(text):
        return _read_dialect(dialect, file, text)
    if dialect is not None:
        warnings.warn(
            f"{file}: tables of {dialect.name} beside those of nccl-tests are not used; put them into "
            "a file of their own",
            LogWarning,
            stacklevel=3,
        )
    with reading(file, ADVICE):
        tables, facts, misfit, deaths = _find_runs(text, file, partial)
        if not tables:
            _refuse_foreign(file, text)
        for death in deaths:
            warnings.warn(escape(f"{file}: {death}", 500), LogWarning, stacklevel=4)
        read: list[_ReadTable] = []
        try:
            for table in tables:
                read.append(_read_table(table, file))
        except ValueError:
            if misfit is None or partial:
                raise
            read = []  # the line that does not fit comes first
        _compare_adapters(file, tables, facts)
        settings = _list_settings(facts)
        _warn_of_settings(file, settings)
    misfits = [*(table.misfit for table in read), misfit]
    first_misfit = next(filter(None, misfits), None)
    unequal = [table.describe_unequal_hosts() for table in tables]
    return _Content(
        [table.rows for table in read],
        misfit=None if first_misfit is None else str(first_misfit),
        unequal=next(filter(None, unequal), ""),
        settings=settings,
        facts=facts,
        program=_NCCL_TESTS,
    )


class _Runs(NamedTuple):
    """Runs of a file."""

    tables: list[Table]  # of those with rows
    facts: tuple[LogFacts, ...]  # of the same
    misfit: MisfitError | None
    deaths: list[str]  # which runs died


def _find_runs(text: str, file: str, partial: bool) -> _Runs:
    """Find the runs with rows of a printed log or of a report in JSON."""
    if holds_report(text):
        reports = read_reports(text, file)
        return _Runs([run for run in reports.runs if run.halves], reports.facts, reports.misfit, [])
    found = find_tables(text)
    tables = found.list_tables(partial=partial)
    kept = {id(table) for table in tables}
    facts = gather_facts(found.lines, found.runs, file)
    return _Runs(
        tables,
        tuple(fact for run, fact in zip(found.runs, facts, strict=True) if id(run) in kept),
        found.misfit,
        found.describe_deaths(partial=partial) if tables else [],
    )


def _read_dialect(dialect: BenchmarkDialect, file: str, text: str) -> _Content:
    """Rows of a log of another benchmark than nccl-tests."""
    with reading(file, f"pass what {dialect.name} printed"):
        plain = COLOURS.sub("", text)
        found = dialect.read(plain, file)
        facts = _split_facts(gather_file_facts(number_lines(plain), file), found.rows)
    if not found.rows and found.misfit is None:
        raise ValueError(f"{file}: {dialect.name} printed no row that is read; run it again")
    for note in found.notes:
        warnings.warn(escape(f"{file}: {note}", 500), LogWarning, stacklevel=4)
    settings = _list_settings(facts[:1])
    _warn_of_settings(file, settings)
    return _Content(
        [make_frame(found.rows, file)] if found.rows else [],
        misfit=None if found.misfit is None else str(found.misfit),
        unequal="",
        settings=settings,
        facts=facts,
        program=Program(dialect.name, found.unlike),
        devices=found.devices,
    )


def _split_facts(facts: LogFacts, rows: Sequence[CollectiveRow]) -> tuple[LogFacts, ...]:
    """Facts of a log for each of its runs: rows of one operation and of as many ranks."""
    runs: list[LogFacts] = []
    before: CollectiveRow | None = None
    for row in rows:
        is_same = before is not None and (before.operation, before.ranks) == (
            row.operation,
            row.ranks,
        )
        if not is_same:
            if runs:
                runs[-1] = replace(runs[-1], last_line=row.line - 1)
            runs.append(replace(facts, first_line=row.line if runs else 1))
        before = row
    return tuple(runs)


def _refuse_foreign(file: str, text: str) -> None:
    """Refuse the output of a known program that holds no collectives."""
    foreign = name_foreign(text)
    if foreign is not None:
        raise ValueError(f"{file}: {foreign}")


def _compare_adapters(file: str, tables: Sequence[Table], facts: Sequence[LogFacts]) -> None:
    """Warn where the network adapters that NCCL lists for a host do not divide among the ranks of a
    node: one may be missing."""
    for table, run in zip(tables, facts, strict=True):
        ranks, nodes = table.count()
        if nodes is None or nodes < 2 or ranks % nodes:
            continue
        local = ranks // nodes
        by_host: dict[str, list[str]] = {}
        for adapter in run.adapters:
            if adapter.fabric != "Socket":
                name = f"[{adapter.number}]{adapter.name}:{adapter.port}/{adapter.fabric}"
                by_host.setdefault(adapter.host, []).append(name)
        for names in by_host.values():
            if len(names) < local and local % len(names):
                warnings.warn(
                    escape(
                        f"{file}: NCCL lists {len(names)} network adapters for the {local} ranks "
                        f"of a node; one may be missing: {', '.join(names)}",
                        500,
                    ),
                    LogWarning,
                    stacklevel=4,
                )
                return


def _list_settings(facts: Sequence[LogFacts]) -> str:
    """Variables of a log that told NCCL how to exchange, such as ``NCCL_ALGO=Ring``; empty where it
    or its network plugin chose."""
    values_by_name: dict[str, list[str]] = {}
    for run in facts:
        by_plugin = {
            (setting.name, setting.value) for setting in run.settings if setting.source == "plugin"
        }
        for setting in run.settings:
            if (setting.name, setting.value) in by_plugin or not _changes_exchange(setting):
                continue
            values = values_by_name.setdefault(setting.name, [])
            if setting.value not in values:
                values.append(setting.value)
    return ", ".join(
        f"{name}={escape(' and '.join(values), 100)}"
        for name, values in sorted(values_by_name.items())
    )


def _changes_exchange(setting: Setting) -> bool:
    """Whether a variable takes a way of the data from NCCL, or its choice of an algorithm: a way that
    is left on changes nothing, and NCCL asks 1 or 2 of what it may use anyway."""
    is_zero = not setting.value.strip("0")
    if setting.name in _SWITCHES_OFF:
        return not is_zero
    if setting.name in _SWITCHES_ON:
        return is_zero
    return setting.name in _CHOICES


def _warn_of_settings(file: str, settings: str) -> None:
    """Warn of times of a run that was told how to exchange: other jobs may choose better."""
    if settings:
        warnings.warn(
            f"{file} was recorded with {settings}: its times hold for jobs with it, no others",
            LogWarning,
            stacklevel=4,
        )


# -- several logs
# --------------------------------------------------------------------------------------------------


class _Log(NamedTuple):
    """One log: its name, and its text or why it cannot be read."""

    name: str
    text: str
    fault: str | None = None


def _collect(logs: Sequence[_Log], partial: bool, progress: bool = False) -> NcclLogs:
    """Read logs into one frame; of several, those without a table are left out with a warning."""
    check_threads()
    frames: list[pl.DataFrame] = []
    devices: dict[str, tuple[str, ...]] = {}
    unequal: dict[str, str] = {}
    settings: dict[str, str] = {}
    facts: list[LogFacts] = []
    programs: dict[str, Program] = {}
    unused: list[str] = []
    written = _list_written_reports(logs)
    for log in follow("read logs", logs, progress=progress):
        file = escape(log.name, 200)
        if Path(log.name).name in written and holds_report(log.text):
            unused.append(f"{file} holds the run of {written[Path(log.name).name]} once more")
            continue
        if log.fault is not None:
            unused.append(log.fault)
            continue
        try:
            content = _read_text(log.name, log.text, partial)
        except ValueError as error:
            if len(logs) == 1:
                raise
            unused.append(str(error))
            continue
        kept = sum(map(len, content.frames))
        if content.misfit:
            if not kept and len(logs) > 1:
                unused.append(f"{file} {content.misfit}".removesuffix(f"; {ADVICE}"))
                continue
            if not partial:
                advice = f"; partial=True keeps the {kept} measurements before it" if kept else ""
                raise ValueError(f"{file} {content.misfit}{advice}")
            warnings.warn(
                f"{file} {content.misfit}; {kept or 'no'} measurements are kept",
                LogWarning,
                stacklevel=3,
            )
        frames += content.frames
        facts += content.facts
        devices[file] = content.devices or _find_devices(log.text)
        programs[file] = content.program
        if content.unequal:
            unequal[file] = content.unequal
        if content.settings:
            settings[file] = content.settings
    if not sum(map(len, frames)):
        cause = unused[0] if unused else ADVICE
        raise ValueError(f"no complete row of an nccl-tests table is there; {cause}")
    for text in unused:
        warnings.warn(f"{text}; the file is not used", LogWarning, stacklevel=3)
    return NcclLogs(pl.concat(frames), devices, unequal, settings, tuple(facts), programs)


def _list_written_reports(logs: Sequence[_Log]) -> dict[str, str]:
    """Names of the reports in JSON that printed logs name as written by their runs, with these
    logs."""
    written = {}
    if len(logs) > 1:
        for log in logs:
            if "Writing JSON output to" in log.text and not holds_report(log.text):
                for path in _WRITTEN.findall(log.text):
                    written[Path(path).name] = escape(log.name, 200)
    return written


def _find_devices(text: str) -> tuple[str, ...]:
    """Names of devices in a log, sorted."""
    if holds_report(text):
        places = [place for run in read_reports(text, "text").facts for place in run.places]
        return tuple(sorted({place.name for place in places if place.name}))
    names = set()
    for _, line in list_lines(text):
        device = _GPU.search(line) if "device" in line else None
        if device is not None:
            names.add(device[1].strip())
    return tuple(sorted(names))


def _read_logs(source: str | Path | Sequence[str | Path]) -> list[_Log]:
    """Name and text of each log; a file that is no text is a fault where there are several."""
    paths = check_paths("source", source)
    folder = paths[0] if isinstance(source, str | os.PathLike) and paths[0].is_dir() else None
    if folder:
        paths = _list_folder(folder)
        if not paths:
            raise ValueError(
                f"{show(str(source), 200)} holds no {', '.join(_SUFFIXES)} file and no table of "
                "nccl-tests; name the logs one by one"
            )
    logs = []
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{show(str(path), 200)} is no file; name a log, several, or a folder of logs"
            )
        name = path.relative_to(folder).as_posix() if folder else path.name
        try:
            logs.append(_Log(name, read_text(path, _FILE, most=LARGEST_TEXT)))
        except ValueError as error:
            if len(paths) == 1:
                raise
            logs.append(_Log(name, "", str(error)))
    return logs


def _list_folder(folder: Path) -> list[Path]:
    """Files of a folder that are logs by their ending, or that hold the head of a table."""
    logs = []
    for path in list_files(folder):
        if has_ending(path, _SUFFIXES) or _holds_table(path):
            logs.append(path)
    return logs


def _holds_table(path: Path) -> bool:
    """Whether the head of a table of nccl-tests, or a report of it, stands near the beginning of a
    file."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEARCHED)
    except OSError:
        return False
    if b"algbw" in head and HEADER.search(head.decode("utf-8", "replace")):
        return True
    if b'"bus_bw"' in head and holds_report(head.decode("utf-8", "replace")):
        return True
    return holds_dialect(head)


def read_logs(
    source: str | Path | Sequence[str | Path], *, partial: bool = False, progress: bool = False
) -> NcclLogs:
    """Read logs as `read_nccl_tests` does, with the devices that each file names."""
    check_type("partial", partial, bool)
    check_type("progress", progress, bool)
    return _collect(_read_logs(source), partial, progress)


def read_nccl_tests(
    source: str | Path | Sequence[str | Path], *, partial: bool = False, progress: bool = True
) -> pl.DataFrame:
    """Read logs of nccl-tests or rccl-tests, and reports that nccl-tests writes with ``-J FILE``.

    Parameters
    ----------
    source : str, Path or sequence of them
        A log, several, or a folder: its .log, .out, .txt, .dat, .nccl and .stdout files are read,
        and others with a table or a report, also in its subfolders. Each may be compressed with
        gzip.
    partial : bool, optional
        As in `parse_nccl_tests`.
    progress : bool, optional
        Whether to show a line on a terminal where many logs take more than two seconds.

    Returns
    -------
    frame : polars.DataFrame
        Rows of all logs, as `parse_nccl_tests` returns them; `file` is the path within the folder,
        or the name. Of a report, `line` is the number of the result.

    Warns
    -----
    LogWarning
        As `parse_nccl_tests` does; and for each of several files that has no table.
    """
    return read_logs(source, partial=partial, progress=progress).rows


def parse_nccl_tests(text: str, *, file: str = "text", partial: bool = False) -> pl.DataFrame:
    """Read output of nccl-tests or rccl-tests: old and new formats, among other lines, several runs
    in one text.

    Parameters
    ----------
    text : str
        The log.
    file : str, optional
        Name of the log, for the frame and for messages; it names the operation where the log does
        not.
    partial : bool, optional
        Whether to keep, with a warning, the rows before a line that does not fit.

    Returns
    -------
    frame : polars.DataFrame
        One row for each half of a printed row: operation, ranks, nodes (null where unknown), dtype,
        redop, nbytes [B], seconds [s], algbw and busbw [B/s], in_place, file, line. Messages of 0
        bytes are kept; programs that perfkit does not know, such as alltoallv, keep their name.

    Raises
    ------
    ValueError
        For text that is no log or is cut off, with the first line that does not fit; and where the
        operation or the ranks cannot be known.

    Warns
    -----
    LogWarning
        For a log that contradicts itself or is read in part.

    Notes
    -----
    The ranks come from the list of devices, or from busbw / algbw, which is 2 (p - 1) / p for
    all_reduce and (p - 1) / p for others (NVIDIA, nccl-tests, doc/PERFORMANCE.md). Bandwidths are
    computed from size and time, which have more digits than the printed ones.

    Examples
    --------
    >>> frame = parse_nccl_tests("67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0")
    >>> frame.select("operation", "ranks", "dtype", "nbytes", "in_place").row(1)
    ('all_reduce', 8, 'fp32', 67108864, True)
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text is {show(text)}; it must be the text of a log, a str; read_nccl_tests takes files"
        )
    check_type("partial", partial, bool)
    return _collect([_Log(file, text)], partial).rows


def list_devices(source: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """List the devices that logs name, as printed, sorted; none where the lists of devices are
    missing."""
    names: set[str] = set()
    for log in _read_logs(source):
        names.update(_find_devices(log.text))
    return tuple(sorted(names))
