"""What messages advise where a strategy does not fit: each step frees what it says, fits if it says so,
and is the fastest of its kind that does."""

import re
from dataclasses import replace
from typing import Any

import pytest

import perfkit as pk
from perfkit.ground.units import format_bytes
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Platform
from perfkit.prediction.memory import Room
from perfkit.prediction.next_steps import NextStep, NextSteps, list_next_steps
from perfkit.prediction.strategies import price_strategies

GPU = pk.load_platform("h100-sxm-8x4")
LLAMA = pk.Transformer.preset(
    "llama-3-8b", batch=64, sequence=4096, layers=16, dtype="bf16", mixed=True, attention="flash2"
)
BARE = Platform.from_datasheet(
    "bare", flops={"bf16": 4e14}, memory=(40e9, 3e12), link=450e9, ranks=8
)


def price(model: pk.Transformer, strategy: pk.Strategy, platform: Platform = GPU) -> float:
    """Memory of the fullest rank, without its reserve [B]."""
    columns = price_strategies(model, platform, pk.Strategy.stack([strategy]), near=0.0)
    return float(columns["needs"][0])


def ask(strategy: pk.Strategy, memory: float, model: Any = LLAMA, where: Any = GPU) -> NextSteps:
    """Steps under a stated memory."""
    return list_next_steps(model, where, strategy, Room.stated(memory))


def pick(steps: NextSteps, beginning: str) -> list[NextStep]:
    """Those that are enough alone and begin with these words."""
    return [step for step in steps.alone if step.words.startswith(beginning)]


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (50e9, ["micro_batch=2", "checkpoint='full'"]),
        (36e9, ["micro_batch=1"]),
    ],
)
def test_the_fastest_step_of_each_kind_that_fits_is_named(memory: float, words: list[str]) -> None:
    base = pk.Strategy(dp=16, zero=3, micro_batch=4)
    steps = ask(base, memory)
    assert [step.words for step in steps.alone] == words
    assert not steps.together
    for step in steps.alone:
        name, _, value = step.words.partition("=")
        changed = replace(base, **{name: int(value) if value.isdigit() else value.strip("'")})
        assert step.freed == pytest.approx(price(LLAMA, base) - price(LLAMA, changed))
        assert pk.explore(LLAMA, GPU, strategies=[changed], memory=memory).best == changed


@pytest.mark.parametrize(("micro_batch", "memory", "smaller"), [(3, 35e9, 1), (6, 60e9, 2)])
def test_micro_batches_that_are_no_powers_of_two_have_smaller_ones(
    micro_batch: int, memory: float, smaller: int
) -> None:
    """Each number that divides them."""
    model = replace(LLAMA, batch=96)
    steps = ask(pk.Strategy(dp=16, zero=3, micro_batch=micro_batch), memory, model)
    assert steps.alone[0].words == f"micro_batch={smaller}"


def test_steps_that_are_not_enough_alone_add_up() -> None:
    """Micro-batches of one, shards and checkpoints: together they fit, and free what they say."""
    base = pk.Strategy(dp=16, micro_batch=4)
    steps = ask(base, 31e9)
    assert not steps.alone
    names = [step.words for step in steps.together]
    assert names == ["micro_batch=1", "zero=3"]
    assert [step.fits for step in steps.together] == [False, True]
    after = price(LLAMA, replace(base, micro_batch=1, zero=3))
    assert sum(step.freed for step in steps.together) == pytest.approx(price(LLAMA, base) - after)
    freed = format_bytes(steps.together[0].freed)
    assert steps.advise().startswith(f"take micro_batch=1 (frees {freed}) and then zero=3 (frees ")
    assert re.search(r": fits, \S+ m?s\), or a platform with more", steps.advise())


def test_steps_are_named_by_time_the_fastest_first() -> None:
    """Each time is that of a search, and no other setting of the same kind is faster and fits."""
    base = pk.Strategy(dp=16, micro_batch=2)
    steps = ask(base, 70e9)
    times = [step.time for step in steps.alone]
    assert len(times) == 2
    assert times == sorted(times)
    priced = {}
    for zero in (1, 2, 3):
        changed = replace(base, offload="optimizer", zero=zero)
        if price(LLAMA, changed) + 8e9 < 70e9:
            columns = price_strategies(LLAMA, GPU, pk.Strategy.stack([changed]), near=0.0)
            priced[f"offload='optimizer' with zero={zero}"] = float(columns["time"][0])
    [offload] = [step for step in steps.alone if step.words.startswith("offload")]
    assert offload.time == pytest.approx(priced[offload.words])
    assert offload.time == pytest.approx(min(priced.values()))


def test_one_device_offloads_what_is_slow_to_miss_least() -> None:
    """States of the optimizer where they are enough, not weights, which cross the link in each pass."""
    model = replace(LLAMA, layers=32, batch=8, fused=True)
    room = Room.of_device(GPU.memory_of_rank)
    base = pk.Strategy(checkpoint="full")
    [step] = list_next_steps(model, GPU, base, room).alone[:1]
    assert step.words == "offload='optimizer' with zero=2"
    slow = pk.Strategy(checkpoint="full", zero=3, offload="parameters")
    columns = price_strategies(model, GPU, pk.Strategy.stack([slow]), near=0.0)
    assert columns["time"][0] > 2 * step.time


def test_searches_name_the_fastest_plan_that_fits_with_a_setting() -> None:
    """Not a setting of the plan that takes least memory: what fits is the fastest of all with it."""
    model = replace(LLAMA, layers=32, batch=8, fused=True)
    with pytest.raises(ValueError, match="fits into") as refusal:
        pk.explore(model, "h100-sxm-8", 1)
    message = str(refusal.value)
    plan = "Strategy(tp=1, pp=1, dp=1, zero=2, offload='optimizer')"
    assert f"take {plan} (fits with " in message
    given = []
    for micro_batch in (1, 2, 4, 8):
        for checkpoint in ("none", "full"):
            for offload, zero in (("optimizer", 1), ("optimizer", 2), ("parameters", 3)):
                given.append(
                    pk.Strategy(
                        micro_batch=micro_batch, checkpoint=checkpoint, offload=offload, zero=zero
                    )
                )
    assert repr(pk.explore(model, "h100-sxm-8", strategies=given).best) == plan


def test_the_workspace_of_an_optimizer_is_the_first_to_go() -> None:
    """AdamW of all weights at once writes one tensor of all of them; fused it writes none."""
    model = replace(LLAMA, fused=False, batch=8, sequence=512)
    base = pk.Strategy(dp=1, zero=0)
    workspace = 4.0 * 5_041_557_504
    assert find_optimizer(model.optimizer).name == "adamw"
    needs = price(model, base, pk.load_platform("h200-sxm-8"))
    steps = ask(base, needs, model, pk.load_platform("h200-sxm-8"))
    assert steps.alone[0].words == "fused=True"
    assert 0.2 * workspace < steps.alone[0].freed <= workspace


def test_offload_is_named_where_a_host_is_known_and_has_room() -> None:
    base = pk.Strategy(dp=8, zero=3, checkpoint="full")
    known = BARE.with_host_memory(capacity=2e12, bandwidth=400e9, link=25e9)
    small = BARE.with_host_memory(capacity=1e9, bandwidth=400e9, link=25e9)
    needs = price(LLAMA, base, BARE)
    [step] = pick(ask(base, 0.95 * needs, where=known), "offload")
    assert step.words == "offload='optimizer'"
    moved = price(LLAMA, replace(base, offload="optimizer"), known)
    assert step.freed == pytest.approx(needs - moved)
    for where in (BARE, small):
        assert "offload" not in ask(base, 0.95 * needs, where=where).advise()


def test_software_that_shares_weights_keeps_them_shared_beside_an_offload() -> None:
    """A strategy that says nothing runs with the zero of its stack, and an offload leaves it so."""
    silent = pk.Strategy(dp=8, checkpoint="full")
    stated = replace(silent, zero=3)
    room = Room.stated(22e9)
    [of_silent] = pick(list_next_steps(LLAMA, GPU, silent, room, stack="fsdp"), "offload")
    [of_stated] = pick(list_next_steps(LLAMA, GPU, stated, room, stack="fsdp"), "offload")
    assert of_stated.words == "offload='optimizer'"
    assert of_silent == of_stated._replace(words="offload='optimizer' with zero=3")


def test_more_ranks_are_named_while_the_platform_has_them() -> None:
    base = pk.Strategy(dp=8, zero=3, checkpoint="full", offload="optimizer")
    [step] = pick(ask(base, 16e9), "16 ranks")
    assert step.words == "16 ranks (dp=16)"
    assert not pick(ask(base, 16e9, where=pk.load_platform("h100-sxm-8")), "16 ranks")


def test_messages_carry_the_steps() -> None:
    large = replace(LLAMA, layers=32, fused=True)
    with keep_quiet():
        [note] = [
            text
            for text in pk.predict(large, GPU, strategy=pk.Strategy(dp=8)).warnings
            if "does not fit" in text
        ]
        [stated] = [
            text for text in pk.predict(large, GPU, ranks=8).warnings if "does not fit" in text
        ]
    assert re.search(
        r"; take zero=2 \(frees \d+ GB: fits, \S+ s\) or offload='optimizer' with zero=1 \(frees \d+ GB: "
        r"fits, \S+ s\),",
        note,
    )
    assert "; with strategy=Strategy(tp=1, pp=1, dp=8, micro_batch=8) " in stated
    with pytest.raises(ValueError, match="fits into") as refusal:
        pk.explore(replace(LLAMA, layers=80, hidden=8192, heads=64, inner=28672), "h100-sxm-8", 8)
    message = str(refusal.value)
    assert re.search(
        r"the least takes \d+ GB; take Strategy\(.*offload='\w+'\) \(fits with ", message
    )


def test_ranks_share_sequences_that_are_too_long_for_one() -> None:
    """Where a micro-batch has one sequence, its tokens are what can still be divided."""
    long = replace(LLAMA, layers=8, batch=8, sequence=131072, positions=131072)
    base = pk.Strategy(dp=8, zero=3, checkpoint="full")
    [step] = pick(ask(base, 60e9, long), "cp=")
    assert step.words == "cp=8 with dp=1"
    shared = replace(base, cp=8, dp=1)
    columns = price_strategies(long, GPU, pk.Strategy.stack([shared]), near=0.0)
    assert step.time == pytest.approx(float(columns["time"][0]))
    several = replace(base, micro_batch=2)
    assert "cp=" not in ask(several, 60e9, replace(long, batch=16)).advise()
