"""What a release has to pass, outside of `make test`: `make release-check`, or

    python -m tests.release [--pythons python3.11 python3.12 ...] [--skip-tests]

1. The source archive and the wheel are built; a wheel built from the archive holds the same files.
2. Each interpreter installs the wheel into an empty environment, imports it, predicts, and finds the
   reference data; then it runs the tests that need no torch, from the source archive.
3. The oldest interpreter does the same with the lowest versions that pyproject.toml allows.

It needs `uv`, which makes environments in seconds and resolves lowest versions.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
#: What the tests need beside perfkit, and no torch.
TEST_PACKAGES = (
    "hypothesis",
    "import-linter",
    "ipykernel",
    "nbclient",
    "nbformat",
    "nbval",
    "numpydoc",
    "pytest",
    "pytest-xdist",
)
#: Mark of tests that read or build the checkout: `make test` runs them, an installed wheel has none.
NEEDS_CHECKOUT = "repository"
#: Predicts and finds reference data, from any folder.
TRIAL = """
import perfkit as pk
model = pk.Transformer.bert(batch=8, dtype="bf16")
assert pk.predict(model, "h100-sxm-8", ranks=8).time > 0
assert len(pk.platforms()) > 10
print("perfkit", pk.__version__, "at", pk.__file__)
"""


def run(*command: str | Path, where: Path, **environment: str) -> None:
    """Run a command and raise an error if it fails."""
    print("$", *command, flush=True)
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*map(str, command)], cwd=where, check=True, env=settings | environment)


def build(folder: Path) -> tuple[Path, Path]:
    """The source archive and the wheel; the archive gives the same wheel."""
    folder.mkdir()
    run("uv", "build", "--out-dir", folder, ROOT, where=folder)
    [archive], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    again = folder / "again"
    run("uv", "build", "--wheel", "--out-dir", again, archive, where=folder)
    [second] = again.glob("*.whl")
    if list_files(wheel) != list_files(second):
        raise SystemExit(f"{archive.name} and the checkout give different wheels")
    print(f"{archive.name} and {wheel.name}: {len(list_files(wheel))} files", flush=True)
    return archive, wheel


def list_files(wheel: Path) -> list[str]:
    """Names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as held:
        return sorted(held.namelist())


def list_wanted(wheel: Path, *, lowest: bool) -> list[str]:
    """What is installed: the wheel, and for lowest versions all that it needs by name, as those of
    the wheel alone are not direct and would be the newest."""
    wanted = [str(wheel)]
    if lowest:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        wanted += project["dependencies"]
    return wanted


def try_wheel(wheel: Path, python: str, folder: Path, *, lowest: bool) -> Path:
    """Install the wheel into an empty environment, and predict; returns its interpreter."""
    run("uv", "venv", "--quiet", "--python", python, folder, where=ROOT)
    inside = folder / "bin" / "python"
    resolution = "lowest-direct" if lowest else "highest"
    run(
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        inside,
        "--resolution",
        resolution,
        *list_wanted(wheel, lowest=lowest),
        where=ROOT,
    )
    run(inside, "-c", TRIAL, where=folder)
    return inside


def run_tests(inside: Path, archive: Path, folder: Path) -> bool:
    """Run the tests that need no torch against the installed wheel, and return whether all
    passed."""
    run("uv", "pip", "install", "--quiet", "--python", inside, *TEST_PACKAGES, where=ROOT)
    with tarfile.open(archive) as held:
        held.extractall(folder, filter="data")
    [source] = folder.glob("perfkit-*")
    shutil.rmtree(source / "perfkit")  # the installed one counts
    command = [inside, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile"]
    try:
        run(*command, "-m", f"not serial and not {NEEDS_CHECKOUT}", "tests", where=source)
    except subprocess.CalledProcessError:
        return False
    return True


def list_working(names: Sequence[str]) -> list[str]:
    """Interpreters that run here; the others are named."""
    working = []
    for name in names:
        done = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            working.append(name)
        else:
            print(f"{name} does not run here and is left out: {done.stderr.strip()[:200]}")
    return working


def main() -> int:
    """Run all checks; tests that fail on one interpreter do not keep the others from running."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="interpreters to try")
    parser.add_argument("--skip-tests", action="store_true", help="install and predict only")
    given = parser.parse_args()
    pythons = list_working([name for name in given.pythons if shutil.which(name)])
    if not pythons:
        raise SystemExit(f"none of {', '.join(given.pythons)} runs here; name one by --pythons")
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        archive, wheel = build(folder / "built")
        trials = [(name, False) for name in pythons] + [(pythons[0], True)]
        failed = []
        for number, (python, lowest) in enumerate(trials):
            inside = try_wheel(wheel, python, folder / f"environment-{number}", lowest=lowest)
            if given.skip_tests or lowest:
                continue
            print(f"tests on {python}", flush=True)
            if not run_tests(inside, archive, folder / f"tests-{number}"):
                failed.append(python)
    if failed:
        raise SystemExit(f"tests failed on {', '.join(failed)}")
    print("release checks passed:", ", ".join(pythons), "and lowest versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
