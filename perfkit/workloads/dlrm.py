"""Deep learning recommendation models: embedding tables, their interaction and two multilayer perceptrons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from perfkit.units import check_choice, check_positive, check_type, show
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.shards import Held, hold_tables
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import ITEMSIZE, Tensor, check_switches
from perfkit.workloads.training import Training

__all__ = ["DLRM", "PRESETS"]

#: Row counts of the 26 tables of MLPerf's DLRM v1 on Criteo Terabyte with at most 40 million rows a table.
_MLPERF_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip

#: Row counts and lookups per sample of the 26 tables of MLPerf's DLRM-DCNv2 (mlcommons/training_results_v4.0,
#: dlrm_dcnv2 train.py).
_DCN_ROWS = (
    40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973, 108, 36,
)  # fmt: skip
_DCN_LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

#: Named configurations: ``dlrm-default`` and ``dlrm-ddp`` are those of arXiv 2404.12674, whose layer lists start with
#: the input (512-512-64 has two layers); ``dlrm-mlperf`` is MLPerf training v0.7-v2.1 (mlcommons/training_results_v2.1)
#: and ``dlrm-dcnv2`` MLPerf training since v3.0, with tables updated row by row where they are looked up.
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
    "dlrm-dcnv2": {
        "rows": _DCN_ROWS, "dim": 128, "pooling": _DCN_LOOKUPS, "bottom": (512, 256, 128),
        "top": (1024, 1024, 512, 256, 1), "features": 13, "interaction": "cross", "optimizer": "adagrad",
        "embedding": "exact",
    },
}  # fmt: skip
_DEFAULTS = {"interaction": "dot", "optimizer": "sgd", "embedding": "separate"}


def _end_with(name: str, widths: Any, last: int) -> tuple[int, ...]:
    """Widths of layers, the last of which is known."""
    check_type(name, widths, Sequence)
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
    """One training iteration of a DLRM: lookups, bottom MLP, interaction, top MLP, binary cross entropy, optimizer.

    On several ranks the tables are placed by a `Plan`. Whole tables and splits by columns are looked up for the whole
    batch, pooled rows and their gradients are exchanged by all_to_all; those of splits by rows are sums of parts, which
    reduce_scatter adds up and all_gather answers; copies are looked up for a rank's own samples. The MLPs are
    data-parallel, their gradients and those of copies reduced.

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
        ``separate`` (one bag operation a table), ``fused`` (one kernel looks up all tables, and one updates their
        rows in the backward pass, lookup by lookup; `sparse` then has no say) or ``exact`` (likewise, but lookups are
        sorted and each distinct row is updated once).
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
        ``sgd`` or ``adagrad``.
    interaction : str
        ``dot`` (products of all pairs of vectors) or ``cross`` (low-rank cross layers over all of them, DCNv2).
    cross : (int, int)
        Cross layers and their rank [-].
    overlap : bool
        Whether the exchange of rows runs while the bottom MLP works, both ways, and gradients of each MLP are reduced
        in buckets as they arrive, as DistributedDataParallel does; else every collective is waited for at once, as a
        blocking PyTorch call does, and gradients are reduced in one piece after the backward pass.
    compiled : bool
        Whether activations, biases and sums of gradients happen inside products, an interaction takes one kernel each
        way, and gradients need no copies to be reduced, as HugeCTR and compilers have it.
    table_dtype : str
        Data type of the tables, by default that of weights; pooled rows come in that of activations.

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
    interaction: str
    cross: tuple[int, int]
    overlap: bool
    compiled: bool
    table_dtype: str
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
        embedding: str | None = None,
        loop: str = "lean",
        fused: bool = False,
        mixed: bool = False,
        dtype: str = "fp32",
        optimizer: str | None = None,
        interaction: str | None = None,
        cross: tuple[int, int] = (3, 512),
        overlap: bool = False,
        compiled: bool = False,
        table_dtype: str = "",
    ) -> None:
        if preset is not None:
            check_choice("preset", preset, PRESETS)
        base = _DEFAULTS | PRESETS[preset or "dlrm-default"]
        given = {"rows": rows, "dim": dim, "pooling": pooling, "bottom": bottom, "top": top, "features": features,
                 "embedding": embedding, "optimizer": optimizer, "interaction": interaction}  # fmt: skip
        base |= {key: value for key, value in given.items() if value is not None}
        table_dtype = table_dtype or ("fp32" if mixed else dtype)
        for name, value, known in (
            ("dtype", dtype, tuple(ITEMSIZE)), ("table_dtype", table_dtype, tuple(ITEMSIZE)),
            ("optimizer", base["optimizer"], ("sgd", "adagrad")), ("loop", loop, ("lean", "reference")),
            ("embedding", base["embedding"], ("separate", "fused", "exact")),
            ("interaction", base["interaction"], ("dot", "cross")),
        ):  # fmt: skip
            check_choice(name, value, known)
        if base["optimizer"] == "adagrad" and (
            base["embedding"] == "fused" or (base["embedding"] == "separate" and sparse)
        ):
            raise ValueError(
                f"optimizer is 'adagrad' with embedding {base['embedding']!r} and sparse gradients; rows of "
                "equal number must be added up first; take embedding='exact', sparse=False, or capture the step"
            )
        check_type("cross", cross, tuple)
        check_switches(dtype, sparse=sparse, fused=fused, mixed=mixed, overlap=overlap, compiled=compiled)
        width = check_positive("dim", base["dim"], integer=True)
        listed = isinstance(base["rows"], Sequence | np.ndarray) and not isinstance(base["rows"], str)
        sizes = base["rows"] if listed else (base["rows"],)
        poolings, exponents = (
            _per_table(n, v, len(sizes)) for n, v in (("pooling", base["pooling"]), ("exponent", exponent))
        )
        counts = (int(check_positive("rows", r, integer=True)) for r in sizes)
        tables = tuple(
            EmbeddingTable(count, int(width), p, e, ITEMSIZE[table_dtype], f"table {i}")
            for i, (count, p, e) in enumerate(zip(counts, poolings, exponents, strict=True))
        )
        layers = {key: _end_with(key, base[key], int(last)) for key, last in (("bottom", width), ("top", 1))}
        values = {
            "name": preset or "dlrm", "batch": int(check_positive("batch", batch, integer=True)), "tables": tables,
            "features": int(check_positive("features", base["features"], integer=True)), "sparse": sparse,
            "loop": loop, "fused": fused, "mixed": mixed, "dtype": dtype, "overlap": overlap, "compiled": compiled,
            "table_dtype": table_dtype, "family": "dlrm", **layers, **{key: base[key] for key in _DEFAULTS},
            "cross": tuple(int(check_positive("cross", size, integer=True)) for size in cross),
        }  # fmt: skip
        if len(values["cross"]) != 2:
            raise ValueError(
                f"cross is {show(cross)}; it must be the number of layers and their rank, such as (3, 512)"
            )
        if not tables:
            raise ValueError("rows is empty; a DLRM needs at least one table; give the rows of each table")
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        tables = f"{len(self.tables)} tables × {self.tables[0].dim}"
        gradients = (
            self.embedding if self.embedding != "separate" else f"{'sparse' if self.sparse else 'dense'} gradients"
        )
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
        check_type("plan", plan, Plan | None)
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
    ranks, reference = plan.ranks, accelerator and model.loop == "reference"
    overlap = model.overlap and ranks > 1
    switches = {"mixed": model.mixed, "compiled": model.compiled}
    tape = Training(ITEMSIZE[model.dtype], reference=reference, overlap=overlap, **switches)
    held, batch = hold_tables(plan.placements, model.tables, rank, ranks=ranks), model.batch // ranks
    inputs = tape.tensor(batch, model.features, itemsize=tape.wide)
    if reference:
        bags = [(model.batch, t) for t in held.looked] + [(batch, t) for t in held.copies]
        counts = (sum(round(n * t.pooling) for n, t in bags), sum(n for n, _ in bags) + 1) if bags else ()
        for part in (inputs, *(tape.tensor(n, itemsize=4) for n in counts)):
            tape.transfer("to_device", part)
    if not overlap:
        dense = _bottom(tape, inputs, model)
    receive, before = _look_up(tape, model, held, index=4 if reference else 8), len(tape.trained)
    if overlap:
        dense = _bottom(tape, inputs, model)
        tape.trained = tape.trained[before:] + tape.trained[:before]  # modules are made in the order of PRESETS
    tape.module = "interaction"
    pooled = [part for wait in receive for part in wait()]
    vectors = tape.cat([dense, *pooled])
    before = len(tape.trained)
    if model.interaction == "cross":
        joined = tape.cross(vectors, *model.cross)
    else:
        joined = tape.dot(vectors.view(batch, len(model.tables) + 1, model.tables[0].dim), dense)
    tape.module = "top"
    tape.binary_cross_entropy(tape.mlp(joined, model.top, last_relu=False))
    if reference:
        tape.zero_gradients()
    if overlap:
        top, others = tape.trained[before:], [w for w in tape.trained[:before] if w not in tape.local]
        bottom = 2 * len(model.bottom)
        for module in (top, others[:bottom], others[bottom:]):
            tape.share_gradients(module)
    tape.backward()
    if ranks > 1 and not overlap:
        tape.all_reduce_gradients()
    tape.step(model.optimizer, lists=accelerator, fused=model.fused)
    groups = held.groups if ranks > 1 else ()
    return tape.graph(name=model.name, family=model.family, dtype=model.dtype, ranks=ranks, groups=groups)


def _bottom(tape: Training, inputs: Tensor, model: DLRM) -> Tensor:
    tape.module = "bottom"
    return tape.mlp(inputs, model.bottom, last_relu=True)


def _look_up(tape: Training, model: DLRM, held: Held, *, index: int) -> list[Callable[[], list[Tensor]]]:
    """Look tables up by indices of `index` bytes and launch the exchanges; each entry waits for its pooled rows."""
    tape.module, ranks, batch = "embeddings", len(held.widths), model.batch // len(held.widths)
    looked = _pool(tape, model, held.looked, model.batch, index)
    receive: list[Callable[[], list[Tensor]]] = []
    pooled, start = looked[: held.whole], held.whole
    for group, count in held.sums:
        parts, start = looked[start : start + count], start + count
        members = len(held.groups[group])
        part = tape.cat(parts) if len(parts) > 1 else parts[0]
        wait = tape.exchange(
            part, model.batch // members, [part.shape[1]], part.nbytes,
            operations=("reduce_scatter", "all_gather"), group=group,
        )  # fmt: skip
        if members == ranks:
            receive.append(wait)
        else:  # each rank of the node passes its samples on
            pooled += [sent.view(model.batch, sent.numel // model.batch) for sent in wait()]
    if ranks == 1:
        receive.append(lambda: looked)
    elif any(held.widths):
        send = tape.cat(pooled) if len(pooled) > 1 else (pooled[0] if pooled else None)
        # the fullest rank's whole buffer bounds an uneven exchange
        receive.insert(0, tape.exchange(send, batch, held.widths, model.batch * max(held.widths) * tape.wide))
    if held.copies:
        copies = _pool(tape, model, held.copies, batch, index, copied=True)
        tape.local.difference_update(tape.trained[-len(held.copies) :])
        receive.append(lambda: copies)
    return receive


def _pool(
    tape: Training, model: DLRM, tables: Sequence[EmbeddingTable], bags: int, index: int, *, copied: bool = False
) -> list[Tensor]:
    """Pooled rows of tables."""
    if model.embedding == "separate":
        return [tape.embedding_bag(table, bags, sparse=model.sparse and not copied) for table in tables]
    exact = model.optimizer if model.embedding == "exact" else ""
    return tape.fused_embeddings(tables, bags, itemsize=index, exact=exact, dense=copied) if tables else []
