"""A fused all_reduce and Adam beside the two after each other: their times, and where one overtakes
the other.

    python -m benchmarks.updates

CoCoNet (arXiv:2105.05720) timed both on 8 DGX-2, 128 V100 with 8 adapters of 100 Gb/s a node; the
rows come from the folder that PERFKIT_SHARED_DATA names. Times are those by which NCCL chooses
algorithm and protocol (NVIDIA, NCCL 2.7, src/graph/tuning.cc), and the bytes of the update. Nothing
is fitted, and the time of the host is left out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.units import Array
from perfkit.models.collectives import ring_steps
from perfkit.models.roofline import optimizer_bytes

LOCAL = 16  # ranks of a node
NODES = 8
#: Memory of a V100, by its datasheet [B/s].
MEMORY = 9e11
#: Eight adapters of a node; NCCL counts 12 GB/s for 100 Gb/s [B/s].
BUS = 8 * 12e9


class Ring(NamedTuple):
    """A ring over nodes: start-up and step [us], and bandwidth [B/s]."""

    start: float
    step: float
    bandwidth: float


class Tree(NamedTuple):
    """A tree over nodes: start-up, hop inside a node and between nodes [us], bandwidth [B/s], and the
    share of it that messages reach, by powers of two from 64 B on [-]."""

    start: float
    near: float
    far: float
    bandwidth: float
    shares: tuple[float, ...]


_RINGS = {
    "LL": Ring(3.6, 0.9, BUS / 4),
    "LL128": Ring(3.6, 2.5, BUS * 120 / 128),
    "Simple": Ring(8.4, 6.6, BUS),
}
# fmt: off
_SHARES = {
    "LL": (
        1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 1, 1, 1, 1,
    ),
    "LL128": (
        1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.6, 0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 1, 1,
    ),
    "Simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8,
        0.9, 1,
    ),
}
# fmt: on
_TREES = {
    "LL": Tree(4.4, 0.5, 5.0, 80e9 / 3, _SHARES["LL"]),
    "LL128": Tree(4.4, 1.9, 7.5, 80e9 * 7 / 9, _SHARES["LL128"]),
    "Simple": Tree(0.0, 28.0, 50.0, 80e9, _SHARES["Simple"]),
}
NEW, OLD = ("LL", "LL128", "Simple"), ("LL", "Simple")
_FUSED, _SEPARATE = "coconet_fused_RS_Adam_AG", "all_reduce_then_"
#: Optimizer of the rows, and its name in perfkit. Adam of that time had two operations where there is one today (lerp_), so it moved the bytes of
#: today's AdamW.
_UPDATES = {"fusedadam": "adam_fused", "adam": "adamw"}


def time_ring(nbytes: Array, protocols: Sequence[str] = NEW) -> Array:
    """Time of an all_reduce on a ring over all ranks, by the fastest protocol [s]."""
    ranks = LOCAL * NODES
    steps = ring_steps("all_reduce", ranks)
    times = list[Array]()
    for name in protocols:
        ring = _RINGS[name]
        latency = 1e-6 * (ring.start + steps * ring.step)
        times.append(latency + nbytes * steps / ranks / ring.bandwidth)
    return np.asarray(np.minimum.reduce(times))


def time_tree(nbytes: Array, protocols: Sequence[str] = NEW) -> Array:
    """Time of an all_reduce on a tree of nodes with a chain in each node, by the fastest protocol
    [s]."""
    power = np.clip(np.log2(nbytes / 64).astype(int), 0, 22)
    times = list[Array]()
    for name in protocols:
        tree = _TREES[name]
        hops = (LOCAL - 1) * tree.near + np.log2(NODES) * tree.far
        rate = tree.bandwidth * np.array(tree.shares)[power]
        times.append(1e-6 * (tree.start + 2 * hops) + 2 * nbytes / rate)
    return np.asarray(np.minimum.reduce(times))


def predict_updates(
    numbers: Array, optimizer: str, separate: Sequence[str] = OLD
) -> dict[str, Array]:
    """Times of both by how the fused one was sent, and after each other with these protocols [s].

    The separate all_reduce is PyTorch's own: NCCL_ALGO, known from NCCL 2.5 on, changed none of its
    times. So it is an older library, and LL128 came with 2.5 too. In the fused kernel a rank
    updates its part alone.
    """
    nbytes = 4.0 * numbers
    part_update = optimizer_bytes("adam_fused", numbers) / (LOCAL * NODES) / MEMORY
    whole_update = optimizer_bytes(_UPDATES[optimizer], numbers) / MEMORY
    ring = time_ring(nbytes) + part_update
    tree = time_tree(nbytes) + part_update
    reduction = np.minimum(time_ring(nbytes, separate), time_tree(nbytes, separate))
    return {
        "Ring": ring,
        "Tree": tree,
        "Default": np.minimum(ring, tree),
        "separate": reduction + whole_update,
    }


def find_crossing(numbers: Array, one: Array, other: Array) -> float:
    """Numbers from which on the sign of one - other stays what it is at the largest size, nan if it
    never changes."""
    ahead = np.log(one / other)
    turns = np.flatnonzero(ahead[1:] * ahead[:-1] < 0)
    if not turns.size:
        return float("nan")
    last = turns[-1]
    share = ahead[last] / (ahead[last] - ahead[last + 1])
    growth = numbers[last + 1] / numbers[last]
    return float(numbers[last] * growth**share)


def read_updates() -> tuple[Array, dict[tuple[str, str], Array]]:
    """Numbers [-], and published times by what was run and how it was sent [s]."""
    published: dict[tuple[str, str], dict[int, float]] = {}
    for row in read_csv(find_shared_data("end_to_end", "coconet_allreduce_adam_128gpu.csv")):
        times = published.setdefault((row["op"], row["nccl_algo"]), {})
        times[int(row["elements"])] = float(row["iter_ms"]) / 1e3
    numbers = sorted(next(iter(published.values())))
    seconds = {}
    for run, times in published.items():
        seconds[run] = np.array([times[number] for number in numbers])
    return np.array(numbers, dtype=float), seconds


def compare_crossings() -> list[dict[str, Any]]:
    """Sizes from which on the fused kernel stays faster or slower, published and predicted [million
    numbers]."""
    numbers, real = read_updates()
    rows = list[dict[str, Any]]()
    fine = 2.0 ** np.arange(10, 30.001, 0.01)

    def add(name: str, published: float, predicted: float) -> None:
        factor = max(published / predicted, predicted / published)
        sizes = {"published": published / 1e6, "predicted": predicted / 1e6}
        rows.append({"what": name, **sizes, "factor": factor})

    for optimizer in _UPDATES:
        times = predict_updates(fine, optimizer)
        separate = real[_SEPARATE + optimizer, "Default"]
        for way in ("Ring", "Tree", "Default"):
            published = find_crossing(numbers, real[_FUSED, way], separate)
            predicted = find_crossing(fine, times[way], times["separate"])
            add(f"fused {way} and {optimizer}", published, predicted)
    published = find_crossing(numbers, real[_FUSED, "Tree"], real[_FUSED, "Ring"])
    predicted = find_crossing(fine, times["Tree"], times["Ring"])
    add("fused Tree and fused Ring", published, predicted)
    return rows


def judge_times() -> list[dict[str, Any]]:
    """Mean errors of the times by run: of all sizes, and of a million numbers and more [-]."""
    numbers, real = read_updates()
    is_large = numbers >= 2**20
    rows = []
    for (run, way), times in real.items():
        optimizer = "adam" if run == _SEPARATE + "adam" else "fusedadam"
        predicted = predict_updates(numbers, optimizer)
        errors = predicted[way if run == _FUSED else "separate"] / times - 1
        rows.append(
            {
                "what": run,
                "way": way,
                "n": len(times),
                "all": np.abs(errors).mean(),
                "large": np.abs(errors[is_large]).mean(),
                "bias": errors[is_large].mean(),
            }
        )
    return rows


_CROSSINGS = {
    "crossing of": "{what}",
    "published": "{published:.2f}",
    "predicted": "{predicted:.2f}",
    "factor": "{factor:.2f}",
}
_ERRORS = {
    "run": "{what}",
    "NCCL_ALGO": "{way}",
    "n": "{n}",
    "all sizes": "{all:.0%}",
    "1 million and more": "{large:.0%}",
    "bias there": "{bias:+.0%}",
}


@command({})
def main(given: Any) -> None:
    """Fused and separate all_reduce and Adam, published and predicted."""
    print(
        "Millions of numbers from which on the first of two stays faster, or slower; empty: it never changes"
    )
    print(lay_out(compare_crossings(), _CROSSINGS))
    print(f"\nMean error of the times\n{lay_out(judge_times(), _ERRORS)}")
