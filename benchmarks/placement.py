"""How near to the bound placements come, how fast, and what rules of thumb come to.

    python -m benchmarks.placement [--tables T --ranks R] [--seed S] [--huge] [--json OUT]

Without sizes: the standard cases, five seeds each, beside their bars. Tables are those of `perfkit.draw_tables`, on
nodes of eight H100; the iteration is that of the tables alone: no dense part hides a gap.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks import OUT, Row, command, lay_out, save_rows
from perfkit.ground.units import format_time
from perfkit.sharding.problem import OBJECTIVES
from perfkit.workloads.placement import KINDS

#: Work on the search by objective, for up to 856 tables; more tables get more in proportion [s].
_SECONDS = {"additive": 0.35, "iteration": 0.9}
_SEEDS = 5
#: One table with more lookups than 20 average ones, wide and with 20 GB of rows.
_HUGE = pk.EmbeddingTable(40_000_000, 128, 64.0, 0.6, name="huge")


@dataclass(frozen=True)
class Case:
    """Tables and ranks, and what a search should reach: gap, seconds, how many times faster than whole tables."""

    tables: int
    ranks: int
    objectives: tuple[str, ...] = (*OBJECTIVES,)
    huge: bool = False
    gap: float = np.inf
    seconds: float = np.inf
    speedup: float = 0.0

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.tables} × {self.ranks}{', one huge' if self.huge else ''}"


CASES = (
    Case(856, 64, ("additive",), gap=1e-3, seconds=1.0),
    Case(100, 16, ("iteration",), gap=0.05, seconds=2.0),
    Case(26, 8, ("iteration",), huge=True, speedup=1.5),
    Case(5000, 512, ("iteration",), seconds=30.0),
)


def run_case(case: Case, seed: int, *, seconds: float | None = None) -> list[dict[str, Any]]:
    """One record for the search, one for a search among whole tables, and one for every rule of thumb."""
    drawn, records, node = pk.draw_tables(case.tables, seed=seed), [], pk.load_platform("h100-sxm-8")
    tables = pk.TableSet((_HUGE, *drawn[1:]) if case.huge else drawn, batch=65536, embedding="fused")
    platform = node.with_nodes(-(-case.ranks // 8)) if case.ranks > 8 else node
    for objective in case.objectives:
        settings: dict[str, Any] = {"ranks": case.ranks, "objective": objective, "seed": seed}
        settings["seconds"] = seconds or _SECONDS[objective] * max(1.0, case.tables / 856)
        found, results = list[tuple[str, float, Any, float]](), list[pk.ShardingResult]()
        for method, forbid in {"search": (), "search-whole": {*KINDS} - {"table_wise"}}.items():
            start = time.perf_counter()
            results.append(pk.shard(tables, platform, forbid=forbid, **settings))
            found.append((method, time.perf_counter() - start, results[-1].prediction, results[-1].bound))
        found += [(name, 0.0, price, results[0].bound) for name, price in results[0].baselines.items()]
        records += [
            {"method": method, "objective": objective, "seed": seed, "seconds": taken, "bound_s": bound,
             "predicted_s": price and price.time, "gap": price and price.time / bound - 1,
             "loads_s": price and price.loads.tolist()}
            for method, taken, price, bound in found
        ]  # fmt: skip
    return records


_COLUMNS = {
    "case": "{case}", "objective": "{objective}", "method": "{method}", "time": "{time}", "gap": "{gap:.3%}",
    "worst gap": "{worst:.3%}", "seconds": "{seconds:.2f}", "most": "{most:.2f}", "met": "{met}",
}  # fmt: skip


def format_cases(cases: Sequence[Case], records: Sequence[Sequence[Row]]) -> str:
    """The table as text: mean and worst of the seeds."""
    rows = []
    for case, own in zip(cases, records, strict=True):
        for objective, method in dict.fromkeys((record["objective"], record["method"]) for record in own):
            part = [r for r in own if (r["objective"], r["method"]) == (objective, method)]
            found = [r for r in part if r["predicted_s"] is not None]
            row: dict[str, Any] = {"case": case.name, "objective": objective, "method": method, "time": "no room"}
            rows.append(row)
            if not found:
                continue
            times, gaps, taken = (np.array([r[key] for r in found]) for key in ("predicted_s", "gap", "seconds"))
            row |= {"time": format_time(float(times.mean())), "gap": gaps.mean(), "worst": gaps.max()}
            row |= {"seconds": taken.mean(), "most": taken.max()}
            if method == "search":
                whole = [r["predicted_s"] for r in own if (r["objective"], r["method"]) == (objective, "search-whole")]
                ratio = float(np.min(np.array(whole) / times))
                row["met"] = bool(row["worst"] <= case.gap and row["most"] <= case.seconds and ratio >= case.speedup)
    return lay_out(rows, _COLUMNS)


@command({
    "--tables": {"type": int, "metavar": "T", "help": "number of tables; default: the standard cases"},
    "--ranks": {"type": int, "metavar": "R", "default": 8, "help": "number of ranks"},
    "--seed": {"type": int, "metavar": "S", "help": "one seed; default: five, or one where sizes are given"},
    "--seconds": {"type": float, "metavar": "W", "help": "work on each search"},
    "--huge": {"action": "store_true", "help": "make one of the tables huge"},
    "--quick": {"action": "store_true", "help": "one seed, and not the largest case"}, **OUT,
})  # fmt: skip
def main(given: Any) -> None:
    """Placements beside their bound."""
    wanted = [Case(given.tables, given.ranks, huge=given.huge)] if given.tables else []
    cases = wanted or list(CASES[:3] if given.quick else CASES)
    seeds = [given.seed or 0] if given.seed is not None or wanted or given.quick else list(range(_SEEDS))
    records = [[r for seed in seeds for r in run_case(case, seed, seconds=given.seconds)] for case in cases]
    print(format_cases(cases, records))
    save_rows(given.json, [{"case": case.name, **r} for case, own in zip(cases, records, strict=True) for r in own])
