"""Plans that people would run: widths of shards, small tables, what these limits cost, and what
results say of it."""

from dataclasses import replace
from pathlib import Path

import pytest

import perfkit as pk
from benchmarks.plan_limits import Tables, draw_problem, find_narrowest
from perfkit.ground.units import format_interval, format_time
from perfkit.sharding.constraints import read_constraints
from perfkit.sharding.planner import price_plan, shard
from perfkit.sharding.result import PlanPrice, ShardingResult
from perfkit.sharding.setup import set_up
from perfkit.sharding.small_tables import JoinedPlan, join_small_tables
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KINDS
from perfkit.workloads.tables import EmbeddingTable, TableSet

STEPS = 40


def list_unused(result: ShardingResult) -> list[str]:
    """Kinds that a plan does not use; rules of thumb need whole tables."""
    used = {placement.kind for placement in result.plan.placements}
    return [kind for kind in KINDS if kind not in used and kind != "table_wise"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_plans_of_drawn_problems_keep_their_limits_and_say_what_they_cost(seed: int) -> None:
    problem = draw_problem(seed)
    result = problem.shard(steps=STEPS)
    time = result.prediction.time
    narrowest = find_narrowest(result)
    assert narrowest is None or narrowest >= 128
    assert 0 < result.bound <= time
    again = problem.shard(steps=STEPS, forbid=list_unused(result))
    assert again.plan == result.plan
    assert again.prediction.time == time
    # tables of these problems have up to 512 columns, and might be in more shards
    assert result.bound_of_any_width is not None
    assert result.bound_of_any_width <= result.bound
    assert result.cost_of_min_columns == time - result.bound_of_any_width
    assert f"at most {format_time(result.cost_of_min_columns)}" in result.explain()
    assert 0 <= result.given_up <= 0.05 * time


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [2, 5, 11])
def test_limits_cost_no_more_than_the_result_says(seed: int) -> None:
    problem = draw_problem(seed)
    limited = problem.shard(steps=STEPS)
    free = problem.shard(steps=STEPS, min_columns=1, split_small=True)
    assert free.bound_of_any_width is None
    assert "min_columns" not in free.explain()
    assert limited.prediction.time - free.prediction.time <= limited.cost_of_limits


def test_tables_whose_columns_no_limit_holds_back_have_no_cost() -> None:
    tables = TableSet([EmbeddingTable(10**5, 1024, 8.0)] * 3, batch=8192, embedding="fused")
    result = shard(tables, "h100-sxm-8", ranks=8, steps=10)
    assert result.bound_of_any_width is None
    assert result.cost_of_min_columns == result.cost_of_limits == 0.0


# Small tables.

LARGE = EmbeddingTable(2_000_000, 512, 20.0, name="large")
SMALL = EmbeddingTable(1000, 256, 1.0, name="small")
EVERYWHERE = tuple(range(8))


def join(tables: list[EmbeddingTable], plan: Plan, **constraints: object) -> JoinedPlan:
    """Join small tables of a plan on eight ranks."""
    workload = TableSet(tables, batch=16384, embedding="fused")
    problem = set_up(workload, "h100-sxm-8", 8, None, "iteration", "local")
    names = [str(table.name) for table in tables]
    read = read_constraints(names, 8, problem.costs.order, **constraints)  # type: ignore[arg-type]
    problem = replace(problem, constraints=read)
    return join_small_tables(problem, price(tables, plan))


def price(tables: list[EmbeddingTable], plan: Plan) -> PlanPrice:
    workload = TableSet(tables, batch=16384, embedding="fused")
    return price_plan(workload, "h100-sxm-8", plan)


def test_a_small_table_goes_to_the_rank_where_it_costs_least() -> None:
    """The large table loads ranks 0 and 1, so that the small one costs nothing elsewhere."""
    tables = [LARGE, SMALL]
    split = Plan(8, (Placement("column_wise", (0, 1)), Placement("column_wise", (4, 5))))
    joined = join(tables, split, forbid="data_parallel")
    assert joined.tables == (1,)
    owner = joined.price.plan.owners[1]
    assert owner == 2
    expected = price(tables, Plan(8, (split.owners[0], owner)))
    assert joined.price.time == expected.time
    assert (joined.price.costs == expected.costs).all()
    assert joined.given_up == pytest.approx(expected.time - price(tables, split).time, abs=1e-15)


def test_a_small_table_is_copied_where_it_may_not_be_whole() -> None:
    plan = Plan(8, (Placement("column_wise", (0, 1, 2, 3)), Placement("row_wise", EVERYWHERE)))
    joined = join([LARGE, SMALL], plan, forbid={1: ("table_wise", "column_wise")})
    assert joined.price.plan.placements[1] == Placement("data_parallel", EVERYWHERE)


def test_shards_stay_where_they_gain_much_or_the_table_is_large() -> None:
    """Lookups of a small table may set the time of the iteration."""
    split = Placement("column_wise", (0, 1, 2, 3))
    busy = replace(SMALL, pooling=200.0, name="busy")
    others = ("data_parallel",)
    plan = Plan(8, (split, split))
    assert join([LARGE, busy], plan, forbid=others).tables == ()
    unchanged = join([LARGE, replace(LARGE, name="other")], plan, forbid=others)
    assert unchanged.tables == ()
    assert unchanged.price.plan == plan
    assert unchanged.given_up == 0.0


def test_joined_tables_keep_apart_from_others() -> None:
    plan = Plan(8, (Placement("column_wise", (0, 3)), Placement("column_wise", (6, 7))))
    joined = join([LARGE, SMALL], plan, apart=[(0, 1)])
    assert joined.price.plan.owners[1] == 1
    # no rank is left: a table on all ranks, and copies are ruled out
    full = Plan(8, (Placement("row_wise", EVERYWHERE), Placement("column_wise", (6, 7))))
    assert join([LARGE, SMALL], full, apart=[(0, 1)]).tables == ()


@pytest.mark.filterwarnings("ignore")
def test_a_search_says_what_small_tables_cost_and_may_leave_them_split() -> None:
    problem = draw_problem(2)
    split = problem.shard(steps=300, split_small=True)
    result = problem.shard(steps=300)
    assert split.joined == ()
    assert len(result.joined) > 0
    assert result.given_up == pytest.approx(result.prediction.time - split.prediction.time)
    assert result.prediction.time <= split.prediction.interval()[1]
    assert "whole or copied because they are small: 1 (table" in result.explain()
    assert "small" not in split.explain()
    names = [table.name for table in problem.workload.tables]
    for name in result.joined:
        before, after = (plan.placements[names.index(name)] for plan in (split.plan, result.plan))
        assert len(before.ranks) > 1
        assert before.kind != "data_parallel"
        assert after.kind in ("table_wise", "data_parallel")


# What results say.


def test_time_interval_bound_and_next_search_are_said_together() -> None:
    problem: Tables = draw_problem(0)
    result = problem.shard(steps=STEPS)
    low, high = map(format_time, result.prediction.interval())
    time = format_interval(result.prediction.time, *result.prediction.interval())
    assert repr(result).startswith(f"ShardingResult({time}, ")
    text = "; nothing better than "
    text += f"{format_time(result.bound)} exists within these limits; search longer: steps=240"
    assert text in repr(result)
    assert f"80 % interval of the time: {low} to {high}" in result.explain()
    rows = dict(result._list_limits())
    assert result.gap > 0.1
    assert rows["so the plan is above the best by at most"] == f"{result.gap:.0%}"
    close = replace(result, bound=result.prediction.time / 1.0123)
    assert "at most 1.23% above the best" in close.explain()
    timed = replace(result, steps=None, seconds=0.5)
    assert timed.longer_search == "seconds=3"
    assert not result.has_stalled
    stalled = repr(replace(result, has_stalled=True))
    assert "search longer" not in stalled
    assert "found nothing better, so the bound may be loose" in stalled
    assert replace(result, bound=result.prediction.time / 1.005).longer_search is None


def test_a_search_of_few_tables_that_has_stalled_says_so() -> None:
    sizes = [
        (4 * 10**7, 128, 20.0),
        (25 * 10**6, 128, 5.0),
        (3 * 10**6, 128, 40.0),
        (5 * 10**5, 256, 10.0),
    ]
    tables = [EmbeddingTable(*size) for size in sizes]
    workload = TableSet(tables, batch=65536, embedding="fused")
    brief = shard(workload, "h100-sxm-8x2", ranks=16, steps=20)
    result = shard(workload, "h100-sxm-8x2", ranks=16, steps=400)
    assert not brief.has_stalled
    assert brief.longer_search == "steps=120"
    assert result.gap > 0.01
    assert result.has_stalled
    assert result.longer_search is None
    again = shard(workload, "h100-sxm-8x2", ranks=16, steps=1600)
    assert again.prediction.time == result.prediction.time


def test_rules_of_thumb_that_say_the_same_are_named_together() -> None:
    tables = TableSet([EmbeddingTable(10**6, 128, 8.0)], batch=8192, embedding="fused")
    text = shard(tables, "h100-sxm-8", ranks=8, steps=1).explain()
    assert "random, size, lookup, size-lookup, unique-rows, storage  " in text
    assert text.count("times as long") == 1


def test_assumed_ids_and_optimizer_are_said() -> None:
    tables = [EmbeddingTable(10**6, 128, 8.0), EmbeddingTable(10**6, 128, 8.0, 1.05)]
    workload = TableSet(tables, batch=8192, embedding="fused", optimizer="adam")
    text = shard(workload, "h100-sxm-8", ranks=8, steps=1).explain()
    said = "ids of 1 of 2 tables are uniform (exponent=0); rows are updated by adam (optimizer)"
    assert said in text


def test_full_ranks_are_warned_of() -> None:
    """A table of 140 M rows of 512 B takes 71.7 GB of the 80 GB of a GPU, and one of 120 M 61.4 GB:
    85 % are 68 GB."""
    for rows, memory, warned in (
        (140_000_000, None, True),
        (120_000_000, None, False),
        (140_000_000, 8e10, False),
    ):
        tables = TableSet([EmbeddingTable(rows, 128, 8.0)], batch=1024, embedding="fused")
        result = shard(tables, "h100-sxm-8", ranks=1, steps=1, memory=memory)
        told = [text for text in result.warnings if "TorchRec's planner leaves 15% free" in text]
        assert len(told) == warned
        if warned:
            assert "71.7 GB of its 80 GB in use" in told[0]
            assert "as reserve=0.15 does" in told[0]


def test_the_report_of_a_search_has_its_limits(tmp_path: Path) -> None:
    result = draw_problem(8).shard(steps=5)
    page = pk.report(result, path=tmp_path / "report.html").read_text()
    assert "How good the plan is, and what its limits cost" in page
    assert format_time(result.cost_of_min_columns) in page


def test_a_reserve_stays_free() -> None:
    """15 % of 80 GB, as in TorchRec's planner: 68 GB less what everything else takes."""
    tables = TableSet([EmbeddingTable(10**6, 64, name="a")], batch=1024, embedding="fused")
    plan = Plan.round_robin(1, ranks=2)
    price = pk.price_plan(tables, "h100-sxm-8", plan)
    kept = pk.price_plan(tables, "h100-sxm-8", plan, reserve=0.15)
    assert kept.capacity == pytest.approx(price.capacity - 0.15 * 80e9)
    assert kept.time == price.time
    # weights of a table of 600 MB, its pooled rows, gradients and inputs: no room in 1 % of 80 GB
    large = TableSet([EmbeddingTable(10**7, 64, name="a")], batch=1024, embedding="fused")
    assert pk.price_plan(large, "h100-sxm-8", plan).fits
    assert not pk.price_plan(large, "h100-sxm-8", plan, memory=3e9, reserve=0.15).fits
    with pytest.raises(
        pk.InfeasibleError, match=r"taken by everything else \(450 MB of it by reserve"
    ):
        pk.shard(large, "h100-sxm-8", ranks=1, steps=10, memory=3e9, reserve=0.15, progress=False)
    with pytest.raises(ValueError, match=r"reserve is 1\.5"):
        pk.price_plan(tables, "h100-sxm-8", plan, reserve=1.5)


def test_a_plan_with_shards_without_rows_says_so() -> None:
    """10 rows in blocks of 2 fill five of eight ranks."""
    tables = TableSet(
        [EmbeddingTable(10, 64, name="a"), EmbeddingTable(64, 64, name="b")], batch=1024
    )
    everyone = Placement("row_wise", tuple(range(8)))
    [told] = pk.price_plan(tables, "h100-sxm-8", Plan(8, (everyone, everyone))).warnings
    assert told.startswith("3 shards of 'a' without rows: its 10 rows are cut into 8 blocks of one")
    assert not pk.price_plan(tables, "h100-sxm-8", Plan(8, (0, everyone))).warnings
