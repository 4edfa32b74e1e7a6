"""``perfkit demo``: calibrate, predict, measure, compare and report, with each step printed."""

import click

import perfkit as pk
from perfkit.calibration.checks import Comparison
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.targets import check_target
from perfkit.measure.samples import Sample
from perfkit.platform.platform import Platform


@click.command(
    "demo",
    cls=Command,
    examples=["perfkit demo --quick", "perfkit demo --out mine.toml --report mine.html"],
    measures=True,
)
@click.option("--quick", is_flag=True, help="calibrate in two to three minutes")
@click.option(
    "--report",
    metavar="HTML",
    default="perfkit-report.html",
    help="report to write; default perfkit-report.html",
)
@click.option(
    "--out",
    metavar="FILE",
    default="perfkit-platform.toml",
    help="platform file to write; default perfkit-platform.toml",
)
@options.json_file
def demo_command(quick: bool, report: str, out: str, json_file: str | None) -> int:
    """Calibrate this machine, predict, measure, and write a report."""
    files = OutputFiles(json_file, report, out)
    files.check()
    check_target("out", out, ".toml")
    print(
        "First a prediction without any measurement: what would this take on a GPU of the gallery?"
    )
    bert = pk.Transformer.bert("bert-large", batch=8, sequence=512, dtype="bf16")
    print(f"  {pk.predict(bert, 'h100-sxm-8')!r}")
    print("\nNow measure this machine: kernels, collectives and a few small training iterations.")
    platform = pk.calibrate(out=out, quick=quick)
    samples = _draw_samples(platform)
    print(
        f"\nPredict {len(samples)} configurations that were not in the calibration, then measure them."
    )
    comparison = pk.check(platform, samples=samples)
    print("\n" + comparison.as_text())
    _write_report(report, comparison, samples, platform)
    print(f"\nReport:    {report} (one file, opens without a network)\nPlatform:  {out}")
    print("Notebooks: make lab, and start with notebooks/00_start_here.ipynb")
    files.write(Answer("", comparison.to_dict()))
    return 0


def _draw_samples(platform: Platform) -> list[Sample]:
    """Configurations to predict and measure; some on two ranks, if two can run at once."""
    from perfkit.measure.machine import count_cores
    from perfkit.measure.samples import draw_check

    two_ranks = min(platform.network.ranks, count_cores()) >= 2
    hybrid = 3 if two_ranks else 0
    return draw_check(7, dlrm=6, transformer=4, hybrid=hybrid)


def _write_report(
    path: str, comparison: Comparison, samples: list[Sample], platform: Platform
) -> None:
    """Write the comparison, the prediction of the first sample of each family, and the platform."""
    first_of_family: dict[str, Sample] = {}
    for sample in samples:
        first_of_family.setdefault(sample.family, sample)
    predictions = [
        pk.predict(sample.workload, platform, ranks=sample.ranks, plan=sample.plan)
        for sample in first_of_family.values()
    ]
    title = "Predicted and measured training iterations"
    pk.report(comparison, *predictions, platform, path=path, title=title)
