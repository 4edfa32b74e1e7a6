"""Checks that a change touches, in a minute and a half on two quiet cores: `make quick`, or

    python -m tests.quick [FILE ...]

Without files it takes those that differ from the last commit; if none does, those of the last commit.

Always run are types, the structure of the code, and changed tests and notebooks. Of the kept answers
those parts run that the room of a changed module makes. Then come doctests of changed modules and test
files that reach them: first the guards of the room (`GUARDS`), which fail where a prediction goes wrong,
then those named after a changed module, then those that import one by name, then those that import what
imports it, and so on; the cheap ones of each distance first, until the time is used up. A single test
that alone takes long is left out of its file, and so are tests that measure or start ranks; of a guard,
the cheapest tests run. The last line says what was not run: `make test` runs everything. What a file
takes that never ran here stands in tests/durations.json, which is written after `make test` by

    python -m tests.quick --keep
"""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: Processor time that each test took when it was last run, written by tests/conftest.py.
DURATIONS = ROOT / ".pytest_cache" / "durations-of-tests.json"
#: The same of all files where they were run last for this table: tests of at least `NAMED` seconds by
#: name, and all others of a file together, under its name and `::`.
USUAL_DURATIONS = ROOT / "tests" / "durations.json"
NAMED = 0.3
#: Files that take longest, the longest first: no process begins one of them when all else is done.
LONGEST = (
    "tests/test_sharding.py",
    "tests/test_cluster.py",
    "tests/test_notebooks.py",
    "tests/test_strategies.py",
    "tests/test_shardings.py",
    "tests/test_step_graph.py",
    "tests/test_golden.py",
    "tests/test_recorded_notes.py",
    "tests/test_scale.py",
    "tests/test_exploration.py",
    "notebooks/12_calibrate_from_your_runs.ipynb",
    "tests/test_pictures.py",
    "tests/test_recipes.py",
    "tests/test_cli.py",
    "tests/test_replay.py",
    "tests/test_reference.py",
    "tests/test_doubts.py",
    "notebooks/16_any_module.ipynb",
    "tests/test_layer_forms.py",
    "tests/test_checkpoints.py",
    "tests/test_recording.py",
    "tests/test_launched.py",
    "notebooks/17_read_a_trace.ipynb",
    "tests/test_readme.py",
    "tests/test_structure.py",
    "notebooks/15_pick_a_sharding.ipynb",
)
STRUCTURE, GOLDEN = "tests/test_structure.py", "tests/test_golden.py"
#: Kept answers that a room makes; see tests/golden/answers.py.
ANSWERS = ("predictions", "plans", "primitives")
GOLDEN_PARTS: Mapping[str, tuple[str, ...]] = {
    "ground": ANSWERS,
    "models": ANSWERS,
    "workloads": ANSWERS,
    "platform": ANSWERS,
    "prediction": ANSWERS,
    "sharding": ("plans",),
    "readers": ("readers",),
    "recording": ("captures",),
    "fitting": ("fits", "primitives"),
    "calibration": ("fits",),
}
#: Test file of a part of the kept answers that tests/test_golden.py does not compare.
FILE_OF_PART: Mapping[str, str] = {"fits": "tests/test_reference.py"}
#: Tests that fail first where a room computes something wrong, the strongest first: closed forms
#: beside predictions, builders beside programs and strategies, fits beside made-up measurements.
GUARDS: Mapping[str, tuple[str, ...]] = {
    "ground": ("tests/test_numbers.py",),
    "models": ("tests/test_taught_forms.py", "tests/test_forms.py"),
    "fitting": ("tests/test_fitting_kernels.py", "tests/test_fitting_collectives.py"),
    "workloads": ("tests/test_strategies.py", "tests/test_twins.py"),
    "recording": ("tests/test_twins.py",),
    "platform": (
        "tests/test_kernel_times.py",
        "tests/test_stand_ins.py",
        "tests/test_chosen_algorithms.py",
    ),
    "prediction": (
        "tests/test_strategies.py",
        "tests/test_simulation.py",
        "tests/test_prediction.py",
        "tests/test_optimizers.py",
    ),
    "sharding": ("tests/test_sharding.py",),
    "calibration": ("tests/test_calibration.py",),
    "commands": ("tests/test_cli.py",),
}
#: Processor time for chosen files, that of a test file and of doctests that never ran, the longest
#: single test, and the most of one guard, of which the cheapest tests run [s].
BUDGET = 52.0
UNKNOWN = 10.0
UNKNOWN_DOCTESTS = 1.0
LONG = 15.0
MOST_OF_A_GUARD = 13.0
#: Distance of guards, and of tests that are named after a changed module: before all that import it
#: [imports].
_GUARDS_A_ROOM, _NAMED_AFTER = 0.25, 0.5


class ChangesUnknownError(Exception):
    """Git does not say what changed."""


# What changed.


def list_changed() -> list[Path]:
    """Files that differ from the last commit, or those of the last commit."""
    _ask_git("rev-parse", "--verify", "HEAD")  # says it where there is no repository
    changed = _ask_git("diff", "--name-only", "HEAD")
    untracked = _ask_git("ls-files", "--others", "--exclude-standard")
    changed += [name for name in untracked if not (ROOT / name).is_symlink()]
    if not changed:
        subject = " ".join(_ask_git("log", "-1", "--format=%h %s"))
        print(f"nothing differs from the last commit; its own files are checked: {subject}")
        changed = _ask_git("show", "--format=", "--name-only", "--first-parent", "HEAD")
    return [Path(name) for name in changed]


def _ask_git(*words: str) -> list[str]:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError as error:
        raise ChangesUnknownError("there is no git here") from error
    if done.returncode:
        raise ChangesUnknownError(done.stderr.strip().splitlines()[0])
    return done.stdout.splitlines()


def read_names(words: Iterable[str]) -> list[Path]:
    """Files named on the command line, relative to the repository."""
    paths = []
    for word in words:
        path = Path(word).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            raise SystemExit(f"{word} is no file of this repository; name one, or none at all")
        paths.append(path.relative_to(ROOT))
    return paths


# Who imports whom.


def name_module(path: Path) -> str:
    """Dotted name of a Python file."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def list_modules() -> dict[str, Path]:
    """Modules of the package and of the tests."""
    files = [*(ROOT / "perfkit").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    paths = [file.relative_to(ROOT) for file in sorted(files)]
    return {name_module(path): path for path in paths}


@cache
def list_imports(module: str) -> frozenset[str]:
    """Modules that a module imports, anywhere in it; `pk.predict` counts as the module that has it."""
    tree = ast.parse((ROOT / list_modules()[module]).read_text(encoding="utf-8"))
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("pk", "perfkit"):
            names.add(f"{_read_facade().get(node.attr, 'perfkit')}.{node.attr}")
    found = {_find_module(name) for name in names if name.startswith(("perfkit.", "tests."))}
    return frozenset(found - {"perfkit", module})


def _find_module(name: str) -> str:
    while name not in list_modules() and "." in name:
        name = name.rpartition(".")[0]
    return name


@cache
def _read_facade() -> dict[str, str]:
    """Module of each public name of the package."""
    tree = ast.parse((ROOT / "perfkit" / "__init__.py").read_text(encoding="utf-8"))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                modules[alias.name] = str(node.module)
    return modules


def find_distance(start: str, goals: set[str]) -> int | None:
    """Imports between a module and the nearest goal; none if it reaches no goal."""
    seen = {start}
    edge = {start}
    distance = 0
    while edge:
        if edge & goals:
            return distance
        imported = set[str]()
        for module in edge - {"perfkit"}:
            imported |= list_imports(module)
        edge = imported - seen
        seen |= edge
        distance += 1
    return None


# What runs.


@dataclass
class Selection:
    """What a change asks for."""

    files: list[str]  # test files, notebooks and modules with doctests that run
    parts: list[str]  # of the kept answers
    deselected: list[str]  # single tests that take too long
    left_out: list[str]  # files that reach a changed module, and for which no time is left
    unmeasured: list[str]  # files whose duration is a guess
    untested: list[str]  # changed modules that no test file imports, nor anything it imports


def read_durations() -> dict[str, dict[str, float]]:
    """Seconds of each test of each file, as far as they ran here; else those of the table."""
    durations: dict[str, dict[str, float]] = json.loads(USUAL_DURATIONS.read_text(encoding="utf-8"))
    for file, measured in _read_measured().items():
        # a long test that was left out here is still one
        usual = durations.get(file, {})
        long = {test: seconds for test, seconds in usual.items() if not test.endswith("::")}
        durations[file] = long | measured
    return durations


def _read_measured() -> dict[str, dict[str, float]]:
    """Seconds of each test of each file that ran here."""
    durations: dict[str, dict[str, float]] = {}
    if DURATIONS.exists():
        for test, seconds in json.loads(DURATIONS.read_text(encoding="utf-8")).items():
            durations.setdefault(test.partition("::")[0], {})[test] = seconds
    return durations


def keep_durations() -> None:
    """Write the table of durations again, from what ran here; files that did not run stay."""
    durations = read_durations()
    kept: dict[str, dict[str, float]] = {}
    for file in sorted(durations):
        if not (ROOT / file).exists():
            continue
        long = {test: time for test, time in durations[file].items() if time >= NAMED}
        rest = sum(durations[file].values()) - sum(long.values())
        kept[file] = {f"{file}::": round(rest, 1)}
        for test in sorted(long):
            kept[file][test] = round(long[test], 1)
    USUAL_DURATIONS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")


def choose(changed: Sequence[Path], durations: Mapping[str, Mapping[str, float]]) -> Selection:
    """What runs after a change."""
    modules = set()
    for path in changed:
        if path.suffix == ".py" and path.parts[0] in ("perfkit", "tests"):
            modules.add(name_module(path))
    rooms = {name.split(".")[1] for name in modules if name.startswith("perfkit.")}
    parts = choose_parts(changed, rooms)
    near = rank_files(changed, modules, rooms)
    near |= {FILE_OF_PART[part]: 0 for part in parts if part in FILE_OF_PART}
    costs = price_files(near, list_guards(rooms), durations)

    selection = Selection(
        files=[STRUCTURE, GOLDEN],
        parts=parts,
        deselected=[],
        left_out=[],
        unmeasured=[],
        untested=list_untested(modules),
    )
    spent = sum(durations.get(GOLDEN, {}).get(name_part(part), 0.0) for part in parts)
    for name in sorted(near, key=lambda name: (near[name], costs[name].seconds)):
        if name in selection.files:
            continue
        if spent + costs[name].seconds > BUDGET and near[name] > 0:
            selection.left_out.append(name)
            continue
        spent += costs[name].seconds
        selection.files.append(name)
        selection.deselected += costs[name].too_long
        if name not in durations and name.startswith("tests"):
            selection.unmeasured.append(name)
    # the longest first, so that the last process does not begin it when others have ended
    selection.files.sort(key=lambda name: -sum(durations.get(name, {}).values()))
    return selection


def choose_parts(changed: Sequence[Path], rooms: set[str]) -> list[str]:
    """Parts of the kept answers that the rooms of a change make, or that are changed themselves."""
    wanted = {path.stem for path in changed if path.parts[:2] == ("tests", "golden")}
    if any(path.parts[0] == "reference_data" for path in changed):
        wanted |= {*ANSWERS}
    for room in rooms:
        wanted |= {*GOLDEN_PARTS.get(room, ())}
    all_parts = dict.fromkeys(chain.from_iterable(GOLDEN_PARTS.values()))
    return [part for part in all_parts if part in wanted]


def list_tests() -> dict[str, str]:
    """Test files by their modules."""
    tests = {}
    for module, path in list_modules().items():
        if path.match("tests/test_*.py"):
            tests[module] = str(path)
    return tests


def list_guards(rooms: set[str]) -> set[str]:
    """Test files that fail first where one of the rooms goes wrong."""
    guards = set[str]()
    for room in rooms:
        guards |= {*GUARDS.get(room, ())}
    return guards


def rank_files(changed: Sequence[Path], modules: set[str], rooms: set[str]) -> dict[str, float]:
    """How near each file is to a change that it reaches: what changed itself and what belongs to it
    first, then guards, then tests named after a changed module, then all others that import it."""
    near: dict[str, float] = {}
    for module, name in list_tests().items():
        distance = find_distance(module, modules)
        if distance is not None:
            near[name] = distance
    near |= dict.fromkeys(_list_beside(changed), 0)
    named = {f"tests/test_{path.stem}.py" for path in changed}
    for name in near:
        if name in named:
            near[name] = min(near[name], _NAMED_AFTER)
        if name in list_guards(rooms):
            near[name] = min(near[name], _GUARDS_A_ROOM)
    return near


def list_untested(modules: set[str]) -> list[str]:
    """Changed modules of the package that no test file imports, nor anything it imports."""
    untested = []
    for name in sorted(modules & {*list_modules()}):
        is_reached = any(find_distance(test, {name}) is not None for test in list_tests())
        if name.startswith("perfkit.") and not is_reached:
            untested.append(name)
    return untested


class Cost(NamedTuple):
    """What a file takes [s] without the tests that alone take too long."""

    seconds: float
    too_long: list[str]


def price_files(
    near: Mapping[str, float], guards: set[str], durations: Mapping[str, Mapping[str, float]]
) -> dict[str, Cost]:
    """What each file takes; a changed test runs whatever it takes."""
    costs = {}
    for name, distance in near.items():
        seconds_of_tests = durations.get(name, {})
        if distance == 0:
            too_long = []
        elif name in guards:
            too_long = _list_beyond(seconds_of_tests, MOST_OF_A_GUARD)
        else:
            too_long = [test for test, seconds in seconds_of_tests.items() if seconds > LONG]
        too_long = [test for test in too_long if not test.endswith("::")]
        if seconds_of_tests:
            left = seconds_of_tests.keys() - {*too_long}
            seconds = sum(seconds_of_tests[test] for test in left)
        else:
            seconds = UNKNOWN if name.startswith("tests") else UNKNOWN_DOCTESTS
        costs[name] = Cost(seconds, too_long)
    return costs


def _list_beyond(seconds: Mapping[str, float], most: float) -> list[str]:
    """Tests of a file that are too many for some time, if the cheapest run first."""
    beyond, spent = [], 0.0
    for test in sorted(seconds, key=lambda test: seconds[test]):
        spent += seconds[test]
        if spent > most:
            beyond.append(test)
    return beyond


def name_part(part: str) -> str:
    """Test of one part of the kept answers."""
    return f"{FILE_OF_PART.get(part, GOLDEN)}::test_numbers_are_those_that_were_kept[{part}]"


def _list_beside(changed: Sequence[Path]) -> list[str]:
    """Doctests, notebooks and tests of texts and data that belong to changed files."""
    beside = []
    for path in changed:
        top = path.parts[0]
        if not (ROOT / path).exists():
            continue
        if top == "perfkit" and path.suffix == ".py":
            beside.append(str(path))
        elif path.suffix == ".ipynb":
            beside += [str(path), "tests/test_notebooks.py"]
        elif path.name == "README.md" and len(path.parts) == 1:
            beside.append("tests/test_readme.py")
        elif top == "docs":
            beside += ["tests/test_docs.py", "tests/test_recipes.py"]
        elif top == "benchmarks":
            beside += ["tests/test_benchmarks.py", "tests/test_benchmark_catalogue.py"]
        elif top == "reference_data":
            beside += ["tests/test_reference.py", "tests/test_gallery.py"]
        elif path.parts[:2] == ("tests", "fuzz"):
            beside.append("tests/test_fuzz.py")
    return beside


def tell(changed: Sequence[Path], selection: Selection) -> None:
    """Say what runs, what does not, and why."""
    print(f"changed: {', '.join(map(str, changed))}")
    print(f"kept answers: {', '.join(selection.parts) or 'none, as no change makes them'}")
    print(f"tests: {', '.join(selection.files)}")
    for title, names in (
        (f"never run here, {UNKNOWN:.0f} s assumed for each", selection.unmeasured),
        ("no test imports", selection.untested),
    ):
        if names:
            print(f"{title}: {_join(names)}")
    sys.stdout.flush()


def say_what_was_not_run(selection: Selection) -> str:
    """One line: what reaches a changed module and was not run."""
    not_run = []
    if selection.left_out:
        not_run.append(f"{len(selection.left_out)} test files ({_join(selection.left_out)})")
    if selection.deselected:
        files = Counter(test.partition("::")[0] for test in selection.deselected)
        longest = [f"{count} of {name}" for name, count in files.items()]
        not_run.append(f"the longest tests ({_join(longest)})")
    not_run.append("tests marked serial")
    return f"NOT run, though they reach what changed: {', '.join(not_run)}; `make test` runs them"


def _join(names: Iterable[str]) -> str:
    return ", ".join(name.replace("tests/", "") for name in names)


def main(words: Sequence[str]) -> int:
    """Run the checks; 0 if all passed."""
    if [*words] == ["--keep"]:
        keep_durations()
        return 0
    try:
        changed = read_names(words) or list_changed()
    except ChangesUnknownError as error:
        print(f"{error}; name what changed: python -m tests.quick FILE ...", file=sys.stderr)
        return 2
    selection = choose(changed, read_durations())
    tell(changed, selection)
    types = subprocess.Popen(
        [sys.executable, "-m", "mypy"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    parts = [f"kept[{part}]" for part in selection.parts]
    chosen = " or ".join(["not numbers_are_those", *parts])
    marks = ["-m", "not serial", "-k", chosen]
    marks += [f"--deselect={test}" for test in selection.deselected]
    spread = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *spread, *marks, *selection.files], cwd=ROOT
    )
    said, _ = types.communicate()
    print("mypy:", said.decode().strip())
    print(say_what_was_not_run(selection))
    return int(bool(tests.returncode) or bool(types.returncode))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
