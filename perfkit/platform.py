"""Platforms: devices, links, fitted kernels and collectives, with the origin of every number; in and out of TOML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.communication import CollectiveTime, price_collective
from perfkit.computation import estimate_kernels, find_kernel, price_kernels, size_lookups
from perfkit.estimates import Estimate, ExtrapolationWarning, warn_once
from perfkit.fitting import Fit
from perfkit.hardware import DTYPES, Device, Network, Quantity
from perfkit.inventory import list_numbers, render_numbers, tabulate_numbers
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform_file import PlatformError, Stored, check_numbers
from perfkit.resources import reading
from perfkit.units import (
    Array,
    Typed,
    Values,
    check_choice,
    check_positive,
    check_sizes,
    check_type,
    format_bytes,
    show,
)
from perfkit.variants import Variants

if TYPE_CHECKING:
    import polars

__all__ = ["ExtrapolationWarning", "Platform"]


@dataclass(frozen=True)
class Platform(Variants, Stored, Typed):
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
    context : mapping of str to Fit, optional
        What real iterations add to isolated kernels, by operation class and workload family [-].
    provenance : mapping of str to str, optional
        Machine, versions and dates of a calibration [-].

    Examples
    --------
    >>> from perfkit.gallery import load_platform
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
    context: Mapping[str, Fit] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        with reading(f"platform {show(self.name)}", "mend it, or calibrate again", error=PlatformError):
            check_numbers(self)

    def bandwidth(self, working_set: Values) -> Array:
        """Memory bandwidth that a working set sees, see `Device.bandwidth`.

        Parameters
        ----------
        working_set : float or array
            Bytes that are touched again and again [B].

        Returns
        -------
        bandwidth : array
            Bytes over the time to move them [B/s].
        """
        return self.device.bandwidth(working_set)

    @property
    def cache_capacities(self) -> tuple[float, float]:
        """What the last two caches before the main memory hold, fitted or nominal; a single one counts for both [B]."""
        if "caches" in self.context:
            return self.context["caches"]["l2"], self.context["caches"]["l3"]
        caches = [level.capacity.value for level in self.device.memory[:-1] if level.capacity] or [0.0]
        return caches[-2:][0], caches[-1]

    @property
    def largest_timed(self) -> float:
        """Largest working set that was timed; without limit where that is not known [B]."""
        caches = self.context.get("caches")
        return caches.ranges["nbytes"][1] if caches and "nbytes" in caches.ranges else math.inf

    @property
    def page_entries(self) -> float:
        """Pages that the translation buffer effectively holds; without limit where it was not fitted [-]."""
        return self.context["caches"].get("pages", math.inf) if "caches" in self.context else math.inf

    def find_kernel(self, kind: str, *, variant: str = "", dtype: str = "fp32") -> tuple[str, Fit] | None:
        """Find the kernel model of a class: that of its variant, else of its number format, else of the whole class.

        Parameters
        ----------
        kind : str
            Operation class, such as ``gemm`` [-].
        variant : str, optional
            Finer class, such as ``nt`` [-].
        dtype : str, optional
            Number format [-].

        Returns
        -------
        found : (str, Fit) or None
            Key in `kernels` and its fit; None where the class has no model [-].

        Examples
        --------
        >>> from perfkit.gallery import load_platform
        >>> load_platform("h100-sxm-8").find_kernel("gemm", variant="nt", dtype="fp8")[0]
        'gemm'
        """
        return find_kernel(self.kernels, kind, variant=variant, dtype=dtype)

    def kernel_time(self, kind: str, features: Mapping[str, Values], *, dtype: str = "fp32") -> Array:
        """Time of kernels of one class, alone on the device, for arrays of sizes and without warnings.

        Parameters
        ----------
        kind : str
            Operation class or a key of `kernels`, see `find_kernel` [-].
        features : mapping of str to float or array
            Sizes by name (``flops``, ``nbytes`` and what the form of the class needs), in base units; ``working_set``
            [B] decides on the memory level and is ``nbytes`` where absent; ``peak`` [FLOP/s] and ``bandwidth`` [B/s]
            stand in for those of the device.
        dtype : str, optional
            Number format whose peak applies [-].

        Returns
        -------
        time : array
            One time per element of the features [s].

        Raises
        ------
        ValueError
            For a class without a model, or a dtype without a peak.
        """
        check_type("features", features, Mapping)
        found = self.find_kernel(kind, dtype=dtype)
        if found is None:
            raise self._lacks_kernel(kind)
        sizes = {name: check_sizes(f"features[{show(name)}]", values) for name, values in features.items()}
        try:
            return price_kernels(found[1], self.device, sizes, dtype=dtype, capacities=self.cache_capacities)
        except KeyError as error:
            raise ValueError(f"features has no {error}; the model of {found[0]} needs it, in base units") from None

    def gemm(self, m: int, n: int, k: int, *, dtype: str = "fp32", batch: int = 1) -> Estimate:
        """Time of a matrix product y[m, n] = x[m, k] w[k, n], alone on the device.

        Parameters
        ----------
        m, n, k : int
            Rows, columns and inner size [-].
        dtype : str, optional
            Number format, one of the device's peaks [-].
        batch : int, optional
            Products in one kernel; above 1 the class is ``bmm`` [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For sizes that are not whole numbers above 0, and for an unknown dtype.
        """
        given = {"m": m, "n": n, "k": k, "batch": batch}
        sizes = {name: float(check_positive(name, size, integer=True)) for name, size in given.items()}
        itemsize = DTYPES[check_choice("dtype", dtype, self.device.peaks)]
        features = {**sizes, "flops": gemm_flops(**sizes), "nbytes": gemm_bytes(**sizes, itemsize=itemsize)}
        title = f"gemm {m} x {n} x {k}" + (f", batch {batch}," if batch > 1 else "") + f" in {dtype}"
        return self._kernel(title, "gemm" if batch == 1 else "bmm", features, dtype)

    def lookup(self, tables: Sequence[Any], *, batch: int) -> Estimate:
        """Time of the forward lookups of embedding tables, one kernel after the other, alone on the device.

        Parameters
        ----------
        tables : sequence of Table
            Tables with ``rows``, ``dim``, ``pooling``, ``distribution`` and ``itemsize`` [-].
        batch : int
            Samples [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For a batch that is not a whole number above 0, or no table.
        """
        batch = check_positive("batch", batch, integer=True)
        capacities, entries = self.cache_capacities, self.page_entries
        features = size_lookups(tables, batch, self.device, capacities=capacities, entries=entries)
        return self._kernel(f"lookup in {len(tables)} tables, batch {batch},", "embedding_forward", features, "fp32")

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
        return self._collective(operation, check_sizes("nbytes", nbytes), ranks, algorithm).time

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
        found = self._collective(operation, np.asarray(size, dtype=float), ranks, algorithm)
        title = f"{operation} of {format_bytes(size)} on {ranks} ranks of {self.name}: {found.formula}"
        terms = {name: float(part) for name, part in found.terms.items()}
        return Estimate(float(found.time), float(found.spread), terms, title, warn_once(found.notes, 3))

    def _collective(self, operation: str, nbytes: Array, ranks: int, algorithm: str | None) -> CollectiveTime:
        memory = self.device.memory[-1].bandwidth
        return price_collective(
            self.collectives, self.network, operation, nbytes,
            ranks=ranks, algorithm=algorithm, owner=f"platform {self.name!r}",
            memory_bandwidth=memory.value if memory else math.inf,
        )  # fmt: skip

    def _lacks_kernel(self, kind: str) -> ValueError:
        have = ", ".join(dict.fromkeys(self.kernels)) or "none"
        lack = f"platform {self.name!r} has no kernel model for {show(kind)}"
        return ValueError(f"{lack}; it has {have}; calibrate it or choose another platform")

    def _kernel(self, title: str, kind: str, features: Mapping[str, Values], dtype: str) -> Estimate:
        variants = (item for item in self.kernels.items() if item[0].startswith(f"{kind}."))
        found = self.find_kernel(kind, dtype=dtype) or next(variants, None)  # any variant stands in for the class
        if found is None:
            raise self._lacks_kernel(kind)
        settings: dict[str, Any] = {"dtype": dtype, "capacities": self.cache_capacities}
        estimate = estimate_kernels(found[1], self.device, features, title=title, place=self.name, **settings)
        warn_once(estimate.warnings, 4)
        return estimate

    def __repr__(self) -> str:
        evidence = "/".join(sorted({number.kind for number in list_numbers(self)}))
        return (
            f"Platform({self.name!r}: {self.network.ranks} ranks of {self.device.name!r}, {len(self.kernels)} kernel "
            f"and {len(self.collectives)} collective models, {evidence})"
        )

    def _repr_html_(self) -> str:
        return render_numbers(self)

    def table(self) -> "polars.DataFrame":
        """Every number of the platform with its unit and origin.

        Returns
        -------
        table : polars.DataFrame
            Columns group, name, value, unit, kind, stderr, source, date and basis; values in the unit of their row.
        """
        return tabulate_numbers(self)
