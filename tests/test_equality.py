"""Equal input, equal output on any processor: what the last bits of a time say decides nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from benchmarks.helpers.eager import EagerDLRM
from perfkit.ground.units import Array
from perfkit.prediction import predictor
from perfkit.prediction.cost import Costs

EAGER = {"embedding": "fused"}
ALIKE = pk.DLRM(
    rows=[40_000] * 8, dim=64, pooling=20, batch=4096, bottom=[64], top=[64], features=13
)
GPT = pk.Transformer.gpt2(batch=16, layers=3, dtype="bf16")
BERT = pk.Transformer.bert("bert-base", batch=16, sequence=128)


class Case(NamedTuple):
    """What is predicted, where, and how."""

    workload: Any
    platform: str
    settings: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "eager DLRM, V100": Case(
        EagerDLRM(pk.DLRM("dlrm-default", batch=2048, **EAGER)), "v100-locked-1"
    ),
    "eager MLPerf DLRM, P100": Case(
        EagerDLRM(pk.DLRM("dlrm-mlperf", batch=4096, **EAGER)), "p100-1"
    ),
    "hybrid DLRM of alike tables, 8 H100": Case(ALIKE, "h100-sxm-8", {"ranks": 8}),
    "skewed DLRM, 2 H100": Case(
        ALIKE,
        "h100-sxm-8",
        {"plan": pk.Plan.from_owners([0, 0, 0, 0, 0, 1, 1, 1], ranks=2), "ranks": 2},
    ),
    "DDP Transformer, 8 H100": Case(GPT, "h100-sxm-8", {"ranks": 8}),
    "DDP Transformer, 4 V100 with two stragglers": Case(
        BERT, "v100-sxm-8", {"ranks": 4, "slowdown": {1: 1.2, 3: 1.2}}
    ),
    "hybrid DLRM on two cores": Case(ALIKE, "zen5-2", {"ranks": 2}),
    "DDP Transformer on two cores": Case(
        pk.Transformer.gpt2(batch=4, layers=2), "zen3-2", {"ranks": 2}
    ),
}


pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")


def ask(name: str) -> pk.Prediction:
    case = CASES[name]
    return pk.predict(case.workload, case.platform, **case.settings)


def assert_alike(ours: pl.DataFrame, theirs: pl.DataFrame, time: float) -> None:
    """The same rows in the same order, and times that differ by less than a billionth of the
    iteration."""
    for name, kind in theirs.schema.items():
        if kind == pl.Float64:
            near = 1e-9 * time if name.endswith("_s") else 1e-9
            numbers = pytest.approx(theirs[name].to_numpy(), rel=0, abs=near)
            assert ours[name].to_numpy() == numbers, name
        else:
            assert ours[name].equals(theirs[name]), name


@pytest.fixture
def shaken(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every operation and collective takes longer or shorter by some 1e-12 of its time, as a seed
    has it."""
    price, meet = predictor.price, predictor.time_collectives

    def shake(seed: int) -> None:
        rng = np.random.default_rng(seed)

        def noise(times: Array) -> Array:
            return times * (1 + 1e-12 * rng.uniform(-1, 1, len(times)))

        def shaken_price(*args: Any, **more: Any) -> list[Costs]:
            costs = price(*args, **more)
            return [replace(c, seconds=noise(c.seconds), spread=noise(c.spread)) for c in costs]

        def shaken_meet(*args: Any) -> Any:
            durations, notes = meet(*args)
            return [noise(own) for own in durations], notes

        monkeypatch.setattr(predictor, "price", shaken_price)
        monkeypatch.setattr(predictor, "time_collectives", shaken_meet)

    return shake


def view(found: pk.Prediction) -> list[pl.DataFrame]:
    return [
        found.breakdown(),
        found.idle(),
        found.communication(),
        found.critical_path(),
        found.modules(),
        found.timeline(),
    ]


def list_bounds(found: pk.Prediction) -> list[float]:
    return [found.time, *found.interval(), found.lower_bound, found.serial, found.latency]


@pytest.mark.parametrize("name", CASES)
def test_the_last_bits_of_times_decide_nothing(name: str, shaken: Callable[[int], None]) -> None:
    found = ask(name)
    views = view(found)
    for seed in range(2):
        shaken(seed)
        other = ask(name)
        assert list_bounds(other) == pytest.approx(list_bounds(found), rel=1e-9)
        assert other.bottleneck == found.bottleneck
        for ours, theirs in zip(view(other), views, strict=True):
            assert_alike(ours, theirs, found.time)


def test_order_and_threads_change_nothing() -> None:
    names = [*CASES, *reversed(CASES)]
    alone = {name: ask(name) for name in CASES}
    with ThreadPoolExecutor(8) as pool:
        for name, other in zip(names, pool.map(ask, names), strict=True):
            assert (other.time, other.parts, other.spread) == (
                alone[name].time,
                alone[name].parts,
                alone[name].spread,
            )
            assert other.critical_path().equals(alone[name].critical_path())
