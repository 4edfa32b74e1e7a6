"""Published language models: their numbers of parameters, and that each is what its `config.json`
would give."""

from typing import Any

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


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_preset_has_its_published_number_of_parameters(name: str) -> None:
    preset = TRANSFORMERS[name]
    [graph] = pk.Transformer.preset(name, sequence=64).graphs()
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
    assert len(published) >= 39
    assert len(TRANSFORMERS) - len(NAMES_ALONE) >= 48


def test_each_number_says_where_it_is_published() -> None:
    for name, [row] in group_rows("model", "published", "transformers.csv").items():
        assert row["source"], name
        assert row["counted"], name
        assert row["date"].isdecimal(), name
        if row["parameters"]:
            assert int(row["rounding"]) < int(row["parameters"]) / 50, name


def write_config(name: str) -> dict[str, Any]:
    """The configuration of a preset, with the keys of its type."""
    preset = TRANSFORMERS[name]
    kind = MODEL_TYPES[preset.model_type]
    config: dict[str, Any] = {"model_type": preset.model_type}
    for key, field in kind.sizes.items():
        if field in preset.fields:
            config[key] = preset.fields[field]
        else:
            assert field == "inner"
            config[key] = 4 * preset.fields["hidden"]
    config["tie_word_embeddings"] = preset.fields["tie"]
    for part in kind.parts:
        if "num_key_value_heads" in part.keys:
            config["num_key_value_heads"] = preset.fields["kv_heads"]
        if "head_dim" in part.keys:
            width = preset.fields.get("head_width")
            config["head_dim"] = width or preset.fields["hidden"] // preset.fields["heads"]
    if "sliding_window" in kind.allowed:
        config["sliding_window"] = None
    return config


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_preset_is_what_its_configuration_gives(name: str) -> None:
    read = pk.Transformer.from_config(write_config(name), name=name, dropout=0.0, sequence=64)
    preset = pk.Transformer.preset(name, sequence=64)
    if preset.inner == 0 and read.inner == 4 * preset.hidden:
        preset = pk.Transformer.preset(name, sequence=64, inner=4 * preset.hidden)
        read = pk.Transformer.from_config(
            write_config(name), name=preset.name, dropout=0.0, sequence=64
        )
    assert read == preset


@pytest.mark.parametrize(
    ("name", "near"),
    [("llama3-8b", "llama-3-8b"), ("Mixtral", "mixtral-8x7b"), ("qwen-3-8b", "qwen3-8b")],
)
def test_an_unknown_name_is_told_those_that_are_near(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean .*'{near}'") as refusal:
        pk.Transformer.preset(name)
    assert "perfkit models" in str(refusal.value)


@pytest.mark.parametrize("name", [3, "", None, ["gpt2"]])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"known are bert-base, .* and more; `perfkit models`"):
        pk.Transformer.preset(name)
