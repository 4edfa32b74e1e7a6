"""Exploring strategies: what fits is ranked, the front holds what nothing beats, and faults are
named."""

from dataclasses import replace
from itertools import product
from typing import Any

import polars as pl
import pytest

import perfkit as pk
from perfkit.exploration.strategies import Exploration, explore
from perfkit.platform import collective_costs
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.strategies import PARTS, price_strategies
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

GPT = Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)


@pytest.fixture(scope="module")
def both() -> Exploration:
    """On 8 or 16 ranks."""
    return explore(GPT, "a100-sxm-8x2", [8, 16])


def test_what_fits_is_ranked_and_priced_as_alone() -> None:
    found = explore(GPT, "a100-sxm-8x2", [8, 16], memory=40e9)
    frame = found.table()
    assert (
        20 < len(frame) < found.tried and frame["needs"].max() <= 40e9 and frame["time"].is_sorted()
    )
    assert {*frame["ranks"].unique()} == {8, 16} and (frame["low"] < frame["time"]).all()
    assert frame.select(PARTS).sum_horizontal().to_list() == pytest.approx(frame["time"].to_list())
    alone = price_strategies(GPT, load_platform("a100-sxm-8x2"), Strategy.stack([found.best]))
    assert float(alone["time"][0]) == pytest.approx(frame["time"][0]) and found.best.ranks == 16
    one = explore(GPT, "a100-sxm-8x2", strategies=[found.best, replace(found.best, micro_batch=64)])
    assert one.tried == len(one.table()) == 1 and one.best == found.best


def test_times_of_messages_are_asked_for_without_their_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The spread of a collective and its warnings take longer than its time, and no strategy uses
    them: a collective that is not to be shown asks for times alone."""

    def fail(*arguments: Any) -> Any:
        raise AssertionError("nobody asked how sure a collective is")

    monkeypatch.setattr(collective_costs, "spread_beyond", fail)
    monkeypatch.setattr(collective_costs, "choose_sample", fail)
    assert explore(GPT, "h100-sxm-8x8", 64).best.ranks == 64


def test_strategies_without_products_on_tensor_cores_are_priced() -> None:
    """Sizes of many strategies are arrays also where none is a size of such a product."""
    model = Transformer.preset("gpt3-1.3b", batch=64, dtype="fp32")
    assert explore(model, "h100-sxm-8", 8).best.ranks == 8


def test_the_front_holds_what_nothing_beats_in_time_memory_and_ranks(both: Exploration) -> None:
    rows, front = (
        each.select("time", "needs", "ranks").rows() for each in (both.table(), both.front())
    )
    for row in front:
        assert not any(
            other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows
        )
    assert (
        front[0] == rows[0] and {ranks for *_, ranks in front} == {8, 16} and len(front) < len(rows)
    )


def test_the_chart_and_the_report_show_the_front(both: Exploration) -> None:
    spec, front = both.chart().to_dict(), both.front()
    (rows,) = {
        tuple(sorted((row["needs"], row["time"], row["ranks"]) for row in own))
        for own in spec["datasets"].values()
    }
    assert [*rows] == sorted(front.select("needs", "time", "ranks").rows()) and "gpt3-6.7b" in spec[
        "title"
    ]["subtitle"]
    assert "Strategy(tp=" in str(spec["datasets"]) and {row[2] for row in rows} == {8, 16}
    assert [part.name for _, part in both.sections() if isinstance(part, pk.Platform)] == [
        "a100-sxm-8x2 by datasheet"
    ]
    heads = next(part for _, part in both.sections() if hasattr(part, "columns")).columns
    assert heads[:4] == ["time", "low", "high", "needs"] and "tp" in heads and "work" not in heads
    plans = explore(DLRM, "h100-sxm-8", 2)
    shown = {row["strategy"] for own in plans.chart().to_dict()["datasets"].values() for row in own}
    rows = plans.table().select("tables", "mlps", "ranks").rows()
    assert shown <= {f"tables {own}, mlps {way}, ranks {ranks}" for own, way, ranks in rows}


def test_days_and_money_of_a_training(both: Exploration) -> None:
    costs, best = both.cost(2.0, tokens=1e11), both.table().row(0, named=True)
    fastest = costs.sort("time").row(0, named=True)
    assert fastest["days"] == pytest.approx(1e11 / (64 * 2048) * best["time"] / 86400)
    assert fastest["cost"] == pytest.approx(2.0 * fastest["days"] * 24 * fastest["ranks"])
    used = both.table().select(pl.col("time") * pl.col("ranks")).to_series()
    assert costs["cost"].is_sorted() and costs["time"][0] * costs["ranks"][0] == used.min()


def test_words_say_why_the_best_one_is_best(both: Exploration) -> None:
    text, best = both.explain(), both.table().row(0, named=True)
    assert "strategies fit; the best takes" in text and "instead of" in text and "mostly" in text
    _, said, sure, *others = text.split("\n")
    assert all((f" {part} " in said) == (best[part] > 0) for part in PARTS)
    near = both.table().filter(pl.col("time") <= best["high"]).height - 1
    assert (
        sure.startswith(f"  others inside its interval, which may be faster: {near}; with twice ")
        and near > 1
    )
    assert "which may be faster: 0; with" in replace(both, frame=both.table()[:1]).explain()
    more = explore(GPT, "a100-sxm-8x2", [8, 16], memory=160e9).table()["time"][0]
    assert both.doubled == pytest.approx(more) and f"memory: {more / best['time'] - 1:+.1%}" in sure
    line = next(own for own in others if own.startswith("  tp "))
    row = both.table().filter(pl.col("tp") != best["tp"]).row(0, named=True)
    named = {
        own.split()[0]: own.split()[1]
        for own in line[line.index("(") + 1 : line.index(")")].split(", ")
    }
    assert named == {
        key: str(row[key]) for key in vars(both.best) if key != "tp" and row[key] != best[key]
    }


#: Tables that no single way suits: a large one, one with many lookups, a small one.
DLRM = pk.DLRM(
    rows=[4_000_000, 200_000, 1000], dim=64, pooling=[2, 40, 1], batch=16384, embedding="fused"
)


def test_the_best_plan_is_that_of_all_placements() -> None:
    ways: list[int | Placement] = [
        0,
        1,
        *(Placement(kind, (0, 1)) for kind in ("data_parallel", "row_wise", "column_wise")),
    ]
    plans = [Plan(2, owners) for owners in product(ways, repeat=3)]
    found, all_plans = explore(DLRM, "h100-sxm-8", 2), explore(DLRM, "h100-sxm-8", strategies=plans)
    assert all_plans.tried == len(all_plans.table()) == 125
    with keep_quiet():
        least = min(predict(DLRM, "h100-sxm-8", ranks=2, plan=plan).time for plan in plans)
        one = predict(DLRM, "h100-sxm-8", ranks=2, plan=found.plans[0])
    assert all_plans.table()["time"][0] == pytest.approx(least, rel=1e-9)
    assert least <= found.table()["time"][0] <= 1.01 * least
    row = found.table().row(0, named=True)
    assert found.best == found.plans[0]
    assert row["time"] == pytest.approx(one.time) and (row["low"], row["high"]) == pytest.approx(
        one.interval()
    )
    assert row["needs"] == one.memory().total and row["samples_per_s"] == pytest.approx(
        16384 / one.time
    )


def test_plans_that_do_not_fit_are_not_ranked() -> None:
    found = explore(DLRM, "h100-sxm-8x2", [4, 16])
    kinds = {"searched", "column_wise", "row_wise", "data_parallel", "table_wise", "round_robin"}
    frame, text = found.table(), found.explain()
    assert (
        kinds <= {*frame["tables"]}
        and {*frame["ranks"]} == {4, 16}
        and frame["time"].round(12).is_sorted()
    )
    assert "table_row_wise" in {*frame.filter(pl.col("ranks") == 16)["tables"]}
    assert "tables row_wise instead of" in text and "ranks 16 instead of 4" in text
    parts = frame.select(
        "GEMM",
        "embedding",
        "communication",
        "memory",
        "host",
        "imbalance",
        "attention",
        "convolution",
        "transfer",
    )
    assert parts.sum_horizontal().to_list() == pytest.approx(frame["time"].to_list())
    less = explore(DLRM, "h100-sxm-8x2", [4, 16], memory=5e8)
    assert 0 < len(less.table()) < less.tried and (less.table()["needs"] <= 5e8).all()
    assert "data_parallel" not in {*less.table()["tables"]}


def test_mlps_are_shared_with_the_best_plans_of_tables() -> None:
    """Large layers on slow links: shared in nodes; what is shared needs less memory, and fits where
    copies do not."""
    about: dict[str, Any] = {
        "dim": 64,
        "pooling": 2,
        "features": 64,
        "batch": 4096,
        "embedding": "fused",
    }
    large = pk.DLRM(rows=[1000] * 4, bottom=(4096, 4096), top=(4096, 4096, 4096), **about)
    found = explore(large, "a100-sxm-8x2", 16)
    frame, ways = (
        found.table(),
        {"copied", "zero 1", "zero 3", "zero 3 shards 8", "tp 8", "tp 8 zero 3"},
    )
    assert {*frame["mlps"]} == ways and frame["mlps"][0] in (
        "tp 8",
        "zero 3 shards 8",
    )
    assert "mlps copied instead of" in found.explain() and len(frame) == found.tried
    with keep_quiet():
        one = predict(large, "a100-sxm-8x2", ranks=16, plan=found.best)
    assert found.best.mlps and one.time == pytest.approx(frame["time"][0])
    shown = next(part for heading, part in found.sections() if heading)
    assert len({*shown["tables"]}) > 1 and "ranks" not in shown.columns
    copied = frame.filter(pl.col("mlps") == "copied")["needs"].min()
    less = explore(large, "a100-sxm-8x2", strategies=found.plans, memory=0.9 * copied).table()
    assert 0 < len(less) < len(frame) and "copied" not in {*less["mlps"]}
    again = explore(large, "a100-sxm-8x2", strategies=[found.best, replace(found.best, mlps=None)])
    assert again.table()["tables"].to_list() == ["plan 0", "plan 1"] and again.best == found.best


@pytest.mark.parametrize(
    ("model", "ranks", "changes", "message"),
    [
        (GPT, 64, {}, "ranks is 64"),
        (GPT, 8, {"memory": 1e9}, "no strategy on 8 ranks fits; the least takes"),
        (GPT, 8, {"strategies": [Strategy(dp=3)]}, "no strategy on 8 ranks divides the model"),
        (GPT, [8, 0], {}, "ranks is 0"),
        (GPT, 2.5, {}, "ranks is 2.5"),
        (GPT, None, {}, "ranks is None; give"),
        (DLRM, [4, 8], {"memory": 1e7}, r"no strategy on .* ranks fits; the least takes"),
        (
            DLRM,
            4,
            {"strategies": [Plan.round_robin(3, ranks=2)]},
            "no strategy on 4 ranks divides the model",
        ),
        (DLRM, None, {"strategies": [Strategy(dp=2)]}, "strategies"),
    ],
)
def test_what_cannot_be_explored(
    model: Any, ranks: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        explore(model, "a100-sxm-8", ranks, **changes)


@pytest.mark.parametrize(("dtype", "told"), [("fp32", 1), ("bf16", 0), ("tf32", 0)])
def test_idle_tensor_cores_are_told(dtype: str, told: int) -> None:
    gpt = pk.Transformer.gpt2(batch=64, sequence=512, dtype=dtype)
    found = pk.explore(gpt, "a100-sxm-8", 8)
    assert len(found.warnings) == told
    assert ("without tensor cores" in found.explain()) == bool(told)


def test_warnings_are_those_of_the_best_plan() -> None:
    found = pk.explore(pk.DLRM(batch=4096), "a100-sxm-8", 8)
    with keep_quiet():
        best = pk.predict(pk.DLRM(batch=4096), "a100-sxm-8", ranks=8, plan=found.best)
    assert found.warnings == best.warnings
    assert found.warnings
