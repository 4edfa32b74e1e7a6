"""Signatures of causes, each on a log with invented figures, and beside a near miss."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from perfkit.diagnosis import (
    causes_adapters,
    causes_curve,
    causes_node,
    causes_run,
    causes_sockets,
)
from perfkit.diagnosis.causes import ALARMS, FALLBACKS, REMARKS, SIGNATURES, find_causes, settle
from perfkit.diagnosis.causes_between import compare_runs
from perfkit.diagnosis.known_rates import Path as Way
from perfkit.diagnosis.known_rates import find_ethernet, find_shares
from perfkit.diagnosis.nccl_variables import VARIABLES, find_variables
from perfkit.diagnosis.records import (
    Adapters,
    Case,
    Cause,
    Certainty,
    Expectation,
    Links,
    Range,
    Rate,
    Word,
)
from perfkit.diagnosis.shapes import find_addition, find_kink, find_late_switch
from perfkit.diagnosis.verdicts import judge_ranges
from perfkit.readers.nccl import read_logs
from tests.nccl_cases import Curve, Run, follow, make_case, say

GB = 1e9
SHEET = "a datasheet"
FOUR = ("oak-1", "oak-2", "oak-3", "oak-4")
A100 = "NVIDIA A100-SXM4-80GB"
H100 = "NVIDIA H100 80GB HBM3"


def expect(
    device: str,
    busbw: float,
    *,
    startup: float = 20e-6,
    nvlink: float | None = 300 * GB,
    pcie: float | None = 31.5 * GB,
    adapters: Adapters | None = None,
    local: int = 8,
    limit: float | None = None,
    algorithm: str | None = None,
) -> Expectation:
    """What is expected of a system with these links."""
    links = Links(
        None if nvlink is None else Rate(nvlink, SHEET),
        None if pcie is None else Rate(pcie, SHEET),
        adapters,
    )
    return Expectation(
        device,
        "invented",
        local,
        links,
        algorithm,
        startup=startup,
        busbw=busbw,
        limit=limit,
    )


def name_adapters(count: int, usual: int, line: float, *, is_named: bool = True) -> Adapters:
    """Adapters of a node."""
    return Adapters(count, usual, Rate(line, SHEET), "IB" if is_named else None, is_named)


def list_adapters(host: str, names: list[str], fabric: str = "IB") -> str:
    """The line in which NCCL lists the adapters of a host."""
    listed = " ".join(f"[{place}]{name}:1/{fabric}" for place, name in enumerate(names))
    return say(f"NET/IB : Using {listed} [RO]; OOB eth0:10.0.0.1<0>", host)


def find(case: Case, name: str) -> Cause:
    """The cause of a name."""
    causes = {cause.name: cause for cause in find_causes(case)}
    assert name in causes, f"found {list(causes)}"
    return causes[name]


def names(case: Case) -> list[str]:
    """Names of the causes that are found, in order."""
    return [cause.name for cause in find_causes(case)]


def words(cause: Cause) -> str:
    """All evidence of a cause."""
    return " | ".join(each.text for each in cause.evidence)


HDR = follow(25e-6, 192 * GB)  # four nodes, 8 x 200 Gb/s
EIGHT_HDR = name_adapters(8, 8, 25 * GB)


# -- between nodes
# --------------------------------------------------------------------------------------------------


def make_hdr(
    folder: Path,
    rate: float,
    *said: str,
    adapters: Adapters = EIGHT_HDR,
    startup: float = 25e-6,
    command: str = "",
) -> Case:
    """Four nodes of eight A100 with eight adapters of 200 Gb/s."""
    run = Run(follow(startup, rate), hosts=FOUR, said=said, command=command)
    return make_case(folder, run, HDR, expect(A100, 192 * GB, adapters=adapters))


def test_an_adapter_is_missing_on_every_node(tmp_path: Path) -> None:
    seven = [f"mlx5_{number}" for number in (0, 1, 2, 3, 5, 6, 7)]
    case = make_hdr(tmp_path, 168 * GB, *(list_adapters(host, seven) for host in FOUR))
    cause = find(case, "missing adapter")
    assert cause.certainty is Certainty.SEEN
    assert cause.sentence == "1 of 8 adapters is missing on every node: mlx5_4 is not listed"
    assert "7 × 24 GB/s, what an adapter of 200 Gb/s gives" in words(cause)
    assert cause.advice[0].startswith("ibstat mlx5_4")
    assert "NCCL_IB_HCA" in cause.advice[1]
    assert not any("cable" in advice for advice in cause.advice)
    assert cause.evidence[0].line == 37
    assert names(case) == ["missing adapter"]


def test_an_adapter_is_missing_on_one_host(tmp_path: Path) -> None:
    eight = [f"mlx5_{number}" for number in range(8)]
    said = [list_adapters(host, eight[:-1] if host == "oak-3" else eight) for host in FOUR]
    case = make_hdr(tmp_path, 168 * GB, *said)
    cause = find(case, "missing adapter")
    assert "mlx5_7, is missing on oak-3" in cause.sentence
    assert "cable" in cause.advice[1]


def test_another_adapter_on_some_hosts_is_no_missing_one_on_others(tmp_path: Path) -> None:
    nine = [f"mlx5_{number}" for number in range(9)]
    said = [list_adapters(host, nine if host == "oak-3" else nine[:-1]) for host in FOUR]
    assert names(make_hdr(tmp_path, 190 * GB, *said)) == []
    two_each = [f"mlx5_{number}" for number in range(16)]
    said = [list_adapters(host, two_each[:8] if host == "oak-3" else two_each) for host in FOUR]
    assert (
        "8 of 16 adapters" in find(make_hdr(tmp_path, 100 * GB, *said), "missing adapter").sentence
    )


def test_adapters_of_efa_are_counted(tmp_path: Path) -> None:
    four = name_adapters(4, 4, 12.5 * GB, is_named=False)
    three = say("NET/OFI Selected Provider is efa (found 3 nics)")
    cause = find(make_hdr(tmp_path, 35 * GB, three, adapters=four), "missing adapter")
    assert cause.sentence == "1 of 4 adapters is missing on oak-1"
    whole = say("NET/OFI Selected Provider is efa (found 4 nics)")
    assert "missing adapter" not in names(make_hdr(tmp_path, 35 * GB, whole, adapters=four))


def test_more_adapters_than_gpus(tmp_path: Path) -> None:
    ten = [f"mlx5_{number}" for number in range(10)]
    case = make_hdr(tmp_path, 120 * GB, *(list_adapters(host, ten) for host in FOUR))
    assert "10 adapters for 8 GPUs" in find(case, "wrong interface").sentence
    two_ports = [f"mlx5_{number}" for number in range(16)]
    case = make_hdr(tmp_path, 120 * GB, *(list_adapters(host, two_ports) for host in FOUR))
    assert "wrong interface" not in names(case)


def test_gaps_in_the_numbers_of_enough_adapters_are_no_fault(tmp_path: Path) -> None:
    # mlx5_1 and mlx5_2 belong to storage, as on a DGX H100: eight are left for eight GPUs
    eight = [f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)]
    case = make_hdr(tmp_path, 100 * GB, *(list_adapters(host, eight) for host in FOUR))
    assert "missing adapter" not in names(case)


def test_half_as_many_adapters_as_gpus_are_no_missing_ones(tmp_path: Path) -> None:
    four = [f"mlx5_{number}" for number in range(4)]
    case = make_hdr(
        tmp_path,
        80 * GB,
        *(list_adapters(host, four) for host in FOUR),
        adapters=name_adapters(4, 8, 25 * GB),
    )
    assert "missing adapter" not in names(case)


def test_an_adapter_of_a_lower_rate(tmp_path: Path) -> None:
    def make(rates: list[int], rate: float = 96 * GB) -> Case:
        speeds = [
            say(f"NET/IB : Made virtual device [{place}] name=mlx5_{place} speed={speed} ndevs=1")
            for place, speed in enumerate(rates)
        ]
        listed = list_adapters("oak-1", [f"mlx5_{place}" for place in range(len(rates))])
        return make_hdr(tmp_path, rate, *speeds, listed)

    cause = find(make([200_000, 200_000, 100_000, 200_000]), "slower adapter")
    assert cause.sentence == "mlx5_2 of oak-1 runs at 100 Gb/s, the others at 200 Gb/s"
    assert "slower adapter" not in names(make(4 * [200_000]))
    assert names(make([200_000, 200_000, 100_000, 200_000], 190 * GB)) == []


def test_few_adapters_for_many_gpus(tmp_path: Path) -> None:
    said = [list_adapters(host, ["mlx5_0", "mlx5_1"]) for host in FOUR]
    two = name_adapters(2, 8, 25 * GB)
    case = make_hdr(tmp_path, 48 * GB, *said, adapters=two)
    cause = find(case, "few adapters")
    assert cause.sentence == "2 adapters carry the data of 8 GPUs"
    assert cause.certainty is Certainty.POSSIBLE
    assert "48 GB/s = 2 × 24 GB/s" in words(cause)
    case = make_hdr(tmp_path, 48 * GB, *said, say("NCCL_IB_HCA set to mlx5_0,mlx5_1"), adapters=two)
    assert find(case, "few adapters").certainty is Certainty.LIKELY
    # the beginning of all names, which leaves out none
    for driver in (say("NCCL_IB_HCA set to mlx5"), say("NCCL_IB_HCA set to mlx5_")):
        case = make_hdr(tmp_path, 48 * GB, *said, driver, adapters=two)
        assert find(case, "few adapters").certainty is Certainty.POSSIBLE
        assert names(make_hdr(tmp_path, 190 * GB, *said, driver, adapters=two)) == []
    assert names(make_hdr(tmp_path, 190 * GB, *said, adapters=two)) == []
    chosen = make_hdr(
        tmp_path, 190 * GB, *said, say("NCCL_IB_HCA set to mlx5_0,mlx5_1"), adapters=two
    )
    (remark,) = find_causes(chosen)
    assert (remark.name, remark.explains) == ("few adapters", frozenset())


def test_a_missing_adapter_is_a_remark_where_the_rate_is_right(tmp_path: Path) -> None:
    seven = [f"mlx5_{number}" for number in range(7)]
    case = make_hdr(tmp_path, 190 * GB, *(list_adapters(host, seven) for host in FOUR))
    (remark,) = find_causes(case)
    assert remark.name == "missing adapter"
    assert remark.explains == frozenset()


def test_what_is_low_is_slow_where_the_log_names_a_cause(tmp_path: Path) -> None:
    eight = [f"mlx5_{number}" for number in range(8)]
    for names_of_adapters, word in ((eight, Word.LOW), (eight[:-1], Word.SLOW)):
        case = make_hdr(
            tmp_path, 168 * GB, *(list_adapters(host, names_of_adapters) for host in FOUR)
        )
        is_large = pl.col("sizes") == Range.BANDWIDTH.value
        said = pl.when(is_large).then(pl.lit(Word.LOW.value)).otherwise(pl.lit("as expected"))
        case = replace(case, rows=case.rows.with_columns(said.alias("verdict")))
        settled = settle(replace(case, verdicts=judge_ranges(case)))
        assert [settled.verdicts[0].word, settled.verdicts[-1].word] == [Word.EXPECTED, word]
        assert set(settled.rows.filter(is_large)["verdict"]) == {word.value}


def test_fewer_rails_by_the_rate_alone(tmp_path: Path) -> None:
    unnamed = name_adapters(8, 8, 25 * GB, is_named=False)
    cause = find(make_hdr(tmp_path, 96 * GB, adapters=unnamed), "fewer rails")
    assert cause.certainty is Certainty.POSSIBLE
    assert "the rate is that of 4 of 8 adapters of 200 Gb/s" in cause.sentence


def test_a_rate_between_whole_numbers_of_adapters_is_no_rail(tmp_path: Path) -> None:
    unnamed = name_adapters(8, 8, 25 * GB, is_named=False)
    # 85 GB/s are 3.5 to 3.7 adapters
    assert names(make_hdr(tmp_path, 85 * GB, adapters=unnamed)) == ["not enough to say"]


def test_sockets_by_a_variable(tmp_path: Path) -> None:
    case = make_hdr(
        tmp_path,
        2.75 * GB,
        say("NCCL_IB_DISABLE set by environment to 1."),
        say("NET/Socket : Using [0]eno1:10.0.0.1<0>"),
        say("Using network Socket"),
        say(
            "2 coll channels, 0 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer"
        ),
        startup=140e-6,
    )
    cause = find(case, "sockets")
    assert cause.certainty is Certainty.SEEN
    assert "because of NCCL_IB_DISABLE=1" in cause.sentence
    assert cause.advice[0] == "unset NCCL_IB_DISABLE"
    # 2.75 GB/s are 22 Gb/s
    assert "as a card of 25 Gb/s gives" in words(cause)
    assert "data pass over eno1" in words(cause)
    assert names(case) == ["sockets"]  # the start-up and two channels come of it


def test_sockets_as_no_adapter_is_found(tmp_path: Path) -> None:
    case = make_hdr(
        tmp_path, 2.75 * GB, say("NET/IB : No device found."), say("Using network Socket")
    )
    assert "it finds no adapter" in find(case, "sockets").sentence


def test_sockets_by_figures_alone(tmp_path: Path) -> None:
    unnamed = name_adapters(8, 8, 25 * GB, is_named=False)
    case = make_hdr(tmp_path, 2.75 * GB, adapters=unnamed, startup=140e-6)
    assert find(case, "sockets").certainty is Certainty.LIKELY
    case = make_hdr(tmp_path, 2.75 * GB, adapters=unnamed)
    assert find(case, "sockets").certainty is Certainty.POSSIBLE


def test_a_break_down_is_no_rate_of_ethernet(tmp_path: Path) -> None:
    unnamed = name_adapters(8, 8, 25 * GB, is_named=False)
    run = Run(with_kink(200e6, 40), hosts=FOUR)
    case = make_case(tmp_path, run, HDR, expect(A100, 192 * GB, adapters=unnamed))
    assert names(case) == ["worse algorithm"]


def test_a_slow_run_over_infiniband_has_no_sockets(tmp_path: Path) -> None:
    case = make_hdr(tmp_path, 2.75 * GB, say("Using network IB"))
    assert "sockets" not in names(case)


def test_sockets_over_a_bridge_of_containers(tmp_path: Path) -> None:
    case = make_hdr(
        tmp_path,
        1.1 * GB,
        say("NET/Socket : Using [0]docker0:172.17.0.2<0>"),
        say("Using network Socket"),
    )
    assert "docker0" in find(case, "wrong interface").sentence
    case = make_hdr(
        tmp_path,
        1.1 * GB,
        say("NET/Socket : Using [0]eno1:10.0.0.1<0>"),
        say("Using network Socket"),
    )
    assert "wrong interface" not in names(case)


def test_two_fabrics_at_once(tmp_path: Path) -> None:
    mixed = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_bond_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
    case = make_hdr(tmp_path, 40 * GB, say(mixed), adapters=name_adapters(3, 3, 25 * GB))
    assert "mlx5_bond_0 may belong" in find(case, "wrong interface").sentence


@pytest.mark.parametrize(
    "line",
    [
        "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
        "NCCL_NET_GDR_LEVEL set by environment to LOC",
        "Channel 00/0 : 24[0] -> 0[0] [receive] via NET/IB/0",
    ],
)
def test_no_gpu_direct(tmp_path: Path, line: str) -> None:
    case = make_hdr(tmp_path, 80 * GB, say(line), say("Using network IB"))
    cause = find(case, "GPU Direct RDMA off")
    assert cause.certainty is Certainty.SEEN
    assert names(case) == ["GPU Direct RDMA off"]


def test_gpu_direct_that_is_used_is_no_cause(tmp_path: Path) -> None:
    case = make_hdr(
        tmp_path, 80 * GB, say("Channel 00/0 : 24[0] -> 0[0] [receive] via NET/IB/0/GDRDMA")
    )
    assert "GPU Direct RDMA off" not in names(case)
    case = make_hdr(tmp_path, 190 * GB, say("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"))
    assert names(case) == []  # it is as fast as expected


def test_half_of_all_adapters(tmp_path: Path) -> None:
    eight = [f"mlx5_{number}" for number in range(8)]
    said = [list_adapters(host, eight) for host in FOUR]
    gpu_direct = say("Channel 00/0 : 24[0] -> 0[0] [receive] via NET/IB/0/GDRDMA")
    cause = find(make_hdr(tmp_path, 98 * GB, *said, gpu_direct), "half of the adapters' rate")
    assert cause.certainty is Certainty.POSSIBLE
    assert "each of 8 adapters sends 12.2 GB/s of 25 GB/s" in words(cause)
    assert "half of the adapters' rate" not in names(make_hdr(tmp_path, 165 * GB, *said))


def test_a_bond_is_named_first(tmp_path: Path) -> None:
    bonds = [f"mlx5_bond_{number}" for number in range(4)]
    said = [list_adapters(host, bonds, "RoCE") for host in FOUR]
    case = make_hdr(tmp_path, 100 * GB, *said, adapters=name_adapters(4, 4, 50 * GB))
    assert find(case, "half of the adapters' rate").advice[0].startswith("NCCL_IB_QPS")


def test_all_gpus_on_one_bus_are_a_virtual_machine(tmp_path: Path) -> None:
    flat = tuple(f"0000:00:{device:02x}" for device in range(5, 13))
    run = Run(follow(25e-6, 90 * GB), hosts=FOUR, buses=4 * flat)
    case = make_case(tmp_path, run, HDR, expect(A100, 192 * GB))
    assert "flat topology" in names(case)
    apart = tuple(f"0000:{bus:02x}:00" for bus in range(5, 13))
    run = Run(follow(25e-6, 90 * GB), hosts=FOUR, buses=4 * apart)
    assert "flat topology" not in names(make_case(tmp_path, run, HDR, expect(A100, 192 * GB)))


# -- within a node
# --------------------------------------------------------------------------------------------------


def make_cards(
    folder: Path, device: str, rate: float, *said: str, ranks: int = 8, pcie: float = 31.5 * GB
) -> Case:
    """Cards without NVLink in one node."""
    run = Run(follow(20e-6, rate), device=device, local=ranks, said=said)
    usual = 0.65 * pcie
    expectation = expect(device, usual, nvlink=None, pcie=pcie, local=ranks)
    return make_case(folder, run, follow(20e-6, usual), expectation)


@pytest.mark.parametrize(
    ("device", "certainty"),
    [
        ("NVIDIA GeForce RTX 4090", Certainty.LIKELY),
        ("NVIDIA GeForce RTX 3090", Certainty.LIKELY),
        ("NVIDIA L40S", Certainty.POSSIBLE),
    ],
)
def test_cards_through_the_host(tmp_path: Path, device: str, certainty: Certainty) -> None:
    cause = find(make_cards(tmp_path, device, 5.3 * GB), "host memory")
    assert cause.certainty is certainty
    assert "17% of the 32 GB/s of PCIe" in words(cause)
    assert ("GeForce" in cause.sentence) is (certainty is Certainty.LIKELY)


def test_shared_memory_that_nccl_lists(tmp_path: Path) -> None:
    case = make_cards(
        tmp_path, "NVIDIA L40S", 9 * GB, say("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct")
    )
    assert find(case, "host memory").certainty is Certainty.SEEN
    case = make_cards(tmp_path, "NVIDIA L40S", 9 * GB, say("Channel 00 : 0[0] -> 1[1] via P2P/IPC"))
    assert "host memory" not in names(case)


def test_peers_that_a_variable_turns_off(tmp_path: Path) -> None:
    run = Run(
        follow(20e-6, 14 * GB),
        said=(
            say("NCCL_P2P_DISABLE set by environment to 1"),
            say("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"),
            say(CHANNELS.format(2, 0)),  # copies through the host need no more
        ),
    )
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    (cause,) = find_causes(case)
    assert cause.name == "host memory"
    assert "because of NCCL_P2P_DISABLE=1" in cause.sentence
    assert cause.advice[0] == "unset NCCL_P2P_DISABLE"


def test_direct_copies_that_are_somewhat_slow_are_not_through_the_host(tmp_path: Path) -> None:
    assert "host memory" not in names(make_cards(tmp_path, "NVIDIA L40S", 14 * GB))


def test_nvlink_that_is_not_used(tmp_path: Path) -> None:
    run = Run(follow(20e-6, 22 * GB))
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    assert find(case, "NVLink not used").certainty is Certainty.LIKELY
    crossing = say(
        "Pattern 4, crossNic 0, nChannels 1, bw 24.000000/24.000000, type PHB/PIX, sameChannels 1"
    )
    run = Run(follow(20e-6, 22 * GB), said=(crossing,))
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    assert find(case, "NVLink not used").certainty is Certainty.SEEN
    run = Run(follow(20e-6, 150 * GB))
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    assert "NVLink not used" not in names(case)


def test_bridges_join_pairs_only(tmp_path: Path) -> None:
    device = "NVIDIA A100 80GB PCIe"
    run = Run(follow(20e-6, 20 * GB), device=device, local=4)
    case = make_case(tmp_path, run, follow(20e-6, 230 * GB), expect(device, 230 * GB, local=4))
    assert "pairs" in find(case, "bridges in pairs").sentence
    run = Run(follow(20e-6, 20 * GB), device=device, local=2)
    case = make_case(tmp_path, run, follow(20e-6, 230 * GB), expect(device, 230 * GB, local=2))
    assert "NVLink not used" in names(case)


def test_nvlink_that_gives_a_part(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    case = make_case(tmp_path, Run(follow(20e-6, 150 * GB)), usual, expect(A100, 235 * GB))
    assert names(case) == ["part of the links"]
    assert "50% of the 300 GB/s of the links between the GPUs" in words(
        find(case, "part of the links")
    )
    case = make_case(tmp_path, Run(with_kink(4e9, 1.7)), usual, expect(A100, 235 * GB))
    assert "part of the links" not in names(case)


def test_a_network_within_a_node(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    over = say("Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA")
    case = make_case(
        tmp_path, Run(follow(40e-6, 20 * GB), said=(over,)), usual, expect(A100, 235 * GB)
    )
    assert names(case)[0] == "network within a node"
    two = say("comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0")
    case = make_case(
        tmp_path, Run(follow(40e-6, 20 * GB), said=(over, two)), usual, expect(A100, 235 * GB)
    )
    assert "network within a node" not in names(case)


NO_NVLS = say("NVLS multicast support is not available on dev 0")
NVLS = say("NVLS multicast support is available on dev 0")
CHANNELS = "{} coll channels, 0 collnet channels, {} nvls channels, 32 p2p channels, 32 p2p channels per peer"


def make_hopper(
    folder: Path,
    rate: float,
    *said: str,
    local: int = 8,
    device: str = H100,
    algorithm: str | None = None,
    usual: float = 480 * GB,
) -> Case:
    """H100 of one board."""
    run = Run(follow(20e-6, rate), device=device, local=local, said=said)
    expectation = expect(
        device, usual, nvlink=450 * GB, pcie=63 * GB, local=local, algorithm=algorithm
    )
    return make_case(folder, run, follow(20e-6, usual), expectation)


def test_nvlink_sharp_is_off(tmp_path: Path) -> None:
    cause = find(
        make_hopper(tmp_path, 366 * GB, NO_NVLS, say(CHANNELS.format(24, 0))), "NVLink SHARP off"
    )
    assert cause.certainty is Certainty.SEEN
    assert "0 nvls channels" in words(cause)
    assert "81% of the 450 GB/s of NVLink" in words(cause)
    assert find(make_hopper(tmp_path, 366 * GB), "NVLink SHARP off").certainty is Certainty.LIKELY
    four = make_hopper(tmp_path, 366 * GB, local=4)
    assert find(four, "NVLink SHARP off").certainty is Certainty.POSSIBLE


def test_nvlink_sharp_that_is_missing_in_a_wide_interval_is_a_remark(tmp_path: Path) -> None:
    case = make_hopper(tmp_path, 366 * GB, NO_NVLS, usual=370 * GB)
    (remark,) = find_causes(case)
    assert (remark.name, remark.explains) == ("NVLink SHARP off", frozenset())
    assert names(make_hopper(tmp_path, 480 * GB, NO_NVLS)) == []
    assert names(make_hopper(tmp_path, 366 * GB, usual=370 * GB)) == []


def test_nvlink_sharp_that_is_used_or_absent_by_nature_is_no_cause(tmp_path: Path) -> None:
    used = make_hopper(tmp_path, 366 * GB, NVLS, say(CHANNELS.format(24, 16)))
    assert "NVLink SHARP off" not in names(used)
    card = make_hopper(tmp_path, 366 * GB, NO_NVLS, device="NVIDIA H100 NVL")
    assert "NVLink SHARP off" not in names(card)
    old = make_hopper(tmp_path, 366 * GB, say("NCCL version 2.14.3+cuda11.7"))
    assert "2.17" in words(find(old, "NVLink SHARP off"))
    far_below = make_hopper(tmp_path, 200 * GB)
    assert "NVLink SHARP off" not in names(far_below)


def test_nvlink_sharp_that_the_user_turned_off_is_a_remark(tmp_path: Path) -> None:
    ring = say("NCCL_ALGO set by environment to Ring")
    healthy = make_hopper(tmp_path, 366 * GB, ring, algorithm="ring", usual=368 * GB)
    (remark,) = find_causes(healthy)
    assert remark.name == "NVLink SHARP by choice"
    assert remark.explains == frozenset()
    assert "422 GB/s to 484 GB/s" in remark.sentence
    off = say("NCCL_NVLS_ENABLE set by environment to 0")
    slow = make_hopper(tmp_path, 366 * GB, off, NO_NVLS)
    assert "NVLink SHARP off" not in names(slow)
    assert names(slow) == ["settings"]  # which says it, so that no remark has to
    assert "NVLink SHARP is off" in find(slow, "settings").sentence
    excluded = say("NCCL_ALGO set by environment to ^NVLS")
    without = make_hopper(tmp_path, 366 * GB, excluded)
    assert "NVLink SHARP by choice" in names(without)
    assert "NCCL_ALGO=^NVLS: no size uses this algorithm" in words(find(without, "settings"))
    chosen = say("NCCL_ALGO set by environment to NVLS")
    assert "NVLink SHARP by choice" not in names(make_hopper(tmp_path, 470 * GB, chosen))


def test_few_channels(tmp_path: Path) -> None:
    run = Run(
        follow(20e-6, 44 * GB),
        said=(say("NCCL_MAX_NCHANNELS set by environment to 2"), say(CHANNELS.format(2, 0))),
    )
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    cause = find(case, "few channels")
    assert "2 channels; NCCL counts 24 GB/s at most for one, 48 GB/s for all" in words(cause)
    assert cause.advice[0] == "unset NCCL_MAX_NCHANNELS"
    command = "$ NCCL_MAX_NCHANNELS=2 ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 8"
    run = Run(follow(20e-6, 44 * GB), command=command)
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    sentence = "2 channels are too few for these links, because of NCCL_MAX_NCHANNELS=2"
    assert [cause.sentence for cause in find_causes(case)] == [sentence]  # the setting, once
    twice = Run(
        follow(20e-6, 44 * GB),
        command=command,
        said=(say("NCCL_MAX_NCHANNELS set by environment to 2"),),
    )
    case = make_case(tmp_path, twice, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    assert names(case) == ["few channels"]
    assert words(find(case, "few channels")).count("NCCL_MAX_NCHANNELS=2: ") == 1
    run = Run(follow(20e-6, 44 * GB), said=(say(CHANNELS.format(24, 0)),))
    case = make_case(tmp_path, run, follow(20e-6, 235 * GB), expect(A100, 235 * GB))
    assert "few channels" not in names(case)


# -- the curve
# --------------------------------------------------------------------------------------------------


def with_kink(nbytes_at: float, worse: float) -> Curve:
    """A curve whose rate falls from a number of moved bytes on."""
    usual = follow(25e-6, 192 * GB)
    return lambda moved: (worse if moved >= nbytes_at else 1.0) * usual(moved)


def test_a_worse_algorithm_from_one_size_on(tmp_path: Path) -> None:
    run = Run(with_kink(200e6, 1.7), hosts=FOUR)
    case = make_case(tmp_path, run, HDR, expect(A100, 192 * GB, adapters=EIGHT_HDR))
    cause = find(case, "worse algorithm")
    assert cause.certainty is Certainty.LIKELY
    assert "128 MiB" in cause.sentence
    # 2 f n / B with and without a fifth of start-up, times 1.7
    assert re.search(r"2 times the bytes take 3\.[34] times as long", words(cause))
    assert "no larger size is as fast" in words(cause)
    assert "high start-up" not in names(case)


def test_a_choice_that_nccl_prints(tmp_path: Path) -> None:
    said = (
        say("AllReduce: 67108864 Bytes -> Algo 1 proto 2 time 700.0"),
        say("AllReduce: 134217728 Bytes -> Algo 0 proto 2 time 900.0"),
    )
    run = Run(with_kink(200e6, 1.7), hosts=FOUR, said=said)
    case = make_case(tmp_path, run, HDR, expect(A100, 192 * GB, adapters=EIGHT_HDR))
    cause = find(case, "worse algorithm")
    assert cause.certainty is Certainty.SEEN
    assert "NCCL chose Tree with Simple at 128 MiB" in words(cause)


def test_a_fall_that_is_small_or_not_slow_is_no_kink(tmp_path: Path) -> None:
    run = Run(with_kink(200e6, 1.15), hosts=FOUR)
    case = make_case(tmp_path, run, HDR, expect(A100, 192 * GB, adapters=EIGHT_HDR))
    assert "worse algorithm" not in names(case)
    slower = follow(25e-6, 100 * GB)
    run = Run(with_kink(200e6, 1.7), hosts=FOUR)
    case = make_case(tmp_path, run, slower, expect(A100, 100 * GB, adapters=EIGHT_HDR))
    assert names(case) == []


def test_a_single_size_that_stands_out(tmp_path: Path) -> None:
    usual = follow(25e-6, 192 * GB)

    def curve(moved: float) -> float:
        return (2.5 if 200e6 < moved < 300e6 else 1.0) * usual(moved)

    run = Run(curve, hosts=FOUR, powers=range(20, 28))
    case = make_case(tmp_path, run, usual, expect(A100, 192 * GB, adapters=EIGHT_HDR))
    assert "worse algorithm" in names(case)  # the last size, with none above
    run = Run(curve, hosts=FOUR, powers=range(25, 30))
    case = make_case(tmp_path, run, usual, expect(A100, 192 * GB, adapters=EIGHT_HDR))
    assert "worse algorithm" not in names(case)


def test_shapes_by_hand() -> None:
    sizes = np.array([1.0, 2, 4, 8]) * 2**20
    smooth = np.array([10.0, 15, 19, 21])
    assert find_kink(sizes, smooth) is None
    single = find_kink(sizes, np.array([10.0, 7, 19, 21]))
    assert single is not None
    assert single.is_single
    deep = find_kink(sizes, np.array([20.0, 10, 11, 12]))
    assert deep is not None
    assert (deep.growth, deep.sizes, deep.recovers) == (4.0, 3, False)
    assert find_late_switch(sizes, np.array([100.0, 195, 380, 740])) is None
    assert find_late_switch(np.array([8.0, 16]), np.array([20.0, 10])) is None
    assert find_addition(np.array([8.0]), np.array([20e-6]), np.array([21e-6])) is None
    assert find_addition(np.array([2.0**20]), np.array([1.0]), np.array([0.1])) is None


def test_a_protocol_that_is_kept_too_long(tmp_path: Path) -> None:
    usual = follow(20e-6, 40 * GB)

    def curve(moved: float) -> float:
        return usual(moved) if moved > 3e7 else 20e-6 + moved / 5.4e9

    run = Run(curve, powers=range(3, 31))
    case = make_case(tmp_path, run, usual, expect(A100, 40 * GB, nvlink=50 * GB))
    cause = find(case, "late switch")
    assert "up to 16 MiB" in cause.sentence
    run = Run(lambda moved: 1.3 * usual(moved), powers=range(3, 31))
    case = make_case(tmp_path, run, usual, expect(A100, 40 * GB, nvlink=50 * GB))
    assert "late switch" not in names(case)


def test_a_constant_that_is_added(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    run = Run(follow(260e-6, 235 * GB))
    case = make_case(tmp_path, run, usual, expect(A100, 235 * GB))
    cause = find(case, "high start-up")
    assert cause.certainty is Certainty.LIKELY
    assert "260 µs for small messages, where 20" in words(cause)
    # 240 µs are 0.108 of 2.2 ms, which 300 MB take
    assert "the same 240 µs are added up to 256 MiB" in words(cause)
    assert "virtual machine" in cause.advice[2]
    assert "234 GB/s at 8 GiB are right" in words(cause)
    sentence = (
        "the host adds a constant time to all sizes up to 256 MiB; not enough to say which part"
    )
    assert cause.sentence == sentence
    assert names(case) == ["high start-up"]


def test_a_constant_ends_at_the_first_size_without_it() -> None:
    """240 µs are added to 8 B and 1 MiB, none to 4 MiB, and by chance 240 µs again to 16 MiB."""
    sizes = np.array([8.0, 2**20, 2**22, 2**24])
    expected = np.array([20e-6, 45e-6, 80e-6, 210e-6])
    added = np.array([240e-6, 240e-6, 0.0, 240e-6])
    addition = find_addition(sizes, expected + added, expected)
    assert addition is not None
    assert addition.largest_constant == 2**20


def test_a_start_up_with_a_reason(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    trace = say("NCCL_DEBUG set by environment to TRACE")
    case = make_case(
        tmp_path, Run(follow(260e-6, 235 * GB), said=(trace,)), usual, expect(A100, 235 * GB)
    )
    assert "NCCL_DEBUG=TRACE may do that" in find(case, "high start-up").sentence
    text = Run(follow(260e-6, 235 * GB)).write()
    path = tmp_path / "once.log"
    path.write_text(text.replace("warmup iters: 5 iters: 20", "warmup iters: 0 iters: 1"))
    (facts,) = read_logs(path).facts
    assert "too few iterations" in find(replace(case, facts=facts), "high start-up").sentence


def test_a_start_up_that_is_expected_is_no_cause(tmp_path: Path) -> None:
    usual = follow(156e-6, 81 * GB)  # EFA
    case = make_case(tmp_path, Run(usual), usual, expect(A100, 81 * GB))
    assert names(case) == []


def test_halves_that_differ(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    case = make_case(tmp_path, Run(usual, in_place=1.4), usual, expect(A100, 235 * GB))
    assert "in place takes 1.40 times as long" in words(find(case, "unlike halves"))
    case = make_case(tmp_path, Run(usual, in_place=0.98), usual, expect(A100, 235 * GB))
    assert names(case) == []
    slow = follow(20e-6, 100 * GB)
    case = make_case(tmp_path, Run(slow, in_place=0.98), usual, expect(A100, 235 * GB))
    assert "unlike halves" not in names(case)


def test_repeats_that_differ(tmp_path: Path) -> None:
    usual = follow(25e-6, 192 * GB)
    both = Run(lambda moved: 2 * usual(moved), hosts=FOUR)
    case = make_case(tmp_path, both, usual, expect(A100, 192 * GB))
    fast = make_case(tmp_path, Run(usual, hosts=FOUR), usual, expect(A100, 192 * GB))
    repeated = Case(
        case.file,
        case.operation,
        case.ranks,
        case.nodes,
        case.rows.vstack(fast.rows),
        case.facts,
        case.expectation,
        case.verdicts,
    )
    assert "spread" in names(repeated)
    assert "spread" not in names(case)


def make_pair(folder: Path, hosts: tuple[str, str], rate: float) -> Case:
    """Two nodes of a cluster whose pairs are tested in turn."""
    run = Run(follow(25e-6, rate), hosts=hosts)
    return make_case(folder, run, follow(25e-6, 190 * GB), expect(A100, 190 * GB))


def test_a_host_that_makes_its_pairs_slow(tmp_path: Path) -> None:
    pairs = [("a", "b", 88), ("c", "d", 86), ("a", "e", 49), ("d", "e", 49.3), ("b", "c", 87)]
    cases = [make_pair(tmp_path, (one, other), rate * GB) for one, other, rate in pairs]
    (cause,) = compare_runs(cases)
    assert cause.name == "slow host"
    assert cause.sentence == "all slow runs have e, and no fast one has"
    assert "2 of 5 runs" in words(cause)
    alike = [make_pair(tmp_path, (one, other), 88 * GB) for one, other, _ in pairs]
    assert compare_runs(alike) == ()
    assert compare_runs(cases[2:4]) == ()


def test_runs_that_differ_for_no_host(tmp_path: Path) -> None:
    cases = [make_pair(tmp_path, ("a", "b"), rate * GB) for rate in (88, 87, 50)]
    (cause,) = compare_runs(cases)
    assert cause.name == "unlike runs"
    assert "differ by 1.8 times" in cause.sentence


def test_a_network_that_loses_packets(tmp_path: Path) -> None:
    usual = follow(25e-6, 192 * GB)

    def lossy(moved: float) -> float:
        return usual(moved) * (4 if int(np.log2(moved)) % 2 else 1)

    said = [list_adapters(host, ["mlx5_0"], "RoCE") for host in FOUR]
    expectation = expect(A100, 192 * GB, adapters=EIGHT_HDR)
    case = make_case(tmp_path, Run(lossy, hosts=FOUR, said=tuple(said)), usual, expectation)
    assert "worse algorithm" not in names(case)
    assert find(case, "lost packets").certainty is Certainty.LIKELY
    case = make_case(tmp_path, Run(lossy, hosts=FOUR), usual, expectation)
    assert find(case, "lost packets").certainty is Certainty.POSSIBLE
    case = make_case(tmp_path, Run(with_kink(200e6, 2.5), hosts=FOUR), usual, expectation)
    assert "lost packets" not in names(case)  # one fall is a kink


# -- the run
# --------------------------------------------------------------------------------------------------


def test_wrong_values_come_first_whatever_the_times(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    run = Run(usual, wrong=(20, 21), said=(say("NCCL_PROTO set by environment to LL128"),))
    case = make_case(tmp_path, run, usual, expect(A100, 235 * GB))
    causes = find_causes(case)
    assert causes[0].name == "wrong values"
    assert "4 results hold wrong values" in words(causes[0])
    assert "LL128" in causes[0].advice[0]
    slow = make_case(
        tmp_path, Run(follow(260e-6, 235 * GB), wrong=(20,)), usual, expect(A100, 235 * GB)
    )
    assert names(slow)[:2] == ["wrong values", "high start-up"]


def test_wrong_values_are_not_all_right_however_fast(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(Run(follow(20e-6, 235 * GB), wrong=(20,)).write())
    diagnosis = pk.diagnose(path)
    assert diagnosis.verdict == "wrong results"
    assert diagnosis.ok is False
    assert diagnosis.headline().startswith(
        "wrong results: 2 results of all_reduce hold wrong values, the first in line "
    )
    path.write_text(Run(follow(20e-6, 235 * GB)).write())
    assert pk.diagnose(path).ok is True


def test_processes_that_ran_alone(tmp_path: Path) -> None:
    usual = follow(20e-6, 235 * GB)
    command = "$ mpirun -np 16 -H a:8,b:8 ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 8 -n 100"
    case = make_case(tmp_path, Run(usual, command=command), usual, expect(A100, 235 * GB))
    assert "16 processes are started" in words(find(case, "separate runs"))
    whole = "$ mpirun -np 8 ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1 -n 100"
    case = make_case(tmp_path, Run(usual, command=whole), usual, expect(A100, 235 * GB))
    assert names(case) == []


def test_machines_of_one_name(tmp_path: Path) -> None:
    usual = follow(25e-6, 44 * GB)
    expectation = expect(A100, 230 * GB)
    sixteen = Run(usual, local=16, buses=2 * BOARD)
    # the same device and bus stand in the list of one host twice
    text = re.sub(r"device +(\d+)", lambda found: f"device {int(found[1]) % 8}", sixteen.write())
    path = tmp_path / "twice.log"
    path.write_text(text, encoding="utf-8")
    case = make_case(tmp_path, sixteen, usual, expectation)
    (facts,) = read_logs(path).facts
    assert names(replace(case, facts=facts))[0] == "shared name"
    assert "shared name" not in names(case)
    # two GPUs of each switch share a bus number, where only that is printed
    pairs = ("0x10", "0x10", "0x20", "0x20", "0x90", "0x90", "0xa0", "0xa0")
    case = make_case(tmp_path, Run(usual, buses=pairs), usual, expectation)
    assert "shared name" not in names(case)
    counted = say("comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0")
    case = make_case(tmp_path, Run(usual, said=(counted,)), usual, expectation)
    assert find(case, "shared name").certainty is Certainty.SEEN


def test_racks_that_share_nvlink(tmp_path: Path) -> None:
    device = "NVIDIA GB200"
    run = Run(follow(25e-6, 840 * GB), device=device, hosts=("t-0", "t-1"), local=4)
    expectation = expect(device, 180 * GB, nvlink=900 * GB, local=4, limit=400 * GB)
    cause = find_causes(make_case(tmp_path, run, follow(25e-6, 180 * GB), expectation))[0]
    assert (cause.name, cause.certainty) == ("shared NVLink", Certainty.LIKELY)


def test_faults_of_versions(tmp_path: Path) -> None:
    usual = follow(60e-6, 760 * GB)
    expectation = expect("NVIDIA B300", 760 * GB, nvlink=900 * GB)

    def make(version: str, hosts: tuple[str, ...] = FOUR) -> Case:
        said = (say(f"NCCL version {version}+cuda13.1"),)
        run = Run(follow(60e-6, 220 * GB), device="NVIDIA B300", hosts=hosts, said=said)
        return make_case(tmp_path, run, usual, expectation)

    assert "rings give 760" in find(make("2.29.7"), "known fault").sentence
    assert "known fault" not in names(make("2.30.4"))
    assert "known fault" not in names(make("2.29.7", FOUR[:3]))  # published of 4, 8 and 16 nodes


BOARD = ("0x07", "0x0b", "0x48", "0x4c", "0x88", "0x8b", "0xc8", "0xcb")


def make_pods(folder: Path, buses: tuple[str, ...], *said: str) -> Case:
    """Two hosts of four A100 whose rate is that of one board."""
    run = Run(follow(20e-6, 234 * GB), hosts=("pod-0", "pod-1"), local=4, buses=buses, said=said)
    expectation = expect(A100, 44 * GB, local=4, limit=100 * GB)
    return make_case(folder, run, follow(25e-6, 44 * GB), expectation)


def test_two_hosts_that_are_one_machine(tmp_path: Path) -> None:
    cause = find_causes(make_pods(tmp_path, BOARD))[0]
    assert cause.name == "one machine"
    assert cause.certainty is Certainty.LIKELY
    assert cause.explains == {Word.TOO_GOOD}
    assert cause.sentence.startswith("the 2 hosts seem to be")
    assert "234 GB/s at 8 GiB (134 GB/s of data) are more than 100 GB/s (57 GB/s of data)" in words(
        cause
    )
    assert "pod-1 88 8b c8 cb" in words(cause)
    direct = say("Channel 00/0 : 0[0] -> 4[0] via P2P/CUMEM")
    assert find_causes(make_pods(tmp_path, BOARD, direct))[0].certainty is Certainty.SEEN


def test_hosts_with_equal_buses_or_shared_nvlink_are_not_one_machine(tmp_path: Path) -> None:
    assert names(make_pods(tmp_path, 2 * BOARD[:4])) == ["not enough to say"]
    shared = say("comm 0x1 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 1")
    assert "one machine" not in names(make_pods(tmp_path, BOARD, shared))


def test_settings_that_choose_for_nccl(tmp_path: Path) -> None:
    slow = make_hdr(tmp_path, 90 * GB, say("NCCL_PROTO set by environment to LL"))
    cause = find(slow, "settings")
    assert cause.certainty is Certainty.LIKELY
    assert "half of the bandwidth" in words(cause)
    assert "NVIDIA/nccl#281" in cause.citations
    healthy = make_hdr(tmp_path, 192 * GB, say("NCCL_PROTO set by environment to LL"))
    (remark,) = find_causes(healthy)
    assert (remark.name, remark.explains) == ("settings", frozenset())


def test_harmless_settings_and_those_of_plugins_are_not_named(tmp_path: Path) -> None:
    said = (
        say("NCCL_IB_DISABLE set by environment to 0."),
        say("NCCL_SOCKET_IFNAME set by environment to eth0"),
        say("NET/OFI Setting NCCL_PROTO to simple"),
        say("NCCL_PROTO set by environment to simple"),
    )
    assert names(make_hdr(tmp_path, 192 * GB, *said)) == []
    assert "settings" not in names(make_hdr(tmp_path, 85 * GB, *said))


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("NCCL_PROTO", "LL128", 1),
        ("NCCL_PROTO", "LL", 1),
        ("NCCL_PROTO", "LL,LL128", 1),
        ("NCCL_PROTO", "^LL128", 1),
        ("NCCL_PROTO", "^Simple", 1),
        ("NCCL_PROTO", "LL,LL128,Simple", 0),
        ("NCCL_P2P_LEVEL", "SYS", 0),
        ("NCCL_P2P_LEVEL", "LOC", 1),
        ("NCCL_DEBUG", "INFO", 0),
        ("NCCL_NET", "Socket", 1),
        ("NCCL_NET", "AWS Libfabric", 0),
        ("NCCL_BUFFSIZE", "4194304", 0),
        ("NCCL_BUFFSIZE", "65536", 1),
    ],
)
def test_values_that_matter(name: str, value: str, count: int) -> None:
    assert len(find_variables(name, value)) == count


def test_bound_processes(tmp_path: Path) -> None:
    said = say("Setting affinity for GPU 0 to 0300,00000000")
    slow = make_hdr(tmp_path, 90 * GB, said)
    assert find(slow, "few cores").certainty is Certainty.LIKELY
    assert "2 cores for a process" in words(find(slow, "few cores"))
    many = say("Setting affinity for GPU 0 to ffff,ffffffff,00000000,0000ffff,ffffffff")
    assert "few cores" not in names(make_hdr(tmp_path, 90 * GB, many))
    command = "$ mpirun -np 32 --bind-to core ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1"
    assert (
        find(make_hdr(tmp_path, 90 * GB, command=command), "few cores").certainty
        is Certainty.POSSIBLE
    )


def test_mixed_devices(tmp_path: Path) -> None:
    kinds = 4 * ("NVIDIA A100-SXM4-80GB",) + 4 * ("NVIDIA A100-SXM4-40GB",)
    usual = follow(20e-6, 235 * GB)
    run = Run(follow(20e-6, 100 * GB), devices=kinds)
    case = make_case(tmp_path, run, usual, expect(A100, 235 * GB))
    assert "4 × NVIDIA A100-SXM4-40GB" in words(find(case, "mixed devices"))
    run = Run(usual, devices=kinds)
    assert names(make_case(tmp_path, run, usual, expect(A100, 235 * GB))) == []


def test_part_of_a_mesh(tmp_path: Path) -> None:
    device = "AMD Instinct MI300X"
    usual = follow(20e-6, 310 * GB)
    expectation = expect(device, 310 * GB, nvlink=448 * GB, pcie=63 * GB, local=4)
    run = Run(follow(20e-6, 140 * GB), device=device, local=4)
    case = make_case(tmp_path, run, usual, expectation)
    assert "3 of 7 links" in words(find(case, "part of a mesh"))
    unknown = [replace(verdict, word=Word.UNKNOWN) for verdict in case.verdicts]
    assert names(replace(case, verdicts=tuple(unknown))) == ["part of a mesh"]
    run = Run(follow(20e-6, 20 * GB), device=device, local=4)
    assert "part of a mesh" not in names(make_case(tmp_path, run, usual, expectation))
    run = Run(follow(20e-6, 140 * GB), device=device)
    assert "part of a mesh" not in names(make_case(tmp_path, run, usual, expectation))


def test_warnings_of_rccl(tmp_path: Path) -> None:
    warned = (
        "oak-1:900:900 [0] /src/init.cc:140 NCCL WARN NUMA auto balancing enabled which can lead to "
        'variability in the RCCL performance! Disable by "sudo sysctl kernel.numa_balancing=0"'
    )
    case = make_hdr(tmp_path, 85 * GB, warned)
    assert find(case, "warning").advice == ("sysctl kernel.numa_balancing=0",)
    assert names(make_hdr(tmp_path, 192 * GB, warned)) == []


def test_what_no_signature_explains(tmp_path: Path) -> None:
    (cause,) = find_causes(make_hdr(tmp_path, 85 * GB, adapters=Adapters()))
    assert cause.name == "not enough to say"
    assert cause.advice[0].startswith("run again with NCCL_DEBUG=INFO")
    assert any("pairs of nodes" in each for each in cause.advice)


# -- logs with known answers
# --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("PERFKIT_SHARED_DATA", ROOT.parent / "shared" / "data"))
CASES = SHARED.parent / "cases" / "logs"
#: The first cause of each, and words of its sentence, its evidence and what to try first.
ANSWERS = {
    "08_a100_4x8_hdr200": ("missing adapter", "mlx5_4", "7 × 24 GB/s", "ibstat mlx5_4"),
    "09_rtx4090_8": ("host memory", "no peer access", "17% of the 32 GB/s", "topo -p2p r"),
    "10_h100_2x8": ("sockets", "NCCL_IB_DISABLE=1", "23.2 Gb/s", "unset NCCL_IB_DISABLE"),
    "11_h200_8": ("NVLink SHARP off", "rings", "on 8 of 8 GPUs", "fabricmanager"),
    "12_a100_8_small": ("high start-up", "not enough to say which", "11 times", "-G 1"),
    "13_h100_4x8_roce400": ("worse algorithm", "from 128 MiB", "3.2 times", "SUBSYS=TUNING"),
    "14_a100_2x4": ("one machine", "containers", "133 GB/s", "name of the node"),
}
HEALTHY = (
    "01_a100_8_nvlink",
    "02_h100_8_nvls",
    "04_h100_2x8_ib400",
    "05_h100_4x8_ib400",
    "06_a100_2x8_efa100",
    "07_l40s_4_pcie4",
)


@pytest.mark.skipif(not CASES.is_dir(), reason="the logs with known answers are not there")
@pytest.mark.parametrize("name", ANSWERS)
def test_a_sick_log_gets_its_cause_alone(name: str) -> None:
    (cause,) = pk.diagnose(CASES / f"{name}.log").causes
    wanted = ANSWERS[name]
    assert cause.name == wanted[0]
    assert wanted[1] in cause.sentence
    assert wanted[2] in words(cause)
    assert wanted[3] in cause.advice[0]


@pytest.mark.skipif(not CASES.is_dir(), reason="the logs with known answers are not there")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_gets_no_cause(name: str) -> None:
    assert pk.diagnose(CASES / f"{name}.log").causes == ()


@pytest.mark.skipif(not CASES.is_dir(), reason="the logs with known answers are not there")
def test_rings_by_choice_are_a_remark() -> None:
    causes = pk.diagnose(CASES / "03_h100_8_ring.log").causes
    assert [cause.name for cause in causes] == ["NVLink SHARP by choice", "settings"]
    assert all(not cause.explains for cause in causes)


@pytest.mark.skipif(
    not (SHARED / "nccl_logs").is_dir(), reason="the logs of other people are not there"
)
def test_no_public_log_gets_a_cause() -> None:
    assert pk.diagnose(SHARED / "nccl_logs").causes == ()


# -- all of them
# --------------------------------------------------------------------------------------------------


def test_what_the_log_says_hides_what_is_merely_possible(tmp_path: Path) -> None:
    seven = [f"mlx5_{number}" for number in range(7)]
    said = [list_adapters(host, seven) for host in FOUR]
    slow_start = make_hdr(tmp_path, 168 * GB, *said, startup=260e-6)
    # an adapter explains bandwidth, not start-ups
    assert names(slow_start) == ["missing adapter", "high start-up"]


def test_facts_are_remarks_where_there_is_not_enough_to_say(tmp_path: Path) -> None:
    eight = [f"mlx5_{number}" for number in range(8)]
    said = [list_adapters(host, eight[:-1] if host == "oak-3" else eight) for host in FOUR]
    case = make_hdr(tmp_path, 168 * GB, *said)
    unknown = [replace(verdict, word=Word.UNKNOWN) for verdict in case.verdicts]
    remark, rate = find_causes(replace(case, verdicts=tuple(unknown)))
    assert (remark.name, rate.name) == ("missing adapter", "unknown rate")
    assert remark.explains == frozenset()
    expected = [replace(verdict, word=Word.EXPECTED) for verdict in case.verdicts]
    (same,) = find_causes(replace(case, verdicts=tuple(expected)))
    assert same == remark


def test_the_rate_of_adapters_may_decide(tmp_path: Path) -> None:
    eight = [f"mlx5_{number}" for number in range(8)]
    case = make_hdr(tmp_path, 97 * GB, *(list_adapters(host, eight) for host in FOUR))
    unknown = tuple(replace(verdict, word=Word.UNKNOWN) for verdict in case.verdicts)
    (remark,) = find_causes(replace(case, verdicts=unknown))
    assert remark.name == "unknown rate"
    assert "all that one of 100 Gb/s gives, or half of one of 200 Gb/s" in words(remark)
    rate = say("NET/IB : Made virtual device [0] name=mlx5_0 speed=200000 ndevs=1")
    case = make_hdr(tmp_path, 97 * GB, rate, *(list_adapters(host, eight) for host in FOUR))
    assert find_causes(replace(case, verdicts=unknown)) == ()


def test_every_signature_is_asked_and_tested() -> None:
    rooms = (causes_adapters, causes_curve, causes_node, causes_run, causes_sockets)
    defined = {
        getattr(room, name)
        for room in rooms
        for name in dir(room)
        if name.startswith(("find_", "note_")) and getattr(room, name).__module__ == room.__name__
    }
    asked = {*ALARMS, *SIGNATURES, *FALLBACKS, *REMARKS}
    helpers: set[Callable[..., object]] = {causes_node.find_pcie_line}
    assert defined - helpers == asked


@pytest.mark.repository
def test_the_page_of_signatures_has_every_cause() -> None:
    root = Path(__file__).resolve().parent.parent
    page = (root / "docs" / "signatures.md").read_text(encoding="utf-8")
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted((root / "perfkit" / "diagnosis").glob("causes*.py"))
    )
    named = set(re.findall(r'Cause\(\s*"([^"]+)"', code))
    assert len(named) > 25
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert rows == named | {variable.name for variable in VARIABLES}


def test_figures_that_are_published() -> None:
    # by hand: 12 and 25.8 of 31.5, 6 of 31.5 and 9 of 15.75, 45.73 of 50 and 24 of 25
    assert find_shares(Way.PCIE).low == pytest.approx(12 / 31.5)
    assert find_shares(Way.PCIE).high == pytest.approx(25.8 / 31.5)
    assert find_shares(Way.HOST_MEMORY).low == pytest.approx(6 / 31.5)
    assert find_shares(Way.ADAPTER).low == pytest.approx(45.73 / 50)
    assert find_shares(Way.ADAPTER).high == pytest.approx(24 / 25)
    assert find_ethernet(1.17e9) == pytest.approx(1.25e9)  # 0.94 of 10 Gb/s
    assert find_ethernet(1.2e9) == pytest.approx(3.125e9)
    assert find_ethernet(60e9) is None


def test_variables_have_a_meaning_and_a_way_out() -> None:
    for variable in VARIABLES:
        assert variable.meaning, variable.name
        assert variable.advice, variable.name
        assert not variable.is_harmful(""), variable.name


def test_all_causes_have_evidence_advice_and_citations(tmp_path: Path) -> None:
    cases = [
        make_hdr(tmp_path, 2.75 * GB, say("Using network Socket")),
        make_hopper(tmp_path, 366 * GB),
        make_pods(tmp_path, BOARD),
        make_cards(tmp_path, "NVIDIA GeForce RTX 4090", 5.3 * GB),
    ]
    for case in cases:
        for cause in find_causes(case):
            assert cause.evidence, cause.name
            assert cause.advice, cause.name
            assert cause.citations, cause.name
            assert all(each.file == "run.log" for each in cause.evidence)
            assert cause.sizes <= set(Range)
