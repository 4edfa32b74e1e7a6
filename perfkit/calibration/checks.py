"""Compare predicted with measured iterations, and with the noise of the measurement."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from perfkit.calibration.pace import relate_run
from perfkit.fitting import Pace
from perfkit.ground.files import LARGEST_TEXT, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Picture, Sections, Table, Tabular
from perfkit.ground.targets import write_text
from perfkit.ground.units import check_positive, format_table, format_time
from perfkit.measure.records import MeasuredRank
from perfkit.measure.samples import Sample, dump
from perfkit.prediction.result import Prediction

if TYPE_CHECKING:  # it loads polars, which a machine that only measures may lack
    from perfkit.sharding.result import PlanPrice

_MEASURED = ("measured_s", "measured_q1_s", "measured_q3_s")
#: Times of a run: predicted with its interval, measured with its quartiles [s].
TIMES = ("predicted_s", "low_s", "high_s", *_MEASURED)


#: Errors of a set of runs and their noise, in the order of tables.
#: Columns of a table whose names in files do not say their unit.
_NAMES = {
    "predicted_peak": "predicted_peak_bytes",
    "peak": "peak_bytes",
    "reserved": "reserved_bytes",
}
_ERRORS = ("geomean", "mean", "p95", "max", "bias", "floor")

#: What the columns of errors are.
_LEGEND = (
    ("column", "what it is"),
    ("geomean, mean", "geometric and arithmetic mean of the errors |predicted / measured − 1|"),
    ("p95, max", "what 19 of 20 errors stay below, and the largest"),
    ("bias", "mean error with its sign: above 0 predictions are too long"),
    (
        "noise floor",
        "how far two passes over a configuration differ: noise alone errs by half of it",
    ),
    ("inside 80 %", "share of measured times in their interval: 80 when intervals are right"),
)
#: Mean move of the pace below which errors are those as measured [-]: medians on quiet machines vary
#: as much; docs/formulas.md, table 7.1.
_STEADY = 0.05


def _measure_errors(errors: Any) -> dict[str, float]:
    """Geometric mean of absolute errors (at least 0.01 % each), mean, 95th percentile, maximum, and
    signed mean [-]."""
    values = np.atleast_1d(np.asarray(errors, dtype=float))
    size = np.maximum(np.abs(values), 1e-4)
    return {
        "geomean": float(np.exp(np.log(size).mean())),
        "mean": float(size.mean()),
        "p95": float(np.percentile(size, 95)),
        "max": float(size.max()),
        "bias": float(values.mean()),
    }


def summarize_errors(errors: Any) -> dict[str, float]:
    """Summarize relative errors.

    Parameters
    ----------
    errors : array
        predicted / measured - 1 [-].

    Returns
    -------
    figures : dict of str to float
        n [-], and in percent: geomean (of absolute errors, at least 0.01 % each), mean, p95, max
        and bias.

    Examples
    --------
    >>> summarize_errors([0.1, -0.1, 0.1, -0.1])["geomean"]
    10.0
    """
    figures = {name: round(100 * value, 2) for name, value in _measure_errors(errors).items()}
    return {"n": float(np.size(errors)), **figures}


def compare_run(
    sample: Sample,
    prediction: "Prediction | PlanPrice",
    passes: Sequence[Sequence[MeasuredRank]],
    paces: Mapping[str, Pace],
) -> dict[str, Any]:
    """Join the prediction and the measurements of one configuration.

    Parameters
    ----------
    sample : Sample
        Configuration.
    prediction : Prediction or PlanPrice
        Its prediction.
    passes : sequence of sequence of MeasuredRank
        For each of two passes what every rank saw.
    paces : mapping of str to Pace
        Usual pace of the machine, from the context of its platform.

    Returns
    -------
    run : dict
        One of the runs of a `Comparison`.
    """
    slowest = [_find_slowest(ranks) for ranks in passes]
    measured = [rank.median for rank in slowest]
    related = [relate_run(ranks, sample.family, paces) for ranks in passes]
    usual = [_find_slowest(paced.ranks).median for paced in related]
    run = {
        "family": sample.family,
        "name": sample.name,
        "description": sample.description,
        "config": dump(sample.workload),
        "ranks": sample.ranks,
        **state_prediction(prediction),
        "measured_s": float(np.mean(measured)),
        "measured_q1_s": float(np.mean([rank.q1 for rank in slowest])),
        "measured_q3_s": float(np.mean([rank.q3 for rank in slowest])),
        "flagged": any(bool(rank.flagged) for rank in slowest),
        "passes_s": measured,
        "noise": max(measured) / min(measured) - 1,
        "relative_noise": max(usual) / min(usual) - 1,
    }
    if sample.plan:
        run["config"]["owners"] = list(sample.plan.owners)
    if all(paced.pace is not None for paced in related):
        run["relative_s"] = float(np.mean(usual))
    exposed = []
    for ranks in passes:
        shares = [rank.idle / rank.median for rank in ranks if rank.idle is not None]
        if len(shares) == len(ranks):
            exposed.append(min(shares))
    if len(exposed) == len(passes):
        run["exposed_measured"] = float(np.mean(exposed))
    return run


def _find_slowest(ranks: Sequence[MeasuredRank]) -> MeasuredRank:
    """The rank with the longest iterations."""
    return max(ranks, key=lambda rank: rank.median)


def state_prediction(prediction: "Prediction | PlanPrice") -> dict[str, Any]:
    """Write a prediction as the runs of `Comparison` hold it.

    Parameters
    ----------
    prediction : Prediction or PlanPrice
        The prediction.

    Returns
    -------
    part : dict
        Time with its 80 % interval [s], bottleneck, and for several ranks the exposed share of
        communication [-].
    """
    low, high = prediction.interval(0.8)
    part = {
        "predicted_s": prediction.time,
        "low_s": low,
        "high_s": high,
        "bottleneck": prediction.bottleneck,
    }
    if isinstance(prediction, Prediction) and prediction.ranks > 1:
        part["exposed"] = min(prediction.communication()["exposed_share"].to_list())
    return part


@dataclass(frozen=True)
class Comparison(Tabular):
    """Predicted and measured times of a set of configurations.

    Parameters
    ----------
    runs : tuple of dict
        One per configuration: family, name, description, config, ranks, predicted_s, low_s and high_s (80 %
        interval), measured_s and its quartiles, flagged, bottleneck; passes_s: its two passes [s];
        noise: their relative difference [-]; relative_s and relative_noise: measured time and noise
        at the usual pace of the machine, if references were timed; for several ranks also exposed
        and exposed_measured: the share of time that communication takes on the rank that waits
        least for others.
    platform : str
        Name of the platform.
    machine, versions : mapping of str to str
        Machine and software of the measurements.
    """

    report_title = "Predicted and measured times of a set of configurations"

    runs: tuple[dict[str, Any], ...]
    platform: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]

    @classmethod
    def load(cls, path: str | Path, *more: str | Path) -> Self:
        """Read files that `save` has written.

        Parameters
        ----------
        path : str or Path
            JSON file.
        *more : str or Path
            More files, such as those of other seeds, whose runs are added.

        Returns
        -------
        comparison : Comparison
            All runs, with platform, machine and versions of the first file.

        Raises
        ------
        ValueError
            For a file without a comparison.
        """
        with reading(path, "name a file that check wrote", most=LARGEST_TEXT):
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != 1 or not data["runs"]:
                raise ValueError(
                    f"format is {data['format']!r} with {len(data['runs'])} runs; it must be 1 with some"
                )
            for i, run in enumerate(data["runs"]):
                times = [*TIMES, "relative_s"] if "relative_s" in run else TIMES
                for key in times:
                    check_positive(f"runs[{i}].{key}", run[key])
            first = cls(tuple(data["runs"]), data["platform"], data["machine"], data["versions"])
            _ = first.as_text(), first.table(), first.to_dict()  # raise errors of bad content here
        if not more:
            return first
        return replace(first, runs=first.runs + cls.load(*more).runs)

    def pace_moved(self) -> float:
        """How far the pace of the machine was from the usual, on average over runs with references
        [-]."""
        shares = []
        for run in self.runs:
            if "relative_s" in run:
                shares.append(abs(math.log(run["relative_s"] / run["measured_s"])))
        return float(np.mean(shares)) if shares else 0.0

    def at_usual_pace(self) -> "Comparison":
        """Convert the measured times to the usual pace of the machine, see
        `perfkit.models.kernels.at_usual_pace`.

        Returns
        -------
        comparison : Comparison
            The same runs; runs without references do not change.
        """
        runs = []
        for run in self.runs:
            factor = run.get("relative_s", run["measured_s"]) / run["measured_s"]
            related = dict(run)
            for name in _MEASURED:
                related[name] = factor * run[name]
            if "relative_noise" in run:
                related["noise"] = run["relative_noise"]
            runs.append(related)
        return replace(self, runs=tuple(runs))

    @property
    def errors(self) -> np.ndarray:
        """Relative errors, predicted over measured minus one [-]."""
        return np.array([run["predicted_s"] / run["measured_s"] - 1 for run in self.runs])

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """By family and over ``all``: n, geomean, mean, p95, max, bias, floor (mean noise) and
        inside [-]."""
        families: dict[str, list[dict[str, Any]]] = {}
        for run in self.runs:
            families.setdefault(run["family"], []).append(run)
        families["all"] = list(self.runs)
        figures = {}
        for family, runs in families.items():
            part = replace(self, runs=tuple(runs))
            noise = [run["noise"] for run in runs if "noise" in run]
            figures[family] = {
                "n": len(runs),
                **_measure_errors(part.errors),
                "floor": float(np.mean(noise)) if noise else math.nan,
                "inside": part.coverage(),
            }
        return figures

    def coverage(self) -> float:
        """Share of the measured times within their 80 % interval [-]."""
        inside = [run["low_s"] <= run["measured_s"] <= run["high_s"] for run in self.runs]
        return float(np.mean(inside))

    def summary(self) -> Table:
        """Errors by family and over all runs, with the noise floor.

        Returns
        -------
        frame : polars.DataFrame
            family, n [-], geomean_percent, mean_percent, p95_percent, max_percent, bias_percent,
            floor_percent and inside_percent (share within the 80 % interval) [%].
        """
        import polars

        rows = []
        for family, figures in self.figures.items():
            row: dict[str, Any] = {"family": family, "n": figures["n"]}
            for name in _ERRORS:
                row[f"{name}_percent"] = round(100 * figures[name], 2)
            row["inside_percent"] = round(100 * figures["inside"], 1)
            rows.append(row)
        return polars.DataFrame(rows)

    def table(self) -> Table:
        """All runs with their errors.

        Returns
        -------
        frame : polars.DataFrame
            name, description, family, ranks [-], predicted_s, low_s, high_s, measured_s, measured_q1_s,
            measured_q3_s [s], error [-], flagged, bottleneck; of GPUs peak_bytes, reserved_bytes and
            predicted_peak_bytes, their memory [B].
        """
        check_threads()
        import polars

        rows = []
        for run in self.runs:
            row = dict(run)
            row.pop("config", None)
            rows.append(row)
        frame = polars.DataFrame(rows, orient="row").with_columns(
            polars.Series("error", self.errors)
        )
        return frame.rename(_NAMES, strict=False)

    def chart(self) -> Picture:
        """Chart of predicted against measured times."""
        from perfkit import plots

        return plots.predicted_vs_measured(list(self.runs))

    def sections(self) -> Sections:
        """Sections of a report, see `perfkit.ground.results.Sections`."""
        yield "Errors", self.summary()
        yield "Columns of errors", list(_LEGEND)
        if self.pace_moved() > _STEADY:
            yield "Errors at the usual pace of the machine", self.at_usual_pace().summary()
        yield "", self.chart()
        yield "Runs", self._write()
        yield "Measured on", [("what", "value"), *{**self.machine, **self.versions}.items()]

    def _write(self) -> list[Sequence[str]]:
        """The runs as rows of text, with a header."""
        heads = (
            "configuration",
            "predicted (80 % interval)",
            "measured (quartiles)",
            "error",
            "bottleneck",
        )
        rows: list[Sequence[str]] = [heads]
        for run, error in zip(self.runs, self.errors, strict=True):
            predicted = _write_range(run, "predicted_s", "low_s", "high_s")
            measured = _write_range(run, *_MEASURED)
            mark = " unsteady" if run["flagged"] else ""
            name = run.get("description", run["name"])  # older files have no description
            rows.append((name, predicted, measured, f"{error:+.1%}", run["bottleneck"] + mark))
        return rows

    def as_text(self) -> str:
        """The runs as an aligned table, then the errors by family with the noise floor."""
        lines = [format_table(self._write()), "", format_table(_LEGEND), "", self.summary_as_text()]
        if self.pace_moved() > _STEADY:
            figures = self.at_usual_pace().figures["all"]
            lines += [
                "The speed of the machine changed meanwhile. With times converted to its usual pace, by short "
                f"references\nbetween the iterations: {figures['mean']:.1%} mean error, "
                f"{figures['inside']:.0%} inside. Where both are far apart, repeat it on a quiet machine."
            ]
        parallel = [run for run in self.runs if "exposed_measured" in run]
        if parallel:
            predicted = 100 * np.array([run["exposed"] for run in parallel])
            measured = 100 * np.array([run["exposed_measured"] for run in parallel])
            said = (
                f"{predicted.mean():.0f} % of the time predicted, {measured.mean():.0f} % measured"
            )
            apart = f"{np.abs(predicted - measured).mean():.0f} points apart on average"
            lines.append(f"exposed communication of {len(parallel)} runs: {said}; {apart}")
        return "\n".join(lines)

    def summary_as_text(self) -> str:
        """The errors by family with the noise floor, as an aligned table."""
        heads = (
            "errors, %",
            "runs",
            "geomean",
            "mean",
            "p95",
            "max",
            "bias",
            "noise floor",
            "inside 80 %",
        )
        rows: list[Sequence[str]] = [heads]
        for family, figures in self.figures.items():
            percents = [f"{100 * figures[name]:.1f}" for name in (*_ERRORS, "inside")]
            rows.append((family, f"{figures['n']}", *percents))
        return format_table(rows, numbers=True)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON.

        Returns
        -------
        data : dict
            ``format`` 1 with platform, machine, versions, noise_floor and runs.
        """
        floors = {}
        for family, figures in self.figures.items():
            if math.isfinite(figures["floor"]):
                floors[family] = figures["floor"]
        return {
            "format": 1,
            "platform": self.platform,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "noise_floor": floors,
            "runs": list(self.runs),
        }

    def save(self, path: str | Path) -> Path:
        """Write everything as JSON to a file and return its path.

        Parameters
        ----------
        path : str or Path
            File to write.
        """
        return write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        figures = self.figures["all"]
        worst = self.runs[int(np.argmax(np.abs(self.errors)))]
        return (
            f"{len(self.runs)} runs on {self.platform}: "
            f"error {100 * figures['geomean']:.1f} % geomean, {100 * figures['mean']:.1f} % mean, "
            f"{100 * figures['max']:.0f} % at most ({worst.get('description', worst['name'])}, "
            f"{format_time(worst['measured_s'])}); noise floor {100 * figures['floor']:.1f} %; "
            f"{figures['inside']:.0%} inside the 80 % interval"
        )

    def __repr__(self) -> str:
        return self.headline()


def _write_range(run: Mapping[str, Any], middle: str, low: str, high: str) -> str:
    """A time of a run with its range."""
    return f"{format_time(run[middle])} ({format_time(run[low])} to {format_time(run[high])})"
