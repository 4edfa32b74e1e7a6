"""One platform against another: datasheets, kernels, collectives and whole iterations side by side."""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perfkit.ground.hardware import DTYPES, Quantity
from perfkit.ground.results import Tabular
from perfkit.ground.units import check_positive, format_bytes, format_rate, format_table, format_time
from perfkit.platform.estimates import Estimate, keep_quiet, warn_once
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.result import Prediction, predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.transformer import Transformer

if TYPE_CHECKING:
    import altair
    import polars


#: Matrix products that stand for others: a large square, a feed-forward layer of BERT-large on 4,096 tokens, a layer of
#: a DLRM on 2,048 samples, and one that only moves weights.
GEMMS = ((8192, 8192, 8192), (4096, 4096, 1024), (2048, 1024, 512), (16, 4096, 4096))
#: Collectives and message sizes [B] that stand for others.
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
SIZES = (64 * 2**10, 4 * 2**20, 256 * 2**20)

Workload: TypeAlias = DLRM | Transformer
_Value: TypeAlias = float | Quantity | Estimate | Prediction | None
_Found: TypeAlias = tuple[str, str, Sequence[Estimate | Prediction | None]]


@dataclass(frozen=True)
class PlatformComparison(Tabular):
    """Two platforms side by side.

    Parameters
    ----------
    a, b : Platform
        The platforms [-].
    rows : tuple of dict
        Quantity by quantity, see `table` [-].
    warnings : tuple of str
        What makes some of the numbers less sure [-].

    Examples
    --------
    >>> import perfkit as pk
    >>> comparison = pk.compare("a100-sxm-8", "h100-sxm-8")
    >>> comparison.table().filter(quantity="bf16 peak")["ratio"].round(2).item()
    3.17
    """

    a: Platform
    b: Platform
    rows: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...] = ()

    def table(self) -> "polars.DataFrame":
        """Every quantity of both.

        Returns
        -------
        table : polars.DataFrame
            group, quantity, unit, a, b [unit], ratio (b over a) [-], and for estimates the 80 % intervals a_low,
            a_high, b_low, b_high [unit]; null where a platform lacks the quantity.
        """
        import polars

        ends = ("a", "b", "ratio", "a_low", "a_high", "b_low", "b_high")
        schema = dict.fromkeys(("group", "quantity", "unit"), polars.String) | dict.fromkeys(ends, polars.Float64)
        return polars.DataFrame(list(self.rows), schema=schema, orient="row")

    def chart(self) -> "altair.LayerChart":
        """How many times better the second platform is, quantity by quantity.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        return plots.platform_ratios(self.rows, a=self.a.name, b=self.b.name)

    def explain(self) -> str:
        """The comparison in words: a line per quantity, then the warnings.

        Returns
        -------
        text : str
            Several lines.
        """
        lines = [("quantity", self.a.name, self.b.name, "ratio")]
        for row in self.rows:
            shown = [_show(row[side], row["unit"]) for side in "ab"]
            lines.append((row["quantity"], *shown, "" if row["ratio"] is None else f"{row['ratio']:.3g}"))
        return "\n".join([format_table(lines), *(f"warning: {text}" for text in self.warnings)])

    def __repr__(self) -> str:
        last, names = self.rows[-1], f"{self.b.name} against {self.a.name}"
        if last["group"] != "iteration":
            return f"PlatformComparison({names}: {len(self.rows)} quantities)"
        return f"PlatformComparison({names}: {last['quantity']}, time x {last['ratio']:.3g})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"


def compare(
    a: Platform | str | Path, b: Platform | str | Path, workload: Workload | None = None, *, ranks: int | None = None
) -> PlatformComparison:
    """Compare two platforms: datasheets, kernels, collectives and, with a workload, whole iterations.

    Parameters
    ----------
    a, b : Platform, str or Path
        Platforms, names of the gallery or files.
    workload : DLRM or Transformer, optional
        An iteration to predict on both.
    ranks : int, optional
        Ranks that take part on either; by default all that each has [-].

    Returns
    -------
    comparison : PlatformComparison
        Table and chart.

    Raises
    ------
    ValueError
        For an unknown platform, more ranks than one of them has, or a workload that one cannot price.
    """
    pair = load_platform(a), load_platform(b)
    most = min(platform.network.ranks for platform in pair)
    if ranks is not None and check_positive("ranks", ranks, integer=True) > most:
        raise ValueError(f"ranks is {ranks}; {pair[0].name} and {pair[1].name} both have {most}; take fewer")
    counts = tuple(ranks or platform.network.ranks for platform in pair)
    with keep_quiet():
        if workload is not None:
            runs = [predict(workload, platform, ranks=n) for platform, n in zip(pair, counts, strict=True)]
        found = [*_estimate(pair, counts, workload)]
        if workload is not None:
            found.append(("iteration", f"{workload.description}, {_on(counts)}", runs))
    rows = [*_datasheets(pair), *(_row(group, name, "s", estimates) for group, name, estimates in found)]
    notes = tuple(dict.fromkeys(text for *_, pairs in found for item in pairs if item for text in item.warnings))
    warn_once(notes, 3)
    return PlatformComparison(*pair, tuple(rows), notes)


def _row(group: str, quantity: str, unit: str, pair: Sequence[_Value]) -> dict[str, Any]:
    """One line of the table; an estimate brings its interval."""
    priced = [item if isinstance(item, Estimate | Prediction) else None for item in pair]
    values: list[Any] = [getattr(item, "value", getattr(item, "time", item)) for item in pair]
    a, b = values
    row = {"group": group, "quantity": quantity, "unit": unit, "a": a, "b": b}
    row["ratio"] = b / a if a and b is not None else None
    for side, item in zip("ab", priced, strict=True):
        row[f"{side}_low"], row[f"{side}_high"] = item.interval() if item else (None, None)
    return row


def _datasheets(pair: tuple[Platform, Platform]) -> Iterator[dict[str, Any]]:
    """Peaks by dtype, the main memory, ranks and links."""
    peaks, links = [p.device.peaks for p in pair], [p.network.links for p in pair]
    for dtype in DTYPES:
        if any(dtype in side for side in peaks):
            yield _row("peak", f"{dtype} peak", "FLOP/s", [side.get(dtype) for side in peaks])
    for what, unit in (("capacity", "B"), ("bandwidth", "B/s")):
        yield _row("memory", f"main memory {what}", unit, [getattr(p.device.memory[-1], what) for p in pair])
    yield _row("network", "ranks", "-", [float(platform.network.ranks) for platform in pair])
    for name in ("intra", "inter"):
        if any(name in side for side in links):
            rates = [side[name].bandwidth if name in side else None for side in links]
            yield _row("network", f"{name} link bandwidth", "B/s", rates)


def _attempt(estimate: Callable[..., Estimate], *sizes: Any, **settings: Any) -> Estimate | None:
    """An estimate, or nothing where the platform has no model for it."""
    try:
        return estimate(*sizes, **settings)
    except ValueError:
        return None


def _estimate(pair: tuple[Platform, Platform], counts: Sequence[int], workload: Workload | None) -> Iterator[_Found]:
    """Times of `GEMMS` (in the workload's number format, else bf16, else the first of both) and of `COLLECTIVES`."""
    common = [dtype for dtype in DTYPES if all(dtype in platform.device.peaks for platform in pair)]
    wanted = workload.dtype if workload is not None else "bf16"
    for dtype in [wanted] if wanted in common else common[:1]:
        for size in GEMMS:
            found = [_attempt(platform.gemm, *size, dtype=dtype) for platform in pair]
            yield "gemm", f"GEMM {' x '.join(map(str, size))}, {dtype}", found
    for operation, nbytes in product(COLLECTIVES, SIZES) if min(counts) > 1 else ():  # one rank exchanges nothing
        found = [_attempt(p.collective, operation, nbytes, ranks=n) for p, n in zip(pair, counts, strict=True)]
        if any(found):
            yield "collective", f"{operation} of {format_bytes(nbytes)}, {_on(counts)}", found


def _on(counts: Sequence[int]) -> str:
    return " and ".join(str(count) for count in dict.fromkeys(counts)) + " rank" + "s" * (max(counts) > 1)


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_time(value) if unit == "s" else f"{value:g}" if unit == "-" else format_rate(value, unit)
