"""Arrays of measurements to parameters with standard errors, validity and provenance, in a form their model unpacks."""

from perfkit.fitting.collectives import fit_collective, fit_over_ranks, fit_pipelined
from perfkit.fitting.kernels import find_levels, fit_additive, fit_roofline
from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import find_context, fit_context, fit_iteration

__all__ = ["Fit", "find_context", "find_levels", "fit_additive", "fit_collective", "fit_context", "fit_iteration"]
__all__ += ["fit_over_ranks", "fit_pipelined", "fit_roofline"]
