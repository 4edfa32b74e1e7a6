"""Lookups know their indices on every GPU: the last cache serves rows that are looked up often."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.fitting import LookupRoofline
from perfkit.models.caches import lru_misses
from perfkit.models.distributions import Uniform, Zipf
from perfkit.models.embedding import size_lookup
from perfkit.platform.datasheets import read_datasheet
from perfkit.platform.kernel_times import find_mean_bandwidth
from perfkit.platform.lookup_kernels import BAG, HASH_BACKWARD, HASH_FORWARD
from perfkit.platform.single_kernels import time_tables
from perfkit.prediction.cost import price
from perfkit.workloads.tables import EmbeddingTable, TableSet

#: Platforms with an L2 that other devices, or this very one, were measured to have.
GPUS = ("h100-sxm-8", "a100-sxm-8", "v100-sxm-8", "b200-sxm-8")
#: Exponents of Zipf laws, from uniform on.
EXPONENTS = (0.0, 0.8, 1.2)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pk.ExtrapolationWarning)
        yield


def table(exponent: float) -> EmbeddingTable:
    """A table that no cache holds."""
    return EmbeddingTable(10_000_000, 128, pooling=100, exponent=exponent)


@pytest.mark.parametrize("name", GPUS)
def test_skew_shortens_lookups_that_are_asked_for(name: str) -> None:
    platform = pk.load_platform(name)
    times = [platform.lookup([table(exponent)], batch=2048).time for exponent in EXPONENTS]
    assert times[0] > 1.02 * times[1] and times[1] >= times[2]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("embedding", ["separate", "fused", "exact", "hash"])
def test_skew_shortens_iterations(name: str, embedding: str) -> None:
    times = []
    for exponent in EXPONENTS:
        model = pk.DLRM(
            batch=65536,
            rows=[10_000_000] * 2,
            dim=128,
            pooling=30,
            exponent=exponent,
            embedding=embedding,
        )
        times.append(pk.predict(model, name, ranks=1).time)
    assert times[0] > 1.01 * times[1] and times[1] >= times[2]


@pytest.mark.parametrize("name", GPUS)
def test_skew_shortens_the_lookups_that_searches_price(name: str) -> None:
    from perfkit.sharding.costs import Cost, Costs

    lookups, updates = [], []
    for exponent in EXPONENTS:
        tables = TableSet((table(exponent),), batch=65536, embedding="fused")
        costs = Costs(tables, pk.load_platform(name), ranks=8)
        shard = costs.shards(np.array([0]), "table_wise").shard[0]
        lookups.append(shard[Cost.LOOKUP])
        updates.append(shard[Cost.BACKWARD])
    for times in (lookups, updates):
        assert times[0] > 1.02 * times[1] and times[1] >= times[2]


def test_a_cache_has_bytes_in_a_clock_and_a_share_of_its_size() -> None:
    """132 multiprocessors of 128 lanes at 1.98 GHz compute 66.9 TFLOP/s."""
    cache = read_datasheet("h100-sxm").device.memory[0]
    assert cache.bandwidth is not None and cache.held is not None
    assert cache.bandwidth.value == pytest.approx(35.7 * 132 * 1.98e9, rel=1e-3)
    assert cache.bandwidth.kind == "assumed" and cache.held.value == 0.92
    assert cache.effective_capacity == pytest.approx(0.92 * 50 * 2**20)
    # measured on the card: 9,675 GB/s at half of its L2, 5,325 GB/s of the A100
    h200 = read_datasheet("h200-sxm").device
    assert h200.cache_bandwidth == pytest.approx(9.675e12, rel=0.01)
    a100 = read_datasheet("a100-sxm").device
    assert a100.cache_bandwidth == pytest.approx(5.325e12, rel=0.01)


def test_rows_from_memory_pass_through_the_cache_too() -> None:
    """1 GB/s of memory and 4 GB/s of the cache: 1 s for the memory, or for all that passes."""
    from_memory = np.array([1e9, 1e9, 0.0])
    from_cache = np.array([0.0, 7e9, 4e9])
    found = find_mean_bandwidth(1e9, 4e9, from_memory, from_cache)
    assert found == pytest.approx([1e9, 4e9, 4e9])


def test_times_of_tables_by_hand() -> None:
    """Of a skewed table, what the cache misses comes from memory: 0.83 of the 40 MiB of an A100."""
    platform = pk.load_platform("a100-sxm-8")
    skewed = EmbeddingTable(1_000_000, 128, pooling=100, exponent=0.8)
    times = time_tables(platform, [skewed], batch=2048)
    lookups = 204_800.0
    misses = lru_misses([Zipf(1_000_000, 0.8)], [lookups], [512], capacity=0.83 * 40 * 2**20)[0]
    assert times.l2_hits[0] == pytest.approx(1 - misses, rel=1e-9)
    operands = 8 * lookups + 8 * 2048 + 2048 * 512
    rows = 512 * lookups
    memory = operands + misses * rows
    seconds = max(memory / 2.039e12, (operands + rows) / (35 * 19.5e12 / 128))
    share = platform.kernels["embedding_forward"]["memory_efficiency"]
    assert times.seconds[0] == pytest.approx(seconds / share, rel=1e-6)
    assert times.launch == platform.kernels["embedding_forward"]["launch"]


def test_transformers_do_not_see_the_rate_of_the_cache() -> None:
    h100 = pk.load_platform("h100-sxm-8")
    levels = (replace(h100.device.memory[0], bandwidth=None), h100.device.memory[1])
    untimed = replace(h100, device=replace(h100.device, memory=levels))
    model = pk.Transformer.bert("bert-base", batch=8, sequence=128, dtype="fp32")
    assert pk.predict(model, h100, ranks=1).time == pk.predict(model, untimed, ranks=1).time


def test_the_bag_waits_for_rows_by_hand() -> None:
    """Rows of 100 numbers take four warps; 132 multiprocessors of an H100 share them."""
    h100 = pk.load_platform("h100-sxm-8")
    bag = h100.kernels["embedding_forward._embedding_bag"]
    assert isinstance(bag, LookupRoofline)
    sizes = {
        name: np.array([value])
        for name, value in {
            "lookups": 1e6,
            "rows": 0.0,
            "dim": 100.0,
            "hits": 0.5,
            "nbytes": 4e8,
            "bandwidth": 3.35e12,
        }.items()
    }
    waiting = 1e6 * 128 * 333e-12 / 132 * (1 - 0.17 * 0.5)
    assert float(bag.time(sizes)[0]) == pytest.approx(2.2e-6 + waiting, rel=1e-3)
    parts = bag.split(sizes)
    assert sum(part.sum() for part in parts.values()) == pytest.approx(bag.time(sizes)[0])
    # a number of 2 B takes as long as one of 4 B
    half = bag.time({**sizes, "nbytes": sizes["nbytes"] / 2})
    assert half == pytest.approx(bag.time(sizes), rel=1e-3)


def test_multiprocessors_not_bandwidth_limit_the_bag() -> None:
    """The H200 has the multiprocessors of the H100 and 1.43 of its bandwidth, the B200 148 of them."""
    uniform = EmbeddingTable(100_000_000, 128, pooling=100)
    times = {}
    for name in ("h100-sxm-8", "h200-sxm-8", "b200-sxm-8"):
        found = time_tables(pk.load_platform(name), [uniform], batch=8192, variant="_embedding_bag")
        times[name] = found.seconds[0]
    assert times["h200-sxm-8"] == pytest.approx(times["h100-sxm-8"], rel=1e-3)
    assert times["b200-sxm-8"] == pytest.approx(times["h100-sxm-8"] * 132 / 148, rel=1e-3)


def test_hash_tables_search_before_they_read_by_hand() -> None:
    """What the search of a million rows adds, on 108 multiprocessors of an A100."""
    a100 = pk.load_platform("a100-sxm-8")
    tables = [EmbeddingTable(100_000_000, 128)]
    searched = time_tables(a100, tables, batch=1_000_000, variant="hash")
    read = time_tables(a100, tables, batch=1_000_000, variant="fused")
    search = 1e6 * 63.5e-9 / 108
    assert searched.seconds[0] == pytest.approx(read.seconds[0] + search, rel=1e-6)
    assert searched.launch == 179e-6


def test_hash_tables_are_refused_where_nobody_knows_them() -> None:
    model = pk.DLRM(batch=1024, embedding="hash")
    for name in ("zen5-2", "p100-1", "mi300x"):
        with pytest.raises(ValueError, match=r"no kernel of hash tables; take embedding='exact'"):
            pk.predict(model, name, ranks=1)
    assert pk.predict(model, "l40s", ranks=1).time > 0


def test_one_kernel_of_a_hash_table_starts_once() -> None:
    """Further tables add no start."""
    sizes: dict[str, Any] = {"batch": 1024, "dim": 64, "pooling": 1, "embedding": "hash"}
    h100 = pk.load_platform("h100-sxm-8")
    costs = []
    for rows in ([10**6], [10**6] * 3):
        (graph,) = pk.DLRM(rows=rows, **sizes).graphs(1, accelerator=True)
        (priced,) = price([graph], h100)
        of_tables = [label.kind.startswith("embedding") for label in graph.labels]
        costs.append(float(priced.seconds[of_tables].sum()))
    assert costs[1] - costs[0] < 0.01 * costs[0]


def test_weights_of_lookups_leave_rows_of_hash_tables_in_the_cache() -> None:
    """Weights of 4 B a lookup are all that a search with weights reads more, at the same rate."""
    h100 = pk.load_platform("h100-sxm-8")
    given: dict[str, Any] = {"rows": [10**7], "pooling": 30, "exponent": 1.2, "embedding": "hash"}
    times = []
    for weighted in (False, True):
        (graph,) = pk.DLRM(batch=65536, weighted=weighted, **given).graphs(1, accelerator=True)
        (priced,) = price([graph], h100)
        [search] = [
            n
            for n, label in enumerate(graph.labels)
            if label.variant == "hash" and label.phase == "forward"
        ]
        times.append(float(priced.seconds[search]))
    share = h100.kernels["embedding_forward"]["memory_efficiency"]
    assert 0 < times[1] - times[0] <= 1.01 * 4 * 30 * 65536 / (share * h100.device.main_bandwidth)


def test_tables_in_turn_have_the_cache_to_themselves() -> None:
    """Two tables of 2,000 rows that are looked up 500 times each: together they do not fit."""
    laws = [Uniform(2000)] * 2
    lookups, dim = [500.0, 500.0], [16, 16]
    given: dict[str, Any] = {"capacities": [64_000.0], "entries": np.inf, "granularity": 32.0}
    together = size_lookup(laws, lookups, dim, **given)
    in_turn = size_lookup(laws, lookups, dim, in_turn=True, **given)
    assert together.misses[0, 0] == pytest.approx(0.75)  # 1,000 of 4,000 rows
    distinct = 2000 * (1 - (1 - 1 / 2000) ** 500)
    assert in_turn.misses[0, 0] == pytest.approx(min(0.75, distinct / 500), rel=1e-3)
    # fewer rows: from an empty cache the rows of a table miss once
    few = size_lookup([Uniform(400)] * 4, [2000.0] * 4, [16] * 4, in_turn=True, **given)
    assert few.misses[0, 0] == pytest.approx(400 * (1 - (1 - 1 / 400) ** 2000) / 2000, rel=1e-3)


def test_published_times_of_device_memory(shared_data: Path) -> None:
    """Bars of each kernel, with what other sources or the other half give."""
    from benchmarks import lookups

    rows = lookups.judge_all()
    figures = {row["what"]: row for row in lookups.list_figures(rows)}
    assert figures["all"]["n"] == 45 and figures["all"]["mean"] <= 7.5
    assert figures["old bag"]["mean"] <= 9.0 and figures["new bag"]["mean"] <= 5.0
    assert figures["forward"]["mean"] <= 6.0 and figures["backward"]["mean"] <= 11.0
    assert all(row["cause"] for row in rows if abs(row.get("error", 0.0)) > 0.2)
    skewed = lookups.compare_skewed(lookups.read_cases())
    assert len(skewed) == 2 and all(abs(row["error"]) <= 0.15 for row in skewed)


def test_constants_are_what_published_times_give(shared_data: Path) -> None:
    from benchmarks import lookups

    cases = lookups.read_cases()
    logs = [c for c in cases if c.kernel == "old bag" and c.is_known and c.tables > 1]
    assert lookups.fit_bag(logs).hit == pytest.approx(BAG.hit, abs=0.01)
    newer = [c for c in cases if c.release.startswith("2025-09")]
    for mode, constants in (("training", HASH_FORWARD), ("backward", HASH_BACKWARD)):
        fitted = lookups.fit_hash([c for c in newer if c.mode == mode])
        assert fitted.launch == pytest.approx(constants.launch, rel=0.01)
        assert fitted.each == pytest.approx(constants.per_lookup, rel=0.01)
    both = {c.kernel: c.measured for c in cases if c.number in ("t219", "t220")}
    assert both["old bag"] / both["new bag"] == pytest.approx(1.53, abs=0.01)


def test_distinct_rows_of_the_bounded_power_law() -> None:
    """Of x^-1.05 on [1, 4), cut: chances of 1, 2 and 3 by hand."""
    from benchmarks.lookups import count_distinct

    whole = 1 - 4**-0.05
    chances = [(1 - 2**-0.05) / whole, (2**-0.05 - 3**-0.05) / whole, (3**-0.05 - 4**-0.05) / whole]
    assert sum(chances) == pytest.approx(1)
    expected = sum(1 - (1 - chance) ** 2 for chance in chances)
    assert count_distinct(4, 2.0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("embedding", ["separate", "hash"])
def test_kernels_that_wait_are_swept_as_each_alone(embedding: str) -> None:
    given: dict[str, Any] = {"rows": [10**6] * 2, "pooling": 10, "embedding": embedding}
    batches = [2048, 65536]
    swept = pk.sweep(
        lambda batch: pk.DLRM(batch=batch, **given),
        {"batch": batches},
        "h100-sxm-8",
        ranks=1,
        progress=False,
    ).table()
    for batch, time in zip(batches, swept["time_s"], strict=True):
        alone = pk.predict(pk.DLRM(batch=batch, **given), "h100-sxm-8", ranks=1)
        assert time == pytest.approx(alone.time, rel=1e-9)


def test_only_rows_of_tables_come_from_the_cache_of_a_gpu() -> None:
    """A kernel that is asked for with what lies beyond a cache takes its bytes from memory."""
    h100 = pk.load_platform("h100-sxm-8")
    sizes = {"flops": 0.0, "nbytes": 9e6, "rows": 500.0}
    far = h100.kernel_time("elementwise", sizes)
    assert h100.kernel_time("elementwise", {**sizes, "beyond_l3": 2e6}) == far
    near = h100.kernel_time("embedding_forward", {**sizes, "beyond_l3": 2e6})
    assert near < h100.kernel_time("embedding_forward", sizes)
