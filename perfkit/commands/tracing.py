"""``perfkit trace``: where the time of recorded iterations went."""

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles

#: Changes that are told; `--json` and `--report` have all of them [-].
_MOST_FIXES = 3


@click.command(
    "trace",
    cls=Command,
    examples=[
        "perfkit trace rank0.json.gz",
        "perfkit trace rank0.json.gz rank1.json.gz --report trace.html",
    ],
)
@click.argument("traces", metavar="FILE...", nargs=-1, required=True)
@options.report
@options.json_file
def trace_command(traces: tuple[str, ...], report: str | None, json_file: str | None) -> int:
    """Explain where the time of recorded iterations went.

    The last lines say what would help most. FILE are traces of PyTorch's profiler, one per rank, and execution traces of the same ranks.
    """
    files = OutputFiles(json_file, report)
    files.check()
    trace = pk.read_trace(traces)
    figures = {
        "time_s": trace.time,
        "basis": trace.basis,
        "breakdown": trace.breakdown().to_dicts(),
        "idle": trace.idle().to_dicts(),
        "host": trace.host().to_dicts(),
        "steps": trace.steps().to_dicts(),
        "collectives": trace.collectives().to_dicts(),
        "stragglers": trace.stragglers().to_dicts(),
    }
    text = trace.explain()
    if trace.has_device:  # the host of a CPU waits for nothing
        fixes = trace.fixes()
        figures["fixes"] = fixes.table().to_dicts()
        text += f"\n{fixes.explain(_MOST_FIXES)}"
    files.write(Answer(text, figures, results=[trace]))
    return 0
