"""Plans in TorchRec's form: what it accepts, its JSON and its objects. TorchRec need not be installed
to write or read them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from typing import Any

from perfkit.ground.files import reading
from perfkit.ground.units import check_choice, check_positive, check_type, escape, show
from perfkit.workloads.placement_kinds import COPIED, PlacementKind
from perfkit.workloads.table_kernels import (
    FUSED,
    KEY_VALUE,
    TABLE_KERNELS,
    UVM,
    UVM_CACHING,
    TableKernel,
)
from perfkit.workloads.tables import EmbeddingTable

#: Path of the embedding collection where neither a table nor the caller names it: that in
#: ``torchrec.models.dlrm.DLRM``.
MODULE = "sparse_arch.embedding_bag_collection"
#: Columns of a shard of FBGEMM's fused kernels are a multiple of this number [-]. Else TorchRec 1.9.2
#: stops with "local_cols not divisible by 4".
COLUMN_MULTIPLE = 4
#: Most GPUs of one host [-]: those of a DGX-2.
_MOST_RANKS_OF_A_HOST = 16
#: Kernel of copied tables, the only one that TorchRec takes for them.
DENSE = "dense"
#: Kernel of a table by TorchRec's ``compute_kernel``; tables of others have no price.
KERNELS: dict[str, TableKernel] = {
    **{kernel.torchrec_name: kernel for kernel in TABLE_KERNELS.values()},
    DENSE: FUSED,
    "dense_uvm": UVM,
    "dense_uvm_caching": UVM_CACHING,
    "ssd_virtual_table": KEY_VALUE,
}
#: Kinds that an ``EmbeddingCollection`` takes, whose rows are not pooled:
#: ``ShardedEmbeddingCollection.create_embedding_sharding`` in torchrec/distributed/embedding.py.
UNPOOLED_KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
#: Kinds of devices of TorchRec's placements.
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Target:
    """Where TorchRec runs a plan.

    Parameters
    ----------
    ranks : int
        Number of ranks [-].
    ranks_per_node : int
        Ranks of a node, which TorchRec calls the local world size [-].
    device : str
        ``cuda`` or ``cpu``.
    pooled : bool or None
        Whether the collection pools rows, as an ``EmbeddingBagCollection``; an
        ``EmbeddingCollection`` does not. None if each table says it.

    Examples
    --------
    >>> Target(16, 8, "cuda", True).place(9)
    'rank:9/cuda:1'
    """

    ranks: int
    ranks_per_node: int
    device: str
    pooled: bool | None

    def __post_init__(self) -> None:
        check_positive("ranks_per_node", self.ranks_per_node, integer=True)
        if self.ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node is {self.ranks_per_node}; it must divide the {self.ranks} ranks of the "
                "plan"
            )
        check_choice("device", self.device, DEVICES)
        check_type("pooled", self.pooled, bool | None)

    def place(self, rank: int) -> str:
        """The device of a rank, in TorchRec's words."""
        if self.device == "cpu":
            return f"rank:{rank}/cpu"
        return f"rank:{rank}/{self.device}:{rank % self.ranks_per_node}"


def find_node_size(
    ranks: int, kinds: Sequence[tuple[PlacementKind, Sequence[int]]], *, device: str
) -> int:
    """Ranks of a node, as far as a plan tells them: a table that fills a node has as many; otherwise
    all ranks are on one.

    Parameters
    ----------
    ranks : int
        Ranks of the plan [-].
    kinds : sequence of (PlacementKind, sequence of int)
        Kind and ranks of each table.
    device : str
        ``cuda`` or ``cpu``.

    Returns
    -------
    ranks_per_node : int
        Ranks of a node [-].

    Raises
    ------
    ValueError
        For more ranks than a host has GPUs.
    """
    for kind, of_table in kinds:
        if kind.fills_node:
            return len(of_table)
    if device != "cpu" and ranks > _MOST_RANKS_OF_A_HOST:
        raise ValueError(
            f"the plan has {ranks} ranks, and no host has as many GPUs; give ranks_per_node, 8 for "
            "example"
        )
    return ranks


def check_module(module: Any) -> None:
    """Refuse what is no path of a module, which TorchRec would take for one that the model lacks.

    Parameters
    ----------
    module : str or None
        The path, empty for the whole model.

    Raises
    ------
    ValueError
        For another type, and for a path with spaces or empty parts.

    Examples
    --------
    >>> check_module("sparse..ebc")
    Traceback (most recent call last):
    ...
    ValueError: module is 'sparse..ebc'; it must be the path of the embedding collection, as 'sparse.ebc'
    """
    check_type("module", module, str | None)
    if module and re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", module) is None:
        raise ValueError(
            f"module is {show(module)}; it must be the path of the embedding collection, as 'sparse.ebc'"
        )


def check_accepted(
    name: str,
    table: EmbeddingTable,
    kind: PlacementKind,
    widths: Sequence[int],
    target: Target,
) -> None:
    """Refuse the placement of a table that TorchRec does not take on any ranks.

    Parameters
    ----------
    name : str
        The name of the table in errors.
    table : EmbeddingTable
        The table.
    kind : PlacementKind
        Its kind of placement.
    widths : sequence of int
        Columns of its shards [-].
    target : Target
        Where TorchRec runs the plan.

    Raises
    ------
    ValueError
        For such a placement; the message says what TorchRec takes.
    """
    shown = f"{show(name)} is {kind.name}"
    if kind.torchrec_name is None:
        raise ValueError(
            f"{shown}, which TorchRec does not have; place it in another way, or save the plan as JSON"
        )
    pooled = table.pooled if target.pooled is None else target.pooled
    if not pooled and kind.name not in UNPOOLED_KINDS:
        raise ValueError(
            f"{shown}, and pooled is False; an EmbeddingCollection takes {', '.join(UNPOOLED_KINDS)}; "
            "forbid the other kinds"
        )
    if not pooled and len(set(widths)) > 1:
        raise ValueError(
            f"{shown} with columns {show(tuple(widths))}, and pooled is False; an EmbeddingCollection "
            "takes shards of equal columns"
        )
    if kind.is_copied:
        _check_copied(shown, table)
        return
    for width in widths:
        if width % COLUMN_MULTIPLE:
            raise ValueError(
                f"{shown} with a shard of {width} columns; TorchRec's fused kernels take multiples of "
                f"{COLUMN_MULTIPLE}; cut it in another way, or pad the table"
            )


def _check_copied(shown: str, table: EmbeddingTable) -> None:
    """Refuse copies of a table that does not lie in device memory."""
    if table.kernel != FUSED.name:
        raise ValueError(
            f"{shown}, and its kernel is {table.kernel!r}; TorchRec keeps copies in device memory; place "
            f"it in another way, or take kernel={FUSED.name!r}"
        )


def check_ranks(name: str, kind: PlacementKind, ranks: Sequence[int], target: Target) -> None:
    """Refuse rows whose ranks are not in their order, and parts of a node.

    Parameters
    ----------
    name : str
        The name of the table in errors.
    kind : PlacementKind
        Its kind of placement.
    ranks : sequence of int
        Ranks of its shards.
    target : Target
        Where TorchRec runs the plan.

    Raises
    ------
    ValueError
        For ranks that TorchRec refuses, or understands in another way.
    """
    shown = f"{show(name)} is {kind.name}"
    nodes = {rank // target.ranks_per_node for rank in ranks}
    if kind.is_inside_node and len(nodes) > 1:
        raise ValueError(
            f"{shown} on ranks {show(tuple(ranks))} of {len(nodes)} nodes of {target.ranks_per_node}; it "
            "must be on ranks of one node; give the right ranks_per_node, or place it in another way"
        )
    if kind.fills_node and len(ranks) != target.ranks_per_node:
        raise ValueError(
            f"{shown} on ranks {show(tuple(ranks))}, which are not all {target.ranks_per_node} ranks of a "
            "node; TorchRec cuts such a table over a whole node; give the right ranks_per_node, or place "
            "it in another way"
        )
    if kind.splits_rows and list(ranks) != sorted(ranks):
        raise ValueError(
            f"{shown} on ranks {show(tuple(ranks))}; TorchRec gives blocks of rows to ranks in their "
            f"order; name them as {show(tuple(sorted(ranks)))}, or take that of Plan.order_rows()"
        )


def name_kernel(table: EmbeddingTable, kind: PlacementKind) -> str:
    """TorchRec's ``compute_kernel`` of a table that is placed in a way."""
    if kind.is_copied:
        return DENSE
    return TABLE_KERNELS[table.kernel].torchrec_name


def read_kernel(place: str, entry: Mapping[str, Any], table: EmbeddingTable) -> EmbeddingTable:
    """The table with the kernel and the load factor of its entry in a plan of TorchRec."""
    kernel = entry.get("compute_kernel")
    if kernel is None:
        return table
    check_choice(f"{place}: compute_kernel", kernel, KERNELS)
    found = KERNELS[kernel]
    if entry.get("sharding_type") == COPIED.torchrec_name and found.name != FUSED.name:
        raise ValueError(
            f"{place}: compute_kernel is {kernel!r} with sharding_type 'data_parallel', whose copies TorchRec "
            f"keeps in device memory; take {DENSE!r}, or another sharding_type"
        )
    cache = entry.get("cache_params", {})
    check_type(f"{place}: cache_params", cache, Mapping)
    load_factor = table.load_factor if found.name == table.kernel else None
    if found.has_cache:
        load_factor = cache.get("load_factor", load_factor)
    with reading(place, "change its cache_params"):
        return replace(table, kernel=found.name, load_factor=load_factor)


def write_entry(
    table: EmbeddingTable,
    kind: PlacementKind,
    ranks: Sequence[int],
    shards: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The ``ParameterSharding`` of a table as plain values.

    Copies have no shards, as in plans of TorchRec's planner: TorchRec refuses shards that overlap.
    """
    entry: dict[str, Any] = {
        "sharding_type": kind.torchrec_name,
        "compute_kernel": name_kernel(table, kind),
        "ranks": list(ranks),
    }
    if not kind.is_copied:
        entry["shards"] = list(shards)
    if table.load_factor is not None:
        entry["cache_params"] = {"load_factor": table.load_factor}
    return entry


def write_constraint(
    table: EmbeddingTable, kind: PlacementKind, widths: Sequence[int]
) -> dict[str, Any]:
    """The ``ParameterConstraints`` of a table as plain values, which leave only its ranks open.

    The columns of the planner's shards are equal, so uneven ones have the smallest as their least.
    """
    constraint: dict[str, Any] = {
        "sharding_types": [kind.torchrec_name],
        "compute_kernels": [name_kernel(table, kind)],
        "pooling_factors": [float(table.pooling)],
    }
    if kind.splits_columns:
        constraint["min_partition"] = min(widths)
    if table.load_factor is not None:
        constraint["cache_params"] = {"load_factor": table.load_factor}
    return constraint


def has_torchrec() -> bool:
    """Whether torchrec is installed."""
    return find_spec("torchrec") is not None


def _import_torchrec() -> None:
    """Import what plans are made of; say so if an installed torchrec cannot be imported."""
    try:
        import torchrec.distributed.planner  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"torchrec cannot be imported: {escape(str(error), 300)}; install what is missing, or pass "
            "plain=True for JSON"
        ) from error


def make_sharding_plan(modules: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Any:
    """TorchRec's objects of a plan, which ``DistributedModelParallel(plan=...)`` takes.

    Parameters
    ----------
    modules : mapping
        What `perfkit.Plan.to_torchrec` gives.

    Returns
    -------
    plan : torchrec.distributed.types.ShardingPlan
        The same plan.

    Raises
    ------
    ImportError
        If torchrec is not installed, or cannot be imported.
    """
    _import_torchrec()
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.types import (
        CacheParams,
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
    )

    plan: dict[str, Any] = {}
    for module, entries in modules.items():
        of_module = EmbeddingModuleShardingPlan()
        for name, entry in entries.items():
            spec = None
            if "shards" in entry:
                spec = EnumerableShardingSpec([ShardMetadata(**shard) for shard in entry["shards"]])
            sharding = ParameterSharding(
                entry["sharding_type"], entry["compute_kernel"], list(entry["ranks"]), spec
            )
            if "cache_params" in entry:
                sharding.cache_params = CacheParams(**entry["cache_params"])
            of_module[name] = sharding
        plan[module] = of_module
    return ShardingPlan(plan)


def make_constraints(constraints: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """TorchRec's ``ParameterConstraints`` by table, which ``EmbeddingShardingPlanner(constraints=...)``
    takes.

    Parameters
    ----------
    constraints : mapping
        What `perfkit.Plan.to_torchrec_constraints` gives.

    Returns
    -------
    constraints : dict of str to torchrec.distributed.planner.ParameterConstraints
        The same constraints.

    Raises
    ------
    ImportError
        If torchrec is not installed, or cannot be imported.
    """
    _import_torchrec()
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import CacheParams

    made = {}
    for name, constraint in constraints.items():
        values = dict(constraint)
        if "cache_params" in values:
            values["cache_params"] = CacheParams(**values["cache_params"])
        made[name] = ParameterConstraints(**values)
    return made


def list_modules(plan: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Fields of each table of a plan of TorchRec, by module and name.

    Parameters
    ----------
    plan : ShardingPlan, EmbeddingModuleShardingPlan or mapping
        Objects of TorchRec; or their JSON, as `perfkit.Plan.to_torchrec` or ``ShardingPlan._serialize``
        write it.

    Returns
    -------
    modules : dict
        Module to table to fields of ``ParameterSharding``; ``shards`` are a list of ``rank``,
        ``offsets`` and ``sizes`` (rows, columns).

    Raises
    ------
    ValueError
        For anything else.
    """
    data = plan
    if not isinstance(data, Mapping) and isinstance(getattr(data, "plan", None), Mapping):
        data = data.plan
    check_type("plan", data, Mapping)
    if "format" in data and "tables" in data:
        raise ValueError(
            "it is a plan that perfkit wrote; read it with Plan.load or Plan.from_json"
        )
    inner = data.get("plan")
    if len(data) == 1 and isinstance(inner, Mapping) and not _are_entries(inner):
        data = inner
    if _are_entries(data):  # the plan of one module, without its path
        data = {"": data}
    modules: dict[str, dict[str, dict[str, Any]]] = {}
    for module, entries in data.items():
        check_type("a path of a module", module, str)
        check_type(f"module {show(module)}", entries, Mapping)
        modules[module] = {}
        for name, entry in entries.items():
            check_type(f"a name of a table of module {show(module)}", name, str)
            modules[module][name] = _list_fields(f"{module}.{name}", entry)
    return modules


def _are_entries(entries: Mapping[Any, Any]) -> bool:
    """Whether a mapping has tables, not modules."""
    return any(
        hasattr(entry, "sharding_type") or (isinstance(entry, Mapping) and "sharding_type" in entry)
        for entry in entries.values()
    )


def _list_fields(place: str, entry: Any) -> dict[str, Any]:
    """Fields of one table of a plan of TorchRec; those that are None are left out."""
    if is_dataclass(entry) and hasattr(entry, "sharding_type"):
        values = {one.name: getattr(entry, one.name) for one in fields(entry)}
        spec = values.pop("sharding_spec", None)
        if spec is not None:
            values["shards"] = spec.shards
        cache = values.get("cache_params")
        if is_dataclass(cache):
            values["cache_params"] = {one.name: getattr(cache, one.name) for one in fields(cache)}
    else:
        check_type(place, entry, Mapping)
        values = dict(entry)
    listed = {name: value for name, value in values.items() if value is not None}
    if "shards" in listed:
        shards = listed["shards"]
        check_type(f"shards of {place}", shards, Sequence)
        listed["shards"] = [_list_shard(place, shard) for shard in shards]
    if isinstance(listed.get("cache_params"), Mapping):
        cache = listed["cache_params"]
        listed["cache_params"] = {key: value for key, value in cache.items() if value is not None}
    return listed


def _list_shard(place: str, shard: Any) -> dict[str, Any]:
    """Rank, offsets and sizes of a shard, as far as they are there."""
    values = shard
    if not isinstance(shard, Mapping) and hasattr(shard, "shard_offsets"):
        values = {
            "shard_offsets": list(shard.shard_offsets),
            "shard_sizes": list(shard.shard_sizes),
            "placement": str(shard.placement),
        }
    check_type(f"a shard of {place}", values, Mapping)
    listed = {name: values[name] for name in ("rank", "offsets", "sizes") if name in values}
    if "shard_offsets" in values:
        listed["offsets"] = values["shard_offsets"]
    if "shard_sizes" in values:
        listed["sizes"] = values["shard_sizes"]
    if "placement" in values:
        listed["rank"] = _read_placement(place, values["placement"])
    return listed


def _read_placement(place: str, text: Any) -> int:
    """The rank of a placement, as ``rank:9/cuda:1``."""
    if isinstance(text, str) and text.startswith("rank:"):
        rank = text.removeprefix("rank:").partition("/")[0]
        if rank.isdecimal() and len(rank) < 10:
            return int(rank)
    raise ValueError(
        f"{place} has a shard with placement {show(text)}; it must begin with its rank, as 'rank:9/cuda:1'"
    )
