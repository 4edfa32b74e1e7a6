"""Deep learning recommendation models: embedding tables, their interaction and two multilayer
MLPs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.files import group_rows
from perfkit.ground.number_formats import read_dtype
from perfkit.ground.records import set_fields
from perfkit.ground.units import (
    check_choice,
    check_positive,
    check_type,
    count_values,
    is_listed,
    show,
)
from perfkit.models.optimizers import find_optimizer
from perfkit.workloads import layers
from perfkit.workloads.blocks import share_mlps
from perfkit.workloads.graph import Graph
from perfkit.workloads.input_pipelines import (
    ExchangedInputs,
    InputRecorder,
    find_pipeline,
    size_inputs,
)
from perfkit.workloads.iteration import finish
from perfkit.workloads.operations import Tensor
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.sizes import check_ranks, check_size
from perfkit.workloads.stand_ins import StandIns
from perfkit.workloads.structure import OpenGraph, Structure, record_graphs, record_structure
from perfkit.workloads.table_kernels import FUSED
from perfkit.workloads.tables import (
    NUMBER_FORMATS,
    EmbeddingTable,
    count_bags,
    keep_hottest,
    share_lookups,
)
from perfkit.workloads.tape import ITEMSIZE, Tape, check_switches

#: Most layers of an MLP, and most tables of a model [-]; so many tables take some ten seconds.
MOST_LAYERS, MOST_TABLES = 10_000, 1_000_000

#: Lookups of a sample in a part of a table that has none; a table has more than 0 [-].
_FEWEST_LOOKUPS = 1e-12

#: Sizes that may differ between workloads of one structure.
_OPEN = ("batch",)
_CHOICES = {
    "interaction": ("dot", "cross"),
    "embedding": ("separate", "fused", "exact", "hash"),
    "reduction": ("buckets", "grouped"),
}


def _read_preset(row: dict[str, str]) -> dict[str, Any]:
    """Sizes of a published DLRM, whose tables are all alike or listed in a file of their own."""
    tables = group_rows("model", "published", "dlrm_tables.csv").get(row["tables"])
    if tables is None:
        tables = [row] * int(row["tables"])
    preset: dict[str, Any] = {"rows": tuple(int(table["rows"]) for table in tables)}
    if row["pooling"]:
        preset["pooling"] = int(row["pooling"])  # one number, that of any other tables, too
    else:
        preset["pooling"] = tuple(int(table["pooling"]) for table in tables)
    for name in ("bottom", "top"):
        preset[name] = tuple(int(width) for width in row[name].split())
    for name in ("dim", "features"):
        preset[name] = int(row[name])
    for name in ("interaction", "embedding", "optimizer"):
        if row[name]:
            preset[name] = row[name]
    return preset


#: Named configurations of the reference data.
PRESETS = {
    name: _read_preset(row) for name, [row] in group_rows("model", "published", "dlrms.csv").items()
}
#: What a model is where neither its preset nor its arguments say it.
_DEFAULTS = {"interaction": "dot", "embedding": "separate", "optimizer": "sgd"}


def _end_with(name: str, widths: Any, last: Any) -> tuple[Any, ...]:
    """Widths of layers, of which the last one must have a given width and is appended where it is
    missing."""
    check_type(name, widths, Sequence)
    count_values(name, widths, MOST_LAYERS)
    checked = tuple(check_size(name, width) for width in widths)
    same = np.equal(checked[-1], last) if checked else np.False_
    if same.any() and not same.all():
        raise ValueError(
            f"{name} ends with the required width in some configurations only; give those separately"
        )
    return checked if same.all() else (*checked, last)


def _check_optimizers(
    optimizer: str, of_rows: str, embedding: str, *, sparse: bool, fused: bool
) -> None:
    """Refuse optimizers of dense weights and of rows that a model has no kernels for."""
    if of_rows == optimizer:
        _check_optimizer(optimizer, embedding, sparse=sparse, fused=fused)
        return
    dense = find_optimizer(optimizer, dense=True, by_shape=False)
    if fused:
        dense.operations("fused")  # an error if there is no such kernel
    update = find_optimizer(of_rows, rows=True, by_shape=False, argument="table_optimizer")
    if embedding == "separate":
        raise ValueError(
            f"table_optimizer is {of_rows!r} with embedding 'separate', where the optimizer of all weights "
            f"({optimizer}) updates rows, too; take embedding='exact', or leave it out"
        )
    if embedding == "fused" and not update.sparse_rows:
        raise ValueError(
            f"table_optimizer is {of_rows!r} with embedding 'fused', which updates a row for each lookup; "
            "gradients of the same row must be added up first; take embedding='exact'"
        )


def _check_optimizer(optimizer: str, embedding: str, *, sparse: bool, fused: bool) -> None:
    """Refuse an optimizer without the kernels that a model asks for, or one that needs the sum of
    all gradients of a row where nothing adds them up."""
    updates_once = embedding in ("exact", "hash")
    summed = updates_once or (embedding == "separate" and not sparse)
    update = find_optimizer(optimizer, dense=True, rows=updates_once, by_shape=False)
    if fused:
        update.operations("fused")  # an error if there is no such kernel
    if not summed and not update.sparse_rows:
        fault = f"optimizer is {update.name!r} with embedding {embedding!r} and sparse gradients"
        advice = "take embedding='exact', sparse=False, or capture the step"
        raise ValueError(f"{fault}; gradients of the same row must be added up first; {advice}")


def _read_formats(table_dtype: Any) -> Any:
    """Format of the numbers of all tables, or of each; TF32 is a format of products alone."""
    if not is_listed(table_dtype):
        known = read_dtype("table_dtype", table_dtype, (*NUMBER_FORMATS, "tf32"))
        return "fp32" if known == "tf32" else known
    return [_read_formats(one) for one in table_dtype]


def _make_tables(of_each: dict[str, Any], width: Any) -> tuple[EmbeddingTable, ...]:
    """The tables of a model; fields of `EmbeddingTable`, of which rows are the first, are one value
    for all tables, or one for each."""
    columns, count = [], 1
    for name, value in of_each.items():
        if isinstance(value, Sequence | np.ndarray) and is_listed(value):
            count_values(name, value, MOST_TABLES)
            listed = value
        else:
            listed = [value] * count
        values = [one.item() if isinstance(one, np.generic) else one for one in listed]
        if name == "rows":
            count = len(values)
        if not values:
            raise ValueError(
                f"{name} is empty; a DLRM needs at least one table; give the {name} of each table"
            )
        if len(values) != count:
            fault = f"{name} has {len(values)} entries; the model has {count} tables"
            raise ValueError(f"{fault}; give one number, or one for each table")
        columns.append(values)
    tables = []
    for number, values_of_table in enumerate(zip(*columns, strict=True)):
        fields_of_table = dict(zip(of_each, values_of_table, strict=True))
        table = EmbeddingTable(dim=width, name=f"table {number}", **fields_of_table)
        tables.append(table)
    return tuple(tables)


@dataclass(frozen=True, init=False)
class DLRM:
    """One training iteration of a DLRM: lookups, bottom MLP, interaction, top MLP, binary cross
    entropy, optimizer.

    On several ranks a `Plan` places the tables. Whole tables and splits by columns are looked up
    for the whole batch; all_to_all exchanges the pooled rows and their gradients. Pooled rows of
    splits by rows are sums of parts: reduce_scatter adds them up, and all_gather returns the
    gradients. Copies are looked up for the samples of the rank. Of hybrid tables frequent rows are
    copied and the others exchanged, see `HybridTables`. The MLPs are data-parallel; their gradients
    and those of copies are reduced.

    Parameters
    ----------
    preset : str, optional
        Name of a configuration in `PRESETS`; further arguments other than None replace its entries.
    batch : int
        Samples of one iteration over all ranks [-].
    rows : int or sequence of int
        Rows of each table [-].
    dim : int
        Columns of every table, and width of the last layer of the bottom MLP [-].
    pooling : float or sequence of float
        Lookups per sample and table [-].
    exponent : float or sequence of float
        Zipf exponent of the looked-up rows, 0 for uniform [-].
    weighted : bool or sequence of bool
        Whether lookups have weights, see `EmbeddingTable.weighted`.
    managed_collision : str or sequence of str
        What maps raw ids to rows: ``zch``, ``mpzch``, or empty for nothing, see
        `EmbeddingTable.managed_collision`.
    kernel : str or sequence of str
        Where the rows of tables lie, see `EmbeddingTable.kernel`; other than ``fused`` with
        ``embedding`` fused or exact only.
    load_factor : float or sequence of float, optional
        Share of the rows that a cache in device memory holds, see `EmbeddingTable.load_factor`;
        None for tables without a cache [-].
    num_features : int or sequence of int
        Sparse features that look up rows of a table, each with a pooled row of its own, which the
        interaction takes; `pooling` is that of all of them [-].
    bottom : sequence of int
        Widths of the bottom MLP; a last layer of `dim` is appended where it is missing [-].
    top : sequence of int
        Widths of the top MLP; a last layer of 1 is appended where it is missing [-].
    features : int
        Dense input features [-].
    sparse : bool
        Whether table gradients hold one row per lookup instead of the whole table.
    embedding : str
        ``separate``: one bag operation a table. ``fused``: one kernel looks up all tables, and one
        kernel updates their rows in the backward pass, lookup by lookup; `sparse` has no effect.
        ``exact``: likewise, but lookups are sorted and each distinct row is updated once. ``hash``: as
        ``exact``, but a kernel searches each row in a hash table first and inserts new ones, as
        dynamicemb does; it has `rows` rows, and copies on all ranks are plain tables. GPUs whose
        datasheet states their multiprocessors know it.
    fused : bool
        Whether one kernel of the optimizer updates all dense weights.
    mixed : bool
        Whether all but products stays fp32 while products run in `dtype` (autocast).
    dtype : str
        Data type of products and, unless `mixed`, of weights, activations and gradients.
    optimizer : str
        One that updates dense weights, as `perfkit.models.optimizers.list_optimizers` lists them.
        Tables with gradients for each lookup (`sparse` and separate, or fused) take ``sgd``. It
        updates rows of tables, too, unless `table_optimizer` does.
    interaction : str
        ``dot`` (products of all pairs of vectors) or ``cross`` (low-rank cross layers over all of
        them, DCNv2).
    cross : (int, int)
        Cross layers and their rank [-].
    overlap : bool
        Whether pooled rows and their gradients are exchanged while the bottom MLP works, and
        gradients of each MLP are reduced in buckets as they arrive (DistributedDataParallel).
        Otherwise each collective is waited for at once, as a blocking PyTorch call does, and
        gradients are reduced in one piece after the backward pass.
    separate_exchange : bool
        Whether exchanges have a communicator and a stream of their own, so that with `overlap` they
        run beside reductions of gradients, as in HugeCTR. Otherwise they share the default process
        group of PyTorch, whose collectives run one after another. Two at once are timed as if each
        had the links alone.
    reduction : str
        ``buckets``: gradients are reduced in buckets as they arrive, those of each MLP and of copies
        apart (DistributedDataParallel). ``grouped``: all at once, in `dtype`, when the last one has
        arrived, as HugeCTR does with ``grouped_all_reduce``. They are written where they are reduced,
        and updates read them there: only gradients of copies in a wider format are copied. Without
        `overlap` it has no effect, nor on MLPs that a plan shards.
    delay_weights : bool
        Whether products of weight gradients run after those of all other gradients, while gradients
        of rows are exchanged, as HugeCTR's ``async_wgrad`` lets them. Not with `mixed`, nor with MLPs
        that a plan shards.
    epilogues : bool
        Whether the products of the MLPs also compute bias and rectifier, and backward their
        gradients (epilogues of cuBLASLt), as HugeCTR's ``FusedInnerProduct`` does. Only the last
        layer of an MLP has kernels of its own for these gradients. Not with `mixed`, nor with MLPs
        that ranks share.
    table_dtype : str or sequence of str
        Data type of the tables, or of each table, by default that of weights; see
        `EmbeddingTable.dtype`. Pooled rows have the data type of activations whatever tables hold.
    pipeline : str
        How inputs arrive. ``local``: they are no part of the step, as the data loader of a rank has
        put the indices of its own tables on the device. ``serial``: each step copies its batch to
        the device, and an all_to_all brings each rank the indices of its tables. ``base``: the next
        batch is copied during the step (TorchRec's ``TrainPipelineBase``). ``sparse_dist``: its
        indices are exchanged during the step, too (``TrainPipelineSparseDist``). The last two take
        `overlap`, and no hybrid tables.
    table_optimizer : str, optional
        What updates looked-up rows, as ``rowwise_adagrad``, where that is not `optimizer`; for
        ``exact``, ``fused`` and ``hash`` embeddings. Tables that are copied to all ranks have dense gradients,
        which `optimizer` takes.

    Raises
    ------
    ValueError
        For unknown presets, data types and optimizers, sizes that are not above zero, and lists of
        different lengths.

    Notes
    -----
    A size is a number, or an array with a number for each of several configurations.

    Examples
    --------
    >>> DLRM("dlrm-default", batch=2048).tables[0].rows
    1000000
    """

    name: str
    batch: int
    tables: tuple[EmbeddingTable, ...] = field(repr=False)
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    features: int
    sparse: bool
    embedding: str
    fused: bool
    mixed: bool
    dtype: str
    optimizer: str
    interaction: str
    cross: tuple[int, int]
    overlap: bool
    table_dtype: str | tuple[str, ...]
    separate_exchange: bool = False
    reduction: str = "buckets"
    delay_weights: bool = False
    epilogues: bool = False
    pipeline: str = field(default="local", repr=False)
    table_optimizer: str = field(default="", repr=False)
    family: str = field(default="dlrm", repr=False)

    def __init__(
        self,
        preset: str | None = None,
        *,
        batch: Any = 2048,
        rows: Any = None,
        dim: Any = None,
        pooling: Any = None,
        exponent: Any = 0.0,
        weighted: Any = False,
        managed_collision: Any = "",
        kernel: Any = FUSED.name,
        load_factor: Any = None,
        num_features: Any = 1,
        bottom: Any = None,
        top: Any = None,
        features: Any = None,
        sparse: bool = True,
        embedding: str | None = None,
        fused: bool = False,
        mixed: bool = False,
        dtype: str = "fp32",
        optimizer: str | None = None,
        interaction: str | None = None,
        cross: tuple[int, int] = (3, 512),
        overlap: bool = False,
        separate_exchange: bool = False,
        reduction: str = "buckets",
        delay_weights: bool = False,
        epilogues: bool = False,
        table_dtype: str | Sequence[str] = "",
        pipeline: str = "local",
        table_optimizer: str | None = None,
    ) -> None:
        if preset is None:
            published = PRESETS["dlrm-default"]
        else:
            published = PRESETS[check_choice("preset", preset, PRESETS)]
        defaults = _DEFAULTS | published

        def choose(name: str, given: Any) -> Any:
            """What is given, else what the preset says."""
            return defaults[name] if given is None else given

        interaction = check_choice(
            "interaction", choose("interaction", interaction), _CHOICES["interaction"]
        )
        embedding = check_choice("embedding", choose("embedding", embedding), _CHOICES["embedding"])
        dtype = read_dtype("dtype", dtype, ITEMSIZE)
        check_switches(
            dtype,
            mixed=mixed,
            sparse=sparse,
            fused=fused,
            overlap=overlap,
            separate_exchange=separate_exchange,
            delay_weights=delay_weights,
            epilogues=epilogues,
        )
        if mixed and delay_weights:
            fault = "delay_weights is True and mixed, too, whose casts follow each weight gradient"
            raise ValueError(f"{fault}; take dtype and table_dtype in place of mixed")
        if mixed and epilogues:
            fault = "epilogues is True and mixed, too, which casts between products"
            raise ValueError(f"{fault}; take dtype and table_dtype in place of mixed")
        if isinstance(table_dtype, str) and not table_dtype:
            table_dtype = "fp32" if mixed else dtype
        format_of_tables = _read_formats(table_dtype)
        optimizer = choose("optimizer", optimizer)
        of_rows = optimizer if table_optimizer is None else table_optimizer
        _check_optimizers(optimizer, of_rows, embedding, sparse=sparse, fused=fused)
        check_type("cross", cross, tuple)
        sizes_of_cross: tuple[Any, ...] = cross
        if len(sizes_of_cross) != 2:
            wanted = "the number of layers and their rank, such as (3, 512)"
            raise ValueError(f"cross is {show(cross)}; it must be {wanted}")
        cross_layers = check_positive("cross", cross[0], integer=True)
        cross_rank = check_positive("cross", cross[1], integer=True)
        width = check_size("dim", choose("dim", dim))
        of_each_table = {
            "rows": choose("rows", rows),
            "pooling": choose("pooling", pooling),
            "exponent": exponent,
            "weighted": weighted,
            "managed_collision": managed_collision,
            "kernel": kernel,
            "load_factor": load_factor,
            "dtype": format_of_tables,
            "num_features": num_features,
        }
        tables = _make_tables(of_each_table, width)
        batch = check_size("batch", batch)
        bottom = _end_with("bottom", choose("bottom", bottom), width)
        top = _end_with("top", choose("top", top), 1)
        features = check_size("features", choose("features", features))
        check_choice("reduction", reduction, _CHOICES["reduction"])
        pipeline = find_pipeline(pipeline).name
        set_fields(
            self,
            name=preset or "dlrm",
            batch=batch,
            tables=tables,
            bottom=bottom,
            top=top,
            features=features,
            sparse=sparse,
            embedding=embedding,
            fused=fused,
            mixed=mixed,
            dtype=dtype,
            optimizer=optimizer,
            table_optimizer=of_rows,
            interaction=interaction,
            cross=(cross_layers, cross_rank),
            overlap=overlap,
            table_dtype=tuple(table_dtype) if is_listed(table_dtype) else table_dtype,
            separate_exchange=separate_exchange,
            reduction=reduction,
            delay_weights=delay_weights,
            epilogues=epilogues,
            pipeline=pipeline,
            family="dlrm",
        )

    @property
    def pooled_itemsize(self) -> int:
        """Bytes of a number of pooled rows, and of their gradients [B]."""
        return 4 if self.mixed else ITEMSIZE[self.dtype]

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        tables = f"{len(self.tables)} tables × {self.tables[0].dim}"
        gradients = f"{'sparse' if self.sparse else 'dense'} gradients"
        gradients = gradients if self.embedding == "separate" else self.embedding
        said = f"{self.name}, batch {self.batch}, {tables}, {gradients}"
        if self.pipeline != "local":
            said += f", inputs {self.pipeline}"
        return said

    def place(self, plan: Plan | None, ranks: int) -> Plan:
        """Check a plan, or place the tables round-robin.

        Parameters
        ----------
        plan : Plan or None
            Placement of the tables; None for round-robin.
        ranks : int
            Ranks [-].

        Returns
        -------
        plan : Plan
            A placement of all tables on these ranks.

        Raises
        ------
        ValueError
            If the plan is for other ranks or tables, the batch does not divide by the ranks, or MLPs
            whose weight gradients are delayed, or whose products have epilogues, are sharded.
        """
        is_ahead = find_pipeline(self.pipeline).copies_ahead > 0
        if is_ahead and not self.overlap and ranks > 1:
            raise ValueError(
                f"pipeline is {self.pipeline!r} without overlap, where each collective is waited for at "
                "once; take overlap=True, or pipeline='serial'"
            )
        if plan is None:
            ranks = check_ranks(self.batch, ranks)
            return Plan.round_robin(len(self.tables), ranks=ranks)
        check_type("plan", plan, Plan)
        ranks = check_ranks(self.batch, ranks)
        if plan.ranks != ranks or len(plan.owners) != len(self.tables):
            asked = f"the model has {len(self.tables)} tables and {ranks} ranks are asked for; make a plan for these"
            raise ValueError(
                f"plan places {len(plan.owners)} tables on {plan.ranks} ranks; {asked}"
            )
        if self.delay_weights and plan.shared.get("zero", 0) > 0:
            raise ValueError(
                f"delay_weights is True and mlps has zero {plan.shared['zero']}, which reduces the "
                "gradients of each layer as they are computed; take zero=0, or leave delay_weights out"
            )
        has_hybrid = any(one.traits.copies_frequent_rows for one in plan.placements)
        if has_hybrid and find_pipeline(self.pipeline).has_inputs:
            raise ValueError(
                f"pipeline is {self.pipeline!r} and a placement hybrid, whose indices all ranks read; take "
                "pipeline='local'"
            )
        tp = plan.shared.get("tp", 1)
        if self.epilogues and (tp > 1 or plan.shared.get("zero", 0) > 0):
            raise ValueError(
                f"epilogues is True and mlps is {plan.mlps}, by which ranks share MLPs; take tp=1 and "
                "zero=0, or leave epilogues out"
            )
        for width in (*self.bottom[:-1:2], *self.top[:-1:2]):
            if np.any(width % tp):
                raise ValueError(
                    f"mlps has tp {tp}; take one that divides {width}, a width that ranks split"
                )
        return plan

    def graphs(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False
    ) -> tuple[Graph, ...]:
        """What every rank computes in one iteration.

        Parameters
        ----------
        ranks : int
            Ranks [-].
        plan : Plan, optional
            Placement of the tables; by default they are placed round-robin.
        accelerator : bool
            Whether it runs on a GPU, where the optimizer updates lists of tensors.

        Returns
        -------
        graphs : tuple of Graph
            One per rank; ranks that do the same share one.
        """
        return record_graphs(_record, self, _OPEN, self.place(plan, ranks), accelerator)

    def structure(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False
    ) -> Structure:
        """What all batches of this model have in common; its arrays are open sizes too.

        Parameters
        ----------
        ranks : int
            Ranks [-].
        plan : Plan, optional
            Placement of the tables; by default they are placed round-robin.
        accelerator : bool
            Whether it runs on a GPU, where the optimizer updates lists of tensors.

        Returns
        -------
        structure : Structure
            One graph per rank; ranks that do the same share one.
        """
        return record_structure(_record, self, _OPEN, self.place(plan, ranks), accelerator)


class SummedTables(NamedTuple):
    """Parts of tables on one rank, whose pooled rows a group of ranks adds up.

    Parameters
    ----------
    group : int
        Number of the group in `LocalTables.groups` [-].
    tables : tuple of EmbeddingTable
        The parts.
    """

    group: int
    tables: tuple[EmbeddingTable, ...]


class HybridTables(NamedTuple):
    """What one rank stores of tables whose frequent rows are copied to all ranks, while the others
    are spread over them.

    A sample looks up one row of each of these tables. If it is frequent, the rank of the sample has
    it. Else the rank that stores the row sends it, and gets its gradient back.

    Parameters
    ----------
    frequent : tuple of EmbeddingTable
        Copied rows of each table, which the rank looks up for its own samples.
    frequent_columns : tuple of int
        How many numbers these samples take of each of them: as many as all samples of the rank have
        in so many columns [-].
    others : tuple of EmbeddingTable
        A share of the other rows of each table, which the rank looks up for the whole batch.
    sent_columns : int
        How many numbers the rank looks up in these for the samples of any rank: as many as all these
        samples have in so many columns [-].
    """

    frequent: tuple[EmbeddingTable, ...]
    frequent_columns: tuple[int, ...]
    others: tuple[EmbeddingTable, ...]
    sent_columns: int


_NO_HYBRID = HybridTables((), (), (), 0)


class LocalTables(NamedTuple):
    """What one rank stores of the tables, and what ranks exchange.

    Parameters
    ----------
    pooled_alone : tuple of EmbeddingTable
        Tables and parts of tables that the rank looks up for the whole batch, and whose rows it
        pools alone.
    summed : tuple of SummedTables
        Parts that it looks up for the whole batch too, group by group.
    copies : tuple of EmbeddingTable
        Tables that every rank stores and looks up for its own samples.
    widths : tuple of int
        Columns of pooled rows that each rank sends to each other one [-]. Ranks that add up rows
        each send the sums of a part of the samples: as many numbers as all samples have in a part
        of the columns, which is counted here in whole columns. So are rows of hybrid tables.
    largest_width : float
        Columns that the rank with the most sends, where a part of the samples counts as that part
        of the columns [-].
    groups : tuple of tuple of int
        Groups of ranks: all ranks, and then those that add up pooled rows among themselves.
    hybrid : HybridTables
        Parts of tables whose frequent rows are copied.
    """

    pooled_alone: tuple[EmbeddingTable, ...]
    summed: tuple[SummedTables, ...]
    copies: tuple[EmbeddingTable, ...]
    widths: tuple[int, ...]
    largest_width: float
    groups: tuple[tuple[int, ...], ...]
    hybrid: HybridTables = _NO_HYBRID

    @property
    def of_whole_batch(self) -> tuple[EmbeddingTable, ...]:
        """All that the rank looks up for the whole batch."""
        parts = (table for summed in self.summed for table in summed.tables)
        return (*self.pooled_alone, *parts, *self.hybrid.others)

    @property
    def of_own_samples(self) -> tuple[EmbeddingTable, ...]:
        """All that the rank looks up for its own samples."""
        return (*self.copies, *self.hybrid.frequent)

    def with_tables(self, tables: Sequence[EmbeddingTable]) -> "LocalTables":
        """The same places with other tables in place of `of_whole_batch`, in its order."""
        remaining = iter(tables)
        pooled_alone = tuple(islice(remaining, len(self.pooled_alone)))
        summed = tuple(
            SummedTables(one.group, tuple(islice(remaining, len(one.tables))))
            for one in self.summed
        )
        hybrid = self.hybrid._replace(others=tuple(remaining))
        return self._replace(pooled_alone=pooled_alone, summed=summed, hybrid=hybrid)

    def with_copies(self, tables: Sequence[EmbeddingTable]) -> "LocalTables":
        """The same places with other tables in place of `of_own_samples`, in its order."""
        copies, frequent = tables[: len(self.copies)], tables[len(self.copies) :]
        hybrid = self.hybrid._replace(frequent=tuple(frequent))
        return self._replace(copies=tuple(copies), hybrid=hybrid)


def _is_summed(placement: Placement) -> bool:
    """Whether pooled rows are sums over several ranks."""
    return placement.traits.splits_rows and len(placement.ranks) > 1


def list_local_tables(plan: Plan, tables: Sequence[EmbeddingTable]) -> tuple[LocalTables, ...]:
    """What each rank of a plan stores."""
    everyone = tuple(range(plan.ranks))
    adding_up = {placement.ranks for placement in plan.placements if _is_summed(placement)}
    groups = (everyone, *sorted(adding_up - {everyone}))
    alone: list[list[EmbeddingTable]] = [[] for _ in everyone]
    summed: list[dict[int, list[EmbeddingTable]]] = [{} for _ in everyone]  # by group
    copies: list[list[EmbeddingTable]] = [[] for _ in everyone]
    widths = [0] * plan.ranks
    summed_columns = [0] * len(groups)
    hybrid = _HybridList(plan.ranks)
    for number, (placement, table) in enumerate(zip(plan.placements, tables, strict=True)):
        if placement.traits.copies_frequent_rows:
            hybrid.add(placement, table, number)
        elif placement.traits.is_copied:
            for shard in placement.cut(table, number):
                copies[shard.rank].append(table)
        elif _is_summed(placement):
            group = groups.index(placement.ranks)
            if group > 0:  # sums over all ranks are not exchanged once more
                summed_columns[group] += table.dim * table.num_features
            for rank, part in _cut_rows(placement, table, number):
                summed[rank].setdefault(group, []).append(part)
        else:
            for shard in placement.cut(table, number):
                widths[shard.rank] += count_bags(table, shard.columns)
                is_whole = shard.columns is table.dim  # which may be an array
                part = table if is_whole else replace(table, dim=shard.columns)
                alone[shard.rank].append(part)
    largest_width = _find_largest_width(widths, summed_columns, groups)
    largest_width += hybrid.sent_columns / plan.ranks
    hybrid_parts = hybrid.finish()
    for rank, of_rank in enumerate(hybrid_parts):
        widths[rank] += of_rank.sent_columns
    shared_widths = _add_shares_of_sums(widths, summed_columns, groups)
    return tuple(
        LocalTables(
            pooled_alone=tuple(alone[rank]),
            summed=tuple(
                SummedTables(group, tuple(parts_of_group))
                for group, parts_of_group in sorted(summed[rank].items())
            ),
            copies=tuple(copies[rank]),
            widths=shared_widths,
            largest_width=largest_width,
            groups=groups,
            hybrid=hybrid_parts[rank],
        )
        for rank in everyone
    )


class _HybridList:
    """Hybrid tables, as they are listed.

    Parameters
    ----------
    ranks : int
        Number of ranks [-].
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.frequent: list[EmbeddingTable] = []
        self.others: list[list[EmbeddingTable]] = [[] for _ in range(ranks)]
        # columns of all tables, and of those what is frequent and what ranks send; these are shares
        # of columns [-]
        self.columns = 0
        self.frequent_columns: list[float] = []
        self.sent_columns = 0.0

    def add(self, placement: Placement, table: EmbeddingTable, number: int) -> None:
        """Add a table."""
        copied = placement.frequent or 0
        name = table.name or f"table {number}"
        sizes = {"rows": table.rows, "dim": table.dim, "pooling": table.pooling}
        for size, value in sizes.items():
            if not isinstance(value, int | float):
                raise ValueError(
                    f"{size} of {name!r} is {show(value)}; a hybrid placement takes one number; "
                    "predict configurations one by one"
                )
        if table.num_features > 1:
            raise ValueError(
                f"{name!r} has {table.num_features} features; a hybrid placement is for tables of one "
                "feature; place it in another way"
            )
        if table.pooling != 1:
            raise ValueError(
                f"{name!r} has pooling {table.pooling:g}; a hybrid placement is for tables of which a "
                "sample looks up one row, as in HugeCTR; place it in another way"
            )
        shards = placement.cut(table, number)
        parts = table.distribution.split(copied)
        self.columns += table.dim
        if copied > 0:
            lookups = max(parts.share, _FEWEST_LOOKUPS)
            self.frequent.append(replace(table, rows=copied, pooling=lookups, law=parts.frequent))
            self.frequent_columns.append(table.dim * parts.share)
        infrequent = table.rows - copied
        if infrequent == 0:
            return
        self.sent_columns += table.dim * (1 - parts.share)
        known: dict[int, EmbeddingTable] = {}  # parts of the same size are one
        for shard in shards:
            if shard.first_row < copied:
                continue
            if shard.rows not in known:
                pooling = (1 - parts.share) * shard.rows / infrequent
                known[shard.rows] = replace(
                    table,
                    rows=shard.rows,
                    pooling=max(pooling, _FEWEST_LOOKUPS),
                    law=parts.others,
                )
            self.others[shard.rank].append(known[shard.rows])

    def finish(self) -> list[HybridTables]:
        """What each rank stores; columns are whole ones."""
        ends = [round(end) for end in accumulate(self.frequent_columns, initial=0.0)]
        frequent_columns = tuple(int(width) for width in np.diff(ends))
        sent = 0
        if any(self.others):  # what is not frequent, so that both together are all columns
            sent = max(self.columns - ends[-1], 1)
        share, rest = divmod(sent, self.ranks)
        parts = []
        for rank in range(self.ranks):
            parts.append(
                HybridTables(
                    tuple(self.frequent),
                    frequent_columns,
                    tuple(self.others[rank]),
                    share + 1 if rank < rest else share,
                )
            )
        return parts


def _cut_rows(
    placement: Placement, table: EmbeddingTable, number: int
) -> Iterator[tuple[int, EmbeddingTable]]:
    """Ranks that store rows of a table, each with its part; parts of the same size are one."""
    parts: dict[tuple[int, bool], EmbeddingTable] = {}
    for shard in placement.cut(table, number):
        rows, is_first = max(shard.rows, 1), shard.first_row == 0
        if (rows, is_first) not in parts:
            pooling = share_lookups(table, len(placement.ranks), first=is_first)
            part = replace(table, rows=rows, pooling=pooling)
            if is_first:
                part = keep_hottest(part, table)
            parts[rows, is_first] = part
        yield shard.rank, parts[rows, is_first]


def _find_largest_width(
    widths: Sequence[int], summed_columns: Sequence[int], groups: Sequence[Sequence[int]]
) -> float:
    """Columns that the rank with the most sends: its own, and for each group that adds up pooled rows
    a share of the samples, which is as long as that share of the columns [-]."""
    widths_with_shares = [float(width) for width in widths]
    for columns, members in zip(summed_columns, groups, strict=True):
        for rank in members:
            widths_with_shares[rank] += columns / len(members)
    return max(widths_with_shares)


def _add_shares_of_sums(
    widths: Sequence[int], summed_columns: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Columns that each rank sends as `LocalTables.widths` counts them: in whole ones [-]."""
    whole_widths = [*widths]
    for columns, members in zip(summed_columns, groups, strict=True):
        share, rest = divmod(columns, len(members))
        for position, rank in enumerate(members):
            whole_widths[rank] += share
            if position < rest:
                whole_widths[rank] += 1
    return tuple(whole_widths)


def _record(model: DLRM, plan: Plan, accelerator: bool) -> tuple[OpenGraph, ...]:
    """Record the iteration of every rank.

    Ranks whose tables differ in nothing but their names share a graph, and so the names of the
    first of them. Ranks whose tables differ in their sizes alone run the same operations: these are
    recorded once, see `_record_alike`.
    """
    locals_of_ranks = list_local_tables(plan, model.tables)
    inputs = None
    if find_pipeline(model.pipeline).has_inputs:
        inputs = size_inputs(model.tables, [local.of_whole_batch for local in locals_of_ranks])
    if plan.ranks == 1:
        return tuple(
            _record_rank(model, plan, local, accelerator, inputs) for local in locals_of_ranks
        )
    by_sizes: dict[Any, LocalTables] = {}
    sizes_of_ranks = [_describe_sizes(local) for local in locals_of_ranks]
    for sizes, local in zip(sizes_of_ranks, locals_of_ranks, strict=True):
        by_sizes.setdefault(sizes, local)
    by_operations: dict[Any, list[Any]] = {}
    for sizes, local in by_sizes.items():
        by_operations.setdefault(_describe_operations(local), []).append(sizes)
    graphs: dict[Any, OpenGraph] = {}
    for alike in by_operations.values():
        recorded = _record_alike(
            model, plan, [by_sizes[sizes] for sizes in alike], accelerator, inputs
        )
        graphs.update(zip(alike, recorded, strict=True))
    return tuple(graphs[sizes] for sizes in sizes_of_ranks)


def _record_rank(
    model: DLRM,
    plan: Plan,
    local: LocalTables,
    accelerator: bool,
    inputs: ExchangedInputs | None = None,
) -> OpenGraph:
    """Record the iteration of a rank with these tables, and how its `inputs` arrive."""
    ranks = plan.ranks
    tape = Tape(ITEMSIZE[model.dtype], mixed=model.mixed, overlap=model.overlap and ranks > 1)
    tape.grouped = model.reduction == "grouped"
    tape.delays_weights = model.delay_weights
    groups = [*local.groups]
    exchange_group = 0
    if model.separate_exchange:  # all ranks once more
        exchange_group = len(groups)
        groups.append(groups[0])
    record = partial(record_layers, model=model, local=local, exchange_group=exchange_group)
    shared = share_mlps(tape, record, plan.mlps, groups)
    arriving = None
    if inputs is not None:
        arriving = InputRecorder(
            tape,
            find_pipeline(model.pipeline),
            inputs,
            batch=model.batch,
            ranks=ranks,
            features=model.features,
            on_device=accelerator,
            copy_group=len(groups) if ranks > 1 else 0,
            exchange_group=exchange_group,
        )
        groups.append(groups[0])  # copies have a stream of their own
    logits = record(tape, shared, arriving=arriving)
    order_weights(tape)
    if tape.overlap:
        _fill_buckets(tape)
    layers.binary_cross_entropy(tape, logits)
    return finish(
        tape,
        model,
        ranks=ranks,
        lists=accelerator,
        groups=tuple(groups) if ranks > 1 else (),
    )


def _record_alike(
    model: DLRM,
    plan: Plan,
    alike: Sequence[LocalTables],
    accelerator: bool,
    inputs: ExchangedInputs | None,
) -> list[OpenGraph]:
    """Record the iterations of ranks whose tables differ in rows, lookups and their law alone.

    Several ranks are recorded once, with stand-ins in place of all sizes that are not the same:
    those of the tables, and those that are symbolic. Each rank then takes its own sizes.
    """
    if len(alike) == 1:
        return [_record_rank(model, plan, alike[0], accelerator, inputs)]
    stand_ins = StandIns()
    opened = [stand_ins.open_table(table) for table in alike[0].of_whole_batch]
    copies = [stand_ins.open_symbolic(table) for table in alike[0].of_own_samples]
    local = alike[0].with_tables(opened).with_copies(copies)
    recorded = _record_rank(stand_ins.open_symbolic(model), plan, local, accelerator, inputs)
    graphs = []
    for of_rank in alike:
        values = stand_ins.find_values(opened, of_rank.of_whole_batch)
        tables = (*of_rank.of_whole_batch, *of_rank.of_own_samples)
        graphs.append(recorded.replace_sizes(values, tables))
    return graphs


def _describe_sizes(local: LocalTables) -> tuple[Any, ...]:
    """All that operations on the tables of a rank depend on; their names are not part of it."""
    groups = [(summed.group, len(summed.tables)) for summed in local.summed]
    sizes = [
        (
            table.rows,
            table.dim,
            table.num_features,
            table.number_format,
            table.pooling,
            table.exponent,
            table.law,
            table.weighted,
            table.managed_collision,
            table.kernel,
            table.load_factor,
        )
        for table in (*local.of_whole_batch, *local.of_own_samples)
    ]
    return (len(local.pooled_alone), *groups, _describe_hybrid(local), *sizes)


def _describe_operations(local: LocalTables) -> tuple[Any, ...]:
    """What says which operations a rank runs: not the rows, lookups and laws of tables that it looks
    up for the whole batch. Gradients of copies are reduced in buckets, which depend on their rows."""
    groups = [(summed.group, len(summed.tables)) for summed in local.summed]
    widths = [
        (
            table.dim,
            table.num_features,
            table.number_format,
            table.weighted,
            table.managed_collision,
        )
        for table in local.of_whole_batch
    ]
    return (
        len(local.pooled_alone),
        *groups,
        _describe_hybrid(local),
        *widths,
        local.of_own_samples,
    )


def _describe_hybrid(local: LocalTables) -> tuple[Any, ...]:
    """How many parts of hybrid tables a rank has, and their columns."""
    hybrid = local.hybrid
    return (len(hybrid.others), hybrid.frequent_columns, hybrid.sent_columns)


def record_layers(
    tape: Tape,
    shared: layers.MLPParallelism,
    model: DLRM,
    local: LocalTables,
    inputs: Tensor | None = None,
    *,
    exchange_group: int = 0,
    arriving: InputRecorder | None = None,
) -> Tensor:
    """Record the layers of one rank from its dense `inputs` and its tables; returns the logits. The
    group of this number exchanges pooled rows; `arriving` records how inputs come, if they do."""
    inputs = inputs or tape.tensor(
        model.batch // len(local.widths), model.features, itemsize=tape.wide
    )
    if arriving is not None:
        arriving.begin()
    # rows are exchanged while the bottom MLP works
    receive = _look_up(tape, model, local, exchange_group) if tape.overlap else []
    if arriving is not None:
        arriving.continue_beside()
    tape.module = "bottom"
    dense = _record_mlp(tape, inputs, model, model.bottom, shared, last_relu=True)
    receive = receive or _look_up(tape, model, local, exchange_group)
    tape.module = "interaction"
    vectors = layers.cat(tape, [dense, *(part for wait in receive for part in wait())])
    if model.interaction == "cross":
        joined = layers.cross(tape, vectors, *model.cross, shared)
    else:
        pooled_rows = sum(table.num_features for table in model.tables)
        vectors = vectors.view(inputs.shape[0], pooled_rows + 1, model.tables[0].dim)
        joined = layers.dot(tape, vectors, dense)
    tape.module = "top"
    return _record_mlp(tape, joined, model, model.top, shared, last_relu=False)


def _record_mlp(
    tape: Tape,
    x: Tensor,
    model: DLRM,
    widths: Sequence[int],
    shared: layers.MLPParallelism,
    *,
    last_relu: bool,
) -> Tensor:
    """Record an MLP, whose products may have epilogues."""
    if model.epilogues:
        return layers.mlp_with_epilogues(tape, x, widths, last_relu=last_relu)
    return layers.mlp(tape, x, widths, shared, last_relu=last_relu)


def order_weights(tape: Tape) -> None:
    """Put the weights of a DLRM in the order of its modules, in which optimizers update them: bottom
    MLP, tables, and all others."""
    order = {"bottom": 0, "embeddings": 1}
    tape.weights.sort(key=lambda weight: order.get(weight.module, 2))


def _fill_buckets(tape: Tape) -> None:
    """Let the gradients of each module, and those of ranks that share it, be reduced in buckets of
    their own, or all gradients of a group of ranks in one."""
    modules = {"bottom": 1, "embeddings": 2}
    for weight in tape.weights:
        if weight.group is None:
            continue
        if tape.grouped:
            weight.bucket = weight.group
            continue
        weight.bucket = modules.get(weight.module, 0)
        if weight.group > 0:  # ranks that share a module reduce apart
            weight.bucket += 1 + len(modules)


def _look_up(
    tape: Tape, model: DLRM, local: LocalTables, exchange_group: int
) -> list[Callable[[], list[Tensor]]]:
    """Look tables up and launch the exchanges; each function of the result waits for pooled rows
    and returns them."""
    tape.module = "embeddings"
    ranks = len(local.widths)
    batch = model.batch // ranks
    looked_up = layers.embedding_bags(
        tape, model, local.of_whole_batch, model.batch, unpooled=len(local.hybrid.others)
    )
    pooled = looked_up[: len(local.pooled_alone)]
    remaining = iter(looked_up[len(local.pooled_alone) :])
    receive: list[Callable[[], list[Tensor]]] = []
    for summed in local.summed:
        members = len(local.groups[summed.group])
        group = exchange_group if members == ranks else summed.group
        partial_sums = layers.cat(tape, list(islice(remaining, len(summed.tables))))
        wait = layers.exchange(
            tape,
            partial_sums,
            model.batch // members,
            [partial_sums.shape[1]],
            partial_sums.nbytes,
            operations=("reduce_scatter", "all_gather"),
            group=group,
        )
        if members == ranks:
            receive.append(wait)
        else:  # each rank of the group sends its samples to all ranks
            for sums in wait():
                columns = -(-sums.shape[1] // members)  # whole ones, as in `LocalTables.widths`
                pooled.append(sums.view(model.batch, columns))
    rows = [*remaining]  # of hybrid tables
    if rows:
        joined = layers.cat(tape, [row.view(1, row.numel) for row in rows])
        pooled.append(joined.view(model.batch, local.hybrid.sent_columns))
    if ranks == 1:
        receive.append(lambda: looked_up)
    elif any(local.widths):
        send = layers.cat(tape, pooled) if pooled else None
        # an uneven exchange takes as long as that of the fullest rank
        nbytes = model.batch * local.largest_width * tape.wide
        receive.insert(
            0, layers.exchange(tape, send, batch, local.widths, nbytes, group=exchange_group)
        )
    if local.of_own_samples:
        columns_of_rows = local.hybrid.frequent_columns
        copies = layers.embedding_bags(
            tape, model, local.of_own_samples, batch, copied=True, unpooled=len(columns_of_rows)
        )
        for position, width in enumerate(columns_of_rows, len(local.copies)):
            copies[position] = copies[position].view(batch, width)
        receive.append(lambda: copies)
    return receive
