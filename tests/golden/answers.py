"""What perfkit is asked, part by part; see the package's docstring."""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

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
BERT = pk.Transformer.bert
GPT2 = pk.Transformer.gpt2

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
    if isinstance(value, pk.Fit):
        return plain(_sum_up_fit(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _list_fields(value)
    if isinstance(value, polars.DataFrame):
        return [plain(row) for row in value.rows()]
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _sum_up_fit(fit: pk.Fit) -> list[Any]:
    """Shortened, as a platform holds a hundred; errors and ranges are summed up."""
    ends_of_ranges = 0.0
    for ends in fit.ranges.values():
        for end in ends:
            if abs(end) < np.inf:
                ends_of_ranges += abs(end)
    errors = sum(fit.stderr.values())
    numbers = [fit.spread, fit.bias, fit.n, errors, ends_of_ranges, fit.spread_time]
    return [fit.form, dict(fit), numbers, " ".join(fit.at_bounds), fit.notes]


def _list_fields(record: Any) -> dict[str, Any]:
    shown = {}
    for field in dataclasses.fields(record):
        if field.name.startswith("_") or field.name in ("units", "date", "provenance", "source"):
            continue
        value = getattr(record, field.name)
        if field.name == "formula" and isinstance(record, pk.Estimate):
            value = mark(value)
        if not _is_empty(value):
            shown[field.name] = plain(value)
    return shown


def _is_empty(value: Any) -> bool:
    if isinstance(value, str | tuple | Mapping):
        return len(value) == 0
    return value is None


def digest(frame: polars.DataFrame, most: int = 0) -> Any:
    """Rows of a short frame; else each column by its sum and its sum weighted by position, texts by
    a hash."""
    if len(frame) <= most:
        return frame
    summary: dict[str, Any] = {"rows": len(frame)}
    positions = np.arange(1, len(frame) + 1)
    for column in frame:
        if column.dtype.is_numeric():
            values = column.cast(polars.Float64).to_numpy()
            summary[column.name] = [values.sum(), values @ positions]
        else:
            summary[column.name] = mark(column.to_list())
    return summary


def mark(value: Any) -> str:
    """A short hash."""
    text = json.dumps(plain(value))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def list_waits(graph: pk.Graph) -> Any:
    """Waits as rows of an operation and of a collective, which is negative if it is one of the
    iteration before: its number less their count."""
    if graph.waits is None:
        return None
    count = len(graph.collectives)
    numbers = graph.waits.collective - count * graph.waits.of_previous_iteration
    return np.stack([graph.waits.operation, numbers], axis=1)


def tell(prediction: pk.Prediction, *, full: bool = False) -> dict[str, Any]:
    """What a prediction says."""
    answers: dict[str, Any] = {
        "time": prediction.time,
        "interval": prediction.interval(0.8),
        "lower_bound": prediction.lower_bound,
        "serial": prediction.serial,
        "bottleneck": prediction.bottleneck,
        "unmodelled": prediction.unmodelled,
        "warnings": prediction.warnings,
    }
    if full:
        answers |= tell_parts(prediction)
    return {name: value for name, value in answers.items() if not _is_empty(value)}


def tell_parts(prediction: pk.Prediction) -> dict[str, Any]:
    """What a prediction says of its parts."""
    path = prediction.critical_path()
    path = path.with_columns(seconds=polars.col("end_s") - polars.col("start_s"))
    kinds = path.group_by("kind").agg(polars.len(), polars.col("seconds").sum())
    return {
        "latency": prediction.latency,
        "breakdown": prediction.breakdown().drop("share"),
        "modules": digest(prediction.modules(1), 12),
        "all modules": digest(prediction.modules(None)),
        "communication": digest(prediction.communication(), 4),
        "idle": digest(prediction.idle(), 4),
        "timeline": digest(prediction.timeline()),
        "stages": digest(prediction.timeline("stage"), 6),
        "path": kinds.sort("kind"),
    }


# Predictions.


def draw(seed: int, **settings: Any) -> pk.DLRM:
    """A random DLRM."""
    rng = np.random.default_rng(seed)
    tables = int(rng.integers(4, 20))
    rows = (10 ** rng.uniform(3, 6.5, tables)).astype(int)
    dim = int(rng.choice((16, 32, 64, 128)))
    pooling = rng.integers(1, 33, tables)
    exponent = rng.uniform(0, 1.2, tables).round(2)
    batch = int(rng.choice((512, 8192, 131072)))
    bottom = rng.integers(8, 128, 2)
    top = rng.integers(8, 128, 3)
    return pk.DLRM(
        rows=rows.tolist(),
        dim=dim,
        pooling=pooling.tolist(),
        exponent=exponent.tolist(),
        features=13,
        bottom=bottom.tolist(),
        top=top.tolist(),
        **{"batch": batch, **settings},
    )


class Iteration(NamedTuple):
    """What is predicted on every platform."""

    workload: pk.DLRM | pk.Transformer
    ranks: int = 1  # fewer where the platform has fewer
    placed: str | None = None  # how the tables are placed, see `place`


WORKLOADS = {
    "dlrm-default": Iteration(pk.DLRM("dlrm-default", batch=2048)),
    "dlrm-default, skewed": Iteration(
        pk.DLRM("dlrm-default", batch=65536, exponent=1.05), ranks=8, placed="table"
    ),
    "dlrm-ddp, dense": Iteration(
        pk.DLRM("dlrm-ddp", batch=4096, sparse=False), ranks=2, placed="table"
    ),
    "dlrm-ddp, copies": Iteration(pk.DLRM("dlrm-ddp", batch=4096), ranks=4, placed="copy"),
    "dlrm-mlperf, fused, fp16, mixed plan": Iteration(
        pk.DLRM("dlrm-mlperf", batch=32768, embedding="fused", dtype="fp16"),
        ranks=8,
        placed="mixed",
    ),
    "dlrm-mlperf, by rows": Iteration(pk.DLRM("dlrm-mlperf", batch=16384), ranks=8, placed="row"),
    "dlrm-dcnv2": Iteration(pk.DLRM("dlrm-dcnv2", batch=8192)),
    "dlrm-dcnv2, overlap, two nodes": Iteration(
        pk.DLRM("dlrm-dcnv2", batch=65536, overlap=True), ranks=16, placed="node"
    ),
    "dlrm-dcnv2, compiled, autocast": Iteration(
        pk.DLRM(
            "dlrm-dcnv2", batch=65536, mixed=True, fused=True, dtype="bf16", table_dtype="fp16"
        ),
        ranks=8,
        placed="mixed",
    ),
    "random, dense, adagrad": Iteration(draw(1, sparse=False, optimizer="adagrad")),
    "random, sparse, adagrad, cross": Iteration(
        draw(2, optimizer="adagrad", embedding="exact", interaction="cross", cross=(2, 64)),
        ranks=2,
        placed="table",
    ),
    "random, columns": Iteration(draw(3), ranks=2, placed="column"),
    "random, rows, dense": Iteration(draw(4, sparse=False), ranks=2, placed="row"),
    "random, columns in a node": Iteration(
        draw(5, embedding="fused", overlap=True), ranks=4, placed="node column"
    ),
    "random, exact, rows in a node": Iteration(
        draw(6, embedding="exact", optimizer="adagrad"), ranks=8, placed="node"
    ),
    "random, overlap, mixed plan": Iteration(draw(7, overlap=True), ranks=2, placed="mixed"),
    "random, overlap, dense, copies": Iteration(
        draw(8, sparse=False, overlap=True), ranks=8, placed="copy"
    ),
    "random, four nodes": Iteration(draw(9, overlap=True), ranks=32, placed="mixed"),
    "random, four nodes, whole": Iteration(
        draw(10, embedding="fused", fused=True), ranks=32, placed="table"
    ),
    "random, compiled": Iteration(draw(11, overlap=True), ranks=4, placed="table"),
    "random, compiled, cross": Iteration(draw(12, interaction="cross", embedding="fused")),
    "random, fp64": Iteration(draw(13, dtype="fp64")),
    "random, bf16, exact": Iteration(
        draw(14, dtype="bf16", embedding="exact"), ranks=8, placed="column"
    ),
    "random, tf32, autocast": Iteration(draw(15, dtype="bf16", mixed=True), ranks=2, placed="copy"),
    "bert-base": Iteration(BERT("bert-base", batch=8, sequence=128)),
    "bert-base, eager, sgd, 2 ranks": Iteration(
        BERT(batch=4, sequence=64, attention="eager", optimizer="sgd"), ranks=2
    ),
    "bert-large, bf16, 8 ranks": Iteration(
        BERT("bert-large", batch=64, sequence=512, dtype="bf16"), ranks=8
    ),
    "bert-large, autocast, four nodes": Iteration(
        BERT("bert-large", batch=256, sequence=128, dtype="fp16", mixed=True, fused=True), ranks=32
    ),
    "bert, small, blocking": Iteration(
        BERT(batch=16, layers=3, hidden=256, heads=4, overlap=False), ranks=2
    ),
    "bert, small, overlap": Iteration(
        BERT(batch=16, layers=3, hidden=256, heads=4, vocabulary=5000), ranks=2
    ),
    "bert, tiny": Iteration(
        BERT(batch=2, sequence=32, layers=2, hidden=128, heads=2, vocabulary=1000)
    ),
    "gpt2": Iteration(GPT2(batch=4, sequence=256)),
    "gpt2, eager": Iteration(GPT2(batch=4, sequence=128, attention="eager", layers=4), ranks=4),
    "gpt2, fp16, two nodes": Iteration(
        GPT2(batch=32, sequence=1024, dtype="fp16", optimizer="sgd"), ranks=16
    ),
    "bert-large, bf16, large batch": Iteration(
        BERT("bert-large", batch=1024, sequence=512, dtype="bf16"), ranks=8
    ),
    "gpt2, fp16, eager, large batch": Iteration(
        GPT2(batch=256, dtype="fp16", attention="eager"), ranks=16
    ),
    "gpt2-xl, bf16": Iteration(
        GPT2("gpt2-xl", batch=8, sequence=512, dtype="bf16", fused=True), ranks=8
    ),
    "gpt2, small, fp64": Iteration(
        GPT2(batch=2, sequence=96, layers=2, hidden=192, heads=6, dtype="fp64")
    ),
    "gpt2, small, blocking": Iteration(
        GPT2(batch=32, sequence=96, layers=2, hidden=192, heads=6, overlap=False), ranks=4
    ),
    "gpt2, experts with room, bf16": Iteration(
        GPT2(batch=16, dtype="bf16", experts=8, top_k=2, capacity=1.25, parallel="fsdp"), ranks=8
    ),
    "llama, small": Iteration(
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
        )
    ),
    "llama, bf16": Iteration(
        pk.Transformer.preset(
            "llama-3-8b", batch=8, sequence=512, layers=4, dtype="bf16", optimizer="sgd"
        ),
        ranks=8,
    ),
}

LLAMA = pk.Transformer.preset(
    "llama-3-8b", batch=16, sequence=2048, layers=4, dtype="bf16", fused=True
)


class SharedModel(NamedTuple):
    """A way to share a model, for closed forms and for the event loop."""

    strategy: pk.Strategy
    model: pk.Transformer
    platform: str


STRATEGIES = {
    "tensors, tokens and stages": SharedModel(
        pk.Strategy(tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True), LLAMA, "h100-sxm-8"
    ),
    "keys on a ring, layers computed again": SharedModel(
        pk.Strategy(tp=2, cp=2, dp=2, checkpoint="full", zero=1), LLAMA, "a100-sxm-8"
    ),
    "tokens for heads, shards": SharedModel(
        pk.Strategy(cp=2, dp=4, cp_kind="ulysses", zero=3), LLAMA, "a100-sxm-8"
    ),
    "experts": SharedModel(
        pk.Strategy(tp=2, dp=4, ep=4, sequence_parallel=True, zero=1),
        dataclasses.replace(LLAMA, experts=8, top_k=2, inner=4096),
        "h100-sxm-8",
    ),
}


KINDS = ("table", "copy", "column", "row", "node", "node column")
#: Those that plans of all kinds take in turn. A kind that is new is not added, so that kept answers stay.
MIXED_KINDS = ("table", "copy", "column", "row", "node", "node column")


def place_table(kind: str, index: int, ranks: int, ranks_per_node: int) -> int | pk.Placement:
    """Where a table lies: on the ranks in turn, or on the nodes in turn."""
    all_ranks = tuple(range(ranks))
    rank = index % ranks
    first_of_node = index * ranks_per_node % ranks
    if kind == "table":
        return rank
    if kind == "copy":
        return pk.Placement("data_parallel", all_ranks)
    if kind == "column":
        return pk.Placement("column_wise", (rank, (index + 1) % ranks))
    if kind == "row":
        return pk.Placement("row_wise", all_ranks)
    if kind == "node":
        node = all_ranks[first_of_node : first_of_node + ranks_per_node]
        return pk.Placement("table_row_wise", node)
    if kind == "node column":
        return pk.Placement("table_column_wise", all_ranks[first_of_node : first_of_node + 2])
    raise ValueError(f"kind is {kind!r}; known are {', '.join(KINDS)}")


def place(kind: str, tables: Sequence[Any], ranks: int, ranks_per_node: int) -> pk.Plan | None:
    """A plan of one kind, or of all in turn; tables that are too small for it are copied."""
    if ranks == 1:
        return None
    owners = []
    for index, table in enumerate(tables):
        wanted = MIXED_KINDS[index % len(MIXED_KINDS)] if kind == "mixed" else kind
        if table.rows < ranks:
            wanted = "copy"
        owners.append(place_table(wanted, index, ranks, min(ranks_per_node, ranks)))
    return pk.Plan.from_owners(owners, ranks=ranks)


def run(
    name: str, platform: str | pk.Platform, *, full: bool = False, **settings: Any
) -> dict[str, Any]:
    """What is predicted for one of the workloads, on as many of its ranks as the platform has."""
    iteration = WORKLOADS[name]
    platform = pk.load_platform(platform)
    ranks = min(iteration.ranks, platform.network.ranks)
    plan = None
    if iteration.placed is not None:
        tables = iteration.workload.tables  # type: ignore[union-attr]
        plan = place(iteration.placed, tables, ranks, platform.network.ranks_per_node)
    prediction = pk.predict(
        iteration.workload,
        platform,
        ranks=ranks,
        plan=plan,
        execution="compiled" if "compiled" in name else None,
        **settings,
    )
    return tell(prediction, full=full)


class Change(NamedTuple):
    """What if: a platform, the method that changes it, and its arguments."""

    platform: str
    method: str
    arguments: dict[str, Any]


CHANGES = {
    "two nodes": Change("h100-sxm-8", "with_nodes", {"nodes": 2}),
    "a100, two nodes": Change("a100-sxm-8", "with_nodes", {"nodes": 2}),
    "b200": Change("h100-sxm-8", "with_datasheet", {"other": "b200-sxm"}),
    "h200": Change("a100-sxm-8", "with_datasheet", {"other": "h200-sxm"}),
    "slow link": Change("h100-sxm-8", "with_link", {"name": "intra", "bandwidth": 1e11}),
    "far link": Change(
        "h100-sxm-8x4", "with_link", {"name": "inter", "latency": 5e-5, "bandwidth": 1e10}
    ),
    "host x 0": Change("h100-sxm-8", "with_host", {"scale": 0}),
    "host x 3": Change("v100-sxm-8", "with_host", {"scale": 3}),
    "cpu host": Change("zen5-2", "with_host", {"scale": 0.5}),
    "cpu link": Change("zen3-2", "with_link", {"name": "intra", "bandwidth": 1e9, "latency": 1e-4}),
}
CHANGED_WORKLOADS = (
    "dlrm-mlperf, by rows",
    "bert-large, bf16, large batch",
    "bert, small, overlap",
    "dlrm-default, skewed",
)
STRAGGLING_WORKLOADS = ("random, overlap, mixed plan", "bert, small, overlap")
COMPARED_PLATFORMS = ("zen3-2", "zen5-2", "h100-sxm-8", "a100-sxm-8", "h100-sxm-8")


def predictions() -> Cases:
    """Workloads on every platform, in full on one of them; what if; platforms compared; stragglers;
    strategies."""

    def everywhere(number: int, name: str) -> dict[str, Any]:
        answers = {platform: attempt(run, name, platform) for platform in PLATFORMS}
        first = number % len(PLATFORMS)
        for platform in PLATFORMS[first:] + PLATFORMS[:first]:
            if "error" not in answers[platform]:
                answers[platform] = run(name, platform, full=True)
                break
        return answers

    def change(case: Change) -> dict[str, Any]:
        make = getattr(pk.load_platform(case.platform), case.method)
        platform = make(**case.arguments)
        answers = {"name": platform.name}
        for name in CHANGED_WORKLOADS:
            answers[name] = attempt(run, name, platform)
        return answers

    def compare(a: str, b: str) -> Any:
        return pk.compare(a, b, BERT(batch=8), ranks=2).table()

    def straggle(name: str) -> dict[str, Any]:
        return {p: run(name, p, full=True, slowdown={1: 1.5}) for p in ("zen5-2", "h100-sxm-8x4")}

    def share(case: SharedModel) -> dict[str, Any]:
        events = pk.predict(case.model, case.platform, strategy=case.strategy)
        closed_forms = pk.explore(case.model, case.platform, strategies=[case.strategy]).table()
        return {"closed forms": closed_forms.to_dicts(), "events": tell(events, full=True)}

    cases: Cases = {}
    for number, name in enumerate(WORKLOADS):
        cases[name] = partial(everywhere, number, name)
    for name, changed in CHANGES.items():
        cases[f"what if: {name}"] = partial(change, changed)
    for a, b in itertools.pairwise(COMPARED_PLATFORMS):
        cases[f"{b} against {a}"] = partial(compare, a, b)
    for name in STRAGGLING_WORKLOADS:
        cases[f"straggler: {name}"] = partial(straggle, name)
    for name, shared in STRATEGIES.items():
        cases[f"strategy: {name}"] = partial(share, shared)
    return cases


# Plans.


def price(found: pk.PlanPrice, most: int = 0) -> dict[str, Any]:
    """What a plan costs and where it puts what."""
    owners = [f"{p.kind} {p.ranks} {p.columns}" for p in found.plan.placements]
    kinds = Counter(p.kind for p in found.plan.placements)
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
        "kinds": dict(sorted(kinds.items())),
        "plan": mark(owners),
        "owners": owners[:most],
        "move": attempt(lambda: str(found.next_move())),
    }


class Search(NamedTuple):
    """Tables to share among ranks."""

    workload: pk.DLRM | pk.TableSet
    platform: str
    ranks: int
    settings: dict[str, Any] = {}  # noqa: RUF012


def search(case: Search) -> dict[str, Any]:
    """What a search finds, beside the rules of thumb."""
    settings = {"steps": 300, "seed": 1, **case.settings}
    result = pk.shard(case.workload, case.platform, ranks=case.ranks, **settings)
    answers = {
        "bound": result.bound,
        "gap": result.gap,
        "work": result.work,
        "objective": result.objective,
        "tables": digest(result.table()),
        "rules": result.compare(),
    }
    return answers | price(result.prediction, 20)


TWELVE_TABLES = pk.TableSet(pk.draw_tables(12, seed=12), batch=16384, embedding="fused")
FORTY_TABLES = pk.TableSet(pk.draw_tables(40, seed=40), batch=16384, embedding="fused")
SLOW_TABLES = dataclasses.replace(TWELVE_TABLES, embedding="separate", optimizer="adagrad")
DENSE_TABLES = dataclasses.replace(TWELVE_TABLES, embedding="separate", sparse=False, batch=4096)
FEW_TABLES = pk.TableSet(
    pk.draw_tables(6, seed=2, correlation=0.9), batch=4096, optimizer="rowwise_adagrad"
)
GROUPS = {"pin": {0: 1, "table 3": 2}, "together": [(5, 6)], "apart": [(7, 8, 9)]}
FORBIDDEN = {"forbid": ["data_parallel", "column_wise"]}
DCNV2 = pk.DLRM("dlrm-dcnv2", batch=65536)
MLPERF = pk.DLRM("dlrm-mlperf", batch=16384, embedding="fused")
SEARCHES = {
    "fused": Search(FORTY_TABLES, "h100-sxm-8", 8),
    "another seed": Search(FORTY_TABLES, "h100-sxm-8", 8, {"seed": 7, "steps": 900}),
    "two nodes": Search(FORTY_TABLES, "h100-sxm-8x4", 16),
    "cpu": Search(TWELVE_TABLES, "zen5-2", 2),
    "cpu, separate, adagrad": Search(SLOW_TABLES, "zen3-2", 2),
    "v100, dense": Search(DENSE_TABLES, "v100-sxm-8", 4),
    "little memory": Search(FORTY_TABLES, "a100-sxm-8", 4, {"memory": 8e9}),
    "too little memory": Search(FORTY_TABLES, "a100-sxm-8", 4, {"memory": 1e9}),
    "additive": Search(FORTY_TABLES, "a100-sxm-8", 8, {"objective": "additive"}),
    "exchanged": Search(TWELVE_TABLES, "a100-sxm-8", 4, {"inputs": "exchanged"}),
    "pins and groups": Search(FORTY_TABLES, "h100-sxm-8", 4, GROUPS),
    "forbidden": Search(FORTY_TABLES, "h100-sxm-8", 8, FORBIDDEN),
    "few": Search(FEW_TABLES, "a100-sxm-8", 4),
    "one rank": Search(FEW_TABLES, "a100-sxm-8", 1),
    "dcnv2": Search(DCNV2, "h100-sxm-8x4", 16, {"steps": 100}),
    "mlperf": Search(MLPERF, "a100-sxm-8", 8),
    "random": Search(draw(21, embedding="fused", overlap=True), "h100-sxm-8", 8),
    "random on a cpu": Search(draw(22, sparse=False), "zen5-2", 2),
}
#: Tables whose plans of all kinds are priced.
PRICED = (
    Search(draw(31), "h100-sxm-8x4", 16),
    Search(FORTY_TABLES, "zen5-2", 2),
    Search(SLOW_TABLES, "a100-sxm-8", 4),
)


def plans() -> Cases:
    """Searches and prices of given plans."""

    def judge(case: Search, kind: str) -> dict[str, Any]:
        ranks_per_node = pk.load_platform(case.platform).network.ranks_per_node
        plan = place(kind, case.workload.tables, case.ranks, ranks_per_node)
        assert plan
        return price(pk.price_plan(case.workload, case.platform, plan))

    cases: Cases = {f"search: {name}": partial(search, case) for name, case in SEARCHES.items()}
    for kind in (*KINDS, "mixed"):
        for case in PRICED:
            cases[f"price: {kind}, {case.platform}"] = partial(judge, case, kind)
    return cases


# Primitives.


MESSAGES = np.array([1e3, 1e5, 1e7, 1e9])
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
ALGORITHMS = (None, "ring", "tree", "in_network", "two_level", "rail")


class Product(NamedTuple):
    """A matrix product, or a batch of them."""

    m: int
    n: int
    k: int
    batch: int = 1


PRODUCTS = (
    Product(64, 64, 64),
    Product(4096, 4096, 1024),
    Product(16, 4096, 4096),
    Product(1000, 33, 517),
    Product(128, 64, 128, batch=96),
)
#: Sizes of kernels, of which each is also asked at a hundredth of it.
KERNEL_SIZES = {
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
LOOKED_UP = (
    pk.draw_tables(5, seed=1),
    pk.draw_tables(3, seed=2, itemsize=2),
    draw(4).tables,
)


def primitives() -> Cases:
    """Times of single collectives, products, lookups and kernels."""

    def collectives(platform_name: str, operation: str) -> dict[str, Any]:
        platform = pk.load_platform(platform_name)
        answers = {}
        for ranks in (1, 2, 3, 4, 8, 16, 32):
            if ranks > platform.network.ranks:
                continue
            for algorithm in ALGORITHMS:
                answers[f"{ranks} {algorithm}"] = attempt(
                    platform.collective_time,
                    operation,
                    MESSAGES,
                    ranks=ranks,
                    algorithm=algorithm,
                )
        for ranks in (2, 6, 32):
            for nbytes in (4096.0, 5e9):
                answers[f"{ranks}, {nbytes:g} B"] = attempt(
                    platform.collective, operation, nbytes, ranks=ranks
                )
        return list_errors_together(answers)

    def kernels(platform_name: str) -> dict[str, Any]:
        platform = pk.load_platform(platform_name)
        answers = {}
        for product in PRODUCTS:
            m, n, k = product.m, product.n, product.k
            dtypes = tuple(platform.device.peaks) if n == k else ("fp32", "fp16")
            for dtype in dtypes:
                answers[f"gemm {m} {n} {k} x {product.batch} {dtype}"] = attempt(
                    platform.gemm, m, n, k, dtype=dtype, batch=product.batch
                )
        for tables in LOOKED_UP:
            for batch in (64, 8192):
                answers[f"lookup {len(tables)} {batch}"] = attempt(
                    platform.lookup, tables, batch=batch
                )
        sizes = {name: size * np.array([0.01, 1.0]) for name, size in KERNEL_SIZES.items()}
        for kind in platform.kernels:
            answers[kind] = attempt(platform.kernel_time, kind, sizes)
        return answers

    cases: Cases = {}
    for name in PLATFORMS:
        for operation in OPERATIONS:
            cases[f"{name}, {operation}"] = partial(collectives, name, operation)
    for name in PLATFORMS:
        cases[f"{name}, kernels"] = partial(kernels, name)
    return cases


def list_errors_together(answers: dict[str, Any]) -> dict[str, Any]:
    """Answers, and after them each kind of error with the names of all that have it."""
    fine = {}
    failed: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if isinstance(answer, dict):
            failed.setdefault(answer["error"], []).append(name)
        else:
            fine[name] = answer
    return fine | {error: ", ".join(failed[error]) for error in sorted(failed)}


# Captures.


def captures() -> Cases:
    """Captured training steps and nets, and what some platforms make of them; `steps` needs
    torch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    from tests.golden.steps import STEPS, CapturedStep, twin

    def predict(graph: pk.Graph, platform: str, *, full: bool = False) -> dict[str, Any]:
        return tell(pk.predict(graph, platform), full=full)

    def look(step: CapturedStep) -> dict[str, Any]:
        graph = pk.capture(step.make, **step.settings)
        frame = graph.table()
        sums = polars.col("flops", "traffic_bytes", "launches").sum()
        kinds = frame.group_by("kind", "variant", "phase").agg(polars.len(), sums)
        is_twin = "twin" in graph.name
        return {
            "parameters": graph.parameters,
            "footprint": graph.footprint,
            "dtype": graph.dtype,
            "kinds": kinds.sort("kind", "variant", "phase"),
            "operations": digest(frame),
            "groups": graph.groups,
            "waits": list_waits(graph),
            "dtypes": mark(graph.dtypes),
            "zen5-2": attempt(predict, graph, "zen5-2", full=is_twin),
            "h100-sxm-8x4": attempt(predict, graph, "h100-sxm-8x4"),
        }

    def judge(net: Net, ranks: int) -> dict[str, Any]:
        answers = {}
        for platform in PLATFORMS[:3]:
            prediction = pk.predict(net, platform, ranks=ranks)
            answers[platform] = tell(prediction, full=platform == "zen3-2")
        return answers

    model = draw(3, batch=512)
    plan = place("table", model.tables, 2, 2)
    bert = BERT(batch=16, sequence=32, layers=2, hidden=256, heads=4)
    steps = STEPS | {
        "dlrm": CapturedStep(twin(model), {"family": "dlrm", "name": "twin"}),
        "bert": CapturedStep(twin(bert), {"family": "transformer"}),
        "dlrm, 2 ranks": CapturedStep(twin(model, plan=plan), {"ranks": 2}),
        "bert, 2 ranks": CapturedStep(twin(bert, ranks=2), {"ranks": 2, "name": "twin"}),
        "bert, 8 ranks": CapturedStep(twin(bert, ranks=8), {"ranks": 8}),
    }
    cases: Cases = {name: partial(look, step) for name, step in steps.items()}
    ranks_of_nets = {"resnet": 2, "mobilenet": 1, "inception": 1, "squeezenet": 1, "xlnet": 2}
    for name, ranks in ranks_of_nets.items():
        width = 64 if name == "xlnet" else 24
        net = Net(name, batch=8, size=64, width=width, depth=1)
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
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            return digest(pk.read_tables(path).table(), 20)

    def read_published(name: str) -> Any:
        if name.startswith("dlrm-datasets"):  # which say neither
            return digest(pk.read_tables(name, dim=64, rows=1_000_000).table())
        return digest(pk.read_tables(name).table())

    def draw_and_list() -> Any:
        return digest(pk.TableSet(pk.draw_tables(50, seed=3, correlation=-0.5)).table())

    def count() -> Any:
        values = np.minimum(np.random.default_rng(5).zipf(1.3, (3, 256, 8)), 5000) - 1
        return [
            [f, f.pooling, f.unique_rows, f.to_table(16, law="zipf")]
            for f in count_indices(values, rows=5000)
        ]

    def export_plan() -> Any:
        tables = draw(7).tables
        plan = place("mixed", tables, 4, 2)
        assert plan
        exported = plan.to_torchrec(tables, module="ebc")
        read_back = pk.Plan.from_torchrec(exported, tables, ranks=4)
        return [plan.to_json(), exported, read_back.owners == plan.owners]

    def read_log(path: Path) -> Any:
        return digest(read_nccl_tests(path))

    lines = ["name,rows,dim,pooling,exponent"]
    lines += [f"t{i},{10**i},16,{i}.5,0.{i}" for i in range(2, 7)]
    uniform = {**CONFIG, "pooling_params": {"L": 3, "sigma_L": 9, "length_distribution": "uniform"}}
    cases: Cases = {
        "csv": partial(read, "tables.csv", "\n".join(lines) + "\n"),
        "json": partial(read, "t.json", '[{"rows": 10, "dim": 4}]'),
        "tbe file": partial(read, "tbe.json", json.dumps([CONFIG, uniform])),
        "indices": count,
        "plan": export_plan,
        "tbe": partial(parse_tbe_config, CONFIG),
        "tbe, uniform": partial(parse_tbe_config, uniform),
        "platforms": pk.platforms,
        "drawn": draw_and_list,
    }
    for name in list_published():
        cases[f"published {name}"] = partial(read_published, name)
    for path in sorted((DATA / "nccl_logs").glob("*.log")):
        cases[f"log {path.name}"] = partial(read_log, path)
    return cases


# Fits, and checks of committed measurements.


@cache
@cache
def fitted(name: str) -> pk.Platform:
    """The platform that committed measurements give."""
    text = (MEASURED / f"{name}.measurements.json").read_text(encoding="utf-8")
    return fit_platform(json.loads(text))


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
    working_sets = np.repeat(2.0 ** np.arange(12, 29), 2)
    seconds_per_byte = np.select(
        [working_sets < 2**19, working_sets < 2**24], [1e-11, 3e-11], 1e-10
    )
    seconds_of_sets = working_sets * seconds_per_byte * np.tile([1.0, 1.02], 17)
    ranks = np.tile([2.0, 4.0, 8.0], len(sizes))
    nbytes = np.repeat(sizes, 3)
    law = 5e-6 + 1e-6 * ranks + nbytes * 1e-11 * (ranks - 1) / ranks
    seconds_of_ranks = law * np.repeat(wiggle, 3)

    def zipf(exponent: float) -> Any:
        p = np.arange(1.0, 2001) ** -exponent
        accesses = np.bincount(np.random.default_rng(9).choice(2000, 20_000, p=p / p.sum()))
        accesses = accesses[accesses > 0]
        histogram = bin_accesses(accesses, rows=2000)
        fit = fit_zipf(histogram)
        return [histogram, fit, fit]

    def products(system: str) -> Any:
        frame = polars.read_csv(ROOT / "reference_data" / "published" / "gemm_bf16.csv")
        platform = pk.load_platform(system.replace("_", "-") + "-8")
        return fit_gemms(frame.filter(system=system), platform.device)

    def logs(base: str, pattern: str) -> Any:
        platform = assemble_sources(base, nccl_logs=sorted((DATA / "nccl_logs").glob(pattern)))
        return [platform.collectives, platform.network]

    cases: Cases = {}
    if importlib.util.find_spec("torch") is not None:  # their iterations are captured again
        for name in ("zen3-2", "zen5-2", "xeon-2"):
            cases[name] = partial(fitted, name)
    for name, seconds in curves.items():
        cases[f"curve: {name}"] = partial(fit_collective, sizes, seconds * wiggle)
    cases["over ranks"] = partial(fit_over_ranks, "all_reduce", ranks, nbytes, seconds_of_ranks)
    cases["levels"] = partial(find_levels, working_sets, working_sets, seconds_of_sets)
    for exponent in (0.0, 0.6, 1.2):
        cases[f"zipf {exponent}"] = partial(zipf, exponent)
    for system in ("a100_sxm", "h100_sxm"):
        cases[f"products {system}"] = partial(products, system)
    if (DATA / "nccl_logs").is_dir():
        cases["logs of a node"] = partial(logs, "a100-sxm-8", "a100x8*.log")
        cases["logs of ten nodes"] = partial(logs, "h100-sxm-8", "h100x*_multi_collective.log")
    return cases


def checks() -> Cases:
    """Committed checks: their summaries, and what is predicted for their configurations today."""

    def judge(path: Path) -> Any:
        kept = pk.Comparison.load(path)
        name = path.name.split(".")[0]
        platform = fitted(name) if name == "xeon-2" else pk.load_platform(name)
        runs = []
        for run in kept.runs:
            config = dict(run["config"])
            owners = config.pop("owners", None)
            plan = pk.Plan.from_owners(owners, ranks=run["ranks"]) if owners else None
            workload = load_sample(config)
            prediction = pk.predict(workload, platform, ranks=run["ranks"], plan=plan)
            low, high = prediction.interval(0.8)
            runs.append({**run, "predicted_s": prediction.time, "low_s": low, "high_s": high})
        today = dataclasses.replace(kept, runs=tuple(runs))
        return {
            "then": kept.summary(),
            "now": today.summary(),
            "inside": today.coverage(),
            "predicted": {run["name"]: [run["predicted_s"], run["low_s"]] for run in runs},
        }

    cases: Cases = {}
    for path in sorted(MEASURED.glob("*.check-*.json")):
        if path.name.startswith(("xeon", "zen")):
            cases[path.name] = partial(judge, path)
    return cases


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
