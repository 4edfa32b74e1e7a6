"""What logs of nccl-tests say besides their tables; hosts, numbers and figures are invented."""

import json
import warnings
from pathlib import Path

import pytest

from perfkit.readers.log_facts import LogFacts
from perfkit.readers.nccl import LogWarning, list_devices, read_logs
from perfkit.readers.nccl_facts import write_bus

HEADER = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
START = (
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 5 iters: 20 "
    "agg iters: 1 validation: 1 graph: 0"
)
FOOTER = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0"]
#: Prefixes of launchers and dates before each line.
PREFIXES = ("", "[1,3]<stdout>:", " 3: ", "pod/test-worker-0 | ", "2031-05-06T07:08:09.123Z ")


def write_devices(*hosts: str, bus: str = "0000:{:02x}:00") -> list[str]:
    """The list of devices, two GPUs for each host."""
    lines = []
    for rank in range(2 * len(hosts)):
        place = bus.format(0x1B + 16 * (rank % 2))
        lines.append(
            f"#  Rank {rank:2} Group  0 Pid {900 + rank} on {hosts[rank // 2]} device {rank % 2} "
            f"[{place}] NVIDIA H100 80GB HBM3"
        )
    return lines


def write_run(*said: str, hosts: tuple[str, ...] = ("elm-1", "elm-2")) -> list[str]:
    """An all_reduce with what NCCL says before its table."""
    factor = 2 * (2 * len(hosts) - 1) / (2 * len(hosts))
    busbw = f"{100 * factor:.2f}"
    row = f"1000000000 250000000 float sum -1 10000 100.00 {busbw} 0 10000 100.00 {busbw} 0"
    return [START, *write_devices(*hosts), *said, HEADER, row, *FOOTER]


def say(text: str, host: str = "elm-1", device: int = 0) -> str:
    """A line of NCCL INFO."""
    return f"{host}:900:9{device}1 [{device}] NCCL INFO {text}"


def read_facts(
    folder: Path, lines: list[str], prefix: str = "", name: str = "run.log"
) -> tuple[LogFacts, ...]:
    """Facts of a log of these lines."""
    path = folder / name
    path.write_text("\n".join(prefix + line for line in lines) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogWarning)
        return read_logs(path).facts


def read_one(folder: Path, *said: str, prefix: str = "") -> LogFacts:
    """Facts of a log of one run."""
    (facts,) = read_facts(folder, write_run(*said), prefix)
    return facts


def test_log_that_says_nothing_has_no_facts(tmp_path: Path) -> None:
    row = "1000000000 250000000 float sum -1 10000 100.00 187.50 0 10000 100.00 187.50 0"
    (facts,) = read_facts(tmp_path, [row])
    assert facts == LogFacts("run.log", 1, 1)
    assert facts.version is None
    assert facts.network is None
    assert facts.has_nvls is None
    assert facts.nvls_channels is None
    assert facts.hosts == ()
    assert facts.buses == {}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_launchers_are_understood(tmp_path: Path, prefix: str) -> None:
    facts = read_one(
        tmp_path, say("Using network IB"), say("Using network Socket", "elm-2"), prefix=prefix
    )
    assert [(said.text, said.host, said.line) for said in facts.networks] == [
        ("IB", "elm-1", 6),
        ("Socket", "elm-2", 7),
    ]
    assert facts.network is None
    assert facts.hosts == ("elm-1", "elm-2")


@pytest.mark.parametrize("form", ["{}", "{}\\n", "glued", "whole"])
def test_lines_that_a_collector_of_logs_wraps_are_understood(tmp_path: Path, form: str) -> None:
    lines = write_run("NCCL version 2.21.5+cuda12.4", say("Using network IB"))
    if form == "glued":
        wrapped = [f"2031-05-06T07:08:09.123-07:00{line}" for line in lines]
    elif form == "whole":
        wrapped = [json.dumps({"level": "info", "msg": "it ran", "output": "\n".join(lines)})]
    else:
        wrapped = [json.dumps({"log": line})[:-2] + form[2:] + '"}' for line in lines]
    (facts,) = read_facts(tmp_path, wrapped)
    assert [(said.text, said.host) for said in facts.networks] == [("IB", "elm-1")]
    assert facts.hosts == ("elm-1", "elm-2")
    assert facts.version == "2.21.5"
    assert list_devices(tmp_path / "run.log") == ("NVIDIA H100 80GB HBM3",)


def test_devices_buses_and_options(tmp_path: Path) -> None:
    facts = read_one(tmp_path)
    assert facts.buses == {name: ("0000:1b:00", "0000:2b:00") for name in ("elm-1", "elm-2")}
    assert facts.places[3].name == "NVIDIA H100 80GB HBM3"
    assert facts.places[3].line == 5
    assert facts.options is not None
    assert facts.options.iterations == 20
    assert facts.options.is_checked is True


@pytest.mark.parametrize(
    ("text", "bus"),
    [
        ("0x1B", "1b"),
        ("1b", "1b"),
        ("0000:1b:00", "0000:1b:00"),
        ("0000:1b:00.0", "0000:1b:00"),
        ("00000001:1B:04.0", "0001:1b:04"),
        ("a GPU", None),
    ],
)
def test_buses_have_one_form(text: str, bus: str | None) -> None:
    assert write_bus(text) == bus


def test_buses_are_read_from_lines_of_nccl_where_no_device_is_listed(tmp_path: Path) -> None:
    said = [
        say(
            f"ncclCommInitRank comm 0x5{rank} rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} "
            f"busId {number} commId 0x7 - Init START"
        )
        for rank, number in enumerate(["1b000", "10002b010"])
    ]
    row = "1000000000 250000000 float none -1 10000 100.00 50.00 0 10000 100.00 50.00 0"
    (facts,) = read_facts(tmp_path, [*said, row], name="all_gather.log")
    assert facts.buses == {"elm-1": ("0000:1b:00", "1000:2b:01")}
    assert facts.ranks == 2


def test_network_adapters_and_transports(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        "NCCL version 2.21.5+cuda12.4",
        say("NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_7:2/RoCE [RO]; OOB eno1:10.9.8.7<0>"),
        say("NET/Socket : Using [0]eno1:10.9.8.7<0>", "elm-2"),
        say("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read"),
        say("Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read"),
        say("Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1(0)/GDRDMA/Shared"),
        say("Channel 00 : 3[2b000] -> 0[1b000] [receive] via NET/AWS Libfabric/3"),
        say("Ring 00 : 2[0] -> 3[1] via direct shared memory", "elm-2"),
        say("Channel 02/0 : 2[0] -> 3[1] via P2P/IPC comm 0x55 nRanks 04", "elm-2"),
        say("comm 0x5 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0"),
    )
    assert facts.version == "2.21.5"
    assert facts.library == "NCCL"
    assert (facts.ranks, facts.nodes) == (4, 2)
    named = [(card.name, card.port, card.fabric) for card in facts.list_adapters("elm-1")]
    assert named == [("mlx5_0", "1", "IB"), ("mlx5_7", "2", "RoCE")]
    assert facts.list_adapters("elm-2")[0][:5] == ("elm-2", 0, "eno1", "10.9.8.7", "Socket")
    found = {way.name: way for way in facts.transports}
    assert found["P2P/CUMEM/read"].times == 2
    network = found["NET/IB/1(0)/GDRDMA/Shared"]
    assert (network.network, network.adapter, network.has_gdrdma) == ("IB", 1, True)
    plugin = found["NET/AWS Libfabric/3"]
    assert (plugin.network, plugin.adapter, plugin.has_gdrdma) == ("AWS Libfabric", 3, False)
    assert found["direct shared memory"].way == "SHM"
    assert found["P2P/IPC"].way == "P2P"


def test_adapters_of_plugins_merged_ones_and_their_rates(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        say("NET/IB : Made virtual device [0] name=mlx5_0 speed=400000 ndevs=1"),
        say("NET/IB: [1] rocep7:uverbs1:1/RoCE provider=Mlx5 speed=200000 context=0x5 ar=0"),
        say(
            "NET/IB : Using [0]mlx5_0:1/IB [1]={[1] rocep7:1/RoCE, [2] rocep8:1/RoCE} [RO]; OOB eth0:10.0.0.1<0>"
        ),
        say("NET/FastSocket : Using [0]eth1:10.0.0.2<0> [1]eth2:fe80::5%eth2<0>", "elm-2"),
    )
    found = [(card.name, card.port, card.fabric, card.rate) for card in facts.adapters]
    assert found == [
        ("mlx5_0", "1", "IB", 50e9),
        ("rocep7", "1", "RoCE", 25e9),
        ("rocep8", "1", "RoCE", None),
        ("eth1", "10.0.0.2", "FastSocket", None),
        ("eth2", "fe80::5%eth2", "FastSocket", None),
    ]
    assert not facts.remarks


def test_network_of_versions_that_do_not_say_it(tmp_path: Path) -> None:
    old = read_one(tmp_path, say("Ring 00 : 3[2b000] -> 0[1b000] [receive] via NET/IB/0/GDRDMA"))
    assert old.network == "IB"
    new = read_one(tmp_path, say("Assigned NET plugin Libfabric to comm"))
    assert new.network == "Libfabric"


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("Setting affinity for GPU 0 to 0300,00000000", 2),
        ("Setting affinity for GPU 0 to 0-15,32", 17),
        (
            "ncclTopoGetCpuAffinity: Affinity for GPU 0 is 0-31. (GPU affinity = 0-31 ; CPU affinity = 0-55).",
            32,
        ),
        (
            "ncclTopoGetCpuAffinity: Affinity for GPU 0 is empty, ignoring. (GPU affinity =  ; CPU affinity = 4).",
            1,
        ),
        ("Setting affinity for GPU 0 to 0", None),
    ],
)
def test_cores_of_a_gpu(tmp_path: Path, text: str, cores: int | None) -> None:
    facts = read_one(tmp_path, say(text))
    assert [one.cores for one in facts.affinities] == ([] if cores is None else [cores])


def test_lines_whose_host_and_kind_are_cut_off(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        "NCCL_IB_DISABLE set by environment to 1.",
        " Using network Socket",
        "Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct",
        "NVLS multicast support is not available on dev 0",
    )
    assert facts.network == "Socket"
    assert facts.has_nvls is False
    assert facts.transports[0].way == "SHM"
    assert [(one.name, one.source) for one in facts.settings] == [
        ("NCCL_IB_DISABLE", "environment")
    ]


def test_channels_and_nvlink_sharp(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        say("NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)"),
        say("NVLS multicast support is not available on dev 1", device=1),
        say(
            "24 coll channels, 0 collnet channels, 16 nvls channels, 32 p2p channels, 4 p2p channels per peer"
        ),
        say(
            "Pattern 4, crossNic 0, nChannels 12, bw 20.000000/24.000000, type NVL/PIX, sameChannels 1"
        ),
    )
    assert facts.has_nvls is False
    assert [said.device for said in facts.multicast if not said.is_available] == [1]
    assert facts.channels is not None
    assert facts.channels[:5] == (24, 0, 16, 32, 4)
    assert facts.nvls_channels == 16
    graph = facts.graphs[0]
    assert (graph.pattern, graph.channels, graph.within, graph.between) == ("ring", 12, 20e9, 24e9)
    older = read_one(tmp_path, say("16 coll channels, 8 p2p channels, 2 p2p channels per peer"))
    assert older.channels is not None
    assert older.channels[:5] == (16, 0, 0, 8, 2)


def test_words_of_rccl(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        "rccl-tests: Version develop:0000000",
        say("RCCL version : 2.22.3-HEAD:0000000"),
        "elm-1:900:931 [0] /build/long/path/src/init.cc:71 NCCL WARN NUMA auto balancing enabled",
        say(
            "comm 0x5 rank 1 nranks 4 cudaDev 1 busId c1000 localSize 280 used 7 bytes - Init COMPLETE"
        ),
        say("Channel 02/0 : 1[c1000] -> 2[c6000] [receive] via NET/Socket/1 comm 0x5 nRanks 04"),
        say("Connected all rings comm 0x5 nRanks 04 busId c1000"),
    )
    assert (facts.library, facts.version) == ("RCCL", "2.22.3")
    assert [(said.text, said.host) for said in facts.warnings] == [
        ("NUMA auto balancing enabled", "elm-1")
    ]
    assert facts.network == "Socket"
    assert facts.transports[0].name == "NET/Socket/1"
    hip = read_one(tmp_path, "NCCL version 2.21.5+hip6.2")
    assert (hip.library, hip.version) == ("RCCL", "2.21.5")


def test_who_set_a_variable(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        "+ mpirun -x NCCL_ALGO=Ring -np 4 \\",
        "   ./all_reduce_perf -b 8 -e 64",
        say("NCCL_IB_DISABLE set by environment to 1."),
        say("NCCL_IB_DISABLE set by environment to 1.", "elm-2"),
        say("NCCL_IB_HCA set to =mlx5_0:1,mlx5_1:1", "elm-2"),
        say('NET/OFI Setting NCCL_PROTO to "simple"'),
        say("NCCL_PROTO set by environment to simple"),
    )
    held = [(one.name, one.value, one.source, one.hosts) for one in facts.settings]
    assert held == [
        ("NCCL_ALGO", "Ring", "command", ()),
        ("NCCL_IB_DISABLE", "1", "environment", ("elm-1", "elm-2")),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", "environment", ("elm-2",)),
        ("NCCL_PROTO", "simple", "plugin", ("elm-1",)),
    ]
    assert facts.command is not None
    assert facts.command.text == ("+ mpirun -x NCCL_ALGO=Ring -np 4 ./all_reduce_perf -b 8 -e 64")


def test_algorithms_by_number_and_by_name(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        say("4096 Bytes -> Algo 0 proto 0 time 12.500000"),
        say("AllReduce: 8388608 Bytes -> Algo 1 proto 2 time 123.400002"),
        say("AllReduce: 8388608 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}"),
        say("AllReduce: 8388608 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}"),
        say("AllGather [Symmetric]: 512 Bytes -> Kernel AllGather_LL nchannels 8 nthreads 512"),
    )
    assert [choice[:6] for choice in facts.chosen] == [
        (None, 4096, "Tree", "LL", None, pytest.approx(12.5e-6)),
        ("all_reduce", 8388608, "Ring", "Simple", None, pytest.approx(123.400002e-6)),
        ("all_reduce", 8388608, "NVLSTree", "Simple", 16, None),
        ("all_gather", 512, "Symmetric", "AllGather_LL", 8, None),
    ]
    assert [choice.algorithm for choice in facts.find_choices("all_reduce", 8388608)] == [
        "NVLSTree",
        "Ring",
    ]
    assert facts.find_choices("all_gather", 4096)[0].algorithm == "Tree"


def test_warnings_and_telling_lines(tmp_path: Path) -> None:
    facts = read_one(
        tmp_path,
        "[2031-05-06 07:08:09] elm-2:900:931 [1] transport/net_ib.cc:71 NCCL WARN NET/IB : Got async event",
        say("NET/IB : No device found."),
        say("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", "elm-2"),
        say("TUNER/Plugin: Could not find: libnccl-tuner.so"),
        say("TUNER/Plugin: Using internal tuner plugin."),
        say("Check P2P Type isAllDirectP2p 1 directMode 0"),
        say("Check P2P Type isAllDirectP2p 0 directMode 0", "elm-2"),
    )
    (warning,) = facts.warnings
    assert (warning.text, warning.host, warning.line) == ("NET/IB : Got async event", "elm-2", 6)
    assert [(remark.topic, remark.host) for remark in facts.remarks] == [
        ("no IB device", "elm-1"),
        ("GPU Direct RDMA disabled", "elm-2"),
        ("no tuner plugin", "elm-1"),
        ("no tuner plugin", "elm-1"),
        ("P2P disabled", "elm-2"),
    ]


def test_facts_belong_to_their_run(tmp_path: Path) -> None:
    first = ["+ NCCL_ALGO=Ring ./all_reduce_perf -b 8", *write_run(say("Using network IB"))]
    second = ["+ NCCL_ALGO=Tree ./all_reduce_perf -b 8", *write_run(say("Using network Socket"))]
    one, two = read_facts(tmp_path, [*first, say("Destroy COMPLETE"), *second])
    assert (one.network, two.network) == ("IB", "Socket")
    assert [setting.value for setting in one.settings] == ["Ring"]
    assert [setting.value for setting in two.settings] == ["Tree"]
    assert two.first_line == one.last_line + 1
    assert one.holds("run.log", len(first))
    assert not one.holds("run.log", len(first) + 2)


def test_exports_and_first_words_belong_to_the_runs_behind_them(tmp_path: Path) -> None:
    words = "# nccl-tests version 2.17.6 nccl-headers={0} nccl-library={0}"
    lines = [
        "+ export NCCL_ALGO=Ring NCCL_DEBUG=INFO",
        words.format(22603),
        *write_run(say("Using network IB")),
        say("Destroy COMPLETE"),
        "+ export NCCL_ALGO=Tree",
        words.format(22703),
        *write_run(say("Using network Socket")),
        "+ unset NCCL_ALGO",
        "+ srun --export=ALL,NCCL_PROTO=LL ./all_reduce_perf -b 8",
        words.format(22803),
        *write_run(),
    ]
    runs = read_facts(tmp_path, lines)
    assert [facts.version for facts in runs] == ["2.26.3", "2.27.3", "2.28.3"]
    assert [facts.network for facts in runs] == ["IB", "Socket", None]
    held = [{one.name: one.value for one in facts.settings} for facts in runs]
    assert held == [
        {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"},
        {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO"},
        {"NCCL_PROTO": "LL", "NCCL_DEBUG": "INFO"},
    ]
    assert runs[1].find_settings("NCCL_DEBUG")[0].line == 1


FAILURE = "elm-1: Test NCCL failure common.cu:303 'unhandled system error'"


def test_run_that_died_among_others_is_named(tmp_path: Path) -> None:
    died = [*write_run(say("Using network Socket"))[:-2], FAILURE]
    whole = write_run(say("Using network IB"))
    path = tmp_path / "run.log"
    for lines, start in (([*died, *whole], 1), ([*whole, *died], len(whole) + 1)):
        path.write_text("\n".join(lines) + "\n")
        said = f"the run of line {start} died after 1 row: line {start + 8} says .*left out"
        with pytest.warns(LogWarning, match=said):
            logs = read_logs(path)
        assert len(logs.rows) == 2
        assert [facts.network for facts in logs.facts] == ["IB"]
        with pytest.warns(LogWarning, match="its rows are kept"):
            logs = read_logs(path, partial=True)
        assert len(logs.rows) == 4
        assert [facts.holds("run.log", line) for facts in logs.facts for line in (8, 18)] == [
            True,
            False,
            False,
            True,
        ]


def test_run_without_a_row_and_a_command_without_a_table_are_named(tmp_path: Path) -> None:
    whole = ["+ srun ./all_reduce_perf -b 8", *write_run()]
    died = [START, *write_devices("elm-1", "elm-2"), FAILURE]
    launch = ["+ srun ./all_gather_perf -b 8", "srun: error: Unable to create step for job 7: busy"]
    path = tmp_path / "run.log"
    path.write_text("\n".join([*whole, *died, *launch, *whole]) + "\n")
    with pytest.warns(LogWarning) as caught:
        logs = read_logs(path)
    assert len(logs.rows) == 4
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "the run of line 11 printed no row: line 16 says" in texts[0]
    assert "the command of line 17 printed no table: line 18 says 'srun: error" in texts[1]


def test_a_run_that_is_cut_off_without_a_failure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("\n".join([*write_run()[:-2], *write_run()]) + "\n")
    with pytest.raises(ValueError, match="should close the table before it"):
        read_logs(path)


def test_complaints_of_a_run_that_goes_on_are_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    lines = write_run("sh: /sys/x: No such file or directory", hosts=("elm-1", "elm-2"))
    path.write_text("\n".join([*lines, "srun: error: late", *write_run()]) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_logs(path).rows) == 4


def test_facts_of_a_run_that_printed_no_row_belong_to_none(tmp_path: Path) -> None:
    died = [START, *write_devices("elm-1", "elm-2"), say("Using network Socket")]
    (facts,) = read_facts(tmp_path, [*died, *write_run(say("Using network IB"))])
    assert facts.network == "IB"
