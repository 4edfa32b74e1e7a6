"""Models whose weights are read from a file, as from_pretrained does: parameters that are made on the
meta device first, and files that are mapped into memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch
from torch import nn

from perfkit import capture


def train(net: Any) -> Callable[[], None]:
    """A step of it."""
    updates = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> None:
        updates.zero_grad()
        net(torch.randn(2, 4)).sum().backward()
        updates.step()

    return step


def list_names(make_step: Callable[[], Any]) -> list[str]:
    """Names of its operations."""
    return [label.name for label in capture(make_step).labels]


def test_parameters_are_made_again_by_their_class() -> None:
    def make_step() -> Callable[[], None]:
        net = nn.Linear(4, 4, bias=False)
        weight = net.weight
        state = {**vars(weight), "requires_grad": weight.requires_grad}
        net.weight = type(weight)(weight.to("meta"), **state)
        assert isinstance(net.weight, nn.Parameter) and net.weight.requires_grad
        net.load_state_dict({"weight": torch.ones(4, 4)}, assign=True)
        return train(net)

    assert list_names(make_step) == list_names(lambda: train(nn.Linear(4, 4, bias=False)))


def test_weights_of_a_mapped_file_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="files of weights need safetensors")
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(4, 4)}, tmp_path / "weights.safetensors")

    def make_step() -> Callable[[], None]:
        net = nn.Linear(4, 4, bias=False)
        with safetensors.safe_open(tmp_path / "weights.safetensors", "pt") as file:
            net.load_state_dict({"weight": file.get_slice("weight")[...]}, assign=True)
        return train(net)

    assert list_names(make_step) == list_names(lambda: train(nn.Linear(4, 4, bias=False)))
