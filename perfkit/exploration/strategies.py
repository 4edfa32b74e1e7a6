"""Explore strategies: rank those that fit, find the front of time, memory and ranks, and explain
the best one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from perfkit.exploration.recomputation import list_cheapest_checkpoints
from perfkit.ground.forks import check_threads
from perfkit.ground.notes import write_warnings
from perfkit.ground.quantities import check_bytes, check_seconds
from perfkit.ground.results import (
    Picture,
    Sections,
    Table,
    Tabular,
    name_column,
    write_cell,
    write_notes,
)
from perfkit.ground.units import (
    Array,
    check_positive,
    check_type,
    format_bytes,
    format_interval,
    format_time,
    is_listed,
    rank_largest,
    show,
)
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.estimates import find_interval, keep_quiet
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.host_memory import share_hosts
from perfkit.platform.platform import Platform
from perfkit.prediction.breakdown import RESOURCES
from perfkit.prediction.goodput import (
    TYPICAL_RESTART,
    expect_hours,
    plan_checkpoints,
    read_mtbf,
)
from perfkit.prediction.memory import Room
from perfkit.prediction.next_steps import advise_plans, list_fitting_plans, list_next_steps
from perfkit.prediction.predictor import predict
from perfkit.prediction.strategies import NEAR, PARTS, price_strategies
from perfkit.sharding.constraints import MIN_COLUMNS
from perfkit.sharding.planner import InfeasibleError, shard
from perfkit.workloads.attention_blocks import UNFUSED
from perfkit.workloads.columns import HeldMemory
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KINDS, PLACEMENT_KINDS, WHOLE, PlacementKind
from perfkit.workloads.presets import find_workload
from perfkit.workloads.stack import (
    Stack,
    apply_stack,
    can_run,
    find_stack,
    share_states,
    state_strategy,
)
from perfkit.workloads.strategy import CP_KINDS, Strategy
from perfkit.workloads.strategy_fits import can_share, explain_fit, explain_misfit, list_fits
from perfkit.workloads.transformer import Transformer

_FIELDS = tuple(own.name for own in fields(Strategy))
#: Columns that say how ranks share a DLRM.
_SHARED = ("tables", "mlps", "ranks")
#: How a plan says that no ranks share an MLP by some field; 0 where it is not named [-].
_SHARED_BY_NONE = {"tp": 1}
#: Parts of the time of a DLRM: what limits its kernels, and the rest.
_BOUNDS = (*dict.fromkeys(RESOURCES.values()), "communication", "host", "imbalance", "memory")
#: What strategies take of memories.
_MEMORY = ("needs", "reserve", "on_host")
#: Schedules that are tried, with their chunks; 0 means chunks of one layer [-].
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 0))
#: What is computed again in all strategies that are tried; further forms under a stated memory.
_CHECKPOINTS = ("none", "selective", "full")
#: Most passes of micro-batches through layers that are predicted for the warnings of a strategy, and
#: the micro-batches that are predicted of others: both take less than a second [-].
_MOST_PASSES, _FEW = 1_000, 2
#: Least memory that somebody may mean in bytes [B].
_LEAST_MEMORY = 1e6
#: Most ranks of one sequence that are tried, and most sequences of a micro-batch where these are
#: long [-].
_MOST = 16
#: Tokens of a micro-batch up to which more sequences are tried; docs/formulas.md, table 9.4 [-].
_MOST_TOKENS = 32_768


#: What parts of the time are called in texts.
WORDS_OF_PARTS = {
    "work": "computation",
    "tensor": "TP communication",
    "context": "CP communication",
    "experts": "EP communication",
    "stages": "PP communication",
    "bubble": "pipeline bubble",
    "replicas": "DP communication",
    "update": "weight update",
}
#: Columns of what is trained in a second, of which each table has one.
_RATES = ("tokens_per_s", "images_per_s", "samples_per_s")
#: Columns of how ranks share a model that a table has first.
_SHOWN_FIRST = (
    "ranks",
    "tp",
    "pp",
    "cp",
    "dp",
    "ep",
    "zero",
    "micro_batch",
    "checkpoint",
    "schedule",
)
#: Rows of the Pareto front that a report shows [-].
_SHOWN_OF_FRONT = 10


@dataclass(frozen=True)
class OneStrategy:
    """A strategy or plan beside those of a search.

    Parameters
    ----------
    way : Strategy or Plan
        How ranks share the model.
    row : mapping
        Its row, as in `Exploration.table`.
    shortage : str, optional
        What it needs, and of how much; None where it fits.
    """

    way: Any
    row: Mapping[str, Any]
    shortage: str | None = None

    @property
    def label(self) -> str:
        """The strategy or plan in short."""
        return _label_row(self.row, is_plan=isinstance(self.way, Plan))


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
    room : Room
        What a rank may use.
    yours : OneStrategy, optional
        The strategy that is used now; None where none is named.
    too_large : OneStrategy, optional
        The fastest one that would fit into twice the memory and does not fit; None where it is no
        faster than the fastest that fits.
    warn : callable
        Finds the `warnings`.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)
    >>> pk.explore(gpt, "a100-sxm-8", ranks=8).best.ranks
    8
    """

    report_title = "Strategies that fit, the fastest first"

    frame: Table
    tried: int
    summary: str
    platform: Platform
    plans: tuple[Plan, ...] = ()
    doubled: float = np.inf
    left_out: tuple[str, ...] = ()
    room: Room = field(default_factory=Room)
    yours: OneStrategy | None = None
    too_large: OneStrategy | None = None
    warn: Callable[[], tuple[str, ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What makes the time of the fastest strategy or plan less certain, and what somebody may
        not have chosen: what `perfkit.predict` says of it. It is predicted when this is first asked
        for, with a strategy of many micro-batches for two of them."""
        return self.warn()

    def table(self) -> Table:
        """A row for every strategy that fits, the fastest first.

        Returns
        -------
        frame : polars.DataFrame
            time_s, low_s and high_s, the ends of its 80 % interval [s]; needs_bytes, the memory of the
            fullest rank [B]; tokens_per_s [1/s]; ranks [-]; fields of `Strategy`; stack, the software;
            parts of the time, such as work_s and bubble_s, see
            `perfkit.prediction.strategies.price_strategies` [s]; run, whether its passes were run,
            in place of a closed form; spread [-]; and of a Transformer reserve_bytes, what its process
            takes beside needs_bytes, which have to fit together, and on_host_bytes, what a rank takes
            of the memory of its host [B]. For a DLRM: ``tables``, how they are shared, instead of the
            fields; parts by what bounds them, such as memory_s; and samples_per_s. ``mlps`` says how all
            other weights are shared.
        """
        from perfkit.ground.frames import ResultFrame  # imports polars

        return ResultFrame(self.frame)

    @property
    def _rate(self) -> str:
        """Column of what is trained in a second."""
        return next(name for name in _RATES if name in self.frame.columns)

    @property
    def best(self) -> Any:
        """The fastest `Strategy`, or for a DLRM the fastest `Plan`."""
        check_threads()
        if self.plans:
            return self.plans[0]
        return _read_strategy(self.frame)

    def front(self) -> Table:
        """Strategies that no other one beats in time, memory and ranks together, the fastest
        first."""
        check_threads()
        needs, ranks = self.frame["needs_bytes"].to_list(), self.frame["ranks"].to_list()
        kept: list[int] = []
        for place in range(len(needs)):
            is_beaten = any(
                needs[faster] <= needs[place] and ranks[faster] <= ranks[place] for faster in kept
            )
            if not is_beaten:
                kept.append(place)
        from perfkit.ground.frames import ResultFrame  # imports polars

        return ResultFrame(self.frame[kept])

    def chart(self) -> Picture:
        """Draw the time of the strategies of `front` over the memory that they need, a line for
        each number of ranks, ten of them with their names, and yours.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        points = []
        if self.yours is not None:
            points.append(self._make_point(self.yours.row) | {"is_yours": True})
        front = self.front().sort("ranks", "needs_bytes")
        points += [self._make_point(row) for row in front.to_dicts()]
        return plots.strategy_front(
            points, title="The fastest strategies for each amount of memory", about=self.summary
        )

    def _make_point(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What `perfkit.plots.strategy_front` draws of a row."""
        if self.plans:
            strategy = ", ".join(f"{name} {row[name]}" for name in _SHARED)
        else:
            strategy = repr(_make_strategy(row))
        return {
            "needs_bytes": row["needs_bytes"],
            "time_s": row["time_s"],
            "low_s": row["low_s"],
            "high_s": row["high_s"],
            "ranks": row["ranks"],
            "label": _label_row(row, is_plan=bool(self.plans)),
            "strategy": strategy,
        }

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        yield "", self.chart()
        front = self.front()
        shown = front.sort("time_s").head(_SHOWN_OF_FRONT)
        figures = ["time_s", "low_s", "high_s", "needs_bytes"]
        others = ("tokens_per_s", "samples_per_s", "images_per_s", *_SHARED, *_FIELDS)
        varied = [name for name in others if name in shown.columns and shown[name].n_unique() > 1]
        heading = "Pareto front: nothing is faster with less memory and ranks"
        if len(front) > len(shown):
            heading += f" (the fastest {len(shown)} of {len(front)})"
        yield heading, shown.select(figures + varied)
        if self.yours is not None:
            yield "Yours beside the fastest", self._list_yours(self.yours, figures)
        yield "", self.platform

    def _list_yours(self, yours: OneStrategy, figures: Sequence[str]) -> list[Sequence[str]]:
        """Rows of text, heads first: the fastest strategy and yours."""
        names = [name_column(name) for name in figures]
        rows: list[Sequence[str]] = [["", "strategy", *names, "longer by"]]
        best = self.frame.row(0, named=True)
        for name, row in (("fastest", best), ("yours", yours.row)):
            label = _label_row(row, is_plan=bool(self.plans))
            cells = [write_cell(column, float(row[column]), None) for column in figures]
            longer = row["time_s"] / best["time_s"] - 1
            rows.append([name, label, *cells, f"{longer:.1%}" if longer else "–"])
        return rows

    def keep_only(self, one: OneStrategy) -> "Exploration":
        """Take a single strategy, whether it fits or not, so that `cost` is that of this one.

        Parameters
        ----------
        one : OneStrategy
            Such as `yours` or `too_large`.

        Returns
        -------
        exploration : Exploration
            The same with one row.
        """
        import polars

        columns = {name: [one.row[name]] for name in self.frame.columns}
        frame = polars.DataFrame(columns, schema=self.frame.schema)
        plans = (one.way,) if self.plans else ()
        return replace(self, frame=frame, plans=plans)

    def cost(
        self,
        price_per_gpu_hour: float,
        *,
        tokens: float,
        mtbf: float | str | None = None,
        checkpoint: float | str | None = None,
        restart: float | str | None = None,
    ) -> Table:
        """Time and cost of a whole training.

        Parameters
        ----------
        price_per_gpu_hour : float
            Price of one rank for an hour, in any currency [1/h].
        tokens : float
            Tokens to train on, or samples of a DLRM [-].
        mtbf : float or str, optional
            Mean time between failures of one rank, or the name of a published run, see `Prediction.cost`:
            then the time is that until the run is done in spite of them [s].
        checkpoint : float or str, optional
            With `mtbf`: time for which writing one checkpoint stops the run [s].
        restart : float or str, optional
            With `mtbf`: from a failure until the run goes on; by default
            `perfkit.prediction.goodput.TYPICAL_RESTART` [s].

        Returns
        -------
        frame : polars.DataFrame
            Rows of `table` behind ``cost`` in that currency, ``days`` [d] and ``gpu_hours`` [h], the
            cheapest first; with `mtbf` also ``goodput``, the share of the time that is training which
            counts [-].

        Raises
        ------
        ValueError
            For `mtbf` without `checkpoint`, and for these two without `mtbf`.
        """
        count = check_positive("tokens", tokens)
        price = check_positive("price", price_per_gpu_hour, zero=True)
        days = count / self.frame[self._rate] / 86400
        goodput = _find_goodput(self.frame, (24.0 * days).to_list(), mtbf, checkpoint, restart)
        if goodput is not None:
            days = days / goodput
        hours = (24 * days * self.frame["ranks"]).alias("gpu_hours")
        found = self.frame.with_columns(days.alias("days"), hours, (price * hours).alias("cost"))
        if goodput is not None:
            found = found.with_columns(goodput=goodput)
        from perfkit.ground.frames import ResultFrame  # imports polars

        # what was asked for stands first
        asked = [name for name in ("cost", "days", "gpu_hours", "goodput") if name in found.columns]
        ranked = found.sort("cost", maintain_order=True)
        return ResultFrame(
            ranked.select(asked + [name for name in ranked.columns if name not in asked])
        )

    def explain(self) -> str:
        """The best strategy in words: where its time goes, how sure the choice is, and what would
        change it.

        A line for each other value of a field is about the fastest strategy with this value, which
        may differ in other fields too; these stand in brackets.
        """
        best = self.frame.row(0, named=True)
        parts = _BOUNDS if self.plans else PARTS
        shares = []
        for part in parts:
            if best[f"{part}_s"]:
                share = best[f"{part}_s"] / best["time_s"]
                shares.append(f"{_name_part(part)} {share:.1%}")
        others = (self.frame["time_s"] <= best["high_s"]).sum() - 1
        gain = self.doubled / best["time_s"] - 1
        texts = [
            repr(self),
            "  " + ", ".join(shares),
            f"  others inside its interval, which may be faster: {others}; with twice the memory: {gain:+.1%}",
        ]
        if not self.plans and np.isfinite(self.room.reserved):
            reserved = format_bytes(best["needs_bytes"] + best["reserve_bytes"])
            texts.append(
                f"  with its reserve a rank takes {reserved} of {self.room.describe_reserved()}"
            )
        if not self.plans and self.frame["run"].any():
            texts.append(f"  passes were run of {self.frame['run'].sum()} strategies with stages")
        if self.yours is not None:
            texts.append(f"  yours, {_name_way(self.yours.way)}: {self._compare(self.yours)}")
        if self.too_large is not None:
            of_time = self.too_large.row["time_s"] / best["time_s"] - 1
            texts.append(
                f"  faster but too large: {_name_way(self.too_large.way)} {self.too_large.shortage}, "
                f"{format_time(self.too_large.row['time_s'])} ({of_time:+.1%})"
            )
        others_run_on = self.frame["stack"].unique(maintain_order=True).to_list()
        others_run_on.remove(best["stack"])
        of_others = f"; others run on {', '.join(others_run_on)}" if others_run_on else ""
        texts.append(f"  stack: {best['stack']}{of_others}")
        names = _SHARED if self.plans else _FIELDS
        for name in names:
            fastest_of_value = self.frame.unique(name, keep="first", maintain_order=True)
            for other in fastest_of_value.to_dicts()[1:]:
                texts.append(_compare(best, other, name, (*names, "stack"), parts))
        texts += write_notes("left out", self.left_out)
        texts += write_warnings(self.warnings)
        return "\n".join(texts)

    def _compare(self, yours: OneStrategy) -> str:
        """The time of your strategy, how much longer it takes than the fastest, and how many are
        faster."""
        row = yours.row
        best = self.frame.row(0, named=True)
        time = format_interval(row["time_s"], row["low_s"], row["high_s"])
        longer = row["time_s"] / best["time_s"] - 1
        faster = int((self.frame["time_s"] < row["time_s"]).sum())
        if yours.shortage is not None:
            fit = f"does not fit, it {yours.shortage}"
        else:
            fit = f"{format_bytes(row['needs_bytes'])} a rank"
        words = [time, fit, f"{longer:+.1%} beside the fastest"]
        parts = _BOUNDS if self.plans else PARTS
        if longer > 0:
            words[-1] += f", mostly {_name_part(_find_growth(row, best, parts))}"
        words.append(f"{faster} of {len(self.frame)} that fit are faster")
        return ", ".join(words)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        best = self.frame.row(0, named=True)
        time = format_interval(best["time_s"], best["low_s"], best["high_s"])
        needs = format_bytes(best["needs_bytes"])
        chosen = (
            ", ".join(f"{key} {best[key]}" for key in _SHARED) if self.plans else f"{self.best}"
        )
        fit = f"the fastest of {len(self.frame)} strategies that fit, of {self.tried}"
        text = f"{time}, {needs} a rank, {chosen}: {fit}; {self.summary}"
        if not self.left_out:
            return text
        further = len(self.left_out) - 1
        more = f", and {further} more, see left_out" if further else ""
        return f"{text}; left out: {self.left_out[0]}{more}"

    def __repr__(self) -> str:
        return self.headline()


def _find_goodput(
    frame: Table, training_hours: Sequence[float], mtbf: Any, checkpoint: Any, restart: Any
) -> Array | None:
    """Share of the time of each strategy that is training which counts; None without failures."""
    stated = {"checkpoint": checkpoint, "restart": restart}
    if mtbf is None:
        for name, value in stated.items():
            if value is not None:
                raise ValueError(
                    f"{name} is {show(value)}; it counts with failures alone; give mtbf=, too, such as mtbf='llama-3'"
                )
        return None
    if checkpoint is None:
        raise ValueError(
            "checkpoint is missing; with mtbf= give the seconds for which writing one stops the run"
        )
    of_rank = read_mtbf(mtbf)
    stop = check_seconds("checkpoint", checkpoint, zero=True)
    pause = TYPICAL_RESTART
    if restart is not None:
        pause = check_seconds("restart", restart, zero=True)
    shares = []
    for hours, iteration, ranks in zip(
        training_hours, frame["time_s"].to_list(), frame["ranks"].to_list(), strict=True
    ):
        failures = plan_checkpoints(iteration, of_rank / ranks, stop, pause)
        with np.errstate(over="ignore"):  # failures faster than restarts: never done
            shares.append(hours / expect_hours(hours, failures))
    return np.array(shares)


def explore(
    model: Transformer | DLRM | str,
    platform: Named,
    ranks: int | Sequence[int] | None = None,
    *,
    memory: float | str | None = None,
    strategies: Sequence[Any] | None = None,
    yours: Any = None,
    execution: str | None = None,
    stack: str | Stack | None = None,
) -> Exploration:
    """Find the fastest way in which ranks train a Transformer or a DLRM.

    Parameters
    ----------
    model : Transformer, DLRM or str
        The model, or the name of a preset; its batch is over all ranks. A Transformer's own settings for sharing,
        checkpoints and micro-batches are not kept; where it has any, they are `yours`.
    platform : Platform, str or Path
        Where it runs, such as ``h100-sxm-8x128``.
    ranks : int or sequence of int, optional
        Ranks that take part, or several counts to choose from; by default those of `strategies`
        [-].
    memory : float or str, optional
        What a rank may use, also with its unit, such as ``40GB``, with the reserve of its process (of a DLRM without); by default all memory
        of the device. If it is given, a search also tries what to compute again: parts of layers, by
        operation, and as few layers of each chunk as possible, see `Strategy.checkpoint` [B].
    strategies : sequence of Strategy or Plan, optional
        What to choose from; for a DLRM, plans. By default all powers of two of ranks that divide
        the model, without hybrid shards, which are tried where they are given (`Strategy.hsdp`); for a DLRM, all tables placed in one way of `perfkit.workloads.placement_kinds.KINDS`,
        and the best plan of `perfkit.shard`. With the two fastest of these, MLPs are also
        sharded (ZeRO 1 and 3, over all ranks or inside nodes) and tensor parallel inside nodes.
    yours : Strategy or Plan, optional
        What you use now, which chart, report and text set beside the fastest; by default the own settings of
        a Transformer on the largest number of ranks, where these differ from those of a new one.
    execution : str, optional
        ``eager``, ``compiled``, or ``graphs`` for a Transformer, see `predict`.
    stack : str or Stack, optional
        The software, see `predict`; by default the usual one of each strategy.

    Returns
    -------
    exploration : Exploration
        Strategies that fit, the fastest first.

    Raises
    ------
    ValueError
        For more ranks than the platform has, if no strategy divides the model or none fits, and for
        `yours` that does not divide the model.

    Notes
    -----
    With `memory`, strategies that are too large also try to compute parts of their layers again, or
    what lies between saved products, on the fewest layers of each chunk that make them fit.
    Micro-batches of up to 16 sequences are tried, and of short sequences as many as have 32,768
    tokens. Times of a Transformer are closed forms, see `perfkit.prediction.strategies.price_strategies`.
    Of given strategies with stages all passes are run. So are those of a search that fit and take at
    most a quarter longer than the fastest, where closed forms are rough: stages are unlike, wait for
    slow messages, or share gradients and weights. Both agree with `perfkit.predict`, see
    docs/accuracy.md. Times of a DLRM are those of `perfkit.predict`. A table
    that cannot be cut in some way is stored whole on one rank. Ranks do the same work on
    MLPs wherever the tables are, so that the best plans of tables with copies of MLPs
    are nearly always the best ones with shared ones, too; see docs/accuracy.md.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)
    >>> best = pk.explore(gpt, "a100-sxm-8", 8, memory=30e9).best
    >>> best.zero, best.checkpoint, best.checkpoint_layers
    (1, 'norms+activation', 26)
    """
    import polars

    model = _find_model(model)
    kind: Any = Plan if isinstance(model, DLRM) else Strategy
    check_type("strategies", strategies, Sequence[kind] | None)
    check_type("yours", yours, kind | None)
    if strategies is not None and not len(strategies):
        raise ValueError("strategies is empty; give one or more, or leave it out to search them")
    where = load_platform(platform)
    counts = _read_counts(ranks, strategies, where)
    room = Room.of_device(where.memory_of_rank)
    stated = None
    if memory is not None:
        stated = check_bytes("memory", memory)
        room = Room.stated(stated)

    # 1. Price what the model and its batch can be divided by.
    if isinstance(model, DLRM):
        priced = _price_dlrm(model, where, counts, strategies, execution, stack, room.allocated)
    else:
        priced = _price_transformer(
            model,
            where,
            counts,
            strategies,
            execution,
            stack,
            room,
            tries_forms=memory is not None,
        )

    # 2. Rank what fits.
    fits_device = priced.find_fitting(room)
    fits = fits_device & priced.fits_host
    asked = _name_counts(counts)
    if not fits.any():
        if fits_device.any():
            raise _refuse_host_memory(priced, fits_device, asked)
        raise _refuse_memory(
            priced,
            room,
            stated,
            asked,
            _advise(model, where, priced, room, execution, stack),
        )
    # equal times differ in their last digits, and then the first, which has the fewest ranks, leads
    order = np.flatnonzero(fits)[rank_largest(-priced.time[fits])]
    columns = _list_columns(model, priced)
    frame = polars.DataFrame({name: column[order] for name, column in columns.items()})
    plans = tuple(priced.plans[place] for place in order) if priced.plans else ()
    fastest = plans[0] if plans else _read_strategy(frame)

    # 3. What a reader must know: a search chooses what given strategies may have forgotten.
    shown = model
    if isinstance(model, Transformer) and not strategies:
        shown = model.without_sharing()
    left_out = []
    if strategies:
        left_out += _list_misfits(model, strategies, counts)
        left_out += _list_too_large(priced, strategies, room)
    own = None
    if yours is not None:
        own = _price_yours(model, where, yours, execution, stack, room)
    elif isinstance(model, Transformer) and model != model.without_sharing():
        try:
            settings = state_strategy(model, max(counts))
            own = _price_yours(model, where, settings, execution, stack, room)
        except ValueError as error:
            left_out.append(f"the settings of the model ({error})")
    what = model.description if isinstance(model, DLRM) else model.without_sharing().description
    doubled = np.where(priced.find_fitting(room.double()), priced.time, np.inf)
    too_large = None
    largest = int(np.argmin(doubled))
    if not fits[largest] and doubled[largest] < priced.time[fits].min():
        way = priced.take_way(largest)
        too_large = _price_one(model, where, way, execution, stack, room)
    return Exploration(
        frame=frame,
        tried=len(fits),
        summary=f"{what} on {asked} ranks of {where.name}",
        platform=where,
        plans=plans,
        doubled=float(doubled.min()),
        left_out=tuple(left_out),
        room=room,
        yours=own,
        too_large=too_large,
        warn=partial(_list_warnings, shown, where, execution, fastest, stack),
    )


@dataclass(frozen=True)
class _Priced:
    """Strategies or plans that divide a model, with their prices.

    Parameters
    ----------
    ways : mapping of str to array
        How ranks share the model, by column of the table.
    parts : mapping of str to array
        Parts of the time [s], and what else the table shows behind it.
    time, spread, needs : array
        Time of an iteration [s], spread of its logarithm [-], memory of the fullest rank [B].
    reserve : array
        What the process of a rank takes beside it; 0 for plans of a DLRM, whose searches fill the
        memory that they are given [B].
    on_host, host_share : array
        What a rank takes of the memory of its host, and what it may take there, infinite where nothing
        is offloaded [B].
    plans : sequence of Plan
        Those of a DLRM; empty for a Transformer.
    given : sequence of Strategy or Plan
        Those of them that the user has given.
    """

    ways: Mapping[str, Array]
    parts: Mapping[str, Array]
    time: Array
    spread: Array
    needs: Array
    reserve: Array
    on_host: Array
    host_share: Array
    plans: Sequence[Plan]
    given: Sequence[Any]

    def find_fitting(self, room: Room) -> np.ndarray:
        """Whether a rank with so much room holds each."""
        return np.asarray(room.holds(self.needs, self.reserve))

    def take_way(self, place: int) -> Any:
        """The strategy or plan at this place."""
        if self.plans:
            return self.plans[place]
        return _make_strategy({name: self.ways[name][place] for name in _FIELDS})

    @property
    def fits_host(self) -> np.ndarray:
        """Whether hosts have enough memory for what is offloaded."""
        return np.asarray(self.on_host <= self.host_share)


def _compare(
    best: Mapping[str, Any],
    other: Mapping[str, Any],
    name: str,
    names: Sequence[str],
    parts: Sequence[str],
) -> str:
    """A line about the fastest strategy with another value of a field: what else differs, and the
    part of the time that grows most."""
    also = [f"{key} {other[key]}" for key in names if key != name and other[key] != best[key]]
    differs = f" ({', '.join(also)})" if also else ""
    share = other["time_s"] / best["time_s"] - 1
    grown = _find_growth(other, best, parts)
    return f"  {name} {other[name]} instead of {best[name]}{differs}: {share:+.1%}, mostly {_name_part(grown)}"


def _find_growth(row: Mapping[str, Any], best: Mapping[str, Any], parts: Sequence[str]) -> str:
    """The part of the time that is longer than that of the best strategy by most."""
    return max(parts, key=lambda part: row[f"{part}_s"] - best[f"{part}_s"])


def _name_part(part: str) -> str:
    """A part of the time in the field's words."""
    return WORDS_OF_PARTS.get(part, part)


def _find_model(model: Any) -> Transformer | DLRM:
    """The model of a name, or the one that was given."""
    found: Transformer | DLRM = find_workload(model)
    check_type("model", found, Transformer | DLRM)
    return found


def _name_counts(counts: Sequence[int]) -> str:
    """Counts of ranks in words."""
    return " or ".join(map(str, counts))


def _read_counts(ranks: Any, strategies: Sequence[Any] | None, where: Platform) -> list[int]:
    """Counts of ranks to choose from; by default those of the strategies."""
    listed = [ranks]
    if is_listed(ranks):
        listed = [*ranks]
    elif ranks is None:
        of_strategies = [int(one.ranks) for one in strategies or ()]
        listed = list(dict.fromkeys(of_strategies))
    if not listed:
        raise ValueError(
            f"ranks is {show(ranks)}; give a count of ranks, or strategies to choose from"
        )
    most = where.network.ranks
    return [int(check_positive("ranks", one, integer=True, maximum=most)) for one in listed]


def _refuse_memory(
    priced: "_Priced", room: Room, memory: float | None, ranks: str, advice: str
) -> ValueError:
    """The error where nothing fits: what the smallest one takes, of how much, and what helps."""
    least = int(np.argmin(priced.needs))
    needs = float(priced.needs[least])
    of_rank = format_bytes(room.allocated)
    taken = f"the least takes {format_bytes(needs)}"
    if needs <= room.allocated:
        reserved = format_bytes(needs + float(priced.reserve[least]))
        taken += f", and {reserved} with its reserve"
    if memory is not None and memory < _LEAST_MEMORY:
        advice = f"memory is {memory:g} bytes; give it in bytes, such as 80e9"
    return ValueError(f"no strategy on {ranks} ranks fits into {of_rank}; {taken}; {advice}")


def _advise(
    model: Transformer | DLRM,
    where: Platform,
    priced: "_Priced",
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> str:
    """Plans that fit with one more setting, the fastest first; without any, what the smallest strategy
    needs; of a DLRM in words alone."""
    if isinstance(model, DLRM):
        return "take more ranks, a smaller batch or a device with more memory"
    tried = Strategy(**{name: priced.ways[name] for name in _FIELDS})
    plans = list_fitting_plans(model, where, tried, room, execution=execution, stack=stack)
    if plans:
        return advise_plans(plans)
    least = int(np.argmin(priced.needs))
    strategy = Strategy(**{name: priced.ways[name][least] for name in _FIELDS})
    steps = list_next_steps(model, where, strategy, room, execution=execution, stack=stack)
    return f"from {strategy} {steps.advise()}"


def _refuse_host_memory(priced: "_Priced", fits_device: np.ndarray, ranks: str) -> ValueError:
    """The error where strategies fit their devices and none its host: what is nearest to fit takes."""
    on_device = np.flatnonzero(fits_device)
    nearest = on_device[np.argmin(priced.on_host[on_device] / priced.host_share[on_device])]
    taken = format_bytes(priced.on_host[nearest])
    share = format_bytes(priced.host_share[nearest])
    return ValueError(
        f"no strategy on {ranks} ranks fits the memory of its host; a rank takes at least {taken} of "
        f"{share}; take another offload, or state more with platform.with_host_memory(capacity=...)"
    )


def _refuse_given(
    model: Transformer | DLRM, given: Sequence[Any], counts: Sequence[int]
) -> ValueError:
    """The error where none of the strategies that were given can be priced: why the first cannot."""
    misfits = _list_misfits(model, given, counts)
    more = f", and {len(misfits) - 1} more" if len(misfits) > 1 else ""
    return ValueError(
        f"none of the strategies can be priced on {_name_counts(counts)} ranks: {misfits[0]}{more}; leave "
        "ranks out for those of the strategies, or take others"
    )


def _refuse_search(model: Transformer, listed: Strategy, counts: Sequence[int]) -> ValueError:
    """The error where no strategy of a search can be priced: the field of the model that the most of
    them do not fit, and what the first of these wants of it."""
    count = len(listed.ranks)
    most = 0
    for part, fits in list_fits(model, listed).items():
        misfits = np.flatnonzero(np.broadcast_to(np.logical_not(fits), count))
        if len(misfits) > most:
            most = len(misfits)
            commonest = part
            first = int(misfits[0])
    if not most:  # they take other ranks
        return _refuse_ranks(counts)
    wanted = explain_fit(commonest, model, listed.select(first))
    value = show(getattr(model, commonest))
    start = f"no strategy on {_name_counts(counts)} ranks"
    if most == count:
        return ValueError(f"{start} fits {commonest} of the model, {value}: {wanted}")
    return ValueError(
        f"{start} divides the model; {most} of {count} that are tried do not fit {commonest} of it, "
        f"{value}: {wanted}"
    )


def _refuse_ranks(counts: Sequence[int]) -> ValueError:
    """The error where no strategy divides the model."""
    return ValueError(
        f"no strategy on {_name_counts(counts)} ranks divides the model and its batch; take other ranks"
    )


def _price_dlrm(
    model: DLRM,
    where: Platform,
    counts: Sequence[int],
    given: Sequence[Plan] | None,
    execution: str | None,
    stack: str | Stack | None,
    capacity: float,
) -> _Priced:
    """Price the plans that were given, or those of `explore`."""
    rows: dict[Plan, dict[str, Any]] = {}
    if given:
        for number, plan in enumerate(given):
            if plan.ranks in counts:
                rows[plan] = _price_plan(model, where, execution, stack, plan, f"plan {number}")
    else:
        for count in counts:
            rows |= _price_plans(model, where, execution, stack, count, capacity)
    if not rows and given:
        raise _refuse_given(model, given, counts)
    if not rows:
        raise _refuse_ranks(counts)
    plans = list(rows)
    columns = {}
    for name in rows[plans[0]]:
        columns[name] = np.array([row[name] for row in rows.values()])
    return _Priced(
        ways={name: columns.pop(name) for name in _SHARED},
        time=columns.pop("time"),
        parts=columns,
        spread=columns["spread"],
        needs=columns["needs"],
        reserve=np.zeros(len(plans)),
        on_host=np.zeros(len(plans)),
        host_share=np.full(len(plans), np.inf),
        plans=plans,
        given=plans if given else (),
    )


def _price_transformer(
    model: Transformer,
    where: Platform,
    counts: Sequence[int],
    given: Sequence[Strategy] | None,
    execution: str | None,
    stack: str | Stack | None,
    room: Room,
    *,
    tries_forms: bool,
) -> _Priced:
    """Price the strategies that were given, or those of `explore`; of a search, `tries_forms` of
    checkpoints where strategies do not fit without."""
    listed = Strategy.stack(given) if given else _list_strategies(model, where, counts)
    if stack is not None:
        software = find_stack(stack)
        listed = share_states(model, listed, software)
        if not given and model.mixed and software.mixed == "autocast":
            listed = replace(listed, zero=np.zeros_like(listed.zero))
        if not given:
            shared = listed.without_idle_zero()
            runs = np.less_equal(shared.zero, software.most_zero)
            runs = np.broadcast_to(runs & can_run(model, listed, software), len(listed.ranks))
            if not runs.any():
                raise _refuse_ranks(counts)
            listed = listed.select(runs).drop_equal()
    can = can_share(model, listed) & np.isin(listed.ranks, counts)
    if not can.any() and given:
        raise _refuse_given(model, given, counts)
    if not can.any():
        raise _refuse_search(model, listed, counts)
    tried = listed.select(can)
    if tries_forms and not given:
        tried = _add_checkpoints(model, where, tried, execution, stack, room)
    ways = {}
    for name in (*_FIELDS, "ranks"):
        values = getattr(tried, name)
        is_count = values.dtype.kind == "f" and name != "offload_fraction"
        ways[name] = values.astype(np.int64) if is_count else values
    # of a search, passes of the best ones are run
    near = np.inf if given else NEAR
    columns = price_strategies(model, where, tried, execution, room=room, near=near, stack=stack)
    names = [software.name for software in apply_stack(model, tried, execution, stack).stacks]
    parts: dict[str, Array] = {"stack": np.broadcast_to(names, len(tried.ranks))}
    parts |= {name: column for name, column in columns.items() if name not in HeldMemory._fields}
    return _Priced(
        ways=ways,
        time=parts.pop("time"),
        parts=parts,
        spread=columns["spread"],
        needs=columns["needs"],
        reserve=columns["reserve"],
        on_host=columns["on_host"],
        host_share=share_hosts(where, tried.ranks, columns["on_host"]),
        plans=(),
        given=[one for one, fit in zip(given or (), can, strict=bool(given)) if fit],
    )


def _add_checkpoints(
    model: Transformer,
    where: Platform,
    tried: Strategy,
    execution: str | None,
    stack: str | Stack | None,
    room: Room,
) -> Strategy:
    """The same with checkpoints of parts, by operation and of some layers, where strategies do not
    fit without and are faster than those that do."""
    columns = price_strategies(model, where, tried, execution, room=room, near=0.0, stack=stack)
    fits = room.holds(columns["needs"], columns["reserve"])
    further = list_cheapest_checkpoints(
        model, where, tried, columns["time"], fits, room, execution, stack
    )
    if further is None:
        return tried
    return Strategy.join([tried, further])


def _list_columns(model: Transformer | DLRM, priced: _Priced) -> dict[str, Array]:
    """Columns of the table of all that was priced; the first ones are shown of a wide table."""
    low, high = find_interval(priced.time, priced.spread, 0.8)
    columns = {
        "time_s": priced.time,
        "low_s": low,
        "high_s": high,
        "needs_bytes": priced.needs,
    }
    if isinstance(model, DLRM):
        columns["samples_per_s"] = model.batch / priced.time
    elif model.patch:
        columns["images_per_s"] = model.batch / priced.time
    else:
        columns["tokens_per_s"] = model.batch * model.sequence / priced.time
    for name in _SHOWN_FIRST:
        if name in priced.ways:
            columns[name] = priced.ways[name]
    for name, values in priced.ways.items():
        columns.setdefault(name, values)
    for name, values in priced.parts.items():
        columns.setdefault(_name_column(name), values)
    return columns


def _name_column(price: str) -> str:
    """Name of a column of the table, which ends with its unit."""
    if price in PARTS or price in _BOUNDS:
        return f"{price}_s"
    if price in _MEMORY:
        return f"{price}_bytes"
    return price


def _list_too_large(priced: _Priced, strategies: Sequence[Any], room: Room) -> list[str]:
    """Given strategies and plans that need more memory than a rank or its host has."""
    too_large = []
    for place, one in enumerate(priced.given):
        shortage = _describe_shortage(priced, place, room)
        if shortage is not None:
            too_large.append(f"{_name(one, strategies)} {shortage}")
    return too_large


def _describe_shortage(priced: _Priced, place: int, room: Room) -> str | None:
    """What the strategy or plan at this place needs, and of how much; None where it fits."""
    needs, reserve = priced.needs[place], priced.reserve[place]
    on_host, host_share = priced.on_host[place], priced.host_share[place]
    if needs > room.allocated:
        return f"needs {format_bytes(needs)} of {format_bytes(room.allocated)}"
    if needs + reserve > room.reserved:
        return (
            f"needs {format_bytes(needs)}, and {format_bytes(needs + reserve)} of "
            f"{room.describe_reserved()} with its reserve"
        )
    if on_host > host_share:
        return (
            f"needs more memory of its host than a rank has there, {format_bytes(on_host)} of "
            f"{format_bytes(host_share)}"
        )
    return None


def _price_yours(
    model: Transformer | DLRM,
    where: Platform,
    yours: Any,
    execution: str | None,
    stack: str | Stack | None,
    room: Room,
) -> OneStrategy:
    """Price the strategy or plan that somebody uses now."""
    check_positive("ranks of yours", yours.ranks, integer=True, maximum=where.network.ranks)
    misfits = _list_misfits(model, [yours], [yours.ranks])
    if misfits:
        raise ValueError(f"yours cannot be priced: {misfits[0]}; take another strategy")
    return _price_one(model, where, yours, execution, stack, room)


def _price_one(
    model: Transformer | DLRM,
    where: Platform,
    way: Any,
    execution: str | None,
    stack: str | Stack | None,
    room: Room,
) -> OneStrategy:
    """Price a single strategy, of which all passes are run, or a single plan."""
    ranks = [int(way.ranks)]
    if isinstance(model, DLRM):
        priced = _price_dlrm(model, where, ranks, [way], execution, stack, room.allocated)
    else:
        priced = _price_transformer(
            model, where, ranks, [way], execution, stack, room, tries_forms=False
        )
    row = {name: column[0].item() for name, column in _list_columns(model, priced).items()}
    if isinstance(model, DLRM):
        kinds = dict.fromkeys(placement.kind for placement in way.placements)
        row["tables"] = " and ".join(kinds)
    return OneStrategy(way, row, _describe_shortage(priced, 0, room))


def _make_strategy(row: Mapping[str, Any]) -> Strategy:
    """The strategy of a row."""
    return Strategy(**{name: row[name] for name in _FIELDS})


def _name_way(way: Strategy | Plan) -> str:
    """A strategy as its fields, and a plan by its ranks."""
    if isinstance(way, Strategy):
        return repr(way)
    return f"the plan on {way.ranks} ranks"


def _label_row(row: Mapping[str, Any], *, is_plan: bool) -> str:
    """A strategy in short, as charts write it; of a plan, how tables and MLPs are shared."""
    if is_plan:
        return f"{row['tables']} · {row['mlps']}"
    return _make_strategy(row).label


def _read_strategy(frame: Table) -> Strategy:
    """The strategy of the first row; column by column, as queries wait in forked processes."""
    return Strategy(**{name: frame[name][0] for name in _FIELDS})


def _list_warnings(
    model: Transformer | DLRM,
    where: Platform,
    execution: str | None,
    fastest: Strategy | Plan,
    stack: str | Stack | None,
) -> tuple[str, ...]:
    """What `predict` warns of the fastest strategy or plan.

    The event loop takes one operation after another: of many micro-batches it runs two, which have
    the same kernels and messages. With chunks there are at least as many as stages, and without them
    the same layers and messages.
    """
    with keep_quiet():
        if isinstance(fastest, Plan):
            ranks = fastest.ranks
            found = predict(
                model, where, ranks=ranks, plan=fastest, execution=execution, stack=stack
            )
            return found.warnings
        if not isinstance(model, Transformer):
            raise ValueError(f"a DLRM runs {show(fastest)}; it must be a Plan")
        of_replica = fastest.dp * fastest.micro_batch
        micro_batches = model.batch // of_replica
        if micro_batches * model.layers <= _MOST_PASSES:
            found = predict(model, where, strategy=fastest, execution=execution, stack=stack)
            return found.warnings
        few = replace(model, batch=of_replica * min(micro_batches, _FEW))
        alike = replace(fastest, schedule="1f1b", chunks=1)
        found = predict(few, where, strategy=alike, execution=execution, stack=stack)
    return tuple(f"{text} (of {_FEW} micro-batches)" for text in found.warnings)


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
                reasons = [explain_misfit(part, model, one) for part in parts]
                misfits.append(f"{name} {', and '.join(reasons)}")
    return misfits


def _price_plan(
    model: DLRM,
    where: Platform,
    execution: str | None,
    stack: str | Stack | None,
    plan: Plan,
    tables: str,
) -> dict[str, Any]:
    """How a plan shares a DLRM, its time and parts of it [s], spread [-] and memory [B]."""
    with keep_quiet():
        one = predict(model, where, ranks=plan.ranks, plan=plan, execution=execution, stack=stack)
    shared = " ".join(
        f"{name} {value}"
        for name, value in plan.shared.items()
        if name != "dp" and value > _SHARED_BY_NONE.get(name, 0)
    )
    row: dict[str, Any] = {
        "tables": tables,
        "mlps": shared or "copied",
        "ranks": plan.ranks,
        "time": one.time,
    }
    by_resource = one.causes.sum_by_resource()
    row |= {resource: by_resource[resource] for resource in _BOUNDS}
    row |= {"stack": one.stack.name, "spread": one.spread, "needs": one.memory().total}
    return row


def _price_plans(
    model: DLRM,
    where: Platform,
    execution: str | None,
    stack: str | Stack | None,
    ranks: int,
    capacity: float,
) -> dict[Plan, dict[str, Any]]:
    """Prices of plans with copies of MLPs, and of the two best of them with shared ones."""
    price = partial(_price_plan, model, where, execution, stack)
    plans = _list_plans(model, where, ranks, capacity)
    rows = {plan: price(plan, name) for plan, name in plans.items()}

    def rank(plan: Plan) -> tuple[float, float]:
        """Those that fit by time, and before the others."""
        return max(rows[plan]["needs"], capacity), rows[plan]["time"]

    best = sorted(rows, key=rank)[:2]
    most_zero = 3 if stack is None else find_stack(stack).most_zero
    ways = [way for way in _list_ways(where, ranks) if way.zero <= most_zero]
    for plan, strategy in product(best, ways):
        with suppress(ValueError):  # ranks do not divide a width
            way = replace(plan, mlps=strategy)
            rows[way] = price(way, rows[plan]["tables"])
    return rows


def _list_ways(where: Platform, ranks: int) -> list[Strategy]:
    """Ways in which ranks share MLPs: their weights or their states on all ranks, layers or weights
    inside nodes, and both."""
    local = min(where.network.ranks_per_node, ranks)
    if local == 1:
        return []
    ways = [
        Strategy(dp=ranks, zero=1),
        Strategy(dp=ranks, zero=3),
        Strategy(tp=local, dp=ranks // local),
    ]
    if local < ranks and ranks % local == 0:
        ways.append(Strategy(dp=ranks, zero=3, shards=local))
        ways.append(Strategy(tp=local, dp=ranks // local, zero=3))
    return ways


def _list_plans(model: DLRM, where: Platform, ranks: int, capacity: float) -> dict[Plan, str]:
    """Plans that place all tables in one way, and the best plans of searches: with whole tables,
    and of any kind."""
    memory = None if np.isinf(capacity) else capacity
    local = where.network.ranks_per_node
    round_robin = Plan.round_robin(len(model.tables), ranks=ranks)
    found = {round_robin: "round_robin"}
    for kind in PLACEMENT_KINDS:
        if kind.is_whole or ranks == 1:
            continue
        has_inner_nodes = 1 < local < ranks and ranks % local == 0
        if kind.is_inside_node and not has_inner_nodes:
            continue
        found.setdefault(_place_all(model, round_robin, kind, local), kind.name)
    for name, forbid in ((WHOLE.name, {*KINDS} - {WHOLE.name}), ("searched", ())):
        with suppress(InfeasibleError):
            searched = shard(model, where, ranks=ranks, memory=memory, forbid=forbid)
            found.setdefault(searched.plan, name)
    return found


def _place_all(model: DLRM, round_robin: Plan, kind: PlacementKind, ranks_per_node: int) -> Plan:
    """All tables placed in one way, one group of ranks after the other; those that cannot be cut,
    or only into shards with too few columns, stay whole."""
    owners: list[int | Placement] = list(round_robin.owners)
    for number, table in enumerate(model.tables):
        placement = Placement.example(
            kind, ranks=round_robin.ranks, ranks_per_node=ranks_per_node, number=number
        )
        if table.host_bytes and kind.is_copied:  # gradients of copies are averaged on the device
            continue
        if kind.splits_columns and table.dim < MIN_COLUMNS * len(placement.ranks):
            continue
        with suppress(ValueError):  # too few rows, or columns that do not divide
            placement.cut(table)
            owners[number] = placement
    return Plan(round_robin.ranks, tuple(owners))


def _list_strategies(model: Transformer, where: Platform, counts: Sequence[int]) -> Strategy:
    """All strategies of powers of two: `tp` stays inside a node, and `zero` 3 is tried without
    stages only."""
    # 1. Every combination of the sizes and switches that are tried.
    axes = {
        "tp": _list_powers(where.network.ranks_per_node),
        "pp": _list_powers(min(model.layers, max(counts))),
        "cp": _list_powers(_MOST),
        "micro_batch": _list_powers(max(_MOST, _MOST_TOKENS // model.sequence)),
        "schedule": np.arange(len(_SCHEDULES)),
        "checkpoint": np.array(_CHECKPOINTS),
        "zero": np.array((0, 1, 3)),
        "ranks": np.array(counts),
        "ep": _list_powers(min(model.experts or 1, max(counts))),
        "cp_kind": np.array(CP_KINDS),
    }
    grid = np.meshgrid(*axes.values(), indexing="ij", sparse=True)
    tried = dict(zip(axes, grid, strict=True))
    tp = tried["tp"]
    pp = tried["pp"]
    cp = tried["cp"]
    ep = tried["ep"]
    ranks = tried["ranks"]
    schedule = tried["schedule"]
    zero = tried["zero"]
    dp = np.maximum(ranks // (tp * pp * cp), 1)
    replicas = dp * cp
    layers = -(-model.all_layers // pp)
    chunks_of_schedule = np.array([chunks for _, chunks in _SCHEDULES])[schedule]
    chunks = np.where(chunks_of_schedule == 0, layers, chunks_of_schedule)

    # 2. Those that make sense.
    is_plain = schedule == 0
    has_chunks = (pp > 1) & (chunks > 1) & (layers % chunks == 0)
    shares = (zero == 1) | ((zero == 3) & (pp == 1))
    if find_optimizer(model.optimizer).by_shape or model.frozen_format:
        shares = zero == 0  # see `list_fits`
    fitting = [
        tp * pp * cp * dp == ranks,
        is_plain | has_chunks,
        np.where(replicas > 1, shares, zero == 0),
        # experts are shared by replicas, or by all ranks of a stage
        (dp % ep == 0) | (tp * cp * dp % ep == 0),
        (tried["cp_kind"] == "ring") | (cp > 1),
        (tried["checkpoint"] != "selective") | (model.attention in UNFUSED),
    ]
    kept = np.ones(np.broadcast_shapes(*(each.shape for each in grid)), dtype=bool)
    for condition in fitting:
        kept = kept & condition

    def pick(values: Any) -> Any:
        """The values of those that are kept."""
        return np.broadcast_to(values, kept.shape)[kept]

    return Strategy(
        tp=pick(tp),
        pp=pick(pp),
        dp=pick(dp),
        cp=pick(cp),
        ep=pick(ep),
        micro_batch=pick(tried["micro_batch"]),
        schedule=pick(np.array([name for name, _ in _SCHEDULES])[schedule]),
        chunks=pick(chunks),
        checkpoint=pick(tried["checkpoint"]),
        zero=pick(zero),
        sequence_parallel=pick(tp > 1),
        cp_kind=pick(tried["cp_kind"]),
    )


def _list_powers(most: int) -> np.ndarray:
    """Powers of two up to the largest one that is no more than `most`."""
    return np.asarray(2 ** np.arange(int(most).bit_length()))
