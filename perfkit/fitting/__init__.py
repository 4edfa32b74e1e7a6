"""Fits: arrays of measurements become parameters with standard errors, range and origin, ready for
their model."""

from perfkit.fitting.collectives import fit_collective, fit_over_ranks, fit_pipelined, fit_sharpness
from perfkit.fitting.kernels import find_levels, fit_additive, fit_roofline
from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import fit_context, fit_iteration

__all__ = ["Fit", "find_levels", "fit_additive", "fit_collective", "fit_context", "fit_iteration"]
__all__ += ["fit_over_ranks", "fit_pipelined", "fit_roofline", "fit_sharpness"]
