"""Context of GPUs, fitted to whole training steps that others published.

A generation of devices has a scale for products, for each kernel of attention, for memory-bound
work (plain, and fused by a compiler), for its host, and for the share of a collective that slows
the kernels beside it. All scales are fitted together in logarithms. A scale is the sum of a part
that all generations have in common and of a part of one generation. So a generation without steps
takes the common part, with a wide interval. Programs differ in what they fuse and copy, so each
source of steps has one more factor for memory-bound work. docs/formulas.md, table 4.3, has the
priors and their evidence.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.helpers.overheads import read_overheads
from perfkit.calibration.runs import fit_logs
from perfkit.fitting import Fit, InContext, Iteration, Overlap
from perfkit.ground.units import Array
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import list_attention
from perfkit.prediction.cost import price, price_hosts
from perfkit.prediction.predictor import predict
from perfkit.workloads.execution import execute
from perfkit.workloads.operations import ATTENTION
from perfkit.workloads.transformer import Transformer

F = TypeVar("F", bound=Fit)
#: Prior of the scale of a class: its mean, and standard deviations of the logarithm for the part
#: that all generations have in common and for the part of one generation. Hosts and sources have
#: only a part of their own.
_PRIORS = {"product": (1.0, 0.05, 0.05), "exchange": (0.4, 0.7, 0.4)}
_PRIORS |= dict.fromkeys(("attention", "memory"), (1.0, 0.4, 0.2))
_HOSTS = {"v100": (1.0, 0.1), "a100": (0.85, 0.18)}
_HOST = (0.6, 0.4)  # of newer generations
_SOURCE = (1.0, 0.2)
#: Exponent of `smooth_maximum`, which joins the times of host and device [-].
_JOIN = 4.0
#: By kernel of fused attention: time of the backward over the time of its FLOP at the rate of the
#: forward [-]; and the scale of the forward from our own steps, for kernels that are in no
#: published step [-].
BACKWARD = {"flash2": 1.9, "triton": 1.9, "flash3": 1.35, "efficient": 1.0}
_FORWARD = {"flash3": 1.0, "efficient": 1.25}
#: Usual spread of steps of one source [-]; least spread of a scale from other generations [-]; and
#: the most steps that a source counts as.
_USUAL, _BORROWED, _MOST = 0.06, 0.3, 20
#: Prior of the spread between sources [-], how many steps it is worth, and how many steps a source
#: counts as there.
_OTHERS, _WORTH, _FEW = 0.1, 6, 3
#: Number formats of products with fitted scales.
_FORMATS = ("bf16", "fp16")
#: A scale counts as fitted if its standard error is below this share of the deviation of its prior
#: [-].
_SAID = 0.8
# parts without a scale of their own
_BESIDE = ("rest", "host", "flight", "exposed", "update", "uncertainty")
_MEMORY = ("elementwise", "rowwise", "copy")
_CLASSES = {"gemm": "product", "bmm": "product", **dict.fromkeys(_MEMORY, "memory")}
#: Logarithm of each scale, its standard error, and the configurations that it was fitted to, by
#: class and generation [-]. Scales of a ``source`` are by its name, which is empty for unknown
#: programs.
Scales = Mapping[tuple[str, str], tuple[float, float, int]]


class Step(NamedTuple):
    """A published step: its source, generation and configuration, its time, and parts as of
    `split_step` [s]."""

    source: str
    generation: str
    configuration: str
    seconds: float
    parts: Mapping[str, float]


def split_step(
    workload: Transformer,
    platform: Platform,
    *,
    ranks: int = 1,
    execution: str = "eager",
    update: bool = True,
) -> dict[str, float]:
    """Split the time of a step by class, without context.

    Parameters
    ----------
    workload : Transformer
        The step.
    platform : Platform
        Platform of the step; its context is left out, and its host overheads are replaced by the
        published ones.
    ranks : int, optional
        Ranks that take part [-].
    execution : str, optional
        As in `perfkit.prediction.predictor.predict`.
    update : bool, optional
        Whether the step includes the optimizer.

    Returns
    -------
    parts : dict of str to float
        Device time by class, ``rest`` for classes without a scale; time of the ``host``; total time
        of collectives, ``flight``, and the part of it that nothing hides, ``exposed``; ``update``,
        which is part of ``memory`` too; and ``uncertainty``, the uncertainty of products that are
        not in half precision [s].
    """
    bare = replace(platform, context=Context(), host=read_overheads())
    with keep_quiet():
        found = predict(workload, bare, ranks=ranks, execution=execution)
    [graph] = execute(workload.graphs(ranks, accelerator=True)[:1], execution)
    costs = price([graph], bare, dtype=graph.dtype, ranks=ranks)[0]
    formats = graph.dtypes or (graph.dtype,) * len(graph)
    hosts, kernels = np.add(*price_hosts([graph], bare)[0]), list_attention(graph, bare)
    parts = dict.fromkeys((*_BESIDE, "memory"), 0.0)
    columns = (graph.labels, formats, costs.seconds, costs.spread[costs.classes], hosts)
    for label, dtype, own, spread, host in zip(*columns, strict=True):
        if label.phase == "update" and not update:
            continue
        name = _CLASSES.get(label.kind, "rest")
        if label.variant == "fused":
            name += ".fused"
        if label.kind == "attention":
            name = f"attention.{kernels[0]}"
            own *= BACKWARD[kernels[0]] if label.variant.startswith("backward") else 1.0
        parts[name] = parts.get(name, 0.0) + float(own)
        parts["host"] += float(host)
        if label.phase == "update":
            parts["update"] += float(own)
        if name == "product" and dtype not in _FORMATS:
            parts["uncertainty"] += float(own * spread)
    row = found.communication().row(0, named=True)
    return parts | {"flight": row["total_s"], "exposed": row["exposed_s"]}


def fit_scales(steps: Sequence[Step], generations: Sequence[str]) -> Scales:
    """Fit the scales of all classes and generations; ``spread`` is the spread of steps around the
    fit.

    Minimises squared logarithms of predicted over measured times, in units of the usual spread, and
    of scales over their priors. A source counts as at most 20 steps. Steps that are far off or
    uncertain count less.
    """
    names = sorted({name for step in steps for name in step.parts} - {*_BESIDE})
    keys = [
        (name, generation) for name in (*names, "exchange", "host") for generation in generations
    ]
    keys += [("source", name) for name in ("", *sorted({step.source for step in steps}))]
    mean, width, matrix = _list_priors(keys)
    tables, logs = _tabulate(steps, keys), np.log([step.seconds for step in steps])
    often = Counter((step.source, step.generation) for step in steps)
    trust, few = (
        np.array([min(1.0, n / often[s.source, s.generation]) for s in steps])
        for n in (_MOST, _FEW)
    )
    usual = np.hypot(_USUAL, tables["uncertainty"] / np.exp(logs))
    found, covariance, _, errors, _ = fit_logs(
        lambda values: np.log(_time(tables, matrix @ values)),
        logs,
        mean,
        width,
        usual=usual,
        trust=trust,
    )
    values, spread = matrix @ found, np.sqrt(np.diag(matrix @ covariance @ matrix.T))
    # a scale near its prior has no configurations
    before = np.sqrt(np.square(matrix) @ np.square(width))
    seen = [
        {step.configuration for step in steps if error < _SAID * prior and _weigh(step, key)}
        for key, error, prior in zip(keys, spread, before, strict=True)
    ]
    result = {key: (float(values[n]), float(spread[n]), len(seen[n])) for n, key in enumerate(keys)}
    for generation in generations:
        own = np.array([step.generation == generation for step in steps])
        total = few[own] @ np.square(errors[own]) + _WORTH * _OTHERS**2
        count = len({step.configuration for step in steps if step.generation == generation})
        around = math.sqrt(total / (few[own].sum() + _WORTH)) if count else _BORROWED
        result["spread", generation] = (around, 0.0, count)
    return result


def _list_priors(keys: Sequence[tuple[str, str]]) -> tuple[Array, Array, Array]:
    """Priors of the parameters, first own then common parts: mean and deviation; and the matrix
    from them to scales."""
    alone = {
        "host": {g: _HOSTS.get(g, _HOST) for _, g in keys},
        "source": {g: _SOURCE for _, g in keys},
    }
    classes = list(dict.fromkeys(name for name, _ in keys if name not in alone))
    priors = [_PRIORS[name.partition(".")[0]] for name in classes]
    own = [
        alone[name][g] if name in alone else (1.0, _PRIORS[name.partition(".")[0]][2])
        for name, g in keys
    ]
    mean, width = zip(*own, *(prior[:2] for prior in priors), strict=True)
    common = np.array([[float(name == other) for other in classes] for name, _ in keys])
    return np.log(mean), np.array(width), np.hstack([np.eye(len(keys)), common])


def _tabulate(steps: Sequence[Step], keys: Sequence[tuple[str, str]]) -> dict[str, Array]:
    """Times of parts by step, those with a scale by step and scale; places of the scales of host
    and collectives."""
    tables = {name: np.array([step.parts[name] for step in steps]) for name in _BESIDE}
    known = {name for name, _ in keys} | {*_BESIDE}
    tables["rest"] += [
        sum(time for name, time in step.parts.items() if name not in known) for step in steps
    ]
    own = np.array([name not in ("host", "exchange", "source") for name, _ in keys])
    tables["parts"] = own * np.array([[_weigh(step, key) for key in keys] for step in steps])
    tables["memory"] = np.array([name.startswith("memory") for name, _ in keys])
    for name in ("host", "exchange"):
        tables[f"of {name}"] = np.array([keys.index((name, step.generation)) for step in steps])
    sources = [("source", step.source) for step in steps]
    tables["of source"] = np.array(
        [keys.index(key if key in keys else ("source", "")) for key in sources]
    )
    return tables


def _weigh(step: Step, key: tuple[str, str]) -> float:
    """Time of a step that a scale multiplies [s]."""
    name, generation = key
    if name == "source":
        return step.parts["memory"] * (generation == step.source)
    return (
        step.parts.get({"exchange": "flight"}.get(name, name), 0.0)
        if generation == step.generation
        else 0.0
    )


def _time(tables: Mapping[str, Array], logs: Array) -> Array:
    """Times of steps: the slower of device and host, where collectives slow the kernels beside them
    [s]."""
    scales = np.exp(logs)
    parts = tables["parts"] * np.where(tables["memory"], scales[tables["of source"], None], 1.0)
    share = np.minimum(scales[tables["of exchange"]], 1.0)
    slowed = share * (tables["flight"] - tables["exposed"]) + tables["exposed"]
    device, host = (
        tables["rest"] + parts @ scales + slowed,
        tables["host"] * scales[tables["of host"]],
    )
    return np.asarray(smooth_maximum(device, host, sharpness=_JOIN))


def predict_steps(steps: Sequence[Step], scales: Scales) -> tuple[Array, Array]:
    """Times of steps on platforms with these scales [s], and spreads of their logarithms [-]."""
    keys = [key for key in scales if key[0] != "spread"]
    logs, errors = (np.array([scales[key][n] for key in keys]) for n in (0, 1))
    tables = _tabulate(steps, keys)
    times = _time(tables, logs)
    shares = (
        np.stack(
            [_time(tables, logs + step) / times - 1 for step in 1e-4 * np.eye(len(keys))], axis=1
        )
        / 1e-4
    )
    whole = [scales["spread", step.generation][0] for step in steps]
    scaled = np.sqrt(np.square(shares) @ np.square(errors))
    return times, np.hypot(np.hypot(whole, scaled), tables["uncertainty"] / times)


def add_published(
    platform: Platform, scales: Scales, generation: str, *, source: str, date: str
) -> Platform:
    """A platform whose context has the scales of a generation, with scaled host overheads.

    Scales without a step of the generation are assumed, with an uncertainty of 30 % or more.
    """

    def make(name: str, model: type[F], parameters: Mapping[str, float], spread: float = 0.0) -> F:
        _, error, count = known[name, generation]
        about: dict[str, Any] = {
            "source": source,
            "date": date,
            "n": count,
        }
        about["dtypes"] = _FORMATS if name == "product" else ()
        if not count:
            what, where = name.replace(".", " "), generation.replace("others", "such a device")
            note = f"scale of {what}: no published step on {where} shows it; taken from other generations of GPUs"
            about |= {"kind": "assumed", "notes": (note,)}
            least = 0.0 if name == "product" else _BORROWED  # isolated products were measured
            error, spread = max(error, least), max(spread, least)
        return model.build(
            parameters,
            spread=spread or error,
            stderr=dict.fromkeys(parameters, error),
            **about,
        )

    known = {key: values for key, values in scales.items() if key[1] == generation}
    for key, (log, error, count) in known.items():  # programs of the user belong to no source
        known[key] = (
            log,
            math.hypot(error, scales["source", ""][1] * key[0].startswith("memory")),
            count,
        )
    middle = float(
        np.mean([values[0] for (name, _), values in known.items() if name.startswith("attention")])
    )
    for kernel in ATTENTION:
        log = math.log(_FORWARD[kernel]) if kernel in _FORWARD else middle
        known.setdefault((f"attention.{kernel}", generation), (log, _BORROWED, 0))
    fits: dict[str, InContext] = {}
    for name, scale in ((name, math.exp(values[0])) for (name, _), values in known.items()):
        kind, _, finer = name.partition(".")
        ends = [f".{finer}"] if finer else [""]
        kinds = {
            "product": ("gemm", "bmm"),
            "memory": _MEMORY,
            "attention": ("attention.forward",),
        }.get(kind, ())
        fits |= {
            one + end: make(name, InContext, {"scale": scale}) for one in kinds for end in ends
        }
        if kind == "attention":
            fits[f"attention.backward.{finer}"] = make(
                name, InContext, {"scale": BACKWARD[finer] * scale}
            )
    joined = {"scale": 1.0, "sharpness": _JOIN}
    whole = {"transformer": make("spread", Iteration, joined, scales["spread", generation][0])}
    share = min(math.exp(scales["exchange", generation][0]), 1.0)
    overlap, (host, error, count) = (
        make("exchange", Overlap, {"contention": share}),
        scales["host", generation],
    )
    hosts = {}
    for name, quantity in read_overheads().items():
        value, text = (
            quantity.value * math.exp(host),
            f"{quantity.source}; times {math.exp(host):.3f}: {source}",
        )
        kind, wrong = ("fitted" if count else "assumed"), float(f"{error * value:.3g}")
        hosts[name] = replace(
            quantity, value=float(f"{value:.3g}"), stderr=wrong, kind=kind, source=text
        )
    context = Context(kernels=fits, iterations=whole, parallel=whole, overlap=overlap)
    return replace(platform, context=context, host=hosts)
