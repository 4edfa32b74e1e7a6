"""Closed forms: pure functions of numbers and arrays in base units, without state, files or knowledge of a platform."""

from perfkit.models import algorithms, caches, collectives, embedding, hierarchy, roofline

__all__ = ["algorithms", "caches", "collectives", "embedding", "hierarchy", "roofline"]
