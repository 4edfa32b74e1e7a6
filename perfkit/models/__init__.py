"""Closed forms: pure functions of numbers and arrays in base units, without state, files or
knowledge of a platform."""

from perfkit.models import (
    caches,
    collectives,
    distributions,
    embedding,
    hierarchy,
    kernels,
    optimizers,
    partitions,
    roofline,
    skew,
)

__all__ = [
    "caches",
    "collectives",
    "distributions",
    "embedding",
    "hierarchy",
    "kernels",
    "optimizers",
    "partitions",
    "roofline",
    "skew",
]
