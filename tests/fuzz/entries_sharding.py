"""Fuzzers of sharding: bounds, laws, tables of any size, plans of TorchRec."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from perfkit.workloads.placement_kinds import KIND_OF_NAME, KINDS
from perfkit.workloads.table_kernels import TABLE_KERNELS
from perfkit.workloads.tables import NUMBER_FORMATS
from perfkit.workloads.torchrec_format import COLUMN_MULTIPLE, UNPOOLED_KINDS
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense

_PLATFORMS = ("h100-sxm-8", "zen5-2", "h100-sxm-8x2", "a100-sxm-efa-8x8", "v100-sxm-8", "l40s-8")
_NODES = {"h100-sxm-8x2": 8, "a100-sxm-efa-8x8": 8}
#: Rounding of times that are computed in another order [-].
_ROUNDING = 1e-9


class Task(NamedTuple):
    """Tables to place, and where."""

    workload: pk.DLRM | pk.TableSet
    platform: str
    ranks: int
    inputs: str
    #: Least columns of a shard.
    min_columns: int

    def price(self, plan: pk.Plan, memory: float | None = 1e15) -> pk.PlanPrice:
        """Price one plan."""
        settings: dict[str, Any] = {"inputs": self.inputs, "min_columns": self.min_columns}
        return pk.price_plan(self.workload, self.platform, plan, memory=memory, **settings)

    def shard(self, steps: int, **settings: Any) -> pk.ShardingResult:
        """Search a plan; what was not tried is in the result."""
        given: dict[str, Any] = {"ranks": self.ranks, "inputs": self.inputs, "memory": 1e15}
        given["min_columns"] = self.min_columns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pk.shard(self.workload, self.platform, steps=steps, **given, **settings)


def draw_task(rng: Rng, most: int = 5) -> Task:
    """A few tables, alike or not, of any shape, under any kernel, on up to 16 ranks."""
    platform = choose(rng, _PLATFORMS)
    ranks = choose(rng, (1, 2) if platform == "zen5-2" else (1, 2, 3, 4, 8, 8))
    if platform in _NODES and rng.random() < 0.4:
        ranks = 16
    dims = (1, 4, 6, 12, 16, 32, 64, 100, 128, 384)
    tables = [
        pk.EmbeddingTable(
            rows=round(10 ** rng.uniform(0.5, 6.5)),
            dim=choose(rng, dims),
            exponent=round(choose(rng, (0.0, rng.uniform(0, 1.3))), 2),
            name=f"t{number}",
        )
        for number in range(int(rng.integers(1, most + 1)))
    ]
    if rng.random() < 0.4:
        tables = [replace(tables[0], name=table.name) for table in tables]
    tables = [
        replace(table, pooling=min(float(table.rows), round(10 ** rng.uniform(0, 1.7), 2)))
        for table in tables
    ]
    batch = ranks * 2 ** int(rng.integers(0, 15))
    inputs = choose(rng, ("local", "exchanged"))
    min_columns = choose(rng, (1, 4, 32, 128))
    if rng.random() < 0.3:
        model = pk.DLRM(
            rows=[table.rows for table in tables],
            dim=tables[0].dim,
            pooling=[table.pooling for table in tables],
            batch=batch,
            bottom=[64],
            top=[64],
            features=13,
            fused=bool(rng.random() < 0.5),
            table_dtype=_draw_formats(rng, len(tables)),
            num_features=[choose(rng, (1, 1, 3)) for _ in tables],
        )
        return Task(model, platform, ranks, inputs, min_columns)
    way = choose(rng, ({"embedding": "fused"}, {}, {"sparse": False}))
    optimizer = choose(rng, ("sgd", "rowwise_adagrad", "adam"))
    if "embedding" in way and platform.startswith("h100") and rng.random() < 0.4:
        kernels = [choose(rng, ("fused", "uvm", "uvm_caching")) for _ in tables]
        tables = [
            replace(table, kernel=kernel) for table, kernel in zip(tables, kernels, strict=True)
        ]
    formats = _draw_formats(rng, len(tables))
    tables = [
        replace(
            table,
            itemsize=NUMBER_FORMATS[one],
            dtype=one,
            num_features=choose(rng, (1, 1, 3)),
            pooled=bool(rng.random() < 0.8),
        )
        for table, one in zip(tables, formats, strict=True)
    ]
    output = choose(rng, ("", "fp32", "bf16"))
    workload = pk.TableSet(
        tuple(tables), batch=batch, optimizer=optimizer, output_dtype=output, **way
    )
    return Task(workload, platform, ranks, inputs, min_columns)


def _draw_formats(rng: Rng, count: int) -> list[str]:
    """Formats of the numbers of so many tables, alike or not."""
    formats = choose(rng, (("fp32",), ("fp16",), tuple(NUMBER_FORMATS)))
    return [choose(rng, formats) for _ in range(count)]


def draw_plan(rng: Rng, task: Task) -> pk.Plan:
    """Any plan that can be priced; in most of them all tables have one kind."""
    node = min(_NODES.get(task.platform, task.ranks), task.ranks)
    kinds = KINDS if rng.random() < 0.4 else (choose(rng, KINDS),)
    return pk.Plan(
        task.ranks,
        tuple(_draw_owner(rng, table, task.ranks, node, kinds) for table in task.workload.tables),
    )


def _draw_owner(
    rng: Rng, table: pk.EmbeddingTable, ranks: int, node: int, kinds: Sequence[str]
) -> int | pk.Placement:
    """Place one table in one of these ways, or whole if it is too small."""
    kind = KIND_OF_NAME[choose(rng, kinds)]
    number = int(rng.integers(ranks // node))
    if kind.is_whole or (kind.is_copied and table.host_bytes):
        return int(rng.integers(ranks))
    example = pk.Placement.example(kind, ranks=ranks, ranks_per_node=node, number=number)
    able = example.ranks
    if kind.is_copied or (kind.splits_rows and table.rows >= len(able)):
        return example
    if kind.splits_columns:
        count = int(rng.integers(1, min(len(able), table.dim) + 1))
        at = tuple(rng.permutation(able)[:count].tolist())
        return pk.Placement(kind.name, at, tuple(_draw_widths(rng, table.dim, count)))
    return int(rng.integers(ranks))


def _draw_widths(rng: Rng, dim: int, count: int) -> list[int]:
    """Columns of each of some parts of a table, at least one."""
    if count == 1:
        return [dim]
    cuts = np.sort(rng.choice(dim - 1, count - 1, replace=False) + 1)
    widths: list[int] = np.diff([0, *cuts, dim]).astype(int).tolist()
    return widths


def check_bound(rng: Rng, folder: Path | None = None) -> pk.ShardingResult:
    """No plan that can be priced is faster than the lower bound of a search, nor has its own plan
    narrower shards than it may."""
    task = draw_task(rng)
    result = task.shard(20)
    if result.gap < 0:
        raise Nonsense(f"the bound {result.bound} is above its plan {result.prediction.time}")
    if result.prediction.warnings:
        raise Nonsense(f"{result.plan}: {result.prediction.warnings}")
    for _ in range(8):
        price = task.price(draw_plan(rng, task))
        if price.warnings:  # shards of fewer columns than the bound is for
            continue
        if not _keeps_to_kinds(task, price.plan):
            continue
        if price.time < result.bound * (1 - _ROUNDING):
            raise Nonsense(f"{price.plan} takes {price.time}, below the bound {result.bound}")
    return result


def _keeps_to_kinds(task: Task, plan: pk.Plan) -> bool:
    """Whether a plan places tables whose rows are not pooled in kinds that the bound is for."""
    for table, placement in zip(task.workload.tables, plan.placements, strict=True):
        if not table.pooled and placement.kind not in UNPOOLED_KINDS:
            return False
    return True


def check_laws(rng: Rng, folder: Path | None = None) -> pk.ShardingResult:
    """Forbidding unused kinds changes nothing; nor does the order of the tables."""
    task = draw_task(rng, most=10)
    steps = int(rng.integers(1, 400))
    result = task.shard(steps)
    used = {placement.kind for placement in result.plan.placements}
    unused = [kind for kind in KINDS if kind not in used]
    # rules of thumb place whole tables, and are another thing where that is forbidden
    forbid = [kind for kind in unused if kind != "table_wise" and rng.random() < 0.7]
    again = task.shard(steps, forbid=forbid)
    if again.plan != result.plan or again.prediction.time != result.prediction.time:
        raise Nonsense(f"without {forbid} the plan is {again.plan}, not {result.plan}")
    if again.bound < result.bound * (1 - _ROUNDING) or again.gap < 0:
        raise Nonsense(f"bounds {result.bound} and, with less to choose from, {again.bound}")
    if isinstance(task.workload, pk.TableSet):
        order = rng.permutation(len(task.workload.tables))
        tables = tuple(task.workload.tables[number] for number in order)
        other = task._replace(workload=replace(task.workload, tables=tables)).shard(steps)
        times = other.prediction.time, result.prediction.time
        if not np.isclose(*times, rtol=_ROUNDING):
            raise Nonsense(f"tables in another order: {times}")
    return again


def check_sizes(rng: Rng, folder: Path | None = None) -> pk.PlanPrice:
    """Tables of any size in any memory: no number of a price is negative."""

    def draw_size(digits: float) -> int:
        return min(round(10 ** rng.uniform(0, digits)), 2**63 - 1024)

    ranks = choose(rng, (1, 2, 4, 8))
    tables = tuple(
        pk.EmbeddingTable(draw_size(18.9), draw_size(choose(rng, (2, 8, 18.9))))
        for _ in range(int(rng.integers(1, 4)))
    )
    batch = ranks * draw_size(choose(rng, (4, 12, 18)))
    way = choose(rng, ({"embedding": "fused"}, {}, {"sparse": False}))
    task = Task(pk.TableSet(tables, batch=batch, **way), "h100-sxm-8", ranks, "local", 128)
    plan = draw_plan(rng, task)
    price = task.price(plan, choose(rng, (None, 1e6, 1e10, 1e18)))
    for name, values in price.table().to_dict(as_series=False).items():
        if any(value is not None and not 0 <= value < np.inf for value in values):
            raise Nonsense(f"{name} of {price} is {values}")
    if "-" in repr(price) or price.capacity < 0:
        raise Nonsense(f"a negative number in {price}")
    return price


_ON_DEVICE = ("dense", "fused", None)
_ELSEWHERE = (
    "fused_uvm",
    "fused_uvm_caching",
    "key_value",
    "quant",
    "quant_uvm",
    "ssd_virtual_table",
    "a kernel of tomorrow",
)


def _agrees(kernel: str | None, table: pk.EmbeddingTable) -> bool:
    """Whether a compute kernel of a plan is that of a table."""
    if kernel in ("dense", "fused"):
        return table.kernel == "fused"
    return kernel is None or kernel == TABLE_KERNELS[table.kernel].torchrec_name


def check_torchrec(rng: Rng, folder: Path | None = None) -> pk.Plan:
    """A plan in TorchRec's form is read with all its columns, and what is not priced is told."""
    task = draw_task(rng)
    tables, ranks = task.workload.tables, task.ranks
    module: dict[str, Any] = {}
    warned = False
    for table in tables:
        count = int(rng.integers(1, min(table.dim, 2 * ranks) + 1))
        widths = _draw_widths(rng, table.dim, count)
        firsts = np.cumsum([0, *widths[:-1]]).tolist()
        at = rng.integers(0, ranks, count).tolist()
        entry: dict[str, Any] = {
            "sharding_type": "column_wise",
            "ranks": at,
            "shards": [
                {"rank": rank, "offsets": [0, first], "sizes": [table.rows, width]}
                for rank, first, width in zip(at, firsts, widths, strict=True)
            ],
        }
        kernel = choose(rng, _ON_DEVICE if rng.random() < 0.8 else _ELSEWHERE)
        if kernel is not None:
            entry["compute_kernel"] = kernel
        if rng.random() < 0.1:
            entry["cache_params"] = {"load_factor": 0.1}
        if not _agrees(kernel, table) or "cache_params" in entry or len(set(at)) < count:
            warned = True
        module[table.name] = entry
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = pk.Plan.from_torchrec({"sparse.ebc": module}, tables, ranks=ranks)
    if bool(told) != warned:
        raise Nonsense(f"{len(told)} warnings for {module}")
    held = np.zeros((len(tables), ranks))
    for shard in plan.cut(tables):
        held[shard.table, shard.rank] += shard.columns
    for number, entry in enumerate(module.values()):
        for shard in entry["shards"]:
            held[number, shard["rank"]] -= shard["sizes"][1]
    if held.any():
        raise Nonsense(f"{plan} holds other columns than {module}")
    fits_kernels = all(shard.columns % COLUMN_MULTIPLE == 0 for shard in plan.cut(tables))
    try:
        written = plan.to_torchrec(tables, module="sparse.ebc")
    except ValueError:
        if fits_kernels:
            raise
    else:
        back = pk.Plan.from_torchrec(written, tables, ranks=ranks)
        if back != plan or not fits_kernels:
            raise Nonsense(f"{plan} is read back as {back}")
    task.price(plan)
    return plan


ENTRIES = {
    "sharding_bound": Entry(check_bound, share=0.05, new=True),
    "sharding_laws": Entry(check_laws, share=0.03, new=True),
    "sharding_sizes": Entry(check_sizes, share=0.3, new=True),
    "torchrec_plans": Entry(check_torchrec, share=0.5, new=True),
}
