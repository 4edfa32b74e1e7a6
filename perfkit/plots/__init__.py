"""Charts from frames: Altair charts, returned and never shown, in colours that colour-blind readers
can tell apart."""

from perfkit.plots.docstrings import keep_docstrings  # isort: split

keep_docstrings()  # before anything else imports Altair

from perfkit.plots.canvas import INK, PALETTE, use_svg
from perfkit.plots.iterations import (
    breakdown_bars,
    module_bars,
    predicted_vs_measured,
    sweep_lines,
    timeline_lanes,
)
from perfkit.plots.machines import (
    collective_curves,
    plan_bars,
    platform_ratios,
    roofline_chart,
    tornado_bars,
)
from perfkit.plots.sliders import ask_alpha_beta, ask_roofline, ask_unique_rows

__all__ = [
    "INK",
    "PALETTE",
    "ask_alpha_beta",
    "ask_roofline",
    "ask_unique_rows",
    "breakdown_bars",
    "collective_curves",
    "module_bars",
    "plan_bars",
    "platform_ratios",
    "predicted_vs_measured",
    "roofline_chart",
    "sweep_lines",
    "timeline_lanes",
    "tornado_bars",
    "use_svg",
]
