"""A chart of a timeline: what every rank and stream does over time.

`timeline_lanes` is the table of contents. `_read_spans` names the lane and the phase of each
operation, `_sum_bars` joins neighbours until few enough bars are left, and `_draw_lanes` draws them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import polars as pl

from perfkit.ground.forks import check_threads
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.results import Table
from perfkit.ground.units import check_type, format_time
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import INK, choose_ink, colour
from perfkit.plots.theme import LayerChart

#: Most lanes, and about the most bars of a timeline.
_LANES, _BARS = 32, 1_900
#: Share of the busy time of a slot from which a phase is named [-].
_SEEN = 0.1
#: Share of all slots from which several phases are named together [-].
_RARE = 0.02
#: Gaps below this share of the width of a chart are not seen [-].
_GAP = 1 / 1000
#: Starts below this share of the time of an iteration are 0, moved by rounding [-].
_ROUNDING = 1e-9
#: Share of a bar in which a stream is busy, below which the bar is visibly paler [-].
_PALE = 0.9
#: Opacity of a bar whose stream is idle, or busy all the time [-].
_FAINTEST, _FULL = 0.15, 1.0
#: Width of all lanes, and of the narrowest bar that has a border [pixels].
_WIDTH, _BORDERED = 620, 5
#: Size of the text in a bar, width of its letters, and room beside it [pixels].
_FONT, _LETTER, _ROOM = 10, 6.0, 4.0


@refuse_misfits(ROWS)
def timeline_lanes(
    frame: Frame, *, about: str = "", time: float | None = None
) -> alt.Chart | alt.LayerChart:
    """Draw what every rank and stream does over time, coloured by phase; bars are paler where a
    stream is often idle, and have borders between neighbours.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``rank``, ``stream``, ``phase``, ``start_s`` and ``end_s`` [s] and, where known,
        ``name`` and ``module``. Neighbours of one phase become one bar, so that iterations of any
        length stay readable; phases that alternate too fast to be seen share bars with the names of
        both. A row with a ``module`` and no ``name`` is that module: different ones are not joined,
        and their names stand in the bars that have room for them.
    about : str, optional
        A line below the heading.
    time : float, optional
        Time of the iteration; where a rank begins before 0, lines show both ends of it [s].

    Returns
    -------
    chart : altair.Chart or altair.LayerChart
        One lane for each rank and stream. Where charts are interactive, the time axis can be
        zoomed.
    """
    check_threads()
    check_type("about", about, str)
    spans = _read_spans(frame)
    lanes = _list_lanes(spans)
    drawn_lanes = lanes[:_LANES]
    bars = _sum_bars(spans.filter(pl.col("lane").is_in(drawn_lanes)))
    phases = _list_phases(spans, bars)
    busy_share = pl.col("busy_s") / (pl.col("end_s") - pl.col("start_s"))
    bars = bars.with_columns(busy=busy_share.clip(0, 1)).drop("busy_s", "longest_s")
    bars = _measure_bars(bars)

    axis = "Time since the iteration began"
    if len(lanes) > _LANES:
        axis += f"; {len(lanes) - _LANES} more lanes are not drawn"
    x = canvas.amount_axis("start_s", axis, "s", ticks=8)
    early = _name_early_ranks(spans)
    notes = [about, early]
    if (bars["busy"] < _PALE).any():
        notes.append("paler: the stream is idle for a part of the bar")
    notes = [note for note in notes if note]
    heading = alt.Title("Timeline of one iteration", subtitle=notes or alt.Undefined)
    size = {"width": _WIDTH, "height": alt.Step(24)}
    y = alt.Y("lane:N", title=None, sort=list(drawn_lanes))
    color = colour("phase", phases, title="Phase")
    chart = _draw_lanes(bars, x, y, color)
    layers = [*_label_bars(bars, x, y, color)]
    if early and time is not None:
        layers += _mark_iteration(time, x)
    if layers:
        return LayerChart(layer=[chart, *layers]).properties(**size, title=heading)
    return chart.properties(**size, title=heading)


# -- spans and lanes


def _read_spans(frame: Frame) -> Table:
    """Operations that take time, each with its lane, and with what `_add_up` sums."""
    rows = canvas.read_frame(
        frame, rank=0, stream="", phase="", start_s=0.0, end_s=0.0, name="", module=""
    )
    is_at_0 = pl.col("start_s").abs() < _ROUNDING * pl.max("end_s")
    rows = rows.with_columns(start_s=pl.when(is_at_0).then(0.0).otherwise("start_s"))
    seconds = pl.col("end_s") - pl.col("start_s")
    lane = pl.format("rank {} · {}", "rank", "stream")
    is_named = pl.element() != ""
    names = pl.concat_list("name", "module").list.eval(pl.element().filter(is_named))
    # what has no phase is its own
    phase = pl.when(pl.col("phase") == "").then("name").otherwise("phase")
    # spans of different modules are not joined
    region = pl.when(pl.col("name") == "").then("module").otherwise(pl.lit(""))
    spans = rows.filter(seconds > 0).with_columns(lane=lane, phase=phase, region=region)
    return spans.with_columns(
        longest=names.list.join(" · "),
        longest_s=seconds,
        busy_s=seconds,
        operations=pl.lit(1),
    )


def _list_phases(spans: Table, bars: Table) -> list[str]:
    """Phases in the order in which they first come, then those of bars that join several."""
    phases = canvas.unique(spans.sort("start_s", maintain_order=True)["phase"])
    drawn = canvas.unique(bars.sort("start_s", maintain_order=True)["phase"])
    return [*phases, *(phase for phase in drawn if phase not in phases)]


class _Lane(NamedTuple):
    """A rank and one of its streams, in the order of the chart."""

    rank: int
    place: int  # of the stream among all streams
    stream: str


def _list_lanes(spans: Table) -> list[str]:
    """Names of all lanes: rank by rank, the streams in the order in which they come."""
    streams = canvas.unique(spans["stream"])
    lanes = set()
    for rank, stream in spans.select("rank", "stream").unique().rows():
        lanes.add(_Lane(rank, streams.index(stream), stream))
    return [f"rank {lane.rank} · {lane.stream}" for lane in sorted(lanes)]


def _name_early_ranks(spans: Table) -> str:
    """The line under a timeline that says which ranks begin before the iteration; empty if none
    does."""
    ranks = canvas.unique(spans.filter(pl.col("start_s") < 0)["rank"])
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"left of 0: rank {ranks[0]} begins early, while others end the iteration before"
    named = ", ".join(f"{rank}" for rank in ranks[:4])
    if len(ranks) > 4:
        named += " and others"
    return f"left of 0: ranks {named} begin early, while others end the iteration before"


# -- bars


def _sum_bars(spans: Table) -> Table:
    """At most about `_BARS` bars that look like a bar for each operation; gaps that nobody sees are
    closed."""
    first: float = spans.select(pl.min("start_s").fill_null(0.0)).item()
    width = _find_end(spans) - first
    bars = _join(spans, _GAP * width)
    if len(bars) <= _BARS:
        return bars
    # phases alternate too fast to be seen
    return _fill_slots(spans, first, width)


def _find_end(spans: Table) -> float:
    """When the last operation ends; 0 without any [s]."""
    return float(spans.select(pl.max("end_s").fill_null(0.0)).item())


def _fill_slots(spans: Table, first: float, width: float) -> Table:
    """Divide time into slots, and name the phases that fill each slot of a lane: where they
    alternate inside of it, all of them."""
    slots = max(1, _BARS // spans["lane"].n_unique())
    length = width / slots
    slot = ((pl.col("start_s") - first) / length).cast(pl.Int64).clip(0, slots - 1)
    slotted = spans.with_columns(slot=slot)
    phases = canvas.unique(spans.sort("start_s", maintain_order=True)["phase"])
    named = _name_slots(slotted, phases)
    joined = slotted.drop("phase").join(named, on=("lane", "slot"), how="left")
    parts = _add_up(joined, "lane", "slot", "phase", "region")
    parts = parts.sort("busy_s", descending=True, maintain_order=True)
    longest = parts.group_by("lane", "slot", maintain_order=True).first()
    begin = first + pl.col("slot") * length
    # a bar may be longer than its slot
    end = pl.max_horizontal(begin + length, "end_s")
    return _join(longest.with_columns(start_s=begin, end_s=end), length / 2)


def _name_slots(spans: Table, phases: Sequence[str]) -> Table:
    """The phases of each slot of a lane that are seen in it, as one word or as several with "and"
    between them, in the order in which they first come."""
    shares = spans.group_by("lane", "slot", "phase").agg(pl.sum("busy_s"))
    of_slot = pl.col("busy_s").sum().over("lane", "slot")
    seen = shares.filter(pl.col("busy_s") >= _SEEN * of_slot)
    place = {phase: number for number, phase in enumerate(phases)}
    order = pl.col("phase").replace_strict(place, return_dtype=pl.Int64)
    seen = seen.sort("lane", "slot", order)
    longest = pl.col("phase").get(pl.col("busy_s").arg_max())
    named = seen.group_by("lane", "slot", maintain_order=True).agg(
        longest=longest, all=pl.col("phase").str.join(" and ")
    )
    # the border between two phases is no phase of its own
    is_rare = pl.len().over("all") < _RARE * pl.len()
    phase = pl.when(is_rare).then("longest").otherwise("all")
    return named.select("lane", "slot", phase=phase)


def _join(rows: Table, gap: float) -> Table:
    """Join neighbours of one lane and phase that are at most `gap` [s] apart into one bar."""
    rows = rows.sort("lane", "start_s", maintain_order=True)
    end_before = pl.col("end_s").cum_max().shift(1).over("lane")
    is_apart = (pl.col("start_s") - end_before > gap).fill_null(True)
    is_another = pl.struct("lane", "phase", "region").rle_id().diff() != 0
    bar = (is_apart | is_another).cum_sum().alias("bar")
    return _add_up(rows, bar, "lane", "phase", "region").drop("bar")


def _add_up(rows: Table, *keys: Any) -> Table:
    """One row for each value of the keys, with sums, both ends in time, and the name of the longest
    operation."""
    longest = pl.col("longest", "longest_s").get(pl.col("longest_s").arg_max())
    sums = pl.sum("busy_s", "operations")
    ends = (pl.min("start_s"), pl.max("end_s"))
    return rows.group_by(*keys, maintain_order=True).agg(*ends, sums, longest)


# -- marks


def _measure_bars(bars: Table) -> Table:
    """Widths of bars in the chart, and of their borders [pixels]: narrow bars have none, which would
    hide them."""
    first: float = bars.select(pl.min("start_s").fill_null(0.0)).item()
    length = _find_end(bars) - first
    pixels = (pl.col("end_s") - pl.col("start_s")) / length * _WIDTH
    border = pl.when(pl.col("pixels") >= _BORDERED).then(1.0).otherwise(0.0)
    return bars.with_columns(pixels=pixels).with_columns(border=border)


def _draw_lanes(bars: Table, x: alt.X, y: alt.Y, color: alt.Color) -> alt.Chart:
    scale = alt.Scale(domain=[0, 1], range=[_FAINTEST, _FULL])
    shade = alt.Opacity("busy:Q", scale=scale, legend=None)
    shown = canvas.tips(
        "lane", "phase", "longest", start_s=".4s", end_s=".4s", operations="d", busy=".0%"
    )
    border = alt.StrokeWidth("border:Q", scale=None, legend=None)
    rows = bars.drop("pixels", "region").to_dicts()
    chart = canvas.draw(rows, name="timeline").mark_bar(height={"band": 0.8}, stroke="white")
    chart = chart.encode(
        x=x, x2="end_s:Q", y=y, color=color, opacity=shade, strokeWidth=border, tooltip=shown
    )
    zoom = alt.selection_interval(name="zoom", bind="scales", encodings=["x"])
    return chart.add_params(zoom)


def _label_bars(bars: Table, x: alt.X, y: alt.Y, color: alt.Color) -> list[alt.Chart]:
    """The names of modules in the bars that have room for them: a layer for each colour of text."""
    encoding: Any = color.to_dict()
    scale = encoding["scale"]
    shades = dict(zip(scale["domain"], scale["range"], strict=True))
    labels: dict[str, list[dict[str, Any]]] = {}  # by colour
    for bar in bars.filter(pl.col("region") != "").to_dicts():
        if len(bar["region"]) * _LETTER + _ROOM > bar["pixels"]:
            continue
        opacity = _FAINTEST + (_FULL - _FAINTEST) * bar["busy"]
        ink = choose_ink(shades[bar["phase"]], opacity)
        middle = (bar["start_s"] + bar["end_s"]) / 2
        label = {"lane": bar["lane"], "start_s": middle, "region": bar["region"]}
        labels.setdefault(ink, []).append(label)
    layers = []
    for number, (ink, rows) in enumerate(labels.items()):
        words = canvas.draw(rows, name=f"timeline_labels_{number}")
        words = words.mark_text(color=ink, fontSize=_FONT)
        layers.append(words.encode(x=x, y=y, text="region:N"))
    return layers


def _mark_iteration(end: float, x: alt.X) -> list[alt.Chart]:
    """Lines where the iteration begins and ends, the second one with its length."""
    label = f"iteration, {format_time(end)}"
    edges = [{"start_s": 0.0, "label": ""}, {"start_s": end, "label": label}]
    # each layer has a name of its own: renderers refuse two of one name
    lines = canvas.draw(edges, name="iteration_ends").encode(x=x)
    lines = lines.mark_rule(color=INK, strokeDash=[4, 3])
    words = canvas.draw(edges, name="iteration_length").encode(x=x, y=alt.value(0), text="label:N")
    # above the lanes, where marks of a chart that can be zoomed are cut off unless they say so
    words = words.mark_text(color=INK, align="right", dx=4, dy=-4, baseline="bottom", clip=False)
    return [lines, words]
