"""Charts are checked by what they hold (`to_dict`), and each is drawn once."""

import json
import random
from typing import Any

import altair as alt
import polars as pl
import pytest

from perfkit import plots

Row = dict[str, Any]


def run(family: str, name: str, measured: float, error: float, **other: Any) -> Row:
    predicted = measured * (1 + error)
    row: Row = {"family": family, "name": name, "config": {"batch": 64}, "ranks": 1, "flagged": False}
    row |= {"predicted_s": predicted, "low_s": predicted * 0.88, "high_s": predicted * 1.14, "bottleneck": "GEMM"}
    row |= {"measured_s": measured, "measured_q1_s": measured * 0.98, "measured_q3_s": measured * 1.04}
    return row | other


def some_runs() -> list[Row]:
    draw, families = random.Random(1), ["DLRM"] * 14 + ["BERT"] * 5 + ["DLRM hybrid"] * 6
    sizes = [(family, 10 ** draw.uniform(-2.7, -0.4), draw.gauss(0, 0.1)) for family in families]
    return [run(family, f"{i}", size, error, flagged=i == 3) for i, (family, size, error) in enumerate(sizes)]


def some_breakdown() -> pl.DataFrame:
    phases = {
        "forward": {"GEMM": 6.1, "embedding": 2.0, "elementwise": 1.0, "batched GEMM": 0.6, "copy": 0.4},
        "backward": {"GEMM": 12.4, "embedding": 3.1, "batched GEMM": 1.2, "reduction": 0.3},
        "optimizer": {"sparse update": 5.2, "dense update": 1.9},
        "exchange": {"all_reduce": 2.2, "all_to_all": 0.9},
    }
    return pl.DataFrame(
        {"phase": phase, "kind": kind, "time_s": time * 1e-3}
        for phase, kinds in phases.items()
        for kind, time in kinds.items()
    )


def some_timeline(ranks: int = 2, operations: int = 400) -> pl.DataFrame:
    draw, rows = random.Random(2), list[Row]()
    for rank in range(ranks):
        clock = 0.0
        for i in range(operations):
            phase = ("forward", "backward", "optimizer")[min(2, 3 * i // operations)]
            length = draw.expovariate(1 / 4e-5)
            rows.append({"rank": rank, "stream": "compute", "phase": phase, "start_s": clock, "end_s": clock + length})
            clock += length + 2e-6
        ends = {"start_s": clock * 0.5, "end_s": clock * 0.62}
        rows.append({"rank": rank, "stream": "network", "phase": "exchange", **ends})
    return pl.DataFrame(rows).with_columns(operation=pl.int_range(pl.len()), name=pl.lit("aten::mm"))


def some_points() -> list[Row]:
    draw, rows = random.Random(3), list[Row]()
    for kind, low, high in (("GEMM", 0.5, 2.2), ("elementwise", -1.3, -0.6)):
        for ai, flops in ((10 ** draw.uniform(low, high), 10 ** draw.uniform(6, 9)) for _ in range(12)):
            time = max(flops / 9e10, flops / ai / 1.1e10) * draw.uniform(1.05, 2)
            rows.append({"kind": kind, "flops": flops, "nbytes": flops / ai, "time_s": time})
    return rows


def some_collectives() -> tuple[list[Row], list[Row]]:
    points, curves = [], []
    for operation, alpha, rate in (("all_reduce", 1.5e-4, 1.2e9), ("all_to_all", 9e-5, 2.4e9)):
        for size in (2.0**power for power in range(9, 28)):
            time = (alpha**0.6 + (size / rate) ** 0.6) ** (1 / 0.6)
            curves.append({"operation": operation, "ranks": 2, "nbytes": size, "time_s": time})
            points.append(curves[-1] | {"time_s": time * 1.05, "q1_s": time * 0.97, "q3_s": time * 1.3})
    return points, curves


def some_ways() -> tuple[list[Row], list[Row]]:
    points, curves = some_collectives()
    rows = [
        row | {"ranks": ranks, "way": way} for row in points for ranks, way in ((2, ""), (8, ""), (8, "in_network"))
    ]
    return rows, [row | {"ranks": ranks} for row in curves for ranks in (2, 8)]


def some_ratios() -> list[Row]:
    return [
        {"group": "peak", "quantity": "bf16 peak", "unit": "FLOP/s", "a": 312e12, "b": 989e12},
        {"group": "peak", "quantity": "fp8 peak", "unit": "FLOP/s", "a": None, "b": 1979e12},
        {"group": "gemm", "quantity": "GEMM", "unit": "s", "a": 2e-3, "b": 1e-3, "a_low": 1e-3, "a_high": 4e-3}
        | {"b_low": 1e-3, "b_high": 1e-3},
    ]


CHARTS = {
    "predicted_vs_measured": lambda: plots.predicted_vs_measured(some_runs()),
    "breakdown_bars": lambda: plots.breakdown_bars(some_breakdown()),
    "breakdown_of_runs": lambda: plots.breakdown_bars(
        pl.concat([some_breakdown().with_columns(run=pl.lit(name)) for name in ("predicted", "measured")])
    ),
    "timeline_lanes": lambda: plots.timeline_lanes(some_timeline()),
    "roofline_chart": lambda: plots.roofline_chart(
        some_points(), {"fp32": 1e11}, {"L1": 3e11, "L2": 1e11, "L3": 3e10, "DRAM": 1.2e10}
    ),
    "roofline_of_a_gpu": lambda: plots.roofline_chart(
        [row | {"dtype": dtype} for row in some_points() for dtype in ("bf16", "fp8")],
        {"fp64": 33.5e12, "fp32": 67e12, "bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979e12},
        {"HBM3": 3.35e12},
    ),
    "collective_curves": lambda: plots.collective_curves(*some_collectives()),
    "collective_ways": lambda: plots.collective_curves(*some_ways()),
    "collective_fits": lambda: plots.collective_curves([], some_ways()[1]),
    "platform_ratios": lambda: plots.platform_ratios(some_ratios(), a="a100-sxm-8", b="h100-sxm-8"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_chart_is_drawn_and_is_the_same_twice(name: str) -> None:
    import vl_convert

    with alt.theme.enable("perfkit"):
        spec, again = CHARTS[name]().to_dict(), CHARTS[name]().to_dict()
    assert spec == again, "no session counters in names"
    assert "title" in spec and len(json.dumps(spec)) < 250_000
    assert vl_convert.vegalite_to_png(json.dumps(spec), scale=1).startswith(b"\x89PNG")


def values(chart: Any, layer: int | None = None) -> list[Row]:
    spec = chart.to_dict()
    return spec["datasets"][(spec if layer is None else spec["layer"][layer])["data"]["name"]]


def test_predicted_vs_measured_shows_diagonal_band_and_error() -> None:
    runs = [run("DLRM", "a", 1.0, 0.1), run("BERT", "b", 2.0, -0.2), run("BERT", "not measured", 0.0, 0.0)]
    chart = plots.predicted_vs_measured(pl.DataFrame(runs))
    for row in values(chart, 1):
        assert row["measured_s"] == row["predicted_s"]
    assert [row["high_s"] / row["low_s"] for row in values(chart, 0)] == pytest.approx([1.1 / 0.9] * 2)
    assert [row["error"] for row in values(chart, 4)] == pytest.approx([0.1, -0.2])
    subtitle = chart.to_dict()["title"]["subtitle"][0]
    assert subtitle == "2 runs: error 14.1% geometric mean, 15.0% mean, 20.0% largest"
    assert plots.predicted_vs_measured([]).to_dict()["title"]["subtitle"][0] == "no runs"


def test_breakdown_keeps_the_total_and_gathers_the_rest() -> None:
    rows = [{"phase": "forward", "kind": f"kind {i}", "time_s": 1e-3 * (i + 1)} for i in range(12)]
    drawn = values(plots.breakdown_bars(rows))
    assert sum(row["time_s"] for row in drawn) == pytest.approx(sum(row["time_s"] for row in rows))
    assert len(drawn) == 8 and sum(row["kind"] == "other" for row in drawn) == 1


def test_phases_come_in_the_order_of_an_iteration() -> None:
    times = {"": 9e-3, "update": 3e-3, "backward": 5e-3, "forward": 2e-3, "checkpoint": 1e-3, "idle": -1e-19}
    rows = [{"phase": phase, "kind": "gemm" if phase else "host", "time_s": time} for phase, time in times.items()]
    chart = plots.breakdown_bars(rows)
    assert chart.to_dict()["encoding"]["y"]["sort"] == ["forward", "backward", "update", "host", "checkpoint"]
    assert len(values(chart)) == 5


@pytest.mark.parametrize("operations", [50, 20_000])
def test_timeline_stays_small_and_covers_the_iteration(operations: int) -> None:
    frame = some_timeline(4, operations)
    drawn = values(plots.timeline_lanes(frame))
    assert len(drawn) < 2_000
    assert max(row["end_s"] for row in drawn) == pytest.approx(frame["end_s"].max())
    assert {row["lane"] for row in drawn} == {f"rank {r} · {s}" for r in range(4) for s in ("compute", "network")}


def test_timeline_of_alternating_phases_shows_the_one_that_fills_each_slot() -> None:
    rows = [
        {"rank": 0, "stream": 0, "phase": "ab"[i % 2], "start_s": i * 1e-3, "end_s": (i + (0.3, 0.9)[i % 2]) * 1e-3}
        for i in range(10_000)
    ]
    drawn = values(plots.timeline_lanes(rows))
    assert len(drawn) < 2_000 and {row["phase"] for row in drawn} == {"b"}


def test_roofline_meets_at_the_ridge_and_wants_roofs() -> None:
    chart = plots.roofline_chart(some_points(), {"fp32": 1e11}, {"DRAM": 1e10})
    roofs = [(row["intensity"], row["rate"]) for row in values(chart, 0)]
    assert (10.0, 1e11) in roofs
    with pytest.raises(ValueError, match="at least one peak"):
        plots.roofline_chart(some_points(), {}, {"DRAM": 1e10})


def roof_labels(peaks: dict[str, float], bandwidths: dict[str, float]) -> list[list[str]]:
    spec = plots.roofline_chart(some_points(), peaks, bandwidths).to_dict()
    texts = (part["data"]["name"] for part in spec["layer"] if part["mark"]["type"] == "text")
    return [[row["text"] for row in spec["datasets"][name]] for name in texts]


def test_roofs_that_are_close_share_a_label() -> None:
    """A label of its own would stand on the line of the roof above."""
    levels = {"L1": 3e11, "L2": 1e11, "L3": 8e10, "DRAM": 1.2e10}
    assert roof_labels({"fp32": 1e11}, levels)[0] == ["L1 300 GB/s", "L2 100 GB/s; L3 80 GB/s", "DRAM 12 GB/s"]
    shared = roof_labels({"bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979e12}, {"HBM3": 3.35e12})
    assert shared == [["HBM3 3.35 TB/s"], ["fp8 1.98 PFLOP/s", "bf16, fp16 990 TFLOP/s"]]


def test_ranks_and_ways_of_several_operations_are_dashes_and_shapes() -> None:
    encoding = plots.collective_curves(*some_ways()).to_dict()["hconcat"][0]["layer"][0]["encoding"]
    assert encoding["color"]["scale"]["domain"] == ["all_reduce", "all_to_all"]
    assert encoding["strokeDash"]["scale"]["domain"] == ["2 ranks", "8 ranks", "8 ranks, in-network"]
    alone = [[row for row in rows if row["operation"] == "all_reduce"] for rows in some_ways()]
    encoding = plots.collective_curves(*alone).to_dict()["hconcat"][0]["layer"][0]["encoding"]
    assert len(encoding["color"]["scale"]["domain"]) == 3 and "strokeDash" not in encoding


def test_ratios_say_which_platform_is_better() -> None:
    chart = plots.platform_ratios(some_ratios(), a="a", b="b")
    peak, gemm = values(chart, 1)
    assert peak["times"] == pytest.approx(989 / 312) and peak["low"] == peak["high"] == peak["times"]
    assert gemm["times"] == pytest.approx(2.0), "half the time is twice as good"
    assert (gemm["low"], gemm["high"]) == pytest.approx((1.0, 4.0))


def test_collective_curves_show_bus_bandwidth() -> None:
    row = {"operation": "all_reduce", "ranks": 8, "nbytes": 8e9, "time_s": 0.0312268}
    spec = plots.collective_curves([row], [row]).to_dict()
    fitted = spec["hconcat"][1]["layer"][0]
    assert fitted["encoding"]["y"]["title"] == "Bus bandwidth"
    (shown,) = spec["datasets"][fitted["data"]["name"]]
    assert shown["busbw"] == pytest.approx(448.3e9, rel=1e-3)  # the example of nccl-tests, doc/PERFORMANCE.md


def test_missing_values_become_null_and_empty_frames_are_charts() -> None:
    runs = [run("DLRM", "a", 1.0, 0.1, low_s=float("nan"), measured_q1_s=None)]
    assert values(plots.predicted_vs_measured(runs), 4)[0]["low_s"] == pytest.approx(1.1)
    for chart in (plots.breakdown_bars([]), plots.timeline_lanes([])):
        assert json.loads(chart.to_json())


def test_bars_of_modules_keep_the_total_and_gather_the_rest() -> None:
    rows = [
        {"module": f"layers.{i}", "forward_s": 1.0, "backward_s": 2.0, "update_s": 0.0, "idle_s": 0.1} for i in range(9)
    ]
    rows.append({"module": "", "forward_s": 0.0, "backward_s": 0.0, "update_s": 5.0, "idle_s": 0.0})
    spec = plots.module_bars(rows, modules=4).to_dict()
    drawn = next(values for values in spec["datasets"].values() if "seconds" in values[0])
    assert sum(row["seconds"] for row in drawn) == pytest.approx(9 * 3 + 5)
    assert {row["module"] for row in drawn} == {"layers.0", "layers.1", "layers.2", "6 more modules", "outside modules"}
    assert spec["title"]["subtitle"] == "32 s in all; dark line: the device is idle, 900 ms in all"


def test_a_timeline_pales_where_a_stream_stands_still() -> None:
    rows = [
        {"rank": 0, "stream": "compute", "phase": "forward", "name": "add", "module": "net", "start_s": i * 1e-3,
         "end_s": i * 1e-3 + 1e-4 * (1 + 5 * (i == 7))}
        for i in range(5000)
    ]  # fmt: skip
    chart = plots.timeline_lanes(rows).to_dict()
    (values,) = chart["datasets"].values()
    assert len(values) == 1 and values[0]["busy"] == pytest.approx(0.1, rel=0.01) and values[0]["operations"] == 5000
    assert values[0]["longest"] == "add · net"
    assert chart["title"]["subtitle"].startswith("paler")
