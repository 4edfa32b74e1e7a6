"""Published models by name: their fields as a `Transformer`, and how many parameters they are
said to have."""

from difflib import get_close_matches
from typing import Any, NamedTuple

from perfkit.ground.files import group_rows
from perfkit.ground.units import show
from perfkit.workloads.encoder_decoders import explain_name
from perfkit.workloads.hub_types import MODEL_TYPES

#: Columns that are fields of a `Transformer`; one that is empty has its default.
_SIZES = (
    *("vocabulary", "positions", "layers", "hidden", "heads", "kv_heads", "head_width", "inner"),
    *("experts", "top_k", "expert_groups", "top_groups"),
    *("expert_width", "shared_experts", "dense_layers"),
    *("shared_width", "q_lora_rank", "kv_lora_rank", "rope_width", "rotary_width"),
    *("window", "global_interval", "parallel_norms", "patch", "classes"),
)


class Preset(NamedTuple):
    """A published model.

    Parameters
    ----------
    model_type : str
        Its type, one of `MODEL_TYPES`.
    causal : bool
        See `Transformer`.
    fields : dict of str to value
        Fields of a `Transformer`; those that are missing have its defaults.
    parameters : int or None
        Published number of parameters; None if the name alone says how many there are [-].
    sequence : int or None
        Tokens of the sequences that it was first trained on, as published; None if nobody says or the
        rule of `perfkit.workloads.transformer.Transformer.preset` is meant [-].
    rounding : int
        Unit of the last published digit, below which a number may be rounded or cut; 0 for one that
        is exact [-].
    """

    model_type: str
    causal: bool
    fields: dict[str, Any]
    parameters: int | None
    sequence: int | None
    rounding: int


#: Sequences that models were first trained on, where these are not all of their positions.
_SEQUENCES = {
    name: int(row["sequence"])
    for name, [row] in group_rows("model", "published", "training_sequences.csv").items()
}


def _read_preset(row: dict[str, str]) -> Preset:
    """A row of the table as a model."""
    kind = MODEL_TYPES[row["type"]]
    fields = dict(kind.fields)
    fields["tie"] = kind.defaults["tie_word_embeddings"]
    if row["tie"]:
        fields["tie"] = row["tie"] == "1"
    for size in _SIZES:
        if row[size]:
            fields[size] = int(row[size])
    parameters = None
    if row["parameters"]:
        parameters = int(row["parameters"])
    return Preset(
        model_type=row["type"],
        causal=kind.causal,
        fields=fields,
        parameters=parameters,
        sequence=_SEQUENCES.get(row["model"]),
        rounding=int(row["rounding"] or 0),
    )


#: Published models by name.
TRANSFORMERS = {
    name: _read_preset(row)
    for name, [row] in group_rows("model", "published", "transformers.csv").items()
}


#: Share of letters that a misspelt name has in common with the one that was meant: 'qwen-3-8b' has 0.94 of
#: 'qwen3-8b', while 'llama-4' (0.8 of 'llama-7b') and 'mamba-2.8b' (0.67 of 'gemma-2b') are other models
#: [-].
_SPELLING = 0.85


def find_preset(name: Any) -> Preset:
    """Find a published model.

    Parameters
    ----------
    name : str
        Its name.

    Returns
    -------
    preset : Preset
        The model.

    Raises
    ------
    ValueError
        If there is none of that name; the message has those that are spelled alike, and of encoders
        with a decoder how to capture them.

    Examples
    --------
    >>> find_preset("llama3-8b")
    Traceback (most recent call last):
    ...
    ValueError: preset is 'llama3-8b'; did you mean 'llama-3-8b', 'llama-3.1-8b'? `perfkit models` lists all; Transformer.from_config reads the config.json of any other
    """
    if isinstance(name, str) and name in TRANSFORMERS:
        return TRANSFORMERS[name]
    apart = explain_name(name)
    if apart is not None:
        raise ValueError(f"preset is {apart}")
    near: list[str] = []
    if isinstance(name, str) and name:
        begun = [known for known in TRANSFORMERS if known.startswith(name.lower())][:3]
        near = begun or get_close_matches(name.lower(), TRANSFORMERS, n=3, cutoff=_SPELLING)
    hint = "known are " + ", ".join([*TRANSFORMERS][:4]) + " and more;"
    if near:
        hint = f"did you mean {', '.join(map(show, near))}?"
    raise ValueError(
        f"preset is {show(name)}; {hint} `perfkit models` lists all; Transformer.from_config reads the "
        "config.json of any other"
    )
