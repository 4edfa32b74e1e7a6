"""Pipelines over slow links: published iterations of a GPT with 1.3 billion parameters, beside
predictions.

    python -m benchmarks.regions [--loop]

Every V100 is in a machine of its own, and links are as slow as between homes or regions
(arXiv:2206.01288). That program computes more slowly than the published steps that perfkit knows:
the speed of its GPUs is taken from the row without replicas on the fastest link, and the others are
judged. With ``--loop`` strategies on nodes in two and four regions are priced by the event loop and
by closed forms too.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import lay_out_errors, widen
from benchmarks.helpers.files import read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import find_reference
from perfkit.models.partitions import SCHEDULES
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Sequences of a pipeline and its stages [-].
_BATCH, _STAGES = 96, 8
#: Far links whose event loop is set beside closed forms: bandwidth [B/s] and latency [s].
_LINKS = (5e9, 1e-3), (1e9, 1e-3), (1e8, 1e-3), (1e9, 1e-2)
#: Chunks of each stage, by schedule [-].
_CHUNKS = {
    name: 3 if schedule.has_chunks else 1
    for name, schedule in SCHEDULES.items()
    if not schedule.is_v_shaped
}
#: The model without the weights of its embeddings and head, which its authors call very light.
_GPT = Transformer.preset(
    "gpt3-1.3b",
    sequence=2048,
    heads=16,
    vocabulary=64,
    dtype="fp16",
    attention="eager",
    optimizer="sgd",
)


def price_row(row: dict[str, str], speed: float = 1.0) -> dict[str, float]:
    """Time of a row and its parts [s]; GPUs are so many times as fast as the platform [-]."""
    replicas = int(row["pipelines"])
    ranks = _STAGES * replicas
    bandwidth = float(row["bandwidth"])
    latency = float(row["latency"])
    platform = load_platform("v100-sxm-8").with_scale(peak=speed, memory=speed)
    for link in ("inter", "far"):
        platform = platform.with_link(link, bandwidth=bandwidth, latency=latency)
    platform = platform.with_nodes(ranks, ranks_per_node=1, regions=ranks)
    strategy = Strategy(pp=_STAGES, dp=replicas, schedule="gpipe", checkpoint="full", overlap=False)
    model = replace(_GPT, batch=_BATCH * replicas)
    with keep_quiet():
        columns = price_strategies(model, platform, Strategy.stack([strategy]))
    priced = {name: float(values[0]) for name, values in columns.items()}
    return {**priced, **widen(priced["time"], priced["spread"], float(row["seconds"]))}


def compare_rows() -> list[dict[str, Any]]:
    """Rows beside predictions; the first one gives the speed of the GPUs."""
    rows = read_csv(find_reference("published/slow_links.csv"))
    alone = price_row(rows[0])
    speed = alone["time"] / float(rows[0]["seconds"])
    return [{**row, **price_row(row, speed)} for row in rows]


def _compare_loop(model: Transformer, platform: Platform, strategy: Strategy) -> float:
    """How much longer the event loop takes than the closed form [%]."""
    with keep_quiet():
        closed = price_strategies(model, platform, Strategy.stack([strategy]))
        loop = predict(model, platform, strategy=strategy)
    return 100.0 * (loop.time / float(closed["time"][0]) - 1.0)


def compare_loops() -> Iterator[dict[str, Any]]:
    """Event loop over closed forms by link and schedule, with two and four stages on four nodes of
    A100."""
    model = Transformer.preset("gpt3-1.3b", batch=128, sequence=1024, dtype="bf16", fused=True)
    node = load_platform("a100-sxm-8x4")
    for (bandwidth, latency), (schedule, chunks) in product(_LINKS, _CHUNKS.items()):
        linked = node.with_link("far", bandwidth=bandwidth, latency=latency)
        apart = []
        for regions, stages, share in product((2, 4), (2, 4), (1, 4)):
            replicas = 32 // stages // share
            strategy = Strategy(tp=share, pp=stages, dp=replicas, schedule=schedule, chunks=chunks)
            apart.append(_compare_loop(model, linked.with_nodes(4, regions=regions), strategy))
        yield {
            "link": f"{bandwidth:g} B/s, {latency:g} s",
            "schedule": schedule,
            "n": len(apart),
            "mean": np.mean(apart),
            "low": min(apart),
            "high": max(apart),
        }


_ROWS = {
    "pipelines": "{pipelines}",
    "link [B/s]": "{bandwidth}",
    "latency [s]": "{latency}",
    "published": "{measured:time}",
    "predicted": "{predicted:time}",
    "error": "{error:+.1%}",
}
_LOOPS = {
    "far link": "{link}",
    "schedule": "{schedule}",
    "n": "{n}",
    "mean": "{mean:+.0f}",
    "low": "{low:+.0f}",
    "high": "{high:+.0f}",
}


@command(
    {
        "--loop": {
            "action": "store_true",
            "help": "set the event loop beside the closed forms too (a minute)",
        }
    }
)
def main(given: Any) -> None:
    """Pipelines over slow links, published and predicted."""
    rows = compare_rows()
    judged = rows[1:]  # the first one gave the speed
    alone = [row for row in judged if row["pipelines"] == "1"]
    print(lay_out(rows, _ROWS))
    print(f"\n{lay_out_errors({'one pipeline': alone, 'all but the first': judged})}")
    if given.loop:
        print(f"\nEvent loop over closed forms [%]\n{lay_out(list(compare_loops()), _LOOPS)}")
