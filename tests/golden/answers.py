"""What perfkit is asked, part by part; see the package's docstring."""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars

import perfkit as pk
from perfkit.calibration.fit import fit_platform
from perfkit.fitting.collectives import fit_collective, fit_over_ranks
from perfkit.fitting.kernels import find_levels
from perfkit.measure.samples import load as load_sample
from perfkit.models.skew import bin_accesses, fit_zipf
from perfkit.platform.sources import assemble_sources, fit_gemms
from perfkit.readers.index_arrays import count_indices
from perfkit.readers.nccl import read_nccl_tests
from perfkit.readers.table_configs import list_published
from perfkit.readers.tbe_configs import parse_tbe_config
from perfkit.recording.nets import Net

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PERFKIT_SHARED_DATA", ROOT.parent / "shared" / "data"))
MEASURED = ROOT / "reference_data" / "measured"
PLATFORMS = ("zen3-2", "zen5-2", "h100-sxm-8x4", "a100-sxm-8", "v100-sxm-8")
Cases = dict[str, Callable[[], Any]]
D, BERT, GPT2 = pk.DLRM, pk.Transformer.bert, pk.Transformer.gpt2

# How an answer is written down.


def attempt(ask: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The answer, or the type of the error."""
    try:
        return ask(*given, **named)
    except Exception as error:
        return {"error": type(error).__name__}


def plain(value: Any) -> Any:
    """Anything as JSON: data classes by their fields, without private, empty and long-winded
    ones."""
    # shortened, as a platform holds a hundred; errors and ranges are summed up
    if isinstance(value, pk.Fit):
        ranges = sum(
            abs(end) for ends in value.ranges.values() for end in ends if abs(end) < np.inf
        )
        numbers = [
            value.spread,
            value.bias,
            value.n,
            sum(value.stderr.values()),
            ranges,
            value.spread_time,
        ]
        return plain([value.form, dict(value), numbers, " ".join(value.at_bounds), value.notes])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = {
            f.name: getattr(value, f.name)
            for f in dataclasses.fields(value)
            if not f.name.startswith("_")
        }
        if isinstance(value, pk.Estimate):
            known["formula"] = mark(value.formula)
        dull = ("units", "date", "provenance", "source")
        return {
            name: plain(v) for name, v in known.items() if name not in dull and not _is_empty(v)
        }
    if isinstance(value, polars.DataFrame):
        return [plain(row) for row in value.rows()]
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | tuple | Mapping) and not len(value))


def digest(frame: polars.DataFrame, most: int = 0) -> Any:
    """Rows of a short frame; else each column by its sum and its sum weighted by position, texts by
    a hash."""
    if len(frame) <= most:
        return frame
    found: dict[str, Any] = {"rows": len(frame)}
    for column in frame:
        if column.dtype.is_numeric():
            values = column.cast(polars.Float64).to_numpy()
            found[column.name] = [values.sum(), values @ np.arange(1, len(values) + 1)]
        else:
            found[column.name] = mark(column.to_list())
    return found


def mark(value: Any) -> str:
    """A short hash."""
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:12]


def list_waits(graph: pk.Graph) -> Any:
    """Waits as rows of an operation and of a collective, which is negative if it is one of the
    iteration before: its number less their count."""
    if graph.waits is None:
        return None
    count = len(graph.collectives)
    numbers = graph.waits.collective - count * graph.waits.of_previous_iteration
    return np.stack([graph.waits.operation, numbers], axis=1)


def tell(p: pk.Prediction, *, full: bool = False) -> dict[str, Any]:
    """What a prediction says."""
    found = {
        "time": p.time,
        "interval": p.interval(0.8),
        "lower_bound": p.lower_bound,
        "serial": p.serial,
        "bottleneck": p.bottleneck,
        "unmodelled": p.unmodelled,
        "warnings": p.warnings,
    }
    if full:
        found["latency"] = p.latency
        path = p.critical_path().with_columns(seconds=polars.col("end_s") - polars.col("start_s"))
        found |= {
            "breakdown": p.breakdown().drop("share"),
            "modules": digest(p.modules(1), 12),
            "all modules": digest(p.modules(None)),
            "communication": digest(p.communication(), 4),
            "idle": digest(p.idle(), 4),
            "timeline": digest(p.timeline()),
            "stages": digest(p.timeline("stage"), 6),
            "path": path.group_by("kind")
            .agg(polars.len(), polars.col("seconds").sum())
            .sort("kind"),
        }
    return {name: value for name, value in found.items() if not _is_empty(value)}


# Predictions.


def draw(seed: int, **settings: Any) -> pk.DLRM:
    """A random DLRM."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 20))
    return D(
        rows=(10 ** rng.uniform(3, 6.5, n)).astype(int).tolist(),
        dim=int(rng.choice((16, 32, 64, 128))),
        pooling=rng.integers(1, 33, n).tolist(),
        exponent=rng.uniform(0, 1.2, n).round(2).tolist(),
        features=13,
        **{"batch": int(rng.choice((512, 8192, 131072)))} | settings,
        bottom=rng.integers(8, 128, 2).tolist(),
        top=rng.integers(8, 128, 3).tolist(),
    )


#: Name, workload, ranks (fewer where the platform has fewer), and how the tables are placed.
WORKLOADS: dict[str, tuple[Any, int, str]] = {
    "dlrm-default": (D("dlrm-default", batch=2048), 1, ""),
    "dlrm-default, skewed": (D("dlrm-default", batch=65536, exponent=1.05), 8, "table"),
    "dlrm-ddp, dense": (D("dlrm-ddp", batch=4096, sparse=False), 2, "table"),
    "dlrm-ddp, copies": (D("dlrm-ddp", batch=4096), 4, "copy"),
    "dlrm-mlperf, fused, fp16, mixed plan": (
        D("dlrm-mlperf", batch=32768, embedding="fused", dtype="fp16"),
        8,
        "mixed",
    ),
    "dlrm-mlperf, by rows": (D("dlrm-mlperf", batch=16384), 8, "row"),
    "dlrm-dcnv2": (D("dlrm-dcnv2", batch=8192), 1, ""),
    "dlrm-dcnv2, overlap, two nodes": (D("dlrm-dcnv2", batch=65536, overlap=True), 16, "node"),
    "dlrm-dcnv2, compiled, autocast": (
        D("dlrm-dcnv2", batch=65536, mixed=True, fused=True, dtype="bf16", table_dtype="fp16"),
        8,
        "mixed",
    ),
    "random, dense, adagrad": (draw(1, sparse=False, optimizer="adagrad"), 1, ""),
    "random, sparse, adagrad, cross": (
        draw(2, optimizer="adagrad", embedding="exact", interaction="cross", cross=(2, 64)),
        2,
        "table",
    ),
    "random, columns": (draw(3), 2, "column"),
    "random, rows, dense": (draw(4, sparse=False), 2, "row"),
    "random, columns in a node": (draw(5, embedding="fused", overlap=True), 4, "node column"),
    "random, exact, rows in a node": (draw(6, embedding="exact", optimizer="adagrad"), 8, "node"),
    "random, overlap, mixed plan": (draw(7, overlap=True), 2, "mixed"),
    "random, overlap, dense, copies": (draw(8, sparse=False, overlap=True), 8, "copy"),
    "random, four nodes": (draw(9, overlap=True), 32, "mixed"),
    "random, four nodes, whole": (draw(10, embedding="fused", fused=True), 32, "table"),
    "random, compiled": (draw(11, overlap=True), 4, "table"),
    "random, compiled, cross": (draw(12, interaction="cross", embedding="fused"), 1, ""),
    "random, fp64": (draw(13, dtype="fp64"), 1, ""),
    "random, bf16, exact": (draw(14, dtype="bf16", embedding="exact"), 8, "column"),
    "random, tf32, autocast": (draw(15, dtype="bf16", mixed=True), 2, "copy"),
    "bert-base": (BERT("bert-base", batch=8, sequence=128), 1, ""),
    "bert-base, eager, sgd, 2 ranks": (
        BERT(batch=4, sequence=64, attention="eager", optimizer="sgd"),
        2,
        "",
    ),
    "bert-large, bf16, 8 ranks": (BERT("bert-large", batch=64, sequence=512, dtype="bf16"), 8, ""),
    "bert-large, autocast, four nodes": (
        BERT("bert-large", batch=256, sequence=128, dtype="fp16", mixed=True, fused=True),
        32,
        "",
    ),
    "bert, small, blocking": (BERT(batch=16, layers=3, hidden=256, heads=4, overlap=False), 2, ""),
    "bert, small, overlap": (BERT(batch=16, layers=3, hidden=256, heads=4, vocabulary=5000), 2, ""),
    "bert, tiny": (
        BERT(batch=2, sequence=32, layers=2, hidden=128, heads=2, vocabulary=1000),
        1,
        "",
    ),
    "gpt2": (GPT2(batch=4, sequence=256), 1, ""),
    "gpt2, eager": (GPT2(batch=4, sequence=128, attention="eager", layers=4), 4, ""),
    "gpt2, fp16, two nodes": (GPT2(batch=32, sequence=1024, dtype="fp16", optimizer="sgd"), 16, ""),
    "bert-large, bf16, large batch": (
        BERT("bert-large", batch=1024, sequence=512, dtype="bf16"),
        8,
        "",
    ),
    "gpt2, fp16, eager, large batch": (GPT2(batch=256, dtype="fp16", attention="eager"), 16, ""),
    "gpt2-xl, bf16": (GPT2("gpt2-xl", batch=8, sequence=512, dtype="bf16", fused=True), 8, ""),
    "gpt2, small, fp64": (
        GPT2(batch=2, sequence=96, layers=2, hidden=192, heads=6, dtype="fp64"),
        1,
        "",
    ),
    "gpt2, small, blocking": (
        GPT2(batch=32, sequence=96, layers=2, hidden=192, heads=6, overlap=False),
        4,
        "",
    ),
    "gpt2, experts with room, bf16": (
        GPT2(batch=16, dtype="bf16", experts=8, top_k=2, capacity=1.25, parallel="fsdp"),
        8,
        "",
    ),
    "llama, small": (
        pk.Transformer.preset(
            "llama-3-8b",
            batch=4,
            sequence=96,
            layers=2,
            hidden=256,
            heads=8,
            kv_heads=2,
            inner=688,
            vocabulary=2000,
        ),
        1,
        "",
    ),
    "llama, bf16": (
        pk.Transformer.preset(
            "llama-3-8b", batch=8, sequence=512, layers=4, dtype="bf16", optimizer="sgd"
        ),
        8,
        "",
    ),
}

LLAMA = pk.Transformer.preset(
    "llama-3-8b", batch=16, sequence=2048, layers=4, dtype="bf16", fused=True
)
#: Ways to share a model, for closed forms and for the event loop; the model, and a platform.
STRATEGIES: dict[str, tuple[pk.Strategy, pk.Transformer, str]] = {
    "tensors, tokens and stages": (
        pk.Strategy(tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True),
        LLAMA,
        "h100-sxm-8",
    ),
    "keys on a ring, layers computed again": (
        pk.Strategy(tp=2, cp=2, dp=2, checkpoint="full", zero=1),
        LLAMA,
        "a100-sxm-8",
    ),
    "tokens for heads, shards": (
        pk.Strategy(cp=2, dp=4, ulysses=True, zero=3),
        LLAMA,
        "a100-sxm-8",
    ),
    "experts": (
        pk.Strategy(tp=2, dp=4, ep=4, sequence_parallel=True, zero=1),
        dataclasses.replace(LLAMA, experts=8, top_k=2, inner=4096),
        "h100-sxm-8",
    ),
}


def place(kind: str, tables: Any, ranks: int, node: int) -> pk.Plan | None:
    """A plan of one kind; tables that are too small for it are copied."""
    if ranks == 1:
        return None
    every, node = tuple(range(ranks)), min(node, ranks)
    kinds: dict[str, Callable[[int], Any]] = {
        "table": lambda i: i % ranks,
        "copy": lambda i: pk.Placement("data_parallel", every),
        "column": lambda i: pk.Placement("column_wise", (i % ranks, (i + 1) % ranks)),
        "row": lambda i: pk.Placement("row_wise", every),
        "node": lambda i: pk.Placement("table_row_wise", every[i * node % ranks :][:node]),
        "node column": lambda i: pk.Placement("table_column_wise", every[i * node % ranks :][:2]),
    }
    order = list(kinds) if kind == "mixed" else [kind]
    chosen = [order[i % len(order)] if t.rows >= ranks else "copy" for i, t in enumerate(tables)]
    return pk.Plan.from_owners([kinds[name](i) for i, name in enumerate(chosen)], ranks=ranks)


def run(
    name: str, platform: str | pk.Platform, *, full: bool = False, **settings: Any
) -> dict[str, Any]:
    """What is predicted for one of the workloads, on as many of its ranks as the platform has."""
    (workload, ranks, kind), where = WORKLOADS[name], pk.load_platform(platform)
    ranks = min(ranks, where.network.ranks)
    plan = place(kind, workload.tables, ranks, where.network.ranks_per_node) if kind else None
    execution = "compiled" if "compiled" in name else None
    return tell(
        pk.predict(workload, where, ranks=ranks, plan=plan, execution=execution, **settings),
        full=full,
    )


#: What if: a platform, the method that changes it, and its arguments.
CHANGES: dict[str, tuple[Any, ...]] = {
    "two nodes": ("h100-sxm-8", "with_nodes", 2),
    "a100, two nodes": ("a100-sxm-8", "with_nodes", 2),
    "b200": ("h100-sxm-8", "with_datasheet", "b200-sxm"),
    "h200": ("a100-sxm-8", "with_datasheet", "h200-sxm"),
    "slow link": ("h100-sxm-8", "with_link", "intra", {"bandwidth": 1e11}),
    "far link": ("h100-sxm-8x4", "with_link", "inter", {"latency": 5e-5, "bandwidth": 1e10}),
    "host x 0": ("h100-sxm-8", "with_host", 0),
    "host x 3": ("v100-sxm-8", "with_host", 3),
    "cpu host": ("zen5-2", "with_host", 0.5),
    "cpu link": ("zen3-2", "with_link", "intra", {"bandwidth": 1e9, "latency": 1e-4}),
}


def predictions() -> Cases:
    """Workloads on every platform, in full on one of them; what if; platforms compared; stragglers;
    strategies."""

    def everywhere(number: int, name: str) -> dict[str, Any]:
        found = {platform: attempt(run, name, platform) for platform in PLATFORMS}
        able = [
            p for p in PLATFORMS[number % 5 :] + PLATFORMS[: number % 5] if "error" not in found[p]
        ]
        return found | {platform: run(name, platform, full=True) for platform in able[:1]}

    def change(platform: str, method: str, *given: Any) -> dict[str, Any]:
        named = given[-1] if isinstance(given[-1], dict) else {}
        where = getattr(pk.load_platform(platform), method)(
            *(g for g in given if g is not named), **named
        )
        return {"name": where.name} | {name: attempt(run, name, where) for name in asked}

    def compare(a: str, b: str) -> Any:
        return pk.compare(a, b, BERT(batch=8), ranks=2).table()

    def straggle(name: str) -> dict[str, Any]:
        return {p: run(name, p, full=True, slowdown={1: 1.5}) for p in ("zen5-2", "h100-sxm-8x4")}

    def share(strategy: pk.Strategy, model: pk.Transformer, platform: str) -> dict[str, Any]:
        events = pk.predict(model, platform, strategy=strategy)
        closed_forms = pk.explore(model, platform, strategies=[strategy]).table()
        return {"closed forms": closed_forms.to_dicts(), "events": tell(events, full=True)}

    asked = (
        "dlrm-mlperf, by rows",
        "bert-large, bf16, large batch",
        "bert, small, overlap",
        "dlrm-default, skewed",
    )
    pairs = itertools.pairwise(("zen3-2", "zen5-2", "h100-sxm-8", "a100-sxm-8", "h100-sxm-8"))
    cases: Cases = {
        name: partial(everywhere, number, name) for number, name in enumerate(WORKLOADS)
    }
    cases |= {f"what if: {name}": partial(change, *given) for name, given in CHANGES.items()}
    cases |= {f"{b} against {a}": partial(compare, a, b) for a, b in pairs}
    cases |= {
        f"straggler: {n}": partial(straggle, n) for n in ("random, overlap, mixed plan", asked[2])
    }
    return cases | {
        f"strategy: {name}": partial(share, *given) for name, given in STRATEGIES.items()
    }


# Plans.


def price(found: pk.PlanPrice, most: int = 0) -> dict[str, Any]:
    """What a plan costs and where it puts what."""
    owners = [f"{p.kind} {p.ranks} {p.columns}" for p in found.plan.placements]
    return {
        "time": found.time,
        "interval": found.interval(0.8),
        "parts": found.parts,
        "messages": found.messages,
        "capacity": [found.capacity, found.reserved],
        "loads": found.loads[:8],
        "memory": found.memory[:8],
        "fits": found.fits,
        "bottleneck": found.bottleneck,
        "ranks": digest(found.table()),
        "plan": mark(owners),
        "owners": owners[:most],
        "move": attempt(lambda: str(found.next_move())),
    }


def search(workload: Any, platform: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a search finds, beside the rules of thumb."""
    result = pk.shard(workload, platform, ranks=ranks, **{"steps": 300, "seed": 1} | settings)
    found = {
        "bound": result.bound,
        "gap": result.gap,
        "work": result.work,
        "objective": result.objective,
    }
    return (
        found
        | {"tables": digest(result.table()), "rules": result.compare()}
        | price(result.prediction, 20)
    )


def plans() -> Cases:
    """Searches and prices of given plans."""
    a, b = (
        pk.TableSet(pk.draw_tables(n, seed=n), batch=16384, embedding="fused") for n in (12, 40)
    )
    slow = dataclasses.replace(a, embedding="separate", optimizer="adagrad")
    dense = dataclasses.replace(a, embedding="separate", sparse=False, batch=4096)
    few = pk.TableSet(
        pk.draw_tables(6, seed=2, correlation=0.9), batch=4096, optimizer="rowwise_adagrad"
    )
    groups = {"pin": {0: 1, "table 3": 2}, "together": [(5, 6)], "apart": [(7, 8, 9)]}
    searches: dict[str, tuple[Any, ...]] = {
        "fused": (b, "h100-sxm-8", 8, {}),
        "another seed": (b, "h100-sxm-8", 8, {"seed": 7, "steps": 900}),
        "two nodes": (b, "h100-sxm-8x4", 16, {}),
        "cpu": (a, "zen5-2", 2, {}),
        "cpu, separate, adagrad": (slow, "zen3-2", 2, {}),
        "v100, dense": (dense, "v100-sxm-8", 4, {}),
        "little memory": (b, "a100-sxm-8", 4, {"memory": 8e9}),
        "too little memory": (b, "a100-sxm-8", 4, {"memory": 1e9}),
        "additive": (b, "a100-sxm-8", 8, {"objective": "additive"}),
        "exchanged": (a, "a100-sxm-8", 4, {"inputs": "exchanged"}),
        "pins and groups": (b, "h100-sxm-8", 4, groups),
        "forbidden": (b, "h100-sxm-8", 8, {"forbid": ["data_parallel", "column_wise"]}),
        "few": (few, "a100-sxm-8", 4, {}),
        "one rank": (few, "a100-sxm-8", 1, {}),
        "dcnv2": (D("dlrm-dcnv2", batch=65536), "h100-sxm-8x4", 16, {"steps": 100}),
        "mlperf": (D("dlrm-mlperf", batch=16384, embedding="fused"), "a100-sxm-8", 8, {}),
        "random": (draw(21, embedding="fused", overlap=True), "h100-sxm-8", 8, {}),
        "random on a cpu": (draw(22, sparse=False), "zen5-2", 2, {}),
    }

    def judge(workload: Any, platform: str, ranks: int, kind: str) -> dict[str, Any]:
        plan = place(
            kind, workload.tables, ranks, pk.load_platform(platform).network.ranks_per_node
        )
        assert plan
        return price(pk.price_plan(workload, platform, plan))

    cases: Cases = {f"search: {name}": partial(search, *given) for name, given in searches.items()}
    for kind in ("table", "copy", "column", "row", "node", "node column", "mixed"):
        for workload, platform, ranks in (
            (draw(31), "h100-sxm-8x4", 16),
            (b, "zen5-2", 2),
            (slow, "a100-sxm-8", 4),
        ):
            cases[f"price: {kind}, {platform}"] = partial(judge, workload, platform, ranks, kind)
    return cases


# Primitives.


def primitives() -> Cases:
    """Times of single collectives, products, lookups and kernels."""
    nbytes, counts = np.array([1e3, 1e5, 1e7, 1e9]), (1, 2, 3, 4, 8, 16, 32)
    shapes = (
        (64, 64, 64, 1),
        (4096, 4096, 1024, 1),
        (16, 4096, 4096, 1),
        (1000, 33, 517, 1),
        (128, 64, 128, 96),
    )
    sizes = {
        "batch": 4,
        "m": 96,
        "n": 160,
        "k": 72,
        "elements": 5e5,
        "rows": 500,
        "columns": 1e3,
        "bags": 2e3,
        "lookups": 4e4,
        "row_bytes": 1e7,
        "page_walks": 3e3,
        "unique_bytes": 6e6,
        "flops": 3e7,
        "windows": 2e3,
        "nbytes": 9e6,
        "working_set": 3e7,
        "beyond_l2": 8e6,
        "beyond_l3": 2e6,
    }
    swept = {name: size * np.array([0.01, 1.0]) for name, size in sizes.items()}

    def collectives(platform: str, operation: str) -> dict[str, Any]:
        where = pk.load_platform(platform)
        held = [ranks for ranks in counts if ranks <= where.network.ranks]
        found = {
            f"{ranks} {way}": attempt(
                where.collective_time, operation, nbytes, ranks=ranks, algorithm=way
            )
            for ranks, way in itertools.product(
                held, (None, "ring", "tree", "in_network", "two_level", "rail")
            )
        }
        for ranks, size in itertools.product((2, 6, 32), (4096.0, 5e9)):
            found[f"{ranks}, {size:g} B"] = attempt(where.collective, operation, size, ranks=ranks)
        failed = {name: value["error"] for name, value in found.items() if isinstance(value, dict)}
        return {name: value for name, value in found.items() if name not in failed} | {
            error: ", ".join(name for name in failed if failed[name] == error)
            for error in sorted({*failed.values()})
        }

    def kernels(platform: str) -> dict[str, Any]:
        where, found = pk.load_platform(platform), {}
        for m, n, k, batch in shapes:
            for dtype in where.device.peaks if n == k else ("fp32", "fp16"):
                found[f"gemm {m} {n} {k} x {batch} {dtype}"] = attempt(
                    where.gemm, m, n, k, dtype=dtype, batch=batch
                )
        for tables in (
            pk.draw_tables(5, seed=1),
            pk.draw_tables(3, seed=2, itemsize=2),
            draw(4).tables,
        ):
            for batch in (64, 8192):
                found[f"lookup {len(tables)} {batch}"] = attempt(where.lookup, tables, batch=batch)
        return found | {kind: attempt(where.kernel_time, kind, swept) for kind in where.kernels}

    operations = (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send_recv",
    )
    each = itertools.product(PLATFORMS, operations)
    cases: Cases = {
        f"{name}, {operation}": partial(collectives, name, operation) for name, operation in each
    }
    return cases | {f"{name}, kernels": partial(kernels, name) for name in PLATFORMS}


# Captures.


def captures() -> Cases:
    """Captured training steps and nets, and what some platforms make of them; `steps` needs
    torch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    from tests.golden.steps import STEPS, twin

    def look(make: Any, settings: dict[str, Any]) -> dict[str, Any]:
        graph = pk.capture(make, **settings)
        frame, summed = graph.table(), polars.col("flops", "traffic", "launches").sum()
        kinds = (
            frame.group_by("kind", "variant", "phase")
            .agg(polars.len(), summed)
            .sort("kind", "variant", "phase")
        )
        return {
            "parameters": graph.parameters,
            "footprint": graph.footprint,
            "dtype": graph.dtype,
            "kinds": kinds,
            "operations": digest(frame),
            "groups": graph.groups,
            "waits": list_waits(graph),
            "dtypes": mark(graph.dtypes),
            "zen5-2": attempt(lambda: tell(pk.predict(graph, "zen5-2"), full="twin" in graph.name)),
            "h100-sxm-8x4": attempt(lambda: tell(pk.predict(graph, "h100-sxm-8x4"))),
        }

    def judge(net: Net, ranks: int) -> dict[str, Any]:
        return {p: tell(pk.predict(net, p, ranks=ranks), full=p == "zen3-2") for p in PLATFORMS[:3]}

    model, bert = draw(3, batch=512), BERT(batch=16, sequence=32, layers=2, hidden=256, heads=4)
    steps: dict[str, tuple[Any, dict[str, Any]]] = STEPS | {
        "dlrm": (twin(model), {"family": "dlrm", "name": "twin"}),
        "bert": (twin(bert), {"family": "transformer"}),
        "dlrm, 2 ranks": (twin(model, plan=place("table", model.tables, 2, 2)), {"ranks": 2}),
        "bert, 2 ranks": (twin(bert, ranks=2), {"ranks": 2, "name": "twin"}),
        "bert, 8 ranks": (twin(bert, ranks=8), {"ranks": 8}),
    }
    cases: Cases = {name: partial(look, *given) for name, given in steps.items()}
    for name, ranks in {
        "resnet": 2,
        "mobilenet": 1,
        "inception": 1,
        "squeezenet": 1,
        "xlnet": 2,
    }.items():
        net = Net(name, batch=8, size=64, width=64 if name == "xlnet" else 24, depth=1)
        cases[f"net: {name}"] = partial(judge, net, ranks)
    return cases


# Readers.

CONFIG: dict[str, Any] = {
    "T": 3,
    "E": 3334.0,
    "D": 64,
    "mixed_dim": True,
    "Es": [1000, 8, 8992],
    "Ds": [32, 64, 96],
    "batch_params": {"B": 512, "Bs": [512] * 3},
    "feature_table_map": None,
    "indices_params": {
        "heavy_hitters": [0.1, 0.05, 0.025] + [0.01] * 7,
        "zipf_q": 2.5,
        "zipf_s": 1.15,
    },
    "pooling_params": {
        "L": 13,
        "sigma_L": 6,
        "length_distribution": "normal",
        "Ls": [20.25, 1.0, 15.5],
    },
}


def readers() -> Cases:
    """What files hold: tables, configurations of FBGEMM, recorded indices, plans, logs of
    nccl-tests."""

    def read(name: str, text: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder) / name).write_text(text, encoding="utf-8")
            return digest(pk.read_tables(path).table(), 20)

    def published(name: str) -> Any:
        bare: dict[str, Any] = (
            {"dim": 64, "rows": 1_000_000} if name.startswith("dlrm-datasets") else {}
        )
        return digest(pk.read_tables(name, **bare).table())

    def indices() -> Any:
        values = np.minimum(np.random.default_rng(5).zipf(1.3, (3, 256, 8)), 5000) - 1
        return [
            [f, f.pooling, f.unique_rows, f.to_table(16, law="zipf")]
            for f in count_indices(values, rows=5000)
        ]

    def plan() -> Any:
        tables = draw(7).tables
        made = place("mixed", tables, 4, 2)
        assert made
        exported = made.to_torchrec(tables)
        return [
            made.to_json(),
            exported,
            pk.Plan.from_torchrec(exported, tables, ranks=4).owners == made.owners,
        ]

    columns = "name,rows,dim,pooling,exponent\n" + "".join(
        f"t{i},{10**i},16,{i}.5,0.{i}\n" for i in range(2, 7)
    )
    uniform = {**CONFIG, "pooling_params": {"L": 3, "sigma_L": 9, "length_distribution": "uniform"}}
    drawn = pk.TableSet(pk.draw_tables(50, seed=3, correlation=-0.5))
    cases: Cases = {
        "csv": partial(read, "tables.csv", columns),
        "json": partial(read, "t.json", '[{"rows": 10, "dim": 4}]'),
        "tbe file": partial(read, "tbe.json", json.dumps([CONFIG, uniform])),
        "indices": indices,
        "plan": plan,
        "tbe": partial(parse_tbe_config, CONFIG),
        "tbe, uniform": partial(parse_tbe_config, uniform),
        "platforms": pk.platforms,
        "drawn": lambda: digest(drawn.table()),
    }
    cases |= {f"published {name}": partial(published, name) for name in list_published()}
    logs = sorted((DATA / "nccl_logs").glob("*.log"))
    return cases | {f"log {log.name}": lambda log=log: digest(read_nccl_tests(log)) for log in logs}


# Fits, and checks of committed measurements.


@cache
def fitted(name: str) -> pk.Platform:
    """The platform that committed measurements give."""
    return fit_platform(
        json.loads((MEASURED / f"{name}.measurements.json").read_text(encoding="utf-8"))
    )


def fits() -> Cases:
    """Every fitted parameter of measured machines, of logs, of published products and of made
    curves."""
    sizes = 2.0 ** np.arange(6, 31, 2)
    wiggle = 1 + 0.05 * np.sin(np.arange(len(sizes)) * 2.4)
    curves = {
        "knee": (2e-5**0.6 + (4e-11 * sizes) ** 0.6) ** (1 / 0.6),
        "sum": 1e-5 + 1e-10 * sizes,
        "two branches": np.minimum(1e-5 + 1e-9 * sizes, 1e-4 + 5e-12 * sizes),
    }
    working = np.repeat(2.0 ** np.arange(12, 29), 2)
    pace = np.where(working < 2**19, 1e-11, np.where(working < 2**24, 3e-11, 1e-10)) * np.tile(
        [1.0, 1.02], 17
    )
    counts, nbytes = (grid.ravel() for grid in np.meshgrid([2.0, 4.0, 8.0], sizes))
    law = (5e-6 + 1e-6 * counts + nbytes * 1e-11 * (counts - 1) / counts) * np.repeat(wiggle, 3)

    def zipf(exponent: float) -> Any:
        p = np.arange(1.0, 2001) ** -exponent
        accesses = np.bincount(np.random.default_rng(9).choice(2000, 20_000, p=p / p.sum()))
        accesses = accesses[accesses > 0]
        histogram = bin_accesses(accesses, rows=2000)
        return [histogram, *[fit_zipf(histogram)] * 2]

    def products(system: str) -> Any:
        frame = polars.read_csv(ROOT / "reference_data" / "published" / "gemm_bf16.csv").filter(
            system=system
        )
        return fit_gemms(frame, pk.load_platform(system.replace("_", "-") + "-8").device)

    def logs(base: str, pattern: str) -> Any:
        platform = assemble_sources(base, nccl_logs=sorted((DATA / "nccl_logs").glob(pattern)))
        return [platform.collectives, platform.network]

    cases: Cases = {}
    if importlib.util.find_spec("torch") is not None:  # their iterations are captured again
        cases |= {name: partial(fitted, name) for name in ("zen3-2", "zen5-2", "xeon-2")}
    cases |= {
        f"curve: {name}": partial(fit_collective, sizes, y * wiggle) for name, y in curves.items()
    }
    cases |= {"over ranks": partial(fit_over_ranks, "all_reduce", counts, nbytes, law)}
    cases |= {"levels": partial(find_levels, working, working, working * pace)}
    cases |= {f"zipf {exponent}": partial(zipf, exponent) for exponent in (0.0, 0.6, 1.2)}
    cases |= {
        f"products {system}": partial(products, system) for system in ("a100_sxm", "h100_sxm")
    }
    if (DATA / "nccl_logs").is_dir():
        cases["logs of a node"] = partial(logs, "a100-sxm-8", "a100x8*.log")
        cases["logs of ten nodes"] = partial(logs, "h100-sxm-8", "h100x*_multi_collective.log")
    return cases


def checks() -> Cases:
    """Committed checks: their summaries, and what is predicted for their configurations today."""

    def judge(path: Path) -> Any:
        comparison = pk.Comparison.load(path)
        name = path.name.split(".")[0]
        where, runs = fitted(name) if name == "xeon-2" else pk.load_platform(name), []
        for run in comparison.runs:
            config = dict(run["config"])
            owners = config.pop("owners", None)
            plan = pk.Plan.from_owners(owners, ranks=run["ranks"]) if owners else None
            p = pk.predict(load_sample(config), where, ranks=run["ranks"], plan=plan)
            runs.append(
                {
                    **run,
                    "predicted_s": p.time,
                    "low_s": p.interval(0.8)[0],
                    "high_s": p.interval(0.8)[1],
                }
            )
        again = dataclasses.replace(comparison, runs=tuple(runs))
        predicted = {run["name"]: [run["predicted_s"], run["low_s"]] for run in runs}
        summaries = {"then": comparison.summary(), "now": again.summary()}
        return summaries | {"inside": again.coverage(), "predicted": predicted}

    cpus = (
        path for path in MEASURED.glob("*.check-*.json") if path.name.startswith(("xeon", "zen"))
    )
    return {path.name: partial(judge, path) for path in sorted(cpus)}


PARTS: dict[str, Callable[[], Cases]] = {
    part.__name__: part
    for part in (predictions, plans, primitives, captures, readers, fits, checks)
}
#: Parts whose numbers `make test` compares; `checks` takes minutes.
TESTED = ("predictions", "plans", "primitives", "fits", "captures", "readers")


def has_all_sources() -> bool:
    """Whether torch and the shared data are here, without which some answers cannot be given."""
    return importlib.util.find_spec("torch") is not None and (DATA / "nccl_logs").is_dir()


def answer(part: str, watch: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Every answer of a part; `watch` is told before each which one it is."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = PARTS[part]()
        for number, (name, ask) in enumerate(cases.items(), 1):
            if watch is not None:
                watch(f"{number} of {len(cases)}: {name}")
            found[name] = plain(attempt(ask))
    return dict(json.loads(json.dumps(found)))
