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

#: Bottleneck that a class of operations counts to; memory for the classes that are not listed.
BOUND = {
    "gemm": "GEMM",
    "bmm": "GEMM",
    "attention": "attention",
    "convolution": "convolution",
    "transfer": "transfer",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "embedding_update": "embedding",
    "collective": "communication",
    "host": "host",
    "handover": "host",
    "waiting": "imbalance",
}
#: What sets the pace, in the order in which equal parts are named.
_LIMITS = (
    "GEMM",
    "attention",
    "convolution",
    "embedding",
    "memory",
    "communication",
    "imbalance",
    "transfer",
    "host",
)
#: The host sets the pace where an iteration takes this many times as long as its device alone [-].
PACE = 1.02
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


def split_period(rank_timeline: RankTimeline) -> dict[tuple[str, str], tuple[int, float]]:
    """Number and time [s] of the operations of one rank, by phase and class.

    Waiting, host time and time that was not simulated are parts of their own; all parts sum to the
    period.
    """
    graph, parts = rank_timeline.graph, dict[tuple[str, str], tuple[int, float]]()
    sums = (
        np.bincount(graph.classes.of_operation, weights).tolist()
        for weights in (None, rank_timeline.times.seconds)
    )
    for own, more, seconds in zip(graph.classes.distinct, *sums, strict=True):
        count, total = parts.get((own.phase, own.kind), (0, 0.0))
        parts[own.phase, own.kind] = (count + more, total + seconds)
    spent = {phase: 0.0 for phase, kind in parts if kind == "collective"}
    # exposed time counts in the phase of the collective
    for place, number in dict(rank_timeline.times.collective_waits).items():
        spent[graph.labels[graph.collectives[number]].phase] += float(
            rank_timeline.exposed_time[place]
        )
    for place in np.flatnonzero(rank_timeline.contention_time).tolist():
        phase = graph.labels[place].phase
        spent[phase if phase in spent else next(iter(spent))] += float(
            rank_timeline.contention_time[place]
        )
    parts |= {
        (phase, "collective"): (parts[phase, "collective"][0], seconds)
        for phase, seconds in spent.items()
    }
    if rank_timeline.wait_time_for_ranks > _EQUAL * rank_timeline.period:
        parts["", "waiting"] = (len(graph.collectives), rank_timeline.wait_time_for_ranks)
    parts |= {("", name): (1, seconds) for name, seconds in rank_timeline.added.items()}
    rest = rank_timeline.period - sum(time for _, time in parts.values())
    if abs(rest) > _EQUAL * rank_timeline.period:
        parts["", "host"] = (len(graph), rest)
    return parts


def sum_kinds(parts: Mapping[tuple[str, str], tuple[int, float]], *kinds: str) -> float:
    """Time of the parts of some classes [s]."""
    return sum(seconds for (_, kind), (_, seconds) in parts.items() if kind in kinds)


def find_bottleneck(parts: Mapping[str, Any], host: Any, device: Any) -> np.ndarray:
    """What sets the pace: the host where it takes longer than the device, else the class with the
    largest part.

    Parameters
    ----------
    parts : mapping of str to float or array
        Time by operation class, with ``host`` and ``handover`` [s].
    host : float or array
        Time of the host [s].
    device : float or array
        Time of an iteration whose host has launched everything before [s].

    Returns
    -------
    names : array of str
        A name such as ``host-bound`` for each configuration.
    """
    totals = {limit: np.zeros(np.shape(device)) for limit in _LIMITS}
    for kind, seconds in parts.items():
        limit = BOUND.get(kind, "memory")
        totals[limit] = totals[limit] + seconds
    times = np.stack([*totals.values()])
    equal = times >= (1.0 - _EQUAL) * times.max(axis=0)
    largest = np.argmax(equal, axis=0)  # the first of equal parts
    named = np.array([f"{limit}-bound" for limit in _LIMITS], dtype=object)
    host_is_slower = np.asarray(host) > PACE * np.asarray(device)
    return np.where(host_is_slower, "host-bound", named[largest])


def sum_idle(rank_timeline: RankTimeline) -> dict[str, float]:
    """Busy and idle time of a compute stream by cause, see `Prediction.idle`; the times sum to the
    period [s]."""
    # time that hosts add to the stages of a pipeline
    late: Any = rank_timeline.graph.kernels.get(STAGE_HOST, [])
    parts = (
        np.delete(rank_timeline.times.seconds, late),
        rank_timeline.contention_time,
        rank_timeline.exposed_time,
    )
    busy, stolen, exposed = (float(seconds.sum()) for seconds in parts)
    times = {
        "busy_s": busy,
        "stolen_s": stolen,
        "host_s": rank_timeline.period
        - busy
        - stolen
        - exposed
        - rank_timeline.wait_time_for_ranks,
    }
    times |= {"communication_s": exposed, "waiting_s": rank_timeline.wait_time_for_ranks}
    return {
        name: seconds if seconds > _EQUAL * rank_timeline.period else 0.0
        for name, seconds in times.items()
    }


def sum_communication(rank_timeline: RankTimeline) -> dict[str, float]:
    """Time of a rank in collectives [s], and shares of the iteration [-], see
    `Prediction.communication`."""
    in_flight = np.stack([rank_timeline.starts, rank_timeline.ends], axis=1)[
        rank_timeline.graph.collectives
    ]
    total = float(measure_overlap(in_flight, np.array([-np.inf]), np.array([np.inf]))[0])
    stalled = float(rank_timeline.exposed_time.sum())
    exposed = min(stalled + float(rank_timeline.contention_time.sum()), total)
    shares = {
        "exposed_share": exposed / rank_timeline.period,
        "waiting_share": rank_timeline.wait_time_for_ranks / rank_timeline.period,
    }
    return {
        "total_s": total,
        "exposed_s": exposed,
        "overlapped_s": total - exposed,
        "waiting_s": rank_timeline.wait_time_for_ranks,
    } | shares


def list_operations(rank_timelines: Sequence[RankTimeline]) -> Table:
    """Start and end of every operation in program order, see `Prediction.timeline`."""
    import polars

    schema = {"rank": polars.Int64, "stream": polars.String, "operation": polars.Int64}
    schema |= dict.fromkeys(("name", "kind", "phase", "module"), polars.String)
    rows = []
    for rank_timeline in rank_timelines:
        times = zip(
            rank_timeline.graph.labels,
            rank_timeline.starts.tolist(),
            rank_timeline.ends.tolist(),
            strict=True,
        )
        for place, (label, *ends) in enumerate(times):
            rows.append(
                (
                    rank_timeline.times.group.ranks[0],
                    rank_timeline.name_stream(place),
                    place,
                    label.name,
                    label.kind,
                    label.phase,
                    label.module,
                    *ends,
                )
            )
        for name, *ends in rank_timeline.list_added():
            rows.append(
                (rank_timeline.times.group.ranks[0], "compute", None, name, name, name, "", *ends)
            )
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


def _list_idle(rank_timeline: RankTimeline) -> Iterator[tuple[int, float]]:
    """Idle times of the compute stream [s], each with the position of the collective or operation
    it counts to.

    Position -1 is the time between two iterations.
    """
    ends = rank_timeline.ends[rank_timeline.compute]
    since = ends[-1:] - rank_timeline.period + sum(rank_timeline.added.values())
    gaps = np.maximum(
        rank_timeline.starts[rank_timeline.compute] - np.concatenate((since, ends[:-1])), 0.0
    )
    for later, held in rank_timeline.waits_by_operation.items() if len(gaps) else ():
        for place in dict.fromkeys(place for place, *_ in held):
            ones = [one for wait, one, _ in held if wait == place]
            yield (
                ones[
                    rank_largest(rank_timeline.ends[ones], slack=_EQUAL * rank_timeline.period)[0]
                ],
                float(rank_timeline.stream_wait_time[place]),
            )
            gaps[later] -= rank_timeline.stream_wait_time[place]
    for later in np.flatnonzero(gaps > _EQUAL * rank_timeline.period).tolist():
        yield (
            int(rank_timeline.compute[later]) if later or not rank_timeline.device else -1,
            float(gaps[later]),
        )


def sum_modules(rank_timeline: RankTimeline, depth: int | None) -> Table:
    """Time of every module in program order, see `Prediction.modules`.

    Idle time between two iterations belongs to no module. The time of an update is shared among the
    modules whose parameters and gradients it reads and writes, by their bytes; it counts as an
    operation of each. Time that was not simulated has its own rows, as idle time of the update.
    """
    check_threads()
    import polars

    graph, owners = rank_timeline.graph, _find_owners(rank_timeline.graph)
    labels = (
        *graph.labels,
        Label("", "", "", "forward", ""),
    )  # the last one: between two iterations
    busy = np.where(rank_timeline.times.seconds > 0, rank_timeline.ends - rank_timeline.starts, 0.0)
    spent = [
        (place, 1, own, own * (labels[place].kind == "host"))
        for place, own in enumerate(busy.tolist())
    ]
    spent += [(place, 0, seconds, seconds) for place, seconds in _list_idle(rank_timeline)]
    rows = [
        (module, count, labels[place].phase, share * seconds, share * idle)
        for place, count, seconds, idle in spent
        for module, share in owners.get(place, {labels[place].module: 1.0}).items()
    ]
    rows += [(name, 0, "update", seconds, seconds) for name, seconds in rank_timeline.added.items()]
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
        polars.sum("time_s").alias("share") / rank_timeline.period,
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


def _find_held(rank_timeline: RankTimeline, place: int) -> list[Place]:
    """The collective that ended last, of those that an operation of the compute stream or its host
    waited for."""
    near, found = (
        _EQUAL * rank_timeline.period,
        rank_timeline.waits_by_operation.get(rank_timeline.find_next(place), ()),
    )
    shifted = [
        (one, -rank_timeline.period * ((wait > place) + before)) for wait, one, before in found
    ]
    over = [
        (one, shift)
        for one, shift in shifted
        if rank_timeline.ends[one] + shift <= rank_timeline.starts[place] + near
    ]
    ends = [float(rank_timeline.ends[one]) + shift for one, shift in over]
    return [over[number] for number in rank_largest(ends, slack=near)[:1]]


def _launch(rank_timeline: RankTimeline, place: int) -> tuple[Place, float, Place | None]:
    """What the host launched before an operation, when it was free again [s], and the operation it
    waited for."""
    ((last, shift),) = _precede(np.arange(len(rank_timeline.starts)), place, rank_timeline.period)
    kind, held = (
        rank_timeline.graph.labels[last].kind,
        [] if rank_timeline.device else _find_held(rank_timeline, place),
    )
    freed, found = float(rank_timeline.issued[last]) + shift, None
    waits = (
        [(last, shift)]
        if (kind == "transfer" if rank_timeline.device else kind != "collective")
        else []
    )
    for one, later in dict.fromkeys([*waits, *held]):
        if rank_timeline.ends[one] + later >= freed - _EQUAL * rank_timeline.period:
            freed, found = float(rank_timeline.ends[one]) + later, (one, later)
    return (last, shift), freed, found


def _find_last(
    rank_timelines: Sequence[RankTimeline], rank_timeline: RankTimeline, place: int
) -> tuple[RankTimeline, int]:
    """The rank that was ready last for a collective, and the position of the collective there.

    All ranks run their part of a collective at the same time.
    """
    near, parts = _EQUAL * rank_timeline.period, []
    for other in rank_timelines:
        at = other.graph.collectives
        same = (
            abs(other.starts[at] - rank_timeline.starts[place])
            + abs(other.ends[at] - rank_timeline.ends[place])
            <= near
        )
        parts += [(-other.arrival_wait_time[one], other, one) for one in at[same].tolist()]
    return parts[rank_largest([wait for wait, *_ in parts], slack=near)[0]][1:]


def _walk_back(
    rank_timelines: Sequence[RankTimeline],
) -> Iterator[tuple[RankTimeline, str, int, float, float]]:
    """RankTimeline, stream, operation, start and end [s] of the steps of the critical path, the last first,
    without a gap."""
    period, near = rank_timelines[0].period, _EQUAL * rank_timelines[0].period
    rank_timeline = rank_timelines[
        rank_largest(
            [rank_timeline.ends.max(initial=-np.inf) for rank_timeline in rank_timelines],
            slack=near,
        )[0]
    ]
    place, shift = rank_largest(rank_timeline.ends, slack=near)[0], 0.0
    time = float(rank_timeline.ends[place])
    while True:
        stream, end, time = (
            rank_timeline.name_stream(place),
            time,
            float(rank_timeline.starts[place]) + shift,
        )
        yield rank_timeline, stream, place, time, end
        same = np.zeros(0)
        if stream != "compute":
            rank_timeline, place = _find_last(rank_timelines, rank_timeline, place)
            at, group = rank_timeline.graph.collectives, rank_timeline.graph.column("group")
            same = at[group[at] == group[place]]
        known = (
            _precede(same, place, period)
            + _find_held(rank_timeline, place)
            + _precede(rank_timeline.compute, place, period)
        )
        found = next(
            (f for f in known if abs(rank_timeline.ends[f[0]] + f[1] + shift - time) <= near), None
        )
        # it started when it was launched: back along the host's clock, to what that waited for
        while found is None:
            last, freed, found = _launch(rank_timeline, place)
            end, time = time, min(freed + shift, time)
            yield rank_timeline, "host", place, time, end
            if found is None:
                place, shift = last[0], last[1] + shift
        place, shift = found[0], found[1] + shift


def find_critical_path(rank_timelines: Sequence[RankTimeline]) -> Table:
    """The chain of operations that sets the time, see `Prediction.critical_path`.

    The path is followed backward from the last operation over two periods, and the earlier one is
    shown: a delay at the end of an iteration that the next one absorbs is left out. Time that was
    not simulated follows at the end.
    """
    import polars

    # the simulated period
    rank_timelines = [
        replace(rank_timeline, period=rank_timeline.period - sum(rank_timeline.added.values()))
        for rank_timeline in rank_timelines
    ]
    period, near = rank_timelines[0].period, _EQUAL * rank_timelines[0].period
    last = max(float(rank_timeline.ends.max(initial=-np.inf)) for rank_timeline in rank_timelines)
    edges, rank = (
        (last + np.cumsum([0.0, *rank_timelines[0].added.values()])).tolist(),
        rank_timelines[0].times.group.ranks[0],
    )
    steps = [
        (rank, "host", None, name, name, "", "", *edges[n : n + 2])
        for n, name in enumerate(rank_timelines[0].added)
    ][::-1]
    most = 8 * sum(len(rank_timeline.starts) for rank_timeline in rank_timelines)
    for rank_timeline, stream, place, start, end in (
        islice(_walk_back(rank_timelines), most) if period > 0 else ()
    ):
        start, end = max(start + period, last - period), min(end + period, last)
        if end <= last - period + near:
            break
        if end > start + near:
            label = rank_timeline.graph.labels[place]
            steps.append(
                (
                    rank_timeline.times.group.ranks[0],
                    stream,
                    place,
                    label.name,
                    label.kind,
                    label.phase,
                    label.module,
                    start,
                    end,
                )
            )
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(steps[::-1], schema=columns, orient="row")


def list_events(rank_timelines: Sequence[RankTimeline], sources: Mapping[int, int]) -> list[Event]:
    """Events of a trace: slices with sizes, and the names of their ranks and streams.

    `sources` gives, for each rank of the trace, the rank_timeline it is like. Slices on one stream do not
    overlap; slices of modules are nested.
    """
    slices, names = list[Event](), list[Event]()
    for rank, source in sources.items():
        rank_timeline = rank_timelines[source]
        slices += _list_slices(rank_timeline, rank)
        streams = {_MODULES: "modules"} | ({_HOST: "host"} if rank_timeline.device else {})
        streams |= {
            _find_thread(rank_timeline, place): rank_timeline.name_stream(place)
            for place in range(len(rank_timeline.starts))
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


def _find_thread(rank_timeline: RankTimeline, place: int) -> int:
    collective = rank_timeline.graph.labels[place].kind == "collective"
    return (
        _COMMUNICATION + int(rank_timeline.graph.column("group")[place]) if collective else _COMPUTE
    )


def _list_slices(rank_timeline: RankTimeline, rank: int) -> Iterator[Event]:
    """Stages, their modules and the modules inside those; then every operation, and its launch on
    the host."""
    graph, operations = rank_timeline.graph, list_operations([rank_timeline])
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
    free = float(rank_timeline.issued[-1]) - rank_timeline.period if len(graph) else 0.0
    for place, label in enumerate(graph.labels):
        sizes, issued = graph[place].features, float(rank_timeline.issued[place])
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
            args["waiting_us"] = round(float(rank_timeline.arrival_wait_time[place]) * 1e6, 3)
        start, end = float(rank_timeline.starts[place]), float(rank_timeline.ends[place])
        thread = _find_thread(rank_timeline, place)
        yield _slice(label.name, label.kind, rank, thread, start, end, **args)
        if rank_timeline.device:
            yield _slice(label.name, "host", rank, _HOST, free, issued, operation=place)
        free = issued
    for name, *ends in rank_timeline.list_added():
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


def sum_resources(rank_timeline: RankTimeline) -> tuple[float, float, np.ndarray]:
    """Time of the kernels of a rank, of its host, and of the collectives of each of its
    communicators [s]."""
    times, lengths = (
        rank_timeline.times,
        (rank_timeline.ends - rank_timeline.starts)[rank_timeline.graph.collectives],
    )
    moving = np.bincount(
        np.array(times.group.communicators, dtype=int), weights=lengths, minlength=1
    )
    late = float(times.seconds[rank_timeline.graph.kernels.get(STAGE_HOST, [])].sum())
    return (
        float(times.seconds.sum()) - late,
        rank_timeline.host_time + late,
        moving,
    )


def find_mfu(prediction: Any) -> float | None:
    """Model FLOP utilization: `Graph.model_flops` of all ranks over their peak [-]; None without
    products."""
    flops = sum(
        len(rank_timeline.times.group.ranks) * rank_timeline.graph.model_flops
        for rank_timeline in prediction._timeline.rank_timelines
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
