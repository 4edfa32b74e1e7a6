"""When a calibration has measured enough iterations.

`plan_rounds` orders iterations: some of each family first, then a few more at a time.
`list_moving_families` says after each round which families more iterations would still move.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest

from perfkit.fitting import Iteration
from perfkit.measure.samples import Sample
from perfkit.platform.machine import ANY, Context

#: Move of predictions below which more iterations are not worth their time [-]; docs/formulas.md,
#: table 9.1.
LEAST_MOVE = 0.035
#: Iterations of each family in the first round and in later ones [-]. No fit settles with less than
#: four, because the prior spreads of families are larger.
_FIRST_ROUND = 4
_LATER_ROUND = 2


def expect_move(spread: float, *, measured: int, left: int) -> float:
    """Expect how far more iterations move what is fitted to some.

    Parameters
    ----------
    spread : float
        Standard deviation of the logarithm of measured over predicted times, of iterations that
        were left out of the fit [-].
    measured : int
        Iterations of the family that are fitted, at least one [-].
    left : int
        Iterations that may still be measured [-].

    Returns
    -------
    move : float
        Standard deviation of the logarithm of the new over the old prediction [-].

    Notes
    -----
    The scale of a family is a mean of logarithms. The mean of n numbers and that of these and m
    more differ by σ √(m / (n (n + m))).

    Examples
    --------
    >>> round(expect_move(0.11, measured=4, left=10), 3)
    0.046
    """
    return spread * math.sqrt(left / (measured * (measured + left)))


def plan_rounds(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Order iterations by what they decide: the first ones of each family decide most.

    Parameters
    ----------
    samples : sequence of Sample
        All iterations that may be measured.

    Returns
    -------
    rounds : list of list of Sample
        Four of each family, then two of each family a round; all of them once.
    """
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    parts_of_families = []
    for members in families.values():
        parts = [members[:_FIRST_ROUND]]
        for start in range(_FIRST_ROUND, len(members), _LATER_ROUND):
            parts.append(members[start : start + _LATER_ROUND])
        parts_of_families.append(parts)
    rounds = []
    for parts_of_round in zip_longest(*parts_of_families, fillvalue=list[Sample]()):
        rounds.append([sample for part in parts_of_round for sample in part])
    return rounds


def list_moving_families(context: Context, samples: Sequence[Sample]) -> dict[str, float]:
    """List the families whose fit more iterations would still move.

    Parameters
    ----------
    context : Context
        Fitted to the iterations that were measured so far.
    samples : sequence of Sample
        All iterations that may be measured, with those that were.

    Returns
    -------
    moves : dict of str to float
        By family of samples the move that is expected of all iterations that are left, where it is
        above `LEAST_MOVE` [-]. Empty: measuring more is not worth its time.

    Notes
    -----
    A sequential rule: measure until the standard error, by the scatter seen so far, is below a
    fixed width (Chow and Robbins 1965, doi:10.1214/aoms/1177700156). Unsteady machines have a
    larger scatter and so measure more. Families of several ranks have one fit.
    """
    families = {sample.family: sample for sample in samples}
    moves = {}
    for family, sample in families.items():
        fit = _find_fit(context, sample)
        planned = sum(_find_fit(context, other) is fit for other in samples)
        move = math.inf
        if fit is not None:
            move = expect_move(fit.spread, measured=fit.n, left=max(planned - fit.n, 0))
        if move > LEAST_MOVE:
            moves[family] = move
    return moves


def _find_fit(context: Context, sample: Sample) -> Iteration | None:
    """The fit of iterations like this one; None where none were measured."""
    if sample.ranks > 1:
        return context.parallel.get(ANY)
    return context.iterations.get(sample.workload.family)
