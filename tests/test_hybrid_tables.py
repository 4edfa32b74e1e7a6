"""Tables whose frequent rows are copied to all ranks while the others are exchanged, products with
epilogues, and gradients that are reduced where they are written."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.distributions import (
    Distribution,
    Part,
    ReuseHistogram,
    Uniform,
    Zipf,
    count_frequent_rows,
    unique_rows,
)
from perfkit.models.embedding import frequent_lookups
from perfkit.platform.estimates import keep_quiet
from perfkit.workloads.dlrm import list_local_tables
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement_kinds import HYBRID, KINDS
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tables import EmbeddingTable

RANKS = (0, 1, 2, 3)


def hybrid(frequent: int) -> pk.Placement:
    return pk.Placement("hybrid", RANKS, frequent=frequent)


def place(*owners: int | pk.Placement) -> pk.Plan:
    return pk.Plan.from_owners(owners, ranks=4)


def model(**settings: Any) -> pk.DLRM:
    """Two tables of 800 and 100 rows, of which a sample looks up one each, by default uniformly."""
    given = {"rows": [800, 100], "dim": 16, "batch": 64, "pooling": 1, "embedding": "fused"}
    return pk.DLRM(**{**given, **settings})


def collect(graph: Graph, kind: str, column: str) -> list[float]:
    """A column of the operations of a class."""
    values = graph.column(column)
    return [float(values[i]) for i, label in enumerate(graph.labels) if label.kind == kind]


# -- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frequent", [1, 2, 7, 500, 999])
@pytest.mark.parametrize(
    ("law", "weights"),
    [
        (Zipf(1000, 1.0), 1 / np.arange(1.0, 1001)),
        (Zipf(1000, 0.95, shift=2.0), np.arange(3.0, 1003) ** -0.95),
        (
            Zipf(1000, 1.0, heavy_hitters=(0.3, 0.1)),
            np.array([0.3, 0.1, *(0.6 / np.arange(3, 1001) / np.sum(1 / np.arange(3, 1001)))]),
        ),
        (Uniform(1000), np.ones(1000)),
    ],
    ids=["zipf", "shift", "hitters", "uniform"],
)
def test_a_split_law_is_that_of_its_rows(
    law: Distribution, weights: np.ndarray, frequent: int
) -> None:
    """Share and distinct rows of 300 lookups of each part, from the probability of every row."""
    probabilities = weights / weights.sum()
    parts = law.split(frequent)
    assert parts.frequent is not None and parts.others is not None
    assert (parts.frequent.rows, parts.others.rows) == (frequent, 1000 - frequent)
    assert parts.share == pytest.approx(probabilities[:frequent].sum(), rel=1e-6)
    for part, of_rows in (
        (parts.frequent, probabilities[:frequent]),
        (parts.others, probabilities[frequent:]),
    ):
        exact = np.sum(1 - (1 - of_rows / of_rows.sum()) ** 300)
        assert float(unique_rows(part, 300)) == pytest.approx(exact, rel=1e-3)


def test_a_recorded_histogram_is_split_from_its_most_used_rows_on() -> None:
    """Ten rows of 10 lookups each, 50 of 2 and 100 of 1, among 1,000: the first 35 are all of the
    first and half of the others."""
    counts = (100.0, 50.0, 0.0, 0.0, 10.0) + (0.0,) * 12
    law = ReuseHistogram(counts, 300.0, 1000)
    of_ten = float(law.accesses()[4]) * 10
    parts = law.split(35)
    assert parts.share == pytest.approx((of_ten + 25 * 2) / (of_ten + 200))
    assert isinstance(parts.frequent, ReuseHistogram) and isinstance(parts.others, ReuseHistogram)
    assert parts.frequent.counts[:5] == (0, 25, 0, 0, 10)
    assert parts.others.counts[:5] == (100, 25, 0, 0, 0)
    # rows that were seen once or never are alike: 940, of which 470 have half of their lookups
    later = law.split(60 + 470)
    assert later.share == pytest.approx((of_ten + 150) / (of_ten + 200))
    never = ReuseHistogram((0.0, 50.0) + (0.0,) * 15, 100.0, 1000).split(50)
    assert never.share == 1 and never.others == Uniform(950)


def test_a_part_is_split_as_its_table() -> None:
    table = Zipf(10_000, 1.1)
    parts = Part(table, 1000).split(50)
    of_table = table.split(500)
    assert parts.share == of_table.share
    assert parts.frequent == Part(of_table.frequent, 50)  # type: ignore[arg-type]


def test_all_rows_or_none_are_frequent() -> None:
    law = Zipf(100, 1.0)
    assert law.split(0) == (0.0, None, law)
    assert law.split(100) == (1.0, law, None)
    with pytest.raises(ValueError, match="frequent is 101; it must be"):
        law.split(101)


def test_frequent_rows_are_those_with_enough_lookups() -> None:
    """Of 1,000 rows with 1 / rank, whose inverses add up to 7.4855, 1,000 lookups give row r 133.6 / r."""
    for threshold, rows in ((133.5, 1), (133.7, 0), (13.0, 10), (1.0, 133), (0.0, 1000)):
        assert count_frequent_rows(Zipf(1000, 1.0), 1000, threshold) == rows
    assert count_frequent_rows(Uniform(1000), 1000, 1.0) == 1000
    assert count_frequent_rows(Uniform(1000), 1000, 1.01) == 0
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match=r"lookups is .*; it must be"):
            count_frequent_rows(Uniform(1000), wrong, 1.0)
        with pytest.raises(ValueError, match=r"threshold is .*; it must be"):
            count_frequent_rows(Uniform(1000), 1000, wrong)


def test_the_rule_of_hugectr() -> None:
    """8 nodes x 8 / 7 x 190 / 130, and with half of the efficiency half of it."""
    rule = {"all_to_all": 190e9, "all_reduce": 130e9}
    assert frequent_lookups(8, **rule) == pytest.approx(64 / 7 * 19 / 13)
    assert frequent_lookups(14, **rule, efficiency=0.5) == pytest.approx(98 / 13 * 19 / 13)
    with pytest.raises(ValueError):
        frequent_lookups(1, **rule)


# -- what ranks store, look up and send ----------------------------------------------------------


def test_what_a_rank_stores_of_a_hybrid_table() -> None:
    """400 of 800 uniform rows have half of the lookups; each of 4 ranks has a quarter of the others,
    and all 100 rows of the other table."""
    parts = list_local_tables(place(hybrid(400), hybrid(100)), model().tables)
    for local in parts:
        frequent, whole = local.hybrid.frequent
        assert (frequent.rows, frequent.pooling, frequent.law) == (400, 0.5, Uniform(400))
        assert (whole.rows, whole.pooling) == (100, 1.0)
        assert local.hybrid.frequent_columns == (8, 16)
        [other] = local.hybrid.others
        assert (other.rows, other.pooling, other.law) == (100, 0.125, Uniform(400))
        assert (local.hybrid.sent_columns, local.largest_width, local.widths) == (2, 2.0, (2,) * 4)
        assert local.of_whole_batch == (other,)
        assert local.of_own_samples == (frequent, whole)


def test_only_samples_with_an_infrequent_row_send_one() -> None:
    """Of 64 samples 32 look up an infrequent row of the first table, 8 on each rank; 16 samples of a
    rank find 8 frequent rows, and 16 in the copy of the second table."""
    [graph] = {*model(dtype="fp16", table_dtype="fp32").graphs(4, place(hybrid(400), hybrid(100)))}
    assert collect(graph, "embedding_forward", "lookups") == [8, 8, 16]
    assert collect(graph, "embedding_forward", "elements") == [8 * 16, 8 * 16, 16 * 16]
    assert collect(graph, "embedding_backward", "lookups") == [8, 16, 8]
    variants = [lab.variant for lab in graph.labels if lab.kind == "embedding_backward"]
    assert variants == ["dense", "dense", "fused"]
    sent = [
        float(graph.column("nbytes")[i])
        for i in graph.collectives
        if graph.labels[i].name == "all_to_all"
    ]
    assert sent == [64 * 2 * 2] * 2, "2 columns of 64 samples in 2 B, both ways"
    # gradients of copies are as large as these, and reduced with those of the MLPs
    weights = graph.parameters - 100 * 16
    reduced = graph.column("nbytes")[[lab.name == "all_reduce" for lab in graph.labels]]
    assert reduced.tolist() == [2.0 * weights]
    assert [t.rows for t in graph.tables] == [100, 400, 100]


def test_more_frequent_rows_exchange_less_and_reduce_more() -> None:
    sent, reduced = [], []
    for frequent in (0, 10, 100, 700):
        plan = place(hybrid(frequent), 1)
        graph = model(exponent=1.05).graphs(4, plan)[0]
        nbytes = dict.fromkeys(("all_to_all", "all_reduce"), 0.0)
        for position in graph.collectives:
            nbytes[graph.labels[position].name] += float(graph.column("nbytes")[position])
        sent.append(nbytes["all_to_all"])
        reduced.append(nbytes["all_reduce"])
    assert sent == sorted(sent, reverse=True) and len({*sent}) == 4
    assert np.diff(reduced).tolist() == [4 * 16 * rows for rows in (10, 90, 600)]


@pytest.mark.parametrize(
    "settings",
    [
        {"embedding": "separate"},
        {},
        {"embedding": "exact", "optimizer": "adagrad"},
        {"overlap": True, "reduction": "grouped", "epilogues": True, "dtype": "fp16"},
    ],
    ids=["separate", "fused", "exact", "hugectr"],
)
def test_the_ends_are_copies_and_splits_over_all_ranks(settings: dict[str, Any]) -> None:
    """With all rows frequent it is a copied table, to the last digit. With none it is exchanged as a
    split by columns over all ranks: the same bytes, of as many numbers."""
    given = model(batch=65_536, rows=[80_000, 10_000], exponent=0.95, **settings)
    plans = {
        "all": place(hybrid(80_000), hybrid(10_000)),
        "copied": place(*[pk.Placement("data_parallel", RANKS)] * 2),
        "none": place(hybrid(0), hybrid(0)),
        "columns": place(*[pk.Placement("column_wise", RANKS)] * 2),
    }
    with keep_quiet():
        steps = {
            name: pk.predict(given, "h100-sxm-8", ranks=4, plan=plan)
            for name, plan in plans.items()
        }
    assert steps["all"].time == steps["copied"].time
    assert steps["all"].memory().total == steps["copied"].memory().total
    graphs = {name: given.graphs(4, plan)[0] for name, plan in plans.items()}
    for column in ("elements", "nbytes"):
        for name, other in (("all", "copied"), ("none", "columns")):
            ours, theirs = (
                sorted(collect(graphs[which], "collective", column)) for which in (name, other)
            )
            assert ours == theirs
        forward = [
            collect(graphs[which], "embedding_forward", column) for which in ("none", "columns")
        ]
        assert forward[0] == forward[1]
    # a rank reads 64 B of each row of a split, here 16 B, and then lookups of all samples
    assert steps["none"].time <= steps["columns"].time * (1 + 1e-9)


def test_ranks_of_hybrid_tables_share_a_graph() -> None:
    """Blocks of infrequent rows differ by one row, and columns that are sent by one: one border
    between ranks for each of these tables, and one for the columns."""
    given = pk.DLRM("dlrm-mlperf", batch=6400, exponent=0.95)
    everyone = tuple(range(64))
    owners = [pk.Placement("hybrid", everyone, frequent=min(t.rows, 500)) for t in given.tables]
    graphs = given.graphs(64, pk.Plan.from_owners(owners, ranks=64))
    partly_copied = sum(t.rows > 500 for t in given.tables)
    assert len({*graphs}) <= partly_copied + 2
    rows = sum(t.rows for t in given.tables)
    copied = sum(min(t.rows, 500) for t in given.tables)
    stored = sum(t.rows for graph in graphs for t in graph.tables)
    assert stored == rows - copied + 64 * copied


def test_frequent_rows_of_a_batch_that_is_open_are_swept() -> None:
    """Recorded once with a symbolic batch, as predictions record it."""
    plan = place(hybrid(100), 2)
    with keep_quiet():
        small, large = (
            pk.predict(model(batch=batch, exponent=1.0), "h100-sxm-8", ranks=4, plan=plan).time
            for batch in (4096, 65_536)
        )
    assert small < large


# -- plans ---------------------------------------------------------------------------------------


def test_a_hybrid_plan_survives_its_file() -> None:
    plan = place(hybrid(400), 1)
    entry = json.loads(plan.to_json())["tables"][0]
    assert entry == {
        "name": "table 0",
        "kind": "hybrid",
        "ranks": [0, 1, 2, 3],
        "frequent": 400,
    }
    assert pk.Plan.from_json(plan.to_json()) == plan
    assert "frequent" not in json.loads(plan.to_json())["tables"][1]
    assert repr(plan.placements[0]).endswith("columns=(), frequent=400)")


def test_shards_of_a_hybrid_table() -> None:
    """Three frequent rows on each rank, and 2, 2, 2 and 1 of the other seven."""
    shards = hybrid(3).cut(EmbeddingTable(10, 8))
    assert [(s.rank, s.first_row, s.rows) for s in shards] == [
        (0, 0, 3),
        (0, 3, 2),
        (1, 0, 3),
        (1, 5, 2),
        (2, 0, 3),
        (2, 7, 2),
        (3, 0, 3),
        (3, 9, 1),
    ]
    assert [s.rows for s in hybrid(8).cut(EmbeddingTable(10, 8))] == [8, 1, 8, 1, 8, 8]
    assert [s.rows for s in hybrid(0).cut(EmbeddingTable(8, 8))] == [2] * 4


def test_what_is_no_hybrid_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="frequent is missing of a hybrid placement; give"):
        pk.Placement("hybrid", RANKS)
    with pytest.raises(
        ValueError, match="frequent is 3 with a row_wise placement; give it to hybrid"
    ):
        pk.Placement("row_wise", RANKS, frequent=3)
    with pytest.raises(ValueError, match="frequent is -1; it must be"):
        hybrid(-1)
    with pytest.raises(ValueError, match="a hybrid table is on 1 rank; frequent rows are copied"):
        pk.Placement("hybrid", (0,), frequent=3)
    with pytest.raises(ValueError, match="hybrid on 2 of 4 ranks; it must name all"):
        place(pk.Placement("hybrid", (0, 1), frequent=3))
    with pytest.raises(ValueError, match="'table 0' has 800 rows; its hybrid placement copies 801"):
        model().graphs(4, place(hybrid(801), 1))
    with pytest.raises(
        ValueError, match="'table 0' has pooling 2; a hybrid placement is for tables"
    ):
        model(pooling=2).graphs(4, place(hybrid(8), 1))
    with pytest.raises(ValueError, match=r"rows of 'table 0' is .* takes one number; predict"):
        model(rows=[np.array([800, 900]), 100]).structure(4, place(hybrid(8), 1))


def test_searches_and_torchrec_do_not_know_hybrid_tables() -> None:
    plan = place(hybrid(400), 1)
    given = model()
    with pytest.raises(
        ValueError, match=r"perfkit.predict prices that alone; take one of table_wise"
    ):
        pk.price_plan(given, "h100-sxm-8", plan)
    with pytest.raises(ValueError, match="is hybrid, which TorchRec does not have"):
        plan.to_torchrec(given.tables, module="ebc")
    with pytest.raises(ValueError, match="forbidden kind is 'hybrid'"):
        pk.shard(given, "h100-sxm-8", ranks=4, forbid="hybrid")
    assert HYBRID.name not in KINDS
    assert not HYBRID.is_copied and HYBRID.is_everywhere


# -- products with epilogues ---------------------------------------------------------------------


def test_epilogues_leave_the_kernels_that_they_compute() -> None:
    """Two layers below and three above: no rectifier forward; backward those of the last layers alone
    (none above) with the sums of their gradients; all products stay."""
    settings = {"bottom": (32, 16), "top": (64, 32, 1), "overlap": True, "dtype": "fp16"}
    plain, fused = (
        model(**settings, epilogues=on).graphs(2, pk.Plan.round_robin(2, ranks=2))[0]
        for on in (False, True)
    )
    counts = [Counter(label.name for label in graph.labels) for graph in (plain, fused)]
    gone = counts[0] - counts[1]
    assert gone == {"relu": 4, "threshold_backward": 3, "sum": 3}
    assert not counts[1] - counts[0]
    assert counts[1]["threshold_backward"] == 1 and counts[1]["sum"] == 2
    assert fused.column("flops").sum() == plain.column("flops").sum()
    # gradients of all weights are reduced in both
    for graph in (plain, fused):
        reduced = graph.column("nbytes")[[lab.name == "all_reduce" for lab in graph.labels]].sum()
        tables = sum(t.rows * t.dim for t in graph.tables)
        assert reduced == 2 * (graph.parameters - tables)


@pytest.mark.parametrize("delays", [False, True])
def test_gradients_of_biases_come_with_the_product_above(delays: bool) -> None:
    """The product of the operand's gradient writes it, and as many numbers as the layer below has."""
    settings = {"bottom": (32, 16), "top": (64, 1), "overlap": True, "delay_weights": delays}
    graph = model(**settings, epilogues=True).graphs(2, pk.Plan.round_robin(2, ranks=2))[0]
    written: dict[int, list[float]] = {}
    for access in graph.accesses:
        label = graph.labels[access.operation]
        if access.is_write and (label.name, label.variant) == ("mm", "nn"):
            written.setdefault(access.operation, []).append(access.nbytes)
    inputs = 16 + 3  # the dense vector, and products of three vectors
    assert [*written.values()] == [[32 * 64 * 4, 64 * 4], [32 * inputs * 4], [32 * 32 * 4, 32 * 4]]


def test_epilogues_make_a_step_faster_and_nothing_else_moves() -> None:
    given = pk.DLRM("dlrm-mlperf", batch=55_296, dtype="fp16", embedding="fused", overlap=True)
    assert not given.epilogues
    with keep_quiet():
        plain = pk.predict(given, "h100-sxm-8", ranks=8)
        fused = pk.predict(
            pk.DLRM(
                "dlrm-mlperf",
                batch=55_296,
                dtype="fp16",
                embedding="fused",
                overlap=True,
                epilogues=True,
            ),
            "h100-sxm-8",
            ranks=8,
        )
    assert fused.time < plain.time
    products = [step.breakdown().filter(kind="gemm")["time_s"].to_list() for step in (plain, fused)]
    assert products[0] == pytest.approx(products[1], rel=0.02)


def test_epilogues_are_refused_where_no_product_can_have_them() -> None:
    with pytest.raises(ValueError, match="epilogues is True and mixed, too, which casts between"):
        pk.DLRM(batch=64, dtype="fp16", mixed=True, epilogues=True)
    with pytest.raises(ValueError, match="epilogues is 1; "):
        pk.DLRM(batch=64, epilogues=1)  # type: ignore[arg-type]
    plan = pk.Plan.from_owners([0, 1], ranks=2)
    for mlps in (Strategy(tp=2, dp=1), Strategy(dp=2, zero=1)):
        with pytest.raises(ValueError, match=r"epilogues is True and mlps is .* take tp=1"):
            model(epilogues=True).graphs(2, replace(plan, mlps=mlps))
    assert model(epilogues=True).graphs(2, replace(plan, mlps=Strategy(dp=2)))


# -- gradients that are reduced where they are written -------------------------------------------


def test_grouped_gradients_are_not_copied_but_for_wider_ones() -> None:
    """One kernel narrows those of both copies, and the update reads them narrow; nothing is copied
    back."""
    plan = place(hybrid(400), pk.Placement("data_parallel", RANKS))
    given = model(dtype="fp16", table_dtype="fp32", overlap=True, reduction="grouped")
    graph = given.graphs(4, plan, accelerator=True)[0]
    names = Counter(label.name for label in graph.labels)
    assert (names["mul"], names["copy_"], names["all_reduce"]) == (1 + 1, 0, 1), "and the loss"
    [narrow] = [i for i, lab in enumerate(graph.labels) if lab.variant == "mul_scalar"]
    assert graph.column("elements")[narrow] == (400 + 100) * 16
    nbytes = [access.nbytes for access in graph.accesses if access.operation == narrow]
    assert nbytes == [100 * 64, 400 * 64, 100 * 32, 400 * 32]
    same = model(overlap=True, reduction="grouped").graphs(4, plan, accelerator=True)[0]
    assert not [lab for lab in same.labels if lab.variant == "mul_scalar"]
    # the update waits for the reduction, and reads what it has written
    assert same.waits is not None
    [reduction] = [i for i in same.collectives if same.labels[i].name == "all_reduce"]
    first_update = [label.phase for label in same.labels].index("update")
    waits = dict(zip(same.waits.collective.tolist(), same.waits.operation.tolist(), strict=True))
    assert waits[same.collectives.tolist().index(reduction)] == first_update
