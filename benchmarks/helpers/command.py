"""Command lines of benchmarks, and options that several of them have."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from perfkit.commands.running import run_command

#: Options by name: the arguments of `argparse.ArgumentParser.add_argument`.
Options: TypeAlias = Mapping[str, Mapping[str, Any]]

PLATFORM: Options = {"--platform": {"metavar": "P.toml", "help": "calibration of this machine"}}
OUT: Options = {"--json": {"type": Path, "metavar": "OUT", "help": "file for the figures"}}
SAVED: Options = {
    "--saved": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE",
        "help": "print what was measured before",
    }
}
WRITE: Options = {
    "--write": {"action": "store_true", "help": "bring reference_data/published up to date"}
}


def command(options: Options) -> Callable[[Callable[[Any], int | None]], Callable[..., int]]:
    """Make a command of a function that takes the parsed options and returns an exit code, or None
    for 0.

    If its module is the program, the command runs at once, so it is the last definition of its
    file.
    """

    def make(run: Callable[[Any], int | None]) -> Callable[..., int]:
        name = Path(run.__code__.co_filename).stem
        if name == "__main__":
            name = "benchmarks"

        def main(words: Sequence[str] | None = None) -> int:
            parser = argparse.ArgumentParser(prog=name, description=run.__doc__)
            for option, settings in options.items():
                parser.add_argument(option, **settings)
            arguments = parser.parse_args(words)
            return run_command(lambda: run(arguments) or 0, name=name)

        if run.__module__ == "__main__":
            sys.exit(main())
        return main

    return make
