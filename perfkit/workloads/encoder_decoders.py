"""Encoders with a decoder (T5, BART, Whisper), which a `Transformer` does not build: how to capture
them instead.

Their decoders have two attentions of each layer, over sequences of two lengths, and T5 adds a trained
number to each score; the transformers library has these programs, and a capture has their operations.
"""

from typing import Any, NamedTuple

from perfkit.ground.files import group_rows
from perfkit.ground.units import show

#: Values of ``model_type``.
TYPES = (
    *("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"),
    "encoder-decoder",
)
#: How names of such models begin.
_NAMES = ("t5", "flan-t5", "flan-ul2", "ul2", "mt5", "umt5", "byt5", "bart", "mbart", "whisper")
_WORDS = {
    "inputs": "tokens = torch.zeros(8, 512, dtype=torch.int64)",
    "arguments": "{'input_ids': tokens, 'labels': tokens}",
}
_SOUNDS = {
    "inputs": "tokens = torch.zeros(8, 128, dtype=torch.int64)",
    "arguments": "{'input_features': torch.zeros(8, MELS, 3000), 'labels': tokens}",
}


class EncoderDecoder(NamedTuple):
    """A published model.

    Parameters
    ----------
    config : str
        Its class of configurations in the transformers library.
    settings : str
        What differs from the defaults of this class, as arguments.
    parameters : int
        Published number of parameters [-].
    """

    config: str
    settings: str
    parameters: int


def _read_model(row: dict[str, str]) -> EncoderDecoder:
    """A row of the table as a model."""
    return EncoderDecoder(row["config"], row["settings"], int(row["parameters"]))


#: Published models by name.
ENCODER_DECODERS = {
    name: _read_model(row)
    for name, [row] in group_rows("model", "published", "encoder_decoders.csv").items()
}


def _write_capture(config: str, *, hears: bool, mels: int) -> str:
    """Three statements of Python that capture a step of the model of a configuration: on 8 texts, or
    on 8 recordings of 30 s if it `hears`."""
    example = _SOUNDS if hears else _WORDS
    arguments = example["arguments"].replace("MELS", str(mels))
    return (
        f"import torch, transformers, perfkit as pk; {example['inputs']}; "
        f"graph = pk.capture({config}, {arguments}, amp='bf16', device='cuda')"
    )


def explain_name(name: Any) -> str | None:
    """Say how to capture a model that is asked for by name.

    Parameters
    ----------
    name : str
        Its name.

    Returns
    -------
    text : str or None
        What is wrong and the next step; None for names of other models.

    Examples
    --------
    >>> explain_name("gpt2") is None
    True
    >>> explain_name("t5-xxl")
    "'t5-xxl', an encoder with a decoder, which a Transformer does not build; sizes are known of t5-small, t5-base, t5-large, t5-3b, t5-11b, of others download the config.json and capture it: import torch, transformers, perfkit as pk; tokens = torch.zeros(8, 512, dtype=torch.int64); graph = pk.capture('config.json', {'input_ids': tokens, 'labels': tokens}, amp='bf16', device='cuda')"
    """
    if not isinstance(name, str):
        return None
    family = next((begin for begin in _NAMES if name.lower().startswith(begin)), None)
    if family is None:
        return None
    fault = f"{show(name)}, an encoder with a decoder, which a Transformer does not build"
    hears = family == "whisper"
    if name in ENCODER_DECODERS:
        model = ENCODER_DECODERS[name]
        mels = 128 if "num_mel_bins=128" in model.settings else 80
        config = f"transformers.{model.config}({model.settings})"
        return f"{fault}; capture it: {_write_capture(config, hears=hears, mels=mels)}"
    known = ", ".join(one for one in ENCODER_DECODERS if one.startswith(family))
    of_others = "download its config.json"
    if known:
        of_others = f"sizes are known of {known}, of others download the config.json"
    capture = _write_capture("'config.json'", hears=hears, mels=80)
    return f"{fault}; {of_others} and capture it: {capture}"


def explain_type(keys: dict[str, Any], file: str) -> str | None:
    """Say how to capture a model of a configuration.

    Parameters
    ----------
    keys : dict of str to value
        The configuration.
    file : str
        Where it stands.

    Returns
    -------
    text : str or None
        What is wrong and the next step; None for configurations of other models.
    """
    if keys["model_type"] not in [*TYPES]:
        return None
    hears = keys["model_type"] == "whisper"
    mels = 128 if keys.get("num_mel_bins") == 128 else 80
    capture = _write_capture(repr(file), hears=hears, mels=mels)
    return (
        f"model_type is {show(keys['model_type'])}, an encoder with a decoder, which a Transformer does not "
        f"build; capture it: {capture}"
    )
