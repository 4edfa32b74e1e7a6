"""A machine changes its speed with known weights; the fit has to find them, and the times at the
usual pace."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfkit.calibration.pace import (
    PacedRun,
    fit_paces,
    name_disturbances,
    relate_kernels,
    relate_run,
)
from perfkit.fitting import Pace
from perfkit.measure.records import MeasuredIteration, MeasuredKernel, MeasuredRank
from perfkit.models.kernels import REFERENCES

USUAL = np.array([2e-4, 8e-4, 6e-4])
WEIGHTS = np.array([0.8, 0.0, 0.4])


def make_rank(
    rng: np.random.Generator, seconds: float, drift: float, noise: float = 0.03
) -> MeasuredRank:
    """Blocks of iterations between references; the pace changes within and between runs."""
    pace = drift * (
        0.7 * rng.standard_normal(3) + np.cumsum(0.3 * rng.standard_normal((41, 3)), axis=0)
    )
    references = USUAL * np.exp(pace + noise * rng.standard_normal(pace.shape))
    middle = (pace[1:] + pace[:-1]) / 2
    blocks = seconds * np.exp(middle @ WEIGHTS + 0.02 * rng.standard_normal(40))
    return MeasuredRank(
        median=float(np.median(blocks)),
        q1=float(np.quantile(blocks, 0.25)),
        q3=float(np.quantile(blocks, 0.75)),
        operation_seconds=[seconds],
        blocks=blocks.tolist(),
        references=references.tolist(),
        core_share=1.0,
    )


def make_iteration(rank: MeasuredRank) -> MeasuredIteration:
    return MeasuredIteration(name="toy", family="dlrm", workload={}, owners=None, runs=[rank])


def make_iterations(drift: float, runs: int = 12) -> list[MeasuredIteration]:
    rng = np.random.default_rng(5)
    return [make_iteration(make_rank(rng, 0.02, drift)) for _ in range(runs)]


def make_kernel(seconds: float, reference: list[float] | None = None) -> MeasuredKernel:
    times: Any = {"median": seconds, "q1": seconds, "q3": seconds, "reference": reference}
    return MeasuredKernel("gemm", "nt", {}, nbytes=1.0, **times)


def list_weights(pace: Pace) -> list[float]:
    """How much a class of work follows each reference."""
    return [pace[f"{name}_weight"] for name in REFERENCES]


def test_times_at_the_usual_pace_are_found_again() -> None:
    iterations = make_iterations(0.2)
    paces = fit_paces([], iterations)
    raw = np.log([row.runs[0].median / 0.02 for row in iterations])
    related = [relate_run(row.runs, "dlrm", paces) for row in iterations]
    logs = np.log([run.ranks[0].median / 0.02 for run in related])
    assert raw.std() > 0.1 and logs.std() < 0.25 * raw.std()
    for run, old in zip(related, iterations, strict=True):
        assert run.pace == pytest.approx(old.runs[0].median / run.ranks[0].median)
    assert list_weights(paces["dlrm"]) == pytest.approx(WEIGHTS, abs=0.15)


def test_weights_of_a_steady_machine_stay_those_of_the_prior() -> None:
    steady = fit_paces([], make_iterations(0.0))
    assert list_weights(steady["dlrm"]) == pytest.approx([1 / 3, 1 / 3, 1 / 3], abs=0.2)


def test_kernels_follow_the_pace_of_their_own_stage() -> None:
    rng = np.random.default_rng(2)
    pace = 0.3 * rng.standard_normal((200, 3))
    times = np.exp(0.02 * rng.standard_normal(200) + pace @ WEIGHTS)
    kernels = []
    for moves, time in zip(pace, times, strict=True):
        reference = 1.2 * USUAL * np.exp(moves)
        kernels.append(make_kernel(float(time), reference.tolist()))
    paces = fit_paces(kernels, make_iterations(0.2))
    related = [kernel.median for kernel in relate_kernels(kernels, paces)]
    assert np.log(times).std() > 0.2 and np.log(related).std() < 0.06
    # that its references are slower by a fifth is no drift
    assert np.median(related) == pytest.approx(1.0, abs=0.05)


def test_without_references_nothing_changes() -> None:
    old, kernels = MeasuredRank(median=1.0, q1=1.0, q3=1.0), [make_kernel(1.0)]
    assert fit_paces(kernels, [make_iteration(old)]) == {}
    assert relate_kernels(kernels, {}) == kernels
    assert relate_run([old], "dlrm", {}) == PacedRun([old], None)
    paces = fit_paces([], make_iterations(0.1))
    assert relate_run([old], "dlrm", paces) == PacedRun([old], None)
    measured = make_rank(np.random.default_rng(1), 0.02, 0.1)
    unknown = relate_run([measured], "mamba", paces)
    assert unknown == relate_run([measured], "any", paces) and unknown.ranks != [measured]
    two_ranks = [measured, measured]
    assert relate_run(two_ranks, "dlrm", paces) == PacedRun(two_ranks, None), (
        "several ranks have a pace of their own"
    )


def test_disturbances_are_named() -> None:
    references = [USUAL.tolist(), USUAL.tolist()]
    rank = MeasuredRank(median=1.0, q1=1.0, q3=1.0, references=references, core_share=1.0)
    steady = [rank for _ in range(20)]
    assert name_disturbances(iterations=steady) == {}
    assert name_disturbances(kernels=[]) == {}
    late = [replace(rank, core_share=0.5) for _ in range(5)]
    said = name_disturbances(kernels=steady * 9, iterations=late + steady[5:])["disturbances"]
    assert "25% of the timings of iterations got less than 97 % of a core" in said
    paces = np.exp(np.linspace(-0.5, 0.5, 20))
    wild = [make_kernel(1.0, (USUAL * pace).tolist()) for pace in paces]
    said = name_disturbances(kernels=wild)["disturbances"]
    assert "varied by 30% (standard deviation) during kernels" in said
