"""A workload on ranks of a platform as a placement problem: prices, what the rest of an iteration takes, memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfkit.estimates import keep_quiet
from perfkit.gallery import load_platform
from perfkit.platform import Platform
from perfkit.prediction.cost import price
from perfkit.prediction.result import predict
from perfkit.sharding.objective import OBJECTIVES, Objective
from perfkit.sharding.options import price_placement
from perfkit.sharding.pricing import Curve, Rates, project
from perfkit.units import check_choice, check_positive, check_type, steady
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.tables import TableSet

__all__ = ["INPUTS", "Problem", "set_up"]

#: Where indices come from: every rank's loader reads those that its shards need, or ranks exchange them first.
INPUTS = ("local", "exchanged")


@dataclass(frozen=True, eq=False)
class Problem:
    """What has to be placed and what that costs.

    Parameters
    ----------
    rates : Rates
        Prices of shards.
    objective : Objective
        Time of an iteration from what ranks carry.
    capacity : float
        Memory of a rank for tables [B].
    reserved : float
        Memory of a rank that everything else takes [B].
    """

    rates: Rates
    objective: Objective
    capacity: float
    reserved: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds whose messages the platform has a model for."""
        needs = {"row_wise": "rows", "table_row_wise": "partial", "data_parallel": "gradients"}
        if self.objective.kind == "additive":
            return ("table_wise", "column_wise")
        lacking = {kind for kind, name in needs.items() if name not in self.objective.curves}
        return tuple(k for k in ("table_wise", "column_wise", "table_column_wise", *needs) if k not in lacking)

    def spread(self, parts: Mapping[str, float]) -> float:
        """Standard deviation of the logarithm of a time from those of its parts, which err independently."""
        whole, platform = self.rates.iteration, self.rates.platform
        if whole is not None:
            return whole.spread
        kernels = {"lookup": "forward", "backward": "backward", "update": "update"}
        found = {name: platform.find_kernel(f"embedding_{kind}") for name, kind in kernels.items()}
        spreads = {name: pair[1].spread for name, pair in found.items() if pair}
        total = sum(parts.values())
        return float(np.hypot.reduce([spreads.get(name, 0.3) * part / total for name, part in parts.items()]))


def set_up(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    ranks: int,
    *,
    memory: float | None = None,
    objective: str = "iteration",
    inputs: str = "local",
) -> Problem:
    """Make a placement problem of a workload on ranks of a platform.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained.
    platform : Platform, str or Path
        On what.
    ranks : int
        Ranks that take part [-].
    memory : float, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        One of `perfkit.sharding.objective.OBJECTIVES`.
    inputs : str, optional
        One of `INPUTS`.

    Returns
    -------
    problem : Problem
        Prices, objective and memory.

    Raises
    ------
    ValueError
        For a workload without tables, more ranks than the platform has, a batch that does not divide, unknown settings.
    """
    check_type("workload", workload, DLRM | TableSet)
    where, ranks = load_platform(platform), int(check_positive("ranks", ranks, integer=True))
    check_choice("objective", objective, OBJECTIVES)
    check_choice("inputs", inputs, INPUTS)
    if ranks > where.network.ranks:
        raise ValueError(
            f"ranks is {ranks}; platform {where.name!r} has {where.network.ranks}; take fewer or another platform"
        )
    if workload.batch % ranks:
        raise ValueError(f"batch is {workload.batch}; it must divide by the {ranks} ranks; take a multiple of {ranks}")
    capacity = _capacity(where) if memory is None else float(check_positive("memory", memory))
    rates = Rates(workload, where, ranks)
    if isinstance(workload, TableSet):
        received = workload.batch / ranks * sum(t.dim * t.itemsize for t in workload.tables)
        made = _objective(rates, objective, inputs, dense=float(rates.launch[:-1].sum()), host=float(rates.launch[-1]))
        return Problem(rates, made, capacity - 2 * received, 2 * received)
    dense, host, footprint, reduced = _rest(rates)
    rates = replace(rates, footprint=footprint)
    dense, host = dense + float(rates.launch[:-1].sum()), host + float(rates.launch[-1])
    made = _objective(rates, objective, inputs, reduced=reduced, dense=dense, host=host)
    if objective == "iteration":
        made = replace(
            made,
            correction=_correction(
                rates, replace(made, curves={k: c for k, c in made.curves.items() if k != "indices"})
            ),
        )
    return Problem(rates, made, capacity - footprint, footprint)


def _capacity(platform: Platform) -> float:
    """Memory of one rank; ranks of a CPU share that of their node [B]."""
    whole = platform.device.memory[-1].capacity if platform.device.memory else None
    if whole is None:
        raise ValueError(f"platform {platform.name!r} states no memory; give memory in bytes")
    return whole.value / (platform.network.ranks_per_node if platform.device.kind == "cpu" else 1)


def _objective(
    rates: Rates, kind: str, inputs: str, *, reduced: float = 0.0, dense: float = 0.0, host: float = 0.0
) -> Objective:
    """Time of an iteration, with messages at the platform's prices."""
    if kind == "additive":
        return Objective(kind)
    workload, ranks, node = rates.workload, rates.ranks, rates.node
    largest = float(workload.batch * sum(t.dim * t.itemsize for t in workload.tables))
    weights = float(sum(t.nbytes for t in workload.tables))

    def add(operations: tuple[str, ...], over: int, largest: float) -> Curve | None:
        whole: Curve | None = None
        for operation in operations:
            found = rates.curve(operation, over, largest)
            if found is None:
                return None
            whole = whole + found if whole else found
        return whole

    curves = {
        "pooled": add(("all_to_all", "all_to_all"), ranks, largest),
        "rows": add(("reduce_scatter", "all_gather"), ranks, largest),
        "partial": add(("reduce_scatter", "all_gather"), node, largest),
        "gradients": add(("all_reduce",), ranks, weights + reduced),
    }
    if curves["pooled"] is None:  # says which operation and count is missing
        rates.platform.collective_time("all_to_all", 1e6, ranks=ranks)
    if inputs == "exchanged":
        curves["indices"] = add(
            ("all_to_all",), ranks, 8 * workload.batch * sum(t.pooling + 1 for t in workload.tables)
        )
    found = {name: curve for name, curve in curves.items() if curve is not None}
    if reduced and "gradients" in found:
        dense += float(found["gradients"](reduced))
        found["gradients"] = found["gradients"].shift(reduced)
    return Objective(kind, dense=float(steady(dense)), host=float(steady(host)), curves=found)


def _rest(rates: Rates) -> tuple[float, float, float, float]:
    """Time and host time of a rank without tables, the bytes it touches, and the bytes of gradients it reduces."""
    workload, ranks = rates.workload, rates.ranks
    if not isinstance(workload, DLRM) or ranks == 1:
        return 0.0, 0.0, 0.0, 0.0
    owners = [1 + number % (ranks - 1) for number in range(len(workload.tables))]
    accelerator = rates.platform.device.kind != "cpu"
    graph = workload.graphs(ranks, Plan.from_owners(owners, ranks=ranks), accelerator=accelerator)[0]
    seconds, host = rates.times(graph, price(graph, rates.platform, dtype=workload.dtype).seconds)
    sizes = [graph[int(place)] for place in graph.collectives]
    reduced = sum(operation.features["nbytes"] for operation in sizes if operation.name == "all_reduce")
    return float(seconds.sum()), float(host.sum()), graph.footprint, reduced


def _correction(rates: Rates, objective: Objective) -> float:
    """Predicted over modelled time of a plan of whole tables, balanced by their seconds."""
    workload, ranks = rates.workload, rates.ranks
    costs = np.array(
        [o.total(1) for o in price_placement(rates, [Placement("table_wise", (0,))] * len(workload.tables))]
    )
    loads = project(costs)
    seconds, carried, owners = loads[:, 0] + loads[:, 1], np.zeros(ranks), np.zeros(len(costs), dtype=int)
    for table in np.argsort(-seconds, kind="stable"):
        owners[table] = np.argmin(carried)
        carried[owners[table]] += seconds[table]
    with keep_quiet():
        plan = Plan.from_owners(owners.tolist(), ranks=ranks)
        predicted = predict(workload, rates.platform, ranks=ranks, plan=plan)  # type: ignore[arg-type]
    total = np.zeros((ranks, loads.shape[1]))
    np.add.at(total, owners, loads)
    modelled = float(objective.time(total.max(axis=0)))
    return float(steady(predicted.time / modelled)) if modelled else 1.0
