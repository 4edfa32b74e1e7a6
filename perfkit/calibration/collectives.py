"""Collectives of a trace: their sizes, the same collective on other ranks, and the time of the transfer alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import polars as pl

from perfkit.ground.files import reading
from perfkit.ground.results import Table
from perfkit.ground.units import show
from perfkit.readers.execution_trace import ExecutionTrace, join_traces, read_execution, spell_inputs
from perfkit.readers.trace import LARGEST_TRACE, TraceFile, read_kineto, read_text, uncollected

#: Kernels of collectives: of NCCL, RCCL, and of libraries that reduce through memory that ranks share.
COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|deep_?ep|multimem|symm_mem|cross_device_reduce|(one|two)_?shot_(all_?)?reduce", re.I
)
#: Operations by their names in kernels, annotations and metadata; the first match counts.
_OPERATIONS = (
    (re.compile(r"all_?reduce|cross_device_reduce|shot_reduce", re.I), "all_reduce"),
    (re.compile(r"all_?gather", re.I), "all_gather"),
    (re.compile(r"reduce_?scatter", re.I), "reduce_scatter"),
    (re.compile(r"all_?to_?all|send_?recv|dispatch|combine", re.I), "all_to_all"),
    (re.compile(r"broadcast|bcast", re.I), "broadcast"),
)
#: Bytes of a number by PyTorch's name of its type, where that does not end with its bits [B].
_BYTES = {"half": 2, "double": 8, "long": 8, "short": 2, "char": 1, "byte": 1, "bool": 1, "float": 4, "int": 4}
#: Turns errors for arguments of another type, which only damaged or edited traces have, into a ValueError.
checked = reading("arguments of the trace cannot be used", "pass the file that torch.profiler wrote", told=True)
_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64, "index": pl.Int64, "iteration": pl.Int64, "group": pl.String, "ranks": pl.Int64,
    "order": pl.Int64, "operation": pl.String, "nbytes": pl.Float64, "dtype": pl.String, "sent": pl.List(pl.Int64),
    "received": pl.List(pl.Int64), "time_s": pl.Float64, "known": pl.Boolean,
}  # fmt: skip


def spell_operation(*names: str) -> str:
    """The operation in the first name that contains one, otherwise ``other``."""
    found = (operation for name in names for pattern, operation in _OPERATIONS if name and pattern.search(name))
    return next(found, "other")


def _count(values: Any) -> list[int]:
    """Whole numbers of a list or of its text; none where the text is cut short."""
    text = str(values)
    return [] if "..." in text else [int(each) for each in re.findall(r"\d{1,18}", text)]


def _measure(dims: Any) -> int:
    """Elements of a tensor or of a list of tensors, from their dimensions [-]."""
    if isinstance(dims, list) and dims and all(isinstance(each, list) for each in dims):
        return sum(_measure(each) for each in dims)
    sizes = dims if isinstance(dims, list) else [0]
    return prod(size if type(size) is int and size >= 0 else 0 for size in sizes)


def add_execution(file: TraceFile, execution: ExecutionTrace) -> TraceFile:
    """Add the operands in an execution trace to a Kineto trace, and the sizes of collectives, such as uneven splits.

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
    args = dict(file.args)
    for index, node in join_traces(file, execution).items():
        values, args[index] = node.inputs.values, {**args.get(index, {}), **spell_inputs(node)}
        said = next((text for text in values if isinstance(text, str) and spell_operation(text) != "other"), "")
        if node.name != "record_param_comms" or not said:
            continue
        plain = [each for each in values if isinstance(each, list) and all(type(item) is int for item in each)]
        sent, received = plain[-2:] if len(plain) > 1 else ([], [])
        facts: dict[str, Any] = {"Collective name": said, "In split size": sent, "Out split size": received}
        facts["dtype"] = node.inputs.types[0].split("(")[-1].strip(")]")
        for way, side in (("In", node.inputs), ("Out", node.outputs)):
            facts[f"{way} msg nelems"] = _measure(side.shapes[0]) if side.shapes else None
        args[index] = {**facts, **args[index]}
    return replace(file, args=args, groups={**execution.groups, **file.groups})


def _describe(file: TraceFile, kernel: str, index: int, exchange: int) -> dict[str, Any]:
    """Operation, sizes and group of a collective, from its kernel and the host events around its launch."""
    facts, names = dict(file.args.get(index, {})), [kernel]
    for _ in range(3):
        if exchange >= 0:
            facts = {**file.args.get(exchange, {}), **facts}
            names.insert(-1, file.events["name"][exchange])
            exchange = file.events["parent"][exchange]
    operation = spell_operation(str(facts.get("Collective name", "")), *names)
    name, dtype = facts.get("Process Group Name"), str(facts.get("dtype") or [*facts.get("Input type", []), ""][0])
    members = _count(facts.get("Process Group Ranks", "...")) or list(file.groups.get(str(name), ()))
    ranks = facts.get("Group size") or len(members) or file.ranks
    sent, received = (facts.get(f"{way} msg nelems") for way in ("In", "Out"))
    if type(sent) is not int or type(received) is not int:
        sent = _measure(facts.get("Input Dims", [])[:1])
        received = sent * (ranks or 0) if operation == "all_gather" else sent
    elements = max(sent, received) if operation in ("all_gather", "reduce_scatter") else sent
    bits = re.search(r"(?:float|int)(\d{1,2})", dtype.lower())
    width = int(bits[1]) // 8 if bits else next((n for text, n in _BYTES.items() if text in dtype.lower()), 0)
    return {
        "group": ", ".join(map(str, members)) or str(name or ""), "known": bool(members),
        "ranks": ranks, "operation": operation, "nbytes": float(elements * width) or None, "dtype": dtype,
        "sent": _count(facts.get("In split size", [])), "received": _count(facts.get("Out split size", [])),
    }  # fmt: skip


@checked
def list_collectives(files: Sequence[TraceFile], works: Sequence[Table], sizes: Mapping[str, float]) -> Table:
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
        rank, index of the kernel, iteration, group (its ranks, otherwise a name), ranks in it, order in group and
        iteration [-]; operation, nbytes (as nccl-tests counts) [B]; dtype; sent, received: elements to and from every
        rank of an uneven all_to_all [-]; time_s of the kernel, transfer_s, waiting_s [s]; matched: ranks of the group
        that were read [-]. transfer_s is the shortest time over the ranks, waiting_s the rest. Both are null where only
        one rank was read, or where the ranks ran different collectives.

    Notes
    -----
    Clocks of different ranks are never compared. An NCCL kernel runs from the moment when its own rank is ready. So the
    rank that was ready last hardly waits, and its time, the shortest, is the time of the transfer.
    """
    rows: list[dict[str, Any]] = []
    columns = ("index", "exchange", "kernel", "stream", "iteration", "start", "end")
    for file, work in zip(files, works, strict=True):
        groups: dict[str, str] = {}
        met = work.filter(role="communication").select(columns)
        for index, exchange, kernel, stream, step, start, end in met.iter_rows():
            row = _describe(file, kernel, index, exchange)
            row["nbytes"] = next((n for pattern, n in sizes.items() if fnmatchcase(kernel, pattern)), row["nbytes"])
            if not row["known"]:  # then name and stream may mean another group on another rank
                row["group"] = groups.setdefault(row["group"] or str(stream), f"group {len(groups)}")
            rows.append(row | {"rank": file.rank, "index": index, "iteration": step, "time_s": 1e-9 * (end - start)})
    own = ("rank", "iteration", "group")
    frame = pl.DataFrame(rows, _SCHEMA).with_columns(order=pl.int_range(pl.len()).over(own), own=pl.len().over(own))
    key = ("iteration", "group", "order")
    same = (pl.col("operation").n_unique().over(key) == 1) & (pl.col("own").n_unique().over("iteration", "group") == 1)
    same &= pl.col("known") | (pl.col("ranks").fill_null(len(files)) == len(files))
    matched = pl.when(same).then(pl.col("rank").n_unique().over(key)).otherwise(1)
    transfer = pl.when(matched > 1).then(pl.col("time_s").min().over(key))
    frame = frame.with_columns(matched=matched, transfer_s=transfer, waiting_s=pl.col("time_s") - transfer)
    return frame.drop("own", "known")


@uncollected()
def read_ranks(paths: str | Path | Sequence[str | Path]) -> list[TraceFile]:
    """Read the traces of all ranks, with the operands in execution traces; see `pk.read_trace`."""
    named = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    executions = [path for path in named if _holds_nodes(path)]
    files = [read_kineto(path) for path in named if path not in executions]
    if not len(executions) <= len(files) > 0:
        advice = "name one Kineto trace for each rank, and for each execution trace the Kineto trace of its rank"
        raise ValueError(f"paths are {show(paths)}, with {len(executions)} execution traces (without times); {advice}")
    for place, path in enumerate(executions):
        files[place] = add_execution(files[place], read_execution(path))
    ranks, begun = [file.rank for file in files], [file.events["ts"][0] for file in files]
    # times since 1970, not since the start of a machine, are after 2006
    hours = (max(begun) - min(begun)) / 3.6e12 if min(begun) > 2**60 else 0.0
    if len({*ranks} - {None}) < len(files) > 1 or hours > 1:
        raise ValueError(f"ranks are {show(ranks)}, {hours:,.0f} h apart; read one trace for each rank, all of one run")
    return sorted((replace(file, rank=file.rank or 0) for file in files), key=lambda file: file.rank or 0)


def _holds_nodes(path: Path) -> bool:
    """Whether a file is an execution trace, from its first bytes."""
    with reading(path, "pass the file that torch.profiler wrote", most=LARGEST_TRACE):
        head = read_text(path, 2**16)
    return '"nodes"' in head and '"traceEvents"' not in head
