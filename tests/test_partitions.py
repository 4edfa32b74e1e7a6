"""Pipelines, activations and model states against the tables of the papers that they come from."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models.partitions import (
    SCHEDULES,
    activation_bytes,
    bubble_time,
    exposed_time,
    held_batches,
    model_state_bytes,
)

DATA = Path(os.environ.get("PERFKIT_SHARED_DATA", "../shared/data")) / "end_to_end" / "seqsel_memory.csv"
count, seconds = st.integers(1, 64), st.floats(1e-6, 10)
#: Models of arXiv:2205.05198, table 3: heads, hidden, layers, micro-batch, stages and chunks.
MODELS = {"22B": (64, 6144, 48, 4, 1, 1), "175B": (96, 12288, 96, 1, 8, 3), "530B": (128, 20480, 105, 1, 35, 3),
          "1T": (160, 25600, 128, 1, 64, 1)}  # fmt: skip
#: Variants there: ranks that share what is not a product, and what is computed again.
VARIANTS = {"none": (1, "none"), "tp_baseline": (1, "none"), "sequence_parallel": (8, "none"),
            "selective": (1, "selective"), "selective+SP": (8, "selective"), "full_recompute": (1, "full")}  # fmt: skip


@given(count, st.integers(1, 8), count, seconds)
def test_bubbles_of_even_stages_are_the_published_shares(p: int, v: int, m: int, t: float) -> None:
    share = bubble_time(p * t, slowest=t, stages=p, chunks=v) / (m * t)
    assert share == pytest.approx((p - 1) / (v * m))  # arXiv:2104.04473, section 2.2
    thirds = bubble_time(3 * p * t, slowest=3 * t, stages=p, delayed=t)
    assert thirds == pytest.approx((p - 1) * t, abs=1e-12)  # (p - 1) (F + B - W), arXiv:2401.10241, table 1


@given(st.lists(seconds, min_size=1, max_size=12), count)
def test_uneven_stages_take_the_slowest_each_time_and_all_once(stages: list[float], m: int) -> None:
    slowest = max(stages)
    time = m * slowest + bubble_time(sum(stages), slowest=slowest, stages=len(stages))
    clock, last = np.zeros(len(stages)), 0.0  # a flow shop: each batch passes stage after stage
    for _ in range(m):
        last = 0.0
        for place, own in enumerate(stages):
            clock[place] = last = max(clock[place], last) + own
    assert time == pytest.approx(last)


def order(schedule: str, m: int, p: int, v: int, rank: int) -> list[tuple[str, int, int]]:
    """What a rank does in turn: forward or backward, the chunk of all stages, and the micro-batch."""
    turns = (
        [((k // p % v) * p, k // (p * v) * p + k % p) for k in range(m * v)] if v > 1 else [(0, k) for k in range(m)]
    )
    forward = [("F", chunk + rank, batch) for chunk, batch in turns]
    backward = [("B", (v - 1) * p - chunk + rank, batch) for chunk, batch in turns]
    warm = m if schedule == "gpipe" else 2 * (p - rank - 1) + (v - 1) * p if v > 1 else p - rank - 1
    warm = min(warm, m * v)
    paired = zip(forward[warm:], backward, strict=False)
    return [*forward[:warm], *(one for pair in paired for one in pair), *backward[m * v - warm :]]


def run(orders: list[list[tuple[str, int, int]]], cost: dict[str, list[float]], message: float) -> float:
    """When the last rank is done, if each does the next of its turns as soon as it can."""
    done, clock, places, last = {}, [0.0] * len(orders), [0] * len(orders), len(cost["F"]) - 1
    while any(place < len(turns) for place, turns in zip(places, orders, strict=True)):
        for rank, turns in enumerate(orders):
            while places[rank] < len(turns):
                kind, stage, batch = turns[places[rank]]
                before = (kind, stage + (1 if kind == "B" else -1), batch)
                if (kind, stage) == ("B", last):
                    before = ("F", last, batch)
                if (kind, stage) != ("F", 0) and before not in done:
                    break
                ready = done.get(before, 0.0) + message * (before[1] != stage)
                clock[rank] = done[kind, stage, batch] = max(clock[rank], ready) + cost[kind][stage]
                places[rank] += 1
    return max(clock)


def test_closed_forms_agree_with_200_simulated_pipelines() -> None:
    rng, ratios = np.random.default_rng(0), []
    for _ in range(200):
        p, v = int(rng.integers(2, 17)), int(rng.choice([1, 1, 2, 4]))
        m = p * int(rng.integers(1, 9))
        backward, message = rng.uniform(1.7, 3.0), rng.choice([0.0, 0.02])
        each = np.ones(p * v) / v
        each[[0, -1]] += rng.uniform(0.0, 0.3, 2) * [0.2, 1.0]  # embeddings, and a head
        cost = {"F": each.tolist(), "B": (backward * each).tolist()}
        schedule = "interleaved" if v > 1 else str(rng.choice(["gpipe", "1f1b"]))
        wanted = run([order(schedule, m, p, v, rank) for rank in range(p)], cost, message / v)
        whole = (1 + backward) * each.reshape(v, p).sum(axis=0)
        slowest = whole.max() + (2 * message if v == 1 else 0.0)
        total = whole.sum() + 2 * message / v * (p - 1) * v
        ratios.append((m * slowest + bubble_time(total, slowest=slowest, stages=p, chunks=v)) / wanted)
    assert np.mean(np.abs(np.log(ratios)) < 0.05) >= 0.95, np.sort(ratios)


@given(count, count, st.integers(1, 8))
def test_schedules_hold_no_more_than_all_and_no_less_than_one(m: int, p: int, v: int) -> None:
    held = {name: float(held_batches(m, stages=p, schedule=name, chunks=v)) for name in SCHEDULES}
    assert all(1 <= own <= m for own in held.values())
    assert held["gpipe"] == held["breadth_first"] == m and held["1f1b"] == held["zero_bubble"] == min(m, p)
    assert held["1f1b"] <= held["interleaved"] <= held["1f1b"] * (1 + (p - 1) / (p * v)) + 1e-9


@given(seconds, seconds, count)
def test_exposed_time_is_what_pieces_take_that_are_made_and_then_sent(n: float, compute: float, k: int) -> None:
    exposed = float(exposed_time(n, compute=compute, pieces=k))
    ends = [0.0]  # piece by piece: when it has been made, and then sent
    for piece in range(1, k + 1):
        ends.append(max(ends[-1], piece * compute / k) + n / k)
    assert exposed == pytest.approx(ends[-1] - compute, abs=1e-9 * (n + compute))
    assert exposed_time(n, compute=0.0, pieces=k) == pytest.approx(n)


def read_memory() -> list[dict[str, str]]:
    if not DATA.exists():
        pytest.skip("shared data are absent; set PERFKIT_SHARED_DATA")
    with open(DATA, newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["model"] in MODELS and row["variant"] in VARIANTS]


def test_activations_are_those_of_the_paper() -> None:
    rows, checked = read_memory(), 0
    for row in rows:
        heads, hidden, layers, batch, stages, chunks = MODELS[row["model"]]
        sharing, recompute = VARIANTS[row["variant"]]
        about = {"heads": heads, "tensor": 8}
        own = activation_bytes(batch, 2048, hidden, sharing=sharing, recompute=recompute, **about)
        if row["activations_GiB_per_gpu"]:
            held = held_batches(10**6, stages=stages, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)
            total = own * held * layers / stages / 2**30
            assert total == pytest.approx(float(row["activations_GiB_per_gpu"]), rel=0.01), row
        if row["activations_pct_of_tp_baseline"]:
            share = 100 * own / activation_bytes(batch, 2048, hidden, **about)
            assert share == pytest.approx(float(row["activations_pct_of_tp_baseline"]), rel=0.02), row
        checked += bool(row["activations_GiB_per_gpu"]) + bool(row["activations_pct_of_tp_baseline"])
    assert checked >= 20


@pytest.mark.parametrize(
    ("changes", "share"),
    [({}, 34 + 5 * 16 * 1024 / 1024), ({"fused": True, "dropout": False}, 32), ({"recompute": "full"}, 2),
     ({"tensor": 4, "recompute": "selective"}, 10 + 24 / 4), ({"tensor": 4, "sharing": 4, "fused": True}, 34 / 4),
     ({"fused": True, "dropout": False, "gated": True, "inner": 3584, "kv_share": 0.25}, 8 + 2 * 2.5 + 2 * 3 * 3.5)],
)  # fmt: skip
def test_activations_by_what_is_kept(changes: dict[str, float], share: float) -> None:
    found = activation_bytes(np.array([1.0, 8.0]), 1024, 1024, heads=16, **changes)  # type: ignore[arg-type]
    assert found / 1024**2 == pytest.approx(share * np.array([1.0, 8.0]))


def test_states_are_those_of_the_paper() -> None:
    stages = [float(model_state_bytes(7.5e9, ranks=64, zero=stage)) / 1e9 for stage in range(4)]
    assert stages == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)  # arXiv:1910.02054, figure 1
