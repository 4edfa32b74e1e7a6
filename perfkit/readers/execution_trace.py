"""Execution traces of PyTorch (Chakra, schemas 1.0 and 1.1): arguments and results of every
operation."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.files import reading
from perfkit.ground.forks import check_threads
from perfkit.ground.units import show
from perfkit.readers.kineto import DEVICE, LARGEST_TRACE, TraceFile, parse_document, read_text

_ADVICE = "pass the file that torch.profiler.ExecutionTraceObserver wrote, whole"
#: Type of a tensor, and in it the type of its numbers.
_TENSOR = re.compile(r"Tensor\((\w[\w: ]*)\)")
#: How many operations one recording of a thread may have and the other lack, before they count as
#: different [-].
_AHEAD = 32
#: Share of operations with operands of other sizes, from which on an execution trace is of another
#: rank or step [-]; docs/formulas.md, table 6.2.
_OTHER = 0.005


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
        made = tuple(nodes[number] for number in sorted(nodes))
        marks = (node.inputs.values[:1] for node in made if node.name == "## process_group:init ##")
        listed = (each for values in marks for text in values for each in json.loads(text))
        groups = {str(each["pg_name"]): tuple(map(int, each["ranks"])) for each in listed}
        return ExecutionTrace(made, groups, Path(path).name)


def _read_node(item: Any) -> Node:
    """A node of either schema: 1.0 lists all parts flat, 1.1 nests operands and attributes."""
    if not isinstance(item, dict):
        raise ValueError(f"a node is {show(item, 60)}; it must be an object")
    facts, nested = {"rf_id": 0, "tid": 0, **item}, isinstance(item.get("inputs"), dict)
    if nested:
        facts |= {each["name"]: each["value"] for each in item.get("attrs", ())}
    operands = []
    for side in ("inputs", "outputs"):
        flat = (side, f"{side[:-1]}_shapes", f"{side[:-1]}_types")
        lists = (
            [item[side][name] for name in Operands._fields]
            if nested
            else [item[name] for name in flat]
        )
        if not all(isinstance(each, list) for each in lists) or len({*map(len, lists)}) > 1:
            raise ValueError(
                f"node {show(item.get('id'))} has {side} whose values, shapes and types do not match"
            )
        if not all(isinstance(kind, str) for kind in lists[2]):
            raise ValueError(
                f"node {show(item.get('id'))} has {side} of types {show(lists[2], 60)}; they must be texts"
            )
        operands.append(Operands(*lists))
    numbers: list[Any] = [facts.get(key) for key in ("id", "rf_id", "tid")]
    if not all(type(number) is int for number in numbers):
        raise ValueError(
            f"node {show(item.get('id'))} has numbers {show(numbers)}; they must be whole numbers"
        )
    return Node._make([*numbers, str(facts["name"]), *operands])


def spell_inputs(node: Node) -> dict[str, Any]:
    """Arguments of an operation in Kineto's names; the type of a list of tensors is ``TensorList``
    of their type."""
    found = [_TENSOR.search(kind) for kind in node.inputs.types]
    several = [
        "TensorList({})" if kind.startswith("GenericList") else "{}" for kind in node.inputs.types
    ]
    types = [
        form.format(match[1]) if match else "Scalar"
        for match, form in zip(found, several, strict=True)
    ]
    pairs = zip(node.inputs.values, found, strict=True)
    texts = ["" if match or value == "<None>" else str(value) for value, match in pairs]
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
    best: dict[int, Node] = {}
    for key, shift in (("Record function id", 0), ("Ev Idx", -1)):
        said = ((index, trace.args.get(index, {}).get(key)) for index in names)
        pairs = (
            (index, records.get(number + shift)) for index, number in said if type(number) is int
        )
        found = {index: node for index, node in pairs if node and node.name == names[index]}
        best = max(best, found, key=len)
    if 2 * len(best) < len(records):
        threads = host.group_by("pid", "tid", maintain_order=True).agg("index")["index"].to_list()
        others: dict[int, list[Node]] = {}
        for node in execution.nodes:
            others.setdefault(node.thread, []).append(node)
        best = {}
        for nodes in others.values():
            best |= (
                sorted((_align(own, names, nodes) for own in threads), key=len)[-1]
                if threads
                else {}
            )
    shared = f"they share {len(best)} of {len(names)} operations" * (
        2 * len(best) < min(len(records), len(names))
    )
    if reason := shared or _find_difference(trace, execution, best):
        raise ValueError(
            f"{execution.source} is of another step or rank than {trace.source}: {reason}; pass traces "
            "that were recorded together, execution traces in the order of their ranks"
        )
    return best


def _find_difference(
    trace: TraceFile, execution: ExecutionTrace, joined: Mapping[int, Node]
) -> str:
    """What shows that an execution trace is of another rank, empty if nothing does."""
    used = {*trace.events.filter(trace.events["cat"].is_in(DEVICE))["pid"].unique().cast(str)}
    devices = {
        one
        for node in execution.nodes
        for one in re.findall(r"'cuda:(\d+)'", str(node.inputs.values))
    }
    if used and devices and not used & devices:
        return f"its device is {', '.join(sorted(devices))}, not {', '.join(sorted(used))}"
    pairs = (
        (node, trace.args.get(index, {}).get("Input Dims") or ()) for index, node in joined.items()
    )
    other = [
        node.name
        for node, dims in pairs
        if dims and isinstance(dims, list) and _list_sizes(dims) != _list_sizes(node.inputs.shapes)
    ]
    if len(other) > _OTHER * len(joined):
        return f"operands of {len(other)} of {len(joined)} operations have other sizes, the first those of {other[0]}"
    return ""


def _list_sizes(dims: Any) -> list[Any]:
    """Sizes of the tensors among some arguments."""
    return [each for each in dims if isinstance(each, list) and each and type(each[0]) is int]


def _align(
    events: Sequence[int], names: Mapping[int, str], nodes: Sequence[Node]
) -> dict[int, Node]:
    """Pair operations of the same name in order; after a difference, go on at the nearest operation
    of both."""
    found, i, j = dict[int, Node](), 0, 0
    while i < len(events) and j < len(nodes):
        steps = ((i + a, j + total - a) for total in range(_AHEAD) for a in range(total + 1))
        inside = ((x, y) for x, y in steps if x < len(events) and y < len(nodes))
        i, j = next(((x, y) for x, y in inside if names[events[x]] == nodes[y].name), (i, j))
        if names[events[i]] == nodes[j].name:
            found[events[i]] = nodes[j]
        i, j = i + 1, j + 1
    return found
