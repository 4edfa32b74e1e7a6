"""What copies between a device and its host take, and updates of the host."""

from dataclasses import dataclass

import numpy as np

from perfkit.ground.units import Array, check_choice, format_rate
from perfkit.models.offload import COPY_INPUTS, FROM_HOST, HOST_WORK, TO_HOST, UPDATE_SHARE
from perfkit.platform.collective_costs import CollectiveCost
from perfkit.platform.estimates import CollectiveTime
from perfkit.platform.host_memory import SIGMA_COPY, SIGMA_UPDATE, find_host_memory, knows_host
from perfkit.platform.machine import Machine


@dataclass(frozen=True, eq=False, repr=False)
class HostCost(CollectiveCost):
    """Copies between a device and its host, and updates of the host, of one rank.

    Parameters
    ----------
    rate : float
        Bytes that all ranks of a link copy, or all ranks of a node read and write, over the time
        [B/s].
    spread : float
        Standard deviation of the logarithm of the time [-].
    name : str
        What is done.
    notes : tuple of str, optional
        What to say of the rate.
    """

    rate: float
    spread: float
    name: str
    notes: tuple[str, ...] = ()

    def time(self, nbytes: Array) -> Array:
        """Times of bytes of all ranks that share the link or the host [s]."""
        return np.asarray(nbytes, dtype=float) / self.rate

    def price(self, nbytes: Array) -> CollectiveTime:
        """Times with their parts and spread."""
        sizes = np.asarray(nbytes, dtype=float)
        return CollectiveTime(
            self.time(sizes),
            {"bytes": sizes / self.rate},
            f"{self.name} at {format_rate(self.rate, 'B/s')}",
            self.spread,
            self.notes,
        )


def _price_as_pageable(platform: Machine) -> HostCost:
    """Copies of inputs where nobody states what a copy of pinned memory reaches."""
    fit = platform.kernels["transfer"]
    rate = 1.0 / fit.parameters["nbytes"].value
    note = (
        f"copies of pinned memory are priced like those of other memory, at {format_rate(rate, 'B/s')}, as "
        f"{platform.name} does not state the link to its host; state it by .with_host_memory(...)"
    )
    return HostCost(rate, fit.spread, COPY_INPUTS, (note,))


def find_host_cost(platform: Machine, operation: str, ranks: int = 1) -> HostCost:
    """Find what prices work with the memory of the host.

    Parameters
    ----------
    platform : Machine
        Where it is done.
    operation : str
        One of `HOST_WORK`.
    ranks : int, optional
        Ranks of a node that copy their inputs at the same time [-].

    Returns
    -------
    cost : HostCost
        Sizes are those of all ranks that share a link, for copies, or a host, for updates; those of
        inputs are of one rank.

    Raises
    ------
    ValueError
        For a platform that does not know the memory of its host.
    """
    check_choice("operation", operation, HOST_WORK)
    if operation == COPY_INPUTS and not knows_host(platform) and "transfer" in platform.kernels:
        return _price_as_pageable(platform)
    memory = find_host_memory(platform)
    if operation == TO_HOST:
        return HostCost(memory.to_host.value, SIGMA_COPY, operation)
    if operation == COPY_INPUTS:
        rate = memory.from_host.value / min(memory.sharers, ranks)
        return HostCost(rate, SIGMA_COPY, operation)
    if operation == FROM_HOST:
        return HostCost(memory.from_host.value, SIGMA_COPY, operation)
    return HostCost(UPDATE_SHARE * memory.bandwidth.value, SIGMA_UPDATE, operation)
