"""Fuzzers of numbers that are not Python's, and of objects of other types, in everything that takes
arguments."""

import datetime
import decimal
import fractions
import itertools
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import perfkit as pk
from perfkit import fitting, plots
from perfkit.models import (
    caches,
    collectives,
    distributions,
    embedding,
    experts,
    failures,
    hierarchy,
    host_tables,
    kernels,
    offload,
    partitions,
    roofline,
    skew,
    variation,
)
from tests.fuzz.damage import NUMBERS, TEXTS, Rng, choose
from tests.fuzz.harness import Entry, Nonsense


class Example(NamedTuple):
    """A call with arguments that are right."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self, **changes: Any) -> Any:
        """Call it, with other values for some arguments; those that begin with ``*`` are handed over
        by place."""
        by_place, by_name = [], {}
        for name, value in {**self.arguments, **changes}.items():
            if name.startswith("*"):
                by_place.append(value)
            else:
                by_name[name] = value
        return self.function(*by_place, **by_name)


def example(function: Callable[..., Any], **arguments: Any) -> Example:
    """A call by the names of its arguments."""
    return Example(function, arguments)


def by_place(function: Callable[..., Any], *places: Any, **arguments: Any) -> Example:
    """A call whose first arguments are handed over by place."""
    return Example(function, {f"*{i}": value for i, value in enumerate(places)} | arguments)


# Examples.

LAW = {"alpha0": 2.0**-17, "alpha1": 2.0**-20, "beta0": 2.0**-14, "beta1": 2.0**-13}
SWITCH = {"alpha1": 2.0**-17, "beta1": 2.0**-14, "alpha2": 2.0**-15, "beta2": 2.0**-17}
NODES = {"ranks_per_node": 8, "nodes": 4}
SIZES = {"nbytes": 100.0, "flops": 64.0, "m": 8.0, "n": 16.0, "k": 32.0, "batch": 1.0}
ZIPF, UNIFORM = distributions.Zipf(1000, 1.125), distributions.Uniform(1000)
LOOKUPS = {"distributions": [ZIPF, UNIFORM], "lookups": [100.0, 50.0]}
#: Closed forms; all numbers are also numbers of 16 bits.
FORMS: tuple[Example, ...] = (
    example(collectives.ring_steps, operation="all_reduce", ranks=100),
    example(collectives.ring_steps, operation="all_gather", ranks=100),
    example(collectives.bus_factor, operation="all_reduce", ranks=100),
    example(collectives.bus_factor, operation="all_to_all", ranks=100),
    example(
        collectives.bus_bandwidth, nbytes=100, time=2.0**-10, ranks=100, operation="all_reduce"
    ),
    example(collectives.alpha_beta, nbytes=100, alpha=2.0**-17, beta=2.0**-20),
    example(collectives.pipelined, nbytes=100, alpha=2.0**-17, beta=2.0**-20, sharpness=0.5),
    example(collectives.two_branch, nbytes=100, sharpness=0.75, **SWITCH),
    example(collectives.over_ranks, nbytes=100, ranks=100, operation="all_reduce", **LAW),
    example(
        collectives.ring_collective,
        nbytes=100,
        operation="all_reduce",
        ranks=100,
        alpha_hop=2.0**-17,
        beta_link=2.0**-20,
    ),
    example(hierarchy.split_levels, operation="all_reduce", nbytes=100, ranks_per_node=8),
    example(hierarchy.overlap_levels, inside=3, between=4, sharpness=2.5),
    example(hierarchy.start_across, operation="all_reduce", alpha_rail=2.0**-17, **NODES),
    example(hierarchy.start_across, operation="all_to_all", ranks_per_node=100, nodes=100),
    example(hierarchy.start_across, operation="broadcast", ranks_per_node=100, nodes=100),
    example(
        hierarchy.ring_across_nodes,
        nbytes=100,
        operation="all_reduce",
        alpha_hop=2.0**-17,
        beta_intra=2.0**-20,
        beta_rail=2.0**-18,
        **NODES,
    ),
    example(
        hierarchy.pipelined_tree,
        nbytes=100,
        start_up=2.0**-13,
        beta_intra=2.0**-20,
        beta_rail=2.0**-18,
        expansion=4.0,
        **NODES,
    ),
    example(hierarchy.start_messages, nbytes=2.0**20, alpha_message=2.0**-18, **NODES),
    example(hierarchy.flat_all_to_all, inside=3, between=4, messages=2.0**-12),
    example(experts.reached_groups, groups=4, experts=16, top_k=2),
    example(
        experts.dispatched_bytes,
        nbytes=100,
        ranks=16,
        nodes=2,
        experts=64,
        top_k=4,
        inside=1024,
        between=256,
    ),
    example(hierarchy.two_level_all_to_all, nbytes=100, inside=3, between=4, memory_bandwidth=1024),
    example(
        hierarchy.tree_collective,
        nbytes=100,
        operation="all_reduce",
        ranks=64,
        alpha_hop=2.0**-17,
        beta_link=2.0**-20,
        nodes=8,
        alpha_rail=2.0**-16,
    ),
    example(
        hierarchy.in_network_all_reduce,
        nbytes=100,
        ranks=127,
        alpha_hop=2.0**-17,
        beta_link=2.0**-20,
    ),
    by_place(roofline.smooth_maximum, 3, 4, 5, sharpness=2.0),
    example(roofline.roofline_time, flops=100, nbytes=120, peak=64, bandwidth=32, launch=0.5),
    example(roofline.round_up, x=127, multiple=64),
    example(roofline.gemm_flops, m=100, n=100, k=100, batch=8),
    example(roofline.gemm_bytes, m=100, n=100, k=100, batch=8, itemsize=2),
    example(roofline.attention_flops, batch=8, heads=16, sequence=100, head_dim=64),
    example(roofline.attended_keys, keys=100, window=64),
    example(roofline.attention_work, flops=100, width=96, keys=100, diagonal=64),
    example(
        roofline.sequential_time,
        steps=100,
        m=16,
        n=64,
        k=32,
        per_step=1.0,
        per_depth=0.5,
        per_weight=0.1,
        per_product=0.01,
    ),
    example(roofline.rowwise_time, rows=100, columns=64, nbytes=120, bandwidth=32, per_row=0.5),
    example(kernels.capped_clock, power=1, idle_share=0.25),
    example(host_tables.read_from_host, lookups=100, row_bytes=64, bandwidth=32, misses=0.5),
    example(host_tables.update_on_host, rows=100, row_bytes=64, bandwidth=32, states=2),
    example(host_tables.keep_cache, lookups=100, missed=8, row_bytes=64, bandwidth=32),
    example(offload.host_update_bytes, weights=1000, states=2, wide=4, narrow=2),
    example(roofline.attention_bytes, batch=8, heads=16, sequence=100, head_dim=64, kv_heads=120),
    example(roofline.optimizer_bytes, optimizer="adamw", parameters=100, itemsize=2),
    example(embedding.state_bytes, rows=100, dim=100, itemsize=4, optimizer="adam"),
    example(embedding.frequent_lookups, nodes=8, all_to_all=100, all_reduce=64, efficiency=0.5),
    example(
        embedding.lookup_time,
        lookups=100,
        dim=100,
        nbytes=120,
        bandwidth=32,
        launch=0.5,
        per_lookup=0.25,
        per_number=0.125,
        hits=0.5,
        hit=0.5,
        sharpness=2.0,
    ),
    example(embedding.row_traffic, dim=100, itemsize=4, granularity=64),
    example(embedding.forward_bytes, bags=100, lookups=100, dim=100, misses=0.5),
    example(embedding.fused_backward_bytes, bags=100, lookups=100, dim=100, misses=0.5),
    example(
        embedding.exact_backward_bytes,
        unique=100,
        bags=100,
        lookups=120,
        dim=100,
        gradient_misses=0.5,
        sort_passes=4,
    ),
    example(
        embedding.size_lookup,
        **LOOKUPS,
        dim=[64, 100],
        capacities=[4096.0],
        entries=64.0,
        itemsize=4,
        granularity=64,
        dense_bytes=100.0,
    ),
    example(caches.lru_misses, **LOOKUPS, row_bytes=[64, 100], capacity=4096, dense_bytes=100),
    example(caches.page_walks, **LOOKUPS, row_bytes=[64, 100], entries=8, dense_bytes=100),
    example(caches.cover_pages, rows=100, nbytes=2048),
    example(caches.lru_hit_rate, distribution=UNIFORM, rows_cached=100),
    example(caches.cold_misses, distribution=UNIFORM, lookups=100, rows_cached=100),
    example(caches.miss_share, distance=100, capacity=120, sharpness=4),
    example(
        caches.rotating_misses, fresh=0.875, oldest=0.75, distance=100, capacity=120, sharpness=4
    ),
    example(distributions.unique_rows, distribution=ZIPF, lookups=100),
    example(distributions.count_frequent_rows, distribution=ZIPF, lookups=100, threshold=2),
    example(distributions.distinct_rows, distributions=[ZIPF, UNIFORM], lookups=[100, 50]),
    example(
        distributions.spread_rows,
        rows=np.array([100.0, 50.0]),
        exponents=np.array([1.0, 0.5]),
        shifts=np.array([0.0, 0.0]),
    ),
    example(kernels.additive, sizes=SIZES, launch=2.0**-10, nbytes=2.0**-12, tiled_flops=2.0**-14),
    example(
        kernels.in_context,
        sizes={"hot": 0.5, "cold": 0.25, "page_walks": 100},
        scale=1.5,
        cold_scale=0.5,
        launch=0.25,
        page_walks=2.0**-10,
    ),
    example(
        kernels.at_usual_pace,
        seconds=2.0,
        references=[1.0, 1.0, 2.0],
        product=1.0,
        stream=1.0,
        gather=1.0,
        product_weight=0.5,
        stream_weight=0.5,
        gather_weight=0.0,
    ),
    example(kernels.reuse_distances, tensors=[0, 1, 0, 2], nbytes=[100, 5, 100, 1]),
    example(partitions.bubble_time, total=100, slowest=12, stages=100, chunks=2, delayed=0.25),
    example(
        partitions.held_batches, micro_batches=100, stages=100, schedule="1f1b", chunks=1, stage=0
    ),
    example(partitions.check_schedule, name="zb_v"),
    example(partitions.list_steps, schedule="1f1b", stage=1, stages=4, micro_batches=8, chunks=1),
    example(partitions.exposed_time, communication=12, compute=30, pieces=24),
    example(partitions.time_beside, communication=12, compute=8, contention=0.25),
    example(
        partitions.compressed_time,
        gradient=1024,
        compute=0.125,
        start=2.0**-12,
        encode=2.0**-14,
        ratio=0.25,
        alpha=2.0**-14,
        beta=2.0**-13,
        groups=100,
    ),
    example(partitions.model_state_bytes, parameters=100, ranks=64, zero=3),
    example(partitions.activation_bytes, batch=8, sequence=100, hidden=100, heads=120, tensor=2),
    example(failures.young_interval, checkpoint=100, mtbf=4096),
    example(failures.daly_interval, checkpoint=100, mtbf=4096),
    example(failures.segment_time, length=100, mtbf=4096, restart=64),
    example(failures.segment_variance, length=100, mtbf=4096, restart=64),
    example(failures.chance_done, seconds=1024, segments=8, length=100, mtbf=4096, restart=64),
    example(failures.wait_for_slowest, jitter=0.25, ranks=64),
    example(variation.deviation_of_slowest, ranks=64),
    example(skew.bin_accesses, accesses=[1, 1, 2, 3, 4], rows=100),
    example(skew.fit_zipf, histogram=skew.bin_accesses([1, 1, 2, 3, 4], rows=100)),
)

H100, ZEN = pk.load_platform("h100-sxm-8"), pk.load_platform("zen5-2")
TABLES = (pk.EmbeddingTable(1000, 64, pooling=20), pk.EmbeddingTable(100, 64))
TABLE_SET = pk.TableSet(TABLES, batch=2048)
SMALL = pk.DLRM(rows=[100] * 3, dim=16, bottom=[16], top=[16], batch=64)
GPT = pk.Transformer.gpt2("gpt2", layers=2, hidden=64, heads=4, batch=8, sequence=64)
PLAN = pk.Plan(2, (0, pk.Placement("row_wise", (0, 1))))
#: Constructors and functions that are called with sizes.
SIZED: tuple[Example, ...] = (
    example(
        pk.EmbeddingTable, rows=1000, dim=64, pooling=20.0, exponent=0.5, itemsize=4, spread=1.0
    ),
    example(lambda **given: pk.TableSet(TABLES, **given).table()["unique_rows"], batch=2048),
    example(lambda **given: pk.price_plan(pk.TableSet(TABLES, **given), H100, PLAN), batch=2048),
    example(
        lambda **given: pk.predict(pk.DLRM(rows=[100, 100], bottom=[16], top=[16], **given), ZEN),
        dim=16,
        batch=64,
        pooling=20,
        features=13,
    ),
    example(
        lambda **given: pk.predict(pk.Transformer.gpt2("gpt2", **given), ZEN),
        layers=2,
        hidden=64,
        heads=4,
        batch=100,
        sequence=64,
        vocabulary=1000,
    ),
    example(pk.draw_tables, n=3, seed=1, correlation=0.5, itemsize=4),
    example(distributions.Uniform, rows=1000),
    example(distributions.Zipf, rows=1000, exponent=1.125, shift=0.5, heavy_hitters=(0.25, 0.125)),
    example(distributions.ReuseHistogram, counts=(2.0,) * 17, lookups=2048.0, rows=1000),
    example(pk.Strategy, tp=2, pp=2, dp=8, zero=1, shards=2, micro_batch=4, first_layers=1),
    example(pk.Placement, kind="column_wise", ranks=(0, 1), columns=(32, 32)),
    example(pk.Plan, ranks=2, owners=(0, 1)),
    example(pk.Plan.round_robin, tables=5, ranks=2),
    example(pk.Plan.from_owners, owners=(0, 1), ranks=2),
    example(pk.Estimate, time=0.5, spread=0.125, terms={"a": 0.5}, formula="a", warnings=()),
    example(H100.gemm, m=100, n=120, k=64, batch=2),
    example(H100.lookup, tables=TABLES, batch=100),
    example(H100.collective, operation="all_reduce", nbytes=1000, ranks=8),
    example(H100.collective_time, operation="all_reduce", nbytes=1000, ranks=8),
    example(H100.device.bandwidth, working_set=1000),
    example(ZEN.kernel_time, kind="elementwise.mul", features={"nbytes": 1000}),
    example(ZEN.share_caches, ranks=2),
    example(H100.with_nodes, nodes=2),
    example(H100.with_scale, memory=2),
    example(H100.with_host, scale=2),
    example(H100.with_link, name="intra", bandwidth=2.0**30, latency=2.0**-17),
    example(pk.predict, workload=SMALL, platform=H100, ranks=2, slowdown={0: 2.0}, loading=0.5),
    example(pk.explore, model=GPT, platform=H100, ranks=8),
    example(pk.compare, a=H100, b=ZEN, workload=SMALL, ranks=1),
    example(pk.shard, workload=TABLE_SET, platform=H100, ranks=2, seed=1, steps=20),
    example(pk.price_plan, workload=TABLE_SET, platform=H100, plan=PLAN),
    example(pk.scaling, workload=SMALL, platform=H100, ranks=(1, 2)),
    example(pk.sweep, workload=SMALL, grid={"batch": [64, 128]}, platform=H100, progress=False),
    example(plots.ask_alpha_beta, alpha=2.0**-17, beta=2.0**-14),
    example(plots.ask_roofline, peak=1024, bandwidth=512),
    example(plots.ask_unique_rows, rows=1000, lookups=500),
)

# Kind 1: the same number in another type.

KINDS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.float16, np.float32, np.longdouble)


def leaves(value: Any) -> list[Any]:
    """Numbers of an argument: of a sequence or mapping its entries."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a sequence or mapping of numbers."""
    known = leaves(value)
    return bool(known) and all(
        isinstance(part, int | float) and not isinstance(part, bool) for part in known
    )


def retype(value: Any, kind: type) -> Any:
    """The same numbers in a type of NumPy."""
    if isinstance(value, Mapping):
        return {key: kind(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(kind(part) for part in value)
    return value.astype(kind) if isinstance(value, np.ndarray) else kind(value)


def holds(value: Any, kind: type) -> bool:
    """Whether a type of NumPy holds the numbers exactly."""
    with np.errstate(all="ignore"):
        try:
            return all(float(kind(part)) == part for part in leaves(value))
        except OverflowError:
            return False


def flatten(result: Any) -> list[Any]:
    """Numbers and texts of a result, to compare two."""
    for name in ("time", "table"):
        part = getattr(result, name, None)
        if part is not None and not isinstance(result, pl.DataFrame):
            result = part() if callable(part) else part
    if isinstance(result, pl.DataFrame):
        return list(itertools.chain.from_iterable(result.rows()))
    if isinstance(result, pl.Series | np.ndarray):
        return list(np.asarray(result).ravel())
    if isinstance(result, tuple | list):
        parts = []
        for entry in result:
            parts += flatten(entry)
        return parts
    if isinstance(result, int | float | str | np.generic):
        return [result]
    return [repr(result)]


RECORDS = (pk.EmbeddingTable, pk.Strategy, pk.Plan, pk.Placement)


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same, to rounding."""
    if isinstance(one, RECORDS):
        return bool(one == other)
    first, second = flatten(one), flatten(other)
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, int | float | np.number) and isinstance(b, int | float | np.number):
            if not np.isclose(float(a), float(b), rtol=1e-6, equal_nan=True):
                return False
        elif a != b:
            return False
    return True


def number_of_numpy(rng: Rng, folder: Path) -> None:
    """A call with some numbers in types of NumPy, which must give what Python's numbers give."""
    call = choose(rng, FORMS if rng.random() < 0.7 else SIZED)
    numeric = [name for name, value in call.arguments.items() if is_number(value)]
    if not numeric:
        return
    names = [choose(rng, numeric)] if rng.random() < 0.7 else numeric
    changes = {}
    for name in names:
        kind = choose(rng, [kind for kind in KINDS if holds(call.arguments[name], kind)])
        changes[name] = retype(call.arguments[name], kind)
    expected, found = call(), call(**changes)
    if not same(expected, found):
        raise Nonsense(f"{found!r:.100} for {changes!r:.150}, {expected!r:.100} for Python's")


def array_of_numpy(rng: Rng, folder: Path) -> None:
    """A closed form of an array of a small type, which must give what it gives for its numbers."""
    call = choose(rng, FORMS)
    scalar = [
        name
        for name, value in call.arguments.items()
        if isinstance(value, int | float) and name not in ("stage", "stages", "micro_batches")
    ]
    if not scalar:
        return
    name = choose(rng, scalar)
    kind = choose(rng, [kind for kind in KINDS if holds(call.arguments[name], kind)])
    array = np.array([call.arguments[name]] * 2, dtype=kind)
    expected, found = call(**{name: array.astype(float)}), call(**{name: array})
    if not same(expected, found):
        raise Nonsense(f"{found!r:.100} for {name} of {array!r:.100}, {expected!r:.100} of float64")


NO_NUMBERS = (
    np.timedelta64(3, "s"),
    np.datetime64("2020-01-01"),
    np.complex128(5 + 3j),
    np.ma.masked,
    np.ma.array([1, 2], mask=[True, False]),
    np.array([]),
    np.array(["1"]),
    np.array([1j]),
    np.array([None]),
    np.array([np.timedelta64(3, "s")]),
    np.array([[1, 2], [3, 4]]),
    np.void(b"\1"),
    np.str_("3"),
    decimal.Decimal("NaN"),
    decimal.Decimal("sNaN"),
    decimal.Decimal("1e999999"),
    decimal.Decimal("2.5"),
    fractions.Fraction(10**400),
    fractions.Fraction(1, 3),
    datetime.timedelta(seconds=3),
    5j,
)


def no_number(rng: Rng, folder: Path) -> None:
    """A call with something that only looks like a number."""
    call = choose(rng, SIZED if rng.random() < 0.7 else FORMS)
    numeric = [name for name, value in call.arguments.items() if is_number(value)]
    odd = choose(rng, (*NO_NUMBERS, *NUMBERS))
    if not numeric:
        return
    call(**{choose(rng, numeric): odd})
    is_time = isinstance(odd, np.ndarray | np.generic) and odd.dtype.kind in "mM"
    if np.ma.is_masked(odd) or is_time or np.iscomplexobj(odd):
        raise Nonsense(f"takes {odd!r} for a number")


# Kind 2: objects of other types.


class Own:
    """An object without anything."""


OBJECTS: tuple[Any, ...] = (
    None,
    5,
    -1,
    2.5,
    float("nan"),
    "x",
    "",
    b"x",
    True,
    (),
    [],
    {},
    set(),
    {1, 2},
    [None],
    {"a": 1},
    {1: "a"},
    object(),
    Own,
    Own(),
    len,
    lambda: 0,
    range(3),
    iter([1]),
    np.arange(3),
    np.int8(3),
    Path("x"),
    slice(None),
    pl.DataFrame({"a": [1]}),
    pl.Series([1, 2]),
    pl.col("a"),
    SMALL,
    GPT,
    TABLES[0],
    TABLE_SET,
    PLAN,
    H100,
    pk.Strategy(tp=2),
    pk.Estimate(1.0, 0.1, {"a": 1.0}, "a"),
    UNIFORM,
    TEXTS[9],
    datetime.date(2020, 1, 1),
    5j,
)
STACK = pk.Strategy.stack([pk.Strategy(tp=2), pk.Strategy(dp=8)])
COSTS = [{"rank": 0, "kind": "a", "seconds": 1.0, "memory_bytes": 1e9}]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    RESULT = pk.predict(SMALL, H100, ranks=2)
#: Public methods and functions that take objects.
TAKERS: tuple[Example, ...] = (
    *SIZED,
    example(pk.Placement("row_wise", (0, 1)).cut, table=TABLES[0], number=0),
    example(PLAN.cut, tables=TABLES),
    example(PLAN.tables_of, rank=0),
    example(
        PLAN.to_torchrec, tables=TABLES, module="a", ranks_per_node=2, device="cuda", pooled=True
    ),
    example(PLAN.to_torchrec_constraints, tables=TABLES, pooled=True),
    example(
        pk.Plan.from_torchrec, plan=PLAN.to_torchrec(TABLES, module="m"), tables=TABLES, ranks=2
    ),
    example(pk.Plan.from_json, text=PLAN.to_json(), origin="plan"),
    example(pk.Strategy.stack, strategies=[pk.Strategy(tp=2), pk.Strategy(dp=8)]),
    example(STACK.select, index=[0]),
    example(pk.TableSet, tables=TABLES, batch=64, embedding="fused", sparse=True, name="a"),
    example(pk.Platform.from_toml, text="format = 1", origin="a"),
    by_place(pk.load_platform, "zen5-2"),
    example(pk.read_tables, source="mlperf-dlrm-dcnv2"),
    by_place(pk.read_trace, "a.json"),
    example(pk.calibrate, measurements="a.json", progress=False),
    example(pk.tune, model=GPT, platform=H100, runs=[{"seconds": 1.0}]),
    example(pk.solve_for, unknown="batch", workload=SMALL, platform=H100, ranks=1),
    example(pk.allocate, jobs={"a": SMALL}, platform=H100, ranks=2),
    example(H100.with_datasheet, other="a100-sxm-8"),
    example(distributions.Part, law=UNIFORM, rows=10),
    example(UNIFORM.resize, rows=10),
    example(UNIFORM.buckets, n=10),
    example(RESULT.interval, level=0.5),
    example(RESULT.timeline, level="operation", depth=1),
    example(RESULT.modules, depth=1, rank=0),
    example(RESULT.chart, kind="breakdown"),
    example(pk.Estimate(1.0, 0.1, {"a": 1.0}, "a").interval, level=0.5),
    example(plots.plan_bars, frame=COSTS, time=1.0, capacity=1e9),
    example(plots.breakdown_bars, frame=RESULT.breakdown(), title="a", about="b"),
    example(plots.timeline_lanes, frame=RESULT.timeline(), about="a"),
    example(plots.module_bars, frame=RESULT.modules(), about="a"),
    example(
        plots.memory_areas, frame=RESULT.memory_over_time(), capacity=8e9, reserve=1e9, about="a"
    ),
    example(
        plots.measured_against_links,
        rows=[
            {
                "run": "a",
                "size_bytes": 8.0,
                "measured_s": 1.0,
                "busbw_bytes_per_s": 1.0,
                "verdict": "slow",
                "expected_s": 1.0,
                "low_s": 0.5,
                "high_s": 2.0,
                "link_share": 0.5,
            }
        ],
    ),
    example(
        plots.gain_bars,
        frame=[{"what": "a", "gain_s": 1.0, "low_s": 0.5, "high_s": 2.0}],
        time=3.0,
    ),
    example(plots.pick_strips, frame=[{"family": "a", "time_s": 1.0, "pick": "prediction"}]),
    example(
        plots.strategy_front,
        frame=[
            {
                "needs_bytes": 1.0e9,
                "time_s": 1.0,
                "low_s": 0.5,
                "high_s": 2.0,
                "ranks": 8,
                "label": "fsdp",
                "strategy": "a strategy",
                "is_yours": False,
            }
        ],
    ),
    example(plots.sweep_lines, frame=[{"x": 1, "time": 1.0}], x="x", y="time"),
    example(
        plots.residuals_by_time,
        runs=[{"family": "a", "name": "b", "predicted_s": 1.0, "measured_s": 1.0, "low_s": 0.5}],
    ),
    example(
        plots.predicted_vs_measured,
        runs=[
            {
                "family": "a",
                "name": "b",
                "predicted_s": 1.0,
                "low_s": 0.5,
                "high_s": 2.0,
                "measured_s": 1.0,
            }
        ],
    ),
    example(fitting.fit_pipelined, nbytes=[1e3, 1e4, 1e5, 1e6], seconds=[1e-5, 1e-5, 2e-5, 1e-4]),
    example(fitting.fit_collective, nbytes=[1e3, 1e4, 1e5, 1e6], seconds=[1e-5, 1e-5, 2e-5, 1e-4]),
    example(
        fitting.fit_over_ranks,
        operation="all_reduce",
        ranks=[2, 2, 4, 4],
        nbytes=[1e3, 1e6, 1e3, 1e6],
        seconds=[1e-5, 1e-4, 2e-5, 2e-4],
    ),
    example(
        fitting.fit_additive,
        terms={"launch": np.ones(4), "nbytes": np.arange(4.0)},
        seconds=np.array([1.0, 2.0, 3.0, 4.0]),
    ),
    example(
        fitting.fit_roofline,
        flops=[1e9, 1e10, 1e11, 1e12],
        nbytes=[1e6, 1e7, 1e8, 1e9],
        seconds=[1e-5, 1e-4, 1e-3, 1e-2],
        peak=1e14,
        bandwidth=1e12,
        prior={"launch": 1e-5, "sharpness": 2.0},
    ),
    example(
        fitting.find_levels,
        working_set=np.array([1e3, 1e4, 1e5, 1e6]),
        moved=np.array([1e6] * 4),
        seconds=np.array([1e-6, 1e-6, 2e-6, 3e-6]),
    ),
    example(
        fitting.fit_context,
        hot=np.array([1.0, 2.0, 3.0]),
        cold=np.array([0.1, 0.2, 0.3]),
        page_walks=np.zeros(3),
        measured=np.array([1.1, 2.1, 3.1]),
    ),
)


def other_type(rng: Rng, folder: Path) -> Any:
    """A call with one object of another type."""
    call = choose(rng, TAKERS if rng.random() < 0.8 else FORMS)
    name = choose(rng, [*call.arguments])
    odd = choose(rng, OBJECTS)
    if name == "measurements" and odd is None:  # it would measure
        return None
    found = call(**{name: odd})
    return found if any(call is taker for taker in TAKERS) else None


# Kinds 3 and 4: long words, and small files with much in them.

LONG: tuple[Any, ...] = (
    range(10**7),
    "x" * 10**6,
    "\u202e" + "a" * 300,
    [0] * 10**5,
    (0.5,) * 10**5,
    np.arange(10**5),
    {f"key {i}": i for i in range(10**4)},
    Path("\u202egnp.json"),
    Path("y" * 200),
)


def long_words(rng: Rng, folder: Path) -> None:
    """A call with a long argument, which a short line refuses in a short time."""
    call = choose(rng, TAKERS)
    begun = time.process_time()
    try:
        call(**{choose(rng, [*call.arguments]): choose(rng, LONG)})
    except (ValueError, OSError) as error:
        if len(str(error)) > 1000:
            raise Nonsense(f"{len(str(error))} characters: {str(error)[:100]}") from error
        raise
    finally:
        if time.process_time() - begun > 5:
            raise Nonsense("takes longer than 5 s")


def repeat(rng: Rng, *parts: str) -> str:
    """One of the parts many times."""
    return choose(rng, parts) * int(10 ** rng.uniform(4, 6.7))


def crowded(rng: Rng, folder: Path) -> None:
    """A file with many values, keys, rows or brackets, read in a short time and little memory."""
    begun = time.process_time()
    try:
        if rng.random() < 0.3:
            many = repeat(rng, "a.", '"a b".', "'a' . ", "a=1\n", "[[a]]\n", "x=[],[],")[:2_000_000]
            (folder / "a.toml").write_text(choose(rng, ("", "[", "x = {")) + many + "a = 1")
            pk.load_platform("./a.toml")
        elif rng.random() < 0.5:
            many = repeat(rng, "10,4\n", "a,", '"', "\n", ",", "10,4,")[:30_000_000]
            (folder / "a.csv").write_text(choose(rng, ("rows,dim\n", "")) + many)
            pk.read_tables("a.csv")
        else:
            many = repeat(rng, "[],", "{},", "0,", '{"rows":9,"dim":4},', "[", '{"a":', '"",')
            name = choose(rng, ("a.json", "t.json"))
            begin = choose(rng, ("[", '{"tables":[', '{"traceEvents":[', '{"schema":"1","nodes":['))
            (folder / name).write_text(begin + many[:30_000_000] + "0]}")
            pk.read_tables(name) if name == "a.json" else pk.read_trace(name)
    finally:
        if time.process_time() - begun > 3:
            raise Nonsense("takes longer than 3 s")


ENTRIES: dict[str, Entry] = {
    "long-words": Entry(long_words, 0.3, new=True),
    "crowded-files": Entry(crowded, 0.02, new=True),
    "numpy-numbers": Entry(number_of_numpy, 0.5, new=True),
    "numpy-arrays": Entry(array_of_numpy, 0.5, new=True),
    "no-numbers": Entry(no_number, 0.5, new=True),
    "other-types": Entry(other_type, 1.0, new=True),
}
