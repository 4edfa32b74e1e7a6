"""The table of public scripts: how a recording is set beside the run of a script, or beside PyTorch's
counter."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch

from benchmarks.helpers import script_runs
from benchmarks.helpers.script_runs import Job, Run
from benchmarks.scripts import _compare, _compare_work
from perfkit import capture
from perfkit.recording import scripts
from perfkit.recording.recorder import Recorder

#: 4 rows through a linear layer of 8 to 8, whose input needs no gradient: two products.
SCRIPT = """
import torch
net = torch.nn.Linear(8, 8).cuda()
updates = torch.optim.SGD(net.parameters(), 0.1)
while True:
    updates.zero_grad()
    net(torch.ones(4, 8, device="cuda")).sum().backward()
    updates.step()
"""


def run(*names: str, error: str = "") -> Run:
    """A run with these operations."""
    return Run(error, False, 0.0, [*names], 1)


@pytest.mark.parametrize(
    ("here", "real", "said"),
    [
        (run("mm", "add"), run("mm", "add"), "in order"),
        (run("add", "mm"), run("mm", "add"), "in another order"),
        (run("mm"), run("mm", "add"), "1 and 2: lacks add; more none"),
        (run("mm", "copy_"), run("mm"), "2 and 1: lacks none; more copy_"),
        (run("mm"), run(error="no data"), "not run: no data"),
    ],
)
def test_operations_are_compared_by_name_and_order(here: Run, real: Run, said: str) -> None:
    assert _compare(here, real) == said


@pytest.mark.parametrize(
    ("flops", "counted", "said"),
    [
        (100.5, 100.0, "FLOP 1.005 of PyTorch's counter"),
        (150.0, 100.0, "not shown: FLOP 1.500 of PyTorch's counter"),
        (0.0, 0.0, "no operation that PyTorch counts"),
    ],
)
def test_work_is_shown_within_one_percent(flops: float, counted: float, said: str) -> None:
    assert _compare_work(Run("", False, 0.0, [], 1, flops, counted)) == said


def test_the_counter_of_pytorch_counts_two_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for owner, name in ((Recorder, "_append"), (Recorder, "begin"), (scripts, "end_iteration")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    (tmp_path / "train.py").write_text(SCRIPT)
    got = script_runs._record(Job("train.py", [], "cuda", 1, False, ""))
    assert not got.error
    assert got.counted == got.flops == 2 * (2 * 4 * 8 * 8)


def test_a_product_into_given_memory_has_the_work_of_its_factors() -> None:
    def make_step() -> Any:
        left, right, kept = torch.randn(3, 4), torch.randn(4, 5), torch.empty(3, 5)
        return lambda: torch.mm(left, right, out=kept)

    assert capture(make_step).features.flops.tolist() == [2 * 3 * 4 * 5]
