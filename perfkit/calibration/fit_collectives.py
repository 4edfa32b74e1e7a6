"""Fit the collectives of a machine, each alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfkit.fitting import CollectiveModel, fit_sharpness
from perfkit.measure.records import MeasuredCollective


def fit_operations(
    collectives: Sequence[MeasuredCollective], ranks: int
) -> dict[str, CollectiveModel]:
    """Fit a pipelined curve to the lower quartiles of each operation; a note gives the cost of slow
    calls.

    Parameters
    ----------
    collectives : sequence of MeasuredCollective
        All operations and sizes.
    ranks : int
        Ranks that took part [-].

    Returns
    -------
    fits : dict of str to CollectiveModel
        By operation and ranks.
    """
    fits = {}
    for operation in dict.fromkeys(collective.operation for collective in collectives):
        sizes = [collective for collective in collectives if collective.operation == operation]
        nbytes = np.array([collective.nbytes for collective in sizes], dtype=float)
        lower_quartile = np.array([collective.q1 for collective in sizes], dtype=float)
        slow = float(np.mean([collective.mean / collective.q1 for collective in sizes]))
        fit = fit_sharpness(nbytes, lower_quartile)
        note = f"fitted to lower quartiles; the mean call takes {slow:.2f} times as long"
        fits[f"{operation}.{ranks}"] = replace(fit, notes=(note, *fit.notes))
    return fits
