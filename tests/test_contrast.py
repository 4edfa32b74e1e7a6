"""Two platforms side by side: every quantity of both, what only one has, and the iterations they
predict."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

import perfkit as pk
from perfkit.platform.estimates import ExtrapolationWarning
from perfkit.platform.machine import PlatformError
from perfkit.prediction import contrast

A100, H100 = pk.load_platform("a100-sxm-8"), pk.load_platform("h100-sxm-8")
BERT = pk.Transformer.bert("bert-base", batch=16, sequence=128, dtype="bf16")


pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")


def find(comparison: pk.PlatformComparison, quantity: str) -> dict[str, object]:
    (row,) = comparison.table().filter(pl.col("quantity").str.starts_with(quantity)).to_dicts()
    return row


def test_datasheets_kernels_and_collectives_stand_side_by_side() -> None:
    comparison = pk.compare(A100, "h100-sxm-8")
    table = comparison.table()
    assert table.columns[:6] == ["group", "quantity", "unit", "a", "b", "ratio"]
    assert set(table["group"]) == {"peak", "memory", "network", "gemm", "collective"}
    assert find(comparison, "bf16 peak")["ratio"] == pytest.approx(989.4 / 312, rel=1e-3)
    assert (
        find(comparison, "fp8 peak")["a"] is None and find(comparison, "fp8 peak")["ratio"] is None
    )
    assert find(comparison, "main memory bandwidth")["b"] == 3.35e12
    product = find(comparison, "GEMM 4096 x 4096 x 1024, bf16")
    estimate = H100.gemm(4096, 4096, 1024, dtype="bf16")
    assert (
        product["b"] == estimate.time
        and (product["b_low"], product["b_high"]) == estimate.interval()
    )
    message = find(comparison, "all_reduce of 4.19 MB, 8 ranks")
    assert message["a"] == A100.collective("all_reduce", 4 * 2**20, ranks=8).time
    assert pk.compare(H100, H100).table()["ratio"].drop_nulls().to_list() == pytest.approx(
        [1.0] * table.height
    )
    json.dumps(table.to_dicts())


def test_a_workload_is_predicted_on_both() -> None:
    comparison = pk.compare(A100, H100, BERT)
    row = find(comparison, "bert-base")
    assert row["group"] == "iteration" and row["quantity"].endswith("8 ranks")  # type: ignore[attr-defined]
    prediction = pk.predict(BERT, A100, ranks=8)
    assert row["a"] == prediction.time and (row["a_low"], row["a_high"]) == prediction.interval()
    assert (
        ", time x " in repr(comparison)
        and "\n" not in repr(comparison)
        and "bert-base" in comparison.explain()
    )
    single = pk.compare(A100, H100, BERT, ranks=1)
    assert find(single, "bert-base")["quantity"].endswith("1 rank")  # type: ignore[attr-defined]
    assert "collective" not in set(single.table()["group"])


def test_what_changed_is_asked_of_platforms() -> None:
    a, b = (pk.predict(BERT, platform) for platform in (A100, H100))
    with pytest.raises(ValueError, match="compares no platforms, whose numbers change; use table"):
        pk.compare(a, b).changes()
    assert pk.compare(A100, A100).changes().is_empty()


def test_a_prediction_on_another_datasheet_says_so() -> None:
    with pytest.warns(
        ExtrapolationWarning, match="kernels: transferred from h100-sxm-8: datasheet of h200-sxm"
    ):
        other = pk.predict(BERT, H100.with_datasheet("h200-sxm"))
    own = pk.predict(BERT, H100)
    assert sum(text.startswith("kernels: transferred") for text in other.warnings) == 1
    assert other.time <= own.time and other.spread > own.spread


def test_platforms_of_different_size_use_all_their_ranks() -> None:
    cluster = H100.with_link("inter", bandwidth=50e9, latency=5e-6).with_nodes(2)
    comparison = pk.compare(H100, cluster)
    assert (
        find(comparison, "all_gather of 268 MB")["quantity"]
        == "all_gather of 268 MB, 8 and 16 ranks"
    )
    assert find(comparison, "ranks")["ratio"] == 2 and find(comparison, "inter link")["b"] == 50e9
    with pytest.warns(ExtrapolationWarning):
        assert pk.compare(H100, cluster).warnings
    with pytest.raises(
        ValueError, match=r"ranks is 16; h100-sxm-8 and h100-.* both have 8; take fewer"
    ):
        pk.compare(H100, cluster, ranks=16)


def test_what_one_platform_lacks_is_left_empty() -> None:
    bare = replace(H100, kernels={}, collectives={"broadcast.8": H100.collectives["broadcast.8"]})
    comparison = pk.compare(H100, bare)
    row = find(comparison, "GEMM 4096 x 4096 x 1024")
    assert row["a"] is not None and row["b"] is row["ratio"] is row["b_low"] is None
    assert "-" in comparison.explain() and len(comparison.chart().to_dict()["layer"]) == 3
    with pytest.raises(PlatformError, match="did you mean 'h100-sxm-8'"):
        pk.compare("h100-smx-8", H100)


def test_a_comparison_is_quiet_in_its_own_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Midway through a comparison Python's filters are as they were, and another thread's
    prediction still warns."""
    h200 = H100.with_datasheet("h200-sxm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before, seen = list(warnings.filters), []

        def look(*args: Any, **settings: Any) -> pk.Prediction:
            count = len(caught)
            found = pk.predict(*args, **settings)
            quiet = len(caught) - count
            with ThreadPoolExecutor(1) as pool:
                pool.submit(pk.predict, BERT, h200).result()
            seen.append((quiet, len(caught) - count, list(warnings.filters) == before))
            return found

        monkeypatch.setattr(contrast, "predict", look)
        comparison = pk.compare(A100, h200, BERT)
    assert seen == [(0, 1, True)] * 2
    assert [str(one.message) for one in caught[2:]] == ["; ".join(comparison.warnings)]


DLRM = pk.DLRM(rows=[10**5] * 8, dim=32, batch=1024)
PLANS = [pk.Plan.round_robin(8, ranks=2), pk.Plan.round_robin(8, ranks=4)]
PAIRS = {
    "predictions": lambda: pk.compare(pk.predict(BERT, A100), pk.predict(BERT, H100)),
    "workloads": lambda: pk.compare(
        BERT, replace(BERT, sequence=256), platform="h100-sxm-8", ranks=2
    ),
    "plans": lambda: pk.compare(*PLANS, DLRM, platform="h100-sxm-8"),
    "priced plans": lambda: pk.compare(
        *(pk.price_plan(DLRM, "h100-sxm-8", plan) for plan in PLANS)
    ),
    "a plan and a search": lambda: pk.compare(
        pk.price_plan(DLRM, H100, PLANS[0]), pk.shard(DLRM, H100, ranks=2)
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_results_are_compared_part_by_part(name: str) -> None:
    """The parts of each side add up to its time; the last row has the time with its interval."""
    found = PAIRS[name]()
    *parts, whole = found.table().to_dicts()
    for side in "ab":
        assert sum(row[side] or 0.0 for row in parts) == pytest.approx(whole[side])
        assert whole[f"{side}_low"] < whole[side] < whole[f"{side}_high"]
    assert whole["ratio"] == whole["b"] / whole["a"] and f"time x {whole['ratio']:.3g}" in repr(
        found
    )
    assert "time of an iteration" in found.explain() and found.chart().to_dict()["description"]


def test_warnings_say_which_side_they_belong_to() -> None:
    found = PAIRS["predictions"]()
    ours, theirs = (pk.predict(BERT, platform).warnings for platform in (A100, H100))
    assert {*ours} - {*theirs} and {*theirs} - {*ours}
    assert {*found.warnings} == {
        *({*ours} & {*theirs}),
        *(f"a100-sxm-8: {text}" for text in {*ours} - {*theirs}),
        *(f"h100-sxm-8: {text}" for text in {*theirs} - {*ours}),
    }
    assert "time of an iteration of bert-base, batch 16" in repr(found), (
        "a report begins with what was predicted"
    )


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ((BERT, BERT), {}),
        ((A100, BERT), {"platform": A100}),
        ((5, BERT), {"platform": A100}),
        (PLANS, {"platform": A100}),
        ((H100, DLRM), {}),
    ],
)
def test_what_cannot_be_compared_says_what_can(given: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"a or b is .*; compare two platforms, predictions or priced plans; with"
    ):
        pk.compare(*given, **settings)
