"""What real iterations add to isolated kernels and collectives, as calibrations find it; and how it is applied."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from perfkit.fitting import Fit
from perfkit.ground.units import Typed

#: Entry for every family that has none of its own.
ANY = "any"


@dataclass(frozen=True)
class Context(Typed):
    """What real iterations add to isolated kernels and collectives; false where nothing was calibrated.

    Parameters
    ----------
    kernels : mapping of str to Fit, optional
        Parameters of `perfkit.models.kernels.in_context` by class of kernels, such as ``gemm`` and ``gemm.nt`` [-].
    iterations : mapping of str to Fit, optional
        Whole iterations on one rank by workload family, ``any`` for others: ``scale`` on all operations [-] and host
        time ``per_operation`` [s].
    parallel : mapping of str to Fit, optional
        The same on several ranks; there a collective takes ``per_collective`` longer and computing after it
        ``per_resume`` [s].
    paces : mapping of str to Fit, optional
        Parameters of `perfkit.models.drift.at_usual_pace` by family, ``parallel``, ``kernels`` or ``any`` [-].
    overlap : Fit, optional
        ``contention``, the share of its time that a collective in flight takes from kernels on the same core [-].
    caches : Fit, optional
        Effective capacities ``l2`` and ``l3`` [B] and ``pages`` of the translation buffer; ``l3_share``, the share of
        the last cache that iterations find [-].
    """

    kernels: Mapping[str, Fit] = field(default_factory=dict)
    iterations: Mapping[str, Fit] = field(default_factory=dict)
    parallel: Mapping[str, Fit] = field(default_factory=dict)
    paces: Mapping[str, Fit] = field(default_factory=dict)
    overlap: Fit | None = None
    caches: Fit | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, part.name) for part in fields(self))

    def fits(self) -> dict[str, Fit]:
        """List all fits.

        Returns
        -------
        fits : dict of str to Fit
            By the name of the part and of the entry, such as ``iterations dlrm`` [-].
        """
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        grouped = {name: value for name, value in parts.items() if not isinstance(value, Fit | None)}
        alone = {name: value for name, value in parts.items() if isinstance(value, Fit)}
        return {f"{name} {key}": fit for name, group in grouped.items() for key, fit in group.items()} | alone

    def map(self, change: Callable[[Fit], Fit]) -> "Context":
        """Change every fit.

        Parameters
        ----------
        change : callable
            Gives a fit for a fit.

        Returns
        -------
        context : Context
            With the new fits [-].
        """

        def apply(part: Any) -> Any:
            return change(part) if isinstance(part, Fit) else part and {key: change(fit) for key, fit in part.items()}

        return Context(**{part.name: apply(getattr(self, part.name)) for part in fields(self)})

    def find(self, kind: str, variant: str) -> Fit | None:
        """Find the fit of a class of kernels: that of its variant, else of all of its kind.

        Parameters
        ----------
        kind, variant : str
            Class and finer class [-].

        Returns
        -------
        fit : Fit or None
            Parameters of `perfkit.models.kernels.in_context`; None where neither was calibrated.
        """
        return self.kernels.get(f"{kind}.{variant}") or self.kernels.get(kind)

    def find_iteration(self, family: str, ranks: int) -> Fit | None:
        """Find the fit of whole iterations of a family, of any family where this one was not calibrated.

        Parameters
        ----------
        family : str
            Workload family [-].
        ranks : int
            Ranks that take part [-].

        Returns
        -------
        fit : Fit or None
            See `iterations` and `parallel`; None without calibration in context.
        """
        if ranks > 1 and family in self.parallel:
            return self.parallel[family]
        alone = self.iterations.get(family) or self.iterations.get(ANY)
        shared = self.parallel.get(ANY) if ranks > 1 else None
        if not (alone and shared):
            return alone
        slower = {name: shared["scale"] * value for name, value in alone.items()}
        more = {name: shared[name] for name in ("per_collective", "per_resume") if name in shared}
        return replace(
            alone, parameters={**slower, **more}, stderr={}, units={**alone.units, **dict.fromkeys(more, "s")},
            spread=math.hypot(alone.spread, shared.spread),
        )  # fmt: skip
