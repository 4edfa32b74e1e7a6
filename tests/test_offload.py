"""Offload to the memory of the host: facts, times by hand, memory, and both roads to a prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.offload import FROM_HOST, HOST_UPDATE, TO_HOST, UPDATE_SHARE, host_update_bytes
from perfkit.platform.gallery import load_platform
from perfkit.platform.host_memory import find_host_cost, find_host_memory, find_host_share
from perfkit.platform.platform import Platform

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")


def make_model(batch: int, name: str = "gpt3-1.3b", **settings: Any) -> pk.Transformer:
    """A GPT of mixed precision."""
    chosen = {"sequence": 1024, "dtype": "bf16", "mixed": True, "fused": True, **settings}
    return pk.Transformer.preset(name, batch=batch, **chosen)


def count_weights(model: pk.Transformer) -> int:
    """Trained numbers of a model."""
    return model.graphs(1, accelerator=True)[0].parameters


def test_an_update_of_the_host_takes_as_long_as_was_published() -> None:
    """Table 4 of arXiv:2101.06840: 1, 4 and 10 billion weights on a DGX-2, of 256 GB/s."""
    measured = np.array([0.22, 1.03, 2.57])
    nbytes = host_update_bytes(np.array([1e9, 4e9, 10e9]), states=2)
    shares = nbytes / measured / 256e9
    assert pytest.approx(np.exp(np.log(shares).mean()), abs=0.005) == UPDATE_SHARE
    assert host_update_bytes(1.0, states=2) == 30  # p, g, m, v read; p, m, v and 2 B written
    assert host_update_bytes(1.0, states=2, wide=4, narrow=4) == 28


def test_the_host_of_a_device_is_known_and_shared_by_its_ranks() -> None:
    h100 = load_platform("h100-sxm-8")
    memory = find_host_memory(h100)
    assert memory.name == "DGX H100"
    assert find_host_share(h100, 8) == memory.capacity.value / 8
    assert find_host_share(h100, 2) == memory.capacity.value / 2
    assert find_host_share(h100.with_nodes(4), 32) == memory.capacity.value / 8
    assert find_host_memory(load_platform("gb200-4")).to_host.value > memory.to_host.value


def test_a_platform_without_a_host_is_refused_until_it_is_stated(tmp_path: Path) -> None:
    l40s = load_platform("l40s-8")
    offloaded = pk.Strategy(dp=8, zero=2, offload="optimizer")
    with pytest.raises(ValueError, match=r"does not know the memory of its host.*with_host_memory"):
        pk.predict(make_model(8), l40s, strategy=offloaded)
    with pytest.raises(ValueError, match="give capacity"):
        l40s.with_host_memory(link=20e9)
    with pytest.raises(ValueError, match="at least one"):
        l40s.with_host_memory()
    with pytest.raises(ValueError, match="sharers"):
        l40s.with_host_memory(capacity=1e12, bandwidth=4e11, sharers=0)
    stated = l40s.with_host_memory(capacity=1e12, bandwidth=400e9, sharers=2)
    assert stated.host_memory is not None
    assert stated.host_memory.to_host.value == pytest.approx(0.785 * 32e9)
    assert Platform.load(stated.save(tmp_path / "stated.toml")) == stated
    assert pk.predict(make_model(8), stated, strategy=offloaded).time > 0
    faster = stated.with_host_memory(link=50e9)
    assert find_host_cost(faster, TO_HOST).time(np.array([50e9]))[0] == 1.0
    assert faster.host_memory is not None
    assert faster.host_memory.sharers == 2  # the rest stays


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="zero is 0"):
        pk.Strategy(offload="optimizer")
    with pytest.raises(ValueError, match=r"offload is 'disk'"):
        pk.Strategy(zero=1, offload="disk")
    with pytest.raises(ValueError, match="offload_fraction"):
        pk.Strategy(zero=1, offload="optimizer", offload_fraction=0.0)
    with pytest.raises(ValueError, match="offload_fraction is below 1 without"):
        pk.Strategy(zero=1, offload_fraction=0.5)
    sgd = make_model(8, optimizer="sgd")
    with pytest.raises(ValueError, match=r"optimizer is 'sgd'.*adam"):
        pk.predict(sgd, "h100-sxm-8", strategy=pk.Strategy(dp=8, zero=1, offload="optimizer"))


def test_copies_and_the_update_take_the_time_of_their_bytes() -> None:
    """One GPU, one micro-batch: each gradient is copied once in 2 B, each weight comes back in 2 B,
    and the host moves 30 B, beside which weights come back."""
    model = make_model(4)
    strategy = pk.Strategy(zero=2, micro_batch=4, offload="optimizer")
    prediction = pk.predict(model, "h100-sxm-8", strategy=strategy)
    [timeline] = prediction._timeline.rank_timelines
    durations: dict[str, float] = {}
    for position, duration in zip(
        timeline.graph.collectives.tolist(), timeline.times.durations.tolist(), strict=True
    ):
        name = timeline.graph.labels[position].name
        durations[name] = durations.get(name, 0.0) + duration
    weights = count_weights(model)
    memory = find_host_memory(load_platform("h100-sxm-8"))
    assert durations[TO_HOST] == pytest.approx(2 * weights / memory.to_host.value, rel=5e-3)
    assert durations[FROM_HOST] == pytest.approx(2 * weights / memory.from_host.value, rel=5e-3)
    update = 30 * weights / (UPDATE_SHARE * memory.bandwidth.value)
    assert durations[HOST_UPDATE] == pytest.approx(update, rel=5e-3)
    # copies are hidden by the backward pass but for the end; the update is not hidden
    found = pk.explore(model, "h100-sxm-8", strategies=[strategy]).frame.row(0, named=True)
    assert found["update"] == pytest.approx(update, rel=5e-3)
    assert found["replicas"] < 0.2 * durations[TO_HOST]


def test_ranks_of_a_node_share_links_and_the_host() -> None:
    """Of 8 ranks of a DGX A100 two share a switch and all share the host, so that shards of an eighth
    take as long as all of it, and the copies a quarter."""
    platform = load_platform("a100-sxm-8")
    alone = pk.explore(
        make_model(1), platform, strategies=[pk.Strategy(zero=2, offload="optimizer")]
    )
    shared = pk.explore(
        make_model(8), platform, strategies=[pk.Strategy(dp=8, zero=2, offload="optimizer")]
    )
    assert shared.frame["update"][0] == pytest.approx(alone.frame["update"][0], rel=1e-6)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_share_of_the_optimizer_leaves_the_device(fraction: float) -> None:
    """With ZeRO stage 2 on one rank: fp32 weights, states and reduced gradients, 16 B a number."""
    model = make_model(2)
    strategy = pk.Strategy(zero=2, micro_batch=2, offload="optimizer", offload_fraction=fraction)
    base = replace(strategy, offload_fraction=1e-9)
    there = pk.predict(model, "h100-sxm-8", strategy=strategy).memory()
    here = pk.predict(model, "h100-sxm-8", strategy=base).memory()
    assert here.total - there.total == pytest.approx(16 * fraction * count_weights(model), rel=0.01)
    assert there.on_host == pytest.approx(16 * fraction * count_weights(model), rel=0.01)
    assert there.host_capacity == 2e12


def test_megatron_keeps_masters_and_buffers_on_the_device() -> None:
    """The two states of 4 B leave alone, as Megatron-Bridge measured on Qwen3-30B-A3B: 15.3 GB of
    30.5 billion weights on 16 ranks."""
    assert pytest.approx(15.3, abs=0.1) == 8 * 30.5 / 16
    model = make_model(16)
    strategy = pk.Strategy(tp=2, dp=4, zero=1, offload="optimizer")
    there = pk.predict(model, "h100-sxm-8", strategy=strategy, stack="megatron").memory()
    base = replace(strategy, offload="none")
    here = pk.predict(model, "h100-sxm-8", strategy=base, stack="megatron").memory()
    assert here.total - there.total == pytest.approx(8 * count_weights(model) / 8, rel=0.02)


def test_what_the_host_cannot_hold_does_not_fit() -> None:
    small = load_platform("h100-sxm-8").with_host_memory(capacity=1e10)
    strategy = pk.Strategy(zero=2, micro_batch=4, offload="optimizer")
    prediction = pk.predict(make_model(4), small, strategy=strategy)
    assert prediction.memory().fits is False
    assert any("on the host: does not fit" in warning for warning in prediction.warnings)
    with pytest.raises(ValueError, match="fits the memory of its host"):
        pk.explore(make_model(4), small, strategies=[strategy])
    both = pk.explore(make_model(4), small, strategies=[strategy, pk.Strategy(micro_batch=4)])
    assert both.best.offload == "none"
    assert "more memory of its host" in both.left_out[0]


def test_a_usual_host_is_an_assumption_and_a_stated_one_is_not() -> None:
    strategy = pk.Strategy(zero=1, micro_batch=4, offload="optimizer")
    usual = load_platform("h100-sxm-8")
    stated = usual.with_host_memory(capacity=2e12)

    def warn(platform: Platform) -> bool:
        warnings = pk.predict(make_model(4), platform, strategy=strategy).warnings
        return any("DGX H100" in warning for warning in warnings)

    assert warn(usual)
    assert not warn(stated)


def test_an_update_of_the_host_widens_the_interval() -> None:
    model, strategy = make_model(4), pk.Strategy(zero=1, micro_batch=4)
    offloaded = replace(strategy, offload="optimizer")
    for road in ("predict", "explore"):
        spreads = []
        for one in (strategy, offloaded):
            if road == "predict":
                spreads.append(pk.predict(model, "h100-sxm-8", strategy=one).spread)
            else:
                spreads.append(pk.explore(model, "h100-sxm-8", strategies=[one]).frame["spread"][0])
        assert spreads[1] > spreads[0], road


def draw(rng: np.random.Generator) -> tuple[str, pk.Transformer, pk.Strategy, str]:
    """A platform, a model, a strategy that offloads, and how it is executed."""
    while True:
        tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
        dp, accumulated = rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8])
        if tp * pp * dp > 8:
            continue
        micro_batch = int(rng.choice([1, 2, 4, 8]))
        strategy = pk.Strategy(
            tp=int(tp),
            pp=int(pp),
            dp=int(dp),
            micro_batch=micro_batch,
            zero=int(rng.choice([1, 2])),
            schedule=str(rng.choice(["1f1b", "gpipe"])),
            checkpoint=str(rng.choice(["none", "full"])),
            sequence_parallel=bool(tp > 1 and rng.random() < 0.5),
            offload="optimizer",
            offload_fraction=float(rng.choice([0.25, 0.5, 1.0, 1.0])),
        )
        platform = str(rng.choice(["h100-sxm-8", "a100-sxm-8", "gb200-4"]))
        if platform == "gb200-4" and tp * pp * dp > 4:
            continue
        model = make_model(
            int(dp * micro_batch * accumulated), sequence=int(rng.choice([512, 2048]))
        )
        return platform, model, strategy, str(rng.choice(["eager", "compiled", "graphs"]))


def test_both_roads_agree_on_drawn_strategies() -> None:
    rng = np.random.default_rng(20261128)
    apart = []
    for _ in range(12):
        platform, model, strategy, execution = draw(rng)
        event_loop = pk.predict(model, platform, strategy=strategy, execution=execution)
        closed = pk.explore(
            model, platform, strategies=[strategy], execution=execution, memory=1e15
        )
        apart.append(abs(closed.frame["time"][0] / event_loop.time - 1.0))
        memory = event_loop.memory()
        assert closed.frame["needs"][0] == pytest.approx(memory.total, rel=1e-9)
        assert closed.frame["on_host"][0] == pytest.approx(memory.on_host, rel=1e-9)
    assert max(apart) < 0.03
    assert np.mean(apart) < 0.01
