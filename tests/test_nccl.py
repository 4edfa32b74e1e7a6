"""Logs of nccl-tests: real logs against their manifest, and generated logs of every format, whole,
noisy and torn."""

import csv
import gzip
import math
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfkit as pk
from perfkit.ground.files import find_reference
from perfkit.models.collectives import OPERATIONS, bus_factor
from perfkit.readers.nccl import LogWarning, list_devices, parse_nccl_tests, read_nccl_tests
from tests import samples

pytestmark = pytest.mark.filterwarnings("ignore:.*only the name of the file says")
PROGRAMS = {"all_to_all": "alltoall_perf", "send_recv": "sendrecv_perf"}
# send_recv prints a redop all the same
REDUCING = ("all_reduce", "reduce_scatter", "reduce", "send_recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
DTYPES = {
    "float": ("fp32", 4),
    "half": ("fp16", 2),
    "double": ("fp64", 8),
    "bfloat16": ("bf16", 2),
    "int8": ("int8", 1),
    "uint64": ("uint64", 8),
    "f8e4m3": ("fp8", 1),
}
STYLES = ("old", "middle", "new", "rccl", "timestamps", "per-iteration")
NOISE = (
    "host-1:77184:77623 [0] NCCL INFO Channel 05/1 : 0[0] -> 10[2] [send] via NET/AWS Libfabric/1(2)/GDRDMA",
    "host-1:22:28 [0] NCCL INFO Channel 00/02 :    0   1   2   3",
    "host-1:3442:3442 [0] NCCL INFO Launch mode Parallel",
    "[host-1:356633] PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c at line 168",
    "[host-1:12807] 7 more processes have sent help message help-mpi-btl-openib.txt / no device params found",
    "Sun Jul 23 02:42:51 2023 UTC",
    "# Reducing maxBytes to 26549638485 due to memory limitation",
    "",
    "#",
    "libfabric:77187:1690073380::efa:ep_ctrl:rxr_ep_ctrl():939<warn> libfabric 1.18.1 efa endpoint created!",
)
PREFIXES = (
    "",
    "0: ",
    " 0: ",
    "[1,0]<stdout>:",
    "(head, rank=0, pid=3808) [1,0]<stdout>:",
    "worker-0 | ",
    "[0] ",
    "2024-05-08T01:02:03.456Z ",
)


def c_float(value: float, width: int) -> str:
    """A number as nccl-tests squeezes it into a column."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:.{1 if width >= 7 else 0}e}"


@dataclass(frozen=True)
class Log:
    """What a log is written from."""

    operation: str = "all_reduce"
    ranks: int = 8
    gpus_per_node: int = 8
    dtype: str = "float"
    style: str = "new"
    times: tuple[tuple[int, float, float], ...] = (
        (1024, 12.9e-6, 13.1e-6),
        (2**20, 35.2e-6, 34.1e-6),
        (2**28, 1.1e-3, 1e-3),
    )
    listed: bool = True
    validated: bool = True
    prefix: str = ""

    @property
    def redop(self) -> str:
        return "sum" if self.operation in REDUCING else ""

    @property
    def root(self) -> int:
        return 0 if self.operation in ROOTED else -1

    def columns(self) -> tuple[list[str], list[str]]:
        names, wrong = ["size", "count", "type"], "error" if self.style == "old" else "#wrong"
        names += (
            ["redop"] if self.style != "old" or self.redop or self.operation == "all_to_all" else []
        )
        names += ["root"] if self.style != "old" or self.operation in ROOTED else []
        more = ["i_min", "i_max", "i_p99", "i_cv%"] if self.style == "per-iteration" else []
        return names, ["time", "algbw", "busbw", wrong, *more]

    def row(self, nbytes: int, *seconds: float) -> str:
        names, _ = self.columns()
        redop = self.redop or ("none" if len(names) == 5 else "")
        text = f"{nbytes:12d}  {nbytes // DTYPES[self.dtype][1]:12d}  {self.dtype:>8}"
        text += f"  {redop:>6}" if "redop" in names else ""
        text += f"  {self.root:6d}" if "root" in names else ""
        for in_place, time in enumerate(seconds):
            algbw = nbytes / time / 1e9
            busbw = algbw * float(bus_factor(self.operation, self.ranks))
            wrong = self.count_wrong(in_place=bool(in_place))
            text += f"  {c_float(time * 1e6, 7):>7}  {c_float(algbw, 6):>6}  {c_float(busbw, 6):>6}  {wrong:>5}"
            text += "   10.00    20.00    19.00     3.00" if self.style == "per-iteration" else ""
        return text + ("  2025-08-01 12:00:00" if self.style == "timestamps" else "")

    def count_wrong(self, *, in_place: bool) -> str:
        """What the column of wrong results says of a half."""
        is_unsupported = in_place and self.operation in ("all_to_all", "send_recv")
        if is_unsupported or not self.validated:
            return "N/A"
        return "2e-07" if self.style == "old" else "0"

    def head(self) -> list[str]:
        program = PROGRAMS.get(self.operation, f"{self.operation}_perf")
        lines = (
            [f"# Collective test starting: {program}"]
            if self.style in ("new", "rccl", "timestamps")
            else []
        )
        lines += [f"/usr/bin/{program} -b 8 -e 1G -f 2"] if self.style != "old" else []
        each = 1 if self.listed else math.gcd(self.ranks, self.gpus_per_node)
        lines += [
            f"# nThread 1 nGpus {each} minBytes 8 maxBytes 1073741824 step: 2(factor) validation: 1"
        ]
        lines += ["rccl-tests: Version develop:5272cd1"] if self.style == "rccl" else []
        place = "Pid  77184 on" if self.style == "old" else "Group  0 Pid  77184 on"
        lines += [
            f"#  Rank {r:2d} {place} host-{r // self.gpus_per_node} device  0 [0x0f] NVIDIA H100"
            for r in range(self.ranks * self.listed)
        ]
        names, block = self.columns()
        lines += ["#", f"#{'out-of-place':>52}{'in-place':>28}"]
        lines += [
            f"#       {'  '.join([*names, *block, *block])}{'  timestamp' if self.style == 'timestamps' else ''}"
        ]
        return [*lines, "#        (B)    (elements)          (us)  (GB/s)  (GB/s)"]

    def lines(self) -> list[str]:
        rows = [self.row(*times) for times in self.times]
        tail = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 68.4048", "#"]
        return [self.prefix + line for line in [*self.head(), *rows, *tail]]

    def expected(self) -> list[dict[str, Any]]:
        nodes = math.ceil(self.ranks / self.gpus_per_node) if self.listed else None
        expected = []
        for nbytes, *times in self.times:
            for half, time in enumerate(times):
                row = {
                    "operation": self.operation,
                    "ranks": self.ranks,
                    "nodes": nodes,
                    "dtype": DTYPES[self.dtype][0],
                    "redop": self.redop or None,
                    "nbytes": nbytes,
                    "in_place": bool(half),
                    "seconds": time,
                }
                expected.append(row)
        return expected


@st.composite
def logs(draw: st.DrawFn) -> Log:
    operation = draw(st.sampled_from(OPERATIONS))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    start, rate = 10 ** draw(st.floats(-5.5, -3)), 10 ** draw(st.floats(9, 12))
    powers = draw(st.lists(st.integers(3, 34), min_size=1, max_size=8, unique=True).map(sorted))
    jitter = st.floats(0.8, 1.25)
    times = []
    for power in [*powers, 35]:
        time = start + 2**power / rate
        times.append((2**power, time * draw(jitter), time * draw(jitter)))
    zeros = [(0, 1.4e-7, 1.3e-7) for _ in range(draw(st.integers(0, 2)))]
    return Log(
        operation,
        draw(st.integers(3, 24)),
        draw(st.integers(1, 8)),
        dtype,
        draw(st.sampled_from(STYLES)),
        (*zeros, *times),
        True,
        draw(st.booleans()),
        draw(st.sampled_from(PREFIXES)),
    )


def agree(frame: pl.DataFrame, expected: list[dict[str, Any]]) -> None:
    """The frame holds what the log was written from, to the digits that it prints."""
    assert frame.height == len(expected)
    for row, truth in zip(frame.iter_rows(named=True), expected, strict=True):
        time = truth["seconds"]
        assert {name: row[name] for name in truth} | {"seconds": time} == truth
        assert row["seconds"] == pytest.approx(time, rel=6e-2 if time > 9 else 1e-4, abs=5.1e-9)
        algbw = row["nbytes"] / row["seconds"] if row["nbytes"] else 0.0
        assert row["algbw"] == pytest.approx(algbw)
        assert row["busbw"] == pytest.approx(algbw * bus_factor(truth["operation"], truth["ranks"]))


def parse(log: Log, text: str, **settings: Any) -> pl.DataFrame:
    """Read a log whose file bears the name of its operation, which old logs do not contain."""
    return parse_nccl_tests(text, file=f"{log.operation}.log", **settings)


@given(logs(), st.lists(st.tuples(st.integers(0, 40), st.sampled_from(NOISE)), max_size=10))
def test_what_was_written_is_read(log: Log, noise: list[tuple[int, str]]) -> None:
    lines = log.lines()
    for place, text in noise:
        lines.insert(place % (len(lines) + 1), log.prefix + text)
    frame = parse(log, "\n".join(lines))
    agree(frame, log.expected())
    assert lines[frame["line"][0] - 1] == log.prefix + log.row(*log.times[0])


@given(logs())
def test_ranks_follow_from_the_bandwidths_where_no_device_is_listed(log: Log) -> None:
    log = replace(
        log, listed=False, gpus_per_node=1, style="middle" if log.style == "old" else log.style
    )
    try:
        frame = parse(log, "\n".join(log.lines()))
    except ValueError as error:  # too few digits
        low, high = re.search(r"they are (\d+) to (\d+|inf); keep", str(error)).groups()  # type: ignore[union-attr]
        assert int(low) <= log.ranks <= float(high)
        assert low != high
    else:
        agree(frame, log.expected())


@given(logs(), st.data())
def test_a_log_that_breaks_off_is_refused_and_its_complete_rows_can_be_kept(
    log: Log, data: st.DataObject
) -> None:
    text = "\n".join(log.lines())
    end = data.draw(
        st.integers(text.index("algbw") + 40, text.index("# Out of bounds") - len(log.prefix) - 1)
    )
    torn, complete = text[:end], log.expected()
    with pytest.raises(ValueError, match=r"line \d+ does not fit: '.*': "):
        parse(log, torn)
    rows = {log.prefix + log.row(*times) for times in log.times}
    whole = sum(line in rows for line in torn.split("\n")[:-1])
    try:
        with pytest.warns(LogWarning, match="measurements are kept"):
            frame = parse(log, torn, partial=True)
    except ValueError as error:
        assert not whole, error
    else:
        agree(frame, complete[: frame.height])
        # only the end of the last line may be missing
        assert frame.height in (2 * whole, 2 * whole + 2)


@given(logs(), st.data())
def test_a_row_that_other_output_cuts_in_two_is_read_where_figures_alone_follow(log, data):
    lines, whole = log.lines(), data.draw(st.integers(0, len(log.times) - 1))
    row = log.row(*log.times[whole])
    # words behind the figures, without which a row is whole
    behind = {"timestamps": 2, "per-iteration": 4}.get(log.style, 0)
    at = lines.index(log.prefix + log.row(*log.times[0])) + whole
    cut = data.draw(
        st.sampled_from([found.end() for found in re.finditer(r"\S+", row)][: -1 - behind])
    )
    noise = [
        log.prefix + text for text in data.draw(st.lists(st.sampled_from(NOISE[:3]), max_size=3))
    ]
    lines[at : at + 1] = [log.prefix + row[:cut] + NOISE[0], *noise, log.prefix + row[cut:]]
    text, numbers = "\n".join(lines), "|".join(str(at + n) for n in (1, len(noise) + 2))
    words = row.split()
    last_word = max(place for place, word in enumerate(words) if re.match(r"(?!N/A)[a-z]", word))
    # a reduction without a root joins the name of the host
    is_ambiguous = len(row[:cut].split()) == last_word + 1 and row[:cut].endswith(words[last_word])
    if len(row[:cut].split()) > last_word and not is_ambiguous:
        agree(parse(log, text), log.expected())
        return
    with pytest.raises(ValueError, match=rf"line ({numbers}) does not fit: "):
        parse(log, text)
    if whole:
        with pytest.warns(LogWarning, match=f"; {2 * whole} measurements are kept"):
            frame = parse(log, text, partial=True)
        agree(frame, log.expected()[: 2 * whole])


# -- samples
# --------------------------------------------------------------------------------------------------

#: Operations, ranks, nodes and device of each sample, see `tests/data/README.md`.
SAMPLES = {
    "all_reduce_8_gpus.log": (["all_reduce"], 8, 1, "Invented GPU 80GB"),
    "rccl_two_nodes.log": (["all_gather", "reduce_scatter"], 16, 2, "Invented accelerator"),
    "old_4_gpus.alltoall.log": (["all_to_all"], 4, 1, "Invented GPU 16GB"),
    "reduce_scatter_4_gpus.json": (["reduce_scatter"], 4, 1, "Invented GPU 80GB"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_says_what_it_was_written_from(name: str) -> None:
    operations, ranks, nodes, device = SAMPLES[name]
    path = samples.FOLDER / name
    frame = read_nccl_tests(path)
    assert frame["operation"].unique(maintain_order=True).to_list() == operations
    assert frame["ranks"].unique().to_list() == [ranks]
    assert frame["nodes"].unique().to_list() == [nodes]
    assert list_devices(path) == (device,)
    for row in frame.iter_rows(named=True):
        latency = samples.LATENCY * (1.1 if row["in_place"] else 1.0)
        seconds = latency + row["nbytes"] / samples.RATE
        assert row["seconds"] == pytest.approx(seconds, rel=1e-4, abs=5.1e-9)
        algbw = row["nbytes"] / row["seconds"]
        assert row["busbw"] == pytest.approx(algbw * bus_factor(row["operation"], ranks))


def test_a_folder_of_samples_is_read_as_one_frame() -> None:
    frame = read_nccl_tests(samples.FOLDER)
    assert set(frame["file"]) == set(SAMPLES)
    assert len(frame) == 10 + 12 + 6 + 10


# -- logs of other people
# --------------------------------------------------------------------------------------------------


def manifest(shared_data: Path) -> dict[str, dict[str, str]]:
    with (shared_data / "nccl_logs" / "MANIFEST.csv").open(encoding="utf-8", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


SEVERAL = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
MANIFEST_NAMES = {
    "several in one file": SEVERAL,
    "alltoall + sendrecv": ["all_to_all", "send_recv"],
    "allreduce": ["all_reduce"],
    "alltoall": ["all_to_all"],
    "allgather": ["all_gather"],
    "reducescatter": ["reduce_scatter"],
    "broadcast": ["broadcast"],
    "scatter (scatter_perf, from the sbatch of that commit)": ["scatter"],
}


def test_real_logs_say_what_their_manifest_says(shared_data: Path) -> None:
    about = manifest(shared_data)
    assert len(about) == 13
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = read_nccl_tests(shared_data / "nccl_logs")
    # the plugin of EFA sets NCCL_PROTO in each job, which is no choice of this one
    (named,) = [str(warning.message) for warning in caught]
    assert "it may be gather or scatter; only the name of the file says scatter" in named
    assert set(frame["file"]) == set(about)
    for (file,), log in frame.group_by("file"):
        row = about[str(file)]
        assert set(log["operation"]) == set(MANIFEST_NAMES[row["collective"]])
        assert log["ranks"].unique().to_list() == [int(row["ranks"])]
        assert log.height == 2 * int(row["rows"])
        assert log["in_place"].sum() == int(row["rows"])
        lists = file not in (
            "a100x16_2node_p4de_efa_allreduce.log",
            "h100x8_p5_nvswitch_allreduce.log",
        )
        assert log["nodes"].unique().to_list() == [int(row["nodes"]) if lists else None]


def test_the_cited_figures_are_those_of_the_logs(shared_data: Path) -> None:
    cited = pl.read_csv(find_reference("published") / "nccl_h100_cluster.csv")
    names = ("h100x8_1node", "h100x10_10node_g1", "h100x80_10node")
    logs = read_nccl_tests(
        [shared_data / "nccl_logs" / f"{name}_multi_collective.log" for name in names]
    )
    for in_place, column in ((False, "time_us"), (True, "in_place_time_us")):
        keys = {
            "left_on": ["test", "nodes", "ranks", "size_B"],
            "right_on": ["operation", "nodes", "ranks", "nbytes"],
        }
        both = cited.join(logs.filter(in_place=in_place), **keys)
        assert both.height == cited.height == 36
        assert (both[column] - 1e6 * both["seconds"]).abs().max() < 1e-3  # type: ignore[operator]


# -- what a log says of itself
# --------------------------------------------------------------------------------------------------


def text_of(log: Log, **changes: str) -> str:
    text = "\n".join(log.lines())
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def name_operations(text: str, **settings: Any) -> set[str]:
    """Operations that a log is read as."""
    return set(parse_nccl_tests(text, **settings)["operation"])


@pytest.mark.parametrize("style", ["middle", "new", "rccl"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_operation_is_that_of_the_label(operation: str, style: str) -> None:
    assert name_operations(text_of(Log(operation, style=style))) == {operation}


@pytest.mark.parametrize(
    "operation",
    ["all_reduce", "all_to_all", "reduce_scatter", "reduce", "broadcast", "send_recv"],
)
def test_columns_and_ratio_tell_the_operation_of_an_old_log(operation: str) -> None:
    assert name_operations(text_of(Log(operation, style="old"))) == {operation}


def test_columns_and_ratio_tell_the_operation_where_no_program_is_named() -> None:
    bare = text_of(Log("all_gather", style="middle")).replace("/usr/bin/all_gather_perf", "")
    # nccl-tests does not check all_to_all and send_recv in place
    assert name_operations(bare) == {"all_gather"}
    pair = text_of(Log("all_reduce", ranks=2, style="middle"))
    assert name_operations(pair.replace("/usr/bin/all_reduce_perf", "")) == {"all_reduce"}


def test_the_name_of_the_file_tells_the_operation_where_the_log_does_not() -> None:
    unchecked = Log("all_gather", style="middle", validated=False)
    bare = text_of(unchecked).replace("/usr/bin/all_gather_perf", "")
    with pytest.raises(
        ValueError,
        match=r"line 15: the operation is not named, .* all_gather or all_to_all; put its",
    ):
        parse_nccl_tests(bare)
    with pytest.warns(LogWarning, match="only the name of the file says all_gather"):
        assert name_operations(bare, file="runs/AllGather-8gpu.log") == {"all_gather"}


LOST = {f"#  Rank {rank:2d}": "# lost" for rank in range(8, 16)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            text_of(Log(ranks=16, gpus_per_node=4), **LOST),
            "line 24: busbw / algbw does not fit all_reduce of 8 ranks;",
        ),
        (
            text_of(Log(), all_reduce_perf="broadcast_perf"),
            "busbw / algbw does not fit broadcast of 8 ranks",
        ),
        (
            text_of(Log(), **{"13.10    0.08    0.14      0": "13.10    0.08    0.14  1e+06"}),
            "1 results hold wrong values .the first in line 16.; do not trust",
        ),
    ],
)
def test_contradictions_are_named(text: str, message: str) -> None:
    with pytest.warns(LogWarning, match=message):
        assert parse_nccl_tests(text).height == 6


def test_ranks_are_counted_by_the_list_of_devices_or_the_gpus_of_a_process() -> None:
    holes = parse_nccl_tests(text_of(Log(ranks=16)).replace("#  Rank  3", "# lost"))
    assert holes["ranks"].unique().to_list() == [16]
    assert holes["nodes"].is_null().all()
    text = text_of(Log("broadcast", ranks=8, gpus_per_node=2))
    for rank in range(8):  # NCCL_TESTS_SPLIT runs several communicators at once
        text = text.replace(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group {rank % 2:2d}")
    frame = parse_nccl_tests(text)
    assert frame["ranks"].unique().to_list() == [4]
    assert frame["nodes"].unique().to_list() == [4]
    unlisted = parse_nccl_tests(text_of(Log("broadcast", listed=False)))
    assert unlisted["ranks"].unique().to_list() == [8]


def test_several_runs_in_one_text() -> None:
    logs = [
        Log(),
        Log("all_gather", 16, style="middle"),
        Log("send_recv", 4, style="old"),
        Log("reduce", 4),
    ]
    frame = parse_nccl_tests("\n".join(text_of(log) for log in logs))
    expected: list[dict[str, Any]] = []
    for log in logs:
        expected += log.expected()
    agree(frame, expected)


def test_columns_have_their_types() -> None:
    types = {
        "operation": pl.String,
        "ranks": pl.Int64,
        "nodes": pl.Int64,
        "dtype": pl.String,
        "redop": pl.String,
        "nbytes": pl.Int64,
        "seconds": pl.Float64,
        "algbw": pl.Float64,
        "busbw": pl.Float64,
        "in_place": pl.Boolean,
        "file": pl.String,
        "line": pl.Int64,
    }
    for log in (Log(), Log("all_gather", style="middle"), Log("send_recv", 4, style="old")):
        assert dict(parse_nccl_tests(text_of(log)).schema) == types


def test_programs_without_a_model_keep_their_name() -> None:
    frame = parse_nccl_tests(text_of(Log("all_gather"), all_gather_perf="hypercube_perf"))
    assert set(frame["operation"]) == {"hypercube"}
    assert frame["ranks"].unique().to_list() == [8]
    assert frame["busbw"].to_list()[-1] == pytest.approx(
        frame["algbw"].to_list()[-1] * 7 / 8, rel=1e-3
    )


def test_other_layouts() -> None:
    single = Log(times=()).head()[-2].replace("  time  algbw  busbw  #wrong", "", 1)
    row = "  268435456      67108864     float     sum      -1  1100.00  244.03  427.06      0"
    frame = parse_nccl_tests(f"/bin/all_reduce_perf -g 8\n{single}\n{row}")
    assert frame.select("in_place", "ranks").rows() == [(False, 8)]
    coloured = text_of(Log()).replace("# Avg", "\x1b[32m# Avg").replace("\n", "\x1b[0m\r\n")
    agree(parse_nccl_tests(coloured), Log().expected())


# -- what does not fit
# --------------------------------------------------------------------------------------------------


TEXT = text_of(Log())
BARE = Log(style="middle", listed=False)
HEAD = BARE.head()
ROW = BARE.row(2**20, 1e-3, 1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "no complete row of an nccl-tests table is there; pass the text that all_reduce_perf or its like print",
        ),
        (
            "\n{'a': 1}\n",
            r"text line 2 does not fit: \"{'a': 1}\": no row of an nccl-tests table follows; pass the",
        ),
        (
            "# nThread 1 nGpus 8 minBytes 8\nfailure",
            "line 2 .* ends before '# Avg bus bandwidth' closes .* line 1",
        ),
        (
            TEXT.replace("  time", "  cputime"),
            "line 14 .* the host alone .cputime.; run the test without -C",
        ),
        (
            TEXT.replace("# Avg", "#").replace("# Out", "#"),
            "line 21 .* ends before .* closes the table of line 3",
        ),
        (
            [*HEAD, *HEAD[2:], *BARE.lines()[len(HEAD) :]],
            "does not fit: .* should close the table before it; .*MPI=1",
        ),
        ([*HEAD, ROW, *HEAD, ROW], "'# Avg bus bandwidth' should close the table before it"),
        (
            [*HEAD, ROW[:70] + ROW, ROW[70:]],
            "line 7 .*: the row has 20 values, the header names 13",
        ),
        ([*HEAD, ROW, ROW[50:]], r"line \d+ does not fit: .*these figures belong to no row"),
    ],
)
def test_what_does_not_fit_is_named(text: str | list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_nccl_tests(text if isinstance(text, str) else "\n".join(text))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("35.20", "85.20", "algbw is not size / time"),
        ("52.13", "22.13", "busbw / algbw is not that"),
    ],
)
def test_a_row_with_a_damaged_figure_is_named_and_what_is_before_it_kept(
    old: str, new: str, reason: str
) -> None:
    text = text_of(Log(), **{old: new})
    with pytest.raises(
        ValueError,
        match=f"line 17 does not fit: .*{reason}.*; partial=True keeps the 2 measurements",
    ):
        parse_nccl_tests(text)
    with pytest.warns(LogWarning, match="line 17 does not fit: .*; 2 measurements are kept"):
        agree(parse_nccl_tests(text, partial=True), Log().expected()[:2])
    with pytest.raises(ValueError, match="partial is 'no'; it must be True or False"):
        parse_nccl_tests(text, partial="no")  # type: ignore[arg-type]


def test_folders_files_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(
        ValueError,
        match=r"holds no \.log, \.out, .* file and no table .*; name the logs one by one",
    ):
        read_nccl_tests(tmp_path)
    (tmp_path / "deep" / "b.out").write_text(text_of(Log("all_gather")))
    (tmp_path / "a.log").write_bytes(text_of(Log()).encode() + b"\n\xff\xfe")
    frame = read_nccl_tests(str(tmp_path))
    assert frame["file"].unique(maintain_order=True).to_list() == ["a.log", "deep/b.out"]
    assert read_nccl_tests([tmp_path / "deep" / "b.out"])["file"].unique().to_list() == ["b.out"]
    (tmp_path / "c.txt").write_text("alien")
    for partial in (False, True):
        with pytest.warns(LogWarning, match=r"^c\.txt line 1 .*'alien': no row .*file is not used"):
            assert read_nccl_tests(tmp_path, partial=partial).equals(frame)
    with pytest.raises(ValueError, match=r"^c\.txt line 1 does not fit: 'alien': no row"):
        read_nccl_tests(tmp_path / "c.txt")
    with pytest.raises(
        ValueError, match=r"absent\.log' is no file; name a log, several, or a folder of logs"
    ):
        read_nccl_tests(tmp_path / "absent.log")


def test_numbers_that_no_float_holds_belong_to_no_row(tmp_path: Path) -> None:
    row = "67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0"
    for number in ("1e400", "1e" + "9" * 5000):
        with pytest.raises(ValueError, match=r"^text line 1 does not fit: ") as caught:
            parse_nccl_tests(row.replace("584.5", number))
        assert len(str(caught.value)) < 400
    (tmp_path / "a\nb\x1b.log").write_text("alien")
    with pytest.raises(ValueError, match=r"^a\\nb\\x1b\.log line 1 does not fit: 'alien'"):
        read_nccl_tests(tmp_path / "a\nb\x1b.log")


@pytest.mark.parametrize("word", [" ", "a", "device 0 [x] ", "size count type ", "1 ", "a|"])
def test_long_lines_are_noise(word: str) -> None:
    """Two million characters, on which searches that take the square of a line's length would never
    end."""
    head = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong timestamp"
    row = "67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0 2025-08-01 12:00:00"
    frame = parse_nccl_tests("\n".join([word * (2_000_000 // len(word)) + "x", head, row]))
    assert frame["seconds"].to_list() == pytest.approx([584.5e-6, 581.9e-6])


# -- what belongs to a table
# --------------------------------------------------------------------------------------------------


def rows_of(log: Log, *sizes: int) -> str:
    return "\n".join(log.row(size, 1e-3, 1e-3) for size in sizes)


@given(logs(), logs(), st.booleans())
def test_rows_and_devices_after_the_closing_line_join_no_table(
    log: Log, other: Log, listed: bool
) -> None:
    late = [other.prefix + other.row(*times) for times in other.times]
    devices = [line for line in other.lines() if "Rank" in line]
    text = "\n".join([*log.lines(), *(devices if listed else []), *late])
    if listed and devices:  # devices of a next run, whose rows have no header
        try:
            frame = parse(log, text, partial=True)
        except (ValueError, LogWarning):
            return
        agree(frame[: len(log.expected())], log.expected())
    else:
        with pytest.warns(LogWarning, match=rf"{len(late)} rows? after its closing line .line"):
            frame = parse(log, text)
        agree(frame, log.expected())


def test_devices_of_a_next_run_do_not_join_a_closed_table() -> None:
    first, second = Log(ranks=4), Log(ranks=12, gpus_per_node=4)
    text = f"{text_of(first)}\n" + "\n".join(second.head()[2:])
    with pytest.raises(ValueError, match="does not fit"):  # the second run is not complete
        parse_nccl_tests(text)
    with pytest.warns(LogWarning, match="6 measurements are kept"):
        agree(parse_nccl_tests(text, partial=True), first.expected())
    # a run that stopped before its first row, then another with fewer ranks
    crashed = "\n".join(Log(ranks=16).head()[:19])
    with pytest.warns(LogWarning, match="the run of line 3 printed no row"):
        frame = parse_nccl_tests(f"{crashed}\n{text_of(first)}")
    assert frame["ranks"].unique().to_list() == [4]


def test_a_healthy_log_says_nothing_of_rows_after_the_end() -> None:
    agree(parse_nccl_tests(f"{text_of(Log())}\n{text_of(Log())}"), 2 * Log().expected())
    agree(
        parse_nccl_tests(f"{text_of(Log())}\njob 17 ended\n12 nodes were free\n"), Log().expected()
    )


@pytest.mark.parametrize("named", [True, False])
def test_words_after_the_figures_of_a_row_do_no_harm(named: bool) -> None:
    lines = []
    for line in Log().lines():
        if "algbw" in line:
            lines.append(f"{line}  algo  proto  channels" if named else line)
        elif line.split()[2:3] == ["float"]:
            lines.append(f"{line}  RING  SIMPLE  32")
        else:
            lines.append(line)
    if named:
        agree(parse_nccl_tests("\n".join(lines)), Log().expected())
        return
    with pytest.warns(LogWarning, match="words after the figures .* not used: 'RING SIMPLE 32'"):
        agree(parse_nccl_tests("\n".join(lines)), Log().expected())


OLD_ROW = "33554432 8388608 float sum 0.571 58.80 102.90 0e+00 0.570 58.85 102.98 0e+00"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "USAGE: all_reduce_perf \n [-t,--nthreads <num threads>]",
            "it is the help of the program",
        ),
        ('{\n  "traceEvents": []}', "it looks like JSON"),
        ("bash: all_reduce_perf: command not found", "line 1 .*command not found.*: no row"),
        ("\n".join(Log().head()[:12]), "the log ends before .* closes the table"),
        (
            "\n".join(
                [*Log().head(), "host: Test NCCL failure common.cu:958 'unhandled cuda error'"]
            ),
            "line 16 .*Test NCCL failure common.cu:958 .*: the log ends before",
        ),
        (f"# bytes N type op time algbw busbw res time algbw busbw res\n{OLD_ROW}", "before 2019"),
        (OLD_ROW, "before 2019"),
    ],
)
def test_a_refusal_names_what_stands_in_the_log(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_nccl_tests(text)


def test_a_run_that_found_wrong_results_says_so() -> None:
    failed = text_of(Log(validated=False)).replace(": 0 OK", ": 12 FAILED")
    with pytest.warns(LogWarning, match="its closing line says FAILED"):
        parse_nccl_tests(failed)


#: How programs and launchers write a log: what stands between lines, and the encoding.
ENCODED = {
    "utf-8": ("\n", "utf-8"),
    "windows": ("\r\n", "utf-8-sig"),
    "utf-16": ("\n", "utf-16"),
    "utf-16 without a mark": ("\n", "utf-16-le"),
    "old Mac": ("\r", "utf-8"),
    "colours": ("\x1b[0m\n\x1b[32m", "utf-8"),
    "kubernetes": ("\n2025-01-02T03:04:05.678Z ", "utf-8"),
    "srun": ("\n 0: ", "utf-8"),
    "mpirun": ("\n[1,0]<stdout>:", "utf-8"),
}


@pytest.mark.parametrize("name", ENCODED)
def test_a_log_is_the_same_however_it_was_written(tmp_path: Path, name: str) -> None:
    between, encoding = ENCODED[name]
    check_written(tmp_path, text_of(Log()).replace("\n", between).encode(encoding))


def test_a_packed_log_is_the_same(tmp_path: Path) -> None:
    check_written(tmp_path, gzip.compress(text_of(Log()).encode()))


def check_written(folder: Path, data: bytes) -> None:
    """A file of these bytes holds what the log was written from."""
    path = folder / "run.log"
    path.write_bytes(data)
    agree(read_nccl_tests(path), Log().expected())
    assert list_devices(path) == ("NVIDIA H100",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "it is a web page"),
        (b"PK\x03\x04" + b"\0" * 40, "it is a zip archive; unpack it"),
        (b"BZh91AY&SY", "compressed by bzip2"),
        (gzip.compress(b"\0" * 257 + b"ustar" + b"\0" * 600, mtime=0), "compressed tar archive"),
        (gzip.compress(b"text", mtime=0)[:-9], "cannot be read"),
    ],
    ids=["empty", "pointer", "page", "zip", "bzip2", "tar", "torn"],
)
def test_the_first_bytes_tell_what_is_no_log(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.log.*{message}"):
        read_nccl_tests(path)


def test_a_folder_gives_every_log_and_names_the_others_once(tmp_path: Path) -> None:
    kinds = {"a.dat": "a", "b.nccl": "b", "c.txt": "c", "d.out": "d", "slurm-17.o123": "e"}
    for name in kinds:
        (tmp_path / name).write_text(text_of(Log()))
    (tmp_path / "f.log.gz").write_bytes(gzip.compress(text_of(Log()).encode()))
    (tmp_path / "notes.md").write_text("nothing")
    frame = read_nccl_tests(tmp_path)
    assert frame["file"].unique().sort().to_list() == sorted([*kinds, "f.log.gz"])
    (tmp_path / "scheduler.log").write_text("job 17 could not start on node3: no port left")
    (tmp_path / "pointer.log").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.warns(LogWarning) as caught:
        assert read_nccl_tests(tmp_path).equals(frame)
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 2
    assert "git lfs pull" in said[0]
    assert said[1].startswith("scheduler.log")
    # the same where a shell lists the files
    with pytest.warns(LogWarning, match=r"(scheduler|pointer)\.log"):
        read_nccl_tests([path for path in sorted(tmp_path.iterdir()) if path.suffix != ".md"])
    # a log that breaks off is not left out silently
    (tmp_path / "torn.log").write_text(text_of(Log())[:-120])
    with pytest.raises(ValueError, match=r"torn\.log .*partial=True keeps"):
        read_nccl_tests(tmp_path)


@pytest.mark.parametrize(
    ("count", "odd"), [(8, False), (7, True), (4, False), (10, False), (1, False)]
)
def test_adapters_that_do_not_divide_among_ranks_are_told(count: int, odd: bool) -> None:
    names = " ".join(f"[{n}]mlx5_{n}:1/IB" for n in range(count))
    line = f"host-0:7:7 [0] NCCL INFO NET/IB : Using {names} [RO]; OOB eno1:10.0.0.1<0>"
    text = f"{line}\n{text_of(Log(ranks=16, gpus_per_node=8))}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parse_nccl_tests(text)
    said = [str(each.message) for each in caught]
    assert bool(said) == odd
    assert all("NCCL lists 7 network adapters for the 8" in x for x in said)


# -- what logs of other sites hold besides
# --------------------------------------------------------------------------------------------------


def name_nothing(log: Log) -> str:
    """Text of a log that does not name its program."""
    lines = [line for line in log.lines() if "_perf" not in line]
    return "\n".join(lines)


def test_a_log_that_cannot_be_named_does_not_spoil_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(text_of(Log()))
    unnamed = name_nothing(Log("all_gather", style="middle", validated=False))
    (tmp_path / "b.log").write_text(unnamed)
    with pytest.warns(LogWarning, match=r"b.log line \d+: the operation is not named.*not used"):
        frame = read_nccl_tests(tmp_path)
    assert set(frame["file"]) == {"a.log"}


def test_a_line_that_does_not_fit_is_named_before_what_follows_from_it() -> None:
    lines = name_nothing(Log(style="middle")).splitlines()
    broken = next(i for i, line in enumerate(lines) if line.split()[:1] == ["1048576"])
    lines[broken] = lines[broken].replace("35.20", "nan")
    with pytest.raises(ValueError, match=rf"line {broken + 1} does not fit: .*not complete"):
        parse_nccl_tests("\n".join(lines))


def test_one_rank_each_is_the_cause_where_the_operation_is_not_named_either() -> None:
    text = name_nothing(Log(ranks=1, style="middle"))
    with pytest.raises(ValueError, match=r"a table of one rank holds no exchange; .*MPI=1"):
        parse_nccl_tests(text)


def test_lost_lines_of_devices_are_the_cause_where_no_operation_has_the_figures() -> None:
    text = name_nothing(Log(ranks=16, style="middle"))
    for rank in range(12, 16):
        text = text.replace(f"#  Rank {rank}", "# lost")
    with pytest.raises(ValueError, match="names 12 ranks, no operation of so many"):
        parse_nccl_tests(text)


@pytest.mark.parametrize(
    "said",
    [
        "Invalid number of GPUs: 8 requested but only 4 were found.",
        "There are not enough slots available in the system to satisfy the 16",
        "bash: ./all_reduce_perf: Permission denied",
        "ssh: connect to host gpu-7 port 22: Connection refused",
    ],
)
def test_what_ended_a_run_before_its_table_is_quoted(said: str) -> None:
    start = "# nThread 1 nGpus 8 minBytes 8 maxBytes 8 step: 2(factor) validation: 1"
    with pytest.raises(ValueError, match=f"line 2 says .*{said[:30]}"):
        parse_nccl_tests(f"{start}\n{said}\nbye")


def test_a_failure_in_the_last_line_is_quoted_once() -> None:
    """The refusal shows the line at which the log ends in any case."""
    failure = "host: Test NCCL failure common.cu:958 'unhandled cuda error'"
    with pytest.raises(ValueError, match="the log ends before") as caught:
        parse_nccl_tests("\n".join([*Log().head(), failure]))
    assert str(caught.value).count("common.cu:958") == 1


def test_utf_16_of_either_order_is_read_without_its_mark(tmp_path: Path) -> None:
    for order in ("utf-16-le", "utf-16-be"):
        (tmp_path / "a.log").write_bytes(text_of(Log()).encode(order))
        assert len(read_nccl_tests(tmp_path / "a.log")) == 6


@pytest.mark.parametrize("head", [b"\x04\x22\x4d\x18", b"Rar!\x1a\x07\x01\x00"])
def test_archives_are_told_by_their_first_bytes(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "a.log").write_bytes(head + text_of(Log()).encode())
    with pytest.raises(ValueError, match=r"lz4; unpack it first|rar archive; unpack it"):
        read_nccl_tests(tmp_path / "a.log")


@pytest.mark.parametrize(
    "line",
    [
        "host-0:12:12 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.",
        "+ mpirun -np 8 -x NCCL_P2P_DISABLE=1 -x NCCL_DEBUG=WARN all_reduce_perf -b 8",
    ],
)
def test_variables_that_take_a_way_from_nccl_are_named_once(line: str) -> None:
    with pytest.warns(LogWarning, match="recorded with NCCL_P2P_DISABLE=1") as said:
        parse_nccl_tests(f"{line}\n{line}\n{text_of(Log())}")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_nccl_tests(f"{line.replace('=1', '=0').replace('to 1', 'to 0')}\n{text_of(Log())}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("host-0:12:12 [0] NCCL INFO NCCL_ALGO set by environment to Ring", "NCCL_ALGO=Ring:"),
        (
            "+ mpirun -x NCCL_PROTO=LL128 -x NCCL_ALGO=^Tree all_reduce_perf",
            "=.Tree, NCCL_PROTO=LL128:",
        ),
        ("export NCCL_ALGO='allreduce:ring;broadcast:tree'", "=allreduce:ring;broadcast:tree:"),
        ('"NCCL_PROTO": "Simple",', "NCCL_PROTO=Simple:"),
        ("NCCL_NVLS_ENABLE=0", "NCCL_NVLS_ENABLE=0:"),
    ],
)
def test_a_forced_algorithm_is_named_by_the_log_and_its_curves(
    tmp_path: Path, line: str, said: str
) -> None:
    platform, warned = calibrate(tmp_path, f"{line}\n{text_of(Log())}")
    assert [text for text in warned if re.search(f"0.log was recorded with .*{said}", text)]
    notes = platform.collectives["all_reduce.8"].notes
    assert any(
        re.search(f"recorded with .*{said} the curve holds for jobs with it", n) for n in notes
    )


@pytest.mark.parametrize(
    "line", ["NCCL_ALGO=", "unset NCCL_ALGO", "NCCL_NVLS_ENABLE=1", "ALGO=Ring"]
)
def test_a_free_choice_is_no_forced_one(tmp_path: Path, line: str) -> None:
    platform, warned = calibrate(tmp_path, f"{line}\n{text_of(Log())}")
    assert not [text for text in warned if "recorded with" in text]
    for fit in platform.collectives.values():
        assert not any("recorded with" in note for note in fit.notes)


def calibrate(folder: Path, *texts: str) -> tuple[pk.Platform, list[str]]:
    """A platform from logs, and what was warned of."""
    for index, text in enumerate(texts):
        (folder / f"{index}.log").write_text(text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        platform = pk.calibrate(nccl_logs=folder, base="h100-sxm-8")
    return platform, [str(warning.message) for warning in said]


def test_unequal_hosts_do_not_change_the_nodes_of_the_base(tmp_path: Path) -> None:
    platform, said = calibrate(tmp_path, text_of(Log(ranks=12)))
    assert platform.network.ranks_per_node == 8
    assert "host-0 holds 8 ranks and host host-1 4" in said[0]
    assert "neither the logs nor " in said[1] and len(said) == 2


def test_a_table_that_contradicts_another_one_of_its_log_is_said(tmp_path: Path) -> None:
    slow = Log(times=tuple((n, 9 * a, 9 * b) for n, a, b in Log().times))
    _, said = calibrate(tmp_path, f"{text_of(Log())}\n{text_of(slow)}")
    assert any("0.log (time 2) takes 9 times as long as 0.log (time 1)" in text for text in said)
    for file in tmp_path.iterdir():
        file.unlink()
    assert not calibrate(tmp_path, f"{text_of(Log())}\n{text_of(Log())}")[1]


def test_sums_are_fitted_where_other_operations_were_measured_too(tmp_path: Path) -> None:
    lines = text_of(Log()).splitlines()
    rows = [i for i, line in enumerate(lines) if " sum " in line]
    slow = Log(times=tuple((n, 9 * a, 9 * b) for n, a, b in Log().times))
    products = [line.replace(" sum ", "prod ") for line in slow.lines() if " sum " in line]
    both = [*lines[: rows[-1] + 1], *products, *lines[rows[-1] + 1 :]]
    mixed, said = calibrate(tmp_path, "\n".join(both))
    assert not said
    alone, _ = calibrate(tmp_path, text_of(Log()))
    assert mixed.collective("all_reduce", 1e6, ranks=8).time == pytest.approx(
        alone.collective("all_reduce", 1e6, ranks=8).time
    )


def test_times_that_no_link_inside_a_node_explains_are_doubted(tmp_path: Path) -> None:
    times = ((1024, 12.9e-6, 13.1e-6), (2**20, 35.2e-6, 34.1e-6), (2**30, 4e-4, 4e-4))
    _, said = calibrate(tmp_path, text_of(Log(times=times)))
    assert len(said) == 1
    assert "4.7 TB/s inside a node, far above the 450 GB/s" in said[0]


def test_a_slice_of_a_device_is_another_device(tmp_path: Path) -> None:
    text = text_of(Log()).replace("NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    _, said = calibrate(tmp_path, text)
    assert len(said) == 1
    assert "MIG 3g.40gb" in said[0]
