"""What more of each resource brings: the prediction made again on platforms whose resources are scaled one by one."""

import math
from dataclasses import dataclass
from typing import Any

from perfkit.ground.results import Picture, Table, Tabular
from perfkit.ground.units import check_positive, format_time
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.resources import list_resources

#: How much more of a resource an elasticity is taken over [-].
_STEP = 1.01


@dataclass(frozen=True)
class Sensitivity(Tabular):
    """What more of each resource brings.

    Parameters
    ----------
    frame : polars.DataFrame
        See `table`.
    time : float
        Time of an iteration as the platform is [s].
    summary : str
        What was predicted, in one line.
    """

    frame: Table
    time: float
    summary: str

    def table(self) -> Table:
        """A row for every resource, that which brings most first.

        Returns
        -------
        table : polars.DataFrame
            resource, see `Platform.with_scale`; elasticity: by how many per cent the time changes with 1 % more of it
            [-]; gain_s: what 1 % more saves [s]; less_s and more_s: the time with the swing less and more of it [s].
        """
        return self.frame

    def chart(self) -> Picture:
        """Draw the time with less and with more of every resource, as a tornado.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        return plots.tornado_bars(self.frame, time=self.time, title=self.summary)

    def __repr__(self) -> str:
        name, share = self.frame.row(0)[:2]
        return f"Sensitivity({self.summary}: 1 % more {name} changes the time by {share:+.2f} %)"


def find_sensitivity(prediction: Any, swing: float = 0.2) -> Sensitivity:
    """What more of each resource brings, each scaled alone and the iteration predicted again.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.
    swing : float, optional
        How much less and more of a resource the chart shows: 0.2 is a platform with 1 / 1.2 and one with 1.2 times as
        much of it [-].

    Returns
    -------
    sensitivity : Sensitivity
        Table and tornado chart; resources that the platform does not know are left out.
    """
    import polars

    factor, rows = 1 + check_positive("swing", swing), []
    for name in list_resources(prediction.platform):
        with keep_quiet():
            slightly, less, more = (
                prediction._again(prediction.platform.with_scale(**{name: scale})).time
                for scale in (_STEP, 1 / factor, factor)
            )
        share = math.log(slightly / prediction.time) / math.log(_STEP)
        rows.append((name, share, prediction.time - slightly, less, more))
    columns = ("resource", "elasticity", "gain_s", "less_s", "more_s")
    frame = polars.DataFrame(rows, schema=columns, orient="row")
    frame = frame.sort(polars.col("elasticity").round(9), maintain_order=True)
    what, where = prediction.workload.description, f"{prediction.ranks} ranks of {prediction.platform.name}"
    return Sensitivity(frame, prediction.time, f"{what} on {where}, {format_time(prediction.time)}")
