"""Ranks that wait for each other: lopsided placements and stragglers, first predicted, then
measured on two ranks.

    python -m benchmarks.imbalance --platform P.toml [--seed S] [--json OUT]
    python -m benchmarks.imbalance --saved reference_data/measured/zen3-2.imbalance-*.json

A straggler is slowed down by a factor: before each collective it spins until the work since the
last one has taken that many times as long. The waiting of a rank is how much earlier than the last
rank it reaches each collective; if collectives overlap with computation, it is how much longer the
rank is idle than the busiest rank.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import OUT, PLATFORM, SAVED, command
from benchmarks.helpers.files import save_rows
from benchmarks.helpers.tables import Row, lay_out
from perfkit.measure.processes import run_processes
from perfkit.measure.records import write_record
from perfkit.measure.samples import draw_check, dump, load
from perfkit.platform.estimates import keep_quiet

_RANKS = 2


@dataclass(frozen=True)
class Case:
    """One iteration whose ranks may differ: owners of tables, and slowdown by rank [-]."""

    name: str
    workload: pk.DLRM | pk.Transformer
    owners: tuple[int, ...] | None
    slowdown: Mapping[int, float]


#: Slowdowns of a rank of a Transformer, by the name of the case [-].
_STRAGGLERS: Mapping[str, Mapping[int, float]] = {
    "even": {},
    "straggler 1.5": {1: 1.5},
    "straggler 2.5": {0: 2.5},
}


def _list_dlrm_cases(number: int, model: pk.DLRM) -> list[Case]:
    """Even tables, nearly all tables on one rank, and stragglers with even tables."""
    tables = len(model.tables)
    even = tuple(table % _RANKS for table in range(tables))
    lopsided = tuple(1 if table == tables - 1 else 0 for table in range(tables))
    return [
        Case(f"dlrm-{number} even", model, even, {}),
        Case(f"dlrm-{number} lopsided", model, lopsided, {}),
        Case(f"dlrm-{number} straggler 1.5", model, even, {1: 1.5}),
        Case(f"dlrm-{number} straggler 2.5", model, even, {0: 2.5}),
    ]


def _list_transformer_cases(number: int, drawn: pk.Transformer) -> list[Case]:
    """Equal ranks and stragglers, with and without overlap."""
    batch = drawn.batch + drawn.batch % _RANKS
    cases = []
    for overlap in (False, True):
        model = replace(drawn, batch=batch, overlap=overlap)
        title = f"transformer-{number} ddp" if overlap else f"transformer-{number}"
        for name, slowdown in _STRAGGLERS.items():
            cases.append(Case(f"{title} {name}", model, None, slowdown))
    return cases


def draw_cases(seed: int, models: int = 3) -> list[Case]:
    """DLRMs with even tables, nearly all on one rank, or a straggler; Transformers with and without
    one and overlap."""
    samples = draw_check(seed, dlrm=0, transformer=models, hybrid=models)
    workloads = [sample.workload for sample in samples]
    dlrms = [model for model in workloads if isinstance(model, pk.DLRM)]
    transformers = [model for model in workloads if isinstance(model, pk.Transformer)]
    cases = []
    for number, dlrm in enumerate(dlrms):
        cases += _list_dlrm_cases(number, dlrm)
    for number, transformer in enumerate(transformers):
        cases += _list_transformer_cases(number, transformer)
    return cases


def predict_case(case: Case, platform: pk.Platform) -> dict[str, float]:
    """Predicted iteration, and waiting summed over ranks [s]."""
    plan = None if case.owners is None else pk.Plan.from_owners(case.owners, ranks=_RANKS)
    with keep_quiet():
        found = pk.predict(case.workload, platform, ranks=_RANKS, plan=plan, slowdown=case.slowdown)
    frame = found.communication()
    return {
        "predicted_s": found.time,
        "predicted_waiting_s": float((frame["waiting_s"] * frame["ranks"]).sum()),
    }


def measure_cases(cases: Sequence[Case], *, seconds: float) -> Iterator[dict[str, float]]:
    """Measured iteration and waiting of cases of one workload, timed in alternation [s]."""
    model = cases[0].workload
    ranks = range(_RANKS)
    placed = [(case.owners, [case.slowdown.get(rank, 1.0) for rank in ranks]) for case in cases]
    job = {
        "task": "benchmarks.imbalance:time_stragglers",
        "workload": dump(model),
        "cases": placed,
        "seconds": seconds,
    }
    for runs in zip(*run_processes(job, ranks=_RANKS), strict=True):
        waiting = _sum_idle(runs) if model.overlap else _sum_lateness(runs)
        yield {
            "measured_s": max(run["median"] for run in runs),
            "measured_waiting_s": waiting,
            "disagreement": max(max(run["halves"]) / min(run["halves"]) - 1 for run in runs),
        }


class Pacer:
    """Wraps a training step on a CPU: notes when the rank reaches its collectives, and slows the
    rank down.

    The collectives are those of `torch.distributed`, or of `DistributedDataParallel` inside
    `module`. Before each one, and at the end, the rank spins until its thread has used `factor`
    times the processor time since the last one. Time of a collective or of another process on the
    core does not count.
    """

    def __init__(self, step: Callable[[], Any], module: Any, factor: float = 1.0) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.nn.parallel import DistributedDataParallel

        self.step, self.factor = step, factor
        self.since = 0.0
        self.arrivals: list[list[float]] = []
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                part.register_comm_hook(None, allreduce_hook)  # as without a hook, but visible here

    def __call__(self) -> None:
        """Run the step; note when the rank reaches each collective, on a clock that all processes
        share [s]."""
        import torch.distributed as dist

        calls = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}
        arrivals: list[float] = []
        for name, call in calls.items():
            setattr(dist, name, self._meet(call, arrivals))
        self.since = time.thread_time()
        try:
            self.step()
            self._hold()
        finally:
            for name, call in calls.items():
                setattr(dist, name, call)
        self.arrivals.append(arrivals)

    def _meet(self, call: Callable[..., Any], arrivals: list[float]) -> Callable[..., Any]:
        def meet(*args: Any, **kwargs: Any) -> Any:
            self._hold()
            arrivals.append(time.perf_counter())
            out = call(*args, **kwargs)
            self.since = time.thread_time()
            return out

        return meet

    def _hold(self) -> None:
        end = self.since + self.factor * (time.thread_time() - self.since)
        while time.thread_time() < end:
            pass


def time_stragglers(
    *,
    workload: dict[str, Any],
    cases: Sequence[tuple[Sequence[int] | None, Sequence[float]]],
    seconds: float,
) -> list[dict[str, Any]]:
    """Task of a measuring process: iterations in alternation, by owners of tables and slowdown of
    each rank."""
    import torch.distributed as dist

    from perfkit.measure.iterations import build_step, time_in_turns

    steps, rank = [], dist.get_rank()
    for owners, slowdown in cases:
        plan = None if owners is None else pk.Plan.from_owners(owners, ranks=_RANKS)
        steps.append(
            Pacer(*build_step(load(workload), plan=plan, rank=rank, ranks=_RANKS), slowdown[rank])
        )
    timed = {step: list[list[float]]() for step in steps}

    def keep(count: int) -> None:
        """Keep the timed iterations of the step that has just run; the earlier ones are a
        warm-up."""
        ran = max(steps, key=lambda step: step.since)
        timed[ran] += ran.arrivals[-count:]

    results = time_in_turns(steps, seconds=seconds, after=keep)
    return [
        {**write_record(result), "arrivals": timed[step]}
        for result, step in zip(results, steps, strict=True)
    ]


_COLUMNS = {
    "case": "{case}",
    "predicted": "{predicted_s:time}",
    "measured": "{measured_s:time}",
    "error": "{error:+.1%}",
    "waiting": "{predicted_waiting_s:time}",
    "waited": "{measured_waiting_s:time}",
    "off": "{waiting_error:+.1%}",
}


def _sum_idle(runs: Sequence[Row]) -> float:
    """How much longer ranks are idle than the busiest one, summed over ranks [s]."""
    idle = np.array([run["idle"] for run in runs])
    return float((idle - idle.min()).sum())


def _sum_lateness(runs: Sequence[Row]) -> float:
    """How long ranks wait for the last one at each collective, summed over ranks [s]."""
    arrivals = np.array([run["arrivals"] for run in runs])
    usual = np.median(arrivals - arrivals.mean(axis=0), axis=1)
    return float((usual.max(0) - usual).sum())


def _summarize(rows: Sequence[Row]) -> str:
    uneven = [row for row in rows if not row["case"].endswith("even")]
    errors = np.abs([row["error"] for row in uneven])
    waiting = np.abs([row["waiting_error"] for row in uneven])
    return f"where ranks differ: iteration {errors.mean():.1%} mean, waiting {waiting.mean():.1%} mean; bar 15 %"


def _read_saved(files: Sequence[Path]) -> list[Row]:
    """Rows of earlier runs."""
    rows = list[Row]()
    for file in files:
        rows += json.loads(file.read_text(encoding="utf-8"))["records"]
    return rows


def _compare(predicted: Row, measured: Row) -> dict[str, Any]:
    """Predicted and measured figures of a case, and errors; small waiting is judged relative to the
    iteration."""
    least = max(measured["measured_waiting_s"], 0.05 * measured["measured_s"])
    waiting = predicted["predicted_waiting_s"] - measured["measured_waiting_s"]
    return {
        **predicted,
        **measured,
        "error": predicted["predicted_s"] / measured["measured_s"] - 1,
        "waiting_error": waiting / least,
    }


@command(
    {
        **PLATFORM,
        **SAVED,
        "--seed": {"type": int, "default": 11, "help": "seed of the models"},
        "--models": {"type": int, "default": 3, "help": "DLRMs, and as many Transformers"},
        "--seconds": {"type": float, "default": 3.0, "help": "time for each case"},
        **OUT,
    }
)
def main(given: Any) -> None:
    """Waiting of ranks for one another."""
    if given.saved:
        print(_summarize(_read_saved(given.saved)))
        return
    platform = pk.load_platform(given.platform)
    cases = draw_cases(given.seed, given.models)
    rows: list[dict[str, Any]] = [
        {"case": case.name, **predict_case(case, platform)} for case in cases
    ]
    for model in dict.fromkeys(case.workload for case in cases):
        places = [place for place, case in enumerate(cases) if case.workload == model]
        together = [cases[place] for place in places]
        measured = measure_cases(together, seconds=given.seconds)
        for place, figures in zip(places, measured, strict=True):
            rows[place] = _compare(rows[place], figures)
    print(lay_out(rows, _COLUMNS), _summarize(rows), sep="\n")
    save_rows(given.json, rows, platform=platform.name, seed=given.seed)
