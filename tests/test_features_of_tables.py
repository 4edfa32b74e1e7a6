"""Several features on one table, and rows that are not pooled: what a sample gets of them, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.sharding.candidates import list_floors
from perfkit.sharding.constraints import read_constraints
from perfkit.sharding.costs import Cost, Costs
from perfkit.sharding.problem import Resource
from perfkit.sharding.setup import set_up
from perfkit.workloads.graph import Graph
from perfkit.workloads.input_pipelines import SparseBytes

ONE = pk.EmbeddingTable(10**6, 64, pooling=12, name="one")
SHARED = replace(ONE, num_features=3, name="shared")
ROWS = replace(ONE, pooled=False, name="rows")
BATCH = 4096


def make_model(num_features: Any, **fields: Any) -> pk.DLRM:
    given = {"rows": [10**6] * 4, "dim": 64, "pooling": 12, "batch": BATCH, "embedding": "exact"}
    return pk.DLRM(num_features=num_features, **(given | fields))


def count_costs(table: pk.EmbeddingTable, kind: str) -> Any:
    """Costs of a shard of a table alone on 8 ranks, and what its most popular row adds."""
    tables = pk.TableSet([table], batch=BATCH, embedding="fused")
    found = Costs(tables, pk.load_platform("h100-sxm-8"), 8).shards(np.arange(1), kind)
    return found.shard[0], found.hot_row[0]


def sum_of(graph: Graph, column: str, *kinds: str) -> float:
    """Sum of a column over the operations of these kinds."""
    positions = [place for place, label in enumerate(graph.labels) if label.kind in kinds]
    return float(graph.column(column)[positions].sum())


def test_a_sample_gets_a_row_for_each_feature_or_lookup() -> None:
    assert (ONE.results, SHARED.results, ROWS.results) == (1, 3, 12)
    with pytest.raises(ValueError, match="num_features is 0; it must be a whole number above 0"):
        replace(ONE, num_features=0)
    small = pk.EmbeddingTable(4, 8, pooling=9, num_features=3, name="small")
    assert len(pk.TableSet([small])) == 1  # three of four rows by each feature
    with pytest.raises(
        ValueError, match="pooling of 'small' is 9; it must be at most 2 times its 4"
    ):
        pk.TableSet([replace(small, num_features=2)])


def test_pooled_rows_of_all_features_are_exchanged() -> None:
    """Batch × features × columns × 4 B; rows that are not pooled: batch × lookups × columns × 4 B."""
    whole = {table.name: count_costs(table, "table_wise")[0] for table in (ONE, SHARED, ROWS)}
    for name, results in (("one", 1), ("shared", 3), ("rows", 12)):
        assert whole[name][Cost.POOLED] == BATCH * results * 64 * 4
        assert whole[name][Cost.OUTPUTS] == BATCH * results * 64 * 4
        assert whole[name][Cost.WEIGHTS] == 10**6 * 64 * 4
    # an index of 8 B for each lookup, and a length of 8 B for each feature
    assert whole["one"][Cost.INDICES] == BATCH * (12 + 1) * 8
    assert whole["shared"][Cost.INDICES] == BATCH * (12 + 3) * 8
    assert whole["one"][Cost.LOOKUP] < whole["shared"][Cost.LOOKUP] < whole["rows"][Cost.LOOKUP]


def test_parts_of_rows_send_sums_of_features_or_rows_that_were_looked_up() -> None:
    """TorchRec adds up pooled rows by reduce_scatter, and exchanges others by all_to_all."""
    shard, hot_row = count_costs(SHARED, "row_wise")
    assert shard[Cost.SUMMED] == BATCH * 3 * 64 * 4
    assert shard[Cost.POOLED] == hot_row[Cost.POOLED] == 0
    popular = replace(ROWS, exponent=1.0)
    hottest = float(popular.distribution.buckets()[0].max())
    shard, hot_row = count_costs(popular, "row_wise")
    assert shard[Cost.SUMMED] == 0
    bytes_of_all = BATCH * 12 * 64 * 4
    assert shard[Cost.POOLED] == pytest.approx(bytes_of_all * (1 - hottest) / 8)
    assert hot_row[Cost.POOLED] == pytest.approx(bytes_of_all * hottest)


def test_features_of_one_table_take_what_as_many_tables_take() -> None:
    """The interaction, the exchange and the lookups; weights are those of one table."""
    [shared] = make_model([1, 3], rows=[10**6] * 2, pooling=[4, 12]).graphs(accelerator=True)
    [apart] = make_model(1, pooling=4).graphs(accelerator=True)
    for kind in ("gemm", "bmm", "copy"):
        assert sum_of(shared, "flops", kind) == sum_of(apart, "flops", kind)
    for column in ("lookups", "bags"):
        assert sum_of(shared, column, "embedding_forward") == sum_of(
            apart, column, "embedding_forward"
        )
    with keep_quiet():
        memory = pk.predict(
            make_model([1, 3], rows=[10**6] * 2, pooling=[4, 12]), "h100-sxm-8"
        ).memory()
    assert memory.parts["tables"] == 2 * 10**6 * 64 * 4


def test_the_rank_with_most_features_has_the_longest_message() -> None:
    graphs = make_model([1, 3, 1, 1]).graphs(4, accelerator=True)
    for graph in graphs:
        sizes = [
            float(graph.features.nbytes[place])
            for place in graph.collectives
            if graph.labels[place].variant == "all_to_all"
        ]
        assert sizes == [BATCH * 3 * 64 * 4] * 2
    assert graphs[0] is graphs[2] and graphs[0] is not graphs[1]


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_a_plan_of_features_costs_what_a_prediction_says(kind: str) -> None:
    model = make_model([1, 3, 2, 1], batch=65536)
    ranks = (1, 0, 2, 3) if kind != "table_wise" else (1,)
    placements = [pk.Placement(kind, ranks), *(pk.Placement("table_wise", (r,)) for r in (1, 2, 3))]
    plan = pk.Plan(4, tuple(placements))
    with keep_quiet():
        predicted = pk.predict(model, "h100-sxm-8", ranks=4, plan=plan).time
        price = pk.price_plan(model, "h100-sxm-8", plan, min_columns=1)
    assert price.time == pytest.approx(predicted, rel=0.06 if kind == "row_wise" else 0.02)


def test_a_search_places_features_and_rows_below_no_bound() -> None:
    tables = [replace(table, exponent=1.0) for table in (ONE, SHARED, ROWS)]
    workload = pk.TableSet(tables, batch=BATCH, embedding="fused")
    result = pk.shard(workload, "h100-sxm-8", ranks=4, steps=200, progress=False)
    assert result.bound <= result.prediction.time


def test_inputs_have_a_length_for_each_feature() -> None:
    assert SparseBytes.of_tables([ONE, SHARED]) == (8 * 4, 8 * 24, 0)


def test_what_knows_one_feature_alone_says_so() -> None:
    model = make_model([2, 1, 1, 1], pooling=1)
    hybrid = pk.Placement("hybrid", (0, 1), frequent=10)
    plan = pk.Plan(2, (hybrid, *(pk.Placement("table_wise", (1,)) for _ in range(3))))
    with pytest.raises(
        ValueError, match="'table 0' has 2 features; a hybrid placement is for tables"
    ):
        model.graphs(2, plan)


def test_least_loads_of_rows_that_are_not_pooled_are_those_of_their_shards() -> None:
    """All ranks together exchange a row for each lookup, and no sums, also of a table that is too
    small to be priced apart."""
    small = pk.EmbeddingTable(1000, 4, pooling=2, exponent=1.0, name="small", pooled=False)
    large = replace(ONE, dim=256, pooling=2000, num_features=100, name="large")
    tables = pk.TableSet([large, small], batch=BATCH, embedding="fused")
    problem = set_up(tables, "h100-sxm-8", 8, None, "iteration", "local")
    constraints = read_constraints(["large", "small"], 8)
    floors = list_floors(replace(problem, constraints=constraints))
    [entry] = np.flatnonzero((floors.unit == 1) & (floors.kind == "row_wise"))
    assert floors.grain is None
    assert floors.average[entry, Resource.ROWS] == 0
    plan = pk.Plan.from_owners([0, pk.Placement("row_wise", tuple(range(8)))], ranks=8)
    costs = pk.price_plan(tables, "h100-sxm-8", plan).costs
    exchanged = costs[:, Cost.POOLED].sum() - BATCH * 100 * 256 * 4
    assert exchanged == pytest.approx(BATCH * 2 * 4 * 4)
    assert floors.average[entry, Resource.POOLED] * 8 == pytest.approx(exchanged)
