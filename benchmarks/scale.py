"""Published steps with tensor, context, expert and pipeline parallelism, beside predictions.

    python -m benchmarks.scale

Rows come from the folder that PERFKIT_SHARED_DATA names: vTrain (single node), torchtitan, recipes
of NVIDIA, the table of Megatron-core, and arXiv:2205.05198, table 5. Scales are fitted to
reference_data/published/gpu_steps.csv without the steps of the source that is judged.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, cycle, islice, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks import gpu_context
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.gpu_scales import Scales, add_published, fit_scales
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.runs import tune
from perfkit.exploration.strategies import explore
from perfkit.models.partitions import CHUNKED, SCHEDULES, V_SHAPED
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.memory import WORKSPACE
from perfkit.prediction.predictor import predict
from perfkit.prediction.stages import check_strategy
from perfkit.prediction.strategies import price_strategies
from perfkit.prediction.strategy_case import make_case
from perfkit.prediction.strategy_memory import measure_strategies
from perfkit.workloads.stack import apply_stack
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import PRESETS, Transformer

#: Largest mean error without any run of the source [%].
BARS = {"vtrain": 12.0, "torchtitan": 15.0, "nvidia": 18.0, "megatron": 15.0, "seqsel": 8.0}
HALVES = "half of the models"
#: The same if the platform was tuned to at most 30 runs of other models of the source.
TUNED = {("vtrain", HALVES): 8.0, ("vtrain", "one left out"): 11.0, ("nvidia", HALVES): 12.0}
#: Schedules that random strategies are drawn from. This list stays as it is: another name in it would
#: change all draws behind it, and with them the figures that tables and tests keep.
_DRAWN_TOGETHER = ("gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble")
#: Schedules of each draw: those together, and every other schedule alone, but those whose stages are in a
#: V, which tests/test_v_schedules.py compares.
SCHEDULES_OF_DRAWS: tuple[tuple[str, ...], ...] = (
    _DRAWN_TOGETHER,
    *((name,) for name in SCHEDULES if name not in (*_DRAWN_TOGETHER, *V_SHAPED)),
)
_LLAMA = gpu_context.LLAMA
_HALF: dict[str, Any] = {"dtype": "bf16", "mixed": True, "fused": True}


class Shape(NamedTuple):
    """Sizes of a model: heads of keys and width inside an MLP are 0 if they are as usual; experts,
    experts of a token and width of a head are 0 for models without experts [-]."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    head_width: int = 0


#: Sizes of the models that sources name: Nemotron (arXiv:2402.16819 and 2406.11704), 5b, 20b, 8b and
#: 22b as in NeMo, GPT-3 (arXiv:2005.14165) with the vocabulary of NeMo, and the presets of perfkit
#: for Llama.
_SHAPES = {
    "gpt3-5b": Shape(24, 4096, 32, 0, 0, 51200),
    "gpt3-20b": Shape(44, 6144, 48, 0, 0, 51200),
    "gpt3-175b": Shape(96, 12288, 96, 0, 0, 51200),
    "nemotron-8b": Shape(32, 4096, 32, 0, 0, 256000),
    "nemotron-22b": Shape(40, 6144, 48, 0, 0, 256000),
    "nemotron-340b": Shape(96, 18432, 96, 8, 73728, 256000),
}
for _name, _sizes in PRESETS.items():
    if "llama" in _name:
        _SHAPES[_name.replace("llama-", "llama")] = Shape(
            _sizes["layers"],
            _sizes["hidden"],
            _sizes["heads"],
            _sizes["kv_heads"],
            _sizes["inner"],
            _sizes["vocabulary"],
        )
#: Qwen3 (arXiv:2505.09388).
_EXPERTS = {
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 768, 151936, experts=128, top_k=8, head_width=128),
    "qwen3-235b-a22b": Shape(94, 4096, 64, 4, 1536, 151936, experts=128, top_k=8, head_width=128),
}

#: GPUs, and sequences of a batch, of the strategies of GPT-3 175B [-].
RANKS, BATCH = 1024, 1536


def _divides(tp: int, pp: int, micro: int) -> bool:
    """Whether ranks divide the GPUs, and micro-batches the batch of a replica."""
    if RANKS % (tp * pp):
        return False
    replicas = RANKS // (tp * pp)
    return BATCH % (replicas * micro) == 0


#: Tensor-parallel ranks, stages, and sequences of a micro-batch of GPT-3 175B on 1,024 A100: a
#: batch of 1,536 sequences of 2,048 tokens, 1F1B, sequence-parallel, optimizer states sharded over
#: replicas.
WAYS = [
    way
    for way in product((1, 2, 4, 8), (4, 8, 12, 16, 24, 32, 48, 96), (1, 2, 3, 4, 6))
    if _divides(*way)
]


class Row(NamedTuple):
    """A published step: source, group whose steps are ranked, device, model, strategy, execution
    and time [s].

    `reserved` is the memory [B].
    """

    source: str
    group: str
    device: str
    model: Transformer
    strategy: Strategy
    execution: str
    seconds: float
    reserved: float = 0.0


def _read(name: str) -> list[dict[str, str]]:
    return read_csv(find_shared_data("end_to_end", name))


def _make(name: str, batch: int, sequence: int, shape: Shape, **settings: Any) -> Transformer:
    """A causal model of these sizes."""
    return Transformer(
        name,
        True,
        batch,
        sequence,
        positions=sequence,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        inner=shape.inner,
        vocabulary=shape.vocabulary,
        **settings,
    )


def _share(counts: Mapping[str, int], chunks: int, **settings: Any) -> Strategy:
    """A strategy from the counts that are known, sequence-parallel with tensor parallelism; chunks
    are interleaved."""
    fields: dict[str, Any] = {
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "chunks": chunks,
        "sequence_parallel": counts["tp"] > 1,
        "tiled": counts["tp"] > 1,
    }
    for name in ("tp", "pp", "dp", "cp", "ep", "micro_batch"):
        if name in counts:
            fields[name] = counts[name]
    return Strategy(**{**fields, **settings})


def _find_seconds(row: Mapping[str, str]) -> float:
    """Time of an iteration from the tokens that a GPU reads in a second [s]."""
    tokens = int(row["global_batch"]) * int(row["sequence"])
    return tokens / (float(row["tokens_per_s_per_gpu"]) * int(row["gpus"]))


def list_vtrain(*, alone: bool = False) -> Iterator[Row]:
    """Megatron-DeepSpeed on a node of A100; with `alone` also the data-parallel runs, which the
    scales are fitted to.

    There is no recomputation: a micro-batch adds the same time with one stage and with several.
    """
    for row in _read("vtrain_singlenode_a100_half.csv"):
        counts = {name: int(row[name]) for name in list(row)[:10]}
        strategy = Strategy(
            tp=counts["tensor_parallelism"],
            pp=counts["pipeline_parallelism"],
            dp=counts["data_parallelism"],
            micro_batch=counts["micro_batch"],
            overlap=False,
        )
        if strategy.tp * strategy.pp == 1 and not alone:
            continue
        layers = counts["layers"]
        hidden = counts["hidden_size"]
        heads = counts["attention_heads"]
        batch = counts["global_batch"]
        model = _make(
            "gpt",
            batch,
            counts["sequence_length"],
            Shape(layers, hidden, heads, 0, 0, 50257),
            dtype="fp16",
            attention="eager",
            fused=True,
            dropout=0.1,
        )
        yield Row(
            source="vtrain",
            group=f"{(layers, hidden, heads)} {counts['gpus']} {batch}",
            device="a100-sxm",
            model=model,
            strategy=strategy,
            execution="eager",
            seconds=float(row["iteration_time_ms"]) / 1e3,
        )


def _find_count(words: Sequence[str], name: str) -> int:
    """The number after a word, 1 without it."""
    if name not in words:
        return 1
    return int(words[words.index(name) + 1])


def list_torchtitan(*, alone: bool = False) -> Iterator[Row]:
    """Tables 2, 4, 5 and 6: Llama 3.1 with fp8 products, compiled; with `alone` also runs with FSDP
    alone.

    Pipelines have as many micro-batches as ranks, the default until January 2025 (torchtitan, pull
    781). Tables 1 and 3 have selective checkpoints by operation. Products in fp8 have a scale for each
    matrix, the only recipe that torchtitan had then; the tables do not say whether weights are gathered
    in fp8. Ranks that share products cast their share of the operand before they gather it
    (Float8ColwiseParallel of torchao), of which perfkit knows nothing: those casts are priced as with
    known scales. Keys are gathered, the default of torchtitan (``context_parallel_rotate_method``). The cards
    were limited to 500 W.
    """
    for row in _read("torchtitan_h100.csv"):
        words = row["parallelism"].split()
        counts = {name: _find_count(words, name) for name in ("tp", "pp", "cp")}
        if counts["tp"] * counts["cp"] == 1 and not alone:
            continue
        counts["dp"] = _find_count(words, "fsdp")
        counts["micro_batch"] = int(row["local_batch"]) // counts["pp"]
        name = row["model"].replace("llama-3.1-", "llama3-")
        settings = {**_HALF, **_LLAMA, "attention": "flash2"}
        settings["dtype"] = "bf16"
        if "fp8" in row["precision"]:
            settings["dtype"] = "fp8"
            if counts["tp"] == 1:
                settings["fp8_recipe"] = "tensorwise"
        batch = int(row["global_batch"])
        strategy = _share(
            counts,
            2 if "interleaved" in words else 1,
            zero=3 if counts["pp"] == 1 else 1,
            tiled="async" in words,
            cp_kind="all_gather",
            checkpoint="per_op" if row["checkpointing"] == "selective" else "full",
        )
        yield Row(
            source="torchtitan",
            group=f"{name} {row['sequence']}",
            device=f"h100-sxm 2.4e12 5e10 {gpu_context.POWER_CAPS['torchtitan']:g}",
            model=_make(name, batch, int(row["sequence"]), _SHAPES[name], **settings),
            strategy=strategy,
            execution="compiled" if row["compiled"] == "yes" else "eager",
            seconds=_find_seconds(row),
            reserved=float(row["memory_gib_max"]) * 2**30,
        )


def _read_count(cell: str) -> int:
    """The first number of a cell such as ``8 or 4``, 1 if there is none."""
    first = cell.split(" ")[0]
    return int(first) if first.isdigit() else 1


def _make_recipe(name: str, row: Mapping[str, str], shape: Shape) -> Transformer:
    """The model of a recipe of NVIDIA."""
    settings: dict[str, Any] = {**_HALF, "dtype": "fp8", "attention": "flash3"}
    if "gpt" not in name and "nemo" not in name:
        settings |= _LLAMA
    if shape.experts:
        settings["experts"] = shape.experts
        settings["top_k"] = shape.top_k
        settings["head_width"] = shape.head_width
    settings["qk_norm"] = "qwen3" in name
    return _make(name, int(row["global_batch"]), int(row["sequence"]), shape, **settings)


def list_recipes(*, stated: bool = False) -> Iterator[Row]:
    """Recipes of NVIDIA in fp8, by NeMo and Megatron-Bridge, of dense models on H100; the first
    setting of two.

    With `stated` those without a bar: models with experts, and runs on Blackwell.
    """
    for row in _read("nvidia_recipes.csv"):
        name = row["model"].lower().replace("_", "-")
        device = row["system"].partition("-")[2].lower()
        shape = _EXPERTS.get(name) or _SHAPES.get(name.replace("3.1", "3"))
        has_no_bar = device != "h100" or name in _EXPERTS
        if not shape or stated != has_no_bar:
            continue
        counts = {}
        for column in ("gpus", "tp", "pp", "cp", "vp", "ep", "micro_batch"):
            counts[column] = _read_count(row[column])
        counts["dp"] = counts["gpus"] // counts["tp"] // counts["pp"] // counts["cp"]
        zero = 3 if row["fsdp"] == "1" and not stated else 1
        chunks = counts["vp"] if counts["pp"] > 1 else 1
        yield Row(
            source="nvidia",
            group=f"{name} {device if stated else counts['gpus']}",
            device=f"{device}-sxm",
            model=_make_recipe(name, row, shape),
            strategy=_share(counts, chunks, zero=zero),
            execution="compiled",
            seconds=_find_seconds({**row, "gpus": str(counts["gpus"])}),
        )


def list_megablocks() -> Iterator[Row]:
    """arXiv:2211.15841, figure 8: 10 billion tokens on 8 A100, without a compiler."""
    for row in _read("megablocks.csv"):
        days = row["train_days_10B_tokens_8xA100_80GB"]
        if not days:
            continue
        layers = int(row["layers"])
        hidden = int(row["hidden"])
        experts = int(row["experts"] or 0)
        model = _make(
            row["model"],
            512,
            1024,
            Shape(layers, hidden, hidden // 64, 0, 0, 51200),
            dtype="fp16",
            fused=True,
            attention="eager",
            dropout=0.1,
            experts=experts,
            # replicas of Megatron do not run under autocast; see `price_rows`
            mixed=experts > 0,
            capacity=float(row["kind"].partition("cf=")[2] or 1),
        )
        strategy = Strategy(
            dp=8,
            ep=8 if experts else 1,
            micro_batch=int(row["micro_batch"] or 0),
            overlap=False,
        )
        yield Row(
            source="megablocks",
            group=f"{row['model']} {row['kind']}",
            device="a100-sxm",
            model=model,
            strategy=strategy,
            execution="eager",
            seconds=float(days) * 86400 * 512 * 1024 / 10e9,
        )


def list_megatron() -> Iterator[Row]:
    """The table of Megatron-core on H100, whose times are derived from a count of FLOP (5 %)."""
    for row in _read("megatron_core_h100_table.csv"):
        counts = {name: int(row[name]) for name in ("tp", "pp", "dp")}
        layers = int(row["layers"])
        shape = Shape(layers, int(row["hidden"]), int(row["heads"]), 0, 0, int(row["vocab"]))
        batch = int(row["global_batch"])
        model = _make("gpt", batch, int(row["seq"]), shape, **_HALF, attention="flash2")
        # neither is stated; chunks have two layers each, as NeMo's GPT-3 175B
        counts["micro_batch"] = 4 if counts["pp"] == 1 else 1
        chunks = layers // counts["pp"] // 2 if counts["pp"] > 1 else 1
        yield Row(
            source="megatron",
            group=row["model"],
            device="h100-sxm",
            model=model,
            strategy=_share(counts, chunks, zero=1),
            execution="compiled",
            seconds=float(row["iter_time_s_derived"]),
        )


#: Settings of the models of arXiv:2205.05198.
_MEGATRON: dict[str, Any] = {
    "dtype": "fp16",
    "mixed": True,
    "fused": True,
    "attention": "eager",
    "dropout": 0.1,
}


def list_recomputed() -> Iterator[Row]:
    """arXiv:2205.05198, table 5: layers recomputed, or attention recomputed with sequence
    parallelism."""
    for row in _read("seqsel_iteration_times.csv"):
        counts = {name: int(row[name]) for name in ("tp", "pp", "dp", "micro_batch")}
        vocabulary = int(row["vocab"])
        shape = Shape(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 0, 0, vocabulary)
        batch = int(row["global_batch"])
        is_selective = "selective" in row["variant"]
        strategy = _share(
            counts,
            int(row["interleave_m"]) if counts["pp"] > 1 else 1,
            overlap=False,
            checkpoint="selective" if is_selective else "full",
            sequence_parallel=is_selective,
            tiled=False,
        )
        yield Row(
            source="seqsel",
            group=row["model"],
            device="a100-sxm",
            model=_make(row["model"], batch, int(row["seq"]), shape, **_MEGATRON),
            strategy=strategy,
            execution="compiled",
            seconds=float(row["iter_time_s"]),
        )


@cache
def _fit_scales(source: str) -> Scales:
    """Scales that are fitted to the steps of all other sources."""
    steps = [step for step in _list_steps() if step.source != source]
    return fit_scales(steps, gpu_context.GENERATIONS)


def find_cluster(device: str, ranks: int) -> Platform:
    """A cluster of the device of a row, without scales.

    `device` may name the bandwidth of its memory and of the link between nodes [B/s] and its power
    cap [W], too.
    """
    name, *facts = device.split()
    bandwidth, link, power = facts or ("", "", "")
    platform = gpu_context.find_platform(name, ranks, bandwidth, link)
    if power:
        platform = platform.with_power(float(power))
    return platform


@cache
def _find_platform(device: str, ranks: int, source: str) -> Platform:
    """A cluster with scales that are fitted to the steps of all other sources."""
    name = device.split()[0]
    generation = name.partition("-")[0]
    if generation not in gpu_context.GENERATIONS:  # only recipes of NVIDIA ran on it
        local = load_platform(gpu_context.NODES[generation])
        if generation == "gb200":  # NVLink of 72 GPUs
            local = local.with_link("inter", bandwidth=9e11, latency=2e-6)
        local = replace(local, context=replace(local.context, stacks={}))
        return local.with_nodes(max(ranks // local.network.ranks_per_node, 1))
    platform = find_cluster(device, ranks)
    text = f"all but {source}"
    scales = _fit_scales(source)
    return add_published(platform, scales, generation, source=text, date="2026-11-23")


@cache
def _list_steps() -> list[Any]:
    steps = gpu_context.list_steps(gpu_context.read_rows())
    return [step for step in steps if gpu_context.is_fitted(step)]


class _Alike(NamedTuple):
    """What rows have in common that are priced together; the batch of the model is 1."""

    device: str
    ranks: int
    source: str
    model: Transformer
    execution: str


def _price_alike(alike: _Alike, rows: Sequence[Row]) -> list[dict[str, float]]:
    """Predict rows whose models differ only in their batch."""
    platform = _find_platform(alike.device, alike.ranks, alike.source)
    batches: Any = np.array([row.model.batch for row in rows])
    model = replace(alike.model, batch=batches)
    strategies = Strategy.stack([row.strategy for row in rows])

    def price(model: Transformer) -> dict[str, Any]:
        return price_strategies(model, platform, strategies, alike.execution, near=np.inf)

    columns = price(model)
    # weights in half precision, updated as copies in fp32
    if model.dtype == "fp16" and not model.mixed:
        wide = price(replace(model, mixed=True))
        columns["time"] = columns["time"] + wide["update"] - columns["update"]
    priced = []
    for place, row in enumerate(rows):
        figures = {name: float(values[place]) for name, values in columns.items()}
        stated = widen(figures["time"], figures["spread"], row.seconds)
        priced.append({**figures, **stated})
    return priced


def price_rows(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Predict rows: parts [s], memory [B], and time with an 80 % interval beside the published one
    [s].

    Rows of models that differ only in their batch are priced together.
    """
    groups = dict[_Alike, list[int]]()
    for place, row in enumerate(rows):
        model = replace(row.model, batch=1)
        ranks = max(row.strategy.ranks, 8)
        alike = _Alike(row.device, ranks, row.source, model, row.execution)
        groups.setdefault(alike, []).append(place)
    priced = [dict[str, float]() for _ in rows]
    for alike, places in groups.items():
        together = _price_alike(alike, [rows[place] for place in places])
        for place, figures in zip(places, together, strict=True):
            priced[place] = figures
    return priced


def price_row(row: Row) -> dict[str, float]:
    """Predict one row, as `price_rows` does."""
    return price_rows([row])[0]


class PredictedMemory(NamedTuple):
    """The most that a step allocates, and what its process takes beside it [B]."""

    allocated: float
    reserve: float


def predict_memory(row: Row) -> PredictedMemory:
    """Memory of a step of torchtitan.

    The loss was not compiled, and its tensors are the largest.
    """
    platform = find_cluster(row.device, row.strategy.ranks)
    columns = price_strategies(
        row.model, platform, Strategy.stack([row.strategy]), "eager", stack="torchtitan"
    )
    return PredictedMemory(float(columns["needs"][0]), float(columns["reserve"][0]))


def judge_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of a source and the share inside the 80 % interval [%]; pairs of a group, and those in
    right order [-]."""
    priced = price_rows(rows)
    pairs = 0
    ranked = 0
    for (row, one), (other_row, other) in combinations(zip(rows, priced, strict=True), 2):
        is_unlike = abs(np.log(row.seconds / other_row.seconds)) > 0.05
        if row.group == other_row.group and is_unlike:
            pairs += 1
            measured = one["measured"] - other["measured"]
            predicted = one["predicted"] - other["predicted"]
            ranked += measured * predicted > 0
    source = rows[0].source
    counts = {"pairs": pairs, "ranked": ranked, "bar": BARS[source]}
    return {"steps": source, **judge(priced), **counts}


#: Fields of a model that `perfkit.calibration.runs.tune` takes.
_RUN_FIELDS = (
    "batch",
    "sequence",
    "positions",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "inner",
    "vocabulary",
    "norm",
    "gated",
    "rotary",
    "tie",
    "bias",
)


def list_runs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows in the form of `perfkit.calibration.runs.tune`."""
    runs = []
    for row in rows:
        sizes = {name: getattr(row.model, name) for name in _RUN_FIELDS}
        measured = {"execution": row.execution, "seconds": row.seconds}
        runs.append({**sizes, **vars(row.strategy), **measured})
    return runs


def _draw_half(names: Sequence[str], seed: int, rng: np.random.Generator) -> set[str]:
    """Half of the names; odd seeds draw the larger half."""
    count = (len(names) + seed % 2) // 2
    return set(rng.permutation(names)[:count])


def judge_tuned(rows: Sequence[Row], how: str, draws: int = 10, runs: int = 30) -> dict[str, Any]:
    """Errors of models that are left out when a platform is tuned to at most so many runs of the
    others [%].

    Half of the models are left out in so many draws, or one at a time. All rows are of one device,
    and the platform has scales of all other sources.
    """
    first = rows[0]
    models = [f"{row.model.layers} {row.model.hidden} {row.model.name}" for row in rows]
    listed = list(zip(list_runs(rows), models, strict=True))
    ranks = max(row.strategy.ranks for row in rows)
    platform = _find_platform(first.device, ranks, first.source)
    names = sorted(set(models))
    judged, expected = list[dict[str, float]](), list[float]()
    for seed in range(draws if how == HALVES else len(names)):
        rng = np.random.default_rng(seed)
        left_out = _draw_half(names, seed, rng) if how == HALVES else {names[seed]}
        known = [run for run, model in listed if model not in left_out]
        unseen = [run for run, model in listed if model in left_out]
        fitted = [known[place] for place in rng.permutation(len(known))[:runs]]
        with keep_quiet():
            tuning = tune(first.model, platform, fitted)
            frame = tuning.price(unseen)
        columns = frame.select(
            predicted="predicted_s", measured="seconds", low="low_s", high="high_s"
        )
        judged += columns.to_dicts()
        expected.append(100 * tuning.error)
    return {
        "steps": first.source,
        "judged": how,
        "expected": float(np.mean(expected)),
        **judge(judged),
        "bar": TUNED[first.source, how],
    }


#: The sources that are judged.
LISTS = (list_vtrain, list_torchtitan, list_recipes, list_megatron, list_recomputed)
_FIGURES = {
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:.1f}",
    "inside": "{inside:.1f}",
}


def _print_errors(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> None:
    mean = np.mean([abs(row["error"]) for row in rows])
    print(f"\n{title}: {mean:.1%} off in mean\n{lay_out(rows, columns)}")


_TUNED = {
    "steps": "{steps}",
    "judged": "{judged}",
    **_FIGURES,
    "expected": "{expected:.1f}",
    "bar": "{bar:g}",
}


def _print_tuned() -> None:
    vtrain = list(list_vtrain(alone=True))
    figures = [judge_tuned(vtrain, HALVES), judge_tuned(vtrain, "one left out")]
    figures.append(judge_tuned(list(list_recipes()), HALVES))
    print(f"\nTuned to at most 30 runs of other models\n{lay_out(figures, _TUNED)}")


def _time_layer(experiment: str, layers: int, measured: float) -> float:
    """Time of so many layers of the 22B model on 8 A100 [s]."""
    checkpoint = "none"
    if "selective" in experiment:
        checkpoint = "selective"
    elif "full" in experiment:
        checkpoint = "full"
    strategy = Strategy(
        tp=8,
        micro_batch=4,
        checkpoint=checkpoint,
        sequence_parallel="sequence_parallel" in experiment,
    )
    model = _make("22b", 4, 2048, Shape(layers, 6144, 64, 0, 0, 51200), **_MEGATRON)
    row = Row("seqsel", "", "a100-sxm", model, strategy, "compiled", measured)
    priced = price_row(row)
    return priced["work"] + priced["tensor"]


def time_layers() -> list[dict[str, Any]]:
    """arXiv:2205.05198, table 4: a layer of the 22B model on 8 A100 [s], predicted as two layers
    minus one."""
    rows = []
    for row in _read("seqsel_layer_times_22B.csv"):
        name = row["experiment"]
        measured = float(row["combined_ms"]) / 1e3
        predicted = _time_layer(name, 2, measured) - _time_layer(name, 1, measured)
        error = predicted / measured - 1
        rows.append({"name": name, "measured": measured, "predicted": predicted, "error": error})
    return rows


def time_exchanges() -> list[tuple[int, float, float]]:
    """Tutel, table 2: share of all_to_all in a layer of experts by number of A100, published and
    predicted [-].

    Precision and experts of a token are not stated; fp32 (with TF32) and two, the defaults of its
    program, came nearest to its times.
    """
    shares = []
    for row in _read("tutel_table2_a2a.csv"):
        ranks = int(row["gpus"])
        tokens = 2 * int(row["tokens_per_iter"])
        platform = load_platform(f"a100-sxm-8x{ranks // 8}")
        with keep_quiet():
            exchange = platform.collective("all_to_all", tokens * 4096 * 4.0, ranks=ranks)
            product = platform.gemm(tokens // 2, 4096, 4096, dtype="tf32", batch=2)
        moved = 4 * exchange.time
        computed = 6 * product.time
        published = float(row["all_to_all_pct"]) / 100
        shares.append((ranks, published, moved / (moved + computed)))
    return shares


def find_crossing(nbytes: float) -> int:
    """Smallest power of two of A100 on which a two-level all_to_all is faster than a flat one [-].

    Tutel, table 6 (without pipelining): between 128 and 256, on average over 243 layers.
    """
    for nodes in 2 ** np.arange(1, 9):
        ranks = int(8 * nodes)
        platform = load_platform(f"a100-sxm-8x{nodes}")
        with keep_quiet():
            flat = platform.collective("all_to_all", nbytes, ranks=ranks)
            gathered = platform.collective("all_to_all", nbytes, ranks=ranks, algorithm="two_level")
        if gathered.time < flat.time:
            return ranks
    raise ValueError(f"two levels are never faster at {nbytes:g} B; take a smaller message")


def _print_steps(title: str, rows: Iterable[Row]) -> None:
    """Errors of steps, one by one."""
    cells = []
    for row in rows:
        priced = price_row(row)
        is_inside = priced["low"] < row.seconds < priced["high"]
        inside = "yes" if is_inside else "no"
        cells.append({"name": row.group, "error": priced["error"], "held": inside})
    _print_errors(title, cells, {"step": "{name}", "error": "{error:+.0%}", "inside": "{held}"})


def _print_experts() -> None:
    _print_steps("MegaBlocks (arXiv:2211.15841, figure 8)", list_megablocks())
    recipes = list_recipes(stated=True)
    _print_steps("NVIDIA's recipes with experts, and on Blackwell", recipes)
    shares = []
    for ranks, published, predicted in time_exchanges():
        shares.append(f"{ranks}: {published:.0%} and {predicted:.0%}")
    print(
        "\nall_to_all in a layer of experts on A100, published and predicted (Tutel, table 2): "
        + ", ".join(shares)
    )
    crossings = []
    for nbytes in (4e6, 16e6, 64e6):
        crossings.append(f"{find_crossing(nbytes):d} at {nbytes / 1e6:g} MB")
    print(
        "Two levels are faster from so many A100 on (Tutel, table 6: between 128 and 256): "
        + ", ".join(crossings)
    )


def _print_parts() -> None:
    _print_errors(
        "A layer of 22B parameters on 8 A100 (arXiv:2205.05198, table 4)",
        time_layers(),
        {
            "layer": "{name}",
            "published": "{measured:.1fms} ms",
            "predicted": "{predicted:.1fms} ms",
            "error": "{error:+.1%}",
        },
    )


_LONG = 8192


def _print_throughput(
    name: str, rows: Sequence[Row], priced: Sequence[Mapping[str, float]]
) -> None:
    """Errors of the throughput of one model over long sequences."""
    errors = list[float]()
    for row, figures in zip(rows, priced, strict=True):
        if row.model.name == name and row.model.sequence > _LONG:
            errors.append(figures["measured"] / figures["predicted"] - 1)
    mean = np.abs(errors).mean()
    print(f"{name}: {len(errors)} rows, mean error {mean:.1%}, bias {np.mean(errors):+.1%}")


_MEMORY = {
    "model": "{model}",
    "ranks": "{ranks}",
    "sequence": "{sequence}",
    "reserved GiB": "{reserved:.1f}",
    "error": "{error:+.1%}",
}


def _print_memory(rows: Sequence[Row]) -> None:
    """Reserved memory of steps, predicted and published."""
    cells = []
    for row in rows:
        predicted = predict_memory(row).allocated
        cells.append(
            {
                "model": row.model.name,
                "ranks": row.strategy.ranks,
                "sequence": row.model.sequence,
                "reserved": row.reserved / 2**30,
                "error": predicted / row.reserved - 1,
            }
        )
    errors = np.abs([cell["error"] for cell in cells])
    spread = f"median {np.median(errors):.1%}, at most {errors.max():.1%}"
    _print_errors(f"Memory of {len(cells)} steps of torchtitan ({spread})", cells, _MEMORY)


def _print_torchtitan() -> None:
    rows = list(list_torchtitan(alone=True))
    priced = price_rows(rows)
    print("\nThroughput of torchtitan over sequences of 32768 to 262144 (tables 2 and 6)")
    for name in ("llama3-8b", "llama3-405b"):
        _print_throughput(name, rows, priced)
    _print_memory(rows)


#: Models that are drawn.
_DRAWN = ("gpt2-medium", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "llama-2-7b", "llama-3-8b")


def _draw_model(rng: np.random.Generator) -> tuple[Transformer, str]:
    """A model, and the platform that it is trained on."""
    settings: dict[str, Any] = {
        "mixed": bool(rng.integers(2)),
        "fused": bool(rng.integers(2)),
        "sequence": 512 * int(rng.integers(1, 3)),
    }
    if rng.random() < 0.2:
        settings["experts"] = 8
        settings["top_k"] = 2
    batch = int(2 ** rng.integers(4, 7))
    node = rng.choice(["a100-sxm-8", "h100-sxm-8"])
    name = str(rng.choice(_DRAWN))
    return Transformer.preset(name, batch=batch, dtype="bf16", **settings), f"{node}x16"


def _draw_power(rng: np.random.Generator, most: int) -> int:
    """A power of two, at most 2 to the power of this."""
    return 1 << int(rng.integers(0, most + 1))


def _draw_fields(
    rng: np.random.Generator, model: Transformer, schedules: Sequence[str]
) -> dict[str, Any]:
    """Fields of a strategy, which need not be valid."""
    fields: dict[str, Any] = {
        "tp": _draw_power(rng, 3),
        "pp": _draw_power(rng, 3),
        "dp": _draw_power(rng, 4),
        "micro_batch": _draw_power(rng, 3),
        "ep": _draw_power(rng, 3 if model.experts else 0),
        "sequence_parallel": bool(rng.integers(2)),
        "cp_kind": str(rng.choice(["ring", "ulysses"])),
        "cp": 1 << max(int(rng.integers(-2, 3)), 0),
        "zero": int(rng.integers(4)),
        "overlap": bool(rng.random() < 0.8),
        "schedule": str(rng.choice(schedules)),
        "checkpoint": str(rng.choice(["none", "full"])),
        "chunks": 1,
    }
    if fields["schedule"] in CHUNKED:
        fields["chunks"] = int(rng.integers(2, 4))
    return fields


def _is_sensible(fields: Mapping[str, Any]) -> bool:
    """Whether chunks have stages, shards of gradients none, and replicas divide by ranks of experts."""
    if fields["dp"] % fields["ep"]:
        return False
    if fields["pp"] == 1:
        return bool(fields["chunks"] == 1)
    return bool(fields["zero"] <= 1)


def _fits(model: Transformer, platform: Platform, strategy: Strategy, execution: str) -> bool:
    """Whether a valid strategy has 2 to 128 ranks and fits in their memory."""
    if not 1 < strategy.ranks <= 128:
        return False
    case = make_case(platform, apply_stack(model, Strategy.stack([strategy]), execution, None))
    needs = measure_strategies(case).total + WORKSPACE
    return bool(needs[0] <= (platform.memory_of_rank or 0.0))


class Drawn(NamedTuple):
    """A random strategy: its model, the name of its platform, the strategy and the execution."""

    model: Transformer
    platform: str
    strategy: Strategy
    execution: str


def draw_strategies(
    count: int, seed: int = 7, schedules: Sequence[str] = _DRAWN_TOGETHER
) -> list[Drawn]:
    """Random strategies that are valid and fit in memory: 2 to 128 GPUs, six models, some with
    experts, with one of some schedules.

    ZeRO stages 2 and 3 are drawn only without pipeline stages.
    """
    rng = np.random.default_rng(seed)
    drawn = list[Drawn]()
    while len(drawn) < count:
        model, platform = _draw_model(rng)
        fields = _draw_fields(rng, model, schedules)
        execution = str(rng.choice(["eager", "compiled"], p=[2 / 3, 1 / 3]))
        if not _is_sensible(fields):
            continue
        strategy = Strategy(**fields)
        with suppress(ValueError):
            check_strategy(model, strategy)
            if _fits(model, load_platform(platform), strategy, execution):
                drawn.append(Drawn(model, platform, strategy, execution))
    return drawn


def draw_even_pipelines(
    count: int, seed: int, schedules: Sequence[str] = _DRAWN_TOGETHER
) -> list[Drawn]:
    """Random strategies as `draw_strategies` finds them, with stages of as many layers each.

    Their models have small and large vocabularies, which make the first and the last stage slow.
    """
    rng = np.random.default_rng(seed)
    pipelines = []
    for drawn in draw_strategies(3 * count, seed, schedules):
        stages = drawn.strategy.pp * drawn.strategy.chunks
        if drawn.strategy.pp > 1 and drawn.model.layers % stages == 0:
            vocabulary = int(rng.choice([8_000, 32_000, 50_304, 128_256, 256_000]))
            model = replace(drawn.model, vocabulary=vocabulary)
            pipelines.append(drawn._replace(model=model))
    return pipelines[:count]


def draw_unlike_pipelines(
    count: int, seed: int, schedules: Sequence[str] = _DRAWN_TOGETHER
) -> list[Drawn]:
    """Random strategies as `draw_strategies` finds them, with 2 to 8 stages of unlike layers, or
    whose replicas share gradients or weights (ZeRO stages 2 and 3)."""
    rng = np.random.default_rng(seed)
    pipelines = list[Drawn]()
    for drawn in draw_strategies(6 * count, seed, schedules):
        layers = drawn.model.layers - int(rng.integers(0, 4))
        pp = int(rng.choice([2, 3, 4, 5, 6, 8]))
        zero = int(rng.integers(4))
        schedule = str(rng.choice(schedules))
        chunks = int(rng.integers(2, 4)) if schedule in CHUNKED else 1
        strategy = replace(
            drawn.strategy,
            tp=min(drawn.strategy.tp, 4),
            cp=1,
            pp=pp,
            zero=zero,
            schedule=schedule,
            chunks=chunks,
        )
        model = replace(drawn.model, layers=layers)
        is_unlike = layers % (pp * chunks) != 0
        with suppress(ValueError):
            check_strategy(model, strategy)
            if strategy.ranks <= 128 and (is_unlike or zero > 1):
                pipelines.append(drawn._replace(model=model, strategy=strategy))
    return pipelines[:count]


def compare_events(strategies: Sequence[Drawn]) -> list[float]:
    """Time of the simulation over that of the closed forms [-]."""
    ratios = []
    for model, name, strategy, execution in strategies:
        stacked = Strategy.stack([strategy])
        closed = price_strategies(model, load_platform(name), stacked, execution)
        with keep_quiet():
            events = predict(model, name, strategy=strategy, execution=execution)
        ratios.append(events.time / float(closed["time"][0]))
    return ratios


def _print_agreement() -> None:
    errors = np.array(compare_events(draw_strategies(200))) - 1
    sizes = np.abs(errors)
    near = f"{np.mean(sizes <= 0.05):.1%} within 5%, {np.mean(sizes <= 0.1):.1%} within 10%"
    print(
        f"\n200 random strategies, event loop over closed forms: {near}; mean {sizes.mean():.1%}, "
        f"bias {errors.mean():+.1%}, 95 % within {np.quantile(sizes, 0.95):.1%}"
    )


def state_strategy(tp: Any, pp: Any, micro: Any) -> tuple[Transformer, Strategy]:
    """GPT-3 175B, and a strategy of `WAYS` or an array of them."""
    gpt = Transformer.preset("gpt3-175b", batch=BATCH, dtype="bf16", mixed=True, fused=True)
    return gpt, Strategy(
        tp=tp, pp=pp, dp=RANKS // (tp * pp), micro_batch=micro, zero=1, sequence_parallel=tp > 1
    )


def ask_strategies(questions: Sequence[tuple[int, int, int]]) -> Sequence[float]:
    """Times of an iteration [s]; pricing also finds parts, spread and memory."""
    gpt, ways = state_strategy(*np.array(questions, dtype=float).T)
    # each field an array
    found = price_strategies(gpt, load_platform("a100-sxm-8x128"), ways.select(slice(None)))
    return list(found["time"])


def _count_priced() -> int:
    """Price 100,000 strategies, of which few differ."""
    return len(ask_strategies(list(islice(cycle(WAYS), 100_000))))


def _count_explored(ranks: int | Sequence[int]) -> int:
    """List, price and rank unlike strategies on so many GPUs."""
    gpt, _ = state_strategy(1, 1, 1)
    return explore(gpt, "a100-sxm-8x128", ranks).tried


def time_strategies(rounds: int = 5) -> list[dict[str, Any]]:
    """Strategies of GPT-3 175B in a second of processor time, the best of all rounds.

    The same ones again and again are only priced. Unlike ones are listed, priced and ranked.
    """
    all_ranks = [2**power for power in range(3, 11)]
    asks: dict[str, Callable[[], int]] = {
        f"{len(WAYS)} again and again": _count_priced,
        "unlike, on 1,024 GPUs": partial(_count_explored, RANKS),
        "unlike, on 8 to 1,024 GPUs": partial(_count_explored, all_ranks),
    }
    best = dict.fromkeys(asks, math.inf)
    counts = dict.fromkeys(asks, 0)
    for _ in range(rounds):
        for name, ask in asks.items():  # a busy moment hits all of them
            start = time.process_time()
            counts[name] = ask()
            best[name] = min(best[name], time.process_time() - start)
    rows = []
    for name, seconds in best.items():
        count = counts[name]
        speed = {"seconds": seconds, "per_second": count / seconds}
        rows.append({"what": name, "count": count, **speed})
    return rows


_SPEED = {
    "strategies of GPT-3 175B": "{what}",
    "n": "{count:,}",
    "all": "{seconds:time}",
    "a second": "{per_second:,.0f}",
}


def _print_speed() -> None:
    print(f"\n{lay_out(time_strategies(), _SPEED)}")


_STEPS = {
    "steps": "{steps}",
    "n": "{n}",
    **_FIGURES,
    "pairs": "{pairs}",
    "ranked": "{ranked}",
    "bar": "{bar:g}",
}


@command({})
def main(given: Any) -> None:
    """Published steps of ranks that share layers and stages, beside predictions."""
    print(lay_out([judge_rows(list(list_rows())) for list_rows in LISTS], _STEPS))
    _print_parts()
    _print_experts()
    _print_torchtitan()
    _print_agreement()
    _print_tuned()
    _print_speed()
