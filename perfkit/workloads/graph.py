"""The graph of one training iteration, in columns: all operations, their sizes, and the tensors
they read and write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.results import Table, Tabular
from perfkit.models import collectives
from perfkit.models.kernels import reuse_distances
from perfkit.workloads.columns import (
    FEATURES,
    Accesses,
    Allocations,
    Features,
    HeldMemory,
    Owners,
    Wait,
    Waits,
    Weights,
)
from perfkit.workloads.tables import EmbeddingTable

PHASES = ("forward", "backward", "update")
#: Collective operations of workloads.
COLLECTIVES = tuple(
    name for name, collective in collectives.COLLECTIVES.items() if collective.in_workloads
)

_PRODUCTS = ("gemm", "bmm", "attention", "convolution", "recurrent")


class KernelKey(NamedTuple):
    """What kernel an operation runs: operations with equal keys share a kernel model.

    Parameters
    ----------
    kind, variant : str
        See `Operation`.
    """

    kind: str
    variant: str


#: What the host takes between two passes of a stage, as an operation of a graph of stages.
STAGE_HOST = KernelKey("host", "host")


class OperationClass(NamedTuple):
    """A kernel in a phase of the iteration: calls of one class cost the host the same.

    Parameters
    ----------
    kind, variant, phase : str
        See `Operation`.
    """

    kind: str
    variant: str
    phase: str


class OperationClasses(NamedTuple):
    """The operation classes of a graph, and which operation belongs to which.

    Parameters
    ----------
    distinct : list of OperationClass
        Every class once, in order of first appearance.
    of_operation : array of int
        For each operation, the position of its class in `distinct` [-].
    """

    distinct: list[OperationClass]
    of_operation: np.ndarray


class Label(NamedTuple):
    """What an operation is called, and what kind of work it is.

    Parameters
    ----------
    name, kind, variant, phase, module : str
        See `Operation`.
    """

    name: str
    kind: str
    variant: str
    phase: str
    module: str

    @property
    def kernel(self) -> KernelKey:
        """The kernel that it runs."""
        return KernelKey(self.kind, self.variant)

    @property
    def operation_class(self) -> OperationClass:
        """The kernel that it runs, and the phase."""
        return OperationClass(self.kind, self.variant, self.phase)


class Segments(NamedTuple):
    """Parts of an iteration between two points at which a rank waits for something or launches a
    collective.

    Parameters
    ----------
    begins, ends : array of int
        Positions of the first operation and of the one behind the last [-].
    waits : list of Wait or None
        What is waited for before; None where the rank waits for no collective.
    launches : list of int or None
        Number of the collective that is launched at the end; None where there is none [-].
    follows_transfer : array of bool
        Whether the host has just waited for a copy between host and device [-].
    """

    begins: np.ndarray
    ends: np.ndarray
    waits: list[Wait | None]
    launches: list[int | None]
    follows_transfer: np.ndarray


def _order_wait(wait: Wait) -> tuple[int, bool, int]:
    """A key to sort waits: by operation, and those for the iteration before come first."""
    return wait.operation, not wait.of_previous_iteration, wait.collective


@dataclass(frozen=True)
class Operation:
    """One operation of an iteration, as `Graph.__getitem__` returns it.

    Parameters
    ----------
    name : str
        The framework's name, such as ``addmm``.
    kind : str
        Operation class, for which a platform holds one set of kernel parameters: ``gemm``, ``bmm``,
        ``attention``, ``elementwise``, ``rowwise``, ``copy``, ``embedding_forward``,
        ``embedding_backward``, ``embedding_update``, ``convolution``, ``pooling``, ``transfer`` or
        ``collective``; ``other`` for all other captured operations.
    variant : str
        Finer class within the kind, such as a GEMM layout or an elementwise function.
    phase : str
        One of `PHASES`.
    module : str
        Path of its module.
    features : mapping
        Sizes by name, see `perfkit.workloads.columns.FEATURES`.
    """

    name: str
    kind: str
    variant: str
    phase: str
    module: str
    features: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Graph(Tabular):
    """The operations of one iteration on one rank, in program order, in columns.

    Parameters
    ----------
    labels : tuple of Label
        Name, kind, variant, phase and module of every operation.
    features : Features
        Sizes of every operation.
    accesses : Accesses
        Which operation reads or writes which tensor.
    tables : tuple of EmbeddingTable
        Tables; the feature ``table`` of an embedding operation is a number of one.
    parameters : int
        Trained numbers on this rank [-].
    name, family, dtype : str
        Its name, its workload family, and the data type of operations without their own.
    dtypes : tuple of str
        Data type of every operation; empty if all have `dtype`.
    ranks : int
        Ranks that take part [-].
    groups : tuple of tuple of int
        Ranks of each communicator; the feature ``group`` is a number of one. Empty if there is one
        of all ranks.
    waits : Waits or None
        Which operation waits for which collective; None if every collective is waited for at once.
    repeats : array or None
        How often each operation runs where one represents several equal ones; None for once [-].
    columns : mapping of str to array
        With several configurations: sizes that differ among them, by the name of the feature, a row
        per operation. The features are those of one configuration.
    buffers : tuple of float or array
        With several configurations: bytes of each buffer; one layer represents all equal ones [B].
    weights : Weights
        Weights outside of layers, and frozen ones inside.
    owners : Owners
        Modules of weights and of their states, where an optimizer updates them in lists.
    allocations : Allocations
        Allocations in their order, first those made before the iteration. Empty if a buffer exists
        from its first to its last use.
    held : HeldMemory or None
        Memory of the fullest rank of a strategy; None where it follows from the operations.
    on_host : float
        Memory of the host that a rank takes, where its strategy offloads [B].
    notes : tuple of str
        Assumptions of the recording; predictions show them as warnings.
    execution : str
        ``eager``, ``compiled`` (element-wise work is merged) or ``graphs`` (the host launches all
        kernels at once).
    device : str
        Kind of device that it was captured for, ``cpu`` or ``cuda``; empty if it was not captured.
    optimizer : str
        What updates the rows of tables that no other operation touches, a key of
        `perfkit.models.optimizers.OPTIMIZERS`; empty if nothing does, or if it was captured.
    updated_by : str
        What updates dense weights, as ``adamw``: the optimizers that a capture saw, or that of a DLRM.
    algorithms : mapping of int to str
        Algorithm of the collectives of a communicator, by its number, where its ranks fill several
        nodes; the library chooses all others.
    group_names : mapping of int to str
        What the ranks of a communicator share, by its number, as charts name its stream; others have
        their number.
    untouched : float
        Frozen weights that no operation reads as a whole, as those that are looked up in [B].
    """

    report_title = "The operations of one iteration on one rank, in program order"

    labels: tuple[Label, ...]
    features: Features
    accesses: Accesses
    tables: tuple[EmbeddingTable, ...] = ()
    parameters: int = 0
    name: str = "graph"
    family: str = ""
    dtype: str = "fp32"
    dtypes: tuple[str, ...] = ()
    ranks: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    waits: Waits | None = None
    repeats: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    buffers: tuple[Any, ...] = ()
    weights: Weights = field(default_factory=Weights.from_rows)
    owners: Owners = field(default_factory=Owners.from_rows)
    allocations: Allocations = field(default_factory=Allocations.from_rows)
    held: HeldMemory | None = None
    on_host: float = 0.0
    notes: tuple[str, ...] = ()
    execution: str = "eager"
    device: str = ""
    optimizer: str = ""
    updated_by: str = ""
    algorithms: Mapping[int, str] = field(default_factory=dict)
    group_names: Mapping[int, str] = field(default_factory=dict)
    untouched: float = 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Operation:
        return Operation(**self.labels[index]._asdict(), features=self.features.row(index))

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        return f"{len(self)} operations, {self.column('flops').sum():.3g} FLOP, {self.parameters} parameters"

    def __repr__(self) -> str:
        return f"Graph({self.headline()})"

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        return f"{self.name}, {len(self)} operations"

    def column(self, name: str) -> np.ndarray:
        """Values of one feature for every operation.

        Parameters
        ----------
        name : str
            One of `perfkit.workloads.columns.FEATURES`.

        Returns
        -------
        values : array
            One number per operation, in the unit of the feature; of several configurations, a row
            per operation.
        """
        values = vars(self.features)[name]
        if self.columns or self.repeats is not None:
            return self.columns.get(name, values[:, None])
        return values

    @cached_property
    def content(self) -> int:
        """A number that graphs with the same operations share; the names of groups of ranks do not
        count."""
        arrays = [*vars(self.features).values(), *vars(self.accesses).values()]
        if self.waits is not None:
            arrays += vars(self.waits).values()
        numbers = tuple(array.tobytes() for array in arrays)
        algorithms = tuple(self.algorithms.items())
        return hash((self.labels, self.tables, self.dtype, self.dtypes, algorithms, numbers))

    @cached_property
    def classes(self) -> OperationClasses:
        """The classes of its operations, and the class of each operation."""
        known: dict[tuple[str, str, str], int] = {}
        numbers = [
            known.setdefault((label.kind, label.variant, label.phase), len(known))
            for label in self.labels
        ]
        distinct = [OperationClass(*key) for key in known]
        return OperationClasses(distinct, np.array(numbers, dtype=np.intp))

    @cached_property
    def kernels(self) -> dict[KernelKey, np.ndarray]:
        """Indices of the operations of each kernel, in order of first appearance."""
        numbers: dict[KernelKey, int] = {}
        of_classes = np.array(
            [
                numbers.setdefault(KernelKey(kind, variant), len(numbers))
                for kind, variant, _ in self.classes.distinct
            ],
            dtype=np.intp,
        )
        of_operation = of_classes[self.classes.of_operation]
        in_order = np.argsort(of_operation, kind="stable")
        ends = np.cumsum(np.bincount(of_operation, minlength=len(numbers)))
        return dict(zip(numbers, np.split(in_order, ends[:-1]), strict=True)) if numbers else {}

    @cached_property
    def collectives(self) -> np.ndarray:
        """Positions of the collectives in program order."""
        return self.find_kind("collective")

    @cached_property
    def transfers(self) -> np.ndarray:
        """Positions of the copies between host and device that the host waits for, in program
        order."""
        return self.find_kind("transfer")

    def find_kind(self, kind: str) -> np.ndarray:
        """Find the operations of a kind.

        Parameters
        ----------
        kind : str
            Such as ``copy`` [-].

        Returns
        -------
        positions : array of int
            In program order [-].
        """
        is_of_kind = np.array(
            [of_class.kind == kind for of_class in self.classes.distinct], dtype=bool
        )
        return np.flatnonzero(is_of_kind[self.classes.of_operation])

    def with_groups(self, groups: tuple[tuple[int, ...], ...]) -> "Graph":
        """The same operations of another rank, whose groups have other members.

        Parameters
        ----------
        groups : tuple of tuple of int
            Ranks of each communicator; the feature ``group`` of an operation is a number of one [-].

        Returns
        -------
        graph : Graph
            It shares what was found about these operations.
        """
        other = replace(self, groups=groups)
        other.__dict__.update(
            content=self.content,
            classes=self.classes,
            kernels=self.kernels,
            collectives=self.collectives,
        )
        return other

    @cached_property
    def collective_waits(self) -> list[Wait]:
        """What waits for collectives, in program order; the end of the iteration waits for those
        that nothing else waits for."""
        positions = self.collectives.tolist()
        if self.waits is None:
            return [Wait(position + 1, number) for number, position in enumerate(positions)]
        waits = [*self.waits.sort()]
        awaited = {wait.collective for wait in waits}
        for number in range(len(positions)):
            if number not in awaited:
                waits.append(Wait(len(self), number))
        return waits

    @cached_property
    def segments(self) -> Segments:
        """Parts between collectives, transfers and waits."""
        count, collectives = len(self), self.collectives
        waits = sorted(self.collective_waits, key=_order_wait)
        waiting = [wait.operation for wait in waits]
        bounds = {0, count, *(collectives + 1).tolist(), *(self.transfers + 1).tolist()}
        without_wait = sorted(bounds.difference(waiting))
        # waits at one position stay in their order
        positions = np.array(waiting + without_wait, dtype=int)
        in_order = np.argsort(positions, kind="stable")
        begins = positions[in_order]
        ends = np.append(begins[1:], count)
        wait_of: list[Wait | None] = [*waits, *[None] * len(without_wait)]
        # a segment with operations may end with a collective
        numbers = np.searchsorted(collectives, ends - 1)
        is_launched = np.isin(ends - 1, collectives) & (begins < ends)
        launches = [
            number if launched else None
            for number, launched in zip(numbers.tolist(), is_launched.tolist(), strict=True)
        ]
        is_first_there = np.diff(begins, prepend=-1) > 0
        return Segments(
            begins=begins,
            ends=ends,
            waits=[wait_of[number] for number in in_order.tolist()],
            launches=launches,
            follows_transfer=np.isin(begins, self.transfers + 1) & is_first_there,
        )

    @cached_property
    def traffic(self) -> np.ndarray:
        """Bytes that each operation reads and writes; each operand counts once [B]."""
        if self.columns:
            return self.columns["traffic"]
        return np.bincount(
            self.accesses.operation, weights=self.accesses.nbytes, minlength=len(self)
        )

    @property
    def model_flops(self) -> float:
        """Work of products [FLOP]: that of the forward pass, three times if a backward pass
        follows.

        Work that is computed again counts once; causal attention counts half (arXiv:2204.02311,
        appendix B). Of a captured graph, the backward pass of each module counts as it runs, up to
        twice the forward pass: nothing for work without gradients, once where the input needs none.
        """
        flops = self.column("flops")
        phases = [label.phase if label.kind in _PRODUCTS else "" for label in self.labels]
        forward = float(flops[np.array(phases, dtype=str) == "forward"].sum())
        if self.device == "":
            return forward * (3.0 if "backward" in phases else 1.0)
        forward_of: dict[str, float] = {}
        backward_of: dict[str, float] = {}
        for label, phase, work in zip(self.labels, phases, flops.ravel().tolist(), strict=True):
            if phase == "forward":
                forward_of[label.module] = forward_of.get(label.module, 0.0) + work
            elif phase == "backward":
                backward_of[label.module] = backward_of.get(label.module, 0.0) + work
        # more than twice the forward pass is work that is computed again
        backward = sum(
            min(2.0 * work, backward_of.get(module, 0.0)) for module, work in forward_of.items()
        )
        return forward + backward

    @cached_property
    def distances(self) -> np.ndarray:
        """Bytes that were touched since the last access to the same buffer, for each access [B].

        Iterations follow one another. An operation in place has just read what it writes: its
        distance is zero.
        """
        accesses = self.accesses
        distances = reuse_distances(accesses.buffer, accesses.nbytes)
        # one number for each pair of operation and buffer
        pairs = accesses.operation * (accesses.buffer.max(initial=0) + 1) + accesses.buffer
        in_place = accesses.is_write & np.isin(pairs, pairs[~accesses.is_write])
        return np.where(in_place, 0.0, distances)

    @cached_property
    def footprint(self) -> Any:
        """Distinct bytes that one iteration touches, without rows of embeddings [B]."""
        accesses = self.accesses
        if self.buffers or not len(accesses.buffer):
            return sum(self.buffers, start=0.0)
        largest = np.zeros((int(accesses.buffer.max()) + 1, *accesses.nbytes.shape[1:]))
        np.maximum.at(largest, accesses.buffer, accesses.nbytes)
        return largest.sum()

    @property
    def updates_in_backward(self) -> bool:
        """Whether hooks update weights inside of the backward pass. What replicas exchange is recorded
        behind the update, and is no part of that pass."""
        of_pass = [label for label in self.labels if not label.module.startswith("exchange")]
        phases = np.array([label.phase for label in of_pass])
        backward = np.flatnonzero(phases == "backward")
        return len(backward) > 0 and bool((phases[: backward[-1]] == "update").any())

    def table(self) -> Table:
        """Every operation with its labels, sizes and traffic as a Polars frame.

        Returns
        -------
        frame : polars.DataFrame
            One row per operation; sizes as in `perfkit.workloads.columns.FEATURES`, and traffic_bytes [B].
        """
        import polars

        labels = polars.DataFrame(self.labels, list(Label._fields), orient="row")
        sizes = {name: self.column(name) for name in FEATURES}
        return labels.hstack(polars.DataFrame(sizes | {"traffic_bytes": self.traffic}))
