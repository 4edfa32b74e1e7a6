"""Ranks that share sequences: kinds by their names, their messages across nodes, and their memory."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from benchmarks import context_parallel
from perfkit.__main__ import main
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.micro_batches import size_micro_batch
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import CP_KINDS
from tests.levels import load_without_levels

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
MODEL = pk.Transformer.preset(
    "llama-3.1-8b", layers=4, batch=2, sequence=32768, dtype="bf16", mixed=True, fused=True
)


def price(strategy: pk.Strategy, platform: Any, model: pk.Transformer = MODEL) -> dict[str, float]:
    columns = price_strategies(model, platform, pk.Strategy.stack([strategy]))
    return {name: float(values[0]) for name, values in columns.items()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rings", "cp_kind is 'rings'; known are ring, all_gather, ulysses; did you mean 'ring'"),
        ("p2p", "cp_kind is 'p2p'; known are .*; that is 'ring' here"),
        ("a2a", "cp_kind is 'a2a'; known are .*; that is 'ulysses' here"),
        ("allgather", "that is 'all_gather' here"),
        ("a2a\\+p2p", "no step of it is published that could check it; take 'ring' or 'ulysses'"),
    ],
)
def test_unknown_kinds_are_errors_that_know_the_words_of_others(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.Strategy(cp=2, cp_kind=kind.replace("\\", ""))


def test_the_former_word_says_what_to_write_now() -> None:
    with pytest.raises(ValueError, match=r"ulysses is True; .* take cp_kind='ulysses'"):
        pk.Strategy(cp=2, ulysses=True)
    # copies take the fields that are there
    swapped = pk.Strategy(cp=2, cp_kind="ulysses")
    assert replace(swapped, dp=4).cp_kind == "ulysses"


def test_kinds_are_of_no_effect_where_sequences_are_whole() -> None:
    alone = [pk.Strategy(tp=2, micro_batch=1, cp_kind=kind) for kind in CP_KINDS]
    columns = price_strategies(MODEL, pk.load_platform("h100-sxm-8"), pk.Strategy.stack(alone))
    for values in columns.values():
        assert len(np.unique(values)) == 1
    events = [pk.predict(MODEL, "h100-sxm-8", strategy=strategy).time for strategy in alone]
    assert len(set(events)) == 1


def test_ranks_exchange_heads_that_they_divide() -> None:
    """32 heads, 8 of keys."""
    with pytest.raises(ValueError, match="heads of the model, 32; tp x cp, 8 x 8, must divide it"):
        pk.predict(MODEL, "h100-sxm-8x8", strategy=pk.Strategy(tp=8, cp=8, cp_kind="ulysses"))
    with pytest.raises(
        ValueError, match=r"tp x cp, 1 x 4, .* divide kv_heads, 6, or be a multiple"
    ):
        six = replace(MODEL, heads=24, head_width=128, kv_heads=6)
        pk.predict(six, "h100-sxm-8", strategy=pk.Strategy(cp=4, cp_kind="ulysses"))


def test_keys_of_latent_attention_are_whole_heads() -> None:
    """128 heads with keys of 192 and values of 128 numbers; queries are as keys, results as values."""
    model = pk.Transformer.preset("deepseek-v3", batch=1, sequence=4096, dtype="bf16")
    tokens = 4096 / 4
    sizes = size_micro_batch(model, pk.Strategy(cp=4, tp=2))
    assert sizes.keys == 2 * tokens * 64 * (192 + 128) / 2
    swapped = size_micro_batch(model, pk.Strategy(cp=4, tp=2, cp_kind="ulysses")).swapped
    assert 4 * swapped == 2 * tokens * 64 * (2 * 192 + 2 * 128)


def test_a_ring_that_leaves_a_node_is_as_slow_as_its_step_to_another_one() -> None:
    """Each of 15 steps waits for that between nodes, as 16 ranks pass on their keys at once."""
    platform = load_without_levels("h100-sxm-8x2")
    ring = pk.Strategy(cp=16, micro_batch=2, zero=1)
    attention = 0.5e-3
    keys = 2 * 2 * 32768 / 16 * 8 * 128
    step = MessageTimes(platform).time("send_recv", np.array([2 * keys, 4 * keys]), 2, 8)
    inside = MessageTimes(platform).time("send_recv", np.array([2 * keys, 4 * keys]), 2, 1)
    assert np.all(step > 2 * inside)
    # all that kernels could hide is small
    exposed = price(ring, platform)["context"]
    sent = 4 * 15 * step.sum()
    assert sent - 4 * attention * 15 < exposed < sent
    slower = platform.with_link("inter", bandwidth=25e9)
    step_there = MessageTimes(slower).time("send_recv", np.array([2 * keys, 4 * keys]), 2, 8)
    added = price(ring, slower)["context"] - exposed
    assert added == pytest.approx(4 * 15 * (step_there - step).sum(), rel=1e-9)


@pytest.mark.parametrize("kind", CP_KINDS)
def test_closed_forms_and_events_agree_on_each_kind(kind: str) -> None:
    platform = load_without_levels("h100-sxm-8x2")
    strategy = pk.Strategy(cp=16, zero=1, cp_kind=kind, buffers=True)
    events = pk.predict(MODEL, platform, strategy=strategy).time
    assert price(strategy, platform)["time"] == pytest.approx(events, rel=0.03)


def test_gathered_keys_lie_in_memory_for_a_layer_at_a_time() -> None:
    """Keys and values of 32,768 tokens with 8 heads of 128, in bf16, with their gradients; a small
    vocabulary leaves the fullest moment to the layers."""
    model = replace(MODEL, vocabulary=1024, batch=1)
    needs = {}
    for kind in CP_KINDS:
        strategy = pk.Strategy(cp=8, zero=1, buffers=True, checkpoint="full", cp_kind=kind)
        columns = price(strategy, pk.load_platform("h100-sxm-8"), model)
        needs[kind] = columns["needs"]
    keys_and_values = 2 * 2 * 32768 * 8 * 128
    assert needs["ring"] == needs["ulysses"]
    assert needs["all_gather"] - needs["ring"] == pytest.approx(2 * keys_and_values)


def test_the_kind_is_an_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model llama-3.2-1b --sequence 8192 --batch 8 --dtype bf16 --platform h100-sxm-8"
    assert main(f"predict {words} --cp 8 --cp-kind all_gather --json -".split()) == 0
    time = json.loads(capsys.readouterr().out)["time_s"]
    model = pk.Transformer.preset("llama-3.2-1b", batch=8, sequence=8192, dtype="bf16")
    strategy = pk.Strategy(cp=8, cp_kind="all_gather")
    assert time == pytest.approx(pk.predict(model, "h100-sxm-8", strategy=strategy).time)


def test_searches_try_each_kind() -> None:
    """On slow links between nodes a ring waits; what exchanges most in a node is faster."""
    table = pk.explore(replace(MODEL, batch=1), "h100-sxm-8x2", 16).table()
    assert set(table["cp_kind"].to_list()) == set(CP_KINDS)
    assert set(table.filter(table["cp"] == 1)["cp_kind"].to_list()) <= {"ring"}


@pytest.mark.parametrize(
    ("preset", "sequence", "tokens_per_s", "tflops"),
    [("llama-2-7b", 4096, 16847, 776), ("llama-3-8b", 8192, 26006, 1506)],
)
def test_nemo_counts_all_of_attention(
    preset: str, sequence: int, tokens_per_s: float, tflops: float
) -> None:
    """NVIDIA's performance summaries state both (NeMo 24.07 on H100, 25.02 on B200)."""
    model = pk.Transformer.preset(preset, batch=1, sequence=sequence)
    of_token = context_parallel.count_flops(model, counted="full") / sequence
    assert of_token * tokens_per_s == pytest.approx(tflops * 1e12, rel=1e-3)


def test_published_steps_on_b200_are_as_right_with_shared_sequences_as_with_whole_ones() -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in context_parallel.compare_rows():
        if row["row"].startswith("nemo-8b"):
            errors[row["cp"] > 1].append(row["error"])
    assert len(errors[True]) == 6
    assert len(errors[False]) == 2
    mean = {shared: float(np.mean(values)) for shared, values in errors.items()}
    assert abs(mean[True] - mean[False]) < 0.03
    assert max(np.abs(errors[True] + errors[False])) < 0.15
