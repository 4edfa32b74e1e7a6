"""Sizes that are arrays over configurations: the same times as one prediction after the other."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from perfkit.platform.gallery import load_platform
from perfkit.prediction.configurations import price_configurations
from perfkit.prediction.predictor import predict
from perfkit.workloads import structure
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.sizes import select_sizes
from perfkit.workloads.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
HALF = {"dtype": "fp16", "mixed": True}


def transformers(
    rng: np.random.Generator, n: int, build: Callable[..., Any] = Transformer.bert, **more: Any
) -> Any:
    heads, batch, sequence, vocabulary = (
        rng.integers(1, most, n) for most in (17, 65, 513, 40_000)
    )
    sizes = {
        "batch": batch,
        "sequence": sequence,
        "vocabulary": vocabulary,
        "heads": heads,
        "hidden": 64 * heads,
    }
    return build(**sizes, **more)


def dlrms(rng: np.random.Generator, n: int, tables: int = 26, **more: Any) -> DLRM:
    rows, pooling = ([rng.integers(1, most, n) for _ in range(tables)] for most in (10**6, 30))
    bottom, *top = (8 * rng.integers(9, 129, n) for _ in range(4))
    batch = 8 * rng.integers(1, 1025, n)
    return DLRM(
        batch=batch,
        rows=rows,
        pooling=pooling,
        bottom=[bottom],
        top=top,
        dim=64,
        features=13,
        **more,
    )


@pytest.mark.parametrize(
    ("draw", "platform", "n", "settings"),
    [
        (transformers, "h100-sxm-8", 60, {}),
        (transformers, "v100-sxm-8", 20, {"attention": "eager", "fused": True, **HALF}),
        (transformers, "v100-locked-1", 20, {"layers": 2, "optimizer": "sgd"}),
        (transformers, "h100-sxm-8", 20, {"layers": 4, "checkpoint": True, "dtype": "bf16"}),
        (transformers, "a100-sxm-8", 20, {"build": Transformer.gpt2, "layers": 5, "dtype": "bf16"}),
        (dlrms, "h100-sxm-8", 60, {"embedding": "fused"}),
        (dlrms, "a100-sxm-8", 20, {}),
        (dlrms, "v100-locked-1", 20, {"sparse": False, "tables": 4}),
        (
            dlrms,
            "h100-sxm-8",
            20,
            {"embedding": "exact", "optimizer": "adagrad", "exponent": 1.05, "tables": 3},
        ),
        (dlrms, "h100-sxm-8", 20, {"interaction": "cross", "tables": 5, **HALF}),
    ],
)
def test_arrays_of_sizes_are_as_each_alone(draw, platform, n, settings):
    workload, where = draw(np.random.default_rng(n), n, **settings), load_platform(platform)
    found = price_configurations(workload, where)
    alone = [predict(select_sizes(workload, index), where) for index in range(n)]
    for name in ("time", "spread"):
        assert found[name] == pytest.approx([getattr(r, name) for r in alone], rel=1e-9)
    assert found["bottleneck"].tolist() == [r.bottleneck for r in alone]
    assert found["needs"] == pytest.approx([r.memory().total for r in alone], rel=1e-9)


@pytest.mark.parametrize(
    ("platform", "ranks", "execution", "settings"),
    [
        ("h100-sxm-8", 8, None, {}),
        ("a100-sxm-8", 4, "graphs", {"dtype": "bf16", "mixed": True}),
        ("h100-sxm-8", 2, None, {"overlap": False}),
        ("v100-sxm-8", 8, None, {"parallel": "zero1", "accumulate": 2}),
        (
            "a100-sxm-8",
            8,
            None,
            {"parallel": "fsdp", "dtype": "bf16", "mixed": True, "checkpoint": True},
        ),
    ],
)
def test_ranks_that_do_the_same_wait_as_in_the_event_loop(platform, ranks, execution, settings):
    """The interval is an estimate where the host sets the pace."""
    rng, where = np.random.default_rng(ranks), load_platform(platform)
    sizes = {"batch": 16 * rng.integers(1, 9, 40), "sequence": rng.integers(16, 1024, 40)}
    model = Transformer.gpt2(**sizes, layers=4, **settings)
    found = price_configurations(model, where, ranks, execution)
    alone = [
        predict(select_sizes(model, i), where, ranks=ranks, execution=execution) for i in range(40)
    ]
    for name in ("time", "needs"):
        known = [r.time if name == "time" else r.memory().total for r in alone]
        assert found[name] == pytest.approx(known, rel=1e-9), name
    apart = abs(found["spread"] / [r.spread for r in alone] - 1.0)
    assert np.percentile(apart, 95) < 0.05 and np.median(apart) < 0.02
    assert np.mean(found["bottleneck"] == [r.bottleneck for r in alone]) >= 0.9


@pytest.mark.parametrize(("ranks", "batch"), [(1, 48), (2, 48), (1, 2**62)])
@pytest.mark.parametrize(
    "build", [partial(Transformer.gpt2, layers=5), DLRM, partial(DLRM, "dlrm-dcnv2", overlap=True)]
)
def test_sizes_that_are_filled_in_give_the_graphs_of_plain_numbers(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any], ranks: int, batch: int
) -> None:
    """A structure is recorded with open sizes, which are filled in; recorded with plain numbers it
    is the same, beyond 64 bits too."""

    def look() -> list[Any]:
        graphs = build(batch=batch).graphs(ranks)
        waits = [None if g.waits is None else list(g.waits) for g in graphs]
        return [
            [g.labels, g.table().rows(), list(g.accesses), g.parameters, g.tables] for g in graphs
        ] + waits

    filled = look()

    def record_plainly(record: Any, model: Any, fields: Any, *options: Any) -> Any:
        return tuple(graph.fill() for graph in record(model, *options))

    monkeypatch.setattr(structure, "_fill", record_plainly)
    assert look() == filled


def test_workloads_that_differ_in_open_sizes_have_one_structure() -> None:
    """Also those whose sizes are arrays. Every other array is an open size, the same array the same one."""
    structure = Transformer.gpt2(batch=8, sequence=64).structure(2)
    many = Transformer.gpt2(batch=np.array([8, 16]), sequence=32)
    assert many.structure(2) is structure
    assert structure.read_sizes(many)["batch"].tolist() == [8.0, 16.0]
    assert Transformer.gpt2(batch=8, sequence=64, layers=3).structure(2) is not structure
    pooling = np.array([1.0, 2.0])  # of both tables
    tables = DLRM(rows=[1000, 2000], pooling=[pooling, pooling], top=[np.array([8, 16])])
    names = [str(size) for size in tables.structure().open_sizes]
    assert sorted(names) == ["batch", "tables[0].pooling", "top[0]"]


H100, PAIR = load_platform("h100-sxm-8"), np.array([1, 2])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: Transformer.bert(batch=np.array([2, 0])),
            "batch is 0; it must be a whole number above 0",
        ),
        (
            lambda: Transformer.bert(sequence=np.array([2.5])),
            "sequence is 2.5; it must be a whole number above 0",
        ),
        (
            lambda: Transformer.bert(hidden=np.array([768, 770])),
            "heads is 12; it must divide hidden",
        ),
        (
            lambda: DLRM(pooling=[np.array([1.0, -1.0])] * 8),
            "pooling is -1.0; it must be a number above 0",
        ),
        (lambda: predict(Transformer.bert(batch=PAIR), H100), "sizes are arrays; find their times"),
        (
            lambda: price_configurations(
                Transformer.bert(batch=PAIR, sequence=np.array([8, 16, 32]), heads=1), H100
            ),
            "sizes are of 2 and 3 configurations",
        ),
        (
            lambda: price_configurations(DLRM(batch=64 * PAIR, rows=[1000] * 3), H100, 2),
            "ranks differ; configurations are priced one after the other",
        ),
    ],
)
def test_bad_arrays_are_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_an_error_of_arrays_travels_between_processes_as_its_words() -> None:
    with pytest.raises(ValueError, match="batch is 0") as caught:
        Transformer.bert(batch=np.array([2, 0]))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ValueError and str(copy) == str(caught.value)


def test_buckets_of_weights_of_many_sizes_are_refused_and_swept() -> None:
    """Which gradients share a bucket depends on the sizes of weights, so one structure cannot hold
    them."""
    sizes = np.array([13, 4096, 20000])
    given = {"rows": [1000] * 2, "dim": 64, "pooling": 1, "bottom": [512, 64], "top": [256]}
    many = DLRM(batch=64, features=sizes, overlap=True, **given)
    with pytest.raises(
        ValueError, match=r"^sizes of weights are arrays, and which gradients share"
    ):
        many.structure(8, accelerator=True)
    hidden = Transformer("gpt", True, 64, 128, 2, sizes[1:] - sizes[1:] % 8, 8, 5000, 128)
    with pytest.raises(ValueError, match=r"^sizes of weights are arrays"):
        hidden.structure(8, accelerator=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 64}, "sizes are given for 'batch'; open are batch, sequence"),
        ({"batch": 64, "sequence": 64, "layers": 3}, "'layers'; open are batch, sequence"),
        ({"batch": -8, "sequence": 64}, "size batch is -8"),
        ({"batch": 0, "sequence": 64}, "size batch is 0"),
        ({"batch": "8", "sequence": 64}, "size batch is '8'"),
        (
            {"batch": 65, "sequence": 64},
            "size batch is 65; it is shared in 8 parts; give a multiple",
        ),
        ({"batch": 8.5, "sequence": 64}, r"size batch is 8\.5; it is shared in 8 parts"),
        ([64, 64], "sizes"),
    ],
)
def test_a_structure_refuses_sizes_of_which_a_graph_would_be_wrong(
    sizes: Any, message: str
) -> None:
    structure = Transformer.gpt2(batch=8, sequence=64, accumulate=2).structure(4)
    with pytest.raises(ValueError, match=message):
        structure.fill(sizes)


def test_a_structure_is_filled_with_what_the_workload_takes() -> None:
    model = Transformer.gpt2(batch=8, sequence=64, accumulate=2)
    [filled, *_] = model.structure(4).fill({"batch": 24, "sequence": 32})
    [recorded, *_] = replace(model, batch=24, sequence=32).graphs(4)
    assert filled.table().equals(recorded.table())
