"""``perfkit scaling``: an iteration on more and more ranks."""

from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.model_options import describe, takes_model, takes_sharing
from perfkit.commands.options import WHOLE, find_platform, refuse_given
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.notes import write_warnings
from perfkit.ground.results import write_cells
from perfkit.ground.units import format_table


@click.command(
    "scaling",
    cls=Command,
    examples=[
        "perfkit scaling --model llama-3-8b --platform h100-sxm-8 --nodes 64 --ranks 8 64 512 --batch 8 --dtype bf16 --mixed --parallel fsdp --checkpoint",
        "perfkit scaling --model llama-2-70b --platform h100-sxm-8 --nodes 64 --batch 16 --dtype bf16 --mixed --tp 8 --pp 2 --zero 1 --checkpoint",
        "perfkit scaling --model bert-large --platform h100-sxm-8 --batch 64 --dtype bf16 --strong",
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
    help="numbers of ranks; default: 1, 2, 4 and so on up to all of the platform",
)
@click.option(
    "--strong",
    is_flag=True,
    help="the same --batch on all ranks (strong scaling); default: --batch is that of the first number of ranks, "
    "and grows with them (weak scaling)",
)
@options.execution
@options.stack
@options.report
@options.json_file
def scaling_command(
    platform: str,
    nodes: int | None,
    ranks: tuple[int, ...],
    strong: bool,
    execution: str | None,
    stack: str | None,
    report: str | None,
    json_file: str | None,
    **of_model: Any,
) -> int:
    """Predict an iteration on more and more ranks.

    More ranks are more replicas of the model, with --tp, --pp and --cp as they are.

    Efficiency is that of a rank, beside the first line; "of the line before" beside the line before. "Grew" is what
    takes a larger share of the time than there.
    """
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report)
    files.check()
    refuse_given("more ranks are more replicas; --ranks says how many", dp=of_model["dp"])
    machine = find_platform(platform, nodes)
    described = describe(of_model, None)
    with keep_quiet():  # its warnings follow the table
        scaling = pk.scaling(
            described.workload,
            machine,
            list(ranks) or None,
            strong=strong,
            execution=execution,
            stack=stack,
            strategy=described.strategy,
        )
    lines = [scaling.headline(), format_table(write_cells(scaling.table()), numbers=True)]
    lines += write_warnings(scaling.warnings)
    figures = {
        "workload": described.workload.description,
        "platform": scaling.platforms[0].name,
        "warnings": scaling.warnings,
        "rows": scaling.table().to_dicts(),
    }
    files.write(Answer("\n".join(lines), figures, results=[scaling]))
    return 0
