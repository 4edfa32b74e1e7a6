"""Tables whose numbers have several formats in one model: bytes, kernels, exchange and plans, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.hardware import DTYPES
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.cost import count_row_bytes, find_row_widths
from perfkit.sharding.costs import SECONDS, Cost, Costs
from perfkit.workloads.graph import Graph
from perfkit.workloads.layers import exact_traffic
from perfkit.workloads.tables import list_formats

WIDE = pk.EmbeddingTable(10**6, 64, 10, 0.8, name="wide")
NARROW = replace(WIDE, itemsize=2, dtype="fp16", name="narrow")
OTHER = replace(WIDE, itemsize=2, dtype="bf16", name="other")
BYTES = replace(WIDE, itemsize=1, dtype="int8", name="bytes")
MIXED = (WIDE, NARROW, OTHER, BYTES)
BATCH = 4096


def make_set(*tables: pk.EmbeddingTable, **fields: Any) -> pk.TableSet:
    given = {"batch": BATCH, "embedding": "fused", "output_dtype": "fp32"}
    return pk.TableSet(tables, **(given | fields))


def make_model(table_dtype: Any, **fields: Any) -> pk.DLRM:
    given = {"rows": [10**6] * 4, "dim": 64, "pooling": 10, "batch": BATCH, "embedding": "exact"}
    return pk.DLRM(table_dtype=table_dtype, **(given | fields))


def count_launches(graph: Graph, kind: str) -> float:
    """Kernels that the operations of a kind start [-]."""
    positions = [place for place, label in enumerate(graph.labels) if label.kind == kind]
    return float(graph.column("launches")[positions].sum())


def test_the_format_of_a_table_says_its_bytes() -> None:
    assert [table.itemsize for table in MIXED] == [4, 2, 2, 1]
    # int8 rows have 4 B of scale and 4 B of bias more
    assert [table.row_bytes for table in MIXED] == [256, 128, 128, 64 + 8]
    assert BYTES.nbytes == 10**6 * 72
    assert list_formats(MIXED) == ["fp32", "fp16", "bf16", "int8"]
    assert pk.EmbeddingTable(10, 8, itemsize=2).number_format == "fp16"
    assert pk.EmbeddingTable(10, 8).number_format == "fp32"
    with pytest.raises(ValueError, match="itemsize is 4 and dtype 'fp16', whose numbers have 2 B"):
        pk.EmbeddingTable(10, 8, itemsize=4, dtype="fp16")
    with pytest.raises(ValueError, match="dtype is 'fp17'; known are fp64, fp32, fp16"):
        pk.EmbeddingTable(10, 8, dtype="fp17")
    with pytest.raises(ValueError, match="output_dtype is 'int8'; known are fp32, fp16, bf16"):
        make_set(WIDE, output_dtype="int8")


def test_each_lookup_reads_rows_of_its_own_table() -> None:
    [graph] = make_model(["fp32", "fp16", "bf16", "int8"]).graphs(accelerator=True)
    features = {name: graph.column(name) for name in ("dim", "table", "lookups")}
    widths = find_row_widths([graph], features, DTYPES["fp32"])
    forward = [p for p, label in enumerate(graph.labels) if label.kind == "embedding_forward"]
    assert widths[forward].tolist() == [256, 128, 128, 72]
    # 72 B are three sectors of 32 B
    lookups = BATCH * 10
    expected = [lookups * 256, lookups * 128, lookups * 128, lookups * 96]
    assert count_row_bytes(features, widths, 32.0)[forward].tolist() == expected


def test_updates_move_rows_of_their_own_table() -> None:
    """What the sort reads and writes is the same; of each distinct row, read and written, 256 and 96 B."""
    wide = float(exact_traffic(WIDE, BATCH, "sgd"))
    unique = float(pk.TableSet([WIDE], batch=BATCH).table()["unique_rows"][0])
    narrow = float(exact_traffic(BYTES, BATCH, "sgd"))
    assert wide - narrow == pytest.approx(2 * unique * (256 - 96), rel=1e-3)
    assert float(exact_traffic(NARROW, BATCH, "sgd")) == float(exact_traffic(OTHER, BATCH, "sgd"))


@pytest.mark.parametrize(
    ("table_dtype", "kernels"),
    [("fp32", 1), ("fp16", 1), (["fp32", "fp16", "fp32", "fp16"], 2), (["fp16", "bf16"] * 2, 2)],
)
def test_each_format_has_a_kernel_of_its_own(table_dtype: Any, kernels: int) -> None:
    """FBGEMM has one for each data_type; its update also sorts, by a kernel of several launches."""
    [graph] = make_model(table_dtype).graphs(accelerator=True)
    [alike] = make_model("fp32").graphs(accelerator=True)
    for kind in ("embedding_forward", "embedding_backward"):
        assert count_launches(graph, kind) == kernels * count_launches(alike, kind)


def test_ranks_with_other_formats_have_graphs_of_their_own() -> None:
    model = make_model(["fp32", "fp16", "fp16", "fp32"])
    first, second, third, fourth = model.graphs(4)
    assert [graph.tables[0].itemsize for graph in (first, second, third, fourth)] == [4, 2, 2, 4]
    assert second is third and first is fourth and first is not second


@pytest.mark.parametrize("embedding", ["fused", "separate"])
def test_a_mixed_set_costs_what_the_sets_of_its_formats_cost(embedding: str) -> None:
    """Each table the same seconds and bytes; only the start of kernels is once for each format."""
    platform = pk.load_platform("h100-sxm-8")
    mixed = Costs(make_set(WIDE, NARROW, embedding=embedding), platform, 8)
    costs = mixed.shards(np.arange(2), "table_wise").shard
    starts = 0.0
    for number, table in enumerate((WIDE, NARROW)):
        alone = Costs(make_set(table, embedding=embedding), platform, 8)
        [of_table] = alone.shards(np.arange(1), "table_wise").shard
        bytes_alone = of_table[len(SECONDS) :]
        assert costs[number, len(SECONDS) :].tolist() == bytes_alone.tolist()
        # kernels one after another find in caches what the others left
        tolerance = 1e-9 if embedding == "fused" else 0.25
        assert costs[number] == pytest.approx(of_table, rel=tolerance)
        starts += alone.launch()[Cost.LOOKUP]
    if embedding == "fused":
        assert mixed.launch()[Cost.LOOKUP] == pytest.approx(starts)
        assert mixed.launch()[Cost.PACK] == pytest.approx(alone.launch()[Cost.PACK])


def test_pooled_rows_are_exchanged_in_the_format_of_the_output() -> None:
    """Batch × columns × bytes of a number, whatever the table holds: 4 B in FBGEMM."""
    platform = pk.load_platform("h100-sxm-8")
    sizes = {}
    for name in ("fp32", "fp16", ""):
        [cost] = (
            Costs(make_set(NARROW, output_dtype=name), platform, 8)
            .shards(np.arange(1), "table_wise")
            .shard
        )
        sizes[name] = cost[Cost.POOLED]
        assert cost[Cost.WEIGHTS] == NARROW.nbytes
    assert sizes == {"fp32": BATCH * 64 * 4, "fp16": BATCH * 64 * 2, "": BATCH * 64 * 2}
    assert make_set(WIDE, NARROW, output_dtype="").pooled_itemsize == 4


def test_tables_of_bytes_alone_have_pooled_rows_in_fp32() -> None:
    """No kernel writes numbers of 1 B: FBGEMM writes fp32 where nobody says another format."""
    floats = replace(BYTES, dtype="fp8", name="floats")
    for tables in ((BYTES,), (floats,), (BYTES, floats)):
        assert make_set(*tables, output_dtype="").pooled_itemsize == 4
        assert make_set(*tables, output_dtype="fp16").pooled_itemsize == 2
    assert make_set(BYTES, NARROW, output_dtype="").pooled_itemsize == 2
    platform = pk.load_platform("h100-sxm-8")
    costs = []
    for name in ("", "fp32"):
        tables = make_set(BYTES, output_dtype=name)
        costs.append(Costs(tables, platform, 8).shards(np.arange(1), "table_wise").shard)
    assert costs[0][0, Cost.POOLED] == BATCH * 64 * 4
    assert costs[0].tolist() == costs[1].tolist()


def test_a_plan_of_mixed_tables_costs_what_a_prediction_says() -> None:
    """The exchange of a model in fp32 with tables in fp16 has 4 B a number in both."""
    plan = pk.Plan.round_robin(4, ranks=4)
    with keep_quiet():
        for table_dtype in ("fp16", ["fp32", "fp16", "int8", "bf16"]):
            model = make_model(table_dtype, batch=65536)
            predicted = pk.predict(model, "h100-sxm-8", ranks=4, plan=plan).time
            price = pk.price_plan(model, "h100-sxm-8", plan)
            assert price.messages["pooled"] == 65536 * 64 * 4
            assert price.time == pytest.approx(predicted, rel=0.02)


def test_memory_counts_each_format() -> None:
    with keep_quiet():
        memory = pk.predict(make_model(["fp32", "fp16", "bf16", "int8"]), "h100-sxm-8").memory()
    assert memory.parts["tables"] == 10**6 * (256 + 128 + 128 + 72)


def test_a_search_places_mixed_tables_below_no_bound() -> None:
    cached = replace(NARROW, kernel="uvm_caching", name="cached")
    workload = make_set(*MIXED, cached, optimizer="rowwise_adagrad")
    result = pk.shard(workload, "h100-sxm-8", ranks=4, steps=200, progress=False)
    assert result.bound <= result.prediction.time
    assert (
        result.prediction.time <= pk.price_plan(workload, "h100-sxm-8", result.plan).time * 1.0001
    )
    # a row of states in fp32 for each row of a table, and a fifth of the rows of the one in host memory
    weights = 10**6 * (256 + 128 + 128 + 72 + 128 * 0.2)
    held = result.prediction.costs[:, [Cost.WEIGHTS, Cost.STATE]].sum()
    assert held >= weights + 5 * 4 * 10**6


def test_tables_of_torchrec_keep_their_formats() -> None:
    fields = {"embedding_dim": 64, "num_embeddings": 1000, "pooling_factor": 2}
    kinds = ("FP32", "FP16", "BF16", "INT8", "NFP8")
    records = [{**fields, "name": kind, "data_type": kind} for kind in kinds]
    tables = pk.read_tables(records)
    assert list_formats(tables.tables) == ["fp32", "fp16", "bf16", "int8", "fp8"]
    assert (tables.output_dtype, tables.pooled_itemsize) == ("fp32", 4)
    rules = {kind: {"output_dtype": "FP16"} for kind in kinds}
    assert pk.read_tables(records, constraints=rules).output_dtype == "fp16"
    del rules["INT8"]  # torch.cat takes the wider one
    assert pk.read_tables(records, constraints=rules).output_dtype == "fp32"
    with pytest.raises(ValueError, match="data_type and dtype, which are the same"):
        pk.read_tables([{**records[0], "dtype": "fp16"}])
    assert pk.read_tables([{"rows": 10, "dim": 4, "dtype": "bf16"}]).tables[0].itemsize == 2
