"""`make quick` chooses what a change touches, says what it leaves out, and needs no git to be told."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import quick

pytestmark = pytest.mark.repository
KERNELS = Path("perfkit/fitting/kernels.py")


def choose(*names: str, durations: Any = None) -> quick.Selection:
    return quick.choose([Path(name) for name in names], durations or {})


def test_imports_are_followed_through_the_facade_and_through_helpers() -> None:
    imports = quick.list_imports("tests.test_stand_ins")
    assert "perfkit.platform.gallery" in imports
    assert "perfkit" not in imports
    assert quick.find_distance("tests.test_units", {"perfkit.ground.units"}) == 1
    # tests/recordings.py writes traces, the tests import it
    assert quick.find_distance("tests.test_doubts", {"tests.recordings"}) == 1
    assert quick.find_distance("tests.test_units", {"perfkit.recording.sandbox"}) is None


@pytest.mark.parametrize(
    ("changed", "parts", "near"),
    [
        ("perfkit/models/kernels.py", quick.ANSWERS, "tests/test_fitting_kernels.py"),
        ("perfkit/ground/units.py", quick.ANSWERS, "tests/test_units.py"),
        ("perfkit/readers/nccl.py", ("readers",), "tests/test_nccl.py"),
        ("perfkit/recording/values.py", ("captures",), "tests/test_recorded_values.py"),
        ("tests/golden/fits.json", ("fits",), "tests/test_reference.py"),
        ("reference_data/datasheets.csv", quick.ANSWERS, "tests/test_gallery.py"),
        ("docs/recipes.md", (), "tests/test_recipes.py"),
        ("tests/fuzz/entries_optimizers.py", (), "tests/test_fuzz.py"),
        ("notebooks/02_roofline.ipynb", (), "notebooks/02_roofline.ipynb"),
        ("CONTRIBUTING.md", (), quick.STRUCTURE),
    ],
)
def test_a_change_asks_for_kept_answers_and_for_tests(
    changed: str, parts: tuple[str, ...], near: str
) -> None:
    durations = {str(path): {f"{path}::test": 1e-3} for path in quick.list_modules().values()}
    selection = choose(changed, durations=durations)
    assert set(selection.parts) == set(parts)
    assert near in selection.files
    assert quick.STRUCTURE in selection.files
    assert selection.left_out == selection.deselected == selection.untested == []


def test_time_goes_to_what_is_near_and_cheap() -> None:
    """A changed test runs whatever it takes; a long single test of another file does not."""
    seconds = {str(path): 2.0 for path in quick.list_modules().values()}
    durations = {name: {f"{name}::test": most} for name, most in seconds.items()}
    near = "tests/test_fitting_kernels.py"
    durations[near] = {f"{near}::test": 3.0, f"{near}::slow": 100.0}
    selection = choose(str(KERNELS), "tests/test_units.py", durations=durations)
    assert selection.deselected == [f"{near}::slow"]
    assert near in selection.files
    assert str(KERNELS) in selection.files
    assert "tests/test_shardings.py" in selection.left_out
    spent = sum(
        2.0 for name in selection.files if name not in (near, quick.STRUCTURE, quick.GOLDEN)
    )
    assert quick.BUDGET - 5.0 < spent + 3.0 <= quick.BUDGET
    durations["tests/test_units.py"] = {"tests/test_units.py::test": 500.0}
    assert "tests/test_units.py" in choose("tests/test_units.py", durations=durations).files


def test_a_guess_and_a_gap_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    selection = choose("perfkit/models/caches.py")
    assert "tests/test_caches.py" in selection.unmeasured
    added = "perfkit.models.added"
    modules = quick.list_modules() | {added: Path("perfkit/models/added.py")}
    monkeypatch.setattr(quick, "list_modules", lambda: modules)
    selection = choose("perfkit/models/added.py")
    assert selection.untested == [added]
    quick.tell([Path("perfkit/models/added.py")], selection)
    assert f"no test imports: {added}\n" in capsys.readouterr().out


def test_where_nothing_ran_the_table_says_what_files_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "DURATIONS", tmp_path / "durations-of-tests.json")
    usual = quick.read_durations()
    assert len(usual) > 150
    selection = choose("perfkit/models/caches.py", durations=usual)
    assert "tests/test_caches.py" in selection.files
    assert not selection.unmeasured
    assert len(selection.files) > 8
    # what ran here comes first, and a long test that was left out is still known
    file = "tests/test_cluster.py"
    long = [test for test in usual[file] if not test.endswith("::")]
    quick.DURATIONS.write_text(json.dumps({f"{file}::test_a": 0.5}), "utf-8")
    assert quick.read_durations()[file].keys() == {*long, f"{file}::test_a"}


def test_the_table_is_written_from_what_ran_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "DURATIONS", tmp_path / "durations-of-tests.json")
    monkeypatch.setattr(quick, "USUAL_DURATIONS", tmp_path / "durations.json")
    file = "tests/test_units.py"
    quick.USUAL_DURATIONS.write_text(json.dumps({"tests/gone.py": {"tests/gone.py::": 1.0}}))
    measured = {f"{file}::a": 0.25, f"{file}::b": 0.25, f"{file}::slow[x]": 3.0}
    quick.DURATIONS.write_text(json.dumps(measured))
    assert quick.main(["--keep"]) == 0
    kept = json.loads(quick.USUAL_DURATIONS.read_text())
    assert kept == {file: {f"{file}::": 0.5, f"{file}::slow[x]": 3.0}}


def test_without_git_files_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert quick.main([]) == 2
    said = capsys.readouterr().err
    assert "not a git repository" in said
    assert "name what changed: python -m tests.quick FILE ..." in said
    assert said.count("\n") == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    assert quick.main([]) == 2
    assert "there is no git here" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"absent\.py is no file of this repository"):
        quick.main(["absent.py"])


def test_changes_are_those_of_the_work_tree_or_of_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(quick, "ROOT", tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git("init")
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "First of all")
    assert quick.list_changed() == [Path("a.py")]
    said = capsys.readouterr().out
    assert "nothing differs from the last commit" in said
    assert "First of all" in said
    (tmp_path / "new.md").write_text("2")
    assert quick.list_changed() == [Path("new.md")]
    (tmp_path / "a.py").write_text("3")
    assert quick.list_changed() == [Path("a.py"), Path("new.md")]
    assert capsys.readouterr().out == ""


def test_tests_named_after_a_changed_module_come_first() -> None:
    """Where nothing ran before, each file counts as much, and time is short."""
    found = choose("perfkit/models/optimizers.py")
    assert "tests/test_optimizers.py" in found.files
    assert found.left_out


@pytest.mark.parametrize(
    ("changed", "guards"),
    [
        ("perfkit/workloads/blocks.py", ["tests/test_strategies.py", "tests/test_twins.py"]),
        ("perfkit/prediction/replicas.py", ["tests/test_strategies.py"]),
        ("perfkit/platform/tables.py", ["tests/test_kernel_times.py"]),
    ],
)
def test_guards_of_a_room_run_before_tests_that_are_near(changed: str, guards: list[str]) -> None:
    """Without their long tests, which would use up the time."""
    tests = [str(path) for path in quick.list_modules().values() if path.match("tests/test_*.py")]
    durations = {name: {f"{name}::test": 3.0} for name in tests}
    for guard in guards:
        durations[guard] = {f"{guard}::test": 3.0, f"{guard}::slow": 10.5}
    selection = choose(changed, durations=durations)
    assert {*guards} <= {*selection.files}
    assert selection.deselected == [f"{guard}::slow" for guard in guards]
    assert selection.left_out


def test_guards_exist_and_reach_their_room() -> None:
    modules = quick.list_modules()
    for room, guards in quick.GUARDS.items():
        of_room = {name for name in modules if name.startswith(f"perfkit.{room}.")}
        for guard in guards:
            assert quick.find_distance(quick.name_module(Path(guard)), of_room) is not None


def test_the_last_line_says_what_was_not_run() -> None:
    left_out = ["tests/test_a.py", "tests/test_b.py"]
    long = [f"tests/test_c.py::test_long[{n}]" for n in range(3)]
    selection = quick.Selection([], [], long, left_out, [], [])
    assert quick.say_what_was_not_run(selection) == (
        "NOT run, though they reach what changed: 2 test files (test_a.py, test_b.py), "
        "the longest tests (3 of test_c.py), tests marked serial; `make test` runs them"
    )
    selection = quick.Selection([], [], [], [], [], [])
    assert quick.say_what_was_not_run(selection) == (
        "NOT run, though they reach what changed: tests marked serial; `make test` runs them"
    )


def test_files_that_begin_as_they_take_longest_exist() -> None:
    for name in quick.LONGEST:
        assert (quick.ROOT / name).is_file(), name
