"""Platforms: devices, links, fitted kernels and collectives, and what real iterations add to these."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from perfkit.fitting import Fit
from perfkit.ground.files import reading
from perfkit.ground.hardware import Device, Network, Quantity
from perfkit.ground.units import Array, Typed, Values, check_positive, check_sizes, decode, format_bytes, show
from perfkit.platform import file
from perfkit.platform.collectives import price_collective
from perfkit.platform.estimates import Estimate, warn_once
from perfkit.platform.file import PlatformError
from perfkit.platform.kernels import estimate_gemm, estimate_lookups, find_kernel, time_kernels
from perfkit.platform.resources import with_host, with_scale
from perfkit.platform.whatif import from_datasheet, with_datasheet, with_link, with_nodes

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
        Parameters of `perfkit.models.kernels.at_usual_pace` by family, ``parallel``, ``kernels`` or ``any`` [-].
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
        grouped = {name: {"": part} if isinstance(part, Fit) else part or {} for name, part in parts.items()}
        return {f"{name} {key}".rstrip(): fit for name, group in grouped.items() for key, fit in group.items()}

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

    def find(self, kind: str, variant: str, dtype: str = "") -> Fit | None:
        """Find the fit of a class of kernels: of its variant in a format, of its variant, causal or not, of its kind.

        Parameters
        ----------
        kind, variant, dtype : str
            Class, finer class and number format [-].

        Returns
        -------
        fit : Fit or None
            Parameters of `perfkit.models.kernels.in_context`; None where neither was calibrated.
        """
        both = f"{kind}.{variant}", f"{kind}.{variant.replace('_causal', '')}"
        stem = f"{kind}.{variant.partition('.')[0]}"
        names = (*(f"{name}.{dtype}" for name in both), *both, stem, f"{kind}.{dtype}", kind)
        return next((self.kernels[name] for name in names if name in self.kernels), None)

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


def _renamed(old: str, new: str, find: Callable[["Platform"], Callable[..., Any]]) -> Callable[..., Any]:
    """A method under its name of before."""

    def call(self: "Platform", *args: Any, **named: Any) -> Any:
        warnings.warn(f"Platform.{old} will go; use platform.{new}", DeprecationWarning, stacklevel=2)
        return find(self)(*args, **named)

    return call


@dataclass(frozen=True)
class Platform(Typed):
    """Everything perfkit knows about a machine or a cluster.

    Parameters
    ----------
    name : str
        Name shown in results [-].
    device : Device
        What one rank computes on [-].
    network : Network
        How the ranks are connected [-].
    kernels : mapping of str to Fit, optional
        Kernel models by operation class [-].
    collectives : mapping of str to Fit, optional
        Collective models by ``operation.ranks``, such as ``all_reduce.8`` [-].
    host : mapping of str to Quantity, optional
        Host overheads: ``gap`` (T1), ``before_launch`` (T2), ``after_launch`` (T3), ``launch`` (T4) and
        ``between_launches`` (T5) [s].
    context : Context, optional
        What real iterations add to isolated kernels and collectives [-].
    provenance : mapping of str to str, optional
        Machine, versions and dates of a calibration [-].

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> platform = load_platform("h100-sxm-8")
    >>> platform.collective("all_reduce", 64e6, ranks=8)
    Estimate(314 µs, 80 % within 290 µs to 340 µs)
    """

    name: str
    device: Device
    network: Network
    kernels: Mapping[str, Fit] = field(default_factory=dict)
    collectives: Mapping[str, Fit] = field(default_factory=dict)
    host: Mapping[str, Quantity] = field(default_factory=dict)
    context: Context = field(default_factory=Context)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        with reading(f"platform {show(self.name)}", "mend it, or calibrate again", error=PlatformError):
            file.check_numbers(self)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Earlier results for these numbers."""
        return {}

    @property
    def cache_capacities(self) -> tuple[float, float]:
        """Capacities of the last two caches, fitted or nominal; a single one counts for both [B]."""
        if self.context.caches:
            return self.context.caches["l2"], self.context.caches["l3"]
        caches = [level.capacity.value for level in self.device.memory[:-1] if level.capacity] or [0.0]
        return caches[-2:][0], caches[-1]

    def share_caches(self, ranks: int) -> tuple[float, float]:
        """What one rank finds of the last two caches in iterations, where the ranks of a CPU share the last one.

        Parameters
        ----------
        ranks : int
            Ranks that take part [-].

        Returns
        -------
        near, far : float
            Effective capacities [B].
        """
        near, far = self.cache_capacities
        if not self.context.caches or self.device.kind != "cpu":
            return near, far
        return near, far * self.context.caches.get("l3_share", 1.0) / min(ranks, self.network.ranks_per_node)

    @property
    def largest_timed(self) -> float:
        """Largest working set that was timed; without limit where that is not known [B]."""
        caches = self.context.caches
        return caches.ranges["nbytes"][1] if caches and "nbytes" in caches.ranges else math.inf

    @property
    def page_entries(self) -> float:
        """Pages that the translation buffer effectively holds; without limit where it was not fitted [-]."""
        return self.context.caches.get("pages", math.inf) if self.context.caches else math.inf

    def collective_time(self, operation: str, nbytes: Values, *, ranks: int, algorithm: str | None = None) -> Array:
        """Time of collectives of one operation, for arrays of sizes and without warnings.

        Parameters
        ----------
        operation : str
            Operation, such as ``all_reduce`` [-].
        nbytes : float or array
            Message sizes in the nccl-tests convention [B].
        ranks : int
            Ranks taking part [-].
        algorithm : str, optional
            ``ring``, ``tree``, ``in_network``, ``two_level`` (inside nodes, then between them) or ``rail`` (one rank of
            each node); by default what the library chose when it was measured [-].

        Returns
        -------
        time : array
            One time per size [s].

        Raises
        ------
        ValueError
            For an operation or algorithm without a model, or more ranks than the network has.
        """
        return self.price_collective(operation, check_sizes("nbytes", nbytes), ranks, algorithm).time

    def collective(self, operation: str, nbytes: float, *, ranks: int, algorithm: str | None = None) -> Estimate:
        """Time of one collective.

        Parameters
        ----------
        operation : str
            Operation, such as ``all_reduce`` [-].
        nbytes : float
            Message size in the nccl-tests convention: the full buffer of a rank [B].
        ranks : int
            Ranks taking part [-].
        algorithm : str, optional
            ``ring``, ``tree``, ``in_network``, ``two_level`` (inside nodes, then between them) or ``rail`` (one rank of
            each node); by default what the library chose when it was measured [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For an operation or algorithm without a model, a size below 0 or more ranks than the network has.

        Notes
        -----
        A rank count that was fitted uses its fit, another one the law over rank counts, else the geometric mean of the
        two counts around it or the nearest count, scaled as a ring. Across nodes what was not measured is composed of
        its shares inside and between nodes, see `perfkit.models.hierarchy`; an algorithm that was asked for and not
        measured takes its textbook form. All of these have a wider interval and a warning, which names the one
        measurement that would help most.
        """
        size = check_positive("nbytes", nbytes, zero=True)
        found = self.price_collective(operation, check_sizes("nbytes", size), ranks, algorithm)
        title = f"{operation} of {format_bytes(size)} on {ranks} ranks of {self.name}: {found.formula}"
        terms = {name: float(part) for name, part in found.terms.items()}
        return Estimate(float(found.time), float(found.spread), terms, title, warn_once(found.notes, 3))

    price_collective, kernel_time, gemm, lookup = price_collective, time_kernels, estimate_gemm, estimate_lookups
    with_nodes, with_datasheet, with_link, with_host = with_nodes, with_datasheet, with_link, with_host
    with_scale = with_scale
    from_datasheet = classmethod(from_datasheet)
    to_toml, save, numbers, _repr_html_ = file.write, file.save, file.tabulate_numbers, file.render_numbers
    sections = file.list_sections

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "platform file") -> Self:
        """Read a platform from TOML; `PlatformError` says where it is wrong.

        Parameters
        ----------
        text : str
            The file's content [-].
        origin : str, optional
            What errors call the file [-].
        """
        with reading(origin, f"compare with {file.EXAMPLE}", error=PlatformError):
            platform: Self = decode(cls, data := file.parse(text))
            file.check_origins(data)
            return platform

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a platform file; `PlatformError` says where it is wrong.

        Parameters
        ----------
        path : str or Path
            The file [-].
        """
        with reading(path, "pass a platform file or a gallery name", error=PlatformError, most=file.LARGEST_FILE):
            return cls.from_toml(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))

    def __repr__(self) -> str:
        evidence = "/".join(sorted({number.kind for number in file.list_numbers(self)}))
        return (
            f"Platform({self.name!r}: {self.network.ranks} ranks of {self.device.name!r}, {len(self.kernels)} kernel "
            f"and {len(self.collectives)} collective models, {evidence})"
        )

    table = _renamed("table()", "numbers()", lambda p: p.numbers)
    bandwidth = _renamed("bandwidth()", "device.bandwidth()", lambda p: p.device.bandwidth)
    find_kernel = _renamed("find_kernel()", "kernels", lambda p: partial(find_kernel, p.kernels))
