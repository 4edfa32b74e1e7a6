"""What one rank works on, and how it exchanges tokens with the ranks that share its layers."""

from typing import Any, NamedTuple

import numpy as np

from perfkit.workloads import layers
from perfkit.workloads.frozen_formats import FROZEN_FORMATS
from perfkit.workloads.operations import Tensor
from perfkit.workloads.tape import Tape

#: Communicator of ranks that share products of an expert; that of ranks that share layers is 0.
SHARING_EXPERT = 3


class RankShare(NamedTuple):
    """What one rank works on, and how many ranks share each part of the work.

    Parameters
    ----------
    batch, sequence : int or array
        Sequences of a micro-batch, and tokens of each sequence on this rank [-].
    tensor : int or array
        Ranks that share the products of a layer [-].
    rows : int or array
        Ranks that share the tokens of all other operations: 1, or as many as share products [-].
    context : int or array
        Ranks that share the tokens of a sequence [-].
    experts : int or array
        Ranks that share the experts of a layer [-].
    expert_tensor : int or array
        Ranks that share the products of an expert, if all ranks of a stage share experts; else they
        are those of `tensor` [-].
    spreads_experts : bool
        Whether all ranks of a stage share experts: each sends its own tokens.
    reorders : bool
        Whether tokens are put into the order of experts once they are there, and back.
    load : float or array
        Tokens of the busiest rank over those of the average one [-].
    """

    batch: Any
    sequence: Any
    tensor: Any = 1
    rows: Any = 1
    context: Any = 1
    experts: Any = 1
    expert_tensor: Any = 1
    spreads_experts: bool = False
    reorders: bool = False
    load: Any = 1.0

    def part(self, size: Any) -> Any:
        """The share of one rank in a size that ranks split, rounded up."""
        return -(-size // self.tensor) if np.any(self.tensor > 1) else size

    def part_of_expert(self, size: Any) -> Any:
        """The share of one rank in a size of an expert that ranks split, rounded up."""
        if self.spreads_experts:
            return -(-size // self.expert_tensor)
        return self.part(size)

    def words(self, model: Any) -> Any:
        """Words of the vocabulary of one rank, which is padded to a multiple on each."""
        multiple = model.vocabulary_multiple
        if multiple == 1:
            return self.part(model.vocabulary)
        most = multiple * self.tensor
        return (model.vocabulary + (most - 1)) // most * multiple


def exchange_tokens(tape: Tape, x: Tensor, share: RankShare, *, ahead: bool) -> Tensor:
    """Communicate `ahead` of products that ranks share, or behind them.

    Ahead of them a rank gathers the tokens of all ranks, if these share tokens. Behind them ranks
    sum up their parts. In the backward pass it is the other way round.
    """
    if not np.any(share.tensor > 1):
        return x
    if not np.any(share.rows > 1):
        if ahead:
            tape.node(lambda: tape.collective("all_reduce", [], [], nbytes=x.nbytes))
        else:
            tape.collective("all_reduce", [x], [x], nbytes=x.nbytes)
        return x
    rows = 1 if ahead else share.rows
    shape = (share.batch, share.sequence // rows, x.shape[-1])
    out = tape.tensor(*shape, itemsize=x.itemsize, needs_gradient=True)
    out.root = x.root
    if ahead:
        tape.collective("all_gather", [x], [out], nbytes=out.nbytes)
        tape.node(lambda: tape.collective("reduce_scatter", [], [], nbytes=out.nbytes))
    else:
        tape.collective("reduce_scatter", [x], [out], nbytes=x.nbytes)
        tape.node(lambda: tape.collective("all_gather", [], [], nbytes=x.nbytes))
    return out


#: Which field of a model says whether a product has a bias.
_BIASES = {
    "qkv_proj": "qkv_bias",
    "q_proj": "qkv_bias",
    "k_proj": "qkv_bias",
    "v_proj": "qkv_bias",
    "o_proj": "output_bias",
    "gate_up_proj": "mlp_bias",
    "gate_proj": "mlp_bias",
    "up_proj": "mlp_bias",
    "down_proj": "mlp_bias",
}


def project(tape: Tape, model: Any, x: Tensor, width: Any, name: str = "") -> Tensor:
    """A linear layer, with a bias if the model has biases or says so of this product, and an adapter if the model has one on
    products of this `name`."""
    weight = tape.parameter(width, x.shape[-1])
    if model.frozen_format and tape.layer is not None and not weight.needs_gradient:
        weight.freeze_as(FROZEN_FORMATS[model.frozen_format])
    has_bias = None
    if name in _BIASES:
        has_bias = getattr(model, _BIASES[name])
    if has_bias is None:
        has_bias = model.bias
    bias = tape.parameter(width) if has_bias else None
    fp8 = model.dtype == "fp8" and tape.layer is not None
    y = layers.linear(tape, x, weight, bias, fp8=fp8)
    if name in model.adapted:
        return layers.add_adapter(tape, model.lora_rank, x, y)
    return y
