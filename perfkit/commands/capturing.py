"""``perfkit capture``: the time of one iteration of a training script, as its author runs it."""

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.options import WHOLE, find_platform
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.units import format_time

#: What is said of a script that reads computed numbers.
PLACEHOLDERS = "Numbers that {} prints or writes of what it trains, such as losses, are placeholders: nothing is computed"

#: The same of a script that reads clocks or the memory of a GPU.
READINGS = (
    "What {} reads of its GPU ({}) is a placeholder: there is none. Time and memory stand above"
)


class ScriptCommand(Command):
    """A command whose words after ``--`` belong to the script that it runs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words before ``--``, and keep those behind it."""
        words, behind = list(args), list[str]()
        if "--" in words:
            place = words.index("--")
            words, behind = words[:place], words[place + 1 :]
        ctx.meta["arguments"] = behind
        return super().parse_args(ctx, words)


@click.command(
    "capture",
    cls=ScriptCommand,
    examples=[
        "perfkit capture train.py --platform h100-sxm-8 -- --batch-size 32 --epochs 1",
        "perfkit capture train.py --platform h100-sxm-8x2 --ranks 16 -- --config base.yaml",
        "perfkit capture -m project.train --platform a100-sxm-8 --ranks 8 -- --lr 0.1",
    ],
)
@click.argument("script", metavar="[SCRIPT]", required=False)
@click.option(
    "-m", "--module", metavar="MODULE", help="a module in place of a script, as of python -m"
)
@options.platform
@options.nodes
@click.option(
    "--ranks",
    type=WHOLE,
    default=1,
    help="ranks that the script is told of (WORLD_SIZE); default 1, as python SCRIPT has it",
)
@click.option("--rank", type=WHOLE, default=0, help="the rank that runs here; default 0")
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    help="what the script finds; default: that of the platform",
)
@click.option(
    "--iterations", type=WHOLE, default=4, help="iterations that are compared, at most; default 4"
)
@options.execution
@options.stack
@options.report
@options.json_file
@click.pass_context
def capture_command(
    context: click.Context,
    script: str | None,
    module: str | None,
    platform: str,
    nodes: int | None,
    ranks: int,
    rank: int,
    device: str | None,
    iterations: int,
    execution: str | None,
    stack: str | None,
    report: str | None,
    json_file: str | None,
) -> int:
    """Predict one iteration of a training script, unchanged, without computing it.

    The script runs in this process up to a few updates of its first optimizer, on tensors without
    contents; no GPU is needed, and nothing is trained. What it prints is shown, and files that it
    writes are written, except files of weights. An iteration is what lies between the ends of two
    updates. Words after -- are those of the script.
    """
    from perfkit.platform.estimates import keep_quiet
    from perfkit.platform.nodes import advise_nodes

    files = OutputFiles(json_file, report)
    files.check()
    machine = find_platform(platform, nodes)
    kind = device or machine.device.kind
    if ranks > machine.network.ranks:
        most = f"platform {machine.name!r} has {machine.network.ranks}"
        raise ValueError(f"ranks is {ranks}; {most}; {advise_nodes(machine, ranks)}")
    recording = _record(
        script,
        module,
        context.meta["arguments"],
        machine,
        kind,
        ranks,
        rank,
        iterations,
        is_quiet=json_file == "-",
    )
    with keep_quiet():  # the explanation has the warnings
        predictions = []
        for iteration in recording.iterations:
            predictions.append(
                pk.predict(iteration.graph, machine, execution=execution, stack=stack)
            )
    counts = [iteration.count for iteration in recording.iterations]
    chosen = next(
        prediction
        for prediction, iteration in zip(predictions, recording.iterations, strict=True)
        if iteration.graph is recording.graph
    )
    times = [prediction.time for prediction in predictions]
    mean = sum(time * count for time, count in zip(times, counts, strict=True)) / sum(counts)
    lines = [recording.describe()]
    if len(times) > 1:
        lines.append(
            f"mean of the {sum(counts)} iterations {format_time(mean)}, from {format_time(min(times))} to "
            f"{format_time(max(times))}; what follows is the most frequent kind"
        )
    figures = {
        "script": recording.name,
        "platform": machine.name,
        "ranks": ranks,
        "iterations": [
            {"count": count, "time_s": time} for count, time in zip(counts, times, strict=True)
        ],
        "mean_time_s": mean,
        "time_s": chosen.time,
        "interval_s": chosen.interval(),
        "lower_bound_s": chosen.lower_bound,
        "serial_s": chosen.serial,
        "bottleneck": chosen.bottleneck,
        "breakdown": chosen.breakdown().to_dicts(),
        "unmodelled_s": dict(chosen.unmodelled),
        "warnings": chosen.warnings,
    }
    lines += ["", chosen.explain()]
    if recording.has_placeholders:
        lines += ["", PLACEHOLDERS.format(recording.name)]
    if recording.readings:
        lines += ["", READINGS.format(recording.name, ", ".join(recording.readings))]
    text = "\n".join(lines)
    files.write(Answer(text, figures, results=[chosen]))
    return 0


def _record(
    script: str | None,
    module: str | None,
    arguments: Sequence[str],
    machine: Any,
    device: str,
    ranks: int,
    rank: int,
    iterations: int,
    *,
    is_quiet: bool,
) -> Any:
    """Run the script; if it fails by itself, print the lines that led there as Python does."""
    from perfkit.prediction.recordings import find_gpu
    from perfkit.recording import check_torch
    from perfkit.recording.scripts import Recording
    from perfkit.recording.scripts_runs import Program, ScriptError, record_program

    check_torch()
    program = Program(script, module, arguments)
    program.check()
    recording = Recording(
        device=device,
        ranks=ranks,
        rank=rank,
        iterations=iterations,
        name=program.name,
        gpu=find_gpu(machine),
        to_packages=True,
    )
    # the script's text must not be among the figures
    output = redirect_stdout(sys.stderr) if is_quiet else nullcontext()
    try:
        with output, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"perfkit(\.|$)")
            record_program(program, recording)
    except ScriptError as error:
        print(error.frames, end="", file=sys.stderr)
        raise ValueError(str(error)) from error
    return recording
