"""Decisions: how far a job scales, which batch, ranks or link meet a condition, and how jobs share
ranks."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from perfkit.exploration.sweeps import Sweep, build
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import (
    check_choice,
    check_positive,
    check_type,
    count_values,
    format_count,
    read_number,
    show,
)
from perfkit.platform.estimates import keep_quiet, name_sides, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import list_resources
from perfkit.prediction.predictor import predict
from perfkit.prediction.result import Prediction
from perfkit.workloads.presets import find_workload
from perfkit.workloads.stack import Stack
from perfkit.workloads.strategy import Strategy, check_strategy_type

#: Largest batch of a rank, and factors on a resource, in steps of 1 %, that `solve_for` tries [-].
_BATCH = 2**20
_FACTORS: Sequence[float] = [1.01**power for power in range(-463, 464)]


def _count_ranks(platform: Platform, most: int) -> list[int]:
    """Numbers of ranks up to a most: inside one node, or on whole nodes."""
    local = platform.network.ranks_per_node
    return [n for n in range(1, most + 1) if n <= local or n % local == 0]


def _find_batch(workload: Any) -> int:
    """The batch of a workload, or of what a builder makes of its defaults."""
    batch = getattr(build(workload, {}), "batch", None)
    if batch is None:
        raise ValueError(
            f"workload is {show(workload)}; it has no batch; give a DLRM, a Transformer or such a class"
        )
    return int(batch)


def _predict(
    workload: Any,
    batch: int,
    where: Platform,
    ranks: int,
    execution: str | None,
    stack: str | Stack | None,
    strategy: Strategy | None = None,
) -> Prediction:
    """Predict a workload with another batch, without Python warnings."""
    one = build(workload, {"batch": batch})
    with keep_quiet():
        return predict(one, where, ranks=ranks, execution=execution, stack=stack, strategy=strategy)


def _count_ranks_of_replica(strategy: Strategy | None) -> int:
    """Ranks that hold the model once."""
    if strategy is None:
        return 1
    check_strategy_type(strategy)
    return int(strategy.tp * strategy.pp * strategy.cp)


def _add_replicas(strategy: Strategy | None, ranks: int) -> Strategy | None:
    """The same strategy with as many replicas as the ranks have room for."""
    if strategy is None:
        return None
    of_replica = _count_ranks_of_replica(strategy)
    if ranks % of_replica:
        raise ValueError(
            f"ranks is {ranks}; {of_replica} ranks hold the model once, as tp x pp x cp says; take a multiple "
            f"of {of_replica}"
        )
    return replace(strategy, dp=ranks // of_replica)


def scaling(
    workload: Any,
    platform: Named,
    ranks: Sequence[int] | None = None,
    *,
    strong: bool = False,
    execution: str | None = None,
    stack: str | Stack | None = None,
    strategy: Strategy | None = None,
) -> Sweep:
    """Predict an iteration on more and more ranks: how efficient each rank remains, and what costs
    most.

    Parameters
    ----------
    workload : Workload or callable
        A DLRM or a Transformer; or a callable that builds one from ``batch``, such as
        ``pk.Transformer.bert``.
    platform : Platform, str or Path
        Where it runs.
    ranks : sequence of int, optional
        Numbers of ranks; by default 1, 2, 4 and so on, up to all ranks of the platform, as many times
        those that hold the model once by the strategy [-].
    strong : bool, optional
        Whether the batch is the same for all numbers of ranks. By default (weak scaling) the batch
        of the workload is that of the first number of ranks, and it grows with them.
    execution : str, optional
        See `predict`.
    stack : str or Stack, optional
        The software, see `predict`.
    strategy : Strategy, optional
        How ranks share a Transformer, see `predict`. More ranks are more replicas: `dp` is that of the
        ranks, whatever it is here.

    Returns
    -------
    scaling : Sweep
        Its table has the columns of a sweep, and four more [-]. ``efficiency``: samples per second
        and rank, relative to the first row. ``kept``: the efficiency relative to the row before; it
        is smallest where scaling gets worse. ``exposed``: the share of the time in exposed
        collectives. ``grew``: the class of operations whose share of the time grew most since the
        row before; it says why scaling gets worse.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.gpt2(batch=8, vocabulary=50304, dtype="bf16")
    >>> pk.scaling(gpt, "a100-sxm-8", [1, 8]).table()["grew"].to_list()
    [None, 'collective']
    """
    check_threads()
    import polars as pl

    check_type("strong", strong, bool)
    check_type("execution", execution, str | None)
    workload = find_workload(workload)
    where, batch = load_platform(platform), _find_batch(workload)
    of_replica = _count_ranks_of_replica(strategy)
    if ranks is None:
        most_replicas = where.network.ranks // of_replica
        counts = [of_replica * 2**n for n in range(most_replicas.bit_length())]
        if not counts:
            raise ValueError(
                f"strategy takes {of_replica} ranks for one replica (tp x pp x cp), and {where.name} has "
                f"{where.network.ranks}; take a smaller one, or more nodes"
            )
    else:
        check_type("ranks", ranks, Sequence)
        count_values("ranks", ranks)
        counts = [check_positive("ranks", count, integer=True) for count in ranks]
    first = counts[0] if counts else 1
    if not strong and batch % first:
        fault = f"batch is {batch}; it is that of the first number of ranks, {first}"
        raise ValueError(
            f"{fault}, and grows with them; take a multiple of {first}, or strong=True"
        )
    rows: list[dict[str, Any]] = []
    notes: dict[str, tuple[str, ...]] = {}
    shares_before: dict[str, float] | None = None
    for count in counts:
        size = batch if strong else batch * count // counts[0]
        r = _predict(workload, size, where, count, execution, stack, _add_replicas(strategy, count))
        low, high = r.interval()
        memory = r.memory()
        shares = _share_time(r)
        grew = None
        if shares_before is not None:
            grew = _find_growth(shares_before, shares)
        rows.append(
            {
                "ranks": count,
                "batch": size,
                "time_s": r.time,
                "low_s": low,
                "high_s": high,
                "needs_bytes": memory.total,
                "samples_per_s": size / r.time,
                "bottleneck": r.bottleneck,
                "fits": memory.fits,
                "exposed": r.communication()["exposed_share"].max(),
                "grew": grew,
            }
        )
        shares_before = shares
        notes[format_count(count, "rank")] = r.warnings
    if not rows:
        raise ValueError(
            f"ranks is {show(ranks)}; give at least one number of ranks, such as [1, 8, 64]"
        )
    each = pl.col("samples_per_s") / pl.col("ranks")
    frame = pl.DataFrame(rows).with_columns(
        efficiency=each / each.first(), kept=each / each.shift(1)
    )
    about = f"{build(workload, {}).name} on {where.name}"
    return Sweep(frame, ("ranks",), about, (where,), warn_once(name_sides(notes), 3))


def _share_time(prediction: Prediction) -> dict[str, float]:
    """Share of each class of operations in the time of an iteration, over all phases [-]."""
    shares: dict[str, float] = {}
    for (_, kind), (_, seconds) in prediction.parts.items():
        shares[kind] = shares.get(kind, 0.0) + seconds / prediction.time
    return shares


def _find_growth(before: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """The class of operations whose share grew most; the first of those that grew alike."""
    return max(shares, key=lambda kind: round(shares[kind] - before.get(kind, 0.0), 9))


def solve_for(
    unknown: str,
    workload: Any,
    platform: Named,
    until: Callable[[Prediction], Any] | None = None,
    *,
    ranks: int = 1,
    strong: bool = False,
    execution: str | None = None,
    stack: str | Stack | None = None,
) -> tuple[float, Prediction]:
    """Find the largest batch, the fewest ranks, or the smallest factor on a resource that meets a
    condition.

    Parameters
    ----------
    unknown : str
        ``batch``: the largest one, a multiple of the ranks. ``ranks``: the fewest, inside one node
        or on whole nodes. Or a resource of `Platform.with_scale`, such as ``inter``: the smallest
        factor on it, to 1 %.
    workload : Workload or callable
        A DLRM or a Transformer; or a callable that builds one from ``batch``, such as
        ``pk.Transformer.bert``.
    platform : Platform, str or Path
        Where it runs, with at least as many ranks as may be tried.
    until : callable, optional
        The condition: takes a prediction, returns true or false; by default, that it fits into
        memory. If a value meets it, every smaller batch, more ranks, or more of the resource must
        meet it too.
    ranks : int, optional
        Ranks that take part, if they are not the unknown [-].
    strong : bool, optional
        If the ranks are the unknown: whether they share the batch of the workload. By default that
        is the batch of one rank.
    execution : str, optional
        See `predict`.
    stack : str or Stack, optional
        The software, see `predict`.

    Returns
    -------
    value, prediction : (float, Prediction)
        Batch, ranks or factor [-], and the prediction with it.

    Raises
    ------
    ValueError
        For another name of an unknown; if no value meets the condition, or if every batch or factor
        does.

    Examples
    --------
    >>> import perfkit as pk
    >>> batch, r = pk.solve_for("batch", pk.Transformer.gpt2(vocabulary=50304, dtype="bf16"), "a100-sxm-8")
    >>> batch, r.fits
    (128, True)
    """
    where, count = load_platform(platform), check_positive("ranks", ranks, integer=True)
    check_choice("unknown", unknown, ["batch", "ranks", *list_resources(where)])
    check_type("until", until, Callable | None)
    check_type("strong", strong, bool)
    check_type("execution", execution, str | None)
    batch, values = _find_batch(workload), _FACTORS
    if unknown == "batch":
        values = range(_BATCH * count, 0, -count)
    if unknown == "ranks":
        values = [
            n for n in _count_ranks(where, where.network.ranks) if not strong or batch % n == 0
        ]

    def attempt(value: Any) -> Prediction:
        if unknown == "ranks":
            size = batch if strong else batch * value
            return _predict(workload, size, where, value, execution, stack)
        if unknown == "batch":
            return _predict(workload, value, where, count, execution, stack)
        scaled = where.with_scale(**{unknown: value})
        return _predict(workload, batch, scaled, count, execution, stack)

    def meets(value: Any) -> bool:
        prediction = attempt(value)
        return bool(prediction.fits) if until is None else _read_truth(until(prediction))

    # the first that meets it
    place = bisect_left(values, True, key=meets)
    if place == len(values) or (place == 0 and unknown != "ranks"):
        tried = (
            f"{'no' if place else 'every'} {unknown} from {min(values):.7g} to {max(values):.7g}"
        )
        raise ValueError(
            f"{tried} meets the condition (by default: memory); change it, the workload or the platform"
        )
    found = attempt(values[place])
    warn_once(found.warnings, 3)
    return values[place], found


def _read_truth(answer: Any) -> bool:
    """What `until` answers, as True or False."""
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if isinstance(answer, np.ndarray) and answer.ndim == 0 and answer.dtype == bool:
        return bool(answer)
    raise ValueError(
        f"until answers {show(answer)}; it must answer True or False, as lambda r: r.fits does"
    )


def _find_worth(
    prediction: Prediction, slowest: Prediction, worth: Callable[[Prediction], float] | None
) -> float:
    """What a prediction of a job is worth: how much faster it is, or what the user says."""
    if worth is None:
        return slowest.time / prediction.time
    answer = worth(prediction)
    number = read_number(answer)
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"worth answers {show(answer)}; it must answer a finite number, as lambda r: 1 / r.time"
        )
    return float(number)


class _Run(NamedTuple):
    """A job on some ranks: its name, the ranks [-], time [s], samples in a second [1/s], and what
    it is worth [-]."""

    job: str
    ranks: int
    time_s: float
    samples_per_s: float
    worth: float


class _Division(NamedTuple):
    """A division of ranks among jobs: what it is worth [-], and the run of each job."""

    worth: float
    runs: tuple[_Run, ...]


def _list_runs(
    name: str,
    job: Any,
    where: Platform,
    most: int,
    worth: Callable[[Prediction], float] | None,
) -> list[_Run]:
    """A job on each number of ranks that divides its batch."""
    batch = _find_batch(job)
    counts = [count for count in _count_ranks(where, most) if batch % count == 0]
    predictions = [_predict(job, batch, where, count, None, None) for count in counts]
    runs = []
    for r in predictions:
        gain = _find_worth(r, predictions[0], worth)
        runs.append(_Run(name, r.ranks, r.time, batch / r.time, gain))
    return runs


def allocate(
    jobs: Mapping[str, Any],
    platform: Named,
    ranks: int,
    worth: Callable[[Prediction], float] | None = None,
) -> Table:
    """Divide ranks among jobs, so that the sum of what their predictions are worth is as large as
    possible.

    Parameters
    ----------
    jobs : mapping of str to Workload
        DLRMs and Transformers by name, each with a batch that its ranks share.
    platform : Platform, str or Path
        Where they run.
    ranks : int
        Ranks of all jobs together; every job gets at least one [-].
    worth : callable, optional
        Takes a prediction and returns a number, more is better; by default, how many times faster
        it is than the same job on one rank [-].

    Returns
    -------
    table : polars.DataFrame
        job, ranks [-], time_s [s], samples_per_s [1/s] and worth [-].

    Raises
    ------
    ValueError
        For no jobs, and for fewer ranks than jobs.

    Notes
    -----
    The sum is exact, by dynamic programming over jobs. A job runs inside one node or on whole
    nodes, on numbers of ranks that divide its batch. Which nodes have room for it is not checked.
    """
    import polars as pl

    where = load_platform(platform)
    most = check_positive("ranks", ranks, integer=True, maximum=where.network.ranks)
    check_type("jobs", jobs, Mapping)
    check_type("worth", worth, Callable | None)
    # the best division among the jobs so far, by the ranks that it takes
    best = {0: _Division(0.0, ())}
    for name, job in jobs.items():
        wider: dict[int, _Division] = {}
        runs = _list_runs(name, job, where, most, worth)
        for run, (taken_before, division) in product(runs, best.items()):
            taken = taken_before + run.ranks
            if taken > most:
                continue
            total = division.worth + run.worth
            if taken not in wider or total > wider[taken].worth:
                wider[taken] = _Division(total, (*division.runs, run))
        best = wider
    if not jobs or not best:
        raise ValueError(
            f"ranks is {ranks} for {len(jobs)} jobs; give jobs, and at least one rank for each"
        )
    most_worth = max(best.values())
    return pl.DataFrame(most_worth.runs, schema=_Run._fields, orient="row")
