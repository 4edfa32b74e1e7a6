"""Prices of plans against the predictor, the search against all plans of small cases, bounds, constraints, errors."""

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.gallery import load_platform
from perfkit.platform import Platform
from perfkit.sharding import baselines, board, pricing
from perfkit.sharding import objective as objectives
from perfkit.sharding import problem as problems
from perfkit.sharding.baselines import BASELINES
from perfkit.sharding.board import Board, Rules
from perfkit.sharding.constraints import InfeasibleError
from perfkit.sharding.options import list_options, price_placement
from perfkit.sharding.planner import price_plan, shard
from perfkit.sharding.pricing import COLUMNS, MEMORY, RESOURCES, Curve, column, project
from perfkit.sharding.problem import Problem, set_up
from perfkit.sharding.result import ShardingResult
from perfkit.units import steady
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import KINDS, Placement, Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables

TABLES = TableSet(draw_tables(40, seed=5), batch=16384, embedding="fused")
QUICK: dict[str, Any] = {"steps": 400}


@pytest.fixture(scope="module")
def cluster() -> Platform:
    return load_platform("h100-sxm-8").with_nodes(2)


# Prices.

WAYS = ({"embedding": "separate"}, {"embedding": "fused"}, {"sparse": False})


@pytest.mark.parametrize(
    ("name", "ranks", "batch"), [("zen5-2", 2, 2048), ("h100-sxm-8", 8, 2048), ("h100-sxm-8", 4, 65536)]
)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_plans_of_whole_tables_cost_what_is_predicted(name: str, ranks: int, batch: int, way: dict[str, Any]) -> None:
    rng, errors = np.random.default_rng(7), []
    for _ in range(4):
        n = int(rng.integers(6, 30))
        model = DLRM(
            rows=np.round(10 ** rng.uniform(3, 6, n)).astype(int).tolist(), dim=int(rng.choice([16, 64, 128])),
            pooling=rng.integers(1, 30, n).tolist(), exponent=rng.uniform(0, 1.2, n).round(2).tolist(), batch=batch,
            bottom=[512, 256], top=[512, 256], features=13, **way,
        )  # fmt: skip
        plan = Plan.from_owners(rng.integers(0, ranks, n).tolist(), ranks=ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors.append(price_plan(model, name, plan).time / pk.predict(model, name, ranks=ranks, plan=plan).time - 1)
    assert np.abs(errors).max() < 0.05, errors
    assert np.abs(errors).mean() < 0.025, errors


def costs_of(problem: Problem, *placements: Placement) -> np.ndarray:
    every = [*placements, *[Placement("table_wise", (0,))] * (len(problem.rates.workload.tables) - len(placements))]
    return np.array([option.total(problem.rates.ranks) for option in price_placement(problem.rates, every)])[
        : len(placements)
    ]


@pytest.mark.parametrize("kind", ["column_wise", "row_wise", "data_parallel", "table_row_wise"])
@pytest.mark.parametrize("way", [{"embedding": "separate", "optimizer": "sgd"}, {"fused": True}])
def test_plans_with_splits_cost_what_is_predicted(kind: str, way: dict[str, Any], cluster: Platform) -> None:
    """Large tables are split, small ones copied; 16 ranks are two nodes of the cluster."""
    model, ranks = DLRM("dlrm-dcnv2", batch=16384, **way), 16
    spans = {"column_wise": (3, 11), "table_row_wise": tuple(range(8, 16))}
    owners: list[int | Placement] = [number % ranks for number in range(len(model.tables))]
    for number, table in enumerate(model.tables):
        if table.rows < 10_000 if kind == "data_parallel" else table.rows > 1_000_000:
            owners[number] = Placement(kind, spans.get(kind, tuple(range(ranks))))
    plan = Plan.from_owners(owners, ranks=ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predicted = pk.predict(model, cluster, ranks=ranks, plan=plan)
        assert price_plan(model, cluster, plan).time == pytest.approx(predicted.time, rel=0.05)


def test_parts_of_a_table_add_up(cluster: Platform) -> None:
    table = EmbeddingTable(1_000_000, 128, 20.0)
    problem = set_up(
        TableSet([replace(table, name=str(i)) for i in range(6)], batch=16384, embedding="fused"), cluster, 16
    )
    every = tuple(range(16))
    kinds = {
        "whole": Placement("table_wise", (3,)), "columns": Placement("column_wise", (0, 5, 9, 12)),
        "rows": Placement("row_wise", every), "copies": Placement("data_parallel", every),
        "node": Placement("table_row_wise", tuple(range(8, 16))), "uneven": Placement("column_wise", (1, 2), (96, 32)),
    }  # fmt: skip
    found = dict(zip(kinds, costs_of(problem, *kinds.values()), strict=True))
    weights, outputs, batch = 1e6 * 128 * 4, 16384 * 128 * 4, 16384

    def get(kind: str, name: str) -> float:
        return float(found[kind][column(name)])

    for kind in ("whole", "columns", "uneven", "rows", "node"):
        assert get(kind, "weights") == pytest.approx(weights, rel=1e-3), kind
    assert get("copies", "weights") == 16 * weights
    assert get("whole", "inputs") == 8 * batch * 21
    assert get("columns", "inputs") == 4 * get("whole", "inputs"), "every part reads all indices"
    assert get("rows", "inputs") == pytest.approx(8 * batch * (20 + 16), rel=1e-6), (
        "each reads its own, and all offsets"
    )
    assert get("copies", "inputs") == get("whole", "inputs"), "each reads those of its samples"
    for kind in ("whole", "columns", "uneven"):
        assert get(kind, "pooled") == outputs
    assert get("rows", "pooled") == get("copies", "pooled") == 0
    assert (get("node", "pooled"), get("node", "partial")) == (outputs, 8 * outputs)
    assert get("rows", "outputs") == 16 * outputs, "partial sums of the whole batch on every rank"
    assert get("columns", "lookup") > get("whole", "lookup") > 0.9 * get("copies", "lookup") - 16e-5
    assert price_placement(problem.rates, [kinds["rows"]] * 6)[0].rows == outputs
    assert price_placement(problem.rates, [kinds["copies"]] * 6)[0].gradients == weights


def test_rows_are_shared_unevenly_if_one_is_popular() -> None:
    tables = [EmbeddingTable(100_000, 64, 20.0, s, name=str(s)) for s in (0.0, 1.2)]
    problem = set_up(TableSet(tables, batch=65536, embedding="fused"), "h100-sxm-8", 8)
    even, skewed = price_placement(problem.rates, [Placement("row_wise", tuple(range(8)))] * 2)
    assert even.hot[column("lookup")] < 0.01 * even.everywhere[column("lookup")]
    assert skewed.hot[column("indices")] > skewed.everywhere[column("indices")], "a fifth of the lookups go to one row"


@pytest.mark.parametrize(
    ("optimizer", "numbers"), [("sgd", 0), ("rowwise_adagrad", 1 / 64), ("adagrad", 1), ("adam", 2)]
)
def test_optimizer_state_takes_memory_and_time(optimizer: str, numbers: float) -> None:
    tables = TableSet([EmbeddingTable(10_000, 64, 5.0)], batch=1024, optimizer=optimizer)
    price = price_plan(tables, "zen5-2", Plan(2, (1,)))
    at = {name: price.costs[:, column(name)] for name in (*MEMORY, "update")}
    assert at["state"].tolist() == [0, pytest.approx(numbers * 10_000 * 64 * 4)]
    assert at["gradients"][1] == 1024 * 64 * 4 + 1024 * 5 * (64 * 4 + 8), "of the output, and a row for every lookup"
    plain = price_plan(replace(tables, optimizer="sgd"), "zen5-2", Plan(2, (1,))).costs[1, column("update")]
    assert at["update"][1] == plain if optimizer == "sgd" else at["update"][1] > plain


def test_a_price_sums_to_its_time_and_shows_its_ranks(cluster: Platform) -> None:
    result = shard(TABLES, cluster, ranks=16, **QUICK)
    for price in (result.prediction, *result.baselines.values()):
        assert price is not None
        assert sum(price.parts.values()) == pytest.approx(price.time, rel=1e-9)
        assert price.fits and price.loads.max() < price.time
        low, high = price.interval(0.8)
        assert low < price.time < high
    frame = result.prediction.table()
    assert len(frame) == 16 and frame["weights_bytes"].sum() >= TABLES.nbytes
    assert re.fullmatch(r"PlanPrice\(.*s \(.*–.*\), memory .* of .*; .*% of the time\)", repr(result.prediction))
    with pytest.raises(ValueError, match="level is 1"):
        result.prediction.interval(1.0)


def test_exchanged_indices_cost_time() -> None:
    plan = Plan.round_robin(40, ranks=8)
    local, exchanged = (price_plan(TABLES, "h100-sxm-8", plan, inputs=inputs) for inputs in ("local", "exchanged"))
    assert exchanged.time > local.time and "exchange of indices" in exchanged.parts
    assert exchanged.messages["indices"] == max(
        sum(8 * 16384 * (t.pooling + 1) for t in TABLES.tables[rank::8]) for rank in range(8)
    )


def test_a_slow_host_limits_many_small_kernels() -> None:
    tables = TableSet(draw_tables(64, seed=1), batch=1024, embedding="separate")
    even, uneven = (price_plan(tables, "h100-sxm-8", Plan(8, owners)) for owners in (
        tuple(i % 8 for i in range(64)), tuple(min(i % 12, 7) for i in range(64)),
    ))  # fmt: skip
    assert even.parts["host"] > 0.5 * even.time and even.bottleneck.startswith("host")
    assert uneven.time > 1.5 * even.time


def test_curves_never_lie_above_their_tangents() -> None:
    nbytes = np.geomspace(64, 1e9, 200)
    curve = Curve(nbytes, (2e-5**0.6 + (nbytes / 1e11) ** 0.6) ** (1 / 0.6))
    start, slope = curve.line_below(1e5, 1e8)
    inside = nbytes[(nbytes >= 1e5) & (nbytes <= 1e8)]
    assert (start + slope * inside <= curve(inside) * (1 + 1e-9)).all()
    assert (curve.slope_below(1e8) * nbytes[nbytes < 1e8] <= curve(nbytes[nbytes < 1e8]) * (1 + 1e-9)).all()
    assert curve(0.0) == 0 and curve(np.array([0.0, 64.0])).tolist() == [0.0, curve.seconds[0]]
    assert float(curve.shift(1e6)(1e6)) == pytest.approx(float(curve(2e6) - curve(1e6)), rel=1e-3)
    assert set(COLUMNS) >= {part for parts in RESOURCES.values() for part in parts}
    assert project(np.eye(len(COLUMNS))).sum(axis=1).tolist() == [1.0] * len(COLUMNS), "every cost is one resource"


# The search.


def every_time(problem: Problem, board: Board) -> list[float]:
    """Times of all plans of a small case that fit."""
    ranks, found = problem.rates.ranks, []
    ways = [
        [(o, at) for o, option in enumerate(own)
         for at in (itertools.permutations(range(ranks), len(option.shards)) if option.shards else [()])]
        for own in board.options
    ]  # fmt: skip
    for pick in itertools.product(*ways):
        board.clear()
        for table, (option, at) in enumerate(pick):
            board.put(table, option, np.array(at, dtype=int))
        if board.overflow == 0:
            found.append(board.time())
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("objective", "forbid"), [("iteration", ()), ("iteration", ("data_parallel", "row_wise")), ("additive", ())]
)
def test_the_best_of_all_plans_is_found_and_not_below_the_bound(
    seed: int, objective: str, forbid: tuple[str, ...]
) -> None:
    tables = TableSet(draw_tables(5, seed=seed), batch=131072, embedding="fused")
    alone = price_plan(tables, "h100-sxm-8", Plan(2, (0,) * 5))
    capacity = 0.7 * float(alone.memory.max()) + alone.reserved  # not all on one rank
    problem = set_up(tables, "h100-sxm-8", 2, memory=capacity, objective=objective)
    options = list_options(
        problem.rates,
        lambda t, k: k in problem.kinds and k not in forbid,
        problem.capacity,
        additive=objective == "additive",
    )
    board = Board(problem.objective, options, Rules(2, 2, problem.capacity, {}))
    times = every_time(problem, board)
    result = shard(
        tables, "h100-sxm-8", ranks=2, memory=capacity, objective=objective, steps=2500, seed=seed, forbid=forbid
    )
    assert result.bound <= min(times) * (1 + 1e-9)
    assert min(times) * (1 - 1e-9) <= result.prediction.time < min(times) * 1.01


@pytest.mark.parametrize(
    ("ranks", "objective", "gap"), [(8, "additive", 0.002), (8, "iteration", 0.03), (16, "iteration", 0.06)]
)
def test_searches_come_near_their_bound(cluster: Platform, ranks: int, objective: str, gap: float) -> None:
    tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    result = shard(tables, cluster, ranks=ranks, objective=objective, steps=2500)
    assert 0 <= result.gap < gap
    worth = result.compare()
    assert worth["method"].to_list() == ["search", *BASELINES]
    assert worth["ratio"].min() == 1.0 and worth["gap"][0] == pytest.approx(result.gap)


def test_one_huge_table_is_split() -> None:
    huge = EmbeddingTable(40_000_000, 128, 64.0, 0.6, name="huge")
    tables = TableSet((huge, *draw_tables(26, seed=0)[1:]), batch=65536, embedding="fused")
    whole = shard(tables, "h100-sxm-8", ranks=8, forbid=[k for k in KINDS if k != "table_wise"], steps=800)
    split = shard(tables, "h100-sxm-8", ranks=8, steps=2500)
    assert whole.plan.is_table_wise and whole.plan.owners.count(whole.plan.owners[0]) == 1, "alone on its rank"
    assert whole.prediction.time > 1.5 * split.prediction.time
    assert split.plan.placements[0].kind != "table_wise"


def test_the_same_seed_gives_the_same_plan() -> None:
    one, other, third = (shard(TABLES, "h100-sxm-8", ranks=8, seed=seed, **QUICK) for seed in (1, 1, 2))
    assert one.plan == other.plan and one.prediction.time == other.prediction.time and one.work == other.work
    assert third.plan != one.plan


@pytest.mark.parametrize(("ranks", "objective"), [(4, "iteration"), (8, "additive"), (32, "iteration")])
def test_a_search_goes_the_same_way_on_every_processor(
    ranks: int, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices, powers and products of matrices differ in their last bits, as they do between processors."""
    alike = [replace(table, name=f"copy {number}") for number, table in enumerate(TABLES.tables[:20])]
    tables = TableSet([*TABLES.tables, *alike], batch=16384, embedding="fused")

    def find() -> ShardingResult:
        return shard(tables, "h100-sxm-8x8", ranks=ranks, objective=objective, steps=1500)

    here, price = find(), pricing.price
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def noise(values: Any, rng: np.random.Generator = rng) -> Any:
            values = np.asarray(values, dtype=float)
            return values * (1 + 2.3e-16 * rng.integers(-1, 2, values.shape))

        def shaken(*args: Any, noise: Callable[[Any], Any] = noise, **kwargs: Any) -> Any:
            found = price(*args, **kwargs)
            return replace(found, seconds=noise(found.seconds))

        with monkeypatch.context() as other:
            other.setattr(pricing, "price", shaken)
            for module in (pricing, board, objectives, problems, baselines):
                other.setattr(module, "steady", lambda values, noise=noise: steady(noise(values)))
            there = find()
        assert there.plan == here.plan and there.work == here.work
        assert there.prediction.time == pytest.approx(here.prediction.time, rel=1e-9)
        assert there.bound == pytest.approx(here.bound, rel=1e-9)
        names = [name for name, found in here.baselines.items() if found]
        assert [there.baselines[name].plan for name in names] == [here.baselines[name].plan for name in names]


def test_steps_bound_a_search_in_place_of_seconds() -> None:
    few, many = (shard(TABLES, "h100-sxm-8", ranks=8, steps=steps) for steps in (100, 5000))
    assert many.prediction.time < few.prediction.time and many.work > 5 * few.work
    assert shard(TABLES, "h100-sxm-8", ranks=8, steps=100, seconds=1e-6).plan == few.plan


def test_memory_is_kept() -> None:
    tables = TableSet(draw_tables(60, seed=2), batch=4096, embedding="fused")
    needed = float(price_plan(tables, "h100-sxm-8", Plan(8, (0,) * 60)).memory.max())
    tight = shard(tables, "h100-sxm-8", ranks=8, memory=1.12 * needed / 8, steps=2500)
    assert tight.prediction.fits
    assert tight.prediction.memory.max() <= tight.prediction.capacity
    assert any(price is None for price in tight.baselines.values()), "most rules of thumb find no room"
    assert "finds no room" in tight.explain()


def test_a_single_rank_holds_everything() -> None:
    result = shard(TABLES, "h100-sxm-8", ranks=1, **QUICK)
    assert result.plan == Plan(1, (0,) * 40) and result.gap == pytest.approx(0)


def test_rows_of_tables_that_fit_nowhere_are_split(cluster: Platform) -> None:
    big = [EmbeddingTable(30_000_000, 128, 5.0, name="big"), *draw_tables(20, seed=3)]
    result = shard(
        TableSet(big, batch=8192, embedding="fused"), cluster, ranks=16, memory=6e9, forbid="column_wise", **QUICK
    )
    assert result.plan.placements[0].kind in ("row_wise", "table_row_wise", "table_column_wise")
    assert result.prediction.fits
    only = shard(TableSet(big, batch=8192, embedding="fused"), cluster, ranks=16, memory=6e9,
                 forbid=("column_wise", "row_wise", "table_column_wise"), **QUICK)  # fmt: skip
    placement = only.plan.placements[0]
    assert placement.kind == "table_row_wise" and len({rank // 8 for rank in placement.ranks}) == 1
    again = price_plan(TableSet(big, batch=8192, embedding="fused"), cluster, only.plan, memory=6e9)
    assert again.time == pytest.approx(only.prediction.time, rel=1e-3)


def test_progress_is_told_and_ctrl_c_keeps_the_best_plan() -> None:
    told: list[tuple[float, float]] = []
    full = shard(TABLES, "h100-sxm-8", ranks=8, progress=lambda done, time: told.append((done, time)), **QUICK)
    assert told[-1][0] == 1.0 and told[-1][1] == pytest.approx(full.prediction.time)
    assert all(later <= earlier for (_, earlier), (_, later) in itertools.pairwise(told))

    def interrupt(done: float, time: float) -> None:
        if done > 0.1:
            raise KeyboardInterrupt

    part = shard(TABLES, "h100-sxm-8", ranks=8, progress=interrupt, **QUICK)
    assert part.interrupted and not full.interrupted and part.work < full.work
    assert part.prediction.fits and "interrupted: the best plan so far" in part.explain()


def test_the_loads_of_a_board_stay_true() -> None:
    """After hundreds of changes, what ranks carry is what the plan says they carry."""
    result = shard(TABLES, "h100-sxm-8", ranks=8, apart=[(0, 1, 2)], **QUICK)
    again = price_plan(TABLES, "h100-sxm-8", result.plan)
    assert again.time == pytest.approx(result.prediction.time, rel=1e-3)
    assert again.costs == pytest.approx(result.prediction.costs, rel=1e-2, abs=1e-7)


# Constraints.


def test_constraints_are_kept() -> None:
    result = shard(
        TABLES, "h100-sxm-8", ranks=8, pin={3: 5, "table 4": 5}, together=[(10, 11, 12), (12, "table 13")],
        apart=[(3, 20), (21, 22, 23, 24, 25, 26, 27, 28)],
        forbid={7: "data_parallel", 8: ("column_wise", "row_wise")}, **QUICK,
    )  # fmt: skip
    at = result.plan.placements
    assert at[3] == at[4] == Placement("table_wise", (5,))
    assert len({at[t] for t in (10, 11, 12, 13)}) == 1 and at[10].kind == "table_wise"
    assert not set(at[3].ranks) & set(at[20].ranks)
    held = [rank for t in range(21, 29) for rank in at[t].ranks]
    assert len(held) == len(set(held))
    assert at[7].kind != "data_parallel" and at[8].kind not in ("column_wise", "row_wise")
    for price in result.baselines.values():
        assert price is None or price.plan.placements[3] == at[3]


def test_forbidding_everything_but_one_kind() -> None:
    for kind in ("column_wise", "row_wise"):
        result = shard(TABLES, "h100-sxm-8", ranks=4, forbid=[k for k in KINDS if k != kind], **QUICK)
        assert {p.kind for p in result.plan.placements} == {kind}
    assert result.baselines["lookup"] is not None


DLRM26 = DLRM("dlrm-mlperf", batch=2048)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workload": 3}, "workload is 3; it must be a DLRM or a TableSet"),
    ({"workload": pk.Transformer.bert()}, "it must be a DLRM or a TableSet"),
    ({"ranks": 0}, "ranks is 0"),
    ({"ranks": 16}, "ranks is 16; platform 'h100-sxm-8' has 8"),
    ({"ranks": 3}, "batch is 16384; it must divide by the 3 ranks"),
    ({"platform": "h100"}, "h100"),
    ({"objective": "cost"}, "objective is 'cost'; known are iteration, additive"),
    ({"inputs": "remote"}, "inputs is 'remote'; known are local, exchanged"),
    ({"memory": -1}, "memory is -1"),
    ({"memory": float("nan")}, "memory is nan"),
    ({"seconds": 0}, "seconds is 0"),
    ({"steps": 0}, "steps is 0"),
    ({"steps": 1.5}, "steps is 1.5"),
    ({"seed": -1}, "seed is -1"),
    ({"pin": {40: 0}}, "pin names table 40; tables go from 0 to 39"),
    ({"pin": {"tabel 4": 0}}, "table of pin is 'tabel 4'; known are .* did you mean 'table 4'"),
    ({"pin": {0: 8}}, "pin puts 'table 0' on rank 8; ranks go from 0 to 7"),
    ({"pin": [0]}, "pin is [0]; it must map tables to ranks"),
    ({"together": [0, 1]}, "together has 0; each group must hold at least two tables"),
    ({"together": 5}, "together is 5; it must be a list of groups"),
    ({"apart": [(1,)]}, "apart has a group of 1 table"),
    ({"forbid": "diagonal"}, "forbidden kind is 'diagonal'; known are"),
    ({"forbid": 3}, "forbid is 3; it must be kinds"),
]
INFEASIBLE: list[tuple[dict[str, Any], str]] = [
    ({"pin": {0: 1, 2: 3}, "together": [(0, 2)]}, "pin puts tables that lie together on different ranks"),
    ({"together": [(0, 1), (1, 2)], "apart": [(0, 2)]}, "'table 0' and 'table 2' must lie together and apart"),
    ({"pin": {0: 1, 2: 1}, "apart": [(0, 2)]}, "must lie apart and are both pinned to rank 1"),
    ({"apart": [tuple(range(9))]}, "9 tables must lie apart on 8 ranks; take 9 ranks"),
    ({"forbid": KINDS}, "no kind is left for 'table 0'"),
    ({"pin": {4: 0}, "forbid": {4: "table_wise"}}, "no kind is left for 'table 4': what is pinned"),
    ({"memory": 1e7}, "memory: nothing is left for tables"),
    ({"memory": 80}, "memory: nothing is left for tables, of the 80 B of a rank, .*; memory is in bytes"),
    ({"memory": 1e8}, "memory: .* on one rank; of the 100 MB of a rank, .* ranks would do"),
    ({"memory": 2e8}, "memory: all tables together need .* 8 ranks hold .* ranks would do; the largest are"),
    ({"memory": 1.5e9, "pin": dict.fromkeys(range(36), 2)}, "are pinned to rank 2 and need .* pin fewer there"),
    ({"workload": TableSet([EmbeddingTable(10_000, 17, 2.0)], batch=64),
      "forbid": ("table_wise", "data_parallel", "row_wise")},
     "no kind is left for 'table 0': of table_wise, .* does not suit its shape"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), REFUSED + INFEASIBLE, ids=lambda v: v[:50] if isinstance(v, str) else ""
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"workload": TABLES, "platform": "h100-sxm-8", "ranks": 8, **QUICK, **change}
    kind = InfeasibleError if (change, message) in INFEASIBLE else ValueError
    with pytest.raises(kind, match=".*".join(map(re.escape, message.split(".*")))):
        shard(settings.pop("workload"), settings.pop("platform"), **settings)


def test_the_ranks_that_would_do_do() -> None:
    tables = TableSet(draw_tables(40, seed=5), batch=1024, embedding="fused")
    with pytest.raises(InfeasibleError, match="memory: all tables together") as found:
        shard(tables, "h100-sxm-8", ranks=2, memory=1e9)
    ranks = int(re.search(r"(\d+) ranks would do", str(found.value))[1])  # type: ignore[index]
    assert 2 < ranks <= 8
    assert shard(replace(tables, batch=ranks * 512), "h100-sxm-8", ranks=ranks, memory=1e9, **QUICK).prediction.fits


PLANS: list[tuple[Callable[[], object], str]] = [
    (lambda: price_plan(TABLES, "h100-sxm-8", [0] * 40), "it must be a Plan"),  # type: ignore[arg-type]
    (lambda: price_plan(TABLES, "h100-sxm-8", Plan(8, (0,) * 39)), "plan places 39 tables; there are 40"),
    (lambda: price_plan(TABLES, "h100-sxm-8", Plan(16, (0,) * 40)), "ranks is 16; platform 'h100-sxm-8' has 8"),
    (lambda: price_plan(TABLES, "h100-sxm-8", Plan(8, (Placement("table_row_wise", (0, 1)), *(0,) * 39))),
     "table 0 is table_row_wise on (0, 1); name all 8 ranks of a node"),
    (lambda: price_plan(TABLES, "zen5-2", Plan(2, (Placement("column_wise", (0, 1), (3, 4)), *(0,) * 39))),
     "have 7 columns together; the table"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), PLANS, ids=lambda v: v[:50] if isinstance(v, str) else "")
def test_plans_that_cannot_be_priced(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_kinds_without_a_model_of_their_messages_are_left_out() -> None:
    platform = load_platform("h100-sxm-8")
    bare = replace(
        platform, collectives={k: f for k, f in platform.collectives.items() if not k.startswith("reduce_scatter")}
    )
    result = shard(TABLES, bare, ranks=8, **QUICK)
    assert not {p.kind for p in result.plan.placements} & {"row_wise", "table_row_wise"}
    with pytest.raises(ValueError, match="has no model of the messages that row_wise needs"):
        price_plan(TABLES, bare, Plan(8, (Placement("row_wise", tuple(range(8))), *(0,) * 39)))
    mute = replace(platform, collectives={})
    with pytest.raises(ValueError, match="all_to_all"):
        shard(TABLES, mute, ranks=8, **QUICK)


def test_nodes_hold_what_must_lie_in_one(cluster: Platform) -> None:
    plan = Plan(16, (Placement("table_column_wise", (7, 8)), *(0,) * 39))
    with pytest.raises(
        ValueError, match=re.escape("table 0 is table_column_wise on ranks (7, 8), which are not of one node")
    ):
        price_plan(TABLES, cluster, plan)


# Results.


def test_a_result_explains_itself() -> None:
    result = shard(TABLES, "h100-sxm-8", ranks=8, **QUICK)
    assert re.fullmatch(
        r"ShardingResult\(40 tables on 8 ranks of h100-sxm-8: .*s, at most .*% above the best\)", repr(result)
    )
    text = result.explain()
    assert "no plan can take less than" in text and "times as long" in text and "memory of tables" in text
    assert result._repr_html_().startswith("<pre>") and "40 tables" in result._repr_html_()
    frame = result.table()
    assert frame["table"].to_list() == [t.name for t in TABLES.tables]
    assert frame["seconds"].min() > 0 and frame["memory_bytes"].sum() == pytest.approx(result.prediction.memory.sum())
    with pytest.raises(ValueError, match="name is 'best'; known are random"):
        result.place("best")
    assert Plan.from_json(result.plan.to_json()) == result.plan
    assert Plan.from_torchrec(result.plan.to_torchrec(TABLES.tables), TABLES.tables, ranks=8).cut(
        TABLES.tables
    ) == result.plan.cut(TABLES.tables)


def test_more_pooling_makes_worlds_slower() -> None:
    problem = set_up(TABLES, "h100-sxm-8", 8)
    twice = set_up(
        replace(TABLES, tables=tuple(replace(t, pooling=1.2 * t.pooling) for t in TABLES.tables)), "h100-sxm-8", 8
    )
    every = [Placement("table_wise", (0,))] * 40
    one, other = (sum(o.total(8)[: len(COLUMNS)] for o in price_placement(p.rates, every)) for p in (problem, twice))
    assert (other[:4] >= one[:4]).all()
    assert DLRM26.tables[0].pooling == 1
