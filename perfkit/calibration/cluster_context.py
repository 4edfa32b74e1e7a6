"""What iterations on GPUs add to isolated kernels: the last step of a cluster's calibration, from
traces of the iterations."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from perfkit.calibration.cpu_context import expect_spread
from perfkit.calibration.traces import read_trace
from perfkit.fitting import InContext, Iteration
from perfkit.ground.units import Array
from perfkit.measure.gpu_records import TimedIteration
from perfkit.measure.probes import LARGE, IterationProbe
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.machine import ANY
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import classify
from perfkit.prediction.cost import price
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM


def add_cluster_context(
    platform: Platform,
    traced: Sequence[tuple[IterationProbe, TimedIteration]],
    source: str,
    day: str,
) -> Platform:
    """Add scales of kernels inside iterations, and the spread of whole iterations around their
    prediction.

    Parameters
    ----------
    platform : Platform
        With fitted kernels, and the context of the base.
    traced : sequence of (IterationProbe, TimedIteration)
        See `perfkit.calibration.cluster_measure.list_traced`.
    source, day : str
        Where the fits are from, and when they were measured.

    Returns
    -------
    platform : Platform
        With its own context; unchanged without traces.

    Notes
    -----
    Scales of the base belong to its own kernels. Only those of kernels that no iteration here runs
    are kept: fused kernels and those of Triton.
    """
    if not traced:
        return platform
    kept = {
        key: fit
        for key, fit in platform.context.kernels.items()
        if key.endswith((".fused", ".triton"))
    }
    bare = replace(platform, context=replace(platform.context, kernels={}))
    parts: dict[str, list[Array]] = {}
    for probe, times in traced:
        if probe.name in LARGE:  # probes of small kernels include the time between them
            for key, columns in _pair_times(probe, times, bare):
                parts.setdefault(key, []).append(columns)
    learned = {
        key: _compare(np.concatenate(columns, axis=1), source, day)
        for key, columns in parts.items()
    }
    context = replace(platform.context, kernels={**kept, **learned}, iterations={})
    where = replace(platform, context=context)
    errors = _find_errors(traced, where)
    fits = {}
    for family, logs in errors.items():
        fits[family] = Iteration.build(
            {"scale": 1.0},
            spread=expect_spread(logs),
            n=len(logs),
            source=source,
            date=day,
        )
    context = replace(where.context, iterations=fits, parallel={**fits, **where.context.parallel})
    return replace(where, context=context)


def _find_errors(
    traced: Sequence[tuple[IterationProbe, TimedIteration]], platform: Platform
) -> dict[str, list[float]]:
    """Logarithms of measured over predicted times, of all iterations and by family [-]."""
    errors: dict[str, list[float]] = {ANY: []}
    with keep_quiet():
        for probe, times in traced:
            workload = load(dict(probe.workload))
            error = math.log(times.seconds / predict(workload, platform).time)
            errors[ANY].append(error)
            errors.setdefault(workload.family, []).append(error)
    return errors


def _compare(columns: Array, source: str, day: str) -> InContext:
    """Time of a class in iterations over the time of its isolated kernels; long operations weigh
    most."""
    alone, seconds = columns
    # weighted least squares of one factor, with weights 1 / alone, is the ratio of the sums
    scale = seconds.sum() / alone.sum()
    weights = seconds / seconds.sum()
    spread = float(np.sqrt(weights @ np.log(seconds / (scale * alone)) ** 2))
    return InContext.build(
        {"scale": float(scale)}, spread=spread, n=len(seconds), source=source, date=day
    )


def _pair_times(
    probe: IterationProbe, times: TimedIteration, platform: Platform
) -> Iterator[tuple[str, Array]]:
    """Isolated and traced times of the operations of an iteration, by class [s].

    A class has an entry for its variant in its number format, for its variant, for its number
    format, and as a whole. A sparse update runs as several operations: its time is that of the
    whole update phase without the dense part.
    """
    trace, workload = read_trace(times.trace), load(dict(probe.workload))
    busy, queued = trace.idle().select("busy_s", "queued_s").row(0)
    graph, seconds = trace.record()
    seconds = seconds * (1 + queued / busy)  # kernels start a little after the previous one ends
    updates = np.array([label.phase == "update" for label in graph.labels])
    sparse = isinstance(workload, DLRM) and workload.sparse
    operations = classify([graph], platform, graph.dtype)
    [costs] = price([graph], platform, dtype=graph.dtype)
    alone = costs.hot
    is_chosen = (seconds > 0) & ~costs.is_unaligned & ~(sparse & updates)
    for index, model in enumerate(operations.models):
        kind = model.kind
        chosen = (operations.of_operation == index) & is_chosen
        if kind in ("collective", "transfer", "other") or not chosen.any():
            continue
        finer = f"{kind}.{model.variant.replace('_causal', '')}"
        keys = (f"{finer}.{model.dtype}", finer, f"{kind}.{model.dtype}", kind)
        for key in dict.fromkeys(keys):
            yield key, np.stack([alone[chosen], seconds[chosen]])
    if sparse:
        (known,) = workload.graphs(1, None, accelerator=True)
        alone = price([known], platform, dtype=known.dtype)[0].hot
        rows = np.array([label.kind == "embedding_update" for label in known.labels])
        dense = ~rows & [label.phase == "update" for label in known.labels]
        left = max(float(np.nansum(seconds[updates]) - alone[dense].sum()), 1e-7)
        yield "embedding_update", np.array([[alone[rows].sum()], [left]])
