"""The gallery of GPU platforms: every datasheet number says what it is, and every file is what its
sources give."""

import csv
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_context import PCIE
from benchmarks.helpers.files import find_shared_data
from benchmarks.makers.gallery import (
    NAMES,
    RECIPES,
    TYPICAL,
    build,
    find_differences,
    finish,
    main,
    read_parts,
    read_products,
)
from perfkit.__main__ import main as run_command
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import DTYPES
from perfkit.models.collectives import bus_factor, ring_steps
from perfkit.platform.datasheets import list_datasheets, read_datasheet
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.file import list_gallery
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.sources import fit_gemms
from perfkit.platform.unmeasured import RATE_SPREADS
from perfkit.prediction.predictor import predict
from perfkit.readers.kernel_database import find_database
from perfkit.workloads.transformer import Transformer

#: What a number says of its basis, by the last word of its quantity: unit and first words.
BASES = {
    "peak": ("FLOP/s", r"dense\b.+|dense"),
    "capacity": ("B", r".*\b(GB|GiB|MiB|KiB)\b.*|as the .+"),
    "memory": ("B/s", r"reads and writes together.*"),
    "link": ("B/s", r"one way.*"),
    "multiprocessors": ("-", r".+"),
    "power": ("W", r".+"),
    "node": ("-", r"of .+"),
    "products": ("FLOP/s", r"largest of (squares|many shapes).*|.* of the peak, as .+"),
    "capability": ("-", r"compute capability"),
}


def test_the_shipped_datasheets_are_whole() -> None:
    with find_reference("datasheets.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        first, _, last = row["quantity"].rpartition(" ")
        end = "link" if first in ("NVLink", "fabric", "PCIe", "NIC") else "memory"
        unit, basis = BASES[end if last == "bandwidth" else last]
        assert (
            float(row["value"]) > 0 and row["unit"] == unit and re.fullmatch(basis, row["basis"])
        ), row
        kinds = RATE_SPREADS if last == "products" else ("datasheet", "assumed")
        assert row["kind"] in kinds and re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
        assert re.search(r"https://\S+\.\S+|aiconfigurator-core \S+ .*\.yaml", row["source"]), row
    keys = [(row["system"], row["quantity"], row["dtype"]) for row in rows]
    assert len(keys) == len(set(keys))
    assert {row["dtype"] for row in rows if row["quantity"] == "peak"} <= set(DTYPES)
    assert len({(row["system"], row["device"]) for row in rows}) == len(list_datasheets())
    for system in list_datasheets():
        sheet = read_datasheet(system)
        assert {"bf16", "fp16"} & set(sheet.device.peaks)
        assert sheet.device.memory[-1].bandwidth is not None
        for cache in sheet.device.memory[:-1]:  # one that nobody measured serves no rows of tables
            assert (cache.bandwidth is None) == (cache.name != "L2")
        assert sheet.link_bandwidth is not None
        assert sheet.products.keys() <= sheet.device.peaks.keys()


def test_every_nvidia_gpu_says_its_compute_capability() -> None:
    """Rules for generations, such as that for rows that are not aligned, would else pass it by."""
    devices = [load_platform(name).device for name in list_gallery()]
    devices += [read_datasheet(system).device for system in list_datasheets()]
    nvidia = [device for device in devices if device.name.startswith("NVIDIA")]
    assert len(nvidia) > 25
    for device in nvidia:
        assert device.capability is not None, device.name
        assert 6.0 <= device.capability.value <= 12.1
        assert "nvidia.com" in device.capability.source
    for device in devices:
        if device not in nvidia:
            assert device.capability is None, device.name


def test_dense_and_sparse_one_way_and_both_are_told_apart() -> None:
    """Twice the dense rate, or both ways of a link, is what the sheets print; the platforms need
    half of it."""
    h100 = read_datasheet("h100-sxm")
    assert h100.device.peaks["fp8"].value == pytest.approx(3957.8e12 / 2, rel=1e-4)
    assert "quoted with sparsity, divided by 2" in h100.device.peaks["fp8"].basis
    assert h100.links["NVLink"].value == 900e9 / 2
    assert "both ways, divided by 2" in h100.links["NVLink"].basis
    assert read_datasheet("a100-sxm").device.memory[0].capacity.value == 40 * 2**20


def test_what_nobody_measured_is_the_middle_of_what_was() -> None:
    committed = find_reference("typical.toml").read_text(encoding="utf-8")
    assert not list(
        find_differences(tomllib.loads(build(TYPICAL).to_toml()), tomllib.loads(committed))
    )


@pytest.mark.parametrize("system", list_datasheets())
def test_no_datasheet_device_beats_its_datasheet(system: str) -> None:
    """Kernels and collectives lie above FLOP over peak, bytes over bandwidth and bytes over the
    link."""
    node = (
        load_platform(f"{system}-8")
        if f"{system}-8" not in list_gallery()
        else Platform.from_datasheet(system, ranks=8)
    )
    rate, wire = node.device.main_bandwidth, node.network.links["intra"].bandwidth.value
    with keep_quiet():
        for dtype, peak in node.device.peaks.items():
            for m, n, k in ((64, 64, 64), (8192, 8192, 8192), (4096, 64, 4096), (1, 50257, 1024)):
                floor = max(
                    2 * m * n * k / peak.value, (m * k + k * n + m * n) * DTYPES[dtype] / rate
                )
                assert node.gemm(m, n, k, dtype=dtype).time > floor
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            found = node.collective(name, 1e9, ranks=8)
            assert found.time > bus_factor(name, 8) * 1e9 / wire
            assert found.interval()[1] > 1.5 * found.time


def test_a_device_of_three_numbers_has_a_roofline() -> None:
    """100 TFLOP/s and 3 TB/s: FLOP over peak alone take longer than the traffic that such a device
    was priced at."""
    mine = Platform.from_datasheet("mine", flops={"bf16": 1e14}, memory=(96e9, 3e12))
    bert = Transformer.bert("bert-large", batch=64, sequence=512, dtype="bf16")
    flops = bert.graphs(1)[0].column("flops").sum()
    for platform in (mine, replace(mine, kernels={})):
        with keep_quiet():
            found = predict(bert, platform)
        assert found.time >= found.lower_bound > flops / 1e14 > 0.6
    for given, message in (
        ({}, "of no flops and memory, is 'mine'; known are"),
        ({"flops": {"bf16": 1e14}}, "memory is None; give rates by format"),
        ({"flops": {"bf17": 1.0}, "memory": (1.0, 1.0)}, "did you mean 'bf16'"),
        ({"flops": {"bf16": 0}, "memory": (1.0, 1.0)}, "flops\\['bf16'\\] is 0"),
        ({"flops": {"bf16": 1e14}, "memory": (1e9, 1e9), "ranks": 8}, "link is missing"),
        (
            {"flops": {"bf16": 400}, "memory": (96e9, 3e12)},
            "flops\\['bf16'\\] is 400 FLOP/s, too little",
        ),
        ({"flops": {"bf16": 4e14}, "memory": (96, 3000)}, "memory\\[0\\] is 96 B, too little"),
        (
            {"flops": {"bf16": 4e14}, "memory": (96e9, 3e12), "link": 450, "ranks": 8},
            "link is 450 B/s, too little",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Platform.from_datasheet("mine", **given)  # type: ignore[arg-type]


def test_the_simplest_roofline_is_one_line() -> None:
    """Everything takes its FLOP, bytes and messages at one share of the datasheet, and nothing else
    takes time."""
    simple = Platform.from_datasheet("h100-sxm-8", efficiency=0.5)
    link = simple.network.links["intra"]
    rate = simple.device.main_bandwidth / 2
    with keep_quiet():
        for dtype, peak in simple.device.peaks.items():
            for m, n, k in ((8192, 8192, 8192), (8192, 50257, 768), (4096, 1, 4096)):
                flops = 2 * m * n * k / (peak.value / 2)
                nbytes = (m * k + k * n + m * n) * DTYPES[dtype] / rate
                found = simple.gemm(m, n, k, dtype=dtype).time
                assert found == pytest.approx(max(flops, nbytes), rel=1e-3)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            for nbytes in (1e3, 1e9):
                starts = ring_steps(name, 8) * link.latency.value
                moved = bus_factor(name, 8) * nbytes / (link.bandwidth.value / 2)
                found = simple.collective(name, nbytes, ranks=8).time
                assert found == pytest.approx(starts + moved, rel=1e-6)
        bert = Transformer.bert("bert-large", batch=8, dtype="bf16")
        graph = bert.graphs(1)[0]
        peak = simple.device.peaks["bf16"].value / 2
        times = np.maximum(graph.column("flops") / peak, graph.traffic / rate)
        prediction = predict(bert, simple)
    assert prediction.time == pytest.approx(times.sum(), rel=2e-3)
    assert prediction.bottleneck != "host-bound"


@pytest.mark.parametrize("wrong", [0, -0.5, 1.5, 60, "half", True, float("nan")])
def test_an_efficiency_is_a_share(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^efficiency is"):
        Platform.from_datasheet("h100-sxm-8", efficiency=wrong)


def find_share(platform: Platform, dtype: str) -> float:
    """Rate of a product of large squares, as a share of the peak [-]."""
    with keep_quiet():
        time = platform.gemm(4096, 4096, 4096, dtype=dtype).time
    return 2 * 4096**3 / time / platform.device.peaks[dtype].value


def test_cards_without_a_plug_multiply_slowly_in_fp32() -> None:
    """Products in fp32 take the share of T4 and P4 on an L4 of 72 W; larger cards and other formats
    do not."""
    slot = Platform.from_datasheet("l4")
    larger = Platform.from_datasheet("l40s")
    assert find_share(slot, "fp32") == pytest.approx(0.38, rel=0.1)
    usual = find_share(larger, "bf16")
    assert usual > 0.6
    assert find_share(slot, "bf16") == pytest.approx(usual, rel=0.1)
    assert (
        slot.kernels["gemm.fp32"].spread == RATE_SPREADS["assumed"] > larger.kernels["gemm"].spread
    )
    assert dict(slot.kernels["convolution.fp32"]) == dict(larger.kernels["gemm"])
    assert "gemm.fp32" not in larger.kernels


def test_products_of_a_datasheet_reach_the_rate_that_others_measured_but_no_more_than_the_peak() -> (
    None
):
    card = Platform.from_datasheet("rtx-4090")
    with keep_quiet():
        for dtype, rate in read_datasheet("rtx-4090").products.items():
            found, peak = card.gemm(8192, 8192, 8192, dtype=dtype), card.device.peaks[dtype].value
            assert 2 * 8192**3 / found.time == pytest.approx(min(rate.value, peak), rel=0.01)
            assert found.spread < 0.2


def test_power_limits_products_in_fp32_as_published() -> None:
    """sitar-lab/NeuSight: the geometric mean of the fits of T4 and P4, and the fit of A100 as a
    PCIe card."""
    try:
        find_shared_data()
    except ValueError as missing:
        pytest.skip(str(missing))
    t4, reached = read_datasheet("t4").device, []
    for name, peak, rate in (
        ("p4", 5.5e12, 192e9),
        ("t4", t4.peaks["fp32"].value, t4.main_bandwidth),
    ):
        level = replace(t4.memory[-1], bandwidth=replace(t4.memory[-1].bandwidth, value=rate))
        device = replace(t4, peaks={"fp32": replace(t4.peaks["fp32"], value=peak)}, memory=(level,))
        fit = fit_gemms(
            read_products(f"tesla_{name}"), device, source="NeuSight", date="2026-11-24"
        )["gemm.fp32"]
        reached.append(fit["compute_efficiency"])
    assert (reached[0] * reached[1]) ** 0.5 == pytest.approx(0.38, abs=0.005)
    assert max(reached) < 0.45
    table = read_products("nvidia_a100_pcie_40gb")
    fit = fit_gemms(
        table, read_datasheet("a100-pcie-40gb").device, source="NeuSight", date="2026-11-25"
    )["gemm.fp32"]
    assert {name: fit[name] for name in PCIE} == pytest.approx(PCIE, rel=1e-4)
    assert (
        PCIE["compute_efficiency"]
        < 0.85 * load_platform("a100-sxm-8").kernels["gemm.fp32"]["compute_efficiency"]
    )


@pytest.fixture(scope="module")
def sources() -> None:
    """At least one source of measurements; without any the test is skipped."""
    try:
        find_shared_data()
    except ValueError as missing:
        try:
            find_database()
        except FileNotFoundError as also:
            pytest.skip(f"{missing}; {also}")


@pytest.mark.parametrize("name", RECIPES)
def test_the_committed_file_is_what_its_sources_give(name: str, sources: None) -> None:
    """Every fit whose source is there, and the whole file where all of them are."""
    committed = load_platform(name)
    built, missing = read_parts(name)
    if not missing:
        whole = tomllib.loads(finish(built).to_toml())
        assert not list(find_differences(whole, tomllib.loads(committed.to_toml())))
    fitted = {k: f for k, f in {**built.kernels, **built.collectives}.items() if f.kind == "fitted"}
    if not fitted:
        pytest.skip("; ".join(dict.fromkeys(missing)))
    for key, fit in fitted.items():
        old = {**committed.kernels, **committed.collectives}[key]
        if old.source.startswith("perfkit,"):  # our own measurement of the class takes its place
            assert key == "gemm.fp8"
            continue
        assert (fit.form, fit.n, fit.source, fit.date) == (old.form, old.n, old.source, old.date)
        assert dict(fit) == pytest.approx(dict(old), rel=1e-2), f"{name} {key}"
        assert fit.stderr == pytest.approx(old.stderr, rel=1e-2), f"{name} {key}"


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in find_reference("platforms").glob("*.toml"))
)
def test_every_gpu_of_the_gallery_has_a_recipe(name: str) -> None:
    platform = load_platform(name)
    assert name in NAMES or platform.device.kind == "cpu"
    if name in RECIPES:
        sheet = read_datasheet(RECIPES[name].system)
        assert platform.device == sheet.device
        assert platform.provenance["terms"]
        assert platform.provenance["evidence"]


def test_a_platform_says_where_its_forms_do_not_fit() -> None:
    l40s = load_platform("l40s-8")
    poor = [
        key for key, fit in l40s.collectives.items() if fit.spread > 0.25 and fit.kind == "fitted"
    ]
    assert poor
    assert all("poor fit" in l40s.collectives[key].notes[-1] for key in poor)
    assert all(key in l40s.provenance["poor_fits"] for key in poor)
    assert "poor_fits" not in load_platform("a100-sxm-8").provenance


def test_differences_name_their_place_and_forgive_rounding() -> None:
    old = {"a": {"spread": 0.1, "beta": 1e-12}, "b": [1.0, 2.0], "c": "x"}
    assert not list(
        find_differences(
            {"a": {"spread": 0.101, "beta": 1.001e-12}, "b": [1.0, 2.0], "c": "x"}, old
        )
    )
    new = {"a": {"spread": 0.2, "beta": 2e-12}, "b": [1.0], "c": "y", "d": 1}
    assert [line.partition(":")[0] for line in find_differences(new, old)] == [
        "a.beta",
        "a.spread",
        "b",
        "c",
        "d",
    ]


def test_the_builder_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setenv("PERFKIT_SHARED_DATA", str(tmp_path))
    monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(tmp_path))
    assert main(["h100-sxm-8x8"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("gallery: h100-sxm-8x8 cannot be built: ")
    assert "PERFKIT_SHARED_DATA" in text
    assert "PERFKIT_KERNEL_DATABASE" in text
    assert main(["nonsense"]) == 2
    assert "name is 'nonsense'; known are a100-sxm-8" in capsys.readouterr().err


def test_the_old_name_of_the_bandwidth_of_a_link_warns() -> None:
    sheet = read_datasheet("h100-sxm")
    with pytest.warns(DeprecationWarning, match="Datasheet: wire is now called link_bandwidth"):
        assert sheet.wire is sheet.link_bandwidth  # type: ignore[attr-defined]


def test_the_command_names_the_devices_of_datasheets_below_its_table(capsys) -> None:
    assert run_command(["platforms"]) == 0
    table, _, below = capsys.readouterr().out.partition("\nalso by datasheet, ")
    below, _, joined = below.partition("\n\nnodes joined by the network of a provider, ")
    assert joined.startswith("as h100-sxm-8x64@p5: p4d, p4de, ")
    assert len(table.splitlines()) == 1 + len(list_gallery())
    assert all(len(line) <= 100 for line in below.splitlines())
    advice, _, names = " ".join(below.split()).partition(": ")
    assert advice == "with a number of ranks, as rtx-4090-1"
    assert tuple(names.split(", ")) == list_datasheets()
    assert load_platform("rtx-4090-1").network.ranks == 1
