"""Keys of `config.json` that are understood together, as fields of a `Transformer`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfkit.ground.units import check_positive, read_number, show
from perfkit.workloads.attention_blocks import UNFUSED
from perfkit.workloads.images import count_image_tokens


class ConfigError(ValueError):
    """A configuration that a `Transformer` cannot say."""


@dataclass(frozen=True)
class Values:
    """The keys of a configuration while it is read.

    Parameters
    ----------
    place : str
        Where they stand, for errors.
    keys : mapping of str to value
        Each key that changes the work; those that the configuration leaves out have the default.
    changes : mapping of str to value
        Fields of a `Transformer` that are set in any case, whatever the configuration says.
    """

    place: str
    keys: Mapping[str, Any]
    changes: Mapping[str, Any]

    def read_size(self, key: str) -> int:
        """The whole number above zero of a key [-]."""
        size: int = check_positive(f"{self.place}: {key}", self.keys[key], integer=True)
        return size

    def read_share(self, key: str) -> float:
        """The share of a key, from 0 to 1 [-]."""
        share: float = check_positive(
            f"{self.place}: {key}", self.keys[key], maximum=1.0, zero=True
        )
        return share

    def read_switch(self, key: str) -> bool:
        """The truth value of a key."""
        value = self.keys[key]
        if not isinstance(value, bool):
            raise ConfigError(f"{self.place}: {key} is {show(value)}; it must be true or false")
        return value

    def refuse(self, key: str, allowed: str) -> ConfigError:
        """The error for a value that changes the work and that the builder cannot say."""
        return ConfigError(
            f"{self.place}: {key} is {show(self.keys[key])}; a Transformer can say {allowed}; "
            "for anything else build the model in PyTorch and take pk.capture"
        )


class Part(NamedTuple):
    """Keys that are understood together.

    Parameters
    ----------
    keys : tuple of str
        The keys.
    read : callable
        Gives fields of a `Transformer` from `Values`, also those that are at their defaults where
        `ModelType.fields` has others; raises a `ConfigError` for what these cannot say.
    """

    keys: tuple[str, ...]
    read: Callable[[Values], dict[str, Any]]


def is_equal(value: Any, allowed: Any) -> bool:
    """Whether a value of JSON is one that is allowed: a truth value is no number.

    Examples
    --------
    >>> is_equal(0, 0.0), is_equal(False, 0), is_equal(None, None)
    (True, False, True)
    """
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    if value is None or allowed is None:
        return value is allowed
    if isinstance(allowed, int | float):
        number = read_number(value)
        return number is not None and number == allowed
    return type(value) is type(allowed) and bool(value == allowed)


def _read_heads(values: Values) -> dict[str, Any]:
    """Heads of keys and values, as many as heads if it is left out."""
    if values.keys["num_key_value_heads"] is None:
        return {"kv_heads": values.read_size("num_attention_heads")}
    return {"kv_heads": values.read_size("num_key_value_heads")}


def _read_head_width(values: Values) -> dict[str, Any]:
    """Width of a head, if it is not the width over the heads."""
    if values.keys["head_dim"] is None:
        return {}
    width = values.read_size("head_dim")
    if width * values.read_size("num_attention_heads") == values.read_size("hidden_size"):
        return {}
    return {"head_width": width}


def _find_rotated_share(values: Values, keys: Sequence[str]) -> Any:
    """The share of a head that positions rotate: of a table, or of a key of its own; None if nothing
    says it.

    Angles stand in ``rope_parameters``, for each type of layers where these differ; and before
    version 5 of the library in ``rope_scaling`` and keys of their own. Scaled angles take the same
    time.
    """
    share = None
    for key in ("rope_parameters", "rope_scaling"):
        share_of_table = _find_share_of_table(values, key)
        if share_of_table is not None:
            share = share_of_table
    for key in keys:
        if values.keys[key] is not None:
            share = values.keys[key]
    return share


def _find_share_of_table(values: Values, key: str) -> Any:
    """The share that a table of angles states, for all layers or for each type of them; None if it
    says nothing. A type without one rotates all of a head where another type has one."""
    table = values.keys[key]
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ConfigError(f"{values.place}: {key} is {show(table)}; it must be an object or null")
    of_types = [angles for angles in table.values() if isinstance(angles, dict)]
    shares = [angles.get("partial_rotary_factor") for angles in of_types or [table]]
    if all(share is None for share in shares):
        return table.get("partial_rotary_factor")
    stated = [1.0 if share is None else share for share in shares]
    if any(not is_equal(share, stated[0]) for share in stated):
        raise values.refuse(key, "one partial_rotary_factor of all layers")
    return stated[0]


def _read_rotation(values: Values) -> dict[str, Any]:
    """Positions rotate all of a head."""
    share = _find_rotated_share(values, ["partial_rotary_factor"])
    if share is not None and not is_equal(share, 1):
        for key in ("partial_rotary_factor", "rope_scaling", "rope_parameters"):
            if values.keys[key] is not None:
                raise values.refuse(key, "partial_rotary_factor 1")
    return {}


def make_part_rotation(key: str, usual: float) -> Part:
    """The part of heads of which positions rotate a share.

    Parameters
    ----------
    key : str
        The key of that share, beside that of a table of angles.
    usual : float
        The share if nothing says it [-].

    Returns
    -------
    part : Part
        Those keys.
    """

    def read(values: Values) -> dict[str, Any]:
        share = _find_rotated_share(values, [key])
        if share is None:
            share = usual
        number = read_number(share)
        width = values.read_size("hidden_size") // values.read_size("num_attention_heads")
        rotated = 0
        if number is not None and 0 < number <= 1:
            rotated = int(number * width)
        if rotated == 0 or rotated % 2 != 0:
            raise ConfigError(
                f"{values.place}: {key} is {show(share)}, the share of a head of {width} that positions rotate; it "
                "must be above 0, at most 1, and give an even number"
            )
        if rotated == width:
            return {}
        return {"rotary_width": rotated}

    return Part((key, "rope_parameters", "rope_scaling"), read)


def _read_rotated_width(values: Values) -> dict[str, Any]:
    """How much of a head positions rotate in GPT-J: all of it if it is null."""
    if values.keys["rotary_dim"] is None:
        return {}
    width = values.read_size("rotary_dim")
    if width * values.read_size("n_head") == values.read_size("n_embd"):
        return {}
    return {"rotary_width": width}


def _read_caps(values: Values) -> dict[str, Any]:
    """Caps of scores and logits; scores with a cap are computed in memory, as the library advises."""
    caps = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
    fields: dict[str, Any] = {"score_cap": False, "logit_cap": False, "attention": "fused"}
    for field, key in caps.items():
        if values.keys[key] is None:
            continue
        check_positive(f"{values.place}: {key}", values.keys[key])
        fields[field] = True
    if fields["score_cap"]:
        fields["attention"] = "eager"
    return fields


def _read_parallel(values: Values) -> dict[str, Any]:
    """Whether attention and MLP work side by side, with a norm of each."""
    if values.read_switch("use_parallel_residual"):
        return {"parallel_mlp": True, "parallel_norms": 2}
    return {"parallel_mlp": False, "parallel_norms": 1}


def _read_falcon(values: Values) -> dict[str, Any]:
    """Heads of keys, norms, biases and the width of the MLP of Falcon."""
    is_new = values.read_switch("new_decoder_architecture")
    has_one_head = values.read_switch("multi_query")
    kv_heads = values.read_size("num_attention_heads")
    if is_new and values.keys["num_kv_heads"] is not None:
        kv_heads = values.read_size("num_kv_heads")
    elif has_one_head and not is_new:
        kv_heads = 1
    norms = 1
    if is_new:
        norms = 2
        if values.keys["num_ln_in_parallel_attn"] is not None:
            norms = values.read_size("num_ln_in_parallel_attn")
    fields: dict[str, Any] = {"kv_heads": kv_heads, "bias": values.read_switch("bias")}
    if values.read_switch("parallel_attn") or is_new:
        fields |= {"parallel_mlp": True, "parallel_norms": norms}
    else:
        fields |= {"parallel_mlp": False, "parallel_norms": 1}
    if values.keys["ffn_hidden_size"] is not None:
        fields["inner"] = values.read_size("ffn_hidden_size")
    return fields


def _read_shared_expert(values: Values) -> dict[str, Any]:
    """Experts of Qwen2-MoE, and one with a gate that all tokens go to."""
    return {
        "experts": values.read_size("num_experts"),
        "top_k": values.read_size("num_experts_per_tok"),
        "expert_width": values.read_size("moe_intermediate_size"),
        "shared_experts": 1,
        "shared_width": values.read_size("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _read_all_biases(values: Values) -> dict[str, Any]:
    """Biases of all products, or of none."""
    return {"bias": values.read_switch("use_bias")}


def _read_biases(values: Values) -> dict[str, Any]:
    """Biases of attention, and of MLPs."""
    of_attention = values.read_switch("attention_bias")
    of_mlp = values.read_switch("mlp_bias")
    if of_attention == of_mlp:
        return {"bias": of_attention}
    return {"qkv_bias": of_attention, "output_bias": of_attention, "mlp_bias": of_mlp}


def _read_attention_biases(values: Values) -> dict[str, Any]:
    """Biases of attention alone."""
    of_attention = values.read_switch("attention_bias")
    return {"qkv_bias": of_attention, "output_bias": of_attention}


def _read_query_biases(values: Values) -> dict[str, Any]:
    """Biases of queries, keys and values alone."""
    return {"qkv_bias": values.read_switch("qkv_bias")}


def _read_layer_types(values: Values) -> dict[str, Any]:
    """All layers see all tokens before them."""
    listed = values.keys["layer_types"]
    if listed is None:
        return {}
    if not isinstance(listed, list):
        raise values.refuse("layer_types", "null, or a list of 'full_attention'")
    for name in listed:
        if name != "full_attention":
            raise values.refuse("layer_types", "'full_attention' of each layer")
    return {}


def make_windows(usual: int, *pattern: str) -> Part:
    """The part of layers with windows, of which every so many has none.

    Parameters
    ----------
    usual : int
        Layers of which the last one sees all tokens, where the file says nothing [-].
    *pattern : str
        Keys with this number.

    Returns
    -------
    part : Part
        Those keys, the width of windows, and the list of layers.
    """

    def read(values: Values) -> dict[str, Any]:
        interval = usual
        for key in pattern:
            if values.keys[key] is not None:
                interval = values.read_size(key)
        layers = values.read_size("num_hidden_layers")
        listed = values.keys["layer_types"]
        if listed is not None:
            interval = _find_interval(values, layers)
        if values.keys["sliding_window"] is None:
            raise values.refuse("sliding_window", "the width of a window")
        window = values.read_size("sliding_window")
        if interval == 1 or window >= values.read_size("max_position_embeddings"):
            return {}
        if interval > layers:
            return {"window": window}
        return {"window": window, "global_interval": interval}

    return Part(("sliding_window", "layer_types", *pattern), read)


def _find_interval(values: Values, layers: int) -> int:
    """Of how many layers the last one sees all tokens; more than there are if none does."""
    listed = values.keys["layer_types"]
    is_list = isinstance(listed, list) and len(listed) == layers
    if not is_list or not {*map(str, listed)} <= {"sliding_attention", "full_attention"}:
        raise values.refuse(
            "layer_types", f"'sliding_attention' or 'full_attention' of each of {layers} layers"
        )
    interval = layers + 1
    if "full_attention" in listed:
        interval = listed.index("full_attention") + 1
    for number, name in enumerate(listed, start=1):
        if (name == "full_attention") != (number % interval == 0):
            raise values.refuse("layer_types", "every so many layers with full_attention alone")
    return interval


def _read_experts_everywhere(values: Values) -> dict[str, Any]:
    """Experts of each layer; none has an MLP in place of them."""
    if not is_equal(values.keys["decoder_sparse_step"], 1):
        raise values.refuse("decoder_sparse_step", "1, experts in each layer")
    if values.keys["mlp_only_layers"] not in (None, []):
        raise values.refuse("mlp_only_layers", "[], experts in each layer")
    return {}


def _read_inner(values: Values) -> dict[str, Any]:
    """Width between the two products of GPT-2, four times the width if it is null."""
    if values.keys["n_inner"] is None:
        return {}
    return {"inner": values.read_size("n_inner")}


def make_dropout(*shares: str, scores: str, drops_embeddings: bool = True) -> Part:
    """The part of the shares that are dropped, of which the builder has one.

    Parameters
    ----------
    *shares : str
        Keys of those after embeddings, attention and MLPs.
    scores : str
        Key of that of scores, which the builder drops only where they are stored in memory.
    drops_embeddings : bool, optional
        Whether the model drops embeddings, as the builder does.

    Returns
    -------
    part : Part
        Those keys.
    """

    def read(values: Values) -> dict[str, Any]:
        if "dropout" in values.changes:
            return {}
        advice = "give dropout=, 0 if nothing is dropped, or take pk.capture"
        first = values.read_share(shares[0])
        for key in shares[1:]:
            if values.read_share(key) != first:
                raise ConfigError(
                    f"{values.place}: {shares[0]} is {first:g} and {key} {values.keys[key]:g}; "
                    f"a Transformer has one share; {advice}"
                )
        if first > 0 and not drops_embeddings:
            raise ConfigError(
                f"{values.place}: {shares[0]} is {first:g}, and this type drops nothing of embeddings; "
                f"a Transformer has one share; {advice}"
            )
        of_scores = values.read_share(scores)
        stores_scores = values.changes.get("attention") in UNFUSED
        if of_scores != first and (of_scores > 0 or stores_scores):
            raise ConfigError(
                f"{values.place}: {scores} is {of_scores:g} and {shares[0]} {first:g}; "
                f"a Transformer has one share; {advice}"
            )
        return {"dropout": first}

    return Part((*shares, scores), read)


def _read_dropped_scores(values: Values) -> dict[str, Any]:
    """Scores of attention are the only numbers that these types drop."""
    share = values.keys["attention_dropout"]
    if "dropout" in values.changes or share is None:
        return {}
    if values.read_share("attention_dropout") > 0:
        raise ConfigError(
            f"{values.place}: attention_dropout is {share:g}, of scores alone; a Transformer has one share for "
            "all; give dropout=, 0 if nothing is dropped, or take pk.capture"
        )
    return {}


def make_activation(*keys: str) -> Part:
    """The part of the activation, by the first of some keys that is not null.

    Parameters
    ----------
    *keys : str
        The keys.

    Returns
    -------
    part : Part
        Those keys.
    """

    def read(values: Values) -> dict[str, Any]:
        for key in keys:
            name = values.keys[key]
            if name is None:
                continue
            if not isinstance(name, str) or name not in _ACTIVATIONS:
                raise values.refuse(key, " or ".join(_ACTIVATIONS))
            return {"activation": _ACTIVATIONS[name]}
        raise values.refuse(keys[-1], " or ".join(_ACTIVATIONS))

    return Part(keys, read)


def _read_window(values: Values) -> dict[str, Any]:
    """A window, unless it is as wide as the model has positions."""
    if values.keys["sliding_window"] is None:
        return {}
    window = values.read_size("sliding_window")
    if window >= values.read_size("max_position_embeddings"):
        return {}
    return {"window": window}


def _read_opt(values: Values) -> dict[str, Any]:
    """The embedding of positions has two rows that no token uses; words are as wide as layers; all
    products have a bias or none."""
    width = values.keys["word_embed_proj_dim"]
    if width is not None and values.read_size("word_embed_proj_dim") != values.read_size(
        "hidden_size"
    ):
        raise values.refuse("word_embed_proj_dim", "null, or hidden_size")
    return {
        "positions": values.read_size("max_position_embeddings"),
        "padded_positions": 2,
        "bias": values.read_switch("enable_bias"),
    }


def _read_roberta_positions(values: Values) -> dict[str, Any]:
    """Positions begin behind the number of the token that pads."""
    rows = values.read_size("max_position_embeddings")
    padding = values.keys["pad_token_id"]
    unused = read_number(padding)
    if unused is None or not 0 <= unused < rows - 1 or unused != int(unused):
        raise ConfigError(
            f"{values.place}: pad_token_id is {show(padding)}; it must be a whole number from 0, below "
            f"max_position_embeddings, {rows}"
        )
    return {"positions": rows - int(unused) - 1, "padded_positions": int(unused) + 1}


def _read_queries(values: Values) -> dict[str, Any]:
    """One head of keys and values, or as many as heads."""
    if values.read_switch("multi_query"):
        return {"kv_heads": 1}
    return {"kv_heads": values.read_size("n_head")}


def _read_scales(values: Values) -> dict[str, Any]:
    """Numbers that multiply embeddings, branches and logits, unless they are 1."""
    scales = {
        "scaled_embeddings": "embedding_multiplier",
        "scaled_branches": "residual_multiplier",
        "scaled_logits": "logits_scaling",
    }
    fields = {}
    for field, key in scales.items():
        number = read_number(values.keys[key])
        if number is None:
            raise ConfigError(
                f"{values.place}: {key} is {show(values.keys[key])}; it must be a number"
            )
        fields[field] = number != 1
    return fields


def _read_count(values: Values, key: str) -> int:
    """A whole number from 0 to 1000, or 0 for null [-]."""
    if values.keys[key] is None:
        return 0
    count: int = check_positive(
        f"{values.place}: {key}", values.keys[key], integer=True, zero=True, maximum=1000
    )
    return count


def _read_latent_attention(values: Values) -> dict[str, Any]:
    """Latent attention: numbers of each token from which it makes queries, keys and values, and the
    parts of a head."""
    plain = values.read_size("qk_nope_head_dim")
    value = values.read_size("v_head_dim")
    query_rank = 0  # queries are made from all numbers of a token
    if values.keys["q_lora_rank"] is not None:
        place = f"{values.place}: q_lora_rank"
        query_rank = check_positive(place, values.keys["q_lora_rank"], integer=True, zero=True)
    fields = {
        "q_lora_rank": query_rank,
        "kv_lora_rank": values.read_size("kv_lora_rank"),
        "head_width": plain,
        "rope_width": values.read_size("qk_rope_head_dim"),
    }
    if value != plain:
        fields["value_width"] = value
    return fields


def _read_deepseek_experts(values: Values) -> dict[str, Any]:
    """Experts behind the first layers, and those that all tokens go to. Routers that are not greedy take
    those of a token from some groups alone."""
    dense = _read_count(values, "first_k_dense_replace")
    if dense >= values.read_size("num_hidden_layers"):
        raise values.refuse("first_k_dense_replace", "fewer layers than num_hidden_layers")
    groups, taken = _read_count(values, "n_group"), _read_count(values, "topk_group")
    if 0 < groups < taken:
        raise values.refuse("topk_group", f"at most n_group, {groups}")
    limits = {}
    if taken < groups and values.keys["topk_method"] != "greedy":
        limits = {"expert_groups": groups, "top_groups": taken}
    return {
        **limits,
        "experts": values.read_size("n_routed_experts"),
        "top_k": values.read_size("num_experts_per_tok"),
        "expert_width": values.read_size("moe_intermediate_size"),
        "shared_experts": _read_count(values, "n_shared_experts"),
        "dense_layers": dense,
    }


def _read_further_tokens(values: Values) -> dict[str, Any]:
    """Modules that predict tokens behind the next one, by the older key or the newer one."""
    count = _read_count(values, "num_mtp_layers")
    if values.keys["num_nextn_predict_layers"] is not None:
        count = _read_count(values, "num_nextn_predict_layers")
    return {"mtp_layers": count}


def _read_images(values: Values) -> dict[str, Any]:
    """Edges of square images and of their patches, and classes, as many as have a label. The head has
    weights of its own, whatever is said of words."""
    sizes = {}
    for key in ("image_size", "patch_size"):
        if isinstance(values.keys[key], list | tuple):
            raise values.refuse(key, "one edge of a square")
        sizes[key] = values.read_size(key)
    image, patch = sizes["image_size"], sizes["patch_size"]
    if image % patch:
        raise values.refuse("image_size", f"a multiple of patch_size, {patch}")
    classes = 2  # as the library has it
    if values.keys["num_labels"] is not None:
        classes = values.read_size("num_labels")
    labels = values.keys["id2label"]
    if labels is not None:
        if not isinstance(labels, dict) or not labels:
            raise ConfigError(
                f"{values.place}: id2label is {show(labels, 80)}; it must be an object of labels or null"
            )
        classes = len(labels)
    return {
        "patch": patch,
        "positions": count_image_tokens(image, patch),
        "classes": classes,
        "vocabulary": 0,
        "tie": False,
    }


def _read_storage(values: Values) -> dict[str, Any]:
    """How weights are stored: `dtype` of a `Transformer` says in which format products run, and fp8
    or mxfp4 of a file is no more than the format of its numbers. Weights of other formats are
    trained with adapters."""
    table = values.keys["quantization_config"]
    if table is None:
        return {}
    method = table.get("quant_method") if isinstance(table, dict) else None
    if method not in ("fp8", "mxfp4"):
        raise values.refuse("quantization_config", "null, or quant_method 'fp8' or 'mxfp4'")
    return {}


#: The library's names of activations, and those of a Transformer.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
#: Shares of scores that are dropped.
DROPPED_SCORES = Part(("attention_dropout",), _read_dropped_scores)
#: How many tokens before it a token sees.
WINDOW = Part(("sliding_window",), _read_window)
#: Positions, embeddings and biases of OPT.
OPT = Part(("max_position_embeddings", "word_embed_proj_dim", "enable_bias"), _read_opt)
#: Positions of RoBERTa.
ROBERTA_POSITIONS = Part(("max_position_embeddings", "pad_token_id"), _read_roberta_positions)
#: Heads of keys and values of GPTBigCode.
QUERIES = Part(("multi_query",), _read_queries)
#: Heads of latent attention.
LATENT_ATTENTION = Part(
    ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    _read_latent_attention,
)
#: Experts of DeepSeek.
DEEPSEEK_EXPERTS = Part(
    (
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
        *("first_k_dense_replace", "n_group", "topk_group", "topk_method"),
    ),
    _read_deepseek_experts,
)
#: Modules that predict further tokens.
FURTHER_TOKENS = Part(("num_nextn_predict_layers", "num_mtp_layers"), _read_further_tokens)
#: Numbers that multiply tensors.
SCALES = Part(("embedding_multiplier", "residual_multiplier", "logits_scaling"), _read_scales)
#: Heads of keys and values, and the width of heads.
HEADS = Part(("num_key_value_heads",), _read_heads)
HEAD_WIDTH = Part(("head_dim",), _read_head_width)
#: Angles that rotate queries and keys.
ROTATION = Part(("rope_parameters", "rope_scaling", "partial_rotary_factor"), _read_rotation)
#: Biases of attention and MLP.
BIASES = Part(("attention_bias", "mlp_bias"), _read_biases)
#: Biases of attention alone, of queries, keys and values alone, and of all products.
ATTENTION_BIASES = Part(("attention_bias",), _read_attention_biases)
QUERY_BIASES = Part(("qkv_bias",), _read_query_biases)
ALL_BIASES = Part(("use_bias",), _read_all_biases)
#: Width of the part of heads that GPT-J rotates.
ROTATED_WIDTH = Part(("rotary_dim",), _read_rotated_width)
#: Caps of scores and logits.
CAPS = Part(("attn_logit_softcapping", "final_logit_softcapping"), _read_caps)
#: MLPs beside attention.
PARALLEL_RESIDUAL = Part(("use_parallel_residual",), _read_parallel)
#: Layers of Falcon.
FALCON = Part(
    (
        *("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn"),
        *("bias", "parallel_attn", "ffn_hidden_size"),
    ),
    _read_falcon,
)
#: Experts of Qwen2-MoE.
SHARED_EXPERT = Part(
    (
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "shared_expert_intermediate_size",
    ),
    _read_shared_expert,
)
#: Which tokens each layer sees.
LAYER_TYPES = Part(("layer_types",), _read_layer_types)
#: Which layers have experts.
EXPERTS_EVERYWHERE = Part(("decoder_sparse_step", "mlp_only_layers"), _read_experts_everywhere)
#: Width between the two products of GPT-2.
INNER = Part(("n_inner",), _read_inner)
#: Images, their patches and classes.
IMAGES = Part(("image_size", "patch_size", "num_labels", "id2label"), _read_images)
#: Number formats of stored weights.
STORAGE = Part(("quantization_config",), _read_storage)
