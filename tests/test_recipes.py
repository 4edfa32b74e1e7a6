"""Every recipe runs, in at most five lines of the public interface, and prints what is shown."""

import re
from pathlib import Path

import polars
import pytest

import perfkit as pk
from tests.recipes import (
    PAGE,
    Recipe,
    is_picture,
    list_words,
    read_recipes,
    run_recipe,
    show,
    write_files,
    write_value,
)

TEXT = PAGE.read_text(encoding="utf-8")
RECIPES = read_recipes(TEXT)


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.question[:40] for recipe in RECIPES])
def test_a_recipe_runs_and_prints_what_is_shown(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = recipe.code
    question = recipe.question
    assert len(block.strip().splitlines()) <= 5, question
    assert not re.search(r"perfkit\.", block), question
    if "dask" in block:
        pytest.importorskip(
            "dask.distributed", reason="no dependency of perfkit: pip install 'dask[distributed]'"
        )
    if "transformers." in block:
        pytest.importorskip("transformers", reason="pip install 'perfkit[models]' brings it")
    if "torch" in block or "pk.capture" in block:
        pytest.importorskip("torch", reason="this recipe runs PyTorch")
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    answer = run_recipe(recipe)
    result = answer.value
    assert result is not None or list(tmp_path.glob("*.csv"))
    if "nccl_logs" in block:  # between the start-up and the transfer of the log
        time = answer.names["mine"].collective("all_reduce", 25e6, ranks=8).time
        assert 104e-6 < time < 140e-6
        assert "all_reduce" in result
    if isinstance(result, polars.DataFrame):
        assert len(result) > 1
    if isinstance(result, dict):
        assert result
        assert all(value > 0 for value in result.values())
    if recipe.varies:
        assert not recipe.shown
        return
    assert show(recipe, answer) == recipe.shown, "run python -m tests.recipes"
    if is_picture(answer):
        pk.plots.use_svg()
        answer.value.save(tmp_path / recipe.picture)
        drawn = list_words((tmp_path / recipe.picture).read_text(encoding="utf-8"))
        stored = list_words((PAGE.parent / recipe.picture).read_text(encoding="utf-8"))
        assert drawn == stored, "run python -m tests.recipes"


def test_there_are_as_many_as_promised() -> None:
    assert len(RECIPES) == TEXT.count("```python") >= 38


def test_most_show_their_output() -> None:
    silent = [recipe.question for recipe in RECIPES if not recipe.shown]
    assert len(silent) <= 5, silent


def test_values_are_shown_with_few_digits() -> None:
    assert write_value(1.23456) == "1.235"
    assert write_value({"cost": 12345.6, "days": 3}) == "{'cost': 12350.0, 'days': 3}"
    frame = write_value(polars.DataFrame({"name": ["a", "b"], "needs": [0.123456, 2.128e10]}))
    assert frame.split() == ["name", "needs", "a", "0.1235", "b", "2.128e10"]
    assert write_value((None, None)) == ""
