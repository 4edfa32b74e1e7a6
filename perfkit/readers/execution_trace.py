"""Execution traces of PyTorch (Chakra, schemas 1.0 and 1.1): arguments and results of every
operation, and the events of a Kineto trace that they belong to."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.files import reading
from perfkit.ground.forks import check_threads
from perfkit.ground.units import show
from perfkit.readers.kineto import TraceFile
from perfkit.readers.trace_names import DEVICE
from perfkit.readers.trace_text import LARGEST_TRACE, parse_document, read_text

_ADVICE = "pass the file that torch.profiler.ExecutionTraceObserver wrote, whole"
#: Type of a tensor, and in it the type of its numbers.
_TENSOR = re.compile(r"Tensor\((\w[\w: ]*)\)")
#: Name of the operation that makes process groups; its first argument lists them as JSON.
_MAKES_GROUPS = "## process_group:init ##"
#: Arguments of Kineto events that hold the number of the record, and what to add to them [-].
_RECORD_NUMBERS = (("Record function id", 0), ("Ev Idx", -1))
#: How many operations one recording of a thread may have and the other lack, before they count as
#: different [-].
_AHEAD = 32
#: Share of operations with operands of other sizes, from which on an execution trace is of another
#: rank or step [-]; docs/formulas.md, table 6.2.
_MOST_DIFFERENT = 0.005


class Operands(NamedTuple):
    """Arguments or results as recorded, a tensor as [id, storage, offset, numbers, bytes of one,
    device].

    `shapes` and `types` have one entry for each value; those of a list of tensors are lists too.
    """

    values: Sequence[Any]
    shapes: Sequence[Any]
    types: Sequence[str]


class Node(NamedTuple):
    """An operation or a mark of the program.

    `number` counts in order of start; `record` is its number in a Kineto trace, 0 for none.
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
    source : str
        Name of the file.
    """

    nodes: tuple[Node, ...]
    groups: Mapping[str, tuple[int, ...]]
    source: str


def read_execution(path: str | Path) -> ExecutionTrace:
    """Read an execution trace, plain or compressed with gzip.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    trace : ExecutionTrace
        Its operations. Events that a link with Kineto added to the file are left out.

    Raises
    ------
    ValueError
        For a file that is no execution trace, is cut off, or lists a node twice.
    """
    nodes: dict[int, Node] = {}
    with reading(path, _ADVICE, most=LARGEST_TRACE, unpacks=True):
        facts = parse_document(read_text(path))
        for item in facts.get("nodes", ()):
            # an event of a device, which a link added
            if isinstance(item, dict) and item.get("ph"):
                continue
            node = _read_node(item)
            if nodes.setdefault(node.number, node) is not node:
                raise ValueError(
                    f"it lists node {node.number} twice, the second time as {show(node.name, 60)}"
                )
        if not nodes or type(facts.get("schema")) is not str:
            raise ValueError("it has no schema or no nodes, which an execution trace has")
        in_order = tuple(nodes[number] for number in sorted(nodes))
        return ExecutionTrace(in_order, _read_groups(in_order), Path(path).name)


def _read_groups(nodes: Sequence[Node]) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group that operations make, by its name."""
    groups = {}
    for node in nodes:
        if node.name == _MAKES_GROUPS and node.inputs.values:
            for group in json.loads(node.inputs.values[0]):
                groups[str(group["pg_name"])] = tuple(map(int, group["ranks"]))
    return groups


def _read_node(item: Any) -> Node:
    """A node of either schema: 1.0 lists all parts flat, 1.1 nests operands and attributes."""
    if not isinstance(item, dict):
        raise ValueError(f"a node is {show(item, 60)}; it must be an object")
    facts = {"rf_id": 0, "tid": 0, **item}
    is_nested = isinstance(item.get("inputs"), dict)
    if is_nested:
        for attribute in item.get("attrs", ()):
            facts[attribute["name"]] = attribute["value"]
    inputs = _read_operands(item, "inputs", is_nested)
    outputs = _read_operands(item, "outputs", is_nested)
    numbers: list[Any] = [facts.get(key) for key in ("id", "rf_id", "tid")]
    if not all(type(number) is int for number in numbers):
        raise ValueError(
            f"node {show(item.get('id'))} has numbers {show(numbers)}; they must be whole numbers"
        )
    number, record, thread = numbers
    return Node(number, record, thread, str(facts["name"]), inputs, outputs)


def _read_operands(item: Mapping[str, Any], side: str, is_nested: bool) -> Operands:
    """The ``inputs`` or ``outputs`` of a node."""
    if is_nested:
        lists = [item[side][field] for field in ("values", "shapes", "types")]
    else:
        word = side.removesuffix("s")
        lists = [item[key] for key in (side, f"{word}_shapes", f"{word}_types")]
    are_lists = all(isinstance(values, list) for values in lists)
    if not are_lists or len({len(values) for values in lists}) > 1:
        raise ValueError(
            f"node {show(item.get('id'))} has {side} whose values, shapes and types do not match"
        )
    operands = Operands(*lists)
    if not all(isinstance(type_, str) for type_ in operands.types):
        raise ValueError(
            f"node {show(item.get('id'))} has {side} of types {show(operands.types, 60)}; they must be texts"
        )
    return operands


def spell_inputs(node: Node) -> dict[str, Any]:
    """Arguments of an operation in Kineto's names; the type of a list of tensors is ``TensorList``
    of their type."""
    types = []
    texts = []
    for value, type_ in zip(node.inputs.values, node.inputs.types, strict=True):
        tensor = _TENSOR.search(type_)
        if tensor is None:
            types.append("Scalar")
            texts.append("" if value == "<None>" else str(value))
        else:
            is_list = type_.startswith("GenericList")
            types.append(f"TensorList({tensor[1]})" if is_list else tensor[1])
            texts.append("")
    return {"Input Dims": node.inputs.shapes, "Input type": types, "Concrete Inputs": texts}


def join_traces(trace: TraceFile, execution: ExecutionTrace) -> dict[int, Node]:
    """Find the node of every host event that is in both traces.

    Parameters
    ----------
    trace : TraceFile
        Kineto trace of the same step of the same rank.
    execution : ExecutionTrace
        Execution trace.

    Returns
    -------
    nodes : dict of int to Node
        Nodes by the index of the event [-].

    Raises
    ------
    ValueError
        If the traces do not belong together.

    Notes
    -----
    Events of new profilers hold the number of their record. Where both observers began together, it
    is one less than their ``Ev Idx``. Otherwise operations of the same name are paired in order,
    thread by thread.

    Another rank of the same step runs the same operations. It is told by the number of its device,
    and by the sizes of its operands. Where both are equal, because every process sees one device
    alone and all ranks compute the same, the wrong rank cannot be told; then only splits of uneven
    collectives can be wrong.
    """
    check_threads()
    host = trace.events.filter(trace.events["cat"].is_in(("cpu_op", "user_annotation")))
    names = dict(host.select("index", "name").iter_rows())
    records = {node.record: node for node in execution.nodes if node.record}
    joined = _join_by_number(trace, names, records)
    if 2 * len(joined) < len(records):
        threads = host.group_by("pid", "tid", maintain_order=True).agg("index")["index"].to_list()
        joined = _join_by_order(threads, names, execution.nodes)
    if 2 * len(joined) < min(len(records), len(names)):
        difference = f"they share {len(joined)} of {len(names)} operations"
    else:
        difference = _find_other_device(trace, execution) or _find_other_sizes(trace, joined)
    if difference:
        raise ValueError(
            f"{execution.source} is of another step or rank than {trace.source}: {difference}; pass "
            "traces that were recorded together, execution traces in the order of their ranks"
        )
    return joined


def _join_by_number(
    trace: TraceFile, names: Mapping[int, str], records: Mapping[int, Node]
) -> dict[int, Node]:
    """Nodes by the index of their event, where events hold the number of their record."""
    best: dict[int, Node] = {}
    for argument, shift in _RECORD_NUMBERS:
        joined = {}
        for index, name in names.items():
            number = trace.args.get(index, {}).get(argument)
            node = records.get(number + shift) if type(number) is int else None
            if node is not None and node.name == name:
                joined[index] = node
        if len(joined) > len(best):
            best = joined
    return best


def _join_by_order(
    threads: Sequence[Sequence[int]], names: Mapping[int, str], nodes: Sequence[Node]
) -> dict[int, Node]:
    """Nodes by the index of their event: each thread of the execution trace beside the thread of
    events, of all `threads`, with which it shares most operations in order."""
    nodes_of_threads: dict[int, list[Node]] = {}
    for node in nodes:
        nodes_of_threads.setdefault(node.thread, []).append(node)
    joined: dict[int, Node] = {}
    for thread_nodes in nodes_of_threads.values():
        longest: dict[int, Node] = {}
        for events in threads:
            aligned = _align(events, names, thread_nodes)
            if len(aligned) >= len(longest):
                longest = aligned
        joined |= longest
    return joined


def _align(
    events: Sequence[int], names: Mapping[int, str], nodes: Sequence[Node]
) -> dict[int, Node]:
    """Pair operations of the same name in order; after a difference, go on at the nearest operation
    of both."""
    event_names = [names[index] for index in events]
    node_names = [node.name for node in nodes]
    pairs = {}
    event = 0
    node = 0
    while event < len(events) and node < len(nodes):
        common = _find_common(event_names, node_names, event, node)
        if common is not None:
            event, node = common
            pairs[events[event]] = nodes[node]
        event += 1
        node += 1
    return pairs


def _find_common(
    event_names: Sequence[str], node_names: Sequence[str], first_event: int, first_node: int
) -> tuple[int, int] | None:
    """Places of the next operation that events and nodes share: the one with the fewest skipped;
    None where it is too far ahead."""
    for skipped in range(_AHEAD):
        for skipped_events in range(skipped + 1):
            event = first_event + skipped_events
            node = first_node + skipped - skipped_events
            is_inside = event < len(event_names) and node < len(node_names)
            if is_inside and event_names[event] == node_names[node]:
                return event, node
    return None


def _find_other_device(trace: TraceFile, execution: ExecutionTrace) -> str:
    """Say that the traces name different devices, empty where they do not."""
    work = trace.events.filter(trace.events["cat"].is_in(DEVICE))
    traced = set(work["pid"].unique().cast(str))
    named: set[str] = set()
    for node in execution.nodes:
        named.update(re.findall(r"'cuda:(\d+)'", str(node.inputs.values)))
    if traced and named and not traced & named:
        return f"its device is {', '.join(sorted(named))}, not {', '.join(sorted(traced))}"
    return ""


def _find_other_sizes(trace: TraceFile, joined: Mapping[int, Node]) -> str:
    """Say how many operations have operands of other sizes, empty for few."""
    different = []
    for index, node in joined.items():
        dims = trace.args.get(index, {}).get("Input Dims")
        has_sizes = isinstance(dims, list) and bool(dims)
        if has_sizes and _list_sizes(dims) != _list_sizes(node.inputs.shapes):
            different.append(node.name)
    if len(different) > _MOST_DIFFERENT * len(joined):
        return (
            f"operands of {len(different)} of {len(joined)} operations have other sizes, the first "
            f"those of {different[0]}"
        )
    return ""


def _list_sizes(dims: Any) -> list[Any]:
    """Sizes of the tensors among some arguments."""
    return [size for size in dims if isinstance(size, list) and size and type(size[0]) is int]
