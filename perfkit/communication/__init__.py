"""What a collective costs on a network: fits by rank count and way, laws between them, composition across nodes."""

from perfkit.communication.lookup import ALGORITHMS, WAYS, CollectiveTime, Match, find_hop, split_key
from perfkit.communication.pricing import price_collective

__all__ = ["ALGORITHMS", "WAYS", "CollectiveTime", "Match", "find_hop", "price_collective", "split_key"]
