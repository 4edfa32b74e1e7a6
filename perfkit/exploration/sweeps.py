"""Sweeps: predict an iteration for each configuration of a grid; those of one structure are priced
as arrays."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias
from warnings import catch_warnings

import numpy as np

from perfkit.ground.forks import check_threads
from perfkit.ground.results import Picture, Sections, Table, Tabular, read_columns
from perfkit.ground.units import (
    MOST_VALUES,
    check_choice,
    check_positive,
    check_type,
    escape,
    format_time,
    read_number,
    show,
)
from perfkit.platform.estimates import find_interval, keep_quiet, name_sides, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.configurations import price_configurations
from perfkit.prediction.predictor import predict
from perfkit.prediction.result import Prediction
from perfkit.workloads.sizes import SizesError, alter, check_size, select_sizes
from perfkit.workloads.stack import Stack, find_stack, needs_strategy
from perfkit.workloads.transformer import Transformer

#: Arguments that may be arrays over configurations: numbers, and lists of numbers.
_NUMBERS = ("batch", "sequence", "hidden", "heads", "vocabulary", "positions", "features")
_LISTS = ("rows", "pooling", "bottom", "top")
#: Columns of a sweep, and their value for a configuration without a time.
_FOUND: dict[str, Any] = dict.fromkeys(
    ("time_s", "low_s", "high_s", "needs_bytes", "samples_per_s"), np.nan
)
_FOUND |= dict.fromkeys(("bottleneck", "fits", "error", "warnings"))
#: Configurations of one task if they are priced together, and if one by one [-].
_MANY, _FEW = 20_000, 8
#: Most warnings that a sweep keeps [-].
_NOTES = 20
_Columns: TypeAlias = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Sweep(Tabular):
    """Predictions of many configurations.

    Parameters
    ----------
    frame : polars.DataFrame
        See `table`.
    varied : tuple of str
        Columns that were varied [-].
    summary : str
        What was predicted, and where.
    platforms : tuple of Platform
        Where it runs.
    warnings : tuple of str
        What limits the trust in the numbers, and which configurations it belongs to.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.gpt2(vocabulary=50304, dtype="bf16")
    >>> pk.sweep(gpt, {"batch": [16, 32, 64], "sequence": [512, 1024]}, "a100-sxm-8").table().columns[:5]
    ['batch', 'sequence', 'time_s', 'low_s', 'high_s']
    """

    report_title = "Predictions of many configurations"

    frame: Table
    varied: tuple[str, ...]
    summary: str
    platforms: tuple[Platform, ...]
    warnings: tuple[str, ...] = ()

    def table(self) -> Table:
        """A row for every configuration, in the order of the grid.

        Returns
        -------
        table : polars.DataFrame
            The columns that were varied; time_s, low_s and high_s, the ends of its 80 % interval [s];
            needs_bytes, the memory of the fullest rank [B]; samples_per_s [1/s]; bottleneck; fits, whether the
            memory suffices; error, why a configuration has no time.
        """
        from perfkit.ground.frames import ResultFrame  # imports polars

        return ResultFrame(self.frame)

    def chart(self, x: str | None = None, y: str = "time_s") -> Picture:
        """Draw one column over another, with a line for each combination of the other columns.

        Parameters
        ----------
        x : str, optional
            A column that was varied; by default the first one with several values.
        y : str, optional
            A column of numbers.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        several = [
            name for name in self.varied if len({*map(str, self.frame[name])}) > 1
        ] or self.varied
        first = check_choice("x", several[0] if x is None else x, self.varied)
        settings: dict[str, Any] = {
            "series": [name for name in several if name != first],
            "title": self.summary,
        }
        return plots.sweep_lines(
            self.frame, x=first, y=check_choice("y", y, self.frame.columns), **settings
        )

    def sections(self) -> Sections:
        """The parts of a report, see `perfkit.ground.results.Sections`."""
        yield "", self.chart()
        yield "Configurations", self.frame
        yield from (("", platform) for platform in self.platforms)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        times: Any = self.frame["time_s"].drop_nulls()
        span = (
            f"{format_time(times.min())} to {format_time(times.max())}"
            if len(times)
            else "none has a time"
        )
        varied = ", ".join(self.varied)
        return f"{len(self.frame)} configurations of {self.summary} over {varied}: {span}"

    def __repr__(self) -> str:
        return f"Sweep({self.headline()})"


def sweep(
    workload: Any,
    grid: Any,
    platform: Named | None = None,
    *,
    ranks: int = 1,
    execution: str | None = None,
    stack: str | Stack | None = None,
    events: bool = False,
    executor: Executor | None = None,
    progress: bool = True,
) -> Sweep:
    """Predict an iteration for many configurations.

    Parameters
    ----------
    workload : Workload or callable
        A workload; or a callable that builds one from columns of the grid, such as
        ``pk.Transformer.bert``.
    grid : mapping or frame
        Values by name, of which all combinations are taken (a single value needs no list); or a
        pandas or polars frame with a row per configuration. Names are arguments of the callable, or
        ``platform``, ``ranks``, ``execution`` and ``stack``.
    platform : Platform, str or Path, optional
        Where it runs, if the grid has no platforms.
    ranks : int, optional
        Ranks that take part, if the grid has no ranks [-].
    execution : str, optional
        See `predict`.
    stack : str or Stack, optional
        The software, see `predict`, if the grid has none.
    events : bool, optional
        Whether every configuration goes through the event loop of `predict`.
    executor : concurrent.futures.Executor, optional
        What runs the tasks, such as a pool of processes or the `get_executor()` of a Dask client.
    progress : bool, optional
        Whether a bar is shown after two seconds.

    Returns
    -------
    sweep : Sweep
        Frame and chart.

    Raises
    ------
    ValueError
        For an empty grid, for names that the callable does not take, and if no configuration can be
        priced.
    ForkError
        In a process made by fork after Polars had answered a query; start it with spawn.

    Notes
    -----
    On GPUs, configurations that differ only in batch and other sizes are priced together as arrays.
    Their times, memory, intervals and bottlenecks equal those of `predict` up to rounding; the
    interval is an estimate if the host limits several ranks. All others are predicted one by one:
    compiled ones, those on CPUs, and DLRMs on several ranks. A configuration that cannot be
    predicted, such as a batch that the ranks do not divide, has no time, and ``error`` says why.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.gpt2(vocabulary=50304, dtype="bf16")
    >>> pk.sweep(gpt, {"batch": [16, 256], "platform": ["a100-sxm-8"]}).table()["fits"].to_list()
    [True, False]
    """
    check_threads()

    with catch_warnings(action="ignore"):  # a notebook without widgets shows a bar of text
        from tqdm.auto import tqdm

    check_positive("ranks", ranks, integer=True)
    check_type("execution", execution, str | None)
    check_type("stack", stack, str | Stack | None)
    check_type("events", events, bool)
    check_type("progress", progress, bool)
    if executor is not None and not hasattr(executor, "map"):
        raise ValueError(
            f"executor is {show(executor)}; it must be one of concurrent.futures, such as a pool"
        )
    columns = _read_grid(grid)
    usual: dict[str, Any] = {
        "platform": platform,
        "ranks": ranks,
        "execution": execution,
        "stack": stack,
    }
    if not _count(columns) or (platform is None and "platform" not in columns):
        raise ValueError(
            f"grid is {show(grid)}, platform is {show(platform)}; give values of an argument, a platform"
        )

    _check_names(workload, columns, usual)

    # 1. Price configurations in tasks of those that differ in sizes alone.
    groups = list(_group(workload, columns, usual, events))
    tasks = [_take_rows(columns, members) for members in groups]
    price = partial(_price, workload, usual, events)
    done = map(price, tasks) if executor is None else executor.map(price, tasks)
    parts = []
    with tqdm(total=_count(columns), delay=2, disable=not progress, unit="configuration") as bar:
        for members, part in zip(groups, done, strict=True):
            parts.append(part)
            bar.update(len(members))

    # 2. Put them in the order of the grid.
    in_order = np.argsort(np.concatenate(groups))
    found = {}
    for name in _FOUND:
        found[name] = np.concatenate([part[name] for part in parts])[in_order]
    priced = np.flatnonzero(np.isfinite(found["time_s"]))
    if not len(priced):
        raise ValueError(
            f"no configuration of the grid can be predicted; the first: {found['error'][0]}"
        )

    # 3. Say what was asked, what was found, and what a reader must know.
    shown = {}
    for name, values in columns.items():
        shown[name] = [getattr(value, "name", value) for value in values]
    notes = _collect_notes(shown, found.pop("warnings"))
    workload_name = build(workload, _take(columns, usual, int(priced[0]))[0]).name
    distinct = {id(value): value for value in columns.get("platform", [platform])}
    platforms = [load_platform(value) for value in distinct.values()]
    where = platforms[0].name if len(platforms) == 1 else "several platforms"
    return Sweep(
        _make_frame(shown, found),
        tuple(columns),
        f"{workload_name} on {where}",
        tuple(platforms),
        warn_once(name_sides(notes)[:_NOTES], 3),
    )


def _check_names(workload: Any, names: Iterable[str], of_predict: Iterable[str]) -> None:
    """Raise a ValueError for a name that neither a Transformer nor `predict` takes. Arguments of a
    callable, and those that a DLRM was built with, are not known."""
    if not isinstance(workload, Transformer):
        return
    known = [*of_predict, *(field.name for field in fields(Transformer) if field.init)]
    for name in names:
        check_choice("a name of grid", name, known)


def _read_grid(grid: Any) -> _Columns:
    """Columns of a grid, of a mapping with all combinations of its values."""
    if not isinstance(grid, Mapping):
        return _read_plain_columns(grid)
    listed = {name: [value] if _is_single(value) else value for name, value in grid.items()}
    values_of = _read_plain_columns(listed)
    count = math.prod(len(values) for values in values_of.values())
    if count > MOST_VALUES:
        sizes = " × ".join(f"{len(values):,}" for values in values_of.values())
        raise ValueError(
            f"grid has {sizes} configurations, {count:,}; it may have at most {MOST_VALUES:,}"
        )
    combinations = list(product(*values_of.values()))
    if not combinations:
        return {}
    columns = {}
    for place, name in enumerate(values_of):
        columns[name] = [combination[place] for combination in combinations]
    return columns


def _read_plain_columns(grid: Any) -> _Columns:
    """Columns of a grid, with Python's numbers."""
    columns = {}
    for name, values in read_columns("grid", grid).items():
        columns[name] = [_read_plain(value) for value in values]
    return columns


def _take_rows(columns: _Columns, rows: Iterable[int]) -> _Columns:
    """Some configurations of a grid."""
    taken = {}
    for name, values in columns.items():
        taken[name] = [values[row] for row in rows]
    return taken


def _collect_notes(shown: _Columns, warnings: Iterable[Any]) -> dict[str, list[str]]:
    """Warnings of configurations by what is varied beside sizes; those with numbers name the sizes
    of the first configuration of their task, to which the numbers belong."""
    varied = [name for name, values in shown.items() if len({*map(str, values)}) > 1]
    is_size = {*_NUMBERS, *_LISTS}
    notes: dict[str, list[str]] = {}
    for place, texts in enumerate(warnings):
        if texts is None:
            continue
        at = ", ".join(f"{name} {show(shown[name][place])}" for name in varied if name in is_size)
        side = " ".join(f"{name} {shown[name][place]}" for name in varied if name not in is_size)
        said = notes.setdefault(side, [])
        for text in texts:
            has_number = re.search(r"(?<![\w-])\d", text)
            said.append(f"{text} ({at})" if at and has_number else text)
    return notes


def _make_frame(shown: _Columns, found: Mapping[str, Any]) -> Table:
    """The frame of a sweep: what was asked and what was found, with null for no number."""
    import polars as pl

    types = {"bottleneck": pl.String, "error": pl.String, "fits": pl.Boolean}
    series = []
    for name, values in found.items():
        if name in types:
            series.append(pl.Series(name, values.tolist(), types[name], strict=False))
        else:
            series.append(pl.Series(name, values, strict=False))
    frame = pl.DataFrame(shown, strict=False).with_columns(series)
    return frame.with_columns(pl.selectors.float().fill_nan(None))


def _is_single(value: Any) -> bool:
    """Whether an entry of a grid is one value rather than a sequence of values."""
    return isinstance(value, str | int | float | None) or read_number(value) is not None


def _read_plain(value: Any) -> Any:
    """A value of a grid; numbers of NumPy, fractions and decimals as Python's, which frames hold."""
    number = read_number(value)
    return value if number is None else number


def _count(columns: _Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _group(
    workload: Any, columns: _Columns, usual: Mapping[str, Any], events: bool
) -> Iterator[np.ndarray]:
    """Numbers of configurations that differ only in sizes, in pieces that one task prices."""
    number = np.zeros(_count(columns), dtype=int)
    for name, values in columns.items():
        if name not in _NUMBERS:
            known: dict[Any, int] = {}
            _, first, same = np.unique([*map(id, values)], return_index=True, return_inverse=True)
            codes = [
                known.setdefault(_identify(name, values[place]), len(known)) for place in first
            ]
            number = np.unique(number * len(known) + np.array(codes)[same], return_inverse=True)[1]
    order = np.argsort(number, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        given, at = _take(columns, usual, members[0])
        size = _MANY if not events and _is_together(workload, given, at) else _FEW
        yield from np.split(members, range(size, len(members), size))


def _take(
    columns: _Columns, usual: Mapping[str, Any], place: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of one configuration: for the callable, and for `predict`."""
    given = {name: values[place] for name, values in columns.items()}
    return given, {name: given.pop(name, value) for name, value in usual.items()}


def _identify(name: str, value: Any) -> Any:
    """A key that is the same for values of one structure: of a list of sizes its length."""
    if name in _LISTS and isinstance(value, int | float | list | tuple):
        return "length", len(value) if isinstance(value, list | tuple) else 0
    return value if isinstance(value, str | int | float | None) else id(value)


def _is_together(workload: Any, given: Mapping[str, Any], at: Mapping[str, Any]) -> bool:
    """Whether configurations like this one can be priced as arrays: on GPUs whose ranks all do the
    same."""
    execution = at["execution"]
    if execution is None and at["stack"] is not None:
        execution = find_stack(at["stack"]).runs_as
    is_compiled = execution not in (None, "eager", "graphs")
    if is_compiled or load_platform(at["platform"]).device.kind == "cpu":
        return False
    with suppress(ValueError):
        one = build(workload, given)
        if at["stack"] is not None and needs_strategy(one, find_stack(at["stack"])):
            return False
        return at["ranks"] == 1 or not hasattr(one, "tables")
    return True


def build(workload: Any, given: Mapping[str, Any]) -> Any:
    """The workload of one configuration, or of several whose sizes are arrays."""
    try:
        if callable(workload):
            return workload(**given)
        return replace(workload, **given) if given else workload
    except TypeError as error:
        # a DLRM keeps no other argument under its name
        if [*given] == ["batch"] and hasattr(workload, "batch"):
            return alter(workload, {"batch": check_size("batch", given["batch"])})
        cure = "give a callable that builds one, such as functools.partial(pk.DLRM, dim=64)"
        raise ValueError(
            f"grid names {show([*given])}, which do not fit: {escape(error, 200)}; {cure}"
        ) from None


def _price(
    workload: Any, usual: Mapping[str, Any], events: bool, columns: _Columns
) -> dict[str, np.ndarray]:
    """Columns of the configurations of one task."""
    count = _count(columns)
    out = {name: np.full(count, nothing, type(nothing)) for name, nothing in _FOUND.items()}
    left = np.arange(count)
    given, at = _take(columns, usual, 0)
    if count > 1 and not events and _is_together(workload, given, at):
        left = _price_together(workload, usual, columns, out)
    for place in left.tolist():
        _price_alone(workload, *_take(columns, usual, place), place, out)
    if all(texts is None for texts in out["warnings"]):
        out["warnings"][0] = ()  # a side without a note, see `name_sides`
    return out


def _price_together(
    workload: Any, usual: Mapping[str, Any], columns: _Columns, out: dict[str, np.ndarray]
) -> np.ndarray:
    """Fill in the columns of configurations that are priced as arrays, and the reasons of those
    that are refused.

    Returns the numbers of the configurations that have to be priced alone: none, or all that can
    be built.
    """
    left = np.arange(_count(columns))
    built_alone = False
    while len(left):
        part = _take_rows(columns, left)
        given, at = _take(part, usual, 0)
        about = {name: at[name] for name in ("ranks", "execution", "stack")}
        try:
            tables = _count_tables(workload, given)
        except ValueError as error:
            out["error"][left[0]] = escape(error, 500)
            left = left[1:]
            continue
        try:
            with keep_quiet():
                many = _build_together(workload, part, given, tables)
                found = price_configurations(many, load_platform(at["platform"]), **about)
                first = predict(build(workload, given), at["platform"], **about)
        except SizesError as error:
            refused = np.flatnonzero(error.invalid)
            for n in refused:
                out["error"][left[n]] = escape(error.find_reason(int(n)), 500)
            left = np.delete(left, refused)
        except ValueError:
            if built_alone:
                return left
            # what refuses arrays may take numbers, such as a callable with a condition in it
            left = _build_each_alone(workload, usual, columns, left, out)
            built_alone = True
        else:
            _fill_in(out, left, found, many.batch, first)
            return left[:0]
    return left


def _build_each_alone(
    workload: Any,
    usual: Mapping[str, Any],
    columns: _Columns,
    members: np.ndarray,
    out: dict[str, np.ndarray],
) -> np.ndarray:
    """Fill in the reasons of configurations that cannot be built; returns the numbers of the
    others."""
    able = []
    for n in members:
        try:
            build(workload, _take(columns, usual, n)[0])
        except ValueError as error:
            out["error"][n] = escape(error, 500)
        else:
            able.append(n)
    return np.array(able, dtype=int)


def _price_alone(
    workload: Any,
    given: Mapping[str, Any],
    at: Mapping[str, Any],
    place: int,
    out: dict[str, np.ndarray],
) -> None:
    """Fill in the columns of one configuration, or why it has no time."""
    try:
        with keep_quiet():
            one = predict(
                build(workload, given),
                at["platform"],
                ranks=at["ranks"],
                execution=at["execution"],
                stack=at["stack"],
            )
            found = {
                "time": one.time,
                "bottleneck": one.bottleneck,
                "needs": one.memory().total,
                "spread": one.spread,
            }
    except ValueError as error:
        out["error"][place] = escape(error, 500)
        return
    batch = getattr(one.workload, "batch", np.nan)  # a captured graph has none
    _fill_in(out, np.array([place]), found, batch, one)


def _fill_in(
    out: dict[str, np.ndarray],
    places: np.ndarray,
    found: Mapping[str, Any],
    batch: Any,
    first: Prediction,
) -> None:
    """Fill in what was found of some configurations; `first` is the prediction of the first one."""
    low, high = find_interval(found["time"], found["spread"], 0.8)
    capacity = first.platform.memory_of_rank
    out["time_s"][places] = found["time"]
    out["low_s"][places] = low
    out["high_s"][places] = high
    out["needs_bytes"][places] = found["needs"]
    out["samples_per_s"][places] = batch / found["time"]
    out["bottleneck"][places] = found["bottleneck"]
    if capacity is not None:
        out["fits"][places] = found["needs"] <= capacity
    out["warnings"][places[0]] = first.warnings


def _count_tables(workload: Any, given: Mapping[str, Any]) -> int:
    """How many tables one configuration has, if a single number stands for those of all tables;
    otherwise 0."""
    single = [name for name in _LISTS if name in given and not _is_listed(given[name])]
    if not single:
        return 0
    return len(getattr(build(workload, given), "tables", ()))


def _is_listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _build_together(workload: Any, columns: _Columns, given: Mapping[str, Any], tables: int) -> Any:
    """A workload whose sizes are arrays; a ValueError if the callable makes another workload of
    them."""
    arrays = {name: np.array(columns[name]) for name in given if name in _NUMBERS}
    lists = dict[str, list[np.ndarray]]()
    for name in given.keys() & {*_LISTS}:
        if _is_listed(given[name]):
            entries: list[Any] = list(zip(*columns[name], strict=True))
        else:
            entries = [columns[name] for _ in range(tables)]
        lists[name] = [np.array(sizes) for sizes in entries]
    many = build(workload, {**given, **arrays, **lists})
    for index in (0, -1):
        alone = build(workload, {name: columns[name][index] for name in given})
        if {**vars(select_sizes(many, index)), "name": ""} != {**vars(alone), "name": ""}:
            raise ValueError("sizes that are arrays make another workload than each alone")
    return many
