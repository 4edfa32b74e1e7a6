"""What sets the pace: waiting counts to other ranks only where the own host is not to blame, and
sweeps name what predictions name."""

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfkit as pk
from perfkit.prediction.breakdown import MEMORY, RESOURCES
from perfkit.workloads import vocabulary
from perfkit.workloads.columns import Kind

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
GPU = "h100-sxm-8"


def unlike(seed: int, batch: int, **more: Any) -> pk.DLRM:
    """26 tables of drawn sizes; of 8 ranks, two hold 4 of them and six hold 3."""
    rng = np.random.default_rng(seed)
    return pk.DLRM(
        rows=[int(rows) for rows in 10 ** rng.uniform(3, 7.5, 26)],
        pooling=[int(pooling) for pooling in rng.integers(1, 20, 26)],
        dim=64,
        bottom=[512, 256],
        top=[512, 256],
        features=13,
        batch=batch,
        **more,
    )


def find_hosts(prediction: pk.Prediction) -> dict[int, float]:
    """Time of the host of each listed rank [s]."""
    hosts = {}
    for rank_timeline in prediction._timeline.rank_timelines:
        times = rank_timeline.times
        hosts[times.group.ranks[0]] = float((times.host + times.launch_interval).sum())
    return hosts


def check_waiting(prediction: pk.Prediction) -> None:
    """Parts sum to the time; no rank waits for others while its own host would not be done."""
    assert prediction.breakdown()["time_s"].sum() == pytest.approx(prediction.time)
    hosts = find_hosts(prediction)
    for row in prediction.idle().rows(named=True):
        parts = [row[name] for name in row if name.endswith("_s")]
        assert sum(parts) == pytest.approx(prediction.time)
        assert min(parts) >= 0.0
        slack = max(prediction.time - hosts[row["rank"]], 0.0)
        assert row["waiting_s"] <= slack + 1e-9 * prediction.time


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_waiting_that_the_own_host_causes_is_of_the_host(seed: int, overlap: bool) -> None:
    """Each host takes at least 96 % of the iteration, the devices a third of it."""
    r = pk.predict(unlike(seed, 8192, overlap=overlap), GPU, ranks=8)
    assert min(find_hosts(r).values()) > 0.96 * r.time
    assert r.device_time < 0.4 * r.time
    assert r.bottleneck == "host-bound"
    shares = {kind: seconds / r.time for (_, kind), (_, seconds) in r.parts.items()}
    assert shares["host"] > 0.5
    assert shares.get("waiting", 0.0) < 0.05
    check_waiting(r)
    alike = pk.predict(unlike(2, 8192, overlap=overlap), GPU, ranks=8)
    assert r.spread == pytest.approx(alike.spread, abs=0.01), "waiting does not widen the interval"


def test_waiting_for_the_work_of_others_is_still_waiting() -> None:
    """One rank has all of the lookups; its twin with equal tables waits for nobody."""
    sizes: dict[str, Any] = {"rows": [10**6] * 8, "dim": 128, "bottom": [64], "top": [64]}
    shared = {"features": 4, "batch": 2**17, "embedding": "exact"}
    pooling = [200, 1, 1, 1, 1, 1, 1, 1]
    uneven = pk.predict(pk.DLRM(pooling=pooling, **sizes, **shared), GPU, ranks=8)
    idle = uneven.idle().sort("rank")
    assert uneven.bottleneck == "embedding-bound"
    assert idle["waiting_s"][0] == 0.0
    assert (idle["waiting_s"][1:] > 0.5 * uneven.time).all()
    even = pk.predict(pk.DLRM(pooling=[200] * 8, **sizes, **shared), GPU, ranks=8)
    assert even.idle()["waiting_s"].max() == 0.0
    for r in (uneven, even):
        assert r._timeline.hosts.max() < r.device_time
        check_waiting(r)


@given(
    seed=st.integers(0, 10**6),
    batch=st.sampled_from([512, 8192, 65536]),
    ranks=st.sampled_from([2, 3, 8]),
    overlap=st.booleans(),
    embedding=st.sampled_from(["separate", "fused"]),
    slow=st.sampled_from([1.0, 3.0]),
)
@settings(max_examples=20, deadline=None)
def test_the_host_sets_the_pace_where_it_takes_longer_than_the_devices(
    seed: int, batch: int, ranks: int, overlap: bool, embedding: str, slow: float
) -> None:
    model = unlike(seed, batch * ranks, overlap=overlap, embedding=embedding)
    r = pk.predict(model, GPU, ranks=ranks, slowdown={0: slow})
    check_waiting(r)
    host = max(find_hosts(r).values())
    if host > 1.02 * r.device_time:
        assert r.bottleneck == "host-bound"
    elif host < 0.5 * r.device_time:
        assert r.bottleneck != "host-bound"


@given(
    kind=st.sampled_from(["bert", "gpt2", "dlrm", "fused"]),
    ranks=st.sampled_from([1, 8]),
    platform=st.sampled_from([GPU, "a100-sxm-8", "v100-sxm-8"]),
    execution=st.sampled_from(["eager", "graphs", "compiled"]),
    powers=st.lists(st.integers(3, 14), min_size=2, max_size=6, unique=True),
)
@settings(max_examples=20, deadline=None)
def test_a_sweep_names_the_bottleneck_of_each_prediction(
    kind: str, ranks: int, platform: str, execution: str, powers: list[int]
) -> None:
    def build(batch: Any) -> Any:
        if kind in ("bert", "gpt2"):
            make = pk.Transformer.bert if kind == "bert" else pk.Transformer.gpt2
            return make(batch=batch, layers=2, hidden=256, heads=4, sequence=64)
        embedding = "fused" if kind == "fused" else "separate"
        rows = {"rows": 10**5, "dim": 32, "pooling": 4, "embedding": embedding}
        return pk.DLRM(**rows, bottom=[64], top=[64], features=4, batch=batch)

    batches = [2**power for power in powers]
    options = {"ranks": ranks, "execution": execution}
    swept = pk.sweep(build, {"batch": batches}, platform, progress=False, **options).table()
    alone = [pk.predict(build(batch), platform, **options) for batch in batches]
    assert swept["time_s"].to_list() == pytest.approx([r.time for r in alone])
    assert swept["bottleneck"].to_list() == [r.bottleneck for r in alone]


#: What limits each class of kernels. A new class is added here by choice: one that is left out of
#: `RESOURCES` counts as memory.
LIMITING = {
    "gemm": "GEMM",
    "bmm": "GEMM",
    "attention": "attention",
    "convolution": "convolution",
    "recurrent": "recurrent",
    "factorization": "linear algebra",
    "fourier": "memory",
    "transfer": "transfer",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "embedding_update": "embedding",
    "copy": "memory",
    "elementwise": "memory",
    "other": "memory",
    "pooling": "memory",
    "rowwise": "memory",
}


def test_each_class_of_kernels_counts_as_what_limits_it() -> None:
    captured = {row.kind for row in vocabulary.TABLE}
    keys = [*pk.load_platform(GPU).kernels, *pk.load_platform("zen3-2").kernels]
    measured = {key.partition(".")[0] for key in keys}
    assert captured | measured == LIMITING.keys()
    assert set(get_args(Kind)) - {"collective"} == LIMITING.keys()
    for kind, resource in LIMITING.items():
        assert RESOURCES.get(kind, MEMORY) == resource
    assert RESOURCES.keys() <= LIMITING.keys()
