"""Models that are drawn from the lists of transformers, torchvision and timm, made small, with inputs
that follow from their configurations."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

#: Sequences, images or clips of a batch, and tokens of a sequence [-].
BATCH, TOKENS = 2, 32
#: Heads of transformers: the list of models that have it.
HEADS = (
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
#: Heads whose labels are one class for each sample.
_ONE_CLASS = ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASS", "VIDEO_CLASS", "AUDIO_CLASS")
#: Names of settings, and the most that a small model has of them [-].
_MOST = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "groups": 2,
    "head": 16,
    "inner": 128,
    "words": 256,
    "experts": 4,
    "positions": 512,
}
_NAMES = {
    "num_hidden_layers": "layers",
    "num_layers": "layers",
    "n_layer": "layers",
    "n_layers": "layers",
    "encoder_layers": "layers",
    "decoder_layers": "layers",
    "num_encoder_layers": "layers",
    "num_decoder_layers": "layers",
    "depth": "layers",
    "hidden_size": "width",
    "d_model": "width",
    "n_embd": "width",
    "dim": "width",
    "embed_dim": "width",
    "emb_dim": "width",
    "num_attention_heads": "heads",
    "n_head": "heads",
    "n_heads": "heads",
    "num_heads": "heads",
    "encoder_attention_heads": "heads",
    "decoder_attention_heads": "heads",
    "num_key_value_heads": "groups",
    "head_dim": "head",
    "d_kv": "head",
    "qk_rope_head_dim": "head",
    "qk_nope_head_dim": "head",
    "v_head_dim": "head",
    "kv_lora_rank": "head",
    "q_lora_rank": "head",
    "intermediate_size": "inner",
    "moe_intermediate_size": "inner",
    "shared_expert_intermediate_size": "inner",
    "n_inner": "inner",
    "d_ff": "inner",
    "ffn_dim": "inner",
    "encoder_ffn_dim": "inner",
    "decoder_ffn_dim": "inner",
    "hidden_dim": "inner",
    "mlp_dim": "inner",
    "vocab_size": "words",
    "decoder_vocab_size": "words",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "max_position_embeddings": "positions",
}
#: What is made smaller, in the order in which it is tried.
WAYS = ("all", "layers and words", "nothing")
#: Edges of images of torchvision and timm, in the order in which they are tried [pixels].
_EDGES = {"all": 64, "nothing": 224}
#: Rates at which whole layers are left out by a draw, which the real step makes for itself: they are
#: set to 0, as two draws cannot be compared [-].
_DROPPED_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")
#: Most weights of a model that is built [-].
MOST_WEIGHTS = 150_000_000


@dataclass(frozen=True)
class Drawn:
    """A model that was drawn.

    Parameters
    ----------
    package : str
        ``transformers``, ``torchvision`` or ``timm``.
    name : str
        Its name there.
    head : str
        List of transformers that has it; else empty.
    """

    package: str
    name: str
    head: str


@dataclass(frozen=True)
class Attempt:
    """A way to build it.

    Parameters
    ----------
    way : str
        What is made smaller, one of `WAYS`.
    has_labels : bool
        Whether the model computes its loss; else the mean square of its results is one.
    """

    way: str
    has_labels: bool


def draw(seed: int, package: str) -> Iterator[Drawn]:
    """All models of a package in an order that a seed draws.

    Parameters
    ----------
    seed : int
        Seed of the order.
    package : str
        ``transformers``, ``torchvision`` or ``timm``.

    Yields
    ------
    model : Drawn
        The next model.
    """
    generator = random.Random(f"{seed} {package}")
    names = sorted(_LISTS[package]())
    for name in generator.sample(names, len(names)):
        head = ""
        if package == "transformers":
            head = generator.choice(list_heads(name))
        yield Drawn(package, name, head)


def _list_transformers() -> list[str]:
    """Types of models that have a head."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return [name for name in CONFIG_MAPPING_NAMES if list_heads(name)]


def list_heads(name: str) -> list[str]:
    """Lists of transformers that have a type of model; the model without head only if no other has."""
    from transformers.models.auto import modeling_auto

    heads = [head for head in HEADS if name in getattr(modeling_auto, head)]
    return heads[:-1] if len(heads) > 1 else heads


def _list_torchvision() -> list[str]:
    """Models, without those that are quantised, which cannot be trained."""
    import torchvision  # type: ignore[import-not-found]

    names = torchvision.models.list_models()
    return [name for name in names if not name.startswith("quantized")]


def _list_timm() -> list[str]:
    """Models."""
    import timm  # type: ignore[import-not-found]

    return list(timm.list_models())


_LISTS: dict[str, Callable[[], list[str]]] = {
    "transformers": _list_transformers,
    "torchvision": _list_torchvision,
    "timm": _list_timm,
}


def list_attempts(drawn: Drawn) -> list[Attempt]:
    """Ways to build a model, the smallest first."""
    ways = WAYS if drawn.package == "transformers" else tuple(_EDGES)
    return [Attempt(way, has_labels) for way in ways for has_labels in (True, False)]


# -- configurations of transformers --------------------------------------------------------------


def _walk_configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside of it."""
    from transformers import PretrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _walk_configs(value)


def _shrink(config: Any, way: str) -> None:
    """Make a configuration smaller."""
    settings = vars(config)
    # several names may stand for one setting
    for name in [*_NAMES]:
        own = type(config).attribute_map.get(name, name)
        value = settings.get(own)
        kind = _NAMES[name]
        is_width = kind not in ("layers", "words")
        if type(value) is not int or (is_width and way != "all"):
            continue
        if value > _MOST[kind]:
            if kind == "layers":
                _cut_lists(config, value)
            setattr(config, own, _MOST[kind])
    for name, value in list(settings.items()):
        if name.endswith("depths") and isinstance(value, list | tuple):
            setattr(config, name, type(value)(min(depth, 2) for depth in value))
    _keep_tokens(config)


def _cut_lists(config: Any, layers: int) -> None:
    """Lists with an entry for each layer get as many as there are layers."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(config, name, value[: _MOST["layers"]])


def _keep_tokens(config: Any) -> None:
    """Special tokens stay inside of the vocabulary, each with a number of its own."""
    last = _MOST["words"]
    for name, value in list(vars(config).items()):
        is_token = name.endswith(("token_id", "token_index"))
        if is_token and type(value) is int and value >= _MOST["words"]:
            last -= 1
            setattr(config, name, last)


def _make_config(drawn: Drawn, way: str) -> Any:
    """The configuration of a drawn model."""
    import transformers

    config = transformers.AutoConfig.for_model(drawn.name)
    if "CTC" in drawn.head and config.vocab_size is None:
        config.vocab_size = 32
    if "SEQUENCE_CLASS" in drawn.head and config.pad_token_id is None:
        config.pad_token_id = 0
    for part in _walk_configs(config):
        for name in _DROPPED_LAYERS:
            if hasattr(part, name):
                setattr(part, name, 0.0)
    if way != "nothing":
        for part in _walk_configs(config):
            _shrink(part, way)
    return config


def _find(config: Any, name: str, usual: Any) -> Any:
    """A setting of a configuration, or of the first one inside of it that has it."""
    for part in _walk_configs(config):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return usual


def _find_edge(config: Any) -> int:
    """Edge of an image [pixels]."""
    edge = _find(config, "image_size", 64)
    if isinstance(edge, Mapping):
        edge = edge.get("height", 64)
    if isinstance(edge, list | tuple):
        edge = edge[0]
    return int(edge)


def _make_text(config: Any) -> Any:
    """Tokens, of which the last one of a sequence ends it, and no other one is a special one."""
    import torch

    words = min(int(_find(config, "vocab_size", _MOST["words"])), _MOST["words"])
    tokens = torch.randint(3, max(4, words - 32), (BATCH, TOKENS))
    end = _find(config, "eos_token_id", None)
    if isinstance(end, int):
        tokens[:, -1] = end
    return tokens


def _make_images(config: Any, kind: type) -> Any:
    """Images, or clips of a model that has frames."""
    import torch

    edge, channels = _find_edge(config), int(_find(config, "num_channels", 3))
    frames = _find(config, "num_frames", None) or _find(config, "frames_per_clip", None)
    is_video = frames is not None and "video" in inspect.getsource(kind).lower()
    if is_video:
        return torch.randn(BATCH, int(frames), channels, edge, edge)
    return torch.randn(BATCH, channels, edge, edge)


def _make_sound(config: Any, name: str) -> Any:
    """Waves, or features of them."""
    import torch

    bins = _find(config, "num_mel_bins", None)
    longest = _find(config, "max_source_positions", None)
    if name == "input_values":
        if bins is not None and _find(config, "max_length", None) is not None:
            return torch.randn(BATCH, int(_find(config, "max_length", 1024)), int(bins))
        return torch.randn(BATCH, 8000)
    if bins is not None and longest is not None and _find(config, "input_channels", None) is None:
        return torch.randn(BATCH, int(bins), 2 * int(longest))
    features = _find(config, "input_feat_per_channel", None) or bins
    features = features or _find(config, "feature_projection_input_dim", 80)
    return torch.randn(BATCH, 128, int(features))


def _make_labels(head: str, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Labels of a head."""
    import torch

    count = int(getattr(config, "num_labels", 2))
    if "QUESTION" in head:
        spans = torch.randint(TOKENS, (2, BATCH))
        return {"start_positions": spans[0], "end_positions": spans[1]}
    if any(word in head for word in _ONE_CLASS):
        return {"labels": torch.randint(count, (BATCH,))}
    if "TOKEN_CLASS" in head:
        return {"labels": torch.randint(count, (BATCH, TOKENS))}
    if "CTC" in head:
        return {"labels": torch.randint(1, 20, (BATCH, 8))}
    if "SEMANTIC" in head:
        images = given["pixel_values"]
        return {"labels": torch.randint(count, (BATCH, *images.shape[-2:]))}
    if "OBJECT" in head:
        boxes = torch.rand(3, 4) * 0.4 + 0.1
        target = {"class_labels": torch.randint(count, (3,)), "boxes": boxes}
        return {"labels": [target for _ in range(BATCH)]}
    if "input_ids" in given or "SEQ" in head:
        return {"labels": _make_text(config)}
    return {}


def _make_inputs(drawn: Drawn, config: Any, kind: type, has_labels: bool) -> dict[str, Any]:
    """Arguments of the forward pass, by the names that it has."""
    import torch

    names = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    main = getattr(kind, "main_input_name", "input_ids")
    needed = [
        name
        for name, parameter in names.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    wanted = {main, *needed[1:]}
    if "TEXT" not in drawn.head and {"input_ids", "pixel_values"} <= names.keys():
        is_pair = not hasattr(config, "text_config") or not _find(config, "image_token_id", None)
        wanted |= {"input_ids", "pixel_values"} if is_pair else {"input_ids"}
    inputs = dict[str, Any]()
    for name in names:
        if name not in wanted:
            continue
        if name in ("input_ids", "decoder_input_ids"):
            inputs[name] = _make_text(config)
        elif name in ("attention_mask", "decoder_attention_mask"):
            inputs[name] = torch.ones(BATCH, TOKENS, dtype=torch.long)
        elif name in ("pixel_values", "pixel_values_videos"):
            inputs[name] = _make_images(config, kind)
        elif name in ("input_values", "input_features"):
            inputs[name] = _make_sound(config, name)
        elif name == "bbox":
            inputs[name] = torch.zeros(BATCH, TOKENS, 4, dtype=torch.long)
    if has_labels:
        for name, value in _make_labels(drawn.head, config, inputs).items():
            if name in names:
                inputs[name] = value
    is_coupled = bool(getattr(config, "is_encoder_decoder", False))
    if "decoder_input_ids" in names and is_coupled and "labels" not in inputs:
        inputs["decoder_input_ids"] = _make_text(config)
    return inputs


def _list_results(out: Any) -> Iterator[Any]:
    """Tensors of a result that have a gradient."""
    import torch

    if isinstance(out, torch.Tensor):
        if out.requires_grad:
            yield out
    elif isinstance(out, Mapping):
        for value in out.values():
            yield from _list_results(value)
    elif isinstance(out, list | tuple):
        for value in out:
            yield from _list_results(value)


def find_loss(out: Any) -> Any:
    """The loss of a result: what the model computed, or the mean squares of all tensors in it."""
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss.mean()
    if isinstance(out, Mapping) and "loss" in out:
        return out["loss"].mean()
    results = list(_list_results(out))
    return sum(result.float().pow(2).mean() for result in results)


def _check_size(build: Callable[[], Any]) -> None:
    """Refuse a model that is too large, before it takes memory; a captured one takes none."""
    import torch
    from torch.overrides import _get_current_function_mode_stack

    if _get_current_function_mode_stack():
        return
    try:
        with torch.device("meta"):
            model = build()
    except NotImplementedError:  # it needs numbers; the limit of memory is left
        return
    weights = sum(weight.numel() for weight in model.parameters())
    if weights > MOST_WEIGHTS:
        raise MemoryError(f"it has {weights:,} weights, and {MOST_WEIGHTS:,} are the most")


def _build_transformers(drawn: Drawn, attempt: Attempt) -> tuple[Any, Callable[[Any], Any]]:
    """A model of transformers, and its loss."""
    import transformers
    from transformers.models.auto import modeling_auto

    class_name = getattr(modeling_auto, drawn.head)[drawn.name]
    if isinstance(class_name, list | tuple):
        class_name = class_name[0]
    kind = getattr(transformers, class_name)
    config = _make_config(drawn, attempt.way)
    inputs = _make_inputs(drawn, config, kind, attempt.has_labels)
    if attempt.way != "all":
        _check_size(partial(kind, config))
    return kind(config), partial(_call, inputs)


def _call(inputs: Mapping[str, Any], model: Any) -> Any:
    """The loss of a model of transformers."""
    return find_loss(model(**inputs))


def _build_timm(drawn: Drawn, attempt: Attempt) -> tuple[Any, Callable[[Any], Any]]:
    """A model of timm, and its loss. Images have the edge of its pre-trained weights, if it has no
    other one."""
    import timm
    import torch

    settings: dict[str, Any] = {}
    with torch.device("meta"):
        shape = timm.create_model(drawn.name).pretrained_cfg["input_size"]
    if attempt.way == "all":
        shape = (shape[0], _EDGES["all"], _EDGES["all"])
        kind = timm.model_entrypoint(drawn.name)
        try:
            with torch.device("meta"):
                kind(img_size=_EDGES["all"])
            settings["img_size"] = _EDGES["all"]
        except TypeError:  # it takes images of any size
            pass
    build = partial(timm.create_model, drawn.name, **settings)
    _check_size(build)
    images = torch.randn(BATCH, *shape)
    return build(), partial(_classify, images, attempt.has_labels)


def _classify(images: Any, has_labels: bool, model: Any) -> Any:
    """Cross-entropy of classes, or else a loss of all results."""
    import torch

    out = model(images)
    if has_labels:
        labels = torch.arange(BATCH) % out.shape[1]
        return torch.nn.functional.cross_entropy(out, labels)
    return find_loss(out)


def _build_torchvision(drawn: Drawn, attempt: Attempt) -> tuple[Any, Callable[[Any], Any]]:
    """A model of torchvision, and its loss."""
    import torch
    import torchvision

    kind = torchvision.models.get_model_builder(drawn.name)
    settings: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(kind).parameters:
        settings["weights_backbone"] = None
    edge = _EDGES[attempt.way]
    if drawn.name.startswith("vit"):
        settings["image_size"] = edge
    images = torch.randn(BATCH, 3, edge, edge)
    if ".video" in kind.__module__:
        images = torch.randn(BATCH, 3, 16, edge, edge)
    build = partial(kind, **settings)
    _check_size(build)
    loss: Callable[[Any], Any] = partial(_classify, images, attempt.has_labels)
    if ".detection" in kind.__module__:
        loss = partial(_detect, images, drawn.name)
    elif ".optical_flow" in kind.__module__:
        images = torch.randn(BATCH, 3, 128, 128)
        loss = partial(_follow_flow, images)
    return build(), loss


def _detect(images: Any, name: str, model: Any) -> Any:
    """The losses of a detector, whose images have two boxes each."""
    import torch

    boxes = torch.tensor([[10.0, 10.0, 30.0, 30.0], [20.0, 30.0, 60.0, 60.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 1])}
    if "mask" in name:
        target["masks"] = torch.ones(2, *images.shape[-2:], dtype=torch.uint8)
    if "keypoint" in name:
        target["keypoints"] = torch.full((2, 17, 3), 25.0)
    losses = model([*images], [dict(target) for _ in images])
    return sum(losses.values())


def _follow_flow(images: Any, model: Any) -> Any:
    """A loss of the flow between two images."""
    return find_loss(model(images, images.flip(0)))


_BUILDERS: dict[str, Callable[[Drawn, Attempt], tuple[Any, Callable[[Any], Any]]]] = {
    "transformers": _build_transformers,
    "torchvision": _build_torchvision,
    "timm": _build_timm,
}


def make_step(drawn: Drawn, attempt: Attempt) -> Callable[[], None]:
    """A training step: forward pass, loss, backward pass and AdamW.

    Parameters
    ----------
    drawn : Drawn
        The model.
    attempt : Attempt
        How it is built.

    Returns
    -------
    step : callable
        The step.
    """
    import torch

    torch.manual_seed(0)
    random.seed(0)
    model, compute_loss = _BUILDERS[drawn.package](drawn, attempt)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        compute_loss(model).backward()
        optimizer.step()

    return step
