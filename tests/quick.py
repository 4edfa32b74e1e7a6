"""Checks that a change touches, in a minute and a half: `make quick`, or

    python -m tests.quick [FILE ...]

Without files it takes those that differ from the last commit; if none does, those of the last commit.
Chosen are the tests that import a changed module by name, doctests of changed modules, changed tests and
notebooks, and always the structure of the code and the golden numbers that take seconds; mypy runs beside
them. Tests that measure or start ranks are left out, and so are files whose last known duration does not
fit into the time any more, those that import most modules first. What is left out is printed:
`make test` runs everything.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Seconds that each test file took when it was last run, written by tests/conftest.py.
DURATIONS = ROOT / ".pytest_cache" / "durations.json"
#: Test files that always run, and golden parts that take seconds.
ALWAYS = ["tests/test_structure.py", "tests/test_golden.py"]
GOLDEN = "predictions or plans or primitives"
#: Processor time for chosen test files, and that of a file which never ran [s].
MOST, USUAL = 100.0, 10.0


def list_changed() -> list[Path]:
    """Files that differ from the last commit, or those of the last commit."""
    changed = _ask_git("diff", "--name-only", "HEAD", "--diff-filter=d")
    changed += _ask_git("ls-files", "--others", "--exclude-standard")
    if not changed:
        changed = _ask_git("diff", "--name-only", "HEAD~1", "HEAD", "--diff-filter=d")
    return [Path(name) for name in changed]


def _ask_git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()


def list_imports(path: Path) -> set[str]:
    """Modules of perfkit that a file imports by name."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("perfkit.")}


def choose_tests(changed: Sequence[Path]) -> list[str]:
    """Test files that a change touches, those of fewest imports first."""
    modules = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in changed
        if path.parts[0] == "perfkit" and path.suffix == ".py"
    }
    imports = {
        path.relative_to(ROOT): list_imports(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").glob("test_*.py"))
    }
    chosen = [path for path, names in imports.items() if names & modules]
    chosen.sort(key=lambda path: len(imports[path]))
    changed_tests = [path for path in changed if path in imports]
    beside = _find_beside(changed)
    ordered = dict.fromkeys([*map(str, changed_tests), *beside, *map(str, chosen)])
    return [name for name in ordered if name not in ALWAYS]


def _find_beside(changed: Sequence[Path]) -> list[str]:
    """Doctests, notebooks and tests of texts that belong to changed files."""
    beside = []
    for path in changed:
        if path.parts[0] == "perfkit" and path.suffix == ".py":
            beside.append(str(path))
        elif path.suffix == ".ipynb":
            beside += [str(path), "tests/test_notebooks.py"]
        elif path.name == "README.md":
            beside.append("tests/test_readme.py")
        elif path.parts[0] == "docs":
            beside += ["tests/test_docs.py", "tests/test_recipes.py"]
        elif path.parts[0] == "benchmarks":
            beside.append("tests/test_benchmarks.py")
    return beside


def fit_into_time(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Files whose durations fit into `MOST`, and the others."""
    known = {}
    if DURATIONS.exists():
        known = json.loads(DURATIONS.read_text(encoding="utf-8"))
    total, taken, left = 0.0, [], []
    for name in names:
        duration = known.get(name, USUAL)
        if total + duration > MOST:
            left.append(name)
        else:
            taken.append(name)
            total += duration
    return taken, left


def main(words: Sequence[str]) -> int:
    """Run the checks; 0 if all passed."""
    changed = [Path(word) for word in words] or list_changed()
    taken, left = fit_into_time(choose_tests(changed))
    print(f"changed: {', '.join(map(str, changed))}")
    print(f"tests: {', '.join([*ALWAYS, *taken])}")
    if left:
        print(f"left out, for `make test`: {', '.join(left)}")
    types = subprocess.Popen([sys.executable, "-m", "mypy"], cwd=ROOT)
    marks = ["-m", "not serial", "-k", f"not numbers_are_those or {GOLDEN}"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", *marks]
    tests = subprocess.run([*pytest, *ALWAYS, *taken], cwd=ROOT).returncode
    return int(bool(tests) or bool(types.wait()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
