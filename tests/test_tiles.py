"""Messages of ranks that share layers, sent in tiles beside products: which, when, and how long.

As the userbuffers of Transformer Engine do by default (transformer_engine/pytorch/module/base.py,
`initialize_ub`): ``ring_exchange`` for all_gathers before products (qkv_fprop, fc1_fprop, proj_dgrad,
fc2_dgrad), ``pipeline`` for reduce_scatters behind them (proj_fprop, fc2_fprop), and ``bulk`` for the
reduce_scatter beside the gradients of weights (qkv_wgrad, fc1_wgrad).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.scale import draw_strategies
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.prediction.result import Prediction
from perfkit.prediction.strategies import price_strategies
from perfkit.prediction.tiles import (
    Piece,
    PlacedOperation,
    TiledMessage,
    Way,
    expose_tiles,
    find_tiled_messages,
    send_in_tiles,
)
from perfkit.workloads.graph import Label
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer
from tests.levels import load_without_levels

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
LLAMA = Transformer.preset("llama-2-7b", layers=4, batch=8, sequence=2048, dtype="bf16")
SHARED = Strategy(tp=4, dp=2, micro_batch=2, sequence_parallel=True)
TILED = replace(SHARED, tiled=True)
#: Kind and variant of operations by a short name.
SHORT = {
    "gather": ("all_gather", "collective", "all_gather"),
    "scatter": ("reduce_scatter", "collective", "reduce_scatter"),
    "reduce": ("all_reduce", "collective", "all_reduce"),
    "swap": ("all_to_all", "collective", "all_to_all"),
    "output": ("mm", "gemm", "nt"),
    "input": ("mm", "gemm", "nn"),
    "weight": ("mm", "gemm", "tn"),
    "sum": ("add_", "elementwise", "add_"),
    "other": ("silu", "elementwise", "silu"),
    "experts": ("bmm", "bmm", "nn"),
}


def make_labels(names: str) -> list[Label]:
    return [Label(*SHORT[name], "forward", "layers.0.mlp") for name in names.split()]


class Pass(NamedTuple):
    """Operations of a pass, its messages in tiles, and what runs: positions, with T for a tile and O
    for all other tiles."""

    names: str
    messages: list[TiledMessage]
    runs: list[str]


PASSES = {
    # gate, up and down
    "forward": Pass(
        "other gather output other output other output scatter other",
        [
            TiledMessage(1, 2, range(2, 5), Way.GATHERS),
            TiledMessage(7, 6, range(6, 7), Way.SUMS),
        ],
        ["0", "1T", "1O", "2", "3", "4", "5", "7O", "6", "7T", "8"],
    ),
    # weights of the second product wait for its input's gradient, the others run beside the message
    "backward": Pass(
        "gather weight input sum other weight input sum weight input sum scatter other",
        [
            TiledMessage(0, 1, range(2, 3), Way.GATHERS),
            TiledMessage(11, 11, [5, 8], Way.INDEPENDENT),
        ],
        ["0T", "0O", "2", "1", "3", "4", "6", "9", "11", "5", "8", "7", "10", "12"],
    ),
    "gradients of weights put off": Pass(
        "gather input other input sum scatter other",
        [
            TiledMessage(0, 1, range(1, 2), Way.GATHERS),
            TiledMessage(5, 3, range(3, 5), Way.SUMS),
        ],
        ["0T", "0O", "1", "2", "5O", "3", "4", "5T", "6"],
    ),
    # casts come before the message that the product reads
    "fp8": Pass(
        "gather other other output scatter",
        [TiledMessage(4, 3, range(3, 4), Way.SUMS)],
        ["0", "1", "2", "4O", "3", "4T"],
    ),
    "whole activations": Pass(
        "output other output reduce other input weight other input weight reduce",
        [
            TiledMessage(3, 2, range(2, 3), Way.SUMS),
            TiledMessage(10, 10, [9], Way.INDEPENDENT),
        ],
        ["0", "1", "3O", "2", "3T", "4", "5", "6", "7", "8", "10", "9"],
    ),
    # GroupedLinear has no userbuffers
    "experts": Pass(
        "gather output experts experts scatter output output scatter",
        [TiledMessage(7, 6, range(6, 7), Way.SUMS)],
        ["0", "1", "2", "3", "4", "5", "7O", "6", "7T"],
    ),
}


def write_placed(placed: PlacedOperation) -> str:
    mark = {Piece.ALL: "", Piece.TILE: "T", Piece.OTHERS: "O"}[placed.piece]
    return f"{placed.position}{mark}"


@pytest.mark.parametrize("name", PASSES)
def test_each_message_runs_beside_its_own_products(name: str) -> None:
    case = PASSES[name]
    labels = make_labels(case.names)
    assert find_tiled_messages(labels) == case.messages
    tiled = send_in_tiles(labels, {})
    assert [write_placed(placed) for placed in tiled.operations] == case.runs
    # every operation runs once, a message in two parts as one call
    calls = Counter(placed.position for placed in tiled.operations if placed.is_first)
    assert calls == Counter(range(len(labels)))


def test_what_is_beside_kernels_is_waited_for_behind_them() -> None:
    labels = make_labels(PASSES["backward"].names)
    tiled = send_in_tiles(labels, {})
    # tiles 0O until behind 2, message 11 until behind 8, tiles 7O until the last one is sent
    assert tiled.waits == {1: 3, 8: 11}
    labels = make_labels(PASSES["forward"].names)
    assert send_in_tiles(labels, {}).waits == {2: 6, 7: 9}
    # another message waits where it did: behind operation 3 of these
    labels = make_labels("swap gather output other output scatter")
    assert send_in_tiles(labels, {0: 4}).waits == {2: 4, 0: 5, 5: 7}


def test_a_tile_is_waited_for_and_the_others_run_beside_kernels() -> None:
    """A message of 8 s in 4 tiles beside kernels of 5 or 10 s, which it slows by a fifth."""
    assert expose_tiles(8.0, 4, 10.0, Way.SUMS, 0.2) == pytest.approx(2 + 0.2 * 6)
    assert expose_tiles(8.0, 4, 10.0, Way.GATHERS, 0.2) == pytest.approx(2 + 0.2 * 6)
    assert expose_tiles(8.0, 4, 4.0, Way.SUMS, 0.2) == pytest.approx(2 + 6 - 4)
    assert expose_tiles(8.0, 4, 5.0, Way.INDEPENDENT, 0.2) == pytest.approx(8 - 5)
    assert expose_tiles(8.0, 4, 10.0, Way.INDEPENDENT, 0.2) == pytest.approx(0.2 * 8)


def run(strategy: Strategy, model: Transformer = LLAMA, where: str = "h100-sxm-8") -> Prediction:
    return predict(model, where, strategy=strategy)


def test_two_parts_of_a_message_take_its_time_and_send_its_bytes() -> None:
    whole = run(SHARED)
    tiled = run(TILED)
    sums = []
    for result in (whole, tiled):
        timeline = result._timeline.rank_timelines[0]
        graph, collectives = timeline.graph, timeline.graph.collectives
        sums.append(
            [
                timeline.times.durations.sum(),
                graph.column("nbytes")[collectives].sum(),
                graph.column("calls").sum(),
                graph.column("launches").sum(),
            ]
        )
    assert sums[1] == pytest.approx(sums[0])
    [before], [after] = (
        whole.communication().rows(named=True),
        tiled.communication().rows(named=True),
    )
    assert after["total_s"] == pytest.approx(before["total_s"])
    assert after["exposed_s"] < 0.7 * before["exposed_s"]
    assert tiled.time < whole.time
    for result in (whole, tiled):
        assert result.lower_bound <= result.time
        parts = result.breakdown().get_column("time_s")
        assert parts.sum() == pytest.approx(result.time)


def test_most_of_a_message_is_in_flight_while_its_product_runs() -> None:
    """In a layer of llama: of two gathers and a sum a quarter is waited for; the last sum of a
    block of the backward pass runs beside gradients of weights."""
    one_micro_batch = replace(TILED, micro_batch=4)
    timeline = run(one_micro_batch)._timeline.rank_timelines[0]
    graph = timeline.graph
    place_of_wait = {
        int(graph.collectives[wait.collective]): wait.operation for wait in graph.collective_waits
    }
    beside = Counter[str]()
    for position in graph.collectives.tolist():
        label = graph.labels[position]
        if not label.module.startswith("layers.1."):
            continue
        between = range(position + 1, place_of_wait[position])
        products = [place for place in between if graph.labels[place].kind == "gemm"]
        if not products:
            continue
        beside[label.phase, label.name, len(products)] += 1  # type: ignore[index]
        variants = {graph.labels[place].variant for place in products}
        part = float(graph.column("part")[position])
        if label.name == "reduce_scatter" and label.phase == "backward":
            assert part == 0
            assert variants == {"tn"}
        else:
            assert part == 0.75
            assert "tn" not in variants
        assert timeline.starts[position] <= timeline.starts[products[0]]
    assert beside == {
        ("forward", "all_gather", 3): 1,  # queries, keys and values
        ("forward", "all_gather", 2): 1,  # gate and up
        ("forward", "reduce_scatter", 1): 2,
        ("backward", "all_gather", 1): 2,
        ("backward", "reduce_scatter", 3): 1,
        ("backward", "reduce_scatter", 2): 1,
    }


def test_the_time_is_that_of_the_parts_by_hand() -> None:
    """From the times of single operations: what each message adds, if its host is never late."""
    model = replace(LLAMA, batch=4)
    strategy = Strategy(tp=4, micro_batch=4, sequence_parallel=True)
    platform = load_platform("h100-sxm-8")
    whole = predict(model, platform, strategy=strategy)
    tiled = predict(model, platform, strategy=replace(strategy, tiled=True))
    contention = dict(platform.context.overlap or {})["contention"]
    timeline = whole._timeline.rank_timelines[0]
    seconds, labels = timeline.times.seconds, timeline.graph.labels
    messages = timeline.graph.collectives.tolist()
    durations = dict(zip(messages, timeline.times.durations.tolist(), strict=True))
    saved = 0.0
    for layer in range(model.layers):
        for phase in ("forward", "backward"):
            rows = [
                place
                for place, label in enumerate(labels)
                if label.phase == phase and label.module.startswith(f"layers.{layer}.")
            ]
            for sent in find_tiled_messages([labels[row] for row in rows]):
                time = durations[rows[sent.message]]
                compute = sum(seconds[rows[place]] for place in sent.kernels)
                one_tile = 0.0 if sent.way is Way.INDEPENDENT else time / 4
                others = time - one_tile
                saved += others - max(others - compute, contention * others)
    hosts = [
        sum(
            result._timeline.rank_timelines[0].times.seconds[place]
            for place in result._timeline.rank_timelines[0].graph.kernels["host", "host"]
        )
        for result in (whole, tiled)
    ]
    by_hand = whole.time - saved + hosts[1] - hosts[0]
    assert tiled.time == pytest.approx(by_hand, rel=1e-6)
    assert saved > 0.01 * whole.time


def draw_tiled(count: int, seed: int) -> Iterator[Any]:
    """Random strategies whose ranks share layers, with tiles."""
    for drawn in draw_strategies(count, seed):
        if drawn.strategy.tp > 1:
            yield drawn._replace(strategy=replace(drawn.strategy, tiled=True))


def test_closed_forms_and_the_event_loop_agree_on_random_strategies() -> None:
    """They differ as they do without tiles, see `python -m benchmarks.scale`."""
    errors, without = [], []
    for drawn in draw_tiled(20, seed=3):
        for strategy, listed in (
            (drawn.strategy, errors),
            (replace(drawn.strategy, tiled=False), without),
        ):
            events = predict(
                drawn.model, drawn.platform, strategy=strategy, execution=drawn.execution
            )
            priced = price_strategies(
                drawn.model,
                load_platform(drawn.platform),
                Strategy.stack([strategy]),
                drawn.execution,
            )
            listed.append(float(priced["time"][0]) / events.time - 1)
    assert len(errors) >= 10
    assert np.abs(errors).max() < 0.03, errors
    assert np.abs(errors).mean() < 0.01, errors
    assert np.abs(np.subtract(errors, without)).max() < 0.02


@pytest.mark.parametrize("where", ["h100-sxm-8", "l40s-8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sequence_parallel": False},
        {"checkpoint": "full"},
        {"checkpoint": "selective"},
        {"pp": 2, "schedule": "zero_bubble"},
        {"pp": 2, "schedule": "gpipe"},
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses"},
    ],
)
def test_closed_forms_and_the_event_loop_agree(changes: dict[str, Any], where: str) -> None:
    """Also where messages take longer than products, on cards without NVLink."""
    strategy = replace(TILED, dp=1, **changes)
    events = run(strategy, where=where)
    priced = price_strategies(LLAMA, load_platform(where), Strategy.stack([strategy]))
    assert float(priced["time"][0]) == pytest.approx(events.time, rel=0.01)


def test_tiles_and_whole_messages_are_priced_together_as_each_alone() -> None:
    """Gradients of weights that are put off run beside no message."""
    put_off = Strategy(tp=4, pp=2, sequence_parallel=True, tiled=True, schedule="zero_bubble")
    one = [SHARED, TILED, put_off, replace(put_off, tiled=False), replace(put_off, schedule="1f1b")]
    platform = load_platform("h100-sxm-8")
    together = price_strategies(LLAMA, platform, Strategy.stack(one))
    for place, strategy in enumerate(one):
        alone = price_strategies(LLAMA, platform, Strategy.stack([strategy]))
        assert together["time"][place] == pytest.approx(alone["time"][0], rel=1e-9)
        assert together["tensor"][place] == pytest.approx(alone["tensor"][0], rel=1e-9)


def test_tokens_reach_experts_in_two_levels_on_the_event_loop() -> None:
    """Where ranks that share experts fill several nodes; closed forms price the same messages."""
    model = replace(LLAMA, experts=16, top_k=2, layers=2, hidden=1024, inner=1024, batch=16)
    one_level = Strategy(dp=16, ep=16)
    two_levels = replace(one_level, two_level=True)
    platform = load_without_levels("a100-sxm-8x2")
    times = []
    for strategy in (one_level, two_levels):
        events = predict(model, platform, strategy=strategy)
        priced = price_strategies(model, platform, Strategy.stack([strategy]))
        assert float(priced["time"][0]) == pytest.approx(events.time, rel=0.03)
        timeline = events._timeline.rank_timelines[0]
        graph, collectives = timeline.graph, timeline.graph.collectives
        exchanged = {
            float(nbytes): duration
            for place, nbytes, duration in zip(
                collectives.tolist(),
                graph.column("nbytes")[collectives],
                timeline.times.durations,
                strict=True,
            )
            if graph.labels[place].name == "all_to_all"
        }
        [(nbytes, duration)] = exchanged.items()
        times.append(duration)
        algorithm = "two_level" if strategy.two_level else None
        asked = platform.collective("all_to_all", nbytes, ranks=16, algorithm=algorithm)
        assert duration == pytest.approx(asked.time)
    assert times[0] != times[1]
