"""Make a placement problem of a workload and a platform: memory, curves of messages, and the
correction of the modelled time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.quantities import check_bytes
from perfkit.ground.units import Array, check_choice, check_positive, show, steady
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.nodes import advise_nodes
from perfkit.platform.platform import Platform
from perfkit.prediction.host_tables import check_kernels
from perfkit.prediction.predictor import predict
from perfkit.sharding.costs import INDEX_BYTES, SECONDS, Cost, Costs
from perfkit.sharding.problem import (
    DEVICE_RESOURCES,
    MESSAGE_OF_REDUCTION,
    MESSAGES,
    OBJECTIVES,
    Constraints,
    Curve,
    Message,
    Problem,
    Resource,
)
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS, WHOLE
from perfkit.workloads.sizes import alter, check_ranks
from perfkit.workloads.tables import TableSet

#: Largest share of the memory of a rank that may stay free [-].
_LARGEST_RESERVE = 0.95
#: Smallest size of a message in a curve, the least that the largest one is, and how many there are
#: [B, B, -].
_SMALLEST_MESSAGE, _LARGEST_MESSAGE, _SIZES = 64.0, 1e6, 640


class _OtherWork(NamedTuple):
    """Work of a rank without tables.

    Parameters
    ----------
    device_seconds, host_seconds : float
        Time on the device and on the host [s].
    gradient_bytes : float
        Bytes of the dense gradients that all ranks reduce [B].
    """

    device_seconds: float
    host_seconds: float
    gradient_bytes: float


class _MessageSize(NamedTuple):
    """A kind of message, and the most bytes that it may have [B]."""

    message: Message
    nbytes: float


@dataclass(frozen=True, eq=False)
class _MessageTimes:
    """Curves of the messages that the platform has a model of, and why it has none of the
    others."""

    curves: dict[Resource, Curve]
    missing: dict[Resource, str]


def check_workload(workload: Any) -> None:
    """Refuse what has no tables to place: anything but a DLRM or a TableSet."""
    if not isinstance(workload, DLRM | TableSet):
        raise ValueError(
            f"workload is {show(workload)}; it must be a DLRM or a TableSet; perfkit.read_tables makes one of "
            "frames, lists of dicts, files, and configurations and models of TorchRec"
        )


def set_up(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    ranks: int,
    memory: float | str | None,
    objective: str,
    inputs: str,
    reserve: float = 0.0,
) -> Problem:
    """Check what was given and make a placement problem of it; `memory` is that of a rank [B], of
    which the share `reserve` stays free [-]."""
    check_workload(workload)
    loaded = load_platform(platform)
    _check_nodes(workload, loaded, ranks)
    ranks = check_ranks(workload.batch, ranks)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("inputs", inputs, ("local", "exchanged"))
    for table in workload.tables:
        if table.managed_collision:
            raise ValueError(
                f"managed_collision of {table.name!r} is {table.managed_collision!r}; searches do not price "
                "it; leave it out of the tables, and predict the plan with it"
            )
    pipeline = getattr(workload, "pipeline", "local")
    if pipeline != "local":
        raise ValueError(
            f"pipeline is {pipeline!r}; searches price inputs='exchanged', which nothing hides, or "
            "'local'; take a DLRM with pipeline='local', and predict the plan with this one"
        )
    if ranks > loaded.network.ranks:
        advice = "take fewer"
        if ranks % loaded.network.ranks_per_node == 0:
            advice = advise_nodes(loaded, ranks)
        raise ValueError(
            f"ranks is {ranks}; platform {loaded.name!r} has {loaded.network.ranks}; {advice}"
        )
    rank_memory = loaded.memory_of_rank
    if memory is not None:
        rank_memory = check_bytes("memory", memory)
    if rank_memory is None:
        raise ValueError(f"platform {loaded.name!r} states no memory; give memory in bytes")
    check_kernels(workload.tables, loaded, embedding=workload.embedding)
    costs = Costs(workload, loaded, ranks)
    check_positive("reserve", reserve, zero=True, maximum=_LARGEST_RESERVE)
    kept_free = float(reserve) * rank_memory
    reserved = _find_reserved_memory(workload, costs) + kept_free
    problem = Problem(
        costs,
        Constraints(np.arange(len(workload.tables))),
        OBJECTIVES[objective],
        capacity=max(rank_memory - reserved, 0.0),
        reserved=reserved,
        memory=rank_memory,
        memory_of_platform=memory is None,
        kept_free=kept_free,
    )
    if not problem.objective.has_messages:
        return problem
    other = _measure_other_work(costs)
    message_times = _time_messages(costs, other.gradient_bytes, inputs)
    curves = message_times.curves
    *device_launch, host_launch = costs.launch()
    device_seconds = other.device_seconds + float(sum(device_launch))
    host_seconds = other.host_seconds + float(host_launch)
    if other.gradient_bytes and Resource.GRADIENTS in curves:
        together = curves[Resource.GRADIENTS]
        device_seconds += float(together(other.gradient_bytes))
        curves[Resource.GRADIENTS] = _append_to_message(together, other.gradient_bytes)
    problem = replace(
        problem,
        device_seconds=float(steady(device_seconds)),
        host_seconds=float(steady(host_seconds)),
        curves=curves,
        missing_models=message_times.missing,
    )
    if not isinstance(workload, DLRM):
        return problem
    correction = _find_correction(workload, problem)
    host_seconds_of_message = _time_host_of_messages(workload, costs)
    return replace(problem, correction=correction, host_seconds_of_message=host_seconds_of_message)


def _check_nodes(workload: DLRM | TableSet, platform: Platform, ranks: int) -> None:
    """Refuse parts of a node whose ranks do not divide the batch: whole nodes mostly do."""
    ranks = int(check_positive("ranks", ranks, integer=True))
    local = platform.network.ranks_per_node
    if ranks > local and ranks % local and workload.batch % ranks:
        raise ValueError(
            f"ranks is {ranks}; platform {platform.name!r} has nodes of {local}; take a multiple of "
            f"{local}, and a batch that divides by it"
        )


def _find_reserved_memory(workload: DLRM | TableSet, costs: Costs) -> float:
    """Memory of a rank that everything but the tables takes [B]."""
    if isinstance(workload, DLRM):
        return costs.footprint
    # the pooled rows of the samples of a rank, and their gradients
    numbers_of_sample = sum(t.dim * t.results for t in workload.tables)
    pooled_bytes_of_sample = numbers_of_sample * workload.pooled_itemsize
    return 2 * workload.batch / costs.ranks * pooled_bytes_of_sample


def _measure_other_work(costs: Costs) -> _OtherWork:
    """Time of a rank without tables, and the bytes of its dense gradients."""
    rest, priced = costs.rest, costs.priced_rest
    if rest is None or priced is None:
        return _OtherWork(0.0, 0.0, 0.0)
    device_seconds = float((costs.scale * priced.seconds).sum())
    host_seconds = float(costs.issue(rest).sum())
    if not costs.accelerated:  # the host computes as well
        device_seconds, host_seconds = device_seconds + host_seconds, 0.0
    gradient_bytes = 0.0
    for position in rest.collectives:
        if rest.labels[position].variant == "all_reduce":
            gradient_bytes += float(rest.features.nbytes[position])
    return _OtherWork(device_seconds, host_seconds, gradient_bytes)


def _append_to_message(curve: Curve, nbytes: float) -> Curve:
    """Time that more bytes take in a message that has `nbytes` already [B]."""
    return Curve(curve.nbytes, curve(curve.nbytes + nbytes) - curve(nbytes))


def _time_host_of_messages(workload: DLRM, costs: Costs) -> dict[Resource, float]:
    """Host time around the messages of each kind of placement, beyond what is counted by table
    [s]."""
    seconds = dict[Resource, float]()
    if not costs.accelerated or costs.ranks == 1:
        return seconds
    number = _find_divisible_table(workload, costs.ranks)
    table = workload.tables[number]
    pair = alter(workload, {"tables": (table, table)})

    def issue(first: int | Placement) -> float:
        """Host time of the first rank with one table; the other table is on the second [s]."""
        plan = Plan.from_owners([first, 1], ranks=costs.ranks)
        graphs = pair.graphs(costs.ranks, plan, accelerator=True)
        return float(costs.issue(graphs[0]).sum())

    for kind in PLACEMENT_KINDS:
        if kind.reduction is None:
            continue
        if kind.splits_rows and table.rows < costs.count_parts(kind):
            continue  # no table can be placed so
        resource = MESSAGE_OF_REDUCTION[kind.reduction]
        counted = float(costs.shards(np.array([number]), kind.name).shard[0, Cost.HOST])
        if resource is not Resource.GRADIENTS:
            counted += float(costs.launch()[SECONDS.index(Cost.HOST)])
        placement = Placement.example(kind, ranks=costs.ranks, ranks_per_node=costs.ranks_per_node)
        uncounted = issue(placement) - issue(1) - counted
        # where several kinds add up the same, that of the kind with the most calls
        seconds[resource] = float(steady(max(uncounted, seconds.get(resource, 0.0))))
    return seconds


def _find_divisible_table(workload: DLRM, ranks: int) -> int:
    """Number of the first table whose rows can be split over all ranks; if there is none, of the
    table with most rows."""
    rows = [table.rows for table in workload.tables]
    for number, count in enumerate(rows):
        if count >= ranks:
            return number
    return rows.index(max(rows))


def _list_message_sizes(costs: Costs, gradient_bytes: float, inputs: str) -> Sequence[_MessageSize]:
    """The most bytes of each kind of message."""
    tables, batch = costs.workload.tables, costs.workload.batch
    numbers_of_sample = sum(t.dim * t.results for t in tables)
    pooled = float(batch * numbers_of_sample * costs.workload.pooled_itemsize)
    indices = batch * sum(t.lookup_bytes * t.pooling + INDEX_BYTES * t.num_features for t in tables)
    gradients = float(sum(t.nbytes for t in tables)) + gradient_bytes
    sizes = []
    for message in MESSAGES:
        if message.resource is Resource.INDICES:
            if inputs == "exchanged":
                sizes.append(_MessageSize(message, indices))
        elif message.resource is Resource.GRADIENTS:
            sizes.append(_MessageSize(message, gradients))
        else:
            sizes.append(_MessageSize(message, pooled))
    return sizes


def _time_messages(costs: Costs, gradient_bytes: float, inputs: str) -> _MessageTimes:
    """Times of the messages by their size; `gradient_bytes` is the size of the dense gradients
    [B]."""
    times = _MessageTimes({}, {})
    for message, most in _list_message_sizes(costs, gradient_bytes, inputs):
        sizes = np.geomspace(_SMALLEST_MESSAGE, max(2 * most, _LARGEST_MESSAGE), _SIZES)
        nbytes = steady(sizes)
        try:
            seconds = _time_message(costs, message, nbytes)
        except ValueError as error:  # this collective has no model on so many ranks
            if message.resource is Resource.POOLED:
                raise
            times.missing[message.resource] = str(error)
            continue
        times.curves[message.resource] = Curve(nbytes, seconds)
    return times


def _time_message(costs: Costs, message: Message, nbytes: Array) -> Array:
    """Time of a kind of message for each of these sizes [s]."""
    ranks = costs.ranks_per_node if message.inside_nodes else costs.ranks
    seconds = np.zeros(len(nbytes))
    if ranks == 1:
        return seconds
    for operation in message.collectives:
        time = costs.platform.collective_time(operation, nbytes, ranks=ranks)
        seconds = seconds + steady(costs.scale * time + costs.seconds_per_collective)
    return seconds


def _find_correction(workload: DLRM, problem: Problem) -> float:
    """Predicted over modelled time of a plan of whole tables, balanced by their seconds [-]."""
    costs = problem.costs
    owners = np.zeros(len(workload.tables), dtype=int)
    table_costs = costs.shards(np.arange(len(owners)), WHOLE.name).shard
    table_loads = problem.find_loads(table_costs)
    table_seconds = table_loads[:, DEVICE_RESOURCES].sum(axis=1)
    rank_loads = np.zeros((costs.ranks, len(Resource)))
    for table in np.argsort(-table_seconds, kind="stable"):
        rank = np.argmin(rank_loads[:, DEVICE_RESOURCES].sum(axis=1))
        owners[table] = rank
        rank_loads[rank] += table_loads[table]
    # the data loaders of a prediction read the indices of their own tables
    curves_of_prediction: dict[Resource, Curve] = {
        resource: curve
        for resource, curve in problem.curves.items()
        if resource is not Resource.INDICES
    }
    modelled_problem = replace(problem, curves=curves_of_prediction)
    modelled = float(modelled_problem.time(rank_loads.max(axis=0)))
    with keep_quiet():
        plan = Plan.from_owners(owners.tolist(), ranks=costs.ranks)
        predicted = predict(workload, costs.platform, ranks=costs.ranks, plan=plan).time
    return float(steady(predicted / modelled)) if modelled else 1.0
