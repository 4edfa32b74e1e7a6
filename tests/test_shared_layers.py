"""Messages of ranks that share a layer, counted by hand from the papers that describe each way.

One layer is exchanged as M. Shoeybi et al. do (arXiv:1909.08053, section 3: two all_reduce in each
pass) and D. Narayanan et al. (arXiv:2104.04473, section 2.3); where ranks share tokens too, as
V. Korthikanti et al. do (arXiv:2205.05198, section 4.2.2: four all_gather and four reduce_scatter).
Keys and values go around a ring (arXiv:2310.01889), are gathered (arXiv:2407.21783, section 3.3.2), or
tokens change places with heads (arXiv:2309.14509). Tokens go to experts and come back (arXiv:2006.16668, section 3).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from perfkit.platform.platform import Platform
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.micro_batches import PAIRS, PASSED
from perfkit.prediction.stages import make_stages
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer
from tests.levels import load_without_levels

BATCH = 2
SEQUENCE = 48
HIDDEN = 128
HEADS = 8
KV_HEADS = 4
MODEL = Transformer.preset(
    "llama-2-7b",
    batch=BATCH,
    sequence=SEQUENCE,
    layers=2,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    inner=320,
    vocabulary=1024,
    dtype="bf16",
)
TOKENS = BATCH * SEQUENCE
#: Activations of all tokens, in bf16 [B].
WHOLE = 2 * TOKENS * HIDDEN
#: A number in fp32 of each token [B].
OF_EACH_TOKEN = 4 * TOKENS


class Message(NamedTuple):
    """Where it is sent, with which operation, and its size [B]."""

    place: str
    operation: str
    nbytes: float


EMBEDDINGS = "embeddings"
ATTENTION = "layers.0.attention"
MLP = "layers.0.mlp"
HEAD = "head"


def repeat(count: int, place: str, operation: str, nbytes: float) -> list[Message]:
    return [Message(place, operation, nbytes) for _ in range(count)]


#: Of largest logit, sum of exponentials and logit of the label of each token.
OF_THE_LOSS = repeat(3, HEAD, "all_reduce", OF_EACH_TOKEN)

#: Ahead of the products of a half of a layer, and behind them.
TENSOR_FORWARD = [
    Message(EMBEDDINGS, "all_reduce", WHOLE),
    Message(ATTENTION, "all_reduce", WHOLE),
    Message(MLP, "all_reduce", WHOLE),
    *OF_THE_LOSS,
]
TENSOR_BACKWARD = [
    Message(HEAD, "all_reduce", WHOLE),
    Message(MLP, "all_reduce", WHOLE),
    Message(ATTENTION, "all_reduce", WHOLE),
]
SEQUENCE_FORWARD = [
    Message(EMBEDDINGS, "reduce_scatter", WHOLE),
    Message(ATTENTION, "all_gather", WHOLE),
    Message(ATTENTION, "reduce_scatter", WHOLE),
    Message(MLP, "all_gather", WHOLE),
    Message(MLP, "reduce_scatter", WHOLE),
    Message(HEAD, "all_gather", WHOLE),
    *OF_THE_LOSS,
]
SEQUENCE_BACKWARD = [
    Message(HEAD, "reduce_scatter", WHOLE),
    Message(MLP, "all_gather", WHOLE),
    Message(MLP, "reduce_scatter", WHOLE),
    Message(ATTENTION, "all_gather", WHOLE),
    Message(ATTENTION, "reduce_scatter", WHOLE),
    Message(EMBEDDINGS, "all_gather", WHOLE),
]


def of_layer(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.place.startswith("layers")]


def resize(messages: list[Message], factor: float) -> list[Message]:
    return [message._replace(nbytes=factor * message.nbytes) for message in messages]


#: Queries, and keys, of a quarter of the tokens [B].
QUERIES = WHOLE / 4
KEYS = QUERIES * KV_HEADS / HEADS
EXPERTS = {"experts": 4, "top_k": 2}
#: A quarter of the tokens, a copy for each of two experts.
ROUTED = repeat(2, MLP, "all_to_all", 2 * WHOLE / 4)
IN_EXPERTS = [Message(MLP, "all_gather", WHOLE), Message(MLP, "reduce_scatter", WHOLE)]


def without_mlp(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.place != MLP]


class Case(NamedTuple):
    """A way to share a layer, and the messages of a micro-batch forward and backward."""

    strategy: Strategy
    forward: list[Message]
    backward: list[Message]
    changes: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "nobody": Case(Strategy(micro_batch=BATCH), [], []),
    "tensor": Case(Strategy(tp=4, micro_batch=BATCH), TENSOR_FORWARD, TENSOR_BACKWARD),
    "tensor, fp32": Case(
        Strategy(tp=2, micro_batch=BATCH),
        # numbers of the loss have the same size
        [*resize(TENSOR_FORWARD[:3], 2), *OF_THE_LOSS],
        resize(TENSOR_BACKWARD, 2),
        {"dtype": "fp32"},
    ),
    "tensor, autocast": Case(
        Strategy(tp=4, micro_batch=BATCH), TENSOR_FORWARD, TENSOR_BACKWARD, {"mixed": True}
    ),
    "tensor, computed again": Case(
        Strategy(tp=4, micro_batch=BATCH, checkpoint="full"),
        TENSOR_FORWARD,
        TENSOR_BACKWARD + of_layer(TENSOR_FORWARD),
    ),
    "tensor, attention computed again": Case(
        Strategy(tp=4, micro_batch=BATCH, checkpoint="selective"), TENSOR_FORWARD, TENSOR_BACKWARD
    ),
    "tensor and tokens": Case(
        Strategy(tp=4, micro_batch=BATCH, sequence_parallel=True),
        SEQUENCE_FORWARD,
        SEQUENCE_BACKWARD,
    ),
    "tensor and tokens, computed again": Case(
        Strategy(tp=4, micro_batch=BATCH, sequence_parallel=True, checkpoint="full"),
        SEQUENCE_FORWARD,
        SEQUENCE_BACKWARD + of_layer(SEQUENCE_FORWARD),
    ),
    # keys and values, in the backward pass also their gradients, are passed on three times
    "context, ring": Case(
        Strategy(cp=4, micro_batch=BATCH),
        repeat(3, ATTENTION, "send_recv", 2 * KEYS),
        repeat(3, ATTENTION, "send_recv", 4 * KEYS),
    ),
    "context, ring, attention computed again": Case(
        Strategy(cp=4, micro_batch=BATCH, checkpoint="selective"),
        repeat(3, ATTENTION, "send_recv", 2 * KEYS),
        repeat(3, ATTENTION, "send_recv", 2 * KEYS) + repeat(3, ATTENTION, "send_recv", 4 * KEYS),
    ),
    # those of all tokens: keys and values, and behind the backward pass their gradients
    "context, all_gather": Case(
        Strategy(cp=4, micro_batch=BATCH, cp_kind="all_gather"),
        repeat(2, ATTENTION, "all_gather", 4 * KEYS),
        repeat(2, ATTENTION, "all_gather", 4 * KEYS)
        + repeat(2, ATTENTION, "reduce_scatter", 4 * KEYS),
    ),
    "context, all_gather, attention computed again": Case(
        Strategy(cp=4, micro_batch=BATCH, cp_kind="all_gather", checkpoint="selective"),
        repeat(2, ATTENTION, "all_gather", 4 * KEYS),
        repeat(4, ATTENTION, "all_gather", 4 * KEYS)
        + repeat(2, ATTENTION, "reduce_scatter", 4 * KEYS),
    ),
    # queries and results, keys and values
    "context, ulysses": Case(
        Strategy(cp=4, micro_batch=BATCH, cp_kind="ulysses"),
        repeat(4, ATTENTION, "all_to_all", (2 * QUERIES + 2 * KEYS) / 4),
        repeat(4, ATTENTION, "all_to_all", (2 * QUERIES + 2 * KEYS) / 4),
    ),
    # one head of keys for each rank: two are repeated to four
    "context, ulysses, fewer keys than ranks": Case(
        Strategy(cp=4, micro_batch=BATCH, cp_kind="ulysses"),
        repeat(4, ATTENTION, "all_to_all", (2 * QUERIES + 2 * KEYS) / 4),
        repeat(4, ATTENTION, "all_to_all", (2 * QUERIES + 2 * KEYS) / 4),
        {"kv_heads": 2},
    ),
    # each rank has half of the tokens and half of the heads
    "tensor and context": Case(
        Strategy(tp=2, cp=2, micro_batch=BATCH),
        resize(TENSOR_FORWARD, 1 / 2) + repeat(1, ATTENTION, "send_recv", 2 * KEYS),
        resize(TENSOR_BACKWARD, 1 / 2) + repeat(1, ATTENTION, "send_recv", 4 * KEYS),
    ),
    # each token goes to two of the experts, and comes back
    "experts": Case(
        Strategy(dp=2, ep=2),
        repeat(2, MLP, "all_to_all", 2 * WHOLE / 2),
        repeat(2, MLP, "all_to_all", 2 * WHOLE / 2),
        EXPERTS,
    ),
    "experts, computed again": Case(
        Strategy(dp=2, ep=2, checkpoint="full"),
        repeat(2, MLP, "all_to_all", 2 * WHOLE / 2),
        repeat(4, MLP, "all_to_all", 2 * WHOLE / 2),
        EXPERTS,
    ),
    # each rank sends its own half of the tokens, and nothing is gathered for experts
    "experts on all ranks": Case(
        Strategy(tp=2, ep=2, micro_batch=BATCH, sequence_parallel=True),
        without_mlp(SEQUENCE_FORWARD) + repeat(2, MLP, "all_to_all", 2 * WHOLE / 2),
        without_mlp(SEQUENCE_BACKWARD) + repeat(2, MLP, "all_to_all", 2 * WHOLE / 2),
        EXPERTS,
    ),
    # two ranks share the products of an expert, and gather the tokens of both
    "parts of experts on all ranks": Case(
        Strategy(tp=4, ep=2, etp=2, micro_batch=BATCH, sequence_parallel=True),
        without_mlp(SEQUENCE_FORWARD) + ROUTED + IN_EXPERTS,
        without_mlp(SEQUENCE_BACKWARD) + ROUTED + IN_EXPERTS,
        EXPERTS,
    ),
    # all of the tokens go to two of the four experts, which lie on the first rank
    "experts out of balance": Case(
        Strategy(dp=2, ep=2),
        repeat(2, MLP, "all_to_all", 2 * 2 * WHOLE / 2),
        repeat(2, MLP, "all_to_all", 2 * 2 * WHOLE / 2),
        {**EXPERTS, "imbalance": (4.0, 4.0, 0.0, 0.0)},
    ),
    "experts with room": Case(
        Strategy(dp=2, ep=2),
        repeat(2, MLP, "all_to_all", 1.5 * 2 * WHOLE / 2),
        repeat(2, MLP, "all_to_all", 1.5 * 2 * WHOLE / 2),
        {**EXPERTS, "capacity": 1.5},
    ),
}


def make_model(case: Case) -> Transformer:
    return replace(MODEL, **case.changes)


def list_messages(case: Case, phase: str) -> list[Message]:
    """Messages of the first rank in a pass through one layer and the ends, but for those of
    replicas."""
    graph = make_stages(make_model(case), load_without_levels("a100-sxm-8"), case.strategy)[0]
    nbytes = graph.column("nbytes")
    groups = graph.column("group")
    messages = []
    for place in graph.collectives.tolist():
        label = graph.labels[place]
        if label.phase == phase and groups[place] < PASSED and "layers.1" not in label.module:
            messages.append(Message(label.module, label.name, float(nbytes[place])))
    return messages


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_layer_send_what_papers_count(name: str) -> None:
    case = CASES[name]
    for phase, counted in (("forward", case.forward), ("backward", case.backward)):
        assert Counter(list_messages(case, phase)) == Counter(counted), phase


def list_all_messages(case: Case) -> list[Message]:
    """Those of both passes, through two layers."""
    messages = case.forward + case.backward
    return messages + of_layer(messages)


def find_ranks(strategy: Strategy, place: str, operation: str) -> int:
    """How many ranks take part in a message."""
    if strategy.spreads_experts and place == MLP and operation != "all_to_all":
        return int(strategy.ranks_of_expert)
    if operation == "send_recv":
        return 2
    if operation == "all_to_all":
        return int(max(strategy.cp, strategy.ep))
    return int(max(strategy.cp, strategy.tp))


@pytest.mark.parametrize("name", CASES)
def test_closed_forms_have_the_same_messages(name: str) -> None:
    """Between two links that are so slow that kernels hide next to nothing, iterations differ by
    the times of the messages."""
    case = CASES[name]

    def price(platform: Platform) -> float:
        prices = price_strategies(make_model(case), platform, Strategy.stack([case.strategy]))
        return float(prices["tensor"][0] + prices["context"][0] + prices["experts"][0])

    def add_up(platform: Platform) -> float:
        messages = MessageTimes(platform)
        times = []
        for place, operation, nbytes in list_all_messages(case):
            ranks = find_ranks(case.strategy, place, operation)
            times.append(messages.time(operation, np.array([nbytes]), ranks, 1)[0])
        return float(np.sum(times))

    a100 = load_without_levels("a100-sxm-8")
    slow = a100.with_link("intra", bandwidth=2e6, latency=1e-3)
    slower = a100.with_link("intra", bandwidth=1e6, latency=1e-3)
    assert price(slower) - price(slow) == pytest.approx(add_up(slower) - add_up(slow), rel=1e-9)


def test_stages_pass_on_what_each_rank_holds() -> None:
    """All ranks hold the activations of all tokens, or each the part whose tokens it shares."""
    for shared, held in ((False, WHOLE), (True, WHOLE / 4)):
        strategy = Strategy(tp=4, pp=2, micro_batch=BATCH, sequence_parallel=shared)
        stages = make_stages(MODEL, load_without_levels("a100-sxm-8"), strategy)
        for graph in (stages[0], stages[-1]):
            groups = graph.column("group")
            between = [place for place in graph.collectives.tolist() if groups[place] >= PAIRS]
            assert [graph.labels[place].name for place in between] == ["send_recv", "send_recv"]
            assert {graph.labels[place].phase for place in between} == {"forward", "backward"}
            assert graph.column("nbytes")[between].tolist() == [held, held]
