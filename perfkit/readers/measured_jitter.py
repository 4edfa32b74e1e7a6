"""How much the time of a rank varies, from a trace of several ranks and steps or from a training log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from perfkit.ground.results import Sections, Table, Tabular, write_notes
from perfkit.ground.units import (
    Array,
    check_positive,
    format_count,
    format_time,
    show,
)
from perfkit.models.failures import wait_for_slowest
from perfkit.models.variation import Variation, deviation_of_slowest, split_variation

#: Ranks of the table [-].
_RANKS = (8, 64, 512, 4096)
#: Chance that some rank is called slow where none is [-].
_FALSE_ALARM = 0.05
#: Differences that are equal up to rounding, over the time [-].
_ROUNDING = 1e-12
#: Skewness from which on times are said to have a long tail, and the times that it takes to tell [-]: of 30
#: normal times the skewness has a standard error of 0.43.
_SKEWNESS, _TIMES_FOR_SKEWNESS = 0.5, 30
#: Share of the variance above which one time is named, and the least times for that [-].
_ONE_TIME, _TIMES_FOR_ONE = 0.5, 5
#: Times the expected waiting from which on a reader is told what that takes for granted [-].
_MORE = 1.5
#: What to do where one step was read.
_RECORD_STEPS = "record several steps (torch.profiler.schedule(active=10))"
#: Largest waiting that a log is read to have, over the time of its steps [-].
_MOST_WAITING = 0.5


@runtime_checkable
class HasJitter(Protocol):
    """What has steps of its own to tell from, such as a trace or a training log."""

    def jitter(self) -> "Jitter":
        """How much the time of a rank varies."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than the others in every step.

    Parameters
    ----------
    rank : int
        Which one [-].
    share : float
        By how much it is slower than the mean rank, over the time of an iteration [-].
    error : float
        Standard error of that [-].
    """

    rank: int
    share: float
    error: float


@dataclass(frozen=True, eq=False)
class Jitter(Tabular):
    """How much the time that a rank takes for an iteration varies.

    Parameters
    ----------
    source : str
        Where the times are from.
    times : mapping of int to sequence of float
        What each rank took, step by step, before it waited for others [s].
    variation : Variation
        The parts of how these times vary [s].
    time : float
        Time of an iteration without waiting, to which all shares refer [s].
    is_bound : bool
        Whether the spread is at most so much: where one rank alone, or the slowest of all, was timed, what all
        ranks share counts, too.
    waited : float, optional
        What the ranks waited in mean, over the time of an iteration without it; None where it is not known [-].
    notes : tuple of str
        What the times contain, and what is not known.
    """

    report_title = "How much the time of a rank varies"

    source: str
    times: Mapping[int, Sequence[float]]
    variation: Variation
    time: float
    is_bound: bool = False
    waited: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def spread(self) -> float:
        """Standard deviation of the time of a rank over the time of an iteration, without what one rank
        does in every step and without what all ranks share: the `jitter` of `Prediction.cost` [-]."""
        return self.variation.random / self.time

    @property
    def is_mixed(self) -> bool:
        """Whether ranks that are slow in every step may be in `spread`, as one step of several ranks does not
        tell them from chance: then nothing is said of other ranks."""
        return self.ranks > 1 and self.steps == 1

    @property
    def persistent(self) -> float | None:
        """Standard deviation between ranks in every step, over the time of an iteration; None where one rank
        or one step does not tell [-]."""
        deviation = self.variation.persistent
        return None if deviation is None else deviation / self.time

    @property
    def common(self) -> float | None:
        """Standard deviation between steps of all ranks together, for which nobody waits, over the time of
        an iteration; None where one rank or one step does not tell [-]."""
        deviation = self.variation.common
        return None if deviation is None else deviation / self.time

    @property
    def ranks(self) -> int:
        """Ranks that were timed [-]."""
        return len(self.times)

    @property
    def steps(self) -> int:
        """Steps of each [-]."""
        return len(next(iter(self.times.values())))

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Interval of `spread` that follows from the number of times, if they are normal.

        Parameters
        ----------
        level : float, optional
            Probability of the interval, below 1 [-].

        Returns
        -------
        low, high : (float, float)
            Its ends; low is 0 where the spread is a bound [-].

        Raises
        ------
        ValueError
            For a level that is no probability.

        Notes
        -----
        The sum of squares over the variance has a chi-squared distribution with the degrees of freedom of
        `variation`: of 4 the spread is known to -28 and +94 %, of 50 to -11 and +15 %.
        """
        from scipy import special

        probability = check_positive("level", level, maximum=1.0)
        if probability == 1.0:
            raise ValueError(f"level is {show(level)}; it must be a share below 1, such as 0.8")
        freedom = self.variation.freedom
        tail = (1.0 - probability) / 2.0
        low = self.spread * (freedom / special.chdtri(freedom, tail)) ** 0.5
        high = self.spread * (freedom / special.chdtri(freedom, 1.0 - tail)) ** 0.5
        return (0.0 if self.is_bound else float(low)), float(high)

    def wait(self, ranks: int) -> float:
        """How much longer an iteration takes because so many ranks wait for the slowest one.

        Parameters
        ----------
        ranks : int
            Ranks that wait for each other once in an iteration [-].

        Returns
        -------
        share : float
            Of the random part alone, see `perfkit.models.failures.wait_for_slowest` [-].

        Raises
        ------
        ValueError
            For one step of several ranks, which does not tell chance from slow ranks.
        """
        self.check_chance()
        count = check_positive("ranks", ranks, integer=True)
        return float(wait_for_slowest(self.spread, ranks=int(count)))

    def check_chance(self) -> None:
        """Refuse one step of several ranks.

        Raises
        ------
        ValueError
            It does not tell chance from slow ranks.
        """
        if self.is_mixed:
            raise ValueError(
                f"{self.source} has one step of {format_count(self.ranks, 'rank')}, which does not tell chance from "
                f"ranks that are slow in every step; {_RECORD_STEPS}, or give jitter= as a number"
            )

    @property
    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """Ranks that are slower in every step than chance explains, the slowest first."""
        rows = self._compare_ranks()
        slow = [
            SlowRank(row["rank"], row["difference_share"], row["error_share"])
            for row in rows
            if row["is_slow"]
        ]
        return tuple(sorted(slow, key=lambda one: -one.share))

    def _compare_ranks(self) -> list[dict[str, Any]]:
        """The mean time of each rank beside that of all."""
        from scipy import special

        table = _stack(self.times)
        means = table.mean(axis=1)
        count = len(means)
        can_tell = self.variation.persistent is not None
        error = 0.0
        if can_tell:
            error = self.variation.random * ((count - 1) / (count * table.shape[1])) ** 0.5
        rows = []
        for rank, mean in zip(self.times, means, strict=True):
            difference = float(mean - table.mean())
            row: dict[str, Any] = {
                "rank": rank,
                "time_s": float(mean),
                "difference_share": difference / self.time,
            }
            row |= {"error_share": None, "is_slow": None}
            if can_tell:
                chance = 1.0
                if difference > _ROUNDING * mean and error <= _ROUNDING * mean:
                    chance = 0.0
                elif difference > 0:
                    chance = float(special.stdtr(self.variation.freedom, -difference / error))
                row["error_share"] = error / self.time
                # so many ranks are looked at
                row["is_slow"] = chance * count < _FALSE_ALARM
            rows.append(row)
        return rows

    def by_rank(self) -> Table:
        """The mean time of each rank.

        Returns
        -------
        frame : polars.DataFrame
            rank [-]; time_s before it waits [s]; difference_share, to the mean rank, and its standard error
            error_share, over the time of an iteration [-]; is_slow, whether it is slower in every step than
            chance explains. The last two are null where one step or one rank does not tell.
        """
        import polars as pl

        schema = {
            "rank": pl.Int64,
            "time_s": pl.Float64,
            "difference_share": pl.Float64,
            "error_share": pl.Float64,
            "is_slow": pl.Boolean,
        }
        return pl.DataFrame(self._compare_ranks(), schema)

    def table(self) -> Table:
        """What ranks wait for the slowest of them.

        Returns
        -------
        frame : polars.DataFrame
            ranks [-]; wait_share, what is added to an iteration, with low_share and high_share at the ends
            of the 80 % `interval` [-]. No row where one step of several ranks does not tell.
        """
        import polars as pl

        schema = {
            "ranks": pl.Int64,
            "wait_share": pl.Float64,
            "low_share": pl.Float64,
            "high_share": pl.Float64,
        }
        if self.is_mixed:
            return pl.DataFrame(schema=schema)
        low, high = self.interval()
        rows = []
        for ranks in sorted({self.ranks, *_RANKS} - {1}):
            of_one = float(wait_for_slowest(1.0, ranks=ranks))
            rows.append(
                {
                    "ranks": ranks,
                    "wait_share": self.spread * of_one,
                    "low_share": low * of_one,
                    "high_share": high * of_one,
                }
            )
        return pl.DataFrame(rows, schema)

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        if not self.is_mixed:
            yield "What ranks wait for the slowest of them", self.table()
        if self.ranks > 1:
            yield "Each rank", self.by_rank()

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        if self.is_mixed:
            return (
                f"one step does not tell chance from slow ranks: {format_count(self.ranks, 'rank')} differ by "
                f"{self.spread:.1%} in it, of which nothing follows for more ranks; {_RECORD_STEPS}"
            )
        low, high = self.interval()
        spread = f"{self.spread:.1%} ({low:.1%} to {high:.1%})"
        if self.is_bound:
            spread = f"{self.spread:.1%} or less (up to {high:.1%})"
        few, most = _RANKS[0], _RANKS[-1]
        return (
            f"a rank's time for an iteration varies by {spread}: waiting for the slowest of {few} ranks adds "
            f"{self.wait(few):.1%}, of {most:,} {self.wait(most):.1%}"
        )

    def explain(self) -> str:
        """Say how much a rank varies, which ranks are slow in every step, and what the times contain.

        Returns
        -------
        text : str
            The answer first.
        """
        return "\n".join([*self.list_lines(), *write_notes("note", self.notes)])

    def list_lines(self) -> list[str]:
        """Lines of `explain` without its notes.

        Returns
        -------
        lines : list of str
            The answer first.
        """
        times = f"{format_count(self.ranks, 'rank')}, {format_count(self.steps, 'step')}"
        if self.ranks > 1:
            times += " of each"
        lines = [
            self.headline(),
            f"  from {self.source}: {times}, {format_time(self.time)} an iteration without waiting",
        ]
        if self.is_mixed:
            last = max(self._compare_ranks(), key=lambda row: float(row["difference_share"]))
            lines.append(
                f"  rank {last['rank']} took longest, {last['difference_share']:.1%} more than the mean rank"
            )
        for slow in self.slow_ranks:
            lines.append(
                f"  rank {slow.rank} is slower than the mean by {slow.share:.1%} ± {slow.error:.1%} in every step: "
                "all wait for it; that is not in the spread"
            )
        if self.persistent is not None and not self.slow_ranks:
            lines.append(
                f"  no rank is slow in every step; ranks differ in their means by {self.persistent:.1%}"
            )
        if self.common is not None:
            lines.append(
                f"  steps differ for all ranks by {self.common:.1%}, for which nobody waits"
            )
        if self.waited is not None and self.is_mixed:
            lines.append(f"  measured: ranks waited {self.waited:.1%} on average")
        elif self.waited is not None:
            expected = self.wait(self.ranks)
            line = f"  measured: ranks waited {self.waited:.1%} on average; expected of the spread: {expected:.1%}"
            if self.waited > _MORE * expected:
                line += ", as for one wait an iteration and equal starts"
            lines.append(line)
        return lines

    def __repr__(self) -> str:
        return self.headline()


def _stack(times: Mapping[int, Sequence[float]]) -> Array:
    """Times of all ranks, (ranks, steps) [s]."""
    return np.array([[*row] for row in times.values()], dtype=float)


@dataclass(frozen=True)
class StatedJitter:
    """What the argument `jitter` of a function says.

    Parameters
    ----------
    spread : float
        Standard deviation of the time of a rank over the time of an iteration [-].
    notes : tuple of str
        Where it is from, and what it leaves out; empty for a number.
    """

    spread: float
    notes: tuple[str, ...] = ()


def read_jitter(jitter: Any) -> StatedJitter:
    """Read the spread of the time of a rank from an argument.

    Parameters
    ----------
    jitter : float, Jitter, Trace or TrainingLog
        The spread itself [-], or what it is found from.

    Returns
    -------
    stated : StatedJitter
        The spread, and where it is from.

    Raises
    ------
    ValueError
        For anything else, for what does not tell, and for one step of several ranks, which does not tell
        chance from slow ranks.

    Examples
    --------
    >>> read_jitter(0.02).spread
    0.02
    """
    if isinstance(jitter, HasJitter):
        return _describe_found(jitter.jitter())
    if isinstance(jitter, Jitter):
        return _describe_found(jitter)
    try:
        return StatedJitter(float(check_positive("jitter", jitter, zero=True, maximum=1.0)))
    except ValueError as error:
        raise ValueError(
            f"{error}; or a trace (pk.read_trace), a training log (pk.read_training_log), or what jitter() of one returns"
        ) from error


def _describe_found(jitter: Jitter) -> StatedJitter:
    """The spread that was found in a trace or a log, and what it leaves out."""
    jitter.check_chance()
    _, high = jitter.interval()
    bound = " or less" if jitter.is_bound else ""
    notes = [
        f"a rank's time varies by {jitter.spread:.1%}{bound} (up to {high:.1%}), as in {jitter.source}"
    ]
    for slow in jitter.slow_ranks:
        notes.append(
            f"rank {slow.rank} of {jitter.source} is slower by {slow.share:.1%} in every step, which is not counted here"
        )
    return StatedJitter(jitter.spread, tuple(notes))


def find_jitter(
    source: str,
    times: Mapping[int, Sequence[float]],
    time: float,
    *,
    waited: float | None = None,
    notes: Sequence[str] = (),
) -> Jitter:
    """Find how much ranks vary from what each took in each step.

    Parameters
    ----------
    source : str
        Where the times are from.
    times : mapping of int to sequence of float
        What each rank took, step by step, before it waited for others [s].
    time : float
        Time of an iteration without waiting [s].
    waited : float, optional
        What the ranks waited in mean, over that time [-].
    notes : sequence of str, optional
        What the times contain.

    Returns
    -------
    jitter : Jitter
        With notes on what the times do not tell.

    Raises
    ------
    ValueError
        For one step of one rank.
    """
    table = _stack(times)
    ranks = len(table)
    if table.size < 2:
        raise ValueError(
            f"{source} has one step of one rank, which does not tell how it varies; {_RECORD_STEPS} "
            "on several ranks, or give jitter= as a number"
        )
    variation = split_variation(table)
    said = [*notes]
    if ranks == 1:
        said.append(
            "one rank was read: what all ranks share from step to step counts, too, so that the spread is at most so "
            "much; read the traces of several ranks"
        )
    said += _describe_shape(times, variation)
    return Jitter(source, times, variation, time, ranks == 1, waited, tuple(said))


def _describe_shape(times: Mapping[int, Sequence[float]], variation: Variation) -> list[str]:
    """Say where times are far from normal: a long tail, or one time that makes most of the variance."""
    table = _stack(times)
    rest = table - table.mean()
    if variation.persistent is not None:
        rest = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    squares = rest**2
    total = float(squares.sum())
    said: list[str] = []
    if total == 0:
        return said
    if table.size >= _TIMES_FOR_ONE and squares.max() > _ONE_TIME * total:
        row, column = np.unravel_index(int(squares.argmax()), squares.shape)
        rank = [*times][int(row)]
        said.append(
            f"one time makes {squares.max() / total:.0%} of the variance: step {int(column) + 1} of rank {rank}"
        )
    deviation = (total / table.size) ** 0.5
    skewness = float((rest**3).mean()) / deviation**3
    if table.size >= _TIMES_FOR_SKEWNESS and skewness > _SKEWNESS:
        said.append(
            f"the times have a long tail (skewness {skewness:.1f}): many ranks wait longer than normal times would "
            "let them, in a published job with 0.9 by 28 % (docs/formulas.md, table 15.3)"
        )
    return said


def find_jitter_of_steps(
    source: str,
    seconds: Sequence[float],
    iterations: Sequence[int],
    ranks: int | None,
) -> Jitter:
    r"""Find how much a rank can vary from the times of steps of a whole job.

    Parameters
    ----------
    source : str
        Where the times are from.
    seconds : sequence of float
        Time of an iteration, as printed [s].
    iterations : sequence of int
        Iterations that each is the mean of [-].
    ranks : int or None
        Ranks of the job; None where it is not known [-].

    Returns
    -------
    jitter : Jitter
        A bound: what varies for all ranks together counts, too.

    Raises
    ------
    ValueError
        For one time, and for steps that vary more than ranks of their own could make them.

    Notes
    -----
    A step ends with its slowest rank. If ranks vary independently with :math:`\sigma`, the time of a step varies
    with :math:`d_p \sigma` (`perfkit.models.variation.deviation_of_slowest`), and its mean holds
    :math:`e_p \sigma` of waiting (`perfkit.models.failures.wait_for_slowest`). A mean of k iterations varies
    with :math:`1 / \sqrt k` of that.
    """
    count = len(seconds)
    if count < 2:
        raise ValueError(
            f"{source} has {format_count(count, 'step')} that counts, which does not tell how steps vary; take a "
            "longer log, a smaller warm_up=, or give jitter= as a number"
        )
    values = np.asarray(seconds, dtype=float)
    weights = np.asarray(iterations, dtype=float)
    mean = float(weights @ values / weights.sum())
    deviation = float((weights @ (values - mean) ** 2 / (count - 1)) ** 0.5)
    notes = [
        "a log has the time of all ranks together: what they share from step to step counts, too, so that "
        "the spread is at most so much"
    ]
    if ranks is None:
        notes.append(
            "the log does not say how many ranks there were; one is taken, and of more each may vary more"
        )
    of_job = ranks or 1
    own = deviation / float(deviation_of_slowest(ranks=of_job))
    waiting = float(wait_for_slowest(own, ranks=of_job))
    if waiting > _MOST_WAITING * mean:
        raise ValueError(
            f"the steps of {source} vary by {deviation / mean:.1%}, more than ranks of their own could make them: of "
            f"{of_job:,} ranks, {waiting / mean:.0%} of a step would be waiting; leave out steps that stall "
            "(warm_up=), or give jitter= as a number"
        )
    if waiting > 0:
        notes.append(
            f"the times of the log hold up to {waiting / mean:.1%} of waiting of its {of_job:,} ranks already"
        )
    times = {0: values.tolist()}
    variation = Variation(mean - waiting, own, None, None, count - 1)
    notes += _describe_shape(times, variation)
    return Jitter(source, times, variation, mean - waiting, True, None, tuple(notes))
