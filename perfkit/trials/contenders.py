"""What takes part in a trial: models small enough for one machine, and the placements that are proposed for each."""

from typing import Any

import numpy as np

from perfkit.estimates import keep_quiet
from perfkit.platform import Platform
from perfkit.sharding.baselines import BASELINES
from perfkit.sharding.planner import shard
from perfkit.units import check_positive
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import KINDS, Plan
from perfkit.workloads.tables import TableSet, draw_tables

__all__ = ["METHODS", "draw_models", "make_model", "propose_plans"]

#: What proposes placements: every rule of thumb, a second draw of the random one, and the search.
METHODS = (*BASELINES, "random 2", "search")
_LARGEST = {True: 3e8, False: 1e8}  # bytes of weights by form of gradients: every placement has its own in memory


def draw_models(n: int, *, seed: int = 0) -> dict[str, DLRM]:
    """Draw recommendation models whose tables differ as those of `draw_tables` do, small enough for one machine.

    8 to 16 tables of 10³ to 10⁶ rows (the decades of `draw_tables`, shrunk by a quarter), one number of columns of 32,
    64 or 128 for all of them, pooling and Zipf exponents as there, rows and pooling correlated by -0.7 to 0.7; batch
    256 to 2,048, one to three layers of 64 to 512 below and above the interaction; every fourth model has dense
    gradients. At most 300 MB of weights, 100 MB with dense gradients.

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
    n = int(check_positive("n", n, integer=True, maximum=10_000))
    return {f"model {i}": _draw_model(i, seed) for i in range(n)}


def _draw_model(number: int, seed: int) -> DLRM:
    rng, sparse = np.random.default_rng([5, seed, number]), number % 4 != 3
    dim, correlation = int(rng.choice((32, 64, 128))), float(rng.uniform(-0.7, 0.7))
    while True:
        drawn = draw_tables(int(rng.integers(8, 17)), seed=int(rng.integers(2**31)), correlation=correlation)
        rows = [round(10 ** (3 + 0.75 * (np.log10(table.rows) - 3))) for table in drawn]
        if 4 * dim * sum(rows) <= _LARGEST[sparse]:
            break
    layers = [[int(64 * 8 ** rng.uniform()) // 8 * 8 for _ in range(rng.integers(1, 4))] for _ in range(2)]
    return DLRM(
        rows=rows, dim=dim, pooling=[t.pooling for t in drawn], exponent=[t.exponent for t in drawn], sparse=sparse,
        batch=int(256 * 8 ** rng.uniform()) // 2 * 2, bottom=layers[0], top=layers[1], features=13,
    )  # fmt: skip


def make_model(tables: TableSet) -> DLRM:
    """Make a model of bare tables that can be measured: their lookups below a small dense part.

    Parameters
    ----------
    tables : TableSet
        Tables of one width.

    Returns
    -------
    model : DLRM
        With layers of 64 and a bottom and a top of one layer each.

    Raises
    ------
    ValueError
        For tables of several widths, and popularities that no exponent tells.
    """
    if len(dims := sorted({table.dim for table in tables})) > 1:
        raise ValueError(f"dim is {', '.join(map(str, dims))}; a measured DLRM has tables of one width; measure apart")
    if any(table.law is not None for table in tables):
        raise ValueError("law of a table is given; measured rows are drawn by a Zipf exponent alone; give exponents")
    size = tables.tables[0].itemsize
    if tables.optimizer != "sgd" or tables.embedding != "separate" or size != 4:
        raise ValueError(
            f"tables are {tables.embedding}, of {size} bytes a number and trained by {tables.optimizer}; only sgd on "
            "separate fp32 tables is measured, other settings are predicted"
        )
    columns: dict[str, Any] = {key: [getattr(t, key) for t in tables] for key in ("rows", "pooling", "exponent")}
    settings: dict[str, Any] = {"bottom": (64,), "top": (64,), "features": 13, "sparse": tables.sparse}
    return DLRM(dim=dims[0], batch=tables.batch, **columns, **settings)


def propose_plans(
    model: DLRM, platform: Platform, *, ranks: int = 2, seconds: float = 0.5, seed: int = 0
) -> dict[str, Plan]:
    """Place the tables of a model in every way that is to be measured, whole on one rank each.

    Parameters
    ----------
    model : DLRM
        The model.
    platform : Platform
        What prices the placements.
    ranks : int, optional
        Ranks [-].
    seconds : float, optional
        Work to spend on the search [s].
    seed : int, optional
        Seed [-].

    Returns
    -------
    plans : dict of str to Plan
        By name of the method, see `METHODS`. Ranks are numbered as tables come to them: they are all alike.
    """
    whole: dict[str, Any] = {"ranks": ranks, "forbid": [kind for kind in KINDS if kind != "table_wise"]}
    with keep_quiet():  # how good the prediction is will be measured
        best, other = (
            shard(model, platform, seconds=work, seed=own, **whole) for work, own in ((seconds, seed), (1e-3, seed + 1))
        )
        priced = {**best.baselines, "random 2": other.place("random"), "search": best.prediction}
    return {name: _renumber(priced[name].plan) for name in METHODS if priced[name] is not None}  # type: ignore[union-attr]


def _renumber(plan: Plan) -> Plan:
    number = {owner: i for i, owner in enumerate(dict.fromkeys(plan.owners))}
    return Plan(plan.ranks, tuple(number[owner] for owner in plan.owners))
