"""`config.json` of Hugging Face's transformers library as the fields of a `Transformer`."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.files import LARGEST_TEXT, check_path, check_values, reading
from perfkit.ground.units import check_choice, escape, read_number, show
from perfkit.workloads.encoder_decoders import explain_type
from perfkit.workloads.hub_parts import STORAGE, ConfigError, Values, is_equal
from perfkit.workloads.hub_types import ALLOWED, IGNORED, MODEL_TYPES, ModelType

#: Most levels of objects and lists in a configuration, of which published ones have up to four [-].
_DEEPEST = 16
_ADVICE = "name the config.json of a model, or its folder"


class HubConfig(NamedTuple):
    """A configuration in the words of a `Transformer`.

    Parameters
    ----------
    model_type : str
        The type of the model, one of `MODEL_TYPES`.
    causal : bool
        See `Transformer`.
    fields : dict of str to value
        Fields of a `Transformer`; those that are missing have its defaults.
    """

    model_type: str
    causal: bool
    fields: dict[str, Any]


def read_hub_config(config: Any, changes: dict[str, Any]) -> HubConfig:
    """Read a configuration of the transformers library.

    Parameters
    ----------
    config : str, Path or dict
        The file, the folder that holds ``config.json``, or what the file holds.
    changes : dict of str to value
        Fields of a `Transformer` that are set in any case.

    Returns
    -------
    config : HubConfig
        Its type and its fields.

    Raises
    ------
    ValueError
        For a file that cannot be read, a type that is unknown, a key that is unknown, and a value that
        changes the work and that a `Transformer` cannot say.

    Notes
    -----
    Keys stand for what version 5.24.0 of the library makes of them, whose defaults are taken where
    the configuration leaves a key out.
    """
    if isinstance(config, dict):
        place, keys = "config", config
        _check_json(place, keys, 0)
    else:
        place, keys = _read_file(config)
    kind = _find_type(place, keys)
    values = _check_keys(place, keys, kind, changes)
    fields: dict[str, Any] = {**kind.fields, "tie": values.read_switch("tie_word_embeddings")}
    for key, size in kind.sizes.items():
        fields[size] = values.read_size(key)
    for part in (*kind.parts, STORAGE):
        fields.update(part.read(values))
    return HubConfig(str(keys["model_type"]), kind.causal, fields)


def _read_file(config: Any) -> tuple[str, dict[str, Any]]:
    """The name of the file, and what it holds."""
    if hasattr(config, "to_dict"):
        raise ValueError(
            f"config is {show(type(config).__name__)}, an object; give its to_dict(), or the path of "
            "config.json"
        )
    if not isinstance(config, str | os.PathLike):
        raise ValueError(
            f"config is {show(config)}; it must be the path of a config.json or of its folder, or a dict"
        )
    path = check_path("config", config)
    advice = _advise(str(path))
    with reading(str(path), advice):
        path = path.expanduser()
        if path.is_dir():
            path = path / "config.json"
    with reading(str(path), advice, most=LARGEST_TEXT):
        text = Path(path).read_text(encoding="utf-8-sig")
        check_values(text, str(path))
        keys = json.loads(text)
        if not isinstance(keys, dict):
            raise ValueError(f"it holds {show(keys, 40)}, not an object")
        _check_json("", keys, 0)
    return escape(path, 200), keys


def _advise(path: str) -> str:
    """What to do next if a file cannot be read: download it, where its name is that of a model of the Hub
    and nothing lies there."""
    owner, _, model = path.removesuffix("/config.json").partition("/")
    is_name = owner.strip(".~") != "" and model != "" and "/" not in model
    if is_name and not model.endswith(".json") and not os.path.exists(path):
        return f"{_ADVICE}, as after `hf download {owner}/{model} config.json --local-dir {model}`"
    return _ADVICE


def _check_json(place: str, value: Any, level: int) -> None:
    """Refuse what no JSON holds, and objects in objects without end."""
    if level > _DEEPEST:
        raise ConfigError(f"{place} has more than {_DEEPEST} levels; no configuration has so many")
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str | int):
                raise ConfigError(f"{place} has the key {show(key)}; keys must be texts")
            _check_json(f"{place}: {escape(key)}", entry, level + 1)
        return
    if isinstance(value, list | tuple):
        for entry in value:
            _check_json(place, entry, level + 1)
        return
    if read_number(value) is None:
        raise ConfigError(f"{place} is {show(value)}, which no JSON holds; give config.to_dict()")


def _find_type(place: str, keys: dict[str, Any]) -> ModelType:
    """The record of a model's type, if its architecture is the one that the builder records."""
    if "model_type" not in keys:
        raise ConfigError(f"{place} has no model_type; {_ADVICE}, as of the transformers library")
    architectures = keys.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(
            f"{place}: architectures is {show(architectures)}; it must be a list or null"
        )
    named = f" (architectures {show(architectures)})" if architectures else ""
    name = keys["model_type"]
    apart = explain_type(keys, "config.json" if place == "config" else place)
    if apart is not None:
        raise ConfigError(f"{place}: {apart}")
    if name not in [*MODEL_TYPES]:
        inner = ""
        if isinstance(keys.get("text_config"), dict):
            inner = "; for its language model alone give the dict of text_config"
        try:
            check_choice(f"{place}: model_type", name, MODEL_TYPES)
        except ValueError as fault:
            raise ConfigError(
                f"{fault}{named}{inner}; for any other model build it in PyTorch and take pk.capture"
            ) from None
    kind = MODEL_TYPES[name]
    known = (kind.architecture, *kind.aliases)
    for architecture in architectures:
        if architecture not in known:
            raise ConfigError(
                f"{place}: architectures is {show(architectures)}; of model_type {name} a Transformer "
                f"is {' or '.join(known)}, with a head over the vocabulary; for anything else build the "
                "model in PyTorch and take pk.capture"
            )
    return kind


def _check_keys(
    place: str, keys: dict[str, Any], kind: ModelType, changes: dict[str, Any]
) -> Values:
    """The keys that change the work, with defaults; the others are known to change nothing."""
    read = {"tie_word_embeddings", "quantization_config", *kind.list_read_keys()}
    allowed = {**ALLOWED, **kind.allowed}
    for key in keys:
        if key in read or key in allowed or key in kind.ignored or key in IGNORED:
            continue
        raise ConfigError(
            f"{place}: {show(key)} is {show(keys[key])}, a key that perfkit does not know for model_type "
            f"{keys['model_type']}; if it changes no operation, give a dict without it; else build the model "
            "in PyTorch and take pk.capture"
        )
    values = Values(place, {key: keys.get(key, kind.defaults.get(key)) for key in read}, changes)
    for key, choices in allowed.items():
        if key not in keys and key not in kind.defaults:
            continue
        if not any(is_equal(values.keys.get(key, keys.get(key)), choice) for choice in choices):
            named = " or ".join(json.dumps(choice) for choice in choices)
            raise Values(place, {**values.keys, **keys}, changes).refuse(key, named)
    return values
