"""How far a measured iteration is from its prediction, and what could explain it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.ground.quantities import check_seconds
from perfkit.ground.results import Sections, Table, Tabular, wrap_lines
from perfkit.ground.units import (
    format_bytes,
    format_count,
    format_interval,
    format_time,
    read_number,
    show,
)
from perfkit.models.kernels import capped_clock
from perfkit.platform.datasheets import find_datasheet
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import is_same_device
from perfkit.platform.whatif import LEAST_POWER, list_resources
from perfkit.prediction.single_causes import (
    BELIEVABLE,
    SingleCause,
    count_steps,
    find_single_causes,
    has_many_operations,
    predict_time,
)
from perfkit.prediction.uncertainty import STEP
from perfkit.readers.measured_steps import MeasuredStep
from perfkit.readers.training_logs import TrainingLog

if TYPE_CHECKING:
    from perfkit.platform.platform import Platform

#: Least share of attention in the time at which it is named as a cause [-].
_TELLING = 0.02
#: Warnings of a prediction that are repeated beside a measurement outside of its interval [-].
_MOST_WARNINGS = 3
#: Published steps of Transformers, each predicted with its source left out as a reader's program is:
#: how many, which share was outside of its 80 and 95 % interval, and the 95th percentile of errors [%];
#: docs/accuracy.md, steps of many software stacks.
STEPS, OUTSIDE_80, OUTSIDE_95, ERROR_95 = 166, 46, 25, 26
#: Family of these steps.
_FAMILY = "transformer"
#: Resources that are named first, as runs differ in them most often.
_FIRST = ("peak", "memory")
#: What a resource is, where its name does not tell.
_MEANINGS = {
    "peak": "peak (arithmetic, as at lower clocks)",
    "memory": "memory (its bandwidth, as with another bin of memory)",
    "cache": "cache (bandwidth of the last cache)",
    "intra": "intra (bandwidth inside nodes)",
    "inter": "inter (bandwidth between nodes)",
    "latency": "latency (start-ups of kernels and messages)",
    "host": "host (what launches kernels)",
}


@dataclass(frozen=True, eq=False)
class Deviation(Tabular):
    """How far a measured iteration is from its prediction.

    Parameters
    ----------
    prediction : Prediction
        What was predicted.
    measured : MeasuredStep
        What was measured.
    """

    report_title = "A measured iteration beside its prediction"

    prediction: Any  # a Prediction, which imports this module
    measured: MeasuredStep

    @property
    def ratio(self) -> float:
        """Measured over predicted time [-]."""
        return self.measured.seconds / self.prediction.time

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is inside the 80 % interval."""
        low, high = self.prediction.interval(0.8)
        return low <= self.measured.seconds <= high

    @property
    def distance(self) -> float:
        """How far the measured time is from the predicted one, in half-widths of the 80 % interval;
        1 at its ends [-]."""
        _, high = self.prediction.interval(0.8)
        return abs(math.log(self.ratio)) / math.log(high / self.prediction.time)

    @cached_property
    def mismatches(self) -> tuple[str, ...]:
        """What the measurement states of its run that was not predicted."""
        found = []
        workload = self.prediction.workload
        for key, predicted in (
            ("ranks", self.prediction.ranks),
            ("batch", getattr(workload, "batch", None)),
            ("sequence", getattr(workload, "sequence", None)),
            ("dtype", getattr(workload, "dtype", None)),
        ):
            stated = getattr(self.measured, key)
            if stated is not None and predicted is not None and stated != predicted:
                found.append(f"{key} is {stated} in the measurement and {predicted} here")
        device = self.prediction.platform.device.name
        stated_device = self.measured.device
        if stated_device is not None and not is_same_device(stated_device, device):
            found.append(f"the device is {stated_device} in the measurement and {device} here")
        if self.measured.seconds < self.prediction.lower_bound:
            least = format_time(self.prediction.lower_bound)
            found.append(
                f"the busiest resource alone takes {least}, longer than the measurement: check batch, "
                "sequence, ranks and the device"
            )
        return tuple(found)

    def correct(self) -> "Platform":
        """The platform corrected by this one run: all resources are as much slower or faster as the run was.

        Returns
        -------
        platform : Platform
            On it the same iteration takes the measured time, and every other one so many times as long as
            before. One run does not tell which resource it was; several that differ do, see `perfkit.tune`.

        Raises
        ------
        ValueError
            For a measurement of another run, see `mismatches`, and for an iteration that waits for data.

        Notes
        -----
        A scale on all resources, see `Platform.with_scale`. Intervals are as wide as those of a platform with other
        resources. Transfers to and from the host are unchanged, so that the time may differ by their share.
        """
        if self.mismatches:
            raise ValueError(f"the measurement is not of the same run: {self.mismatches[0]}")
        if self.prediction.causes.loading > 0:
            raise ValueError(
                "the iteration waits for its data loader, which tells nothing of the platform; predict and measure it "
                "without loading="
            )
        platform = self.prediction.platform
        return platform.with_scale(**dict.fromkeys(list_resources(platform), 1 / self.ratio))

    def table(self) -> Table:
        """How fast each resource would have to be to explain the measurement alone.

        Returns
        -------
        frame : polars.DataFrame
            resource, see `Platform.with_scale`; elasticity: by how many per cent the time changes with
            1 % more of it [-]; scale: how many times as fast as on the platform it would have to be,
            null where no believable one does, from a quarter to four times [-]. Those nearest to 1 come
            first.

        Notes
        -----
        Each scale is searched by predicting again, so that on the platform with it the time is the
        measured one within 2 %. The elasticity holds near today's speed alone: communication that
        overlaps costs nothing until it takes longer than what it overlaps with. It is arithmetic, not
        evidence: a trace says which resource it was. Of an iteration with more than 25,000 operations
        each scale takes few predictions, and is approximate.
        """
        import polars as pl

        rows = []
        for cause in self._causes:
            slightly = predict_time(self.prediction, cause.resource, STEP)
            elasticity = math.log(slightly / self.prediction.time) / math.log(STEP)
            rows.append((cause.resource, elasticity, cause.scale))
        schema = {"resource": pl.String, "elasticity": pl.Float64, "scale": pl.Float64}
        return pl.DataFrame(rows, schema=schema, orient="row")

    @cached_property
    def _causes(self) -> list[SingleCause]:
        """Each resource as the only cause, those nearest to their speed of today first."""
        causes = find_single_causes(self.prediction, self.measured.seconds)
        causes.sort(key=lambda cause: abs(math.log(cause.scale)) if cause.scale else math.inf)
        return causes

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        measured = format_time(self.measured.seconds)
        predicted = format_interval(self.prediction.time, *self.prediction.interval(0.8))
        side = "inside" if self.is_inside else "outside of"
        return (
            f"{self.ratio:.2f} times as long as predicted, {side} the 80 % interval: "
            f"{measured} measured, {predicted} predicted"
        )

    def explain(self) -> str:
        """Say how far it is, and what could explain it.

        Returns
        -------
        text : str
            That the predicted settings do not fit into memory; what is not the same run; for a measurement outside of the interval, how often published
            steps are outside, what alone would explain it (a power cap, attention, each resource), and
            what the prediction warned of.
        """
        lines = [self.headline()]
        does_not_fit = self.prediction.fits is False
        if does_not_fit:
            lines.append(self._say_that_it_does_not_fit())
        if not self.is_inside:
            lines += self._say_how_far()
        if self.measured.iterations > 1:
            counted = format_count(self.measured.iterations, "iteration")
            lines.append(f"  the run itself: {counted}, ± {self.measured.spread:.1%}")
        lines += [f"  not the same run: {text}" for text in self.mismatches]
        if self.measured.memory:
            lines.append(self._compare_memory(self.measured.memory))
        if not self.is_inside:
            lines += self._list_explanations()
        if not self.mismatches and not does_not_fit and self.prediction.causes.loading == 0:
            lines.append(
                f"  this run corrects the platform: correct() has all resources x {1 / self.ratio:.2f}; one run does not "
                "tell which it was"
            )
        return "\n".join(wrap_lines(lines))

    def _say_that_it_does_not_fit(self) -> str:
        """Say that a run which fits had other settings, and which they may be."""
        need = str(self.prediction.memory()).removesuffix(": does not fit")
        others = "other settings"
        if hasattr(self.prediction.workload, "accumulate"):
            others = "smaller micro-batches or other settings (accumulate, micro_batch)"
        return (
            f"  these settings do not fit: a rank {need}; your run had {others}: predict those before "
            "you look for another cause"
        )

    def _compare_memory(self, reported: float) -> str:
        """The memory that the run reported beside both that are predicted."""
        memory = self.prediction.memory()
        line = (
            f"  memory: {format_bytes(reported)} reported, {format_bytes(memory.total)} predicted"
        )
        if memory.reserve:
            line += (
                f", {format_bytes(memory.reserved)} with the context of CUDA, buffers of NCCL and "
                "fragments of the allocator"
            )
        return line

    def _say_how_far(self) -> list[str]:
        """How far outside of the interval the measurement is, and how often such steps are outside."""
        lines = [f"  {self.distance:.1f} times as far off as the end of that interval"]
        # levels of software, whose spread the interval has, were fitted to these steps
        if self.prediction.level is not None and self.prediction.workload.family == _FAMILY:
            lines.append(
                f"  such intervals are too narrow for runs of others than those that were fitted: of {STEPS} "
                f"published steps whose source was left out, {OUTSIDE_80} % were outside, {OUTSIDE_95} % outside "
                f"of the 95 % interval, and one in twenty was more than {ERROR_95} % off"
            )
        return lines

    def _list_explanations(self) -> list[str]:
        """What could explain a measurement outside of the interval."""
        lines = []
        is_slower = self.ratio > 1
        if self.prediction.platform.device.kind != "cpu":
            if is_slower:
                lines += self._try_power_cap()
            lines += self._try_attention()
        lines += self._list_resources()
        warnings = self.prediction.warnings
        lines += [f"  the prediction warned: {text}" for text in warnings[:_MOST_WARNINGS]]
        if len(warnings) > _MOST_WARNINGS:
            lines.append(f"  and {len(warnings) - _MOST_WARNINGS} more, see r.warnings")
        return lines

    def _list_resources(self) -> list[str]:
        """Which resources alone explain the measurement, at which speed, and which do not."""
        able = [cause for cause in self._causes if cause.scale]
        unable = [cause.resource for cause in self._causes if not cause.scale]
        if not able:
            return ["  no resource alone explains it at a believable speed"]
        lines = []
        able.sort(key=lambda cause: cause.resource not in _FIRST)
        for cause in able:
            meaning = _MEANINGS.get(cause.resource, cause.resource)
            line = f"  {meaning} alone explains it at {cause.scale:.3g} times its speed"
            if has_many_operations(self.prediction) and cause.time is not None:
                line += f", about: {format_time(cause.time)} predicted"
            lines.append(line)
        if has_many_operations(self.prediction):
            lines.append(
                f"  each speed was searched in {count_steps(self.prediction)} steps alone, as one prediction of "
                "so many operations takes long"
            )
        if unable:
            range_of_speeds = (
                f"down to 1/{BELIEVABLE:g} of" if self.ratio > 1 else f"up to {BELIEVABLE:g} times"
            )
            lines.append(
                f"  {', '.join(unable)}: none of these alone explains it at a believable speed, {range_of_speeds} "
                "today's"
            )
        return lines

    def _try_power_cap(self) -> list[str]:
        """Which power cap would explain a slower measurement; nothing where caps are not known.

        A cap lowers the clock, and so the rate of arithmetic: it is the cap with the clock at which peak
        alone explains the measurement.
        """
        platform = self.prediction.platform
        sheet = find_datasheet(platform.device)
        if sheet is None or sheet.power is None:
            return []
        full = sheet.power.value
        least = LEAST_POWER * full
        try:
            capped = platform.with_power(least)
        except ValueError:
            return []  # its clock is lower already
        with keep_quiet():
            slowdown = self.prediction._repredict(capped).time / self.prediction.time
        if slowdown < self.ratio:
            return [
                f"  a power cap alone does not explain it: {least:g} W, the lowest that is modelled, takes "
                f"{slowdown:.2f} times as long, and {self.ratio / slowdown:.2f} times are left; see "
                f"platform.with_power({least:g}), and nvidia-smi -q -d POWER,CLOCK for that of the run"
            ]
        [clock] = [cause.scale for cause in self._causes if cause.resource == "peak"]
        if clock is None:
            return []
        powers = np.linspace(least, full, 301)
        watts = round(float(np.interp(clock, capped_clock(powers / full), powers)))
        return [
            f"  a power cap of {watts} of {full:g} W alone explains it; see platform.with_power({watts}), and "
            "nvidia-smi -q -d POWER,CLOCK for that of the run"
        ]

    def _try_attention(self) -> list[str]:
        """How much longer attention would have to take; nothing where it takes hardly any time."""
        of_attention = [
            seconds
            for (_, kind), (_, seconds) in self.prediction.parts.items()
            if kind == "attention"
        ]
        share = sum(of_attention) / self.prediction.time
        if share < _TELLING:
            return []
        factor = 1 + (self.ratio - 1) / share
        if not 1 / BELIEVABLE <= factor <= BELIEVABLE:
            return []
        return [
            f"  attention, {share:.0%} of the time, alone explains it if its kernel takes {factor:.2f} times as "
            "long, see attention= of the workload"
        ]

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        yield "What would explain it alone", self.table()
        yield "", self.prediction

    def __repr__(self) -> str:
        return self.headline()


def read_measured(measured: Any) -> MeasuredStep:
    """A measured step as it may be given.

    Parameters
    ----------
    measured : float or str or MeasuredStep or TrainingLog
        Time of an iteration [s], also as text with its unit, a record, or a log.

    Returns
    -------
    measured : MeasuredStep
        The record.

    Raises
    ------
    ValueError
        For anything else.

    Examples
    --------
    >>> read_measured(10.5).seconds, read_measured("44ms").seconds
    (10.5, 0.044)
    """
    if isinstance(measured, TrainingLog):
        return measured.summary
    if isinstance(measured, MeasuredStep):
        return measured
    if not isinstance(measured, str) and read_number(measured) is None:
        raise ValueError(
            f"measured is {show(measured)}; it must be the seconds of an iteration, a time with its unit, such as "
            "'44ms', or what pk.read_training_log read"
        )
    return MeasuredStep(seconds=check_seconds("measured", measured))
