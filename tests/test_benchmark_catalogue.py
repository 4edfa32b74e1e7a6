"""The table of benchmarks is what the folder holds, and `make bench` runs what the table says."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as everything
from benchmarks.helpers.catalogue import (
    BENCHMARKS,
    NEEDS,
    README,
    Benchmark,
    Need,
    fill_readme,
    find_benchmark,
    format_benchmarks,
    format_duration,
)

ROOT = Path(__file__).parents[1]
#: Files of the folder that are the package itself.
PACKAGE = {"__init__", "__main__"}
NAMES = [benchmark.name for benchmark in BENCHMARKS]


def test_each_file_has_one_row_and_each_row_a_file() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - PACKAGE
    assert sorted(NAMES) == sorted(files)


@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_runs_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        import_module(f"benchmarks.{name}").main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


@pytest.mark.parametrize("folder", ["helpers", "makers"])
def test_no_helper_is_a_benchmark(folder: str) -> None:
    for path in (ROOT / "benchmarks" / folder).glob("*.py"):
        assert path.stem not in NAMES
        if folder == "helpers":
            assert "@command(" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=NAMES)
def test_each_row_is_complete_and_its_claim_stands_on_its_page(benchmark: Benchmark) -> None:
    assert benchmark.question[0].isupper() and benchmark.question.endswith("?")
    assert benchmark.seconds > 0
    if not benchmark.page:
        assert benchmark.claim == ""
        return
    page = (ROOT / benchmark.page).read_text(encoding="utf-8")
    if benchmark.page == "docs/formulas.md":
        assert f"| {benchmark.claim} |" in page
    else:
        headings = [line for line in page.splitlines() if line.startswith("#")]
        assert any(benchmark.claim in heading for heading in headings), benchmark.claim
    assert f"benchmarks.{benchmark.name}" in page, (
        f"{benchmark.page} does not say which benchmark its claim rests on"
    )


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=NAMES)
def test_the_arguments_of_each_row_are_options_of_its_file(
    benchmark: Benchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{benchmark.name}").main(["--help"])
    usage = capsys.readouterr().out
    for word in benchmark.arguments.split():
        if word.startswith("--"):
            assert word in usage


def test_each_need_has_words() -> None:
    assert set(NEEDS) == set(Need)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "1 s"), (80, "80 s"), (119, "119 s"), (120, "2 min"), (900, "15 min")],
)
def test_durations_are_told_in_seconds_or_minutes(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_the_readme_shows_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert fill_readme(text) == text, "run python -m benchmarks --docs"
    assert all(benchmark.command in text for benchmark in BENCHMARKS)


def test_what_stands_below_the_table_stays() -> None:
    text = README.read_text(encoding="utf-8")
    assert fill_readme(text + "More.\n") == text + "More.\n"


@pytest.mark.parametrize("mark", ["<!-- This table", "<!-- End of"])
def test_a_readme_that_has_lost_a_line_around_the_table_is_refused(mark: str) -> None:
    text = README.read_text(encoding="utf-8")
    assert mark in text
    with pytest.raises(ValueError, match=f"README has no line '{mark}"):
        fill_readme(text.replace(mark, "<!-- Another"))


def test_the_list_shows_each_question_with_what_rests_on_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert everything.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == format_benchmarks()
    for line, benchmark in zip(shown.splitlines()[1:], BENCHMARKS, strict=True):
        assert line.startswith(benchmark.name)
        assert benchmark.question in line
        assert benchmark.claim_as_text in line


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(
        ValueError, match="benchmark is 'sped'; take one of `python -m benchmarks --list`"
    ):
        find_benchmark("sped")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `python -m benchmarks` runs, in order; nothing is measured, and every package is here."""
    ran: list[str] = []

    def calibrate(*, out: Path, quick: bool) -> None:
        ran.append("calibrate")
        out.write_text("")
        out.with_suffix(".measurements.json").write_text("")

    def load(module: str) -> SimpleNamespace:
        def main(words: list[str]) -> int:
            ran.append(module.removeprefix("benchmarks."))
            return 0

        return SimpleNamespace(main=main)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(everything, "calibrate", calibrate)
    monkeypatch.setattr(everything, "count_cores", lambda: 2)
    monkeypatch.setattr(everything, "find_spec", lambda name: name)
    monkeypatch.setattr(everything, "import_module", load)
    monkeypatch.setenv("PERFKIT_SHARED_DATA", str(tmp_path / "nowhere"))
    return ran


#: In order, those that need the data of others in a list of their own.
MEASURED = ["imbalance", "speed", "peers", "placement", "plan_limits", "captures"]
MEASURED += [
    "capture_cases",
    "scripts",
    "drawn_models",
    "versions",
    "gpu_vision",
    "encoders",
    "walk",
    "checks",
    "gpu_steps",
    "gpu_survey",
]
SHARED = ["gpu_forms", "few_nodes", "gpu_networks", "gpu_unet", "traced", "v100_embeddings"]
SHARED += ["lookups", "host_tables", "updates", "published_memory"]
SAVED = [
    "fixes",
    "gpu_products",
    "gpu_attention",
    "gpu_iterations",
    "mlperf_dlrm",
    "regions",
    "offload",
    "context_parallel",
    "lora",
    "deepseek",
    "dlrm_strategies",
]
SAVED += ["sharding_study", "sharding_study", "left_out"]


def test_all_benchmarks_calibrate_once_and_leave_out_what_has_no_data(
    ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert everything.main(["--quick"]) == 0
    assert ran == ["calibrate", "accuracy", "learning", *MEASURED, *SAVED]
    told = capsys.readouterr().out
    for name in SHARED:
        assert f"{name} is left out: the measurements of A100 and H100 are missing" in told
    assert everything.main(["--quick"]) == 0
    assert ran.count("calibrate") == 1
    assert "remove it to calibrate again" in capsys.readouterr().out


def test_a_platform_that_is_named_is_taken_as_it_is(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gemm").mkdir()
    monkeypatch.setenv("PERFKIT_SHARED_DATA", str(tmp_path))
    assert everything.main(["--quick", "--platform", "mine.toml"]) == 0
    assert ran == ["accuracy", *MEASURED, *SHARED, *SAVED]


def test_without_quick_all_run_but_the_one_that_needs_a_commit(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gemm").mkdir()
    monkeypatch.setenv("PERFKIT_SHARED_DATA", str(tmp_path))
    assert everything.main(["--platform", "mine.toml"]) == 0
    assert set(ran) == set(NAMES) - {"beside"}


def test_without_quick_the_long_ones_come_last(ran: list[str]) -> None:
    assert everything.main(["--platform", "mine.toml"]) == 0
    assert ran[-3:] == ["few_sizes", "gpu_context", "learning"]


@pytest.mark.parametrize(
    ("fault", "name"),
    [("cores", "imbalance"), ("torch", "captures"), ("transformers", "gpu_vision")],
)
def test_what_needs_something_that_is_missing_is_left_out_with_the_reason(
    fault: str,
    name: str,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if fault == "cores":
        monkeypatch.setattr(everything, "count_cores", lambda: 1)
    else:
        monkeypatch.setattr(everything, "find_spec", lambda package: package != fault)
    assert everything.main(["--quick", "--platform", "mine.toml"]) == 0
    assert name not in ran
    assert f"{name} is left out: it needs " in capsys.readouterr().out


def test_the_time_is_told_in_total_and_before_each(
    ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert everything.main(["--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = everything._QUICK_CALIBRATION
    for name in ran[1:]:
        benchmark = find_benchmark(name)
        seconds = benchmark.quick_seconds or benchmark.seconds
        total += seconds
        assert f"{name}, about {format_duration(seconds)}: {benchmark.question}" in lines
    (said,) = [line for line in lines if "in total" in line]
    assert (
        said == f"{len(ran) - 1} benchmarks, about {format_duration(total)} in total on two cores"
    )


def test_a_benchmark_that_fails_ends_the_run(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(module: str) -> Any:
        return SimpleNamespace(main=lambda words: 2)

    monkeypatch.setattr(everything, "import_module", load)
    assert everything.main(["--quick", "--platform", "mine.toml"]) == 2
