"""A line on a terminal while something long runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
#: What ends sooner shows no line [s].
_DELAY = 2.0


@contextmanager
def show_line(what: str, total: int, *, progress: bool) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many of several steps are done, from two seconds on.

    Parameters
    ----------
    what : str
        What the steps do, such as ``read logs``.
    total : int
        Number of steps [-].
    progress : bool
        Whether to show a line where the error stream is a terminal.

    Yields
    ------
    advance : callable
        To be called after each step.
    """
    from tqdm import tqdm

    # None is tqdm's word for: where nobody looks, show nothing
    disable = None if progress else True
    with tqdm(total=total, desc=what, delay=_DELAY, disable=disable) as line:

        def advance() -> None:
            """Count one more step."""
            line.update()

        yield advance


def follow(what: str, items: Sequence[T], *, progress: bool) -> Iterator[T]:
    """Hand out items one by one, with a line as `show_line` shows it.

    Examples
    --------
    >>> list(follow("read logs", ["a.log", "b.log"], progress=False))
    ['a.log', 'b.log']
    """
    with show_line(what, len(items), progress=progress) as advance:
        for item in items:
            yield item
            advance()
