"""What a search tells while it runs: a line on a terminal, or calls of a function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from perfkit.ground.units import check_type, format_time

#: Called with the share of the work that is done [-], the best time so far and the lower bound [s].
Report: TypeAlias = Callable[[float, float, float], None]
#: A search that ends sooner shows no line [s].
_DELAY = 1.0
_FORMAT = "{desc}, {elapsed_s:.1f} s |{bar:20}|"


@contextmanager
def follow(progress: bool | Callable[[float, float], None]) -> Iterator[Report]:
    """Show a line while a search runs, or call a function.

    Parameters
    ----------
    progress : bool or callable
        Whether to show a line where the error stream is a terminal, or a function of the share of
        the work that is done [-] and the best time so far [s].

    Yields
    ------
    report : callable
        What the search calls, see `Report`.
    """
    check_type("progress", progress, bool | Callable)
    if not isinstance(progress, bool):
        yield lambda done, time, bound: progress(done, time)
        return
    from tqdm import tqdm

    # None is tqdm's word for: where nobody looks, show nothing
    disable = None if progress else True
    with tqdm(total=1.0, delay=_DELAY, disable=disable, bar_format=_FORMAT) as line:

        def show(done: float, time: float, bound: float) -> None:
            """Write the line again."""
            line.set_description_str(describe(time, bound), refresh=False)
            line.update(done - line.n)

        yield show


def describe(time: float, bound: float) -> str:
    """Say the best time so far and its lower bound [s].

    Examples
    --------
    >>> describe(0.0198, 0.0193)
    'shard: 19.8 ms, nothing better than 19.3 ms (2.59%)'
    """
    gap = f" ({time / bound - 1:.2%})" if bound else ""
    return f"shard: {format_time(time)}, nothing better than {format_time(bound)}{gap}"
