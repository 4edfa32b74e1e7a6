"""Configurations of one structure, priced together on a GPU: closed sums over arrays in place of the event loop."""

from dataclasses import replace
from typing import Any

import numpy as np

from perfkit.platform.platform import Platform
from perfkit.prediction.accounts import BOUND, PACE
from perfkit.prediction.cost import classify, spread_classes, time_operations, time_rank
from perfkit.prediction.memory import measure_together
from perfkit.prediction.ranks import Kind, Workload
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, join_errors
from perfkit.workloads.sizes import count_configurations, select_sizes

_TOGETHER = 1000  # configurations in one pass: calls of numpy weigh little, and what they fill stays near


def price_configurations(workload: Workload, platform: Platform) -> dict[str, np.ndarray]:
    """Price an iteration on one rank of a GPU for every configuration of a workload whose sizes are arrays.

    Parameters
    ----------
    workload : Workload
        A DLRM or a Transformer of one structure; sizes are numbers, or arrays with one for each configuration.
    platform : Platform
        Where it runs.

    Returns
    -------
    columns : dict of str to array
        ``time`` from one iteration to the next [s], ``spread`` of its logarithm [-], ``bottleneck`` and ``needs``, the
        memory [B], as `predict` finds them for each.

    Raises
    ------
    ValueError
        On a CPU: there the order of operations decides, and one configuration is priced after the other.

    Notes
    -----
    On one rank the slower of host and device sets the pace.
    """
    if platform.device.kind == "cpu":
        raise ValueError("sizes are arrays; on a CPU configurations are priced one after the other")
    found: dict[str, np.ndarray] = {}
    count = max(count_configurations(workload), 1)
    widths = np.broadcast_to(getattr(workload, "hidden", 1) / getattr(workload, "heads", 1), count)
    for width in np.unique(widths):  # which decides on the kernel of attention
        members = np.flatnonzero(widths == width)
        for chosen in np.split(members, range(_TOGETHER, len(members), _TOGETHER)):
            for name, values in _price_together(select_sizes(workload, chosen), platform).items():
                found.setdefault(name, np.empty(count, values.dtype))[chosen] = values
    return found


def _price_together(workload: Workload, platform: Platform) -> dict[str, np.ndarray]:
    """Price configurations that fit into one pass."""
    [graph] = workload.graphs(1, accelerator=True)
    classes, models, number = classify([graph], platform, workload.dtype)
    seconds, hot, *_ = time_operations([graph], platform, workload.dtype, 1, models, number)
    often: Any = 1.0 if graph.repeats is None else graph.repeats[:, None]
    whole = platform.context.find_iteration(workload.family, 1)
    times, spreads, _ = spread_classes(graph, platform, classes, models, number, often * seconds, hot)
    times *= whole["scale"] if whole else 1.0
    order = replace(graph, columns={})
    rank = time_rank(Kind(order, (0,), 1.0, {}, []), np.zeros(len(graph)), platform, whole)
    host, busy = float(np.sum(np.ravel(often) * (rank.host + rank.spacing))), times.sum(axis=0)
    error = find_host_error(platform)
    time = np.maximum(busy, host)
    if whole and "per_operation" in whole:
        spread = np.full(len(time), whole.spread)
    else:
        around = (whole.spread if whole else CONTEXT) * np.minimum(busy / time, 1.0)
        known = join_errors(spreads * times / time, models[2]["assumed"] > 0, 0.0, around)
        slower = np.log(np.maximum(busy, host * error) / np.maximum(busy, host / error)) / 2
        spread = np.hypot(known, slower)
    bottleneck = _find_bottleneck([key[0] for key in classes], times, time)
    needs = measure_together(graph, platform, getattr(workload, "optimizer", "sgd"))
    return {"time": time, "spread": spread, "bottleneck": bottleneck, "needs": needs}


def _find_bottleneck(kinds: list[str], times: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """What sets the pace of each configuration, see `Prediction.bottleneck`; what kinds do not take is the host's."""
    busy = times.sum(axis=0)
    names = [f"{BOUND.get(kind, 'memory')}-bound" for kind in kinds] + ["host-bound"]
    totals = {name: np.zeros(len(whole)) for name in names}
    for name, part in zip(names, [*times, whole - busy], strict=True):
        totals[name] += part
    largest = np.argmax(list(totals.values()), axis=0)
    return np.where(whole > PACE * busy, "host-bound", np.array(list(totals), dtype=object)[largest])
