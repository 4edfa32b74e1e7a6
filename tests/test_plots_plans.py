"""Charts of placements by what they hold, and the move they name against pricing every other
plan."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from perfkit import plots
from perfkit.sharding.planner import price_plan, read_constraints, shard
from perfkit.sharding.result import PlanPrice
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KINDS
from perfkit.workloads.tables import TableSet, draw_tables, name_tables

SPLITS = tuple(kind for kind in KINDS if kind != "table_wise")
TABLES = TableSet(draw_tables(12, seed=3), batch=32768, embedding="fused")
ROWS = [
    {"rank": 0, "lookup_s": 1e-3, "update_s": 0.0, "weights_bytes": 4e9, "x": 1.0},
    {"rank": 1, "lookup_s": 1e-3, "update_s": 1e-3, "weights_bytes": 3e9, "x": 1.0},
    {"rank": 2, "lookup_s": 1e-3, "update_s": 2e-3, "weights_bytes": 2e9, "x": 1.0},
]
Row = dict[str, Any]
TIME, MEMORY = 0, 1


class Panel(NamedTuple):
    """Rows of one side of a chart: parts of bars, the mark beside the first rank, dashed lines."""

    bars: list[Row]
    marks: list[Row]
    lines: list[Row]


def read_panel(chart: Any, side: int) -> Panel:
    spec = chart.to_dict()
    layers = spec["hconcat"][side]["layer"]
    bars, marks, lines = [spec["datasets"][layer["data"]["name"]] for layer in layers]
    return Panel(bars, marks, lines)


def sum_rank(panel: Panel, rank: int) -> float:
    """Length of the bar of a rank."""
    return float(sum(row["value"] for row in panel.bars if row["rank"] == rank))


def random_price(
    seed: int, ranks: int = 4, objective: str = "iteration", **given: Any
) -> PlanPrice:
    owners = np.random.default_rng(seed).integers(0, ranks, len(TABLES.tables)).tolist()
    return price_plan(
        TABLES, "h100-sxm-8", Plan.from_owners(owners, ranks=ranks), objective=objective, **given
    )


def test_bars_hold_seconds_and_the_slowest_rank_is_marked() -> None:
    panel = read_panel(plots.plan_bars(ROWS, time=3.2e-3), TIME)
    assert {row["part"] for row in panel.bars} == {"lookup", "update"}
    assert len(panel.bars) == 5, "empty parts are not drawn"
    (slowest,) = panel.marks
    (line,) = panel.lines
    assert (slowest["rank"], slowest["text"]) == (2, "slowest")
    assert line["value"] == 3.2e-3
    assert slowest["value"] == 3.2e-3, "the mark stands beside the dashed line, not on it"


def test_bars_hold_bytes_and_the_fullest_rank_is_marked() -> None:
    chart = plots.plan_bars(ROWS, capacity=5e9, notes=["a note"])
    panel = read_panel(chart, MEMORY)
    assert sum(row["value"] for row in panel.bars) == pytest.approx(9e9)
    (fullest,) = panel.marks
    (line,) = panel.lines
    assert (fullest["rank"], fullest["text"], line["value"]) == (0, "fullest", 5e9)
    assert chart.to_dict()["title"]["subtitle"] == ["a note"]


def test_a_distant_limit_is_in_the_title_and_not_drawn() -> None:
    chart = plots.plan_bars(ROWS, capacity=80e9)
    assert read_panel(chart, MEMORY).lines == []
    bars = chart.to_dict()["hconcat"][MEMORY]["layer"][0]
    assert bars["encoding"]["x"]["title"] == "Memory; a rank has 80 GB"


def read_colours(rows: list[Row]) -> Row:
    """Colours of the parts of times."""
    bars = plots.plan_bars(rows).to_dict()["hconcat"][TIME]["layer"][0]
    color: Row = bars["encoding"]["color"]
    return color


def test_parts_keep_their_colours_where_others_are_missing() -> None:
    every = read_colours(ROWS)
    fewer = read_colours([row | {"lookup_s": 0.0} for row in ROWS])
    assert fewer["scale"] == every["scale"]
    assert fewer["legend"]["values"] == ["update"]


def test_many_ranks_are_cut_to_the_busiest_and_the_fullest() -> None:
    rows = []
    for rank in range(512):
        memory = 1e9 + 1 if rank == 7 else 1e9
        rows.append({"rank": rank, "lookup_s": float(rank % 7), "weights_bytes": memory})
    chart = plots.plan_bars(rows)
    bars = read_panel(chart, TIME).bars
    assert {row["value"] for row in bars} == {6.0}
    assert len(bars) == 31, "rank 7 has nothing to do"
    (fullest,) = read_panel(chart, MEMORY).marks
    assert fullest["rank"] == 7, "the fullest of all ranks, not of the busiest"
    assert chart.to_dict()["title"]["subtitle"] == ["32 of 512 ranks: the busiest, and the fullest"]


def test_no_ranks_are_a_chart() -> None:
    assert json.loads(plots.plan_bars([]).to_json())


@pytest.mark.parametrize("objective", ["iteration", "additive"])
def test_chart_of_a_price_adds_up_to_its_time(objective: str) -> None:
    price = random_price(1, objective=objective)
    times = read_panel(price.chart(), TIME)
    totals = [sum_rank(times, rank) for rank in range(4)]
    (slowest,) = times.marks
    (line,) = times.lines
    assert slowest["rank"] == int(np.argmax(price.loads)) == int(np.argmax(totals))
    assert line["value"] == price.time
    assert 0.95 * price.time < max(totals) <= price.time * (1 + 1e-9)
    memory = read_panel(price.chart(), MEMORY)
    assert [sum_rank(memory, rank) for rank in range(4)] == pytest.approx(price.memory.tolist())


@pytest.mark.parametrize(
    ("seed", "objective"), [(0, "iteration"), (1, "iteration"), (2, "additive")]
)
def test_next_move_is_the_best_of_all_single_moves(seed: int, objective: str) -> None:
    price = random_price(seed, objective=objective)
    owners = [placement.ranks[0] for placement in price.plan.placements]
    times: dict[tuple[int, int], float] = {}
    for table, owner in enumerate(owners):
        for rank in set(range(4)) - {owner}:
            changed = Plan.from_owners([*owners[:table], rank, *owners[table + 1 :]], ranks=4)
            changed_price = price_plan(TABLES, "h100-sxm-8", changed, objective=objective)
            times[table, rank] = changed_price.time
    table, rank = min(times, key=lambda move: times[move])
    shortest = times[table, rank]
    move = price.next_move()
    assert move is not None
    assert move.time == pytest.approx(shortest, rel=1e-9)
    assert (move.table, move.source, move.target) == (f"table {table}", owners[table], rank)
    assert move.gain == pytest.approx(1 - shortest / price.time)
    assert f"{move.gain:.1%} less" in str(move)
    assert str(move) in price.chart().to_dict()["title"]["subtitle"][1]


def test_a_plan_that_does_not_fit_is_told_how_to_make_room() -> None:
    everything = Plan.from_owners([0] * 12, ranks=4)
    most = float(price_plan(TABLES, "h100-sxm-8", everything).memory.max())
    price = price_plan(TABLES, "h100-sxm-8", everything, memory=0.9 * most)
    assert not price.fits
    move = price.next_move()
    assert move is not None
    assert move.source == 0


def test_splits_move_to_ranks_without_a_part_of_the_table() -> None:
    # fewer lookups would be bound by the host
    table = max(TABLES.tables, key=lambda table: table.pooling * table.dim)
    half = (table.dim // 2, table.dim // 2)
    halves = (Placement("column_wise", (0, 1), half), Placement("column_wise", (0, 2), half))
    batch = 4 * TABLES.batch
    twice = TableSet((table, replace(table, name="again")), batch=batch, embedding="fused")
    move = price_plan(twice, "h100-sxm-8", Plan(4, halves)).next_move()
    assert move is not None
    assert (move.source, move.target) == (0, 3)
    assert move.gain > 0


def test_the_best_plan_has_no_move() -> None:
    result = shard(TABLES, "h100-sxm-8", ranks=4, steps=2500)
    assert result.prediction.next_move() is None
    subtitle = result.chart().to_dict()["title"]["subtitle"]
    assert subtitle == [result.prediction.bottleneck, "no move of a single shard makes it shorter"]


def find_random_plan() -> PlanPrice:
    """The random plan that a search compares itself with; no table is cut."""
    price = shard(TABLES, "h100-sxm-8", ranks=4, steps=800, forbid=SPLITS).baselines["random"]
    assert price is not None
    return price


@pytest.mark.parametrize("rule", ["pin", "together", "apart"])
def test_the_next_move_keeps_the_constraints_of_the_search(rule: str) -> None:
    free = find_random_plan()
    move = free.next_move()
    assert move is not None
    table = int(move.table.split()[-1])
    owners = [placement.ranks[0] for placement in free.plan.placements]
    on_the_source = [other for other, rank in enumerate(owners) if rank == move.source]
    beside = next(other for other in on_the_source if other != table)
    values = {
        "pin": {table: move.source},
        "together": [(table, beside)],
        "apart": [(table, owners.index(move.target))],
    }
    constraints = read_constraints(name_tables(TABLES.tables), 4, **{rule: values[rule]})
    assert not constraints.allow_move(table, move.target, free.plan)
    bound = replace(free, _problem=replace(free._problem, constraints=constraints))
    other_move = bound.next_move()
    if other_move is not None:
        assert (other_move.table, other_move.target) != (move.table, move.target)


def test_pinned_tables_have_no_move() -> None:
    pinned = dict.fromkeys(range(12), 0)
    result = shard(TABLES, "h100-sxm-8", ranks=4, steps=800, forbid=SPLITS, pin=pinned)
    assert result.prediction.next_move() is None
