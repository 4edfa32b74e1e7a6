"""One training iteration as columns: every operation with its sizes, and every tensor it reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np

from perfkit.ground.results import Table, Tabular
from perfkit.models.kernels import reuse_distances
from perfkit.workloads.tables import EmbeddingTable

#: Name, kind, variant, phase and module of an operation.
Label: TypeAlias = tuple[str, str, str, str, str]
PHASES = ("forward", "backward", "update")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

#: Sizes that the closed forms consume, one number per operation; zero where they do not apply. Three are what the host
#: does for it: kernels launched (0 for a part of the kernel before), calls of the framework opened (0 for a further
#: kernel of the call before), and calls without a kernel that come first. The last is the communicator of a collective.
FEATURES = (
    "flops", "batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim", "table", "nbytes",
    "launches", "calls", "bare", "group",
)  # fmt: skip
#: Place of each among the columns.
COLUMN = {name: place for place, name in enumerate(FEATURES)}
_PRODUCTS = ("gemm", "bmm", "attention", "convolution")
#: What is the same for all sizes.
_STRUCTURE = ("classes", "kernels", "collectives", "transfers")


@dataclass(frozen=True)
class Operation:
    """One operation of an iteration, as `Graph` hands it out.

    Parameters
    ----------
    name : str
        The framework's name, such as ``addmm``.
    kind : str
        Operation class, for which a platform holds one set of kernel parameters: ``gemm``, ``bmm``, ``attention``,
        ``elementwise``, ``rowwise``, ``copy``, ``embedding_forward``, ``embedding_backward``, ``embedding_update``,
        ``convolution``, ``pooling``, ``transfer`` or ``collective``; ``other`` for what was captured and is none of
        them.
    variant : str
        Finer class within the kind, such as a GEMM layout or an elementwise function.
    phase : str
        One of `PHASES`.
    module : str
        Path of the module it belongs to.
    features : mapping
        Sizes by name, see `FEATURES`.
    """

    name: str
    kind: str
    variant: str
    phase: str
    module: str
    features: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Graph(Tabular):
    """The operations of one iteration on one rank, in program order, stored as columns.

    Parameters
    ----------
    labels : tuple of (str, str, str, str, str)
        Name, kind, variant, phase and module of every operation.
    features : array
        One row per operation, one column per entry of `FEATURES`, each in its unit [-].
    accesses : array
        Operation index, buffer number, bytes [B] and 1 for a write, one row per tensor read or written.
    tables : tuple of EmbeddingTable
        Tables the embedding operations refer to by number.
    parameters : int
        Trained numbers on this rank [-].
    name, family, dtype : str
        What it is called, which workloads it counts among, and the data type of operations without their own.
    dtypes : tuple of str
        Data type of every operation; empty where all have the one of the graph.
    ranks : int
        Ranks that take part [-].
    groups : tuple of tuple of int
        Ranks of each communicator, by the number in the feature ``group``; empty where all ranks share the only one.
    waits : array or None
        One row per wait: position of an operation that starts no sooner than a collective has ended, and the number of
        that collective in program order, less their count for one of the iteration before [-]; None where every
        collective is waited for at once.
    repeats : array or None
        How often each operation runs where one stands for several that are alike; None for once [-].
    columns : mapping of str to array
        Of several configurations, one of which the graph is of: sizes that differ, a row per operation, by the name of
        the feature.
    buffers : tuple of float or array
        Bytes of each of their buffers; of a layer that stands for several, those of one [B].
    sizes : array or None
        Of several configurations: sizes that were not known when it was recorded, a row for each, whose numbers stand
        in features and accesses [-].
    weights : array
        Buffer number and 1 for an embedding table [-], one row per trained tensor that may be looked up alone.
    allocations : array
        Buffer number and bytes [B], one row per allocation, less than zero where they are released, as they follow one
        another; first what is in memory when the iteration begins. Empty where buffers live as long as they are used.
    notes : tuple of str
        What was assumed where it was recorded; predictions of it carry these as warnings.
    execution : str
        ``eager``, ``compiled``, where element-wise work is merged, or ``graphs``, where the host launches all at once.
    device : str
        Kind of device that it was captured for, ``cpu`` or ``cuda``; empty where it was not captured.
    """

    labels: tuple[Label, ...]
    features: np.ndarray
    accesses: np.ndarray
    tables: tuple[EmbeddingTable, ...] = ()
    parameters: int = 0
    name: str = "graph"
    family: str = ""
    dtype: str = "fp32"
    dtypes: tuple[str, ...] = ()
    ranks: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    waits: np.ndarray | None = None
    repeats: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    buffers: tuple[Any, ...] = ()
    sizes: Any = None
    weights: np.ndarray = field(default_factory=partial(np.zeros, (0, 2), int))
    allocations: np.ndarray = field(default_factory=partial(np.zeros, (0, 2)))
    notes: tuple[str, ...] = ()
    execution: str = "eager"
    device: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Operation:
        sizes = dict(zip(FEATURES, map(float, self.features[index]), strict=True))
        return Operation(*self.labels[index], features=sizes)

    def __repr__(self) -> str:
        return f"Graph({len(self)} operations, {self.column('flops').sum():.3g} FLOP, {self.parameters} parameters)"

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        return f"{self.name}, {len(self)} operations"

    def column(self, name: str) -> np.ndarray:
        """Values of one feature for every operation.

        Parameters
        ----------
        name : str
            One of `FEATURES`.

        Returns
        -------
        values : array
            One number per operation, in the unit of the feature; of several configurations, a row per operation.
        """
        found = self.features[:, FEATURES.index(name)]
        return self.columns.get(name, found[:, None]) if self.columns or self.repeats is not None else found

    @cached_property
    def content(self) -> int:
        """The same for graphs of the same operations, whoever executes them; groups of ranks aside."""
        arrays = (self.features, self.accesses, np.zeros(0) if self.waits is None else self.waits)
        return hash((self.labels, self.tables, self.dtype, self.dtypes, *(each.tobytes() for each in arrays)))

    @cached_property
    def classes(self) -> tuple[list[tuple[str, str, str]], np.ndarray]:
        """Every (kind, variant, phase) in order of first appearance, and the number of that of each operation."""
        known: dict[tuple[str, str, str], int] = {}
        numbers = [known.setdefault(label[1:4], len(known)) for label in self.labels]
        return list(known), np.array(numbers, dtype=np.intp)

    @cached_property
    def kernels(self) -> dict[tuple[str, str], np.ndarray]:
        """Indices of the operations by (kind, variant), in order of first appearance."""
        found: dict[tuple[str, str], list[int]] = {}
        for place, label in enumerate(self.labels):
            found.setdefault(label[1:3], []).append(place)
        return {pair: np.array(places) for pair, places in found.items()}

    @cached_property
    def collectives(self) -> np.ndarray:
        """Positions of the collectives in program order."""
        return self._find("collective")

    @cached_property
    def transfers(self) -> np.ndarray:
        """Positions of the copies between host and device that the host waits for, in program order."""
        return self._find("transfer")

    def _find(self, kind: str) -> np.ndarray:
        return np.flatnonzero(np.array([key[0] == kind for key in self.classes[0]], dtype=bool)[self.classes[1]])

    @cached_property
    def traffic(self) -> np.ndarray:
        """Bytes each operation reads and writes, each operand counted once [B]."""
        if self.columns:
            return self.columns["traffic"]
        return np.bincount(self.accesses[:, 0].astype(np.intp), weights=self.accesses[:, 2], minlength=len(self))

    @property
    def model_flops(self) -> float:
        """Work of the products of a model [FLOP]: of the forward pass, and twice that where a backward pass follows.

        What is computed again counts once, and causal attention its half, as in arXiv:2204.02311, appendix B.
        """
        phases = [label[3] if label[1] in _PRODUCTS else "" for label in self.labels]
        forward = float(self.column("flops")[np.array(phases, dtype=str) == "forward"].sum())
        return forward * (3.0 if "backward" in phases else 1.0)

    @cached_property
    def distances(self) -> np.ndarray:
        """Bytes touched since each access's buffer was last touched, the iteration taken as a cycle [B].

        What an operation changes in place is near: it has just been read.
        """
        operations, buffers, nbytes, writes = self.accesses.T
        found = reuse_distances(buffers.astype(np.intp), nbytes)
        places = operations * (buffers.max(initial=0.0) + 1.0) + buffers
        return np.where((writes == 1.0) & np.isin(places, places[writes == 0.0]), 0.0, found)

    @cached_property
    def footprint(self) -> Any:
        """Distinct bytes one iteration touches, embedding rows aside [B]."""
        if self.buffers or not len(self.accesses):
            return sum(self.buffers, start=0.0)
        order = np.argsort(self.accesses[:, 1], kind="stable")
        starts = np.flatnonzero(np.diff(self.accesses[order, 1], prepend=-1))
        return np.maximum.reduceat(self.accesses[order, 2], starts).sum()

    @cached_property
    def _holes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Places of sizes that were not known when it was recorded, and their numbers: of features and of accesses."""
        flat = [array.ravel() for array in (self.features, self.accesses)]
        return [(places, (-1.0 - v[places]).astype(np.intp)) for v in flat for places in [np.flatnonzero(v < 0)]]

    def fill(self, sizes: np.ndarray) -> "Graph":
        """Put sizes in place of their numbers.

        Parameters
        ----------
        sizes : array
            What a `perfkit.workloads.sizes.Program` has found [-].

        Returns
        -------
        graph : Graph
            The same operations with these sizes.
        """
        filled = []
        for array, (places, numbers) in zip((self.features, self.accesses), self._holes, strict=True):
            filled.append(array.copy())
            filled[-1].ravel()[places] = sizes[numbers]
        found = replace(self, features=filled[0], accesses=filled[1], sizes=None)
        vars(found).update({name: getattr(self, name) for name in _STRUCTURE})
        return found

    def table(self) -> Table:
        """Every operation with its labels, sizes and traffic as a Polars frame.

        Returns
        -------
        frame : polars.DataFrame
            One row per operation; sizes as in `FEATURES`, ``traffic`` in bytes.
        """
        import polars

        labels = polars.DataFrame(self.labels, ["name", "kind", "variant", "phase", "module"], orient="row")
        sizes = {name: self.column(name) for name in FEATURES}
        return labels.hstack(polars.DataFrame(sizes | {"traffic": self.traffic}))
