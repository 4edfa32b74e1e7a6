"""How far a measured iteration is from its prediction, and what could explain it."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

from perfkit.ground.results import Sections, Table, Tabular
from perfkit.ground.units import (
    check_positive,
    format_bytes,
    format_count,
    format_time,
    read_number,
    show,
)
from perfkit.platform.gallery import is_same_device
from perfkit.readers.measured_steps import MeasuredStep
from perfkit.readers.training_logs import TrainingLog

#: Least elasticity of a resource that is named as a cause [-]: below it no believable speed explains
#: anything.
_TELLING = 0.02
#: How many times slower or faster a resource may have to be to be named as a cause [-].
_BELIEVABLE = 4.0
#: Warnings of a prediction that are repeated beside a measurement outside of its interval [-].
_MOST_WARNINGS = 3


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
    def share_as_far(self) -> float:
        """Share of measurements that would be as far off, or farther, if the interval is right
        [-]."""
        distance = abs(math.log(self.ratio)) / self.prediction.spread
        return 2 * NormalDist().cdf(-distance)

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

    def table(self) -> Table:
        """How fast each resource would have to be to explain the measurement alone.

        Returns
        -------
        frame : polars.DataFrame
            resource, see `Platform.with_scale`; elasticity: by how many per cent the time changes with
            1 % more of it [-]; scale: how many times as fast as on the platform it would have to be,
            null where no believable one does [-]. Those nearest to 1 come first.

        Notes
        -----
        The scale is ratio^(1/elasticity), as if the elasticity held that far. It is arithmetic, not
        evidence: a trace says which resource it was.
        """
        return self._suspects

    @cached_property
    def _suspects(self) -> Table:
        import polars as pl

        rows = []
        for name, elasticity, *_ in self.prediction.sensitivity().table().rows():
            scale = None
            if abs(elasticity) >= _TELLING:
                logarithm = math.log(self.ratio) / elasticity
                if abs(logarithm) <= math.log(_BELIEVABLE):
                    scale = math.exp(logarithm)
            rows.append({"resource": name, "elasticity": elasticity, "scale": scale})
        rows.sort(key=lambda row: abs(math.log(row["scale"])) if row["scale"] else math.inf)
        schema = {"resource": pl.String, "elasticity": pl.Float64, "scale": pl.Float64}
        return pl.DataFrame(rows, schema=schema)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        low, high = map(format_time, self.prediction.interval(0.8))
        measured = format_time(self.measured.seconds)
        predicted = format_time(self.prediction.time)
        side = "inside" if self.is_inside else "outside of"
        return (
            f"{measured} measured, {predicted} predicted ({low}–{high}): {self.ratio:.2f} times as long, "
            f"{side} the 80 % interval"
        )

    def explain(self) -> str:
        """Say how far it is, and what could explain it.

        Returns
        -------
        text : str
            What is not the same run; for a measurement outside of the interval, which resource alone
            would explain it at which speed, and what the prediction warned of.
        """
        lines = [self.headline()]
        share = "fewer than 1 %" if self.share_as_far < 0.01 else f"{100 * self.share_as_far:.0f} %"
        lines.append(f"  {share} of measurements would be as far off if the interval is right")
        if self.measured.iterations > 1:
            counted = format_count(self.measured.iterations, "iteration")
            lines.append(f"  the run itself: {counted}, ± {self.measured.spread:.1%}")
        lines += [f"  not the same run: {text}" for text in self.mismatches]
        if self.measured.memory:
            lines.append(self._compare_memory(self.measured.memory))
        if not self.is_inside:
            lines += self._list_explanations()
        return "\n".join(lines)

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

    def _list_explanations(self) -> list[str]:
        """What could explain a measurement outside of the interval."""
        lines = []
        for name, _, scale in self.table().drop_nulls("scale").head(4).rows():
            lines.append(f"  {name} alone explains it at {scale:.2f} times its speed")
        if not lines:
            lines.append("  no resource alone explains it at a believable speed")
        warnings = self.prediction.warnings
        lines += [f"  the prediction warned: {text}" for text in warnings[:_MOST_WARNINGS]]
        if len(warnings) > _MOST_WARNINGS:
            lines.append(f"  and {len(warnings) - _MOST_WARNINGS} more, see r.warnings")
        return lines

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
    measured : float or MeasuredStep or TrainingLog
        Time of an iteration [s], a record, or a log.

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
    >>> read_measured(10.5).seconds
    10.5
    """
    if isinstance(measured, TrainingLog):
        return measured.summary
    if isinstance(measured, MeasuredStep):
        return measured
    if read_number(measured) is None:
        raise ValueError(
            f"measured is {show(measured)}; it must be the seconds of an iteration, or what "
            "pk.read_training_log read"
        )
    return MeasuredStep(seconds=check_positive("measured", measured))
