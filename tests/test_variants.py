"""What if: variants say what they were, obey the change, are less sure than what they come from,
and survive a file."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import CollectiveModel, KernelModel, OverRanks, Pipelined, TwoBranch
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import Link, Quantity
from perfkit.platform.datasheets import read_datasheet
from perfkit.platform.estimates import ExtrapolationWarning
from perfkit.platform.gallery import load_platform, platforms
from perfkit.platform.platform import Platform

BRANCHES = {"alpha1": 8e-6, "beta1": 2e-11, "alpha2": 3e-5, "beta2": 4e-12, "sharpness": 0.8}
LAW = {"alpha0": 7e-6, "alpha1": 1e-6, "beta0": 1.5e-12, "beta1": 6e-12, "sharpness": 0.6}
CURVES = {
    "all_reduce.8": (Pipelined, {"alpha": 2e-5, "beta": 4e-12, "sharpness": 0.6}),
    "all_gather.8": (TwoBranch, BRANCHES),
    "reduce_scatter.8": (TwoBranch, BRANCHES),
    "all_to_all.any": (OverRanks, LAW),
    "all_reduce.4.rail": (Pipelined, {"alpha": 4e-5, "beta": 4e-11, "sharpness": 0.6}),
}


def fit(model: type[CollectiveModel], parameters: dict[str, float]) -> CollectiveModel:
    errors = {name: 0.05 * value for name, value in parameters.items() if name != "sharpness"}
    return model.build(
        parameters, stderr=errors, spread=0.1, n=20, source="a test", date="2026-01-01"
    )


def link(bandwidth: float, latency: float) -> Link:
    about = ("datasheet", "a test")
    return Link(Quantity(bandwidth, "B/s", *about), Quantity(latency, "s", *about))


LINKS = {"intra": link(450e9, 1e-6), "inter": link(50e9, 5e-6)}
H100 = load_platform("h100-sxm-8")
A100 = load_platform("a100-sxm-8")
ZEN = load_platform("zen5-2")
NODE = replace(
    H100,
    network=replace(H100.network, links=LINKS),
    collectives={key: fit(*curve) for key, curve in CURVES.items()},
)
NODES = NODE.with_nodes(4)
#: Without a link between nodes, and on a device without a datasheet.
ALONE = replace(
    NODE,
    network=replace(NODE.network, links={"intra": LINKS["intra"]}),
    collectives={"all_reduce.8": fit(*CURVES["all_reduce.8"])},
)
UNKNOWN = replace(ALONE, device=replace(ALONE.device, name="NVIDIA H300"))
SHEET = read_datasheet("a100-sxm")


def test_variants_survive_a_file() -> None:
    variants = [
        NODES,
        ALONE.with_nodes(2),
        NODE.with_datasheet("b200-sxm"),
        NODE.with_link("inter", bandwidth=25e9),
        ZEN.with_host(0),
    ]
    for variant in variants:
        assert Platform.from_toml(variant.to_toml()) == variant


def test_nodes_come_and_go() -> None:
    assert NODES.name == "h100-sxm-8x4"
    assert NODES.network.ranks == 32
    assert NODES.network.nodes == 4
    assert NODES.provenance["derived_from"] == "h100-sxm-8"
    assert NODES.provenance["changes"].endswith("4 nodes instead of 1")
    assert NODES.kernels == NODE.kernels
    assert NODES.collectives == NODE.collectives
    assert NODES.with_nodes(16).name == "h100-sxm-8x16"
    assert NODES.with_nodes(1).name == "h100-sxm-8"
    mine = replace(NODE, name="mine, 3 nodes", network=replace(NODE.network, nodes=3))
    assert mine.with_nodes(2).name == "mine, 2 nodes"
    with pytest.warns(ExtrapolationWarning):
        assert NODES.collective("all_reduce", 1e9, ranks=16).time > 0


def test_a_story_tells_only_what_changed() -> None:
    assert NODE.with_nodes(1) == NODE
    assert NODES.with_nodes(4, ranks_per_node=8).provenance == NODES.provenance
    halves = NODES.with_nodes(4, ranks_per_node=4)
    assert halves.network.ranks == 16
    assert halves.provenance["changes"] == "4 nodes instead of 1; 4 ranks a node"
    assert halves.with_nodes(2).provenance["changes"].endswith("; 2 nodes instead of 4")


def test_nodes_without_a_known_link_take_the_adapters_of_the_datasheet() -> None:
    two = ALONE.with_nodes(2)
    inter = two.network.links["inter"]
    assert inter.bandwidth == read_datasheet("h100-sxm").links["NIC"]
    assert inter.latency.kind == "assumed"
    assert "network adapters of the datasheet" in two.provenance["changes"]
    cluster = load_platform("h100-sxm-8x8").network.links["inter"].latency
    assert inter.latency == cluster, "no small message was measured on it either"
    assert "inter" not in ALONE.with_nodes(1).network.links
    rail = NODE.collectives["all_reduce.4.rail"]
    rails = replace(UNKNOWN, collectives={"all_reduce.4.rail": rail})
    assert rails.with_nodes(4).network.nodes == 4
    assert ALONE.with_link("inter", bandwidth=25e9, latency=1e-5).with_nodes(2).network.ranks == 16


@pytest.mark.parametrize(
    ("other", "inside", "between"),
    [
        (A100, 1.5, 1.0),
        (SHEET, 1.5, 2.0),
        (SHEET.device, 1.0, 1.0),
        ("a100-sxm", 1.5, 2.0),
        ("a100-sxm-8", 1.5, 1.0),
    ],
    ids=["platform", "datasheet", "device", "name of a datasheet", "name of a platform"],
)
def test_a_datasheet_is_swapped_whatever_names_it(
    other: object, inside: float, between: float
) -> None:
    new = NODE.with_datasheet(other)  # type: ignore[arg-type]
    assert new.device.peaks["bf16"].value == 312e12
    assert new.device.main_bandwidth == 2.039e12
    assert new.network.ranks == NODE.network.ranks
    assert new.host == NODE.host
    assert new.network.links["intra"].bandwidth.value == 450e9 / inside
    for key, old in NODE.collectives.items():
        link_factor = between if key.endswith("rail") else inside
        for name, value in new.collectives[key].items():
            factor = link_factor if name.startswith("beta") else 1.0
            assert value == pytest.approx(factor * old[name])


def check_transferred(new: KernelModel | CollectiveModel, old: KernelModel | CollectiveModel):
    """A fit on another device has the evidence of the old one, and is less sure."""
    assert new.kind == "assumed"
    assert new.n == old.n
    assert new.source == old.source
    assert new.notes == old.notes
    assert new.transferred[0].startswith("h100-sxm-8: datasheet of h200-sxm")
    assert new.spread > old.spread


def test_transferred_fits_keep_their_shares_say_so_and_are_less_sure() -> None:
    new = NODE.with_datasheet("h200-sxm")
    for key, old in NODE.kernels.items():
        check_transferred(new.kernels[key], old)
    for key, old in NODE.collectives.items():
        check_transferred(new.collectives[key], old)
    assert new.kernels.keys() == NODE.kernels.keys()
    assert new.collectives.keys() == NODE.collectives.keys()
    assert dict(new.kernels["gemm"]) == dict(NODE.kernels["gemm"])
    measured = NODE.gemm(16, 8192, 8192, dtype="bf16")
    with pytest.warns(ExtrapolationWarning, match="gemm: transferred from h100-sxm-8"):
        assert new.gemm(16, 8192, 8192, dtype="bf16").time < measured.time
    with pytest.warns(ExtrapolationWarning, match="all_reduce: transferred from h100-sxm-8"):
        new.collective("all_reduce", 1e6, ranks=8)
    again = new.with_datasheet("h100-sxm")
    assert again.provenance["derived_from"] == "h100-sxm-8"
    assert again.provenance["changes"].count(";") == 1
    assert again.kernels["gemm"].spread > new.kernels["gemm"].spread


@settings(deadline=None, max_examples=30)
@given(
    st.floats(1e3, 1e9),
    st.sampled_from(["all_reduce", "all_gather", "all_to_all"]),
    st.floats(1.0, 10.0),
)
def test_a_faster_link_is_never_slower_and_no_faster_than_its_factor(nbytes, operation, factor):
    fast = NODE.with_link("intra", bandwidth=450e9 * factor)
    old = float(NODE.collective_time(operation, nbytes, ranks=8))
    new = float(fast.collective_time(operation, nbytes, ranks=8))
    assert old / factor * (1 - 1e-9) <= new <= old * (1 + 1e-9)


def test_bandwidth_scales_the_fits_of_its_own_link_only() -> None:
    slow = NODE.with_link("inter", bandwidth=25e9)
    for key, old in NODE.collectives.items():
        new = slow.collectives[key]
        if not key.endswith("rail"):
            assert new is old
            continue
        assert new["beta"] == 2 * old["beta"]
        assert new.stderr["beta"] == 2 * old.stderr["beta"]
        assert new.spread == pytest.approx(math.hypot(0.1, 0.3 * math.log(2)))
        assert new.kind == "assumed"
    assert slow.network.links["inter"] == Link(
        Quantity(25e9, "B/s", "assumed", "what if"), LINKS["inter"].latency
    )
    assert slow.name == "h100-sxm-8, inter link of 25 GB/s"


def test_latency_is_paid_by_every_step() -> None:
    """One microsecond more: 14 steps of a ring of eight that reduces and gathers, 7 of one half."""
    slow = NODE.with_link("intra", latency=2e-6).collectives
    for key, steps in {"all_reduce.8": 14, "all_gather.8": 7, "reduce_scatter.8": 7}.items():
        for name, value in NODE.collectives[key].items():
            if name.startswith("alpha"):
                assert slow[key][name] - value == pytest.approx(steps * 1e-6)
    assert slow["all_to_all.any"]["alpha1"] == pytest.approx(2e-6)
    assert slow["all_to_all.any"]["alpha0"] == LAW["alpha0"]
    for key, fit in slow.items():
        assert fit.spread > 0.1 or key.endswith("rail")


def test_a_start_up_shrinks_to_no_less_than_a_hundredth() -> None:
    quick = NODE.with_link("intra", latency=1e-8).collectives
    for key, old in NODE.collectives.items():
        for name, value in quick[key].items():
            least = 0.01 * old[name] if name.startswith("alpha") else old[name]
            assert value >= least * (1 - 1e-12)


def test_nodes_of_one_rank_keep_what_was_measured_on_rails() -> None:
    single = load_platform("h100-sxm-8x4").with_nodes(8, ranks_per_node=1)
    assert single.network.ranks == 8
    assert {Key.parse(key).algorithm for key in single.collectives} == {"rail"}


def test_a_host_twice_as_fast() -> None:
    quick = NODE.with_host(0.5)
    assert quick.host.keys() == NODE.host.keys()
    for name, overhead in quick.host.items():
        assert overhead.value == NODE.host[name].value / 2
        assert overhead.kind == "assumed"
        assert overhead.source.startswith("host overheads x 0.5; ")


def test_a_host_half_as_fast_takes_twice_as_long_for_each_operation_of_an_iteration() -> None:
    once = ZEN.context.iterations["dlrm"]
    twice = ZEN.with_host(2).context.iterations["dlrm"]
    assert twice["per_operation"] == 2 * once["per_operation"]
    assert twice["scale"] == once["scale"]


def test_nodes_without_any_link_between_them_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"h100-sxm-8' knows nothing between nodes; add a link first.*with_link",
    ):
        UNKNOWN.with_nodes(2)
    with pytest.raises(ValueError, match=r"nodes is 2\.5"):
        NODE.with_nodes(2.5)  # type: ignore[arg-type]


def test_a_device_to_which_fits_do_not_carry_over_is_refused() -> None:
    with pytest.raises(
        ValueError, match="zen5-2 is cpu, h100-sxm-8 is cuda; fits do not carry over"
    ):
        NODE.with_datasheet(ZEN)
    with pytest.raises(
        ValueError,
        match=r"zen5-2' holds seconds per byte for .*; calibrate on the other device",
    ):
        ZEN.with_datasheet(ZEN)
    with pytest.raises(
        ValueError,
        match=r"platform is 'h300-sxm'; did you mean 'h200-sxm'. known are .*, a100-sxm, ",
    ):
        NODE.with_datasheet("h300-sxm")


def test_a_link_that_is_not_fully_known_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"bandwidth .* and latency .* are missing; give both, platform 'h100-sxm-8'",
    ):
        ALONE.with_link("inter", bandwidth=25e9)
    with pytest.raises(ValueError, match="are missing; give one of them"):
        ALONE.with_link("intra")
    no_links = replace(ALONE, network=replace(ALONE.network, links={}))
    with pytest.raises(
        ValueError, match=r"does not know the intra link that all_reduce\.8 was fitted on"
    ):
        no_links.with_link("intra", bandwidth=1e9, latency=1e-6)


def test_a_bandwidth_of_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth is 0"):
        NODE.with_link("intra", bandwidth=0)
    with pytest.raises(ValueError, match="bandwidth is 450 B/s, too little for any device"):
        NODE.with_link("intra", bandwidth=450)


def test_a_host_is_scaled_where_it_is_known_and_by_no_number_below_0() -> None:
    with pytest.raises(ValueError, match="knows no host overheads"):
        replace(NODE, host={}).with_host(0.5)
    with pytest.raises(ValueError, match="scale is -1"):
        NODE.with_host(-1)


# Against measurements: the two devices that what is added to the spread was chosen on.
class Swap(NamedTuple):
    """A platform with the datasheet of another device, on which others measured."""

    platform: str
    datasheet: str
    system: str  # as the files of measurements call it
    largest_error: float  # mean of products [-]


SWAPS = [
    Swap("a100-sxm-8", "h100-sxm", "h100_sxm", 0.2),
    Swap("h100-sxm-8", "a100-sxm", "a100_sxm", 0.12),
]


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.system)
def test_products_on_the_other_device_are_as_measured(swap: Swap, shared_data: Path) -> None:
    file = shared_data / "gemm" / f"gemm_bf16_{swap.system}.csv"
    data = pl.read_csv(file, infer_schema_length=None).filter("train_like_mnk_ge_512")
    m = data["m"].to_numpy().astype(float)
    n = data["n"].to_numpy().astype(float)
    k = data["k"].to_numpy().astype(float)
    sizes = {"flops": 2 * m * n * k, "nbytes": 2 * (m * k + k * n + m * n)}
    other = load_platform(swap.platform).with_datasheet(swap.datasheet)
    predicted = other.kernel_time("gemm", sizes, dtype="bf16")
    ratio = data["latency_us_sglang"].to_numpy() * 1e-6 / predicted
    assert np.abs(1 / ratio - 1).mean() < swap.largest_error
    inside = np.abs(np.log(ratio)) < 1.2816 * other.kernels["gemm"].spread_at(predicted)
    assert 0.7 < inside.mean() < 0.95, "about four fifths lie in an interval of 80 %"


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.system)
def test_long_messages_on_the_other_device_are_as_measured(swap: Swap, shared_data: Path) -> None:
    """They follow the bandwidth of the link; start-ups do not."""
    file = shared_data / "nccl" / f"nccl_{swap.system}.csv"
    data = pl.read_csv(file, infer_schema_length=None)
    data = data.filter((pl.col("dtype") == "half") & (pl.col("message_bytes") >= 2**24))
    other = load_platform(swap.platform).with_datasheet(swap.datasheet)
    errors = []
    for row in data.iter_rows(named=True):
        operation = row["op"].replace("alltoall", "all_to_all")
        predicted = other.collective_time(operation, row["message_bytes"], ranks=row["num_gpus"])
        errors.append(float(predicted) / (row["latency_us"] * 1e-6) - 1)
    assert np.abs(errors).mean() < 0.2


def test_nodes_of_fewer_ranks_keep_what_was_measured_inside_them() -> None:
    node = load_platform("h100-sxm-8")
    four = node.with_nodes(2, ranks_per_node=4)
    assert four.name == "h100-sxm-4x2 by datasheet"
    assert four.network.ranks == 8
    assert "all_gather.4" in four.collectives
    assert "all_gather.8" not in four.collectives
    assert four.collectives["all_gather.any"].ranges["ranks"] == (2.0, 4.0)
    inside_one_node = node.collective("all_reduce", 1e8, ranks=8)
    with pytest.warns(ExtrapolationWarning, match="inside and between 2 nodes"):
        assert four.collective("all_reduce", 1e8, ranks=8).time > inside_one_node.time
    with pytest.raises(ValueError, match="ranks_per_node is 0"):
        ALONE.with_nodes(2, ranks_per_node=0)


def test_a_network_of_one_provider_says_so_in_its_name() -> None:
    fabrics = dict(platforms().select("name", "fabric").rows())
    assert fabrics["h100-sxm-8"] == "NVLink"
    assert "EFA" in fabrics["a100-sxm-efa-8x8"]
    assert load_platform("a100-sxm-8x8").network.links["inter"].name == "adapters of the datasheet"
    node = load_platform("v100-sxm-8")
    with pytest.warns(ExtrapolationWarning, match="broadcast was fitted on 4 ranks"):
        assert node.collective("broadcast", 1e6, ranks=8).spread >= 0.3


@pytest.mark.parametrize("name", platforms()["name"].to_list())
def test_nodes_and_links_come_in_any_order(name: str) -> None:
    """Both orders give the same platform, or a refusal whose advice gives it."""
    start = load_platform(name)
    link = {"bandwidth": 25e9, "latency": 3e-6}
    nodes = start.network.nodes + 1
    first = start.with_link("inter", **link).with_nodes(nodes)  # type: ignore[arg-type]
    try:
        second = start.with_nodes(nodes).with_link("inter", **link)  # type: ignore[arg-type]
    except ValueError as error:
        advice = re.search(r"such as (\.with_link\(.*?\)\.with_nodes\(\d+\))", str(error))
        assert advice, error
        followed = eval(f"start{advice[1]}", {"start": start})  # our own message
        assert followed.network.nodes == 2
        assert "inter" in followed.network.links
        second = start.with_link("inter", **link).with_nodes(nodes)  # type: ignore[arg-type]
    assert first.network == second.network
    assert first.kernels == second.kernels
    assert first.collectives.keys() == second.collectives.keys()
    for key, fit in first.collectives.items():
        other = second.collectives[key]
        assert dict(fit) == pytest.approx(dict(other))
        assert fit.spread == pytest.approx(other.spread)
    if "inter" not in start.network.links:
        with pytest.raises(ValueError, match="give both"):
            start.with_link("inter", bandwidth=25e9)
