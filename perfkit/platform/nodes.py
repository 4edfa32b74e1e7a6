"""How to get a platform with more ranks: what an error about too many ranks advises."""

import re

from perfkit.fitting.parameters import Key
from perfkit.platform.datasheets import find_adapter, list_datasheets
from perfkit.platform.file import list_gallery
from perfkit.platform.machine import Machine


def advise_nodes(machine: Machine, ranks: int, *, each_node: int | None = None) -> str:
    """Say how many nodes of a platform have so many ranks, and how to ask for them.

    Parameters
    ----------
    machine : Machine
        The platform that has too few.
    ranks : int
        Ranks that shall take part [-].
    each_node : int, optional
        Ranks that take part on each node; all of the node if not given [-].

    Returns
    -------
    advice : str
        A number of nodes for Python and for the command line; only the most ranks where the link
        between nodes is not known.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> advise_nodes(load_platform("h100-sxm-8"), 12)
    'take at most 8, or 2 nodes: with_nodes(2), --platform h100-sxm-8x2'
    """
    network = machine.network
    local = network.ranks_per_node if each_node is None else each_node
    fewer = f"take at most {local * network.nodes}"
    nodes = -(-ranks // local)
    nodes = -(-nodes // network.regions) * network.regions
    name, at, fabric = machine.name.partition("@")
    node = re.fullmatch(r"((.+)-\d+?)(?:x\d+)?(?: by datasheet)?", name)
    if network.ranks == 1 and node is not None and node[2] in list_datasheets():
        return f"{fewer}, or a node of {ranks}: the platform {node[2]}-{ranks}"
    if not _links_nodes(machine):
        return fewer
    advice = f"{fewer}, or {nodes} nodes: with_nodes({nodes})"
    if node is None or network.regions > 1:
        return advice
    in_gallery = any(re.fullmatch(rf"{re.escape(node[1])}(x\d+)?", name) for name in list_gallery())
    if in_gallery or node[2] in list_datasheets():
        advice += f", --platform {node[1]}x{nodes}{at}{fabric}"
    return advice


def _links_nodes(machine: Machine) -> bool:
    """Whether `Platform.with_nodes` knows a link between nodes."""
    fits = (Key.parse(key) for key in machine.collectives)
    if "inter" in machine.network.links or any(key.algorithm == "rail" for key in fits):
        return True
    try:
        find_adapter(machine.name, machine.device)
    except ValueError:
        return False
    return True
