"""Views of a timeline: idle times and modules that sum to the period, a critical path without gaps, a valid trace."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.prediction import accounts
from perfkit.prediction.result import predict
from perfkit.prediction.simulation import RankTimes, Timeline, simulate
from perfkit.prediction.trace import make_events
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import FEATURES, Graph

IDLE = ("busy_s", "stolen_s", "host_s", "communication_s", "waiting_s")
seconds = st.floats(0, 10, allow_subnormal=False).map(lambda value: round(value, 6))


def iteration(
    work: Sequence[float | str],
    *,
    overhead: float = 0.0,
    waits: Sequence[tuple[int, int]] | None = None,
    modules: Sequence[str] | None = None,
) -> tuple[Graph, RankTimes]:
    """Graph and times of operations of so many seconds; a text stands for a collective on a communicator, a to z."""
    n = len(work)
    at = [i for i, value in enumerate(work) if isinstance(value, str)]
    features = np.zeros((n, len(FEATURES)))
    features[at, FEATURES.index("group")] = [ord(str(work[i])) - ord("a") for i in at]
    features[:, FEATURES.index("nbytes")] = 64.0
    phases = ["forward" if i < n / 3 else "backward" if i < 2 * n / 3 else "update" for i in range(n)]
    paths = modules or [f"net.{('one', 'two')[i % 2]}.part" if i < 2 * n / 3 else "" for i in range(n)]
    labels = tuple(
        ("all_reduce", "collective", "all_reduce", phase, path)
        if i in at
        else ("add", "elementwise", "add", phase, path)
        for i, (phase, path) in enumerate(zip(phases, paths, strict=True))
    )
    rows = None if waits is None else np.array(waits, dtype=int).reshape(-1, 2)
    groups = ((0, 1), (0, 1)) if "b" in work else ()
    graph = Graph(labels, features, np.zeros((0, 4)), waits=rows, groups=groups)
    values = np.array([0.0 if isinstance(value, str) else value for value in work])
    communicators = features[at, FEATURES.index("group")].astype(int).tolist()
    host = np.full(n, overhead)
    times = RankTimes(values, host, np.zeros(n), values, np.array(at, dtype=int), communicators, rows, ())
    return graph, times


def run(
    ranks: Sequence[tuple[Graph, RankTimes]], durations: Sequence[float] = (), device: bool = False, **how: float
) -> tuple[list[Graph], Timeline, list[accounts.Lane]]:
    graphs, lengths = [graph for graph, _ in ranks], np.array(durations, dtype=float)
    timeline = simulate([times for _, times in ranks], [lengths] * len(ranks), device=device, **how)
    return (
        graphs,
        timeline,
        [accounts.Lane(graph, timeline, i, rank) for i, (rank, graph) in enumerate(zip((0, 5), graphs, strict=False))],
    )


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[Graph], Timeline, list[accounts.Lane]]:
    """One to three ranks around the same collectives on up to two communicators, waited for sooner or later."""
    keys = draw(st.lists(st.sampled_from("ab"), max_size=4))
    late = draw(st.booleans())
    ranks = []
    for _ in range(draw(st.integers(1, 2))):
        work: list[float | str] = [1.0 + draw(seconds)]
        for key in keys:
            work += [key, *draw(st.lists(seconds, min_size=0 if late else 1, max_size=3))]
        at = [i for i, value in enumerate(work) if isinstance(value, str)]
        waits = [(draw(st.integers(place + 1, len(work))), i) for i, place in enumerate(at)] if late else None
        ranks.append(iteration(work, overhead=draw(seconds), waits=waits))
    how = {"device": True} if draw(st.booleans()) else {"contention": draw(st.sampled_from((0.0, 0.5)))}
    return run(ranks, [draw(seconds) for _ in keys], **how)


@given(iterations())
def test_views_sum_to_the_period(made: tuple[list[Graph], Timeline, list[accounts.Lane]]) -> None:
    _, timeline, lanes = made
    period = pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
    for lane in lanes:
        idle = accounts.sum_idle(lane)
        assert tuple(idle) == IDLE and sum(idle.values()) == period and min(idle.values()) >= 0
        modules = accounts.sum_modules(lane, 2)
        assert sum(modules[f"{phase}_s"].sum() for phase in ("forward", "backward", "update")) == period
        assert modules["operations"].sum() == len(lane.graph)
    path = accounts.find_critical_path(lanes)
    steps = list(zip(path["start_s"], path["end_s"], strict=True))
    assert sum(end - start for start, end in steps) == period
    assert all(before[1] == pytest.approx(after[0], abs=1e-6) for before, after in pairwise(steps))


@given(iterations())
def test_a_trace_has_slices_that_do_not_overlap_and_modules_that_nest(
    made: tuple[list[Graph], Timeline, list[accounts.Lane]],
) -> None:
    *_, lanes = made
    events = json.loads(json.dumps(make_events(lanes, dict(enumerate(range(len(lanes)))))))
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
            assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for place, spans in threads.items():
        stack: list[float] = []
        for start, end in spans:
            while stack and stack[-1] <= start + 2e-3:
                stack.pop()
            assert not stack or (named[place] == "modules" and end <= stack[-1] + 2e-3), named[place]
            stack.append(end)


def test_idle_time_by_cause() -> None:
    """Rank 0 computes 1 s, waits 3 s for rank 1, both reduce for 2 s, of which 0.5 s are under an operation."""
    ranks = [iteration([first, "a", 0.5, 1.0], waits=[(3, 0)]) for first in (1.0, 4.0)]
    _, timeline, lanes = run(ranks, [2.0])
    assert timeline.period == 4 + 2 + 1
    fast, slow = (tuple(accounts.sum_idle(lane).values()) for lane in lanes)
    assert fast == pytest.approx((2.5, 0.0, 0.0, 2.0, 2.5)), "half a second of the waiting is under the operation"
    assert slow == pytest.approx((5.5, 0.0, 0.0, 1.5, 0.0))
    path = accounts.find_critical_path(lanes)
    assert path.select("rank", "stream", "operation").rows() == [
        (5, "compute", 0), (5, "communication", 1), (5, "compute", 3),
    ]  # fmt: skip


def test_the_host_is_the_critical_path_where_kernels_are_short() -> None:
    for kernel, streams in ((1e-6, {"host"}), (1e-3, {"compute"})):
        _, _, lanes = run([iteration([kernel] * 9, overhead=3e-5)], device=True)
        path = accounts.find_critical_path(lanes)
        assert set(path["stream"]) == streams and set(path["operation"]) == set(range(9))


def test_modules_in_program_order_with_what_they_wait_for() -> None:
    modules = ["net.a.x", "net.a.y", "net.b", "net.b", "net.a.x", ""]
    _, _, (lane,) = run([iteration([1.0, 2.0, 3.0, "a", 4.0, 5.0], modules=modules)], [0.5])
    frame = accounts.sum_modules(lane, 2)
    assert frame["module"].to_list() == ["net.a", "net.b", ""]
    assert frame["forward_s"].to_list() == [3.0, 0.0, 0.0]
    assert frame["backward_s"].to_list() == [0.0, 3.5, 0.0], "the collective is its module's"
    assert frame["update_s"].to_list() == [4.0, 0.0, 5.0]
    assert frame["idle_s"].to_list() == [0.0, 0.5, 0.0] and frame["share"].sum() == pytest.approx(1)
    assert accounts.sum_modules(lane, None)["module"].to_list() == ["net.a.x", "net.a.y", "net.b", ""]
    assert accounts.sum_modules(lane, 1)["operations"].to_list() == [5, 1]


def test_updates_belong_to_the_modules_whose_parameters_they_change() -> None:
    labels = (
        ("mm", "gemm", "nn", "forward", "a"), ("mm", "gemm", "nn", "forward", "b"),
        ("mm", "gemm", "nn", "backward", "a"),
        ("mul_", "elementwise", "mul_", "update", ""), ("addcmul_", "elementwise", "addcmul_", "update", ""),
        ("_foreach_add_", "elementwise", "_foreach_add_", "update", ""), ("add_", "elementwise", "add_", "update", ""),
    )  # fmt: skip
    weights, gradient, state, step = (0, 1), 2, 3, 4
    touched = [
        (0, weights[0], 8),
        (1, weights[1], 24),
        (2, gradient, 8),
        (3, state, 8),
        (4, state, 8),
        (4, gradient, 8),
    ]
    touched += [(5, weights[0], 8), (5, weights[1], 24), (6, step, 4)]
    graph = Graph(labels, np.zeros((7, len(FEATURES))), np.array([(*row, 0) for row in touched], dtype=float))
    times = RankTimes(np.ones(7), np.zeros(7), np.zeros(7), np.ones(7), np.zeros(0, dtype=int), (), None, ())
    frame = accounts.sum_modules(run([(graph, times)])[2][0], 2)
    assert frame["module"].to_list() == ["a", "b", ""]
    assert frame["update_s"].to_list() == [1 + 1 + 0.25, 0.75, 1]


def test_operations_and_spans_of_modules_and_stages() -> None:
    modules = ["net.a.x", "net.a.y", "net.b", "net.b", "net.a.x", ""]
    *_, lanes = run([iteration([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], modules=modules)])
    spans = accounts.list_spans(accounts.list_operations(lanes), "module", 2)
    assert spans.select("phase", "module", "operations", "start_s", "end_s").rows() == [
        ("forward", "net.a", 2, 0.0, 3.0), ("backward", "net.b", 2, 3.0, 10.0), ("update", "net.a", 1, 10.0, 15.0),
        ("update", "", 1, 15.0, 21.0),
    ]  # fmt: skip
    *_, lanes = run([iteration([first, "a", 0.5]) for first in (1.0, 2.0)], [2.0])
    frame = accounts.list_operations(lanes)
    columns = ["rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s"]
    assert frame.columns == columns and frame["rank"].to_list() == [0, 0, 0, 5, 5, 5]
    assert frame["stream"].to_list() == ["compute", "communication", "compute"] * 2
    assert frame.filter(polars.col("kind") == "collective")["start_s"].to_list() == [2.0, 2.0]


def test_a_trace_shows_ranks_streams_sizes_and_meetings() -> None:
    ranks = [iteration([first, "a", 0.5, "b", 1.0], waits=[(4, 0), (5, 1)]) for first in (1.0, 4.0)]
    *_, lanes = run(ranks, [2.0, 0.25])
    events = make_events(lanes, {0: 0, 1: 1})
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names[1, None] == "rank 1" and names[1, 3] == "communication 0" and names[1, 4] == "communication 1"
    slices = [event for event in events if event["ph"] == "X" and event["tid"] in (2, 3, 4)]
    assert len(slices) == 2 * 5 and all(event["args"]["bytes"] == 64 for event in slices)
    compute = [event for event in slices if event["pid"] == 0 and names[0, event["tid"]] == "compute"]
    assert sum(event["dur"] for event in compute) == pytest.approx(accounts.sum_idle(lanes[0])["busy_s"] * 1e6)
    flows = [event for event in events if event["ph"] in "sf"]
    starts = {(event["pid"], event["tid"], event["ts"]) for event in slices}
    assert all((event["pid"], event["tid"], event["ts"]) in starts for event in flows), "arrows begin and end at slices"
    assert sorted({event["name"] for event in flows}) == ["launch", "meet", "wait"]
    ends: dict[int, list[str]] = {}
    for event in flows:
        ends.setdefault(event["id"], []).append(event["ph"])
    assert set(map(tuple, ends.values())) == {("s", "f")}
    events = make_events(lanes, {0: 0, 1: 0, 5: 0})
    assert {event["pid"] for event in events} == {0, 1, 5}, "ranks that are alike"
    assert sum(event["name"] == "meet" for event in events) == 2 * 2 * 2


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_a_prediction_shows_modules_idle_time_critical_path_and_trace(tmp_path: Path) -> None:
    model = DLRM(rows=[5000, 700, 90], dim=32, pooling=4, bottom=[64], top=[48], features=13, batch=1024)
    prediction = predict(model, "h100-sxm-8", ranks=8)
    time = pytest.approx(prediction.time, rel=1e-6)
    idle = prediction.idle()
    assert idle["ranks"].sum() == 8 and idle.select(polars.sum_horizontal(IDLE)).to_series().to_list() == [time] * len(
        idle
    )
    modules = prediction.modules(depth=1)
    assert {"bottom", "embeddings", "interaction", "top"} < set(modules["module"]) and modules[
        "share"
    ].sum() == pytest.approx(1)
    path = prediction.critical_path()
    assert (path["end_s"] - path["start_s"]).sum() == time and set(path["rank"]) <= set(idle["rank"])
    assert prediction.timeline("stage")["phase"].unique().sort().to_list() == ["backward", "forward", "update"]
    assert prediction.timeline("module", depth=1).height < prediction.timeline().height
    for bad, message in (({"rank": 8}, "rank is 8; the ranks are 0 to 7"), ({"depth": 0}, "depth is 0")):
        with pytest.raises(ValueError, match=message):
            prediction.modules(**bad)
    with pytest.raises(ValueError, match="level is 'layer'; known are operation, module, stage"):
        prediction.timeline("layer")
    for ranks in (3, 20):
        stored = json.loads(prediction.save_trace(tmp_path / "t.json", ranks=ranks).read_text("utf-8"))
        assert len({event["pid"] for event in stored["traceEvents"]}) == min(ranks, 8)
        assert stored["otherData"] == {"prediction": repr(prediction)}
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"], "nothing is left beside it"
