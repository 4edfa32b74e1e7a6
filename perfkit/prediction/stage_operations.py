"""Operations that the stages of a strategy repeat: one row for each that differs, and blocks of rows
that follow one another."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from perfkit.prediction.micro_batches import CORES
from perfkit.workloads.columns import ONE_CALL, HostCalls, OperationSizes
from perfkit.workloads.graph import STAGE_HOST, Graph, Label, OperationClass, OperationClasses


class Block(NamedTuple):
    """Operations that follow one another.

    Parameters
    ----------
    rows : array of int
        Their rows in a table [-].
    waiting : array of int
        Positions in the block, or its length for what follows, that wait for collectives of the
        block [-].
    awaited : array of int
        Numbers of these collectives in the block [-].
    sent : int
        Collectives of the block [-].
    """

    rows: np.ndarray
    waiting: np.ndarray
    awaited: np.ndarray
    sent: int


class OperationTable:
    """Operations that stages repeat: their labels, number formats, sizes, and the bytes that each
    reads and writes.

    It begins with those of recorded micro-batches, one for each kind of layers. What stages need
    beside these is added when it is first asked for, and found again afterwards.
    """

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.labels: list[Label] = []
        self.traffic: list[float] = []
        self.dtypes: list[str] = []
        self.sizes: list[OperationSizes] = []
        self.host_calls: list[HostCalls] = []
        #: Rows of each recorded micro-batch.
        self.recorded: list[range] = []
        #: Whether operations have number formats of their own.
        self.has_dtypes = any(graph.dtypes for graph in graphs)
        for graph in graphs:
            self._add_recorded(graph)
        #: Rows that were added, by what was asked for.
        self._copies: dict[tuple[int, str, float], int] = {}
        self._taken: dict[tuple[int, str, str, HostCalls, float, float], int] = {}
        self._with_calls_before: dict[tuple[int, float], int] = {}
        self._collectives: dict[tuple[str, str, str, float, int, HostCalls], int] = {}
        self._parts: dict[tuple[int, float, bool], int] = {}
        #: The time by which the host makes a pass longer, as an operation.
        host = self._add_host()
        self.host_delays = {
            phase: self.make_block([self.copy(host, phase)]) for phase in ("forward", "backward")
        }

    def _add_recorded(self, graph: Graph) -> None:
        """Add the operations of a recorded micro-batch."""
        begin = len(self.labels)
        self.labels += graph.labels
        self.traffic += list(graph.traffic[:, -1])
        if graph.dtypes:
            self.dtypes += graph.dtypes
        else:
            self.dtypes += [graph.dtype for _ in graph.labels]
        self.sizes += [OperationSizes(*row) for row in _list_rows(graph, OperationSizes._fields)]
        self.host_calls += [HostCalls(*row) for row in _list_rows(graph, HostCalls._fields)]
        self.recorded.append(range(begin, len(self.labels)))

    def find(self, region: str, phase: str, number: int = 0) -> list[int]:
        """Rows of a region in a phase, as they were recorded in the micro-batch of a kind of layers."""
        rows = []
        for row in self.recorded[number]:
            label = self.labels[row]
            if label.phase == phase and label.module.startswith(region):
                rows.append(row)
        return rows

    def find_attention(self, rows: Sequence[int]) -> list[int]:
        """Positions among rows of the kernels of attention between its projections."""
        positions = []
        for position, row in enumerate(rows):
            label = self.labels[row]
            if label.kind in CORES and label.module.endswith("attention"):
                positions.append(position)
        return positions

    def copy(self, row: int, phase: str, factor: float = 1.0) -> int:
        """Row of an operation in another phase, or with `factor` times as many numbers."""
        key = (row, phase, factor)
        if key not in self._copies:
            sizes = self.sizes[row]
            elements, flops = factor * sizes.elements, factor * sizes.flops
            self._copies[key] = self._add(
                self.labels[row]._replace(phase=phase),
                sizes._replace(elements=elements, flops=flops),
                self.host_calls[row],
                factor * self.traffic[row],
                self.dtypes[row],
            )
        return self._copies[key]

    def take(
        self,
        row: int,
        phase: str,
        module: str,
        host_calls: HostCalls,
        factor: float = 1.0,
        widened: float = 1.0,
    ) -> int:
        """Row of an operation in another phase and module, with other calls of the host, and with
        `factor` times as many numbers, which have `widened` times as many bytes."""
        key = (row, phase, module, host_calls, factor, widened)
        if key not in self._taken:
            sizes = self.sizes[row]
            elements, flops = factor * sizes.elements, factor * sizes.flops
            self._taken[key] = self._add(
                self.labels[row]._replace(phase=phase, module=module),
                sizes._replace(elements=elements, flops=flops),
                host_calls,
                factor * widened * self.traffic[row],
                self.dtypes[row],
            )
        return self._taken[key]

    def call_before(self, row: int, bare: float) -> int:
        """Row of an operation with more calls without a kernel before it."""
        key = (row, bare)
        if key not in self._with_calls_before:
            host_calls = self.host_calls[row]
            self._with_calls_before[key] = self._add(
                self.labels[row],
                self.sizes[row],
                host_calls._replace(bare=host_calls.bare + bare),
                self.traffic[row],
                self.dtypes[row],
            )
        return self._with_calls_before[key]

    def send(
        self,
        operation: str,
        phase: str,
        module: str,
        nbytes: Any,
        group: int,
        host_calls: HostCalls = ONE_CALL,
    ) -> int:
        """Row of a collective."""
        key = (operation, phase, module, float(nbytes), group, host_calls)
        if key not in self._collectives:
            self._collectives[key] = self._add(
                Label(operation, "collective", operation, phase, module),
                OperationSizes(nbytes=float(nbytes), group=group),
                host_calls,
                2.0 * nbytes,
                self.dtypes[0],
            )
        return self._collectives[key]

    def take_part(self, row: int, part: float, *, is_first: bool) -> int:
        """Row of a collective that sends a part of a message; the first one is the call of the
        host."""
        key = (row, part, is_first)
        if key not in self._parts:
            sizes = self.sizes[row]
            host_calls = HostCalls()
            if is_first:
                host_calls = self.host_calls[row]
            self._parts[key] = self._add(
                self.labels[row],
                sizes._replace(nbytes=part * sizes.nbytes, part=part),
                host_calls,
                part * self.traffic[row],
                self.dtypes[row],
            )
        return self._parts[key]

    def _add_host(self) -> int:
        """Row of what the host adds to a pass: an operation without work."""
        label = Label(
            name="host",
            kind=STAGE_HOST.kind,
            variant=STAGE_HOST.variant,
            phase="forward",
            module="stages",
        )
        return self._add(label, OperationSizes(), HostCalls(), 0.0, self.dtypes[0])

    def _add(
        self,
        label: Label,
        sizes: OperationSizes,
        host_calls: HostCalls,
        traffic: float,
        dtype: str,
    ) -> int:
        """Add a row; return its number."""
        self.labels.append(label)
        self.sizes.append(sizes)
        self.host_calls.append(host_calls)
        self.traffic.append(traffic)
        self.dtypes.append(dtype)
        return len(self.labels) - 1

    def make_block(self, rows: Sequence[int], waits: Mapping[int, int] | None = None) -> Block:
        """A block whose collectives are waited for at once, or at another position where `waits`
        has theirs."""
        collectives = [
            position for position, row in enumerate(rows) if self.labels[row].kind == "collective"
        ]
        waiting = []
        for position in collectives:
            if waits is not None and position in waits:
                waiting.append(waits[position])
            else:
                waiting.append(position + 1)
        return Block(
            np.array(rows, dtype=int),
            np.array(waiting, dtype=int),
            np.arange(len(collectives)),
            len(collectives),
        )

    def find_label(self, row: int, layer: int) -> Label:
        """Label of an operation in a layer."""
        label = self.labels[row]
        if layer == 0:
            return label
        module = label.module.replace("layers.0", f"layers.{layer}")
        return Label(label.name, label.kind, label.variant, label.phase, module)

    def find_classes(self, rows: np.ndarray) -> OperationClasses:
        """Classes of operations, which do not depend on their layers, in the order in which they
        come."""
        numbers: dict[OperationClass, int] = {}
        of_table = np.array(
            [numbers.setdefault(label.operation_class, len(numbers)) for label in self.labels]
        )
        used, first, of_operation = np.unique(
            of_table[rows], return_index=True, return_inverse=True
        )
        in_order = np.argsort(first)
        classes = list(numbers)
        return OperationClasses(
            [classes[number] for number in used[in_order].tolist()],
            np.argsort(in_order)[of_operation],
        )


def _list_rows(graph: Graph, names: Sequence[str]) -> Iterator[tuple[float, ...]]:
    """Features of these names of each operation, those of the last configuration."""
    columns = [graph.column(name)[:, -1].tolist() for name in names]
    return zip(*columns, strict=True)
