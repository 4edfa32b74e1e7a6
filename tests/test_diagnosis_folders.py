"""Diagnoses with a platform that the user names, and of several logs together."""

import io
from pathlib import Path

import polars as pl
import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.diagnosis.words import write_rate
from tests.logs_of_runs import A100, H100, SIZES, follow, write_run


def test_a_named_platform_does_not_hide_a_missing_adapter(tmp_path: Path) -> None:
    """Seven adapters of 24 GB/s on four nodes of eight A100: 168 of 192 GB/s, with a platform or without."""
    hosts = [f"node-{host}" for host in range(4)]
    listed = " ".join(f"[{n}]mlx5_{n}:1/IB" for n in range(7))
    lines = []
    for host in hosts:
        said = f"{host}:1:1 [0] NCCL INFO"
        lines += [f"{said} NET/IB : Using {listed} [RO]", f"{said} Using network IB"]
    sizes = SIZES[-5:]
    rate = follow(40e-6, 7 * 24e9, "all_reduce", 32)
    log = write_run(tmp_path / "run.log", rate, device=A100, hosts=hosts, lines=lines, sizes=sizes)
    diagnosis = pk.diagnose(log, "a100-sxm-8x4")
    assert diagnosis.verdict == "slow"
    last = diagnosis.rows.row(-1, named=True)
    assert last["expected_bytes_per_s"] == pytest.approx(8 * 24e9, rel=0.01)


def test_a_platform_of_another_device_or_of_other_nodes_is_refused(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    one = write_run(tmp_path / "one.log", curve, device=A100, sizes=SIZES[-3:])
    diagnosis = pk.diagnose(one, "h100-sxm-8")
    assert diagnosis.ok is None
    assert "the log names NVIDIA A100-SXM4-80GB, platform h100-sxm-8 has NVIDIA H100" in str(
        diagnosis
    )
    assert pk.diagnose(one, "a100-sxm-8").ok is True
    two = write_run(
        tmp_path / "two.log", curve, device=A100, hosts=("a", "b"), local=4, sizes=SIZES[-3:]
    )
    assert "the log names 2 nodes of 4 ranks, platform a100-sxm-8 has 1 node of 8" in str(
        pk.diagnose(two, "a100-sxm-8")
    )


def test_a_platform_with_more_ranks_in_a_node_than_links_join_is_named(tmp_path: Path) -> None:
    """Links of an HGX of H100 join eight; with nine, limits are others."""
    curve = follow(20e-6, 400e9, "all_reduce", 8)
    log = write_run(tmp_path / "one.log", curve, device="NVIDIA H100 80GB HBM3", sizes=SIZES[-3:])
    assert not pk.diagnose(log, "h100-sxm-8").warnings
    [warning] = pk.diagnose(log, "h100-sxm-9").warnings
    assert "a node has 9 ranks, and links of" in warning and "take 'h100-sxm-8x2'" in warning


# -- several logs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two slow logs of eight A100, one that is faster than NVLink, and a healthy one of eight H100."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, rate, device in (
        ("a", 130e9, A100),
        ("b", 130e9, A100),
        ("c", 400e9, A100),
        ("h", 460e9, H100),
    ):
        curve = follow(20e-6, rate, "all_reduce", 8)
        write_run(logs / f"{name}.log", curve, device=device, sizes=SIZES[-4:])
    return logs


def test_a_headline_counts_each_kind_of_failure(folder: Path) -> None:
    diagnosis = pk.diagnose(folder)
    assert diagnosis.headline().startswith("2 of 4 runs slow, 1 too good; c.log: too good: ")
    assert diagnosis.to_dict()["counts"] == {"slow": 2, "too good": 1, "as expected": 1}
    text = str(diagnosis)
    assert "), c.log: " in text  # a cause names its log
    assert "h.log: expected with 8 NVIDIA H100" in text


def test_floors_of_other_devices_stand_apart(folder: Path) -> None:
    floors = pk.diagnose(folder).thresholds()
    largest = floors.filter(size_bytes=SIZES[-1])
    by_system = dict(largest.select("system", "least_busbw_bytes_per_s").rows())
    assert set(by_system) == {f"one node of 8 {A100}", f"one node of 8 {H100}"}
    # each alone gives the same floors
    alone = pk.diagnose(folder / "h.log").thresholds()
    assert alone.equals(floors.filter(pl.col("system").str.contains("H100")))


def test_the_limit_of_slow_runs_is_shown(folder: Path) -> None:
    diagnosis = pk.diagnose(folder / "a.log")
    last = diagnosis.table().row(-1, named=True)
    limit = last["slow_bytes_per_s"]
    assert limit == pytest.approx(1.75 * 2**33 / last["slow_s"], rel=1e-3)
    assert last["low_bytes_per_s"] < last["expected_bytes_per_s"] < last["high_bytes_per_s"]
    assert "slow beyond" in str(diagnosis) and write_rate(limit) in str(diagnosis)


def test_a_log_without_floors_is_named_and_a_bad_verdict_keeps_its_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = follow(20e-6, 230e9, "all_reduce", 8)
    log = write_run(folder / "u.log", unknown, device="Acme Accelerator 9", sizes=SIZES[-4:])
    floors = folder / "floors.csv"
    assert main(["log", str(folder), "--thresholds", str(floors)]) == 1
    said = capsys.readouterr().err
    assert "no floors: u.log, all_reduce: no datasheet of Acme Accelerator 9 is known" in said

    def fall(size: int) -> float:
        return unknown(size) * (2 if size > SIZES[-3] else 1)

    write_run(log, fall, device="Acme Accelerator 9", sizes=SIZES[-4:])
    assert main(["log", str(log), "--thresholds", str(floors)]) == 1
    assert "thresholds are not written: no run has floors" in capsys.readouterr().err


def test_the_command_takes_several_logs_and_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["log", str(folder / "h.log"), str(folder / "a.log")]) == 1
    assert capsys.readouterr().out.splitlines()[0].endswith("(a.log; 1 of 2 runs slow)")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((folder / "h.log").read_bytes())))
    assert main(["log", "-"]) == 0
    assert capsys.readouterr().out.startswith("as expected: all_reduce")
    assert main(["log", "-", str(folder / "h.log")]) == 2


# -- what is no log
# --------------------------------------------------------------------------------------------------


def test_the_log_of_a_training_run_is_told(tmp_path: Path) -> None:
    line = (
        " iteration {0:8d}/     100 | consumed samples: {0:12d} | elapsed time per iteration (ms): 512.3 |"
        " learning rate: 3.0E-04 | global batch size:   256 |"
    )
    log = tmp_path / "train.log"
    log.write_text("\n".join(line.format(number) for number in range(1, 9)))
    for source in (log, tmp_path):
        with pytest.raises(
            ValueError, match=r"'train\.log' is the log of a training run, which pk"
        ):
            pk.diagnose(source)


def test_the_text_of_a_log_is_no_name_of_one(folder: Path) -> None:
    with pytest.raises(ValueError, match="no file has so long a name; if it is the text of a file"):
        pk.diagnose((folder / "h.log").read_text())


def test_a_report_is_no_pdf(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "verdict.pdf"
    assert main(["log", str(folder / "h.log"), "--report", str(page)]) == 2
    said = capsys.readouterr().err
    assert "a report is an HTML page; name it" in said and "verdict.html" in said
    assert not page.exists()
    with pytest.raises(ValueError, match="a report is an HTML page"):
        pk.report(pk.diagnose(folder / "h.log"), path=page)


def test_a_platform_that_fits_no_run_is_no_green_check(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log", str(folder / "h.log"), "--platform", "a100-sxm-8"]) == 2
    assert capsys.readouterr().out.startswith("not enough to say: ")
    assert main(["log", str(folder / "h.log"), "--platform", "h100-sxm-8"]) == 0


def test_runs_of_one_log_are_told_apart(tmp_path: Path) -> None:
    curve = follow(20e-6, 230e9, "all_reduce", 8)
    runs = []
    for number in range(2):
        log = write_run(tmp_path / f"{number}.log", curve, device=A100, sizes=SIZES[-4:])
        runs.append(log.read_text())
        log.unlink()
    (tmp_path / "both.log").write_text("".join(runs))
    diagnosis = pk.diagnose(tmp_path / "both.log")
    first, second = (finding.name for finding in diagnosis.findings)
    line = len(runs[0].splitlines()) + 1
    assert (first, second) == ("both.log", f"both.log line {line}")
    assert f"both.log line {line}: all_reduce, one node" in str(diagnosis)
