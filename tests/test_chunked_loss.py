"""Cross entropy in pieces: its operations beside PyTorch's, its memory by hand, and both roads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.workloads.graph import Label
from perfkit.workloads.layer_types import ChunkedCrossEntropy, start_backward
from perfkit.workloads.stack import apply_stack, find_stack
from perfkit.workloads.tape import Tape
from tests.levels import load_without_levels

pytestmark = pytest.mark.usefixtures("few_calls")

CLUSTER = load_without_levels("h100-sxm-8x8")
#: Words that are aligned, as those of Llama 3.
MODEL = pk.Transformer.preset(
    "gpt3-6.7b",
    batch=16,
    sequence=2048,
    dtype="bf16",
    mixed=True,
    fused=True,
    layers=2,
    vocabulary=128256,
)
TOKENS, WORDS, WIDTH, CHUNKS = 96, 40, 16, 4


def list_products(graph: pk.Graph) -> list[tuple[float, ...]]:
    """Sizes of the products of a graph, in their order."""
    sizes = [graph.column(name) for name in ("m", "n", "k")]
    found = []
    for row, label in enumerate(graph.labels):
        if label.kind == "gemm":
            found.append(tuple(float(size[row]) for size in sizes))
    return found


def list_rowwise(labels: Sequence[Label]) -> list[str]:
    """Names of the operations of a loss on the logits, in their order."""
    return [label.name for label in labels if label.name.startswith(("_log_softmax", "nll_loss"))]


class Example(NamedTuple):
    """Numbers of a head in PyTorch, all of type torch.Tensor: what goes in, its weight, and the
    words that should come out."""

    x: Any
    weight: Any
    labels: Any


def make_example(torch: Any) -> Example:
    """Random numbers of a head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    return Example(x, weight, labels)


def make_loss_in_pieces(torch: Any) -> Any:
    """A function of PyTorch that computes the cross entropy of a head in pieces, and its gradients
    in the forward pass."""
    aten = torch.ops.aten
    scale = torch.tensor(1.0 / TOKENS)

    class InPieces(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, labels: Any) -> Any:
            dx, dw, loss = torch.empty_like(x), None, None
            rows = TOKENS // CHUNKS
            for start in range(0, TOKENS, rows):
                piece = slice(start, start + rows)
                logarithms = torch.log_softmax(torch.mm(x[piece], weight.t()), 1)
                loss_of_piece, total = aten.nll_loss_forward(
                    logarithms, labels[piece], None, 2, -100
                )
                dlogarithms = aten.nll_loss_backward(
                    scale, logarithms, labels[piece], None, 2, -100, total
                )
                dlogits = aten._log_softmax_backward_data(dlogarithms, logarithms, 1, x.dtype)
                dx[piece] = torch.mm(dlogits, weight)
                if dw is None:
                    dw, loss = torch.mm(dlogits.t(), x[piece]), loss_of_piece
                else:
                    dw = torch.addmm(dw, dlogits.t(), x[piece])
                    loss = loss + loss_of_piece
            ctx.save_for_backward(dx, dw)
            return loss * scale

        @staticmethod
        def backward(ctx: Any, dloss: Any) -> Any:
            dx, dw = ctx.saved_tensors
            return dx, dw, None

    return InPieces


def test_gradients_of_pieces_are_those_of_all_tokens() -> None:
    torch = pytest.importorskip("torch")
    x, weight, labels = make_example(torch)
    whole = torch.nn.functional.cross_entropy(x @ weight.t(), labels)
    in_pieces = make_loss_in_pieces(torch).apply(x, weight, labels)
    assert in_pieces.item() == pytest.approx(whole.item(), rel=1e-5)
    of_whole = torch.autograd.grad(whole, (x, weight))
    of_pieces = torch.autograd.grad(in_pieces, (x, weight))
    for expected, gradient in zip(of_whole, of_pieces, strict=True):
        assert torch.allclose(expected, gradient, atol=1e-6)


def test_pieces_are_what_pytorch_runs() -> None:
    torch = pytest.importorskip("torch")
    x, weight, labels = make_example(torch)
    in_pieces = make_loss_in_pieces(torch)

    class Head(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach().clone())

        def forward(self, x: Any) -> Any:
            return in_pieces.apply(x, self.weight, labels)

    captured = pk.capture(Head(), x.detach().clone().requires_grad_())
    tape = Tape(4)
    layer = ChunkedCrossEntropy(CHUNKS, itemsize=4, ranks=1)
    start_backward(
        tape, tape.apply(layer, tape.parameter(TOKENS, WIDTH), tape.parameter(WORDS, WIDTH))
    )
    tape.backward()
    built = [operation.label for operation in tape.operations]
    assert list_rowwise(captured.labels) == list_rowwise(built)
    sizes = [
        (operation.sizes.m, operation.sizes.n, operation.sizes.k)
        for operation in tape.operations
        if operation.label.kind == "gemm"
    ]
    assert sizes == list_products(captured)
    assert len(sizes) == 3 * CHUNKS


def test_pieces_compute_what_all_tokens_at_once_do() -> None:
    flops = [
        float(replace(MODEL, loss_chunks=chunks).graphs(8)[0].column("flops").sum())
        for chunks in (1, 8)
    ]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)


def test_the_logits_of_one_piece_live_at_a_time() -> None:
    """A rank holds the logits in bf16, and in fp32 these, their logarithms and a gradient of each; the
    gradients of input and weight instead while it computes them in pieces."""
    peaks = {}
    for chunks in (1, 8):
        with keep_quiet():
            run = pk.predict(replace(MODEL, loss_chunks=chunks), CLUSTER, ranks=8, stack="fsdp")
        peaks[chunks] = run.memory().parts["activations"]
    logits = 2 * 2048 * 128256
    weight, tokens = 2 * 4096 * 128256, 2 * 2 * 2048 * 4096
    # one more in bf16 of a piece: the gradient behind the last cast
    in_piece = logits / 8 * (2 + 4 + 4 + 4)
    whole = logits * (2 + 4 + 4 + 4)
    saved = whole - (in_piece + weight + tokens)
    assert peaks[1] - peaks[8] == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize("execution", ["eager", "compiled"])
@pytest.mark.parametrize(
    "strategy",
    [
        pk.Strategy(dp=8, micro_batch=2, zero=3),
        pk.Strategy(dp=8, micro_batch=1),
        pk.Strategy(tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True),
        pk.Strategy(pp=4, dp=2, micro_batch=1, checkpoint="full", schedule="gpipe"),
    ],
    ids=["fsdp", "replicas", "tensor", "stages"],
)
def test_closed_forms_price_pieces_as_the_event_loop_does(
    strategy: pk.Strategy, execution: str
) -> None:
    model = replace(MODEL, layers=4, loss_chunks=8)
    whole = replace(model, loss_chunks=1)
    with keep_quiet():
        run = pk.predict(model, CLUSTER, strategy=strategy, execution=execution)
        plain = pk.predict(whole, CLUSTER, strategy=strategy, execution=execution)
        closed = pk.explore(
            model, CLUSTER, strategies=[strategy], execution=execution, memory=1e13
        ).table()
        closed_whole = pk.explore(
            whole, CLUSTER, strategies=[strategy], execution=execution, memory=1e13
        ).table()
    assert closed["time_s"][0] == pytest.approx(run.time, rel=0.01)
    # the two differ by as much without pieces
    more = closed["needs_bytes"][0] - run.memory().total
    assert more == pytest.approx(closed_whole["needs_bytes"][0] - plain.memory().total, abs=1e6)
    assert abs(more) < 0.015 * run.memory().total


def test_ranks_that_share_words_exchange_three_numbers_of_a_token_in_each_piece() -> None:
    strategy = pk.Strategy(tp=2, dp=4, micro_batch=4)
    sent = {}
    for chunks in (1, 8):
        model = replace(MODEL, loss_chunks=chunks)
        with keep_quiet():
            run = pk.predict(model, CLUSTER, strategy=strategy)
        rows = run.timeline().filter(rank=0, module="head", phase="forward", name="all_reduce")
        sent[chunks] = len(rows)
    assert sent == {1: 3, 8: 24}


def test_a_stack_says_in_how_many_pieces() -> None:
    stack = replace(find_stack("fsdp"), loss_chunks=8)
    work = apply_stack(MODEL, None, None, stack)
    assert work.workload.loss_chunks == work.stacks[0].loss_chunks == 8
    stated = apply_stack(replace(MODEL, loss_chunks=4), None, None, stack)
    assert stated.workload.loss_chunks == stated.stacks[0].loss_chunks == 4
    with keep_quiet():
        usual = pk.predict(replace(MODEL, loss_chunks=4), CLUSTER, ranks=8)
    assert usual.stack is not None
    assert usual.stack.loss_chunks == 4


def test_what_pieces_cannot_be_is_refused() -> None:
    bert = pk.Transformer.bert("bert-base", batch=8)
    with pytest.raises(
        ValueError, match="loss_chunks is 2, and the head of this model has a bias, or"
    ):
        replace(bert, loss_chunks=2)
    for wrong in (0, 1.5, 2**11):
        with pytest.raises(ValueError, match="loss_chunks"):
            replace(MODEL, loss_chunks=wrong)


def test_batches_of_a_sweep_are_cut_alike() -> None:
    model = replace(MODEL, loss_chunks=8)
    with keep_quiet():
        swept = pk.sweep(model, {"batch": [16, 32, 48]}, CLUSTER, ranks=8)
        alone = pk.predict(replace(model, batch=32), CLUSTER, ranks=8)
    assert swept.table()["time_s"][1] == pytest.approx(alone.time)
