"""Plans: what lies where, in and out of files, and what is refused."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfkit as pk
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KIND_OF_NAME, KINDS, PlacementKind, Reach
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


def cut_mixed() -> dict[int, list[tuple[int, ...]]]:
    """Rank, first row, rows, first column and columns of the shards of each table of `MIXED`."""
    parts: dict[int, list[tuple[int, ...]]] = {}
    for shard in MIXED.cut(TABLES):
        parts.setdefault(shard.table, []).append(shard[1:])
    return parts


def test_every_kind_is_cut_into_its_shards() -> None:
    parts = cut_mixed()
    assert parts[0] == [(2, 0, 10, 0, 64)]
    assert parts[1] == [(0, 0, 10, 0, 48), (3, 0, 10, 48, 16)]
    rows = [(0, 0, 3, 0, 64), (1, 3, 3, 0, 64), (2, 6, 3, 0, 64), (3, 9, 1, 0, 64)]
    assert parts[2] == rows, "rounded up, as TorchRec"
    assert parts[3] == [(rank, 0, 10, 0, 64) for rank in range(4)]
    assert parts[4] == [(2, 0, 5, 0, 64), (3, 5, 5, 0, 64)]
    assert parts[5] == [(1, 0, 10, 0, 32), (0, 0, 10, 32, 32)]
    assert {placement.kind for placement in MIXED.placements} == set(KINDS)


def test_a_kind_that_nothing_prices_is_refused() -> None:
    with pytest.raises(ValueError, match="tiled_wise splits columns and rows; nothing cuts or"):
        PlacementKind("tiled_wise", "tiled", Reach.EVERY_RANK, True, True)


@given(st.data())
def test_shards_tile_the_table(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    n = data.draw(st.integers(1, 6))
    rows = data.draw(st.integers(n, 50))
    columns = n * data.draw(st.integers(1, 9))
    ranks = tuple(data.draw(st.permutations(range(n))))
    if KIND_OF_NAME[kind].is_whole:
        ranks = ranks[:1]
    shards = Placement(kind, ranks).cut(EmbeddingTable(rows, columns), 7)
    seen = np.zeros((rows, columns), dtype=int)
    for shard in shards:
        assert shard.table == 7
        assert shard.rank in ranks
        last_row = shard.first_row + shard.rows
        last_column = shard.first_column + shard.columns
        seen[shard.first_row : last_row, shard.first_column : last_column] += 1
    copies = len(ranks) if KIND_OF_NAME[kind].is_copied else 1
    assert (seen == copies).all()


def test_whole_tables_are_numbers() -> None:
    plan = Plan(2, (Placement("table_wise", (1,)), 0))
    assert plan.owners == (1, 0)
    assert plan == Plan.from_owners(np.array([1, 0]), ranks=2)
    assert plan.tables_of(1) == (0,)
    assert hash(plan) == hash(Plan(2, (1, 0), ("x", "y"))), "names are for files alone"


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    back = Plan.load(MIXED.save(tmp_path / "plan.json"))
    assert back == MIXED
    assert back.names == MIXED.names
    data = json.loads(MIXED.to_json())
    assert data["format"] == 1
    assert data["tables"][1] == {
        "name": "b",
        "kind": "column_wise",
        "ranks": [0, 3],
        "columns": [48, 16],
    }
    for plan in (Plan.round_robin(3, ranks=2), Plan(2, ())):
        assert Plan.from_json(plan.to_json()) == plan


def test_names_of_a_file_are_not_in_its_repr() -> None:
    hostile = Plan.from_json(file(entry={"name": "<script>"}))
    assert hostile.names == ("<script>",)
    assert "<script>" not in repr(hostile)


def test_torchrec_dictionary() -> None:
    plan = MIXED.to_torchrec(TABLES, module="sparse.ebc")
    assert list(plan) == ["sparse.ebc"]
    tables = plan["sparse.ebc"]
    assert list(tables) == list("abcdef")
    assert tables["b"] == {
        "sharding_type": "column_wise",
        "compute_kernel": "fused",
        "ranks": [0, 3],
        "shards": [
            {"shard_offsets": [0, 0], "shard_sizes": [10, 48], "placement": "rank:0/cuda:0"},
            {"shard_offsets": [0, 48], "shard_sizes": [10, 16], "placement": "rank:3/cuda:1"},
        ],
    }
    assert tables["d"] == {
        "sharding_type": "data_parallel",
        "compute_kernel": "dense",
        "ranks": [0, 1, 2, 3],
    }, "TorchRec refuses shards that overlap"
    assert json.loads(json.dumps(plan)) == plan, "plain values only"
    back = Plan.from_torchrec(plan, TABLES, ranks=4)
    assert back.placements[1:3] == MIXED.placements[1:3]
    assert back.cut(TABLES) == MIXED.cut(TABLES)


def test_a_plan_of_torchrec_may_have_tables_of_several_modules() -> None:
    tables = MIXED.to_torchrec(TABLES, module="sparse.ebc")["sparse.ebc"]
    first = {name: tables[name] for name in "abc"}
    second = {name: tables[name] for name in "def"}
    plan = Plan.from_torchrec({"x": first, "y": second}, TABLES, ranks=4)
    assert plan.cut(TABLES) == MIXED.cut(TABLES)


def read_one(entry: dict[str, Any], *, ranks: int = 3) -> Plan:
    """A plan of one table of 1,000 rows and 64 columns in TorchRec's form."""
    tables = [EmbeddingTable(1000, 64, name="t0")]
    return Plan.from_torchrec({"sparse.ebc": {"t0": entry}}, tables, ranks=ranks)


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
    tables = [EmbeddingTable(1000, 64, name="t0")]
    with pytest.warns(UserWarning, match="shards of columns of 't0' that lie on one rank are"):
        plan = read_one(entry)
    assert plan.placements == (Placement("column_wise", (0, 1, 2), (16, 32, 16)),)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_torchrec(plan.to_torchrec(tables, module="m"), tables, ranks=3) == plan
    lookups = pk.TableSet(tuple(tables), batch=384)
    price = pk.price_plan(lookups, "h100-sxm-8", plan)
    assert price.table()["weights_bytes"].to_list() == [64_000, 128_000, 64_000]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"compute_kernel": "fused_uvm"},
            "the plan has fused_uvm (in host memory) for 't0', the tables do not",
        ),
        (
            {"compute_kernel": "fused_uvm_caching"},
            "the plan has fused_uvm_caching (in host memory)",
        ),
        ({"compute_kernel": "key_value"}, "has key_value (in host memory or on an SSD) for 't0'"),
        ({"compute_kernel": "quant"}, "the plan has quant (of fewer bits) for 't0'"),
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


def whole(rank: int) -> Placement:
    """A whole table on one rank."""
    return Placement("table_wise", (rank,))


def refuse(message: str) -> Any:
    """Expects an error with this message, in which `.*` stands for any words."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, message.split(".*"))))


@pytest.mark.parametrize(
    ("kind", "ranks", "columns", "message"),
    [
        ("diagonal", (0,), (), "kind is 'diagonal'; known are table_wise"),
        ("table_wise", (), (), "a table_wise table is on ranks (); name at least one"),
        ("column_wise", (1, 1), (), "is on ranks (1, 1); name at least one, and none twice"),
        ("table_wise", (0, 1), (), "a table_wise table must be on one rank, not on (0, 1)"),
        ("table_wise", 3, (), "ranks of a table_wise placement is 3; it must be a sequence"),
        (
            "row_wise",
            (0, 1),
            (4, 4),
            "columns (4, 4) do not belong to a row_wise placement on 2 ranks",
        ),
    ],
)
def test_bad_placements_are_refused(kind: Any, ranks: Any, columns: Any, message: str) -> None:
    with refuse(message):
        Placement(kind, ranks, columns)


@pytest.mark.parametrize(
    ("ranks", "placements", "message"),
    [
        (
            2,
            (Placement("column_wise", (0, 2)),),
            "table 0 is placed on rank 2; ranks go from 0 to 1",
        ),
        (
            3,
            (0, Placement("row_wise", (0, 1))),
            "table 1 is row_wise on 2 of 3 ranks; it must name all",
        ),
    ],
)
def test_plans_of_ranks_that_do_not_fit_are_refused(
    ranks: int, placements: Any, message: str
) -> None:
    with refuse(message):
        Plan(ranks, placements)


def test_a_plan_with_too_few_names_is_refused() -> None:
    with refuse("names has 1 entries for 2 tables"):
        Plan(2, (0, 1), ("a",))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (-1, "tables is -1; it must be a whole number above 0"),
        (2**62, "tables is 4611686018427387904; it must be .* at most 1e+07"),
    ],
)
def test_bad_numbers_of_tables_are_refused(tables: int, message: str) -> None:
    with refuse(message):
        Plan.round_robin(tables, ranks=2)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, True], "table 1 is placed on rank True; ranks go from 0 to 1"),
        (["1"], "table 0 is placed on rank '1'"),
        ([-1], "table 0 is placed on rank -1"),
        (3, "owners is 3; it must be a sequence"),
    ],
)
def test_bad_owners_are_refused(owners: Any, message: str) -> None:
    with refuse(message):
        Plan.from_owners(owners, ranks=2)


def test_tables_of_a_rank_are_refused_where_one_is_cut() -> None:
    with refuse("table 1 is column_wise; here every table must be whole on one rank"):
        MIXED.tables_of(0)


def test_a_plan_of_more_tables_than_there_are_is_not_cut() -> None:
    with refuse("plan places 6 tables; there are 5"):
        MIXED.cut(TABLES[:5])


def test_a_plan_does_not_cut_columns_into_unequal_shards() -> None:
    with refuse("'a' has 64 columns; 3 equal shards"):
        Plan(3, (Placement("column_wise", (0, 1, 2)),)).cut(TABLES[:1])


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            Placement("column_wise", (0, 1), (40, 20)),
            "have 60 columns together; the table 64",
        ),
        (Placement("row_wise", tuple(range(11))), "'a' has 10 rows; it cannot be split"),
    ],
)
def test_shards_that_do_not_tile_the_table_are_refused(placement: Placement, message: str) -> None:
    with refuse(message):
        placement.cut(TABLES[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: Expecting"),
        (file(format=2), "format is 2; this perfkit reads format 1"),
        (file(ranks=0), "ranks is 0; it must be a whole number above 0"),
        (file(tables=list(range(200_001))), "tables has 200001 entries; it may have 200000"),
        (
            file(entry={"kind": "whole"}),
            "tables[0]: kind is 'whole'; known are table_wise",
        ),
        (
            file(entry={"ranks": [0, "x"]}),
            "tables[0].ranks[1] is 'x'; it must be a whole number",
        ),
        (
            file(entry={"ranks": [0, 1]}),
            "tables[0]: a table_wise table must be on one rank",
        ),
        (
            json.dumps(MIXED.to_torchrec(TABLES, module="m")),
            "modules with tables as in TorchRec; read it with json.load and pass the dictionary to",
        ),
    ],
    ids=lambda text: text[:60],
)
def test_bad_files_of_plans_are_refused(text: str, message: str) -> None:
    with refuse(message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"m": {"z": {}}}, "'a' is in the tables only"),
        (
            {"m": {"a": {"sharding_type": "diagonal_wise", "ranks": [0]}}},
            "m.a: sharding_type is 'diagonal_wise'; known are table_wise",
        ),
        ({"x": {"a": {}}, "y": {"a": {}}}, "'a' is twice in the plan, as x.a and as y.a"),
    ],
)
def test_bad_plans_of_torchrec_are_refused(plan: Any, message: str) -> None:
    with refuse(message):
        Plan.from_torchrec(plan, TABLES[:1], ranks=2)


def test_tables_of_several_modules_may_share_a_name() -> None:
    tables = [
        EmbeddingTable(10, 64, name="user", module="sparse.bags"),
        EmbeddingTable(20, 32, name="user", module="history"),
        EmbeddingTable(30, 16, name="item", module="history"),
        EmbeddingTable(40, 16, name="rest", module="rest"),
    ]
    plan = Plan(2, (1, Placement("row_wise", (0, 1)), 0, 1))
    written = plan.to_torchrec(tables)
    assert {path: list(part) for path, part in written.items()} == {
        "sparse.bags": ["user"],
        "history": ["user", "item"],
        "rest": ["rest"],
    }
    assert written["history"]["user"]["shards"][1]["shard_offsets"] == [10, 0]
    read = Plan.from_torchrec(written, tables[::-1], ranks=2)
    assert read.owners == plan.owners[::-1]
    assert read.names == ("rest", "item", "history.user", "sparse.bags.user")
    with refuse("two tables of module 'm' are named 'user'"):
        plan.to_torchrec(tables, module="m")
    with refuse("'more.item' is in the plan only"):
        Plan.from_torchrec({**written, "more": {"item": {}}}, tables, ranks=2)
    with refuse("two tables are 'history.item'"):
        Plan.from_torchrec(written, [*tables, tables[2]], ranks=2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            json.loads(MIXED.to_json()),
            "it is a plan that perfkit wrote; read it with Plan.load or Plan.from_json",
        ),
        ("plan.json", "plan is 'plan.json'; it must be a mapping"),
    ],
    ids=["file", "name"],
)
def test_what_is_no_plan_of_torchrec_is_refused(plan: Any, message: str) -> None:
    with refuse(message):
        Plan.from_torchrec(plan, TABLES, ranks=4)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**TWO_ON_ONE, "ranks": [0, 2]}, "has ranks [0, 2] and shards on ranks (0, 1, 1, 2)"),
        (
            {"sharding_type": "column_wise", "ranks": [0, 0, 1]},
            "has 64 columns; 3 equal shards need a multiple; give shards",
        ),
    ],
    ids=["ranks", "columns"],
)
def test_columns_of_torchrec_that_contradict_their_ranks_are_refused(
    entry: dict[str, Any], message: str
) -> None:
    with refuse(message):
        read_one(entry)
