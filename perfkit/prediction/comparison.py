"""Predicted and measured iterations side by side, with the noise of the measurement itself."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.estimates import keep_quiet
from perfkit.pace import relate_run
from perfkit.platform import Platform
from perfkit.prediction.result import Prediction, predict
from perfkit.resources import LARGEST_TEXT, expect_number, reading, write_text
from perfkit.units import check_choice, format_table, format_time
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import Sample, dump, load

if TYPE_CHECKING:
    import altair
    import polars

__all__ = ["Comparison", "summarize_errors"]

_TIMES = ("predicted_s", "low_s", "high_s", "measured_s", "measured_q1_s", "measured_q3_s")


def summarize_errors(errors: Any) -> dict[str, float]:
    """Figures that every comparison quotes, of relative errors.

    Parameters
    ----------
    errors : array
        predicted / measured - 1 [-].

    Returns
    -------
    figures : dict of str to float
        n [-], and in percent geomean (of absolute errors, at least 0.01 % each), mean, p95, max and bias.

    Examples
    --------
    >>> summarize_errors([0.1, -0.1, 0.1, -0.1])["geomean"]
    10.0
    """
    values = np.atleast_1d(np.asarray(errors, dtype=float))
    size = np.maximum(np.abs(values), 1e-4)
    figures = {
        "geomean": np.exp(np.log(size).mean()), "mean": size.mean(), "p95": np.percentile(size, 95), "max": size.max(),
        "bias": values.mean(),
    }  # fmt: skip
    return {"n": float(len(values)), **{name: round(100 * float(value), 2) for name, value in figures.items()}}


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured times of a set of configurations.

    Parameters
    ----------
    runs : tuple of dict
        One per configuration: family, name, config, ranks, predicted_s, low_s and high_s (80 % interval), measured_s
        and its quartiles, flagged, bottleneck; relative_s: the measured time at the usual pace of the machine, where
        references were timed beside it; of several ranks also exposed and exposed_measured: the share of time that
        communication takes from the rank that waits least for others.
    platform : str
        Name of the platform.
    machine, versions : mapping of str to str
        Where it was measured, with what.
    noise_floor : mapping of str to float
        Mean relative difference of the two passes by family, and over all [-].
    relative_floor : mapping of str to float, optional
        The same of times at the usual pace [-].
    """

    runs: tuple[dict[str, Any], ...]
    platform: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    noise_floor: Mapping[str, float]
    relative_floor: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        platform: Platform,
        samples: Sequence[Sample],
        predictions: Sequence[Prediction],
        rows: Sequence[Mapping[str, Any]],
        *,
        machine: Mapping[str, str],
        versions: Mapping[str, str],
    ) -> "Comparison":
        """Put predictions and measurements of the same configurations together.

        Parameters
        ----------
        platform : Platform
            What predicted.
        samples : sequence of Sample
            Configurations.
        predictions : sequence of Prediction
            One per configuration.
        rows : sequence of mapping
            What `perfkit.campaign.measure_samples` returned for them, with two passes.
        machine, versions : mapping of str to str
            Where it was measured, with what.

        Returns
        -------
        comparison : Comparison
            The pairs and the noise floor.
        """
        runs: list[dict[str, Any]] = []
        noise: dict[str, list[float]] = {}
        relative: dict[str, list[float]] = {}
        for sample, prediction, row in zip(samples, predictions, rows, strict=True):
            slowest = [max(results, key=lambda r: r["median"]) for results in row["passes"]]
            medians = [r["median"] for r in slowest]
            noise.setdefault(sample.family, []).append(max(medians) / min(medians) - 1)
            related = [relate_run(results, sample.family, platform.context) for results in row["passes"]]
            usual = [max(r["median"] for r in results) for results in related]
            relative.setdefault(sample.family, []).append(max(usual) / min(usual) - 1)
            run = {
                "family": sample.family, "name": sample.name, "config": _settings(sample), "ranks": sample.ranks,
                **_forecast(prediction), "measured_s": float(np.mean(medians)),
                "measured_q1_s": float(np.mean([r["q1"] for r in slowest])),
                "measured_q3_s": float(np.mean([r["q3"] for r in slowest])),
                "flagged": any(r.get("flagged", False) for r in slowest),
            }  # fmt: skip
            if all("pace" in result for results in related for result in results):
                run["relative_s"] = float(np.mean(usual))
            idle = [min(r["idle"] / r["median"] for r in results) for results in row["passes"] if "idle" in results[0]]
            runs.append({**run, "exposed_measured": float(np.mean(idle))} if idle else run)
        return cls(tuple(runs), platform.name, machine, versions, *map(_floor, (noise, relative)))

    @classmethod
    def load(cls, path: str | Path) -> "Comparison":
        """Read what `save` has written.

        Parameters
        ----------
        path : str or Path
            JSON file.

        Returns
        -------
        comparison : Comparison
            The same runs.

        Raises
        ------
        ValueError
            For a file that does not hold a comparison.
        """
        with reading(path, "name a file that check wrote", most=LARGEST_TEXT):
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != 1:
                raise ValueError(f"format is {data['format']!r} and this perfkit reads format 1")
            names = ("platform", "machine", "versions", "noise_floor")
            more = {"relative_floor": data.get("relative_floor", {})}
            found = cls(tuple(data["runs"]), **{name: data[name] for name in names}, **more)
            if not found.runs:
                raise ValueError("runs is empty")
            for i, run in enumerate(found.runs):
                for key in [*_TIMES, *({"relative_s"} & run.keys())]:
                    expect_number("s", low=0, above=True)(run[key], f"runs[{i}].{key}")
            _ = found.as_text(), found.table(), found.to_dict()
        return found

    @classmethod
    def pool(cls, comparisons: "Sequence[Comparison]") -> "Comparison":
        """Put the runs of several comparisons together, such as those of several seeds.

        Parameters
        ----------
        comparisons : sequence of Comparison
            At least one.

        Returns
        -------
        comparison : Comparison
            All runs; each noise floor is the mean over them, machine and versions are those of the first.

        Raises
        ------
        ValueError
            If there is none.
        """
        if not comparisons:
            raise ValueError("comparisons is empty; pool at least one")
        first, floors = comparisons[0], []
        for name in ("noise_floor", "relative_floor"):
            noise: dict[str, list[float]] = {}
            for comparison in comparisons:
                families = [run["family"] for run in comparison.runs]
                for family, floor in getattr(comparison, name).items():
                    noise.setdefault(family, []).extend(
                        [floor] * (len(families) if family == "all" else families.count(family))
                    )
            floors.append({family: float(np.mean(values)) for family, values in noise.items() if values})
        runs = tuple(run for comparison in comparisons for run in comparison.runs)
        return cls(runs, first.platform, first.machine, first.versions, *floors)

    def predict_again(self, platform: Platform) -> "Comparison":
        """Compare the same measurements with the predictions of another platform, such as a later fit.

        Parameters
        ----------
        platform : Platform
            What predicts.

        Returns
        -------
        comparison : Comparison
            The same runs with other predictions.
        """
        runs = []
        for run in self.runs:
            config = dict(run["config"])
            owners = config.pop("owners", None)
            plan = Plan.from_owners(owners, ranks=run["ranks"]) if owners else None
            with keep_quiet():
                prediction = predict(load(config), platform, ranks=run["ranks"], plan=plan)
            runs.append({**run, **_forecast(prediction)})
        return replace(self, runs=tuple(runs), platform=platform.name)

    def select(self, *families: str) -> "Comparison":
        """Keep the runs of some families.

        Parameters
        ----------
        *families : str
            Families such as ``dlrm``, ``transformer`` and ``hybrid``.

        Returns
        -------
        comparison : Comparison
            Those runs, in their order.

        Raises
        ------
        ValueError
            For a family without runs.
        """
        for family in families:
            check_choice("family", family, dict.fromkeys(run["family"] for run in self.runs))
        runs = tuple(run for run in self.runs if run["family"] in families)
        kept = []
        for floors in (self.noise_floor, self.relative_floor):
            known = {family: floors[family] for family in families if family in floors}
            each = [known[run["family"]] for run in runs if run["family"] in known]
            kept.append({**known, "all": float(np.mean(each))} if each else {})
        return replace(self, runs=runs, noise_floor=kept[0], relative_floor=kept[1])

    def at_usual_pace(self) -> "Comparison":
        """Compare with the measured times at the usual pace of the machine, see `perfkit.models.drift.at_usual_pace`.

        Returns
        -------
        comparison : Comparison
            The same runs; those without references stay as measured.
        """
        runs = []
        for run in self.runs:
            factor = run.get("relative_s", run["measured_s"]) / run["measured_s"]
            runs.append(
                {**run, **{name: factor * run[name] for name in ("measured_s", "measured_q1_s", "measured_q3_s")}}
            )
        return replace(self, runs=tuple(runs), noise_floor=self.relative_floor or self.noise_floor)

    @property
    def errors(self) -> np.ndarray:
        """Relative errors, predicted over measured minus one [-]."""
        return np.array([run["predicted_s"] / run["measured_s"] - 1 for run in self.runs])

    def coverage(self) -> float:
        """Share of the measured times inside their 80 % interval.

        Returns
        -------
        share : float
            Between 0 and 1 [-].
        """
        return float(np.mean([run["low_s"] <= run["measured_s"] <= run["high_s"] for run in self.runs]))

    def summary(self) -> "polars.DataFrame":
        """Errors by family and over all, beside the noise floor.

        Returns
        -------
        frame : polars.DataFrame
            family, n [-], geomean, mean, p95, max, bias, floor and inside (share within the 80 % interval) [%].
        """
        import polars

        rows = []
        families = [*dict.fromkeys(run["family"] for run in self.runs)]
        for family in [*families, "all"]:
            part = self.select(family) if family != "all" else self
            figures = summarize_errors(part.errors)
            floor = round(100 * self.noise_floor.get(family, float("nan")), 2)
            rows.append({"family": family, **figures, "floor": floor, "inside": round(100 * part.coverage(), 1)})
        return polars.DataFrame(rows, orient="row").with_columns(polars.col("n").cast(polars.Int64))

    def table(self) -> "polars.DataFrame":
        """All runs with their errors.

        Returns
        -------
        frame : polars.DataFrame
            name, family, ranks [-], predicted_s, low_s, high_s, measured_s, measured_q1_s, measured_q3_s [s],
            error [-], flagged, bottleneck.
        """
        import polars

        rows = [{key: value for key, value in run.items() if key != "config"} for run in self.runs]
        return polars.DataFrame(rows, orient="row").with_columns(polars.Series("error", self.errors))

    def chart(self) -> "altair.LayerChart":
        """Predicted against measured times.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        return plots.predicted_vs_measured(list(self.runs))

    def as_text(self) -> str:
        """The runs as an aligned table, then the errors by family beside the noise floor.

        Returns
        -------
        text : str
            Several lines.
        """
        heads = ("configuration", "predicted (80 % interval)", "measured (quartiles)", "error", "bottleneck")
        rows = [heads]
        for run, error in zip(self.runs, self.errors, strict=True):
            low, time, high = (format_time(run[key]) for key in ("low_s", "predicted_s", "high_s"))
            q1, middle, q3 = (format_time(run[key]) for key in ("measured_q1_s", "measured_s", "measured_q3_s"))
            mark = " unsteady" if run["flagged"] else ""
            rows.append(
                (
                    run["name"],
                    f"{time} ({low} to {high})",
                    f"{middle} ({q1} to {q3})",
                    f"{error:+.1%}",
                    run["bottleneck"] + mark,
                )
            )
        lines = [format_table(rows), "", self.summary_as_text()]
        if any("relative_s" in run for run in self.runs):
            lines += ["at the usual pace of the machine, told by references between the iterations:"]
            lines += [self.at_usual_pace().summary_as_text()]
        return "\n".join([*lines, *self._exposure_as_text()])

    def _exposure_as_text(self) -> list[str]:
        """How far predicted shares of exposed communication lie from measured ones, where there are any."""
        pairs = [(run["exposed"], run["exposed_measured"]) for run in self.runs if "exposed_measured" in run]
        if not pairs:
            return []
        predicted, measured = 100 * np.array(pairs).T
        apart = np.abs(predicted - measured)
        return [
            f"exposed communication: {predicted.mean():.0f} % of the time predicted, {measured.mean():.0f} % measured, "
            f"apart by {apart.mean():.0f} points on average and {apart.max():.0f} at most in {len(pairs)} runs"
        ]

    def summary_as_text(self) -> str:
        """The errors by family beside the noise floor, one line each.

        Returns
        -------
        text : str
            Several lines.
        """
        return "\n".join(
            f"{row['family']:<12} {row['n']:>3} runs  geomean {row['geomean']:.1f} %  mean {row['mean']:.1f} %  "
            f"max {row['max']:.1f} %  bias {row['bias']:+.1f} %  noise floor {row['floor']:.1f} %  "
            f"inside the 80 % interval {row['inside']:.0f} %"
            for row in self.summary().iter_rows(named=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON.

        Returns
        -------
        data : dict
            ``format`` 1 with platform, machine, versions, noise_floor and runs.
        """
        return {
            "format": 1, "platform": self.platform, "machine": dict(self.machine), "versions": dict(self.versions),
            "noise_floor": dict(self.noise_floor), "relative_floor": dict(self.relative_floor), "runs": list(self.runs),
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write everything as JSON.

        Parameters
        ----------
        path : str or Path
            File to write.

        Returns
        -------
        path : Path
            The file.
        """
        return write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def __repr__(self) -> str:
        figures, floor = summarize_errors(self.errors), 100 * self.noise_floor.get("all", 0.0)
        worst = max(self.runs, key=lambda run: abs(run["predicted_s"] / run["measured_s"] - 1))
        return (
            f"{len(self.runs)} runs on {self.platform}: error {figures['geomean']:.1f} % geomean, "
            f"{figures['mean']:.1f} % mean, {figures['max']:.0f} % at most "
            f"({worst['name']}, {format_time(worst['measured_s'])}); "
            f"noise floor {floor:.1f} %; {self.coverage():.0%} inside the 80 % interval"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"


def _floor(differences: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean difference of two passes by family, and over all."""
    together = [value for values in differences.values() for value in values]
    return {family: float(np.mean(values)) for family, values in {**differences, "all": together or [0.0]}.items()}


def _forecast(prediction: Prediction) -> dict[str, Any]:
    low, high = prediction.interval(0.8)
    said = {"predicted_s": prediction.time, "low_s": low, "high_s": high, "bottleneck": prediction.bottleneck}
    shares = prediction.communication()["exposed_share"].to_list() if prediction.ranks > 1 else []
    return {**said, "exposed": min(shares)} if shares else said


def _settings(sample: Sample) -> dict[str, Any]:
    return {**dump(sample.workload), **({"owners": list(sample.plan.owners)} if sample.plan else {})}
