"""What is written to: nothing that is no regular file is replaced, and a replaced file keeps what it
was."""

import errno
import io
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.calibration.checks import Comparison
from perfkit.ground import targets
from perfkit.ground.targets import check_target, write_text

PLAN = pk.Plan(1, (0,))
MODEL = pk.DLRM(rows=[1000, 1000], dim=16, pooling=2, batch=64, bottom=[16], top=[16])
RUN = {
    "family": "DLRM",
    "name": "a",
    "config": {},
    "ranks": 1,
    "predicted_s": 1.0,
    "low_s": 0.9,
    "high_s": 1.1,
    "measured_s": 1.0,
    "measured_q1_s": 1.0,
    "measured_q3_s": 1.0,
    "flagged": False,
    "bottleneck": "GEMM",
    "noise": 0.01,
}
COMPARISON = Comparison((RUN,), "toy", {}, {})


def make_chart(toy: pk.Platform) -> Any:
    """The chart of a prediction."""
    return pk.predict(MODEL, toy, ranks=1).chart()


def write_plan(path: Any, toy: pk.Platform) -> None:
    PLAN.save(path)


def write_platform(path: Any, toy: pk.Platform) -> None:
    toy.save(path)


def write_comparison(path: Any, toy: pk.Platform) -> None:
    COMPARISON.save(path)


def write_trace(path: Any, toy: pk.Platform) -> None:
    pk.predict(MODEL, toy, ranks=1).save_trace(path)


def write_report(path: Any, toy: pk.Platform) -> None:
    pk.report(COMPARISON, path=path)


def write_json(path: Any, toy: pk.Platform) -> None:
    """Write the figures of a command; its error is raised as others are."""
    code = main(["platforms", "--json", os.fspath(path)])
    if code != 0:
        raise ValueError(f"path: exit code {code}")


def write_chart(path: Any, toy: pk.Platform) -> None:
    make_chart(toy).save(path, format="html")


def write_data_of_a_chart(path: Any, toy: pk.Platform) -> None:
    make_chart(toy).save(path, format="json")


#: Everything public that writes a file.
WRITERS: list[Callable[[Any, pk.Platform], None]] = [
    write_plan,
    write_platform,
    write_comparison,
    write_trace,
    write_report,
    write_json,
    write_chart,
    write_data_of_a_chart,
]
writers = pytest.mark.parametrize("write", WRITERS)
pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands leave the display of warnings as it was."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


def make_null(path: Path) -> Path:
    """A device of the test's own that takes everything, as /dev/null does."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        with open(path, "wb") as file:
            file.write(b"x")
    except OSError as error:
        pytest.skip(f"this process may not make or use a device: {error.strerror}")
    return path


def read_pipe(path: Path, write: Callable[[], Any]) -> bytes:
    """What the reader of a named pipe gets."""
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()), daemon=True)
    reader.start()
    write()
    reader.join(20)
    assert received, "the reader still waits"
    return received[0]


@writers
def test_a_device_stays_a_device(write: Any, toy: pk.Platform, tmp_path: Path) -> None:
    device = make_null(tmp_path / "null.toml")
    before = os.stat(device)
    (tmp_path / "link.toml").symlink_to(device)
    for path in (device, tmp_path / "link.toml"):
        write(path, toy)
        after = os.stat(device)
        assert stat.S_ISCHR(after.st_mode), "the device is replaced"
        assert (after.st_rdev, after.st_mode) == (before.st_rdev, before.st_mode)
    assert (tmp_path / "link.toml").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"null.toml", "link.toml"}


@writers
def test_a_named_pipe_is_written_to(write: Any, toy: pk.Platform, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe, 0o640)
    (tmp_path / "link.toml").symlink_to(pipe)
    write(tmp_path / "file.toml", toy)
    expected = (tmp_path / "file.toml").read_bytes()
    for path in (pipe, tmp_path / "link.toml"):
        assert read_pipe(pipe, partial(write, path, toy)) == expected
        assert os.stat(pipe).st_mode == stat.S_IFIFO | 0o640


def test_a_pipe_without_a_reader_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "PATIENCE", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Nobody reads this named pipe; start its reader first"):
        PLAN.save(tmp_path / "pipe")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@writers
def test_a_replaced_file_keeps_its_mode_owner_and_links(
    write: Any, toy: pk.Platform, tmp_path: Path
) -> None:
    real = tmp_path / "real.toml"
    link = tmp_path / "link.toml"
    link.symlink_to("real.toml")
    for mode in (0o600, 0o640, 0o2664, 0o4755, 0o666):
        real.write_text("old")
        owner = (os.getuid(), os.getgid())
        if os.getuid() == 0:
            owner = (1234, 4321)
            os.chown(real, *owner)
        real.chmod(mode)
        for path in (real, link):
            write(path, toy)
            facts = os.stat(real)
            assert stat.S_IMODE(facts.st_mode) == mode, oct(facts.st_mode)
            assert (facts.st_uid, facts.st_gid) == owner
            assert real.read_text() != "old"
            assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"real.toml", "link.toml"}


def test_a_new_file_is_made_behind_a_link_with_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new")
    before = os.umask(0o027)
    try:
        PLAN.save(tmp_path / "link")
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o640


@writers
def test_all_names_of_a_file_show_the_new_content(
    write: Any, toy: pk.Platform, tmp_path: Path
) -> None:
    first = tmp_path / "first.toml"
    second = tmp_path / "second.toml"
    for old in ("old", "old " * 200_000):
        first.write_text(old)
        first.chmod(0o640)
        second.unlink(missing_ok=True)
        second.hardlink_to(first)
        write(first, toy)
        assert os.path.samefile(first, second)
        assert "old" not in second.read_text()[:20]
        assert stat.S_IMODE(os.stat(second).st_mode) == 0o640
        write(tmp_path / "alone.toml", toy)
        assert second.read_bytes() == (tmp_path / "alone.toml").read_bytes()


def test_a_full_disk_leaves_a_linked_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a").write_text("old")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*a'"):
        write_text(tmp_path / "a", "new content")
    assert (tmp_path / "b").read_text() == "old"


def test_a_full_disk_leaves_the_page_of_a_chart_as_it_was(
    toy: pk.Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    chart = make_chart(toy)
    (tmp_path / "a.html").write_text("old")
    monkeypatch.setattr(targets, "_write_all", fail)
    with pytest.raises(OSError, match="No space left on device"):
        chart.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "a.txt",
            {},
            "a.txt'; it must end with one of json, html, svg, png, pdf, vega; name it so",
        ),
        ("a.html", {"format": "docx"}, "format is 'docx'; known are json, html"),
        ("a.html", {"format": ["svg"]}, r"format is \['svg'\]; known are json, html"),
        ("a.png", {"scale_factor": "2"}, "scale_factor is '2'; it must be a number above 0"),
        ("a.png", {"ppi": -3}, "ppi is -3; it must be a number above 0"),
        ("a.svg", {"scale_factor": float("nan")}, "scale_factor is nan; it must be a number above"),
        ("a.html", {"nope": 1}, "option is 'nope'; known are embed_options"),
        ("a.png", {"inline": True}, "option is 'inline'; known are scale_factor, ppi"),
        ("a.html", {"embed_options": 5}, "embed_options is 5; it must be a mapping"),
        (None, {}, "fp is None; it must be the name of a file to write, or a file that is open"),
        (io.BytesIO(), {"format": "svg"}, "format 'svg' is text; open the file for writing text"),
        (io.StringIO(), {"format": "png"}, "format 'png' is bytes; open the file for writing by"),
    ],
)
def test_a_chart_says_what_it_can_be_written_as(
    name: Any, options: dict[str, Any], said: str, toy: pk.Platform, tmp_path: Path
) -> None:
    file = tmp_path / name if isinstance(name, str) else name
    with pytest.raises(ValueError, match=said) as caught:
        make_chart(toy).save(file, **options)
    assert str(caught.value).isprintable()
    assert not any(tmp_path.iterdir())


def test_the_ending_of_a_chart_may_be_in_capitals(toy: pk.Platform, tmp_path: Path) -> None:
    make_chart(toy).save(tmp_path / "A.HTML")
    assert "<html" in (tmp_path / "A.HTML").read_text()


def test_attributes_of_a_replaced_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    try:
        os.setxattr(path, "user.origin", b"mine")
    except OSError as error:
        pytest.skip(f"this disk keeps no extended attributes: {error.strerror}")
    PLAN.save(path)
    assert os.getxattr(path, "user.origin") == b"mine"


def list_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """What a write changes of each entry of a folder; following a link changes when it was read."""
    facts = {}
    for entry in folder.iterdir():
        fact = entry.lstat()
        facts[entry.name] = (fact.st_ino, fact.st_mode, fact.st_size, fact.st_mtime_ns)
    return facts


def lay_socket() -> str:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.toml")
    return "s.toml"


def lay_disk() -> str:
    try:
        os.mknod("disk.toml", 0o600 | stat.S_IFBLK, os.makedev(240, 0))
    except OSError as error:
        pytest.skip(f"this process may not make a device: {error.strerror}")
    return "disk.toml"


def lay_read_only() -> str:
    Path("old.toml").write_text("old")
    Path("old.toml").chmod(0o444)
    return "old.toml"


def lay_loop() -> str:
    Path("loop.toml").symlink_to("loop.toml")
    return "loop.toml"


def lay_folder() -> str:
    Path("folder.toml").mkdir()
    Path("to-folder.toml").symlink_to("folder.toml")
    return "to-folder.toml"


def lay_dangling() -> str:
    Path("dangling.toml").symlink_to("missing/file.toml")
    return "dangling.toml"


class Refused(NamedTuple):
    """A target that nobody can write: its name, or what makes it in the working folder and says it."""

    target: Any
    message: str

    def prepare(self) -> Any:
        return self.target() if callable(self.target) else self.target


REFUSED = {
    "empty": Refused("", "is ''; it is empty; name a file to write"),
    "NUL": Refused("a\0b.toml", r"is 'a\\x00b.toml'; no name of a file holds the character \\x00"),
    "long": Refused("x" * 300 + ".toml", "File name too long; name another file"),
    "half of a character": Refused(
        "a\ud800.toml", r"is 'a\\ud800.toml'; it is no text that a file can"
    ),
    "folder": Refused(".", "it is a folder; name a file in it"),
    "folder with its slash": Refused("new.toml/", "it is a folder; name a file in it"),
    "behind a file": Refused("/etc/hosts/x.toml", "its folder does not exist; create it first"),
    "number": Refused(3, "is 3; it must be the name of a file to write, a str or a Path"),
    "bytes": Refused(b"x.toml", r"is b'x.toml'; it must be the name of a file to write"),
    "none": Refused(None, "is None; it must be the name of a file to write"),
    "socket": Refused(lay_socket, "it is a socket; name a file"),
    "disk": Refused(lay_disk, "it is a device that holds data; name a file"),
    "read-only": Refused(
        lay_read_only, "it is read-only; name another file, or allow writing to it"
    ),
    "loop": Refused(lay_loop, "Too many levels of symbolic links; name another file"),
    "link to a folder": Refused(lay_folder, "it is a folder; name a file in it"),
    "closed descriptor": Refused("/dev/fd/999", "its folder cannot be written to; choose another"),
    "link to nowhere": Refused(lay_dangling, "its folder does not exist; create it first"),
}
of_each_refusal = pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)


@of_each_refusal
def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    case: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = case.prepare()
    before = list_files(tmp_path)
    with pytest.raises(ValueError) as caught:
        check_target("path", path)
    text = str(caught.value)
    assert text.startswith("path is ")
    assert re.search(case.message, text)
    assert text.isprintable()
    assert len(text) < 400
    assert before == list_files(tmp_path)


@writers
@of_each_refusal
def test_everything_that_writes_refuses_alike(
    case: Refused, write: Any, toy: pk.Platform, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = case.prepare()
    if write is write_json and not isinstance(path, str):
        pytest.skip("words of a command line are text")
    before = list_files(tmp_path)
    with pytest.raises((ValueError, OSError)) as caught:
        write(path, toy)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    assert before == list_files(tmp_path)


@writers
def test_a_dash_is_no_name_of_a_file(
    write: Any, toy: pk.Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if write is write_json:  # of this option alone it is standard output
        write("-", toy)
    else:
        with pytest.raises(ValueError, match=r" is '-', which stands for standard output elsewh"):
            write("-", toy)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "command",
    [
        "predict --model gpt2 --platform h100-sxm-8 --report",
        "shard --model dlrm-small --platform h100-sxm-8 --ranks 2 --out",
        "calibrate --out",
        "demo --out",
        "demo --report",
    ],
)
def test_a_dash_is_no_file_for_a_command(
    command: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = command.split()
    assert main([*words, "-"]) == 2
    option = words[-1].removeprefix("--")
    error = capsys.readouterr().err
    assert f"{option} is '-', which stands for standard output" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_for_drafts_is_known_before(tmp_path: Path) -> None:
    # permissions allow it, as root, but the disk does not
    with pytest.raises(ValueError, match="its folder cannot be written to; choose another"):
        check_target("json", "/proc/self/x.json")


def run_python(code: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", f"import perfkit as pk\nplan = pk.Plan(1, (0,))\n{code}"]
    return subprocess.run(command, text=True, timeout=60, **more)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output_gets_the_text_after_what_was_printed(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = f"print('before')\nplan.save({name!r})\nprint('after')"
    done = run_python(code, cwd=tmp_path, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stdout == f"before\n{PLAN.to_json()}after\n"
    with open(tmp_path / "out.txt", "w") as file:
        file.write("head\n")
        file.flush()
        assert run_python(code, cwd=tmp_path, stdout=file).returncode == 0
    assert (tmp_path / "out.txt").read_text() == f"head\nbefore\n{PLAN.to_json()}after\n"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "out.txt"}


def test_a_descriptor_open_for_reading_is_refused() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(ValueError, match="it is open for reading only; name another file"):
            PLAN.save(f"/dev/fd/{read}")
    finally:
        os.close(read)
        os.close(write)


def test_a_command_writes_no_two_texts_to_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.html"
    (tmp_path / "link").symlink_to(file)
    line = ["predict", "--model", "bert-base", "--platform", "h100-sxm-8", "--json", str(file)]
    assert main([*line, "--report", str(tmp_path / "link")]) == 2
    assert "json and report are the same file" in capsys.readouterr().err
    assert not file.exists()
    device = make_null(tmp_path / "null")
    assert main([*line[:-1], str(device)]) == 0
    assert stat.S_ISCHR(os.stat(device).st_mode)
