"""The main job in one go: a first prediction, a calibration of this machine, predictions, measurements, a report."""

import json
import os
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.campaign import calibrate, check
from perfkit.measure.machine import count_cores
from perfkit.models import collectives as forms
from perfkit.platform import Platform
from perfkit.prediction.result import predict
from perfkit.report import write_report
from perfkit.workloads.samples import Sample, draw_check
from perfkit.workloads.transformer import Transformer

__all__ = ["demonstrate", "frame_collectives"]


def frame_collectives(
    platform: Platform, measurements: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measured collectives and their fitted curves, as `perfkit.plots.collective_curves` takes them.

    Parameters
    ----------
    platform : Platform
        With collective fits.
    measurements : mapping
        Raw measurements of the same machine.

    Returns
    -------
    points, curves : list of dict
        Operation, ranks [-], nbytes [B] and time_s [s]; points with quartiles.
    """
    ranks = int(measurements["ranks"])
    points = [
        {"operation": row["operation"], "ranks": ranks, "nbytes": row["nbytes"], "time_s": row["q1"],
         "q1_s": row["q1"], "q3_s": row["q3"]}
        for row in measurements["collectives"]
    ]  # fmt: skip
    curves = []
    for key, fit in platform.collectives.items():
        low, high = fit.ranges["nbytes"]
        for nbytes in np.geomspace(low, high, 40):
            time = float(getattr(forms, fit.form)(nbytes, **fit))
            curves.append({"operation": key.split(".")[0], "ranks": ranks, "nbytes": float(nbytes), "time_s": time})
    return points, curves


def demonstrate(*, quick: bool, report: Path, out: Path, say: Callable[[str], None] = print) -> None:
    """Calibrate, predict, measure and report, telling each step.

    Parameters
    ----------
    quick : bool
        Calibrate in half the time.
    report : Path
        HTML file to write.
    out : Path
        Platform file to write.
    say : callable
        Receives the lines to show.
    """
    say("First, without measuring anything: what would this cost on a GPU of the gallery?")
    say(f"  {predict(Transformer.bert('bert-large', batch=8, sequence=512, dtype='bf16'), 'h100-sxm-8')!r}")
    say("\nNow this machine: kernels, collectives and a few small training iterations.")
    platform = calibrate(out=out, quick=quick)
    hybrid = 3 if min(platform.network.ranks, count_cores()) >= 2 else 0
    samples = draw_check(7, dlrm=6, transformer=4, hybrid=hybrid)
    say(f"\nPredicting {len(samples)} configurations that the calibration never saw, then measuring them.")
    comparison = check(platform, samples=samples)
    say("\n" + comparison.as_text())
    measurements = json.loads(out.with_suffix(".measurements.json").read_text())
    kernels = [
        {"kind": row["kind"], "flops": row["sizes"]["flops"], "nbytes": row["nbytes"], "time_s": row["median"]}
        for row in measurements["kernels"] if row["sizes"].get("flops", 0.0) > 0
    ]  # fmt: skip
    shown = [_describe(sample, platform) for sample in _typical(samples)]
    environment = {**comparison.machine, **comparison.versions, "date": date.today().isoformat(), "load": _load()}
    write_report(
        report, platform=platform, comparison=comparison.to_dict(), predictions=shown, kernels=kernels,
        collectives=frame_collectives(platform, measurements) if platform.collectives else None,
        environment=environment,
    )  # fmt: skip
    say(f"\nReport:    {report} (one file, opens without a network)\nPlatform:  {out}")
    say("Notebooks: make lab, and start with notebooks/00_start_here.ipynb")


def _typical(samples: list[Sample]) -> list[Sample]:
    """The first sample of each family."""
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.family, sample)
    return list(first.values())


def _describe(sample: Sample, platform: Platform) -> dict[str, Any]:
    prediction = predict(sample.workload, platform, ranks=sample.ranks, plan=sample.plan)
    return {
        "title": f"{sample.name}: {prediction!r}",
        "breakdown": prediction.breakdown(),
        "timeline": prediction.timeline(),
    }


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
