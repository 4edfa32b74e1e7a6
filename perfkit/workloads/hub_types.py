"""Types of models as the transformers library writes them into `config.json`: what each key means
for a `Transformer`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perfkit.workloads.hub_parts import (
    ALL_BIASES,
    ATTENTION_BIASES,
    BIASES,
    CAPS,
    DEEPSEEK_EXPERTS,
    DROPPED_SCORES,
    EXPERTS_EVERYWHERE,
    FALCON,
    FURTHER_TOKENS,
    HEAD_WIDTH,
    HEADS,
    IMAGES,
    INNER,
    LATENT_ATTENTION,
    LAYER_TYPES,
    OPT,
    PARALLEL_RESIDUAL,
    QUERIES,
    QUERY_BIASES,
    ROBERTA_POSITIONS,
    ROTATED_WIDTH,
    ROTATION,
    SCALES,
    SHARED_EXPERT,
    WINDOW,
    Part,
    make_activation,
    make_dropout,
    make_part_rotation,
    make_windows,
)
from perfkit.workloads.images import CHANNELS


@dataclass(frozen=True)
class ModelType:
    """What a `Transformer` makes of the configurations of one ``model_type``.

    A key is read (`sizes`, `parts`), must have one of some values (`allowed`), or changes nothing
    that is priced (`ignored`, and `IGNORED` of all types). Each other key is unknown, and refused.

    Parameters
    ----------
    architecture : str
        The class of the transformers library that the builder records.
    source : str
        The class of that library whose defaults these are.
    sizes : mapping of str to str
        Keys that are sizes, and the field of each.
    defaults : mapping of str to value
        What a key that changes the work is where a file leaves it out. A key of `allowed` that is not
        here has an allowed value then, and any other one is null.
    fields : mapping of str to value
        Fields of a `Transformer` that published models of this type have; what parts read replaces
        them.
    parts : tuple of Part
        Keys that are understood together.
    allowed : mapping of str to tuple
        Keys that change the work, and the values that the builder says.
    ignored : tuple of str
        Keys that change nothing that is priced.
    causal : bool
        See `Transformer`.
    aliases : tuple of str
        Further names of the architecture, which are the same program.
    """

    architecture: str
    source: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    fields: Mapping[str, Any]
    parts: tuple[Part, ...] = ()
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    causal: bool = True
    aliases: tuple[str, ...] = ()

    def list_read_keys(self) -> list[str]:
        """The keys of this type that change the work."""
        keys = [*self.sizes, *self.allowed]
        for part in self.parts:
            keys.extend(part.keys)
        return keys


#: Keys that change nothing that is priced, whatever the type: names, numbers of tokens, labels of
#: classifiers, how text is generated, how weights are stored and drawn.
IGNORED = (
    *("model_type", "_name_or_path", "name_or_path", "architectures", "auto_map"),
    *("transformers_version", "_commit_hash", "attn_implementation", "_attn_implementation"),
    *("_attn_implementation_autoset", "torch_dtype", "dtype", "use_bfloat16", "torchscript"),
    *("tf_legacy_loss", "tokenizer_class", "prefix", "task_specific_params", "finetuning_task"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"),
    *("initializer_range", "use_cache", "is_decoder"),
    *("return_dict", "output_hidden_states", "output_attentions", "output_scores"),
    *("return_dict_in_generate", "max_length", "min_length", "do_sample", "early_stopping"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
)
#: Keys of every type that change the work, and the values that change nothing.
ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "per_layer_config": (None, {}),
    "gradient_checkpointing": (False,),
}

_SIZES = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "positions",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "inner",
}
_GPT_SIZES = {
    "vocab_size": "vocabulary",
    "n_positions": "positions",
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
}
#: RMS norms, rotated queries and keys, and products gated by SiLU.
_LLAMA = {"norm": "rms", "rotary": True, "gated": True, "bias": False}
_SILU = {"hidden_act": ("silu", "swish")}
_ANGLES = ("rope_theta", "rms_norm_eps", "original_max_position_embeddings")
_ROUTER = ("router_aux_loss_coef", "norm_topk_prob")
#: Noise and a loss of the router would be kernels of their own.
_ROUTED = {"router_jitter_noise": (0, None), "output_router_logits": (False,)}

#: As of Llama, with scaled embeddings, and a gate by GELU.
_GEMMA = {**_LLAMA, "scaled_embeddings": True, "activation": "gelu_tanh"}
_GEMMA_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
#: Settings of a head of GPT-2 that sums sequences up, which no language model has.
_SUMMARY = (
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
)
_BERT_DROPOUT = make_dropout("hidden_dropout_prob", scores="attention_probs_dropout_prob")
_BERT_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
}
_ROBERTA = ModelType(
    architecture="RobertaForMaskedLM",
    source="transformers 5.24.0, RobertaConfig",
    sizes={
        "vocab_size": "vocabulary",
        "num_hidden_layers": "layers",
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "intermediate_size": "inner",
        "type_vocab_size": "token_types",
    },
    fields={"token_types": 1, "padded_positions": 2},
    parts=(ROBERTA_POSITIONS, _BERT_DROPOUT),
    allowed=_BERT_ALLOWED,
    ignored=("layer_norm_eps",),
    defaults={
        "vocab_size": 50265,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "type_vocab_size": 2,
        "pad_token_id": 1,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "tie_word_embeddings": True,
    },
    causal=False,
)
_DEEPSEEK_V3 = ModelType(
    architecture="DeepseekV3ForCausalLM",
    source="transformers 5.24.0, DeepseekV3Config",
    sizes=_SIZES,
    fields=_LLAMA,
    parts=(LATENT_ATTENTION, DEEPSEEK_EXPERTS, FURTHER_TOKENS, ROTATION, DROPPED_SCORES),
    allowed={
        **_SILU,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
        "output_router_logits": (False,),
    },
    # How a router picks experts is arithmetic on a number for each token and expert, priced as a softmax.
    # Latent attention has no heads of keys, and parts of heads of its own.
    ignored=(
        *_ANGLES,
        *_ROUTER,
        *("scoring_func", "routed_scaling_factor"),
        *("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "rope_interleave"),
        *("num_key_value_heads", "head_dim"),
    ),
    defaults={
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "num_mtp_layers": 1,
        "tie_word_embeddings": False,
    },
)
#: Types by ``model_type``. Defaults are those of version 5.24.0 of the transformers library.
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType(
        architecture="LlamaForCausalLM",
        source="transformers 5.24.0, LlamaConfig",
        sizes=_SIZES,
        fields=_LLAMA,
        parts=(HEADS, HEAD_WIDTH, BIASES, ROTATION, DROPPED_SCORES),
        allowed=_SILU,
        ignored=(*_ANGLES, "pretraining_tp"),
        defaults={
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": ModelType(
        architecture="MistralForCausalLM",
        source="transformers 5.24.0, MistralConfig",
        sizes=_SIZES,
        fields=_LLAMA,
        parts=(HEADS, HEAD_WIDTH, WINDOW, ROTATION, DROPPED_SCORES),
        allowed=_SILU,
        ignored=_ANGLES,
        defaults={
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ModelType(
        architecture="MixtralForCausalLM",
        source="transformers 5.24.0, MixtralConfig",
        sizes={**_SIZES, "num_local_experts": "experts", "num_experts_per_tok": "top_k"},
        fields=_LLAMA,
        parts=(HEADS, HEAD_WIDTH, WINDOW, ROTATION, DROPPED_SCORES),
        allowed={**_SILU, **_ROUTED},
        ignored=(*_ANGLES, *_ROUTER),
        defaults={
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": ModelType(
        architecture="Qwen3ForCausalLM",
        source="transformers 5.24.0, Qwen3Config",
        sizes=_SIZES,
        fields={**_LLAMA, "qk_norm": True},
        parts=(HEADS, HEAD_WIDTH, LAYER_TYPES, ROTATION, DROPPED_SCORES),
        allowed={**_SILU, "attention_bias": (False,), "use_sliding_window": (False,)},
        ignored=(*_ANGLES, "sliding_window", "max_window_layers"),
        defaults={
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "intermediate_size": 22016,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_moe": ModelType(
        architecture="Qwen3MoeForCausalLM",
        source="transformers 5.24.0, Qwen3MoeConfig",
        sizes={
            "vocab_size": "vocabulary",
            "max_position_embeddings": "positions",
            "num_hidden_layers": "layers",
            "hidden_size": "hidden",
            "num_attention_heads": "heads",
            "moe_intermediate_size": "inner",
            "num_experts": "experts",
            "num_experts_per_tok": "top_k",
        },
        fields={**_LLAMA, "qk_norm": True},
        parts=(HEADS, HEAD_WIDTH, LAYER_TYPES, EXPERTS_EVERYWHERE, ROTATION, DROPPED_SCORES),
        allowed={
            **_SILU,
            **_ROUTED,
            "attention_bias": (False,),
            "use_sliding_window": (False,),
        },
        # the width of MLPs in layers without experts, of which there are none
        ignored=(
            *_ANGLES,
            *_ROUTER,
            *("intermediate_size", "sliding_window", "max_window_layers"),
        ),
        defaults={
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": ModelType(
        architecture="GPT2LMHeadModel",
        source="transformers 5.24.0, GPT2Config",
        sizes=_GPT_SIZES,
        fields={},
        parts=(INNER, make_dropout("resid_pdrop", "embd_pdrop", scores="attn_pdrop")),
        allowed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
        },
        ignored=(
            *("n_ctx", "layer_norm_epsilon"),
            *_SUMMARY,
        ),
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ModelType(
        architecture="Phi3ForCausalLM",
        source="transformers 5.24.0, Phi3Config",
        sizes=_SIZES,
        fields={**_LLAMA, "joined": "all"},
        parts=(
            HEADS,
            WINDOW,
            ROTATION,
            make_dropout("resid_pdrop", "embd_pdrop", scores="attention_dropout"),
        ),
        allowed={**_SILU, "attention_bias": (False,)},
        ignored=_ANGLES,
        defaults={
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "num_hidden_layers": 32,
            "hidden_size": 3072,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": ModelType(
        architecture="GemmaForCausalLM",
        source="transformers 5.24.0, GemmaConfig",
        sizes=_SIZES,
        fields=_GEMMA,
        parts=(
            HEADS,
            HEAD_WIDTH,
            ROTATION,
            DROPPED_SCORES,
            make_activation("hidden_activation", "hidden_act"),
        ),
        allowed=_GEMMA_ALLOWED,
        ignored=_ANGLES,
        defaults={
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "num_hidden_layers": 28,
            "hidden_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "intermediate_size": 24576,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "granite": ModelType(
        architecture="GraniteForCausalLM",
        source="transformers 5.24.0, GraniteConfig",
        sizes=_SIZES,
        fields={
            **_LLAMA,
            "scaled_embeddings": True,
            "scaled_branches": True,
            "scaled_logits": True,
        },
        parts=(HEADS, BIASES, SCALES, ROTATION, DROPPED_SCORES),
        allowed=_SILU,
        # the kernel of attention takes any scale
        ignored=(*_ANGLES, "attention_multiplier"),
        defaults={
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "tie_word_embeddings": False,
        },
    ),
    "olmo": ModelType(
        architecture="OlmoForCausalLM",
        source="transformers 5.24.0, OlmoConfig",
        sizes=_SIZES,
        fields={**_LLAMA, "norm": "layer_plain"},
        parts=(HEADS, ROTATION, DROPPED_SCORES),
        allowed={**_SILU, "attention_bias": (False,), "clip_qkv": (None,)},
        ignored=("rope_theta",),
        defaults={
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "tie_word_embeddings": False,
        },
    ),
    "opt": ModelType(
        architecture="OPTForCausalLM",
        source="transformers 5.24.0, OPTConfig",
        sizes={
            "vocab_size": "vocabulary",
            "num_hidden_layers": "layers",
            "hidden_size": "hidden",
            "num_attention_heads": "heads",
            "ffn_dim": "inner",
        },
        fields={"joined": "none", "activation": "relu", "padded_positions": 2},
        parts=(
            OPT,
            make_activation("activation_function"),
            make_dropout("dropout", scores="attention_dropout", drops_embeddings=False),
        ),
        allowed={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "layerdrop": (0,),
        },
        # an older name of the share of dropped activations, which the library has no more
        ignored=("init_std", "activation_dropout"),
        defaults={
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "enable_bias": True,
            "activation_function": "relu",
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_bigcode": ModelType(
        architecture="GPTBigCodeForCausalLM",
        source="transformers 5.24.0, GPTBigCodeConfig",
        sizes=_GPT_SIZES,
        fields={"joined": "attention", "activation": "gelu", "kv_heads": 1},
        parts=(
            INNER,
            QUERIES,
            make_activation("activation_function"),
            make_dropout("resid_pdrop", "embd_pdrop", scores="attn_pdrop"),
        ),
        allowed={"scale_attn_weights": (True,)},
        # numbers of scores that are stored, and settings of a program for inference
        ignored=(
            *("layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
            *("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length"),
            *("pre_allocate_kv_cache", "validate_runner_input"),
            *_SUMMARY,
        ),
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "multi_query": True,
            "activation_function": "gelu_pytorch_tanh",
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        source="transformers 5.24.0, DeepseekV2Config",
        defaults={
            "vocab_size": 102400,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    # https://huggingface.co/moonshotai/Kimi-K2-Base: it is the same class
    "kimi_k2": _DEEPSEEK_V3,
    "qwen2": ModelType(
        architecture="Qwen2ForCausalLM",
        source="transformers 5.24.0, Qwen2Config",
        sizes=_SIZES,
        fields={**_LLAMA, "qkv_bias": True},
        parts=(HEADS, LAYER_TYPES, ROTATION, DROPPED_SCORES),
        allowed={**_SILU, "use_sliding_window": (False,)},
        ignored=(*_ANGLES, "sliding_window", "max_window_layers", "use_mrope"),
        defaults={
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 22016,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_moe": ModelType(
        architecture="Qwen2MoeForCausalLM",
        source="transformers 5.24.0, Qwen2MoeConfig",
        sizes=_SIZES,
        fields={**_LLAMA, "qkv_bias": True, "shared_experts": 1, "shared_gate": True},
        parts=(
            *(HEADS, LAYER_TYPES, ROTATION, DROPPED_SCORES),
            *(SHARED_EXPERT, EXPERTS_EVERYWHERE, QUERY_BIASES),
        ),
        allowed={**_SILU, **_ROUTED, "use_sliding_window": (False,)},
        ignored=(*_ANGLES, *_ROUTER, "sliding_window", "max_window_layers"),
        defaults={
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
            "qkv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": ModelType(
        architecture="Gemma2ForCausalLM",
        source="transformers 5.24.0, Gemma2Config",
        sizes=_SIZES,
        fields={
            **_GEMMA,
            "norm_place": "both",
            "score_cap": True,
            "logit_cap": True,
            "attention": "eager",
        },
        parts=(
            *(HEADS, HEAD_WIDTH, ROTATION, DROPPED_SCORES, make_windows(2), CAPS),
            make_activation("hidden_act", "hidden_activation"),
        ),
        allowed=_GEMMA_ALLOWED,
        ignored=(*_ANGLES, "query_pre_attn_scalar", "cache_implementation"),
        defaults={
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "num_hidden_layers": 26,
            "hidden_size": 2304,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": ModelType(
        architecture="Gemma3ForCausalLM",
        source="transformers 5.24.0, Gemma3TextConfig",
        sizes=_SIZES,
        fields={**_GEMMA, "norm_place": "both", "qk_norm": True},
        parts=(
            *(HEADS, HEAD_WIDTH, ROTATION, DROPPED_SCORES, CAPS),
            make_windows(6, "sliding_window_pattern", "_sliding_window_pattern"),
            make_activation("hidden_activation"),
        ),
        allowed=_GEMMA_ALLOWED,
        ignored=(
            *_ANGLES,
            *("query_pre_attn_scalar", "cache_implementation", "rope_local_base_freq"),
        ),
        defaults={
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 26,
            "hidden_size": 2304,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": ModelType(
        architecture="GptOssForCausalLM",
        source="transformers 5.24.0, GptOssConfig",
        sizes={**_SIZES, "num_local_experts": "experts", "num_experts_per_tok": "top_k"},
        fields={
            **_LLAMA,
            "sinks": True,
            "expert_bias": True,
            "qkv_bias": True,
            "output_bias": True,
        },
        parts=(
            *(HEADS, HEAD_WIDTH, ROTATION, DROPPED_SCORES),
            *(make_windows(2), ATTENTION_BIASES),
        ),
        allowed={**_SILU, **_ROUTED},
        # the activation is one kernel, whatever its constants
        ignored=(
            *_ANGLES,
            *_ROUTER,
            *("swiglu_limit", "swiglu_alpha", "experts_per_token", "initial_context_length"),
        ),
        defaults={
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ModelType(
        architecture="Olmo2ForCausalLM",
        source="transformers 5.24.0, Olmo2Config",
        sizes=_SIZES,
        fields={**_LLAMA, "norm_place": "after", "qk_norm": True, "qk_norm_of": "all"},
        parts=(HEADS, ROTATION, DROPPED_SCORES),
        allowed={**_SILU, "attention_bias": (False,)},
        ignored=_ANGLES,
        defaults={
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "tie_word_embeddings": False,
        },
    ),
    "starcoder2": ModelType(
        architecture="Starcoder2ForCausalLM",
        source="transformers 5.24.0, Starcoder2Config",
        sizes=_SIZES,
        fields={"rotary": True, "joined": "none"},
        parts=(
            *(HEADS, ROTATION, WINDOW, ALL_BIASES, make_activation("hidden_act")),
            make_dropout("residual_dropout", "embedding_dropout", scores="attention_dropout"),
        ),
        allowed={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
        ignored=(*_ANGLES, "norm_epsilon", "layer_norm_epsilon"),
        defaults={
            "vocab_size": 49152,
            "max_position_embeddings": 4096,
            "num_hidden_layers": 30,
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "intermediate_size": 12288,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox": ModelType(
        architecture="GPTNeoXForCausalLM",
        source="transformers 5.24.0, GPTNeoXConfig",
        sizes=_SIZES,
        fields={
            "rotary": True,
            "joined": "attention",
            "activation": "gelu",
            "parallel_mlp": True,
            "parallel_norms": 2,
        },
        parts=(
            *(PARALLEL_RESIDUAL, make_activation("hidden_act")),
            make_part_rotation("rotary_pct", 0.25),
            make_dropout("hidden_dropout", scores="attention_dropout"),
        ),
        allowed={"attention_bias": (True,)},
        ignored=("rotary_emb_base", "rope_theta", "layer_norm_eps"),
        defaults={
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 44,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
        },
    ),
    "gptj": ModelType(
        architecture="GPTJForCausalLM",
        source="transformers 5.24.0, GPTJConfig",
        sizes=_GPT_SIZES,
        fields={
            "rotary": True,
            "joined": "none",
            "activation": "gelu_tanh",
            "head_bias": True,
            "parallel_mlp": True,
            "bias": False,
            "mlp_bias": True,
        },
        parts=(
            *(INNER, ROTATED_WIDTH, make_activation("activation_function")),
            make_dropout("resid_pdrop", "embd_pdrop", scores="attn_pdrop"),
        ),
        allowed={"scale_attn_weights": (True,), "rotary": (True,)},
        ignored=("n_ctx", "layer_norm_epsilon", *_SUMMARY),
        defaults={
            "vocab_size": 50400,
            "n_positions": 2048,
            "n_layer": 28,
            "n_embd": 4096,
            "n_head": 16,
            "rotary_dim": 64,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi": ModelType(
        architecture="PhiForCausalLM",
        source="transformers 5.24.0, PhiConfig",
        sizes=_SIZES,
        fields={
            "rotary": True,
            "joined": "none",
            "activation": "gelu_tanh",
            "head_bias": True,
            "parallel_mlp": True,
        },
        parts=(
            *(HEADS, make_activation("hidden_act")),
            make_part_rotation("partial_rotary_factor", 0.5),
            make_dropout("resid_pdrop", "embd_pdrop", scores="attention_dropout"),
        ),
        allowed={"qk_layernorm": (False,)},
        ignored=("rope_theta", "layer_norm_eps"),
        defaults={
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "hidden_act": "gelu_new",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ModelType(
        architecture="FalconForCausalLM",
        source="transformers 5.24.0, FalconConfig",
        sizes={
            "vocab_size": "vocabulary",
            "max_position_embeddings": "positions",
            "num_hidden_layers": "layers",
            "hidden_size": "hidden",
            "num_attention_heads": "heads",
        },
        fields={
            "rotary": True,
            "joined": "attention",
            "activation": "gelu",
            "parallel_mlp": True,
            "bias": False,
        },
        parts=(
            *(FALCON, ROTATION, make_activation("activation")),
            make_dropout("hidden_dropout", scores="attention_dropout"),
        ),
        allowed={
            "alibi": (False,),
            "apply_residual_connection_post_layernorm": (False,),
        },
        ignored=("rope_theta", "layer_norm_epsilon"),
        defaults={
            "vocab_size": 65024,
            "max_position_embeddings": 2048,
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "activation": "gelu",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(
        _ROBERTA,
        architecture="XLMRobertaForMaskedLM",
        source="transformers 5.24.0, XLMRobertaConfig",
        defaults={**_ROBERTA.defaults, "vocab_size": 30522},
    ),
    "bert": ModelType(
        architecture="BertForMaskedLM",
        source="transformers 5.24.0, BertConfig",
        sizes={**_SIZES, "type_vocab_size": "token_types"},
        fields={},
        parts=(_BERT_DROPOUT,),
        allowed=_BERT_ALLOWED,
        ignored=("layer_norm_eps",),
        defaults={
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "type_vocab_size": 2,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "tie_word_embeddings": True,
        },
        causal=False,
    ),
    "vit": ModelType(
        architecture="ViTForImageClassification",
        source="transformers 5.24.0, ViTConfig",
        sizes={
            "num_hidden_layers": "layers",
            "hidden_size": "hidden",
            "num_attention_heads": "heads",
            "intermediate_size": "inner",
        },
        fields={"vocabulary": 0, "activation": "gelu", "qkv_bias": True},
        parts=(IMAGES, QUERY_BIASES, _BERT_DROPOUT, make_activation("hidden_act")),
        allowed={"num_channels": (CHANNELS,)},
        # masks of images and a pooler are those of other heads
        ignored=("layer_norm_eps", "encoder_stride", "pooler_output_size", "pooler_act"),
        defaults={
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "qkv_bias": True,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "tie_word_embeddings": False,
        },
        causal=False,
    ),
}
