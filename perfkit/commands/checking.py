"""``perfkit check``: predicted and measured times of random configurations."""

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.options import WHOLE, keep_given
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.commands.this_machine import check_measurable


@click.command(
    "check",
    cls=Command,
    examples=[
        "perfkit check --platform mine.toml",
        "perfkit check --platform mine.toml --models all --seed 5 --report check.html",
    ],
    measures=True,
)
@options.platform
@click.option("--seed", type=WHOLE, help="seed of random numbers; default 0")
@options.models
@options.report
@options.json_file
def check_command(
    platform: str, seed: int | None, models: str | None, report: str | None, json_file: str | None
) -> int:
    """Predict random configurations, measure them, and compare."""
    files = OutputFiles(json_file, report)
    files.check()
    try:
        comparison = pk.check(platform, **keep_given(seed=seed, models=models))
    except ValueError:
        check_measurable(platform)  # says what is wrong on a machine without the GPUs
        raise
    results: list[object] = [comparison]
    if report is not None:
        results.append(pk.load_platform(platform))
    files.write(Answer(comparison.as_text(), comparison.to_dict(), results))
    return 0
