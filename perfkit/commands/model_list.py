"""``perfkit models``: presets of workloads."""

import click

from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import list_rows
from perfkit.workloads import dlrm, transformer
from perfkit.workloads.presets import build_workload


@click.command("models", cls=Command, examples=["perfkit models", "perfkit models --json -"])
@options.json_file
def models_command(json_file: str | None) -> int:
    """List the presets of models."""
    rows = []
    for name in (*dlrm.PRESETS, *transformer.PRESETS):
        workload = build_workload(name)
        row = {"model": workload.name, "family": workload.family, "default": workload.description}
        rows.append(row)
    return list_rows(rows, json_file)
