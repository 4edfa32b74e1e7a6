"""Options that say what a whole run costs: its amount, prices, failures and dates; and what they give."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

import perfkit as pk
from perfkit.commands.options import NUMBER, OF_SECONDS, keep_given, refuse_given
from perfkit.exploration.strategies import OneStrategy
from perfkit.ground.dates import read_date, write_date
from perfkit.ground.notes import write_warnings
from perfkit.ground.quantities import SECONDS, read_quantity
from perfkit.ground.results import write_cells
from perfkit.ground.units import format_count, format_table, show
from perfkit.prediction.goodput import write_hours

_Function = Callable[..., Any]
#: Options that name an amount of work.
_AMOUNTS = ("tokens", "samples", "images", "iterations")
#: Options that count with failures alone.
_OF_FAILURES = (
    "checkpoint_time",
    "write_rate",
    "restart",
    "checkpoint_interval",
    "start",
    "deadline",
)
_OTHERS = ("price", "power", "epochs", "mtbf", "jitter")
#: Largest chance that is written as such [-].
_NEARLY_SURE = 0.9995

_PRICE = click.option("--price", type=NUMBER, help="price of a GPU for an hour, in any currency")
_TOKENS = click.option("--tokens", type=NUMBER, help="tokens of the whole run, as 2e12")
_SAMPLES = click.option("--samples", type=NUMBER, help="samples or sequences of the whole run")
_MTBF = click.option(
    "--mtbf",
    metavar="SECONDS",
    help="time between failures of one GPU, as 50000h: hours of all GPUs over failures; or a published run: "
    "llama-3, bloom, rsc-1, rsc-2",
)
_CHECKPOINT_TIME = click.option(
    "--checkpoint-time",
    type=OF_SECONDS,
    metavar="SECONDS",
    help="with --mtbf: for which writing one checkpoint stops the run",
)
_RESTART = click.option(
    "--restart",
    type=OF_SECONDS,
    metavar="SECONDS",
    help="with --mtbf: from a failure until the run goes on; default 600",
)
_OF_RUNS = (
    _PRICE,
    _TOKENS,
    _SAMPLES,
    click.option("--images", type=NUMBER, help="images of the whole run"),
    click.option("--iterations", type=NUMBER, help="steps of the whole run"),
    click.option("--epochs", type=NUMBER, help="how many times that is gone through; default 1"),
    click.option(
        "--power", type=NUMBER, metavar="WATTS", help="of a GPU with its share of the node"
    ),
    _MTBF,
    _CHECKPOINT_TIME,
    click.option(
        "--write-rate",
        type=NUMBER,
        metavar="RATE",
        help="in its place: bytes of a checkpoint that a GPU writes in a second",
    ),
    _RESTART,
    click.option(
        "--checkpoint-interval",
        type=OF_SECONDS,
        metavar="SECONDS",
        help="with --mtbf: training between two checkpoints; default: what loses least",
    ),
    click.option(
        "--jitter",
        metavar="SHARE|FILE...",
        multiple=True,
        help="how much a GPU's time for a step varies, as 0.02, or traces of its ranks or a training log: all wait "
        "for the slowest",
    ),
    click.option("--start", metavar="DATE", help="with --mtbf: when the run starts, as 2026-12-01"),
    click.option(
        "--deadline",
        metavar="DATE",
        help="with --mtbf: hours (or 20d) or, with --start, a date: how likely the run is done by then",
    ),
)
_OF_SEARCHES = (_PRICE, _TOKENS, _SAMPLES, _MTBF, _CHECKPOINT_TIME, _RESTART)


def takes_cost(function: _Function) -> _Function:
    """Give a command the options that say what a run costs."""
    return _add(function, _OF_RUNS)


def takes_prices(function: _Function) -> _Function:
    """Give a command the options by which a search ranks strategies by what a run costs."""
    return _add(function, _OF_SEARCHES)


def _add(function: _Function, options: Sequence[Callable[[_Function], _Function]]) -> _Function:
    """Give a command some options, in the order in which its help shows them."""
    for option in reversed(options):
        function = option(function)
    return function


@dataclass(frozen=True)
class CostAnswer:
    """What a run costs.

    Parameters
    ----------
    text : str
        To print.
    figures : object
        For ``--json``.
    result : Goodput, optional
        For ``--report``; None without failures.
    """

    text: str
    figures: Any
    result: pk.Goodput | None = None


def _take(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that were given; one that takes several values has none otherwise."""
    given = keep_given(**{name: values.get(name) for name in names})
    return {name: value for name, value in given.items() if value != ()}


def _read_jitter(words: Sequence[str]) -> Any:
    """A share, or what traces of several ranks or a training log tell."""
    if len(words) == 1:
        try:
            return float(words[0])
        except ValueError:
            pass
    if all(word.endswith((".json", ".json.gz")) for word in words):
        return pk.read_trace(list(words)).jitter()
    if len(words) > 1 or words[0].endswith("%"):
        raise ValueError(
            f"jitter is {show(list(words))}; name one share, such as 0.02, one training log, or traces of "
            "several ranks, which end with .json or .json.gz"
        )
    return pk.read_training_log(words[0]).jitter()


def _read_mtbf(text: str) -> float | str:
    """Seconds, or the name of a published run."""
    try:
        return OF_SECONDS.convert(text, None, None)
    except click.UsageError as error:
        if text[:1].isdigit():
            raise ValueError(f"mtbf: {error.message}") from None
        return text


def find_cost(prediction: pk.Prediction, values: Mapping[str, Any]) -> CostAnswer | None:
    """Find what a run costs by the options of `takes_cost`.

    Parameters
    ----------
    prediction : Prediction
        An iteration of the run.
    values : mapping
        What click read, None where an option is not given.

    Returns
    -------
    answer : CostAnswer or None
        None where no option asks for it.

    Raises
    ------
    ValueError
        For options without an amount, or of failures without ``--mtbf``, and as `Prediction.cost` does.
    """
    amounts = _take(_AMOUNTS, values)
    others = _take(_OTHERS, values)
    of_failures = _take(_OF_FAILURES, values)
    if not amounts and not others and not of_failures:
        return None
    if not amounts:
        units = " or ".join(f"--{unit}" for unit in prediction.throughput)
        raise ValueError(f"the amount of work is missing; give {units}, as in --iterations 1e5")
    price = others.pop("price", 0.0)
    if "jitter" in others:
        others["jitter"] = _read_jitter(others["jitter"])
    if "mtbf" not in others:
        refuse_given(
            "it counts with failures alone: give --mtbf, llama-3 for example", **of_failures
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            costs = prediction.cost(price, **others, **amounts)
        notes = [str(warning.message) for warning in said]
        lines = [_describe_costs(prediction, costs, amounts, price)]
        lines += write_warnings(notes)
        return CostAnswer("\n".join(lines), costs)
    others["mtbf"] = _read_mtbf(others["mtbf"])
    if "checkpoint_time" not in of_failures and "write_rate" not in of_failures:
        raise ValueError(
            "checkpoint_time is missing; with --mtbf give --checkpoint-time, the seconds for which writing one "
            "checkpoint stops the run, or --write-rate"
        )
    deadline = of_failures.pop("deadline", None)
    start = of_failures.get("start")
    if "checkpoint_time" in of_failures and "write_rate" in of_failures:
        refuse_given("--checkpoint-time says it", write_rate=of_failures["write_rate"])
    renamed = {"checkpoint_time": "checkpoint", "checkpoint_interval": "interval"}
    settings = {renamed.get(name, name): value for name, value in of_failures.items()}
    run = prediction.cost(price, **others, **settings, **amounts)
    lines = [_say(line) for line in run.list_lines()]
    figures = {
        "hours": run.hours,
        "gpu_hours": run.gpu_hours,
        "cost": run.cost,
        "goodput": run.goodput,
        "failures": run.failure_count,
        "checkpoint_each_s": run.interval,
        "parts": run.account().to_dicts(),
        "chances": run.table().to_dicts(),
    }
    if deadline is not None:
        line, chance = _describe_deadline(run, deadline, start)
        lines.insert(1, line)
        figures["deadline"] = {"deadline": deadline, "chance": chance}
    return CostAnswer("\n".join(lines), figures, run)


def _say(line: str) -> str:
    """Write arguments of Python in a line of text as options."""
    return re.sub(r"\b(mtbf|restart)=", r"--\1", line)


def _describe_costs(
    prediction: pk.Prediction,
    costs: Mapping[str, float],
    amounts: Mapping[str, float],
    price: float,
) -> str:
    """A run without failures in one line."""
    [(unit, count)] = amounts.items()
    hours = costs["hours"]
    ranks = format_count(prediction.ranks, "rank")
    parts = [f"{write_hours(hours)} on {ranks}", f"{costs['gpu_hours']:,.0f} GPU hours"]
    if price:
        parts.append(f"{costs['cost']:,.0f} at {price:g} an hour")
    if "energy_kwh" in costs:
        parts.append(f"{costs['energy_kwh']:,.0f} kWh")
    return (
        f"{count:g} {unit}: {', '.join(parts)}; failures and checkpoints are not counted (--mtbf)"
    )


def _describe_deadline(run: pk.Goodput, deadline: str, start: str | None) -> tuple[str, float]:
    """How likely a run is done by a time or a date, in a line and as a number."""
    hours = _read_hours(deadline)
    if hours is not None:
        chance = run.chance(hours)
        words = f"in {write_hours(hours)}"
    else:
        end = read_date("deadline", deadline)
        if start is None:
            raise ValueError(
                f"deadline is {show(deadline)}, a date; give --start, too, or the hours that the run may take"
            )
        chance = run.chance_by(end)
        words = f"by {write_date(end)}"
    share = f"{chance:.1%}"
    if chance > _NEARLY_SURE:
        share = "more than 99.9%"
    return f"  done {words} with a chance of {share}", chance


def _read_hours(deadline: str) -> float | None:
    """Hours that a run may take; None where a deadline is no number with or without a unit of time."""
    try:
        return float(deadline)
    except ValueError:
        pass
    seconds = read_quantity(deadline, SECONDS)
    return None if seconds is None else seconds / 3600.0


def find_costs(exploration: pk.Exploration, values: Mapping[str, Any]) -> CostAnswer | None:
    """Rank the strategies of a search by what a run costs, by the options of `takes_prices`.

    Parameters
    ----------
    exploration : Exploration
        Strategies that fit.
    values : mapping
        What click read, None where an option is not given.

    Returns
    -------
    answer : CostAnswer or None
        The cheapest strategy of each number of ranks; None where no option asks for it.

    Raises
    ------
    ValueError
        For prices without an amount, an amount of something else, and as `Exploration.cost` does.
    """
    given = _take(("price", "tokens", "samples", "mtbf", "checkpoint_time", "restart"), values)
    if not given:
        return None
    counted = exploration._rate.removesuffix("_per_s")
    unit = "tokens" if counted == "tokens" else "samples"
    amount = given.pop(unit, None)
    for other in ("tokens", "samples"):
        if other in given:
            raise ValueError(
                f"{other} is given; the strategies have {counted} a second; give --{unit}"
            )
    if amount is None:
        raise ValueError(f"the amount of work is missing; give --{unit} of the whole run, as 1e12")
    price = given.pop("price", 0.0)
    if "mtbf" in given:
        given["mtbf"] = _read_mtbf(given["mtbf"])
        if "checkpoint_time" not in given:
            raise ValueError(
                "checkpoint_time is missing; with --mtbf give --checkpoint-time, the seconds for which writing one "
                "checkpoint stops the run"
            )
        given["checkpoint"] = given.pop("checkpoint_time")
    else:
        refuse_given("it counts with failures alone: give --mtbf, llama-3 for example", **given)
    ranked = exploration.cost(price, tokens=amount, **given)
    cheapest = ranked.unique("ranks", keep="first", maintain_order=True)
    shown = cheapest.select("ranks", "days", "gpu_hours", "cost", *_take_columns(cheapest))
    best = ranked.row(0, named=True)
    ranks = format_count(best["ranks"], "rank")
    lines = [
        f"cheapest: {ranks}, {write_hours(24 * best['days'])} for {best['cost']:,.0f}",
        f"  the cheapest of each number of ranks, for {amount:g} {unit} at {price:g} a GPU hour:",
        format_table(write_cells(shown), numbers=True),
    ]
    cheapest_of_ranks = {row["ranks"]: row for row in cheapest.to_dicts()}
    beside = {"yours": exploration.yours, "faster but too large": exploration.too_large}
    for name, one in beside.items():
        if one is None:
            continue
        row = exploration.keep_only(one).cost(price, tokens=amount, **given).row(0, named=True)
        lines.append(_describe_beside(name, one, row, cheapest_of_ranks.get(row["ranks"], best)))
    if "mtbf" not in given:
        lines.append("  failures and checkpoints are not counted (--mtbf)")
    return CostAnswer("\n".join(lines), ranked.to_dicts())


def _describe_beside(
    name: str, one: OneStrategy, row: Mapping[str, Any], best: Mapping[str, Any]
) -> str:
    """The cost of a strategy beside the cheapest that fits on as many ranks, in a line."""
    ranks = format_count(row["ranks"], "rank")
    line = f"  {name}: {one.label}, {ranks}, {write_hours(24 * row['days'])} for {row['cost']:,.0f}"
    if best["cost"] > 0:
        line += f" ({row['cost'] / best['cost'] - 1:+.1%} beside {best['ranks']} ranks above)"
    if one.shortage is not None:
        line += f"; does not fit: {one.shortage}"
    return line


#: Columns that say how ranks share a model, and their value where they need not be shown; None for those that
#: always are.
_COLUMNS = {
    "goodput": None,
    "tables": None,
    "mlps": None,
    "tp": None,
    "pp": None,
    "cp": 1,
    "dp": None,
    "ep": 1,
    "zero": None,
    "checkpoint": "none",
}


def _take_columns(frame: Any) -> list[str]:
    """Columns beside a cost: the share that counts, and how ranks share the model."""
    shown = []
    for name, usual in _COLUMNS.items():
        if name not in frame.columns:
            continue
        if usual is None or (frame[name] != usual).any():
            shown.append(name)
    return shown
