"""Targets: what the name of a file to write leads to, and writing there without destroying what it
is."""

import errno
import os
import re
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.units import show

#: How long a named pipe may have no reader before writing to it fails [s].
PATIENCE = 5.0
#: Names of open files of this process, such as the ends of the links /dev/stdout and /dev/fd/1.
_DESCRIPTOR = re.compile(
    r"/(?:dev|proc/(?:self|thread-self|(?P<process>[0-9]+)))/fd/(?P<number>[0-9]+)"
)
#: Longest chain of symbolic links that is followed, as in Linux [-].
_MOST_LINKS = 40
#: Endings by which files of other formats than HTML are known.
_NO_PAGES = (".csv", ".docx", ".json", ".md", ".pdf", ".png", ".svg", ".txt", ".xlsx")


class Target(NamedTuple):
    """What a name leads to at this moment."""

    name: str  # as the user wrote it
    file: Path  # behind all symbolic links
    facts: os.stat_result | None  # of what exists there; None where a new file will be made
    descriptor: int | None  # the open file of this process that it stands for, as /dev/stdout does

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file, or will be one."""
        return self.facts is None or stat.S_ISREG(self.facts.st_mode)

    @property
    def is_replaced(self) -> bool:
        """Whether a new file takes the place of the old one.

        A file with several hard links is written in place, so that its other names show the new
        content too. So is a file that only its descriptor still names.
        """
        if self.descriptor is not None or not self.is_file:
            return False
        if self.facts is None:
            return True
        try:
            same = os.path.samestat(self.facts, os.stat(self.file))
        except OSError:
            same = False
        return same and self.facts.st_nlink == 1


def find_target(argument: str, path: Any) -> Target:
    """Look at what a name leads to, and refuse what cannot be written.

    Parameters
    ----------
    argument : str
        Name of the argument, for errors.
    path : str or Path
        File to write.

    Returns
    -------
    target : Target
        Nothing is changed yet.

    Raises
    ------
    ValueError
        For a name of another type, an empty, impossible or too long name, ``-``, a folder, a read-only
        file, a socket and a device that holds data, such as a disk.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise ValueError(
            f"{argument} is {show(path)}; it must be the name of a file to write, a str or a Path"
        )
    shown = f"{argument} is {show(name, 200)}"
    if not name:
        raise ValueError(f"{shown}; it is empty; name a file to write")
    if name == "-":
        raise ValueError(
            f"{shown}, which stands for standard output elsewhere; name a file, or /dev/stdout"
        )
    if "\0" in name:
        raise ValueError(f"{shown}; no name of a file holds the character \\x00; name it otherwise")
    try:
        os.fsencode(name)
        facts = os.stat(name)
    except FileNotFoundError:
        facts = None
    except UnicodeError as error:
        raise ValueError(
            f"{shown}; it is no text that a file can be named; name it otherwise"
        ) from error
    except NotADirectoryError as error:
        raise ValueError(f"{shown}; its folder does not exist; create it first") from error
    except OSError as error:
        raise ValueError(f"{shown}; {error.strerror}; name another file") from error
    try:
        file = Path(os.path.realpath(name))
        descriptor = _find_descriptor(name)
    except OSError as error:  # the working folder was removed
        raise ValueError(f"{shown}; its folder does not exist; create it first") from error
    if name.endswith(os.sep) or file.is_dir():
        raise ValueError(f"{shown}; it is a folder; name a file in it")
    if facts is not None:
        _check_facts(shown, name, facts, descriptor)
    return Target(name, file, facts, descriptor)


def _check_facts(shown: str, name: str, facts: os.stat_result, descriptor: int | None) -> None:
    """Refuse to write to what exists but cannot, or must not, be written."""
    if descriptor is not None:
        import fcntl  # Windows has none

        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if access == os.O_RDONLY:
            raise ValueError(f"{shown}; it is open for reading only; name another file")
        return
    if stat.S_ISSOCK(facts.st_mode):
        raise ValueError(f"{shown}; it is a socket; name a file")
    if stat.S_ISBLK(facts.st_mode):
        raise ValueError(f"{shown}; it is a device that holds data; name a file")
    # root may write to every file, but a file without any permission to write is protected
    anyone_may_write = facts.st_mode & 0o222
    if not anyone_may_write or not os.access(name, os.W_OK):
        raise ValueError(f"{shown}; it is read-only; name another file, or allow writing to it")


def _find_descriptor(name: str) -> int | None:
    """The open file of this process that a name stands for, also through symbolic links."""
    place = os.path.abspath(name)
    for _ in range(_MOST_LINKS):
        match = _DESCRIPTOR.fullmatch(place)
        if match and match["process"] in (None, str(os.getpid())):
            number = int(match["number"])
            try:
                os.fstat(number)
            except (OSError, OverflowError):
                return None
            return number
        if not os.path.islink(place):
            # a folder on the way may be a link, as /dev/fd is one to /proc/self/fd
            folder, last = os.path.split(place)
            real = os.path.join(os.path.realpath(folder), last)
            if real == place:
                return None
            place = real
            continue
        with suppress(OSError):
            place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
    return None


def check_target(argument: str, path: Any, ending: str = "") -> Path:
    """Check before a computation that its result can be written.

    Parameters
    ----------
    argument : str
        Name of the argument, for errors.
    path : str or Path
        File to write.
    ending : str, optional
        End of the name by which such files are known, such as ``.toml``.

    Returns
    -------
    path : Path
        The same name.

    Raises
    ------
    ValueError
        See `find_target`; also for a missing folder, one that cannot be written to, and another
        ending.
    """
    target = find_target(argument, path)
    shown = f"{argument} is {show(target.name, 200)}"
    folder = target.file.parent
    if target.is_replaced:
        if not folder.is_dir():
            raise ValueError(f"{shown}; its folder does not exist; create it first")
        if not os.access(folder, os.W_OK) or not _can_hold_drafts(folder):
            raise ValueError(f"{shown}; its folder cannot be written to; choose another")
    if not target.name.endswith(ending):
        advice = (
            f"name it {show(target.name + ending, 200)[1:-1]}" if target.is_file else "name a file"
        )
        raise ValueError(f"{shown}; such files are known by their ending; {advice}")
    return Path(target.name)


def check_page(argument: str, path: Any) -> Path:
    """Check before a computation that a report can be written, as `check_target` does.

    Parameters
    ----------
    argument : str
        Name of the argument, for errors.
    path : str or Path
        File to write; not with the ending of another format.

    Returns
    -------
    path : Path
        The same name.

    Raises
    ------
    ValueError
        See `check_target`; also for the ending of another format.
    """
    target = check_target(argument, path)
    if target.suffix.lower() in _NO_PAGES:
        raise ValueError(
            f"{argument} is {show(str(path), 200)}; a report is an HTML page; name it "
            f"{show(str(target.with_suffix('.html')), 200)[1:-1]}"
        )
    return target


def _can_hold_drafts(folder: Path) -> bool:
    """Whether a new file can be made in a folder; permissions do not tell it on every disk."""
    draft = _name_draft(folder)
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    draft.unlink(missing_ok=True)
    return True


def _name_draft(folder: Path) -> Path:
    """A name in a folder that nobody can have taken or linked before."""
    return folder / f".{os.urandom(8).hex()}.draft"


def write_text(path: str | Path, text: str) -> Path:
    """Write a file completely or not at all: an old file stays until the new one is complete.

    Parameters
    ----------
    path : str or Path
        File to write.
    text : str
        Its content.

    Returns
    -------
    path : Path
        The same name.

    Raises
    ------
    OSError
        If the file cannot be written, for example on a full disk; the message names it.
    ValueError
        For a name that cannot be written, see `find_target`, and text that no file can hold.
    """
    name = os.fspath(find_target("path", path).name)
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        half = show(text[error.start])
        raise ValueError(
            f"the text for {show(name, 200)} has half of a character, {half}; no file can hold it"
        ) from error
    return write_bytes(path, content)


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write a file of bytes completely or not at all, see `write_text`.

    Notes
    -----
    A symbolic link stays a link, and the file behind it is written. A replaced file keeps its
    owner, group, permissions and extended attributes. What is no regular file is written to, never
    replaced: a named pipe, a terminal, ``/dev/null``, ``/dev/stdout``. A file with several hard
    links, or of another owner, is written in place, once the disk has room for it.
    """
    target = find_target("path", path)
    try:
        if target.descriptor is not None:
            _write_descriptor(target.descriptor, content)
        elif not target.is_file:
            _write_stream(target, content)
        elif not target.is_replaced or not _replace(target, content):
            _write_in_place(target.name, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, target.name) from error
    return Path(target.name)


def _write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes, as one call may write only some."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _write_descriptor(number: int, content: bytes) -> None:
    """Write to an open file of this process, after what was printed to it before."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    _write_all(number, content)


def _write_stream(target: Target, content: bytes) -> None:
    """Write to a device or a named pipe."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            descriptor = os.open(target.name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            break
        except OSError as error:
            is_pipe = target.facts is not None and stat.S_ISFIFO(target.facts.st_mode)
            if error.errno != errno.ENXIO or not is_pipe:
                raise
            if time.monotonic() > deadline:
                words = "Nobody reads this named pipe; start its reader first"
                raise OSError(errno.ENXIO, words) from error
            time.sleep(0.01)
    try:
        os.set_blocking(descriptor, True)
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)


def _replace(target: Target, content: bytes) -> bool:
    """Write a new file beside the old one and give it the old one's name.

    Returns False, and changes nothing, where the new file cannot have the owner of the old one.
    """
    draft = _name_draft(target.file.parent)
    # nobody else reads the draft of a file that others may not read
    permissions = 0o666 if target.facts is None else 0o600
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    try:
        try:
            if target.facts is not None and not _give(descriptor, target.file, target.facts):
                return False
            _write_all(descriptor, content)
            if target.facts is not None:
                # after writing, which takes the bits away that change the user or the group
                os.fchmod(descriptor, stat.S_IMODE(target.facts.st_mode))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, target.file)
        return True
    finally:
        draft.unlink(missing_ok=True)


def _give(descriptor: int, old: Path, facts: os.stat_result) -> bool:
    """Give a new file the owner, group and extended attributes of an old one, where it is
    allowed."""
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (facts.st_uid, facts.st_gid):
        try:
            os.fchown(descriptor, facts.st_uid, facts.st_gid)
        except OSError:
            return False
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # not every disk has them
            for attribute in os.listxattr(old):
                with suppress(OSError):  # some belong to the system
                    os.setxattr(descriptor, attribute, os.getxattr(old, attribute))
    return True


def _write_in_place(name: str, content: bytes) -> None:
    """Write over an existing file, once the disk has room for all of the new content."""
    descriptor = os.open(name, os.O_WRONLY)
    try:
        size = os.fstat(descriptor).st_size
        if len(content) > size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(descriptor, 0, len(content))
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        _write_all(descriptor, content)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
