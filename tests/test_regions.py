"""Regions that a slow link connects: their collectives, stages in several of them, and published
pipelines."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks import regions
from perfkit.models.collectives import ring_collective
from perfkit.platform.gallery import load_platform
from perfkit.platform.machine import PlatformError
from perfkit.platform.platform import Platform
from perfkit.prediction.contrast import compare
from perfkit.prediction.predictor import predict
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
GPT = Transformer.preset("gpt3-1.3b", batch=64, sequence=1024, dtype="bf16", fused=True)


def test_collectives_pay_the_far_link_for_the_share_of_a_rank() -> None:
    near = load_platform("a100-sxm-8x4")
    far = near.with_link("far", bandwidth=1e9, latency=1e-2).with_nodes(4, regions=2)
    for operation, share in (
        ("all_reduce", 16),
        ("all_gather", 16),
        ("reduce_scatter", 16),
        ("all_to_all", 1),
    ):
        inside = near.collective_time(operation, 1e9, ranks=16)
        assert far.collective_time(operation, 1e9, ranks=16) == inside
        between = ring_collective(
            1e9 / share, operation=operation, ranks=2, alpha_hop=1e-2, beta_link=1e-9
        )
        assert far.collective_time(operation, 1e9, ranks=32) == pytest.approx(inside + between)
    assert far.collective("all_reduce", 1e9, ranks=32).terms["between regions"] > 0.08
    with pytest.raises(
        ValueError, match="regions is 3; it must divide nodes, 4; change one of them"
    ):
        near.with_nodes(4, regions=3)
    with pytest.raises(
        ValueError, match="has 2 regions and no link 'far' between them; add it, such as"
    ):
        near.with_nodes(4, regions=2).collective_time("all_reduce", 1e9, ranks=32)


def test_platforms_show_and_keep_the_far_link(tmp_path: Path) -> None:
    near = load_platform("a100-sxm-8x4")
    far = near.with_link("far", bandwidth=1e9, latency=1e-2).with_nodes(4, regions=2)
    far.save(tmp_path / "far.toml")
    read = load_platform(tmp_path / "far.toml")
    assert (
        read == far
        and read.network.regions == 2
        and read.network.links["far"].bandwidth.value == 1e9
    )
    assert (
        "32 ranks in 2 regions of" in repr(read)
        and "regions" not in near.to_toml()
        and "regions" not in repr(near)
    )
    shown = read.numbers().filter(pl.col("name").str.starts_with("far "))
    assert shown["value"].to_list() == [1e9, 1e-2]
    assert "far link bandwidth" in compare(near, far).table()["quantity"].to_list()
    assert "far link bandwidth" not in compare(near, near).table()["quantity"].to_list()
    assert far.with_scale(far=2.0).network.links["far"].bandwidth.value == 2e9
    assert far.with_datasheet("h100-sxm").network.links["far"] == far.network.links["far"]
    assert (
        far.with_nodes(8).network.regions == 2 and far.with_nodes(8, regions=1).network.regions == 1
    )
    assert far.with_nodes(8).name.endswith("10 ms, 8 nodes in 2 regions")
    with pytest.raises(PlatformError, match="regions is 3; it must divide 4 nodes"):
        Platform.from_toml(far.to_toml().replace("regions = 2", "regions = 3"))
    found = predict(GPT, far, strategy=Strategy(dp=32)).sensitivity()
    rows = {row["resource"]: row for row in found.table().iter_rows(named=True)}
    assert "far" in rows


@pytest.mark.parametrize("bandwidth", [5e9, 1e9])
def test_the_event_loop_agrees_where_stages_or_replicas_are_in_two_regions(
    bandwidth: float,
) -> None:
    near = load_platform("a100-sxm-8x4")
    far = near.with_link("far", bandwidth=bandwidth, latency=1e-3).with_nodes(4, regions=2)
    ways = [
        Strategy(pp=4, dp=8),
        Strategy(tp=4, pp=4, dp=2),
        Strategy(pp=2, dp=16, schedule="zero_bubble"),
        Strategy(pp=8, dp=4, schedule="gpipe"),
        Strategy(pp=4, dp=8, schedule="interleaved", chunks=3),
        Strategy(dp=32),
        Strategy(dp=32, zero=3),
    ]
    found, plain = (price_strategies(GPT, own, Strategy.stack(ways))["time"] for own in (far, near))
    events = [predict(GPT, far, strategy=way).time for way in ways]
    assert (found > plain).all()
    assert np.abs(np.array(events) / found - 1).max() < 0.1, [events, found]


def test_published_pipelines_over_slow_links() -> None:
    """The speed of the GPUs is that of the first row; with replicas the first stage lacks its
    embeddings."""
    first, *rows = regions.compare_rows()
    errors = np.array([row["error"] for row in rows])
    assert len(rows) == 19 and abs(first["error"]) < 0.03
    assert np.abs(errors[:4]).max() < 0.12 and np.abs(errors).mean() < 0.2
    assert regions.main([]) == 0
