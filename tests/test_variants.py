"""What if: variants say what they were, obey the change, are less sure than what they come from, and survive a file."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import Fit
from perfkit.ground.hardware import Link, Quantity
from perfkit.platform.estimates import ExtrapolationWarning
from perfkit.platform.file import PlatformError
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.readers.datasheets import read_datasheet

UNITS = {"alpha": "s", "beta": "s/B", "alpha0": "s", "alpha1": "s", "beta0": "s/B", "beta1": "s/B", "sharpness": "-"}
BRANCHES = {"alpha1": 8e-6, "beta1": 2e-11, "alpha2": 3e-5, "beta2": 4e-12, "sharpness": 0.8}
LAW = {"alpha0": 7e-6, "alpha1": 1e-6, "beta0": 1.5e-12, "beta1": 6e-12, "sharpness": 0.6}
CURVES = {
    "all_reduce.8": ("pipelined", {"alpha": 2e-5, "beta": 4e-12, "sharpness": 0.6}),
    "all_gather.8": ("two_branch", BRANCHES),
    "reduce_scatter.8": ("two_branch", BRANCHES),
    "all_to_all.any": ("over_ranks", LAW),
    "all_reduce.4.rail": ("pipelined", {"alpha": 4e-5, "beta": 4e-11, "sharpness": 0.6}),
}


def quantity(value: float, unit: str) -> Quantity:
    return Quantity(value, unit, "datasheet", "a test")


def fit(form: str, parameters: dict[str, float]) -> Fit:
    units = {name: UNITS.get(name, UNITS[name[:-1]] if name[-1] in "12" else "-") for name in parameters}
    errors = {name: 0.05 * value for name, value in parameters.items() if name != "sharpness"}
    return Fit(form, parameters, errors, 0.1, n=20, source="a test", date="2026-01-01", units=units)


H100 = load_platform("h100-sxm-8")
LINKS = {
    "intra": Link(quantity(450e9, "B/s"), quantity(1e-6, "s")),
    "inter": Link(quantity(50e9, "B/s"), quantity(5e-6, "s")),
}
NODE = replace(
    H100, network=replace(H100.network, links=LINKS), collectives={key: fit(*curve) for key, curve in CURVES.items()}
)
NODES = NODE.with_nodes(4)


def survives(platform: Platform) -> Platform:
    again = Platform.from_toml(platform.to_toml())
    assert again == platform
    return again


# More nodes.
def test_nodes_come_and_go() -> None:
    assert (NODES.name, NODES.network.ranks, NODES.network.nodes) == ("h100-sxm-8x4", 32, 4)
    assert NODES.provenance["derived_from"] == "h100-sxm-8"
    assert NODES.provenance["changes"].endswith("4 nodes instead of 1")
    assert NODES.kernels == NODE.kernels and NODES.collectives == NODE.collectives
    assert NODES.with_nodes(16).name == "h100-sxm-8x16" and NODES.with_nodes(1).name == "h100-sxm-8"
    mine = replace(NODE, name="mine, 3 nodes", network=replace(NODE.network, nodes=3))
    assert mine.with_nodes(2).name == "mine, 2 nodes"
    survives(NODES)
    for ranks in (16, 32):
        with pytest.warns(ExtrapolationWarning):
            assert NODES.collective("all_reduce", 1e9, ranks=ranks).time > 0


def test_nodes_without_a_known_link_take_the_adapters_of_the_datasheet() -> None:
    alone = replace(NODE, network=replace(NODE.network, links={"intra": LINKS["intra"]}))
    alone = replace(alone, collectives={"all_reduce.8": NODE.collectives["all_reduce.8"]})
    link = alone.with_nodes(2).network.links["inter"]
    assert link.bandwidth == read_datasheet("h100-sxm").links["NIC"] and link.latency.kind == "assumed"
    assert "network adapters of the datasheet" in survives(alone.with_nodes(2)).provenance["changes"]
    cluster = load_platform("h100-sxm-8x8").network.links["inter"].latency
    assert link.latency.value == cluster.value, "HOP quotes the cluster of the gallery"
    assert "inter" not in alone.with_nodes(1).network.links
    unknown = replace(alone, device=replace(alone.device, name="NVIDIA H300"))
    with pytest.raises(ValueError, match=r"h100-sxm-8' knows nothing between nodes; add a link first.*with_link"):
        unknown.with_nodes(2)
    rails = replace(unknown, collectives={"all_reduce.4.rail": NODE.collectives["all_reduce.4.rail"]})
    assert rails.with_nodes(4).network.nodes == 4
    with pytest.raises(ValueError, match="nodes is 2"):
        NODE.with_nodes(2.5)  # type: ignore[arg-type]


# Another device.
A100 = load_platform("a100-sxm-8")
SHEET = read_datasheet("a100-sxm")


@pytest.mark.parametrize(
    ("other", "inside", "between"),
    [(A100, 1.5, 1.0), (SHEET, 1.5, 2.0), (SHEET.device, 1.0, 1.0), ("a100-sxm", 1.5, 2.0), ("a100-sxm-8", 1.5, 1.0)],
    ids=["platform", "datasheet", "device", "name of a datasheet", "name of a platform"],
)
def test_a_datasheet_is_swapped_whatever_names_it(other: object, inside: float, between: float) -> None:
    new = NODE.with_datasheet(other)  # type: ignore[arg-type]
    assert new.device.peaks["bf16"].value == 312e12 and new.device.memory[-1].bandwidth.value == 2.039e12
    assert new.network.ranks == NODE.network.ranks and new.host == NODE.host
    assert new.network.links["intra"].bandwidth.value == 450e9 / inside
    for key, old in NODE.collectives.items():
        factor = between if key.endswith("rail") else inside
        for name, value in new.collectives[key].items():
            assert value == pytest.approx(old[name] * (factor if name.startswith("beta") else 1.0))
    survives(new)


def test_transferred_fits_keep_their_shares_say_so_and_are_less_sure() -> None:
    new = NODE.with_datasheet("h200-sxm")
    for group in ("kernels", "collectives"):
        for key, carried in getattr(new, group).items():
            old = getattr(NODE, group)[key]
            assert carried.kind == "assumed" and carried.n == old.n and carried.source == old.source
            assert carried.transferred[0].startswith("h100-sxm-8: datasheet of h200-sxm") and carried.notes == old.notes
            assert carried.spread > old.spread
    assert dict(new.kernels["gemm"]) == dict(NODE.kernels["gemm"])
    with pytest.warns(ExtrapolationWarning, match="gemm: transferred from h100-sxm-8"):
        memory_bound = new.gemm(16, 8192, 8192, dtype="bf16")
    assert memory_bound.time < NODE.gemm(16, 8192, 8192, dtype="bf16").time
    with pytest.warns(ExtrapolationWarning, match="all_reduce: transferred from h100-sxm-8"):
        NODE.with_datasheet("b200-sxm").collective("all_reduce", 1e6, ranks=8)
    again = new.with_datasheet("h100-sxm")
    assert again.provenance["derived_from"] == "h100-sxm-8" and again.provenance["changes"].count(";") == 1
    assert again.kernels["gemm"].spread > new.kernels["gemm"].spread


def test_devices_that_are_too_different_are_refused() -> None:
    zen = load_platform("zen5-2")
    with pytest.raises(ValueError, match="zen5-2 is cpu, h100-sxm-8 is cuda; fits do not carry over"):
        NODE.with_datasheet(zen)
    with pytest.raises(ValueError, match=r"zen5-2' holds seconds per byte for .*; calibrate on the other device"):
        zen.with_datasheet(zen)
    with pytest.raises(PlatformError, match=r"platform is 'h300-sxm'.*; datasheets are a100-sxm, "):
        NODE.with_datasheet("h300-sxm")


# Another link.
sizes = st.floats(1e3, 1e9)


@settings(deadline=None, max_examples=30)
@given(sizes, st.sampled_from(["all_reduce", "all_gather", "all_to_all"]), st.floats(1.0, 10.0))
def test_a_faster_link_is_never_slower_and_no_faster_than_its_factor(
    nbytes: float, operation: str, factor: float
) -> None:
    fast = NODE.with_link("intra", bandwidth=450e9 * factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        old, new = (float(p.collective_time(operation, nbytes, ranks=8)) for p in (NODE, fast))
    assert old / factor * (1 - 1e-9) <= new <= old * (1 + 1e-9)


def test_bandwidth_scales_the_fits_of_its_own_link_only() -> None:
    slow = NODE.with_link("inter", bandwidth=25e9)
    for key, old in NODE.collectives.items():
        new = slow.collectives[key]
        if key.endswith("rail"):
            assert new["beta"] == 2 * old["beta"] and new.stderr["beta"] == 2 * old.stderr["beta"]
            assert new.spread == pytest.approx(math.hypot(0.1, 0.3 * math.log(2))) and new.kind == "assumed"
        else:
            assert new is old
    link = slow.network.links["inter"].bandwidth
    assert (link.value, link.kind, link.source) == (25e9, "assumed", "what if")
    assert slow.network.links["inter"].latency == LINKS["inter"].latency
    assert slow.name == "h100-sxm-8, inter link of 25 GB/s"
    survives(slow)


def test_latency_is_paid_by_every_step() -> None:
    slow = NODE.with_link("intra", latency=2e-6)
    steps = {"all_reduce.8": 14, "all_gather.8": 7, "reduce_scatter.8": 7}
    for key, count in steps.items():
        old, new = NODE.collectives[key], slow.collectives[key]
        for name in (name for name in old if name.startswith("alpha")):
            assert new[name] - old[name] == pytest.approx(count * 1e-6)
    law = slow.collectives["all_to_all.any"]
    assert law["alpha1"] == pytest.approx(2e-6) and law["alpha0"] == LAW["alpha0"]
    assert all(new.spread > 0.1 for key, new in slow.collectives.items() if not key.endswith("rail"))


def test_a_start_up_shrinks_by_no_more_than_the_latency() -> None:
    quick = NODE.with_link("intra", latency=1e-8)
    for key, old in NODE.collectives.items():
        for name, value in quick.collectives[key].items():
            assert value >= old[name] * (0.01 if name.startswith("alpha") else 1.0) * (1 - 1e-12)


def test_links_are_described_in_full() -> None:
    bare = replace(NODE, network=replace(NODE.network, links={"intra": LINKS["intra"]}))
    bare = replace(bare, collectives={"all_reduce.8": NODE.collectives["all_reduce.8"]})
    assert bare.with_link("inter", bandwidth=25e9, latency=1e-5).with_nodes(2).network.ranks == 16
    with pytest.raises(ValueError, match=r"bandwidth .* and latency .* are missing; give both, platform 'h100-sxm-8'"):
        bare.with_link("inter", bandwidth=25e9)
    with pytest.raises(ValueError, match="are missing; give one of them"):
        bare.with_link("intra")
    with pytest.raises(ValueError, match=r"does not know the intra link that all_reduce\.8 was fitted on"):
        replace(bare, network=replace(bare.network, links={})).with_link("intra", bandwidth=1e9, latency=1e-6)
    for value in (0, math.nan, "fast"):
        with pytest.raises(ValueError, match="bandwidth is"):
            NODE.with_link("intra", bandwidth=value)  # type: ignore[arg-type]


# Another host.
def test_a_host_twice_as_fast() -> None:
    quick = NODE.with_host(0.5)
    assert {name: q.value for name, q in quick.host.items()} == {name: q.value / 2 for name, q in NODE.host.items()}
    assert all(q.kind == "assumed" and q.source.startswith("host overheads x 0.5; ") for q in quick.host.values())
    zen = load_platform("zen5-2")
    twice, once = zen.with_host(2).context.iterations["dlrm"], zen.context.iterations["dlrm"]
    assert twice["per_operation"] == 2 * once["per_operation"] and twice["scale"] == once["scale"]
    survives(quick)
    survives(zen.with_host(0))
    with pytest.raises(ValueError, match="knows no host overheads"):
        replace(NODE, host={}).with_host(0.5)
    with pytest.raises(ValueError, match="scale is -1"):
        NODE.with_host(-1)


# Against measurements: the two devices that what is added to the spread was chosen on.
PAIRS = [("a100-sxm-8", "h100-sxm", "h100_sxm", 0.2), ("h100-sxm-8", "a100-sxm", "a100_sxm", 0.12)]


@pytest.mark.parametrize(("name", "sheet", "system", "bar"), PAIRS)
def test_gemms_of_the_other_device(name: str, sheet: str, system: str, bar: float, shared_data: Path) -> None:
    data = pl.read_csv(shared_data / "gemm" / f"gemm_bf16_{system}.csv", infer_schema_length=None)
    data = data.filter("train_like_mnk_ge_512")
    m, n, k = (data[side].to_numpy().astype(float) for side in "mnk")
    other = load_platform(name).with_datasheet(sheet)
    predicted = other.kernel_time("gemm", {"flops": 2 * m * n * k, "nbytes": 2 * (m * k + k * n + m * n)}, dtype="bf16")
    ratio = data["latency_us_sglang"].to_numpy() * 1e-6 / predicted
    inside = np.abs(np.log(ratio)) < 1.2816 * other.kernels["gemm"].spread_at(predicted)
    assert np.abs(1 / ratio - 1).mean() < bar and 0.7 < inside.mean() < 0.95


@pytest.mark.parametrize(("name", "sheet", "system", "bar"), PAIRS)
def test_collectives_of_the_other_device(name: str, sheet: str, system: str, bar: float, shared_data: Path) -> None:
    data = pl.read_csv(shared_data / "nccl" / f"nccl_{system}.csv", infer_schema_length=None)
    data = data.filter((pl.col("dtype") == "half") & (pl.col("message_bytes") >= 2**24))
    other, errors = load_platform(name).with_datasheet(sheet), []
    for operation, ranks, nbytes, time in data.select("op", "num_gpus", "message_bytes", "latency_us").iter_rows():
        operation = operation.replace("alltoall", "all_to_all")
        errors.append(float(other.collective_time(operation, nbytes, ranks=ranks)) / (time * 1e-6) - 1)
    assert np.abs(errors).mean() < 0.2, "long messages follow the bandwidth of the link; start-ups do not"
