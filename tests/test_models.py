"""Models of the package transformers, from configurations alone; skipped where it is not
installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from benchmarks.captures import build  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("few_calls"),
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="pip install 'perfkit[models]' brings it"
    ),
]
SMALL = {"layers": 2, "hidden": 64, "heads": 8, "sequence": 32, "batch": 4, "vocabulary": 1000}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_a_model_is_captured_for_training(name: str, device: str) -> None:
    make, inputs = build(name, **SMALL)
    graph = pk.capture(make, inputs, device=device)
    assert graph.parameters == sum(p.numel() for p in make().parameters())
    products = [graph[int(i)].features["m"] for i in graph.kernels["gemm", "nt"]]
    if name == "mixtral":  # two of eight experts for each of 128 tokens, three products each
        assert products.count(32) == 2 * 8 * 3
        assert graph.notes
    else:  # queries, keys, values, outputs and two layers each; the head twice
        assert products == [128] * (2 * 6 + 2)
        assert not graph.notes
    found = pk.predict(graph, "a100-sxm-8")
    assert sum(found.unmodelled.values()) < 0.02 * found.time
    assert {*graph.notes} <= {*found.warnings}


@pytest.fixture
def bert() -> Any:
    """A program, its configuration and its inputs."""
    make, inputs = build("bert", **SMALL)
    return make, make().config, inputs


def test_a_configuration_of_an_architecture_is_its_model(bert: Any, tmp_path: Path) -> None:
    """As an object, a folder, or the name of a file."""
    make, config, inputs = bert
    expected = pk.capture(make, inputs)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    for model in (config, tmp_path, str(tmp_path / "config.json")):
        graph = pk.capture(model, inputs)
        assert graph.name == "BertForMaskedLM"
        assert graph.labels == expected.labels


def test_a_configuration_without_architectures_is_trained_as_at_first(bert: Any) -> None:
    _, config, inputs = bert
    config.architectures = None
    graph = pk.capture(config, {"input_ids": inputs["input_ids"]})
    assert graph.name == "BertForPreTraining"


def test_what_is_no_model_is_refused(bert: Any, tmp_path: Path) -> None:
    _, _, inputs = bert
    with pytest.raises(ValueError, match="no file or folder; nothing is downloaded"):
        pk.capture(tmp_path / "nowhere", inputs)
    with pytest.raises(ValueError, match="is 3; it must be a model, what builds it"):
        pk.capture(3, inputs)
