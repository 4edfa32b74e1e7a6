"""Collectives and GEMM on GPUs: every form fitted on one part of public measurements and judged on the rest.

    python -m benchmarks.gpu_forms --systems all --json gpu_forms.json

A100 and H100 come from the folder that PERFKIT_SHARED_DATA names. Every other system comes from the kernel database
(`pip install perfkit[kernel-database]`), is fitted with the forms and constants chosen on those two, and judged.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import OUT, command, find_shared_data, gpu_collectives, gpu_gemm, lay_out, save_rows
from benchmarks.gpu_bars import BARS, DATASHEETS, POOLED, make_records
from perfkit.ground.units import check_choice
from perfkit.readers.kernel_database import list_tables

_COLUMNS = {name: f"{{{name}}}" for name in ("system", "quantity", "split", "form", "parameters", "n")}
_COLUMNS |= {name: f"{{{name}:.1f}}" for name in ("geomean", "mean", "p95")}
_COLUMNS |= {"bias": "{bias:+.1f}", "inside": "{inside:.0f}", "bar [%]": "{bar}", "met": "{met}"}


def choose_systems(words: str) -> list[str]:
    """Systems of a comma-separated list; ``all`` are those whose measurements are here."""
    if words != "all":
        return [check_choice("systems", word.strip(), DATASHEETS) for word in words.split(",")]
    systems = POOLED.split("+")
    try:
        found = set(list_tables()["system"])
    except FileNotFoundError as error:
        print(f"only {' and '.join(systems)}: {error}", file=sys.stderr)
        return systems
    return systems + [system for system in DATASHEETS if system in found and system not in systems]


def list_faults(rows: Sequence[Mapping[str, Any]], systems: Sequence[str]) -> list[str]:
    """Bars that are missed, and bars of these systems that no record belongs to, in words."""
    keys = {tuple(row[name] for name in ("system", "quantity", "split")): row["met"] for row in rows}
    wanted = [key for key in BARS if set(key[0].split("+")) <= set(systems)]
    said = {False: "missed", None: "not judged"}
    return [f"{said[keys.get(key)]}: {', '.join(key)}" for key in wanted if not keys.get(key)]


@command(
    {"--systems": {"default": "all", "help": "comma-separated names, or all: every one whose data are here"}, **OUT}
)
def main(given: Any) -> int:
    """Errors of GPU forms on held-out measurements."""
    systems = choose_systems(given.systems)
    if set(systems) & set(POOLED.split("+")):
        find_shared_data()
    rows = make_records(gpu_collectives.judge(systems) + gpu_gemm.judge(systems))
    print(lay_out(rows, _COLUMNS))
    save_rows(given.json, rows, systems=systems)
    for fault in (faults := list_faults(rows, systems)):
        print(fault, file=sys.stderr)
    return 1 if faults else 0
