"""Prices of collectives: which fit prices which ranks, what is composed across nodes, and what no
price beats."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfkit as pk
from perfkit.fitting import OverRanks, Pipelined, fit_collective
from perfkit.fitting.parameters import Key
from perfkit.ground.files import find_reference, group_rows
from perfkit.ground.hardware import Link, MemoryLevel, Quantity
from perfkit.models import collectives as c
from perfkit.models import hierarchy as h
from perfkit.models.algorithms import ALGORITHMS, Algorithm
from perfkit.platform.collectives import find_cost
from perfkit.platform.estimates import CollectiveTime
from perfkit.prediction.ranks import find_group_cost
from perfkit.readers.nccl import LogWarning, read_nccl_tests

INTRA, INTER = 450e9, 50e9
SIZES = np.geomspace(512, 2.0**34, 49)
pytestmark = pytest.mark.filterwarnings(f"ignore::{LogWarning.__module__}.{LogWarning.__name__}")
#: What was fitted on 8 ranks of a node, and on one rank of each of 10 nodes.
NODE = {
    "all_reduce": 3.6e-12,
    "all_gather": 2.4e-12,
    "reduce_scatter": 2.4e-12,
    "all_to_all": 2.5e-12,
}
NODE["broadcast"] = 2.7e-12
RAIL = {
    "all_reduce": 37e-12,
    "all_gather": 18.6e-12,
    "reduce_scatter": 18.5e-12,
    "all_to_all": 19.9e-12,
}


def link(bandwidth: float, latency: float, kind: str = "datasheet") -> Link:
    return Link(Quantity(bandwidth, "B/s", kind, "a test"), Quantity(latency, "s", kind, "a test"))


def curve(beta: float, alpha: float = 1e-5, start: float = 512.0, end: float = 2.0**34) -> pk.Fit:
    errors = {"alpha": 0.02 * alpha, "beta": 0.05 * beta}
    values = {"alpha": alpha, "beta": beta, "sharpness": 0.6}
    return Pipelined.build(values, stderr=errors, spread=0.06, ranges={"nbytes": (start, end)})


def law(low: float, high: float) -> pk.Fit:
    parameters = {"alpha0": 7e-6, "alpha1": 1e-6, "beta0": 1e-12, "beta1": 3e-12}
    return OverRanks.build(
        parameters,
        spread=0.08,
        ranges={"nbytes": (512.0, 2.0**34), "ranks": (low, high)},
    )


NETWORK = pk.Network(8, 10, {"intra": link(INTRA, 1e-6), "inter": link(INTER, 8e-6)}, rails=8)
INSIDE = {f"{name}.8": curve(beta) for name, beta in NODE.items()}
RAILS = {f"{name}.10.rail": curve(beta, 1e-4) for name, beta in RAIL.items()}
FITS = INSIDE | RAILS
LAW = law(2.0, 8.0)


def price(
    operation: str,
    nbytes: object = SIZES,
    ranks: int = 80,
    fits: dict[str, pk.Fit] = FITS,
    network: pk.Network = NETWORK,
    algorithm: str | None = None,
    memory: float = 2e12,
) -> CollectiveTime:
    main = MemoryLevel("HBM", None, Quantity(memory, "B/s", "assumed", "a test"))
    platform = pk.Platform(
        "toy", pk.Device("a GPU", "cuda", {}, (main,)), network, collectives=fits
    )
    found = platform.price_collective(operation, np.asarray(nbytes, dtype=float), ranks, algorithm)
    times = find_cost(platform, operation, ranks, algorithm).time(np.asarray(nbytes, dtype=float))
    assert np.array_equal(times, found.time)
    if found.terms:
        assert sum(found.terms.values()) == pytest.approx(found.time, rel=1e-9)
    return found


def test_names_of_fits_say_operation_ranks_and_way() -> None:
    for name in (
        "gemm",
        "gemm.nt",
        "all_reduce.any",
        "all_reduce.16.two_level",
        "all_gather.any.rail",
    ):
        assert str(Key.parse(name)) == name
    for bad in (
        "all_reduce",
        "all_reduce.1",
        "all_reduce.8.magic",
        "alltoall.8",
        "all_reduce.8.",
        "all_reduce.08",
    ):
        with pytest.raises(ValueError, match=r"must be <operation>.<ranks or any>.*in_network"):
            Key.parse(bad, collective=True)


def test_a_fit_comes_before_the_law_and_the_law_before_its_neighbours() -> None:
    ends = {"all_reduce.8": curve(9e-12), "all_reduce.2": curve(1e-12)}
    exact = price("all_reduce", ranks=8, fits=ends | {"all_reduce.any": LAW})
    assert exact.time == pytest.approx(c.pipelined(SIZES, **ends["all_reduce.8"]))
    assert price("all_reduce", fits=ends | {"all_reduce.80": LAW}).notes == ()
    found = price("all_reduce", ranks=4, fits=ends | {"all_reduce.any": LAW})
    assert found.time == pytest.approx(c.over_ranks(SIZES, 4, "all_reduce", **LAW))
    assert found.notes == ()
    assert "alpha = alpha0 + alpha1 steps" in str(found.formula)
    between = price("all_reduce", ranks=4, fits=ends)
    both = [c.pipelined(SIZES, **fit) for fit in ends.values()]
    assert between.time == pytest.approx(np.sqrt(both[0] * both[1]))
    assert "its time on 4 is interpolated between those on" in between.notes[0]
    assert "one all_reduce of 17.2 GB on 4 ranks would help most" in between.notes[0]


def test_a_law_beyond_its_ranks_says_so_and_says_nothing_across_nodes() -> None:
    found = price("all_reduce", 1e6, ranks=8, fits={"all_reduce.any": law(2.0, 4.0)})
    assert (
        "was fitted on 2 to 4 ranks, 8 are outside; one all_reduce of 134 MB on 8 ranks"
        in found.notes[0]
    )
    assert found.spread == pytest.approx(math.hypot(0.08, 0.05))
    inside = price(
        "all_reduce",
        fits={f"{name}.any": LAW for name in ("all_reduce", "reduce_scatter", "all_gather")},
    )
    assert set(inside.terms) == {"inside nodes", "between nodes", "overlap", "protocol"}
    wide = price("all_reduce", fits={"all_reduce.any": law(16.0, 80.0)})
    assert wide.time == pytest.approx(c.over_ranks(SIZES, 80, "all_reduce", **LAW))
    rails = price("all_reduce", fits=INSIDE | {"all_reduce.any.rail": law(2.0, 16.0)})
    assert rails.notes[0].endswith("between 10 nodes")
    notes = price("all_reduce", fits=INSIDE | {"all_reduce.4.rail": curve(3e-11)}).notes
    # an eighth of the message
    share = "one all_reduce of 2.15 GB on one rank of each of 10 nodes would help most"
    fitted = "all_reduce was fitted on one rank of each of 4 nodes"
    assert f"{fitted}; its time on 10 is scaled from that on 4" in notes[1]
    assert share in notes[1]


@pytest.mark.parametrize(
    ("way", "start", "move"),
    [
        ("in_network", 1.0, 5 / 4 / (9 / 8)),
        ("tree", 2 / 3, 1.0),
        ("ring", 6 / 14, 6 / 7),
        ("", (h.CALL + 6 * h.NEAR) / (h.CALL + 14 * h.NEAR), 6 / 7),
    ],
)
def test_an_algorithm_scales_by_its_own_rule(way: str, start: float, move: float) -> None:
    fits = {f"all_reduce.8.{way}".rstrip("."): curve(3e-12)}
    scaled = price("all_reduce", ranks=4, fits=fits, algorithm=way or None)
    assert scaled.spread == pytest.approx(math.hypot(0.06, 0.15))
    assert "scaled from that on 8" in scaled.notes[0]
    assert scaled.time == pytest.approx(c.pipelined(SIZES, alpha=start * 1e-5, beta=move * 3e-12))


TEXTBOOK = [
    ("all_reduce", "ring", 14, 7 / 4),
    ("all_reduce", "tree", 6, 2),
    ("all_reduce", "in_network", 2, 9 / 8),
    ("all_gather", "ring", 7, 7 / 8),
    ("broadcast", "tree", 3, 1),
    ("reduce", "ring", 7, 1),
]


@pytest.mark.parametrize(("operation", "algorithm", "start", "move"), TEXTBOOK)
def test_textbook_forms_price_on_the_links(
    operation: str, algorithm: str, start: float, move: float
) -> None:
    found = price(operation, ranks=8, fits={}, algorithm=algorithm)
    assert found.time == pytest.approx(start * 1e-6 + move * SIZES / INTRA)
    assert "was not measured: textbook form and the link" in found.notes[0]
    assert np.all(found.spread > 0.28)


class Impossible(NamedTuple):
    """What is asked of `price`, and why it cannot be."""

    message: str
    operation: str
    settings: dict[str, Any]


IMPOSSIBLE = [
    Impossible(
        "ranks is 12; across nodes it must be a multiple of the 8", "all_reduce", {"ranks": 12}
    ),
    Impossible(
        "nor a link between nodes", "all_reduce", {"fits": INSIDE, "network": pk.Network(8, 10)}
    ),
    Impossible("in_network.*across nodes", "all_reduce", {"algorithm": "in_network"}),
    Impossible(
        "ranks is 80; with one on each node platform 'toy' has 10; take at most 10, or 80 nodes",
        "all_reduce",
        {"algorithm": "rail"},
    ),
    Impossible(
        "nor a link inside nodes",
        "all_reduce",
        {"ranks": 8, "fits": {}, "network": pk.Network(8), "algorithm": "ring"},
    ),
    Impossible(
        "'all_reduce' on 8 ranks of one node by two_level",
        "all_reduce",
        {"ranks": 8, "fits": {}, "algorithm": "two_level"},
    ),
    Impossible("no model for the collective 'gather'", "gather", {"ranks": 8}),
]


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=[case.message for case in IMPOSSIBLE])
def test_what_no_algorithm_does_is_refused(case: Impossible) -> None:
    with pytest.raises(ValueError, match=case.message):
        price(case.operation, **case.settings)


@pytest.mark.parametrize("ranks", [8, 80])
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [("all_to_all", "ring"), ("all_gather", "tree"), ("all_gather", "in_network")],
)
def test_an_algorithm_of_other_operations_is_refused(
    operation: str, algorithm: str, ranks: int
) -> None:
    with pytest.raises(ValueError, match=f"algorithm is '{algorithm}'.*leave"):
        price(operation, ranks=ranks, algorithm=algorithm)


def test_a_gather_over_nodes_that_only_a_node_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="has no model of gather over 10 nodes"):
        price("gather", fits={"gather.8": curve(2.7e-12)})


@pytest.mark.parametrize("algorithm", [None, *(name for name in ALGORITHMS if name != "rail")])
@pytest.mark.parametrize("operation", [*NODE, "reduce", "send_recv"])
@pytest.mark.parametrize("fits", [FITS, INSIDE], ids=["rails", "links"])
def test_across_nodes_times_grow_smoothly_and_keep_to_the_links(
    operation: str, algorithm: str | None, fits: dict[str, pk.Fit]
) -> None:
    fits = fits | {"reduce.8": curve(2.7e-12), "send_recv.8": curve(2.7e-12)}
    sizes = np.geomspace(1, 1e12, 600)
    try:
        found = price(operation, sizes, fits=fits, algorithm=algorithm)
    except ValueError as error:
        assert algorithm is not None
        assert operation in str(error)
        return
    steps = np.diff(np.log(found.time))
    # continuous, no faster than n
    assert np.all(steps >= 0)
    assert np.all(steps <= np.diff(np.log(sizes)) * (1 + 1e-9))
    # a switch may reduce on the way
    share = c.bus_factor(operation, 10) / (2 if operation == "all_reduce" else 1)
    rails = 1 if operation in ("all_to_all", "send_recv") else 8
    assert np.all(found.time >= sizes * share / rails / INTER * (1 - 1e-12))
    assert np.all(found.spread >= 0.15)
    assert "was not measured" in found.notes[0]


def test_a_ring_over_nodes_starts_with_all_its_steps() -> None:
    reduced_and_gathered = price("all_reduce", 8.0, algorithm="ring").time
    reduced = price("reduce_scatter", 8.0, algorithm="ring").time
    assert reduced_and_gathered == pytest.approx(2 * reduced, rel=1e-3)


def test_a_ring_over_nodes_starts_as_published() -> None:
    """A ring that NCCL was told to take on 128 V100 of 8 nodes, 4 kB: arXiv:2105.05720, the authors'
    files."""
    start = 2 * h.start_across("all_gather", ranks_per_node=16, nodes=8)
    assert start == pytest.approx(302e-6, rel=0.1)


def test_no_price_beats_its_links_unsaid() -> None:
    slow = replace(NETWORK, links={"intra": link(INTRA, 1e-6), "inter": link(1e9, 8e-6)})
    found = price("all_gather", 1e9, network=slow)
    assert found.time == pytest.approx(0.9 * 1e9 / 8 / 1e9)
    assert found.terms["limit of the link"] > 0
    fits = {"all_gather.8": curve(1e-12)}
    last_note = price("all_gather", 1e9, ranks=8, fits=fits).notes[-1]
    assert "faster than the 450 GB/s of the intra link" in last_note
    measured = replace(NETWORK, links={"intra": link(INTRA, 1e-6, "measured")})
    assert price("all_gather", 1e9, ranks=8, fits=fits, network=measured).notes == ()


def test_a_ring_over_nodes_hops_as_the_smallest_size_and_starts_as_the_library() -> None:
    exact = {"alpha": 9 * 20e-6, "beta": 0.9 / INTER, "sharpness": 1.0}
    rail = Pipelined.build(exact, ranges={"nbytes": (2.0**25, 2.0**34)}, spread=0.05)
    found = price("all_gather", np.array([0.0, 1e9]), fits=INSIDE | {"all_gather.10.rail": rail})
    assert found.terms["start-up"] == pytest.approx(h.CALL + 70 * h.NEAR + 9 * 8e-6)
    hop = h.STEP + 9 / 79 * (20e-6 - h.STEP)
    assert f"alpha_hop = {hop:.4g} s" in found.formula
    assert f"beta_rail = {1 / INTER:.4g} s/B" in found.formula
    ring = h.ring_across_nodes(
        1e9,
        operation="all_gather",
        ranks_per_node=8,
        nodes=10,
        alpha_hop=hop,
        beta_intra=2.4e-12 * 8 / 7,
        beta_rail=1 / INTER,
    )
    assert found.time[1] == pytest.approx(ring, rel=1e-3)


# Published start-ups of all_reduces of a few bytes between nodes of A100 on InfiniBand: NVIDIA/nccl
# issue 652, NVIDIA/nccl-tests issue 150.
@pytest.mark.parametrize(("local", "nodes", "seconds"), [(8, 32, 63e-6), (1, 2, 19e-6)])
def test_start_ups_between_nodes_are_those_published(
    local: int, nodes: int, seconds: float
) -> None:
    node = pk.load_platform("a100-sxm-8").with_nodes(nodes)
    found = node.price_collective(
        "all_reduce", np.array(8.0), local * nodes, "rail" if local == 1 else None
    )
    assert found.time == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm"])
def test_one_count_of_ranks_predicts_others(shared_data: Path, system: str, operation: str) -> None:
    """As rings alone, 2 ranks predicted 8 with 131 to 299 % mean error, 4 ranks with 33 to 70 %."""
    rows = pl.read_csv(shared_data / "nccl" / f"nccl_{system}.csv", infer_schema_length=None)
    rows = rows.filter(
        pl.col("op").str.replace("alltoall", "all_to_all") == operation, dtype="half"
    )
    medians = (
        rows.group_by("num_gpus", "message_bytes")
        .agg(pl.col("latency_us").median() * 1e-6)
        .sort("message_bytes")
    )
    curves = {count: medians.filter(num_gpus=count).to_numpy().T[1:] for count in (2, 4, 8)}
    for few, bar in ((2, 0.25), (4, 0.15)):
        found = price(
            operation, curves[8][0], 8, {f"{operation}.{few}": fit_collective(*curves[few])}
        )
        ratio = found.time / curves[8][1]
        assert np.abs(ratio - 1).mean() < bar
        assert np.mean(np.abs(np.log(ratio)) < 1.2816 * found.spread) >= 0.7


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(sorted(NODE)), st.sampled_from([3, 4, 5, 8, 16, 40, 80]))
def test_less_evidence_never_gives_a_narrower_interval(
    data: st.DataObject, operation: str, ranks: int
) -> None:
    fits = dict(FITS)
    for name, beta in NODE.items():
        fits[f"{name}.2"] = curve(beta)
        fits[f"{name}.4"] = curve(beta)
    fits[f"{operation}.any"] = LAW
    fits[f"{operation}.4.rail"] = curve(RAIL.get(operation, 2e-11), 1e-4)
    keys = data.draw(st.lists(st.sampled_from(sorted(fits)), unique=True))
    less = {key: fits[key] for key in keys}
    try:
        wide = np.asarray(price(operation, ranks=ranks, fits=less).spread)
    except ValueError:
        return  # a refusal is no interval
    assert np.all(wide >= np.asarray(price(operation, ranks=ranks, fits=fits).spread) * (1 - 1e-9))


def test_advice_names_the_message_of_a_rail() -> None:
    """The ranks of a node share an all_reduce; of an all_to_all each sends all of its own."""
    for operation, size in (("all_reduce", "2 GB"), ("all_to_all", "16 GB")):
        first_note = price(operation, 16e9, fits=INSIDE).notes[0]
        assert f"one {operation} of {size} on one rank of each node would help most" in first_note


def test_two_levels_of_all_to_all_pay_for_their_copies() -> None:
    found = price("all_to_all", 1e8, algorithm="two_level", memory=2e12)
    without_copies = price("all_to_all", 1e8, algorithm="two_level", memory=1e24)
    copies = 4e8 / 2e12
    assert found.terms["copies"] == pytest.approx(copies)
    assert found.time - without_copies.time == pytest.approx(copies)


def test_sizes_far_outside_name_the_one_sample_that_helps_most() -> None:
    fits = {"all_reduce.8": curve(4e-12, end=2.0**22)}
    inside, beyond = price("all_reduce", 2.0**22, 8, fits), price("all_reduce", 2.0**32, 8, fits)
    assert inside.notes == ()
    assert beyond.spread > 2 * inside.spread
    text = r"outside the fitted range 512 B to 4.19 MB; one all_reduce of \S+ MB on 8 ranks would help most"
    assert (
        pytest.approx([float(inside.spread), float(beyond.spread)])
        == price("all_reduce", [2.0**20, 2.0**32], 8, fits).spread
    )
    assert re.search(text, beyond.notes[0])
    assert "one all_reduce of 64 B on 8 ranks" in price("all_reduce", 64.0, 8, fits).notes[0]
    rounded = {"all_reduce.8": curve(4e-12, start=2.0**25)}
    assert price("all_reduce", 33553920.0, 8, rounded).notes == (), (
        "the same size in whole elements"
    )


def test_shares_between_nodes_shorter_than_all_measured_are_less_sure() -> None:
    late = INSIDE | {
        f"{name}.10.rail": curve(beta, 1e-4, start=2.0**25) for name, beta in RAIL.items()
    }
    sizes = 2.0 ** np.array([20.0, 25.0, 28.0, 30.0])  # a rail carries an eighth
    spread = np.asarray(price("all_reduce", sizes, fits=late).spread)
    assert np.all(np.diff(spread) <= 0)
    assert spread[0] > 0.4
    assert spread[-1] < 0.2
    ring = price("all_gather", sizes[:1], fits=late)
    assert np.all(ring.spread > 0.2)
    assert any("outside the fitted range" in note for note in ring.notes)


# A real cluster: 8 H100 in a node, one in each of 10 nodes, and all 80.


def read_curves(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sizes [B] and median times [s] of each operation."""
    measured = read_nccl_tests(path).group_by("operation", "nbytes")
    medians = measured.agg(pl.col("seconds").median()).sort("nbytes")
    curves = {}
    for (name,), group in medians.group_by("operation", maintain_order=True):
        nbytes = group["nbytes"].to_numpy().astype(float)
        curves[str(name)] = (nbytes, group["seconds"].to_numpy())
    return curves


@pytest.fixture(scope="module")
def cluster(
    shared_data: Path,
) -> tuple[dict[str, pk.Fit], dict[str, tuple[np.ndarray, np.ndarray]]]:
    logs = shared_data / "nccl_logs"
    fits = {}
    for name, points in read_curves(logs / "h100x8_1node_multi_collective.log").items():
        fits[f"{name}.8"] = fit_collective(*points)
    for name, points in read_curves(logs / "h100x10_10node_g1_multi_collective.log").items():
        fits[f"{name}.10.rail"] = fit_collective(*points)
    return fits, read_curves(logs / "h100x80_10node_multi_collective.log")


@pytest.mark.parametrize(
    ("operation", "least", "bar", "below"),
    # q was fixed on the first; its 32 MiB are 4 MiB on a rail, and nothing under 32 MiB tells the
    # start-up there
    [
        ("all_reduce", 256, 0.1, 0.7),
        ("all_gather", 2048, 0.15, 0.25),
        ("all_to_all", 256, 0.06, 0.1),
    ],
)
@pytest.mark.parametrize("rails", [True, False], ids=["measured rails", "links alone"])
def test_eighty_ranks_from_one_node_and_one_rail(cluster, operation, least, bar, below, rails):
    fits, measured = cluster
    nbytes, seconds = measured[operation]
    if not rails:
        fits = {key: fit for key, fit in fits.items() if "rail" not in key}
    found = price(operation, nbytes, fits=fits)
    errors = np.abs(found.time / seconds - 1)
    assert errors[nbytes >= 0.99 * least * 2**20].max() <= (bar if rails else 2 * bar)
    assert errors.max() <= (below if rails else math.inf)
    assert np.mean(np.abs(np.log(seconds / found.time)) < 1.2816 * found.spread) >= 0.7


def test_two_nodes_on_a_slower_network_from_the_datasheet(shared_data: Path) -> None:
    """16 A100 on 4 x 100 Gb/s per node; 13 % too fast when large, twice when small: the interval
    says so."""
    logs = shared_data / "nccl_logs"
    names = ("all_reduce", "all_gather", "reduce_scatter")
    paths = {name: logs / f"a100x8_nvswitch_{name.replace('_', '')}.log" for name in names}
    fits = {f"{name}.8": fit_collective(*read_curves(path)[name]) for name, path in paths.items()}
    network = pk.Network(8, 2, {"intra": link(300e9, 1e-6), "inter": link(6.25e9, 25e-6)}, rails=4)
    nbytes, seconds = read_curves(logs / "a100x16_2node_p4de_efa_allreduce.log")["all_reduce"]
    found = price("all_reduce", nbytes, 16, fits, network)
    errors = found.time / seconds - 1
    assert np.all(errors[nbytes >= 2**29] > -0.15)
    assert np.all(errors < 0)
    assert 0.6 <= np.mean(np.abs(np.log(seconds / found.time)) < 1.2816 * found.spread) <= 0.9


def test_a_new_algorithm_without_a_price_inside_a_node_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALGORITHMS, "leader", Algorithm("leader"))  # type: ignore[arg-type]
    platform = pk.load_platform("a100-sxm-8")
    with pytest.raises(ValueError, match=r"algorithm inside a node is 'leader'; known are ring"):
        platform.collective("all_reduce", 1e6, ranks=8, algorithm="leader")


#: Mean and largest error [-] of collectives over nodes of H100, which nothing was fitted to, by operation,
#: ranks and nodes. In chunks and at a quarter of the bandwidth alone, the means of all_reduces were 0.37,
#: 0.24 and 0.16.
PUBLISHED = {
    ("all_reduce", 16, 2): (0.18, 0.30),
    ("all_reduce", 32, 4): (0.08, 0.17),
    ("all_reduce", 64, 8): (0.12, 0.35),
    ("all_to_all", 20, 10): (0.03, 0.05),
    ("all_to_all", 40, 10): (0.06, 0.14),
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_collectives_over_nodes_come_near_published_times(case: tuple[str, int, int]) -> None:
    operation, ranks, nodes = case
    listed = pl.read_csv(find_reference("published") / "nccl_nodes.csv").filter(
        (pl.col("operation") == operation) & (pl.col("ranks") == ranks)
    )
    cluster = pk.load_platform("h100-sxm-8x8").with_nodes(nodes, ranks_per_node=ranks // nodes)
    priced = cluster.price_collective(operation, listed["nbytes"].to_numpy(), ranks)
    errors = np.abs(priced.time / listed["seconds"].to_numpy() - 1)
    mean, largest = PUBLISHED[case]
    assert len(listed) >= 7 and np.mean(errors) <= mean and np.max(errors) <= largest


def test_ranks_of_parts_of_nodes_are_priced_as_predictions_price_them() -> None:
    main = MemoryLevel("HBM", None, Quantity(2e12, "B/s", "assumed", "a test"))
    device = pk.Device("a GPU", "cuda", {}, (main,))
    platform = pk.Platform("toy", device, NETWORK, collectives=FITS)
    one = platform.collective_time("all_reduce", SIZES, ranks=10, nodes=10)
    assert np.array_equal(
        one, platform.collective_time("all_reduce", SIZES, ranks=10, algorithm="rail")
    )
    whole = platform.collective_time("all_reduce", SIZES, ranks=80, nodes=10)
    assert np.array_equal(whole, platform.collective_time("all_reduce", SIZES, ranks=80))
    # two of each node have two rails: a large message takes half as long between nodes, and more inside
    large = np.array([2.0**34])
    two = platform.collective_time("all_reduce", large, ranks=20, nodes=10)
    alone = platform.collective_time("all_reduce", large, ranks=10, nodes=10)
    assert 0.5 < float((two / alone)[0]) < 0.56
    wanted = find_group_cost(platform, "all_reduce", 20, nodes=10, most=2).time(large)
    assert np.array_equal(two, wanted)
    # inside nodes two ranks were not measured: they are scaled from eight, as without other nodes
    pair = platform.collective_time("reduce_scatter", large, ranks=2)
    assert float((two / np.hypot(alone / 2, pair))[0]) == pytest.approx(1.0, abs=0.1)
    inside = platform.collective_time("all_reduce", SIZES, ranks=8, nodes=1)
    assert np.array_equal(inside, platform.collective_time("all_reduce", SIZES, ranks=8))


@pytest.mark.parametrize(
    "ranks, nodes, words",
    [
        (9, 2, "each node must have equally many, at most 8"),
        (18, 2, "each node must have equally many, at most 8"),
        (40, 20, "nodes is 20; platform 'toy' has 10"),
        (8, 0, "nodes is 0"),
    ],
)
def test_ranks_that_no_nodes_have(ranks: int, nodes: int, words: str) -> None:
    platform = pk.load_platform("h100-sxm-8x10")
    with pytest.raises(ValueError, match=words.replace("'toy'", "'h100-sxm-8x10'")):
        platform.collective_time("all_reduce", 1e6, ranks=ranks, nodes=nodes)


def test_published_exchanges_of_parts_of_nodes() -> None:
    # docs/formulas.md, below table 1.1: 2 and 4 ranks of each of ten nodes of 8 H100
    platform = pk.load_platform("h100-sxm-8x10")
    found: dict[int, list[float]] = {20: [], 40: []}
    for rows in group_rows("ranks", "published", "nccl_nodes.csv").values():
        for row in rows:
            ranks = int(row["ranks"])
            if row["operation"] == "all_to_all" and row["nodes"] == "10" and ranks in found:
                size = float(row["nbytes"])
                time = platform.collective_time("all_to_all", size, ranks=ranks, nodes=10)
                found[ranks].append(float(time) / float(row["seconds"]))
    assert len(found[20]) == len(found[40]) == 7
    assert min(found[20]) > 0.98 and max(found[20]) < 1.05
    assert min(found[40]) > 0.87 and max(found[40]) < 1.04
