"""Published steps of many software stacks, predicted with levels that were fitted to other steps.

    python -m benchmarks.stacks [--write]

The steps are those of the folder `steps` that PERFKIT_SHARED_DATA names (2020 to 2026, A100 to
GB200, TPU v5e), and older ones: reference_data/published/gpu_steps.csv and what
`benchmarks.scale` reads. A step is judged by the documented call, with the level of its stack,
device and format. Levels are fitted to other steps: in each of ten draws to half of all groups; a
step is judged in the draws that left its group out, and counts once, by the mean over them. Groups
are those of the files: some hold one day or one number of ranks of a model. So the same is done
with half of all models, and then one source at a time is left out. Beside each error stands that
without any level. --write fits all and writes reference_data/published/stack_levels.csv, from which
`benchmarks.makers.gallery` makes the levels of platforms.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks import gpu_context, scale
from benchmarks.helpers.command import WRITE, command
from benchmarks.helpers.files import write_csv
from benchmarks.helpers.gpu_scales import predict_steps
from benchmarks.helpers.levels import Cell, LevelModel, Observation, fit_levels
from benchmarks.helpers.published import list_published, predict_step
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import find_reference
from perfkit.ground.targets import write_text
from perfkit.platform.levels import GENERATIONS
from perfkit.platform.machine import OTHERS
from perfkit.workloads.transformer import Transformer

#: Largest mean error of each set [%], half of the groups fitted, and with its source left out.
BARS: dict[str, tuple[float, float | None]] = {
    "fp8 Megatron": (10.0, 16.0),
    "B200 bf16": (8.0, None),
    "torchao": (10.0, None),
    "topologies": (10.0, None),
    "zero bubble, InternEvo, MegaScale": (7.0, None),
    "experts of Megatron-Bridge": (25.0, None),
    "TPU v5e": (8.0, None),
}
#: Stack of the steps of reference_data/published/gpu_steps.csv, by source: what their citations say
#: ran them. Those of other sources are read by `benchmarks.scale`.
_STACKS = {
    "mpt": "fsdp",
    "vtrain": "deepspeed",
    "flash_gpt": "ddp-compiled",
    "dle_bert": "ddp",
    "neusight": "ddp",
}
#: Stack of the steps that `benchmarks.scale` reads, by source.
_OLDER = {
    "vtrain": "deepspeed",
    "torchtitan": "fsdp-compiled",
    "nvidia": "megatron-te",
    "megatron": "megatron",
    "seqsel": "megatron",
    "megablocks": "megatron",
}
_BLACKWELL = ("b200", "gb200")
#: GPUs of a node of all but GB200.
_NODE = 8
#: Day on which the levels were fitted.
_DATE = "2026-11-28"
#: Draws of half of the groups.
_DRAWS = 10
#: Least difference of the logarithms of two times that are ranked [-].
_UNLIKE = 0.05
#: Half widths of central intervals, in standard deviations [-].
_WIDTHS = {50: 0.6745, 80: 1.2816, 95: 1.9600}
#: Fewest judged steps of a class whose coverage says something.
_FEWEST = 8


class Judged(NamedTuple):
    """A step that was left out.

    Parameters
    ----------
    observation : Observation
        The step.
    label : str
        Its set.
    error : float
        Mean of the absolute errors over draws [-].
    bias : float
        Mean error over draws [-].
    inside : mapping of int to float
        Share of draws in which the step lies inside the central interval of so many per cent [-].
    spread : float
        Mean over draws of the predicted standard deviation [-].
    """

    observation: Observation
    label: str
    error: float
    bias: float
    inside: Mapping[int, float]
    spread: float


# What is judged


def list_observations() -> list[tuple[str, Observation]]:
    """All published steps beside predictions without a level, each with the name of its set."""
    return [*_list_new(), *_list_fitted(), *_list_older()]


def _list_new() -> Iterator[tuple[str, Observation]]:
    """Steps of the folder `steps`."""
    for step in list_published():
        has_experts = step.model.experts > 0
        crosses = step.strategy.ranks > step.platform.network.ranks_per_node
        cell = Cell(step.stack.name, step.generation, step.format, has_experts, crosses)
        predicted = predict_step(step).time
        label = _LABELS[step.set.name]
        if has_experts:
            label = "experts of Megatron-Bridge"
        level = math.log(step.seconds / predicted)
        model = _name_model(step.set.source, step.model)
        yield label, Observation(cell, step.set.source, step.group, level, step.seconds, model)


#: Name of each set of steps in tables.
_LABELS = {
    "bloom_topologies_a100": "topologies",
    "internevo_a100": "zero bubble, InternEvo, MegaScale",
    "zero_bubble_a100": "zero bubble, InternEvo, MegaScale",
    "megascale_a100": "zero bubble, InternEvo, MegaScale",
    "mlperf_gpt3": "fp8 Megatron",
    "mlperf_llama": "fp8 Megatron",
    "megatron_bridge": "fp8 Megatron",
    "simumax_b200": "B200 bf16",
    "torchao_h100": "torchao",
    "torchtune_a100": "torchtune",
    "maxtext_v5e": "TPU v5e",
}


def _list_fitted() -> Iterator[tuple[str, Observation]]:
    """Steps of one GPU or of replicas, which the scales of kernels were fitted to, but for
    NeuSight's."""
    rows = [row for row in gpu_context.read_rows() if row["source"] in _STACKS]
    steps = gpu_context.list_steps(rows)
    times, _ = predict_steps(steps, gpu_context.read_scales())
    for row, step, time in zip(rows, steps, times, strict=True):
        cell = Cell(
            _STACKS[row["source"]],
            step.generation,
            _name_format(row["dtype"]),
            crosses_nodes=int(row["ranks"]) > _NODE,
        )
        group = " ".join((row["source"], row["device"], row["model"], row["dtype"]))
        level = math.log(step.seconds / time)
        model = _name_model(row["source"], gpu_context.build_workload(row, 1))
        yield (
            f"older: {row['source']}",
            Observation(cell, row["source"], group, level, step.seconds, model),
        )


def _list_older() -> Iterator[tuple[str, Observation]]:
    """Steps of `benchmarks.scale`, with the scales of all sources."""
    lists = [
        scale.list_vtrain(),
        scale.list_torchtitan(alone=True),
        scale.list_recipes(),
        scale.list_recipes(stated=True),
        scale.list_megatron(),
        scale.list_recomputed(),
        scale.list_megablocks(),
    ]
    rows = [row for listed in lists for row in listed]
    priced = scale.price_rows([row._replace(source="") for row in rows])
    for row, figures in zip(rows, priced, strict=True):
        chip = row.device.split(" ")[0].partition("-")[0]
        generation = "blackwell" if chip in _BLACKWELL else chip
        has_experts = row.model.experts > 0
        form = _name_format(row.model.dtype)
        domain = 64 if chip == "gb200" else _NODE
        crosses = row.strategy.ranks > domain
        cell = Cell(_OLDER[row.source], generation, form, has_experts, bool(crosses))
        label = f"older: {row.source}"
        if has_experts:
            label += ", experts"
        level = math.log(row.seconds / figures["predicted"])
        group = f"{row.source} {row.group}"
        model = _name_model(row.source, row.model)
        yield label, Observation(cell, row.source, group, level, row.seconds, model)


def _name_model(source: str, model: Transformer) -> str:
    """A model of a source by its sizes, whatever its batch, its heads and its ranks."""
    return f"{source} {model.layers} x {model.hidden}"


def _name_format(dtype: str) -> str:
    """Number format whose products run at one rate."""
    return "bf16" if dtype == "fp16" else dtype


# How it is judged


def judge_halves(labelled: Sequence[tuple[str, Observation]]) -> list[Judged]:
    """Judge each step by levels that were fitted to half of all groups, without its own."""
    return judge_draws(labelled, _draw_halves([one.group for _, one in labelled]))


def judge_models(labelled: Sequence[tuple[str, Observation]]) -> list[Judged]:
    """Judge each step by levels that were fitted to half of all models, without its own."""
    return judge_draws(labelled, _draw_halves([one.model for _, one in labelled]))


def _draw_halves(names: Sequence[str]) -> list[list[bool]]:
    """In each draw, which steps are fitted: those of a random half of all names."""
    distinct = sorted(set(names))
    draws = []
    for seed in range(_DRAWS):
        rng = np.random.default_rng(seed)
        count = (len(distinct) + seed % 2) // 2
        half = set(rng.permutation(distinct)[:count].tolist())
        draws.append([name in half for name in names])
    return draws


def judge_sources(labelled: Sequence[tuple[str, Observation]]) -> list[Judged]:
    """Judge the steps of each source by levels that were fitted to all other sources."""
    sources = [one.source for _, one in labelled]
    draws = []
    for left_out in dict.fromkeys(sources):
        draws.append([source != left_out for source in sources])
    return judge_draws(labelled, draws)


def judge_draws(
    labelled: Sequence[tuple[str, Observation]], draws: Sequence[Sequence[bool]]
) -> list[Judged]:
    """Judge each step in all draws that did not fit it."""
    errors: list[list[float]] = [[] for _ in labelled]
    distances: list[list[float]] = [[] for _ in labelled]
    spreads: list[list[float]] = [[] for _ in labelled]
    for is_fitted in draws:
        pairs = list(zip(labelled, is_fitted, strict=True))
        model = fit_levels([one for (_, one), fitted in pairs if fitted])
        judged_cells = {one.cell for (_, one), fitted in pairs if not fitted}
        levels = {cell: model.find(cell) for cell in sorted(judged_cells)}
        for place, ((_, one), fitted) in enumerate(pairs):
            if fitted:
                continue
            level = levels[one.cell]
            errors[place].append(math.exp(level.mean - one.level) - 1)
            distances[place].append((one.level - level.mean) / level.spread)
            spreads[place].append(level.spread)
    judged = []
    for place, (label, one) in enumerate(labelled):
        if not errors[place]:
            continue
        judged.append(
            Judged(
                observation=one,
                label=label,
                error=float(np.mean(np.abs(errors[place]))),
                bias=float(np.mean(errors[place])),
                inside={
                    share: float(np.mean(np.abs(distances[place]) <= width))
                    for share, width in _WIDTHS.items()
                },
                spread=float(np.mean(spreads[place])),
            )
        )
    return judged


def _summarize(name: str, judged: Sequence[Judged]) -> dict[str, Any]:
    """Errors and shares inside intervals of some steps [%]."""
    errors = 100 * np.array([one.error for one in judged])
    without = [abs(math.exp(-one.observation.level) - 1) for one in judged]
    figures: dict[str, Any] = {
        "steps": name,
        "n": len(judged),
        "geomean": float(np.exp(np.mean(np.log(np.maximum(errors, 0.1))))),
        "mean": float(errors.mean()),
        "p95": float(np.percentile(errors, 95)),
        "bias": 100 * float(np.mean([one.bias for one in judged])),
        "spread": 100 * float(np.mean([one.spread for one in judged])),
        "without": 100 * float(np.mean(without)),
    }
    for share in _WIDTHS:
        figures[f"inside_{share}"] = 100 * float(np.mean([one.inside[share] for one in judged]))
    return figures


def tabulate_sets(
    judged: Sequence[Judged], place_of_bar: int | None = None
) -> list[dict[str, Any]]:
    """Errors by set, and of all new and all older steps; the bar is that of half of the groups (0),
    of a source left out (1), or None."""
    sets: dict[str, list[Judged]] = {}
    for one in judged:
        sets.setdefault(one.label, []).append(one)
        is_older = one.label.startswith("older")
        sets.setdefault("all older" if is_older else "all of data/steps", []).append(one)
    figures = []
    for name in sorted(sets):
        bar = None
        if place_of_bar is not None and name in BARS:
            bar = BARS[name][place_of_bar]
        row = {**_summarize(name, sets[name]), "bar": bar, "met": None}
        if bar is not None:
            row["met"] = "yes" if row["mean"] <= bar else "NO"
        figures.append(row)
    return figures


def find_counts(steps: int, share: float) -> tuple[int, int]:
    """Smallest and largest count in the central 95 % of a binomial distribution, which takes steps
    as independent."""
    from scipy.stats import binom  # it asks for torch, which those who collect tests may lack

    low, high = binom.ppf([0.025, 0.975], steps, share)
    return int(low), int(high)


def tabulate_classes(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Shares of steps inside 80 % intervals by class, and whether a binomial explains them."""
    classes: dict[str, list[Judged]] = {}
    for one in judged:
        cell = one.observation.cell
        name = f"{cell.stack} {cell.generation} {cell.format}"
        classes.setdefault(name, []).append(one)
    figures = []
    for name in sorted(classes):
        members = classes[name]
        if len(members) < _FEWEST:
            continue
        row = _summarize(name, members)
        low, high = find_counts(len(members), 0.8)
        row["low"], row["high"] = 100 * low / len(members), 100 * high / len(members)
        row["held"] = "yes" if row["low"] <= row["inside_80"] <= row["high"] else "NO"
        figures.append(row)
    return figures


# What is chosen


def tabulate_choices(labelled: Sequence[tuple[str, Observation]]) -> list[dict[str, Any]]:
    """How often the faster of two steps of a group is predicted to be the faster one, and how much
    longer than the fastest the step takes that is predicted to be [%]; a level changes neither."""
    groups: dict[tuple[str, str], list[Observation]] = {}
    for label, one in labelled:
        groups.setdefault((label, one.group), []).append(one)
    pairs: dict[str, list[bool]] = {}
    regrets: dict[str, list[float]] = {}
    for (label, _), members in groups.items():
        for one, other in combinations(members, 2):
            if abs(math.log(one.seconds / other.seconds)) > _UNLIKE:
                is_faster = one.seconds < other.seconds
                pairs.setdefault(label, []).append(is_faster == (one.predicted < other.predicted))
        if len(members) > 1:
            chosen = min(members, key=lambda one: one.predicted)
            fastest = min(one.seconds for one in members)
            regrets.setdefault(label, []).append(chosen.seconds / fastest - 1)
    figures = []
    for label in sorted(pairs):
        figures.append(
            {
                "steps": label,
                "pairs": len(pairs[label]),
                "ranked": 100 * float(np.mean(pairs[label])),
                "choices": len(regrets[label]),
                "regret": 100 * float(np.mean(regrets[label])),
            }
        )
    return figures


# What is kept


def tabulate_levels(model: LevelModel) -> str:
    """Levels of all cells with steps, and of other stacks in each format on each device, as the text
    of a table."""
    cells = model.cells
    stacks = sorted({cell.stack for cell in cells})
    devices = sorted({cell.device for cell in cells if cell.generation in GENERATIONS.values()})
    kinds = list(product((False, True), (False, True)))
    rows = []
    for (generation, form), (has_experts, crosses_nodes) in product(devices, kinds):
        for stack in [*stacks, OTHERS]:
            cell = Cell(stack, generation, form, has_experts, crosses_nodes)
            is_known = any(other.device == cell.device and other.stack == stack for other in cells)
            level = model.find(cell)
            says_more = is_known and not has_experts
            if not level.steps and not says_more and stack != OTHERS:
                continue  # it takes the level of other stacks
            rows.append(
                {
                    "stack": stack,
                    "generation": generation,
                    "format": form,
                    "experts": "yes" if has_experts else "no",
                    "nodes": "several" if crosses_nodes else "one",
                    "logarithm": f"{level.mean:.4f}",
                    "stderr": f"{level.stderr:.4f}",
                    "spread": f"{level.spread:.4f}",
                    "steps": level.steps,
                    "groups": level.groups,
                    "source": level.sources,
                    "date": _DATE,
                }
            )
    return write_csv(rows)


_COLUMNS = {
    "steps": "{steps}",
    "n": "{n}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
    "spread": "{spread:.1f}",
    "inside 50": "{inside_50:.0f}",
    "80": "{inside_80:.0f}",
    "95 %": "{inside_95:.0f}",
    "mean without level": "{without:.1f}",
}
_CHOICES = {
    "steps of one group": "{steps}",
    "pairs": "{pairs}",
    "ranked rightly": "{ranked:.0f}",
    "choices": "{choices}",
    "regret": "{regret:.1f}",
}
_SETS = {**_COLUMNS, "bar": "{bar:g}", "met": "{met}"}
_CLASSES = {**_COLUMNS, "80: from": "{low:.0f}", "to": "{high:.0f}", "held": "{held}"}


@command(WRITE)
def main(given: Any) -> int:
    """Published steps by software stack, judged by levels fitted to others."""
    labelled = list_observations()
    halves = judge_halves(labelled)
    sets = tabulate_sets(halves, 0)
    print(f"half of the groups fitted, the others judged\n{lay_out(sets, _SETS)}")
    print(f"\nby stack, device and format\n{lay_out(tabulate_classes(halves), _CLASSES)}")
    models = tabulate_sets(judge_models(labelled))
    print(f"\nhalf of the models fitted, the others judged\n{lay_out(models, _SETS)}")
    apart = tabulate_sets(judge_sources(labelled), 1)
    print(f"\none source left out\n{lay_out(apart, _SETS)}")
    print(f"\nthe fastest of a group\n{lay_out(tabulate_choices(labelled), _CHOICES)}")
    model = fit_levels([one for _, one in labelled])
    parts = model.components._asdict().items()
    print("\nparts of a level: " + ", ".join(f"{name} {value:.3f}" for name, value in parts))
    if given.write:
        write_text(find_reference("published") / "stack_levels.csv", tabulate_levels(model))
    return int(any(row["met"] == "NO" for row in sets + apart))
