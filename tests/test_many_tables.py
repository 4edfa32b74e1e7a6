"""DLRMs with many tables on many ranks: ranks that do the same share a graph, and ranks that do the same
on other sizes are recorded once."""

from dataclasses import replace

import numpy as np
import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.ranks import group_identical_ranks
from perfkit.workloads import dlrm
from perfkit.workloads.execution import compile_graph, execute
from perfkit.workloads.placement import Placement
from perfkit.workloads.sizes import alter
from perfkit.workloads.stand_ins import StandIns
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.symbolic_sizes import Expressions, OpenSize

RANKS = 4
KINDS = {
    "table wise": [0, 1, 2, 3, 0, 1, 2, 3],
    "mixed": [
        0,
        1,
        2,
        Placement("row_wise", (0, 1, 2, 3)),
        3,
        Placement("data_parallel", (0, 1, 2, 3)),
        Placement("column_wise", (1, 3)),
        0,
    ],
}


@pytest.mark.parametrize("embedding", ["separate", "fused", "exact"])
@pytest.mark.parametrize("owners", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("sparse", [True, False])
def test_a_rank_has_the_graph_of_its_own_record(
    embedding: str, owners: list[int | Placement], sparse: bool
) -> None:
    """Recorded with stand-ins, each rank has the numbers of a record of its own tables."""
    model = pk.DLRM(
        batch=64,
        rows=[1000 * (number + 1) for number in range(8)],
        pooling=[1, 2, 3, 4, 5, 6, 7, 8],
        exponent=[0.0, 0.9, 0.0, 1.1, 0.0, 0.9, 0.0, 0.0],
        dim=16,
        embedding=embedding,
        sparse=sparse,
        overlap=True,
    )
    plan = pk.Plan.from_owners(owners, ranks=RANKS)
    together = model.graphs(RANKS, plan, accelerator=True)
    for rank, local in enumerate(dlrm.list_local_tables(plan, model.tables)):
        alone = dlrm._record_rank(model, plan, local, True).fill()
        graph = together[rank]
        assert graph.labels == alone.labels and graph.tables == alone.tables
        assert graph.parameters == alone.parameters
        for name, values in vars(alone.features).items():
            np.testing.assert_array_equal(graph.column(name), values, err_msg=name)
        np.testing.assert_array_equal(graph.accesses.nbytes, alone.accesses.nbytes)


def test_compiled_ranks_share_what_is_merged() -> None:
    """Compiled together, each rank has the numbers of its own graph compiled alone."""
    model = pk.DLRM(
        batch=64,
        rows=[1000 * (number + 1) for number in range(8)],
        pooling=[1, 2, 3, 4, 5, 6, 7, 8],
        dim=16,
        sparse=True,
    )
    graphs = model.graphs(RANKS, pk.Plan.from_owners(KINDS["mixed"], ranks=RANKS), accelerator=True)
    together = execute(graphs, "compiled")
    for graph, shared in zip(graphs, together, strict=True):
        alone = compile_graph(graph)
        assert shared.labels == alone.labels and shared.tables == alone.tables
        for name, values in vars(alone.features).items():
            np.testing.assert_array_equal(shared.column(name), values, err_msg=name)
        np.testing.assert_array_equal(shared.accesses.nbytes, alone.accesses.nbytes)


def test_ranks_with_like_tables_share_a_graph() -> None:
    """Names are not part of what a rank does; another number of rows is."""
    alike = pk.DLRM(batch=64, rows=[1000] * 8, dim=16).graphs(8)
    assert len({id(graph) for graph in alike}) == 1
    one_is_larger = pk.DLRM(batch=64, rows=[1000] * 7 + [2000], dim=16).graphs(8)
    assert [graph.tables[0].rows for graph in one_is_larger] == [1000] * 7 + [2000]
    assert len({id(graph) for graph in one_is_larger}) == 2


def test_unlike_tables_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks with a table each: one record. Copies that differ would be reduced in other buckets,
    and other columns are other operations."""
    records = []
    record_rank = dlrm._record_rank

    def count_record(*arguments: object) -> object:
        records.append(arguments)
        return record_rank(*arguments)

    monkeypatch.setattr(dlrm, "_record_rank", count_record)
    pk.DLRM(batch=6400, rows=list(range(1000, 1064)), dim=16).graphs(64)
    assert len(records) == 1
    records.clear()
    plan = pk.Plan.from_owners([0, Placement("column_wise", (1, 2), (4, 12)), 3], ranks=4)
    pk.DLRM(batch=6400, rows=[1000, 2000, 3000], dim=16).graphs(4, plan)
    assert len(records) == 3  # ranks 0 and 3 together; 4 columns; 12 columns


def test_4096_ranks_are_one_group() -> None:
    """Each rank had a graph of its own when names counted: 40 s and 9 GB."""
    graphs = pk.DLRM(batch=65536, rows=[1_000_003] * 4096).graphs(4096)
    (group,) = group_identical_ranks(graphs, 4096, {})
    assert group.ranks == tuple(range(4096))


def test_an_exchange_of_its_own_runs_beside_reductions() -> None:
    """The same operations on two communicators of all ranks; the iteration is no longer, and on many
    nodes shorter: gradients of rows wait for no reduction."""
    settings = {"batch": 65536, "rows": [100_000] * 64, "overlap": True, "dtype": "fp16"}
    shared = pk.DLRM(**settings)
    separate = pk.DLRM(**settings, separate_exchange=True)
    [one], [other] = ({*model.graphs(64)} for model in (shared, separate))
    everyone = tuple(range(64))
    assert one.groups == (everyone,) and other.groups == (everyone, everyone)
    assert one.labels == other.labels
    names = [other.labels[position].name for position in other.collectives]
    groups = other.features.group[other.collectives].tolist()
    assert {*zip(names, groups, strict=True)} == {("all_to_all", 1.0), ("all_reduce", 0.0)}
    cluster = pk.load_platform("h100-sxm-8x8")
    with keep_quiet():
        together = pk.predict(shared, cluster, ranks=64)
        beside = pk.predict(separate, cluster, ranks=64)
    assert beside.time < together.time


def test_grouped_gradients_are_reduced_at_once_in_the_format_of_products() -> None:
    """All MLP weights and the copied table, of 2 B a number, although the table is in fp32: 13 x 16 +
    16 and 32 x 1 + 1 of the MLPs, 100 x 16 of the copy."""
    settings = {"batch": 64, "rows": [100, 1000], "dim": 16, "bottom": (), "top": ()}
    plan = pk.Plan.from_owners([Placement("data_parallel", (0, 1)), 0], ranks=2)
    model = pk.DLRM(
        **settings,
        interaction="cross",
        cross=(1, 4),
        features=13,
        embedding="fused",
        dtype="fp16",
        table_dtype="fp32",
        overlap=True,
        reduction="grouped",
    )
    graph = model.graphs(2, plan, accelerator=True)[0]
    reductions = [
        graph[position]
        for position in graph.collectives
        if graph.labels[position].name == "all_reduce"
    ]
    weights = 13 * 16 + 16 + (2 * 48 * 4 + 48) + 48 + 1 + 100 * 16
    assert [operation.features["nbytes"] for operation in reductions] == [2 * weights]


def test_delayed_weight_gradients_run_while_gradients_of_rows_are_exchanged() -> None:
    """The same kernels: all products of weights (`tn`) of the top MLP come after the exchange is
    launched, and those of its operands (`nn`) before."""
    settings = {"batch": 64, "rows": [1000] * 2, "dim": 16, "dtype": "fp16", "overlap": True}
    usual, delayed = (
        pk.DLRM(**settings, delay_weights=delay).graphs(2, accelerator=True)[0]
        for delay in (False, True)
    )
    assert sorted(usual.labels) == sorted(delayed.labels)
    assert usual.column("flops").sum() == delayed.column("flops").sum()

    def place(graph: object, name: str, variant: str = "") -> list[int]:
        return [
            position
            for position, label in enumerate(graph.labels)  # type: ignore[attr-defined]
            if (label.name, label.phase) == (name, "backward") and variant in ("", label.variant)
        ]

    [launch] = place(delayed, "all_to_all")
    products = [p for p in place(delayed, "mm", "tn") if delayed.labels[p].module == "top"]
    assert products and min(products) > launch
    assert all(p < launch for p in place(delayed, "mm", "nn") if delayed.labels[p].module == "top")
    [launch] = place(usual, "all_to_all")
    assert min(place(usual, "mm", "tn")) < launch
    with pytest.raises(ValueError, match="delay_weights is True and mixed, too"):
        pk.DLRM(batch=64, mixed=True, dtype="fp16", delay_weights=True)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weight_gradients_of_sharded_mlps_are_not_delayed(zero: int) -> None:
    """The gradients of a layer are reduced as soon as they are computed, so they have to be there."""
    plan = replace(pk.Plan.from_owners([0, 1], ranks=2), mlps=Strategy(dp=2, zero=zero))
    model = pk.DLRM(batch=64, rows=[1000] * 2, dim=16, delay_weights=True)
    with pytest.raises(ValueError, match=f"delay_weights is True and mlps has zero {zero}"):
        model.graphs(2, plan)
    assert model.graphs(2, replace(plan, mlps=Strategy(dp=2)))


def test_columns_that_are_symbolic_have_stand_ins_too() -> None:
    """Without one, their number would be looked up among the sizes of the table."""
    dim = Expressions().open(OpenSize(("dim",)))
    tables = [alter(pk.EmbeddingTable(rows, 16), {"dim": dim}) for rows in (1000, 9000)]
    stand_ins = StandIns()
    opened = stand_ins.open_table(tables[0])
    weights = opened.rows * opened.dim
    texts = [str(stand_ins.find_values([opened], [table])[weights.number]) for table in tables]
    assert texts == ["dim * 1000", "dim * 9000"]
