"""Reference data is found in a checkout, a wheel and an editable install; readers name the place of
a fault."""

import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import field

from perfkit.calibration.checks import Comparison
from perfkit.calibration.study import Trials
from perfkit.ground.files import LARGEST_TEXT, find_reference, reading
from perfkit.ground.schemas import Table, convert
from perfkit.ground.targets import write_text
from perfkit.ground.units import check_type, coerce
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.workloads.placement import Plan

ROOT = Path(__file__).resolve().parent.parent
H100 = Path("reference_data", "platforms", "h100-sxm-8.toml")
QUESTION = "from perfkit.ground.files import find_reference; print(find_reference('platforms', 'h100-sxm-8.toml'))"


def ask(home: Path, *, before: str = "") -> Path:
    """Ask a fresh interpreter, which runs elsewhere and sees perfkit only through `home`, where the
    gallery lies.

    Without site packages other than NumPy's: an editable perfkit of the environment that runs the
    tests comes last.
    """
    packages = str(Path(np.__file__).parents[1])
    code = f"import sys; sys.path[:] = [{str(home)!r}, *sys.path, {packages!r}]; {before}{QUESTION}"
    done = subprocess.run(
        [sys.executable, "-ISc", code], capture_output=True, text=True, check=True, cwd=home
    )
    return Path(done.stdout.strip())


@pytest.mark.repository
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_finds_its_own_data(kind: str, tmp_path: Path) -> None:
    """A copy of the checkout, built as pip does and unpacked as an installer would."""
    source, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "build")
    )
    code = f"from hatchling.build import build_{kind}; print(build_{kind}('..'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=source
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as archive:
        archive.extractall(site)
    if kind == "editable":
        assert not (site / "perfkit" / "ground" / "files.py").exists()
        assert ask(site, before=f"import site; site.addsitedir({str(site)!r}); ") == source / H100
        return
    shutil.rmtree(source)
    assert ask(site) == site / "perfkit" / H100
    names = {path.name for path in find_reference("platforms").iterdir()}
    assert {path.name for path in (site / "perfkit/reference_data/platforms").iterdir()} == names


@pytest.mark.repository
def test_a_checkout_finds_its_data_and_names_what_is_missing(tmp_path: Path) -> None:
    assert ask(ROOT) == ROOT / H100
    assert not (ROOT / "perfkit" / "reference_data").exists(), "a second copy would hide the first"
    with pytest.raises(
        FileNotFoundError, match=r"no platforms/none\.toml; its home is .*reference_data; install"
    ):
        find_reference("platforms", "none.toml")
    (tmp_path / "reference_data").mkdir()  # somebody else's
    shutil.copytree(ROOT / "perfkit" / "ground", tmp_path / "perfkit" / "ground")
    shutil.copy(ROOT / "perfkit" / "__init__.py", tmp_path / "perfkit")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        ask(tmp_path)
    assert f"tried {tmp_path / 'perfkit' / 'reference_data'} and" in caught.value.stderr


class Part(Table):
    size: float = 0.0


class Example(Table):
    name: str
    sizes: tuple[int, ...] = ()
    parts: dict[str, Part] = field(default_factory=dict)
    ends: tuple[float, float] | None = None
    whole: bool = False


def test_readers_give_what_they_were_told_to() -> None:
    assert convert({"name": "a", "sizes": [1, 2]}, Example) == Example("a", (1, 2))
    assert convert({"name": "a", "ends": [1, math.inf]}, Example).ends == (1.0, math.inf)
    assert convert({"name": "a", "ends": None}, Example) == Example("a")
    size = convert({"name": "a", "parts": {"b": {"size": 10**30}}}, Example).parts["b"].size
    assert type(size) is float
    assert size == 1e30


def test_arguments_become_numbers_of_python() -> None:
    assert coerce("t", {"x": np.int8(1)}, Mapping[str, float]) == {"x": 1.0}
    assert coerce("t", np.array([1, 2]), Sequence[int]) == (1, 2)
    assert coerce("t", None, Mapping[str, int] | None) is None
    whole = [1, 2]
    assert coerce("t", whole, Sequence) is whole


FAULTS = [
    ({"name": "a", "sizes": [1, 0.5]}, r"^top\.sizes\[1\] is 0.5; it must be a whole number$"),
    ({"name": "a", "sizes": [True]}, r"^top\.sizes\[0\] is True; it must be a whole number$"),
    ({"name": "a", "sizes": {"b": 1}}, r"^top\.sizes is \{'b': 1\}; it must be a sequence$"),
    ({"name": 3}, r"^top\.name is 3; it must be text$"),
    ({}, r"^top\.name is missing; it must be there$"),
    ([], r"^top is \[\]; it must be a table$"),
    (
        {"name": "a", "size": 1},
        r"^top\.size is not known; known here are name, sizes, .*; did you mean sizes\?$",
    ),
    ({"name": "a", "a b": 1}, r"^top\.\"a b\" is not known"),
    ({"name": list(range(100))}, r"^top\.name is \[0, 1, 2.*\.\.\.\]; it must be text$"),
    (
        {"name": "a", "parts": {"good": {}, "a b": {"size": "2"}}},
        r"^top\.parts\.\"a b\"\.size is '2'; it must be a number$",
    ),
    (
        {"name": "a", "parts": {"b": {"size": 10**400}}},
        r"^top\.parts\.b\.size is 1000.*; it must be a number$",
    ),
    ({"name": "a", "parts": []}, r"^top\.parts is \[\]; it must be a table$"),
    ({"name": "a", "ends": [1.0]}, r"^top\.ends is \[1\.0\]; it must be a sequence of 2 entries$"),
    ({"name": "a", "ends": [1, True]}, r"^top\.ends\[1\] is True; it must be a number$"),
    ({"name": "a", "whole": 1}, r"^top\.whole is 1; it must be True or False$"),
    # the key looks like a place
    ({"name": "a", "x` - at `$.name": 1}, r"^top\.\"x` - at `\$\.name\" is not known"),
]


@pytest.mark.parametrize(("value", "message"), FAULTS)
def test_readers_name_the_place(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(value, Example, "top")
    # no table makes one here
    with pytest.raises(ValueError, match=r"^top is .*; it must be a Example$"):
        check_type("top", value, Example)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ValueError("odd"), "^f: odd; advice$"),
        (ValueError("f line 3 has\x1b[31m 2 values"), r"^f line 3 has\\x1b\[31m 2 values$"),
        (KeyError("a\nb"), r"^f: KeyError 'a\\nb'; advice$"),
        (RuntimeError("first\nsecond " * 999), "^f: RuntimeError first; advice$"),
        (OSError(28, "No space left on device"), "^f: No space left on device; advice$"),
        (
            type("PanicException", (BaseException,), {})("assertion failed"),
            "^f: PanicException assertion failed; adv",
        ),
        (ValueError("x" * 5000), r"^f: x+\.\.\.x+; advice$"),
    ],
)
def test_whatever_goes_wrong_in_a_reader_is_told_in_one_line(
    fault: BaseException, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught, reading("f", "advice"):
        raise fault
    assert caught.value.__cause__ is fault
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 800
    for kind in (KeyboardInterrupt, SystemExit, UserWarning, ModuleNotFoundError):
        with pytest.raises(kind), reading("f", "advice"):
            raise kind


def test_only_regular_files_of_sensible_sizes_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with open(tmp_path / "large.toml", "wb") as file:
        file.truncate(LARGEST_TEXT + 1)  # nothing is written
    for load in (Platform.load, Plan.load, Comparison.load, Trials.load, load_platform):
        for path in (tmp_path / "pipe.toml", "/dev/zero", tmp_path):
            with pytest.raises(ValueError, match="cannot be read: it is not a regular file"):
                load(Path(path))
        with pytest.raises(
            ValueError,
            match=r"large\.toml cannot be read: it has 33.6 MB; at most (33.6|1.05) MB are",
        ):
            load(tmp_path / "large.toml")


def test_a_draft_follows_no_link_and_an_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, target = tmp_path / "victim", tmp_path / "out.toml"
    victim.write_text("mine")
    for name in (f".out.toml.{os.getpid()}.draft", f".{'00' * 8}.draft"):
        (tmp_path / name).symlink_to(victim)
    before = os.umask(0o027)
    assert write_text(target, "ours").stat().st_mode & 0o777 == 0o640
    os.umask(before)
    assert victim.read_text() == "mine"
    assert target.read_text() == "ours"
    assert not target.is_symlink()
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*nowhere/out.toml'"):
        write_text(tmp_path / "nowhere" / "out.toml", "")
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match=r"No space left on device: '.*out.toml'"):
        write_text(target, "lost")
    monkeypatch.setattr(os, "urandom", bytes)  # a name that was taken before
    with pytest.raises(FileExistsError):
        write_text(target, "lost")
    assert target.read_text() == "ours"
    assert victim.read_text() == "mine"
