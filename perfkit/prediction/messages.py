"""Times of messages among ranks that strategies lay out over nodes and regions."""

from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.experts import dispatched_bytes
from perfkit.platform.collective_costs import CollectiveCost
from perfkit.platform.platform import Platform
from perfkit.prediction.ranks import find_group_cost, find_link_of_dispatch
from perfkit.workloads.transformer import Transformer


class Layout(NamedTuple):
    """How ranks that exchange messages lie on a network.

    Parameters
    ----------
    ranks : int
        Ranks that take part [-].
    ranks_of_node : int
        Most of them on one node [-].
    regions : int
        Regions that they are in [-].
    """

    ranks: int
    ranks_of_node: int
    regions: int


class MessageTimes:
    """Times of messages on a platform.

    What prices an operation on ranks of one layout is found once.

    Parameters
    ----------
    platform : Platform
        Where the ranks are.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.costs: dict[tuple[str, Layout, str], CollectiveCost] = {}

    def time(
        self, operation: str, nbytes: Array, count: Any, stride: Any, algorithm: str = ""
    ) -> Array:
        """Times of collectives.

        Parameters
        ----------
        operation : str
            Such as ``all_reduce``.
        nbytes : array
            Sizes of messages [B].
        count : int or array
            Ranks that take part in each; with a single one there is no message [-].
        stride : int or array
            How far these ranks are apart [-].
        algorithm : str, optional
            Algorithm of ranks on several nodes that take part as a whole.

        Returns
        -------
        times : array
            One for each message [s].
        """
        network = self.platform.network
        local = network.ranks_per_node
        of_region = network.ranks // network.regions
        ranks = np.asarray(count, dtype=int)
        stride = np.asarray(stride, dtype=int)
        ranks_of_node = np.minimum(np.maximum(local // stride, 1), ranks)
        ranks_of_region = np.maximum(of_region // stride, 1)
        regions = np.minimum(-(-ranks // ranks_of_region), network.regions)
        # one number for each layout
        codes = (ranks * (local + 1) + ranks_of_node) * (network.regions + 1) + regions
        codes, ranks, ranks_of_node, regions = (
            np.broadcast_to(each, nbytes.shape).ravel()
            for each in (codes, ranks, ranks_of_node, regions)
        )
        sizes = nbytes.ravel()
        times = np.zeros(len(sizes))
        exchanging = np.flatnonzero(ranks > 1)
        if not len(exchanging):
            return times.reshape(nbytes.shape)
        # those of one layout follow one another
        in_order = exchanging[np.argsort(codes[exchanging], kind="stable")]
        begins = np.flatnonzero(np.diff(codes[in_order], prepend=-1))
        ends = np.append(begins[1:], len(in_order))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            alike = in_order[begin:end]
            first = alike[0]
            layout = Layout(int(ranks[first]), int(ranks_of_node[first]), int(regions[first]))
            # messages of one size are priced once
            distinct, position = np.unique(sizes[alike], return_inverse=True)
            times[alike] = self.find_cost(operation, layout, algorithm).time(distinct)[position]
        return times.reshape(nbytes.shape)

    def size_dispatched(self, nbytes: Array, count: Any, stride: Any, model: Transformer) -> Array:
        """Bytes on links of tokens that go to the ranks of their experts once.

        Parameters
        ----------
        nbytes : array
            Tokens of a rank for each message, each token counted once [B].
        count, stride : int or array
            Ranks that share experts, and how far they are apart [-].
        model : Transformer
            The model, whose routers choose.

        Returns
        -------
        nbytes : array
            What `time` takes for `perfkit.models.experts.DISPATCH` [B].
        """
        network = self.platform.network
        ranks = np.asarray(count, dtype=int)
        of_node = np.minimum(np.maximum(network.ranks_per_node // np.asarray(stride), 1), ranks)
        nodes = -(-ranks // of_node.astype(int))
        inside = find_link_of_dispatch(self.platform, "intra").bandwidth.value
        between = inside
        if "inter" in network.links:
            between = network.links["inter"].bandwidth.value
        sizes = np.zeros(np.broadcast_shapes(nbytes.shape, nodes.shape))
        for several, on_nodes in {
            *zip(ranks.ravel().tolist(), nodes.ravel().tolist(), strict=True)
        }:
            if several > 1:
                sent = dispatched_bytes(
                    nbytes,
                    ranks=several,
                    nodes=on_nodes,
                    experts=model.experts,
                    top_k=model.top_k,
                    inside=inside,
                    between=between,
                    expert_groups=max(model.expert_groups, 1),
                    top_groups=max(model.top_groups, 1),
                )
                sizes = np.where((ranks == several) & (nodes == on_nodes), sent, sizes)
        return sizes

    def find_cost(self, operation: str, layout: Layout, algorithm: str) -> CollectiveCost:
        """Find what prices an operation on ranks of a layout."""
        key = (operation, layout, algorithm)
        if key not in self.costs:
            self.costs[key] = self._choose_cost(operation, layout, algorithm)
        return self.costs[key]

    def _choose_cost(self, operation: str, layout: Layout, algorithm: str) -> CollectiveCost:
        return find_group_cost(
            self.platform,
            operation,
            layout.ranks,
            nodes=-(-layout.ranks // layout.ranks_of_node),
            most=layout.ranks_of_node,
            regions=layout.regions,
            algorithm=algorithm,
        )
