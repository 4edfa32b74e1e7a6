"""Offload of strategies: what copies to the host and its updates add to an iteration, and what then
lies where."""

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.offload import FROM_HOST, HOST_UPDATE, TO_HOST
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_memory import find_host_cost
from perfkit.prediction.replicas import UnitMessages
from perfkit.prediction.strategy_case import Case, average_owners
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
    none = np.zeros(case.count)
    if not np.any(case.offload.fraction > 0):
        return UnitMessages(none, none, none, none)
    s, sizes = case.s, case.sizes
    weights = case.times.list_by_region(lambda region: region.weights)
    cost = find_host_cost(case.platform, TO_HOST)
    experts = np.where(case.has_experts, sizes.experts, 0.0)
    layer = (weights.layer - experts) / s.owners + experts / sizes.sharers
    embeddings, head = weights.embeddings / s.owners, weights.head / s.owners
    # replicas of the whole model send both ends in one message
    together = case.shards_alone
    each = case.offload.gradient
    return UnitMessages(
        embeddings=cost.time(each * np.where(together, embeddings + head, embeddings)),
        layer=cost.time(each * layer),
        head=cost.time(each * np.where(together, 0.0, head)),
        experts=none,
    )


def time_host_update(case: Case, updated: Array) -> Array:
    """Time of the update on the host, beside which its weights come back.

    Parameters
    ----------
    case : Case
        Strategies.
    updated : array
        Trained numbers that a rank updates, on its host and its device [-].

    Returns
    -------
    time : array
        The longer of update and copy, which is sent tile by tile [s].
    """
    if not np.any(case.offload.fraction > 0):
        return np.zeros(case.count)
    update = find_host_cost(case.platform, HOST_UPDATE).time(case.offload.update * updated)
    back = find_host_cost(case.platform, FROM_HOST).time(case.offload.weight * updated)
    return np.asarray(np.maximum(update, back))


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
    keeps_masters = s.buffers
    masters = np.where(keeps_masters & (sizes.wide > sizes.itemsize), sizes.wide * shards, 0.0)
    masters = np.minimum(masters, held.states)
    states = masters + (1.0 - fraction) * (held.states - masters)
    narrow = np.where(s.zero > 2, sizes.itemsize * shards, 0.0)
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


def measure_host(case: Case) -> Array:
    """Memory of the host that a rank takes.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    memory : array
        Weights, gradients and states of the shards of the largest stage, in the format of the
        optimizer [B].
    """
    if not np.any(case.offload.fraction > 0):
        return np.zeros(case.count)
    states = find_optimizer(case.model.optimizer).states
    shards = case.weights / average_owners(case, case.layers, case.weights)
    return np.asarray(case.offload.fraction * case.sizes.wide * (2.0 + states) * shards)
