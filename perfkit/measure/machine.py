"""Facts about this machine: processor, cores, caches, memory and versions, each with its source."""

import math
import os
import platform as system
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from perfkit.ground.version import __version__

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Fact:
    """One fact that a machine reports.

    Parameters
    ----------
    value : object
        Number or text; None if unknown [unit of the fact].
    source : str
        File or call that reported it, or why it is unknown.
    """

    value: Any
    source: str


def gather_facts(root: Path = Path("/")) -> dict[str, Fact]:
    """Gather what the operating system reports of this machine.

    Parameters
    ----------
    root : Path, optional
        Folder that holds ``proc`` and ``sys``.

    Returns
    -------
    facts : dict of str to Fact
        ``processor``, ``system``, ``loopback``; ``cores``: logical processors that this process may
        use, ``whole_cores``: physical cores among them, ``core_limit`` of a container [-];
        ``memory``, ``free_memory`` and the caches ``L1`` to ``L3`` [B]; ``clock`` [Hz]. Unknown and
        implausible values are None.
    """
    facts = {name: source.ask(root) for name, source in _SOURCES.items()}
    if facts["processor"].value is None:
        name = system.processor() or system.machine() or "unknown"
        facts["processor"] = Fact(name, "platform.processor()")
    cores = list_cores(root)
    call = "os.sched_getaffinity" if hasattr(os, "sched_getaffinity") else "os.cpu_count"
    facts["cores"] = Fact(len(cores), call)
    physical_cores = {frozenset(_list_siblings(core, root)) for core in cores}
    siblings = root / "sys/devices/system/cpu/cpu*/topology/thread_siblings_list"
    facts["whole_cores"] = Fact(len(physical_cores), str(siblings))
    facts["system"] = Fact(f"{system.system()} {system.machine()}", "platform.system()")
    facts["loopback"] = Fact(_find_loopback(), "socket.if_nameindex()")
    return facts


def _find_processor(path: Path) -> str | None:
    """Name of the first processor of ``/proc/cpuinfo``."""
    first = path.read_text().split("\n\n")[0]
    lines = dict(re.findall(r"^(.*?)[ \t]*:[ \t]*(.*)$", first, re.MULTILINE))
    name = str(lines.get("model name", ""))
    if name and not re.search(r"\d", name):  # a virtual machine may hide the model in its name
        name += f" (family {lines.get('cpu family', '?')}, model {lines.get('model', '?')})"
    return name or None


def _read_clock(path: Path) -> float:
    """Highest clock [Hz]; the file states kHz."""
    return float(path.read_text()) * 1e3


def _find_limit(path: Path) -> float | None:
    """Cores that a container may use; None without a limit [-]."""
    quota, period = path.read_text().split()
    return None if quota == "max" else float(quota) / float(period)


def _read_sizes(path: Path) -> dict[str, float]:
    """All sizes of ``/proc/meminfo`` by name [B]; the file states KiB."""
    sizes = re.findall(r"(\w+):\s+(\d+)", path.read_text())
    return {name: 1024.0 * float(size) for name, size in sizes}


def _find_memory(path: Path) -> float:
    """Size of the main memory [B]."""
    return _read_sizes(path)["MemTotal"]


def _find_free(path: Path) -> float:
    """Memory that can still be allocated, within the limit of a container [B]."""
    sizes = _read_sizes(path)
    if "MemAvailable" in sizes:
        free = sizes["MemAvailable"]
    else:
        free = sizes["MemFree"] + sizes.get("Cached", 0.0)
    group = path.parent.parent / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        limit = float((group / "memory.max").read_text())
        free = min(free, limit - float((group / "memory.current").read_text()))
    return max(free, 0.0)


def _find_cache(path: Path) -> float:
    """Size of the data cache whose level is the last part of the path [B]."""
    for folder in sorted(path.parent.glob("index*")):
        kind = (folder / "type").read_text().strip()
        level = (folder / "level").read_text().strip()
        size = (folder / "size").read_text().strip()
        if kind in ("Data", "Unified") and f"L{level}" == path.name:
            return float(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
    raise LookupError(path.name)


def _find_loopback() -> str | None:
    """Name of the interface by which a machine talks to itself, if it has one."""
    if not hasattr(socket, "if_nameindex"):
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


@dataclass(frozen=True)
class _Source:
    """Where a fact stands: its file, the function that reads it from there, and, of a number, the
    smallest and largest plausible value [unit of the fact]."""

    file: str
    read: Callable[[Path], Any]
    smallest: float | None = None
    largest: float | None = None

    def ask(self, root: Path) -> Fact:
        """Read the fact; its value is None if it cannot be read or is implausible, and its source
        then says why."""
        path = root / self.file
        try:
            value = self.read(path)
        except (OSError, ValueError, LookupError) as error:
            return Fact(None, f"{path} cannot be read ({type(error).__name__})")
        if value is None or self.is_plausible(value):
            return Fact(value, str(path))
        return Fact(None, f"{path} says {value:g}, which is not plausible")

    def is_plausible(self, value: Any) -> bool:
        """Whether a value lies within the bounds; every text does."""
        if self.smallest is None or self.largest is None:
            return True
        return bool(self.smallest <= value <= self.largest)


_CPU = "sys/devices/system/cpu/cpu0"
_MEMORY = "proc/meminfo"
#: Facts that stand in files.
_SOURCES = {
    "processor": _Source("proc/cpuinfo", _find_processor),
    "clock": _Source(f"{_CPU}/cpufreq/cpuinfo_max_freq", _read_clock, 1e7, 1e11),
    "core_limit": _Source("sys/fs/cgroup/cpu.max", _find_limit, 0.01, 1e6),
    "memory": _Source(_MEMORY, _find_memory, 2**20, 2**60),
    "free_memory": _Source(_MEMORY, _find_free, 2**16, 2**60),
    "L1": _Source(f"{_CPU}/cache/L1", _find_cache, 2**10, 2**24),
    "L2": _Source(f"{_CPU}/cache/L2", _find_cache, 2**12, 2**30),
    "L3": _Source(f"{_CPU}/cache/L3", _find_cache, 2**14, 2**33),
}


def _list_siblings(core: int, root: Path) -> set[int]:
    """Logical processors that share a core; Linux lists them as ``0-1`` or ``0,64``."""
    siblings = {core}
    file = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    with suppress(OSError):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", file.read_text()):
            siblings.update(range(int(first), int(last or first) + 1))
    return siblings


def _list_allowed() -> list[int]:
    """Logical processors that this process may use, in order; all where the system does not say
    it, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def list_cores(root: Path = Path("/")) -> list[int]:
    """Logical processors that this process may use: first one of each core, then the others.

    Parameters
    ----------
    root : Path, optional
        Folder that holds ``sys``.

    Returns
    -------
    cores : list of int
        Their numbers.
    """
    allowed = _list_allowed()
    first_of_core, others = [], []
    for core in allowed:
        siblings = _list_siblings(core, root).intersection(allowed)
        if core == min(siblings):
            first_of_core.append(core)
        else:
            others.append(core)
    return first_of_core + others


def count_cores() -> int:
    """Cores this process may use, within the limit of its container.

    Returns
    -------
    cores : int
        Their number [-].
    """
    facts = gather_facts()
    return max(1, int(min(facts["cores"].value, facts["core_limit"].value or math.inf)))


def describe_machine() -> dict[str, str]:
    """Describe this machine in words, for people who read a measurement.

    Returns
    -------
    facts : dict of str to str
        Processor, cores, caches, memory and operating system.
    """
    known = {name: fact.value for name, fact in gather_facts().items()}
    caches = []
    for level in ("L1", "L2", "L3"):
        if known[level]:
            caches.append(f"{level} {float(known[level]) / 2**10:.0f} KiB")
    memory = f"{float(known['memory']) / 1e9:.0f} GB" if known["memory"] else "unknown"
    return {
        "processor": str(known["processor"]),
        "cores": str(count_cores()),
        "caches": ", ".join(caches) or "unknown",
        "memory": memory,
        "system": str(known["system"]),
    }


def list_versions(
    packages: Sequence[str] = ("torch", "numpy", "scipy", "statsmodels"),
) -> dict[str, str]:
    """Versions that a measurement depends on.

    Parameters
    ----------
    packages : sequence of str, optional
        Packages to list after perfkit and Python; missing ones are left out.

    Returns
    -------
    versions : dict of str to str
        By package.
    """
    versions = {"perfkit": __version__, "python": system.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
