"""Charts of placements by what they hold, and the move they name against pricing every other
plan."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfkit import plots
from perfkit.sharding.planner import price_plan, read_constraints, shard
from perfkit.sharding.result import PlanPrice
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.tables import TableSet, draw_tables, name_tables

SPLITS = ("data_parallel", "column_wise", "row_wise", "table_row_wise", "table_column_wise")
TABLES = TableSet(draw_tables(12, seed=3), batch=32768, embedding="fused")
ROWS = [
    {
        "rank": rank,
        "lookup_s": 1e-3,
        "update_s": rank * 1e-3,
        "weights_bytes": 4e9 - rank * 1e9,
        "x": 1.0,
    }
    for rank in range(3)
]


def panel(
    chart: Any, number: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Bars, the mark and the dashed line of one side."""
    spec = chart.to_dict()
    bars, words, line = (
        spec["datasets"][part["data"]["name"]] for part in spec["hconcat"][number]["layer"]
    )
    return bars, words, line


def random_price(
    seed: int, ranks: int = 4, objective: str = "iteration", **given: Any
) -> PlanPrice:
    owners = np.random.default_rng(seed).integers(0, ranks, len(TABLES.tables)).tolist()
    return price_plan(
        TABLES, "h100-sxm-8", Plan.from_owners(owners, ranks=ranks), objective=objective, **given
    )


def test_bars_hold_seconds_and_bytes_and_the_first_ranks_are_marked() -> None:
    chart = plots.plan_bars(ROWS, time=3.2e-3, capacity=5e9, notes=["a note"])
    bars, (slowest,), (line,) = panel(chart, 0)
    assert {row["part"] for row in bars} == {"lookup", "update"} and len(bars) == 5, (
        "empty parts are not drawn"
    )
    assert (slowest["rank"], slowest["text"], line["value"]) == (2, "slowest", 3.2e-3)
    assert slowest["value"] == 3.2e-3, "the mark stands beside the dashed line, not on it"
    bars, (fullest,), (line,) = panel(chart, 1)
    assert sum(row["value"] for row in bars) == pytest.approx(9e9)
    assert (fullest["rank"], fullest["text"], line["value"]) == (0, "fullest", 5e9)
    assert chart.to_dict()["title"]["subtitle"] == ["a note"]
    chart = plots.plan_bars(ROWS, capacity=80e9)  # a distant limit is in the title and not drawn
    assert panel(chart, 1)[2] == []
    assert (
        chart.to_dict()["hconcat"][1]["layer"][0]["encoding"]["x"]["title"]
        == "Memory; a rank has 80 GB"
    )


def test_parts_keep_their_colours_where_others_are_missing() -> None:
    charts = (
        plots.plan_bars(rows).to_dict()
        for rows in (ROWS, [row | {"lookup_s": 0.0} for row in ROWS])
    )
    every, fewer = (chart["hconcat"][0]["layer"][0]["encoding"]["color"] for chart in charts)
    assert fewer["scale"] == every["scale"] and fewer["legend"]["values"] == ["update"]


def test_many_ranks_are_cut_to_the_busiest_and_none_are_a_chart() -> None:
    rows = [
        {"rank": rank, "lookup_s": float(rank % 7), "weights_bytes": 1e9 + (rank == 7)}
        for rank in range(512)
    ]
    chart = plots.plan_bars(rows)
    bars, _, _ = panel(chart, 0)
    assert {row["value"] for row in bars} == {6.0} and len(bars) == 31, "rank 7 has nothing to do"
    assert panel(chart, 1)[1][0]["rank"] == 7, "the fullest of all ranks, not of the busiest"
    assert chart.to_dict()["title"]["subtitle"] == ["32 of 512 ranks: the busiest, and the fullest"]
    assert json.loads(plots.plan_bars([]).to_json())


@pytest.mark.parametrize("objective", ["iteration", "additive"])
def test_chart_of_a_price_adds_up_to_its_time(objective: str) -> None:
    price = random_price(1, objective=objective)
    bars, (slowest,), (line,) = panel(price.chart(), 0)
    total = [sum(row["value"] for row in bars if row["rank"] == rank) for rank in range(4)]
    assert slowest["rank"] == int(np.argmax(price.loads)) == int(np.argmax(total))
    assert 0.95 * price.time < max(total) <= price.time * (1 + 1e-9) == line["value"] * (1 + 1e-9)
    memory = [
        sum(row["value"] for row in panel(price.chart(), 1)[0] if row["rank"] == rank)
        for rank in range(4)
    ]
    assert memory == pytest.approx(price.memory.tolist())


@pytest.mark.parametrize(
    ("seed", "objective"), [(0, "iteration"), (1, "iteration"), (2, "additive")]
)
def test_next_move_is_the_best_of_all_single_moves(seed: int, objective: str) -> None:
    price = random_price(seed, objective=objective)
    owners, found = [p.ranks[0] for p in price.plan.placements], {}
    for table in range(len(owners)):
        for rank in set(range(4)) - {owners[table]}:
            changed = Plan.from_owners([*owners[:table], rank, *owners[table + 1 :]], ranks=4)
            found[table, rank] = price_plan(TABLES, "h100-sxm-8", changed, objective=objective).time
    best = min(found, key=lambda key: found[key])
    move = price.next_move()
    assert move is not None and move.time == pytest.approx(found[best], rel=1e-9)
    assert (move.table, move.source, move.target) == (f"table {best[0]}", owners[best[0]], best[1])
    assert move.gain == pytest.approx(
        1 - found[best] / price.time
    ) and f"{move.gain:.1%} less" in str(move)
    assert str(move) in price.chart().to_dict()["title"]["subtitle"][1]


def test_a_plan_that_does_not_fit_is_told_how_to_make_room() -> None:
    everything = Plan.from_owners([0] * 12, ranks=4)
    most = float(price_plan(TABLES, "h100-sxm-8", everything).memory.max())
    price = price_plan(TABLES, "h100-sxm-8", everything, memory=0.9 * most)
    assert not price.fits and [move.source for move in [price.next_move()] if move] == [0]


def test_splits_move_to_ranks_without_a_part_of_the_table_and_the_best_plan_has_no_move() -> None:
    # a small one would be bound by the host
    one = max(TABLES.tables, key=lambda table: table.pooling * table.dim)
    halves = [Placement("column_wise", (0, other), (one.dim // 2,) * 2) for other in (1, 2)]
    twice = TableSet((one, replace(one, name="again")), batch=TABLES.batch, embedding="fused")
    move = price_plan(twice, "h100-sxm-8", Plan(4, tuple(halves))).next_move()
    assert move is not None and (move.source, move.target) == (0, 3) and move.gain > 0
    result = shard(TABLES, "h100-sxm-8", ranks=4, steps=2500)
    assert result.prediction.next_move() is None
    subtitle = result.chart().to_dict()["title"]["subtitle"]
    assert subtitle == [result.prediction.bottleneck, "no move of a single shard makes it shorter"]


def test_the_next_move_keeps_the_constraints_of_the_search() -> None:
    free = shard(TABLES, "h100-sxm-8", ranks=4, steps=800, forbid=SPLITS).baselines["random"]
    assert free is not None
    move = free.next_move()
    assert move is not None
    table, at = int(move.table.split()[-1]), [p.ranks[0] for p in free.plan.placements]
    beside = next(t for t, rank in enumerate(at) if rank == move.source and t != table)
    pairs = {
        "pin": {table: move.source},
        "together": [(table, beside)],
        "apart": [(table, at.index(move.target))],
    }
    for name, kept in pairs.items():
        rules = read_constraints(name_tables(TABLES.tables), 4, **{name: kept})
        assert not rules.allow_move(table, move.target, free.plan)
        found = replace(free, _problem=replace(free._problem, constraints=rules)).next_move()
        assert found is None or (found.table, found.target) != (move.table, move.target)
    result = shard(
        TABLES, "h100-sxm-8", ranks=4, steps=800, forbid=SPLITS, pin=dict.fromkeys(range(12), 0)
    )
    assert result.prediction.next_move() is None, "every table is pinned"
