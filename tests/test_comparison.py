"""Comparisons of stored runs: their files, figures and text."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import perfkit as pk
from perfkit.calibration.checks import Comparison


def run(family: str, name: str, error: float, noise: float) -> dict[str, object]:
    times = {"predicted_s": 0.1 * (1 + error), "low_s": 0.09, "high_s": 0.12, "measured_s": 0.1}
    about = {
        "family": family,
        "name": name,
        "config": {},
        "ranks": 1,
        "flagged": False,
        "bottleneck": "GEMM-bound",
    }
    return {**about, **times, "measured_q1_s": 0.09, "measured_q3_s": 0.11, "noise": noise}


@pytest.fixture
def comparison() -> Comparison:
    runs = (
        run("dlrm", "a", 0.2, 0.05),
        run("dlrm", "b", -0.2, 0.07),
        run("transformer", "c", 0.05, 0.03),
    )
    return Comparison(runs, "toy", {"processor": "x"}, {})


def damaged(saved: Comparison) -> Iterator[str]:
    """Files of a comparison that cannot be shown, or have impossible values."""
    wrong = {
        "measured_s": 0,
        "low_s": math.nan,
        "high_s": "1",
        "name": 5,
        "exposed_measured": "x",
        "relative_s": -1,
    }
    for run in (*({**saved.runs[0], key: value} for key, value in wrong.items()), {}):
        yield json.dumps({**saved.to_dict(), "runs": [run]})
    for key, value in {"machine": 3, "runs": [], "format": 2}.items():
        yield json.dumps({**saved.to_dict(), key: value})


def test_a_comparison_survives_its_file(comparison: Comparison, tmp_path: Path) -> None:
    assert Comparison.load(comparison.save(tmp_path / "c.json")).to_dict() == comparison.to_dict()
    for text in ("", "[]", "{}", *damaged(comparison)):
        (tmp_path / "bad.json").write_text(text)
        cause = r".*; name a file that check wrote" if text else "it is empty"
        with pytest.raises(ValueError, match=rf"bad\.json cannot be read: {cause}"):
            Comparison.load(tmp_path / "bad.json")


def test_files_are_pooled_and_every_family_has_its_noise_floor(
    comparison: Comparison, tmp_path: Path
) -> None:
    floors = {"dlrm": 0.06, "transformer": 0.03, "all": 0.05}
    assert comparison.to_dict()["noise_floor"] == pytest.approx(floors)
    other = replace(comparison, runs=comparison.runs[:2], platform="other")
    files = [
        found.save(tmp_path / f"{i}.json") for i, found in enumerate((comparison, other, other))
    ]
    pooled = Comparison.load(*files)
    assert len(pooled.runs) == 7 and pooled.platform == "toy" and pooled.runs[:3] == comparison.runs
    assert pooled.figures["all"]["floor"] == pytest.approx((0.15 + 2 * 0.12) / 7)
    with pytest.raises(ValueError, match=r"no\.json cannot be read"):
        Comparison.load(files[0], tmp_path / "no.json")


def test_text_ends_with_one_line_for_each_family_and_one_for_all(comparison: Comparison) -> None:
    lines = comparison.summary_as_text().splitlines()
    assert [line.split()[0] for line in lines] == ["errors,", "dlrm", "transformer", "all"]
    heads = lines[0].replace("noise floor", "floor").replace("inside 80 %", "inside").split()
    figures = dict(zip(heads[2:], lines[1].split()[1:], strict=True))
    assert (float(figures["mean"]), float(figures["floor"])) == (20.0, 6.0)
    assert comparison.as_text().endswith("\n".join(lines))


def test_every_table_is_a_pandas_frame_too(comparison: Comparison) -> None:
    frame = comparison.to_pandas()
    assert frame["error"].tolist() == pytest.approx([0.2, -0.2, 0.05]) and list(frame["name"]) == [
        "a",
        "b",
        "c",
    ]
    model, platform = pk.DLRM(rows=[1000] * 4, dim=16, batch=64), pk.load_platform("h100-sxm-8")
    sharded = pk.shard(model, platform, ranks=2, steps=50)
    tables, two = pk.TableSet(model.tables, batch=64), pk.compare(platform, "a100-sxm-8")
    for result in (tables, model.graphs()[0], sharded, sharded.prediction, two):
        assert result.to_pandas().shape == result.table().shape
