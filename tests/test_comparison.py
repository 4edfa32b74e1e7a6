"""Comparisons of stored runs: parts of them, their figures and their text."""

import pytest

import perfkit as pk
from perfkit.calibration.checks import Comparison


def run(family: str, name: str, error: float, noise: float) -> dict[str, object]:
    times = {"predicted_s": 0.1 * (1 + error), "low_s": 0.09, "high_s": 0.12}
    measured = {"measured_s": 0.1, "measured_q1_s": 0.09, "measured_q3_s": 0.11}
    return {
        "family": family,
        "name": name,
        "flagged": False,
        "bottleneck": "GEMM-bound",
        "noise": noise,
        **times,
        **measured,
    }


@pytest.fixture
def comparison() -> Comparison:
    runs = (run("dlrm", "a", 0.2, 0.05), run("dlrm", "b", -0.2, 0.07), run("transformer", "c", 0.05, 0.03))
    return Comparison(runs, "toy", {}, {})


def test_selected_runs_keep_their_own_noise_floor(comparison: Comparison) -> None:
    part = comparison.select("dlrm")
    assert [run["name"] for run in part.runs] == ["a", "b"] and part.platform == "toy"
    assert part.noise_floor == pytest.approx({"dlrm": 0.06, "all": 0.06})
    both = comparison.select("transformer", "dlrm")
    assert both.runs == comparison.runs and both.noise_floor["all"] == pytest.approx(0.05)
    with pytest.raises(ValueError, match="family is 'bert'; known are dlrm, transformer"):
        comparison.select("bert")


def test_text_ends_with_one_line_for_each_family_and_one_for_all(comparison: Comparison) -> None:
    lines = comparison.summary_as_text().splitlines()
    assert [line.split()[0] for line in lines] == ["dlrm", "transformer", "all"]
    assert "mean 20.0 %" in lines[0] and "noise floor 6.0 %" in lines[0]
    assert comparison.as_text().endswith("\n".join(lines))


def test_every_table_is_a_pandas_frame_too(comparison: Comparison) -> None:
    frame = comparison.to_pandas()
    assert frame["error"].tolist() == pytest.approx([0.2, -0.2, 0.05]) and list(frame["name"]) == ["a", "b", "c"]
    model, platform = pk.DLRM(rows=[1000] * 4, dim=16, batch=64), pk.load_platform("h100-sxm-8")
    sharded = pk.shard(model, platform, ranks=2, steps=50)
    tables, two = pk.TableSet(model.tables, batch=64), pk.compare(platform, "a100-sxm-8")
    for result in (tables, model.graphs()[0], sharded, sharded.prediction, two):
        assert result.to_pandas().shape == result.table().shape
