"""What TorchRec's planner prints, in layouts of several years and between other lines: tables, plan,
and what is refused."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.readers.planner_statistics import read_planner_statistics
from perfkit.workloads.placement import Placement
from perfkit.workloads.tables import EmbeddingTable, TableSet
from tests import samples
from tests.planner_logs import LAYOUTS, TABLES, PrintedTable, write_statistics

pytestmark = pytest.mark.filterwarnings("ignore:shards of columns of")

ALL = (0, 1, 2, 3)
OWNERS = (
    Placement("row_wise", ALL),
    Placement("row_wise", ALL),
    Placement("column_wise", (0, 1, 3), (64, 64, 64)),
    Placement("data_parallel", ALL),
    2,
    Placement("table_row_wise", (2, 3)),
    Placement("table_column_wise", (0, 1), (80, 80)),
)
#: Two tables with nothing to say about.
PLAIN = (
    PrintedTable("sparse.user", "TW", "1", 4_000_000, 64, lookups=7.5),
    PrintedTable("sparse.item", "TW", "0", 1_000_000, 64, lookups=3.0),
)


def refuse(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


def read_quietly(source: Any, **options: Any) -> TableSet:
    """The tables of a source; its notes are tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pk.read_tables(source, **options)


@pytest.mark.parametrize("layout", ["2023", "2026"])
def test_each_table_and_its_placement_are_as_printed(layout: str) -> None:
    text = write_statistics(layout=layout)
    tables = read_quietly(text)
    for table, printed in zip(tables, TABLES, strict=True):
        assert f"{table.module}.{table.name}" == printed.path
        assert (table.rows, table.dim, table.itemsize) == (printed.rows, printed.dim, 4)
        assert table.pooling == printed.lookups
        assert table.weighted == printed.is_weighted
        assert table.load_factor == printed.load_factor
    assert tables.tables[4].kernel == "uvm_caching"
    assert tables.batch == 4 * 512
    assert tables.embedding == "fused"
    plan = pk.read_plan(text)
    assert plan.ranks == 4
    assert plan.owners == OWNERS
    assert plan.names[:3] == ("sparse.history.user", "sparse.bags.user", "item")
    assert plan.cut(tables.tables)


def test_kernels_that_nothing_prices_are_told_and_judged_by_nobody() -> None:
    log = write_statistics([replace(PLAIN[0], kernel="fused_new"), PLAIN[1]], ranks=2)
    tables = read_quietly(log)
    with pytest.warns(UserWarning, match="compute_kernel 'fused_new' of 'user' is unknown"):
        plan = pk.read_plan(log)
    modules = {
        "sparse": {
            "user": {"sharding_type": "table_wise", "compute_kernel": "fused_new", "ranks": [1]},
            "item": {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [0]},
        }
    }
    for source in (log, modules):
        with refuse("compute_kernel is 'fused_new'; known are fused, fused_uvm"):
            pk.judge_plan(tables, "h100-sxm-8", source, ranks=2, steps=1)
    assert pk.judge_plan(tables, "h100-sxm-8", plan, ranks=2, steps=1).yours.plan == plan


def test_the_samples_hold_what_their_script_says() -> None:
    old = samples.FOLDER / "planner.2023.err"
    assert pk.read_plan(old).owners == OWNERS
    assert read_quietly(old).tables == read_quietly(write_statistics()).tables
    assert pk.read_plan(samples.FOLDER / "planner.2026.err").owners == OWNERS[2:5]


def test_a_printed_plan_is_priced_with_its_own_tables() -> None:
    text = write_statistics(PLAIN, ranks=2, batch=4096)
    tables = pk.read_tables(text)
    mine = pk.price_plan(tables, "h100-sxm-8", pk.read_plan(text))
    own = TableSet(
        (EmbeddingTable(4_000_000, 64, 7.5), EmbeddingTable(1_000_000, 64, 3.0)),
        batch=8192,
        embedding="fused",
    )
    assert mine.time == pk.price_plan(own, "h100-sxm-8", pk.Plan(2, (1, 0))).time


#: What launchers and loggers write before each line, and lines of others between.
PREFIXES = {
    "nothing": "",
    "logging": "INFO:torchrec.distributed.planner.stats:",
    "time": "2026-11-28 07:52:54,867 INFO [rank0]:torchrec.distributed.planner.stats:",
    "torchrun": "[default0]:",
    "mpirun": "[1,0]<stdout>:",
    "srun": " 0: ",
    "colours": "\x1b[32mI1128 07:52:54 stats.py:412]\x1b[0m ",
    "number sign": "job #17 on node#3: ",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_prefixes_and_lines_of_others_change_nothing(prefix: str, tmp_path: Path) -> None:
    lines = write_statistics(PLAIN, ranks=2).splitlines()
    noisy = ["# of epochs is 3", "starting"]
    for line in lines:
        noisy += [f"{prefix}{line}", "loss 0.69 # step 1"]
    path = tmp_path / "slurm-17.out"
    path.write_text("\n".join(noisy), encoding="utf-8")
    for source in (path, str(path), path.read_text(encoding="utf-8"), noisy):
        assert pk.read_plan(source).owners == (1, 0)
        assert pk.read_tables(source).tables == pk.read_tables(lines).tables
    assert pk.read_tables(path).name == "slurm-17"


def test_ranks_that_print_at_once_say_the_same_once() -> None:
    one = write_statistics(PLAIN, ranks=2).splitlines()
    together = []
    for line in one:
        together += [f"[rank0]:{line}", f"[rank1]:{line}"]
    assert pk.read_plan(together).owners == (1, 0)
    assert pk.read_plan([*one, *one]).owners == (1, 0)
    moved = (PLAIN[0], replace(PLAIN[1], ranks="1"))
    other = write_statistics(moved, ranks=2).splitlines()
    with refuse("several statistics that differ, at lines 2 and"):
        pk.read_plan([*one, *other])


def test_a_printed_list_of_lines_is_read() -> None:
    lines = write_statistics(PLAIN, ranks=2).splitlines()
    assert pk.read_plan(f"[rank0]: {lines!r}").owners == (1, 0)


def test_sizes_of_numbers_are_those_of_the_printed_weights() -> None:
    halves = [replace(table, itemsize=2) for table in PLAIN]
    assert {table.itemsize for table in pk.read_tables(write_statistics(halves, ranks=2))} == {2}
    old = write_statistics(halves, ranks=2, layout="2023")
    with refuse(
        "'sparse.user' has numbers of 1.02 GB at 4 B each, and takes 512 MB; pass itemsize="
    ):
        pk.read_tables(old)
    assert {table.itemsize for table in pk.read_tables(old, itemsize=2)} == {2}
    assert pk.read_plan(old).owners == (1, 0)
    mixed = write_statistics([replace(PLAIN[0], itemsize=2, kernel="fused_uvm"), PLAIN[1]], ranks=2)
    assert [table.itemsize for table in pk.read_tables(mixed)] == [2, 4]
    one_kernel = write_statistics([replace(PLAIN[0], itemsize=2), PLAIN[1]], ranks=2)
    assert [table.itemsize for table in pk.read_tables(one_kernel)] == [2, 4]
    assert pk.read_plan(mixed).owners == (1, 0)
    with pytest.warns(UserWarning, match=r"the size of numbers is not printed, and 4 B \(FP32\)"):
        pk.read_tables(write_statistics(PLAIN, ranks=2, layout="2023"))


def test_what_is_left_out_is_said_once() -> None:
    tables = pk.read_tables(write_statistics())
    assert [table.results for table in tables] == [40.5, 2, 1, 1, 1, 1, 1]
    usual = [replace(table, lookups=1.0) for table in PLAIN]
    with pytest.warns(UserWarning, match="1 lookup a sample, which TorchRec takes without"):
        pk.read_tables(write_statistics(usual, ranks=2))


def test_memory_and_ranks_are_those_that_are_printed() -> None:
    found = read_planner_statistics(write_statistics())
    gb = 2**30
    assert [usage.rank for usage in found.usage] == [0, 1, 2, 3]
    assert found.usage[1][1:] == (0.5 * gb, 0.25 * gb, 2.5e-3)
    assert (found.reserved, found.planned) == (12 * gb, 68 * gb)
    assert (found.dense, found.inputs) == (0.5 * gb, 0.25 * gb)
    assert found.kernels == {"dense": 1, "fused": 5, "fused_uvm_caching": 1}


def test_the_oldest_layout_needs_the_tables() -> None:
    log = write_statistics(PLAIN, ranks=2, layout="2022")
    tables = [EmbeddingTable(1000, 64, name=name) for name in ("item", "user")]
    assert pk.read_plan(log, tables=tables).owners == (0, 1)
    with refuse("has no columns Emb Dim and Hash Size"):
        pk.read_plan(log)
    split = (replace(PLAIN[0], sharding="CW", ranks="0-1"), PLAIN[1])
    log = write_statistics(split, ranks=2, layout="2022")
    owner = pk.read_plan(log, tables=tables).owners[1]
    assert owner == Placement("column_wise", (0, 1), (32, 32))


def test_tables_of_configurations_are_found_by_module_and_name() -> None:
    text = write_statistics()
    tables = list(read_quietly(text))[::-1]
    plan = pk.read_plan(text, tables=tables)
    assert plan.owners == OWNERS[::-1]
    bare = [replace(table, module="") for table in tables]
    with refuse(
        "which of the tables 'sparse.history.user' is cannot be told; give EmbeddingTable its"
    ):
        pk.read_plan(text, tables=bare)
    with refuse("'sparse.history.user' is not in tables"):
        pk.read_plan(text, tables=tables[:5])
    with refuse("'more' of tables is not in source"):
        pk.read_plan(text, tables=[*tables, EmbeddingTable(1, 1, name="more")])
    wide = [*tables[:-1], replace(tables[-1], dim=128)]
    with refuse("Emb Dim of 'sparse.history.user' is 64, and 128 in tables"):
        pk.read_plan(text, tables=wide)


def test_columns_that_do_not_divide_leave_a_narrow_shard_that_is_told() -> None:
    uneven = (replace(PLAIN[0], sharding="CW", ranks="0,1", width=48), PLAIN[1])
    with pytest.warns(UserWarning, match="not printed which rank has the narrower one"):
        owner = pk.read_plan(write_statistics(uneven, ranks=2)).owners[0]
    assert owner == Placement("column_wise", (0, 1), (48, 16))


def test_a_part_of_the_statistics_is_enough_if_it_says_the_ranks() -> None:
    lines = write_statistics(PLAIN, ranks=2).splitlines()
    head = next(number for number, line in enumerate(lines) if "FQN" in line)
    part = lines[head : head + 4]
    assert len(pk.read_tables(part, itemsize=4)) == 2
    assert pk.read_plan(part, ranks=2).owners == (1, 0)
    with refuse("source has no table of ranks; pass ranks="):
        pk.read_plan(part)
    everywhere = (replace(PLAIN[0], sharding="RW", ranks="0-1"), PLAIN[1])
    lines = write_statistics(everywhere, ranks=2).splitlines()
    assert pk.read_plan(lines[head : head + 4]).ranks == 2


def change(old: str, new: str) -> str:
    """Statistics of two tables, one text of which is another."""
    text = write_statistics(PLAIN, ranks=2)
    assert old in text
    return text.replace(old, new)


def cut(first: str, lines: int) -> str:
    """Statistics without some lines."""
    kept = write_statistics(PLAIN, ranks=2).splitlines()
    start = next(number for number, line in enumerate(kept) if first in line)
    return "\n".join(kept[:start] + kept[start + lines :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "FQN\nSharding",
            "source has no statistics of TorchRec's planner; they are in '\\n'.join(",
        ),
        (
            write_statistics(PLAIN, has_parameters=False),
            "without the table of parameters (FQN, Sharding, ...); make the planner with debug=True",
        ),
        (cut("Reserved Memory", 99), "end early, without their last line of #; pass them whole"),
        (cut("sparse.item", 1), "lists 1 tables from line 2 on, and counts 2 by compute kernel"),
        (cut("0.5 (1%)", 1), "line 7 is of rank 1 after 0 ranks; lines were lost"),
        (change("  TW  ", "  XW  "), "Sharding is 'XW'; known are DP, TW, CW, RW, TWRW, TWCW, GS"),
        (
            change("  TW  ", "  GS  "),
            "'sparse.user' is split by columns and by rows (GS, grid_shard)",
        ),
        (change("  4000000  ", "      4e6  "), "Hash Size is '4e6'; it must be a whole number"),
        (change(" 4000000  ", " 4000  000"), "has 17 cells for the 16 columns of its table"),
        (change("       1   #", "     1-0   #"), "Ranks is '1-0'; it must be as 0-7, or as 0,2,5"),
        (change("       1   #", "    None   #"), "the planner found no plan; read_tables reads"),
        (change("       1   #", "     0,1   #"), "a table_wise table must be on one rank"),
        (change("       1   #", "       7   #"), "table 0 is placed on rank 7"),
        (
            change("      64   ", "  64 (32)   ").replace("  TW  ", "  CW  "),
            "and 1 ranks; they must",
        ),
        (change("   pooled", "  pooling"), "Output is 'pooling'; it must be pooled or sequence"),
    ],
    ids=range(15),
)
def test_statistics_that_cannot_be(text: str, message: str) -> None:
    with refuse(message):
        pk.read_plan(text)


@pytest.mark.parametrize("source", [None, 5, {"m": {}}, [], [1], object()])
def test_what_is_not_printed_is_refused_with_the_next_step(source: Any) -> None:
    with refuse("it must be what TorchRec's planner prints"):
        pk.read_plan(source)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_thousands_of_tables_are_read_fast(layout: str) -> None:
    """3,000 lines took 0.1 s when this was written; only a square would take seconds."""
    many = [
        PrintedTable(f"sparse.ebc.t{number}", "TW", str(number % 8), 1000 + number, 64, lookups=2.0)
        for number in range(3000)
    ]
    tables = [EmbeddingTable(t.rows, 64, 2.0, name=t.path.rpartition(".")[2]) for t in many]
    text = write_statistics(many, ranks=8, layout=layout)
    assert pk.read_plan(text, tables=tables).owners == tuple(i % 8 for i in range(3000))
