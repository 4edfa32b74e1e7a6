"""Explore strategies: rank those that fit, find the front of time, memory and ranks, and explain
the best one."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from perfkit.ground.forks import check_threads
from perfkit.ground.results import Picture, Sections, Table, Tabular
from perfkit.ground.units import (
    check_positive,
    check_type,
    format_bytes,
    format_time,
    is_listed,
    rank_largest,
    show,
)
from perfkit.models.partitions import RECOMPUTED
from perfkit.platform.estimates import find_interval, keep_quiet
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.breakdown import RESOURCES
from perfkit.prediction.predictor import predict
from perfkit.prediction.strategies import PARTS, price_strategies
from perfkit.prediction.uncertainty import has_idle_tensor_cores, say_idle_tensor_cores
from perfkit.sharding.planner import InfeasibleError, shard
from perfkit.workloads.blocks import UNFUSED
from perfkit.workloads.columns import HeldMemory
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import KINDS, Placement, Plan
from perfkit.workloads.strategy import Strategy, list_fits
from perfkit.workloads.transformer import Transformer

_FIELDS = tuple(own.name for own in fields(Strategy))
#: Columns that say how ranks share a DLRM.
_SHARED = ("tables", "mlps", "ranks")
#: Parts of the time of a DLRM: what limits its kernels, and the rest.
_BOUNDS = (*dict.fromkeys(RESOURCES.values()), "communication", "host", "imbalance", "memory")
#: Schedules that are tried, with their chunks; 0 means chunks of one layer [-].
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 0))
#: Most sequences of a micro-batch, and most ranks of one sequence, that are tried [-].
_MOST = 16


@dataclass(frozen=True)
class Exploration(Tabular):
    """Strategies that fit, the fastest first.

    Parameters
    ----------
    frame : polars.DataFrame
        See `table`.
    tried : int
        Strategies that were priced, including those that do not fit [-].
    summary : str
        What was priced, and where.
    platform : Platform
        Where it runs.
    plans : tuple of Plan
        Where the tables of a DLRM are stored, a plan for each row; empty for a Transformer.
    doubled : float
        Time of the fastest strategy if a rank had twice the memory [s].
    left_out : tuple of str
        Those of the given strategies that have no row, each with its reason.
    warnings : tuple of str
        What may be wrong with all strategies, or with the fastest plan of a DLRM.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)
    >>> pk.explore(gpt, "a100-sxm-8", ranks=8).best.ranks
    8
    """

    frame: Table
    tried: int
    summary: str
    platform: Platform
    plans: tuple[Plan, ...] = ()
    doubled: float = np.inf
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def table(self) -> Table:
        """A row for every strategy that fits, the fastest first.

        Returns
        -------
        frame : polars.DataFrame
            Fields of `Strategy`; ranks [-]; low and high end of the 80 % interval of the time, and
            its parts, see `perfkit.prediction.strategies.price_strategies` [s]; run, whether its passes
            were run, as closed forms are rough for it; spread [-]; needs,
            the memory of the fullest rank [B]; time [s]; tokens_per_s [1/s]. For a DLRM:
            ``tables``, how they are shared, instead of the fields; parts by what bounds them; and
            samples_per_s. ``mlps`` says how all other weights are shared.
        """
        return self.frame

    @property
    def best(self) -> Any:
        """The fastest `Strategy`, or for a DLRM the fastest `Plan`."""
        check_threads()
        return (
            self.plans[0]
            if self.plans
            else Strategy(**self.frame.select(_FIELDS).row(0, named=True))
        )

    def front(self) -> Table:
        """Strategies that no other one beats in time, memory and ranks together, the fastest
        first."""
        check_threads()
        rows, kept = self.frame.select("needs", "ranks").rows(), list[int]()
        for place, (needs, ranks) in enumerate(rows):
            if not any(rows[other][0] <= needs and rows[other][1] <= ranks for other in kept):
                kept.append(place)
        return self.frame[kept]

    def chart(self) -> Picture:
        """Draw the time of the strategies of `front` over the memory that they need, a line for
        each number of ranks.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        rows = self.front().sort("ranks", "needs").to_dicts()
        for row in rows:
            own = {key: row[key] for key in (_SHARED if self.plans else _FIELDS)}
            row["strategy"] = (
                ", ".join(f"{key} {own[key]}" for key in own)
                if self.plans
                else f"{Strategy(**own)}"
            )
        return plots.sweep_lines(
            rows, x="needs", series=["ranks"], title="The best strategies", about=self.summary
        )

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        yield "", self.chart()
        front = self.front()
        shown = (
            "time",
            "low",
            "high",
            "needs",
            "tokens_per_s",
            "samples_per_s",
            *_SHARED,
            *_FIELDS,
        )
        varied = [
            name
            for name in shown
            if name in front.columns and (name in shown[:4] or front[name].n_unique() > 1)
        ]
        yield "Nothing is faster with less memory and ranks", front.select(varied)
        yield "", self.platform

    def cost(self, price_per_gpu_hour: float, *, tokens: float) -> Table:
        """Time and cost of a whole training.

        Parameters
        ----------
        price_per_gpu_hour : float
            Price of one rank for an hour, in any currency [1/h].
        tokens : float
            Tokens to train on, or samples of a DLRM [-].

        Returns
        -------
        frame : polars.DataFrame
            Rows of `table` with ``days`` [d], ``gpu_hours`` [h] and ``cost`` in that currency, the
            cheapest first.
        """
        count, price = (
            check_positive("tokens", tokens),
            check_positive("price", price_per_gpu_hour, zero=True),
        )
        days = count / self.frame[self.frame.columns[-1]] / 86400
        hours = (24 * days * self.frame["ranks"]).alias("gpu_hours")
        found = self.frame.with_columns(days.alias("days"), hours, (price * hours).alias("cost"))
        return found.sort("cost", maintain_order=True)

    def explain(self) -> str:
        """The best strategy in words: where its time goes, how sure the choice is, and what would
        change it.

        A line for each other value of a field is about the fastest strategy with this value, which
        may differ in other fields too; these stand in brackets.
        """
        best, texts = self.frame.row(0, named=True), [repr(self)]
        parts, names = (_BOUNDS, _SHARED) if self.plans else (PARTS, _FIELDS)
        texts.append(
            "  "
            + ", ".join(f"{part} {best[part] / best['time']:.1%}" for part in parts if best[part])
        )
        near, gain = (self.frame["time"] <= best["high"]).sum() - 1, self.doubled / best["time"] - 1
        texts.append(
            f"  others inside its interval, which may be faster: {near}; with twice the memory: {gain:+.1%}"
        )
        if not self.plans and self.frame["run"].any():
            texts.append(
                f"  passes were run of {self.frame['run'].sum()} strategies near the fastest, whose "
                "closed forms are rough"
            )
        for name in names:
            for other in self.frame.unique(name, keep="first", maintain_order=True).to_dicts()[1:]:
                share, grown = (
                    other["time"] / best["time"] - 1,
                    max(parts, key=lambda own: other[own] - best[own]),
                )
                also = ", ".join(
                    f"{key} {other[key]}"
                    for key in names
                    if key != name and other[key] != best[key]
                )
                what = f"  {name} {other[name]} instead of {best[name]} ({also}): {share:+.1%}, mostly {grown}"
                texts.append(what.replace(" ()", ""))
        texts += [f"  left out: {text}" for text in self.left_out]
        texts += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(texts)

    def __repr__(self) -> str:
        best = self.frame.row(0, named=True)
        time, low, high = (format_time(best[name]) for name in ("time", "low", "high"))
        best_takes = (
            f"the best takes {time} ({low}–{high}) and {format_bytes(best['needs'])} a rank"
        )
        chosen = (
            ", ".join(f"{key} {best[key]}" for key in _SHARED) if self.plans else f"{self.best}"
        )
        text = f"{self.summary}: {len(self.frame)} of {self.tried} strategies fit; {best_takes}: {chosen}"
        if not self.left_out:
            return text
        further = len(self.left_out) - 1
        more = f", and {further} more, see left_out" if further else ""
        return f"{text}; left out: {self.left_out[0]}{more}"


def explore(
    model: Transformer | DLRM,
    platform: Named,
    ranks: int | Sequence[int] | None = None,
    *,
    memory: float | None = None,
    strategies: Sequence[Any] | None = None,
    execution: str | None = None,
) -> Exploration:
    """Find the fastest way in which ranks train a Transformer or a DLRM.

    Parameters
    ----------
    model : Transformer or DLRM
        The model; its batch is over all ranks. A Transformer's own settings for sharing,
        checkpoints and micro-batches are ignored.
    platform : Platform, str or Path
        Where it runs, such as ``h100-sxm-8x128``.
    ranks : int or sequence of int, optional
        Ranks that take part, or several counts to choose from; by default those of `strategies`
        [-].
    memory : float, optional
        What a rank may use; by default all memory of the device [B].
    strategies : sequence of Strategy or Plan, optional
        What to choose from; for a DLRM, plans. By default all powers of two of ranks that divide
        the model; for a DLRM, all tables placed in one way of `perfkit.workloads.placement.KINDS`,
        and the best plan of `perfkit.shard`. With the two fastest of these, MLPs are also
        sharded (ZeRO 1 and 3, over all ranks or inside nodes) and tensor parallel inside nodes.
    execution : str, optional
        ``eager`` or ``compiled``.

    Returns
    -------
    exploration : Exploration
        Strategies that fit, the fastest first.

    Raises
    ------
    ValueError
        For more ranks than the platform has, and if no strategy divides the model or none fits.

    Notes
    -----
    Times of a Transformer are closed forms, see `perfkit.prediction.strategies.price_strategies`.
    These are rough where stages are unlike, or exchange weights or gradients with each micro-batch:
    of such strategies the passes are run, one by one, if they fit and take at most a quarter longer
    than the fastest. Times of a DLRM are those of `perfkit.predict`. A table
    that cannot be cut in some way is stored whole on one rank. Ranks do the same work on
    MLPs wherever the tables are, so that the best plans of tables with copies of MLPs
    are nearly always the best ones with shared ones, too; see docs/accuracy.md.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)
    >>> pk.explore(gpt, "a100-sxm-8", 8, memory=30e9).best.zero
    3
    """
    import polars

    check_type("model", model, Transformer | DLRM)
    kind: Any = Plan if isinstance(model, DLRM) else Strategy
    check_type("strategies", strategies, Sequence[kind] | None)
    ranks = [*{int(own.ranks): 0 for own in strategies or ()}] if ranks is None else ranks
    where = load_platform(platform)
    listed_counts: Any = ranks if is_listed(ranks) else [ranks]
    counts = [*listed_counts]
    if not counts:
        raise ValueError("ranks is None; give a count of ranks, or strategies")
    counts = [
        int(check_positive("ranks", count, integer=True, maximum=where.network.ranks))
        for count in counts
    ]
    capacity, plans = (
        where.memory_of_rank if memory is None else check_positive("memory", memory),
        list[Plan](),
    )
    if isinstance(model, DLRM):
        given = [
            (plan, f"plan {n}") for n, plan in enumerate(strategies or ()) if plan.ranks in counts
        ]
        rows = {plan: _price_plan(model, where, execution, plan, name) for plan, name in given}
        for count in () if strategies else counts:
            rows |= _price_plans(model, where, execution, count, capacity)
        can, plans = np.ones(len(rows), dtype=bool), [*rows]
    else:
        listed = (
            Strategy.stack(strategies) if strategies else _list_strategies(model, where, counts)
        )
        can = np.logical_and.reduce(
            [*list_fits(model, listed).values(), np.isin(listed.ranks, counts)]
        )
    if not can.any():
        raise ValueError(
            f"no strategy on {show(ranks)} ranks divides the model and its batch; take other ranks"
        )
    if isinstance(model, DLRM):
        found = {key: np.array([row[key] for row in rows.values()]) for key in rows[plans[0]]}
        heads = {key: found.pop(key) for key in _SHARED}
    else:
        tried = listed.select(can)
        said = vars(tried) | {"ranks": tried.ranks}
        heads = {
            key: own.astype(np.int64) if own.dtype.kind == "f" else own for key, own in said.items()
        }
        found = price_strategies(model, where, tried, execution, memory=capacity or np.inf)
    if not (fits := found["needs"] <= (capacity or np.inf)).any():
        least = format_bytes(found["needs"].min())
        raise ValueError(
            f"no strategy on {show(ranks)} ranks fits; the least takes {least}; take more ranks"
        )
    # equal times differ in their last digits, and then the first, which has the fewest ranks, leads
    order = np.flatnonzero(fits)[rank_largest(-found["time"][fits])]
    low, high = find_interval(found["time"], found["spread"], 0.8)
    doubled = found["time"][found["needs"] <= 2 * (capacity or np.inf)].min()
    time, rate = found.pop("time"), "samples_per_s" if plans else "tokens_per_s"
    speed = {"time": time, rate: model.batch * getattr(model, "sequence", 1) / time}
    # the last ones are shown of a wide table
    columns = heads | {"low": low, "high": high} | found | speed
    frame = polars.DataFrame(
        {
            name: own[order]
            for name, own in columns.items()
            if plans or name not in HeldMemory._fields
        }
    )
    what = model.description if isinstance(model, DLRM) else model.without_sharing().description
    about = f"{what} on {' or '.join(map(str, counts))} ranks of {where.name}"
    left_out = list[str]()
    if strategies:
        left_out += _list_misfits(model, strategies, counts)
        names = plans if plans else [own for own, fit in zip(strategies, can, strict=True) if fit]
        for one, needs in zip(names, found["needs"], strict=True):
            if needs > (capacity or np.inf):
                short = f"{format_bytes(needs)} of {format_bytes(capacity or np.inf)}"
                left_out.append(f"{_name(one, strategies)} needs {short}")
    notes: tuple[str, ...] = ()
    if isinstance(model, DLRM):
        with keep_quiet():
            fastest = plans[order[0]]
            notes = predict(
                model, where, ranks=fastest.ranks, plan=fastest, execution=execution
            ).warnings
    elif model.dtype == "fp32" and has_idle_tensor_cores(where):
        notes = (say_idle_tensor_cores(where),)
    return Exploration(
        frame,
        len(fits),
        about,
        where,
        tuple(plans[n] for n in order if plans),
        float(doubled),
        tuple(left_out),
        notes,
    )


def _name(strategy: Strategy | Plan, strategies: Sequence[Any]) -> str:
    """A strategy as its fields, and a plan by its position among those given."""
    if isinstance(strategy, Strategy):
        return repr(strategy)
    return f"plan {list(strategies).index(strategy)}"


def _list_misfits(
    model: Transformer | DLRM, strategies: Sequence[Any], counts: Sequence[int]
) -> list[str]:
    """Strategies that cannot be priced, each with its reason."""
    misfits = []
    for one in strategies:
        name = _name(one, strategies)
        if one.ranks not in counts:
            misfits.append(f"{name} takes {one.ranks} ranks")
        elif isinstance(model, Transformer):
            parts = [part for part, fits in list_fits(model, one).items() if not np.all(fits)]
            if parts:
                sizes = ", ".join(f"{part} of the model, {getattr(model, part)}" for part in parts)
                misfits.append(f"{name} cannot share {sizes}")
    return misfits


def _price_plan(
    model: DLRM, where: Platform, execution: str | None, plan: Plan, tables: str
) -> dict[str, Any]:
    """How a plan shares a DLRM, its time and parts of it [s], spread [-] and memory [B]."""
    with keep_quiet():
        one = predict(model, where, ranks=plan.ranks, plan=plan, execution=execution)
    said = {
        name: value
        for name, value in plan.shared.items()
        if name != "dp" and value > (name == "tp")
    }
    shared = " ".join(f"{name} {value}" for name, value in said.items())
    row: dict[str, Any] = {
        "tables": tables,
        "mlps": shared or "copied",
        "ranks": plan.ranks,
        "time": one.time,
    }
    by_resource = one.causes.sum_by_resource()
    row |= {resource: by_resource[resource] for resource in _BOUNDS}
    row |= {"spread": one.spread, "needs": one.memory().total}
    return row


def _price_plans(
    model: DLRM, where: Platform, execution: str | None, ranks: int, capacity: Any
) -> dict[Plan, Any]:
    """Prices of plans with copies of MLPs, and of the two best of them with shared ones."""
    price, local = (
        partial(_price_plan, model, where, execution),
        min(where.network.ranks_per_node, ranks),
    )
    rows = {
        plan: price(plan, name) for plan, name in _list_plans(model, where, ranks, capacity).items()
    }
    best = sorted(
        rows, key=lambda plan: (max(rows[plan]["needs"], capacity or np.inf), rows[plan]["time"])
    )[:2]
    nodes = [(1, 3, local), (local, 3, 0)] if local < ranks and ranks % local == 0 else []
    ways = [(1, 1, 0), (1, 3, 0), (local, 0, 0), *nodes] if local > 1 else []
    for plan, (tp, zero, shards) in product(best, ways):
        with suppress(ValueError):  # ranks do not divide a width
            way = replace(plan, mlps=Strategy(tp=tp, dp=ranks // tp, zero=zero, shards=shards))
            rows[way] = price(way, rows[plan]["tables"])
    return rows


def _list_plans(
    model: DLRM, where: Platform, ranks: int, capacity: float | None
) -> dict[Plan, str]:
    """Plans that place all tables in one way, and the best plans of searches: with whole tables,
    and of any kind."""
    local, (copied, whole, by_columns, by_rows, *inside) = where.network.ranks_per_node, KINDS
    round_robin = Plan.round_robin(len(model.tables), ranks=ranks)
    found = {round_robin: "round_robin"}
    inside = inside if 1 < local < ranks and ranks % local == 0 else []
    for kind in (copied, by_columns, by_rows, *inside) if ranks > 1 else ():
        size, owners = local if kind in inside else ranks, list[int | Placement](round_robin.owners)
        for number, table in enumerate(model.tables):
            placement = Placement(kind, tuple(np.arange(size) + number * size % ranks))
            with suppress(ValueError):  # too few rows, or columns that do not divide
                placement.cut(table)
                owners[number] = placement
        found.setdefault(Plan(ranks, tuple(owners)), kind)
    for name, forbid in ((whole, {*KINDS} - {whole}), ("searched", ())):
        with suppress(InfeasibleError):
            found.setdefault(
                shard(model, where, ranks=ranks, memory=capacity, forbid=forbid).plan, name
            )
    return found


def _list_strategies(model: Transformer, where: Platform, counts: Sequence[int]) -> Strategy:
    """All strategies of powers of two: `tp` stays inside a node, and `zero` 3 is tried without
    stages only."""
    most = (where.network.ranks_per_node, min(model.layers, max(counts)), _MOST, _MOST)
    sizes = [2 ** np.arange(own.bit_length()) for own in most]
    held = 2 ** np.arange(min(model.experts or 1, max(counts)).bit_length())
    axes = [*sizes, range(len(_SCHEDULES)), RECOMPUTED, (0, 1, 3), counts, held, (False, True)]
    grid = np.meshgrid(*map(np.array, axes), indexing="ij", sparse=True)
    tp, pp, cp, micro, way, again, zero, ranks, ep, ulysses = grid
    names, chunks = (np.array(own)[way] for own in zip(*_SCHEDULES, strict=True))
    each, dp = -(-model.layers // pp), np.maximum(ranks // (tp * pp * cp), 1)
    parts = np.where(chunks == 0, each, chunks)
    own = (tp * pp * cp * dp == ranks) & ((way == 0) | (pp > 1) & (parts > 1) & (each % parts == 0))
    own = own & np.where(dp * cp > 1, (zero == 1) | (zero == 3) & (pp == 1), zero == 0)
    own = own & (dp % ep == 0) & (~ulysses | (cp > 1)) & (micro > 0)
    own = own & ((again != "selective") | (model.attention in UNFUSED))
    ways = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "ep": ep,
        "micro_batch": micro,
        "chunks": parts,
        "zero": zero,
    }
    ways |= {
        "schedule": names,
        "checkpoint": again,
        "sequence_parallel": tp > 1,
        "ulysses": ulysses,
    }
    return Strategy(**{key: np.broadcast_to(value, own.shape)[own] for key, value in ways.items()})
