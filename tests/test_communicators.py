"""Which ranks meet, which are alike, and what their collectives take."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.platform.gallery import load_platform
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.ranks import find_peers, group_identical_ranks, time_collectives
from perfkit.workloads.columns import Accesses, Features, OperationSizes, Wait, Waits
from perfkit.workloads.graph import Graph, Label

H100 = load_platform("h100-sxm-8x4")
MIB = 2.0**20

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")


def make_graph(
    *operations: tuple[str, float] | tuple[str, float, int], groups=(), ranks=1, waits=None
) -> Graph:
    """Elementwise operations of so many MiB, and collectives of so many MiB on a communicator."""
    labels, rows = [], []
    for name, size, *group in operations:
        kind = "collective" if group else "elementwise"
        labels.append(Label(name, kind, name, "backward", "net"))
        rows.append(OperationSizes(nbytes=MIB * size, elements=MIB * size / 4, group=sum(group)))
    accesses = Accesses.from_rows(
        [(index, index, MIB * size, 1) for index, (_, size, *_) in enumerate(operations)]
    )
    noted = None if waits is None else Waits.from_rows([Wait(*row) for row in waits])
    return Graph(
        tuple(labels),
        Features.from_rows(rows),
        accesses,
        groups=groups,
        ranks=ranks,
        waits=noted,
    )


def test_ranks_have_the_same_peers_in_a_mesh() -> None:
    for group, rank, peers in (
        ((0, 1, 2, 3), 2, (0, 1, 2, 3)),
        ((0, 1, 2, 3), 11, (8, 9, 10, 11)),
        ((0, 2, 4, 6), 3, (1, 3, 5, 7)),
        ((1, 9), 12, (4, 12)),
        ((3,), 5, (5,)),
        ((0, 3, 4), 4, (0, 3, 4)),
    ):
        assert tuple(find_peers(group, rank)) == peers


def test_a_straggler_splits_only_whom_it_meets() -> None:
    """Pairs (0, 1), (2, 3), ...: with rank 3 slow, its peer 2 is another kind, and all others are
    alike."""
    graph = make_graph(("add", 1), ("all_reduce", 4, 0), groups=((0, 1),), ranks=8)
    (alike,) = group_identical_ranks([replace(graph, name=str(rank)) for rank in range(8)], 8, {})
    assert (alike.ranks, alike.communicators) == (tuple(range(8)), [0])
    kinds = group_identical_ranks([graph], 8, {3: 2.0})
    assert [kind.ranks for kind in kinds] == [(0, 1, 4, 5, 6, 7), (2,), (3,)]
    assert [kind.slowdown for kind in kinds] == [1.0, 1.0, 2.0]
    keys = [kind.communicators[0] for kind in kinds]
    assert keys[0] != keys[1] == keys[2]


def test_ranks_of_one_content_are_one_kind_however_many_they_are() -> None:
    """8,192 graphs of two contents: every eighth rank does more, and waits for none of its node."""
    usual = [("add", 1), ("all_reduce", 4, 0)]
    other = [("add", 2), ("all_reduce", 4, 0)]
    graphs = [
        make_graph(*(usual if rank % 8 else other), groups=(tuple(range(8)),), ranks=8192)
        for rank in range(16)
    ]
    kinds = group_identical_ranks((graphs * 512)[:8192], 8192, {})
    assert [len(kind.ranks) for kind in kinds] == [1024, 7168]
    assert kinds[0].communicators == kinds[1].communicators
    different = replace(
        graphs[1], labels=(graphs[1].labels[0]._replace(name="mul"), graphs[1].labels[1])
    )
    assert len(group_identical_ranks([different, *graphs[1:8]], 8, {})) == 2


@given(st.dictionaries(st.integers(0, 7), st.sampled_from([1.5, 3.0]), max_size=3), st.booleans())
def test_kinds_of_ranks_take_as_long_as_all_ranks(
    slowdown: dict[int, float], overlap: bool
) -> None:
    """Tensor-parallel pairs, data-parallel fours; ranks whose modules bear different names are not
    alike."""
    operations = [
        ("add", 50),
        ("all_reduce", 64, 0),
        ("add", 80),
        ("all_reduce", 128, 1),
        ("add", 30),
        ("add", 5),
    ]
    waits = [(2, 0), (5, 1)] if overlap else None
    mesh = {"groups": ((0, 1), (0, 2, 4, 6)), "ranks": 8, "waits": waits}
    graph = make_graph(*operations, **mesh)
    graphs = [name_rank(graph, rank) for rank in range(8)]
    one = predict(graph, H100, slowdown=slowdown)
    each = predict(graphs, H100, slowdown=slowdown)
    assert len(each.communication()) == 8 >= len(one.communication())
    assert one.time == pytest.approx(each.time, rel=1e-12)
    kinds = group_identical_ranks([graph], 8, slowdown)
    for column in ("total_s", "exposed_s", "waiting_s"):
        of_kinds = one.communication()[column].to_list()
        by_rank = {}
        for kind, value in zip(kinds, of_kinds, strict=True):
            for rank in kind.ranks:
                by_rank[rank] = value
        expected = each.communication()[column].to_list()
        assert [by_rank[rank] for rank in range(8)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def name_rank(graph: Graph, rank: int) -> Graph:
    """The graph of one rank, with its own groups and with modules that bear its number."""
    groups = tuple(find_peers(group, rank) for group in graph.groups)
    labels = tuple(label._replace(module=f"rank {rank}") for label in graph.labels)
    return replace(graph, groups=groups, labels=labels)


def test_a_group_is_priced_where_it_lies() -> None:
    """Four ranks of one node, four ranks of four nodes, two on each of two nodes, two whole
    nodes."""
    places = {
        "inside": (0, 1, 2, 3),
        "rail": (0, 8, 16, 24),
        "half": (0, 1, 8, 9),
        "whole": tuple(range(16)),
    }
    times = {}
    for name, group in places.items():
        graph = make_graph(("all_reduce", 256, 0), groups=(group,), ranks=32)
        (times[name],), _ = time_collectives(group_identical_ranks([graph], 32, {}), H100)
    assert times["inside"][0] == pytest.approx(
        float(H100.collective_time("all_reduce", 256 * MIB, ranks=4))
    )
    rail = H100.collective_time("all_reduce", 256 * MIB, ranks=4, algorithm="rail")
    assert times["rail"][0] == pytest.approx(float(rail))
    assert times["whole"][0] == pytest.approx(
        float(H100.collective_time("all_reduce", 256 * MIB, ranks=16))
    )
    assert times["inside"][0] < times["half"][0] < times["rail"][0], (
        "two links from a node take half as long"
    )


def test_a_captured_graph_is_predicted_like_its_workload(toy: Platform) -> None:
    from perfkit.workloads.transformer import Transformer

    model = Transformer.bert(
        batch=4, layers=2, hidden=64, heads=4, vocabulary=500, positions=64, sequence=32
    )
    for ranks in (1, 2):
        graph = replace(model.graphs(ranks)[0], ranks=ranks, family=model.family)
        mine, theirs = predict(graph, toy), predict(model, toy, ranks=ranks)
        assert (mine.time, mine.latency, mine.parts) == (theirs.time, theirs.latency, theirs.parts)
        assert mine.ranks == ranks
        assert f"{len(graph)} operations on {ranks} of 2 ranks" in repr(mine)


def test_a_core_shared_with_collectives_hides_what_was_measured(toy: Platform) -> None:
    from perfkit.fitting import Overlap

    graph = make_graph(
        ("add", 4), ("all_reduce", 1, 0), ("add", 64), ("add", 4), ranks=2, waits=[(3, 0)]
    )
    times = {}
    for share in (0.0, 0.5, 1.0):
        fit = Overlap.build({"contention": share}, kind="assumed", source="test")
        found = predict(graph, replace(toy, context=Context(overlap=fit)))
        times[share] = found.time
        assert sum(seconds for _, seconds in found.parts.values()) == pytest.approx(found.time)
        row = found.communication().row(0, named=True)
        assert row["exposed_s"] == pytest.approx(share * row["total_s"])
        assert row["overlapped_s"] == pytest.approx((1 - share) * row["total_s"])
    blocking = predict(replace(graph, waits=None), toy).time
    assert times[0.0] < times[0.5] < times[1.0] == pytest.approx(blocking)
    assert predict(graph, toy).time == pytest.approx(blocking), "not measured: hides nothing"


@pytest.mark.parametrize(
    ("workload", "settings_", "message"),
    [
        (
            [make_graph(("add", 1), ranks=4), make_graph(("add", 1), ranks=4)],
            {},
            "holds 2 graphs of 4 ranks; it must be one graph for all ranks",
        ),
        (
            make_graph(("add", 1), ranks=4),
            {"ranks": 2},
            "1 graphs of 4 ranks and ranks is 2; it must be",
        ),
        (make_graph(("add", 1), ranks=64), {}, "ranks is 64; platform 'h100-sxm-8x4' has 32"),
        (
            make_graph(("add", 1), ranks=4),
            {"slowdown": {4: 2.0}},
            "slowdown names rank 4; the ranks are 0 to 3",
        ),
        (
            make_graph(("add", 1), ranks=4),
            {"slowdown": {1: 0}},
            "slowdown of rank 1 is 0; it must be",
        ),
        ([], {}, r"workload is \[\]; it must be"),
    ],
)
def test_graphs_that_do_not_belong_together_are_refused(workload, settings_, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(workload, H100, **settings_)
