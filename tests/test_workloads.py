"""Workloads: published sizes, graphs that agree with counting by hand, and clear refusals of
everything else."""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import pairwise

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
    for preset, build in (("bert-large", Transformer.bert), ("gpt2-xl", Transformer.gpt2)):
        assert build(preset, batch=4, sequence=32, attention="eager", dtype="bf16").name == preset
        assert build(preset, batch=4, sequence=32, layers=1).name == preset.split("-")[0]


#: Fields of a Transformer with which it keeps the name of its preset. With experts and norms of
#: heads it has other weights, too; `description` names experts.
NAMED_ALIKE = {
    *("name", "causal", "family"),
    *("batch", "sequence", "positions", "accumulate"),
    *("attention", "dtype", "mixed", "checkpoint", "dropout"),
    *("optimizer", "fused"),
    *("overlap", "parallel", "reduce_dtype"),
    *("qk_norm", "experts", "top_k", "capacity"),
}


def test_every_field_of_a_transformer_changes_its_name_or_is_listed_as_one_that_does_not() -> None:
    names = {each.name for each in fields(Transformer)}
    assert names == {*SHAPE} | NAMED_ALIKE, "say whether a model with a new field is its preset"
    assert not NAMED_ALIKE & {*SHAPE}


def count_weights(*widths: int) -> int:
    """Weights and biases of linear layers."""
    return sum((n + 1) * m for n, m in pairwise(widths))


CROSSED = 27 * 128
#: Tables, rows, columns and lookups per sample; dense weights. arXiv:2404.12674 (layer lists start
#: with the input); mlcommons/training v1, dlrm; mlcommons/training_results_v4.0, dlrm_dcnv2 (three
#: cross layers of rank 512).
PUBLISHED = {
    "dlrm-default": (
        8,
        8_000_000,
        64,
        800,
        count_weights(512, 512, 64) + count_weights(100, 1024, 1024, 1024, 1),
    ),
    "dlrm-ddp": (
        8,
        640_000,
        128,
        80,
        count_weights(*[128] * 4) + count_weights(164, 512, 512, 512, 256, 1),
    ),
    "dlrm-mlperf": (
        26,
        187_767_399,
        128,
        26,
        count_weights(13, 512, 256, 128) + count_weights(128 + 351, 1024, 1024, 512, 256, 1),
    ),
    "dlrm-dcnv2": (
        26,
        204_184_588,
        128,
        214,
        count_weights(13, 512, 256, 128)
        + count_weights(CROSSED, 1024, 1024, 512, 256, 1)
        + 3 * (2 * CROSSED * 512 + CROSSED),
    ),
}


@pytest.mark.parametrize("preset", dlrm.PRESETS)
def test_published_dlrms(preset: str) -> None:
    number, rows, dim, lookups, dense = PUBLISHED[preset]
    model = DLRM(preset, batch=8)
    assert (model.name, len(model.tables), {t.dim for t in model.tables}) == (preset, number, {dim})
    assert (sum(t.rows for t in model.tables), sum(t.pooling for t in model.tables)) == (
        rows,
        lookups,
    )
    assert model.graphs()[0].parameters == rows * dim + dense
    changed = DLRM(
        preset, batch=64, rows=[10, 20], dim=8, pooling=[1, 2], bottom=[16], top=[16], features=5
    )
    assert [(t.rows, t.pooling) for t in changed.tables] == [(10, 1), (20, 2)]
    assert (changed.bottom, changed.top) == ((16, 8), (16, 1)), (
        "the last layers have the width the model asks for"
    )


def test_defaults_are_those_of_a_preset() -> None:
    assert (DLRM().name, DLRM().tables) == ("dlrm", DLRM("dlrm-default").tables)


# Counting by hand.


def test_transformer_flops_are_six_per_weight_and_token() -> None:
    """Kaplan et al. 2020, arXiv:2001.08361: 6 FLOP per token and weight of a product, and attention
    on top."""
    sizes = {"batch": 4, "sequence": 128}
    eager, fused = (
        Transformer.bert(attention=a, **sizes).graphs()[0].column("flops").sum()
        for a in ("eager", "fused")
    )
    tokens, hidden, layers = 4 * 128, 768, 12
    weights = layers * 12 * hidden**2 + hidden**2 + 30522 * hidden
    assert eager == 6 * tokens * weights + 3 * layers * 4 * tokens * 128 * hidden
    assert fused == eager + layers * 2 * tokens * 128 * hidden, (
        "the backward pass computes the scores once more"
    )


def test_cross_layers_are_two_products_each() -> None:
    shapes = ((13, 512), (512, 256), (256, 128), (1024, 1024), (1024, 512), (512, 256), (256, 1))
    products = sum(m * n for m, n in shapes) + 6 * CROSSED * 512 + CROSSED * 1024
    [graph] = DLRM("dlrm-dcnv2", batch=8).graphs()
    assert graph.column("flops").sum() == 2 * 8 * (3 * products - 13 * 512)


# On a device of its own.


def labels(graph: Graph, *, kind: str = "", phase: str = "") -> list[str]:
    return [
        label.name
        for label in graph.labels
        if kind in ("", label.kind) and phase in ("", label.phase)
    ]


def test_fused_tables_are_one_kernel_each_way() -> None:
    graph, separate = (
        DLRM(batch=64, embedding=e, **SMALL).graphs(accelerator=True)[0]
        for e in ("fused", "separate")
    )
    for kind in ("embedding_forward", "embedding_backward"):
        own = graph.kernels[kind, "fused"]
        sizes = {
            name: graph.column(name)[own].tolist()
            for name in ("launches", "calls", "table", "lookups")
        }
        assert sizes["launches"] == [1, 0, 0] and sum(sizes["calls"]) == 1
        assert (sizes["table"], sizes["lookups"]) == ([0, 1, 2], [256.0] * 3)
    assert not labels(graph, kind="embedding_update"), "the backward has updated the rows"
    assert graph.parameters == separate.parameters


@pytest.mark.parametrize(
    ("build", "optimizer", "passes"),
    [
        (partial(Transformer.bert, **TINY), "adamw", 7),
        (partial(Transformer.bert, **TINY), "sgd", 3),
        (partial(DLRM, batch=64, sparse=False, **SMALL), "adagrad", 5),
    ],
)
def test_a_fused_optimizer_is_one_kernel(
    build: Callable[..., DLRM | Transformer], optimizer: str, passes: int
) -> None:
    """28 bytes of fp32 for AdamW (weight, gradient and two states read, all but the gradient
    written), 12 for SGD."""
    listed, graph = (
        build(optimizer=optimizer, fused=f).graphs(accelerator=True)[0] for f in (False, True)
    )
    *counting, kernel = labels(graph, phase="update")
    assert kernel == f"_fused_{optimizer}_"
    # one more kernel adds one to the step counters, of which SGD has none
    assert counting == ([] if optimizer == "sgd" else ["_foreach_add_"])
    counters = graph.column("elements")[-2] if counting else 0
    assert graph.traffic[-1] == 4 * (passes * graph.parameters + counters)
    assert graph.column("elements")[-1] == graph.parameters
    names = labels(listed, phase="update")
    assert len(names) == {"adamw": 9, "sgd": 1, "adagrad": 6}[optimizer]
    assert all(name.startswith("_foreach_") for name in names)


def test_mixed_precision_casts_what_products_need() -> None:
    """Autocast: each weight is cast once and its gradient back, inputs of products as often as they
    are used."""
    plain, mixed = (
        Transformer.bert(**TINY, dtype="bf16", mixed=m).graphs(accelerator=True)[0]
        for m in (False, True)
    )
    assert "_to_copy" not in labels(plain)
    assert sorted(name for name in labels(mixed) if name != "_to_copy") == sorted(labels(plain))
    casts = np.array([label.name == "_to_copy" for label in mixed.labels])
    forward = np.array([label.phase == "forward" for label in mixed.labels])
    assert (mixed.traffic[casts] == 6 * mixed.column("elements")[casts]).all(), (
        "2 bytes one way, 4 the other"
    )
    weights = 2 * (4 * 32 * 32 + 4 * 32 + 8 * 32 * 32 + 5 * 32) + 32 * 32 + 32 + 100 * 32 + 100
    inputs, logits, gelus = 2 * 16 * (2 * (3 * 32 + 32) + 32 + 32), 2 * 16 * 100, 2 * 16 * 32
    cast = mixed.column("elements")[casts & forward].sum()
    assert weights + inputs + logits <= cast <= weights + inputs + logits + 2 * gelus
    for graph, itemsize in ((plain, 2), (mixed, 4)):
        step = [
            i
            for i, label in enumerate(graph.labels)
            if label.phase == "update" and label.variant == "mul_"
        ]
        assert graph.traffic[step].tolist() == [2 * itemsize * graph.parameters] * 2
    tables = [
        DLRM(batch=64, dtype="bf16", mixed=mixed, **SMALL).tables[0].itemsize
        for mixed in (False, True)
    ]
    assert tables == [2, 4]


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
    narrow, wide = (
        Transformer.gpt2(dtype=dtype, **sizes).graphs(accelerator=True)[0]
        for dtype in ("fp8", "bf16")
    )
    names, others = labels(narrow), labels(wide)
    assert names.count("_scaled_mm") == 3 * 4 * 2 and names.count("mm") == 3, (
        "not what makes scores of words"
    )
    assert names.count("_to_copy") - others.count("_to_copy") == 3 * 4 * 2
    assert {
        dtype for name, dtype in zip(names, narrow.dtypes, strict=True) if name != "_scaled_mm"
    } == {"bf16"}
    assert narrow.column("flops").sum() == wide.column("flops").sum()
    h100 = load_platform("h100-sxm-8")
    fast, slow = (price([graph], h100, dtype=graph.dtype)[0].seconds for graph in (narrow, wide))
    kinds = [np.array([label.kind == "gemm" for label in graph.labels]) for graph in (narrow, wide)]
    assert 1.2 < slow[kinds[1]].sum() / fast[kinds[0]].sum() < 2.0, "the peak is twice as high"
    assert fast[~kinds[0]].sum() > slow[~kinds[1]].sum(), "casts take time"
    with pytest.raises(
        ValueError, match="dtype is 'fp8'; known are fp64, fp32, tf32, bf16, fp16, int8"
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
    graph, kinds = GRAPHS[name], {key.partition(".")[0] for key in KERNEL_TERMS} | {"collective"}
    assert all(graph.column(name).shape == (len(graph),) for name in FEATURES)
    for index in range(len(graph)):
        operation = graph[index]
        assert operation.kind in kinds and operation.phase in PHASES
        assert operation.kind != "collective" or operation.name in COLLECTIVES
        assert operation.features == {key: graph.column(key)[index] for key in FEATURES}
    for name in FEATURES:
        sizes = graph.column(name)
        assert np.isfinite(sizes).all() and (sizes >= 0).all(), name
    assert (graph.traffic > 0).all()
    assert graph.traffic.sum() == graph.accesses.nbytes.sum()
    members = np.concatenate([*graph.kernels.values(), np.array([], dtype=int)])
    assert sorted(members) == list(range(len(graph)))
    assert [graph[int(i)].kind for i in graph.collectives] == ["collective"] * len(
        graph.collectives
    )
    order = [PHASES.index(label.phase) for label in graph.labels]
    assert order == sorted(order)
    frame = graph.table()
    assert frame["traffic"].to_list() == graph.traffic.tolist()
    assert f"{len(graph)} operations" in repr(graph)
    assert len(graph.distances) == len(graph.accesses) and graph.footprint <= graph.traffic.sum()
    assert ((graph.distances >= 0) & (graph.distances <= graph.footprint * (1 + 1e-12))).all()


def test_reuse_distances_of_a_small_tape() -> None:
    tape = Tape()
    a, b, c = (tape.tensor(100), tape.tensor(10), tape.tensor(1000))
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
    assert [[table.rows for table in graph.tables] for graph in graphs] == [[300], [1000, 50]]
    collectives = [[graph[int(i)].name for i in graph.collectives] for graph in graphs]
    assert collectives[0] == collectives[1] == ["all_to_all", "all_to_all", "all_reduce"]
    nbytes = [[graph[int(i)].features["nbytes"] for i in graph.collectives] for graph in graphs]
    assert nbytes[0] == nbytes[1]
    assert nbytes[0][0] == 64 * 2 * 16 * 4, "the fullest rank sends the pooled rows of two tables"
    tables = sum(graph.parameters for graph in graphs) - 2 * nbytes[0][2] / 4
    assert tables == 16 * 1350


def test_data_parallel_ranks_are_one_graph() -> None:
    first, second = Transformer.bert(**TINY).graphs(2)
    assert first is second and labels(first, kind="collective") == ["all_reduce"]
    assert first.column("nbytes").sum() == 4 * first.parameters


def test_table_distributions() -> None:
    assert EmbeddingTable(1000, 8).distribution == Uniform(1000)
    assert EmbeddingTable(1000, 8, exponent=0.7).distribution == Zipf(1000, 0.7)
    assert EmbeddingTable(1000, 8, itemsize=2).nbytes == 16000


def test_numpy_numbers_and_floats_are_sizes() -> None:
    plain = DLRM(batch=64, **SMALL)
    other = DLRM(batch=np.int64(64), **{**SMALL, "rows": np.array([1000, 50, 300]), "dim": 16.0})
    assert plain == other
    assert plain.graphs(2.0)[0].labels == other.graphs(2)[0].labels  # type: ignore[arg-type]
    assert len(Transformer.bert(**TINY).graphs(2.0)) == 2  # type: ignore[arg-type]


# Samples.


def test_check_draws_what_the_issue_promises() -> None:
    drawn = samples.draw_check(3)
    families = [sample.family for sample in drawn]
    assert [families.count(name) for name in ("dlrm", "transformer", "hybrid")] == [14, 10, 6]
    assert len({sample.name for sample in drawn}) == 30
    for sample in drawn:
        w = sample.workload
        assert sample.ranks == (2 if sample.family == "hybrid" else 1)
        if isinstance(w, DLRM):
            assert 4 <= len(w.tables) <= 26 and 64 <= w.batch <= 2048
            assert all(
                1e3 <= t.rows <= 1e6 and 16 <= t.dim <= 128 and 1 <= t.pooling <= 32
                for t in w.tables
            )
            assert all(0 <= t.exponent <= 1.2 for t in w.tables)
            assert all(64 <= width <= 1024 for width in (*w.bottom[:-1], *w.top[:-1]))
        else:
            assert 2 <= w.layers <= 6 and 128 <= w.hidden <= 512 and 32 <= w.sequence <= 256
            assert 2 <= w.batch <= 16 and 1e3 <= w.vocabulary <= 1.4e4
    assert {s.workload.sparse for s in drawn if isinstance(s.workload, DLRM)} == {True, False}
    assert all(set(s.plan.owners) == {0, 1} for s in drawn if s.plan)


def test_draws_are_repeatable_and_apart() -> None:
    assert samples.draw_check(5) == samples.draw_check(5)
    drawn = samples.draw_calibration()
    assert drawn == samples.draw_calibration() and len(samples.draw_calibration(quick=True)) < len(
        drawn
    )
    names = [
        {str(samples.dump(s.workload)) for s in d}
        for d in (drawn, samples.draw_check(0), samples.draw_check(1))
    ]
    assert len(set.union(*names)) == sum(map(len, names))


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


BAD = (-1, 0, NAN, INF, 2**64, True)
WIDTHS = (64, "64", {64}, [0], [-8], [8, 1.5], [True])
REFUSED: list[tuple[Callable[[], object], str]] = [
    *((model(**{name: value}), name) for name in ("batch", "dim", "features") for value in SIZES),
    *((model(batch=4, rows=value), "rows") for value in (*BAD, "ab", 1.5, {3}, [4, [5]], [1, "2"])),
    *((model(pooling=value), "pooling") for value in (*BAD, "four", {3}, [1, 2, -3], [1, 2, "3"])),
    *(
        (model(exponent=value), "exponent")
        for value in (-1, NAN, INF, 11, "one", True, None, [0, 0, "0"])
    ),
    *((model(**{name: value}), name) for name in ("bottom", "top") for value in WIDTHS),
    *((bert(**{name: value}), name) for name in TINY for value in SIZES),
    (model(batch=None), "batch"),
    (bert(layers=10**9), "layers"),
    (lambda: EmbeddingTable(10, 4, itemsize=0), "itemsize"),
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
            lambda: DLRM("dlrm-defalt"),
            "preset is 'dlrm-defalt'; known are .*; did you mean 'dlrm-default'",
        ),
        (lambda: DLRM(5), "preset is 5; known are dlrm-default, dlrm-ddp, dlrm-mlperf"),  # type: ignore[arg-type]
        (lambda: Transformer.bert("gpt2"), "preset is 'gpt2'; known are bert-base, bert-large"),
        (lambda: Transformer.gpt2("gtp2"), "preset is 'gtp2'; known are .*did you mean 'gpt2'"),
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
        (bert(layer=3), "argument is 'layer'; known are .*did you mean 'layers'"),
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
        assert isinstance(graph, Graph)
        assert all((graph.column(name) >= 0).all() for name in FEATURES)
    own = sum(graph.parameters for graph in graphs) - sum(rows) * dim
    assert own % ranks == 0, "the dense weights are the same on every rank"


# Interactions, kernels in one, and what lies on which rank.


def test_exact_updates_touch_each_distinct_row_once() -> None:
    """Lookups are sorted; weights and the sums of Adagrad are read and written for each distinct
    row."""
    found = {}
    for optimizer in ("sgd", "adagrad"):
        sizes = {**SMALL, "rows": [10**9], "dim": 32}
        graph = DLRM(batch=64, embedding="exact", optimizer=optimizer, **sizes).graphs(
            accelerator=True
        )[0]
        own = graph.kernels["embedding_backward", "exact"]
        assert graph.column("lookups")[own].sum() == 0, "rows are among its traffic"
        found[optimizer] = graph.traffic[own].sum()
    rows, row = 64 * 4, 32 * 4
    sort, gradient, index = 4 * 32 * rows, 64 * row, 8 * (rows + 64)
    assert found["sgd"] == pytest.approx(sort + gradient + index + 2 * rows * row, rel=1e-3)
    assert found["adagrad"] - found["sgd"] == pytest.approx(2 * rows * row, rel=1e-3)


SPLITS = {
    "columns": [Placement("column_wise", (0, 2), columns=(4, 12)), 1, 3],
    "rows": [Placement("row_wise", (0, 1, 2, 3)), 1, 3],
    "nodes": [Placement("table_row_wise", (2, 3)), 1, 3],
    "copies": [0, Placement("data_parallel", (0, 1, 2, 3)), 3],
    "rows-and-copies-only": [
        Placement("row_wise", (0, 1, 2, 3)),
        *[Placement("data_parallel", (0, 1, 2, 3))] * 2,
    ],
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("embedding", ["separate", "exact"])
@pytest.mark.parametrize("name", SPLITS)
def test_split_tables_are_looked_up_and_sent_as_often_as_whole_ones(
    name: str, embedding: str, overlap: bool
) -> None:
    model = DLRM(batch=64, embedding=embedding, overlap=overlap, **SMALL)
    plan = Plan.from_owners(SPLITS[name], ranks=4)
    whole, graphs = model.graphs()[0], model.graphs(4, plan)
    for key in ("flops", "elements"):
        kinds = ("gemm", "bmm") if key == "flops" else ("embedding_forward",)
        total = sum(
            g.column(key)[[label.kind in kinds for label in g.labels]].sum() for g in graphs
        )
        assert total == pytest.approx(
            whole.column(key)[[label.kind in kinds for label in whole.labels]].sum(), rel=0.02
        )
    sizes = {}
    for graph in graphs:
        for i in graph.collectives:
            sizes.setdefault(graph.labels[i].name, []).append(graph[int(i)].features)
    pooled, vector = 64 * 16 * 4, 16 * 4
    if name == "columns":
        assert {f["nbytes"] for f in sizes["all_to_all"]} == {64 * 16 * 4}, (
            "the fullest rank sends 16 columns"
        )
    elif "rows" in name:
        assert {f["nbytes"] for f in sizes["reduce_scatter"] + sizes["all_gather"]} == {pooled}
        assert ("all_to_all" in sizes) == (name == "rows")
    elif name == "nodes":
        assert len(sizes["reduce_scatter"]) == len(sizes["all_gather"]) == 2, "two ranks add up"
        assert {f["group"] for f in sizes["reduce_scatter"]} == {1.0}
        assert {graph.groups for graph in graphs} == {((0, 1, 2, 3), (2, 3))}
        assert {f["nbytes"] for f in sizes["all_to_all"]} == {64 * (16 + 8) * 4}, (
            "rank 3: a table, and half of another"
        )
    if "copies" in name:
        reduced = sum(f["nbytes"] for f in sizes["all_reduce"]) / 4
        dense = 4 * (whole.parameters - 16 * 1350)
        assert reduced == dense + vector * sum(SMALL["rows"][1 : 2 + (name != "copies")])


def test_tables_may_have_another_data_type() -> None:
    half = DLRM(batch=64, dtype="fp16", table_dtype="fp32", **SMALL)
    assert {t.itemsize for t in half.tables} == {4}
    graph = half.graphs(2)[0]
    assert graph.column("nbytes")[graph.collectives[0]] == 64 * 2 * 16 * 2, (
        "pooled rows are as wide as activations"
    )


def test_gradients_of_shards_are_summed_up_in_the_format_that_is_named() -> None:
    """As PyTorch's MixedPrecisionPolicy: weights stay fp32, gathered and reduced in bf16."""
    make = partial(Transformer.gpt2, batch=8, sequence=64, layers=2, dtype="bf16", mixed=True)
    sent = {}
    for name in ("", "bf16"):
        graph = make(parallel="fsdp", reduce_dtype=name).graphs(8)[0]
        kinds, nbytes = [label.name for label in graph.labels], graph.column("nbytes")
        sent[name] = {
            kind: sum(nbytes[i] for i, own in enumerate(kinds) if own == kind)
            for kind in set(kinds)
        }
    assert sent[""]["reduce_scatter"] == 2 * sent["bf16"]["reduce_scatter"]
    assert sent[""]["all_gather"] == sent["bf16"]["all_gather"]
    with pytest.raises(
        ValueError, match=r"reduce_dtype is 'bf16' and parallel 'ddp', .*take parallel='fsdp'"
    ):
        make(reduce_dtype="bf16").graphs(8)
