"""Arrays of measurements to parameters with standard errors, validity and provenance, in a form their model unpacks."""

from perfkit.fitting.collectives import fit_collective, fit_over_ranks, fit_pipelined
from perfkit.fitting.context import fit_context, fit_iteration
from perfkit.fitting.kernels import fit_additive, fit_roofline
from perfkit.fitting.parameters import Fit

__all__ = [
    "Fit",
    "fit_additive",
    "fit_collective",
    "fit_context",
    "fit_iteration",
    "fit_over_ranks",
    "fit_pipelined",
    "fit_roofline",
]
