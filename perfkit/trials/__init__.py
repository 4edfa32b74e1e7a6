"""Placements put to the proof: what was predicted of them, and what a real machine says."""

__all__: list[str] = []
