"""Pictures are drawn in a process of their own: a name, a crash or a limit of memory ends no program
and no report."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import pytest

import perfkit as pk
from perfkit import plots
from perfkit.__main__ import main
from perfkit.ground.units import clean
from perfkit.plots import pictures
from perfkit.plots.pictures import PictureError, draw_picture
from tests.test_report import MODEL, check_page, list_tags, some_comparison

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")

#: Names that ended the process, or broke the picture; and others like them.
NAMES = {
    "escape": "a\x1bb",
    "control": "".join(map(chr, range(1, 32))),
    "nothing": "a\x00b",
    "no characters": "\ufffe\uffff\ufdd0",
    "direction": "\u202egnp.exe\u2066\u200f",
    "id and bracket": 'x id="(" y',
    "id and handler": ' id="clip0" onmouseover="alert(1)" style="color:red" ',
    "exponential": ' id="(a+)+$" ' + "a" * 60 + "!",
    "markup": '<svg id="clip0" onload="x"><clipPath id="q">',
    "end of data": "]]></text>&amp;&#0;&notanentity;",
    "address": 'href="#clip0" ="url(#clip0)"',
    "long": "x" * 100_000,
    "lines": "a\r\nb\tc\u2028d",
    "other plane": "\U0001f600\U000e0041\U0010ffff",
}


def rename(toy: pk.Platform, name: str) -> pk.Platform:
    device = replace(toy.device, name=name)
    return replace(toy, name=name, device=device, provenance={name: name})


@pytest.fixture(scope="module")
def plain(toy: pk.Platform, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a platform with a plain name."""
    return pk.report(
        rename(toy, "plain"), path=tmp_path_factory.mktemp("plain") / "plain.html"
    ).read_text()


def list_shapes(page: str) -> list[str]:
    """Names of the shapes of all pictures, in their order."""
    shapes = ("svg", "path", "line", "rect", "g")
    return [tag.name for tag in list_tags(page) if tag.name in shapes]


def list_attributes(page: str) -> set[str]:
    """Names of all attributes."""
    names = set()
    for tag in list_tags(page):
        names.update(tag.attributes)
    return names


@pytest.mark.parametrize("name", NAMES.values(), ids=[*NAMES])
def test_any_name_is_drawn_and_shown_as_text(
    name: str, toy: pk.Platform, plain: str, tmp_path: Path
) -> None:
    page = pk.report(rename(toy, name), path=tmp_path / "page.html").read_text()
    check_page(page)
    assert list_shapes(page) == list_shapes(plain), "no line of a picture is lost"
    assert list_attributes(page) <= list_attributes(plain)
    shown = page.replace("\n", "").replace("\t", "")
    for character in set(shown):
        assert character.isprintable() or ord(character) in (0xA0, 0x10FFFF), "nothing invisible"


@pytest.mark.parametrize("name", NAMES.values(), ids=[*NAMES])
def test_a_chart_alone_is_saved_with_any_name(name: str, tmp_path: Path) -> None:
    chart = plots.roofline_chart([], {name: 1e12}, {name: 1e11}, title=name)
    chart.save(tmp_path / "a.svg")
    chart.save(tmp_path / "a.json")
    ElementTree.parse(tmp_path / "a.svg")
    assert clean((tmp_path / "a.json").read_text()) == (tmp_path / "a.json").read_text()


def test_clean_leaves_text_of_every_language() -> None:
    for text in ("plain", "Straße, 東京, עברית, हिन्दी", "tab\tand\nline", "a\xa0b", "👩\u200d🔧"):
        assert clean(text) == text
    assert clean("\x1b[31m\u202e\ud800\x7f") == r"\x1b[31m\u202e\ud800\x7f"


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process that draws is ended by a signal at each picture."""
    pictures._PAINTER.stop()
    crash = "    if name.startswith('vegalite'):\n        import os; os.abort()\n    try:"
    monkeypatch.setattr(pictures, "_PROGRAM", pictures._PROGRAM.replace("    try:", crash, 1))
    yield
    pictures._PAINTER.stop()


def test_a_crash_is_one_line_and_the_report_has_its_tables(
    crashing: None, toy: pk.Platform, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"shows 2 charts only where its script runs.*signal 6$"):
        page = pk.report(toy, path=tmp_path / "page.html").read_text()
    assert page.count("<figure>") == 2
    assert list_shapes(page) == [], "no picture is there"
    assert "all_reduce.2 alpha" in page, "the tables are there"
    chart = pk.predict(MODEL, toy).chart()
    with pytest.raises(PictureError, match="was ended by signal 6") as caught:
        chart.save(tmp_path / "chart.svg")
    assert str(caught.value).isprintable() and not (tmp_path / "chart.svg").exists()
    with alt.renderers.enable("perfkit"), pytest.warns(UserWarning, match="signal 6"):
        shown: Any = chart._repr_mimebundle_()
        shown = shown[0] if isinstance(shown, tuple) else shown
    assert "image/svg+xml" not in shown and shown["text/plain"] == chart.to_dict()["description"]


def test_after_a_crash_pictures_are_drawn_again() -> None:
    spec = json.dumps(plots.roofline_chart([], {"a": 1e12}, {"b": 1e11}).to_dict())
    assert draw_picture(spec).startswith(b"<svg")
    process = pictures._PAINTER.start()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert draw_picture(spec).startswith(b"<svg")


def test_without_any_drawing_a_report_has_only_tables(
    toy: pk.Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfkit.reports import page as pages

    pictures._PAINTER.stop()
    pages._bundle.cache_clear()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.warns(UserWarning, match="no charts, only tables: .*cannot start"):
        text = pk.report(toy, path=tmp_path / "page.html").read_text()
    assert "<figure>" not in text and "all_reduce.2 alpha" in text
    assert "script-src 'none'" in unescape(text)
    assert "<script" not in text


def test_a_limit_of_memory_ends_no_process(toy: pk.Platform, tmp_path: Path) -> None:
    code = "import perfkit as pk\npk.report(pk.load_platform('toy.toml'), path='x.html')"
    toy.save(tmp_path / "toy.toml")
    shell = f'ulimit -v 40000000; exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["sh", "-c", shell, code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "all_reduce.2 alpha" in (tmp_path / "x.html").read_text()
    # where the limit is too low, a line says so; nothing of V8 is printed
    assert "CagedHeap" not in done.stderr and "Fatal" not in done.stderr
    assert not done.stderr or "ulimit -v" in done.stderr


def test_a_chart_has_its_style_in_every_thread_and_leaves_the_theme_of_the_program() -> None:
    chart = plots.roofline_chart([], {"a": 1e12}, {"b": 1e11})
    with alt.theme.enable("dark"):
        with ThreadPoolExecutor(4) as pool:
            specs = [*pool.map(lambda _: json.dumps(chart.to_dict()), range(200))]
            others = [*pool.map(lambda _: json.dumps(alt.Chart().mark_bar().to_dict()), range(20))]
        assert alt.theme.active == "dark"
    assert {*specs} == {json.dumps(chart.to_dict())}
    assert json.loads(specs[0])["config"]["range"]["category"] == plots.PALETTE
    assert len({*others}) == 1 and plots.PALETTE[0] not in others[0]
    assert "#333" not in specs[0], "nothing of the other theme"


def test_a_chart_keeps_what_altair_offers(tmp_path: Path) -> None:
    chart = plots.roofline_chart([], {"a": 1e12}, {"b": 1e11})
    assert chart.to_dict(format="vega")["$schema"].endswith("vega/v6.json")
    chart.save(tmp_path / "a.html")
    assert "vegaEmbed" in (tmp_path / "a.html").read_text()
    chart.save(tmp_path / "small.png")
    chart.save(tmp_path / "large.png", scale_factor=2)
    assert 2 * (tmp_path / "small.png").stat().st_size < (tmp_path / "large.png").stat().st_size * 2
    with open(tmp_path / "b.svg", "w") as file:
        chart.save(file, format="svg")
    assert (tmp_path / "b.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match=r"fp is .*its folder does not exist"):
        chart.save(tmp_path / "none" / "a.svg")


@pytest.mark.parametrize("name", ["rtx-4090", "p100-1", "l40s", "h100-sxm-8"])
def test_platforms_of_one_card_make_reports(name: str, tmp_path: Path) -> None:
    line = f"predict --model bert-base --platform {name} --report {tmp_path}/r.html --json -"
    shown = warnings.showwarning
    try:
        assert main(line.split()) == 0
    finally:
        warnings.showwarning = shown
    page = (tmp_path / "r.html").read_text()
    check_page(page)
    assert ("Collectives on" in page) == (pk.load_platform(name).network.ranks > 1)


def test_charts_leave_out_what_takes_no_time() -> None:
    rows = [
        {"operation": "all_reduce", "ranks": 1, "nbytes": 1e6, "time_s": 0.0},
        {"operation": "all_reduce", "ranks": 2, "nbytes": 1e6, "time_s": 1e-3},
        {"operation": "all_reduce", "ranks": 2, "nbytes": 0.0, "time_s": 1e-5},
        {"operation": "all_reduce", "ranks": 2, "nbytes": 1e7, "time_s": None},
    ]
    spec = plots.collective_curves(rows, rows).to_dict()
    drawn: list[Any] = []
    for values in spec["datasets"].values():
        drawn += values
    assert drawn
    assert all(row["time_s"] > 0 and row["nbytes"] > 0 for row in drawn)
    plots.collective_curves(rows[:1], []).to_dict()
    runs = [{**row, "measured_s": 0.0} for row in some_comparison().runs]
    plots.predicted_vs_measured(runs).to_dict()


def run_python(*words: str) -> str:
    """What a program prints in a process of its own."""
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_charts_are_the_same_without_docstrings(tmp_path: Path) -> None:
    code = (
        "import json, perfkit as pk\nfrom perfkit import plots\n"
        "print(json.dumps(plots.roofline_chart([], {'a': 1e12}, {'b': 1e11}).to_dict()))"
    )
    with_docstrings = run_python("-c", code)
    assert with_docstrings.startswith("{")
    assert run_python("-OO", "-c", code) == with_docstrings
