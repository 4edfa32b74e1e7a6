"""Stacks: records of facts, what they change, and levels."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.fitting import Iteration
from perfkit.ground.files import group_rows
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.kernel_times import UNALIGNED
from perfkit.platform.machine import PlatformError, StepKind
from perfkit.prediction.stages import make_stages
from perfkit.prediction.strategies import PARTS
from perfkit.workloads import stack as stack_module
from perfkit.workloads.stack import (
    FP8_RECIPES,
    OF_USE,
    STACKS,
    Stack,
    apply_stack,
    find_stack,
    note_unpriced,
)
from tests.levels import load_without_levels

GPT = pk.Transformer.preset("gpt3-6.7b", batch=16, dtype="bf16", mixed=True, fused=True, layers=4)
DLRM = pk.DLRM(rows=[10**5, 20000, 300, 5000], batch=8192, dim=64)
CLUSTER = load_without_levels("h100-sxm-8x8")


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


#: Words in the sources of stacks, and the value of a fact that follows from them; the first words
#: that are found count, and the last value is that without any.
WORDS: dict[str, list[tuple[str, object]]] = {
    "mixed": [("torch.amp|DistributedDataParallel|DDP", "autocast"), ("", "masters")],
    "fused_accumulation": [("gradient accumulation fusion unless", True), ("", False)],
    "buffers": [("accumulated and reduced in fp32", True), ("", False)],
    "reduce_dtype": [
        ("reduced in fp32 unless|mixed_precision_reduce float32|grad_dtype float32", "fp32"),
        ("", ""),
    ],
    "attention": [("", "")],
    "fp8_recipe": [("is tensorwise", "tensorwise"), ("fp8-recipe delayed", "delayed"), ("", "")],
    "keeps_fp8": [("weights in fp8 are cached", True), ("", False)],
    "fp8_gathers": [("", False)],
    "overlaps_tensor": [("", False)],
    "overlaps_experts": [("", False)],
    "zero": [
        ("FULL_SHARD|[(]ZeRO-3[)]|ici_fsdp_parallelism -1", 3),
        ("zero1 size -1", 1),
        ("", 0),
    ],
    "most_zero": [
        ("FULL_SHARD|ZeRO-3|ici_fsdp_parallelism -1|stage 0 unless given [(]of 0 to 3[)]", 3),
        ("[(]ZeRO 1[)]|zero1", 1),
        ("no ZeRO", 0),
    ],
    "pads_products": [("shape_padding|cublas_pad_for_gemms", True), ("", False)],
    "vocabulary_multiple": [("multiple of 64", 64), ("divisible-by 128", 128), ("", 1)],
    "loss_chunks": [("", 1)],
    "host_threads": [("OMP_NUM_THREADS is 1", 1), ("", 0)],
    "execution": [
        ("torch.compile|compile = True|compile each block|jax.jit", "compiled"),
        ("", "eager"),
    ],
    "graphs": [("use_cuda_graph True", True), ("", False)],
    "memory": [("Megatron-LM|deepspeed|InternEvo", "megatron"), ("", "torch")],
    "trains": [
        ("torchrec|HugeCTR", "dlrm"),
        ("nanoGPT|torchtitan|llm-foundry|Megatron-LM|InternEvo|maxtext", "transformer"),
        ("", "any"),
    ],
    "runs_fp8": [("no fp8", False), ("", True)],
    "level_of": [
        ("level of ddp-compiled", "ddp-compiled"),
        ("level of fsdp-compiled", "fsdp-compiled"),
        ("level of fsdp", "fsdp"),
        ("", ""),
    ],
}


#: Stacks whose sources have these words; a new row needs none of them.
WITH_WORDS = ("ddp", "ddp-compiled", "nanogpt", "fsdp", "fsdp-compiled", "torchtitan", "mpt")
WITH_WORDS += ("megatron", "megatron-te", "deepspeed", "internevo", "maxtext")
WITH_WORDS += ("torchrec", "hugectr")


@pytest.mark.parametrize("name", WITH_WORDS)
def test_each_fact_stands_in_the_source_of_its_stack(name: str) -> None:
    """The words of the source say each fact again: a row in which one of both is changed fails."""
    stack = find_stack(name)
    source = stack.source
    if source.startswith("as "):
        source += find_stack(source.split(",")[0].removeprefix("as ")).source
    assert {*WORDS, "name", "source"} == {field.name for field in fields(Stack)}
    for fact, rules in WORDS.items():
        said = next(value for words, value in rules if re.search(words, source))
        assert getattr(stack, fact) == said, f"{name}: {fact}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"zero": "three"}, "row 'mine': zero is 'three'; it must be a whole number; mend"),
        ({"graphs": "Yes"}, "row 'mine': graphs is 'Yes'; known are yes, no"),
        ({"mixed": "half"}, "row 'mine': mixed is 'half'; known are autocast, masters"),
        ({"zero": "4"}, "row 'mine': zero is 4; it must be .* at most 3"),
        ({"memory": None}, "row 'mine': there is no column 'memory'"),
        ({"level_of": "fdsp"}, "'mine': level_of is 'fdsp'; known are .*did you mean 'fsdp'"),
        ({"level_of": "mpt"}, "'mine': level_of is 'mpt', which takes the level of 'fsdp'"),
    ],
)
def test_a_wrong_row_is_named_with_its_column(
    change: dict[str, str | None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = group_rows("name", "published", "stacks.csv")
    rows["mine"] = [{**rows["fsdp"][0], "name": "mine", **change}]  # type: ignore[dict-item]
    monkeypatch.setattr(stack_module, "group_rows", lambda *_: rows)
    with pytest.raises(ValueError, match=text):
        stack_module._read_stacks()
    rows["mine"] = rows["fsdp"] * 2
    with pytest.raises(ValueError, match="row 'mine': 2 rows have this name"):
        stack_module._read_stacks()


def test_a_row_is_all_that_a_stack_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = group_rows("name", "published", "stacks.csv")
    rows["mine"] = [{**rows["fsdp"][0], "name": "mine", "level_of": "fsdp"}]
    monkeypatch.setattr(stack_module, "group_rows", lambda *_: rows)
    known = stack_module._read_stacks()
    assert known["mine"] == replace(find_stack("fsdp"), name="mine", level_of="fsdp")
    assert [*known][:-1] == [*STACKS]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mixed": "half"}, "mixed is 'half'"),
        ({"fp8_recipe": "int8"}, "fp8_recipe is 'int8'"),
        ({"reduce_dtype": "fp8"}, "reduce_dtype is 'fp8'; known are '', fp64"),
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
    with pytest.raises(ValueError, match="strategy is 3; it must be a Strategy"):
        pk.predict(GPT, "h100-sxm-8", strategy=3, stack="megatron")  # type: ignore[arg-type]


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
        (GPT, pk.Strategy(tp=2, dp=2, zero=1), None, "megatron"),
        (GPT, pk.Strategy(tp=2, dp=2, zero=3), None, "fsdp"),
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
    assert work.execution == execution
    if not name.startswith("megatron"):
        assert (work.workload, work.strategy) == (model, strategy)
        return
    # Megatron-LM adds up gradients inside products, whoever says that it runs
    assert isinstance(strategy, pk.Strategy)
    keeps = model.dtype == "fp8"
    assert work.workload == replace(model, fused_accumulation=True, keeps_fp8=keeps)
    assert work.strategy == replace(strategy, buffers=True)
    assert work.stacks[0].fused_accumulation


def test_facts_fill_what_was_left_at_its_default_and_nothing_else() -> None:
    work = apply_stack(GPT, None, None, "fsdp-compiled")
    assert (work.workload.parallel, work.execution) == ("fsdp", "compiled")
    stated = apply_stack(replace(GPT, parallel="zero2"), None, "eager", "fsdp-compiled")
    assert (stated.workload.parallel, stated.execution) == ("zero2", "eager")
    shared = apply_stack(GPT, pk.Strategy(dp=8), None, "fsdp")
    assert shared.strategy == pk.Strategy(dp=8, zero=3)
    # a default that is stated is not seen; the fact states it
    plain = replace(find_stack("fsdp"), zero=0)
    assert apply_stack(GPT, pk.Strategy(dp=8, zero=0), None, "fsdp").strategy.zero == 3
    assert apply_stack(GPT, pk.Strategy(dp=8, zero=0), None, plain).strategy.zero == 0
    own = replace(find_stack("fsdp"), zero=1, attention="flash2")
    assert apply_stack(GPT, pk.Strategy(dp=8), None, own).strategy == pk.Strategy(dp=8, zero=1)
    assert apply_stack(GPT, None, None, own).workload.attention == "flash2"
    eager = replace(GPT, attention="eager")
    assert apply_stack(eager, None, None, own).workload.attention == "eager"


@pytest.mark.parametrize("stack", [None, "megatron"])
def test_other_ranks_than_a_strategy_takes_are_refused(stack: str | None) -> None:
    with pytest.raises(ValueError, match="ranks is 8, and strategy takes 16; leave ranks out, or"):
        pk.predict(GPT, CLUSTER, ranks=8, strategy=pk.Strategy(dp=16), stack=stack)
    with keep_quiet():
        pk.predict(GPT, CLUSTER, ranks=16, strategy=pk.Strategy(dp=16), stack=stack)


def test_a_prediction_says_its_stack() -> None:
    with keep_quiet():
        found = pk.predict(GPT, "h100-sxm-8", ranks=8, stack="fsdp")
        stated = pk.predict(replace(GPT, parallel="fsdp"), "h100-sxm-8", ranks=8)
    assert found.stack == find_stack("fsdp")
    # without a stack gradients of mixed precision are reduced in fp32
    assert stated.stack == replace(found.stack, reduce_dtype="fp32")
    assert "stack: fsdp (" in found.explain()
    assert ("software", found.software) in dict(found.sections())["Time and memory"]


@pytest.mark.parametrize(
    ("model", "options", "says", "does_not_say"),
    [
        (replace(GPT, parallel="zero1"), {}, "ZeRO 1, eager", "ZeRO 3"),
        (replace(GPT, parallel="zero2"), {"stack": "fsdp"}, "ZeRO 2, eager", "ZeRO 3"),
        (GPT, {"execution": "graphs"}, "as computed, graphs", "eager"),
        (GPT, {"execution": "eager", "stack": "fsdp-compiled"}, "ZeRO 3, eager)", ", compiled"),
        (replace(GPT, vocabulary_multiple=64), {"stack": "megatron"}, "padded to 64", "128"),
        (replace(GPT, attention="math"), {}, "math attention", "flash"),
        (replace(GPT, reduce_dtype="fp32"), {"stack": "fsdp"}, "reduced in fp32", "as computed"),
        (replace(GPT, mixed=False), {"stack": "megatron"}, "reduced as computed", "fp32"),
        (DLRM, {"execution": "compiled"}, "compiled", "eager"),
    ],
)
def test_what_is_said_of_a_stack_is_what_runs(
    model: pk.Transformer, options: dict[str, str], says: str, does_not_say: str
) -> None:
    with keep_quiet():
        found = pk.predict(model, "h100-sxm-8", ranks=4, **options)  # type: ignore[arg-type]
    assert says in found.software
    assert does_not_say not in found.software
    assert found.stack.runs_as == found.execution


def test_what_is_said_of_the_stacks_of_many_strategies_is_what_runs() -> None:
    listed = pk.Strategy.stack([pk.Strategy(dp=8, zero=zero) for zero in (0, 1, 3, 1)])
    work = apply_stack(GPT, listed, None, None)
    assert [(stack.name, stack.zero) for stack in work.stacks] == [
        ("ddp", 0),
        ("fsdp", 1),
        ("fsdp", 3),
        ("fsdp", 1),
    ]


def test_facts_that_are_not_priced_are_named_where_they_were_stated() -> None:
    known = find_stack("fsdp-compiled")
    stated = replace(known, graphs=True)
    with keep_quiet():
        plain = pk.predict(GPT, "h100-sxm-8", ranks=8, stack=known)
        found = pk.predict(GPT, "h100-sxm-8", ranks=8, stack=stated)
    assert found.time == plain.time
    assert found.memory().total == plain.memory().total
    assert (
        "stack 'fsdp-compiled': graphs is stated and not priced, the time is that without it"
    ) in found.warnings
    assert not [text for text in plain.warnings if "not priced" in text]
    # graphs of code that is not compiled are priced; what perfkit knows of a stack is in its levels
    assert not note_unpriced(GPT, replace(find_stack("ddp"), graphs=True))
    assert not [name for name in STACKS if note_unpriced(GPT, find_stack(name))]
    mine = Stack("mine", fp8_gathers=True, buffers=True)
    assert "fp8_gathers is stated" in note_unpriced(GPT, mine)[0]


def test_facts_of_transformers_are_not_priced_for_tables() -> None:
    mixed = pk.DLRM(rows=[10**5, 20000], batch=8192, dim=64, dtype="bf16", mixed=True)
    assert not note_unpriced(DLRM, find_stack("torchrec"))
    assert not note_unpriced(DLRM, find_stack("hugectr"))
    assert "mixed is stated and not priced" in note_unpriced(mixed, find_stack("hugectr"))[0]
    assert "buffers, reduce_dtype" in note_unpriced(DLRM, find_stack("megatron"))[0]
    mine = Stack("mine", fp8_gathers=True, buffers=True)
    assert note_unpriced(DLRM, mine)[0].count("fp8_gathers") == 1
    of_all = {"name", "level_of", "source", "pads_products", "execution", "graphs"}
    known = {*of_all, *OF_USE, *stack_module._OF_TRANSFORMERS}
    assert known == {field.name for field in fields(Stack)}


@pytest.mark.parametrize("ranks", [0, -1, 2.5, "8"])
def test_wrong_ranks_are_named_with_a_stack_too(ranks: object) -> None:
    with pytest.raises(ValueError, match=r"ranks is .*; it must be a whole number above 0"):
        pk.predict(GPT, CLUSTER, ranks=ranks, stack="megatron")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy",
    [pk.Strategy(tp=4, pp=2, dp=2), pk.Strategy(dp=8, zero=3), pk.Strategy(dp=8, zero=1)],
)
def test_a_level_scales_the_whole_time_and_gives_its_spread(strategy: pk.Strategy) -> None:
    """Device, host and messages alike: every part, and the closed forms beside the event loop."""
    name = "fsdp" if strategy.alone else "megatron"
    levelled = add_levels(CLUSTER, **{f"{name}__bf16": 1.25, f"{name}__bf16__nodes": 1.25})
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
        column = f"{part}_s"
        assert closed_after[column][0] == pytest.approx(1.25 * closed[column][0])
    assert closed_after["stack"][0] == name
    # the spread of the level holds all errors but those of hosts
    assert after.level.spread <= after.spread < before.spread
    assert after.level.spread <= closed_after["spread"][0] < closed["spread"][0]


def test_a_sweep_and_a_lone_operation_follow_the_level() -> None:
    levelled = add_levels(load_without_levels("h100-sxm-8"), ddp__bf16=0.8, others__bf16=1.5)
    with keep_quiet():
        table = pk.sweep(GPT, {"batch": [8, 16]}, levelled, ranks=8, progress=False).table()
        one = pk.predict(GPT, levelled, ranks=8)
        other = pk.predict(GPT, levelled, ranks=8, stack="deepspeed")
        plain = pk.predict(GPT, load_without_levels("h100-sxm-8"), ranks=8, stack="deepspeed")
        stacks = pk.sweep(
            GPT, {"stack": ["ddp", "deepspeed"]}, levelled, ranks=8, progress=False
        ).table()
    assert table["time_s"][1] == pytest.approx(one.time)
    assert one.spread == pytest.approx(
        np.log(table["high_s"][1] / table["time_s"][1]) / 1.2815515655446004
    )
    assert other.time == pytest.approx(1.5 * plain.time)
    assert stacks["time_s"].to_list() == pytest.approx([one.time, other.time])
    number = one.timeline().filter(name="mm")["operation"][0]
    account = one.explain_operation(number)
    assert account.steps[-1].factor == 0.8
    assert sum(step.added for step in account.steps) == pytest.approx(account.time)


def test_a_stack_without_a_level_takes_that_of_others_and_says_so() -> None:
    node = load_without_levels("h100-sxm-8")
    levelled = add_levels(node, megatron_te__fp8=1.1, others__bf16=0.9)
    with keep_quiet():
        others = pk.predict(GPT, levelled, ranks=8)
        none = pk.predict(replace(GPT, dtype="fp32", mixed=False), levelled, ranks=8)
        plain = pk.predict(GPT, node, ranks=8)
        fp8 = replace(GPT, dtype="fp8", mixed=False)
        own = pk.predict(fp8, levelled, strategy=pk.Strategy(tp=8))
    note = (
        "no published step of ddp in bf16 on h100-sxm-8: level of other software, "
        "with the scatter between stacks"
    )
    assert note in others.warnings
    assert "no published step of ddp in fp32 on h100-sxm-8: no level" in none.warnings
    assert not [text for text in (*plain.warnings, *own.warnings) if "published step of" in text]
    assert others.time == pytest.approx(0.9 * plain.time)
    assert own.level is not None
    assert own.level["scale"] == 1.1


def test_a_stack_takes_the_level_of_that_which_it_names() -> None:
    """Its own level comes first, then that of the stack that it names, then that of others."""
    levelled = add_levels(load_without_levels("h100-sxm-8"), fsdp__bf16=1.2, others__bf16=0.9)
    fsdp = find_stack("fsdp")
    ours = replace(fsdp, name="ours", level_of="fsdp")
    with keep_quiet():
        plain = pk.predict(GPT, load_without_levels("h100-sxm-8"), ranks=8, stack="fsdp")
        stated = pk.predict(GPT, levelled, ranks=8, stack=ours)
        unstated = pk.predict(GPT, levelled, ranks=8, stack=replace(fsdp, name="ours"))
        mpt = pk.predict(GPT, levelled, ranks=8, stack="mpt")
        own = add_levels(levelled, fsdp__bf16=1.2, ours__bf16=1.1)
        of_own = pk.predict(GPT, own, ranks=8, stack=ours)
        strategy = pk.Strategy(dp=8, zero=3)
        closed = pk.explore(GPT, levelled, strategies=[strategy], stack=ours, memory=1e13)
        run = pk.predict(GPT, levelled, strategy=strategy, stack=ours)
        swept = pk.sweep(GPT, {"stack": ["fsdp", "mpt"]}, levelled, ranks=8, progress=False)
    assert stated.time == pytest.approx(1.2 * plain.time)
    assert mpt.time == pytest.approx(1.2 * plain.time)
    assert of_own.time == pytest.approx(1.1 * plain.time)
    assert unstated.time == pytest.approx(0.9 * plain.time)
    assert closed.table()["time_s"][0] == pytest.approx(run.time, rel=0.01)
    assert swept.table()["time_s"].n_unique() == 1
    assert not [text for text in stated.warnings if "published step of" in text]
    assert "level of fsdp" in stated.software
    [note] = [text for text in unstated.warnings if "published step of" in text]
    assert note.endswith("a stack with level_of, such as 'fsdp', takes the level of that")
    none = replace(GPT, dtype="fp32", mixed=False)
    with keep_quiet():
        missing = pk.predict(none, levelled, ranks=8, stack=ours)
    assert "no published step of ours or fsdp in fp32 on h100-sxm-8: no level" in missing.warnings
    with pytest.raises(ValueError, match="'ours': level_of is 'fdsp'; known are"):
        pk.predict(GPT, levelled, ranks=8, stack=replace(fsdp, name="ours", level_of="fdsp"))


def test_published_levels_are_those_of_the_stacks_that_name_them() -> None:
    """Steps of MPT are the ones that the level of FSDP was fitted to."""
    for name, parent in (
        ("mpt", "fsdp"),
        ("torchtitan", "fsdp-compiled"),
        ("nanogpt", "ddp-compiled"),
    ):
        one = replace(find_stack(parent), name=name, level_of=parent)
        with keep_quiet():
            ours = pk.predict(GPT, "a100-sxm-8", ranks=8, stack=one)
            theirs = pk.predict(GPT, "a100-sxm-8", ranks=8, stack=parent)
        assert ours.level == theirs.level
        assert ours.time == theirs.time
        assert find_stack(name).level_of == parent


def test_software_for_other_models_is_told() -> None:
    with keep_quiet():
        of_tables = pk.predict(GPT, CLUSTER, ranks=8, stack="torchrec").warnings
        fp8 = replace(GPT, dtype="fp8", mixed=False)
        without = pk.predict(fp8, CLUSTER, ranks=8, stack="megatron").warnings
        with_fp8 = pk.predict(fp8, CLUSTER, ranks=8, stack="megatron-te").warnings
        dlrm = pk.predict(DLRM, CLUSTER, ranks=8, stack="megatron-te").warnings
        usual = pk.predict(GPT, CLUSTER, ranks=8).warnings + pk.predict(DLRM, CLUSTER).warnings
    assert [text for text in of_tables if "family 'dlrm', and this one is of 'transformer'" in text]
    [note] = [text for text in without if "no products in fp8" in text]
    assert "megatron-te" in note
    assert "hugectr" not in note
    [note] = [text for text in dlrm if "trains models of the family 'transformer'" in text]
    assert note.endswith(
        "take ddp, ddp-compiled, fsdp, fsdp-compiled, deepspeed, torchrec or hugectr"
    )
    for warnings in (with_fp8, usual):
        assert not [text for text in warnings if "trains models" in text or "in fp8;" in text]


def test_a_model_without_the_masters_that_its_software_keeps_is_told() -> None:
    plain = replace(GPT, mixed=False)
    strategy = pk.Strategy(tp=2, dp=2, micro_batch=4)
    with keep_quiet():
        stated = pk.predict(plain, CLUSTER, strategy=strategy, stack="megatron").warnings
        others = [
            pk.predict(plain, CLUSTER, strategy=strategy).warnings,
            pk.predict(GPT, CLUSTER, strategy=strategy, stack="megatron").warnings,
            pk.predict(plain, CLUSTER, ranks=8, stack="fsdp").warnings,
            pk.predict(replace(plain, dtype="fp32"), CLUSTER, ranks=2, stack="megatron").warnings,
        ]
    [note] = [text for text in stated if "mixed is False" in text]
    assert note.endswith("take mixed=True")
    for warnings in others:
        assert not [text for text in warnings if "mixed is False" in text]


def test_a_search_of_plans_keeps_to_what_the_software_shares() -> None:
    wide = pk.DLRM(rows=[10**5] * 8, batch=8192, dim=64)
    without = pk.explore(wide, "h100-sxm-8", 8, stack="hugectr").table()["mlps"].to_list()
    assert not [text for text in without if "zero" in text]
    usual = pk.explore(wide, "h100-sxm-8", 8).table()["mlps"].to_list()
    assert [text for text in usual if "zero" in text]


def test_more_zero_than_the_software_runs_is_not_searched_and_told_where_it_is_stated() -> None:
    found = pk.explore(GPT, CLUSTER, 16, stack="megatron").table()
    assert set(found["zero"]) <= {0, 1}
    assert 3 in pk.explore(GPT, CLUSTER, 16, stack="deepspeed").table()["zero"]
    strategy = pk.Strategy(dp=16, zero=3)
    with keep_quiet():
        megatron = pk.predict(GPT, CLUSTER, strategy=strategy, stack="megatron").warnings
        stated = pk.explore(GPT, CLUSTER, strategies=[strategy], stack="megatron").warnings
        without = pk.predict(replace(GPT, parallel="fsdp"), CLUSTER, ranks=8, stack="megatron")
        alone = pk.predict(GPT, CLUSTER, strategy=pk.Strategy(tp=8, zero=3), stack="megatron")
        usual = pk.predict(GPT, CLUSTER, strategy=strategy).warnings
    for warnings in (megatron, stated, without.warnings):
        [note] = [text for text in warnings if "ZeRO" in text]
        assert note.startswith("stack 'megatron' runs ZeRO 0 to 1, and zero is 3; take zero=1")
    for warnings in (alone.warnings, usual):
        assert not [text for text in warnings if "ZeRO" in text]


def test_levels_are_kept_in_files_and_carried_over(tmp_path: Path) -> None:
    levelled = add_levels(CLUSTER, megatron_te__fp8=1.1, others__bf16=0.9)
    again = pk.load_platform(levelled.save(tmp_path / "levels.toml"))
    found = again.context.find_stack("megatron-te", "fp8", StepKind())
    assert found is not None
    assert (found["scale"], found.spread, found.n, found.source) == (1.1, 0.05, 7, "invented")
    assert again.context.find_stack("fsdp", "fp8", StepKind()) is None
    faster = again.with_scale(peak=2.0).context.find_stack("*", "bf16", StepKind())
    assert faster is not None
    assert faster["scale"] == 0.9
    with pytest.raises(PlatformError, match=r"stacks.*names no stack"):
        replace(CLUSTER, context=replace(CLUSTER.context, stacks={".bf16": make_level(1.0)}))
    with pytest.raises(PlatformError, match=r"format is 'fp16', which has the level of bf16"):
        replace(CLUSTER, context=replace(CLUSTER.context, stacks={"ddp.fp16": make_level(1.0)}))
    with pytest.raises(PlatformError, match=r"format is 'int4'"):
        replace(CLUSTER, context=replace(CLUSTER.context, stacks={"ddp.int4": make_level(1.0)}))


def test_a_plan_of_tables_follows_the_level() -> None:
    node = load_without_levels("a100-sxm-8")
    levelled = add_levels(node, torchrec__fp32=1.3)
    model = DLRM
    plan = pk.shard(model, node, ranks=4).plan
    with keep_quiet():
        before = pk.price_plan(model, node, plan)
        after = pk.price_plan(model, levelled, plan)
    assert after.time == pytest.approx(1.3 * before.time, rel=1e-6)


#: A model whose products do not hide what gradients move: each rank has one sequence in a micro-batch.
SMALL = pk.Transformer.preset(
    "gpt3-6.7b", batch=64, sequence=512, dtype="bf16", mixed=True, fused=True, layers=4
)
MEGATRON = find_stack("megatron")
SEPARATE = replace(MEGATRON, fused_accumulation=False)


def list_sums(prediction: pk.Prediction) -> dict[str, int]:
    """Kernels of the first rank that add up gradients, by module without the number of the layer."""
    rows = prediction.timeline().filter(rank=0, name="add_", phase="backward")
    counts: dict[str, int] = {}
    for module in rows["module"]:
        part = module.rpartition(".")[2]
        counts[part] = counts.get(part, 0) + 1
    return counts


def test_fused_sums_leave_no_kernel_but_those_of_norms_biases_and_embeddings() -> None:
    """Two micro-batches of 8 sequences: the first one is added to the zeros of buffers, too."""
    strategy = pk.Strategy(dp=4, micro_batch=8)
    with keep_quiet():
        fused = pk.predict(SMALL, CLUSTER, strategy=strategy, stack=MEGATRON)
        separate = pk.predict(SMALL, CLUSTER, strategy=strategy, stack=SEPARATE)
    # of a layer of GPT-3: two products with a weight and a bias each, and a norm, in each half
    half = 2 * 4 * 4  # micro-batches, layers, and biases of products and numbers of a norm
    assert list_sums(fused) == {"attention": half, "mlp": half, "embeddings": 4, "head": 4}
    # the head shares the weights of the embeddings, whose gradient is not that of a product alone
    assert list_sums(separate) == {"attention": 48, "mlp": 48, "embeddings": 4, "head": 4}
    assert fused.time < separate.time
    # a placeholder of the gradients of a layer, in bf16, in place of those that are added
    placeholder = 2 * 12.1 * SMALL.hidden**2
    assert fused.memory().total <= separate.memory().total + placeholder


def test_fused_sums_move_what_the_sums_hold_instead_of_a_gradient_and_a_sum() -> None:
    """By hand: an unfused product writes 2 B of a number, its sum reads 2 and 4 B and writes 4 B; a
    fused product reads and writes 4 B."""
    strategy = pk.Strategy(dp=8, micro_batch=1)
    graphs = {}
    for stack in (MEGATRON, SEPARATE):
        work = apply_stack(SMALL, strategy, None, stack)
        graphs[stack.fused_accumulation] = make_stages(work.workload, CLUSTER, work.strategy)[0]
    hidden = 4096
    numbers = 12 * hidden**2  # of the products of a layer: 3 + 1 in attention, 4 + 4 behind it

    def move(fused: bool) -> float:
        """Bytes that products of weight gradients and sums of layers move in a micro-batch [B]."""
        graph = graphs[fused]
        moved = 0.0
        for place, label in enumerate(graph.labels):
            is_sum = label.name == "add_"
            is_product = (label.kind, label.variant) == ("gemm", "tn")
            in_layer = label.module.startswith("layers.1.") and label.phase == "backward"
            if in_layer and (is_sum or is_product):
                moved += graph.traffic[place]
        return moved / 8  # micro-batches

    assert move(False) - move(True) == pytest.approx((2 + 10 - 8) * numbers)


@pytest.mark.parametrize("stack", [MEGATRON, SEPARATE, find_stack("megatron-te")])
@pytest.mark.parametrize(
    "strategy",
    [
        pk.Strategy(tp=4, pp=2, dp=2),
        pk.Strategy(tp=8, dp=2, zero=1),
        pk.Strategy(dp=8, micro_batch=8),  # a single micro-batch
        pk.Strategy(dp=8, zero=1),
        pk.Strategy(pp=4, dp=2, schedule="zero_bubble"),
        pk.Strategy(pp=2, dp=2, chunks=2, schedule="interleaved"),
        pk.Strategy(tp=2, dp=4, zero=3),
    ],
)
def test_closed_forms_of_sums_agree_with_the_event_loop(
    strategy: pk.Strategy, stack: pk.Stack
) -> None:
    model = replace(SMALL, dtype="fp8") if stack.fp8_recipe else SMALL
    with keep_quiet():
        run = pk.predict(model, CLUSTER, strategy=strategy, stack=stack)
        closed = pk.explore(model, CLUSTER, strategies=[strategy], memory=1e13, stack=stack).table()
    assert closed["time_s"][0] == pytest.approx(run.time, rel=0.015)
    assert closed["needs_bytes"][0] == pytest.approx(run.memory().total, rel=1e-3)
    assert closed["buffers"][0]


def test_experts_add_inside_their_products_too() -> None:
    model = replace(SMALL, experts=4, layers=2)
    strategy = pk.Strategy(dp=4, ep=2, micro_batch=4)
    with keep_quiet():
        fused = pk.predict(model, CLUSTER, strategy=strategy, stack=MEGATRON)
        separate = pk.predict(model, CLUSTER, strategy=strategy, stack=SEPARATE)
        closed = pk.explore(model, CLUSTER, strategies=[strategy], memory=1e13, stack=MEGATRON)
    # per micro-batch and layer: the router remains a product, and two weights of experts go
    assert list_sums(separate)["mlp"] - list_sums(fused)["mlp"] == 4 * 2 * 3
    assert closed.table()["time_s"][0] == pytest.approx(fused.time, rel=0.02)


def test_sums_without_a_strategy_are_fused_from_the_second_micro_batch_on() -> None:
    model = replace(SMALL, mixed=False, accumulate=4)
    with keep_quiet():
        separate = pk.predict(model, CLUSTER, ranks=4)
        fused = pk.predict(replace(model, fused_accumulation=True), CLUSTER, ranks=4)
    counts = list_sums(fused)
    assert counts == {"attention": 3 * 4 * 4, "mlp": 3 * 4 * 4, "embeddings": 3 * 2, "head": 3 * 2}
    assert list_sums(separate) == {
        "attention": 3 * 4 * 6,
        "mlp": 3 * 4 * 6,
        "embeddings": 3 * 2,
        "head": 3 * 2,
    }
    assert fused.time < separate.time


@pytest.mark.parametrize("name", ["ddp", "fsdp", "megatron", "megatron-te", "deepspeed", "mpt"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_mixed_has_one_meaning_with_and_without_a_strategy(name: str, ranks: int) -> None:
    """The stack says whether weights are cast by autocast or have fp32 masters."""
    model = pk.Transformer.gpt2(batch=32, dtype="bf16", mixed=True, accumulate=2)
    strategy = pk.Strategy(dp=ranks, micro_batch=32 // ranks // 2)
    with keep_quiet():
        without = pk.predict(model, CLUSTER, ranks=ranks, stack=name)
        stated = pk.predict(model, CLUSTER, strategy=strategy, stack=name)
    assert without.time == stated.time
    assert without.memory().total == stated.memory().total
    words = {"autocast": "bf16 autocast", "masters": "bf16 with fp32 masters"}
    assert words[find_stack(name).mixed] in without.headline()


def test_the_stack_decides_what_mixed_is() -> None:
    model = pk.Transformer.gpt2(batch=32, dtype="bf16", mixed=True)
    with keep_quiet():
        times = {name: pk.predict(model, CLUSTER, ranks=8, stack=name).time for name in STACKS}
        usual = pk.predict(model, CLUSTER, ranks=8)
    assert times["ddp"] == usual.time
    assert times["megatron"] < 0.9 * times["ddp"]


def test_what_a_stack_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ddp' runs mixed precision by autocast.*stack='fsdp'"):
        pk.predict(GPT, CLUSTER, strategy=pk.Strategy(tp=2), stack="ddp")
    with pytest.raises(ValueError, match="by autocast"):
        pk.predict(replace(GPT, parallel="fsdp"), CLUSTER, ranks=8, stack="ddp")
    with pytest.raises(ValueError, match="fused_accumulation needs buffers"):
        replace(find_stack("ddp"), fused_accumulation=True)
    found = pk.explore(GPT, CLUSTER, 8, stack="ddp").table()
    assert found["tp"].unique().to_list() == [1]


def test_the_format_of_a_reduction_follows_the_stack() -> None:
    """FSDP reduces in the format of layers, torchtitan and Megatron-LM in fp32: twice the bytes."""

    def find_messages(stack: str, **changes: object) -> float:
        model = replace(GPT, vocabulary=50304, **changes)  # type: ignore[arg-type]
        with keep_quiet():
            found = pk.predict(model, CLUSTER, ranks=8, stack=stack)
        graph = found._timeline.rank_timelines[0].graph
        names = ("reduce_scatter", "all_reduce")
        return float(
            sum(
                graph.column("nbytes")[place]
                for place in graph.collectives
                if graph.labels[place].name in names
            )
        )

    weights = replace(GPT, vocabulary=50304).graphs()[0].parameters
    assert find_messages("fsdp") == pytest.approx(2 * weights, rel=1e-4)  # shards are padded
    assert find_messages("torchtitan") == pytest.approx(4 * weights, rel=1e-4)
    assert find_messages("megatron") == pytest.approx(4 * weights, rel=1e-4)
    assert find_messages("megatron", reduce_dtype="bf16") == pytest.approx(2 * weights, rel=1e-4)
    assert find_messages("ddp") == pytest.approx(4 * weights, rel=1e-4)


def test_searches_with_a_stack_show_what_runs() -> None:
    found = pk.explore(GPT, CLUSTER, 8, stack="fsdp")
    assert "\n  stack: fsdp\n" in found.explain()
    assert "\n  stack: megatron; others run on fsdp\n" in pk.explore(GPT, CLUSTER, 8).explain()
    assert found.best.zero in (1, 2, 3)
    assert not found.table().filter(zero=0, tp=1).height
    with keep_quiet():
        again = pk.predict(GPT, CLUSTER, strategy=found.best, stack="fsdp")
    assert found.table()["time_s"][0] == pytest.approx(again.time, rel=0.03)


def test_a_padded_vocabulary_has_the_words_of_its_multiple_on_each_rank() -> None:
    """50257 words: 50304 = 393 * 128 on one rank, 50432 = 2 * 197 * 128 on two; so does Megatron-LM."""
    model = pk.Transformer.gpt2(batch=8, dtype="bf16", mixed=True)
    padded = replace(model, vocabulary_multiple=128)
    more = padded.graphs()[0].parameters - model.graphs()[0].parameters
    assert more == (50304 - 50257) * 768
    same = replace(model, vocabulary=50304)
    with keep_quiet():
        assert pk.predict(padded, "a100-sxm-8").time == pk.predict(same, "a100-sxm-8").time
        assert pk.predict(model, "a100-sxm-8").time > 1.05 * pk.predict(same, "a100-sxm-8").time
        shared = pk.Strategy(tp=2, dp=2, micro_batch=2)
        megatron = pk.predict(model, "a100-sxm-8", strategy=shared, stack="megatron")
        by_hand = pk.predict(
            replace(model, vocabulary=50432), "a100-sxm-8", strategy=shared, stack="megatron"
        )
        closed = pk.explore(model, "a100-sxm-8", strategies=[shared], stack="megatron").table()
    assert megatron.time == by_hand.time
    assert megatron.memory().total == by_hand.memory().total
    assert closed["time_s"][0] == pytest.approx(megatron.time, rel=0.01)
    assert not [text for text in megatron.warnings if "pad these sizes" in text]


def test_a_vocabulary_that_is_not_padded_is_told_what_pads_it() -> None:
    """Where Megatron-LM is the usual software, which pads if it is stated; others do not pad."""
    model = pk.Transformer.gpt2(batch=8, dtype="bf16", mixed=True)

    def find_remedy(**settings: Any) -> list[str]:
        with keep_quiet():
            said = pk.predict(model, "a100-sxm-8", **settings).warnings
        return [text.partition("pad these sizes")[2] for text in said if "pad these sizes" in text]

    by_hand = ": take vocabulary_multiple=128"
    stages = pk.Strategy(pp=2, dp=2)
    assert find_remedy() == [by_hand]
    assert find_remedy(strategy=stages) == [
        f"{by_hand}, or stack='megatron', which pads so where it is stated"
    ]
    assert not find_remedy(strategy=stages, stack="megatron")
    assert find_remedy(strategy=stages, stack="fsdp") == [by_hand]
    model = replace(model, vocabulary_multiple=128)
    assert not find_remedy()


def test_a_padded_vocabulary_in_a_sweep_of_arrays() -> None:
    model = pk.Transformer.gpt2(batch=8, dtype="bf16", vocabulary_multiple=64)
    sizes = [50257, 50304, 50305]
    with keep_quiet():
        table = pk.sweep(model, {"vocabulary": sizes}, "a100-sxm-8", progress=False).table()
        times = [pk.predict(replace(model, vocabulary=n), "a100-sxm-8").time for n in sizes]
    assert table["time_s"].to_list() == pytest.approx(times)
    assert times[0] == times[1]
    assert times[2] > times[1]


@pytest.mark.parametrize(
    "strategy",
    [
        pk.Strategy(tp=2, dp=2, micro_batch=8),
        pk.Strategy(pp=2, dp=2, micro_batch=4, checkpoint="full"),
        pk.Strategy(dp=4, micro_batch=8),
    ],
)
def test_weights_in_fp8_are_cast_once_by_transformer_engine(strategy: pk.Strategy) -> None:
    """A layer of GPT has four products; two or four micro-batches need the same weights."""
    model = replace(SMALL, dtype="fp8", batch=64)
    each = replace(find_stack("megatron-te"), keeps_fp8=False)
    times, memory = {}, {}
    for stack in (find_stack("megatron-te"), each):
        with keep_quiet():
            run = pk.predict(model, CLUSTER, strategy=strategy, stack=stack)
            closed = pk.explore(
                model, CLUSTER, strategies=[strategy], memory=1e13, stack=stack
            ).table()
        rows = run.timeline().filter(rank=0)
        casts = rows.filter(name="cast_weight_once")
        assert len(casts) == (4 * 4 // strategy.pp if stack.keeps_fp8 else 0)
        assert set(casts["phase"]) <= {"forward"}
        assert closed["time_s"][0] == pytest.approx(run.time, rel=0.01)
        assert closed["needs_bytes"][0] == pytest.approx(run.memory().total, rel=1e-3)
        times[stack.keeps_fp8] = run.time
        memory[stack.keeps_fp8] = run.memory()
    assert times[True] < times[False]
    if strategy.pp == 1:  # of several stages, another one may be the fullest
        weights = 4 * (12 * 4096**2 + 13 * 4096) / strategy.tp
        more = memory[True].parts["parameters"] - memory[False].parts["parameters"]
        assert more == pytest.approx(weights, rel=1e-3)


def test_weights_without_a_strategy_are_cast_once_too() -> None:
    model = replace(SMALL, dtype="fp8", mixed=False, accumulate=4, batch=16)
    with keep_quiet():
        each = pk.predict(model, CLUSTER, ranks=2)
        once = pk.predict(replace(model, keeps_fp8=True), CLUSTER, ranks=2)
    assert len(once.timeline().filter(rank=0, name="cast_weight_once")) == 4 * 4
    assert once.time < each.time


#: 50257 words in bf16, which no multiple pads up, and heads that are aligned.
ODD = pk.Transformer.gpt2(batch=16, layers=2, dtype="bf16", fused=True)
#: Megatron's facts, but those that would hide what padding does.
BARE = replace(MEGATRON, vocabulary_multiple=1, fused_accumulation=False)
PADDED = replace(BARE, pads_products=True)


def test_the_software_says_whether_compiled_products_are_padded() -> None:
    for name in ("ddp", "nanogpt", "fsdp", "torchtitan", "mpt", "maxtext", "torchrec"):
        assert find_stack(name).pads_products
    for name in ("megatron", "megatron-te", "deepspeed", "internevo", "hugectr"):
        assert not find_stack(name).pads_products


@pytest.mark.parametrize(
    "strategy",
    [None, pk.Strategy(dp=2, micro_batch=8), pk.Strategy(dp=2, pp=2, micro_batch=4)],
    ids=["none", "replicas", "stages"],
)
def test_compiled_products_are_padded_where_the_software_does(strategy: pk.Strategy | None) -> None:
    """The head has 50257 or 50264 columns, and takes 5.7 times as long with the odd ones."""
    times = {}
    with keep_quiet():
        for stack in (BARE, PADDED):
            r = pk.predict(ODD, CLUSTER, strategy=strategy, stack=stack, execution="compiled")
            head = r.timeline().filter(module="head", kind="gemm")
            times[stack.pads_products] = float((head["end_s"] - head["start_s"]).sum())
            is_told = any("no multiple of" in text for text in r.warnings)
            assert is_told is not stack.pads_products
        eager = pk.predict(ODD, CLUSTER, strategy=strategy, stack=PADDED, execution="eager")
    # one of the three products of the head has rows that are aligned, where its first operand is turned
    assert 3.0 < times[False] / times[True] < UNALIGNED[9].of_4_bytes + 0.5
    assert any("no multiple of" in text for text in eager.warnings)


def test_closed_forms_and_sweeps_pad_as_predict_does() -> None:
    strategies = [pk.Strategy(dp=2, pp=2, micro_batch=4), pk.Strategy(dp=4, micro_batch=4)]
    found = {}
    with keep_quiet():
        for stack in (BARE, PADDED):
            closed = pk.explore(
                ODD, CLUSTER, strategies=strategies, execution="compiled", stack=stack, memory=1e13
            )
            for one in strategies:
                r = pk.predict(ODD, CLUSTER, strategy=one, stack=stack, execution="compiled")
                [row] = closed.table().filter(dp=one.dp, pp=one.pp)["time_s"]
                assert row == pytest.approx(r.time, rel=0.02)
                found[stack.pads_products, one.dp] = row
        swept = pk.sweep(
            ODD,
            {"stack": ["deepspeed", "ddp"]},
            CLUSTER,
            execution="compiled",
            progress=False,
        )
        singly = [
            pk.predict(ODD, CLUSTER, execution="compiled", stack=name).time
            for name in ("deepspeed", "ddp")
        ]
    assert found[False, 2] > 1.2 * found[True, 2]
    assert found[False, 4] > 1.2 * found[True, 4]
    assert swept.table()["time_s"].to_list() == pytest.approx(singly)
    assert singly[0] > 1.2 * singly[1]


def test_the_usual_software_of_each_strategy_decides_on_padding() -> None:
    """Replicas alone run in PyTorch, which pads; stages in Megatron-LM, which does not. Both are
    priced in one table."""
    strategies = {
        True: pk.Strategy(dp=4, micro_batch=4),
        False: pk.Strategy(dp=2, pp=2, micro_batch=4),
    }
    with keep_quiet():
        closed = pk.explore(
            ODD, CLUSTER, strategies=[*strategies.values()], execution="compiled", memory=1e13
        )
        for pads, one in strategies.items():
            r = pk.predict(ODD, CLUSTER, strategy=one, execution="compiled")
            assert r.stack is not None and r.stack.pads_products is pads
            [row] = closed.table().filter(dp=one.dp, pp=one.pp)["time_s"]
            assert row == pytest.approx(r.time, rel=0.02)
            graphs = make_stages(ODD, CLUSTER, one, "compiled")
            columns = {
                graph.column("n")[place]
                for graph in graphs
                for place, label in enumerate(graph.labels)
                if label.kind == "gemm" and label.module == "head"
            }
            assert (50264 in columns, 50257 in columns) == (pads, not pads)
