"""Find what would disturb a calibration on this machine, before it takes minutes."""

import math
import os
import platform as system
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import check_choice, format_bytes
from perfkit.measure.folders import find_cache
from perfkit.measure.machine import gather_facts, list_versions
from perfkit.measure.processes import ENVIRONMENT, run_processes
from perfkit.measure.records import LEAST_CORE_SHARE, ReferenceTimes, read_record
from perfkit.models.kernels import REFERENCES
from perfkit.recording import check_torch

PACKAGES = (
    "numpy",
    "scipy",
    "polars",
    "pandas",
    "statsmodels",
    "altair",
    "vl-convert-python",
    "tqdm",
    "tomli-w",
)
#: Free memory that the larger configurations of a check need [B].
MEMORY = 6e9
#: Mean error of a check on machines with a speed steady within 5 %: 7 to 9 % (zen3-2, xeon-2) [-].
USUAL_ERROR = 0.08
#: Share of a core that others may use before medians begin to change [-].
BUSY = 0.25
#: Share of time that a hypervisor may take before medians begin to change [-].
STOLEN = 0.02
#: Time for which the speed of the machine is observed [s].
_WATCHED = 10.0


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Parameters
    ----------
    name : str
        Name of the check.
    ok : bool or None
        True: good. False: would disturb a calibration. None: a remark.
    detail : str
        Result in words.
    advice : str, optional
        What to do about it.
    """

    name: str
    ok: bool | None
    detail: str
    advice: str = ""


class _Result(NamedTuple):
    """What one check found: whether it is good (None for a remark), and in words."""

    ok: bool | None
    detail: str


def _check_versions(root: Path) -> _Result:
    versions = dict.fromkeys(PACKAGES, "MISSING")
    versions.update(list_versions(PACKAGES))
    detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    return _Result("MISSING" not in versions.values(), detail)


def _check_torch(root: Path) -> _Result:
    return _Result(True, check_torch())


def _check_system(root: Path) -> _Result:
    ok = {"Linux": True, "Darwin": None}.get(system.system(), False)
    return _Result(ok, f"{system.system()} {system.release()} {system.machine()}")


def _check_cores(root: Path) -> _Result:
    facts = gather_facts(root)
    allowed, physical_cores = facts["cores"].value, facts["whole_cores"].value
    limit = facts["core_limit"].value
    detail = f"{allowed} of {os.cpu_count()} usable"
    if physical_cores < allowed:
        detail += f", on {physical_cores} whole cores"
    if limit is not None and limit < allowed:
        detail += f"; the container may use {limit:.1f} of them, which throttles measurements"
        return _Result(False, detail)
    return _Result(True if allowed > 1 else None, detail)


def _check_memory(root: Path) -> _Result:
    facts = gather_facts(root)
    free, total = facts["free_memory"], facts["memory"]
    if free.value is None or total.value is None:
        return _Result(None, free.source)
    detail = f"{format_bytes(free.value)} free of {format_bytes(total.value)}"
    return _Result(free.value >= MEMORY, detail)


def _check_disk(root: Path) -> _Result:
    folders = {"kept measurements": find_cache(), "temporary files": Path(tempfile.gettempdir())}
    details = []
    least_free = math.inf
    for use, folder in folders.items():
        free = shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
        least_free = min(least_free, free)
        details.append(f"{format_bytes(free)} free for {use} in {folder}")
    return _Result(least_free > 1e9, ", ".join(details))


class _Ticks(NamedTuple):
    """Time that all cores together spent, as the first line of ``/proc/stat`` counts it [ticks]."""

    user: int
    nice: int
    system: int
    idle: int
    waiting: int
    interrupts: int
    soft_interrupts: int
    stolen: int

    @classmethod
    def read(cls, root: Path) -> "_Ticks":
        """What was spent since the machine started."""
        words = (root / "proc/stat").read_text().split("\n", 1)[0].split()
        return cls(*(int(word) for word in words[1:9]))


def _check_load(root: Path) -> _Result:
    """Time that other programs and the hypervisor take now."""
    try:
        before = _Ticks.read(root)
        time.sleep(1.0)
        after = _Ticks.read(root)
    except (OSError, ValueError, TypeError):
        return _Result(None, "not readable here")
    spent = _Ticks(*np.subtract(after, before).tolist())
    total = max(1, sum(spent))
    cores = os.cpu_count() or 1
    busy = cores * (sum(spent) - spent.idle - spent.waiting - spent.stolen) / total
    stolen = spent.stolen / total
    recent = os.getloadavg()[0]
    detail = (
        f"others use {busy:.2f} cores now, 1-minute load {recent:.2f}, "
        f"the hypervisor takes {stolen:.0%}"
    )
    if stolen > STOLEN or busy > BUSY:
        return _Result(False, detail)
    return _Result(True if recent <= max(1.0, 0.5 * cores) else None, detail)


def _check_frequency(root: Path) -> _Result:
    clock = gather_facts(root)["clock"].value
    governor = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    if clock is None or not governor.is_file():
        return _Result(True, "not readable, as in most virtual machines")
    name = governor.read_text().strip()
    detail = f"governor {name}, up to {clock / 1e9:.2f} GHz"
    return _Result(True if name == "performance" else None, detail)


def _check_steadiness(root: Path) -> _Result:
    """How much the speed of the machine changes within some seconds, and the accuracy to expect."""
    row = run_processes({"task": "references", "seconds": _WATCHED}, timeout=90)[0]
    times = read_record(ReferenceTimes, row, "references")
    windows = np.array_split(np.log(times.references), round(2 * _WATCHED))
    moved = np.std([np.median(part, axis=0) for part in windows if len(part)], axis=0)
    single = ", ".join(f"{name} {share:.0%}" for name, share in zip(REFERENCES, moved, strict=True))
    expected = float(np.hypot(USUAL_ERROR, moved.mean()))
    detail = (
        f"within {_WATCHED:.0f} s: {single}; expect mean errors of about {expected:.0%} in a check"
    )
    if times.core_share < LEAST_CORE_SHARE:
        detail += f"; other programs took {1 - times.core_share:.0%} of the core"
        return _Result(False, detail)
    return _Result(True if moved.mean() < 0.1 else None, detail)


_FAULTS = """
from resource import RUSAGE_SELF, getrusage
def touch():
    block = bytes(b"x" * (64 << 20))
    return getrusage(RUSAGE_SELF).ru_minflt
print(-touch() + touch())
"""


def _check_malloc(root: Path) -> _Result:
    """Whether freed memory is used again; if not, large outputs cause page faults and iterations
    vary."""
    if system.libc_ver()[0] != "glibc":
        return _Result(None, "not glibc; its settings have no effect, and larger outputs vary more")
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    faults = int(done.stdout)
    return _Result(faults < 1000, f"a second block of 67 MB costs {faults} page faults")


def _exchange_messages(device: str) -> str:
    """Run an all_reduce between two measuring processes, as a calibration does."""
    job = {
        "task": "collectives",
        "operations": ["all_reduce"],
        "sizes": [4096],
        "seconds": 0.05,
        "device": device,
    }
    run_processes(job, ranks=2, timeout=90)
    return "2 processes exchanged messages on loopback"


def _check_gloo(root: Path) -> _Result:
    return _Result(True, _exchange_messages("cpu"))


def _check_gpus(root: Path) -> _Result:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            return _Result(None, "a driver but no usable GPU")
        return _Result(None, "none; calibration uses the CPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    detail = f"{len(names)}: {', '.join(sorted(set(names)))}, CUDA {torch.version.cuda}"
    if len(names) > 1:
        detail += f", NCCL: {_exchange_messages('cuda')}"
    return _Result(True, detail)


class Check(NamedTuple):
    """One check: its name, its function, and advice for a bad result."""

    name: str
    run: Callable[[Path], _Result]
    advice: str


#: What to do where torch is missing or too old.
_GET_TORCH = "to measure: pip install -U torch; predicting needs none"
#: All checks in their order.
CHECKS = (
    Check("versions", _check_versions, "install perfkit again: pip install -e ."),
    Check("torch", _check_torch, _GET_TORCH),
    Check(
        "system",
        _check_system,
        "calibrate on Linux; macOS cannot pin processes, so expect wider intervals there",
    ),
    Check(
        "cores",
        _check_cores,
        "raise the container's CPU limit; collectives need 2 cores and are left out on one",
    ),
    Check(
        "memory",
        _check_memory,
        f"close programs until {format_bytes(MEMORY)} are free, or the machine will swap",
    ),
    Check(
        "disk",
        _check_disk,
        "free 1 GB in both, or name other folders in XDG_CACHE_HOME and TMPDIR",
    ),
    Check(
        "load",
        _check_load,
        "stop other programs (see top); if other virtual machines disturb this one, calibrate later",
    ),
    Check("frequency", _check_frequency, "steadier: cpupower frequency-set -g performance"),
    Check(
        "steadiness",
        _check_steadiness,
        "close other programs; a check also gives errors at the usual pace, without the drift",
    ),
    Check("malloc", _check_malloc, "another allocator replaces that of glibc; unset LD_PRELOAD"),
    Check("gloo", _check_gloo, "check that the loopback interface is up: ip link"),
    Check("GPUs", _check_gpus, "to measure GPUs: install a CUDA build of torch"),
)


def diagnose(*names: str, root: Path = Path("/")) -> list[Finding]:
    """Check everything that a calibration depends on, in about twenty seconds.

    Parameters
    ----------
    *names : str
        Checks to run; by default all.
    root : Path, optional
        Folder that holds ``proc`` and ``sys``.

    Returns
    -------
    findings : list of Finding
        In a fixed order; a finding whose `ok` is False would disturb a calibration.

    Raises
    ------
    ValueError
        For the name of no check.
    """
    known = [check.name for check in CHECKS]
    for name in names:
        check_choice("check", name, known)
    return [_run_check(check, root) for check in CHECKS if not names or check.name in names]


def _run_check(check: Check, root: Path) -> Finding:
    """Run one check; any error of it is a finding."""
    advice = check.advice
    try:
        ok, detail = check.run(root)
    except Exception as error:
        ok = False
        detail = (str(error).strip() or type(error).__name__).splitlines()[-1]
        if isinstance(error, ImportError):  # torch is missing or too old
            ok, advice = None, _GET_TORCH
    return Finding(check.name, ok, detail, "" if ok else advice)


def format_findings(findings: list[Finding]) -> str:
    """Format the findings for a terminal.

    Parameters
    ----------
    findings : list of Finding
        From `diagnose`.

    Returns
    -------
    text : str
        A line per finding, advice below it, and a verdict at the end.

    Examples
    --------
    >>> print(format_findings([Finding("load", False, "others use 1.30 cores", "stop other programs")]))
     ✗ load            others use 1.30 cores
                       -> stop other programs
    1 of 1 would disturb a calibration: load
    """
    lines = []
    marks = {True: "✓", False: "✗", None: "·"}
    for finding in findings:
        lines.append(f" {marks[finding.ok]} {finding.name:<15} {finding.detail}")
        if finding.advice:
            lines.append(f"{'':18}-> {finding.advice}")
    bad = [finding.name for finding in findings if finding.ok is False]
    verdict = f"{len(bad)} of {len(findings)} would disturb a calibration: {', '.join(bad)}"
    return "\n".join([*lines, verdict if bad else "nothing would disturb a calibration"])
