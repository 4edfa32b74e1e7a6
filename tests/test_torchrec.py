"""Plans in TorchRec's form, in and out, without torchrec; `make torchrec` tries them with it."""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

import perfkit as pk
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KINDS
from perfkit.workloads.tables import EmbeddingTable, TableSet
from perfkit.workloads.torchrec_format import MODULE

TABLES = [EmbeddingTable(10, 64, name=name, module="sparse.ebc") for name in "abcdef"]
#: Each kind of placement, on two nodes of two ranks.
PLAN = Plan(
    4,
    (
        2,
        Placement("column_wise", (3, 0), (48, 16)),
        Placement("row_wise", (0, 1, 2, 3)),
        Placement("data_parallel", (0, 1, 2, 3)),
        Placement("table_row_wise", (2, 3)),
        Placement("table_column_wise", (1, 0), (32, 32)),
    ),
)


def refuse(message: str) -> Any:
    """Expects an error with this message."""
    return pytest.raises(ValueError, match=re.escape(message))


def test_every_kind_is_written_as_torchrec_writes_it_and_read_back_exactly() -> None:
    written = PLAN.to_torchrec(TABLES)["sparse.ebc"]
    assert written["b"] == {
        "sharding_type": "column_wise",
        "compute_kernel": "fused",
        "ranks": [3, 0],
        "shards": [
            {"shard_offsets": [0, 0], "shard_sizes": [10, 48], "placement": "rank:3/cuda:1"},
            {"shard_offsets": [0, 48], "shard_sizes": [10, 16], "placement": "rank:0/cuda:0"},
        ],
    }
    assert written["d"] == {
        "sharding_type": "data_parallel",
        "compute_kernel": "dense",
        "ranks": [0, 1, 2, 3],
    }
    assert [shard["shard_sizes"][0] for shard in written["c"]["shards"]] == [3, 3, 3, 1]
    text = json.dumps({"sparse.ebc": written})
    assert Plan.from_torchrec(json.loads(text), TABLES) == PLAN
    serialized = {"plan": json.loads(text)}  # as ShardingPlan._serialize gives it
    assert Plan.from_torchrec(serialized, TABLES, ranks=4) == PLAN
    assert Plan.from_torchrec(written, TABLES, ranks=4) == PLAN, "the plan of one module"


def test_devices_are_numbered_by_node() -> None:
    plan = Plan(16, (11,))
    table = [EmbeddingTable(10, 16, name="a", module="m")]
    for keywords, placement in (
        ({"ranks_per_node": 8}, "rank:11/cuda:3"),
        ({"ranks_per_node": 4}, "rank:11/cuda:3"),
        ({}, "rank:11/cuda:11"),
        ({"device": "cpu"}, "rank:11/cpu"),
    ):
        [shard] = plan.to_torchrec(table, **keywords)["m"]["a"]["shards"]  # type: ignore[arg-type]
        assert shard["placement"] == placement
    with refuse("the plan has 64 ranks, and no host has as many GPUs; give ranks_per_node"):
        Plan(64, (11,)).to_torchrec(table)
    with refuse("ranks_per_node is 3; it must divide the 16 ranks"):
        plan.to_torchrec(table, ranks_per_node=3)
    for path in ("sparse..ebc", " ebc", "ebc.", "a b"):
        with refuse(f"module is {path!r}; it must be the path of the embedding collection"):
            plan.to_torchrec(table, module=path)
    with refuse("device is 'gpu'; known are cuda, cpu"):
        plan.to_torchrec(table, device="gpu")


def test_a_path_that_nobody_names_is_told() -> None:
    tables = [replace(TABLES[0], module=""), TABLES[1]]
    plan = Plan(2, (0, 1))
    with pytest.warns(UserWarning, match="the module of 'a' is not known, and 'sparse_arch.embed"):
        assert list(plan.to_torchrec(tables)) == [MODULE, "sparse.ebc"]
    with pytest.warns(
        UserWarning, match="module is 'ebc', and that of 'b' is 'sparse.ebc'; TorchRec"
    ):
        assert list(plan.to_torchrec(tables, module="ebc")) == ["ebc"]
    assert list(plan.to_torchrec(tables, module="sparse.ebc")) == ["sparse.ebc"]


@pytest.mark.parametrize(
    ("placement", "keywords", "message"),
    [
        (
            Placement("column_wise", (0, 1), (54, 10)),
            {},
            "'a' is column_wise with a shard of 54 columns; TorchRec's fused kernels take multiples of 4",
        ),
        (
            Placement("row_wise", (1, 0, 2, 3)),
            {},
            "'a' is row_wise on ranks (1, 0, 2, 3); TorchRec gives blocks of rows to ranks in their "
            "order; name them as (0, 1, 2, 3)",
        ),
        (
            Placement("table_row_wise", (1, 0)),
            {"ranks_per_node": 2},
            "'a' is table_row_wise on ranks (1, 0); TorchRec gives blocks of rows to ranks in their",
        ),
        (
            Placement("table_row_wise", (0, 1)),
            {"ranks_per_node": 4},
            "'a' is table_row_wise on ranks (0, 1), which are not all 4 ranks of a node",
        ),
        (
            Placement("table_row_wise", (1, 2)),
            {"ranks_per_node": 2},
            "'a' is table_row_wise on ranks (1, 2) of 2 nodes of 2; it must be on ranks of one node",
        ),
        (
            Placement("table_column_wise", (0, 2)),
            {"ranks_per_node": 2},
            "'a' is table_column_wise on ranks (0, 2) of 2 nodes of 2; it must be on ranks of one",
        ),
        (
            Placement("table_column_wise", (0, 1)),
            {"pooled": False},
            "'a' is table_column_wise, and pooled is False; an EmbeddingCollection takes table_wise, "
            "row_wise, column_wise, data_parallel",
        ),
        (
            Placement("column_wise", (0, 1), (48, 16)),
            {"pooled": False},
            "an EmbeddingCollection takes shards of equal columns",
        ),
        (
            Placement("hybrid", (0, 1, 2, 3), frequent=2),
            {},
            "'a' is hybrid, which TorchRec does not have",
        ),
    ],
    ids=range(9),
)
def test_what_torchrec_refuses_or_takes_otherwise_is_refused_first(
    placement: Placement, keywords: dict[str, Any], message: str
) -> None:
    with refuse(message):
        Plan(4, (placement,)).to_torchrec(TABLES[:1], **keywords)


def test_kernels_of_tables_go_out_and_are_compared_when_they_come_in(
    recwarn: pytest.WarningsRecorder,
) -> None:
    kernels = ("fused", "uvm", "uvm_caching", "key_value")
    tables = [EmbeddingTable(10, 64, name=kernel, module="m", kernel=kernel) for kernel in kernels]
    plan = Plan(2, (0, 1, 0, 1))
    entries = plan.to_torchrec(tables)["m"]
    words = [entries[kernel]["compute_kernel"] for kernel in kernels]
    assert words == ["fused", "fused_uvm", "fused_uvm_caching", "key_value"]
    assert entries["uvm_caching"]["cache_params"] == {"load_factor": 0.2}
    assert Plan.from_torchrec({"m": entries}, tables, ranks=2) == plan
    assert not recwarn, "kernels agree"
    other = [replace(table, kernel="fused", load_factor=None) for table in tables]
    with pytest.warns(UserWarning) as told:
        Plan.from_torchrec({"m": entries}, other, ranks=2)
    assert "the plan has fused_uvm (in host memory) for 'uvm', the tables do not" in str(told[0])
    taken = pk.take_kernels(pk.TableSet(tuple(other)), {"m": entries})
    assert list(taken.tables) == tables
    entries["uvm"]["compute_kernel"] = "quant"
    with refuse("m.uvm: compute_kernel is 'quant'; known are fused, fused_uvm, fused_uvm_caching"):
        pk.take_kernels(taken, {"m": entries})
    entries["uvm"]["compute_kernel"] = "fused_uvm"
    for cache, fault in (
        (0.3, "cache_params is 0.3; it must be a mapping"),
        ({"load_factor": "x"}, "load_factor is 'x'"),
    ):
        entries["uvm_caching"]["cache_params"] = cache
        with refuse(f"m.uvm_caching: {fault}"):
            pk.take_kernels(taken, {"m": entries})
    copied = {"sharding_type": "data_parallel", "compute_kernel": "fused_uvm", "ranks": [0, 1]}
    with refuse(
        "m.uvm: compute_kernel is 'fused_uvm' with sharding_type 'data_parallel', whose copies"
    ):
        pk.take_kernels(taken, {"m": {**entries, "uvm": copied}})
    with refuse("'uvm' is data_parallel, and its kernel is 'uvm'; TorchRec keeps copies in device"):
        Plan(2, (Placement("data_parallel", (0, 1)),)).to_torchrec(tables[1:2])


@dataclass
class ShardMetadata:
    """As in torch."""

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: object


@dataclass
class Remote:
    """As ``torch.distributed._remote_device``, which is printed as it was written."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Spec:
    """As ``EnumerableShardingSpec`` in torch."""

    shards: list[ShardMetadata]


@dataclass
class ParameterSharding:
    """As in TorchRec, with some of its fields."""

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: Spec | None = None
    cache_params: Any = None
    enforce_hbm: bool | None = None


@dataclass
class ShardingPlan:
    """As in TorchRec."""

    plan: dict[str, dict[str, ParameterSharding]]


def test_objects_are_read_by_their_fields() -> None:
    parts = [
        ShardMetadata([0, 0], [10, 48], Remote("rank:3/cuda:1")),
        ShardMetadata([0, 48], [10, 16], Remote("rank:0/cuda:0")),
    ]
    whole = [ShardMetadata([0, 0], [10, 64], Remote("rank:2/cuda:0"))]
    entries = {
        "a": ParameterSharding("table_wise", "fused", [2], Spec(whole)),
        "b": ParameterSharding("column_wise", "fused", [3, 0], Spec(parts)),
        "c": ParameterSharding("data_parallel", "dense"),
    }
    plan = Plan.from_torchrec(ShardingPlan({"sparse.ebc": entries}), TABLES[:3], ranks=4)
    everyone = Placement("data_parallel", (0, 1, 2, 3))
    assert plan == Plan(4, (2, Placement("column_wise", (3, 0), (48, 16)), everyone))
    entries["a"].enforce_hbm = True
    with pytest.warns(UserWarning, match="fields that are not used: 'enforce_hbm' of 'a'"):
        Plan.from_torchrec(ShardingPlan({"sparse.ebc": entries}), TABLES[:3], ranks=4)
    with refuse("no table is on every rank; pass ranks="):
        Plan.from_torchrec({"m": {"a": entries["a"]}}, TABLES[:1])


def test_shards_of_rows_and_columns_are_refused_by_name() -> None:
    with refuse("m.a: sharding_type is 'grid_shard', shards of rows and of columns"):
        Plan.from_torchrec({"m": {"a": {"sharding_type": "grid_shard"}}}, TABLES[:1], ranks=2)
    with refuse("m.a has a shard with placement 'cuda:1'; it must begin with its rank"):
        entry = {"sharding_type": "table_wise", "shards": [{"placement": "cuda:1"}]}
        Plan.from_torchrec({"m": {"a": entry}}, TABLES[:1], ranks=2)


def test_constraints_leave_the_ranks_to_the_planner_of_torchrec() -> None:
    tables = [replace(table, pooling=3.0) for table in TABLES]
    tables[0] = replace(tables[0], kernel="uvm_caching", load_factor=0.5)
    constraints = PLAN.to_torchrec_constraints(tables)
    assert constraints["a"] == {
        "sharding_types": ["table_wise"],
        "compute_kernels": ["fused_uvm_caching"],
        "pooling_factors": [3.0],
        "cache_params": {"load_factor": 0.5},
    }
    assert constraints["b"]["min_partition"] == 16, "the narrowest shard"
    assert constraints["d"]["compute_kernels"] == ["dense"]
    assert "min_partition" not in constraints["c"]
    turned = Plan(4, (Placement("row_wise", (3, 0, 1, 2)), Placement("table_row_wise", (1, 0))))
    kinds = turned.to_torchrec_constraints(tables[:2]).values()
    assert [kind["sharding_types"] for kind in kinds] == [["row_wise"], ["table_row_wise"]]
    twins = [replace(tables[1], module=module) for module in "xy"]
    with refuse("two tables are named 'b'; TorchRec has constraints by name"):
        Plan(2, (0, 1)).to_torchrec_constraints(twins)


def test_results_of_searches_are_numbered_by_the_nodes_of_their_platform() -> None:
    tables = pk.TableSet(tuple(TABLES), batch=1024)
    found = pk.shard(tables, "h100-sxm-8x2", ranks=16, steps=20)
    written = found.to_torchrec(plain=True)
    assert written == found.plan.to_torchrec(TABLES, ranks_per_node=8)
    assert Plan.from_torchrec(written, TABLES, ranks=16) == found.plan
    nameless = pk.TableSet((EmbeddingTable(10, 64),), batch=1024)
    with pytest.warns(UserWarning, match="the module of 'table 0' is not known") as told:
        pk.shard(nameless, "h100-sxm-8", ranks=2, steps=2).to_torchrec(plain=True)
    assert told[0].filename == __file__, "the line that asks"
    assert found.to_torchrec_constraints(plain=True).keys() == written["sparse.ebc"].keys()
    assert found.time == found.prediction.time
    with pytest.warns(UserWarning, match="module is 'ebc', and that of 6 tables") as told:
        found.to_torchrec(module="ebc", plain=True)
    assert told[0].filename == __file__
    with refuse(
        "forbidden kind is 'TWRW', which TorchRec prints for table_row_wise; take that name"
    ):
        pk.shard(tables, "h100-sxm-8x2", ranks=16, forbid="TWRW")
    with refuse("ranks is 12; platform 'h100-sxm-8x2' has nodes of 8; take a multiple of 8"):
        pk.shard(tables, "h100-sxm-8x2", ranks=12)


def test_blocks_of_rows_of_a_search_go_to_ranks_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = TableSet(
        [EmbeddingTable(10**5 * n, 64, 5.0, 1.2, name=f"t{n}") for n in (1, 2, 3, 4)],
        batch=4096,
        embedding="fused",
    )
    others = [kind for kind in KINDS if kind != "table_row_wise"]
    found = pk.shard(tables, "h100-sxm-8x2", ranks=16, steps=20, forbid=others)
    ranks = [placement.ranks for placement in found.plan.placements]
    assert any(list(listed) != sorted(listed) for listed in ranks), "the search has another order"
    written = found.to_torchrec(module="m", plain=True)
    for entry, listed in zip(written["m"].values(), ranks, strict=True):
        assert entry["ranks"] == sorted(listed)
    with pytest.raises(ValueError, match=r"or take that of Plan\.order_rows\(\)"):
        found.plan.to_torchrec(tables.tables, module="m", ranks_per_node=8)
    assert (
        found.plan.order_rows().to_torchrec(tables.tables, module="m", ranks_per_node=8) == written
    )
    constraints = found.to_torchrec_constraints(plain=True)
    for constraint in constraints.values():
        assert constraint["sharding_types"] == ["table_row_wise"]
    monkeypatch.setattr("perfkit.sharding.result._SAME_TIME", -1.0)
    with pytest.warns(UserWarning, match="blocks of rows go to their ranks in order, as TorchRec"):
        found.to_torchrec(module="m", plain=True)


def test_tables_that_are_not_pooled_get_the_kinds_of_their_collection() -> None:
    bags = TableSet(
        [EmbeddingTable(10**7 * n, 128, 20.0, name=f"t{n}", module="ec") for n in (1, 2, 3)],
        batch=65_536,
        embedding="fused",
    )
    rows = replace(bags, tables=[replace(table, pooled=False) for table in bags.tables])
    pooled = pk.shard(bags, "h100-sxm-8x2", ranks=16, steps=20)
    assert "table_row_wise" in [placement.kind for placement in pooled.plan.placements]
    assert not pooled.warnings
    with refuse(
        "is table_row_wise, and pooled is False; an EmbeddingCollection takes table_wise, "
    ):
        pooled.to_torchrec(pooled=False, plain=True)
    found = pk.shard(rows, "h100-sxm-8x2", ranks=16, steps=20)
    assert found.warnings == (
        "table_column_wise and table_row_wise were not tried for 3 tables ('t1' first), whose rows are not "
        "pooled: an EmbeddingCollection of TorchRec does not take them",
    )
    assert list(found.to_torchrec(plain=True)) == ["ec"]
    assert found.time >= found.bound > 0
    with refuse("is table_row_wise, and pooled is False"):
        pooled.plan.to_torchrec_constraints(rows.tables)
    same = pk.price_plan(rows, "h100-sxm-8x2", pooled.plan)
    assert same.time > pooled.time, "20 rows a sample are exchanged, not one"
    one_node = pk.shard(rows, "h100-sxm-8", ranks=8, steps=20)
    assert not one_node.warnings
