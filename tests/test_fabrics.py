"""Networks of providers by name: their adapters, and platforms whose nodes they join."""

import pytest

import perfkit as pk
from perfkit.diagnosis.networks import list_networks
from perfkit.diagnosis.systems import find_system
from perfkit.ground.files import group_rows
from perfkit.platform.datasheets import list_datasheets, read_datasheet
from perfkit.platform.machine import PlatformError
from perfkit.platform.node_networks import find_fabric, list_fabrics

#: Rate of a node as providers state it [Gb/s], and its GPUs.
STATED = {
    "p4d": (400, 8),
    "p5": (3200, 8),
    "p5en": (3200, 8),
    "p6-b200": (3200, 8),
    "nd-a100-v4": (1600, 8),
    "nd-h100-v5": (3200, 8),
    "nd-gb200-v6": (1600, 4),
    "a3-high": (800, 8),
    "a3-mega": (1600, 8),
    "a3-ultra": (3200, 8),
    "a4": (3200, 8),
    "bm.gpu.a100-v2.8": (1600, 8),
    "bm.gpu.h100.8": (3200, 8),
    "dgx-h100": (3200, 8),
}


@pytest.mark.parametrize("name", STATED)
def test_a_rank_has_its_share_of_what_the_provider_states_for_a_node(name: str) -> None:
    rate, gpus = STATED[name]
    assert find_fabric(name).bandwidth.value == pytest.approx(rate / 8 * 1e9 / gpus)


def test_rates_are_bytes_and_kinds_stand_in_their_column() -> None:
    groups = group_rows("keys", "published", "node_networks.csv")
    for row in [row for rows in groups.values() for row in rows]:
        assert row["unit"] == "B/s", row["keys"]
        assert 1e9 < float(row["rate"]) < 2e11, "8 to 1,600 Gb/s an adapter"
        assert row["network"] in ("", "EFA"), "what logs of NCCL say; its kind is the transport"


def test_rows_of_networks_are_whole() -> None:
    names = [name for fabric in list_fabrics() for name in fabric.names]
    assert len(names) == len(set(names))
    for fabric in list_fabrics():
        assert set(fabric.systems) <= set(list_datasheets()), fabric.title
        assert "https://" in fabric.rate.source and fabric.rate.date, fabric.title
        assert not any(name != name.lower() or "@" in name for name in fabric.names)
    assert pk.fabrics()["names"].to_list()[0] == "p4d, p4de"


def test_a_platform_with_the_network_of_a_provider_is_the_same_by_name_and_by_method() -> None:
    by_name = pk.load_platform("h100-sxm-8x64@p5")
    assert by_name == pk.load_platform("h100-sxm-8").with_nodes(64, network="p5")
    assert by_name.name == "h100-sxm-8x64@p5" and by_name.network.ranks == 512
    assert by_name.network.links["inter"].name == "EFA of AWS p5"
    assert by_name.with_nodes(2).name == "h100-sxm-8x2@p5"
    assert by_name.with_nodes(3, ranks_per_node=4).name == "h100-sxm-4x3@p5"
    assert pk.Platform.from_toml(by_name.to_toml()) == by_name
    with pytest.raises(ValueError, match=r"with_nodes\(128\), --platform h100-sxm-8x128@p5"):
        by_name.collective("all_reduce", 1e6, ranks=1024)


def test_a_quarter_of_the_adapters_takes_four_times_as_long() -> None:
    """Large messages over 16 nodes: p4d has a quarter of the rate of an ND A100 v4."""
    slow, fast = (
        pk.load_platform("a100-sxm-8")
        .with_nodes(16, network=name)
        .collective_time("all_to_all", 8e9, ranks=128)
        for name in ("p4d", "nd-a100-v4")
    )
    assert slow / fast == pytest.approx(4, rel=0.01)


def test_measured_collectives_between_nodes_follow_a_named_network() -> None:
    measured = pk.load_platform("h100-sxm-8x8")
    joined = measured.with_nodes(8, network="a3-high")
    was, now = measured.network.links["inter"], joined.network.links["inter"]
    assert joined.name == "h100-sxm-8x8@a3-high" and now.latency == was.latency
    ratio = was.bandwidth.value / now.bandwidth.value
    fits = [platform.collectives["all_gather.10.rail"] for platform in (measured, joined)]
    assert fits[1]["beta"] / fits[0]["beta"] == pytest.approx(ratio)
    assert fits[1].spread > fits[0].spread


def test_unknown_networks_and_those_of_other_devices_are_named() -> None:
    node = pk.load_platform("h100-sxm-8")
    with pytest.raises(
        ValueError, match=r"network is 'nd-h100'; did you mean 'nd-h100-v5'\? known are p4d, p4de"
    ):
        node.with_nodes(2, network="nd-h100")
    with pytest.raises(
        PlatformError, match=r"platform is 'h100-sxm-8x2@efa': network is 'efa'; .*known"
    ):
        pk.load_platform("h100-sxm-8x2@efa")
    with pytest.warns(
        UserWarning, match=r"network is 'p4d', AWS p4d and p4de, whose nodes have a100"
    ):
        node.with_nodes(2, network="p4d")


def test_a_network_with_the_adapters_of_the_datasheet_is_no_candidate_of_a_diagnosis() -> None:
    """Azure's ND H100 v5 has what the datasheet says; AWS's p5 has another latency."""
    system = find_system(["NVIDIA H100 80GB HBM3"], 16, 2, 8, None)
    names = [network.name for network in list_networks(system, read_datasheet("h100-sxm"), 8)]
    assert names == [
        "8 adapters of 400 Gb/s",
        "32 adapters of 100 Gb/s (AWS p5)",
        "8 adapters of 200 Gb/s (Google a3-megagpu-8g)",
        "4 adapters of 200 Gb/s (Google a3-highgpu-8g)",
        "4 adapters of 100 Gb/s (Google a3-edgegpu-8g)",
    ]


@pytest.mark.parametrize("name", ["azure", "Microsoft", "InfiniBand HDR"])
def test_a_network_is_proposed_by_its_provider_or_kind(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"network is '{name}'; did you mean .*nd-a100-v4"
    ) as error:
        find_fabric(name)
    assert "p5" not in str(error.value).partition("known are")[0]
