"""``perfkit trace``: where the time of recorded iterations went."""

from typing import Any

import click

import perfkit as pk
from perfkit.calibration.replay_links import say_no_device
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.readers.measured_jitter import Jitter

#: Changes that are told beside those that go together [-]: a choice; `--json` and `--report` have
#: all of them.
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
    figures: dict[str, Any] = {
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
    jitter = _find_jitter(trace)
    if jitter is not None:
        text += "\n" + "\n".join(jitter.list_lines())
        figures["jitter"] = {
            "spread": jitter.spread,
            "interval": jitter.interval(),
            "persistent": jitter.persistent,
            "common": jitter.common,
            "ranks": jitter.by_rank().to_dicts(),
            "notes": jitter.notes,
        }
    if trace.has_device:
        fixes = trace.fixes()
        figures["fixes"] = fixes.table().to_dicts()
        text += f"\n{fixes.explain(_MOST_FIXES)}"
        if fixes.refusal:
            figures["fixes_refused"] = fixes.refusal
    else:
        refusal = say_no_device(trace.files)
        figures["fixes_refused"] = refusal
        text += f"\nno advice on what would help: {refusal}"
    files.write(Answer(text, figures, results=[trace]))
    return 0


def _find_jitter(trace: pk.Trace) -> Jitter | None:
    """How much the time of a rank varies; None where one step of one rank does not tell."""
    try:
        return trace.jitter()
    except ValueError:
        return None
