"""``perfkit stacks``: the software that runs training steps, with its facts."""

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import list_rows


@click.command("stacks", cls=Command, examples=["perfkit stacks", "perfkit stacks --json -"])
@options.json_file
def stacks_command(json_file: str | None) -> int:
    """List the software that runs training steps, with its facts."""
    rows = []
    for name in pk.stacks()["name"]:
        stack = pk.find_stack(name)
        rows.append({"stack": name, "facts": stack.description, "source": stack.source})
    if json_file is None:
        rows = [{"stack": row["stack"], "facts": row["facts"]} for row in rows]
    return list_rows(rows, json_file)
