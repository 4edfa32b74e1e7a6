"""Options that say which iteration is predicted, and on which ranks; and its prediction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.messages import say_next_steps
from perfkit.commands.model_options import Described, describe, takes_model, takes_sharing
from perfkit.commands.options import OF_SECONDS, WHOLE, describe_ranks, find_platform
from perfkit.ground.quantities import SECONDS, read_quantity
from perfkit.ground.units import show
from perfkit.platform.platform import Platform

_Function = Callable[..., Any]

_RANKS = click.option(
    "--ranks", type=WHOLE, help="ranks that take part; default: all of the platform"
)
_LOADING = click.option(
    "--loading",
    type=OF_SECONDS,
    default=0.0,
    metavar="SECONDS",
    help="time of the data loader per batch of a rank",
)
_MEASURED = click.option(
    "--measured",
    metavar="SECONDS|LOG",
    help="what an iteration really took, as 10.5 or 44ms, or a training log: how far it is, and why",
)


@dataclass(frozen=True)
class Predicted:
    """What the options of `takes_prediction` ask for.

    Parameters
    ----------
    described : Described
        The workload, and how ranks share it.
    platform : Platform
        Where it runs.
    prediction : Prediction
        Its prediction.
    assumed : str, optional
        Which ranks take part; None where ``--ranks`` says it.
    deviation : Deviation, optional
        The measurement beside it; None without one.
    """

    described: Described
    platform: Platform
    prediction: pk.Prediction
    assumed: str | None
    deviation: pk.Deviation | None


def takes_prediction(function: _Function) -> _Function:
    """Give a command the options that say what is predicted, and where."""
    for decorate in (
        _MEASURED,
        _LOADING,
        options.stack,
        options.execution,
        _RANKS,
        takes_sharing,
        options.nodes,
        options.platform,
        takes_model,
    ):
        function = decorate(function)
    return function


def predict_described(values: Mapping[str, Any]) -> Predicted:
    """Predict what the options of `takes_prediction` describe.

    Parameters
    ----------
    values : mapping
        What click read, None or False where an option is not given.

    Raises
    ------
    ValueError
        As `perfkit.predict` does, and for a measurement that is neither a time nor a log.
    """
    platform = find_platform(values["platform"], values["nodes"])
    ranks = values["ranks"]
    described = describe(values, platform.network.ranks if ranks is None else ranks)
    assumed = _describe_ranks_of(described, values, platform)
    if ranks is None and described.strategy is None:
        ranks = platform.network.ranks
    prediction = pk.predict(
        described.workload,
        platform,
        ranks=ranks,
        execution=values["execution"],
        loading=values["loading"],
        strategy=described.strategy,
        stack=values["stack"],
    )
    batch = getattr(described.workload, "batch", None)
    warnings = tuple(say_next_steps(text, batch) for text in prediction.warnings)
    prediction = replace(prediction, warnings=warnings)
    deviation = None
    if values["measured"] is not None:
        deviation = prediction.against(_read_measured(values["measured"]))
    return Predicted(described, platform, prediction, assumed, deviation)


def _describe_ranks_of(
    described: Described, values: Mapping[str, Any], platform: Platform
) -> str | None:
    """Say which ranks take part where ``--ranks`` does not."""
    of_platform = platform.network.ranks
    if values["ranks"] is not None or of_platform == 1:
        return None
    strategy = described.strategy
    if strategy is None:
        return describe_ranks(of_platform, platform)
    if values["dp"] is None:
        return (
            f"ranks: {strategy.ranks}, all of {platform.name}, with --dp {strategy.dp}; --dp or "
            "--ranks takes another number"
        )
    return (
        f"ranks: {strategy.ranks} of the {of_platform} of {platform.name}, as --tp x --pp x --cp x "
        "--dp says"
    )


def _read_measured(word: str) -> Any:
    """A time with or without its unit [s], or the log of a training run."""
    seconds = read_quantity(word, SECONDS)
    if seconds is not None:
        return seconds
    if not Path(word).exists():
        if Path(word).suffix or "/" in word:
            raise ValueError(
                f"measured is {show(word)}, and there is no such file; name the training log, or a "
                "time such as 44ms"
            )
        raise ValueError(
            f"measured is {show(word)}; it must be seconds, a time with one of the units {', '.join(SECONDS)}, such as "
            "44ms, or the file of a training log"
        )
    return pk.read_training_log(word)
