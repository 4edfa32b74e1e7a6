"""Charts with sliders: a browser computes their closed forms again as a slider moves; no Python is
needed."""

from functools import partial
from typing import Any

import altair as alt

from perfkit.ground.units import check_positive, read_number
from perfkit.models.collectives import alpha_beta
from perfkit.models.distributions import Uniform, unique_rows
from perfkit.models.roofline import roofline_time
from perfkit.plots import canvas
from perfkit.plots.canvas import INK, Row, label_si

#: How many times a slider can double or halve its value; the axis covers the same range [-].
_DOUBLINGS = 10


def _ask(
    heading: str,
    parameters: Row,
    swept: tuple[str, str, str],
    answered: tuple[str, str],
    curves: Row,
    answer: Any,
) -> alt.LayerChart:
    """Curves over the last parameter, a slider for every parameter, and a dot at the chosen place
    of the first curve.

    `answer` computes the first curve in Python; it sets the ends of the vertical axis.
    """
    (name, axis, unit), (found, base), (first, *_) = swept, answered, curves
    settings, title = list[alt.Parameter](), f"'{heading}'"
    for key, (given, _) in parameters.items():
        check_positive(key, given)
    parameters = {key: (read_number(given), of) for key, (given, of) in parameters.items()}
    for key, (given, of) in parameters.items():
        value = f"{float(given)!r} * pow(2, {key}_doublings)"
        bind = alt.binding_range(
            min=-_DOUBLINGS, max=_DOUBLINGS, step=0.25, name=f"{key} [{of or '-'}], doublings "
        )
        settings.append(alt.param(name=f"{key}_doublings", value=0, bind=bind))
        settings.append(
            alt.param(name=key, expr=f"round({value})" if isinstance(given, int) else value)
        )
        title += f" + '{', ' if len(settings) > 2 else ': '}{key} ' + {label_si(of, key)}"
    ends = parameters[name][0] / 2.0**_DOUBLINGS, parameters[name][0] * 2.0**_DOUBLINGS
    x, domain = (
        canvas.log_axis(name, axis, ends, unit),
        canvas.log_domain(map(answer, ends), room=4),
    )
    color = canvas.colour("curve", list(curves), legend=alt.Legend(orient="bottom", title=None))
    looks = {"x": x, "y": canvas.log_axis("value", found, domain, base, alt.Y), "color": color}
    shown = canvas.tips("curve", **{name: ".4s", "value": ".4s"})
    points = {name: f"{ends[0]!r} * pow({ends[1] / ends[0]!r}, datum.step / 240)", **curves}
    lines = (
        alt.Chart(alt.sequence(0, 241, as_="step"))
        .transform_calculate(**points)
        .mark_line(clip=True)
    )
    lines = lines.transform_fold(list[Any](curves)[::-1], as_=["curve", "value"]).encode(
        **looks, tooltip=shown
    )
    asked = canvas.draw([{"curve": first}]).transform_calculate(
        **{name: name, "value": curves[first]}
    )
    dot = asked.mark_point(filled=True, size=90, clip=True).encode(**looks, tooltip=shown)
    text = asked.transform_calculate(text=f"{label_si(unit, name)} + ': ' + {label_si(base)}")
    text = text.mark_text(align="right", dx=-9, dy=-9, color=INK).encode(
        x, looks["y"], text="text:N"
    )
    drawn = canvas.LayerChart(
        layer=[lines, dot, text], title=alt.Title(alt.ExprRef(title))
    ).add_params(*settings)
    return drawn.properties(
        description=f"{heading} with sliders for {', '.join(parameters)}: {', '.join(curves)}"
    )


def ask_alpha_beta(*, alpha: float, beta: float) -> alt.LayerChart:
    """Draw the time of a message, with sliders for start-up, time per byte and size.

    Parameters
    ----------
    alpha : float
        Time of an empty message, where its slider begins [s].
    beta : float
        Time per byte, where its slider begins [s/B].

    Returns
    -------
    chart : altair.LayerChart
        `perfkit.models.collectives.alpha_beta` and its two terms. The size begins where both terms
        are equal.

    Raises
    ------
    ValueError
        For a parameter that is not a number above zero.

    Examples
    --------
    >>> ask_alpha_beta(alpha=10e-6, beta=1 / 200e9).to_dict()["description"]
    'Alpha-beta with sliders for alpha, beta, nbytes: time, start-up, transfer'
    """
    parameters = {"alpha": (alpha, "s"), "beta": (beta, "s/B")}
    parameters["nbytes"] = (check_positive("alpha", alpha) / check_positive("beta", beta), "B")
    curves = {
        "time": "alpha + beta * datum.nbytes",
        "start-up": "alpha",
        "transfer": "beta * datum.nbytes",
    }
    swept, answer = ("nbytes", "Message size", "B"), partial(alpha_beta, alpha=alpha, beta=beta)
    return _ask("Alpha-beta", parameters, swept, ("Time", "s"), curves, answer)


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
    parameters = {"peak": (peak, "FLOP/s"), "bandwidth": (bandwidth, "B/s")}
    parameters["intensity"] = (
        check_positive("peak", peak) / check_positive("bandwidth", bandwidth),
        "FLOP/B",
    )
    kernel, roof = (
        "1 / hypot(1 / peak, 1 / (bandwidth * datum.intensity))",
        "min(peak, bandwidth * datum.intensity)",
    )
    time = partial(roofline_time, nbytes=1.0, peak=peak, bandwidth=bandwidth)
    swept, answer = (
        ("intensity", "Arithmetic intensity", "FLOP/B"),
        lambda flops: flops / time(flops),
    )
    return _ask(
        "Roofline", parameters, swept, ("Rate", "FLOP/s"), {"kernel": kernel, "roof": roof}, answer
    )


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
    curves = {
        "distinct": "min(rows * (1 - pow(1 - 1 / rows, datum.lookups)), datum.lookups)",
        "all different": "datum.lookups",
        "all rows": "rows",
    }
    parameters, swept = (
        {"rows": (rows, ""), "lookups": (lookups, "")},
        ("lookups", "Lookups of an iteration", ""),
    )
    return _ask(
        "Distinct rows",
        parameters,
        swept,
        ("Distinct rows", ""),
        curves,
        partial(unique_rows, Uniform(rows)),
    )
