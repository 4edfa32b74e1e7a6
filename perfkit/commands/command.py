"""What all commands have in common: how their words are read, run and explained."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from perfkit.commands.messages import (
    describe_unknown_words,
    list_options,
    say_for_commands,
)
from perfkit.commands.running import run_command


class Command(click.Command):
    """A command of perfkit.

    Its function returns the exit code. Errors of the library are reported in one line, and the help
    ends with examples.

    Parameters
    ----------
    *settings : Any
        Settings of `click.Command`.
    examples : sequence of str
        Whole lines that a user may type.
    measures : bool, optional
        Whether it always measures this machine, so that a failure leaves a log file. A command with
        an option ``--measure`` measures if that is given.
    **more : Any
        Settings of `click.Command`.
    """

    def __init__(
        self, *settings: Any, examples: Sequence[str], measures: bool = False, **more: Any
    ) -> None:
        more["context_settings"] = {
            "help_option_names": ["-h", "--help"],
            "allow_extra_args": True,  # which `parse_args` refuses in its own words
        }
        super().__init__(*settings, **more)
        self.examples = examples
        self.measures = measures

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """End the help with the examples."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"  {example}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line."""
        if not ctx.resilient_parsing:
            self._check_values(ctx, args)
        try:
            extra = super().parse_args(ctx, self._repeat_names(args))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves it out where a value is missing
            raise
        if extra and not ctx.resilient_parsing:
            raise click.UsageError(describe_unknown_words(" ".join(extra), ctx), ctx)
        return extra

    def invoke(self, ctx: click.Context) -> int:
        """Run the command and return its exit code."""
        measures = self.measures or ctx.params.get("measure", False)
        return run_command(lambda: self._call(ctx), log=find_log_folder(ctx) if measures else None)

    def _call(self, context: click.Context) -> int:
        """Call the function of the command with its options."""
        try:
            code: int = super().invoke(context)
        except ValueError as error:
            raise ValueError(say_for_commands(str(error))) from error
        return code

    def _check_values(self, context: click.Context, words: Sequence[str]) -> None:
        """Refuse ``--model --platform P``, where click takes ``--platform`` for the model."""
        options = list_options(self)
        names = [option.opts[0] for option in options]
        with_values = [option.opts[0] for option in options if needs_value(option)]
        for word, following in pairwise(words):
            if word in with_values and following in names:
                raise click.UsageError(
                    f"argument {word}: its value is missing, as {following} is an option", context
                )

    def _repeat_names(self, words: Sequence[str]) -> list[str]:
        """Write ``--traces A B`` as ``--traces A --traces B``.

        Options of click take a fixed number of values; with several files, the shell's ``*`` gives
        any number.
        """
        several = [option.opts[0] for option in list_options(self) if option.multiple]
        repeated: list[str] = []
        current: str | None = None  # the option whose values are being read
        values = 0
        for word in words:
            if word in several:
                current = word
                values = 0
            elif word.startswith("-"):
                current = None
            elif current is not None:
                values += 1
                if values > 1:
                    repeated.append(current)
            repeated.append(word)
        return repeated


def needs_value(option: click.Option) -> bool:
    """Whether a word has to follow an option."""
    has_own_value = isinstance(option.flag_value, str)
    return not option.is_flag and not has_own_value


def find_log_folder(context: click.Context) -> Path:
    """Folder of the first file that a command writes, for its log; the working folder if there is
    none."""
    for option in ("report", "out", "json_file"):
        path = context.params.get(option)
        if path and (os.path.isfile(path) or not os.path.exists(path)):
            return Path(path).parent
    return Path()
