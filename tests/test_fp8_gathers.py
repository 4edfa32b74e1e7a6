"""Weights that ranks gather in fp8: messages by hand, what is cast, and both roads."""

from dataclasses import replace

import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.workloads.stack import apply_stack, find_stack, note_unpriced
from tests.levels import load_without_levels

CLUSTER = load_without_levels("h100-sxm-8x8")
MODEL = pk.Transformer.preset(
    "gpt3-6.7b",
    batch=64,
    sequence=2048,
    dtype="fp8",
    fp8_recipe="tensorwise",
    mixed=True,
    fused=True,
    layers=4,
)
#: A layer: its products, and biases and norms.
PRODUCTS, OTHERS = 12 * 4096**2, (3 + 1 + 4 + 1 + 4) * 4096
#: Words that eight ranks divide, positions, and the last norm.
ENDS = (50264 + 2048 + 2) * 4096


def list_gathers(graph: pk.Graph) -> list[float]:
    """Bytes of the gathers of a graph, in their order."""
    names = [label.name for label in graph.labels]
    return [
        float(nbytes)
        for name, nbytes in zip(names, graph.column("nbytes"), strict=True)
        if name == "all_gather"
    ]


def test_products_in_fp8_are_gathered_in_one_byte_and_all_else_in_two() -> None:
    graphs = {}
    for gathers in (False, True):
        model = replace(MODEL, layers=2, parallel="fsdp", fp8_gathers=gathers)
        graphs[gathers] = model.graphs(8, None, accelerator=True)[0]
    for gathers, nbytes in ((False, 2), (True, 1)):
        layer = nbytes * PRODUCTS + 2 * OTHERS
        assert list_gathers(graphs[gathers]) == [2 * ENDS, layer, layer, layer, layer]
        casts = [label for label in graphs[gathers].labels if label.name == "cast_scaled"]
        # four inputs of a layer and four gradients of results; weights where they come in bf16
        forward = [label for label in casts if label.phase == "forward"]
        assert len(forward) == 2 * (4 if gathers else 8)
        assert len(casts) - len(forward) == 2 * 4


def test_ranks_copy_their_shards_narrow_and_unpack_bytes() -> None:
    model = replace(MODEL, layers=1, parallel="zero2", fp8_gathers=True)
    graph = model.graphs(8, None, accelerator=True)[0]
    accesses = graph.accesses
    moved = {}
    for row, label in enumerate(graph.labels):
        if label.name in ("_foreach_copy_", "split_with_sizes_copy"):
            nbytes = float(accesses.nbytes[accesses.operation == row].sum())
            moved.setdefault(label.name, []).append(nbytes)
    layer = PRODUCTS + 2 * OTHERS
    assert moved["split_with_sizes_copy"] == [4 * ENDS - 2 * 7 * 4096, 2 * layer]
    shards = 4 * (PRODUCTS + OTHERS) / 8 + layer / 8
    assert moved["_foreach_copy_"] == [pytest.approx(6 * ENDS / 8), pytest.approx(shards)]


@pytest.mark.parametrize("execution", ["eager", "compiled"])
@pytest.mark.parametrize(
    "strategy",
    [
        pk.Strategy(dp=64, micro_batch=1, zero=3),
        pk.Strategy(dp=16, micro_batch=2, zero=2),
        pk.Strategy(dp=16, micro_batch=2, zero=1),
        pk.Strategy(tp=2, dp=4, micro_batch=2, zero=3, sequence_parallel=True),
        pk.Strategy(pp=2, dp=8, micro_batch=2, zero=3),
    ],
    ids=["zero3", "zero2", "zero1", "tensor", "stages"],
)
def test_closed_forms_price_gathers_as_the_event_loop_does(
    strategy: pk.Strategy, execution: str
) -> None:
    times, memory, sent = {}, {}, {}
    for gathers in (False, True):
        model = replace(MODEL, fp8_gathers=gathers)
        with keep_quiet():
            run = pk.predict(model, CLUSTER, strategy=strategy, execution=execution)
            closed = pk.explore(
                model, CLUSTER, strategies=[strategy], execution=execution, memory=1e13
            ).table()
        assert closed["time_s"][0] == pytest.approx(run.time, rel=0.015)
        assert closed["needs_bytes"][0] == pytest.approx(run.memory().total, rel=5e-3)
        times[gathers], memory[gathers] = run.time, run.memory().total
        messages = run.timeline().filter(rank=0, name="all_gather")
        sent[gathers] = float((messages["end_s"] - messages["start_s"]).sum())
    assert times[True] < times[False]
    assert memory[True] < memory[False]
    if strategy.tp == 1:
        assert 0.5 < sent[True] / sent[False] < 0.75


def test_experts_are_gathered_as_they_are() -> None:
    """Eight experts of 8 × 4096² weights each; attention has 4 × 4096² and a router 8 × 4096."""
    model = replace(MODEL, layers=1, experts=8, parallel="fsdp", bias=False)
    plain = list_gathers(model.graphs(8, None, accelerator=True)[0])
    narrow = replace(model, fp8_gathers=True)
    found = list_gathers(narrow.graphs(8, None, accelerator=True)[0])
    assert plain[1] - found[1] == 4 * 4096**2


def test_what_does_not_gather_in_fp8_is_not_changed() -> None:
    stack = replace(find_stack("torchtitan"), fp8_gathers=True)
    bf16 = replace(MODEL, dtype="bf16", fp8_recipe="")
    with keep_quiet():
        plain = pk.predict(bf16, CLUSTER, ranks=8, stack="torchtitan")
        assert pk.predict(bf16, CLUSTER, ranks=8, stack=stack).time == plain.time
        alone = pk.predict(MODEL, CLUSTER, ranks=8)
        assert pk.predict(replace(MODEL, fp8_gathers=True), CLUSTER, ranks=8).time == alone.time


def test_a_stack_says_whether_weights_are_gathered_in_fp8() -> None:
    stack = replace(find_stack("torchtitan"), fp8_gathers=True)
    work = apply_stack(MODEL, None, None, stack)
    assert work.workload.fp8_gathers
    assert work.stacks[0].fp8_gathers
    assert not note_unpriced(MODEL, stack)
    # Megatron-LM gathers what it has updated into buffers
    megatron = replace(find_stack("megatron-te"), fp8_gathers=True)
    assert not apply_stack(MODEL, None, None, megatron).workload.fp8_gathers
    assert "fp8_gathers is stated and not priced" in note_unpriced(MODEL, megatron)[0]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_scales_along_a_side_cannot_be_gathered(recipe: str) -> None:
    with pytest.raises(ValueError, match=f"fp8_gathers is True and fp8_recipe '{recipe}'"):
        replace(MODEL, fp8_recipe=recipe, fp8_gathers=True)
