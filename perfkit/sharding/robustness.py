"""Is a plan still the best one if pooling, skew, bandwidth and the fitted models are not what they were taken for?"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from perfkit.sharding.options import Option, price_placement
from perfkit.sharding.pricing import COLUMNS, SECONDS
from perfkit.sharding.problem import Problem
from perfkit.units import Array, check_positive
from perfkit.workloads.placement import Plan

if TYPE_CHECKING:
    import polars

__all__ = ["Robustness", "judge_robustness"]

_STEP = 0.2  # relative change of pooling and exponent that prices are compared over
_ENTRIES = 4_000_000  # numbers in one array at a time


@dataclass(frozen=True, eq=False)
class Robustness:
    """Times of plans in worlds that differ from what was assumed.

    Parameters
    ----------
    names : tuple of str
        The plans; the first one is asked about.
    times : array, shape (draws, plans)
        Time of each plan in each world [s].
    """

    names: tuple[str, ...]
    times: Array = field(repr=False)

    @property
    def probability(self) -> Array:
        """Share of worlds in which each plan is the best of them [-]."""
        return np.bincount(np.argmin(self.times, axis=1), minlength=len(self.names)) / len(self.times)

    @property
    def regret(self) -> Array:
        """How much longer each plan takes than the best one of the same world, on average [-]."""
        return np.asarray((self.times / self.times.min(axis=1, keepdims=True) - 1).mean(axis=0))

    def table(self) -> "polars.DataFrame":
        """Probability and regret of every plan.

        Returns
        -------
        frame : polars.DataFrame
            plan, probability of being the best [-], mean regret [-], and the 10th, 50th and 90th percentile of its
            time [s].
        """
        import polars

        low, middle, high = np.percentile(self.times, (10, 50, 90), axis=0)
        return polars.DataFrame({
            "plan": self.names, "probability": self.probability, "regret": self.regret,
            "low_s": low, "median_s": middle, "high_s": high,
        })  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"Robustness({self.names[0]} is the best of {len(self.names)} plans in {self.probability[0]:.0%} of "
            f"{len(self.times)} worlds, expected regret {self.regret[0]:.2%})"
        )


def judge_robustness(
    problem: Problem,
    plans: Mapping[str, Plan],
    *,
    draws: int = 200,
    seed: int = 0,
    pooling: float = 0.2,
    skew: float = 0.2,
    bandwidth: float = 0.2,
) -> Robustness:
    """Price plans in worlds that differ from what was assumed.

    Parameters
    ----------
    problem : Problem
        What is placed, and what it was taken to cost.
    plans : mapping of str to Plan
        Plans by name, the one that is asked about first.
    draws : int, optional
        Worlds to draw [-].
    seed : int, optional
        Seed [-].
    pooling, skew : float, optional
        Relative error of the pooling and of the Zipf exponent of each table, apart from each other [-].
    bandwidth : float, optional
        Relative error of the speed of the memory, and of the network, the same for all ranks [-].

    Returns
    -------
    robustness : Robustness
        Times of all plans in all worlds.

    Raises
    ------
    ValueError
        For no draws, errors below zero or above one, or no plan.

    Notes
    -----
    Errors are log-normal, and so are those of the fits, one for each class of kernels and one for messages. How a shard
    reacts to pooling and skew is taken from its price with both changed by a fifth, as a power of the change.
    """
    check_positive("draws", draws, integer=True, maximum=100_000)
    for name, value in (("pooling", pooling), ("skew", skew), ("bandwidth", bandwidth)):
        check_positive(name, value, zero=True, maximum=1)
    if not plans:
        raise ValueError("plans is empty; pass at least one plan")
    rng = np.random.default_rng([5, int(check_positive("seed", seed, integer=True, zero=True))])
    n = len(problem.rates.workload.tables)
    read = np.exp(pooling * rng.standard_normal((draws, n))), np.exp(skew * rng.standard_normal((draws, n)))
    speeds = np.exp(bandwidth * rng.standard_normal((draws, 2)))
    fits = _fit_errors(problem, rng, draws)
    factors = np.concatenate([fits[:, :-1] * speeds[:, :1], np.ones((draws, len(COLUMNS) - len(SECONDS)))], axis=1)
    worlds = (*read, factors, fits[:, -1] * speeds[:, 1])
    return Robustness(tuple(plans), np.stack([_times(problem, plan, worlds) for plan in plans.values()], axis=1))


def _fit_errors(problem: Problem, rng: np.random.Generator, draws: int) -> Array:
    """Factors on the seconds of each class of kernels, and on messages."""
    platform = problem.rates.platform
    kinds = {
        "lookup": "embedding_forward",
        "pack": "copy",
        "update": "embedding_update",
        "backward": "embedding_backward",
    }
    found = [platform.find_kernel(kinds[name]) if name in kinds else None for name in SECONDS]
    spreads = [pair[1].spread if pair else 0.1 for pair in found]
    messages = [fit.spread for key, fit in platform.collectives.items() if key.startswith("all_to_all")] or [0.2]
    return np.exp(np.array([*spreads, float(np.mean(messages))]) * rng.standard_normal((draws, len(spreads) + 1)))


def _priced(problem: Problem, plan: Plan, name: str) -> list[Option]:
    """Options of a plan with one property of all tables raised."""
    workload = copy.copy(problem.rates.workload)
    tables = tuple(replace(t, **{name: getattr(t, name) * (1 + _STEP)}) for t in workload.tables)
    object.__setattr__(workload, "tables", tables)
    return price_placement(replace(problem.rates, workload=workload), plan.placements)


def _flat(options: list[Option], plan: Plan) -> tuple[Array, np.ndarray, np.ndarray]:
    """Costs of all pieces of a plan, the table of each, and its rank, -1 for all."""
    rows: list[tuple[Array, int, int]] = []
    for table, (option, placement) in enumerate(zip(options, plan.placements, strict=True)):
        rows += [(cost, table, rank) for cost, rank in zip(option.shards, placement.ranks, strict=False)]
        if option.everywhere.any():
            rows += [(option.everywhere, table, -1), (option.hot, table, table % plan.ranks)]
    costs, tables, ranks = zip(*rows, strict=True)
    return np.array(costs), np.array(tables), np.array(ranks)


def _times(problem: Problem, plan: Plan, worlds: tuple[Array, Array, Array, Array]) -> Array:
    """Time of a plan in every world."""
    read, skewed, factors, network = worlds
    options = price_placement(problem.rates, plan.placements)
    costs, tables, ranks = _flat(options, plan)
    powers = []
    for name in ("pooling", "exponent"):
        other = _flat(_priced(problem, plan, name), plan)[0]
        ratio = np.where((costs > 0) & (other > 0), other / np.where(costs > 0, costs, 1.0), 1.0)
        powers.append(np.log(ratio) / np.log(1 + _STEP))
    reduced = {name: float(sum(getattr(o, name) for o in options)) for name in ("rows", "gradients")}
    logs, alone = (np.log(read), np.log(skewed)), np.flatnonzero(ranks >= 0)
    order = alone[np.argsort(ranks[alone], kind="stable")]
    held, starts = np.unique(ranks[order], return_index=True)
    out, step = np.zeros(len(read)), max(1, _ENTRIES // costs.size)
    for first in range(0, len(read), step):
        part = slice(first, first + step)
        growth = sum(power * log[part][:, tables, None] for power, log in zip(powers, logs, strict=True))
        grown = costs * np.exp(growth)
        carried = np.zeros((len(grown), plan.ranks, costs.shape[1]))
        carried[:, held] = np.add.reduceat(grown[:, order], starts, axis=1) if len(order) else 0.0
        carried += grown[:, ranks < 0].sum(axis=1)[:, None]
        peaks = problem.objective.loads(carried * factors[part][:, None]).max(axis=1)
        out[part] = problem.objective.time(peaks, **reduced, network=network[part])
    return out
