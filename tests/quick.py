"""Checks that a change touches, in a minute and a half: `make quick`, or

    python -m tests.quick [FILE ...]

Without files it takes those that differ from the last commit; if none does, those of the last commit.

Always run are types, the structure of the code, and changed tests and notebooks. Of the kept answers
those parts run that the room of a changed module makes. Then come doctests of changed modules and test
files that reach them: those named after one first, then those that import one by name, then those that
import what imports it, and so on; the cheap ones of each distance first, until the time is used up. A
single test that alone takes long is left out of its file, and so are tests that measure or start ranks.
What is left out is printed: `make test` runs everything.
"""

import ast
import json
import subprocess
import sys
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
#: Processor time for chosen test files, that of a file which never ran, and the longest single test [s].
BUDGET, UNKNOWN, LONG = 52.0, 10.0, 15.0
#: Distance of the tests that are named after a changed module: before all that import it [imports].
_NAMED_AFTER = 0.5


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
    left_out: list[str]  # files for which no time is left
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
    # tests named after a changed module come before others that import it
    named = {f"tests/test_{path.stem}.py" for path in changed}
    near |= {name: min(near[name], _NAMED_AFTER) for name in named & {*near}}
    reached = {name for name in modules if any(find_distance(t, {name}) is not None for t in tests)}
    selection.untested = sorted(
        name for name in modules - reached if name.startswith("perfkit.") and name in list_modules()
    )

    costs = {}
    for name in near:
        single = durations.get(name, {})
        long = [test for test, seconds in single.items() if seconds > LONG and near[name] > 0]
        costs[name] = sum(s for t, s in single.items() if t not in long) if single else UNKNOWN
    for name in sorted(near, key=lambda name: (near[name], costs[name])):
        if name in selection.files:
            continue
        # a changed test runs whatever it takes
        if spent + costs[name] > BUDGET and near[name] > 0:
            selection.left_out.append(name)
            continue
        spent += costs[name]
        selection.files.append(name)
        single = durations.get(name, {})
        selection.deselected += [t for t, s in single.items() if s > LONG and near[name] > 0]
        if not single and name.startswith("tests"):
            selection.unmeasured.append(name)
    # the longest first, so that the last process does not begin it when others have ended
    selection.files.sort(key=lambda name: -sum(durations.get(name, {}).values()))
    return selection


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
            beside.append("tests/test_benchmarks.py")
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
        (f"single tests of more than {LONG:.0f} s, left for `make test`", selection.deselected),
        (f"left for `make test`, as {BUDGET:.0f} s are used up", selection.left_out),
        (f"never run here, {UNKNOWN:.0f} s assumed for each", selection.unmeasured),
        ("no test imports", selection.untested),
    ):
        if names:
            print(f"{title}: {', '.join(name.removeprefix('tests/') for name in names)}")
    sys.stdout.flush()


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
    return int(bool(tests.returncode) or bool(types.returncode))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
