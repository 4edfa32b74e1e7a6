"""Charts from frames: Altair charts, returned and never shown, in colours that colour-blind readers
can tell apart.

Read `canvas` first: what every chart is built from, rows, axes, tooltips and marks. `colours` holds
the colours of phases and of classes of operations. Then each chart is one file and one function,
which reads rows, makes two axes and lays marks over each other:

- `breakdowns` (stacked bars), `ladders`, `picks`, `tornado` and `ratios` are the shortest; `accuracy` has a band
- `memory` has stacked areas, a point and lines across
- `sweeps`, `modules`, `ranks`, `rooflines` and `collectives` prepare more rows
- `fronts` has labels that do not overlap, for which `labels` finds places
- `timelines` joins operations until few enough bars are left
- `sliders`: closed forms that a browser computes
- `nodes`, `rings` and `dlrms` are drawings, of boxes, lines and words that `drawings` lays out

`theme` is the look of all charts and writes them to files, `pictures` draws them in a process of its
own, and `docstrings` lets Altair work under ``python -OO``; a new chart needs none of these.
"""

from perfkit.plots.docstrings import keep_docstrings  # isort: split

keep_docstrings()  # before anything else imports Altair

from perfkit.plots.accuracy import predicted_vs_measured, residuals_by_time
from perfkit.plots.breakdowns import breakdown_bars
from perfkit.plots.collectives import collective_curves
from perfkit.plots.colours import INK, PALETTE
from perfkit.plots.diagnoses import measured_against_links
from perfkit.plots.dlrms import draw_dlrm
from perfkit.plots.fits import bandwidth_fit
from perfkit.plots.fronts import strategy_front
from perfkit.plots.gains import gain_bars
from perfkit.plots.ladders import bandwidth_ladder
from perfkit.plots.memory import memory_areas
from perfkit.plots.modules import module_bars
from perfkit.plots.nodes import draw_node
from perfkit.plots.picks import pick_strips
from perfkit.plots.ranks import plan_bars
from perfkit.plots.ratios import platform_ratios
from perfkit.plots.rings import draw_ring
from perfkit.plots.rooflines import roofline_chart
from perfkit.plots.sliders import ask_alpha_beta, ask_roofline, ask_unique_rows
from perfkit.plots.sweeps import sweep_lines
from perfkit.plots.theme import use_svg
from perfkit.plots.timelines import timeline_lanes
from perfkit.plots.tornado import tornado_bars

__all__ = [
    "INK",
    "PALETTE",
    "ask_alpha_beta",
    "ask_roofline",
    "ask_unique_rows",
    "bandwidth_fit",
    "bandwidth_ladder",
    "breakdown_bars",
    "collective_curves",
    "draw_dlrm",
    "draw_node",
    "draw_ring",
    "gain_bars",
    "measured_against_links",
    "memory_areas",
    "module_bars",
    "pick_strips",
    "plan_bars",
    "platform_ratios",
    "predicted_vs_measured",
    "residuals_by_time",
    "roofline_chart",
    "strategy_front",
    "sweep_lines",
    "timeline_lanes",
    "tornado_bars",
    "use_svg",
]
