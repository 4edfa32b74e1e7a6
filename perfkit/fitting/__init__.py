"""Arrays of measurements to parameters with standard errors, validity and provenance, in a form their model unpacks."""

from perfkit.fitting.collectives import fit_collective, fit_over_ranks, fit_pipelined
from perfkit.fitting.context import fit_context, fit_iteration
from perfkit.fitting.kernels import fit_additive, fit_roofline
from perfkit.fitting.levels import find_levels
from perfkit.fitting.parameters import Fit

__all__ = [
    "Fit",
    "find_levels",
    "fit_additive",
    "fit_collective",
    "fit_context",
    "fit_iteration",
    "fit_over_ranks",
    "fit_pipelined",
    "fit_roofline",
]
