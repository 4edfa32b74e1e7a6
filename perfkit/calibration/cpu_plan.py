"""How much a calibration of a CPU measures, and in which order: the first step."""

from collections.abc import Sequence
from dataclasses import dataclass

from perfkit.calibration.stopping import plan_rounds
from perfkit.measure.kernels import draw_cases
from perfkit.measure.progress import Part
from perfkit.measure.rare_kernels import draw_rare_cases
from perfkit.measure.samples import Sample, draw_calibration
from perfkit.measure.timing import LARGEST

#: Shares of the full number of sizes of kernels that short and quick calibrations take [-];
#: docs/formulas.md, table 7.2.
SHORT_DENSITY, QUICK_DENSITY = 0.5, 0.25


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
    rounds : sequence of sequence of Sample
        Iterations, in the order in which they are measured.
    stops_early : bool
        Whether a family is left out of later rounds when its fit no longer moves, see
        `perfkit.calibration.stopping`.
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
    rounds: Sequence[Sequence[Sample]]
    stops_early: bool
    iteration_seconds: float
    timed_operations: int

    @property
    def samples(self) -> list[Sample]:
        """All iterations that may be measured."""
        return [sample for samples in self.rounds for sample in samples]


def plan_cpu(*, ranks: int, quick: bool, models: str, stop_early: bool = False) -> CpuPlan:
    """Plan the calibration of a CPU.

    Parameters
    ----------
    ranks : int
        Ranks of collectives and parallel iterations [-].
    quick : bool
        Whether to take fewer sizes and iterations.
    models : str
        One of `perfkit.measure.samples.MODELS`.
    stop_early : bool, optional
        Whether to take fewer sizes, and to stop measuring iterations when their fit no longer moves.

    Returns
    -------
    plan : CpuPlan
        What `perfkit.calibration.cpu_measure.measure_platform` measures.
    """
    samples = draw_calibration(quick=quick, hybrid=ranks == 2, models=models)
    rounds = plan_rounds(samples) if stop_early else [samples]
    if quick:
        return CpuPlan(
            largest_working_set=LARGEST / 2,
            memory_share=1 / 8,
            kernel_density=QUICK_DENSITY if stop_early else 0.4,
            kernel_seconds=0.015,
            collective_seconds=0.1,
            rounds=rounds,
            stops_early=stop_early,
            iteration_seconds=0.3,
            timed_operations=3,
        )
    # Each size is timed as long, stopping early or not: so long calibrations that are replayed with
    # a part of their measurements say what a short one gives.
    return CpuPlan(
        largest_working_set=LARGEST,
        memory_share=1 / 4,
        kernel_density=SHORT_DENSITY if stop_early else 1.0,
        kernel_seconds=0.03,
        collective_seconds=0.2,
        rounds=rounds,
        stops_early=stop_early,
        iteration_seconds=0.6,
        timed_operations=5,
    )


#: Time of the parts of a calibration on one machine, beside the time that the plan states for each
#: size and each iteration [s]; docs/formulas.md, table 7.2. The first part imports PyTorch.
START_SECONDS, LADDER_SECONDS = 3.0, 5.0
KERNEL_SECONDS, COLLECTIVE_SECONDS, ITERATION_SECONDS = 0.02, 0.1, 2.0
#: Share of the time for a size of a kernel that one of a rare kernel gets [-]. A choice: the fits of rare
#: kernels are 4 to 46 % off on sizes that they have not seen (docs/formulas.md, table of parameters), far
#: more than a timing scatters.
RARE_SHARE = 0.7
#: Collectives of all sizes [-].
_COLLECTIVES = 75


def list_parts(plan: CpuPlan, ranks: int) -> list[Part]:
    """List the parts of a calibration of a CPU, each with the time that it took on one machine.

    Parameters
    ----------
    plan : CpuPlan
        How much is measured.
    ranks : int
        Ranks of collectives and parallel iterations [-].

    Returns
    -------
    parts : list of Part
        In the order in which `perfkit.calibration.cpu_measure.measure_platform` measures them.
    """
    kernels = (KERNEL_SECONDS + plan.kernel_seconds) * len(draw_cases(density=plan.kernel_density))
    rare_kernel = KERNEL_SECONDS + RARE_SHARE * plan.kernel_seconds
    kernels += rare_kernel * len(draw_rare_cases(density=plan.kernel_density))
    iterations = len(plan.samples)
    if plan.stops_early:
        # usually two rounds are enough
        iterations = sum(len(samples) for samples in plan.rounds[:2])
    parts = [
        Part("memory", START_SECONDS + LADDER_SECONDS * plan.largest_working_set / LARGEST),
        Part("kernels", kernels),
    ]
    if ranks > 1:
        each = COLLECTIVE_SECONDS + plan.collective_seconds
        parts.append(Part("collectives", _COLLECTIVES * each))
    of_iteration = ITERATION_SECONDS + plan.iteration_seconds
    return [*parts, Part("iterations", of_iteration * iterations)]
