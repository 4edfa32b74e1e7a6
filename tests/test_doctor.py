"""Each check of the doctor can fail: it is shown a machine that would spoil a calibration, and one that would not."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfkit.calibration import doctor
from perfkit.calibration.doctor import Finding, diagnose, format_findings
from perfkit.measure.processes import MeasurementError

CPU = "sys/devices/system/cpu/cpu0"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def look(name: str, root: Path = Path("/")) -> Finding:
    (finding,) = diagnose(name, root=root)
    assert finding.name == name and bool(finding.advice) is (finding.ok is not True)
    return finding


def test_cores_under_a_container_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    for limit, ok in (("50000 100000", False), ("max 100000", None), ("garbage", None)):
        written(tmp_path / "sys/fs/cgroup/cpu.max", limit)
        assert look("cores", tmp_path).ok is ok
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert look("cores", tmp_path / "absent").ok is True
    written(tmp_path / CPU / "topology/thread_siblings_list", "0-1")
    assert look("cores", tmp_path).detail.startswith(f"2 of {os.cpu_count()} usable")


def test_memory(tmp_path: Path) -> None:
    for free, ok in ((500_000, False), (20_000_000, True)):
        text = f"MemTotal:       24654548 kB\nMemFree: 1 kB\nMemAvailable:   {free} kB\nHugePages_Total: 0\n"
        written(tmp_path / "proc/meminfo", text)
        assert look("memory", tmp_path).ok is ok
    assert look("memory", tmp_path / "absent").ok is None


def test_the_disks_are_those_of_kept_measurements_and_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path / "perfkit": 2e9, tmp_path: 2e9}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert look("disk").ok is True
    for place, use in ((tmp_path / "perfkit", "kept measurements"), (tmp_path, "temporary files")):
        with monkeypatch.context() as patch:
            patch.setitem(free, place, 5e8)
            finding = look("disk")
        assert finding.ok is False and f"500 MB free for {use} in {place}" in finding.detail
    monkeypatch.setattr(doctor, "find_cache", lambda: (_ for _ in ()).throw(OSError("File exists: 'x'")))
    assert look("disk").detail == "File exists: 'x'"


@pytest.mark.parametrize(("later", "ok", "words"), [
    ("cpu 10 0 10 2180 0 0 0 0 0 0", True, "others use 0.00 cores now"),
    ("cpu 110 0 10 2080 0 0 0 0 0 0", False, "others use 1.00 cores"),
    ("cpu 10 0 10 2100 0 0 0 80 0 0", False, "hypervisor takes 40%"),
])  # fmt: skip
def test_load(tmp_path: Path, later: str, ok: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "cpu 10 0 10 1980 0 0 0 0 0 0\ncpu0 1 1 1 1\n"
    counters = written(tmp_path / "proc/stat", before)
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: counters.write_text(later + "\n"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 0.0, 0.0), raising=False)
    finding = look("load", tmp_path)
    assert finding.ok is ok and words in finding.detail
    assert look("load", tmp_path / "absent").ok is None
    if ok:
        monkeypatch.setattr(os, "getloadavg", lambda: (1.8, 0.0, 0.0), raising=False)
        written(counters, before)
        assert look("load", tmp_path).ok is None


def test_frequency(tmp_path: Path) -> None:
    assert "not readable" in look("frequency", tmp_path).detail
    written(tmp_path / CPU / "cpufreq/cpuinfo_max_freq", "3700000\n")
    for governor, ok in (("powersave", None), ("performance", True)):
        written(tmp_path / CPU / "cpufreq/scaling_governor", f"{governor}\n")
        finding = look("frequency", tmp_path)
        assert (finding.ok, finding.detail) == (ok, f"governor {governor}, up to 3.70 GHz")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")
def test_malloc_settings_have_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("malloc").ok is True
    monkeypatch.setattr(doctor, "ENVIRONMENT", {"MALLOC_MMAP_THRESHOLD_": "131072"})
    assert look("malloc").ok is False


def test_gloo_reports_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MeasurementError("measuring process 1 stopped\nRuntimeError: no route to host")

    monkeypatch.setattr(doctor, "find_spec", lambda name: "torch")
    monkeypatch.setattr(doctor, "run_processes", fail)
    finding = look("gloo")
    assert finding.ok is False and finding.detail.endswith("RuntimeError: no route to host")


def test_a_machine_that_changes_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: "torch")
    for factor, share, ok in ((1.0, 1.0, True), (2.0, 1.0, None), (1.0, 0.9, False)):
        found = {"references": [[1e-3] * 3] * 50 + [[factor * 1e-3] * 3] * 50, "core_share": share}
        monkeypatch.setattr(doctor, "run_processes", lambda *_, found=found, **__: [found])
        assert look("steadiness").ok is ok


def test_missing_torch_is_no_obstacle_a_missing_package_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert [look(name).ok for name in ("torch", "gloo", "GPUs", "steadiness")] == [None] * 4
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no-such-package-of-perfkit"))
    assert look("versions").ok is False


def test_the_verdict_names_what_is_bad() -> None:
    findings = [Finding("a", True, "fine"), Finding("b", None, "so so", "do c"), Finding("d", False, "bad")]
    assert format_findings(findings).splitlines()[-1] == "1 of 3 would spoil a calibration: d"
    assert format_findings([Finding("a", None, "x")]).endswith("nothing here would spoil a calibration")


def test_diagnose_looks_at_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = diagnose()
    assert [finding.name for finding in findings] == [name for name, _, _ in doctor.CHECKS]
    by_name = {finding.name: finding for finding in findings}
    assert by_name["versions"].ok and by_name["disk"].ok
    assert all(finding.advice for finding in findings if finding.ok is False)
