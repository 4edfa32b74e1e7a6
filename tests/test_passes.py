"""Pipelines, pass by pass: beside known bubbles, beside all micro-batches, and by hand."""

import numpy as np
import pytest

from perfkit.models import partitions
from perfkit.models.partitions import CHUNKED, SCHEDULES, Schedule, bubble_time
from perfkit.prediction.passes import (
    ChunkTimes,
    PipelineShape,
    PipelineTimes,
    build_pipeline,
    run_iteration,
)


def make_chunk(forward: float, backward: float, weights: float = 0.0, **more: float) -> ChunkTimes:
    times = dict.fromkeys(ChunkTimes._fields, 0.0)
    times.update(forward=forward, backward=backward, weights=weights, **more)
    return ChunkTimes(**times)


def run_all(schedule: PipelineShape, times: PipelineTimes) -> float:
    """Time of an iteration without repeating groups [s]."""
    pipeline = build_pipeline(schedule)
    return pipeline.run([times.find(activity) for activity in pipeline.activities])


@pytest.mark.parametrize("name", SCHEDULES)
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


@pytest.mark.parametrize("name", SCHEDULES)
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
