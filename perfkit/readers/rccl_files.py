"""Files of results: those that rccl-tests write with ``-x FILE -Z csv`` or ``-Z json``, and those of
mscclpp-test with ``-o FILE``, one JSON record a line.

Source of what is written: ROCm/rccl-tests, src/common.cpp, `Reporter` (BSD), whose CSV built with MPI
has a value for the nodes that its header does not name, and microsoft/mscclpp,
test/mscclpp-test/common.cc (MIT). Sizes are those of nccl-tests. The field ranksPerNode of rccl-tests
holds the processes of the communicator (args->nProcs), and nodes follows from it: neither says where
the ranks lie, so nodes stay unknown. Ranks are the processes times the GPUs of each, if busbw / algbw
agrees.
"""

import csv
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from perfkit.ground.number_formats import spell_dtype
from perfkit.models.collectives import OPERATIONS, bus_factor
from perfkit.readers.collective_rows import (
    UNKNOWN_DTYPE,
    CollectiveRow,
    Measurements,
    MisfitError,
    check_ranks,
    number_lines,
    read_seconds,
    read_size,
    spell_operation,
    spell_redop,
)

#: Head of a CSV file of rccl-tests, and a record of a JSON file of it and of mscclpp-test.
CSV_HEAD = re.compile(r"numCycle,collective,")
JSON_HEAD = re.compile(r"\{\s*\"numCycle\"\s*:")
MSCCLPP_HEAD = re.compile(
    r"\{(?=[^{}\n]*\"kernel\"\s*:)(?=[^{}\n]*\"busBw\"\s*:)(?=[^{}\n]*\"time\"\s*:)"
)


class _Result(NamedTuple):
    """A record of a file."""

    line: int
    text: str
    fields: Mapping[str, Any]  # names in small letters


def read_rccl_csv(text: str, file: str) -> Measurements:
    """Read the CSV file that rccl-tests write with ``-Z csv``.

    Parameters
    ----------
    text : str
        The file.
    file : str
        Its name, for messages.

    Returns
    -------
    found : Measurements
        Its rows, and the first line that does not fit.
    """
    found = Measurements()
    columns: list[str] = []
    try:
        for line, content in number_lines(text):
            values = next(csv.reader([content], skipinitialspace=True))
            if CSV_HEAD.search(content):
                columns = [name.strip().lower() for name in values]
                continue
            if not columns or not content.lstrip()[:1].isdecimal():
                continue
            names = columns
            if len(values) == len(columns) + 1 and "ranks" in columns and "nodes" not in columns:
                place = columns.index("ranks")
                names = [*columns[:place], "nodes", *columns[place:]]
            if len(values) != len(names):
                reason = (
                    f"the row has {len(values)} values, the header names {len(columns)} columns"
                )
                raise MisfitError(line, content, reason)
            fields = dict(zip(names, values, strict=True))
            fields["name"] = fields.get("collective", "")
            _add_result(found, _Result(line, content, fields))
    except MisfitError as error:
        found.misfit = error
    return found


def read_rccl_json(text: str, file: str) -> Measurements:
    """Read the JSON file that rccl-tests write with ``-Z json``, or that of mscclpp-test: a record a
    line.

    Parameters
    ----------
    text : str
        The file.
    file : str
        Its name, for messages.

    Returns
    -------
    found : Measurements
        Its rows, and the first line that does not fit.
    """
    found = Measurements()
    try:
        for line, content in number_lines(text):
            record = content.strip().removesuffix(",")
            if not record.startswith("{"):
                continue
            try:
                fields = json.loads(record)
            except (ValueError, RecursionError):
                raise MisfitError(line, content, "the record is cut off or is no JSON") from None
            small = {str(name).lower(): value for name, value in fields.items()}
            if "kernel" in small:
                found.unlike = "its operations are those of MSCCL++, not of NCCL"
            _add_result(found, _Result(line, content, small))
    except MisfitError as error:
        found.misfit = error
    return found


def _add_result(found: Measurements, result: _Result) -> None:
    """Add the row of a record; says that results were wrong, or that the operation is not known."""
    name = str(result.fields.get("name", ""))
    operation = spell_operation(name)
    if operation is None:
        note = f"results of {name[:40]} are not read: perfkit knows no such operation"
        if note not in found.notes:
            found.notes.append(note)
        return
    wrong = result.fields.get("wrong", result.fields.get("#wrong", 0))
    if str(wrong) not in ("0", "N/A"):
        note = f"results hold wrong values (the first in line {result.line}); do not trust them"
        if not any("wrong values" in known for known in found.notes):
            found.notes.append(note)
    algbw = _read_number(result, "algbw")
    busbw = _read_number(result, "busbw")
    nbytes = read_size(result.line, result.text, _read_number(result, "size"))
    seconds = read_seconds(result.line, result.text, _read_number(result, "time"), 1e-6)
    if nbytes >= 2**20 and abs(nbytes / seconds / 1e9 - algbw) > 0.01 * algbw:
        raise MisfitError(result.line, result.text, "algbw is not size / time")
    ranks = _count_ranks(result, operation, algbw, busbw)
    redop = str(result.fields.get("redop", "sum"))
    found.rows.append(
        CollectiveRow(
            result.line,
            operation,
            check_ranks(result.line, result.text, ranks),
            _count_nodes(result),
            spell_dtype(str(result.fields.get("type", UNKNOWN_DTYPE))),
            spell_redop(operation, redop),
            nbytes,
            seconds,
            in_place=str(result.fields.get("inplace", "0")) == "1",
        )
    )


def _count_ranks(result: _Result, operation: str, algbw: float, busbw: float) -> int:
    """Ranks of a record, if its bandwidths agree."""
    if "ranks" in result.fields:
        gpus = _read_number(result, "gpusperrank") if "gpusperrank" in result.fields else 1.0
        ranks = int(_read_number(result, "ranks") * gpus)
    else:
        ranks = int(_read_number(result, "gpus"))
    factor = float(bus_factor(operation, max(ranks, 1))) if operation in OPERATIONS else 0.0
    if algbw > 0.01 and abs(busbw / algbw - factor) > 0.01 * factor:
        raise MisfitError(
            result.line, result.text, f"busbw / algbw does not fit {operation} of {ranks} ranks"
        )
    return ranks


def _count_nodes(result: _Result) -> int | None:
    """Nodes of a record of mscclpp-test; None for rccl-tests, whose field says something else."""
    if "kernel" not in result.fields or "rankspernode" not in result.fields:
        return None
    local = _read_number(result, "rankspernode")
    ranks = _read_number(result, "ranks")
    return int(ranks // local) if local >= 1 and ranks % local == 0 else None


def _read_number(result: _Result, name: str) -> float:
    """A number of a record."""
    value = str(result.fields.get(name))
    misfit = MisfitError(result.line, result.text, f"{name} is no number of 0 or more: {value}")
    try:
        number = float(value)
    except ValueError:
        raise misfit from None
    if not 0 <= number < 2**62:
        raise misfit
    return number
