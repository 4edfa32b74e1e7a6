"""Collectives of a trace: their sizes, the same collective on other ranks, the transfer alone, and
what it teaches."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from perfkit.calibration.runs import fit_logs
from perfkit.fitting import CollectiveModel, fit_collective
from perfkit.fitting.collectives import PRIOR, TRUST
from perfkit.fitting.parameters import Key
from perfkit.ground.files import check_paths, group_rows, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import Array, escape, show
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import rescale_fit
from perfkit.prediction.ranks import find_group_cost
from perfkit.readers.execution_trace import (
    ExecutionTrace,
    join_traces,
    read_execution,
    spell_inputs,
)
from perfkit.readers.kineto import TraceFile, read_kineto
from perfkit.readers.trace_text import LARGEST_TRACE, read_text, uncollected

#: Kernels of collectives: of NCCL, RCCL, and of libraries that reduce through memory that ranks
#: share.
COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|deep_?ep|multimem|symm_mem|cross_device_reduce|(one|two)_?shot_(all_?)?reduce",
    re.I,
)
#: Bytes of a number by PyTorch's name of its type, where that does not end with its bits [B].
_BYTES = {
    "half": 2,
    "double": 8,
    "long": 8,
    "short": 2,
    "char": 1,
    "byte": 1,
    "bool": 1,
    "float": 4,
    "int": 4,
}
#: Standard deviations of the logarithms of start-up and time per byte between machines with the
#: same device [-]; docs/formulas.md, table 6.2.
_MACHINES = (0.7, 0.1)
#: Fewest sizes of a curve of its own [-]; docs/formulas.md, table 6.2.
_SIZES = 4
#: Share of those deviations that the sizes may leave [-]; docs/formulas.md, table 6.2.
_LEFT = 0.5
#: Turns errors for arguments of another type, which only damaged or edited traces have, into a
#: ValueError.
checked = reading(
    "arguments of the trace cannot be used", "pass the file that torch.profiler wrote", told=True
)
_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "index": pl.Int64,
    "iteration": pl.Int64,
    "group": pl.String,
    "ranks": pl.Int64,
    "order": pl.Int64,
    "operation": pl.String,
    "nbytes": pl.Float64,
    "dtype": pl.String,
    "sent": pl.List(pl.Int64),
    "received": pl.List(pl.Int64),
    "time_s": pl.Float64,
    "members": pl.List(pl.Int64),
}


def list_names(what: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Phases, classes or collectives by patterns of names in traces; the first match counts."""
    return tuple(
        (re.compile(row["pattern"]), row["name"])
        for row in group_rows("what", "trace_names.csv")[what]
    )


_OPERATIONS = list_names("collective")


def spell_operation(*names: str) -> str:
    """The operation in the first name that contains one, otherwise ``other``."""
    for name in names:
        for pattern, operation in _OPERATIONS:
            if name and pattern.search(name):
                return operation
    return "other"


def _count(values: Any) -> list[int]:
    """Whole numbers of a list or of its text; none where the text is cut short."""
    text = str(values)
    return [] if "..." in text else [int(each) for each in re.findall(r"\d{1,18}", text)]


def _measure(dims: Any) -> int:
    """Elements of a tensor or of a list of tensors, from their dimensions [-]."""
    if not isinstance(dims, list):
        return 0
    if dims and all(isinstance(sizes, list) for sizes in dims):
        return sum(_measure(sizes) for sizes in dims)
    return prod(size if type(size) is int and size >= 0 else 0 for size in dims)


def _count_elements(facts: Mapping[str, Any]) -> int:
    """Elements of the first operand of an operator; 0 where its size is not known [-]."""
    dims, types = facts.get("Input Dims"), facts.get("Input type")
    if not isinstance(dims, list) or not dims:
        return 0
    kind = str(types[0]) if isinstance(types, list) and types else ""
    # one number has no dimensions, and so have lists whose sizes were not recorded
    if dims[0] == [] and kind in ("", "TensorList", "Scalar", "ScalarList", "GenericList"):
        return 0
    return _measure(dims[:1])


@checked
def add_execution(file: TraceFile, execution: ExecutionTrace) -> TraceFile:
    """Add the operands in an execution trace to a Kineto trace, and the sizes of collectives, such
    as uneven splits.

    Parameters
    ----------
    file : TraceFile
        Kineto trace of one rank.
    execution : ExecutionTrace
        Execution trace of the same step of the same rank.

    Returns
    -------
    file : TraceFile
        The Kineto trace with more arguments.
    """
    described: dict[int, Mapping[str, Any]] = {}
    for index, node in join_traces(file, execution).items():
        values = node.inputs.values
        described[index] = {**file.args.get(index, {}), **spell_inputs(node)}
        named = [value for value in values if isinstance(value, str) and _is_operation(value)]
        if node.name != "record_param_comms" or not named:
            continue
        # the last two lists of whole numbers are the splits
        lists = [value for value in values if _is_list_of_whole_numbers(value)]
        sent, received = lists[-2:] if len(lists) > 1 else ([], [])
        inputs, outputs = node.inputs.shapes, node.outputs.shapes
        facts: dict[str, Any] = {
            "Collective name": named[0],
            "In split size": sent,
            "Out split size": received,
            "In msg nelems": _measure(inputs[0]) if inputs else None,
            "Out msg nelems": _measure(outputs[0]) if outputs else None,
        }
        if node.inputs.types:
            facts["dtype"] = node.inputs.types[0].split("(")[-1].strip(")]")
        described[index] = {**facts, **described[index]}
    observers = (*file.observers, "an execution trace")
    args = file.args.with_replaced(described)
    return replace(file, args=args, groups={**execution.groups, **file.groups}, observers=observers)


def _is_operation(text: str) -> bool:
    """Whether a text names a collective."""
    return spell_operation(text) != "other"


def _is_list_of_whole_numbers(value: object) -> bool:
    """Whether an argument is a list of whole numbers, as splits are."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def _describe(
    file: TraceFile, kernels: Sequence[str], indices: Sequence[int], exchange: int
) -> dict[str, Any]:
    """Operation, sizes and group of a collective, from its kernels and the host events around
    their launch."""
    facts: dict[str, Any] = {}
    for index in reversed(indices):
        facts |= file.args.get(index, {})
    kernel = next((name for name in kernels if COLLECTIVE.search(name)), kernels[0])
    names = [kernel]
    for _ in range(3):
        if exchange >= 0:
            facts = {**file.args.get(exchange, {}), **facts}
            names.insert(-1, file.events["name"][exchange])
            exchange = file.events["parent"][exchange]
    operation = spell_operation(str(facts.get("Collective name", "")), *names)
    name = facts.get("Process Group Name")
    dtype = str(facts.get("dtype") or [*facts.get("Input type", []), ""][0])
    members = _count(facts.get("Process Group Ranks", "..."))
    if not members:
        members = list(file.groups.get(str(name), ()))
    ranks = facts.get("Group size") or len(members) or file.ranks
    sent, received = facts.get("In msg nelems"), facts.get("Out msg nelems")
    if type(sent) is not int or type(received) is not int:
        sent = _count_elements(facts)
        received = sent
        if operation == "all_gather":
            received = sent * (ranks or 0)
    elements = sent
    if operation in ("all_gather", "reduce_scatter"):
        elements = max(sent, received)
    width = _find_width(dtype)
    return {
        "group": ", ".join(map(str, members)) or str(name or ""),
        "members": members,
        "ranks": ranks,
        "operation": operation,
        "nbytes": float(elements * width) or None,
        "dtype": dtype,
        "sent": _count(facts.get("In split size", [])),
        "received": _count(facts.get("Out split size", [])),
    }


def _find_width(dtype: str) -> int:
    """Bytes of a number by PyTorch's name of its type; 0 if it is unknown [B]."""
    lower = dtype.lower()
    bits = re.search(r"(?:float|int)(\d{1,2})", lower)
    if bits:
        return int(bits[1]) // 8
    for text, nbytes in _BYTES.items():
        if text in lower:
            return nbytes
    return 0


@checked
def list_collectives(
    files: Sequence[TraceFile], works: Sequence[Table], sizes: Mapping[str, float]
) -> Table:
    """List the collectives of all ranks, matched by group and order.

    Parameters
    ----------
    files : sequence of TraceFile
        One per rank.
    works : sequence of polars.DataFrame
        Work of each rank, from `perfkit.calibration.activity.list_work`.
    sizes : mapping of str to float
        Message sizes by a pattern of the kernel's name, for traces that do not hold them [B].

    Returns
    -------
    frame : polars.DataFrame
        rank, index of its first kernel, iteration, group (its ranks, otherwise a name), ranks in
        it, order in group and iteration [-]; operation, nbytes (as nccl-tests counts) [B]; dtype;
        sent, received: elements to and from every rank of an uneven all_to_all [-]; time_s from the
        start of its first kernel to the end of its last one [s]; members, ranks of the group where known [-]; even_bytes, the message of an even collective
        that takes as long: the rank with the most data limits an uneven one [B]; matched: ranks of
        the group that were read [-]; transfer_s, waiting_s [s]. transfer_s is the shortest time
        over the ranks, waiting_s the rest. Both are null where only one rank was read, or where the
        ranks ran different collectives.

    Notes
    -----
    Clocks of different ranks are never compared. An NCCL kernel runs from the moment when its own
    rank is ready. So the rank that was ready last hardly waits, and its time, the shortest, is the
    time of the transfer.
    """
    check_threads()
    rows: list[dict[str, Any]] = []
    # one exchange may run several kernels, such as copies between signals
    parts = (
        pl.col("kernel", "index"),
        pl.first("exchange", "stream", "iteration"),
        pl.min("start"),
        pl.max("end"),
    )
    for file, work in zip(files, works, strict=True):
        groups: dict[str, str] = {}
        communication = work.filter(role="communication")
        calls = communication.group_by("collective", maintain_order=True).agg(parts)
        for call in calls.iter_rows(named=True):
            row = _describe(file, call["kernel"], call["index"], call["exchange"])
            stated_size = _find_stated_size(sizes, call["kernel"])
            if stated_size is not None:
                row["nbytes"] = stated_size
            if not row["members"]:  # then name and stream may mean another group on another rank
                name = row["group"] or str(call["stream"])
                row["group"] = groups.setdefault(name, f"group {len(groups)}")
            row["rank"], row["index"] = file.rank, call["collective"]
            row["iteration"] = call["iteration"]
            row["time_s"] = 1e-9 * (call["end"] - call["start"])
            rows.append(row)
    of_rank = ("rank", "iteration", "group")
    frame = pl.DataFrame(rows, _SCHEMA).with_columns(
        order=pl.int_range(pl.len()).over(of_rank), calls_of_rank=pl.len().over(of_rank)
    )
    # the same collective on all ranks: equally many calls, with the same operation at each place
    same_call = ("iteration", "group", "order")
    has_one_operation = pl.col("operation").n_unique().over(same_call) == 1
    has_equal_counts = pl.col("calls_of_rank").n_unique().over("iteration", "group") == 1
    # a group without known members is matched where it may be all ranks that were read
    has_members = pl.col("members").list.len() > 0
    may_be_all = pl.col("ranks").fill_null(len(files)) == len(files)
    is_same = has_one_operation & has_equal_counts & (has_members | may_be_all)
    matched = pl.when(is_same).then(pl.col("rank").n_unique().over(same_call)).otherwise(1)
    transfer = pl.when(matched > 1).then(pl.col("time_s").min().over(same_call))
    frame = frame.with_columns(even_bytes=_find_even_size(), matched=matched, transfer_s=transfer)
    # of a group without known members, which is all ranks that were read, these are its members
    ranks_read = sorted(file.rank or 0 for file in files)
    is_all = ~has_members & (pl.col("matched") == pl.col("ranks")) & (pl.col("matched") > 1)
    members = pl.when(is_all).then(pl.lit(ranks_read, pl.List(pl.Int64))).otherwise("members")
    frame = frame.with_columns(members=members).drop("calls_of_rank")
    return frame.with_columns(waiting_s=pl.col("time_s") - pl.col("transfer_s"))


def _find_even_size() -> pl.Expr:
    """Size of the even message that takes as long: the rank with the most data limits an uneven one
    [B]."""
    most = pl.max_horizontal(pl.col("sent").list.max(), pl.col("received").list.max())
    total = pl.col("sent").list.sum().clip(1)
    unevenness = pl.col("ranks") * most / total
    return unevenness.fill_null(1.0) * pl.col("nbytes")


def _find_stated_size(sizes: Mapping[str, float], kernels: Sequence[str]) -> float | None:
    """Message size by the first pattern that fits one of the kernels; None without one [B]."""
    for pattern, nbytes in sizes.items():
        if any(fnmatchcase(kernel, pattern) for kernel in kernels):
            return nbytes
    return None


def fit_transfers(platform: Platform, met: Table, source: str) -> tuple[Platform, list[str]]:
    """Fit collectives of a platform to transfers that were measured on all ranks of their group.

    Parameters
    ----------
    platform : Platform
        Its curves are the prior.
    met : polars.DataFrame
        Of `list_collectives`.
    source : str
        Data id.

    Returns
    -------
    platform : Platform
        With the fitted curves: by operation and ranks, where these are on one node or fill nodes; by
        operation and nodes (a rail) where they are one or some ranks of each of several nodes.
    lost : list of str
        Collectives that were not fitted, and why.

    Notes
    -----
    Medians over calls of one size count alike. Groups of some ranks of each node are priced as predictions
    price them, with the rail's curve and the others of the platform, and move the rail's. A curve keeps its form; its start-up and its time
    per byte are scaled (`perfkit.calibration.runs.fit_logs`). Before the transfers are seen, they
    are as uncertain as those of another machine, so small messages move the start-up, large ones
    the time per byte. Outside the measured sizes the interval widens by what stays unknown.
    """
    check_threads()
    met = add_nodes(met, platform.network.ranks_per_node)
    was_read = (pl.col("matched") >= pl.col("ranks")) & (pl.col("matched") > 1)
    is_whole = (was_read & (pl.col("even_bytes") > 0)).fill_null(False)
    lost = []
    for name, count in _count_operations(met.filter(~is_whole)):
        lost.append(f"{count} {name}, of which not all ranks were read, or whose size is unknown")
    same_call = met.filter(is_whole).group_by("iteration", "group", "order", maintain_order=True)
    calls = same_call.agg(
        pl.first("operation", "ranks", "nodes", "ranks_of_node", "transfer_s"),
        nbytes=pl.max("even_bytes"),
    )
    for name, count in _count_operations(calls.filter(pl.col("transfer_s") <= 0)):
        lost.append(f"{count} {name}, which took no time")
    timed = calls.filter(pl.col("transfer_s") > 0)
    is_even = pl.col("ranks") == pl.col("nodes") * pl.col("ranks_of_node")
    for name, count in _count_operations(timed.filter(~is_even)):
        lost.append(f"{count} {name}, of ranks that are spread unevenly over nodes")
    fits: dict[str, CollectiveModel] = {}
    by_curve = timed.filter(is_even).with_columns(
        curve=_name_curves(platform.network.ranks_per_node)
    )
    for (name,), own in by_curve.group_by("curve", maintain_order=True):
        key = Key.parse(str(name))
        by_size = own.group_by("nbytes", "ranks_of_node").agg(
            seconds=pl.median("transfer_s"), calls=pl.len()
        )
        rows = by_size.sort("nbytes", "ranks_of_node")
        try:
            fits[str(key)] = _scale_curve(platform, key, rows, source)
        except ValueError as error:  # the base has no model of it
            lost.append(f"{len(own)} {key.operation}: {error}")
    return replace(platform, collectives={**platform.collectives, **fits}), lost


class _NodesOfGroup(NamedTuple):
    """How a group of ranks lies on nodes: how many of them, and most ranks on one [-]."""

    nodes: int
    ranks_of_node: int


def _find_nodes(
    members: Sequence[int] | None, ranks: int | None, ranks_per_node: int
) -> _NodesOfGroup | None:
    """How a group lies on nodes: by its members, otherwise on as few as its ranks can be on; None where
    neither is known."""
    if members:
        of_node = Counter(member // ranks_per_node for member in members)
        return _NodesOfGroup(len(of_node), max(of_node.values()))
    if ranks is None:
        return None
    return _NodesOfGroup(-(-ranks // ranks_per_node), min(ranks, ranks_per_node))


def add_nodes(met: Table, ranks_per_node: int) -> Table:
    """Say how the group of each collective lies on nodes.

    Parameters
    ----------
    met : polars.DataFrame
        Of `list_collectives`.
    ranks_per_node : int
        Ranks of a node, which are numbered one node after the other [-].

    Returns
    -------
    frame : polars.DataFrame
        The same with nodes, how many the group is on, and ranks_of_node, the most of them on one [-]: by
        the members of the group, otherwise as if its ranks filled nodes; null where neither is known.
    """
    seen: dict[tuple[Any, ...], _NodesOfGroup | None] = {}
    nodes: list[int | None] = []
    ranks_of_node: list[int | None] = []
    for members, ranks in met.select("members", "ranks").iter_rows():
        key = (*(members or ()), ranks)
        if key not in seen:
            seen[key] = _find_nodes(members, ranks, ranks_per_node)
        found = seen[key]
        nodes.append(None if found is None else found.nodes)
        ranks_of_node.append(None if found is None else found.ranks_of_node)
    return met.with_columns(
        nodes=pl.Series(nodes, dtype=pl.Int64),
        ranks_of_node=pl.Series(ranks_of_node, dtype=pl.Int64),
    )


def _name_curves(ranks_per_node: int) -> pl.Expr:
    """Name of the curve that a collective tells of.

    That of its ranks, where these are on one node or fill nodes. Otherwise that of one rank of each node, a
    rail: with several ranks of each node it is a part of what they do.
    """
    fills_nodes = (pl.col("nodes") == 1) | (pl.col("ranks_of_node") == ranks_per_node)
    own = pl.format("{}.{}", "operation", "ranks")
    rail = pl.format("{}.{}.rail", "operation", "nodes")
    return pl.when(fills_nodes).then(own).otherwise(rail)


def _count_operations(calls: Table) -> list[tuple[str, int]]:
    """Names of operations with their calls, the most frequent first."""
    return [(name, count) for name, count in calls["operation"].value_counts(sort=True).rows()]


def _scale_curve(platform: Platform, key: Key, rows: Table, source: str) -> CollectiveModel:
    """Scale the start-up and the time per byte of a curve to medians over calls, or fit a new one
    if they tell both."""
    prior = _find_prior(platform, key)
    numbers = rows.select(pl.col("nbytes", "seconds", "calls").cast(pl.Float64))
    nbytes, seconds, calls = numbers.to_numpy().T
    of_node = rows["ranks_of_node"].to_numpy()
    is_own = (of_node == 1) | (key.algorithm != "rail")
    is_alone = bool(is_own.all())
    # sizes at which the curve itself was seen
    ranges = prior.ranges
    if is_own.any():
        own_sizes = nbytes[is_own]
        ranges = {"nbytes": (float(own_sizes.min()), float(own_sizes.max()))}

    def scale(logs: Array) -> CollectiveModel:
        alpha, beta = np.exp(logs).tolist()
        scaled = rescale_fit(prior, "", 0.0, {"alpha": alpha, "beta": beta})
        return replace(scaled, ranges=ranges)

    def evaluate(logs: Array) -> Array:
        model = scale(logs)
        if is_alone:
            return np.log(model.time(nbytes, key.operation, key.ranks or 1))
        return np.log(_time_on_rails(platform, key, model, nbytes, of_node))

    width = np.hypot(prior.spread, _MACHINES)
    usual = np.hypot(prior.spread, PRIOR / np.sqrt(calls))
    scaled = fit_logs(evaluate, np.log(seconds), np.zeros(2), width, usual=usual)
    slopes, covariance, errors = scaled.slopes, scaled.covariance, scaled.errors
    start_up_error, transfer_error = np.sqrt(np.diag(covariance))
    left = max(start_up_error / width[0], transfer_error / width[1])
    if is_alone and len(rows) >= _SIZES and left <= _LEFT:
        return replace(fit_collective(nbytes, seconds), source=source)
    model = scale(scaled.parameters)
    start_up, transfer = np.exp(scaled.parameters)
    unsure = np.einsum("ij,jk,ik->i", slopes, covariance, slopes).mean()
    variance = (TRUST * prior.spread**2 + float(errors @ errors)) / (TRUST + len(errors))
    note = (
        f"{prior.source}: start-up times {start_up:.2f} ± {start_up_error:.0%}, "
        f"time per byte times {transfer:.2f} ± {transfer_error:.0%}"
    )
    return model.with_values(
        {},
        kind="fitted",
        source=source,
        date="",
        sources=(),
        n=len(nbytes),
        bias=0.0,
        transferred=prior.transferred,
        spread=math.sqrt(variance + unsure),
        stderr=_find_stderr(model, float(start_up_error), float(transfer_error)),
        ranges=ranges,
        notes=(note,),
    )


def _find_prior(platform: Platform, key: Key) -> CollectiveModel:
    """The curve of a platform before transfers are seen: its fit, else one of the times that it predicts."""
    fit = platform.collectives.get(str(key))
    if fit is not None:
        return fit
    sizes = np.geomspace(1e3, 1e9, 19)
    composed = platform.price_collective(
        key.operation, sizes, key.ranks or 1, key.algorithm or None
    )
    return replace(
        fit_collective(sizes, composed.time),
        spread=float(np.mean(composed.spread)),
        source=f"times of {platform.name}",
    )


def _find_stderr(
    model: CollectiveModel, start_up_error: float, transfer_error: float
) -> dict[str, float]:
    """Standard errors of the parameters of a curve, from relative ones of start-up and time per byte."""
    stderr = {}
    for name, value in model.items():
        if name.startswith("alpha"):
            stderr[name] = start_up_error * value
        elif name.startswith("beta"):
            stderr[name] = transfer_error * value
    return stderr


def _time_on_rails(
    platform: Platform, key: Key, model: CollectiveModel, nbytes: Array, ranks_of_node: Array
) -> Array:
    """Times of collectives of one or more ranks of each node, with a curve for one of each [s]."""
    changed = replace(platform, collectives={**platform.collectives, str(key): model})
    nodes = key.ranks or 1
    times = np.zeros(len(nbytes))
    for most in np.unique(ranks_of_node).tolist():
        alike = ranks_of_node == most
        cost = find_group_cost(changed, key.operation, most * nodes, nodes, most)
        times[alike] = cost.time(nbytes[alike])
    return times


@uncollected()
def read_ranks(
    paths: str | Path | Sequence[str | Path], *, progress: bool = False
) -> list[TraceFile]:
    """Read the traces of all ranks, with the operands in execution traces; see `pk.read_trace`."""
    named = check_paths("paths", paths)
    for path in named:
        _refuse_several(path)
    executions = [path for path in named if _holds_nodes(path)]
    files = [read_kineto(path, progress=progress) for path in named if path not in executions]
    if not len(executions) <= len(files) > 0:
        advice = "name one Kineto trace for each rank, and for each execution trace the Kineto trace of its rank"
        raise ValueError(
            f"paths are {show(paths)}, with {len(executions)} execution traces (without times); {advice}"
        )
    for place, path in enumerate(executions):
        files[place] = add_execution(files[place], read_execution(path))
    ranks, begun = [file.rank for file in files], [file.events["ts"][0] for file in files]
    # times since 1970, not since the start of a machine, are after 2006
    hours = (max(begun) - min(begun)) / 3.6e12 if min(begun) > 2**60 else 0.0
    if len({*ranks} - {None}) < len(files) > 1 or hours > 1:
        raise ValueError(
            f"ranks are {show(ranks)}, {hours:,.0f} h apart; read one trace for each rank, all of one run"
        )
    return sorted(
        (replace(file, rank=file.rank or 0) for file in files), key=lambda file: file.rank or 0
    )


def _refuse_several(path: Path) -> None:
    """Refuse a folder and a pattern, which stand for several files."""
    pattern = path
    if path.is_dir():
        pattern = path / "*.json*"
    elif "*" not in path.name or path.exists():
        return
    raise ValueError(
        f"{escape(str(path), 200)} is no file; name the files: "
        f"sorted(glob.glob({show(str(pattern), 200)}))"
    )


def _holds_nodes(path: Path) -> bool:
    """Whether a file is an execution trace, from its first bytes."""
    with reading(path, "pass the file that torch.profiler wrote", most=LARGEST_TRACE, unpacks=True):
        head = read_text(path, 2**16)
    return '"nodes"' in head and '"traceEvents"' not in head
