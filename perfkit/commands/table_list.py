"""``perfkit tables``: published sets of embedding tables."""

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import list_rows
from perfkit.ground.units import format_bytes


@click.command("tables", cls=Command, examples=["perfkit tables", "perfkit tables --json -"])
@options.json_file
def tables_command(json_file: str | None) -> int:
    """List the published sets of embedding tables."""
    from perfkit.readers.table_configs import list_published

    rows = [{"tables": name, "holds": _describe_tables(name)} for name in list_published()]
    return list_rows(rows, json_file)


def _describe_tables(name: str) -> str:
    """What a published set holds."""
    try:
        tables = pk.read_tables(name)
    except ValueError:  # some publish only the reuse of rows
        return "reuse of rows; needs --dim"
    weights = format_bytes(sum(table.nbytes for table in tables))
    return f"{len(tables.tables)} tables, {weights} of weights"
