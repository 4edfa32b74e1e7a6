"""Which ranks meet, which are alike, and what their collectives take."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.gallery import load_platform
from perfkit.platform import Platform
from perfkit.prediction.communicators import cast_ranks, find_peers, time_collectives
from perfkit.prediction.result import predict
from perfkit.workloads.graph import FEATURES, Graph

H100 = load_platform("h100-sxm-8x4")
MIB = 2.0**20


def make_graph(
    *operations: tuple[str, float] | tuple[str, float, int], groups=(), ranks=1, waits=None, **more
) -> Graph:
    """Elementwise operations of so many MiB, and collectives of so many MiB on a communicator."""
    labels, features, accesses = [], np.zeros((len(operations), len(FEATURES))), []
    for index, (name, size, *group) in enumerate(operations):
        collective = bool(group)
        labels.append((name, "collective" if collective else "elementwise", name, "backward", "net"))
        features[index, FEATURES.index("nbytes")] = size * MIB
        features[index, FEATURES.index("elements")] = size * MIB / 4
        features[index, FEATURES.index("group")] = group[0] if group else 0
        features[index, [FEATURES.index("launches"), FEATURES.index("calls")]] = 1
        accesses.append((index, index, size * MIB, 1))
    rows = None if waits is None else np.array(waits)
    return Graph(tuple(labels), features, np.array(accesses), groups=groups, ranks=ranks, waits=rows, **more)


def quietly(*args: object, **kwargs: object):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return predict(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "rank", "peers"),
    [
        ((0, 1, 2, 3), 2, (0, 1, 2, 3)),
        ((0, 1, 2, 3), 11, (8, 9, 10, 11)),
        ((0, 2, 4, 6), 3, (1, 3, 5, 7)),
        ((1, 9), 12, (4, 12)),
        ((3,), 5, (5,)),
        ((0, 3, 4), 4, (0, 3, 4)),
    ],
)
def test_ranks_have_the_same_peers_in_a_mesh(group: tuple[int, ...], rank: int, peers: tuple[int, ...]) -> None:
    assert find_peers(group, rank) == peers


def test_peers_that_cannot_be_known_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups has \(0, 3, 4\), which are not evenly spaced.*one graph for each"):
        find_peers((0, 3, 4), 1)


def test_all_alike_is_one() -> None:
    graph = make_graph(("add", 1), ("all_reduce", 4, 0), groups=((0, 1), (0, 2)), ranks=4)
    cast = cast_ranks([graph], 4, {})
    assert cast.stands == ((0, 1, 2, 3),)
    assert cast.name_communicators(0) == [0]


def test_a_straggler_splits_only_whom_it_meets() -> None:
    """Pairs (0, 1), (2, 3), ...: with rank 3 slow, its peer 2 is another kind, and all others are alike."""
    graph = make_graph(("add", 1), ("all_reduce", 4, 0), groups=((0, 1),), ranks=8)
    cast = cast_ranks([graph], 8, {3: 2.0})
    assert cast.stands == ((0, 1, 4, 5, 6, 7), (2,), (3,))
    assert cast.slowdowns == (1.0, 1.0, 2.0)
    keys = [cast.name_communicators(number)[0] for number in range(3)]
    assert keys[0] != keys[1] == keys[2]


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.integers(0, 7), st.sampled_from([1.5, 3.0]), max_size=3), st.booleans())
def test_kinds_of_ranks_take_as_long_as_all_ranks(slowdown: dict[int, float], overlap: bool) -> None:
    """Tensor-parallel pairs, data-parallel fours; each rank with a graph of its own cannot be thought alike."""
    operations = [("add", 50), ("all_reduce", 64, 0), ("add", 80), ("all_reduce", 128, 1), ("add", 30), ("add", 5)]
    waits = [(2, 0), (5, 1)] if overlap else None
    mesh = {"groups": ((0, 1), (0, 2, 4, 6)), "ranks": 8, "waits": waits}
    graph = make_graph(*operations, **mesh)
    groups = [tuple(find_peers(group, rank) for group in graph.groups) for rank in range(8)]
    one = quietly(graph, H100, slowdown=slowdown)
    each = quietly([replace(graph, groups=own) for own in groups], H100, slowdown=slowdown)
    assert len(each._graphs) == 8
    assert len(one._graphs) <= 8
    assert one.time == pytest.approx(each.time, rel=1e-12)
    for column in ("total_s", "exposed_s", "waiting_s"):
        mine, theirs = (
            {r: value for ranks, value in zip(p._stands, p.communication()[column], strict=True) for r in ranks}
            for p in (one, each)
        )
        assert [mine[r] for r in range(8)] == pytest.approx([theirs[r] for r in range(8)], rel=1e-9, abs=1e-12)


def test_a_group_is_priced_where_it_lies() -> None:
    """Four ranks of one node, four ranks of four nodes, two on each of two nodes, two whole nodes."""
    places = {"inside": (0, 1, 2, 3), "rail": (0, 8, 16, 24), "half": (0, 1, 8, 9), "whole": tuple(range(16))}
    times = {}
    for name, group in places.items():
        graph = make_graph(("all_reduce", 256, 0), groups=(group,), ranks=32)
        (times[name],), _ = time_collectives(cast_ranks([graph], 32, {}), H100)
    assert times["inside"][0] == pytest.approx(float(H100.collective_time("all_reduce", 256 * MIB, ranks=4)))
    rail = H100.collective_time("all_reduce", 256 * MIB, ranks=4, algorithm="rail")
    assert times["rail"][0] == pytest.approx(float(rail))
    assert times["whole"][0] == pytest.approx(float(H100.collective_time("all_reduce", 256 * MIB, ranks=16)))
    assert times["inside"][0] < times["half"][0] < times["rail"][0], "two links from a node take half as long"


def test_the_longest_part_of_an_uneven_exchange_counts() -> None:
    graphs = [make_graph(("add", 1), ("all_to_all", size, 0), ranks=2) for size in (1, 64)]
    uneven, even = quietly(graphs, H100), quietly(graphs[1], H100)
    assert uneven.communication()["total_s"].to_list() == pytest.approx([even.communication()["total_s"][0]] * 2)


def test_a_captured_graph_is_predicted_like_its_workload(toy: Platform) -> None:
    from perfkit.workloads.transformer import Transformer

    model = Transformer.bert(batch=4, layers=2, hidden=64, heads=4, vocabulary=500, positions=64, sequence=32)
    for ranks in (1, 2):
        graph = replace(model.graphs(ranks)[0], ranks=ranks, family=model.family)
        mine, theirs = quietly(graph, toy), quietly(model, toy, ranks=ranks)
        assert (mine.time, mine.latency, mine.parts) == (theirs.time, theirs.latency, theirs.parts)
        assert mine.ranks == ranks
        assert f"{len(graph)} operations on {ranks} of 2 ranks" in repr(mine)


def test_overlap_is_seen_and_counted() -> None:
    operations = [("add", 500), ("all_reduce", 64, 0), ("add", 2000), ("add", 5)]
    hidden = quietly(make_graph(*operations, ranks=8, waits=[(3, 0)]), H100)
    blocking = quietly(make_graph(*operations, ranks=8), H100)
    (row,), (other,) = (p.communication().to_dicts() for p in (hidden, blocking))
    assert (row["rank"], row["ranks"]) == (0, 8)
    assert row["exposed_s"] == pytest.approx(0, abs=1e-12)
    assert row["overlapped_s"] == pytest.approx(other["exposed_s"]) == pytest.approx(row["total_s"])
    assert other["overlapped_s"] == pytest.approx(0, abs=1e-12)
    assert blocking.time - hidden.time == pytest.approx(other["total_s"], rel=1e-6)
    assert sum(seconds for _, seconds in hidden.parts.values()) == pytest.approx(hidden.time)


def test_a_core_shared_with_collectives_hides_what_was_measured(toy: Platform) -> None:
    from perfkit.fitting import Fit

    graph = make_graph(("add", 4), ("all_reduce", 1, 0), ("add", 64), ("add", 4), ranks=2, waits=[(3, 0)])
    times = {}
    for share in (0.0, 0.5, 1.0):
        fit = Fit("overlap", {"contention": share}, units={"contention": "-"}, kind="assumed", source="test")
        found = quietly(graph, replace(toy, context={"overlap": fit}))
        times[share] = found.time
        assert sum(seconds for _, seconds in found.parts.values()) == pytest.approx(found.time)
        row = found.communication().row(0, named=True)
        assert row["exposed_s"] == pytest.approx(share * row["total_s"])
    blocking = quietly(replace(graph, waits=None), toy).time
    assert times[0.0] < times[0.5] < times[1.0] == pytest.approx(blocking)
    assert quietly(graph, toy).time == pytest.approx(blocking), "not measured: hides nothing"


@pytest.mark.parametrize(
    ("workload", "settings_", "message"),
    [
        ([make_graph(("add", 1), ranks=4)] * 2, {}, "holds 2 graphs of 4 ranks; it must be one graph for all ranks"),
        (make_graph(("add", 1), ranks=4), {"ranks": 2}, "1 graphs of 4 ranks and ranks is 2; it must be"),
        ([make_graph(("add", 1), ranks=r) for r in (1, 2)], {}, "2 graphs of 1, 2 ranks"),
        (make_graph(("add", 1), ranks=64), {}, "ranks is 64; platform 'h100-sxm-8x4' has 32"),
        (make_graph(("add", 1), ranks=4), {"slowdown": {4: 2.0}}, "slowdown names rank 4; the ranks are 0 to 3"),
        (make_graph(("add", 1), ranks=4), {"slowdown": {1: 0}}, "slowdown of rank 1 is 0; it must be"),
        (make_graph(("add", 1), dtype="int4"), {}, "dtype is 'int4'"),
        ([], {}, r"workload is \[\]; it must be"),
    ],
)
def test_graphs_that_do_not_belong_together_are_refused(workload, settings_, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quietly(workload, H100, **settings_)
