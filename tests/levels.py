"""Platforms without levels of software, for tests by hand."""

from dataclasses import replace

import perfkit as pk

__all__ = ["load_without_levels"]


def load_without_levels(name: str) -> pk.Platform:
    """A platform of the gallery whose steps take what their kernels, messages and hosts take."""
    platform = pk.load_platform(name)
    return replace(platform, context=replace(platform.context, stacks={}))
