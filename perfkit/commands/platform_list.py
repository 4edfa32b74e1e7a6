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
    """List the platforms of the gallery, and the devices that are known by their datasheets.

    The networks of providers, which join nodes by name, are listed below.
    """
    from perfkit.platform.datasheets import list_datasheets

    datasheets = ", ".join(list_datasheets())
    networks = ", ".join(pk.fabrics()["names"])
    below = [
        f"also by datasheet, with a number of ranks, as rtx-4090-1: {datasheets}",
        f"nodes joined by the network of a provider, as h100-sxm-8x64@p5: {networks}",
    ]
    # names stay whole at their hyphens
    wrapped = [textwrap.fill(text, width=100, break_on_hyphens=False) for text in below]
    return list_rows(pk.platforms().to_dicts(), json_file, "\n\n".join(wrapped))
