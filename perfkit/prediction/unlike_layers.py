"""Closed forms of models whose layers are of several kinds: what a mean layer takes, and layers that
go with the embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.kept import BackwardMoments, Moment, Moments
from perfkit.prediction.micro_batches import MicroBatchTimes, RegionTimes, Sizes
from perfkit.prediction.strategy_records import map_arrays
from perfkit.workloads.layer_kinds import LayerKind
from perfkit.workloads.strategy import Strategy, spread_chunks
from perfkit.workloads.transformer import Transformer


class PricedKind(NamedTuple):
    """A kind of layers, with the sizes and the times of a micro-batch of a model that has no other
    layers."""

    kind: LayerKind
    sizes: Sizes
    times: MicroBatchTimes


class LayerMix(NamedTuple):
    """What closed forms take for the layers of a model.

    Parameters
    ----------
    s : Strategy
        Strategies; the layers of their first stages are without those that go with the embeddings.
    layers : array
        Layers of the model without these [-].
    leading : array
        Layers that go with the embeddings [-].
    leading_saved : array
        Activations that these keep for the backward pass of a micro-batch [B].
    experts_share : array
        Share of the other layers that has experts [-].
    sizes : Sizes
        Those of the kinds with the largest messages; numbers of experts are those of a mean layer.
    times : MicroBatchTimes
        One micro-batch; a layer is the mean of all, and embeddings hold those that go with them.
    """

    s: Strategy
    layers: Array
    leading: Array
    leading_saved: Array
    experts_share: Array
    sizes: Sizes
    times: MicroBatchTimes


def mix_layers(model: Transformer, kinds: Sequence[PricedKind], s: Strategy) -> LayerMix:
    """Mix the layers of a model.

    Parameters
    ----------
    model : Transformer
        The model.
    kinds : sequence of PricedKind
        All kinds of its layers.
    s : Strategy
        Each field an array.

    Returns
    -------
    mix : LayerMix
        Arrays with an element for each strategy.

    Notes
    -----
    Stages of a pipeline are timed by equal layers. The first dense layers of a model are not spread
    over stages: all of them are on the first one, with the embeddings. Where there is one stage, a layer is
    the mean of all, as it is of kinds that take turns.
    """
    count = len(np.atleast_1d(s.ranks))
    none = np.zeros(count)
    if len(kinds) == 1:
        share = 1.0 if model.experts else 0.0
        [only] = kinds
        return LayerMix(
            s, np.full(count, model.all_layers), none, none, np.full(count, share), *only[1:]
        )
    with_embeddings = np.broadcast_to(np.greater(s.pp, 1), count)
    leading = np.where(with_embeddings, model.dense_layers, 0)
    first = spread_chunks(model.all_layers, s).add_up(s, 0)
    counts = []
    leading_counts = []
    for kind, _, _ in kinds:
        first_ones = sum(1 for layer in kind.layers if layer < model.dense_layers)
        leading_counts.append(np.where(with_embeddings, first_ones, 0))
        counts.append(len(kind.layers) - leading_counts[-1])
    layers = model.all_layers - leading
    shares = [layers_of_kind / layers for layers_of_kind in counts]
    of_embeddings = [kind.times.layer for kind in kinds]
    return LayerMix(
        s=replace(s, first_layers=np.where(leading > 0, first - leading, s.first_layers)),
        layers=layers,
        leading=leading,
        leading_saved=_add_up([region.saved for region in of_embeddings], leading_counts),
        experts_share=_add_up([1.0 * (kind.kind.model.experts > 0) for kind in kinds], shares),
        sizes=_mix_sizes([kind.sizes for kind in kinds], shares),
        times=_mix_times([kind.times for kind in kinds], shares, leading_counts),
    )


def _add_up(values: Sequence[Any], weights: Sequence[Array]) -> Array:
    """Sum of arrays, each times its weight."""
    total = np.zeros(np.shape(weights[0]))
    for value, weight in zip(values, weights, strict=True):
        total = total + weight * value
    return total


def _add_up_records(records: Sequence[Any], weights: Sequence[Array]) -> Any:
    """Sum of records, field by field, each times its weight."""
    return map_arrays(lambda *values: _add_up(values, weights), *records)


def _mix_sizes(sizes: Sequence[Sizes], shares: Sequence[Array]) -> Sizes:
    """Sizes of the kinds with the largest messages, with the experts of a mean layer."""
    return sizes[0]._replace(
        tokens=np.maximum.reduce([of_kind.tokens for of_kind in sizes]),
        routed=np.maximum.reduce([of_kind.routed for of_kind in sizes]),
        load=np.maximum.reduce([of_kind.load for of_kind in sizes]),
        experts=_add_up([of_kind.experts for of_kind in sizes], shares),
        reordered=_add_up([of_kind.reordered for of_kind in sizes], shares),
        reorders=_add_up([of_kind.reorders for of_kind in sizes], shares),
    )


def _mix_times(
    times: Sequence[MicroBatchTimes], shares: Sequence[Array], leading: Sequence[Array]
) -> MicroBatchTimes:
    """A micro-batch whose layers are the mean of all kinds, and some of which go with the
    embeddings."""
    most_common = times[0]
    layer = _add_up_records([of_kind.layer for of_kind in times], shares)
    leading_layers = _add_up_records([of_kind.layer for of_kind in times], leading)
    leading_copies = _add_up_records([of_kind.layer_copies for of_kind in times], leading)
    embeddings = map_arrays(np.add, most_common.embeddings, leading_layers)
    return most_common._replace(
        embeddings=embeddings._replace(saved=most_common.embeddings.saved),
        layer=layer,
        attention=_add_up_records([of_kind.attention for of_kind in times], shares),
        weight_gradients=_add_up_records([of_kind.weight_gradients for of_kind in times], shares),
        layer_copies=_add_up_records([of_kind.layer_copies for of_kind in times], shares),
        end_copies=map_arrays(np.add, most_common.end_copies, leading_copies),
        reorder=_add_up_records([of_kind.reorder for of_kind in times], shares),
        buckets=_add_up_records([of_kind.buckets for of_kind in times], shares),
        moments=map_arrays(
            lambda *fullest: np.maximum.reduce(np.broadcast_arrays(*fullest)),
            *(_keep_mean(of_kind.moments, of_kind.layer, layer) for of_kind in times),
        ),
        spread=_add_up([of_kind.spread for of_kind in times], shares),
    )


def _keep_mean(moments: Moments, layer: RegionTimes, mean: RegionTimes) -> Moments:
    """Fullest moments of a kind if its recorded layer kept what the mean of layers keeps."""
    more = mean.saved - layer.saved

    def add(moment: Moment) -> Moment:
        return moment._replace(activations=moment.activations + more)

    def add_to_pass(backward: BackwardMoments) -> BackwardMoments:
        return backward._replace(head=add(backward.head), layer=add(backward.layer))

    forward = moments.forward
    return Moments(
        forward=forward._replace(layer=forward.layer + more, head=forward.head + more),
        until_sum=add_to_pass(moments.until_sum),
        until_reduction=add_to_pass(moments.until_reduction),
        until_update=add_to_pass(moments.until_update),
    )
