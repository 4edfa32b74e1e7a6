"""Facts of a machine, read from a folder that replaces its root; implausible ones are unknown."""

import os
from pathlib import Path

import pytest

from perfkit.measure.machine import count_cores, describe_machine, gather_facts, list_cores

CPU = "sys/devices/system/cpu/cpu0"
MEMORY = "MemTotal: 8000000 kB\nMemFree: 1000000 kB\nCached: 500000 kB\nMemAvailable: 4000000 kB\nHugePages_Total: 0\n"


def make_root(root: Path, **files: str) -> Path:
    said = {
        "proc/meminfo": MEMORY,
        "proc/cpuinfo": "processor : 0\nmodel name : Toy 9000\n\nprocessor : 1\n",
        **files,
    }
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


GROUP, CLOCK = "sys/fs/cgroup", f"{CPU}/cpufreq/cpuinfo_max_freq"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {**caches(L1="48K", L2="2M", L3="491520K"), CLOCK: "3700000"},
            {
                "processor": "Toy 9000",
                "clock": 3.7e9,
                "L1": 48 * 2**10,
                "L2": 2 * 2**20,
                "L3": 480 * 2**20,
                "memory": 8.192e9,
                "free_memory": 4.096e9,
            },
        ),
        (caches(L2="0K", L3="0K"), {"L2": None, "L3": None}),
        (caches(L2="nonsense", L3="-1K"), {"L2": None, "L3": None}),
        ({"proc/meminfo": "MemTotal: 0 kB\n"}, {"memory": None, "free_memory": None}),
        ({"proc/meminfo": "garbage"}, {"memory": None, "free_memory": None}),
        ({CLOCK: "0"}, {"clock": None}),
        ({}, dict.fromkeys(("L1", "L2", "L3", "clock", "core_limit"))),
        # old kernels
        ({"proc/meminfo": MEMORY.replace("MemAvailable", "Other")}, {"free_memory": 1.5e6 * 1024}),
        (
            {
                f"{GROUP}/memory.max": "1000000000",
                f"{GROUP}/memory.current": "400000000",
                f"{GROUP}/cpu.max": "150000 100000",
            },
            {"free_memory": 6e8, "core_limit": 1.5},
        ),
        (
            {f"{GROUP}/memory.max": "max", f"{GROUP}/cpu.max": "max 100000"},
            {"free_memory": 4.096e9, "core_limit": None},
        ),
    ],
)
def test_facts_say_where_they_are_from_and_what_cannot_be_true_is_not_known(
    tmp_path, files, expected
):
    facts = gather_facts(make_root(tmp_path, **files))
    assert {name: facts[name].value for name in expected} == expected
    assert all(fact.source for fact in facts.values()) and str(tmp_path) in facts["memory"].source


def test_siblings_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    place = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = make_root(
        tmp_path,
        **{place.format(core): text for core, text in enumerate(("0-1", "0-1", "2,3", "2,3"))},
    )
    assert list_cores(root) == [0, 2, 1, 3]
    facts = gather_facts(root)
    assert (facts["cores"].value, facts["whole_cores"].value) == (4, 2)
    # one of each core
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    assert list_cores(root) == [1, 3] and gather_facts(root)["whole_cores"].value == 2


def test_this_machine_answers() -> None:
    free, total = (gather_facts()[name].value for name in ("free_memory", "memory"))
    assert free is None or total is None or 0 < free <= total
    assert count_cores() >= 1 and all(describe_machine().values())
