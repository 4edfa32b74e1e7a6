"""Two platforms side by side: every quantity of both, what only one has, and the iterations they
predict."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import polars as pl
import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.machine import PlatformError
from perfkit.prediction import contrast

A100, H100 = pk.load_platform("a100-sxm-8"), pk.load_platform("h100-sxm-8")
BERT = pk.Transformer.bert("bert-base", batch=16, sequence=128, dtype="bf16")


pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")


def find(comparison: pk.PlatformComparison, quantity: str) -> dict[str, object]:
    [row] = comparison.table().filter(pl.col("quantity").str.starts_with(quantity)).to_dicts()
    return row


def test_datasheets_kernels_and_collectives_stand_side_by_side() -> None:
    comparison = pk.compare(A100, "h100-sxm-8")
    table = comparison.table()
    assert table.columns[:6] == ["group", "quantity", "unit", "a", "b", "ratio"]
    assert set(table["group"]) == {"peak", "memory", "network", "gemm", "collective"}
    assert find(comparison, "bf16 peak")["ratio"] == pytest.approx(989.4 / 312, rel=1e-3)
    fp8 = find(comparison, "fp8 peak")
    assert fp8["a"] is None
    assert fp8["ratio"] is None
    assert find(comparison, "main memory bandwidth")["b"] == 3.35e12
    product = find(comparison, "GEMM 4096 x 4096 x 1024, bf16")
    estimate = H100.gemm(4096, 4096, 1024, dtype="bf16")
    assert product["b"] == estimate.time
    assert (product["b_low"], product["b_high"]) == estimate.interval()
    message = find(comparison, "all_reduce of 4.19 MB, 8 ranks")
    assert message["a"] == A100.collective("all_reduce", 4 * 2**20, ranks=8).time
    json.dumps(table.to_dicts())


def test_a_platform_is_as_fast_as_itself() -> None:
    ratios = pk.compare(H100, H100).table()["ratio"].drop_nulls()
    assert len(ratios) == pk.compare(A100, H100).table().height
    for ratio in ratios:
        assert ratio == pytest.approx(1.0)


def test_a_workload_is_predicted_on_both() -> None:
    comparison = pk.compare(A100, H100, BERT)
    row = find(comparison, "bert-base")
    assert row["group"] == "iteration"
    assert row["quantity"].endswith("8 ranks")  # type: ignore[attr-defined]
    prediction = pk.predict(BERT, A100, ranks=8)
    assert row["a"] == prediction.time
    assert (row["a_low"], row["a_high"]) == prediction.interval()
    assert repr(comparison).startswith("PlatformComparison(h100-sxm-8 takes ")
    assert f" times as long; {row['quantity']})" in repr(comparison)
    assert "\n" not in repr(comparison)
    assert "bert-base" in comparison.explain()
    single = pk.compare(A100, H100, BERT, ranks=1)
    assert find(single, "bert-base")["quantity"].endswith("1 rank")  # type: ignore[attr-defined]
    assert "collective" not in set(single.table()["group"])


def test_an_iteration_is_named_by_its_workload_if_that_is_the_same() -> None:
    one = pk.predict(BERT, A100)
    larger = pk.predict(replace(BERT, batch=2 * BERT.batch), A100)
    assert pk.compare(one, larger).rows[-1]["quantity"] == "time of an iteration"
    alike = pk.compare(one, pk.predict(BERT, H100))
    assert alike.rows[-1]["quantity"] == f"time of an iteration of {BERT.description}"


def test_sides_are_named_by_what_differs_and_explained_with_their_software() -> None:
    gpt = pk.Transformer.preset("gpt3-1.3b", batch=16, dtype="bf16", mixed=True, fused=True)
    long = pk.Strategy(tp=2, pp=2, dp=2, schedule="interleaved", chunks=2, sequence_parallel=True)
    with keep_quiet():
        fsdp, megatron = (pk.predict(gpt, H100, ranks=8, stack=x) for x in ("fsdp", "megatron"))
        shared = pk.predict(gpt, H100, strategy=long)
        on_a100 = pk.predict(gpt, A100, ranks=8, stack="fsdp")
        compiled = pk.predict(gpt, H100, ranks=8, stack="fsdp", execution="compiled")
        faster = pk.predict(gpt, H100, ranks=8, stack="fsdp-compiled")
    text = pk.compare(fsdp, compiled).explain()
    assert find_heads(text) == ["eager", "compiled"]
    told = " ".join(text.split())
    assert f"eager: {fsdp.about}; stack: {fsdp.software} compiled:" in told
    assert f"compiled: {compiled.about}; stack: {compiled.software} quantity" in told
    assert find_heads(pk.compare(fsdp, faster).explain()) == ["fsdp", "fsdp-compiled"]
    assert find_heads(pk.compare(on_a100, fsdp).explain()) == ["a100-sxm-8", "h100-sxm-8"]
    # what the strategies are would make heads that no page holds
    for other in (shared, megatron):
        text = pk.compare(fsdp, other).explain()
        assert max(map(len, text.split("\n"))) < 120
        assert f"stack: {other.software}" in " ".join(text.split())
    assert find_heads(pk.compare(fsdp, shared).explain()) == ["a", "b"]


def find_heads(text: str) -> list[str]:
    """Names of both sides at the head of the table in an explanation."""
    head = next(line for line in text.split("\n") if line.startswith("quantity "))
    return head.split()[1:3]


def test_what_changed_is_asked_of_platforms() -> None:
    a = pk.predict(BERT, A100)
    b = pk.predict(BERT, H100)
    with pytest.raises(ValueError, match="compares no platforms, whose numbers change; use table"):
        pk.compare(a, b).changes()
    assert pk.compare(A100, A100).changes().is_empty()


def test_a_prediction_on_another_datasheet_says_so() -> None:
    with pytest.warns(
        pk.ExtrapolationWarning, match="kernels: transferred from h100-sxm-8: datasheet of h200-sxm"
    ):
        other = pk.predict(BERT, H100.with_datasheet("h200-sxm"))
    own = pk.predict(BERT, H100)
    assert sum(text.startswith("kernels: transferred") for text in other.warnings) == 1
    assert other.time <= own.time
    assert other.spread > own.spread


def test_platforms_of_different_size_use_all_their_ranks() -> None:
    cluster = H100.with_link("inter", bandwidth=50e9, latency=5e-6).with_nodes(2)
    comparison = pk.compare(H100, cluster)
    gathered = find(comparison, "all_gather of 268 MB")
    assert gathered["quantity"] == "all_gather of 268 MB, 8 and 16 ranks"
    assert find(comparison, "ranks")["ratio"] == 2
    assert find(comparison, "inter link")["b"] == 50e9
    with pytest.warns(pk.ExtrapolationWarning) as caught:
        assert pk.compare(H100, cluster).warnings
    assert caught[0].filename == __file__  # the line that compares
    with pytest.raises(
        ValueError, match=r"ranks is 16; h100-sxm-8 and h100-.* both have 8; take fewer"
    ):
        pk.compare(H100, cluster, ranks=16)


def test_what_one_platform_lacks_is_left_empty() -> None:
    bare = replace(H100, kernels={}, collectives={"broadcast.8": H100.collectives["broadcast.8"]})
    comparison = pk.compare(H100, bare)
    row = find(comparison, "GEMM 4096 x 4096 x 1024")
    assert row["a"] is not None
    assert row["b"] is None
    assert row["b_low"] is None
    assert row["ratio"] is None
    assert "-" in comparison.explain()
    assert len(comparison.chart().to_dict()["layer"]) == 3
    with pytest.raises(PlatformError, match="did you mean 'h100-sxm-8'"):
        pk.compare("h100-smx-8", H100)


class Look(NamedTuple):
    """What is seen midway through a comparison."""

    warnings_here: int
    warnings_elsewhere: int
    same_filters: bool


def test_a_comparison_is_quiet_in_its_own_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Midway through a comparison Python's filters are as they were, and another thread's
    prediction still warns."""
    h200 = H100.with_datasheet("h200-sxm")
    looks: list[Look] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)

        def predict_and_look(*args: Any, **settings: Any) -> pk.Prediction:
            before = len(caught)
            prediction = pk.predict(*args, **settings)
            here = len(caught) - before
            with ThreadPoolExecutor(1) as pool:
                pool.submit(pk.predict, BERT, h200).result()
            elsewhere = len(caught) - before - here
            looks.append(Look(here, elsewhere, list(warnings.filters) == filters))
            return prediction

        monkeypatch.setattr(contrast, "predict", predict_and_look)
        comparison = pk.compare(A100, h200, BERT)
    quiet_here = Look(warnings_here=0, warnings_elsewhere=1, same_filters=True)
    assert looks == [quiet_here, quiet_here]
    of_the_comparison = caught[2:]
    assert [str(warning.message) for warning in of_the_comparison] == [
        "; ".join(comparison.warnings)
    ]


DLRM = pk.DLRM(rows=[10**5] * 8, dim=32, batch=1024)
PLANS = [pk.Plan.round_robin(8, ranks=2), pk.Plan.round_robin(8, ranks=4)]


def compare_predictions() -> Any:
    return pk.compare(pk.predict(BERT, A100), pk.predict(BERT, H100))


def compare_workloads() -> Any:
    return pk.compare(BERT, replace(BERT, sequence=256), platform="h100-sxm-8", ranks=2)


def compare_plans() -> Any:
    return pk.compare(*PLANS, DLRM, platform="h100-sxm-8")


def compare_priced_plans() -> Any:
    return pk.compare(
        pk.price_plan(DLRM, "h100-sxm-8", PLANS[0]), pk.price_plan(DLRM, "h100-sxm-8", PLANS[1])
    )


def compare_a_plan_and_a_search() -> Any:
    return pk.compare(pk.price_plan(DLRM, H100, PLANS[0]), pk.shard(DLRM, H100, ranks=2))


PAIRS = {
    "predictions": compare_predictions,
    "workloads": compare_workloads,
    "plans": compare_plans,
    "priced plans": compare_priced_plans,
    "a plan and a search": compare_a_plan_and_a_search,
}


@pytest.mark.parametrize("name", PAIRS)
def test_results_are_compared_part_by_part(name: str) -> None:
    """The parts of each side add up to its time; the last row has the time with its interval."""
    comparison = PAIRS[name]()
    rows = comparison.table().to_dicts()
    parts, whole = rows[:-1], rows[-1]
    for side in ("a", "b"):
        assert sum(row[side] or 0.0 for row in parts) == pytest.approx(whole[side])
        assert whole[f"{side}_low"] < whole[side] < whole[f"{side}_high"]
    assert whole["ratio"] == whole["b"] / whole["a"]
    assert f": {whole['ratio']:.3g} times as long" in repr(comparison)
    answer, *lines = comparison.explain().split("\n")
    assert answer == comparison.headline()
    heads = next(number for number, line in enumerate(lines) if line.startswith("quantity "))
    assert lines[heads + 1].startswith("time of an iteration"), "the answer before its parts"
    assert comparison.chart().to_dict()["description"]


def test_warnings_say_which_side_they_belong_to() -> None:
    of_a100 = set(pk.predict(BERT, A100).warnings)
    of_h100 = set(pk.predict(BERT, H100).warnings)
    only_a100 = of_a100 - of_h100
    only_h100 = of_h100 - of_a100
    assert only_a100
    assert only_h100
    expected = of_a100 & of_h100
    expected |= {f"a100-sxm-8: {text}" for text in only_a100}
    expected |= {f"h100-sxm-8: {text}" for text in only_h100}
    assert set(compare_predictions().warnings) == expected


def test_a_report_begins_with_what_was_predicted() -> None:
    assert "times as long; bert-base, batch 16" in repr(compare_predictions())


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
