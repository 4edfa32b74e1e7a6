"""Layers with and without experts in turn, on one stage whose weights are in shards: `explore` beside the
event loop."""

import numpy as np
import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction import strategies as closed_forms
from perfkit.prediction.strategies import price_strategies
from perfkit.prediction.strategy_case import Case
from perfkit.prediction.strategy_turns import count_neighbours


def test_layers_are_counted_by_their_neighbours() -> None:
    """Each layer computes once, is gathered once and is reduced once."""
    kinds = "DDEDDE"
    counts = count_neighbours(kinds)
    assert counts == {("D", "E", "D"): 2, ("D", "D", "E"): 2, ("E", "D", "D"): 2}
    for place in range(3):
        seen = "".join(neighbours[place] * count for neighbours, count in counts.items())
        assert sorted(seen) == sorted(kinds)


@pytest.mark.parametrize(
    ("bandwidth", "checkpoint", "strategy"),
    [
        (5e9, "none", {"dp": 8, "cp": 4, "ep": 4, "micro_batch": 4}),
        (10e9, "none", {"dp": 8, "cp": 4, "ep": 8, "micro_batch": 8}),
        (5e9, "full", {"dp": 8, "cp": 4, "ep": 4, "micro_batch": 4}),
        (5e9, "none", {"dp": 8, "cp": 2, "ep": 4, "micro_batch": 4}),
        (10e9, "none", {"dp": 8, "cp": 4, "ep": 4, "micro_batch": 4}),
        (10e9, "full", {"tp": 2, "dp": 8, "cp": 2, "ep": 4, "micro_batch": 8}),
    ],
)
def test_unlike_layers_on_one_stage_take_as_long_as_in_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float, checkpoint: str, strategy: dict[str, int]
) -> None:
    """A large unit of weights is gathered beside a small layer: that of a mean layer would be hidden."""
    asked = pk.Strategy(zero=3, checkpoint=checkpoint, **strategy)
    model = pk.Transformer.preset(
        "gpt3-1.3b",
        layers=8,
        hidden=1024,
        heads=16,
        vocabulary=32_000,
        sequence=2048,
        positions=2048,
        dtype="bf16",
        mixed=True,
        experts=8,
        top_k=2,
        expert_interval=2,
        batch=2 * asked.dp * asked.micro_batch,
    )
    nodes = int(asked.ranks) // 8
    platform = pk.load_platform(f"h100-sxm-8x{nodes}")
    platform = platform.with_link("inter", bandwidth=bandwidth, latency=1e-5)

    def explore() -> float:
        priced = price_strategies(model, platform, pk.Strategy.stack([asked]), near=np.inf)
        return float(priced["time"][0])

    def find_none(case: Case) -> np.ndarray:
        return np.zeros(case.count, dtype=bool)

    with keep_quiet():
        predicted = pk.predict(model, platform, strategy=asked).time
        explored = explore()
        monkeypatch.setattr(closed_forms, "find_turns", find_none)
        of_mean_layer = explore()
    assert explored == pytest.approx(predicted, rel=0.05)
    assert of_mean_layer < 0.95 * predicted


def test_a_search_takes_layers_in_turn() -> None:
    """Strategies are checked against the whole model: layers without experts alone would be refused where
    ranks share experts."""
    model = pk.Transformer.preset(
        "gpt3-1.3b",
        layers=8,
        vocabulary=32_000,
        dtype="bf16",
        experts=8,
        top_k=2,
        expert_interval=2,
        batch=64,
    )
    asked = pk.Strategy(dp=8, ep=4, zero=3)
    [row] = pk.explore(model, "h100-sxm-8", strategies=[asked]).table().iter_rows(named=True)
    with keep_quiet():
        predicted = pk.predict(model, "h100-sxm-8", strategy=asked).time
    assert row["time_s"] == pytest.approx(predicted, rel=0.05)
    searched = pk.explore(model, "h100-sxm-8", ranks=8).table()
    assert set(searched["ep"]) == {1, 2, 4, 8}
    with pytest.raises(
        ValueError, match="cannot share experts of the model, 8; ep, 16, must divide"
    ):
        pk.explore(model, "h100-sxm-8x2", strategies=[pk.Strategy(dp=16, ep=16, zero=3)])
