"""Samples of files in `tests/data`: each is told about, and is what its script writes."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests import lesson_logs, samples


def list_files(folder: Path) -> list[str]:
    """Files of a folder, the README and recordings of a machine apart."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files if path.name != "README.md"]
    return sorted(name for name in names if not name.startswith("cpu_step"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes today."""
    folder = tmp_path_factory.mktemp("samples")
    samples.write_all(folder)
    return folder


def test_the_samples_are_those_that_the_script_writes(written: Path) -> None:
    names = list_files(samples.FOLDER)
    assert names == list_files(written)
    for name in names:
        ours = samples.FOLDER / name
        theirs = written / name
        if name.endswith(".parquet"):
            assert pl.read_parquet(ours).equals(pl.read_parquet(theirs)), name
        elif name.endswith(".npz"):
            with np.load(ours) as first, np.load(theirs) as second:
                assert list(first) == list(second)
                assert all((first[key] == second[key]).all() for key in first), name
        else:
            assert ours.read_text(encoding="utf-8") == theirs.read_text(encoding="utf-8"), name


def test_each_sample_is_small_and_the_readme_says_what_it_is() -> None:
    readme = (samples.FOLDER / "README.md").read_text(encoding="utf-8")
    for path in samples.FOLDER.rglob("*"):
        if path.is_file() and path.name != "README.md":
            top = path.relative_to(samples.FOLDER).parts[0]
            assert f"`{top}" in readme, f"{top} is not in tests/data/README.md"
            assert path.stat().st_size < 16_000, path.name


def test_the_logs_of_a_lesson_are_those_that_their_script_writes() -> None:
    written = lesson_logs.write_logs()
    assert list_files(lesson_logs.FOLDER) == sorted(written)
    for name, text in written.items():
        assert (lesson_logs.FOLDER / name).read_text(encoding="utf-8") == text, name
