"""Deep learning recommendation models: embedding tables, dot interaction and two multilayer perceptrons."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from perfkit.units import check_choice, check_positive
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import ITEMSIZE, Tensor, check_switches
from perfkit.workloads.training import Training

__all__ = ["DLRM", "PRESETS"]

#: Row counts of the 26 tables of MLPerf's DLRM v1 on Criteo Terabyte with at most 40 million rows a table.
_MLPERF_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip

#: Named configurations: ``dlrm-default`` and ``dlrm-ddp`` are those of arXiv 2404.12674, whose layer lists start with
#: the input (512-512-64 has two layers); ``dlrm-mlperf`` is MLPerf training v1-v2 (mlcommons/training_results_v2.1).
PRESETS: dict[str, dict[str, Any]] = {
    "dlrm-default": {
        "rows": (1_000_000,) * 8, "dim": 64, "pooling": 100, "bottom": (512, 64), "top": (1024, 1024, 1024, 1),
        "features": 512,
    },
    "dlrm-ddp": {
        "rows": (80_000,) * 8, "dim": 128, "pooling": 10, "bottom": (128, 128, 128), "top": (512, 512, 512, 256, 1),
        "features": 128,
    },
    "dlrm-mlperf": {
        "rows": _MLPERF_ROWS, "dim": 128, "pooling": 1, "bottom": (512, 256, 128), "top": (1024, 1024, 512, 256, 1),
        "features": 13,
    },
}  # fmt: skip


def _end_with(name: str, widths: Any, last: int) -> tuple[int, ...]:
    """Widths of layers, the last of which is known."""
    if isinstance(widths, str) or not isinstance(widths, Sequence | np.ndarray):
        raise ValueError(f"{name} is {widths!r}; it must be a sequence of layer widths, such as (512, 64)")
    checked = tuple(int(check_positive(name, width, integer=True)) for width in widths)
    return checked if checked and checked[-1] == last else (*checked, last)


def _per_table(name: str, value: object, tables: int) -> tuple[Any, ...]:
    """One value for every table, or a sequence with one for each."""
    listed = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    values = tuple(value) if listed else (value,) * tables  # type: ignore[arg-type]
    if len(values) != tables:
        raise ValueError(
            f"{name} has {len(values)} entries; the model has {tables} tables; give one number or one a table"
        )
    return tuple(v.item() if isinstance(v, np.generic) else v for v in values)


@dataclass(frozen=True, init=False)
class DLRM:
    """One training iteration of a DLRM: lookups, bottom MLP, dot interaction, top MLP, binary cross entropy, SGD.

    On several ranks the tables are placed whole by a `Plan` and looked up for the whole batch, pooled rows and their
    gradients are exchanged by all_to_all, the MLPs are data-parallel and their gradients reduced in one piece. Every
    collective is waited for at once, as a blocking PyTorch call does.

    Parameters
    ----------
    preset : str, optional
        Name of a configuration in `PRESETS`; further arguments override its entries.
    batch : int
        Samples of one iteration over all ranks [-].
    rows : int or sequence of int
        Rows of each table [-].
    dim : int
        Columns of every table; also the width of the last bottom layer [-].
    pooling : float or sequence of float
        Lookups per sample and table [-].
    exponent : float or sequence of float
        Zipf exponent of the looked-up rows, 0 for uniform [-].
    bottom : sequence of int
        Widths of the bottom MLP; a last layer of `dim` is appended where it is missing [-].
    top : sequence of int
        Widths of the top MLP; a last layer of 1 is appended where it is missing [-].
    features : int
        Dense input features [-].
    sparse : bool
        Whether table gradients hold one row per lookup instead of the whole table.
    embedding : str
        ``separate`` (one bag operation a table) or ``fused`` (one kernel looks up all tables, and one updates their
        rows in the backward pass, lookup by lookup; `sparse` then has no say).
    loop : str
        ``lean`` (inputs are on the device, nothing is read back) or ``reference``, the training loop of the authors'
        implementation on PyTorch until 1.12: inputs, labels and the indices of the interaction are copied from pageable
        memory and the loss is read before the backward pass, each of which the host waits for; gradients are zeroed and
        added to, and weights updated, by a kernel each. On a CPU both are taken alike.
    fused : bool
        Whether the optimizer updates all dense weights by one kernel.
    mixed : bool
        Whether weights, gradients and all that is not a product stay fp32 while products run in `dtype` (autocast).
    dtype : str
        Data type of products, and unless `mixed` of weights, activations and gradients.
    optimizer : str
        ``sgd``.

    Raises
    ------
    ValueError
        For unknown presets, data types and optimizers, sizes that are not above zero or lists of different lengths.

    Examples
    --------
    >>> DLRM("dlrm-default", batch=2048).tables[0].rows
    1000000
    """

    name: str
    batch: int
    tables: tuple[EmbeddingTable, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    features: int
    sparse: bool
    embedding: str
    loop: str
    fused: bool
    mixed: bool
    dtype: str
    optimizer: str
    family: str = field(default="dlrm", repr=False)

    def __init__(
        self,
        preset: str | None = None,
        *,
        batch: int = 2048,
        rows: int | Sequence[int] | None = None,
        dim: int | None = None,
        pooling: float | Sequence[float] | None = None,
        exponent: float | Sequence[float] = 0.0,
        bottom: Sequence[int] | None = None,
        top: Sequence[int] | None = None,
        features: int | None = None,
        sparse: bool = True,
        embedding: str = "separate",
        loop: str = "lean",
        fused: bool = False,
        mixed: bool = False,
        dtype: str = "fp32",
        optimizer: str = "sgd",
    ) -> None:
        if preset is not None:
            check_choice("preset", preset, PRESETS)
        base = dict(PRESETS[preset or "dlrm-default"])
        given = {"rows": rows, "dim": dim, "pooling": pooling, "bottom": bottom, "top": top, "features": features}
        base |= {key: value for key, value in given.items() if value is not None}
        check_choice("dtype", dtype, ITEMSIZE)
        check_choice("optimizer", optimizer, ("sgd",))
        check_choice("embedding", embedding, ("separate", "fused"))
        check_choice("loop", loop, ("lean", "reference"))
        if not isinstance(sparse, bool):
            raise ValueError(f"sparse is {sparse!r}; it must be True (one gradient row per lookup) or False")
        check_switches(dtype, fused=fused, mixed=mixed)
        width = check_positive("dim", base["dim"], integer=True)
        listed = isinstance(base["rows"], Sequence | np.ndarray) and not isinstance(base["rows"], str)
        sizes = base["rows"] if listed else (base["rows"],)
        poolings, exponents = (
            _per_table(n, v, len(sizes)) for n, v in (("pooling", base["pooling"]), ("exponent", exponent))
        )
        itemsize, counts = (
            4 if mixed else ITEMSIZE[dtype],
            (int(check_positive("rows", r, integer=True)) for r in sizes),
        )
        tables = tuple(
            EmbeddingTable(count, int(width), p, e, itemsize, f"table {i}")
            for i, (count, p, e) in enumerate(zip(counts, poolings, exponents, strict=True))
        )
        layers = {key: _end_with(key, base[key], int(last)) for key, last in (("bottom", width), ("top", 1))}
        values = {
            "name": preset or "dlrm", "batch": int(check_positive("batch", batch, integer=True)), "tables": tables,
            "features": int(check_positive("features", base["features"], integer=True)), "sparse": sparse,
            "embedding": embedding, "loop": loop, "fused": fused, "mixed": mixed, "dtype": dtype,
            "optimizer": optimizer, "family": "dlrm", **layers,
        }  # fmt: skip
        if not tables:
            raise ValueError("rows is empty; a DLRM needs at least one table; give the rows of each table")
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        tables = f"{len(self.tables)} tables × {self.tables[0].dim}"
        gradients = "fused" if self.embedding == "fused" else f"{'sparse' if self.sparse else 'dense'} gradients"
        loop = ", reference loop" if self.loop == "reference" else ""
        return f"{self.name}, batch {self.batch}, {tables}, {gradients}{loop}"

    def place(self, plan: Plan | None, ranks: int) -> Plan:
        """The plan itself if it fits, or the tables dealt out in turn.

        Parameters
        ----------
        plan : Plan or None
            Placement of the tables.
        ranks : int
            Ranks [-].

        Returns
        -------
        plan : Plan
            A placement of all tables on these ranks.

        Raises
        ------
        ValueError
            If the plan is for other ranks or tables, or the batch does not divide by the ranks.
        """
        ranks = int(check_positive("ranks", ranks, integer=True))
        if plan is not None and not isinstance(plan, Plan):
            raise ValueError(
                f"plan is {plan!r}; it must be a Plan; make one with Plan.from_owners(owners, ranks={ranks})"
            )
        if self.batch % ranks:
            raise ValueError(f"batch is {self.batch}; it must divide by the {ranks} ranks; take a multiple of {ranks}")
        plan = plan or Plan.round_robin(len(self.tables), ranks=ranks)
        if plan.ranks != ranks or len(plan.owners) != len(self.tables):
            raise ValueError(
                f"plan places {len(plan.owners)} tables on {plan.ranks} ranks; the model has {len(self.tables)} tables "
                f"and {ranks} ranks are asked for; make a plan for these"
            )
        return plan

    def graphs(self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False) -> tuple[Graph, ...]:
        """What every rank computes in one iteration.

        Parameters
        ----------
        ranks : int
            Ranks [-].
        plan : Plan, optional
            Placement of the tables; by default they are dealt out in turn.
        accelerator : bool
            Whether it runs on a device of its own, where the optimizer updates lists of tensors and `loop` matters.

        Returns
        -------
        graphs : tuple of Graph
            One per rank.
        """
        placed = self.place(plan, ranks)
        return tuple(_record(self, placed, rank, accelerator) for rank in range(placed.ranks))


@lru_cache(maxsize=256)
def _record(model: DLRM, plan: Plan, rank: int, accelerator: bool) -> Graph:
    """Record one rank's iteration."""
    ranks, dim, reference = plan.ranks, model.tables[0].dim, accelerator and model.loop == "reference"
    tape = Training(ITEMSIZE[model.dtype], mixed=model.mixed, reference=reference)
    local, batch = [model.tables[t] for t in plan.tables_of(rank)], model.batch // ranks
    inputs = tape.tensor(batch, model.features, itemsize=tape.wide)
    if reference:
        lookups, bags = sum(round(model.batch * table.pooling) for table in local), model.batch * len(local) + 1
        for part in (inputs, *(tape.tensor(count, itemsize=4) for count in (lookups, bags) if local)):
            tape.transfer("to_device", part)
    tape.module = "bottom"
    dense = tape.mlp(inputs, model.bottom, last_relu=True)
    tape.module = "embeddings"
    pooled = _look_up(tape, model, local, index=4 if reference else 8)
    if ranks > 1:
        send = tape.cat(pooled) if len(pooled) > 1 else (pooled[0] if pooled else None)
        widths = [dim * len(plan.tables_of(r)) for r in range(ranks)]
        nbytes = model.batch * max(widths) * tape.wide  # the fullest rank's whole buffer bounds an uneven exchange
        pooled = tape.exchange(send, batch, widths, nbytes)
    tape.module = "interaction"
    vectors = tape.cat([dense, *pooled]).view(batch, len(model.tables) + 1, dim)
    tape.views(2)  # rows by table, and these transposed
    products = tape.lower_triangle(tape.bmm(vectors, vectors, "nt"))
    joined = tape.cat([dense, products])
    tape.module = "top"
    tape.binary_cross_entropy(tape.mlp(joined, model.top, last_relu=False))
    if reference:
        tape.zero_gradients()
    tape.backward()
    if ranks > 1:
        tape.all_reduce_gradients()
    tape.step(model.optimizer, lists=accelerator, fused=model.fused)
    return tape.graph()


def _look_up(tape: Training, model: DLRM, tables: Sequence[EmbeddingTable], *, index: int) -> list[Tensor]:
    """Pooled rows of every table; indices and offsets take `index` bytes each."""
    if model.embedding == "fused":
        return tape.fused_embeddings(tables, model.batch, itemsize=index) if tables else []
    return [tape.embedding_bag(table, model.batch, sparse=model.sparse) for table in tables]
