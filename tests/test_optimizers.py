"""Optimizers: one table says what each keeps and does, and every part of the library reads it."""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import perfkit as pk
from perfkit.models import embedding, optimizers, roofline
from perfkit.models.optimizers import (
    OPTIMIZERS,
    ElementwiseStep,
    Optimizer,
    find_optimizer,
    list_optimizers,
)
from perfkit.workloads.iteration import step
from perfkit.workloads.measured_functions import FUNCTIONS
from perfkit.workloads.tape import Tape

pytestmark = [
    pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning"),
    pytest.mark.usefixtures("few_calls"),
]
DENSE = list_optimizers(dense=True, by_shape=False)
#: Optimizers that PyTorch has too, with which they are compared; not each has a fused kernel.
DENSE_FORMS = []
for optimizer_name in DENSE:
    if find_optimizer(optimizer_name).torch_class:
        DENSE_FORMS += [(optimizer_name, form) for form in find_optimizer(optimizer_name).forms]
SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "vocabulary": 300,
    "positions": 48,
    "sequence": 40,
    "batch": 8,
}
TABLES: dict[str, Any] = {
    "rows": [3000, 700],
    "dim": 48,
    "pooling": 3,
    "bottom": [64],
    "top": [80],
    "features": 13,
    "batch": 64,
}
#: The update of Lion (arXiv:2302.06675), under a name that nobody will ever add: Lion itself may
#: become an entry of `OPTIMIZERS`.
MADE_UP = Optimizer(
    "made-up",
    states=1,
    update=(
        ElementwiseStep("mul_", ("weight",), ("weight",)),
        ElementwiseStep("lerp", ("state_1", "gradient"), ("scratch_1",)),
        ElementwiseStep("sign_", ("scratch_1",), ("scratch_1",)),
        ElementwiseStep("add_", ("weight", "scratch_1"), ("weight",)),
        ElementwiseStep("lerp_", ("state_1", "gradient"), ("state_1",)),
    ),
)


def build(optimizer: str, **more: Any) -> pk.Transformer:
    return pk.Transformer.gpt2(**SIZES, optimizer=optimizer, **more)


class Update(NamedTuple):
    """An operation of the update."""

    name: str
    kind: str
    variant: str
    elements: float
    traffic: float  # [B]


def list_updates(graph: pk.Graph) -> list[Update]:
    elements = graph.column("elements")
    return [
        Update(label.name, *label.kernel, elements[place], graph.traffic[place])
        for place, label in enumerate(graph.labels)
        if label.phase == "update"
    ]


def make_torch(optimizer: str, form: str, parameters: Any) -> Any:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'perfkit[measure]'")
    settings = {
        "eager": {"foreach": False},
        "for_each": {"foreach": True},
        "fused": {"fused": True},
    }
    known = find_optimizer(optimizer)
    make = getattr(torch.optim, known.torch_class)
    return make(parameters, lr=1e-3, **known.torch_arguments, **settings[form])


@pytest.mark.parametrize(("name", "form"), DENSE_FORMS)
def test_an_update_is_the_captured_update_of_pytorch(name: str, form: str) -> None:
    """The same operations with the same classes, elements and bytes, weight by weight or in
    lists."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'perfkit[measure]'")
    from perfkit.recording.modules import build_step

    shapes = [weight.shape for weight in build_step(build("sgd"))[1].parameters()]

    def make_step() -> Any:
        weights = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
        update = make_torch(name, form, weights)

        def run() -> None:
            sum((weight.sum() for weight in weights), start=torch.zeros(())).backward()
            update.step()

        return run

    captured = pk.capture(make_step, device="cpu" if form == "eager" else "cuda")
    model = build(name, fused=form == "fused")
    [built] = model.graphs(accelerator=form == "for_each")
    assert list_updates(built) == list_updates(captured)


@pytest.mark.parametrize(("name", "form"), DENSE_FORMS)
def test_an_update_runs_these_operations_and_moves_these_bytes(name: str, form: str) -> None:
    """A real step of PyTorch, operation by operation; SGD with momentum in lists moves 32 bytes a
    weight, not the 20 of its fused kernel."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'perfkit[measure]'")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    ran: list[str] = []
    moved: list[int] = []

    def count_bytes(values: Any) -> int:
        """Bytes of all tensors, each of them once."""
        tensors = {id(t): t for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    class Counter(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            reads_a_counter = name == "_local_scalar_dense"
            if func.is_view or func.namespace != "aten" or reads_a_counter:
                return out
            written = []
            for value, argument in zip(args, func._schema.arguments, strict=False):
                only_if_scaled = argument.name in ("grads", "state_steps")
                if argument.alias_info and argument.alias_info.is_write and not only_if_scaled:
                    written.append(value)
            ran.append(name)
            moved.append(count_bytes([args, kwargs]) + count_bytes(written or out))
            return out

    weights = [torch.nn.Parameter(torch.ones(300, 40)), torch.nn.Parameter(torch.ones(500))]
    update = make_torch(name, form, weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    update.step()
    with torch.no_grad(), Counter():
        update.step()
    operations = [operation.name for operation in find_optimizer(name).operations(form)]
    if form == "eager":  # one weight after the other
        assert ran == operations + operations
    else:
        assert ran == operations
    count = sum(weight.numel() for weight in weights)
    expected = find_optimizer(name).update_bytes(1, form=form)
    assert sum(moved) / count == pytest.approx(expected, rel=0.01)


def test_bytes_of_an_update_are_those_that_predictions_price() -> None:
    for name in DENSE:
        for form in find_optimizer(name).forms:
            model = build(name, fused=form == "fused")
            [graph] = model.graphs(accelerator=form == "for_each")
            traffic = sum(update.traffic for update in list_updates(graph))
            expected = find_optimizer(name).update_bytes(1, form=form)
            assert traffic / graph.parameters == pytest.approx(expected, rel=0.01), (name, form)
    assert roofline.optimizer_bytes("sgd_momentum", 10) == 320.0
    assert roofline.optimizer_bytes("sgd_momentum_fused", 10) == 200.0


RMSPROP = Optimizer(
    "rmsprop",
    states=1,
    update=(
        ElementwiseStep("mul_", ("state_1",), ("state_1",)),
        ElementwiseStep("addcmul_", ("state_1", "gradient"), ("state_1",)),
        ElementwiseStep("sqrt", ("state_1",), ("scratch_1",)),
        ElementwiseStep("add_", ("scratch_1",), ("scratch_1",), "add_scalar_"),
        ElementwiseStep("addcdiv_", ("weight", "gradient", "scratch_1"), ("weight",)),
    ),
)


@pytest.mark.parametrize("name", [*DENSE, RMSPROP.name])
def test_states_are_the_same_in_memory_and_in_strategies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all that a strategy needs is all that the model needs, also what an update without a
    fused kernel computes on the way."""
    monkeypatch.setitem(OPTIMIZERS, RMSPROP.name, RMSPROP)
    strategy = pk.Strategy(dp=8, micro_batch=1)
    optimizer = find_optimizer(name)
    fused = bool(optimizer.fused_kernel)

    def measure_memory(name: str) -> tuple[float, float, float]:
        """States of a prediction and of a strategy, and what the strategy needs more than that."""
        model = build(name, fused=fused)
        memory = pk.predict(model, "h100-sxm-8", ranks=8).memory()
        table = pk.explore(model, "h100-sxm-8", strategies=[strategy]).table()
        of_strategy = pk.predict(model, "h100-sxm-8", strategy=strategy).memory()
        more = float(table["needs_bytes"][0]) - memory.total
        return memory.parts["states"], of_strategy.parts["states"], more

    [graph] = build(name).graphs()
    states = optimizer.kept_bytes(4.0) * graph.parameters
    added = np.subtract(measure_memory(name), measure_memory("sgd"))
    assert added == pytest.approx([states, states, 0.0], rel=1e-3, abs=1e-3 * states + 1.0)


@pytest.mark.parametrize("name", list_optimizers(rows=True))
def test_states_of_tables_are_the_same_in_models_plans_and_closed_forms(name: str) -> None:
    tables = pk.TableSet((pk.EmbeddingTable(10**6, 32),) * 4, batch=512, optimizer=name)
    price = pk.price_plan(tables, "h100-sxm-8", pk.Plan(2, (0, 0, 1, 1)))
    expected = embedding.state_bytes(10**6, 32, optimizer=name)
    assert price.table()["state_bytes"].to_list() == [2 * expected, 2 * expected]
    if name in DENSE:
        model = pk.DLRM(embedding="exact", optimizer=name, **TABLES)
        memory = pk.predict(model, "h100-sxm-8").memory()
        rows = sum(embedding.state_bytes(n, 48, optimizer=name) for n in TABLES["rows"])
        weights = memory.parts["parameters"]
        states = rows + find_optimizer(name).states * weights
        assert memory.parts["states"] == pytest.approx(states, rel=1e-2, abs=1.0)


def test_a_graph_of_a_model_needs_the_memory_of_the_model() -> None:
    """The rows of its tables have states too."""
    model = pk.DLRM(embedding="exact", optimizer="adagrad", **TABLES)
    whole = pk.predict(model, "h100-sxm-8").memory()
    [graph] = model.graphs(accelerator=True)
    assert pk.predict(graph, "h100-sxm-8").memory().parts == whole.parts
    assert whole.parts["states"] >= whole.parts["tables"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer with one state for each weight, and five operations."""
    monkeypatch.setitem(OPTIMIZERS, "made-up", MADE_UP)


def test_an_optimizer_that_nobody_added_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer is 'made-up'; known are"):
        build("made-up")


def test_a_new_optimizer_updates_weight_by_weight_or_in_lists(made_up: None) -> None:
    [eager] = build("made-up").graphs()
    assert len(list_updates(eager)) % 5 == 0
    [listed] = build("made-up").graphs(accelerator=True)
    assert [update.name for update in list_updates(listed)] == [
        "_foreach_mul_",
        "_foreach_lerp",
        "_foreach_sign_",
        "_foreach_add_",
        "_foreach_lerp_",
    ]


def test_a_new_optimizer_needs_memory_for_its_states(made_up: None) -> None:
    model = build("made-up")
    strategy = pk.Strategy(dp=8, micro_batch=1)
    [graph] = model.graphs()
    states = 4.0 * graph.parameters
    assert pk.predict(model, "h100-sxm-8").memory().parts["states"] == states
    shared = pk.predict(model, "h100-sxm-8", strategy=strategy)
    assert shared.memory().parts["states"] == pytest.approx(states, rel=1e-3)

    def explore_needs(model: pk.Transformer) -> float:
        return float(
            pk.explore(model, "h100-sxm-8", strategies=[strategy]).table()["needs_bytes"][0]
        )

    needs = explore_needs(model) - explore_needs(build("sgd"))
    update_scratch = 4.0 * graph.parameters  # what the update computes on the way, of each weight
    assert 0.999 * states <= needs <= 1.001 * (states + update_scratch)


def test_a_new_optimizer_can_be_swept(made_up: None) -> None:
    def build_with_batch(batch: int) -> pk.Transformer:
        return pk.Transformer.gpt2(**{**SIZES, "batch": batch}, optimizer="made-up")

    sweep = pk.sweep(build_with_batch, {"batch": [8, 16]}, "h100-sxm-8", progress=False)
    assert len(sweep.table()) == 2


def test_a_new_optimizer_updates_rows_of_tables(made_up: None) -> None:
    exact = pk.DLRM(embedding="exact", optimizer="made-up", **TABLES)
    plain = pk.DLRM(embedding="exact", optimizer="sgd", **TABLES)
    assert pk.predict(exact, "h100-sxm-8").memory().parts["states"] > 4 * 3700 * 48
    assert exact.graphs()[0].traffic.sum() > plain.graphs()[0].traffic.sum()
    with pytest.raises(ValueError, match="optimizer is 'made-up' with embedding 'separate'"):
        pk.DLRM(optimizer="made-up", **TABLES)


def test_a_new_optimizer_is_known_to_closed_forms(made_up: None) -> None:
    assert embedding.state_bytes(100, 16, optimizer="made-up") == 6400.0
    assert roofline.optimizer_bytes("made-up", 1) == 52.0


def test_a_new_optimizer_has_no_fused_kernel_and_no_class_of_pytorch(made_up: None) -> None:
    with pytest.raises(
        ValueError, match=r"fused is True with optimizer 'made-up'.*take fused=False"
    ):
        build("made-up", fused=True)
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'perfkit[measure]'")
    with pytest.raises(ValueError, match=r"optimizer is 'made-up'; torch.optim has no such class"):
        pk.capture(torch.nn.Linear(4, 4), torch.ones(2, 4), optimizer="made-up")


def predict_memory_of_graph(optimizer: Any) -> Any:
    """Of a graph with this optimizer; an empty name would mean that it has none."""
    [graph] = pk.DLRM(embedding="exact", **TABLES).graphs()
    named = replace(graph, optimizer=optimizer or "x")
    return pk.predict(named, "h100-sxm-8").memory()


TABLE = pk.EmbeddingTable(1000, 16)
#: What takes the name of an optimizer, with its other arguments.
TAKERS = {
    "transformer": (build, {}),
    "tables": (pk.TableSet, {"tables": (TABLE,), "batch": 8}),
    "state_bytes": (embedding.state_bytes, {"rows": 10, "dim": 10}),
    "optimizer_bytes": (roofline.optimizer_bytes, {"parameters": 10}),
    "step": (step, {"tape": Tape()}),
    "graph": (predict_memory_of_graph, {}),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("name", ["lamb", "Adam", "", "rowwise", 5, None, ["adam"]])
def test_a_name_that_nobody_knows_is_an_error_everywhere(name: Any, taker: str) -> None:
    function, others = TAKERS[taker]
    with pytest.raises(ValueError, match=r"optimizer is .*; known are"):
        function(optimizer=name, **others)


def make_tables(name: str, kind: str, *, sparse: bool = True) -> pk.DLRM:
    return pk.DLRM(optimizer=name, embedding=kind, sparse=sparse, **TABLES)


@pytest.mark.parametrize(
    ("kind", "sparse"), [("separate", True), ("fused", True), ("fused", False)]
)
@pytest.mark.parametrize("name", DENSE)
def test_gradients_of_lookups_can_only_be_added_to_rows(name: str, kind: str, sparse: bool) -> None:
    """No other update is taken for this one."""
    if name == "sgd":
        make_tables(name, kind, sparse=sparse)
    else:
        with pytest.raises(ValueError, match="gradients of the same row"):
            make_tables(name, kind, sparse=sparse)


def test_each_state_of_a_row_moves_as_many_bytes() -> None:
    def count_row_bytes(name: str) -> float:
        [graph] = make_tables(name, "exact").graphs()
        return float(graph.traffic[graph.kernels["embedding_backward", "exact"]].sum())

    none = count_row_bytes("sgd")
    one = count_row_bytes("adagrad")
    two = count_row_bytes("adam")
    assert one > none
    assert two - one == pytest.approx(one - none, abs=8.0)


def test_a_captured_model_may_have_each_optimizer() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'perfkit[measure]'")
    for name in DENSE:
        if not find_optimizer(name).torch_class:
            continue  # PyTorch cannot run it, and a capture refuses it
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            graph = pk.capture(
                torch.nn.Linear(64, 64), torch.ones(8, 64), optimizer=name, device="cuda"
            )
        names = [label.name for label in graph.labels if label.phase == "update"]
        assert names == [each.name for each in find_optimizer(name).operations("for_each")]


def test_every_step_of_the_table_has_a_class_that_calibrations_measure() -> None:
    """Another name, or a mistyped one, would take the median of measured classes, without a word.
    Optimizers of other libraries run on GPUs alone, where all element-wise work has one fit."""
    for name, optimizer in OPTIMIZERS.items():
        if optimizer.quantized:
            continue
        for operation in (*optimizer.update, *optimizer.for_each_update):
            function = operation.variant or operation.name
            assert function in FUNCTIONS, f"{name}: {function} is not in measured_functions"


def test_every_optimizer_of_the_table_is_complete() -> None:
    operands = {"weight", "gradient", "scratch_1", "scratch_2", *optimizers.SINGLE}
    for name, optimizer in OPTIMIZERS.items():
        assert optimizer.name == name
        states = set(optimizers.STATES[: optimizer.states])
        if optimizer.quantized:
            states |= set(optimizers.SCALES[: optimizer.states])
        for form in optimizer.forms:
            used: set[str] = set()
            for operation in optimizer.operations(form):
                used |= {*operation.reads, *operation.writes}
            assert states <= used <= operands | states, (name, form)
        assert optimizer.update or optimizer.by_shape or not optimizer.torch_class, name


#: Memory in MiB as nvidia-smi shows it: BERT large in fp32 with a classifier, 4 sequences of 512 tokens
#: (Hugging Face transformers, docs/source/zh and ko/perf_train_gpu_one.md; the first also in
#: model_memory_anatomy.md).
PUBLISHED_MEMORY = {"adamw": 14949, "adamw_8bit": 13085}


def test_8_bit_states_save_as_much_memory_as_published() -> None:
    """1,864 MiB: 5.996 B for each of 335 million weights are 1,917 MiB, 2.9 % more."""
    needs = {}
    for name in PUBLISHED_MEMORY:
        model = pk.Transformer.bert("bert-large", batch=4, sequence=512, optimizer=name)
        memory = pk.predict(model, "a100-sxm-8", ranks=1).memory()
        needs[name] = memory.parts["states"] / 2.0**20
    saved = needs["adamw"] - needs["adamw_8bit"]
    published = PUBLISHED_MEMORY["adamw"] - PUBLISHED_MEMORY["adamw_8bit"]
    assert saved == pytest.approx(published, rel=0.03)


def test_8_bit_states_are_updated_by_a_kernel_for_each_weight() -> None:
    """A weight of fp32 with its gradient is 12 B to move, two 8-bit states 4 B, and scales of blocks of
    2,048 numbers 16 / 2048 B."""
    [graph] = build("adamw_8bit").graphs(accelerator=True)
    [update] = [number for number, label in enumerate(graph.labels) if label.phase == "update"]
    assert graph.labels[update].name == "optimizer_update_8bit_blockwise"
    weights = 2 + 2 * 12 + 2  # embeddings, layers, and the last norm
    assert graph.column("launches")[update] == weights
    assert graph.column("bare")[update] >= weights - 1
    moved = graph.traffic[update] / graph.parameters
    assert moved == pytest.approx(12.0 + 4.0 + 16.0 / 2048.0, rel=1e-2)
    assert find_optimizer("adamw_8bit").update_bytes(1) == 16.0 + 16.0 / 2048.0


def test_8_bit_states_update_no_single_rows_and_have_no_fused_kernel() -> None:
    with pytest.raises(ValueError, match="optimizer is 'adamw_8bit'; known are"):
        pk.TableSet((pk.EmbeddingTable(10, 4),), batch=8, optimizer="adamw_8bit")
    with pytest.raises(ValueError, match="optimizer is 'adamw_8bit'; known are"):
        pk.DLRM(embedding="exact", optimizer="adamw_8bit", **TABLES)
    with pytest.raises(
        ValueError, match=r"fused is True with optimizer 'adamw_8bit'.*take fused=False"
    ):
        build("adamw_8bit", fused=True)
    with pytest.raises(ValueError, match=r"torch\.optim has no such class"):
        pytest.importorskip("torch", reason="needs torch: pip install 'perfkit[measure]'")
        from perfkit.recording.modules import make_optimizer

        make_optimizer("adamw_8bit", [])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_strategies_call_a_kernel_for_each_8_bit_weight_too(zero: int) -> None:
    """Closed forms repeat the calls of the weights of one layer for all layers."""
    model = pk.Transformer.preset(
        "llama-2-7b", batch=8, sequence=512, layers=16, dtype="bf16", optimizer="adamw_8bit"
    )
    strategy = pk.Strategy(dp=8, zero=zero)
    one = pk.predict(model, "h100-sxm-8", strategy=strategy)
    table = pk.explore(model, "h100-sxm-8", strategies=[strategy]).table()
    assert table["time_s"][0] == pytest.approx(one.time, rel=0.004)
    assert table["needs_bytes"][0] == pytest.approx(one.memory().total, rel=0.002)
