"""Fuzzer of runs with failures: drawn rates of failures, checkpoints and restarts, held against laws."""

from pathlib import Path
from typing import Any

import numpy as np

import perfkit as pk
from tests.fuzz.damage import Rng, choose, draw, junk, vary
from tests.fuzz.entries_training_logs import predict_bert
from tests.fuzz.harness import Entry, Nonsense


def _spread(low: float, high: float) -> Any:
    """A choice of numbers between powers of ten, or something odd now and then."""

    def make(rng: Rng) -> Any:
        if rng.random() < 0.05:
            return junk(rng)
        return 10 ** rng.uniform(low, high)

    return make


MAY: dict[str, Any] = {
    "power": _spread(0, 4),
    "restart": _spread(-3, 5),
    "interval": _spread(-3, 6),
    "jitter": _spread(-4, 0),
}


def price_run(rng: Rng, folder: Path) -> float:
    """A run with failures takes longer than one without, its parts sum to its time, and chances rise."""
    stop = choose(rng, ("checkpoint", "write_rate"))
    given = {
        "iterations": draw(rng, _spread(0, 8)),
        "mtbf": draw(rng, choose(rng, (_spread(2, 14), "llama-3", "bloom"))),
        stop: draw(rng, _spread(-4, 5)),
    } | vary(rng, MAY)
    run = predict_bert().cost(2.0, **given)
    if not isinstance(run, pk.Goodput):  # mtbf is None
        raise ValueError("no failures")
    if not 0 < run.goodput <= 1 + 1e-9 or run.lost_hours < 0:
        raise Nonsense(f"{run} has a goodput of {run.goodput}")
    if not np.isclose(run.account()["share"].sum(), 1.0, rtol=1e-6):
        raise Nonsense(f"parts of {run} are {run.account()['share'].sum()} of its time")
    times = run.hours * np.array([0.5, 0.9, 1.0, 1.1, 2.0])
    for alone in (False, True):
        chances = [run.chance(float(time), failures_alone=alone) for time in times]
        if not np.all(np.diff([0.0, *chances, 1.0]) >= -1e-9):
            raise Nonsense(f"chances {chances} of {run}")
    hours = run.hours_for(float(rng.uniform(0.01, 0.99)))
    run.explain()
    return hours


ENTRIES: dict[str, Entry] = {"runs-with-failures": Entry(price_run, 0.02, new=True)}
