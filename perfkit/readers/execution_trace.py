"""Execution traces of PyTorch (Chakra, schemas 1.0 and 1.1): what every operation was given and what it returned."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.files import reading
from perfkit.ground.units import show
from perfkit.readers.trace import LARGEST_TRACE, TraceFile, parse_document, read_text

_ADVICE = "pass the file that torch.profiler.ExecutionTraceObserver wrote, whole"
#: A tensor among types, and that of its numbers.
_TENSOR = re.compile(r"Tensor\((\w[\w: ]*)\)")
#: Operations that two recordings of a thread may differ by before they count as different [-].
_AHEAD = 32


class Operands(NamedTuple):
    """Arguments or results: as recorded, a tensor as [id, storage, offset, numbers, bytes of one, device]; and the
    shapes and types of those that are tensors, lists of them nested alike.
    """

    values: Sequence[Any]
    shapes: Sequence[Any]
    types: Sequence[str]


class Node(NamedTuple):
    """An operation, or a mark of the program: its number, in order of start, its record in a trace of Kineto, 0 for
    none, its thread and name, and what it was given and returned.
    """

    number: int
    record: int
    thread: int
    name: str
    inputs: Operands
    outputs: Operands


@dataclass(frozen=True, eq=False, repr=False)
class ExecutionTrace:
    """Operations of one rank in order of their start.

    Parameters
    ----------
    nodes : tuple of Node
        The operations.
    groups : mapping of str to tuple of int
        Ranks of each process group by its name, where the trace lists them; empty for all ranks.
    schema : str
        Version of the format.
    source : str
        Name of the file.
    """

    nodes: tuple[Node, ...]
    groups: Mapping[str, tuple[int, ...]]
    schema: str
    source: str


def read_execution(path: str | Path) -> ExecutionTrace:
    """Read an execution trace, plain or packed with gzip.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    trace : ExecutionTrace
        Its operations; what a link with Kineto has added to it is left out.

    Raises
    ------
    ValueError
        For a file that is none, breaks off, or lists a node twice.
    """
    nodes: dict[int, Node] = {}
    with reading(path, _ADVICE, most=LARGEST_TRACE):
        facts = parse_document(read_text(path))
        for item in facts.get("nodes", ()):
            if isinstance(item, dict) and item.get("ph"):  # a device's event that a link has added
                continue
            node = _read_node(item)
            if nodes.setdefault(node.number, node) is not node:
                raise ValueError(f"it lists node {node.number} twice, {show(node.name, 60)} the second time")
        if not nodes or type(facts.get("schema")) is not str:
            raise ValueError("it has no schema or no nodes, which an execution trace has")
        made = tuple(nodes[number] for number in sorted(nodes))
        return ExecutionTrace(made, _find_groups(made), facts["schema"], Path(path).name)


def _read_node(item: Any) -> Node:
    """A node of either schema: 1.0 lists everything flat, 1.1 nests operands and attributes."""
    if not isinstance(item, dict):
        raise ValueError(f"a node is {show(item, 60)}; it must be an object")
    facts, nested = {"rf_id": 0, "tid": 0, **item}, isinstance(item.get("inputs"), dict)
    for each in item.get("attrs", ()) if nested else ():
        facts[each["name"]] = each["value"]
    operands = []
    for side in ("inputs", "outputs"):
        own = item[side] if nested else {"values": item[side], **{
            part: item[f"{side[:-1]}_{part}"] for part in ("shapes", "types")}}  # fmt: skip
        lists = [own["values"], own["shapes"], own["types"]]
        if not all(isinstance(each, list) for each in lists) or len({*map(len, lists)}) > 1:
            raise ValueError(f"node {show(item.get('id'))} has {side} whose values, shapes and types do not match")
        operands.append(Operands(*lists))
    numbers: list[Any] = [facts.get(key) for key in ("id", "rf_id", "tid")]
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"node {show(item.get('id'))} has numbers {show(numbers)}; they must be whole")
    number, record, thread = numbers
    return Node(number, record, thread, str(facts["name"]), *operands)


def _find_groups(nodes: Sequence[Node]) -> dict[str, tuple[int, ...]]:
    """Ranks of the process groups that a trace lists."""
    marks = (node.inputs.values[:1] for node in nodes if node.name == "## process_group:init ##")
    listed = (each for values in marks for text in values for each in json.loads(text))
    return {str(each["pg_name"]): tuple(map(int, each["ranks"])) for each in listed}


def spell_inputs(node: Node) -> dict[str, Any]:
    """What an operation was given, in the words of Kineto; lists of tensors say their type as well."""
    found = [_TENSOR.search(kind) for kind in node.inputs.types]
    several = ["TensorList({})" if kind.startswith("GenericList") else "{}" for kind in node.inputs.types]
    types = [form.format(match[1]) if match else "Scalar" for match, form in zip(found, several, strict=True)]
    pairs = zip(node.inputs.values, found, strict=True)
    texts = ["" if match or value == "<None>" else str(value) for value, match in pairs]
    return {"Input Dims": node.inputs.shapes, "Input type": types, "Concrete Inputs": texts}


def join_traces(trace: TraceFile, execution: ExecutionTrace) -> dict[int, Node]:
    """Find the node of every event of the host that both have recorded.

    Parameters
    ----------
    trace : TraceFile
        Of the same step of the same rank.
    execution : ExecutionTrace
        What the operations were given.

    Returns
    -------
    nodes : dict of int to Node
        By the index of the event [-].

    Raises
    ------
    ValueError
        If they do not belong together.

    Notes
    -----
    Events know the number of their record where the profiler is new enough; or, one less than their ``Ev Idx``, where
    both observers began together; else operations of the same name follow one another on each thread.
    """
    host = trace.events.filter(trace.events["cat"].is_in(("cpu_op", "user_annotation")))
    names = dict(host.select("index", "name").iter_rows())
    records = {node.record: node for node in execution.nodes if node.record}
    best: dict[int, Node] = {}
    for key, shift in (("Record function id", 0), ("Ev Idx", -1)):
        said = ((index, trace.args.get(index, {}).get(key)) for index in names)
        pairs = ((index, records.get(number + shift)) for index, number in said if type(number) is int)
        found = {index: node for index, node in pairs if node and node.name == names[index]}
        best = max(best, found, key=len)
    if 2 * len(best) < len(records):
        threads = host.group_by("pid", "tid", maintain_order=True).agg("index")["index"].to_list()
        others: dict[int, list[Node]] = {}
        for node in execution.nodes:
            others.setdefault(node.thread, []).append(node)
        best = {}
        for nodes in others.values():
            tried = sorted((_align(own, names, nodes) for own in threads), key=len)
            best |= tried[-1] if tried else {}
    if 2 * len(best) < min(len(records), len(names)):
        raise ValueError(f"{execution.source} shares {len(best)} of {len(names)} operations with {trace.source}; "
                         "it is of another step or rank; pass those that were recorded together")  # fmt: skip
    return best


def _align(events: Sequence[int], names: Mapping[int, str], nodes: Sequence[Node]) -> dict[int, Node]:
    """Pairs of the same name in order; where the two differ, they go on at the nearest operation that both have."""
    found, i, j = {}, 0, 0
    while i < len(events) and j < len(nodes):
        if names[events[i]] == nodes[j].name:
            found[events[i]] = nodes[j]
            i, j = i + 1, j + 1
            continue
        steps = ((a, total - a) for total in range(1, _AHEAD) for a in range(total + 1))
        again = (
            (a, b) for a, b in steps
            if i + a < len(events) and j + b < len(nodes) and names[events[i + a]] == nodes[j + b].name
        )  # fmt: skip
        a, b = next(again, (1, 1))
        i, j = i + a, j + b
    return found
