"""Many nodes from few: how intervals grow with the nodes beyond those that were measured, and what logs of
two nodes say of more."""

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from perfkit.platform import collective_costs
from perfkit.platform.collective_costs import SIGMA_OF_NODES, SIGMA_TRANSFER, grow_with_nodes
from perfkit.platform.collective_fits import count_measured_nodes, grow_beyond, is_bound
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.sources import add_curves
from perfkit.prediction.strategies import price_strategies

#: A message that is nothing but transfer, and sizes of a log [B].
LARGE = np.array([64e9])
SIZES = 2.0 ** np.arange(10, 34, 2)
NODE = pk.load_platform("h100-sxm-8")


def find_spread(platform: pk.Platform, operation: str, ranks: int) -> float:
    with keep_quiet():
        return float(platform.price_collective(operation, LARGE, ranks).spread[0])


def write_log(seconds: np.ndarray, nodes: int, operation: str = "all_reduce") -> pl.DataFrame:
    return pl.DataFrame(
        {
            "operation": operation,
            "ranks": 8 * nodes,
            "nodes": nodes,
            "dtype": "fp32",
            "nbytes": SIZES,
            "seconds": seconds,
        }
    )


def test_growth_is_a_random_walk_over_doublings_of_nodes() -> None:
    assert grow_with_nodes(2) == grow_with_nodes(1) == grow_with_nodes(4, measured=8) == 0
    assert grow_with_nodes(32) == pytest.approx(2 * SIGMA_OF_NODES)  # four doublings of two
    assert grow_with_nodes(80, measured=10) == pytest.approx(math.sqrt(3) * SIGMA_OF_NODES)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all"])
def test_collectives_over_a_link_of_the_datasheet_grow_from_two_nodes_on(operation: str) -> None:
    for nodes in (2, 64):
        spread = find_spread(NODE.with_nodes(nodes), operation, 8 * nodes)
        expected = math.hypot(SIGMA_TRANSFER, SIGMA_OF_NODES * math.sqrt(math.log2(nodes / 2)))
        assert spread == pytest.approx(expected, rel=0.03), nodes


def test_collectives_grow_from_the_nodes_that_were_measured_on() -> None:
    """Rails of ten nodes: on 80 three doublings more, on 8 and 10 none."""
    measured = pk.load_platform("h100-sxm-8x8")
    assert count_measured_nodes(measured) == 10 and count_measured_nodes(NODE) is None
    assert grow_beyond(measured, 8) == 0
    fit = measured.collectives["all_gather.10.rail"].spread
    spread = find_spread(measured.with_nodes(80), "all_gather", 640)
    assert spread == pytest.approx(math.hypot(fit, math.sqrt(3) * SIGMA_OF_NODES), rel=0.02)
    assert spread < find_spread(NODE.with_nodes(80), "all_gather", 640)


def test_an_all_reduce_on_two_nodes_says_nothing_of_more() -> None:
    """NCCL may take trees there, whose bytes cross once."""
    two = add_curves(NODE, write_log(50e-6 + SIZES * 1.2e-11, 2), source="made", date="")
    cluster = two.with_nodes(16)
    fits = {key: fit for key, fit in cluster.collectives.items() if key != "all_reduce.16"}
    without = replace(cluster, collectives=fits)
    times = [
        platform.collective_time("all_reduce", SIZES, ranks=128) for platform in (cluster, without)
    ]
    np.testing.assert_allclose(*times)
    # the rail was measured: its bytes over 16 nodes are 15/16 of twice the message, over two half of it
    rail = cluster.collectives["all_reduce.2.rail"]["beta"] * (15 / 8) / 8
    assert times[0][-1] / SIZES[-1] > rail


def test_a_link_that_two_nodes_do_not_show_is_that_of_the_network() -> None:
    """Two nodes are faster than the stages of one: 64 take what the adapters give."""
    hidden = NODE.collective_time("all_reduce", SIZES, ranks=8)
    two = add_curves(NODE, write_log(1e-5 + hidden, 2), source="made", date="")
    assert is_bound(two.collectives["all_reduce.2.rail"])
    assert count_measured_nodes(two) == 2  # of the whole nodes
    assert two.network.links["inter"].bandwidth.value == 50e9
    times = [
        platform.with_nodes(64).collective_time("all_reduce", LARGE, ranks=512)[0]
        for platform in (two, NODE)
    ]
    assert times[0] == pytest.approx(times[1], rel=5e-3)


def test_a_log_of_two_nodes_that_shows_the_link_narrows_the_interval_of_many() -> None:
    """An all_gather goes around rings, which cross at the rate of the adapters."""
    gathered = add_curves(
        NODE, write_log(1e-4 + SIZES / 300e9, 2, "all_gather"), source="made", date=""
    )
    with_log = find_spread(gathered.with_nodes(64), "all_gather", 512)
    assert with_log < find_spread(NODE.with_nodes(64), "all_gather", 512)
    assert with_log == pytest.approx(math.sqrt(5) * SIGMA_OF_NODES, rel=0.05)


def test_an_all_to_all_on_more_nodes_sends_more_between_them() -> None:
    """Half of the bytes cross between two nodes, 63 of 64 parts between 64."""
    seconds = 1e-4 + SIZES / 80e9
    two = add_curves(NODE, write_log(seconds, 2, "all_to_all"), source="made", date="")
    few, many = (
        two.with_nodes(nodes).collective_time("all_to_all", LARGE, ranks=8 * nodes)[0]
        for nodes in (2, 64)
    )
    assert many / few == pytest.approx((63 / 64) / (1 / 2), rel=0.02)


def test_rings_over_two_nodes_give_the_link_to_all_collectives() -> None:
    """The times of a known link of 20 GB/s a rank, which an all_gather on two nodes goes around."""
    slow = NODE.with_link("inter", bandwidth=20e9, latency=5e-6).with_nodes(64)
    seconds = slow.with_nodes(2).collective_time("all_gather", SIZES, ranks=16)
    logged = add_curves(NODE, write_log(seconds, 2, "all_gather"), source="made", date="")
    link = logged.network.links["inter"].bandwidth
    assert link.kind == "fitted" and link.value == pytest.approx(20e9, rel=0.05)
    times = [
        platform.with_nodes(64).collective_time("all_reduce", LARGE, ranks=512)[0]
        for platform in (logged, slow)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.05)


def test_an_all_to_all_alone_gives_the_link_and_says_what_it_contradicts() -> None:
    """Half of the bytes cross between two nodes: 25.2 GB/s are 12.6 GB/s of each rank, not 50."""
    base = NODE.with_nodes(2, network="p5")
    log = write_log(1e-4 + SIZES / 25.2e9, 2, "all_to_all")
    with pytest.warns(UserWarning, match=r"shows 12\.6 GB/s .* 50 GB/s of EFA of AWS p5"):
        logged = add_curves(base, log, source="made", date="")
    assert logged.network.links["inter"].bandwidth.value == pytest.approx(12.6e9, rel=0.02)
    with keep_quiet():
        cluster, without = (platform.with_nodes(64) for platform in (logged, base))
        slow = cluster.price_collective("all_gather", LARGE, 512)
        fast = without.price_collective("all_gather", LARGE, 512)
    assert slow.time[0] / fast.time[0] > 2
    assert any("12.6 GB/s" in note and "50 GB/s" in note for note in slow.notes)
    assert not any("contradict" in note for note in fast.notes)


def test_a_pair_of_ranks_alone_shows_no_link() -> None:
    """On ten nodes of a healthy system a send_recv has 15 GB/s where rings have 40."""
    base = NODE.with_nodes(2, network="p5")
    log = write_log(1e-4 + SIZES / 15.1e9, 2, "send_recv")
    with pytest.warns(UserWarning, match=r"no log shows the link .* 15\.1 GB/s, the 50 GB/s"):
        logged = add_curves(base, log, source="made", date="")
    assert logged.network.links["inter"].bandwidth.value == 50e9


def test_the_interval_of_a_step_grows_with_its_exposed_messages(monkeypatch) -> None:
    model = pk.Transformer.preset("gpt2", batch=128, sequence=256, dtype="bf16")
    cluster = NODE.with_nodes(16)
    strategy = pk.Strategy(dp=128, zero=3)
    with keep_quiet():
        grown = pk.predict(model, cluster, strategy=strategy)
        priced = price_strategies(model, cluster, pk.Strategy.stack([strategy]))
        monkeypatch.setattr(collective_costs, "SIGMA_OF_NODES", 0.0)
        flat = pk.predict(model, cluster, strategy=strategy)
        priced_flat = price_strategies(model, cluster, pk.Strategy.stack([strategy]))
    assert grown.time == flat.time
    parts = grown.causes.sum_by_resource()
    share = (parts["communication"] + parts["imbalance"]) / grown.time
    assert share > 0.1
    added = share * SIGMA_OF_NODES * math.sqrt(3)
    assert grown.spread == pytest.approx(math.hypot(flat.spread, added), rel=1e-6)
    added = (priced["replicas"] / priced["time"])[0] * SIGMA_OF_NODES * math.sqrt(3)
    assert priced["spread"][0] == pytest.approx(math.hypot(priced_flat["spread"][0], added))


def test_nodes_without_a_link_say_how_to_name_one() -> None:
    log = write_log(1e-4 + SIZES / 15.1e9, 2, "broadcast")
    with pytest.warns(UserWarning, match=r"link between the 2 nodes, .* --base h100-sxm-8@p5"):
        logged = add_curves(NODE, log, source="made", date="")
    with pytest.raises(ValueError, match=r"nor a link between nodes; .* with_nodes\(2, network="):
        logged.collective("all_gather", 1e6, ranks=16)
