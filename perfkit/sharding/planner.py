"""Shard a workload's tables, or price a given plan: constraints as people write them, ways to place
a table, search."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.callers import find_stacklevel
from perfkit.ground.units import (
    Array,
    check_positive,
    check_type,
    format_bytes,
    steady,
)
from perfkit.models.distributions import unique_rows
from perfkit.platform.estimates import warn_once
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.readers.plans import find_plan
from perfkit.sharding.bound import find_lower_bound, list_choices, relax
from perfkit.sharding.candidates import check_memory, list_candidates, list_floors
from perfkit.sharding.constraints import (
    MIN_COLUMNS,
    InfeasibleError,
    read_constraints,
    read_min_columns,
)
from perfkit.sharding.kernels import choose_kernels, read_kernels
from perfkit.sharding.problem import DEVICE_RESOURCES, Constraints, Problem
from perfkit.sharding.progress import Report, follow
from perfkit.sharding.result import (
    PlanPrice,
    ShardingResult,
    note_narrow_shards,
    price_checked_plan,
)
from perfkit.sharding.search import search_assignment
from perfkit.sharding.setup import check_workload, set_up
from perfkit.sharding.small_tables import JoinedPlan, find_small_tables, join_small_tables
from perfkit.sharding.starts import fill_bases
from perfkit.sharding.state import Assignment, State
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KIND_OF_NAME, KINDS, PLACEMENT_KINDS, WHOLE
from perfkit.workloads.sizes import alter
from perfkit.workloads.table_kernels import FUSED
from perfkit.workloads.tables import EmbeddingTable, TableSet, name_tables
from perfkit.workloads.torchrec_format import UNPOOLED_KINDS

#: Sort key of each rule of thumb: the largest table is placed first, and the sums of keys are
#: balanced over ranks. ``random`` draws the rank, ``storage`` balances seconds. Sources:
#: docs/formulas.md, table 8.2.
BASELINES: MappingProxyType[str, Callable[[EmbeddingTable, int], float]] = MappingProxyType(
    {
        "random": lambda table, batch: 0.0,
        "size": lambda table, batch: float(table.rows * table.dim),
        "lookup": lambda table, batch: table.pooling * table.dim,
        "size-lookup": lambda table, batch: table.pooling * table.dim * float(np.log10(table.rows)),
        "unique-rows": lambda table, batch: (
            float(unique_rows(table.distribution, batch * table.pooling)) * table.dim
        ),
        "storage": lambda table, batch: float(table.nbytes),
    }
)
#: Share of the memory of a rank that should be free of a set of tables, as nothing says what else
#: lies there [-]; docs/formulas.md, table 8.2.
_LEFT_FREE = 0.15
#: A search goes on after the shards of small tables were joined where that costs more than this share
#: of the time, with this share of the work [-]; docs/formulas.md, table 8.2.
_LITTLE_GIVEN_UP, _SHARE_OF_JOINED = 1e-3, 0.5
#: A rule that a search may start from: equally many tables on each rank, which suits a host that
#: launches kernels for each table.
_EVENLY = "equally many"


def price_plan(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    plan: Any,
    *,
    ranks: int | None = None,
    memory: float | str | None = None,
    objective: str = "iteration",
    inputs: str = "local",
    min_columns: Any = MIN_COLUMNS,
    reserve: float = 0.0,
) -> PlanPrice:
    """Price a plan: time of an iteration, and seconds, messages and memory of every rank.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained.
    platform : Platform, str or Path
        On what.
    plan : Plan, ShardingPlan, mapping, str, Path or sequence of str
        Where its tables are stored: a plan; a plan of TorchRec, as objects or as JSON; a ``.json``
        file of either; or what TorchRec's planner prints, as text, as lines or in a file. Those of
        TorchRec say where the rows of each table lie (``compute_kernel``), and it is priced so.
    ranks : int, optional
        Number of ranks, for plans that do not say it; by default those of the tables that are on every
        rank, else all of the platform [-].
    memory : float or str, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration`` or ``additive``.
    inputs : str, optional
        ``local`` if the data loader of a rank reads the indices of its own tables, ``exchanged`` if
        an all_to_all brings them at the start of the iteration.
    min_columns : int or mapping, optional
        Least columns of a shard, as `shard` has it. A plan with narrower shards has a price, too,
        whose `warnings` say so [-].
    reserve : float, optional
        Share of the memory of a rank that stays free for what is not counted, as the dense part of the
        model of a set of tables. 0 by default: the memory of a GPU is quoted in GB where it has as many
        GiB, which leaves 6.9 % of it for the CUDA context, buffers of NCCL and fragments, as in
        `Prediction.memory`. TorchRec's planner keeps 0.15 free [-].

    Returns
    -------
    price : PlanPrice
        Time and memory of the plan; its ``fits`` says whether the memory suffices.

    Raises
    ------
    ValueError
        For a plan of other tables, splits that do not fit a table or a node, or kinds that the
        platform cannot price; and for a kernel of a table without a price, such as ``key_value``.

    Notes
    -----
    The time of a DLRM is a closed form that a search can bound, within 2 % of `perfkit.predict` for
    the same plan on GPUs, and 6 % where tables are split by rows. There is one exception: where the
    host sets the time, it takes as many ranks to send pooled rows as a balanced plan of whole tables
    has, the smaller of n tables and r ranks. `perfkit.predict` counts the s ranks that send some in
    this plan, each of which takes the host a copy. So this time is longer by

    .. math:: \\Delta t = (\\min(n, r) - s) \\, t_\\mathrm{copy}

    or less, where the device then sets the time of the prediction. A copy takes some 20 µs of the
    host of an H100: with 64 tables on 32 ranks of which 8 send, that is 0.5 ms.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(26, seed=0), batch=8192, embedding="fused")
    >>> price_plan(tables, "h100-sxm-8", Plan.round_robin(26, ranks=8)).fits
    True
    """
    check_workload(workload)
    platform = load_platform(platform)
    platform_ranks = platform.network.ranks
    placed = find_plan(plan, workload.tables, ranks=ranks, platform_ranks=platform_ranks)
    workload, plan = put_kernels(workload, placed.tables), placed.plan
    problem = set_up(workload, platform, plan.ranks, memory, objective, inputs, reserve)
    least = read_min_columns(name_tables(workload.tables), min_columns)
    constraints = replace(problem.constraints, min_columns=least)
    problem = replace(problem, constraints=constraints)
    plan.cut(workload.tables)
    for number, placement in enumerate(plan.placements):
        _check_placement(problem, number, placement)
    return price_checked_plan(problem, plan)


def put_kernels(workload: DLRM | TableSet, tables: Sequence[EmbeddingTable]) -> DLRM | TableSet:
    """The workload with these tables, which differ from its own in kernels alone."""
    if tuple(tables) == tuple(workload.tables):
        return workload
    changed: DLRM | TableSet = alter(workload, {"tables": tuple(tables)})
    return changed


def _check_placement(problem: Problem, number: int, placement: Placement) -> None:
    """Refuse the placement of a table that has no price on this platform."""
    kind, ranks, traits = placement.kind, placement.ranks, placement.traits
    shown = f"table {number} is {kind} on ranks {ranks}"
    if traits.copies_frequent_rows:
        known = ", ".join(problem.kinds)
        raise ValueError(f"{shown}; perfkit.predict prices that alone; take one of {known}")
    if kind not in problem.kinds:
        name = problem.costs.platform.name
        raise ValueError(
            f"{shown}; {name!r} has no model of its messages; take one of {', '.join(problem.kinds)}"
        )
    if traits.is_copied and problem.costs.workload.tables[number].host_bytes:
        kernel = problem.costs.workload.tables[number].kernel
        raise ValueError(
            f"{shown}, and its kernel is {kernel!r}; gradients of copies are averaged in device memory; "
            "place it in another way, or take kernel='fused'"
        )
    if not traits.is_inside_node:
        return
    ranks_per_node = problem.costs.ranks_per_node
    nodes = {rank // ranks_per_node for rank in ranks}
    fills_node = len(ranks) >= ranks_per_node
    if len(nodes) > 1 or (traits.fills_node and not fills_node):
        filling = " and ".join(k.name for k in PLACEMENT_KINDS if k.fills_node)
        raise ValueError(
            f"{shown}; it must be on ranks of one node, and {filling} on all "
            f"{ranks_per_node} of them"
        )


def shard(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    *,
    ranks: int | None = None,
    memory: float | str | None = None,
    objective: str = "iteration",
    seconds: float = 1.0,
    steps: int | None = None,
    seed: int = 0,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
    min_columns: Any = MIN_COLUMNS,
    split_small: bool = False,
    inputs: str = "local",
    kernels: Sequence[str] = (FUSED.name,),
    start: Any = None,
    reserve: float = 0.0,
    progress: bool | Callable[[float, float], None] = True,
) -> ShardingResult:
    """Search for the placement of embedding tables with the shortest iteration.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained; its batch is over all ranks.
    platform : Platform, str or Path
        On what: a platform, a name of the gallery or a file.
    ranks : int, optional
        Number of ranks; by default all of the platform [-].
    memory : float or str, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration``: the predicted time of an iteration, whose collectives wait for the slowest
        rank. ``additive``: the seconds of the tables on the slowest rank, without messages; tables
        are whole or split by columns.
    seconds : float, optional
        Work to spend on the search. Steps are counted, each with its time on one core of an AMD Zen
        5. So the same input, seed and seconds give the same plan on every machine. The preparation
        comes on top and is not counted: prices of all tables, the bound and the rules of thumb take
        1 to 4 ms a table. Where storing small tables whole costs more than 0.1 %, a second search that
        splits none of them takes half as much [s].
    steps : int, optional
        Number of steps in place of `seconds`: trades between ranks, and tables that are placed. The
        same input, seed and steps give the same plan, and with up to 20 tables more steps never give a
        slower one. With a few dozen tables, 7,000 steps take
        about a second [-].
    seed : int, optional
        Seed [-].
    pin : mapping, optional
        Rank of each table that must be whole on a given rank; tables by number or name.
    together, apart : sequence of groups, optional
        Groups of tables that must share a rank, or must not.
    forbid : str, sequence of str or mapping, optional
        Kinds of placement that no table may have; a mapping gives such kinds by table. The search
        without `forbid` goes first. It is repeated, with as much work each time, only if its plan
        uses what is forbidden.
    min_columns : int or mapping, optional
        Least columns of a shard of a table that is split by columns. A table with fewer than twice
        as many is never split so. A mapping gives them by table, and the others have 128. The
        default is that of TorchRec's planner, whose ``ParameterConstraints`` call it
        ``min_partition``; 1 sets no limit. With narrower shards than 128 columns a second search, with
        as much work, tries none of them, unless the first plan is below its bound: so more freedom
        finds nothing slower [-].
    split_small : bool, optional
        Whether small tables may stay in shards. By default a table whose weights and states take a
        thousandth of the memory of a rank or less is stored whole or copied after the search, as
        long as all of these together give up no more than the upper half of the 80 % interval of the
        time, and no more than 5 % of it. The result says what was given up.
    inputs : str, optional
        ``local`` if the data loader of a rank reads the indices of its own tables, ``exchanged`` if
        an all_to_all brings them at the start of the iteration.
    kernels : sequence of str, optional
        Where tables may lie that say nothing else (`EmbeddingTable.kernel`): with ``("fused",
        "uvm_caching")`` the search puts tables into host memory where device memory is too small,
        those first that free most bytes for the time that they add; `warnings` name them.
    start : Plan, ShardingPlan, mapping, str, Path or sequence of str, optional
        A plan to start from, in any form that `price_plan` takes. If it keeps the constraints and
        fits, no slower plan is found. It is for the kernels of the tables as given.
    reserve : float, optional
        Share of the memory of a rank that stays free for what is not counted, as the dense part of the
        model of a set of tables. 0 by default: the memory of a GPU is quoted in GB where it has as many
        GiB, which leaves 6.9 % of it for the CUDA context, buffers of NCCL and fragments, as in
        `Prediction.memory`. TorchRec's planner keeps 0.15 free [-].
    progress : bool or callable, optional
        Whether to show the best time so far, the bound and the gap in a line on a terminal;
        elsewhere nothing is shown. A function ``progress(done, time)`` gets the share of the work
        that is done [-] and the best time so far [s].

    Returns
    -------
    result : ShardingResult
        Plan, price, lower bound and gap, beside the rules of thumb; after Ctrl-C the best plan so
        far. Its `warnings` name the kinds of placement that were not tried, and why. For tables whose
        rows are not pooled these are the kinds inside nodes, which TorchRec does not have for them.
        They also say where a set of tables leaves less than 15 % of a GPU's memory for all else.

    Raises
    ------
    ValueError
        For bad input.
    InfeasibleError
        If no placement keeps memory and constraints; the message says what is missing and what
        would help.

    Notes
    -----
    The bound holds for all plans that keep the constraints, `min_columns` among them, and that
    `price_plan` can price. With `kernels` it holds for the kernels that were chosen, which `warnings`
    name: other tables in host memory may be faster. No plan is slower than the rules of thumb, which keep the constraints as well.

    The search tries these placements: whole on one rank; copied to every rank; columns halved one
    or more times, over any ranks or inside one node; rows split. Splits of small tables and copies
    of large ones are tried only where the bound uses them, because they mostly add work. Hybrid
    tables, whose frequent rows alone are copied, are not tried: `perfkit.predict` prices plans with
    them.

    ``row_wise`` always splits the rows over all ranks. ``table_row_wise`` splits them over the ranks
    of one node, and the search takes the cheapest node. Both need a model of reduce_scatter and
    all_gather, over all ranks or inside a node, and ``data_parallel`` needs all_reduce over all
    ranks. A kind is not tried if the platform has no such model; the result says so. Where both
    kinds can be priced, the time decides. Partial sums of ``row_wise`` cross the links between
    nodes, so it mostly wins where a table fits into no node.

    What is guaranteed: equal input gives an equal plan. If `forbid` names only what the plan
    without it does not use, plan and time stay the same, unless a rule of thumb under `forbid` is
    faster. Forbidding never lowers the bound. So a plan under `forbid` is never faster than the plan
    without it by more than the `gap` of the latter. Within that gap it may be, as both searches end
    after their work. The order of the tables does not matter, except among tables that are alike.
    Other constraints, and ranks that are named by `pin`, change the way of the search: another plan
    may be found, within the gap.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    >>> result = shard(tables, "h100-sxm-8", ranks=8, steps=2000)
    >>> result.gap < 0.05
    True
    """
    beyond_device = read_kernels(kernels)
    if ranks is None:
        ranks = load_platform(platform).network.ranks
    problem = set_up(workload, platform, ranks, memory, objective, inputs, reserve)
    if beyond_device:

        def search(changed: DLRM | TableSet) -> ShardingResult:
            """The same search with tables of other kernels."""
            return shard(
                changed,
                platform,
                ranks=ranks,
                memory=memory,
                objective=objective,
                seconds=seconds,
                steps=steps,
                seed=seed,
                pin=pin,
                together=together,
                apart=apart,
                forbid=forbid,
                min_columns=min_columns,
                split_small=split_small,
                inputs=inputs,
                start=start if changed.tables == workload.tables else None,
                reserve=reserve,
                progress=progress,
            )

        return choose_kernels(problem, beyond_device, search)
    budget = _read_budget(seconds, steps, seed)
    check_type("split_small", split_small, bool)
    start = _read_start(problem, start)
    names, order = name_tables(workload.tables), problem.costs.order
    kept = {"pin": pin, "together": together, "apart": apart, "min_columns": min_columns}
    kept["beyond_device"] = np.array([table.host_bytes > 0 for table in workload.tables])
    kept["unpooled"] = np.array([not table.pooled for table in workload.tables])
    constraints = read_constraints(names, problem.costs.ranks, order, **kept, forbid=forbid)
    unforbidden = read_constraints(names, problem.costs.ranks, order, **kept)
    prepared = _prepare(replace(problem, constraints=constraints))
    check_memory(prepared.problem, prepared.state.candidates)
    forbidden = _list_forbidden(constraints, unforbidden)
    # once for all steps of the search, as entering it takes as long as one of them
    with np.errstate(under="ignore"), follow(progress) as report:
        usual = _widen_shards(prepared.problem, constraints)
        report_search = report if usual is None else _report_half(report)
        attempts = _Attempts(
            prepared, unforbidden, forbidden, budget, split_small, start, report_search
        )
        outcome = attempts.run()
        if outcome.state is not prepared.state:
            outcome = _keep_all_constraints(outcome, prepared, budget.seed)
        best = outcome.best
        if usual is not None:
            best = _search_wide_shards(attempts, usual, best, report)
        # what is forbidden only makes plans slower
        bound = max(prepared.bound, attempts.bound)
        bound_of_any_width = _bound_any_width(prepared.problem, kept, forbid, bound)
    reasons = [f"{kind} was not tried: {reason}" for kind, reason in problem.left_out.items()]
    return ShardingResult(
        best.price.plan,
        best.price,
        bound,
        objective,
        attempts.work,
        attempts.interrupted,
        outcome.baselines,
        (
            *warn_once(tuple(reasons), find_stacklevel() + 1),
            *_note_unpooled(problem),
            *_note_full_ranks(problem, best.price),
        ),
        budget.seconds,
        budget.steps,
        bound_of_any_width,
        tuple(names[number] for number in best.tables),
        best.given_up,
        has_stalled=outcome.has_stalled,
    )


def _read_budget(seconds: Any, steps: Any, seed: Any) -> "_Budget":
    """What a search may take, from the arguments of `shard`."""
    work = check_positive("seconds", seconds)
    most_steps = None
    if steps is not None:
        most_steps = check_positive("steps", steps, integer=True)
    return _Budget(work, most_steps, check_positive("seed", seed, integer=True, zero=True))


def _list_forbidden(constraints: Constraints, unforbidden: Constraints) -> list[str]:
    """Kinds that are forbidden for a table that may have them otherwise."""
    forbidden = []
    for kind in KINDS:
        if (constraints.allowed[kind] < unforbidden.allowed[kind]).any():
            forbidden.append(kind)
    return forbidden


def _keep_all_constraints(outcome: "_Outcome", prepared: "_Prepared", seed: int) -> "_Outcome":
    """An outcome of a search without all that is forbidden, with prices and rules of thumb of the problem
    with it: the best of its plan and these."""
    baselines = _price_baselines(prepared.state, seed)
    fitting = [price for price in baselines.values() if price is not None]
    price = price_checked_plan(prepared.problem, outcome.best.price.plan)
    best = _choose_joined(outcome.best._replace(price=price), fitting)
    return outcome._replace(best=best, baselines=baselines)


def _count_column_shards(problem: Problem, constraints: Constraints) -> np.ndarray:
    """Most shards by columns of each table on these ranks [-]."""
    columns = np.array([table.dim for table in problem.costs.workload.tables])
    return np.minimum(constraints.count_column_shards(columns), problem.costs.ranks)


def _widen_shards(problem: Problem, constraints: Constraints) -> Constraints | None:
    """These constraints with at least `MIN_COLUMNS` columns in each shard; None if tables have as many
    shards with these as without."""
    if constraints.min_columns is None:
        return None
    least = np.maximum(constraints.min_columns, MIN_COLUMNS)
    widened = replace(constraints, min_columns=least)
    shards = _count_column_shards(problem, constraints)
    fewer_shards = _count_column_shards(problem, widened)
    # one shard is no split, and so is none
    if not (np.maximum(shards, 1) > np.maximum(fewer_shards, 1)).any():
        return None
    return widened


def _report_half(report: Report) -> Report:
    """Tell of a search that another one may follow, with as much work."""

    def report_search(done: float, time: float, bound: float) -> None:
        """Tell what is done of both."""
        report(done / 2, time, bound)

    return report_search


def _search_wide_shards(
    attempts: "_Attempts", usual: Constraints, best: JoinedPlan, report: Report
) -> JoinedPlan:
    """The best plan of a search, or a faster one of a search with the usual width of shards.

    More plans make a search longer, so it may miss what one among fewer plans finds. Where the plan is
    no slower than the bound of these, none of them is searched.
    """
    if attempts.interrupted:
        return best
    bound = attempts.bound
    problem = attempts.prepared.problem

    def report_rest(done: float, time: float, bound_of_wide: float) -> None:
        """Tell what is done of both searches, with the bound for all plans."""
        report((1 + done) / 2, min(time, best.price.time), bound)

    try:
        prepared = _prepare(replace(problem, constraints=usual))
        if best.price.time <= prepared.bound:
            report(1.0, best.price.time, bound)
            return best
        widened = _Attempts(
            prepared,
            replace(attempts.unforbidden, min_columns=usual.min_columns),
            attempts.forbidden,
            attempts.budget,
            attempts.split_small,
            attempts.start,
            report_rest,
        )
        found = widened.run().best
    except InfeasibleError:  # only narrower shards fit
        report(1.0, best.price.time, bound)
        return best
    attempts.work += widened.work
    attempts.interrupted |= widened.interrupted
    if found.price.time >= best.price.time:
        return best
    return found._replace(price=price_checked_plan(problem, found.price.plan))


def _note_unpooled(problem: Problem) -> tuple[str, ...]:
    """Which kinds were not tried for tables whose rows are not pooled, in words."""
    tables = problem.costs.workload.tables
    names = name_tables(tables)
    unpooled = [name for name, table in zip(names, tables, strict=True) if not table.pooled]
    kinds = [kind for kind in problem.kinds if kind not in UNPOOLED_KINDS]
    if not unpooled or not kinds or not problem.costs.has_inner_nodes:
        return ()
    named = repr(unpooled[0])
    if len(unpooled) > 1:
        named = f"{len(unpooled)} tables ({named} first)"
    return (
        f"{' and '.join(kinds)} were not tried for {named}, whose rows are not pooled: an "
        "EmbeddingCollection of TorchRec does not take them",
    )


def _note_full_ranks(problem: Problem, price: PlanPrice) -> list[str]:
    """That a rank has little memory left for what a set of tables does not say, in words."""
    used = float(price.memory.max()) + problem.reserved
    is_stated = not problem.memory_of_platform or problem.kept_free > 0
    is_stated |= isinstance(problem.costs.workload, DLRM)
    is_roomy = used <= (1 - _LEFT_FREE) * problem.memory
    if is_stated or not problem.costs.accelerated or is_roomy:
        return []
    return [
        f"the fullest rank has {format_bytes(used)} of its {format_bytes(problem.memory)} in use, and the "
        "dense part of the model, the CUDA context and buffers of NCCL are not counted; TorchRec's "
        f"planner leaves {_LEFT_FREE:.0%} free, as reserve={_LEFT_FREE:g} does"
    ]


def _bound_any_width(
    problem: Problem, kept: Mapping[str, Any], forbid: Any, bound: float
) -> float | None:
    """Lower bound where shards may have any number of columns; None if no table is kept from more
    shards, and at most `bound`, that of the given limits [s]."""
    costs, limited = problem.costs, problem.constraints
    splits_columns = [kind.name for kind in PLACEMENT_KINDS if kind.splits_columns]
    names = name_tables(costs.workload.tables)
    any_width = {**kept, "min_columns": 1}
    constraints = read_constraints(names, costs.ranks, costs.order, **any_width, forbid=forbid)
    may_be_split = np.zeros(len(names), dtype=bool)
    for kind in splits_columns:
        may_be_split |= constraints.allowed[kind]
    has_fewer_shards = _count_column_shards(problem, limited) < _count_column_shards(
        problem, constraints
    )
    if not (may_be_split & has_fewer_shards).any():
        return None
    unlimited = replace(problem, constraints=constraints)
    # rounding aside, more plans have no higher bound
    return min(find_lower_bound(unlimited, list_floors(unlimited)).time, bound)


class _Budget(NamedTuple):
    """What a search may take.

    Parameters
    ----------
    seconds : float
        Work [s].
    steps : int or None
        Number of steps in place of the work; None if the work counts [-].
    seed : int
        Seed of all random choices [-].
    """

    seconds: float
    steps: int | None
    seed: int


class _Prepared(NamedTuple):
    """A problem before its search.

    Parameters
    ----------
    problem : Problem
        What is placed.
    bound : float
        Lower bound of the time [s].
    bases : sequence of array of int
        Candidates of the units to start from, in relaxed problems [-].
    state : State
        The current assignment.
    helpful : mapping of str to array of bool
        By kind, units whose candidates of it are tried although they rarely help.
    lightest : array or None
        That of `Floors`.
    """

    problem: Problem
    bound: float
    bases: Sequence[np.ndarray]
    state: State
    helpful: Mapping[str, np.ndarray]
    lightest: Array | None


class _Outcome(NamedTuple):
    """What one search found.

    Parameters
    ----------
    state : State
        Its problem and candidates.
    best : JoinedPlan
        The best plan that fits, of its own and those of rules of thumb.
    baselines : dict of str to (PlanPrice or None)
        Prices of the rules of thumb; None for one that finds no room.
    has_stalled : bool
        Whether the second half of the search found nothing better.
    """

    state: State
    best: JoinedPlan
    baselines: dict[str, PlanPrice | None]
    has_stalled: bool


@np.errstate(under="ignore")
def _prepare(problem: Problem) -> _Prepared:
    """Bound a problem and list its candidates."""
    floors = list_floors(problem)
    bound = find_lower_bound(problem, floors)
    # Candidates that rarely help are tried where the bound uses them. Split rows also help tables in
    # host memory, where one link would carry all of a table.
    beyond_device = _find_units_beyond_device(problem)
    helpful = {}
    for kind in PLACEMENT_KINDS:
        if not kind.is_whole:
            helpful[kind.name] = bound.kinds == kind.name
        if kind.splits_rows:
            helpful[kind.name] |= beyond_device
    candidates = list_candidates(problem, helpful)
    relaxation = relax(problem, candidates, floors.lightest)
    bases = list_choices(relaxation)
    kinds_of_bound = candidates.choose_kinds(bound.kinds)
    if bound.set_by_host:
        bases.insert(0, kinds_of_bound)
    else:
        bases.append(kinds_of_bound)
    state = State(problem, candidates)
    bases = fill_bases(state, bases, relaxation.time_choice)
    return _Prepared(problem, bound.time, bases, state, helpful, floors.lightest)


def _find_units_beyond_device(problem: Problem) -> np.ndarray:
    """Which units have a table in host memory."""
    tables = problem.costs.workload.tables
    unit_of_table = problem.constraints.unit_of_table
    is_beyond = np.zeros(int(unit_of_table.max()) + 1, dtype=bool)
    is_beyond[unit_of_table[[table.host_bytes > 0 for table in tables]]] = True
    return is_beyond


@dataclass
class _Attempts:
    """Searches until a plan uses nothing that is forbidden.

    The search without `forbid` goes first: what it finds stays the plan if it uses nothing that is
    forbidden. So forbidding what a plan does not use changes nothing. Else the forbidden kinds that
    it uses are ruled out, and the search is repeated. `prepared` has all constraints, and `start` is
    a plan to start from. `bound` is the
    largest of the lower bounds of all searches [s].
    """

    prepared: _Prepared
    unforbidden: Constraints
    forbidden: Sequence[str]
    budget: _Budget
    split_small: bool
    start: Plan | None
    report: Report
    work: float = 0.0
    interrupted: bool = False
    bound: float = 0.0

    def run(self) -> _Outcome:
        """The outcome of the first search whose plan keeps all constraints."""
        ruled_out = set[str]()
        while True:
            last = len(ruled_out) == len(self.forbidden)
            outcome = self._search(self._rule_out(ruled_out), len(ruled_out), last)
            if outcome is None:  # nothing fits, and the last search says why
                ruled_out = set(self.forbidden)
                continue
            if last:
                return outcome
            price = outcome.best.price
            used = self._list_forbidden_kinds(price.plan)
            if not used:
                self.report(1.0, price.time, self.bound)
                return outcome
            ruled_out |= used
            if self.interrupted:  # a last plan, with no more work than a start
                ruled_out = set(self.forbidden)
                self.budget = self.budget._replace(steps=1)

    def _list_forbidden_kinds(self, plan: Plan) -> set[str]:
        """Kinds of placement of a plan that are forbidden for their tables."""
        allowed = self.prepared.problem.constraints.allowed
        used = set()
        for table, placement in enumerate(plan.placements):
            if not allowed[placement.kind][table]:
                used.add(placement.kind)
        return used

    def _rule_out(self, ruled_out: set[str]) -> _Prepared:
        """The problem where only these of the forbidden kinds are forbidden."""
        if len(ruled_out) == len(self.forbidden):
            return self.prepared
        problem = self.prepared.problem
        constraints = problem.constraints
        allowed = dict[str, np.ndarray]()
        for kind in KINDS:
            allows = constraints if kind in ruled_out else self.unforbidden
            allowed[kind] = allows.allowed[kind]
        return _prepare(replace(problem, constraints=replace(constraints, allowed=allowed)))

    def _price_start(self, problem: Problem) -> PlanPrice | None:
        """Price of the plan to start from; None if there is none, or it breaks a constraint."""
        if self.start is None or not _keeps_constraints(problem, self.start):
            return None
        price = price_checked_plan(problem, self.start)
        return price if price.fits else None

    def _search(self, prepared: _Prepared, number: int, last: bool) -> _Outcome | None:
        """Search once; None if nothing fits. If it is the last search, an error says what is
        missing."""
        problem, state, budget = prepared.problem, prepared.state, self.budget
        self.bound = max(self.bound, prepared.bound)
        share = 1 / (len(self.forbidden) + 1)

        def report(done: float, time: float) -> None:
            """Tell what this search has done, among those that there may be."""
            ends = last and done == 1
            self.report(1.0 if ends else share * (number + done), time, self.bound)

        baselines = _place_by_rules(state, [*BASELINES], budget.seed)
        placed = [assignment for assignment in baselines.values() if assignment is not None]
        if not problem.costs.one_kernel_for_all:  # each table has kernels of its own
            even = _place_by_rules(state, [_EVENLY], budget.seed)[_EVENLY]
            if even is not None:
                placed.append(even)
        prices_of_baselines = _price_assignments(state, baselines)
        price_of_start = self._price_start(problem)
        if price_of_start is not None:
            assignment = _find_assignment(state, price_of_start.plan)
            if assignment is not None:
                placed.append(assignment)
        search = search_assignment(
            state,
            prepared.bound,
            prepared.bases,
            placed,
            budget.seconds,
            budget.seed,
            budget.steps,
            report,
        )
        self.work += search.work
        self.interrupted |= search.interrupted
        prices = [price for price in prices_of_baselines.values() if price is not None]
        if price_of_start is not None:
            prices.append(price_of_start)
        overflow = search.incumbent.overflow
        if overflow <= 0:
            plan = _make_plan(state, search.incumbent)
            prices.insert(0, price_checked_plan(problem, plan))
        if not prices and last:
            if np.isinf(overflow):
                raise InfeasibleError(
                    "apart: no placement was found that keeps all tables apart; split fewer of "
                    "them, take more ranks, give more seconds or steps, or drop constraints"
                )
            capacity = format_bytes(problem.capacity)
            fault = f"the best one exceeds the {capacity} of a rank by {format_bytes(overflow)}"
            advice = (
                "allow more kinds or fewer min_columns, give more seconds or steps, ranks or "
                "memory, or drop constraints"
            )
            raise InfeasibleError(f"memory: no placement was found that fits; {fault}; {advice}")
        if not prices:
            return None
        best = JoinedPlan(_choose(prices))
        if not self.split_small:
            best = join_small_tables(problem, best.price)
            best = _join_earlier(state, search.improvements, best)
            if search.is_small:
                best = _settle_joined(state, best)
            else:
                best = self._search_joined(prepared, best)
        fitting = [price for price in prices_of_baselines.values() if price is not None]
        if price_of_start is not None:
            fitting.append(price_of_start)
        best = _choose_joined(best, fitting)
        return _Outcome(state, best, prices_of_baselines, search.has_stalled)

    def _search_joined(self, prepared: _Prepared, joined: JoinedPlan) -> JoinedPlan:
        """A plan whose small tables were joined, or a faster one of a search that splits none of them,
        with a share of the work."""
        time_with_shards = joined.price.time - joined.given_up
        if self.interrupted or joined.given_up <= _LITTLE_GIVEN_UP * time_with_shards:
            return joined
        problem, plan = prepared.problem, joined.price.plan
        is_split = []
        for placement in plan.placements:
            can_be = placement.traits.splits_columns or placement.traits.splits_rows
            is_split.append(can_be and len(placement.ranks) > 1)
        may_not_split = find_small_tables(problem) & ~np.array(is_split)
        may_not_split[list(joined.tables)] = True
        allowed = dict[str, np.ndarray]()
        for kind in PLACEMENT_KINDS:
            allowed[kind.name] = problem.constraints.allowed[kind.name]
            if kind.splits_columns or kind.splits_rows:
                allowed[kind.name] = allowed[kind.name] & ~may_not_split
        constraints = replace(problem.constraints, allowed=allowed)
        problem = replace(problem, constraints=constraints)
        candidates = list_candidates(problem, prepared.helpful)
        state = State(problem, candidates)
        assignment = _find_assignment(state, plan)
        if assignment is None:
            return joined
        relaxation = relax(problem, candidates, prepared.lightest)
        choices = [*list_choices(relaxation), assignment.candidates]
        budget, share = self.budget, _SHARE_OF_JOINED
        search = search_assignment(
            state,
            prepared.bound,
            fill_bases(state, choices, relaxation.time_choice),
            [assignment],
            share * budget.seconds,
            budget.seed,
            None if budget.steps is None else max(round(share * budget.steps), 1),
            lambda done, time: None,
        )
        self.work += search.work
        self.interrupted |= search.interrupted
        price = price_checked_plan(prepared.problem, _make_plan(state, search.incumbent))
        if not price.fits or price.time >= joined.price.time:
            return joined
        given_up = max(price.time - time_with_shards, 0.0)
        return joined._replace(price=price, given_up=given_up)


def _read_start(problem: Problem, start: Any) -> Plan | None:
    """The plan that a search is to start from; None if there is none."""
    if start is None:
        return None
    tables = problem.costs.workload.tables
    plan = find_plan(start, tables, ranks=problem.costs.ranks).plan
    plan.cut(tables)
    for number, placement in enumerate(plan.placements):
        _check_placement(problem, number, placement)
    return plan


def _keeps_constraints(problem: Problem, plan: Plan) -> bool:
    """Whether a plan keeps all constraints but the memory."""
    constraints = problem.constraints
    for table, placement in enumerate(plan.placements):
        if not constraints.allowed[placement.kind][table]:
            return False
    if note_narrow_shards(problem, plan):
        return False
    for unit, members in enumerate(constraints.units):
        ranks = {placement.ranks for placement in (plan.placements[table] for table in members)}
        if len(members) > 1 and len(ranks) > 1:
            return False
        if unit in constraints.pinned and ranks != {(constraints.pinned[unit],)}:
            return False
        own = set(plan.placements[members[0]].ranks)
        for other in constraints.list_conflicts(unit):
            if own & set(plan.placements[constraints.units[other][0]].ranks):
                return False
    return True


def _find_assignment(state: State, plan: Plan) -> Assignment | None:
    """The assignment of a plan; None if a table is placed as no candidate has it."""
    candidates = state.candidates
    tables = state.problem.costs.workload.tables
    state.clear()
    for unit, members in enumerate(state.problem.constraints.units):
        placement = plan.placements[members[0]]
        ranks = placement.ranks
        own = np.arange(state.first_candidate[unit], state.first_candidate[unit + 1])
        fitting = own[
            (candidates.kind[own] == placement.kind) & (candidates.shards[own] == len(ranks))
        ]
        is_even = not placement.columns or {*placement.columns} == {
            tables[members[0]].dim // len(ranks)
        }
        if not len(fitting) or not is_even or len({*ranks}) < len(ranks):
            return None
        state.assign(int(fitting[0]), np.array(ranks))
    return state.copy_assignment()


def _join_earlier(state: State, improvements: Sequence[Assignment], best: JoinedPlan) -> JoinedPlan:
    """The best plan whose small tables were joined: of this one and of those that the search found
    before, which may have had fewer small tables in shards."""
    least_time = best.price.time - best.given_up
    for assignment in reversed(improvements):
        if assignment.overflow > 0 or assignment.time >= best.price.time:
            break
        price = price_checked_plan(state.problem, _make_plan(state, assignment))
        price, joined, _ = join_small_tables(state.problem, price)
        if price.time >= best.price.time:
            continue
        tables = []
        for number in sorted({*best.tables, *joined}):
            traits = price.plan.placements[number].traits
            if traits.is_whole or traits.is_copied:
                tables.append(number)
        best = JoinedPlan(price, tuple(tables), price.time - least_time)
    return best


def _settle_joined(state: State, joined: JoinedPlan) -> JoinedPlan:
    """Give tables to the best nodes once more, as small ones that were joined no longer load these."""
    if not joined.tables or _find_assignment(state, joined.price.plan) is None:
        return joined
    if not state.settle_nodes():
        return joined
    price = price_checked_plan(state.problem, _make_plan(state, state.copy_assignment()))
    if not price.fits or price.time >= joined.price.time:
        return joined
    time_with_shards = joined.price.time - joined.given_up
    return joined._replace(price=price, given_up=max(price.time - time_with_shards, 0.0))


def _choose(prices: Sequence[PlanPrice]) -> PlanPrice:
    """The first one of the shortest time; among equal times, of the shortest time of the device."""
    return min(prices, key=lambda price: (price.time, -price.host_time))


def _choose_joined(joined: JoinedPlan, baselines: Sequence[PlanPrice]) -> JoinedPlan:
    """A plan whose small tables were joined, or a rule of thumb that is faster now."""
    best = _choose([joined.price, *baselines])
    if best is joined.price:
        return joined
    return JoinedPlan(best)


def _place_by_rules(state: State, rules: Sequence[str], seed: int) -> dict[str, Assignment | None]:
    """Assignments by rules of thumb; None for one that finds no room."""
    return {rule: _place_greedily(state, rule, seed) for rule in rules}


def _price_assignments(
    state: State, assignments: Mapping[str, Assignment | None]
) -> dict[str, PlanPrice | None]:
    """Prices of the plans of rules of thumb; None for one that finds no room."""
    prices = dict[str, PlanPrice | None]()
    for rule, assignment in assignments.items():
        prices[rule] = None
        if assignment is not None:
            prices[rule] = price_checked_plan(state.problem, _make_plan(state, assignment))
    return prices


def _price_baselines(state: State, seed: int) -> dict[str, PlanPrice | None]:
    """Prices of the plans of `BASELINES`."""
    return _price_assignments(state, _place_by_rules(state, [*BASELINES], seed))


def _make_plan(state: State, assignment: Assignment) -> Plan:
    """Turn an assignment of units into a plan of tables."""
    tables, candidates = state.problem.costs.workload.tables, state.candidates
    owners: list[int | Placement] = [0] * len(tables)
    units = state.problem.constraints.units
    for members, candidate in zip(units, assignment.candidates.tolist(), strict=True):
        kind = str(candidates.kind[candidate])
        if candidates.on_every_rank[candidate]:
            ranks = tuple(range(state.ranks))
        else:
            ranks = tuple(assignment.shard_ranks[state.shards_of(candidate)].tolist())
        widths: tuple[int, ...] = ()
        if KIND_OF_NAME[kind].splits_columns:
            shards = len(ranks)
            widths = (tables[members[0]].dim // shards,) * shards
        owner: int | Placement = ranks[0]
        if kind != WHOLE.name:
            owner = Placement(kind, ranks, widths)
        for table in members:
            owners[table] = owner
    return Plan(state.ranks, tuple(owners), tuple(name_tables(tables)))


def _weigh_units(state: State, rule: str) -> Array:
    """Sort key of each unit of tables by a rule of thumb: the sum of those of its tables [-]."""
    workload = state.problem.costs.workload
    keys = [1.0] * len(workload.tables)
    if rule != _EVENLY:
        keys = [BASELINES[rule](table, workload.batch) for table in workload.tables]
    weights = []
    for members in state.problem.constraints.units:
        weights.append(sum(keys[table] for table in members))
    return steady(np.array(weights))


def _place_greedily(state: State, rule: str, seed: int) -> Assignment | None:
    """Place units of tables by a rule of thumb, whole where that is allowed; None if one finds no
    room."""
    rng = np.random.default_rng([4, seed])
    whole = state.candidates.first_of_unit
    state.clear_for(whole)
    weights = _weigh_units(state, rule)
    balanced = weights
    if rule == "storage":
        balanced = state.candidate_load[whole][:, DEVICE_RESOURCES].sum(axis=1)
    order = np.argsort(-weights, kind="stable")
    if rule == "random":
        order = rng.permutation(len(whole))
    carried = np.zeros(state.ranks)
    for unit in order:
        candidate = whole[unit]
        has_one_shard = not state.candidates.on_every_rank[candidate]
        has_one_shard &= state.candidates.shards[candidate] == 1
        if not has_one_shard:  # it must not be whole on one rank
            choice = state.find_cheapest_ranks(candidate)
            if choice is None:
                return None
            state.assign(candidate, choice.ranks)
            continue
        free_ranks = np.flatnonzero(~state.cannot_take(unit, state.candidate_load[candidate]))
        if not len(free_ranks):
            return None
        if rule == "random":
            rank = rng.choice(free_ranks)
        else:
            rank = free_ranks[np.argmin(carried[free_ranks])]
        carried[rank] += balanced[unit]
        state.assign(candidate, np.array([rank]))
    return state.copy_assignment()
