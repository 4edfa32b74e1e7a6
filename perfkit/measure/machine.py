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
#: Smallest and largest plausible size of a cache, by level [B].
_CACHES = {"L1": (2**10, 2**24), "L2": (2**12, 2**30), "L3": (2**14, 2**33)}


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
    cpu, memory = "sys/devices/system/cpu/cpu0", "proc/meminfo"
    places: dict[str, tuple[str, Callable[[Path], Any], tuple[float, float]]] = {
        "processor": ("proc/cpuinfo", _find_processor, (0, 0)),
        "clock": (
            f"{cpu}/cpufreq/cpuinfo_max_freq",
            lambda path: float(path.read_text()) * 1e3,
            (1e7, 1e11),
        ),
        "core_limit": ("sys/fs/cgroup/cpu.max", _find_limit, (0.01, 1e6)),
        "memory": (memory, lambda path: _read_sizes(path)["MemTotal"], (2**20, 2**60)),
        "free_memory": (memory, _find_free, (2**16, 2**60)),
        **{
            level: (f"{cpu}/cache/{level}", _find_cache, bounds)
            for level, bounds in _CACHES.items()
        },
    }
    facts = {
        name: _ask(root / place, read, bounds) for name, (place, read, bounds) in places.items()
    }
    if facts["processor"].value is None:
        facts["processor"] = Fact(
            system.processor() or system.machine() or "unknown", "platform.processor()"
        )
    cores = list_cores(root)
    facts["cores"] = Fact(
        len(cores), "os.sched_getaffinity" if hasattr(os, "sched_getaffinity") else "os.cpu_count"
    )
    whole = {frozenset(_list_siblings(core, root)) for core in cores}
    facts["whole_cores"] = Fact(
        len(whole), str(root / "sys/devices/system/cpu/cpu*/topology/thread_siblings_list")
    )
    facts["system"] = Fact(f"{system.system()} {system.machine()}", "platform.system()")
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    facts["loopback"] = Fact(
        next((name for name in ("lo", "lo0") if name in names), None), "socket.if_nameindex()"
    )
    return facts


def _ask(path: Path, read: Callable[[Path], Any], bounds: tuple[float, float]) -> Fact:
    """Read one fact; its value is None if it cannot be read or is implausible, and its source then
    says why."""
    try:
        value = read(path)
    except (OSError, ValueError, LookupError) as error:
        return Fact(None, f"{path} cannot be read ({type(error).__name__})")
    if isinstance(value, str) or value is None or bounds[0] <= value <= bounds[1]:
        return Fact(value, str(path))
    return Fact(None, f"{path} says {value:g}, which is not plausible")


def _find_processor(path: Path) -> str | None:
    facts = dict(
        re.findall(r"^(.*?)[ \t]*:[ \t]*(.*)$", path.read_text().split("\n\n")[0], re.MULTILINE)
    )
    name = str(facts.get("model name", ""))
    if name and not re.search(r"\d", name):  # a virtual machine may hide the model in its name
        name += f" (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"
    return name or None


def _find_limit(path: Path) -> float | None:
    quota, period = path.read_text().split()
    return None if quota == "max" else float(quota) / float(period)


def _read_sizes(path: Path) -> dict[str, float]:
    return {
        name: 1024.0 * float(size) for name, size in re.findall(r"(\w+):\s+(\d+)", path.read_text())
    }


def _find_free(path: Path) -> float:
    """Memory that can still be allocated, within the limit of a container [B]."""
    sizes, group = _read_sizes(path), path.parent.parent / "sys/fs/cgroup"
    free = [
        sizes["MemAvailable"]
        if "MemAvailable" in sizes
        else sizes["MemFree"] + sizes.get("Cached", 0.0)
    ]
    with suppress(OSError, ValueError):
        free.append(
            float((group / "memory.max").read_text())
            - float((group / "memory.current").read_text())
        )
    return max(min(free), 0.0)


def _find_cache(path: Path) -> float:
    """Size of the data cache whose level is the last part of the path [B]."""
    for folder in sorted(path.parent.glob("index*")):
        kind, level, size = (
            (folder / name).read_text().strip() for name in ("type", "level", "size")
        )
        if kind in ("Data", "Unified") and f"L{level}" == path.name:
            return float(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
    raise LookupError(path.name)


def _list_siblings(core: int, root: Path) -> set[int]:
    """Logical processors that share a core; Linux lists them as ``0-1`` or ``0,64``."""
    found = {core}
    with suppress(OSError):
        text = (
            root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        ).read_text()
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
            found |= {*range(int(first), int(last or first) + 1)}
    return found


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
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else [*range(os.cpu_count() or 1)]
    )
    first = [core for core in allowed if min(_list_siblings(core, root) & {*allowed}) == core]
    return first + [core for core in allowed if core not in first]


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
    caches = ", ".join(
        f"{level} {float(known[level]) / 2**10:.0f} KiB" for level in _CACHES if known[level]
    )
    memory = f"{float(known['memory']) / 1e9:.0f} GB" if known["memory"] else "unknown"
    facts = {
        "processor": str(known["processor"]),
        "cores": str(count_cores()),
        "caches": caches or "unknown",
    }
    return facts | {"memory": memory, "system": str(known["system"])}


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
    found = {"perfkit": __version__, "python": system.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
