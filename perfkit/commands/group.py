"""``perfkit``: the list of commands, each imported when it is asked for."""

from importlib import import_module
from typing import NamedTuple

import click

from perfkit.ground.version import __version__


class Entry(NamedTuple):
    """Where a command is defined, and what the list of commands says about it."""

    module: str
    function: str
    summary: str  # the first sentence of its help


#: The commands in the order of the help. The summaries stand here, as importing all commands for
#: ``perfkit --help`` would take longer than printing it.
COMMANDS = {
    "doctor": Entry(
        "perfkit.commands.doctor",
        "doctor_command",
        "Is this machine fit for a calibration?",
    ),
    "calibrate": Entry(
        "perfkit.commands.calibrating",
        "calibrate_command",
        "Measure this machine, or fit existing measurements, and write a platform file.",
    ),
    "predict": Entry(
        "perfkit.commands.predicting",
        "predict_command",
        "Predict one training iteration.",
    ),
    "capture": Entry(
        "perfkit.commands.capturing",
        "capture_command",
        "Predict one iteration of a training script, unchanged, without computing it.",
    ),
    "explore": Entry(
        "perfkit.commands.exploring",
        "explore_command",
        "Find the fastest way in which ranks share a model.",
    ),
    "scaling": Entry(
        "perfkit.commands.scaling_ranks",
        "scaling_command",
        "Predict an iteration on more and more ranks.",
    ),
    "compare": Entry(
        "perfkit.commands.comparing",
        "compare_command",
        "Compare two platforms: datasheets, kernels, collectives and, with --model, an iteration.",
    ),
    "tune": Entry(
        "perfkit.commands.tuning",
        "tune_command",
        "Fit the speeds of a platform to at least five runs that were measured on it.",
    ),
    "report": Entry(
        "perfkit.commands.reporting",
        "report_command",
        "Write a page about one iteration: its time, a measurement of it, its cost, and strategies.",
    ),
    "shard": Entry(
        "perfkit.commands.sharding",
        "shard_command",
        "Search for a placement of embedding tables, or measure placements on this machine.",
    ),
    "check": Entry(
        "perfkit.commands.checking",
        "check_command",
        "Predict random configurations, measure them, and compare.",
    ),
    "log": Entry(
        "perfkit.commands.logs",
        "log_command",
        "Say whether the bandwidth in logs of nccl-tests is normal, and if not, why.",
    ),
    "trace": Entry(
        "perfkit.commands.tracing",
        "trace_command",
        "Explain where the time of recorded iterations went.",
    ),
    "demo": Entry(
        "perfkit.commands.demo",
        "demo_command",
        "Predict a step on a GPU, calibrate this machine, predict and measure, and write a report.",
    ),
    "platforms": Entry(
        "perfkit.commands.platform_list",
        "platforms_command",
        "List the platforms of the gallery, and the devices that are known by their datasheets.",
    ),
    "models": Entry(
        "perfkit.commands.model_list",
        "models_command",
        "List the presets of models.",
    ),
    "stacks": Entry(
        "perfkit.commands.stack_list",
        "stacks_command",
        "List the software that runs training steps, with its facts.",
    ),
    "tables": Entry(
        "perfkit.commands.table_list",
        "tables_command",
        "List the published sets of embedding tables.",
    ),
}


class CommandGroup(click.Group):
    """Finds a command by its name and imports its module then."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        entry = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(entry.module), entry.function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words before the command, and refuse a line without a command."""
        if not args and not ctx.resilient_parsing:  # which shells use to complete a line
            raise click.UsageError(f"required: command, one of {', '.join(COMMANDS)}", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and refuse a name that none has."""
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:  # which shells use to complete
            from perfkit.ground.units import check_choice  # imports NumPy

            try:
                check_choice("command", name, COMMANDS)
            except ValueError as error:
                raise click.UsageError(str(error), ctx) from None
        return super().resolve_command(ctx, args)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="perfkit %(version)s")
def perfkit_group() -> None:
    """How long will one training iteration take, and what limits it?"""
