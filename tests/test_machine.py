"""What a machine says of itself: read from a folder that stands for its root, believed only where it can be true."""

import os
from pathlib import Path

import pytest

from perfkit.measure.machine import count_cores, describe_machine, free_memory, gather_facts, list_cores

CPU = "sys/devices/system/cpu/cpu0"
MEMORY = "MemTotal: 8000000 kB\nMemFree: 1000000 kB\nCached: 500000 kB\nMemAvailable: 4000000 kB\nHugePages_Total: 0\n"


def make_root(root: Path, **files: str) -> Path:
    said = {"proc/meminfo": MEMORY, "proc/cpuinfo": "processor : 0\nmodel name : Toy 9000\n\nprocessor : 1\n", **files}
    for place, text in said.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text)
    return root


def caches(**sizes: str) -> dict[str, str]:
    files = {}
    for number, (level, size) in enumerate(sizes.items()):
        folder = f"{CPU}/cache/index{number}"
        files |= {f"{folder}/level": level[1], f"{folder}/size": size, f"{folder}/type": "Unified"}
    return files


def test_every_fact_says_where_it_is_from(tmp_path: Path) -> None:
    root = make_root(
        tmp_path, **caches(L1="48K", L2="2M", L3="491520K"), **{f"{CPU}/cpufreq/cpuinfo_max_freq": "3700000"}
    )
    facts = gather_facts(root)
    values = {name: fact.value for name, fact in facts.items()}
    assert values["processor"] == "Toy 9000" and values["clock"] == 3.7e9
    assert (values["L1"], values["L2"], values["L3"]) == (48 * 2**10, 2 * 2**20, 480 * 2**20)
    assert (values["memory"], values["free_memory"]) == (8.192e9, 4.096e9)
    assert all(fact.source for fact in facts.values())
    assert str(root) in facts["L3"].source and str(root) in facts["memory"].source


@pytest.mark.parametrize(
    ("files", "unknown"),
    [
        (caches(L2="0K", L3="0K"), ("L2", "L3")),
        (caches(L2="nonsense", L3="-1K"), ("L2", "L3")),
        ({"proc/meminfo": "MemTotal: 0 kB\n"}, ("memory", "free_memory")),
        ({"proc/meminfo": "garbage"}, ("memory", "free_memory")),
        ({f"{CPU}/cpufreq/cpuinfo_max_freq": "0"}, ("clock",)),
        ({}, ("L1", "L2", "L3", "clock", "core_limit")),
    ],
)
def test_what_cannot_be_true_is_not_known(tmp_path: Path, files: dict[str, str], unknown: tuple[str, ...]) -> None:
    facts = gather_facts(make_root(tmp_path, **files))
    for name in unknown:
        assert facts[name].value is None and (
            "cannot be read" in facts[name].source or "not believed" in facts[name].source
        )


def test_old_kernels_do_not_state_available_memory(tmp_path: Path) -> None:
    root = make_root(tmp_path, **{"proc/meminfo": "MemTotal: 8000000 kB\nMemFree: 1000000 kB\nCached: 500000 kB\n"})
    assert gather_facts(root)["free_memory"].value == 1.5e6 * 1024


def test_a_container_bounds_memory_and_cores(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    limits = {
        f"{group}/memory.max": "1000000000",
        f"{group}/memory.current": "400000000",
        f"{group}/cpu.max": "150000 100000",
    }
    facts = gather_facts(make_root(tmp_path, **limits))
    assert facts["free_memory"].value == 6e8 and facts["core_limit"].value == 1.5
    free = gather_facts(make_root(tmp_path, **{f"{group}/memory.max": "max", f"{group}/cpu.max": "max 100000"}))
    assert free["free_memory"].value == 4.096e9 and free["core_limit"].value is None


def test_siblings_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    place = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = make_root(tmp_path, **{place.format(core): text for core, text in enumerate(("0-1", "0-1", "2,3", "2,3"))})
    assert list_cores(root) == [0, 2, 1, 3]
    facts = gather_facts(root)
    assert (facts["cores"].value, facts["whole_cores"].value) == (4, 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)  # one of each core
    assert list_cores(root) == [1, 3] and gather_facts(root)["whole_cores"].value == 2


def test_this_machine_answers() -> None:
    free, total = free_memory()
    assert free is None or total is None or 0 < free <= total
    assert count_cores() >= 1 and all(describe_machine().values())
