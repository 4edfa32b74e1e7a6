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


def draw_cases(seed: int, models: int = 3) -> list[Case]:
    """DLRMs with even tables, nearly all on one rank, or a straggler; Transformers with and without
    one and overlap."""
    cases, none = [], dict[int, float]()
    workloads = [
        sample.workload for sample in draw_check(seed, dlrm=0, transformer=models, hybrid=models)
    ]
    for number, dlrm in enumerate(w for w in workloads if isinstance(w, pk.DLRM)):
        even = tuple(table % _RANKS for table in range(len(dlrm.tables)))
        lopsided = (0,) * (len(even) - 1) + (1,)
        for what, owners, slowdown in (
            ("even", even, none),
            ("lopsided", lopsided, none),
            ("straggler 1.5", even, {1: 1.5}),
            ("straggler 2.5", even, {0: 2.5}),
        ):
            cases.append(Case(f"dlrm-{number} {what}", dlrm, owners, slowdown))
    for number, one in enumerate(w for w in workloads if isinstance(w, pk.Transformer)):
        for overlap in (False, True):
            model = replace(one, batch=one.batch + one.batch % _RANKS, overlap=overlap)
            for what, slowdown in {
                "even": none,
                "straggler 1.5": {1: 1.5},
                "straggler 2.5": {0: 2.5},
            }.items():
                cases.append(
                    Case(f"transformer-{number}{' ddp' * overlap} {what}", model, None, slowdown)
                )
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
    job = {
        "task": "benchmarks.imbalance:time_stragglers",
        "workload": dump(model),
        "cases": [
            (case.owners, [case.slowdown.get(rank, 1.0) for rank in range(_RANKS)])
            for case in cases
        ],
        "seconds": seconds,
    }
    for runs in zip(*run_processes(job, ranks=_RANKS), strict=True):
        arrivals = np.array([run["arrivals"] for run in runs])
        usual = np.median(arrivals - arrivals.mean(axis=0), axis=1)
        idle = np.array([run["idle"] for run in runs])
        yield {
            "measured_s": max(run["median"] for run in runs),
            "measured_waiting_s": float(
                (idle - idle.min()).sum() if model.overlap else (usual.max(0) - usual).sum()
            ),
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


def _summarize(rows: Sequence[Row]) -> str:
    uneven = [row for row in rows if not row["case"].endswith("even")]
    errors, waiting = (np.abs([row[key] for row in uneven]) for key in ("error", "waiting_error"))
    return f"where ranks differ: iteration {errors.mean():.1%} mean, waiting {waiting.mean():.1%} mean; bar 15 %"


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
        files = [json.loads(file.read_text(encoding="utf-8")) for file in given.saved]
        return print(_summarize([row for file in files for row in file["records"]]))
    platform, cases = pk.load_platform(given.platform), draw_cases(given.seed, given.models)
    rows: list[dict[str, Any]] = [
        {"case": case.name, **predict_case(case, platform)} for case in cases
    ]
    for model in dict.fromkeys(case.workload for case in cases):
        own = [i for i, case in enumerate(cases) if case.workload == model]
        for i, found in zip(
            own, measure_cases([cases[i] for i in own], seconds=given.seconds), strict=True
        ):
            # Small waiting is judged relative to the iteration.
            least = max(found["measured_waiting_s"], 0.05 * found["measured_s"])
            waiting = rows[i]["predicted_waiting_s"] - found["measured_waiting_s"]
            error = rows[i]["predicted_s"] / found["measured_s"] - 1
            rows[i] |= {**found, "error": error, "waiting_error": waiting / least}
    print(lay_out(rows, _COLUMNS), _summarize(rows), sep="\n")
    save_rows(given.json, rows, platform=platform.name, seed=given.seed)
