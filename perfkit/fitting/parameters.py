"""Parameters of fitted models, and what is known about a fit: how well it holds, for what, and from
where."""

import html
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from perfkit.ground.units import (
    Array,
    Typed,
    Values,
    coerce,
    escape,
    format_table,
    format_time,
    significant,
)
from perfkit.models.algorithms import ALGORITHMS
from perfkit.models.collectives import OPERATIONS

#: Exponent with which the spread of kernels falls with their time [-]; docs/formulas.md, table 9.1.
SPREAD_SLOPE = 0.2
#: Largest time, scale or standard error of a parameter [s or -].
LARGEST = 1e6
TINY = 5e-324  # the smallest number above 0
#: Smallest and largest value of the numbers of a fit, by name and in their unit; others go from 0
#: to `LARGEST`. No machine comes near these limits: a number outside them is damaged or mistyped.
LIMITS: Mapping[str, tuple[float, float]] = {
    "alpha": (TINY, LARGEST),
    "beta": (TINY, LARGEST),
    "sharpness": (0.1, 1e3),
    "contention": (0.0, 1.0),
    "l2": (0.0, 1e18),
    "l3": (0.0, 1e18),
    "pages": (1.0, math.inf),
    "l3_share": (1e-3, 1.0),
    "compute_efficiency": (1e-6, 1e3),
    "memory_efficiency": (1e-6, 1e3),
    "tile_m": (1.0, 1e6),
    "tile_n": (1.0, 1e6),
    "head_multiple": (1.0, 1e6),
    "softmax_width": (0.0, 1e6),
    "diagonal": (0.0, 1e9),
    "hit": (0.0, 1.0),
    "spread": (0.0, 10.0),
    "bias": (-10.0, 10.0),
    "spread_time": (1e-12, LARGEST),
}
#: Parameters that are pure numbers.
_PURE = (
    "sharpness",
    "compute_efficiency",
    "memory_efficiency",
    "tile_m",
    "tile_n",
    "head_multiple",
    "softmax_width",
    "diagonal",
    "hit",
    "scale",
    "cold_scale",
    "contention",
    "pages",
    "l3_share",
)
_COLLECTIVE = re.compile(rf"(?:([2-9]|[1-9][0-9]+)|any)(?:\.({'|'.join(ALGORITHMS)}))?", re.ASCII)


@dataclass(frozen=True)
class Parameter(Typed):
    """A number of a fitted model.

    Parameters
    ----------
    value : float
        The number [unit].
    unit : str, optional
        ``-`` for pure numbers [-].
    stderr : float, optional
        Standard error; None for a number that was kept fixed or stopped at a bound [unit].
    low, high : float, optional
        Smallest and largest value that a model allows [unit].
    """

    value: float
    unit: str = "-"
    stderr: float | None = None
    low: float = 0.0
    high: float = LARGEST


def find_unit(name: str) -> str:
    """Unit of a parameter by its name, as perfkit's own fits have it; terms of sums are times.

    Examples
    --------
    >>> [find_unit(name) for name in ("alpha1", "beta", "sharpness", "l2", "nbytes")]
    ['s', 's/B', '-', 'B', 's']
    """
    if name.startswith("beta"):
        return "s/B"
    if name in ("l2", "l3", "weight_bytes"):
        return "B"
    return "-" if name in _PURE or name.endswith("_weight") else "s"


def make_parameter(
    name: str, value: float, unit: str | None = None, stderr: float | None = None
) -> Parameter:
    """Parameter of this name: in its usual unit if none is given, and between its `LIMITS`."""
    low, high = LIMITS.get(name, (0.0, LARGEST))
    return Parameter(
        value=coerce(name, value, float),
        unit=find_unit(name) if unit is None else coerce(f"unit of {name}", unit, str),
        stderr=coerce(f"standard error of {name}", stderr, float | None),
        low=low,
        high=high,
    )


class Key(NamedTuple):
    """Name of a fit in a platform: ``<operation>.<ranks or any>[.<algorithm>]`` or
    ``<kind>[.<variant>]``.

    Examples
    --------
    >>> Key.parse("all_gather.any.rail").algorithm, Key.parse("gemm.fp8").variant, str(Key("all_reduce", 8))
    ('rail', 'fp8', 'all_reduce.8')
    """

    operation: str  # a collective, or a class of kernels
    ranks: int | None = None  # None for a law over all counts, and for kernels
    algorithm: str = ""  # one of `ALGORITHMS`; empty where the library chooses
    variant: str = ""  # finer class of kernels, or number format

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str, *, collective: bool = False) -> "Key":
        """Read a name such as ``all_reduce.8`` or ``gemm.nt``; a ValueError says how a collective
        is named."""
        operation, _, rest = text.partition(".")
        if operation not in OPERATIONS and not collective:
            return cls(operation, variant=rest)
        match = _COLLECTIVE.fullmatch(rest)
        if match is None or operation not in OPERATIONS:
            rule = f"<operation>.<ranks or any>[.<algorithm>], such as all_reduce.8; known are {', '.join(OPERATIONS)}"
            raise ValueError(
                f"collective {text!r} must be {rule} and the algorithms {', '.join(ALGORITHMS)}"
            )
        return cls(operation, int(match[1]) if match[1] else None, match[2] or "")

    def __str__(self) -> str:
        collective = self.operation in OPERATIONS
        return ".".join(
            filter(None, (self.operation, str(self.ranks or "any") * collective, *self[2:]))
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(Typed, Mapping[str, float]):
    """What is known about a fitted model; its parameters are fields of the models of
    `perfkit.fitting.models`.

    A fit is a mapping from the names of its parameters to their values, so that ``form(x, **fit)``
    closes the loop.

    Parameters
    ----------
    spread : float, optional
        Standard deviation of the log residuals, on held-out points where there are any [-].
    bias : float, optional
        Mean of the log residuals, measured over predicted [-].
    ranges : mapping of str to (low, high), optional
        Measured range of each swept variable, in base units.
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
    at_bounds : tuple of str, optional
        Parameters that stopped at a bound of the fit; terms that stopped at zero are not among the
        parameters.
    spread_time : float, optional
        Predicted time at which `spread` holds, see `spread_at`; None where it holds at all times
        [s].
    dtypes : tuple of str, optional
        Number formats that were measured; empty where unknown [-].
    stands_for : str, optional
        Class of kernels that was not measured and takes this fit instead [-].
    transferred : tuple of str, optional
        Machines or formats that the fit was carried over from, and what changed, the latest first
        [-].
    quality : str, optional
        ``poor`` where measurements scatter widely around the form, else empty [-].
    sources : tuple of str, optional
        Files that were read [-].
    """

    #: Name of the form in platform files.
    form: ClassVar[str] = ""
    #: The form as `Estimate.explain` writes it; n is the message, e an efficiency, q the sharpness.
    equation: ClassVar[str] = ""
    #: Names of parameters that a fit may lack.
    optional: ClassVar[tuple[str, ...]] = ()

    spread: float = 0.0
    bias: float = 0.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    n: int = 0
    kind: str = "fitted"
    source: str = ""
    date: str = ""
    notes: tuple[str, ...] = ()
    at_bounds: tuple[str, ...] = ()
    spread_time: float | None = None
    dtypes: tuple[str, ...] = ()
    stands_for: str = ""
    transferred: tuple[str, ...] = ()
    quality: str = ""
    sources: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters by name, without those that the fit lacks."""
        own = {name: getattr(self, name) for name in self.list_parameters()}
        return {name: parameter for name, parameter in own.items() if parameter is not None}

    @property
    def units(self) -> dict[str, str]:
        """Unit of each parameter."""
        return {name: parameter.unit for name, parameter in self.parameters.items()}

    @property
    def stderr(self) -> dict[str, float]:
        """Standard errors by name of the parameter, where they are known."""
        return {
            name: parameter.stderr
            for name, parameter in self.parameters.items()
            if parameter.stderr is not None
        }

    @cached_property
    def values_by_name(self) -> Mapping[str, float]:
        """Values of the parameters by name, as closed forms take them."""
        return {name: parameter.value for name, parameter in self.parameters.items()}

    def __getitem__(self, name: str) -> float:
        return self.values_by_name[name]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [item.name for item in fields(self)]
        # as tuples, since a number that is not a number equals itself
        return tuple(getattr(self, name) for name in names) == tuple(
            getattr(other, name) for name in names
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    @classmethod
    def list_parameters(cls) -> tuple[str, ...]:
        """Names of all parameters that the form has, needed ones first."""
        return _list_own_fields(cls)

    @classmethod
    def build(
        cls,
        values: Mapping[str, float],
        *,
        units: Mapping[str, str] | None = None,
        stderr: Mapping[str, float] | None = None,
        **about: Any,
    ) -> Self:
        """Make a fit from plain numbers.

        Parameters
        ----------
        values : mapping of str to float
            Parameters by name, in their units.
        units : mapping of str to str, optional
            Units by name; by default those of `find_unit`.
        stderr : mapping of str to float, optional
            Standard errors by name, in the units of the parameters.
        **about : object
            Other fields of the fit.

        Returns
        -------
        fit : Fit
            The fitted model.

        Raises
        ------
        ValueError
            For a parameter that the form does not have, and for a missing one.

        Examples
        --------
        >>> from perfkit.fitting import Pipelined
        >>> Pipelined.build({"alpha": 2e-5, "beta": 5e-12})
        Pipelined(alpha=2e-05 s, beta=5e-12 s/B; spread 0%, n=0, fitted)
        """
        return cls._assemble(cls._make_parameters(values, units or {}, stderr or {}), about)

    @classmethod
    def _make_parameters(
        cls, values: Mapping[str, float], units: Mapping[str, str], stderr: Mapping[str, float]
    ) -> dict[str, Parameter]:
        """Parameters of this form by name, or an error for names that it does not have."""
        known = cls.list_parameters()
        for name in (*values, *units, *stderr):
            if name not in known or name not in values:
                raise ValueError(
                    f"{escape(str(name), 80)} is not a parameter of this fit; "
                    f"{cls.form} takes {', '.join(known)}"
                )
        for name in known:
            if name not in values and name not in cls.optional:
                raise ValueError(f"{name} is missing; {cls.form} takes {', '.join(known)}")
        return {
            name: make_parameter(name, value, units.get(name), stderr.get(name))
            for name, value in values.items()
        }

    @classmethod
    def _assemble(cls, parameters: Mapping[str, Parameter], about: Mapping[str, Any]) -> Self:
        """Make a fit from its parameters by name, and from its other fields."""
        given: dict[str, Any] = {**parameters, **about}
        return cls(**given)

    def with_values(
        self,
        values: Mapping[str, float],
        *,
        stderr: Mapping[str, float] | None = None,
        **about: Any,
    ) -> Self:
        """Give some parameters other values.

        Parameters
        ----------
        values : mapping of str to float
            New values by name, also of parameters that the fit lacks.
        stderr : mapping of str to float, optional
            All standard errors by name; by default they stay as they are.
        **about : object
            Other fields of the fit.

        Returns
        -------
        fit : Fit
            The changed fit.

        Raises
        ------
        ValueError
            For a parameter that the form does not have.
        """
        errors = self.stderr if stderr is None else stderr
        parameters = self._make_parameters({**self, **values}, self.units, errors)
        evidence = {item.name: getattr(self, item.name) for item in fields(Fit)}
        return self._assemble(parameters, {**evidence, **about})

    def __repr__(self) -> str:
        values = (
            f"{name}={parameter.value:.4g} {parameter.unit}".rstrip(" -")
            for name, parameter in self.parameters.items()
        )
        return (
            f"{type(self).__name__}({', '.join(values)}; "
            f"spread {self.spread:.0%}, n={self.n}, {self.kind})"
        )

    def spread_at(self, seconds: Values) -> Array:
        r"""Spread of measurements around the prediction, for predicted times.

        Parameters
        ----------
        seconds : float or array
            Predicted times [s].

        Returns
        -------
        spread : array
            Standard deviation of log(measured / predicted) [-]. With a `spread_time` it is larger
            for shorter times and smaller for longer ones, from half to three times `spread`.

        Notes
        -----
        .. math:: s(t) = s \, (t / t_s)^{-0.2}

        Launches, tiles and waves that do not fill the device make short kernels less predictable.
        Long kernels share one error, the power cap, so their spread stops at a half. Evidence:
        docs/formulas.md, table 9.1.

        Examples
        --------
        >>> fit = Fit(spread=0.1, spread_time=1e-4)
        >>> fit.spread_at([4e-6, 1e-4, 1.0]).round(3)
        array([0.19, 0.1 , 0.05])
        """
        times = np.asarray(seconds, dtype=float)
        if self.spread_time is None:
            return np.full(times.shape, self.spread)
        share = np.maximum(times, 1e-12) / self.spread_time
        return np.asarray(self.spread * np.clip(share**-SPREAD_SLOPE, 0.5, 3.0))

    def report(self) -> str:
        """Describe the fit in a few lines: values ± standard errors, range, residuals, origin,
        warnings."""
        rows = []
        for name, value in self.items():
            error, unit = (
                self.stderr.get(name, math.nan),
                self.units.get(name, "-").removeprefix("-"),
            )
            known = math.isfinite(error)
            share = f" ({abs(error / value):.1%})" if value else ""
            shown = significant(value, error) if known else f"{value:.4g}"
            rows.append(
                (
                    name,
                    f"{shown} {unit}",
                    f"± {error:.2g}{share}" if known else "(no standard error)",
                )
            )
        where = "" if self.spread_time is None else f" at {format_time(self.spread_time)}"
        facts = [
            f"residual spread {self.spread:.1%}{where}, bias {self.bias:+.1%}, {self.n} points, {self.kind}"
        ]
        facts += [
            f"valid for {name} from {low:.4g} to {high:.4g}"
            for name, (low, high) in self.ranges.items()
        ]
        facts += (
            [f"source: {' '.join((self.source, self.date)).strip()}"]
            if self.source or self.date
            else []
        )
        facts += [f"warning: {name} is at a bound of the fit" for name in self.at_bounds]
        facts += [f"note: transferred from {text}" for text in self.transferred]
        facts += [f"note: {text}" for text in self.notes]
        return "\n  ".join(
            [f"[{self.form}]", *(format_table(rows).split("\n") if rows else ()), *facts]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report())}</pre>"


@cache
def _list_own_fields(model: Any) -> tuple[str, ...]:
    """Names of the fields that a model has beside those of every fit."""
    return tuple(item.name for item in fields(model)[len(fields(Fit)) :])
