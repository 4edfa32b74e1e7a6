"""Published steps with tensor, context, expert and pipeline parallelism, beside predictions.

    python -m benchmarks.scale

Rows come from the folder that PERFKIT_SHARED_DATA names: vTrain (single node), torchtitan, recipes
of NVIDIA, the table of Megatron-core, and arXiv:2205.05198, table 5. Scales are fitted to
reference_data/published/gpu_steps.csv without the steps of the source that is judged.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations, cycle, islice, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks import gpu_context
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.gpu_scales import add_published, fit_scales
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.runs import tune
from perfkit.exploration.strategies import explore
from perfkit.models.partitions import CHUNKED, SCHEDULES
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.stages import check_strategy
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import PRESETS, Transformer

#: Largest mean error without any run of the source [%].
BARS = {"vtrain": 12.0, "torchtitan": 15.0, "nvidia": 18.0, "megatron": 15.0, "seqsel": 8.0}
HALVES = "half of the models"
#: The same if the platform was tuned to at most 30 runs of other models of the source.
TUNED = {("vtrain", HALVES): 8.0, ("vtrain", "one left out"): 11.0, ("nvidia", HALVES): 12.0}
_LLAMA = gpu_context.LLAMA
_HALF: dict[str, Any] = {"dtype": "bf16", "mixed": True, "fused": True}
_SIZES = ("layers", "hidden", "heads", "kv_heads", "inner", "vocabulary")
#: Sizes of the models that sources name, by `_SIZES`: Nemotron (arXiv:2402.16819 and 2406.11704),
#: 5b, 20b, 8b and 22b as in NeMo, GPT-3 (arXiv:2005.14165) with the vocabulary of NeMo, and the
#: presets of perfkit for Llama.
_SHAPES: dict[str, tuple[int, ...]] = {
    "gpt3-5b": (24, 4096, 32, 0, 0, 51200),
    "gpt3-20b": (44, 6144, 48, 0, 0, 51200),
    "gpt3-175b": (96, 12288, 96, 0, 0, 51200),
    "nemotron-8b": (32, 4096, 32, 0, 0, 256000),
    "nemotron-22b": (40, 6144, 48, 0, 0, 256000),
    "nemotron-340b": (96, 18432, 96, 8, 73728, 256000),
}
_SHAPES |= {
    name.replace("llama-", "llama"): tuple(sizes[key] for key in _SIZES)
    for name, sizes in PRESETS.items()
    if "llama" in name
}
#: Sizes, number of experts, experts of a token and width of a head: Qwen3 (arXiv:2505.09388).
_EXPERTS = {
    "qwen3-30b-a3b": (48, 2048, 32, 4, 768, 151936, 128, 8, 128),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 1536, 151936, 128, 8, 128),
}

RANKS, BATCH = 1024, 1536
#: Tensor-parallel ranks, stages, and sequences of a micro-batch of GPT-3 175B on 1,024 A100: a
#: batch of 1,536 sequences of 2,048 tokens, 1F1B, sequence-parallel, optimizer states sharded over
#: replicas.
WAYS = [
    (tp, pp, micro)
    for tp in (1, 2, 4, 8)
    for pp in (4, 8, 12, 16, 24, 32, 48, 96)
    for micro in (1, 2, 3, 4, 6)
    if 1024 % (tp * pp) == 0 and 1536 % (1024 // (tp * pp) * micro) == 0
]


class Row(NamedTuple):
    """A published step: source, group whose steps are ranked, device, model, strategy, execution
    and time [s].

    `reserved` is the memory [B]; `selective` means that every other product and attention were not
    recomputed.
    """

    source: str
    group: str
    device: str
    model: Transformer
    strategy: Strategy
    execution: str
    seconds: float
    reserved: float = 0.0
    selective: bool = False


def _read(name: str) -> list[dict[str, str]]:
    return read_csv(find_shared_data("end_to_end", name))


def _make(name: str, batch: int, sequence: int, shape: Sequence[int], **about: Any) -> Transformer:
    sizes: dict[str, Any] = dict(zip(_SIZES, shape, strict=True))
    return Transformer(name, True, batch, sequence, positions=sequence, **sizes, **about)


def _share(n: Mapping[str, int], chunks: int, **about: Any) -> Strategy:
    """A strategy from the counts that are known, sequence-parallel with tensor parallelism; chunks
    are interleaved."""
    ways: dict[str, Any] = {
        key: n[key] for key in ("tp", "pp", "dp", "cp", "ep", "micro_batch") if key in n
    }
    ways |= {"schedule": "interleaved" if chunks > 1 else "1f1b", "chunks": chunks}
    return Strategy(**{**ways, "sequence_parallel": n["tp"] > 1, "tiled": n["tp"] > 1, **about})


def list_vtrain(*, alone: bool = False) -> Iterator[Row]:
    """Megatron-DeepSpeed on a node of A100; with `alone` also the data-parallel runs, which the
    scales are fitted to.

    There is no recomputation: a micro-batch adds the same time with one stage and with several.
    """
    for row in _read("vtrain_singlenode_a100_half.csv"):
        n = {key: int(row[key]) for key in list(row)[:10]}
        tp, pp, dp = (n[f"{key}_parallelism"] for key in ("tensor", "pipeline", "data"))
        if alone or tp * pp > 1:
            shape = (n["layers"], n["hidden_size"], n["attention_heads"], 0, 0, 50257)
            about = {"dtype": "fp16", "attention": "eager", "fused": True, "dropout": 0.1}
            model = _make("gpt", n["global_batch"], n["sequence_length"], shape, **about)
            strategy = Strategy(tp=tp, pp=pp, dp=dp, micro_batch=n["micro_batch"], overlap=False)
            group = f"{shape[:3]} {n['gpus']} {n['global_batch']}"
            yield Row(
                "vtrain",
                group,
                "a100-sxm",
                model,
                strategy,
                "eager",
                float(row["iteration_time_ms"]) / 1e3,
            )


def list_torchtitan(*, alone: bool = False) -> Iterator[Row]:
    """Tables 2, 4, 5 and 6: Llama 3.1 with fp8 products, compiled; with `alone` also runs with FSDP
    alone.

    Pipelines have as many micro-batches as ranks, the default until January 2025 (torchtitan, pull
    781). Tables 1 and 3 have selective checkpoints; here everything is recomputed, and `count_kept`
    gives the memory that they keep.
    """
    for row in _read("torchtitan_h100.csv"):
        words = row["parallelism"].split()
        n = {
            key: int(words[words.index(key) + 1]) if key in words else 1
            for key in ("fsdp", "tp", "pp", "cp")
        }
        if alone or n["tp"] * n["cp"] > 1:
            batch, name = int(row["global_batch"]), row["model"].replace("llama-3.1-", "llama3-")
            about = {
                **_HALF,
                **_LLAMA,
                "dtype": "fp8" if "fp8" in row["precision"] else "bf16",
                "attention": "flash2",
            }
            model = _make(name, batch, int(row["sequence"]), _SHAPES[name], **about)
            n |= {"dp": n["fsdp"], "micro_batch": int(row["local_batch"]) // n["pp"]}
            about = {
                "zero": 3 if n["pp"] == 1 else 1,
                "tiled": "async" in words,
                "checkpoint": "full",
            }
            strategy = _share(n, 2 if "interleaved" in words else 1, **about)
            seconds = (
                batch
                * int(row["sequence"])
                / (float(row["tokens_per_s_per_gpu"]) * int(row["gpus"]))
            )
            group, way = (
                f"{name} {row['sequence']}",
                "compiled" if row["compiled"] == "yes" else "eager",
            )
            kept, held = row["checkpointing"] == "selective", float(row["memory_gib_max"]) * 2**30
            yield Row(
                "torchtitan",
                group,
                "h100-sxm 2.4e12 5e10",
                model,
                strategy,
                way,
                seconds,
                held,
                kept,
            )


def list_recipes(*, stated: bool = False) -> Iterator[Row]:
    """Recipes of NVIDIA in fp8, by NeMo and Megatron-Bridge, of dense models on H100; the first
    setting of two.

    With `stated` those without a bar: models with experts, and runs on Blackwell.
    """
    for row in _read("nvidia_recipes.csv"):
        name, device = (
            row["model"].lower().replace("_", "-"),
            row["system"].partition("-")[2].lower(),
        )
        shape = _EXPERTS.get(name) or _SHAPES.get(name.replace("3.1", "3"))
        if not shape or stated != (device != "h100" or name in _EXPERTS):
            continue
        keys = ("gpus", "tp", "pp", "cp", "vp", "ep", "micro_batch")
        n = {key: int(own) if (own := row[key].split(" ")[0]).isdigit() else 1 for key in keys}
        batch, sequence = int(row["global_batch"]), int(row["sequence"])
        about = {**_HALF, "dtype": "fp8", "attention": "flash3"} | (
            {} if "gpt" in name or "nemo" in name else _LLAMA
        )
        about |= {
            **dict(zip(("experts", "top_k", "head_width"), shape[6:], strict=False)),
            "qk_norm": "qwen3" in name,
        }
        model = _make(name, batch, sequence, shape[:6], **about)
        n["dp"] = n["gpus"] // n["tp"] // n["pp"] // n["cp"]
        n["ep"] = min(n["ep"], n["dp"])
        zero = 3 if row["fsdp"] == "1" and not stated else 1
        strategy = _share(n, n["vp"] if n["pp"] > 1 else 1, zero=zero)
        seconds = batch * sequence / (float(row["tokens_per_s_per_gpu"]) * n["gpus"])
        group = f"{name} {device if stated else n['gpus']}"
        yield Row("nvidia", group, f"{device}-sxm", model, strategy, "compiled", seconds)


def list_megablocks() -> Iterator[Row]:
    """arXiv:2211.15841, figure 8: 10 billion tokens on 8 A100, without a compiler."""
    for row in _read("megablocks.csv"):
        if days := row["train_days_10B_tokens_8xA100_80GB"]:
            n = {key: int(row[key] or 0) for key in ("layers", "hidden", "experts", "micro_batch")}
            about = {
                **_HALF,
                "dtype": "fp16",
                "attention": "eager",
                "dropout": 0.1,
                "experts": n["experts"],
                # replicas of Megatron do not run under autocast; see `price_rows`
                "mixed": n["experts"] > 0,
            }
            about["capacity"] = float(row["kind"].partition("cf=")[2] or 1)
            shape = (n["layers"], n["hidden"], n["hidden"] // 64, 0, 0, 51200)
            model = _make(row["model"], 512, 1024, shape, **about)
            strategy = Strategy(
                dp=8, ep=8 if n["experts"] else 1, micro_batch=n["micro_batch"], overlap=False
            )
            seconds = float(days) * 86400 * 512 * 1024 / 10e9
            yield Row(
                "megablocks",
                f"{row['model']} {row['kind']}",
                "a100-sxm",
                model,
                strategy,
                "eager",
                seconds,
            )


def list_megatron() -> Iterator[Row]:
    """The table of Megatron-core on H100, whose times are derived from a count of FLOP (5 %)."""
    for row in _read("megatron_core_h100_table.csv"):
        n = {
            key: int(row[key])
            for key in ("heads", "hidden", "layers", "vocab", "tp", "pp", "dp", "global_batch")
        }
        shape = (n["layers"], n["hidden"], n["heads"], 0, 0, n["vocab"])
        model = _make("gpt", n["global_batch"], int(row["seq"]), shape, **_HALF, attention="flash2")
        # not stated; two layers each, as NeMo's GPT-3 175B
        chunks = n["layers"] // n["pp"] // 2 if n["pp"] > 1 else 1
        strategy = _share(n | {"micro_batch": 4 if n["pp"] == 1 else 1}, chunks, zero=1)
        yield Row(
            "megatron",
            row["model"],
            "h100-sxm",
            model,
            strategy,
            "compiled",
            float(row["iter_time_s_derived"]),
        )


def list_recomputed() -> Iterator[Row]:
    """arXiv:2205.05198, table 5: layers recomputed, or attention recomputed with sequence
    parallelism."""
    for row in _read("seqsel_iteration_times.csv"):
        n = {
            k: int(row[k])
            for k in ("layers", "hidden", "heads", "tp", "pp", "dp", "global_batch", "interleave_m")
        }
        shape = (n["layers"], n["hidden"], n["heads"], 0, 0, int(row["vocab"]))
        about = {**_HALF, "dtype": "fp16", "attention": "eager", "dropout": 0.1}
        model = _make(row["model"], n["global_batch"], int(row["seq"]), shape, **about)
        selective, chunks = "selective" in row["variant"], n["interleave_m"] if n["pp"] > 1 else 1
        again = {
            "checkpoint": "selective" if selective else "full",
            "sequence_parallel": selective,
            "tiled": False,
        }
        strategy = _share(
            n | {"micro_batch": int(row["micro_batch"])}, chunks, overlap=False, **again
        )
        yield Row(
            "seqsel",
            row["model"],
            "a100-sxm",
            model,
            strategy,
            "compiled",
            float(row["iter_time_s"]),
        )


@cache
def _find_platform(device: str, ranks: int, source: str) -> Platform:
    """A cluster with scales that are fitted to the steps of all other sources."""
    name, bandwidth, link = [*device.split(), "", ""][:3]
    steps = [step for step in _list_steps() if step.source != source]
    scales, generation = fit_scales(steps, gpu_context.GENERATIONS), name.partition("-")[0]
    if generation not in gpu_context.GENERATIONS:  # only recipes of NVIDIA ran on it
        local = load_platform(gpu_context.NODES[generation])
        if generation == "gb200":  # NVLink of 72 GPUs
            local = local.with_link("inter", bandwidth=9e11, latency=2e-6)
        return local.with_nodes(max(ranks // local.network.ranks_per_node, 1))
    found = gpu_context.find_platform(name, ranks, bandwidth, link)
    return add_published(found, scales, generation, source=f"all but {source}", date="2026-11-23")


@cache
def _list_steps() -> list[Any]:
    steps = gpu_context.list_steps(gpu_context.read_rows())
    return [step for step in steps if gpu_context.is_fitted(step)]


def price_rows(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Predict rows: parts [s], memory [B], and time with an 80 % interval beside the published one
    [s].

    Rows of models that differ only in their batch are priced together.
    """
    groups, out = dict[Any, list[int]](), [dict[str, float]() for _ in rows]
    for place, row in enumerate(rows):
        alike = (
            row.device,
            max(row.strategy.ranks, 8),
            row.source,
            replace(row.model, batch=1),
            row.execution,
        )
        groups.setdefault(alike, []).append(place)
    for (device, ranks, source, kind, execution), places in groups.items():
        platform, batch = (
            _find_platform(device, ranks, source),
            np.array([rows[n].model.batch for n in places]),
        )
        many, model = Strategy.stack([rows[n].strategy for n in places]), replace(kind, batch=batch)
        found = price_strategies(model, platform, many, execution, near=np.inf)
        # weights in half precision, updated as copies in fp32
        if kind.dtype == "fp16" and not kind.mixed:
            wide = price_strategies(
                replace(model, mixed=True), platform, many, execution, near=np.inf
            )
            found["time"] = found["time"] + wide["update"] - found["update"]
        for n, place in enumerate(places):
            one = {name: float(own[n]) for name, own in found.items()}
            out[place] = one | widen(one["time"], one["spread"], rows[place].seconds)
    return out


def price_row(row: Row) -> dict[str, float]:
    """Predict one row, as `price_rows` does."""
    return price_rows([row])[0]


def count_kept(row: Row) -> float:
    """Memory of selective checkpoints of torchtitan: every other product of a layer, and attention
    [B]."""
    m, s = row.model, row.strategy
    # queries, values, attention, gate and output
    numbers = m.hidden * 3 + m.hidden // m.heads * m.kv_heads + m.inner
    return row.selective * m.layers * s.micro_batch * m.sequence * numbers * 2.0


def judge_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of a source and the share inside the 80 % interval [%]; pairs of a group, and those in
    right order [-]."""
    found = price_rows(rows)
    pairs = [
        (a, b)
        for (one, a), (other, b) in combinations(zip(rows, found, strict=True), 2)
        if one.group == other.group and abs(np.log(one.seconds / other.seconds)) > 0.05
    ]
    ranked = sum(
        (a["measured"] - b["measured"]) * (a["predicted"] - b["predicted"]) > 0 for a, b in pairs
    )
    about = {"pairs": len(pairs), "ranked": ranked, "bar": BARS[rows[0].source]}
    return {"steps": rows[0].source, **judge(found), **about}


def list_runs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows in the form of `perfkit.calibration.runs.tune`."""
    sizes = (
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
    about = (
        {name: getattr(row.model, name) for name in sizes} | vars(row.strategy) for row in rows
    )
    return [
        own | {"execution": row.execution, "seconds": row.seconds}
        for own, row in zip(about, rows, strict=True)
    ]


def judge_tuned(rows: Sequence[Row], how: str, draws: int = 10, runs: int = 30) -> dict[str, Any]:
    """Errors of models that are left out when a platform is tuned to at most so many runs of the
    others [%].

    Half of the models are left out in so many draws, or one at a time. All rows are of one device,
    and the platform has scales of all other sources.
    """
    listed, models = (
        list_runs(rows),
        [f"{row.model.layers} {row.model.hidden} {row.model.name}" for row in rows],
    )
    platform = _find_platform(
        rows[0].device, max(row.strategy.ranks for row in rows), rows[0].source
    )
    judged, said, names = list[dict[str, float]](), list[float](), sorted(set(models))
    for seed in range(draws if how == HALVES else len(names)):
        rng = np.random.default_rng(seed)
        left_out = (
            {names[seed]}
            if how != HALVES
            else {*rng.permutation(names)[: (len(names) + seed % 2) // 2]}
        )
        known = [run for run, own in zip(listed, models, strict=True) if own not in left_out]
        with keep_quiet():
            tuning = tune(
                rows[0].model, platform, [known[n] for n in rng.permutation(len(known))[:runs]]
            )
            found = tuning.price(
                [run for run, own in zip(listed, models, strict=True) if own in left_out]
            )
        judged += (
            found.rename({"seconds": "measured"})
            .select("predicted", "measured", "low", "high")
            .to_dicts()
        )
        said.append(100 * tuning.error)
    about = {"steps": rows[0].source, "judged": how, "expected": float(np.mean(said))}
    return about | judge(judged) | {"bar": TUNED[rows[0].source, how]}


#: The sources that are judged.
LISTS = (list_vtrain, list_torchtitan, list_recipes, list_megatron, list_recomputed)
_FIGURES = {name: f"{{{name}:.1f}}" for name in ("geomean", "mean", "p95", "bias", "inside")}


def _print_errors(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> None:
    mean = np.mean([abs(row["error"]) for row in rows])
    print(f"\n{title}: {mean:.1%} off in mean\n{lay_out(rows, columns)}")


def _print_tuned() -> None:
    vtrain, recipes = list(list_vtrain(alone=True)), list(list_recipes())
    figures = [
        judge_tuned(*asked)
        for asked in ((vtrain, HALVES), (vtrain, "one left out"), (recipes, HALVES))
    ]
    columns = {
        "steps": "{steps}",
        "judged": "{judged}",
        **_FIGURES,
        "expected": "{expected:.1f}",
        "bar": "{bar:g}",
    }
    print(f"\nTuned to at most 30 runs of other models\n{lay_out(figures, columns)}")


def time_layers() -> list[dict[str, Any]]:
    """arXiv:2205.05198, table 4: a layer of the 22B model on 8 A100 [s], predicted as two layers
    minus one."""
    out, about = [], {**_HALF, "dtype": "fp16", "attention": "eager", "dropout": 0.1}
    for row in _read("seqsel_layer_times_22B.csv"):
        name, real, taken = row["experiment"], float(row["combined_ms"]) / 1e3, list[float]()
        again = next((way for way in ("selective", "full") if way in name), "none")
        strategy = Strategy(
            tp=8, micro_batch=4, checkpoint=again, sequence_parallel="sequence_parallel" in name
        )
        for layers in (2, 1):
            model = _make("22b", 4, 2048, (layers, 6144, 64, 0, 0, 51200), **about)
            found = price_row(Row("seqsel", "", "a100-sxm", model, strategy, "compiled", real))
            taken.append(found["work"] + found["tensor"])
        own = taken[0] - taken[1]
        out.append({"name": name, "measured": real, "predicted": own, "error": own / real - 1})
    return out


def time_exchanges() -> list[tuple[int, float, float]]:
    """Tutel, table 2: share of all_to_all in a layer of experts by number of A100, published and
    predicted [-].

    Precision and experts of a token are not stated; fp32 (with TF32) and two, the defaults of its
    program, came nearest to its times.
    """
    out = []
    for row in _read("tutel_table2_a2a.csv"):
        ranks, tokens = int(row["gpus"]), 2 * int(row["tokens_per_iter"])
        platform = load_platform(f"a100-sxm-8x{ranks // 8}")
        with keep_quiet():
            moved = 4 * platform.collective("all_to_all", tokens * 4096 * 4.0, ranks=ranks).time
            computed = 6 * platform.gemm(tokens // 2, 4096, 4096, dtype="tf32", batch=2).time
        out.append((ranks, float(row["all_to_all_pct"]) / 100, moved / (moved + computed)))
    return out


def find_crossing(nbytes: float) -> int:
    """Smallest power of two of A100 on which a two-level all_to_all is faster than a flat one [-].

    Tutel, table 6 (without pipelining): between 128 and 256, on average over 243 layers.
    """
    for nodes in 2 ** np.arange(1, 9):
        platform, ranks = load_platform(f"a100-sxm-8x{nodes}"), int(8 * nodes)
        with keep_quiet():
            flat, gathered = (
                platform.collective("all_to_all", nbytes, ranks=ranks, algorithm=way).time
                for way in (None, "two_level")
            )
        if gathered < flat:
            return ranks
    raise ValueError(f"two levels are never faster at {nbytes:g} B; take a smaller message")


def _print_experts() -> None:
    for title, rows in (
        ("MegaBlocks (arXiv:2211.15841, figure 8)", list_megablocks()),
        ("NVIDIA's recipes with experts, and on Blackwell", list_recipes(stated=True)),
    ):
        cells = []
        for row in rows:
            one = price_row(row)
            held = "yes" if one["low"] < row.seconds < one["high"] else "no"
            cells.append({"name": row.group, "error": one["error"], "held": held})
        _print_errors(title, cells, {"step": "{name}", "error": "{error:+.0%}", "inside": "{held}"})
    shares = ", ".join(
        f"{ranks}: {real:.0%} and {own:.0%}" for ranks, real, own in time_exchanges()
    )
    print(
        f"\nall_to_all in a layer of experts on A100, published and predicted (Tutel, table 2): {shares}"
    )
    crossings = ", ".join(f"{find_crossing(n):d} at {n / 1e6:g} MB" for n in (4e6, 16e6, 64e6))
    print(
        f"Two levels are faster from so many A100 on (Tutel, table 6: between 128 and 256): {crossings}"
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


def _print_torchtitan() -> None:
    listed = list(list_torchtitan(alone=True))
    steps = [*zip(listed, price_rows(listed), strict=True)]
    # the loss was not compiled, and its tensors are the largest
    memory = price_rows([row._replace(execution="eager") for row in listed])
    print("\nThroughput of torchtitan over sequences of 32768 to 262144 (tables 2 and 6)")
    for name in ("llama3-8b", "llama3-405b"):
        own = [one for row, one in steps if row.model.name == name and row.model.sequence > 8192]
        errors = np.array([one["measured"] / one["predicted"] - 1 for one in own])
        print(
            f"{name}: {len(errors)} rows, mean error {abs(errors).mean():.1%}, bias {errors.mean():+.1%}"
        )
    held = [
        {
            "model": row.model.name,
            "ranks": row.strategy.ranks,
            "sequence": row.model.sequence,
            "reserved": row.reserved / 2**30,
            "error": (one["needs"] + count_kept(row)) / row.reserved - 1,
        }
        for row, one in zip(listed, memory, strict=True)
    ]
    errors = np.abs([row["error"] for row in held])
    title = f"Memory of {len(held)} steps of torchtitan (median {np.median(errors):.1%}, at most {errors.max():.1%})"
    columns = {name: f"{{{name}}}" for name in ("model", "ranks", "sequence")}
    _print_errors(
        title, held, {**columns, "reserved GiB": "{reserved:.1f}", "error": "{error:+.1%}"}
    )


def draw_strategies(count: int, seed: int = 7) -> list[tuple[Transformer, str, Strategy, str]]:
    """Random strategies that are valid and fit in memory: 2 to 128 GPUs, six models, some with
    experts.

    ZeRO stages 2 and 3 are drawn only without pipeline stages.
    """
    rng, found = np.random.default_rng(seed), list[tuple[Transformer, str, Strategy, str]]()
    names = ("gpt2-medium", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "llama-2-7b", "llama-3-8b")
    while len(found) < count:
        about: dict[str, Any] = {name: bool(rng.integers(2)) for name in ("mixed", "fused")}
        about["sequence"] = 512 * int(rng.integers(1, 3))
        about |= {"experts": 8, "top_k": 2} if rng.random() < 0.2 else {}
        batch, where = (
            int(2 ** rng.integers(4, 7)),
            f"{rng.choice(['a100-sxm-8', 'h100-sxm-8'])}x16",
        )
        model = Transformer.preset(str(rng.choice(names)), batch=batch, dtype="bf16", **about)
        most: dict[str, int] = {
            "tp": 3,
            "pp": 3,
            "dp": 4,
            "micro_batch": 3,
            "ep": 3 if model.experts else 0,
        }
        ways: dict[str, Any] = {
            name: 1 << int(rng.integers(0, own + 1)) for name, own in most.items()
        }
        ways |= {name: bool(rng.integers(2)) for name in ("sequence_parallel", "ulysses")}
        ways |= {"cp": 1 << max(int(rng.integers(-2, 3)), 0), "zero": int(rng.integers(4))}
        ways["overlap"] = bool(rng.random() < 0.8)
        ways |= {
            "schedule": str(rng.choice(SCHEDULES)),
            "checkpoint": str(rng.choice(["none", "full"])),
        }
        ways["chunks"] = int(rng.integers(2, 4)) if ways["schedule"] in CHUNKED else 1
        execution = str(rng.choice(["eager", "compiled"], p=[2 / 3, 1 / 3]))
        alone = ways["pp"] == 1
        if (ways["chunks"] > 1 if alone else ways["zero"] > 1) or ways["dp"] % ways["ep"]:
            continue
        strategy, platform = Strategy(**ways), load_platform(where)
        with suppress(ValueError):
            check_strategy(model, strategy)
            needs = price_strategies(model, platform, Strategy.stack([strategy]), execution)[
                "needs"
            ][0]
            if 1 < strategy.ranks <= 128 and needs <= (platform.memory_of_rank or 0.0):
                found.append((model, where, strategy, execution))
    return found


def draw_even_pipelines(count: int, seed: int) -> list[tuple[Transformer, str, Strategy, str]]:
    """Random strategies as `draw_strategies` finds them, with stages of as many layers each.

    Their models have small and large vocabularies, which make the first and the last stage slow.
    """
    rng = np.random.default_rng(seed)
    found = []
    for model, where, strategy, execution in draw_strategies(3 * count, seed):
        stages = strategy.pp * strategy.chunks
        if strategy.pp > 1 and model.layers % stages == 0:
            vocabulary = int(rng.choice([8_000, 32_000, 50_304, 128_256, 256_000]))
            found.append((replace(model, vocabulary=vocabulary), where, strategy, execution))
    return found[:count]


def draw_unlike_pipelines(count: int, seed: int) -> list[tuple[Transformer, str, Strategy, str]]:
    """Random strategies as `draw_strategies` finds them, with 2 to 8 stages of unlike layers, or
    whose replicas share gradients or weights (ZeRO stages 2 and 3)."""
    rng = np.random.default_rng(seed)
    found = list[tuple[Transformer, str, Strategy, str]]()
    for model, where, drawn, execution in draw_strategies(6 * count, seed):
        layers = model.layers - int(rng.integers(0, 4))
        pp = int(rng.choice([2, 3, 4, 5, 6, 8]))
        zero = int(rng.integers(4))
        schedule = str(rng.choice(SCHEDULES))
        chunks = int(rng.integers(2, 4)) if schedule in CHUNKED else 1
        tp = min(drawn.tp, 4)
        strategy = replace(drawn, tp=tp, cp=1, pp=pp, zero=zero, schedule=schedule, chunks=chunks)
        model = replace(model, layers=layers)
        unlike = layers % (pp * chunks) != 0
        with suppress(ValueError):
            check_strategy(model, strategy)
            if strategy.ranks <= 128 and (unlike or zero > 1):
                found.append((model, where, strategy, execution))
    return found[:count]


def compare_events(drawn: Sequence[tuple[Transformer, str, Strategy, str]]) -> list[float]:
    """Time of the simulation over that of the closed forms [-]."""
    ratios = []
    for model, where, strategy, execution in drawn:
        found = price_strategies(model, load_platform(where), Strategy.stack([strategy]), execution)
        with keep_quiet():
            events = predict(model, where, strategy=strategy, execution=execution)
        ratios.append(events.time / float(found["time"][0]))
    return ratios


def _print_agreement() -> None:
    errors = np.array(compare_events(draw_strategies(200))) - 1
    near = [f"{np.mean(abs(errors) <= bar):.1%} within {bar:.0%}" for bar in (0.05, 0.1)]
    print(
        f"\n200 random strategies, event loop over closed forms: {', '.join(near)}; mean {abs(errors).mean():.1%}, "
        f"bias {errors.mean():+.1%}, 95 % within {np.quantile(abs(errors), 0.95):.1%}"
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


def time_strategies(rounds: int = 5) -> list[dict[str, Any]]:
    """Strategies of GPT-3 175B in a second of processor time, the best of all rounds.

    The same ones again and again are only priced. Unlike ones are listed, priced and ranked.
    """
    gpt, _ = state_strategy(1, 1, 1)
    many, all_ranks = list(islice(cycle(WAYS), 100_000)), [2**n for n in range(3, 11)]
    asks: dict[str, Callable[[], int]] = {
        f"{len(WAYS)} again and again": lambda: len(ask_strategies(many)),
        "unlike, on 1,024 GPUs": lambda: explore(gpt, "a100-sxm-8x128", RANKS).tried,
        "unlike, on 8 to 1,024 GPUs": lambda: explore(gpt, "a100-sxm-8x128", all_ranks).tried,
    }
    best, counts = dict.fromkeys(asks, math.inf), dict.fromkeys(asks, 0)
    for _, (what, ask) in product(range(rounds), asks.items()):  # a busy moment hits all of them
        start = time.process_time()
        counts[what] = ask()
        best[what] = min(best[what], time.process_time() - start)
    return [
        {"what": what, "count": counts[what], "seconds": own, "per_second": counts[what] / own}
        for what, own in best.items()
    ]


def _print_speed() -> None:
    columns = {"strategies of GPT-3 175B": "{what}", "n": "{count:,}", "all": "{seconds:time}"}
    print(f"\n{lay_out(time_strategies(), {**columns, 'a second': '{per_second:,.0f}'})}")


@command({})
def main(given: Any) -> None:
    """Published steps of ranks that share layers and stages, beside predictions."""
    figures = [judge_rows(list(each())) for each in LISTS]
    columns = {
        "steps": "{steps}",
        "n": "{n}",
        **_FIGURES,
        "pairs": "{pairs}",
        "ranked": "{ranked}",
        "bar": "{bar:g}",
    }
    print(lay_out(figures, columns))
    _print_parts()
    _print_experts()
    _print_torchtitan()
    _print_agreement()
    _print_tuned()
    _print_speed()
