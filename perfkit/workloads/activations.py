"""Activations between the two products of an MLP."""

from collections.abc import Callable
from typing import Any

from perfkit.workloads.layer_types import Gelu, Relu, Silu
from perfkit.workloads.tape import Layer

#: Layers by the name of the activation: GELU by the error function or by a hyperbolic tangent, the
#: rectifier, and SiLU.
ACTIVATIONS: dict[str, Callable[[], Layer]] = {
    "gelu": Gelu,
    "gelu_tanh": lambda: Gelu(tanh=True),
    "relu": Relu,
    "silu": Silu,
}


def make_activation(model: Any) -> Layer:
    """Make the activation of a Transformer.

    Parameters
    ----------
    model : Transformer
        The model.

    Returns
    -------
    activation : Layer
        The one that it names; if it names none, SiLU where it gates a second product, and else GELU:
        by a hyperbolic tangent as in GPT-2 if it is causal, by the error function as in BERT if not.
    """
    if model.activation:
        return ACTIVATIONS[model.activation]()
    if model.gated:
        return Silu()
    return Gelu(tanh=model.causal)
