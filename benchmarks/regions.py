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
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import find_reference
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Sequences of a pipeline and its stages [-].
_BATCH, _STAGES = 96, 8
#: Far links whose event loop is set beside closed forms: bandwidth [B/s] and latency [s].
_LINKS = (5e9, 1e-3), (1e9, 1e-3), (1e8, 1e-3), (1e9, 1e-2)
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
    ranks, link = (
        _STAGES * replicas,
        {"bandwidth": float(row["bandwidth"]), "latency": float(row["latency"])},
    )
    near = (
        load_platform("v100-sxm-8").with_scale(peak=speed, memory=speed).with_link("inter", **link)
    )
    platform = near.with_link("far", **link).with_nodes(ranks, ranks_per_node=1, regions=ranks)
    way = Strategy(pp=_STAGES, dp=replicas, schedule="gpipe", checkpoint="full", overlap=False)
    with keep_quiet():
        found = price_strategies(
            replace(_GPT, batch=_BATCH * replicas), platform, Strategy.stack([way])
        )
    one = {name: float(own[0]) for name, own in found.items()}
    return one | widen(one["time"], one["spread"], float(row["seconds"]))


def compare_rows() -> list[dict[str, Any]]:
    """Rows beside predictions; the first one gives the speed of the GPUs."""
    first, *rest = read_csv(find_reference("published/slow_links.csv"))
    alone = price_row(first)
    speed = alone["time"] / float(first["seconds"])
    return [{**row, **price_row(row, speed)} for row in (first, *rest)]


def compare_loops() -> Iterator[dict[str, Any]]:
    """Event loop over closed forms by link and schedule, with two and four stages on four nodes of
    A100."""
    model, near = (
        Transformer.preset("gpt3-1.3b", batch=128, sequence=1024, dtype="bf16", fused=True),
        "a100-sxm-8x4",
    )
    schedules = {"1f1b": 1, "zero_bubble": 1, "gpipe": 1, "interleaved": 3, "breadth_first": 3}
    for (bandwidth, latency), (schedule, chunks) in product(_LINKS, schedules.items()):
        apart = []
        for regions, stages, share in product((2, 4), (2, 4), (1, 4)):
            far = load_platform(near).with_link("far", bandwidth=bandwidth, latency=latency)
            far = far.with_nodes(4, regions=regions)
            way = Strategy(
                tp=share, pp=stages, dp=32 // stages // share, schedule=schedule, chunks=chunks
            )
            with keep_quiet():
                closed = float(price_strategies(model, far, Strategy.stack([way]))["time"][0])
                apart.append(100.0 * (predict(model, far, strategy=way).time / closed - 1.0))
        link = f"{bandwidth:g} B/s, {latency:g} s"
        yield {
            "link": link,
            "schedule": schedule,
            "n": len(apart),
            "mean": np.mean(apart),
            "low": min(apart),
            "high": max(apart),
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
    first, *rows = compare_rows()
    columns = {
        "pipelines": "{pipelines}",
        "link [B/s]": "{bandwidth}",
        "latency [s]": "{latency}",
        "published": "{measured:time}",
        "predicted": "{predicted:time}",
        "error": "{error:+.1%}",
    }
    print(lay_out([first, *rows], columns))
    alone = [row for row in rows if row["pipelines"] == "1"]
    judged = [
        {"what": what, **judge(own)}
        for what, own in (("one pipeline", alone), ("all but the first", rows))
    ]
    shown = {"rows": "{what}", "n": "{n}"}
    shown |= {name: f"{{{name}:.1f}}" for name in ("geomean", "mean", "p95", "bias", "inside")}
    print(f"\nErrors in %, and share inside the 80 % interval\n{lay_out(judged, shown)}")
    if given.loop:
        shown = {"far link": "{link}", "schedule": "{schedule}", "n": "{n}"}
        shown |= {name: f"{{{name}:+.0f}}" for name in ("mean", "low", "high")}
        print(f"\nEvent loop over closed forms [%]\n{lay_out([*compare_loops()], shown)}")
