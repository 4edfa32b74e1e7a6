"""What copies between a device and its host take, and updates of the host."""

from dataclasses import dataclass

import numpy as np

from perfkit.ground.units import Array, check_choice, format_rate
from perfkit.models.offload import COPY_INPUTS, FROM_HOST, HOST_WORK, TO_HOST, UPDATE_SHARE
from perfkit.platform.collective_costs import CollectiveCost
from perfkit.platform.estimates import CollectiveTime
from perfkit.platform.host_memory import SIGMA_COPY, SIGMA_UPDATE, find_host_memory
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
    """

    rate: float
    spread: float
    name: str

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
        )


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
    memory = find_host_memory(platform)
    if operation == TO_HOST:
        return HostCost(memory.to_host.value, SIGMA_COPY, operation)
    if operation == COPY_INPUTS:
        rate = memory.from_host.value / min(memory.sharers, ranks)
        return HostCost(rate, SIGMA_COPY, operation)
    if operation == FROM_HOST:
        return HostCost(memory.from_host.value, SIGMA_COPY, operation)
    return HostCost(UPDATE_SHARE * memory.bandwidth.value, SIGMA_UPDATE, operation)
