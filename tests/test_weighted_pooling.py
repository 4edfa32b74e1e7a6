"""Lookups with weights: what they read, compute and exchange more, by hand."""

import pytest

import perfkit as pk
from perfkit.models.embedding import exact_backward_bytes
from perfkit.platform.estimates import keep_quiet
from perfkit.sharding.costs import Cost, DividedTables, _measure_bytes
from perfkit.workloads.graph import Graph
from perfkit.workloads.layers import exact_traffic

ROWS, DIM, POOLING, BATCH = 1000, 16, 5, 64
LOOKUPS = BATCH * POOLING


def record(embedding: str, weighted: bool | list[bool], *, sparse: bool = True) -> Graph:
    """The iteration of a model with two tables on one rank."""
    model = pk.DLRM(
        batch=BATCH,
        rows=[ROWS, ROWS],
        dim=DIM,
        pooling=POOLING,
        embedding=embedding,
        weighted=weighted,
        sparse=sparse,
        bottom=[16],
        top=[16],
    )
    return model.graphs(accelerator=True)[0]


def count_bytes(graph: Graph, name: str) -> float:
    """Bytes that all operations of a name read and write [B]."""
    positions = [place for place, label in enumerate(graph.labels) if label.name == name]
    return float(graph.accesses.nbytes[graph.accesses.find_of(positions)].sum())


def test_a_table_without_weights_reads_none() -> None:
    table = pk.EmbeddingTable(ROWS, DIM)
    assert not table.weighted and table.lookup_bytes == 8
    assert pk.EmbeddingTable(ROWS, DIM, weighted=True).lookup_bytes == 8 + 4
    with pytest.raises(ValueError, match="weighted is 'yes'"):
        pk.EmbeddingTable(ROWS, DIM, weighted="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("embedding", ["separate", "fused", "exact"])
def test_each_lookup_of_a_weighted_table_reads_four_bytes_more(embedding: str) -> None:
    name = "_embedding_bag" if embedding == "separate" else "fused_embeddings"
    plain = count_bytes(record(embedding, False), name)
    assert count_bytes(record(embedding, [True, False]), name) == plain + 4 * LOOKUPS
    assert count_bytes(record(embedding, True), name) == plain + 2 * 4 * LOOKUPS


def test_rows_of_a_sparse_gradient_are_multiplied_in_a_kernel_of_their_own() -> None:
    graph = record("separate", [True, False])
    rows = 4 * LOOKUPS * DIM
    assert count_bytes(graph, "mul_") == rows + 4 * LOOKUPS + rows
    calls = [
        graph.column("calls")[place]
        for place, label in enumerate(graph.labels)
        if label.name == "mul_"
    ]
    assert calls == [0.0]
    for other in (record("separate", False), record("separate", True, sparse=False)):
        assert count_bytes(other, "mul_") == 0


def test_a_dense_gradient_reads_the_weights_in_its_own_kernel() -> None:
    name = "_embedding_bag_backward"
    plain = count_bytes(record("separate", False, sparse=False), name)
    weighted = count_bytes(record("separate", True, sparse=False), name)
    assert weighted == plain + 2 * 4 * LOOKUPS


@pytest.mark.parametrize("embedding", ["fused", "exact"])
def test_fbgemm_computes_gradients_of_weights_that_nobody_reads(embedding: str) -> None:
    graph = record(embedding, [True, False])
    name = "fused_embeddings_weights"
    places = [place for place, label in enumerate(graph.labels) if label.name == name]
    [place] = places
    assert graph.labels[place].phase == "backward"
    assert graph.features.lookups[place] == LOOKUPS  # rows are priced as those of lookups
    # gradient of the output, indices, offsets, and the result
    assert count_bytes(graph, name) == 4 * BATCH * DIM + 8 * LOOKUPS + 8 * BATCH + 4 * LOOKUPS
    assert count_bytes(record(embedding, False), name) == 0


def test_exact_updates_sort_the_lookups_once_more_with_their_weights() -> None:
    plain = exact_backward_bytes(100, BATCH, LOOKUPS, DIM)
    assert exact_backward_bytes(100, BATCH, LOOKUPS, DIM, weighted=1) - plain == 24 * 4 * LOOKUPS
    tables = [
        pk.EmbeddingTable(ROWS, DIM, POOLING, weighted=weighted) for weighted in (False, True)
    ]
    without, with_weights = (exact_traffic(table, BATCH, "rowwise_adagrad") for table in tables)
    assert with_weights - without == 24 * 4 * LOOKUPS


def test_weights_are_sent_and_held_with_the_indices() -> None:
    tables = [
        pk.EmbeddingTable(ROWS, DIM, POOLING, name=name, weighted=name == "b") for name in "ab"
    ]
    divided = DividedTables(tables, BATCH, copied=False, cache_scale=1.0)
    costs = _measure_bytes(pk.TableSet(tables, batch=BATCH), divided)
    for cost in (Cost.INDICES, Cost.INPUTS):
        assert costs[:, cost].tolist() == [8 * (LOOKUPS + BATCH), 12 * LOOKUPS + 8 * BATCH]


@pytest.mark.parametrize("embedding", ["separate", "fused", "exact"])
def test_searches_price_weighted_tables_as_predictions_do(embedding: str) -> None:
    model = pk.DLRM(
        batch=8192,
        rows=[100_000] * 4,
        dim=64,
        pooling=20,
        embedding=embedding,
        weighted=[True, True, True, False],
        overlap=True,
    )
    plan = pk.Plan.round_robin(4, ranks=2)
    with keep_quiet():
        price = pk.price_plan(model, "a100-sxm-8", plan).time
        predicted = pk.predict(model, "a100-sxm-8", ranks=2, plan=plan).time
    assert price == pytest.approx(predicted, rel=0.02)


def test_ranks_whose_tables_differ_in_weights_alone_have_graphs_of_their_own() -> None:
    model = pk.DLRM(batch=64, rows=[ROWS] * 2, dim=DIM, weighted=[True, False])
    first, second = model.graphs(2, pk.Plan.round_robin(2, ranks=2))
    assert count_bytes(first, "mul_") > 0
    assert count_bytes(second, "mul_") == 0


def test_models_with_weights_are_not_measured() -> None:
    pytest.importorskip("torch")
    from perfkit.recording.modules import build_step

    with pytest.raises(ValueError, match="weighted is True; only lookups without"):
        build_step(pk.DLRM(batch=64, rows=[10], weighted=True))
