"""Pipelines, activations and model states against the tables of the papers that they come from."""

import csv
import re
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import partitions as p

#: Schedules whose stages are in no V; tests/test_v_schedules.py has the others.
NOT_IN_V = [name for name in p.SCHEDULES if name not in p.V_SHAPED]
count, seconds = st.integers(1, 64), st.floats(1e-6, 10)
#: Models of arXiv:2205.05198, table 3: heads, hidden, layers, micro-batch, stages and chunks.
MODELS = {
    "22B": (64, 6144, 48, 4, 1, 1),
    "175B": (96, 12288, 96, 1, 8, 3),
    "530B": (128, 20480, 105, 1, 35, 3),
    "1T": (160, 25600, 128, 1, 64, 1),
}
#: Variants there: ranks that share what is not a product, and what is computed again.
VARIANTS = {
    "none": (1, "none"),
    "tp_baseline": (1, "none"),
    "sequence_parallel": (8, "none"),
    "selective": (1, "selective"),
    "selective+SP": (8, "selective"),
    "full_recompute": (1, "full"),
}


@given(count, st.integers(1, 8), count, seconds)
def test_bubbles_of_even_stages_are_the_published_shares(n: int, v: int, m: int, t: float) -> None:
    share = p.bubble_time(n * t, slowest=t, stages=n, chunks=v) / (m * t)
    assert share == pytest.approx((n - 1) / (v * m))  # arXiv:2104.04473, section 2.2
    thirds = p.bubble_time(3 * n * t, slowest=3 * t, stages=n, delayed=t)
    # (p - 1) (F + B - W), arXiv:2401.10241, table 1
    assert thirds == pytest.approx((n - 1) * t, abs=1e-12)


@given(st.lists(seconds, min_size=1, max_size=12), count)
def test_uneven_stages_take_the_slowest_each_time_and_all_once(stages: list[float], m: int) -> None:
    slowest = max(stages)
    time = m * slowest + p.bubble_time(sum(stages), slowest=slowest, stages=len(stages))
    free = np.zeros(len(stages))  # a flow shop: each batch passes stage after stage
    for _ in range(m):
        done = 0.0
        for stage, duration in enumerate(stages):
            done = max(free[stage], done) + duration
            free[stage] = done
    assert time == pytest.approx(done)


class Pass(NamedTuple):
    """A pass of a micro-batch through the layers of one stage."""

    phase: str
    stage: int
    micro_batch: int


def find_pass_before(this: Pass, last_stage: int) -> Pass | None:
    """The pass whose result a pass needs; None for the first one of a micro-batch."""
    if this.phase == "forward":
        return this._replace(stage=this.stage - 1) if this.stage > 0 else None
    if this.stage == last_stage:
        return this._replace(phase="forward")
    return this._replace(stage=this.stage + 1)


def run(orders: list[list[Pass]], seconds: dict[str, np.ndarray], message: float) -> float:
    """When the last rank is done, if each takes the next of its passes as soon as it can."""
    last_stage = len(seconds["forward"]) - 1
    done: dict[Pass, float] = {}
    free = [0.0 for _ in orders]
    left = [deque(order) for order in orders]
    while any(left):
        for rank, passes in enumerate(left):
            while passes:
                this = passes[0]
                before = find_pass_before(this, last_stage)
                ready = 0.0
                if before is not None:
                    if before not in done:
                        break
                    ready = done[before]
                    if before.stage != this.stage:
                        ready += message
                free[rank] = max(free[rank], ready) + seconds[this.phase][this.stage]
                done[this] = free[rank]
                passes.popleft()
    return max(free)


def test_closed_forms_agree_with_200_simulated_pipelines() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        ranks = int(rng.integers(2, 17))
        chunks = int(rng.choice([1, 1, 2, 4]))
        micro_batches = ranks * int(rng.integers(1, 9))
        backward = rng.uniform(1.7, 3.0)  # times the forward pass
        message = rng.choice([0.0, 0.02])
        forward = np.ones(ranks * chunks) / chunks
        embeddings, head = rng.uniform(0.0, 0.3, 2)
        forward[0] += 0.2 * embeddings
        forward[-1] += head
        schedule = "interleaved" if chunks > 1 else str(rng.choice(["gpipe", "1f1b"]))
        orders = []
        for rank in range(ranks):
            steps = p.list_steps(
                schedule, rank, stages=ranks, micro_batches=micro_batches, chunks=chunks
            )
            orders.append(
                [Pass(step.phase, step.chunk * ranks + rank, step.micro) for step in steps]
            )
        seconds = {"forward": forward, "backward": backward * forward}
        simulated = run(orders, seconds, message / chunks)

        stages = (1 + backward) * forward.reshape(chunks, ranks).sum(axis=0)
        slowest = stages.max()
        if chunks == 1:
            slowest += 2 * message
        total = stages.sum() + 2 * message * (ranks - 1)
        bubble = p.bubble_time(total, slowest=slowest, stages=ranks, chunks=chunks)
        ratios.append((micro_batches * slowest + bubble) / simulated)
    assert np.mean(np.abs(np.log(ratios)) < 0.05) >= 0.95, np.sort(ratios)


@given(count, count, st.integers(1, 8))
def test_schedules_hold_no_more_than_all_and_no_less_than_one(m: int, n: int, v: int) -> None:
    held = {}
    for schedule in NOT_IN_V:
        held[schedule] = float(p.held_batches(m, stages=n, schedule=schedule, chunks=v))
        assert 1 <= held[schedule] <= m
    assert held["gpipe"] == held["breadth_first"] == m
    assert held["1f1b"] == held["zero_bubble"] == min(m, n)
    assert held["1f1b"] <= held["interleaved"] <= held["1f1b"] * (1 + (n - 1) / (n * v)) + 1e-9


@pytest.mark.parametrize("name", NOT_IN_V)
def test_memory_holds_what_the_order_of_passes_keeps(name: str) -> None:
    """Micro-batches that are forward but not yet backward, in all layers of the first stage."""
    schedule = p.SCHEDULES[name]
    for stages, micro_batches, chunks in product(range(1, 9), range(1, 25), range(1, 5)):
        if chunks > 1 and not schedule.has_chunks:
            continue
        if schedule.interleaves and micro_batches % stages:
            continue  # such strategies are refused
        steps = p.list_steps(name, 0, stages=stages, micro_batches=micro_batches, chunks=chunks)
        held = most = 0
        for step in steps:
            if step.phase == "forward":
                held += 1
            elif step.phase == "backward":
                held -= 1
            most = max(most, held)
        formula = p.held_batches(micro_batches, stages=stages, schedule=name, chunks=chunks)
        assert float(formula) == pytest.approx(most / chunks), (stages, micro_batches, chunks)


@given(seconds, seconds, count)
def test_exposed_time_is_what_pieces_take_that_are_made_and_then_sent(
    n: float, compute: float, k: int
) -> None:
    exposed = float(p.exposed_time(n, compute=compute, pieces=k))
    ends = [0.0]  # piece by piece: when it has been made, and then sent
    for piece in range(1, k + 1):
        ends.append(max(ends[-1], piece * compute / k) + n / k)
    assert exposed == pytest.approx(ends[-1] - compute, abs=1e-9 * (n + compute))
    assert p.exposed_time(n, compute=0.0, pieces=k) == pytest.approx(n)


@given(seconds, seconds, st.floats(0.0, 0.99))
def test_time_beside_is_what_a_slower_kernel_takes(
    message: float, compute: float, contention: float
) -> None:
    """Step by step: what the kernel has done when the message ends."""
    added = float(p.time_beside(message, compute=compute, contention=contention))
    done = (1.0 - contention) * message
    end = max(message, message + compute - done)
    assert added == pytest.approx(end - compute, abs=1e-9 * (message + compute))


def test_activations_are_those_of_the_paper(shared_data: Path) -> None:
    checked = 0
    with open(
        shared_data / "end_to_end" / "seqsel_memory.csv", newline="", encoding="utf-8"
    ) as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model"] in MODELS and row["variant"] in VARIANTS
        ]
    for row in rows:
        heads, hidden, layers, batch, stages, chunks = MODELS[row["model"]]
        sharing, recompute = VARIANTS[row["variant"]]
        about = {"heads": heads, "tensor": 8}
        own = p.activation_bytes(batch, 2048, hidden, sharing=sharing, recompute=recompute, **about)
        if row["activations_GiB_per_gpu"]:
            held = p.held_batches(
                10**6,
                stages=stages,
                schedule="interleaved" if chunks > 1 else "1f1b",
                chunks=chunks,
            )
            total = own * held * layers / stages / 2**30
            assert total == pytest.approx(float(row["activations_GiB_per_gpu"]), rel=0.01), row
        if row["activations_pct_of_tp_baseline"]:
            share = 100 * own / p.activation_bytes(batch, 2048, hidden, **about)
            assert share == pytest.approx(float(row["activations_pct_of_tp_baseline"]), rel=0.02), (
                row
            )
        checked += bool(row["activations_GiB_per_gpu"]) + bool(
            row["activations_pct_of_tp_baseline"]
        )
    assert checked >= 20


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 34 + 5 * 16 * 1024 / 1024),
        ({"fused": True, "dropout": False}, 32),
        ({"recompute": "full"}, 2),
        ({"tensor": 4, "recompute": "selective"}, 10 + 24 / 4),
        ({"tensor": 4, "sharing": 4, "fused": True}, 34 / 4),
        (
            {"fused": True, "dropout": False, "gated": True, "inner": 3584, "kv_share": 0.25},
            8 + 2 * 2.5 + 2 * 3 * 3.5,
        ),
    ],
)
def test_activations_by_what_is_kept(changes: dict[str, float], share: float) -> None:
    found = p.activation_bytes(np.array([1.0, 8.0]), 1024, 1024, heads=16, **changes)  # type: ignore[arg-type]
    assert found / 1024**2 == pytest.approx(share * np.array([1.0, 8.0]))


@pytest.mark.parametrize("name", [name for name in p.SCHEDULES if name not in p.CHUNKED])
def test_chunks_mean_nothing_to_a_schedule_without_them(name: str) -> None:
    one = p.held_batches(64, stages=8, schedule=name)
    assert p.held_batches(64, stages=8, schedule=name, chunks=3) == one


def test_names_of_schedules_may_come_as_objects() -> None:
    names = np.array(["gpipe", "1f1b"], dtype=object)  # as of a column of a frame
    np.testing.assert_array_equal(p.held_batches(64, stages=8, schedule=names), [64.0, 8.0])


@pytest.mark.parametrize("names", [3, None, np.array(["1f1b", 2.0], dtype=object)])
def test_what_is_no_name_of_a_schedule_is_refused_as_it_was_given(names: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"schedule is {names!r}; it must be a name")):
        p.held_batches(64, stages=8, schedule=names)
