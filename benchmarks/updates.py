"""A fused all_reduce and Adam beside the two after each other: their times, and where one overtakes
the other.

    python -m benchmarks.updates

CoCoNet (arXiv:2105.05720) timed both on 8 DGX-2, 128 V100 with 8 adapters of 100 Gb/s a node; the
rows come from the folder that PERFKIT_SHARED_DATA names. Times are those by which NCCL chooses
algorithm and protocol (NVIDIA, NCCL 2.7, src/graph/tuning.cc), and the bytes of the update. Nothing
is fitted, and the time of the host is left out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.units import Array
from perfkit.models.collectives import ring_steps
from perfkit.models.roofline import optimizer_bytes

#: Ranks of a node and nodes [-]; memory of a V100 (datasheet), and 12 GB/s that NCCL counts for 100
#: Gb/s [B/s].
LOCAL, NODES, MEMORY, BUS = 16, 8, 9e11, 8 * 12e9
#: Start-up and step of a ring over nodes; start-up, hop inside a node and between nodes of a tree,
#: by protocol [us].
_RINGS = {"LL": (3.6, 0.9), "LL128": (3.6, 2.5), "Simple": (8.4, 6.6)}
_TREES = {"LL": (4.4, 0.5, 5.0), "LL128": (4.4, 1.9, 7.5), "Simple": (0.0, 28.0, 50.0)}
#: Bandwidth of a ring and of a tree [B/s]; a tree has a share of it, by powers of two from 64 B on
#: [-].
_RATES = {
    "LL": (BUS / 4, 80e9 / 3),
    "LL128": (BUS * 120 / 128, 80e9 * 7 / 9),
    "Simple": (BUS, 80e9),
}
_SHARES = {
    "LL": (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.5,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        0.9,
        1,
        1,
        1,
        1,
    ),
    "LL128": (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.8,
        0.7,
        0.7,
        0.7,
        0.6,
        0.6,
        0.7,
        0.7,
        0.8,
        0.8,
        0.9,
        0.9,
        1,
        1,
    ),
    "Simple": (*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, *[0.5] * 6, 0.6, 0.6, 0.7, 0.8, 0.9, 1),
}
NEW, OLD = ("LL", "LL128", "Simple"), ("LL", "Simple")
_FUSED, _SEPARATE = "coconet_fused_RS_Adam_AG", "all_reduce_then_"
#: Optimizer of the rows, and its name in perfkit. Adam of that time had two operations where there is one today (lerp_), so it moved the bytes of
#: today's AdamW.
_UPDATES = {"fusedadam": "adam_fused", "adam": "adamw"}


def time_ring(nbytes: Array, protocols: Sequence[str] = NEW) -> Array:
    """Time of an all_reduce on a ring over all ranks, by the fastest protocol [s]."""
    ranks, times = LOCAL * NODES, list[Array]()
    steps = ring_steps("all_reduce", ranks)
    for name in protocols:
        start, step = _RINGS[name]
        times.append(1e-6 * (start + steps * step) + nbytes * steps / ranks / _RATES[name][0])
    return np.asarray(np.minimum.reduce(times))


def time_tree(nbytes: Array, protocols: Sequence[str] = NEW) -> Array:
    """Time of an all_reduce on a tree of nodes with a chain in each node, by the fastest protocol
    [s]."""
    times, place = list[Array](), np.clip(np.log2(nbytes / 64).astype(int), 0, 22)
    for name in protocols:
        start, near, far = _TREES[name]
        rate = _RATES[name][1] * np.array(_SHARES[name])[place]
        times.append(
            1e-6 * (start + 2 * ((LOCAL - 1) * near + np.log2(NODES) * far)) + 2 * nbytes / rate
        )
    return np.asarray(np.minimum.reduce(times))


def predict_updates(
    numbers: Array, optimizer: str, separate: Sequence[str] = OLD
) -> dict[str, Array]:
    """Times of both by how the fused one was sent, and after each other with these protocols [s].

    The separate all_reduce is PyTorch's own: NCCL_ALGO, known from NCCL 2.5 on, changed none of its
    times. So it is an older library, and LL128 came with 2.5 too. In the fused kernel a rank
    updates its part alone.
    """
    nbytes, own = 4.0 * numbers, optimizer_bytes("adam_fused", numbers) / (LOCAL * NODES) / MEMORY
    ring, tree = time_ring(nbytes) + own, time_tree(nbytes) + own
    before = np.minimum(time_ring(nbytes, separate), time_tree(nbytes, separate))
    after = before + optimizer_bytes(_UPDATES[optimizer], numbers) / MEMORY
    return {"Ring": ring, "Tree": tree, "Default": np.minimum(ring, tree), "separate": after}


def find_crossing(numbers: Array, one: Array, other: Array) -> float:
    """Numbers from which on the sign of one - other stays what it is at the largest size, nan if it
    never changes."""
    ahead = np.log(one / other)
    if not (turns := np.flatnonzero(ahead[1:] * ahead[:-1] < 0)).size:
        return float("nan")
    place = turns[-1]
    share = ahead[place] / (ahead[place] - ahead[place + 1])
    return float(numbers[place] * (numbers[place + 1] / numbers[place]) ** share)


def read_updates() -> tuple[Array, dict[tuple[str, str], Array]]:
    """Numbers [-], and published times by what was run and how it was sent [s]."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in read_csv(find_shared_data("end_to_end", "coconet_allreduce_adam_128gpu.csv")):
        found.setdefault((row["op"], row["nccl_algo"]), {})[int(row["elements"])] = (
            float(row["iter_ms"]) / 1e3
        )
    numbers = sorted(next(iter(found.values())))
    return np.array(numbers, dtype=float), {
        key: np.array([own[n] for n in numbers]) for key, own in found.items()
    }


def compare_crossings() -> list[dict[str, Any]]:
    """Sizes from which on the fused kernel stays faster or slower, published and predicted [million
    numbers]."""
    (numbers, real), rows = read_updates(), list[dict[str, Any]]()
    fine, found = 2.0 ** np.arange(10, 30.001, 0.01), dict[str, Array]()

    def judge(what: str, one: Array, other: Array, own: str, against: str) -> None:
        published, predicted = (
            find_crossing(numbers, one, other),
            find_crossing(fine, found[own], found[against]),
        )
        factor = max(published / predicted, predicted / published)
        rows.append(
            {
                "what": what,
                "published": published / 1e6,
                "predicted": predicted / 1e6,
                "factor": factor,
            }
        )

    for optimizer in _UPDATES:
        found |= predict_updates(fine, optimizer)
        for way in ("Ring", "Tree", "Default"):
            separate = real[_SEPARATE + optimizer, "Default"]
            judge(f"fused {way} and {optimizer}", real[_FUSED, way], separate, way, "separate")
    judge("fused Tree and fused Ring", real[_FUSED, "Tree"], real[_FUSED, "Ring"], "Tree", "Ring")
    return rows


@command({})
def main(given: Any) -> None:
    """Fused and separate all_reduce and Adam, published and predicted."""
    numbers, real = read_updates()
    print(
        "Millions of numbers from which on the first of two stays faster, or slower; empty: it never changes"
    )
    figures = {
        "published": "{published:.2f}",
        "predicted": "{predicted:.2f}",
        "factor": "{factor:.2f}",
    }
    print(lay_out(compare_crossings(), {"crossing of": "{what}", **figures}))
    rows = []
    for (what, way), times in real.items():
        found = predict_updates(numbers, "adam" if what == _SEPARATE + "adam" else "fusedadam")
        errors = found[way if what == _FUSED else "separate"] / times - 1
        large = errors[numbers >= 2**20]
        about = {"all": np.abs(errors).mean(), "large": np.abs(large).mean(), "bias": large.mean()}
        rows.append({"what": what, "way": way, "n": len(times), **about})
    figures = {
        "all sizes": "{all:.0%}",
        "1 million and more": "{large:.0%}",
        "bias there": "{bias:+.0%}",
    }
    print(
        f"\nMean error of the times\n{lay_out(rows, {'run': '{what}', 'NCCL_ALGO': '{way}', 'n': '{n}', **figures})}"
    )
