"""Fuzzers of the Python interface and of the command line: odd arguments in every place."""

import contextlib
import copy
import io
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from perfkit.__main__ import main
from perfkit.fitting.parameters import ALGORITHMS
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.models.collectives import OPERATIONS
from perfkit.models.distributions import Uniform, Zipf
from perfkit.models.partitions import CHUNKED, SCHEDULES
from perfkit.workloads.placement_kinds import KINDS
from perfkit.workloads.strategy import CP_KINDS, OFFLOADS
from tests.fuzz.damage import NUMBERS, TEXTS, Rng, choose, damage_tree, draw, junk, vary
from tests.fuzz.entries_files import brief
from tests.fuzz.harness import Entry, Nonsense

PLATFORMS = ("zen5-2", "h100-sxm-8", "a100-sxm-efa-8x8", "v100-sxm-8", "p100-1")
BRIEF = tuple(map(brief, PLATFORMS))
SIZES = (
    1,
    2,
    3,
    4,
    8,
    16,
    64,
    100,
    4096,
    1e6,
    2**31,
    2**53 + 1,
    2**62,
    np.int64(8),
    np.float32(16),
)
BATCHES = (16, 32, 64, 160, 4096, np.int64(64), 2**20, 2**40, 2**62, 7)
BYTES = (0, 1, 4e3, 1e9, [1e3, 1e6])
RANKS = (1, 2, 4, 8, 16, 64)
#: Mostly one of these, so that most of the other arguments matter.
MOSTLY_FALSE = (False,) * 9 + (True,)
MOSTLY_ONE_PLATFORM = ("h100-sxm-8",) * 5 + PLATFORMS
TABLES = (
    pk.EmbeddingTable(1000, 16),
    pk.EmbeddingTable(10**6, 64, 20, 1.1),
    pk.EmbeddingTable(8, 4, 2, name="a\nb"),
)
SMALL = pk.DLRM(rows=[100, 100, 100], dim=16, bottom=[16], top=[16], batch=64)


def pick(rng: Rng, value: Any) -> Any:
    """One of a tuple, or the value itself, or something odd now and then."""
    return junk(rng) if rng.random() < 0.05 else draw(rng, value)


class Call(NamedTuple):
    """What is called, with arguments it needs and others; a tuple is a choice, a function makes a
    value."""

    function: Callable[..., Any]
    must: dict[str, Any]
    may: dict[str, Any] = {}  # noqa: RUF012

    def __call__(self, rng: Rng) -> Any:
        """Call it; a needed argument is odd now and then, unless a function makes it."""
        needed = {}
        for name, value in self.must.items():
            needed[name] = draw(rng, value) if callable(value) else pick(rng, value)
        return self.function(**needed, **vary(rng, self.may, 0.2))


# Workloads, tables and plans.

DLRM = {
    "preset": (None, "dlrm-ddp"),
    "batch": BATCHES,
    "dim": SIZES,
    "features": SIZES,
    "bottom": [16],
    "top": [32, 16],
    "pooling": (1, 2.5, [3, 3]),
    "exponent": (0, 1.05, [0.5, 0.5]),
    "weighted": (False, True, [True, False]),
    "managed_collision": ("", "", "zch", "mpzch"),
    "kernel": ("fused", "fused", "uvm", "uvm_caching", ["fused", "uvm_caching"]),
    "load_factor": (None, None, 0.5, [None, 0.1]),
    "sparse": True,
    "embedding": ("separate", "fused", "exact", "hash"),
    "fused": True,
    "dtype": ("fp32", "fp32", "bf16", "fp16"),
    "optimizer": ("sgd", "sgd", "adagrad"),
    "cross": ((2, 8),),
    "mixed": MOSTLY_FALSE,
    "interaction": ("dot", "cross"),
    "overlap": True,
    "separate_exchange": True,
    "reduction": ("buckets", "grouped"),
    "delay_weights": MOSTLY_FALSE,
    "epilogues": MOSTLY_FALSE,
    "table_dtype": ("fp32", "bf16", ["fp16", "int8"]),
    "num_features": (1, 1, 2, [1, 3]),
    "pipeline": ("local", "local", "serial", "base", "sparse_dist"),
    "table_optimizer": (None, None, "rowwise_adagrad", "sgd"),
}
TRANSFORMER = {
    "batch": BATCHES,
    "sequence": (1, 16, 64, 100, 2**40),
    "hidden": (768, 96, 2**20),
    "heads": (2, 4),
    "vocabulary": SIZES,
    "positions": (128, 4096, 2**62),
    "attention": ("fused", "eager"),
    "fused": True,
    "dtype": ("fp32", "fp32", "bf16"),
    "optimizer": ("adamw", "adamw", "sgd", "muon", "adafactor"),
    "mixed": MOSTLY_FALSE,
    "overlap": False,
    "checkpoint": (False, True, "mlp", "norms", "attention"),
    "checkpoint_layers": (EVERY_LAYER, EVERY_LAYER, 0, 1),
    "checkpoint_group": (1, 1, 1, 2),
    "accumulate": (1, 2, 3),
    "parallel": ("ddp", "zero1", "zero2", "fsdp"),
    "kv_heads": (0, 1, 2),
    "inner": SIZES,
    "gated": True,
    "activation": ("", "relu", "gelu", "silu"),
    "joined": ("", "none", "attention", "all"),
    "rotary": True,
    "tie": False,
    "bias": False,
    "head_bias": True,
    "padded_positions": (0, 2, 2**30),
    "token_types": (1, 2, 2**30),
    "scaled_embeddings": True,
    "scaled_branches": True,
    "scaled_logits": True,
    "norm": ("layer", "rms", "layer_weight", "layer_plain"),
    "dropout": (0.0, 0.1, 1.0),
    "experts": (0, 0, 4, 8, 2**20),
    "top_k": (1, 2),
    "expert_groups": (0, 0, 2),
    "top_groups": (0, 0, 1, 2),
    "capacity": (1.0, 1.5, 1e3),
    "imbalance": (0.0, 0.5, (1, 2, 3, 4)),
    "fused_permutation": True,
    "expert_width": (0, 64, 2**20),
    "shared_experts": (0, 0, 1, 2**20),
    "shared_width": (0, 32),
    "shared_gate": MOSTLY_FALSE,
    "expert_bias": MOSTLY_FALSE,
    "dense_layers": (0, 0, 1, 2**20),
    "expert_interval": (1, 1, 2),
    "optimizer_in_backward": MOSTLY_FALSE,
    "lora_rank": (0, 0, 0, 0, 8, 2**20),
    "lora_modules": ("all-linear",) * 6 + (("q_proj", "v_proj"), "mlp", ["o_proj"]),
    "frozen_format": ("", "", "", "nf4", "nf4-dq"),
    "q_lora_rank": (0, 0, 32),
    "kv_lora_rank": (0, 0, 0, 32),
    "rope_width": (0, 0, 8, 3),
    "value_width": (0, 0, 16),
    "window": (0, 0, 8, 2**40),
    "global_interval": (0, 0, 2, 6),
    "sinks": MOSTLY_FALSE,
    "score_cap": MOSTLY_FALSE,
    "logit_cap": True,
    "rotary_width": (0, 0, 8, 3),
    "mtp_layers": (0, 0, 0, 1, 2),
    "qk_norm": True,
    "qk_norm_of": ("head", "head", "all"),
    "norm_place": ("before", "before", "after", "both"),
    "parallel_mlp": MOSTLY_FALSE,
    "parallel_norms": (1, 1, 2),
    "qkv_bias": (None, True),
    "output_bias": (None, False),
    "mlp_bias": (None, True),
    "patch": (0, 0, 0, 4, 2**20),
    "classes": (0, 0, 0, 10, 2**40),
}
#: What a model of images takes beside other settings of Transformers, most of which it refuses.
IMAGES = {
    "batch": BATCHES,
    "patch": (16, 16, 16, 32, 0),
    "classes": (10, 10, 1000, 0, 2**40),
    "positions": (17, 17, 17, 5),
    "dtype": ("fp32", "bf16"),
    "mixed": MOSTLY_FALSE,
    "optimizer": ("adamw", "adamw", "sgd", "muon", "adafactor"),
    "dropout": (0.0, 0.1),
    "checkpoint": (False, True, "mlp", "norms"),
    "accumulate": (1, 2, 3),
    "parallel": ("ddp", "ddp", "zero1", "fsdp"),
    "experts": (0, 0, 0, 4),
    "vocabulary": (0, 0, 0, 1000),
}
TABLE = {
    "pooling": (1, 2.5, 8),
    "exponent": (0, 0.5, 1.05),
    "itemsize": 4,
    "name": TEXTS,
    "spread": 1.0,
    "law": (None, Uniform(10**7), Zipf(2000, 1.1)),
    "kernel": ("fused", "fused", "uvm", "uvm_caching", "key_value"),
    "load_factor": (None, None, 0.2, 1),
    "weighted": False,
    "managed_collision": ("", "", "zch", "mpzch"),
    "pooled": (True, True, False),
    "dtype": ("", "", "fp32", "fp16"),
    "num_features": (1, 1, 3),
}
LAYERS = {"layers": (*[1, 2, 3] * 5, 10**400)}
dlrm = Call(pk.DLRM, {"rows": ([1000, 10**6], [2**31, 4])}, DLRM)
bert = Call(pk.Transformer.bert, {"preset": "bert-base"} | LAYERS, TRANSFORMER)
gpt2 = Call(pk.Transformer.gpt2, {"preset": "gpt2"} | LAYERS, TRANSFORMER)
vit = Call(
    pk.Transformer.vit, {"preset": "vit-b16", "image": (64, 64, 64, 96, 65)} | LAYERS, IMAGES
)
table = Call(pk.EmbeddingTable, {"rows": SIZES, "dim": SIZES}, TABLE)
SPREAD = {"ranks": ((0,), (0, 1), (1, 0, 2, 3), [0, 1]), "columns": ((), (), (8, 8), (2, 2))}
placement = Call(
    pk.Placement,
    {"kind": (*KINDS, "hybrid")} | SPREAD,
    {"frequent": (None, 0, 5, 10**9)},
)
PLACED = (0, 1, pk.Placement("data_parallel", (0, 1)), pk.Placement("row_wise", (0, 1)))


def owners(rng: Rng) -> Any:
    """Where each table lies, or something odd."""
    places = []
    for _ in TABLES:
        places.append(choose(rng, PLACED) if rng.random() < 0.8 else placement(rng))
    return pick(rng, places)


SHARED_BY_LAYERS = [
    pk.Strategy(tp=tp, dp=dp, zero=zero)
    for tp, dp, zero in itertools.product((1, 2), (1, 2, 4), (0, 1, 3))
]


def shared(rng: Rng) -> Any:
    """A way to share MLPs, mostly on two or four ranks."""
    if rng.random() < 0.9:
        return choose(rng, [*SHARED_BY_LAYERS, pk.Strategy(dp=4, zero=3, shards=2), None])
    return strategy(rng)


PLAN = {"owners": owners, "ranks": (2, 4)}
PLAN_BY_HAND = Call(pk.Plan, PLAN, {"names": ((), ("a", "b", "c")), "mlps": shared})
PLAN_OF_OWNERS = Call(pk.Plan.from_owners, PLAN)
PLAN_IN_TURN = Call(pk.Plan.round_robin, {"tables": 3, "ranks": (2, 4)})
#: Six of ten plans are made by hand, three from owners.
PLANS = (PLAN_BY_HAND,) * 6 + (PLAN_OF_OWNERS,) * 3 + (PLAN_IN_TURN,)


def usual_tables(rng: Rng) -> pk.TableSet:
    return pk.TableSet(TABLES, batch=64)


GIVEN = {"workload": usual_tables, "platform": PLATFORMS}
LIMITS = {"memory": (1e9, 1e8, 70e6), "objective": "additive", "inputs": "exchanged"}
KERNELS = {"kernels": (("fused",), ("fused", "uvm_caching"), ("uvm",), ("fused", "key_value"))}


def plans(rng: Rng, folder: Path) -> list[Any]:
    """Plans, applied, priced and predicted."""
    plan = choose(rng, PLANS)(rng)
    plan.placements, plan.cut(TABLES), plan.to_torchrec(TABLES, module="m")

    def this_plan(rng: Rng) -> pk.Plan:
        return plan

    price = Call(pk.price_plan, {**GIVEN, "plan": this_plan}, LIMITS)(rng)
    return [plan, price, pk.predict(SMALL, choose(rng, PLATFORMS), ranks=plan.ranks, plan=plan)]


# Platforms.


def platform(rng: Rng) -> pk.Platform:
    """A platform of the gallery, without most parts of its long tables."""
    return choose(rng, BRIEF)


def change(rng: Rng, record: Any) -> Any:
    """The same with a value somewhere in it that is damaged."""
    if is_dataclass(record) and not isinstance(record, type):
        name = choose(rng, [item.name for item in fields(record) if item.init])
        return replace(record, **{name: change(rng, getattr(record, name))})
    if isinstance(record, tuple) and record:
        at = int(rng.integers(len(record)))
        return (*record[:at], change(rng, record[at]), *record[at + 1 :])
    if isinstance(record, Mapping) and record and rng.random() < 0.85:
        key = choose(rng, list(record))
        return {**record, key: change(rng, record[key])}
    if isinstance(record, int | float) and rng.random() < 0.7:
        return choose(rng, NUMBERS)
    return damage_tree(rng, dict(record) if isinstance(record, Mapping) else record)


def by_hand(rng: Rng, folder: Path) -> list[Any]:
    """A platform one of whose records was changed or made anew."""
    changed = change(rng, platform(rng))
    return [changed, pk.predict(SMALL, changed)]


def method(name: str) -> Callable[..., Any]:
    """Call a method of an object by its name."""
    return lambda of, **given: getattr(of, name)(**given)


OF = {"of": platform}
MESSAGE = OF | {"operation": tuple(OPERATIONS), "nbytes": BYTES, "ranks": RANKS}
ALGORITHM = {"algorithm": (None, *ALGORITHMS, "rail")}


def device(rng: Rng) -> Any:
    return platform(rng).device


def features(rng: Rng) -> dict[str, Any]:
    """Sizes of a kernel."""
    return vary(rng, {"flops": 1e9, "nbytes": 1e6, "m": 10, "n": 10, "k": 10, "batch": 1}, 0.2)


METHODS = (
    Call(method("collective"), MESSAGE, ALGORITHM),
    Call(method("collective_time"), MESSAGE, ALGORITHM),
    Call(method("bandwidth"), {"of": device, "working_set": BYTES}),
    Call(method("gemm"), OF | {"m": 8, "n": SIZES, "k": 8}, {"dtype": "bf16", "batch": 2}),
    Call(method("lookup"), OF | {"tables": (TABLES, TABLES[:1]), "batch": SIZES}),
    Call(
        method("kernel_time"),
        OF | {"kind": ("gemm", "elementwise"), "features": features},
        {"dtype": "fp32"},
    ),
    Call(method("with_nodes"), OF | {"nodes": (1, 2, 3), "network": (None, "p5", "nd-a100-v4")}),
    Call(method("with_host"), OF | {"scale": (0, 0.5, 1e9)}),
    Call(
        method("with_datasheet"),
        OF | {"other": ("h200-sxm", "a100-sxm-8", pk.load_platform("zen5-2"))},
    ),
    Call(
        method("with_algorithm"),
        OF | {"operation": ("all_reduce", "broadcast"), "algorithm": ("ring", "tree", None)},
    ),
    Call(
        method("with_link"),
        OF | {"name": ("intra", "inter", "far")},
        {"bandwidth": 1e9, "latency": 1e-6},
    ),
    Call(
        pk.compare, {"a": platform, "b": PLATFORMS}, {"workload": (None, SMALL), "ranks": (None, 1)}
    ),
    Call(method("save"), OF | {"path": ("a.toml", Path("b.toml"))}),
    Call(method("with_power"), OF | {"watts": 600}),
    Call(
        method("with_host_memory"),
        OF,
        {"capacity": 1e12, "bandwidth": 4e11, "link": 2e10, "sharers": (1, 2)},
    ),
    Call(
        method("with_scale"),
        OF,
        {"peak": 2.0, "memory": 1.2, "inter": 4, "latency": 0.5, "host": 3, "cache": 2},
    ),
)


# The command line.

PREDICT_DLRM = "predict --model dlrm-ddp --platform h100-sxm-8 --batch 64 --ranks 2 --dtype bf16"
PREDICT_BERT = "predict --model bert-base --platform a100-sxm-8 --batch 64 --ranks 2 --dtype bf16"
PREDICT_SHARED = (
    "predict --model bert-base --platform h100-sxm-8 --batch 64 --tp 2 --dp 4 --micro-batch 2 --zero 1 "
    "--checkpoint full --cp-kind ring --first-layers 0"
)
PREDICT_ADAPTED = (
    "predict --model gpt2 --platform h100-sxm-8 --batch 8 --sequence 128 --lora-rank 8 --lora-modules "
    "o_proj,down_proj --frozen-format nf4 --loss-chunks 2"
)
SHARD = (
    "shard --seconds 1e-3 --tables t.json --platform zen5-2 --ranks 2 --batch 64 --memory 1e9 "
    "--seed 1 --out o.json"
)
CALIBRATE = "calibrate --from-nccl-logs . --base h100-sxm-8 --out o.toml"
#: Six of eight commands predict.
PREDICTIONS = (
    PREDICT_DLRM,
    PREDICT_DLRM,
    PREDICT_BERT,
    PREDICT_BERT,
    PREDICT_SHARED,
    PREDICT_ADAPTED,
)
COMMANDS = (*PREDICTIONS, SHARD, CALIBRATE)
ODD = [text for text in TEXTS if "\0" not in text] + [str(n) for n in NUMBERS if abs(n) < 2**70]


def command(rng: Rng, folder: Path) -> None:
    """Commands in this process: 0 or 2, and one printable line where something is wrong."""
    table = {"rows": 1000, "dim": 16, "pooling": 2}
    (folder / "t.json").write_text(json.dumps([table, table, table]))
    all_words = choose(rng, COMMANDS).split()
    name, words = all_words[0], all_words[1:]
    # a search must end; without a source, calibrate would measure
    start = 0 if name == "predict" else 2
    for at in reversed(range(start, len(words), 2)):
        if rng.random() < 0.05:
            del words[at : at + 2]
        elif rng.random() < 0.1 and words[at] != "--out":
            words[at + 1] = choose(rng, ODD)
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            code: Any = main([name, *words])
        except SystemExit as end:
            code = end.code
    lines = error.getvalue().rstrip("\n").split("\n")
    told = [line for line in lines if "note:" not in line and "perfkit-run.log" not in line]
    well_said = all(line.isprintable() and len(line) < 1500 for line in lines)
    is_refused = code == 2 and len(told) == 1 and told[0] != ""
    if not well_said or not (code == 0 or is_refused):
        raise Nonsense(f"{name} {words} ends with {code}: {error.getvalue()[-300:]!r}")


# Strategies.

GPT = pk.Transformer.gpt2(
    "gpt2", layers=4, hidden=256, heads=8, batch=64, sequence=128, dtype="bf16", mixed=True
)
MODELS = (GPT, replace(GPT, experts=4, top_k=2, capacity=1.5), SMALL)
STRATEGY = {
    "tp": (1, 2, 8),
    "pp": (1, 2, 4),
    "dp": (1, 2, 8, 3),
    "cp": (1, 2),
    "ep": (1, 2),
    "micro_batch": (1, 2, 16),
    "schedule": tuple(SCHEDULES),
    "chunks": (1, 1, 2),
    "first_layers": (0, 0, 0, 1),
    "last_layers": (0, 0, 0, 1, 2),
    "zero": (0, 1, 2, 3),
    "checkpoint": ("none", "selective", "full", "per_op", "norms+activation", "mlp", "experts"),
    "checkpoint_layers": (EVERY_LAYER, EVERY_LAYER, 0, 1, 3),
    "checkpoint_group": (1, 1, 1, 2, 3),
    "shards": (0, 2),
    "sequence_parallel": True,
    "cp_kind": CP_KINDS,
    "two_level": True,
    "overlap": False,
    "tiled": True,
    "etp": (0, 0, 1, 2),
    "dispatch": ("all_to_all", "once"),
    "overlap_experts": True,
    "offload": OFFLOADS,
    "offload_fraction": (1.0, 1.0, 0.25),
    "host_threads": (0, 0, 0, 0, 1),
    "overlap_host": True,
}
strategy = Call(pk.Strategy, {}, STRATEGY)
FINE = (
    pk.Strategy(tp=2, dp=4, zero=1),
    pk.Strategy(pp=2, dp=2, cp=2),
    pk.Strategy(tp=8, sequence_parallel=True, tiled=True),
    *(pk.Plan(2, (0, 1, pk.Placement(kind, (0, 1)))) for kind in ("row_wise", "column_wise")),
)


def fine(rng: Rng) -> Any:
    return choose(rng, FINE)


def drawn_ways(rng: Rng) -> Any:
    """Up to three strategies, some of them fine, or something odd."""
    several = []
    for _ in range(int(rng.integers(1, 4))):
        draw_one = choose(rng, (strategy, fine))
        several.append(draw_one(rng))
    return pick(rng, several)


def ways(rng: Rng) -> Any:
    """Strategies and plans to choose from, or something odd."""
    if rng.random() < 0.3:
        return drawn_ways(rng)
    return choose(rng, (None, None, None, [*FINE[:3]], [*FINE[3:]]))


RUNS = [
    {"tp": tp, "dp": 8 // tp, "micro_batch": n, "seconds": 0.1 / n}
    for tp, n in itertools.product((1, 2, 4), (1, 2))
]


def runs(rng: Rng) -> Any:
    """Measured runs, of which one is odd now and then."""
    rows = copy.deepcopy(RUNS)
    return damage_tree(rng, rows) if rng.random() < 0.5 else pick(rng, rows)


def tuned(rng: Rng, folder: Path) -> list[Any]:
    """A platform that was fitted to runs, and what it says of others."""
    given = {"model": MODELS[:2], "platform": ("h100-sxm-8", "a100-sxm-8", "zen5-2"), "runs": runs}
    found = Call(pk.tune, given)(rng)
    return [found, found.price(runs(rng))]


def tables(rng: Rng) -> Any:
    """Tables, or something odd."""
    return pick(rng, [table(rng) for _ in range(int(rng.integers(1, 4)))])


def any_of(*calls: Call, share: float = 1.0) -> Entry:
    """An entry that calls one of them."""
    return Entry(lambda rng, folder: choose(rng, calls)(rng), share)


#: Software, by name and as a record.
SOFTWARE = (*pk.stacks()["name"].to_list(), pk.find_stack("megatron"))


def predicted(*workloads: Call) -> Entry:
    """An entry that predicts one of the workloads."""

    def build(rng: Rng) -> Any:
        return choose(rng, workloads)(rng)

    options = {"ranks": (1, 1, 2, 8, 16), "slowdown": {0: 1.5}, "stack": SOFTWARE}
    predict = Call(pk.predict, {"workload": build, "platform": PLATFORMS}, options)
    return any_of(predict, share=0.5)


SET = {"batch": 64, "embedding": "fused", "sparse": True, "optimizer": "sgd", "name": "x"}
table_set = Call(pk.TableSet, {"tables": tables}, SET)
drawn = Call(pk.draw_tables, {"n": (1, 5)}, {"seed": 1, "correlation": 0.5, "itemsize": 4})


def searched(rng: Rng) -> Any:
    return choose(rng, (pk.TableSet(TABLES, batch=64), SMALL))


def short_time(rng: Rng) -> Any:
    """Seconds of a search, which must end; no number now and then."""
    return choose(rng, (1e-3,) * 20 + ("x",))


SEARCH = {"workload": searched, "ranks": (1, 2, 4, 16), "seconds": short_time}
GROUPS = {
    "seed": 1,
    "pin": {0: 1},
    "together": [(0, 1)],
    "apart": [(1, 2)],
    "forbid": {1: ["row_wise"]},
}
EXPLORED = {
    "model": MODELS,
    "platform": MOSTLY_ONE_PLATFORM,
    "ranks": (1, 2, 8, [2, 8], 64, None),
    "strategies": ways,
}
STAGES = [
    pk.Strategy(pp=2, micro_batch=n, schedule=schedule)
    for schedule, n in itertools.product(SCHEDULES, (1, 2))
    if schedule not in CHUNKED
]


def staged(rng: Rng) -> Any:
    """A strategy of two stages, one that is fine, or any."""
    if rng.random() < 0.3:
        return strategy(rng)
    return choose(rng, (*STAGES, *FINE))


STAGED = {
    "workload": MODELS,
    "platform": MOSTLY_ONE_PLATFORM,
    "strategy": staged,
}
ENTRIES: dict[str, Entry] = {
    "strategies": any_of(strategy, Call(pk.Strategy.stack, {"strategies": ways}), share=0.3),
    "explore": any_of(
        Call(
            pk.explore,
            EXPLORED,
            {"memory": (80e9, 1e9, 1e6), "execution": "compiled", "stack": SOFTWARE},
        ),
        share=0.1,
    ),
    "stages": any_of(
        Call(
            pk.predict,
            STAGED,
            {
                "ranks": (1, 8),
                "execution": "compiled",
                "slowdown": {0: 1.5},
                "stack": SOFTWARE,
            },
        ),
        share=0.1,
    ),
    "tune": Entry(tuned, 0.02),
    "workloads-built": any_of(dlrm, bert, gpt2, vit),
    "dlrm-predicted": predicted(dlrm),
    "transformer-predicted": predicted(bert, gpt2, vit),
    "table-sets": any_of(table_set, table_set, drawn),
    "plans": Entry(plans),
    "shard": any_of(Call(pk.shard, GIVEN | SEARCH, LIMITS | GROUPS | KERNELS), share=0.05),
    "platforms-by-hand": Entry(by_hand),
    "methods": any_of(*METHODS),
    "command-line": Entry(command, 0.3),
}
