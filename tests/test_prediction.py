"""Predictions: parts that sum, bounds that hold, times that grow with work, and plain words about what is not known."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import Fit
from perfkit.gallery import load_platform
from perfkit.platform import ExtrapolationWarning, Platform
from perfkit.prediction import result
from perfkit.prediction.cost import price
from perfkit.prediction.result import Prediction, predict
from perfkit.workloads import dlrm
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

ROOT = Path(__file__).resolve().parent.parent
H100 = load_platform("h100-sxm-8")
HOSTILE = "<script>alert('x')</script>"
SMALL = {"rows": [5000, 700, 90], "dim": 32, "pooling": 4, "bottom": [64], "top": [48], "features": 13}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 500, "positions": 64, "sequence": 32}


def quietly(*args: object, **kwargs: object) -> Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        return predict(*args, **kwargs)  # type: ignore[arg-type]


def with_context(platform: Platform, *families: str, scale: float = 1.1, spread: float = 0.06) -> Platform:
    """The platform as if it had been calibrated with iterations of these families."""

    def fit(form: str, parameters: dict[str, float], spread: float) -> Fit:
        return Fit(form, parameters, spread=spread, kind="assumed", source="test", units=dict.fromkeys(parameters, "-"))

    context = {
        f"iteration.{family}": fit("iteration", {"scale": scale, "per_operation": 2e-6}, spread) for family in families
    }
    context["iteration"] = fit("iteration", {"scale": scale, "per_operation": 2e-6}, 2 * spread)
    return replace(platform, context=context)


dlrms = st.builds(
    lambda rows, dim, batch, pooling, exponent, sparse: DLRM(
        rows=rows, dim=dim, batch=4 * batch, pooling=pooling, exponent=exponent, sparse=sparse, bottom=[32], top=[32],
        features=13,
    ),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.integers(1, 128), st.integers(1, 512),
    st.integers(1, 32), st.floats(0, 1.2), st.booleans(),
)  # fmt: skip
transformers = st.builds(
    lambda build, layers, heads, width, sequence, batch, attention, optimizer: build(
        layers=layers, hidden=heads * width, heads=heads, sequence=sequence, batch=4 * batch, vocabulary=777,
        attention=attention, optimizer=optimizer,
    ),
    st.sampled_from([Transformer.bert, Transformer.gpt2]), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from([8, 16]), st.integers(1, 300), st.integers(1, 4), st.sampled_from(["eager", "fused"]),
    st.sampled_from(["adamw", "sgd"]),
)  # fmt: skip


@pytest.fixture(scope="module", params=["toy", "toy-calibrated", "h100-sxm-8"])
def platform(request: pytest.FixtureRequest, toy: Platform) -> Platform:
    if request.param == "h100-sxm-8":
        return H100
    return with_context(toy, "dlrm", "transformer") if "calibrated" in request.param else toy


# Sums and bounds.


def consistent(prediction: Prediction) -> None:
    total = sum(seconds for _, seconds in prediction.parts.values())
    assert total == pytest.approx(prediction.time, rel=1e-9)
    assert all(seconds >= -1e-9 * prediction.time for _, seconds in prediction.parts.values())
    assert prediction.lower_bound <= prediction.time * (1 + 1e-9)
    assert prediction.time <= prediction.latency * (1 + 1e-9)
    waiting = prediction.parts.get(("", "waiting"), (0, 0.0))[1]
    assert prediction.time <= (prediction.serial + waiting) * (1 + 1e-9)
    assert 0 < prediction.time < np.inf
    assert 0 < prediction.spread < 2


@settings(max_examples=30)
@given(workload=dlrms | transformers, ranks=st.sampled_from([1, 2]))
def test_parts_sum_and_bounds_hold(platform: Platform, workload: DLRM | Transformer, ranks: int) -> None:
    consistent(quietly(workload, platform, ranks=ranks))


@settings(max_examples=20)
@given(dlrms, st.data())
def test_parts_sum_for_any_plan(platform: Platform, workload: DLRM, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(workload.tables), max_size=len(workload.tables)))
    consistent(quietly(workload, platform, ranks=2, plan=Plan.from_owners(owners, ranks=2)))


CASES = {
    "dlrm": (DLRM(batch=64, **SMALL), 1),
    "hybrid": (DLRM(batch=64, **SMALL), 2),
    "bert": (Transformer.bert(batch=4, **TINY), 1),
    "gpt2-ranks": (Transformer.gpt2(batch=4, **TINY), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_breakdown_and_timeline_agree(platform: Platform, case: str) -> None:
    workload, ranks = CASES[case]
    prediction = quietly(workload, platform, ranks=ranks)
    frame = prediction.breakdown()
    assert frame["time_s"].sum() == pytest.approx(prediction.time, rel=1e-9)
    assert frame["share"].sum() == pytest.approx(1, rel=1e-9)
    assert frame["time_s"].to_list() == sorted(frame["time_s"], reverse=True)
    assert prediction.table().equals(frame)
    assert prediction.to_pandas()["time_s"].tolist() == frame["time_s"].to_list()
    timeline = prediction.timeline()
    for (rank, stream), part in timeline.sort("start_s").group_by(["rank", "stream"], maintain_order=True):
        starts, ends = part["start_s"].to_numpy(), part["end_s"].to_numpy()
        assert (starts >= -1e-12).all(), (rank, stream)
        assert (ends >= starts).all()
        assert (starts[1:] >= ends[:-1] - 1e-12).all(), (rank, stream)
    busy = timeline.select((timeline["end_s"] - timeline["start_s"]).alias("s"), timeline["rank"])
    per_rank = busy.group_by("rank").sum()["s"].to_list()
    listed = sum(seconds for (_, kind), (_, seconds) in prediction.parts.items() if kind not in ("host", "waiting"))
    assert max(per_rank) == pytest.approx(listed, rel=1e-9)
    if platform.device.kind == "cpu":  # a device finishes one iteration while its host is in the next
        spans = timeline.group_by("rank").agg((polars.col("end_s").max() - polars.col("start_s").min()).alias("s"))
        assert spans["s"].max() <= prediction.time * (1 + 1e-9)
    first = workload.graphs(ranks, accelerator=platform.device.kind != "cpu")[0]
    assert timeline.filter(timeline["rank"] == 0).height == len(first)


def test_one_cpu_rank_is_serial(toy: Platform) -> None:
    for workload in (DLRM(batch=64, **SMALL), Transformer.bert(batch=4, **TINY)):
        for platform in (toy, with_context(toy, "dlrm", "transformer")):
            prediction = quietly(workload, platform)
            assert prediction.time == pytest.approx(prediction.serial, rel=1e-9)
            assert prediction.latency == pytest.approx(prediction.serial, rel=1e-9)


def test_the_time_of_a_toy_iteration_adds_up_by_hand(toy: Platform) -> None:
    """Every operation alone, from the form of its class: nothing is lost between graph and total."""
    workload = Transformer.bert(batch=4, **TINY)
    graph = workload.graphs()[0]
    costs = price(graph, toy)
    assert quietly(workload, toy).time == pytest.approx(costs.seconds.sum(), rel=1e-12)
    assert costs.seconds == pytest.approx(costs.hot + costs.cold)
    launches = 2e-6 * (len(graph) - 1)  # ones_like has no model
    assert costs.hot.sum() > launches
    calibrated = with_context(toy, "transformer", scale=1.3)
    expected = 1.3 * costs.seconds.sum() + 2e-6 * len(graph)
    assert quietly(workload, calibrated).time == pytest.approx(expected, rel=1e-12)


# Several ranks.


def test_an_imbalanced_plan_waits(toy: Platform) -> None:
    model = DLRM(rows=[10**5] * 8, dim=64, pooling=20, batch=512, bottom=[32], top=[32], features=13)
    even = quietly(model, toy, ranks=2, plan=Plan.round_robin(8, ranks=2))
    uneven = quietly(model, toy, ranks=2, plan=Plan.from_owners([0] * 7 + [1], ranks=2))
    assert ("", "waiting") not in even.parts
    timeline = uneven.timeline()
    collectives = timeline.filter(timeline["kind"] == "collective")
    starts = collectives.group_by("rank", maintain_order=True).agg("start_s", "end_s").sort("rank")
    assert starts["start_s"][0].to_list() == pytest.approx(starts["start_s"][1].to_list())
    assert starts["end_s"][0].to_list() == pytest.approx(starts["end_s"][1].to_list())
    compute = timeline.filter(timeline["kind"] != "collective")
    idle = [
        uneven.time - float((part["end_s"] - part["start_s"]).sum())
        for _, part in compute.group_by("rank", maintain_order=True)
    ]
    assert idle[1] > 2 * idle[0], "the rank with one table waits for the one with seven"
    assert uneven.time > even.time


def test_identical_ranks_are_priced_once(toy: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(result, "price", lambda *args, **kwargs: calls.append(1) or price(*args, **kwargs))
    quietly(Transformer.bert(batch=8, **TINY), H100, ranks=8)
    assert len(calls) == 1
    calls.clear()
    quietly(DLRM(batch=64, **SMALL), toy, ranks=2)
    assert len(calls) == 2


def test_more_ranks_of_a_gpu_share_the_batch() -> None:
    model = DLRM("dlrm-mlperf", batch=65536)
    times = [quietly(model, H100, ranks=ranks).time for ranks in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] < 8


# The host and the device.


def test_a_gpu_is_bound_by_its_host_where_kernels_are_small() -> None:
    small = quietly(Transformer.bert("bert-base", batch=1, sequence=16), H100)
    large = quietly(Transformer.bert("bert-base", batch=64, sequence=512), H100)
    assert small.bottleneck == "host-bound"
    assert large.bottleneck == "GEMM-bound"
    compute = sum(seconds for (_, kind), (_, seconds) in small.parts.items() if kind != "host")
    assert small.time > 2 * compute
    assert large.time < 1.1 * large.lower_bound
    assert large.parts.get(("", "host"), (0, 0.0))[1] < 0.1 * large.time


def test_waiting_for_copies_costs_time() -> None:
    """The reference loop on the same kernels: the device stands still while the host catches up after every copy."""
    v100 = load_platform("v100-locked-1")
    lean, reference = (
        quietly(DLRM("dlrm-ddp", batch=2048, embedding="fused", loop=loop), v100) for loop in ("lean", "reference")
    )
    assert reference.time > 1.2 * lean.time
    consistent(reference)
    timeline = reference.timeline()
    starts, ends = (timeline[key].to_numpy() for key in ("start_s", "end_s"))
    after = [i + 1 for i, kind in enumerate(timeline["kind"][:-1]) if kind == "transfer"]
    assert (starts[after] > ends[[i - 1 for i in after]]).all(), "a gap after every transfer"


def test_one_fused_kernel_spares_the_host() -> None:
    fused, separate = (
        quietly(DLRM("dlrm-mlperf", batch=64, embedding=embedding), H100) for embedding in ("fused", "separate")
    )
    assert fused.time < 0.7 * separate.time


def test_overheads_of_a_class_come_before_those_of_all() -> None:
    """A variant before its phase, before its class, before all operations."""
    workload = Transformer.bert(batch=1, **{**TINY, "sequence": 16})
    times = []
    for key in ("before_launch", "before_launch.gemm", "before_launch.gemm.backward", "before_launch.gemm.tn"):
        host = {name: q for name, q in H100.host.items() if not name.startswith("before_launch")}
        host |= {"before_launch": replace(H100.host["gap"], value=1e-6), key: replace(H100.host["gap"], value=1e-4)}
        times.append(quietly(workload, replace(H100, host=host)).time)
    products = [label for label in workload.graphs(accelerator=True)[0].labels if label[1] == "gemm"]
    assert times == sorted(times, reverse=True)
    calls = sum(label[3] == "forward" for label in products) * 1.5  # in the backward, two products are one call
    assert times[1] - times[2] == pytest.approx(1e-4 * calls * 2 / 3, rel=0.05)


def test_the_kernel_of_a_variant_comes_before_that_of_a_dtype() -> None:
    gemm = H100.kernels["gemm"] if "gemm" in H100.kernels else H100.kernels["gemm.bf16"]
    slow = {name: replace(gemm, parameters={**gemm.parameters, "launch": launch}) for name, launch in
            (("gemm", 1.0), ("gemm.bf16", 2.0), ("gemm.nt", 4.0))}  # fmt: skip
    others = {key: fit for key, fit in H100.kernels.items() if key.partition(".")[0] != "gemm"}
    workload = Transformer.bert(batch=4, dtype="bf16", **TINY)
    graph = workload.graphs(accelerator=True)[0]
    variants = [variant for _, kind, variant, _, _ in graph.labels if kind == "gemm"]
    for names, each in ((["gemm"], 1), (["gemm", "gemm.bf16"], 2), (["gemm", "gemm.bf16", "gemm.nt"], None)):
        platform = replace(H100, kernels={**others, **{name: slow[name] for name in names}})
        seconds = price(graph, platform, dtype="bf16").seconds[[label[1] == "gemm" for label in graph.labels]]
        expected = [4 if each is None and variant == "nt" else each or 2 for variant in variants]
        assert seconds == pytest.approx(expected, rel=1e-3)


def test_what_is_assumed_errs_together_and_widens_the_interval() -> None:
    workload = Transformer.bert("bert-base", batch=64, sequence=512, dtype="bf16")
    spreads = []
    for kind in ("fitted", "assumed"):
        kernels = {key: replace(fit, kind=kind, spread=0.2, spread_time=None) for key, fit in H100.kernels.items()}
        spreads.append(quietly(workload, replace(H100, kernels=kernels)).spread)
    assert spreads[1] > 1.2 * spreads[0]
    assert spreads[1] == pytest.approx(0.2, rel=0.1)
    sure = {key: replace(q, stderr=0.01 * q.value) for key, q in H100.host.items()}
    small = Transformer.bert("bert-base", batch=1, sequence=16)
    assert quietly(small, replace(H100, host=sure)).spread < quietly(small, H100).spread


def test_mixed_precision_lies_between_its_data_types() -> None:
    sizes = {"batch": 64, "sequence": 512}
    half, mixed, full = (
        quietly(Transformer.bert(**sizes, **more), H100).time
        for more in ({"dtype": "bf16"}, {"dtype": "bf16", "mixed": True}, {"dtype": "tf32"})
    )
    assert half < mixed < full
    eager, fused = (quietly(Transformer.bert(**sizes, dtype="bf16", fused=f), H100).time for f in (False, True))
    assert fused < eager


def test_the_bottleneck_is_the_largest_part(toy: Platform) -> None:
    lookups = quietly(DLRM(rows=[10**6] * 8, dim=64, pooling=100, batch=2048, bottom=[16], top=[16]), toy)
    assert lookups.bottleneck == "embedding-bound"
    slow = replace(toy, collectives={k: replace(f, parameters={**f.parameters, "alpha": 10.0})
                                     for k, f in toy.collectives.items()})  # fmt: skip
    assert quietly(Transformer.bert(batch=4, **TINY), slow, ranks=2).bottleneck == "communication-bound"


# More work takes more time.


def grows(workloads: Iterator[DLRM | Transformer] | list[DLRM | Transformer], platform: Platform) -> None:
    times = [quietly(workload, platform).time for workload in workloads]
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times)), times


@settings(max_examples=25)
@given(batch=st.integers(1, 4096), factor=st.floats(1.01, 4), sparse=st.booleans(), exponent=st.floats(0, 1.2))
def test_time_grows_with_the_batch_of_a_dlrm(
    platform: Platform, batch: int, factor: float, sparse: bool, exponent: float
) -> None:
    grows(
        [DLRM(batch=b, sparse=sparse, exponent=exponent, **SMALL) for b in (batch, int(batch * factor) + 1)], platform
    )


@settings(max_examples=25)
@given(low=st.integers(10, 10**6), factor=st.floats(1.01, 10), sparse=st.booleans(), exponent=st.floats(0, 1.2))
def test_time_grows_with_the_rows(platform: Platform, low: int, factor: float, sparse: bool, exponent: float) -> None:
    sizes = {**SMALL, "batch": 256, "sparse": sparse, "exponent": exponent}
    grows([DLRM(**{**sizes, "rows": [r] * 4}) for r in (low, int(low * factor) + 1)], platform)


@settings(max_examples=25)
@given(low=st.integers(1, 256), more=st.integers(1, 64), pooling=st.integers(1, 64), sparse=st.booleans())
def test_time_grows_with_dim_and_pooling(platform: Platform, low: int, more: int, pooling: int, sparse: bool) -> None:
    sizes = {**SMALL, "batch": 256, "sparse": sparse, "bottom": []}  # else a layer is added, or not, to reach dim
    grows([DLRM(**{**sizes, "dim": dim, "pooling": pooling}) for dim in (low, low + more)], platform)
    grows([DLRM(**{**sizes, "dim": low, "pooling": p}) for p in (pooling, pooling + more)], platform)


@settings(max_examples=25)
@given(
    low=st.integers(1, 200), more=st.integers(1, 200), attention=st.sampled_from(["eager", "fused"]),
    key=st.sampled_from(["sequence", "batch", "layers", "vocabulary", "hidden"]), causal=st.booleans(),
)  # fmt: skip
def test_time_grows_with_the_sizes_of_a_transformer(
    platform: Platform, low: int, more: int, attention: str, key: str, causal: bool
) -> None:
    build = Transformer.gpt2 if causal else Transformer.bert
    sizes = {**TINY, "batch": 4, "positions": 512, "attention": attention}
    step = {"hidden": 4, "layers": 1}.get(key, 1)
    low, more = (min(low, 4), min(more, 3)) if key == "layers" else (low, more)
    grows([build(**{**sizes, key: step * value}) for value in (low, low + more)], platform)


def test_half_precision_takes_no_longer_on_a_gpu() -> None:
    times = {d: quietly(Transformer.bert(batch=32, sequence=512, dtype=d), H100).time for d in ("bf16", "tf32", "fp32")}
    assert times["bf16"] < times["tf32"] < times["fp32"]


def test_time_is_continuous_in_the_batch(toy: Platform) -> None:
    batches = np.unique(np.geomspace(16, 4096, 60).astype(int)) // 8 * 8
    for sparse in (True, False):
        times = np.array([quietly(DLRM(batch=int(b), sparse=sparse, **SMALL), toy).time for b in np.unique(batches)])
        steps = np.diff(np.log(times)) / np.diff(np.log(np.unique(batches)))
        assert steps.max() < 2.5, "no cliff: twice the batch never takes more than six times as long"


# How sure.


def test_interval_widens_with_its_level() -> None:
    prediction = quietly(DLRM(batch=64, **SMALL), H100)
    spans = [prediction.interval(level) for level in (0.01, 0.5, 0.8, 0.95, 0.999)]
    lows, highs = zip(*spans, strict=True)
    assert list(lows) == sorted(lows, reverse=True)
    assert list(highs) == sorted(highs)
    assert all(low < prediction.time < high for low, high in spans)
    assert all(low * high == pytest.approx(prediction.time**2) for low, high in spans)


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5, float("nan"), "0.8", True, None])
def test_bad_levels_are_refused(level: object) -> None:
    with pytest.raises(ValueError, match=r"level is .*; it must be"):
        quietly(DLRM(batch=64, **SMALL), H100).interval(level)  # type: ignore[arg-type]


def test_a_family_never_calibrated_is_less_sure_and_says_so(toy: Platform) -> None:
    platform = with_context(toy, "dlrm")
    workload = Transformer.bert(batch=4, **TINY)
    with pytest.warns(ExtrapolationWarning, match="toy was never calibrated with transformer iterations"):
        stranger = predict(workload, platform)
    assert any("transformer" in text for text in stranger.warnings)
    known = quietly(workload, with_context(toy, "dlrm", "transformer"))
    assert stranger.spread > known.spread
    assert "never calibrated" in stranger.explain()
    assert known.warnings == ()


def test_a_family_never_calibrated_in_parallel_says_so(toy: Platform) -> None:
    with pytest.warns(ExtrapolationWarning, match="several ranks"):
        predict(DLRM(batch=64, **SMALL), with_context(toy, "dlrm"), ranks=2)


def test_predictions_of_a_known_family_are_silent(toy: Platform) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(DLRM(batch=64, **SMALL), with_context(toy, "dlrm"))


# What is not modelled.


@pytest.mark.parametrize("kind", ["elementwise", "rowwise", "embedding_forward", "gemm", "attention"])
def test_unmodelled_operations_are_listed_and_never_free(toy: Platform, kind: str) -> None:
    workload = DLRM(batch=512, **SMALL) if kind.startswith("embedding") else Transformer.bert(batch=4, **TINY)
    without = replace(toy, kernels={k: f for k, f in toy.kernels.items() if not k.startswith(kind + ".")})
    prediction = quietly(workload, without)
    graph = workload.graphs()[0]
    names = {label[0] for label in graph.labels if label[1] == kind and label[0] != "ones_like"}
    assert names <= set(prediction.unmodelled) | {"addmm", "mm"}
    assert all(seconds > 0 for seconds in prediction.unmodelled.values())
    costs = price(graph, without)
    collective = np.array([label[1] == "collective" for label in graph.labels])
    assert (costs.seconds[~collective] > 0).all()
    text = prediction.explain()
    assert all(name in text for name in prediction.unmodelled)
    assert prediction.spread > quietly(workload, toy).spread


def test_a_large_unmodelled_part_is_a_warning(toy: Platform) -> None:
    without = replace(toy, kernels={k: f for k, f in toy.kernels.items() if not k.startswith("gemm.")})
    with pytest.warns(ExtrapolationWarning, match="have no model and are timed as memory traffic"):
        predict(Transformer.bert(batch=4, **TINY), without)


def test_a_platform_without_collectives_says_so(toy: Platform) -> None:
    with pytest.raises(ValueError, match=r"has no model for the collective 'all_reduce'.*calibrate it"):
        quietly(Transformer.bert(batch=4, **TINY), replace(toy, collectives={}), ranks=2)


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "ranks is 3; platform 'toy' has 2; take fewer or another platform"),
        ({"ranks": 0}, "ranks is 0; it must be a whole number above 0"),
        ({"ranks": 1.5}, "ranks is 1.5; it must be"),
        ({"ranks": "2"}, "ranks is '2'"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": float("nan")}, "ranks is nan"),
        ({"workload": DLRM(batch=64, dtype="bf16", **SMALL)}, "dtype is 'bf16'; known are fp32"),
        ({"workload": DLRM(batch=63, **SMALL), "ranks": 2}, "batch is 63; it must divide by the 2 ranks"),
        ({"plan": Plan.round_robin(3, ranks=2)}, "plan places 3 tables on 2 ranks"),
        ({"platform": "h100-smx-8"}, "h100-smx-8.*did you mean"),
        ({"platform": "no/such/file.toml"}, "no/such/file.toml"),
        ({"platform": 8}, "platform is 8"),
        ({"platform": None}, "platform is None"),
        (
            {"workload": "bert-base"},
            "workload is 'bert-base'; it must be a DLRM, a Transformer, a Net or captured graphs",
        ),
    ],
    ids=str,
)
def test_bad_questions_are_refused(toy: Platform, changes: dict[str, object], message: str) -> None:
    arguments = {"workload": DLRM(batch=64, **SMALL), "platform": toy, **changes}
    with pytest.raises(ValueError, match=message) as caught:
        predict(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# Words and pictures.


def test_repr_says_what_was_priced(toy: Platform) -> None:
    prediction = quietly(DLRM("dlrm-mlperf", batch=2048), H100, ranks=4)
    text = repr(prediction)
    for word in (
        "dlrm-mlperf",
        "batch 2048",
        "26 tables",
        "sparse",
        "4 of 8 ranks of h100-sxm-8",
        prediction.bottleneck,
    ):
        assert word in text
    assert "\n" not in text
    assert "sequence 32" in repr(quietly(Transformer.bert(batch=4, **TINY), toy))


def test_explain_shows_parts_and_bounds(toy: Platform) -> None:
    prediction = quietly(DLRM(batch=64, **SMALL), toy)
    text = prediction.explain()
    assert text.startswith(repr(prediction))
    assert "at least" in text
    assert "if nothing overlapped" in text
    assert text.count("operations)") == 6


def test_hostile_names_are_escaped(toy: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dlrm.PRESETS, HOSTILE, dlrm.PRESETS["dlrm-default"])
    platform = replace(with_context(toy, "transformer"), name=HOSTILE)
    prediction = quietly(DLRM(HOSTILE, batch=64), platform)
    page = prediction._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 3, "preset, platform and warning"


@pytest.mark.parametrize("kind", ["breakdown", "timeline", "modules"])
def test_charts_are_values(toy: Platform, kind: str) -> None:
    chart = quietly(DLRM(batch=64, **SMALL), toy, ranks=2).chart(kind)
    assert chart.to_dict()["$schema"]
    with pytest.raises(ValueError, match="kind is 'pie'; known are breakdown, timeline"):
        quietly(DLRM(batch=64, **SMALL), toy).chart("pie")


def test_predicting_needs_no_torch() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import perfkit as pk\n"
        "r = pk.predict(pk.DLRM('dlrm-mlperf', batch=8192), 'h100-sxm-8', ranks=8)\n"
        "r.breakdown(), r.explain(), pk.predict(pk.Transformer.bert(batch=8), 'a100-sxm-8')\n"
        "print([name for name in ('torch', 'statsmodels', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_every_class_of_operation_and_what_ranks_add_has_words() -> None:
    from perfkit.prediction.result import _BOUND
    from perfkit.workloads.graph import KINDS

    assert set(KINDS) | {"other", "waiting", "host"} <= set(_BOUND)
