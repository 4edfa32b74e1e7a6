"""Fuzzers of optimizers, timelines and waiting: laws that hold for every iteration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import perfkit as pk
from perfkit.models.optimizers import find_optimizer
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense

#: States of each optimizer that is drawn, in fp32 numbers for each weight; two of 8 bits, with a scale
#: for 2,048 numbers, are half of one.
NUMBERS_KEPT = {
    "sgd": 0.0,
    "sgd_momentum": 1.0,
    "adagrad": 1.0,
    "adam": 2.0,
    "adamw": 2.0,
    "adamw_8bit": 0.5 + 2.0 / 2048.0,
}


def _predict_tables(rng: Rng) -> pk.Prediction:
    """Unlike tables on ranks of which one may be slow."""
    count = int(rng.integers(2, 12))
    platform = choose(rng, ["h100-sxm-8", "v100-sxm-8", "zen5-2"])
    ranks = 2 if platform == "zen5-2" else int(choose(rng, [2, 4, 8]))
    model = pk.DLRM(
        rows=[int(rows) for rows in 10 ** rng.uniform(2, 7, count)],
        pooling=[int(pooling) for pooling in rng.integers(1, 60, count)],
        dim=int(choose(rng, [8, 32, 128])),
        bottom=[64],
        top=[64],
        features=4,
        batch=ranks * int(choose(rng, [16, 512, 8192])),
        overlap=bool(rng.integers(2)),
    )
    slowdown = {0: float(choose(rng, [1.0, 1.5, 4.0]))}
    loading = float(choose(rng, [0.0, 0.02]))
    return pk.predict(model, platform, ranks=ranks, slowdown=slowdown, loading=loading)


def end_timelines(rng: Rng, folder: Path) -> Any:
    """Operations and the critical path end with the iteration."""
    r = _predict_tables(rng)
    near = 1e-6 * r.time
    for ends in (r.timeline()["end_s"], r.critical_path()["end_s"]):
        if abs(float(ends.to_numpy().max()) - r.time) > near:
            raise Nonsense(f"ends at {ends.max()} s, and the iteration takes {r.time} s")
    return r


def blame_hosts(rng: Rng, folder: Path) -> Any:
    """No rank waits for others while its own host is not done."""
    r = _predict_tables(rng)
    if r.platform.device.kind == "cpu":
        return r
    rank_timelines = {
        rank_timeline.times.group.ranks[0]: rank_timeline.times
        for rank_timeline in r._timeline.rank_timelines
    }
    for row in r.idle().rows(named=True):
        times = rank_timelines[row["rank"]]
        host = float(times.host.sum() + times.launch_interval.sum())
        if row["waiting_s"] > max(r.time - host, 0.0) + 1e-6 * r.time:
            raise Nonsense(
                f"rank {row['rank']} waits {row['waiting_s']} s, its host takes {host} s"
            )
    return r


def keep_states(rng: Rng, folder: Path) -> Any:
    """States of an optimizer are the same in the memory of a model and of its strategy."""
    name = choose(rng, (*NUMBERS_KEPT, "muon", "adafactor"))
    fused = bool(rng.integers(2)) and "fused" in find_optimizer(name).forms
    sizes = {"layers": int(rng.integers(1, 4)), "hidden": 128, "heads": 4, "sequence": 64}
    needs = []
    for optimizer in (name, "sgd"):
        model = pk.Transformer.gpt2(batch=8, optimizer=optimizer, fused=fused, **sizes)
        kept = [pk.predict(model, "h100-sxm-8", ranks=8).memory().parts["states"]]
        if fused:  # other forms of an update also need what they compute on the way
            table = pk.explore(model, "h100-sxm-8", strategies=[pk.Strategy(dp=8)]).table()
            kept.append(float(table["needs_bytes"][0]))
        needs.append(kept)
    if name not in NUMBERS_KEPT:  # by shape: numbers of rows and columns, or those of one state
        return _keep_by_shape(name, fused, sizes)
    [graph] = model.graphs()
    states = 4.0 * NUMBERS_KEPT[name] * graph.parameters
    for kept, plain in zip(*needs, strict=True):
        if abs(kept - plain - states) > 1e-3 * states + 1.0:
            raise Nonsense(f"{name} keeps {kept - plain} B; its states are {states} B")
    return needs


def _keep_by_shape(name: str, fused: bool, sizes: Mapping[str, int]) -> tuple[float, float]:
    """States whose numbers depend on shapes are the same in a model and in closed forms, but for step
    counters, and fewer than those of Adam."""
    model = pk.Transformer.gpt2(batch=8, optimizer=name, fused=fused, **sizes)
    strategy = pk.Strategy(dp=8, checkpoint="full", overlap=name == "adafactor")
    of_model = pk.predict(model, "h100-sxm-8", ranks=8).memory().parts["states"]
    of_strategy = pk.predict(model, "h100-sxm-8", strategy=strategy).memory().parts["states"]
    [graph] = model.graphs()
    counters = 4.0 * 20 * (sizes["layers"] + 1)
    if abs(of_model - of_strategy) > counters or of_model > 8.0 * graph.parameters:
        raise Nonsense(f"{name} keeps {of_model} B, and {of_strategy} B as a strategy")
    return of_model, of_strategy


ENTRIES = {
    "timelines end": Entry(end_timelines, 0.05, new=True),
    "waiting of hosts": Entry(blame_hosts, 0.05, new=True),
    "states of optimizers": Entry(keep_states, 0.05, new=True),
}
