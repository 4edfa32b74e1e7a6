"""Rates of links that nvbandwidth measures, between the GPUs of a system and between them and hosts, as
text and as JSON (``--json``).

Source of what is printed: NVIDIA/nvbandwidth, output.cpp, json_output.cpp, testcases_ce.cpp and
README.md (Apache-2.0). A matrix holds GB/s of 10^9 bytes, for tests whose name ends with latency_sm
nanoseconds. In the rows of a test between devices are those that run it, in the columns their peers. A
read test copies from the peer, a write test to it (README.md, testcases_ce.cpp: the arrows of its titles
point the other way).
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from perfkit.ground.files import LARGEST_TEXT, check_path, explain_content, reading
from perfkit.ground.units import check_choice, escape, show

_ADVICE = "pass what nvbandwidth printed, as text or with --json"
_RUNNING = re.compile(r"Running (\w{1,80})\.")
_TITLE = re.compile(r"(?P<row>[CG]PU)\(row\) (?P<arrow><->|->|<-) [CG]PU\(column\)(?P<rest>.*)")
_LATENCY_TITLE = re.compile(r"Latency SM (?P<row>[CG]PU)\(row\) <-> [CG]PU\(column\) \(ns\)")
_DEVICE = re.compile(
    r"(?:Device (\d{1,4})|Process +(\d{1,5}) \((\S+)\): device \d{1,4}): (.+?) \([0-9a-fA-F:]{7,}\)\s*$"
)
_ROW = re.compile(r"\s*(\d{1,4})((?:\s+(?:N/A|\d{1,9}(?:\.\d+)?))+)\s*$")
_COLUMNS = re.compile(r"\s*0(?:\s+\d{1,4})*\s*$")
#: Largest matrix that is read, ranks along each side [-].
_MOST_DEVICES = 4_096
#: Bound of the numbers of a matrix, far above those of links [GB/s] or [ns].
_MOST_VALUE = 1e9
#: Kinds of links.
_BETWEEN = ("devices", "host to device", "device to host")
_SCHEMA: dict[str, Any] = {
    "test": pl.String,
    "between": pl.String,
    "engine": pl.String,
    "is_alone": pl.Boolean,
    "source": pl.Int64,
    "target": pl.Int64,
    "bandwidth": pl.Float64,
    "latency": pl.Float64,
}


class _Ends(NamedTuple):
    """Devices of a copy; None for the host, and for all other devices."""

    source: int | None
    target: int | None


class _Kind(NamedTuple):
    """What a test measures."""

    between: str  # one of `_BETWEEN`
    row: str  # which end the row is: source, target or nothing
    column: str  # which end the column is
    is_alone: bool = True  # no other copies run at the same time

    def find_ends(self, row: int, column: int) -> _Ends:
        """Source and target of a cell."""
        ends = {self.row: row, self.column: column}
        return _Ends(ends.get("source"), ends.get("target"))


#: Kinds of tests by the beginning of their names; others, such as local copies, are left out.
_KINDS = (
    (
        re.compile(r"(multinode_)?device_to_device_.*read|device_to_device_latency"),
        _Kind("devices", "target", "source"),
    ),
    (re.compile(r"(multinode_)?device_to_device_.*write"), _Kind("devices", "source", "target")),
    (re.compile(r"(multinode_)?all_to_one"), _Kind("devices", "", "target", is_alone=False)),
    (re.compile(r"(multinode_)?one_to_all"), _Kind("devices", "", "source", is_alone=False)),
    (re.compile(r"host_to_device|host_device_latency"), _Kind("host to device", "", "target")),
    (re.compile(r"device_to_host"), _Kind("device to host", "", "source")),
    (re.compile(r"host_to_all"), _Kind("host to device", "", "target", is_alone=False)),
    (re.compile(r"all_to_host"), _Kind("device to host", "", "source", is_alone=False)),
)


class _Row(NamedTuple):
    """A row of the frame."""

    test: str
    between: str
    engine: str
    is_alone: bool
    source: int | None
    target: int | None
    bandwidth: float | None  # [B/s]
    latency: float | None  # [s]


class LinkRates(NamedTuple):
    """What nvbandwidth measured."""

    rows: pl.DataFrame  # one for each number of a matrix, see `read_nvbandwidth`
    devices: tuple[str, ...]  # by number, as printed; empty where the output does not list them
    hosts: tuple[str, ...]  # of the processes of a run over several nodes, by number

    def find_slowest(self, between: str) -> float | None:
        """Find the slowest link of one kind.

        Parameters
        ----------
        between : str
            ``devices``, ``host to device`` or ``device to host``.

        Returns
        -------
        bandwidth : float or None
            Least bandwidth of a copy that runs alone, by the faster engine and test where several
            measured the link; None where it was not measured [B/s].

        Raises
        ------
        ValueError
            For another kind of link.
        """
        check_choice("between", between, _BETWEEN)
        alone = self.rows.filter(
            pl.col("between") == between, "is_alone", pl.col("bandwidth").is_not_null()
        )
        if alone.is_empty():
            return None
        best = alone.group_by("source", "target").agg(pl.col("bandwidth").max())
        return float(best["bandwidth"].to_numpy().min())


class _Matrix(NamedTuple):
    """A matrix, as printed."""

    test: str
    title: str
    cells: list[list[float | None]]


def read_nvbandwidth(path: str | Path) -> LinkRates:
    """Read what nvbandwidth printed.

    Parameters
    ----------
    path : str or Path
        Its output, as text or JSON.

    Returns
    -------
    rates : LinkRates
        Devices, hosts and rows with the name of the test; between (``devices``, ``host to device``,
        ``device to host``); engine (``ce`` for copy engines, ``sm`` for kernels); is_alone (whether
        no other copy runs at the same time, nor one the other way); source and target, numbers of
        devices, null for the host and for all other devices; bandwidth [B/s] or latency [s], the other
        one null. Pairs without peer access and tests that are not known are left out.

    Raises
    ------
    ValueError
        For anything else, and for a matrix that is cut off.
    """
    source = check_path("path", path)
    with reading(source, _ADVICE, most=LARGEST_TEXT):
        data = source.read_bytes()
        cause = explain_content(data[:4096], source.name)
        if cause is not None:
            raise ValueError(cause)
        return parse_nvbandwidth(data.decode("utf-8-sig", errors="replace"), file=source.name)


def parse_nvbandwidth(text: str, *, file: str = "text") -> LinkRates:
    """Read the text that nvbandwidth printed, as `read_nvbandwidth` does.

    Parameters
    ----------
    text : str
        Its output, as text or JSON.
    file : str, optional
        Name of the source, for messages.

    Returns
    -------
    rates : LinkRates
        As `read_nvbandwidth` returns them.

    Raises
    ------
    ValueError
        As `read_nvbandwidth` does.

    Examples
    --------
    >>> rates = parse_nvbandwidth('''Running host_to_device_memcpy_ce.
    ... memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
    ...           0         1
    ... 0     55.00     54.00''')
    >>> rates.find_slowest("host to device")
    54000000000.0
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text is {show(text)}; it must be what nvbandwidth printed, a str; read_nvbandwidth takes a file"
        )
    name = escape(file, 200)
    with reading(name, _ADVICE):
        if text.lstrip().startswith("{"):
            matrices = _list_json(json.loads(text))
        else:
            matrices = _list_printed(text)
        if not matrices:
            raise ValueError(f"{name} holds no matrix of nvbandwidth; {_ADVICE}")
        rows = [row for matrix in matrices for row in _list_rows(matrix)]
    devices: dict[int, str] = {}
    hosts: dict[int, str] = {}
    for line in text.splitlines():
        match = _DEVICE.search(line)
        if match is None:
            continue
        number = int(match[1] or match[2])
        devices[number] = escape(match[4].strip())
        if match[3]:
            hosts[number] = escape(match[3])
    return LinkRates(
        pl.DataFrame(rows, schema=_SCHEMA, orient="row"),
        tuple(devices[number] for number in sorted(devices)),
        tuple(hosts[number] for number in sorted(hosts)),
    )


def _list_printed(text: str) -> list[_Matrix]:
    """Matrices of printed output."""
    matrices: list[_Matrix] = []
    test = ""
    expected = 0
    for number, line in enumerate(text.splitlines(), 1):
        running = _RUNNING.search(line)
        if running is not None:
            _check_whole(matrices, expected, number)
            test, expected = running[1], 0
        elif _TITLE.search(line) or _LATENCY_TITLE.search(line):
            _check_whole(matrices, expected, number)
            matrices.append(_Matrix(test, line.strip(), []))
            expected = 0
        elif matrices and not matrices[-1].cells and _COLUMNS.match(line) and not expected:
            expected = len(line.split())
        elif matrices and expected:
            row = _ROW.match(line)
            if row is not None and len(row[2].split()) == expected:
                matrices[-1].cells.append([_read_cell(cell) for cell in row[2].split()])
            elif line.strip():
                _check_whole(matrices, expected, number)
                expected = 0
    _check_whole(matrices, expected, text.count("\n") + 1)
    return matrices


def _check_whole(matrices: list[_Matrix], columns: int, line: int) -> None:
    """Refuse a matrix with fewer rows than it must have: one for the host, else one for each column or,
    for all to one and one to all, one."""
    if not columns or not matrices:
        return
    rows = len(matrices[-1].cells)
    if rows not in (1, columns) or (rows == 1 and columns > 1 and _is_square(matrices[-1])):
        raise ValueError(
            f"line {line}: the matrix of {matrices[-1].test or 'a test'} ends after {rows} of "
            f"{columns} rows; run it again"
        )


def _is_square(matrix: _Matrix) -> bool:
    """Whether a matrix has a row for each device."""
    return "device_to_device" in matrix.test


def _read_cell(cell: str) -> float | None:
    """A number of a matrix; None for a pair that was not measured."""
    if cell == "N/A":
        return None
    value = float(cell)
    if not 0 <= value < _MOST_VALUE:
        raise ValueError(f"no link has {show(cell)} GB/s or ns; {_ADVICE}")
    return value


def _list_json(data: Any) -> list[_Matrix]:
    """Matrices of a JSON report; tests that were waived or failed have none."""
    tests = data["nvbandwidth"]["testcases"]
    matrices = []
    for test in tests:
        cells = test.get("bandwidth_matrix")
        if not cells:
            continue
        if len(cells) > _MOST_DEVICES or any(len(row) > _MOST_DEVICES for row in cells):
            raise ValueError(
                f"the matrix of {show(test['name'])} has more than {_MOST_DEVICES} rows"
            )
        numbers = [[_read_cell(str(cell)) for cell in row] for row in cells]
        matrices.append(_Matrix(str(test["name"]), str(test["bandwidth_description"]), numbers))
    return matrices


def _list_rows(matrix: _Matrix) -> list[_Row]:
    """Rows of the frame of one matrix; none of a test that is not known."""
    kind = _find_kind(matrix)
    if kind is None:
        return []
    is_latency = "atency" in matrix.title or matrix.test.endswith("latency_sm")
    engine = "sm" if matrix.test.endswith("_sm") or " SM " in f" {matrix.title}" else "ce"
    columns = len(matrix.cells[0]) if matrix.cells else 0
    rows = []
    for number, cells in enumerate(matrix.cells):
        row = number % max(columns, 1)
        for column, value in enumerate(cells):
            # pairs without peer access; old versions write 0 for a GPU and itself
            is_itself = value == 0 and kind.row != "" and row == column
            if value is None or is_itself:
                continue
            ends = kind.find_ends(row, column)
            rows.append(
                _Row(
                    matrix.test,
                    kind.between,
                    engine,
                    kind.is_alone and "bidirectional" not in matrix.test,
                    ends.source,
                    ends.target,
                    None if is_latency else 1e9 * value,
                    1e-9 * value if is_latency else None,
                )
            )
    return rows


def _find_kind(matrix: _Matrix) -> _Kind | None:
    """The kind of a test, by its name or, where the output does not name it, by its title."""
    if matrix.test:
        for pattern, kind in _KINDS:
            if pattern.match(matrix.test):
                return kind
        return None
    title = _TITLE.search(matrix.title)
    if title is None or title["arrow"] == "<->":
        return None
    is_host = title["row"] == "CPU"
    names = {
        (True, "->"): "host_to_device_memcpy",
        (True, "<-"): "device_to_host_memcpy",
        (False, "->"): "device_to_device_memcpy_read",
        (False, "<-"): "device_to_device_memcpy_write",
    }
    return _find_kind(matrix._replace(test=names[is_host, title["arrow"]]))
