"""The usual pace of a machine: its references make times comparable that were measured at different
speeds.

`fit_paces` learns from a calibration how much each class of work follows the references.
`relate_kernels` and `relate_run` then convert times, and `name_disturbances` says what disturbed a
measurement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfkit.fitting import Pace
from perfkit.ground.units import Array
from perfkit.measure.records import (
    LEAST_CORE_SHARE,
    MeasuredIteration,
    MeasuredKernel,
    MeasuredRank,
    Timing,
)
from perfkit.models.kernels import REFERENCES, at_usual_pace

#: Prior weight of each reference [-]; docs/formulas.md, table 7.1.
_PRIOR = np.full(3, 1.0 / 3.0)
#: Standard deviation of that weight [-]; docs/formulas.md, table 7.1.
_TRUST = 0.15
#: How many blocks count as one [-]; docs/formulas.md, table 7.1.
_ALIKE = 4.0


@dataclass(frozen=True)
class PacedRun:
    """One measured configuration at the usual pace of the machine.

    Parameters
    ----------
    ranks : list of MeasuredRank
        What each rank saw.
    pace : float or None
        Measured over usual time; None where the times are as measured, because there are no
        references [-].
    """

    ranks: list[MeasuredRank]
    pace: float | None


def fit_paces(
    kernels: Sequence[MeasuredKernel], iterations: Sequence[MeasuredIteration]
) -> dict[str, Pace]:
    """Fit the usual pace of a machine, and how much each class of work depends on it.

    Parameters
    ----------
    kernels : sequence of MeasuredKernel
        Kernels alone.
    iterations : sequence of MeasuredIteration
        Small iterations.

    Returns
    -------
    paces : dict of str to Pace
        Parameters of `perfkit.models.kernels.at_usual_pace` by class: a family of iterations,
        ``parallel`` for iterations of several ranks, ``kernels``, and ``any`` for all other
        families. Empty without references.

    Notes
    -----
    Each stage has its own usual pace, because its work changes the times of the references.
    References are noisy, so least squares would give them too little weight. Therefore the
    reference after a block is the instrumental variable of the one before it: both have the pace in
    common, but not the noise. Isolated kernels use the weights of all families together.
    """
    stages: dict[str, list[MeasuredRank]] = {"any": [], "parallel": []}
    for iteration in iterations:
        names = ["parallel"] if len(iteration.runs) > 1 else ["any", iteration.family]
        timed = [rank for rank in iteration.runs if rank.references is not None]
        for name in names:
            stages.setdefault(name, []).extend(timed)
    paces = {}
    for name, ranks in stages.items():
        if not ranks:
            continue
        stage = "parallel" if name == "parallel" else "any"
        usual = _find_usual([rank.references for rank in stages[stage]])
        paces[name] = _weigh(ranks, usual)
    around = [[kernel.reference] for kernel in kernels if kernel.reference is not None]
    if around and "any" in paces:
        paces["kernels"] = paces["any"].with_values(_find_usual(around))
    return paces


def _find_usual(references: Sequence[Any]) -> dict[str, float]:
    """Usual times of the references: their medians [s]."""
    middle = np.median(np.log(np.concatenate(references)), axis=0)
    return dict(zip(REFERENCES, np.exp(middle).tolist(), strict=True))


def _weigh(ranks: Sequence[MeasuredRank], usual: Mapping[str, float]) -> Pace:
    """Fit the weights of one class: how the blocks of a run vary with the references around
    them."""
    from scipy.optimize import nnls

    references = [_find_moves(rank.references) for rank in ranks]
    blocks = np.concatenate([_clip_stalls(_find_moves(rank.blocks)) for rank in ranks])
    before = np.concatenate([moves[:-1] for moves in references])
    after = np.concatenate([moves[1:] for moves in references])
    around = (before + after) / 2
    # the references before and after a block have the pace in common, but not the noise
    common = before.T @ after
    values, vectors = np.linalg.eigh((common + common.T) / 2)
    weights = _PRIOR
    # scipy's non-negative least squares of the moments; statsmodels' IV2SLS knows instruments, but
    # neither bounds nor a prior. The noise, which says what the prior weighs, needs the weights.
    for _ in range(3):
        noise = max(float(np.var(blocks - around @ weights)), 1e-6)
        trust = _ALIKE * noise / _TRUST**2
        root = np.sqrt(np.maximum(values, 0.0) + trust)
        pulled = around.T @ blocks + trust * _PRIOR
        weights, _ = nnls(root[:, None] * vectors.T, vectors.T @ pulled / root)
    named = {
        f"{name}_weight": float(weight) for name, weight in zip(REFERENCES, weights, strict=True)
    }
    return Pace.build({**usual, **named}, n=len(blocks))


def _find_moves(times: Any) -> Array:
    """Logarithms of times over their median [-]."""
    logs: Array = np.log(times)
    return logs - np.median(logs, axis=0)


def _clip_stalls(moves: Array) -> Array:
    """The moves of blocks within 4.5 times their median size, or 0.3: single stalls do not
    count."""
    limit = max(0.3, 4.5 * float(np.median(np.abs(moves))))
    return np.clip(moves, -limit, limit)


def relate_kernels(
    kernels: Sequence[MeasuredKernel], paces: Mapping[str, Pace]
) -> list[MeasuredKernel]:
    """Convert times of isolated kernels to the usual pace.

    Parameters
    ----------
    kernels : sequence of MeasuredKernel
        With their ``reference`` [s].
    paces : mapping of str to Pace
        From `fit_paces`.

    Returns
    -------
    kernels : list of MeasuredKernel
        The same kernels at the usual pace; those without a reference do not change.
    """
    pace = paces.get("kernels")
    if pace is None:
        return list(kernels)
    related = []
    for kernel in kernels:
        if kernel.reference is not None:
            factor = float(at_usual_pace(1.0, kernel.reference, **pace))
            kernel = replace(
                kernel,
                median=factor * kernel.median,
                q1=factor * kernel.q1,
                q3=factor * kernel.q3,
            )
        related.append(kernel)
    return related


def relate_run(ranks: Sequence[MeasuredRank], family: str, paces: Mapping[str, Pace]) -> PacedRun:
    """Convert times of one measured configuration to the usual pace.

    Parameters
    ----------
    ranks : sequence of MeasuredRank
        What each rank saw, see `perfkit.measure.iterations.time_iteration`.
    family : str
        Workload family.
    paces : mapping of str to Pace
        From `fit_paces`.

    Returns
    -------
    run : PacedRun
        The same ranks, at the usual pace if references were timed.
    """
    pace = paces.get("parallel") if len(ranks) > 1 else paces.get(family, paces.get("any"))
    if pace is None or any(rank.references is None for rank in ranks):
        return PacedRun(list(ranks), None)
    factor = float(np.exp(np.mean([_find_shift(rank, pace) for rank in ranks])))
    return PacedRun([_convert_rank(rank, pace, factor) for rank in ranks], 1.0 / factor)


def _find_shift(rank: MeasuredRank, pace: Pace) -> float:
    """Logarithm of the usual over the measured time of a block [-]."""
    references, blocks = np.array(rank.references), np.array(rank.blocks)
    around = np.sqrt(references[:-1] * references[1:])
    usual = np.log(at_usual_pace(blocks, around, **pace))
    return float(np.median(usual) - np.median(np.log(blocks)))


def _convert_rank(rank: MeasuredRank, pace: Pace, factor: float) -> MeasuredRank:
    """The times of a rank at the usual pace: whole iterations by a factor, operations by the
    references around them."""
    around = np.array(rank.operation_references or rank.references)
    inside = float(at_usual_pace(1.0, np.exp(np.mean(np.log(around), axis=0)), **pace))
    return replace(
        rank,
        median=factor * rank.median,
        q1=factor * rank.q1,
        q3=factor * rank.q3,
        idle=None if rank.idle is None else factor * rank.idle,
        operation_seconds=[inside * seconds for seconds in rank.operation_seconds or ()],
    )


def name_disturbances(**stages: Sequence[Timing]) -> dict[str, str]:
    """Name what disturbed measurements: other load on the cores, and changes of the machine's
    speed.

    Parameters
    ----------
    **stages : sequence of Timing
        Timings, such as those of ``kernels``, with the references around them.

    Returns
    -------
    found : dict of str to str
        ``disturbances`` in one line; empty if there are none.
    """
    words = []
    for stage, timings in stages.items():
        if timings:
            shares = np.array([timing.share_of_core for timing in timings])
            late = float(np.mean(shares < LEAST_CORE_SHARE))
            if late > 0.1:
                words.append(
                    f"{late:.0%} of the timings of {stage} got less than "
                    f"{100 * LEAST_CORE_SHARE:.0f} % of a core"
                )
        around = [timing.references_around for timing in timings if timing.references_around]
        if around:
            logs = [np.log(references).mean(axis=0) for references in around]
            moved = float(np.std(logs, axis=0).mean())
            if moved > 0.1:
                words.append(
                    f"the speed of the machine varied by {moved:.0%} (standard deviation) "
                    f"during {stage}"
                )
    return {"disturbances": "; ".join(words)} if words else {}
