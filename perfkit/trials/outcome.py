"""What trials have shown: regret, ranking and errors of predictions, beside what the measurement itself repeats to."""

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.prediction.comparison import summarize_errors
from perfkit.resources import LARGEST_TEXT, reading, write_text
from perfkit.units import Array, format_table, format_time

if TYPE_CHECKING:
    import polars

__all__ = ["Trials"]

_KEYS = ("models", "platform", "ranks", "date", "settings", "machine", "versions")
_RANDOM = ("random", "random 2")


def _rank_correlation(one: Array, other: Array) -> float:
    """Spearman's coefficient; NaN for fewer than three placements, or times that are all the same."""
    from scipy.stats import rankdata

    if len(one) < 3 or not np.ptp(one) or not np.ptp(other):
        return float("nan")
    return float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])


@dataclass(frozen=True)
class Trials:
    """Predicted and measured times of models under several placements.

    Parameters
    ----------
    models : tuple of dict
        For each its name, ``workload`` and ``placements``: ``methods`` that proposed it, ``owners``, ``predicted_s``
        with its interval and parts, and by pass ``measured_s`` with quartiles, turns and parts.
    platform : str
        Name of the platform that predicted.
    ranks : int
        Ranks that ran [-].
    date : str
        Day of the measurement.
    settings : mapping
        How it was measured.
    machine, versions : mapping of str to str
        Where it was measured, with what.

    Notes
    -----
    The regret of a choice is how much longer than the fastest measured placement of the model it takes. The time of a
    placement is the mean of its passes, of medians. `floor` is the regret of whoever picks by one pass and is judged
    by the other: no prediction can be seen to be better than that.
    """

    models: tuple[dict[str, Any], ...]
    platform: str
    ranks: int
    date: str
    settings: Mapping[str, Any]
    machine: Mapping[str, str]
    versions: Mapping[str, str]

    @classmethod
    def load(cls, path: str | Path) -> "Trials":
        """Read what `save` has written.

        Parameters
        ----------
        path : str or Path
            JSON file.

        Returns
        -------
        trials : Trials
            The same times.

        Raises
        ------
        ValueError
            For a file that does not hold trials.
        """
        with reading(path, "pass a file that Trials.save has written", most=LARGEST_TEXT):
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != 1:
                raise ValueError(f"format is {data['format']!r} and this perfkit reads format 1")
            found = cls(tuple(data["models"]), **{key: data[key] for key in _KEYS[1:]})
            _ = found.as_text(), found.table(), found.to_dict()
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON.

        Returns
        -------
        data : dict
            ``format`` 1 and what the class holds.
        """
        return {"format": 1, **{key: getattr(self, key) for key in _KEYS[1:]}, "models": list(self.models)}

    def save(self, path: str | Path) -> Path:
        """Write everything as JSON, a placement a line.

        Parameters
        ----------
        path : str or Path
            File to write.

        Returns
        -------
        path : Path
            The file.
        """
        data = self.to_dict()
        models = [
            json.dumps({key: value for key, value in entry.items() if key != "placements"})[:-1]
            + ', "placements": [\n' + ",\n".join(map(json.dumps, entry["placements"])) + "\n]}"
            for entry in data.pop("models")
        ]  # fmt: skip
        return write_text(path, json.dumps(data)[:-1] + ',\n"models": [\n' + ",\n".join(models) + "\n]}\n")

    def _times(self) -> Iterator[tuple[dict[str, Any], Array, Array]]:
        """Entry, predicted times, and measured ones by pass and placement."""
        for entry in self.models:
            rows = entry["placements"]
            yield entry, np.array([r["predicted_s"] for r in rows]), np.array([r["measured_s"] for r in rows]).T

    def summary(self) -> "polars.DataFrame":
        """Every model in a row.

        Returns
        -------
        frame : polars.DataFrame
            model, tables [-], placements: different ones [-], best_s [s], worst: the slowest over the fastest [-],
            predicted: regret of the predicted best [-], the regret of every method [-], rank_correlation of predicted
            and measured times [-], hit: whether the predicted best is the best, bias and error: mean signed and
            absolute error of the times [-], floor [-], repeat: mean difference of the passes [-] and its
            rank_correlation between them, rank_repeat [-].
        """
        import polars

        rows: list[dict[str, Any]] = []
        for entry, predicted, passes in self._times():
            times, errors = passes.mean(axis=0), predicted / passes.mean(axis=0) - 1
            regret, chosen = times / times.min() - 1, int(np.argmin(predicted))
            by_method = {m: regret[i] for i, row in enumerate(entry["placements"]) for m in row["methods"]}
            order = np.argmin(passes, axis=1)
            floor = [own[pick] / own.min() - 1 for own, pick in zip(passes, order[::-1], strict=True)]
            rows.append({
                "model": entry["name"], "tables": len(entry["workload"]["tables"]), "placements": len(times),
                "best_s": times.min(), "worst": regret.max() + 1, "predicted": regret[chosen],
                **dict(sorted(by_method.items())), "rank_correlation": _rank_correlation(predicted, times),
                "hit": bool(regret[chosen] == 0), "bias": errors.mean(), "error": np.abs(errors).mean(),
                "floor": np.mean(floor), "repeat": np.mean(passes.max(axis=0) / passes.min(axis=0) - 1),
                "rank_repeat": _rank_correlation(*passes),
            })  # fmt: skip
        return polars.DataFrame(rows, infer_schema_length=None)

    def table(self) -> "polars.DataFrame":
        """Every placement in a row.

        Returns
        -------
        frame : polars.DataFrame
            model, methods, predicted_s, low_s and high_s (80 % interval), measured_s [s], repeat: difference of the
            passes [-], and predicted and measured seconds of parts: embedding and dense of the slowest rank, and
            collectives, all_to_all and all_reduce together [s].
        """
        import polars

        rows = []
        for entry in self.models:
            for row in entry["placements"]:
                times, parts = row["measured_s"], [_reduce(p) for p in row["measured_parts"]]
                forecast = _reduce(row["predicted_parts"])
                both = {f"{name}_predicted_s": forecast[name] for name in forecast}
                both |= {f"{name}_measured_s": float(np.mean([p[name] for p in parts])) for name in forecast}
                rows.append({
                    "model": entry["name"], "methods": ", ".join(row["methods"]),
                    **{key: row[key] for key in ("predicted_s", "low_s", "high_s")},
                    "measured_s": float(np.mean(times)), "repeat": max(times) / min(times) - 1, **both,
                })  # fmt: skip
        return polars.DataFrame(rows)

    def parts(self) -> "polars.DataFrame":
        """How well compute and communication are predicted apart, and together.

        Returns
        -------
        frame : polars.DataFrame
            part: embedding and dense of the slowest rank, collectives, and the whole iteration; share: of the time of
            those parts [-]; error figures of `perfkit.prediction.comparison.summarize_errors` [%]; rank_correlation of
            predicted and measured seconds within models, mean [-].
        """
        import polars

        frame, rows = self.table(), []
        whole = float(sum(frame[f"{name}_measured_s"].sum() for name in _NAMES))
        columns = {name: (f"{name}_predicted_s", f"{name}_measured_s") for name in _NAMES}
        for name, (predicted, measured) in {**columns, "iteration": ("predicted_s", "measured_s")}.items():
            groups = [
                frame.filter(polars.col("model") == model) for model in frame["model"].unique(maintain_order=True)
            ]
            ranks = [_rank_correlation(g[predicted].to_numpy(), g[measured].to_numpy()) for g in groups]
            forecast, times = (frame[column].to_numpy() for column in (predicted, measured))
            share, errors = (float(times.sum()) / whole if name in columns else None), forecast / times - 1
            rows.append({"part": name, "share": share, **summarize_errors(errors), "rank_correlation": _mean(ranks)})
        return polars.DataFrame(rows)

    def totals(self) -> dict[str, Any]:
        """Figures over all models.

        Returns
        -------
        figures : dict
            models, placements [-]; regret: mean by method, ``predicted`` among them and ``random`` for both draws [-];
            worst_regret likewise [-]; best_baseline; excess: mean regret of the predicted best beyond that of the best
            baseline, with its standard error over models [-]; floor, repeat [-]; hits, hits_repeat: share of models
            whose predicted best, or best of the other pass, is the best [-]; rank_correlation, rank_repeat [-].
        """
        frame, regrets = self.summary(), {}
        for name in frame.columns[5:]:
            if name in ("rank_correlation", "hit"):
                break
            regrets[name] = frame[name].to_numpy().astype(float)
        draws = [regrets.pop(name) for name in _RANDOM if name in regrets]
        if draws:
            regrets["random"] = np.nanmean(draws, axis=0)
        mean = {name: _mean(values) for name, values in regrets.items()}
        rules = [name for name in mean if name not in ("predicted", "search")]
        best = min(rules, key=lambda name: mean[name]) if rules else None
        excess = regrets["predicted"] - (regrets[best] if best else 0.0)
        again = [np.argmin(passes, axis=1) for _, _, passes in self._times()]
        return {
            "models": len(frame), "placements": int(frame["placements"].sum()), "regret": mean,
            "worst_regret": {name: float(np.nanmax(values)) for name, values in regrets.items()},
            "best_baseline": best, "excess": float(np.nanmean(excess)),
            "excess_error": float(np.nanstd(excess, ddof=1) / np.sqrt(len(excess))) if len(excess) > 1 else None,
            **{key: _mean(frame[key].to_numpy()) for key in ("floor", "repeat", *_COEFFICIENTS)},
            "hits": _mean(frame["hit"].to_numpy()), "hits_repeat": float(np.mean([a == b for a, b in again])),
        }  # fmt: skip

    def as_text(self) -> str:
        """Models and totals as text.

        Returns
        -------
        text : str
            Several lines.
        """
        frame, totals = self.summary(), self.totals()
        shown = [c for c in frame.columns if c not in ("tables", "bias", "repeat")]
        share = {c for c in frame.columns if frame[c].dtype.is_float()} - {"best_s", "worst", *_COEFFICIENTS}
        rows = [("model", *(name.replace("_", " ") for name in shown[1:]))]
        for row in frame.iter_rows(named=True):
            cells = [f"{row[c]:.1%}" if c in share and row[c] is not None else row[c] for c in shown]
            rows.append(tuple(_show(c, cell) for c, cell in zip(shown, cells, strict=True)))
        return f"{format_table(rows, numbers=True)}\n\n{_tell(totals)}"

    def __repr__(self) -> str:
        totals = self.totals()
        return (
            f"{totals['placements']} placements of {totals['models']} models on {self.ranks} ranks of {self.platform}: "
            f"regret {totals['regret']['predicted']:.1%}, best rule of thumb {totals['best_baseline']}"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.as_text())}</pre>"


_NAMES = ("embedding", "dense", "collectives")
_COEFFICIENTS = ("rank_correlation", "rank_repeat")


def _mean(values: Any) -> float:
    """Mean of what is known."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


def _reduce(parts: Mapping[str, Any]) -> dict[str, float]:
    """Embedding and dense seconds of the slowest rank in each, and those of collectives."""
    apart = {name: float(np.max(parts[name])) for name in ("embedding", "dense")}
    return {**apart, "collectives": float(sum(value for name, value in parts.items() if name not in apart))}


def _show(column: str, value: Any) -> str:
    if column in ("best_s", "hit"):
        return format_time(value) if column == "best_s" else ("no", "yes")[value]
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _tell(totals: Mapping[str, Any]) -> str:
    """The totals in words."""
    regret, best = totals["regret"], totals["best_baseline"]
    worst, order = (
        totals["worst_regret"],
        sorted((name for name in regret if name != "predicted"), key=regret.__getitem__),
    )
    others = ", ".join(f"{name} {regret[name]:.1%}" for name in order)
    error = "" if totals["excess_error"] is None else f" ± {totals['excess_error']:.1%}"
    return "\n".join([
        f"{totals['placements']} placements of {totals['models']} models",
        f"regret of the predicted best: {regret['predicted']:.1%} mean, {worst['predicted']:.1%} at most; "
        f"whoever picks by one pass and is judged by the other: {totals['floor']:.1%}",
        f"mean regrets: {others}",
        f"beyond the best rule of thumb, {best}: {totals['excess']:+.1%}{error}",
        f"best hit in {totals['hits']:.0%} of the models (by the other pass {totals['hits_repeat']:.0%}), rank "
        f"correlation {totals['rank_correlation']:.2f} (between passes {totals['rank_repeat']:.2f}), passes differ by "
        f"{totals['repeat']:.1%}",
    ])  # fmt: skip
