"""Layers as small classes: what they record forward and backward, and how one is added."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.prediction.uncertainty import NOT_TIMED, is_timed_function
from perfkit.workloads import layer_types
from perfkit.workloads.blocks import record_part
from perfkit.workloads.columns import FEATURES, HostCalls, OperationSizes
from perfkit.workloads.frozen_formats import FROZEN_FORMATS
from perfkit.workloads.iteration import make_graph
from perfkit.workloads.layer_types import Linear, Relu, start_backward
from perfkit.workloads.layers import embedding_bags
from perfkit.workloads.measured_functions import MEASURED_FUNCTIONS
from perfkit.workloads.operations import ATTENTION, NT, Tensor, Weight
from perfkit.workloads.rank_share import RankShare
from perfkit.workloads.tape import Layer, Tape


class Square(Layer):
    """Each number times itself: `square`. Backward: `square_backward`, which reads the operand."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `square`."""
        self.x = x
        y = tape.like(x)
        tape.elementwise("square", [x], [y], "mul")
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `square_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("square_backward", [dy, self.x], [dx], "mul")
        tape.pass_on(self.x, dx)


def list_names(graph: pk.Graph, phase: str) -> list[str]:
    operations = (graph[index] for index in range(len(graph)))
    return [operation.name for operation in operations if operation.phase == phase]


def finish_backward(tape: Tape, y: Tensor) -> pk.Graph:
    """The graph of what was recorded, and of its backward pass from `y`."""
    start_backward(tape, y)
    tape.backward()
    return make_graph(tape, family="transformer")


def test_a_layer_is_a_class_with_forward_and_backward() -> None:
    tape = Tape()
    x = tape.tensor(64, 8)
    weight, bias = tape.parameter(16, 8), tape.parameter(16)
    y = tape.apply(Square(), tape.apply(Linear(), x, weight, bias))
    graph = finish_backward(tape, y)
    assert list_names(graph, "forward") == ["addmm", "square"]
    # nobody wants the gradient of the input; that of the bias is a sum over rows
    assert list_names(graph, "backward") == ["ones_like", "square_backward", "mm", "sum"]
    assert graph[1].features["elements"] == 64 * 16
    assert graph[3].features["elements"] == 64 * 16
    assert graph.traffic[1] == 2 * 64 * 16 * 4, "reads one tensor and writes one"
    assert graph.traffic[3] == 3 * 64 * 16 * 4, "reads two tensors and writes one"
    product = graph[4].features
    assert (product["m"], product["n"], product["k"]) == (16, 8, 64)
    assert graph.parameters == 16 * 8 + 16
    assert pk.predict(graph, "h100-sxm-8").time > 0


def test_layers_that_are_recorded_again_get_the_same_weights() -> None:
    tape = Tape()

    def record() -> list[Weight]:
        mark = tape.mark_weights()
        tape.module = "bottom"
        tape.parameter(16, 8)
        tape.parameter(16)
        tape.module = "top"
        tape.parameter(4, 16)
        return tape.list_weights_since(mark)

    first = record()
    tape.reuse_weights()
    again = record()
    assert [*map(id, again)] == [*map(id, first)] == [*map(id, tape.trained)]
    tape.module = "head"
    [last] = (tape.parameter(4), *tape.list_weights_since(4))
    assert last.module == "head"
    assert len(tape.trained) == 4


def test_layers_that_are_recorded_again_in_another_order_are_refused() -> None:
    tape = Tape()
    for module, shape in {"bottom": (16, 8), "top": (4, 16)}.items():
        tape.module = module
        tape.parameter(*shape)
    tape.reuse_weights()
    with pytest.raises(RuntimeError, match="weight 0 is recorded again as one of 'top'"):
        tape.parameter(4, 16)
    tape.reuse_weights()
    tape.module = "bottom"
    with pytest.raises(RuntimeError, match="with 1 dimensions, and was one of 'bottom' with 2"):
        tape.parameter(16)


def test_a_table_that_is_looked_up_again_is_the_same_table() -> None:
    model = pk.DLRM(batch=64, rows=[1000, 500], dim=16, pooling=4, bottom=[32], top=[32])
    tape = Tape()
    for _ in range(2):
        tape.reuse_weights()
        embedding_bags(tape, model, model.tables, 64)
    assert len(tape.tables) == len(tape.trained) == 2
    assert [operation.sizes.table for operation in tape.operations] == [0, 1, 0, 1]


def test_sizes_are_records_whose_fields_are_columns_of_a_graph() -> None:
    tape = Tape()
    x = tape.tensor(64, 8)
    tape.emit("first", "copy", [x], [x], OperationSizes(elements=512, rows=64), launches=2)
    tape.emit("second", "copy", [x], [x], is_call=False)
    features = make_graph(tape).features
    assert (features.elements.tolist(), features.rows.tolist()) == ([512, 0], [64, 0])
    assert (features.launches.tolist(), features.calls.tolist()) == ([2, 1], [1, 0])
    assert {*OperationSizes._fields, *HostCalls._fields} == {*FEATURES}
    with pytest.raises(TypeError, match="element"):
        OperationSizes(element=512)  # type: ignore[call-arg]


def test_gradients_that_arrive_twice_are_added() -> None:
    tape = Tape()
    weight = tape.parameter(64, 8)
    first = tape.apply(Relu(), weight)
    second = tape.apply(Square(), weight)
    y = tape.apply(layer_types.Add(), first, second)
    graph = finish_backward(tape, y)
    names = list_names(graph, "backward")
    assert names == ["ones_like", "square_backward", "threshold_backward", "add"]
    assert weight.due == 0


class Forgetful(Square):
    """Hands no gradient on: `square`."""

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Do nothing."""


def test_a_layer_that_hands_no_gradient_on_is_an_error() -> None:
    tape = Tape()
    tape.module = "head"
    weight = tape.parameter(64, 8)
    y = tape.apply(Forgetful(), tape.apply(Square(), weight))
    with pytest.raises(ValueError, match=r"no gradient .* of 'head'; .* Tape.pass_on"):
        finish_backward(tape, y)


def test_what_is_of_no_layer_says_so() -> None:
    tape = Tape()
    outside = tape.tensor(4)
    tape.layer = 0
    inside = tape.tensor(4)
    tape.elementwise("copy_", [outside], [inside])
    assert (outside.layer, inside.layer, tape.storage_layers) == (None, 0, [None, 0])
    assert [access.layer for access in tape.operations[0].accesses] == [0, 0]


def test_without_a_gradient_there_is_no_backward_pass() -> None:
    tape = Tape()
    y = tape.apply(Square(), tape.tensor(64, 8))
    assert not y.needs_gradient
    assert not tape.nodes


def test_buckets_hold_no_gradients_of_shards() -> None:
    model = pk.Transformer.gpt2("gpt2", dtype="bf16", mixed=True)
    share = RankShare(np.array([1.0, 2.0]), np.array([128.0, 128.0]))
    with pytest.raises(ValueError, match=r"exchange is 'buckets' .* take exchange='shards'"):
        record_part(model, share, exchange="buckets")
    graph = record_part(model, share, exchange="shards").graph
    assert "exchange.narrow" in {label.module for label in graph.labels}


def test_weights_of_another_tape_start_anew() -> None:
    probe, tape = Tape(), Tape()
    weight = probe.parameter(4, 8)
    weight.group, weight.shard = None, probe.tensor(2, 8)
    tape.tensor(1)
    tape.adopt(probe.trained)
    adopted = tape.parameter(4, 8)
    assert adopted is tape.trained[0]
    assert adopted is not weight
    assert (adopted.shape, adopted.storage) == (weight.shape, 1)
    assert adopted.group == 0
    assert adopted.stored is adopted
    assert weight.stored is weight.shard


BATCH = 4
ROWS = 6
WIDTH = 8
ROW = (WIDTH,)
MATRIX = (ROWS, WIDTH)
STACK = (BATCH, ROWS, WIDTH)
TAPE = Tape()
#: An instance of each layer, by its name and perhaps an option, and the shapes of its operands.
INSTANCES: dict[str, tuple[Layer, list[tuple[int, ...]]]] = {
    "Linear": (layer_types.Linear(), [MATRIX, (5, WIDTH), (5,)]),
    "LinearWithEpilogues": (
        layer_types.LinearWithEpilogues(None, has_relu=True, is_last=True),
        [MATRIX, (5, WIDTH), (5,)],
    ),
    "LinearWithoutBias": (layer_types.LinearWithoutBias(), [MATRIX, (5, WIDTH)]),
    "LinearFp8": (layer_types.LinearFp8(), [MATRIX, (5, WIDTH), (5,)]),
    "LinearFrozen": (
        layer_types.LinearFrozen(FROZEN_FORMATS["nf4-dq"]),
        [MATRIX, (5, WIDTH), (5,)],
    ),
    "BatchedProduct": (layer_types.BatchedProduct(), [STACK, (BATCH, WIDTH, 5)]),
    "GroupedProduct": (layer_types.GroupedProduct(), [STACK, (BATCH, WIDTH, 5)]),
    "GroupedProduct fp8": (layer_types.GroupedProduct(fp8=True), [STACK, (BATCH, WIDTH, 5)]),
    "BatchedProduct transposed": (layer_types.BatchedProduct(NT), [STACK, (BATCH, 5, WIDTH)]),
    "Attention": (
        layer_types.Attention(2, causal=True, kernel=ATTENTION[0]),
        [STACK, STACK, STACK],
    ),
    "Cast": (layer_types.Cast(2), [MATRIX]),
    "Relu": (layer_types.Relu(), [MATRIX]),
    "Gelu": (layer_types.Gelu(), [MATRIX]),
    "Gelu tanh": (layer_types.Gelu(tanh=True), [MATRIX]),
    "Silu": (layer_types.Silu(), [MATRIX]),
    "Sigmoid": (layer_types.Sigmoid(), [MATRIX]),
    "Tanh": (layer_types.Tanh(), [MATRIX]),
    "Divide": (layer_types.Divide(), [MATRIX]),
    "ConcatenateHeads": (
        layer_types.ConcatenateHeads(),
        [(BATCH, ROWS, 2, WIDTH), (BATCH, ROWS, 1, WIDTH)],
    ),
    "MultiplyRows": (layer_types.MultiplyRows(), [MATRIX, (ROWS, 1)]),
    "Dropout": (layer_types.Dropout(), [MATRIX]),
    "Rotate": (layer_types.Rotate(), [MATRIX, MATRIX]),
    "Scale": (layer_types.Scale(), [MATRIX]),
    "Add": (layer_types.Add(), [MATRIX, ROW]),
    "Multiply": (layer_types.Multiply(), [MATRIX, MATRIX]),
    "Softmax": (layer_types.Softmax(), [MATRIX]),
    "Softmax logarithm": (layer_types.Softmax(logarithm=True), [MATRIX]),
    "LayerNorm": (layer_types.LayerNorm(), [MATRIX, ROW, ROW]),
    "LayerNorm with a weight": (layer_types.LayerNorm(), [MATRIX, ROW]),
    "LayerNorm plain": (layer_types.LayerNorm(), [MATRIX]),
    "RmsNorm": (layer_types.RmsNorm(), [MATRIX, ROW]),
    "Repeat": (layer_types.Repeat(3, ROWS, WIDTH), [MATRIX]),
    "Permute": (layer_types.Permute(3, ROWS, WIDTH), [MATRIX]),
    "Unpermute": (layer_types.Unpermute(ROWS, WIDTH), [STACK]),
    "Unpermute weighted": (layer_types.Unpermute(ROWS, WIDTH), [STACK, MATRIX]),
    "Reorder": (layer_types.Reorder(), [STACK]),
    "Concatenate": (layer_types.Concatenate(), [MATRIX, MATRIX]),
    "TakePairs": (layer_types.TakePairs(), [STACK, (3,), (3,)]),
    "PatchEmbedding": (layer_types.PatchEmbedding(ROWS), [(BATCH, 72), (WIDTH, 12), ROW]),
    "PrependToken": (layer_types.PrependToken(), [ROW, STACK]),
    "TakeFirst": (layer_types.TakeFirst(), [STACK]),
    "Embedding": (layer_types.Embedding(2, 5), [MATRIX, (10,)]),
    "EmbeddingBag": (
        layer_types.EmbeddingBag(
            layer_types.TableLookup(TAPE, TAPE.parameter(*MATRIX), 0, 10, 4), sparse=False
        ),
        [MATRIX],
    ),
    "BinaryCrossEntropy": (layer_types.BinaryCrossEntropy(), [ROW, ROW]),
    "NegativeLogLikelihood": (layer_types.NegativeLogLikelihood(), [MATRIX, (ROWS,)]),
    "ChunkedCrossEntropy": (
        layer_types.ChunkedCrossEntropy(2, itemsize=4, ranks=1),
        [MATRIX, (5, WIDTH)],
    ),
}
#: Operations that the tape adds where a gradient is handed on unchanged.
PASSED = {"sum", "_to_copy"}


def test_each_layer_has_an_instance_here() -> None:
    layers = [own for own in Layer.__subclasses__() if own.__module__ == layer_types.__name__]
    assert {layer.__name__ for layer in layers} == {name.partition(" ")[0] for name in INSTANCES}


@pytest.mark.parametrize("name", INSTANCES)
def test_a_layer_says_which_operations_it_dispatches(name: str) -> None:
    layer, shapes = INSTANCES[name]
    tape = Tape()
    operands = [tape.parameter(*shape) for shape in shapes]
    graph = finish_backward(tape, tape.apply(layer, *operands))
    backward = set(list_names(graph, "backward")) - {"ones_like"}
    recorded = {*list_names(graph, "forward"), *(backward - PASSED)}
    said = set(re.findall(r"`(\w+)`", type(layer).__doc__ or ""))
    assert recorded <= said, f"the docstring of {name} does not name {recorded - said}"
    reached = [operand for operand in operands if operand.gradient is not None]
    assert reached, "an operand gets a gradient"
    for operand in reached:
        gradient = tape.gradient(operand)
        assert gradient.numel == operand.numel
        assert gradient.itemsize == operand.itemsize


#: Class and variant of each operation of a layer forward, and backward behind a dash.
CLASSES = {
    "Linear": "gemm.nt - gemm.nn gemm.tn rowwise.sum",
    "LinearWithEpilogues": "gemm.nt - elementwise.threshold_backward rowwise.sum gemm.nn gemm.tn",
    "LinearWithoutBias": "gemm.nt - gemm.tn gemm.nn",
    "LinearFp8": "elementwise._to_copy elementwise._to_copy gemm.nt - "
    "elementwise._to_copy gemm.nn gemm.tn rowwise.sum",
    "LinearFrozen": "elementwise.dequantize_blockwise elementwise.add_scalar_ elementwise.dequantize_4bit gemm.nt - "
    "rowwise.sum elementwise.dequantize_blockwise elementwise.add_scalar_ elementwise.dequantize_4bit gemm.nn",
    "BatchedProduct": "bmm.nn - bmm.tn bmm.nt",
    "GroupedProduct": "bmm.grouped.nn - bmm.grouped.tn bmm.grouped.nt",
    "GroupedProduct fp8": "elementwise._to_copy elementwise._to_copy bmm.grouped.nn - "
    "elementwise._to_copy bmm.grouped.tn bmm.grouped.nt",
    "BatchedProduct transposed": "bmm.nt - bmm.tn bmm.nn",
    "Attention": "attention.forward_causal.flash3 - attention.backward_causal.flash3",
    "Cast": "elementwise._to_copy - elementwise._to_copy",
    "Relu": "elementwise.relu - elementwise.threshold_backward",
    "Gelu": "elementwise.gelu - elementwise.gelu_backward",
    "Gelu tanh": "elementwise.gelu_tanh - elementwise.gelu_backward_tanh",
    "Silu": "elementwise.silu - elementwise.silu_backward",
    "ConcatenateHeads": "copy.cat - rowwise.sum",
    "Tanh": "elementwise.tanh - elementwise.tanh_backward",
    "Divide": "elementwise.div_scalar - elementwise.div_scalar",
    "Sigmoid": "elementwise.sigmoid - elementwise.sigmoid_backward",
    "MultiplyRows": "elementwise.mul - elementwise.mul elementwise.mul rowwise.sum",
    "Dropout": "elementwise.native_dropout - elementwise.native_dropout_backward",
    "Rotate": "elementwise.mul - elementwise.mul",
    "Scale": "elementwise.mul_scalar - elementwise.mul_scalar",
    "Add": "elementwise.add - rowwise.sum",
    "Multiply": "elementwise.mul - elementwise.mul elementwise.mul",
    "Softmax": "rowwise._softmax - rowwise._softmax_backward_data",
    "Softmax logarithm": "rowwise._log_softmax - rowwise._log_softmax_backward_data",
    "LayerNorm": "rowwise.native_layer_norm - rowwise.native_layer_norm_backward",
    "LayerNorm with a weight": "rowwise.native_layer_norm - rowwise.native_layer_norm_backward",
    "LayerNorm plain": "rowwise.native_layer_norm - rowwise.native_layer_norm_backward",
    "RmsNorm": "rowwise.native_layer_norm.rms - rowwise.native_layer_norm_backward.rms",
    "Repeat": "copy.clone - rowwise.sum",
    "Permute": "copy.index - rowwise.sum",
    "Unpermute": "rowwise.sum - copy.index",
    "Unpermute weighted": "rowwise.sum - rowwise.sum",
    "Reorder": "copy.index - copy.index",
    "Concatenate": "copy.cat -",
    "TakePairs": "copy.index - copy.new_zeros copy.index_put",
    "PatchEmbedding": "convolution.forward elementwise.add_ - convolution.backward rowwise.sum",
    "PrependToken": "copy.cat - rowwise.sum",
    "TakeFirst": "- copy.slice_backward",
    "Embedding": "rowwise.embedding - embedding_backward.dense_rows",
    "EmbeddingBag": "embedding_forward._embedding_bag - embedding_backward.dense",
    "BinaryCrossEntropy": "elementwise.binary_cross_entropy_with_logits - "
    "elementwise.sigmoid elementwise.sub elementwise.mul elementwise.div_",
    "NegativeLogLikelihood": "rowwise.nll_loss_forward - rowwise.nll_loss_backward",
    "ChunkedCrossEntropy": 2
    * (
        "gemm.nt rowwise._log_softmax rowwise.nll_loss_forward rowwise.nll_loss_backward "
        "rowwise._log_softmax_backward_data gemm.nn gemm.tn "
    )
    + "-",
}


def list_classes(graph: pk.Graph, phase: str) -> list[str]:
    """Class and variant of each operation, without the gradient of the loss."""
    return [
        f"{label.kind}.{label.variant}"
        for label in graph.labels
        if label.phase == phase and label.name != "ones_like"
    ]


@pytest.mark.parametrize("name", INSTANCES)
def test_the_operations_of_a_layer_have_the_classes_that_time_them(name: str) -> None:
    layer, shapes = INSTANCES[name]
    tape = Tape()
    graph = finish_backward(tape, tape.apply(layer, *(tape.parameter(*shape) for shape in shapes)))
    forward, _, backward = CLASSES[name].partition("-")
    assert list_classes(graph, "forward") == forward.split()
    assert list_classes(graph, "backward") == backward.split()


SMALL_MODEL: dict[str, Any] = {"layers": 1, "batch": 8, "sequence": 32}
SMALL_TABLES: dict[str, Any] = {
    "rows": [300, 90],
    "dim": 16,
    "pooling": 3,
    "features": 13,
    "batch": 64,
}
LLAMA = pk.Transformer.preset("llama-3-8b", **SMALL_MODEL)
GPT2 = pk.Transformer.gpt2(**SMALL_MODEL)


def recommend(**changes: Any) -> pk.DLRM:
    return pk.DLRM(bottom=[32], top=[24], **SMALL_TABLES, **changes)


#: Models that together have all layers, and what their ranks exchange.
BUILT: dict[str, pk.Transformer | pk.DLRM] = {
    "bert": pk.Transformer.bert(**SMALL_MODEL, dropout=0.1),
    "gpt2, scores in memory": replace(GPT2, attention="eager", dropout=0.1),
    "gpt2, autocast": replace(GPT2, dtype="bf16", mixed=True),
    "gpt2, shards": replace(GPT2, dtype="bf16", mixed=True, parallel="fsdp"),
    "gpt2, states in shards": replace(GPT2, parallel="zero1", accumulate=2),
    "gpt2, one message": replace(GPT2, overlap=False, fused=True),
    "gpt2, fp8": replace(GPT2, dtype="fp8", checkpoint=True),
    "llama": replace(LLAMA, qk_norm=True),
    "llama, experts": replace(LLAMA, experts=4, top_k=2, dtype="bf16", mixed=True),
    "vit": pk.Transformer.vit("vit-b32", layers=1, dropout=0.1),
    "dlrm": recommend(),
    "dlrm, dense": recommend(sparse=False, overlap=True),
    "dlrm, cross": recommend(interaction="cross", cross=(2, 8)),
    "dlrm, fused": recommend(embedding="fused", dtype="bf16", mixed=True),
    "dlrm, exact": recommend(embedding="exact"),
}


@pytest.mark.parametrize("name", BUILT)
def test_every_function_of_a_built_model_is_timed_by_calibrations(name: str) -> None:
    """A mistyped one, or another class, would take the median of measured functions."""
    model = BUILT[name]
    graphs = [*model.graphs(1), *model.graphs(2)]
    if isinstance(model, pk.Transformer):
        graphs += model.graphs(2, accelerator=True)
        share = RankShare(np.array([1.0, 2.0]), np.array([32.0, 32.0]))
        graphs.append(record_part(replace(model, accumulate=1), share).graph)
    for graph in graphs:
        for label in set(graph.labels):
            assert is_timed_function(label.kind, label.variant), label


def test_a_function_that_calibrations_leave_out_has_a_reason() -> None:
    assert not NOT_TIMED.keys() & MEASURED_FUNCTIONS["elementwise"]
    assert all(NOT_TIMED.values())
    assert {"_to_copy", "_fused_adamw_"} <= NOT_TIMED.keys()
