"""How charts look: perfkit's theme, which they keep wherever they are shown or saved."""

from typing import Any, TypeAlias

import altair as alt
import numpy as np

Row: TypeAlias = dict[str, Any]
#: Okabe and Ito, "Color Universal Design", 2008; black gives way to grey, and pale yellow comes last.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442"]
#: Text, axes and reference lines.
INK = "#24292f"


@alt.theme.register("perfkit", enable=False)
def _theme() -> alt.theme.ThemeConfig:
    ink = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), INK)
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
    heading = {"color": INK, "subtitleColor": INK, "fontSize": 14, "subtitleFontSize": 11, "anchor": "start"}
    config: Any = {
        "background": "white",
        "font": "Inter, Helvetica Neue, Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif",
        "axis": {**text, **ink, "titlePadding": 8, "gridOpacity": 0.12, "labelFlush": False},
        "legend": {**text, "labelLimit": 240, "symbolOpacity": 1, "symbolSize": 70},
        "header": {**text, "labelLimit": 240},
        "title": {**heading, "offset": 10},
        "view": {"stroke": None, "continuousWidth": 460, "continuousHeight": 300},
        "range": {"category": PALETTE},
    }
    return {"config": config}


def _show(spec: Row, **options: Any) -> Row:
    """The picture; where there are sliders, the chart too, under the newest name that JupyterLab 4 draws it by."""
    import vl_convert

    live = {"application/vnd.vegalite.v5+json": spec} if any("bind" in each for each in spec.get("params", ())) else {}
    return {"image/svg+xml": vl_convert.vegalite_to_svg(spec), **live}


alt.renderers.register("perfkit", _show)


class _Themed(alt.TopLevelMixin):
    """A chart that keeps perfkit's theme wherever it is shown or saved alone, and says in words what it shows."""

    def to_dict(self, *args: Any, **settings: Any) -> Row:
        with alt.theme.enable("perfkit"):
            spec: Row = super().to_dict(*args, **settings)
        if "$schema" not in spec or "description" in spec:  # inside another chart, or it says so itself
            return spec
        title = spec.get("title", "Chart")
        lines = [title] if isinstance(title, str) else [title["text"], *np.atleast_1d(title.get("subtitle", []))]
        return {**spec, "description": ". ".join(filter(None, lines))}


class Chart(_Themed, alt.Chart):
    """A chart in perfkit's theme."""


class LayerChart(_Themed, alt.LayerChart):
    """Charts over each other in perfkit's theme."""


class HConcatChart(_Themed, alt.HConcatChart):
    """Charts side by side in perfkit's theme."""


def use_svg() -> None:
    """Show charts as SVG in notebooks, with perfkit's theme: small, stored in the file, and readable without a network.

    A chart with sliders is stored beside its picture, so that they move in JupyterLab.

    Examples
    --------
    >>> use_svg()
    >>> alt.renderers.active, alt.theme.active
    ('perfkit', 'perfkit')
    """
    alt.renderers.enable("perfkit")
    alt.theme.enable("perfkit")
