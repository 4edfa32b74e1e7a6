"""Options that several commands share, and the types of their values."""

from typing import Any

import click

from perfkit.ground.units import show


class WholeNumber(click.ParamType):
    """A whole number, written in digits."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number."""
        try:
            return int(value)
        except ValueError:
            self.fail(
                f"{show(value)} is no whole number; write it in digits, such as 64", param, ctx
            )


class Number(click.ParamType):
    """A number, written without a unit."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read the number."""
        try:
            return float(value)
        except ValueError:
            self.fail(
                f"{show(value)} is no number; write it without a unit, such as 80e9", param, ctx
            )


WHOLE = WholeNumber()
NUMBER = Number()

model = click.option("--model", help="preset, see perfkit models")
platform = click.option(
    "--platform",
    required=True,
    help="platform file, or name in the gallery, see perfkit platforms",
)
json_file = click.option(
    "--json",
    "json_file",
    metavar="OUT",
    help="file for all figures; - prints them instead of the text",
)
execution = click.option(
    "--execution",
    type=click.Choice(("eager", "compiled", "graphs")),
    help="how the iteration runs; default eager",
)
stack = click.option(
    "--stack", help="software that runs it, see perfkit stacks; default: the usual one"
)
report = click.option("--report", metavar="HTML", help="report to write")
models = click.option(
    "--models",
    type=click.Choice(("standard", "all")),
    help="families: standard (DLRM, Transformer; the default) or all",
)


def keep_given(**options: Any) -> dict[str, Any]:
    """Those of some options that were given; the library has the defaults of the others.

    Examples
    --------
    >>> keep_given(batch=64, sequence=None, mixed=False)
    {'batch': 64}
    """
    return {
        name: value for name, value in options.items() if value is not None and value is not False
    }


def refuse_given(why: str, **options: Any) -> None:
    """Refuse options that have no meaning with the others.

    Examples
    --------
    >>> refuse_given("a DLRM has none", sequence=8, parallel=None)
    Traceback (most recent call last):
    ...
    ValueError: sequence is given; a DLRM has none; leave it out
    """
    for name in keep_given(**options):
        raise ValueError(f"{name} is given; {why}; leave it out")
