"""Comparison of two platforms, predictions or plans, quantity by quantity."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import DTYPES, LINKS
from perfkit.ground.notes import write_warnings
from perfkit.ground.results import Picture, Sections, Table, Tabular, write_cells, write_notes
from perfkit.ground.units import check_positive, format_bytes, format_table, format_time, show
from perfkit.platform.estimates import Estimate, keep_quiet, name_sides, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.ranks import Workload
from perfkit.prediction.result import Prediction
from perfkit.readers.measured_steps import MeasuredStep
from perfkit.readers.training_logs import TrainingLog
from perfkit.workloads.placement import Plan
from perfkit.workloads.strategy import Strategy, check_strategy_type

#: Examples of matrix products: a large square, a feed-forward layer of BERT-large on 4,096 tokens,
#: a layer of a DLRM on 2,048 samples, and one that only moves weights.
GEMMS = ((8192, 8192, 8192), (4096, 4096, 1024), (2048, 1024, 512), (16, 4096, 4096))
#: Examples of collectives and message sizes [B].
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
#: Longest name of a side in heads and texts, and longest description of what both are [-].
_LONGEST = 60
_ENDS = ("a_low", "a_high", "b_low", "b_high")
_COLUMNS = dict.fromkeys(("group", "quantity", "unit"), str) | dict.fromkeys(
    ("a", "b", "ratio", *_ENDS), float
)
SIZES = (64 * 2**10, 4 * 2**20, 256 * 2**20)


@dataclass(frozen=True)
class PlatformComparison(Tabular):
    """Two platforms, predictions or priced plans side by side.

    Parameters
    ----------
    a, b : Platform, Prediction or PlanPrice
        What is compared; both of one kind [-].
    rows : tuple of dict
        Quantity by quantity, see `table` [-].
    warnings : tuple of str
        What makes some of the numbers less certain, and on which side [-].

    Examples
    --------
    >>> import perfkit as pk
    >>> comparison = pk.compare("a100-sxm-8", "h100-sxm-8")
    >>> comparison.table().filter(quantity="bf16 peak")["ratio"].round(2).item()
    3.17
    """

    report_title = "Two platforms, predictions or priced plans side by side"

    a: Any
    b: Any
    rows: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...] = ()

    def table(self) -> Table:
        """Every quantity of both.

        Returns
        -------
        table : polars.DataFrame
            group, quantity, unit, a, b [unit], ratio (b over a) [-], and for estimates the 80 %
            intervals a_low, a_high, b_low, b_high [unit]; null if a platform does not have the
            quantity.
        """
        from perfkit.ground.frames import ResultFrame  # imports polars

        return ResultFrame(list(self.rows), schema=_COLUMNS, orient="row")

    def changes(self, errors: float = 3.0) -> Table:
        """Numbers that changed by more than their error, as between a platform and its calibration
        of a month later.

        Parameters
        ----------
        errors : float, optional
            Smallest change to list, in joint standard errors of the two numbers [-].

        Returns
        -------
        table : polars.DataFrame
            group and name of every fitted or measured number that changed so much, a, b [unit],
            unit, slower: how many times slower the second platform is by this number, and errors
            [-]; the largest changes first.

        Raises
        ------
        ValueError
            For predictions and priced plans, whose parts have no errors.
        """
        check_threads()
        import polars as pl

        if not isinstance(self.a, Platform):
            raise ValueError(f"{self!r} compares no platforms, whose numbers change; use table()")
        ours, theirs = (
            each.numbers().rename({"value": side}) for each, side in ((self.a, "a"), (self.b, "b"))
        )
        both = ours.join(theirs, on=("group", "name", "unit"), suffix="_b").select(
            "group",
            "name",
            "a",
            "b",
            "unit",
            slower=(pl.col("b") / pl.col("a")).pow(
                pl.when(pl.col("unit").str.starts_with("s")).then(1).otherwise(-1)
            ),
            errors=(pl.col("b") - pl.col("a")).abs()
            / (pl.col("stderr") ** 2 + pl.col("stderr_b") ** 2).sqrt(),
        )
        # equal numbers without error give 0 / 0
        moved = (pl.col("a") != pl.col("b")) & (pl.col("errors") >= errors)
        found = both.filter(moved, ~pl.col("name").str.contains("sharpness|_weight$"))
        return found.sort(-pl.col("slower").log().abs().round(9), "group", "name")

    def chart(self) -> Picture:
        """Draw how many times better the second platform is, quantity by quantity.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        a, b = self._names()
        return plots.platform_ratios(self.rows, a=a, b=b)

    def explain(self) -> str:
        """The comparison in words: the answer, what both are, a line per quantity, the warnings.

        Returns
        -------
        text : str
            Several lines.
        """
        lines = [self.headline()]
        for name, side in zip(self._names(), (self.a, self.b), strict=True):
            if isinstance(side, Prediction):
                lines += write_notes(name, [f"{side.about}; stack: {side.software}"])
        lines.append(format_table(self._write()))
        lines += write_warnings(self.warnings)
        return "\n".join(lines)

    def _names(self) -> list[str]:
        """Names of both sides, for heads and texts."""
        return _name_sides(self.a, self.b)

    def _write(self) -> list[Sequence[str]]:
        """Rows of text with every quantity of both, the heads first, then the time if there is
        one."""
        check_threads()
        import polars as pl

        shown = self.table().select("quantity", "unit", "a", "b", "ratio", "group")
        is_time = pl.col("group") == "iteration"
        times_first = pl.concat([shown.filter(is_time), shown.filter(~is_time)]).drop("group")
        return [("quantity", *self._names(), "ratio"), *write_cells(times_first)[1:]]

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        yield "Quantity by quantity", self._write()
        yield from (("", part) for part in (self.chart(), self.a, self.b))

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        a, b = self._names()
        last = self.rows[-1]
        if last["group"] != "iteration":
            return f"{b} against {a}: {len(self.rows)} quantities"
        times = f"{b} takes {format_time(last['b'])}, {a} {format_time(last['a'])}"
        answer = f"{times}: {last['ratio']:.3g} times as long"
        are_platforms = isinstance(self.a, Platform)
        what = last["quantity"] if are_platforms else _describe_both(self.a, self.b)
        return f"{answer}; {what}" if what else answer

    def __repr__(self) -> str:
        return f"PlatformComparison({self.headline()})"


def compare(
    a: Any,
    b: Any,
    workload: Workload | None = None,
    *,
    ranks: int | None = None,
    platform: Named | None = None,
    strategy: Strategy | None = None,
) -> Any:
    """Compare two platforms, workloads, placements, predictions or traces.

    Parameters
    ----------
    a, b : two of one kind
        Platforms, names of the gallery or files: their datasheets, kernels, collectives and, with a
        workload, whole iterations. Workloads or plans: both are predicted on `platform`.
        Predictions, priced plans or results of `shard`: their time and its parts. Traces, or a
        trace and a prediction: see `Trace.compare`. A prediction and a measured time, such as 10.5 or
        ``44ms``, or a training log: see `Prediction.against`.
    workload : Workload, optional
        An iteration to predict on both platforms, or with both plans.
    ranks : int, optional
        Ranks that take part; by default all ranks of each platform, and for workloads the default
        of `predict` [-].
    platform : Platform, str or Path, optional
        Where workloads and plans are predicted.
    strategy : Strategy, optional
        How ranks share a Transformer on both platforms, see `predict`; `ranks` are then those of it.

    Returns
    -------
    comparison : PlatformComparison
        Table and chart; of a trace, a table; of a measured time a `Deviation`.

    Raises
    ------
    ValueError
        For two that cannot be compared, an unknown platform, more ranks than a platform has, or a
        workload that a platform cannot price.
    """
    # a recorded trace; objects of other packages, such as decimals, have a method of this name too
    if hasattr(a, "compare") and hasattr(a, "sections") and not hasattr(a, "prediction"):
        return a.compare(b)
    if isinstance(a, Prediction) and isinstance(b, int | float | str | MeasuredStep | TrainingLog):
        return a.against(b)
    if strategy is not None and ranks is None:
        ranks = int(check_strategy_type(strategy).ranks)
    if not all(isinstance(each, Platform | str | Path) for each in (a, b)):
        sides = (
            _predict_side(a, workload, platform, ranks, strategy),
            _predict_side(b, workload, platform, ranks, strategy),
        )
        return _put_together(sides, [*_list_parts(*sides)])
    pair = load_platform(a), load_platform(b)
    most = min(platform.network.ranks for platform in pair)
    if ranks is not None:
        ranks = check_positive("ranks", ranks, integer=True)
    if ranks is not None and ranks > most:
        raise ValueError(
            f"ranks is {ranks}; {pair[0].name} and {pair[1].name} both have {most}; take fewer"
        )
    counts = [ranks or platform.network.ranks for platform in pair]
    with keep_quiet():
        found = [
            each
            for each in _list_quantities(pair, counts, workload, strategy)
            if any(x is not None for x in each[-1])
        ]
    return _put_together(pair, found)


def _predict_side(
    given: Any,
    workload: Any,
    platform: Named | None,
    ranks: int | None,
    strategy: Strategy | None,
) -> Any:
    """The result that is given, or the prediction of a workload or plan."""
    result = getattr(given, "prediction", given)
    if hasattr(result, "parts"):
        return result
    plan = given if isinstance(given, Plan) else None
    what = given if plan is None else workload
    if not hasattr(what, "graphs") or platform is None:
        wanted = "two platforms, predictions or priced plans; with platform=, two workloads or plans; sweep takes more"
        raise ValueError(f"a or b is {show(given)}, platform is {show(platform)}; compare {wanted}")
    with keep_quiet():
        count = plan.ranks if plan else ranks
        return predict(what, platform, ranks=count, plan=plan, strategy=strategy)


def _name_sides(a: Any, b: Any) -> list[str]:
    """Names of the two: of platforms their names, of predictions the workload, platform or software
    in which they differ; a and b where this is too long for a head."""
    if not hasattr(a, "workload"):
        return [getattr(each, "name", side) for each, side in ((a, "a"), (b, "b"))]
    ours, theirs = _Traits.read(a), _Traits.read(b)
    names = ["", ""]
    if ours.workload != theirs.workload:
        names = [ours.workload, theirs.workload]
    if ours.platform != theirs.platform:
        names = _join_names(names, " on ", ours.platform, theirs.platform)
    if ours.stack != theirs.stack:
        names = _join_names(names, " with ", ours.stack, theirs.stack)
    elif ours.execution != theirs.execution:  # which the names of stacks say, where these differ
        names = _join_names(names, ", ", ours.execution, theirs.execution)
    if names == ["", ""] or max(map(len, names)) > _LONGEST:
        return ["a", "b"]
    return names


class _Traits(NamedTuple):
    """In what predictions may differ."""

    workload: str
    platform: str
    stack: str
    execution: str

    @classmethod
    def read(cls, result: Any) -> "_Traits":
        """Those of a prediction; a priced plan has no software."""
        stack = getattr(result, "stack", None)
        return cls(
            result.workload.description,
            result.platform.name,
            "" if stack is None else stack.name,
            getattr(result, "execution", ""),
        )


def _join_names(names: Sequence[str], word: str, ours: str, theirs: str) -> list[str]:
    """Names of both sides with a further trait of each, behind a word where they have others."""
    joined = []
    for name, trait in zip(names, (ours, theirs), strict=True):
        joined.append(f"{name}{word}{trait}" if name else trait)
    return joined


def _list_parts(a: Any, b: Any) -> Iterator[tuple[str, str, str, list[Any]]]:
    """Parts of the time of two results, then the time."""
    for part in dict.fromkeys([*a.parts, *b.parts]):
        name = " ".join(filter(None, part)) if isinstance(part, tuple) else part
        found = [result.parts.get(part) for result in (a, b)]
        yield "parts", name, "s", [each[1] if isinstance(each, tuple) else each for each in found]
    name = "time of an iteration"
    description = _describe_both(a, b)
    yield "iteration", f"{name} of {description}" if description else name, "s", [a, b]


def _describe_both(a: Any, b: Any) -> str:
    """What both results are of; empty where they differ, for priced plans and for long texts."""
    ours, theirs = (getattr(each, "workload", None) for each in (a, b))
    description: str = getattr(ours, "description", "")
    if description != getattr(theirs, "description", "") or len(description) > _LONGEST:
        return ""
    return description


def _put_together(
    pair: tuple[Any, Any], found: Sequence[tuple[str, str, str, list[Any]]]
) -> PlatformComparison:
    """The comparison of two from the quantities found."""
    rows = []
    for group, quantity, unit, items in found:
        one, other = (getattr(item, "value", getattr(item, "time", item)) for item in items)
        row = {"group": group, "quantity": quantity, "unit": unit, "a": one, "b": other}
        row["ratio"] = other / one if one and other is not None else None
        ends = [item.interval() if hasattr(item, "interval") else (None, None) for item in items]
        rows.append(row | dict(zip(_ENDS, (*ends[0], *ends[1]), strict=True)))
    # what is said of iterations matters most
    items_of_quantities = [items for group, *_, items in found if group == "iteration"]
    items_of_quantities += [items for group, *_, items in found if group != "iteration"]
    sides = zip(_name_sides(*pair), zip(*items_of_quantities, strict=True), strict=True)
    notes = {
        name: [text for item in items for text in getattr(item, "warnings", ())]
        for name, items in sides
    }
    return PlatformComparison(*pair, tuple(rows), warn_once(name_sides(notes), 4))


def _list_quantities(
    pair: tuple[Platform, Platform],
    counts: Sequence[int],
    workload: Workload | None,
    strategy: Strategy | None,
) -> Iterator[tuple[str, str, str, list[Any]]]:
    """Group, name and unit of every quantity, and its value on both platforms.

    Products are in the number format of the workload, or bf16 without one, else in the first one
    that both have.
    """
    for dtype in DTYPES:
        yield (
            "peak",
            f"{dtype} peak",
            "FLOP/s",
            [platform.device.peaks.get(dtype) for platform in pair],
        )
    for what, unit in (("capacity", "B"), ("bandwidth", "B/s")):
        yield (
            "memory",
            f"main memory {what}",
            unit,
            [getattr(p.device.memory[-1], what) for p in pair],
        )
    yield "network", "ranks", "-", [float(platform.network.ranks) for platform in pair]
    for name in LINKS:
        links = [platform.network.links.get(name) for platform in pair]
        yield (
            "network",
            f"{name} link bandwidth",
            "B/s",
            [link and link.bandwidth for link in links],
        )
    common = [dtype for dtype in DTYPES if all(dtype in platform.device.peaks for platform in pair)]
    wanted = getattr(workload, "dtype", "bf16")
    where = " and ".join(map(str, dict.fromkeys(counts))) + " rank" + "s" * (max(counts) > 1)
    for dtype, size in product([wanted] if wanted in common else common[:1], GEMMS):
        found = [_attempt(platform.gemm, *size, dtype=dtype) for platform in pair]
        yield "gemm", f"GEMM {' x '.join(map(str, size))}, {dtype}", "s", found
    # one rank exchanges nothing
    for operation, nbytes in product(COLLECTIVES, SIZES) if min(counts) > 1 else ():
        found = [
            _attempt(p.collective, operation, nbytes, ranks=n)
            for p, n in zip(pair, counts, strict=True)
        ]
        yield "collective", f"{operation} of {format_bytes(nbytes)}, {where}", "s", found
    if workload is not None:
        runs = [
            predict(workload, platform, ranks=count, strategy=strategy)
            for platform, count in zip(pair, counts, strict=True)
        ]
        shared = f", {strategy.label}" if strategy is not None else ""
        yield "iteration", f"{workload.description}{shared}, {where}", "s", runs


def _attempt(estimate: Callable[..., Estimate], *sizes: Any, **settings: Any) -> Estimate | None:
    """An estimate, or None if the platform has no model for it."""
    try:
        return estimate(*sizes, **settings)
    except ValueError:
        return None
