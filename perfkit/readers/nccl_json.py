"""Reports that nccl-tests 2.17 and later write as JSON with ``-J FILE``.

`read_reports` makes of each report the same records as `perfkit.readers.nccl_tables` and
`perfkit.readers.nccl_facts` make of a printed log. The form is that of NVIDIA, nccl-tests, src/util.cu
(its JSON_FILE_VERSION 1 and 2): a report is one object, whose `results` hold both halves of a row.
"""

import json
import math
import re
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from perfkit.ground.units import escape, show
from perfkit.readers.collective_rows import MisfitError
from perfkit.readers.log_facts import LogFacts, Options, Statement
from perfkit.readers.nccl_facts import collect_report
from perfkit.readers.nccl_tables import NAMES, Device, Half, Table

#: Half of the last digit of a bandwidth in a report, and a bit more for rounding [GB/s].
_HALF_DIGIT = 0.501e-6
_RESULTS = re.compile(r'"results"\s*:\s*\[')
_PROGRAM = re.compile(r"(?:.*/)?(\w+?)_perf(?:_mpi)?")
_WORD = re.compile(r"[A-Za-z_]\w{0,40}")
#: What a report lacks where the time of the host was measured, and the next step.
_HOST_TIME = "it holds the time of the host alone (cpu_time); run the test without -C"


class Reports(NamedTuple):
    """What a file of reports holds."""

    runs: list[Table]
    facts: tuple[LogFacts, ...]
    misfit: MisfitError | None  # the first result that does not fit; none after it is read


class _Report(NamedTuple):
    """One report, and why it ends early."""

    content: dict[str, Any]
    cut: str | None  # the last text of a report that is cut off


def holds_report(text: str) -> bool:
    """Whether a text is a report, whole or cut off."""
    if not text.lstrip().startswith("{"):
        return False
    return _RESULTS.search(text) is not None or '"nccl_version":' in text


def read_reports(text: str, file: str) -> Reports:
    """Read the reports of a file.

    Parameters
    ----------
    text : str
        One report or several behind one another. Of a report that is cut off, results before its
        end are read.
    file : str
        Name of the file, for the facts.

    Returns
    -------
    reports : Reports
        Runs whose rows are numbered by result from 1 on, through all reports of the file.

    Raises
    ------
    ValueError
        For JSON that is no report of nccl-tests.
    """
    runs: list[Table] = []
    facts = []
    number = 0
    misfit = None
    for report in _split_reports(text):
        table = _read_table(report.content, number)
        results = report.content.get("results")
        if not isinstance(results, list):
            raise ValueError("results is no list; it is no report of nccl-tests -J")
        first = number + 1
        for result in results:
            number += 1
            try:
                table.halves += _read_result(result, number)
            except ValueError as error:
                misfit = MisfitError(number, json.dumps(result), str(error), place="result")
                break
        if report.cut is not None and misfit is None:
            misfit = MisfitError(
                number + 1,
                report.cut,
                "the report ends inside of its results: the run died or still runs",
                place="result",
            )
        runs.append(table)
        if table.halves:
            found = _read_facts(report.content, table, file, first, number)
            facts.append(replace(found, wrong_lines=table.wrong_lines))
        if misfit is not None:
            break
    if not any(run.halves for run in runs) and misfit is None:
        raise ValueError(_explain_absence(runs, text))
    return Reports(runs, tuple(facts), misfit)


def _explain_absence(runs: list[Table], text: str) -> str:
    """Why reports have no result."""
    errors = re.search(r'"errors"\s*:\s*\["((?:[^"\\]|\\.)*)"', text)
    said = f"; its errors say {show(errors[1], 160)}" if errors else "; run it again"
    which = "the report has" if len(runs) == 1 else f"the {len(runs)} reports have"
    return f"{which} no result: the run printed no row{said}"


def _split_reports(text: str) -> list[_Report]:
    """Reports of a text, the last of which may be cut off."""
    decoder = json.JSONDecoder()
    reports: list[_Report] = []
    place = _skip_space(text, 0)
    while place < len(text):
        try:
            content, end = decoder.raw_decode(text, place)
        except ValueError as error:
            start = _RESULTS.search(text, place)
            if start is None and '"nccl_version":' in text[place:]:
                raise ValueError(
                    "the report ends before its results: the run died before its first row, or "
                    "still runs"
                ) from None
            if start is None or not text.startswith("{", place):
                raise ValueError(f"it is no JSON: {escape(error, 100)}") from None
            reports.append(_read_start(decoder, text, place, start))
            break
        except RecursionError:
            raise ValueError("it is no report of nccl-tests: its values are too deep") from None
        if not isinstance(content, dict) or "results" not in content:
            raise ValueError(
                f"{show(escape(text[place : place + 80]), 60)} is no report of nccl-tests -J: it "
                "has no results"
            )
        reports.append(_Report(content, None))
        place = _skip_space(text, end)
    return reports


def _skip_space(text: str, place: int) -> int:
    """Next place that holds something."""
    while place < len(text) and text[place] in " \t\r\n,\x00":
        place += 1
    return place


def _read_start(
    decoder: json.JSONDecoder, text: str, place: int, results: re.Match[str]
) -> _Report:
    """What a report holds that is cut off among its results."""
    try:
        head = text[place : results.start()].rstrip().rstrip(",")
        content = json.loads(head + "}")
    except (ValueError, RecursionError):
        content = {}
    content["results"] = []
    place = _skip_space(text, results.end())
    while place < len(text):
        try:
            result, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        content["results"].append(result)
        place = _skip_space(text, end)
    return _Report(content, text[place : place + 200] or "end of the file")


def _read_table(content: dict[str, Any], before: int) -> Table:
    """A run without its rows."""
    config = _take_object(content, "config")
    processes = _take_objects(config, "devices")
    gpus = max(_take_count(config, "nthreads"), 1) * max(_take_count(config, "ngpus"), 1)
    arguments = content.get("args")
    program = None
    if isinstance(arguments, list) and arguments and isinstance(arguments[0], str):
        program = _PROGRAM.fullmatch(arguments[0][:1000])
    label = "" if program is None else program[1]
    table = Table(NAMES.get(label.replace("_", ""), label), begin=before + 1, start=before + 1)
    table.closed = "average_bus_bandwidth" in content
    table.failed = _take_object(content, "out_of_bounds").get("okay") == "false"
    table.gpus = gpus
    table.place = "result"
    for process in processes:
        # of each process the report names the first rank only
        _add_devices(table, process, gpus, before + 1)
    return table


def _add_devices(table: Table, process: dict[str, Any], gpus: int, line: int) -> None:
    """Add the ranks of one process, of which a report names the first."""
    rank = process.get("rank")
    host = process.get("hostname")
    device = process.get("device")
    if not isinstance(rank, int) or not isinstance(host, str) or not 0 <= rank < 2**20:
        return
    bus = process.get("device_hex")
    name = process.get("device_info")
    for place in range(min(gpus, 2**10)):
        is_named = place == 0
        table.devices[rank + place] = Device(
            str(process.get("group", 0)),
            escape(host, 200),
            device + place if isinstance(device, int) else None,
            bus if is_named and isinstance(bus, str) else None,
            escape(name.strip(), 200) if isinstance(name, str) else None,
            line,
        )


def _read_result(result: Any, number: int) -> list[Half]:
    """Both halves of a row, or the one that was run."""
    if not isinstance(result, dict):
        raise ValueError("it is no result of nccl-tests -J")
    text = escape(json.dumps(result), 300)
    nbytes = result.get("size")
    dtype = result.get("type")
    redop = result.get("redop")
    if not _is_count(nbytes) or not isinstance(dtype, str) or not _WORD.fullmatch(dtype):
        raise ValueError("size or type is missing, or is not what nccl-tests writes")
    try:
        root = int(result.get("root", -1))
    except (TypeError, ValueError):
        raise ValueError("its root is no whole number") from None
    is_reduced = isinstance(redop, str) and bool(_WORD.fullmatch(redop)) and redop != "none"
    halves = []
    for key, in_place in (("out_of_place", False), ("in_place", True)):
        figures = result.get(key)
        if figures is None:
            continue
        if not isinstance(figures, dict):
            raise ValueError(f"{key} is no object")
        if "cpu_time" in figures and "time" not in figures:
            raise ValueError(_HOST_TIME)
        wrong = figures.get("nwrong")
        halves.append(
            Half(
                number,
                text,
                dtype,
                redop if is_reduced else None,
                root,
                in_place,
                float(nbytes),
                1e-6 * _take_figure(figures, "time", key),
                _take_figure(figures, "alg_bw", key),
                _take_figure(figures, "bus_bw", key),
                _HALF_DIGIT,
                _HALF_DIGIT,
                math.nan if wrong is None else _take_figure(figures, "nwrong", key),
            )
        )
    if not halves:
        raise ValueError("it has neither out_of_place nor in_place")
    return halves


def _take_figure(figures: dict[str, Any], name: str, half: str) -> float:
    """A figure of a half of a row."""
    value = figures.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300:
        return float(value)
    raise ValueError(f"{name} of {half} is {show(value)}; it must be a number of 0 or more")


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number of 0 or more that a frame can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _take_object(content: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of a report; an empty one where it is missing."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _take_objects(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects of a report; an empty one where it is missing."""
    value = content.get(name)
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]


def _take_texts(content: dict[str, Any], name: str) -> list[str]:
    """A list of texts of a report; an empty one where it is missing."""
    value = content.get(name)
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, str)]


def _take_count(content: dict[str, Any], name: str) -> int:
    """A whole number of a report; 0 where it is missing."""
    value = content.get(name)
    return value if _is_count(value) else 0


def _read_facts(
    content: dict[str, Any], table: Table, file: str, first: int, last: int
) -> LogFacts:
    """What a report says besides its results."""
    config = _take_object(content, "config")
    options = None
    if config:
        options = Options(
            _take_count(config, "warmup_iters"),
            _take_count(config, "iterations"),
            _take_count(config, "aggregated_iterations") or None,
            _take_count(config, "validation") > 0,
            _take_count(config, "graph"),
            first,
        )
    errors = [Statement(escape(text, 400), "", last) for text in _take_texts(content, "errors")]
    return collect_report(
        file,
        first_line=first,
        last_line=last,
        arguments=_take_texts(content, "args"),
        variables=_take_texts(content, "env"),
        version=_take_count(content, "nccl_version") or None,
        options=options,
        devices=table.devices,
        errors=errors,
    )
