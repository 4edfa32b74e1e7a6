"""``perfkit demo``: predict, look at the machine, calibrate, check and report, with each step
printed. What `make run` runs."""

import os
import shlex
import shutil
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import click

import perfkit as pk
from perfkit.calibration.campaign import expect_check
from perfkit.calibration.checks import Comparison
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.targets import check_target
from perfkit.measure.progress import Part, Progress
from perfkit.measure.samples import Sample
from perfkit.platform.platform import Platform
from perfkit.prediction.result import Prediction

#: What `perfkit doctor` checks that measurements of a CPU depend on.
_DOCTOR = ("cores", "memory", "disk", "load", "steadiness")


@click.command(
    "demo",
    cls=Command,
    examples=["perfkit demo --quick", "perfkit demo --out mine.toml --report mine.html"],
    measures=True,
)
@click.option("--quick", is_flag=True, help="measure less: three minutes, its check included")
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
    """Predict a step on a GPU, calibrate this machine, predict and measure, and write a report."""
    files = OutputFiles(json_file, report, out)
    files.check()
    check_target("out", out, ".toml")
    told = sys.stderr if json_file == "-" else sys.stdout  # figures alone for what reads them
    with redirect_stdout(told):
        comparison = _demonstrate(quick, report, out)
    files.write(Answer("", comparison.to_dict()))
    return 0


def _demonstrate(quick: bool, report: str, out: str) -> Comparison:
    """All steps, each of them printed; returns what was predicted and measured."""
    on_gpu = _predict_on_gpu()
    _say("First a prediction without any measurement, of one training iteration on a GPU:")
    _say(f"  {on_gpu!r}\n")
    _say("Is this machine quiet enough to be measured? Half a minute.")
    was_disturbed = _look_at_machine()
    samples = _draw_samples(quick)
    progress = Progress(Part("check", expect_check(samples)))
    _say("\nNow measure it, and predict small training iterations that no fit has seen:")
    platform = _calibrate(out, quick, progress)
    comparison = pk.check(platform, samples=samples, progress=progress)
    _say("\n" + comparison.as_text())
    disturbed = platform.provenance.get("disturbances")
    if disturbed and not was_disturbed:
        _say(f"disturbed meanwhile: {disturbed}; errors are smaller on a quiet machine")
    next_steps = list_next_steps(out)
    _write_report(report, comparison, samples, platform, on_gpu, next_steps)
    _say(f"\nReport:    {report} (one file, opens without a network)\nPlatform:  {out}")
    _say("\n".join(["Worth typing next:", *next_steps]))
    return comparison


def _say(text: str) -> None:
    """Print at once: the progress of measurements goes to another stream."""
    print(text, flush=True)


def _predict_on_gpu() -> Prediction:
    """A prediction that needs no measurement. The report has its notes."""
    bert = pk.Transformer.bert("bert-large", batch=8, sequence=512, dtype="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pk.predict(bert, "h100-sxm-8")


def _look_at_machine() -> bool:
    """Print what measurements depend on, and return whether anything would disturb them."""
    from perfkit.calibration.doctor import diagnose, format_findings

    findings = diagnose(*_DOCTOR)
    _say(format_findings(findings))
    return any(finding.ok is False for finding in findings)


def _calibrate(out: str, quick: bool, progress: Progress) -> Platform:
    """Calibrate this machine. That it was disturbed is said before and after, not between."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*; close other programs and calibrate again")
        return pk.calibrate(out=out, quick=quick, stop_early=True, progress=progress)


def _draw_samples(quick: bool) -> list[Sample]:
    """Configurations to predict and measure, a third of them if it shall be quick; some on two
    ranks, if two can run at once."""
    from perfkit.measure.machine import count_cores
    from perfkit.measure.samples import draw_check

    two_ranks = count_cores() >= 2
    if quick:
        return draw_check(7, dlrm=2, transformer=1, hybrid=1 if two_ranks else 0)
    return draw_check(7, dlrm=6, transformer=4, hybrid=3 if two_ranks else 0)


def list_next_steps(platform: str) -> list[str]:
    """List three commands worth typing after a demo.

    Parameters
    ----------
    platform : str
        Platform file that the demo has written.

    Returns
    -------
    lines : list of str
        A command with a remark in each, which can be pasted as they are.
    """
    program = "perfkit"
    if shutil.which(program) is None:  # as where make has installed it
        program = shlex.quote(os.path.relpath(Path(sys.executable).with_name("perfkit")))
    file = shlex.quote(platform)
    commands = {
        f"{program} predict --model gpt2 --platform {file} --batch 2 --sequence 128": "a model on this machine",
        f"{program} explore --model llama-3-8b --platform h100-sxm-8x8 --ranks 64 --batch 512 --sequence 8192 --dtype bf16": (
            "the best strategies on 64 GPUs"
        ),
    }
    if Path("Makefile").exists() and Path("notebooks").is_dir():
        commands["make lab"] = "the lessons; begin with notebooks/00_start_here.ipynb"
    else:
        commands[f"{program} --help"] = "all commands"
    return [f"  {command}   # {remark}" for command, remark in commands.items()]


def _write_report(
    path: str,
    comparison: Comparison,
    samples: list[Sample],
    platform: Platform,
    on_gpu: Prediction,
    next_steps: list[str],
) -> None:
    """Write the comparison, the prediction for the GPU, that of the first sample of each family,
    and the platform."""
    first_of_family: dict[str, Sample] = {}
    for sample in samples:
        first_of_family.setdefault(sample.family, sample)
    predictions = [
        pk.predict(sample.workload, platform, ranks=sample.ranks, plan=sample.plan)
        for sample in first_of_family.values()
    ]
    paragraphs = [
        "How well perfkit predicts small training iterations on this machine, and what one iteration "
        "of BERT-large would take on an H100.",
        "Worth typing next:",
        *(line.strip() for line in next_steps),
    ]
    pk.report(
        comparison,
        on_gpu,
        *predictions,
        platform,
        path=path,
        title="Predicted and measured training iterations",
        notes="\n\n".join(paragraphs),
    )
