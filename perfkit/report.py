"""One HTML file that shows what was predicted, what was measured and how they differ; it opens without a network."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import altair as alt

from perfkit import plots
from perfkit.platform import Platform
from perfkit.prediction.comparison import Comparison
from perfkit.resources import write_text
from perfkit.units import format_rate, format_time, significant

__all__ = ["write_report"]

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
@media print { :root { color-scheme: light; --ink: #000000; --soft: #444444; --line: #bbbbbb; --paper: #ffffff;
  --tint: #ffffff; --good: #00563b; --bad: #8a3600; } body { padding: 0; max-width: none; font-size: 11pt; }
  figure, tr, .tiles { break-inside: avoid; } h2 { break-after: avoid; } thead { display: table-header-group; } }
"""
#: Nothing may be fetched or run, whatever a platform file or a configuration is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class _Markup(str):
    """Text that is HTML already; any other string is escaped."""


def _cell(value: Any) -> str:
    return value if isinstance(value, _Markup) else escape("" if value is None else str(value))


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[str] = ()) -> _Markup:
    kinds = [' class="number"' if head in numbers else "" for head in heads]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(heads, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(value)}</td>" for value, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return _Markup(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>')


def _figure(chart: plots.Chart, number: int, caption: str) -> _Markup:
    """Chart as inline SVG in the colours of the page, its ids made unique among the figures."""
    import vl_convert

    with alt.theme.enable("perfkit"):
        spec = chart.to_dict()
    spec["config"]["background"] = "transparent"
    text = json.dumps(spec).replace(f'"{plots.INK}"', '"currentColor"')
    svg = vl_convert.vegalite_to_svg(text)
    svg = re.sub(r'(\bid="|\burl\(#|href="#)', rf"\g<1>figure{number}-", svg)
    return _Markup(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")


def _percent(value: float | None, *, signed: bool = False) -> str:
    known = value is not None and math.isfinite(value)
    return f"{value:{'+' if signed else ''}.1f}%" if known else "–"


def _headline(comparison: Comparison) -> _Markup:
    if not comparison.runs:
        return _Markup("<p>Nothing was measured.</p>")
    rows = comparison.summary().to_dicts()
    total = rows[-1]
    tiles = {
        "geometric mean error": total["geomean"],
        "mean error": total["mean"],
        "largest error": total["max"],
        "noise floor of the measurement": total["floor"],
        "of the runs inside the 80% interval": total["inside"],
    }
    items = "".join(
        f'<li><b>{_percent(value)}</b><span class="soft">{name}</span></li>' for name, value in tiles.items()
    )
    note = (
        f"{total['n']} runs that the calibration never saw; error is |predicted / measured - 1|, bias its signed mean. "
    )
    note += "The noise floor is how far a repeated measurement of the same run lands from the first."
    frames = {"Measured": rows}
    if any("relative_s" in run for run in comparison.runs):
        frames["At the usual pace"] = comparison.at_usual_pace().summary().to_dicts()
        note += (
            " Machines change their speed. The second table compares with times at the usual pace of the machine, told "
            "by short references that were timed between the iterations."
        )
    heads = ("Runs", "Geometric mean", "Mean", "95th percentile", "Largest", "Bias", "Noise floor", "Inside 80%")
    keys = ("geomean", "mean", "p95", "max", "bias", "floor", "inside")
    tables = ""
    for name, frame in frames.items():
        cells = [
            (row["family"], row["n"], *(_percent(row[key], signed=key == "bias") for key in keys)) for row in frame
        ]
        tables += _table((name, *heads), cells, numbers=heads)
    return _Markup(f'<ul class="tiles">{items}</ul><p class="soft">{escape(note)}</p>{tables}')


def _disturbances(platform: Platform, comparison: Comparison) -> str:
    """What spoiled the measurements, if anything did."""
    found = {"calibration": platform.provenance, "check": comparison.machine}
    lines = [f"{name}: {said['disturbances']}" for name, said in found.items() if "disturbances" in said]
    return f"<p><b>Disturbed measurements.</b> {escape('. '.join(lines))}.</p>" if lines else ""


def _span(name: str, values: Sequence[Any]) -> str:
    low, high = min(values), max(values)
    return f"{name} {low:,}" if low == high else f"{name} {low:,}–{high:,}"


def _settings(config: Mapping[str, Any]) -> str:
    """A configuration in one line: lists of records as the ranges of their numbers."""
    parts = []
    for key, value in config.items():
        if isinstance(value, list | tuple):
            if value and all(isinstance(item, Mapping) for item in value):
                numbers = [name for name, first in value[0].items() if isinstance(first, int | float)]
                spans = (_span(name, [item[name] for item in value]) for name in numbers)
                parts.append(f"{len(value)} {key} ({', '.join(spans)})")
            else:
                parts.append(f"{key} {'-'.join(map(str, value))}" if len(value) < 8 else f"{len(value)} {key}")
        elif isinstance(value, bool):
            parts.append(key if value else f"not {key}")
        elif value is not None and key != "name":
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def _run(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cells of one run, escaped where they hold names."""
    ranks, measured, low, high = run["ranks"], run["measured_s"], run["low_s"], run["high_s"]
    about = " · ".join(
        filter(None, (f"{run['family']}, {ranks} rank{'s' if ranks != 1 else ''}", _settings(run["config"])))
    )
    quartiles = f"{format_time(run['measured_q1_s'])}–{format_time(run['measured_q3_s'])}"
    inside = low <= measured <= high
    error = f"{run['predicted_s'] / measured - 1:+.1%} {'✓' if inside else '✗'}"
    return (
        _Markup(f"{escape(str(run['name']))}<small>{escape(about)}</small>"),
        _Markup(f"{format_time(run['predicted_s'])}<small>{format_time(low)}–{format_time(high)}</small>"),
        _Markup(f"{format_time(measured)}{' †' if run['flagged'] else ''}<small>{quartiles}</small>"),
        _Markup(f'<span class="{"good" if inside else "bad"}">{error}</span>'),
        run["bottleneck"],
    )


def _runs(runs: Iterable[Mapping[str, Any]]) -> _Markup:
    heads = ("Configuration", "Predicted (80% interval)", "Measured (quartiles)", "Error", "Bottleneck")
    note = "✓ the measured time is inside the predicted 80% interval, ✗ outside; "
    note += "† the two halves of the measurement differed by more than 10%, also when it was repeated, "
    note += "or other programs had more than 3% of the core."
    return _Markup(_table(heads, map(_run, runs), numbers=heads[1:4]) + f'<p class="soft">{note}</p>')


def _platform(platform: Platform) -> _Markup:
    def shown(row: Mapping[str, Any]) -> str:
        value, error, unit = row["value"], row["stderr"], row["unit"]
        if value is None:
            return ""
        if unit == "s":
            return format_time(value) + (f" ± {format_time(error)}" if error else "")
        if unit in ("B", "B/s", "FLOP/s") and not error:
            return format_rate(value, unit)
        return significant(value, error) + (f" ± {error:.1g}" if error else "") + (f" {unit}" if unit != "-" else "")

    rows = platform.table().to_dicts()
    heads = ("Group", "Name", "Value", "Kind", "Source", "Date")
    body = [(row["group"], row["name"], shown(row), row["kind"], row["source"], row["date"]) for row in rows]
    table = _table(heads, body, numbers=("Value",))
    summary = f"{len(rows)} numbers, each with its unit, standard error and origin"
    return _Markup(f"<details{' open' if len(rows) <= 40 else ''}><summary>{summary}</summary>{table}</details>")


def _embedded(name: str, value: Any) -> _Markup:
    text = json.dumps(_finite(value), default=str).replace("<", "\\u003c")
    return _Markup(f'<script type="application/json" id="{name}">{text}</script>')


def _finite(value: Any) -> Any:
    """The same value with null where JSON has no number for it."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _figures(
    platform: Platform,
    predictions: Sequence[Mapping[str, Any]],
    kernels: plots.Frame | None,
    collectives: tuple[plots.Frame, plots.Frame] | None,
) -> list[tuple[str, plots.Chart, str]]:
    """Heading, chart and caption of everything there is data for."""
    found: list[tuple[str, plots.Chart, str]] = []
    for item in predictions:
        bars = plots.breakdown_bars(item["breakdown"], title="Predicted time by phase and operation class")
        found.append(
            (
                item["title"],
                bars,
                "The parts sum to the predicted time; host is the time in which the device waits for its host.",
            )
        )
        lanes = plots.timeline_lanes(item["timeline"], title="Predicted timeline")
        found.append(("", lanes, "Neighbouring operations of one phase are drawn as one bar."))
    roofs = {level.name: level.bandwidth.value for level in platform.device.memory if level.bandwidth is not None}
    peaks = {dtype: peak.value for dtype, peak in platform.device.peaks.items()}
    if kernels is not None and roofs and peaks:
        caption = "Kernels measured in isolation under the peaks and bandwidths of the platform."
        found.append(("Kernels", plots.roofline_chart(kernels, peaks, roofs), caption))
    if collectives is not None:
        curves = plots.collective_curves(*collectives, title="Time and bus bandwidth")
        found.append(("Collectives", curves, "Message sizes in the nccl-tests convention."))
    return found


def write_report(
    path: str | Path,
    *,
    platform: Platform,
    comparison: Mapping[str, Any],
    predictions: Sequence[Mapping[str, Any]] = (),
    kernels: plots.Frame | None = None,
    collectives: tuple[plots.Frame, plots.Frame] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report of a check as one self-contained HTML file.

    Parameters
    ----------
    path : str or Path
        File to write; an older one is replaced only once the new one is whole.
    platform : Platform
        What was predicted with; its peaks and memory levels make the roofline.
    comparison : mapping
        Predicted and measured runs, as `Comparison.to_dict` gives and `Comparison.save` stores them.
    predictions : sequence of mapping, optional
        Iterations to look into: ``title`` with the frames ``breakdown`` and ``timeline``.
    kernels : frame or list of dict, optional
        Measured kernels for the roofline: ``kind``, ``flops`` [FLOP], ``nbytes`` [B], ``time_s`` [s].
    collectives : pair of frames, optional
        Measured points and fitted curves, as `perfkit.plots.collective_curves` takes them.
    environment : mapping, optional
        Machine, versions, date: shown as a table.

    Returns
    -------
    path : Path
        The file that was written.

    Raises
    ------
    OSError
        Where the file cannot be written; nothing is left behind.
    """
    names = ("platform", "machine", "versions", "noise_floor", "relative_floor")
    known = {key: comparison[key] for key in names if key in comparison}
    checked = Comparison(tuple(comparison["runs"]), **known)
    overview = ""
    if checked.runs:
        caption = "Each mark is one run: vertical bars are 80% intervals, horizontal bars quartiles."
        overview = _figure(plots.predicted_vs_measured(comparison["runs"]), 0, caption)
    figures = "\n".join(
        (f"<h2>{escape(str(title))}</h2>\n" if title else "") + _figure(chart, number, caption)
        for number, (title, chart, caption) in enumerate(_figures(platform, predictions, kernels, collectives), start=1)
    )
    surroundings = _table(("What", "Value"), (environment or {}).items())
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>perfkit report: {escape(platform.name)}</title><style>{_STYLE}</style></head><body>
<h1>Predicted and measured training iterations</h1>
<p class="soft">perfkit on platform {escape(platform.name)}</p>
{_disturbances(platform, checked)}
{_headline(checked)}
{overview}
<h2>Runs</h2>
{_runs(checked.runs)}
{figures}
<h2>Platform</h2>
{_platform(platform)}
<h2>Environment</h2>
{surroundings}
{_embedded("perfkit-comparison", comparison)}
</body></html>
"""
    return write_text(path, page)
