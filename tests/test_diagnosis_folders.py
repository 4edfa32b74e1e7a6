"""Diagnoses with a platform that the user names, and of several logs together."""

from pathlib import Path

import pytest

import perfkit as pk
from tests.logs_of_runs import A100, SIZES, follow, write_run


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
