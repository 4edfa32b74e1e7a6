"""What would help most: gains that a trace tells, beside those of the event loop with the change
made.

    python -m benchmarks.fixes [--seed S] [--count N]

Iterations are drawn: models, ways to share them, platforms, speeds of hosts and links, slow ranks,
loops that wait or load. The event loop runs a few steps of each with noise, which are written as
traces of PyTorch's profiler and read again; `fixes()` sees nothing else. What is true is the time
of the event loop without noise, with the change made: another setting, no slow rank, twice the
batch, other execution, links or loops. Seeds below 100 were looked at while the assumptions of
`perfkit.calibration.fix_changes` were chosen, 1000 to 1039 in a first judgement, which found faults
of the written traces. Those from 2000 on judge.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.tables import Row, lay_out
from benchmarks.helpers.written_traces import Loop, time_loop, write_traces
from perfkit.platform.estimates import keep_quiet

#: Gains that differ by less than this share of an iteration are equal [-]: a choice; half the width
#: of an 80 % interval of the mean step of a drawn trace is 0.3 % in median, and 1.0 % at most.
TIE = 0.01
_FAMILIES = (
    "ddp",
    "ddp late",
    "fsdp",
    "fsdp late",
    "zero1",
    "tensor parallel",
    "dlrm",
    "dlrm overlapped",
)
_PLATFORMS = ("v100-sxm-8", "a100-sxm-8", "h100-sxm-8", "b200-sxm-8")


@dataclass(frozen=True)
class Case:
    """A drawn iteration, and the loop around it.

    Parameters
    ----------
    seed : int
        It was drawn with [-].
    family : str
        One of `_FAMILIES`.
    workload : Any
        A function of how many times larger the batch is, and of whether collectives overlap.
    platform : Platform
        Where it runs.
    ranks : int
        How many [-].
    slowdown : dict of int to float
        How many times longer a slow rank takes [-].
    loop : Loop
        Noise, loading and waits.
    """

    seed: int
    family: str
    workload: Callable[[int, bool], Mapping[str, Any]]
    platform: pk.Platform
    ranks: int
    slowdown: Mapping[int, float]
    loop: Loop


def draw(seed: int) -> Case:
    """Draw an iteration."""
    rng = np.random.default_rng(seed)
    family = _FAMILIES[seed % len(_FAMILIES)]
    ranks = int(rng.choice([2, 4]))
    platform = pk.load_platform(str(rng.choice(_PLATFORMS)))
    host = float(np.exp(rng.uniform(np.log(0.15), np.log(1.5))))
    if family == "tensor parallel":  # strategies hide slow hosts in pauses that no trace would show
        host = 0.02
    platform = platform.with_host(host)
    slower = float(np.exp(rng.uniform(np.log(0.08), np.log(1.0))))
    link = platform.network.links["intra"]
    platform = platform.with_link("intra", bandwidth=slower * link.bandwidth.value)
    slowdown = {}
    if rng.random() < 0.4:
        slowdown = {int(rng.integers(ranks)): float(rng.uniform(1.1, 1.6))}
    loop = Loop(steps=4, noise=0.03, seed=seed)
    if "tensor" not in family and rng.random() < 0.25:
        loop = replace(loop, waits=True)
    elif "tensor" not in family and rng.random() < 0.25:
        loop = replace(loop, loading=float(rng.uniform(0.5e-3, 8e-3)))
    if family.startswith("dlrm"):
        workload = _draw_dlrm(rng, ranks, family)
    else:
        workload = _draw_transformer(rng, ranks, family)
    return Case(seed, family, workload, platform, ranks, slowdown, loop)


def _draw_dlrm(
    rng: np.random.Generator, ranks: int, family: str
) -> Callable[[int, bool], Mapping[str, Any]]:
    """Draw a DLRM."""
    width = int(rng.choice([256, 512, 1024, 2048]))
    dim = int(rng.choice([32, 64, 128]))
    settings: dict[str, Any] = {
        "rows": [int(rng.integers(10_000, 1_000_000))] * int(rng.integers(1, 5)) * ranks,
        "dim": dim,
        "pooling": int(rng.integers(1, 20)),
        "bottom": [width, width // 2, dim],
        "top": [width, width, 1],
        "embedding": "fused",
        "optimizer": "sgd",
    }
    batch = int(rng.choice([1024, 4096, 16384])) * ranks

    def make(times: int, changed: bool) -> Mapping[str, Any]:
        overlaps = "overlapped" in family
        return {"workload": pk.DLRM(batch=times * batch, overlap=overlaps or changed, **settings)}

    return make


def _draw_transformer(
    rng: np.random.Generator, ranks: int, family: str
) -> Callable[[int, bool], Mapping[str, Any]]:
    """Draw a Transformer, and how ranks share it."""
    hidden = int(rng.choice([512, 1024, 2048]))
    sequence = int(rng.choice([128, 512, 1024]))
    batch = int(rng.choice([1, 4, 8]))
    settings: dict[str, Any] = {
        "name": "drawn",
        "causal": bool(rng.random() < 0.5),
        "sequence": sequence,
        "layers": int(rng.integers(2, 5)),
        "hidden": hidden,
        "heads": hidden // 64,
        "vocabulary": int(rng.choice([8192, 32768])),
        "positions": sequence,
        "dtype": "fp16",
        "fused": bool(rng.random() < 0.5),
    }

    def make(times: int, changed: bool) -> Mapping[str, Any]:
        if family == "tensor parallel":
            strategy = pk.Strategy(tp=ranks, micro_batch=times * batch)
            model = pk.Transformer(batch=times * batch, **settings)
            return {"workload": model, "strategy": strategy}
        parallel = {"fsdp": "fsdp", "zero1": "zero1"}.get(family.split()[0], "ddp")
        overlaps = changed or "late" not in family
        model = pk.Transformer(
            batch=times * batch * ranks, parallel=parallel, overlap=overlaps, **settings
        )
        return {"workload": model}

    return make


def _predict(
    case: Case, platform: pk.Platform, *, times: int = 1, overlaps: bool = False, **options: Any
) -> pk.Prediction:
    """The iteration of a case, with one group of ranks for each rank."""
    slowdown = {rank: 1.0 + 1e-9 * rank for rank in range(case.ranks)}
    slowdown |= options.pop("slowdown", case.slowdown)
    arguments = dict(case.workload(times, overlaps))
    workload = arguments.pop("workload")
    return pk.predict(
        workload, platform, ranks=case.ranks, slowdown=slowdown, **arguments, **options
    )


def find_truths(case: Case) -> dict[str, float]:
    """Time that an iteration of a case becomes shorter by each kind of change [s]."""
    loop, platform = case.loop, case.platform
    base = time_loop(_predict(case, platform), loop)
    link = 2.0 * platform.network.links["intra"].bandwidth.value
    times = {
        "link": time_loop(_predict(case, platform.with_link("intra", bandwidth=link)), loop),
        "batch": time_loop(
            _predict(case, platform, times=2), replace(loop, loading=2 * loop.loading)
        )
        / 2,
    }
    if case.family != "tensor parallel":  # hosts of strategies are part of their streams
        for kind, execution in (("graphs", "graphs"), ("compile", "compiled")):
            times[kind] = time_loop(_predict(case, platform, execution=execution), loop)
    if "late" in case.family:
        times["overlap"] = time_loop(_predict(case, platform, overlaps=True), loop)
    if case.slowdown:
        times["balance"] = time_loop(_predict(case, platform, slowdown={}), loop)
    if loop.waits:
        times["waits"] = time_loop(_predict(case, platform), replace(loop, waits=False))
    if loop.loading:
        times["loading"] = time_loop(_predict(case, platform), replace(loop, loading=0.0))
    gains = {kind: base - time for kind, time in times.items()}
    return {"time": base, **gains}


def judge(case: Case) -> list[dict[str, Any]]:
    """Every kind of change of a case: the gain that its trace tells, and the true one."""
    truths = find_truths(case)
    base = truths.pop("time")
    with tempfile.TemporaryDirectory() as folder:
        paths = write_traces(Path(folder), _predict(case, case.platform), case.loop)
        fixes = pk.read_trace(paths).fixes()
    rows: list[dict[str, Any]] = []
    for kind, truth in truths.items():
        row = {"seed": case.seed, "family": case.family, "kind": kind, "time": base, "truth": truth}
        told = [fix for fix in fixes.fixes if fix.kind == kind]
        row |= {"gain": 0.0, "low": 0.0, "high": 0.0, "told": bool(told)}
        if told:
            row |= {"gain": told[0].gain, "low": told[0].low, "high": told[0].high}
        rows.append(row)
    return rows


def name_first(rows: Sequence[Row]) -> bool:
    """Whether the change that is told to save most does so, within `TIE`."""
    told = max(rows, key=lambda row: row["gain"])
    best = max(row["truth"] for row in rows)
    return bool(told["truth"] >= best - TIE * told["time"])


def summarize(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of a kind of change: those that were told, and those that were not and save more than
    `TIE` [-]."""
    told = [row for row in rows if row["told"]]
    missed = [row for row in rows if not row["told"] and row["truth"] > TIE * row["time"]]
    inside = [row["low"] <= row["truth"] <= row["high"] for row in told]
    errors = [(row["gain"] - row["truth"]) / row["time"] for row in told]
    widths = [(row["high"] - row["low"]) / row["time"] for row in told]
    figures: dict[str, Any] = {"kind": kind, "n": len(told), "missed": len(missed)}
    if told:
        figures |= {
            "inside": 100 * np.mean(inside),
            "error": 100 * np.mean(np.abs(errors)),
            "bias": 100 * np.mean(errors),
            "width": 100 * np.mean(widths),
        }
    return figures


_COLUMNS = {
    "change": "{kind}",
    "n": "{n}",
    "inside 80 % [%]": "{inside:.0f}",
    "error [% of the step]": "{error:.1f}",
    "bias": "{bias:+.1f}",
    "width": "{width:.1f}",
    "not told, above 1 %": "{missed}",
}
_DETAILS = {
    "seed": "{seed}",
    "family": "{family}",
    "change": "{kind}",
    "step": "{time:time}",
    "true gain": "{truth:time}",
    "told": "{gain:time}",
    "low": "{low:time}",
    "high": "{high:time}",
}


@command(
    {
        "--seed": {"type": int, "default": 2000, "help": "the first one"},
        "--count": {"type": int, "default": 40, "help": "iterations that are drawn"},
        "--details": {"action": "store_true", "help": "every change of every iteration"},
    }
)
def main(given: Any) -> None:
    """Gains that traces tell, beside those of the event loop."""
    cases: list[list[dict[str, Any]]] = []
    with keep_quiet():
        for seed in range(given.seed, given.seed + given.count):
            cases.append(judge(draw(seed)))
    rows = [row for case in cases for row in case]
    if given.details:
        print(lay_out(rows, _DETAILS), end="\n\n")
    kinds = dict.fromkeys(row["kind"] for row in rows)
    table = [summarize(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds]
    print(lay_out([*table, summarize("all", rows)], _COLUMNS))
    first = [name_first(case) for case in cases]
    print(f"\nthe first change is the true first: {sum(first)} of {len(first)}")
