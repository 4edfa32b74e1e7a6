"""``perfkit explore``: the fastest way in which ranks share a model."""

from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.cost_options import find_costs, takes_prices
from perfkit.commands.model_options import describe, takes_model, takes_sharing
from perfkit.commands.options import OF_BYTES, WHOLE, describe_ranks, find_platform
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.exploration.strategies import OneStrategy


@click.command(
    "explore",
    cls=Command,
    examples=[
        "perfkit explore --model llama-3-8b --platform h100-sxm-8 --batch 64 --sequence 8192 --dtype bf16 --mixed",
        "perfkit explore --model llama-3-8b --platform h100-sxm-8x8 --batch 64 --sequence 8192 --dtype bf16 --mixed --parallel fsdp --checkpoint --report strategies.html",
        "perfkit explore --model gpt3-6.7b --platform a100-sxm-8 --ranks 4 8 --batch 64 --dtype bf16 --mixed --memory 40e9",
        "perfkit explore --model llama-3-8b --platform h100-sxm-8x8 --ranks 16 32 64 --batch 64 --sequence 8192 --dtype bf16 --mixed --price 2.5 --tokens 1e12",
    ],
)
@takes_model
@options.platform
@options.nodes
@takes_sharing
@click.option(
    "--ranks",
    type=WHOLE,
    multiple=True,
    help="ranks that take part, or several numbers to choose from; default: all of the platform",
)
@click.option(
    "--memory",
    type=OF_BYTES,
    metavar="BYTES",
    help="memory that a rank may use; layers may be computed again to fit; default: that of its device",
)
@options.execution
@options.stack
@takes_prices
@options.report
@options.json_file
def explore_command(
    platform: str,
    nodes: int | None,
    ranks: tuple[int, ...],
    memory: float | None,
    execution: str | None,
    stack: str | None,
    report: str | None,
    json_file: str | None,
    **of_model_and_cost: Any,
) -> int:
    """Find the fastest way in which ranks share a model.

    --parallel, or --tp, --pp, --zero and others, say how your ranks share it today: that is set beside the
    fastest, and marked in the chart.

    Hybrid shards (HSDP) are not among them: ask for these by perfkit predict --zero 3 --shards 8.
    """
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report)
    files.check()
    machine = find_platform(platform, nodes)
    counts = list(ranks) or [machine.network.ranks]
    described = describe(of_model_and_cost, max(counts))
    with keep_quiet():  # the explanation has the warnings
        exploration = pk.explore(
            described.workload,
            machine,
            ranks=counts,
            memory=memory,
            yours=described.strategy,
            execution=execution,
            stack=stack,
        )
        text = exploration.explain()
    if not ranks:
        text += f"\n  {describe_ranks(machine.network.ranks, machine)}"
    costs = find_costs(exploration, of_model_and_cost)
    figures = {
        "workload": described.workload.description,
        "platform": exploration.platform.name,
        "tried": exploration.tried,
        "left_out": exploration.left_out,
        "yours": _list_figures(exploration.yours),
        "faster_but_too_large": _list_figures(exploration.too_large),
        "warnings": exploration.warnings,
        "strategies": exploration.table().to_dicts(),
    }
    if costs is not None:
        text += f"\n\n{costs.text}"
        figures["costs"] = costs.figures
    files.write(Answer(text, figures, results=[exploration]))
    return 0


def _list_figures(one: OneStrategy | None) -> dict[str, Any] | None:
    """Figures of a strategy beside those of a search; None without one."""
    if one is None:
        return None
    return {**one.row, "shortage": one.shortage}
