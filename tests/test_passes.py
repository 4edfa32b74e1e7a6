"""Pipelines, pass by pass: beside known bubbles, beside all micro-batches, and by hand."""

import numpy as np
import pytest

from perfkit.models import partitions
from perfkit.models.partitions import CHUNKED, SCHEDULES, V_SHAPED, Schedule, bubble_time
from perfkit.prediction.passes import (
    ChunkTimes,
    PipelineShape,
    PipelineTimes,
    build_pipeline,
    run_iteration,
    shorten,
)
from perfkit.prediction.passes_at_once import can_run_at_once, run_iterations

#: Schedules whose stages are in no V; tests/test_v_schedules.py has the others.
NOT_IN_V = [name for name in SCHEDULES if name not in V_SHAPED]


def make_chunk(forward: float, backward: float, weights: float = 0.0, **more: float) -> ChunkTimes:
    times = dict.fromkeys(ChunkTimes._fields, 0.0)
    times.update(forward=forward, backward=backward, weights=weights, **more)
    return ChunkTimes(**times)


def run_all(schedule: PipelineShape, times: PipelineTimes) -> float:
    """Time of an iteration without repeating groups [s]."""
    pipeline = build_pipeline(schedule)
    return pipeline.run([times.find(activity) for activity in pipeline.activities])


@pytest.mark.parametrize("name", NOT_IN_V)
@pytest.mark.parametrize("stages", [2, 4, 7])
def test_even_stages_have_the_published_bubble(name: str, stages: int) -> None:
    chunks = 3 if name in CHUNKED else 1
    weights = 1.0 if SCHEDULES[name].puts_off_weights else 0.0
    chunk = make_chunk(1.0 / chunks, (2.0 - weights) / chunks, weights)
    times = PipelineTimes(
        [chunk for _ in range(stages * chunks)], stages, [0.0 for _ in range(stages)]
    )
    for groups in (2, 12):
        found = run_iteration(PipelineShape(name, stages, groups * stages, chunks, False), times)
        bubble = bubble_time(
            3.0 * stages, slowest=3.0, stages=stages, chunks=chunks, delayed=weights
        )
        assert found == pytest.approx(3.0 * groups * stages + bubble)


@pytest.mark.parametrize("name", NOT_IN_V)
def test_the_rest_of_many_micro_batches_repeats_the_first_ones(name: str) -> None:
    rng = np.random.default_rng(5)
    errors = []
    for _ in range(12):
        stages = int(rng.integers(2, 7))
        chunks = 2 if name in CHUNKED else 1
        micro_batches = stages * int(rng.integers(10, 16))
        if not SCHEDULES[name].interleaves:
            micro_batches += int(rng.integers(0, stages))
        kinds = [make_chunk(*rng.uniform(0.5, 1.5, 3)) for _ in range(stages * chunks)]
        times = PipelineTimes(kinds, stages, rng.uniform(0.0, 0.3, stages).tolist())
        schedule = PipelineShape(name, stages, micro_batches, chunks, False)
        errors.append(run_iteration(schedule, times) / run_all(schedule, times) - 1)
    assert np.abs(errors).mean() < 0.001
    assert np.abs(errors).max() < 0.01


def test_a_schedule_that_runs_no_pass_ahead_takes_one_micro_batch_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_itself = Schedule("by_itself")
    monkeypatch.setattr(partitions, "SCHEDULES", {**SCHEDULES, by_itself.name: by_itself})
    chunk = make_chunk(1.0, 2.0)
    times = PipelineTimes([chunk, chunk, chunk], 3, [0.0, 0.0, 0.0])
    for micro_batches in (6, 60, 61):
        shape = PipelineShape(by_itself.name, 3, micro_batches, 1, False)
        assert run_iteration(shape, times) == pytest.approx(run_all(shape, times))


def test_passes_wait_as_said() -> None:
    """Two stages, one micro-batch or two, added up by hand."""
    chunks = [make_chunk(1.0, 2.0), make_chunk(3.0, 4.0)]
    times = PipelineTimes(chunks, 2, [0.5, 0.0])
    # forth, message, both passes of the second stage, message, back
    assert run_all(PipelineShape("1f1b", 2, 1, 1, False), times) == pytest.approx(11.0)
    # the second stage takes its next message when its pass has ended, and waits for it
    assert run_all(PipelineShape("1f1b", 2, 2, 1, False), times) == pytest.approx(
        1.0 + 0.5 + 7.0 + 0.5 + 7.0 + 0.5 + 2.0
    )
    # beside the pass before, it does not
    assert run_all(PipelineShape("gpipe", 2, 2, 1, False), times) == pytest.approx(
        1.0 + 0.5 + 6.0 + 8.0 + 0.5 + 2.0
    )


def test_messages_are_on_their_way_at_once_while_their_latency_lasts() -> None:
    """Two stages, two micro-batches, added up by hand."""
    chunks = [make_chunk(1.0, 2.0), make_chunk(3.0, 4.0)]
    gpipe = PipelineShape("gpipe", 2, 2, 1, False)
    with_latency = PipelineTimes(chunks, 2, [0.5, 0.0], [10.0, 0.0])
    # the second message of each phase arrives beside the pass of the first one, or 10.5 s behind
    # the last pass of its stage
    expected = 1.0 + 10.5 + 6.0 + 8.0 + 10.5 + 2.0
    assert run_all(gpipe, with_latency) == pytest.approx(expected)
    # the second message of each phase waits for the first one
    as_a_whole = PipelineTimes(chunks, 2, [10.5, 0.0])
    assert run_all(gpipe, as_a_whole) == pytest.approx(1.0 + 2 * 10.5 + 3.0 + 4.0 + 2 * 10.5 + 2.0)


def test_messages_of_replicas_delay_what_waits_for_them() -> None:
    first = make_chunk(1.0, 2.0, reduction=10.0, first_gather=5.0, last_reduction=0.25, tail=3.0)
    last = make_chunk(1.0, 2.0, later_gather=0.5)
    times = PipelineTimes([first, last], 2, [0.0, 0.0])
    # reduced once, behind the last pass
    assert run_all(PipelineShape("gpipe", 2, 1, 1, False), times) == pytest.approx(
        5.0 + 1.0 + 0.5 + 1.0 + 2.0 + 2.0 + 0.25 + 3.0
    )
    # only the pass that begins the iteration waits for weights that are gathered ahead
    begin = make_chunk(1.0, 2.0, first_gather=5.0)
    two_each = PipelineTimes([begin, begin, begin, begin], 2, [0.0, 0.0])
    assert run_all(PipelineShape("breadth_first", 2, 1, 2, False), two_each) == pytest.approx(17.0)
    # with each micro-batch
    plain = times._replace(chunks=[make_chunk(1.0, 2.0, reduction=10.0), make_chunk(1.0, 2.0)])
    assert run_all(PipelineShape("gpipe", 2, 2, 1, True), plain) == pytest.approx(
        1.0 + 2.0 + 2.0 + 2.0 + 10.0 + 2.0 + 10.0
    )


def test_a_stage_waits_for_weights_that_it_gathers_ahead() -> None:
    # the first pass of the second chunk begins at 9; then two backward passes on each stage
    gathered = make_chunk(1.0, 1.0, gathered=9.0)
    plain = make_chunk(1.0, 1.0)
    times = PipelineTimes([plain, plain, gathered, plain], 2, [0.0, 0.0])
    shape = PipelineShape("breadth_first", 2, 1, 2, False)
    assert run_all(shape, times) == pytest.approx(9.0 + 2.0 + 4.0)
    # the second stage begins 7 before its first pass, which is at 1, and ends at 4
    late = PipelineTimes([plain, make_chunk(1.0, 2.0, lead=7.0)], 2, [0.0, 0.0])
    assert run_all(PipelineShape("gpipe", 2, 1, 1, False), late) == pytest.approx(10.0)


def test_gradients_land_behind_weight_gradients_that_were_put_off() -> None:
    chunk = make_chunk(1.0, 1.0, 3.0, tail=5.0)
    times = PipelineTimes([chunk, chunk], 2, [0.0, 0.0])
    # forward and backward on both stages, then the first one's weight gradients
    assert run_all(PipelineShape("zero_bubble", 2, 1, 1, False), times) == pytest.approx(12.0)


def draw_shapes(name: str) -> list[PipelineShape]:
    """Few and many stages, micro-batches and chunks of a schedule."""
    schedule = SCHEDULES[name]
    shapes = []
    for scattered in (False, True):
        for stages in (2, 3, 5):
            for chunks in (1, 2, 3) if schedule.has_chunks else (1,):
                counts = [stages, 3 * stages, 20 * stages]
                if not schedule.interleaves:
                    counts += [1, stages - 1, stages + 1, 12 * stages + 1]
                for count in counts:
                    shapes.append(PipelineShape(name, stages, count, chunks, scattered))
    return shapes


@pytest.mark.parametrize("name", NOT_IN_V)
def test_pipelines_that_are_run_at_once_take_what_each_takes(name: str) -> None:
    rng = np.random.default_rng(41)
    pipelines = 3
    for shape in draw_shapes(name):
        assert can_run_at_once(shape)
        chunks = []
        for _ in range(shape.stages * shape.chunks):
            passes = rng.uniform(0.5, 1.5, (3, pipelines))
            others = rng.uniform(0.0, 0.5, (len(ChunkTimes._fields) - 3, pipelines))
            chunks.append(ChunkTimes(*passes, *others))
        messages, latencies = rng.uniform(0.0, 1.5, (2, shape.stages, pipelines))
        shortened = shorten(shape)
        together = run_iterations(
            shape._replace(micro_batches=shortened.micro_batches),
            PipelineTimes(chunks, shape.stages, messages, latencies),
            np.full(pipelines, shortened.groups_left_out),
        )
        for index in range(pipelines):
            one = [ChunkTimes(*(float(time[index]) for time in chunk)) for chunk in chunks]
            times = PipelineTimes(
                one, shape.stages, messages[:, index].tolist(), latencies[:, index].tolist()
            )
            assert together[index] == pytest.approx(run_iteration(shape, times), rel=1e-9), shape


def test_schedules_without_slots_are_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    far_ahead = Schedule("far_ahead", passes_ahead=2)
    monkeypatch.setattr(partitions, "SCHEDULES", {**SCHEDULES, far_ahead.name: far_ahead})
    shape = PipelineShape(far_ahead.name, 3, 6, 1, False)
    assert not can_run_at_once(shape)
    times = np.array([1.0, 3.0])
    chunk = ChunkTimes(times, 2.0 * times, *[0.0] * (len(ChunkTimes._fields) - 2))
    pipelines = PipelineTimes([chunk, chunk, chunk], 3, np.zeros((3, 2)))
    found = run_iterations(shape, pipelines, np.zeros(2))
    alone = run_iteration(shape, PipelineTimes([make_chunk(1.0, 2.0)] * 3, 3, [0.0] * 3))
    assert found == pytest.approx([alone, 3.0 * alone])
