"""Decisions: what a resource is worth, how far ranks scale, what meets a condition; each against
doing it by hand."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import polars as pl
import pytest

import perfkit as pk
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.whatif import RESOURCES, list_resources
from tests.refusals import Refusal

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
H100, ZEN = pk.load_platform("h100-sxm-8"), pk.load_platform("zen3-2")
GPT = pk.Transformer.gpt2(batch=64, dtype="bf16")
GPT_XL = pk.Transformer.gpt2("gpt2-xl", batch=256, dtype="bf16")
BERT_BASE = pk.Transformer.bert(batch=8)
WIDE = pk.DLRM(rows=[10**6] * 8, dim=64, batch=4096)
SMALL_DLRM = pk.DLRM(batch=64)


class Step(NamedTuple):
    """An iteration of a workload on some ranks of a platform."""

    workload: pk.Transformer | pk.DLRM
    platform: pk.Platform
    ranks: int


STEPS = {
    "a GPU": Step(GPT, H100, 8),
    "its host": Step(BERT_BASE, pk.load_platform("v100-sxm-8"), 1),
    "a cluster": Step(GPT_XL, pk.load_platform("h100-sxm-8x8"), 64),
    "a datasheet": Step(GPT, pk.load_platform("mi300x-8"), 8),
    "cores": Step(WIDE, ZEN, 2),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_second_belongs_to_a_resource(step: Step) -> None:
    """Where all rates double, the time halves: none is forgotten, constants of NCCL across nodes
    included."""
    rates = dict.fromkeys(list_resources(step.platform), 2.0)
    rates.pop("cache", None)
    twice_as_fast = step.platform.with_scale(**rates)
    prediction = pk.predict(step.workload, step.platform, ranks=step.ranks)
    halved = pk.predict(step.workload, twice_as_fast, ranks=step.ranks)
    assert halved.time == pytest.approx(prediction.time / 2, rel=1e-9)
    table = prediction.sensitivity().table().filter(pl.col("resource") != "cache")
    assert table["elasticity"].sum() == pytest.approx(-1, abs=0.01)
    assert prediction.sensitivity().table()["elasticity"].max() < 1e-6


class Change(NamedTuple):
    """1 % more of a resource, by its name and by the method of a platform."""

    step: Step
    resource: str
    by_hand: pk.Platform


CHANGES = {
    "link": Change(STEPS["a GPU"], "intra", H100.with_link("intra", bandwidth=1.01 * 450e9)),
    "host": Change(Step(BERT_BASE, H100, 1), "host", H100.with_host(1 / 1.01)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_sensitivity_is_what_predicting_again_gives(change: Change) -> None:
    settings: dict[str, Any] = {
        "ranks": change.step.ranks,
        "slowdown": {0: 1.3},
        "loading": 1e-4,
        "execution": "compiled",
    }
    workload, platform = change.step.workload, change.step.platform
    before = pk.predict(workload, platform, **settings)
    after = pk.predict(workload, change.by_hand, **settings)
    row = (
        before.sensitivity()
        .table()
        .row(by_predicate=pl.col("resource") == change.resource, named=True)
    )
    assert row["gain_s"] == pytest.approx(before.time - after.time, rel=1e-6)
    elasticity = math.log(after.time / before.time) / math.log(1.01)
    assert row["elasticity"] == pytest.approx(elasticity, rel=1e-6, abs=1e-9)
    scaled = platform.with_scale(**{change.resource: 1.01})
    assert pk.predict(workload, scaled, **settings).time == pytest.approx(after.time, rel=1e-9)


def test_a_step_that_waits_for_its_host_says_host_and_the_chart_shows_both_sides() -> None:
    prediction = pk.predict(pk.Transformer.bert(batch=8, dtype="bf16"), "h100-sxm-8")
    assert prediction.bottleneck == "host-bound"
    sensitivity = prediction.sensitivity()
    table = sensitivity.table()
    # host and device stop one another now and then: formulas, table 4.3
    host, device = prediction.lower_bound, prediction.device_time
    share = 1 / (1 + (device / host) ** 4)
    assert table["resource"][0] == "host"
    assert table["elasticity"][0] == pytest.approx(-share, rel=1e-3)
    faster = smooth_maximum(device, host / 1.2, sharpness=4.0)
    assert table["more_s"][0] == pytest.approx(faster)
    assert "more host" in repr(sensitivity)
    assert "h100-sxm-8" in sensitivity.summary

    chart = sensitivity.chart().to_dict()
    bars = chart["datasets"][chart["layer"][0]["data"]["name"]]
    assert len(bars) == 2 * len(table)
    assert {bar["now_s"] for bar in bars} == {prediction.time}
    sides = {bar["side"] for bar in bars}
    assert sides == {"1/1.2 as much", "1.2 times as much"}, "how much more is said"
    assert chart["title"]["subtitle"] == sensitivity.summary
    assert "1.5 times as much" in prediction.sensitivity(0.5).chart().to_json()


def test_a_scale_changes_what_its_resource_times_and_nothing_else() -> None:
    assert H100.with_scale(intra=2).kernels == H100.kernels
    assert H100.with_scale(peak=2).collectives == H100.collectives
    same = H100.with_scale(memory=1, host=1)
    assert same.kernels == H100.kernels
    assert pk.predict(GPT, same).time == pk.predict(GPT, H100).time
    large = ZEN.with_scale(cache=2)
    assert large.context.caches["l3"] == 2 * ZEN.context.caches["l3"]
    assert large.context.caches["l3_share"] == ZEN.context.caches["l3_share"]


def test_a_scale_widens_what_it_changes() -> None:
    scaled = H100.with_scale(memory=1.2).kernels["gemm"]
    assert scaled.spread > H100.kernels["gemm"].spread
    assert scaled.kind == "fitted"


def test_scales_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="resource is 'inter'; known are peak"):
        H100.with_scale(inter=2)
    with pytest.raises(ValueError, match="peak is 0; it must"):
        H100.with_scale(peak=0)


def test_a_platform_with_all_levels_has_all_resources() -> None:
    cluster = pk.load_platform("h100-sxm-8x8").with_link("far", bandwidth=1e9, latency=0.01)
    assert set(list_resources(cluster)) == set(RESOURCES)


SMALL = partial(pk.Transformer.gpt2, layers=2, dtype="bf16")


@pytest.mark.parametrize(
    ("work", "strong"), [(SMALL(batch=8), False), (partial(SMALL, batch=64), True)]
)
def test_scaling_is_what_predicting_each_gives(work: Any, strong: bool) -> None:
    counts = (2, 8, 16)
    scaled = pk.scaling(work, "h100-sxm-8x2", counts, strong=strong)
    table = scaled.table()
    predictions = []
    for ranks in counts:
        batch = 64 if strong else 4 * ranks
        predictions.append(pk.predict(SMALL(batch=batch), "h100-sxm-8x2", ranks=ranks))
    rates = [prediction.throughput["samples"] for prediction in predictions]
    assert table["time_s"].to_list() == [prediction.time for prediction in predictions]
    assert table["samples_per_s"].to_list() == rates

    rate_of_a_rank = rates[0] / 2
    efficiency = [rate / ranks / rate_of_a_rank for rate, ranks in zip(rates, counts, strict=True)]
    assert table["efficiency"].to_list() == pytest.approx(efficiency)
    kept = [efficiency[1] / efficiency[0], efficiency[2] / efficiency[1]]
    assert table["kept"].to_list()[1:] == pytest.approx(kept)

    exposed = [prediction.communication()["exposed_share"].max() for prediction in predictions]
    assert table["exposed"].to_list() == exposed
    if not strong:  # which other ranks cost
        assert table["grew"].to_list() == [None, "collective", "collective"]
    assert scaled.chart(y="efficiency").to_dict()["layer"]
    composed = [text for text in scaled.warnings if "all_reduce on 16 ranks" in text]
    assert composed
    assert all(text.startswith("16 ranks: ") for text in composed)


def test_an_embedding_model_scales_as_it_is_and_names_what_grew() -> None:
    model = pk.DLRM(batch=4096, rows=[10**6] * 16, dim=64, embedding="fused")
    table = pk.scaling(model, "h100-sxm-8").table()
    assert table["ranks"].to_list() == [1, 2, 4, 8]
    assert table["batch"].to_list() == [4096, 8192, 16384, 32768]
    assert table["kept"][1] == table["kept"].min()
    assert table["grew"][1] == "collective"


BERT = partial(pk.Transformer.bert, "bert-large", layers=4, dtype="fp16")


@pytest.mark.parametrize(
    "ask",
    [
        partial(pk.predict, SMALL_DLRM, "h100-sxm-8"),
        partial(pk.scaling, SMALL_DLRM, "h100-sxm-8", [1, 2]),
        partial(pk.solve_for, "ranks", SMALL_DLRM, "h100-sxm-8"),
        partial(pk.sweep, pk.DLRM, {"batch": [64, 128]}, "h100-sxm-8", progress=False),
    ],
)
def test_a_warning_names_the_line_that_asks(ask: Callable[[], Any]) -> None:
    with pytest.warns(pk.ExtrapolationWarning, match="never calibrated with dlrm") as caught:
        ask()
    assert [warning.filename for warning in caught] == [__file__]


def test_the_largest_batch_that_fits() -> None:
    batch, prediction = pk.solve_for("batch", BERT, "v100-sxm-8", ranks=2)
    assert prediction.fits
    assert prediction.workload.batch == batch  # type: ignore[union-attr]
    assert prediction.ranks == 2
    assert pk.predict(BERT(batch=batch), "v100-sxm-8", ranks=2).fits
    assert not pk.predict(BERT(batch=batch + 2), "v100-sxm-8", ranks=2).fits


@pytest.mark.parametrize("strong", [False, True])
def test_the_fewest_ranks_that_reach_a_throughput(strong: bool) -> None:
    counts = [1, 2, 3, 4, 6, 8, 16]  # which share a batch of 48
    if not strong:
        counts += [5, 7]
    rates = {}
    for ranks in counts:
        batch = 48 if strong else 48 * ranks
        prediction = pk.predict(SMALL(batch=batch), "h100-sxm-8x2", ranks=ranks)
        rates[ranks] = prediction.throughput["tokens"]
    goal = rates[4] * 1.01

    def is_fast(prediction: pk.Prediction) -> bool:
        return prediction.throughput["tokens"] >= goal

    ranks, prediction = pk.solve_for(
        "ranks", SMALL(batch=48), "h100-sxm-8x2", strong=strong, until=is_fast
    )
    assert prediction.ranks == ranks
    assert ranks == min(count for count, rate in rates.items() if rate >= goal)


def time_with_links(scale: float) -> float:
    """An iteration of 16 GPUs, with so many times as fast links between nodes."""
    platform = pk.load_platform("h100-sxm-8x2").with_scale(inter=scale)
    return pk.predict(SMALL(batch=128), platform, ranks=16).time


def test_the_slowest_link_that_reaches_a_time() -> None:
    goal = time_with_links(100) / 0.9

    def is_fast(prediction: pk.Prediction) -> bool:
        return prediction.time <= goal

    scale, prediction = pk.solve_for("inter", SMALL(batch=128), "h100-sxm-8x2", is_fast, ranks=16)
    assert prediction.time <= goal
    assert prediction.time == time_with_links(scale)
    assert time_with_links(scale / 1.01) > goal
    link = prediction.platform.network.links["inter"].bandwidth.value
    link_before = pk.load_platform("h100-sxm-8x2").network.links["inter"].bandwidth.value
    assert link == pytest.approx(scale * link_before)


def count_samples(prediction: pk.Prediction) -> float:
    return prediction.throughput["samples"]


@pytest.mark.parametrize("worth", [None, count_samples])
def test_an_allocation_is_worth_the_most_of_all(worth: Any) -> None:
    """Of all ways to share 8 ranks. A job is worth how many times as fast as on one rank it is,
    unless told otherwise."""
    jobs = {"a": SMALL(batch=24), "b": SMALL(batch=8), "c": pk.DLRM(batch=24)}
    allocation = pk.allocate(jobs, "h100-sxm-8", 8, worth)
    worths = []
    for job in jobs.values():
        alone = pk.predict(job, "h100-sxm-8", ranks=1)
        worth_by_ranks = {}
        for ranks in range(1, 9):
            if job.batch % ranks == 0:
                prediction = pk.predict(job, "h100-sxm-8", ranks=ranks)
                speedup = alone.time / prediction.time
                worth_by_ranks[ranks] = worth(prediction) if worth else speedup
        worths.append(worth_by_ranks)
    best = 0.0
    for counts in product(*worths):
        if sum(counts) <= 8:
            total = sum(of[ranks] for of, ranks in zip(worths, counts, strict=True))
            best = max(best, total)
    assert allocation["worth"].sum() == pytest.approx(best)
    assert allocation["ranks"].sum() <= 8
    assert allocation["job"].to_list() == ["a", "b", "c"]


def always(prediction: pk.Prediction) -> bool:
    return True


def never(prediction: pk.Prediction) -> bool:
    return False


SOLVED = {"workload": SMALL(), "platform": "h100-sxm-8"}
SCALED = {"workload": SMALL(batch=8), "platform": "h100-sxm-8"}
REFUSALS = [
    Refusal(
        pk.solve_for,
        {"unknown": "batch", "until": always, **SOLVED},
        "every batch from 1 to 1048576 meets",
    ),
    Refusal(
        pk.solve_for,
        {"unknown": "batch", "until": never, **SOLVED},
        "no batch from 1 to 1048576 meets",
    ),
    Refusal(
        pk.solve_for, {"unknown": "ranks", "until": never, **SOLVED}, "no ranks from 1 to 8 meets"
    ),
    Refusal(pk.solve_for, {"unknown": "memory", "until": never, **SOLVED}, "no memory from 0.009"),
    Refusal(
        pk.solve_for, {"unknown": "memory", "until": always, **SOLVED}, "every memory from 0.009"
    ),
    Refusal(
        pk.solve_for,
        {"unknown": "inter", **SOLVED},
        "unknown is 'inter'; known are batch, ranks, peak",
    ),
    Refusal(
        pk.solve_for,
        {"unknown": "batch", "workload": 5, "platform": "h100-sxm-8"},
        "workload is 5; it has no batch",
    ),
    Refusal(pk.scaling, {"ranks": [], **SCALED}, r"ranks is \[\]; give at least one"),
    Refusal(pk.scaling, {"ranks": [3], "strong": True, **SCALED}, "batch is 8; "),
    Refusal(
        pk.allocate,
        {"jobs": {"a": SMALL(), "b": SMALL()}, "platform": "h100-sxm-8", "ranks": 1},
        "ranks is 1 for 2 jobs; give jobs",
    ),
    Refusal(
        pk.allocate,
        {"jobs": {"a": SMALL()}, "platform": "h100-sxm-8", "ranks": 16},
        "ranks is 16; it must be .* at most 8",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[case.message for case in REFUSALS])
def test_what_cannot_be_decided_says_why(case: Refusal) -> None:
    with pytest.raises(ValueError, match=case.message):
        case.call()
