"""What the arguments of a training log mean: fields of a `Transformer` and of a `Strategy`.

Each software has its function; a field that the log does not state is missing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfkit.workloads.transformer import PRESETS

#: Parts of a layer that Megatron-LM computes again (``--recompute-modules``), in perfkit's words.
_RECOMPUTED = {
    "core_attn": "attention",
    "layernorm": "norms",
    "moe_act": "activation",
    "mlp": "mlp",
    "moe": "experts",
}
#: ``--cp-comm-type`` in perfkit's words.
_CP_KINDS = {"p2p": "ring", "all_gather": "all_gather", "allgather": "all_gather", "a2a": "ulysses"}
_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
#: ``--data-parallel-sharding-strategy`` of Megatron's FSDP, as stages of ZeRO.
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
#: Recipes of fp8 that have the same name here.
_FP8_RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")

#: Fields that are set also where a log is silent, and the arguments that state them; no log states
#: those without arguments.
_STATED_BY = {
    "causal": (),
    "rotary": ("position_embedding_type", "use_rotary_position_embeddings"),
    "gated": ("swiglu", "gated_linear_unit", "activation", "mlp_activations"),
    "norm": ("normalization", "args.norm_type"),
    "tie": (
        "untie_embeddings_and_output_weights",
        "share_embeddings_and_output_weights",
        "logits_via_embedding",
    ),
    "bias": ("add_bias_linear", "bias"),
    "attention": ("use_flash_attn",),
    "dtype": (
        "bf16",
        "fp16",
        "precision",
        "params_dtype",
        "fp8",
        "fp8_format",
        "float8",
        "float8.recipe_name",
        "quantize.linear.float8.recipe_name",
    ),
    "mixed": (),
    "optimizer": ("optimizer", "optimizer.name", "opt_type"),
    "fused": (),
    "tp": (
        "tensor_model_parallel_size",
        "model_parallel_size",
        "ici_tensor_parallelism",
        "tp",
        "parallelism.tensor_parallel_degree",
    ),
    "pp": (
        "pipeline_model_parallel_size",
        "ici_pipeline_parallelism",
        "dcn_pipeline_parallelism",
        "pp",
        "parallelism.pipeline_parallel_degree",
    ),
    "cp": (
        "context_parallel_size",
        "ici_context_parallelism",
        "cp",
        "parallelism.context_parallel_degree",
    ),
    "cp_kind": ("cp_comm_type",),
    "zero": (
        "use_distributed_optimizer",
        "distributed_optimizer",
        "zero_stage",
        "use_torch_fsdp2",
        "use_custom_fsdp",
        "use_megatron_fsdp",
        "data_parallel",
        "dp_shard",
        "parallelism.data_parallel_shard_degree",
        "ici_fsdp_parallelism",
    ),
    "sequence_parallel": ("sequence_parallel",),
    "overlap": ("overlap_grad_reduce",),
}


@dataclass
class LoggedRun:
    """What a log states of its run, in perfkit's words.

    Parameters
    ----------
    model : dict of str to value
        Fields of a `Transformer`.
    strategy : dict of str to value
        Fields of a `Strategy`.
    ranks : int or None
        GPUs [-].
    stack : str or None
        Name of the software, one of `perfkit.stacks`.
    execution : str or None
        ``eager``, ``compiled`` or ``graphs``; None for what the software does.
    preset : str or None
        Name of the published model.
    parameters : int or None
        Parameters that the software counted [-].
    device : str or None
        GPU, as its driver names it.
    taken : frozenset of str
        Fields of model and strategy that the log does not state: what its software does unless told.
    notes : list of str
        What is stated and not carried over.
    """

    model: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    ranks: int | None = None
    stack: str | None = None
    execution: str | None = None
    preset: str | None = None
    parameters: int | None = None
    device: str | None = None
    taken: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)


def describe_run(stated: Mapping[str, Any], dialect: str) -> LoggedRun:
    """Say in perfkit's words what a log states of its run.

    Parameters
    ----------
    stated : mapping of str to value
        See `perfkit.readers.training_facts.TrainingFacts`.
    dialect : str
        The software that prints the steps of the log.

    Returns
    -------
    run : LoggedRun
        Fields that are stated.
    """
    run = _describe_by_software(stated, dialect)
    device = stated.get("device")
    if device is not None:
        run.device = str(device)
    run.taken = _find_taken(stated, run)
    return run


def _find_taken(stated: Mapping[str, Any], run: LoggedRun) -> frozenset[str]:
    """Fields of a run that no argument of its log states."""
    return frozenset(
        name
        for name in (*run.model, *run.strategy)
        if name in _STATED_BY and _take(stated, *_STATED_BY[name]) is None
    )


def _describe_by_software(stated: Mapping[str, Any], dialect: str) -> LoggedRun:
    """Fields of a run by the arguments of its software."""
    if dialect == "torchtitan":
        return _describe_titan(stated)
    if dialect == "maxtext":
        return _describe_maxtext(stated)
    if dialect == "nanogpt":
        return LoggedRun(stack="nanogpt")
    return _describe_megatron(stated, dialect)


def _take(stated: Mapping[str, Any], *names: str) -> Any:
    """The first of these that is stated; None for none."""
    for name in names:
        if stated.get(name) is not None:
            return stated[name]
    return None


def _count(stated: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a whole number above 0."""
    for name in names:
        value = stated.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _is_on(stated: Mapping[str, Any], *names: str) -> bool:
    """Whether one of these is stated as True."""
    return any(stated.get(name) is True for name in names)


def _find_on(stated: Mapping[str, Any], name: str) -> bool | None:
    """True if this is stated as True, else None: `_keep_stated` leaves the field out."""
    if _is_on(stated, name):
        return True
    return None


def _keep_stated(**fields: Any) -> dict[str, Any]:
    """Fields with a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _note_optimizer(name: str, stated: Mapping[str, Any], run: LoggedRun) -> None:
    """Note that an optimizer which is none of Adam's is priced as AdamW."""
    optimizer = stated.get(name)
    if optimizer is not None and "adam" not in str(optimizer).lower():
        run.notes.append(f"{name} {optimizer} is priced as adamw; give optimizer")


# -- Megatron-LM and what is built on it
# --------------------------------------------------------------------------------------------------


def _describe_megatron(stated: Mapping[str, Any], dialect: str) -> LoggedRun:
    """Arguments of Megatron-LM, also of NeMo, Megatron-Bridge and Primus."""
    run = LoggedRun()
    is_before_te = dialect == "megatron" and "transformer_impl" not in stated
    of_te = _take(stated, "transformer_impl") == "transformer_engine" or dialect != "megatron"
    run.stack = "megatron-te" if of_te else "megatron"
    if _is_on(stated, "deepspeed"):
        run.stack = "deepspeed"
    run.parameters = _count(stated, "parameters")
    if _is_on(stated, "enable_cuda_graph") or isinstance(stated.get("cuda_graph_impl"), str):
        run.execution = "graphs"
    run.model |= _keep_stated(
        batch=_count(stated, "global_batch_size"),
        sequence=_count(stated, "seq_length", "encoder_seq_length"),
    )
    foreign = _take(stated, "program", "hybrid_override_pattern", "hybrid_layer_pattern")
    if foreign is not None:
        run.notes.append(f"the model is {foreign}, which is not read; give the workload yourself")
    elif _count(stated, "num_layers", "encoder_num_layers"):
        _read_megatron_model(stated, run)
        _read_experts(stated, run)
        if dialect == "megatron" and not of_te and not _is_on(stated, "use_flash_attn"):
            run.model["attention"] = "eager"
    _read_megatron_formats(stated, run)
    lists_all = is_before_te or "overlap_grad_reduce" in stated
    _read_megatron_strategy(stated, run, lists_all=lists_all)
    return run


def _read_megatron_model(stated: Mapping[str, Any], run: LoggedRun) -> None:
    """Sizes and parts of a model."""
    hidden = _count(stated, "hidden_size")
    heads = _count(stated, "num_attention_heads")
    kind = _take(stated, "position_embedding_type")
    rotary = kind == "rope" or _is_on(stated, "use_rotary_position_embeddings")
    positions = _count(stated, "max_position_embeddings")
    sequence = run.model.get("sequence")
    if rotary and sequence and (positions or 0) < sequence:
        positions = sequence
    has_gated_activation = "swiglu" in str(stated.get("activation"))
    gated = has_gated_activation or _is_on(stated, "swiglu", "gated_linear_unit")
    norm = "rms" if "rms" in str(stated.get("normalization")).lower() else "layer"
    width = _count(stated, "kv_channels")
    if width and hidden and heads and width * heads == hidden:
        width = None
    kv_heads = None
    if stated.get("group_query_attention") is not False:
        kv_heads = _count(stated, "num_query_groups")
    if kv_heads == heads:
        kv_heads = None
    run.model |= _keep_stated(
        causal=True,
        layers=_count(stated, "num_layers", "encoder_num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
        inner=_count(stated, "ffn_hidden_size"),
        vocabulary=_count(stated, "vocabulary", "vocab_size", "padded_vocab_size"),
        positions=positions,
        rotary=rotary,
        gated=gated,
        norm=norm,
        tie=not _is_untied(stated),
        bias=_take(stated, "add_bias_linear", "bias") is not False,
        qkv_bias=_find_on(stated, "add_qkv_bias"),
        qk_norm=_find_on(stated, "qk_layernorm"),
        mtp_layers=_count(stated, "mtp_num_layers"),
        dropout=_take(stated, "hidden_dropout", "attention_dropout"),
    )
    if kind not in (None, "rope", "learned_absolute"):
        run.notes.append(f"position_embedding_type {kind} is priced as learned positions")
    if _is_on(stated, "cpu_offloading"):
        run.notes.append("cpu_offloading of activations is not priced")
    if _is_on(stated, "squared_relu"):
        run.model["activation"] = "relu"
        run.notes.append("squared_relu is priced as relu")
    if _is_on(stated, "multi_latent_attention"):
        run.model |= _keep_stated(
            q_lora_rank=_count(stated, "q_lora_rank"),
            kv_lora_rank=_count(stated, "kv_lora_rank"),
            head_width=_count(stated, "qk_head_dim"),
            rope_width=_count(stated, "qk_pos_emb_head_dim"),
            value_width=_count(stated, "v_head_dim"),
        )
    window = stated.get("window_size")
    if window is not None:
        run.notes.append(f"window_size {window} is not read; give window")


def _is_untied(stated: Mapping[str, Any]) -> bool:
    """Whether the head has weights of its own."""
    return (
        _is_on(stated, "untie_embeddings_and_output_weights")
        or stated.get("share_embeddings_and_output_weights") is False
    )


def _read_experts(stated: Mapping[str, Any], run: LoggedRun) -> None:
    """Layers with experts."""
    experts = _count(stated, "num_experts", "num_moe_experts")
    if not experts or experts == 1:
        return
    shared = _count(stated, "moe_shared_expert_intermediate_size")
    run.model |= _keep_stated(
        experts=experts,
        top_k=_count(stated, "moe_router_topk"),
        expert_width=_count(stated, "moe_ffn_hidden_size"),
        shared_experts=1 if shared else None,
        shared_width=shared,
        expert_groups=_count(stated, "moe_router_num_groups"),
        top_groups=_count(stated, "moe_router_group_topk"),
        fused_permutation=_find_on(stated, "moe_permute_fusion"),
    )
    frequency = stated.get("moe_layer_freq")
    if isinstance(frequency, int):
        run.model["expert_interval"] = frequency
    elif frequency is not None:
        dense = _count_dense(str(frequency))
        if dense is None:
            run.notes.append(f"moe_layer_freq {frequency} is not read; give dense_layers")
        else:
            run.model["dense_layers"] = dense


def _count_dense(frequency: str) -> int | None:
    """Layers before the first one with experts, of a list of zeros and then ones."""
    match = re.fullmatch(r"\(?\[0\] ?\* ?(\d{1,4}) ?\+ ?\[1\] ?\* ?\d{1,4}\)?", frequency)
    if match:
        return int(match[1])
    kinds = re.findall(r"\d+", frequency)
    dense = kinds.index("1") if "1" in kinds else 0
    if not kinds or set(kinds[:dense]) - {"0"} or set(kinds[dense:]) != {"1"}:
        return None
    return dense


def _read_megatron_formats(stated: Mapping[str, Any], run: LoggedRun) -> None:
    """Number formats and optimizer."""
    dtype = None
    precision = str(stated.get("precision"))
    if _is_on(stated, "bf16") or precision.startswith("bf16"):
        dtype = "bf16"
    elif _is_on(stated, "fp16") or precision in ("16", "16-mixed", "fp16"):
        dtype = "fp16"
    elif stated.get("params_dtype") is not None:
        dtype = _FORMATS.get(str(stated["params_dtype"]))
    fp8 = _take(stated, "fp8", "fp8_format")
    if fp8 is not None and fp8 is not False:
        run.model["dtype"] = "fp8"
        if stated.get("fp8_recipe") in _FP8_RECIPES:
            run.model["fp8_recipe"] = stated["fp8_recipe"]
    elif dtype:
        run.model["dtype"] = dtype
    if stated.get("fp4") not in (None, False):
        run.notes.append("products in fp4 are not priced; give dtype")
    if dtype in ("bf16", "fp16") or run.model.get("dtype") == "fp8":
        run.model["mixed"] = True
    optimizer = stated.get("optimizer")
    if optimizer == "sgd":
        run.model["optimizer"] = "sgd_momentum"
    elif run.model.get("layers"):
        run.model["optimizer"] = "adamw"
        run.model["fused"] = True
        _note_optimizer("optimizer", stated, run)


def _read_megatron_strategy(stated: Mapping[str, Any], run: LoggedRun, *, lists_all: bool) -> None:
    """How ranks share the model; `lists_all` if the log has all arguments, so that what is missing
    is off."""
    tp = _count(stated, "tensor_model_parallel_size", "model_parallel_size") or 1
    pp = _count(stated, "pipeline_model_parallel_size") or 1
    cp = _count(stated, "context_parallel_size") or 1
    run.ranks = _count(stated, "world_size")
    devices, nodes = _count(stated, "devices"), _count(stated, "num_nodes")
    if run.ranks is None and devices and nodes:
        run.ranks = devices * nodes
    dp = _count(stated, "data_parallel_size")
    if run.ranks and run.ranks % (tp * pp * cp) == 0:
        dp = run.ranks // (tp * pp * cp)
    elif dp:
        run.ranks = dp * tp * pp * cp
    chunks = _count_chunks(stated, run.model.get("layers"), pp)
    zero = 0
    if _is_on(stated, "use_distributed_optimizer") or "distributed_optimizer" in stated:
        zero = 1
    if _is_on(stated, "deepspeed"):
        zero = _count(stated, "zero_stage") or 0
    if _is_on(stated, "use_torch_fsdp2"):
        zero = 3
    if _is_on(stated, "use_custom_fsdp", "use_megatron_fsdp"):
        zero = _SHARDED.get(str(stated.get("data_parallel_sharding_strategy")), zero)
    overlap = stated.get("overlap_grad_reduce")
    if overlap is None and lists_all and dp:
        overlap = False  # Megatron-LM before 2023 reduces after the backward pass
    has_flex_dispatcher = stated.get("moe_token_dispatcher_type") == "flex"
    moves_once = has_flex_dispatcher or _is_on(stated, "moe_enable_deepep")
    offloads = _is_on(stated, "optimizer_cpu_offload")
    run.strategy |= _keep_stated(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=_count(stated, "expert_model_parallel_size"),
        micro_batch=_count(stated, "micro_batch_size"),
        zero=zero,
        sequence_parallel=_is_on(stated, "sequence_parallel"),
        tiled=_find_on(stated, "tp_comm_overlap"),
        overlap=overlap,
        first_layers=_count(stated, "decoder_first_pipeline_num_layers"),
        last_layers=_count(stated, "decoder_last_pipeline_num_layers"),
        offload="optimizer" if offloads else None,
        offload_fraction=_take(stated, "optimizer_offload_fraction") if offloads else None,
    )
    if chunks > 1:
        run.strategy |= {"chunks": chunks, "schedule": "interleaved"}
    if cp > 1:
        kind = re.sub(r"\W", "", str(stated.get("cp_comm_type", "p2p")))
        run.strategy["cp_kind"] = _CP_KINDS.get(kind, "ring")
        if kind not in _CP_KINDS:
            run.notes.append(f"cp_comm_type {stated['cp_comm_type']} is priced as p2p")
    if run.model.get("experts"):
        run.strategy |= _keep_stated(
            etp=_count(stated, "expert_tensor_parallel_size"),
            dispatch="once" if moves_once else None,
            overlap_experts=_find_on(stated, "overlap_moe_expert_parallel_comm"),
        )
    else:
        run.strategy.pop("ep", None)
    _read_recomputed(stated, run)


def _count_chunks(stated: Mapping[str, Any], layers: int | None, pp: int) -> int:
    """Chunks of layers of a stage."""
    chunks = _count(stated, "virtual_pipeline_model_parallel_size")
    of_chunk = _count(stated, "num_layers_per_virtual_pipeline_stage")
    if chunks is None and of_chunk and layers:
        chunks = layers // (pp * of_chunk)
    return chunks if chunks and pp > 1 else 1


def _read_recomputed(stated: Mapping[str, Any], run: LoggedRun) -> None:
    """What the backward pass computes again."""
    how = _take(stated, "recompute_granularity", "activations_checkpoint_granularity")
    method = _take(stated, "recompute_method", "activations_checkpoint_method")
    layers = _count(
        stated, "recompute_num_layers", "activations_checkpoint_num_layers", "checkpoint_num_layers"
    )
    is_old_full = _is_on(stated, "checkpoint_activations") or (how is None and method is not None)
    if how == "full" or is_old_full:
        run.strategy["checkpoint"] = "full"
        if method == "block" and layers:
            run.strategy["checkpoint_layers"] = layers
        elif method == "uniform" and layers:
            run.strategy["checkpoint_group"] = layers
    elif how == "selective":
        modules = re.findall(r"\w+", str(stated.get("recompute_modules", "core_attn")))
        parts = [_RECOMPUTED[module] for module in modules if module in _RECOMPUTED]
        for module in modules:
            if module not in _RECOMPUTED:
                run.notes.append(f"recompute_modules {module} is not priced")
        if parts:
            run.strategy["checkpoint"] = "selective" if parts == ["attention"] else "+".join(parts)


# -- torchtitan
# --------------------------------------------------------------------------------------------------


def _describe_titan(stated: Mapping[str, Any]) -> LoggedRun:
    """Lines and configuration of torchtitan."""
    run = LoggedRun(stack="torchtitan")
    is_compiled = _is_on(stated, "compiled", "training.compile", "compile.enable")
    if stated:
        run.execution = "compiled" if is_compiled else "eager"
    run.preset = _find_preset(stated)
    run.parameters = _count(stated, "parameters")
    run.model |= _keep_stated(
        batch=_count(stated, "global_batch_size", "training.global_batch_size"),
        sequence=_count(stated, "seq_len", "training.seq_len"),
    )
    _read_titan_model(stated, run)
    if stated:
        run.model |= {"mixed": True, "optimizer": "adamw", "fused": True, "dtype": "bf16"}
        _note_optimizer("optimizer.name", stated, run)
    recipe = _take(stated, "float8.recipe_name", "quantize.linear.float8.recipe_name")
    if _is_on(stated, "float8") or recipe in _FP8_RECIPES:
        run.model["dtype"] = "fp8"
        if recipe in _FP8_RECIPES:
            run.model["fp8_recipe"] = recipe
    _read_titan_strategy(stated, run)
    return run


def _find_preset(stated: Mapping[str, Any]) -> str | None:
    """The published model that a name and a flavour mean, as llama3 and 8B."""
    model = _take(stated, "model", "model.name")
    flavour = _take(stated, "flavour", "model.flavor")
    wanted = _simplify(f"{model}{flavour}")
    for preset in PRESETS:
        if _simplify(preset) == wanted:
            return preset
    return None


def _simplify(name: str) -> str:
    """Letters and digits of a name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_titan_model(stated: Mapping[str, Any], run: LoggedRun) -> None:
    """Sizes of a model of torchtitan; those of Llama, whose arguments it prints."""
    if "llama" not in str(_take(stated, "model", "model.name")):
        return
    hidden = _count(stated, "args.dim")
    if not hidden:
        return
    heads = _count(stated, "args.n_heads")
    kv_heads = _count(stated, "args.n_kv_heads")
    run.model |= _keep_stated(
        causal=True,
        layers=_count(stated, "args.n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        vocabulary=_count(stated, "args.vocab_size"),
        positions=_count(stated, "args.max_seq_len"),
        inner=_count_inner(stated, hidden),
        norm="rms",
        gated=True,
        rotary=True,
        tie=False,
        bias=False,
    )


def _count_inner(stated: Mapping[str, Any], hidden: int) -> int:
    """Width of an MLP: 8/3 of the model's width, times a number, rounded up to a multiple
    (torchtitan/models/llama3/model.py, `FeedForward`)."""
    inner = 2 * (4 * hidden) // 3
    factor = stated.get("args.ffn_dim_multiplier")
    if isinstance(factor, int | float):
        inner = int(factor * inner)
    multiple = _count(stated, "args.multiple_of") or 256
    return multiple * -(-inner // multiple)


def _read_titan_strategy(stated: Mapping[str, Any], run: LoggedRun) -> None:
    """How ranks share a model of torchtitan."""
    names = {
        "tp": ("tp", "parallelism.tensor_parallel_degree"),
        "pp": ("pp", "parallelism.pipeline_parallel_degree"),
        "cp": ("cp", "parallelism.context_parallel_degree"),
        "ep": ("ep", "parallelism.expert_parallel_degree"),
    }
    degrees = {key: _count(stated, *places) or 1 for key, places in names.items()}
    replicas = _count(stated, "dp_replicate", "parallelism.data_parallel_replicate_degree") or 1
    shards = _count(stated, "dp_shard", "dp", "parallelism.data_parallel_shard_degree")
    is_known = shards is not None or "dp_replicate" in stated or "tp" in stated
    shards = shards or 1
    if degrees["ep"] == 1:
        del degrees["ep"]
    run.strategy |= degrees
    if is_known:
        run.strategy["dp"] = replicas * shards
        run.ranks = replicas * shards * degrees["tp"] * degrees["pp"] * degrees["cp"]
    if shards > 1 and stated.get("data_parallel") != "DDP":
        run.strategy["zero"] = 3
        if replicas > 1:
            run.strategy["shards"] = shards
    elif is_known:
        run.strategy["zero"] = 0
    run.strategy["sequence_parallel"] = degrees["tp"] > 1
    micro_batch = _count(stated, "local_batch_size", "training.local_batch_size")
    if micro_batch:
        run.strategy["micro_batch"] = micro_batch
    mode = _take(stated, "activation_checkpoint", "activation_checkpoint.mode")
    option = _take(stated, "activation_checkpoint.selective_ac_option")
    layers = run.model.get("layers")
    if mode == "full":
        run.strategy["checkpoint"] = "full"
    elif mode == "selective" and isinstance(option, int) and layers:
        run.strategy |= {"checkpoint": "full", "checkpoint_layers": layers // option}
        run.notes.append(f"selective_ac_option {option} is priced as the first layers, as many")
    elif mode == "selective":
        run.strategy["checkpoint"] = "per_op"
        if option is None:
            run.notes.append("selective checkpoints are taken to be by operation, the default")
    if degrees["pp"] > 1:
        run.notes.append(
            "the schedule of stages is not in the log; 1f1b is taken, give schedule and chunks"
        )


# -- MaxText
# --------------------------------------------------------------------------------------------------


def _describe_maxtext(stated: Mapping[str, Any]) -> LoggedRun:
    """Parameters that MaxText logs."""
    run = LoggedRun(stack="maxtext")
    heads = _count(stated, "num_query_heads")
    hidden = _count(stated, "emb_dim", "base_emb_dim")
    kv_heads = _count(stated, "num_kv_heads")
    width = _count(stated, "head_dim")
    if width and heads and hidden and width * heads == hidden:
        width = None
    batch = _count(stated, "global_batch_size_to_train_on")
    sequence = _count(stated, "max_target_length")
    run.model |= _keep_stated(batch=batch, sequence=sequence)
    if hidden:
        run.model |= _keep_stated(
            causal=True,
            layers=_count(stated, "num_decoder_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            head_width=width,
            inner=_count(stated, "mlp_dim"),
            vocabulary=_count(stated, "vocab_size"),
            positions=sequence,
            norm="rms",
            gated="," in str(stated.get("mlp_activations")),
            rotary=True,
            tie=_is_on(stated, "logits_via_embedding"),
            bias=False,
            dtype="bf16",
            mixed=True,
            optimizer="adamw",
            fused=True,
        )
        experts = _count(stated, "num_experts") or 1
        if experts > 1:
            run.model |= _keep_stated(experts=experts, top_k=_count(stated, "num_experts_per_tok"))
    if stated.get("quantization") is not None:
        run.notes.append(f"quantization {stated['quantization']} is not read; give dtype")
    per_device = stated.get("per_device_batch_size")
    passes = _count(stated, "gradient_accumulation_steps") or 1
    if batch and isinstance(per_device, int | float) and per_device > 0:
        ranks = batch / (per_device * passes)
        run.ranks = round(ranks) if ranks >= 1 else None
    stages_inside = _count(stated, "ici_pipeline_parallelism") or 1
    slices_of_stages = _count(stated, "dcn_pipeline_parallelism") or 1
    degrees = {
        "tp": _count(stated, "ici_tensor_parallelism") or 1,
        "pp": stages_inside * slices_of_stages,
        "cp": _count(stated, "ici_context_parallelism") or 1,
    }
    run.strategy |= degrees
    of_model = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if run.ranks and run.ranks % of_model == 0:
        run.strategy |= {"dp": run.ranks // of_model, "zero": _find_maxtext_stage(stated)}
    experts_apart = _count(stated, "ici_expert_parallelism") or 1
    if experts_apart > 1:
        run.notes.append(f"ici_expert_parallelism {experts_apart} is not read; give ep")
    _note_optimizer("opt_type", stated, run)
    policy = stated.get("remat_policy")
    if policy == "full":
        run.strategy["checkpoint"] = "full"
    elif policy is not None:
        run.notes.append(f"remat_policy {policy} is not read; give checkpoint")
    return run


def _find_maxtext_stage(stated: Mapping[str, Any]) -> int:
    """Stage of ZeRO: replicas shard the model over the axes of FSDP, which are all of them unless
    told (MaxText, configs/base.yml: ici_fsdp_parallelism is -1, dcn_fsdp_parallelism 1)."""
    inside = stated.get("ici_fsdp_parallelism", -1)
    between = stated.get("dcn_fsdp_parallelism", 1)
    return 3 if inside != 1 or between != 1 else 0
