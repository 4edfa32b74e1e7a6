"""What results share: a table that pandas takes too, and a file that has to be writable before they are made."""

import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import altair
    import pandas
    import polars

#: Types of packages that take long to load.
Picture: TypeAlias = "altair.Chart | altair.LayerChart | altair.HConcatChart"
Table: TypeAlias = "polars.DataFrame"


class Shown:
    """A result that a notebook shows by what it says of itself."""

    def _repr_html_(self) -> str:
        words: str = getattr(self, "explain", self.__repr__)()
        return f"<pre>{html.escape(words)}</pre>"


class Tabular(Shown):
    """A result that has a table."""

    def table(self) -> Table:
        """The result as a frame.

        Returns
        -------
        frame : polars.DataFrame
            One row per part.
        """
        raise NotImplementedError

    def to_pandas(self) -> "pandas.DataFrame":
        """The table as a pandas frame, made without pyarrow.

        Returns
        -------
        frame : pandas.DataFrame
            See `table`.
        """
        import pandas

        return pandas.DataFrame(self.table().to_dict(as_series=False))


def check_target(name: str, path: str | Path) -> Path:
    """Let a file through that can be written, so that no long measurement ends with nowhere to go.

    Parameters
    ----------
    name : str
        Argument as the caller knows it.
    path : str or Path
        File to write later.

    Returns
    -------
    path : Path
        The same file.

    Raises
    ------
    ValueError
        Where the folder is missing or closed, or the file is a folder.
    """
    target = Path(path)
    folder = target.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{name} is {str(path)!r}; its folder does not exist; create it first")
    if target.is_dir():
        raise ValueError(f"{name} is {str(path)!r}; it is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{name} is {str(path)!r}; its folder cannot be written to; choose another")
    return target
