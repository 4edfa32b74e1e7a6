"""``perfkit platforms``: the gallery, and the devices that are known by their datasheets."""

import textwrap

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import list_rows


@click.command(
    "platforms", cls=Command, examples=["perfkit platforms", "perfkit platforms --json -"]
)
@options.json_file
def platforms_command(json_file: str | None) -> int:
    """List the platforms of the gallery, and the devices that are known by their datasheets."""
    from perfkit.platform.datasheets import list_datasheets

    names = ", ".join(list_datasheets())
    below = f"also by datasheet, with a number of ranks, as rtx-4090-1: {names}"
    # names stay whole at their hyphens
    wrapped = textwrap.fill(below, width=100, break_on_hyphens=False)
    return list_rows(pk.platforms().to_dicts(), json_file, wrapped)
