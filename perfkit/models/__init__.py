"""Closed forms: pure functions of numbers and arrays in base units, without state, files or knowledge of a platform."""

from perfkit.models import algorithms, caches, collectives, distributions, embedding, hierarchy, kernels, partitions

# isort: split
from perfkit.models import pipelines, roofline, skew

__all__ = ["algorithms", "caches", "collectives", "distributions", "embedding", "hierarchy", "kernels", "partitions"]
__all__ += ["pipelines", "roofline", "skew"]
