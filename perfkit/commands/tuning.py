"""``perfkit tune``: the speeds of a platform, fitted to runs that were measured on it."""

from pathlib import Path
from typing import Any

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.model_options import build_model, takes_model
from perfkit.commands.options import find_platform
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.files import reading
from perfkit.ground.results import write_cells
from perfkit.ground.units import format_table, show
from perfkit.workloads.transformer import Transformer

#: Largest file with a row for each run that is read [B].
_LARGEST_TABLE = 1e8


@click.command(
    "tune",
    cls=Command,
    examples=[
        "perfkit tune runs.csv --model gpt3-6.7b --platform a100-sxm-8 --batch 64 --dtype bf16 --mixed --out tuned.toml",
        "perfkit tune logs/ --model llama-3-8b --platform h100-sxm-8x8 --dtype bf16 --mixed --out tuned.toml",
    ],
)
@click.argument("runs", metavar="FILE...", nargs=-1, required=True)
@takes_model
@options.platform
@options.nodes
@click.option("--out", metavar="FILE", help="platform file to write, NAME.toml")
@options.report
@options.json_file
def tune_command(
    runs: tuple[str, ...],
    platform: str,
    nodes: int | None,
    out: str | None,
    report: str | None,
    json_file: str | None,
    **of_model: Any,
) -> int:
    """Fit the speeds of a platform to at least five runs that were measured on it.

    FILE is a CSV file with a row for each run: seconds, and what differs between runs, such as tp,
    pp, dp, micro_batch, batch; or training logs, or a folder of them. For one run there is perfkit predict --measured.
    """
    files = OutputFiles(json_file, report, out)
    files.check()
    model = build_model(of_model)
    if not isinstance(model, Transformer):
        raise ValueError(
            f"model is {show(of_model['model'])}, a DLRM; runs of Transformers alone are fitted; take perfkit "
            "calibrate for this one"
        )
    tuning = pk.tune(model, find_platform(platform, nodes), _read_runs(runs))
    lines = [
        tuning.headline(),
        format_table(write_cells(tuning.scales), numbers=True),
        "",
        format_table(write_cells(tuning.table()), numbers=True),
    ]
    if out is not None:
        lines.append(f"written to {tuning.platform.save(out)}")
    figures = {
        "platform": tuning.platform.name,
        "error": tuning.error,
        "spread": tuning.spread,
        "scales": tuning.scales.to_dicts(),
        "runs": tuning.table().to_dicts(),
    }
    files.write(Answer("\n".join(lines), figures, results=[tuning]))
    return 0


def _read_runs(names: tuple[str, ...]) -> Any:
    """Rows of one file, or training logs."""
    if len(names) > 1:
        return pk.read_training_logs(names)
    [name] = names
    if Path(name).suffix != ".csv":
        return pk.read_training_logs(name)
    import polars  # takes long to load

    advice = "its first line must name columns such as seconds, tp, pp, dp, micro_batch"
    with reading(name, advice, most=_LARGEST_TABLE):
        return polars.read_csv(name)
