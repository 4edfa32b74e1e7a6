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
from perfkit.prediction.simulation import Lane, measure_overlap
from perfkit.workloads.graph import PHASES, Graph

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


def split_period(lane: Lane) -> dict[tuple[str, str], tuple[int, float]]:
    """Number and time [s] of the operations of one rank, by phase and class.

    Waiting, host time and time that was not simulated are parts of their own; all parts sum to the
    period.
    """
    graph, parts = lane.graph, dict[tuple[str, str], tuple[int, float]]()
    sums = (
        np.bincount(graph.classes[1], weights).tolist() for weights in (None, lane.times.seconds)
    )
    for (kind, _, phase), more, seconds in zip(graph.classes[0], *sums, strict=True):
        count, total = parts.get((phase, kind), (0, 0.0))
        parts[phase, kind] = (count + more, total + seconds)
    spent = {phase: 0.0 for phase, kind in parts if kind == "collective"}
    # exposed time counts in the phase of the collective
    for place, number in dict(lane.times.awaited).items():
        spent[graph.labels[graph.collectives[number]][3]] += float(lane.exposed[place])
    for place in np.flatnonzero(lane.stolen).tolist():
        phase = graph.labels[place][3]
        spent[phase if phase in spent else next(iter(spent))] += float(lane.stolen[place])
    parts |= {
        (phase, "collective"): (parts[phase, "collective"][0], seconds)
        for phase, seconds in spent.items()
    }
    if lane.waiting > _EQUAL * lane.period:
        parts["", "waiting"] = (len(graph.collectives), lane.waiting)
    parts |= {("", name): (1, seconds) for name, seconds in lane.added.items()}
    rest = lane.period - sum(time for _, time in parts.values())
    if abs(rest) > _EQUAL * lane.period:
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


def sum_idle(lane: Lane) -> dict[str, float]:
    """Busy and idle time of a compute stream by cause, see `Prediction.idle`; the times sum to the
    period [s]."""
    # time that hosts add to the stages of a pipeline
    late: Any = lane.graph.kernels.get(("host", "host"), [])
    parts = (np.delete(lane.times.seconds, late), lane.stolen, lane.exposed)
    busy, stolen, exposed = (float(seconds.sum()) for seconds in parts)
    times = {
        "busy_s": busy,
        "stolen_s": stolen,
        "host_s": lane.period - busy - stolen - exposed - lane.waiting,
    }
    times |= {"communication_s": exposed, "waiting_s": lane.waiting}
    return {
        name: seconds if seconds > _EQUAL * lane.period else 0.0 for name, seconds in times.items()
    }


def sum_communication(lane: Lane) -> dict[str, float]:
    """Time of a rank in collectives [s], and shares of the iteration [-], see
    `Prediction.communication`."""
    flights = np.stack([lane.starts, lane.ends], axis=1)[lane.graph.collectives]
    total = float(measure_overlap(flights, np.array([-np.inf]), np.array([np.inf]))[0])
    stalled = float(lane.exposed.sum())
    exposed = min(stalled + float(lane.stolen.sum()), total)
    shares = {"exposed_share": exposed / lane.period, "waiting_share": lane.waiting / lane.period}
    return {
        "total_s": total,
        "exposed_s": exposed,
        "overlapped_s": total - exposed,
        "waiting_s": lane.waiting,
    } | shares


def list_operations(lanes: Sequence[Lane]) -> Table:
    """Start and end of every operation in program order, see `Prediction.timeline`."""
    import polars

    schema = {"rank": polars.Int64, "stream": polars.String, "operation": polars.Int64}
    schema |= dict.fromkeys(("name", "kind", "phase", "module"), polars.String)
    rows = []
    for lane in lanes:
        times = zip(lane.graph.labels, lane.starts.tolist(), lane.ends.tolist(), strict=True)
        for place, ((name, kind, _, phase, module), *ends) in enumerate(times):
            rows.append(
                (
                    lane.times.kind.ranks[0],
                    lane.name_stream(place),
                    place,
                    name,
                    kind,
                    phase,
                    module,
                    *ends,
                )
            )
        for name, *ends in lane.list_added():
            rows.append((lane.times.kind.ranks[0], "compute", None, name, name, name, "", *ends))
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


def _list_idle(lane: Lane) -> Iterator[tuple[int, float]]:
    """Idle times of the compute stream [s], each with the position of the collective or operation
    it counts to.

    Position -1 is the time between two iterations.
    """
    ends = lane.ends[lane.compute]
    since = ends[-1:] - lane.period + sum(lane.added.values())
    gaps = np.maximum(lane.starts[lane.compute] - np.concatenate((since, ends[:-1])), 0.0)
    for later, held in lane.stalled.items() if len(gaps) else ():
        for place in dict.fromkeys(place for place, *_ in held):
            ones = [one for wait, one, _ in held if wait == place]
            yield (
                ones[rank_largest(lane.ends[ones], slack=_EQUAL * lane.period)[0]],
                float(lane.stalls[place]),
            )
            gaps[later] -= lane.stalls[place]
    for later in np.flatnonzero(gaps > _EQUAL * lane.period).tolist():
        yield int(lane.compute[later]) if later or not lane.device else -1, float(gaps[later])


def sum_modules(lane: Lane, depth: int | None) -> Table:
    """Time of every module in program order, see `Prediction.modules`.

    Idle time between two iterations belongs to no module. The time of an update is shared among the
    modules whose parameters and gradients it reads and writes, by their bytes; it counts as an
    operation of each. Time that was not simulated has its own rows, as idle time of the update.
    """
    check_threads()
    import polars

    graph, owners = lane.graph, _find_owners(lane.graph)
    labels = (*graph.labels, ("", "", "", "forward", ""))  # the last one: between two iterations
    busy = np.where(lane.times.seconds > 0, lane.ends - lane.starts, 0.0)
    spent = [
        (place, 1, own, own * (labels[place][1] == "host"))
        for place, own in enumerate(busy.tolist())
    ]
    spent += [(place, 0, seconds, seconds) for place, seconds in _list_idle(lane)]
    rows = [
        (module, count, labels[place][3], share * seconds, share * idle)
        for place, count, seconds, idle in spent
        for module, share in owners.get(place, {labels[place][4]: 1.0}).items()
    ]
    rows += [(name, 0, "update", seconds, seconds) for name, seconds in lane.added.items()]
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
        polars.sum("time_s").alias("share") / lane.period,
    )
    frame = frame.group_by(cut_path(depth), maintain_order=True).agg(*sums)
    return polars.concat([frame.filter(polars.col("module") != ""), frame.filter(module="")])


def _find_owners(graph: Graph) -> dict[int, dict[str, float]]:
    """Shares of modules in each update without a module, by the bytes of their parameters and
    gradients [-]."""
    owner: dict[float, str] = {}
    touched: dict[int, list[tuple[float, float]]] = {}
    for place, buffer, nbytes in graph.accesses[:, :3].tolist():
        _, kind, _, phase, module = graph.labels[int(place)]
        if module:
            owner.setdefault(buffer, module)
        elif phase == "update" and kind != "collective":
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


def _find_held(lane: Lane, place: int) -> list[Place]:
    """The collective that ended last, of those that an operation of the compute stream or its host
    waited for."""
    near, found = _EQUAL * lane.period, lane.stalled.get(lane.find_next(place), ())
    shifted = [(one, -lane.period * ((wait > place) + before)) for wait, one, before in found]
    over = [
        (one, shift)
        for one, shift in shifted
        if lane.ends[one] + shift <= lane.starts[place] + near
    ]
    ends = [float(lane.ends[one]) + shift for one, shift in over]
    return [over[number] for number in rank_largest(ends, slack=near)[:1]]


def _launch(lane: Lane, place: int) -> tuple[Place, float, Place | None]:
    """What the host launched before an operation, when it was free again [s], and the operation it
    waited for."""
    ((last, shift),) = _precede(np.arange(len(lane.starts)), place, lane.period)
    kind, held = lane.graph.labels[last][1], [] if lane.device else _find_held(lane, place)
    freed, found = float(lane.issued[last]) + shift, None
    waits = [(last, shift)] if (kind == "transfer" if lane.device else kind != "collective") else []
    for one, later in dict.fromkeys([*waits, *held]):
        if lane.ends[one] + later >= freed - _EQUAL * lane.period:
            freed, found = float(lane.ends[one]) + later, (one, later)
    return (last, shift), freed, found


def _find_last(lanes: Sequence[Lane], lane: Lane, place: int) -> tuple[Lane, int]:
    """The rank that was ready last for a collective, and the position of the collective there.

    All ranks run their part of a collective at the same time.
    """
    near, parts = _EQUAL * lane.period, []
    for other in lanes:
        at = other.graph.collectives
        same = (
            abs(other.starts[at] - lane.starts[place]) + abs(other.ends[at] - lane.ends[place])
            <= near
        )
        parts += [(-other.waits[one], other, one) for one in at[same].tolist()]
    return parts[rank_largest([wait for wait, *_ in parts], slack=near)[0]][1:]


def _walk_back(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, str, int, float, float]]:
    """Lane, stream, operation, start and end [s] of the steps of the critical path, the last first,
    without a gap."""
    period, near = lanes[0].period, _EQUAL * lanes[0].period
    lane = lanes[rank_largest([lane.ends.max(initial=-np.inf) for lane in lanes], slack=near)[0]]
    place, shift = rank_largest(lane.ends, slack=near)[0], 0.0
    time = float(lane.ends[place])
    while True:
        stream, end, time = lane.name_stream(place), time, float(lane.starts[place]) + shift
        yield lane, stream, place, time, end
        same = np.zeros(0)
        if stream != "compute":
            lane, place = _find_last(lanes, lane, place)
            at, group = lane.graph.collectives, lane.graph.column("group")
            same = at[group[at] == group[place]]
        known = (
            _precede(same, place, period)
            + _find_held(lane, place)
            + _precede(lane.compute, place, period)
        )
        found = next((f for f in known if abs(lane.ends[f[0]] + f[1] + shift - time) <= near), None)
        # it started when it was launched: back along the host's clock, to what that waited for
        while found is None:
            last, freed, found = _launch(lane, place)
            end, time = time, min(freed + shift, time)
            yield lane, "host", place, time, end
            if found is None:
                place, shift = last[0], last[1] + shift
        place, shift = found[0], found[1] + shift


def find_critical_path(lanes: Sequence[Lane]) -> Table:
    """The chain of operations that sets the time, see `Prediction.critical_path`.

    The path is followed backward from the last operation over two periods, and the earlier one is
    shown: a delay at the end of an iteration that the next one absorbs is left out. Time that was
    not simulated follows at the end.
    """
    import polars

    # the simulated period
    lanes = [replace(lane, period=lane.period - sum(lane.added.values())) for lane in lanes]
    period, near = lanes[0].period, _EQUAL * lanes[0].period
    last = max(float(lane.ends.max(initial=-np.inf)) for lane in lanes)
    edges, rank = (
        (last + np.cumsum([0.0, *lanes[0].added.values()])).tolist(),
        lanes[0].times.kind.ranks[0],
    )
    steps = [
        (rank, "host", None, name, name, "", "", *edges[n : n + 2])
        for n, name in enumerate(lanes[0].added)
    ][::-1]
    most = 8 * sum(len(lane.starts) for lane in lanes)
    for lane, stream, place, start, end in islice(_walk_back(lanes), most) if period > 0 else ():
        start, end = max(start + period, last - period), min(end + period, last)
        if end <= last - period + near:
            break
        if end > start + near:
            name, kind, _, phase, module = lane.graph.labels[place]
            steps.append(
                (lane.times.kind.ranks[0], stream, place, name, kind, phase, module, start, end)
            )
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(steps[::-1], schema=columns, orient="row")


def list_events(lanes: Sequence[Lane], sources: Mapping[int, int]) -> list[Event]:
    """Events of a trace: slices with sizes, and the names of their ranks and streams.

    `sources` gives, for each rank of the trace, the lane it is like. Slices on one stream do not
    overlap; slices of modules are nested.
    """
    slices, names = list[Event](), list[Event]()
    for rank, source in sources.items():
        lane = lanes[source]
        slices += _list_slices(lane, rank)
        streams = {_MODULES: "modules"} | ({_HOST: "host"} if lane.device else {})
        streams |= {
            _find_thread(lane, place): lane.name_stream(place) for place in range(len(lane.starts))
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


def _find_thread(lane: Lane, place: int) -> int:
    collective = lane.graph.labels[place][1] == "collective"
    return _COMMUNICATION + int(lane.graph.column("group")[place]) if collective else _COMPUTE


def _list_slices(lane: Lane, rank: int) -> Iterator[Event]:
    """Stages, their modules and the modules inside those; then every operation, and its launch on
    the host."""
    graph, operations = lane.graph, list_operations([lane])
    for depth in range(2 + max((label[4].count(".") for label in graph.labels), default=0)):
        level = "module" if depth else "stage"
        for _, _, phase, module, count, *ends in list_spans(
            operations, level, depth or None
        ).rows():
            if not depth or (module and module.count(".") == depth - 1):
                more = {"phase": phase} if depth else {}
                yield _slice(
                    module or phase, level, rank, _MODULES, *ends, **more, operations=count
                )
    free = float(lane.issued[-1]) - lane.period if len(graph) else 0.0
    for place, (name, kind, variant, phase, module) in enumerate(graph.labels):
        sizes, issued = graph[place].features, float(lane.issued[place])
        args: dict[str, Any] = {
            "operation": place,
            "phase": phase,
            "module": module,
            "variant": variant,
        }
        args |= {key: int(sizes[key]) for key in _SHOWN if sizes[key]}
        args["dtype"] = graph.dtypes[place] if graph.dtypes else graph.dtype
        args["bytes"] = int(sizes["nbytes"] or graph.traffic[place])
        if kind == "collective":
            args["waiting_us"] = round(float(lane.waits[place]) * 1e6, 3)
        start, end = float(lane.starts[place]), float(lane.ends[place])
        yield _slice(name, kind, rank, _find_thread(lane, place), start, end, **args)
        if lane.device:
            yield _slice(name, "host", rank, _HOST, free, issued, operation=place)
        free = issued
    for name, *ends in lane.list_added():
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


def sum_resources(lane: Lane) -> tuple[float, float, np.ndarray]:
    """Time of the kernels of a rank, of its host, and of the collectives of each of its
    communicators [s]."""
    times, lengths = lane.times, (lane.ends - lane.starts)[lane.graph.collectives]
    moving = np.bincount(
        np.array(times.kind.communicators, dtype=int), weights=lengths, minlength=1
    )
    late = float(times.seconds[lane.graph.kernels.get(("host", "host"), [])].sum())
    return (
        float(times.seconds.sum()) - late,
        lane.host_time + late,
        moving,
    )


def find_mfu(prediction: Any) -> float | None:
    """Model FLOP utilization: `Graph.model_flops` of all ranks over their peak [-]; None without
    products."""
    flops = sum(
        len(lane.times.kind.ranks) * lane.graph.model_flops for lane in prediction._timeline.lanes
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
