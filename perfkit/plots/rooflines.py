"""A chart of kernels under the roofs of their device."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type, format_rate
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Domain, Frame, Row
from perfkit.plots.colours import INK, mark_series
from perfkit.plots.theme import LayerChart

#: Size of the chart, and of a line of labels along sloping and level roofs [pixels].
_WIDTH, _HEIGHT = 460, 320
_SLOPING_LINE, _LEVEL_LINE = 18, 12


class _Roofs(NamedTuple):
    """Rates of a device, and what the axes cover."""

    peaks: Mapping[str, float]  # by number format [FLOP/s]
    bandwidths: Mapping[str, float]  # by memory level [B/s]
    intensities: Domain  # [FLOP/B]
    rates: Domain  # [FLOP/s]

    @property
    def pixels_upwards(self) -> float:
        """Height of a factor e of rate [pixels]."""
        return _HEIGHT / math.log(self.rates.high / self.rates.low)

    @property
    def slope(self) -> float:
        """Angle of the roofs of bandwidths [rad]."""
        pixels_sideways = _WIDTH / math.log(self.intensities.high / self.intensities.low)
        return math.atan(self.pixels_upwards / pixels_sideways)

    def find_start(self, bandwidth: float) -> float:
        """Intensity at which the roof of a bandwidth comes into view [FLOP/B]."""
        return max(self.intensities.low, self.rates.low / bandwidth)


@refuse_misfits(ROWS)
def roofline_chart(
    points: Frame,
    peaks: Mapping[str, float],
    bandwidths: Mapping[str, float],
    *,
    title: str = "Roofline",
) -> alt.LayerChart:
    """Draw kernels under the roofs of their device.

    Parameters
    ----------
    points : frame or list of dict
        Rows ``kind`` (kernel class), ``flops`` [FLOP], ``nbytes`` [B], ``time_s`` [s] and, to tell
        number formats apart, ``dtype``. Rows without FLOP are left out.
    peaks : mapping of str to float
        Dense peak rate by number format [FLOP/s].
    bandwidths : mapping of str to float
        Bandwidth by memory level [B/s].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart: a sloping roof for each memory level, a flat roof for each peak, a point for
        each kernel.

    Raises
    ------
    ValueError
        Without a peak or without a bandwidth.
    """
    check_type("title", title, str)
    if not peaks or not bandwidths:
        raise ValueError(
            "roofline_chart needs at least one peak and one bandwidth; pass peaks={'fp32': ...}"
        )
    kernels = _read_kernels(points)
    roofs = _frame_roofs(peaks, bandwidths, kernels)
    x = canvas.log_axis("intensity", "Arithmetic intensity, FLOP per byte", roofs.intensities, "")
    y = canvas.log_axis("rate", "Rate", roofs.rates, "FLOP/s", alt.Y)
    layers = [
        _draw_roofs(roofs, x, y),
        _draw_labels_of_bandwidths(roofs, x, y),
        _draw_labels_of_peaks(roofs, x, y),
    ]
    if kernels:  # an empty legend has no size
        layers.append(_draw_kernels(kernels, x, y))
    return LayerChart(layer=layers).properties(width=_WIDTH, height=_HEIGHT, title=title)


def _read_kernels(points: Frame) -> list[Row]:
    """Kernels that compute, each with its intensity, rate and series."""
    rows = []
    for row in canvas.read_rows(points):
        if not row.get("flops") or not row.get("nbytes") or not row.get("time_s"):
            continue
        row["intensity"] = row["flops"] / row["nbytes"]
        row["rate"] = row["flops"] / row["time_s"]
        row["series"] = f"{row['kind']}, {row['dtype']}" if row.get("dtype") else row["kind"]
        rows.append(row)
    return rows


def _frame_roofs(
    peaks: Mapping[str, float], bandwidths: Mapping[str, float], kernels: Sequence[Row]
) -> _Roofs:
    """Choose what the axes cover: all ridges with some of the roofs beside them, and all
    kernels."""
    peak = max(peaks.values())
    fastest = max(bandwidths.values())
    slowest = min(bandwidths.values())
    first_ridge = peak / fastest
    last_ridge = peak / slowest
    intensities = [min(0.1, first_ridge / 8), last_ridge * 8]
    intensities += [row["intensity"] for row in kernels]
    across = canvas.log_domain(intensities)
    rates = [across.low * slowest * 2, peak * 1.6]
    rates += [row["rate"] for row in kernels]
    return _Roofs(peaks, bandwidths, across, canvas.log_domain(rates, room=1.6))


# -- roofs


def _draw_roofs(roofs: _Roofs, x: alt.X, y: alt.Y) -> alt.Chart:
    """A line with two ends for each roof; they meet at the ridges."""
    peak = max(roofs.peaks.values())
    fastest = max(roofs.bandwidths.values())
    ends: list[Row] = []
    for name, bandwidth in roofs.bandwidths.items():
        for intensity in (roofs.find_start(bandwidth), peak / bandwidth):
            ends.append({"roof": name, "intensity": intensity, "rate": intensity * bandwidth})
    for name, rate in roofs.peaks.items():
        for intensity in (rate / fastest, roofs.intensities.high):
            ends.append({"roof": name, "intensity": intensity, "rate": rate})
    lines = canvas.draw(ends).mark_line(color=INK, strokeWidth=1.5, clip=True)
    return lines.encode(x=x, y=y, detail="roof:N", tooltip=canvas.tips("roof", rate=".3s"))


def _draw_labels_of_bandwidths(roofs: _Roofs, x: alt.X, y: alt.Y) -> alt.Chart:
    """Labels along the sloping roofs, where these begin."""
    lines_of_text = roofs.pixels_upwards * math.cos(roofs.slope) / _SLOPING_LINE
    texts = []
    for bandwidth, words in _label_roofs(roofs.bandwidths, "B/s", lines_of_text).items():
        intensity = 1.15 * roofs.find_start(bandwidth)
        texts.append({"intensity": intensity, "rate": intensity * bandwidth, "text": words})
    angle = -math.degrees(roofs.slope) % 360
    return _draw_texts(texts, x, y, dy=-6, angle=angle)


def _draw_labels_of_peaks(roofs: _Roofs, x: alt.X, y: alt.Y) -> alt.Chart:
    """Labels at the right of the level roofs."""
    lines_of_text = roofs.pixels_upwards / _LEVEL_LINE
    beside = roofs.intensities.high * 1.05
    texts = []
    for peak, words in _label_roofs(roofs.peaks, "FLOP/s", lines_of_text).items():
        texts.append({"intensity": beside, "rate": peak, "text": words})
    return _draw_texts(texts, x, y, dy=0, angle=0)


def _draw_texts(texts: Sequence[Row], x: alt.X, y: alt.Y, *, dy: int, angle: float) -> alt.Chart:
    words = canvas.draw(texts)
    words = words.mark_text(color=INK, fontSize=10, dy=dy, align="left", angle=angle)
    return words.encode(x=x, y=y, text="text:N")


def _label_roofs(rates: Mapping[str, float], unit: str, lines_of_text: float) -> dict[float, str]:
    """Labels of roofs by rate; equal or close roofs share one label at the upper roof, so that text
    crosses no line.

    `lines_of_text` is how many lines have room between two roofs with rates of ratio e.
    """
    names: dict[float, list[str]] = {}
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        names.setdefault(rate, []).append(name)
    labels: dict[float, str] = {}
    labelled = math.nan
    roof_above = math.inf
    for rate, names_of_rate in names.items():
        words = f"{', '.join(names_of_rate)} {format_rate(rate, unit)}"
        if lines_of_text * math.log(roof_above / rate) < 1.0:
            labels[labelled] += f"; {words}"
        else:
            labels[rate] = words
            labelled = rate
        roof_above = rate
    return labels


# -- kernels


def _draw_kernels(kernels: Sequence[Row], x: alt.X, y: alt.Y) -> alt.Chart:
    # the peaks are written at the right
    legend = alt.Legend(orient="bottom", columns=4, title=None)
    looks = mark_series("series", canvas.unique(row["series"] for row in kernels), legend=legend)
    shown = canvas.tips("series", intensity=".3s", rate=".3s")
    return canvas.draw_points(kernels, x, y, looks, shown, size=42)
