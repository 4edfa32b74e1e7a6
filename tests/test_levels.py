"""Levels of software stacks: how they are fitted, kept and found."""

import math
from dataclasses import replace

import numpy as np
import pytest

import perfkit as pk
from benchmarks.helpers.levels import Cell, Components, LevelModel, Observation, fit_levels
from benchmarks.stacks import (
    find_counts,
    judge_draws,
    judge_halves,
    judge_models,
    tabulate_choices,
    tabulate_sets,
)
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.levels import GENERATIONS, find_generation, read_levels
from perfkit.platform.machine import StepKind, name_level
from perfkit.prediction.levels import find_level, note_level
from perfkit.workloads.stack import find_stack

TE = Cell("megatron-te", "h100", "fp8")
FSDP = Cell("fsdp", "h100", "fp8")
NEW = Cell("maxtext", "tpu", "bf16")


def draw_steps(seed: int = 0) -> list[Observation]:
    """Steps of eight cells with levels of their own, six groups of four steps each."""
    rng = np.random.default_rng(seed)
    drawn = []
    for stack in ("one", "two", "three", "four"):
        for generation in ("a100", "h100"):
            level = rng.normal(0, 0.2)
            for group in range(6):
                of_group = level + rng.normal(0, 0.04)
                name = f"{stack} {generation} {group}"
                for _ in range(4):
                    cell = Cell(stack, generation, "bf16")
                    drawn.append(Observation(cell, stack, name, of_group + rng.normal(0, 0.02)))
    return drawn


def test_one_group_is_shrunk_as_by_hand() -> None:
    """The mean of a cell with one group is that of its steps times the variance of levels over all
    variance of this mean."""
    steps = [Observation(TE, "a", "g", level) for level in (0.10, 0.20, 0.30)]
    parts = Components(
        device=0.1, stack=0.2, cell=0.1, nodes=0.15, experts=0.3, group=0.05, rest=0.03
    )
    model = replace(fit_levels(steps), components=parts)
    levels = 0.1**2 + 0.2**2 + 0.1**2 + 0.15**2
    around = 0.05**2 + 0.03**2 / 3
    found = model.find(TE)
    assert found.mean == pytest.approx(0.2 * levels / (levels + around))
    assert found.stderr**2 == pytest.approx(levels - levels**2 / (levels + around))
    # another stack shares the device and format, another device the stack alone
    assert model.find(FSDP).mean == pytest.approx(0.2 * 0.1**2 / (levels + around))
    other = model.find(Cell("megatron-te", "a100", "bf16"))
    assert other.mean == pytest.approx(0.2 * 0.2**2 / (levels + around))
    # of several nodes all but the part of one node
    wide = model.find(TE._replace(crosses_nodes=True))
    assert wide.mean == pytest.approx(0.2 * (levels - 0.15**2) / (levels + around))
    assert model.find(NEW).mean == 0.0
    assert model.find(NEW).steps == 0
    # models with experts share the level of the others, and have a part of their own
    experts = model.find(TE._replace(has_experts=True))
    assert experts.mean == pytest.approx(found.mean)
    assert experts.stderr**2 == pytest.approx(found.stderr**2 + 0.3**2)


def test_a_cell_with_many_groups_has_its_own_level_and_spread() -> None:
    steps = draw_steps()
    model = fit_levels(steps)
    cell = Cell("two", "h100", "bf16")
    of_cell = [one.level for one in steps if one.cell == cell]
    found = model.find(cell)
    assert found.mean == pytest.approx(np.mean(of_cell), abs=0.01)
    assert found.steps == 24
    assert found.groups == 6
    assert found.sources == "two"
    assert model.components.rest == pytest.approx(0.02, rel=0.2)
    assert model.components.group == pytest.approx(0.04, rel=0.3)
    # what nobody measured is wider
    assert model.find(NEW).spread > 2.5 * found.spread


def test_intervals_hold_steps_that_were_left_out() -> None:
    """Of groups that were not fitted about 80 % lie in their intervals."""
    inside = []
    for seed in range(6):
        steps = draw_steps(seed)
        model = fit_levels([one for one in steps if not one.group.endswith(("0", "1"))])
        for one in steps:
            if one.group.endswith(("0", "1")):
                found = model.find(one.cell)
                inside.append(abs(one.level - found.mean) <= 1.2816 * found.spread)
    assert 0.72 <= np.mean(inside) <= 0.88


def test_a_scattered_cell_is_wider_than_a_tight_one() -> None:
    steps = []
    for one in draw_steps():
        is_wide = one.cell.stack == "one"
        centre = 0.1
        level = centre + (4 if is_wide else 1) * (one.level - centre)
        steps.append(one._replace(level=level))
    model = fit_levels(steps)
    wide = model.find(Cell("one", "a100", "bf16")).spread
    tight = model.find(Cell("four", "a100", "bf16")).spread
    assert wide > 1.3 * tight


def test_the_order_of_steps_does_not_matter() -> None:
    steps = draw_steps()
    forward = fit_levels(steps).find(TE)
    backward = fit_levels(steps[::-1]).find(TE)
    assert backward.mean == pytest.approx(forward.mean, abs=1e-3)
    assert isinstance(fit_levels(steps), LevelModel)


def test_names_of_levels() -> None:
    assert name_level("megatron-te", "fp8", StepKind()) == "megatron-te.fp8"
    assert name_level("*", "fp16", StepKind(True, True)) == "*.bf16.experts.nodes"
    assert find_generation("h200-sxm") == "h100"
    assert find_generation("gb300-4") == "blackwell"
    assert find_generation("my-gpu") is None
    assert read_levels(None) == {}


def test_every_generation_of_the_table_is_that_of_a_device() -> None:
    for generation in dict.fromkeys(GENERATIONS.values()):
        for level in read_levels(generation).values():
            assert 0.4 < level["scale"] < 2.5
            assert 0 < level.spread < 1
            assert level.kind == ("fitted" if level.n else "assumed")
            assert level.source


def make_level(scale: float, spread: float, steps: int) -> object:
    from perfkit.fitting import Iteration

    kind = "fitted" if steps else "assumed"
    return Iteration.build({"scale": scale}, spread=spread, n=steps, kind=kind, source="a test")


def test_transformers_alone_have_levels_and_those_with_experts_their_own() -> None:
    node = pk.load_platform("h100-sxm-8")
    levels = {
        "megatron.bf16": make_level(1.2, 0.1, 9),
        "*.bf16": make_level(1.1, 0.2, 0),
        "*.bf16.experts": make_level(1.4, 0.4, 0),
    }
    node = replace(node, context=replace(node.context, stacks=levels))
    dense = pk.Transformer.gpt2(batch=8, sequence=256, dtype="fp16")
    routed = replace(dense, experts=8)
    found = find_level(node, find_stack("megatron"), dense, 8)
    assert found is not None
    assert found["scale"] == 1.2
    assert note_level(node, find_stack("megatron"), dense, 8) == ()
    other = find_level(node, find_stack("maxtext"), dense, 8)
    assert other is not None
    assert other["scale"] == 1.1
    assert (
        "no published step of maxtext in fp16"
        in note_level(node, find_stack("maxtext"), dense, 8)[0]
    )
    experts = find_level(node, find_stack("megatron"), routed, 8)
    assert experts is not None
    assert experts["scale"] == 1.4
    assert "with experts" in note_level(node, find_stack("megatron"), routed, 8)[0]
    levels["fsdp.bf16"] = make_level(1.1, 0.2, 0)
    node = replace(node, context=replace(node.context, stacks=levels))
    assert note_level(node, find_stack("fsdp"), dense, 8) == (
        "level of fsdp in fp16 on h100-sxm-8 is assumed, from a test",
    )
    assert (
        "no level" in note_level(node, find_stack("megatron"), replace(dense, dtype="fp32"), 8)[0]
    )
    assert find_level(node, find_stack("hugectr"), pk.DLRM("dlrm-mlperf", batch=2048), 8) is None
    with keep_quiet():
        plain = pk.predict(dense, "h100-sxm-8", stack="maxtext")
        levelled = pk.predict(dense, node, stack="maxtext")
    ratio = 1.1 if plain.level is None else 1.1 / plain.level["scale"]
    assert levelled.time == pytest.approx(ratio * plain.time)
    assert levelled.spread >= 0.2
    assert math.isfinite(levelled.spread)


def test_a_level_of_a_wrong_name_is_refused() -> None:
    node = pk.load_platform("h100-sxm-8")
    for name in (
        ".fp8",
        "megatron.fp9",
        "megatron.fp8.dense",
        "megatron.fp8.nodes.experts",
        "a.fp8.",
    ):
        with pytest.raises(ValueError, match="context stacks"):
            replace(node, context=replace(node.context, stacks={name: make_level(1.0, 0.1, 1)}))


def test_pairs_and_regret_by_hand() -> None:
    """Of three steps of 1.0, 1.1 and 1.2 s that are predicted as 1.1, 1.0 and 1.2 s two of three pairs
    are ranked rightly, and the choice takes 10 % longer than the fastest."""
    steps = []
    for measured, predicted in ((1.0, 1.1), (1.1, 1.0), (1.2, 1.2)):
        level = math.log(measured / predicted)
        steps.append(("a set", Observation(TE, "source", "group", level, measured)))
    [row] = tabulate_choices(steps)
    assert row["pairs"] == 3
    assert row["ranked"] == pytest.approx(200 / 3)
    assert row["regret"] == pytest.approx(10.0)


def test_a_step_is_judged_without_its_group_and_counts_once() -> None:
    labelled = [("a set", one) for one in draw_steps()]
    judged = judge_halves(labelled)
    assert len(judged) <= len(labelled)
    shifted = [
        (label, one._replace(level=one.level + 5.0) if one.group == "one a100 0" else one)
        for label, one in labelled
    ]
    # a group that is far off is not believed by levels of other groups, which left it out
    far = [one for one in judge_halves(shifted) if one.observation.group == "one a100 0"]
    assert all(one.error > 0.9 for one in far)


def test_coverage_is_the_share_of_draws() -> None:
    """A step is predicted far too low, rightly and far too high in three draws: one interval of three
    holds it, though the one in the middle does."""
    centres = {"low": -1.0, "right": 0.0, "high": 1.0}
    labelled = [("a set", Observation(TE, "judged", "judged", 0.0))]
    for name, centre in centres.items():
        for number in range(6):
            for jitter in (-0.01, 0.01):
                one = Observation(TE, name, f"{name} {number}", centre + jitter)
                labelled.append(("a set", one))
    draws = [[one.source == name for _, one in labelled] for name in centres]
    judged = judge_draws(labelled, draws)[0]
    assert judged.inside[80] == pytest.approx(1 / 3)
    assert judged.inside[95] == pytest.approx(1 / 3)


def test_a_model_is_left_out_with_all_its_groups() -> None:
    """Two groups of one model lie far from all others: each says the level of the other, unless they
    are left out together."""
    labelled = []
    for one in draw_steps():
        is_far = one.group in ("one a100 0", "one a100 1")
        model = "far" if is_far else one.group
        cell = Cell("far", "v100", "fp32") if is_far else one.cell
        level = one.level + (1.0 if is_far else 0.0)
        labelled.append(("a set", one._replace(cell=cell, level=level, model=model)))
    by_group = [one.error for one in judge_halves(labelled) if one.observation.model == "far"]
    by_model = [one.error for one in judge_models(labelled) if one.observation.model == "far"]
    assert min(by_model) > 0.5
    assert np.mean(by_group) < 0.8 * np.mean(by_model)


def test_a_set_says_whether_its_bar_is_met_and_what_it_takes_without_a_level() -> None:
    labelled = [("torchao", one) for one in draw_steps()]
    [everything, row] = tabulate_sets(judge_halves(labelled), 0)
    assert everything["steps"] == "all of data/steps"
    assert row["met"] == ("yes" if row["mean"] <= row["bar"] else "NO")
    levels = np.array([one.level for _, one in labelled])
    assert row["without"] == pytest.approx(100 * np.mean(np.abs(np.exp(-levels) - 1)))
    assert tabulate_sets(judge_halves(labelled))[1]["met"] is None


def test_counts_of_many_steps() -> None:
    """Of ten fair coins two to eight show heads in 95 % of all cases; of 2,000 steps 1,565 to 1,635 lie
    in 80 % intervals."""
    assert find_counts(10, 0.5) == (2, 8)
    assert find_counts(2000, 0.8) == (1565, 1635)
