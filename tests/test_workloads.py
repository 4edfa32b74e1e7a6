"""Workloads: published sizes, graphs that agree with counting by hand, and clear refusals of
everything else."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.measure import samples
from perfkit.models.distributions import Uniform, Zipf
from perfkit.models.kernels import KERNEL_TERMS
from perfkit.platform.gallery import load_platform
from perfkit.prediction.cost import price
from perfkit.prediction.predictor import predict
from perfkit.workloads import dlrm
from perfkit.workloads.columns import FEATURES
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import COLLECTIVES, PHASES, Graph
from perfkit.workloads.iteration import make_graph
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.tape import Tape
from perfkit.workloads.transformer import SHAPE, Transformer

SMALL = {
    "rows": [1000, 50, 300],
    "dim": 16,
    "pooling": 4,
    "bottom": [32],
    "top": [24],
    "features": 13,
}
TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "vocabulary": 100,
    "positions": 16,
    "sequence": 16,
    "batch": 2,
}

# Published sizes.


def test_a_changed_transformer_loses_its_name() -> None:
    sizes = {"batch": 4, "sequence": 32}
    other_kernels = {"attention": "eager", "dtype": "bf16"}
    assert Transformer.bert("bert-large", **sizes, **other_kernels).name == "bert-large"
    assert Transformer.bert("bert-large", **sizes, layers=1).name == "bert"
    assert Transformer.gpt2("gpt2-xl", **sizes, **other_kernels).name == "gpt2-xl"
    assert Transformer.gpt2("gpt2-xl", **sizes, layers=1).name == "gpt2"


#: Fields of a Transformer with which it keeps the name of its preset. With experts and norms of
#: heads it has other weights, too; `description` names experts.
NAMED_ALIKE = {
    *("name", "causal", "family"),
    *("batch", "sequence", "positions", "accumulate"),
    *(
        "attention",
        "dtype",
        "mixed",
        "checkpoint",
        "checkpoint_layers",
        "checkpoint_group",
        "dropout",
    ),
    *("optimizer", "fused"),
    *("overlap", "parallel", "reduce_dtype", "fused_accumulation"),
    *("vocabulary_multiple", "keeps_fp8", "fp8_recipe", "fp8_gathers", "loss_chunks"),
    *("lora_rank", "lora_modules", "frozen_format"),
    "optimizer_in_backward",
    *("qk_norm", "experts", "top_k", "capacity", "imbalance", "fused_permutation"),
    *("expert_width", "shared_experts", "shared_width", "shared_gate", "expert_bias"),
    *("expert_groups", "top_groups"),
    *("dense_layers", "expert_interval"),
    *("q_lora_rank", "kv_lora_rank", "rope_width", "value_width"),
    *(
        "window",
        "global_interval",
        "sinks",
        "score_cap",
        "logit_cap",
        "rotary_width",
        "mtp_layers",
        "qk_norm_of",
        "norm_place",
        "parallel_mlp",
        "parallel_norms",
        "qkv_bias",
        "output_bias",
        "mlp_bias",
    ),
}


def test_every_field_of_a_transformer_changes_its_name_or_is_listed_as_one_that_does_not() -> None:
    names = {each.name for each in fields(Transformer)}
    assert names == {*SHAPE} | NAMED_ALIKE, "say whether a model with a new field is its preset"
    assert not NAMED_ALIKE & {*SHAPE}


def count_weights(*widths: int) -> int:
    """Weights and biases of linear layers."""
    return sum((n + 1) * m for n, m in pairwise(widths))


CROSSED = 27 * 128


class Published(NamedTuple):
    """A published DLRM."""

    tables: int
    rows: int  # of all tables
    dim: int
    lookups: int  # for each sample
    dense_weights: int


#: arXiv:2404.12674 (layer lists start with the input); mlcommons/training v1, dlrm;
#: mlcommons/training_results_v4.0, dlrm_dcnv2 (three cross layers of rank 512).
PUBLISHED = {
    "dlrm-default": Published(
        tables=8,
        rows=8_000_000,
        dim=64,
        lookups=800,
        dense_weights=count_weights(512, 512, 64) + count_weights(100, 1024, 1024, 1024, 1),
    ),
    "dlrm-ddp": Published(
        tables=8,
        rows=640_000,
        dim=128,
        lookups=80,
        dense_weights=count_weights(128, 128, 128, 128) + count_weights(164, 512, 512, 512, 256, 1),
    ),
    "dlrm-mlperf": Published(
        tables=26,
        rows=187_767_399,
        dim=128,
        lookups=26,
        dense_weights=count_weights(13, 512, 256, 128)
        + count_weights(128 + 351, 1024, 1024, 512, 256, 1),
    ),
    "dlrm-dcnv2": Published(
        tables=26,
        rows=204_184_588,
        dim=128,
        lookups=214,
        dense_weights=count_weights(13, 512, 256, 128)
        + count_weights(CROSSED, 1024, 1024, 512, 256, 1)
        + 3 * (2 * CROSSED * 512 + CROSSED),
    ),
}


@pytest.mark.parametrize("preset", dlrm.PRESETS)
def test_a_published_dlrm_has_its_published_sizes(preset: str) -> None:
    published = PUBLISHED[preset]
    model = DLRM(preset, batch=8)
    assert model.name == preset
    assert len(model.tables) == published.tables
    assert {table.dim for table in model.tables} == {published.dim}
    assert sum(table.rows for table in model.tables) == published.rows
    assert sum(table.pooling for table in model.tables) == published.lookups
    [graph] = model.graphs()
    assert graph.parameters == published.rows * published.dim + published.dense_weights


@pytest.mark.parametrize("preset", dlrm.PRESETS)
def test_sizes_of_a_published_dlrm_can_be_changed(preset: str) -> None:
    changed = DLRM(
        preset, batch=64, rows=[10, 20], dim=8, pooling=[1, 2], bottom=[16], top=[16], features=5
    )
    assert [(t.rows, t.pooling) for t in changed.tables] == [(10, 1), (20, 2)]
    # the last layers have the width that the model asks for
    assert changed.bottom == (16, 8)
    assert changed.top == (16, 1)


def test_defaults_are_those_of_a_preset() -> None:
    assert (DLRM().name, DLRM().tables) == ("dlrm", DLRM("dlrm-default").tables)


# Counting by hand.


def test_transformer_flops_are_six_per_weight_and_token() -> None:
    """Kaplan et al. 2020, arXiv:2001.08361: 6 FLOP per token and weight of a product, and attention
    on top."""
    batch = 4
    sequence = 128
    hidden = 768
    layers = 12
    vocabulary = 30522
    tokens = batch * sequence
    weights = layers * 12 * hidden**2 + hidden**2 + vocabulary * hidden
    scores = 2 * tokens * sequence * hidden  # of one layer, and as much for what they weigh
    attention = 3 * layers * 2 * scores

    [eager] = Transformer.bert(attention="eager", batch=batch, sequence=sequence).graphs()
    assert eager.column("flops").sum() == 6 * tokens * weights + attention
    # the backward pass computes the scores once more
    [fused] = Transformer.bert(attention="fused", batch=batch, sequence=sequence).graphs()
    assert fused.column("flops").sum() == eager.column("flops").sum() + layers * scores


def test_cross_layers_are_two_products_each() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    cross = 3 * 2 * CROSSED * 512
    top = CROSSED * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256 * 1
    [graph] = DLRM("dlrm-dcnv2", batch=8).graphs()
    # the first layer has no gradient of its input
    assert graph.column("flops").sum() == 2 * 8 * (3 * (bottom + cross + top) - 13 * 512)


# On a device of its own.


def labels(graph: Graph, *, kind: str = "", phase: str = "") -> list[str]:
    return [
        label.name
        for label in graph.labels
        if kind in ("", label.kind) and phase in ("", label.phase)
    ]


def on_a_gpu(workload: DLRM | Transformer) -> Graph:
    """The operations of one GPU that runs all of a workload."""
    [graph] = workload.graphs(accelerator=True)
    return graph


def test_fused_tables_are_one_kernel_each_way() -> None:
    graph = on_a_gpu(DLRM(batch=64, embedding="fused", **SMALL))
    for kind in ("embedding_forward", "embedding_backward"):
        own = graph.kernels[kind, "fused"]
        assert graph.column("launches")[own].tolist() == [1, 0, 0]
        assert graph.column("calls")[own].sum() == 1
        assert graph.column("table")[own].tolist() == [0, 1, 2]
        assert graph.column("lookups")[own].tolist() == [256.0, 256.0, 256.0]
    assert not labels(graph, kind="embedding_update"), "the backward has updated the rows"
    separate = on_a_gpu(DLRM(batch=64, embedding="separate", **SMALL))
    assert graph.parameters == separate.parameters


@pytest.mark.parametrize(
    ("build", "optimizer", "passes", "listed_kernels"),
    [
        (partial(Transformer.bert, **TINY), "adamw", 7, 9),
        (partial(Transformer.bert, **TINY), "sgd", 3, 1),
        (partial(DLRM, batch=64, sparse=False, **SMALL), "adagrad", 5, 6),
    ],
)
def test_a_fused_optimizer_is_one_kernel(
    build: Callable[..., DLRM | Transformer], optimizer: str, passes: int, listed_kernels: int
) -> None:
    """28 bytes of fp32 for AdamW (weight, gradient and two states read, all but the gradient
    written), 12 for SGD."""
    fused = on_a_gpu(build(optimizer=optimizer, fused=True))
    kernels = labels(fused, phase="update")
    counters = 0
    if optimizer != "sgd":  # one more kernel adds one to the step counters, of which SGD has none
        assert kernels.pop(0) == "_foreach_add_"
        counters = fused.column("elements")[-2]
    assert kernels == [f"_fused_{optimizer}_"]
    assert fused.traffic[-1] == 4 * (passes * fused.parameters + counters)
    assert fused.column("elements")[-1] == fused.parameters

    listed = labels(on_a_gpu(build(optimizer=optimizer, fused=False)), phase="update")
    assert len(listed) == listed_kernels
    for name in listed:
        assert name.startswith("_foreach_")


def test_mixed_precision_casts_what_products_need() -> None:
    """Autocast: each weight is cast once and its gradient back, inputs of products as often as they
    are used."""
    plain = on_a_gpu(Transformer.bert(**TINY, dtype="bf16"))
    mixed = on_a_gpu(Transformer.bert(**TINY, dtype="bf16", mixed=True))
    assert "_to_copy" not in labels(plain)
    assert sorted(name for name in labels(mixed) if name != "_to_copy") == sorted(labels(plain))
    casts = np.array([label.name == "_to_copy" for label in mixed.labels])
    forward = np.array([label.phase == "forward" for label in mixed.labels])
    # 2 bytes one way, 4 the other
    assert (mixed.traffic[casts] == 6 * mixed.column("elements")[casts]).all()

    tokens = 2 * 16
    layer_weights = 4 * 32 * 32 + 4 * 32 + 8 * 32 * 32 + 5 * 32
    head_weights = 32 * 32 + 32 + 100 * 32 + 100
    weights = 2 * layer_weights + head_weights
    inputs = tokens * (2 * (3 * 32 + 32) + 32 + 32)
    logits = tokens * 100
    gelus = tokens * 32
    cast = mixed.column("elements")[casts & forward].sum()
    assert weights + inputs + logits <= cast <= weights + inputs + logits + 2 * gelus


@pytest.mark.parametrize(("mixed", "itemsize"), [(False, 2), (True, 4)])
def test_mixed_precision_keeps_weights_and_tables_in_fp32(mixed: bool, itemsize: int) -> None:
    graph = on_a_gpu(Transformer.bert(**TINY, dtype="bf16", mixed=mixed))
    of_states = 2 * itemsize * graph.parameters
    scaled = []
    for label, traffic in zip(graph.labels, graph.traffic, strict=True):
        if label.phase == "update" and label.variant == "mul_":
            scaled.append(traffic)
    assert scaled == [of_states, of_states]
    model = DLRM(batch=64, dtype="bf16", mixed=mixed, **SMALL)
    assert model.tables[0].itemsize == itemsize


def time_products(graph: Graph) -> tuple[float, float]:
    """Seconds of the products of an iteration on one H100, and of all else."""
    [times] = price([graph], load_platform("h100-sxm-8"), dtype=graph.dtype)
    is_product = np.array([label.kind == "gemm" for label in graph.labels])
    return times.seconds[is_product].sum(), times.seconds[~is_product].sum()


def test_fp8_is_a_format_of_the_products_of_blocks() -> None:
    """As of Transformer Engine: three casts and three products for each linear layer of a block,
    all else in bf16."""
    sizes = {
        **TINY,
        "hidden": 4096,
        "heads": 32,
        "sequence": 2048,
        "positions": 2048,
        "vocabulary": 1024,
    }
    narrow = on_a_gpu(Transformer.gpt2(dtype="fp8", **sizes))
    wide = on_a_gpu(Transformer.gpt2(dtype="bf16", **sizes))
    linear_layers = 4 * 2
    names = labels(narrow)
    assert names.count("_scaled_mm") == 3 * linear_layers
    assert names.count("mm") == 3, "not what makes scores of words"
    assert names.count("_to_copy") - labels(wide).count("_to_copy") == 3 * linear_layers
    for name, dtype in zip(names, narrow.dtypes, strict=True):
        assert name == "_scaled_mm" or dtype == "bf16"
    assert narrow.column("flops").sum() == wide.column("flops").sum()

    fast_products, other_fast = time_products(narrow)
    slow_products, other_slow = time_products(wide)
    assert 1.2 < slow_products / fast_products < 2.0, "the peak is twice as high"
    assert other_fast > other_slow, "casts take time"
    with pytest.raises(
        ValueError, match=r"dtype is 'fp8'; known are fp64, fp32, tf32, bf16, fp16$"
    ):
        predict(Transformer.gpt2(dtype="fp8", **sizes), "a100-sxm-8")


# Graphs.

GRAPHS = {
    "dlrm": DLRM(batch=64, **SMALL).graphs()[0],
    "dlrm-dense": DLRM(batch=64, sparse=False, **SMALL).graphs()[0],
    "dlrm-rank": DLRM(batch=64, **SMALL).graphs(2)[1],
    "bert": Transformer.bert(**TINY, attention="eager").graphs()[0],
    "gpt2-ranks": Transformer.gpt2(**TINY).graphs(2)[0],
    "mixed": Transformer.gpt2(
        **TINY, dtype="bf16", mixed=True, fused=True, attention="eager"
    ).graphs()[0],
    "empty": make_graph(Tape()),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_columns_agree_with_operations(name: str) -> None:
    graph = GRAPHS[name]
    kinds = {key.partition(".")[0] for key in KERNEL_TERMS} | {"collective"}
    for name in FEATURES:
        assert graph.column(name).shape == (len(graph),)
    for index in range(len(graph)):
        operation = graph[index]
        assert operation.kind in kinds
        assert operation.phase in PHASES
        if operation.kind == "collective":
            assert operation.name in COLLECTIVES
        assert operation.features == {key: graph.column(key)[index] for key in FEATURES}
    for name in FEATURES:
        sizes = graph.column(name)
        assert np.isfinite(sizes).all() and (sizes >= 0).all(), name
    assert (graph.traffic > 0).all()
    assert graph.traffic.sum() == graph.accesses.nbytes.sum()
    members = np.concatenate([*graph.kernels.values(), np.array([], dtype=int)])
    assert sorted(members) == list(range(len(graph)))
    for index in graph.collectives:
        assert graph[int(index)].kind == "collective"
    order = [PHASES.index(label.phase) for label in graph.labels]
    assert order == sorted(order)
    frame = graph.table()
    assert frame["traffic_bytes"].to_list() == graph.traffic.tolist()
    assert f"{len(graph)} operations" in repr(graph)
    assert len(graph.distances) == len(graph.accesses)
    assert graph.footprint <= graph.traffic.sum()
    assert ((graph.distances >= 0) & (graph.distances <= graph.footprint * (1 + 1e-12))).all()


def test_reuse_distances_of_a_small_tape() -> None:
    tape = Tape()
    a = tape.tensor(100)
    b = tape.tensor(10)
    c = tape.tensor(1000)
    tape.emit("first", "elementwise", [a], [b])
    tape.emit("second", "elementwise", [b], [c])
    tape.emit("third_", "elementwise", [c, a], [c])
    graph = make_graph(tape)
    assert graph.distances[2] < 4 * 110, "b is read right after it was written"
    assert graph.distances[-1] == 0, "what is changed in place has just been read"
    assert max(graph.distances) <= graph.footprint == 4 * 1110


# Several ranks.


def test_a_plan_places_tables() -> None:
    model = DLRM(batch=64, **SMALL)
    plan = Plan.from_owners([1, 1, 0], ranks=2)
    graphs = model.graphs(2, plan)
    first, second = graphs
    assert [table.rows for table in first.tables] == [300]
    assert [table.rows for table in second.tables] == [1000, 50]
    nbytes = []
    for graph in graphs:
        collectives = [graph[int(index)] for index in graph.collectives]
        names = [collective.name for collective in collectives]
        assert names == ["all_to_all", "all_to_all", "all_reduce"]
        nbytes.append([collective.features["nbytes"] for collective in collectives])
    assert nbytes[0] == nbytes[1]
    assert nbytes[0][0] == 64 * 2 * 16 * 4, "the fullest rank sends the pooled rows of two tables"
    tables = sum(graph.parameters for graph in graphs) - 2 * nbytes[0][2] / 4
    assert tables == 16 * 1350


def test_data_parallel_ranks_are_one_graph() -> None:
    first, second = Transformer.bert(**TINY).graphs(2)
    assert first is second
    assert labels(first, kind="collective") == ["all_reduce"]
    assert first.column("nbytes").sum() == 4 * first.parameters


def test_table_distributions() -> None:
    assert EmbeddingTable(1000, 8).distribution == Uniform(1000)
    assert EmbeddingTable(1000, 8, exponent=0.7).distribution == Zipf(1000, 0.7)
    assert EmbeddingTable(1000, 8, itemsize=2).nbytes == 16000


def test_numpy_numbers_and_floats_are_sizes() -> None:
    plain = DLRM(batch=64, **SMALL)
    sizes = {**SMALL, "rows": np.array([1000, 50, 300]), "dim": 16.0}
    other = DLRM(batch=np.int64(64), **sizes)
    assert plain == other
    assert plain.graphs(2.0)[0].labels == other.graphs(2)[0].labels  # type: ignore[arg-type]
    assert len(Transformer.bert(**TINY).graphs(2.0)) == 2  # type: ignore[arg-type]


# Samples.


def test_a_check_draws_fourteen_dlrms_ten_transformers_and_six_on_two_ranks() -> None:
    drawn = samples.draw_check(3)
    families = [sample.family for sample in drawn]
    assert [families.count(name) for name in ("dlrm", "transformer", "hybrid")] == [14, 10, 6]
    assert len({sample.name for sample in drawn}) == 30
    gradients = set()
    for sample in drawn:
        assert sample.ranks == (2 if sample.family == "hybrid" else 1)
        if sample.plan:
            assert set(sample.plan.owners) == {0, 1}
        if isinstance(sample.workload, DLRM):
            gradients.add("sparse" if sample.workload.sparse else "dense")
    assert gradients == {"sparse", "dense"}


def test_sizes_that_a_check_draws_lie_in_their_ranges() -> None:
    for sample in samples.draw_check(3):
        workload = sample.workload
        if isinstance(workload, DLRM):
            assert 4 <= len(workload.tables) <= 26
            assert 64 <= workload.batch <= 2048
            for table in workload.tables:
                assert 1e3 <= table.rows <= 1e6
                assert 16 <= table.dim <= 128
                assert 1 <= table.pooling <= 32
                assert 0 <= table.exponent <= 1.2
            for width in (*workload.bottom[:-1], *workload.top[:-1]):
                assert 64 <= width <= 1024
        else:
            assert 2 <= workload.layers <= 6
            assert 128 <= workload.hidden <= 512
            assert 32 <= workload.sequence <= 256
            assert 2 <= workload.batch <= 16
            assert 1e3 <= workload.vocabulary <= 1.4e4


def test_draws_are_repeatable_and_apart() -> None:
    calibration = samples.draw_calibration()
    assert calibration == samples.draw_calibration()
    assert len(samples.draw_calibration(quick=True)) < len(calibration)
    assert samples.draw_check(5) == samples.draw_check(5)
    drawn_before: set[str] = set()
    for drawn in (calibration, samples.draw_check(0), samples.draw_check(1)):
        workloads = {str(samples.dump(sample.workload)) for sample in drawn}
        assert not workloads & drawn_before
        drawn_before |= workloads


# Refusals: name, value and what is allowed, in one line.

INF, NAN = math.inf, math.nan
SIZES = [-1, 0, NAN, INF, 2**64, "8", True, 1.5, [3], {3}]
FOUR = DLRM(batch=4, **SMALL)


def model(**changes: object) -> Callable[[], object]:
    return lambda: DLRM(**{**SMALL, **changes})  # type: ignore[arg-type]


def bert(**changes: object) -> Callable[[], object]:
    return lambda: Transformer.bert(**{**TINY, **changes})  # type: ignore[arg-type]


def graphs(workload: DLRM | Transformer, *args: object) -> Callable[[], object]:
    return lambda: workload.graphs(*args)  # type: ignore[arg-type]


def refuse_each(
    build: Callable[..., Callable[[], object]], name: str, values: Sequence[object]
) -> list[tuple[Callable[[], object], str]]:
    """A case for each bad value of an argument."""
    return [(build(**{name: value}), name) for value in values]


BAD = (-1, 0, NAN, INF, 2**64, True)
WIDTHS = (64, "64", {64}, [0], [-8], [8, 1.5], [True])
#: What is built, and the argument that is refused.
REFUSED: list[tuple[Callable[[], object], str]] = [
    *refuse_each(model, "batch", SIZES),
    *refuse_each(model, "dim", SIZES),
    *refuse_each(model, "features", SIZES),
    *refuse_each(partial(model, batch=4), "rows", (*BAD, "ab", 1.5, {3}, [4, [5]], [1, "2"])),
    *refuse_each(model, "pooling", (*BAD, "four", {3}, [1, 2, -3], [1, 2, "3"])),
    *refuse_each(model, "exponent", (-1, NAN, INF, 11, "one", True, None, [0, 0, "0"])),
    *refuse_each(model, "bottom", WIDTHS),
    *refuse_each(model, "top", WIDTHS),
    *refuse_each(bert, "layers", SIZES),
    *refuse_each(bert, "hidden", SIZES),
    *refuse_each(bert, "heads", SIZES),
    *refuse_each(bert, "vocabulary", SIZES),
    *refuse_each(bert, "positions", SIZES),
    *refuse_each(bert, "sequence", SIZES),
    *refuse_each(bert, "batch", SIZES),
    (model(batch=None), "batch"),
    (bert(layers=10**9), "layers"),
    (partial(EmbeddingTable, 10, 4, itemsize=0), "itemsize"),
    (graphs(FOUR, 0), "ranks"),
    (graphs(FOUR, "2"), "ranks"),
    (graphs(Transformer.bert(**TINY), True), "ranks"),
    (graphs(Transformer.bert(**TINY), 0.5), "ranks"),
]


@pytest.mark.parametrize(
    ("build", "name"), REFUSED, ids=[f"{name}-{i}" for i, (_, name) in enumerate(REFUSED)]
)
def test_bad_sizes_are_refused(build: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is [^\n]*; it must be a [^\n]+$"):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            partial(DLRM, "dlrm-defalt"),
            "preset is 'dlrm-defalt'; known are .*; did you mean 'dlrm-default'",
        ),
        (partial(DLRM, 5), "preset is 5; known are dlrm-default, dlrm-ddp, dlrm-mlperf"),  # type: ignore[arg-type]
        (partial(Transformer.bert, "gpt2"), "preset is 'gpt2'; known are bert-base, bert-large"),
        (partial(Transformer.gpt2, "gtp2"), "preset is 'gtp2'; known are .*did you mean 'gpt2'"),
        (model(dtype="fp31"), "dtype is 'fp31'; known are .*; did you mean 'fp32'"),
        (model(dtype=None), "dtype is None; known are"),
        (
            model(optimizer="adamw"),
            "optimizer is 'adamw' with embedding 'separate' and sparse gradients",
        ),
        (model(embedding="joined"), "embedding is 'joined'; known are separate, fused"),
        (model(fused=1), "fused is 1; it must be True or False"),
        (bert(mixed="yes"), "mixed is 'yes'; it must be True or False"),
        (
            bert(mixed=True),
            "mixed is True with dtype 'fp32'; weights are fp32 already; take bf16 or fp16",
        ),
        (model(sparse="yes"), "sparse is 'yes'; it must be True or False"),
        (model(optimizer="adagrad"), "optimizer is 'adagrad' .* take embedding='exact'"),
        (model(cross=(3,)), r"cross is \(3,\); it must be the number of layers and their rank"),
        (
            graphs(Transformer.bert(**TINY), 2, Plan.round_robin(2, ranks=2)),
            "plan is given; this workload has no tables",
        ),
        (
            model(pooling=[1, 2]),
            "pooling has 2 entries; the model has 3 tables; give one number, or one for each table",
        ),
        (model(exponent=[0.1]), "exponent has 1 entries; the model has 3 tables"),
        (model(rows=[]), "rows is empty; .* at least one table"),
        (
            bert(attention="flash"),
            "attention is 'flash'; known are eager, math, fused, .*did you mean 'flash3'",
        ),
        (bert(dtype="int8"), "dtype is 'int8'; known are"),
        (
            bert(optimizer="made-up"),
            "optimizer is 'made-up'; known are sgd, sgd_momentum, adagrad, adam, adamw",
        ),
        (bert(layer=3), "argument is 'layer'; did you mean 'layers'"),
        (bert(heads=5), "heads is 5; it must divide hidden, 32"),
        (bert(sequence=17), "sequence is 17; the model has 16 positions; shorten it"),
        (
            graphs(DLRM(batch=3, **SMALL), 2),
            "batch is 3; it must divide by the 2 ranks; take a multiple of 2",
        ),
        (graphs(Transformer.bert(**TINY), 3), "batch is 2; it must divide by the 3 ranks"),
        (
            graphs(FOUR, 2, Plan.round_robin(3, ranks=4)),
            "plan places 3 tables on 4 ranks; .*2 ranks",
        ),
        (
            graphs(FOUR, 2, Plan.round_robin(4, ranks=2)),
            "plan places 4 tables .* 3 tables .*make a plan",
        ),
        (graphs(FOUR, 2, [0, 1, 0]), r"plan is \[0, 1, 0\]; it must be a Plan"),
    ],
    ids=lambda value: re.sub(r"[^a-z0-9 -]", "", value)[:40] if isinstance(value, str) else "",
)
def test_other_bad_input_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 16),
    st.floats(0.05, 8),
    st.booleans(),
    st.integers(1, 3),
)
def test_any_dlrm_has_a_graph(
    rows: list[int], dim: int, batch: int, pooling: float, sparse: bool, ranks: int
) -> None:
    model = DLRM(
        rows=rows, dim=dim, batch=batch * ranks, pooling=pooling, sparse=sparse, bottom=[], top=[8]
    )
    graphs = model.graphs(ranks)
    assert len(graphs) == ranks
    for graph in graphs:
        for name in FEATURES:
            assert (graph.column(name) >= 0).all()
    dense_weights = sum(graph.parameters for graph in graphs) - sum(rows) * dim
    assert dense_weights % ranks == 0, "they are the same on every rank"


# Interactions, kernels in one, and what lies on which rank.


def test_exact_updates_touch_each_distinct_row_once() -> None:
    """Lookups are sorted; weights and the sums of Adagrad are read and written for each distinct
    row."""
    sizes = {**SMALL, "rows": [10**9], "dim": 32}
    traffic = {}
    for optimizer in ("sgd", "adagrad"):
        graph = on_a_gpu(DLRM(batch=64, embedding="exact", optimizer=optimizer, **sizes))
        own = graph.kernels["embedding_backward", "exact"]
        assert graph.column("lookups")[own].sum() == 0, "rows are among its traffic"
        traffic[optimizer] = graph.traffic[own].sum()
    rows = 64 * 4
    row = 32 * 4  # bytes
    sort = 4 * 32 * rows
    gradient = 64 * row
    index = 8 * (rows + 64)
    assert traffic["sgd"] == pytest.approx(sort + gradient + index + 2 * rows * row, rel=1e-3)
    assert traffic["adagrad"] - traffic["sgd"] == pytest.approx(2 * rows * row, rel=1e-3)


ON_ALL_RANKS = (0, 1, 2, 3)
COPIED = Placement("data_parallel", ON_ALL_RANKS)
COLUMNS = Plan.from_owners([Placement("column_wise", (0, 2), columns=(4, 12)), 1, 3], ranks=4)
ROWS = Plan.from_owners([Placement("row_wise", ON_ALL_RANKS), 1, 3], ranks=4)
ROWS_OF_A_NODE = Plan.from_owners([Placement("table_row_wise", (2, 3)), 1, 3], ranks=4)
COPIES = Plan.from_owners([0, COPIED, 3], ranks=4)
ROWS_AND_COPIES = Plan.from_owners([Placement("row_wise", ON_ALL_RANKS), COPIED, COPIED], ranks=4)
PLANS = {
    "columns": COLUMNS,
    "rows": ROWS,
    "rows of a node": ROWS_OF_A_NODE,
    "copies": COPIES,
    "rows and copies": ROWS_AND_COPIES,
}

of_each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
of_each_overlap = pytest.mark.parametrize("overlap", [False, True])
of_each_embedding = pytest.mark.parametrize("embedding", ["separate", "exact"])


def count_work(graphs: Sequence[Graph], feature: str, kinds: Sequence[str]) -> float:
    """A size of the operations of some classes, over all ranks."""
    total = 0.0
    for graph in graphs:
        is_counted = [label.kind in kinds for label in graph.labels]
        total += graph.column(feature)[is_counted].sum()
    return total


@of_each_overlap
@of_each_embedding
@of_each_plan
def test_split_tables_do_the_work_of_whole_ones(plan: Plan, embedding: str, overlap: bool) -> None:
    model = DLRM(batch=64, embedding=embedding, overlap=overlap, **SMALL)
    whole = model.graphs()
    split = model.graphs(4, plan)
    for feature, kinds in (("flops", ("gemm", "bmm")), ("elements", ("embedding_forward",))):
        expected = count_work(whole, feature, kinds)
        assert count_work(split, feature, kinds) == pytest.approx(expected, rel=0.02)


@of_each_overlap
@of_each_embedding
@of_each_plan
def test_split_tables_are_sent_as_often_as_whole_ones(
    plan: Plan, embedding: str, overlap: bool
) -> None:
    model = DLRM(batch=64, embedding=embedding, overlap=overlap, **SMALL)
    graphs = model.graphs(4, plan)
    sent = defaultdict(list)
    for graph in graphs:
        for index in graph.collectives:
            collective = graph[int(index)]
            sent[collective.name].append(collective.features)
    pooled = 64 * 16 * 4  # bytes of one table's rows of all samples
    row = 16 * 4
    if plan is COLUMNS:  # the fullest rank sends 16 columns
        assert {features["nbytes"] for features in sent["all_to_all"]} == {pooled}
    if plan in (ROWS, ROWS_AND_COPIES):
        summed = sent["reduce_scatter"] + sent["all_gather"]
        assert {features["nbytes"] for features in summed} == {pooled}
        assert ("all_to_all" in sent) == (plan is ROWS)
    if plan is ROWS_OF_A_NODE:  # two ranks add up; rank 3 has a table, and half of another
        assert len(sent["reduce_scatter"]) == len(sent["all_gather"]) == 2
        assert {features["group"] for features in sent["reduce_scatter"]} == {1.0}
        assert {graph.groups for graph in graphs} == {((0, 1, 2, 3), (2, 3))}
        assert {features["nbytes"] for features in sent["all_to_all"]} == {64 * (16 + 8) * 4}
    if plan in (COPIES, ROWS_AND_COPIES):
        copied_rows = 50 if plan is COPIES else 50 + 300
        reduced = sum(features["nbytes"] for features in sent["all_reduce"]) / 4
        [whole] = model.graphs()
        dense = 4 * (whole.parameters - 16 * 1350)
        assert reduced == dense + row * copied_rows


def test_tables_may_have_another_data_type() -> None:
    half = DLRM(batch=64, dtype="fp16", table_dtype="fp32", **SMALL)
    assert {t.itemsize for t in half.tables} == {4}
    graph = half.graphs(2)[0]
    first = graph.collectives[0]
    # pooled rows are as wide as activations
    assert graph.column("nbytes")[first] == 64 * 2 * 16 * 2


def count_bytes(graph: Graph, collective: str) -> float:
    """Bytes of all collectives of one kind; there are some."""
    of_kind = np.array([label.name == collective for label in graph.labels])
    assert of_kind.any()
    return graph.column("nbytes")[of_kind].sum()


def test_gradients_of_shards_are_summed_up_in_the_format_that_is_named() -> None:
    """As PyTorch's MixedPrecisionPolicy: weights stay fp32, gathered and reduced in bf16."""
    make = partial(Transformer.gpt2, batch=8, sequence=64, layers=2, dtype="bf16", mixed=True)
    in_fp32 = make(parallel="fsdp").graphs(8)[0]
    in_bf16 = make(parallel="fsdp", reduce_dtype="bf16").graphs(8)[0]
    assert count_bytes(in_fp32, "reduce_scatter") == 2 * count_bytes(in_bf16, "reduce_scatter")
    assert count_bytes(in_fp32, "all_gather") == count_bytes(in_bf16, "all_gather")
    with pytest.raises(
        ValueError, match=r"reduce_dtype is 'bf16' and parallel 'ddp', .*take parallel='fsdp'"
    ):
        make(reduce_dtype="bf16").graphs(8)
    message = r"not go with reduce_dtype of the model, bf16, as replicas share nothing; .* zero 1"
    with pytest.raises(ValueError, match=message):
        predict(make(reduce_dtype="bf16"), "h100-sxm-8", strategy=Strategy(dp=8))


def test_shards_in_another_format_than_their_gradients_are_held_beside_them() -> None:
    """FSDP2 allocates a reduced shard in the format of the reduction and then casts it, both in the stream
    that reduces: in bf16 the largest unit's shard more, where fp32 needs no cast. What it reduces is half
    as large, which counts where the backward pass is fullest then, and here it is not."""
    make = partial(
        Transformer.gpt2,
        batch=8,
        sequence=1024,
        layers=2,
        dtype="bf16",
        mixed=True,
        fused=True,
        vocabulary=50304,
        parallel="fsdp",
    )
    in_fp32, in_bf16 = (
        predict(make(reduce_dtype=name), "h100-sxm-8", ranks=8).memory().total
        for name in ("fp32", "bf16")
    )
    of_ends = (50304 + 1024 + 2) * 768  # words, positions, and the last norm
    assert in_bf16 - in_fp32 == pytest.approx(2 * of_ends / 8, rel=1e-3)


def test_names_that_others_use_are_answered_with_ours() -> None:
    for words in (("llama-3-8b",), ("llama-3-8b", True)):
        with pytest.raises(ValueError, match=r"take Transformer\.preset\('llama-3-8b', batch=8\)"):
            Transformer(*words)
    with pytest.raises(ValueError, match=r"Transformer\.from_config\(path\) for a config\.json"):
        Transformer(name="my-model", batch=8)
    with pytest.raises(ValueError, match=r"strategy=Strategy\(zero=3\) of predict"):
        Transformer.preset("bert-base", zero=3)
    assert Transformer.preset("bert-base", parallel="zero3").parallel == "fsdp"
