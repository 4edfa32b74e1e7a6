"""Questions about single kernels and predictions of iterations take the same times."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.fitting import KernelModel
from perfkit.platform import kernel_times
from perfkit.platform.gallery import list_gallery
from perfkit.prediction.cost import Costs, price

BERT = pk.Transformer.bert("bert-base", batch=8, sequence=128, dtype="fp32")
TABLES = pk.DLRM(rows=[10**6] * 4, dim=64, pooling=10, batch=2048, fused=False)


def price_alone(
    model: pk.Transformer | pk.DLRM, platform: pk.Platform, name: str, variant: str
) -> tuple[pk.Graph, Costs, int]:
    """One rank's operations, what they cost, and the position of the first with these names."""
    accelerator = platform.device.kind != "cpu"
    [graph] = model.graphs(1, None, accelerator=accelerator)
    [costs] = price([graph], platform, dtype="fp32")
    labels = [(label.name, label.variant) for label in graph.labels]
    return graph, costs, labels.index((name, variant))


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pk.ExtrapolationWarning)
        yield


@pytest.mark.parametrize("name", list_gallery())
def test_a_product_beside_the_same_product_in_a_prediction(name: str) -> None:
    """They differ where `Platform.gemm` says so, and nowhere else."""
    platform = pk.load_platform(name)
    graph, costs, product = price_alone(BERT, platform, "mm", "nn")
    sizes = {size: int(graph.column(size)[product]) for size in ("m", "n", "k")}
    alone = platform.gemm(**sizes).time
    near, distant = costs.hot[product], costs.cold[product]
    if platform.device.kind == "cpu":  # a part of the operands is still in a cache, here and there
        assert near < alone < 1.001 * (near + distant)
    else:  # the cache of a GPU serves rows of tables alone
        assert alone == pytest.approx(near, rel=1e-12)
    of_class = costs.models[costs.classes[product]].in_iteration
    within = of_class.scale * near + of_class.cold_scale * distant + of_class.launch
    assert costs.seconds[product] == pytest.approx(within, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in list_gallery() if not name.startswith("zen")])
def test_lookups_beside_the_same_lookups_in_a_prediction(name: str) -> None:
    """In a prediction other operands take a part of the cache that serves rows."""
    platform = pk.load_platform(name)
    _, costs, first = price_alone(TABLES, platform, "_embedding_bag", "_embedding_bag")
    alone = platform.lookup(TABLES.tables, batch=TABLES.batch).time / len(TABLES.tables)
    assert 0.9 * costs.hot[first] < alone <= costs.hot[first]


@pytest.mark.parametrize(
    ("name", "owner", "place"),
    [
        ("h100-sxm-8", KernelModel, "time"),
        ("zen5-2", kernel_times, "time_sum_of_terms"),
    ],
)
def test_a_term_that_is_added_moves_questions_and_predictions(
    name: str, owner: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a colleague may change, on a platform that it times."""
    platform = pk.load_platform(name)
    sizes = {"m": 512, "n": 512, "k": 512, "batch": 1}
    work = {**sizes, "flops": 2.0 * 512**3, "nbytes": 12.0 * 512**2}

    def ask() -> list[float]:
        kind = "gemm" if "gemm" in platform.kernels else "gemm.nn"
        _, costs, product = price_alone(BERT, platform, "mm", "nn")
        return [
            platform.gemm(512, 512, 512).time,
            float(platform.kernel_time(kind, work)),
            platform.lookup(TABLES.tables, batch=2048).time,
            float(costs.hot[product] + costs.cold[product]),
        ]

    before = ask()
    original: Callable[..., Any] = getattr(owner, place)

    def slower(*given: Any) -> Any:
        times = original(*given)
        if isinstance(times, kernel_times.IsolatedTimes):
            return kernel_times.IsolatedTimes(2 * times.near, 2 * times.distant)
        return 2 * times

    monkeypatch.setattr(owner, place, slower)
    assert ask() == pytest.approx([2 * time for time in before], rel=1e-12)


def test_kernels_by_their_whole_key_count_what_their_class_counts() -> None:
    """A batch normalization reads its operands more than once; rows of products may be unaligned."""
    h100 = pk.load_platform("h100-sxm-8")
    fit = h100.kernels["rowwise.native_batch_norm.bf16"]
    moved = kernel_times.OPERAND_PASSES["native_batch_norm"] * 1e9
    expected = fit["launch"] + moved / (fit["memory_efficiency"] * h100.device.main_bandwidth)
    found = h100.kernel_time("rowwise.native_batch_norm.bf16", {"nbytes": 1e9, "flops": 0.0})
    assert float(found) == pytest.approx(expected, rel=1e-9)

    def time(n: int) -> float:
        work: Mapping[str, float] = {
            "flops": 2.0 * 4096 * 4096 * 1024,
            "nbytes": 5e7,
            "m": 4096,
            "n": n,
            "k": 1024,
        }
        return float(h100.kernel_time("gemm", work, dtype="bf16"))

    assert time(4095) > 3 * time(4096)
    broadcast = h100.kernel_time(
        "gemm", {"flops": np.array([[1e9], [1e12]]), "nbytes": [1e6, 1e7, 1e8]}
    )
    assert broadcast.shape == (2, 3)


def test_graphs_without_products_are_timed_over_configurations() -> None:
    h100 = pk.load_platform("h100-sxm-8")
    for dtype in ("fp32", "bf16"):
        copies = [kernel_times.find_lone_model(h100, "copy", "copy_", dtype)]
        kernels = kernel_times.ClassifiedKernels(tuple(copies), np.zeros(3, dtype=int), 2)
        products = kernel_times.find_aligned_products(kernels, {"m": np.zeros((3, 1))}, h100)
        is_unaligned = np.zeros((3, 5), dtype=bool)
        is_unaligned[products.operations] = products.is_unaligned
        assert not is_unaligned.any()
    grid = {"batch": [8, 16], "sequence": [128, 256]}
    swept = pk.sweep(pk.Transformer.bert(dtype="fp32"), grid, platform="h100-sxm-8")
    assert swept.table().height == 4


def test_caches_are_asked_only_where_a_time_depends_on_them() -> None:
    h100 = pk.load_platform("h100-sxm-8")
    levels = (replace(h100.device.memory[0], bandwidth=None), h100.device.memory[1])
    untimed = replace(h100, device=replace(h100.device, memory=levels))
    asked = replace(untimed, name="asked")
    vars(asked)["has_timed_caches"] = True
    assert not untimed.has_timed_caches
    model = pk.DLRM("dlrm-mlperf", batch=2048)
    expected = pk.predict(model, untimed, ranks=8).time
    assert pk.predict(model, asked, ranks=8).time == expected
    assert pk.load_platform("v100-locked-1").has_timed_caches
    assert h100.has_timed_caches
