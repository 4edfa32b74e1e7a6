"""Whole steps that others published, predicted with scales that were fitted to other published
steps.

    python -m benchmarks.gpu_context [--write]

The steps are those of reference_data/published/gpu_steps.csv. --write fits
reference_data/published/gpu_scales.csv, from which `benchmarks.makers.gallery` makes the context of GPUs.
A step is never judged by scales that were fitted to it: half of the groups (model, device and
precision) in ten splits, one size, one group, or one source is left out. Scales of a generation are
fitted to steps on it, with the steps on other generations as a prior.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import WRITE, command
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import read_csv, write_csv
from benchmarks.helpers.gpu_scales import (
    Scales,
    Step,
    add_published,
    fit_scales,
    predict_steps,
    split_step,
)
from benchmarks.helpers.tables import Row, lay_out
from perfkit.ground.files import find_reference
from perfkit.ground.targets import write_text
from perfkit.platform.datasheets import read_datasheet
from perfkit.platform.estimates import keep_quiet

#: Node of the gallery for a device, by the first part of its name.
NODES = {
    "v100": "v100-sxm-8",
    "a100": "a100-sxm-8",
    "h100": "h100-sxm-8",
    "b200": "b200-sxm-8",
    "gb200": "gb200-4",
}
#: Generations with scales; no step is fitted on the last three.
GENERATIONS = ("v100", "a100", "h100", "blackwell", "ada", "others")
#: Generation of a GPU, by the first part of its name.
GENERATION = {
    "v100": "v100",
    "a100": "a100",
    "h100": "h100",
    "h200": "h100",
    "l4": "ada",
    "l40s": "ada",
}
GENERATION |= dict.fromkeys(("b200", "b300", "gb200"), "blackwell")
#: Sources whose steps are fitted, except steps in fp8.
FITTED = ("mpt", "vtrain", "flash_gpt", "dle_bert", "megatron")
_SIZES = ("layers", "hidden", "heads", "vocabulary", "kv_heads", "inner")
#: Settings of Llama that differ from GPT.
LLAMA: dict[str, Any] = {"norm": "rms", "gated": True, "rotary": True, "tie": False, "bias": False}
#: Time that `selective` checkpoints add, over that of recomputing whole layers: every other
#: product, no attention [-].
_SELECTIVE = {"product": 0.5, "memory": 1.0, "memory.fused": 1.0, "host": 1.0}
#: Products in fp32 on the PCIe card of A100, whose power limits its clock: the fit to
#: sitar-lab/NeuSight's sizes [-].
PCIE = {"compute_efficiency": 0.760814, "memory_efficiency": 0.59574, "sharpness": 2.01633}
#: Scale of fused kernels: between those of PyTorch's compiler, in three steps of perfkit's own
#: H100, and those fused by hand; docs/formulas.md, table 4.3. No judged step was fitted, but that
#: NVIDIA's recipes need no more had been seen.
_OWN: Scales = {("memory.fused", "h100"): (0.22, 0.30, 3)}
#: Steps on four GPUs that share a batch; they are in no group and are listed one by one, before
#: those of split models.
_STATED = "neusight_dp4"
#: Largest mean error [%] by what is judged and how.
BARS = {
    ("mpt a100", "half of the groups"): 5.0,
    ("mpt h100", "half of the groups"): 6.0,
    ("mpt a100", "one size left out"): 6.0,
    ("mpt h100", "one size left out"): 6.0,
    ("vtrain a100", "half of the groups"): 5.0,
    ("dle_bert a100", "one group left out"): 10.0,
    ("eager v100 and h100", "one group left out"): 12.0,
    ("neusight nvidia", "one group left out"): 12.0,
    ("neusight others", "one group left out"): 25.0,
    ("torchtitan and nvidia h100", "source left out"): 15.0,
}
#: Steps that are judged together.
_TOGETHER = {
    "eager v100 and h100": ("dle_bert v100", "neusight v100", "neusight h100"),
    "neusight nvidia": ("neusight v100", "neusight a100", "neusight h100", "neusight ada"),
    "torchtitan and nvidia h100": ("torchtitan h100", "torchtitan h100 fp8", "nvidia h100 fp8"),
}


def read_rows() -> list[dict[str, str]]:
    """Published steps: sizes, how they ran, time [s], citation."""
    return read_csv(find_reference("published", "gpu_steps.csv"))


@cache
def find_platform(device: str, ranks: int, bandwidth: str, link: str) -> pk.Platform:
    """A cluster of a device; memory bandwidth and the link between nodes as the source states them
    [B/s]."""
    node = pk.load_platform(NODES.get(device.partition("-")[0], f"{device}-8"))
    found = node
    if device == "gb200":  # one NVLink domain has 72 GPUs
        found = replace(
            node, network=replace(node.network, ranks_per_node=max(ranks, node.network.ranks))
        )
    elif ranks > node.network.ranks:
        found = pk.load_platform(f"{node.name}x{-(-ranks // node.network.ranks)}")
        found = found.with_link("inter", bandwidth=float(link)) if link else found
    found = replace(found, device=read_datasheet(device).device)
    if device == "a100-pcie":
        fit = found.kernels["gemm.fp32"]
        slow = fit.with_values(PCIE, spread=0.129)
        found = replace(found, kernels={**found.kernels, "gemm.fp32": slow})
    *near, main = found.device.memory
    if bandwidth and main.bandwidth:
        main = replace(main, bandwidth=replace(main.bandwidth, value=float(bandwidth)))
    return replace(found, device=replace(found.device, memory=(*near, main)))


def build_workload(row: Row, accumulate: int) -> pk.Transformer:
    """The workload of a row with a given number of micro-batches."""
    given: dict[str, Any] = {name: int(row[name] or 0) for name in (*_SIZES, "sequence")}
    given |= {name: row[name] for name in ("dtype", "attention", "parallel")} | (
        LLAMA if row["inner"] else {}
    )
    given |= {name: row[name] == "yes" for name in ("mixed", "overlap")}
    given |= {"dropout": float(row["dropout"]), "checkpoint": row["checkpoint"] == "full"}
    batch = int(row["micro_batch"]) * int(row["ranks"]) * accumulate
    given |= {
        "fused": row["source"] != "mpt",
        "positions": given["sequence"],
        "accumulate": accumulate,
    }
    return pk.Transformer(row["model"], row["causal"] == "yes", batch, **given)


def list_steps(rows: Sequence[Row]) -> list[Step]:
    """Rows with the parts of their time; micro-batches after the first take what the second one
    adds."""
    steps = []
    for row in rows:
        count, ranks = int(row["accumulate"]), int(row["ranks"])
        platform = find_platform(row["device"], ranks, row["bandwidth"], row["link"])
        about: dict[str, Any] = {
            "ranks": ranks,
            "execution": row["execution"],
            "update": row["timed"] == "step",
        }
        models = [build_workload(row, n) for n in range(1, min(count, 2) + 1)]
        first, *more = (split_step(model, platform, **about) for model in models)
        parts, once = first, row["timed"] == "step"
        for second in more:
            parts = {
                name: once * value + (count - 1) * (second[name] - value)
                for name, value in first.items()
            }
        if row["checkpoint"] == "selective":
            whole = split_step(replace(models[0], checkpoint=True), platform, **about)
            parts = {
                name: value + _SELECTIVE.get(name, 0.0) * (whole[name] - value)
                for name, value in parts.items()
            }
        if row["mixed"] == "master":  # weights in half precision, updated as copies in fp32
            alone = build_workload({**row, "ranks": "1"}, 1)
            narrow, wide = (
                split_step(replace(alone, mixed=mixed), platform) for mixed in (False, True)
            )
            parts["memory"] += wide["update"] - narrow["update"]
        generation = GENERATION.get(row["device"].partition("-")[0], "others")
        text = ",".join(value for name, value in row.items() if name not in ("seconds", "citation"))
        steps.append(Step(row["source"], generation, text, float(row["seconds"]), parts))
    return steps


def _find_format(step: Step) -> str:
    return step.configuration.split(",")[14]


def is_fitted(step: Step) -> bool:
    return step.source in FITTED and _find_format(step) != "fp8"


def _name_group(step: Step) -> str:
    """Model, device and precision of a step."""
    return "/".join((step.source, *step.configuration.split(",")[1:3], _find_format(step)))


def _split(steps: Sequence[Step], how: str) -> Iterator[list[bool]]:
    """Which steps are left out and judged, split by split: half of the groups, or one size, group
    or source."""
    groups = [_name_group(step) for step in steps]
    if how == "half of the groups":
        parts = sorted({step.source + step.generation for step in steps})
        names = [
            sorted({g for g, s in zip(groups, steps, strict=True) if s.source + s.generation == p})
            for p in parts
        ]
        for seed in range(10):
            rng = np.random.default_rng(seed)
            chosen = {
                group
                for own in names
                for group in rng.permutation(own)[: (len(own) + seed % 2) // 2]
            }
            yield [group in chosen for group in groups]
    else:
        part: Callable[[int], str] = {
            "one size left out": lambda n: groups[n].split("/")[2],
            "one group left out": lambda n: groups[n],
            "source left out": lambda n: steps[n].source,
        }[how]
        labels = [part(n) for n in range(len(steps))]
        yield from ([label == other for label in labels] for other in sorted(set(labels)))


def judge_steps(steps: Sequence[Step], how: str) -> list[dict[str, Any]]:
    """Errors of steps that were left out, by source and generation, and the share inside the 80 %
    interval [%]."""
    found: dict[str, list[Row]] = defaultdict(list)
    for judged in _split(steps, how):
        fitted = [s for s, own in zip(steps, judged, strict=True) if not own and is_fitted(s)]
        others = [step for step, own in zip(steps, judged, strict=True) if own]
        priced = predict_steps(others, {**fit_scales(fitted, GENERATIONS), **_OWN})
        for step, time, spread in zip(others, *priced, strict=True):
            name = f"{step.source} {step.generation}" + " fp8" * (_find_format(step) == "fp8")
            found[name].append(widen(time, spread, step.seconds))
    everything = [row for rows in found.values() for row in rows]
    found |= {
        name: [row for part in parts for row in found[part]] for name, parts in _TOGETHER.items()
    }
    found["all"] = everything
    return [
        {"steps": name, "judged": how, **judge(rows), "bar": BARS.get((name, how))}
        for name, rows in sorted(found.items())
    ]


def state_steps(rows: Sequence[Row], scales: Scales) -> list[dict[str, Any]]:
    """Predict steps that were not fitted, one by one [s]."""
    priced = zip(rows, *predict_steps(list_steps(rows), scales), strict=True)
    return [{**row, **widen(time, spread, float(row["seconds"]))} for row, time, spread in priced]


def state_split_steps(like: Row, scales: Scales) -> list[dict[str, Any]]:
    """Predict steps of one micro-batch over tensor or pipeline ranks, without their update; `like`
    says the rest."""
    found = []
    for row in read_csv(find_reference("published", "gpu_split_steps.csv")):
        ranks, batch = int(row["ranks"]), int(row["micro_batch"])
        model = build_workload({**like, "ranks": "1", "micro_batch": row["micro_batch"]}, 1)
        about = {"source": "published steps", "date": "2026-11-25"}
        where = find_platform(row["device"], ranks, "", "")
        where = add_published(where, scales, row["device"].partition("-")[0], **about)
        with keep_quiet():
            step = pk.predict(
                model, where, strategy=pk.Strategy(**{row["way"]: ranks}, micro_batch=batch)
            )
        update = sum(
            seconds for (phase, _), (_, seconds) in step.parts.items() if phase == "update"
        )
        found.append({**row, **widen(step.time - update, step.spread, float(row["seconds"]))})
    return found


def tabulate_scales(scales: Scales) -> str:
    """The fitted scales as the text of a table."""
    return write_csv(
        [
            {
                "class": name,
                "generation": generation,
                "logarithm": f"{value:.4f}",
                "stderr": f"{error:.3f}",
                "configurations": count,
                "kind": "fitted" if count else "assumed",
            }
            for (name, generation), (value, error, count) in scales.items()
        ]
    )


def read_scales() -> Scales:
    """The committed scales, in the form of `benchmarks.helpers.gpu_scales.fit_scales`."""
    return {
        (row["class"], row["generation"]): (
            float(row["logarithm"]),
            float(row["stderr"]),
            int(row["configurations"]),
        )
        for row in read_csv(find_reference("published", "gpu_scales.csv"))
    }


_FIGURES = {"steps": "{steps}", "judged": "{judged}", "n": "{n:.0f}"}
_FIGURES |= {name: f"{{{name}:.1f}}" for name in ("geomean", "mean", "p95", "bias", "inside")} | {
    "bar": "{bar:g}"
}
_STEPS = {
    "device": "{device}",
    "model": "{model}",
    "ranks": "{ranks} {way}",
    "micro-batch": "{micro_batch}",
    "measured": "{measured:time}",
    "predicted (80 %)": "{predicted:time} ({low:time} to {high:time})",
    "error": "{error:+.1%}",
}


@command(WRITE)
def main(given: Any) -> int:
    """Published steps of GPUs, judged by scales fitted to others."""
    rows = read_rows()
    steps = list_steps([row for row in rows if row["source"] != _STATED])
    figures = [
        row for how in dict.fromkeys(how for _, how in BARS) for row in judge_steps(steps, how)
    ]
    print(lay_out(figures, _FIGURES), end="\n\n")
    scales = {**fit_scales([step for step in steps if is_fitted(step)], GENERATIONS), **_OWN}
    stated = state_steps(apart := [row for row in rows if row["source"] == _STATED], scales)
    print(
        lay_out(
            [{"way": "dp", **row} for row in stated] + state_split_steps(apart[0], scales), _STEPS
        )
    )
    if given.write:
        write_text(find_reference("published") / "gpu_scales.csv", tabulate_scales(scales))
    return int(any(row["bar"] and row["mean"] > row["bar"] for row in figures))
