"""Fuzzers of logs of nccl-tests: what belongs to a table, links that a log proves, curves that miss
their sizes, devices, causes of refusals and of slow runs, folders, and the order of what-ifs."""

import gzip
import io
import re
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import perfkit as pk
from perfkit.diagnosis.records import Word
from perfkit.models.collectives import bus_factor
from perfkit.platform.sources import fit_curves
from perfkit.readers.index_arrays import read_indices
from perfkit.readers.nccl import read_nccl_tests
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense

PREFIXES = ("", " 3: ", "[1,0]<stdout>:", "worker-0 | ", "2024-05-08T01:02:03.456Z ")
HEADER = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
FOOTER = ("# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0")


class Table(NamedTuple):
    """A table of a log that is right."""

    operation: str
    ranks: int
    nodes: int
    sizes: tuple[int, ...]  # [B]
    seconds: tuple[float, ...]
    device: str = "NVIDIA H100 80GB HBM3"

    def head(self) -> list[str]:
        """Lines before the rows."""
        local = self.ranks // self.nodes
        devices = [
            f"#  Rank {r:2} Group  0 Pid {r} on  node{r // local} device {r % local} [0x0{r}] {self.device}"
            for r in range(self.ranks)
        ]
        start = "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) iters: 20"
        name = self.operation.replace("_", "")
        return [f"# Collective test starting: {name}_perf", start, *devices, HEADER]

    def rows(self) -> list[str]:
        """Printed rows."""
        factor = float(bus_factor(self.operation, self.ranks))
        redop = "sum" if self.operation == "all_reduce" else "none"
        lines = []
        for size, time in zip(self.sizes, self.seconds, strict=True):
            rate = size / time / 1e9
            half = f"{1e6 * time:9.2f} {rate:6.2f} {factor * rate:6.2f} 0"
            lines.append(f"{size:12} {size // 4:12} float {redop} -1 {half} {half}")
        return lines

    def lines(self) -> list[str]:
        """The whole table."""
        return [*self.head(), *self.rows(), *FOOTER]


def draw_table(rng: Rng, nodes: int = 1, count: int | None = None) -> Table:
    """A smooth table of any operation."""
    operation = choose(rng, ("all_reduce", "all_gather", "reduce_scatter"))
    ranks = nodes * int(choose(rng, (2, 4, 8)))
    powers = range(10, 10 + (count or int(rng.integers(2, 18))))
    start, rate = 10 ** rng.uniform(-5, -4), 10 ** rng.uniform(10, 11.5)
    sizes = tuple(2**power for power in powers)
    return Table(operation, ranks, nodes, sizes, tuple(start + n / rate for n in sizes))


def listen(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(warning.message) for warning in caught]


def check_rows(found: pl.DataFrame, tables: list[Table]) -> None:
    """The frame holds the rows of the tables and no others."""
    wanted: list[tuple[str, int, int]] = []
    for table in tables:
        wanted += [(table.operation, table.ranks, size) for size in table.sizes]
    held = found.filter(~pl.col("in_place")).select("operation", "ranks", "nbytes").rows()
    if sorted(held) != sorted(wanted):
        raise Nonsense(f"{sorted(held)} for {sorted(wanted)}")


def read_tables(rng: Rng, folder: Path) -> None:
    """Tables with rows, devices and words that belong to none of them."""
    tables = [draw_table(rng, choose(rng, (1, 2))) for _ in range(int(rng.integers(1, 4)))]
    prefix = choose(rng, PREFIXES)
    lines: list[str] = []
    late = 0
    for table in tables:
        lines += table.lines()
        if rng.random() < 0.5:
            stray = draw_table(rng).rows()
            lines += ["== another machine ==", *stray]
            late += len(stray)
    ending = choose(rng, ("\n", "\r\n", "\x1b[0m\n"))
    data = ending.join(prefix + line for line in [*lines, ""]).encode()
    path = folder / choose(rng, ("run.log", "run.out", "run.dat", "run.log.gz"))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    found, said = listen(lambda: read_nccl_tests(choose(rng, (path, folder))))
    check_rows(found, tables)
    counts: list[str] = []
    for text in said:
        counts += re.findall(r"(\d+) rows? after", text)
    named = sum(map(int, counts))
    if named != late:
        raise Nonsense(f"{late} rows belong to no table, {named} are named: {said}")


def read_folder(rng: Rng, folder: Path) -> None:
    """A folder of logs and other files: each log is read, each other file is named once."""
    tables, foreign = {}, []
    for number in range(int(rng.integers(1, 5))):
        name = f"{number}{choose(rng, ('.log', '.txt', '.out', '.dat', '.nccl'))}"
        tables[name] = draw_table(rng)
        (folder / name).write_text("\n".join(tables[name].lines()))
    for number in range(int(rng.integers(0, 4))):
        name = f"other{number}.log"
        foreign.append(name)
        (folder / name).write_bytes(choose(rng, FOREIGN))
    found, said = listen(lambda: read_nccl_tests(folder))
    check_rows(found, [*tables.values()])
    for name in foreign:
        if sum(name in text for text in said) != 1:
            raise Nonsense(f"{name} should be named once: {said}")
    if len(said) != len(foreign):
        raise Nonsense(f"{said}")


def fit_links(rng: Rng, folder: Path) -> list[Any]:
    """A link between nodes is between what the log proves and the adapters of the datasheet."""
    nodes, base = int(choose(rng, (2, 3, 4))), pk.load_platform("h100-sxm-8")
    sizes = tuple(2**power for power in range(10, 10 + int(rng.integers(6, 24))))
    nbytes = np.array(sizes, dtype=float)
    stages = (base.collective_time(n, nbytes, ranks=8) for n in ("reduce_scatter", "all_gather"))
    whole = 10 ** rng.uniform(-5, -4) + rng.uniform(0.6, 3.0) * sum(stages)
    table = Table("all_reduce", 8 * nodes, nodes, sizes, tuple(map(float, whole)))
    path = folder / "nodes.log"
    path.write_text("\n".join(table.lines()))
    platform, _ = listen(lambda: pk.calibrate(nccl_logs=path, base=base))
    proven = float((bus_factor("all_reduce", nodes) * nbytes / 8 / whole).max())
    link = platform.network.links["inter"].bandwidth.value
    if not 0.96 * proven <= link <= max(1.04 * proven, 50e9):
        raise Nonsense(f"a link of {link:.3g} B/s, the log proves {proven:.3g}")
    if sizes[-1] >= 2**26:
        times = [
            float(platform.collective_time(name, float(sizes[-1]), ranks=8 * nodes))
            for name in ("all_reduce", "all_gather", "reduce_scatter")
        ]
        if max(times[1:]) > 1.001 * times[0]:
            raise Nonsense(f"all_reduce, all_gather and reduce_scatter take {times}")
    return [platform]


def fit_jumps(rng: Rng, folder: Path) -> None:
    """A curve that jumps says which size it misses, or holds the largest in its interval."""
    table = draw_table(rng, count=int(rng.integers(6, 21)))
    jumps = np.ones(len(table.sizes))
    jumps[int(rng.integers(len(jumps))) :] *= choose(rng, (0.3, 0.45, 1.0, 2.2))
    frame = pl.DataFrame(
        {
            "operation": table.operation,
            "ranks": table.ranks,
            "nodes": pl.repeat(1, len(jumps), dtype=pl.Int64, eager=True),
            "dtype": "fp32",
            "nbytes": table.sizes,
            "seconds": np.array(table.seconds) * jumps,
        }
    )
    (fit,) = fit_curves(frame).values()
    platform = pk.load_platform("h100-sxm-8")
    key = f"{table.operation}.{table.ranks}"
    made = replace(platform, collectives={**platform.collectives, key: fit})
    curve = float(made.collective_time(table.operation, float(table.sizes[-1]), ranks=table.ranks))
    ratio = abs(np.log(curve / (table.seconds[-1] * jumps[-1])))
    said = any(note.startswith("the curve misses") for note in fit.notes)
    if ratio > max(1.2816 * fit.spread, np.log(1.36)) * 1.01:
        raise Nonsense(f"{fit!r} misses its largest size by {np.exp(ratio):.2f}")
    if said and np.all(jumps == 1):
        raise Nonsense(f"a smooth curve says {fit.notes}")


OTHERS = (
    "NVIDIA GeForce RTX 3090",
    "AMD Instinct MI300X",
    "Tesla T4",
    "NVIDIA L4",
    "NVIDIA H100 PCIe",
    "Intel Gaudi 3",
    "NVIDIA H200",
    "Device 740c",
    "NVIDIA RTX A6000",
)
SAME = ("NVIDIA H100 80GB HBM3", "NVIDIA H100", "H100", "NVIDIA H100 SXM5", "")


def compare_names(rng: Rng, folder: Path) -> None:
    """Another device than that of the base is told, the same one is not."""
    device = choose(rng, (*OTHERS, *SAME))
    table = draw_table(rng, count=int(rng.integers(8, 18)))._replace(device=device)
    path = folder / "a.log"
    path.write_text("\n".join(table.lines()))
    _, said = listen(lambda: pk.calibrate(nccl_logs=path, base="h100-sxm-8"))
    told = any("it now mixes both" in text for text in said)
    if told != (device in OTHERS):
        raise Nonsense(f"{device!r} on an H100: {said}")


def pack_tar() -> bytes:
    """A compressed archive of a log."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        data = b"text\n" * 400
        member = tarfile.TarInfo("a.log")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 20\n"
PAGE = b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>"
#: Bytes of other files, and what a refusal must say.
CAUSES: tuple[tuple[bytes, str], ...] = (
    (POINTER, "git lfs pull"),
    (PAGE, "web page"),
    (pack_tar(), "tar archive"),
    (b"PK\x03\x04" + bytes(60), "zip archive"),
    (b"BZh91AY&SY" + bytes(40), "bzip2"),
    (b"\x28\xb5\x2f\xfd" + bytes(40), "zstd"),
    (b"%PDF-1.7\n" + bytes(40), "PDF"),
)
FOREIGN = (
    *(data for data, _ in CAUSES),
    b"job 17 could not start on node3: no port left",
    b"",
    b"bash: all_reduce_perf: command not found",
    b"USAGE: all_reduce_perf \n\t[-t,--nthreads <num threads>]",
)
READERS: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    (".log", read_nccl_tests),
    (".csv", pk.read_tables),
    (".json", pk.read_tables),
    (".parquet", pk.read_tables),
    (".npy", read_indices),
    (".toml", pk.Platform.load),
    (".json", pk.Plan.load),
    (".json", pk.Comparison.load),
)


def refuse(rng: Rng, folder: Path) -> None:
    """Every reader names what a file is by its first bytes."""
    (data, cause), (ending, read) = choose(rng, CAUSES), choose(rng, READERS)
    path = folder / f"set{ending}"
    path.write_bytes(data + (rng.bytes(int(rng.integers(0, 99))) if rng.random() < 0.3 else b""))
    try:
        read(path)
    except ValueError as error:
        if cause not in str(error):
            raise Nonsense(f"{cause} is not named: {error}") from error
    else:
        raise Nonsense(f"{cause} was read as {ending}")


def order_changes(rng: Rng, folder: Path) -> None:
    """Nodes and links come in any order, or the advice of the refusal works."""
    start = pk.load_platform(choose(rng, pk.platforms()["name"].to_list()))
    nodes = int(rng.integers(2, 9))
    link = {"bandwidth": 10 ** rng.uniform(9, 11), "latency": 10 ** rng.uniform(-6, -4)}
    first = start.with_link("inter", **link).with_nodes(nodes)
    try:
        second = start.with_nodes(nodes).with_link("inter", **link)
    except ValueError as error:
        if ".with_nodes(" not in str(error):
            raise Nonsense(f"advice that leads nowhere: {error}") from error
        return
    if first.network != second.network:
        raise Nonsense(f"{first.network} and {second.network}")


#: What NCCL may say of a run, true or not.
SAID = (
    "Using network Socket",
    "Using network IB",
    "NET/IB : No device found.",
    "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_2:1/IB [2]mlx5_3:1/IB ; OOB eth0:10.0.0.1<0>",
    "NET/IB : Using [0]mlx5_bond_0:1/RoCE [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>",
    "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
    "NET/IB : Made virtual device [0] name=mlx5_0 speed=100000 ndevs=1",
    "NET/Socket : Using [0]docker0:172.17.0.2<0> [1]eno1:10.0.0.1<0>",
    "NET/OFI Selected Provider is efa (found 3 nics)",
    "NVLS multicast support is not available on dev 0",
    "2 coll channels, 0 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer",
    "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct",
    "Channel 00 : 0[0] -> 1[1] via P2P/IPC",
    "Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/0",
    "NCCL_ALGO set by environment to Ring",
    "NCCL_PROTO set by environment to LL",
    "NCCL_P2P_DISABLE set by environment to 1",
    "NCCL_IB_HCA set to mlx5_0",
    "Setting affinity for GPU 0 to 01",
    "comm 0x1 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0",
    "Pattern 4, crossNic 0, nChannels 1, bw 24.0/24.0, type PHB/PIX, sameChannels 1",
    "AllReduce: 1048576 Bytes -> Algo 1 proto 0 time 30.0",
    "AllReduce: 2097152 Bytes -> Algo 0 proto 2 time 90.0",
    "NCCL version 2.14.3+cuda11.7",
)
DEVICES = (
    "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA GB200",
    "NVIDIA GeForce RTX 4090",
    "Tesla V100-SXM2-32GB",
    "AMD Instinct MI300X",
    "NVIDIA H100 PCIe",
    "GPU",
)


def diagnose_runs(rng: Rng, folder: Path) -> None:
    """Runs of any curve, with lines of NCCL that may contradict each other: what is as expected has
    remarks at most, and what is slow or too good has a cause, with evidence and what to try."""
    for number in range(int(rng.integers(1, 4))):
        table = draw_table(rng, choose(rng, (1, 2, 3)))
        noise = choose(rng, (0.01, 0.5))
        at = int(rng.integers(0, len(table.sizes) + 1))
        seconds = [
            time * (choose(rng, (1.0, 3.0)) if place >= at else 1.0) * np.exp(rng.normal(0, noise))
            for place, time in enumerate(table.seconds)
        ]
        table = table._replace(seconds=tuple(seconds), device=choose(rng, DEVICES))
        said = [
            f"node{int(rng.integers(0, table.nodes))}:9:9 [0] NCCL INFO {choose(rng, SAID)}"
            for _ in range(int(rng.integers(0, 8)))
        ]
        head, rows = table.head(), table.rows()
        lines = [*head[:-1], *said, head[-1], *rows, *FOOTER]
        (folder / f"{number}.log").write_text("\n".join(lines))
    diagnosis, _ = listen(lambda: pk.diagnose(folder, progress=False))
    for finding in diagnosis.findings:
        words = {verdict.word for verdict in finding.case.verdicts}
        for word in words & {Word.SLOW, Word.TOO_GOOD}:
            if not any(word in cause.explains for cause in finding.causes):
                raise Nonsense(f"nothing is said of what is {word}: {finding.causes}")
        for cause in finding.causes:
            if cause.explains and not cause.explains & words:
                raise Nonsense(f"{cause.name} explains what is not there: {words}")
            if not cause.evidence or not cause.advice or not cause.sentence:
                raise Nonsense(f"{cause} lacks evidence or advice")
            texts = [each.text for each in cause.evidence]
            if re.search(r"\b(nan|inf|None)\b", " ".join([cause.sentence, *texts])):
                raise Nonsense(f"{cause.name}: {texts}")


def judge(rng: Rng, folder: Path) -> Any:
    """A verdict on tables of any curve: its parts agree, and twice as slow is never better."""
    tables = []
    for _ in range(int(rng.integers(1, 3))):
        table = draw_table(rng, nodes=int(choose(rng, (1, 1, 2, 4))))
        factors = np.exp(rng.normal(0, choose(rng, (0.0, 0.1, 1.0)), len(table.sizes)))
        times = tuple(float(t * f) for t, f in zip(table.seconds, factors, strict=True))
        tables.append(table._replace(seconds=times, device=choose(rng, DEVICES)))
    said = [f"node0:1:1 [0] NCCL INFO {text}" for text in SAID if rng.random() < 0.15]
    words = []
    for times in (1.0, 2.0):
        lines: list[str] = []
        for table in tables:
            slower = table._replace(seconds=tuple(times * t for t in table.seconds))
            lines += [*slower.head()[:-1], *said, HEADER, *slower.rows(), *FOOTER]
        path = folder / f"{times:g}.log"
        path.write_text("\n".join(lines))
        platform = choose(rng, (None, None, "h100-sxm-8", "a100-sxm-8x2")) if times == 1 else None
        diagnosis, _ = listen(lambda: pk.diagnose(path, platform))  # noqa: B023
        check_diagnosis(diagnosis, tables)
        if platform is None:
            words.append([finding.word.value for finding in diagnosis.findings])
    if len(words) == 2:
        for first, second in zip(*words, strict=True):
            if first == "slow" and second == "as expected":
                raise Nonsense("twice as slow is as expected")
    return diagnosis


def check_diagnosis(diagnosis: pk.Diagnosis, tables: list[Table]) -> None:
    """Each row has a verdict, and the line, the text, the table and the exit state say the same."""
    if len(diagnosis.rows) != 2 * sum(len(table.sizes) for table in tables):
        raise Nonsense(f"{len(diagnosis.rows)} rows of {tables}")
    line = diagnosis.headline()
    if "\n" in line or not str(diagnosis).startswith(line) or "nan" in str(diagnosis):
        raise Nonsense(str(diagnosis))
    if not line.startswith(diagnosis.verdict):
        raise Nonsense(f"{diagnosis.verdict}: {line}")
    sick = {"slow", "too good"} & set(diagnosis.table()["verdict"])
    if (diagnosis.ok is False) != bool(sick):
        raise Nonsense(f"ok is {diagnosis.ok} with {sick}")
    ends = diagnosis.rows.filter(pl.col("low_s").is_not_null())
    if (
        not (ends["low_s"] <= ends["expected_s"]).all()
        or not (ends["expected_s"] <= ends["high_s"]).all()
    ):
        raise Nonsense("an expected time outside of its interval")
    diagnosis.spread()
    diagnosis.thresholds()
    diagnosis.to_dict()


ENTRIES: dict[str, Entry] = {
    "log-verdicts": Entry(judge, 0.1, new=True),
    "log-tables": Entry(read_tables, 0.5, new=True),
    "log-folders": Entry(read_folder, 0.3, new=True),
    "log-links": Entry(fit_links, 0.03, new=True),
    "log-jumps": Entry(fit_jumps, 0.05, new=True),
    "log-devices": Entry(compare_names, 0.05, new=True),
    "first-bytes": Entry(refuse, 0.5, new=True),
    "log-causes": Entry(diagnose_runs, 0.1, new=True),
    "order-of-changes": Entry(order_changes, 0.1, new=True),
}
