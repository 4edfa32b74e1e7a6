"""``perfkit scaling``: an iteration on more and more ranks."""

from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.model_options import describe_own, takes_model, takes_own_sharing
from perfkit.commands.options import WHOLE, find_platform
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.results import write_cells, write_notes
from perfkit.ground.units import format_table


@click.command(
    "scaling",
    cls=Command,
    examples=[
        "perfkit scaling --model llama-3-8b --platform h100-sxm-8 --nodes 64 --ranks 8 64 512 --batch 8 --dtype bf16 --mixed --parallel fsdp --checkpoint",
        "perfkit scaling --model bert-large --platform h100-sxm-8 --batch 64 --dtype bf16 --strong",
    ],
)
@takes_model
@options.platform
@options.nodes
@takes_own_sharing
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

    Efficiency is that of a rank, beside the first line; "of the line before" beside the line before. "Grew" is what
    takes a larger share of the time than there.
    """
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report)
    files.check()
    model = describe_own(of_model)
    with keep_quiet():  # its warnings follow the table
        scaling = pk.scaling(
            model,
            find_platform(platform, nodes),
            list(ranks) or None,
            strong=strong,
            execution=execution,
            stack=stack,
        )
    lines = [scaling.headline(), format_table(write_cells(scaling.table()), numbers=True)]
    lines += write_notes("warning", scaling.warnings)
    figures = {
        "workload": model.description,
        "platform": scaling.platforms[0].name,
        "warnings": scaling.warnings,
        "rows": scaling.table().to_dicts(),
    }
    files.write(Answer("\n".join(lines), figures, results=[scaling]))
    return 0
