"""Each check of the doctor can fail: it is shown a machine that would spoil a calibration, and one that would not."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfkit import doctor
from perfkit.doctor import Finding, diagnose, format_findings
from perfkit.measure.runner import MeasurementError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the files of a Linux kernel")


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(("limit", "ok"), [("50000 100000", False), ("max 100000", None), ("garbage", None)])
def test_cores_under_a_container_limit(
    tmp_path: Path, limit: str, ok: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    written(tmp_path / "sys/fs/cgroup/cpu.max", limit)
    finding = doctor._cores(tmp_path)
    assert finding.ok is ok and finding.advice
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert doctor._cores(tmp_path / "absent").ok is True
    written(tmp_path / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0-1")
    assert doctor._cores(tmp_path).detail.startswith(f"2 of {os.cpu_count()} usable")


@pytest.mark.parametrize(("free", "ok"), [(500_000, False), (20_000_000, True)])
def test_memory(tmp_path: Path, free: int, ok: bool) -> None:
    text = f"MemTotal:       24654548 kB\nMemFree: 1 kB\nMemAvailable:   {free} kB\nHugePages_Total: 0\n"
    written(tmp_path / "proc/meminfo", text)
    finding = doctor._memory(tmp_path)
    assert finding.ok is ok and bool(finding.advice) is not ok
    assert doctor._memory(tmp_path / "absent").ok is None


def test_the_disks_are_those_where_measurements_and_temporary_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path / "perfkit": 2e9, tmp_path: 2e9}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert doctor._disk().ok is True
    for place, use in ((tmp_path / "perfkit", "kept measurements"), (tmp_path, "temporary files")):
        with monkeypatch.context() as patch:
            patch.setitem(free, place, 5e8)
            finding = doctor._disk()
        assert finding.ok is False and f"500 MB free for {use} in {place}" in finding.detail
        assert finding.advice.startswith(f"free 1 GB for {use}")
    monkeypatch.setattr(doctor, "find_cache", lambda: (_ for _ in ()).throw(OSError("File exists: 'x'")))
    assert (doctor._disk().ok, doctor._disk().detail) == (None, "File exists: 'x'")


@pytest.mark.parametrize(("later", "ok", "words"), [
    ("cpu 10 0 10 2180 0 0 0 0 0 0", True, "others use 0.00 cores now"),
    ("cpu 110 0 10 2080 0 0 0 0 0 0", False, "others use 1.00 cores"),
    ("cpu 10 0 10 2100 0 0 0 80 0 0", False, "hypervisor takes 40%"),
])  # fmt: skip
def test_load(tmp_path: Path, later: str, ok: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = written(tmp_path / "stat", "cpu 10 0 10 1980 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: counters.write_text(later + "\n"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 0.0, 0.0), raising=False)
    finding = doctor._load(counters=counters)
    assert finding.ok is ok and words in finding.detail
    assert doctor._load(counters=tmp_path / "absent").ok is None
    if ok:
        monkeypatch.setattr(os, "getloadavg", lambda: (1.8, 0.0, 0.0), raising=False)
        assert doctor._load(counters=written(counters, "cpu 10 0 10 1980 0 0 0 0 0 0\n")).ok is None


def test_frequency(tmp_path: Path) -> None:
    assert doctor._frequency(tmp_path).ok is None
    written(tmp_path / "cpuinfo_max_freq", "3700000\n")
    written(tmp_path / "scaling_governor", "powersave\n")
    finding = doctor._frequency(tmp_path)
    assert finding.ok is None and "3.70 GHz" in finding.detail and "performance" in finding.advice
    written(tmp_path / "scaling_governor", "performance\n")
    assert doctor._frequency(tmp_path) == Finding("frequency", True, "governor performance, up to 3.70 GHz")


@linux
def test_malloc_settings_have_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._malloc().ok is True
    monkeypatch.setattr(doctor, "ENVIRONMENT", {"MALLOC_MMAP_THRESHOLD_": "131072"})
    finding = doctor._malloc()
    assert finding.ok is False and finding.advice


def test_gloo_reports_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MeasurementError("measuring process 1 stopped\nRuntimeError: no route to host")

    monkeypatch.setattr(doctor, "run_processes", fail)
    finding = doctor._exchange("gloo", "cpu")
    assert finding.ok is False and finding.detail.endswith("RuntimeError: no route to host")


def test_broken_reference_data_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._reference().ok is True
    written(tmp_path / "broken.toml", "format = 1\nname = ")
    monkeypatch.setattr(doctor, "find_reference", lambda *parts: tmp_path)
    assert doctor._reference().ok is False
    (tmp_path / "broken.toml").unlink()
    assert doctor._reference().ok is False


def test_missing_torch_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert [check().ok for check in (doctor._torch, doctor._gloo, doctor._gpus)] == [None] * 3


def test_missing_package_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no-such-package-of-perfkit"))
    assert doctor._versions().ok is False


def test_the_verdict_names_what_is_bad() -> None:
    text = format_findings(
        [Finding("a", True, "fine"), Finding("b", None, "so so", "do c"), Finding("d", False, "bad")]
    )
    assert text.splitlines()[-1] == "1 of 3 would spoil a calibration: d"
    assert format_findings([Finding("a", None, "x")]).endswith("nothing here would spoil a calibration")


def test_diagnose_looks_at_everything_once() -> None:
    findings = diagnose()
    assert len({finding.name for finding in findings}) == len(findings) == len(doctor.CHECKS)
    by_name = {finding.name: finding for finding in findings}
    assert by_name["charts"].ok and by_name["versions"].ok and by_name["reference data"].ok
    assert all(finding.advice for finding in findings if finding.ok is False)
