"""What the limits of plans that people would run cost: shards of at least 128 columns, and small
tables whole or copied.

    python -m benchmarks.plan_limits [--steps S] [--quick]

Twenty drawn problems, each searched with the limits and without, with as many steps. *Cost* is the
share of the time that the plan without limits saves, *stated* the most that the result says it can
be. Where *cost* is negative, the search without limits has more to try and finds less.
"""

from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.tables import Row, lay_out

_PROBLEMS = 20
_PLATFORMS = {"h100-sxm-8": 8, "a100-sxm-8": 8, "h100-sxm-8x2": 16}


class Tables(NamedTuple):
    """Tables to place, and where."""

    workload: pk.TableSet
    platform: str
    ranks: int

    def shard(self, **settings: Any) -> pk.ShardingResult:
        """Search for a placement."""
        return pk.shard(self.workload, self.platform, ranks=self.ranks, **settings)


def draw_problem(seed: int) -> Tables:
    """A few tables of 16 to 512 columns, from some hundred to some million rows."""
    rng = np.random.default_rng([seed, 43])
    platform = str(rng.choice(list(_PLATFORMS)))
    tables = []
    for number in range(int(rng.integers(4, 25))):
        table = pk.EmbeddingTable(
            rows=round(10 ** rng.uniform(2.5, 7)),
            dim=int(rng.choice((16, 32, 64, 128, 256, 512))),
            pooling=round(float(np.exp(rng.uniform(0, 4))), 1),
            exponent=round(float(rng.uniform(0, 1.2)), 2),
            name=f"table {number}",
        )
        tables.append(table)
    batch = int(2 ** rng.integers(13, 17))
    workload = pk.TableSet(
        tuple(tables), batch=batch, embedding=str(rng.choice(("fused", "separate")))
    )
    return Tables(workload, platform, _PLATFORMS[platform])


def find_narrowest(result: pk.ShardingResult) -> int | None:
    """Least columns of a shard of a table that is split by columns; None if none is [-]."""
    tables = result.prediction._problem.costs.workload.tables
    widths = []
    for part in result.plan.cut(tables):
        placement = result.plan.placements[part.table]
        if placement.traits.splits_columns and len(placement.ranks) > 1:
            widths.append(part.columns)
    return min(widths, default=None)


def compare(seed: int, steps: int) -> Row:
    """One problem with the limits and without."""
    problem = draw_problem(seed)
    limited = problem.shard(steps=steps)
    free = problem.shard(steps=steps, min_columns=1, split_small=True)
    cost = 1 - free.prediction.time / limited.prediction.time
    return {
        "problem": seed,
        "tables": len(problem.workload.tables),
        "ranks": problem.ranks,
        "time": limited.prediction.time,
        "gap": limited.gap,
        "free": free.prediction.time,
        "free_gap": free.gap,
        "cost": cost,
        "stated": limited.cost_of_limits / limited.prediction.time,
        "given_up": limited.given_up / limited.prediction.time,
        "joined": len(limited.joined),
        "narrowest": find_narrowest(limited),
        "free_narrowest": find_narrowest(free),
    }


_COLUMNS = {
    "problem": "{problem}",
    "tables": "{tables}",
    "ranks": "{ranks}",
    "time": "{time:time}",
    "gap": "{gap:.1%}",
    "without limits": "{free:time}",
    "gap ": "{free_gap:.1%}",
    "cost": "{cost:+.1%}",
    "stated": "{stated:.1%}",
    "given up": "{given_up:.1%}",
    "joined": "{joined}",
    "narrowest": "{narrowest}",
    "without": "{free_narrowest}",
}


@command(
    {
        "--steps": {
            "type": int,
            "default": 2000,
            "metavar": "S",
            "help": "steps of each search",
        },
        "--quick": {"action": "store_true", "help": "five problems"},
    }
)
def main(given: Any) -> None:
    """Cost of the limits of plans."""
    problems = 5 if given.quick else _PROBLEMS
    rows = [compare(seed, given.steps) for seed in range(problems)]
    print(lay_out(rows, _COLUMNS))
    costs = np.array([row["cost"] for row in rows])
    print(
        f"cost of the limits: {costs.mean():.1%} in mean, {np.median(costs):.1%} in the median, "
        f"{costs.max():.1%} at most"
    )
