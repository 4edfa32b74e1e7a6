"""``perfkit report``: a page about one iteration, and the ways to share its model."""

from collections.abc import Mapping
from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.cost_options import find_cost, takes_cost
from perfkit.commands.messages import say_for_commands
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.commands.prediction_options import Predicted, predict_described, takes_prediction
from perfkit.ground.targets import check_page
from perfkit.ground.units import escape


@click.command(
    "report",
    cls=Command,
    examples=[
        "perfkit report --model llama-3-8b --platform h100-sxm-8x8 --batch 512 --dtype bf16 --mixed --parallel fsdp --checkpoint --accumulate 8 --measured 10.5s --price 2.5 --tokens 1e12 --out report.html",
    ],
)
@takes_prediction
@takes_cost
@click.option("--out", metavar="HTML", required=True, help="page to write")
@click.option("--title", help="its first line; default: what is predicted")
@click.option("--author", help="who wrote it")
@click.option("--notes", metavar="TEXT", help="text before the results")
@options.json_file
def report_command(
    out: str,
    title: str | None,
    author: str | None,
    notes: str | None,
    json_file: str | None,
    **of_prediction_and_cost: Any,
) -> int:
    """Write a page about one iteration: its time, a measurement of it, its cost, and strategies.

    It opens without a network. Strategies are all ways in which these ranks can share the model. Other commands
    write pages of their own with --report.
    """
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file)
    files.check()
    check_page("out", out)
    with keep_quiet():  # the page has the warnings
        predicted = predict_described(of_prediction_and_cost)
        cost = find_cost(predicted.prediction, of_prediction_and_cost)
        results: list[Any] = []
        if predicted.deviation is not None:
            results.append(predicted.deviation)
        if cost is not None and cost.result is not None:
            results.append(cost.result)
        if not results:
            results.append(predicted.prediction)
        lines = [result.headline() for result in results]
        if cost is not None:
            lines.append(cost.text)
        if predicted.assumed is not None:
            lines.append(predicted.assumed)
        try:
            exploration = _explore(predicted, of_prediction_and_cost)
        except ValueError as error:
            lines.append(f"without strategies: {say_for_commands(str(error))}")
        else:
            results.append(exploration)
            lines.append(exploration.headline())
        if cost is not None and cost.result is None:
            notes = "\n\n".join(filter(None, (notes, cost.text)))
        path = pk.report(*results, path=out, title=title, author=author, notes=notes)
    figures = {"report": str(path), "contents": lines}
    lines.append(f"written to {escape(path, 1000)}")
    files.write(Answer("\n".join(lines), figures))
    return 0


def _explore(predicted: Predicted, values: Mapping[str, Any]) -> pk.Exploration:
    """All ways in which the ranks of a prediction can share its model."""
    return pk.explore(
        predicted.described.workload,
        predicted.platform,
        predicted.prediction.ranks,
        yours=predicted.described.strategy,
        execution=values["execution"],
        stack=values["stack"],
    )
