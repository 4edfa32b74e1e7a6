"""The check of a release installs what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import release
from tests.test_structure import PYPROJECT, list_requirements

pytestmark = pytest.mark.repository
WHEEL = Path("perfkit.whl")


def test_lowest_versions_are_those_of_all_that_is_needed() -> None:
    assert release.list_wanted(WHEEL, lowest=False) == ["perfkit.whl"]
    wanted = release.list_wanted(WHEEL, lowest=True)
    assert wanted[0] == "perfkit.whl"
    assert "numpy>=2.1" in wanted
    needed = {requirement.name for requirement in list_requirements(PYPROJECT)}
    assert {text.split(">")[0] for text in wanted[1:]} <= needed


def test_tests_that_need_the_checkout_have_the_mark_that_is_left_out() -> None:
    assert f'"{release.NEEDS_CHECKOUT}: ' in PYPROJECT
    marked = {
        path.name
        for path in (release.ROOT / "tests").glob("test_*.py")
        if f"mark.{release.NEEDS_CHECKOUT}" in path.read_text(encoding="utf-8")
    }
    assert {"test_structure.py", "test_docs.py", "test_quick.py", "test_resources.py"} <= marked


def test_every_test_is_collected_without_torch() -> None:
    """Where there is no torch, a test is skipped with a reason; none fails to import."""
    code = (
        "import sys, pytest\n"
        "sys.modules['torch'] = None\n"
        f"marks = 'not serial and not {release.NEEDS_CHECKOUT}'\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', '-m', marks, 'tests']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=release.ROOT, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
