"""Fit a platform to the raw measurements of a machine.

`fit_platform` is the table of contents. Its steps, in reading order: the caches
(`perfkit.calibration.fit_caches`), the usual pace of the machine (`perfkit.calibration.pace`), the
kernels (`perfkit.calibration.fit_kernels`), device and network (`perfkit.calibration.fit_device`),
the collectives (`perfkit.calibration.fit_collectives`), and what iterations add to all of them
(`perfkit.calibration.cpu_context`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from perfkit.calibration.cpu_context import add_context
from perfkit.calibration.fit_caches import choose_caches, find_caches
from perfkit.calibration.fit_collectives import fit_operations
from perfkit.calibration.fit_device import describe_hardware
from perfkit.calibration.fit_kernels import average_spread, fit_classes
from perfkit.calibration.pace import fit_paces, name_disturbances, relate_kernels
from perfkit.fitting import Additive, Caches, Pace
from perfkit.fitting.kernels import widen_few
from perfkit.ground.files import reading
from perfkit.measure.records import (
    WHICH_FILE,
    MachineMeasurements,
    MeasuredKernel,
    read_measurements,
)
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform


@reading("measurements cannot be fitted", WHICH_FILE, told=True)
def fit_platform(
    measurements: MachineMeasurements | Mapping[str, Any], *, name: str | None = None
) -> Platform:
    """Fit a platform to the raw measurements of one machine.

    Parameters
    ----------
    measurements : MachineMeasurements or mapping
        What `perfkit.calibration.cpu_measure.measure_platform` returns, or the same as plain JSON.
    name : str, optional
        Name of the platform; by default made from the device and the ranks.

    Returns
    -------
    platform : Platform
        With kernels, collectives, context and provenance.

    Raises
    ------
    ValueError
        For measurements of another format, or with missing parts or impossible times.
    """
    if not isinstance(measurements, MachineMeasurements):
        measurements = read_measurements(measurements)
    kernels, collectives = measurements.kernels, measurements.collectives
    if not any(kernel.kind == "gemm" for kernel in kernels):
        raise ValueError(
            "kernels holds no gemm; a platform needs at least one to know its peak; measure again"
        )
    ranks = int(measurements.ranks)
    stated = [_state_cache(measurements, level) for level in ("L2", "L3")]
    levels, rates, largest = find_caches(measurements.ladder, kernels)
    caches = choose_caches(kernels, [] if measurements.ladder else stated, levels, largest)
    paces = fit_paces(kernels, measurements.iterations)
    classes = _fit_at_best_pace(kernels, paces, caches)
    device, network = describe_hardware(measurements, levels, rates)
    last_cache = stated[1] or stated[0]
    never_left_cache = not levels or largest < 2.0 * last_cache
    platform = Platform(
        name or f"{measurements.device}-{ranks}",
        replace(device, never_left_cache=never_left_cache),
        network,
        {key: widen_few(fit) for key, fit in classes.items()},
        fit_operations(collectives, ranks),
        context=Context(caches=caches, paces=paces),
        provenance={
            **measurements.machine,
            **measurements.versions,
            "measured": measurements.date,
            "id": measurements.id,
            **_name_disturbances(measurements),
        },
    )
    platform = add_context(platform, measurements)
    stamp = partial(replace, source=measurements.id, date=measurements.date)
    return replace(
        platform,
        kernels={key: stamp(fit) for key, fit in platform.kernels.items()},
        collectives={key: stamp(fit) for key, fit in platform.collectives.items()},
        context=platform.context.map(stamp),
    )


def _fit_at_best_pace(
    kernels: Sequence[MeasuredKernel], paces: Mapping[str, Pace], caches: Caches
) -> dict[str, Additive]:
    """Fit all classes of kernels to their times as measured, or at the usual pace of the machine if
    that leaves smaller residuals."""
    as_measured = fit_classes(kernels, caches)
    if not paces:
        return as_measured
    at_usual_pace = fit_classes(relate_kernels(kernels, paces), caches)
    return min(as_measured, at_usual_pace, key=average_spread)


def _state_cache(measurements: MachineMeasurements, level: str) -> float:
    """Size of a cache as the operating system states it; 0 if it does not [B]."""
    fact = measurements.facts.get(level)
    if fact is None:
        return 0.0
    return fact.value or 0.0


def _name_disturbances(measurements: MachineMeasurements) -> dict[str, str]:
    """What disturbed the measurements, see `perfkit.calibration.pace.name_disturbances`."""
    ranks = []
    for iteration in measurements.iterations:
        for rank in iteration.runs:
            # older measurements of several ranks have no share of a core
            if rank.core_share is not None or len(iteration.runs) == 1:
                ranks.append(rank)
    return name_disturbances(
        kernels=measurements.kernels, collectives=measurements.collectives, iterations=ranks
    )
