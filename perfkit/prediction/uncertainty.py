"""How sure a prediction is: the spread of its time, and what a reader should know before trusting it."""

from typing import Any

import numpy as np

from perfkit.ground.units import format_bytes
from perfkit.platform.estimates import find_transfers
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import Costs
from perfkit.workloads.graph import Graph

#: Spread of isolated kernels inside an iteration, without calibrated iterations [-]; docs/formulas.md, table 9.1.
CONTEXT = 0.08
#: Relative uncertainty of a host overhead without a standard error, by its kind [-]; docs/formulas.md, table 6.1. What
#: was fitted to steps of other machines is no surer than hosts of one generation are alike.
_UNCERTAIN = {"assumed": 0.3, "datasheet": 0.3, "fitted": 0.15, "measured": 0.1}


def find_host_error(platform: Platform) -> float:
    """How many times longer host overheads may be [-]: they are wrong together."""
    numbers = platform.host.values()
    known = [q.stderr if q.stderr is not None else _UNCERTAIN[q.kind] * q.value for q in numbers]
    errors = sum(
        max(e, _UNCERTAIN["fitted"] * q.value * (q.kind == "fitted")) for e, q in zip(known, numbers, strict=True)
    )
    total = sum(q.value for q in numbers)
    return 1 + (errors / total if total else _UNCERTAIN["assumed"])


def find_spread(costs: Costs, seconds: np.ndarray, waits: float, period: float, whole: float) -> float:
    """Spread of the logarithm of the total where the host of no iteration was calibrated, the host aside.

    The systematic errors of the classes, independent where they were fitted and alike where they are only assumed; 30 %
    on what other ranks add; and the spread of whole iterations around the sum of their kernels.
    """
    errors = np.bincount(costs.classes, weights=costs.spread * seconds / period)
    assumed = np.bincount(costs.classes, weights=costs.assumed) > 0
    return float(join_errors(errors, assumed, waits / period, whole * np.minimum(seconds.sum() / period, 1.0)))


def join_errors(errors: Any, assumed: np.ndarray, waits: Any, whole: Any) -> Any:
    """Join the errors of classes and of whole iterations, and the share of waits; each may be an array [-]."""
    sums = (errors[assumed].sum(axis=0) ** 2, (errors[~assumed] ** 2).sum(axis=0), (0.3 * waits) ** 2, whole**2)
    return np.sqrt(sum(sums))


def list_notes(platform: Platform, family: str, ranks: int, costs: Costs, graph: Graph) -> tuple[str, ...]:
    """What a reader should know before trusting the number."""
    notes, kind, context, total = [], family or "such", platform.context, float(costs.seconds.sum())
    if context and family not in context.iterations:
        notes.append(f"{platform.name} was never calibrated with {kind} iterations; the interval is wider")
    elif context and ranks > 1 and family not in context.parallel:
        notes.append(f"{platform.name} was never calibrated with {kind} iterations on several ranks")
    if graph.device and (graph.device == "cpu") != (platform.device.kind == "cpu"):
        notes.append(f"captured with device={graph.device!r}; on {platform.name} other kernels run; capture for it")
    if sum(costs.unmodelled.values()) > 0.02 * total:
        notes.append(f"{', '.join(costs.unmodelled)} have no model and are timed as memory traffic")
    notes += [note for note, seconds in costs.stand_ins.items() if seconds > 0.05 * total]
    notes += dict.fromkeys(text for fit in platform.kernels.values() for text in find_transfers("kernels", fit))
    size, timed = graph.footprint + sum(table.nbytes for table in graph.tables), platform.largest_timed
    if platform.device.never_left_cache and size > timed:
        notes.append(
            f"a rank works on {format_bytes(size)}; the largest working set timed on {platform.name} was "
            f"{format_bytes(timed)} and never left the caches, so that main memory may be slower than predicted"
        )
    return tuple(notes)
