"""How much a calibration of a CPU measures: the first step."""

from collections.abc import Sequence
from dataclasses import dataclass

from perfkit.measure.samples import Sample, draw_calibration
from perfkit.measure.timing import LARGEST


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """How much is measured of each kind.

    Parameters
    ----------
    largest_working_set : float
        Largest working set that is timed [B].
    memory_share : float
        Largest share of the free memory that a working set takes [-].
    kernel_density : float
        Share of the full number of sizes of kernels [-].
    kernel_seconds : float
        Time for each size of a kernel [s].
    collective_seconds : float
        Time for each operation and size of a collective [s].
    samples : sequence of Sample
        Iterations.
    iteration_seconds : float
        Time for each iteration [s].
    timed_operations : int
        Repeats of each iteration in which operations are timed [-].
    """

    largest_working_set: float
    memory_share: float
    kernel_density: float
    kernel_seconds: float
    collective_seconds: float
    samples: Sequence[Sample]
    iteration_seconds: float
    timed_operations: int


def plan_cpu(*, ranks: int, quick: bool, models: str) -> CpuPlan:
    """Plan the calibration of a CPU.

    Parameters
    ----------
    ranks : int
        Ranks of collectives and parallel iterations [-].
    quick : bool
        Whether to take fewer sizes and iterations.
    models : str
        One of `perfkit.measure.samples.MODELS`.

    Returns
    -------
    plan : CpuPlan
        What `perfkit.calibration.cpu_measure.measure_platform` measures.
    """
    samples = draw_calibration(quick=quick, hybrid=ranks == 2, models=models)
    if quick:
        return CpuPlan(
            largest_working_set=LARGEST / 2,
            memory_share=1 / 8,
            kernel_density=0.4,
            kernel_seconds=0.015,
            collective_seconds=0.1,
            samples=samples,
            iteration_seconds=0.3,
            timed_operations=3,
        )
    return CpuPlan(
        largest_working_set=LARGEST,
        memory_share=1 / 4,
        kernel_density=1.0,
        kernel_seconds=0.03,
        collective_seconds=0.2,
        samples=samples,
        iteration_seconds=0.6,
        timed_operations=5,
    )
