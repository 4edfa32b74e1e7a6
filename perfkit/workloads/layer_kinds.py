"""Kinds of layers of a Transformer: its first layers may be dense, only every second may hold
experts, or attend to all tokens."""

from typing import Any, NamedTuple

from perfkit.workloads.sizes import alter


class LayerKind(NamedTuple):
    """Layers of a Transformer that do the same.

    Parameters
    ----------
    model : Transformer
        The model as if all of its layers were such.
    layers : tuple of int
        Which layers of the model are, from 0 [-].
    """

    model: Any
    layers: tuple[int, ...]


def has_unlike_layers(model: Any) -> bool:
    """Whether a Transformer has several kinds of layers."""
    takes_turns = model.experts > 0 and (model.dense_layers > 0 or model.expert_interval > 1)
    return bool(takes_turns or model.global_interval > 0)


def list_kinds(model: Any) -> tuple[LayerKind, ...]:
    """List the kinds of layers of a Transformer.

    Parameters
    ----------
    model : Transformer
        The model.

    Returns
    -------
    kinds : tuple of LayerKind
        The kind of most layers first, and of equally many that with experts; together they hold each
        layer once.
    """
    if not has_unlike_layers(model):
        return (LayerKind(model, tuple(range(model.all_layers))),)
    layers: dict[tuple[bool, bool], list[int]] = {}
    for layer in range(model.all_layers):
        forms = (has_experts(model, layer), has_window(model, layer))
        layers.setdefault(forms, []).append(layer)
    kinds = []
    for experts, window in sorted(layers, reverse=True):
        of_kind = _make_uniform(model, experts=experts, window=window)
        kinds.append(LayerKind(of_kind, tuple(layers[experts, window])))
    kinds.sort(key=lambda kind: len(kind.layers), reverse=True)
    return tuple(kinds)


def has_experts(model: Any, layer: int) -> bool:
    """Whether a layer of a Transformer has experts.

    Parameters
    ----------
    model : Transformer
        The model.
    layer : int
        Number of the layer, from 0 [-].

    Returns
    -------
    has_experts : bool
        Not if it is one of the first, which are dense; and of the others only the last one of each
        `expert_interval`, counted from the first layer of the model.
    """
    if model.experts == 0 or layer < model.dense_layers:
        return False
    return bool((layer + 1) % model.expert_interval == 0)


def has_window(model: Any, layer: int) -> bool:
    """Whether attention of a layer of a Transformer sees a window of tokens alone.

    Parameters
    ----------
    model : Transformer
        The model.
    layer : int
        Number of the layer, from 0 [-].

    Returns
    -------
    has_window : bool
        Not if the model has no window, or if it is the last one of each `global_interval` layers.
    """
    if model.window == 0:
        return False
    return model.global_interval == 0 or bool((layer + 1) % model.global_interval > 0)


def find_layer_models(model: Any) -> list[Any]:
    """Find the model of the kind of each layer, see `LayerKind`, in the order of layers."""
    by_layer = {layer: kind.model for kind in list_kinds(model) for layer in kind.layers}
    return [by_layer[layer] for layer in range(model.all_layers)]


def _make_uniform(model: Any, *, experts: bool, window: bool) -> Any:
    """The model as if all of its layers had experts and a window, or none of them."""
    changes: dict[str, Any] = {"dense_layers": 0, "expert_interval": 1, "global_interval": 0}
    if not window:
        changes["window"] = 0
    if not experts:
        changes |= {
            "experts": 0,
            "top_k": 1,
            "capacity": 1.0,
            "imbalance": 0.0,
            "expert_width": 0,
            "shared_experts": 0,
            "shared_width": 0,
            "shared_gate": False,
            "expert_bias": False,
        }
    return alter(model, changes)
