"""Published language models: their numbers of parameters, and that each is what its `config.json`
would give."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.files import group_rows
from perfkit.workloads.hub_types import MODEL_TYPES
from perfkit.workloads.transformer_presets import TRANSFORMERS

#: Models of which the name alone is published, and no number of parameters.
NAMES_ALONE = {
    *("mpt-125m", "mpt-350m", "mpt-760m", "mpt-1b", "mpt-3b", "mpt-7b", "mpt-13b", "mpt-30b"),
    "mpt-70b",
}


def make_short(name: str) -> pk.Transformer:
    """A preset with short sequences; those of images are as long as they are."""
    if "patch" in TRANSFORMERS[name].fields:
        return pk.Transformer.preset(name)
    return pk.Transformer.preset(name, sequence=64)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_preset_has_its_published_number_of_parameters(name: str) -> None:
    preset = TRANSFORMERS[name]
    [graph] = make_short(name).graphs()
    if preset.parameters is None:
        assert name in NAMES_ALONE
        return
    difference = graph.parameters - preset.parameters
    if preset.rounding == 0:
        assert difference == 0
    else:  # rounded, or cut
        assert -preset.rounding / 2 <= difference < preset.rounding


def test_most_numbers_of_parameters_are_exact() -> None:
    exact = [name for name, preset in TRANSFORMERS.items() if preset.rounding == 0]
    published = [name for name in exact if name not in NAMES_ALONE]
    assert len(published) >= 88
    assert len(TRANSFORMERS) - len(NAMES_ALONE) >= 101


def test_each_number_says_where_it_is_published() -> None:
    for name, [row] in group_rows("model", "published", "transformers.csv").items():
        assert row["source"], name
        assert row["counted"], name
        assert row["date"].isdecimal(), name
        if row["parameters"]:
            assert int(row["rounding"]) < int(row["parameters"]) / 50, name


@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        ("deepseek-v3", 4096),
        ("llama-3-8b", 8192),
        ("llama-3.1-405b", 8192),
        ("mixtral-8x7b", 32768),
        ("gpt-oss-20b", 4096),
        ("gpt3-175b", 2048),
        ("bert-large", 128),
        ("vit-l16", 197),
    ],
)
def test_sequences_are_those_of_the_first_training(name: str, sequence: int) -> None:
    """As published; else all positions, 4,096 at most; of a BERT 128, of an image its patches."""
    assert pk.Transformer.preset(name).sequence == sequence


def test_a_model_with_fewer_positions_has_shorter_sequences() -> None:
    assert pk.Transformer.preset("llama-3-8b", positions=1024).sequence == 1024
    arrays = pk.Transformer.preset("llama-3-8b", positions=np.array([1024, 65536]))
    assert np.asarray(arrays.sequence).tolist() == [1024, 8192]


def test_each_published_sequence_is_of_a_preset_and_has_its_source() -> None:
    for name, [row] in group_rows("model", "published", "training_sequences.csv").items():
        assert int(row["sequence"]) <= TRANSFORMERS[name].fields["positions"], name
        assert row["source"], name
        assert row["date"].isdecimal(), name


#: Keys that say the same as a field of a `Transformer`.
FIELDS = {
    "qk_nope_head_dim": "head_width",
    "qk_rope_head_dim": "rope_width",
    "v_head_dim": "width_of_values",
    "n_routed_experts": "experts",
    "num_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_width",
    "n_shared_experts": "shared_experts",
    "shared_expert_intermediate_size": "shared_width",
    "first_k_dense_replace": "dense_layers",
    "n_group": "expert_groups",
    "topk_group": "top_groups",
    "num_kv_heads": "kv_heads",
    "rotary_dim": "rotary_width",
    "use_parallel_residual": "parallel_mlp",
    "parallel_attn": "parallel_mlp",
    "patch_size": "patch",
}


def write_parts(keys: Sequence[str], model: pk.Transformer) -> dict[str, Any]:
    """What a configuration says of keys that are understood together."""
    config: dict[str, Any] = {}
    for key in keys:
        if key in FIELDS:
            config[key] = getattr(model, FIELDS[key])
            continue
        match key:
            case "num_key_value_heads":
                config[key] = model.kv_heads or model.heads
            case "head_dim":
                config[key] = model.head_width or model.hidden // model.heads
            case "q_lora_rank":
                config[key] = model.q_lora_rank or None
            case "topk_method":
                config[key] = "group_limited_greedy" if model.expert_groups else "greedy"
            case "num_nextn_predict_layers" | "num_mtp_layers":
                config[key] = 0
            case "multi_query":
                config[key] = model.kv_heads == 1
            case "sliding_window":
                config[key] = model.window or None
            case "attention_bias" | "qkv_bias":
                config[key] = bool(model.qkv_bias)
            case "rotary_pct" | "partial_rotary_factor" if model.rotary_width:
                config[key] = model.rotary_width / (model.hidden // model.heads)
            case "new_decoder_architecture":
                config[key] = model.parallel_norms == 2
            case "n_inner":
                config[key] = model.inner or None
            case "max_position_embeddings" if model.causal:  # OPT
                config[key] = model.positions
            case "max_position_embeddings":  # RoBERTa
                config[key] = model.positions + 2
            case "hidden_act" | "activation_function" | "hidden_activation" | "activation":
                config[key] = model.activation.replace("gelu_tanh", "gelu_pytorch_tanh")
            case "image_size":
                config[key] = model.patch * round((model.sequence - 1) ** 0.5)
            case "num_labels":
                config[key] = model.classes
            case "embedding_multiplier" | "residual_multiplier" | "logits_scaling":
                config[key] = 8.0
            case _:
                pass  # its default
    return config


def write_config(name: str) -> dict[str, Any]:
    """The configuration of a preset, with the keys of its type."""
    preset = TRANSFORMERS[name]
    kind = MODEL_TYPES[preset.model_type]
    model = make_short(name)
    config: dict[str, Any] = {"model_type": preset.model_type, "tie_word_embeddings": model.tie}
    for key, field in kind.sizes.items():
        config[key] = getattr(model, field)
        if field == "inner" and not model.inner:
            config[key] = 4 * model.hidden
    for part in kind.parts:
        config |= write_parts(part.keys, model)
    return config


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_preset_is_what_its_configuration_gives(name: str) -> None:
    preset = make_short(name)
    read = pk.Transformer.from_config(write_config(name), dropout=0.0, sequence=preset.sequence)
    # none is as many heads of keys as heads, and an inner width four times the width
    preset = replace(
        preset,
        name=read.name,
        kv_heads=preset.kv_heads or preset.heads,
        inner=preset.inner or 4 * preset.hidden,
    )
    read = replace(read, kv_heads=read.kv_heads or read.heads, inner=read.inner or 4 * read.hidden)
    assert read == preset


@pytest.mark.parametrize(
    ("name", "near"),
    [("llama3-8b", "llama-3-8b"), ("Mixtral", "mixtral-8x7b"), ("qwen-3-8b", "qwen3-8b")],
)
def test_an_unknown_name_is_told_those_that_are_near(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean .*'{near}'") as refusal:
        pk.Transformer.preset(name)
    assert "perfkit models" in str(refusal.value)


@pytest.mark.parametrize("name", ["llama-4", "mamba-2.8b"])
def test_a_name_of_another_model_is_told_no_model_for_it(name: str) -> None:
    with pytest.raises(ValueError, match=r"known are .* reads the config\.json of any") as refusal:
        pk.Transformer.preset(name)
    assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("name", [3, "", None, ["gpt2"]])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"known are bert-base, .* and more; `perfkit models`"):
        pk.Transformer.preset(name)
