"""Closed forms: pure functions of numbers and arrays in base units, without state, files or knowledge of a platform."""

from perfkit.models import caches, collectives, embedding, roofline

__all__ = ["caches", "collectives", "embedding", "roofline"]
