"""Convolutional nets captured from modules, on GPUs whose convolutions nobody measured."""

import pytest

pytest.importorskip("torch", reason="capturing modules needs torch")

from benchmarks import gpu_networks
from benchmarks.helpers.files import find_shared_data

pytestmark = pytest.mark.usefixtures("few_calls")


def test_nets_have_the_size_of_their_publications() -> None:
    """25.6 and 23.8 million weights; 4.1 and 5.7 GFLOP of multiply-adds an image forward, thrice
    that to train."""
    for name, parameters, flops in (
        ("ResNet50", 25_557_032, 4.09e9),
        ("Inception-V3", 23_834_568, 5.71e9),
    ):
        graph = gpu_networks.capture_net(name, 2)
        assert graph.parameters == parameters
        first = 2 * 2 * flops  # a multiply-add is two, and two images
        convolutions = [i for i, label in enumerate(graph.labels) if label.kind == "convolution"]
        forward = sum(
            graph[i].features["flops"] for i in convolutions if graph[i].phase == "forward"
        )
        assert forward == pytest.approx(first, rel=0.01)
        assert graph.column("flops").sum() == pytest.approx(3 * first, rel=0.03)


@pytest.mark.skipif("not _has_data()", reason="published measurements are not at hand")
def test_published_iterations_of_a_v100() -> None:
    rows = [r for r in gpu_networks.predict_rows(["ResNet50"], [64]) if r["gpu"] == "V100"]
    for row in rows:
        assert row["low"] < row["measured"] < row["high"]
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.1)
        assert row["kinds"]["convolution"] > 0.6 * row["active"]
    others = [{**row, "gpu": gpu} for row in rows for gpu in ("TITAN Xp", "P100")]
    assert "inside 80 %" in gpu_networks.format_rows(rows + others)


def _has_data() -> bool:
    try:
        find_shared_data()
    except ValueError:
        return False
    return True
