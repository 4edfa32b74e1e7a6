"""Logs of other benchmarks of collectives than nccl-tests: sizes, times and ranks by hand, what is left
out or refused, and that `perfkit.calibrate` takes them. All figures are invented."""

import re
import warnings
from pathlib import Path

import polars as pl
import pytest

import perfkit as pk
from perfkit.readers.collective_rows import Launch, read_launch
from perfkit.readers.dialects import DIALECTS, FOREIGN
from perfkit.readers.nccl import (
    LogWarning,
    _collect,
    _Log,
    parse_nccl_tests,
    read_logs,
    read_nccl_tests,
)
from tests.benchmark_logs import (
    ALL_REDUCE_BENCH,
    DEEPSPEED,
    DS_BENCH,
    EACH,
    HCCL,
    MSCCLPP,
    OLD_ALL_REDUCE_BENCH,
    ONECCL,
    ONECCL_CSV,
    OSU,
    PARAM,
    RCCL_ALGORITHMS,
    RCCL_CSV,
    RCCL_HEAD,
    RCCL_IN_PLACE,
    RCCL_JSON,
    STRAGGLERS,
)


def read(text: str, **settings: object) -> list[tuple[object, ...]]:
    """Operation, ranks, nodes, dtype, redop, bytes, seconds and in_place of each row."""
    frame = parse_nccl_tests(text, **settings)  # type: ignore[arg-type]
    columns = ("operation", "ranks", "nodes", "dtype", "redop", "nbytes", "seconds", "in_place")
    return [(*row[:6], pytest.approx(row[6]), row[7]) for row in frame.select(columns).rows()]


def quietly(text: str, **settings: object) -> list[tuple[object, ...]]:
    """Rows, whatever the reader warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogWarning)
        return read(text, **settings)


def test_each_dialect_has_a_text_here() -> None:
    """Each entry is tried, and found by its own text."""
    assert {dialect.name for dialect in DIALECTS} == set(EACH)
    for name, text in EACH.items():
        found = [dialect.name for dialect in DIALECTS if dialect.head.search(text)]
        assert found[0] == name
        assert all(dialect.mark in text for dialect in DIALECTS if dialect.name == name)


@pytest.mark.repository
def test_the_recipe_names_each_dialect() -> None:
    """The table of the docs has all of them."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "recipes.md").read_text("utf-8")
    for dialect in DIALECTS:
        assert re.search(rf"^\| .*{re.escape(dialect.name)}", text, re.MULTILINE), dialect.name


def test_oneccl_counts_the_part_of_one_rank() -> None:
    """The size of an allgather and an alltoall is times the ranks, that of others is not."""
    rows = [1024, 1048576]
    for operation, name, times, redop in (
        ("allreduce", "all_reduce", 1, "sum"),
        ("allgatherv", "all_gather", 8, None),
        ("alltoall", "all_to_all", 8, None),
        ("reduce_scatter", "reduce_scatter", 1, "sum"),
        ("bcast", "broadcast", 1, None),
    ):
        assert read(ONECCL.format(operation=operation)) == [
            (name, 8, None, "bf16", redop, times * rows[0], 32e-6, False),
            (name, 8, None, "bf16", redop, times * rows[1], 200e-6, False),
        ]
    assert read(ONECCL_CSV) == [
        ("all_gather", 4, None, "fp32", None, 4096, 10e-6, False),
        ("reduce_scatter", 4, None, "fp32", "sum", 4096, 20e-6, False),
    ]


def test_oneccl_of_several_operations_or_hosts() -> None:
    """Times of several operations at once are refused, and runs without a GPU are named."""
    for text, reason in (
        (ONECCL.format(operation="allreduce allgatherv"), "one at a time, such as --coll"),
        (ONECCL.format(operation="sparse_allreduce"), "perfkit knows no operation sparse"),
        (
            EACH["oneCCL's benchmark"].replace("buf_count:      1", "buf_count:      4"),
            "--buf_count 1",
        ),
        (ONECCL_CSV.replace("256,1,", "256,2,"), "--buf_count 1"),
        (ONECCL_CSV.replace("t_avg[usec]", "time"), "as oneCCL before 2021"),
        (EACH["oneCCL's benchmark"].replace("200.00       0.10", "2"), "the row is not complete"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            parse_nccl_tests(text)
    with pytest.warns(LogWarning, match="no GPU took part"):
        parse_nccl_tests(EACH["oneCCL's benchmark"].replace("sycl", "host"))


def test_hccl_takes_its_operation_and_ranks_from_the_command() -> None:
    """Nodes come from the devices of a node, wrong results are named."""
    expected = [
        ("all_reduce", 16, 2, "fp16", "sum", 1048576, 100e-6, False),
        ("all_reduce", 16, 2, "fp16", "sum", 2097152, 160e-6, False),
    ]
    assert read(EACH["HCCL Test"]) == expected
    gathered = HCCL.format(program="all_gather_test", last="success")
    assert read(gathered)[0] == ("all_gather", 16, 2, "fp16", None, 1048576, 100e-6, False)
    with pytest.warns(LogWarning, match=r"1 results hold wrong values \(the first in line 6\)"):
        parse_nccl_tests(HCCL.format(program="all_reduce_test", last="failed"))


def test_a_log_without_ranks_says_what_to_write() -> None:
    """The next step works: a command above the table gives ranks and nodes."""
    table = EACH["HCCL Test"].split("\n", 1)[1]
    with pytest.raises(ValueError, match="the log names no ranks; write the command") as caught:
        parse_nccl_tests(table, file="all_reduce.log")
    command = re.findall(r"'(mpirun [^']*)'", str(caught.value))[0]
    rows = read(f"{command}\n{table}", file="all_reduce.log")
    assert rows[0] == ("all_reduce", 16, 2, "fp32", "sum", 1048576, 100e-6, False)
    with pytest.raises(ValueError, match="no command names the operation"):
        parse_nccl_tests(f"{command}\n{table}", file="test.log")
    with pytest.raises(ValueError, match="put its name, and no other one, into the name of the"):
        parse_nccl_tests(f"{command}\n{table}", file="all_reduce_and_all_gather.log")
    scattered = parse_nccl_tests(f"{command}\n{table}", file="reduce_scatter.log")
    assert set(scattered["operation"]) == {"reduce_scatter"}


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("mpirun -np 16 -npernode 8 x", Launch(16, 2)),
        ("$ mpiexec.hydra -n 8 x", Launch(8, None)),
        ("mpirun -np 8 -N 4 x", Launch(8, 2)),
        ("srun -N 2 -n 8 x", Launch(8, 2)),
        ("srun --nodes=2 --ntasks-per-node=8 x", Launch(16, 2)),
        ("torchrun --nproc_per_node=8 x", Launch(8, 1)),
        ("torchrun --nnodes 2 --nproc-per-node 8 x", Launch(16, 2)),
        ("mpirun --map-by ppr:8:node -np 32 x", Launch(32, 4)),
        ("python -m torch.distributed.run --nproc_per_node=8 --nnodes 2 x", Launch(16, 2)),
        ("deepspeed --num_gpus 4 --num_nodes 2 x", Launch(8, 2)),
        ("accelerate launch --num_processes 16 --num_machines 2 x", Launch(16, 2)),
        ("srun: job 17 has been allocated resources", None),
        ("mpirun x", None),
        ("ssh node -n 4", None),
    ],
)
def test_launch_commands(command: str, launch: Launch | None) -> None:
    """Ranks and nodes of commands, with the meaning that each launcher gives to -N."""
    assert read_launch(command) == launch


def test_deepspeed_summary() -> None:
    """Ranks from the ratio of its rates, sizes in powers of 1024, more digits from the totals."""
    with pytest.warns(LogWarning) as said:
        rows = read(DEEPSPEED)
    assert rows == [
        ("broadcast", 8, None, "unknown", None, 2048, 0.08e-3, False),
        ("all_gather", 8, None, "unknown", None, 8 * 2**20, 0.503e-3, False),
        ("all_reduce", 8, None, "unknown", "sum", 500 * 2**20, 10e-3, False),
    ]
    words = " ".join(str(warning.message) for warning in said)
    for part in ("not read: all_reduce_of_mine, barrier", "all 8 ranks", "waited for each other"):
        assert part in words


def test_deepspeed_stragglers_tell_the_transfer_apart() -> None:
    """The second table gives the times of the transfer, and the last summary counts."""
    text = DEEPSPEED + STRAGGLERS
    assert quietly(text) == [
        ("all_gather", 8, None, "unknown", None, 8 * 2**20, 0.302e-3, False),
        ("all_reduce", 8, None, "unknown", "sum", 500 * 2**20, 8e-3, False),
    ]
    assert quietly(DEEPSPEED.replace("50.30", "49.70") + text) == quietly(text)
    with pytest.raises(ValueError, match=r"DeepSpeed.*no row|log_summary"):
        parse_nccl_tests(
            "comm op: all_reduce | time (ms): 0.50 | msg size: 4.0 MB | algbw (Gbps): 1.0"
        )


def test_deepspeed_benchmark() -> None:
    """Sizes are elements times their bytes, of all ranks for an all_gather; its rate must agree."""
    with pytest.warns(LogWarning, match="1 rows of pt2pt are not read"):
        rows = read(DS_BENCH)
    assert rows == [
        ("all_gather", 8, None, "unknown", None, 8 * 4096, 80e-6, False),
        ("all_gather", 8, None, "unknown", None, 8 * 2**32, 0.2, False),
    ]
    with pytest.raises(ValueError, match="its bus bandwidth is not that of size and time"):
        parse_nccl_tests(DS_BENCH.replace("1202.591", "1374.390"))
    gigabytes = DS_BENCH.replace("Gbps", "GBps").replace("2.867", "0.358")
    assert quietly(gigabytes.replace("1202.591", "150.324")) == rows


def test_param() -> None:
    """Ranks and nodes from the environment, or ranks from the rates."""
    with pytest.warns(LogWarning, match="1 results are not read: quantized"):
        rows = read(PARAM)
    assert rows == [
        ("all_reduce", 16, 2, "fp32", "sum", 2**20, 100e-6, False),
        ("all_to_all", 16, 2, "bf16", None, 2**21, 200e-6, False),
    ]
    programs = []
    for backend in ("nccl", "gloo"):
        text = f"\t backend: {backend} nw-stack: pytorch-dist mode: comms\n{PARAM}"
        with pytest.warns(LogWarning):
            programs.append(_collect([_Log("a", text)], partial=False).programs["a"])
    assert [program.unlike for program in programs] == [
        None,
        "its operations are those of gloo, not of NCCL",
    ]
    alone = PARAM.split("\n", 1)[1]
    assert [row[1:3] for row in quietly(alone)] == [(16, None), (16, None)]
    with pytest.raises(ValueError, match="the row is not complete"):
        parse_nccl_tests(PARAM.replace("10.486       9.831", "10"))


def test_runs_of_one_file_have_the_ranks_that_stand_above_them() -> None:
    """Of two runs in one log each has the ranks of its own title, command or environment."""
    smaller = ALL_REDUCE_BENCH.replace("16 ranks", "8 ranks").replace("--nnodes 2", "--nnodes 1")
    rows = quietly(f"{ALL_REDUCE_BENCH}\n{smaller}")
    assert [row[1:3] for row in rows] == [(16, 2), (16, 2), (8, 1), (8, 1)]
    smaller = PARAM.replace("'world_size': 16", "'world_size': 8")
    rows = quietly(f"{PARAM}\n{smaller}")
    assert [row[1:3] for row in rows] == [(16, 2), (16, 2), (8, 1), (8, 1)]
    before = "srun -N 2 --ntasks-per-node=4 python train.py"
    behind = "srun -N 1 --ntasks-per-node=8 python train.py"
    rows = quietly(f"{before}\n{DEEPSPEED}\n{behind}\n")
    assert {row[1:3] for row in rows} == {(8, 2)}


def test_osu() -> None:
    """The part of one rank is counted times the ranks; host memory and other tests are named."""
    for name, title, operation, times, redop in (
        ("allreduce", "Allreduce", "all_reduce", 1, "sum"),
        ("allgather", "Allgather", "all_gather", 8, None),
        ("alltoall", "All-to-All Personalized Exchange", "all_to_all", 8, None),
        ("bcast", "Broadcast", "broadcast", 1, None),
        ("reduce_scatter", "Reduce_scatter", "reduce_scatter", 1, "sum"),
        ("gather", "Gather", "gather", 8, None),
    ):
        rows = read(OSU.format(name=name, title=title))
        assert rows == [
            (operation, 8, 2, "fp32", redop, 4 * times, 10e-6, False),
            (operation, 8, 2, "fp32", redop, times * 2**20, 300e-6, False),
        ]
    with pytest.raises(ValueError, match="Iallreduce is no collective that perfkit reads"):
        parse_nccl_tests(OSU.format(name="iallreduce", title="Iallreduce"))
    with pytest.warns(LogWarning, match="in host memory"):
        parse_nccl_tests(EACH["OSU micro-benchmarks"].replace("MPI-CUDA", "MPI"))


def test_all_reduce_bench(tmp_path: Path) -> None:
    """Times from payload and rate; rates of too few digits are left out, devices are kept."""
    with pytest.warns(LogWarning, match="1 rows are left out: their rates"):
        rows = read(ALL_REDUCE_BENCH)
    assert rows == [
        ("all_reduce", 16, 2, "fp32", "sum", 2**20, 2**20 / 10e9, True),
        ("all_reduce", 16, 2, "fp32", "sum", 2**30, 2**30 / 200e9, True),
    ]
    table = ALL_REDUCE_BENCH[ALL_REDUCE_BENCH.index("| payload") :]
    assert [row[1:3] for row in quietly(table)] == [(16, None), (16, None)]
    assert read(OLD_ALL_REDUCE_BENCH) == [
        ("all_reduce", 4, None, "fp32", "sum", 4 * 10**9, 0.02, True)
    ]
    (tmp_path / "a.log").write_text(ALL_REDUCE_BENCH)
    with pytest.warns(LogWarning):
        logs = read_logs(tmp_path / "a.log")
    assert logs.devices == {"a.log": ("NVIDIA H100 80GB HBM3",)}
    with pytest.raises(ValueError, match="the row is not complete"):
        quietly(ALL_REDUCE_BENCH.replace("200.00GBps |", "200"))


def test_facts_of_each_operation() -> None:
    """A log of two operations has two runs; each row belongs to the one of its operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogWarning)
        logs = _collect([_Log("a.log", PARAM)], partial=False)
    assert len(logs.facts) == 2
    for file, line, operation in logs.rows.select("file", "line", "operation").rows():
        (run,) = [facts for facts in logs.facts if facts.holds(file, line)]
        assert logs.facts.index(run) == ["all_reduce", "all_to_all"].index(operation)


def test_files_of_rccl_tests_and_mscclpp() -> None:
    """The CSV has a value more than its header; ranks must agree with the bandwidths."""
    assert read(RCCL_CSV) == [
        ("all_reduce", 8, None, "fp32", "sum", 2**20, 100e-6, False),
        ("all_reduce", 8, None, "fp32", "sum", 2**20, 80e-6, True),
    ]
    assert read(RCCL_JSON) == [
        ("all_gather", 4, None, "bf16", None, 2**20, 100e-6, False),
        ("all_gather", 4, None, "bf16", None, 2**21, 160e-6, True),
    ]
    for text, dtype in ((RCCL_CSV, "float"), (RCCL_JSON, "bfloat16")):
        assert {row[3] for row in read(text.replace(dtype, "fp8_e4m3"))} == {"fp8"}  # as in a log
    assert read(MSCCLPP) == [("all_reduce", 16, 2, "unknown", "sum", 2**20, 100e-6, False)]
    with pytest.raises(ValueError, match="does not fit all_gather of 8 ranks"):
        parse_nccl_tests(RCCL_JSON.replace('"gpus":4', '"gpus":8'))
    with pytest.raises(ValueError, match="cut off or is no JSON"):
        parse_nccl_tests(RCCL_JSON[:-60])
    assert len(quietly(RCCL_JSON[:-60], partial=True)) == 1


#: Benchmarks whose times are not those of nccl-tests over NCCL.
UNLIKE = {
    "oneCCL's benchmark",
    "oneCCL's benchmark (CSV)",
    "HCCL Test",
    "OSU micro-benchmarks",
    "DeepSpeed's communication logger",
    "mscclpp-test (JSON)",
}


@pytest.mark.parametrize("name", EACH)
def test_cut_texts_keep_what_is_before(name: str, tmp_path: Path) -> None:
    """Lines before, prefixes of launchers, Windows' ends of lines and colours change nothing."""
    text = EACH[name]
    whole = quietly(text)
    assert whole
    assert quietly(f"Loading modules\n{text}\nDone in 12 s\n".replace("\n", "\r\n")) == whole
    if "CSV" not in name and "JSON" not in name and "OSU" not in name:
        assert quietly("\n".join(f"[1,0]<stdout>: {line}" for line in text.split("\n"))) == whole
    path = tmp_path / "all_reduce.results"  # no ending of logs: it is known by its head
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogWarning)
        logs = read_logs(tmp_path)
    assert len(logs.rows) == len(whole)
    assert logs.programs["all_reduce.results"].name == name
    unlike = logs.programs["all_reduce.results"].unlike
    assert (unlike is None) == (name not in UNLIKE), unlike


def test_tables_of_rccl_tests(tmp_path: Path) -> None:
    """Columns of the algorithm, cycles, in-place results alone, and names of AMD's devices."""
    rows = read(RCCL_HEAD + RCCL_ALGORITHMS)
    assert [(row[0], row[1], row[2], row[3], row[6], row[7]) for row in rows] == [
        ("all_reduce", 2, 1, "fp8", seconds, is_in_place)
        for seconds, is_in_place in ((100e-6, False), (80e-6, True), (110e-6, False), (90e-6, True))
    ]
    alone = read(RCCL_HEAD + RCCL_IN_PLACE)
    assert alone == [("all_reduce", 2, 1, "fp32", "sum", 2**20, 100e-6, True)]
    assert read(RCCL_HEAD + RCCL_IN_PLACE + RCCL_HEAD + RCCL_ALGORITHMS) == alone + rows
    (tmp_path / "a.log").write_text(RCCL_HEAD + RCCL_IN_PLACE)
    logs = read_logs(tmp_path)
    assert logs.devices == {"a.log": ("AMD Instinct MI300X VF",)}
    assert logs.facts[0].library == "RCCL"
    (tmp_path / "a.log").write_text(RCCL_HEAD + RCCL_ALGORITHMS)
    (run,) = read_logs(tmp_path).facts
    chosen = [choice[1:5] for choice in run.find_choices("all_reduce", 2**20)]
    assert chosen == [(2**20, "Ring", "Simple", 28), (2**20, "Tree", "LL", 28)]


def test_tables_beside_those_of_nccl_tests_are_named() -> None:
    """One reader reads a file: what else it holds is said."""
    with pytest.warns(
        LogWarning, match="tables of OSU micro-benchmarks beside those of nccl-tests"
    ):
        rows = read(RCCL_HEAD + RCCL_IN_PLACE + EACH["OSU micro-benchmarks"])
    assert rows == read(RCCL_HEAD + RCCL_IN_PLACE)


FOREIGN_TEXTS = {
    "nvbandwidth": "nvbandwidth Version: v0.8\nRunning host_to_device_memcpy_ce.\n",
    "perftest (ib_write_bw and its like)": " #bytes  #iterations  BW peak[Gb/sec]  BW average[Gb/sec]  MsgRate[Mpps]\n 65536 5000 96.1 95.9 0.18\n",
    "p2pBandwidthLatencyTest": "[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\n",
    "bandwidthTest of CUDA": "[CUDA Bandwidth Test] - Starting...\n",
    "iperf": "[ ID] Interval           Transfer     Bitrate\n[  5] 0.00-10.00 sec 1.1 GBytes 9.4 Gbits/sec\n",
    "ucx_perftest": "|    Stage     | # iterations | 50.0%ile | average | overhead (usec)\n",
    "ucc_perftest": "Collective: Allreduce\n       Count        Size                Time, us                           Bandwidth, GB/s\n",
    "mlxlink": "Operational Info\n----------------\nState : Active\n",
    "Intel MPI Benchmarks": "#    Intel(R) MPI Benchmarks 2021.7, MPI-1 part\n#bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]\n",
    "dcgmi diag": "Successfully ran diagnostic for group.\n",
    "rocm-bandwidth-test or TransferBench": "RocmBandwidthTest Version: 2.6.0\n",
    "hccl_demo of Habana": "[BENCHMARK]     NW Bandwidth   : 258.2 GB/s\n",
    "MSCCL++'s allreduce_bench.py": "| Size (fp16) | Time (us) | AlgBW (GB/s) | Correctness | NCCL Time (us) | NCCL AlgBW (GB/s) |\n",
    "nccom-test of AWS Neuron": "    size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)\n",
    "mscclpp-test": "#       size         count     time   algbw   busbw  #wrong\n",
    "DeepSpeed's communication logger": "comm op: all_reduce | time (ms): 0.5 | msg size: 4.0 MB\n",
    "nvidia-smi topo -m": "        GPU0    GPU1    CPU Affinity    NUMA Affinity\nGPU0     X      NV18    0-31    0\n",
}


def test_known_programs_are_refused_by_name() -> None:
    """Each says what it holds, and what to run instead; nothing refuses a log that has a table."""
    assert {foreign.name for foreign in FOREIGN} == set(FOREIGN_TEXTS)
    row = "67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0"
    for name, text in FOREIGN_TEXTS.items():
        with pytest.raises(
            ValueError, match=rf"it is the output of {re.escape(name)}, which holds"
        ):
            parse_nccl_tests(text)
    for text in FOREIGN_TEXTS.values():
        assert len(parse_nccl_tests(f"{text}{row}")) == 2


def test_calibrate_takes_each_without_being_told(tmp_path: Path) -> None:
    """A curve of PCIe cards by another benchmark is that of the same figures from nccl-tests."""
    sizes = [2**power for power in range(12, 28)]
    times = [30e-6 + size / 10e9 for size in sizes]
    lines = [f"{size} {1e6 * time:.2f}" for size, time in zip(sizes, times, strict=True)]
    osu = "\n".join(
        ["mpirun -n 8 osu_allreduce", "# OSU MPI-CUDA Allreduce Latency Test v7.1", *lines]
    )
    (tmp_path / "a.log").write_text(osu)
    platform = pk.calibrate(nccl_logs=tmp_path / "a.log", base="h100-sxm-8")
    took = float(platform.collective_time("all_reduce", 2.0**27, ranks=8))
    assert took == pytest.approx(times[-1], rel=0.02)
    notes = " ".join(platform.collectives["all_reduce.8"].notes)
    assert "a.log is of OSU micro-benchmarks: its operations are those of MPI" in notes
    frame = read_nccl_tests(tmp_path)
    assert frame["busbw"][-1] == pytest.approx(2 * 7 / 8 * sizes[-1] / times[-1], rel=1e-4)
    assert frame.schema["nodes"] == pl.Int64


def test_diagnoses_do_not_judge_other_libraries(tmp_path: Path) -> None:
    """What NCCL gives is expected of NCCL alone, and not of times that hold waiting."""
    path = tmp_path / "a.log"
    for name, word in (
        ("OSU micro-benchmarks", "those of MPI, not of NCCL"),
        ("DeepSpeed's communication logger", "ranks waited for each other"),
    ):
        path.write_text(EACH[name])
        found = pk.diagnose(path, "h100-sxm-8")
        assert found.ok is None
        assert word in found.headline()
    path.write_text(ALL_REDUCE_BENCH)
    assert pk.diagnose(path).ok is True  # PyTorch's NCCL on named devices


def test_in_place_times_count_where_there_are_no_others(tmp_path: Path) -> None:
    """A curve comes from all_reduce_bench.py, which works in place alone; beside rows out of place
    those count."""
    rows = []
    for power in range(16, 31):
        seconds = 50e-6 + 2**power / 100e9
        rate = 2**power / seconds / 1e9
        rows.append(f"| {2 ** (power - 10)}KiB | {1.75 * rate:.2f}GBps | {rate:.2f}GBps |")
    head = ALL_REDUCE_BENCH[: ALL_REDUCE_BENCH.index("|   32KiB")].replace("16 ranks", "8 ranks")
    head = head.replace("--nnodes 2", "--nnodes 1")
    (tmp_path / "torch.log").write_text(head + "\n".join(rows))
    platform = pk.calibrate(nccl_logs=tmp_path, base="h100-sxm-8")
    took = float(platform.collective_time("all_reduce", 2.0**30, ranks=8))
    assert took == pytest.approx(50e-6 + 2**30 / 100e9, rel=0.02)
    osu = [f"{2**power} {2e6 * (50e-6 + 2**power / 100e9):.2f}" for power in range(16, 31)]
    title = "# OSU MPI-CUDA Allreduce Latency Test v7.1"
    (tmp_path / "osu.log").write_text("\n".join(["mpirun -n 8 osu_allreduce", title, *osu]))
    with pytest.warns(UserWarning, match="torch.log is not used"):
        platform = pk.calibrate(nccl_logs=tmp_path, base="h100-sxm-8")
    assert platform.collective_time("all_reduce", 2.0**30, ranks=8) == pytest.approx(
        2 * took, rel=0.02
    )
