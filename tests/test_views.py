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

from perfkit import plots
from perfkit.prediction import trace, views
from perfkit.prediction.critical_path import find_critical_path
from perfkit.prediction.programs import Host, RankTimes
from perfkit.prediction.result import predict
from perfkit.prediction.simulation import Timeline, simulate
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
    times = RankTimes(values, np.full(n, overhead), np.array(at, dtype=int), waits=rows, communicators=communicators)
    return graph, times


def run(
    ranks: Sequence[tuple[Graph, RankTimes]], durations: Sequence[float], host: Host
) -> tuple[list[Graph], Timeline]:
    return [graph for graph, _ in ranks], simulate([times for _, times in ranks], np.array(durations), host)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[Graph], Timeline]:
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
    host = Host(0.0, draw(seconds), True) if draw(st.booleans()) else Host(contention=draw(st.sampled_from((0.0, 0.5))))
    return run(ranks, [draw(seconds) for _ in keys], host)


@given(iterations())
def test_views_sum_to_the_period(made: tuple[list[Graph], Timeline]) -> None:
    graphs, timeline = made
    period = pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
    for row in views.find_idle(graphs, timeline).iter_rows(named=True):
        assert sum(row[key] for key in IDLE) == period
        assert min(row[key] for key in IDLE) >= 0
    for rank in range(len(graphs)):
        modules = views.sum_modules(graphs, timeline, depth=2, rank=rank)
        assert sum(modules[f"{phase}_s"].sum() for phase in ("forward", "backward", "update")) == period
        assert modules["operations"].sum() == len(graphs[rank])


@given(iterations())
def test_the_critical_path_fills_a_period_without_gaps(made: tuple[list[Graph], Timeline]) -> None:
    graphs, timeline = made
    path = find_critical_path(graphs, timeline)
    steps = list(zip(path["start_s"], path["end_s"], strict=True))
    assert sum(end - start for start, end in steps) == pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
    assert all(before[1] == pytest.approx(after[0], abs=1e-6) for before, after in pairwise(steps))


@given(iterations())
def test_a_trace_has_slices_that_do_not_overlap_and_modules_that_nest(made: tuple[list[Graph], Timeline]) -> None:
    graphs, timeline = made
    events = json.loads(json.dumps(trace.make_events(graphs, timeline)))
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
    """Rank 0 computes 1 s, waits 3 s for rank 1, both reduce for 2 s, of which 0.5 s lie under an operation."""
    waits = [(3, 0)]
    fast, slow = (iteration([first, "a", 0.5, 1.0], overhead=0.0, waits=waits) for first in (1.0, 4.0))
    graphs, timeline = run([fast, slow], [2.0], Host())
    assert timeline.period == 4 + 2 + 1
    idle = views.find_idle(graphs, timeline).rows()
    assert idle[0] == pytest.approx(
        (0, 1, 2.5, 0.0, 0.0, 2.0, 2.5)
    )  # half a second of the waiting lies under the operation
    assert idle[1] == pytest.approx((1, 1, 5.5, 0.0, 0.0, 1.5, 0.0))
    path = find_critical_path(graphs, timeline)
    assert path.select("rank", "stream", "operation").rows()[:2] == [(1, "compute", 0), (1, "communication", 1)]
    assert path["operation"].to_list() == [0, 1, 3]


def test_the_host_is_the_critical_path_where_kernels_are_short() -> None:
    graphs, timeline = run([iteration([1e-6] * 9, overhead=2e-5)], [], Host(launch=1e-5, asynchronous=True))
    path = find_critical_path(graphs, timeline)
    assert set(path["stream"]) == {"host"}
    graphs, timeline = run([iteration([1e-3] * 9, overhead=2e-5)], [], Host(launch=1e-5, asynchronous=True))
    path = find_critical_path(graphs, timeline)
    assert path["stream"].to_list() == ["compute"] * 9 and path["operation"].to_list() == list(range(9))


def test_modules_in_program_order_with_what_they_wait_for() -> None:
    modules = ["net.a.x", "net.a.y", "net.b", "net.b", "net.a.x", ""]
    graphs, timeline = run([iteration([1.0, 2.0, 3.0, "a", 4.0, 5.0], modules=modules)], [0.5], Host())
    frame = views.sum_modules(graphs, timeline, depth=2)
    assert frame["module"].to_list() == ["net.a", "net.b", ""]
    assert frame["forward_s"].to_list() == [3.0, 0.0, 0.0]
    assert frame["backward_s"].to_list() == [0.0, 3.5, 0.0], "the collective is its module's"
    assert frame["update_s"].to_list() == [4.0, 0.0, 5.0]
    assert frame["idle_s"].to_list() == [0.0, 0.5, 0.0] and frame["share"].sum() == pytest.approx(1)
    assert views.sum_modules(graphs, timeline, depth=None)["module"].to_list() == ["net.a.x", "net.a.y", "net.b", ""]
    assert views.sum_modules(graphs, timeline, depth=1)["operations"].to_list() == [5, 1]
    with pytest.raises(ValueError, match="rank is 3; the ranks are 0 to 0"):
        views.sum_modules(graphs, timeline, rank=3)
    with pytest.raises(ValueError, match="depth is 0"):
        views.sum_modules(graphs, timeline, depth=0)


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
    timeline = simulate([RankTimes(np.ones(7), np.zeros(7), np.zeros(0, dtype=int))], np.zeros(0), Host())
    frame = views.sum_modules([graph], timeline)
    assert frame["module"].to_list() == ["a", "b", ""]
    assert frame["update_s"].to_list() == [1 + 1 + 0.25, 0.75, 1]


def test_spans_of_modules_and_stages() -> None:
    modules = ["net.a.x", "net.a.y", "net.b", "net.b", "net.a.x", ""]
    graphs, timeline = run([iteration([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], modules=modules)], [], Host())
    spans = views.list_spans(graphs, timeline, depth=2)
    assert spans.select("phase", "module", "operations", "start_s", "end_s").rows() == [
        ("forward", "net.a", 2, 0.0, 3.0), ("backward", "net.b", 2, 3.0, 10.0), ("update", "net.a", 1, 10.0, 15.0),
        ("update", "", 1, 15.0, 21.0),
    ]  # fmt: skip
    stages = views.list_spans(graphs, timeline, level="stage")
    assert stages["phase"].to_list() == ["forward", "backward", "update"]
    with pytest.raises(ValueError, match="level is 'layer'; known are module, stage"):
        views.list_spans(graphs, timeline, level="layer")


def test_a_trace_file_tells_ranks_streams_sizes_and_meetings(tmp_path: Path) -> None:
    ranks = [iteration([first, "a", 0.5, "b", 1.0], waits=[(4, 0), (5, 1)]) for first in (1.0, 4.0)]
    graphs, timeline = run(ranks, [2.0, 0.25], Host())
    file = trace.write_trace(tmp_path / "iteration.json", trace.make_events(graphs, timeline), workload="tiny")
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"
    assert stored["otherData"] == {"workload": "tiny"}
    events = stored["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names[1, None] == "rank 1" and names[1, 3] == "communication 0" and names[1, 4] == "communication 1"
    slices = [event for event in events if event["ph"] == "X" and event["tid"] in (2, 3, 4)]
    assert len(slices) == 2 * 5 and all(event["args"]["bytes"] == 64 for event in slices)
    compute = [event for event in slices if event["pid"] == 0 and names[0, event["tid"]] == "compute"]
    busy = views.find_idle(graphs, timeline)["busy_s"][0]
    assert sum(event["dur"] for event in compute) == pytest.approx(busy * 1e6)
    flows = [event for event in events if event["ph"] in "sf"]
    starts = {(event["pid"], event["tid"], event["ts"]) for event in slices}
    assert all((event["pid"], event["tid"], event["ts"]) in starts for event in flows), "arrows begin and end at slices"
    assert sorted({event["name"] for event in flows}) == ["launch", "meet", "wait"]
    ends = {}
    for event in flows:
        ends.setdefault(event["id"], []).append(event["ph"])
    assert set(map(tuple, ends.values())) == {("s", "f")}


def test_ranks_that_are_alike_can_be_traced_as_many() -> None:
    graphs, timeline = run([iteration([1.0, "a", 0.5])], [2.0], Host())
    events = trace.make_events(graphs, timeline, {0: 0, 1: 0, 5: 0})
    assert {event["pid"] for event in events} == {0, 1, 5}
    assert sum(event["name"] == "meet" for event in events) == 2 * 2


def test_operations_have_rank_and_stream() -> None:
    ranks = [iteration([1.0, "a", 0.5]), iteration([2.0, "a", 0.5])]
    frame = views.list_operations(*run(ranks, [2.0], Host()))
    columns = ["rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s"]
    assert frame.columns == columns and frame["rank"].to_list() == [0, 0, 0, 1, 1, 1]
    assert frame["stream"].to_list() == ["compute", "communication", "compute"] * 2
    assert frame.filter(polars.col("kind") == "collective")["start_s"].to_list() == [2.0, 2.0]


def test_bars_of_modules_keep_the_total_and_gather_the_rest() -> None:
    rows = [
        {"module": f"layers.{i}", "forward_s": 1.0, "backward_s": 2.0, "update_s": 0.0, "idle_s": 0.1} for i in range(9)
    ]
    rows.append({"module": "", "forward_s": 0.0, "backward_s": 0.0, "update_s": 5.0, "idle_s": 0.0})
    spec = plots.module_bars(rows, modules=4).to_dict()
    drawn = next(values for values in spec["datasets"].values() if "seconds" in values[0])
    assert sum(row["seconds"] for row in drawn) == pytest.approx(9 * 3 + 5)
    assert {row["module"] for row in drawn} == {"layers.0", "layers.1", "layers.2", "6 more modules", "outside modules"}
    assert spec["title"]["subtitle"] == "32 s in all; dark line: the device stands still, 900 ms in all"


def test_a_timeline_pales_where_a_stream_stands_still() -> None:
    rows = [
        {"rank": 0, "stream": "compute", "phase": "forward", "name": "add", "module": "net", "start_s": i * 1e-3,
         "end_s": i * 1e-3 + 1e-4 * (1 + 5 * (i == 7))}
        for i in range(5000)
    ]  # fmt: skip
    chart = plots.timeline_lanes(rows).to_dict()
    (values,) = chart["datasets"].values()
    assert len(values) == 1 and values[0]["busy"] == pytest.approx(0.1, rel=0.01) and values[0]["operations"] == 5000
    assert values[0]["longest"] == "add · net"
    assert chart["title"]["subtitle"].startswith("paler")


@pytest.mark.filterwarnings("ignore::perfkit.platform.ExtrapolationWarning")
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
    for ranks in (3, 20):
        events = json.loads(prediction.save_trace(tmp_path / "t.json", ranks=ranks).read_text("utf-8"))["traceEvents"]
        assert len({event["pid"] for event in events}) == min(ranks, 8)
