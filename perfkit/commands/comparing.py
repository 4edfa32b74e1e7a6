"""``perfkit compare``: two platforms side by side."""

from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.model_options import (
    describe,
    may_take_model,
    refuse_model_options,
    takes_sharing,
)
from perfkit.commands.options import WHOLE, find_platform
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.units import escape


@click.command(
    "compare",
    cls=Command,
    examples=[
        "perfkit compare h100-sxm-8 h200-sxm-8",
        "perfkit compare a100-sxm-8 h100-sxm-8 --model llama-3-8b --batch 64 --dtype bf16 --mixed --tp 4 --zero 1 --checkpoint",
        "perfkit compare a100-sxm-8 h100-sxm-8 --model gpt3-6.7b --batch 64 --dtype bf16 --mixed --parallel fsdp --checkpoint",
    ],
)
@click.argument("platforms", metavar="PLATFORM PLATFORM", nargs=-1, required=True)
@may_take_model
@options.nodes
@takes_sharing
@click.option("--ranks", type=WHOLE, help="ranks that take part; default: all of each platform")
@options.report
@options.json_file
def compare_command(
    platforms: tuple[str, ...],
    nodes: int | None,
    ranks: int | None,
    report: str | None,
    json_file: str | None,
    **of_model: Any,
) -> int:
    """Compare two platforms: datasheets, kernels, collectives and, with --model, an iteration.

    Platforms are files, or names in the gallery, see perfkit platforms.
    """
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report)
    files.check()
    if len(platforms) != 2:
        raise ValueError(
            f"platforms are {escape(', '.join(platforms), 200)}; name two, such as perfkit compare a100-sxm-8 h100-sxm-8"
        )
    if of_model["model"] is None:
        refuse_model_options(of_model)
    first, second = (find_platform(platform, nodes) for platform in platforms)
    workload = None
    strategy = None
    if of_model["model"] is not None:
        most = min(first.network.ranks, second.network.ranks)
        described = describe(of_model, most if ranks is None else ranks)
        workload = described.workload
        strategy = described.strategy
    with keep_quiet():  # its warnings follow the table
        comparison = pk.compare(first, second, workload, ranks=ranks, strategy=strategy)
    figures = {
        "a": first.name,
        "b": second.name,
        "warnings": comparison.warnings,
        "quantities": comparison.table().to_dicts(),
    }
    files.write(Answer(comparison.explain(), figures, results=[comparison]))
    return 0
