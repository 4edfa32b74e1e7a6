"""The demonstration: calibrate, predict, measure, compare and report."""

from pathlib import Path

from perfkit.calibration.campaign import calibrate, check
from perfkit.calibration.checks import Comparison
from perfkit.measure.machine import count_cores
from perfkit.measure.samples import draw_check
from perfkit.prediction.result import predict
from perfkit.reports.page import report
from perfkit.workloads.transformer import Transformer


def demonstrate(*, quick: bool, page: Path, out: Path) -> Comparison:
    """Calibrate, predict, measure and report, telling each step.

    Parameters
    ----------
    quick : bool
        Calibrate in half the time.
    page : Path
        HTML file to write.
    out : Path
        Platform file to write.

    Returns
    -------
    comparison : Comparison
        Predicted and measured times.
    """
    print("First, without measuring anything: what would this cost on a GPU of the gallery?")
    print(f"  {predict(Transformer.bert('bert-large', batch=8, sequence=512, dtype='bf16'), 'h100-sxm-8')!r}")
    print("\nNow this machine: kernels, collectives and a few small training iterations.")
    platform = calibrate(out=out, quick=quick)
    samples = draw_check(7, dlrm=6, transformer=4, hybrid=3 if min(platform.network.ranks, count_cores()) >= 2 else 0)
    print(f"\nPredicting {len(samples)} configurations that the calibration never saw, then measuring them.")
    comparison = check(platform, samples=samples)
    print("\n" + comparison.as_text())
    first = {sample.family: sample for sample in reversed(samples)}.values()
    shown = [predict(s.workload, platform, ranks=s.ranks, plan=s.plan) for s in first]
    report(comparison, *shown, platform, path=page, title="Predicted and measured training iterations")
    print(f"\nReport:    {page} (one file, opens without a network)\nPlatform:  {out}")
    print("Notebooks: make lab, and start with notebooks/00_start_here.ipynb")
    return comparison
