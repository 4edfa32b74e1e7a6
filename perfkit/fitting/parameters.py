"""What a fit found: parameters with standard errors, validity and provenance, ready to unpack into their model."""

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from perfkit.units import Array, Typed, Values, format_time, significant

__all__ = ["SPREAD_SLOPE", "Fit"]

#: How the spread of kernels falls with their time, see `Fit.spread_at` [-].
SPREAD_SLOPE = 0.2


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

    def __getitem__(self, name: str) -> float:
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name}={value:.4g} {self.units.get(name, '')}".rstrip(" -") for name, value in self.items()
        )
        return f"Fit({self.form}: {values}; spread {self.spread:.0%}, n={self.n}, {self.kind})"

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

        Launches, tiles and waves that do not fill the device weigh on short kernels. The exponent was chosen on A100
        and H100, where it is 0.18 and 0.22 over all bf16 GEMMs of aiconfigurator-core 0.12.0, and 0.12 to 0.29 over
        those at hand then; seven other GPUs have 0.15 to 0.30. Long kernels err together, with the power cap, so their
        spread stops at a half: that limit was set with all nine in view, and the largest products of B300 and GB200,
        predicted 13 to 15 % too fast from smaller ones, still lie outside.

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

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value with unit, standard error in words) for every parameter."""
        rows = []
        for name, value in self.items():
            error, unit = self.stderr.get(name), self.units.get(name, "-").removeprefix("-")
            if error is None or not math.isfinite(error):
                rows.append((name, f"{value:.4g} {unit}".rstrip(), "(no standard error)"))
            else:
                share = f" ({abs(error / value):.1%})" if value else ""
                rows.append((name, f"{significant(value, error)} {unit}".rstrip(), f"± {error:.2g}{share}"))
        return rows

    def _facts(self) -> list[str]:
        """Return the lines under the parameters: residuals, validity, origin, warnings, notes."""
        where = "" if self.spread_time is None else f" at {format_time(self.spread_time)}"
        facts = [f"residual spread {self.spread:.1%}{where}, bias {self.bias:+.1%}, {self.n} points, {self.kind}"]
        facts += [f"valid for {name} from {low:.4g} to {high:.4g}" for name, (low, high) in self.ranges.items()]
        facts += [f"source: {' '.join((self.source, self.date)).strip()}"] if self.source or self.date else []
        facts += [f"warning: {name} is at a bound of the fit" for name in self.at_bounds]
        return facts + [f"note: {note}" for note in self.notes]

    def report(self) -> str:
        """Describe the fit for a person: value ± standard error, validity, residuals, origin, warnings."""
        rows = self._rows()
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {error}" for name, value, error in rows]
        return "\n".join([f"[{self.form}]", *lines, *(f"  {fact}" for fact in self._facts())])

    def _repr_html_(self) -> str:
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows()
        )
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in self._facts())
        return (
            f"<table><caption>{html.escape(self.form)}</caption><tr><th>parameter</th><th>value</th><th>standard error"
            f"</th></tr>{cells}</table><ul>{facts}</ul>"
        )
