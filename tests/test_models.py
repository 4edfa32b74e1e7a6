"""Models of the package transformers, from configurations alone; skipped where it is not
installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from perfkit.prediction.predictor import predict

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from benchmarks.captures import build  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="pip install 'perfkit[models]' brings it"
)
SMALL = {"layers": 2, "hidden": 64, "heads": 8, "sequence": 32, "batch": 4, "vocabulary": 1000}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_a_model_is_captured_for_training(name: str, device: str) -> None:
    make, inputs = build(name, **SMALL)
    graph = capture(make, inputs, device=device)
    assert graph.parameters == sum(p.numel() for p in make().parameters())
    products = [graph[int(i)].features["m"] for i in graph.kernels["gemm", "nt"]]
    if name == "mixtral":  # two of eight experts for each of 128 tokens, three products each
        assert products.count(32) == 2 * 8 * 3 and graph.notes
    else:  # queries, keys, values, outputs and two layers each; the head twice
        assert products == [128] * (2 * 6 + 2) and not graph.notes
    found = predict(graph, "a100-sxm-8")
    assert sum(found.unmodelled.values()) < 0.02 * found.time and {*graph.notes} <= {
        *found.warnings
    }


def test_a_configuration_is_a_model(tmp_path: Path) -> None:
    make, inputs = build("bert", **SMALL)
    config = make().config
    wanted = capture(make, inputs)
    for architectures, name in (
        (["BertForMaskedLM"], "BertForMaskedLM"),
        (None, "BertForPreTraining"),
    ):
        config.architectures = architectures
        config.save_pretrained(tmp_path)
        for given in (config, tmp_path, str(tmp_path / "config.json"))[: 3 if architectures else 1]:
            graph = capture(
                given, {"input_ids": inputs["input_ids"]} if architectures is None else inputs
            )
            assert graph.name == name and (architectures is None or graph.labels == wanted.labels)
    for wrong, message in (
        (tmp_path / "nowhere", "no file or folder; nothing is downloaded"),
        (3, "is 3; it must be a model, what builds it"),
    ):
        with pytest.raises(ValueError, match=message):
            capture(wrong, inputs)
