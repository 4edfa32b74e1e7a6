"""How far `explore` is from the event loop of `predict`, for random strategies of all kinds.

    python -m benchmarks.strategies_beside [--count N] [--seed N]

Nothing is measured and nothing was fitted: both sides are perfkit's. Models have few and many
layers, small and large vocabularies, narrow and wide layers, and some have experts; platforms are
nodes of H100 and A100 with fast and slow links between them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.ground.units import check_positive
from perfkit.models.partitions import SCHEDULES, V_SHAPED
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.stages import check_strategy
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Nodes that are drawn, and bandwidths of their links; None for those of the gallery [B/s].
_NODES = ("h100-sxm-8", "a100-sxm-8")
_BANDWIDTHS = (None, None, None, 5e9, 1e9)
#: Most passes of all micro-batches through all layers, which the event loop runs one by one [-].
_MOST_PASSES = 6_000
#: Largest difference that is asked for [-].
BAR = 0.03


class Drawn(NamedTuple):
    """A random question: the model, the node, the bandwidth of its links to others, or None for its
    own [B/s], the strategy and the execution."""

    model: Transformer
    node: str
    bandwidth: float | None
    strategy: Strategy
    execution: str

    @property
    def platform(self) -> Platform:
        """As many nodes as the strategy fills."""
        nodes = max(-(-int(self.strategy.ranks) // 8), 1)
        if nodes == 1:
            return load_platform(self.node)
        platform = load_platform(f"{self.node}x{nodes}")
        if self.bandwidth is not None:
            return platform.with_link("inter", bandwidth=self.bandwidth, latency=1e-5)
        return platform


class Agreement(NamedTuple):
    """A random question, and how long both sides say that an iteration takes [s]."""

    drawn: Drawn
    explored: float
    predicted: float

    @property
    def error(self) -> float:
        """How much longer `explore` says it takes [-]."""
        return self.explored / self.predicted - 1.0


def _draw_model(rng: np.random.Generator) -> Transformer:
    """A model with a batch of one sequence."""
    heads = int(rng.choice([8, 16, 32, 64]))
    settings: dict[str, Any] = {
        "layers": int(rng.choice([4, 6, 8, 12, 16, 20, 24, 30, 32, 40, 48])),
        "hidden": heads * int(rng.choice([64, 128])),
        "heads": heads,
        "vocabulary": int(rng.choice([1_024, 32_000, 50_304, 128_256, 256_000])),
        "sequence": int(rng.choice([512, 1024, 2048, 4096])),
        "dtype": "bf16",
        "mixed": bool(rng.random() < 0.7),
        "fused": bool(rng.random() < 0.7),
    }
    if rng.random() < 0.15:
        settings["experts"] = 8
        settings["top_k"] = 2
    settings["positions"] = settings["sequence"]
    return Transformer.preset("gpt3-1.3b", batch=1, **settings)


#: Latent attention, which only layers without learned positions and biases have.
_LATENT = {
    "norm": "rms",
    "gated": True,
    "rotary": True,
    "bias": False,
    "tie": False,
    "kv_heads": 0,
    "head_width": 128,
    "rope_width": 64,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
}
#: Forms of layers, as changes of a drawn model: shared experts and first dense layers, experts in
#: every second layer, latent attention, windows, attention beside the MLP, norms on both sides, and
#: further tokens.
FORMS: dict[str, dict[str, Any]] = {
    "first dense layers": {"experts": 8, "top_k": 2, "shared_experts": 1, "dense_layers": 1},
    "experts in turn": {"experts": 8, "top_k": 2, "expert_interval": 2},
    "latent attention": _LATENT,
    "windows in turn": {"window": 256, "global_interval": 2},
    "parallel MLP": {"parallel_mlp": True, "experts": 0, "top_k": 1},
    "norms on both sides": {"norm_place": "both", "qk_norm": True},
    "further token": {"mtp_layers": 1, "rotary": True},
}


#: Schedules that are drawn: those whose stages are in no V. With others all draws would change, and with
#: them the figures that tables and tests keep; tests/test_v_schedules.py has the others.
_DRAWN = [name for name in SCHEDULES if name not in V_SHAPED]


def _draw_power(rng: np.random.Generator, most: int) -> int:
    """A power of two, at most 2 to the power of this."""
    return 1 << int(rng.integers(0, most + 1))


def _draw_strategy(rng: np.random.Generator, model: Transformer) -> Strategy:
    """A strategy, which need not divide the model; a ValueError if it cannot be at all."""
    pp = int(rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16]))
    schedule = str(rng.choice(_DRAWN))
    chunks = 1
    if pp > 1 and SCHEDULES[schedule].has_chunks:
        chunks = int(rng.integers(1, 5))
    if pp > 1 and schedule == "interleaved":
        chunks = max(chunks, 2)
    fields: dict[str, Any] = {
        "tp": _draw_power(rng, 3),
        "pp": pp,
        "dp": _draw_power(rng, 4),
        "cp": int(rng.choice([1, 1, 1, 2, 4])),
        "ep": _draw_power(rng, 3) if model.experts else 1,
        "micro_batch": _draw_power(rng, 2),
        "schedule": schedule,
        "chunks": chunks,
        "checkpoint": str(rng.choice(["none", "none", "full", "selective"])),
        "zero": int(rng.choice([0, 1, 1, 2, 3])),
        "sequence_parallel": bool(rng.integers(2)),
        "cp_kind": str(rng.choice(["ring", "ulysses"])),
        "overlap": bool(rng.random() < 0.85),
    }
    if fields["dp"] > 8 and rng.random() < 0.2:
        fields["shards"] = 8
    even = model.layers // (pp * chunks)
    for name in ("first_layers", "last_layers"):
        if pp > 1 and rng.random() < 0.25:
            fields[name] = max(even * chunks + int(rng.integers(-2, 3)), 1)
    return Strategy(**fields)


def draw(count: int, seed: int, *, form: str | None = None) -> list[Drawn]:
    """Draw random questions that can be asked, on at most 128 ranks.

    Parameters
    ----------
    count, seed : int
        How many, and the seed of the draw [-].
    form : str, optional
        One of `FORMS`, which all models take.

    Returns
    -------
    drawn : list of Drawn
        Questions.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Drawn] = []
    while len(drawn) < count:
        model = _draw_model(rng)
        if form is not None:
            model = replace(model, **FORMS[form])
        node = str(rng.choice(_NODES))
        bandwidth = _BANDWIDTHS[int(rng.integers(len(_BANDWIDTHS)))]
        execution = str(rng.choice(["eager", "compiled"], p=[2 / 3, 1 / 3]))
        groups = int(rng.integers(1, 7))
        few = int(rng.integers(1, 20))
        with suppress(ValueError):
            strategy = _draw_strategy(rng, model)
            micro_batches = few
            if SCHEDULES[strategy.schedule].interleaves or rng.random() < 0.5:
                micro_batches = groups * strategy.pp
            batch = strategy.dp * strategy.micro_batch * micro_batches
            model = replace(model, batch=batch)
            check_strategy(model, strategy)
            passes = micro_batches * model.layers
            if strategy.ranks <= 128 and passes <= _MOST_PASSES:
                drawn.append(Drawn(model, node, bandwidth, strategy, execution))
    return drawn


def compare(drawn: Drawn, near: float = np.inf) -> Agreement:
    """Ask both sides.

    Parameters
    ----------
    drawn : Drawn
        A question.
    near : float, optional
        See `perfkit.prediction.strategies.price_strategies` [-].

    Returns
    -------
    agreement : Agreement
        Their answers.
    """
    model, platform, strategy = drawn.model, drawn.platform, drawn.strategy
    with keep_quiet():
        stacked = Strategy.stack([strategy])
        priced = price_strategies(model, platform, stacked, drawn.execution, near=near)
        events = predict(model, platform, strategy=strategy, execution=drawn.execution)
    return Agreement(drawn, float(priced["time"][0]), events.time)


def name_schedule(drawn: Drawn) -> str:
    """The schedule of the stages, if there are several."""
    if drawn.strategy.pp == 1:
        return "one stage"
    return str(drawn.strategy.schedule)


def list_unevenness(drawn: Drawn) -> list[str]:
    """What makes stages unlike, or the question hard."""
    s, model = drawn.strategy, drawn.model
    several = s.pp > 1
    stated = s.first_layers > 0 or s.last_layers > 0
    divides = model.layers % (s.pp * s.chunks) == 0
    kinds = {
        "stages alike": several and not stated and divides,
        "layers that do not divide": several and not stated and not divides,
        "end layers": several and stated and s.chunks == 1,
        "end layers with chunks": several and stated and s.chunks > 1,
        "slow links": several and drawn.bandwidth is not None and s.ranks > 8,
        "ZeRO 2 and 3 beside stages": several and s.zero > 1,
        "experts": model.experts > 0,
    }
    return [name for name, holds in kinds.items() if holds]


def _judge(name: str, agreements: Sequence[Agreement]) -> dict[str, Any]:
    """Figures of some questions."""
    errors = np.array([one.error for one in agreements])
    sizes = np.abs(errors)
    return {
        "name": name,
        "count": len(sizes),
        "mean": float(sizes.mean()),
        "bias": float(errors.mean()),
        "p95": float(np.quantile(sizes, 0.95)),
        "most": float(sizes.max()),
        "beyond": int((sizes > BAR).sum()),
    }


def _group(
    agreements: Sequence[Agreement], list_names: Callable[[Drawn], list[str]]
) -> list[dict[str, Any]]:
    """Figures by group."""
    groups: dict[str, list[Agreement]] = {}
    for one in agreements:
        for name in list_names(one.drawn):
            groups.setdefault(name, []).append(one)
    return [_judge(name, groups[name]) for name in sorted(groups)]


def format_agreements(agreements: Sequence[Agreement]) -> str:
    """Figures by schedule, by what is uneven, and of all.

    Parameters
    ----------
    agreements : sequence of Agreement
        Answers.

    Returns
    -------
    text : str
        A table, and the largest difference.
    """
    rows = _group(agreements, lambda drawn: [name_schedule(drawn)])
    rows += _group(agreements, list_unevenness)
    rows.append(_judge("all", agreements))
    heads = {
        "strategies": "{name}",
        "count": "{count}",
        "mean": "{mean:.2%}",
        "bias": "{bias:+.2%}",
        "95 % within": "{p95:.1%}",
        "largest": "{most:.1%}",
        f"beyond {BAR:.0%}": "{beyond}",
    }
    worst = max(agreements, key=lambda one: abs(one.error))
    text = lay_out(rows, heads)
    where = worst.drawn.platform.name
    return f"{text}\nlargest, {worst.error:+.1%}: {worst.drawn.strategy} on {where}"


@command(
    {
        "--count": {"type": int, "default": 200, "help": "strategies that are drawn"},
        "--seed": {"type": int, "default": 41, "help": "seed of the draw"},
        "--forms": {"action": "store_true", "help": "of each form of layers, as many for each"},
    }
)
def main(given: Any) -> None:
    """How far explore is from the event loop, for random strategies."""
    count = int(check_positive("--count", given.count, integer=True))
    if not given.forms:
        agreements = [compare(drawn) for drawn in draw(count, given.seed)]
        print(format_agreements(agreements))
        return
    for form in FORMS:
        agreements = [compare(drawn) for drawn in draw(count, given.seed, form=form)]
        print(f"\n{form}\n{format_agreements(agreements)}")
