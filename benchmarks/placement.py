"""How near to the lower bound placements come, how fast, and how good the rules of thumb are.

    python -m benchmarks.placement [--tables T --ranks R] [--seed S] [--huge]

Without sizes: the standard cases with their bars, five seeds each. Tables are those of
`perfkit.draw_tables`, on nodes of eight H100. The iteration has no dense part, which could hide a
gap.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.tables import Row, lay_out
from perfkit.sharding.problem import OBJECTIVES
from perfkit.workloads.placement import KINDS

#: Work on a search of up to 856 tables, by objective; more tables get more in proportion [s].
_SECONDS = {"additive": 0.35, "iteration": 0.9}
_SEEDS = 5
#: One table with more lookups than 20 average ones, wide and with 20 GB of rows.
_HUGE = pk.EmbeddingTable(40_000_000, 128, 64.0, 0.6, name="huge")


class Case(NamedTuple):
    """Tables and ranks, and the bars of a search: gap [-], seconds [s], speedup over whole tables
    [-]."""

    tables: int
    ranks: int
    objectives: tuple[str, ...] = (*OBJECTIVES,)
    huge: bool = False
    gap: float = np.inf
    seconds: float = np.inf
    speedup: float = 0.0


CASES = (
    Case(856, 64, ("additive",), gap=1e-3, seconds=1.0),
    Case(100, 16, ("iteration",), gap=0.05, seconds=2.0),
    Case(26, 8, ("iteration",), huge=True, speedup=1.5),
    Case(5000, 512, ("iteration",), seconds=30.0),
)


def run_case(case: Case, seed: int, *, seconds: float | None = None) -> list[dict[str, Any]]:
    """One row for the search, one for a search with whole tables only, and one for every rule of
    thumb."""
    drawn, rows, node = pk.draw_tables(case.tables, seed=seed), [], pk.load_platform("h100-sxm-8")
    tables = pk.TableSet(
        (_HUGE, *drawn[1:]) if case.huge else drawn, batch=65536, embedding="fused"
    )
    platform = node.with_nodes(-(-case.ranks // 8)) if case.ranks > 8 else node
    for objective in case.objectives:
        settings: dict[str, Any] = {"ranks": case.ranks, "objective": objective, "seed": seed}
        settings["seconds"] = seconds or _SECONDS[objective] * max(1.0, case.tables / 856)
        results, taken = list[pk.ShardingResult](), list[float]()
        for forbid in ((), {*KINDS} - {"table_wise"}):
            start = time.perf_counter()
            results.append(pk.shard(tables, platform, forbid=forbid, **settings))
            taken.append(time.perf_counter() - start)
        found, whole = results
        search, *rules = found.compare().select("method", "time_s", "gap").to_dicts()
        alone = {
            "method": "search-whole",
            "time_s": whole.prediction.time,
            "gap": whole.gap,
            "seconds": taken[1],
        }
        for row in (
            {**search, "seconds": taken[0]},
            alone,
            *({**rule, "seconds": 0.0} for rule in rules),
        ):
            rows.append({"objective": objective, "seed": seed, **row})
    return rows


def summarize(case: Case, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means and largest values over seeds by objective and method, and whether the search meets its
    bars."""
    frame, (gap, seconds) = pl.DataFrame(rows), (pl.col("gap"), pl.col("seconds"))
    means = frame.group_by("objective", "method", maintain_order=True).agg(
        time=pl.col("time_s").mean(),
        gap=gap.mean(),
        worst=gap.max(),
        seconds=seconds.mean(),
        most=seconds.max(),
    )
    name, out = f"{case.tables} × {case.ranks}{', one huge' if case.huge else ''}", means.to_dicts()
    for row in out:
        row["case"] = name
        if row["method"] == "search":
            own = frame.filter(objective=row["objective"])
            whole, time = (
                own.filter(method=method)["time_s"] for method in ("search-whole", "search")
            )
            faster = (whole / time).min() >= case.speedup  # type: ignore[operator]
            row["met"] = bool(row["worst"] <= case.gap and row["most"] <= case.seconds and faster)
    return out


_COLUMNS = {
    "case": "{case}",
    "objective": "{objective}",
    "method": "{method}",
    "time": "{time:time}",
    "gap": "{gap:.3%}",
    "worst gap": "{worst:.3%}",
    "seconds": "{seconds:.2f}",
    "most": "{most:.2f}",
    "met": "{met}",
}


@command(
    {
        "--tables": {
            "type": int,
            "metavar": "T",
            "help": "number of tables; default: the standard cases",
        },
        "--ranks": {"type": int, "metavar": "R", "default": 8, "help": "number of ranks"},
        "--seed": {
            "type": int,
            "metavar": "S",
            "help": "one seed; default: five, or one where sizes are given",
        },
        "--seconds": {"type": float, "metavar": "W", "help": "work on each search"},
        "--huge": {"action": "store_true", "help": "make one of the tables huge"},
        "--quick": {"action": "store_true", "help": "one seed, and not the largest case"},
    }
)
def main(given: Any) -> None:
    """Placements beside their bound."""
    wanted = [Case(given.tables, given.ranks, huge=given.huge)] if given.tables else []
    cases = wanted or list(CASES[:3] if given.quick else CASES)
    seeds = (
        [given.seed or 0]
        if given.seed is not None or wanted or given.quick
        else list(range(_SEEDS))
    )
    rows = []
    for case in cases:
        rows += summarize(
            case, [row for seed in seeds for row in run_case(case, seed, seconds=given.seconds)]
        )
    print(lay_out(rows, _COLUMNS))
