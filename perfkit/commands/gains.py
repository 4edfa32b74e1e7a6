"""What would help most: an iteration with twice as much of each resource, in a line."""

from typing import NamedTuple

import perfkit as pk
from perfkit.ground.units import format_count
from perfkit.platform.whatif import RESOURCES, list_resources
from perfkit.prediction.single_causes import count_operations, predict_time

#: Resources that somebody may buy more of.
_BOUGHT = ("peak", "memory", "intra", "inter", "host")
#: Operations of all unlike ranks up to which predictions with other resources take less than half a
#: second together [-].
_MOST_OPERATIONS = 4_000
#: Share of the time from which a saving is worth a word [-].
_TELLING = 0.01
#: Most resources that are named [-].
_MOST_NAMED = 3


class Gain(NamedTuple):
    """The same iteration with twice as much of a resource.

    Parameters
    ----------
    resource : str
        One of `perfkit.platform.whatif.RESOURCES`.
    time : float
        Time of the iteration then [s].
    saved : float
        Share of the time that this saves [-].
    """

    resource: str
    time: float
    saved: float


def find_gains(prediction: pk.Prediction) -> list[Gain] | None:
    """Predict an iteration with twice as much of each resource.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.

    Returns
    -------
    gains : list of Gain or None
        Those with the largest savings first; None where that would take long, as for many
        micro-batches.
    """
    if count_operations(prediction) > _MOST_OPERATIONS:
        return None
    known = list_resources(prediction.platform)
    gains = []
    for resource in _BOUGHT:
        if resource not in known or (prediction.ranks == 1 and resource in ("intra", "inter")):
            continue
        time = predict_time(prediction, resource, 2.0)
        gains.append(Gain(resource, time, 1.0 - time / prediction.time))
    return sorted(gains, key=lambda gain: -round(gain.saved, 9))


def describe_gains(gains: list[Gain] | None) -> str:
    """Say in a line what would help most.

    Examples
    --------
    >>> describe_gains([Gain("peak", 1.31, 0.38), Gain("inter", 2.1, 0.02), Gain("host", 2.1, 0.0)])
    'what helps: twice the FLOP/s of the device would save 38.0%, bandwidth of links between nodes 2.0%'
    """
    if gains is None:
        return "what helps: --report FILE says what more of each resource would save"
    named = [gain for gain in gains if gain.saved >= _TELLING][:_MOST_NAMED]
    if not named:
        tried = format_count(len(gains), "resource")
        return f"what helps: nothing alone; twice as much of one of {tried} saves less than 1%"
    first, *others = named
    words = [f"twice the {RESOURCES[first.resource]} would save {first.saved:.1%}"]
    words += [f"{RESOURCES[gain.resource]} {gain.saved:.1%}" for gain in others]
    return f"what helps: {', '.join(words)}"
