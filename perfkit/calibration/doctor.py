"""Find what would disturb a calibration on this machine, before it takes minutes."""

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

import numpy as np

from perfkit.ground.units import format_bytes
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
#: Share of a core that others may use, and of time that a hypervisor may take, before medians begin
#: to change [-].
BUSY, STOLEN = 0.25, 0.02
#: Time for which the speed of the machine is observed [s].
_WATCHED = 10.0

_Found = tuple[bool | None, str]


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


def _versions(root: Path) -> _Found:
    found = {**dict.fromkeys(PACKAGES, "MISSING"), **list_versions(PACKAGES)}
    return "MISSING" not in found.values(), ", ".join(
        f"{name} {text}" for name, text in found.items()
    )


def _system(root: Path) -> _Found:
    ok = {"Linux": True, "Darwin": None}.get(system.system(), False)
    return ok, f"{system.system()} {system.release()} {system.machine()}"


def _cores(root: Path) -> _Found:
    allowed, whole, limit = (
        gather_facts(root)[name].value for name in ("cores", "whole_cores", "core_limit")
    )
    detail = f"{allowed} of {os.cpu_count()} usable" + (
        f", on {whole} whole cores" if whole < allowed else ""
    )
    if limit is not None and limit < allowed:
        return (
            False,
            f"{detail}; the container may use {limit:.1f} of them, which throttles measurements",
        )
    return (True if allowed > 1 else None), detail


def _memory(root: Path) -> _Found:
    free, total = (gather_facts(root)[name] for name in ("free_memory", "memory"))
    if free.value is None or total.value is None:
        return None, free.source
    return free.value >= MEMORY, f"{format_bytes(free.value)} free of {format_bytes(total.value)}"


def _disk(root: Path) -> _Found:
    places = {"kept measurements": find_cache(), "temporary files": Path(tempfile.gettempdir())}
    free = {
        use: shutil.disk_usage(place).free if os.access(place, os.W_OK) else 0
        for use, place in places.items()
    }
    detail = ", ".join(
        f"{format_bytes(free[use])} free for {use} in {place}" for use, place in places.items()
    )
    return min(free.values()) > 1e9, detail


def _load(root: Path) -> _Found:
    """Time that other programs and the hypervisor take now, from the tick counters of the
    kernel."""

    def count() -> np.ndarray:
        return np.array((root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9], dtype=int)

    try:
        begin = count()
        time.sleep(1.0)
        *_, idle, waiting, _, _, stolen = spent = count() - begin
    except (OSError, ValueError):
        return None, "not readable here"
    cores, total, recent = os.cpu_count() or 1, max(1, spent.sum()), os.getloadavg()[0]
    busy, taken = cores * (spent.sum() - idle - waiting - stolen) / total, stolen / total
    detail = f"others use {busy:.2f} cores now, 1-minute load {recent:.2f}, the hypervisor takes {taken:.0%}"
    if taken > STOLEN or busy > BUSY:
        return False, detail
    return (True if recent <= max(1.0, 0.5 * cores) else None), detail


def _frequency(root: Path) -> _Found:
    clock, governor = (
        gather_facts(root)["clock"].value,
        root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    )
    if clock is None or not governor.is_file():
        return True, "not readable, as in most virtual machines"
    name = governor.read_text().strip()
    return (
        True if name == "performance" else None
    ), f"governor {name}, up to {clock / 1e9:.2f} GHz"


def _steadiness(root: Path) -> _Found:
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
        return False, f"{detail}; other programs took {1 - times.core_share:.0%} of the core"
    return (True if moved.mean() < 0.1 else None), detail


_FAULTS = """
from resource import RUSAGE_SELF, getrusage
def touch():
    block = bytes(b"x" * (64 << 20))
    return getrusage(RUSAGE_SELF).ru_minflt
print(-touch() + touch())
"""


def _malloc(root: Path) -> _Found:
    """Whether freed memory is used again; if not, large outputs cause page faults and iterations
    vary."""
    if system.libc_ver()[0] != "glibc":
        return None, "not glibc; its settings have no effect, and larger outputs vary more"
    command, environment = [sys.executable, "-c", _FAULTS], {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout) < 1000, f"a second block of 67 MB costs {int(done.stdout)} page faults"


def _gloo(root: Path, device: str = "cpu") -> _Found:
    """Run an all_reduce between two measuring processes, as a calibration does."""
    job = {
        "task": "collectives",
        "operations": ["all_reduce"],
        "sizes": [4096],
        "seconds": 0.05,
        "device": device,
    }
    run_processes(job, ranks=2, timeout=90)
    return True, "2 processes exchanged messages on loopback"


def _gpus(root: Path) -> _Found:
    import torch

    if not torch.cuda.is_available():
        return None, "a driver but no usable GPU" if shutil.which(
            "nvidia-smi"
        ) else "none; calibration uses the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    detail = f"{len(names)}: {', '.join(sorted(set(names)))}, CUDA {torch.version.cuda}"
    return True, detail if len(names) < 2 else f"{detail}, NCCL: {_gloo(root, 'cuda')[1]}"


#: Name of each check, its function, and advice for a bad result.
CHECKS: tuple[tuple[str, Callable[[Path], _Found], str], ...] = (
    ("versions", _versions, "install perfkit again: pip install -e ."),
    (
        "torch",
        lambda root: (True, check_torch()),
        "to measure: pip install -U torch; predicting needs none",
    ),
    (
        "system",
        _system,
        "calibrate on Linux; macOS cannot pin processes, so expect wider intervals there",
    ),
    (
        "cores",
        _cores,
        "raise the container's CPU limit; collectives need 2 cores and are left out on one",
    ),
    (
        "memory",
        _memory,
        f"close programs until {format_bytes(MEMORY)} are free, or the machine will swap",
    ),
    ("disk", _disk, "free 1 GB in both, or name other folders in XDG_CACHE_HOME and TMPDIR"),
    (
        "load",
        _load,
        "stop other programs (see top); if other virtual machines disturb this one, calibrate later",
    ),
    ("frequency", _frequency, "steadier: cpupower frequency-set -g performance"),
    (
        "steadiness",
        _steadiness,
        "close other programs; a check also gives errors at the usual pace, without the drift",
    ),
    ("malloc", _malloc, "another allocator replaces that of glibc; unset LD_PRELOAD"),
    ("gloo", _gloo, "check that the loopback interface is up: ip link"),
    ("GPUs", _gpus, "to measure GPUs: install a CUDA build of torch"),
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
    """
    findings = []
    for name, look, advice in (check for check in CHECKS if not names or check[0] in names):
        try:
            ok, detail = look(root)
        except Exception as error:  # any error of a check is a finding
            ok, detail = False, (str(error).strip() or type(error).__name__).splitlines()[-1]
            if isinstance(error, ImportError):  # torch is missing or too old
                ok, advice = None, CHECKS[1][2]
        findings.append(Finding(name, ok, detail, "" if ok else advice))
    return findings


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
    lines, marks = [], {True: "✓", False: "✗", None: "·"}
    for finding in findings:
        lines.append(f" {marks[finding.ok]} {finding.name:<15} {finding.detail}")
        lines += [f"{'':18}-> {finding.advice}"] if finding.advice else []
    bad = [finding.name for finding in findings if finding.ok is False]
    verdict = f"{len(bad)} of {len(findings)} would disturb a calibration: {', '.join(bad)}"
    return "\n".join([*lines, verdict if bad else "nothing would disturb a calibration"])
