"""Models measured under several placements on this machine, beside what was predicted of each."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.estimates import keep_quiet
from perfkit.gallery import load_platform
from perfkit.measure.folders import Campaign, open_campaign
from perfkit.measure.machine import describe_machine, free_memory, list_versions
from perfkit.measure.runner import check_ranks, run_processes
from perfkit.models.kernels import in_context
from perfkit.platform import Platform
from perfkit.prediction.cost import find_iteration, price
from perfkit.sharding.planner import price_plan
from perfkit.trials.contenders import draw_models, propose_plans
from perfkit.trials.outcome import Trials
from perfkit.units import Array, check_positive, format_bytes
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import dump, load

__all__ = ["forecast_plan", "measure_trials", "predict_again"]


def forecast_plan(model: DLRM, platform: Platform, plan: Plan) -> dict[str, Any]:
    """Predict an iteration as the search does, and the operations inside it as the operation timer should find them.

    Parameters
    ----------
    model : DLRM
        The model.
    platform : Platform
        Where it runs.
    plan : Plan
        Its placement, tables whole on one rank each.

    Returns
    -------
    forecast : dict
        ``predicted_s`` with its 80 % interval ``low_s`` and ``high_s`` [s], and ``predicted_parts``: seconds of
        embeddings and of what is dense, a list by rank, and of each kind of collective [s].
    """
    with keep_quiet():  # how good the prediction is will be measured
        found = price_plan(model, platform, plan)
        time, (low, high) = found.time, found.interval()
        parts: dict[str, Any] = {"embedding": [], "dense": []}
        whole = find_iteration(platform, model.family, plan.ranks)
        scale = whole["scale"] if whole else 1.0  # ranks that share a machine slow each other down in every part
        for graph in model.graphs(plan.ranks, plan, accelerator=platform.device.kind != "cpu"):
            parts = _add_rank(parts, graph, scale * price(graph, platform, dtype=model.dtype).seconds)
        for place in graph.collectives:
            operation = graph[int(place)]
            alone = platform.collective_time(operation.name, operation.features["nbytes"], ranks=plan.ranks)
            fit = platform.context.get(f"collective.{operation.name}")
            sizes = {"hot": np.asarray(alone), "cold": np.asarray(0.0), "page_walks": np.asarray(0.0)}
            inside = scale * float(in_context(sizes, **(fit if fit is not None else {})))
            parts[operation.name] = parts.get(operation.name, 0.0) + inside
    return {"predicted_s": time, "low_s": low, "high_s": high, "predicted_parts": parts}


def _add_rank(parts: Mapping[str, Any], graph: Graph, seconds: Array) -> dict[str, Any]:
    """Append one rank's seconds of embeddings and of everything else but collectives."""
    kinds = np.array([kind for _, kind, *_ in graph.labels])
    embedding = np.char.startswith(kinds, "embedding")
    sums = float(seconds[embedding].sum()), float(seconds[~embedding & (kinds != "collective")].sum())
    return {**parts, **{name: [*parts[name], own] for name, own in zip(("embedding", "dense"), sums, strict=True)}}


def _sum_inside(model: DLRM, plan: Plan, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measured seconds of the same operations; a collective takes what the last rank to come spends in it."""
    parts: dict[str, Any] = {"embedding": [], "dense": []}
    graphs, within = model.graphs(plan.ranks, plan), []
    for graph, run in zip(graphs, runs, strict=True):
        seconds = np.array(run["operation_seconds"])
        if len(seconds) != len(graph):
            raise ValueError(f"an iteration ran {len(seconds)} operations, its graph has {len(graph)}; measure again")
        parts = _add_rank(parts, graph, seconds)
        within.append(seconds[graph.collectives])
    for place, least in zip(graphs[0].collectives, np.min(within, axis=0).tolist(), strict=True):
        name = graphs[0].labels[int(place)][0]
        parts[name] = parts.get(name, 0.0) + least
    return {name: np.round(value, 9).tolist() for name, value in parts.items()}


def measure_trials(
    platform: Platform | str | Path,
    *,
    models: Mapping[str, DLRM] | None = None,
    ranks: int = 2,
    seed: int = 0,
    seconds: float = 1.2,
    quick: bool = False,
    progress: bool = True,
) -> Trials:
    """Measure models under the placements that rules of thumb and the search propose, and compare with predictions.

    Parameters
    ----------
    platform : Platform, str or Path
        A calibration of this machine.
    models : mapping of str to DLRM, optional
        What to measure, by name; by default 12 of `draw_models`.
    ranks : int, optional
        Processes, one on each core or GPU [-].
    seed : int, optional
        Seed of models, random placements and data [-].
    seconds : float, optional
        Time for each placement and pass; there are two passes [s].
    quick : bool, optional
        Two models and a third of the time, to see that everything works.
    progress : bool, optional
        Whether to show a progress bar.

    Returns
    -------
    trials : Trials
        Predicted and measured times.

    Raises
    ------
    ValueError
        For more ranks than cores, and what `perfkit.shard` refuses.
    MeasurementError
        If a measuring process fails; what was finished is kept and a rerun continues.

    Notes
    -----
    One process a rank holds all placements of a model and takes turns among them; after all models have been measured
    once, new processes measure them again: how far these two differ is the repeatability of the study. A placement that
    several methods propose is measured once.
    """
    where = load_platform(platform)
    check_ranks(check_positive("ranks", ranks, integer=True), where.device.kind)
    machine = describe_machine()
    if (known := where.provenance.get("processor")) != machine["processor"]:
        text = f"{where.name} is of {known or where.device.name}, this machine is {machine['processor']}"
        warnings.warn(f"{text}; calibrate first for predictions that mean something", stacklevel=2)
    chosen = dict(models) if models is not None else draw_models(2 if quick else 12, seed=seed)
    plans = {name: propose_plans(model, where, ranks=ranks, seed=seed) for name, model in chosen.items()}
    single = {name: list(dict.fromkeys(own.values())) for name, own in plans.items()}
    for name, model in chosen.items():
        _check_memory(name, model, len(single[name]))
    settings = {"seconds": seconds / 3 if quick else seconds, "operations": 2 if quick else 3, "seed": seed}
    options = [(name, dump(model), [plan.owners for plan in single[name]]) for name, model in chosen.items()]
    campaign = open_campaign("placements", options, settings, ranks, where.device.kind, progress=progress)
    passes = _measure(campaign, chosen, single, settings, where.device.kind, ranks)
    entries = []
    for name, model in chosen.items():
        rows = [
            {"methods": [method for method, other in plans[name].items() if other == plan], "owners": list(plan.owners),
             **forecast_plan(model, where, plan), **_summarize(model, plan, [own[name][place] for own in passes])}
            for place, plan in enumerate(single[name])
        ]  # fmt: skip
        entries.append({"name": name, "workload": dump(model), "placements": rows})
    campaign.close()  # the next call measures anew
    return Trials(tuple(entries), where.name, ranks, date.today().isoformat(), settings, machine, list_versions())


def _check_memory(name: str, model: DLRM, placements: int) -> None:
    """Turn away a model whose placements do not all fit into the memory of a CPU's ranks together."""
    sizes = (1 if model.sparse else 2) * sum(table.nbytes for table in model.tables)
    batches = 8 * sum(8 * model.batch * (table.pooling + 1) for table in model.tables)
    free, _ = free_memory()
    if free and placements * (sizes + batches) > 0.8 * free:
        raise ValueError(
            f"{name} needs {format_bytes(placements * (sizes + batches))} for all of its {placements} placements; "
            f"{format_bytes(free)} are free; take smaller tables or batches"
        )


def _measure(
    campaign: Campaign,
    models: Mapping[str, DLRM],
    plans: Mapping[str, Sequence[Plan]],
    settings: Mapping[str, Any],
    device: str,
    ranks: int,
) -> list[dict[str, Any]]:
    """Measure all models twice; gives for each pass and model a list by placement of lists by rank."""
    jobs = {}
    for number in range(2):
        for name, model in models.items():
            job = {"task": "placements", "workload": dump(model), "device": device, **settings}
            job["placements"] = [list(plan.owners) for plan in plans[name]]
            jobs[f"{number}-{name}"] = lambda job=job: run_processes(job, ranks=ranks)
    found = campaign.run("placements", jobs)
    by_placement = {key: list(zip(*by_rank, strict=True)) for key, by_rank in found.items()}
    return [{name: by_placement[f"{number}-{name}"] for name in models} for number in range(2)]


def _summarize(model: DLRM, plan: Plan, passes: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What is kept of two passes: the slowest rank's times, and the operations of all ranks."""
    slowest = [max(runs, key=lambda run: run["median"]) for runs in passes]
    kept: dict[str, Any] = {
        new: [run[old] for run in slowest]
        for new, old in (("measured_s", "median"), ("q1_s", "q1"), ("q3_s", "q3"), ("rounds_s", "rounds"), ("n", "n"))
    }
    return {**kept, "measured_parts": [_sum_inside(model, plan, runs) for runs in passes]}


def predict_again(trials: Trials, platform: Platform | str | Path) -> Trials:
    """Put the predictions of a platform beside times that were measured before.

    Parameters
    ----------
    trials : Trials
        What was measured.
    platform : Platform, str or Path
        What predicts; it should be of the machine that was measured.

    Returns
    -------
    trials : Trials
        The same placements and measured times with other predictions.
    """
    where = load_platform(platform)
    entries = []
    for entry in trials.models:
        model: Any = load(entry["workload"])
        rows = [
            {**row, **forecast_plan(model, where, Plan.from_owners(row["owners"], ranks=trials.ranks))}
            for row in entry["placements"]
        ]
        entries.append({**entry, "placements": rows})
    return replace(trials, models=tuple(entries), platform=where.name)
