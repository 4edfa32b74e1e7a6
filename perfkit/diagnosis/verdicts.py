"""Verdicts on the rows and on the ranges of sizes of one run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import polars as pl

from perfkit.diagnosis.candidates import (
    BYTES,
    OF_PAIRS,
    Candidate,
    advise_platform,
    find_candidates,
)
from perfkit.diagnosis.expectations import INTERVAL, REACHED, SLOW, Band, price
from perfkit.diagnosis.limits import Limit, find_limit, find_line
from perfkit.diagnosis.models import Model
from perfkit.diagnosis.networks import ONE_MISSING
from perfkit.diagnosis.records import Case, Expectation, Links, Range, Verdict, Word
from perfkit.diagnosis.systems import System
from perfkit.ground.units import Array
from perfkit.models.collectives import OPERATIONS, bus_factor

#: Largest message of which start-ups alone are judged [B]: NCCL's protocol for the smallest messages, LL,
#: ends there for eight ranks (NVIDIA, nccl, src/graph/tuning.cc: 8 KiB and more for each rank).
LATENCY = 2**16
#: Smallest message of the bandwidth where no expectation says when start-ups no longer matter: a choice [B].
BANDWIDTH = 2**27
#: Share of an expected time that bytes take, from which on a size is judged by its bandwidth: a choice [-].
_MOVED = 0.8
#: A bus bandwidth that was reached at a smaller size and is lost by more than this at two sizes or more is
#: an algorithm or a protocol that is worse from there on: a choice, as in thirteen healthy logs of five
#: clusters no size loses more than a tenth [-].
_LOST = 0.8
#: Smallest message of which that is said [B].
_TELLING = 2**20
#: What a bus bandwidth may exceed the line rate by, as times have errors of their own: a choice [-].
_ABOVE = 1.03
#: Faster than expected by this, as the logarithm of a time, a run is of another system: a choice [-].
_OTHER = 0.3
#: Fewest rows that must be faster than adapters can be, before a run is of others: one may be noise [-].
_FASTEST_ROWS = 2
#: Times of two networks are alike if they differ by less than this share: a choice [-].
_ALIKE = 0.1
#: Messages whose expectation is named whatever sizes a run has, the larger one at least [B]: those that
#: runs of nccl-tests usually begin and end with.
_FIRST = 8.0
_LAST = 2.0**33


class _Fit(Enum):
    """How a run lies to a candidate, by its largest messages."""

    FASTER = "faster than it can be"
    FITS = "as expected"
    SLOWER = "slower"


@dataclass(frozen=True)
class _Priced:
    """A candidate with its times of the sizes of a run."""

    candidate: Candidate
    band: Band


@dataclass(frozen=True)
class _Chosen:
    """What a run is judged by.

    Parameters
    ----------
    shown : _Priced or None
        The candidate that is shown; None where nothing is known.
    judges : tuple of _Priced
        All must call a row slow; none where it is not known which system it is.
    is_slow : bool
        Whether it is slower than all that it can be, by its largest messages.
    note : str
        What is uncertain, in words; empty for nothing.
    """

    shown: _Priced | None
    judges: tuple[_Priced, ...]
    is_slow: bool = False
    note: str = ""


def find_too_slow(rows: pl.DataFrame, system: System, given: Model | None = None) -> frozenset[str]:
    """Find the networks over which a run cannot have gone, as it is faster than their adapters.

    Parameters
    ----------
    rows : polars.DataFrame
        Rows of the run, as `perfkit.readers.nccl.parse_nccl_tests` gives them.
    system : System
        What the log says of the system.
    given : Model, optional
        The system, if the user names it.

    Returns
    -------
    names : frozenset of str
        Names of candidates of which two rows of 1 MiB or more exceed the rate of the adapters; none
        where all are exceeded, as such a run is too good.
    """
    operation = str(rows["operation"][0])
    candidates = find_candidates(system, operation, given)
    if len(candidates) < 2:
        return frozenset()
    rows = rows.filter((pl.col("nbytes") >= _TELLING) & (pl.col("seconds") > 0))
    if rows.is_empty():
        return frozenset()
    sizes = rows["nbytes"].unique().sort().to_numpy()
    places = np.searchsorted(sizes, rows["nbytes"].to_numpy())
    seconds = rows["seconds"].to_numpy()
    names = set()
    for priced in _price_all(candidates, operation, sizes):
        full = priced.band.full
        if full is not None:
            is_above = full[places] > _ABOVE * seconds
            if is_above.sum() >= _FASTEST_ROWS:
                names.add(priced.candidate.name)
    if len(names) == len({candidate.name for candidate in candidates}):
        return frozenset()
    return frozenset(names)


def _price_all(candidates: Sequence[Candidate], operation: str, sizes: Array) -> list[_Priced]:
    """Candidates with their times, of which something is known."""
    priced = []
    for candidate in candidates:
        band = price(candidate, operation, sizes)
        if band is not None:
            priced.append(_Priced(candidate, band))
    return priced


def judge_run(
    file: str,
    rows: pl.DataFrame,
    system: System,
    given: Model | None = None,
    too_slow: frozenset[str] = frozenset(),
) -> Case:
    """Judge the rows of one run.

    Parameters
    ----------
    file : str
        Name of the log.
    rows : polars.DataFrame
        Rows of the run, as `perfkit.readers.nccl.parse_nccl_tests` gives them.
    system : System
        What the log says of the system.
    given : Model, optional
        The system, if the user names it.
    too_slow : frozenset of str, optional
        Names of networks that runs of the same system exceed, see `find_too_slow`.

    Returns
    -------
    case : Case
        The run with its verdicts.
    """
    operation = str(rows["operation"][0])
    rows = rows.filter((pl.col("nbytes") > 0) & (pl.col("seconds") > 0)).sort(
        "nbytes", "in_place", "line"
    )
    sizes = rows["nbytes"].unique().sort().to_numpy()
    medians = _find_medians(rows)
    candidates = find_candidates(system, operation, given)
    priced = _price_all(candidates, operation, sizes)
    factor = float(bus_factor(operation, system.ranks)) if operation in OPERATIONS else 1.0
    lost = _find_lost(sizes, factor * sizes / medians)
    chosen = _choose(priced, sizes, medians, lost, too_slow, advise_platform(system))
    chosen = _complete(chosen, operation, sizes, medians, factor)
    limit = find_limit(candidates, operation)
    line = None
    if chosen.shown is not None and (chosen.judges or chosen.is_slow):
        line = find_line(chosen.shown.candidate, operation)
    elif len(candidates) == 1 and candidates[0].is_assured:
        line = find_line(candidates[0], operation)
    judged = _judge_rows(rows, sizes, chosen, lost, limit, line, factor)
    expectation = _describe(system, candidates, chosen, sizes, factor, limit, operation)
    case = Case(file, operation, system.ranks, system.nodes, judged, system.facts, expectation, ())
    return replace(case, verdicts=judge_ranges(case))


def _find_medians(rows: pl.DataFrame) -> Array:
    """Median time of each size, over both halves and repeats [s]."""
    by_size = rows.group_by("nbytes").agg(pl.col("seconds").median()).sort("nbytes")
    return np.asarray(by_size["seconds"].to_numpy())


def _find_lost(sizes: Array, busbw: Array) -> Array:
    """Best bus bandwidth of smaller messages, where a size has lost it [B/s]; 0 elsewhere.

    A single size that has lost it may be noise, so it counts only with a neighbour.
    """
    lost = np.zeros(len(sizes))
    best = 0.0
    for place, value in enumerate(busbw):
        if sizes[place] >= _TELLING and value < _LOST * best:
            lost[place] = best
        best = max(best, float(value))
    is_lost = lost > 0
    has_neighbour = np.zeros(len(sizes), dtype=bool)
    has_neighbour[1:] |= is_lost[:-1]
    has_neighbour[:-1] |= is_lost[1:]
    return np.where(is_lost & has_neighbour, lost, 0.0)


# -- which system it is
# --------------------------------------------------------------------------------------------------


def _choose(
    priced: Sequence[_Priced],
    sizes: Array,
    medians: Array,
    lost: Array,
    too_slow: frozenset[str],
    advice: str,
) -> _Chosen:
    """Choose what a run is judged by, among all that it may be; `advice` is how to name a platform."""
    if not priced:
        return _Chosen(None, ())
    usual = next((each for each in priced if each.candidate.is_default), priced[0])
    if len(priced) == 1 and usual.candidate.is_assured:
        return _Chosen(usual, (usual,))
    is_sound = np.cumsum(lost > 0) == 0  # up to the first size that has lost bandwidth
    fits = []
    for each in priced:
        is_exceeded = each.candidate.name in too_slow
        fits.append(_Fit.FASTER if is_exceeded else _compare(each, medians, is_sound))
    if not any(_find_bandwidth_rows(each, is_sound).any() for each in priced):
        left = [each for each in priced if each.candidate.name not in too_slow]
        return _choose_by_startup(left or priced, usual, medians)
    matching = [each for each, fit in zip(priced, fits, strict=True) if fit is _Fit.FITS]
    is_named = _is_named(usual.candidate)
    for each in matching:
        if each.candidate.is_default:
            return _Chosen(each, tuple(_list_alike(each, priced, matching)))
    if matching and not usual.candidate.is_default:
        # no network is usual for such nodes: any that explains the run will do
        return _Chosen(matching[0], tuple(matching), note=f"as with {matching[0].candidate.name}")
    if matching:
        return _choose_unusual(matching, usual, medians[0] if sizes[0] <= LATENCY else None)
    slower = [each for each, fit in zip(priced, fits, strict=True) if fit is _Fit.SLOWER]
    if is_named and slower:
        shown = usual if usual in slower else slower[0]
        return _Chosen(shown, (shown,), is_slow=True)
    if len(priced) > 1 and len(slower) == len(priced):
        note = "less than every published network of such nodes gives"
        return _Chosen(usual, (usual,), is_slow=True, note=note)
    note = (
        f"the log does not say how its nodes are joined; run it with NCCL_DEBUG=INFO, or {advice}"
    )
    if is_named:
        note = "the adapters that NCCL lists do not explain it; name a platform"
    return _Chosen(usual, (), note=note)


def _is_named(candidate: Candidate) -> bool:
    """Whether the log names the adapters."""
    adapters = candidate.links.adapters
    return adapters is not None and adapters.is_named


def _find_bandwidth_rows(priced: _Priced, is_sound: np.ndarray) -> np.ndarray:
    """Sizes that are judged by their bandwidth, the three largest at most."""
    band = priced.band
    is_moved = np.asarray(band.moved >= _MOVED * band.seconds, dtype=bool)
    places = np.flatnonzero(is_moved & is_sound)[-3:]
    chosen = np.zeros(len(is_sound), dtype=bool)
    chosen[places] = True
    return chosen


def _compare(priced: _Priced, medians: Array, is_sound: np.ndarray) -> _Fit:
    """How a run lies to a candidate, by its largest messages; of shorter runs by the largest of all."""
    chosen = _find_bandwidth_rows(priced, is_sound)
    if not chosen.any():
        chosen[np.flatnonzero(is_sound)[-1:]] = True
    band = priced.band
    is_slower = medians[chosen] > band.slow[chosen]
    if is_slower.mean() > 0.5:
        return _Fit.SLOWER
    if band.full is not None and np.median(band.full[chosen] / medians[chosen]) > _ABOVE:
        return _Fit.FASTER
    faster = float(np.median(np.log(medians[chosen] / band.seconds[chosen])))
    spread = float(np.median(np.log(band.slow[chosen] / band.seconds[chosen])))
    if faster < -max(_OTHER, spread):
        return _Fit.FASTER
    return _Fit.FITS


def _list_alike(
    usual: _Priced, priced: Sequence[_Priced], matching: Sequence[_Priced]
) -> list[_Priced]:
    """Matching candidates with the same bandwidth as the usual one, which may differ in start-ups."""
    last = usual.band.seconds[-1]
    alike = [usual]
    for other in matching:
        if other is not usual and abs(other.band.seconds[-1] / last - 1) < _ALIKE:
            alike.append(other)
    return alike


def _choose_by_startup(priced: Sequence[_Priced], usual: _Priced, medians: Array) -> _Chosen:
    """Choose by small messages alone: all networks that could take as long."""
    able = [each for each in priced if float(np.mean(medians > each.band.slow)) <= 0.5]
    if not able:
        return _Chosen(usual, tuple(priced), is_slow=len(priced) > 1)
    shown = usual if usual in able else able[0]
    return _Chosen(shown, tuple(able))


def _choose_unusual(matching: Sequence[_Priced], usual: _Priced, startup: float | None) -> _Chosen:
    """Choose among published networks that are slower than the usual one. That it is one of them needs a
    start-up [s] of that kind, too, and not of the usual one."""
    for each in matching:
        if startup is None or _is_named(each.candidate):
            break
        is_alike = each.band.low[0] <= startup <= each.band.high[0]
        if is_alike and startup > usual.band.high[0]:
            return _Chosen(each, (each,), note=f"as with {each.candidate.name}")
    shown = matching[0]
    text = f"as expected with {shown.candidate.name}, slow with {usual.candidate.name}"
    if shown.band.seconds[-1] < usual.band.seconds[-1]:
        text = f"faster than with {usual.candidate.name}, as with {shown.candidate.name}, or with switches of the network that reduce"
    return _Chosen(shown, (), note=text)


def _complete(
    chosen: _Chosen, operation: str, sizes: Array, medians: Array, factor: float
) -> _Chosen:
    """Expect what all adapters would give where one is missing and the others bound the run: rings of
    three nodes or more that fill as much of them as adapters are known to give."""
    if chosen.shown is None or operation in OF_PAIRS:
        return chosen
    candidate, band = chosen.shown.candidate, chosen.shown.band
    adapters = candidate.links.adapters
    if candidate.nodes < 3 or adapters is None or adapters.rate is None:
        return chosen
    count, usual = adapters.count, adapters.usual
    if count is None or usual is None or count >= usual:
        return chosen
    reached = factor * sizes / medians / (count * adapters.rate.value)
    is_bound = (reached > REACHED * np.exp(-SLOW * ONE_MISSING)) & (reached < _ABOVE)
    if not is_bound[-1]:
        return chosen
    seconds = np.where(is_bound, medians * count / usual, band.seconds)

    def widen(deviations: float, end: Array) -> Array:
        return np.where(is_bound, seconds * np.exp(deviations * ONE_MISSING), end)

    band = replace(
        band,
        seconds=seconds,
        low=widen(-INTERVAL, band.low),
        high=widen(INTERVAL, band.high),
        slow=widen(SLOW, band.slow),
        moved=np.minimum(band.moved, seconds),
    )
    complete = _Priced(candidate, band)
    return replace(chosen, shown=complete, judges=(complete,))


# -- rows
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bounds:
    """What is expected of each size of a run; NaN where nothing is.

    Parameters
    ----------
    seconds, low, high : array
        Expected times and the ends of their 80 % interval [s].
    slow : array
        Times beyond which it is slow, infinite where it is not known which system it is [s].
    """

    seconds: Array
    low: Array
    high: Array
    slow: Array


def _bound_sizes(sizes: Array, chosen: _Chosen, lost: Array, factor: float) -> _Bounds:
    """What is expected of each size: what is shown gives it, or what a smaller size has reached."""
    expected = np.full(len(sizes), np.nan)
    low = np.full(len(sizes), np.nan)
    high = np.full(len(sizes), np.nan)
    if chosen.shown is not None:
        band = chosen.shown.band
        expected = band.seconds.copy()
        low = band.low.copy()
        high = band.high.copy()
    slow = np.full(len(sizes), np.inf)
    if chosen.judges:
        slow = np.max([each.band.slow for each in chosen.judges], axis=0)
    with_loss = lost > 0
    moved = factor * sizes[with_loss] / lost[with_loss]
    # what it reached at a smaller size it should reach again, unless more is expected anyway
    better = ~(expected[with_loss] < moved)
    for array, deviations in ((expected, 0.0), (low, -INTERVAL), (high, INTERVAL)):
        reached = moved * np.exp(deviations * BYTES)
        array[with_loss] = np.where(better, reached, array[with_loss])
    return _Bounds(expected, low, high, slow)


def _find_limits(slow: Array, chosen: _Chosen) -> Array:
    """Times beyond which a run is slow, where all that it may be of agree on them; NaN elsewhere [s]."""
    if chosen.shown is None or not chosen.judges:
        return np.full(len(slow), np.nan)
    return np.where(slow < (1 + _ALIKE) * chosen.shown.band.slow, slow, np.nan)


def _judge_rows(
    rows: pl.DataFrame,
    sizes: Array,
    chosen: _Chosen,
    lost: Array,
    limit: Limit | None,
    line: float | None,
    factor: float,
) -> pl.DataFrame:
    """Rows with their range, their expected time, their share of the link and their verdict."""
    places = np.searchsorted(sizes, rows["nbytes"].to_numpy())
    seconds = rows["seconds"].to_numpy()
    busbw = rows["busbw"].to_numpy()
    bounds = _bound_sizes(sizes, chosen, lost, factor)
    words = []
    for place, time, bandwidth in zip(places, seconds, busbw, strict=True):
        if limit is not None and bandwidth > _ABOVE * limit.busbw:
            words.append(Word.TOO_GOOD)
        elif lost[place] > 0 or time > bounds.slow[place]:
            words.append(Word.SLOW)
        elif chosen.judges and time > bounds.high[place]:
            words.append(Word.LOW)
        elif chosen.judges:
            words.append(Word.EXPECTED)
        else:
            words.append(Word.UNKNOWN)
    by_size = {
        "expected_s": bounds.seconds,
        "low_s": bounds.low,
        "high_s": bounds.high,
        "slow_s": _find_limits(bounds.slow, chosen),
    }
    times = [pl.Series(name, each[places]).fill_nan(None) for name, each in by_size.items()]
    ranges = _name_ranges(sizes, chosen.shown)
    share = pl.lit(None, pl.Float64) if line is None else pl.col("busbw") / line
    return rows.with_columns(
        pl.Series("sizes", [ranges[place].value for place in places], pl.String),
        *times,
        share.alias("line_share"),
        pl.Series("verdict", [word.value for word in words], pl.String),
    )


def _name_ranges(sizes: Array, shown: _Priced | None) -> list[Range]:
    """The range of each size, by what is expected of it."""
    is_bandwidth = sizes >= BANDWIDTH
    if shown is not None:
        is_bandwidth = shown.band.moved >= _MOVED * shown.band.seconds
    ranges = []
    for nbytes, is_full in zip(sizes, is_bandwidth, strict=True):
        if nbytes <= LATENCY:
            ranges.append(Range.LATENCY)
        else:
            ranges.append(Range.BANDWIDTH if is_full else Range.MIDDLE)
    return ranges


# -- ranges
# --------------------------------------------------------------------------------------------------


def judge_ranges(case: Case) -> tuple[Verdict, ...]:
    """Judge the ranges of sizes of a run by its rows.

    Parameters
    ----------
    case : Case
        The run, whose rows have their verdicts.

    Returns
    -------
    verdicts : tuple of Verdict
        One for each range that it has, two where a range is split.
    """
    first_slow = find_first_slow(case.rows)
    is_last_alone = first_slow == case.rows["nbytes"].max()
    verdicts = []
    for sizes in Range:
        rows = case.rows.filter(pl.col("sizes") == sizes.value)
        if not len(rows):
            continue
        parts = [rows]
        if sizes is Range.BANDWIDTH or (sizes is Range.MIDDLE and not is_last_alone):
            parts = _split_where_slow(rows, first_slow)
        elif sizes is Range.MIDDLE:
            parts = _split_where_slow(rows, None)  # one size of the middle may be noise
        for part in parts:
            verdicts.append(_judge_range(case.operation, sizes, part))
    return tuple(verdicts)


def _find_slow_sizes(
    rows: pl.DataFrame, words: Sequence[Word] = (Word.SLOW,)
) -> tuple[np.ndarray, np.ndarray]:
    """Sizes, ascending [B], and whether half of the rows of each have one of these verdicts."""
    is_slow = pl.col("verdict").is_in([word.value for word in words]).mean() >= 0.5
    by_size = rows.group_by("nbytes").agg(is_slow.alias("slow")).sort("nbytes")
    return by_size["nbytes"].to_numpy(), by_size["slow"].to_numpy()


def find_first_slow(rows: pl.DataFrame) -> int | None:
    """Find the size from which on all sizes of a run are slow.

    Parameters
    ----------
    rows : polars.DataFrame
        Rows of a run with their verdicts, see `Case.rows`.

    Returns
    -------
    nbytes : int or None
        Message size [B]; None where the largest one is not slow, or where all are.
    """
    sizes, slow = _find_slow_sizes(rows)
    if not slow[-1] or slow.all():
        return None
    last_right = int(np.flatnonzero(~slow)[-1])
    return int(sizes[last_right + 1])


def _split_where_slow(rows: pl.DataFrame, first_slow: int | None) -> list[pl.DataFrame]:
    """Rows of a range in two parts where they are slow or too good up to a size, or from a size on; in one part
    where they are not. A single slow size may be noise, so each part has two sizes or more, unless all
    larger sizes of the run are slow, too."""
    nbytes, slow = _find_slow_sizes(rows, (Word.SLOW, Word.TOO_GOOD))
    changes = np.flatnonzero(slow[1:] != slow[:-1]) + 1
    cut = None
    if len(changes) == 1 and 2 <= changes[0] <= len(slow) - 2:
        cut = int(nbytes[changes[0]])
    if first_slow is not None and nbytes[0] < first_slow <= nbytes[-1]:
        cut = first_slow
    if cut is None:
        return [rows]
    return [rows.filter(pl.col("nbytes") < cut), rows.filter(pl.col("nbytes") >= cut)]


def _judge_range(operation: str, sizes: Range, rows: pl.DataFrame) -> Verdict:
    """The verdict on the rows of a range."""
    by_size = _gather_sizes(rows)
    word = _name_word(by_size, sizes)
    alike = by_size
    if word is Word.EXPECTED:
        alike = by_size.filter(pl.col("slow") < 0.5)  # single sizes may be slow
    if word is Word.SLOW and (by_size["slow"] >= 0.5).any():
        alike = by_size.filter(pl.col("slow") >= 0.5)  # single sizes may be right
    shown = alike.row(0 if sizes is Range.LATENCY else -1, named=True)
    if word is Word.SLOW and sizes is Range.MIDDLE:
        worst = (by_size["seconds"] / by_size["expected_s"]).fill_null(0.0).arg_max()
        shown = by_size.row(worst or 0, named=True)
    return Verdict(
        operation,
        sizes,
        word,
        smallest=int(by_size["nbytes"][0]),
        largest=int(by_size["nbytes"][-1]),
        nbytes=int(shown["nbytes"]),
        seconds=float(shown["seconds"]),
        busbw=float(shown["busbw"]),
        expected_s=shown["expected_s"],
        low_s=shown["low_s"],
        high_s=shown["high_s"],
        line_share=shown["line_share"],
        slow_s=shown["slow_s"],
    )


def _gather_sizes(rows: pl.DataFrame) -> pl.DataFrame:
    """One row for each size, ascending: medians, what is expected, the shares of rows with each verdict,
    and whether the bandwidth is low."""
    shares = []
    for name, word in (("slow", Word.SLOW), ("too_good", Word.TOO_GOOD), ("unknown", Word.UNKNOWN)):
        shares.append((pl.col("verdict") == word.value).mean().alias(name))
    is_low = (pl.col("seconds").median() > pl.col("high_s").first()).fill_null(value=False)
    # a bandwidth is that of the median time, so that both say the same beside what is expected
    at_median = pl.col("seconds") / pl.col("seconds").median()
    by_size = rows.group_by("nbytes").agg(
        pl.col("seconds").median(),
        *[(pl.col(name) * at_median).median() for name in ("busbw", "line_share")],
        pl.col("expected_s", "low_s", "high_s", "slow_s").first(),
        *shares,
        is_low.alias("low"),
    )
    return by_size.sort("nbytes")


def _name_word(by_size: pl.DataFrame, sizes: Range) -> Word:
    """What is said of a range: of bandwidths what its largest size says, else what half of its sizes
    say; single sizes may be noise."""
    is_slow = by_size["slow"].to_numpy() >= 0.5
    is_too_good = by_size["too_good"].to_numpy() >= 0.5
    is_unknown = by_size["unknown"].to_numpy() >= 0.5
    if is_too_good.mean() >= 0.5 or (sizes is Range.BANDWIDTH and is_too_good[-1]):
        return Word.TOO_GOOD
    if is_slow.mean() >= 0.5 or (sizes is Range.BANDWIDTH and is_slow[-1]):
        return Word.SLOW
    if is_unknown.mean() > 0.5:
        return Word.UNKNOWN
    if by_size["low"][0 if sizes is Range.LATENCY else -1]:  # the size that is shown
        return Word.LOW
    return Word.EXPECTED


# -- what was expected
# --------------------------------------------------------------------------------------------------


def _describe(
    system: System,
    candidates: Sequence[Candidate],
    chosen: _Chosen,
    sizes: Array,
    factor: float,
    limit: Limit | None,
    operation: str,
) -> Expectation:
    """What was expected of a run."""
    notes = [chosen.note] if chosen.note else []
    links = candidates[0].links if candidates else Links()
    plain = Expectation(system.device, None, system.local, links, notes=tuple(notes))
    if limit is not None:
        plain = replace(plain, limit=limit.busbw, limit_links=limit.links)
    if chosen.shown is None:
        return plain
    shown = chosen.shown.candidate
    last = max(float(sizes[-1]), _LAST)
    band = price(shown, operation, np.array([_FIRST, last]))
    if band is None:
        return plain
    return replace(
        plain,
        system=shown.name,
        links=shown.links,
        algorithm=shown.algorithm,
        startup=float(band.seconds[0]),
        startup_low=float(band.low[0]),
        startup_high=float(band.high[0]),
        busbw=factor * last / float(band.seconds[1]),
        busbw_low=factor * last / float(band.high[1]),
        busbw_high=factor * last / float(band.low[1]),
        limited_by=_name_link(shown),
        source=shown.source,
    )


def _name_link(candidate: Candidate) -> str:
    """The link that bounds large messages, in words."""
    if candidate.nodes > 1:
        return "adapters between nodes"
    return "PCIe" if candidate.links.nvlink is None else "links between GPUs"
