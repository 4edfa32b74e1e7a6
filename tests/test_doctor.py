"""Each check of the doctor sees a machine that would disturb a calibration, and one that would
not."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfkit.calibration import doctor
from perfkit.calibration.doctor import Finding, diagnose, format_findings
from perfkit.measure.processes import MeasurementError

CPU = "sys/devices/system/cpu/cpu0"
Patch = pytest.MonkeyPatch


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def look(name: str, root: Path = Path("/")) -> Finding:
    (finding,) = diagnose(name, root=root)
    assert finding.name == name and bool(finding.advice) is (finding.ok is not True)
    return finding


GOVERNOR = {f"{CPU}/cpufreq/cpuinfo_max_freq": "3700000\n"}
MEMORY = "MemTotal: 24654548 kB\nMemFree: 1 kB\nMemAvailable: {} kB\nHugePages_Total: 0\n"
#: Check, cores that the process may use, files of the machine, what is found and said.
MACHINES: list[tuple[str, int, dict[str, str], bool | None, str]] = [
    ("cores", 1, {"sys/fs/cgroup/cpu.max": "50000 100000"}, False, "may use 0.5 of them"),
    ("cores", 1, {"sys/fs/cgroup/cpu.max": "max 100000"}, None, "1 of "),
    ("cores", 2, {}, True, f"2 of {os.cpu_count()} usable"),
    (
        "cores",
        2,
        {f"{CPU}/topology/thread_siblings_list": "0-1"},
        True,
        f"2 of {os.cpu_count()} usable",
    ),
    ("memory", 2, {"proc/meminfo": MEMORY.format(500_000)}, False, "512 MB free of 25.2 GB"),
    ("memory", 2, {"proc/meminfo": MEMORY.format(20_000_000)}, True, "20.5 GB free"),
    ("memory", 2, {}, None, "cannot be read"),
    ("load", 2, {}, None, "not readable here"),
    ("frequency", 2, {}, True, "not readable"),
    (
        "frequency",
        2,
        GOVERNOR | {f"{CPU}/cpufreq/scaling_governor": "powersave\n"},
        None,
        "powersave, up to 3.70 GHz",
    ),
    (
        "frequency",
        2,
        GOVERNOR | {f"{CPU}/cpufreq/scaling_governor": "performance\n"},
        True,
        "governor performance",
    ),
]


@pytest.mark.parametrize(("name", "cores", "files", "ok", "words"), MACHINES)
def test_each_fact_of_a_machine_is_judged(name, cores, files, ok, words, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores)}, raising=False)
    for file, text in files.items():
        written(tmp_path / file, text)
    finding = look(name, tmp_path)
    assert finding.ok is ok and words in finding.detail


def test_the_disks_are_those_of_kept_measurements_and_temporary_files(
    tmp_path: Path, monkeypatch: Patch
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


@pytest.mark.parametrize(
    ("later", "recent", "ok", "words"),
    [
        ("cpu 10 0 10 2180 0 0 0 0 0 0", 0.4, True, "others use 0.00 cores now"),
        ("cpu 10 0 10 2180 0 0 0 0 0 0", 1.8, None, "1-minute load 1.80"),
        ("cpu 110 0 10 2080 0 0 0 0 0 0", 0.4, False, "others use 1.00 cores"),
        ("cpu 10 0 10 2100 0 0 0 80 0 0", 0.4, False, "hypervisor takes 40%"),
    ],
)
def test_other_programs_and_the_hypervisor_are_noticed(
    tmp_path: Path, later: str, recent: float, ok: bool | None, words: str, monkeypatch: Patch
) -> None:
    counters = written(tmp_path / "proc/stat", "cpu 10 0 10 1980 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: counters.write_text(later + "\n"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (recent, 0.0, 0.0), raising=False)
    finding = look("load", tmp_path)
    assert finding.ok is ok and words in finding.detail


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")
def test_malloc_settings_have_an_effect(monkeypatch: Patch) -> None:
    assert look("malloc").ok is True
    monkeypatch.setattr(doctor, "ENVIRONMENT", {"MALLOC_MMAP_THRESHOLD_": "131072"})
    assert look("malloc").ok is False


def test_drift_other_programs_and_failing_connections_are_found(monkeypatch: Patch) -> None:
    """A machine that changes its speed, other programs on its core, and processes that cannot
    connect."""
    answers: list[Any] = []

    def run(*_: Any, **__: Any) -> Any:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1:]

    monkeypatch.setattr(doctor, "run_processes", run)
    for factor, share, ok in ((1.0, 1.0, True), (2.0, 1.0, None), (1.0, 0.9, False)):
        references = np.full((100, 3), 1e-3)
        references[50:] *= factor
        answers.append({"references": references.tolist(), "core_share": share})
        assert look("steadiness").ok is ok
    answers.append(MeasurementError("measuring process 1 stopped\nRuntimeError: no route to host"))
    finding = look("gloo")
    assert finding.ok is False and finding.detail == "RuntimeError: no route to host"


@pytest.mark.serial
def test_processes_are_started_for_real(monkeypatch: Patch) -> None:
    pytest.importorskip("torch", reason="measuring needs torch: pip install 'perfkit[measure]'")
    monkeypatch.setattr(doctor, "_WATCHED", 1.0)
    steadiness, gloo = diagnose("steadiness", "gloo")
    assert (
        "within 1 s: " in steadiness.detail and "expect mean errors of about" in steadiness.detail
    )
    assert (gloo.ok, gloo.detail) == (True, "2 processes exchanged messages on loopback")


def test_missing_torch_is_no_obstacle_a_missing_package_is_one(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = [look(name) for name in ("torch", "gloo", "GPUs", "steadiness")]
    assert {(each.ok, each.advice) for each in found} == {
        (None, "to measure: pip install -U torch; predicting needs none")
    }
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no-such-package-of-perfkit"))
    assert look("versions").ok is False


def test_a_check_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"check is 'gpus'; known are versions, .*GPUs"):
        diagnose("gpus")


def test_everything_is_looked_at_once_and_the_verdict_names_what_is_bad(monkeypatch: Patch) -> None:
    answers = {
        "references": [{"references": np.full((50, 3), 1e-3).tolist(), "core_share": 1.0}],
        "collectives": [],
    }
    monkeypatch.setattr(doctor, "run_processes", lambda job, **_: answers[job["task"]])
    assert [finding.name for finding in diagnose()] == [check.name for check in doctor.CHECKS]
    findings = [
        Finding("a", True, "fine"),
        Finding("b", None, "so so", "do c"),
        Finding("d", False, "bad"),
    ]
    assert format_findings(findings).splitlines()[-1] == "1 of 3 would disturb a calibration: d"
    assert format_findings(findings[:2]).endswith("nothing would disturb a calibration")
