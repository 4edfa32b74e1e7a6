"""Frames of results print whole, with units, and are polars frames for all else."""

import pickle

import polars as pl
import pytest

import perfkit as pk
from perfkit.ground.frames import ResultFrame

ROWS = {
    "name": ["a", "b"],
    "time_s": [0.0445, 6.38],
    "needs_bytes": [71.7e9, None],
    "fits": [True, False],
}


def test_values_have_their_units_and_heads_none() -> None:
    heads, first, second = repr(ResultFrame(ROWS)).splitlines()
    assert heads.split() == ["name", "time", "needs", "fits"]
    assert first.split() == ["a", "44.5", "ms", "71.7", "GB", "✓"]
    assert second.split() == ["b", "6.38", "s", "–", "✗"]


def test_a_long_frame_shows_its_first_rows_and_says_so() -> None:
    frame = ResultFrame({"ranks": [*range(1000)]})
    lines = repr(frame).splitlines()
    assert lines[-1] == "(the first 12 of 1,000 rows)"
    assert [line.strip() for line in lines[1:-1]] == [f"{number}" for number in range(12)]
    assert len(repr(frame.head(40)).splitlines()) == 41, "40 rows are all shown"


def test_columns_beyond_a_line_are_named() -> None:
    frame = ResultFrame({f"column_{number:02}": [f"{number:010}"] for number in range(30)})
    heads, _, note = repr(frame).splitlines()
    assert len(heads) <= 120
    shown = heads.split()
    assert note == f"(more columns: {', '.join(frame.columns[len(shown) :])})"
    assert "<th>column_29</th>" in frame._repr_html_(), "a notebook scrolls"


def test_a_wide_cell_is_cut_and_the_first_column_stays() -> None:
    assert repr(ResultFrame({"name": ["x" * 500]})).splitlines()[1] == "x" * 33 + "…"
    assert "&lt;b&gt;" in ResultFrame({"name": ["<b>"]})._repr_html_()
    assert repr(ResultFrame({"time_s": []})) == "time"


def test_what_is_chosen_of_a_frame_prints_alike_and_the_rest_is_plain() -> None:
    frame = ResultFrame(ROWS)
    chosen = frame.select("time_s", "name").filter(pl.col("time_s") > 1).sort("time_s").head(1)
    assert isinstance(chosen, ResultFrame) and "6.38 s" in repr(chosen)
    doubled = frame.with_columns(twice_s=2 * frame["time_s"])
    assert isinstance(doubled, pk.ResultFrame) and "89 ms" in repr(doubled)
    assert type(frame.group_by("fits").len()) is pl.DataFrame
    assert frame.equals(pl.DataFrame(ROWS)) and pickle.loads(pickle.dumps(frame)).equals(frame)


@pytest.mark.filterwarnings("ignore")
def test_results_print_whole() -> None:
    shown = repr(pk.platforms())
    assert all(name in shown for name in pk.platforms()["name"]), "also the one that is in use"
    model = pk.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
    found = pk.explore(model, "h100-sxm-8", strategies=[pk.Strategy(dp=8), pk.Strategy(tp=2, dp=4)])
    for frame in (
        found.table(),
        found.front(),
        pk.sweep(model, {"batch": [8]}, "h100-sxm-8").table(),
    ):
        assert isinstance(frame, ResultFrame)
    heads = repr(found.table()).splitlines()[0].split()
    assert heads[:8] == ["time", "low", "high", "needs", "tokens_per_s", "ranks", "tp", "pp"]
    assert repr(found.cost(2.0, tokens=1e9)).split()[:3] == ["cost", "days", "gpu_hours"]
