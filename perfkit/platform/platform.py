"""Platforms: devices, links, fitted kernels and collectives, with the origin of every number; in and out of TOML."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.files import decode, reading
from perfkit.ground.hardware import Device, Network, Quantity
from perfkit.ground.units import Array, Typed, Values, check_positive, check_sizes, format_bytes, show
from perfkit.platform.collectives import price_collective
from perfkit.platform.context import Context
from perfkit.platform.estimates import Estimate, warn_once
from perfkit.platform.file import EXAMPLE, LARGEST_FILE, PlatformError, check_origins, parse, save, write
from perfkit.platform.kernels import estimate_gemm, estimate_lookups, find_kernel, time_kernels
from perfkit.platform.numbers import check_numbers, list_numbers, render_numbers, tabulate_numbers
from perfkit.platform.whatif import with_datasheet, with_host, with_link, with_nodes


def _renamed(old: str, new: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method under its name of before."""

    def call(self: "Platform", *args: Any, **named: Any) -> Any:
        warnings.warn(f"Platform.{old} will go; use platform.{new}", DeprecationWarning, stacklevel=2)
        return method(self, *args, **named)

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
            check_numbers(self)

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
        found = self.price_collective(operation, np.asarray(size, dtype=float), ranks, algorithm)
        title = f"{operation} of {format_bytes(size)} on {ranks} ranks of {self.name}: {found.formula}"
        terms = {name: float(part) for name, part in found.terms.items()}
        return Estimate(float(found.time), float(found.spread), terms, title, warn_once(found.notes, 3))

    price_collective = price_collective
    kernel_time = time_kernels
    gemm = estimate_gemm
    lookup = estimate_lookups
    to_toml = write
    save = save
    with_nodes = with_nodes
    with_datasheet = with_datasheet
    with_link = with_link
    with_host = with_host

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
        with reading(origin, f"compare with {EXAMPLE}", error=PlatformError):
            platform: Self = decode(cls, data := parse(text))
            check_origins(data)
            return platform

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a platform file; `PlatformError` says where it is wrong.

        Parameters
        ----------
        path : str or Path
            The file [-].
        """
        with reading(path, "pass a platform file or a gallery name", error=PlatformError, most=LARGEST_FILE):
            return cls.from_toml(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))

    def __repr__(self) -> str:
        evidence = "/".join(sorted({number.kind for number in list_numbers(self)}))
        return (
            f"Platform({self.name!r}: {self.network.ranks} ranks of {self.device.name!r}, {len(self.kernels)} kernel "
            f"and {len(self.collectives)} collective models, {evidence})"
        )

    _repr_html_ = render_numbers
    numbers = tabulate_numbers
    table = _renamed("table()", "numbers()", tabulate_numbers)
    bandwidth = _renamed(
        "bandwidth()", "device.bandwidth()", lambda self, working_set: self.device.bandwidth(working_set)
    )
    find_kernel = _renamed("find_kernel()", "kernels", lambda self, *args, **kw: find_kernel(self.kernels, *args, **kw))
