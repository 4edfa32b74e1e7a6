"""The inventory of a platform: every number with its unit and origin, as rows, frame and HTML."""

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from perfkit.units import significant

if TYPE_CHECKING:
    import polars

__all__ = ["Number", "list_numbers", "render_numbers", "tabulate_numbers"]


class Number(NamedTuple):
    """One number of a platform, where it stands and what it rests on; see `perfkit.hardware.Quantity`."""

    group: str
    name: str
    value: float
    unit: str
    kind: str
    stderr: float | None
    source: str
    date: str
    basis: str = ""


def list_numbers(platform: Any) -> Iterator[Number]:
    """List every number of a platform.

    Parameters
    ----------
    platform : Platform
        The platform.

    Yields
    ------
    number : Number
        Peaks, memory, links, host overheads, then the parameters and the spread of every fit.
    """
    quantities = [("peak", dtype, peak) for dtype, peak in platform.device.peaks.items()]
    for level in platform.device.memory:
        quantities += [("memory", f"{level.name} capacity", level.capacity)] if level.capacity else []
        quantities += [("memory", f"{level.name} bandwidth", level.bandwidth)] if level.bandwidth else []
    for name, link in platform.network.links.items():
        quantities += [("link", f"{name} bandwidth", link.bandwidth), ("link", f"{name} latency", link.latency)]
    quantities += [("host", name, overhead) for name, overhead in platform.host.items()]
    for group, name, q in quantities:
        yield Number(group, name, q.value, q.unit, q.kind, q.stderr, q.source, q.date, q.basis)
    for group, fits in (
        ("kernel", platform.kernels),
        ("collective", platform.collectives),
        ("context", platform.context),
    ):
        for key, fit in fits.items():
            for name, value in fit.items():
                unit, error = fit.units.get(name, "-"), fit.stderr.get(name)
                yield Number(group, f"{key} {name}", value, unit, fit.kind, error, fit.source, fit.date)
            yield Number(group, f"{key} spread", fit.spread, "-", fit.kind, None, fit.source, fit.date)


def tabulate_numbers(platform: Any) -> "polars.DataFrame":
    """Put every number of a platform into a frame.

    Parameters
    ----------
    platform : Platform
        The platform.

    Returns
    -------
    table : polars.DataFrame
        Columns as in `Number`; values in the unit of their row.
    """
    import polars

    types = {name: polars.Float64 if name in ("value", "stderr") else polars.String for name in Number._fields}
    return polars.DataFrame(list(list_numbers(platform)), schema=types, orient="row")


def render_numbers(platform: Any) -> str:
    """Write every number of a platform as an HTML table.

    Parameters
    ----------
    platform : Platform
        The platform.

    Returns
    -------
    text : str
        One table, safe to show whatever the names in it are.
    """
    rows: list[tuple[str, ...]] = [Number._fields]
    for group, name, value, unit, kind, error, *origin in list_numbers(platform):
        doubt = "" if error is None else f"{error:.2g}"
        rows.append((group, name, significant(value, error), unit, kind, doubt, *origin))
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><caption>{html.escape(repr(platform))}</caption>{body}</table>"
