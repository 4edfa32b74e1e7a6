"""What a fit found: parameters with standard errors, validity and provenance, ready to unpack into their model."""

import html
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, Typed, Values, format_table, format_time, significant
from perfkit.models.collectives import OPERATIONS

#: Exponent with which the spread of kernels falls with their time [-]; docs/formulas.md, table 9.1.
SPREAD_SLOPE = 0.2
#: Algorithms of collectives; ``rail`` is one rank of each node, over the network between nodes.
ALGORITHMS = ("ring", "tree", "in_network", "two_level", "rail")
_COLLECTIVE = re.compile(rf"(?:([2-9]|[1-9][0-9]+)|any)(?:\.({'|'.join(ALGORITHMS)}))?", re.ASCII)


class Key(NamedTuple):
    """Name of a fit in a platform: ``<operation>.<ranks or any>[.<algorithm>]`` or ``<kind>[.<variant>]``.

    Parameters
    ----------
    operation : str
        Collective, or class of kernels [-].
    ranks : int, optional
        Ranks of a collective; None for a law over all counts, and for kernels [-].
    algorithm : str, optional
        One of `ALGORITHMS`; empty for what the library chooses, and for kernels [-].
    variant : str, optional
        Finer class of kernels or number format [-].

    Examples
    --------
    >>> Key.parse("all_gather.any.rail").algorithm, Key.parse("gemm.fp8").variant, str(Key("all_reduce", 8))
    ('rail', 'fp8', 'all_reduce.8')
    """

    operation: str
    ranks: int | None = None
    algorithm: str = ""
    variant: str = ""

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str, *, collective: bool = False) -> "Key":
        """Read a name.

        Parameters
        ----------
        text : str
            Such as ``all_reduce.8`` or ``gemm.nt`` [-].
        collective : bool, optional
            Whether it must be a collective's.

        Returns
        -------
        key : Key
            Its parts [-].

        Raises
        ------
        ValueError
            For the name of a collective that cannot be read.
        """
        operation, _, rest = text.partition(".")
        if operation not in OPERATIONS and not collective:
            return cls(operation, variant=rest)
        match = _COLLECTIVE.fullmatch(rest)
        if match is None or operation not in OPERATIONS:
            rule = f"<operation>.<ranks or any>[.<algorithm>], such as all_reduce.8; known are {', '.join(OPERATIONS)}"
            raise ValueError(f"collective {text!r} must be {rule} and the algorithms {', '.join(ALGORITHMS)}")
        return cls(operation, int(match[1]) if match[1] else None, match[2] or "")

    def __str__(self) -> str:
        collective = self.operation in OPERATIONS
        return ".".join(filter(None, (self.operation, str(self.ranks or "any") * collective, *self[2:])))


@dataclass(frozen=True)
class Fit(Typed, Mapping[str, float]):
    """Parameters of one model form: a mapping, so that ``model(x, **fit)`` closes the loop.

    Parameters
    ----------
    form : str
        Name of the model the parameters belong to, for example ``pipelined`` [-].
    parameters : mapping of str to float
        Keyword arguments of the model, each in the unit given in `units`.
    stderr : mapping of str to float, optional
        Standard errors; a parameter that is missing here was held fixed or stopped at a bound.
    spread : float, optional
        Standard deviation of the log residuals, on held-out points where there are any [-].
    bias : float, optional
        Mean of the log residuals, measured over predicted [-].
    ranges : mapping of str to (low, high), optional
        Where the fit was made, by swept variable, in base units.
    n : int, optional
        Points fitted [-].
    kind : str, optional
        ``fitted``, ``assumed``, ``datasheet`` or ``measured``.
    source : str, optional
        Data id or citation.
    date : str, optional
        Day of the fit, ISO 8601.
    notes : tuple of str, optional
        What a reader should know.
    units : mapping of str to str, optional
        Unit by parameter; ``-`` for pure numbers.
    at_bounds : tuple of str, optional
        Parameters that stopped at a bound of the fit; terms that stopped at zero are not among the parameters.
    spread_time : float, optional
        Predicted time at which `spread` holds, see `spread_at`; None where it holds at all times [s].
    dtypes : tuple of str, optional
        Number formats that were measured; empty where unknown [-].
    stands_for : str, optional
        Class of kernels that was not measured, which this fit prices instead [-].
    transferred : tuple of str, optional
        Machines or formats from which it was carried over, and what changed, the last one first [-].
    quality : str, optional
        ``poor`` where measurements scatter widely around the form, else empty [-].
    sources : tuple of str, optional
        Files that were read [-].

    Examples
    --------
    >>> fit = Fit("pipelined", {"alpha": 2e-5, "beta": 5e-12}, units={"alpha": "s", "beta": "s/B"})
    >>> dict(**fit)
    {'alpha': 2e-05, 'beta': 5e-12}
    >>> fit
    Fit(pipelined: alpha=2e-05 s, beta=5e-12 s/B; spread 0%, n=0, fitted)
    """

    form: str
    parameters: Mapping[str, float]
    stderr: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    bias: float = 0.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    n: int = 0
    kind: str = "fitted"
    source: str = ""
    date: str = ""
    notes: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    at_bounds: tuple[str, ...] = ()
    spread_time: float | None = None
    dtypes: tuple[str, ...] = ()
    stands_for: str = ""
    transferred: tuple[str, ...] = ()
    quality: str = ""
    sources: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __repr__(self) -> str:
        values = (f"{name}={value:.4g} {self.units.get(name, '')}".rstrip(" -") for name, value in self.items())
        return f"Fit({self.form}: {', '.join(values)}; spread {self.spread:.0%}, n={self.n}, {self.kind})"

    def spread_at(self, seconds: Values) -> Array:
        r"""Spread of measurements around what the fit predicts, by the predicted time.

        Parameters
        ----------
        seconds : float or array
            Predicted times [s].

        Returns
        -------
        spread : array
            Standard deviation of log(measured / predicted): `spread` where there is no `spread_time`, otherwise more
            for shorter times and less for longer ones, between three times and a half of it [-].

        Notes
        -----
        .. math:: s(t) = s \, (t / t_s)^{-0.2}

        Launches, tiles and waves that do not fill the device make short kernels less predictable. Long kernels have a
        common error, the power cap, so their spread stops at a half. Evidence: docs/formulas.md, table 9.1.

        Examples
        --------
        >>> fit = Fit("roofline", {"launch": 4e-6}, spread=0.1, spread_time=1e-4)
        >>> fit.spread_at([4e-6, 1e-4, 1.0]).round(3)
        array([0.19, 0.1 , 0.05])
        """
        times = np.asarray(seconds, dtype=float)
        if self.spread_time is None:
            return np.full(times.shape, self.spread)
        share = np.maximum(times, 1e-12) / self.spread_time
        return np.asarray(self.spread * np.clip(share**-SPREAD_SLOPE, 0.5, 3.0))

    def report(self) -> str:
        """Describe the fit for a person: value ± standard error, validity, residuals, origin, warnings."""
        rows = []
        for name, value in self.items():
            error, unit = self.stderr.get(name, math.nan), self.units.get(name, "-").removeprefix("-")
            known = math.isfinite(error)
            share = f" ({abs(error / value):.1%})" if value else ""
            shown = significant(value, error) if known else f"{value:.4g}"
            rows.append((name, f"{shown} {unit}", f"± {error:.2g}{share}" if known else "(no standard error)"))
        where = "" if self.spread_time is None else f" at {format_time(self.spread_time)}"
        facts = [f"residual spread {self.spread:.1%}{where}, bias {self.bias:+.1%}, {self.n} points, {self.kind}"]
        facts += [f"valid for {name} from {low:.4g} to {high:.4g}" for name, (low, high) in self.ranges.items()]
        facts += [f"source: {' '.join((self.source, self.date)).strip()}"] if self.source or self.date else []
        facts += [f"warning: {name} is at a bound of the fit" for name in self.at_bounds]
        facts += [f"note: transferred from {text}" for text in self.transferred]
        facts += [f"note: {text}" for text in self.notes]
        return "\n  ".join([f"[{self.form}]", *(format_table(rows).split("\n") if rows else ()), *facts])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report())}</pre>"
