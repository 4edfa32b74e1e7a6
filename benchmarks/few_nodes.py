"""Collectives on many nodes, predicted from one or two of the same system.

python -m benchmarks.few_nodes

For each system the platform is made from what was measured on at most two nodes, and judged on what was
measured on more of them, or on all GPUs of a node where only some were. Three ways:

- part of a node: two of eight GPUs, or two and four, say what eight take.
- one node: its collectives are measured, or those of the gallery's node with the same GPUs; of the network
  only the adapters are known, by name or by datasheet.
- two nodes: they show the link between nodes, or they do not, as an all_reduce on two nodes with NVLink may
  be faster than the adapters. Where a source states one size alone, which is too few for a curve, the link
  is slowed until two nodes take what was measured.

Nothing of the rows that judge a system is used to predict it. The growth of intervals with the nodes,
`SIGMA_OF_NODES`, is one number for all: it is fitted here again without the system that is judged. Constants
of the forms are older: those inside nodes were chosen on the A100 and H100 of aiconfigurator, those over
nodes on the ten nodes of H100, whose rows say so.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, lay_out_errors, widen
from benchmarks.helpers.files import find_shared_data
from benchmarks.helpers.tables import Row, lay_out
from perfkit.ground.files import find_reference
from perfkit.platform import collective_costs
from perfkit.platform.collective_costs import NODES_OF_LINK, SIGMA_TRANSFER
from perfkit.platform.datasheets import HOP
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.sources import add_curves
from perfkit.readers.nccl import read_nccl_tests

#: Messages from this size on are transfer for the most part: they fit the growth of intervals [B].
LARGE = 2.0**26
#: Spread of a link that two nodes show [-]: that of fitted collectives.
SHOWN = 0.1
#: Values of the growth of intervals that are tried [-].
_GROWTHS = np.linspace(0.0, 0.8, 161)
#: Operations of logs that are judged.
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
#: The system whose small messages tell the latency of its network in node_networks.csv.
START_UP_KNOWN = "Google a3-mega"
#: The system that the forms over nodes were fixed on.
FIXED = "H100 x 80, xxrjun cluster01"


@dataclass(frozen=True)
class System:
    """What is predicted for one system.

    Parameters
    ----------
    name : str
        The system and where it is from.
    way : str
        From what it is predicted.
    platform : Platform
        Its nodes, with a network.
    measured : polars.DataFrame
        Columns operation, ranks, nodes, nbytes [B], seconds [s].
    spread : float or None
        Spread of large messages between as many nodes as were measured, where the system takes part in
        the fit of their growth [-].
    """

    name: str
    way: str
    platform: pk.Platform
    measured: pl.DataFrame
    spread: float | None = None

    def predict(self) -> list[Row]:
        """Each measured time beside the predicted one, with its interval."""
        rows: list[Row] = []
        for (operation, ranks, nodes), group in self.measured.group_by(
            "operation", "ranks", "nodes", maintain_order=True
        ):
            sizes = group["nbytes"].to_numpy().astype(float)
            local = ranks // nodes
            platform = self.platform.with_nodes(nodes)
            algorithm = "rail" if local == 1 else None
            if 1 < local < platform.network.ranks_per_node:
                platform = platform.with_nodes(nodes, ranks_per_node=local)
            with keep_quiet():
                priced = platform.price_collective(operation, sizes, ranks, algorithm)
            spreads = np.broadcast_to(priced.spread, sizes.shape)
            for place, seconds in enumerate(group["seconds"].to_list()):
                figures = widen(float(priced.time[place]), float(spreads[place]), seconds)
                about = {"operation": operation, "nodes": nodes, "nbytes": sizes[place]}
                rows.append({**about, **figures})
        return rows


def _read_published(file: str) -> pl.DataFrame:
    """A table of published collectives."""
    return pl.read_csv(find_reference("published", file).read_bytes())


def _select(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select("operation", "ranks", "nodes", "nbytes", "seconds")


def _read_log(name: str) -> pl.DataFrame:
    """Out-of-place times of a log of the shared data."""
    rows = read_nccl_tests(find_shared_data("nccl_logs", name))
    rows = rows.filter(~pl.col("in_place") & (pl.col("nbytes") > 0))
    return rows.filter(pl.col("operation").is_in(_OPERATIONS))


def _match_link(platform: pk.Platform, two: pl.DataFrame) -> pk.Platform | None:
    """The platform whose link between nodes gives the measured times of two of them; None where they
    are shorter than with its whole bandwidth."""
    sizes, seconds = two["nbytes"].to_numpy().astype(float), two["seconds"].to_numpy()
    ranks = 2 * platform.network.ranks_per_node
    full = platform.network.links["inter"].bandwidth.value

    def miss(bandwidth: float) -> float:
        slowed = platform.with_link("inter", bandwidth=bandwidth).with_nodes(2)
        with keep_quiet():
            times = slowed.collective_time("all_reduce", sizes, ranks=ranks)
        return float(np.median(np.log(times / seconds)))

    if miss(full) >= 0:
        return None
    low, high = full / 100, full
    for _ in range(40):
        middle = math.sqrt(low * high)
        if miss(middle) > 0:
            low = middle
        else:
            high = middle
    return platform.with_link("inter", bandwidth=low)


def list_parts_of_nodes() -> Iterator[System]:
    """Eight GPUs of a node from two, and from two and four."""
    for name, node in (("a100_sxm", "a100-sxm-8"), ("h100_sxm", "h100-sxm-8")):
        frame = pl.read_csv(find_shared_data("nccl", f"nccl_{name}.csv"), infer_schema_length=None)
        frame = frame.filter(
            pl.col("dtype") == "half", pl.col("nccl_version_recorded") != "unrecorded"
        ).select(
            operation=pl.col("op").replace({"alltoall": "all_to_all"}),
            ranks=pl.col("num_gpus"),
            nodes=pl.lit(1),
            dtype=pl.lit("fp16"),
            nbytes=pl.col("message_bytes"),
            seconds=1e-6 * pl.col("latency_us"),
        )
        frame = frame.group_by("operation", "ranks", "nodes", "dtype", "nbytes").agg(
            pl.col("seconds").median()
        )
        frame = frame.sort("operation", "ranks", "nbytes")
        bare = replace(pk.load_platform(node), collectives={})
        for counts in ((2,), (2, 4)):
            part = frame.filter(pl.col("ranks").is_in(list(counts)))
            with keep_quiet():
                platform = add_curves(bare, part, source="aiconfigurator", date="")
            way = f"part of a node: {' and '.join(map(str, counts))} of 8 GPUs"
            yield System(f"{name}, aiconfigurator", way, platform, _select(frame.filter(ranks=8)))


def list_logged() -> Iterator[System]:
    """Systems of the logs in the shared data."""
    one = _read_log("h100x8_1node_multi_collective.log")
    with keep_quiet():
        node = add_curves(pk.load_platform("h100-sxm-8"), one, source="its own log", date="")
    node = node.with_nodes(10, network="dgx-h100")
    way = "one node, 400 Gb/s a GPU"
    whole = _read_log("h100x80_10node_multi_collective.log").filter(
        pl.col("operation") != "send_recv"
    )
    yield System(FIXED, way, node, _select(whole))
    rails = _read_log("h100x10_10node_g1_multi_collective.log")
    rails = rails.filter(pl.col("operation") != "send_recv")
    yield System(f"{FIXED}, one GPU a node", way, node, _select(rails))
    some = _read_published("nccl_nodes.csv").filter(pl.col("operation") == "all_to_all")
    yield System(f"{FIXED}, 2 and 4 GPUs a node", way, node, _select(some))
    pair = _read_log("h100x16_2node_alltoall_sendrecv.log")
    base = pk.load_platform("h100-sxm-8").with_nodes(2, network="dgx-h100")
    yield System(
        "H100 x 16, xxrjun cluster00", "gallery's node, 400 Gb/s a GPU", base, _select(pair)
    )
    # its log names no devices
    efa = _read_log("a100x16_2node_p4de_efa_allreduce.log").with_columns(nodes=pl.lit(2))
    base = pk.load_platform("a100-sxm-8").with_nodes(2, network="p4de")
    yield System("A100 x 16, p4de", "gallery's node, network p4de", base, _select(efa))


def list_published() -> Iterator[System]:
    """Published all_reduces of several systems, from two nodes where those show the link."""
    listed = _read_published("node_scaling.csv").with_columns(pl.col("network").fill_null(""))
    for (name, node, network), group in listed.group_by(
        "system", "node", "network", maintain_order=True
    ):
        platform = pk.load_platform(node)
        if network:
            platform = platform.with_nodes(2, network=network)
            way = f"gallery's node, network {network}"
            if name == START_UP_KNOWN:
                group = group.filter(pl.col("nbytes") >= LARGE)
        else:
            # eight adapters of 100 Gb/s are no network of a provider
            platform = platform.with_link("inter", bandwidth=12.5e9, latency=HOP.value).with_nodes(
                2
            )
            way = "gallery's node, 8 x 100 Gb/s"
        yield from _judge_many(name, way, platform, group)
    curves = _read_published("nccl_nodes.csv").filter(pl.col("operation") == "all_reduce")
    platform = pk.load_platform("h100-sxm-8").with_nodes(2, network="dgx-h100")
    way = "gallery's node, network dgx-h100"
    name = "H100, NVIDIA/nccl-tests issue 309"
    yield from _judge_many(name, way, platform, curves.filter(pl.col("ranks") != 32))
    other = "H100, the same issue, another cluster"
    yield from _judge_many(other, way, platform, curves.filter(pl.col("ranks") == 32))


def _judge_many(
    name: str, way: str, platform: pk.Platform, group: pl.DataFrame
) -> Iterator[System]:
    """A system on two nodes by datasheet, and on more nodes from what two of them show."""
    two = group.filter(pl.col("nodes") == 2)
    more = group.filter(pl.col("nodes") > 2)
    if len(two):
        yield System(name, way, platform, _select(two))
    if not len(more):
        return
    large = two.filter(pl.col("nbytes") >= LARGE)
    matched = _match_link(platform, large) if len(large) else None
    if matched is not None:
        yield System(name, "two nodes show the link", matched, _select(more), SHOWN)
    else:
        if len(two):
            way = f"two nodes do not show the link: {way}"
        yield System(name, way, platform, _select(more), SIGMA_TRANSFER)


@contextmanager
def _grow(growth: float) -> Iterator[None]:
    """Another growth of intervals with the nodes [-]."""
    with patch.object(collective_costs, "SIGMA_OF_NODES", growth):
        yield


def fit_growth(systems: Sequence[System]) -> float:
    """Fit the growth of intervals with the nodes to systems on more than two, by maximum likelihood.

    Logarithms of measured over predicted times are normal with variance b² + γ² log₂(N / 2); each system
    has the same weight.
    """
    loss = np.zeros(len(_GROWTHS))
    for system in systems:
        if system.spread is None:
            continue
        rows = [row for row in system.predict() if row["nbytes"] >= LARGE]
        misses = np.array([math.log(row["measured"] / row["predicted"]) for row in rows])
        doublings = np.array([math.log2(row["nodes"] / NODES_OF_LINK) for row in rows])
        variance = system.spread**2 + _GROWTHS[:, None] ** 2 * doublings
        loss += np.mean(np.log(variance) + misses**2 / variance, axis=1)
    return float(_GROWTHS[np.argmin(loss)])


def judge_systems() -> tuple[list[dict[str, Any]], float]:
    """Each system with its errors and misses, and the growth fitted to all systems."""
    published = list(list_published())
    found = []
    for system in [*list_parts_of_nodes(), *list_logged(), *published]:
        others = [other for other in published if other.name != system.name]
        growth = fit_growth(others)
        with _grow(growth):
            rows = system.predict()
        found.append({"system": system, "growth": growth, "rows": rows})
    return found, fit_growth(published)


def _describe(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one system."""
    rows = entry["rows"]
    ratio = float(np.exp(np.mean([math.log(row["predicted"] / row["measured"]) for row in rows])))
    wide = float(np.exp(np.mean([math.log(row["high"] / row["predicted"]) for row in rows])))
    nodes = sorted({row["nodes"] for row in rows})
    return {
        "system": entry["system"].name,
        "way": entry["system"].way,
        "nodes": ", ".join(map(str, nodes)),
        "ratio": ratio,
        "width": wide,
        "growth": entry["growth"],
        **judge(rows),
    }


_COLUMNS = {
    "system": "{system}",
    "predicted from": "{way}",
    "nodes": "{nodes}",
    "n": "{n:.0f}",
    "predicted / measured": "{ratio:.2f}",
    "80 % within": "x {width:.2f}",
    "inside": "{inside:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
}
_MISSES = {
    "system": "{system}",
    "predicted from": "{way}",
    "operation": "{operation}",
    "nodes": "{nodes}",
    "misses": "{misses} of {n}",
    "sizes": "{smallest} to {largest}",
    "predicted / measured": "{least:.2f} to {most:.2f}",
}


def _list_misses(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a system outside of their interval, by operation and nodes."""
    kinds: dict[tuple[str, int], list[Row]] = {}
    for row in entry["rows"]:
        kinds.setdefault((row["operation"], row["nodes"]), []).append(row)
    for (operation, nodes), rows in kinds.items():
        outside = [row for row in rows if not row["low"] <= row["measured"] <= row["high"]]
        if not outside:
            continue
        ratios = [row["predicted"] / row["measured"] for row in outside]
        sizes = [row["nbytes"] for row in outside]
        yield {
            "system": entry["system"].name,
            "way": entry["system"].way,
            "operation": operation,
            "nodes": nodes,
            "misses": len(outside),
            "n": len(rows),
            "smallest": pk.units.format_bytes(min(sizes)),
            "largest": pk.units.format_bytes(max(sizes)),
            "least": min(ratios),
            "most": max(ratios),
        }


def _name_group(system: System, row: Row) -> str:
    """Which rows a row is judged with."""
    if row["nodes"] == 1:
        return "part of a node"
    if row["nodes"] == 2:
        return "two nodes, from one"
    if system.name.startswith(FIXED):
        return "more nodes, where the forms were fixed"
    return "more nodes"


def format_systems(found: Sequence[Mapping[str, Any]], growth: float) -> str:
    """Errors by system, over all, and what lies outside its interval."""
    misses: list[Row] = []
    groups: dict[str, list[Row]] = {}
    for entry in found:
        misses += _list_misses(entry)
        for row in entry["rows"]:
            groups.setdefault(_name_group(entry["system"], row), []).append(row)
    growths = sorted({entry["growth"] for entry in found})
    texts = [
        lay_out([_describe(entry) for entry in found], _COLUMNS),
        lay_out_errors(groups),
        f"growth of intervals: {growth:.3f}; without the system that is judged "
        f"{growths[0]:.3f} to {growths[-1]:.3f}",
        f"outside of their interval:\n{lay_out(misses, _MISSES)}",
        "No rows: logs of one node alone (A100 x 8 and H100 x 8 of superbench, MLPerf and p5) have no more "
        "nodes to judge; scatter between two p4d has no model.",
    ]
    return "\n\n".join(texts)


@command({})
def main(given: Any) -> None:
    """Collectives on many nodes from one or two."""
    print(format_systems(*judge_systems()))
