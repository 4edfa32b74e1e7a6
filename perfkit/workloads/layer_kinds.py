"""Kinds of layers of a Transformer: its first layers may be dense, or only every second may hold
experts."""

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
    return model.experts > 0 and (model.dense_layers > 0 or model.expert_interval > 1)


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
    layers = range(model.layers)
    if not has_unlike_layers(model):
        return (LayerKind(model, tuple(layers)),)
    with_experts = tuple(layer for layer in layers if has_experts(model, layer))
    dense = tuple(layer for layer in layers if not has_experts(model, layer))
    kinds = [
        LayerKind(alter(model, {"dense_layers": 0, "expert_interval": 1}), with_experts),
        LayerKind(_leave_out_experts(model), dense),
    ]
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


def find_layer_models(model: Any) -> list[Any]:
    """Find the model of the kind of each layer, see `LayerKind`, in the order of layers."""
    by_layer = {layer: kind.model for kind in list_kinds(model) for layer in kind.layers}
    return [by_layer[layer] for layer in range(model.layers)]


def _leave_out_experts(model: Any) -> Any:
    """The model as if all of its layers were dense."""
    without = {
        "experts": 0,
        "top_k": 1,
        "capacity": 1.0,
        "imbalance": 0.0,
        "expert_width": 0,
        "shared_experts": 0,
        "shared_width": 0,
        "shared_gate": False,
        "dense_layers": 0,
        "expert_interval": 1,
    }
    return alter(model, without)
