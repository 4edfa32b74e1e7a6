"""Comparisons of stored runs: parts of them, their figures and their text."""

import pytest

from perfkit.prediction.comparison import Comparison


def run(family: str, name: str, error: float) -> dict[str, object]:
    times = {"predicted_s": 0.1 * (1 + error), "low_s": 0.09, "high_s": 0.12}
    measured = {"measured_s": 0.1, "measured_q1_s": 0.09, "measured_q3_s": 0.11}
    return {"family": family, "name": name, "flagged": False, "bottleneck": "GEMM-bound", **times, **measured}


@pytest.fixture
def comparison() -> Comparison:
    runs = (run("dlrm", "a", 0.2), run("dlrm", "b", -0.2), run("transformer", "c", 0.05))
    return Comparison(runs, "toy", {}, {}, {"dlrm": 0.06, "transformer": 0.03, "all": 0.05})


def test_selected_runs_keep_their_own_noise_floor(comparison: Comparison) -> None:
    part = comparison.select("dlrm")
    assert [run["name"] for run in part.runs] == ["a", "b"] and part.platform == "toy"
    assert part.noise_floor == {"dlrm": 0.06, "all": 0.06}
    both = comparison.select("transformer", "dlrm")
    assert both.runs == comparison.runs and both.noise_floor["all"] == pytest.approx(0.05)
    with pytest.raises(ValueError, match="family is 'bert'; known are dlrm, transformer"):
        comparison.select("bert")


def test_text_ends_with_one_line_for_each_family_and_one_for_all(comparison: Comparison) -> None:
    lines = comparison.summary_as_text().splitlines()
    assert [line.split()[0] for line in lines] == ["dlrm", "transformer", "all"]
    assert "mean 20.0 %" in lines[0] and "noise floor 6.0 %" in lines[0]
    assert comparison.as_text().endswith("\n".join(lines))
