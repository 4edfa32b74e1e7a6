"""What a training log states of its run before the first step: arguments of Megatron-LM and of
software on it, lines of torchtitan, parameters of MaxText.

`find_facts` finds them by the names that the log uses; `perfkit.readers.training_models` says what
they mean for a `Transformer` and a `Strategy`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from perfkit.ground.units import show

#: Arguments of Megatron-LM (megatron/training/arguments.py, of 2020 to 2026) and of NeMo's models that
#: say something of the model.
_OF_MODEL = (
    "num_layers",
    "encoder_num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "max_position_embeddings",
    "seq_length",
    "encoder_seq_length",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "position_embedding_type",
    "use_rotary_position_embeddings",
    "add_position_embedding",
    "normalization",
    "swiglu",
    "gated_linear_unit",
    "squared_relu",
    "openai_gelu",
    "activation",
    "untie_embeddings_and_output_weights",
    "share_embeddings_and_output_weights",
    "add_bias_linear",
    "bias",
    "add_qkv_bias",
    "qk_layernorm",
    "hidden_dropout",
    "attention_dropout",
    "rotary_percent",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_experts",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_permute_fusion",
    "mtp_num_layers",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "window_size",
)
#: The same of batch, number formats and optimizer.
_OF_STEP = (
    "global_batch_size",
    "micro_batch_size",
    "bf16",
    "fp16",
    "params_dtype",
    "fp8",
    "fp8_format",
    "fp8_recipe",
    "fp4",
    "precision",
    "optimizer",
    "rampup_batch_size",
    "accumulate_allreduce_grads_in_fp32",
    "gradient_accumulation_fusion",
)
#: The same of strategy and software.
_OF_STRATEGY = (
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size",
    "cp_comm_type",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "use_torch_fsdp2",
    "use_custom_fsdp",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "tp_comm_overlap",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "checkpoint_activations",
    "activations_checkpoint_method",
    "checkpoint_num_layers",
    "activations_checkpoint_num_layers",
    "activations_checkpoint_granularity",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "cpu_offloading",
    "moe_token_dispatcher_type",
    "moe_enable_deepep",
    "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm",
    "transformer_impl",
    "use_flash_attn",
    "enable_cuda_graph",
    "cuda_graph_impl",
    "devices",
    "num_nodes",
    "zero_stage",
    "deepspeed",
)
#: Parameters of MaxText (configs/base.yml).
_OF_MAXTEXT = (
    "num_decoder_layers",
    "emb_dim",
    "base_emb_dim",
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "max_target_length",
    "per_device_batch_size",
    "remat_policy",
    "global_batch_size_to_train_on",
    "logits_via_embedding",
    "mlp_activations",
    "quantization",
    "num_experts_per_tok",
    "num_slices",
    "gradient_accumulation_steps",
    "opt_type",
    "ici_data_parallelism",
    "ici_fsdp_parallelism",
    "ici_tensor_parallelism",
    "ici_pipeline_parallelism",
    "ici_context_parallelism",
    "ici_expert_parallelism",
    "dcn_data_parallelism",
    "dcn_fsdp_parallelism",
    "dcn_pipeline_parallelism",
    "model_name",
)
#: All of them, the longest first: of two names at one place the longer one is meant.
_NAMES = sorted((*_OF_MODEL, *_OF_STEP, *_OF_STRATEGY, *_OF_MAXTEXT), key=len, reverse=True)
_KNOWN = "|".join(_NAMES)
#: `name ..... value` of Megatron-LM and `Config param name: value` of MaxText; `name: value` of YAML,
#: JSON and loggers.
_ARGUMENT = re.compile(
    rf"(?P<param>Config param )?(?<![\w.])[\"']?(?P<name>{_KNOWN})[\"']?[ \t]*(?P<sign>\.{{2,}}|[:=])[ \t]*"
    r"(?P<value>\[[^\]\n]{0,300}\]|'[^'\n]{0,200}'|\"[^\"\n]{0,200}\"|[^\s,|)}\]]{1,200})"
)
#: Lists of YAML, an entry a line.
_LIST = re.compile(
    r"(?<![\w.])(recompute_modules|moe_layer_freq|cp_comm_type):[ \t]*\n"
    r"((?:[ \t]*- [^\n]{1,80}\n){1,500})"
)
#: A value of Primus with a default, ``${NAME:4096}``; without one it says nothing.
_PLACEHOLDER = re.compile(r"\$\{[^:}]*(?::([^}]*))?\}?")
#: Megatron-LM, theoretical_memory_usage.py, [10^9].
_BILLIONS = re.compile(r"Total number of parameters in billions: (\d[\d.]{0,12})")
_ACTIVATION = re.compile(r"activation_func:\s*\n(?:[^\n]*\n)?[^\n]*_target_: [\w.]*\.(\w+)")
_VOCABULARY = re.compile(
    r"padded vocab \(size: (\d{1,9})\) with \d+ dummy tokens \(new size: (\d{1,9})\)"
)
#: NeMo: ``Padded vocab_size: 50304, original vocab_size: 50257``.
_VOCABULARY_OF_NEMO = re.compile(r"original vocab_size: (\d{1,9})")
_WORLD = re.compile(r"using world size: (\d{1,7})")
#: Primus puts rank and number of ranks before each line.
_WORLD_OF_PRIMUS = re.compile(r"\[rank-\d+/(\d{1,7})\]")
_PROGRAM = re.compile(r"pretrain_(bert|t5|mamba|vlm|vision\w*|ict|retro|multimodal)\.py")
#: Lightning: ``initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8``.
_WORLD_OF_LIGHTNING = re.compile(r"GLOBAL_RANK: \d+, MEMBER: \d+/(\d{1,7})")
_PEAK = re.compile(
    r"memory \(MB\) \|[^\n]{0,200}?max allocated: ([\d.]{1,20})[^\n]{0,80}?max reserved: ([\d.]{1,20})"
)
#: torchtitan, of 2024 and since.
_MESH = re.compile(r"Building \d-D device mesh with \[([^\]\n]{0,200})\], \[([\d, ]{1,100})\]")
_DEGREES = re.compile(r"Building device mesh with parallelism: ([^\n]{0,200})")
_DEGREE = re.compile(r"(\w+)=(\d{1,7})")
_TRAINER = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9})[^\n]{0,60}?, sequence length (\d{1,9})"
)
_BUILT = re.compile(
    r"Building (?!device mesh )(\S{1,60}) (\S{1,60}) with (?:\w+\()?([^\n]{0,3000})"
)
_FLAVOUR = re.compile(
    r"Model (\S{1,60}) (\S{1,60}) (?:\[\d+m)?size: ([\d,]{1,30}) total parameters"
)
_MODEL_VALUE = re.compile(r"[\"']?(\w{2,40})[\"']?[=:] ?([^\s,()}{\]]{1,40})")
_APPLIED = re.compile(
    r"Applied (\w+) activation checkpointing|Applied (FSDP|HSDP|DDP|fully_shard|CPU Offloading)"
    r"|(Compiling each TransformerBlock)|(Float8)[^\n]{0,60}(?:active|training|[Ll]inear)"
)
_ARGS_OF_TITAN = re.compile(r"Running with (?:args|configs?): (\{.*)")
#: NeMo's optimizers whose states replicas share.
_SHARDED_STATES = re.compile(r"\b(distributed_fused_adam|mcore_distributed_optim)\b")
_DEVICE = re.compile(r"(?:CUDA|HIP|ROCm) capacity: ([^\n]{3,80}?) with [\d.]+ ?GiB memory")


class TrainingFacts(NamedTuple):
    """What a log states of its run.

    Parameters
    ----------
    stated : dict of str to value
        By the names that the log uses; numbers, truth values and texts.
    notes : tuple of str
        What the log states twice and differently.
    """

    stated: dict[str, Any]
    notes: tuple[str, ...]


def find_facts(text: str, dialect: str) -> TrainingFacts:
    """Find what a log states of its run.

    Parameters
    ----------
    text : str
        The log up to its first step.
    dialect : str
        The software that prints its steps.

    Returns
    -------
    facts : TrainingFacts
        What it states; nothing where it is silent.
    """
    stated: dict[str, Any] = {}
    notes: list[str] = []
    if dialect == "torchtitan":
        stated |= _find_titan(text)
    elif dialect != "nanogpt":
        stated |= _find_arguments(text, notes)
    for name, pattern in (
        ("world_size", _WORLD),
        ("world_size", _WORLD_OF_PRIMUS),
        ("world_size", _WORLD_OF_LIGHTNING),
        ("vocabulary", _VOCABULARY),
        ("vocabulary", _VOCABULARY_OF_NEMO),
        ("program", _PROGRAM),
        ("activation_func", _ACTIVATION),
        ("device", _DEVICE),
        ("distributed_optimizer", _SHARDED_STATES),
    ):
        match = pattern.search(text)
        if match and name not in stated:
            stated[name] = read_value(match[1])
    match = _BILLIONS.search(text)
    if match and match[1].count(".") < 2:
        stated["parameters"] = round(float(match[1]) * 1e9)
    return TrainingFacts(stated, tuple(notes))


def find_contradiction(text: str) -> str:
    """Find two runs of torchtitan in one text.

    Parameters
    ----------
    text : str
        The log.

    Returns
    -------
    said : str
        What two starts state differently; empty where there is nothing.
    """
    for pattern in (_TRAINER, _DEGREES):
        first: str | None = None
        for match in pattern.finditer(text):
            stated = ", ".join(match.groups())
            if first is not None and stated != first:
                what = match[0].partition(": ")[0].partition(" size")[0]
                return f"{what} is {first} at first, and {stated} later"
            first = stated
    return ""


def find_peak_memory(text: str) -> float | None:
    """Find the most memory that Megatron-LM reports that a rank reserved.

    Parameters
    ----------
    text : str
        The log.

    Returns
    -------
    memory : float or None
        The largest of the reports [B].
    """
    reserved = [float(match[2]) for match in _PEAK.finditer(text) if match[2].count(".") < 2]
    return max(reserved) * 2.0**20 if reserved else None


def read_value(text: str) -> Any:
    """Read a printed value.

    Parameters
    ----------
    text : str
        As printed.

    Returns
    -------
    value : bool, int, float, str or None
        A number or truth value where it is one; None for what is not set.

    Examples
    --------
    >>> [read_value(text) for text in ("24", "1e-3", "True", "None", "['p2p']", "torch.bfloat16")]
    [24, 0.001, True, None, "['p2p']", 'bfloat16']
    """
    plain = text.strip().strip("'\"")
    placeholder = _PLACEHOLDER.fullmatch(plain)
    if placeholder:
        plain = placeholder[1] or ""
    if plain.lower() in ("none", "null", "~", ""):
        return None
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if len(plain) <= 25:
        with suppress(ValueError):
            return int(plain.replace(",", ""))
        with suppress(ValueError):
            number = float(plain)
            return number if abs(number) < 1e30 else plain
    return plain.removeprefix("torch.")


def _find_arguments(text: str, notes: list[str]) -> dict[str, Any]:
    """Arguments by name: those of a list of arguments, else the first ones."""
    listed: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for match in _ARGUMENT.finditer(text):
        name = match["name"]
        value = read_value(match["value"])
        if match["sign"].startswith("..") or match["param"]:
            listed[name] = value
        elif value is not None and name not in others:
            others[name] = value
        elif value is not None and others[name] != value and name not in listed:
            note = (
                f"{name} is {show(others[name])} and {show(value)} in the log; the first is taken"
            )
            if note not in notes:
                notes.append(note)
    for match in _LIST.finditer(text):
        others.setdefault(match[1], "[" + ", ".join(re.findall(r"- (\S+)", match[2])) + "]")
    stated = {name: value for name, value in others.items() if name not in listed}
    stated |= {name: value for name, value in listed.items() if value is not None}
    notes[:] = [note for note in notes if note.partition(" ")[0] not in listed]
    return stated


def _find_titan(text: str) -> dict[str, Any]:
    """What torchtitan logs of its run."""
    stated: dict[str, Any] = {}
    match = _ARGS_OF_TITAN.search(text)
    if match:
        with suppress(ValueError, RecursionError):
            arguments, _ = json.JSONDecoder().raw_decode(match[1][:100_000])
            stated |= dict(_flatten(arguments))
    match = _DEGREES.search(text)
    if match:
        stated |= {name: int(degree) for name, degree in _DEGREE.findall(match[1])}
    match = _MESH.search(text)
    if match:
        names = re.findall(r"\w+", match[1])
        degrees = [int(degree) for degree in re.findall(r"\d{1,7}", match[2])]
        stated |= dict(zip(names, degrees, strict=False))
    match = _BUILT.search(text)
    if match:
        stated["model"] = match[1]
        stated["flavour"] = match[2]
        for name, value in _MODEL_VALUE.findall(match[3]):
            stated.setdefault(f"args.{name}", read_value(value))
    match = _FLAVOUR.search(text)
    if match:
        stated |= {"model": match[1], "flavour": match[2], "parameters": read_value(match[3])}
    match = _TRAINER.search(text)
    if match:
        stated["local_batch_size"] = int(match[1])
        stated["global_batch_size"] = int(match[2])
        stated["seq_len"] = int(match[3])
    for match in _APPLIED.finditer(text):
        if match[1]:
            stated["activation_checkpoint"] = match[1].lower()
        if match[2]:
            stated["data_parallel"] = match[2]
        if match[3]:
            stated["compiled"] = True
        if match[4]:
            stated["float8"] = True
    return stated


def _flatten(arguments: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested configurations, by names with dots, as ``training.seq_len``."""
    if isinstance(arguments, Mapping):
        for key, value in arguments.items():
            inner_name = f"{name}.{key}" if name else str(key)
            yield from _flatten(value, inner_name)
    elif isinstance(arguments, int | float | str):
        yield name, arguments
