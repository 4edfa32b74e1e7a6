"""Arrays of measurements to parameters with standard errors, validity and provenance, in a form their model unpacks."""

from perfkit.fitting.collectives import fit_collective as fit_collective
from perfkit.fitting.collectives import fit_over_ranks as fit_over_ranks
from perfkit.fitting.collectives import fit_pipelined as fit_pipelined
from perfkit.fitting.context import find_context as find_context
from perfkit.fitting.context import fit_context as fit_context
from perfkit.fitting.context import fit_iteration as fit_iteration
from perfkit.fitting.kernels import find_levels as find_levels
from perfkit.fitting.kernels import fit_additive as fit_additive
from perfkit.fitting.kernels import fit_roofline as fit_roofline
from perfkit.fitting.parameters import Fit as Fit
