"""Offload: what ranks copy to the memory of the host and back, and what the host updates."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, show
from perfkit.models.offload import THREAD_RATE, UPDATE_SHARE, host_update_bytes
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_memory import find_host_memory
from perfkit.platform.platform import Platform
from perfkit.prediction.micro_batches import Sizes
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Optimizers whose update on a host was published.
ON_HOST = ("adam", "adamw")


class OffloadSizes(NamedTuple):
    """Bytes of one number, times the ranks that use the same link or host at the same time.

    Parameters
    ----------
    fraction : array
        Share of the weights that the host updates; 0 without offload [-].
    gradient : array
        Of a gradient that is copied to the host behind its reduction [B].
    late_gradient : array
        Of one that is copied when the update begins, as by Megatron-LM [B].
    weight : array
        Of a weight that comes back after the update [B].
    update : array
        That the host reads and writes for a weight [B].
    shard : array
        Of a weight that is copied to the device before it is gathered [B].
    activation : array
        Of each byte that layers keep; 0 if it stays [-].
    in_turn : array of bool
        Whether gradients are copied, weights updated, and copied back one after the other [-].
    """

    fraction: Array
    gradient: Array
    late_gradient: Array
    weight: Array
    update: Array
    shard: Array
    activation: Array
    in_turn: np.ndarray


def check_offload(model: Transformer, s: Strategy) -> None:
    """Check that the host can update the weights of a model.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Raises
    ------
    ValueError
        For an optimizer whose update on a host nobody has published.
    """
    if np.any(s.offloads_optimizer) and model.optimizer not in ON_HOST:
        raise ValueError(
            f"optimizer is {show(model.optimizer)} and offload moves its states; updates on the host "
            f"are published for {' and '.join(ON_HOST)}; take one of these, or offload='none'"
        )


def note_offload(platform: Platform, s: Strategy) -> tuple[str, ...]:
    """Say what an offload rests on that nobody stated.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    s : Strategy
        A single one.

    Returns
    -------
    notes : tuple of str
        Sentences where the host is the usual one of the device, and where it updates with one thread.
    """
    if s.offload == "none":
        return ()
    notes = []
    if platform.host_memory is None:
        name = find_host_memory(platform).name
        notes.append(
            f"memory and links of the host are those of {name}, as usual for {platform.device.name}; "
            "state others with .with_host_memory(...)"
        )
    if s.offloads_optimizer and np.equal(s.host_threads, 1):
        notes.append(
            "a rank updates with one thread of its CPU, as torchrun starts several of a node; where "
            "OMP_NUM_THREADS is set, state host_threads of the strategy"
        )
    return tuple(notes)


def size_offload(model: Transformer, s: Strategy, sizes: Sizes, platform: Platform) -> OffloadSizes:
    """Find what is copied and updated for each weight of a rank.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.
    sizes : Sizes
        Sizes of a micro-batch.
    platform : Platform
        Where it runs.

    Returns
    -------
    sizes : OffloadSizes
        Bytes of one number.

    Raises
    ------
    ValueError
        For a platform that does not know the memory of its host, and for an optimizer whose update
        on a host nobody has published.

    Notes
    -----
    All ranks of a node copy and update at the same time: those of one link share it, and all share
    the host, of which a rank with few threads gets no more than these can read and write. DeepSpeed
    copies gradients and weights in the format of layers. Megatron-LM copies the sums of its buffers
    and fp32 weights, once all are reduced, so that nothing hides them; the host writes no narrow copy
    of them. FSDP2 copies shards of both in the format of the optimizer,
    casts on the device, and gathers.
    """
    shape = np.shape(s.ranks)
    none = np.zeros(shape)
    if not np.any(s.offloads_optimizer | s.offloads_activations):
        return OffloadSizes(
            fraction=none,
            gradient=none,
            late_gradient=none,
            weight=none,
            update=none,
            shard=none,
            activation=none,
            in_turn=np.zeros(shape, dtype=bool),
        )
    check_offload(model, s)
    memory = find_host_memory(platform)
    of_node = np.minimum(s.ranks, platform.network.ranks_per_node)
    of_link = np.minimum(memory.sharers, of_node)
    states = find_optimizer(model.optimizer).states
    update = np.where(
        s.buffers,
        host_update_bytes(1.0, states=states, wide=sizes.wide, narrow=sizes.wide),
        host_update_bytes(1.0, states=states, wide=sizes.wide, narrow=sizes.itemsize),
    )
    fraction = np.where(s.offloads_optimizer, s.offload_fraction, 0.0)
    gradient_of_stage = np.where(s.buffers, sizes.summed, sizes.itemsize)
    gradient = np.where(s.offloads_parameters, sizes.wide, gradient_of_stage)
    all_gradients = fraction * of_link * gradient
    weight_of_stage = np.where(s.buffers, sizes.wide, sizes.itemsize)
    weight = np.where(s.offloads_parameters, 0.0, weight_of_stage)
    return OffloadSizes(
        fraction=fraction,
        gradient=np.where(s.buffers, 0.0, all_gradients),
        late_gradient=np.where(s.buffers, all_gradients, 0.0),
        weight=fraction * of_link * weight,
        update=fraction * _count_sharers(s, of_node, memory.bandwidth.value) * update,
        shard=of_link * np.where(s.offloads_parameters, sizes.wide, 0.0),
        activation=of_link * np.where(s.offloads_activations, 1.0, 0.0),
        in_turn=np.broadcast_to(s.buffers & np.logical_not(s.overlap_host), shape),
    )


def _count_sharers(s: Strategy, of_node: Array, bandwidth: float) -> Array:
    """Ranks that share the host in an update, or more where a rank has so few threads that it gets
    less than its share of the bandwidth of the host [B/s] [-]."""
    of_threads = THREAD_RATE * np.asarray(s.host_threads, dtype=float)
    has_few = of_threads > 0
    as_many = UPDATE_SHARE * bandwidth / np.where(has_few, of_threads, 1.0)
    return np.where(has_few, np.maximum(of_node, as_many), of_node)
