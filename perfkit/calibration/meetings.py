"""Collectives of a trace: their sizes, their matches on other ranks, and their transfers without the waits."""

import gzip
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import polars as pl

from perfkit.ground.files import reading
from perfkit.ground.results import Table
from perfkit.ground.units import escape, show
from perfkit.readers.execution_trace import ExecutionTrace, join_traces, read_execution, spell_inputs
from perfkit.readers.trace import LARGEST_TRACE, TraceFile, read_kineto

#: Kernels of libraries of collectives: NCCL, RCCL, and those that reduce through memory that ranks share.
COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|deep_?ep|multimem|symm_mem|cross_device_reduce|(one|two)_?shot_(all_?)?reduce", re.I
)
#: Operations by how kernels, annotations and metadata of NCCL, RCCL and others spell them, the first match counts.
_OPERATIONS = (
    (re.compile(r"all_?reduce|cross_device_reduce|shot_reduce", re.I), "all_reduce"),
    (re.compile(r"all_?gather", re.I), "all_gather"),
    (re.compile(r"reduce_?scatter", re.I), "reduce_scatter"),
    (re.compile(r"all_?to_?all|dispatch|combine", re.I), "all_to_all"),
    (re.compile(r"send_?recv", re.I), "all_to_all"),  # its kernel; annotations of single messages say which
    (re.compile(r"broadcast|bcast", re.I), "broadcast"),
    (re.compile(r"send", re.I), "send"),
    (re.compile(r"recv", re.I), "recv"),
    (re.compile(r"reduce", re.I), "reduce"),
)
#: Bytes of a number by the framework's names of types; the first that a name contains counts [B].
_BYTES = {
    "bfloat16": 2, "float8": 1, "float16": 2, "half": 2, "double": 8, "float64": 8, "long": 8, "int64": 8, "short": 2,
    "int16": 2, "char": 1, "byte": 1, "int8": 1, "bool": 1, "float": 4, "int": 4,
}  # fmt: skip
_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64, "index": pl.Int64, "iteration": pl.Int64, "group": pl.String, "ranks": pl.Int64,
    "order": pl.Int64, "operation": pl.String, "nbytes": pl.Float64, "dtype": pl.String, "sent": pl.List(pl.Int64),
    "received": pl.List(pl.Int64), "start": pl.Int64, "time": pl.Int64, "known": pl.Boolean,
}  # fmt: skip


def spell_operation(*names: str) -> str:
    """The operation of the first name that says one, ``other`` where none does."""
    found = (operation for name in names for pattern, operation in _OPERATIONS if name and pattern.search(name))
    return next(found, "other")


def _count(values: Any) -> list[int]:
    """Whole numbers of a list, or of its text; none where it is cut short."""
    text = str(values)
    return [] if "..." in text else [int(each) for each in re.findall(r"\d{1,18}", text)]


def _measure(dims: Any) -> int:
    """Elements of a tensor, or of a list of them, by their dimensions."""
    if isinstance(dims, list) and dims and all(isinstance(each, list) for each in dims):
        return sum(_measure(each) for each in dims)
    count = 1
    for size in dims if isinstance(dims, list) else [0]:
        count *= size if type(size) is int and size >= 0 else 0
    return count


def add_execution(file: TraceFile, execution: ExecutionTrace) -> TraceFile:
    """Put what an execution trace knows of operands, and of collectives such as uneven splits, beside the trace's own.

    Parameters
    ----------
    file : TraceFile
        One rank.
    execution : ExecutionTrace
        Of the same step of the same rank.

    Returns
    -------
    file : TraceFile
        The same with more arguments.
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


def _find_sources(file: TraceFile, index: int, exchange: int) -> list[tuple[str, Mapping[str, Any]]]:
    """What says something of a collective, by name: its kernel, then the events around its launch, the inner first."""
    names, parents, found = file.events["name"], file.events["parent"], [("", file.args.get(index, {}))]
    while exchange >= 0 and len(found) < 4:
        found.append((names[exchange], file.args.get(exchange, {})))
        exchange = parents[exchange]
    return found


def _describe(file: TraceFile, kernel: str, sources: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Operation, sizes and group of a collective."""
    facts: dict[str, Any] = {}
    for _, args in reversed(sources):
        facts |= args
    called = [name for name, _ in sources if name.startswith("nccl:")]
    operation = spell_operation(str(facts.get("Collective name", "")), *called, kernel)
    shown = next((args for name, args in sources if args.get("Input Dims") and name.startswith("nccl:")), {})
    dtype = str(facts.get("dtype") or next(iter(shown.get("Input type") or []), ""))
    name = facts.get("Process Group Name")
    members = _count(facts.get("Process Group Ranks", "...")) or list(file.groups.get(str(name), ()))
    ranks = facts.get("Group size") or len(members) or file.ranks
    moved = [facts.get(f"{way} msg nelems") for way in ("In", "Out")]
    sizes = [size for size in moved if type(size) is int and size >= 0]
    if sizes:
        elements = max(sizes) if operation in ("all_gather", "reduce_scatter") else sizes[0]
    else:
        elements = _measure(shown.get("Input Dims")) * (ranks or 0 if operation == "all_gather" else 1)
    pointers = [text for text in facts.get("Concrete Inputs") or () if re.fullmatch(r"\d{6,20}", str(text))]
    group = ", ".join(map(str, members)) or str(name or next(iter(pointers), ""))
    width = next((nbytes for name, nbytes in _BYTES.items() if name in dtype.lower()), 0)
    return {
        "group": group, "ranks": ranks, "operation": operation, "nbytes": float(elements * width) or None,
        "dtype": dtype, "sent": _count(facts.get("In split size", [])),
        "received": _count(facts.get("Out split size", [])), "known": bool(members),
    }  # fmt: skip


def list_collectives(
    files: Sequence[TraceFile], works: Sequence[Table], sizes: Mapping[str, float]
) -> Table:  # fmt: skip
    """Collectives of all ranks, matched by group and order.

    Parameters
    ----------
    files : sequence of TraceFile
        One per rank.
    works : sequence of polars.DataFrame
        What `list_work` finds in each.
    sizes : mapping of str to float
        Message sizes by pattern of the kernel's name, where the trace says none [B].

    Returns
    -------
    frame : polars.DataFrame
        rank, index of the kernel, iteration, group (its ranks, else a name), ranks in it, order in group and iteration
        [-]; operation, nbytes (as nccl-tests counts) [B]; dtype; sent, received: elements to and from every rank of an
        uneven all_to_all [-]; start, time of the kernel, transfer, waiting [ns]; matched, how many ranks of the group
        were read [-]. Transfer is the shortest time over the ranks, waiting the rest; null where one rank was read, or
        where the ranks do not tell the same story.

    Notes
    -----
    Clocks of ranks are never compared. A kernel of NCCL runs from when its own rank is ready, so the rank that was
    ready last has next to no wait in it: the shortest time is that of the transfer.
    """
    rows: list[dict[str, Any]] = []
    for number, (file, work) in enumerate(zip(files, works, strict=True)):
        names: dict[str, str] = {}
        own = work.filter(role="communication").select(
            "index", "exchange", "kernel", "stream", "iteration", "start", "end"
        )
        for index, exchange, kernel, stream, iteration, start, end in own.iter_rows():
            row = _describe(file, kernel, _find_sources(file, index, exchange))
            row["nbytes"] = next((n for pattern, n in sizes.items() if fnmatchcase(kernel, pattern)), row["nbytes"])
            if not row["known"]:  # a name or a pointer means nothing on another rank, unless all ranks are in the group
                row["group"] = names.setdefault(row["group"] or str(stream), f"group {len(names)}")
            rank = number if file.rank is None else file.rank
            rows.append(
                {"rank": rank, "index": index, "iteration": iteration, "start": start, "time": end - start} | row
            )
    frame = pl.DataFrame(rows, schema=_SCHEMA).with_columns(
        order=pl.int_range(pl.len()).over("rank", "iteration", "group"), own=pl.len().over("rank", "iteration", "group")
    )
    key = ("iteration", "group", "order")
    same = (pl.col("operation").n_unique().over(key) == 1) & (pl.col("own").n_unique().over("iteration", "group") == 1)
    same &= pl.col("known") | (pl.col("ranks").fill_null(len(files)) == len(files))
    matched = pl.when(same).then(pl.col("rank").n_unique().over(key)).otherwise(1)
    transfer = pl.when(matched > 1).then(pl.col("time").min().over(key))
    return frame.with_columns(matched=matched, transfer=transfer, waiting=pl.col("time") - transfer).drop(
        "own", "known"
    )


def read_ranks(paths: Sequence[str | Path]) -> list[TraceFile]:
    """Read the traces of all ranks, and put what execution traces know of collectives to them; see `pk.read_trace`."""
    named = [Path(path) for path in paths]
    executions = [path for path in named if _holds_nodes(path)]
    files = [read_kineto(path) for path in named if path not in executions]
    if not files:
        raise ValueError(f"paths are {show(paths)}; name at least one trace of Kineto, execution traces have no times")
    for place, path in enumerate(executions):
        numbers = re.findall(r"\d+", path.name.split(".")[0])
        own = [at for at, file in enumerate(files) if numbers and file.rank == int(numbers[-1])]
        if not own and len(executions) != len(files):
            raise ValueError(f"{escape(path.name)} belongs to no trace that was named; end its name with its rank")
        at = own[0] if own else place
        files[at] = add_execution(files[at], read_execution(path))
    files.sort(key=lambda file: file.rank or 0)
    known = [file.rank for file in files if file.rank is not None]
    if len({*known}) < len(files) > 1:
        raise ValueError(f"ranks are {show(known)} of {len(files)} files; read one trace for each rank, and one run")
    return files


def _holds_nodes(path: Path) -> bool:
    """Whether a file is an execution trace, by its head."""
    with reading(path, "pass the file that torch.profiler wrote", most=LARGEST_TRACE):
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            head = file.read(2**16)
    return b'"nodes"' in head and b'"traceEvents"' not in head
