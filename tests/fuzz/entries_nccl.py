"""Fuzzers of what logs of nccl-tests say besides their tables, and of its reports in JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfkit.models.collectives import bus_factor
from perfkit.readers.log_facts import LogFacts
from perfkit.readers.nccl import parse_nccl_tests, read_logs, read_nccl_tests
from tests.fuzz.damage import Rng, choose, damage_file
from tests.fuzz.entries_logs import FOOTER, PREFIXES, Table, check_rows, draw_table, listen
from tests.fuzz.harness import Entry, Nonsense

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
SETTINGS = ("NCCL_IB_HCA", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME")


def draw_said(rng: Rng, table: Table) -> tuple[list[str], dict[str, Any]]:
    """What NCCL says of a run, and the facts of it."""
    network = choose(rng, ("IB", "Socket", "AWS Libfabric"))
    channels = int(rng.integers(1, 33))
    nvls = int(choose(rng, (0, 16)))
    is_available = bool(rng.random() < 0.5)
    setting = choose(rng, SETTINGS)
    value = choose(rng, ("1", "mlx5_0:1,mlx5_1", "^docker0", "=eth0", "Ring"))
    links = int(rng.integers(1, 9))
    cards = int(rng.integers(0, 9))
    algorithm = int(rng.integers(7))
    protocol = int(rng.integers(3))
    lines = [
        f"Using network {network}",
        f"NVLS multicast support is {'' if is_available else 'not '}available on dev 0",
        f"{channels} coll channels, 0 collnet channels, {nvls} nvls channels, 32 p2p channels, "
        "2 p2p channels per peer",
        f"{setting} set by environment to {value}.",
        f"AllReduce: {table.sizes[0]} Bytes -> Algo {algorithm} proto {protocol} time 12.5",
        *(f"Channel {link:02}/0 : 0[0] -> 1[1] via P2P/CUMEM/read" for link in range(links)),
    ]
    if cards:
        listed = " ".join(f"[{card}]mlx5_{card}:1/IB" for card in range(cards))
        lines.append(f"NET/IB : Using {listed} [RO]; OOB eth0:10.0.0.1<0>")
    lines = [lines[place] for place in rng.permutation(len(lines))]
    facts = {
        "network": network,
        "has_nvls": is_available,
        "nvls_channels": nvls,
        "adapters": cards,
        "links": links,
        "setting": (setting, value),
        "choice": (table.sizes[0], ALGORITHMS[algorithm], PROTOCOLS[protocol]),
    }
    return [f"node0:71:{91 + rank} [0] NCCL INFO {line}" for rank, line in enumerate(lines)], facts


def read_whole(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and what it warns of; a refusal is a failure."""
    try:
        return listen(call)
    except ValueError as error:
        raise Nonsense(f"a good log is refused: {error}") from error


def check_facts(found: LogFacts, drawn: dict[str, Any]) -> None:
    """Facts are those that were written."""
    (way,) = found.transports
    (setting,) = found.settings
    (choice,) = found.chosen
    held = {
        "network": found.network,
        "has_nvls": found.has_nvls,
        "nvls_channels": found.nvls_channels,
        "adapters": len(found.adapters),
        "links": way.times,
        "setting": (setting.name, setting.value),
        "choice": (choice.nbytes, choice.algorithm, choice.protocol),
    }
    if held != drawn:
        raise Nonsense(f"{held} for {drawn}")


def read_facts(rng: Rng, folder: Path) -> None:
    """Each run has its own facts, whatever stands before its lines and where they stand."""
    tables = [draw_table(rng) for _ in range(int(rng.integers(1, 4)))]
    prefix = choose(rng, PREFIXES)
    lines: list[str] = []
    drawn = []
    for table in tables:
        said, facts = draw_said(rng, table)
        drawn.append(facts)
        # anywhere between the first line of a table and its last one
        printed = table.lines()
        for line in said:
            printed.insert(int(rng.integers(2, len(printed))), line)
        lines += printed
    path = folder / "run.log"
    lines = [f"{prefix}{line}" for line in lines]
    if rng.random() < 0.2:
        key = choose(rng, ("log", "message", "msg"))
        lines = [json.dumps({key: f"{line}\n", "stream": "stdout"}) for line in lines]
    path.write_text("".join(f"{line}\n" for line in lines))
    logs, _ = read_whole(lambda: read_logs(path))
    check_rows(logs.rows, tables)
    for found, facts in zip(logs.facts, drawn, strict=True):
        check_facts(found, facts)


def tear_row(rng: Rng, row: str, label: str) -> list[str]:
    """A row in the pieces in which it is printed, with what NCCL says behind the first ones."""
    words = row.split()
    pieces = [" ".join(words[:5]), " ".join(words[5:9]), " ".join(words[9:])]
    lines = []
    for piece in pieces[:-1]:
        said = [f"node0:71:9{rank} [0] NCCL INFO Trees" for rank in range(int(rng.integers(1, 4)))]
        lines += [f"{label}{piece}{said[0]}", *(label + text for text in said[1:])]
    return [*lines, label + pieces[-1]]


def read_torn(rng: Rng, folder: Path) -> None:
    """Rows that lines of NCCL tear apart are whole again, among rows that are whole."""
    table = draw_table(rng)
    label = choose(rng, PREFIXES)
    lines = [label + line for line in table.head()]
    for row in table.rows():
        lines += tear_row(rng, row, label) if rng.random() < 0.5 else [label + row]
    path = folder / "run.log"
    path.write_text("\n".join([*lines, *(label + line for line in FOOTER)]) + "\n")
    found, _ = read_whole(lambda: read_nccl_tests(path))
    check_rows(found, [table])
    if found["line"].is_sorted() is False:
        raise Nonsense(f"{found['line']}")


def read_deaths(rng: Rng, folder: Path) -> None:
    """Runs that died are named, each once, and the rows of all others are kept."""
    tables = [draw_table(rng) for _ in range(int(rng.integers(1, 4)))]
    lines: list[str] = []
    deaths = 0
    place = int(rng.integers(len(tables)))
    for number, table in enumerate(tables):
        for _ in range(int(rng.integers(0, 3)) if number <= place else 0):
            died = draw_table(rng)
            kept = int(rng.integers(0, len(died.rows())))
            lines += [*died.head(), *died.rows()[:kept], choose(rng, FAILURES)]
            deaths += 1
        lines += table.lines()
    path = folder / "run.log"
    path.write_text("\n".join(lines) + "\n")
    found, said = read_whole(lambda: read_nccl_tests(path))
    check_rows(found, tables)
    if sum("printed no row" in text or "died after" in text for text in said) != deaths:
        raise Nonsense(f"{deaths} runs died: {said}")


def make_report(rng: Rng, table: Table) -> dict[str, Any]:
    """A report of a table."""
    local = table.ranks // table.nodes
    factor = float(bus_factor(table.operation, table.ranks))
    redop = "none" if table.operation == "all_gather" else "sum"
    results = []
    for size, seconds in zip(table.sizes, table.seconds, strict=True):
        rate = size / seconds / 1e9
        half = {
            "time": round(1e6 * seconds, 6),
            "alg_bw": round(rate, 6),
            "bus_bw": round(factor * rate, 6),
            "nwrong": choose(rng, (0.0, None)),
        }
        about = {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": redop,
            "root": "    -1",
        }
        results.append({**about, "out_of_place": half, "in_place": half})
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": rank,
            "hostname": f"node{rank // local}",
            "device": rank % local,
            "device_hex": f"0000:{rank:02x}:00",
            "device_info": table.device,
        }
        for rank in range(table.ranks)
    ]
    return {
        "version": 2,
        "args": [f"./build/{table.operation}_perf", "-b", "8"],
        "env": ["NCCL_DEBUG=INFO"],
        "nccl_version": int(choose(rng, (2807, 21805, 22603))),
        "config": {"nthreads": 1, "ngpus": 1, "iterations": 20, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 1.0, "okay": "unchecked"},
        "errors": [],
    }


def read_reports(rng: Rng, folder: Path) -> None:
    """Reports give the rows of their tables; a report that is cut off those before its end."""
    tables = [draw_table(rng) for _ in range(int(rng.integers(1, 4)))]
    text = choose(rng, ("", "\n", " \n\n")).join(
        json.dumps(make_report(rng, table), indent=choose(rng, (None, 1))) for table in tables
    )
    path = folder / choose(rng, ("run.json", "run.log"))
    path.write_text(text)
    found, _ = read_whole(lambda: read_nccl_tests(choose(rng, (path, folder))))
    check_rows(found, tables)
    cut = text[: int(rng.integers(1, len(text)))]
    try:
        part, _ = listen(lambda: parse_nccl_tests(cut, file="all_reduce.json", partial=True))
    except ValueError:
        return
    if len(part) > len(found):
        raise Nonsense(f"{len(part)} rows of a part, {len(found)} of all")


def read_damaged(rng: Rng, folder: Path) -> None:
    """Logs and reports of any kind of damage are read or refused."""
    table = draw_table(rng, 1)
    value: Any = make_report(rng, table)
    if rng.random() < 0.6:
        lines = table.lines()
        said, _ = draw_said(rng, table)
        value = "\n".join([*lines[:2], *said, *lines[2:]])
    path = folder / "all_reduce.log"
    path.write_bytes(damage_file(rng, value))
    logs, _ = listen(lambda: read_logs(path, partial=bool(rng.random() < 0.5)))
    for run in logs.facts:
        repr((run.hosts, run.buses, run.version, run.network, run.has_nvls))
        if not 0 < run.first_line <= run.last_line:
            raise Nonsense(f"{run}")


FAILURES = (
    "node0: Test NCCL failure common.cu:303 'unhandled system error'",
    "srun: error: node0: task 0: Killed",
    "slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2031-05-06T07:08:09 DUE TO TIME LIMIT ***",
    "mpirun noticed that process rank 3 exited on signal 9 (Killed).",
)
ENTRIES: dict[str, Entry] = {
    "log-facts": Entry(read_facts, 0.4, new=True),
    "log-reports": Entry(read_reports, 0.3, new=True),
    "log-torn": Entry(read_torn, 0.3, new=True),
    "log-deaths": Entry(read_deaths, 0.3, new=True),
    "log-damaged": Entry(read_damaged, 0.6, new=True),
}
