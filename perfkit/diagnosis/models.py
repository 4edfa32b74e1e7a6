"""Platforms that give the times of a run, each made once, and times that several runs ask for."""

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.collectives import bus_factor
from perfkit.platform.file import list_gallery
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform

#: Share of the line rate that rings of GPUs without NVLink reach over PCIe, and its spread: 12 to 25.8
#: of 31.5 GB/s over PCIe 4.0 (NVIDIA/nccl#766, tinygrad/open-gpu-kernel-modules#36), 25.8 of 63 over
#: PCIe 5.0 (the gallery's rtx-pro-6000-8). The 80 % interval is 0.40 to 0.82, these are 0.38 to 0.82 [-].
_PCIE_SHARE = 0.57
PCIE = 0.28
#: Message of which bytes alone count [B].
_LARGEST = 2.0**36


@dataclass(frozen=True, eq=False)
class Model:
    """A platform that gives times; two are the same only if they are one, so that times can be kept.

    Parameters
    ----------
    platform : Platform
        The platform.
    is_measured : bool
        Whether its collectives were measured on such devices.
    """

    platform: Platform
    is_measured: bool = True


@lru_cache(maxsize=256)
def build_node(system: str, ranks: int) -> Model:
    """Build one node with links between its devices: the gallery's, else by the datasheet.

    Parameters
    ----------
    system : str
        Name of the datasheet.
    ranks : int
        Ranks of the node [-].

    Returns
    -------
    model : Model
        The node.
    """
    # boards whose GPUs differ in memory alone have the same links
    for name in (system, system.removesuffix("-40gb")):
        platform = _find_node_of_gallery(name)
        if platform is not None and ranks <= platform.network.ranks_per_node:
            if ranks < platform.network.ranks_per_node:
                platform = platform.with_nodes(1, ranks_per_node=ranks)
            return Model(platform)
    return Model(Platform.from_datasheet(system, ranks=max(2, ranks)), is_measured=False)


@lru_cache(maxsize=256)
def add_nodes(model: Model, nodes: int) -> Model:
    """Add nodes to a platform of one.

    Parameters
    ----------
    model : Model
        The platform.
    nodes : int
        Nodes [-].

    Returns
    -------
    model : Model
        The platform with so many nodes.

    Raises
    ------
    ValueError
        For a platform that knows no link between nodes.
    """
    return Model(model.platform.with_nodes(nodes), model.is_measured)


@lru_cache(maxsize=256)
def build_cards(system: str, ranks: int, slot: float) -> Model:
    """Build one node of cards that PCIe alone joins, with direct copies between them.

    Parameters
    ----------
    system : str
        Name of the datasheet.
    ranks : int
        Ranks of the node [-].
    slot : float
        Bandwidth of a slot, one way [B/s].

    Returns
    -------
    model : Model
        The node; rings reach the usual share of its slots.
    """
    return _build_ring(system, ranks, slot * _PCIE_SHARE)


@lru_cache(maxsize=256)
def build_nodes_of_cards(system: str, local: int, nodes: int, slot: float, of_node: float) -> Model:
    """Build nodes of cards that PCIe alone joins, with adapters between the nodes.

    Parameters
    ----------
    system : str
        Name of the datasheet.
    local, nodes : int
        Ranks of a node, and nodes [-].
    slot : float
        Bandwidth of a slot, one way [B/s].
    of_node : float
        Rate of all adapters of a node, one way [B/s].

    Returns
    -------
    model : Model
        The nodes: NCCL's rings pass each card and the adapters of each node once. Of two nodes trees
        cross the adapters with half of what the bus bandwidth counts.
    """
    crossed = 2 * of_node if nodes == 2 else of_node
    return _build_ring(system, local * nodes, min(slot * _PCIE_SHARE, crossed))


def _build_ring(system: str, ranks: int, busbw: float) -> Model:
    """A device with a link over which large all_reduces reach a bus bandwidth [B/s]."""
    model = Model(Platform.from_datasheet(system, ranks=ranks), is_measured=False)
    link = model.platform.network.links["intra"].bandwidth.value
    # collectives of datasheets reach a share of the link, so that this link gives that bandwidth
    share = find_bandwidth(model, "all_reduce", ranks, None) / link
    platform = model.platform.with_link("intra", bandwidth=busbw / share)
    return Model(platform, is_measured=False)


@lru_cache(maxsize=256)
def build_cluster(system: str, local: int, nodes: int, of_node: float, latency: float) -> Model:
    """Build nodes that adapters join.

    Parameters
    ----------
    system : str
        Name of the datasheet.
    local, nodes : int
        Ranks of a node, and nodes [-].
    of_node : float
        Rate of all adapters of a node, one way [B/s].
    latency : float
        Latency of a hop between nodes [s].

    Returns
    -------
    model : Model
        The nodes; with one rank each a ring over the adapters alone.
    """
    if local == 1:
        platform = Platform.from_datasheet(system, ranks=nodes, link=of_node)
        return Model(platform.with_link("intra", latency=latency), is_measured=False)
    node = build_node(system, local)
    platform = node.platform.with_link("inter", bandwidth=of_node / local, latency=latency)
    return Model(platform.with_nodes(nodes), node.is_measured)


@lru_cache(maxsize=64)
def _find_node_of_gallery(system: str) -> Platform | None:
    """The single node of the gallery with the device of a datasheet and collectives of its own; None
    where there is none."""
    for name in list_gallery():
        if re.fullmatch(rf"{re.escape(system)}-\d+", name):
            platform = load_platform(name)
            if platform.collectives:
                return platform
    return None


def find_times(
    model: Model, operation: str, nbytes: Array, ranks: int, algorithm: str | None
) -> Array:
    """Find the times of sizes.

    Parameters
    ----------
    model : Model
        What gives them.
    operation : str
        Such as ``all_reduce``. A reduction to one rank moves as many bytes as a broadcast, the other way.
    nbytes : array
        Message sizes [B].
    ranks : int
        Ranks [-].
    algorithm : str or None
        Algorithm that was asked for; where the operation does not have it, the library chooses.

    Returns
    -------
    seconds : array
        One time for each size [s].

    Raises
    ------
    ValueError
        For an operation without a model.
    """
    name = "broadcast" if operation == "reduce" else operation
    return _keep_times(model, name, tuple(map(float, nbytes)), ranks, algorithm)


@lru_cache(maxsize=1024)
def _keep_times(
    model: Model, operation: str, nbytes: tuple[float, ...], ranks: int, algorithm: str | None
) -> Array:
    """Times of sizes, which are asked for once [s]."""
    sizes = np.array(nbytes)
    if algorithm is not None:
        try:
            return model.platform.collective_time(
                operation, sizes, ranks=ranks, algorithm=algorithm
            )
        except ValueError:
            pass  # an algorithm that this operation does not have
    return model.platform.collective_time(operation, sizes, ranks=ranks)


def find_bandwidth(model: Model, operation: str, ranks: int, algorithm: str | None) -> float:
    """Find the bus bandwidth of the largest messages.

    Parameters
    ----------
    model : Model
        What gives it.
    operation : str
        Such as ``all_reduce``.
    ranks : int
        Ranks [-].
    algorithm : str or None
        Algorithm that was asked for.

    Returns
    -------
    bandwidth : float
        Bus bandwidth [B/s].
    """
    sizes = np.array([_LARGEST / 2, _LARGEST])
    times = find_times(model, operation, sizes, ranks, algorithm)
    per_byte = (times[1] - times[0]) / (sizes[1] - sizes[0])
    return float(bus_factor(operation, ranks)) / float(per_byte)
