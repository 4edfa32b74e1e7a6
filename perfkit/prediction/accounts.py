"""Views of an iteration: its parts, operations, modules, idle time, critical path, and its Chrome
trace."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import check_choice, check_positive, rank_largest
from perfkit.prediction.simulation import RankTimeline, measure_overlap
from perfkit.workloads.graph import PHASES, STAGE_HOST, Graph, Label

#: Position of an operation, and how much later its iteration is than the one shown [s].
Place: TypeAlias = tuple[int, float]
#: Two times are equal if they differ by less than this share of the period [-].
_EQUAL = 1e-9
#: An event of a trace that ui.perfetto.dev and chrome://tracing open: ranks are processes, streams
#: are threads.
Event: TypeAlias = dict[str, Any]
#: Sizes of an operation that its slice shows, where they apply.
_SHOWN = ("flops", "batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim")
_MODULES, _HOST, _COMPUTE, _COMMUNICATION = range(4)


def sum_idle(timeline: RankTimeline) -> dict[str, float]:
    """Busy and idle time of a compute stream by cause, see `Prediction.idle`; the times sum to the
    period [s]."""
    # time that hosts add to the stages of a pipeline
    pipeline_hosts: Any = timeline.graph.kernels.get(STAGE_HOST, [])
    busy = float(np.delete(timeline.times.seconds, pipeline_hosts).sum())
    contention = float(timeline.contention_time.sum())
    exposed = float(timeline.exposed_time.sum())
    wait_for_ranks = timeline.wait_time_for_ranks
    times = {
        "busy_s": busy,
        "contention_s": contention,
        "host_s": timeline.period - busy - contention - exposed - wait_for_ranks,
        "communication_s": exposed,
        "waiting_s": wait_for_ranks,
    }
    rounding = _EQUAL * timeline.period
    return {name: seconds if seconds > rounding else 0.0 for name, seconds in times.items()}


def sum_communication(timeline: RankTimeline) -> dict[str, float]:
    """Time of a rank in collectives [s], and shares of the iteration [-], see
    `Prediction.communication`."""
    collectives = timeline.graph.collectives
    in_flight = np.stack([timeline.starts, timeline.ends], axis=1)[collectives]
    total = float(measure_overlap(in_flight, np.array([-np.inf]), np.array([np.inf]))[0])
    exposed = float(timeline.exposed_time.sum()) + float(timeline.contention_time.sum())
    exposed = min(exposed, total)
    return {
        "total_s": total,
        "exposed_s": exposed,
        "overlapped_s": total - exposed,
        "waiting_s": timeline.wait_time_for_ranks,
        "exposed_share": exposed / timeline.period,
        "waiting_share": timeline.wait_time_for_ranks / timeline.period,
    }


def list_operations(timelines: Sequence[RankTimeline]) -> Table:
    """Start and end of every operation in program order, see `Prediction.timeline`."""
    import polars

    schema = {"rank": polars.Int64, "stream": polars.String, "operation": polars.Int64}
    schema |= dict.fromkeys(("name", "kind", "phase", "module"), polars.String)
    rows: list[tuple[Any, ...]] = []
    for timeline in timelines:
        rank = timeline.times.group.ranks[0]
        times = zip(timeline.starts.tolist(), timeline.ends.tolist(), strict=True)
        for place, (label, (start, end)) in enumerate(
            zip(timeline.graph.labels, times, strict=True)
        ):
            stream = timeline.name_stream(place)
            names = (label.name, label.kind, label.phase, label.module)
            rows.append((rank, stream, place, *names, start, end))
        for cause, start, end in timeline.list_added():
            rows.append((rank, "compute", None, cause, cause, cause, "", start, end))
    return polars.DataFrame(
        rows, {**schema, "start_s": polars.Float64, "end_s": polars.Float64}, orient="row"
    )


def cut_path(depth: int | None) -> Any:
    """The first names of a module's path."""
    import polars

    if depth is None:
        return polars.col("module")
    names = polars.col("module").str.split(".").list
    return names.head(int(check_positive("depth", depth, integer=True))).list.join(".")


def list_spans(operations: Table, level: str, depth: int | None = None) -> Table:
    """Start and end of each module or stage on the compute streams, from its first operation to its
    last.

    Columns rank, stream (the level), phase, module, operations [-], start_s, end_s [s]; spans of a
    rank do not overlap.
    """
    check_threads()
    import polars

    keys, module = (
        ("rank", "stream", "phase", "module"),
        cut_path(depth) if level == "module" else polars.lit(""),
    )
    frame = operations.filter(stream="compute").drop_nulls("operation")
    frame = frame.with_columns(stream=polars.lit(level), module=module)
    ends = {"operations": polars.len().cast(polars.Int64), "start_s": polars.first("start_s")}
    spans = frame.group_by(polars.struct(keys).rle_id().alias("span"), *keys, maintain_order=True)
    return spans.agg(**ends, end_s=polars.last("end_s")).drop("span")


def _list_idle(timeline: RankTimeline) -> Iterator[tuple[int, float]]:
    """Idle times of the compute stream [s], each with the position of the collective or operation
    it counts to.

    Position -1 is the time between two iterations.
    """
    ends = timeline.ends[timeline.compute]
    since = ends[-1:] - timeline.period + timeline.added.total
    gaps = np.maximum(timeline.starts[timeline.compute] - np.concatenate((since, ends[:-1])), 0.0)
    for later, held in timeline.waits_by_operation.items() if len(gaps) else ():
        for place in dict.fromkeys(place for place, *_ in held):
            ones = [one for wait, one, _ in held if wait == place]
            yield (
                ones[rank_largest(timeline.ends[ones], slack=_EQUAL * timeline.period)[0]],
                float(timeline.stream_wait_time[place]),
            )
            gaps[later] -= timeline.stream_wait_time[place]
    for later in np.flatnonzero(gaps > _EQUAL * timeline.period).tolist():
        yield (
            int(timeline.compute[later]) if later or not timeline.device else -1,
            float(gaps[later]),
        )


def sum_modules(timeline: RankTimeline, depth: int | None) -> Table:
    """Time of every module in program order, see `Prediction.modules`.

    Idle time between two iterations belongs to no module. The time of an update is shared among the
    modules whose parameters and gradients it reads and writes, by their bytes; it counts as an
    operation of each. Time that was not simulated has its own rows, as idle time of the update.
    """
    check_threads()
    import polars

    graph, owners = timeline.graph, _find_owners(timeline.graph)
    between_iterations = Label("", "", "", "forward", "")
    labels = (*graph.labels, between_iterations)
    busy = np.where(timeline.times.seconds > 0, timeline.ends - timeline.starts, 0.0)
    spent = [
        (place, 1, own, own * (labels[place].kind == "host"))
        for place, own in enumerate(busy.tolist())
    ]
    spent += [(place, 0, seconds, seconds) for place, seconds in _list_idle(timeline)]
    rows = [
        (module, count, labels[place].phase, share * seconds, share * idle)
        for place, count, seconds, idle in spent
        for module, share in owners.get(place, {labels[place].module: 1.0}).items()
    ]
    rows += [
        (name, 0, "update", seconds, seconds) for name, seconds in timeline.added.list_causes()
    ]
    frame = polars.DataFrame(
        rows, schema=("module", "operations", "phase", "time_s", "idle_s"), orient="row"
    )
    phases = [
        polars.col("time_s").filter(phase=phase).sum().alias(f"{phase}_s") for phase in PHASES
    ]
    sums = (
        polars.sum("operations"),
        *phases,
        polars.sum("idle_s"),
        polars.sum("time_s").alias("share") / timeline.period,
    )
    frame = frame.group_by(cut_path(depth), maintain_order=True).agg(*sums)
    return polars.concat([frame.filter(polars.col("module") != ""), frame.filter(module="")])


def _find_owners(graph: Graph) -> dict[int, dict[str, float]]:
    """Shares of modules in each update without a module, by the bytes of their parameters and
    gradients [-]."""
    owner: dict[float, str] = {}
    touched: dict[int, list[tuple[float, float]]] = {}
    for place, buffer, nbytes in graph.accesses[:, :3].tolist():
        label = graph.labels[int(place)]
        if label.module:
            owner.setdefault(buffer, label.module)
        elif label.phase == "update" and label.kind != "collective":
            touched.setdefault(int(place), []).append((buffer, nbytes))
    # states of the optimizer belong to the module of the parameters they are used with
    for _ in range(2):
        for buffers in touched.values():
            known = {owner[buffer] for buffer, _ in buffers if buffer in owner}
            if len(known) == 1:
                owner |= dict.fromkeys((buffer for buffer, _ in buffers), known.pop())
    shares: dict[int, dict[str, float]] = {}
    for place, buffers in touched.items():
        owned = [(owner[buffer], nbytes) for buffer, nbytes in buffers if buffer in owner]
        total = sum(nbytes for _, nbytes in owned)
        for module, nbytes in owned if total else ():
            mine = shares.setdefault(place, {})
            mine[module] = mine.get(module, 0.0) + nbytes / total
    return shares


def _precede(places: np.ndarray, place: int, period: float) -> list[Place]:
    """The last of some positions before a given one, in this iteration or the one before, if there
    are any."""
    number = int(np.searchsorted(places, place)) - 1
    return [(int(places[number]), 0.0 if number >= 0 else -period)] if len(places) else []


def _find_held(timeline: RankTimeline, place: int) -> list[Place]:
    """The collective that ended last, of those that an operation of the compute stream or its host
    waited for."""
    near, found = (
        _EQUAL * timeline.period,
        timeline.waits_by_operation.get(timeline.find_next(place), ()),
    )
    shifted = [(one, -timeline.period * ((wait > place) + before)) for wait, one, before in found]
    over = [
        (one, shift)
        for one, shift in shifted
        if timeline.ends[one] + shift <= timeline.starts[place] + near
    ]
    ends = [float(timeline.ends[one]) + shift for one, shift in over]
    return [over[number] for number in rank_largest(ends, slack=near)[:1]]


def _launch(timeline: RankTimeline, place: int) -> tuple[Place, float, Place | None]:
    """What the host launched before an operation, when it was free again [s], and the operation it
    waited for."""
    ((last, shift),) = _precede(np.arange(len(timeline.starts)), place, timeline.period)
    kind, held = (
        timeline.graph.labels[last].kind,
        [] if timeline.device else _find_held(timeline, place),
    )
    freed, found = float(timeline.issued[last]) + shift, None
    waits = (
        [(last, shift)] if (kind == "transfer" if timeline.device else kind != "collective") else []
    )
    for one, later in dict.fromkeys([*waits, *held]):
        if timeline.ends[one] + later >= freed - _EQUAL * timeline.period:
            freed, found = float(timeline.ends[one]) + later, (one, later)
    return (last, shift), freed, found


def _find_last(
    timelines: Sequence[RankTimeline], timeline: RankTimeline, place: int
) -> tuple[RankTimeline, int]:
    """The rank that was ready last for a collective, and the position of the collective there.

    All ranks run their part of a collective at the same time.
    """
    near, parts = _EQUAL * timeline.period, []
    for other in timelines:
        at = other.graph.collectives
        same = (
            abs(other.starts[at] - timeline.starts[place])
            + abs(other.ends[at] - timeline.ends[place])
            <= near
        )
        parts += [(-other.arrival_wait_time[one], other, one) for one in at[same].tolist()]
    return parts[rank_largest([wait for wait, *_ in parts], slack=near)[0]][1:]


def _walk_back(
    timelines: Sequence[RankTimeline],
) -> Iterator[tuple[RankTimeline, str, int, float, float]]:
    """RankTimeline, stream, operation, start and end [s] of the steps of the critical path, the last first,
    without a gap."""
    period, near = timelines[0].period, _EQUAL * timelines[0].period
    timeline = timelines[
        rank_largest(
            [timeline.ends.max(initial=-np.inf) for timeline in timelines],
            slack=near,
        )[0]
    ]
    place, shift = rank_largest(timeline.ends, slack=near)[0], 0.0
    time = float(timeline.ends[place])
    while True:
        stream, end, time = (
            timeline.name_stream(place),
            time,
            float(timeline.starts[place]) + shift,
        )
        yield timeline, stream, place, time, end
        same = np.zeros(0)
        if stream != "compute":
            timeline, place = _find_last(timelines, timeline, place)
            at, group = timeline.graph.collectives, timeline.graph.column("group")
            same = at[group[at] == group[place]]
        known = (
            _precede(same, place, period)
            + _find_held(timeline, place)
            + _precede(timeline.compute, place, period)
        )
        found = next(
            (f for f in known if abs(timeline.ends[f[0]] + f[1] + shift - time) <= near), None
        )
        # it started when it was launched: back along the host's clock, to what that waited for
        while found is None:
            last, freed, found = _launch(timeline, place)
            end, time = time, min(freed + shift, time)
            yield timeline, "host", place, time, end
            if found is None:
                place, shift = last[0], last[1] + shift
        place, shift = found[0], found[1] + shift


def find_critical_path(timelines: Sequence[RankTimeline]) -> Table:
    """The chain of operations that sets the time, see `Prediction.critical_path`.

    The path is followed backward from the last operation over two periods, and the earlier one is
    shown: a delay at the end of an iteration that the next one absorbs is left out. Time that was
    not simulated follows at the end.
    """
    import polars

    # the simulated period
    timelines = [
        replace(timeline, period=timeline.period - timeline.added.total) for timeline in timelines
    ]
    period, near = timelines[0].period, _EQUAL * timelines[0].period
    last = max(float(timeline.ends.max(initial=-np.inf)) for timeline in timelines)
    first_rank = timelines[0].times.group.ranks[0]
    end = last
    unsimulated = []
    for cause, seconds in timelines[0].added.list_causes():
        unsimulated.append((first_rank, "host", None, cause, cause, "", "", end, end + seconds))
        end += seconds
    steps: list[tuple[Any, ...]] = unsimulated[::-1]
    most = 8 * sum(len(timeline.starts) for timeline in timelines)
    for timeline, stream, place, start, end in (
        islice(_walk_back(timelines), most) if period > 0 else ()
    ):
        start, end = max(start + period, last - period), min(end + period, last)
        if end <= last - period + near:
            break
        if end > start + near:
            label = timeline.graph.labels[place]
            names = (label.name, label.kind, label.phase, label.module)
            steps.append((timeline.times.group.ranks[0], stream, place, *names, start, end))
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(steps[::-1], schema=columns, orient="row")


def list_events(timelines: Sequence[RankTimeline], sources: Mapping[int, int]) -> list[Event]:
    """Events of a trace: slices with sizes, and the names of their ranks and streams.

    `sources` gives, for each rank of the trace, the timeline it is like. Slices on one stream do not
    overlap; slices of modules are nested.
    """
    slices, names = list[Event](), list[Event]()
    for rank, source in sources.items():
        timeline = timelines[source]
        slices += _list_slices(timeline, rank)
        streams = {_MODULES: "modules"} | ({_HOST: "host"} if timeline.device else {})
        streams |= {
            _find_thread(timeline, place): timeline.name_stream(place)
            for place in range(len(timeline.starts))
        }
        named = [("process", {"pid": rank}, rank, f"rank {rank}")]
        named += [
            ("thread", {"pid": rank, "tid": thread}, thread, name)
            for thread, name in streams.items()
        ]
        for what, place, number, name in named:
            names.append({"name": f"{what}_name", "ph": "M", **place, "args": {"name": name}})
            names.append(
                {"name": f"{what}_sort_index", "ph": "M", **place, "args": {"sort_index": number}}
            )
    return [*names, *sorted(slices, key=lambda event: float(event["ts"]))]


def _find_thread(timeline: RankTimeline, place: int) -> int:
    collective = timeline.graph.labels[place].kind == "collective"
    return _COMMUNICATION + int(timeline.graph.column("group")[place]) if collective else _COMPUTE


def _list_slices(timeline: RankTimeline, rank: int) -> Iterator[Event]:
    """Stages, their modules and the modules inside those; then every operation, and its launch on
    the host."""
    graph, operations = timeline.graph, list_operations([timeline])
    for depth in range(2 + max((label.module.count(".") for label in graph.labels), default=0)):
        level = "module" if depth else "stage"
        for _, _, phase, module, count, *ends in list_spans(
            operations, level, depth or None
        ).rows():
            if not depth or (module and module.count(".") == depth - 1):
                more = {"phase": phase} if depth else {}
                yield _slice(
                    module or phase, level, rank, _MODULES, *ends, **more, operations=count
                )
    free = float(timeline.issued[-1]) - timeline.period if len(graph) else 0.0
    for place, label in enumerate(graph.labels):
        sizes, issued = graph[place].features, float(timeline.issued[place])
        args: dict[str, Any] = {
            "operation": place,
            "phase": label.phase,
            "module": label.module,
            "variant": label.variant,
        }
        args |= {key: int(sizes[key]) for key in _SHOWN if sizes[key]}
        args["dtype"] = graph.dtypes[place] if graph.dtypes else graph.dtype
        args["bytes"] = int(sizes["nbytes"] or graph.traffic[place])
        if label.kind == "collective":
            args["waiting_us"] = round(float(timeline.arrival_wait_time[place]) * 1e6, 3)
        start, end = float(timeline.starts[place]), float(timeline.ends[place])
        thread = _find_thread(timeline, place)
        yield _slice(label.name, label.kind, rank, thread, start, end, **args)
        if timeline.device:
            yield _slice(label.name, "host", rank, _HOST, free, issued, operation=place)
        free = issued
    for name, *ends in timeline.list_added():
        yield _slice(name, name, rank, _COMPUTE, *ends)


def _slice(
    name: str, category: str, rank: int, thread: int, start: float, end: float, **args: Any
) -> Event:
    """A slice; start and end are rounded to nanoseconds each, so that neighbours do not overlap."""
    begin, until = round(start * 1e6, 3), round(end * 1e6, 3)
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": round(max(until - begin, 0.0), 3)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}


def find_throughput(prediction: Any) -> dict[str, float]:
    """Iterations per second, and samples and tokens per second if the workload has a batch and a
    sequence [1/s]."""
    batch, sequence = (getattr(prediction.workload, name, 0) for name in ("batch", "sequence"))
    counts = {"iterations": 1, "samples": batch, "tokens": batch * sequence}
    return {name: count / prediction.time for name, count in counts.items() if count}


def sum_resources(timeline: RankTimeline) -> tuple[float, float, np.ndarray]:
    """Time of the kernels of a rank, of its host, and of the collectives of each of its
    communicators [s]."""
    times, lengths = (
        timeline.times,
        (timeline.ends - timeline.starts)[timeline.graph.collectives],
    )
    moving = np.bincount(
        np.array(times.group.communicators, dtype=int), weights=lengths, minlength=1
    )
    late = float(times.seconds[timeline.graph.kernels.get(STAGE_HOST, [])].sum())
    return (
        float(times.seconds.sum()) - late,
        timeline.host_time + late,
        moving,
    )


def find_mfu(prediction: Any) -> float | None:
    """Model FLOP utilization: `Graph.model_flops` of all ranks over their peak [-]; None without
    products."""
    flops = sum(
        len(timeline.times.group.ranks) * timeline.graph.model_flops
        for timeline in prediction._timeline.rank_timelines
    )
    peak = prediction.platform.device.peaks[prediction.workload.dtype].value
    return flops / (prediction.time * prediction.ranks * peak) or None


def find_cost(
    prediction: Any,
    price_per_gpu_hour: float,
    power: float = 0.0,
    epochs: float = 1.0,
    **amount: float,
) -> dict[str, float]:
    """Hours, price and energy of a training run.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.
    price_per_gpu_hour : float
        Price of one rank for an hour, in any currency [1/h].
    power : float, optional
        Power of one rank, with its share of the node and the cooling [W].
    epochs : float, optional
        How many times the amount is gone through [-].
    **amount : float
        One of ``samples``, ``tokens`` and ``iterations``: how many [-].

    Returns
    -------
    cost : dict of str to float
        ``hours`` and ``gpu_hours`` [h], ``cost`` in the currency of the price, and, with `power`,
        ``energy_kwh`` [kWh].

    Raises
    ------
    ValueError
        For several amounts, or one that the workload does not have.
    """
    unit, count = (
        next(iter(amount.items())) if len(amount) == 1 else (", ".join(amount) or "missing", 0.0)
    )
    rate = prediction.throughput[
        check_choice("amount, as in samples=1e6,", unit, prediction.throughput)
    ]
    hours = check_positive(unit, count) * check_positive("epochs", epochs) / rate / 3600
    gpu_hours = hours * prediction.ranks
    price = check_positive("price_per_gpu_hour", price_per_gpu_hour, zero=True)
    watts = check_positive("power", power, zero=True)
    account = {"hours": hours, "gpu_hours": gpu_hours, "cost": gpu_hours * price}
    if watts:
        account["energy_kwh"] = gpu_hours * watts / 1000
    return account
