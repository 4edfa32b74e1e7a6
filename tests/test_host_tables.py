"""Tables whose rows lie in host memory: times over the link, memory, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pytest

import perfkit as pk
from benchmarks import host_tables as benchmark
from perfkit.__main__ import main
from perfkit.models import host_tables
from perfkit.models.caches import lru_hit_rate
from perfkit.models.distributions import ReuseHistogram, Uniform, unique_rows
from perfkit.models.host_tables import (
    BOTH_WAYS,
    CACHE_LOOKUP,
    CACHE_START,
    CACHE_UPDATE_START,
    UVM_UPDATE_START,
)
from perfkit.platform.host_memory import find_host_memory
from perfkit.prediction.host_tables import find_link_bandwidth, time_host_tables
from perfkit.workloads.placement import Placement

ROWS, BATCH = 1_000_000, 100_000
LINK = 55.2e9  # H100, the slower way [B/s]


def make(**settings: Any) -> pk.DLRM:
    """A small model with one table of 128 fp32 columns."""
    given = {"rows": [ROWS], "dim": 128, "pooling": 1, "bottom": [16], "top": [16], "batch": BATCH}
    return pk.DLRM(**{**given, "embedding": "exact", **settings})


def sum_kernels(prediction: pk.Prediction) -> float:
    """Time of all kernels [s]."""
    return sum(part.time for part in prediction.causes.kernels)


@pytest.fixture(scope="module")
def on_device() -> pk.Prediction:
    return pk.predict(make(optimizer="adam"), "h100-sxm-8")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_in_host_memory_cross_the_link(on_device: pk.Prediction) -> None:
    """By hand: uniform lookups share next to no row on its way. Distinct rows with two states for
    each weight go both ways."""
    prediction = pk.predict(make(optimizer="adam", kernel="uvm"), "h100-sxm-8")
    distinct = float(unique_rows(Uniform(ROWS), BATCH))
    lookups = BATCH * 512 / LINK
    updates = BOTH_WAYS * 3 * distinct * 512 / LINK
    added = sum_kernels(prediction) - sum_kernels(on_device)
    assert added == pytest.approx(lookups + updates + UVM_UPDATE_START, rel=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_cache_saves_the_link_what_it_holds(on_device: pk.Prediction) -> None:
    """By hand: 0.2 of uniform lookups hit. States for each weight stay in host memory."""
    cached = pk.predict(make(optimizer="adam", kernel="uvm_caching"), "h100-sxm-8")
    distinct = float(unique_rows(Uniform(ROWS), BATCH))
    lookups = CACHE_LOOKUP * BATCH + BOTH_WAYS * 0.8 * BATCH * 512 / LINK
    updates = BOTH_WAYS * 2 * distinct * 512 / LINK
    added = sum_kernels(cached) - sum_kernels(on_device)
    starts = CACHE_START + CACHE_UPDATE_START
    assert added == pytest.approx(lookups + updates + starts, rel=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kernel", ["uvm", "uvm_caching"])
def test_gradients_of_weights_read_rows_over_the_link_once_more(kernel: str) -> None:
    """The lookups take what they take without weights. Gradients of weights read each row again,
    from the cache if there is one."""
    rows = {}
    for of_table in ("fused", kernel):
        for weighted in (False, True):
            timeline = pk.predict(make(kernel=of_table, weighted=weighted), "h100-sxm-8").timeline()
            kernels = timeline.filter(polars.col("kind") == "embedding_forward")
            rows[of_table, weighted] = (kernels["end_s"] - kernels["start_s"]).to_list()
    [without_weights] = rows[kernel, False]
    lookup, gradient = rows[kernel, True]
    assert lookup == pytest.approx(without_weights, rel=0.01)
    over_link = BATCH * 512 / LINK if kernel == "uvm" else 0.0
    assert gradient - rows["fused", True][1] == pytest.approx(over_link, rel=1e-3, abs=1e-9)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_popular_rows_stay_in_the_cache() -> None:
    """The hit rate is that of an LRU cache of 0.2 of the rows."""
    platform = pk.load_platform("h100-sxm-8")
    table = pk.EmbeddingTable(ROWS, 128, 1.0, 1.05, kernel="uvm_caching")
    times = time_host_tables([table], [BATCH], platform, ranks=1, optimizer="sgd", sorts=True)
    missed = 1 - lru_hit_rate(table.distribution, 0.2 * ROWS)
    assert 0.05 < missed < 0.15
    expected = CACHE_LOOKUP * BATCH + BOTH_WAYS * missed * BATCH * 512 / LINK
    assert times.forward[0] == pytest.approx(expected, rel=1e-6)
    assert times.backward[0] == 0


def test_ranks_of_a_switch_share_its_link() -> None:
    """Two A100s have a PCIe switch; eight H100s of 55 GB/s need less than their host has."""
    a100 = pk.load_platform("a100-sxm-8")
    link = find_host_memory(a100).from_host.value
    assert find_link_bandwidth(a100, 1) == link
    assert find_link_bandwidth(a100, 8) == link / 2
    assert find_link_bandwidth(pk.load_platform("h100-sxm-8"), 8) == LINK
    slow_host = pk.load_platform("h100-sxm-8").with_host_memory(bandwidth=80e9)
    assert find_link_bandwidth(slow_host, 8) == 10e9


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_counts_what_lies_on_the_device_and_says_what_lies_on_the_host(
    on_device: pk.Prediction,
) -> None:
    """A table of 512 MB and two states of as much; a state for each weight lies beside all rows."""
    whole = on_device.memory()
    assert whole.host_capacity is None
    weights = ROWS * 512
    uvm = pk.predict(make(optimizer="adam", kernel="uvm"), "h100-sxm-8").memory()
    assert whole.total - uvm.total == pytest.approx(3 * weights)
    assert uvm.on_host == 3 * weights
    assert "on the host" in repr(uvm)
    cached = make(optimizer="adam", kernel="uvm_caching", load_factor=0.5)
    memory = pk.predict(cached, "h100-sxm-8").memory()
    assert whole.total - memory.total == pytest.approx(2.5 * weights)
    assert memory.on_host == 3 * weights


@pytest.mark.parametrize(
    ("settings", "platform", "message"),
    [
        ({"kernel": "uvm"}, "zen5-2", "is a CPU, whose tables all lie in host memory"),
        ({"kernel": "key_value"}, "h100-sxm-8", "no published time of lookups from an SSD"),
        ({"kernel": "uvm", "embedding": "separate"}, "h100-sxm-8", "PyTorch's own bags"),
        ({"kernel": "uvm", "embedding": "hash"}, "h100-sxm-8", "embedding 'hash'; hash tables are"),
        ({"kernel": "uvm"}, "mi300x-8", "does not know the memory of its host"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_without_a_price_are_refused(
    settings: dict[str, Any], platform: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pk.predict(make(**settings), platform)
    if settings.get("embedding") == "hash":  # a set of tables knows no hash tables
        with pytest.raises(ValueError, match=message):
            pk.shard(make(**settings), platform, ranks=1, steps=1)
        return
    fused = "separate" if settings.get("embedding") == "separate" else "fused"
    tables = make(**settings).tables
    with pytest.raises(ValueError, match=message):
        pk.shard(pk.TableSet(tables, embedding=fused, batch=64), platform, ranks=1, steps=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_copies_of_tables_in_host_memory_are_refused() -> None:
    model = make(kernel="uvm", batch=1024)
    plan = pk.Plan(2, (Placement("data_parallel", (0, 1)),))
    with pytest.raises(ValueError, match="averaged in device memory"):
        pk.predict(model, "h100-sxm-8", ranks=2, plan=plan)
    with pytest.raises(ValueError, match="averaged in device memory"):
        pk.price_plan(model, "h100-sxm-8", plan)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kernel", ["uvm", "uvm_caching"])
@pytest.mark.parametrize("weighted", [False, True])
def test_plans_cost_what_predictions_say(kernel: str, weighted: bool) -> None:
    """Two tables beyond device memory beside one in it, on two ranks."""
    model = make(
        rows=[ROWS, 1000, ROWS],
        kernel=[kernel, "fused", kernel],
        pooling=10,
        optimizer="adagrad",
        weighted=weighted,
    )
    plan = pk.Plan.round_robin(3, ranks=2)
    price = pk.price_plan(model, "h100-sxm-8", plan)
    prediction = pk.predict(model, "h100-sxm-8", ranks=2, plan=plan)
    assert price.time == pytest.approx(prediction.time, rel=0.02)
    fused = pk.price_plan(
        make(rows=[ROWS, 1000, ROWS], pooling=10, optimizer="adagrad"), "h100-sxm-8", plan
    )
    assert price.time > 1.5 * fused.time


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_in_host_memory_fit_where_others_do_not() -> None:
    """Five tables of 20 GB on one rank of 80 GB: a fifth of each lies there; the error says so."""
    tables = [pk.EmbeddingTable(40_000_000, 128, name=f"t{number}") for number in range(5)]
    given: dict[str, Any] = {"batch": 1024, "embedding": "fused"}
    with pytest.raises(ValueError, match="host memory: kernel='uvm_caching'"):
        pk.shard(pk.TableSet(tables, **given), "h100-sxm-8", ranks=1, steps=1)
    cached = [
        pk.EmbeddingTable(40_000_000, 128, name=table.name, kernel="uvm_caching")
        for table in tables
    ]
    result = pk.shard(pk.TableSet(cached, **given), "h100-sxm-8", ranks=1, steps=1)
    [weights] = result.prediction.table()["weights_bytes"]
    assert weights == pytest.approx(0.2 * 5 * 40_000_000 * 512)


def test_published_times_are_within_their_bar(shared_data: Path) -> None:
    """The mean error of each placement is at most 30 % on the half that was not fitted, and the
    constants are those that the other half asks for."""
    cases = benchmark.judge_cases()
    for figures in benchmark.summarize(cases):
        assert figures["mean"] < 30, figures
    fitted = [row["case"] for row in cases if row["case"].is_fitted]
    for name, value in benchmark.fit_fbgemm(fitted).items():
        assert value == pytest.approx(getattr(host_tables, name), rel=0.3), name


GIVEN: dict[str, Any] = {"batch": 1024, "embedding": "fused"}


def test_a_search_puts_tables_into_host_memory_only_as_far_as_needed() -> None:
    """Three tables of 41 GB on a rank of 80 GB: a cache of one of them frees 33 GB, which leaves
    49 + 41 GB, so two must go; those with fewer lookups go first."""
    tables = [
        pk.EmbeddingTable(80_000_000, 128, pooling, name=f"t{pooling}") for pooling in (30, 1, 2)
    ]
    given: dict[str, Any] = {"ranks": 1, "steps": 1, "kernels": ("fused", "uvm_caching")}
    result = pk.shard(pk.TableSet(tables, **GIVEN), "h100-sxm-8", **given)
    assert result.kernels == {"t30": "fused", "t1": "uvm_caching", "t2": "uvm_caching"}
    assert result.warnings[0].startswith("device memory is too small: 2 of 3 tables")
    assert result.prediction.fits
    few = pk.shard(pk.TableSet(tables[:1], **GIVEN), "h100-sxm-8", **given)
    assert few.kernels == {"t30": "fused"}
    assert few.warnings == ()


def test_more_kernels_never_give_a_slower_plan() -> None:
    """A cache is faster for the table with few lookups, but leaves a fifth of its rows in device
    memory: a second table would have to leave, with forty times the lookups."""
    tables = [pk.EmbeddingTable(400_000_000, 128, pooling) for pooling in (1, 40, 40, 40)]
    workload = pk.TableSet(tables, batch=32_768, embedding="fused")
    times = {}
    for kernels in (("fused", "uvm"), ("fused", "uvm_caching"), ("fused", "uvm_caching", "uvm")):
        result = pk.shard(workload, "h100-sxm-8", ranks=8, steps=20, kernels=kernels)
        times[kernels] = result.prediction.time
        assert "exists within these limits and with these kernels of tables" in result.headline()
    of_uvm, of_cache, of_both = times.values()
    assert of_both == of_uvm < of_cache / 2


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (("uvm_caching",), "without 'fused'"),
        (("fused", "key_value"), "no published time of lookups from an SSD"),
        (("fused", "hbm"), "kernels is 'hbm'; known are"),
        ("fused", "it must be a sequence"),
    ],
)
def test_kernels_of_a_search_are_checked(kernels: Any, message: str) -> None:
    tables = pk.TableSet([pk.EmbeddingTable(1000, 128)], **GIVEN)
    with pytest.raises(ValueError, match=message):
        pk.shard(tables, "h100-sxm-8", ranks=1, steps=1, kernels=kernels)


def test_a_host_that_is_too_small_is_named() -> None:
    """A rank of eight has 250 GB of its host: 500 million rows of 512 B take 256 GB, and half of
    them 128 GB."""
    for rows, warned in ((500_000_000, 1), (250_000_000, 0)):
        table = pk.EmbeddingTable(rows, 128, kernel="uvm_caching", load_factor=0.1)
        price = pk.price_plan(
            pk.TableSet([table], **GIVEN), "h100-sxm-8", pk.Plan.round_robin(1, ranks=8)
        )
        assert len(price.warnings) == warned
        if warned:
            assert "256 GB of the 250 GB" in price.warnings[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_advice_names_host_memory_where_tables_do_not_fit() -> None:
    large = make(rows=[300_000_000])
    assert "kernel='uvm_caching'" in " ".join(pk.predict(large, "h100-sxm-8").warnings)
    cached = pk.predict(make(rows=[300_000_000], kernel="uvm_caching"), "h100-sxm-8")
    assert "uvm_caching" not in " ".join(cached.warnings)


def test_lookups_of_bags_refuse_host_memory() -> None:
    table = pk.EmbeddingTable(1000, 16, kernel="uvm")
    with pytest.raises(ValueError, match="EmbeddingBag reads device memory alone"):
        pk.load_platform("h100-sxm-8").lookup([table], batch=64)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_devices_than_the_measured_one_say_so() -> None:
    plan = pk.Plan.round_robin(1, ranks=1)
    for name, kernel, warned in (
        ("h100-sxm-8", "uvm", False),
        ("a100-sxm-8", "uvm", True),
        ("a100-sxm-8", "fused", False),
    ):
        told = " ".join(pk.predict(make(kernel=kernel), name).warnings)
        assert ("were measured on NVIDIA H100" in told) == warned
        price = pk.price_plan(make(kernel=kernel), name, plan)
        assert ("were measured on NVIDIA H100" in " ".join(price.warnings)) == warned


def test_the_command_line_puts_tables_into_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tmp_path / "tables.csv"
    tables.write_text("name,rows,dim,pooling\nfew,80000000,128,1\nmany,80000000,128,30\n")
    line = f"shard --tables {tables} --batch 1024 --embedding fused --platform h100-sxm-8 --ranks 1"
    words = [*line.split(), "--steps", "1", "--kernels"]
    assert main([*words, "fused, uvm_caching"]) == 0
    assert "1 of 2 tables lie in host memory (uvm_caching): few" in capsys.readouterr().out
    assert main([*words, "fused,hbm"]) == 2
    assert "kernels is 'hbm'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sweeps_price_host_memory_as_predictions_do() -> None:
    """Two tables of one size, of which one lies in host memory."""
    model = make(rows=[ROWS, ROWS], kernel=["fused", "uvm"])
    swept = pk.sweep(model, {"batch": [4096, 65536]}, "h100-sxm-8").table()["time_s"].to_list()
    for batch, time in zip((4096, 65536), swept, strict=True):
        one = make(rows=[ROWS, ROWS], kernel=["fused", "uvm"], batch=batch)
        assert time == pytest.approx(pk.predict(one, "h100-sxm-8").time)


def test_recorded_lookups_say_what_a_cache_serves() -> None:
    """Four rows are looked up 100 times each, and 400 once. A cache of 50 of 1000 rows serves the
    popular ones, which are half of the lookups, and 46 of 996 of the others. Uniform lookups miss 0.95."""
    counts = [0.0] * 17
    counts[0], counts[7] = 400.0, 4.0
    law = ReuseHistogram(tuple(counts), 800.0, 1000)
    recorded = pk.EmbeddingTable(1000, 128, law=law, kernel="uvm_caching", load_factor=0.05)
    uniform = replace(recorded, law=None)
    platform = pk.load_platform("h100-sxm-8")
    times = time_host_tables(
        [recorded, uniform], [800, 800], platform, ranks=1, optimizer="", sorts=True
    )
    missed = (times.forward - CACHE_LOOKUP * 800) * LINK / (BOTH_WAYS * 512 * 800)
    assert missed[1] == pytest.approx(0.95, abs=1e-3)
    assert missed[0] == pytest.approx(0.5 * 950 / 996, abs=0.01)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_account_of_an_operation_names_rows_in_host_memory() -> None:
    """Steps sum to the time in the timeline."""
    prediction = pk.predict(make(kernel="uvm"), "h100-sxm-8")
    rows = prediction.timeline().filter(polars.col("kind") == "embedding_forward").to_dicts()
    account = prediction.explain_operation(rows[0]["operation"])
    steps = {step.cause: step.added for step in account.steps}
    assert steps["rows in host memory: link and cache"] == pytest.approx(
        BATCH * 512 / LINK, rel=1e-3
    )
    assert sum(steps.values()) == pytest.approx(rows[0]["end_s"] - rows[0]["start_s"])
