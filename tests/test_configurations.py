"""Sizes that are arrays over configurations: the same times as one prediction after the other."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import perfkit as pk
from perfkit.prediction.configurations import price_configurations
from perfkit.workloads import structure
from perfkit.workloads.sizes import select_sizes
from tests.refusals import Refusal

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
HALF = {"dtype": "fp16", "mixed": True}


def transformers(
    rng: np.random.Generator, n: int, build: Callable[..., Any] = pk.Transformer.bert, **more: Any
) -> Any:
    """Transformers whose sizes are arrays over n configurations."""
    heads = rng.integers(1, 17, n)
    batch = rng.integers(1, 65, n)
    sequence = rng.integers(1, 513, n)
    vocabulary = rng.integers(1, 40_000, n)
    return build(
        batch=batch,
        sequence=sequence,
        vocabulary=vocabulary,
        heads=heads,
        hidden=64 * heads,
        **more,
    )


def dlrms(rng: np.random.Generator, n: int, tables: int = 26, **more: Any) -> pk.DLRM:
    """DLRMs whose sizes are arrays over n configurations."""
    return pk.DLRM(
        rows=[rng.integers(1, 10**6, n) for _ in range(tables)],
        pooling=[rng.integers(1, 30, n) for _ in range(tables)],
        bottom=[8 * rng.integers(9, 129, n)],
        top=[8 * rng.integers(9, 129, n) for _ in range(3)],
        batch=8 * rng.integers(1, 1025, n),
        dim=64,
        features=13,
        **more,
    )


class Configurations(NamedTuple):
    """So many random configurations of a workload on a platform."""

    draw: Callable[..., Any]
    platform: str
    n: int
    settings: dict[str, Any]


DRAWN = [
    Configurations(transformers, "h100-sxm-8", 60, {}),
    Configurations(transformers, "v100-sxm-8", 20, {"attention": "eager", "fused": True, **HALF}),
    Configurations(transformers, "v100-locked-1", 20, {"layers": 2, "optimizer": "sgd"}),
    Configurations(
        transformers, "h100-sxm-8", 20, {"layers": 4, "checkpoint": True, "dtype": "bf16"}
    ),
    Configurations(
        transformers, "a100-sxm-8", 20, {"build": pk.Transformer.gpt2, "layers": 5, "dtype": "bf16"}
    ),
    Configurations(dlrms, "h100-sxm-8", 60, {"embedding": "fused"}),
    Configurations(dlrms, "a100-sxm-8", 20, {}),
    Configurations(dlrms, "v100-locked-1", 20, {"sparse": False, "tables": 4}),
    Configurations(
        dlrms,
        "h100-sxm-8",
        20,
        {"embedding": "exact", "optimizer": "adagrad", "exponent": 1.05, "tables": 3},
    ),
    Configurations(dlrms, "h100-sxm-8", 20, {"interaction": "cross", "tables": 5, **HALF}),
]


def name_configurations(case: Configurations) -> str:
    settings = ", ".join(
        f"{name} {value}" for name, value in case.settings.items() if name != "build"
    )
    return f"{case.draw.__name__}, {case.platform}, {settings}"


@pytest.mark.parametrize("case", DRAWN, ids=name_configurations)
def test_arrays_of_sizes_are_as_each_alone(case: Configurations) -> None:
    workload = case.draw(np.random.default_rng(case.n), case.n, **case.settings)
    platform = pk.load_platform(case.platform)
    together = price_configurations(workload, platform)
    alone = [pk.predict(select_sizes(workload, index), platform) for index in range(case.n)]
    assert together["time"] == pytest.approx([r.time for r in alone], rel=1e-9)
    assert together["spread"] == pytest.approx([r.spread for r in alone], rel=1e-9)
    assert together["bottleneck"].tolist() == [r.bottleneck for r in alone]
    assert together["needs"] == pytest.approx([r.memory().total for r in alone], rel=1e-9)


class AlikeRanks(NamedTuple):
    """Ranks of a platform that do the same."""

    platform: str
    ranks: int
    settings: dict[str, Any]
    execution: str | None = None


NARROW = {"dtype": "bf16", "mixed": True}
ALIKE_RANKS = {
    "plain": AlikeRanks("h100-sxm-8", 8, {}),
    "graphs": AlikeRanks("a100-sxm-8", 4, NARROW, execution="graphs"),
    "blocking": AlikeRanks("h100-sxm-8", 2, {"overlap": False}),
    "zero1, accumulated": AlikeRanks("v100-sxm-8", 8, {"parallel": "zero1", "accumulate": 2}),
    "sharded": AlikeRanks("a100-sxm-8", 8, {"parallel": "fsdp", "checkpoint": True, **NARROW}),
}


@pytest.mark.parametrize("case", ALIKE_RANKS.values(), ids=ALIKE_RANKS)
def test_ranks_that_do_the_same_wait_as_in_the_event_loop(case: AlikeRanks) -> None:
    """The interval is an estimate where the host sets the pace."""
    n = 40
    rng = np.random.default_rng(case.ranks)
    batch = 16 * rng.integers(1, 9, n)
    sequence = rng.integers(16, 1024, n)
    model = pk.Transformer.gpt2(batch=batch, sequence=sequence, layers=4, **case.settings)
    platform = pk.load_platform(case.platform)
    together = price_configurations(model, platform, case.ranks, case.execution)
    alone = []
    for index in range(n):
        one = select_sizes(model, index)
        alone.append(pk.predict(one, platform, ranks=case.ranks, execution=case.execution))
    assert together["time"] == pytest.approx([r.time for r in alone], rel=1e-9)
    assert together["needs"] == pytest.approx([r.memory().total for r in alone], rel=1e-9)

    difference = abs(together["spread"] / [r.spread for r in alone] - 1.0)
    assert np.percentile(difference, 95) < 0.05
    assert np.median(difference) < 0.02
    assert np.mean(together["bottleneck"] == [r.bottleneck for r in alone]) >= 0.9


@pytest.mark.parametrize(("ranks", "batch"), [(1, 48), (2, 48), (1, 2**62)])
@pytest.mark.parametrize(
    "build",
    [partial(pk.Transformer.gpt2, layers=5), pk.DLRM, partial(pk.DLRM, "dlrm-dcnv2", overlap=True)],
)
def test_sizes_that_are_filled_in_give_the_graphs_of_plain_numbers(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any], ranks: int, batch: int
) -> None:
    """A structure is recorded with open sizes, which are filled in; recorded with plain numbers it
    is the same, beyond 64 bits too."""

    def list_all_that_graphs_hold() -> list[Any]:
        held: list[Any] = []
        for graph in build(batch=batch).graphs(ranks):
            held += [graph.labels, graph.table().rows(), list(graph.accesses)]
            held += [graph.parameters, graph.tables]
            held.append(None if graph.waits is None else list(graph.waits))
        return held

    filled = list_all_that_graphs_hold()

    def record_plainly(record: Any, model: Any, fields: Any, *options: Any) -> Any:
        return tuple(graph.fill() for graph in record(model, *options))

    monkeypatch.setattr(structure, "_fill", record_plainly)
    assert list_all_that_graphs_hold() == filled


def test_workloads_that_differ_in_open_sizes_have_one_structure() -> None:
    """Also those whose sizes are arrays. Every other array is an open size, the same array the same one."""
    structure = pk.Transformer.gpt2(batch=8, sequence=64).structure(2)
    many = pk.Transformer.gpt2(batch=np.array([8, 16]), sequence=32)
    assert many.structure(2) is structure
    assert structure.read_sizes(many)["batch"].tolist() == [8.0, 16.0]
    assert pk.Transformer.gpt2(batch=8, sequence=64, layers=3).structure(2) is not structure
    pooling = np.array([1.0, 2.0])  # of both tables
    tables = pk.DLRM(rows=[1000, 2000], pooling=[pooling, pooling], top=[np.array([8, 16])])
    names = [str(size) for size in tables.structure().open_sizes]
    assert sorted(names) == ["batch", "tables[0].pooling", "top[0]"]


def predict_a_pair() -> Any:
    return pk.predict(pk.Transformer.bert(batch=PAIR), H100)


def price_sizes_of_other_lengths() -> Any:
    model = pk.Transformer.bert(batch=PAIR, sequence=np.array([8, 16, 32]), heads=1)
    return price_configurations(model, H100)


def price_ranks_that_differ() -> Any:
    return price_configurations(pk.DLRM(batch=64 * PAIR, rows=[1000, 1000, 1000]), H100, 2)


H100 = pk.load_platform("h100-sxm-8")
PAIR = np.array([1, 2])
REFUSALS = [
    Refusal(
        pk.Transformer.bert,
        {"batch": np.array([2, 0])},
        "batch is 0; it must be a whole number above 0",
    ),
    Refusal(
        pk.Transformer.bert,
        {"sequence": np.array([2.5])},
        "sequence is 2.5; it must be a whole number above 0",
    ),
    Refusal(
        pk.Transformer.bert, {"hidden": np.array([768, 770])}, "heads is 12; it must divide hidden"
    ),
    Refusal(
        pk.DLRM,
        {"pooling": [np.array([1.0, -1.0])] * 8},
        "pooling is -1.0; it must be a number above 0",
    ),
    Refusal(predict_a_pair, {}, "sizes are arrays; find their times"),
    Refusal(price_sizes_of_other_lengths, {}, "sizes are of 2 and 3 configurations"),
    Refusal(
        price_ranks_that_differ,
        {},
        "ranks differ; configurations are priced one after the other",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[case.message for case in REFUSALS])
def test_bad_arrays_are_refused(case: Refusal) -> None:
    with pytest.raises(ValueError, match=case.message):
        case.call()


def test_an_error_of_arrays_travels_between_processes_as_its_words() -> None:
    with pytest.raises(ValueError, match="batch is 0") as caught:
        pk.Transformer.bert(batch=np.array([2, 0]))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ValueError
    assert str(copy) == str(caught.value)


def test_buckets_of_weights_of_many_sizes_are_refused_and_swept() -> None:
    """Which gradients share a bucket depends on the sizes of weights, so one structure cannot hold
    them."""
    sizes = np.array([13, 4096, 20000])
    many = pk.DLRM(
        batch=64,
        features=sizes,
        overlap=True,
        rows=[1000, 1000],
        dim=64,
        pooling=1,
        bottom=[512, 64],
        top=[256],
    )
    with pytest.raises(
        ValueError, match=r"^sizes of weights are arrays, and which gradients share"
    ):
        many.structure(8, accelerator=True)
    hidden = pk.Transformer("gpt", True, 64, 128, 2, sizes[1:] - sizes[1:] % 8, 8, 5000, 128)
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
    structure = pk.Transformer.gpt2(batch=8, sequence=64, accumulate=2).structure(4)
    with pytest.raises(ValueError, match=message):
        structure.fill(sizes)


def test_a_structure_is_filled_with_what_the_workload_takes() -> None:
    model = pk.Transformer.gpt2(batch=8, sequence=64, accumulate=2)
    filled = model.structure(4).fill({"batch": 24, "sequence": 32})
    recorded = replace(model, batch=24, sequence=32).graphs(4)
    assert filled[0].table().equals(recorded[0].table())
