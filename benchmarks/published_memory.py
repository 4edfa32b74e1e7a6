"""Memory of published training steps beside predictions.

    python -m benchmarks.published_memory

Rows come from the folder that PERFKIT_SHARED_DATA names: the files of `data/steps` whose column
`mem_gib` is filled, and torchtitan. They are compared with what is allocated at most
(`torch.cuda.max_memory_allocated`), and with that and the reserve of the process, as nvidia-smi
shows it. What a source states is said where it says so. No number was fitted to these rows; the
rules of Megatron-LM (docs/formulas.md, table 9.3b) were written down with SimuMax's rows in view,
those of torchtitan (table 9.3) with its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from benchmarks import scale
from benchmarks.helpers.command import command
from benchmarks.helpers.published import PublishedStep, list_published
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.checks import summarize_errors
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.strategies import price_strategies

#: Sets that state memory, and what their sources say that it is.
STATED: Mapping[str, str] = {
    "simumax_b200": "not said",
    "zero_bubble_a100": "not said, whole GB",
    "bloom_topologies_a100": "not said, whole GB",
    "torchao_h100": "not said",
    "torchtune_a100": "not said",
    "torchtitan": "reserved by the allocator",
}


class MemoryRow(NamedTuple):
    """Memory of a published step [B].

    Parameters
    ----------
    set, name : str
        Its set, and its name there.
    measured : float
        As published.
    allocated, reserved : float
        As predicted: the most that is allocated, and that with the reserve of the process.
    fits : bool
        Whether the prediction fits the device, on which the step has run.
    """

    set: str
    name: str
    measured: float
    allocated: float
    reserved: float
    fits: bool


def predict_step(step: PublishedStep) -> MemoryRow:
    """Memory of a step of `data/steps`.

    The closed form holds the same as `predict` (tests/test_strategy_memory.py), and takes no longer
    for 384 GPUs. The loss of torchao's steps was not compiled, and its tensors are the largest.
    """
    strategy = step.strategy
    execution = step.execution
    if step.set.name == "torchao_h100":
        execution = "eager"
    columns = price_strategies(
        step.model,
        step.platform,
        pk.Strategy.stack([strategy]),
        execution,
        stack=step.stack,
    )
    assert step.memory is not None
    allocated = float(columns["needs"][0])
    capacity = step.platform.memory_of_rank
    return MemoryRow(
        set=step.set.name,
        name=step.name,
        measured=step.memory,
        allocated=allocated,
        reserved=allocated + float(columns["reserve"][0]),
        fits=capacity is None or allocated <= capacity,
    )


def list_rows() -> list[MemoryRow]:
    """All published steps that state memory, with their predictions."""
    rows = []
    with keep_quiet():
        for step in list_published(tuple(STATED)):
            if step.memory is not None:
                rows.append(predict_step(step))
        for number, row in enumerate(scale.list_torchtitan(alone=True)):
            memory = scale.predict_memory(row)
            rows.append(
                MemoryRow(
                    set="torchtitan",
                    name=f"{row.model.name} {row.strategy.ranks} ranks, row {number}",
                    measured=row.reserved,
                    allocated=memory.allocated,
                    reserved=memory.allocated + memory.reserve,
                    fits=True,
                )
            )
    return rows


def judge_set(name: str, rows: Sequence[MemoryRow]) -> list[dict[str, Any]]:
    """Errors of a set: of what is allocated, and with the reserve; and rows that are said not to
    fit."""
    measured = np.array([row.measured for row in rows])
    lines = []
    for what in ("allocated", "with reserve"):
        if what == "allocated":
            predicted = np.array([row.allocated for row in rows])
        else:
            predicted = np.array([row.reserved for row in rows])
        figures = summarize_errors(predicted / measured - 1)
        line = {"set": name, "states": STATED[name], "predicted": what, **figures}
        line["misfits"] = sum(not row.fits for row in rows)
        lines.append(line)
    return lines


_BY_SET = {
    "set": "{set}",
    "the source states": "{states}",
    "predicted": "{predicted}",
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
    "said not to fit": "{misfits}",
}
_BY_ROW = {
    "set": "{set}",
    "step": "{name}",
    "published GiB": "{measured:.1f}",
    "allocated GiB": "{allocated:.1f}",
    "with reserve GiB": "{reserved:.1f}",
}


@command({"--rows": {"action": "store_true", "help": "every step besides"}})
def main(given: Any) -> None:
    """Memory of published training steps, as allocated and with the reserve of the process."""
    rows = list_rows()
    lines = []
    for name in STATED:
        lines += judge_set(name, [row for row in rows if row.set == name])
    print("errors of the memory of a rank in %, by set")
    print(lay_out(lines, _BY_SET))
    if given.rows:
        gib = [
            {
                "set": row.set,
                "name": row.name,
                "measured": row.measured / 2**30,
                "allocated": row.allocated / 2**30,
                "reserved": row.reserved / 2**30,
            }
            for row in rows
        ]
        print()
        print(lay_out(gib, _BY_ROW))
