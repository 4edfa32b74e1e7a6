"""Prices of plans against the predictor, the search against all plans of small cases, bounds,
constraints, errors."""

import html
import io
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.units import format_interval, format_time, steady
from perfkit.models.distributions import Zipf
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.plots import breakdown_bars
from perfkit.sharding import bound, costs, planner, prices, problem, setup, starts, state
from perfkit.sharding.candidates import list_candidates, list_floors
from perfkit.sharding.costs import COLUMNS, Cost
from perfkit.sharding.planner import (
    BASELINES,
    InfeasibleError,
    price_plan,
    read_constraints,
    shard,
)
from perfkit.sharding.problem import Resource
from perfkit.sharding.progress import describe
from perfkit.sharding.result import ShardingResult, price_checked_plan, price_placements
from perfkit.sharding.setup import set_up
from perfkit.sharding.state import State
from perfkit.workloads.dlrm import DLRM, list_local_tables
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import (
    KIND_OF_NAME,
    KINDS,
    PLACEMENT_KINDS,
    PlacementKind,
    Reduction,
)
from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables, share_lookups
from tests.fuzz.entries_sharding import check_bound, check_laws, check_sizes

TABLES = TableSet(draw_tables(40, seed=5), batch=16384, embedding="fused")


def find(tables: Any = TABLES, platform: Any = "h100-sxm-8", **settings: Any) -> ShardingResult:
    return shard(tables, platform, **{"ranks": 8, "steps": 400, **settings})


@pytest.fixture(scope="module")
def cluster() -> Platform:
    return load_platform("h100-sxm-8").with_nodes(2)


def place_all(count: int, owner: int | Placement, ranks: int) -> Plan:
    """The same place for each of so many tables."""
    return Plan(ranks, tuple(owner for _ in range(count)))


def over_all(kind: str, ranks: int) -> Placement:
    """A table that is copied to all ranks, or split over all of them."""
    return Placement(kind, tuple(range(ranks)))


def place_on_two_nodes(kind: PlacementKind, number: int) -> Placement:
    """A placement of a kind on two nodes of 8 ranks."""
    return Placement.example(kind, ranks=16, ranks_per_node=8, number=number)


def list_ranks(plan: Plan, tables: Iterable[int]) -> list[int]:
    """The ranks of each of some tables, one after the other."""
    ranks = []
    for table in tables:
        ranks += plan.placements[table].ranks
    return ranks


# Prices.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "ranks", "batch"), [("zen5-2", 2, 2048), ("h100-sxm-8", 4, 65536)]
)
@pytest.mark.parametrize(
    "way", [{"embedding": "separate"}, {"embedding": "fused"}, {"sparse": False}], ids=str
)
def test_plans_of_whole_tables_cost_what_is_predicted(
    name: str, ranks: int, batch: int, way: dict[str, Any]
) -> None:
    rng = np.random.default_rng(7)
    errors = []
    for _ in range(4):
        count = int(rng.integers(6, 30))
        rows = np.round(10 ** rng.uniform(3, 6, count)).astype(int).tolist()
        dim = int(rng.choice([16, 64, 128]))
        pooling = rng.integers(1, 30, count).tolist()
        exponent = rng.uniform(0, 1.2, count).round(2).tolist()
        layers = {"bottom": [512, 256], "top": [512, 256], "features": 13}
        model = DLRM(
            rows=rows, dim=dim, pooling=pooling, exponent=exponent, batch=batch, **layers, **way
        )
        plan = Plan.from_owners(rng.integers(0, ranks, count).tolist(), ranks=ranks)
        price = price_plan(model, name, plan)
        predicted = pk.predict(model, name, ranks=ranks, plan=plan)
        errors.append(price.time / predicted.time - 1)
    assert np.abs(errors).max() < 0.05, errors
    assert np.abs(errors).mean() < 0.025, errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "split",
    [
        Placement("column_wise", (3, 11)),
        *[place_on_two_nodes(kind, 1) for kind in PLACEMENT_KINDS if not kind.is_whole],
    ],
    ids=lambda split: f"{split.kind} on {len(split.ranks)}",
)
@pytest.mark.parametrize("way", [{"embedding": "separate", "optimizer": "sgd"}, {"fused": True}])
def test_plans_with_splits_cost_what_is_predicted(
    split: Placement, way: dict[str, Any], cluster: Platform
) -> None:
    """Large tables are split, small ones copied; 16 ranks are two nodes of the cluster."""
    model = DLRM("dlrm-dcnv2", batch=16384, **way)
    owners: list[int | Placement] = []
    for number, table in enumerate(model.tables):
        is_small = table.rows < 10_000
        is_large = table.rows > 1_000_000
        is_chosen = is_small if split.traits.is_copied else is_large
        owners.append(split if is_chosen else number % 16)
    plan = Plan.from_owners(owners, ranks=16)
    predicted = pk.predict(model, cluster, ranks=16, plan=plan)
    assert price_plan(model, cluster, plan).time == pytest.approx(predicted.time, rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("columns", [4, 12])
def test_sums_inside_nodes_may_have_columns_that_their_ranks_do_not_divide(
    columns: int, cluster: Platform
) -> None:
    """The ranks of a node share the samples of the sums, not their columns."""
    model = DLRM(rows=[1_000_000] * 16, dim=columns, pooling=20, batch=65536, bottom=(64, columns))
    kind = KIND_OF_NAME["table_row_wise"]
    plan = Plan(16, tuple(place_on_two_nodes(kind, number) for number in range(16)))
    predicted = pk.predict(model, cluster, ranks=16, plan=plan).time
    assert price_plan(model, cluster, plan).time == pytest.approx(predicted, rel=0.05)
    for local in list_local_tables(plan, model.tables):
        assert sum(local.widths) == 16 * columns, "each rank receives all columns of its samples"
        assert local.largest_width == 8 * columns / 8


@pytest.mark.filterwarnings("ignore")
def test_a_single_narrow_table_may_be_summed_inside_a_node(cluster: Platform) -> None:
    """Its sums of a node have fewer columns than the node has ranks."""
    model = DLRM(rows=[1_000_000], dim=4, pooling=20, batch=65536, bottom=(64, 4))
    plan = Plan(16, (Placement("table_row_wise", tuple(range(8))),))
    predicted = pk.predict(model, cluster, ranks=16, plan=plan).time
    assert price_plan(model, cluster, plan).time == pytest.approx(predicted, rel=0.06)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("kind", PLACEMENT_KINDS, ids=lambda kind: kind.name)
def test_shards_of_a_table_have_its_weights_and_the_states_of_its_optimizer(
    kind: PlacementKind, optimizer: str, cluster: Platform
) -> None:
    rows, columns, itemsize = 1_600_000, 128, 4
    table = EmbeddingTable(rows, columns, 20.0)
    workload = TableSet([table], batch=16384, embedding="fused", optimizer=optimizer)
    placement = place_on_two_nodes(kind, 1)
    memory = price_plan(workload, cluster, Plan(16, (placement,))).costs.sum(axis=0)
    copies = 16 if kind.is_copied else 1
    # one number for each row, and each part of its columns has its own
    parts_of_row = len(placement.ranks) if kind.splits_columns else 1
    states_of_row = {"sgd": 0, "rowwise_adagrad": parts_of_row, "adam": 2 * columns}
    assert memory[Cost.WEIGHTS] == copies * rows * columns * itemsize
    assert memory[Cost.STATE] == copies * rows * states_of_row[optimizer] * itemsize


def test_the_most_popular_rows_of_tables_on_all_ranks_are_on_different_ranks() -> None:
    """By the order of their sizes, so that the order of the tables does not matter."""
    rows = [80_000, 20_000, 40_000, 60_000]
    tables = [EmbeddingTable(size, 64, 20.0, exponent=1.1) for size in rows]
    workload = TableSet(tables, batch=4096, embedding="fused")
    problem = set_up(workload, load_platform("h100-sxm-8"), 4, None, "iteration", "local")
    position_by_size = [3, 0, 1, 2]
    ranks = (2, 0, 3, 1)
    plan = place_all(4, Placement("row_wise", ranks), 4)
    inputs = price_placements(problem.costs, plan).by_rank(4)[:, Cost.INPUTS]
    expected = np.zeros(4)
    for table, position in zip(tables, position_by_size, strict=True):
        for rank in range(4):
            has_hot_row = rank == ranks[position]
            lookups = float(share_lookups(table, 4, first=has_hot_row))
            expected[rank] += 8 * 4096 * (lookups + 1)
    assert inputs == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", PLACEMENT_KINDS, ids=lambda kind: kind.name)
def test_loads_of_a_search_are_those_of_the_price_of_its_plan(
    kind: PlacementKind, cluster: Platform
) -> None:
    drawn = draw_tables(7, seed=4)
    tables = tuple(replace(table, dim=128, exponent=1.1, law=None) for table in drawn)
    workload = TableSet(tables, batch=4096, embedding="fused")
    problem = set_up(workload, cluster, 16, None, "iteration", "local")
    names = [str(number) for number in range(7)]
    problem = replace(problem, constraints=read_constraints(names, 16, min_columns=8))
    everywhere = {name: np.ones(7, dtype=bool) for name in KINDS}
    candidates = list_candidates(problem, everywhere)
    state = State(problem, candidates)
    placements: list[Any] = [None] * 7
    for unit, candidate in enumerate(candidates.choose_kinds(np.full(7, kind.name))):
        assert candidates.kind[candidate] == kind.name
        [table] = problem.constraints.units[unit]
        example = place_on_two_nodes(kind, table)
        ranks = example.ranks[: candidates.shards[candidate]]
        state.assign(candidate, np.array(ranks))
        placements[table] = Placement(kind.name, ranks)
    costs_of_ranks = price_placements(problem.costs, Plan(16, tuple(placements))).by_rank(16)
    # a search counts whole bytes, of each shard and of each most popular row
    rounding = 2 * 7
    loads = problem.find_loads(costs_of_ranks)
    assert state.loads == pytest.approx(loads, rel=1e-9, abs=rounding)
    assert state.loads[:, :2] == pytest.approx(loads[:, :2], rel=1e-9), "seconds"


def test_parts_of_a_table_add_up(cluster: Platform) -> None:
    batch = 16384
    placements = {
        "whole": Placement("table_wise", (3,)),
        "columns": Placement("column_wise", (0, 5, 9, 12)),
        "rows": over_all("row_wise", 16),
        "copies": over_all("data_parallel", 16),
        "node": Placement("table_row_wise", tuple(range(8, 16))),
        "uneven": Placement("column_wise", (1, 2), (96, 32)),
    }
    tables = [EmbeddingTable(1_000_000, 128, 20.0, name=name) for name in placements]
    workload = TableSet(tables, batch=batch, embedding="fused")
    problem = set_up(workload, cluster, 16, None, "iteration", "local")
    prices = price_placements(problem.costs, Plan(16, tuple(placements.values())))
    costs = {}
    for name, of_table in zip(placements, prices.by_table(len(placements), 16), strict=True):
        costs[name] = dict(zip(COLUMNS, of_table.tolist(), strict=True))

    weights = 1e6 * 128 * 4
    for name in ("whole", "columns", "uneven", "rows", "node"):
        assert costs[name]["weights"] == pytest.approx(weights, rel=1e-3), name
    assert costs["copies"]["weights"] == costs["copies"]["averaged"] == 16 * weights

    index = 8  # bytes
    inputs = batch * (20 + 1) * index  # 20 lookups and an offset for each sample
    assert costs["whole"]["inputs"] == inputs
    assert costs["copies"]["inputs"] == inputs, "each rank reads those of its samples"
    assert costs["columns"]["inputs"] == 4 * inputs, "every part reads all indices"
    # each rank reads its own lookups and all offsets
    assert costs["rows"]["inputs"] == pytest.approx(batch * (20 + 16) * index, rel=1e-6)

    outputs = batch * 128 * 4
    for name in ("whole", "columns", "node", "uneven"):
        assert costs[name]["pooled"] == outputs, name
    for name in ("rows", "copies"):
        assert costs[name]["pooled"] == 0, name
    assert costs["node"]["partial"] == 8 * outputs
    # partial sums of the batch on every rank
    assert costs["rows"]["outputs"] == costs["rows"]["summed"] == 16 * outputs

    # more kernels, but each part has a cache of its own
    assert costs["columns"]["lookup"] > 0.95 * costs["whole"]["lookup"]
    assert costs["whole"]["lookup"] > 0.9 * costs["copies"]["lookup"] - 16e-5


@pytest.mark.parametrize(
    ("optimizer", "numbers"), [("sgd", 0), ("rowwise_adagrad", 1 / 64), ("adam", 2)]
)
def test_optimizer_state_takes_memory_and_time(optimizer: str, numbers: float) -> None:
    tables = TableSet([EmbeddingTable(10_000, 64, 5.0)], batch=1024, optimizer=optimizer)
    price = price_plan(tables, "zen5-2", Plan(2, (1,)))
    state = price.costs[:, Cost.STATE]
    assert state.tolist() == [0, pytest.approx(numbers * 10_000 * 64 * 4)]
    of_output = 1024 * 64 * 4
    of_lookups = 1024 * 5 * (64 * 4 + 8)  # a row and its index
    assert price.costs[1, Cost.GRADIENTS] == of_output + of_lookups
    plain = price_plan(replace(tables, optimizer="sgd"), "zen5-2", Plan(2, (1,)))
    if optimizer == "sgd":
        assert price.costs[1, Cost.UPDATE] == plain.costs[1, Cost.UPDATE]
    else:
        assert price.costs[1, Cost.UPDATE] > plain.costs[1, Cost.UPDATE]


@pytest.mark.filterwarnings("ignore")
def test_tables_take_no_scales_that_transformers_gave() -> None:
    a100 = load_platform("a100-sxm-8")
    without_scales = replace(a100, context=replace(a100.context, kernels={}))
    plan = Plan.round_robin(len(TABLES), ranks=8)
    price = price_plan(TABLES, a100, plan)
    assert (price.costs == price_plan(TABLES, without_scales, plan).costs).all()


@pytest.mark.parametrize(("platform", "ranks"), [("a100-sxm-8", 4), ("zen5-2", 2)])
@pytest.mark.parametrize("way", [{}, {"sparse": False}, {"embedding": "fused"}], ids=str)
def test_the_order_of_tables_does_not_change_the_price_of_a_plan(
    platform: str, ranks: int, way: dict[str, Any]
) -> None:
    tables = draw_tables(9, seed=0)
    by_rows = over_all("row_wise", ranks)
    copied = over_all("data_parallel", ranks)
    owners: list[int | Placement] = [number % ranks for number in range(5)]
    owners += [by_rows, copied, by_rows, copied]

    def price(order: list[int]) -> float:
        ordered = TableSet([tables[number] for number in order], batch=4096, **way)
        plan = Plan(ranks, [owners[number] for number in order])
        return price_plan(ordered, platform, plan).time

    time = price([0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert price([1, 2, 3, 4, 5, 6, 7, 8, 0]) == pytest.approx(time, rel=1e-9)
    assert price([7, 3, 5, 1, 0, 2, 8, 6, 4]) == pytest.approx(time, rel=1e-9)


# The search.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("objective", "forbid"),
    [("iteration", ()), ("iteration", ("data_parallel", "row_wise")), ("additive", ())],
)
def test_the_best_of_all_plans_is_found_and_not_below_the_bound(
    seed: int, objective: str, forbid: tuple[str, ...]
) -> None:
    tables = TableSet(draw_tables(3, seed=seed), batch=131072, embedding="fused")
    alone = price_plan(tables, "h100-sxm-8", place_all(3, 0, ranks=2))
    capacity = 0.7 * float(alone.memory.max()) + alone.reserved  # not all on one rank

    problem = set_up(tables, "h100-sxm-8", 2, capacity, objective, "local")
    constraints = read_constraints("abc", 2, forbid=forbid, min_columns=4)
    options = list_candidates(replace(problem, constraints=constraints))
    placements: list[list[Placement]] = [[] for _ in tables]
    for table, kind, shards in zip(options.unit, options.kind, options.shards, strict=True):
        for ranks in permutations(range(2), int(shards)):
            placements[table].append(Placement(str(kind), ranks))
    times = []
    for owners in product(*placements):
        price = price_checked_plan(problem, Plan(2, owners))
        if price.fits:
            times.append(price.time)
    least = min(times)

    settings = {"memory": capacity, "objective": objective, "forbid": forbid, "min_columns": 4}
    result = find(tables, ranks=2, steps=2500, seed=seed, **settings)
    assert result.bound <= least * (1 + 1e-9)
    assert least * (1 - 1e-9) <= result.prediction.time < least * 1.01


@pytest.mark.parametrize(
    ("ranks", "objective", "gap"), [(8, "additive", 0.002), (16, "iteration", 0.01)]
)
def test_searches_come_near_their_bound(
    cluster: Platform, ranks: int, objective: str, gap: float
) -> None:
    tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    settings = {"objective": objective, "min_columns": 1, "split_small": True}
    result = find(tables, cluster, ranks=ranks, steps=2500, **settings)
    assert 0 <= result.gap < gap
    assert result.compare()["method"].to_list() == ["search", *BASELINES]
    for price in (result.prediction, *result.baselines.values()):
        if price is not None:
            assert sum(price.parts.values()) == pytest.approx(price.time, rel=1e-9)
    assert result.compare()["ratio"].min() == 1.0
    assert result.compare()["gap"][0] == pytest.approx(result.gap)


def test_ranks_of_a_start_exchange_the_same_bytes() -> None:
    """Tables of 16 to 128 columns send whole multiples of 16 columns: all ranks together send a
    multiple of that for each, the next one below the base, or up to the one above."""
    ranks, batch = 8, 8192
    tables = TableSet(draw_tables(60, seed=1), batch=batch, embedding="fused")
    problem = set_up(tables, "h100-sxm-8", ranks, None, "iteration", "local")
    names = [str(number) for number in range(60)]
    problem = replace(problem, constraints=read_constraints(names, ranks))
    candidates = list_candidates(problem)
    task = State(problem, candidates)
    whole = candidates.first_of_unit
    grain = 16 * 4 * batch

    def count_grains(chosen: Any) -> float:
        sent = candidates.total_load[chosen, Resource.POOLED].sum()
        return float(sent) / grain

    relaxed = bound.list_choices(bound.relax(problem, candidates))
    for base in (whole, *relaxed[:3]):
        sent = count_grains(base)
        fewer = count_grains(starts._fill_exchange(task, base, full=False))
        assert fewer % ranks == 0 and sent - ranks < fewer <= sent
        # copies of tables that send too much stay
        more = count_grains(starts._fill_exchange(task, base, full=True))
        assert sent <= more <= np.ceil(sent / ranks) * ranks


def shake_last_bits(patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Change the last bit of what a search computes, as another processor may."""
    price_exactly = costs.price

    def shake(values: Any) -> Any:
        values = np.asarray(values, dtype=float)
        return values * (1 + 2.3e-16 * rng.integers(-1, 2, values.shape))

    def price(*args: Any, **kwargs: Any) -> Any:
        prices = price_exactly(*args, **kwargs)
        return [replace(price, seconds=shake(price.seconds)) for price in prices]

    def shake_and_steady(values: Any) -> Any:
        return steady(shake(values))

    patch.setattr(costs, "price", price)
    for module in (costs, prices, setup, planner, starts, state):
        patch.setattr(module, "steady", shake_and_steady)


@pytest.mark.parametrize(("ranks", "kind"), [(4, "iteration"), (8, "additive"), (32, "iteration")])
def test_a_search_goes_the_same_way_on_every_processor(
    ranks: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices, powers and products of matrices differ in their last bits, as they do between
    processors."""
    copies = []
    for number, table in enumerate(TABLES.tables[:20]):
        copies.append(replace(table, name=f"copy {number}"))
    tables = TableSet([*TABLES.tables, *copies], batch=16384, embedding="fused")
    settings = {"ranks": ranks, "objective": kind, "steps": 700}
    here = find(tables, "h100-sxm-8x8", **settings)
    for seed in range(2):
        with monkeypatch.context() as patch:
            shake_last_bits(patch, np.random.default_rng(seed))
            there = find(tables, "h100-sxm-8x8", **settings)
        assert there.plan == here.plan
        assert there.work == here.work
        assert there.prediction.time == pytest.approx(here.prediction.time, rel=1e-9)
        assert there.bound == pytest.approx(here.bound, rel=1e-9)
        for name, price in here.baselines.items():
            assert price is None or there.baselines[name].plan == price.plan  # type: ignore[union-attr]


def test_messages_may_be_so_short_that_all_take_the_same_time() -> None:
    about = {
        "bottom": [240],
        "top": [308],
        "exponent": 0.5,
        "embedding": "exact",
        "optimizer": "adagrad",
    }
    model = DLRM(rows=7748, dim=32, pooling=20, features=357, batch=656, **about)
    found = find(model, "h100-sxm-8x8", ranks=16, steps=10)
    assert 0 < found.bound <= found.prediction.time


def test_steps_bound_a_search_in_place_of_seconds() -> None:
    few = find(steps=100)
    many = find(steps=2000)
    assert many.prediction.time < few.prediction.time
    assert many.work > 5 * few.work
    assert find(steps=100, seconds=1e-6).plan == few.plan


def test_a_plan_keeps_to_the_memory_where_most_rules_of_thumb_find_no_room() -> None:
    tables = TableSet(draw_tables(60, seed=2), batch=4096, embedding="fused")
    alone = price_plan(tables, "h100-sxm-8", place_all(60, 0, ranks=8))
    needed = float(alone.memory.max())
    tight = find(tables, memory=1.12 * needed / 8, steps=2500)
    assert tight.prediction.fits
    assert tight.prediction.memory.max() <= tight.prediction.capacity
    assert None in tight.baselines.values()
    assert "finds no room" in tight.explain()


@pytest.mark.parametrize(
    ("forbid", "kinds"),
    [
        (("column_wise",), {"row_wise", "table_row_wise", "table_column_wise"}),
        (("column_wise", "row_wise", "table_column_wise"), {"table_row_wise"}),
    ],
)
def test_a_table_that_fits_on_no_rank_is_split(
    forbid: tuple[str, ...], kinds: set[str], cluster: Platform
) -> None:
    big = EmbeddingTable(30_000_000, 128, 5.0, name="big")
    tables = TableSet([big, *draw_tables(20, seed=3)], batch=8192, embedding="fused")
    result = find(tables, cluster, ranks=16, memory=6e9, forbid=forbid)
    assert result.prediction.fits
    split = result.plan.placements[0]
    assert split.kind in kinds
    if split.kind != "row_wise":
        assert len({rank // 8 for rank in split.ranks}) == 1, "inside a node"


def test_progress_is_told_and_ctrl_c_keeps_the_best_plan() -> None:
    told: list[tuple[float, float]] = []
    full = find(apart=[(0, 1, 2)], progress=lambda done, time: told.append((done, time)))
    # loads stay true through all changes
    assert told[-1] == (1.0, pytest.approx(full.prediction.time, rel=1e-6))
    times = [time for _, time in told]
    assert times == sorted(times, reverse=True)

    def interrupt(done: float, time: float) -> None:
        if done > 0.1:
            raise KeyboardInterrupt

    part = find(progress=interrupt)
    assert part.interrupted
    assert not full.interrupted
    assert part.work < full.work
    assert part.prediction.fits
    assert "interrupted: the best plan so far" in part.explain()


class Terminal(io.StringIO):
    """An error stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_a_line_shows_the_bound_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfkit.sharding.progress._DELAY", 0.0)
    for stream, progress in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        result = find(progress=progress)
        last = stream.getvalue().split("\r")[-1]
        shown = describe(result.prediction.time, result.bound)
        if isinstance(stream, Terminal) and progress:
            assert last.startswith(f"{shown}, ") and f"({result.gap:.2%})" in shown
        else:
            assert not last
    with pytest.raises(ValueError, match="progress is 1; it must be True or False or a function"):
        find(progress=1)


@pytest.mark.parametrize(
    ("count", "seed", "seconds"),
    [(10, 362493, 0.05), (6, 2, 1e-4), (20, 3, 1e-4), (8, 17, 0.02)],
)
@pytest.mark.parametrize(
    "way", [{}, {"sparse": False, "optimizer": "adam"}, {"embedding": "fused"}], ids=str
)
def test_no_rule_of_thumb_is_better_than_a_search(
    count: int, seed: int, seconds: float, way: dict[str, Any]
) -> None:
    tables = TableSet(draw_tables(count, seed=seed), batch=4096, **way)
    result = shard(tables, "a100-sxm-8", ranks=4, seconds=seconds)
    again = price_plan(tables, "a100-sxm-8", result.plan)
    assert again.time == result.prediction.time
    assert (again.costs == result.prediction.costs).all()
    baselines = [price.time for price in result.baselines.values() if price]
    assert result.prediction.time <= min(baselines)
    assert result.gap >= 0


# Constraints and errors.


@pytest.mark.filterwarnings("ignore")
def test_plans_give_a_host_that_sets_the_pace_no_more_calls() -> None:
    """Copies and splits by rows have calls around their messages, however many tables they are
    of."""
    model = DLRM("dlrm-mlperf", batch=16384, embedding="fused")
    result = find(model)
    first = pk.predict(model, "h100-sxm-8", ranks=8, plan=result.plan)
    assert first.bottleneck == "host-bound"
    baselines = [price for price in result.baselines.values() if price]
    assert baselines
    for price in baselines:
        other = pk.predict(model, "h100-sxm-8", ranks=8, plan=price.plan)
        assert first.time <= other.time * (1 + 1e-6)
    for plan in (result.plan, place_all(26, over_all("data_parallel", 8), ranks=8)):
        price = price_plan(model, "h100-sxm-8", plan, memory=1e12)
        predicted = pk.predict(model, "h100-sxm-8", ranks=8, plan=plan)
        assert price.time == pytest.approx(predicted.time, rel=0.03)


def test_constraints_are_kept() -> None:
    result = find(
        pin={3: 5, "table 4": 5},
        together=[(10, 11, 12), (12, "table 13")],
        apart=[(3, 20), tuple(range(21, 29))],
        forbid={7: "data_parallel", 8: ("column_wise", "row_wise")},
    )
    at = result.plan.placements
    assert at[3] == at[4] == Placement("table_wise", (5,))
    assert at[10] == at[11] == at[12] == at[13]
    assert at[10].kind == "table_wise"
    assert not set(at[3].ranks) & set(at[20].ranks)
    held = list_ranks(result.plan, range(21, 29))
    assert len(held) == len(set(held))
    assert at[7].kind != "data_parallel"
    assert at[8].kind not in ("column_wise", "row_wise")
    for price in result.baselines.values():
        assert price is None or price.plan.placements[3] == at[3]


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("objective", ["iteration", "additive"])
@pytest.mark.parametrize("seed", range(4))
def test_few_large_tables_are_kept_apart(seed: int, objective: str, ranks: int) -> None:
    """Each alone would be cut over all ranks, or copied."""
    rng = np.random.default_rng([seed, ranks])
    tables = []
    for _ in range(int(rng.integers(2, 6))):
        rows = int(rng.integers(10**5, 2 * 10**6))
        tables.append(EmbeddingTable(rows, 128, float(rng.uniform(1, 60))))
    workload = TableSet(tables, batch=4096, embedding="separate")
    apart = tuple(range(min(len(tables), 3)))
    settings = {"ranks": ranks, "steps": 150, "objective": objective}
    result = shard(workload, "h100-sxm-8x2", apart=[apart], **settings)
    held = list_ranks(result.plan, apart)
    assert len(held) == len({*held})


def test_tables_that_no_kind_keeps_apart_are_refused() -> None:
    """Three tables over the rows of a node each, on two nodes."""
    table = EmbeddingTable(10**6, 64, 20.0)
    tables = TableSet([table, table, table], batch=4096)
    others = [kind for kind in KINDS if kind != "table_row_wise"]
    with pytest.raises(InfeasibleError, match="apart: no placement was found that keeps all"):
        shard(tables, "h100-sxm-8x2", ranks=16, steps=50, apart=[(0, 1, 2)], forbid=others)


def test_a_search_takes_all_ranks_of_the_platform() -> None:
    tables = TableSet([EmbeddingTable(10**6, 64, 20.0)] * 3, batch=4096)
    whole = shard(tables, "h100-sxm-8", steps=20)
    assert whole.plan == shard(tables, "h100-sxm-8", ranks=8, steps=20).plan
    assert whole.plan.ranks == 8


ODD = TableSet([EmbeddingTable(10_000, 17, 2.0)], batch=64)
#: What is asked for, and what the error says; ".*" stands for anything.
BAD = [
    (
        {"tables": [{"rows": 1000, "dim": 8}]},
        "it must be a DLRM or a TableSet; perfkit.read_tables makes one of frames, lists of dicts",
    ),
    (
        {"ranks": 16},
        "ranks is 16; platform 'h100-sxm-8' has 8; take at most 8, or 2 nodes: .* --platform h100-sxm-8x2",
    ),
    (
        {"tables": TableSet([EmbeddingTable(10, 16)], batch=96), "ranks": 12},
        "ranks is 12; platform 'h100-sxm-8' has 8; take fewer",
    ),
    ({"ranks": 3}, "batch is 16384; it must divide by the 3 ranks"),
    ({"objective": "cost"}, "objective is 'cost'; known are iteration, additive"),
    ({"inputs": "remote"}, "inputs is 'remote'; known are local, exchanged"),
    ({"memory": -1}, "memory is -1"),
    (
        {"pin": {40: 0}},
        "table of pin is 40; it must be a whole number of 0 or more, at most 39",
    ),
    ({"pin": {"tabel 4": 0}}, "table of pin is 'tabel 4'; did you mean 'table 4'? known are .*"),
    (
        {"pin": {0: 8}},
        "rank of 'table 0' is 8; it must be a whole number of 0 or more, at most 7",
    ),
    ({"together": [0, 1]}, "together has 0; it must be groups of at least two tables"),
    ({"forbid": 3}, "forbidden kind is 3; known are"),
]
INFEASIBLE = [
    (
        {"pin": {0: 1, 2: 3}, "together": [(0, 2)]},
        "pin puts 'table 2' on rank 3 and a table that must share",
    ),
    (
        {"together": [(0, 1), (1, 2)], "apart": [(0, 2)]},
        "'table 0' and 'table 2' must be apart, but together or pin",
    ),
    (
        {"pin": {0: 1, 2: 1}, "apart": [(0, 2)]},
        "must be apart, but together or pin puts them on one rank",
    ),
    ({"apart": [tuple(range(9))]}, "9 tables must be apart on 8 ranks"),
    (
        {"forbid": KINDS},
        "no kind is left for 'table 0': constraints rule out some of .*, and the others do not fit",
    ),
    (
        {"pin": {4: 0}, "forbid": {4: "table_wise"}},
        "no kind is left for 'table 4': constraints rule out some",
    ),
    (
        {"memory": 80},
        "memory: nothing is left for tables; of the 80 B of a rank, .*; give more bytes",
    ),
    ({"memory": 1e8}, "memory: .* on one rank; of the 100 MB of a rank, .* ranks would do"),
    (
        {"memory": 2e8},
        "memory: all tables together need .* 8 ranks hold .* ranks would do; the largest are",
    ),
    (
        {"memory": 1.5e9, "pin": dict.fromkeys(range(36), 2)},
        "memory: no placement was found that fits; .* constraints",
    ),
    (
        {"tables": ODD, "forbid": ("table_wise", "data_parallel", "row_wise")},
        "no kind is left for 'table 0'",
    ),
]


def as_pattern(message: str) -> str:
    """A regular expression in which only ".*" has a meaning."""
    return ".*".join(map(re.escape, message.split(".*")))


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_input_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=as_pattern(message)):
        find(**settings)


@pytest.mark.parametrize(("settings", "message"), INFEASIBLE)
def test_what_cannot_be_placed_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InfeasibleError, match=as_pattern(message)):
        find(**settings)


def test_the_ranks_that_would_do_do() -> None:
    tables = TableSet(draw_tables(40, seed=5), batch=1024, embedding="fused")
    settings = {"memory": 1e9, "min_columns": 1}
    with pytest.raises(InfeasibleError, match="memory: all tables together") as found:
        find(tables, ranks=2, **settings)
    ranks = int(re.search(r"(\d+) ranks would do", str(found.value))[1])  # type: ignore[index]
    assert ranks in (4, 8), "as many as machines have"
    assert find(replace(tables, batch=ranks * 512), ranks=ranks, **settings).prediction.fits


def place_first(owner: Placement, ranks: int) -> Plan:
    """The first of the tables has an owner, the others are on one rank."""
    others = [0 for _ in range(len(TABLES) - 1)]
    return Plan(ranks, (owner, *others))


@pytest.mark.parametrize(
    ("platform", "plan", "message"),
    [
        ("h100-sxm-8", place_all(39, 0, ranks=8), "plan places 39 tables; there are 40"),
        (
            "h100-sxm-8",
            place_all(40, 0, ranks=16),
            "ranks is 16; platform 'h100-sxm-8' has 8",
        ),
        (
            "h100-sxm-8",
            place_first(Placement("table_row_wise", (0, 1)), ranks=8),
            "(0, 1); it must be on ranks of one node, and",
        ),
        (
            "zen5-2",
            place_first(Placement("column_wise", (0, 1), (3, 4)), ranks=2),
            "have 7 columns together; the table",
        ),
        (
            "h100-sxm-8x8",
            place_first(Placement("table_column_wise", (7, 8)), ranks=16),
            "(7, 8); it must be on ranks of one node",
        ),
    ],
)
def test_plans_that_cannot_be_priced_are_refused(platform: str, plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        price_plan(TABLES, platform, plan)


def without_collective(platform: Platform, operation: str) -> Platform:
    """A platform that was never measured with one collective."""
    others = {}
    for name, fit in platform.collectives.items():
        if not name.startswith(operation):
            others[name] = fit
    return replace(platform, collectives=others)


def test_kinds_without_a_model_of_their_messages_are_left_out() -> None:
    platform = load_platform("h100-sxm-8")
    bare = without_collective(platform, "reduce_scatter")
    with pytest.warns(
        UserWarning, match="row_wise was not tried: .* collective 'reduce_scatter'"
    ) as caught:
        result = find(TABLES, bare)
    assert caught[0].filename == __file__  # the line that asks
    [warning] = result.warnings
    assert warning in " ".join(result.explain().split())
    assert not {p.kind for p in result.plan.placements} & {"row_wise", "table_row_wise"}
    with pytest.raises(ValueError, match="has no model of its messages; take one of"):
        price_plan(TABLES, bare, place_first(over_all("row_wise", 8), ranks=8))
    with pytest.raises(ValueError, match="all_to_all"):
        find(TABLES, replace(platform, collectives={}))


def test_a_result_explains_itself() -> None:
    result = find()
    time = format_interval(result.prediction.time, *result.prediction.interval())
    assert repr(result).startswith(f"ShardingResult({time}, 40 tables on 8 ranks of h100-sxm-8; ")
    assert "PlanPrice(" in repr(result.prediction)
    text = result.explain()
    assert "times as long" in text
    assert text in html.unescape(result._repr_html_())
    assert result.table()["memory_bytes"].sum() == pytest.approx(result.prediction.memory.sum())


# Bounds, laws, and memory that does not suffice.

LARGE = TableSet(
    [EmbeddingTable(10**8, 32, name=f"t{number}") for number in range(8)],
    batch=32768,
    embedding="fused",
)


def test_the_bound_of_a_balanced_plan_is_its_price() -> None:
    """Eight alike tables, split by rows inside four nodes: nothing is left to gain."""
    forbid = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_column_wise")
    result = shard(LARGE, "h100-sxm-8x4", ranks=32, forbid=forbid, steps=100)
    assert {placement.kind for placement in result.plan.placements} == {"table_row_wise"}
    assert 0 <= result.gap < 1e-5
    assert f"nothing better than {format_time(result.bound)} exists within these limits" in repr(
        result
    )
    assert "search longer" not in repr(result)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_that_can_be_priced_is_below_the_bound(seed: int) -> None:
    check_bound(np.random.default_rng([seed, 9]))


class Untried(NamedTuple):
    """Equal tables with a placement that no search tries."""

    table: EmbeddingTable
    batch: int
    owner: Placement
    ranks: int
    count: int = 1
    objective: str = "iteration"


@pytest.mark.parametrize(
    "case",
    [
        # copies whose gradients are larger than four times the pooled rows
        Untried(EmbeddingTable(1023, 16, 20.0), 4, over_all("data_parallel", 2), ranks=2),
        # columns that do not halve to multiples of four
        Untried(
            EmbeddingTable(9645, 100, 4.5),
            4096,
            over_all("column_wise", 2),
            ranks=2,
            objective="additive",
        ),
        Untried(
            EmbeddingTable(10**6, 6, 2.0),
            3,
            over_all("column_wise", 3),
            ranks=3,
            objective="additive",
        ),
        # tables too small to be worth a split
        Untried(EmbeddingTable(64, 4, 1.0), 8, over_all("row_wise", 8), ranks=8, count=60),
    ],
)
def test_the_bound_holds_for_plans_that_no_search_tries(case: Untried) -> None:
    workload = TableSet([case.table for _ in range(case.count)], batch=case.batch)
    settings = {"objective": case.objective, "steps": 20, "min_columns": 1}
    result = find(workload, ranks=case.ranks, **settings)
    plan = place_all(case.count, case.owner, case.ranks)
    price = price_plan(workload, "h100-sxm-8", plan, objective=case.objective)
    assert result.bound <= price.time


def test_a_curve_that_falls_with_size_bounds_by_its_later_part() -> None:
    curve = problem.Curve(np.array([1.0, 10.0, 20.0, 40.0]), np.array([1.0, 5.0, 2.0, 4.0]))
    assert curve.never_falling().seconds.tolist() == [1.0, 2.0, 2.0, 4.0]
    assert curve.slope_below(15.0) == pytest.approx(3.5 / 15)
    assert curve.slope_below(40.0) == pytest.approx(0.1)


@pytest.mark.parametrize("platform", ["h100-sxm-8x8", "b200-sxm-8"])
def test_the_bound_is_the_least_time_of_tables_that_can_be_divided(platform: str) -> None:
    """Tables that differ in rows alone, whole or copied: those with the fewest rows are copied. So all
    choices that may be the best are tried, one by one."""
    count, ranks = 500, load_platform(platform).network.ranks
    rows = np.geomspace(100, 100_000, count).round().astype(int).tolist()
    drawn = [EmbeddingTable(number, 64, 10.0, exponent=0.0) for number in rows]
    tables = TableSet(drawn, batch=65536, embedding="fused")
    task = set_up(tables, platform, ranks, None, "iteration", "local")
    names = [str(number) for number in range(count)]
    forbid = {*KINDS} - {"table_wise", "data_parallel"}
    task = replace(task, constraints=read_constraints(names, ranks, forbid=forbid))
    floors = list_floors(task)
    whole = floors.average[floors.kind == "table_wise"]
    copied = floors.average[floors.kind == "data_parallel"]
    nothing = np.zeros((1, whole.shape[1]))
    of_copied = np.concatenate([nothing, np.cumsum(copied, axis=0)])
    of_whole = whole.sum(axis=0) - np.concatenate([nothing, np.cumsum(whole, axis=0)])
    loads = of_copied + of_whole
    # each rank exchanges the rows of whole tables, of 64 columns
    rows = 64 * 4 * 65536
    loads[:, Resource.POOLED] = np.ceil(loads[:, Resource.POOLED] / rows - 1e-9) * rows
    times = task.time(loads)
    assert 0 < np.argmin(times) < count
    found = bound.find_lower_bound(task, floors)
    assert times.min() * (1 - 2e-4) < found.time <= times.min()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
def test_forbidding_what_is_unused_and_the_order_of_tables_change_nothing(seed: int) -> None:
    check_laws(np.random.default_rng([seed, 8]))


@pytest.mark.parametrize(
    ("count", "rows", "columns"), [(2, 10**9, 128), (6, 150_000_000, 128), (6, 10**7, 64)]
)
def test_large_tables_keep_their_plan_if_an_unused_kind_is_forbidden(
    count: int, rows: int, columns: int
) -> None:
    tables = TableSet(
        [EmbeddingTable(rows, columns, name=f"t{number}") for number in range(count)],
        batch=32768,
        embedding="fused",
    )
    settings: dict[str, Any] = {"ranks": 32, "steps": 100}
    result = find(tables, "h100-sxm-8x4", **settings)
    used = {placement.kind for placement in result.plan.placements}
    for kind in set(KINDS) - used:
        other = find(tables, "h100-sxm-8x4", **settings, forbid=kind)
        assert other.plan == result.plan, kind
        assert other.prediction.time == result.prediction.time, kind
    kind = max(used)
    with_less = find(tables, "h100-sxm-8x4", **settings, forbid=kind)
    assert kind not in {placement.kind for placement in with_less.plan.placements}
    again = find(tables, "h100-sxm-8x4", **settings, forbid={0: kind})
    assert again.plan.placements[0].kind != kind


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize("name", ["h100-sxm-8", "a100-sxm-8"])
@pytest.mark.parametrize("embedding", ["separate", "fused"])
@pytest.mark.parametrize("batch", [1024, 65536])
def test_a_plan_is_as_uncertain_as_its_prediction(name: str, embedding: str, batch: int) -> None:
    model = DLRM(
        rows=[1000, 30_000, 1_000_000, 3_000_000, 10_000, 200_000, 500, 2_000_000],
        dim=128,
        pooling=[4, 30, 10, 1, 20, 8, 16, 2],
        batch=batch,
        embedding=embedding,
    )
    copied = over_all("data_parallel", 8)
    plans = [
        Plan.round_robin(8, ranks=8),
        place_all(8, 0, ranks=8),
        Plan(8, (copied, 1, 2, 3, copied, 5, copied, 7)),
    ]
    for plan in plans:
        predicted = pk.predict(model, name, ranks=8, plan=plan)
        spread = price_plan(model, name, plan).spread
        assert spread == pytest.approx(predicted.spread, rel=0.08), plan


WHOLE = Plan.round_robin(8, ranks=8)
COPIED = place_all(8, over_all("data_parallel", 8), ranks=8)


@pytest.mark.parametrize(
    ("embedding", "plan", "kernel", "runs"),
    [
        ("separate", WHOLE, "embedding_forward._embedding_bag", True),
        ("separate", WHOLE, "embedding_forward", False),
        ("separate", WHOLE, "embedding_backward.sparse", True),
        ("separate", COPIED, "embedding_backward.sparse", False),
        ("fused", WHOLE, "embedding_forward", True),
        ("fused", WHOLE, "embedding_forward._embedding_bag", False),
    ],
)
def test_the_uncertainty_of_a_plan_is_that_of_the_kernels_that_run(
    embedding: str, plan: Plan, kernel: str, runs: bool
) -> None:
    platform = load_platform("h100-sxm-8")
    tables = TableSet(draw_tables(8, seed=0), batch=65536, embedding=embedding)

    def find_spread(spread: float) -> float:
        """Spread of the plan where the fit of the kernel has this spread."""
        fit = replace(platform.kernels[kernel], spread=spread)
        changed = replace(platform, kernels={**platform.kernels, kernel: fit})
        return price_plan(tables, changed, plan).spread

    if runs:
        assert find_spread(0.1) < find_spread(0.9)
    else:
        assert find_spread(0.1) == find_spread(0.9)


def draw_plan(rng: np.random.Generator, tables: int, ranks: int) -> Plan:
    """A plan of whole tables, evenly or on few ranks, or with some that are split or copied."""
    few = int(rng.integers(1, ranks + 1))
    kinds = ["table_wise"]
    if rng.random() >= 0.5:
        kinds += ["column_wise", "row_wise"]
    owners: list[int | Placement] = []
    for kind in rng.choice(kinds, size=tables):
        if kind == "table_wise":
            owners.append(int(rng.integers(few)))
        else:
            owners.append(over_all(str(kind), ranks))
    return Plan(ranks, tuple(owners))


@pytest.mark.parametrize("embedding", ["fused", "separate"])
def test_the_uncertainty_of_whole_tables_is_known_with_their_price(embedding: str) -> None:
    """Tables are priced once for both, and in another order than where their uncertainty is asked for
    first."""
    tables = replace(TABLES, embedding=embedding)
    both = [set_up(tables, "h100-sxm-8", 8, None, "additive", "local").costs for _ in range(2)]
    both[0].shards(np.arange(len(tables.tables)), "table_wise")
    priced, asked = [of.find_uncertainties(copied=False) for of in both]
    for cost, uncertainty in asked.items():
        assert priced[cost].spread == pytest.approx(uncertainty.spread, rel=1e-12)
        assert priced[cost].is_assumed == uncertainty.is_assumed


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize("seed", range(20))
def test_a_price_differs_from_a_prediction_by_copies_of_the_host_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = int(rng.choice([3, 8, 26]))
    ranks = int(rng.choice([4, 8, 16]))
    name = "h100-sxm-8x8" if ranks > 8 else str(rng.choice(["h100-sxm-8", "v100-sxm-8"]))
    rows = [int(10 ** rng.uniform(3, 6)) for _ in range(tables)]
    pooling = [float(rng.integers(1, 60)) for _ in range(tables)]
    batch = int(rng.choice([1024, 8192, 65536]))
    embedding = str(rng.choice(["fused", "separate", "exact"]))
    model = DLRM(rows=rows, dim=64, pooling=pooling, batch=batch, embedding=embedding)
    plan = draw_plan(rng, tables, ranks)
    price = price_plan(model, name, plan)
    predicted = pk.predict(model, name, ranks=ranks, plan=plan).time

    def issue(senders: int) -> float:
        """Host time of a rank that holds no table, where so many others send pooled rows."""
        spread = Plan(ranks, tuple(table % senders for table in range(tables)))
        graph = model.graphs(ranks, spread, accelerator=True)[-1]
        return float(price._problem.costs.issue(graph).sum())

    copy = issue(2) - issue(1)
    senders = count_senders(plan)
    copies = copy * abs(senders - min(tables, ranks))
    by_rows = any(placement.kind == "row_wise" for placement in plan.placements)
    rest = 0.06 if by_rows else 0.02
    assert abs(price.time - predicted) <= rest * predicted + copies


@pytest.mark.filterwarnings("ignore")
def test_a_price_of_many_ranks_counts_a_copy_of_the_host_for_each_table() -> None:
    """The rule in the notes of `price_plan`, where most ranks of a plan send nothing."""
    model = DLRM(rows=[100_000] * 64, dim=64, pooling=1, batch=1024, embedding="fused")
    plan = Plan(32, tuple(table % 8 for table in range(64)))
    price = price_plan(model, "h100-sxm-8x4", plan)
    predicted = pk.predict(model, "h100-sxm-8x4", ranks=32, plan=plan)
    assert predicted.bottleneck == "host-bound"
    copy = 19.7e-6
    assert price.time - predicted.time == pytest.approx((32 - 8) * copy, rel=0.05)


def count_senders(plan: Plan) -> int:
    """How many ranks send pooled rows of whole tables, columns or sums inside nodes."""
    senders: set[int] = set()
    for placement in plan.placements:
        if placement.traits.reduction in (None, Reduction.SUMS_INSIDE_NODES):
            senders.update(placement.ranks)
    return len(senders)


@pytest.mark.parametrize("seed", range(12))
def test_forbidding_raises_the_bound_and_gains_no_more_than_the_gap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.choice([3, 6, 12]))
    ranks = int(rng.choice([2, 4, 8]))
    embedding = str(rng.choice(["fused", "separate"]))
    tables = TableSet(draw_tables(count, seed=seed), batch=8192, embedding=embedding)
    free = shard(tables, "h100-sxm-8", ranks=ranks, steps=150)
    for number in (1, 3):
        kinds = [str(kind) for kind in rng.choice(KINDS, size=number, replace=False)]
        forbidden: Any = dict.fromkeys(range(0, count, 2), kinds) if seed % 2 else kinds
        try:
            held = shard(tables, "h100-sxm-8", ranks=ranks, steps=150, forbid=forbidden)
        except planner.InfeasibleError:
            continue
        assert held.bound >= free.bound * (1 - 1e-12)
        assert free.prediction.time <= held.prediction.time * (1 + free.gap) * (1 + 1e-12)


def test_a_search_with_forbidden_kinds_counts_its_work_and_can_be_interrupted() -> None:
    told: list[float] = []
    plain = find(min_columns=4)
    kinds = {placement.kind for placement in plain.plan.placements}
    settings = {"forbid": kinds - {"table_wise"}, "min_columns": 4}
    result = find(progress=lambda done, time: told.append(done), **settings)
    assert result.work > plain.work, "the search without forbid goes first"
    assert told == sorted(told)
    assert told[-1] == 1.0

    def interrupt(done: float, time: float) -> None:
        raise KeyboardInterrupt

    part = find(progress=interrupt, **settings)
    assert part.interrupted
    assert not {placement.kind for placement in part.plan.placements} & (kinds - {"table_wise"})


@pytest.mark.parametrize("ranks", [8, 32])
def test_kinds_that_are_left_out_are_named_and_nothing_else(ranks: int) -> None:
    platform = load_platform("h100-sxm-8x4" if ranks == 32 else "h100-sxm-8")
    assert find(TABLES, platform, ranks=ranks, steps=10).warnings == ()
    bare = without_collective(platform, "reduce_scatter")
    with pytest.warns(UserWarning, match="was not tried"):
        result = find(TABLES, bare, ranks=ranks, steps=10)
    named = [text.split(" was not tried: ")[0] for text in result.warnings]
    # an all_reduce across nodes is made of reduce_scatter and all_gather
    expected = ["row_wise", "table_row_wise", "data_parallel"] if ranks == 32 else ["row_wise"]
    assert named == expected
    for text in result.warnings:
        assert "reduce_scatter" in text


@pytest.mark.parametrize("rows", [[8, 5000, 10**7], [8, 4, 5]])
def test_the_first_table_may_have_fewer_rows_than_there_are_ranks(rows: list[int]) -> None:
    """Rows over 16 ranks are not tried with such a table, and the order of tables tells nothing."""
    times = []
    for in_order in (rows, rows[::-1]):
        model = DLRM(rows=in_order, dim=64, pooling=3, batch=1024, bottom=(13, 64), top=(64, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            times.append(find(model, "h100-sxm-8x2", ranks=16, steps=10).prediction.time)
    assert times[0] == pytest.approx(times[1])


def test_charts_of_a_plan_and_of_its_parts_name_and_colour_messages_alike() -> None:
    """Two tables on one rank each, a copied one, and one that is split by rows."""
    tables = TableSet([EmbeddingTable(10_000, 128, 5.0) for _ in range(4)], batch=4096)
    by_rows = Placement("row_wise", (0, 1))
    copied = Placement("data_parallel", (0, 1))
    price = price_plan(tables, "h100-sxm-8", Plan.from_owners([0, 1, copied, by_rows], ranks=2))
    spec = price.chart().to_dict()
    scale = spec["hconcat"][0]["layer"][0]["encoding"]["color"]["scale"]
    of_ranks = dict(zip(scale["domain"], scale["range"], strict=True))
    rows = [{"phase": "", "kind": part, "time_s": s} for part, s in price.parts.items()]
    scale = breakdown_bars(rows).to_dict()["encoding"]["color"]["scale"]
    of_parts = dict(zip(scale["domain"], scale["range"], strict=True))
    messages = {"exchange of pooled rows", "partial sums", "gradients of copies"}
    assert messages <= set(of_ranks)
    for message in messages:
        assert of_ranks[message] == of_parts[message]
    bars = spec["datasets"][spec["hconcat"][0]["layer"][0]["data"]["name"]]
    for message in messages:
        of_rank_0 = [bar["value"] for bar in bars if (bar["rank"], bar["part"]) == (0, message)]
        assert of_rank_0 == [pytest.approx(price.parts[message])]


def test_memory_that_everything_else_fills_is_said_and_never_negative() -> None:
    tables = TableSet((EmbeddingTable(1000, 64),), batch=2**20)
    price = price_plan(tables, "h100-sxm-8", Plan(2, (0,)), memory=1e6)
    assert not price.fits
    assert price.capacity == 0
    text = "does not fit: everything else alone takes 268 MB of the 1 MB of a rank"
    assert text in repr(price)
    assert price.table()["memory_share"].to_list() == [None, None]
    price.chart()
    healthy = price_plan(tables, "h100-sxm-8", Plan(2, (0,)), memory=1e10)
    assert healthy.fits
    assert "everything else alone" not in repr(healthy)
    assert 0 < healthy.table()["memory_share"][0] < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_no_number_of_a_price_is_negative_for_tables_of_any_size(seed: int) -> None:
    try:
        check_sizes(np.random.default_rng([seed, 7]))
    except ValueError as error:
        assert "it cannot be split by rows" in str(error)


def test_a_row_that_gets_all_lookups_may_be_in_a_split_table() -> None:
    hottest = EmbeddingTable(1000, 64, 4.0, law=Zipf(1000, 1.05, heavy_hitters=(1.0,)))
    tables = TableSet((hottest,), batch=1024)
    price = price_plan(tables, "h100-sxm-8", Plan(8, (over_all("row_wise", 8),)))
    assert price.time > 0


def test_where_the_memory_of_a_rank_comes_from_is_said() -> None:
    text = find(steps=10).explain()
    assert "a rank of the platform has 80 GB" in text
    assert "batch 16,384 (2,048 a rank); " in text
    assert "a rank of the platform" not in find(steps=10, memory=5e10).explain()


def test_the_names_of_the_ranks_do_not_change_the_price_of_a_plan() -> None:
    """Shards of rows are on the ranks that the plan names, so the most popular row moves too."""
    tables = TableSet(draw_tables(12, seed=3), batch=4096, embedding="fused")
    rng = np.random.default_rng(0)
    names = rng.permutation(8).tolist()

    def price(ranks: list[int], owners: list[int]) -> Any:
        split = Placement("row_wise", tuple(ranks))
        placed = [ranks[owner] if number % 3 else split for number, owner in enumerate(owners)]
        return price_plan(tables, "h100-sxm-8", Plan(8, tuple(placed)))

    owners = rng.integers(0, 8, 12).tolist()
    first = price(list(range(8)), owners)
    second = price(names, owners)
    assert second.time == pytest.approx(first.time, rel=1e-12)
    assert second.loads[names] == pytest.approx(first.loads, rel=1e-12)


def test_a_search_starts_from_one_kind_for_all_tables() -> None:
    problem = set_up(TABLES, "h100-sxm-8", 8, None, "iteration", "local")
    constraints = read_constraints([table.name for table in TABLES], 8)
    options = list_candidates(replace(problem, constraints=constraints))
    taken = options.choose_kinds(np.full(len(TABLES), "data_parallel"))
    assert (options.unit[taken] == np.arange(len(TABLES))).all()
    assert set(options.kind[taken]) == {"data_parallel", "table_wise"}


def test_a_short_search_is_no_worse_than_equally_many_tables_on_each_rank() -> None:
    """The host launches kernels for each table and sets the time."""
    tables = TableSet(draw_tables(40, seed=28), batch=256)
    result = shard(tables, "v100-sxm-8", ranks=8, seconds=0.02)
    even = price_plan(tables, "v100-sxm-8", Plan.round_robin(40, ranks=8))
    assert result.prediction.time <= even.time * (1 + 1e-9)


# Plans that people would run.


@pytest.mark.parametrize(
    ("columns", "least", "most"), [(64, 128, 1), (255, 128, 1), (256, 128, 2), (512, 96, 4)]
)
def test_shards_have_at_least_the_columns_that_they_must(
    columns: int, least: int, most: int
) -> None:
    """A table of fewer than twice the width is not split by columns at all."""
    tables = TableSet([EmbeddingTable(10**6, columns, 50.0)], batch=65536, embedding="fused")
    by_rows = ("row_wise", "data_parallel")
    result = find(tables, steps=50, min_columns=least, forbid=by_rows)
    [placement] = result.plan.placements
    assert len(placement.ranks) == most
    assert result.gap >= 0
    # a bound of wider shards is none of narrower ones
    assert find(tables, steps=50, min_columns=1, forbid=by_rows).bound < result.bound


def test_shards_of_each_table_may_have_their_own_least_columns() -> None:
    few, many = EmbeddingTable(10**6, 128, 1.0, name="a"), EmbeddingTable(10**6, 128, 60.0)
    tables = [few, replace(many, name="b"), replace(many, name="c")]
    workload = TableSet(tables, batch=65536, embedding="fused")
    kinds = {number: ("row_wise", "data_parallel") for number in range(3)}
    kinds[1] += ("table_wise",)
    kinds[2] += ("table_wise",)
    result = find(workload, steps=50, min_columns={"b": 64, 2: 32}, forbid=kinds)
    placements = result.plan.placements
    assert [len(placement.ranks) for placement in placements[:2]] == [1, 2]
    assert 2 <= len(placements[2].ranks) <= 4
    with pytest.raises(ValueError, match="table of min_columns is 'd'; known are a, b, c"):
        find(workload, min_columns={"d": 64})
    with pytest.raises(ValueError, match="min_columns of 'b' is 0; it must be a whole number"):
        find(workload, min_columns={"b": 0})


def test_a_plan_of_narrow_shards_has_a_price_that_says_so() -> None:
    plan = place_first(Placement("column_wise", (0, 1)), ranks=8)
    columns = TABLES.tables[0].dim // 2
    text = f"a shard of 'table 0' has {columns} columns, fewer than min_columns, 128"
    price = price_plan(TABLES, "h100-sxm-8", plan)
    assert price.warnings == (text,)
    assert text in repr(price)
    wide = price_plan(TABLES, "h100-sxm-8", plan, min_columns=columns)
    assert wide.warnings == ()
    assert wide.time == price.time
    # what is not split is as wide as it is
    assert not price_plan(TABLES, "h100-sxm-8", place_all(40, 0, ranks=8)).warnings


def test_tables_that_only_narrow_shards_would_hold_are_refused_with_the_next_step() -> None:
    kinds = ("table_wise", "data_parallel", "row_wise")
    with pytest.raises(InfeasibleError, match="allow another kind, or fewer than 128 min_columns"):
        find(forbid=kinds)
