"""Fuzzers of the Python interface and of the command line: odd arguments in every place."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.__main__ import main
from perfkit.communication import ALGORITHMS
from perfkit.fitting import Fit
from perfkit.gallery import load_platform
from perfkit.hardware import Device, Link, MemoryLevel, Network, Quantity
from perfkit.models.collectives import OPERATIONS
from perfkit.models.distributions import Uniform, Zipf
from perfkit.platform import Platform
from perfkit.prediction.contrast import compare
from perfkit.prediction.result import Prediction, predict
from perfkit.sharding.planner import price_plan, shard
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.shards import KINDS
from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables
from perfkit.workloads.transformer import Transformer
from tests.fuzz.harness import NUMBERS, TEXTS, Entry, Nonsense, Rng, check_time, choose, damage_tree, junk, share

PLATFORMS = ("zen5-2", "h100-sxm-8", "a100-sxm-8x8", "v100-sxm-8", "p100-1")
SIZES = (1, 2, 3, 4, 8, 16, 64, 100, 4096, 1e6, 2**31, 2**53 + 1, 2**62, np.int64(8), np.float32(16))
BATCHES = (16, 32, 64, 160, 4096, np.int64(64), 2**20, 2**40, 2**62, 7)
TABLES = (EmbeddingTable(1000, 16), EmbeddingTable(10**6, 64, 20, 1.1), EmbeddingTable(8, 4, 2, name="a\nb"))


def vary(rng: Rng, given: dict[str, Any], odd: float = 0.3) -> dict[str, Any]:
    """Some of the arguments, one of them damaged or odd now and then."""
    found = {name: value for name, value in given.items() if rng.random() < 0.6}
    while found and rng.random() < odd:
        name = choose(rng, list(found))
        found[name] = damage_tree(rng, found[name]) if rng.random() < 0.5 else junk(rng)
    return found


def pick(rng: Rng, *items: Any) -> Any:
    """One of the items, or something odd now and then."""
    return junk(rng) if rng.random() < 0.05 else choose(rng, items)


def check(time: Any) -> None:
    """Hold times of any shape against sense."""
    if not np.all(np.isfinite(time) & (np.asarray(time) >= 0)):
        raise Nonsense(f"times {time}")


def look_at(found: Prediction, rng: Rng) -> None:
    """Hold a prediction and its views against sense."""
    check_time(found.interval()[0], found.time, found.interval()[1])
    views: list[Callable[[], Any]] = [
        found.breakdown,
        found.timeline,
        found.modules,
        found.communication,
        found.explain,
        found._repr_html_,
        lambda: found.timeline(pick(rng, "module", "stage"), depth=pick(rng, None, 1, 2)),
        lambda: found.modules(pick(rng, 1, None), rank=pick(rng, None, 0, 1)),
        found.critical_path,
        found.idle,
        lambda: found.interval(pick(rng, 0.5, 0.999)),
    ]
    choose(rng, views)()
    if not math.isclose(found.breakdown()["time_s"].sum(), found.time, rel_tol=1e-9):
        raise Nonsense("parts do not sum to the time")
    check([found.lower_bound, found.serial, found.latency, found.spread])


# Workloads.


def dlrm(rng: Rng) -> DLRM:
    """A DLRM, or what refuses to be one."""
    count = int(rng.integers(1, 4))
    given = {
        "preset": choose(rng, (None, "dlrm-ddp")),
        "batch": choose(rng, BATCHES),
        "dim": choose(rng, SIZES),
        "rows": choose(rng, (1000, [int(choose(rng, SIZES)) for _ in range(count)])),
        "pooling": choose(rng, (1, 2.5, [3] * count)),
        "exponent": choose(rng, (0, 1.05, [0.5] * count)),
        "bottom": [16],
        "top": [32, 16],
        "features": choose(rng, SIZES),
        "sparse": True,
        "embedding": choose(rng, ("separate", "fused", "exact")),
        "loop": choose(rng, ("lean", "reference")),
        "fused": True,
        "mixed": rng.random() < 0.2,
        "dtype": choose(rng, ("fp32", "fp32", "bf16", "fp16")),
        "optimizer": choose(rng, ("sgd", "sgd", "adagrad")),
        "interaction": choose(rng, ("dot", "cross")),
        "cross": (2, 8),
        "overlap": True,
        "compiled": True,
        "table_dtype": choose(rng, ("fp32", "bf16")),
    }
    return DLRM(**vary(rng, given, 0.2))


def transformer(rng: Rng) -> Transformer:
    """A Transformer, or what refuses to be one."""
    name = choose(rng, ("bert-base", "gpt2"))
    given = {
        "preset": name,
        "batch": choose(rng, BATCHES),
        "sequence": choose(rng, (1, 16, 64, 100, 2**40)),
        "hidden": choose(rng, (768, 96, 2**20)),
        "heads": choose(rng, (2, 4)),
        "vocabulary": choose(rng, SIZES),
        "positions": choose(rng, (128, 4096, 2**62)),
        "attention": choose(rng, ("fused", "eager")),
        "dtype": choose(rng, ("fp32", "fp32", "bf16")),
        "optimizer": choose(rng, ("adamw", "sgd")),
        "fused": True,
        "mixed": rng.random() < 0.2,
        "overlap": False,
    }
    layers = choose(rng, (1, 2, 3, 1, 2, 3, 1, 2, "x", 0, 2.5, 10**400))
    return (Transformer.gpt2 if name == "gpt2" else Transformer.bert)(
        **({"preset": name} | vary(rng, given, 0.2) | {"layers": layers})
    )


def build(rng: Rng, folder: Path) -> None:
    """Workloads that are only built and written down."""
    found = choose(rng, (dlrm, transformer))(rng)
    repr(found), found.description


def predicted(make: Callable[[Rng], Any]) -> Entry:
    """Workloads that are predicted, with all views."""

    def run(rng: Rng, folder: Path) -> None:
        more = vary(rng, {"ranks": choose(rng, (1, 1, 2, 8, 16)), "slowdown": {0: 1.5}}, 0.1)
        look_at(predict(make(rng), pick(rng, *PLATFORMS), **more), rng)

    return share(0.5)(run)


def tables(rng: Rng) -> list[EmbeddingTable]:
    """Tables, or what refuses to be some."""
    given = {
        "pooling": choose(rng, (1, 2.5, 8)),
        "exponent": choose(rng, (0, 0.5, 1.05)),
        "itemsize": 4,
        "name": choose(rng, TEXTS),
        "law": choose(rng, (None, Uniform(10**7), Zipf(2000, 1.1))),
        "spread": 1.0,
    }
    return [
        EmbeddingTable(pick(rng, *SIZES), pick(rng, *SIZES), **vary(rng, given, 0.1))
        for _ in range(int(rng.integers(1, 4)))
    ]


def table_set(rng: Rng, folder: Path) -> None:
    """Tables and sets of them."""
    if rng.random() < 0.2:
        given = {"seed": 1, "correlation": 0.5, "itemsize": 4}
        draw_tables(pick(rng, 1, 5), **vary(rng, given, 0.5))
    own: Any = tables(rng)
    given = {"batch": 64, "embedding": "fused", "sparse": True, "optimizer": "sgd", "name": "x"}
    found = TableSet(junk(rng) if rng.random() < 0.05 else own, **vary(rng, given))
    repr(found), found.table(), found.nbytes, list(found)


# Plans.


def plan(rng: Rng) -> Plan:
    """A plan, or what refuses to be one."""
    ranks = pick(rng, 2, 4)
    owners: list[Any] = []
    for _ in TABLES:
        placed = (
            pick(rng, *KINDS),
            pick(rng, (0,), (0, 1), (1, 0, 2, 3), [0, 1]),
            pick(rng, (), (), (8, 8), (2, 2)),
        )
        owners.append(int(rng.integers(0, 2)) if rng.random() < 0.5 else Placement(*placed))
    if rng.random() < 0.1:
        owners = junk(rng)
    if rng.random() < 0.1:
        return Plan.round_robin(pick(rng, 3), ranks=ranks)
    return (
        Plan(ranks, owners, pick(rng, (), ("a", "b", "c")))
        if rng.random() < 0.7
        else Plan.from_owners(owners, ranks=ranks)
    )


def plans(rng: Rng, folder: Path) -> None:
    """Plans, written and read, priced and predicted."""
    found = plan(rng)
    if Plan.from_json(found.to_json()) != found:
        raise Nonsense("another plan is read back")
    repr(found), found.placements, found.cut(TABLES), found.to_torchrec(TABLES)
    where = choose(rng, PLATFORMS)
    more = vary(rng, {"memory": 1e9, "objective": "additive", "inputs": "exchanged"})
    price = price_plan(TableSet(TABLES, batch=64), where, found, **more)
    check_time(price.interval()[0], price.time, price.interval()[1], zero=True)
    repr(price), price.table(), price.next_move()
    look_at(
        predict(DLRM(rows=[100] * 3, dim=16, bottom=[16], top=[16], batch=64), where, ranks=found.ranks, plan=found),
        rng,
    )


@share(0.05)
def sharded(rng: Rng, folder: Path) -> None:
    """Searches with constraints."""
    given = {
        "memory": choose(rng, (1e9, 1e8, 70e6)),
        "objective": "additive",
        "seed": 1,
        "pin": {0: 1},
        "together": [(0, 1)],
        "apart": [(1, 2)],
        "forbid": {1: ["row_wise"]},
        "inputs": "exchanged",
    }
    seconds = pick(rng, 1e-3)
    found = shard(
        TableSet(TABLES, batch=64),
        pick(rng, *PLATFORMS),
        ranks=pick(rng, 1, 2, 4),
        seconds=seconds if seconds in (1e-3, "x") else 1e-3,
        **vary(rng, given),
    )
    price = found.prediction
    check_time(price.interval()[0], price.time, price.interval()[1], zero=True)
    repr(found), found.explain(), found.compare()


# Platforms.


@lru_cache
def numbers(name: str) -> tuple[Any, ...]:
    """Records of a platform, from small to large."""
    platform = load_platform(name)
    records = [platform, platform.device, platform.network, *platform.device.memory, *platform.device.peaks.values()]
    return (
        *records,
        *platform.network.links.values(),
        *platform.kernels.values(),
        *platform.collectives.values(),
        *platform.host.values(),
    )


def by_hand(rng: Rng, folder: Path) -> None:
    """A platform one of whose records was changed or made anew."""
    platform = load_platform(choose(rng, PLATFORMS))
    old = choose(rng, numbers(platform.name))
    kinds = (Platform, Device, Network, MemoryLevel, Quantity, Link, Fit)
    assert isinstance(old, kinds)
    name = choose(rng, [item.name for item in fields(old)])
    value = getattr(old, name)
    value = (
        choose(rng, NUMBERS)
        if isinstance(value, int | float) and rng.random() < 0.7
        else damage_tree(rng, dict(value) if hasattr(value, "items") else value)
    )
    new = replace(old, **{name: value})

    def put(record: Any) -> Any:
        if record is old:
            return new
        if isinstance(record, kinds) and not isinstance(record, Quantity | Fit):
            return replace(record, **{item.name: put(getattr(record, item.name)) for item in fields(record)})
        if isinstance(record, dict):
            return {key: put(entry) for key, entry in record.items()}
        return tuple(map(put, record)) if isinstance(record, tuple) else record

    changed = put(platform)
    repr(changed), changed.table(), changed._repr_html_()
    again = Platform.from_toml(changed.to_toml())
    if Platform.from_toml(again.to_toml()) != again:
        raise Nonsense("another platform is read back")
    look_at(predict(DLRM(rows=[100] * 2, dim=16, bottom=[16], top=[16], batch=64), changed), rng)


def methods(rng: Rng, folder: Path) -> None:
    """Methods of platforms with odd arguments."""
    platform = load_platform(choose(rng, PLATFORMS))
    size, ranks = pick(rng, 0, 1, 4e3, 1e9, [1e3, 1e6]), pick(rng, 1, 2, 4, 8, 16, 64)
    operation, way = pick(rng, *OPERATIONS), pick(rng, None, *ALGORITHMS, "rail")
    sizes = {"flops": 1e9, "nbytes": 1e6, "m": 10, "n": 10, "k": 10, "batch": 1}

    def estimated(estimate: Any) -> None:
        check_time(estimate.interval()[0], estimate.time, estimate.interval()[1], zero=True)
        repr(estimate), estimate.explain(), estimate.interval(pick(rng, 0.5))

    def derived(variant: Platform) -> None:
        repr(variant), variant.to_toml(), variant.table()
        estimated(variant.gemm(512, 512, 512))

    calls: list[Callable[[], Any]] = [
        lambda: estimated(platform.collective(operation, size, ranks=ranks, algorithm=way)),
        lambda: check(platform.collective_time(operation, size, ranks=ranks, algorithm=way)),
        lambda: check(platform.bandwidth(size)),
        lambda: estimated(
            platform.gemm(pick(rng, 8), pick(rng, *SIZES), pick(rng, 8), **vary(rng, {"dtype": "bf16", "batch": 2}))
        ),
        lambda: estimated(platform.lookup(pick(rng, TABLES, TABLES[:1]), batch=pick(rng, *SIZES))),
        lambda: check(
            platform.kernel_time(pick(rng, "gemm", "elementwise"), vary(rng, sizes, 0.2), dtype=pick(rng, "fp32"))
        ),
        lambda: platform.find_kernel(pick(rng, "gemm"), variant=pick(rng, "nt"), dtype=pick(rng, "fp32")),
        lambda: derived(platform.with_nodes(pick(rng, 1, 2, 3))),
        lambda: derived(platform.with_host(pick(rng, 0, 0.5, 1e9))),
        lambda: derived(platform.with_datasheet(pick(rng, "h200-sxm", "a100-sxm-8", platform, platform.device))),
        lambda: derived(
            platform.with_link(pick(rng, "intra", "inter"), **vary(rng, {"bandwidth": 1e9, "latency": 1e-6}))
        ),
        lambda: repr(
            compare(
                platform,
                pick(rng, *PLATFORMS),
                pick(rng, None, DLRM(rows=[9], dim=4, batch=8)),
                ranks=pick(rng, None, 1),
            )
        ),
        lambda: platform.save(pick(rng, folder / "a.toml", str(folder / "b.toml"))),
    ]
    choose(rng, calls)()


# The command line.


@share(0.3)
def command(rng: Rng, folder: Path) -> None:
    """Commands in this process: 0 or 2, and one printable line where something is wrong."""
    model, file = choose(rng, ("dlrm-default", "dlrm-ddp", "gpt2", "bert-base")), folder / "tables.json"
    file.write_text(json.dumps([{"rows": 1000, "dim": 16, "pooling": 2}] * 3))
    options = {
        "predict": {"--model": model, "--platform": "h100-sxm-8", "--batch": "64", "--ranks": "2", "--dtype": "bf16"},
        "shard": {
            "--tables": str(file),
            "--platform": "zen5-2",
            "--ranks": "2",
            "--batch": "64",
            "--seconds": "0.001",
            "--out": str(folder / "out.json"),
            "--memory": "1e9",
            "--seed": "1",
        },
        "calibrate": {"--out": str(folder / "out.toml"), "--from-nccl-logs": str(folder), "--base": "h100-sxm-8"},
    }
    name = choose(rng, list(options))
    words = [name]
    for option, value in options[name].items():
        odd = [text for text in TEXTS if "\0" not in text] + [str(n) for n in NUMBERS if abs(n) < 2**70]
        safe = option in ("--seconds", "--out", "--from-nccl-logs") or rng.random() < 0.9
        kept = option in ("--seconds", "--from-nccl-logs")  # without a source, calibrate would measure
        words += [] if rng.random() < 0.05 and not kept else [option, value if safe else choose(rng, odd)]
    out, error, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    lines = error.getvalue().rstrip("\n").split("\n")
    told = [line for line in lines if "note:" not in line and "tells more:" not in line]
    if code not in (0, 2) or (code == 2 and (len(told) != 1 or not told[0])):
        raise Nonsense(f"{words} ends with {code}: {error.getvalue()[-300:]!r}")
    if any(not line.isprintable() or len(line) > 1500 for line in lines):
        raise Nonsense(f"{words} writes {error.getvalue()[:300]!r}")


ENTRIES: dict[str, Entry] = {
    "workloads-built": build,
    "dlrm-predicted": predicted(dlrm),
    "transformer-predicted": predicted(transformer),
    "table-sets": table_set,
    "plans": plans,
    "shard": sharded,
    "platforms-by-hand": by_hand,
    "methods": methods,
    "command-line": command,
}
