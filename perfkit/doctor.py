"""What would spoil a calibration on this machine, found before minutes are spent on it."""

import importlib.metadata
import importlib.util
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

from perfkit.gallery import load_platform
from perfkit.measure.folders import find_cache
from perfkit.measure.machine import gather_facts
from perfkit.measure.runner import ENVIRONMENT, MeasurementError, run_processes
from perfkit.models.drift import REFERENCES
from perfkit.resources import find_reference
from perfkit.units import format_bytes

__all__ = ["Finding", "diagnose", "format_findings"]

PACKAGES = ("numpy", "scipy", "polars", "pandas", "statsmodels", "altair", "vl-convert-python", "tqdm", "tomli-w")
#: Free memory that the larger configurations of a check need beside their PyTorch processes [B].
MEMORY = 6e9
#: Mean error of a check on machines that were steady within 5 %: 7 to 9 % (zen3-2, xeon-2) [-].
USUAL_ERROR = 0.08
#: Share of one core that others may use before medians begin to move [-].
BUSY = 0.25
#: Share of the time that a hypervisor may take away [-].
STOLEN = 0.02


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Parameters
    ----------
    name : str
        What was looked at.
    ok : bool or None
        True: fine. False: it would spoil a calibration. None: worth knowing, but no obstacle.
    detail : str
        What was seen.
    advice : str, optional
        What to do about it.
    """

    name: str
    ok: bool | None
    detail: str
    advice: str = ""


def _versions() -> Finding:
    missing, found = [], [f"Python {system.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    detail = ", ".join(found) + (f"; missing: {', '.join(missing)}" if missing else "")
    return Finding("versions", not missing, detail, "install perfkit again: pip install -e ." if missing else "")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", None, "not installed; predicting needs none", "to measure: pip install -e '.[measure]'")
    return Finding("torch", True, importlib.metadata.version("torch"))


def _system() -> Finding:
    support = {
        "Linux": (True, ""),
        "Darwin": (None, "measuring processes cannot be pinned here; expect wider intervals"),
    }
    ok, advice = support.get(system.system(), (False, "perfkit predicts here; calibrate on Linux"))
    return Finding("system", ok, f"{system.system()} {system.release()} {system.machine()}", advice)


def _cores(root: Path = Path("/")) -> Finding:
    facts = gather_facts(root)
    allowed, whole, limit = (facts[name].value for name in ("cores", "whole_cores", "core_limit"))
    detail = f"{allowed} of {os.cpu_count()} usable" + (f", on {whole} whole cores" if whole < allowed else "")
    if limit is not None and limit < allowed:
        detail += f"; the container may use {limit:.1f} of them"
        return Finding("cores", False, detail, "measurements would be throttled; raise the container's CPU limit")
    advice = "" if allowed > 1 else "collectives need 2 cores; calibration leaves them out"
    return Finding("cores", True if allowed > 1 else None, detail, advice)


def _memory(root: Path = Path("/")) -> Finding:
    facts = gather_facts(root)
    free, total = facts["free_memory"].value, facts["memory"].value
    if free is None or total is None:
        return Finding("memory", None, facts["free_memory"].source, f"keep {format_bytes(MEMORY)} free")
    advice = "" if free >= MEMORY else f"close programs until {format_bytes(MEMORY)} are free, or the machine will swap"
    return Finding("memory", free >= MEMORY, f"{format_bytes(free)} free of {format_bytes(total)}", advice)


def _disk() -> Finding:
    try:
        places = {"kept measurements": find_cache(), "temporary files": Path(tempfile.gettempdir())}
    except (OSError, RuntimeError) as error:
        return Finding("disk", None, str(error), "name folders that can be written to in XDG_CACHE_HOME and TMPDIR")
    free = {use: shutil.disk_usage(place).free if os.access(place, os.W_OK) else 0 for use, place in places.items()}
    detail = ", ".join(f"{format_bytes(free[use])} free for {use} in {place}" for use, place in places.items())
    least = min(free, key=lambda use: free[use])
    advice = "" if free[least] > 1e9 else f"free 1 GB for {least}, or name other folders in XDG_CACHE_HOME and TMPDIR"
    return Finding("disk", not advice, detail, advice)


def _load(seconds: float = 1.0, counters: Path = Path("/proc/stat")) -> Finding:
    """What other programs and the hypervisor take right now, from the kernel's tick counters."""

    def ticks() -> list[int]:
        return [int(text) for text in counters.read_text().split("\n", 1)[0].split()[1:9]]

    try:
        before = ticks()
        time.sleep(seconds)
        user, nice, kernel, idle, waiting, interrupt, soft, stolen = (
            b - a for a, b in zip(before, ticks(), strict=True)
        )
    except (OSError, ValueError):
        return Finding("load", None, "not readable here", "close other programs while measuring")
    busy = user + nice + kernel + interrupt + soft
    total = max(1, busy + idle + waiting + stolen)
    cores = busy / total * (os.cpu_count() or 1)
    recent = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    detail = f"others use {cores:.2f} cores now, 1-minute load {recent:.2f}"
    if stolen / total > STOLEN:
        taken = f"{detail}, the hypervisor takes {stolen / total:.0%}"
        return Finding("load", False, taken, "neighbours disturb this virtual machine; calibrate later or elsewhere")
    if cores > BUSY:
        return Finding("load", False, detail, "stop other programs (see top), then calibrate")
    calm = recent <= max(1.0, 0.5 * (os.cpu_count() or 1))
    return Finding(
        "load", True if calm else None, detail, "" if calm else "the last minute was busy; see that it stays calm"
    )


def _frequency(folder: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq")) -> Finding:
    try:
        governor = (folder / "scaling_governor").read_text().strip()
        top = int((folder / "cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        return Finding("frequency", None, "not readable, as in most virtual machines", "")
    advice = "" if governor == "performance" else "steadier: cpupower frequency-set -g performance"
    return Finding("frequency", True if not advice else None, f"governor {governor}, up to {top / 1e9:.2f} GHz", advice)


_FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def touch():
    block = ctypes.c_void_p(libc.malloc(64 << 20))
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _malloc() -> Finding:
    """Whether freed memory is used again; otherwise large outputs page-fault and iterations become bimodal."""
    if system.libc_ver()[0] != "glibc":
        return Finding("malloc", None, "not glibc; its settings have no effect", "expect larger outputs to vary more")
    command, environment = [sys.executable, "-c", _FAULTS], {**os.environ, **ENVIRONMENT}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        faults = int(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return Finding("malloc", False, f"the trial failed: {error}", "see whether other Python programs start")
    preload = os.environ.get("LD_PRELOAD", "is not set, though")
    advice = "" if faults < 1000 else f"another allocator is in the way; unset LD_PRELOAD ({preload})"
    return Finding("malloc", faults < 1000, f"a second block of 67 MB costs {faults} page faults", advice)


def _exchange(name: str, device: str) -> Finding:
    """Try an all_reduce between two measuring processes, over loopback and a file store as calibration does."""
    job = {"task": "collectives", "operations": ["all_reduce"], "sizes": [4096], "seconds": 0.05, "device": device}
    try:
        run_processes(job, ranks=2, timeout=90)
    except (MeasurementError, OSError) as error:
        last = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        return Finding(
            name, False, f"2 processes could not exchange a message: {last}", "see whether loopback is up: ip link"
        )
    return Finding(name, True, "2 processes exchanged messages on loopback")


def _gloo() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("gloo", None, "not tried without torch")
    return _exchange("gloo", "cpu")


def _gpus() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPUs", None, "not looked for without torch")
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        advice = "install a CUDA build of torch to measure them" if driver else ""
        return Finding(
            "GPUs", None, "a driver but no usable GPU" if driver else "none; calibration uses the CPU", advice
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    detail = f"{len(names)}: {', '.join(sorted(set(names)))}, CUDA {torch.version.cuda}"
    if len(names) < 2:
        return Finding("GPUs", True, detail)
    tried = _exchange("GPUs", "cuda")
    return Finding("GPUs", tried.ok, f"{detail}, NCCL: {tried.detail}", tried.advice)


def _charts() -> Finding:
    try:
        import vl_convert

        from perfkit.plots import calibration_learning

        chart = calibration_learning([{"iterations": n, "family": "DLRM", "error": 0.1 / n} for n in (1, 2)])
        svg = vl_convert.vegalite_to_svg(chart.to_json())
    except Exception as error:  # whatever a renderer may raise, the finding is the same
        return Finding(
            "charts", False, f"{type(error).__name__}: {error}", "install altair and vl-convert-python again"
        )
    return Finding("charts", "<svg" in svg, f"rendered {format_bytes(len(svg))} of SVG without a network")


def _reference() -> Finding:
    try:
        files = sorted(find_reference("platforms").glob("*.toml"))
        for path in files:
            load_platform(path)
    except (OSError, ValueError) as error:
        return Finding("reference data", False, str(error), "restore reference_data/ or install perfkit again")
    advice = "" if files else "restore reference_data/ or install perfkit again"
    return Finding("reference data", bool(files), f"{len(files)} platforms load", advice)


def _steadiness(seconds: float = 10.0) -> Finding:
    """How much the speed of the machine changes within some seconds, and what accuracy that leaves."""
    if importlib.util.find_spec("torch") is None:
        return Finding("steadiness", None, "not tried without torch")
    try:
        found = run_processes({"task": "references", "seconds": seconds}, timeout=90)[0]
    except (MeasurementError, OSError) as error:
        return Finding("steadiness", False, str(error), "see whether other Python programs start")
    logs = np.log(found["references"])
    windows = [np.median(part, axis=0) for part in np.array_split(logs, max(2, round(2 * seconds))) if len(part)]
    moved = np.std(windows, axis=0)
    single = ", ".join(f"{name} {share:.0%}" for name, share in zip(REFERENCES, moved, strict=True))
    expected = float(np.hypot(USUAL_ERROR, moved.mean()))
    detail = f"within {seconds:.0f} s: {single}; expect mean errors of about {expected:.0%} in a check"
    if found["core_share"] < 0.97:
        text = f"{detail}; other programs took {1 - found['core_share']:.0%} of the core"
        return Finding("steadiness", False, text, "close other programs")
    advice = "" if moved.mean() < 0.1 else "a check also gives errors at the usual pace, which tell drift from error"
    return Finding("steadiness", True if moved.mean() < 0.1 else None, detail, advice)


CHECKS: tuple[Callable[[], Finding], ...] = (
    *(_versions, _torch, _system, _cores, _memory, _disk),
    *(_load, _frequency, _steadiness, _malloc, _gloo, _gpus, _charts, _reference),
)


def diagnose() -> list[Finding]:
    """Look at everything a calibration depends on; takes about twenty seconds, half of it to see how steady it is.

    Returns
    -------
    findings : list of Finding
        In a fixed order; any that is not `ok` (False) would spoil a calibration.
    """
    return [check() for check in CHECKS]


def format_findings(findings: list[Finding]) -> str:
    """Lay the findings out for a terminal.

    Parameters
    ----------
    findings : list of Finding
        From `diagnose`.

    Returns
    -------
    text : str
        A line per finding, advice below it, a verdict at the end.

    Examples
    --------
    >>> print(format_findings([Finding("load", False, "others use 1.30 cores", "stop other programs")]))
     ✗ load            others use 1.30 cores
                       -> stop other programs
    1 of 1 would spoil a calibration: load
    """
    marks = {True: "✓", False: "✗", None: "·"}
    lines = []
    for finding in findings:
        lines.append(f" {marks[finding.ok]} {finding.name:<15} {finding.detail}")
        lines += [f"{'':18}-> {finding.advice}"] if finding.advice else []
    bad = [finding.name for finding in findings if finding.ok is False]
    verdict = f"{len(bad)} of {len(findings)} would spoil a calibration: {', '.join(bad)}"
    return "\n".join([*lines, verdict if bad else "nothing here would spoil a calibration"])
