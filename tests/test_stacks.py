"""Stacks: records of facts, what they change, and levels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import perfkit as pk
from perfkit.fitting import Iteration
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.machine import PlatformError
from perfkit.prediction.strategies import PARTS
from perfkit.workloads.stack import FP8_RECIPES, STACKS, apply_stack, find_stack

GPT = pk.Transformer.preset("gpt3-6.7b", batch=16, dtype="bf16", mixed=True, fused=True, layers=4)
DLRM = pk.DLRM(rows=[10**5, 20000, 300, 5000], batch=8192, dim=64)
CLUSTER = pk.load_platform("h100-sxm-8x8")


def make_level(scale: float, spread: float = 0.05, n: int = 7) -> Iteration:
    return Iteration.build(
        {"scale": scale},
        units={"scale": "-"},
        stderr={"scale": 0.01},
        spread=spread,
        n=n,
        kind="fitted",
        source="invented",
    )


def add_levels(platform: pk.Platform, **scales: float) -> pk.Platform:
    """The same platform with levels; `__` stands for a dot, and `others` for an asterisk."""
    stacks = {
        name.replace("__", ".").replace("others", "*").replace("_", "-"): make_level(scale)
        for name, scale in scales.items()
    }
    return replace(platform, context=replace(platform.context, stacks=stacks))


def test_every_stack_has_a_source_and_names_that_are_known() -> None:
    frame = pk.stacks()
    assert frame["name"].to_list() == list(STACKS)
    for name, stack in STACKS.items():
        assert stack.name == name
        assert len(stack.source) > 20
        assert stack.fp8_recipe in FP8_RECIPES
    assert {"megatron", "megatron-te", "fsdp", "fsdp-compiled", "ddp", "ddp-compiled"} <= set(
        STACKS
    )
    assert {"deepspeed", "maxtext", "mpt", "internevo", "hugectr", "torchrec"} <= set(STACKS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mixed": "half"}, "mixed is 'half'"),
        ({"fp8_recipe": "int8"}, "fp8_recipe is 'int8'"),
        ({"zero": 4}, "zero is 4"),
        ({"graphs": 1}, "graphs"),
        ({"name": "a.b"}, "no dot"),
        ({"vocabulary_multiple": 0}, "vocabulary_multiple is 0"),
    ],
)
def test_wrong_facts_are_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(find_stack("megatron"), **change)  # type: ignore[arg-type]


def test_an_unknown_stack_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"stack is 'megatron-lm'.*megatron-te"):
        pk.predict(GPT, "h100-sxm-8", stack="megatron-lm")


@pytest.mark.parametrize(
    ("model", "strategy", "execution", "name"),
    [
        (GPT, None, None, "ddp"),
        (GPT, None, "compiled", "ddp-compiled"),
        (replace(GPT, parallel="fsdp"), None, None, "fsdp"),
        (replace(GPT, parallel="zero1"), None, "compiled", "fsdp-compiled"),
        (GPT, pk.Strategy(dp=8), None, "ddp"),
        (GPT, pk.Strategy(dp=8, zero=3), "compiled", "fsdp-compiled"),
        (GPT, pk.Strategy(tp=2), "compiled", "megatron"),
        (GPT, pk.Strategy(pp=2), None, "megatron"),
        (replace(GPT, dtype="fp8", mixed=False), pk.Strategy(tp=2), None, "megatron-te"),
        (DLRM, None, None, "torchrec"),
    ],
)
def test_the_usual_stack_follows_from_the_workload(
    model: pk.Transformer, strategy: pk.Strategy | None, execution: str | None, name: str
) -> None:
    work = apply_stack(model, strategy, execution, None)
    assert work.stacks[0].name == name
    assert (work.workload, work.strategy, work.execution) == (model, strategy, execution)


def test_facts_fill_what_was_left_at_its_default_and_nothing_else() -> None:
    work = apply_stack(GPT, None, None, "fsdp-compiled")
    assert (work.workload.parallel, work.execution) == ("fsdp", "compiled")
    stated = apply_stack(replace(GPT, parallel="zero2"), None, "eager", "fsdp-compiled")
    assert (stated.workload.parallel, stated.execution) == ("zero2", "eager")
    shared = apply_stack(GPT, pk.Strategy(dp=8), None, "fsdp")
    assert shared.strategy == pk.Strategy(dp=8, zero=3)
    own = replace(find_stack("fsdp"), zero=1, attention="flash2")
    assert apply_stack(GPT, pk.Strategy(dp=8), None, own).strategy == pk.Strategy(dp=8, zero=1)
    assert apply_stack(GPT, None, None, own).workload.attention == "flash2"
    eager = replace(GPT, attention="eager")
    assert apply_stack(eager, None, None, own).workload.attention == "eager"


def test_a_prediction_says_its_stack() -> None:
    with keep_quiet():
        found = pk.predict(GPT, "h100-sxm-8", ranks=8, stack="fsdp")
        stated = pk.predict(replace(GPT, parallel="fsdp"), "h100-sxm-8", ranks=8)
    assert found.stack == stated.stack == find_stack("fsdp")
    assert "stack: fsdp (" in found.explain()
    assert ("software", found._software) in next(rows for _, rows in found.sections())


@pytest.mark.parametrize(
    "strategy",
    [pk.Strategy(tp=4, pp=2, dp=2), pk.Strategy(dp=8, zero=3), pk.Strategy(dp=8, zero=1)],
)
def test_a_level_scales_the_whole_time_and_gives_its_spread(strategy: pk.Strategy) -> None:
    """Device, host and messages alike: every part, and the closed forms beside the event loop."""
    name = "fsdp" if strategy.alone else "megatron"
    levelled = add_levels(CLUSTER, **{f"{name}__bf16": 1.25})
    with keep_quiet():
        before = pk.predict(GPT, CLUSTER, strategy=strategy)
        after = pk.predict(GPT, levelled, strategy=strategy)
        closed = pk.explore(GPT, CLUSTER, strategies=[strategy], memory=1e13).table()
        closed_after = pk.explore(GPT, levelled, strategies=[strategy], memory=1e13).table()
    assert after.time == pytest.approx(1.25 * before.time)
    for key, (count, seconds) in before.parts.items():
        assert after.parts[key][0] == count
        assert after.parts[key][1] == pytest.approx(1.25 * seconds, abs=1e-9)
    assert sum(seconds for _, seconds in after.parts.values()) == pytest.approx(after.time)
    assert after.lower_bound == pytest.approx(1.25 * before.lower_bound)
    assert after.serial == pytest.approx(1.25 * before.serial)
    assert after.level is not None
    for part in ("time", *PARTS):
        assert closed_after[part][0] == pytest.approx(1.25 * closed[part][0])
    assert closed_after["stack"][0] == name
    # the spread of the level in place of that of whole iterations
    whole = CLUSTER.context.find_iteration("transformer", 8)
    assert whole is not None
    assert after.spread < before.spread
    assert closed_after["spread"][0] < closed["spread"][0]
    same = replace(
        levelled,
        context=replace(CLUSTER.context, stacks={f"{name}.bf16": make_level(1.25, whole.spread)}),
    )
    with keep_quiet():
        assert pk.predict(GPT, same, strategy=strategy).spread == pytest.approx(before.spread)


def test_a_sweep_and_a_lone_operation_follow_the_level() -> None:
    levelled = add_levels(pk.load_platform("h100-sxm-8"), ddp__bf16=0.8, others__bf16=1.5)
    with keep_quiet():
        table = pk.sweep(GPT, {"batch": [8, 16]}, levelled, ranks=8, progress=False).table()
        one = pk.predict(GPT, levelled, ranks=8)
        other = pk.predict(GPT, levelled, ranks=8, stack="deepspeed")
        plain = pk.predict(GPT, "h100-sxm-8", ranks=8, stack="deepspeed")
        stacks = pk.sweep(
            GPT, {"stack": ["ddp", "deepspeed"]}, levelled, ranks=8, progress=False
        ).table()
    assert table["time"][1] == pytest.approx(one.time)
    assert one.spread == pytest.approx(
        np.log(table["high"][1] / table["time"][1]) / 1.2815515655446004
    )
    assert other.time == pytest.approx(1.5 * plain.time)
    assert stacks["time"].to_list() == pytest.approx([one.time, other.time])
    number = one.timeline().filter(name="mm")["operation"][0]
    account = one.explain_operation(number)
    assert account.steps[-1].factor == 0.8
    assert sum(step.added for step in account.steps) == pytest.approx(account.time)


def test_a_stack_without_a_level_takes_that_of_others_and_says_so() -> None:
    node = pk.load_platform("h100-sxm-8")
    levelled = add_levels(node, megatron_te__fp8=1.1, others__bf16=0.9)
    with keep_quiet():
        others = pk.predict(GPT, levelled, ranks=8)
        none = pk.predict(replace(GPT, dtype="fp16"), levelled, ranks=8)
        plain = pk.predict(GPT, node, ranks=8)
        fp8 = replace(GPT, dtype="fp8", mixed=False)
        own = pk.predict(fp8, levelled, strategy=pk.Strategy(tp=8))
    note = "no published step of ddp in bf16 on h100-sxm-8: level of other stacks"
    assert note in others.warnings
    assert "no published step of ddp in fp16 on h100-sxm-8: no level" in none.warnings
    assert not [text for text in (*plain.warnings, *own.warnings) if "published step of" in text]
    assert others.time == pytest.approx(0.9 * plain.time)
    assert own.level is not None
    assert own.level["scale"] == 1.1


def test_levels_are_kept_in_files_and_carried_over(tmp_path: Path) -> None:
    levelled = add_levels(CLUSTER, megatron_te__fp8=1.1, others__bf16=0.9)
    again = pk.load_platform(levelled.save(tmp_path / "levels.toml"))
    found = again.context.find_stack("megatron-te", "fp8")
    assert found is not None
    assert (found["scale"], found.spread, found.n, found.source) == (1.1, 0.05, 7, "invented")
    assert again.context.find_stack("fsdp", "fp8") is None
    faster = again.with_scale(peak=2.0).context.find_stack("ddp", "bf16")
    assert faster is not None
    assert faster["scale"] == 0.9
    with pytest.raises(PlatformError, match=r"stacks.*names no stack"):
        replace(CLUSTER, context=replace(CLUSTER.context, stacks={".bf16": make_level(1.0)}))
    with pytest.raises(PlatformError, match=r"format is 'int4'"):
        replace(CLUSTER, context=replace(CLUSTER.context, stacks={"ddp.int4": make_level(1.0)}))


def test_a_plan_of_tables_follows_the_level() -> None:
    node = pk.load_platform("a100-sxm-8")
    levelled = add_levels(node, torchrec__fp32=1.3)
    model = DLRM
    plan = pk.shard(model, node, ranks=4).plan
    with keep_quiet():
        before = pk.price_plan(model, node, plan)
        after = pk.price_plan(model, levelled, plan)
    assert after.time == pytest.approx(1.3 * before.time, rel=1e-6)
