"""Notebooks are committed as `make refresh` leaves them: executed from top to bottom, small, free of machine traces."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cell(source: str, **other: Any) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "source": source,
        "metadata": {},
        "outputs": [],
        "execution_count": 1,
        "id": "x",
    } | other


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fresh(path: Path, refresh: ModuleType) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code" and cell["source"]]
    advice = f"run `python notebooks/refresh.py {path.name}`"
    assert counts == list(range(1, len(counts) + 1)), advice
    assert refresh.tidy(json.loads(text)) == notebook, advice
    assert len(text) < 300_000, "show fewer points or aggregate before charting"
    errors = [o for cell in notebook["cells"] for o in cell.get("outputs", []) if o["output_type"] == "error"]
    assert not errors


def test_tidy_removes_what_one_session_leaves(refresh: ModuleType) -> None:
    timing = {"execution": {"iopub.execute_input": "2026-01-01"}, "tags": ["nbval-skip"]}
    cells = [code_cell("1 + 1", metadata=timing), code_cell("1 + 1", outputs=[{"metadata": {"isolated": True}}])]
    language = {"name": "python", "version": "3.11.7"}
    once = refresh.tidy(
        {"cells": cells, "metadata": {"widgets": {}, "kernelspec": {"name": "mine"}, "language_info": language}}
    )
    assert once["metadata"]["kernelspec"]["name"] == "python3" and "widgets" not in once["metadata"]
    assert once["metadata"]["language_info"] == {"name": "python"}
    assert [cell["metadata"] for cell in once["cells"]] == [{"tags": ["nbval-skip"]}, {}]
    assert len({cell["id"] for cell in once["cells"]}) == 2
    assert refresh.tidy(json.loads(json.dumps(once))) == once
