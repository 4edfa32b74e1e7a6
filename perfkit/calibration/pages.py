"""One HTML file that shows what was predicted, what was measured and how they differ; it opens without a network."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from perfkit import plots
from perfkit.calibration.campaign import calibrate, check
from perfkit.calibration.checks import Comparison
from perfkit.ground.files import write_text
from perfkit.ground.units import format_rate, format_time, significant
from perfkit.measure.machine import count_cores
from perfkit.measure.samples import draw_check
from perfkit.platform.platform import Platform
from perfkit.prediction.result import Prediction, predict
from perfkit.workloads.transformer import Transformer

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #ffffff; --tint: #f6f8fa;
  --good: #00724f; --bad: #b34700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3; --soft: #9da7b1; --line: #3a414a; --paper: #16191d;
  --tint: #1e2228; --good: #3fc99a; --bad: #ff9d57; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 Inter, "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; } h2 { font-size: 1.2rem; margin: 2.75rem 0 .75rem; }
p { max-width: 44rem; margin: .4rem 0; } .soft, figcaption { color: var(--soft); font-size: .875rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0 .5rem; padding: 0; list-style: none; }
.tiles li { flex: 1 1 9rem; padding: .8rem 1rem; border: 1px solid var(--line); border-radius: .5rem;
  background: var(--tint); }
.tiles b { display: block; font-size: 1.6rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th { text-align: left; font-weight: 600; color: var(--soft); vertical-align: bottom; }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); } td { vertical-align: top; }
td small { display: block; color: var(--soft); } .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; } .good { color: var(--good); } .bad { color: var(--bad); }
figure { margin: 1.25rem 0; } figure svg { max-width: 100%; height: auto; color: var(--ink); }
details > summary { cursor: pointer; color: var(--soft); } code { font-size: .875em; }
@media print { figure, tr, .tiles { break-inside: avoid; } h2 { break-after: avoid; } }
"""
#: Nothing may be fetched or run, whatever a platform file or a configuration is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class _Markup(str):
    """Text that is HTML already; any other string is escaped."""


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[str] = ()) -> _Markup:
    kinds = [' class="number"' if head in numbers else "" for head in heads]

    def line(tag: str, cells: Sequence[Any]) -> str:
        shown = [cell if isinstance(cell, _Markup) else escape("" if cell is None else str(cell)) for cell in cells]
        pairs = zip(shown, kinds, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in pairs) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return _Markup(
        f'<div class="scroll"><table><thead>{line("th", heads)}</thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _figure(title: str, chart: plots.Chart, caption: str, number: int) -> str:
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
    def percent(value: float, sign: str = "") -> str:
        return f"{value:{sign}.1f}%" if np.isfinite(value) else "–"

    rows = comparison.summary().to_dicts()
    tiles = {
        "geomean": "geometric mean error", "mean": "mean error", "max": "largest error",
        "floor": "noise floor of the measurement", "inside": "of the runs inside the 80% interval",
    }  # fmt: skip
    items = "".join(
        f'<li><b>{percent(rows[-1][key])}</b><span class="soft">{name}</span></li>' for key, name in tiles.items()
    )
    note = (
        f"{rows[-1]['n']} runs that the calibration never saw; error is |predicted / measured - 1|, bias its signed "
        "mean. The noise floor is how far a repeated measurement of the same run lands from the first."
    )
    frames = {"Measured": rows}
    if any("relative_s" in run for run in comparison.runs):
        frames["At the usual pace"] = comparison.at_usual_pace().summary().to_dicts()
        note += (
            " Machines change their speed. The second table compares with times at the usual pace of the machine, "
            "known from short references between the iterations."
        )
    heads = ("Runs", "Geometric mean", "Mean", "95th percentile", "Largest", "Bias", "Noise floor", "Inside 80%")
    keys, tables = ("geomean", "mean", "p95", "max", "bias", "floor", "inside"), ""
    for name, frame in frames.items():
        body = [(r["family"], r["n"], *(percent(r[key], "+" if key == "bias" else "") for key in keys)) for r in frame]
        tables += _table((name, *heads), body, numbers=heads)
    return f'<ul class="tiles">{items}</ul><p class="soft">{escape(note)}</p>{tables}'


def _disturbances(platform: Platform, comparison: Comparison) -> str:
    """What spoiled the measurements, if anything did."""
    found = {"calibration": platform.provenance, "check": comparison.machine}
    lines = [f"{name}: {said['disturbances']}" for name, said in found.items() if "disturbances" in said]
    return f"<p><b>Disturbed measurements.</b> {escape('. '.join(lines))}.</p>" if lines else ""


def _runs(runs: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for run in runs:
        measured, low, high = run["measured_s"], run["low_s"], run["high_s"]
        sizes = ", ".join(
            f"{len(value)} {key}" if isinstance(value, list | tuple) else f"{key} {value}"
            for key, value in run["config"].items() if value not in (None, False) and key != "name"
        )  # fmt: skip
        about = f"{run['family']}, {run['ranks']} rank{'s' if run['ranks'] != 1 else ''} · {sizes}"
        quartiles = f"{format_time(run['measured_q1_s'])}–{format_time(run['measured_q3_s'])}"
        word, sign = ("good", "✓") if low <= measured <= high else ("bad", "✗")
        rows.append((
            _Markup(f"{escape(str(run['name']))}<small>{escape(about)}</small>"),
            _Markup(f"{format_time(run['predicted_s'])}<small>{format_time(low)}–{format_time(high)}</small>"),
            _Markup(f"{format_time(measured)}{' †' if run['flagged'] else ''}<small>{quartiles}</small>"),
            _Markup(f'<span class="{word}">{run["predicted_s"] / measured - 1:+.1%} {sign}</span>'),
            run["bottleneck"],
        ))  # fmt: skip
    heads = ("Configuration", "Predicted (80% interval)", "Measured (quartiles)", "Error", "Bottleneck")
    note = (
        "✓ the measured time is inside the predicted 80% interval, ✗ outside; † the two halves of the measurement "
        "differed by more than 10%, also when it was repeated, or other programs had more than 3% of the core."
    )
    return f'{_table(heads, rows, numbers=heads[1:4])}<p class="soft">{note}</p>'


def _platform(platform: Platform) -> str:
    def shown(row: Mapping[str, Any]) -> str:
        value, error, unit = row["value"], row["stderr"], row["unit"]
        if value is None:
            return ""
        if unit == "s":
            return format_time(value) + (f" ± {format_time(error)}" if error else "")
        if unit in ("B", "B/s", "FLOP/s") and not error:
            return format_rate(value, unit)
        return significant(value, error) + (f" ± {error:.1g}" if error else "") + (f" {unit}" if unit != "-" else "")

    rows = platform.numbers().to_dicts()
    heads = ("Group", "Name", "Value", "Kind", "Source", "Date")
    body = [(row["group"], row["name"], shown(row), row["kind"], row["source"], row["date"]) for row in rows]
    summary = f"{len(rows)} numbers, each with its unit, standard error and origin"
    return f"<details><summary>{summary}</summary>{_table(heads, body, numbers=('Value',))}</details>"


def _figures(
    platform: Platform, comparison: Comparison, predictions: Mapping[str, Prediction], measurements: Mapping[str, Any]
) -> list[tuple[str, plots.Chart, str]]:
    """Heading, chart and caption of everything there is data for."""
    caption = "Each mark is one run: vertical bars are 80% intervals, horizontal bars quartiles."
    found: list[tuple[str, plots.Chart, str]] = [("", comparison.chart(), caption)]
    for name, prediction in predictions.items():
        caption = "The parts sum to the predicted time; host is the time in which the device waits for its host."
        found.append((f"{name}: {prediction!r}", prediction.chart("breakdown"), caption))
        found.append(("", prediction.chart("timeline"), "Neighbouring operations of one phase are drawn as one bar."))
    kernels = [
        {"kind": row["kind"], "flops": row["sizes"]["flops"], "nbytes": row["nbytes"], "time_s": row["median"]}
        for row in measurements.get("kernels", ()) if row["sizes"].get("flops", 0.0) > 0
    ]  # fmt: skip
    roofs = {level.name: level.bandwidth.value for level in platform.device.memory if level.bandwidth is not None}
    peaks = {dtype: peak.value for dtype, peak in platform.device.peaks.items()}
    if kernels:
        caption = "Kernels measured in isolation under the peaks and bandwidths of the platform."
        found.append(("Kernels", plots.roofline_chart(kernels, peaks, roofs), caption))
    if points := [
        {**row, "ranks": measurements["ranks"], "time_s": row["q1"], "q1_s": row["q1"], "q3_s": row["q3"]}
        for row in measurements.get("collectives", ())
    ]:
        curves = [
            {**row, "time_s": float(platform.collective_time(row["operation"], row["nbytes"], ranks=row["ranks"]))}
            for row in points
        ]
        chart = plots.collective_curves(points, curves, title="Time and bus bandwidth")
        found.append(("Collectives", chart, "Message sizes in the nccl-tests convention."))
    return found


def write_report(
    path: str | Path,
    *,
    platform: Platform,
    comparison: Comparison,
    predictions: Mapping[str, Prediction] | None = None,
    measurements: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report of a check as one self-contained HTML file.

    Parameters
    ----------
    path : str or Path
        File to write; an older one is replaced only once the new one is whole.
    platform : Platform
        What was predicted with; its peaks and memory levels make the roofline.
    comparison : Comparison
        Predicted and measured runs.
    predictions : mapping of str to Prediction, optional
        Iterations to look into, by title.
    measurements : mapping, optional
        Raw measurements of the platform: its kernels and collectives are drawn.

    Returns
    -------
    path : Path
        The file that was written.

    Raises
    ------
    OSError
        Where the file cannot be written; nothing is left behind.
    """
    figures = [
        _figure(title, chart, caption, number)
        for number, (title, chart, caption) in enumerate(
            _figures(platform, comparison, predictions or {}, measurements or {})
        )
    ]
    about = {**comparison.machine, **comparison.versions, "date": date.today().isoformat()}
    data = json.dumps(comparison.to_dict(), default=str).replace("<", "\\u003c")
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>perfkit report: {escape(platform.name)}</title><style>{_STYLE}</style></head><body>
<h1>Predicted and measured training iterations</h1>
<p class="soft">perfkit on platform {escape(platform.name)}</p>
{_disturbances(platform, comparison)}
{_headline(comparison)}
{figures[0]}
<h2>Runs</h2>
{_runs(comparison.runs)}
{"".join(figures[1:])}
<h2>Platform</h2>
{_platform(platform)}
<h2>Environment</h2>
{_table(("What", "Value"), about.items())}
<script type="application/json" id="perfkit-comparison">{data}</script>
</body></html>
"""
    return write_text(path, page)


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
    hybrid = 3 if min(platform.network.ranks, count_cores()) >= 2 else 0
    samples = draw_check(7, dlrm=6, transformer=4, hybrid=hybrid)
    say(f"\nPredicting {len(samples)} configurations that the calibration never saw, then measuring them.")
    comparison = check(platform, samples=samples)
    say("\n" + comparison.as_text())
    first = {sample.family: sample for sample in reversed(samples)}.values()
    shown = {s.name: predict(s.workload, platform, ranks=s.ranks, plan=s.plan) for s in first}
    measurements = json.loads(out.with_suffix(".measurements.json").read_text())
    write_report(report, platform=platform, comparison=comparison, predictions=shown, measurements=measurements)
    say(f"\nReport:    {report} (one file, opens without a network)\nPlatform:  {out}")
    say("Notebooks: make lab, and start with notebooks/00_start_here.ipynb")
    return comparison
