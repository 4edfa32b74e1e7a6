"""Rows of tables with an optimizer of their own, as row-wise Adagrad: lookup, update, memory, shard."""

import pytest

import perfkit as pk
from perfkit.models.embedding import state_bytes
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.uncertainty import list_dense_tables
from perfkit.workloads.layers import exact_traffic

ROWS, DIM, POOLING, BATCH = 100_000, 64, 20, 8192
ADAGRAD = "rowwise_adagrad"


def make(of_rows: str | None = ADAGRAD, **others: str) -> pk.DLRM:
    """A model whose tables FBGEMM updates."""
    settings = {"batch": BATCH, "rows": [ROWS] * 4, "dim": DIM, "pooling": POOLING}
    return pk.DLRM(
        **settings | {"embedding": "exact", "overlap": True} | others, table_optimizer=of_rows
    )


def test_rows_take_the_optimizer_of_all_weights_where_none_is_given() -> None:
    assert make(None).table_optimizer == "sgd"
    assert make(optimizer="adagrad").table_optimizer == ADAGRAD
    assert make(None, optimizer="adagrad").table_optimizer == "adagrad"


def test_optimizers_without_a_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'rowwise_adagrad' with embedding 'separate', where"):
        make(embedding="separate")
    with pytest.raises(
        ValueError, match=r"'rowwise_adagrad' with embedding 'fused', which updates"
    ):
        make(embedding="fused")
    with pytest.raises(ValueError, match=r"^table_optimizer is 'rowwise'; known are"):
        make("rowwise")
    with pytest.raises(ValueError, match=r"optimizer is 'rowwise_adagrad'; known are sgd"):
        make(optimizer=ADAGRAD)
    assert make("sgd", embedding="fused", optimizer="adam").optimizer == "adam"


def test_a_number_of_each_row_is_read_and_written() -> None:
    table = pk.EmbeddingTable(ROWS, DIM, POOLING)
    plain, rowwise, whole = (
        exact_traffic(table, BATCH, name) for name in ("sgd", ADAGRAD, "adagrad")
    )
    unique = table.rows * (1 - (1 - 1 / table.rows) ** (BATCH * POOLING))
    assert rowwise - plain == pytest.approx(2 * 32 * unique, rel=1e-6)  # a sector of 32 B
    assert whole - plain == pytest.approx(2 * 4 * DIM * unique, rel=1e-6)
    graphs = [make(name).graphs(accelerator=True)[0] for name in ("sgd", ADAGRAD)]
    moved = [float(graph.traffic.sum()) for graph in graphs]
    assert moved[1] - moved[0] == pytest.approx(4 * 2 * 32 * unique, rel=1e-6)


@pytest.mark.parametrize("table_dtype", ["fp32", "fp16"])
def test_a_number_of_each_row_is_held_in_fp32(table_dtype: str) -> None:
    with keep_quiet():
        held = {
            name: pk.predict(make(name, table_dtype=table_dtype), "a100-sxm-8").memory().parts
            for name in ("sgd", ADAGRAD)
        }
    assert held[ADAGRAD]["states"] - held["sgd"]["states"] == 4 * 4 * ROWS
    assert state_bytes(ROWS, DIM, 2, optimizer=ADAGRAD) == 4 * ROWS


def test_dense_weights_keep_their_own_optimizer() -> None:
    names = [
        label.name for label in make().graphs(accelerator=True)[0].labels if label.phase == "update"
    ]
    assert names == [
        label.name
        for label in make("sgd").graphs(accelerator=True)[0].labels
        if label.phase == "update"
    ]
    everyone = pk.Placement("data_parallel", (0, 1))
    graph = make(rows=[10**6] * 4, optimizer="adam").graphs(2, pk.Plan(2, [everyone] * 4))[0]
    [note] = list_dense_tables(graph, 4)
    assert "updated whole by adam;" in note


@pytest.mark.parametrize("of_rows", ["sgd", ADAGRAD, "adagrad"])
def test_searches_price_the_optimizer_of_rows_as_predictions_do(of_rows: str) -> None:
    plan = pk.Plan.round_robin(4, ranks=2)
    with keep_quiet():
        price = pk.price_plan(make(of_rows), "a100-sxm-8", plan)
        predicted = pk.predict(make(of_rows), "a100-sxm-8", ranks=2, plan=plan)
    assert price.time == pytest.approx(predicted.time, rel=0.02)


def test_searches_hold_what_predictions_hold() -> None:
    plan = pk.Plan.round_robin(4, ranks=2)
    with keep_quiet():
        plain, rowwise = (
            pk.price_plan(make(name), "a100-sxm-8", plan).table()["state_bytes"].max()
            for name in ("sgd", ADAGRAD)
        )
    assert plain == 0 and rowwise == 2 * 4 * ROWS
