"""Every recipe runs, in at most five lines of the public interface."""

import re
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest

import perfkit as pk

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"### ([^\n]+)\n\n(?:[^#`][^\n]+\n\n)?```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize(("question", "block"), RECIPES, ids=[question[:40] for question, _ in RECIPES])
def test_a_recipe_runs(question: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *before, last = block.strip().splitlines()
    assert len(before) < 5 and not re.search(r"perfkit\.", block), question
    if "dask" in block:
        pytest.importorskip("dask.distributed", reason="no dependency of perfkit: pip install 'dask[distributed]'")
    (tmp_path / "reference_data").symlink_to(ROOT / "reference_data")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pk": pk, "pandas": pandas, "polars": polars}
    exec("\n".join(before), names)
    result = eval(last, names)
    assert result is not None or list(tmp_path.glob("*.csv"))
    if isinstance(result, polars.DataFrame):
        assert len(result) > 1
    if isinstance(result, dict):
        assert result and all(value > 0 for value in result.values())


def test_there_are_as_many_as_promised() -> None:
    assert len(RECIPES) == TEXT.count("```python") >= 23
