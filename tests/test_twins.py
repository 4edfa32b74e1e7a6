"""Workloads against their PyTorch twins: what is built is what runs and what is captured, with the
same sizes.

What an operation is handed and what it touches differ where rows are looked up or a tensor only
lends its shape. Both sides count what is touched: tables by lookups, and tensors that only lend
their shape not at all.
"""

import os
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pytest

from perfkit.measure import samples
from perfkit.recording.nets import Net
from perfkit.workloads.columns import FEATURES
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer
from tests.jobs import run_together

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from perfkit.measure.iterations import OperationTimer, build_step  # noqa: E402
from perfkit.recording import modules  # noqa: E402
from perfkit.recording.convolutions import Residual  # noqa: E402
from perfkit.recording.modules import make_optimizer  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

TABLES = {
    "rows": [3000, 700, 90],
    "dim": 48,
    "pooling": 3,
    "bottom": [64, 96],
    "top": [80, 40],
    "features": 13,
}
SIZES = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "vocabulary": 300,
    "positions": 48,
    "sequence": 40,
    "batch": 4,
}
MODELS: dict[str, DLRM | Transformer] = {
    "dlrm-sparse": DLRM(batch=64, sparse=True, exponent=1.0, **TABLES),
    "dlrm-dense": DLRM(batch=64, sparse=False, exponent=0.9, **TABLES),
    "dlrm-cross": DLRM(
        batch=64, sparse=False, interaction="cross", cross=(3, 24), optimizer="adagrad", **TABLES
    ),
    "dlrm-one-table": DLRM(batch=16, rows=[50], dim=8, pooling=1, bottom=[], top=[8], features=3),
    "dlrm-bf16": DLRM(batch=64, sparse=True, dtype="bf16", **TABLES),
    "dlrm-fp64": DLRM(batch=64, sparse=True, dtype="fp64", **TABLES),
}
for attention, optimizer in product(("eager", "fused"), ("adamw", "sgd")):
    settings = {"attention": attention, "optimizer": optimizer, **SIZES}
    MODELS[f"bert-{attention}-{optimizer}"] = Transformer.bert(**settings)
    MODELS[f"gpt2-{attention}-{optimizer}"] = Transformer.gpt2(**settings)

#: Position of the operand that is only looked up in, or only lends its shape.
NOT_READ = {
    "_embedding_bag": 0,
    "embedding": 0,
    "nll_loss_forward": 0,
    "nll_loss_backward": 1,
    "new_zeros": 0,
}
HOST = ("launches", "calls", "bare")
C10D = {"alltoall_base_": "all_to_all", "allreduce_": "all_reduce"}


class Counter(OperationTimer):
    """Adds up what every operation touches, under the rule above."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.names)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.names) > before:
            name = self.names[-1]
            if name in NOT_READ:
                operand = args[NOT_READ[name]]
                self.nbytes[-1] -= operand.numel() * operand.element_size()
            elif name == "add_" and getattr(args[1], "layout", None) is torch.sparse_coo:
                self.nbytes[-1] -= 2 * args[0].numel() * args[0].element_size()
        return out


def count_flops(graph: Graph, step: Any) -> float:
    """FLOP that PyTorch counts; it knows the attention kernels of GPUs, not this one
    (arXiv:2307.08691, 4.1)."""
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    counted = float(sum(counts.values()))
    names = {str(name).removeprefix("aten.") for name in counts}
    if not names & {label.name for label in graph.labels if label.kind == "attention"}:
        counted += count_attention(graph)
    return counted


def count_attention(graph: Graph) -> float:
    """FLOP of the fused kernels of attention: two products forward, five backward."""
    flops = 0.0
    for place, label in enumerate(graph.labels):
        if label.kind == "attention":
            sizes = graph[place].features
            product = 2 * sizes["batch"] * sizes["m"] * sizes["n"] * sizes["k"]
            if "causal" in label.variant:
                product /= 2
            flops += product * (5 if label.variant.startswith("backward") else 2)
    return flops


@pytest.mark.parametrize("name", MODELS)
def test_what_runs_has_the_operations_bytes_and_flops_of_its_graph(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step, module = build_step(MODELS[name])
    step()
    with Counter() as counter:
        step()
    torch.set_num_threads(threads)
    graph = MODELS[name].graphs()[0]
    assert [label.name for label in graph.labels] == counter.names
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    assert graph.column("flops").sum() == pytest.approx(count_flops(graph, step), rel=0.01)
    ours = graph.traffic.copy()
    theirs = np.array(counter.nbytes)
    assert ours.sum() == pytest.approx(theirs.sum(), rel=0.05), "what the platform prices"
    for i in graph.kernels.get(("bmm", "nt"), ()):  # a matrix multiplied with itself counts once
        touched = [access for access in graph.accesses if access.operation == i]
        first, second = [access for access in touched if not access.is_write]
        if first.buffer == second.buffer:
            ours[i] -= first.nbytes
    kinds = np.array([label.kind for label in graph.labels])
    for kind in set(kinds):
        of_kind = kinds == kind
        assert ours[of_kind].sum() == pytest.approx(theirs[of_kind].sum(), rel=0.25), kind
        if kind in ("gemm", "bmm", "attention"):
            assert ours[of_kind].tolist() == theirs[of_kind].tolist(), kind


def assert_equal(ours: Graph, built: Graph) -> None:
    """The same operations with the same sizes, bytes and waits; the host's work is known less
    exactly."""
    assert [(label.name, *label.operation_class) for label in ours.labels] == [
        (label.name, *label.operation_class) for label in built.labels
    ]
    # built models do not state the rows of functions of tensors that are broadcast
    has_rows = np.array([label.kind != "elementwise" for label in ours.labels])
    for name in FEATURES:
        kept = has_rows if name == "rows" else slice(None)
        if name not in HOST:
            assert ours.column(name)[kept].tolist() == built.column(name)[kept].tolist(), name
    assert ours.traffic.tolist() == built.traffic.tolist()
    assert ours.parameters == built.parameters
    # gradients in one bucket are one buffer, or each its own
    near = 0.03 if built.waits is None else 0.15
    assert ours.distances.sum() == pytest.approx(built.distances.sum(), rel=near)
    assert ours.column("calls").sum() == pytest.approx(built.column("calls").sum(), rel=0.1)
    waits = [None if graph.waits is None else sorted(graph.waits) for graph in (ours, built)]
    assert waits[0] == waits[1]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dlrm-fp64"])
def test_what_is_captured_is_what_is_built(name: str) -> None:
    graph, built = capture(lambda: build_step(MODELS[name])[0]), MODELS[name].graphs()[0]
    assert_equal(graph, built)
    assert [(t.rows, t.dim, t.pooling) for t in graph.tables] == [
        (t.rows, t.dim, t.pooling) for t in built.tables
    ]
    if name in ("dlrm-sparse", "dlrm-dense"):  # fewer lookups tell nothing of the exponent
        assert [t.exponent for t in graph.tables] == pytest.approx(
            [t.exponent for t in built.tables], abs=0.25
        )


LLAMA = Transformer.preset(
    "llama-2-7b",
    batch=4,
    sequence=40,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    inner=96,
    vocabulary=304,
    dtype="bf16",
    attention="flash2",
)


def _make_linear(inputs: int, outputs: int) -> Any:
    return torch.nn.Linear(inputs, outputs, bias=False)


class _GroupedAttention(torch.nn.Module):
    """Heads of queries share heads of keys and values; positions are angles of complex numbers in
    fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.width = LLAMA.hidden // LLAMA.heads
        keys = LLAMA.kv_heads * self.width
        self.queries = _make_linear(LLAMA.hidden, LLAMA.hidden)
        self.keys, self.values = _make_linear(LLAMA.hidden, keys), _make_linear(LLAMA.hidden, keys)
        self.output = _make_linear(LLAMA.hidden, LLAMA.hidden)
        angles = torch.outer(torch.arange(LLAMA.sequence), torch.logspace(0, -4, self.width // 2))
        self.turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def rotate(self, heads: Any) -> Any:
        pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(3).type_as(heads)

    def forward(self, x: Any) -> Any:
        batch, sequence, _ = x.shape
        q = self.queries(x).view(batch, sequence, -1, self.width)
        k = self.keys(x).view(batch, sequence, -1, self.width)
        v = self.values(x).view(batch, sequence, -1, self.width)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            self.rotate(q).transpose(1, 2),
            self.rotate(k).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class _GatedMLP(torch.nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = _make_linear(LLAMA.hidden, LLAMA.inner)
        self.up = _make_linear(LLAMA.hidden, LLAMA.inner)
        self.down = _make_linear(LLAMA.inner, LLAMA.hidden)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def build_llama_module() -> Any:
    """A small Llama (arXiv:2302.13971, section 2.2; arXiv:2307.09288, section 2.2), whose layers are
    registered in the order of use, for the optimizer."""
    layers: list[Any] = [torch.nn.Embedding(LLAMA.vocabulary, LLAMA.hidden)]
    for _ in range(LLAMA.layers):
        for make_body in (_GroupedAttention, _GatedMLP):
            norm = torch.nn.RMSNorm(LLAMA.hidden)
            layers.append(Residual(torch.nn.Sequential(norm, make_body())))
    layers += [torch.nn.RMSNorm(LLAMA.hidden), _make_linear(LLAMA.hidden, LLAMA.vocabulary)]
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


def make_llama_step(module: Any, optimizer: Any) -> Any:
    """A step of a small Llama."""
    tokens = torch.zeros(LLAMA.batch, LLAMA.sequence, dtype=torch.int64)

    def step() -> None:
        if optimizer is not None:  # else hooks update the weights
            optimizer.zero_grad()
        logits = module(tokens).view(-1, LLAMA.vocabulary)
        torch.nn.functional.cross_entropy(logits, tokens.view(-1)).backward()
        if optimizer is not None:
            optimizer.step()

    return step


#: What differs by choice between a captured operation and the same one of a builder: the kernel of
#: attention has a name for each device, and casts are copies in one and functions in the other.
RENAMED = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
CAST = "_to_copy"
PRODUCT = ("flops", "batch", "m", "n", "k")


def list_operations(graph: Graph) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Name, class and sizes of products of each operation; and their bytes.

    Copies of the angles of positions are left out, which are conjugated for the backward pass: the
    builder has no copies as small as these.
    """
    angles = LLAMA.sequence * LLAMA.hidden // LLAMA.heads // 2
    sizes = np.stack([graph.column(name) for name in PRODUCT], axis=1).tolist()
    operations: list[tuple[Any, ...]] = []
    nbytes: list[float] = []
    for place, label in enumerate(graph.labels):
        if label.name == "clone" and graph.column("elements")[place] == angles:
            continue
        name = RENAMED.get(label.name, label.name)
        kind = "elementwise" if name == CAST else label.kind
        variant = label.variant.removesuffix(".flash2")
        operations.append((name, kind, variant, label.phase, *sizes[place]))
        nbytes.append(float(graph.traffic[place]))
    return operations, nbytes


def build_llama() -> Any:
    """A step of a small Llama and its optimizer."""
    module = build_llama_module()
    return make_llama_step(module, make_optimizer(LLAMA.optimizer, module.parameters()))


def test_a_llama_is_captured_as_it_is_built() -> None:
    """On a GPU, where a norm is one kernel."""
    [built] = LLAMA.graphs(accelerator=True)
    captured = capture(build_llama, device="cuda")
    assert captured.parameters == built.parameters
    ours, theirs = list_operations(captured), list_operations(built)
    assert ours[0] == theirs[0]
    # statistics of rows are fp32
    assert ours[1] == pytest.approx(theirs[1], rel=0.03)


#: Fields that the module is built from, or that change nothing of it.
READ = {
    *("name", "family", "causal", "batch", "sequence", "layers", "hidden", "heads", "vocabulary"),
    *("positions", "attention", "dtype", "mixed", "optimizer", "overlap"),
    *("tables", "bottom", "top", "features", "sparse", "interaction", "cross", "table_dtype"),
}
#: Fields that matter to experts, adapters or images alone, to sharded weights, or to layers that are
#: computed again.
IDLE = {
    *("top_k", "capacity", "imbalance", "fused_permutation", "reduce_dtype"),
    *("expert_groups", "top_groups"),
    "lora_modules",
    "checkpoint_layers",
    "classes",  # of images, which have patches
    "checkpoint_group",
    "table_optimizer",  # with separate kernels that of all weights
}


def test_every_field_of_a_workload_is_built_or_refused() -> None:
    """What a builder forgets would be measured as another model."""
    names = {field.name for field in (*fields(Transformer), *fields(DLRM))}
    refused = {*modules._BUILT} - {"mlps"}  # of a plan
    assert names == READ | IDLE | refused, "say whether build_step reads a new field"
    assert not refused & READ


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Transformer.gpt2(**SIZES, experts=4), "experts is 4; only 0 is measured"),
        (Transformer.gpt2(**SIZES, dropout=0.1), "dropout is 0.1; only 0.0 is measured"),
        (DLRM(**TABLES, table_dtype="fp16"), "table_dtype is 'fp16'; only 'fp32'"),
    ],
)
def test_what_is_not_built_is_refused(workload: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_step(workload)


def test_watching_does_not_change_the_result() -> None:
    """A timer that kept tensors alive, or ran something twice, would change gradients or their
    accumulation."""
    results = []
    for watched in (False, True):
        step, module = build_step(MODELS["bert-eager-sgd"], seed=3)
        step()
        if watched:
            with OperationTimer() as timer:
                step()
            assert len(timer.names) == len(timer.seconds) == len(timer.nbytes)
        else:
            step()
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Two ranks.

#: The last two rows of gradients are in buckets of `DistributedDataParallel`: 1 MiB, then 25 MiB,
#: as gradients come.
TWO_RANKS: dict[str, tuple[DLRM | Transformer | Net, tuple[int, ...] | None]] = {
    "exchanged": (DLRM(batch=32, **TABLES), (0, 1, 1)),
    "exchanged-overlapped": (DLRM(batch=32, overlap=True, **TABLES), (0, 1, 1)),
    "empty": (DLRM(batch=32, **TABLES), (1, 1, 1)),
    "cross-overlapped": (
        DLRM(
            batch=32,
            overlap=True,
            sparse=False,
            interaction="cross",
            cross=(2, 24),
            optimizer="adagrad",
            **TABLES,
        ),
        (1, 1, 1),
    ),
    "flat": (Transformer.bert(**SIZES, overlap=False), None),
    "buckets": (
        Transformer.gpt2(**{**SIZES, "hidden": 512, "layers": 3, "vocabulary": 2000}),
        None,
    ),
    "net": (Net("resnet", batch=4, size=64, width=8, depth=1, classes=10), None),
}
needs_ranks = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


@needs_ranks
@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name != "net"])
def test_two_captured_ranks_are_what_is_built(name: str) -> None:
    workload, owners = TWO_RANKS[name]
    plan = Plan.from_owners(owners, ranks=2) if owners else None
    for rank, built in enumerate(workload.graphs(2, plan)):
        captured = capture(
            lambda r=rank: build_step(workload, plan=plan, rank=r, ranks=2)[0], ranks=2, rank=rank
        )
        assert_equal(captured, built)
    assert not torch.distributed.is_initialized()


RAN = ("exchanged-overlapped", "empty", "flat", "buckets", "net")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What both ranks measured of each workload, one after the other."""
    about = {"seconds": 0, "operations": 1}
    jobs = [
        {"workload": samples.dump(TWO_RANKS[name][0]), "owners": TWO_RANKS[name][1], **about}
        for name in RAN
    ]
    return dict(
        zip(RAN, run_together("perfkit.measure.iterations:time_iteration", jobs, 2), strict=True)
    )


@needs_ranks
@pytest.mark.serial
@pytest.mark.parametrize("name", RAN)
def test_two_ranks_run_what_their_graphs_say(name: str, measured: dict[str, Any]) -> None:
    (workload, owners), results = TWO_RANKS[name], measured[name]
    graphs = workload.graphs(2, Plan.from_owners(owners, ranks=2) if owners else None)
    for graph, result in zip(graphs, results, strict=True):
        names, order = (
            [C10D.get(name, name) for name in result["names"]],
            sorted if name == "net" else list,
        )
        assert order(label.name for label in graph.labels) == order(names)
        assert [names[i] for i in graph.collectives] == [
            graph.labels[i].name for i in graph.collectives
        ]
        assert len(result["operation_seconds"]) == len(graph)
        assert np.isfinite(result["operation_seconds"]).all()
        assert result["n"] == 6
        assert 0 <= result["idle"] <= 2 * result["q3"]
    sent = graphs[0].column("nbytes")[graphs[0].collectives]
    if name in ("flat", "buckets"):
        assert sent.sum() == 4 * graphs[0].parameters
        assert len(sent) == {"flat": 1, "buckets": 3}[name]
    assert os.environ.get("RANK") is None
