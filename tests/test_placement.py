"""Plans: what lies where, in and out of files, and what is refused."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfkit as pk
from perfkit.workloads.placement import KINDS, Placement, Plan
from perfkit.workloads.tables import EmbeddingTable

TABLES = [EmbeddingTable(10, 64, name=name) for name in "abcdef"]
MIXED = Plan(
    4,
    (
        2,
        Placement("column_wise", (0, 3), (48, 16)),
        Placement("row_wise", (0, 1, 2, 3)),
        Placement("data_parallel", (0, 1, 2, 3)),
        Placement("table_row_wise", (2, 3)),
        Placement("table_column_wise", (1, 0)),
    ),
    tuple("abcdef"),
)


def test_every_kind_is_cut_into_its_shards() -> None:
    shards = MIXED.cut(TABLES)
    own = {t: [s[1:] for s in shards if s.table == t] for t in range(6)}
    assert own[0] == [(2, 0, 10, 0, 64)]
    assert own[1] == [(0, 0, 10, 0, 48), (3, 0, 10, 48, 16)]
    assert own[2] == [(0, 0, 3, 0, 64), (1, 3, 3, 0, 64), (2, 6, 3, 0, 64), (3, 9, 1, 0, 64)], (
        "rounded up, as TorchRec"
    )
    assert own[3] == [(rank, 0, 10, 0, 64) for rank in range(4)]
    assert own[4] == [(2, 0, 5, 0, 64), (3, 5, 5, 0, 64)]
    assert own[5] == [(1, 0, 10, 0, 32), (0, 0, 10, 32, 32)]
    assert {p.kind for p in MIXED.placements} == set(KINDS)


@given(st.data())
def test_shards_tile_the_table(data: st.DataObject) -> None:
    kind, n = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 6))
    rows, dim = data.draw(st.integers(n, 50)), n * data.draw(st.integers(1, 9))
    ranks = tuple(data.draw(st.permutations(range(n))))[: 1 if kind == "table_wise" else n]
    shards = Placement(kind, ranks).cut(EmbeddingTable(rows, dim), 7)
    seen = np.zeros((rows, dim), dtype=int)
    for s in shards:
        assert s.table == 7 and s.rank in ranks
        seen[s.first_row : s.first_row + s.rows, s.first_column : s.first_column + s.columns] += 1
    assert (seen == (len(ranks) if kind == "data_parallel" else 1)).all()


def test_whole_tables_are_numbers() -> None:
    plan = Plan(2, (Placement("table_wise", (1,)), 0))
    assert plan.owners == (1, 0) and plan == Plan.from_owners(np.array([1, 0]), ranks=2)
    assert plan.tables_of(1) == (0,)
    assert hash(plan) == hash(Plan(2, (1, 0), ("x", "y"))), "names are for files alone"


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    back = Plan.load(MIXED.save(tmp_path / "plan.json"))
    assert back == MIXED and back.names == MIXED.names
    data = json.loads(MIXED.to_json())
    assert data["format"] == 1 and data["tables"][1] == {
        "name": "b",
        "kind": "column_wise",
        "ranks": [0, 3],
        "columns": [48, 16],
    }
    for plan in (Plan.round_robin(3, ranks=2), Plan(2, ())):
        assert Plan.from_json(plan.to_json()) == plan
    hostile = Plan.from_json(file(entry={"name": "<script>"}))
    assert hostile.names == ("<script>",) and "<script>" not in repr(hostile)


def test_torchrec_dictionary() -> None:
    plan = MIXED.to_torchrec(TABLES, module="sparse.ebc")
    assert list(plan) == ["sparse.ebc"] and list(plan["sparse.ebc"]) == list("abcdef")
    assert plan["sparse.ebc"]["b"] == {
        "sharding_type": "column_wise",
        "compute_kernel": "fused",
        "ranks": [0, 3],
        "shards": [
            {"rank": 0, "offsets": [0, 0], "sizes": [10, 48]},
            {"rank": 3, "offsets": [0, 48], "sizes": [10, 16]},
        ],
    }
    assert plan["sparse.ebc"]["d"]["compute_kernel"] == "dense"
    assert json.loads(json.dumps(plan)) == plan, "plain values only"
    back = Plan.from_torchrec(plan, TABLES, ranks=4)
    assert back.cut(TABLES) == MIXED.cut(TABLES)
    two = {
        "x": {n: plan["sparse.ebc"][n] for n in "abc"},
        "y": {n: plan["sparse.ebc"][n] for n in "def"},
    }
    assert Plan.from_torchrec(two, TABLES, ranks=4).cut(TABLES) == MIXED.cut(TABLES), (
        "tables of several modules"
    )


def read_one(entry: dict[str, Any], *, ranks: int = 3) -> Plan:
    """A plan of one table of 1,000 rows and 64 columns in TorchRec's form."""
    return Plan.from_torchrec(
        {"sparse.ebc": {"t0": entry}}, [EmbeddingTable(1000, 64, name="t0")], ranks=ranks
    )


TWO_ON_ONE = {
    "sharding_type": "column_wise",
    "compute_kernel": "fused",
    "ranks": [0, 1, 1, 2],
    "shards": [
        {"rank": rank, "offsets": [0, 16 * place], "sizes": [1000, 16]}
        for place, rank in enumerate((0, 1, 1, 2))
    ],
}


@pytest.mark.parametrize("entry", [TWO_ON_ONE, {**TWO_ON_ONE, "shards": []}], ids=["", "equal"])
def test_two_shards_of_columns_on_a_rank_are_one(entry: dict[str, Any]) -> None:
    tables, plan = [EmbeddingTable(1000, 64, name="t0")], read_one(entry)
    assert plan.placements == (Placement("column_wise", (0, 1, 2), (16, 32, 16)),)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_torchrec(plan.to_torchrec(tables), tables, ranks=3) == plan
    price = pk.price_plan(pk.TableSet(tuple(tables), batch=384), "h100-sxm-8", plan)
    weights = price.table()["weights_bytes"].to_list()
    assert weights == [64_000, 128_000, 64_000]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"compute_kernel": "fused_uvm"},
            "tables in host memory are not priced: fused_uvm of 't0'",
        ),
        ({"compute_kernel": "fused_uvm_caching"}, "tables in host memory are not priced"),
        ({"compute_kernel": "key_value"}, "in host memory or on an SSD are not priced: key_value"),
        ({"compute_kernel": "quant"}, "tables of fewer bits are not priced: quant of 't0'"),
        ({"compute_kernel": "fusd"}, "compute_kernel 'fusd' of 't0' is unknown"),
        (
            {"cache_params": {"load_factor": 0.2}},
            "fields that are not used: 'cache_params' of 't0'",
        ),
    ],
)
def test_what_a_plan_of_torchrec_says_and_is_not_priced_is_told(
    entry: dict[str, Any], message: str
) -> None:
    plain = {"sharding_type": "table_wise", "ranks": [1]}
    with pytest.warns(UserWarning, match=re.escape(message)) as told:
        plan = read_one({**plain, **entry})
    assert len(told) == 1 and plan.owners == (1,)


def test_plans_of_torchrec_in_the_memory_of_the_device_are_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in ("fused", "dense", None):
            plan = read_one(
                {"sharding_type": "table_wise", "compute_kernel": kernel, "ranks": [1], "x": None}
            )
            assert plan.owners == (1,)


def shard(rank: int, offsets: tuple[int, int], sizes: tuple[int, int]) -> dict[str, Any]:
    """One shard in TorchRec's form."""
    return {"rank": rank, "offsets": list(offsets), "sizes": list(sizes)}


@pytest.mark.parametrize(
    ("kind", "ranks", "shards", "message"),
    [
        ("table_wise", [0], [shard(2, (0, 0), (1000, 64))], "ranks (0,) and shards on ranks [2]"),
        ("table_wise", [0], [shard(0, (0, 0), (5000, 128))], "shards of 640000 numbers together"),
        (
            "column_wise",
            [0, 1],
            [shard(0, (0, 0), (1000, 32)), shard(1, (0, 32), (1000, 16))],
            "shards of 48000 numbers together, the table has 1000 rows and 64 columns",
        ),
        (
            "column_wise",
            [0, 1],
            [shard(0, (0, 0), (1000, 32)), shard(1, (0, 0), (1000, 32))],
            "two shards at the same offsets",
        ),
        ("table_wise", [0], [{"sizes": [1000]}], "a shard with sizes [1000]"),
    ],
)
def test_shards_of_torchrec_that_contradict_their_table_are_refused(
    kind: str, ranks: list[int], shards: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_one({"sharding_type": kind, "ranks": ranks, "shards": shards})


def test_rows_of_torchrec_in_unequal_blocks_are_told() -> None:
    shards = [shard(0, (0, 0), (900, 64)), shard(1, (900, 0), (100, 64))]
    entry = {"sharding_type": "row_wise", "ranks": [0, 1], "shards": shards}
    with pytest.warns(UserWarning, match="rows of the shards of 't0' are priced as equal blocks"):
        read_one(entry, ranks=2)


def file(**changes: Any) -> str:
    entry = {"name": "a", "kind": "table_wise", "ranks": [0], **changes.pop("entry", {})}
    return json.dumps({"format": 1, "ranks": 2, "tables": [entry], **changes})


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Placement("diagonal", (0,)), "kind is 'diagonal'; known are data_parallel"),
    (lambda: Placement("table_wise", ()), "a table_wise table is on ranks (); name at least one"),
    (
        lambda: Placement("column_wise", (1, 1)),
        "is on ranks (1, 1); name at least one, and none twice",
    ),
    (
        lambda: Placement("table_wise", (0, 1)),
        "a table_wise table must be on one rank, not on (0, 1)",
    ),
    (
        lambda: Placement("table_wise", 3),
        "ranks of a table_wise placement is 3; it must be a sequence",
    ),  # type: ignore[arg-type]
    (
        lambda: Placement("row_wise", (0, 1), (4, 4)),
        "columns (4, 4) do not belong to a row_wise placement on 2 ranks",
    ),
    (
        lambda: Plan(2, (Placement("column_wise", (0, 2)),)),
        "table 0 is placed on rank 2; ranks go from 0 to 1",
    ),
    (
        lambda: Plan(3, (0, Placement("row_wise", (0, 1)))),
        "table 1 is row_wise on 2 of 3 ranks; it must name all",
    ),
    (lambda: Plan(2, (0, 1), ("a",)), "names has 1 entries for 2 tables"),
    (lambda: Plan.round_robin(-1, ranks=2), "tables is -1; it must be a whole number above 0"),
    (
        lambda: Plan.round_robin(2**62, ranks=2),
        "tables is 4611686018427387904; it must be .* at most 1e+07",
    ),
    (
        lambda: Plan.from_owners([0, True], ranks=2),
        "table 1 is placed on rank True; ranks go from 0 to 1",
    ),
    (lambda: Plan.from_owners(["1"], ranks=2), "table 0 is placed on rank '1'"),  # type: ignore[list-item]
    (lambda: Plan.from_owners([-1], ranks=2), "table 0 is placed on rank -1"),
    (lambda: Plan.from_owners(3, ranks=2), "owners is 3; it must be a sequence"),  # type: ignore[arg-type]
    (
        lambda: MIXED.tables_of(0),
        "table 1 is column_wise; here every table must be whole on one rank",
    ),
    (lambda: MIXED.cut(TABLES[:5]), "plan places 6 tables; there are 5"),
    (
        lambda: Plan(3, (Placement("column_wise", (0, 1, 2)),)).cut(TABLES[:1]),
        "'a' has 64 columns; 3 equal shards",
    ),
    (
        lambda: Placement("column_wise", (0, 1), (40, 20)).cut(TABLES[0]),
        "have 60 columns together; the table 64",
    ),
    (
        lambda: Placement("row_wise", tuple(range(11))).cut(TABLES[0]),
        "'a' has 10 rows; it cannot be split",
    ),
    (lambda: Plan.from_json("{"), "plan: Expecting"),
    (lambda: Plan.from_json(file(format=2)), "format is 2; this perfkit reads format 1"),
    (lambda: Plan.from_json(file(ranks=0)), "ranks is 0; it must be a whole number above 0"),
    (
        lambda: Plan.from_json(file(tables=[0] * 200_001)),
        "tables has 200001 entries; it may have 200000",
    ),
    (
        lambda: Plan.from_json(file(entry={"kind": "whole"})),
        "tables[0]: kind is 'whole'; known are data_parallel",
    ),
    (
        lambda: Plan.from_json(file(entry={"ranks": [0, "x"]})),
        "tables[0].ranks[1] is 'x'; it must be a whole number",
    ),
    (
        lambda: Plan.from_json(file(entry={"ranks": [0, 1]})),
        "tables[0]: a table_wise table must be on one rank",
    ),
    (
        lambda: Plan.from_torchrec({"m": {"z": {}}}, TABLES[:1], ranks=2),
        "'a' is in the tables only",
    ),
    (
        lambda: Plan.from_torchrec(
            {"m": {"a": {"sharding_type": "grid_shard", "ranks": [0]}}}, TABLES[:1], ranks=2
        ),
        "m.a: kind is 'grid_shard'; known are data_parallel",
    ),
    (
        lambda: Plan.from_torchrec(json.loads(MIXED.to_json()), TABLES, ranks=4),
        "it is a plan that perfkit wrote; read it with Plan.load or Plan.from_json",
    ),
    (
        lambda: Plan.from_json(json.dumps(MIXED.to_torchrec(TABLES))),
        "modules with tables as in TorchRec; read it with json.load and pass the dictionary to",
    ),
    (
        lambda: Plan.from_torchrec("plan.json", TABLES, ranks=4),  # type: ignore[arg-type]
        "plan is 'plan.json'; it must be a mapping",
    ),
    (
        lambda: Plan.from_torchrec({"x": {"a": {}}, "y": {"a": {}}}, TABLES[:1], ranks=2),
        "'a' is twice in the plan, as x.a and as y.a",
    ),
    (
        lambda: read_one({**TWO_ON_ONE, "ranks": [0, 2]}),
        "has ranks [0, 2] and shards on ranks (0, 1, 1, 2)",
    ),
    (
        lambda: read_one({"sharding_type": "column_wise", "ranks": [0, 0, 1]}),
        "has 64 columns; 3 equal shards need a multiple; give shards",
    ),
]


@pytest.mark.parametrize(
    ("make", "message"), REFUSED, ids=lambda value: value[:60] if isinstance(value, str) else ""
)
def test_bad_plans_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, message.split(".*")))):
        make()
