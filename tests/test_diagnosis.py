"""Verdicts on logs of nccl-tests: those of healthy and of sick systems, invented ones whose curve is known,
and what nobody can say."""

import json
import os
from pathlib import Path

import polars as pl
import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.diagnosis.candidates import advise_platform
from perfkit.diagnosis.records import Certainty, Range
from perfkit.diagnosis.systems import find_system
from perfkit.diagnosis.words import write_size
from perfkit.ground.files import find_reference
from perfkit.platform.gallery import is_same_device
from tests.logs_of_runs import A100, H100, SIZES, follow, write_run

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("PERFKIT_SHARED_DATA", ROOT.parent / "shared" / "data"))
LOGS = SHARED / "nccl_logs"
CASES = SHARED.parent / "cases" / "logs"
#: What each log with a known answer should be called, and a figure of its first line.
ANSWERS = {
    "01_a100_8_nvlink": ("as expected", "237 GB/s at 8 GiB, 21.2 µs at 8 B"),
    "02_h100_8_nvls": ("as expected", "481 GB/s at 8 GiB"),
    "03_h100_8_ring": (
        "as expected",
        "367 GB/s at 8 GiB, for the algorithm that was asked for (ring)",
    ),
    "04_h100_2x8_ib400": ("as expected", "469 GB/s at 8 GiB, 32.3 µs at 8 B"),
    "05_h100_4x8_ib400": ("as expected", "361 GB/s at 8 GiB"),
    "06_a100_2x8_efa100": ("as expected", "81.3 GB/s at 8 GiB, 157 µs at 8 B"),
    "07_l40s_4_pcie4": ("as expected", "21.7 GB/s at 8 GiB"),
    "08_a100_4x8_hdr200": ("slow", "167 GB/s at 8 GiB where 184 to 198 GB/s are expected"),
    "09_rtx4090_8": ("slow", "5.29 GB/s at 2 GiB where 12.7 to 25.9 GB/s are expected"),
    "10_h100_2x8": ("slow", "5.44 GB/s at 8 GiB"),
    "11_h200_8": ("slow", "366 GB/s at 8 GiB"),
    "12_a100_8_small": ("slow", "260 µs at 8 B where 8.98 to 55.4 µs are expected"),
    "13_h100_4x8_roce400": ("slow", "from 128 MiB on: all_reduce 147 GB/s at 8 GiB"),
    "14_a100_2x4": (
        "too good",
        "234 GB/s at 8 GiB, more than the 214 GB/s that its links can carry",
    ),
}
#: Runs of public logs that no datasheet or network explains.
UNKNOWN = {
    "a100x16_2node_p4d_efa_scatter_raw.log",
    "a100x16_2node_p4de_efa_allreduce.log",
    "h100x8_p5_nvswitch_allreduce.log",
    "h100x16_2node_alltoall_sendrecv.log",
}


@pytest.mark.skipif(not CASES.is_dir(), reason="the logs with known answers are not there")
@pytest.mark.parametrize("name", ANSWERS)
def test_a_log_with_a_known_answer_gets_it(name: str) -> None:
    verdict, figure = ANSWERS[name]
    diagnosis = pk.diagnose(CASES / f"{name}.log")
    assert diagnosis.verdict == verdict
    assert diagnosis.ok is (verdict == "as expected")
    assert str(diagnosis).splitlines()[0].startswith(verdict)
    assert figure in diagnosis.headline()


@pytest.mark.skipif(not CASES.is_dir(), reason="the logs with known answers are not there")
def test_a_log_without_large_or_small_messages_says_nothing_of_them() -> None:
    diagnosis = pk.diagnose(CASES / "05_h100_4x8_ib400.log")
    assert diagnosis.findings[0].case.find(Range.LATENCY) is None
    assert " µs" not in diagnosis.headline()


@pytest.mark.skipif(not LOGS.is_dir(), reason="the public logs are not there")
def test_no_public_log_is_called_sick() -> None:
    diagnosis = pk.diagnose(LOGS)
    by_file: dict[str, set[str]] = {}
    for finding in diagnosis.findings:
        by_file.setdefault(finding.case.file, set()).add(finding.word.value)
    assert len(by_file) == 13
    for file, words in by_file.items():
        assert words <= {"as expected", "not enough to say"}, file
        assert "as expected" in words or file in UNKNOWN, file


def test_published_curves_of_several_nodes_are_as_expected(tmp_path: Path) -> None:
    """Of H100 on two, four, eight and ten nodes, to which no spread was fitted."""
    programs = {"all_reduce": "all_reduce_perf", "all_to_all": "alltoall_perf"}
    frame = pl.read_csv(find_reference("published", "nccl_nodes.csv").read_bytes())
    frame = frame.filter(pl.col("system") == "h100_sxm")
    runs = frame.partition_by("operation", "ranks", "nodes")
    assert len(runs) == 5
    for run in runs:
        operation, ranks, nodes = run.select("operation", "ranks", "nodes").row(0)
        times = dict(zip(run["nbytes"], run["seconds"], strict=True))
        log = write_run(
            tmp_path / "run.log",
            times.__getitem__,
            hosts=[f"node-{number}" for number in range(nodes)],
            local=ranks // nodes,
            program=programs[operation],
            sizes=sorted(times),
        )
        assert pk.diagnose(log).verdict == "as expected", (operation, ranks, nodes)


# -- invented curves


def test_a_healthy_curve_is_as_expected_and_the_same_curve_times_0_6_is_slow(
    tmp_path: Path,
) -> None:
    """20 µs and 230 GB/s on eight A100: published are 21 to 35 µs and 220 to 237 GB/s."""
    healthy = follow(20e-6, 230e9, "all_reduce", 8)
    good = pk.diagnose(write_run(tmp_path / "good.log", healthy, device=A100))
    bad = pk.diagnose(
        write_run(tmp_path / "bad.log", lambda size: healthy(size) / 0.6, device=A100)
    )
    assert good.ok is True
    assert bad.ok is False and bad.headline().startswith("slow")
    assert "138 GB/s at 8 GiB" in bad.headline()


@pytest.mark.parametrize(
    ("left", "verdict"), [(8, "as expected"), (7, "slow"), (4, "as expected"), (1, "as expected")]
)
def test_one_missing_adapter_is_seen_where_nccl_lists_the_others(
    left: int, verdict: str, tmp_path: Path
) -> None:
    """Four nodes of eight A100 over adapters of 25 GB/s, of which 24 are reached. Half of them, or one,
    may be all that a node has."""
    listed = " ".join(f"[{n}]mlx5_{n}:1/IB" for n in range(left))
    lines = []
    for host in range(4):
        said = f"node-{host}:1:1 [0] NCCL INFO"
        lines += [f"{said} NET/IB : Using {listed} [RO]", f"{said} Using network IB"]
    rate = follow(40e-6, left * 24e9, "all_reduce", 32)
    hosts = [f"node-{host}" for host in range(4)]
    diagnosis = pk.diagnose(
        write_run(tmp_path / "run.log", rate, device=A100, hosts=hosts, lines=lines)
    )
    assert diagnosis.verdict == verdict
    largest = diagnosis.findings[0].case.find(Range.BANDWIDTH)
    usual = 8 if left == 7 else left
    assert largest is not None
    assert largest.line_share == pytest.approx(left * 24 / (usual * 25), abs=0.005)


def test_one_missing_adapter_is_seen_beside_nvlink_of_about_the_same_rate(tmp_path: Path) -> None:
    """Seven of 50 GB/s, of which 45 are reached, bound four nodes of H100; eight would give 360, which is
    within what their NVLink and adapters are known to give together."""
    hosts = [f"node-{host}" for host in range(4)]
    verdicts = []
    for count in (7, 8):
        listed = " ".join(f"[{n}]mlx5_{n}:1/IB" for n in range(count))
        lines = []
        for host in hosts:
            said = f"{host}:1:1 [0] NCCL INFO"
            lines += [f"{said} NET/IB : Using {listed} [RO]", f"{said} Using network IB"]
        rate = follow(40e-6, 315e9, "all_reduce", 32)
        diagnosis = pk.diagnose(write_run(tmp_path / "run.log", rate, hosts=hosts, lines=lines))
        verdicts.append(diagnosis.verdict)
        if count == 7:
            last = diagnosis.rows.row(-1, named=True)
            assert last["expected_bytes_per_s"] == pytest.approx(8 / 7 * 315e9, rel=0.01)
    assert verdicts == ["slow", "as expected"]


def test_a_rate_that_nccl_says_decides_where_two_would_do(tmp_path: Path) -> None:
    """187 GB/s on four nodes of eight H100 are what adapters of 200 Gb/s give, and half of 400."""
    hosts = [f"node-{host}" for host in range(4)]
    rate = follow(40e-6, 187e9, "all_reduce", 32)
    listed = " ".join(f"[{n}]mlx5_{n}:1/IB" for n in range(8))
    verdicts = []
    for speed in (None, 200_000, 400_000):
        lines = []
        for host in hosts:
            said = f"{host}:1:1 [0] NCCL INFO"
            lines += [f"{said} NET/IB : Using {listed} [RO]", f"{said} Using network IB"]
            for n in range(8 if speed else 0):
                name = f"[{n}] mlx5_{n}:uverbs{n}:1/IB"
                lines.append(f"{said} NET/IB: {name} provider=Mlx5 speed={speed} context=0x1")
        log = write_run(tmp_path / "run.log", rate, hosts=hosts, lines=lines)
        verdicts.append(pk.diagnose(log).verdict)
    assert verdicts == ["not enough to say", "as expected", "slow"]


def test_a_fall_at_one_size_is_noise_and_one_that_lasts_is_slow(tmp_path: Path) -> None:
    healthy = follow(20e-6, 230e9, "all_reduce", 8)
    once = write_run(
        tmp_path / "once.log", lambda size: healthy(size) * (2 if size == 2**28 else 1), device=A100
    )
    falls = write_run(
        tmp_path / "falls.log",
        lambda size: healthy(size) * (2 if size >= 2**28 else 1),
        device=A100,
    )
    assert pk.diagnose(once).ok is True
    assert pk.diagnose(falls).headline().startswith("slow from 256 MiB on")


def test_a_fall_is_slow_where_nothing_else_is_known(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    log = write_run(
        tmp_path / "falls.log",
        lambda size: curve(size) * (2 if size >= 2**28 else 1),
        device="Acme Accelerator 9",
    )
    diagnosis = pk.diagnose(log)
    assert diagnosis.verdict == "slow"
    rows = diagnosis.rows.filter(pl.col("verdict") == "slow")
    assert rows["size_bytes"].min() == 2**28
    # as much as 128 MiB had: 230 GB/s less the start-up of 20 µs
    expected = 2**28 / (2**27 / curve(2**27))
    assert rows["expected_s"][0] == pytest.approx(expected, rel=1e-3)


def test_faster_than_nvlink_without_a_reduction_in_the_switch_is_too_good(tmp_path: Path) -> None:
    """A100 have 300 GB/s, and rings count what each GPU sends; H100 may pass 450 by NVLink SHARP, 788
    they may not: a rank receives the whole result."""
    for device, rate, verdict in (
        (A100, 320e9, "too good"),
        (H100, 480e9, "as expected"),
        (H100, 820e9, "too good"),
    ):
        curve = follow(15e-6, rate, "all_reduce", 8)
        assert pk.diagnose(write_run(tmp_path / "run.log", curve, device=device)).verdict == verdict


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "Acme Accelerator 9"}, "no datasheet of Acme Accelerator 9"),
        ({"device": "NVIDIA H100 PCIe"}, "name a file of a platform with this device"),
        ({"hosts": ("a", "b"), "program": "sendrecv_perf"}, "pairs reach between nodes"),
        ({"hosts": ("a", "b"), "device": "NVIDIA L40S"}, "nothing is known of all_reduce"),
        ({"local": 4, "device": "AMD Instinct MI300X"}, "links of 4 AMD Instinct MI300X"),
        ({"local": 1}, "a table of one rank holds no exchange"),
    ],
)
def test_what_nobody_can_say_is_said_with_its_reason(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    program = str(change.get("program", "all_reduce_perf"))
    ranks = int(change.get("local", 8)) * len(change.get("hosts", "a"))  # type: ignore[call-overload, arg-type]
    name = "send_recv" if program == "sendrecv_perf" else "all_reduce"
    curve = follow(30e-6, 10e9, name, ranks)
    log = write_run(tmp_path / "run.log", curve, **change)  # type: ignore[arg-type]
    diagnosis = pk.diagnose(log)
    assert diagnosis.verdict == "not enough to say" and diagnosis.ok is None
    assert said in diagnosis.headline()
    assert not len(diagnosis.thresholds())


@pytest.mark.parametrize(
    ("device", "nodes", "local", "advice"),
    [
        ("NVIDIA A100-SXM4-40GB", 16, 8, "name a platform, such as a100-sxm-40gb-8x16"),
        ("AMD Instinct MI300X", 1, 4, "name a platform, such as mi300x-4"),
        ("NVIDIA L40S", 2, 8, "name a file of a platform with such nodes and their links"),
        ("NVIDIA H200", None, None, "name a platform, such as h200-sxm-8x4"),
        ("Acme Accelerator 9", 4, 8, "name a platform, such as h100-sxm-8x4"),
    ],
)
def test_a_platform_that_is_advised_is_of_the_device_and_can_be_loaded(
    device: str, nodes: int | None, local: int | None, advice: str
) -> None:
    system = find_system([device], (nodes or 4) * (local or 8), nodes, local, None)
    assert advise_platform(system) == advice
    _, _, name = advice.partition("such as ")
    if name.endswith(("x4", "x16", "-4")):
        platform = pk.load_platform(name)
        assert system.sheet is None or is_same_device(device, platform.device.name)


def test_a_run_that_no_network_explains_is_told_a_platform_of_its_own_device(
    tmp_path: Path,
) -> None:
    """16 nodes that are slow up to a size and fast from then on."""
    hosts = [f"node-{number}" for number in range(16)]
    log = write_run(
        tmp_path / "run.log",
        lambda nbytes: 17.4e-3 if nbytes >= 2**30 else 3e-3 + nbytes / 35e9,
        device="NVIDIA A100-SXM4-40GB",
        hosts=hosts,
        program="all_gather_perf",
        sizes=[2**power for power in range(10, 31)],
    )
    assert "such as a100-sxm-40gb-8x16" in pk.diagnose(log).headline()


def test_one_rank_has_times_and_no_bandwidth(tmp_path: Path) -> None:
    """nccl-tests prints a bus bandwidth of 0 for one rank: 2 (n - 1) / n is 0."""
    log = write_run(
        tmp_path / "run.log", lambda nbytes: 4e-6 + nbytes / 0.7e12, local=1, sizes=(1024, 2**26)
    )
    diagnosis = pk.diagnose(log)
    assert "all_reduce 99.9 µs at 64 MiB, 4 µs at 1 KiB" in diagnosis.headline()
    assert "0 B/s" not in str(diagnosis)


def test_a_platform_of_the_user_says_what_the_log_does_not(tmp_path: Path) -> None:
    curve = follow(30e-6, 150e9, "all_reduce", 8)
    log = write_run(tmp_path / "run.log", curve, device="Acme Accelerator 9")
    assert pk.diagnose(log).ok is None
    assert pk.diagnose(log, "h100-sxm-8").ok is False
    assert "more than" in pk.diagnose(log, "l40s-8").headline() or not pk.diagnose(log, "l40s-8").ok


def test_rings_over_nodes_of_cards_are_bound_by_their_adapters(tmp_path: Path) -> None:
    """Two nodes of eight L40S over one adapter of 12.5 GB/s: 11 GB/s are a ring's, 4 are slow."""
    listed = "NET/IB : Using [0]mlx5_0:1/IB [RO]"
    speed = "NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=100000 context=0x1"
    lines = []
    for host in ("a", "b"):
        for text in (listed, speed, "Using network IB"):
            lines.append(f"{host}:1:1 [0] NCCL INFO {text}")
    for rate, verdict in ((11e9, "as expected"), (4e9, "slow")):
        curve = follow(60e-6, rate, "all_reduce", 16)
        log = write_run(
            tmp_path / "run.log", curve, device="NVIDIA L40S", hosts=("a", "b"), lines=lines
        )
        assert pk.diagnose(log).verdict == verdict


def test_nodes_with_unequal_numbers_of_ranks_are_not_judged(tmp_path: Path) -> None:
    log = write_run(tmp_path / "run.log", follow(30e-6, 100e9, "all_reduce", 16), hosts=("a", "b"))
    text = (
        log.read_text()
        .replace("Pid 108 on b", "Pid 108 on a")
        .replace("Pid 109 on b", "Pid 109 on a")
    )
    log.write_text(text)
    diagnosis = pk.diagnose(log)
    assert diagnosis.verdict == "not enough to say"
    assert "unequal" in diagnosis.headline()


def test_two_cards_may_have_a_bridge_and_eight_have_none(tmp_path: Path) -> None:
    """Published for two RTX 3090 with NVLink: more than the 32 GB/s of their slots."""
    for local, verdict in ((2, "as expected"), (8, "too good")):
        curve = follow(15e-6, 42e9, "all_reduce", local)
        log = write_run(tmp_path / "run.log", curve, device="NVIDIA GeForce RTX 3090", local=local)
        assert pk.diagnose(log).verdict == verdict


# -- what it gives


@pytest.fixture
def diagnosis(tmp_path: Path) -> pk.Diagnosis:
    """Two runs of one node, of which the second one is slow."""
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    write_run(tmp_path / "a.log", curve, device=A100)
    write_run(tmp_path / "b.log", lambda size: curve(size) * 1.8, device=A100)
    return pk.diagnose(tmp_path)


def test_runs_are_counted_and_their_spread_is_said(diagnosis: pk.Diagnosis) -> None:
    assert diagnosis.headline().endswith("(b.log; 1 of 2 runs slow)")
    spread = diagnosis.spread()
    assert len(spread) == len(SIZES) and set(spread["runs"]) == {2}
    last = spread.row(-1, named=True)
    assert last["slowest_s"] / last["fastest_s"] == pytest.approx(1.8, rel=1e-3)
    assert "runs differ: all_reduce of 8 B takes 20 µs to 36 µs in 2 runs" in str(diagnosis)


def test_runs_on_other_devices_are_not_beside_each_other(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    write_run(tmp_path / "a.log", curve, device=A100)
    write_run(tmp_path / "h.log", lambda size: curve(size) / 2, device=H100)
    assert not len(pk.diagnose(tmp_path).spread())


def test_floors_of_a_health_check_lie_between_the_healthy_and_the_slow_run(
    diagnosis: pk.Diagnosis,
) -> None:
    floors = diagnosis.thresholds()
    largest = floors.row(-1, named=True)
    assert largest["size_bytes"] == 2**33
    assert 130e9 < largest["least_busbw_bytes_per_s"] < 225e9
    # busbw = f n / t with f = 2 (8 - 1) / 8
    assert largest["least_busbw_bytes_per_s"] == pytest.approx(1.75 * 2**33 / largest["longest_s"])
    busbw = floors["least_busbw_bytes_per_s"].to_list()
    assert busbw == sorted(busbw)


def test_a_report_has_the_ranges_and_the_floors(
    diagnosis: pk.Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pk.Diagnosis, "chart", lambda _: None)  # which test_plots.py draws
    sections = dict(diagnosis.sections())
    heads, *rows = sections["By sizes"]
    assert (
        rows[0][heads.index("verdict")] == "as expected" and "b.log" in rows[0][heads.index("run")]
    )
    assert rows[2][heads.index("measured")] == "128 GB/s"
    assert "Runs beside each other" in sections and "Floors of a health check" in sections


def test_rows_have_what_was_measured_and_expected(diagnosis: pk.Diagnosis) -> None:
    rows = diagnosis.rows
    assert len(rows) == 2 * 2 * len(SIZES)
    assert set(rows["verdict"]) == {"as expected", "low, not slow", "slow"}
    low = rows.filter(verdict="low, not slow")
    assert (low["measured_s"] > low["high_s"]).all() and (low["measured_s"] <= low["slow_s"]).all()
    assert (
        (rows.filter(verdict="as expected").select(pl.col("measured_s") <= pl.col("high_s")))
        .to_series()
        .all()
    )
    last = rows.row(-1, named=True)
    # what 230 GB/s and 20 µs are, over 1.8, of NVLink's 300 GB/s
    busbw = 1.75 * 2**33 / (1.8 * (20e-6 + 1.75 * 2**33 / 230e9))
    assert last["busbw_bytes_per_s"] == pytest.approx(busbw, rel=1e-3)
    assert last["link_share"] == pytest.approx(busbw / 300e9, rel=1e-3)
    assert last["low_s"] < last["expected_s"] < last["high_s"] < last["slow_s"] < last["measured_s"]


def test_the_command_has_an_exit_code_for_ci(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_command(*words: object) -> int:
        return main([*map(str, words)])

    curve = follow(20e-6, 230e9, "all_reduce", 8)
    good = write_run(tmp_path / "good.log", curve, device=A100)
    bad = write_run(tmp_path / "bad.log", lambda size: curve(size) * 1.8, device=A100)
    unknown = write_run(tmp_path / "unknown.log", curve, device="Acme Accelerator 9")
    assert run_command("log", good) == 0
    assert run_command("log", unknown) == 0
    assert run_command("log", bad) == 1
    assert run_command("log", tmp_path / "none.log") == 2
    floors = tmp_path / "floors.csv"
    capsys.readouterr()
    assert run_command("log", bad, "--json", "-", "--thresholds", floors) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["verdict"] == "slow" and figures["ok"] is False
    assert pl.read_csv(floors)["least_busbw_bytes_per_s"].max() > 130e9
    assert run_command("log", unknown, "--thresholds", floors) == 2
    assert "it is not known what to expect of any run" in capsys.readouterr().err
    assert run_command("log", good, "--thresholds", tmp_path / "floors.txt") == 2


def test_progress_is_told(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    for name in "abcd":
        write_run(tmp_path / f"{name}.log", curve, device=A100, sizes=SIZES[-3:])
    told: list[float] = []
    pk.diagnose(tmp_path, progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]


# -- figures and verdicts agree
# --------------------------------------------------------------------------------------------------


def test_a_range_that_is_slow_from_a_size_on_is_split_there(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    log = write_run(tmp_path / "run.log", lambda size: max(curve(size), size / 15e9), device=A100)
    diagnosis = pk.diagnose(log)
    first = diagnosis.rows.filter(verdict="slow")["size_bytes"].min()
    assert f"slow from {write_size(first)} on" in diagnosis.headline()
    table = diagnosis.table()
    assert first in table["from_bytes"].to_list()
    assert set(table.filter(pl.col("from_bytes") >= first)["verdict"]) == {"slow"}


def test_one_size_of_a_range_is_apart_where_all_larger_ones_are_slow_too(tmp_path: Path) -> None:
    """Four nodes of eight H100, where the last size of the middle range and all after it are slow."""
    healthy = follow(38e-6, 360e9, "all_reduce", 32)
    hosts = [f"node-{host}" for host in range(4)]
    good = pk.diagnose(write_run(tmp_path / "good.log", healthy, device=H100, hosts=hosts))
    cut = good.rows.filter(sizes="middle")["size_bytes"].max()
    bad = write_run(
        tmp_path / "bad.log",
        lambda size: healthy(size) * (2.5 if size >= cut else 1.0),
        device=H100,
        hosts=hosts,
    )
    diagnosis = pk.diagnose(bad)
    assert diagnosis.headline().startswith(f"slow from {write_size(cut)} on")
    middle = diagnosis.table().filter(sizes="middle")
    assert middle["from_bytes"][1] == middle["to_bytes"][1] == cut
    assert middle["verdict"].to_list() == ["as expected", "slow"]


def test_the_last_size_of_the_middle_alone_may_be_noise(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    sizes = [8 << n for n in range(21)]
    log = write_run(
        tmp_path / "run.log",
        lambda size: curve(size) * (4.0 if size == sizes[-1] else 1.0),
        device=A100,
        sizes=sizes,
    )
    diagnosis = pk.diagnose(log)
    assert set(diagnosis.rows.filter(size_bytes=sizes[-1])["verdict"]) == {"slow"}
    assert diagnosis.table()["verdict"].to_list() == ["as expected", "low, not slow"]


def test_a_run_that_is_too_good_has_one_limit(tmp_path: Path) -> None:
    """Two hosts of four A100 whose messages stay on NVLink: 4 x 32 GB/s x 512/536 x 1.75 = 214 GB/s."""
    said = "pod-0:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 4[0] via P2P/CUMEM"
    log = write_run(
        tmp_path / "run.log",
        follow(20e-6, 234e9, "all_reduce", 8),
        device=A100,
        hosts=("pod-0", "pod-1"),
        local=4,
        lines=[said],
    )
    diagnosis = pk.diagnose(log)
    assert "more than the 214 GB/s that its links can carry" in diagnosis.headline()
    assert diagnosis.causes[0].name == "one machine"
    evidence = " ".join(each.text for each in diagnosis.causes[0].evidence)
    assert (
        "more than 214 GB/s (122 GB/s of data), which the 4 PCIe slots of a node (32 GB/s each"
        in evidence
    )
    assert "between nodes 81.6 to 184 GB/s are expected" in diagnosis.causes[0].advice[-1]


def test_no_limit_is_said_where_networks_of_such_nodes_differ_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start-ups over clouds' networks are many times those over InfiniBand, bandwidths the same."""
    hosts = [f"node-{host}" for host in range(4)]
    log = write_run(tmp_path / "run.log", follow(38e-6, 360e9, "all_reduce", 32), hosts=hosts)
    diagnosis = pk.diagnose(log)
    assert set(diagnosis.rows["verdict"]) == {"as expected"}
    smallest, *_, largest = diagnosis.table().iter_rows(named=True)
    assert smallest["slow_s"] is None and largest["slow_s"] is not None
    floors = diagnosis.thresholds()["size_bytes"]
    assert floors.min() > 2**16 and floors.max() == SIZES[-1]
    assert main(["log", str(log), "--thresholds", str(tmp_path / "floors.csv")]) == 0
    assert (
        "networks that may join its nodes differ there; name a platform" in capsys.readouterr().err
    )
    named = pk.diagnose(log, "h100-sxm-8x4")
    assert named.rows["slow_s"].null_count() == 0
    assert len(named.thresholds()) == len(SIZES)


@pytest.mark.parametrize("program", ["gather_perf", "sendrecv_perf"])
def test_a_platform_that_is_named_as_a_next_step_is_one_that_helps(
    tmp_path: Path, program: str
) -> None:
    """No datasheet times these exchanges: naming one would end where it began."""
    curve = follow(20e-6, 30e9, "gather" if program == "gather_perf" else "send_recv", 4)
    log = write_run(tmp_path / "run.log", curve, local=4, program=program)
    for platform in (None, "h100-sxm-4"):
        diagnosis = pk.diagnose(log, platform)
        assert diagnosis.verdict == "not enough to say"
        assert "name a platform that was calibrated with healthy logs of" in diagnosis.headline()
    measured = pk.calibrate(nccl_logs=log, base="h100-sxm-8")
    assert pk.diagnose(log, measured).verdict == "as expected"


def test_only_slow_runs_are_said_to_be_slow_from_a_size_on(tmp_path: Path) -> None:
    """Too good in the middle, slow at the end: not too good from the size on where slow ones begin."""
    curve = follow(20e-6, 230e9, "all_reduce", 8)

    def bend(size: int) -> float:
        if size >= 2**26:
            return curve(size) * 3
        return curve(size) / 20 if size > 2**17 else curve(size)

    diagnosis = pk.diagnose(write_run(tmp_path / "run.log", bend, device=A100))
    assert diagnosis.headline().startswith("too good: all_reduce ")


def test_what_is_below_the_interval_and_not_slow_is_called_low(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    log = write_run(tmp_path / "run.log", lambda size: curve(size) * 1.15, device=A100)
    diagnosis = pk.diagnose(log)
    last = diagnosis.rows.filter(pl.col("size_bytes") == pl.col("size_bytes").max())
    assert (last["measured_s"] > last["high_s"]).all()
    assert (last["measured_s"] < last["slow_s"]).all()
    assert set(last["verdict"]) == {"low, not slow"}
    assert diagnosis.verdict == "low, not slow"
    assert diagnosis.ok is None
    shown = diagnosis.chart().to_json(indent=None)
    assert '"low, not slow"' in shown
    assert '"values": [32, 1024, 32768, 1048576, 33554432, 1073741824]' in shown
    assert "' KiB'" in shown
    assert diagnosis.headline().endswith("are expected; some healthy runs are as low")


def test_runs_of_one_log_are_of_one_network(tmp_path: Path) -> None:
    """Over eight adapters that NCCL lists without their rate 300 GB/s are what 400 Gb/s give. A second run
    at 180 is slow then; alone it could be one over 200 Gb/s."""
    hosts = [f"node-{host}" for host in range(4)]
    listed = " ".join(f"[{n}]mlx5_{n}:1/IB" for n in range(8))
    lines = []
    for host in hosts:
        said = f"{host}:1:1 [0] NCCL INFO"
        lines += [f"{said} NET/IB : Using {listed} [RO]", f"{said} Using network IB"]
    texts = []
    for bandwidth in (360e9, 180e9):
        rate = follow(40e-6, bandwidth, "all_reduce", 32)
        log = write_run(tmp_path / "run.log", rate, hosts=hosts, lines=lines)
        texts.append(log.read_text())
    assert pk.diagnose(log).verdict == "not enough to say"
    log.write_text("".join(texts))
    diagnosis = pk.diagnose(log)
    assert [finding.word.value for finding in diagnosis.findings] == ["as expected", "slow"]
    networks = {finding.case.expectation.system for finding in diagnosis.findings}
    assert networks == {"8 adapters of 400 Gb/s"}


def test_the_surest_cause_of_all_runs_is_told_first(tmp_path: Path) -> None:
    """Of three runs of one log the second loses packets; that no cause is known is left out."""
    hosts = [f"node-{host}" for host in range(4)]
    listed = " ".join(f"[{n}]mlx5_{n}:1/RoCE" for n in range(8))
    lines = []
    for host in hosts:
        said = f"{host}:1:1 [0] NCCL INFO"
        lines += [f"{said} NET/IB : Using {listed} [RO]", f"{said} Using network IB"]
    healthy = follow(40e-6, 360e9, "all_reduce", 32)
    alone = write_run(
        tmp_path / "alone.log", lambda size: healthy(size) * 1.4, hosts=hosts, lines=lines
    )
    lossy = write_run(
        tmp_path / "lossy.log",
        lambda size: healthy(size) * (4 if size.bit_length() % 2 else 1),
        hosts=hosts,
        lines=lines,
    )
    both = tmp_path / "both.log"
    both.write_text(alone.read_text() + lossy.read_text() + alone.read_text())
    fast = write_run(tmp_path / "fast.log", healthy, hosts=hosts, lines=lines)
    assert "no known cause fits" in pk.diagnose([alone, fast]).headline()
    diagnosis = pk.diagnose(both)
    assert diagnosis.headline().count("loses packets") == 1
    assert "no known cause fits" not in str(diagnosis)
    certainties = [cause.certainty for cause in diagnosis.causes if cause.explains]
    assert certainties == sorted(certainties, key=list(Certainty).index)


def test_sockets_on_ec2_miss_the_plugin_of_efa(tmp_path: Path) -> None:
    """14 GB/s on two p4d are what one adapter of 100 Gb/s gives, as Google's nodes have; by the names of
    its hosts it is EC2, whose 4 adapters give more."""
    rate = follow(190e-6, 14e9, "all_reduce", 16)
    headlines = []
    for names in (("ip-10-0-1-5", "ip-10-0-1-9"), ("node-5", "node-9")):
        lines = []
        for host in names:
            said = f"{host}:1:1 [0] NCCL INFO"
            plugin = "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"
            lines += [f"{said} {plugin}", f"{said} NET/IB : No device found."]
            lines += [
                f"{said} NET/Socket : Using [0]ens32:10.0.1.5<0>",
                f"{said} Using network Socket",
            ]
        log = write_run(tmp_path / "run.log", rate, device=A100, hosts=names, lines=lines)
        diagnosis = pk.diagnose(log)
        headlines.append(diagnosis.headline())
        assert str(diagnosis).count("No device found") == 1
    assert headlines[0].startswith("slow")
    assert "because the plugin of EFA (aws-ofi-nccl) is missing" in headlines[0]
    assert headlines[1].startswith("not enough to say")


def test_a_range_that_is_too_good_from_a_size_on_is_split_there(tmp_path: Path) -> None:
    """An all_gather on A100 at 400 GB/s, where NVLink carries 300."""
    curve = follow(10e-6, 400e9, "all_gather", 8)
    log = write_run(tmp_path / "run.log", curve, device=A100, program="all_gather_perf")
    table = pk.diagnose(log).table().filter(pl.col("sizes") != Range.LATENCY.value)
    assert table["sizes"].to_list() == ["middle", "middle", "bandwidth"]
    assert table["verdict"].to_list() == ["as expected", "too good", "too good"]


def test_bandwidths_and_their_limits_are_those_of_times(tmp_path: Path) -> None:
    text = write_run(
        tmp_path / "run.log", follow(20e-6, 230e9, "all_reduce", 8), device=A100, sizes=(2**33,)
    ).read_text()
    # out of place 65.35 ms, in place twice as long
    before, half = "65380.12 131.39 229.93 0", "130000.00 66.08 115.63 0"
    (row,) = [line for line in text.splitlines() if line.lstrip().startswith(str(2**33))]
    leading = row.split()[:5]
    log = tmp_path / "halves.log"
    log.write_text(text.replace(row, " ".join([*leading, before, half])))
    found = pk.diagnose(log).table().row(0, named=True)
    assert found["measured_s"] == pytest.approx(0.5 * (65380.12e-6 + 0.13))
    for rate, seconds in (
        ("busbw_bytes_per_s", "measured_s"),
        ("low_bytes_per_s", "high_s"),
        ("high_bytes_per_s", "low_s"),
        ("slow_bytes_per_s", "slow_s"),
    ):
        assert found[rate] == pytest.approx(1.75 * 2**33 / found[seconds], rel=1e-3)


def test_a_platform_without_nvlink_has_none(tmp_path: Path) -> None:
    curve = follow(34e-6, 5.6e9, "all_reduce", 4)
    lines = ["ws:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"]
    log = write_run(tmp_path / "run.log", curve, device="NVIDIA L40S", local=4, lines=lines)
    for platform in (None, "l40s-4"):
        assert "NVLink" not in pk.diagnose(log, platform).explain().replace("no NVLink", "")
