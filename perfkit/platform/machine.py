"""What is known about a machine: its device, network, fitted models and host overheads, each number
with its origin and within limits."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from perfkit.fitting import (
    Caches,
    CollectiveModel,
    Fit,
    InContext,
    Iteration,
    KernelModel,
    Overlap,
    Pace,
)
from perfkit.fitting.models import (
    AttentionRoofline,
    LookupRoofline,
    RowwiseRoofline,
    SequentialRoofline,
    TiledRoofline,
)
from perfkit.fitting.parameters import LARGEST, LIMITS, TINY, Key, Parameter
from perfkit.ground.files import reading
from perfkit.ground.hardware import (
    DTYPES,
    KINDS,
    LINKS,
    Device,
    HostMemory,
    Network,
    Quantity,
)
from perfkit.ground.units import Typed, check_choice, check_positive, show
from perfkit.models import collectives as forms
from perfkit.models.algorithms import ALGORITHMS
from perfkit.models.kernels import list_terms
from perfkit.platform.estimates import find_transfers

#: Entry for every family that has none of its own.
ANY = "any"
#: Entry for every stack that has none of its own.
OTHERS = "*"
#: How the source of a platform begins that a rehearsal has written.
REHEARSAL = "rehearsal"
#: Ends of the entry of a stack: for models with experts, and for ranks of several nodes.
EXPERTS, NODES = "experts", "nodes"
#: The unit of a fitted number is one of these, or one over another.
UNITS = ("-", "1", "s", "B", "FLOP", "row", "lookup", "element", "table", "operation")
#: Units of numbers outside fits, by group or by the last word of the name.
_QUANTITIES = {
    "peak": "FLOP/s",
    "capacity": "B",
    "bandwidth": "B/s",
    "latency": "s",
    "host": "s",
    "capability": "-",
    "held": "-",
    "to_host": "B/s",
    "from_host": "B/s",
}


class PlatformError(ValueError):
    """A platform or platform file that cannot be used; the message names place and reason."""


class StepKind(NamedTuple):
    """What steps of a stack have levels of their own.

    Parameters
    ----------
    has_experts : bool
        Whether the model has experts.
    crosses_nodes : bool
        Whether the ranks fill more than one node.
    """

    has_experts: bool = False
    crosses_nodes: bool = False

    @property
    def ending(self) -> str:
        """End of the names of their levels."""
        experts = f".{EXPERTS}" if self.has_experts else ""
        nodes = f".{NODES}" if self.crosses_nodes else ""
        return experts + nodes


#: All kinds of steps that have levels.
STEP_KINDS = (
    StepKind(),
    StepKind(has_experts=True),
    StepKind(crosses_nodes=True),
    StepKind(has_experts=True, crosses_nodes=True),
)


def name_level(stack: str, dtype: str, kind: StepKind) -> str:
    """Name of the level of a stack.

    Parameters
    ----------
    stack : str
        Software, or `OTHERS`.
    dtype : str
        Number format of products; bf16 and fp16, which run at one rate, have one level.
    kind : StepKind
        Which of its steps.

    Returns
    -------
    name : str
        Such as ``megatron-te.fp8``, or ``megatron-te.fp8.experts.nodes``.

    Examples
    --------
    >>> name_level("megatron", "fp16", StepKind(has_experts=True))
    'megatron.bf16.experts'
    """
    form = "bf16" if dtype == "fp16" else dtype
    return f"{stack}.{form}{kind.ending}"


@dataclass(frozen=True)
class Context(Typed):
    """What real iterations add to isolated kernels and collectives; false if nothing was calibrated
    in iterations.

    Parameters
    ----------
    kernels : mapping of str to InContext, optional
        Changes of `perfkit.models.kernels.in_context` by class of kernels, such as ``gemm`` and
        ``gemm.nt`` [-].
    iterations : mapping of str to Iteration, optional
        Whole iterations on one rank by workload family, ``any`` for other families: ``scale`` on
        all operations [-] and host time ``per_operation`` [s].
    parallel : mapping of str to Iteration, optional
        The same on several ranks, with the extra time ``per_collective`` of each collective and
        ``per_resume`` of the kernels after it [s].
    paces : mapping of str to Pace, optional
        Parameters of `perfkit.models.kernels.at_usual_pace` by family, ``parallel``, ``kernels`` or
        ``any`` [-].
    overlap : Overlap, optional
        ``contention``: the share of its time that a running collective takes from kernels on the
        same core [-].
    caches : Caches, optional
        Effective ``l2`` and ``l3`` [B], ``pages`` of the translation buffer, and the free share
        ``l3_share`` [-].
    stacks : mapping of str to Iteration, optional
        Levels of software by stack and format, such as ``megatron-te.fp8``, and ``*.fp8`` for
        stacks without rows of their own: ``scale`` on the time of a whole iteration, with its
        hosts and messages [-]. See `name_level`.
    """

    kernels: Mapping[str, InContext] = field(default_factory=dict)
    iterations: Mapping[str, Iteration] = field(default_factory=dict)
    parallel: Mapping[str, Iteration] = field(default_factory=dict)
    paces: Mapping[str, Pace] = field(default_factory=dict)
    overlap: Overlap | None = None
    caches: Caches | None = None
    stacks: Mapping[str, Iteration] = field(default_factory=dict)

    @cached_property
    def is_calibrated(self) -> bool:
        """Whether anything was calibrated in iterations; levels of software are no calibration."""
        parts = [part.name for part in fields(self) if part.name != "stacks"]
        return any(getattr(self, name) for name in parts)

    def __bool__(self) -> bool:
        return self.is_calibrated

    def fits(self) -> dict[str, Fit]:
        """List all fits by the names of the part and the entry, such as ``iterations dlrm``."""
        found: dict[str, Fit] = {}
        parts: dict[str, Mapping[str, Fit]] = {
            "kernels": self.kernels,
            "iterations": self.iterations,
            "parallel": self.parallel,
            "paces": self.paces,
            "stacks": self.stacks,
        }
        for name, part in parts.items():
            for key, fit in part.items():
                found[f"{name} {key}"] = fit
        if self.overlap is not None:
            found["overlap"] = self.overlap
        if self.caches is not None:
            found["caches"] = self.caches
        return found

    def map(self, change: Callable[[Fit], Fit]) -> "Context":
        """Change every fit by a function that returns a fit of the same form."""

        def change_all(part: Any) -> Any:
            return {key: change(fit) for key, fit in part.items()}

        def change_one(fit: Any) -> Any:
            return None if fit is None else change(fit)

        return Context(
            kernels=change_all(self.kernels),
            iterations=change_all(self.iterations),
            parallel=change_all(self.parallel),
            paces=change_all(self.paces),
            overlap=change_one(self.overlap),
            caches=change_one(self.caches),
            stacks=change_all(self.stacks),
        )

    def find(self, kind: str, variant: str, dtype: str = "") -> InContext | None:
        """Find the fit of a class of kernels: of its variant and format, else of its variant,
        format or kind alone."""
        both = f"{kind}.{variant}", f"{kind}.{variant.replace('_causal', '')}"
        stem = f"{kind}.{variant.partition('.')[0]}"
        names = (*(f"{name}.{dtype}" for name in both), *both, stem, f"{kind}.{dtype}", kind)
        return next((self.kernels[name] for name in names if name in self.kernels), None)

    def find_iteration(self, family: str, ranks: int) -> Iteration | None:
        """Find the fit of whole iterations of a family on some ranks, or that of any family."""
        if ranks > 1 and family in self.parallel:
            return self.parallel[family]
        alone = self.iterations.get(family, self.iterations.get(ANY))
        shared = self.parallel.get(ANY) if ranks > 1 else None
        if alone is None or shared is None:
            return alone
        values = {name: shared["scale"] * value for name, value in alone.items()}
        for name in ("per_collective", "per_resume"):
            if name in shared:
                values[name] = shared[name]
        spread = math.hypot(alone.spread, shared.spread)
        return alone.with_values(values, stderr={}, spread=spread)

    def find_stack(self, stack: str, dtype: str, kind: StepKind) -> Iteration | None:
        """Find the level of steps of a stack, or `OTHERS`, in a number format."""
        return self.stacks.get(name_level(stack, dtype, kind))


@dataclass(frozen=True)
class Origin:
    """The file that a platform was read from.

    Parameters
    ----------
    path : str
        The file, as the caller named it [-].
    name : str
        Name of the platform in it [-].
    """

    path: str
    name: str


@dataclass(frozen=True)
class Machine(Typed):
    """The numbers of a platform; `Platform` adds what is asked of it.

    Parameters
    ----------
    name : str
        Name shown in results [-].
    device : Device
        What one rank computes on [-].
    network : Network
        How the ranks are connected [-].
    kernels : mapping of str to KernelModel, optional
        Kernel models by operation class [-].
    collectives : mapping of str to CollectiveModel, optional
        Collective models by ``operation.ranks``, such as ``all_reduce.8`` [-].
    host : mapping of str to Quantity, optional
        Host overheads: ``gap`` (T1), ``before_launch`` (T2), ``after_launch`` (T3), ``launch`` (T4)
        and ``between_launches`` (T5) [s].
    context : Context, optional
        What real iterations add to isolated kernels and collectives [-].
    provenance : mapping of str to str, optional
        Machine, versions and dates of a calibration [-].
    host_memory : HostMemory, optional
        Memory of the host, if it is not the usual one of the device, see
        `perfkit.platform.host_memory` [-].
    origin : Origin, optional
        The file that it, or what it was derived from, was read from; None for one of the gallery, of a
        datasheet or that was made. It is in no file, and equal platforms may have unlike ones [-].
    """

    name: str
    device: Device
    network: Network
    kernels: Mapping[str, KernelModel] = field(default_factory=dict)
    collectives: Mapping[str, CollectiveModel] = field(default_factory=dict)
    host: Mapping[str, Quantity] = field(default_factory=dict)
    context: Context = field(default_factory=Context)
    provenance: Mapping[str, str] = field(default_factory=dict)
    host_memory: HostMemory | None = None
    origin: Origin | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        with reading(
            f"platform {show(self.name)}", "mend it, or calibrate again", error=PlatformError
        ):
            check_numbers(self)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Results that other modules keep for this platform."""
        return {}

    @cached_property
    def collectives_by_operation(self) -> dict[str, dict[Key, CollectiveModel]]:
        """Fits of collectives by their operation, such as ``all_reduce``, and by their name."""
        fits: dict[str, dict[Key, CollectiveModel]] = {}
        for name, fit in self.collectives.items():
            key = Key.parse(name)
            fits.setdefault(key.operation, {})[key] = fit
        return fits

    @property
    def cache_capacities(self) -> tuple[float, float]:
        """Capacities of the last two caches, fitted or nominal, the latter times the share that they
        hold; a single one counts for both [B]."""
        if self.context.caches:
            return self.context.caches["l2"], self.context.caches["l3"]
        sizes = [level.effective_capacity for level in self.device.memory[:-1]]
        caches = [size for size in sizes if size is not None] or [0.0]
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

    @cached_property
    def memory_of_rank(self) -> float | None:
        """Memory of one rank [B], None if it is not known; ranks of a CPU share that of their
        node."""
        memory = self.device.memory[-1].capacity if self.device.memory else None
        if memory is None:
            return None
        sharers = self.network.ranks_per_node if self.device.kind == "cpu" else 1
        return memory.value / sharers

    @property
    def page_entries(self) -> float:
        """Pages that the translation buffer effectively holds; infinite if that was not fitted
        [-]."""
        caches = self.context.caches
        return math.inf if caches is None else caches.get("pages", math.inf)

    @cached_property
    def transferred_kernels(self) -> tuple[str, ...]:
        """A sentence for each machine or format that fits of kernels were carried over from."""
        notes: dict[str, None] = {}
        for fit in self.kernels.values():
            notes |= dict.fromkeys(find_transfers("kernels", fit))
        return tuple(notes)

    @property
    def is_rehearsed(self) -> bool:
        """Whether a rehearsal has written it, so that nothing was timed: ``perfkit calibrate
        --rehearse``."""
        return str(self.provenance.get("id", "")).startswith(REHEARSAL)

    @cached_property
    def has_timed_caches(self) -> bool:
        """Whether the time of a kernel under a roofline depends on what caches hold: a cache of
        measured bandwidth serves rows of tables, and a translation buffer of known size misses
        pages."""
        return self.device.cache_bandwidth is not None or self.page_entries < math.inf


# Every number.


class Number(NamedTuple):
    """One number of a platform with its place and origin; see
    `perfkit.ground.hardware.Quantity`."""

    group: str
    name: str
    value: float
    unit: str
    kind: str
    stderr: float | None
    source: str
    date: str
    basis: str = ""


def list_fits(machine: Machine) -> Iterator[tuple[str, str, Fit]]:
    """List every fit of a platform: ``kernel``, ``collective`` or ``context``, its name there, and
    the fit."""
    parts = {
        "kernel": machine.kernels,
        "collective": machine.collectives,
        "context": machine.context.fits(),
    }
    for group, fits in parts.items():
        for key, fit in fits.items():
            yield group, key, fit


def _list_quantities(machine: Machine) -> Iterator[tuple[str, str, Quantity | None]]:
    """List the numbers outside fits with their group and name; None for those that are not
    known."""
    for dtype, peak in machine.device.peaks.items():
        yield "peak", dtype, peak
    for level in machine.device.memory:
        yield "memory", f"{level.name} capacity", level.capacity
        yield "memory", f"{level.name} bandwidth", level.bandwidth
        yield "memory", f"{level.name} held", level.held
    for name, link in machine.network.links.items():
        yield "link", f"{name} bandwidth", link.bandwidth
        yield "link", f"{name} latency", link.latency
    for name, overhead in machine.host.items():
        yield "host", name, overhead
    yield "device", "capability", machine.device.capability
    if machine.host_memory is not None:
        for name in ("capacity", "bandwidth", "to_host", "from_host"):
            yield "host memory", name, getattr(machine.host_memory, name)


def list_numbers(machine: Machine) -> Iterator[Number]:
    """List peaks, memory, links, host overheads, then the parameters and the spread of every
    fit."""
    for group, name, quantity in _list_quantities(machine):
        if quantity is not None:
            yield Number(
                group,
                name,
                quantity.value,
                quantity.unit,
                quantity.kind,
                quantity.stderr,
                quantity.source,
                quantity.date,
                quantity.basis,
            )
    for group, key, fit in list_fits(machine):
        for name, parameter in fit.parameters.items():
            yield _of_fit(group, f"{key} {name}", parameter, fit)
        yield _of_fit(group, f"{key} spread", Parameter(fit.spread), fit)


def _of_fit(group: str, name: str, parameter: Parameter, fit: Fit) -> Number:
    """A number of a fit, with the origin of the fit."""
    return Number(
        group,
        name,
        parameter.value,
        parameter.unit,
        fit.kind,
        parameter.stderr,
        fit.source,
        fit.date,
    )


#: What the host takes for a call of the framework (T1 to T5, and calls without a kernel); a name may go
#: on with a class of operations and its phase or variant. All of them count as overheads of calls: in
#: intervals, in what-ifs, in the time of each operation.
HOST_OVERHEADS = ("gap", "bare", "before_launch", "after_launch", "launch", "between_launches")


def check_numbers(machine: Machine) -> None:
    """Refuse a platform with numbers outside the limits, whether a file or Python code made it."""
    device, network = machine.device, machine.network
    check_choice("device.kind", device.kind, ("cpu", "cuda"))
    for name in ("ranks_per_node", "nodes", "rails", "regions"):
        check_positive(f"network.{name}", getattr(network, name), integer=True)
    if network.nodes % network.regions:
        raise ValueError(
            f"network.regions is {network.regions}; it must divide {network.nodes} nodes"
        )
    check_positive("network.starts", network.starts)
    if machine.host_memory is not None:
        check_positive("host_memory.sharers", machine.host_memory.sharers, integer=True)
    for operation, algorithm in network.algorithms.items():
        check_choice("network.algorithms", operation, forms.OPERATIONS)
        check_choice(f"network.algorithms.{operation}", algorithm, ALGORITHMS)
    for name in device.peaks:
        check_choice("device.peaks", name, DTYPES)
    for name in network.links:
        check_choice("network.links", name, LINKS)
    for name in machine.host:
        check_choice("host", name.partition(".")[0], HOST_OVERHEADS)
    if (
        not device.memory
        or device.memory[-1].bandwidth is None
        or any(x.capacity is None for x in device.memory[:-1])
    ):
        raise ValueError(
            "device.memory has no bandwidth in its last level, or a cache without a capacity; state them"
        )
    endings = [kind.ending for kind in STEP_KINDS]
    for key in machine.context.stacks:
        stack, _, rest = key.partition(".")
        dtype = rest.partition(".")[0]
        ending = key.removeprefix(f"{stack}.{dtype}")
        if not stack or ending not in endings:
            raise ValueError(
                f"context stacks {show(key)} names no stack; write it as 'megatron-te.fp8', with "
                "'.experts' for models with experts, then '.nodes' for ranks of several nodes"
            )
        check_choice(f"context stacks {show(key)}: format", dtype, DTYPES)
        if dtype == "fp16":
            raise ValueError(
                f"context stacks {show(key)}: format is 'fp16', which has the level of bf16; write 'bf16'"
            )
    for group, key, fit in list_fits(machine):
        _check_fit(f"{group} {key}", group, key, fit)
        _check_number(Number(group, f"{key} bias", fit.bias, "-", fit.kind, None, "", ""))
        when = LARGEST if fit.spread_time is None else fit.spread_time
        _check_number(Number(group, f"{key} spread_time", when, "s", fit.kind, None, "", ""))
    for number in list_numbers(machine):
        _check_number(number)
    for group, key, fit in list_fits(machine):
        for name, parameter in fit.parameters.items():
            _check_limits(_of_fit(group, f"{key} {name}", parameter, fit), parameter)


def _check_limits(number: Number, parameter: Parameter) -> None:
    """Refuse a parameter outside the limits that it states itself; `_check_number` knows those of
    its name."""
    if not parameter.low <= number.value <= parameter.high:
        raise ValueError(
            f"{number.group} {number.name} is {show(number.value)}; it must be a number from "
            f"{parameter.low:g} to {parameter.high:g} [{number.unit}]"
        )


def _check_number(number: Number) -> None:
    """Refuse a number with a wrong unit or kind, without a source, or outside its limits."""
    name = f"{number.group} {number.name}"
    fitted = number.group in ("kernel", "collective", "context")
    parameter = name.rpartition(" ")[2]
    unit = number.unit if fitted else _QUANTITIES.get(number.group) or _QUANTITIES[parameter]
    if number.unit != unit or not {*unit.split("/")} <= {*UNITS}:
        wanted = f"made of {', '.join(UNITS)}" if fitted else unit
        raise ValueError(f"{name}: unit is {show(number.unit)}; it must be {wanted}")
    if not fitted and not number.source.strip():
        raise ValueError(f"{name}: source is blank; name a document, data id or machine")
    low, high = (
        LIMITS.get(parameter, (0.0, LARGEST))
        if fitted or unit == "s"
        else (TINY, sys.float_info.max)
    )
    check_choice(f"{name}: kind", number.kind, KINDS)
    if not low <= number.value <= high:
        wanted = "above 0" if low == TINY else f"from {low:g} to {high:g}"
        raise ValueError(
            f"{name} is {show(number.value)}; it must be a number {wanted} [{number.unit}]"
        )
    if not 0.0 <= (number.stderr or 0.0) <= max(high, LARGEST):
        raise ValueError(
            f"{name}: stderr is {show(number.stderr)}; it must be a number of 0 or more [{number.unit}]"
        )


def _check_fit(name: str, group: str, key: str, fit: Fit) -> None:
    """Refuse a fit under a name that fits of its form do not have, or with a range that is none."""
    if group == "collective":
        Key.parse(key, collective=True)
    kind = key.partition(".")[0]
    if isinstance(fit, TiledRoofline) and kind not in ("gemm", "bmm"):
        raise ValueError(f"{name}: form is 'tiled'; only products have tiles, gemm and bmm")
    if isinstance(fit, AttentionRoofline) and kind != "attention":
        raise ValueError(f"{name}: form is 'attention'; only attention has heads")
    if isinstance(fit, RowwiseRoofline) and kind != "rowwise":
        raise ValueError(f"{name}: form is 'rowwise'; only row-wise kernels have rows")
    if isinstance(fit, SequentialRoofline) and kind not in ("recurrent", "factorization"):
        raise ValueError(
            f"{name}: form is 'sequential'; only recurrent layers and factorizations have steps"
        )
    if isinstance(fit, LookupRoofline) and not kind.startswith("embedding"):
        raise ValueError(f"{name}: form is 'lookups'; only embeddings look up rows")
    terms = list_terms(kind)
    if fit.form == "additive" and terms:  # whose sizes its class has
        for term in fit:
            if term not in terms:
                raise ValueError(
                    f"{name}: {term} is not a parameter of this fit; "
                    f"additive takes {', '.join(terms)}"
                )
    for variable, ends in fit.ranges.items():
        if len(ends) != 2 or not -math.inf <= ends[0] <= ends[1]:
            raise ValueError(
                f"{name}: range of {show(variable)} is {show(ends)}; it must be a lower and an upper end"
            )
