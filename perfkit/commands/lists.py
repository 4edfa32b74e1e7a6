"""``perfkit platforms``, ``perfkit models`` and ``perfkit tables``: what there is by name."""

from collections.abc import Mapping, Sequence

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.commands.presets import build_workload
from perfkit.ground.units import format_bytes, format_table
from perfkit.workloads import dlrm, transformer


@click.command(
    "platforms", cls=Command, examples=["perfkit platforms", "perfkit platforms --json -"]
)
@options.json_file
def platforms_command(json_file: str | None) -> int:
    """List the platforms of the gallery."""
    return _write_rows(pk.platforms().to_dicts(), json_file)


@click.command("models", cls=Command, examples=["perfkit models", "perfkit models --json -"])
@options.json_file
def models_command(json_file: str | None) -> int:
    """List the presets of models."""
    rows = []
    for name in (*dlrm.PRESETS, *transformer.PRESETS):
        workload = build_workload(name)
        rows.append(
            {"model": workload.name, "family": workload.family, "default": workload.description}
        )
    return _write_rows(rows, json_file)


@click.command("tables", cls=Command, examples=["perfkit tables", "perfkit tables --json -"])
@options.json_file
def tables_command(json_file: str | None) -> int:
    """List the published sets of embedding tables."""
    from perfkit.readers.table_configs import list_published

    rows = [{"tables": name, "holds": _describe_tables(name)} for name in list_published()]
    return _write_rows(rows, json_file)


def _describe_tables(name: str) -> str:
    """What a published set holds."""
    try:
        tables = pk.read_tables(name)
    except ValueError:  # some publish only the reuse of rows
        return "reuse of rows; needs --dim"
    weights = format_bytes(sum(table.nbytes for table in tables))
    return f"{len(tables.tables)} tables, {weights} of weights"


def _write_rows(rows: Sequence[Mapping[str, object]], json_file: str | None) -> int:
    """Print rows as a table, or write them as JSON."""
    files = OutputFiles(json_file)
    files.check()
    heads = list(rows[0])
    cells = [[str(value) for value in row.values()] for row in rows]
    files.write(Answer(format_table([heads, *cells]), list(rows)))
    return 0
