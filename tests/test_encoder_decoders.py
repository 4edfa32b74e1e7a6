"""Encoders with a decoder (T5, BART, Whisper): a Transformer does not build them, and says how to capture
them; what it says runs."""

import json
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.ground.files import group_rows
from perfkit.workloads.encoder_decoders import ENCODER_DECODERS
from perfkit.workloads.presets import build_workload

pytestmark = pytest.mark.usefixtures("few_calls")

#: A Whisper with one layer in each stack, as a file of the Hub has it but for its architectures.
WHISPER = {
    "model_type": "whisper",
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "num_mel_bins": 128,
    "max_source_positions": 16,
    "max_target_positions": 8,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_name_is_no_preset_and_leads_to_capture(name: str) -> None:
    with pytest.raises(ValueError, match=f"preset is '{name}', an encoder with a decoder") as error:
        pk.Transformer.preset(name)
    assert "; capture it: import torch, transformers, perfkit as pk; " in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"model is '{name}', an encoder with a decoder"):
        build_workload(name)


@pytest.mark.parametrize("name", ["t5-xxl", "mt5-base", "Whisper-large-v2", "flan-ul2"])
def test_other_sizes_lead_to_their_configuration(name: str) -> None:
    with pytest.raises(ValueError, match=r"download (its|the) config.json and capture it"):
        pk.Transformer.preset(name)


def test_each_number_of_parameters_says_where_it_is_published() -> None:
    for name, [row] in group_rows("model", "published", "encoder_decoders.csv").items():
        assert row["counted"], name
        assert row["source"].startswith("arXiv:"), name


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_the_model_of_a_name_has_its_published_number_of_parameters(name: str) -> None:
    torch = pytest.importorskip("torch", reason="the modules are built in PyTorch")
    transformers = pytest.importorskip(
        "transformers", reason="the modules are those of this library"
    )
    model = ENCODER_DECODERS[name]
    config = eval(f"transformers.{model.config}({model.settings})", {"transformers": transformers})
    kind = getattr(transformers, model.config.replace("Config", "ForConditionalGeneration"))
    with torch.device("meta"):
        module = kind(config)
    assert sum(weight.numel() for weight in module.parameters()) == model.parameters


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
def test_what_an_error_says_runs(tmp_path: Path) -> None:
    """Both stacks are captured, with attention to the other one: three attentions in two layers; the
    recipe of T5 is another one."""
    pytest.importorskip("torch", reason="programs are captured")
    pytest.importorskip("transformers", reason="the programs are those of this library")
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    with pytest.raises(ValueError, match=r"an encoder with a decoder, .*; capture it") as error:
        pk.Transformer.from_config(tmp_path)
    code = str(error.value).partition("capture it: ")[2]
    assert "torch.zeros(8, 128, 3000)" in code
    code = code.replace("(8, 128, 3000)", "(2, 128, 32)").replace("(8, 128,", "(2, 8,")
    names: dict[str, Any] = {}
    exec(code, names)
    graph = names["graph"]
    forward = [label for label in graph.labels if label.phase == "forward"]
    assert sum(label.kind == "attention" for label in forward) == 3
    assert pk.predict(graph, "h100-sxm-8").time > 0


@pytest.mark.parametrize("kind", ["mt5", "bart", "whisper", "encoder-decoder"])
def test_configurations_of_these_types_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"model_type is '{kind}', an encoder with a decoder"):
        pk.Transformer.from_config({"model_type": kind})
