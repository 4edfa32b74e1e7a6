"""Checks that a change touches, in a minute and a half: `make quick`, or

    python -m tests.quick [FILE ...]

Without files it takes those that differ from the last commit; if none does, those of the last commit.

Always run are types, the structure of the code, and changed tests and notebooks. Of the kept answers
those parts run that the room of a changed module makes. Then come doctests of changed modules and test
files that reach them: first the guards of the room (`GUARDS`), which fail where a prediction goes wrong,
then those named after a changed module, then those that import one by name, then those that import what
imports it, and so on; the cheap ones of each distance first, until the time is used up. A single test
that alone takes long is left out of its file, and so are tests that measure or start ranks; of a guard,
the cheapest tests run. The last line says what was not run: `make test` runs everything.
"""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Processor time that each test took when it was last run, written by tests/conftest.py.
DURATIONS = ROOT / ".pytest_cache" / "durations-of-tests.json"
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
BUDGET, UNKNOWN, UNKNOWN_DOCTESTS, LONG, MOST_OF_A_GUARD = 52.0, 10.0, 1.0, 15.0, 13.0
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
    changed += _ask_git("ls-files", "--others", "--exclude-standard")
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
    return {name_module(path): path for path in (file.relative_to(ROOT) for file in sorted(files))}


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
    return {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def find_distance(start: str, goals: set[str]) -> int | None:
    """Imports between a module and the nearest goal; none if it reaches no goal."""
    seen, edge, distance = {start}, {start}, 0
    while edge:
        if edge & goals:
            return distance
        edge = {name for module in edge if module != "perfkit" for name in list_imports(module)}
        edge -= seen
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
    """Seconds of each test of each file, as far as they ran here."""
    durations: dict[str, dict[str, float]] = {}
    if DURATIONS.exists():
        for test, seconds in json.loads(DURATIONS.read_text(encoding="utf-8")).items():
            durations.setdefault(test.partition("::")[0], {})[test] = seconds
    return durations


def choose(changed: Sequence[Path], durations: Mapping[str, Mapping[str, float]]) -> Selection:
    """What runs after a change."""
    modules = {
        name_module(path)
        for path in changed
        if path.suffix == ".py" and path.parts[0] in ("perfkit", "tests")
    }
    rooms = {name.split(".")[1] for name in modules if name.startswith("perfkit.")}
    kept = [path.stem for path in changed if path.parts[:2] == ("tests", "golden")]
    if any(path.parts[0] == "reference_data" for path in changed):
        kept += ANSWERS
    wanted = {part for room in rooms for part in GOLDEN_PARTS.get(room, ())} | {*kept}
    all_parts = dict.fromkeys(part for parts in GOLDEN_PARTS.values() for part in parts)
    selection = Selection(
        [STRUCTURE, GOLDEN], [p for p in all_parts if p in wanted], [], [], [], []
    )
    spent = sum(durations.get(GOLDEN, {}).get(name_part(part), 0.0) for part in selection.parts)

    tests = {name: path for name, path in list_modules().items() if path.match("tests/test_*.py")}
    distances = {str(path): find_distance(name, modules) for name, path in tests.items()}
    near: dict[str, float] = {
        name: distance for name, distance in distances.items() if distance is not None
    }
    # what changed itself, and what belongs to it, comes before all that imports it
    near |= dict.fromkeys(_list_beside(changed), 0)
    # tests named after a changed module come before others that import it, and guards before them
    named = {f"tests/test_{path.stem}.py" for path in changed}
    guards = {guard for room in rooms for guard in GUARDS.get(room, ())}
    near |= {name: min(near[name], _NAMED_AFTER) for name in named & {*near}}
    near |= {name: min(near[name], _GUARDS_A_ROOM) for name in guards & {*near}}
    reached = {name for name in modules if any(find_distance(t, {name}) is not None for t in tests)}
    selection.untested = sorted(
        name for name in modules - reached if name.startswith("perfkit.") and name in list_modules()
    )

    costs: dict[str, float] = {}
    long: dict[str, list[str]] = {}
    for name in near:
        tests_of_file = durations.get(name, {})
        if near[name] == 0:
            long[name] = []  # a changed test runs whatever it takes
        elif name in guards:
            long[name] = _list_beyond(tests_of_file, MOST_OF_A_GUARD)
        else:
            long[name] = [test for test, seconds in tests_of_file.items() if seconds > LONG]
        if tests_of_file:
            costs[name] = sum(s for test, s in tests_of_file.items() if test not in long[name])
        else:
            costs[name] = UNKNOWN if name.startswith("tests") else UNKNOWN_DOCTESTS
    for name in sorted(near, key=lambda name: (near[name], costs[name])):
        if name in selection.files:
            continue
        if spent + costs[name] > BUDGET and near[name] > 0:
            selection.left_out.append(name)
            continue
        spent += costs[name]
        selection.files.append(name)
        selection.deselected += long[name]
        if name not in durations and name.startswith("tests"):
            selection.unmeasured.append(name)
    # the longest first, so that the last process does not begin it when others have ended
    selection.files.sort(key=lambda name: -sum(durations.get(name, {}).values()))
    return selection


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
    return f"{GOLDEN}::test_numbers_are_those_that_were_kept[{part}]"


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
