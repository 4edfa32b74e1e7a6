"""Charts are checked by what they hold (`to_dict`), and each is drawn once."""

import json
import math
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas
import polars as pl
import pytest
import vl_convert

import perfkit as pk
from perfkit import plots
from perfkit.models.collectives import pipelined
from perfkit.models.distributions import Uniform, unique_rows
from perfkit.models.roofline import roofline_time
from perfkit.platform.estimates import keep_quiet
from perfkit.plots import canvas
from perfkit.plots.colours import INK, choose_ink
from perfkit.plots.labels import Place, place_labels

Row = dict[str, Any]


def run(family: str, measured: float, error: float, **changes: Any) -> Row:
    """A run with a prediction that is wrong by this share."""
    predicted = measured * (1 + error)
    row = {
        "family": family,
        "name": "a run",
        "bottleneck": "GEMM",
        "predicted_s": predicted,
        "low_s": predicted * 0.88,
        "high_s": predicted * 1.14,
        "measured_s": measured,
        "measured_q1_s": measured * 0.98,
        "measured_q3_s": measured * 1.04,
    }
    return row | changes


def breakdown(**more: Any) -> list[Row]:
    phases = ("forward", "backward", "optimizer", "exchange")
    rows = []
    for i in range(20):
        row = {"phase": phases[i % 4], "kind": f"kind {i % 10}", "time_s": 1e-3 * (i + 1)}
        rows.append(row | more)
    return rows


def timeline(ranks: int = 2, operations: int = 400) -> pl.DataFrame:
    """Operations of random length on the compute stream of every rank, and one message beside
    them."""
    rng = np.random.default_rng(2)
    phases = ("forward", "backward", "optimizer")
    rows: list[Row] = []
    for rank in range(ranks):
        ends = np.cumsum(rng.exponential(4e-5, operations) + 2e-6).tolist()
        for i, (start, end) in enumerate(pairwise([0.0, *ends])):
            phase = phases[min(2, 3 * i // operations)]
            times = {"start_s": start, "end_s": end - 2e-6}
            rows.append({"rank": rank, "stream": "compute", "phase": phase} | times)
        times = {"start_s": ends[-1] * 0.5, "end_s": ends[-1] * 0.62}
        rows.append({"rank": rank, "stream": "network", "phase": "exchange"} | times)
    return pl.DataFrame(rows).with_columns(name=pl.lit("aten::mm"))


def modules(count: int, *, longer: int, idle: float) -> list[Row]:
    """Layers of which the first ones take a second more, and an update outside of modules."""
    rows = []
    for i in range(count):
        forward = 2 if i < longer else 1
        times = {"forward_s": forward, "backward_s": 2, "update_s": 0, "idle_s": idle}
        rows.append({"module": f"layers.{i}"} | times)
    outside = {"forward_s": 0, "backward_s": 0, "update_s": 5, "idle_s": 0}
    return [*rows, {"module": ""} | outside]


def kernels(*dtypes: str) -> list[Row]:
    """Eight sizes of two kernels, once for each number format."""
    rows: list[Row] = []
    for kind, intensity in {"GEMM": 30, "elementwise": 0.1}.items():
        for i in range(1, 9):
            work = {"flops": 1e7 * i, "nbytes": 1e7 * i / intensity, "time_s": 1e-4 * i}
            rows.append({"kind": kind} | work)
    if not dtypes:
        return rows
    return [row | {"dtype": dtype} for row in rows for dtype in dtypes]


class Collectives(NamedTuple):
    """What `collective_curves` takes."""

    points: list[Row]
    curves: list[Row]


#: Ranks and algorithms that were measured.
THREE = ((2, ""), (8, ""), (8, "in_network"))


def collectives(
    *operations: str, measured: tuple[tuple[int, str], ...], fitted: tuple[int, ...]
) -> Collectives:
    """Measured points of ranks and algorithms, and fitted curves of ranks."""
    points: list[Row] = []
    curves: list[Row] = []
    for operation in operations:
        for power in range(9, 28):
            size = 2.0**power
            time = 1.5e-4 + size / 1.2e9
            row = {"operation": operation, "nbytes": size, "time_s": time}
            quartiles = {"q1_s": time * 0.97, "q3_s": time * 1.3}
            for ranks, algorithm in measured:
                points.append(row | quartiles | {"ranks": ranks, "algorithm": algorithm})
            for ranks in fitted:
                curves.append(row | {"ranks": ranks})
    return Collectives(points, curves)


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
SWEEP = [{"batch": batch, "time_s": 1e-3 * batch} for batch in (8, 16, 2048)]
RESOURCES = [
    {"resource": "bandwidth", "less_s": 1.2, "more_s": 0.9},
    {"resource": "peak", "less_s": 1.1, "more_s": 0.95},
]
RANKS = [
    {"rank": 0, "lookup_s": 1e-3, "update_s": 0.0, "weights_bytes": 4e9},
    {"rank": 1, "lookup_s": 1e-3, "update_s": 1e-3, "weights_bytes": 3e9},
]


def list_runs() -> list[Row]:
    runs = []
    for i in range(25):
        family = ("DLRM", "BERT")[i % 2]
        runs.append(run(family, 0.003 * 1.2**i, 0.1 - 0.01 * i, flagged=i == 3))
    return runs


def draw_predicted_vs_measured() -> Any:
    return plots.predicted_vs_measured(list_runs())


def draw_residuals() -> Any:
    return plots.residuals_by_time(list_runs())


def draw_breakdown() -> Any:
    return plots.breakdown_bars(breakdown())


def draw_breakdown_of_runs() -> Any:
    return plots.breakdown_bars([*breakdown(run="predicted"), *breakdown(run="measured")])


def draw_timeline() -> Any:
    return plots.timeline_lanes(timeline())


def draw_modules() -> Any:
    return plots.module_bars(modules(5, longer=2, idle=0.1))


def draw_sweep() -> Any:
    return plots.sweep_lines(SWEEP, x="batch", title="bert on toy")


def strategies(count: int = 60) -> list[Row]:
    """Strategies of a front on 8 and 16 ranks, and one that somebody uses now."""
    rows: list[Row] = [
        {"needs_bytes": 2.0e10, "time_s": 2.6, "ranks": 8, "label": "fsdp", "is_yours": True}
    ]
    for number in range(count):
        share = number / count
        seconds = (2.0 + 8.0 * (1.0 - share) ** 2) / (1.0 + number % 2)
        row = {"needs_bytes": 4e9 * 20.0**share, "time_s": seconds, "ranks": 8 * (1 + number % 2)}
        rows.append(row | {"label": f"tp {number % 8 + 1} · pp {number} · zero1"})
    for row in rows:
        row |= {"low_s": 0.9 * row["time_s"], "high_s": 1.1 * row["time_s"], "strategy": "all"}
    return rows


def draw_strategies() -> Any:
    return plots.strategy_front(strategies(), title="Strategies", about="a model on a toy")


def draw_roofline() -> Any:
    return plots.roofline_chart(kernels(), {"fp32": 1e11}, LEVELS)


def draw_roofline_of_a_gpu() -> Any:
    return plots.roofline_chart(kernels("bf16", "fp8"), PEAKS, {"HBM3": 3.35e12})


def draw_collectives() -> Any:
    rows = collectives("all_reduce", measured=((2, ""),), fitted=(2,))
    return plots.collective_curves(rows.points, rows.curves)


def draw_collectives_by_algorithm() -> Any:
    rows = collectives("all_reduce", "all_to_all", measured=THREE, fitted=(2, 8))
    return plots.collective_curves(rows.points, rows.curves)


def draw_fits_of_collectives() -> Any:
    rows = collectives("all_reduce", "all_to_all", measured=THREE, fitted=(2, 8))
    return plots.collective_curves([], rows.curves)


def draw_ratios() -> Any:
    return plots.platform_ratios(RATIOS, a="a100-sxm-8", b="h100-sxm-8")


def draw_tornado() -> Any:
    return plots.tornado_bars(RESOURCES, time=1.0, factor=1.2)


def draw_memory() -> Any:
    rows = [
        {"time_s": 0.0, "weights_bytes": 2e9, "activations_bytes": 0.0, "total_bytes": 2e9},
        {"time_s": 0.1, "weights_bytes": 2e9, "activations_bytes": 3e9, "total_bytes": 5e9},
        {"time_s": 0.3, "weights_bytes": 2e9, "activations_bytes": 0.0, "total_bytes": 2e9},
    ]
    return plots.memory_areas(rows, capacity=8e9, reserve=1e9)


def draw_diagnosis() -> Any:
    row = {"run": "a", "size_bytes": 1024, "measured_s": 2e-5, "busbw_bytes_per_s": 9e7}
    band = {"expected_s": 1e-5, "low_s": 5e-6, "high_s": 2e-5, "link_share": 0.1}
    rows = [{**row, **band, "verdict": "slow"}, {**row, "run": "b", "verdict": "not enough to say"}]
    return plots.measured_against_links(rows)


def draw_gains() -> Any:
    rows = [
        {"what": "links twice as fast", "gain_s": 3e-3, "low_s": 2e-3, "high_s": 3.5e-3},
        {"what": "compile the model", "gain_s": 1e-3, "low_s": -1e-4, "high_s": 2e-3},
    ]
    return plots.gain_bars(rows, time=0.02)


def draw_picks() -> Any:
    rows = [
        {"family": "model 0", "time_s": 0.02, "pick": "prediction"},
        {"family": "model 0", "time_s": 0.025, "pick": ""},
        {"family": "model 1", "time_s": 0.3, "pick": "chance"},
        {"family": "model 1", "time_s": 0.2, "pick": ""},
    ]
    return plots.pick_strips(rows)


def draw_plan() -> Any:
    return plots.plan_bars(RANKS, time=3e-3, capacity=5e9)


def draw_alpha_beta() -> Any:
    return plots.ask_alpha_beta(alpha=1e-5, beta=5e-12)


def draw_asked_roofline() -> Any:
    return plots.ask_roofline(peak=7e14, bandwidth=3e12)


def draw_unique_rows() -> Any:
    return plots.ask_unique_rows(rows=10**6, lookups=8e4)


def draw_node() -> Any:
    platform = pk.load_platform("h100-sxm-8x8")
    return plots.draw_node(platform.device, platform.network)


def draw_ring() -> Any:
    return plots.draw_ring()


def draw_dlrm() -> Any:
    return plots.draw_dlrm()


def draw_ladder() -> Any:
    rows = [
        {"way": "HBM", "bandwidth_bytes_per_s": 3e12, "evidence": "datasheet"},
        {"way": "PCIe", "bandwidth_bytes_per_s": 5e10, "evidence": "measured"},
    ]
    return plots.bandwidth_ladder(rows, [{"way": "PCIe", "bandwidth_bytes_per_s": 4e10}])


def draw_fit() -> Any:
    points = [{"nbytes": 1e4, "bytes_per_s": 3e9}, {"nbytes": 1e8, "bytes_per_s": 4e10}]
    curve = [{"nbytes": 1e3, "bytes_per_s": 1e9}, {"nbytes": 1e8, "bytes_per_s": 5e10}]
    return plots.bandwidth_fit(points, curve, capacities={"L2": 1e6})


#: Each chart with rows of its own; the name says what it shows.
CHARTS = {
    "fit": draw_fit,
    "node": draw_node,
    "ring": draw_ring,
    "DLRM": draw_dlrm,
    "ladder": draw_ladder,
    "predicted_vs_measured": draw_predicted_vs_measured,
    "residuals": draw_residuals,
    "breakdown": draw_breakdown,
    "breakdown of runs": draw_breakdown_of_runs,
    "timeline": draw_timeline,
    "modules": draw_modules,
    "sweep": draw_sweep,
    "strategies": draw_strategies,
    "roofline": draw_roofline,
    "roofline of a GPU": draw_roofline_of_a_gpu,
    "collectives": draw_collectives,
    "collectives by algorithm": draw_collectives_by_algorithm,
    "collectives, fits alone": draw_fits_of_collectives,
    "ratios": draw_ratios,
    "tornado": draw_tornado,
    "memory": draw_memory,
    "diagnosis": draw_diagnosis,
    "gains": draw_gains,
    "picks": draw_picks,
    "plan": draw_plan,
    "alpha-beta": draw_alpha_beta,
    "asked roofline": draw_asked_roofline,
    "unique rows": draw_unique_rows,
}


def test_every_chart_has_an_entry_in_this_file() -> None:
    charts = set(plots.__all__) - {"INK", "PALETTE", "use_svg"}
    drawn = set()
    for draw in CHARTS.values():
        drawn |= charts & set(draw.__code__.co_names)
    assert charts - drawn == set(), "add it to CHARTS"


@pytest.mark.parametrize(
    ("renderer", "kinds"),
    [
        ("default", {"application/vnd.vegalite.v5+json", "image/svg+xml"}),
        ("perfkit", {"image/svg+xml"}),
        ("json", {"application/json", "text/plain"}),
    ],
)
def test_a_notebook_holds_a_chart_that_moves_and_its_picture(
    renderer: str, kinds: set[str]
) -> None:
    """Altair alone holds a page that fetches its program from the network."""
    chart = CHARTS["breakdown"]()
    with alt.renderers.enable(renderer):
        shown = chart._repr_mimebundle_(None, None)
    content = shown[0] if isinstance(shown, tuple) else shown
    assert set(content) == kinds


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_drawn_keeps_its_theme_in_a_file_and_says_what_it_shows(
    name: str, tmp_path: Path
) -> None:
    with alt.theme.enable("default"):
        chart = CHARTS[name]()
        chart.save(tmp_path / "chart.json")
        if isinstance(chart, alt.LayerChart):
            beside = alt.hconcat(chart, chart).to_dict()
            assert "axis" not in beside.get("config", {}), "a part has the theme of the whole"
    text = (tmp_path / "chart.json").read_text()
    spec = json.loads(text)
    assert spec == json.loads(json.dumps(CHARTS[name]().to_dict())), "no session counters in names"
    assert spec["config"]["range"]["category"] == plots.PALETTE
    assert spec["config"]["axis"]["titlePadding"] == 8
    assert len(spec["description"]) > 5
    assert spec["description"].startswith(read_heading(spec))
    type_of_altair = ("alt.Chart(...)", "alt.LayerChart(...)", "alt.HConcatChart(...)")
    assert repr(chart) in type_of_altair, "as notebooks hold it"
    assert chart.properties(padding=9).to_dict()["description"] == spec["description"]
    assert len(text) < 250_000
    assert vl_convert.vegalite_to_png(text, scale=1).startswith(b"\x89PNG")


def read_heading(spec: Row) -> str:
    """The heading of a chart; an expression of sliders begins with it, too."""
    title = spec["title"]
    if isinstance(title, dict):
        title = title["text"]
    if isinstance(title, dict):
        title = title["expr"].split("'")[1]
    return str(title)


def test_frames_of_any_kind_are_drawn_alike() -> None:
    rows = kernels()
    frame = pl.DataFrame(rows)
    drawn = set()
    for kernels_in_a_frame in (rows, frame, pandas.DataFrame(rows), frame.to_dict(as_series=False)):
        chart = plots.roofline_chart(kernels_in_a_frame, {"fp32": 1e11}, LEVELS)
        drawn.add(json.dumps(chart.to_dict()))
    assert len(drawn) == 1


def test_a_frame_without_rows_is_a_chart() -> None:
    assert json.loads(plots.breakdown_bars([]).to_json())
    assert json.loads(plots.timeline_lanes([]).to_json())
    assert plots.predicted_vs_measured([]).to_dict()["title"]["subtitle"][0] == "no runs"


def read_data(chart: Any, layer: int | None = None) -> list[Row]:
    """Rows that a chart, or one of its layers, holds."""
    spec = chart.to_dict()
    part = spec if layer is None else spec["layer"][layer]
    rows: list[Row] = spec["datasets"][part["data"]["name"]]
    return rows


def read_subtitle(chart: Any) -> list[str]:
    lines: list[str] = chart.to_dict()["title"]["subtitle"]
    return lines


#: Layers of a chart of predicted and measured times.
BAND, DIAGONAL, POINTS = 0, 1, 4


def test_axes_of_a_sweep_have_the_units_that_the_names_of_columns_end_with() -> None:
    rows = [{"rows": 10.0**power, "lookup_s": 1e-9 * power} for power in (3, 4)]
    encoding = plots.sweep_lines(rows, x="rows", y="lookup_s").to_dict()["layer"][0]["encoding"]
    assert encoding["y"]["title"] == "lookup"
    assert " $1s'" in encoding["y"]["axis"]["labelExpr"], "2 ns, not 2e-9"
    assert " $1" not in encoding["x"]["axis"]["labelExpr"]


def test_picks_are_drawn_beyond_the_fastest_of_their_own_group() -> None:
    chart = draw_picks()
    others, picked = read_data(chart, 0), read_data(chart, 1)
    assert [row["pick"] for row in others] == ["not picked", "not picked"]
    assert [round(row["extra_share"], 9) for row in others] == [0.25, 0.0]
    assert [round(row["extra_share"], 9) for row in picked] == [0.0, 0.5]


def test_residuals_are_ratios_by_predicted_time_with_their_interval() -> None:
    """The second row is half as long as predicted and has no interval."""
    long = {"family": "fit", "name": "long", "predicted_s": 2.0, "measured_s": 3.0}
    short = {"family": "fit", "name": "short", "predicted_s": 1e-3, "measured_s": 5e-4}
    chart = plots.residuals_by_time([long | {"low_s": 1.0, "high_s": 4.0}, short])
    first, second = read_data(chart, 2)
    assert [row["name"] for row in (first, second)] == ["short", "long"], "in order of the axis"
    assert (first["ratio"], first["low"], first["high"]) == (0.5, 1.0, 1.0)
    assert (second["ratio"], second["low"], second["high"]) == (1.5, 0.5, 2.0)
    assert read_subtitle(chart)[0].startswith("2 runs: error 57.7% geometric mean, 66.7% mean")
    low, high = chart.to_dict()["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert low < 0.5 and high > 2.0


def test_predicted_vs_measured_names_intervals_only_where_they_are_known() -> None:
    known = {"family": "bert", "name": "a", "predicted_s": 1.0, "measured_s": 1.1}
    known |= {"low_s": 0.9, "high_s": 1.2}
    unknown = {"family": "bert", "name": "b", "predicted_s": 1.0, "measured_s": 1.1}
    for runs, title in (
        ([known], "Predicted, with 80% interval"),
        ([known, unknown], "Predicted, with 80% interval where known"),
        ([unknown], "Predicted"),
    ):
        layers = plots.predicted_vs_measured(runs).to_dict()["layer"]
        assert layers[-1]["encoding"]["y"]["title"] == title


def test_predicted_vs_measured_shows_diagonal_band_and_error() -> None:
    runs = [
        run("DLRM", 1.0, 0.1),
        run("BERT", 2.0, -0.2),
        run("BERT", 0.0, 0.0, name="not measured"),
    ]
    chart = plots.predicted_vs_measured(pl.DataFrame(runs))
    for row in read_data(chart, DIAGONAL):
        assert row["measured_s"] == row["predicted_s"]
    widths = [row["high_s"] / row["low_s"] for row in read_data(chart, BAND)]
    assert widths == pytest.approx([1.1 / 0.9, 1.1 / 0.9])
    errors = [row["error"] for row in read_data(chart, POINTS)]
    assert errors == pytest.approx([0.1, -0.2])
    said = "2 runs: error 14.1% geometric mean, 15.0% mean, 20.0% largest"
    assert read_subtitle(chart)[0] == said


def test_a_bound_that_a_run_lacks_is_the_value_itself() -> None:
    runs = [run("DLRM", 1.0, 0.1, low_s=float("nan"), measured_q1_s=None)]
    (row,) = read_data(plots.predicted_vs_measured(runs), POINTS)
    assert row["low_s"] == pytest.approx(1.1)
    assert row["measured_q1_s"] == pytest.approx(1.0)


def test_bars_of_a_breakdown_keep_the_total_and_gather_the_rest() -> None:
    rows = [{"phase": "forward", "kind": f"kind {i}", "time_s": 1e-3 * (i + 1)} for i in range(12)]
    drawn = read_data(plots.breakdown_bars(rows))
    total = sum(row["time_s"] for row in drawn)
    assert total == pytest.approx(sum(row["time_s"] for row in rows))
    kinds = [row["kind"] for row in drawn]
    assert len(kinds) == 8
    assert kinds.count("other") == 1


def test_bars_of_a_breakdown_come_in_the_order_of_an_iteration() -> None:
    rows = [
        {"phase": "", "kind": "host", "time_s": 9e-3},
        {"phase": "update", "kind": "gemm", "time_s": 3e-3},
        {"phase": "backward", "kind": "gemm", "time_s": 5e-3},
        {"phase": "forward", "kind": "gemm", "time_s": 2e-3},
        {"phase": "checkpoint", "kind": "gemm", "time_s": 1e-3},
        {"phase": "idle", "kind": "gemm", "time_s": -1e-19},
    ]
    chart = plots.breakdown_bars(rows)
    order = ["forward", "backward", "update", "host", "checkpoint"]
    assert chart.to_dict()["encoding"]["y"]["sort"] == order
    assert len(read_data(chart)) == 5


def test_bars_of_modules_keep_the_total_and_gather_the_rest() -> None:
    rows = modules(40, longer=29, idle=0.1)
    for row in rows:  # names without numbers, as equal layers would share a bar
        row["module"] = row["module"].replace(".", "_")
    spec = plots.module_bars(rows).to_dict()
    (drawn,) = [rows for rows in spec["datasets"].values() if "seconds" in rows[0]]
    assert sum(row["seconds"] for row in drawn) == pytest.approx(40 * 3 + 29 + 5)
    named = {f"layers_{i}" for i in range(29)}
    assert {row["module"] for row in drawn} == named | {"11 other modules", "outside modules"}
    assert spec["title"]["subtitle"] == [
        "2.57 min in all; thin line: the device is idle, 4 s in all"
    ]
    assert read_subtitle(plots.module_bars(rows, about="net on toy"))[0] == "net on toy"


def test_layers_that_take_the_same_time_share_a_bar() -> None:
    times = {"embeddings": 5.0, "layers.0": 2.0, "layers.2": 1.0, "layers.3": 1.02, "layers.1": 1.0}
    times |= {"layers.4": 1.0, "layers.5": 0.9, "heads.0": 1.0, "heads.1": 1.0}
    rows = [
        {"module": name, "forward_s": seconds, "backward_s": 2 * seconds, "idle_s": 0.1}
        for name, seconds in times.items()
    ]
    spec = plots.module_bars(rows).to_dict()
    (drawn,) = [rows for rows in spec["datasets"].values() if "seconds" in rows[0]]
    shown = dict.fromkeys(row["module"] for row in drawn)
    alike = "layers.1-4: 4 × 3.02 s"
    assert list(shown) == ["embeddings", "layers.0", alike, "layers.5", "heads.0", "heads.1"]
    (forward,) = [
        row["seconds"] for row in drawn if row["module"] == alike and row["phase"] == "forward"
    ]
    assert forward == pytest.approx(4.02)


@pytest.mark.parametrize("operations", [50, 5_000])
def test_a_timeline_stays_small_and_keeps_its_lanes_and_its_end(operations: int) -> None:
    frame = timeline(4, operations)
    drawn = read_data(plots.timeline_lanes(frame))
    assert len(drawn) < 2_000
    assert max(row["end_s"] for row in drawn) == pytest.approx(frame["end_s"].max())
    lanes = {f"rank {rank} · {stream}" for rank in range(4) for stream in ("compute", "network")}
    assert {row["lane"] for row in drawn} == lanes


def alternate() -> pl.DataFrame:
    """Phases that alternate ten thousand times; ``b`` takes three times as long as ``a``."""
    number = np.arange(10_000)
    start = number * 1e-3
    is_b = number % 2 == 1
    times = {"start_s": start, "end_s": start + np.where(is_b, 9e-4, 3e-4)}
    frame = pl.DataFrame(times | {"phase": np.where(is_b, "b", "a")})
    return frame.with_columns(rank=pl.lit(0), stream=pl.lit("compute"))


def test_a_slot_of_a_timeline_names_the_phases_that_alternate_in_it() -> None:
    """Of each slot ``a`` takes a quarter; a phase of less than a tenth is not seen."""
    drawn = read_data(plots.timeline_lanes(alternate()))
    assert len(drawn) < 2_000
    assert {row["phase"] for row in drawn} == {"a and b"}
    assert sum(row["operations"] for row in drawn) == 10_000
    assert min(row["busy"] for row in drawn) == pytest.approx(0.6, abs=0.05)
    short = alternate().with_columns(
        end_s=pl.when(pl.col("phase") == "a").then(pl.col("start_s") + 5e-5).otherwise("end_s")
    )
    assert {row["phase"] for row in read_data(plots.timeline_lanes(short))} == {"b"}


def test_passes_of_a_pipeline_are_not_drawn_as_backward_ones_alone() -> None:
    """Micro-batches pass forward and backward in turn, too fast to be seen one by one."""
    gpt = pk.Transformer.preset("gpt3-1.3b", batch=64, dtype="bf16", fused=True)
    strategy = pk.Strategy(tp=2, pp=8, schedule="interleaved", chunks=3)
    with keep_quiet():
        found = pk.predict(gpt, "h100-sxm-8x2", strategy=strategy)
    chart = found.chart("timeline")
    drawn = [row for row in read_data(chart) if row["lane"] == "rank 0 · compute"]
    shown: dict[str, float] = {}
    for row in drawn:
        shown[row["phase"]] = shown.get(row["phase"], 0.0) + row["end_s"] - row["start_s"]
    assert shown["forward and backward"] > 0.5 * found.time
    rows = found.timeline().filter(rank=0, stream="compute", phase="forward")
    assert float((rows["end_s"] - rows["start_s"]).sum()) > 0.1 * found.time


def test_a_bar_may_be_longer_than_a_slot() -> None:
    stage = {"rank": 0, "stream": "stage", "phase": "a", "start_s": 0.5, "end_s": 9.0}
    frame = pl.concat([pl.DataFrame([stage]), alternate()], how="diagonal_relaxed")
    drawn = read_data(plots.timeline_lanes(frame))
    (bar,) = [row for row in drawn if row["lane"] == "rank 0 · stage"]
    assert (bar["start_s"], bar["end_s"]) == pytest.approx((0.5, 9.0), abs=0.02)


def test_a_start_that_rounding_moved_below_0_is_at_0_and_an_early_one_is_not() -> None:
    stage = {"rank": 0, "stream": "compute", "phase": "forward", "end_s": 3.0}
    (bar,) = read_data(plots.timeline_lanes([stage | {"start_s": -5e-14}]))
    assert bar["start_s"] == 0.0, "else the axis begins far below 0"
    (bar,) = read_data(plots.timeline_lanes([stage | {"start_s": -0.1}]))
    assert bar["start_s"] == -0.1


def list_modules() -> list[Row]:
    """Two long modules beside each other, and a short one, that are spans without a name."""
    rows = []
    for module, start, end in (("layer 1", 0.0, 4.9), ("layer 2", 4.9, 9.9), ("end", 9.9, 10.0)):
        where = {"rank": 0, "stream": "compute", "phase": "forward", "name": ""}
        rows.append({**where, "module": module, "start_s": start, "end_s": end})
    return rows


def test_modules_of_one_phase_have_borders_and_names_where_there_is_room() -> None:
    chart = plots.timeline_lanes(list_modules())
    bars = read_data(chart, 0)
    assert [row["border"] for row in bars] == [1.0, 1.0, 1.0]
    labels = read_data(chart, 1)
    assert [(row["region"], row["start_s"]) for row in labels] == [
        ("layer 1", 2.45),
        ("layer 2", 7.4),
    ]
    drawn = vl_convert.vegalite_to_svg(chart.to_json())
    assert ">forward<" in drawn, "labels leave the legend"


def test_thin_bars_of_a_timeline_have_no_border_that_would_hide_them() -> None:
    rows = [row | {"end_s": row["start_s"] + 0.05} for row in list_modules()[:2]]
    rows.append(list_modules()[2])
    chart = plots.timeline_lanes(rows)
    assert [row["border"] for row in read_data(chart)] == [0.0, 0.0, 1.0]


def test_text_on_a_bar_is_white_on_dark_and_ink_on_light_or_pale_colours() -> None:
    assert choose_ink("#0072B2") == "white"
    assert choose_ink("#0072B2", opacity=0.15) == INK
    assert choose_ink("#F0E442") == INK
    assert (choose_ink("#000000"), choose_ink("#ffffff")) == ("white", INK)


def test_a_bar_is_pale_where_a_stream_is_idle_and_names_its_longest_operation() -> None:
    rows = []
    for number in range(10_000):
        start = number * 1e-3
        length = 6e-4 if number == 7 else 1e-4
        times = {"start_s": start, "end_s": start + length}
        where = {"rank": 0, "stream": "compute", "phase": "forward"}
        rows.append(times | where | {"name": "add", "module": "net"})
    chart = plots.timeline_lanes(rows)
    (bar,) = read_data(chart)
    assert bar["busy"] == pytest.approx(0.1, rel=0.01)
    assert bar["operations"] == 10_000
    assert bar["longest"] == "add · net"
    assert read_subtitle(chart)[0].startswith("paler")


def test_the_ticks_of_a_sweep_are_its_few_values_and_large_counts_have_a_prefix() -> None:
    layer = draw_sweep().to_dict()["layer"][0]
    assert layer["encoding"]["x"]["axis"]["values"] == [8, 16, 2048]
    written = vl_convert.vegalite_to_svg(plots.sweep_lines(SWEEP, x="batch").to_json())
    for text in ("8", "16", "2.05k", "1 s"):
        assert f">{text}<" in written


@pytest.mark.parametrize(
    ("low", "high", "least"),
    [
        (24.0, 124.0, 4),
        (340.0, 450.0, 3),
        (1.0, 9.0, 5),
        (1e-5, 2e-3, 6),
        (1e3, 1e9, 6),
    ],
)
def test_a_logarithmic_axis_has_some_ticks_within_its_ends(
    low: float, high: float, least: int
) -> None:
    ticks = canvas.log_axis("x", "x", (low, high), "").to_dict()["axis"]["values"]
    assert least <= len(ticks) <= 10
    assert all(low <= tick <= high for tick in ticks)


def list_labels(peaks: dict[str, float], bandwidths: dict[str, float]) -> list[list[str]]:
    """Labels of the roofs of memory, and of those of arithmetic."""
    spec = plots.roofline_chart(kernels(), peaks, bandwidths).to_dict()
    labels = []
    for layer in spec["layer"]:
        if layer["mark"]["type"] == "text":
            rows = spec["datasets"][layer["data"]["name"]]
            labels.append([row["text"] for row in rows])
    return labels


def test_roofs_meet_at_the_ridge() -> None:
    roofs = read_data(plots.roofline_chart(kernels(), {"fp32": 1e11}, {"DRAM": 1e10}), 0)
    assert (10.0, 1e11) in [(row["intensity"], row["rate"]) for row in roofs]


def test_roofs_share_a_label_where_they_are_close() -> None:
    """A label of its own would stand on the line of the roof above."""
    of_memory, _ = list_labels({"fp32": 1e11}, LEVELS)
    assert of_memory == ["L1 300 GB/s", "L2 100 GB/s; L3 80 GB/s", "DRAM 12 GB/s"]
    of_memory, of_arithmetic = list_labels(PEAKS, {"HBM3": 3.35e12})
    assert of_memory == ["HBM3 3.35 TB/s"]
    assert of_arithmetic == ["fp8 1.98 PFLOP/s", "bf16, fp16 990 TFLOP/s"]


def test_a_roofline_needs_a_peak() -> None:
    with pytest.raises(ValueError, match="at least one peak"):
        plots.roofline_chart(kernels(), {}, {"DRAM": 1e10})


def test_ranks_and_algorithms_of_several_operations_are_dashes_and_shapes() -> None:
    spec = draw_collectives_by_algorithm().to_dict()
    encoding = spec["hconcat"][0]["layer"][0]["encoding"]
    assert encoding["color"]["scale"]["domain"] == ["all_reduce", "all_to_all"]
    groups = ["2 ranks", "8 ranks", "8 ranks, in-network"]
    assert encoding["strokeDash"]["scale"]["domain"] == groups


def test_ranks_and_algorithms_of_one_operation_are_colours() -> None:
    rows = collectives("all_reduce", measured=THREE, fitted=(2, 8))
    spec = plots.collective_curves(rows.points, rows.curves).to_dict()
    encoding = spec["hconcat"][0]["layer"][0]["encoding"]
    assert len(encoding["color"]["scale"]["domain"]) == 3
    assert "strokeDash" not in encoding


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """The example of nccl-tests, doc/PERFORMANCE.md."""
    row = {"operation": "all_reduce", "ranks": 8, "nbytes": 8e9, "time_s": 0.0312268}
    spec = plots.collective_curves([row], [row]).to_dict()
    fitted = spec["hconcat"][1]["layer"][0]
    assert fitted["encoding"]["y"]["title"] == "Bus bandwidth"
    (shown,) = spec["datasets"][fitted["data"]["name"]]
    assert shown["busbw"] == pytest.approx(448.3e9, rel=1e-3)


def test_ratios_say_which_platform_is_better() -> None:
    peak, gemm = read_data(plots.platform_ratios(RATIOS, a="a", b="b"), 1)
    assert peak["times"] == pytest.approx(989 / 312)
    assert peak["low"] == peak["high"] == peak["times"]
    assert gemm["times"] == pytest.approx(2.0), "half the time is twice as good"
    assert (gemm["low"], gemm["high"]) == pytest.approx((1.0, 4.0))


class Question(NamedTuple):
    """A chart with sliders, where they begin, and its closed form of the axis and of what the
    sliders hold."""

    ask: Any
    starts: dict[str, float]
    form: Any


def find_rate(intensity: float, *, peak: float, bandwidth: float) -> Any:
    return intensity / roofline_time(intensity, 1, peak=peak, bandwidth=bandwidth)


def count_rows(lookups_on_the_axis: float, *, rows: float, lookups: float) -> Any:
    return unique_rows(Uniform(round(rows)), lookups_on_the_axis)


SLIDERS = {
    "alpha-beta": Question(plots.ask_alpha_beta, {"alpha": 1e-5, "beta": 5e-12}, pipelined),
    "roofline": Question(plots.ask_roofline, {"peak": 7e14, "bandwidth": 3e12}, find_rate),
    "rows": Question(plots.ask_unique_rows, {"rows": 10**6, "lookups": 8e4}, count_rows),
}


@pytest.mark.parametrize("factor", [1.0, 0.125, 8.0])
@pytest.mark.parametrize("name", SLIDERS)
def test_a_browser_computes_what_the_closed_form_says(name: str, factor: float) -> None:
    """The drawing describes each of its points to twelve digits."""
    question = SLIDERS[name]
    spec = question.ask(**question.starts).to_dict()
    for parameter in spec["params"]:
        if "bind" in parameter:
            assert parameter["bind"]["min"] <= factor <= parameter["bind"]["max"]
            parameter["value"] = factor
    drawn = json.dumps(vl_convert.vegalite_to_scenegraph(json.dumps(spec)))
    points = re.findall(
        r': ([^;"]+); [^:;]+: ([^;]+); curve: (?:pipelined|kernel|distinct);', drawn
    )
    assert len(points) == 242, "241 along the line, and the one that is asked"
    values = {name: start * factor for name, start in question.starts.items()}
    for x, value in points:
        assert float(value) == pytest.approx(question.form(float(x), **values), rel=1e-9)


@pytest.mark.parametrize("name", SLIDERS)
def test_the_asked_point_stays_on_both_axes_wherever_sliders_stand(name: str) -> None:
    """Also with one slider at its most and the next one at its least."""
    question = SLIDERS[name]
    spec = question.ask(**question.starts).to_dict()
    sliders = [parameter for parameter in spec["params"] if "bind" in parameter]
    for factors in ((8.0, 0.125, 8.0), (0.125, 8.0, 8.0), (8.0, 8.0, 0.125)):
        for parameter, factor in zip(sliders, factors, strict=False):
            parameter["value"] = factor
        drawn = vl_convert.vegalite_to_svg(json.dumps(spec))
        shown = [f"{parameter['name'].removesuffix('_factor')} × " for parameter in sliders]
        for label, factor in zip(shown, factors, strict=False):
            assert f"{label}{factor:g} = " in drawn
        # the dot and its words are inside the plot: nothing is cut off at its edges
        (x, y) = re.findall(
            r'<path aria-label="[^"]*" role="graphics-symbol" aria-roledescription="point" '
            r'transform="translate\(([-\d.]+),([-\d.]+)\)"',
            drawn,
        )[0]
        assert 0 <= float(x) <= 460
        assert 0 <= float(y) <= 300


@pytest.mark.parametrize("name", SLIDERS)
def test_a_slider_begins_above_zero(name: str) -> None:
    question = SLIDERS[name]
    for parameter in question.starts:
        with pytest.raises(ValueError, match=f"{parameter} is -1"):
            question.ask(**question.starts | {parameter: -1})


def test_a_notebook_keeps_a_chart_with_sliders_beside_its_picture() -> None:
    with alt.theme.enable("perfkit"), alt.renderers.enable("perfkit"):
        live = draw_alpha_beta()._repr_mimebundle_()
        still = draw_ratios()._repr_mimebundle_()
    assert sorted(live) == ["application/vnd.vegalite.v5+json", "image/svg+xml"]
    assert sorted(still) == ["image/svg+xml"]


@pytest.mark.parametrize("domain", [(0.0, 1e-320), (5e-324, 1.0), (1.0, math.inf)])
def test_an_axis_of_numbers_that_no_machine_has_is_refused(domain: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"size goes from .* to .*; a logarithmic axis takes"):
        canvas.log_axis("size", "Size", domain, "B")


def test_a_sweep_over_lists_has_a_place_for_each_list() -> None:
    rows = [
        {"rows": [1000, 2000], "time_s": 0.1, "low_s": 0.09, "high_s": 0.11},
        {"rows": [3000, 4000], "time_s": 0.2, "low_s": 0.19, "high_s": 0.21},
    ]
    chart = plots.sweep_lines(pl.DataFrame(rows), x="rows")
    assert chart.to_dict()["layer"][0]["encoding"]["x"]["type"] == "nominal"
    written = vl_convert.vegalite_to_svg(chart.to_json())
    for text in ("1000, 2000", "3000, 4000"):
        assert f">{text}<" in written


def test_bandwidths_of_a_diagnosis_follow_from_its_times() -> None:
    spec = draw_diagnosis().to_dict()
    layers = spec["hconcat"][0]["layer"]
    band, line, link, points = (spec["datasets"][layer["data"]["name"]] for layer in layers)
    # 9e7 B/s in 20 µs are 1.8e12 B/s² of bytes: over 10 µs 1.8e8, over 20 µs 9e7, over 5 µs 3.6e8
    assert line[0]["expected"] == pytest.approx(1.8e8)
    assert (band[0]["low"], band[0]["high"]) == pytest.approx((9e7, 3.6e8))
    assert link[0]["link"] == pytest.approx(9e8)
    assert points[0]["verdict"] == "slow"


def test_the_pointer_shows_figures_of_a_diagnosis_in_the_units_of_its_axes() -> None:
    written = vl_convert.vegalite_to_svg(draw_diagnosis().to_json())
    assert "size: 1 KiB; busbw: 90 MB/s; time: 20 µs" in written


def test_a_verdict_that_has_no_colour_is_refused() -> None:
    row = {"run": "a", "size_bytes": 8, "measured_s": 1e-5, "busbw_bytes_per_s": 1e9}
    with pytest.raises(ValueError, match=r"'sloow'; known are .*did you mean 'slow'"):
        plots.measured_against_links([{**row, "verdict": "sloow"}])


def test_a_share_that_no_configuration_has_is_drawn_without_lines() -> None:
    rows = [{"ranks": 8, "kept": None}]
    chart = plots.sweep_lines(rows, x="ranks", y="kept")
    assert chart.to_dict()["layer"][0]["encoding"]["y"]["scale"]["domain"] == [0, 1]
    assert "<svg" in vl_convert.vegalite_to_svg(chart.to_json())


def find_boxes_of_labels(chart: Any) -> dict[str, tuple[float, float, float, float]]:
    """Rectangles of the labels of a chart, as vl-convert draws them: left, top, right, bottom [px]."""
    spec = vl_convert.vegalite_to_svg(chart.to_json())
    boxes = {}
    pattern = (
        r'text-anchor="(start|end|middle)" transform="translate\(([-\d.]+),([-\d.]+)\)" '
        r'[^>]*font-size="10px"[^>]*>([^<]+)</text>'
    )
    for anchor, x, y, text in re.findall(pattern, spec):
        width = 5.0 * len(text)  # a little less than it is, for what is no overlap in any font
        left = float(x) - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        boxes[text] = (left, float(y) - 8, left + width, float(y) + 2)
    return boxes


def test_ten_strategies_have_labels_that_do_not_overlap() -> None:
    boxes = find_boxes_of_labels(draw_strategies())
    assert len(boxes) == 10
    assert "yours: fsdp" in boxes
    for one, other in combinations(boxes.values(), 2):
        is_beside = one[2] <= other[0] or other[2] <= one[0]
        assert is_beside or one[3] <= other[1] or other[3] <= one[1]


def test_a_label_is_written_once_for_each_number_of_ranks() -> None:
    rows = [row | {"label": "tp 8"} for row in strategies()]
    chart = plots.strategy_front(rows).to_dict()
    labels = [row for rows in chart["datasets"].values() for row in rows if [*row][-1] == "label"]
    assert sorted(row["label"] for row in labels) == ["tp 8", "tp 8", "yours: tp 8"]


def test_labels_stay_inside_the_chart_and_off_lines_and_are_written_once() -> None:
    point = Place(50.0, 50.0)
    alone = place_labels([point], ["tp 8"], [], width=600, height=300, most=10)
    assert [*alone] == [0]
    # at the right edge the label stands on the left
    edge = Place(598.0, 150.0)
    at_edge = place_labels([edge], ["tp 8 · pp 2"], [], width=600, height=300, most=10)
    assert at_edge[0].align == "right"
    # nowhere in a chart that is too narrow for its text
    narrow = place_labels([point], ["tp 8 · pp 2 · cp 2 · zero1"], [], width=90, height=90, most=10)
    assert narrow == {}
    # a line above the point leaves the place below
    line = [Place(0.0, 42.0), Place(600.0, 42.0)]
    below = place_labels([point], ["tp 8"], [line], width=600, height=300, most=10)
    assert below[0].dy > 0
    far = Place(400.0, 200.0)
    # points that nearly cover each other have one label
    near = Place(56.0, 50.0)
    once = place_labels([point, near], ["tp 8", "tp 4"], [], width=600, height=300, most=10)
    assert [*once] == [0]
    # a crowd around a point moves its label away, and a line leads to it
    middle = Place(300.0, 150.0)
    crowd = [Place(x, y) for x in range(180, 421, 8) for y in range(125, 176, 8)]
    away = place_labels([middle], ["tp 8"], [], width=600, height=300, most=10, avoid=crowd)
    assert away[0].is_far
    assert not alone[0].is_far
    most = place_labels([point, far], ["tp 8", "tp 4"], [], width=600, height=300, most=1)
    assert [*most] == [0]


def test_strategies_that_take_much_longer_are_counted_and_not_drawn() -> None:
    rows = strategies()
    slow = {"needs_bytes": 1e9, "time_s": 90.0, "low_s": 80.0, "high_s": 99.0, "ranks": 8}
    with_slow = plots.strategy_front([*rows, slow | {"label": "pp 64"}])
    drawn = [row for rows in with_slow.to_dict()["datasets"].values() for row in rows]
    assert all(row["time_s"] < 90.0 for row in drawn)
    assert "more that need less memory" in read_subtitle(with_slow)[0]
    # yours is drawn, however slow it is
    yours = plots.strategy_front([*rows, slow | {"label": "pp 64", "is_yours": True}])
    drawn = [row for rows in yours.to_dict()["datasets"].values() for row in rows]
    assert any(row["time_s"] == 90.0 for row in drawn)


def list_texts(chart: Any) -> list[str]:
    """All words of a drawing."""
    spec = chart.to_dict()
    texts = []
    for layer in spec["layer"]:
        if layer["mark"]["type"] == "text":
            texts += [row["text"] for row in spec["datasets"][layer["data"]["name"]]]
    return texts


def test_a_drawing_of_a_node_has_the_rates_of_its_platform() -> None:
    texts = list_texts(pk.load_platform("h100-sxm-8x8").chart())
    for text in (
        "one node: 8 GPUs",
        "132 multiprocessors (SM)",
        "989 TFLOP/s in bf16",
        "↕ 9.33 TB/s",
        "L2: 52.4 MB",
        "↕ 3.35 TB/s",
        "HBM3: 80 GB",
        "450 GB/s",
        "PCIe from host 55.4 GB/s",
        "host memory: 2 TB, 563 GB/s",
        "49.4 GB/s",
        "network to 7 other nodes",
        "GPU 7",
    ):
        assert text in texts


def test_a_drawing_of_a_node_leaves_out_what_is_not_known() -> None:
    texts = list_texts(pk.load_platform("p100-1").chart())
    assert "one node: 1 GPU" in texts
    for text in texts:
        assert not any(word in text for word in ("host", "adapter", "network", "NVLink", "None"))
    device = pk.Device("a GPU", "cuda", {}, (pk.load_platform("l40s-8").device.memory[-1],))
    assert "GDDR6: 48 GB" in list_texts(plots.draw_node(device, pk.Network(1)))


def test_devices_beyond_the_room_of_a_drawing_are_counted() -> None:
    texts = list_texts(pk.load_platform("gb200-72").chart())
    assert "GPU 6" in texts
    assert "GPU 7" not in texts
    assert "65 more" in texts


def test_each_step_of_a_ring_adds_what_the_rank_before_has() -> None:
    from perfkit.plots.rings import count_sums, find_sent

    ranks = 4
    # each rank and part begins with a set of one: the rank whose numbers are added up in it
    sums = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    for step in range(ranks):
        counts = [[len(ranks_of_part) for ranks_of_part in parts] for parts in sums]
        assert count_sums(step) == counts
        if step == ranks - 1:
            break  # nothing is sent any more
        sent = [(rank, part, set(sums[rank][part])) for rank, part in find_sent(step + 1)]
        for rank, part, added in sent:
            receiver = (rank + 1) % ranks
            assert not sums[receiver][part] & added, "nothing is added twice"
            sums[receiver][part] |= added
    whole = [parts.index(4) for parts in count_sums(3)]
    assert sorted(whole) == [0, 1, 2, 3], "each rank has the whole sum of another part"


def test_a_ring_marks_what_is_sent_next() -> None:
    spec = draw_ring().to_dict()
    (boxes,) = {
        layer["data"]["name"]
        for layer in spec["layer"]
        if layer["mark"]["type"] == "rect" and "stroke" in layer["encoding"]
    }
    colors = [row["color"] for row in spec["datasets"][boxes]]
    assert colors.count(plots.PALETTE[1]) == 12, "four parts in each of three steps"
    assert colors.count(plots.PALETTE[2]) == 4, "four whole sums"


def test_a_dlrm_has_an_mlp_and_tables_on_each_rank_and_one_exchange_between_them() -> None:
    texts = list_texts(draw_dlrm())
    for of_each_rank in ("bottom MLP", "its embedding tables", "pooled rows", "and loss"):
        assert texts.count(of_each_rank) == 2
    assert texts.count("all_to_all: each rank gets the pooled rows") == 1
    spec = draw_dlrm().to_dict()
    (name,) = {
        layer["data"]["name"]
        for layer in spec["layer"]
        if layer["mark"]["type"] == "rect"
        and "stroke" in layer["encoding"]
        and len(spec["datasets"][layer["data"]["name"]]) > 2
    }
    boxes = spec["datasets"][name]
    middles = sorted((box["x"] + box["x2"]) / 2 for box in boxes)
    width = spec["width"]
    assert middles == pytest.approx(sorted(width - x for x in middles)), "ranks mirror each other"
    for box in boxes:
        for other in boxes:
            beside = box["x2"] <= other["x"] or other["x2"] <= box["x"]
            above = box["y2"] <= other["y"] or other["y2"] <= box["y"]
            assert box is other or beside or above, "no box hides another"


def test_a_ladder_keeps_its_order_and_shows_what_was_measured() -> None:
    spec = draw_ladder().to_dict()
    bars, texts, ticks = (spec["datasets"][layer["data"]["name"]] for layer in spec["layer"])
    assert spec["layer"][0]["encoding"]["y"]["sort"] == ["HBM", "PCIe"]
    assert [row["text"] for row in texts] == ["3 TB/s", "50 GB/s"]
    assert all(row["start"] < 4e10 for row in bars)
    assert ticks == [{"way": "PCIe", "bandwidth_bytes_per_s": 4e10}]


def test_a_fit_is_a_line_and_what_was_measured_are_points() -> None:
    line, points, rule, name = draw_fit().to_dict()["layer"]
    assert (line["mark"]["type"], points["mark"]["type"]) == ("line", "point")
    assert [row["bytes_per_s"] for row in read_data(draw_fit(), 0)] == [1e9, 5e10]
    assert [row["bytes_per_s"] for row in read_data(draw_fit(), 1)] == [3e9, 4e10]
    assert (rule["mark"]["type"], name["encoding"]["text"]["field"]) == ("rule", "name")
    assert len(plots.bandwidth_fit([], []).to_dict()["layer"]) == 2
