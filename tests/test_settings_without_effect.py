"""Settings that would change nothing: those of a model or a number format are errors with a next step, those
of a degree are accepted, so that a loop over degrees runs. And errors that led astray."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import CP_KINDS

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
DENSE = pk.Transformer.preset(
    "gpt3-1.3b", layers=4, batch=16, sequence=512, dtype="bf16", mixed=True, fused=True
)
MOE = replace(DENSE, experts=8, top_k=2)


@pytest.mark.parametrize(
    "setting", [{"dispatch": "once"}, {"overlap_experts": True}, {"two_level": True}, {"ep": 2}]
)
def test_dense_models_have_no_experts_to_say_something_of(setting: dict[str, Any]) -> None:
    strategy = pk.Strategy(dp=8, zero=1, **setting)
    wanted = "a dense model has none: leave ep, etp, dispatch, two_level and overlap_experts out"
    with pytest.raises(ValueError, match=wanted):
        pk.predict(DENSE, "h100-sxm-8", strategy=strategy)
    found = pk.explore(DENSE, "h100-sxm-8", strategies=[strategy, pk.Strategy(dp=8, zero=1)])
    [text] = found.left_out
    assert wanted in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pk.Strategy(checkpoint_layers=3),
            "checkpoint_layers is 3 and checkpoint 'none', .* take checkpoint='full'",
        ),
        (
            lambda: pk.Strategy(
                checkpoint=np.array(["full", "none"]), checkpoint_layers=np.array([2, 5])
            ),
            "checkpoint_layers is 5 and checkpoint 'none'",
        ),
        (
            lambda: pk.predict(
                DENSE, "h100-sxm-8", strategy=pk.Strategy(checkpoint="full", checkpoint_layers=5)
            ),
            "checkpoint_layers is 5 and the model has 4 layers; take at most these",
        ),
        (
            lambda: pk.predict(
                DENSE, "h100-sxm-8", strategy=pk.Strategy(checkpoint="full", checkpoint_group=5)
            ),
            "checkpoint_group is 5 and the model has 4 layers; take at most these",
        ),
        (
            lambda: replace(DENSE, checkpoint_layers=3),
            "checkpoint_layers is 3 without a checkpoint, .* take checkpoint=True",
        ),
        (
            lambda: replace(DENSE, checkpoint=True, checkpoint_layers=5),
            "checkpoint_layers is 5 and layers 4; take at most these",
        ),
        (lambda: replace(DENSE, fp8_gathers=True), "fp8_gathers is True and dtype 'bf16'; take"),
        (lambda: replace(DENSE, keeps_fp8=True), "keeps_fp8 is True and dtype 'bf16'; take dtype"),
        (
            lambda: pk.load_platform("h100-sxm-8").with_host_memory(sharers=100),
            "sharers is 100 and a node of platform 'h100-sxm-8' has 8 ranks; take at most these",
        ),
        (
            lambda: pk.Strategy(pp=4, schedule="interleaved"),
            "chunks is 1 with schedule 'interleaved', .* take chunks=2 or more, or schedule='1f1b'",
        ),
        (
            lambda: pk.Strategy(
                pp=np.array([1, 4]), schedule=np.array(["interleaved"] * 2), chunks=np.array([1, 1])
            ),
            "chunks is 1 with schedule 'interleaved'",
        ),
        (
            lambda: pk.Strategy(zero=1, offload="optimizer", host_threads=1025),
            "host_threads is 1025; it must be a whole number of 0 or more, at most 1024",
        ),
    ],
)
def test_settings_that_nothing_reads_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_no_layer_of_a_checkpoint_is_a_way_to_say_none() -> None:
    plain, of_none = (
        pk.predict(MOE, "h100-sxm-8", strategy=strategy).time
        for strategy in (
            pk.Strategy(dp=8, zero=1),
            pk.Strategy(dp=8, zero=1, checkpoint="full", checkpoint_layers=0),
        )
    )
    assert plain == of_none


def test_loops_over_degrees_may_keep_their_settings() -> None:
    """At a degree of 1 they change nothing, as the docstring of each says."""
    plain = pk.Strategy(dp=8, zero=1)
    of_degrees: list[dict[str, Any]] = [
        *({"cp_kind": kind} for kind in CP_KINDS),
        {"sequence_parallel": True},
        {"tiled": True},
        {"schedule": "zero_bubble"},
        {"schedule": "interleaved"},
        {"dispatch": "once"},
        {"overlap_experts": True},
        {"two_level": True},
    ]
    ways = [plain, *(replace(plain, **settings) for settings in of_degrees)]
    columns = price_strategies(MOE, pk.load_platform("h100-sxm-8"), pk.Strategy.stack(ways))
    assert len(np.unique(columns["time"])) == 1
    for way, needs in zip(ways, columns["needs"], strict=True):
        assert needs == columns["needs"][0] or way.overlap_experts


@pytest.mark.parametrize(
    ("make", "message", "absent"),
    [
        (
            lambda: pk.Transformer.from_config({"model_type": "mamba"}),
            "model_type is 'mamba'; known are",
            "did you mean",
        ),
        (lambda: pk.Strategy(pp=2, schedule="dualpope"), "schedule is 'dualpope'", "mean 'gpipe'"),
        (
            lambda: pk.predict(replace(DENSE, dtype="fp8"), "a100-sxm-8"),
            "on a100-sxm-8 dtype is 'fp8'; known are fp64, fp32, tf32, bf16, fp16",
            "int8",
        ),
        (
            lambda: pk.predict(DENSE, "h100-sxm-8", strategy="fsdp"),  # type: ignore[arg-type]
            "strategy is 'fsdp'; it must be a Strategy, such as Strategy\\(dp=8, zero=3\\) for FSDP",
            "None",
        ),
    ],
)
def test_errors_lead_to_what_was_meant(make: Any, message: str, absent: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        make()
    assert absent not in str(refusal.value)


def test_a_model_of_the_hub_that_is_not_here_is_downloaded_first(tmp_path: Path) -> None:
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B/config.json"):
        with pytest.raises(ValueError, match=r"as after `hf download Qwen/Qwen3-8B config.json"):
            pk.Transformer.from_config(name)
    # a path is none
    for path in (tmp_path / "nowhere", "./config.json", "folder/config.json"):
        with pytest.raises(ValueError, match="cannot be read") as refusal:
            pk.Transformer.from_config(path)
        assert "hf download" not in str(refusal.value)


def test_a_datasheet_without_pcie_asks_for_everything_at_once() -> None:
    platform = pk.Platform.from_datasheet("mine", flops={"bf16": 1e14}, memory=(96e9, 3e12))
    with pytest.raises(ValueError, match=r"give capacity .* and bandwidth .*, and link, what one"):
        platform.with_host_memory(sharers=1)


@pytest.mark.parametrize(
    ("of_model", "of_strategy", "wanted"),
    [
        ({"checkpoint": True}, {}, "checkpoint='full'; state in the strategy checkpoint='full'"),
        (
            {"checkpoint": "mlp", "checkpoint_layers": 2},
            {},
            "state in the strategy checkpoint='mlp', checkpoint_layers=2, or leave them out",
        ),
        (
            {"parallel": "fsdp"},
            {},
            "do not count: parallel='fsdp'; state in the strategy zero=3",
        ),
        (
            {"accumulate": 2},
            {"dp": 4},
            "do not count: accumulate=2; state in the strategy micro_batch=2",
        ),
        (
            {"overlap": False},
            {},
            "do not count: overlap=False; state in the strategy overlap=False",
        ),
        ({"checkpoint": True}, {"checkpoint": "full"}, None),
        ({"checkpoint": True}, {"checkpoint": "mlp"}, None),
        ({"parallel": "fsdp"}, {"zero": 3}, None),
        ({"parallel": "fsdp"}, {"dp": 1}, None),
        ({"accumulate": 2}, {}, None),
        ({"accumulate": 4}, {"micro_batch": 2}, None),
        ({}, {}, None),
    ],
)
def test_settings_of_a_model_that_a_strategy_replaces_are_told(
    of_model: dict[str, Any], of_strategy: dict[str, Any], wanted: str | None
) -> None:
    """Where the strategy leaves them at their defaults and they would change something."""
    model = replace(DENSE, **of_model)
    strategy = replace(pk.Strategy(dp=8), **of_strategy)
    found = pk.predict(model, "h100-sxm-8", strategy=strategy)
    notes = [text for text in found.warnings if "the strategy replaces settings" in text]
    assert found.time == pk.predict(DENSE, "h100-sxm-8", strategy=strategy).time
    if wanted is None:
        assert not notes
    else:
        [note] = notes
        assert wanted in note


def test_a_search_says_nothing_of_settings_that_it_chooses() -> None:
    again = replace(DENSE, checkpoint=True)
    text = "the strategy replaces settings"
    searched = pk.explore(again, "h100-sxm-8", 8)
    assert not any(text in warning for warning in searched.warnings)
    given = pk.explore(again, "h100-sxm-8", strategies=[pk.Strategy(dp=8)])
    assert any(text in warning for warning in given.warnings)
