"""Lookups know their indices on every GPU: the last cache serves rows that are looked up often."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.caches import lru_misses
from perfkit.models.distributions import Zipf
from perfkit.platform.datasheets import read_datasheet
from perfkit.platform.kernel_times import find_mean_bandwidth
from perfkit.platform.single_kernels import time_tables
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
@pytest.mark.parametrize("embedding", ["separate", "fused", "exact"])
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
