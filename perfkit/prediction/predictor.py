"""The time of one training iteration, in named steps.

`predict` is the table of contents: what ranks execute, how long each operation and collective takes,
when each of them starts and ends, and what that says. Each step takes and returns records.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.quantities import check_seconds
from perfkit.ground.units import check_type, format_time, rank_largest
from perfkit.platform.datasheets import note_large_node
from perfkit.platform.estimates import check_time, warn_once
from perfkit.platform.gallery import load_platform
from perfkit.platform.host_memory import SIGMA_UPDATE
from perfkit.platform.platform import Platform
from perfkit.prediction.breakdown import PACE, Breakdown, break_down, find_bottleneck
from perfkit.prediction.cost import Costs, find_contention, join_host, price
from perfkit.prediction.host_tables import note_other_device
from perfkit.prediction.levels import find_level, note_level
from perfkit.prediction.memory import find_shortage
from perfkit.prediction.ranks import (
    RankGroup,
    RankTimes,
    ResolvedWorkload,
    Work,
    group_identical_ranks,
    resolve_workload,
    time_collectives,
    time_ranks,
)
from perfkit.prediction.result import Prediction
from perfkit.prediction.simulation import RankTimeline, Timeline, simulate, sum_host_updates
from perfkit.prediction.uncertainty import (
    CONTEXT,
    find_host_error,
    find_least_spread,
    grow_over_nodes,
    join_errors,
    list_dense_tables,
    list_idle_tensor_cores,
    list_notes,
    spread_host,
    spread_unmodelled,
)
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import STAGE_HOST
from perfkit.workloads.iterations import RecordedLoop
from perfkit.workloads.placement import Plan
from perfkit.workloads.presets import find_workload
from perfkit.workloads.stack import (
    Stack,
    apply_stack,
    list_savings,
    name_padding,
    note_misfits,
    note_replaced,
    note_unpriced,
)
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class PricedIteration(NamedTuple):
    """An iteration whose operations, collectives and hosts have times.

    Parameters
    ----------
    groups : list of RankGroup
        Ranks that execute the same.
    costs : list of Costs
        Times of the operations of each group, with what they rest on.
    times : list of RankTimes
        Times of operations, collectives and the host of each group inside an iteration.
    iteration_fit : Iteration or None
        What was fitted to whole iterations of such workloads on this platform, if anything was.
    level : Iteration or None
        Level of the software, if one was fitted: its scale is part of these times.
    has_pipeline_hosts : bool
        Whether hosts wait for messages with their devices, as those of pipeline stages do.
    notes : tuple of str
        What makes the times of collectives less certain.
    """

    groups: list[RankGroup]
    costs: list[Costs]
    times: list[RankTimes]
    iteration_fit: Iteration | None
    level: Iteration | None
    has_pipeline_hosts: bool
    notes: tuple[str, ...]


class Timings(NamedTuple):
    """When everything in an iteration starts and ends.

    Parameters
    ----------
    timeline : Timeline
        The iteration on all groups of ranks.
    hosts_run_ahead : bool
        Whether hosts launch kernels on devices and wait for none of them.
    slowest : RankTimeline
        The iteration on the ranks with the most work.
    costs : Costs
        Times of the operations of these ranks.
    """

    timeline: Timeline
    hosts_run_ahead: bool
    slowest: RankTimeline
    costs: Costs


class Bounds(NamedTuple):
    """What the time lies between, waiting for other ranks aside.

    Parameters
    ----------
    lower : float
        Time of the busiest resource alone [s].
    serial : float
        Time of all resources, one after another [s].
    """

    lower: float
    serial: float


class Notes(NamedTuple):
    """What a reader should know before trusting a time.

    Parameters
    ----------
    shortage : tuple of str
        That a rank has too little memory.
    doubts : tuple of str
        What makes the time less certain, which `predict` warns of.
    of_messages : tuple of str
        What makes the times of collectives less certain, those with most time first.
    advice : tuple of str
        What somebody may not have chosen, or would want to know.
    unmodelled : mapping of str to float
        Operations without a model, and their time [s].
    """

    shortage: tuple[str, ...]
    doubts: tuple[str, ...]
    of_messages: tuple[str, ...]
    advice: tuple[str, ...]
    unmodelled: Mapping[str, float]


def predict(
    workload: Work | RecordedLoop,
    platform: Platform | str | Path,
    *,
    ranks: int | None = None,
    plan: Plan | None = None,
    slowdown: Mapping[int, float] | None = None,
    execution: str | None = None,
    loading: float | str = 0.0,
    strategy: Strategy | None = None,
    stack: str | Stack | None = None,
) -> Prediction:
    """Predict the time of one training iteration and what limits it.

    Parameters
    ----------
    workload : Workload, str, Graph, sequence of Graph, or what `record` has recorded
        The iteration: a DLRM, Transformer or Net, whose batch is that of all ranks together; the name
        of a preset, with its own batch and number format; one graph for all ranks; or one for each.
        Of a recorded loop its most frequent iteration.
    platform : Platform, str or Path
        A platform, a name of the gallery or a file.
    ranks : int, optional
        Ranks that take part; one, unless given, or those that a graph was captured for. On the command
        line all ranks of the platform are the default; both say which they took [-].
    plan : Plan, optional
        Placement of embedding tables; round-robin by default.
    slowdown : mapping of int to float, optional
        How many times longer the operations of a slow rank take, by rank [-].
    execution : str, optional
        ``eager``; ``compiled``, which merges element-wise work of the forward and backward pass
        into fewer kernels; or ``graphs``, where the host launches all kernels of a GPU at once. As
        recorded, unless given: mostly eager.
    loading : float or str, optional
        Time of a rank's data loader for the batch of an iteration, while the iteration before runs, also with
        its unit, such as ``10ms`` [s].
    strategy : Strategy, optional
        How ranks share a Transformer; it replaces what the Transformer says of sharing, checkpoints
        and micro-batches, with a warning where it leaves at its default what the Transformer states.
    stack : str or Stack, optional
        The software that runs it, one of `perfkit.stacks`: its facts fill what workload, strategy
        and execution leave at their defaults. By default the usual one, see
        `perfkit.workloads.stack.name_usual_stacks`: gradients of micro-batches are added up as it
        does, products are padded where it pads them, and its level scales the time; its other facts
        change nothing, as the padding of the vocabulary by Megatron-LM: state it for these. Captured
        graphs stay as they are.

    Returns
    -------
    prediction : Prediction
        Time, interval, bounds, breakdown and timeline.

    Raises
    ------
    ValueError
        For more ranks than the platform has, a batch that the ranks cannot share evenly, an unknown
        platform, or graphs that do not belong together.

    Examples
    --------
    >>> import perfkit as pk
    >>> r = pk.predict(pk.Transformer.bert("bert-base", batch=2, sequence=128), "zen3-2")
    >>> r.lower_bound <= r.time <= r.serial * 1.001
    True
    """
    machine = platform if isinstance(platform, Platform) else load_platform(platform)
    if slowdown is not None:
        check_type("slowdown", slowdown, Mapping)
    loading_time = check_seconds("loading", loading, zero=True)
    if isinstance(workload, RecordedLoop):
        workload = workload.graph

    # 1. What each rank executes, once for ranks that execute the same.
    work = apply_stack(find_workload(workload), strategy, execution, stack, ranks)
    software = work.stacks[0]
    if work.strategy is None:
        resolved = resolve_workload(
            work.workload,
            machine,
            ranks,
            plan,
            work.execution,
            pads_products=software.pads_products,
        )
    else:
        # strategies are a room of their own, which the core can do without
        from perfkit.prediction.stages import find_stages

        stages = find_stages(
            work.strategy, work.workload, machine, ranks, plan, work.execution, software
        )
        resolved = ResolvedWorkload(*stages)
    groups = group_identical_ranks(resolved.graphs, resolved.ranks, slowdown or {})

    # 2. How long every operation, collective and launch takes.
    level = find_level(machine, software, resolved.workload, resolved.ranks)
    priced = price_iteration(
        resolved, groups, machine, level, has_strategy=work.strategy is not None
    )

    # 3. When each of them starts and ends, on all ranks together.
    timings = simulate_iteration(priced, machine, loading_time)

    # 4. Where the time goes, what limits it, and what a reader must know before trusting it.
    causes = break_down(timings.slowest)
    bottleneck = find_bottleneck(causes, timings.timeline)
    bounds = bound_time(timings, causes, loading_time)
    savings = list_savings(workload, strategy, software, is_stated=stack is not None)
    advise = partial(
        _advise, workload, strategy, resolved.ranks, machine, execution, stack, savings
    )
    padding = name_padding(work.workload, software, is_stated=stack is not None)
    notes = collect_notes(resolved, priced, timings, machine, bottleneck, plan, advise, padding)
    of_level = note_level(machine, software, resolved.workload, resolved.ranks)
    of_facts = note_unpriced(work.workload, software)
    of_facts += note_misfits(work.workload, software, is_stated=stack is not None)
    of_settings: tuple[str, ...] = ()
    if strategy is not None:
        of_settings = note_replaced(workload, work.strategy)
    warn_once(notes.shortage + notes.doubts + notes.of_messages + of_settings, 3)
    spread = estimate_spread(priced, timings, causes, machine, loading_time)
    parts = [*causes.sum_by_resource().values(), causes.loading]
    title = f"{resolved.workload.description} on {machine.name!r}"
    check_time(title, timings.timeline.period, spread, parts)

    is_single_rank_assumed = (
        ranks is None
        and strategy is None
        and resolved.ranks == 1
        and machine.network.ranks > 1
        and hasattr(work.workload, "graphs")  # a captured graph is of its own ranks
    )

    launch_times = np.array([model.launch for model in timings.costs.models])[timings.costs.classes]
    fixed_time = float(launch_times @ timings.slowest.graph.column("launches"))
    if level is not None:
        fixed_time *= level["scale"]
    repredict = partial(
        predict,
        workload,
        ranks=ranks,
        plan=plan,
        slowdown=slowdown,
        execution=execution,
        loading=loading_time,
        strategy=strategy,
        stack=stack,
    )
    return Prediction(
        workload=resolved.workload,
        platform=machine,
        ranks=resolved.ranks,
        time=timings.timeline.period,
        spread=spread,
        causes=causes,
        bottleneck=bottleneck,
        lower_bound=bounds.lower,
        serial=bounds.serial,
        latency=timings.timeline.latency + loading_time,
        device_time=timings.timeline.device_time,
        fixed_time=fixed_time,
        execution=timings.slowest.graph.execution,
        unmodelled=notes.unmodelled,
        warnings=_rank_notes(notes, of_level + of_facts + of_settings, bottleneck),
        stack=software,
        is_single_rank_assumed=is_single_rank_assumed,
        _timeline=timings.timeline,
        _repredict=repredict,
    )


def price_iteration(
    resolved: ResolvedWorkload,
    groups: list[RankGroup],
    platform: Platform,
    level: Iteration | None,
    *,
    has_strategy: bool,
) -> PricedIteration:
    """Time all operations, collectives and launches of an iteration.

    Parameters
    ----------
    resolved : ResolvedWorkload
        What is predicted.
    groups : list of RankGroup
        Ranks that execute the same.
    platform : Platform
        Where it runs.
    level : Iteration or None
        Level of the software.
    has_strategy : bool
        Whether a strategy says how ranks share the workload.

    Returns
    -------
    priced : PricedIteration
        Times by group.
    """
    workload = resolved.workload
    iteration_fit = platform.context.find_iteration(workload.family, resolved.ranks)
    graphs = [group.graph for group in groups]
    costs = price(graphs, platform, dtype=workload.dtype, ranks=resolved.ranks)
    collective_times, notes = time_collectives(groups, platform, iteration_fit)
    seconds = [cost.seconds for cost in costs]
    times = time_ranks(groups, seconds, collective_times, platform, iteration_fit)
    has_pipeline_hosts = has_strategy and STAGE_HOST in graphs[0].kernels
    if has_pipeline_hosts:
        from perfkit.prediction.micro_batches import join_hosts

        contention = find_contention(platform, iteration_fit)
        times = [join_hosts(rank_times, iteration_fit, contention) for rank_times in times]
    if level is not None:
        times = [rank_times.scale(level["scale"]) for rank_times in times]
    return PricedIteration(groups, costs, times, iteration_fit, level, has_pipeline_hosts, notes)


def simulate_iteration(priced: PricedIteration, platform: Platform, loading: float) -> Timings:
    """Run the iteration on all ranks, with their hosts, devices, collectives and data loaders.

    Parameters
    ----------
    priced : PricedIteration
        Times of operations, collectives and hosts.
    platform : Platform
        Where it runs.
    loading : float
        Time of a data loader for one iteration [s].

    Returns
    -------
    timings : Timings
        Starts, ends and the time of the iteration.

    Notes
    -----
    A CPU shares its cores between kernels and collectives: no overlap, unless one was measured.
    """
    on_device = platform.device.kind != "cpu"
    contention = find_contention(platform, priced.iteration_fit)
    timeline = simulate(priced.times, device=on_device, contention=contention)
    hosts_wait = any(len(group.graph.transfers) for group in priced.groups)
    hosts_run_ahead = on_device and not hosts_wait
    if hosts_run_ahead:
        host_time = float(max(timeline.hosts))
        joined = join_host(timeline.device_time, host_time, priced.iteration_fit)
        timeline.extend("host_device_synchronization", float(joined))
        if timeline.added.host_device_synchronization:  # they wait so in a first iteration too
            timeline.latency = max(timeline.latency, timeline.period)
    timeline.extend("loading", loading)
    kernel_times = [float(times.seconds.sum()) for times in priced.times]
    slowest = rank_largest(kernel_times)[0]
    return Timings(
        timeline=timeline,
        hosts_run_ahead=hosts_run_ahead,
        slowest=timeline.measure(slowest),
        costs=priced.costs[slowest],
    )


def bound_time(timings: Timings, causes: Breakdown, loading: float) -> Bounds:
    """Bounds of the time of the slowest ranks: everything overlaps, and nothing does.

    Parameters
    ----------
    timings : Timings
        Starts and ends.
    causes : Breakdown
        Where the time of these ranks goes.
    loading : float
        Time of a data loader for one iteration [s].

    Returns
    -------
    bounds : Bounds
        Time of the busiest resource, and of all [s].
    """
    slowest = timings.slowest
    kernel_time = sum(part.time for part in causes.kernels)
    host_time = slowest.host_time + sum(part.time for part in causes.pipeline_hosts)
    collective_times = (slowest.ends - slowest.starts)[slowest.graph.collectives]
    communicators = np.array(slowest.times.group.communicators, dtype=int)
    communicator_times = np.bincount(communicators, weights=collective_times, minlength=1)
    busiest = max(kernel_time, float(communicator_times.max()), loading)
    if slowest.device:
        busiest = max(busiest, host_time)
    return Bounds(
        lower=min(busiest, timings.timeline.period),
        serial=kernel_time + float(communicator_times.sum()) + host_time + loading,
    )


def _advise(
    workload: Any,
    strategy: Strategy | None,
    ranks: int,
    platform: Platform,
    execution: str | None,
    stack: str | Stack | None,
    savings: Sequence[str],
) -> str:
    """Say what would need less memory: of a Transformer on GPUs with numbers, of others in words."""
    if isinstance(workload, Transformer) and platform.device.kind != "cpu":
        # strategies are a room of their own, which the core can do without
        from perfkit.prediction.next_steps import advise_transformer

        return advise_transformer(workload, platform, strategy, ranks, execution, stack)
    if isinstance(workload, DLRM) and platform.device.kind != "cpu":
        on_host = "kernel='uvm_caching' for large tables"
        if workload.embedding == "separate":
            on_host += " with embedding='exact'"
        if not all(table.host_bytes for table in workload.tables):
            savings = (*savings, on_host)
    less = ", ".join((*savings, "more ranks", "a smaller batch or a device with more memory"))
    return f"take {less}"


def collect_notes(
    resolved: ResolvedWorkload,
    priced: PricedIteration,
    timings: Timings,
    platform: Platform,
    bottleneck: str,
    plan: Plan | None,
    advise: Callable[[], str],
    padding: str,
) -> Notes:
    """Say what the time rests on that was not measured, and what somebody may not have chosen.

    Parameters
    ----------
    resolved : ResolvedWorkload
        What is predicted.
    priced : PricedIteration
        What the times rest on.
    timings : Timings
        How long the iteration and its device take.
    platform : Platform
        Where it runs.
    bottleneck : str
        What limits the iteration.
    plan : Plan or None
        Placement of embedding tables.
    advise : callable
        Says what would need less memory.
    padding : str
        What pads the vocabulary, see `perfkit.workloads.stack.name_padding`.

    Returns
    -------
    notes : Notes
        Sentences.
    """
    graphs = [group.graph for group in priced.groups]
    slowest = timings.slowest
    of_times, unmodelled = list_notes(
        slowest.graph,
        timings.costs,
        platform,
        resolved.workload.family,
        resolved.ranks,
        padding,
    )
    of_graphs = dict.fromkeys(note for graph in graphs for note in graph.notes)
    of_memory = find_shortage(graphs, platform, advise)
    network = platform.network
    of_node = note_large_node(platform.device, network.ranks_per_node, network.ranks)
    tables = [table for graph in graphs for table in graph.tables]
    of_host_tables = note_other_device(tables, platform)
    doubts = (*of_graphs, *of_times, *of_node, *of_host_tables)

    advice: tuple[str, ...] = ()
    if bottleneck not in ("host-bound", "input-bound"):
        advice += list_idle_tensor_cores(slowest, platform)
    if slowest.graph.tables:
        placements = plan.placements if plan and resolved.ranks > 1 else ()
        copied_tables = 0
        for placement in placements:
            if placement.traits.is_copied or placement.frequent:
                copied_tables += 1
        advice += list_dense_tables(slowest.graph, copied_tables)
    device_time = timings.timeline.device_time
    host_is_assumed = any(overhead.kind == "assumed" for overhead in platform.host.values())
    if host_is_assumed and timings.timeline.simulated_period > PACE * device_time:
        advice += (
            "the host sets the pace, and how fast it is was assumed from another machine; "
            f"the device alone takes {format_time(device_time)}",
        )
    return Notes(of_memory, doubts, priced.notes, advice, unmodelled)


def _rank_notes(notes: Notes, of_software: tuple[str, ...], bottleneck: str) -> tuple[str, ...]:
    """All notes, those that matter most first: that it does not fit, then those of what sets the pace.

    What is said of collectives comes last unless they set the pace.
    """
    of_pace = (*notes.doubts, *notes.advice, *of_software)
    if bottleneck == "communication-bound":
        return (*notes.shortage, *notes.of_messages, *of_pace)
    return (*notes.shortage, *of_pace, *notes.of_messages)


def estimate_spread(
    priced: PricedIteration,
    timings: Timings,
    causes: Breakdown,
    platform: Platform,
    loading: float,
) -> float:
    """Join the errors of all models that the time rests on.

    Parameters
    ----------
    priced : PricedIteration
        What the times rest on.
    timings : Timings
        The iteration.
    causes : Breakdown
        Where its time goes.
    platform : Platform
        Where it runs.
    loading : float
        Time of a data loader for one iteration [s].

    Returns
    -------
    spread : float
        Standard deviation of the logarithm of the time [-].

    Notes
    -----
    Where whole iterations were fitted with their hosts, their spread holds all errors. The spread
    of a level of software holds all but those of hosts, and of collectives over more nodes than the
    platform was measured on: no level knows its network. Else operation classes, collectives with
    their waiting, iterations around the sum of their kernels, and hosts have independent errors,
    each by its share of the time; on a GPU they are at least those of families of models that were
    left out, see `find_least_spread`.
    """
    iteration_fit = priced.iteration_fit
    on_device = timings.timeline.device
    time = timings.timeline.period
    costs = timings.costs
    unknown_spread = spread_unmodelled(timings.slowest.graph, costs, platform, time)
    if iteration_fit is not None:
        iteration_spread = iteration_fit.spread
        if not on_device or "per_operation" in iteration_fit:
            return math.hypot(iteration_spread, unknown_spread)
    elif on_device or not platform.context.is_calibrated:
        iteration_spread = CONTEXT
    else:
        iteration_spread = 0.0

    kernel_shares = timings.slowest.times.seconds / timings.slowest.period
    class_shares = np.bincount(costs.classes, kernel_shares, len(costs.spread))
    busy_share = min(float(kernel_shares.sum()), 1.0)
    by_resource = causes.sum_by_resource()
    collective_share = (by_resource["imbalance"] + by_resource["communication"]) / time
    update_share = sum_host_updates(timings.slowest) / time
    collective_share = max(collective_share - update_share, 0.0)
    kernel_spread = float(
        join_errors(
            costs.spread * class_shares,
            costs.assumed,
            collective_share,
            iteration_spread * busy_share,
        )
    )
    if priced.level is not None:
        kernel_spread = priced.level.spread
    nodes_spread = collective_share * grow_over_nodes(timings.slowest, platform)

    host_error = find_host_error(platform, priced.groups[0].graph.execution)
    pipeline_host_spread = 0.0
    if priced.has_pipeline_hosts:
        pipeline_host_spread = causes.host_time / time * math.log(host_error)
    host_spread = spread_host(
        timings.timeline, host_error, loading, timings.hosts_run_ahead, iteration_fit
    )
    update_spread = SIGMA_UPDATE * update_share
    spread = math.hypot(
        kernel_spread,
        nodes_spread,
        pipeline_host_spread,
        host_spread,
        update_spread,
        unknown_spread,
    )
    fit_or_level = iteration_fit if priced.level is None else priced.level
    return max(spread, find_least_spread(platform, fit_or_level))
