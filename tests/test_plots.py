"""Charts are checked by what they hold (`to_dict`), and each is drawn once."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas
import polars as pl
import pytest
import vl_convert

from perfkit import plots
from perfkit.models.collectives import alpha_beta
from perfkit.models.distributions import Uniform, unique_rows
from perfkit.models.roofline import roofline_time
from perfkit.plots import canvas

Row = dict[str, Any]


def run(family: str, measured: float, error: float, **other: Any) -> Row:
    predicted = measured * (1 + error)
    row: Row = {"family": family, "name": "a run", "bottleneck": "GEMM", "predicted_s": predicted}
    row |= {"low_s": predicted * 0.88, "high_s": predicted * 1.14, "measured_s": measured}
    return row | {"measured_q1_s": measured * 0.98, "measured_q3_s": measured * 1.04} | other


def breakdown(**more: Any) -> list[Row]:
    phases = ("forward", "backward", "optimizer", "exchange")
    return [
        {"phase": phases[i % 4], "kind": f"kind {i % 10}", "time_s": 1e-3 * (i + 1), **more}
        for i in range(20)
    ]


def timeline(ranks: int = 2, operations: int = 400) -> pl.DataFrame:
    """Operations of random length on the compute stream of every rank, and one message beside
    them."""
    draw, rows = np.random.default_rng(2), list[Row]()
    for rank in range(ranks):
        ends = np.cumsum(draw.exponential(4e-5, operations) + 2e-6).tolist()
        for i, (start, end) in enumerate(pairwise([0.0, *ends])):
            phase = ("forward", "backward", "optimizer")[min(2, 3 * i // operations)]
            rows.append(
                {
                    "rank": rank,
                    "stream": "compute",
                    "phase": phase,
                    "start_s": start,
                    "end_s": end - 2e-6,
                }
            )
        message = {"start_s": ends[-1] * 0.5, "end_s": ends[-1] * 0.62}
        rows.append({"rank": rank, "stream": "network", "phase": "exchange", **message})
    return pl.DataFrame(rows).with_columns(name=pl.lit("aten::mm"))


def kernels(*dtypes: str) -> list[Row]:
    rows = [
        {"kind": kind, "flops": 1e7 * i, "nbytes": 1e7 * i / ai, "time_s": 1e-4 * i}
        for kind, ai in (("GEMM", 30), ("elementwise", 0.1))
        for i in range(1, 9)
    ]
    return [row | {"dtype": dtype} for row in rows for dtype in dtypes] if dtypes else rows


def collectives(
    *operations: str, algorithms: tuple[tuple[int, str], ...], fitted: tuple[int, ...]
) -> list[list[Row]]:
    """Measured points of ranks and algorithms, and fitted curves of ranks."""
    points, curves = list[Row](), list[Row]()
    for operation in operations:
        for size in (2.0**power for power in range(9, 28)):
            row = {"operation": operation, "nbytes": size, "time_s": 1.5e-4 + size / 1.2e9}
            quartiles = {"q1_s": row["time_s"] * 0.97, "q3_s": row["time_s"] * 1.3}
            points += [
                {**row, **quartiles, "ranks": ranks, "algorithm": name}
                for ranks, name in algorithms
            ]
            curves += [{**row, "ranks": ranks} for ranks in fitted]
    return [points, curves]


RATIOS = [
    {"group": "peak", "quantity": "bf16 peak", "unit": "FLOP/s", "a": 312e12, "b": 989e12},
    {"group": "peak", "quantity": "fp8 peak", "unit": "FLOP/s", "a": None, "b": 1979e12},
    {
        "group": "gemm",
        "quantity": "GEMM",
        "unit": "s",
        "a": 2e-3,
        "b": 1e-3,
        "a_low": 1e-3,
        "a_high": 4e-3,
        "b_low": 1e-3,
        "b_high": 1e-3,
    },
]
LEVELS = {"L1": 3e11, "L2": 1e11, "L3": 8e10, "DRAM": 1.2e10}
PEAKS = {"bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979e12}
ALGORITHMS: Row = {"algorithms": ((2, ""), (8, ""), (8, "in_network")), "fitted": (2, 8)}
BOTH = collectives("all_reduce", "all_to_all", **ALGORITHMS)
RUNS = [
    run(("DLRM", "BERT")[i % 2], 0.003 * 1.2**i, 0.1 - 0.01 * i, flagged=i == 3) for i in range(25)
]
CHARTS = {
    "predicted_vs_measured": lambda: plots.predicted_vs_measured(RUNS),
    "breakdown": lambda: plots.breakdown_bars(breakdown()),
    "breakdown of runs": lambda: plots.breakdown_bars(
        [*breakdown(run="predicted"), *breakdown(run="measured")]
    ),
    "timeline": lambda: plots.timeline_lanes(timeline()),
    "roofline": lambda: plots.roofline_chart(kernels(), {"fp32": 1e11}, LEVELS),
    "roofline of a GPU": lambda: plots.roofline_chart(
        kernels("bf16", "fp8"), PEAKS, {"HBM3": 3.35e12}
    ),
    "collectives": lambda: plots.collective_curves(
        *collectives("all_reduce", algorithms=((2, ""),), fitted=(2,))
    ),
    "collectives by algorithm": lambda: plots.collective_curves(*BOTH),
    "collectives, fits alone": lambda: plots.collective_curves([], BOTH[1]),
    "ratios": lambda: plots.platform_ratios(RATIOS, a="a100-sxm-8", b="h100-sxm-8"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_drawn_keeps_its_theme_in_a_file_and_says_what_it_shows(
    name: str, tmp_path: Path
) -> None:
    with alt.theme.enable("default"):
        chart = CHARTS[name]()
        chart.save(tmp_path / "chart.json")
        beside = alt.hconcat(chart, chart).to_dict() if isinstance(chart, alt.LayerChart) else {}
    assert "axis" not in beside.get("config", {}), "inside a chart of another theme it has that one"
    spec = json.loads((tmp_path / "chart.json").read_text())
    assert spec == json.loads(json.dumps(CHARTS[name]().to_dict())), "no session counters in names"
    assert (
        spec["config"]["range"]["category"] == plots.PALETTE
        and spec["config"]["axis"]["titlePadding"] == 8
    )
    heading = spec["title"] if isinstance(spec["title"], str) else spec["title"]["text"]
    assert spec["description"].startswith(heading) and len(spec["description"]) > 5
    assert repr(chart) in ("alt.Chart(...)", "alt.LayerChart(...)", "alt.HConcatChart(...)"), (
        "as notebooks hold it"
    )
    assert chart.properties(padding=9).to_dict()["description"] == spec["description"]
    assert len(json.dumps(spec)) < 250_000
    assert vl_convert.vegalite_to_png(json.dumps(spec), scale=1).startswith(b"\x89PNG")


def test_frames_of_any_kind_are_drawn_alike() -> None:
    rows = kernels()
    frames = (
        rows,
        pl.DataFrame(rows),
        pandas.DataFrame(rows),
        pl.DataFrame(rows).to_dict(as_series=False),
    )
    assert (
        len(
            {
                json.dumps(plots.roofline_chart(each, {"fp32": 1e11}, LEVELS).to_dict())
                for each in frames
            }
        )
        == 1
    )
    for empty in (plots.breakdown_bars([]), plots.timeline_lanes([])):
        assert json.loads(empty.to_json())
    assert plots.predicted_vs_measured([]).to_dict()["title"]["subtitle"][0] == "no runs"


def values(chart: Any, layer: int | None = None) -> list[Row]:
    spec = chart.to_dict()
    return spec["datasets"][(spec if layer is None else spec["layer"][layer])["data"]["name"]]


def test_predicted_vs_measured_shows_diagonal_band_and_error() -> None:
    rows = [
        run("DLRM", 1.0, 0.1),
        run("BERT", 2.0, -0.2),
        run("BERT", 0.0, 0.0, name="not measured"),
    ]
    chart = plots.predicted_vs_measured(pl.DataFrame(rows))
    assert all(row["measured_s"] == row["predicted_s"] for row in values(chart, 1))
    assert [row["high_s"] / row["low_s"] for row in values(chart, 0)] == pytest.approx(
        [1.1 / 0.9] * 2
    )
    assert [row["error"] for row in values(chart, 4)] == pytest.approx([0.1, -0.2])
    subtitle = chart.to_dict()["title"]["subtitle"][0]
    assert subtitle == "2 runs: error 14.1% geometric mean, 15.0% mean, 20.0% largest"
    (row,) = values(
        plots.predicted_vs_measured(
            [run("DLRM", 1.0, 0.1, low_s=float("nan"), measured_q1_s=None)]
        ),
        4,
    )
    assert row["low_s"] == pytest.approx(1.1), "a missing bound is the value itself"


def test_bars_keep_the_total_gather_the_rest_and_come_in_the_order_of_an_iteration() -> None:
    rows: list[Row] = [
        {"phase": "forward", "kind": f"kind {i}", "time_s": 1e-3 * (i + 1)} for i in range(12)
    ]
    drawn = values(plots.breakdown_bars(rows))
    assert sum(row["time_s"] for row in drawn) == pytest.approx(sum(row["time_s"] for row in rows))
    assert len(drawn) == 8 and sum(row["kind"] == "other" for row in drawn) == 1
    times = {
        "": 9e-3,
        "update": 3e-3,
        "backward": 5e-3,
        "forward": 2e-3,
        "checkpoint": 1e-3,
        "idle": -1e-19,
    }
    rows = [
        {"phase": phase, "kind": "gemm" if phase else "host", "time_s": time}
        for phase, time in times.items()
    ]
    chart = plots.breakdown_bars(rows)
    assert chart.to_dict()["encoding"]["y"]["sort"] == [
        "forward",
        "backward",
        "update",
        "host",
        "checkpoint",
    ]
    assert len(values(chart)) == 5
    rows = [
        {
            "module": f"layers.{i}",
            "forward_s": 1 + (i < 29),
            "backward_s": 2,
            "update_s": 0,
            "idle_s": 0.1,
        }
        for i in range(40)
    ]
    rows.append({"module": "", "forward_s": 0, "backward_s": 0, "update_s": 5, "idle_s": 0})
    spec = plots.module_bars(rows).to_dict()
    drawn = next(values for values in spec["datasets"].values() if "seconds" in values[0])
    assert sum(row["seconds"] for row in drawn) == pytest.approx(40 * 3 + 29 + 5)
    named = {*(f"layers.{i}" for i in range(29)), "11 other modules", "outside modules"}
    assert {row["module"] for row in drawn} == named
    assert spec["title"]["subtitle"] == [
        "2.57 min in all; thin line: the device is idle, 4 s in all"
    ]
    assert (
        plots.module_bars(rows, about="net on toy").to_dict()["title"]["subtitle"][0]
        == "net on toy"
    )


def test_a_timeline_stays_small_shows_what_fills_a_slot_and_pales_where_a_stream_is_idle() -> None:
    for operations in (50, 5_000):
        frame = timeline(4, operations)
        drawn = values(plots.timeline_lanes(frame))
        assert len(drawn) < 2_000
        assert max(row["end_s"] for row in drawn) == pytest.approx(frame["end_s"].max())
        assert {row["lane"] for row in drawn} == {
            f"rank {r} · {s}" for r in range(4) for s in ("compute", "network")
        }
    start, odd, about = (
        np.arange(10_000) * 1e-3,
        np.arange(10_000) % 2,
        {"rank": 0, "stream": "compute"},
    )
    rows = pl.DataFrame(
        {
            "start_s": start,
            "end_s": start + np.where(odd, 9e-4, 3e-4),
            "phase": np.array(["a", "b"])[odd],
        }
    )
    about_rows = {k: pl.lit(v) for k, v in about.items()}
    drawn = values(plots.timeline_lanes(rows.with_columns(**about_rows)))
    assert len(drawn) < 2_000 and {row["phase"] for row in drawn} == {"b"}
    whole = pl.DataFrame(
        {"stream": ["stage"], "start_s": [0.5], "end_s": [9.0], "phase": ["a"], "rank": [0]}
    )
    drawn = values(
        plots.timeline_lanes(
            pl.concat([whole, rows.with_columns(**about_rows)], how="diagonal_relaxed")
        )
    )
    (bar,) = (row for row in drawn if row["lane"] == "rank 0 · stage")
    assert (bar["start_s"], bar["end_s"]) == pytest.approx((0.5, 9.0), abs=0.02), (
        "a bar longer than a slot"
    )
    about |= {"phase": "forward", "name": "add", "module": "net"}
    chart = plots.timeline_lanes(
        [{**about, "start_s": s, "end_s": s + (6e-4 if s == 0.007 else 1e-4)} for s in start]
    )
    (bar,) = values(chart)
    assert bar["busy"] == pytest.approx(0.1, rel=0.01) and (bar["operations"], bar["longest"]) == (
        10_000,
        "add · net",
    )
    assert chart.to_dict()["title"]["subtitle"][0].startswith("paler")


def test_the_ticks_of_a_sweep_are_its_few_values_and_large_counts_have_a_prefix() -> None:
    rows = [{"batch": batch, "time": 1e-3 * batch} for batch in (8, 16, 2048)]
    layer = plots.sweep_lines(rows, x="batch", title="bert on toy").to_dict()["layer"][0]
    assert layer["encoding"]["x"]["axis"]["values"] == [8, 16, 2048]
    written = vl_convert.vegalite_to_svg(plots.sweep_lines(rows, x="batch").to_json())
    assert all(f">{text}<" in written for text in ("8", "16", "2.05k", "1 s"))
    for low, high, least in (
        (24.0, 124.0, 4),
        (340.0, 450.0, 3),
        (1.0, 9.0, 5),
        (1e-5, 2e-3, 6),
        (1e3, 1e9, 6),
    ):
        ticks = plots.canvas.log_axis("x", "x", (low, high), "").to_dict()["axis"]["values"]
        assert least <= len(ticks) <= 10 and all(low <= tick <= high for tick in ticks), (low, high)


def roof_labels(peaks: dict[str, float], bandwidths: dict[str, float]) -> list[list[str]]:
    spec = plots.roofline_chart(kernels(), peaks, bandwidths).to_dict()
    texts = (part["data"]["name"] for part in spec["layer"] if part["mark"]["type"] == "text")
    return [[row["text"] for row in spec["datasets"][name]] for name in texts]


def test_roofs_meet_at_the_ridge_and_share_a_label_where_they_are_close() -> None:
    """A label of its own would stand on the line of the roof above."""
    roofs = values(plots.roofline_chart(kernels(), {"fp32": 1e11}, {"DRAM": 1e10}), 0)
    assert (10.0, 1e11) in [(row["intensity"], row["rate"]) for row in roofs]
    assert roof_labels({"fp32": 1e11}, LEVELS)[0] == [
        "L1 300 GB/s",
        "L2 100 GB/s; L3 80 GB/s",
        "DRAM 12 GB/s",
    ]
    assert roof_labels(PEAKS, {"HBM3": 3.35e12}) == [
        ["HBM3 3.35 TB/s"],
        ["fp8 1.98 PFLOP/s", "bf16, fp16 990 TFLOP/s"],
    ]
    with pytest.raises(ValueError, match="at least one peak"):
        plots.roofline_chart(kernels(), {}, {"DRAM": 1e10})


def test_ranks_and_algorithms_of_several_operations_are_dashes_and_shapes() -> None:
    encoding = plots.collective_curves(*BOTH).to_dict()["hconcat"][0]["layer"][0]["encoding"]
    assert encoding["color"]["scale"]["domain"] == ["all_reduce", "all_to_all"]
    assert encoding["strokeDash"]["scale"]["domain"] == [
        "2 ranks",
        "8 ranks",
        "8 ranks, in-network",
    ]
    alone = plots.collective_curves(*collectives("all_reduce", **ALGORITHMS))
    encoding = alone.to_dict()["hconcat"][0]["layer"][0]["encoding"]
    assert len(encoding["color"]["scale"]["domain"]) == 3 and "strokeDash" not in encoding
    row = {"operation": "all_reduce", "ranks": 8, "nbytes": 8e9, "time_s": 0.0312268}
    spec = plots.collective_curves([row], [row]).to_dict()
    fitted = spec["hconcat"][1]["layer"][0]
    (shown,) = spec["datasets"][fitted["data"]["name"]]
    assert fitted["encoding"]["y"]["title"] == "Bus bandwidth"
    # the example of nccl-tests, doc/PERFORMANCE.md
    assert shown["busbw"] == pytest.approx(448.3e9, rel=1e-3)


def test_ratios_say_which_platform_is_better() -> None:
    peak, gemm = values(plots.platform_ratios(RATIOS, a="a", b="b"), 1)
    assert (
        peak["times"] == pytest.approx(989 / 312) and peak["low"] == peak["high"] == peak["times"]
    )
    assert gemm["times"] == pytest.approx(2.0), "half the time is twice as good"
    assert (gemm["low"], gemm["high"]) == pytest.approx((1.0, 4.0))


#: A chart with sliders, where they begin, the axis, and its closed form of that axis and what the
#: sliders hold.
SLIDERS: dict[str, tuple[Any, dict[str, float], Any]] = {
    "alpha-beta": (plots.ask_alpha_beta, {"alpha": 1e-5, "beta": 5e-12}, alpha_beta),
    "roofline": (
        plots.ask_roofline,
        {"peak": 7e14, "bandwidth": 3e12},
        lambda x, **at: x / roofline_time(x, 1, **at),
    ),
    "rows": (
        plots.ask_unique_rows,
        {"rows": 10**6, "lookups": 8e4},
        lambda x, rows, lookups: unique_rows(Uniform(round(rows)), x),
    ),
}


@pytest.mark.parametrize("doublings", [0.0, -2.5])
@pytest.mark.parametrize(("ask", "given", "form"), SLIDERS.values(), ids=SLIDERS)
def test_a_browser_computes_what_the_closed_form_says(
    ask: Any, given: Row, form: Any, doublings: float
) -> None:
    """The drawing describes each of its points to twelve digits."""
    spec = ask(**given).to_dict()
    for each in spec["params"]:
        if "bind" in each:
            each["value"] = doublings
    drawn = json.dumps(vl_convert.vegalite_to_scenegraph(json.dumps(spec)))
    points = re.findall(r': ([^;"]+); [^:;]+: ([^;]+); curve: (?:time|kernel|distinct);', drawn)
    assert len(points) == 242, "241 along the line, and the one that is asked"
    moved = {name: value * 2**doublings for name, value in given.items()}
    for x, value in points:
        assert float(value) == pytest.approx(form(float(x), **moved), rel=1e-9)
    for name in given:
        with pytest.raises(ValueError, match=f"{name} is -1"):
            ask(**given | {name: -1})


def test_a_notebook_keeps_a_chart_with_sliders_beside_its_picture() -> None:
    live, still = plots.ask_alpha_beta(alpha=1e-5, beta=1e-11), CHARTS["ratios"]()
    with alt.theme.enable("perfkit"), alt.renderers.enable("perfkit"):
        assert sorted(live._repr_mimebundle_()) == [
            "application/vnd.vegalite.v5+json",
            "image/svg+xml",
        ]
        assert sorted(still._repr_mimebundle_()) == ["image/svg+xml"]


@pytest.mark.parametrize("domain", [(0.0, 1e-320), (5e-324, 1.0), (1.0, math.inf)])
def test_an_axis_of_numbers_that_no_machine_has_is_refused(domain: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"size goes from .* to .*; a logarithmic axis takes"):
        canvas.log_axis("size", "Size", domain, "B")
