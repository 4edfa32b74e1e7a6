"""Questions to a platform about single kernels: products, lookups, and kernels of any class.

What a kernel takes is decided in `perfkit.platform.kernel_times`, for these questions and for
predictions. Only what surrounds a kernel differs. Here it runs alone, again and again, so that caches
hold what fits into them; in an iteration, other operations come between two uses of an operand.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Additive
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import (
    Array,
    Values,
    check_choice,
    check_positive,
    check_sizes,
    check_type,
    format_rate,
    is_listed,
    show,
)
from perfkit.models import embedding
from perfkit.models.caches import miss_share
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.estimates import (
    Estimate,
    find_extrapolations,
    find_transfers,
    format_equation,
    missing_data_error,
    warn_once,
)
from perfkit.platform.kernel_times import (
    ClassifiedKernels,
    KernelSizes,
    LoneModel,
    find_aligned_products,
    find_hits,
    find_lone_model,
    find_mean_bandwidth,
    find_traffic,
    list_unaligned,
    make_lone_model,
    say_unaligned,
    time_alone,
)
from perfkit.platform.kernels import find_kernel
from perfkit.platform.machine import Machine


class _Timed(NamedTuple):
    """Kernels of one class, each alone.

    Parameters
    ----------
    seconds : array
        Time of each [s].
    sizes : KernelSizes
        Their sizes, with the rates of the device.
    has_unaligned : bool
        Whether products on tensor cores lack aligned rows.
    """

    seconds: Array
    sizes: KernelSizes
    has_unaligned: bool


def time_kernels(
    machine: Machine, kind: str, features: Mapping[str, Values], *, dtype: str = "fp32"
) -> Array:
    """Times of kernels of one class [s], see `Platform.kernel_time`."""
    check_type("features", features, Mapping)
    check_type("kind", kind, str)
    check_choice("dtype", dtype, DTYPES)
    found = find_kernel(machine.kernels, kind, dtype=dtype)
    if found is None:
        raise _lacks_model(machine, kind)
    check_choice(f"on {machine.name} dtype", dtype, machine.device.peaks)
    names = kind.split(".")
    operation = names[0]
    variant = ".".join(name for name in names[1:] if name not in DTYPES)
    model = make_lone_model(machine, operation, variant, dtype, found[1])
    given = {
        name: check_sizes(f"features[{show(name)}]", values) for name, values in features.items()
    }
    shape = np.broadcast_shapes(*(values.shape for values in given.values()))
    sizes = {name: np.broadcast_to(values, shape).ravel() for name, values in given.items()}
    try:
        seconds = _time(machine, model, sizes).seconds
    except KeyError as error:
        raise ValueError(
            f"features has no {error}; the model of {kind} needs it, in base units"
        ) from None
    return seconds.reshape(shape)


def estimate_gemm(
    machine: Machine, m: int, n: int, k: int, *, dtype: str = "fp32", batch: int = 1
) -> Estimate:
    """Time of a matrix product, see `Platform.gemm`."""
    given = {"m": m, "n": n, "k": k, "batch": batch}
    shape = {name: float(check_positive(name, size, integer=True)) for name, size in given.items()}
    itemsize = DTYPES[check_choice(f"on {machine.name} dtype", dtype, machine.device.peaks)]
    sizes = {
        **shape,
        "flops": gemm_flops(**shape),
        "nbytes": gemm_bytes(**shape, itemsize=itemsize),
    }
    title = f"gemm {m} x {n} x {k}" + (f", batch {batch}," if batch > 1 else "") + f" in {dtype}"
    model = _find_product(machine, "gemm" if batch == 1 else "bmm", dtype)
    return _estimate(
        machine, title, model, {name: np.array([size]) for name, size in sizes.items()}
    )


def estimate_lookups(machine: Machine, tables: Sequence[Any], *, batch: int) -> Estimate:
    """Time of the forward lookups of embedding tables, see `Platform.lookup`."""
    batch = check_positive("batch", batch, integer=True)
    tables = getattr(tables, "tables", tables)
    if (
        not isinstance(tables, Collection)
        or not is_listed(tables)
        or not len(tables)
        or not all(hasattr(t, "distribution") for t in tables)
    ):
        raise ValueError(f"tables is {show(tables)}; pass at least one embedding table")
    for table in tables:
        if getattr(table, "host_bytes", 0):
            raise ValueError(
                f"kernel of a table is {table.kernel!r}; the kernel of EmbeddingBag reads device memory "
                "alone; predict a DLRM with embedding='exact' instead, or take kernel='fused'"
            )
    model = find_lone_model(machine, "embedding_forward", "_embedding_bag", "fp32")
    sizes = _size_lookups(machine, model, tables, batch)
    return _estimate(machine, f"lookup in {len(tables)} tables, batch {batch},", model, sizes)


class TableTimes(NamedTuple):
    """Lookups into tables that lie in the memory of a device, table by table.

    Parameters
    ----------
    seconds : array, shape (n,)
        Time of the lookups of each table, without the launch of the kernel [s].
    l2_hits : array, shape (n,)
        Share of the looked-up bytes of each table that the last cache serves [-].
    launch : float
        Launch of the kernel [s].
    """

    seconds: Array
    l2_hits: Array
    launch: float


def time_tables(
    machine: Machine, tables: Sequence[Any], *, batch: int, variant: str = "fused"
) -> TableTimes:
    """Time the forward lookups of tables, or of the parts of tables that a device holds.

    Parameters
    ----------
    machine : Machine
        Where they are looked up.
    tables : sequence of EmbeddingTable
        The tables, n of them. A part that a device holds is a table with its own rows, lookups of a
        sample and law, see `perfkit.workloads.tables.take_part` and
        `perfkit.models.distributions.Distribution.split`.
    batch : int
        Samples [-].
    variant : str, optional
        The kernel: ``fused`` for one that looks up all tables, ``_embedding_bag`` for one a table.

    Returns
    -------
    times : TableTimes
        Tables share the caches, which other work of an iteration would share, too.

    Raises
    ------
    ValueError
        Where the platform has no fit of lookups.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> from perfkit.workloads.tables import EmbeddingTable
    >>> skewed = EmbeddingTable(1_000_000, 128, pooling=100, exponent=1.2)
    >>> times = time_tables(load_platform("a100-sxm-8"), [skewed], batch=2048)
    >>> times.l2_hits.round(2).tolist()
    [0.94]
    """
    model = find_lone_model(machine, "embedding_forward", variant, "fp32")
    if model.fit is None:
        raise _lacks_model(machine, model.kind)
    sizes = _size_lookups(machine, model, tables, batch)
    seconds = _time(machine, model, sizes).seconds
    launch = model.fit.get("launch", 0.0)
    l2_hits = 1.0 - sizes["beyond_l3"] / sizes["row_bytes"]
    return TableTimes(np.maximum(seconds - launch, 0.0), l2_hits, launch)


def _size_lookups(
    machine: Machine, model: LoneModel, tables: Sequence[Any], batch: int
) -> dict[str, Array]:
    """Sizes of the lookups of tables, which share the caches."""
    columns = [
        (t.rows, t.dim, batch * t.results, batch * t.pooling, t.itemsize, t.row_bytes)
        for t in tables
    ]
    rows, dim, bags, lookups, itemsize, row_width = np.array(columns, dtype=float).T
    granularity = machine.device.access_granularity
    found = embedding.size_lookup(
        [table.distribution for table in tables],
        lookups,
        row_width,
        itemsize=1.0,
        capacities=[max(capacity, 1.0) for capacity in machine.cache_capacities],
        entries=machine.page_entries,
        granularity=granularity,
        in_turn=machine.device.kind != "cpu",
    )
    # indices, offsets and pooled rows
    operand_bytes = embedding.forward_bytes(
        bags, lookups, dim, itemsize=itemsize, granularity=granularity, misses=0.0
    )
    missed_l2, missed_l3 = found.misses
    beyond_l2, beyond_l3 = missed_l2 * found.row_bytes, missed_l3 * found.row_bytes
    traffic = find_traffic(
        _classify(model, len(rows)), machine, operand_bytes, found.row_bytes, beyond_l3
    )
    return {
        "rows": rows,
        "dim": dim,
        "bags": bags,
        "lookups": lookups,
        "flops": np.zeros(len(rows)),  # sums of rows are hidden behind their bytes
        "nbytes": operand_bytes,
        "row_bytes": found.row_bytes,
        "unique_bytes": found.unique_bytes,
        "page_walks": found.walks,
        "beyond_l2": beyond_l2,
        "beyond_l3": beyond_l3,
        "hits": find_hits(found.row_bytes, beyond_l3),
        "traffic": traffic.nbytes,
        "bandwidth": traffic.bandwidth,
    }


def _find_product(machine: Machine, kind: str, dtype: str) -> LoneModel:
    """What times products of two operands as they lie in memory, ``nn``; where these were not
    measured, those of the first layout that was."""
    model = find_lone_model(machine, kind, "nn", dtype)
    if model.fit is not None:
        return model
    for name in machine.kernels:
        operation, _, variant = name.partition(".")
        if operation == kind:
            return find_lone_model(machine, kind, variant, dtype)
    raise _lacks_model(machine, kind)


def _estimate(machine: Machine, title: str, model: LoneModel, sizes: KernelSizes) -> Estimate:
    """Estimate kernels of one class, one after another, with the resource that limits them among
    the parts."""
    fit = model.fit
    if fit is None:
        raise _lacks_model(machine, model.kind)
    timed = _time(machine, model, sizes)
    time = float(timed.seconds.sum())
    compute = timed.sizes["flops"] / timed.sizes["peak"]
    memory = timed.sizes["traffic"] / timed.sizes["bandwidth"]
    name = "arithmetic" if np.sum(compute) > np.sum(memory) else "memory traffic"
    launch = min(timed.seconds.size * fit.get("launch", 0.0), time)
    bound = min(float(np.maximum(compute, memory).sum()), time - launch)
    terms = {
        "launch": launch,
        f"{name} at the full rate": bound,
        "below that rate": time - launch - bound,
    }
    bandwidth = float(np.max(timed.sizes["bandwidth"]))
    rates = f"peak {format_rate(model.peak, 'FLOP/s')}, memory {format_rate(bandwidth, 'B/s')}"
    formula = f"{title} on {machine.name}: {format_equation(fit)}; {rates}"
    spread = float(fit.spread_at(timed.seconds) @ timed.seconds) / time if time else fit.spread
    measured = {**sizes, "nbytes": timed.sizes["traffic"]}
    notes = find_extrapolations(title, fit, measured) + find_transfers(title.split()[0], fit)
    if fit.stands_for:
        notes = (*notes, *fit.notes[:1])
    if timed.has_unaligned:
        spread = math.hypot(spread, list_unaligned(machine, model.kind).spread)
        notes = (*notes, say_unaligned(machine, model.kind, model.dtype))
    # raises for impossible times, before the warning
    estimate = Estimate(time, spread, terms, formula, notes)
    warn_once(notes, 4)
    return estimate


def _time(machine: Machine, model: LoneModel, sizes: KernelSizes) -> _Timed:
    """Time kernels of one class."""
    if not sizes.keys() >= {"m", "n", "k"}:  # rows of unknown sizes are taken as aligned
        model = replace(model, tensor_core_itemsize=0.0, head_itemsize=0.0)
    if not sizes.keys() >= {"batch", "m", "n", "k", "flops"}:
        model = replace(model, counts_products=False)
    count = len(next(iter(sizes.values()), ()))
    kernels = _classify(model, count)
    on_device = _put_on_device(machine, kernels, sizes)
    products = find_aligned_products(kernels, on_device, machine)
    times = time_alone(kernels, on_device, products, machine)
    has_unaligned = bool(products.is_unaligned.any())
    return _Timed(times.near + times.distant, on_device, has_unaligned)


def _classify(model: LoneModel, count: int) -> ClassifiedKernels:
    """So many kernels of one class."""
    return ClassifiedKernels((model,), np.zeros(count, dtype=np.intp), dimensions=1)


def _put_on_device(
    machine: Machine, kernels: ClassifiedKernels, sizes: KernelSizes
) -> dict[str, Array]:
    """Add what is not given: the peak, and the traffic, bandwidth and cache misses of operands that
    are used again and again."""
    (model,) = kernels.models
    count = len(kernels.of_operation)
    main_bandwidth = machine.device.main_bandwidth
    cache_bandwidth = machine.device.cache_bandwidth
    known = {
        "launches": np.ones(count),
        "peak": np.full(count, model.peak),
        "traffic": np.zeros(count),
        "bandwidth": np.full(count, main_bandwidth),
        "hits": np.zeros(count),
        "rows": np.zeros(count),
    }
    if sizes.keys() >= {"lookups", "elements"}:
        known["dim"] = sizes["elements"] / np.maximum(sizes["lookups"], 1.0)
    if isinstance(model.fit, Additive) and "beyond_l3" in sizes:  # needs nothing of the device
        return known | dict(sizes)
    nbytes = sizes["nbytes"]
    working_set = sizes.get("working_set", nbytes)
    for name, capacity in zip(("beyond_l2", "beyond_l3"), machine.cache_capacities, strict=True):
        known[name] = nbytes * miss_share(working_set, capacity=capacity)
    no_rows = np.zeros(count)
    known["traffic"] = find_traffic(kernels, machine, nbytes, no_rows, no_rows).nbytes
    if "beyond_l3" not in sizes:
        known["bandwidth"] = machine.device.bandwidth(working_set)
    elif cache_bandwidth is not None and model.kind.startswith("embedding"):
        from_memory = np.minimum(sizes["beyond_l3"], nbytes)
        known["bandwidth"] = find_mean_bandwidth(
            main_bandwidth, cache_bandwidth, from_memory, nbytes - from_memory
        )
    return known | dict(sizes)


def _lacks_model(machine: Machine, kind: str) -> ValueError:
    """Error for a class of kernels without a fit."""
    return missing_data_error(machine.name, f"kernel model for {show(kind)}", machine.kernels)
