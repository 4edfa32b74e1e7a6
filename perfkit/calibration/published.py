"""Context of GPUs from whole steps that others published, as the context of a CPU is from small iterations of its own.

A generation of devices has a scale for products, for each kernel of attention, for memory-bound work (plain, and fused
by a compiler), for its host, and for what collectives take from the kernels beside them. All are fitted together, in
logarithms: a scale is that of all generations, and how far this one is from it. So a generation without steps takes
what the others have, with a wide interval. What a program fuses and copies is its own: each source has a factor of
memory-bound work beside. Priors and evidence stand in docs/formulas.md, table 4.3.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.calibration.runs import fit_logs
from perfkit.fitting import Fit
from perfkit.ground.units import Array
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Context, Platform
from perfkit.prediction.cost import list_attention, price, price_host
from perfkit.prediction.result import predict
from perfkit.readers.datasheets import read_overheads
from perfkit.workloads.execution import execute
from perfkit.workloads.operations import ATTENTION
from perfkit.workloads.transformer import Transformer

#: Scale of a class before any step is seen, and standard deviation of its logarithm: of what all generations have in
#: common, and of one generation among them. A host is that of its generation alone, and a source that of its programs.
_PRIORS = {"product": (1.0, 0.05, 0.05), "exchange": (0.4, 0.7, 0.4)}
_PRIORS |= dict.fromkeys(("attention", "memory"), (1.0, 0.4, 0.2))
_HOSTS = {"v100": (1.0, 0.1), "a100": (0.85, 0.18)}
_HOST = (0.6, 0.4)  # of newer generations
_SOURCE = (1.0, 0.2)
#: How sharply the slower of host and device sets the pace of a step: the exponent of `smooth_maximum` [-].
_JOIN = 4.0
#: How many times longer the backward of fused attention takes than its arithmetic at the rate of the forward, and the
#: scale of the forward where no published step has run the kernel but our own have, by kernel [-].
BACKWARD = {"flash2": 1.9, "triton": 1.9, "flash3": 1.35, "efficient": 1.0}
_FORWARD = {"flash3": 1.0, "efficient": 1.25}
#: Spread of steps of one source [-], the least spread of what was borrowed [-], and the steps that a source counts at
#: most.
_USUAL, _BORROWED, _MOST = 0.06, 0.3, 20
#: Spread between sources before any is seen [-], how many steps that is worth, and the steps of one source that tell of
#: another.
_OTHERS, _WORTH, _FEW = 0.1, 6, 3
#: Number formats of the products that scales were fitted to.
_FORMATS = ("bf16", "fp16")
#: Usual spreads from which on a step counts less [-], and the share of its prior's deviation below which a scale counts
#: as fitted [-].
_FAR, _SAID = 2.5, 0.8
_BESIDE = ("rest", "host", "flight", "exposed", "update", "doubt")  # parts without a scale of their own
_MEMORY = ("elementwise", "rowwise", "copy")
_CLASSES = {"gemm": "product", "bmm": "product", **dict.fromkeys(_MEMORY, "memory")}
#: Logarithm, its standard error and configurations behind each scale, by class and generation; of a ``source``, by its
#: name, which is empty for any other [-].
Scales = Mapping[tuple[str, str], tuple[float, float, int]]


class Step(NamedTuple):
    """A published step: its source, generation and configuration, its time, and parts as of `split_step` [s]."""

    source: str
    generation: str
    configuration: str
    seconds: float
    parts: Mapping[str, float]


def split_step(
    workload: Transformer, platform: Platform, *, ranks: int = 1, execution: str = "eager", update: bool = True
) -> dict[str, float]:
    """Time of a step by class, without context.

    Parameters
    ----------
    workload : Transformer
        The step.
    platform : Platform
        On what; its context is left out, and its host takes as long as the published one.
    ranks : int, optional
        Ranks that take part [-].
    execution : str, optional
        As of `perfkit.prediction.result.predict`.
    update : bool, optional
        Whether the optimizer is part of it.

    Returns
    -------
    parts : dict of str to float
        Device time by class, ``rest`` for classes without a scale; the time of the ``host``, of collectives in
        ``flight`` and of what nothing hides of these, ``exposed``; ``update`` is a part of ``memory``, and ``doubt``
        what products in formats other than half precision may take more or less [s].
    """
    bare = replace(platform, context=Context(), host=read_overheads())
    with keep_quiet():
        found = predict(workload, bare, ranks=ranks, execution=execution)
    [graph] = execute(workload.graphs(ranks, accelerator=True)[:1], execution)
    costs = price([graph], bare, dtype=graph.dtype, ranks=ranks)[0]
    formats = graph.dtypes or (graph.dtype,) * len(graph)
    hosts, kernels = np.add(*price_host(graph, bare)), list_attention(graph, bare)
    parts = dict.fromkeys((*_BESIDE, "memory"), 0.0)
    columns = (graph.labels, formats, costs.seconds, costs.spread[costs.classes], hosts)
    for (_, kind, variant, phase, _), dtype, own, spread, host in zip(*columns, strict=True):
        if phase == "update" and not update:
            continue
        name = _CLASSES.get(kind, "rest") + ".fused" * (variant == "fused")
        if kind == "attention":
            name = f"attention.{kernels[0]}"
            own *= BACKWARD[kernels[0]] if variant.startswith("backward") else 1.0
        doubt = own * spread * (name == "product" and dtype not in _FORMATS)
        for part, value in ((name, own), ("host", host), ("update", own * (phase == "update")), ("doubt", doubt)):
            parts[part] = parts.get(part, 0.0) + float(value)
    row = found.communication().row(0, named=True)
    return parts | {"flight": row["total_s"], "exposed": row["exposed_s"]}


def fit_scales(steps: Sequence[Step], generations: Sequence[str]) -> Scales:
    """Fit the scales of all classes and generations, and under ``spread`` that of steps around them.

    Minimises squared logarithms of predicted over measured times, in units of the usual spread, and of scales over
    their priors. A source counts as at most 20 steps; steps that are far off, and doubtful ones, count less.
    """
    names = sorted({name for step in steps for name in step.parts} - {*_BESIDE})
    keys = [(name, generation) for name in (*names, "exchange", "host") for generation in generations]
    keys += [("source", name) for name in ("", *sorted({step.source for step in steps}))]
    mean, width, matrix = _list_priors(keys)
    tables, logs = _tabulate(steps, keys), np.log([step.seconds for step in steps])
    often = Counter((step.source, step.generation) for step in steps)
    trust, few = (np.array([min(1.0, n / often[s.source, s.generation]) for s in steps]) for n in (_MOST, _FEW))
    usual = np.hypot(_USUAL, tables["doubt"] / np.exp(logs))
    found, covariance, _, errors, _ = fit_logs(
        lambda values: np.log(_time(tables, matrix @ values)), logs, mean, width, usual=usual, trust=trust
    )
    values, spread = matrix @ found, np.sqrt(np.diag(matrix @ covariance @ matrix.T))
    before = np.sqrt(np.square(matrix) @ np.square(width))  # a scale of which steps say little has none behind it
    seen = [{step.configuration for step in steps if error < _SAID * prior and _weigh(step, key)}
            for key, error, prior in zip(keys, spread, before, strict=True)]  # fmt: skip
    result = {key: (float(values[n]), float(spread[n]), len(seen[n])) for n, key in enumerate(keys)}
    for generation in generations:
        own = np.array([step.generation == generation for step in steps])
        total = few[own] @ np.square(errors[own]) + _WORTH * _OTHERS**2
        count = len({step.configuration for step in steps if step.generation == generation})
        around = math.sqrt(total / (few[own].sum() + _WORTH)) if count else _BORROWED
        result["spread", generation] = (around, 0.0, count)
    return result


def _list_priors(keys: Sequence[tuple[str, str]]) -> tuple[Array, Array, Array]:
    """Mean and deviation of what is fitted: what each scale has of its own, and what all of a class have in common."""
    alone = {"host": {g: _HOSTS.get(g, _HOST) for _, g in keys}, "source": {g: _SOURCE for _, g in keys}}
    classes = list(dict.fromkeys(name for name, _ in keys if name not in alone))
    priors = [_PRIORS[name.partition(".")[0]] for name in classes]
    own = [alone[name][g] if name in alone else (1.0, _PRIORS[name.partition(".")[0]][2]) for name, g in keys]
    mean, width = zip(*own, *(prior[:2] for prior in priors), strict=True)
    common = np.array([[float(name == other) for other in classes] for name, _ in keys])
    return np.log(mean), np.array(width), np.hstack([np.eye(len(keys)), common])


def _tabulate(steps: Sequence[Step], keys: Sequence[tuple[str, str]]) -> dict[str, Array]:
    """Parts by step, those with a scale by step and scale; and which scales hosts and collectives have."""
    tables = {name: np.array([step.parts[name] for step in steps]) for name in _BESIDE}
    known = {name for name, _ in keys} | {*_BESIDE}
    tables["rest"] += [sum(time for name, time in step.parts.items() if name not in known) for step in steps]
    own = np.array([name not in ("host", "exchange", "source") for name, _ in keys])
    tables["parts"] = own * np.array([[_weigh(step, key) for key in keys] for step in steps])
    tables["memory"] = np.array([name.startswith("memory") for name, _ in keys])
    for name in ("host", "exchange"):
        tables[f"of {name}"] = np.array([keys.index((name, step.generation)) for step in steps])
    sources = [("source", step.source) for step in steps]
    tables["of source"] = np.array([keys.index(key if key in keys else ("source", "")) for key in sources])
    return tables


def _weigh(step: Step, key: tuple[str, str]) -> float:
    """Time of a step that a scale multiplies [s]."""
    name, generation = key
    if name == "source":
        return step.parts["memory"] * (generation == step.source)
    return step.parts.get({"exchange": "flight"}.get(name, name), 0.0) if generation == step.generation else 0.0


def _time(tables: Mapping[str, Array], logs: Array) -> Array:
    """Times of steps: the slower of device and host; collectives in flight take a share from the kernels."""
    scales = np.exp(logs)
    parts = tables["parts"] * np.where(tables["memory"], scales[tables["of source"], None], 1.0)
    share = np.minimum(scales[tables["of exchange"]], 1.0)
    slowed = share * (tables["flight"] - tables["exposed"]) + tables["exposed"]
    device, host = tables["rest"] + parts @ scales + slowed, tables["host"] * scales[tables["of host"]]
    return np.asarray(smooth_maximum(device, host, sharpness=_JOIN))


def predict_steps(steps: Sequence[Step], scales: Scales) -> tuple[Array, Array]:
    """Times [s] of steps and spreads of their logarithms, as platforms with these scales have them."""
    keys = [key for key in scales if key[0] != "spread"]
    logs, errors = (np.array([scales[key][n] for key in keys]) for n in (0, 1))
    tables = _tabulate(steps, keys)
    times = _time(tables, logs)
    shares = np.stack([_time(tables, logs + step) / times - 1 for step in 1e-4 * np.eye(len(keys))], axis=1) / 1e-4
    whole = [scales["spread", step.generation][0] for step in steps]
    scaled = np.sqrt(np.square(shares) @ np.square(errors))
    return times, np.hypot(np.hypot(whole, scaled), tables["doubt"] / times)


def add_published(platform: Platform, scales: Scales, generation: str, *, source: str, date: str) -> Platform:
    """Put the scales of a generation into a platform, in place of its context, and its host overheads at their scale.

    What no step of the generation stands behind is assumed, within 30 % or more.
    """

    def make(name: str, form: str, parameters: Mapping[str, float], spread: float = 0.0) -> Fit:
        _, error, count = known[name, generation]
        about: dict[str, Any] = {"units": dict.fromkeys(parameters, "-"), "source": source, "date": date, "n": count}
        about["dtypes"] = _FORMATS if name == "product" else ()
        if not count:
            note = f"{name.replace('.', ' ')} of {generation} was in no published step: taken from other generations"
            about |= {"kind": "assumed", "notes": (note,)}
            least = 0.0 if name == "product" else _BORROWED  # products were measured alone
            error, spread = max(error, least), max(spread, least)
        return Fit(form, parameters, spread=spread or error, stderr=dict.fromkeys(parameters, error), **about)

    known = {key: values for key, values in scales.items() if key[1] == generation}
    for key, (log, error, count) in known.items():  # the reader's programs are those of no source
        known[key] = (log, math.hypot(error, scales["source", ""][1] * key[0].startswith("memory")), count)
    middle = float(np.mean([values[0] for (name, _), values in known.items() if name.startswith("attention")]))
    for kernel in ATTENTION:
        log = math.log(_FORWARD[kernel]) if kernel in _FORWARD else middle
        known.setdefault((f"attention.{kernel}", generation), (log, _BORROWED, 0))
    fits: dict[str, Fit] = {}
    for name, scale in ((name, math.exp(values[0])) for (name, _), values in known.items()):
        kind, _, finer = name.partition(".")
        ends = [f".{finer}"] if finer else [""]
        kinds = {"product": ("gemm", "bmm"), "memory": _MEMORY, "attention": ("attention.forward",)}.get(kind, ())
        fits |= {one + end: make(name, "in_context", {"scale": scale}) for one in kinds for end in ends}
        if kind == "attention":
            fits[f"attention.backward.{finer}"] = make(name, "in_context", {"scale": BACKWARD[finer] * scale})
    joined = {"scale": 1.0, "sharpness": _JOIN}
    whole = {"transformer": make("spread", "iteration", joined, scales["spread", generation][0])}
    share = min(math.exp(scales["exchange", generation][0]), 1.0)
    overlap, (host, error, count) = make("exchange", "overlap", {"contention": share}), scales["host", generation]
    hosts = {}
    for name, quantity in read_overheads().items():
        value, text = quantity.value * math.exp(host), f"{quantity.source}; times {math.exp(host):.3f}: {source}"
        kind, wrong = ("fitted" if count else "assumed"), float(f"{error * value:.3g}")
        hosts[name] = replace(quantity, value=float(f"{value:.3g}"), stderr=wrong, kind=kind, source=text)
    context = Context(kernels=fits, iterations=whole, parallel=whole, overlap=overlap)
    return replace(platform, context=context, host=hosts)
