"""Options that several commands share, and the types of their values."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from perfkit.ground.quantities import BYTES, SECONDS, read_quantity
from perfkit.ground.units import show

if TYPE_CHECKING:
    from perfkit.platform.platform import Platform


class WholeNumber(click.ParamType):
    """A whole number, such as 64 or 1e3."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number."""
        with suppress(ValueError):
            return int(value)
        with suppress(ValueError, OverflowError):
            if float(value).is_integer():
                return int(float(value))
        self.fail(f"{show(value)} is no whole number; write it in digits, such as 64", param, ctx)


class Number(click.ParamType):
    """A number, which may have a unit after it.

    Parameters
    ----------
    units : mapping of str to float, optional
        Units that it may have, and what they are; a number without one is in the unit of 1.
    example : str
        How it may be written.
    """

    name = "number"

    def __init__(
        self, units: Mapping[str, float] = MappingProxyType({}), example: str = "0.5"
    ) -> None:
        self.units = units
        self.example = example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read the number."""
        number = read_quantity(str(value), self.units)
        if number is not None:
            return number
        if not self.units:
            self.fail(f"{show(value)} is no plain number, such as 0.5 or 1e12", param, ctx)
        allowed = f"with one of the units {', '.join(self.units)}, or without"
        self.fail(
            f"{show(value)} is no number {allowed}; write it such as {self.example}", param, ctx
        )


WHOLE = WholeNumber()
NUMBER = Number()
OF_BYTES = Number(BYTES, "80GB")
OF_SECONDS = Number(SECONDS, "10ms")

model = click.option("--model", help="preset, see perfkit models")
platform = click.option(
    "--platform",
    required=True,
    help="platform file, or name in the gallery, see perfkit platforms",
)
nodes = click.option(
    "--nodes",
    type=WHOLE,
    help="nodes like that of --platform, also of a file of your own; default: those that it has",
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


def find_platform(name: str, nodes: int | None) -> "Platform":
    """The platform of `--platform`, with the nodes of `--nodes` where these are given."""
    from perfkit.platform.gallery import load_nodes, load_platform  # imports NumPy

    if nodes is None:
        return load_platform(name)
    return load_nodes(name, nodes)


def describe_ranks(ranks: int, platform: "Platform") -> str:
    """Say that all ranks of a platform take part, where nobody has said how many.

    Examples
    --------
    >>> describe_ranks(8, find_platform("h100-sxm-8", None))
    'ranks: 8, all of h100-sxm-8; --ranks takes another number'
    """
    return f"ranks: {ranks}, all of {platform.name}; --ranks takes another number"


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
