"""The cache folder: finished measurements of campaigns are kept there, each file for one process at
a time."""

import errno
import hashlib
import json
import os
import platform as system
import stat
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from perfkit.ground.units import format_bytes
from perfkit.measure.machine import describe_machine, list_versions

#: A finished measurement is used for this time; later the machine may have changed [s].
_KEEP = 7 * 86400.0
#: Largest file of finished measurements that is read [B]; campaigns have up to 5 MB.
LARGEST_KEPT = 2**27
#: A campaign that nobody continues is removed after this time [s].
_UNUSED = 30 * 86400.0
#: What file systems say that have no locks, such as Lustre mounted without them.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
#: What a progress bar shows: finished processes, and the time so far and left.
_BAR = "  {desc} {bar:20} {n_fmt} of {total_fmt} processes, {elapsed} so far, {remaining} left{postfix}"
#: Files that this process has locked, with the descriptor of the lock. A program that left a
#: campaign by an error can open it again.
_HELD: dict[Path, int] = {}


class Campaign:
    """A series of measurements. Each finished one is kept on disk, so that a rerun continues.

    Parameters
    ----------
    file : Path or None
        Where finished measurements are kept; None keeps nothing.
    progress : bool
        Whether to show a progress bar for each stage.

    Notes
    -----
    ``done`` holds the time of each finished measurement [s since 1970] and its result, by name.
    Each line of the file is a JSON list: name, time, result. Damaged lines, and measurements older
    than seven days, are measured again.
    """

    def __init__(self, file: Path | None, *, progress: bool = True) -> None:
        self.file, self.progress = file, progress
        self.done: dict[str, tuple[float, Any]] = {}
        self._began = time.time()
        text = ""
        if file and file.exists():
            if file.stat().st_size <= LARGEST_KEPT:
                text = file.read_text(errors="replace")
            else:
                warnings.warn(
                    f"{file} has more than {format_bytes(LARGEST_KEPT)}, as no campaign keeps; its measurements are repeated",
                    stacklevel=3,
                )
        for line in text.split("\n"):
            if not line:
                continue
            try:
                name, moment, result = json.loads(line)
                if abs(self._began - moment) < _KEEP:
                    self.done[name] = (moment, result)
                else:
                    warnings.warn("measurements older than 7 days are measured again", stacklevel=3)
            except (TypeError, ValueError, RecursionError):
                warnings.warn(
                    f"{file} is damaged; its lost measurements are repeated", stacklevel=3
                )

    @property
    def day(self) -> str:
        """Date of the oldest measurement in use, or of today where none is used yet."""
        return f"{datetime.fromtimestamp(self._began):%Y-%m-%d}"

    def run(self, stage: str, jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run the jobs that are not finished yet.

        Parameters
        ----------
        stage : str
            Name shown, and first part of the names of kept results.
        jobs : mapping of str to callable
            Callables that return plain JSON, by name.

        Returns
        -------
        results : dict
            By name.
        """
        from tqdm import tqdm

        results = {}
        with tqdm(
            jobs.items(), desc=stage, disable=not self.progress, bar_format=_BAR, leave=False
        ) as bar:
            for key, job in bar:
                name = f"{stage}.{key}"
                if name not in self.done:
                    self._keep(name, job())
                moment, results[key] = self.done[name]
                if moment < self._began:
                    self._began = moment
                    bar.set_postfix_str(f"partly from {self.day}")
        return results

    def _keep(self, name: str, result: Any) -> None:
        """Write a result to the file; warn if that fails."""
        self.done[name] = (time.time(), result)
        try:
            if self.file is not None:
                with open(self.file, "a") as file:
                    file.write("\n" + json.dumps([name, *self.done[name]]))
        except OSError as error:
            text = f"{self.file} cannot be written to ({error.strerror}); measuring continues, but a rerun starts again"
            warnings.warn(text, stacklevel=3)

    def close(self) -> None:
        """Remove the finished measurements: they have become part of a result."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        if self.file in _HELD:
            os.close(_HELD.pop(self.file))


def find_cache() -> Path:
    """Folder for finished measurements of campaigns, created if missing.

    Returns
    -------
    folder : Path
        ``perfkit`` in ``XDG_CACHE_HOME``, else in ``.cache`` of the home folder.

    Raises
    ------
    OSError or RuntimeError
        If it cannot be made, or there is no home folder.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perfkit"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_campaign_beside(target: Path, *options: object, progress: bool) -> Campaign:
    """Open a campaign whose file is beside a result. It continues an unfinished one of the same
    versions and options, also from other nodes of a cluster that see the same folder.

    Parameters
    ----------
    target : Path
        The file of the result.
    *options : object
        Options that identify the campaign, as JSON or text.
    progress : bool
        Whether to show a progress bar for each stage.

    Returns
    -------
    campaign : Campaign
        Its file ends in ``.unfinished.jsonl``. What belongs to other options or versions is measured
        again, with a warning.

    Raises
    ------
    ValueError
        If another process measures for the same file, or if the file cannot be written.
    """
    key = _make_key(list_versions(), options)
    file = target.with_suffix(".unfinished.jsonl")
    is_free = True
    try:
        is_free = _lock(file)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # without locks a second process is not noticed
            raise ValueError(
                f"out is {target}; finished measurements cannot be kept in {file} "
                f"({error.strerror or error}); name a file in a folder that can be written to"
            ) from error
    if not is_free:
        raise ValueError(
            f"out is {target}, for which another process measures now ({file} is in use); end it, or "
            "name another file"
        )
    campaign = Campaign(file, progress=progress)
    _, known = campaign.done.get("options", (0.0, None))
    if campaign.done and known != key:
        warnings.warn(
            f"{file} has measurements for other options or versions; they are measured again",
            stacklevel=3,
        )
        campaign.done.clear()
        file.write_text("")
    if known != key:
        campaign._keep("options", key)
    return campaign


def _make_key(*facts: object) -> str:
    """A short name for what identifies a campaign."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_campaign(*options: object, progress: bool) -> Campaign:
    """Open a campaign. It continues an unfinished one of the same machine, versions and options.

    Parameters
    ----------
    *options : object
        Options that identify the campaign, as JSON or text.
    progress : bool
        Whether to show a progress bar for each stage.

    Returns
    -------
    campaign : Campaign
        Its file is in the user's cache and belongs to this process until it is closed. If another
        process uses it, the campaign gets its own file. Without a writable cache nothing is kept.
        Both cases warn.
    """
    key = _make_key(system.node(), describe_machine(), list_versions(), options)
    holders: list[str] = []
    try:
        folder = find_cache()
        _remove_unused(folder)
        file = folder / f"{key}-1.jsonl"
        while not _lock(file):
            _, owner = Campaign(file).done.get("owner", (0.0, "another process"))
            holders.append(owner)
            file = folder / f"{key}-{len(holders) + 1}.jsonl"
    except (ImportError, OSError, RuntimeError) as error:
        text = f"finished measurements cannot be kept ({error}); name a folder for them in XDG_CACHE_HOME"
        warnings.warn(f"{text}, or an interrupted run starts again", stacklevel=3)
        return Campaign(None, progress=progress)
    if holders:
        text = f"{' and '.join(holders)} measures the same; this run keeps its own measurements"
        warnings.warn(f"{text}, but both disturb each other: end one of them", stacklevel=3)
    campaign = Campaign(file, progress=progress)
    campaign._keep(
        "owner", f"process {os.getpid()} on {system.node()} since {datetime.now():%Y-%m-%d %H:%M}"
    )
    return campaign


def _remove_unused(folder: Path) -> None:
    """Remove campaigns that nobody continues."""
    for file in folder.glob("*.jsonl"):
        with suppress(OSError):  # another process may have removed it
            state = file.lstat()
            if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _UNUSED:
                file.unlink()


def _lock(file: Path) -> bool:
    """Lock a file until the campaign is closed or the process ends; False if another process has
    locked it."""
    import fcntl  # Windows has none; nothing is kept there

    if file not in _HELD:
        if file.exists() and not file.is_file():
            raise OSError(f"{file} is not a regular file")
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError:
            os.close(lock)
            raise
        _HELD[file] = lock
    return True
