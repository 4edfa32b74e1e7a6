"""Predictions: parts that sum, bounds that hold, times that grow with work, and plain words about
what is not known."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.helpers.eager import EagerDLRM
from perfkit.fitting import Fit, Iteration
from perfkit.platform.estimates import ExtrapolationWarning, keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price
from perfkit.prediction.predictor import predict
from perfkit.prediction.result import Prediction
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet
from perfkit.workloads.transformer import Transformer

F = TypeVar("F", bound=Fit)

ROOT = Path(__file__).resolve().parent.parent
H100 = load_platform("h100-sxm-8")
HOSTILE = "<script>alert('x')</script>"
SMALL = {
    "rows": [5000, 700, 90],
    "dim": 32,
    "pooling": 4,
    "bottom": [64],
    "top": [48],
    "features": 13,
}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 500, "positions": 64, "sequence": 32}

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")


def with_context(
    platform: Platform, *families: str, scale: float = 1.1, spread: float = 0.06
) -> Platform:
    """The platform as if it had been calibrated with iterations of these families."""

    def fit(model: type[F], parameters: dict[str, float], spread: float) -> F:
        return model.build(parameters, spread=spread, kind="assumed", source="test")

    values = {"scale": scale, "per_operation": 2e-6}
    iterations = {family: fit(Iteration, values, spread) for family in families}
    return replace(
        platform,
        context=Context(iterations=iterations | {"any": fit(Iteration, values, 2 * spread)}),
    )


dlrms = st.builds(
    partial(DLRM, bottom=[32], top=[32], features=13),
    rows=st.lists(st.integers(1, 10**6), min_size=1, max_size=6),
    dim=st.integers(1, 128),
    batch=st.integers(1, 512).map(lambda n: 4 * n),
    pooling=st.integers(1, 32),
    exponent=st.floats(0, 1.2),
    sparse=st.booleans(),
)
transformers = st.builds(
    lambda build, **sizes: build(**{**TINY, **sizes}),
    build=st.sampled_from([Transformer.bert, Transformer.gpt2]),
    layers=st.integers(1, 3),
    hidden=st.sampled_from([16, 64]),
    positions=st.just(512),
    sequence=st.integers(1, 300),
    batch=st.sampled_from([4, 16]),
    attention=st.sampled_from(["eager", "fused"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
)


class GrowingSize(NamedTuple):
    """A size of a workload, and the step by which it grows."""

    build: Callable[..., Any]
    name: str
    step: int


#: Four heads of whole 16 B in fp32: others are copied to wider ones first, and may take longer.
ALIGNED = 16
GROWING_SIZES = [
    GrowingSize(DLRM, "batch", 20),
    GrowingSize(DLRM, "rows", 5000),
    GrowingSize(DLRM, "dim", 1),
    GrowingSize(DLRM, "pooling", 1),
    GrowingSize(Transformer.bert, "sequence", 1),
    GrowingSize(Transformer.bert, "batch", 1),
    GrowingSize(Transformer.bert, "layers", 1),
    GrowingSize(Transformer.bert, "vocabulary", 1),
    GrowingSize(Transformer.bert, "hidden", ALIGNED),
]


@pytest.fixture(scope="module", params=["toy", "toy-calibrated", "h100-sxm-8"])
def platform(request: pytest.FixtureRequest, toy: Platform) -> Platform:
    if request.param == "h100-sxm-8":
        return H100
    return with_context(toy, "dlrm", "transformer") if "calibrated" in request.param else toy


# Sums and bounds.


def check_consistent(prediction: Prediction) -> None:
    """What holds for any prediction: parts sum to the time, which lies between its bounds."""
    time = prediction.time
    seconds = [part for _, part in prediction.parts.values()]
    assert sum(seconds) == pytest.approx(time, rel=1e-9)
    assert min(seconds) >= -1e-9 * time
    _, waiting = dict(prediction.parts).get(("", "waiting"), (0, 0.0))
    assert prediction.lower_bound <= time * (1 + 1e-9)
    assert time <= (prediction.serial + waiting) * (1 + 1e-9)
    assert 0 < time <= prediction.latency * (1 + 1e-9) < np.inf
    assert 0 < prediction.spread < 2
    if prediction.platform.device.kind == "cpu" and prediction.ranks == 1:
        assert time == pytest.approx(prediction.serial, rel=1e-9)
        assert time == pytest.approx(prediction.latency, rel=1e-9)
    check_tables(prediction)
    check_timeline(prediction)


def check_tables(prediction: Prediction) -> None:
    """The breakdown is sorted and sums to the time, and all tables of it are the same."""
    time = prediction.time
    frame = prediction.breakdown()
    seconds = frame["time_s"].to_list()
    assert sum(seconds) == pytest.approx(time, rel=1e-9)
    assert frame["share"].sum() * time == pytest.approx(time, rel=1e-9)
    assert seconds == pytest.approx(sorted(seconds, reverse=True), abs=1e-9 * time)
    assert prediction.table().equals(frame)
    assert prediction.to_pandas()["time_s"].tolist() == seconds


def check_timeline(prediction: Prediction) -> None:
    """Operations of a stream follow one another; one rank works as long as its parts say."""
    timeline = prediction.timeline()
    for _, part in timeline.sort("start_s").group_by(["rank", "stream"], maintain_order=True):
        starts = part["start_s"].to_numpy()
        ends = part["end_s"].to_numpy()
        assert (ends <= prediction.time * (1 + 1e-9)).all()
        assert (ends >= starts).all()
        assert (starts[1:] >= ends[:-1] - 1e-12).all()
    if prediction.ranks == 1:
        busy = (timeline["end_s"] - timeline["start_s"]).sum()
        listed = 0.0
        for (_, kind), (_, seconds) in prediction.parts.items():
            if kind not in ("host", "waiting"):
                listed += seconds
        assert busy == pytest.approx(listed, rel=1e-9)


@given(workload=dlrms | transformers, ranks=st.sampled_from([1, 2]), data=st.data())
def test_parts_sum_and_bounds_hold(platform, workload, ranks, data):
    plan = None
    if isinstance(workload, DLRM) and ranks == 2:
        plan = Plan.from_owners([data.draw(st.integers(0, 1)) for _ in workload.tables], ranks=2)
    check_consistent(predict(workload, platform, ranks=ranks, plan=plan))


@given(
    size=st.sampled_from(GROWING_SIZES),
    low=st.integers(1, 200),
    more=st.integers(1, 200),
    sparse=st.booleans(),
)
def test_time_grows_with_every_size(
    platform: Platform, size: GrowingSize, low: int, more: int, sparse: bool
) -> None:
    sizes = {**TINY, "batch": 4, "positions": 512}
    if size.build is DLRM:
        sizes = {**SMALL, "batch": 256, "sparse": sparse}
    if size.name == "dim":
        sizes["bottom"] = []
    if size.name == "layers":
        low = min(low, 4)
        more = min(more, 3)

    def predict_with(value: int) -> Prediction:
        values = [value, value, value, value] if size.name == "rows" else value
        return predict(size.build(**{**sizes, size.name: values}), platform)

    small = predict_with(size.step * low)
    large = predict_with(size.step * (low + more))
    assert large.time >= small.time * (1 - 1e-9)


def test_the_time_of_a_toy_iteration_adds_up_by_hand(toy: Platform) -> None:
    """Every operation alone, from the form of its class: nothing is lost between graph and
    total."""
    workload = Transformer.bert(batch=4, **TINY)
    graph = workload.graphs()[0]
    costs = price([graph], toy)[0]
    assert predict(workload, toy).time == pytest.approx(costs.seconds.sum(), rel=1e-12)
    assert costs.seconds == pytest.approx(costs.hot + costs.cold)
    launches = 2e-6 * (len(graph) - 1)  # ones_like has no model
    assert costs.hot.sum() > launches
    calibrated = with_context(toy, "transformer", scale=1.3)
    expected = 1.3 * costs.seconds.sum() + 2e-6 * len(graph)
    assert predict(workload, calibrated).time == pytest.approx(expected, rel=1e-12)


# The host and the device.


def test_waiting_for_copies_costs_time() -> None:
    """The reference loop on the same kernels: the device stands still while the host catches up
    after every copy."""
    v100 = load_platform("v100-locked-1")
    model = DLRM("dlrm-ddp", batch=2048, embedding="fused")
    lean = predict(model, v100)
    reference = predict(EagerDLRM(model), v100)
    assert reference.time > 1.2 * lean.time
    check_consistent(reference)
    rows = reference.timeline().rows(named=True)
    for row, following in pairwise(rows):
        if row["kind"] == "transfer":
            assert following["start_s"] > row["end_s"], "a gap after every transfer"


def test_data_that_come_late_set_the_pace(toy: Platform) -> None:
    for platform in (toy, H100):
        workload = Transformer.bert(batch=4, **TINY)
        alone = predict(workload, platform, ranks=2)
        ready = predict(workload, platform, ranks=2, loading=0.9 * alone.time)
        assert ready.time == alone.time
        assert ready.parts == alone.parts
        late = predict(workload, platform, ranks=2, loading=3.0 * alone.time)
        assert late.time == late.lower_bound == 3 * alone.time
        assert late.bottleneck == "input-bound"
        assert late.parts["", "loading"] == (1, pytest.approx(2 * alone.time))
        assert late.interval() != alone.interval()
        assert late.device_time == alone.device_time
        check_consistent(late)


def test_time_that_host_and_device_wait_for_each_other_is_a_part_of_its_own() -> None:
    model = Transformer.bert("bert-base", batch=64, sequence=512, dtype="bf16")
    prediction = predict(model, H100, ranks=8)
    check_consistent(prediction)
    assert prediction.bottleneck == "host-bound"
    _, waiting = prediction.parts["", "host_device_synchronization"]
    assert 0.02 * prediction.time < waiting < 0.19 * prediction.time
    last = prediction.timeline().sort("end_s").row(-1, named=True)
    assert last["name"] == "host_device_synchronization"
    assert last["operation"] is None
    assert last["end_s"] == pytest.approx(prediction.time)
    assert last["end_s"] - last["start_s"] == pytest.approx(waiting)
    modules = {row["module"]: row for row in prediction.modules().to_dicts()}
    synchronization = modules["host_device_synchronization"]
    assert synchronization["idle_s"] == pytest.approx(waiting)
    assert synchronization["update_s"] == pytest.approx(waiting)
    assert modules["embeddings"]["share"] < 0.05
    assert modules[""]["idle_s"] > 0.05 * prediction.time, "pauses of the host have no module"


@pytest.mark.parametrize(("ranks", "fused"), [(1, False), (1, True), (8, False)])
def test_a_list_wise_update_is_shared_among_modules_by_their_weights(
    ranks: int, fused: bool
) -> None:
    """A table takes the share of the update that it has of the weights, also where the gradients of
    all other modules are averaged in one tensor."""
    model = DLRM(
        rows=[20_000 for _ in range(ranks)],
        dim=64,
        pooling=1,
        bottom=[512, 64],
        top=[4096, 2048],
        features=13,
        batch=512,
        sparse=False,
        optimizer="adam",
        fused=fused,
    )
    prediction = predict(model, H100, ranks=ranks)
    check_consistent(prediction)
    rows = prediction.modules(depth=1).rows(named=True)
    update = {row["module"]: row["update_s"] for row in rows}
    modules = ("embeddings", "bottom", "top")
    weights = model.graphs(ranks)[0].parameters
    share = update["embeddings"] / sum(update[module] for module in modules)
    assert share == pytest.approx(20_000 * 64 / weights, rel=0.11)  # each rank has one table


def test_each_layer_takes_its_share_of_a_list_wise_update() -> None:
    """Layers are recorded once and repeated; tied weights belong to the embeddings."""
    model = Transformer.bert("bert-base", batch=8, sequence=128, dtype="bf16")
    rows = predict(model, H100).modules(depth=2).rows(named=True)
    update = {row["module"]: row["update_s"] for row in rows}
    layers = [update[f"layers.{layer}"] for layer in range(12)]
    for seconds in layers:
        assert seconds == pytest.approx(layers[0])
    of_weights = sum(layers) + update["embeddings"] + update["head"]
    hidden = 768
    layer_weights = 12 * hidden**2 + 13 * hidden  # matrices; biases and norms
    share = 12 * layer_weights / model.graphs()[0].parameters
    assert sum(layers) / of_weights == pytest.approx(share, rel=0.01)


def test_overheads_of_a_class_come_before_those_of_all() -> None:
    """A variant before its phase, before its class, before all operations."""
    workload = Transformer.bert(batch=1, **{**TINY, "sequence": 16})
    times = []
    for key in (
        "before_launch",
        "before_launch.gemm",
        "before_launch.gemm.backward",
        "before_launch.gemm.tn",
    ):
        host = {name: q for name, q in H100.host.items() if not name.startswith("before_launch")}
        host |= {
            "before_launch": replace(H100.host["gap"], value=1e-6),
            key: replace(H100.host["gap"], value=1e-4),
        }
        times.append(predict(workload, replace(H100, host=host)).time)
    products = [
        label for label in workload.graphs(accelerator=True)[0].labels if label.kind == "gemm"
    ]
    assert times == sorted(times, reverse=True)
    # in the backward, two products are one call
    calls = sum(label.phase == "forward" for label in products) * 1.5
    assert times[1] - times[2] == pytest.approx(1e-4 * calls * 2 / 3, rel=0.05)


def test_what_is_assumed_errs_together_and_widens_the_interval() -> None:
    workload = Transformer.bert("bert-base", batch=64, sequence=512, dtype="bf16", vocabulary=30720)
    spreads, bare = [], replace(H100, context=Context())
    for kind in ("fitted", "assumed"):
        kernels = {
            key: replace(fit, kind=kind, spread=0.2, spread_time=None)
            for key, fit in H100.kernels.items()
        }
        spreads.append(predict(workload, replace(bare, kernels=kernels)).spread)
    assert spreads[1] > 1.2 * spreads[0]
    assert spreads[1] == pytest.approx(0.2, rel=0.1)
    sure = {key: replace(q, stderr=0.01 * q.value) for key, q in H100.host.items()}
    small = Transformer.bert("bert-base", batch=1, sequence=16)
    assert predict(small, replace(H100, host=sure)).spread < predict(small, H100).spread


# How sure.


def test_a_family_never_calibrated_is_less_sure_and_says_so(toy: Platform) -> None:
    platform = with_context(toy, "dlrm")
    workload = Transformer.bert(batch=4, **TINY)
    with pytest.warns(
        ExtrapolationWarning, match="toy was never calibrated with transformer iterations"
    ):
        stranger = predict(workload, platform)
    assert any("transformer" in text for text in stranger.warnings)
    assert "never calibrated" in stranger.explain()
    known = predict(workload, with_context(toy, "dlrm", "transformer"))
    assert stranger.spread > known.spread
    assert known.warnings == ()
    with pytest.warns(ExtrapolationWarning, match="several ranks"):
        predict(DLRM(batch=64, **SMALL), platform, ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(DLRM(batch=64, **SMALL), platform)


# What is not modelled.


@pytest.mark.parametrize(
    "kind", ["elementwise", "rowwise", "embedding_forward", "gemm", "attention"]
)
def test_unmodelled_operations_are_listed_and_never_free(toy: Platform, kind: str) -> None:
    workload = (
        DLRM(batch=512, **SMALL)
        if kind.startswith("embedding")
        else Transformer.bert(batch=4, **TINY)
    )
    without = replace(
        toy, kernels={k: f for k, f in toy.kernels.items() if not k.startswith(kind + ".")}
    )
    prediction, graph = predict(workload, without), workload.graphs()[0]
    names = {
        label.name for label in graph.labels if label.kind == kind and label.name != "ones_like"
    }
    assert names <= set(prediction.unmodelled) | {"addmm", "mm"}
    assert min(price([graph], without)[0].seconds) > 0
    assert min(prediction.unmodelled.values()) > 0
    assert all(name in prediction.explain() for name in prediction.unmodelled)
    with pytest.raises(KeyError):  # and not a time of zero
        prediction.unmodelled["no such operation"]
    assert prediction.spread > predict(workload, toy).spread
    assert kind != "gemm" or any(
        "have no model and are timed" in text for text in prediction.warnings
    )


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "ranks is 3; platform 'toy' has 2; take at most 2$"),
        ({"loading": -1.0}, "loading is -1.0; it must be"),
        ({"ranks": 1.5}, "ranks is 1.5; it must be a whole number above 0"),
        ({"workload": DLRM(batch=64, dtype="bf16", **SMALL)}, "dtype is 'bf16'; known are fp32"),
        ({"platform": "h100-smx-8"}, "h100-smx-8.*did you mean"),
        (
            {"workload": TableSet([EmbeddingTable(10, 16)], batch=96)},
            "perfkit.shard finds a plan for tables alone",
        ),
        (
            {"workload": "bert"},
            "model is 'bert'; did you mean bert-base, bert-large",
        ),
    ],
    ids=str,
)
def test_bad_questions_are_refused(toy: Platform, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(**{"workload": DLRM(batch=64, **SMALL), "platform": toy, **changes})  # type: ignore[arg-type]


# Words and pictures.


def test_words_say_what_was_priced(toy: Platform) -> None:
    prediction = predict(DLRM("dlrm-mlperf", batch=2048), H100, ranks=4)
    text = repr(prediction)
    assert "dlrm-mlperf, batch 2048" in text
    assert "26 tables" in text
    assert "sparse" in text
    assert text.endswith("4 of 8 ranks of h100-sxm-8, fp32, sgd, eager")
    assert prediction.bottleneck in text
    assert "\n" not in text
    mixed = predict(Transformer.bert(batch=4, dtype="bf16", mixed=True, **TINY), H100)
    assert (
        "sequence 32 on 1 of 8 ranks of h100-sxm-8, bf16 autocast, adamw, eager, flash3 attention"
        in repr(mixed)
    )
    both = predict(
        Transformer.bert(batch=4, dtype="bf16", mixed=True, **TINY), H100, stack="megatron"
    )
    assert "h100-sxm-8, bf16 with fp32 masters, adamw, eager, " in repr(both)
    words = prediction.explain()
    answer, _, described = text.partition(": ")
    assert words.startswith(f"{answer}\n") and f"\n  {described}\n" in words
    assert "at least" in words
    assert "if nothing overlapped" in words
    assert words.count(" operation") == 6


def test_a_page_escapes_the_name_of_the_platform(toy: Platform) -> None:
    platform = replace(with_context(toy, "transformer"), name=HOSTILE)
    page = predict(DLRM(batch=64, **SMALL), platform)._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 2, "platform and warning"


@pytest.fixture(scope="module")
def on_eight() -> Prediction:
    return predict(DLRM(batch=1024, **SMALL), H100, ranks=8)


def test_idle_time_modules_and_the_critical_path_sum_to_the_time(on_eight: Prediction) -> None:
    idle = on_eight.idle()
    assert idle["ranks"].sum() == 8
    causes = idle.select("busy_s", "contention_s", "host_s", "communication_s", "waiting_s")
    for seconds in causes.sum_horizontal():
        assert seconds == pytest.approx(on_eight.time)
    modules = on_eight.modules(depth=1)
    assert {"bottom", "embeddings", "interaction", "top"} < set(modules["module"])
    assert modules["share"].sum() == pytest.approx(1)
    path = on_eight.critical_path()
    assert (path["end_s"] - path["start_s"]).sum() == pytest.approx(on_eight.time)
    assert set(path["rank"]) <= set(idle["rank"])


def test_the_critical_path_of_large_kernels_is_on_the_device() -> None:
    large = predict(Transformer.gpt2(batch=64, dtype="bf16"), H100)
    path = large.critical_path().with_columns(seconds=polars.col("end_s") - polars.col("start_s"))
    assert path["name"][-1] == "host_device_synchronization"
    assert path["seconds"].sum() == pytest.approx(large.time)
    assert path.filter(stream="compute")["seconds"].sum() > 0.99 * large.time
    unaligned = "of module 'head' with rows that are no multiple of 8"
    assert any(unaligned in text for text in large.warnings)


def test_a_timeline_can_be_asked_for_stages_and_modules(on_eight: Prediction) -> None:
    prediction = on_eight
    assert prediction.timeline("stage")["phase"].unique().sort().to_list() == [
        "backward",
        "forward",
        "update",
    ]
    assert prediction.timeline("module", depth=1).height < prediction.timeline().height
    with pytest.raises(ValueError, match="rank is 8; the ranks are 0 to 7"):
        prediction.modules(rank=8)
    with pytest.raises(ValueError, match="depth is 0"):
        prediction.modules(depth=0)
    with pytest.raises(ValueError, match="level is 'layer'; known are operation, module, stage"):
        prediction.timeline("layer")


def test_a_trace_holds_as_many_ranks_as_it_is_asked_for(
    on_eight: Prediction, tmp_path: Path
) -> None:
    for asked, ranks in ((3, 3), (20, 8)):
        path = on_eight.save_trace(tmp_path / "t.json", ranks=asked)
        stored = json.loads(path.read_text("utf-8"))
        assert len({event["pid"] for event in stored["traceEvents"]}) == ranks
        assert stored["otherData"] == {"prediction": repr(on_eight)}
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"], "nothing is left beside it"


def test_predicting_needs_no_torch() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import perfkit as pk\n"
        "from perfkit.__main__ import main; main('predict --model dlrm-mlperf --platform a100-sxm-8'.split())\n"
        "r = pk.predict(pk.DLRM('dlrm-mlperf', batch=8192), 'h100-sxm-8', ranks=8)\n"
        "r.breakdown(), r.explain(), pk.predict(pk.Transformer.bert(batch=8), 'a100-sxm-8')\n"
        "known = [name for name in ('torch', 'statsmodels', 'scipy') if name in sys.modules]\n"
        "sys.modules['torch'] = None\n"  # as where it is not installed
        "for call in (lambda: pk.calibrate(nccl_logs='no', base='h100-sxm-8'), lambda: pk.capture):\n"
        "    try: call()\n"
        "    except (ValueError, ImportError) as error: print(error)\n"
        "print(known)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]" and "dlrm-mlperf" in done.stdout, (
        "also at the command line"
    )
    assert "'no' is no file; name a log" in done.stdout
    assert "torch is not installed; run pip install torch" in done.stdout


def test_a_prediction_on_one_rank_imports_nothing_of_exchanges() -> None:
    # a first prediction of a process would wait for these imports
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import perfkit as pk\n"
        "names = [f'perfkit.platform.{n}' for n in ('collectives', 'collective_costs', 'collective_fits')]\n"
        "bert = pk.Transformer.bert(batch=8)\n"
        "pk.predict(bert, 'h100-sxm-8')\n"
        "print([name for name in (*names, 'numpy.ma') if name in sys.modules])\n"
        "pk.predict(bert, 'h100-sxm-8', ranks=8)\n"
        "print([name for name in names if name not in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    on_one_rank, missing_on_eight = done.stdout.splitlines()
    assert on_one_rank == "[]"
    assert missing_on_eight == "[]", "where ranks exchange something, they are imported"


def test_figures_by_other_names_are_answered_with_ours() -> None:
    with keep_quiet():
        r = predict("bert-base", "a100-sxm-8", loading="10ms")
    assert not hasattr(r, "tokens_per_s")
    for name, said in (
        ("confidence_interval", r"take interval\(0\.8\)"),
        ("tokens_per_s", r"take throughput\['tokens'\]"),
        ("nonsense", "has no attribute 'nonsense'"),
    ):
        with pytest.raises(AttributeError, match=said):
            getattr(r, name)
    with pytest.raises(ValueError, match="did you mean price_per_gpu_hour="):
        r.cost(price=2.5)
    with pytest.raises(
        ValueError, match=r"price_per_gpu_hour is missing; .*cost\(2\.5, tokens=1e6\)"
    ):
        r.cost(tokens=1e9)
