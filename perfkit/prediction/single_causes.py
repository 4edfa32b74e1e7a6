"""Which resource alone would explain a measured time, and at which speed: by predicting again."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfkit.platform.estimates import keep_quiet
from perfkit.platform.whatif import list_resources

#: How many times slower or faster a resource may have to be to be named as a cause [-].
BELIEVABLE = 4.0
#: Largest error of the time at a speed that is named, over the measured one [-].
LARGEST_ERROR = 0.02
#: Error of the time at which a search ends, over the measured one [-].
_CLOSE = 0.005
#: Most predictions between both ends of a search; with eight, a time that has no jumps is met [-].
_STEPS = 8
#: Operations of all unlike ranks from which a search takes fewer predictions, as each takes more than a
#: tenth of a second [-].
_MANY_OPERATIONS = 25_000
#: Predictions of such a search [-].
_FEW_STEPS = 2


@dataclass(frozen=True)
class SingleCause:
    """A resource as the only cause of a measured time.

    Parameters
    ----------
    resource : str
        One of `perfkit.platform.whatif.RESOURCES`.
    scale : float, optional
        How many times as fast as on the platform it would have to be; None where no believable speed
        explains the time [-].
    time : float, optional
        Predicted time at that speed [s].
    """

    resource: str
    scale: float | None
    time: float | None


class _Point(NamedTuple):
    """A prediction on the way of a search.

    Parameters
    ----------
    slowness : float
        How many times as slow as on the platform the resource is [-].
    gap : float
        Predicted less measured time [s].
    """

    slowness: float
    gap: float


def count_steps(prediction: Any) -> int:
    """How many predictions a search between both ends may take.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.

    Returns
    -------
    steps : int
        Fewer where one prediction takes long.
    """
    return _FEW_STEPS if has_many_operations(prediction) else _STEPS


def count_operations(prediction: Any) -> int:
    """How many operations the unlike ranks of an iteration have together: to predict it takes as long.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.

    Returns
    -------
    count : int
        Of all graphs that are simulated.
    """
    return sum(len(timeline.graph) for timeline in prediction._timeline.rank_timelines)


def has_many_operations(prediction: Any) -> bool:
    """Whether an iteration has so many operations that searches take few predictions.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.

    Returns
    -------
    many : bool
        Whether it has.
    """
    return count_operations(prediction) >= _MANY_OPERATIONS


def predict_time(prediction: Any, resource: str, scale: float) -> float:
    """Time of an iteration on a platform with another speed of one resource.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.
    resource : str
        One of `perfkit.platform.whatif.RESOURCES`.
    scale : float
        How many times as fast it is [-].

    Returns
    -------
    time : float
        Of the iteration [s].
    """
    with keep_quiet():
        return prediction._repredict(prediction.platform.with_scale(**{resource: scale})).time


def find_single_causes(prediction: Any, measured: float) -> list[SingleCause]:
    """Find at which speed each resource alone would explain a measured time.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.
    measured : float
        Its measured time [s].

    Returns
    -------
    causes : list of SingleCause
        One for each resource of the platform.

    Notes
    -----
    Communication that overlaps with computation costs nothing until it takes longer than that, so the
    time at another speed is predicted and not taken from the time per cent of today. A slower run is
    explained by slower resources alone, a faster one by faster ones.
    """
    return [
        find_speed(prediction, resource, measured)
        for resource in list_resources(prediction.platform)
    ]


def find_speed(prediction: Any, resource: str, measured: float) -> SingleCause:
    """Find at which speed one resource alone would explain a measured time.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.
    resource : str
        One of `perfkit.platform.whatif.RESOURCES`.
    measured : float
        Measured time of the iteration [s].

    Returns
    -------
    cause : SingleCause
        Its speed, from a quarter to four times that on the platform.
    """

    def find_gap(slowness: float) -> float:
        return predict_time(prediction, resource, 1 / slowness) - measured

    today = _Point(1.0, prediction.time - measured)
    farthest = BELIEVABLE if measured >= prediction.time else 1 / BELIEVABLE
    end = _Point(farthest, find_gap(farthest))
    cannot = SingleCause(resource, None, None)
    if today.gap * end.gap > 0 or today.gap == end.gap:
        return cannot
    found = _search(find_gap, today, end, _CLOSE * measured, count_steps(prediction))
    is_near = abs(found.gap) <= LARGEST_ERROR * measured
    if not is_near and not has_many_operations(prediction):
        return cannot  # the time jumps past the measured one
    return SingleCause(resource, 1 / found.slowness, measured + found.gap)


def _search(
    find_gap: Callable[[float], float], today: _Point, end: _Point, close: float, steps: int
) -> _Point:
    """The point where the gap is least, between two points whose gaps differ in their sign.

    Every other step goes to where a line between both points has no gap, as times are straight lines of
    slowness over long stretches; the steps between halve what is left, which a bend cannot stop.
    """
    nearest = end
    for step in range(steps):
        if abs(nearest.gap) <= close:
            break
        if step % 2 == 0:
            share = today.gap / (today.gap - end.gap)
            slowness = today.slowness + share * (end.slowness - today.slowness)
        else:
            slowness = math.sqrt(today.slowness * end.slowness)
        middle = _Point(slowness, find_gap(slowness))
        if abs(middle.gap) < abs(nearest.gap):
            nearest = middle
        if middle.gap * today.gap > 0:
            today = middle
        else:
            end = middle
    return nearest
