"""Memory through one iteration: its peak, its ends, and its course beside PyTorch's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit import plots
from perfkit.ground.results import Table
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.memory_timeline import list_memory
from perfkit.prediction.result import Prediction

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from tests.golden.steps import twin  # noqa: E402
from tests.test_memory import CPU, GPU, SMALL, graph  # noqa: E402
from tests.test_plots import read_data  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

LLAMA = pk.Transformer.preset(
    "llama-3-8b", batch=8, sequence=1024, layers=4, dtype="bf16", mixed=True, attention="flash2"
)


def predict(workload: Any, platform: str = GPU, **settings: Any) -> Prediction:
    """A prediction, warnings aside."""
    with keep_quiet():
        return pk.predict(workload, platform, **settings)


def list_fields(frame: Table, row: int) -> dict[str, float]:
    """Bytes by use of a row."""
    values = frame.row(row, named=True)
    return {name: values[name] for name in frame.columns if name.endswith("_bytes")}


@pytest.mark.parametrize(
    ("workload", "settings"),
    [
        (LLAMA, {"ranks": 8}),
        (LLAMA, {"strategy": pk.Strategy(dp=8, zero=1)}),
        (LLAMA, {"strategy": pk.Strategy(dp=8, zero=3, checkpoint="full")}),
        (replace(LLAMA, accumulate=2), {"ranks": 4}),
        (replace(LLAMA, optimizer_in_backward=True), {"ranks": 1}),
        (pk.DLRM("dlrm-ddp", batch=512), {"ranks": 2}),
    ],
)
def test_the_peak_is_that_of_memory_and_the_end_is_the_begin(
    workload: Any, settings: dict[str, Any]
) -> None:
    prediction = predict(workload, **settings)
    frame = prediction.memory_over_time()
    memory = prediction.memory()
    peak = list_fields(frame, int(np.argmax(frame["total_bytes"].to_numpy())))
    assert peak.pop("total_bytes") == memory.total
    assert peak == {f"{use}_bytes": nbytes for use, nbytes in memory.parts.items()}
    assert list_fields(frame, 0) == list_fields(frame, -1)
    times = frame["time_s"].to_numpy()
    assert (np.diff(times) >= 0).all()
    assert times[-1] == prediction.time


def test_a_rank_begins_at_zero_or_early_but_never_by_a_rounding() -> None:
    """The clock of an iteration is its last end less its period, which rounds."""
    prediction = predict(replace(LLAMA, layers=2), strategy=pk.Strategy(dp=8, zero=3))
    [timeline] = prediction._timeline.rank_timelines
    first = timeline.starts[timeline.compute[0]]
    for early, begin in ((0.0, 0.0), (6e-15, 0.0), (0.25, -0.25)):
        moved = replace(timeline, starts=timeline.starts - first - early)
        times = list_memory(moved, prediction.platform)["time_s"]
        assert times[0] == begin
        assert times[0] == times.min()


def test_each_moment_is_counted_by_hand() -> None:
    """Buffer `a` has 1 byte, `b` 2, `c` 4 ...: a weight, its gradient, a state, and what passes make."""
    work = graph(
        ("forward", "a", "d"),
        ("forward", "d", "e"),
        ("backward", "ade", "b"),
        ("update", "abc", "ac"),
    )
    frame = predict(work, CPU).memory_over_time()
    assert frame["total_bytes"].to_list() == [1 + 2 + 4, 1 + 4, 29 + 2, 7, 7]
    assert frame["phase"].to_list() == ["forward", "forward", "backward", "backward", "update"]
    assert frame["activations_bytes"].to_list() == [0, 0, 8 + 16, 0, 0]


def stretch(prediction: Prediction) -> np.ndarray:
    """What is held at 40 moments of each pass, whatever time it takes [B]."""
    frame = prediction.memory_over_time()
    operation = frame["operation"].to_numpy()
    phases = np.array(
        [label.phase for label in prediction._timeline.rank_timelines[0].graph.labels]
    )
    total = frame["total_bytes"].to_numpy()
    course = []
    for phase in ("forward", "backward"):
        first, last = np.flatnonzero(phases == phase)[[0, -1]]
        moments = np.linspace(first, last, 40)
        course.append(total[np.searchsorted(operation, moments, side="right") - 1])
    return np.concatenate(course)


@pytest.mark.parametrize("workload", [SMALL, replace(SMALL, attention="eager")])
def test_memory_takes_the_course_of_a_captured_step(workload: Any) -> None:
    captured = predict(pk.capture(twin(workload)), CPU)
    built = predict(workload, CPU)
    theirs, ours = stretch(captured), stretch(built)
    assert np.corrcoef(theirs, ours)[0, 1] > 0.98
    assert abs(int(np.argmax(theirs)) - int(np.argmax(ours))) <= 2
    found = captured.memory_over_time()
    assert found["total_bytes"].max() == captured.memory().total
    assert found["total_bytes"][0] == found["total_bytes"][-1]


def test_gathered_weights_come_and_go_and_gradients_may_go_at_once() -> None:
    sharded = predict(LLAMA, strategy=pk.Strategy(dp=8, zero=3)).memory_over_time()
    gathered = sharded["communication_bytes"].to_numpy()
    weights_of_layer = 2 * 218_112_000
    assert gathered.max() - gathered.min() >= weights_of_layer
    usual = predict(LLAMA, ranks=1).memory_over_time()
    at_once = predict(replace(LLAMA, optimizer_in_backward=True), ranks=1).memory_over_time()
    assert at_once["gradients_bytes"].max() < 0.6 * usual["gradients_bytes"].max()


def test_checkpoints_rise_once_more_in_the_backward_pass() -> None:
    """Each of four layers is computed again, so that activations rise four times more."""
    plain = predict(LLAMA, strategy=pk.Strategy(dp=8, zero=3)).memory_over_time()
    again = predict(LLAMA, strategy=pk.Strategy(dp=8, zero=3, checkpoint="full")).memory_over_time()

    def count_rises(frame: Table) -> int:
        """Layers in whose backward pass activations rise above where they begin."""
        layers = 0
        for layer in range(LLAMA.layers):
            of_pass = frame.filter(phase="backward")
            is_there = of_pass["module"].str.starts_with(f"layers.{layer}")
            held = of_pass.filter(is_there)["activations_bytes"]
            if held.max() > 1.5 * held[0]:
                layers += 1
        return layers

    assert count_rises(plain) == 0
    assert count_rises(again) == LLAMA.layers


def test_what_is_known_at_its_fullest_moment_alone_has_no_course() -> None:
    prediction = predict(LLAMA, strategy=pk.Strategy(tp=2, dp=4))
    with pytest.raises(ValueError, match=r"only the fullest moment is known, memory\(\)"):
        prediction.memory_over_time()
    with_course = predict(LLAMA, ranks=8)
    assert len(list(prediction.sections())) + 1 == len(list(with_course.sections()))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_have_a_course_whatever_they_share(zero: int) -> None:
    prediction = predict(LLAMA, strategy=pk.Strategy(dp=8, zero=zero))
    assert prediction.memory_over_time()["total_bytes"].max() == prediction.memory().total


@pytest.mark.parametrize(
    "strategy",
    [pk.Strategy(pp=2, dp=4), pk.Strategy(cp=2, dp=4), pk.Strategy.hsdp(8, shards=4)],
    ids=["stages", "sequences", "hybrid shards"],
)
def test_stages_shared_sequences_and_hybrid_shards_have_no_course(strategy: pk.Strategy) -> None:
    with pytest.raises(ValueError, match="only the fullest moment is known"):
        predict(LLAMA, strategy=strategy).chart("memory")


def test_a_chart_stacks_uses_and_marks_the_peak() -> None:
    rows = [
        {"time_s": 0.0, "a_bytes": 1.0, "b_bytes": 0.0, "c_bytes": 0.0, "total_bytes": 1.0},
        {"time_s": 0.5, "a_bytes": 1.0, "b_bytes": 2.0, "c_bytes": 0.0, "total_bytes": 3.0},
        {"time_s": 0.5, "a_bytes": 1.0, "b_bytes": 1.0, "c_bytes": 0.0, "total_bytes": 2.0},
        {"time_s": 1.0, "a_bytes": 1.0, "b_bytes": 0.0, "c_bytes": 0.0, "total_bytes": 1.0},
    ]
    chart = plots.memory_areas(rows, capacity=8.0, reserve=2.0)
    drawn = [(row["time_s"], row["use"], row["nbytes"]) for row in read_data(chart, 0)]
    assert drawn == [
        (0.0, "a", 1.0),
        (0.0, "b", 0.0),
        (0.5, "a", 1.0),
        (0.5, "b", 2.0),
        (1.0, "a", 1.0),
        (1.0, "b", 0.0),
    ]
    [point] = read_data(chart, 1)
    assert (point["time_s"], point["nbytes"], point["what"]) == (0.5, 3.0, "peak 3 B")
    words = [read_data(chart, layer)[0]["what"] for layer in (2, 3, 5)]
    assert words == ["peak 3 B", "with its reserve 5 B", "device 8 B"]
    peak = chart.to_dict()["layer"][2]
    assert (peak["mark"]["type"], peak["encoding"]["text"]["field"]) == ("text", "what")
    legend = chart.to_dict()["layer"][0]["encoding"]["color"]["legend"]
    assert legend["labelExpr"] == '{"a": "a 1 B", "b": "b 2 B"}[datum.label]'
    many = [rows[0] | {"time_s": number / 1000} for number in range(1001)]
    many[500] |= {"b_bytes": 5.0, "total_bytes": 6.0}
    chart = plots.memory_areas(many)
    areas = read_data(chart, 0)
    assert len(areas) < 2 * 310
    assert max(row["nbytes"] for row in areas) == 5.0
    assert read_data(chart, 1)[0]["time_s"] == 0.5
