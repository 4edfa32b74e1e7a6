"""What to time on a cluster of GPUs, and how often: the first step of its calibration."""

from dataclasses import replace

import numpy as np

from perfkit.ground.hardware import MemoryLevel
from perfkit.measure.probes import CollectiveProbe, KernelProbe, Probe, list_probes
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import resize_nodes

#: Time of the calls of one sample [s]; formulas, table 6.2.
_SAMPLE = 2e-3
#: Most calls of one sample [-]; formulas, table 6.2.
_MOST = 50


def resize_base(base: Named, ranks_per_node: int, nodes: int) -> Platform:
    """A platform with the ranks and nodes of a cluster; several nodes with other ranks than those of
    the platform keep only collectives that hold there."""
    platform = load_platform(base)
    if nodes > 1 and ranks_per_node != platform.network.ranks_per_node:
        return resize_nodes(platform, nodes, ranks_per_node)
    network = replace(platform.network, ranks_per_node=ranks_per_node, nodes=nodes)
    return replace(platform, network=network)


def plan_probes(base: Platform) -> list[Probe]:
    """Plan the probes of a cluster that is similar to a platform.

    Parameters
    ----------
    base : Platform
        Its device and network determine the probes, its predictions how often each is called.

    Returns
    -------
    plan : list of Probe
        Probes, with the calls of one sample.
    """
    last_cache, main_memory = base.device.memory[-2:]
    probes = list_probes(
        [*base.device.peaks],
        memory=_find_capacity(main_memory),
        cache=_find_capacity(last_cache),
        local=base.network.ranks_per_node,
        nodes=base.network.nodes,
    )
    with keep_quiet():
        return [_choose_calls(probe, base) for probe in probes]


def _find_capacity(level: MemoryLevel) -> float:
    """Size of a level of the memory; 1 GB where nobody knows it [B]."""
    return level.capacity.value if level.capacity else 1e9


def _choose_calls(probe: Probe, base: Platform) -> Probe:
    """A probe with as many calls as take the time of one sample on a similar platform; iterations
    run one by one."""
    if isinstance(probe, KernelProbe):  # estimated as a product with the same FLOP and bytes
        work = {
            "flops": probe.sizes["flops"],
            "nbytes": 12.0 * probe.sizes.get("elements", 0.0),
        }
        seconds = float(base.kernel_time("gemm", work, dtype=probe.dtype))
    elif isinstance(probe, CollectiveProbe):
        seconds = _estimate_collective(probe, base)
    else:
        return probe
    return replace(probe, calls=int(np.clip(_SAMPLE / seconds, 1, _MOST)))


def _estimate_collective(probe: CollectiveProbe, base: Platform) -> float:
    """Time of an all_reduce of this size, which takes longest of all collectives; where the similar
    platform has no times for these ranks, what its bytes take at least in the memory [s]."""
    try:
        return float(base.collective_time("all_reduce", probe.nbytes, ranks=probe.ranks))
    except ValueError:
        return probe.nbytes / base.device.main_bandwidth
