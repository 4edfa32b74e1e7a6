"""Prices of plans against the predictor, the search against all plans of small cases, bounds,
constraints, errors."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.units import steady
from perfkit.models.distributions import Zipf
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.sharding import bound, costs, planner, problem, search, setup
from perfkit.sharding.candidates import list_candidates
from perfkit.sharding.costs import COLUMNS, MEMORY, Cost
from perfkit.sharding.planner import (
    BASELINES,
    InfeasibleError,
    price_plan,
    read_constraints,
    shard,
)
from perfkit.sharding.result import ShardingResult, price_checked_plan, price_placements
from perfkit.sharding.setup import set_up
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import KINDS, Placement, Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables
from tests.fuzz.entries_sharding import check_bound, check_laws, check_sizes

TABLES = TableSet(draw_tables(40, seed=5), batch=16384, embedding="fused")


def find(tables: Any = TABLES, platform: Any = "h100-sxm-8", **settings: Any) -> ShardingResult:
    return shard(tables, platform, **{"ranks": 8, "steps": 400, **settings})


@pytest.fixture(scope="module")
def cluster() -> Platform:
    return load_platform("h100-sxm-8").with_nodes(2)


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
    rng, errors = np.random.default_rng(7), []
    for _ in range(4):
        n = int(rng.integers(6, 30))
        model = DLRM(
            rows=np.round(10 ** rng.uniform(3, 6, n)).astype(int).tolist(),
            dim=int(rng.choice([16, 64, 128])),
            pooling=rng.integers(1, 30, n).tolist(),
            exponent=rng.uniform(0, 1.2, n).round(2).tolist(),
            batch=batch,
            bottom=[512, 256],
            top=[512, 256],
            features=13,
            **way,
        )
        plan = Plan.from_owners(rng.integers(0, ranks, n).tolist(), ranks=ranks)
        errors.append(
            price_plan(model, name, plan).time
            / pk.predict(model, name, ranks=ranks, plan=plan).time
            - 1
        )
    assert np.abs(errors).max() < 0.05 and np.abs(errors).mean() < 0.025, errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["column_wise", "row_wise", "data_parallel", "table_row_wise"])
@pytest.mark.parametrize("way", [{"embedding": "separate", "optimizer": "sgd"}, {"fused": True}])
def test_plans_with_splits_cost_what_is_predicted(
    kind: str, way: dict[str, Any], cluster: Platform
) -> None:
    """Large tables are split, small ones copied; 16 ranks are two nodes of the cluster."""
    model, spans = (
        DLRM("dlrm-dcnv2", batch=16384, **way),
        {"column_wise": (3, 11), "table_row_wise": range(8, 16)},
    )
    split = Placement(kind, tuple(spans.get(kind, range(16))))
    chosen = [
        t.rows < 10_000 if kind == "data_parallel" else t.rows > 1_000_000 for t in model.tables
    ]
    plan = Plan.from_owners(
        [split if each else number % 16 for number, each in enumerate(chosen)], ranks=16
    )
    predicted = pk.predict(model, cluster, ranks=16, plan=plan)
    assert price_plan(model, cluster, plan).time == pytest.approx(predicted.time, rel=0.05)


def test_parts_of_a_table_add_up(cluster: Platform) -> None:
    tables = [EmbeddingTable(1_000_000, 128, 20.0, name=str(number)) for number in range(6)]
    every, batch = tuple(range(16)), 16384
    kinds = {
        "whole": Placement("table_wise", (3,)),
        "columns": Placement("column_wise", (0, 5, 9, 12)),
        "rows": Placement("row_wise", every),
        "copies": Placement("data_parallel", every),
        "node": Placement("table_row_wise", every[8:]),
        "uneven": Placement("column_wise", (1, 2), (96, 32)),
    }
    problem = set_up(
        TableSet(tables, batch=batch, embedding="fused"), cluster, 16, None, "iteration", "local"
    )
    found = price_placements(problem.costs, Plan(16, tuple(kinds.values()))).by_table(
        len(kinds), 16
    )
    get = {
        kind: dict(zip(COLUMNS, costs.tolist(), strict=True))
        for kind, costs in zip(kinds, found, strict=True)
    }
    weights, outputs, whole = 1e6 * 128 * 4, batch * 128 * 4, get["whole"]
    for kind in ("whole", "columns", "uneven", "rows", "node"):
        assert get[kind]["weights"] == pytest.approx(weights, rel=1e-3), kind
    assert get["copies"]["weights"] == get["copies"]["averaged"] == 16 * weights
    assert whole["inputs"] == 8 * batch * 21 == get["copies"]["inputs"], (
        "each reads those of its samples"
    )
    assert get["columns"]["inputs"] == 4 * whole["inputs"], "every part reads all indices"
    assert get["rows"]["inputs"] == pytest.approx(8 * batch * (20 + 16), rel=1e-6), (
        "each reads its own, all offsets"
    )
    assert [get[kind]["pooled"] / outputs for kind in kinds] == [1, 1, 0, 0, 1, 1]
    assert get["node"]["partial"] == 8 * outputs
    assert get["rows"]["outputs"] == get["rows"]["summed"] == 16 * outputs, (
        "partial sums of the batch on every rank"
    )
    assert get["columns"]["lookup"] > whole["lookup"] > 0.9 * get["copies"]["lookup"] - 16e-5


@pytest.mark.parametrize(
    ("optimizer", "numbers"), [("sgd", 0), ("rowwise_adagrad", 1 / 64), ("adam", 2)]
)
def test_optimizer_state_takes_memory_and_time(optimizer: str, numbers: float) -> None:
    tables = TableSet([EmbeddingTable(10_000, 64, 5.0)], batch=1024, optimizer=optimizer)
    price = price_plan(tables, "zen5-2", Plan(2, (1,)))
    at = {cost.label: price.costs[:, cost] for cost in (*MEMORY, Cost.UPDATE)}
    assert at["state"].tolist() == [0, pytest.approx(numbers * 10_000 * 64 * 4)]
    assert at["gradients"][1] == 1024 * 64 * 4 + 1024 * 5 * (64 * 4 + 8), (
        "of the output, and a row for every lookup"
    )
    plain = price_plan(replace(tables, optimizer="sgd"), "zen5-2", Plan(2, (1,))).costs[
        1, Cost.UPDATE
    ]
    assert at["update"][1] == plain if optimizer == "sgd" else at["update"][1] > plain


@pytest.mark.filterwarnings("ignore")
def test_tables_take_no_scales_that_transformers_gave() -> None:
    a100, plan = (
        load_platform("a100-sxm-8"),
        Plan.from_owners([n % 8 for n in range(len(TABLES))], ranks=8),
    )
    bare = replace(a100, context=replace(a100.context, kernels={}))
    assert (price_plan(TABLES, a100, plan).costs == price_plan(TABLES, bare, plan).costs).all()


@pytest.mark.parametrize("platform", ["a100-sxm-8", "zen5-2"])
@pytest.mark.parametrize("way", [{}, {"sparse": False}, {"embedding": "fused"}], ids=str)
def test_the_order_of_tables_does_not_change_the_price_of_a_plan(
    platform: str, way: dict[str, Any]
) -> None:
    tables, ranks = draw_tables(9, seed=0), 4 if platform == "a100-sxm-8" else 2
    owners = [n % ranks for n in range(5)]
    owners += [Placement(kind, tuple(range(ranks))) for kind in ("row_wise", "data_parallel") * 2]
    times = [
        price_plan(
            TableSet([tables[n] for n in order], batch=4096, **way),
            platform,
            Plan(ranks, [owners[n] for n in order]),
        ).time
        for order in (range(9), [*range(1, 9), 0], [7, 3, 5, 1, 0, 2, 8, 6, 4])
    ]
    assert times == pytest.approx([times[0]] * 3, rel=1e-9)


# The search.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "case", [("iteration", ()), ("iteration", ("data_parallel", "row_wise")), ("additive", ())]
)
def test_the_best_of_all_plans_is_found_and_not_below_the_bound(
    seed: int, case: tuple[str, tuple[str, ...]]
) -> None:
    tables, (kind, forbid) = (
        TableSet(draw_tables(3, seed=seed), batch=131072, embedding="fused"),
        case,
    )
    alone = price_plan(tables, "h100-sxm-8", Plan(2, (0,) * 3))
    capacity = 0.7 * float(alone.memory.max()) + alone.reserved  # not all on one rank
    problem = set_up(tables, "h100-sxm-8", 2, capacity, kind, "local")
    options = list_candidates(
        replace(problem, constraints=read_constraints("abc", 2, forbid=forbid))
    )
    ways: list[list[Placement]] = [[] for _ in tables]
    for table, name, shards in zip(options.unit, options.kind, options.shards, strict=True):
        ways[table] += [Placement(str(name), at) for at in permutations(range(2), int(shards))]
    plans = (price_checked_plan(problem, Plan(2, owners)) for owners in product(*ways))
    least = min(found.time for found in plans if found.fits)
    result = find(
        tables, ranks=2, memory=capacity, objective=kind, steps=2500, seed=seed, forbid=forbid
    )
    assert result.bound <= least * (1 + 1e-9)
    assert least * (1 - 1e-9) <= result.prediction.time < least * 1.01


@pytest.mark.parametrize(
    ("ranks", "objective", "gap"), [(8, "additive", 0.002), (16, "iteration", 0.06)]
)
def test_searches_come_near_their_bound(
    cluster: Platform, ranks: int, objective: str, gap: float
) -> None:
    tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    result = find(tables, cluster, ranks=ranks, objective=objective, steps=2500)
    assert 0 <= result.gap < gap
    assert result.compare()["method"].to_list() == ["search", *BASELINES]
    for price in filter(None, (result.prediction, *result.baselines.values())):
        assert sum(price.parts.values()) == pytest.approx(price.time, rel=1e-9)
    assert result.compare()["ratio"].min() == 1.0 and result.compare()["gap"][0] == pytest.approx(
        result.gap
    )


@pytest.mark.parametrize(("ranks", "kind"), [(4, "iteration"), (8, "additive"), (32, "iteration")])
def test_a_search_goes_the_same_way_on_every_processor(
    ranks: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices, powers and products of matrices differ in their last bits, as they do between
    processors."""
    alike = [
        replace(table, name=f"copy {number}") for number, table in enumerate(TABLES.tables[:20])
    ]
    tables = TableSet([*TABLES.tables, *alike], batch=16384, embedding="fused")
    settings = {"ranks": ranks, "objective": kind, "steps": 700}
    here, seconds_of = find(tables, "h100-sxm-8x8", **settings), costs.price
    for seed in range(2):
        rng = np.random.default_rng(seed)

        def noise(values: Any, rng: np.random.Generator = rng) -> Any:
            values = np.asarray(values, dtype=float)
            return values * (1 + 2.3e-16 * rng.integers(-1, 2, values.shape))

        def shaken(*args: Any, noise: Callable[[Any], Any] = noise, **kwargs: Any) -> Any:
            return [
                replace(found, seconds=noise(found.seconds))
                for found in seconds_of(*args, **kwargs)
            ]

        with monkeypatch.context() as other:
            other.setattr(costs, "price", shaken)
            for module in (costs, bound, setup, planner, search):
                other.setattr(module, "steady", lambda values, noise=noise: steady(noise(values)))
            there = find(tables, "h100-sxm-8x8", **settings)
        assert there.plan == here.plan and there.work == here.work
        times = [[found.prediction.time, found.bound] for found in (there, here)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
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
    few, many = (find(steps=steps) for steps in (100, 2000))
    assert many.prediction.time < few.prediction.time and many.work > 5 * few.work
    assert find(steps=100, seconds=1e-6).plan == few.plan


def test_memory_is_kept_and_tables_that_fit_nowhere_are_split(cluster: Platform) -> None:
    tables = TableSet(draw_tables(60, seed=2), batch=4096, embedding="fused")
    needed = float(price_plan(tables, "h100-sxm-8", Plan(8, (0,) * 60)).memory.max())
    tight = find(tables, memory=1.12 * needed / 8, steps=2500)
    assert tight.prediction.fits and tight.prediction.memory.max() <= tight.prediction.capacity
    assert None in tight.baselines.values() and "finds no room" in tight.explain(), (
        "most rules of thumb find none"
    )
    big = [EmbeddingTable(30_000_000, 128, 5.0, name="big"), *draw_tables(20, seed=3)]
    tables, left = (
        TableSet(big, batch=8192, embedding="fused"),
        {"row_wise", "table_row_wise", "table_column_wise"},
    )
    for forbid, kinds in (
        ("column_wise", left),
        (("column_wise", "row_wise", "table_column_wise"), {"table_row_wise"}),
    ):
        result = find(tables, cluster, ranks=16, memory=6e9, forbid=forbid)
        first = result.plan.placements[0]
        assert first.kind in kinds and result.prediction.fits
        assert first.kind == "row_wise" or len({rank // 8 for rank in first.ranks}) == 1


def test_progress_is_told_and_ctrl_c_keeps_the_best_plan() -> None:
    told: list[tuple[float, float]] = []
    full = find(apart=[(0, 1, 2)], progress=lambda done, time: told.append((done, time)))
    assert told[-1] == (1.0, pytest.approx(full.prediction.time, rel=1e-6)), (
        "loads stay true through all changes"
    )
    assert all(later <= earlier for (_, earlier), (_, later) in pairwise(told))

    def interrupt(done: float, time: float) -> None:
        if done > 0.1:
            raise KeyboardInterrupt

    part = find(progress=interrupt)
    assert part.interrupted and not full.interrupted and part.work < full.work
    assert part.prediction.fits and "interrupted: the best plan so far" in part.explain()


@pytest.mark.parametrize("case", [(10, 362493, 0.05), (6, 2, 1e-4), (20, 3, 1e-4), (8, 17, 0.02)])
@pytest.mark.parametrize(
    "way", [{}, {"sparse": False, "optimizer": "adam"}, {"embedding": "fused"}], ids=str
)
def test_no_rule_of_thumb_is_better_than_a_search(
    case: tuple[int, int, float], way: dict[str, Any]
) -> None:
    tables = TableSet(draw_tables(case[0], seed=case[1]), batch=4096, **way)
    found = shard(tables, "a100-sxm-8", ranks=4, seconds=case[2])
    again = price_plan(tables, "a100-sxm-8", found.plan)
    assert again.time == found.prediction.time and (again.costs == found.prediction.costs).all()
    assert found.prediction.time <= min(price.time for price in found.baselines.values() if price)
    assert found.gap >= 0


# Constraints and errors.


@pytest.mark.filterwarnings("ignore")
def test_plans_give_a_host_that_sets_the_pace_no_more_calls() -> None:
    """Copies and splits by rows have calls around their messages, however many tables they are
    of."""
    model = DLRM("dlrm-mlperf", batch=16384, embedding="fused")
    found = find(model)
    plans = [found.plan, *(price.plan for price in found.baselines.values() if price)]
    first, *others = (pk.predict(model, "h100-sxm-8", ranks=8, plan=plan) for plan in plans)
    assert first.bottleneck == "host-bound" and first.time <= min(r.time for r in others) * (
        1 + 1e-6
    )
    for plan in (
        found.plan,
        Plan.from_owners([Placement("data_parallel", tuple(range(8)))] * 26, ranks=8),
    ):
        priced = price_plan(model, "h100-sxm-8", plan, memory=1e12)
        assert priced.time == pytest.approx(
            pk.predict(model, "h100-sxm-8", ranks=8, plan=plan).time, rel=0.03
        )


def test_constraints_are_kept() -> None:
    result = find(
        pin={3: 5, "table 4": 5},
        together=[(10, 11, 12), (12, "table 13")],
        apart=[(3, 20), tuple(range(21, 29))],
        forbid={7: "data_parallel", 8: ("column_wise", "row_wise")},
    )
    at = result.plan.placements
    assert at[3] == at[4] == Placement("table_wise", (5,))
    assert len({at[t] for t in (10, 11, 12, 13)}) == 1 and at[10].kind == "table_wise"
    assert not set(at[3].ranks) & set(at[20].ranks)
    held = [rank for t in range(21, 29) for rank in at[t].ranks]
    assert len(held) == len(set(held))
    assert at[7].kind != "data_parallel" and at[8].kind not in ("column_wise", "row_wise")
    assert all(
        price is None or price.plan.placements[3] == at[3] for price in result.baselines.values()
    )


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("objective", ["iteration", "additive"])
@pytest.mark.parametrize("seed", range(4))
def test_few_large_tables_are_kept_apart(seed: int, objective: str, ranks: int) -> None:
    """Each alone would be cut over all ranks, or copied."""
    rng = np.random.default_rng([seed, ranks])
    tables = [
        EmbeddingTable(int(rng.integers(10**5, 2 * 10**6)), 128, float(rng.uniform(1, 60)))
        for _ in range(int(rng.integers(2, 6)))
    ]
    apart = tuple(range(min(len(tables), 3)))
    result = shard(
        TableSet(tables, batch=4096, embedding="separate"),
        "h100-sxm-8x2",
        ranks=ranks,
        steps=150,
        apart=[apart],
        objective=objective,
    )
    held = [rank for table in apart for rank in result.plan.placements[table].ranks]
    assert len(held) == len({*held})


def test_tables_that_no_kind_keeps_apart_are_refused() -> None:
    """Three tables over the rows of a node each, on two nodes."""
    tables = TableSet([EmbeddingTable(10**6, 64, 20.0)] * 3, batch=4096)
    others = [kind for kind in KINDS if kind != "table_row_wise"]
    with pytest.raises(InfeasibleError, match="apart: no placement was found that keeps all"):
        shard(tables, "h100-sxm-8x2", ranks=16, steps=50, apart=[(0, 1, 2)], forbid=others)


ODD = TableSet([EmbeddingTable(10_000, 17, 2.0)], batch=64)
BAD = (
    ValueError,
    [
        ({"tables": 3}, "workload is 3; it must be a DLRM or a TableSet"),
        ({"ranks": 16}, "ranks is 16; platform 'h100-sxm-8' has 8"),
        ({"ranks": 3}, "batch is 16384; it must divide by the 3 ranks"),
        ({"objective": "cost"}, "objective is 'cost'; known are iteration, additive"),
        ({"inputs": "remote"}, "inputs is 'remote'; known are local, exchanged"),
        ({"memory": -1}, "memory is -1"),
        (
            {"pin": {40: 0}},
            "table of pin is 40; it must be a whole number of 0 or more, at most 39",
        ),
        ({"pin": {"tabel 4": 0}}, "table of pin is 'tabel 4'; known are .* did you mean 'table 4'"),
        (
            {"pin": {0: 8}},
            "rank of 'table 0' is 8; it must be a whole number of 0 or more, at most 7",
        ),
        ({"together": [0, 1]}, "together has 0; it must be groups of at least two tables"),
        ({"forbid": 3}, "forbidden kind is 3; known are"),
    ],
)
INFEASIBLE = (
    InfeasibleError,
    [
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
    ],
)


@pytest.mark.parametrize(("error", "cases"), [BAD, INFEASIBLE], ids=["bad input", "infeasible"])
def test_what_cannot_be_placed_is_refused(
    error: type[ValueError], cases: list[tuple[dict[str, Any], str]]
) -> None:
    for change, message in cases:
        with pytest.raises(error, match=".*".join(map(re.escape, message.split(".*")))):
            find(**change)


def test_the_ranks_that_would_do_do() -> None:
    tables = TableSet(draw_tables(40, seed=5), batch=1024, embedding="fused")
    with pytest.raises(InfeasibleError, match="memory: all tables together") as found:
        find(tables, ranks=2, memory=1e9)
    ranks = int(re.search(r"(\d+) ranks would do", str(found.value))[1])  # type: ignore[index]
    assert 2 < ranks <= 8
    assert find(replace(tables, batch=ranks * 512), ranks=ranks, memory=1e9).prediction.fits


@pytest.mark.parametrize(
    ("platform", "ranks", "first", "more", "message"),
    [
        ("h100-sxm-8", 8, 0, 38, "plan places 39 tables; there are 40"),
        ("h100-sxm-8", 16, 0, 39, "ranks is 16; platform 'h100-sxm-8' has 8"),
        (
            "h100-sxm-8",
            8,
            Placement("table_row_wise", (0, 1)),
            39,
            "(0, 1); it must be on ranks of one node, and",
        ),
        (
            "zen5-2",
            2,
            Placement("column_wise", (0, 1), (3, 4)),
            39,
            "have 7 columns together; the table",
        ),
        (
            "h100-sxm-8x8",
            16,
            Placement("table_column_wise", (7, 8)),
            39,
            "(7, 8); it must be on ranks of one node",
        ),
    ],
)
def test_plans_that_cannot_be_priced(
    platform: str, ranks: int, first: Any, more: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        price_plan(TABLES, platform, Plan(ranks, (first, *(0,) * more)))


def test_kinds_without_a_model_of_their_messages_are_left_out() -> None:
    platform = load_platform("h100-sxm-8")
    some = {
        name: fit
        for name, fit in platform.collectives.items()
        if not name.startswith("reduce_scatter")
    }
    bare = replace(platform, collectives=some)
    with pytest.warns(UserWarning, match="row_wise was not tried: .* collective 'reduce_scatter'"):
        result = find(TABLES, bare)
    assert len(result.warnings) == 1 and result.warnings[0] in result.explain()
    assert not {p.kind for p in result.plan.placements} & {"row_wise", "table_row_wise"}
    with pytest.raises(ValueError, match="has no model of its messages; take one of"):
        price_plan(TABLES, bare, Plan(8, (Placement("row_wise", tuple(range(8))), *(0,) * 39)))
    with pytest.raises(ValueError, match="all_to_all"):
        find(TABLES, replace(platform, collectives={}))


def test_a_result_explains_itself() -> None:
    result, text = (found := find()), found.explain()
    assert repr(result).startswith(
        "ShardingResult(40 tables on 8 ranks of h100-sxm-8: "
    ) and "PlanPrice(" in repr(result.prediction)
    assert text in html.unescape(result._repr_html_()) and "times as long" in text
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
    assert "at most 0.00% above the best" in repr(result)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_that_can_be_priced_is_below_the_bound(seed: int) -> None:
    check_bound(np.random.default_rng([seed, 9]))


@pytest.mark.parametrize(
    ("tables", "ranks", "settings", "owner"),
    [
        # copies whose gradients are larger than four times the pooled rows
        ([(1023, 16, 20.0)], 2, {"batch": 4}, Placement("data_parallel", (0, 1))),
        # columns that do not halve to multiples of four
        (
            [(9645, 100, 4.5)],
            2,
            {"batch": 4096, "objective": "additive"},
            Placement("column_wise", (0, 1)),
        ),
        (
            [(10**6, 6, 2.0)],
            3,
            {"batch": 3, "objective": "additive"},
            Placement("column_wise", (0, 1, 2)),
        ),
        # tables too small to be worth a split
        ([(64, 4, 1.0)] * 60, 8, {"batch": 8}, Placement("row_wise", tuple(range(8)))),
    ],
)
def test_the_bound_holds_for_plans_that_no_search_tries(
    tables: list[tuple[int, int, float]], ranks: int, settings: dict[str, Any], owner: Placement
) -> None:
    batch, objective = settings["batch"], settings.get("objective", "iteration")
    workload = TableSet([EmbeddingTable(*shape) for shape in tables], batch=batch)
    result = find(workload, ranks=ranks, objective=objective, steps=20)
    plan = Plan(ranks, (owner,) * len(tables))
    assert result.bound <= price_plan(workload, "h100-sxm-8", plan, objective=objective).time


def test_a_curve_that_falls_with_size_bounds_by_its_later_part() -> None:
    curve = problem.Curve(np.array([1.0, 10.0, 20.0, 40.0]), np.array([1.0, 5.0, 2.0, 4.0]))
    assert curve.never_falling().seconds.tolist() == [1.0, 2.0, 2.0, 4.0]
    assert curve.slope_below(15.0) == pytest.approx(3.5 / 15)
    assert curve.slope_below(40.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1, 5), (5, 25), (10, 20), (10, 30), (12, 19), (25, 25), (25, 5), (25, 90), (50, 90)],
)
def test_a_line_below_a_curve_looks_at_the_sizes_of_its_interval(low: float, high: float) -> None:
    curve = problem.Curve(np.array([10.0, 20.0, 30.0]), np.array([4.0, 3.0, 7.0]))
    sizes = np.unique(np.clip(curve.nbytes, low, high))
    line = curve.line_below(low, high)
    distances = curve(sizes) - (line.intercept + line.slope * sizes)
    assert distances.min() == pytest.approx(0, abs=1e-12)
    slope = (curve(sizes[-1]) - curve(sizes[0])) / max(sizes[-1] - sizes[0], 1e-9)
    assert line.slope == pytest.approx(slope)


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
    [*_, kind] = used
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
    copied = Placement("data_parallel", tuple(range(8)))
    plans = (
        Plan(8, tuple(range(8))),
        Plan(8, (0,) * 8),
        Plan(8, (copied, 1, 2, 3, copied, 5, copied, 7)),
    )
    for plan in plans:
        predicted = pk.predict(model, name, ranks=8, plan=plan)
        spread = price_plan(model, name, plan).spread
        assert spread == pytest.approx(predicted.spread, rel=0.08), plan


def test_the_uncertainty_of_a_plan_is_that_of_the_kernels_that_run() -> None:
    platform = load_platform("h100-sxm-8")
    tables = draw_tables(8, seed=0)

    def find_spread(embedding: str, owner: Placement | None, kernel: str, spread: float) -> float:
        """Spread of a plan where the fit of a kernel has this spread."""
        fit = replace(platform.kernels[kernel], spread=spread)
        changed = replace(platform, kernels={**platform.kernels, kernel: fit})
        workload = TableSet(tables, batch=65536, embedding=embedding)
        owners = tuple(range(8)) if owner is None else (owner,) * 8
        return price_plan(workload, changed, Plan(8, owners)).spread

    copied = Placement("data_parallel", tuple(range(8)))
    cases: list[tuple[str, Placement | None, str, bool]] = [
        ("separate", None, "embedding_forward._embedding_bag", True),
        ("separate", None, "embedding_forward", False),
        ("separate", None, "embedding_backward.sparse", True),
        ("separate", copied, "embedding_backward.sparse", False),
        ("fused", None, "embedding_forward", True),
        ("fused", None, "embedding_forward._embedding_bag", False),
    ]
    for embedding, owner, kernel, counts in cases:
        low, high = (find_spread(embedding, owner, kernel, spread) for spread in (0.1, 0.9))
        assert (low < high) is counts and (low == high) is not counts, (embedding, kernel)


def draw_plan(rng: np.random.Generator, tables: int, ranks: int) -> Plan:
    """A plan of whole tables, evenly or on few ranks, or with some that are split or copied."""
    few = int(rng.integers(1, ranks + 1))
    kinds = ["table_wise", *([] if rng.random() < 0.5 else ["column_wise", "row_wise"])]
    owners: list[int | Placement] = []
    for kind in rng.choice(kinds, size=tables):
        split = Placement(str(kind), tuple(range(ranks))) if kind != "table_wise" else None
        owners.append(split or int(rng.integers(few)))
    return Plan(ranks, tuple(owners))


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize("seed", range(20))
def test_a_price_differs_from_a_prediction_by_copies_of_the_host_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables, ranks = int(rng.choice([3, 8, 26])), int(rng.choice([4, 8, 16]))
    name = "h100-sxm-8x8" if ranks > 8 else str(rng.choice(["h100-sxm-8", "v100-sxm-8"]))
    model = DLRM(
        rows=[int(10 ** rng.uniform(3, 6)) for _ in range(tables)],
        dim=64,
        pooling=[float(rng.integers(1, 60)) for _ in range(tables)],
        batch=int(rng.choice([1024, 8192, 65536])),
        embedding=str(rng.choice(["fused", "separate", "exact"])),
    )
    plan = draw_plan(rng, tables, ranks)
    price = price_plan(model, name, plan)
    predicted = pk.predict(model, name, ranks=ranks, plan=plan).time

    def issue(senders: int) -> float:
        """Host time of a rank that holds no table, where so many others send pooled rows."""
        spread = Plan(ranks, tuple(table % senders for table in range(tables)))
        graph = model.graphs(ranks, spread, accelerator=True)[-1]
        return float(price._problem.costs.issue(graph).sum())

    copy = issue(2) - issue(1)
    whole = [p for p in plan.placements if p.kind in ("table_wise", "column_wise")]
    senders = len({rank for placement in whole for rank in placement.ranks})
    copies = copy * abs(senders - min(tables, ranks))
    by_rows = any(placement.kind == "row_wise" for placement in plan.placements)
    rest = 0.06 if by_rows else 0.02
    assert abs(price.time - predicted) <= rest * predicted + copies


@pytest.mark.parametrize("seed", range(16))
def test_forbidding_raises_the_bound_and_gains_no_more_than_the_gap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, ranks = int(rng.choice([3, 6, 12])), int(rng.choice([2, 4, 8]))
    embedding = str(rng.choice(["fused", "separate"]))
    tables = TableSet(draw_tables(count, seed=seed), batch=8192, embedding=embedding)
    free = shard(tables, "h100-sxm-8", ranks=ranks, steps=150)
    for number in (1, 2, 3):
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
    plain = find()
    kinds = {placement.kind for placement in plain.plan.placements}
    result = find(forbid=kinds - {"table_wise"}, progress=lambda done, time: told.append(done))
    assert result.work > plain.work, "the search without forbid goes first"
    assert told == sorted(told) and told[-1] == 1.0

    def interrupt(done: float, time: float) -> None:
        raise KeyboardInterrupt

    part = find(forbid=kinds - {"table_wise"}, progress=interrupt)
    assert part.interrupted
    assert not {placement.kind for placement in part.plan.placements} & (kinds - {"table_wise"})


@pytest.mark.parametrize("ranks", [8, 32])
def test_kinds_that_are_left_out_are_named_and_nothing_else(ranks: int) -> None:
    platform = load_platform("h100-sxm-8x4" if ranks == 32 else "h100-sxm-8")
    assert find(TABLES, platform, ranks=ranks, steps=10).warnings == ()
    some = {
        name: fit
        for name, fit in platform.collectives.items()
        if not name.startswith("reduce_scatter")
    }
    with pytest.warns(UserWarning, match="was not tried"):
        result = find(TABLES, replace(platform, collectives=some), ranks=ranks, steps=10)
    named = [text.split(" was not tried: ")[0] for text in result.warnings]
    # an all_reduce across nodes is made of reduce_scatter and all_gather
    expected = ["row_wise", "table_row_wise", "data_parallel"] if ranks == 32 else ["row_wise"]
    assert named == expected
    assert all("reduce_scatter" in text for text in result.warnings)


def test_memory_that_everything_else_fills_is_said_and_never_negative() -> None:
    tables = TableSet((EmbeddingTable(1000, 64),), batch=2**20)
    price = price_plan(tables, "h100-sxm-8", Plan(2, (0,)), memory=1e6)
    assert not price.fits and price.capacity == 0
    text = "does not fit: everything else alone takes 268 MB of the 1 MB of a rank"
    assert text in repr(price)
    assert price.table()["memory_share"].to_list() == [None, None]
    price.chart()
    healthy = price_plan(tables, "h100-sxm-8", Plan(2, (0,)), memory=1e10)
    assert healthy.fits and "everything else alone" not in repr(healthy)
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
    price = price_plan(tables, "h100-sxm-8", Plan(8, (Placement("row_wise", tuple(range(8))),)))
    assert price.time > 0


def test_where_the_memory_of_a_rank_comes_from_is_said() -> None:
    assert "a rank of the platform has 80 GB" in find(steps=10).explain()
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
    first, second = price(list(range(8)), owners), price(names, owners)
    assert second.time == pytest.approx(first.time, rel=1e-12)
    assert second.loads[names] == pytest.approx(first.loads, rel=1e-12)


def test_a_search_starts_from_one_kind_for_all_tables() -> None:
    options = list_candidates(
        replace(
            set_up(TABLES, "h100-sxm-8", 8, None, "iteration", "local"),
            constraints=read_constraints([table.name for table in TABLES], 8),
        )
    )
    taken = options.choose_kinds(np.full(len(TABLES), "data_parallel"))
    assert (options.unit[taken] == np.arange(len(TABLES))).all()
    assert set(options.kind[taken]) == {"data_parallel", "table_wise"}


def test_a_short_search_is_no_worse_than_equally_many_tables_on_each_rank() -> None:
    """The host launches kernels for each table and sets the time."""
    tables = TableSet(draw_tables(40, seed=28), batch=256)
    result = shard(tables, "v100-sxm-8", ranks=8, seconds=0.02)
    even = price_plan(tables, "v100-sxm-8", Plan.round_robin(40, ranks=8))
    assert result.prediction.time <= even.time * (1 + 1e-9)
