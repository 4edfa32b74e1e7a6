"""Scales of GPUs from published steps: recovered where known, shared with generations without
steps, as predicted."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_context import (
    BARS,
    GENERATIONS,
    build_workload,
    list_steps,
    read_rows,
    read_scales,
    state_split_steps,
    state_steps,
)
from benchmarks.helpers.gpu_scales import Step, add_published, fit_scales, predict_steps
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import Costs, price
from perfkit.prediction.predictor import predict
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer

TRUE = {"product": 1.02, "memory": 1.5, "attention.triton": 1.7, "host": 0.8, "exchange": 0.5}


def make_steps(generation: str, count: int, memory: float = 1.0) -> list[Step]:
    """Steps that take exactly what these scales say, with more or less work of memory; some wait
    for the host."""
    rng, steps = np.random.default_rng(7), []
    for number in range(count):
        parts = dict(zip(TRUE, rng.uniform(0.2, 1.0, 5), strict=True))
        flight, parts["memory"] = parts.pop("exchange"), memory * parts["memory"]
        parts["host"] *= 10.0 if number % 3 == 0 else 0.1
        device = (
            sum(TRUE[name] * value for name, value in parts.items() if name != "host")
            + TRUE["exchange"] * flight
        )
        seconds = float(smooth_maximum(device, TRUE["host"] * parts["host"], sharpness=4.0))
        known = {"rest": 0.0, "flight": flight, "exposed": 0.0, "update": 0.0, "uncertainty": 0.0}
        steps.append(Step(f"source {number % 2}", generation, str(number), seconds, parts | known))
    return steps


def test_known_scales_are_found_and_lent_to_other_generations_with_less_certainty() -> None:
    steps = make_steps("a100", 40)
    scales = fit_scales(steps, ("a100", "h100"))
    for name, true in TRUE.items():
        value, error, count = scales[name, "a100"]
        assert value == pytest.approx(math.log(true), abs=max(2 * error, 0.01))
        assert count == 40 or name == "product"  # of which the prior knows more
        assert scales[name, "h100"][1] > error and scales[name, "h100"][2] == 0
    # as far as one generation tells of another
    assert math.exp(scales["attention.triton", "h100"][0]) > 1.2
    assert scales["spread", "h100"][0] >= 0.3 > scales["spread", "a100"][0]
    times, spreads = predict_steps(steps, scales)
    assert (
        np.abs(np.log(times / [step.seconds for step in steps])).max() < 0.05
        and (spreads > 0).all()
    )


def test_memory_bound_work_has_a_factor_of_each_source_and_one_that_nobody_saw_is_less_sure() -> (
    None
):
    """What programs fuse and copy is their own: a factor of e^0.2 is not unusual (formulas, table
    4.3)."""
    factors, steps = {"source 0": 1.2, "source 1": 1 / 1.2}, []
    for step in make_steps("a100", 80):
        # is a part of its own before
        scaled = {**step.parts, "memory": step.parts["memory"] / factors[step.source]}
        steps.append(step._replace(parts=scaled))
    scales = fit_scales(steps, ("a100",))
    logs = [scales["source", name][0] for name in factors]
    assert logs[0] - logs[1] == pytest.approx(2 * math.log(1.2), rel=0.15)
    assert (
        scales["source", ""] == (0.0, pytest.approx(0.2), 0)
        and scales["source", "source 0"][2] == 40
    )
    _, known = predict_steps(steps, scales)
    _, strange = predict_steps([step._replace(source="mine") for step in steps], scales)
    assert strange.mean() > known.mean()
    platform = add_published(
        load_platform("a100-sxm-8"), scales, "a100", source="steps", date="2026-11-23"
    )
    error = platform.context.kernels["elementwise"].stderr["scale"]
    assert error == pytest.approx(math.hypot(scales["memory", "a100"][1], 0.2))


@pytest.mark.parametrize(("sources", "off"), [(2, 0.0), (2, 0.2), (8, 0.2)])
def test_steps_scatter_as_sources_do_however_many_steps_a_source_has(
    sources: int, off: float
) -> None:
    """Every source counts as three steps, beside six of 10 % that are expected (formulas, table
    4.3)."""
    steps = []
    # no factor of that explains a source
    for number, step in enumerate(make_steps("a100", 80, memory=0.0)):
        source = number % sources
        wrong = math.exp(off if source % 2 else -off)
        steps.append(step._replace(source=f"source {source}", seconds=step.seconds * wrong))
    once = fit_scales(steps, ("a100",))["spread", "a100"].log
    thrice = fit_scales(3 * steps, ("a100",))["spread", "a100"].log
    variance = (3 * sources * off**2 + 6 * 0.1**2) / (3 * sources + 6)
    assert once == pytest.approx(math.sqrt(variance), rel=0.1)
    assert thrice == pytest.approx(once, rel=0.05)


def price_family(graph: Graph, family: str, platform: Platform) -> Costs:
    """Costs of a step as one of a family."""
    (costs,) = price([replace(graph, family=family)], platform)
    return costs


@pytest.mark.parametrize("name", ["a100-sxm-8", "zen5-2"])
def test_scales_of_a_gpu_hold_for_the_family_they_were_fitted_to(name: str) -> None:
    """Kernels of other families take what they take alone, with its spread; a CPU runs a few
    families of its own."""
    platform = load_platform(name)
    bare = replace(platform, context=replace(platform.context, kernels={}))
    model = Transformer.bert("bert-base", batch=8, sequence=128, layers=2)
    (graph,) = model.graphs(accelerator="zen" not in name)
    scaled = price_family(graph, "transformer", platform)
    other = price_family(graph, "dlrm", platform)
    nameless = price_family(graph, "", platform)
    alone = price_family(graph, "transformer", bare)
    assert np.array_equal(scaled.seconds, nameless.seconds)
    assert not np.allclose(scaled.seconds, alone.seconds, rtol=1e-3)
    like = scaled if name == "zen5-2" else alone
    assert np.array_equal(other.seconds, like.seconds)
    assert np.array_equal(other.spread, like.spread)
    if name != "zen5-2":
        products = [place for place, label in enumerate(graph.labels) if label.kind == "gemm"]
        scale = platform.context.kernels["gemm"]["scale"]
        assert scaled.seconds[products] == pytest.approx(scale * alone.seconds[products])


def test_what_stands_behind_a_scale_is_told() -> None:
    node = load_platform("h100-sxm-8")
    platform = add_published(node, read_scales(), "h100", source="steps", date="2026-11-22")
    fits = platform.context.kernels
    forward = fits["attention.forward.triton"]
    backward = fits["attention.backward.triton"]
    assert "attention.backward.triton" in node.kernels
    assert backward["scale"] == forward["scale"]
    assert forward.kind == "fitted"
    assert forward.n >= 38
    borrowed = fits["attention.forward.efficient"]
    assert borrowed.kind == "assumed"
    assert borrowed.spread >= 0.3
    assert "h100" in borrowed.notes[0]


def test_a_backward_pass_without_a_rate_of_its_own_is_slower_than_its_arithmetic() -> None:
    """It takes 1.9 times its arithmetic at the rate of the forward pass."""
    node = load_platform("a100-sxm-8")
    assert "attention.backward.triton" not in node.kernels
    platform = add_published(node, read_scales(), "a100", source="steps", date="2026-11-22")
    fits = platform.context.kernels
    forward = fits["attention.forward.triton"]
    backward = fits["attention.backward.triton"]
    assert backward["scale"] == pytest.approx(1.9 * forward["scale"])


CASES: list[dict[str, Any]] = [
    {"source": "mpt", "model": "mpt-3b", "device": "a100-sxm", "ranks": "8"},
    {"source": "mpt", "model": "mpt-1b", "device": "h100-sxm", "ranks": "8"},
    {"source": "vtrain", "hidden": "1024", "micro_batch": "1", "accumulate": "2"},
    {"source": "flash_gpt", "model": "gpt3-125m"},
]


def test_kernels_of_a_compiler_are_known_from_steps_of_one_generation() -> None:
    known = load_platform("h200-sxm-8").context.kernels["elementwise.fused"]
    assert known.n == 3
    assert "three compiled steps" in known.source
    borrowed = load_platform("b200-sxm-8").context.kernels["elementwise.fused"]
    assert not borrowed.n
    assert borrowed.spread >= 0.3


def find_row(case: Mapping[str, str]) -> dict[str, str]:
    """The first published step with these cells."""
    for row in read_rows():
        if all(row[key] == value for key, value in case.items()):
            return row
    raise AssertionError(f"no row with {case}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["source"] + case.get("model", ""))
def test_platforms_predict_steps_as_the_fit_does(case: dict[str, Any]) -> None:
    """What was fitted is what a user gets, whose program is no known source: scaled parts equal the
    simulation."""
    row = find_row(case)
    mixed = "no" if row["mixed"] == "master" else row["mixed"]
    row = {**row, "mixed": mixed, "link": "", "accumulate": "1"}
    scales = read_scales()
    steps = [step._replace(source="") for step in list_steps([row])]
    times, _ = predict_steps(steps, scales)
    generation = row["device"].partition("-")[0]
    node = load_platform(f"{row['device']}-8")
    platform = add_published(node, scales, generation, source="steps", date="2026-11-22")
    model = build_workload(row, 1)
    ranks = int(row["ranks"])
    with keep_quiet():
        prediction = predict(model, platform, ranks=ranks, execution=row["execution"])
    assert prediction.time == pytest.approx(times[0], rel=0.01)


def test_each_generation_has_scales() -> None:
    generations = {generation for name, generation in read_scales() if name != "source"}
    assert generations == set(GENERATIONS)


@pytest.mark.parametrize(
    ("name", "generation"),
    [("a100-sxm-8", "a100"), ("b200-sxm-8", "blackwell"), ("v100-sxm-8", "v100")],
)
def test_files_of_the_gallery_hold_the_scales(name: str, generation: str) -> None:
    scales = read_scales()
    kernels = load_platform(name).context.kernels
    for operation, kind in (
        ("gemm", "product"),
        ("copy", "memory"),
        ("attention.forward.triton", "attention.triton"),
    ):
        scale = math.exp(scales[kind, generation].log)
        assert kernels[operation]["scale"] == pytest.approx(scale, rel=1e-4)


def count_inside(rows: Sequence[Mapping[str, Any]]) -> int:
    """Rows whose measured time is in the 80 % interval."""
    return sum(row["low"] < row["measured"] < row["high"] for row in rows)


def list_apart() -> list[dict[str, str]]:
    """Published steps that are judged one by one."""
    return [row for row in read_rows() if row["source"] == "neusight_dp4"]


def test_steps_on_four_gpus_lie_in_their_intervals() -> None:
    stated = state_steps(list_apart(), read_scales())
    assert len(stated) == 3
    assert count_inside(stated) == 3
    assert max(abs(row["error"]) for row in stated) < 0.2


def test_most_steps_of_split_models_lie_in_their_intervals() -> None:
    split = state_split_steps(list_apart()[0], read_scales())
    assert len(split) == 6
    assert count_inside(split) >= 5
    assert max(abs(row["error"]) for row in split) < 0.2


def read_table(command: str) -> list[list[str]]:
    """Cells of the first table that a command prints in docs/accuracy.md, without its heads."""
    page = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
    _, _, after = page.read_text(encoding="utf-8").partition(f"<!-- python -m {command} -->")
    table = after.partition("```text\n")[2].partition("\n\n")[0]
    return [re.split(" {2,}", line.strip()) for line in table.splitlines()[1:]]


def test_the_bars_of_published_steps_hold_in_the_committed_table() -> None:
    """`benchmarks.gpu_context` prints the table, and its exit code says whether a bar is missed."""
    cells = read_table("benchmarks.gpu_context")
    means = {(row[0], row[1]): float(row[4]) for row in cells}
    missed = {key: bar for key, bar in BARS.items() if means[key] > bar}
    assert missed == {}
    inside = {row[1]: float(row[7]) for row in cells if row[0] == "all"}
    assert 70 <= inside["source left out"] <= 90  # as for a reader's program
