"""Platforms: a device, a network, fitted kernels and collectives, and what real iterations add to
them."""

import html
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Self

from perfkit.fitting import Fit
from perfkit.fitting.parameters import Key
from perfkit.ground.files import find_reference, reading
from perfkit.ground.hardware import DTYPES, Device, Link, MemoryLevel, Network, Quantity, check_base
from perfkit.ground.results import Shown
from perfkit.ground.units import (
    Array,
    Typed,
    Values,
    check_choice,
    check_positive,
    check_sizes,
    check_type,
    decode,
    format_bytes,
    show,
)
from perfkit.platform import file
from perfkit.platform.collectives import price_collective
from perfkit.platform.estimates import Estimate, warn_once
from perfkit.platform.file import PlatformError
from perfkit.platform.kernels import estimate_gemm, estimate_lookups, time_kernels
from perfkit.platform.whatif import (
    carry_fit,
    with_datasheet,
    with_host,
    with_link,
    with_nodes,
    with_scale,
)
from perfkit.readers.datasheets import Datasheet, list_datasheets, read_datasheet

#: Entry for every family that has none of its own.
ANY = "any"
_GIVEN = "stated by the caller of Platform.from_datasheet"
#: Spread of products whose rate was measured on such a device, or is assumed [-]; docs/formulas.md,
#: table 2.4.
RATE_SPREADS = {"measured": 0.17, "assumed": 0.36}


@dataclass(frozen=True)
class Context(Typed):
    """What real iterations add to isolated kernels and collectives; false if nothing was calibrated
    in iterations.

    Parameters
    ----------
    kernels : mapping of str to Fit, optional
        Parameters of `perfkit.models.kernels.in_context` by class of kernels, such as ``gemm`` and
        ``gemm.nt`` [-].
    iterations : mapping of str to Fit, optional
        Whole iterations on one rank by workload family, ``any`` for other families: ``scale`` on
        all operations [-] and host time ``per_operation`` [s].
    parallel : mapping of str to Fit, optional
        The same on several ranks, with the extra time ``per_collective`` of each collective and
        ``per_resume`` of the kernels after it [s].
    paces : mapping of str to Fit, optional
        Parameters of `perfkit.models.kernels.at_usual_pace` by family, ``parallel``, ``kernels`` or
        ``any`` [-].
    overlap : Fit, optional
        ``contention``: the share of its time that a running collective takes from kernels on the
        same core [-].
    caches : Fit, optional
        Effective ``l2`` and ``l3`` [B], ``pages`` of the translation buffer, and the free share
        ``l3_share`` [-].
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
        """List all fits by the names of the part and the entry, such as ``iterations dlrm``."""
        found = {}
        for name, part in ((part.name, getattr(self, part.name)) for part in fields(self)):
            if isinstance(part, Fit):
                found[name] = part
            elif part:
                found |= {f"{name} {key}": fit for key, fit in part.items()}
        return found

    def map(self, change: Callable[[Fit], Fit]) -> "Context":
        """Change every fit by a function of a fit."""

        def apply(part: Any) -> Any:
            return (
                change(part)
                if isinstance(part, Fit)
                else part and {key: change(fit) for key, fit in part.items()}
            )

        return Context(**{part.name: apply(getattr(self, part.name)) for part in fields(self)})

    def find(self, kind: str, variant: str, dtype: str = "") -> Fit | None:
        """Find the fit of a class of kernels: of its variant and format, else of its variant,
        format or kind alone."""
        both = f"{kind}.{variant}", f"{kind}.{variant.replace('_causal', '')}"
        stem = f"{kind}.{variant.partition('.')[0]}"
        names = (*(f"{name}.{dtype}" for name in both), *both, stem, f"{kind}.{dtype}", kind)
        return next((self.kernels[name] for name in names if name in self.kernels), None)

    def find_iteration(self, family: str, ranks: int) -> Fit | None:
        """Find the fit of whole iterations of a family on some ranks, or that of any family."""
        if ranks > 1 and family in self.parallel:
            return self.parallel[family]
        alone = self.iterations.get(family) or self.iterations.get(ANY)
        shared = self.parallel.get(ANY) if ranks > 1 else None
        if not (alone and shared):
            return alone
        slower = {name: shared["scale"] * value for name, value in alone.items()}
        more = {name: shared[name] for name in ("per_collective", "per_resume") if name in shared}
        return replace(
            alone,
            parameters={**slower, **more},
            stderr={},
            units={**alone.units, **dict.fromkeys(more, "s")},
            spread=math.hypot(alone.spread, shared.spread),
        )


def from_datasheet(
    cls: Any,
    name: str,
    *,
    flops: Mapping[str, float] | None = None,
    memory: tuple[float, float] | None = None,
    link: float | None = None,
    ranks: int | None = None,
) -> Any:
    """Describe one node of a device that was not measured, with the efficiencies of measured
    devices.

    Parameters
    ----------
    name : str
        One of `readers.datasheets.list_datasheets`, with or without a number of ranks, such as
        ``mi300x-8``; any name where `flops` and `memory` are given [-].
    flops : mapping of str to float, optional
        Peak by number format, dense [FLOP/s].
    memory : (float, float), optional
        Capacity [B] and bandwidth, reads and writes together [B/s].
    link : float, optional
        Bandwidth between the ranks of the node, one way, per rank; that of the datasheet if not
        given [B/s].
    ranks : int, optional
        Ranks of the node; by default the number in the name, else 1 [-].

    Returns
    -------
    platform : Platform
        Shares of peak, bandwidth and link are the median of the measured devices, with intervals as
        wide as their differences; products take a rate that others measured on the device, if there
        is one. All of it is ``assumed``. No time is below FLOP over peak or bytes over bandwidth.
        Host overheads are published for another machine.

    Raises
    ------
    ValueError
        For an unknown datasheet, for numbers that are not above 0, and for several ranks without a
        link.

    Examples
    --------
    >>> from perfkit.platform.platform import Platform
    >>> mine = Platform.from_datasheet("mine", flops={"bf16": 4e14}, memory=(96e9, 3e12), link=450e9, ranks=8)
    >>> mine.network.ranks, mine.kernels["gemm"].kind
    (8, 'assumed')
    """
    typical = cls.load(find_reference("typical.toml"))
    sheet, count = _read_sheet(name, flops, memory)
    count = check_positive("ranks", count if ranks is None else ranks, integer=True)
    wire = sheet.wire
    if link is not None:
        wire = Quantity(
            check_base("link", link, "B/s"), "B/s", "datasheet", _GIVEN, basis="one way per rank"
        )
    if count > 1 and not wire:
        raise ValueError(
            f"link is missing; give its bandwidth for {count} ranks, one way per rank [B/s]"
        )
    kind = next((kind for kind, rate in sheet.links.items() if rate == wire), "")
    links = {"intra": Link(wire, typical.network.links["intra"].latency, kind)} if wire else {}
    lacking, name = (
        DTYPES.keys() - sheet.device.peaks.keys(),
        f"{sheet.system}-{count}" if flops is None else name,
    )
    fits = {
        key: fit for key, fit in typical.kernels.items() if Key.parse(key).variant not in lacking
    }
    fits |= _set_products(fits, sheet)
    return replace(
        typical,
        name=name,
        device=sheet.device,
        network=Network(count, links=links),
        kernels={key: carry_fit(fit, typical.name, 0.0) for key, fit in fits.items()},
        collectives=typical.with_link("intra", bandwidth=wire.value).collectives if wire else {},
    )


def _read_sheet(name: str, flops: Mapping[str, float] | None, memory: Any) -> tuple[Datasheet, int]:
    """Datasheet from the table, or from the numbers of the caller, and the ranks in its name."""
    check_type("name", name, str)
    if flops is None and memory is None:
        match = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})", name)
        system, count = (
            (name, 1) if match is None or name in list_datasheets() else (match[1], int(match[2]))
        )
        return read_datasheet(
            check_choice("name, of no flops and memory,", system, list_datasheets())
        ), count
    if (
        not isinstance(flops, Mapping)
        or not flops
        or not isinstance(memory, tuple | list)
        or len(memory) != 2
    ):
        given = f"flops is {show(flops)} and memory is {show(memory)}"
        raise ValueError(
            f"{given}; give rates by format and two numbers: flops={{'bf16': 4e14}}, memory=(96e9, 3e12)"
        )
    rates = {
        check_choice("flops", d, DTYPES): check_base(f"flops[{d!r}]", flops[d], "FLOP/s")
        for d in flops
    }
    peaks = {d: Quantity(rate, "FLOP/s", "datasheet", _GIVEN) for d, rate in rates.items()}
    sizes = zip(range(2), memory, ("B", "B/s"), strict=True)
    size, rate = (
        Quantity(check_base(f"memory[{i}]", x, unit), unit, "datasheet", _GIVEN)
        for i, x, unit in sizes
    )
    level = MemoryLevel("DRAM", size, rate)
    return Datasheet(name, Device(name, "cuda", peaks, (level,)), {}), 1


def _set_products(fits: Mapping[str, Fit], sheet: Datasheet) -> dict[str, Fit]:
    """Products at the rates that a datasheet's rows give, at most at the peak; convolutions in fp32
    keep the usual."""
    found = (
        {"convolution.fp32": fits.get("convolution", fits["gemm"])}
        if "fp32" in sheet.products
        else {}
    )
    for kind, (dtype, rate) in product(("gemm", "bmm"), sheet.products.items()):
        usual, key = fits[kind], Key(kind, variant="" if dtype in ("bf16", "fp16") else dtype)
        own = {
            **usual,
            "compute_efficiency": min(rate.value / sheet.device.peaks[dtype].value, 1.0),
        }
        spread = max(RATE_SPREADS[rate.kind], usual.spread if kind == "bmm" else 0.0)
        found[str(key)] = replace(
            usual, parameters=own, spread=spread, source=rate.source, dtypes=(dtype,)
        )
    return found


@dataclass(frozen=True)
class Platform(Typed, Shown):
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
        Host overheads: ``gap`` (T1), ``before_launch`` (T2), ``after_launch`` (T3), ``launch`` (T4)
        and ``between_launches`` (T5) [s].
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
        with reading(
            f"platform {show(self.name)}", "mend it, or calibrate again", error=PlatformError
        ):
            file.check_numbers(self)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Results that other modules keep for this platform."""
        return {}

    @property
    def cache_capacities(self) -> tuple[float, float]:
        """Capacities of the last two caches, fitted or nominal; a single one counts for both
        [B]."""
        if self.context.caches:
            return self.context.caches["l2"], self.context.caches["l3"]
        caches = [level.capacity.value for level in self.device.memory[:-1] if level.capacity] or [
            0.0
        ]
        return caches[-2:][0], caches[-1]

    def share_caches(self, ranks: int) -> tuple[float, float]:
        """Capacities of the last two caches for one rank in iterations; the ranks of a CPU share
        the last one.

        Parameters
        ----------
        ranks : int
            Ranks that take part [-].

        Returns
        -------
        near, far : float
            Effective capacities [B].
        """
        ranks = check_positive("ranks", ranks, integer=True)
        near, far = self.cache_capacities
        if not self.context.caches or self.device.kind != "cpu":
            return near, far
        return near, far * self.context.caches.get("l3_share", 1.0) / min(
            ranks, self.network.ranks_per_node
        )

    @property
    def largest_timed(self) -> float:
        """Largest working set that was timed; infinite if that is not known [B]."""
        caches = self.context.caches
        return caches.ranges["nbytes"][1] if caches and "nbytes" in caches.ranges else math.inf

    @property
    def page_entries(self) -> float:
        """Pages that the translation buffer effectively holds; infinite if that was not fitted
        [-]."""
        return self.context.caches.get("pages", math.inf) if self.context.caches else math.inf

    def collective_time(
        self, operation: str, nbytes: Values, *, ranks: int, algorithm: str | None = None
    ) -> Array:
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
            ``ring``, ``tree``, ``in_network``, ``two_level`` (inside nodes, then between them) or
            ``rail`` (one rank of each node); by default what the library chose when it was measured
            [-].

        Returns
        -------
        time : array
            One time per size [s].

        Raises
        ------
        ValueError
            For an operation or algorithm without a model, or more ranks than the network has.
        """
        return self.price_collective(
            operation, check_sizes("nbytes", nbytes), ranks, algorithm
        ).time

    def collective(
        self, operation: str, nbytes: float, *, ranks: int, algorithm: str | None = None
    ) -> Estimate:
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
            ``ring``, ``tree``, ``in_network``, ``two_level`` (inside nodes, then between them) or
            ``rail`` (one rank of each node); by default what the library chose when it was measured
            [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For an operation or algorithm without a model, a size below 0 or more ranks than the
            network has.

        Notes
        -----
        A fitted rank count takes its own fit. Another one takes the law over rank counts; else the
        geometric mean of the counts below and above it, or the nearest count, scaled as its
        algorithm does. A collective across nodes that was not measured is composed of its stages
        inside and between nodes, see `perfkit.models.hierarchy`. An algorithm that was asked for
        and not measured takes its textbook form. All of these have a wider interval and a warning,
        which names the one measurement that would help most.
        """
        size = check_positive("nbytes", nbytes, zero=True)
        found = self.price_collective(operation, check_sizes("nbytes", size), ranks, algorithm)
        title = (
            f"{operation} of {format_bytes(size)} on {ranks} ranks of {self.name}: {found.formula}"
        )
        terms = {name: float(part) for name, part in found.terms.items()}
        return Estimate(
            float(found.time), float(found.spread), terms, title, warn_once(found.notes, 3)
        )

    price_collective, kernel_time, gemm, lookup = (
        price_collective,
        time_kernels,
        estimate_gemm,
        estimate_lookups,
    )
    with_nodes, with_datasheet, with_link, with_host = (
        with_nodes,
        with_datasheet,
        with_link,
        with_host,
    )
    with_scale = with_scale
    from_datasheet = classmethod(from_datasheet)
    to_toml, save, numbers, sections = (
        file.write,
        file.save,
        file.tabulate_numbers,
        file.list_sections,
    )

    def explain(self) -> str:
        """Where each number comes from, in words: its kind (measured, fitted, from a datasheet or
        assumed), source and date, and its value with the standard error.

        The spread of a fit, the standard deviation of ln(measured / predicted), is one of its
        numbers. `numbers` has the same as a frame.

        Returns
        -------
        text : str
            A line for each source, and below it a line for each number.

        Examples
        --------
        >>> import perfkit as pk
        >>> lines = pk.load_platform("h100-sxm-8").explain().splitlines()
        >>> lines[0].partition(" numbers")[2], any(line.startswith("datasheet") for line in lines)
        (' come from', True)
        """
        return file.explain_numbers(self)

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "platform file") -> Self:
        """Read a platform from TOML; `PlatformError` says where it is wrong.

        Parameters
        ----------
        text : str
            The file's content [-].
        origin : str, optional
            Name of the file in errors [-].
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
        with reading(
            path,
            "pass a platform file or a gallery name",
            error=PlatformError,
            most=file.LARGEST_FILE,
        ):
            return cls.from_toml(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))

    def __repr__(self) -> str:
        evidence = "/".join(sorted({number.kind for number in file.list_numbers(self)}))
        models = (
            f"{len(self.kernels)} kernel and {len(self.collectives)} collective models, {evidence}"
        )
        ranks = f"{self.network.ranks} {'ranks' if self.network.ranks > 1 else 'rank'}"
        ranks += f" in {self.network.regions} regions" * (self.network.regions > 1)
        return f"Platform({self.name!r}: {ranks} of {self.device.name!r}, {models})"

    def _repr_html_(self) -> str:
        """One line; `explain` lists hundreds of numbers."""
        return f"<pre>{html.escape(repr(self))}</pre>"
