"""``perfkit platforms``: the gallery."""

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
    """List the platforms of the gallery."""
    return list_rows(pk.platforms().to_dicts(), json_file)
