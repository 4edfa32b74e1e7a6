"""What a training run costs until it is done, with checkpoints, failures and restarts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.dates import Moment, read_date, write_date
from perfkit.ground.files import group_rows
from perfkit.ground.notes import group_notes
from perfkit.ground.quantities import SECONDS, check_seconds, read_quantity
from perfkit.ground.results import Sections, Table, Tabular, write_notes
from perfkit.ground.units import (
    Array,
    check_choice,
    check_positive,
    format_bytes,
    format_time,
    show,
)
from perfkit.models.failures import chance_done, daly_interval, segment_time, segment_variance

#: From a failure until the run goes on, where it is not said [s]: the geometric mean of the 5 to 20 minutes
#: that Meta states (Kokolis et al., arXiv:2410.21680).
TYPICAL_RESTART = 600.0
#: Least share of the time that has to be training [-]: below it the answer rests on the tail of the model.
_LEAST_GOODPUT = 0.02
#: Chances of the table [-].
_CHANCES = (0.1, 0.5, 0.8, 0.9, 0.95, 0.99)
#: Largest chance that a time is looked for [-]: beyond it sums of chances are rounded.
_LARGEST_CHANCE = 1.0 - 1e-12
#: Ends of a run, over which a chance is averaged, and how many standard deviations beyond the mean they
#: reach [-].
_STEPS, _FAR = 400, 12.0
#: Parts of the memory of a rank that a checkpoint holds.
_SAVED = ("parameters", "states", "tables")
_HOUR = 3600.0
#: Times from which on they are written in days, and in whole days [h].
_LEAST_DAYS, _MANY_DAYS = 48.0, 2400.0
#: One iteration, up to rounding [-].
_ONE = 1.0 - 1e-9


@dataclass(frozen=True)
class Failures:
    """How a job fails, and what that costs.

    Parameters
    ----------
    mtbf : float
        Mean time between failures of the whole job [s].
    checkpoint : float
        Time for which one checkpoint stops the run [s].
    restart : float
        From a failure until the run goes on [s].
    interval : float
        Training between two checkpoints, as wished [s].
    """

    mtbf: float
    checkpoint: float
    restart: float
    interval: float


@dataclass(frozen=True)
class Segments:
    """Equal pieces of a run, each with a checkpoint at its end.

    Parameters
    ----------
    count : int
        How many [-].
    length : float
        Training and checkpoint of one [s].
    """

    count: int
    length: float

    @classmethod
    def cut(cls, training: float, failures: Failures) -> "Segments":
        """Cut training of so much time, as near to the wished interval as equal pieces allow [s]."""
        count = max(round(training / failures.interval), 1)
        return cls(count, training / count + failures.checkpoint)


class Ends(NamedTuple):
    """Times at which a run may end, and how likely each is.

    Parameters
    ----------
    seconds : array
        Since its start [s].
    weights : array
        Probability of each [-].
    """

    seconds: Array
    weights: Array


@dataclass(frozen=True, eq=False)
class Goodput(Tabular):
    """Time and money until a training run is done, with checkpoints, failures and restarts.

    Parameters
    ----------
    prediction : Prediction
        An iteration of the run.
    training_hours : float
        Time of all iterations, without checkpoints and failures [h].
    failures : Failures
        How the job fails, and what that costs.
    price_per_gpu_hour : float
        Price of one rank for an hour, in any currency [1/h].
    power : float
        Power of one rank; 0 if it was not said [W].
    waiting_hours : float
        What waiting for the slowest rank adds to `training_hours` [h].
    warnings : tuple of str
        That the run does not fit into memory, what was assumed, and the warnings of the iteration.
    start : datetime, optional
        When the run starts; None if it was not said.
    """

    report_title = "Time and money until a training run is done"

    prediction: Any  # a Prediction, which imports this module
    training_hours: float
    failures: Failures
    price_per_gpu_hour: float
    power: float
    waiting_hours: float
    warnings: tuple[str, ...]
    start: datetime | None = None

    @property
    def segments(self) -> Segments:
        """The pieces between checkpoints."""
        return Segments.cut(self._running_hours * _HOUR, self.failures)

    @property
    def interval(self) -> float:
        """Training between two checkpoints [s]."""
        return self.segments.length - self.failures.checkpoint

    @property
    def hours(self) -> float:
        """Expected time until the run is done [h]."""
        return expect_hours(self._running_hours, self.failures)

    @property
    def gpu_hours(self) -> float:
        """Expected time of all ranks [h]."""
        return self.hours * self.prediction.ranks

    @property
    def cost(self) -> float:
        """Expected price, in the currency of the price of an hour [-]."""
        return self.gpu_hours * self.price_per_gpu_hour

    @property
    def energy_kwh(self) -> float | None:
        """Expected energy; None if no power was said [kWh]."""
        return self.gpu_hours * self.power / 1000 if self.power else None

    @property
    def goodput(self) -> float:
        """Share of the expected time that is training which counts [-]."""
        return self.training_hours / self.hours

    @property
    def failure_count(self) -> float:
        """Expected failures, with those during restarts [-]."""
        return self.hours * _HOUR / self.failures.mtbf

    @property
    def checkpoint_hours(self) -> float:
        """Time of checkpoints that were written to their end and kept [h]."""
        return self.segments.count * self.failures.checkpoint / _HOUR

    @property
    def restart_hours(self) -> float:
        """Expected time of restarts, with those that failed [h]."""
        segments, failures = self.segments, self.failures
        restarts = segments.count * math.expm1(segments.length / failures.mtbf)
        return restarts * failures.mtbf * math.expm1(failures.restart / failures.mtbf) / _HOUR

    @property
    def lost_hours(self) -> float:
        """Expected time of work that failures throw away [h]."""
        kept = self._running_hours + self.checkpoint_hours + self.restart_hours
        return max(self.hours - kept, 0.0)

    @property
    def _running_hours(self) -> float:
        """Time of all iterations [h]."""
        return self.training_hours + self.waiting_hours

    def hours_range(self, level: float = 0.8) -> tuple[float, float]:
        """Expected time at the ends of the interval of the prediction.

        Parameters
        ----------
        level : float, optional
            Probability of the interval, see `Prediction.interval` [-].

        Returns
        -------
        low, high : (float, float)
            With the fastest and the slowest iteration of the interval [h].
        """
        low, high = self.prediction.interval(level)
        scale = self._running_hours / self.prediction.time
        return (
            expect_hours(low * scale, self.failures),
            expect_hours(high * scale, self.failures),
        )

    def chance(self, hours: float, *, failures_alone: bool = False) -> float:
        """Probability that the run is done after so many hours.

        Parameters
        ----------
        hours : float
            Time since its start [h].
        failures_alone : bool, optional
            Whether the predicted time of an iteration is taken as certain.

        Returns
        -------
        chance : float
            From 0 to 1 [-].

        Raises
        ------
        ValueError
            For a negative time.

        Notes
        -----
        The logarithm of the time of an iteration is normal with `Prediction.spread`; checkpoints and
        failures are taken to grow with it.
        """
        seconds = check_positive("hours", hours, zero=True) * _HOUR
        spread = self.prediction.spread
        if failures_alone or spread == 0 or seconds == 0:
            return float(self._find_chances(seconds))
        from scipy import special

        ends = self._ends
        return float(ends.weights @ special.ndtr(np.log(seconds / ends.seconds) / spread))

    def _find_chances(self, seconds: Any) -> Any:
        """Probability that the run is done after so many seconds, if failures alone are uncertain."""
        return chance_done(
            seconds,
            segments=self.segments.count,
            length=self.segments.length,
            mtbf=self.failures.mtbf,
            restart=self.failures.restart,
        )

    @cached_property
    def _ends(self) -> "Ends":
        """When the run ends, if iterations take as long as predicted."""
        segments, failures = self.segments, self.failures
        variance = segment_variance(segments.length, mtbf=failures.mtbf, restart=failures.restart)
        deviation = (segments.count * float(variance)) ** 0.5
        earliest = segments.count * segments.length
        edges = np.linspace(earliest, self.hours * _HOUR + _FAR * deviation, _STEPS)
        chances = self._find_chances(edges)
        # what lies beyond the last edge ends there
        middles = (edges[1:] + edges[:-1]) / 2
        seconds = np.concatenate([edges[:1], middles, edges[-1:]])
        weights = np.concatenate([chances[:1], np.diff(chances), 1.0 - chances[-1:]])
        return Ends(seconds, weights)

    def hours_for(self, chance: float, *, failures_alone: bool = False) -> float:
        """Time after which the run is done with a probability.

        Parameters
        ----------
        chance : float
            Above 0 and at most 1 - 1e-12 [-].
        failures_alone : bool, optional
            Whether the predicted time of an iteration is taken as certain.

        Returns
        -------
        hours : float
            The least time with this chance, to 0.01 % [h].

        Raises
        ------
        ValueError
            For a chance of 0, nearer to 1 than that, or beyond.
        """
        wanted = check_positive("chance", chance)
        if wanted > _LARGEST_CHANCE:
            raise ValueError(
                f"chance is {show(chance)}; it must be a share below 1 by 1e-12 or more, such as 0.99: no "
                "time is certain"
            )
        low, high = 0.0, self.hours
        while self.chance(high, failures_alone=failures_alone) < wanted:
            low, high = high, 1.5 * high
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            if self.chance(middle, failures_alone=failures_alone) < wanted:
                low = middle
            else:
                high = middle
        return high

    def chance_by(self, date: Moment) -> float:
        """Probability that the run is done by a date.

        Parameters
        ----------
        date : str, date or datetime
            Such as ``2027-01-15``, its begin, or ``2027-01-15 18:00``.

        Returns
        -------
        chance : float
            See `chance` [-].

        Raises
        ------
        ValueError
            For a run without a `start`, and a date before it.
        """
        start = self._find_start()
        end = read_date("date", date)
        if end < start:
            raise ValueError(
                f"date is {write_date(end)}; the run starts at {write_date(start)}; give a later one"
            )
        return self.chance((end - start).total_seconds() / _HOUR)

    def date_for(self, chance: float) -> datetime:
        """When the run is done with a probability.

        Parameters
        ----------
        chance : float
            See `hours_for` [-].

        Returns
        -------
        date : datetime
            The `start` and the hours after it, to the next whole second.

        Raises
        ------
        ValueError
            For a run without a `start`, one that ends after the year 9999, and as `hours_for` does.
        """
        start = self._find_start()
        hours = self.hours_for(chance)
        try:
            return start + timedelta(seconds=math.ceil(hours * _HOUR))
        except OverflowError:
            raise ValueError(
                f"start is {write_date(start)}; {write_hours(hours)} after it the calendar has ended; take hours_for"
            ) from None

    def _find_start(self) -> datetime:
        """When the run starts."""
        if self.start is None:
            raise ValueError(
                "start is missing; say when the run starts, cost(..., start='2026-12-01'), or take chance(hours) "
                "and hours_for(chance)"
            )
        return self.start

    def table(self) -> Table:
        """When the run is done, by chance.

        Returns
        -------
        frame : polars.DataFrame
            chance [-]; hours, with what is not known of an iteration; hours_as_predicted, if the predicted
            time of an iteration is certain [h]; cost of the first, in the currency of the price [-]; with a
            `start` also the date, to the minute.
        """
        import polars as pl

        rows = []
        for chance in _CHANCES:
            hours = self.hours_for(chance)
            rows.append(
                {
                    "chance": chance,
                    "hours": hours,
                    "hours_as_predicted": self.hours_for(chance, failures_alone=True),
                    "cost": hours * self.prediction.ranks * self.price_per_gpu_hour,
                }
            )
        frame = pl.DataFrame(rows)
        if self.start is not None:
            dates = [write_date(self.date_for(chance)) for chance in _CHANCES]
            frame = frame.with_columns(date=pl.Series(dates))
        return frame

    def account(self) -> Table:
        """Where the expected time goes.

        Returns
        -------
        frame : polars.DataFrame
            part: training, waiting for the slowest rank, checkpoints, work done again, restarts; hours
            [h], and their share [-].
        """
        import polars as pl

        parts = {
            "training": self.training_hours,
            "waiting for the slowest rank": self.waiting_hours,
            "checkpoints": self.checkpoint_hours,
            "work done again": self.lost_hours,
            "restarts": self.restart_hours,
        }
        rows = [
            {"part": part, "hours": hours, "share": hours / self.hours}
            for part, hours in parts.items()
        ]
        return pl.DataFrame(rows)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        shortage = find_shortage(self.prediction)
        impossible = f"cannot run: {shortage}; were there memory, " if shortage else ""
        return (
            f"{impossible}done in {write_hours(self.hours)}{self._write_cost(self.gpu_hours)}: {self.goodput:.1%} of it is training, "
            f"with {self.failure_count:,.3g} failures and a checkpoint each {format_time(self.interval)}"
        )

    def _write_cost(self, gpu_hours: float) -> str:
        """The cost of some time of all ranks [h], which is all that there is without a price."""
        if not self.price_per_gpu_hour:
            return f", {gpu_hours:,.0f} GPU hours"
        return f" for {gpu_hours * self.price_per_gpu_hour:,.0f}"

    def explain(self) -> str:
        """Say when the run is done, what it costs, and where the time goes.

        Returns
        -------
        text : str
            The answer first; then chances, the checkpoints, the failures, and what was assumed.
        """
        lines = self.list_lines()
        warnings = group_notes(self.prediction.warnings)
        lines += write_notes("warning of the iteration", warnings)
        return "\n".join(lines)

    def list_lines(self) -> list[str]:
        """Lines of `explain` without the warnings of the iteration, which its own explanation has.

        Returns
        -------
        lines : list of str
            The answer first.
        """
        failures, hours = self.failures, self.hours
        low, high = self.hours_range()
        likely = write_hours(self.hours_for(0.9))
        if self.start is not None:
            likely += f", on {write_date(self.date_for(0.9))}"
        alone = write_hours(self.hours_for(0.9, failures_alone=True))
        iteration = self.prediction.time * self._running_hours / self.training_hours
        iterations = self.interval / iteration
        ranks = self.prediction.ranks
        lost_share = self.lost_hours / hours
        restart_share = self.restart_hours / hours
        cost_of_training = self._write_cost(self.training_hours * ranks)
        lines = [
            self.headline(),
            f"  with a chance of 90 % done in {likely}; in {alone} if iterations take as long as predicted",
            f"  at the ends of the interval of an iteration: {_write_range(low, high)}",
        ]
        lines.append(
            f"  checkpoints: {format_time(failures.checkpoint)} each {iterations:,.0f} iterations, "
            f"{self.checkpoint_hours / hours:.1%} of the time"
        )
        lines.append(
            f"  failures: each {write_hours(failures.mtbf / _HOUR)} one of {ranks:,} GPUs; work done again "
            f"{lost_share:.1%}, restarts of {format_time(failures.restart)} {restart_share:.1%}"
        )
        lines.append(f"  training alone: {write_hours(self.training_hours)}{cost_of_training}")
        if self.waiting_hours:
            share = self.waiting_hours / hours
            lines.append(f"  waiting for the slowest of {ranks:,} ranks: {share:.1%}")
        of_iteration = self.prediction.warnings
        shortage = find_shortage(self.prediction)  # which the first line says
        for text in self.warnings:
            if text not in of_iteration and text != shortage:
                lines += write_notes("assumed", [text])
        return lines

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        yield "Where the time goes", self.account()
        yield "When it is done", self.table()
        yield "", self.prediction

    def __repr__(self) -> str:
        return self.headline()


def find_goodput(
    prediction: Any,
    training_hours: float,
    waiting_hours: float,
    *,
    notes: Sequence[str],
    price_per_gpu_hour: float,
    power: float,
    mtbf: Any,
    checkpoint: Any,
    write_rate: Any,
    restart: Any,
    interval: Any,
    start: Any,
) -> Goodput:
    """Find what a run costs until it is done; see `Prediction.cost` for the arguments.

    Parameters
    ----------
    prediction : Prediction
        An iteration of the run.
    training_hours : float
        Time of all iterations, without waiting for slow ranks [h].
    waiting_hours : float
        What this waiting adds [h].
    notes : sequence of str
        Where the spread that makes it is from.
    price_per_gpu_hour : float
        Price of one rank for an hour [1/h].
    power : float
        Power of one rank [W].
    mtbf : float or str
        Mean time between failures of one rank [s], or the name of a published run.
    checkpoint, write_rate : float or None
        Time of one checkpoint [s], or bytes that a rank writes in a second [B/s].
    restart, interval : float or None
        Time of a restart, and training between two checkpoints [s].
    start : str, date, datetime or None
        When the run starts.

    Returns
    -------
    goodput : Goodput
        Time, money and chances.

    Raises
    ------
    ValueError
        For what is missing or given twice, a run of less than an iteration, checkpoints that leave no time for
        training, and if failures come faster than the job restarts.
    """
    iterations = training_hours * _HOUR / prediction.time
    if iterations < _ONE:
        raise ValueError(
            f"the run has {iterations:.3g} iterations; with mtbf= it must have 1 or more; give a larger amount"
        )
    warnings = []
    shortage = find_shortage(prediction)
    if shortage is not None:
        warnings.append(shortage)
    warnings += notes
    rank_mtbf = read_mtbf(mtbf)
    if isinstance(mtbf, str) and read_quantity(mtbf, SECONDS) is None:
        warnings.append(
            f"ranks fail as those of {mtbf} did, each {rank_mtbf / _HOUR:,.0f} h (published/failures.csv); "
            "say mtbf= of your own: hours of all ranks over failures, in seconds"
        )
    stop = _read_checkpoint(prediction, checkpoint, write_rate)
    if restart is None:
        pause = TYPICAL_RESTART
        warnings.append(
            f"a restart takes {format_time(pause)}, within 5 to 20 minutes at Meta (arXiv:2410.21680); "
            "say restart="
        )
    else:
        pause = check_seconds("restart", restart, zero=True)
    running_hours = training_hours + waiting_hours
    iteration = prediction.time * running_hours / training_hours
    failures = plan_checkpoints(iteration, rank_mtbf / prediction.ranks, stop, pause, interval)
    job_mtbf = failures.mtbf
    segments = Segments.cut(running_hours * _HOUR, failures)
    # by logarithms, as the time itself may be too large for a number
    exponent = (pause + segments.length) / job_mtbf
    least = segments.length - stop
    if least < _LEAST_GOODPUT * segments.length:
        raise ValueError(
            f"checkpoint is {format_time(stop)} after each {format_time(least)} of training, which leaves less than "
            f"{_LEAST_GOODPUT:.0%} of the time for training; take a longer interval, a shorter checkpoint or a "
            "larger amount"
        )
    if exponent > -math.log(_LEAST_GOODPUT) or least < _LEAST_GOODPUT * float(
        segment_time(segments.length, mtbf=job_mtbf, restart=pause)
    ):
        raise ValueError(
            f"mtbf is {show(mtbf)}; {prediction.ranks:,} ranks then fail each {format_time(job_mtbf)}, and a "
            f"restart ({format_time(pause)}), {format_time(least)} of training and a checkpoint "
            f"({format_time(stop)}) hardly ever come to their end; mtbf is that of one rank in seconds "
            f"(50,000 h are 1.8e8): if {write_hours(rank_mtbf / _HOUR)} is that of the {prediction.ranks:,} together: "
            f"mtbf='{rank_mtbf * prediction.ranks / _HOUR:.6g}h'; else take a shorter interval, restart or checkpoint"
        )
    return Goodput(
        prediction,
        training_hours,
        failures,
        price_per_gpu_hour,
        power,
        waiting_hours,
        (*warnings, *prediction.warnings),
        None if start is None else read_date("start", start),
    )


def plan_checkpoints(
    iteration: float, job_mtbf: float, stop: float, pause: float, interval: Any = None
) -> Failures:
    """Choose how often a job writes checkpoints.

    Parameters
    ----------
    iteration : float
        Time of an iteration, with what ranks wait [s].
    job_mtbf : float
        Mean time between failures of the whole job [s].
    stop : float
        Time for which one checkpoint stops the run [s].
    pause : float
        From a failure until the run goes on [s].
    interval : float or None, optional
        Training between two checkpoints; by default the one that loses least [s].

    Returns
    -------
    failures : Failures
        With an interval of whole iterations, after which a checkpoint is written.

    Raises
    ------
    ValueError
        For an interval that is not above 0.
    """
    if interval is None:
        wished = float(daly_interval(stop, mtbf=job_mtbf))
    else:
        wished = check_seconds("interval", interval)
    return Failures(job_mtbf, stop, pause, max(round(wished / iteration), 1) * iteration)


def expect_hours(running_hours: float, failures: Failures) -> float:
    """Expected time until a job is done, with checkpoints, restarts and work done again.

    Parameters
    ----------
    running_hours : float
        Time of all iterations [h].
    failures : Failures
        How the job fails, and what that costs.

    Returns
    -------
    hours : float
        See `perfkit.models.failures.segment_time` [h].
    """
    segments = Segments.cut(running_hours * _HOUR, failures)
    one = segment_time(segments.length, mtbf=failures.mtbf, restart=failures.restart)
    return segments.count * float(one) / _HOUR


def find_shortage(prediction: Any) -> str | None:
    """Say what memory a run lacks.

    Parameters
    ----------
    prediction : Prediction
        An iteration of the run.

    Returns
    -------
    shortage : str or None
        What a rank needs, and of how much; None if it fits, or if nobody knows.
    """
    if prediction.fits is False:
        return f"a rank {prediction.memory()}"
    return None


def read_mtbf(mtbf: Any) -> float:
    """Read the mean time between failures of one rank.

    Parameters
    ----------
    mtbf : float or str
        The time itself [s], or with its unit, such as ``4096h``, or the name of a published run.

    Returns
    -------
    seconds : float
        Hours of all ranks over failures [s].

    Raises
    ------
    ValueError
        For a number that is not above 0, and an unknown name.
    """
    is_time = not isinstance(mtbf, str) or read_quantity(mtbf, SECONDS) is not None
    if not is_time and not mtbf[:1].isdigit():
        published = group_rows("name", "published", "failures.csv")
        [row] = published[check_choice("mtbf", mtbf, published)]
        return float(row["mtbf_hours"]) * _HOUR
    return check_seconds("mtbf", mtbf)


def _read_checkpoint(prediction: Any, checkpoint: Any, write_rate: Any) -> float:
    """Time for which one checkpoint stops the run [s]."""
    if checkpoint is not None and write_rate is not None:
        raise ValueError(
            f"checkpoint is {show(checkpoint)} and write_rate is {show(write_rate)}; give one of them"
        )
    if checkpoint is not None:
        return check_seconds("checkpoint", checkpoint, zero=True)
    if write_rate is None:
        raise ValueError(
            "checkpoint is missing; with mtbf= give checkpoint=, the seconds for which writing one stops the "
            "run, or write_rate=, the bytes that a rank writes in a second"
        )
    rate = check_positive("write_rate", write_rate)
    memory = prediction.memory()
    if memory.on_host:
        raise ValueError(
            f"write_rate is {show(write_rate)}; what of {format_bytes(memory.on_host)} on the host a "
            "checkpoint holds is not known; give checkpoint= in seconds"
        )
    return sum(float(memory.parts[part]) for part in _SAVED) / rate


def _write_range(low: float, high: float) -> str:
    """Write two times [h], both in days where one of them is."""
    if high >= _LEAST_DAYS:
        return f"{low / 24:,.3g} to {high / 24:,.3g} days"
    return f"{write_hours(low)} to {write_hours(high)}"


def write_hours(hours: float) -> str:
    """Write a time, in days from two days on.

    Parameters
    ----------
    hours : float
        The time [h].

    Returns
    -------
    text : str
        With its unit.

    Examples
    --------
    >>> write_hours(1.5), write_hours(80.0)
    ('90 min', '3.33 days')
    """
    if hours >= _MANY_DAYS:
        return f"{hours / 24:,.0f} days"
    if hours >= _LEAST_DAYS:
        return f"{hours / 24:.3g} days"
    return format_time(hours * _HOUR)
