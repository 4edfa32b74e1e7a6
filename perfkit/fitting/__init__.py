"""Fits: arrays of measurements become fitted models, with standard errors, range and origin.

A `Fit` holds a closed form of `perfkit.models` with a `Parameter` for each of its numbers. In reading
order:

- `parameters`: `Parameter` (value, unit, standard error, limits) and `Fit` (parameters with their
  spread, ranges, source and notes), and what a report of a fit says.
- `models`: one class for each form. Kernels are `Additive`, `Roofline`, `TiledRoofline`,
  `AttentionRoofline`, `RowwiseRoofline`, `SequentialRoofline` or `LookupRoofline`, collectives
  `Pipelined`, `TwoBranch` or `OverRanks`; `InContext`, `Iteration`, `Overlap`, `Pace` and `Caches` say what whole iterations add.
- `regression`: least squares that all fits of sums share, and what real iterations add.
- `kernels`: fits of kernels, and of the caches that a curve of times shows.
- `collectives`: fits of a curve over message sizes, and of a law over rank counts.

A fit needs arrays alone; `perfkit.calibration` decides which measurements it gets. What fits is
imported when it is first used: a prediction takes fitted models and fits nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from perfkit.fitting.models import (
    Additive,
    AttentionRoofline,
    Caches,
    CollectiveModel,
    InContext,
    Iteration,
    KernelModel,
    LookupRoofline,
    Overlap,
    OverRanks,
    Pace,
    Pipelined,
    Roofline,
    RowwiseRoofline,
    SequentialRoofline,
    TiledRoofline,
    TwoBranch,
)
from perfkit.fitting.parameters import Fit, Parameter

if TYPE_CHECKING:
    from perfkit.fitting.collectives import (
        fit_collective,
        fit_over_ranks,
        fit_pipelined,
        fit_sharpness,
    )
    from perfkit.fitting.kernels import find_levels, fit_additive, fit_roofline
    from perfkit.fitting.regression import fit_context, fit_iteration

__all__ = [
    "Additive",
    "AttentionRoofline",
    "Caches",
    "CollectiveModel",
    "Fit",
    "InContext",
    "Iteration",
]
__all__ += ["KernelModel", "OverRanks", "Overlap", "Pace", "Parameter", "Pipelined", "Roofline"]
__all__ += ["LookupRoofline", "RowwiseRoofline", "SequentialRoofline"]
__all__ += ["TiledRoofline", "TwoBranch", "find_levels", "fit_additive"]
__all__ += ["fit_collective", "fit_context", "fit_iteration", "fit_over_ranks", "fit_pipelined"]
__all__ += ["fit_roofline", "fit_sharpness"]

#: Modules of this package that fit, and what is public of each.
_FITTING = {
    "collectives": ("fit_collective", "fit_over_ranks", "fit_pipelined", "fit_sharpness"),
    "kernels": ("find_levels", "fit_additive", "fit_roofline"),
    "regression": ("fit_context", "fit_iteration"),
}


def __getattr__(name: str) -> object:
    for module, names in _FITTING.items():
        if name == module:
            return import_module(f"perfkit.fitting.{module}")
        if name in names:
            return getattr(import_module(f"perfkit.fitting.{module}"), name)
    raise AttributeError(f"module 'perfkit.fitting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_FITTING, "models", "parameters"])
