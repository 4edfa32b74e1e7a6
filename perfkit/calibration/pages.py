"""One HTML file that shows what was predicted, what was measured and how they differ; it opens without a network."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from perfkit import plots
from perfkit.calibration.campaign import calibrate, check
from perfkit.calibration.checks import TIMES, Comparison
from perfkit.ground.files import write_text
from perfkit.ground.units import format_time
from perfkit.measure.machine import count_cores
from perfkit.measure.samples import draw_check
from perfkit.platform.platform import Platform
from perfkit.prediction.result import Prediction, predict
from perfkit.workloads.transformer import Transformer

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 66rem; background: Canvas; color: CanvasText;
  font: 16px/1.55 Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; }
h2 { margin-top: 2.75rem; font-size: 1.2rem; } p { max-width: 44rem; }
.soft, small, summary, figcaption { opacity: .75; font-size: .875rem; } small { display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
figure { margin: 1.25rem 0; break-inside: avoid; } figure svg { max-width: 100%; height: auto; }
"""
#: Nothing may be fetched or run, whatever a platform file or a configuration is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[str] = ()) -> str:
    """A table; every cell is text, or a pair of text and what stands small below it."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        texts = []
        for cell in cells:
            text, more = cell if isinstance(cell, tuple) else (cell, "")
            texts.append(escape(str(text)) + (f"<small>{escape(more)}</small>" if more else ""))
        kinds = (' class="number"' if head in numbers else "" for head in heads)
        return "<tr>" + "".join(f"<{tag}{k}>{text}</{tag}>" for k, text in zip(kinds, texts, strict=True)) + "</tr>"

    lines = [line("th", heads), *(line("td", row) for row in rows)]
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _percent(value: float, sign: str = "") -> str:
    """A share as all of the report writes it."""
    return f"{value:{sign}.1%}" if np.isfinite(value) else "–"


def _draw(number: int, title: str, chart: plots.Chart, caption: str) -> str:
    """Chart as inline SVG in the colours of the page, its ids made unique among the figures."""
    import vl_convert

    with alt.theme.enable("perfkit"):
        spec = chart.to_dict()
    spec["config"]["background"] = "transparent"
    svg = vl_convert.vegalite_to_svg(json.dumps(spec).replace(f'"{plots.INK}"', '"currentColor"'))
    svg = re.sub(r'(\bid="|\burl\(#|href="#)', rf"\g<1>figure{number}-", svg)
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f"{heading}<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _headline(comparison: Comparison) -> str:
    """Errors: over all in words, by family as a table, and once more at the usual pace where that is known."""
    note = (
        "Error is |predicted / measured - 1|, bias its signed mean, of runs that the calibration never saw. The noise "
        "floor is how far a repeated measurement of the same run lands from the first. A second table compares with "
        "times at the usual pace of the machine, where short references between the iterations tell it."
    )
    frames = {"Measured": comparison.figures}
    if any("relative_s" in run for run in comparison.runs):
        frames["At the usual pace"] = comparison.at_usual_pace().figures
    heads = ("Runs", "Geometric mean", "Mean", "95th percentile", "Largest", "Bias", "Noise floor", "Inside 80%")
    tables = ""
    for name, figures in frames.items():
        rows = [
            (family, found["n"], *(_percent(found[key], "+" * (key == "bias")) for key in list(found)[1:]))
            for family, found in figures.items()
        ]
        tables += _table((name, *heads), rows, numbers=heads)
    return f'<p><b>{escape(repr(comparison))}</b></p><p class="soft">{note}</p>{tables}'


def _disturbances(platform: Platform, comparison: Comparison) -> str:
    """What spoiled the measurements, if anything did."""
    found = {"calibration": platform.provenance, "check": comparison.machine}
    lines = [f"{name}: {said['disturbances']}" for name, said in found.items() if "disturbances" in said]
    return f"<p><b>Disturbed measurements.</b> {escape('. '.join(lines))}.</p>" if lines else ""


def _runs(runs: Iterable[Mapping[str, Any]]) -> str:
    """A row for every run."""
    rows = []
    for run in runs:
        predicted, low, high, measured, q1, q3 = (format_time(run[key]) for key in TIMES)
        sizes = ", ".join(
            f"{len(value)} {key}" if isinstance(value, list | tuple) else f"{key} {value}"
            for key, value in run["config"].items() if value not in (None, False) and key != "name"
        )  # fmt: skip
        about = f"{run['family']}, {run['ranks']} rank{'s' if run['ranks'] != 1 else ''} · {sizes}"
        inside = "✓" if run["low_s"] <= run["measured_s"] <= run["high_s"] else "✗"
        rows.append((
            (run["name"], about), (predicted, f"{low}–{high}"), (measured + " †" * run["flagged"], f"{q1}–{q3}"),
            f"{_percent(run['predicted_s'] / run['measured_s'] - 1, '+')} {inside}", run["bottleneck"],
        ))  # fmt: skip
    heads = ("Configuration", "Predicted (80% interval)", "Measured (quartiles)", "Error", "Bottleneck")
    note = (
        "✓ the measured time is inside the predicted 80% interval, ✗ outside; † the two halves of the measurement "
        "differed by more than 10%, also when it was repeated, or other programs had more than 3% of the core."
    )
    return f'{_table(heads, rows, numbers=heads[1:4])}<p class="soft">{note}</p>'


def _list_figures(runs: Comparison, predictions: Mapping[str, Prediction]) -> Iterator[tuple[str, plots.Chart, str]]:
    """Heading, chart and caption of all runs, then of every iteration that is looked into."""
    yield "", runs.chart(), "Each mark is one run: vertical bars are 80% intervals, horizontal bars quartiles."
    for name, prediction in predictions.items():
        caption = "The parts sum to the predicted time; host is the time in which the device waits for its host."
        yield f"{name}: {prediction!r}", prediction.chart("breakdown"), caption
        yield "", prediction.chart("timeline"), "Neighbouring operations of one phase are drawn as one bar."


def write_report(
    path: str | Path, *, platform: Platform, comparison: Comparison, predictions: Mapping[str, Prediction]
) -> Path:
    """Write the report of a check as one self-contained HTML file.

    Parameters
    ----------
    path : str or Path
        File to write; an older one is replaced only once the new one is whole.
    platform : Platform
        What was predicted with; all its numbers are listed.
    comparison : Comparison
        Predicted and measured runs.
    predictions : mapping of str to Prediction
        Iterations to look into, by title.

    Returns
    -------
    path : Path
        The file that was written.

    Raises
    ------
    OSError
        Where the file cannot be written; nothing is left behind.
    """
    figures = [_draw(number, *parts) for number, parts in enumerate(_list_figures(comparison, predictions))]
    about = {**comparison.machine, **comparison.versions, "date": date.today().isoformat()}
    data = json.dumps(comparison.to_dict(), default=str).replace("<", "\\u003c")
    body = f"""{_disturbances(platform, comparison)}
{_headline(comparison)}
{figures[0]}
<h2>Runs</h2>
{_runs(comparison.runs)}
{"".join(figures[1:])}
<h2>Platform</h2>
<details><summary>{len(platform.numbers())} numbers, each with its unit, standard error and origin</summary>
<div class="scroll">{platform._repr_html_()}</div></details>
<h2>Environment</h2>
{_table(("What", "Value"), about.items())}
<script type="application/json" id="perfkit-comparison">{data}</script>"""
    said = f"perfkit on platform {platform.name}"
    return _write_page(path, platform.name, "Predicted and measured training iterations", said, body)


def _write_page(path: str | Path, name: str, heading: str, about: str, body: str) -> Path:
    """Write a page that opens without a network."""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>perfkit report: {escape(name)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
<p class="soft">{escape(about)}</p>
{body}
</body></html>
"""
    return write_text(path, page)


def write_charts(
    path: str | Path, *, heading: str, text: str, charts: Mapping[str, plots.Chart], tables: Mapping[str, Any]
) -> Path:  # fmt: skip
    """Write charts and tables as one self-contained HTML file.

    Parameters
    ----------
    path : str or Path
        File to write; an older one is replaced only once the new one is whole.
    heading : str
        First line.
    text : str
        What stands before the charts.
    charts : mapping of str to chart
        By caption.
    tables : mapping of str to polars.DataFrame
        By heading.

    Returns
    -------
    path : Path
        The file that was written.
    """
    figures = [_draw(number, "", chart, caption) for number, (caption, chart) in enumerate(charts.items())]
    for title, frame in tables.items():
        figures += [f"<h2>{escape(title)}</h2>", _table(frame.columns, frame.rows(), numbers=frame.columns[1:])]
    return _write_page(path, heading, heading, "perfkit", f"<pre>{escape(text)}</pre>" + "\n".join(figures))


def demonstrate(*, quick: bool, report: Path, out: Path, say: Callable[[str], None] = print) -> Comparison:
    """Calibrate, predict, measure and report, telling each step.

    Parameters
    ----------
    quick : bool
        Calibrate in half the time.
    report : Path
        HTML file to write.
    out : Path
        Platform file to write.
    say : callable
        Receives the lines to show.

    Returns
    -------
    comparison : Comparison
        Predicted and measured times.
    """
    say("First, without measuring anything: what would this cost on a GPU of the gallery?")
    say(f"  {predict(Transformer.bert('bert-large', batch=8, sequence=512, dtype='bf16'), 'h100-sxm-8')!r}")
    say("\nNow this machine: kernels, collectives and a few small training iterations.")
    platform = calibrate(out=out, quick=quick)
    samples = draw_check(7, dlrm=6, transformer=4, hybrid=3 if min(platform.network.ranks, count_cores()) >= 2 else 0)
    say(f"\nPredicting {len(samples)} configurations that the calibration never saw, then measuring them.")
    comparison = check(platform, samples=samples)
    say("\n" + comparison.as_text())
    first = {sample.family: sample for sample in reversed(samples)}.values()
    shown = {s.name: predict(s.workload, platform, ranks=s.ranks, plan=s.plan) for s in first}
    write_report(report, platform=platform, comparison=comparison, predictions=shown)
    say(f"\nReport:    {report} (one file, opens without a network)\nPlatform:  {out}")
    say("Notebooks: make lab, and start with notebooks/00_start_here.ipynb")
    return comparison
