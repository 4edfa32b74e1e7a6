"""Stages with two chunks in a V: beside PyTorch's schedules, published bubbles and memory, and the event
loop."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.partitions import (
    SCHEDULES,
    V_SHAPED,
    count_held_in_v,
    held_batches,
    list_steps,
)
from perfkit.models.v_schedules import V_ORDERS, Step, find_place, find_position
from perfkit.platform.gallery import load_platform
from perfkit.prediction.passes import ChunkTimes, PipelineShape, PipelineTimes, run_iteration
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy, spread_chunks
from perfkit.workloads.strategy_fits import list_fits
from perfkit.workloads.transformer import Transformer

MODEL = Transformer.preset(
    "gpt3-1.3b", layers=16, batch=64, sequence=1024, vocabulary=50_304, dtype="bf16", fused=True
)
PHASES = {
    "FORWARD": "forward",
    "BACKWARD_INPUT": "backward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_WEIGHT": "weights",
}


def list_torch_steps(schedule: Any, stage: int, stages: int, micro_batches: int) -> list[Step]:
    """Steps of a stage as PyTorch orders them."""
    asked = SimpleNamespace(
        pp_group_size=stages, num_stages=2 * stages, _n_microbatches=micro_batches
    )
    steps = []
    for action in schedule._calculate_single_rank_operations(asked, stage):
        if action is None:
            continue
        for one in action.sub_actions or (action,):
            name = one.computation_type.name
            chunk = 0 if one.stage_index == stage else 1
            steps.append(
                Step(
                    PHASES[name],
                    one.microbatch_index,
                    chunk,
                    whole=name == "FULL_BACKWARD",
                    in_pair=bool(action.sub_actions) and name == "FORWARD",
                )
            )
    return steps


@pytest.mark.parametrize(
    ("name", "of_torch"), [("zb_v", "ScheduleZBVZeroBubble"), ("dualpipe_v", "ScheduleDualPipeV")]
)
def test_steps_are_those_of_pytorch(name: str, of_torch: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, of_torch):
        pytest.skip(f"this PyTorch has no {of_torch}")
    for stages in (1, 2, 3, 5, 8):
        fewest = int(SCHEDULES[name].least_batches) * stages
        for micro_batches in (max(fewest, 1), 2 * stages, 3 * stages + 1):
            for stage in range(stages):
                own = V_ORDERS[name](stage, stages, micro_batches)
                torch_steps = list_torch_steps(
                    getattr(schedules, of_torch), stage, stages, micro_batches
                )
                assert own == torch_steps, (stages, micro_batches, stage)


def run_even(name: str, stages: int, micro_batches: int) -> float:
    """Idle time of even stages whose passes through a chunk all take 1 s, with free messages [s]."""
    times = dict.fromkeys(ChunkTimes._fields, 0.0)
    times.update(forward=1.0, backward=1.0, weights=1.0, whole=2.0)
    chunks = [ChunkTimes(**times) for _ in range(2 * stages)]
    pipeline = PipelineTimes(chunks, stages, [0.0] * stages, is_v_shaped=True)
    time = run_iteration(PipelineShape(name, stages, micro_batches, 2, False), pipeline)
    return time - 6.0 * micro_batches


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_bubbles_are_the_published_ones(stages: int) -> None:
    for micro_batches in (2 * stages, 3 * stages + 1, 20 * stages):
        # arXiv:2401.10241, section 6
        assert run_even("zb_v", stages, micro_batches) == pytest.approx(0.0)
        # (PP/2 - 1) (F&B + B - 3 W) of arXiv:2412.19437, table 2, for PP = 2 p, F&B = 3 and B = 2
        bubble = (stages - 1) * (3.0 + 2.0 - 3.0)
        assert run_even("dualpipe_v", stages, micro_batches) == pytest.approx(bubble)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_activations_are_the_published_ones(stages: int) -> None:
    for stage in range(stages):
        # as many as 1F1B: arXiv:2401.10241, section 6
        assert count_held_in_v("zb_v", stage, stages, 4 * stages) == (stages, 0.0)
        # PP + 1 passes through one of PP chunks: arXiv:2412.19437, table 2
        held = count_held_in_v("dualpipe_v", stage, stages, 4 * stages)
        assert 2 * held.held == 2 * stages + 1
        # memory counts nothing that is put off then
        assert held.put_off == 0.0
    many = np.array(["zb_v", "1f1b", "zero_bubble"])
    assert held_batches(10**6, stages=8, schedule=many).tolist() == [8.0, 8.0, 8.0]


def test_chunks_go_down_and_up() -> None:
    positions = [int(find_position(s, c, 3, is_v_shaped=True)) for c in (0, 1) for s in range(3)]
    assert positions == [0, 1, 2, 5, 4, 3]
    for position in range(6):
        place = find_place(position, 3, is_v_shaped=True)
        assert int(find_position(*place, 3, is_v_shaped=True)) == position


def test_layers_are_spread_over_a_v() -> None:
    # 14 layers on 4 stages: the first 6 of 8 chunks on the way have two
    strategy = Strategy(pp=4, schedule="zb_v", chunks=2)
    spread = spread_chunks(14, strategy)
    assert [int(spread.add_up(strategy, stage)) for stage in range(4)] == [3, 3, 4, 4]
    # one layer less in both chunks of the first stage
    stated = Strategy(pp=4, schedule="zb_v", chunks=2, first_layers=2)
    spread = spread_chunks(14, stated)
    assert [int(spread.count_layers(stated, 0, chunk)) for chunk in (0, 1)] == [1, 1]
    assert [int(spread.add_up(stated, stage)) for stage in range(4)] == [2, 4, 4, 4]


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(tp=2, pp=4, dp=2, micro_batch=2, schedule="zb_v", chunks=2, zero=1),
        Strategy(pp=4, dp=2, schedule="zb_v", chunks=2, first_layers=2, zero=1, overlap=False),
        Strategy(tp=2, pp=4, dp=2, micro_batch=2, schedule="dualpipe_v", chunks=2),
        Strategy(pp=2, dp=4, micro_batch=2, schedule="dualpipe_v", chunks=2, zero=2),
    ],
)
def test_the_event_loop_agrees(strategy: Strategy) -> None:
    events = pk.predict(MODEL, "a100-sxm-8x2", strategy=strategy)
    priced = price_strategies(MODEL, load_platform("a100-sxm-8x2"), Strategy.stack([strategy]))
    assert bool(priced["run"][0])
    assert float(priced["time"][0]) == pytest.approx(events.time, rel=0.03)
    assert events.memory().total == pytest.approx(float(priced["needs"][0]))


def test_less_waits_than_in_one_way() -> None:
    """In order as published: 1F1B, H1, ZB-V (arXiv:2401.10241); a V sends twice as many messages."""

    def run(schedule: str, chunks: int) -> float:
        strategy = Strategy(pp=8, micro_batch=2, schedule=schedule, chunks=chunks)
        return float(pk.predict(MODEL, "a100-sxm-8", strategy=strategy).time)

    assert run("zb_v", 2) < run("zero_bubble", 1) < run("1f1b", 1)


def test_what_does_not_go_with_a_v_is_refused() -> None:
    for name in V_SHAPED:
        with pytest.raises(ValueError, match="take chunks=2"):
            Strategy(pp=4, schedule=name)
        with pytest.raises(ValueError, match="state first_layers"):
            Strategy(pp=4, schedule=name, chunks=2, last_layers=3)
    few = Strategy(pp=8, dp=8, micro_batch=1, schedule="dualpipe_v", chunks=2)
    assert not list_fits(MODEL, few)["batch"]
    with pytest.raises(ValueError, match="leave 2 x pp, 8, micro-batches or more"):
        pk.predict(MODEL, "a100-sxm-8x8", strategy=few)
    with pytest.raises(ValueError, match=r"micro_batches is 7 .*'dualpipe_v' of 4.* 8 or more"):
        list_steps("dualpipe_v", 0, stages=4, micro_batches=7)
    steps = list_steps("dualpipe_v", 0, stages=4, micro_batches=8)
    assert [step.phase for step in steps].count("forward") == 16


@pytest.mark.parametrize(
    ("name", "instead"), [("dualpipe", "'dualpipe_v'"), ("v_half", "'zb_v'"), ("v_min", "'zb_v'")]
)
def test_schedules_that_are_not_modelled_say_why(name: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"schedule '{name}' is not modelled: .*take {instead}"):
        Strategy(pp=4, schedule=name, chunks=2)
    with pytest.raises(ValueError, match="is not modelled"):
        Strategy(pp=np.array([4]), schedule=np.array([name]), chunks=np.array([2]))
