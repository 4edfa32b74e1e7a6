"""The schema of platform files: every table as it is written, and the records that are made of it."""

from collections.abc import Mapping
from typing import TypeVar

from msgspec import field

from perfkit.fitting import Caches, Fit, InContext, Iteration, Overlap, Pace
from perfkit.ground.hardware import (
    Device,
    HostMemory,
    Link,
    MemoryLevel,
    Network,
    Quantity,
)
from perfkit.ground.schemas import Table
from perfkit.ground.units import check_choice, join_place
from perfkit.platform.machine import Context

F = TypeVar("F", bound=Fit)


class QuantityTable(Table):
    """One number with its origin, see `perfkit.ground.hardware.Quantity`."""

    value: float
    unit: str
    kind: str
    source: str
    date: str = ""
    stderr: float | None = None
    basis: str = ""


class MemoryLevelTable(Table):
    """One of ``[[device.memory]]``, see `perfkit.ground.hardware.MemoryLevel`."""

    name: str
    capacity: QuantityTable | None = None
    bandwidth: QuantityTable | None = None
    held: QuantityTable | None = None


class DeviceTable(Table):
    """``[device]``, see `perfkit.ground.hardware.Device`."""

    name: str
    kind: str
    peaks: dict[str, QuantityTable]
    memory: tuple[MemoryLevelTable, ...]
    never_left_cache: bool = False
    capability: QuantityTable | None = None


class LinkTable(Table):
    """``[network.links.NAME]``, see `perfkit.ground.hardware.Link`."""

    bandwidth: QuantityTable
    latency: QuantityTable
    name: str = ""


class NetworkTable(Table):
    """``[network]``, see `perfkit.ground.hardware.Network`."""

    ranks_per_node: int
    nodes: int = 1
    links: dict[str, LinkTable] = field(default_factory=dict)
    rails: int = 1
    starts: float = 1.0
    regions: int = 1
    algorithms: dict[str, str] = field(default_factory=dict)


class HostMemoryTable(Table):
    """``[host_memory]``, see `perfkit.ground.hardware.HostMemory`."""

    capacity: QuantityTable
    bandwidth: QuantityTable
    to_host: QuantityTable
    from_host: QuantityTable
    sharers: int = 1
    name: str = ""


class FitTable(Table):
    """A fitted model, such as ``[kernels.gemm]``, see `perfkit.fitting.Fit`.

    In a file, unlike in memory, it has a kind, a source, and a unit for each parameter: see
    `check_units`.
    """

    form: str
    parameters: dict[str, float]
    kind: str
    source: str
    stderr: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    bias: float = 0.0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    n: int = 0
    date: str = ""
    notes: tuple[str, ...] = ()
    units: dict[str, str] = field(default_factory=dict)
    at_bounds: tuple[str, ...] = ()
    spread_time: float | None = None
    dtypes: tuple[str, ...] = ()
    stands_for: str = ""
    transferred: tuple[str, ...] = ()
    quality: str = ""
    sources: tuple[str, ...] = ()


class ContextTable(Table):
    """``[context]``, see `perfkit.platform.machine.Context`."""

    kernels: dict[str, FitTable] = field(default_factory=dict)
    iterations: dict[str, FitTable] = field(default_factory=dict)
    parallel: dict[str, FitTable] = field(default_factory=dict)
    paces: dict[str, FitTable] = field(default_factory=dict)
    overlap: FitTable | None = None
    caches: FitTable | None = None
    stacks: dict[str, FitTable] = field(default_factory=dict)


class PlatformFile(Table):
    """A whole platform file, see `perfkit.platform.platform.Platform`."""

    format: int
    name: str
    device: DeviceTable
    network: NetworkTable
    kernels: dict[str, FitTable] = field(default_factory=dict)
    collectives: dict[str, FitTable] = field(default_factory=dict)
    host: dict[str, QuantityTable] = field(default_factory=dict)
    context: ContextTable = field(default_factory=ContextTable)
    provenance: dict[str, str] = field(default_factory=dict)
    host_memory: HostMemoryTable | None = None


def check_units(file: PlatformFile) -> None:
    """Refuse a file with a parameter of a fit that has no unit."""
    context = file.context
    groups: dict[str, dict[str, FitTable | None]] = {
        "kernels": {**file.kernels},
        "collectives": {**file.collectives},
        "context.kernels": {**context.kernels},
        "context.iterations": {**context.iterations},
        "context.parallel": {**context.parallel},
        "context.paces": {**context.paces},
        "context.stacks": {**context.stacks},
        "context": {"overlap": context.overlap, "caches": context.caches},
    }
    for group, fits in groups.items():
        for name, fit in fits.items():
            if fit is not None:
                _check_units_of_fit(join_place(group, name), fit)


def _check_units_of_fit(place: str, fit: FitTable) -> None:
    """Refuse a fit with a parameter that has no unit."""
    for name in fit.parameters:
        if name not in fit.units:
            raise ValueError(f"{join_place(f'{place}.units', name)} is missing; it must be there")


def make_quantity(table: QuantityTable) -> Quantity:
    """Make one number."""
    return Quantity(
        value=table.value,
        unit=table.unit,
        kind=table.kind,
        source=table.source,
        date=table.date,
        stderr=table.stderr,
        basis=table.basis,
    )


def _make_optional_quantity(table: QuantityTable | None) -> Quantity | None:
    """Make a number that a file may leave out."""
    return None if table is None else make_quantity(table)


def make_quantities(tables: dict[str, QuantityTable]) -> dict[str, Quantity]:
    """Make numbers by name."""
    return {name: make_quantity(table) for name, table in tables.items()}


def make_device(table: DeviceTable) -> Device:
    """Make the device with its levels of memory."""
    levels = tuple(
        MemoryLevel(
            name=level.name,
            capacity=_make_optional_quantity(level.capacity),
            bandwidth=_make_optional_quantity(level.bandwidth),
            held=_make_optional_quantity(level.held),
        )
        for level in table.memory
    )
    return Device(
        name=table.name,
        kind=table.kind,
        peaks=make_quantities(table.peaks),
        memory=levels,
        never_left_cache=table.never_left_cache,
        capability=_make_optional_quantity(table.capability),
    )


def make_network(table: NetworkTable) -> Network:
    """Make the network with its links."""
    links = {
        name: Link(
            bandwidth=make_quantity(link.bandwidth),
            latency=make_quantity(link.latency),
            name=link.name,
        )
        for name, link in table.links.items()
    }
    return Network(
        ranks_per_node=table.ranks_per_node,
        nodes=table.nodes,
        links=links,
        rails=table.rails,
        starts=table.starts,
        regions=table.regions,
        algorithms=table.algorithms,
    )


def make_host_memory(table: HostMemoryTable | None) -> HostMemory | None:
    """Make the memory of the host, which a file may leave out."""
    if table is None:
        return None
    return HostMemory(
        capacity=make_quantity(table.capacity),
        bandwidth=make_quantity(table.bandwidth),
        to_host=make_quantity(table.to_host),
        from_host=make_quantity(table.from_host),
        sharers=table.sharers,
        name=table.name,
    )


#: Forms that earlier files name, and the form that each is with an exponent of 1.
_FORMER = {"alpha_beta": "pipelined", "two_regime": "two_branch"}


def make_fit(place: str, table: FitTable, models: Mapping[str, type[F]]) -> F:
    """Make one fitted model of one of the forms that are possible at its place in the file."""
    parameters = table.parameters
    name = table.form
    if name in _FORMER and _FORMER[name] in models:
        name = _FORMER[name]
        parameters = {**parameters, "sharpness": 1.0}
    form = check_choice(f"{place}.form", name, models)
    try:
        return models[form].build(
            parameters,
            units=table.units,
            stderr=table.stderr,
            spread=table.spread,
            bias=table.bias,
            ranges=table.ranges,
            n=table.n,
            kind=table.kind,
            source=table.source,
            date=table.date,
            notes=table.notes,
            at_bounds=table.at_bounds,
            spread_time=table.spread_time,
            dtypes=table.dtypes,
            stands_for=table.stands_for,
            transferred=table.transferred,
            quality=table.quality,
            sources=table.sources,
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def make_fits(
    place: str, tables: dict[str, FitTable], models: Mapping[str, type[F]]
) -> dict[str, F]:
    """Make fitted models by name."""
    return {
        name: make_fit(join_place(place, name), table, models) for name, table in tables.items()
    }


def make_context(table: ContextTable) -> Context:
    """Make what real iterations add to isolated kernels and collectives."""
    overlap, caches = None, None
    if table.overlap is not None:
        overlap = make_fit("context.overlap", table.overlap, {Overlap.form: Overlap})
    if table.caches is not None:
        caches = make_fit("context.caches", table.caches, {Caches.form: Caches})
    iteration = {Iteration.form: Iteration}
    return Context(
        kernels=make_fits("context.kernels", table.kernels, {InContext.form: InContext}),
        iterations=make_fits("context.iterations", table.iterations, iteration),
        parallel=make_fits("context.parallel", table.parallel, iteration),
        paces=make_fits("context.paces", table.paces, {Pace.form: Pace}),
        overlap=overlap,
        caches=caches,
        stacks=make_fits("context.stacks", table.stacks, iteration),
    )
