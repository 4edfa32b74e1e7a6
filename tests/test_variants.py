"""What if: variants say what they were, obey the change, are less sure than what they come from,
and survive a file."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import CollectiveModel, OverRanks, Pipelined, TwoBranch
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
H100, A100, ZEN = (load_platform(name) for name in ("h100-sxm-8", "a100-sxm-8", "zen5-2"))
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
    slow = NODE.with_link("inter", bandwidth=25e9)
    for variant in (
        NODES,
        ALONE.with_nodes(2),
        NODE.with_datasheet("b200-sxm"),
        slow,
        ZEN.with_host(0),
    ):
        assert Platform.from_toml(variant.to_toml()) == variant


def test_nodes_come_and_go() -> None:
    assert (NODES.name, NODES.network.ranks, NODES.network.nodes) == ("h100-sxm-8x4", 32, 4)
    assert NODES.provenance["derived_from"] == "h100-sxm-8"
    assert NODES.provenance["changes"].endswith("4 nodes instead of 1")
    assert NODES.kernels == NODE.kernels and NODES.collectives == NODE.collectives
    assert NODES.with_nodes(16).name == "h100-sxm-8x16" and NODES.with_nodes(1).name == "h100-sxm-8"
    mine = replace(NODE, name="mine, 3 nodes", network=replace(NODE.network, nodes=3))
    assert mine.with_nodes(2).name == "mine, 2 nodes"
    with pytest.warns(ExtrapolationWarning):
        assert NODES.collective("all_reduce", 1e9, ranks=16).time > 0


def test_nodes_without_a_known_link_take_the_adapters_of_the_datasheet() -> None:
    two = ALONE.with_nodes(2)
    found = two.network.links["inter"]
    assert (
        found.bandwidth == read_datasheet("h100-sxm").links["NIC"]
        and found.latency.kind == "assumed"
    )
    assert "network adapters of the datasheet" in two.provenance["changes"]
    cluster = load_platform("h100-sxm-8x8").network.links["inter"].latency
    assert found.latency == cluster, "no small message was measured on it either"
    assert "inter" not in ALONE.with_nodes(1).network.links
    rails = replace(
        UNKNOWN, collectives={"all_reduce.4.rail": NODE.collectives["all_reduce.4.rail"]}
    )
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
    assert new.device.peaks["bf16"].value == 312e12 and new.device.main_bandwidth == 2.039e12
    assert new.network.ranks == NODE.network.ranks and new.host == NODE.host
    assert new.network.links["intra"].bandwidth.value == 450e9 / inside
    for key, old in NODE.collectives.items():
        factor = between if key.endswith("rail") else inside
        for name, value in new.collectives[key].items():
            assert value == pytest.approx(old[name] * (factor if name.startswith("beta") else 1.0))


def test_transferred_fits_keep_their_shares_say_so_and_are_less_sure() -> None:
    new = NODE.with_datasheet("h200-sxm")
    for group in ("kernels", "collectives"):
        for key, carried in getattr(new, group).items():
            old = getattr(NODE, group)[key]
            assert (carried.kind, carried.n, carried.source, carried.notes) == (
                "assumed",
                old.n,
                old.source,
                old.notes,
            )
            assert carried.transferred[0].startswith("h100-sxm-8: datasheet of h200-sxm")
            assert carried.spread > old.spread
    assert dict(new.kernels["gemm"]) == dict(NODE.kernels["gemm"])
    with pytest.warns(ExtrapolationWarning, match="gemm: transferred from h100-sxm-8"):
        assert (
            new.gemm(16, 8192, 8192, dtype="bf16").time
            < NODE.gemm(16, 8192, 8192, dtype="bf16").time
        )
    with pytest.warns(ExtrapolationWarning, match="all_reduce: transferred from h100-sxm-8"):
        new.collective("all_reduce", 1e6, ranks=8)
    again = new.with_datasheet("h100-sxm")
    assert (
        again.provenance["derived_from"] == "h100-sxm-8"
        and again.provenance["changes"].count(";") == 1
    )
    assert again.kernels["gemm"].spread > new.kernels["gemm"].spread


@settings(deadline=None, max_examples=30)
@given(
    st.floats(1e3, 1e9),
    st.sampled_from(["all_reduce", "all_gather", "all_to_all"]),
    st.floats(1.0, 10.0),
)
def test_a_faster_link_is_never_slower_and_no_faster_than_its_factor(nbytes, operation, factor):
    fast = NODE.with_link("intra", bandwidth=450e9 * factor)
    old, new = (float(p.collective_time(operation, nbytes, ranks=8)) for p in (NODE, fast))
    assert old / factor * (1 - 1e-9) <= new <= old * (1 + 1e-9)


def test_bandwidth_scales_the_fits_of_its_own_link_only() -> None:
    slow = NODE.with_link("inter", bandwidth=25e9)
    for key, old in NODE.collectives.items():
        new = slow.collectives[key]
        if not key.endswith("rail"):
            assert new is old
            continue
        assert new["beta"] == 2 * old["beta"] and new.stderr["beta"] == 2 * old.stderr["beta"]
        assert (
            new.spread == pytest.approx(math.hypot(0.1, 0.3 * math.log(2)))
            and new.kind == "assumed"
        )
    found = slow.network.links["inter"]
    assert found == Link(Quantity(25e9, "B/s", "assumed", "what if"), LINKS["inter"].latency)
    assert slow.name == "h100-sxm-8, inter link of 25 GB/s"


def test_latency_is_paid_by_every_step_and_a_start_up_shrinks_by_no_more_than_it() -> None:
    slow, quick = (NODE.with_link("intra", latency=latency).collectives for latency in (2e-6, 1e-8))
    for key, steps in {"all_reduce.8": 14, "all_gather.8": 7, "reduce_scatter.8": 7}.items():
        old, new = NODE.collectives[key], slow[key]
        starts = [name for name in old if name.startswith("alpha")]
        assert [new[name] - old[name] for name in starts] == pytest.approx(
            [steps * 1e-6] * len(starts)
        )
    assert (
        slow["all_to_all.any"]["alpha1"] == pytest.approx(2e-6)
        and slow["all_to_all.any"]["alpha0"] == LAW["alpha0"]
    )
    assert all(new.spread > 0.1 for key, new in slow.items() if not key.endswith("rail"))
    for key, old in NODE.collectives.items():
        for name, value in quick[key].items():
            assert value >= old[name] * (0.01 if name.startswith("alpha") else 1.0) * (1 - 1e-12)


def test_nodes_of_one_rank_keep_what_was_measured_on_rails() -> None:
    single = load_platform("h100-sxm-8x4").with_nodes(8, ranks_per_node=1)
    assert single.network.ranks == 8
    assert {Key.parse(key).algorithm for key in single.collectives} == {"rail"}


def test_a_host_twice_as_fast() -> None:
    quick = NODE.with_host(0.5)
    assert {name: q.value for name, q in quick.host.items()} == {
        name: q.value / 2 for name, q in NODE.host.items()
    }
    assert all(
        q.kind == "assumed" and q.source.startswith("host overheads x 0.5; ")
        for q in quick.host.values()
    )
    twice, once = ZEN.with_host(2).context.iterations["dlrm"], ZEN.context.iterations["dlrm"]
    assert twice["per_operation"] == 2 * once["per_operation"] and twice["scale"] == once["scale"]


REFUSED: dict[str, Callable[[], Platform]] = {
    r"h100-sxm-8' knows nothing between nodes; add a link first.*with_link": lambda: (
        UNKNOWN.with_nodes(2)
    ),
    "nodes is 2.5": lambda: NODE.with_nodes(2.5),  # type: ignore[arg-type]
    "zen5-2 is cpu, h100-sxm-8 is cuda; fits do not carry over": lambda: NODE.with_datasheet(ZEN),
    r"zen5-2' holds seconds per byte for .*; calibrate on the other device": lambda: (
        ZEN.with_datasheet(ZEN)
    ),
    r"platform is 'h300-sxm'.*; datasheets are a100-sxm, ": lambda: NODE.with_datasheet("h300-sxm"),
    r"bandwidth .* and latency .* are missing; give both, platform 'h100-sxm-8'": lambda: (
        ALONE.with_link("inter", bandwidth=25e9)
    ),
    "are missing; give one of them": lambda: ALONE.with_link("intra"),
    r"does not know the intra link that all_reduce\.8 was fitted on": lambda: replace(
        ALONE, network=replace(ALONE.network, links={})
    ).with_link("intra", bandwidth=1e9, latency=1e-6),
    "bandwidth is 0": lambda: NODE.with_link("intra", bandwidth=0),
    "bandwidth is 450 B/s, too little for any device": lambda: NODE.with_link(
        "intra", bandwidth=450
    ),
    "knows no host overheads": lambda: replace(NODE, host={}).with_host(0.5),
    "scale is -1": lambda: NODE.with_host(-1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


# Against measurements: the two devices that what is added to the spread was chosen on.
PAIRS = [("a100-sxm-8", "h100-sxm", "h100_sxm", 0.2), ("h100-sxm-8", "a100-sxm", "a100_sxm", 0.12)]


@pytest.mark.parametrize(("name", "sheet", "system", "bar"), PAIRS)
def test_the_other_device(
    name: str, sheet: str, system: str, bar: float, shared_data: Path
) -> None:
    data = pl.read_csv(shared_data / "gemm" / f"gemm_bf16_{system}.csv", infer_schema_length=None)
    data = data.filter("train_like_mnk_ge_512")
    m, n, k = (data[side].to_numpy().astype(float) for side in "mnk")
    other = load_platform(name).with_datasheet(sheet)
    predicted = other.kernel_time(
        "gemm", {"flops": 2 * m * n * k, "nbytes": 2 * (m * k + k * n + m * n)}, dtype="bf16"
    )
    ratio = data["latency_us_sglang"].to_numpy() * 1e-6 / predicted
    inside = np.abs(np.log(ratio)) < 1.2816 * other.kernels["gemm"].spread_at(predicted)
    assert np.abs(1 / ratio - 1).mean() < bar and 0.7 < inside.mean() < 0.95
    data = pl.read_csv(shared_data / "nccl" / f"nccl_{system}.csv", infer_schema_length=None)
    data = data.filter((pl.col("dtype") == "half") & (pl.col("message_bytes") >= 2**24))
    errors = []
    for operation, ranks, nbytes, time in data.select(
        "op", "num_gpus", "message_bytes", "latency_us"
    ).iter_rows():
        found = other.collective_time(
            operation.replace("alltoall", "all_to_all"), nbytes, ranks=ranks
        )
        errors.append(float(found) / (time * 1e-6) - 1)
    assert np.abs(errors).mean() < 0.2, (
        "long messages follow the bandwidth of the link; start-ups do not"
    )


def test_nodes_of_fewer_ranks_keep_what_was_measured_inside_them() -> None:
    node = load_platform("h100-sxm-8")
    four = node.with_nodes(2, ranks_per_node=4)
    assert (four.name, four.network.ranks) == ("h100-sxm-4x2 by datasheet", 8)
    assert "all_gather.4" in four.collectives and "all_gather.8" not in four.collectives
    assert four.collectives["all_gather.any"].ranges["ranks"] == (2.0, 4.0)
    with pytest.warns(ExtrapolationWarning, match="inside and between 2 nodes"):
        assert (
            four.collective("all_reduce", 1e8, ranks=8).time
            > node.collective("all_reduce", 1e8, ranks=8).time
        )
    with pytest.raises(ValueError, match="ranks_per_node is 0"):
        ALONE.with_nodes(2, ranks_per_node=0)


def test_a_network_of_one_provider_says_so_in_its_name() -> None:
    fabrics = dict(platforms().select("name", "fabric").rows())
    assert fabrics["h100-sxm-8"] == "NVLink" and "EFA" in fabrics["a100-sxm-efa-8x8"]
    assert load_platform("a100-sxm-8x8").network.links["inter"].name == "adapters of the datasheet"
    node = load_platform("v100-sxm-8")
    with pytest.warns(ExtrapolationWarning, match="broadcast was fitted on 4 ranks"):
        assert node.collective("broadcast", 1e6, ranks=8).spread >= 0.3


@pytest.mark.parametrize("name", platforms()["name"].to_list())
def test_nodes_and_links_come_in_any_order(name: str) -> None:
    """Both orders give the same platform, or a refusal whose advice gives it."""
    start, link = load_platform(name), {"bandwidth": 25e9, "latency": 3e-6}
    nodes = start.network.nodes + 1
    first = start.with_link("inter", **link).with_nodes(nodes)  # type: ignore[arg-type]
    try:
        second = start.with_nodes(nodes).with_link("inter", **link)  # type: ignore[arg-type]
    except ValueError as error:
        advice = re.search(r"such as (\.with_link\(.*?\)\.with_nodes\(\d+\))", str(error))
        assert advice, error
        followed = eval(f"start{advice[1]}", {"start": start})  # our own message
        assert followed.network.nodes == 2 and "inter" in followed.network.links
        second = start.with_link("inter", **link).with_nodes(nodes)  # type: ignore[arg-type]
    assert first.network == second.network and first.kernels == second.kernels
    assert first.collectives.keys() == second.collectives.keys()
    for key, fit in first.collectives.items():
        other = second.collectives[key]
        assert dict(fit) == pytest.approx(dict(other)) and fit.spread == pytest.approx(other.spread)
    if "inter" not in start.network.links:
        with pytest.raises(ValueError, match="give both"):
            start.with_link("inter", bandwidth=25e9)
