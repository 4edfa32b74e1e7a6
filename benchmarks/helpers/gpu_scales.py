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
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.helpers.overheads import read_overheads
from perfkit.calibration.runs import fit_logs
from perfkit.fitting import Fit, InContext, Iteration, Overlap
from perfkit.ground.hardware import Quantity
from perfkit.ground.units import Array
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import list_attention
from perfkit.prediction.cost import price, price_hosts
from perfkit.prediction.predictor import predict
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import Graph
from perfkit.workloads.operations import ATTENTION
from perfkit.workloads.transformer import Transformer

F = TypeVar("F", bound=Fit)


class Prior(NamedTuple):
    """Prior of the scale of a class: its mean, and standard deviations of the logarithm for the part
    that all generations have in common and for the part of one generation [-]."""

    mean: float
    common: float
    generation: float


_PRIORS = {
    "product": Prior(1.0, 0.05, 0.05),
    "exchange": Prior(0.4, 0.7, 0.4),
    "attention": Prior(1.0, 0.4, 0.2),
    "memory": Prior(1.0, 0.4, 0.2),
}
#: Hosts, by generation, and sources have only a part of their own: mean and standard deviation of
#: the logarithm [-].
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
#: Operations of a class of scales.
_OPERATIONS = {
    "product": ("gemm", "bmm"),
    "memory": _MEMORY,
    "attention": ("attention.forward",),
}
#: Change of a logarithm by which slopes are found [-].
_CHANGE = 1e-4
_CLASSES = {"gemm": "product", "bmm": "product", **dict.fromkeys(_MEMORY, "memory")}


class Scale(NamedTuple):
    """One fitted scale: its logarithm, the standard error of it, and the number of configurations
    that it was fitted to [-]."""

    log: float
    stderr: float
    configurations: int


#: Scales by class and generation. Scales of a ``source`` are by its name, which is empty for unknown
#: programs.
Scales = Mapping[tuple[str, str], Scale]


class Step(NamedTuple):
    """A published step: its source, generation and configuration, its time, and parts as of
    `split_step` [s]."""

    source: str
    generation: str
    configuration: str
    seconds: float
    parts: Mapping[str, float]


def find_backward(platform: Platform, kernel: str) -> float:
    """Time of the backward pass of a kernel of attention over what the platform says of it alone [-]:
    1 where it was measured alone, else that over the time of its FLOP at the rate of the forward."""
    is_measured = f"attention.backward.{kernel}" in platform.kernels
    return 1.0 if is_measured else BACKWARD[kernel]


def _sum_operations(
    graph: Graph, platform: Platform, ranks: int, *, update: bool
) -> dict[str, float]:
    """Device time of a graph by class, and times of host, update and uncertainty [s]."""
    (costs,) = price([graph], platform, dtype=graph.dtype, ranks=ranks)
    (calls,) = price_hosts([graph], platform)
    hosts = np.add(*calls)
    formats = graph.dtypes or (graph.dtype,) * len(graph)
    kernels = list_attention(graph, platform)
    spreads = costs.spread[costs.classes]
    parts = dict.fromkeys((*_BESIDE, "memory"), 0.0)
    for index, label in enumerate(graph.labels):
        if label.phase == "update" and not update:
            continue
        seconds = float(costs.seconds[index])
        name = _CLASSES.get(label.kind, "rest")
        if label.variant == "fused":
            name += ".fused"
        if label.kind == "attention":
            name = f"attention.{kernels[0]}"
            if label.variant.startswith("backward"):
                seconds *= find_backward(platform, kernels[0])
        parts[name] = parts.get(name, 0.0) + seconds
        parts["host"] += float(hosts[index])
        if label.phase == "update":
            parts["update"] += seconds
        if name == "product" and formats[index] not in _FORMATS:
            parts["uncertainty"] += float(seconds * spreads[index])
    return parts


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
        prediction = predict(workload, bare, ranks=ranks, execution=execution)
    (graph,) = execute(workload.graphs(ranks, accelerator=True)[:1], execution)
    parts = _sum_operations(graph, bare, ranks, update=update)
    collectives = prediction.communication().row(0, named=True)
    parts["flight"] = collectives["total_s"]
    parts["exposed"] = collectives["exposed_s"]
    return parts


def _list_keys(steps: Sequence[Step], generations: Sequence[str]) -> list[tuple[str, str]]:
    """Class and generation of every scale; scales of sources come last."""
    names = set[str]()
    for step in steps:
        names |= step.parts.keys()
    keys = []
    for name in (*sorted(names - {*_BESIDE}), "exchange", "host"):
        for generation in generations:
            keys.append((name, generation))
    sources = sorted({step.source for step in steps})
    return keys + [("source", name) for name in ("", *sources)]


def _weigh_sources(steps: Sequence[Step], most: int) -> Array:
    """Weight of each step if a source counts as at most so many steps on a generation [-]."""
    often = Counter((step.source, step.generation) for step in steps)
    return np.array([min(1.0, most / often[step.source, step.generation]) for step in steps])


def _count_configurations(
    steps: Sequence[Step], key: tuple[str, str], stderr: float, prior: float
) -> int:
    """Configurations that a scale was fitted to; none if it is as uncertain as its prior."""
    if stderr >= _SAID * prior:
        return 0
    return len({step.configuration for step in steps if _weigh(step, key)})


def _find_spread(steps: Sequence[Step], generation: str, errors: Array, weights: Array) -> Scale:
    """Spread of the steps of a generation around the fit, as a scale."""
    belongs = np.array([step.generation == generation for step in steps])
    count = len({step.configuration for step in steps if step.generation == generation})
    if not count:
        return Scale(_BORROWED, 0.0, 0)
    total = weights[belongs] @ np.square(errors[belongs]) + _WORTH * _OTHERS**2
    return Scale(math.sqrt(total / (weights[belongs].sum() + _WORTH)), 0.0, count)


def fit_scales(steps: Sequence[Step], generations: Sequence[str]) -> Scales:
    """Fit the scales of all classes and generations; ``spread`` is the spread of steps around the
    fit.

    Minimises squared logarithms of predicted over measured times, in units of the usual spread, and
    of scales over their priors. A source counts as at most 20 steps. Steps that are far off or
    uncertain count less.
    """
    keys = _list_keys(steps, generations)
    mean, width, matrix = _list_priors(keys)
    tables = _tabulate(steps, keys)
    logs = np.log([step.seconds for step in steps])

    def evaluate(parameters: Array) -> Array:
        return np.log(_time(tables, matrix @ parameters))

    fitted, covariance, _, errors, _ = fit_logs(
        evaluate,
        logs,
        mean,
        width,
        usual=np.hypot(_USUAL, tables["uncertainty"] / np.exp(logs)),
        trust=_weigh_sources(steps, _MOST),
    )
    values = matrix @ fitted
    stderrs = np.sqrt(np.diag(matrix @ covariance @ matrix.T))
    # a scale near its prior has no configurations
    priors = np.sqrt(np.square(matrix) @ np.square(width))
    scales = dict[tuple[str, str], Scale]()
    for key, value, stderr, prior in zip(keys, values, stderrs, priors, strict=True):
        count = _count_configurations(steps, key, stderr, prior)
        scales[key] = Scale(float(value), float(stderr), count)
    weights = _weigh_sources(steps, _FEW)
    for generation in generations:
        scales["spread", generation] = _find_spread(steps, generation, errors, weights)
    return scales


def _list_priors(keys: Sequence[tuple[str, str]]) -> tuple[Array, Array, Array]:
    """Priors of the parameters, first own then common parts: mean and deviation; and the matrix
    from them to scales."""
    means, widths = list[float](), list[float]()
    for name, generation in keys:
        if name == "host":
            mean, width = _HOSTS.get(generation, _HOST)
        elif name == "source":
            mean, width = _SOURCE
        else:
            mean, width = 1.0, _find_prior(name).generation
        means.append(mean)
        widths.append(width)
    classes = list(dict.fromkeys(name for name, _ in keys if name not in ("host", "source")))
    for name in classes:
        means.append(_find_prior(name).mean)
        widths.append(_find_prior(name).common)
    common = np.zeros((len(keys), len(classes)))
    for row, (name, _) in enumerate(keys):
        if name in classes:
            common[row, classes.index(name)] = 1.0
    return np.log(means), np.array(widths), np.hstack([np.eye(len(keys)), common])


def _find_prior(name: str) -> Prior:
    """Prior of a class; finer classes, such as ``memory.fused``, have that of the class."""
    return _PRIORS[name.partition(".")[0]]


def _tabulate(steps: Sequence[Step], keys: Sequence[tuple[str, str]]) -> dict[str, Array]:
    """Times of parts by step, those with a scale by step and scale; places of the scales of host
    and collectives."""
    known = {name for name, _ in keys} | {*_BESIDE}
    tables = {name: np.array([step.parts[name] for step in steps]) for name in _BESIDE}
    tables["rest"] += [_sum_unknown(step, known) for step in steps]
    tables["memory"] = np.array([name.startswith("memory") for name, _ in keys])
    parts = np.zeros((len(steps), len(keys)))
    for column, key in enumerate(keys):
        if key[0] not in ("host", "exchange", "source"):
            parts[:, column] = [_weigh(step, key) for step in steps]
    tables["parts"] = parts
    for name in ("host", "exchange"):
        tables[f"of {name}"] = np.array([keys.index((name, step.generation)) for step in steps])
    sources = [step.source if ("source", step.source) in keys else "" for step in steps]
    tables["of source"] = np.array([keys.index(("source", source)) for source in sources])
    return tables


def _sum_unknown(step: Step, known: Set[str]) -> float:
    """Time of the classes of a step that have no scale [s]."""
    return sum(time for name, time in step.parts.items() if name not in known)


def _weigh(step: Step, key: tuple[str, str]) -> float:
    """Time of a step that a scale multiplies [s]."""
    name, generation = key
    if name == "source":
        return step.parts["memory"] if generation == step.source else 0.0
    if generation != step.generation:
        return 0.0
    if name == "exchange":
        return step.parts["flight"]
    return step.parts.get(name, 0.0)


def _time(tables: Mapping[str, Array], logs: Array) -> Array:
    """Times of steps: the slower of device and host, where collectives slow the kernels beside them
    [s]."""
    scales = np.exp(logs)
    of_sources = scales[tables["of source"], None]
    parts = tables["parts"] * np.where(tables["memory"], of_sources, 1.0)
    contention = np.minimum(scales[tables["of exchange"]], 1.0)
    exposed = tables["exposed"]
    slowed = contention * (tables["flight"] - exposed) + exposed
    device = tables["rest"] + parts @ scales + slowed
    host = tables["host"] * scales[tables["of host"]]
    return np.asarray(smooth_maximum(device, host, sharpness=_JOIN))


def predict_steps(steps: Sequence[Step], scales: Scales) -> tuple[Array, Array]:
    """Times of steps on platforms with these scales [s], and spreads of their logarithms [-]."""
    keys = [key for key in scales if key[0] != "spread"]
    logs = np.array([scales[key].log for key in keys])
    stderrs = np.array([scales[key].stderr for key in keys])
    tables = _tabulate(steps, keys)
    times = _time(tables, logs)
    slopes = np.zeros((len(steps), len(keys)))
    for column in range(len(keys)):
        moved = logs.copy()
        moved[column] += _CHANGE
        slopes[:, column] = (_time(tables, moved) / times - 1) / _CHANGE
    around = [scales["spread", step.generation].log for step in steps]
    of_scales = np.sqrt(np.square(slopes) @ np.square(stderrs))
    return times, np.hypot(np.hypot(around, of_scales), tables["uncertainty"] / times)


@dataclass(frozen=True)
class _Source:
    """Where the fits of a context come from: a text, its date and the generation of the device."""

    text: str
    date: str
    generation: str


def _complete_scales(platform: Platform, scales: Scales, generation: str) -> dict[str, Scale]:
    """Scales of a generation by class, also of kernels of attention that no step has.

    Programs of the user belong to no source, so scales of memory-bound work are as uncertain as
    sources differ.
    """
    known = dict[str, Scale]()
    between_sources = scales["source", ""].stderr
    for (name, owner), scale in scales.items():
        if owner != generation:
            continue
        if name.startswith("memory"):
            scale = scale._replace(stderr=math.hypot(scale.stderr, between_sources))
        known[name] = scale
    attention = [scale.log for name, scale in known.items() if name.startswith("attention")]
    middle = float(np.mean(attention))
    for kernel in ATTENTION:
        log = math.log(_FORWARD[kernel]) if kernel in _FORWARD else middle
        if f"attention.forward.{kernel}" in platform.kernels:  # measured alone
            log = 0.0
        known.setdefault(f"attention.{kernel}", Scale(log, _BORROWED, 0))
    return known


def _make_fit(
    name: str,
    scale: Scale,
    model: type[F],
    parameters: Mapping[str, float],
    source: _Source,
    spread: float = 0.0,
) -> F:
    """A fit of the context from a scale.

    One without a step of the generation is assumed, with an uncertainty of 30 % or more; isolated
    products were measured.
    """
    stderr = scale.stderr
    dtypes = _FORMATS if name == "product" else ()
    about: dict[str, Any] = {
        "source": source.text,
        "date": source.date,
        "n": scale.configurations,
        "dtypes": dtypes,
    }
    if not scale.configurations:
        words = name.replace(".", " ")
        device = source.generation.replace("others", "such a device")
        note = f"scale of {words}: no published step on {device} shows it; taken from other generations of GPUs"
        about["kind"] = "assumed"
        about["notes"] = (note,)
        least = 0.0 if name == "product" else _BORROWED
        stderr = max(stderr, least)
        spread = max(spread, least)
    stderrs = dict.fromkeys(parameters, stderr)
    return model.build(parameters, spread=spread or stderr, stderr=stderrs, **about)


def _make_kernels(
    platform: Platform, scales: Mapping[str, Scale], source: _Source
) -> dict[str, InContext]:
    """Scales of kernels as fits of a context, by class of operations."""
    fits = dict[str, InContext]()
    for name, scale in scales.items():
        kind, _, finer = name.partition(".")
        factor = math.exp(scale.log)
        ending = f".{finer}" if finer else ""
        for operation in _OPERATIONS.get(kind, ()):
            fit = _make_fit(name, scale, InContext, {"scale": factor}, source)
            fits[operation + ending] = fit
        if kind == "attention":
            backward = {"scale": find_backward(platform, finer) * factor}
            fit = _make_fit(name, scale, InContext, backward, source)
            fits[f"attention.backward.{finer}"] = fit
    return fits


def _scale_host(scale: Scale, source: _Source) -> dict[str, Quantity]:
    """The published host overheads times a scale."""
    factor = math.exp(scale.log)
    kind = "fitted" if scale.configurations else "assumed"
    overheads = dict[str, Quantity]()
    for name, quantity in read_overheads().items():
        value = quantity.value * factor
        overheads[name] = replace(
            quantity,
            value=float(f"{value:.3g}"),
            stderr=float(f"{scale.stderr * value:.3g}"),
            kind=kind,
            source=f"{quantity.source}; times {factor:.3f}: {source.text}",
        )
    return overheads


def add_published(
    platform: Platform, scales: Scales, generation: str, *, source: str, date: str
) -> Platform:
    """A platform whose context has the scales of a generation, with scaled host overheads.

    Scales without a step of the generation are assumed, with an uncertainty of 30 % or more.
    """
    origin = _Source(source, date, generation)
    known = _complete_scales(platform, scales, generation)
    around = known["spread"]
    joined = {"scale": 1.0, "sharpness": _JOIN}
    contention = {"contention": min(math.exp(known["exchange"].log), 1.0)}
    iteration = _make_fit("spread", around, Iteration, joined, origin, around.log)
    iterations = {"transformer": iteration}
    context = Context(
        kernels=_make_kernels(platform, known, origin),
        iterations=iterations,
        parallel=iterations,
        overlap=_make_fit("exchange", known["exchange"], Overlap, contention, origin),
    )
    return replace(platform, context=context, host=_scale_host(known["host"], origin))
