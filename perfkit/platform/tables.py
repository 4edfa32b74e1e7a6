"""Every number of a platform, as a frame, in words and in a report."""

import numpy as np

from perfkit.ground.forks import check_threads
from perfkit.ground.results import Sections, Table
from perfkit.platform.machine import Machine, Number, list_numbers

#: Kinds of evidence, the strongest first.
_EVIDENCE = ("measured", "fitted", "datasheet", "assumed")


def tabulate_numbers(machine: Machine) -> Table:
    """Every number of the platform: a frame with the columns of `Number`, each value in the unit of
    its row."""
    import polars

    types = {
        name: polars.Float64 if name in ("value", "stderr") else polars.String
        for name in Number._fields
    }
    return polars.DataFrame(list(list_numbers(machine)), schema=types, orient="row")


def explain_numbers(machine: Machine) -> str:
    """Every number of the platform in words, by where it comes from: measured ones first.

    Returns
    -------
    text : str
        A line for each source with its kind and date, below it a line for each of its numbers with
        its unit and, where known, its standard error. The spread of a fit, the standard deviation
        of ln(measured / predicted), is one of its numbers.
    """
    numbers = list(list_numbers(machine))
    by_source: dict[tuple[str, str, str], list[Number]] = {}
    for number in numbers:
        by_source.setdefault((number.kind, number.source, number.date), []).append(number)
    lines = [f"{machine.name}: where its {len(numbers)} numbers come from"]
    for kind, source, date in sorted(by_source, key=lambda key: (_EVIDENCE.index(key[0]), key[1:])):
        lines.append(f"{kind}, {date}: {source}")
        for number in by_source[kind, source, date]:
            error = "" if number.stderr is None else f" ± {number.stderr:.2g}"
            unit = "" if number.unit == "-" else f" {number.unit}"
            basis = f" ({number.basis})" if number.basis else ""
            lines.append(f"  {number.group} {number.name}: {number.value:.4g}{error}{unit}{basis}")
    return "\n".join(lines)


def list_sections(machine: Machine) -> Sections:
    """Sections of a report: rooflines, curves of collectives, assumptions, provenance, and every
    number."""
    check_threads()
    from perfkit import plots
    from perfkit.platform.collectives import price_collective  # only exchanges need it

    peaks = {name: peak.value for name, peak in machine.device.peaks.items()}
    levels = {
        level.name: level.bandwidth.value for level in machine.device.memory if level.bandwidth
    }
    if peaks and levels:
        yield "", plots.roofline_chart([], peaks, levels, title=f"Roofs of {machine.device.name}")
    ranks, sizes = machine.network.ranks, [2.0**power for power in range(10, 31)]
    names = dict.fromkeys(key.split(".")[0] for key in machine.collectives)
    if ranks == 1:  # it exchanges nothing
        names = {}
    curves = []
    for name in names:
        for size in sizes:
            time = float(price_collective(machine, name, np.asarray(size), ranks).time)
            curves.append({"operation": name, "ranks": ranks, "nbytes": size, "time_s": time})
    if curves:
        yield (
            "",
            plots.collective_curves(
                [], curves, title=f"Collectives on {ranks} ranks of {machine.name}"
            ),
        )
    numbers = tabulate_numbers(machine)
    yield "Assumptions", numbers.filter(kind="assumed").drop("kind")
    yield "Provenance", [("what", "value"), *machine.provenance.items()]
    yield "Numbers", numbers
