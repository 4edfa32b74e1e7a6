"""Decisions: what a resource is worth, how far ranks scale, what meets a condition; each against
doing it by hand."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest

import perfkit as pk
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.whatif import RESOURCES, list_resources

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
H100, ZEN = pk.load_platform("h100-sxm-8"), pk.load_platform("zen3-2")
GPT, WIDE = (
    pk.Transformer.gpt2(batch=64, dtype="bf16"),
    pk.DLRM(rows=[10**6] * 8, dim=64, batch=4096),
)
STEPS = {
    "a GPU": (GPT, "h100-sxm-8", 8),
    "its host": (pk.Transformer.bert(batch=8), "v100-sxm-8", 1),
    "a cluster": (pk.Transformer.gpt2("gpt2-xl", batch=256, dtype="bf16"), "h100-sxm-8x8", 64),
    "a datasheet": (GPT, "mi300x-8", 8),
    "cores": (WIDE, ZEN, 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_second_belongs_to_a_resource(name: str) -> None:
    """Where all rates double, the time halves: none is forgotten, constants of NCCL across nodes
    included."""
    work, where, ranks = STEPS[name]
    platform, r = pk.load_platform(where), pk.predict(work, where, ranks=ranks)
    rates = dict.fromkeys([each for each in list_resources(platform) if each != "cache"], 2.0)
    twice = pk.predict(work, platform.with_scale(**rates), ranks=ranks).time
    assert twice == pytest.approx(r.time / 2, rel=1e-9)
    elasticities = dict(r.sensitivity().table().select("resource", "elasticity").rows())
    together = sum(share for each, share in elasticities.items() if each != "cache")
    assert together == pytest.approx(-1, abs=0.01) and max(elasticities.values()) < 1e-6


def test_a_sensitivity_is_what_predicting_again_gives() -> None:
    for work, where, ranks, change, by_hand in (
        (GPT, H100, 8, {"intra": 1.01}, H100.with_link("intra", bandwidth=1.01 * 450e9)),
        (pk.Transformer.bert(batch=8), H100, 1, {"host": 1.01}, H100.with_host(1 / 1.01)),
    ):
        settings: dict[str, Any] = {
            "ranks": ranks,
            "slowdown": {0: 1.3},
            "loading": 1e-4,
            "execution": "compiled",
        }
        r, again = (pk.predict(work, at, **settings) for at in (where, by_hand))
        found = r.sensitivity().table().filter(resource=next(iter(change))).row(0, named=True)
        assert found["gain_s"] == pytest.approx(r.time - again.time, rel=1e-6)
        assert found["elasticity"] == pytest.approx(
            math.log(again.time / r.time) / math.log(1.01), rel=1e-6, abs=1e-9
        )
        assert pk.predict(work, where.with_scale(**change), **settings).time == pytest.approx(
            again.time, rel=1e-9
        )


def test_a_step_that_waits_for_its_host_says_host_and_the_chart_shows_both_sides() -> None:
    r = pk.predict(pk.Transformer.bert(batch=8, dtype="bf16"), "h100-sxm-8")
    found = r.sensitivity()
    # which stop one another now and then: formulas, table 4.3
    host, device = r.lower_bound, r.device_time
    share = 1 / (1 + (device / host) ** 4)
    assert r.bottleneck == "host-bound" and found.table().row(0)[:2] == (
        "host",
        pytest.approx(-share, rel=1e-3),
    )
    faster = smooth_maximum(device, host / 1.2, sharpness=4.0)
    assert found.table()["more_s"][0] == pytest.approx(faster) and "more host" in repr(found)
    bars = found.chart().to_dict()
    drawn = bars["datasets"][bars["layer"][0]["data"]["name"]]
    assert len(drawn) == 2 * len(found.table()) and {row["now_s"] for row in drawn} == {r.time}
    assert {row["side"] for row in drawn} == {"1/1.2 as much", "1.2 times as much"}, (
        "how much more is said"
    )
    assert bars["title"]["subtitle"] == found.summary and "h100-sxm-8" in found.summary
    assert "1.5 times as much" in r.sensitivity(0.5).chart().to_json()


def test_a_scale_widens_what_it_changes_and_nothing_else() -> None:
    assert (
        H100.with_scale(intra=2).kernels == H100.kernels
        and H100.with_scale(peak=2).collectives == H100.collectives
    )
    wide, same = H100.with_scale(memory=1.2), H100.with_scale(memory=1, host=1)
    assert (
        wide.kernels["gemm"].spread > H100.kernels["gemm"].spread
        and wide.kernels["gemm"].kind == "fitted"
    )
    assert pk.predict(GPT, same).time == pk.predict(GPT, H100).time and same.kernels == H100.kernels
    large = ZEN.with_scale(cache=2)
    assert large.context.caches["l3"] == 2 * ZEN.context.caches["l3"]
    assert large.context.caches["l3_share"] == ZEN.context.caches["l3_share"]
    for scales, message in (
        ({"inter": 2}, "resource is 'inter'; known are peak"),
        ({"peak": 0}, "peak is 0; it must"),
    ):
        with pytest.raises(ValueError, match=message):
            H100.with_scale(**scales)
    assert set(
        list_resources(
            pk.load_platform("h100-sxm-8x8").with_link("far", bandwidth=1e9, latency=0.01)
        )
    ) == set(RESOURCES)


SMALL = partial(pk.Transformer.gpt2, layers=2, dtype="bf16")


@pytest.mark.parametrize(
    ("work", "strong"), [(SMALL(batch=8), False), (partial(SMALL, batch=64), True)]
)
def test_scaling_is_what_predicting_each_gives(work: Any, strong: bool) -> None:
    counts = (2, 8, 16)
    scaled = pk.scaling(work, "h100-sxm-8x2", counts, strong=strong)
    runs = [
        pk.predict(SMALL(batch=64 if strong else 4 * n), "h100-sxm-8x2", ranks=n) for n in counts
    ]
    table, rates = scaled.table(), [r.throughput["samples"] for r in runs]
    assert (
        table["time"].to_list() == [r.time for r in runs]
        and table["samples_per_s"].to_list() == rates
    )
    assert table["efficiency"].to_list() == pytest.approx(
        [rates[i] * 2 / n / rates[0] for i, n in enumerate(counts)]
    )
    assert table["kept"].to_list()[1:] == pytest.approx(
        (table["efficiency"][1:] / table["efficiency"][:-1]).to_list()
    )
    assert table["exposed"].to_list() == [r.communication()["exposed_share"].max() for r in runs]
    # which other ranks cost
    assert table["grew"].to_list() == [None, "collective", "collective"] or strong
    assert scaled.chart(y="efficiency").to_dict()["layer"]
    composed = [text for text in scaled.warnings if "all_reduce on 16 ranks" in text]
    assert composed and all(text.startswith("16 ranks: ") for text in composed)


def test_an_embedding_model_scales_as_it_is_and_names_what_grew() -> None:
    found = pk.scaling(
        pk.DLRM(batch=4096, rows=[10**6] * 16, dim=64, embedding="fused"), "h100-sxm-8"
    ).table()
    assert found.select("ranks", "batch").rows() == [(1, 4096), (2, 8192), (4, 16384), (8, 32768)]
    assert found["kept"][1] == found["kept"].min() and found["grew"][1] == "collective"


BERT = partial(pk.Transformer.bert, "bert-large", layers=4, dtype="fp16")


def price(**changes: Any) -> pk.Prediction:
    """An iteration of 16 GPUs with some resources scaled."""
    return pk.predict(
        SMALL(batch=128), pk.load_platform("h100-sxm-8x2").with_scale(**changes), ranks=16
    )


def test_what_is_solved_for_is_what_trying_all_finds() -> None:
    batch, r = pk.solve_for("batch", BERT, "v100-sxm-8", ranks=2)
    fits = [pk.predict(BERT(batch=n), "v100-sxm-8", ranks=2).fits for n in (batch, batch + 2)]
    assert fits == [True, False] and r.fits and (r.workload.batch, r.ranks) == (batch, 2)  # type: ignore[union-attr]
    for strong in (False, True):
        rates = {
            n: pk.predict(
                SMALL(batch=48 if strong else 48 * n), "h100-sxm-8x2", ranks=n
            ).throughput["tokens"]
            for n in (1, 2, 3, 4, 6, 8, 16)
        }
        goal = rates[4] * 1.01
        found, r = pk.solve_for(
            "ranks",
            SMALL(batch=48),
            "h100-sxm-8x2",
            strong=strong,
            until=lambda r, goal=goal: r.throughput["tokens"] >= goal,
        )
        others = rates if strong else rates | dict.fromkeys((5, 7), math.inf)
        assert found == r.ranks == min(n for n in others if others[n] >= goal)
    ideal = price(inter=100).time
    factor, r = pk.solve_for(
        "inter", SMALL(batch=128), "h100-sxm-8x2", lambda r: r.time <= ideal / 0.9, ranks=16
    )
    assert price(inter=factor).time == r.time <= ideal / 0.9 < price(inter=factor / 1.01).time
    links = [
        p.network.links["inter"].bandwidth.value
        for p in (r.platform, pk.load_platform("h100-sxm-8x2"))
    ]
    assert links[0] == pytest.approx(factor * links[1])


@pytest.mark.parametrize("worth", [None, lambda r: r.throughput["samples"]])
def test_an_allocation_is_worth_the_most_of_all(worth: Any) -> None:
    jobs = {"a": SMALL(batch=24), "b": SMALL(batch=8), "c": pk.DLRM(batch=24)}
    found = pk.allocate(jobs, "h100-sxm-8", 8, worth)
    gains = []
    for job in jobs.values():
        runs = {
            n: pk.predict(job, "h100-sxm-8", ranks=n) for n in range(1, 9) if job.batch % n == 0
        }
        gains.append({n: worth(r) if worth else runs[1].time / r.time for n, r in runs.items()})
    every = [counts for counts in product(*gains) if sum(counts) <= 8]
    best = max(sum(gain[n] for gain, n in zip(gains, counts, strict=True)) for counts in every)
    assert found["worth"].sum() == pytest.approx(best) and found["ranks"].sum() <= 8
    assert found["job"].to_list() == [*jobs]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pk.solve_for("batch", SMALL(), "h100-sxm-8", lambda r: True),
            "every batch from 1 to 1048576 meets",
        ),
        (
            lambda: pk.solve_for("batch", SMALL(), "h100-sxm-8", lambda r: False),
            "no batch from 1 to 1048576 meets",
        ),
        (
            lambda: pk.solve_for("ranks", SMALL(), "h100-sxm-8", lambda r: False),
            "no ranks from 1 to 8 meets",
        ),
        (
            lambda: pk.solve_for("memory", SMALL(), "h100-sxm-8", lambda r: False),
            "no memory from 0.009",
        ),
        (
            lambda: pk.solve_for("memory", SMALL(), "h100-sxm-8", lambda r: True),
            "every memory from 0.009",
        ),
        (
            lambda: pk.solve_for("inter", SMALL(), "h100-sxm-8"),
            "unknown is 'inter'; known are batch, ranks, peak",
        ),
        (lambda: pk.solve_for("batch", 5, "h100-sxm-8"), "workload is 5; it has no batch"),
        (lambda: pk.scaling(SMALL(batch=8), "h100-sxm-8", []), r"ranks is \[\]; give at least one"),
        (lambda: pk.scaling(SMALL(batch=8), "h100-sxm-8", [3], strong=True), "batch is 8; "),
        (
            lambda: pk.allocate({"a": SMALL(), "b": SMALL()}, "h100-sxm-8", 1),
            "ranks is 1 for 2 jobs; give jobs",
        ),
        (
            lambda: pk.allocate({"a": SMALL()}, "h100-sxm-8", 16),
            "ranks is 16; it must be .* at most 8",
        ),
    ],
)
def test_what_cannot_be_decided_says_why(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
