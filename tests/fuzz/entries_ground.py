"""Fuzzers of what is written, and of names in reports: targets of every kind, and texts that
pictures and pages cannot hold."""

import os
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import perfkit as pk
from perfkit.platform.datasheets import list_datasheets
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense

PLAN = pk.Plan(1, (0,))
MODEL = pk.DLRM(rows=[100, 100], dim=16, bottom=[16], top=[16], batch=64)
MODES = (0o600, 0o640, 0o644, 0o2664, 0o4755, 0o222, 0o444, 0o000)


# Targets. All lie in the folder of the fuzzer: a device is a node of its own.


def make_file(path: Path, rng: Rng) -> None:
    path.write_text("old " * int(rng.integers(1, 1000)))
    path.chmod(choose(rng, MODES))


def make_links(path: Path, rng: Rng) -> None:
    path.write_text("old")
    for number in range(int(rng.integers(1, 4))):
        path.with_name(f"other-{number}").hardlink_to(path)


def make_symlink(path: Path, rng: Rng) -> None:
    names = ("real.toml", "missing/real.toml", ".", "..", path.name)
    real = path.parent / choose(rng, names)
    if rng.random() < 0.5 and real != path and real.parent.is_dir() and not real.exists():
        make_file(real, rng)
    path.symlink_to(real)


def make_node(path: Path, rng: Rng) -> None:
    kind, number = choose(rng, ((stat.S_IFCHR, (1, 3)), (stat.S_IFBLK, (240, 0))))
    try:
        os.mknod(path, 0o666 | kind, os.makedev(*number))
    except PermissionError:
        make_file(path, rng)


def make_socket(path: Path, rng: Rng) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_pipe(path: Path, rng: Rng) -> None:
    os.mkfifo(path)
    threading.Thread(target=path.read_bytes, daemon=True).start()


def make_folder(path: Path, rng: Rng) -> None:
    path.mkdir()


KINDS: tuple[Callable[[Path, Rng], None], ...] = (
    make_file,
    make_links,
    make_symlink,
    make_node,
    make_socket,
    make_pipe,
    make_folder,
)


def look_at(path: Path) -> tuple[Any, ...]:
    """What a name is, whatever its content."""
    facts = os.stat(path)
    regular = stat.S_ISREG(facts.st_mode)
    # a file may become another one with the same mode, unless it has other names
    identity = facts.st_ino if not regular or facts.st_nlink > 1 else None
    return facts.st_mode, facts.st_uid, facts.st_gid, facts.st_nlink, identity


def write_somewhere(rng: Rng, folder: Path) -> Any:
    """Write to a target of any kind: it is afterwards what it was."""
    box = folder / "box"  # whose links the harness does not follow
    box.mkdir()
    path = box / "target.toml"
    name: Any = path
    before, was_link = None, False
    if rng.random() < 0.8:
        choose(rng, KINDS)(path, rng)
        was_link = path.is_symlink()
        before = look_at(path) if os.path.exists(path) else None
    else:
        endings = ("", "/", "/x.toml", "/../y.toml")
        odd = (
            "",
            "..",
            "a/b.toml",
            "\0",
            "a\0b",
            "x" * 300,
            "a\ud800",
            "/dev/fd/999",
            3,
            None,
            b"x",
        )
        name = choose(rng, odd) if rng.random() < 0.5 else f"{path}{choose(rng, endings)}"
    try:
        PLAN.save(name)
    finally:
        after = look_at(path) if os.path.exists(path) else None
        if before is not None and (after != before or path.is_symlink() != was_link):
            raise Nonsense(f"the target was {before} and is {after}")
    return None


# Names in reports.

PARTS = (
    "name",
    "\x1b[31m",
    "\x00",
    "\u202e",
    "\ufffe",
    ' id="clip0" ',
    '"',
    "'",
    "<svg onload=x>",
    "</text>",
    "(a+)+$",
    "(",
    "[",
    "\\",
    "{{ x }}",
    "]]>",
    "&#0;",
    "url(#clip0)",
    "x" * 5000,
    "\r\n",
    "\u2028",
    "\U0001f600",
    "javascript:alert(1)",
    ' onmouseover="x"',
)
PLATFORMS = (*pk.platforms()["name"], *list_datasheets())


def report_names(rng: Rng, folder: Path) -> Any:
    """Write a report of a platform, or of a prediction, with any names."""
    name = "".join(choose(rng, PARTS) for _ in range(int(rng.integers(1, 5))))
    platform = pk.load_platform(choose(rng, ("p100-1", "rtx-4090", "zen5-2")))
    named = replace(platform, name=name, device=replace(platform.device, name=name))
    result = named if rng.random() < 0.7 else pk.predict(MODEL, named)
    page = pk.report(result, path=folder / "page.html", title=name, notes=name).read_text()
    drawn = page.partition("<script>")[0]
    if any(character in drawn for character in "\x00\x1b\u202e\ufffe\u2028"):
        raise Nonsense("the page has a character that nobody sees")
    if drawn.count("<svg") != drawn.count("<figure>"):
        raise Nonsense("a picture is lost")
    return None


def report_platforms(rng: Rng, folder: Path) -> Any:
    """Write a report of any platform of the gallery or datasheet, and of a prediction on it."""
    platform = pk.load_platform(choose(rng, PLATFORMS))
    results: list[Any] = [platform]
    if "fp32" in platform.device.peaks:
        results.append(pk.predict(MODEL, platform))
    pk.report(*results, path=folder / "page.html")
    return None


ENTRIES: dict[str, Entry] = {
    "targets": Entry(write_somewhere, share=0.5, new=True),
    "report-names": Entry(report_names, share=0.02, new=True),
    "report-platforms": Entry(report_platforms, share=0.02, new=True),
}
