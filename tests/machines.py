"""Machines that are not at hand: raw measurements of a real machine, edited into those of other
machines.

Every function takes raw measurements of `perfkit calibrate` and returns those of another machine:
without a cache, with an implausible one, with one core, with an operating system that says nothing,
with noise. Times stay the same unless a function says otherwise, so a platform that is fitted to
them has to predict them as well as that of the real machine.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["MACHINES", "thin"]

Raw = dict[str, Any]


def thin(raw: Raw, step: int = 3) -> Raw:
    """Some of the kernels of each class, at least four, and half of the iterations: enough to fit,
    quick to fit."""
    kept, seen = [], {}
    for row in raw["kernels"]:
        key = (row["kind"], row["variant"])
        seen[key] = seen.get(key, -1) + 1
        kept += [row] if seen[key] % step == 0 or seen[key] < 4 else []
    return {**raw, "kernels": kept, "iterations": raw["iterations"][::2]}


def _say(raw: Raw, **facts: float | None) -> Raw:
    """The machine says other sizes of itself, or nothing."""
    out = copy.deepcopy(raw)
    out["facts"] |= {name: {"value": value, "source": "edited"} for name, value in facts.items()}
    return out


def _alone(raw: Raw) -> Raw:
    """One core, so no collectives and no iterations of several ranks."""
    kept = [row for row in raw["iterations"] if len(row["runs"]) == 1]
    return {**raw, "ranks": 1, "ranks_per_node": 1, "collectives": [], "iterations": kept}


def _many(raw: Raw) -> Raw:
    """Two nodes of 64 ranks, which run no iterations together."""
    return {**_alone(raw), "ranks": 128, "ranks_per_node": 64, "collectives": raw["collectives"]}


def _siblings(raw: Raw, slower: float = 1.6) -> Raw:
    """Two ranks on the two threads of one core: iterations of both take longer."""
    out = _say(raw, cores=2.0, whole_cores=1.0)
    for run in (run for row in out["iterations"] if len(row["runs"]) > 1 for run in row["runs"]):
        run |= {name: slower * run[name] for name in ("median", "q1", "q3", "idle") if name in run}
        for name in ("operation_seconds", "blocks"):
            run[name] = [slower * seconds for seconds in run[name]]
    return out


def _silent(raw: Raw) -> Raw:
    """An operating system without ``/sys`` and ``/proc``, such as macOS."""
    out = _say(
        raw, L1=None, L2=None, L3=None, memory=None, free_memory=None, clock=None, core_limit=None
    )
    return {
        **out,
        "machine": {
            **out["machine"],
            "caches": "unknown",
            "memory": "unknown",
            "system": "Darwin arm64",
        },
    }


def _shake(raw: Raw, noise: float, drift: float) -> Raw:
    """Noise of its own for each time, and a pace that wanders and that references see as well."""
    out, rng = copy.deepcopy(raw), np.random.default_rng(0)
    count = len(out["kernels"]) + len(out["iterations"])
    walk = drift * np.sin(np.cumsum(rng.uniform(0.0, 0.2, count)))
    for row, pace in zip([*out["kernels"], *out["iterations"]], np.exp(walk), strict=True):
        factor = float(np.exp(noise * rng.standard_normal()))
        for part in row.get("runs", [row]):
            part |= {
                name: float(pace) * factor * part[name]
                for name in ("median", "q1", "q3", "idle")
                if name in part
            }
            for name in ("operation_seconds", "blocks"):
                part |= (
                    {name: [float(pace) * factor * seconds for seconds in part[name]]}
                    if name in part
                    else {}
                )
            for name in ("references", "operation_references"):
                part |= (
                    {name: [[float(pace) * t for t in three] for three in part[name]]}
                    if name in part
                    else {}
                )
            part |= (
                {"reference": [float(pace) * t for t in part["reference"]]}
                if "reference" in part
                else {}
            )
    return out


#: By name: what makes the file, and how much noise it adds [-].
MACHINES: dict[str, tuple[Callable[[Raw], Raw], float]] = {
    "no L3": (lambda raw: _say(raw, L3=None), 0.0),
    "L2 and L3 of 0": (lambda raw: _say(raw, L2=0.0, L3=0.0), 0.0),
    "L3 of 480 MiB": (lambda raw: _say(raw, L3=480 * 2.0**20), 0.0),
    "L3 of 1.15 GB": (lambda raw: _say(raw, L3=1.15e9), 0.0),
    "no ladder": (lambda raw: {**raw, "ladder": []}, 0.0),
    "one core": (_alone, 0.0),
    "128 ranks": (_many, 0.0),
    "siblings": (_siblings, 0.0),
    "no /sys, no /proc": (_silent, 0.0),
    "noise": (lambda raw: _shake(raw, 0.3, 0.0), 0.3),
    # references tell nine tenths of a pace that varies by 28 %
    "drift": (lambda raw: _shake(raw, 0.0, 0.4), 0.03),
}
