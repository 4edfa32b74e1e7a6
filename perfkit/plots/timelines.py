"""Charts of what happens inside an iteration: the streams of all ranks over time, and its modules."""

from collections.abc import Iterable

import altair as alt

from perfkit.plots.canvas import INK, Frame, Row, colour, draw, label_si, layer, order, read_rows, tips
from perfkit.units import format_time

__all__ = ["module_bars", "timeline_lanes"]

_ROW_LIMIT = 1_500  # Altair refuses 5,000 rows; more than this makes notebooks heavy and shows nothing new
_PHASES = ("forward", "backward", "update")


def _joined(rows: Iterable[Row], gap: float) -> list[Row]:
    """Neighbours of one lane and phase, at most `gap` apart, as one bar that says what takes longest in it."""
    joined: list[Row] = []
    for row in rows:
        last = joined[-1] if joined else None
        near = last is not None and (last["lane"], last["phase"]) == (row["lane"], row["phase"])
        if last is not None and near and row["start_s"] - last["end_s"] <= gap:
            last["end_s"] = max(last["end_s"], row["end_s"])
            last["busy_s"] += row["busy_s"]
            last["operations"] += row["operations"]
            if row["longest_s"] > last["longest_s"]:
                last |= {key: row[key] for key in ("longest", "longest_s")}
        else:
            joined.append(dict(row))
    return joined


def _aggregated(rows: list[Row], limit: int) -> list[Row]:
    """Few bars that look as one per operation would: nothing finer than a thousandth of the width is drawn."""
    rows = sorted(rows, key=lambda row: (row["lane"], row["start_s"]))
    first = min((row["start_s"] for row in rows), default=0.0)
    span = max((row["end_s"] for row in rows), default=0.0) - first
    joined = _joined(rows, span / 1000)
    if len(joined) <= limit:
        return joined
    # Phases alternate faster than the eye can follow: each slot of time shows the phase that fills most of it.
    slots = max(1, limit // len({row["lane"] for row in rows}))
    width = span / slots
    filled: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        slot = min(slots - 1, int((row["start_s"] - first) / width))
        phases = filled.setdefault((row["lane"], slot), {})
        place = {"start_s": first + slot * width, "end_s": first + (slot + 1) * width}
        known = phases.get(row["phase"])
        phases[row["phase"]] = _joined([known, row], 2 * span)[0] | place if known else row | place
    most = (max(phases.values(), key=lambda row: row["busy_s"]) for _, phases in sorted(filled.items()))
    return _joined(most, width / 2)


def timeline_lanes(frame: Frame, *, title: str = "Timeline of one iteration", lanes: int = 24) -> alt.Chart:
    """Draw what every rank and stream does over time, coloured by phase; pale where it often stands still.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``rank``, ``stream``, ``phase``, ``start_s`` and ``end_s`` [s] and, where known, ``name`` and ``module``;
        neighbours of one phase become one bar, so that iterations of any length stay readable.
    title : str, optional
        Heading.
    lanes : int, optional
        Lanes drawn, from rank 0 on [-].

    Returns
    -------
    chart : altair.Chart
        One lane per rank and stream; the horizontal axis zooms where the renderer is interactive.
    """
    rows = []
    for row in read_rows(frame):
        if (seconds := row["end_s"] - row["start_s"]) > 0:
            kept = {key: row[key] for key in ("rank", "stream", "phase", "start_s", "end_s")}
            kept["longest"] = " · ".join(filter(None, (row.get("name"), row.get("module"))))
            kept |= {"lane": f"rank {row['rank']} · {row['stream']}", "longest_s": seconds, "busy_s": seconds}
            rows.append(kept | {"operations": 1})
    streams = order(str(row["stream"]) for row in rows)
    pairs = sorted({(row["rank"], streams.index(str(row["stream"]))) for row in rows})
    names = [f"rank {rank} · {streams[stream]}" for rank, stream in pairs]
    phases = order(row["phase"] for row in sorted(rows, key=lambda row: row["start_s"]))
    drawn = _aggregated([row for row in rows if row["lane"] in names[:lanes]], _ROW_LIMIT)
    for row in drawn:
        row["busy"] = min(1.0, row.pop("busy_s") / (row["end_s"] - row["start_s"]))
        del row["rank"], row["stream"], row["longest_s"]
    axis = "Time since the iteration began"
    axis += f"; {len(names) - lanes} more lanes are not drawn" if len(names) > lanes else ""
    pale = any(row["busy"] < 0.9 for row in drawn)
    note = "paler: the stream stands still for a part of the bar" if pale else alt.Undefined
    return (
        draw(drawn, name="timeline")
        .mark_bar(height={"band": 0.8})
        .encode(
            x=alt.X("start_s:Q", title=axis, axis=alt.Axis(labelExpr=label_si("s"), tickCount=8)),
            x2="end_s:Q",
            y=alt.Y("lane:N", title=None, sort=names[:lanes]),
            color=colour("phase", phases, title="Phase"),
            opacity=alt.Opacity("busy:Q", scale=alt.Scale(domain=[0, 1], range=[0.15, 1]), legend=None),
            tooltip=tips("lane", "phase", "longest", start_s=".4s", end_s=".4s", operations="d", busy=".0%"),
        )
        .add_params(alt.selection_interval(name="zoom", bind="scales", encodings=["x"]))
        .properties(width=620, height=alt.Step(24), title=alt.Title(title, subtitle=note))
    )


def module_bars(frame: Frame, *, title: str = "Where the time goes, by module", modules: int = 30) -> alt.LayerChart:
    """Draw forward, backward and update of every module, and how long the device stands still for it.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``module``, ``forward_s``, ``backward_s``, ``update_s`` and ``idle_s`` [s].
    title : str, optional
        Heading; the time of all modules stands below it.
    modules : int, optional
        Modules that get a bar of their own, the longest ones in the order they come; the others, and those that take
        less than 0.2 % of the time, share one [-].

    Returns
    -------
    chart : altair.LayerChart
        One bar per module.
    """
    columns = [f"{phase}_s" for phase in _PHASES]
    rows = [row | {"time_s": sum(row[key] for key in columns)} for row in read_rows(frame)]
    least = 0.002 * sum(row["time_s"] for row in rows)
    longest = sorted((row for row in rows if row["time_s"] > least), key=lambda row: -row["time_s"])
    shown = {row["module"] for row in longest[:modules]}
    bars: dict[str, Row] = {}
    for row in rows:
        name = row["module"] or "outside modules"
        name = name if row["module"] in shown else f"{len(rows) - len(shown)} more modules"
        bar = bars.setdefault(name, {"module": name, **dict.fromkeys((*columns, "idle_s", "time_s"), 0.0)})
        bar.update({key: bar[key] + row[key] for key in (*columns, "idle_s", "time_s")})
    names = list(bars)
    long = [
        {"module": name, "phase": phase, "order": place, "seconds": bar[f"{phase}_s"], "time_s": bar["time_s"]}
        for name, bar in bars.items()
        for place, phase in enumerate(_PHASES)
        if bar[f"{phase}_s"] > 0
    ]
    y = alt.Y("module:N", title=None, sort=names, axis=alt.Axis(labelLimit=260))
    x = alt.X("seconds:Q", title="Time", axis=alt.Axis(labelExpr=label_si("s"), tickCount=6))
    time = draw(long).mark_bar(height={"band": 0.8}).encode(
        x=x, y=y, color=colour("phase", _PHASES, title="Phase"), order=alt.Order("order:Q"),
        tooltip=tips("module", "phase", seconds=".3s", time_s=".3s"),
    )  # fmt: skip
    idle = draw([{"module": name, "idle_s": bar["idle_s"]} for name, bar in bars.items() if bar["idle_s"] > 0])
    line = idle.mark_bar(color=INK, height={"band": 0.16}).encode(
        x="idle_s:Q", y=y, tooltip=tips("module", idle_s=".3s")
    )
    total, still = (sum(bar[key] for bar in bars.values()) for key in ("time_s", "idle_s"))
    note = f"{format_time(total)} in all; dark line: the device stands still, {format_time(still)} in all"
    return layer(time, line).properties(width=460, height=alt.Step(18), title=alt.Title(title, subtitle=note))
