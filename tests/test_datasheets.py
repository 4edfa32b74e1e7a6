"""Numbers of datasheets lie where those of their kind of device can lie: a wrong power of ten, a rate
with sparsity or both ways of a link does not pass."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest

import perfkit as pk
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import Quantity
from perfkit.platform import datasheets
from perfkit.platform.datasheets import (
    Datasheet,
    list_datasheets,
    note_large_node,
    read_datasheet,
)
from perfkit.platform.estimates import keep_quiet

#: Capacity of the memory of a device [B]: the smallest here has 16 GB, the largest 288 GB.
CAPACITY = (1e9, 1e12)
#: Bandwidth of this memory [B/s]: the slowest has 0.3 TB/s, the fastest 8 TB/s.
BANDWIDTH = (0.1e12, 20e12)
#: Peak in 16 bits over this bandwidth, the ridge point of the roofline [FLOP/B]: the MI100 has 75,
#: the TPU v6e 560.
RIDGE = (50, 600)
#: Most of a peak over that in 16 bits, by number format [-]. Half the bits give twice the rate; the
#: B300 has 14 PFLOPS in 4 bits beside 2.25 in 16.
OVER_16_BITS = {"fp64": 1.0, "fp32": 1.0, "tf32": 1.0, "fp8": 2.0, "int8": 2.0, "fp4": 6.25}
#: The same of GeForce cards, whose sums in fp32 halve the rate of 16 bits and of fp8, but not of
#: int8 and fp4. Source: NVIDIA Ada GPU Architecture v2.02 and RTX Blackwell v1.1.
OVER_16_BITS_OF_GEFORCE = {**OVER_16_BITS, "int8": 4.0, "fp4": 8.0}
#: Most of the peak in 16 bits over that in fp32 of these cards [-], from the same source.
OVER_FP32_OF_GEFORCE = 2.0
#: Sheets round their numbers [-]: the 733 TFLOPS of the L40S in fp8 are 1.2 % more than twice its
#: 362.05 in 16 bits.
ROUNDING = 0.02
#: Bandwidth of 16 lanes of PCIe, one way, by generation [B/s]: 1 GB/s a lane in the third, and twice
#: as much in each that follows. Source: PCI-SIG.
PCIE = {"Gen3 x16": 16e9, "Gen4 x16": 32e9, "Gen5 x16": 64e9, "Gen6 x16": 128e9}
#: Most that an adapter carries, one way [B/s]: 800 Gb/s, NVIDIA ConnectX-8.
ADAPTER = 100e9
#: Most that the links of other makers carry, one way [B/s]: AWS Trainium2 has 640 GB/s.
FABRIC = 700e9


class Generation(NamedTuple):
    """What devices of NVIDIA with one compute capability have at most.

    Parameters
    ----------
    over_fp32 : float
        Peak in 16 bits of tensor cores, dense, over that in fp32 without them [-].
    nvlink : float
        Bandwidth of NVLink, one way [B/s].
    """

    over_fp32: float
    nvlink: float


#: By compute capability. Source: NVIDIA's papers on each architecture, the links as links x 25 GB/s
#: (50 GB/s of Blackwell).
GENERATIONS = {
    7.0: Generation(8, 6 * 25e9),  # Volta
    7.5: Generation(8, 2 * 25e9),  # Turing
    8.0: Generation(16, 12 * 25e9),  # A100
    8.6: Generation(4, 56.25e9),  # A40, RTX 3090
    8.9: Generation(4, 0.0),  # Ada
    9.0: Generation(16, 18 * 25e9),  # Hopper
    10.0: Generation(32, 18 * 50e9),  # B200
    10.3: Generation(32, 18 * 50e9),  # B300
    12.0: Generation(4, 0.0),  # RTX of Blackwell
}
#: Units of numbers that a basis quotes.
UNITS = {
    "TFLOPS": 1e12,
    "TOPS": 1e12,
    "PFLOPS": 1e15,
    "POPS": 1e15,
    "Gb/s": 1e9 / 8,
    "GB/s": 1e9,
    "TB/s": 1e12,
}
#: What a basis quotes, and by what it is divided, as in "6 links of 100 GB/s ..., divided by 4".
QUOTED = re.compile(rf"(?:(\d+) links of )?([\d.]+) ({'|'.join(UNITS)})\b.*\bdivided by (\d+)")


def find_faults(sheet: Datasheet) -> list[str]:
    """What cannot be right in a datasheet, one line each."""
    return [
        *find_faults_of_memory(sheet),
        *find_faults_of_peaks(sheet),
        *find_faults_of_links(sheet),
        *find_faults_of_basis(sheet.device.peaks),
        *find_faults_of_basis(sheet.links),
    ]


def find_peak_in_16_bits(sheet: Datasheet) -> float:
    """Peak in bf16, or fp16 on devices without it [FLOP/s]."""
    peaks = sheet.device.peaks
    return peaks["bf16"].value if "bf16" in peaks else peaks["fp16"].value


def is_between(value: float, limits: tuple[float, float]) -> bool:
    """Whether a number lies between two limits."""
    least, most = limits
    return least <= value <= most


def find_faults_of_memory(sheet: Datasheet) -> list[str]:
    """Capacity, bandwidth and ridge point."""
    faults = []
    memory = sheet.device.memory[-1]
    assert memory.capacity is not None
    capacity = memory.capacity.value
    bandwidth = sheet.device.main_bandwidth
    ridge = find_peak_in_16_bits(sheet) / bandwidth
    if not is_between(capacity, CAPACITY):
        faults.append(f"capacity of memory is {capacity:g} B")
    if not is_between(bandwidth, BANDWIDTH):
        faults.append(f"bandwidth of memory is {bandwidth:g} B/s")
    if not is_between(ridge, RIDGE):
        faults.append(f"ridge point is {ridge:g} FLOP/B")
    return faults


def find_faults_of_peaks(sheet: Datasheet) -> list[str]:
    """Peaks beside that in 16 bits."""
    device, faults = sheet.device, []
    base = find_peak_in_16_bits(sheet)
    is_geforce = "GeForce" in device.name
    limits = OVER_16_BITS_OF_GEFORCE if is_geforce else OVER_16_BITS
    for dtype, most in limits.items():
        if dtype in device.peaks and device.peaks[dtype].value > (1 + ROUNDING) * most * base:
            faults.append(f"peak in {dtype} is more than {most:g} of that in 16 bits")
    if device.capability is not None:
        most = GENERATIONS[device.capability.value].over_fp32
        if is_geforce:
            most = OVER_FP32_OF_GEFORCE
        if base > (1 + ROUNDING) * most * device.peaks["fp32"].value:
            faults.append(f"peak in 16 bits is more than {most:g} of that in fp32")
    return faults


def find_faults_of_links(sheet: Datasheet) -> list[str]:
    """Links, one way."""
    faults = []
    most = {"fabric": FABRIC, "NIC": ADAPTER}
    if sheet.device.capability is not None:
        most["NVLink"] = GENERATIONS[sheet.device.capability.value].nvlink
    for name, link in sheet.links.items():
        if name == "PCIe":
            # the source ends with the note of the row
            lanes = re.search(r"Gen\d x16", link.source)
            if lanes is None or link.value != PCIE[lanes[0]]:
                faults.append(f"PCIe has {link.value:g} B/s, {link.source}")
        elif link.value > most[name]:
            faults.append(f"{name} has {link.value:g} B/s")
    return faults


def find_faults_of_basis(numbers: Mapping[str, Quantity]) -> list[str]:
    """Numbers beside what their basis quotes."""
    faults = []
    for name, number in numbers.items():
        quoted = QUOTED.search(number.basis)
        if quoted is None:
            if "with sparsity" in number.basis:
                faults.append(f"{name} is quoted with sparsity and not divided")
            continue
        links, value, unit, divisor = quoted.groups()
        expected = int(links or 1) * float(value) * UNITS[unit] / int(divisor)
        if number.value != pytest.approx(expected, rel=1e-3):
            faults.append(f"{name} is {number.value:g}; its basis says {expected:g}")
    return faults


@pytest.mark.parametrize("system", list_datasheets())
def test_numbers_lie_where_such_devices_have_theirs(system: str) -> None:
    assert find_faults(read_datasheet(system)) == []


def scale(number: Quantity, factor: float) -> Quantity:
    """A number that is wrong by a factor, with a basis that quotes nothing."""
    return replace(number, value=factor * number.value, basis="")


def scale_memory(sheet: Datasheet, *, capacity: float = 1.0, bandwidth: float = 1.0) -> Datasheet:
    """A datasheet with another memory."""
    *caches, level = sheet.device.memory
    assert level.capacity is not None
    assert level.bandwidth is not None
    other = replace(
        level,
        capacity=scale(level.capacity, capacity),
        bandwidth=scale(level.bandwidth, bandwidth),
    )
    return replace(sheet, device=replace(sheet.device, memory=(*caches, other)))


def scale_peaks(sheet: Datasheet, dtypes: tuple[str, ...], factor: float) -> Datasheet:
    """A datasheet with other peaks in some number formats."""
    peaks = dict(sheet.device.peaks)
    for dtype in dtypes:
        if dtype in peaks:
            peaks[dtype] = scale(peaks[dtype], factor)
    return replace(sheet, device=replace(sheet.device, peaks=peaks))


def scale_link(sheet: Datasheet, name: str, factor: float) -> Datasheet:
    """A datasheet with another link."""
    return replace(sheet, links={**sheet.links, name: scale(sheet.links[name], factor)})


@pytest.mark.parametrize("system", list_datasheets())
def test_a_wrong_power_of_ten_is_found(system: str) -> None:
    sheet = read_datasheet(system)
    for factor in (1e-3, 1e3):
        assert find_faults(scale_memory(sheet, bandwidth=factor))
    for factor in (1e-9, 1e3):  # 24 for 24 GB; GB for MB
        assert find_faults(scale_memory(sheet, capacity=factor))


@pytest.mark.parametrize("system", list_datasheets())
def test_rates_with_sparsity_are_found(system: str) -> None:
    """All of tensor cores on devices of NVIDIA, which print such rates, and fp8 alone on others but
    Gaudi 3, which has one rate for 8 and 16 bits."""
    sheet = read_datasheet(system)
    if sheet.device.capability is not None:
        assert find_faults(scale_peaks(sheet, ("tf32", "bf16", "fp16", "fp8", "int8", "fp4"), 2))
    if "fp8" in sheet.device.peaks and system != "gaudi3":
        assert find_faults(scale_peaks(sheet, ("fp8",), 2))


@pytest.mark.parametrize("system", list_datasheets())
def test_both_ways_of_a_link_are_found(system: str) -> None:
    """By its most where its basis quotes nothing, as of NVLink and PCIe; by its basis on others."""
    sheet = read_datasheet(system)
    for name, link in sheet.links.items():
        if name in ("NVLink", "PCIe"):
            assert find_faults(scale_link(sheet, name, 2))
        elif "divided by" in link.basis:
            twice = {name: replace(link, value=2 * link.value)}
            assert find_faults(replace(sheet, links={**sheet.links, **twice}))


def test_a_node_that_nobody_builds_is_said_with_one_that_there_is() -> None:
    """NVLink joins 8 GPUs of H100, and 72 of GB200."""
    gpt = pk.Transformer.gpt2(batch=128, dtype="bf16")
    strategy = pk.Strategy(dp=64)

    def list_said(platform: pk.Platform | str) -> list[str]:
        with keep_quiet():
            found = pk.predict(gpt, platform, strategy=strategy)
        return [text for text in found.warnings if text.startswith("a node has")]

    [note] = list_said("h100-sxm-64")
    assert note.startswith("a node has 64 ranks, and links of NVIDIA H100 SXM5 80 GB join 8")
    assert note.endswith("take 'h100-sxm-8x8'")
    assert list_said("h100-sxm-8x8") == []
    assert list_said("gb200-64") == []
    sheet = read_datasheet("a100-sxm")
    assert sheet.node is not None
    assert sheet.node.value == 16
    assert note_large_node(sheet.device, 32, 64)[0].endswith("take 'a100-sxm-16x4'")
    unknown = read_datasheet("rtx-4090")
    assert unknown.node is None
    assert note_large_node(unknown.device, 64, 64) == ()


def test_rates_of_caches_are_those_of_known_devices() -> None:
    """A name that no datasheet has would be passed over."""
    with find_reference("published", "l2_bandwidth.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    systems = [system for row in rows for system in row["systems"].split()]
    assert len(set(systems)) == len(systems)
    assert set(systems) <= set(list_datasheets())
    for system in systems:
        assert read_datasheet(system).device.memory[0].bandwidth is not None


def test_a_rate_without_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would replace the bandwidth of the memory."""
    bare = "mi300x"
    assert read_datasheet(bare).device.memory[0].name != "L2"
    rate = datasheets._read_caches()["h100-sxm"]
    monkeypatch.setattr(datasheets, "_read_caches", lambda: {bare: rate})
    with pytest.raises(ValueError, match="has no L2 capacity before its memory; add that row"):
        read_datasheet(bare)
