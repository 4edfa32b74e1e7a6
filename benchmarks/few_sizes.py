"""How far sums of terms err that are fitted to few sizes of a kernel, from saved measurements.

    python -m benchmarks.few_sizes [--machines NAME ...]

A few of the measured sizes of each class are drawn and fitted; sizes left out are judged if their
time lies between those of the drawn ones. A fit with as many terms as sizes has no residuals, so its
spread is the least spread of `perfkit.fitting.fit_additive`, which comes from zen3-2.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import HALF_WIDTH
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.fit import fit_platform
from perfkit.calibration.fit_kernels import count_units, size_cases
from perfkit.fitting import fit_additive
from perfkit.ground.files import find_reference
from perfkit.measure.records import MeasuredKernel, read_measurements

#: Sizes that are drawn of a class [-], and how often.
_SIZES, _DRAWS = (2, 3, 4, 5, 6), 6


@dataclass(frozen=True)
class FewSizes:
    """A fit to few sizes: measurements beyond its terms, its spread, and the errors of sizes left
    out (logarithm of measured over fitted) [-]."""

    beyond: int
    spread: float
    errors: np.ndarray


def _count_sizes(rows: int) -> Iterator[int]:
    """How many sizes are drawn, again and again, if three and more are left to judge."""
    for count in _SIZES:
        if count + 3 <= rows:
            for _ in range(_DRAWS):
                yield count


def _fit_drawn(terms: Mapping[str, np.ndarray], seconds: np.ndarray, drawn: np.ndarray) -> FewSizes:
    """Fit some sizes of a class, and judge those whose time lies between theirs."""
    fit = fit_additive({name: counts[drawn] for name, counts in terms.items()}, seconds[drawn])
    is_above = seconds > seconds[drawn].min()
    is_below = seconds < seconds[drawn].max()
    between = is_above & is_below
    between[drawn] = False
    fitted = np.zeros(len(seconds))
    for name, counts in terms.items():
        fitted = fitted + fit.get(name, 0.0) * counts
    errors = np.log(seconds[between] / fitted[between])
    return FewSizes(len(drawn) - len(fit), fit.spread, errors)


def fit_few(machine: str, seed: int = 1) -> Iterator[FewSizes]:
    """Fit every class of a measured machine to a few of its sizes, drawn again and again."""
    path = find_reference("measured", f"{machine}.measurements.json")
    measurements = read_measurements(json.loads(path.read_text(encoding="utf-8")))
    context = fit_platform(measurements).context
    caches: Mapping[str, float] = context.caches or {"l2": np.inf, "l3": np.inf}
    capacities = (caches["l2"], caches["l3"])
    pages = caches.get("pages", np.inf)
    classes: dict[tuple[str, str], list[MeasuredKernel]] = {}
    for kernel in measurements.kernels:
        classes.setdefault((kernel.kind, kernel.variant), []).append(kernel)
    rng = np.random.default_rng(seed)
    for (kind, variant), kernels in classes.items():
        sizes = size_cases(kernels, capacities, pages)
        units = count_units(f"{kind}.{variant}" if variant else kind, sizes)
        terms = {name: np.broadcast_to(each, len(kernels)) for name, each in units.items()}
        seconds = np.array([kernel.median for kernel in kernels])
        for count in _count_sizes(len(kernels)):
            drawn = rng.permutation(len(kernels))[:count]
            yield _fit_drawn(terms, seconds, drawn)


def hold(fits: list[FewSizes]) -> float:
    """Share of left-out sizes inside the 80 % intervals [-]."""
    inside = [np.abs(fit.errors) < HALF_WIDTH * fit.spread for fit in fits]
    return float(np.concatenate(inside).mean())


def _judge(machine: str, beyond: int, fits: list[FewSizes]) -> dict[str, Any]:
    """The row of fits with so many sizes more than terms."""
    errors = np.abs(np.concatenate([fit.errors for fit in fits]))
    needed = float(np.quantile(errors, 0.8)) / HALF_WIDTH
    return {
        "machine": machine,
        "beyond": beyond,
        "fits": len(fits),
        "needed": needed,
        "held": hold(fits),
    }


_COLUMNS = {
    "machine": "{machine}",
    "sizes beyond terms": "{beyond}",
    "fits": "{fits}",
    "spread that holds 80 %": "{needed:.2f}",
    "80 % intervals hold": "{held:.0%}",
}


@command({"--machines": {"nargs": "*", "default": ["zen3-2", "zen5-2", "xeon-2"]}})
def main(given: Any) -> None:
    """Print the spread that holds 80 % of the sizes left out, and how many the intervals hold."""
    rows = []
    for machine in given.machines:
        fits = list(fit_few(machine))
        for beyond in (0, 1, 2, 3):
            rows.append(_judge(machine, beyond, [fit for fit in fits if fit.beyond == beyond]))
    print(lay_out(rows, _COLUMNS))
