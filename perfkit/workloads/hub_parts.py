"""Keys of `config.json` that are understood together, as fields of a `Transformer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfkit.ground.units import check_positive, read_number, show
from perfkit.workloads.attention_blocks import UNFUSED


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
        Gives fields of a `Transformer` from `Values`; raises a `ConfigError` for what these cannot
        say.
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


def _read_rotation(values: Values) -> dict[str, Any]:
    """Positions rotate all of a head: scaled angles take the same time, a part of a head does not.

    Angles stand in ``rope_parameters``, for each type of layers where these differ; and before
    version 5 of the library in ``rope_scaling`` and keys of their own.
    """
    for key in ("rope_parameters", "rope_scaling"):
        table = values.keys[key]
        if table is None:
            continue
        if not isinstance(table, dict):
            raise ConfigError(
                f"{values.place}: {key} is {show(table)}; it must be an object or null"
            )
        for angles in (table, *table.values()):
            if not isinstance(angles, dict):
                continue
            if not is_equal(angles.get("partial_rotary_factor", 1), 1):
                raise values.refuse(key, "partial_rotary_factor 1")
    if not is_equal(values.keys["partial_rotary_factor"] or 1, 1):
        raise values.refuse("partial_rotary_factor", "1")
    return {}


def _read_biases(values: Values) -> dict[str, Any]:
    """Biases of attention and of the two products, which have both or none."""
    of_attention = values.read_switch("attention_bias")
    if values.read_switch("mlp_bias") != of_attention:
        raise values.refuse("mlp_bias", f"{show(of_attention)}, as attention_bias")
    return {"bias": of_attention}


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
    """A window that is as wide as the model has positions hides no token."""
    if values.keys["sliding_window"] is None:
        return {}
    if values.read_size("sliding_window") < values.read_size("max_position_embeddings"):
        raise values.refuse("sliding_window", "null, or no less than max_position_embeddings")
    return {}


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
    """A whole number from 0, or 0 for null [-]."""
    if values.keys[key] is None:
        return 0
    count: int = check_positive(f"{values.place}: {key}", values.keys[key], integer=True, zero=True)
    return count


def _read_latent_attention(values: Values) -> dict[str, Any]:
    """Latent attention: numbers of each token from which it makes queries, keys and values, and the
    parts of a head."""
    plain = values.read_size("qk_nope_head_dim")
    value = values.read_size("v_head_dim")
    fields = {
        "q_lora_rank": _read_count(values, "q_lora_rank"),
        "kv_lora_rank": values.read_size("kv_lora_rank"),
        "head_width": plain,
        "rope_width": values.read_size("qk_rope_head_dim"),
    }
    if value != plain:
        fields["value_width"] = value
    return fields


def _read_deepseek_experts(values: Values) -> dict[str, Any]:
    """Experts behind the first layers, and those that all tokens go to."""
    dense = _read_count(values, "first_k_dense_replace")
    if dense >= values.read_size("num_hidden_layers"):
        raise values.refuse("first_k_dense_replace", "fewer layers than num_hidden_layers")
    return {
        "experts": values.read_size("n_routed_experts"),
        "top_k": values.read_size("num_experts_per_tok"),
        "expert_width": values.read_size("moe_intermediate_size"),
        "shared_experts": _read_count(values, "n_shared_experts"),
        "dense_layers": dense,
    }


def _read_further_tokens(values: Values) -> dict[str, Any]:
    """Modules that predict tokens behind the next one."""
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if _read_count(values, key):
            raise ConfigError(
                f"{values.place}: {key} is {show(values.keys[key])}; a Transformer predicts the next token "
                f"alone; give a dict with {key} 0 for the main model, or take pk.capture"
            )
    return {}


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
        "first_k_dense_replace",
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
#: Which tokens each layer sees.
LAYER_TYPES = Part(("layer_types",), _read_layer_types)
#: Which layers have experts.
EXPERTS_EVERYWHERE = Part(("decoder_sparse_step", "mlp_only_layers"), _read_experts_everywhere)
#: Width between the two products of GPT-2.
INNER = Part(("n_inner",), _read_inner)
#: Number formats of stored weights.
STORAGE = Part(("quantization_config",), _read_storage)
