"""The placement study: measure models under several placements on this machine, and compare with
predictions."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars
from polars import col

from perfkit.calibration.checks import Comparison, compare_run
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import check_positive, format_bytes, format_table, format_time
from perfkit.measure.folders import open_campaign
from perfkit.measure.machine import describe_machine, gather_facts, list_versions
from perfkit.measure.processes import check_processors, run_processes
from perfkit.measure.records import read_measured_ranks
from perfkit.measure.samples import Sample, dump
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.sharding.planner import BASELINES, price_plan, shard
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.placement_kinds import KINDS, WHOLE
from perfkit.workloads.tables import TableSet, draw_tables, list_formats

#: Methods that propose placements: every rule of thumb, a second random placement, and the search.
METHODS = (*BASELINES, "random 2", "search")
#: Most weights of a model with sparse and with dense gradients; every placement needs its own
#: memory [B].
_LARGEST = {True: 3e8, False: 1e8}


def draw_models(n: int, *, seed: int = 0) -> dict[str, DLRM]:
    """Draw recommendation models with tables as in `draw_tables`, small enough for one machine.

    A model has 8 to 16 tables of 10³ to 10⁶ rows with 32, 64 or 128 columns, a batch of 256 to
    2,048, and one to three layers of 64 to 512 below and above the interaction. Pooling and Zipf
    exponents are those of `draw_tables`; rows and pooling correlate by -0.7 to 0.7. Every fourth
    model has dense gradients. Weights have at most 300 MB, 100 MB with dense gradients.

    Parameters
    ----------
    n : int
        Number of models [-].
    seed : int, optional
        Seed [-].

    Returns
    -------
    models : dict of str to DLRM
        The models, by name.

    Examples
    --------
    >>> draw_models(2)["model 1"].description
    'dlrm, batch 588, 11 tables × 128, sparse gradients'
    """
    check_positive("seed", seed, integer=True, zero=True)
    models = {}
    for number in range(int(check_positive("n", n, integer=True, maximum=10_000))):
        rng = np.random.default_rng([5, seed, number])
        sparse = number % 4 != 3
        dim = int(rng.choice((32, 64, 128)))
        correlation = float(rng.uniform(-0.7, 0.7))
        while True:
            tables = draw_tables(
                int(rng.integers(8, 17)), seed=int(rng.integers(2**31)), correlation=correlation
            )
            rows = [_shrink(table.rows) for table in tables]
            if 4 * dim * sum(rows) <= _LARGEST[sparse]:
                break
        bottom = _draw_widths(rng)
        top = _draw_widths(rng)
        models[f"model {number}"] = DLRM(
            rows=rows,
            dim=dim,
            pooling=[t.pooling for t in tables],
            exponent=[t.exponent for t in tables],
            sparse=sparse,
            batch=int(256 * 8 ** rng.uniform()) // 2 * 2,
            bottom=bottom,
            top=top,
            features=13,
        )
    return models


def _shrink(rows: float) -> int:
    """Rows of a table between 10³ and 10⁶, where those of `draw_tables` reach 10⁷ [-]."""
    return round(10 ** (3 + 0.75 * (np.log10(rows) - 3)))


def _draw_widths(rng: np.random.Generator) -> list[int]:
    """Draw the widths of up to three layers [-]."""
    count = rng.integers(1, 4)
    return [int(64 * 8 ** rng.uniform()) // 8 * 8 for _ in range(count)]


def make_model(tables: TableSet) -> DLRM:
    """Make a DLRM of bare tables, with a small dense part, so that it can be measured.

    Parameters
    ----------
    tables : TableSet
        Tables of one width.

    Returns
    -------
    model : DLRM
        With one layer of 64 below and one above the interaction.

    Raises
    ------
    ValueError
        For tables of several widths, or without a Zipf exponent.
    """
    dims = sorted({table.dim for table in tables})
    laws = sum(table.law is not None for table in tables)
    formats = list_formats(tables.tables)
    is_measured = len(dims) == 1 and not laws and formats == ["fp32"]
    if not is_measured or tables.embedding != "separate" or tables.optimizer != "sgd":
        raise ValueError(
            f"dim is {dims}, law of {laws} is given, dtype is {' and '.join(formats)}, "
            f"embedding {tables.embedding!r}, optimizer {tables.optimizer!r}; "
            "only separate fp32 tables of one dim with Zipf exponents and sgd are measured; "
            "predict others"
        )
    return DLRM(
        rows=[table.rows for table in tables],
        dim=dims[0],
        pooling=[table.pooling for table in tables],
        exponent=[table.exponent for table in tables],
        batch=tables.batch,
        sparse=tables.sparse,
        bottom=(64,),
        top=(64,),
        features=13,
    )


def propose_plans(
    model: DLRM, platform: Platform, *, ranks: int = 2, seed: int = 0
) -> dict[str, Plan]:
    """Propose the placements of a model to measure, each table whole on one rank.

    Parameters
    ----------
    model : DLRM
        The model.
    platform : Platform
        Predicts the placements.
    ranks : int, optional
        Ranks [-].
    seed : int, optional
        Seed [-].

    Returns
    -------
    plans : dict of str to Plan
        By method, see `METHODS`. Ranks are equal, so they are numbered in the order in which they
        get tables.
    """
    whole: dict[str, Any] = {
        "ranks": ranks,
        "forbid": [kind for kind in KINDS if kind != WHOLE.name],
    }
    with keep_quiet():  # no warnings about predictions that will be measured
        best = shard(model, platform, seconds=0.5, seed=seed, **whole)
        other = shard(model, platform, seconds=1e-3, seed=seed + 1, **whole)
    priced = {**best.baselines, "random 2": other.baselines["random"], "search": best.prediction}
    plans = {}
    for name in METHODS:
        price = priced[name]
        if price:
            plans[name] = _number_ranks(price.plan)
    return plans


def _number_ranks(plan: Plan) -> Plan:
    """The placement with ranks numbered in the order in which they get tables."""
    order = list(dict.fromkeys(plan.owners))
    return Plan(plan.ranks, tuple(order.index(owner) for owner in plan.owners))


def measure_trials(
    platform: Platform | str | Path,
    *,
    models: Mapping[str, DLRM] | None = None,
    ranks: int = 2,
    seed: int = 0,
    seconds: float = 1.2,
    quick: bool = False,
    progress: bool = True,
) -> "Trials":
    """Measure models under the placements of rules of thumb and of the search, and compare with
    predictions.

    Parameters
    ----------
    platform : Platform, str or Path
        A calibration of this machine.
    models : mapping of str to DLRM, optional
        Models to measure, by name; by default 12 of `draw_models`.
    ranks : int, optional
        Processes, one per core or GPU [-].
    seed : int, optional
        Seed of models, random placements and data [-].
    seconds : float, optional
        Time for each placement and pass; there are two passes [s].
    quick : bool, optional
        Whether to take two models and a third of the time, as a test.
    progress : bool, optional
        Whether to show a progress bar.

    Returns
    -------
    trials : Trials
        Predicted and measured times.

    Raises
    ------
    ValueError
        For more ranks than cores, and for arguments that `perfkit.shard` refuses.
    MeasurementError
        If a measuring process fails; finished measurements are kept and a rerun continues.

    Notes
    -----
    One process per rank holds all placements of a model and runs them in rotation. After the first
    pass over all models, new processes measure them again; the difference of the two passes is the
    repeatability of the study. A placement that several methods propose is measured once.
    """
    where = load_platform(platform)
    check_processors(check_positive("ranks", ranks, integer=True), where.device.kind)
    machine, known = describe_machine(), where.provenance.get("processor")
    if known != machine["processor"]:
        text = f"{where.name} was measured on {known or where.device.name}, this machine is {machine['processor']}"
        warnings.warn(f"{text}; calibrate this machine first", stacklevel=2)
    if models is None:
        models = draw_models(2 if quick else 12, seed=seed)
    jobs: dict[str, dict[str, Any]] = {}
    methods: dict[str, dict[Plan, list[str]]] = {}
    for name, model in models.items():
        methods_by_plan: dict[Plan, list[str]] = {}
        for method, plan in propose_plans(model, where, ranks=ranks, seed=seed).items():
            methods_by_plan.setdefault(plan, []).append(method)
        _check_memory(name, model, len(methods_by_plan))
        methods[name] = methods_by_plan
        jobs[name] = {
            "task": "placements",
            "workload": dump(model),
            "placements": [list(plan.owners) for plan in methods_by_plan],
            "seconds": seconds / 3 if quick else seconds,
            "seed": seed,
            "device": where.device.kind,
        }
    campaign = open_campaign("placements", jobs, ranks, progress=progress)
    turns = {}
    for turn in (0, 1):
        for name, job in jobs.items():
            turns[f"{turn}-{name}"] = partial(run_processes, job, ranks=ranks)
    results = campaign.run("placements", turns)
    runs = []
    for name, model in models.items():
        for position, (plan, proposed) in enumerate(methods[name].items()):
            passes = []
            for turn in (0, 1):
                rows = [rank[position] for rank in results[f"{turn}-{name}"]]
                passes.append(read_measured_ranks(rows, f"{turn}-{name}"))
            with keep_quiet():  # no warnings about predictions that were measured
                price = price_plan(model, where, plan)
            sample = Sample(f"{name}: {', '.join(proposed)}", name, model, plan)
            runs.append({**compare_run(sample, price, passes, {}), "methods": proposed})
    campaign.close()  # the next call measures anew
    return Trials(tuple(runs), where.name, machine, list_versions())


def _check_memory(name: str, model: DLRM, placements: int) -> None:
    """Refuse a model if all its placements together need more than the free memory."""
    free = gather_facts()["free_memory"].value
    weights = sum(table.nbytes for table in model.tables)
    if not model.sparse:
        weights *= 2  # dense gradients need the same memory again
    batches = 64 * model.batch * sum(table.pooling + 1 for table in model.tables)
    needed = placements * (weights + batches)
    if free and needed > 0.8 * free:
        raise ValueError(
            f"{name} needs {format_bytes(needed)} for all its {placements} placements; "
            f"{format_bytes(free)} are free; take smaller tables or batches"
        )


@dataclass(frozen=True, repr=False)
class Trials(Comparison):
    """Predicted and measured times of models under several placements; the families of the runs are
    the models.

    Notes
    -----
    The regret of a choice is its extra time over the fastest measured placement of the model. The
    time of a placement is the mean of the medians of its passes. `floor` is the regret of a choice
    by one pass, judged by the other pass. It says how noisy a pass is. It is no bound for a
    prediction, whose regret is judged by the mean of both passes.
    """

    report_title = "Predicted and measured times of models under several placements"

    def regrets(self) -> Table:
        """Regrets, one row per model.

        Returns
        -------
        frame : polars.DataFrame
            model, placements: number of different ones [-], best_s [s], worst: slowest over fastest
            time [-], rank_correlation of predicted and measured times [-], hit: whether the
            predicted best is the fastest, hit_repeat: whether both passes have the same best, floor
            [-], repeat: mean difference of the passes [-], rank_repeat: rank correlation between
            the passes [-], predicted: regret of the predicted best [-], and the regret of every
            method by its name [-].
        """
        check_threads()

        def judge(pick: str, times: str) -> polars.Expr:
            return col(times).get(col(pick).arg_min()) / col(times).min() - 1

        first_pass, second_pass = self._split_passes()
        runs = polars.DataFrame(
            {
                "model": [run["family"] for run in self.runs],
                "methods": [run["methods"] for run in self.runs],
                "predicted_s": [run["predicted_s"] for run in self.runs],
                "measured_s": [run["measured_s"] for run in self.runs],
                "one": first_pass,
                "other": second_pass,
            }
        )

        def correlate_ranks(times: str, others: str) -> polars.Expr:
            return polars.corr(times, others, method="spearman").fill_nan(None)

        time, least = col("measured_s"), col("measured_s").min()
        slower = polars.max_horizontal("one", "other")
        faster = polars.min_horizontal("one", "other")
        regret_of_predicted = judge("predicted_s", "measured_s")
        frame = runs.group_by("model", maintain_order=True).agg(
            placements=polars.len(),
            best_s=least,
            worst=time.max() / least,
            rank_correlation=correlate_ranks("predicted_s", "measured_s"),
            hit=regret_of_predicted == 0,
            hit_repeat=col("one").arg_min() == col("other").arg_min(),
            floor=(judge("one", "other") + judge("other", "one")) / 2,
            repeat=(slower / faster - 1).mean(),
            rank_repeat=correlate_ranks("one", "other"),
            predicted=regret_of_predicted,
        )
        regrets = runs.with_columns(regret=(time / least - 1).over("model")).explode("methods")
        by_method = regrets.pivot("methods", index="model", values="regret")
        return frame.join(by_method, on="model", how="left")

    def _split_passes(self) -> tuple[list[float], list[float]]:
        """Times of all runs in the first pass, and in the second [s]."""
        first_pass, second_pass = [], []
        for i, run in enumerate(self.runs):
            passes = run["passes_s"]
            if len(passes) != 2:
                raise ValueError(
                    f"runs[{i}].passes_s holds {len(passes)} times; it must hold 2, one of each pass"
                )
            one, other = passes
            first_pass.append(one)
            second_pass.append(other)
        return first_pass, second_pass

    def totals(self) -> dict[str, Any]:
        """Summarize all models.

        Returns
        -------
        figures : dict
            models, placements [-]; regret: mean by method, with ``predicted``, and ``random`` as
            the mean of both random placements [-]; worst_regret: the maximum instead of the mean
            [-]; best_baseline; excess and excess_error: mean regret of the predicted best minus
            that of the best baseline, and its standard error over models [-]; floor, repeat [-];
            hits, hits_repeat: share of models with a hit [-]; rank_correlation, rank_repeat [-].
        """
        check_threads()
        frame = self.regrets()
        methods = [name for name in METHODS if name in frame.columns]
        both_random = polars.mean_horizontal("random", "random 2")
        regrets = frame.select("predicted", *methods)
        regrets = regrets.with_columns(random=both_random).drop("random 2")
        mean = regrets.mean().row(0, named=True)
        rules = [name for name in mean if name not in ("predicted", "search")]
        best = min(rules, key=lambda name: mean[name])
        excess: Any = regrets["predicted"] - regrets[best]
        deviation = excess.std()  # None for a single model
        columns = ("floor", "repeat", "rank_correlation", "rank_repeat")
        averages = frame.select(*columns, hits="hit", hits_repeat="hit_repeat").mean()
        return {
            "models": len(frame),
            "placements": len(self.runs),
            "regret": mean,
            "worst_regret": regrets.max().row(0, named=True),
            **averages.row(0, named=True),
            "best_baseline": best,
            "excess": excess.mean(),
            "excess_error": None if deviation is None else deviation / len(frame) ** 0.5,
        }

    def as_text(self) -> str:
        """Models and totals as text.

        Returns
        -------
        text : str
            Several lines.
        """
        rows = [
            ("model", "placements", "best", "regret", "floor", "rank correlation", "between passes")
        ]
        for row in self.regrets().iter_rows(named=True):
            rows.append(
                (
                    row["model"],
                    str(row["placements"]),
                    format_time(row["best_s"]),
                    f"{row['predicted']:.1%}",
                    f"{row['floor']:.1%}",
                    _write_correlation(row["rank_correlation"]),
                    _write_correlation(row["rank_repeat"]),
                )
            )
        found = self.totals()
        regret, worst = found["regret"], found["worst_regret"]
        rules = sorted((name for name in regret if name != "predicted"), key=regret.get)
        mean_regrets = ", ".join(f"{name} {regret[name]:.1%}" for name in rules)
        excess = f"{found['excess']:+.1%}"
        if found["excess_error"] is not None:
            excess += f" ± {found['excess_error']:.1%}"
        lines = [
            format_table(rows, numbers=True),
            "",
            f"{found['placements']} placements of {found['models']} models",
            f"regret of the predicted best: {regret['predicted']:.1%} mean, "
            f"{worst['predicted']:.1%} at most; "
            f"of a choice by one pass, judged by the other: {found['floor']:.1%}",
            f"mean regrets: {mean_regrets}",
            f"predicted best minus best rule of thumb, {found['best_baseline']}: {excess}",
            f"the predicted best is the fastest in {found['hits']:.0%} of the models "
            f"(passes agree in {found['hits_repeat']:.0%}), "
            f"rank correlation {found['rank_correlation']:.2f} "
            f"(between passes {found['rank_repeat']:.2f}), "
            f"passes differ by {found['repeat']:.1%}",
        ]
        return "\n".join(lines)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        found, ranks = self.totals(), self.runs[0]["ranks"]
        return (
            f"{found['placements']} placements of {found['models']} models on {ranks} ranks of "
            f"{self.platform}: regret {found['regret']['predicted']:.1%}, "
            f"best rule of thumb {found['best_baseline']}"
        )

    def __repr__(self) -> str:
        return self.headline()


def _write_correlation(value: float | None) -> str:
    """A correlation with two digits; empty if there is none."""
    return "" if value is None else f"{value:.2f}"
