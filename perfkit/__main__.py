"""The command line, ``perfkit`` and ``python -m perfkit``; its commands are in `perfkit.commands`."""

import sys
from collections.abc import Sequence

import click

from perfkit.commands.group import perfkit_group
from perfkit.ground.interrupts import INTERRUPTED


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    words : sequence of str, optional
        Command line words; by default those of the process.

    Returns
    -------
    code : int
        0 for success, 1 if `doctor` found a problem, 2 for an error (reported in one line), 130 for
        an interrupt [-].
    """
    if words is None:
        words = sys.argv[1:]
    try:
        code: int = perfkit_group.main(list(words), prog_name="perfkit", standalone_mode=False)
    except click.UsageError as error:
        return _report_usage(error)
    except click.Abort as abort:  # an interrupt outside of a command, such as in an import
        if isinstance(abort.__cause__, KeyboardInterrupt):
            return INTERRUPTED
        raise
    return code


def _report_usage(error: click.UsageError) -> int:
    """Report words that make no command, as an error of a command is reported."""
    from perfkit.commands.messages import describe_usage_error
    from perfkit.commands.running import run_command

    message = describe_usage_error(error)

    def refuse() -> int:
        raise ValueError(message)

    return run_command(refuse)


if __name__ == "__main__":
    sys.exit(main())
