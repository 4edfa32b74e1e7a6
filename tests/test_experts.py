"""Mixtures of experts: where tokens go, how long they take, and how ranks share experts."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.deepseek import compare_case, list_cases
from perfkit.exploration.strategies import explore
from perfkit.ground.files import find_reference
from perfkit.models.experts import (
    Imbalance,
    busiest_rank,
    dispatched_bytes,
    reached_groups,
    share_tokens,
)
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernels import GROUPED_SHARES, find_stand_in
from perfkit.prediction.micro_batches import size_micro_batch
from perfkit.prediction.predictor import predict
from perfkit.prediction.stages import make_stages
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.stack import find_stack, share_states
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

MODEL = Transformer.preset(
    "llama-2-7b",
    layers=4,
    hidden=2048,
    heads=16,
    kv_heads=16,
    inner=1024,
    batch=64,
    sequence=1024,
    experts=16,
    top_k=4,
    dtype="bf16",
    mixed=True,
    fused=True,
)
CLUSTER = "h100-sxm-8x2"


def price(model: Transformer, strategy: Strategy, execution: str = "compiled") -> dict[str, float]:
    columns = price_strategies(model, load_platform(CLUSTER), Strategy.stack([strategy]), execution)
    return {name: float(values[0]) for name, values in columns.items()}


# Where tokens go.


def test_a_token_reaches_groups_that_hold_one_of_its_experts() -> None:
    # of two groups of two experts, a token with two misses one in 1 of 6 cases
    assert reached_groups(2, experts=4, top_k=2) == pytest.approx(2 * 5 / 6)
    assert reached_groups(4, experts=4, top_k=3) == pytest.approx(3)
    assert reached_groups(1, experts=4, top_k=1) == 1


#: Ranks, nodes, bandwidths inside and between [GB/s], and what DeepEP states of dispatch and combine
#: [GB/s] for 256 experts, of which 8 for a token. In one node it counts a token once for each rank,
#: otherwise once for each node, its own included.
DEEPEP = {
    "8 H800 (fitted)": (8, 1, 200, 50, 153, 158),
    "16 H800": (16, 2, 200, 50, 43, 43),
    "32 H800 (fitted)": (32, 4, 200, 50, 58, 57),
    "16 H100": (16, 2, 450, 50, 90, 81),
    "32 H100": (32, 4, 450, 50, 61, 61),
    "16 B200": (16, 2, 900, 50, 90, 91),
    "8 B200": (8, 1, 900, 50, 726, 740),
    "8 B200, 24 multiprocessors": (8, 1, 900, 50, 643, 675),
    "64 H800, four groups": (64, 8, 200, 50, 51, 50),
}
#: DeepSeek-V3: four of eight groups of experts.
LIMITED = {"expert_groups": 8, "top_groups": 4}


@pytest.mark.parametrize("name", DEEPEP)
def test_tokens_sent_once_take_what_deepep_states(name: str) -> None:
    ranks, nodes, inside, between, *stated = DEEPEP[name]
    link = between if nodes > 1 else inside
    routing: dict[str, Any] = {"experts": 256, "top_k": 8}
    if name.endswith("four groups"):
        routing |= LIMITED
    nbytes = dispatched_bytes(
        1.0, ranks=ranks, nodes=nodes, inside=inside, between=between, **routing
    )
    counted = reached_groups(nodes if nodes > 1 else ranks, **routing)
    for figure in stated:
        assert counted * link / nbytes == pytest.approx(figure, rel=0.1)


@pytest.mark.parametrize("places", [2, 4, 8, 16, 64])
def test_a_router_that_takes_some_groups_reaches_fewer_places(places: int) -> None:
    """As counted of 4,000 tokens of which each takes eight experts of four of eight groups."""
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(4000):
        groups = rng.permutation(8)[:4]
        experts = rng.permutation(128)[:8]
        chosen = groups[experts // 32] * 32 + experts % 32
        reached += len({*(chosen * places // 256).tolist()})
    counted = reached_groups(places, experts=256, top_k=8, **LIMITED)
    assert counted == pytest.approx(reached / 4000, rel=0.01)
    assert counted < reached_groups(places, experts=256, top_k=8)


def test_groups_of_experts_are_those_of_the_configuration() -> None:
    model = Transformer.preset("deepseek-v3", batch=1)
    assert (model.expert_groups, model.top_groups) == (8, 4)
    sizes = {"batch": 64, "sequence": 4096, "layers": 1, "dense_layers": 0}
    limited = Transformer.preset("deepseek-v3", **sizes)
    free = replace(limited, expert_groups=0, top_groups=0)
    once = Strategy(dp=64, ep=64, dispatch="once")
    # 4 (1 - C(96, 8) / C(128, 8)) of 8 nodes, beside 8 (1 - C(224, 8) / C(256, 8))
    cluster = load_platform("h100-sxm-8").with_nodes(8)
    exchanged = []
    for model in (limited, free):
        columns = price_strategies(model, cluster, Strategy.stack([once]))
        exchanged.append(float(columns["experts"][0]))
    ratio = exchanged[0] / exchanged[1]
    assert ratio == pytest.approx(3.634 / 5.298, rel=0.01)
    for wrong, text in (
        ({"expert_groups": 7, "top_groups": 2}, "expert_groups is 7; it must divide experts"),
        ({"expert_groups": 256, "top_groups": 4}, "top_groups is 4; of 256"),
        ({"expert_groups": 0, "top_groups": 2}, "expert_groups is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            replace(limited, **wrong)


def test_tokens_sent_once_cross_nodes_once() -> None:
    """Eight copies of which half leave the node, or one: the links between nodes decide."""
    model = replace(MODEL, experts=128, top_k=8)
    often = price(model, Strategy(dp=16, ep=16))
    once = price(model, Strategy(dp=16, ep=16, dispatch="once"))
    assert often["experts"] > 4 * once["experts"]
    assert often["work"] > once["work"]  # rows come in the order of experts


def test_the_busiest_rank_has_its_share_of_the_tokens() -> None:
    counts = Imbalance(counts=(4.0, 2.0, 1.0, 1.0))
    assert busiest_rank(counts, 4, 4, top_k=1) == 2.0
    assert busiest_rank(counts, 4, 2, top_k=1) == 1.5
    assert busiest_rank(counts, 4, 1, top_k=1) == 1.0
    # one expert on a rank: the first of Zipf's law has 1 / (1 + 1/2 + 1/3 + 1/4)
    assert busiest_rank(Imbalance(exponent=1.0), 4, 4, top_k=1) == pytest.approx(4 / (25 / 12))
    loads = [
        busiest_rank(Imbalance(exponent=1.0), 128, ranks, top_k=1) for ranks in (2, 8, 32, 128)
    ]
    assert loads == sorted(loads)


def test_an_expert_gets_each_token_at_most_once() -> None:
    """Zipf 2 would give the first of eight experts 65 % of all copies, 1.31 of each token."""
    law = np.arange(1.0, 9.0) ** -2.0
    shares = share_tokens(2.0, 8, 2)
    assert shares[0] == 0.5
    assert shares[1:] == pytest.approx(0.5 * law[1:] / law[1:].sum())
    # the second one is above 1/3 once the first is cut, and the third too
    assert share_tokens(10.0, 8, 3)[:2].tolist() == [1 / 3, 1 / 3]
    for exponent in (0.0, 0.3, 1.0, 2.0, 10.0):
        for top_k in range(1, 9):
            shares = share_tokens(exponent, 8, top_k)
            assert shares.sum() == pytest.approx(1.0)
            assert (shares >= 0.0).all()
            assert shares.max() <= (1.0 + 1e-12) / top_k
            load = busiest_rank(Imbalance(exponent=exponent), 8, 8, top_k=top_k)
            assert load <= 8 / top_k * (1.0 + 1e-12)
    # all experts for each token: the law has nothing to say
    assert share_tokens(2.0, 8, 8) == pytest.approx(np.full(8, 1 / 8))
    # what the law gives to nobody twice is as it was
    assert share_tokens(1.0, 8, 2) == pytest.approx((1 / np.arange(1, 9)) / (761 / 280))


def test_measured_counts_that_no_routing_can_give_are_refused() -> None:
    few = {"experts": 8, "top_k": 2}
    message = (
        r"imbalance gives expert 0 1 of all copies .* top_k 2 .* which is 1/2 of the copies; give"
    )
    with pytest.raises(ValueError, match=message):
        replace(MODEL, imbalance=[1.0] + [0.0] * 7, **few)
    with pytest.raises(ValueError, match=r"expert 2 0\.5556 of all copies"):
        replace(MODEL, imbalance=[1, 1, 5, 1, 1, 0, 0, 0], **few)
    assert replace(MODEL, imbalance=[4, 1, 1, 1, 1, 0, 0, 0], **few).spread_of_tokens.counts[0] == 4
    assert replace(MODEL, imbalance=[1.0] + [0.0] * 7, experts=8, top_k=1)
    thirds = replace(MODEL, imbalance=[0.1, 0.1, 0.1, 0.0], experts=4, top_k=3)
    assert not thirds.spread_of_tokens.is_balanced


def test_imbalance_makes_messages_and_products_of_the_busiest_rank_longer() -> None:
    strategy = Strategy(dp=16, ep=16, zero=1)
    even = price(MODEL, strategy)
    twice = [2.0] + [14 / 15] * 15
    uneven = price(replace(MODEL, imbalance=twice), strategy)
    assert 1.7 * even["experts"] < uneven["experts"] < 2 * even["experts"]  # but for start-up
    assert 1.1 * even["work"] < uneven["work"] < 2 * even["work"]
    assert uneven["needs"] > even["needs"]
    again = price(replace(MODEL, imbalance=[3.0] * 16), strategy)
    assert again["time"] == even["time"]
    with pytest.raises(ValueError, match="imbalance has 2 counts and the model 16 experts"):
        replace(MODEL, imbalance=(1.0, 2.0))
    with pytest.raises(ValueError, match="imbalance has no tokens"):
        replace(MODEL, imbalance=[0.0] * 16)
    with pytest.raises(ValueError, match="imbalance is -1"):
        replace(MODEL, imbalance=-1.0)


def test_counts_of_tokens_may_be_an_array() -> None:
    assert replace(MODEL, imbalance=np.arange(16)).imbalance == tuple(range(16))
    with pytest.raises(ValueError, match="imbalance is b'1234567890123456'; it must be a number"):
        replace(MODEL, imbalance=b"1234567890123456")  # type: ignore[arg-type]


def test_what_only_experts_have_is_refused_without_them() -> None:
    dense = replace(MODEL, experts=0, top_k=1)
    with pytest.raises(ValueError, match=r"imbalance is 0\.5 and the model has no experts; give"):
        replace(dense, imbalance=0.5)
    with pytest.raises(ValueError, match="cannot share experts of the model, 0"):
        predict(dense, CLUSTER, strategy=Strategy(dp=16, etp=2))
    with keep_quiet():
        assert predict(dense, CLUSTER, strategy=Strategy(dp=16, etp=1)).time > 0


def test_tokens_are_sent_once_over_links_that_are_known() -> None:
    """Collectives may be measured where no link is stated."""
    cluster = load_platform(CLUSTER)
    strategy = Strategy(dp=16, ep=16, dispatch="once")
    for name, link in (("intra", "inter"), ("inter", "intra")):
        links = {link: cluster.network.links[link]}
        platform = replace(cluster, network=replace(cluster.network, links=links))
        with (
            keep_quiet(),
            pytest.raises(ValueError, match=f"knows no {name} link, whose bandwidth"),
        ):
            predict(MODEL, platform, strategy=strategy)


# What a rank does.


def list_names(model: Transformer, strategy: Strategy) -> list[str]:
    """Operations of the first layer forward, as they were recorded."""
    graph = make_stages(model, load_platform(CLUSTER), strategy, "eager")[0]
    return [label.name for label in graph.labels if label.module == "layers.0.mlp"]


def test_tokens_are_copied_into_the_order_of_experts_and_back() -> None:
    """One copy for each expert and, with several experts and copies from several ranks, one more."""
    counts = {}
    for name, strategy in {
        "alone": Strategy(dp=2, zero=1),
        "one expert": Strategy(dp=16, ep=16, micro_batch=4),
        "several": Strategy(dp=16, ep=8, micro_batch=4),
        "once": Strategy(dp=16, ep=8, micro_batch=4, dispatch="once"),
    }.items():
        small = replace(MODEL, layers=1, batch=strategy.dp * strategy.micro_batch)
        names = list_names(small, strategy)
        counts[name] = (names.count("moe_permute"), names.count("moe_unpermute"))
    assert counts["alone"] == counts["one expert"] == counts["once"] == (2, 2)
    assert counts["several"] == (6, 2)


def test_weights_of_tokens_are_a_kernel_of_their_own_unless_fused() -> None:
    strategy = Strategy(dp=16, ep=8, zero=1)
    apart = price(MODEL, strategy, "eager")
    fused = price(replace(MODEL, fused_permutation=True), strategy, "eager")
    # 16 micro-batches of 4 layers; forward the copies are read and written once less
    rows = 2.0 * 1024 * 4 * 2048
    least = 4 * 4 * 2 * rows / 3.35e12
    assert apart["work"] - fused["work"] > least


def test_products_of_experts_are_slower_than_batched_ones_as_they_were_measured() -> None:
    """The shares were fitted to 8 and 128 experts."""
    with find_reference("measured", "h200-2.survey.json").open() as file:
        survey = json.load(file)
    times: dict[str, dict[int, float]] = {}
    for section, name, _, sizes, medians, _, failed in survey["rows"]:
        if section == "grouped" and sizes["batch"] == 64 and not failed:
            times.setdefault(name, {})[sizes["m"]] = float(np.mean(medians))
    layouts = {
        "grouped": "nn",
        "grouped_input_gradient": "nt",
        "grouped_weight_gradient": "tn",
    }
    for name, layout in layouts.items():
        shares = GROUPED_SHARES[layout]
        few = times[name][8] / times["batched"][8]  # bound by reading weights
        many = times[name][512] / times["batched"][512]
        assert 1 / shares.memory == pytest.approx(few, rel=0.15)
        assert 1 / shares.compute == pytest.approx(many, rel=0.15)


def test_fits_of_groups_are_those_of_batched_products_with_their_shares() -> None:
    kernels = load_platform("h100-sxm-8").kernels
    plain = find_stand_in(kernels, "bmm", variant="tn", dtype="bf16")
    grouped = find_stand_in(kernels, "bmm", variant="grouped.tn", dtype="bf16")
    assert plain is not None
    assert grouped is not None
    shares = GROUPED_SHARES["tn"]
    for name, share in (
        ("memory_efficiency", shares.memory),
        ("compute_efficiency", shares.compute),
    ):
        assert grouped[name] == pytest.approx(share * plain[name])
    assert grouped.spread > plain.spread
    narrow = find_stand_in(kernels, "bmm", variant="grouped.nn", dtype="fp8")
    assert narrow is not None
    assert narrow["compute_efficiency"] == kernels["gemm.fp8"]["compute_efficiency"]


def test_products_of_experts_run_in_fp8_where_the_model_does() -> None:
    strategy = Strategy(dp=16, ep=8, zero=1, micro_batch=4)
    names = list_names(replace(MODEL, dtype="fp8", batch=64, layers=1), strategy)
    assert names.count("_scaled_grouped_mm") == 9
    assert "_grouped_mm" not in names
    # buffers that are padded to as many rows for each expert
    padded = list_names(replace(MODEL, capacity=1.5, batch=64, layers=1), strategy)
    assert padded.count("bmm") == 9


# How ranks share experts.


def test_experts_on_all_ranks_are_stored_and_reduced_among_fewer() -> None:
    """Megatron's count: expert data parallel is tp cp dp / (ep etp)."""
    matrices = 3 * 2048 * 1024
    for strategy, held, sharers in (
        (Strategy(tp=2, dp=8, ep=16, sequence_parallel=True, zero=1), 1.0, 1),
        (Strategy(tp=2, dp=8, ep=8, etp=1, sequence_parallel=True, zero=1), 2.0, 2),
        (Strategy(tp=2, dp=8, ep=4, etp=2, sequence_parallel=True, zero=1), 2.0, 2),
        (Strategy(tp=2, dp=8, ep=4, zero=1), 2.0, 2),
        (Strategy(tp=2, cp=2, dp=4, ep=16, sequence_parallel=True, zero=1), 1.0, 1),
    ):
        sizes = size_micro_batch(MODEL, strategy)
        assert sizes.experts == held * matrices, strategy
        assert sizes.sharers == sharers, strategy


def test_experts_on_all_ranks_send_the_tokens_of_a_rank() -> None:
    """Twice as many ranks of two share the tokens that each of replicas sends whole."""
    whole = size_micro_batch(MODEL, Strategy(tp=2, dp=8, ep=8, sequence_parallel=True))
    own = size_micro_batch(MODEL, Strategy(tp=2, dp=8, ep=16, sequence_parallel=True))
    assert own.routed == whole.routed / 2


CASES: tuple[dict[str, Any], ...] = (
    {"dp": 16, "ep": 8},
    {"dp": 16, "ep": 16, "dispatch": "once", "zero": 1},
    {"tp": 2, "dp": 8, "ep": 16, "sequence_parallel": True},
    {"tp": 4, "dp": 4, "ep": 4, "etp": 1, "sequence_parallel": True},
    {"tp": 2, "dp": 8, "ep": 4, "etp": 2, "sequence_parallel": True, "zero": 1},
    {"tp": 2, "cp": 2, "dp": 4, "ep": 16, "sequence_parallel": True, "zero": 1},
    {"tp": 2, "pp": 2, "dp": 4, "ep": 8, "sequence_parallel": True, "zero": 1},
    {"dp": 8, "ep": 2, "etp": 2, "zero": 1},
    {"dp": 16, "ep": 16, "overlap_experts": True},
    {"dp": 16, "ep": 8, "overlap_experts": True, "dispatch": "once", "zero": 1},
    {"tp": 2, "dp": 8, "ep": 16, "sequence_parallel": True, "overlap_experts": True, "zero": 1},
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_closed_forms_agree_with_the_event_loop(case: dict[str, Any], execution: str) -> None:
    for model in (MODEL, replace(MODEL, imbalance=0.7, fused_permutation=True)):
        for micro_batch in (1, 2):
            strategy = Strategy(micro_batch=micro_batch, **case)
            closed = price(model, strategy, execution)
            with keep_quiet():
                events = predict(model, CLUSTER, strategy=strategy, execution=execution)
            assert events.time == pytest.approx(closed["time"], rel=0.03)
            assert events.memory().total == pytest.approx(closed["needs"], rel=0.03)


# Exchanges beside the kernels of another micro-batch.


def test_exchanges_are_hidden_by_the_kernels_of_another_micro_batch() -> None:
    """Where kernels are not slower beside messages, those of a pass hide what is shorter than they
    are; the first forward pass and the last backward pass have no partner."""
    platform = load_platform(CLUSTER)
    without = replace(platform, context=replace(platform.context, overlap=None))
    strategy = Strategy(dp=16, ep=8, micro_batch=1)
    stacked = Strategy.stack([strategy, replace(strategy, overlap_experts=True)])
    alone, beside = price_strategies(MODEL, without, stacked, "compiled")["experts"]
    # of four micro-batches three have a partner; messages of a node are shorter than kernels
    assert beside == pytest.approx(alone / 4)


def test_messages_that_take_longer_than_kernels_are_not_hidden_whole() -> None:
    slow = load_platform(CLUSTER).with_link("inter", bandwidth=1e9)
    strategy = Strategy(dp=16, ep=16, micro_batch=1)
    stacked = Strategy.stack([strategy, replace(strategy, overlap_experts=True)])
    columns = price_strategies(MODEL, slow, stacked, "compiled")
    alone, beside = columns["experts"]
    assert alone - beside < 0.75 * columns["work"][0]
    assert beside > 0.5 * alone


def test_one_micro_batch_has_no_partner() -> None:
    strategy = Strategy(dp=16, ep=16, micro_batch=4)
    alone = price(MODEL, strategy)
    beside = price(MODEL, replace(strategy, overlap_experts=True))
    assert beside == alone


def test_a_second_micro_batch_is_held_beside_the_first() -> None:
    strategy = Strategy(dp=16, ep=8, micro_batch=1)
    alone = price(MODEL, strategy)
    beside = price(MODEL, replace(strategy, overlap_experts=True))
    assert beside["activations"] > 1.3 * alone["activations"]


def test_stages_overlap_in_closed_forms_alone() -> None:
    strategy = Strategy(
        pp=2,
        dp=8,
        ep=8,
        schedule="interleaved",
        chunks=2,
        overlap_experts=True,
    )
    alone = price(MODEL, replace(strategy, overlap_experts=False))
    assert price(MODEL, strategy)["experts"] < alone["experts"]
    with pytest.raises(ValueError, match="overlap_experts with several stages, which only closed"):
        predict(MODEL, CLUSTER, strategy=strategy)


def test_a_stack_overlaps_exchanges_where_it_can() -> None:
    stack = replace(find_stack("megatron"), overlaps_experts=True)
    assert share_states(MODEL, Strategy(dp=8, ep=8), stack).overlap_experts
    assert not share_states(MODEL, Strategy(dp=8), stack).overlap_experts
    assert not share_states(MODEL, Strategy(dp=8, ep=8, checkpoint="full"), stack).overlap_experts
    assert not share_states(MODEL, Strategy(pp=2, dp=8, ep=8), stack).overlap_experts


def test_tokens_are_not_sent_once_over_regions() -> None:
    regions = load_platform("h100-sxm-8").with_nodes(2, regions=2)
    stacked = Strategy.stack([Strategy(dp=16, ep=16, dispatch="once")])
    with pytest.raises(ValueError, match="dispatch is 'once' among ranks of several regions"):
        price_strategies(MODEL, regions, stacked)


def test_a_search_spreads_experts_over_all_ranks_of_a_stage() -> None:
    found = explore(replace(MODEL, batch=16), "h100-sxm-8", 8).table()
    spread = found.filter(found["dp"] % found["ep"] != 0)
    assert len(spread)
    assert (spread["tp"] * spread["cp"] * spread["dp"] % spread["ep"] == 0).all()


def test_a_published_step_whose_tokens_go_to_one_node() -> None:
    """NeMo AutoModel, DeepSeek-V3 on 256 H100: 1,002 tokens a second and GPU. Its gate gives a token
    eight experts in a row, on two ranks of one node."""
    [case] = [case for case in list_cases() if case.name == "AutoModel, 256 H100"]
    routing = {"experts": 256, "top_k": 8, "expert_groups": 32, "top_groups": 1}
    assert reached_groups(8, **routing) == pytest.approx(1)
    assert reached_groups(64, **routing) == pytest.approx(2)
    assert abs(compare_case(case)["error"]) < 0.06
    free = replace(case.model, expert_groups=0, top_groups=0)
    assert compare_case(case._replace(model=free))["error"] < -0.25
