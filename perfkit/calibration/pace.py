"""The usual pace of a machine: its references make times comparable that were measured at different
speeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfkit.fitting import Pace
from perfkit.ground.units import Array
from perfkit.models.kernels import REFERENCES, at_usual_pace

#: Prior weight of each reference, its standard deviation, and how many blocks count as one [-];
#: docs/formulas.md, table 7.1.
_PRIOR, _TRUST, _ALIKE = np.full(3, 1.0 / 3.0), 0.15, 4.0


def fit_paces(measurements: Mapping[str, Any]) -> dict[str, Pace]:
    """Fit the usual pace of a machine, and how much each class of work depends on it.

    Parameters
    ----------
    measurements : mapping
        Raw measurements, see `perfkit.calibration.fit.fit_platform`.

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
    stages: dict[str, list[Mapping[str, Any]]] = {"any": [], "parallel": []}
    for row in measurements["iterations"]:
        for name in ["parallel"] if len(row["runs"]) > 1 else ["any", row["family"]]:
            stages.setdefault(name, []).extend(run for run in row["runs"] if "references" in run)
    paces = {}
    for name, runs in stages.items():
        if runs:
            usual = _find_usual(
                [run["references"] for run in stages["parallel" if name == "parallel" else "any"]]
            )
            paces[name] = _weigh(runs, usual)
    kernels = [[row["reference"]] for row in measurements["kernels"] if "reference" in row]
    if kernels and "any" in paces:
        paces["kernels"] = paces["any"].with_values(_find_usual(kernels))
    return paces


def _find_usual(references: Sequence[Any]) -> dict[str, float]:
    """Usual times of the references: their medians [s]."""
    middle = np.median(np.log(np.concatenate(references)), axis=0)
    return dict(zip(REFERENCES, np.exp(middle).tolist(), strict=True))


def _weigh(runs: Sequence[Mapping[str, Any]], usual: Mapping[str, float]) -> Pace:
    """Fit the weights of one class: how the blocks of a run vary with the references around
    them."""
    from scipy.optimize import nnls

    def move(times: Any) -> Array:
        logs: Array = np.log(times)
        return logs - np.median(logs, axis=0)

    moved = [move(run["references"]) for run in runs]
    blocks = [move(run["blocks"]) for run in runs]
    # single stalls do not count
    limits = [max(0.3, 4.5 * float(np.median(np.abs(logs)))) for logs in blocks]
    seen = np.concatenate(
        [np.clip(logs, -limit, limit) for logs, limit in zip(blocks, limits, strict=True)]
    )
    before, after = (
        np.concatenate([own[:-1] for own in moved]),
        np.concatenate([own[1:] for own in moved]),
    )
    square, beside, weights = before.T @ after, (before + after) / 2, _PRIOR
    values, vectors = np.linalg.eigh((square + square.T) / 2)
    for _ in range(3):
        trust = _ALIKE * max(float(np.var(seen - beside @ weights)), 1e-6) / _TRUST**2
        held = np.sqrt(np.maximum(values, 0.0) + trust)
        weights, _ = nnls(
            held[:, None] * vectors.T, vectors.T @ (beside.T @ seen + trust * _PRIOR) / held
        )
    names = {
        f"{name}_weight": float(weight) for name, weight in zip(REFERENCES, weights, strict=True)
    }
    return Pace.build({**usual, **names}, n=len(seen))


def relate_kernels(
    rows: Sequence[Mapping[str, Any]], paces: Mapping[str, Pace]
) -> list[dict[str, Any]]:
    """Convert times of isolated kernels to the usual pace.

    Parameters
    ----------
    rows : sequence of mapping
        Measured kernels with their ``reference`` [s].
    paces : mapping of str to Pace
        From `fit_paces`.

    Returns
    -------
    rows : list of dict
        The same rows at the usual pace.
    """
    pace, out = paces.get("kernels"), []
    for row in rows:
        factor = (
            float(at_usual_pace(1.0, row["reference"], **pace))
            if pace and "reference" in row
            else 1.0
        )
        out.append(
            {**row, **{key: factor * row[key] for key in ("median", "q1", "q3") if key in row}}
        )
    return out


def relate_run(
    runs: Sequence[Mapping[str, Any]], family: str, paces: Mapping[str, Pace]
) -> list[dict[str, Any]]:
    """Convert times of one measured configuration to the usual pace.

    Parameters
    ----------
    runs : sequence of mapping
        One result for each rank, see `perfkit.measure.iterations.time_iteration`.
    family : str
        Workload family.
    paces : mapping of str to Pace
        From `fit_paces`.

    Returns
    -------
    runs : list of dict
        The same results at the usual pace if references were timed, with ``pace``: measured over
        usual time [-].
    """
    pace = paces.get("parallel") if len(runs) > 1 else paces.get(family, paces.get("any"))
    if pace is None or any("references" not in run for run in runs):
        return [dict(run) for run in runs]
    shifts = []
    for run in runs:
        references = np.array(run["references"])
        logs = np.log(
            at_usual_pace(run["blocks"], np.sqrt(references[:-1] * references[1:]), **pace)
        )
        shifts.append(np.median(logs) - np.median(np.log(run["blocks"])))
    factor, out = float(np.exp(np.mean(shifts))), []
    for run in runs:
        times = {key: factor * run[key] for key in ("median", "q1", "q3", "idle") if key in run}
        beside = np.exp(np.mean(np.log(run.get("operation_references", run["references"])), axis=0))
        inside = float(at_usual_pace(1.0, beside, **pace))
        operations = [inside * seconds for seconds in run["operation_seconds"]]
        out.append({**run, **times, "operation_seconds": operations, "pace": 1.0 / factor})
    return out


def name_disturbances(**stages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name what disturbed measurements: other load on the cores, and changes of the machine's
    speed.

    Parameters
    ----------
    **stages : sequence of mapping
        Timings, such as those of ``kernels``, with the references around them.

    Returns
    -------
    found : dict of str to str
        ``disturbances`` in one line; empty if there are none.
    """
    words = []
    for stage, rows in stages.items():
        shares = np.array([row.get("core_share", row.get("cpu_share", 1.0)) for row in rows])
        if (late := float(np.mean(shares < 0.97)) if len(shares) else 0.0) > 0.1:
            words.append(f"{late:.0%} of the timings of {stage} got less than 97 % of a core")
        seen = [np.atleast_2d(row.get("references", row.get("reference", []))) for row in rows]
        paces = [np.log(references).mean(axis=0) for references in seen if references.size]
        if (moved := float(np.std(paces, axis=0).mean()) if paces else 0.0) > 0.1:
            words.append(
                f"the speed of the machine varied by {moved:.0%} (standard deviation) during {stage}"
            )
    return {"disturbances": "; ".join(words)} if words else {}
