"""Offload of strategies: what copies to the host and its updates add to an iteration, and what then
lies where."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.offload import FROM_HOST, HOST_UPDATE, TO_HOST
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_costs import find_host_cost
from perfkit.prediction.micro_batches import count_shards
from perfkit.prediction.replicas import UnitMessages
from perfkit.prediction.strategy_case import Case, average_owners
from perfkit.prediction.strategy_hosts import Rounds
from perfkit.prediction.strategy_passes import Passes
from perfkit.workloads.columns import HeldMemory


def time_gradient_copies(case: Case) -> UnitMessages:
    """Time the copies of reduced gradients to the host.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    copies : UnitMessages
        Of the gradients of each unit that a rank holds after their reduction; those of experts are
        part of their layer [s].

    Notes
    -----
    Each copy follows the reduction of its unit in the same stream, as in FSDP2 and DeepSpeed.
    """
    return _copy_shards(case, TO_HOST, case.offload.gradient)


def time_shard_copies_of_host(case: Case) -> UnitMessages:
    """Time the copies of shards of weights from the host, before they are gathered.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    copies : UnitMessages
        Of the weights of each unit that a rank holds; those of experts are part of their layer [s].
    """
    return _copy_shards(case, FROM_HOST, case.offload.shard)


def _copy_shards(case: Case, operation: str, bytes_of_number: Array) -> UnitMessages:
    """Copies of the shards of each unit, by the bytes of one number [s]."""
    none = np.zeros(case.count)
    if not np.any(bytes_of_number > 0):
        return UnitMessages(none, none, none, none)
    s, sizes = case.s, case.sizes
    weights = case.times.list_by_region(lambda region: region.weights)
    cost = find_host_cost(case.platform, operation)
    experts = np.where(case.has_experts, sizes.experts, 0.0)
    layer = count_shards(weights.layer, experts, owners=s.owners, sharers=sizes.sharers)
    embeddings, head = weights.embeddings / s.owners, weights.head / s.owners
    # replicas of the whole model send both ends in one message
    together = case.shards_alone
    return UnitMessages(
        embeddings=cost.time(bytes_of_number * np.where(together, embeddings + head, embeddings)),
        layer=cost.time(bytes_of_number * layer),
        head=cost.time(bytes_of_number * np.where(together, 0.0, head)),
        experts=none,
    )


def count_copies(case: Case, rounds: Rounds) -> Array:
    """Count what the host of replicas of the whole model launches for an offload.

    Parameters
    ----------
    case : Case
        Strategies.
    rounds : Rounds
        How often all is exchanged.

    Returns
    -------
    copies : array
        Copies of gradients, of shards of weights and of activations in an iteration, and its own
        update [-].
    """
    offload = case.offload
    units = case.layers + 1.0
    gradients = np.where(offload.gradient > 0, rounds.reduced * units, 0.0)
    shards = rounds.gathered * units + rounds.regathered * case.layers
    shards = np.where(offload.shard > 0, shards, 0.0)
    activations = 2.0 * case.micro * (case.layers - 1.0)
    activations = np.where(offload.activation > 0, activations, 0.0)
    updates = np.where(offload.update > 0, 1.0, 0.0) + np.where(offload.weight > 0, 1.0, 0.0)
    return gradients + shards + activations + updates


class ActivationCopies(NamedTuple):
    """What copies of activations to the host and back add [s].

    Parameters
    ----------
    total : array
        To an iteration [s].
    forward, backward : array
        To the passes of a layer, in the mean of all [s].
    """

    total: Array
    forward: Array
    backward: Array

    def lengthen(self, passes: Passes) -> Passes:
        """Passes whose layers wait for these copies."""
        forward, backward = passes.forward, passes.backward
        ahead = forward.layer._replace(device=forward.layer.device + self.forward)
        back = backward.layer._replace(device=backward.layer.device + self.backward)
        return Passes(forward._replace(layer=ahead), backward._replace(layer=back))


def time_activation_copies(
    case: Case, passes: Passes, kept: Array, host: Array
) -> ActivationCopies:
    """Time that copies of activations to the host and back add to an iteration.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : Passes
        Passes of a micro-batch through each region.
    kept : array
        What a layer keeps for its backward pass [B].
    host : array
        What the host of a single stage adds to an iteration [s].

    Returns
    -------
    copies : ActivationCopies
        What no pass hides.

    Notes
    -----
    Of L layers whose forward and backward passes take f and b, L - 1 are copied to the host in c and
    back in u, in one queue. A layer waits until that before the last one has left; while a layer runs
    backward the one before it comes back. The forward pass takes (L - 2) max(c - f, 0) longer, with
    max(c - f, 0) left behind it, which the head hides in part. The backward pass takes
    max(left + u - b, 0) + (L - 2) max(u - b, 0) longer.
    """
    none = np.zeros(case.count)
    if not np.any(case.offload.activation > 0):
        return ActivationCopies(none, none, none)
    nbytes = case.offload.activation * kept
    away = find_host_cost(case.platform, TO_HOST).time(nbytes)
    back = find_host_cost(case.platform, FROM_HOST).time(nbytes)
    of_unit = host / case.micro / (2.0 * (case.layers + 2.0))
    forward = passes.forward.layer.device + of_unit
    backward = passes.backward.layer.device + of_unit
    head = passes.forward.head.device + passes.backward.head.device + 2.0 * of_unit
    later = np.maximum(case.layers - 2.0, 0.0)
    late = np.maximum(away - forward, 0.0)
    left = np.maximum(late - head, 0.0)
    first = np.maximum(left + back - backward, 0.0)
    leaves = (case.layers > 1) & (nbytes > 0)
    in_forward = np.where(leaves, later * late, 0.0)
    in_backward = np.where(leaves, first + later * np.maximum(back - backward, 0.0), 0.0)
    return ActivationCopies(
        total=case.micro * (in_forward + in_backward),
        forward=in_forward / case.layers,
        backward=in_backward / case.layers,
    )


def time_host_update(case: Case, updated: Array) -> Array:
    """Time of the update on the host, with the copies that are sent when it begins and after it.

    Parameters
    ----------
    case : Case
        Strategies.
    updated : array
        Trained numbers that a rank updates, on its host and its device [-].

    Returns
    -------
    time : array
        The longer of update and copies, which are sent tile by tile; their sum where they take turns
        [s].
    """
    if not np.any(case.offload.fraction > 0):
        return np.zeros(case.count)
    update = find_host_cost(case.platform, HOST_UPDATE).time(case.offload.update * updated)
    away = find_host_cost(case.platform, TO_HOST).time(case.offload.late_gradient * updated)
    back = find_host_cost(case.platform, FROM_HOST).time(case.offload.weight * updated)
    copies = away + back
    return np.where(case.offload.in_turn, update + copies, np.maximum(update, copies))


def move_held(
    case: Case, held: HeldMemory, shards: Array, *, whole_buffers: np.ndarray
) -> HeldMemory:
    """Move what is offloaded out of the memory of the device.

    Parameters
    ----------
    case : Case
        Strategies.
    held : HeldMemory
        What a rank would hold without offload.
    shards : array
        Trained numbers of its stage that it updates [-].
    whole_buffers : array of bool
        Whether weights and gradients stay whole on the device, as in Megatron-LM [-].

    Returns
    -------
    held : HeldMemory
        What stays on the device.

    Notes
    -----
    The optimizer's states leave, and fp32 weights with them. Megatron-LM keeps these, and its buffers
    of gradients, on the device, and the host has copies of them. Elsewhere reduced gradients
    leave, too, and shards of weights stay in the format of layers where no whole weights are kept.
    """
    fraction = case.offload.fraction
    if not np.any(fraction > 0):
        return held
    s, sizes = case.s, case.sizes
    has_masters = s.buffers & (sizes.wide > sizes.itemsize)
    masters = np.where(has_masters, sizes.wide * shards, 0.0)
    masters = np.minimum(masters, held.states)
    states = masters + (1.0 - fraction) * (held.states - masters)
    narrow = np.where((s.zero > 2) & ~s.offloads_parameters, sizes.itemsize * shards, 0.0)
    parameters = (1.0 - fraction) * held.parameters + fraction * narrow
    reduced = np.minimum(held.gradients, sizes.wide * shards)
    gradients = held.gradients - fraction * reduced
    moved = fraction > 0
    return held._replace(
        parameters=np.where(moved & ~whole_buffers, parameters, held.parameters),
        gradients=np.where(moved & ~whole_buffers, gradients, held.gradients),
        states=np.where(moved, states, held.states),
        workspace=np.where(moved, (1.0 - fraction) * held.workspace, held.workspace),
    )


def measure_host(case: Case, kept: Array) -> Array:
    """Memory of the host that a rank takes.

    Parameters
    ----------
    case : Case
        Strategies.
    kept : array
        What a layer keeps for its backward pass [B].

    Returns
    -------
    memory : array
        Weights, gradients and states of the shards of the largest stage, in the format of the
        optimizer, and what all layers but the last one keep [B].
    """
    memory = np.zeros(case.count)
    if np.any(case.offload.fraction > 0):
        states = find_optimizer(case.model.optimizer).states
        shards = case.weights / average_owners(case, case.layers, case.weights)
        memory = case.offload.fraction * case.sizes.wide * (2.0 + states) * shards
    activations = np.where(case.s.offloads_activations, (case.layers - 1.0) * kept, 0.0)
    return np.asarray(memory + activations)
