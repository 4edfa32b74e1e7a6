"""Files: reference data that ships with perfkit, and errors of readers that name the file."""

import csv
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from perfkit.ground.units import escape, format_bytes

#: Largest file of JSON, TOML, CSV or a log that is read [B]: those that perfkit writes or ships
#: have up to 0.6 MB, and parsed data take up to 30 times as much memory.
LARGEST_TEXT = 2**25
#: Most tables that a file may list [-]; they take some 4 s and 100 MB. Published sets have up to
#: 856.
MOST_ROWS = 200_000


def find_reference(*parts: str) -> Path:
    """Find a file or folder of the reference data, however perfkit was installed.

    Parameters
    ----------
    *parts : str
        Path below ``reference_data``; none for the folder itself.

    Returns
    -------
    path : Path
        The existing file or folder.

    Raises
    ------
    FileNotFoundError
        If the installation does not have it.

    Notes
    -----
    A wheel has the data inside the package. A checkout has it beside the package, and an editable
    install points to the checkout.

    Examples
    --------
    >>> find_reference("platforms", "h100-sxm-8.toml").name
    'h100-sxm-8.toml'
    """
    package = Path(__file__).resolve().parent.parent
    homes = [home / "reference_data" for home in (package, package.parent)]
    # Another project may have a folder of that name beside an installed package; ours has a
    # platform gallery.
    for home in (home for home in homes if (home / "platforms").is_dir()):
        if (path := home.joinpath(*parts)).exists():
            return path
        raise FileNotFoundError(
            f"reference data has no {'/'.join(parts)}; its home is {home}; install perfkit again"
        )
    raise FileNotFoundError(
        f"reference data is missing; tried {' and '.join(map(str, homes))}; install perfkit again"
    )


@lru_cache(maxsize=4)
def group_rows(column: str, *parts: str) -> dict[str, list[dict[str, str]]]:
    """Read a CSV file of the reference data, see `find_reference`: its rows grouped by the values
    of a column."""
    groups: dict[str, list[dict[str, str]]] = {}
    with find_reference(*parts).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row[column], []).append(row)
    return groups


@contextmanager
def reading(
    source: object,
    advice: str,
    *,
    error: type[ValueError] = ValueError,
    most: float | None = None,
    told: bool = False,
) -> Iterator[None]:
    """Turn every error of a reader into one documented error with a message of one line.

    Parameters
    ----------
    source : str or Path
        File that is read; or, without `most`, the name of the source in errors.
    advice : str
        What to do next.
    error : type, optional
        ValueError or a subclass; the original error is its cause.
    most : float, optional
        Largest size of the file, which must be a regular file: a device never ends, and a pipe may
        wait for ever [B].
    told : bool, optional
        Whether a ValueError or OSError from inside passes with its own words.

    Raises
    ------
    ValueError
        For every error, panics of compiled readers included; the message is shortened and control
        characters are escaped. Errors that begin with the name of the source keep their words.
        Interrupts, warnings and missing packages pass.

    Notes
    -----
    It is also a decorator, of functions that always read the same source.

    Examples
    --------
    >>> with reading("plan.json", "name a plan"):
    ...     {}["tables"]
    Traceback (most recent call last):
    ...
    ValueError: plan.json: KeyError 'tables'; name a plan
    """
    name = escape(source, 200)
    try:
        if most is not None:
            facts = os.stat(str(source))
            if not stat.S_ISREG(facts.st_mode):
                raise OSError("it is not a regular file")
            if facts.st_size > most:
                raise ValueError(
                    f"it has {format_bytes(facts.st_size)}; at most {format_bytes(most)} are read"
                )
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, Warning, ImportError):
        raise
    except BaseException as fault:  # panics of Rust are no Exception
        if told and isinstance(fault, OSError):
            raise
        plain = isinstance(fault, ValueError) and not isinstance(fault, UnicodeError)
        said = fault.strerror or fault if isinstance(fault, OSError) else fault
        text = escape(said if plain else str(said).strip().split("\n")[0], 500)
        if not (plain and (told or text.startswith((name, escape(Path(str(source)).name, 200))))):
            kind = "" if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__} "
            text = (
                f"{name}{' cannot be read' * (most is not None)}: {kind}{text}".strip()
                + f"; {advice}"
            )
        raise error(text) from fault
