"""Inputs of a DLRM: what is copied and exchanged, when, and what hides it, beside a loop by hand."""

from typing import Any

import pytest

import perfkit as pk
from perfkit.models.offload import COPY_INPUTS
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.ranks import RankTimes, group_identical_ranks, time_collectives, time_ranks
from perfkit.prediction.simulation import simulate
from perfkit.workloads.graph import Graph
from perfkit.workloads.input_pipelines import (
    INPUT_PIPELINES,
    REFUSED,
    SparseBytes,
    find_pipeline,
    size_inputs,
)
from perfkit.workloads.tables import EmbeddingTable

BATCH, RANKS, POOLING, TABLES, FEATURES = 4096, 4, 10, 8, 13
#: Bytes of a sample that say which rows are looked up, and those of its features and its label [B].
SPARSE, DENSE = TABLES * (8 + 8 * POOLING), 4 * (FEATURES + 1)
A100 = pk.load_platform("a100-sxm-8")


def make(pipeline: str, **others: Any) -> pk.DLRM:
    """A model whose exchanges may overlap."""
    settings: dict[str, Any] = {
        "batch": BATCH,
        "rows": [100_000] * TABLES,
        "dim": 64,
        "pooling": POOLING,
        "features": FEATURES,
        "bottom": [128, 64],
        "top": [128, 1],
        "embedding": "exact",
        "overlap": True,
    }
    return pk.DLRM(**settings | others, pipeline=pipeline)


def list_inputs(graph: Graph) -> list[str]:
    """Names of what the module of inputs does."""
    return [label.name for label in graph.labels if label.module == "inputs"]


# -- names ---------------------------------------------------------------------------------------------


def test_pipelines_are_known_by_their_names_and_those_of_torchrec() -> None:
    assert find_pipeline("TrainPipelineBase").name == "base"
    assert pk.DLRM(batch=64).pipeline == "local"
    with pytest.raises(ValueError, match="pipeline is 'fast'; it must be one of 'local', 'serial'"):
        make("fast")
    with pytest.raises(ValueError, match="pipeline is ''; it must be one of"):
        make("")
    for refused in REFUSED.values():
        for name in (refused.name, refused.torchrec_name):
            with pytest.raises(ValueError, match=f"pipeline is '{name}'; .* not modelled; take '"):
                make(name)


def test_what_a_pipeline_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline is 'base' without overlap.*pipeline='serial'"):
        make("base", overlap=False).graphs(RANKS)
    assert make("base", overlap=False).graphs(1)
    hybrid = pk.Plan(2, [pk.Placement("hybrid", (0, 1), frequent=10), *[0] * (TABLES - 1)])
    with pytest.raises(ValueError, match=r"pipeline is 'serial' and a placement hybrid"):
        make("serial", pooling=1).graphs(2, hybrid)
    with pytest.raises(ValueError, match=r"pipeline is 'sparse_dist'; searches price inputs="):
        pk.shard(make("sparse_dist"), A100, ranks=2)


# -- bytes ---------------------------------------------------------------------------------------------


def test_inputs_are_sized_by_hand() -> None:
    plain, weighted = EmbeddingTable(100, 16, 3), EmbeddingTable(100, 16, 2, weighted=True)
    assert SparseBytes.of_tables([plain, weighted]) == (8 * 2, 8 * 5, 4 * 2)
    inputs = size_inputs([plain, weighted], [[plain], [weighted, weighted]])
    assert inputs.read.total == 16 + 40 + 8
    assert inputs.sent == (8 * 3, 8 * 7, 4 * 4)  # two parts by columns each get all of it
    assert inputs.received == (8 * 2, 8 * 4, 4 * 4)  # the second rank has the most


def test_messages_carry_what_was_sized() -> None:
    graph = make("sparse_dist").graphs(RANKS, accelerator=True)[0]
    of_inputs = {
        name: float(graph.features.nbytes[place])
        for place, (name, module) in enumerate((one.name, one.module) for one in graph.labels)
        if module == "inputs" and name == COPY_INPUTS
    }
    assert of_inputs == {COPY_INPUTS: BATCH / RANKS * (SPARSE + DENSE)}
    messages = [
        float(graph.features.nbytes[place])
        for place, label in enumerate(graph.labels)
        if (label.module, label.name) == ("inputs", "all_to_all")
    ]
    lengths, values = BATCH * TABLES / RANKS * 8, BATCH * TABLES / RANKS * 8 * POOLING
    assert messages == [512, lengths, values]  # sizes are few


def test_each_pipeline_does_what_its_class_does() -> None:
    permute, exchange = "permute_2D_sparse_data", "all_to_all"
    expected = {
        "local": [],
        "serial": [COPY_INPUTS, permute, exchange, "to", exchange, exchange, permute],
        "base": [permute, exchange, "to", exchange, exchange, permute, COPY_INPUTS],
        "sparse_dist": [COPY_INPUTS, permute, permute, exchange, exchange, exchange],
    }
    assert {*expected} == {*INPUT_PIPELINES}
    for name, operations in expected.items():
        assert list_inputs(make(name).graphs(RANKS, accelerator=True)[0]) == operations
        on_one = make(name).graphs(1, accelerator=True)[0]
        assert list_inputs(on_one) == [COPY_INPUTS] * (name != "local")
    weighted = make("sparse_dist", weighted=True).graphs(RANKS, accelerator=True)[0]
    assert list_inputs(weighted).count(exchange) == 4
    on_cpu = make("sparse_dist").graphs(RANKS)[0]
    assert COPY_INPUTS not in list_inputs(on_cpu)


def test_the_next_step_waits_for_what_a_step_did_ahead() -> None:
    graph = make("sparse_dist").graphs(RANKS, accelerator=True)[0]
    assert graph.waits is not None
    awaited = [
        graph.labels[graph.collectives[wait.collective]].name
        for wait in graph.waits
        if wait.of_previous_iteration
    ]
    assert sorted(awaited) == ["all_to_all", "all_to_all", COPY_INPUTS]


def test_batches_that_are_ahead_are_held() -> None:
    with keep_quiet():
        held = {
            name: pk.predict(make(name), A100, ranks=RANKS).memory().total
            for name in ("serial", "base", "sparse_dist")
        }
    raw, received = BATCH / RANKS * SPARSE, BATCH / RANKS * SPARSE
    assert held["base"] - held["serial"] == pytest.approx(raw, rel=1e-3)
    assert held["sparse_dist"] - held["base"] == pytest.approx(raw + received, rel=1e-3)


# -- times ---------------------------------------------------------------------------------------------


def time_rank(model: pk.DLRM, platform: pk.Platform, ranks: int) -> RankTimes:
    """Times of the operations of a rank, whose kernels take 10 µs each and whose host is fast."""
    graphs = model.graphs(ranks, accelerator=True)
    groups = group_identical_ranks(graphs[:1], ranks, {})
    durations, _ = time_collectives(groups, platform)
    seconds = [10e-6 * (group.graph.column("launches") > 0) for group in groups]
    for group, times in zip(groups, seconds, strict=True):
        times[group.graph.collectives] = 0.0
    [times] = time_ranks(groups, seconds, durations, platform, None)
    return times


def run_by_hand(times: RankTimes, steps: int = 40) -> float:
    """Time of a step on streams of their own: kernels, copies of inputs, and all other messages in
    their order. What a step needs of its inputs was launched by the step before it [s]."""
    graph = times.group.graph
    durations = dict(zip(graph.collectives.tolist(), times.durations.tolist(), strict=True))
    waits: dict[int, list[int]] = {}
    assert graph.waits is not None
    for wait in graph.waits:
        if not wait.of_previous_iteration:
            waits.setdefault(wait.operation, []).append(int(graph.collectives[wait.collective]))
    clock, streams, begins = 0.0, {"copies": 0.0, "messages": 0.0}, []
    inputs_end = 0.0
    for _ in range(steps):
        clock = max(clock, inputs_end)
        begins.append(clock)
        ends: dict[int, float] = {}
        for place, label in enumerate(graph.labels):
            clock = max([clock, *(ends[launched] for launched in waits.get(place, []))])
            if place not in durations:
                clock += float(times.seconds[place])
                continue
            stream = "copies" if label.name == COPY_INPUTS else "messages"
            streams[stream] = max(streams[stream], clock) + durations[place]
            ends[place] = streams[stream]
        ahead = [end for place, end in ends.items() if graph.labels[place].module == "inputs"]
        inputs_end = max(ahead)
        clock = max([clock, *(end for place, end in ends.items() if end not in ahead)])
    return (begins[-1] - begins[len(begins) // 2]) / (len(begins) - 1 - len(begins) // 2)


@pytest.mark.parametrize("link", [25e9, 1e9, 0.2e9])
@pytest.mark.parametrize("batch", [256, BATCH, 16 * BATCH])
def test_steps_take_what_a_loop_by_hand_says(link: float, batch: int) -> None:
    platform = A100.with_host_memory(link=link, sharers=1)
    times = time_rank(make("sparse_dist", batch=batch), platform, RANKS)
    timeline = simulate([times], device=True, contention=0.0)
    assert timeline.device_time == pytest.approx(run_by_hand(times), rel=1e-6)


def test_what_is_ahead_is_hidden_and_what_is_not_adds_up() -> None:
    with keep_quiet():
        steps = {
            name: pk.predict(make(name, batch=16 * BATCH), A100, ranks=RANKS).time
            for name in INPUT_PIPELINES
        }
        slow = A100.with_host_memory(link=0.5e9, sharers=4)
        bound = pk.predict(make("sparse_dist", batch=16 * BATCH), slow, ranks=RANKS).time
    assert steps["local"] < steps["sparse_dist"] < steps["base"] < steps["serial"]
    # permuted indices, and kernels beside the exchange, are left
    assert steps["sparse_dist"] < 1.1 * steps["local"]
    nbytes = 16 * BATCH / RANKS * (SPARSE + DENSE)
    assert bound == pytest.approx(
        4 * nbytes / 0.5e9, rel=1e-3
    )  # the copies of four ranks on one link


def test_copies_and_exchanges_in_series_take_their_own_time() -> None:
    serial = time_rank(make("serial"), A100, RANKS)
    local = time_rank(make("local"), A100, RANKS)
    simulated = [simulate([times], device=True, contention=0.0).period for times in (serial, local)]
    graph = serial.group.graph
    messages = sum(
        duration
        for place, duration in zip(graph.collectives, serial.durations.tolist(), strict=True)
        if graph.labels[place].module == "inputs"
    )
    kernels = sum(
        float(seconds)
        for label, seconds in zip(graph.labels, serial.seconds.tolist(), strict=True)
        if label.module == "inputs"
    )
    assert simulated[0] - simulated[1] >= 0.99 * (messages + kernels)


def test_parts_of_a_prediction_name_the_inputs() -> None:
    with keep_quiet():
        prediction = pk.predict(make("serial", batch=16 * BATCH), A100, ranks=RANKS)
    rows = [row for row in prediction.table().rows(named=True) if row["kind"] == "inputs"]
    [row] = rows
    assert row["time_s"] == pytest.approx(16 * BATCH / RANKS * (SPARSE + DENSE) * 2 / 25e9, rel=0.4)
    assert "inputs serial" in make("serial").description
