"""Recipes of fp8: casts and products by hand, beside the survey that they come from, and in steps."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.files import find_reference
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.kernel_times import find_lone_model
from perfkit.platform.kernels import COMPILED_CASTS, SCALED_PRODUCTS, find_stand_in
from perfkit.workloads.execution import execute
from perfkit.workloads.fp8 import RECIPES, find_layout
from perfkit.workloads.stack import apply_stack, find_stack
from tests.levels import load_without_levels

CLUSTER = load_without_levels("h100-sxm-8x8")
#: A layer has four products with 12 × 4096² weights, on 2,048 tokens a rank.
MODEL = pk.Transformer.preset(
    "gpt3-6.7b", batch=16, sequence=2048, dtype="fp8", mixed=True, fused=True, layers=2
)
WEIGHTS = 12 * 4096**2
#: Inputs of the four products, and gradients of their results, for each token [-].
INPUTS, RESULTS = (1 + 1 + 1 + 4) * 4096, (3 + 1 + 4 + 1) * 4096
TOKENS = 2048
PRICED = [name for name, recipe in RECIPES.items() if recipe.is_priced and name != "mxfp8"]


def record(recipe: str, **changes: object) -> pk.Graph:
    """One rank's step of a single layer."""
    model = replace(MODEL, layers=1, batch=1, mixed=False, fp8_recipe=recipe, **changes)  # type: ignore[arg-type]
    return model.graphs(1, None, accelerator=True)[0]


def add_up_casts(graph: pk.Graph) -> Mapping[str, float]:
    """Bytes that casts to fp8 move, and how many kernels they are, by phase."""
    accesses = graph.accesses
    found: dict[str, float] = {}
    for row, label in enumerate(graph.labels):
        if label.name in ("_to_copy", "cast_scaled", "cast_weight_once"):
            nbytes = float(accesses.nbytes[accesses.operation == row].sum())
            found[label.phase] = found.get(label.phase, 0.0) + nbytes
            key = f"{label.phase} kernels"
            found[key] = found.get(key, 0.0) + float(graph.features.launches[row])
    return found


def test_checkpoints_per_operation_save_the_scales_of_whole_operands() -> None:
    """torchtitan saves `aten.max`: what runs again is a cast with a known scale."""
    llama = pk.Transformer.preset(
        "llama-2-7b", batch=1, sequence=128, layers=1, dtype="fp8", fp8_recipe="tensorwise"
    )

    def count_again(recipe: str) -> list[float]:
        found = []
        for checkpoint in ("none", "per_op"):
            model = replace(llama, fp8_recipe=recipe, checkpoint=checkpoint)
            found.append(add_up_casts(model.graphs(1, None, accelerator=True)[0]))
        plain, again = found
        return [again[key] - plain[key] for key in ("backward", "backward kernels")]

    assert count_again("tensorwise") == count_again("delayed")
    # operand and weight of the first, third, ... of seven products; their results are saved
    assert count_again("delayed")[1] > 0
    assert count_again("rowwise")[1] == count_again("delayed")[1]


@pytest.mark.parametrize(
    ("recipe", "forward", "backward", "kernels"),
    [
        ("delayed", 3.0, (3.0, 0.0), (8, 4)),
        ("tensorwise", 5.0, (5.0, 0.0), (16, 8)),  # each operand is read twice
        ("rowwise", 3.0, (6.0, 3.0), (8, 16)),  # all three operands again, along the other axis
        ("blockwise", 4.0625, (4.0625, 0.0), (8, 4)),  # two copies with a scale of 4 B for 128
        ("mxfp8", 4.0625, (4.0625, 0.0), (8, 4)),  # two copies with a scale of 1 B for 32
    ],
)
def test_casts_move_what_the_recipe_says(
    recipe: str, forward: float, backward: tuple[float, float], kernels: tuple[int, int]
) -> None:
    casts = add_up_casts(record(recipe))
    operands = WEIGHTS + TOKENS * INPUTS
    assert casts["forward"] == pytest.approx(forward * operands)
    of_gradients, of_operands = backward
    expected = of_gradients * TOKENS * RESULTS + of_operands * operands
    assert casts["backward"] == pytest.approx(expected)
    assert (casts["forward kernels"], casts["backward kernels"]) == kernels


def test_weights_that_are_cast_once_have_all_copies_from_then_on() -> None:
    for recipe, nbytes in (
        ("delayed", 1.0),
        ("tensorwise", 1.0),
        ("rowwise", 2.0),
        ("mxfp8", 2.0625),
    ):
        assert RECIPES[recipe].bytes_kept == nbytes
    casts = [label for label in record("rowwise", keeps_fp8=True).labels if "once" in label.name]
    assert [label.phase for label in casts] == ["forward"] * 8


def test_products_with_several_scales_are_named_by_what_their_operands_have() -> None:
    found = {}
    for recipe in RECIPES:
        if not RECIPES[recipe].is_priced:
            continue
        labels = [label for label in record(recipe).labels if label.name == "_scaled_mm"]
        found[recipe] = sorted({label.variant for label in labels})
        assert sorted({find_layout(label.variant) for label in labels}) == ["nn", "nt", "tn"]
    assert found["delayed"] == found["tensorwise"] == found[""] == ["nn", "nt", "tn"]
    assert found["rowwise"] == ["rowwise.nn", "rowwise.nt", "rowwise.tn"]
    squares = "blocks_by_squares"
    assert found["blockwise"] == ["blocks_by_blocks.tn", f"{squares}.nn", f"{squares}.nt"]


def read_survey() -> dict[str, list[tuple[dict[str, int], float]]]:
    """Times of the kernels of the fp8 section of the survey, by name."""
    with find_reference("measured", "h200-2.survey.json").open() as file:
        survey = json.load(file)
    times: dict[str, list[tuple[dict[str, int], float]]] = {}
    for section, name, _, sizes, medians, _, failed in survey["rows"]:
        if section == "fp8" and not failed:
            times.setdefault(name, []).append((sizes, math.sqrt(math.prod(medians))))
    return times


@pytest.mark.parametrize(
    ("product", "measured", "most", "without"),
    [
        ("rowwise", "row", 0.06, 0.068),
        ("blocks_by_squares", "block_1x128_by_128x128", 0.07, 0.12),
        ("blocks_by_blocks", "block_1x128_by_1x128", 0.065, 0.29),
    ],
)
def test_slowdowns_come_from_half_of_the_shapes_and_hold_for_the_others(
    product: str, measured: str, most: float, without: float
) -> None:
    times = read_survey()
    plain = {tuple(sizes.values()): time for sizes, time in times["tensor"]}
    layers = sorted({(sizes["k"], sizes["n"]) for sizes, _ in times["tensor"]})
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for sizes, time in times[measured]:
        is_fitted = (sizes["k"], sizes["n"]) in layers[::2]
        ratios[is_fitted].append(math.log(time / plain[tuple(sizes.values())]))
    slowdown = SCALED_PRODUCTS[product].slowdown
    assert slowdown == pytest.approx(math.exp(np.mean(ratios[True])), abs=0.001)
    judged = np.array(ratios[False])
    assert np.abs(slowdown / np.exp(judged) - 1).mean() < most
    assert np.abs(1 / np.exp(judged) - 1).mean() == pytest.approx(without, abs=0.005)


@pytest.mark.parametrize("kernel", list(COMPILED_CASTS))
def test_compiled_casts_take_what_the_survey_says_where_it_was_not_fitted(kernel: str) -> None:
    """Rows of 4,096 and 14,336 numbers: 1,024 and 16,384 of them were fitted, 4,096 are judged."""
    platform = pk.load_platform("h200-sxm-8")
    model = find_lone_model(platform, "elementwise", f"fused.{kernel}", "bf16")
    assert model.fit is not None
    rate = model.fit["memory_efficiency"] * platform.device.main_bandwidth
    nbytes = {"fp8_tensor": 5.0, "fp8_row": 3.0, "fp8_block": 3.03125}[kernel]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for sizes, time in read_survey()[f"cast_{kernel[4:]}_compiled"]:
        if sizes["n"] > 1024:
            launches = 2 if kernel == "fp8_tensor" else 1
            found = launches * model.launch + nbytes * sizes["elements"] / rate
            errors[sizes["rows"] == 4096].append(math.log(found / time))
    assert np.mean(errors[False]) == pytest.approx(0.0, abs=0.02)
    assert np.abs(errors[True]).max() < 0.14


def test_a_compiler_makes_casts_at_the_pace_of_arithmetic_and_others_have_them_by_hand() -> None:
    for kernel in COMPILED_CASTS:
        rates = []
        for memory in (1.0, 0.7):
            platform = CLUSTER.with_scale(memory=memory)
            fit = find_lone_model(platform, "elementwise", f"fused.{kernel}", "bf16").fit
            by_hand = find_lone_model(platform, "elementwise", kernel, "bf16").fit
            plain = find_lone_model(platform, "elementwise", "mul", "bf16").fit
            assert fit is not None
            assert by_hand is not None
            assert plain is not None
            assert by_hand["memory_efficiency"] == plain["memory_efficiency"]
            rates.append(fit["memory_efficiency"] * platform.device.main_bandwidth)
        assert rates[0] == pytest.approx(rates[1])
    graph = record("rowwise")
    for pads_products, name in ((True, "fused.fp8_row"), (False, "fp8_row")):
        [compiled] = execute([graph], "compiled", pads_products=pads_products)
        variants = {label.variant for label in compiled.labels if label.name == "cast_scaled"}
        assert variants == {name}


def test_fits_of_scaled_products_are_those_of_fp8_slowed_down() -> None:
    kernels = CLUSTER.kernels
    plain = find_stand_in(kernels, "gemm", variant="nt", dtype="fp8")
    slow = find_stand_in(kernels, "gemm", variant="blocks_by_blocks.tn", dtype="fp8")
    grouped = find_stand_in(kernels, "bmm", variant="rowwise.grouped.nn", dtype="fp8")
    unscaled = find_stand_in(kernels, "bmm", variant="grouped.nn", dtype="fp8")
    assert plain is not None
    assert slow is not None
    assert grouped is not None
    assert unscaled is not None
    assert plain["compute_efficiency"] / slow["compute_efficiency"] == pytest.approx(1.357)
    assert plain["memory_efficiency"] / slow["memory_efficiency"] == pytest.approx(1.357)
    assert slow["launch"] == plain["launch"]
    assert slow.spread > plain.spread
    assert unscaled["memory_efficiency"] / grouped["memory_efficiency"] == pytest.approx(1.026)


@pytest.mark.parametrize("recipe", PRICED)
@pytest.mark.parametrize(
    "strategy",
    [
        pk.Strategy(dp=8, micro_batch=2, zero=3),
        pk.Strategy(tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True, tiled=True),
        pk.Strategy(dp=2, pp=2, micro_batch=2, schedule="zero_bubble", checkpoint="full"),
    ],
    ids=["fsdp", "tensor", "put off"],
)
def test_closed_forms_price_recipes_as_the_event_loop_does(
    recipe: str, strategy: pk.Strategy
) -> None:
    stack = replace(find_stack("megatron-te"), fp8_recipe=recipe)
    with keep_quiet():
        run = pk.predict(MODEL, CLUSTER, strategy=strategy, stack=stack)
        closed = pk.explore(MODEL, CLUSTER, strategies=[strategy], memory=1e13, stack=stack).table()
    assert closed["time_s"][0] == pytest.approx(run.time, rel=0.015)
    assert closed["needs_bytes"][0] == pytest.approx(run.memory().total, rel=1e-3)
    assert run.stack is not None
    assert run.stack.fp8_recipe == recipe


def test_recipes_cost_what_they_add() -> None:
    times = {}
    for recipe in PRICED:
        stack = replace(find_stack("torchtitan"), fp8_recipe=recipe)
        with keep_quiet():
            times[recipe] = pk.predict(MODEL, CLUSTER, ranks=8, stack=stack).time
    assert times[""] == times["delayed"]
    assert times["delayed"] < times["tensorwise"] < times["rowwise"] < times["blockwise"]
    bf16 = replace(MODEL, dtype="bf16")
    stated = replace(find_stack("torchtitan"), fp8_recipe="rowwise")
    with keep_quiet():
        plain = pk.predict(bf16, CLUSTER, ranks=8, stack="torchtitan")
        assert pk.predict(bf16, CLUSTER, ranks=8, stack=stated).time == plain.time


def test_blackwell_has_mxfp8_and_hopper_is_told_from_it() -> None:
    stack = replace(find_stack("megatron-te"), fp8_recipe="mxfp8")
    blackwell = load_without_levels("b200-sxm-8")
    with keep_quiet():
        found = pk.predict(MODEL, blackwell, ranks=2, stack=stack)
        delayed = pk.predict(MODEL, blackwell, ranks=2, stack="megatron-te")
    assert 1.0 < found.time / delayed.time < 1.1
    text = "fp8_recipe is 'mxfp8', which is priced on NVIDIA's GPUs from compute capability 10 on"
    for ask in (
        lambda: pk.predict(MODEL, CLUSTER, ranks=2, stack=stack),
        lambda: pk.explore(MODEL, CLUSTER, strategies=[pk.Strategy(dp=8)], stack=stack),
    ):
        with keep_quiet(), pytest.raises(ValueError, match=text):
            ask()


def test_what_cannot_run_is_refused_by_name() -> None:
    stack = replace(find_stack("megatron-te"), fp8_recipe="nvfp4")
    for ask in (
        lambda: apply_stack(MODEL, None, None, stack),
        lambda: replace(MODEL, fp8_recipe="nvfp4"),
    ):
        with pytest.raises(ValueError, match=r"'nvfp4'.*priced are delayed, tensorwise, rowwise"):
            ask()
    with pytest.raises(
        ValueError, match="fp8_recipe is 'rowwise' and dtype 'bf16'; take dtype='fp8'"
    ):
        replace(MODEL, dtype="bf16", fp8_recipe="rowwise")


def test_software_has_the_recipe_that_it_takes_by_default() -> None:
    assert find_stack("megatron-te").fp8_recipe == "delayed"
    assert find_stack("torchtitan").fp8_recipe == "tensorwise"
    work = apply_stack(replace(MODEL, fp8_recipe="rowwise"), None, None, "torchtitan")
    assert work.workload.fp8_recipe == work.stacks[0].fp8_recipe == "rowwise"
