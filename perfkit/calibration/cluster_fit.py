"""Fit a platform to the times of a plan of probes: the third step of a cluster's calibration.

`fit_cluster` is the table of contents: device, collectives, kernels, host, and then the context of
iterations in `perfkit.calibration.cluster_context`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.cluster_context import add_cluster_context
from perfkit.calibration.cluster_measure import list_traced
from perfkit.calibration.cluster_plan import resize_base
from perfkit.fitting import KernelModel
from perfkit.fitting.kernels import FEWEST_SIZES
from perfkit.ground.files import reading
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import Device, Quantity
from perfkit.measure.gpu_records import ClusterMeasurements, DeviceFacts, read_cluster
from perfkit.measure.records import WHICH_FILE
from perfkit.platform.gallery import Named
from perfkit.platform.platform import Platform
from perfkit.platform.sources import add_curves, assemble, compare_devices, fit_gemms, fit_kernel


@reading("measurements cannot be fitted", WHICH_FILE, told=True)
def fit_cluster(
    measurements: ClusterMeasurements | Mapping[str, Any],
    base: Named | None = None,
    *,
    name: str | None = None,
) -> Platform:
    """Fit a platform to the times of a plan; parts without probes stay those of a similar platform.

    Parameters
    ----------
    measurements : ClusterMeasurements or mapping
        Result of `perfkit.calibration.cluster_measure.measure_cluster`, or the same as plain JSON.
    base : Platform, str or Path, optional
        Platform that the plan was made for; by default the gallery's platform of that name.
    name : str, optional
        Name of the platform; by default that of the base, followed by "measured".

    Returns
    -------
    platform : Platform
        The platform. Its provenance lists the parts of the base, and the probes without a time.

    Raises
    ------
    ValueError
        If no probe has a time, and for measurements with missing parts.
    """
    check_threads()
    if not isinstance(measurements, ClusterMeasurements):
        measurements = read_cluster(measurements)
    base = resize_base(base or measurements.base, measurements.ranks_per_node, measurements.nodes)
    source, day = measurements.id, measurements.date
    facts = measurements.facts
    if not measurements.list_kernels() and not measurements.list_collectives():
        failures = measurements.list_failures()
        if not failures:
            raise ValueError("probes holds no kernel and no collective; measure again")
        _, failure = failures[0]
        raise ValueError(f"no probe was timed; the first failed with: {failure.failed}")
    kernels, collectives = _tabulate_kernels(measurements), _tabulate_collectives(measurements)
    compare_devices("the measurements are", [facts.name if facts else ""], base)
    platform = replace(base, device=_describe(base.device, facts, day))
    if not collectives.is_empty():
        platform = add_curves(platform, collectives, source=source, date=day)
    fits = _fit_kernels(kernels, platform.device, source, day)
    platform = _drop_finer(platform, fits)
    platform = assemble(platform, name=name or f"{base.name}, measured", kernels=fits)
    host = {
        entry.name: Quantity(entry.mean, "s", "measured", source, day, entry.error)
        for entry in measurements.host
    }
    platform = replace(platform, host=host or base.host)
    platform = add_cluster_context(platform, list_traced(measurements), source, day)
    return replace(platform, provenance=_tell_story(measurements, platform, base))


def _drop_finer(platform: Platform, fits: Mapping[str, KernelModel]) -> Platform:
    """The base without its kernels of attention where attention was timed: what was timed is of the
    device, and would stand behind a finer class of the base."""
    if "attention" not in fits:
        return platform
    kept = {key: fit for key, fit in platform.kernels.items() if not key.startswith("attention.")}
    return replace(platform, kernels=kept)


def _tabulate_kernels(measurements: ClusterMeasurements) -> pl.DataFrame:
    """Times of cold kernels, of classes with enough sizes [s]."""
    rows = []
    for probe, times in measurements.list_kernels():
        sizes = times.sizes
        rows.append(
            {
                "kind": probe.kind,
                "variant": probe.variant,
                "dtype": probe.dtype,
                "cold": probe.cold,
                "m": sizes.get("m"),
                "n": sizes.get("n"),
                "k": sizes.get("k"),
                "flops": sizes.get("flops"),
                "nbytes": sizes.get("nbytes"),
                "seconds": float(np.median(times.samples)),
            }
        )
    if not rows:
        return pl.DataFrame()
    cold = pl.DataFrame(rows, infer_schema_length=None).filter("cold")
    return cold.filter(pl.len().over("kind", "dtype") >= FEWEST_SIZES)


def _tabulate_collectives(measurements: ClusterMeasurements) -> pl.DataFrame:
    """Times of collectives, of operations and ranks with enough sizes [s]."""
    rows = [
        {
            "operation": probe.operation,
            "dtype": probe.dtype,
            "ranks": probe.ranks,
            "nodes": probe.nodes,
            "nbytes": probe.nbytes,
            "seconds": float(np.median(times.samples)),
        }
        for probe, times in measurements.list_collectives()
    ]
    if not rows:
        return pl.DataFrame()
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return frame.filter(pl.len().over("operation", "dtype", "ranks", "nodes") >= FEWEST_SIZES)


def _fit_kernels(
    frame: pl.DataFrame, device: Device, source: str, day: str
) -> dict[str, KernelModel]:
    """Fits of timed kernels: products by number format, other classes as a whole and by variant."""
    fits: dict[str, KernelModel] = {}
    if frame.is_empty():
        return fits
    products = frame.filter(kind="gemm")
    if len(products):
        fits.update(fit_gemms(products, device, source=source, date=day))
    for (kind, dtype), rows in frame.filter(pl.col("kind") != "gemm").group_by(
        "kind", "dtype", maintain_order=True
    ):
        parts = {str(kind): rows}
        if kind in ("attention", "convolution"):
            often_timed = rows.filter(pl.len().over("variant") >= 2 * FEWEST_SIZES)
            for (variant,), part in often_timed.group_by("variant", maintain_order=True):
                parts[f"{kind}.{variant}"] = part
        for key, part in parts.items():
            work = pl.col("flops"), pl.col("nbytes")
            fit = fit_kernel(part, ("flops", "nbytes"), *work, device, str(dtype), source, day)
            fits[key] = replace(fit, dtypes=(str(dtype),))
    return fits


def _describe(device: Device, facts: DeviceFacts | None, day: str) -> Device:
    """The device with the name and the memory sizes that its driver reports."""
    if facts is None:
        return device
    stated_by = "torch.cuda.get_device_properties"
    cache = Quantity(facts.cache, "B", "measured", stated_by, day)
    memory = Quantity(facts.memory, "B", "measured", stated_by, day)
    nearer, last_cache, main_memory = device.memory[:-2], device.memory[-2], device.memory[-1]
    levels = (
        *nearer,
        replace(last_cache, capacity=cache),
        replace(main_memory, capacity=memory),
    )
    return replace(device, name=facts.name, memory=levels)


def _tell_story(
    measurements: ClusterMeasurements, platform: Platform, base: Platform
) -> dict[str, str]:
    """Provenance: which parts are those of the base, which probes have no time, and what else was
    seen."""
    kept = []
    kept += [key for key, fit in platform.kernels.items() if fit == base.kernels.get(key)]
    kept += [key for key, fit in platform.collectives.items() if fit == base.collectives.get(key)]
    kept += [part for part in ("host", "context") if getattr(platform, part) == getattr(base, part)]
    failures = [
        f"{probe.describe()} ({failure.failed})" for probe, failure in measurements.list_failures()
    ]
    clock = measurements.facts.clock if measurements.facts else None
    return {
        "id": measurements.id,
        "measured": measurements.date,
        "base": base.name,
        "as in the base": ", ".join(kept),
        "without a time": "; ".join(
            f"{count} of {label}" for label, count in Counter(failures).items()
        ),
        "clock": f"{clock / 1e9:.3g} GHz" if clock else "",
        "compiled over eager": _compare_compiled(measurements),
    }


def _compare_compiled(measurements: ClusterMeasurements) -> str:
    """Times of compiled iterations over those of eager ones, by name."""
    eager, compiled = dict[str, float](), dict[str, float]()
    for probe, times in measurements.list_iterations():
        if probe.compiled:
            compiled[probe.name] = times.seconds
        else:
            eager[probe.name] = times.seconds
    both = [name for name in compiled if name in eager]
    return ", ".join(f"{name} {compiled[name] / eager[name]:.2f}" for name in both)
