"""Configurations of the Hugging Face Hub: models with their published numbers of parameters, and
clear refusals of what a Transformer cannot say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.workloads.hub_config import read_hub_config
from perfkit.workloads.hub_types import IGNORED, MODEL_TYPES

Config = dict[str, Any]

#: As on the Hub: https://huggingface.co/NousResearch/Meta-Llama-3-8B/blob/main/config.json
LLAMA_3_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
#: https://huggingface.co/openai-community/gpt2/blob/main/config.json
GPT2: Config = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
#: https://huggingface.co/google-bert/bert-base-uncased/blob/main/config.json
BERT: Config = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
#: https://huggingface.co/mistralai/Mistral-7B-v0.3/blob/main/config.json
MISTRAL: Config = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
#: https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json
MIXTRAL: Config = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
#: https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
QWEN3_MOE: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


#: https://huggingface.co/facebook/opt-125m/blob/main/config.json
OPT: Config = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
#: https://huggingface.co/ibm-granite/granite-3.1-8b-base/blob/main/config.json
GRANITE: Config = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
#: https://huggingface.co/FacebookAI/roberta-base/blob/main/config.json
ROBERTA: Config = {
    "architectures": ["RobertaForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
#: https://huggingface.co/google/gemma-2b/blob/main/config.json
GEMMA: Config = {
    "architectures": ["GemmaForCausalLM"],
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "vocab_size": 256000,
}
#: https://huggingface.co/microsoft/phi-4/blob/main/config.json
PHI_4: Config = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "model_type": "phi3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}

#: https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json
DEEPSEEK_V2_LITE: Config = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

#: https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", *["sliding_attention"] * 22]
#: https://huggingface.co/EleutherAI/pythia-70m/blob/main/config.json
PYTHIA: Config = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
#: https://huggingface.co/tiiuae/falcon-7b/blob/main/config.json, of which num_kv_heads says nothing
FALCON: Config = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "num_kv_heads": 71,
    "parallel_attn": True,
    "vocab_size": 65024,
}
#: https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/blob/main/config.json
QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def count(config: Config | Path | str, **changes: Any) -> int:
    """Parameters of a configuration."""
    [graph] = pk.Transformer.from_config(config, sequence=64, **changes).graphs()
    return graph.parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # where each stands: `counted` of reference_data/published/transformers.csv; of GPT-2 and BERT
        # as PyTorch counts them, where the head has the weights of the embedding
        (LLAMA_3_8B, 8_030_261_248),
        (GPT2, 124_439_808),
        (BERT, 109_514_298),
        (MISTRAL, 7_248_023_552),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_MOE, 30_532_122_624),
        (PHI_4, 14_659_507_200),
        (GEMMA, 2_506_172_416),
        (GRANITE, 8_170_848_256),
        (ROBERTA, 124_697_433),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (GPT_OSS, 20_914_757_184),
        (PYTHIA, 70_426_624),
        (FALCON, 6_921_720_704),
        (QWEN2, 7_615_616_512),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_has_its_published_number_of_parameters(config: Config, parameters: int) -> None:
    assert count(config) == parameters


def test_layers_with_windows_and_without() -> None:
    read = pk.Transformer.from_config(GPT_OSS, sequence=64)
    assert (read.window, read.global_interval, read.sinks) == (128, 2, True)
    alike = {**GPT_OSS, "layer_types": ["sliding_attention"] * 24}
    read = pk.Transformer.from_config(alike, sequence=64)
    assert (read.window, read.global_interval) == (128, 0)
    all_tokens = {**GPT_OSS, "layer_types": ["full_attention"] * 24}
    assert pk.Transformer.from_config(all_tokens, sequence=64).window == 0
    gemma = {"model_type": "gemma3_text", "sliding_window_pattern": 6, "sliding_window": 512}
    read = pk.Transformer.from_config(gemma, sequence=64)
    assert (read.window, read.global_interval, read.qk_norm) == (512, 6, True)


def test_scores_with_a_cap_are_stored() -> None:
    read = pk.Transformer.from_config({"model_type": "gemma2"}, sequence=64)
    assert (read.score_cap, read.logit_cap, read.attention) == (True, True, "eager")
    without = {"model_type": "gemma2", "attn_logit_softcapping": None}
    assert pk.Transformer.from_config(without, sequence=64).attention == "fused"
    with pytest.raises(ValueError, match="score_cap is True with attention 'flash2'"):
        pk.Transformer.from_config({"model_type": "gemma2"}, sequence=64, attention="flash2")


def test_a_part_of_a_head_is_rotated() -> None:
    read = pk.Transformer.from_config(PYTHIA)
    assert (read.rotary_width, read.parallel_mlp, read.parallel_norms) == (16, True, 2)
    newer = {**PYTHIA, "rotary_pct": None, "rope_parameters": {"partial_rotary_factor": 0.5}}
    assert pk.Transformer.from_config(newer).rotary_width == 32
    assert pk.Transformer.from_config({**PYTHIA, "rotary_pct": 1.0}).rotary_width == 0
    one_after_another = {**PYTHIA, "use_parallel_residual": False}
    assert not pk.Transformer.from_config(one_after_another).parallel_mlp
    for share in (0, 2, "half", 0.02):
        with pytest.raises(ValueError, match=r"rotary_pct is .*above 0, at most 1"):
            pk.Transformer.from_config({**PYTHIA, "rotary_pct": share})


def test_attention_and_mlp_have_biases_of_their_own() -> None:
    read = pk.Transformer.from_config({**LLAMA_3_8B, "attention_bias": True}, sequence=64)
    assert (read.qkv_bias, read.output_bias, read.mlp_bias) == (True, True, False)
    # a bias for each number of queries, keys, values and outputs
    more = read.graphs()[0].parameters - 8_030_261_248
    assert more == 32 * (4096 + 2 * 1024 + 4096)


def test_what_a_file_turns_off_is_off() -> None:
    """What published models of a type have is not taken where a file says otherwise."""
    plain = {**GPT_OSS, "attention_bias": False}
    read = pk.Transformer.from_config(plain, sequence=64)
    assert (read.qkv_bias, read.output_bias) == (False, False)
    plain = {"model_type": "qwen2_moe", "qkv_bias": False}
    assert pk.Transformer.from_config(plain, sequence=64).qkv_bias is False
    plain = {**FALCON, "parallel_attn": False, "multi_query": False, "bias": True}
    read = pk.Transformer.from_config(plain, sequence=64)
    assert (read.parallel_mlp, read.kv_heads, read.bias) == (False, 71, True)
    plain = {"model_type": "gpt_bigcode", "multi_query": False, "activation_function": "relu"}
    read = pk.Transformer.from_config(plain, dropout=0.0)
    assert (read.kv_heads, read.activation) == (12, "relu")
    plain = {"model_type": "gptj", "rotary_dim": None}
    assert pk.Transformer.from_config(plain).rotary_width == 0


def test_further_tokens_are_predicted() -> None:
    further = {**DEEPSEEK_V2_LITE, "num_nextn_predict_layers": 1}
    assert pk.Transformer.from_config(further, sequence=64).mtp_layers == 1
    assert pk.Transformer.from_config(DEEPSEEK_V2_LITE, sequence=64).mtp_layers == 0


def test_routers_of_groups_are_those_that_are_not_greedy() -> None:
    """transformers 5.24.0, DeepseekV2Config: `topk_method` is ``greedy`` where nobody says."""
    of_groups = {**DEEPSEEK_V2_LITE, "n_group": 8, "topk_group": 3}
    for method, groups in (("group_limited_greedy", (8, 3)), ("greedy", (0, 0)), (None, (0, 0))):
        config = {**of_groups, "topk_method": method}
        if method is None:
            del config["topk_method"]
        model = pk.Transformer.from_config(config, sequence=64)
        assert (model.expert_groups, model.top_groups) == groups


def test_opt_drops_no_embeddings() -> None:
    with pytest.raises(ValueError, match=r"dropout is 0.1, and .* drops nothing of embeddings"):
        pk.Transformer.from_config(OPT)
    read = pk.Transformer.from_config(OPT, dropout=0.0)
    assert (read.positions, read.padded_positions, read.sequence) == (2048, 2, 2048)
    assert (read.activation, read.joined, read.bias) == ("relu", "none", True)
    assert read.graphs()[0].parameters == 125_239_296


def test_what_scales_and_what_does_not() -> None:
    read = pk.Transformer.from_config(GRANITE, sequence=64)
    assert read.scaled_embeddings and read.scaled_branches and read.scaled_logits
    plain = {**GRANITE, "residual_multiplier": 1.0, "logits_scaling": 1}
    read = pk.Transformer.from_config(plain, sequence=64)
    assert not read.scaled_branches and not read.scaled_logits
    with pytest.raises(ValueError, match="residual_multiplier is None; it must be a number"):
        pk.Transformer.from_config({**GRANITE, "residual_multiplier": None})


def test_a_window_wider_than_the_positions_hides_nothing() -> None:
    long = {**PHI_4, "max_position_embeddings": 131072, "sliding_window": 262144}
    assert pk.Transformer.from_config(long, sequence=64).joined == "all"
    assert pk.Transformer.from_config(long, sequence=64).window == 0
    assert pk.Transformer.from_config({**PHI_4, "sliding_window": 2047}).window == 2047


def test_roberta_counts_positions_behind_the_token_that_pads() -> None:
    read = pk.Transformer.from_config(ROBERTA)
    assert (read.positions, read.padded_positions, read.token_types) == (512, 2, 1)
    for padding in (None, -1, 513, 0.5, "1"):
        with pytest.raises(ValueError, match=r"pad_token_id is .*whole number from 0, below"):
            pk.Transformer.from_config({**ROBERTA, "pad_token_id": padding})


def test_a_configuration_is_the_preset_of_the_same_model() -> None:
    read = pk.Transformer.from_config(
        LLAMA_3_8B, batch=16, sequence=8192, name="llama-3-8b", dtype="bf16"
    )
    assert read == pk.Transformer.preset("llama-3-8b", batch=16, dtype="bf16")
    large = {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48}
    read = pk.Transformer.from_config(large, name="gpt2-xl", dropout=0.0)
    assert read == pk.Transformer.gpt2("gpt2-xl")
    read = pk.Transformer.from_config(BERT, name="bert-base", inner=0)
    assert read == pk.Transformer.bert("bert-base", dropout=0.1)


def test_a_file_its_folder_and_its_dict_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    expected = pk.Transformer.from_config(LLAMA_3_8B)
    for path in (file, str(file), tmp_path, str(tmp_path), "~/config.json", "~"):
        assert pk.Transformer.from_config(path) == expected


def test_what_is_left_out_is_the_default_of_the_class() -> None:
    """Mistral 7B v0.1 is what MistralConfig is without any argument."""
    assert count({"model_type": "mistral", "sliding_window": None}) == 7_241_732_096
    assert pk.Transformer.from_config({"model_type": "mistral"}, sequence=64).window == 4096
    # Qwen3 has heads of 128 unless told, and so has no `head_dim` of its width over its heads
    read = pk.Transformer.from_config({"model_type": "qwen3", "hidden_size": 1024})
    assert (read.head_width, read.heads, read.hidden) == (128, 32, 1024)
    # heads of keys and values are as many as heads
    read = pk.Transformer.from_config({"model_type": "llama", "num_attention_heads": 16})
    assert read.kv_heads == 16


def test_fields_that_are_given_win() -> None:
    read = pk.Transformer.from_config(LLAMA_3_8B, layers=2, sequence=128, optimizer="sgd")
    assert (read.layers, read.sequence, read.optimizer) == (2, 128, "sgd")
    assert pk.Transformer.from_config(LLAMA_3_8B).sequence == 4096
    assert pk.Transformer.from_config(LLAMA_3_8B, positions=256).sequence == 256
    assert pk.Transformer.from_config(BERT).sequence == 128
    with pytest.raises(ValueError, match=r"argument is 'layer'; .*did you mean 'layers'"):
        pk.Transformer.from_config(LLAMA_3_8B, layer=2)


def test_dropout_is_one_share() -> None:
    assert pk.Transformer.from_config(GPT2).dropout == 0.1
    assert pk.Transformer.from_config(GPT2, dropout=0).dropout == 0
    unlike = {**GPT2, "embd_pdrop": 0.0}
    with pytest.raises(ValueError, match=r"resid_pdrop is 0.1 and embd_pdrop 0; .*give dropout="):
        pk.Transformer.from_config(unlike)
    assert pk.Transformer.from_config(unlike, dropout=0.1).dropout == 0.1
    # scores are dropped only where they are stored
    kept = {**GPT2, "attn_pdrop": 0.0}
    assert pk.Transformer.from_config(kept).dropout == 0.1
    with pytest.raises(ValueError, match=r"attn_pdrop is 0 and resid_pdrop 0.1"):
        pk.Transformer.from_config(kept, attention="eager")


#: What changes the work and cannot be said, and the words of the refusal.
REFUSED: list[tuple[Config, str]] = [
    ({**LLAMA_3_8B, "hidden_act": "gelu"}, 'hidden_act is \'gelu\'; .*"silu" or "swish"'),
    ({**LLAMA_3_8B, "attention_bias": "yes"}, "attention_bias is 'yes'; .*true or false"),
    (
        {**LLAMA_3_8B, "attention_dropout": 0.1},
        r"attention_dropout is 0.1, of scores .*pk\.capture",
    ),
    ({**LLAMA_3_8B, "rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters is"),
    (
        {
            **LLAMA_3_8B,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.5},
                "sliding_attention": {"partial_rotary_factor": 1.0},
            },
        },
        "rope_parameters is .*of all layers; for anything else",
    ),
    (
        {
            **PYTHIA,
            "rotary_pct": None,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 10000.0},
            },
        },
        "rope_parameters is .*one partial_rotary_factor of all layers",
    ),
    ({**LLAMA_3_8B, "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; .*factor 1;"),
    ({**LLAMA_3_8B, "quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
    ({**LLAMA_3_8B, "pruned_heads": {"1": [2]}}, r"pruned_heads is \{'1': \[2\]\}"),
    ({**LLAMA_3_8B, "new_attention": 4}, "'new_attention' is 4, a key that perfkit does not know"),
    ({**LLAMA_3_8B, "sliding_window": 4096}, "'sliding_window' is 4096, a key .* does not know"),
    ({**MIXTRAL, "router_jitter_noise": 0.01}, "router_jitter_noise is 0.01; .*0 or null"),
    ({**MIXTRAL, "output_router_logits": True}, "output_router_logits is True; .*say false"),
    ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step is 2; .*say 1"),
    ({**QWEN3_MOE, "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window is True"),
    ({**QWEN3_MOE, "layer_types": ["sliding_attention"]}, "layer_types is"),
    ({**GPT2, "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
    ({**GPT2, "add_cross_attention": True}, "add_cross_attention is True"),
    ({**BERT, "hidden_act": "relu"}, 'hidden_act is .relu.; .*say "gelu"'),
    ({**BERT, "is_decoder": True}, "is_decoder is True; .*say false"),
    ({**BERT, "gradient_checkpointing": True}, "gradient_checkpointing is True"),
    ({**BERT, "architectures": ["BertForSequenceClassification"]}, "BertForMaskedLM"),
    ({**LLAMA_3_8B, "architectures": ["LlamaModel"]}, "a Transformer is LlamaForCausalLM"),
    ({"model_type": "deit", "architectures": ["DeiTForImageClassification"]}, "DeiTForImageClass"),
    (
        {"model_type": "t5", "is_encoder_decoder": True},
        "model_type is 't5', an encoder with a decoder",
    ),
    ({"model_type": "deepspeech"}, "model_type is 'deepspeech'; known are llama"),
    ({"model_type": "lama"}, "did you mean 'llama'"),
    ({"model_type": "gemma3", "text_config": {}}, "give the dict of text_config"),
    ({"hidden_size": 64}, "config has no model_type"),
    ({**DEEPSEEK_V2_LITE, "moe_layer_freq": 2}, "moe_layer_freq is 2; .*say 1"),
    ({**DEEPSEEK_V2_LITE, "first_k_dense_replace": 27}, "first_k_dense_replace is 27; .*pk.cap"),
    ({**DEEPSEEK_V2_LITE, "topk_group": 2}, "topk_group is 2; .*at most n_group, 1"),
    ({**GEMMA, "hidden_activation": "quick_gelu"}, "hidden_activation is 'quick_gelu'"),
    ({**GEMMA, "hidden_activation": None, "hidden_act": None}, "hidden_act is None"),
    ({**OPT, "word_embed_proj_dim": 512}, "word_embed_proj_dim is 512; .*null, or hidden_size"),
    ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before is False; .*say true"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_a_transformer_cannot_say_is_refused_by_name(config: Config, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        pk.Transformer.from_config(config)
    said = str(refusal.value)
    assert "\n" not in said
    assert re.search(
        r"pk\.capture|dict of text_config|config\.json|did you mean|true or false", said
    )


def test_values_that_change_nothing_pass() -> None:
    expected = pk.Transformer.from_config(LLAMA_3_8B)
    neutral = {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 1.0},
        "pruned_heads": {},
        "chunk_size_feed_forward": 0,
        "head_dim": 128,
        "mlp_bias": False,
        "attention_dropout": 0,
        "quantization_config": {"quant_method": "fp8"},
    }
    for key, value in neutral.items():
        assert pk.Transformer.from_config({**LLAMA_3_8B, key: value}) == expected, key


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA_3_8B, "hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({**LLAMA_3_8B, "vocab_size": None}, "vocab_size is None"),
        ({**LLAMA_3_8B, "num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({**LLAMA_3_8B, "hidden_size": True}, "hidden_size is True"),
        ({**LLAMA_3_8B, "hidden_size": float("nan")}, "hidden_size is nan"),
        ({**LLAMA_3_8B, "tie_word_embeddings": 1}, "tie_word_embeddings is 1; .*true or false"),
        ({**LLAMA_3_8B, "rope_scaling": 2}, "rope_scaling is 2; it must be an object"),
        ({**LLAMA_3_8B, "architectures": "Llama"}, "architectures is 'Llama'; it must be a list"),
        ({**LLAMA_3_8B, "architectures": [3]}, r"architectures is \[3\]"),
        ({**LLAMA_3_8B, "torch_dtype": object()}, "torch_dtype is .*which no JSON holds"),
        ({**LLAMA_3_8B, 3: 4}, "3 is 4, a key that perfkit does not know"),
        ({**DEEPSEEK_V2_LITE, "q_lora_rank": False}, "q_lora_rank is False; it must be a whole"),
        ({**DEEPSEEK_V2_LITE, "q_lora_rank": ""}, "q_lora_rank is ''; it must be a whole number"),
        ({**LLAMA_3_8B, "num_key_value_heads": 5}, "kv_heads is 5; it must divide heads"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        (b"{}", "config is b'{}'; it must be the path"),
        (None, "config is None; it must be the path"),
        ("", "config is ''; it is empty"),
    ],
)
def test_nonsense_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pk.Transformer.from_config(config)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for text, words in {
        "": "it is empty",
        "{": "cannot be read: .*name the config.json of a model",
        "[1]": r"it holds \[1\], not an object",
        "<!DOCTYPE html><html>": "a web page",
        '{"a": ' * 40 + "1" + "}" * 40: "levels",
        "[" * 100_000: "cannot be read",
    }.items():
        file = tmp_path / "config.json"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            pk.Transformer.from_config(file)
    with pytest.raises(ValueError, match="No such file"):
        pk.Transformer.from_config(tmp_path / "none")


class Dumps:
    """As the configuration of a loaded model."""

    def to_dict(self) -> Config:
        return LLAMA_3_8B


def test_a_configuration_object_is_told_its_dict() -> None:
    with pytest.raises(ValueError, match=r"'Dumps', an object; give its to_dict\(\)"):
        pk.Transformer.from_config(Dumps())  # type: ignore[arg-type]
    assert pk.Transformer.from_config(Dumps().to_dict()).layers == 32


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_each_key_of_a_type_has_one_meaning(name: str) -> None:
    kind = MODEL_TYPES[name]
    read = kind.list_read_keys()
    assert len(read) == len({*read}), "a key is read twice"
    assert not {*read} & {*kind.ignored}
    assert not {*kind.ignored} & {*IGNORED}
    assert {*kind.defaults} <= {*read, "tie_word_embeddings"}, "a default that nothing reads"
    assert "tie_word_embeddings" in kind.defaults
    missing = {*kind.sizes} - {*kind.defaults}
    assert not missing, "sizes have defaults"
    assert read_hub_config({"model_type": name, **NEUTRAL.get(name, {})}, {}).model_type == name


#: What each type needs beside its defaults to be one that a Transformer can say.
NEUTRAL: dict[str, Config] = {
    "mistral": {"sliding_window": None},
    "opt": {"dropout": 0.0},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v3": {"num_mtp_layers": 0},
    "kimi_k2": {"num_mtp_layers": 0},
}
