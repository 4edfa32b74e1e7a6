"""Charts from frames: Altair values, returned and never shown, in colours that colour-blind readers can tell apart."""

from perfkit.plots.canvas import INK, PALETTE, Chart, Frame, use_svg
from perfkit.plots.machines import collective_curves, kernel_curves, platform_ratios, roofline_chart
from perfkit.plots.plans import plan_bars
from perfkit.plots.runs import (
    breakdown_bars,
    calibration_learning,
    error_bars_by_class,
    predicted_vs_measured,
)
from perfkit.plots.timelines import module_bars, timeline_lanes

__all__ = [
    "INK",
    "PALETTE",
    "Chart",
    "Frame",
    "breakdown_bars",
    "calibration_learning",
    "collective_curves",
    "error_bars_by_class",
    "kernel_curves",
    "module_bars",
    "plan_bars",
    "platform_ratios",
    "predicted_vs_measured",
    "roofline_chart",
    "timeline_lanes",
    "use_svg",
]
