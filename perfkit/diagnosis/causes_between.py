"""Signatures between runs: one host that makes its runs slow, and runs that differ for no such reason."""

from collections.abc import Sequence
from typing import NamedTuple

from perfkit.diagnosis.evidence import (
    LARGE_SIZES,
    UNLIKE_RUNS,
    find_plateau,
    is_slow,
    join_names,
    take_facts,
    write_rate,
    write_size,
)
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence, Word

#: Fewest runs that can show which host is slow [-].
_FEWEST = 3


class _Kind(NamedTuple):
    """What runs must have in common to be compared."""

    operation: str
    ranks: int
    nodes: int | None
    device: str | None
    nbytes: int  # the largest size [B]


class _Measured(NamedTuple):
    """The largest size of a run."""

    case: Case
    busbw: float
    line: int

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts of the run."""
        return frozenset(take_facts(self.case).hosts)


def compare_runs(cases: Sequence[Case]) -> tuple[Cause, ...]:
    """Look for causes that runs of the same kind show beside each other.

    Evidence: of three runs or more of one operation on as many ranks and nodes, some are slower by 30 %
    or more. Where one host takes part in all of these and in no other, it is the likely cause.

    Parameters
    ----------
    cases : sequence of Case
        All runs.

    Returns
    -------
    causes : tuple of Cause
        One for each kind of runs that differ; none where all are alike.
    """
    by_kind: dict[_Kind, list[_Measured]] = {}
    for case in cases:
        plateau = find_plateau(case)
        if plateau is None:
            continue
        device = case.expectation.device
        kind = _Kind(case.operation, case.ranks, case.nodes, device, plateau.nbytes)
        by_kind.setdefault(kind, []).append(_Measured(case, plateau.busbw, plateau.line))
    causes = []
    for kind, runs in by_kind.items():
        cause = _compare(kind, runs)
        if cause is not None:
            causes.append(cause)
    return tuple(causes)


def _compare(kind: _Kind, runs: Sequence[_Measured]) -> Cause | None:
    """The cause of runs of one kind; None where they are alike."""
    if len(runs) < _FEWEST:
        return None
    best = max(runs, key=lambda run: run.busbw)
    slow = [run for run in runs if UNLIKE_RUNS * run.busbw < best.busbw]
    if not slow:
        return None
    fast = [run for run in runs if UNLIKE_RUNS * run.busbw >= best.busbw]
    suspects = frozenset.intersection(*(run.hosts for run in slow))
    suspects -= frozenset().union(*(run.hosts for run in fast))
    what = f"{kind.operation} of {write_size(kind.nbytes)}"
    worst = min(slow, key=lambda run: run.busbw)
    evidence = (
        _quote(
            worst, f"{write_rate(worst.busbw)} for {what}, with {join_names(sorted(worst.hosts))}"
        ),
        _quote(
            best, f"{write_rate(best.busbw)} for the same, with {join_names(sorted(best.hosts))}"
        ),
        Evidence(f"{len(slow)} of {len(runs)} runs are slower by 30 % or more", worst.case.file),
    )
    explains = frozenset((Word.SLOW,)) if any(is_slow(run.case) for run in slow) else frozenset()
    names = join_names(sorted(suspects), most=4)
    if suspects and len(fast) > 1:
        return Cause(
            "slow host",
            f"all slow runs have {names}, and no fast one has",
            evidence,
            (
                f"run on {names} alone, and compare with another host: clocks, PCIe (lspci -vv), adapters "
                "(ibstat), NVLink (nvidia-smi nvlink -s)",
                "leave it out of jobs until it is as fast as the others",
            ),
            ("NVIDIA/nccl-tests#106", "microsoft/msccl#48"),
            Certainty.LIKELY,
            explains,
            LARGE_SIZES,
        )
    return Cause(
        "unlike runs",
        f"runs of {what} differ by {best.busbw / worst.busbw:.2g} times: something comes and goes",
        evidence,
        (
            "the same test on pairs of nodes, several times: one bad node makes all its pairs slow",
            "other jobs on the same nodes or switches; adaptive routing and flow control (RoCE)",
            "clocks and power of the GPUs during the run (nvidia-smi -q -d PERFORMANCE)",
        ),
        ("NVIDIA/nccl-tests#106", "NVIDIA/nccl-tests#283", "NVIDIA/nccl#378"),
        Certainty.POSSIBLE,
        explains,
        LARGE_SIZES,
    )


def _quote(run: _Measured, text: str) -> Evidence:
    """Evidence from the largest size of a run."""
    return Evidence(text, run.case.file, run.line)
