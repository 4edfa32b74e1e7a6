"""Machines that are not at hand: raw measurements of a real machine, edited into those of other
machines.

Every function takes raw measurements of `perfkit calibrate` and returns those of another machine:
without a cache, with an implausible one, with one core, with an operating system that says nothing,
with noise. Times stay the same unless a function says otherwise, so a platform that is fitted to
them has to predict them as well as that of the real machine.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

__all__ = ["MACHINES", "thin"]

Raw = dict[str, Any]


def thin(raw: Raw, step: int = 3) -> Raw:
    """Some of the kernels of each class, at least four, and half of the iterations: enough to fit,
    quick to fit."""
    kept = []
    counts: dict[tuple[str, str], int] = {}
    for row in raw["kernels"]:
        key = (row["kind"], row["variant"])
        number = counts.get(key, 0)
        counts[key] = number + 1
        if number < 4 or number % step == 0:
            kept.append(row)
    return {**raw, "kernels": kept, "iterations": raw["iterations"][::2]}


def _say(raw: Raw, **facts: float | None) -> Raw:
    """The machine says other sizes of itself, or nothing."""
    out = copy.deepcopy(raw)
    for name, value in facts.items():
        out["facts"][name] = {"value": value, "source": "edited"}
    return out


def _no_ladder(raw: Raw) -> Raw:
    """The bandwidth of larger and larger arrays was not measured."""
    return {**raw, "ladder": []}


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
    for row in out["iterations"]:
        if len(row["runs"]) > 1:
            for run in row["runs"]:
                _slow_down(run, slower)
    return out


def _silent(raw: Raw) -> Raw:
    """An operating system without ``/sys`` and ``/proc``, such as macOS."""
    out = _say(
        raw, L1=None, L2=None, L3=None, memory=None, free_memory=None, clock=None, core_limit=None
    )
    out["machine"] |= {"caches": "unknown", "memory": "unknown", "system": "Darwin arm64"}
    return out


def _shake(raw: Raw, noise: float, drift: float) -> Raw:
    """Noise of its own for each time, and a pace that wanders and that references see as well."""
    out = copy.deepcopy(raw)
    rng = np.random.default_rng(0)
    rows = [*out["kernels"], *out["iterations"]]
    walk = drift * np.sin(np.cumsum(rng.uniform(0.0, 0.2, len(rows))))
    for row, pace in zip(rows, np.exp(walk).tolist(), strict=True):
        factor = float(np.exp(noise * rng.standard_normal()))
        for run in row.get("runs", [row]):
            _slow_down(run, pace * factor)
            _slow_down_references(run, pace)
    return out


def _slow_down(run: Raw, factor: float) -> None:
    """All times of a run are longer, but not those of references beside it."""
    for name in ("median", "q1", "q3", "idle"):
        if name in run:
            run[name] = factor * run[name]
    for name in ("operation_seconds", "blocks"):
        if name in run:
            run[name] = [factor * seconds for seconds in run[name]]


def _slow_down_references(run: Raw, pace: float) -> None:
    if "reference" in run:
        run["reference"] = [pace * seconds for seconds in run["reference"]]
    for name in ("references", "operation_references"):
        if name in run:
            scaled = []
            for three in run[name]:
                scaled.append([pace * seconds for seconds in three])
            run[name] = scaled


class Machine(NamedTuple):
    """What makes its file, and how much noise that adds [-]."""

    edit: Callable[[Raw], Raw]
    noise: float = 0.0


MACHINES = {
    "no L3": Machine(partial(_say, L3=None)),
    "L2 and L3 of 0": Machine(partial(_say, L2=0.0, L3=0.0)),
    "L3 of 480 MiB": Machine(partial(_say, L3=480 * 2.0**20)),
    "L3 of 1.15 GB": Machine(partial(_say, L3=1.15e9)),
    "no ladder": Machine(_no_ladder),
    "one core": Machine(_alone),
    "128 ranks": Machine(_many),
    "siblings": Machine(_siblings),
    "no /sys, no /proc": Machine(_silent),
    "noise": Machine(partial(_shake, noise=0.3, drift=0.0), noise=0.3),
    # references tell nine tenths of a pace that varies by 28 %
    "drift": Machine(partial(_shake, noise=0.0, drift=0.4), noise=0.03),
}
