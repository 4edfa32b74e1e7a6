"""Charts with sliders: a browser computes their closed forms again as a slider moves; no Python is
needed.

Each `ask_` function writes its closed form as a `_Question`, with the curves in Vega's expressions,
and `_draw_question` draws it.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt

from perfkit.ground.units import check_positive, read_number
from perfkit.models.collectives import pipelined
from perfkit.plots import canvas
from perfkit.plots.canvas import Domain, label_si
from perfkit.plots.colours import INK, colour
from perfkit.plots.theme import LayerChart

#: Most times that a slider multiplies or divides its value, and its step [-].
_FACTOR, _FACTOR_STEP = 8.0, 0.125
#: How many times the axis goes above and below where its slider begins: corners of curves stay on it,
#: with one slider at its most and another one at its least [-].
_SPAN = 4 * _FACTOR**2
#: Room above and below the first curve on the vertical axis, as a factor [-].
_ROOM = 2.5
#: Steps of a curve along its axis [-].
_STEPS = 240


class _Parameter(NamedTuple):
    """An argument of the closed form, which a slider multiplies."""

    name: str
    start: Any  # a number, where the slider begins; whole numbers stay whole
    unit: str


class _Question(NamedTuple):
    """A closed form to draw over one of its parameters."""

    heading: str
    parameters: Sequence[_Parameter]  # the last one is the horizontal axis
    label_of_axis: str
    label_of_answer: str
    unit_of_answer: str
    curves: Mapping[str, str]  # expressions of Vega by the names of curves; the first is asked

    @property
    def swept(self) -> _Parameter:
        return self.parameters[-1]


def _draw_question(question: _Question) -> alt.LayerChart:
    """Curves over the last parameter, a slider for every parameter, and a dot at the chosen place
    of the first curve."""
    for parameter in question.parameters:
        check_positive(parameter.name, parameter.start)
    swept = question.swept
    start = _read_start(swept)
    ends = Domain(start / _SPAN, start * _SPAN)
    x = canvas.log_axis(swept.name, question.label_of_axis, ends, swept.unit)
    y = _make_following_axis(question, ends)
    legend = alt.Legend(orient="bottom", title=None)
    looks = {"x": x, "y": y, "color": colour("curve", list(question.curves), legend=legend)}
    shown = canvas.tips("curve", **{swept.name: ".4s", "value": ".4s"})
    layers = [
        _draw_curves(question, ends).encode(**looks, tooltip=shown),
        _draw_dot(question).encode(**looks, tooltip=shown),
        _draw_answer(question).encode(x, y, text="text:N"),
    ]
    settings = []
    for parameter in question.parameters:
        settings += _make_slider(parameter)
    title = alt.Title(alt.ExprRef(_write_title(question)), fontSize=12)
    chart = LayerChart(layer=layers, title=title).add_params(*settings)
    names = ", ".join(parameter.name for parameter in question.parameters)
    curves = ", ".join(question.curves)
    return chart.properties(description=f"{question.heading} with sliders for {names}: {curves}")


def _read_start(parameter: _Parameter) -> Any:
    """Where the slider of a parameter begins, as a number of Python."""
    return read_number(parameter.start)


def _make_slider(parameter: _Parameter) -> list[alt.Parameter]:
    """The slider of a parameter, and the value that follows from it."""
    start = _read_start(parameter)
    factor = f"{parameter.name}_factor"
    slider = alt.binding_range(
        min=1 / _FACTOR, max=_FACTOR, step=_FACTOR_STEP, name=f"{parameter.name} × "
    )
    value = f"{float(start)!r} * {factor}"
    if isinstance(start, int):
        value = f"round({value})"
    return [
        alt.param(name=factor, value=1, bind=slider),
        alt.param(name=parameter.name, expr=value),
    ]


def _write_title(question: _Question) -> str:
    """An expression of Vega for the heading, and a line for the value of each parameter."""
    lines = [f"'{question.heading}'"]
    for parameter in question.parameters:
        value = label_si(parameter.unit, parameter.name)
        factor = f"format({parameter.name}_factor, '.4~g')"
        lines.append(f"'{parameter.name} × ' + {factor} + ' = ' + {value}")
    return f"[{', '.join(lines)}]"


def _make_following_axis(question: _Question, ends: Domain) -> alt.Y:
    """A logarithmic axis around the first curve, wherever the sliders move it."""
    first = next(iter(question.curves))
    at_ends = [
        question.curves[first].replace(f"datum.{question.swept.name}", repr(end)) for end in ends
    ]
    low = f"min({', '.join(at_ends)}) / {_ROOM}"
    high = f"max({', '.join(at_ends)}) * {_ROOM}"
    scale = alt.Scale(type="log", domain=[alt.ExprRef(low), alt.ExprRef(high)], nice=False)
    decades = alt.ExprRef(
        f"floor(log(({high}) / ({low})) / LN10)"
    )  # so that ticks are powers of ten
    axis = alt.Axis(labelExpr=label_si(question.unit_of_answer), tickCount=decades)
    return alt.Y("value:Q", title=question.label_of_answer, scale=scale, axis=axis)


def _draw_curves(question: _Question, ends: Domain) -> alt.Chart:
    """All curves, computed at equal steps of the logarithmic axis."""
    x = f"{ends.low!r} * pow({ends.high / ends.low!r}, datum.step / {_STEPS})"
    points = alt.Chart(alt.sequence(0, _STEPS + 1, as_="step"))
    points = points.transform_calculate(**{question.swept.name: x, **question.curves})
    lines = points.mark_line(clip=True)
    names: list[Any] = list(question.curves)
    names.reverse()  # the first curve is drawn last, above the others
    return lines.transform_fold(names, as_=["curve", "value"])


def _ask_first_curve(question: _Question) -> alt.Chart:
    """One row: the first curve at the values that the sliders hold."""
    first = next(iter(question.curves))
    name = question.swept.name
    row = canvas.draw([{"curve": first}])
    return row.transform_calculate(**{name: name, "value": question.curves[first]})


def _draw_dot(question: _Question) -> alt.Chart:
    return _ask_first_curve(question).mark_point(filled=True, size=90, clip=True)


def _draw_answer(question: _Question) -> alt.Chart:
    """The value and the answer in words, beside the dot."""
    value = label_si(question.swept.unit, question.swept.name)
    answer = label_si(question.unit_of_answer)
    text = _ask_first_curve(question).transform_calculate(text=f"{value} + ': ' + {answer}")
    return text.mark_text(align="right", dx=-9, dy=-9, color=INK)


def ask_alpha_beta(*, alpha: float, beta: float) -> alt.LayerChart:
    """Draw the time of a message, with sliders for latency, time per byte and size.

    Parameters
    ----------
    alpha : float
        Time of an empty message (latency), where its slider begins [s].
    beta : float
        Time per byte, where its slider begins [s/B].

    Returns
    -------
    chart : altair.LayerChart
        `perfkit.models.collectives.pipelined` with sharpness 0.6, as predictions use it; the sum of
        `perfkit.models.collectives.alpha_beta`; and its two terms. The size begins where both terms are
        equal.

    Raises
    ------
    ValueError
        For a parameter that is not a number above zero.

    Examples
    --------
    >>> ask_alpha_beta(alpha=10e-6, beta=1 / 200e9).to_dict()["description"]
    'Alpha-beta, q = 0.6 with sliders for alpha, beta, nbytes: pipelined, sum, latency, transfer time'
    """
    balanced = check_positive("alpha", alpha) / check_positive("beta", beta)
    sharpness = inspect.signature(pipelined).parameters["sharpness"].default
    question = _Question(
        heading=f"Alpha-beta, q = {sharpness}",
        parameters=[
            _Parameter("alpha", alpha, "s"),
            _Parameter("beta", beta, "s/B"),
            _Parameter("nbytes", balanced, "B"),
        ],
        label_of_axis="Message size",
        label_of_answer="Time",
        unit_of_answer="s",
        curves={
            "pipelined": (
                f"pow(pow(alpha, {sharpness}) + pow(beta * datum.nbytes, {sharpness}), 1 / {sharpness})"
            ),
            "sum": "alpha + beta * datum.nbytes",
            "latency": "alpha",
            "transfer time": "beta * datum.nbytes",
        },
    )
    return _draw_question(question)


def ask_roofline(*, peak: float, bandwidth: float) -> alt.LayerChart:
    """Draw the rate of a kernel, with sliders for arithmetic, memory and intensity.

    Parameters
    ----------
    peak : float
        Peak arithmetic rate, where its slider begins [FLOP/s].
    bandwidth : float
        Memory bandwidth, where its slider begins [B/s].

    Returns
    -------
    chart : altair.LayerChart
        Rate by `perfkit.models.roofline.roofline_time` with sharpness 2, and the sharp roof above
        it. The intensity begins at the ridge.

    Raises
    ------
    ValueError
        For a parameter that is not a number above zero.

    Examples
    --------
    >>> ask_roofline(peak=700e12, bandwidth=2.6e12).to_dict()["description"]
    'Roofline with sliders for peak, bandwidth, intensity: kernel, roof'
    """
    ridge = check_positive("peak", peak) / check_positive("bandwidth", bandwidth)

    question = _Question(
        heading="Roofline",
        parameters=[
            _Parameter("peak", peak, "FLOP/s"),
            _Parameter("bandwidth", bandwidth, "B/s"),
            _Parameter("intensity", ridge, "FLOP/B"),
        ],
        label_of_axis="Arithmetic intensity",
        label_of_answer="Rate",
        unit_of_answer="FLOP/s",
        curves={
            "kernel": "1 / hypot(1 / peak, 1 / (bandwidth * datum.intensity))",
            "roof": "min(peak, bandwidth * datum.intensity)",
        },
    )
    return _draw_question(question)


def ask_unique_rows(*, rows: int, lookups: float) -> alt.LayerChart:
    """Draw how many rows of a table are read when every row is looked up equally often.

    Parameters
    ----------
    rows : int
        Rows of the table, where its slider begins [-].
    lookups : float
        Lookups of an iteration (batch times pooling factor), where their slider begins [-].

    Returns
    -------
    chart : altair.LayerChart
        `perfkit.models.distributions.unique_rows` of a uniform table, below all lookups and all
        rows.

    Raises
    ------
    ValueError
        For a parameter that is not a number above zero, and for rows that are not a whole number.

    Examples
    --------
    >>> ask_unique_rows(rows=10**6, lookups=4096 * 20).to_dict()["description"]
    'Distinct rows with sliders for rows, lookups: distinct, all different, all rows'
    """
    rows = check_positive("rows", rows, integer=True)
    question = _Question(
        heading="Distinct rows",
        parameters=[_Parameter("rows", rows, ""), _Parameter("lookups", lookups, "")],
        label_of_axis="Lookups of an iteration",
        label_of_answer="Distinct rows",
        unit_of_answer="",
        curves={
            "distinct": "min(rows * (1 - pow(1 - 1 / rows, datum.lookups)), datum.lookups)",
            "all different": "datum.lookups",
            "all rows": "rows",
        },
    )
    return _draw_question(question)
