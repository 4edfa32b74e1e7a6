"""Decisions: how far ranks scale, which batch, ranks or link meet a condition, and how jobs share ranks."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from perfkit.exploration.sweeps import Sweep, build
from perfkit.ground.results import Table
from perfkit.ground.units import check_choice, check_positive, check_type, rank_largest, show
from perfkit.platform.estimates import keep_quiet, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import list_resources
from perfkit.prediction.result import Prediction, predict

#: Largest batch of a rank, and largest and smallest factor on a resource in steps of 1 %, that are tried [-].
_BATCH, _FACTORS = 2**20, [1.01**power for power in range(-463, 464)]


def _count_ranks(platform: Platform, most: int) -> list[int]:
    """Numbers of ranks inside a node, and over whole nodes."""
    local = platform.network.ranks_per_node
    return [n for n in range(1, most + 1) if n <= local or n % local == 0]


def _find_batch(workload: Any) -> int:
    """The batch of a workload or of what builds one."""
    batch = getattr(build(workload, {}), "batch", None)
    if batch is None:
        raise ValueError(f"workload is {show(workload)}; it has no batch; give a DLRM, a Transformer or their class")
    return int(batch)


def _predict(workload: Any, batch: int, where: Platform, ranks: int, execution: str | None) -> Prediction:
    """Predict one of many."""
    with keep_quiet():
        return predict(build(workload, {"batch": batch}), where, ranks=ranks, execution=execution)


def scaling(
    workload: Any, platform: Named, ranks: Sequence[int] | None = None, *, strong: bool = False,
    execution: str | None = None,
) -> Sweep:  # fmt: skip
    """Predict an iteration on more and more ranks: how much of each is left, and what it is lost to.

    Parameters
    ----------
    workload : Workload or callable
        A DLRM or a Transformer; or what builds one from ``batch``, such as ``pk.Transformer.bert``.
    platform : Platform, str or Path
        Where.
    ranks : sequence of int, optional
        Numbers of ranks; 1, 2, 4 and so on to all of the platform, unless given [-].
    strong : bool, optional
        Whether all ranks share the batch of the workload; else it is that of the first number of ranks, and grows with
        them (weak scaling).
    execution : str, optional
        See `predict`.

    Returns
    -------
    scaling : Sweep
        Its table has the columns of a sweep and efficiency, the samples a second of a rank over those of the first row;
        kept, the efficiency over that of the row before, which is least where scaling bends; exposed, the share of the
        time in exposed collectives; and grew, the class of operations whose share of the time grew most since the row
        before: why it bends [-].

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.gpt2(batch=8, vocabulary=50304, dtype="bf16")
    >>> pk.scaling(gpt, "a100-sxm-8", [1, 8]).table()["grew"].to_list()
    [None, 'collective']
    """
    import polars as pl

    where, batch = load_platform(platform), _find_batch(workload)
    counts = [2**n for n in range(where.network.ranks.bit_length())] if ranks is None else list(ranks)
    rows, before, notes = list[dict[str, Any]](), dict[str, float](), dict[str, None]()
    for count in counts:
        size = batch if strong else batch * check_positive("ranks", count, integer=True) // counts[0]
        r = _predict(workload, size, where, count, execution)
        (low, high), memory, shares = r.interval(), r.memory(), defaultdict[str, float](float)
        for (_, kind), (_, seconds) in r.parts.items():
            shares[kind] += seconds / r.time
        growth = {kind: share - before.get(kind, 0.0) for kind, share in shares.items()}
        grew = [*growth][rank_largest([*growth.values()])[0]] if before else None
        rows.append({
            "ranks": count, "batch": size, "time": r.time, "low": low, "high": high, "needs": memory.total,
            "samples_per_s": size / r.time, "bottleneck": r.bottleneck, "fits": memory.fits,
            "exposed": r.communication()["exposed_share"].max(), "grew": grew,
        })  # fmt: skip
        before, notes = shares, notes | dict.fromkeys(r.warnings)
    if not rows:
        raise ValueError(f"ranks is {show(ranks)}; give at least one number of ranks, such as [1, 8, 64]")
    each = pl.col("samples_per_s") / pl.col("ranks")
    frame = pl.DataFrame(rows).with_columns(efficiency=each / each.first(), kept=each / each.shift(1))
    return Sweep(frame, ("ranks",), warn_once(tuple(notes), 3))


def solve_for(
    unknown: str, workload: Any, platform: Named, until: Callable[[Prediction], Any] | None = None, *, ranks: int = 1,
    strong: bool = False, execution: str | None = None,
) -> tuple[float, Prediction]:  # fmt: skip
    """Find the largest batch, the fewest ranks or the least of a resource with which a prediction meets a condition.

    Parameters
    ----------
    unknown : str
        ``batch``: the largest one, in multiples of the ranks; ``ranks``: the fewest, inside a node or over whole nodes;
        or a resource of `Platform.with_scale`, such as ``inter``: the smallest factor on it, to 1 %.
    workload : Workload or callable
        A DLRM or a Transformer; or what builds one from ``batch``, such as ``pk.Transformer.bert``.
    platform : Platform, str or Path
        Where; with as many ranks as may be tried.
    until : callable, optional
        The condition, from a prediction to true or false; that it fits into memory, unless given. What meets it with
        one value meets it with every smaller batch, with more ranks, with more of the resource.
    ranks : int, optional
        Ranks that take part, unless they are unknown [-].
    strong : bool, optional
        Whether all ranks share the batch of the workload where they are unknown; else it is that of one rank.
    execution : str, optional
        See `predict`.

    Returns
    -------
    value, prediction : (float, Prediction)
        Batch, ranks or factor [-], and what is predicted with it.

    Raises
    ------
    ValueError
        For an unknown that is not known, and where no value, or every batch or factor, meets the condition.

    Examples
    --------
    >>> import perfkit as pk
    >>> batch, r = pk.solve_for("batch", pk.Transformer.gpt2(vocabulary=50304, dtype="bf16"), "a100-sxm-8")
    >>> batch, r.fits
    (128, True)
    """
    where, count = load_platform(platform), check_positive("ranks", ranks, integer=True)
    check_choice("unknown", unknown, ["batch", "ranks", *list_resources(where)])
    batch, largest, meets = _find_batch(workload), unknown == "batch", until or (lambda r: r.fits)
    values: Sequence[Any] = range(count, _BATCH * count + 1, count) if largest else _FACTORS
    if unknown == "ranks":
        values = [n for n in _count_ranks(where, where.network.ranks) if not strong or batch % n == 0]

    def attempt(value: Any) -> Prediction:
        if unknown == "ranks":
            return _predict(workload, batch if strong else batch * value, where, value, execution)
        if unknown == "batch":
            return _predict(workload, value, where, count, execution)
        return _predict(workload, batch, where.with_scale(**{unknown: value}), count, execution)

    place = bisect_left(values, True, key=lambda value: bool(meets(attempt(value))) != largest) - largest
    resource = unknown not in ("batch", "ranks")  # of which the least that was tried may still be too much
    if not resource <= place < len(values) - largest:
        every = place > 0 if largest else resource and place == 0
        tried = f"{'every' if every else 'no'} {unknown} from {values[0]:.7g} to {values[-1]:.7g}"
        raise ValueError(f"{tried} meets the condition (memory, unless given); change it, the workload or the platform")
    found = attempt(values[place])
    warn_once(found.warnings, 3)
    return values[place], found


def allocate(
    jobs: Mapping[str, Any], platform: Named, ranks: int, worth: Callable[[Prediction], float] | None = None
) -> Table:
    """Share ranks out among jobs, so that the sum of what their predictions are worth is the largest there is.

    Parameters
    ----------
    jobs : mapping of str to Workload
        DLRMs and Transformers by name, each with a batch that its ranks share.
    platform : Platform, str or Path
        Where.
    ranks : int
        Ranks of all jobs together; every job gets at least one [-].
    worth : callable, optional
        From a prediction to a number of which more is better; unless given, how many times as fast it is as on one rank
        [-].

    Returns
    -------
    table : polars.DataFrame
        job, ranks [-], time [s], samples_per_s [1/s] and worth [-].

    Raises
    ------
    ValueError
        For fewer ranks than jobs.

    Notes
    -----
    The sum is exact, by dynamic programming over jobs. A job runs inside a node or on whole nodes, on numbers of ranks
    that divide its batch; which nodes have room for it is not looked into.
    """
    import polars as pl

    where, best = load_platform(platform), {0: tuple[tuple[Any, ...], ...]()}
    most = check_positive("ranks", ranks, integer=True, maximum=where.network.ranks)
    check_type("jobs", jobs, Mapping)
    for name, job in jobs.items():
        batch, counts, wider = _find_batch(job), _count_ranks(where, most), dict[int, tuple[tuple[Any, ...], ...]]()
        runs = [_predict(job, batch, where, count, None) for count in counts if batch % count == 0]
        for r, (used, chosen) in product(runs, best.items()):
            gain = worth(r) if worth else runs[0].time / r.time
            rows = (*chosen, (name, r.ranks, r.time, batch / r.time, gain))
            if used + r.ranks <= most:
                wider[used + r.ranks] = max(wider.get(used + r.ranks, rows), rows, key=_add_up)
        best = wider
    if not jobs or not best:
        raise ValueError(f"ranks is {ranks} for {len(jobs)} jobs; give jobs, and at least one rank for each")
    schema = ("job", "ranks", "time", "samples_per_s", "worth")
    return pl.DataFrame(max(best.values(), key=_add_up), schema=schema, orient="row")


def _add_up(rows: tuple[tuple[Any, ...], ...]) -> float:
    """What rows of jobs are worth together."""
    return math.fsum(row[-1] for row in rows)
