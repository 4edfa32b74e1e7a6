"""A micro-batch of a strategy on one rank: what it computes and sends, recorded and priced by its parts."""

from dataclasses import replace
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.units import Array
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import join_host, price, price_host
from perfkit.prediction.ranks import RankTimes, price_group
from perfkit.workloads.blocks import Cut, record_part
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Parts of a model, in the order of its forward pass.
REGIONS = ("embeddings", "layers", "head")
#: Kinds of operations of attention between its projections.
CORES = ("bmm", "attention")
#: Tokens of three sequences on three ranks, the first of all sizes: what a compiler merges is read off these, where no
#: two sizes are equal by chance [-].
ODD = 1031
#: Communicators of a graph of `perfkit.prediction.stages` that are waited for within a pass: those before this one [-].
PASSED = 3
#: Communicators of neighbouring stages: this one and all after it [-].
PAIRS = 6
#: Sizes of a collective as its host sees it: a call that launches a kernel [-].
_CALL = np.isin(FEATURES, ("calls", "launches")).astype(float)[np.newaxis]


def price_part(model: Transformer, platform: Platform, cut: Cut, execution: str | None) -> dict[str, Array]:
    """Times of a micro-batch on one rank by region and phase [s], trained numbers [-] and spread, for every cut."""
    graph, weights = record_part(model, cut)
    [graph] = execute([graph], execution)
    inside = np.array([label[4].startswith("layers") for label in graph.labels])
    often = np.where(inside, float(model.layers), 1.0)
    [cost] = price([replace(graph, repeats=often)], platform, dtype=graph.dtype)
    seconds = cost.seconds
    names, kinds, variants, phases, modules = (np.array(column) for column in zip(*graph.labels, strict=True))
    exchange, added = np.zeros(seconds.shape), names == "add_"
    for operation in np.unique(names[graph.collectives]):
        rows = np.flatnonzero((names == operation) & (kinds == "collective"))
        nbytes = graph.column("nbytes")[rows]
        exchange[rows] = price_messages(platform, operation, nbytes, cut.tensor + 0 * nbytes, 1 + 0 * nbytes)
    host = np.add(*price_host(replace(graph, columns={}), platform))
    out = {}
    for name in REGIONS:
        own = np.char.startswith(modules, name)
        for phase in ("forward", "backward"):
            here = own & (phases == phase)
            out[f"{name}.{phase}"] = seconds[here & ~added].sum(axis=0)
            out[f"{name}.tensor.{phase}"] = exchange[here].sum(axis=0)
            out[f"{name}.host.{phase}"] = host[here & ~added].sum()
        out[f"{name}.weights"], out[f"{name}.host.added"] = weights[name], host[own & added].sum()
        out[f"{name}.added"] = seconds[own & added].sum(axis=0)
    again = 0
    for phase in ("forward", "backward"):
        cores = np.flatnonzero(np.char.endswith(modules, "attention") & (phases == phase) & np.isin(kinds, CORES))
        cores, again = cores[again:], len(cores) if model.checkpoint else 0  # what is computed again comes first
        core = slice(cores.min(), cores.max() + 1)
        out[f"attention.{phase}"], out[f"attention.host.{phase}"] = seconds[core].sum(axis=0), host[core].sum()
    out["delayed"] = seconds[inside & (phases == "backward") & (kinds == "gemm") & (variants == "tn")].sum(axis=0)
    for name, own in (("update", (phases == "update") & (modules != "packing")), ("packing", modules == "packing")):
        out[name] = seconds[own].sum(axis=0) / sum(weights.values())
    call = Graph((("all_to_all", "collective", "all_to_all", "forward", ""),), _CALL, np.zeros((0, 4)))
    out["call"] = np.add(*price_host(call, platform))[0]
    # kernels of a kind have one fit and one scale, so that they err together, and so does all that is only assumed
    causes = np.where(cost.assumed, "", [kind for kind, *_ in cost.models.classes])
    errors = cost.spread * cost.totals / cost.totals.sum(axis=0)
    out["spread"] = np.sqrt(sum(np.square(errors[causes == cause].sum(axis=0)) for cause in np.unique(causes)))
    return {name: np.broadcast_to(values, seconds.shape[1]) for name, values in out.items()}


def price_messages(platform: Platform, operation: str, nbytes: Array, count: Array, stride: Array) -> Array:
    """Time of collectives of so many ranks at a distance [s].

    An algorithm across nodes may be named behind a dot.
    """
    operation, _, way = operation.partition(".")
    local, time = platform.network.ranks_per_node, np.zeros(nbytes.shape)
    codes = count.astype(np.int64) << 32 | stride.astype(np.int64)
    for code in np.unique(codes[count > 1]):
        ranks, apart = int(code >> 32), int(code & 0xFFFFFFFF)
        own, most = codes == code, min(max(local // apart, 1), ranks)
        if way and local < ranks and most == local:
            time[own] = platform.price_collective(operation, nbytes[own], ranks, way).time
        else:
            time[own] = price_group(platform, operation, nbytes[own], ranks, -(-ranks // most), most).time
    return time


def record_micro_batch(model: Transformer, s: Strategy, execution: str | None) -> tuple[Graph, dict[str, Array]]:
    """Record what a strategy has a rank do, see `perfkit.workloads.blocks.record_part`; the last column is its own."""
    odd = ((3, s.micro_batch), (ODD, model.sequence // s.cp), (3 if s.tp > 1 else 1, s.tp), (1, s.cp), (1, s.ep))
    compiled = slice(execution != "compiled", None)  # what is merged is read off the first one
    batch, sequence, tensor, context, experts = (np.array(own, dtype=float)[compiled] for own in odd)
    cut = Cut(batch, sequence, tensor, tensor if s.sequence_parallel and s.tp > 1 else 1, context, experts)
    graph, weights = record_part(replace(model, checkpoint=s.checkpoint == "full"), cut)
    found = {name: np.broadcast_to(own, np.shape(batch)) for name, own in weights.items()}
    return execute([graph], execution)[0], found


def count_experts(model: Transformer, s: Strategy) -> Array:
    """Numbers of the experts of a layer on a rank."""
    each = (2 + model.gated) * model.hidden * np.ceil((model.inner or 4 * model.hidden) / s.tp)
    return np.asarray((model.experts // s.ep) * each)


def size_copies(s: Strategy, micro: Any, narrow: float) -> tuple[Array, float]:
    """How large copies before a reduction and around a gather are, relative to one of as many sums of gradients.

    A message is filled from gradients as they are computed, unless those of several micro-batches were added up before.
    """
    straight = np.greater(s.zero, 0) & (s.scattered | np.equal(micro, 1))
    return np.where(straight, (1.0 + narrow) / 2.0, 1.0), narrow


def join_hosts(rank: RankTimes, whole: Fit | None) -> RankTimes:
    """Times of a rank whose host begins each pass with its device, as it waits for messages: both join softly."""
    graph, seconds = rank.kind.graph, rank.seconds.copy()
    marks, own = graph.kernels["host", "host"], graph.collectives
    groups, begins, busy = graph.column("group")[own], np.append(0, marks[:-1] + 1), seconds.copy()
    work = np.delete(np.arange(len(graph)), own)
    beside = seconds[work[np.searchsorted(work, own)]]  # keys go round beside the next kernel
    hides = [graph.labels[place][0] == "send_recv" for place in own]
    busy[own] = np.where(groups < PASSED, np.maximum(rank.durations - np.where(hides, beside, 0.0), 0.0), 0.0)
    device, host = (np.add.reduceat(each, begins) for each in (busy, rank.host + rank.spacing))
    rest = [each[marks[-1] + 1 :].sum() for each in (busy, rank.host + rank.spacing)]  # the update is not waited for
    device[-1], host[-1] = device[-1] - rest[0], host[-1] - rest[1]
    if groups.max(initial=0.0) < PAIRS:  # a single stage waits for no messages
        seconds[marks] = (join_host(device.sum(), host.sum(), whole) - device.sum()) / len(marks)
    else:
        seconds[marks] = join_host(device, host, whole) - device
    return replace(rank, seconds=seconds, host=np.zeros(len(graph)), spacing=np.zeros(len(graph)))
