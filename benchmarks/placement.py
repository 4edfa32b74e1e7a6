"""How near to the lower bound placements come, how fast, and how good the rules of thumb are.

    python -m benchmarks.placement [--tables T --ranks R] [--seed S] [--huge]

Without sizes: the standard cases with their bars, five seeds each. Tables are those of
`perfkit.draw_tables`, on nodes of eight GPUs, H100 where nothing else is named. The iteration has no dense part, which could hide a
gap.
"""

import time
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.tables import Row, lay_out
from perfkit.sharding.problem import OBJECTIVES
from perfkit.workloads.placement_kinds import KINDS, WHOLE

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
    platform: str = "h100-sxm-8"
    work: float | None = None  # on each search; None: see `_SECONDS` [s]
    usual_limits: bool = False  # else shards of any width, and small tables may stay split


CASES = (
    Case(856, 64, ("additive",), gap=1e-3, seconds=1.0),
    Case(100, 16, ("iteration",), gap=0.05, seconds=2.0),
    Case(26, 8, ("iteration",), huge=True, speedup=1.5),
    Case(5000, 512, ("iteration",), seconds=30.0),
    Case(856, 64, ("iteration",), gap=3e-3, work=5.0),
    Case(856, 64, ("iteration",), gap=3e-3, work=5.0, platform="a100-sxm-8"),
    Case(856, 64, ("iteration",), gap=3e-3, work=5.0, platform="b200-sxm-8"),
    Case(856, 64, ("iteration",), gap=3e-3, work=5.0, usual_limits=True),
    Case(856, 64, ("iteration",), gap=3e-3, work=5.0, platform="a100-sxm-8", usual_limits=True),
    Case(856, 64, ("iteration",), gap=3e-3, work=5.0, platform="b200-sxm-8", usual_limits=True),
    Case(4000, 64, ("iteration",), seconds=30.0, work=5.0),
    Case(10_000, 64, ("iteration",), seconds=60.0, work=5.0),
)


class _Search(NamedTuple):
    """What a search found, and how long it took [s]."""

    result: pk.ShardingResult
    seconds: float


def _search(tables: pk.TableSet, platform: pk.Platform, settings: Row, forbid: Set[str]) -> _Search:
    """Search for a placement without some ways to cut tables, and take the time."""
    start = time.perf_counter()
    result = pk.shard(tables, platform, forbid=forbid, **settings)
    return _Search(result, time.perf_counter() - start)


def _find_platform(name: str, ranks: int) -> pk.Platform:
    """Nodes of eight GPUs for so many ranks."""
    node = pk.load_platform(name)
    if ranks <= 8:
        return node
    return node.with_nodes(-(-ranks // 8))


def run_case(case: Case, seed: int, *, seconds: float | None = None) -> list[dict[str, Any]]:
    """One row for the search, one for a search with whole tables only, and one for every rule of
    thumb."""
    drawn = pk.draw_tables(case.tables, seed=seed)
    if case.huge:
        drawn = (_HUGE, *drawn[1:])
    tables = pk.TableSet(drawn, batch=65536, embedding="fused")
    platform = _find_platform(case.platform, case.ranks)
    rows = list[dict[str, Any]]()
    for objective in case.objectives:
        usual = _SECONDS[objective] * max(1.0, case.tables / 856)
        settings = {
            "ranks": case.ranks,
            "objective": objective,
            "seed": seed,
            "seconds": seconds or case.work or usual,
        }
        if not case.usual_limits:
            settings |= {"min_columns": 1, "split_small": True}
        search = _search(tables, platform, settings, forbid=set())
        whole = _search(tables, platform, settings, forbid={*KINDS} - {WHOLE.name})
        compared = search.result.compare().select("method", "time_s", "gap").to_dicts()
        alone = {
            "method": "search-whole",
            "time_s": whole.result.prediction.time,
            "gap": whole.result.gap,
            "seconds": whole.seconds,
        }
        methods = [{**compared[0], "seconds": search.seconds}, alone]
        methods += [{**rule, "seconds": 0.0} for rule in compared[1:]]
        rows += [{"objective": objective, "seed": seed, **row} for row in methods]
    return rows


def _name_case(case: Case) -> str:
    """Tables and ranks of a case in words."""
    name = f"{case.tables} × {case.ranks}"
    if case.platform != "h100-sxm-8":
        name += f", {case.platform}"
    if case.usual_limits:
        name += ", usual limits"
    return f"{name}, one huge" if case.huge else name


def _meets_bars(case: Case, row: Row, frame: pl.DataFrame) -> bool:
    """Whether the searches of one objective meet the bars of a case."""
    whole = frame.filter(method="search-whole")["time_s"]
    search = frame.filter(method="search")["time_s"]
    speedups = (whole / search).to_list()
    is_fast = row["most"] <= case.seconds and min(speedups) >= case.speedup
    return bool(row["worst"] <= case.gap and is_fast)


def summarize(case: Case, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means and largest values over seeds by objective and method, and whether the search meets its
    bars."""
    frame = pl.DataFrame(rows)
    means = frame.group_by("objective", "method", maintain_order=True).agg(
        time=pl.col("time_s").mean(),
        gap=pl.col("gap").mean(),
        worst=pl.col("gap").max(),
        seconds=pl.col("seconds").mean(),
        most=pl.col("seconds").max(),
    )
    summary = means.to_dicts()
    for row in summary:
        row["case"] = _name_case(case)
        if row["method"] == "search":
            row["met"] = _meets_bars(case, row, frame.filter(objective=row["objective"]))
    return summary


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


def _list_seeds(given: Any) -> list[int]:
    """The seed that is given; five, or one where sizes are given or all shall be quick."""
    if given.seed is not None:
        return [given.seed]
    if given.tables or given.quick:
        return [0]
    return list(range(_SEEDS))


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
    if given.tables:
        cases = [Case(given.tables, given.ranks, huge=given.huge)]
    elif given.quick:
        cases = list(CASES[:3])
    else:
        cases = list(CASES)
    rows = list[Row]()
    for case in cases:
        runs = list[Row]()
        for seed in _list_seeds(given):
            runs += run_case(case, seed, seconds=given.seconds)
        rows += summarize(case, runs)
    print(lay_out(rows, _COLUMNS))
