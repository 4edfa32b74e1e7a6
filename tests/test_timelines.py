"""Timelines end with the iteration: as tables, traces, critical paths and charts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

import perfkit as pk

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")


def unlike(seed: int, batch: int, **more: Any) -> pk.DLRM:
    """Six tables of which a single one has most of the lookups."""
    rng = np.random.default_rng(seed)
    rows = [int(rows) for rows in 10 ** rng.uniform(3, 6, 6)]
    pooling = [int(pooling) for pooling in rng.permutation([1, 1, 2, 3, 5, 60])]
    sizes: dict[str, Any] = {"dim": 32, "bottom": [64], "top": [64], "features": 4}
    return pk.DLRM(rows=rows, pooling=pooling, batch=batch, **sizes, **more)


def predict_one(kind: str, platform: str, batch: int, seed: int, **more: Any) -> pk.Prediction:
    words: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 64}
    ranks = 2 if platform == "zen5-2" else 8
    if kind == "pipeline":
        strategy = pk.Strategy(pp=2, dp=ranks // 2, micro_batch=1)
        model = pk.Transformer.gpt2(batch=8 * ranks, **words)
        return pk.predict(model, platform, strategy=strategy, **more)
    if kind in ("ddp", "fsdp", "zero1"):
        model = pk.Transformer.bert(
            batch=batch * ranks, overlap=kind != "zero1", parallel=kind, **words
        )
        return pk.predict(model, platform, ranks=ranks, **more)
    model_of_tables = unlike(seed, batch * ranks, overlap=kind == "overlap")
    return pk.predict(model_of_tables, platform, ranks=ranks, **more)


def check_ends(r: pk.Prediction, path: Path) -> None:
    """Everything ends with the iteration, and the slowest ranks fill it."""
    near = 1e-6 * r.time
    for level in ("operation", "module", "stage"):
        ends = r.timeline(level)["end_s"].to_numpy()
        assert ends.max() <= r.time + near
    assert r.timeline()["end_s"].max() == pytest.approx(r.time)
    steps = r.critical_path()
    assert steps["start_s"].min() == pytest.approx(0.0, abs=near)
    assert steps["end_s"].max() == pytest.approx(r.time)
    events = json.loads(r.save_trace(path).read_text(encoding="utf-8"))["traceEvents"]
    ends_of_slices = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends_of_slices) <= (r.time + near) * 1e6 + 0.002
    for rank_timeline in r._timeline.rank_timelines:
        assert (rank_timeline.starts >= rank_timeline.issued - near).all(), (
            "nothing runs before it is launched"
        )
    # no rank is shown for longer than an iteration
    for _, rank_timeline in r.timeline().filter(stream="compute").group_by("rank"):
        assert rank_timeline["end_s"].max() - rank_timeline["start_s"].min() <= r.time + near


@given(
    kind=st.sampled_from(["blocking", "overlap", "ddp", "fsdp", "zero1", "pipeline"]),
    platform=st.sampled_from(["h100-sxm-8", "v100-sxm-8", "zen5-2"]),
    batch=st.sampled_from([2, 64, 4096]),
    seed=st.integers(0, 10**6),
    slow=st.sampled_from([1.0, 4.0]),
    loading=st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=12, deadline=None)
def test_timelines_end_with_the_iteration(
    kind: str,
    platform: str,
    batch: int,
    seed: int,
    slow: float,
    loading: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if kind == "pipeline":
        platform = "h100-sxm-8"
    if kind not in ("blocking", "overlap"):
        batch = min(batch, 64)
    more: dict[str, Any] = {"loading": loading}
    if slow > 1.0 and kind != "pipeline":
        more["slowdown"] = {0: slow}
    r = predict_one(kind, platform, batch, seed, **more)
    check_ends(r, tmp_path_factory.mktemp("trace") / "trace.json")


def test_a_rank_that_begins_early_is_drawn_before_zero_and_named(tmp_path: Path) -> None:
    r = pk.predict(unlike(0, 8192), "zen5-2", ranks=2, slowdown={0: 4.0})
    check_ends(r, tmp_path / "trace.json")
    frame = r.timeline()
    early = frame.filter(frame["start_s"] < 0)["rank"].unique().to_list()
    assert early == [1] and frame["start_s"].min() < -0.1 * r.time
    chart = r.chart("timeline").to_dict()
    said = "left of 0: rank 1 begins early, while others end the iteration before"
    assert said in chart["title"]["subtitle"]
    text = json.dumps(chart)
    assert f"iteration, {pk.units.format_time(r.time)}" in text
    assert vl_convert.vegalite_to_png(text, scale=1).startswith(b"\x89PNG")


def test_ranks_that_do_the_same_need_no_such_line() -> None:
    r = pk.predict(pk.Transformer.bert(batch=8, layers=2), "h100-sxm-8", ranks=8)
    chart = r.chart("timeline").to_dict()
    assert "layer" not in chart and r.timeline()["start_s"].min() >= 0.0
    assert not [line for line in chart["title"]["subtitle"] if "left of 0" in line]
