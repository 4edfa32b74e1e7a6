"""The README shows what works: its Python runs as pasted, its commands exist, its figures are committed."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import vl_convert

import perfkit
from benchmarks.__main__ import PAGE, draw_top, fill_page, run_benchmark
from benchmarks.helpers.saved_runs import pool_checks
from perfkit.calibration.checks import Comparison
from perfkit.commands.group import COMMANDS
from perfkit.ground.files import find_reference
from tests.accuracy_page import ELSEWHERE
from tests.recipes import fill_readme, list_words
from tests.torchrec_stand_ins import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Module,
    ParameterConstraints,
)

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ACCURACY = PAGE.read_text(encoding="utf-8")


RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_it_is_read_in_four_minutes():
    """About 250 words a minute; what a block prints is looked at, not read."""
    prose = re.sub(r"```text.*?```", "", TEXT, flags=re.DOTALL)
    assert len(prose.split()) <= 1000
    assert TEXT.count("\n") <= 140


def test_python_works_as_pasted_and_prints_what_is_shown():
    assert TEXT.count("```text") == 1
    assert fill_readme(TEXT) == TEXT, "run python -m tests.recipes"


def test_torchrec_goes_in_and_out_as_said():
    """The calls of the paragraph work in their order; there is no TorchRec here."""
    (paragraph,) = re.findall(r"### TorchRec, in and out\n\n(.*)", RECIPES)
    calls = re.findall(r"`([^`]*pk\.[^`]*\))`", paragraph)
    assert len(calls) == 3
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(10**6, 64, "user"), EmbeddingBagConfig(500, 16, "item")]
    )
    names = {
        "pk": perfkit,
        "model": Module(sparse=Module(ebc=collection)),
        "constraints": {
            "user": ParameterConstraints(pooling_factors=[20.0]),
            "item": ParameterConstraints(pooling_factors=[3.0]),
        },
    }
    for call in calls[:2]:
        exec(call, names)
    judged = eval(calls[2], names)
    assert list(names["plan"]) == ["sparse.ebc"]
    assert [table.pooling for table in names["tables"]] == [20, 3]
    assert judged.yours.plan.names == ("user", "item")


@pytest.mark.repository
def test_targets_and_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (\w+)", TEXT + ACCURACY):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", TEXT + page, re.DOTALL)
    shown = re.findall(r"^perfkit (\w+)", "\n".join(blocks), re.MULTILINE)
    shown += re.findall(r"`perfkit (\w+)[^`\n]*`", TEXT + page)
    assert len(shown) > 20
    for command in shown:
        assert command in COMMANDS, command


def test_linked_files_and_notebooks_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / link).exists(), link
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    notebooks = re.findall(r"notebooks/(\d\d_\w+)\.ipynb", index)
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(notebooks)


def test_errors_that_lessons_print_are_those_of_the_lessons():
    """`5.4 % off in mean (lesson 10)` is what an output of lesson 10 says."""
    said = re.findall(r"(\d+\.\d) %[^.|]*?\(lesson (\d+)", TEXT)
    assert [lesson for _, lesson in said] == ["10", "11"]
    for error, lesson in said:
        (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
        assert f"mean error {error} %" in path.read_text(encoding="utf-8"), (lesson, error)


class Line(NamedTuple):
    """A row of an accuracy table: what, how many, and figures in per cent."""

    what: str
    count: str
    figures: list[str]


def read_table(text: str, head: str) -> list[Line]:
    """The accuracy table with this head."""
    table = text.split(head)[1].split("\n\n")[0]
    lines = []
    for row in table.splitlines()[2:]:
        cells = [cell.strip().replace("−", "-") for cell in row.split("|")[1:-1]]
        lines.append(Line(cells[0], cells[1], cells[2:]))
    return lines


def summarize_checks() -> dict[str, dict[str, float]]:
    """Errors of the committed checks of configurations [%]."""
    zen3 = {row["family"]: row for row in pool_checks("zen3-2").summary().to_dicts()}
    file = find_reference("measured", "xeon-3.foreign-0.json")
    return {
        "zen3 dlrm": zen3["dlrm"],
        "zen3 transformer": zen3["transformer"],
        "zen3 hybrid": zen3["hybrid"],
        "xeon": pool_checks("xeon-2").at_usual_pace().summary().to_dicts()[-1],
        "foreign": Comparison.load(file).at_usual_pace().summary().to_dicts()[-1],
    }


#: Lines of the page of accuracy that the first five rows of the README give: `n`, mean error, share inside.
PUBLISHED = (
    r"mpt a100 +one size left out",
    r"mpt a100 +source left out",
    r"vtrain +594\.0",
    r"all of data/steps",
    r"all +36 ",
)
CHECKED = ("zen3 dlrm", "zen3 transformer", "foreign")


def test_the_table_of_the_readme_is_that_of_the_page_of_accuracy_and_of_the_checks():
    table = read_table(TEXT, "| what, on which machine |")
    assert len(table) == len(PUBLISHED) + len(CHECKED)
    for line, quantity in zip(table[: len(PUBLISHED)], PUBLISHED, strict=True):
        said = re.findall(rf"^{quantity}.*$", ACCURACY, re.MULTILINE)
        words = said[-1].replace("594.0", "594").split()
        assert {line.count, *line.figures} <= set(words), (line.what, said)
    summaries = summarize_checks()
    for line, name in zip(table[len(PUBLISHED) :], CHECKED, strict=True):
        assert int(line.count) == summaries[name]["n"]
        assert float(line.figures[0]) == pytest.approx(summaries[name]["mean_percent"], abs=0.06)
        assert float(line.figures[1]) == pytest.approx(summaries[name]["inside_percent"], abs=0.6)


def test_the_short_table_of_the_page_has_the_errors_of_the_committed_checks():
    table = read_table(ACCURACY, "| what, on which machine, when |")
    for line, summary in zip(table[:5], summarize_checks().values(), strict=True):
        assert int(line.count) == summary["n"]
        figures = [float(figure) for figure in line.figures]
        names = ("geomean_percent", "mean_percent", "bias_percent", "floor_percent")
        errors = [summary[name] for name in names]
        assert figures[:4] == pytest.approx(errors, abs=0.06), line.what
        assert figures[4] == pytest.approx(summary["inside_percent"], abs=0.6), line.what


def test_the_short_table_of_the_page_has_figures_of_its_long_ones():
    quantities = (
        r"a100_sxm\+h100_sxm +collective, two parameters",
        r"a100_sxm\+h100_sxm +GEMM +random fifth",
        r"mpt a100 +one size left out",
    )
    table = read_table(ACCURACY, "| what, on which machine, when |")
    for line, quantity in zip(table[5:], quantities, strict=True):
        said = re.search(rf"^{quantity}.*$", ACCURACY, re.MULTILINE)
        assert said, quantity
        figures = {figure for figure in (line.count, *line.figures) if figure}
        assert figures <= set(said[0].split()), line.what


def test_the_picture_on_top_is_that_of_its_prediction():
    drawn = vl_convert.vegalite_to_svg(draw_top().to_json())
    stored = (ROOT / "docs" / "prediction.svg").read_text(encoding="utf-8")
    assert list_words(drawn) == list_words(stored), "run python -m benchmarks --docs"
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert all(part in code for part in ('"llama-3-8b"', '"a100-sxm-8x8", ranks=64'))


def test_the_picture_is_that_of_the_committed_runs():
    picture = (ROOT / "docs" / "predicted_vs_measured.svg").read_text(encoding="utf-8")
    rows = {row["family"]: row for row in pool_checks("zen3-2").summary().to_dicts()}
    every = rows["all"]
    errors = f"{every['geomean_percent']:.1f}% geometric mean, {every['mean_percent']:.1f}% mean"
    assert f"{every['n']} runs: error {errors}" in picture


#: Benchmarks that need more than a few seconds, PyTorch or data that are not committed.
SLOW = (
    "left_out",
    "gpu_networks",
    "gpu_forms",
    "few_nodes",
    "gpu_context",
    "gpu_vision",
    "encoders",
    "fixes",  # tests/test_fixes.py judges one iteration
    "gpu_unet",
    "strategies_beside",  # tests/test_strategies_beside.py draws other strategies, with bars
)


def run_quick_benchmark(words: str) -> str | None:
    """What a benchmark prints; None for a slow one, whose table stays as it is, and for one that
    another test prints."""
    if words.split()[0] in (*SLOW, *ELSEWHERE):
        return None
    return run_benchmark(words)


def test_the_page_of_accuracy_is_what_the_benchmarks_print():
    assert fill_page(ACCURACY, run_quick_benchmark) == ACCURACY
