"""Fuzzers of what comes from TorchRec: printed statistics, damaged and between other lines; fields of
configurations and constraints; and objects that are none of them."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import perfkit as pk
from perfkit.workloads.tables import EmbeddingTable, TableSet
from tests.fuzz.damage import Rng, choose, damage_file, damage_text, damage_tree, junk
from tests.fuzz.harness import Entry, Nonsense
from tests.planner_logs import LAYOUTS, TABLES, PrintedTable, write_statistics
from tests.torchrec_stand_ins import (
    CacheParams,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Module,
    ParameterConstraints,
)

PREFIXES = (
    "",
    "INFO:torchrec.distributed.planner.stats:",
    "2026-11-28 07:52:54,867 INFO [rank{}]:planner.stats:",
    "[default{}]:",
    "{}: ",
    "\x1b[32mI1128 stats.py:412]\x1b[0m ",
)
NOISE = ("", "loss 0.693", "# a comment", "######", "# 1  2  3 #", "WARNING: slow")
CONFIGS = (
    EmbeddingBagConfig(1_000_000, 64, "user", DataType.FP16, ["clicks", "likes"]),
    EmbeddingBagConfig(500, 32, "item", DataType.FP16, ["item"]),
)
RULES = {
    "user": ParameterConstraints(
        sharding_types=["row_wise", "column_wise"], min_partition=32, pooling_factors=[20.0, 3.5]
    ),
    "item": ParameterConstraints(
        compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(0.3), is_weighted=True
    ),
}
FIELDS = [asdict(config) for config in CONFIGS]


def draw_printed(rng: Rng) -> list[PrintedTable]:
    """Tables whole on some rank of four, with names that are all different."""
    return [
        PrintedTable(
            path=f"sparse.m{number % 2}.t{number}",
            sharding="TW",
            ranks=str(int(rng.integers(4))),
            rows=int(rng.integers(100, 10**7)),
            dim=int(choose(rng, (4, 16, 64, 128))),
            lookups=float(np.round(rng.uniform(1.5, 90), 3)),
        )
        for number in range(int(rng.integers(1, 30)))
    ]


def read_noisy(rng: Rng, folder: Path) -> None:
    """Statistics of several ranks at once, with lines of others between, are read exactly."""
    printed = draw_printed(rng)
    text = write_statistics(printed, ranks=4, layout=choose(rng, ("2023", "2026")))
    prefix = choose(rng, PREFIXES)
    writers = int(rng.integers(1, 4)) if "{}" in prefix else 1
    lines = []
    for line in text.splitlines():
        for writer in range(writers):
            lines.append(prefix.format(writer) + line)
        if rng.random() < 0.2:
            lines.append(choose(rng, NOISE))
    source: Any = lines
    if rng.random() < 0.7:
        source = folder / choose(rng, ("a.log", "slurm-1.out", "b.txt"))
        source.write_text(choose(rng, ("\n", "\r\n")).join(lines), encoding="utf-8")
    plan = pk.read_plan(source)
    if plan.owners != tuple(int(table.ranks) for table in printed):
        raise Nonsense(f"{plan} for {printed}")
    tables = pk.read_tables(source, itemsize=4)
    found = [(t.rows, t.dim, t.pooling) for t in tables]
    if found != [(t.rows, t.dim, t.lookups) for t in printed]:
        raise Nonsense(f"{found} for {printed}")


def read_damaged(rng: Rng, folder: Path) -> list[Any]:
    """Damaged statistics, as text or as a file, give tables and a plan of them, or nothing."""
    tables = choose(rng, (TABLES, TABLES[2:5], TABLES[:2]))
    text = write_statistics(tables, layout=choose(rng, list(LAYOUTS)))
    read: Callable[[Any], Any] = choose(rng, (pk.read_tables, pk.read_plan))
    if rng.random() < 0.5:
        return [read(damage_text(rng, text).split("\n"))]
    path = folder / choose(rng, ("a.log", "b.out"))
    path.write_bytes(damage_file(rng, text))
    return [read(path)]


def read_fields(rng: Rng, folder: Path) -> list[Any]:
    """Damaged fields of configurations in records, a file or objects, with damaged constraints."""
    records: Any = damage_tree(rng, FIELDS)
    source = records
    kind = int(rng.integers(3))
    if kind == 0:
        source = folder / "configs.json"
        source.write_text(json.dumps(FIELDS, default=str), encoding="utf-8")
        source.write_bytes(damage_file(rng, json.loads(source.read_text(encoding="utf-8"))))
        return [pk.read_tables(source)]
    if kind == 1:
        name = choose(rng, list(FIELDS[0]))
        source = [replace(CONFIGS[0], **{name: junk(rng)}), CONFIGS[1]]
        if rng.random() < 0.5:
            source = Module(sparse=Module(bags=EmbeddingBagCollection(source)))
    rules: Any = {name: asdict(rule) for name, rule in RULES.items()}
    if rng.random() < 0.5:
        rules = damage_tree(rng, rules)
    tables = pk.read_tables(source, constraints=rules)
    return [tables, *_restrict(rules, tables)]


def _restrict(rules: Any, tables: TableSet) -> list[Any]:
    """Constraints of a search, whose tables are those that there are."""
    found = pk.read_parameter_constraints(rules, tables)
    names = {table.name for table in tables}
    if not names.issuperset(found["forbid"]) or not names.issuperset(found["min_columns"]):
        raise Nonsense(f"{found} for {names}")
    return [list(found["min_columns"].values())]


def read_objects(rng: Rng, folder: Path) -> Any:
    """Objects that have something of TorchRec's, but not all."""
    parts = (
        *(
            "named_modules",
            "embedding_bag_configs",
            "embedding_configs",
            "plan",
            "_stats",
            "columns",
        ),
        *("num_embeddings", "embedding_dim", "feature_names", "sharding_types", "pooling_factors"),
    )
    values = (*CONFIGS, [*CONFIGS], lambda: [*CONFIGS], lambda: [], lambda: 5, 5, {"a": {}}, None)
    attributes = {name: choose(rng, values) for name in parts if rng.random() < 0.3}
    thing = SimpleNamespace(**attributes)
    history = EmbeddingCollection([EmbeddingConfig(10, 4, "h", feature_names=["h"])])
    sources = (thing, [thing], {"a": thing}, [CONFIGS[0], thing], Module(a=history, b=history))
    read: Callable[[Any], Any] = choose(rng, (pk.read_tables, pk.read_plan, _read_rules))
    return read(choose(rng, sources))


def _read_rules(constraints: Any) -> Any:
    """Constraints of two tables."""
    tables = [EmbeddingTable(10, 8, name="user"), EmbeddingTable(10, 8, name="a")]
    return [pk.read_parameter_constraints(constraints, tables)["min_columns"]]


ENTRIES: dict[str, Entry] = {
    "torchrec-noisy-logs": Entry(read_noisy, 0.3, new=True),
    "torchrec-damaged-logs": Entry(read_damaged, 0.5, new=True),
    "torchrec-fields": Entry(read_fields, 0.5, new=True),
    "torchrec-objects": Entry(read_objects, 0.3, new=True),
}
