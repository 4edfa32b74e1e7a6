"""Decisions: what a resource is worth, how far ranks scale, what meets a condition; each against doing it by hand."""

import math
from typing import Any

import pytest

import perfkit as pk
from perfkit.platform.resources import RESOURCES, list_resources

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
H100, ZEN = pk.load_platform("h100-sxm-8"), pk.load_platform("zen3-2")
GPT, WIDE = pk.Transformer.gpt2(batch=64, dtype="bf16"), pk.DLRM(rows=[10**6] * 8, dim=64, batch=4096)
STEPS = {
    "a GPU": (GPT, "h100-sxm-8", 8), "its host": (pk.Transformer.bert(batch=8), "v100-sxm-8", 1),
    "a cluster": (pk.Transformer.gpt2("gpt2-xl", batch=256, dtype="bf16"), "h100-sxm-8x8", 64),
    "a datasheet": (GPT, "mi300x-8", 8), "cores": (WIDE, ZEN, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_every_second_belongs_to_a_resource(name: str) -> None:
    """Where all rates double, the time halves: none is forgotten; across nodes some constants of NCCL stay."""
    work, where, ranks = STEPS[name]
    platform, r = pk.load_platform(where), pk.predict(work, where, ranks=ranks)
    rates = dict.fromkeys([each for each in list_resources(platform) if each != "cache"], 2.0)
    twice = pk.predict(work, platform.with_scale(**rates), ranks=ranks).time
    assert twice == pytest.approx(r.time / 2, rel=1e-9 if ranks < 64 else 0.1)
    elasticities = dict(r.sensitivity().table().select("resource", "elasticity").rows())
    together = sum(share for each, share in elasticities.items() if each != "cache")
    assert together == pytest.approx(-1, abs=0.01 if ranks < 64 else 0.15) and max(elasticities.values()) < 1e-6


def test_a_sensitivity_is_what_predicting_again_gives() -> None:
    for work, where, ranks, change, by_hand in (
        (GPT, H100, 8, {"intra": 1.01}, H100.with_link("intra", bandwidth=1.01 * 450e9)),
        (pk.Transformer.bert(batch=8), H100, 1, {"host": 1.01}, H100.with_host(1 / 1.01)),
    ):
        settings: dict[str, Any] = {"ranks": ranks, "slowdown": {0: 1.3}, "loading": 1e-4, "execution": "compiled"}
        r, again = (pk.predict(work, at, **settings) for at in (where, by_hand))
        found = r.sensitivity().table().filter(resource=next(iter(change))).row(0, named=True)
        assert found["gain_s"] == pytest.approx(r.time - again.time, rel=1e-6)
        assert found["elasticity"] == pytest.approx(math.log(again.time / r.time) / math.log(1.01), rel=1e-6, abs=1e-9)
        assert pk.predict(work, where.with_scale(**change), **settings).time == pytest.approx(again.time, rel=1e-9)


def test_a_step_that_waits_for_its_host_says_host_and_the_chart_shows_both_sides() -> None:
    r = pk.predict(pk.Transformer.bert(batch=8, dtype="bf16"), "h100-sxm-8")
    found = r.sensitivity()
    assert r.bottleneck == "host-bound" and found.table().row(0)[:2] == ("host", pytest.approx(-1))
    assert found.table()["more_s"][0] == pytest.approx(r.time / 1.2) and "more host" in repr(found)
    bars = found.chart().to_dict()
    drawn = bars["datasets"][bars["layer"][0]["data"]["name"]]
    assert len(drawn) == 2 * len(found.table()) and {row["now_s"] for row in drawn} == {r.time}


def test_a_scale_widens_what_it_changes_and_nothing_else() -> None:
    assert H100.with_scale(intra=2).kernels == H100.kernels and H100.with_scale(peak=2).collectives == H100.collectives
    wide, same = H100.with_scale(memory=1.2), H100.with_scale(memory=1, host=1)
    assert wide.kernels["gemm"].spread > H100.kernels["gemm"].spread and wide.kernels["gemm"].kind == "fitted"
    assert pk.predict(GPT, same).time == pk.predict(GPT, H100).time and same.kernels == H100.kernels
    large = ZEN.with_scale(cache=2)
    assert large.context.caches["l3"] == 2 * ZEN.context.caches["l3"]
    assert large.context.caches["l3_share"] == ZEN.context.caches["l3_share"]
    for scales, message in (({"inter": 2}, "resource is 'inter'; known are peak"), ({"peak": 0}, "peak is 0; it must")):
        with pytest.raises(ValueError, match=message):
            H100.with_scale(**scales)
    assert set(list_resources(pk.load_platform("h100-sxm-8x8"))) == set(RESOURCES)
