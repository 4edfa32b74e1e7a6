"""This machine in words and numbers: processor, caches, memory, versions."""

import os
import platform as system
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["cache_sizes", "count_cores", "describe_machine", "free_memory", "list_versions"]


def count_cores() -> int:
    """Cores this process may use.

    Returns
    -------
    cores : int
        Their number [-].
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _processor() -> str:
    with suppress(OSError, ValueError):
        core = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        facts = {key.strip(): text.strip() for key, text in (line.split(":", 1) for line in core.splitlines())}
        name = facts.get("model name", "")
        if name and not any(letter.isdigit() for letter in name):  # a virtual machine hides which one it is
            name += f" (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"
        return name or system.machine()
    return system.processor() or system.machine()


def cache_sizes() -> dict[str, float]:
    """Data caches of the first core.

    Returns
    -------
    sizes : dict of str to float
        Capacity by level, ``L1`` to ``L3`` [B]; empty where the system does not say.
    """
    sizes: dict[str, float] = {}
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError, ValueError, KeyError):
            if (folder / "type").read_text().strip() in ("Data", "Unified"):
                text = (folder / "size").read_text().strip()
                sizes["L" + (folder / "level").read_text().strip()] = float(text[:-1]) * units[text[-1]]
    return sizes


def free_memory() -> tuple[float, float]:
    """Free and whole main memory.

    Returns
    -------
    free, total : float
        What can be allocated without swapping, and all there is; zeros where the system does not say [B].
    """
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        free, total = (float(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        return free, total
    return 0.0, 0.0


def describe_machine() -> dict[str, str]:
    """What a measurement's reader wants to know of the machine.

    Returns
    -------
    facts : dict of str to str
        Processor, cores, caches, memory and operating system.
    """
    caches = ", ".join(f"{level} {size / 2**10:.0f} KiB" for level, size in cache_sizes().items())
    return {
        "processor": _processor(),
        "cores": str(count_cores()),
        "caches": caches or "unknown",
        "memory": f"{free_memory()[1] / 1e9:.0f} GB",
        "system": f"{system.system()} {system.machine()}",
    }


def list_versions() -> dict[str, str]:
    """Versions that a measurement depends on.

    Returns
    -------
    versions : dict of str to str
        By package.
    """
    from perfkit import __version__

    found = {"perfkit": __version__, "python": system.python_version()}
    for package in ("torch", "numpy", "scipy", "statsmodels"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
