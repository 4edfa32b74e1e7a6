"""Ends of a Transformer that sees images, as one rank records them: patches ahead of its layers, and
classes behind them (ViT, arXiv:2010.11929, section 3.1)."""

from typing import Any

from perfkit.workloads import layers
from perfkit.workloads.images import CHANNELS
from perfkit.workloads.layer_types import Add, PrependToken, TakeFirst
from perfkit.workloads.operations import Tensor
from perfkit.workloads.rank_share import RankShare
from perfkit.workloads.tape import Tape


def embed_images(tape: Tape, model: Any, share: RankShare) -> Tensor:
    """Vectors of the patches of images behind that of the class, plus those of positions.

    Ranks that share layers compute them alike, as those of Megatron-LM do
    (``megatron/legacy/model/vision/vit_backbone.py``).
    """
    hidden, inputs = model.hidden, CHANNELS * model.patch**2
    places = share.sequence - 1
    token = tape.parameter(hidden)
    positions = tape.parameter(model.positions, hidden)
    weight, bias = tape.parameter(hidden, inputs), tape.parameter(hidden)
    images = tape.tensor(share.batch, places * inputs, itemsize=tape.wide)
    x = layers.embed_patches(tape, images, weight, bias, places)
    layers.count_views(tape, 3)  # of patches: flat, and transposed; of the token: for each image
    x = tape.apply(PrependToken(), token, x)
    return tape.apply(Add(), x, positions)


def classify_images(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """The loss of the classes of images, from the vector of the class behind a norm of all."""
    first = tape.apply(TakeFirst(), layers.norm(tape, model.norm, x))
    weight, bias = tape.parameter(model.classes, model.hidden), tape.parameter(model.classes)
    return layers.cross_entropy(tape, layers.linear(tape, first, weight, bias), share.batch)
