"""Builders against their PyTorch twins: the same operations in the same order, parameters, FLOPs and bytes.

What an operation is handed and what it touches differ where rows are looked up or a tensor only lends its shape. Both
sides are therefore compared under one rule: every tensor counts once among the operands and once among the results of
an operation, except tables that rows are looked up in or added to (embedding weights, log-probabilities of a loss),
whose rows the platform prices by lookups, and tensors that only lend their shape.
"""

import os
from typing import Any

import numpy as np
import pytest

from perfkit.measure.runner import run_processes
from perfkit.workloads import samples
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from perfkit.measure.iteration import OperationTimer, build_step  # noqa: E402
from perfkit.workloads.recording import capture  # noqa: E402

TABLES = {"rows": [3000, 700, 90], "dim": 48, "pooling": 3, "bottom": [64, 96], "top": [80, 40], "features": 13}
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 300, "positions": 48, "sequence": 40, "batch": 3}
MODELS: dict[str, DLRM | Transformer] = {
    "dlrm-sparse": DLRM(batch=64, sparse=True, **TABLES),
    "dlrm-dense": DLRM(batch=64, sparse=False, exponent=0.9, **TABLES),
    "dlrm-cross": DLRM(batch=64, sparse=False, interaction="cross", cross=(3, 24), optimizer="adagrad", **TABLES),
    "dlrm-one-table": DLRM(batch=16, rows=[50], dim=8, pooling=1, bottom=[], top=[8], features=3),
    **{
        f"{family}-{attention}-{optimizer}": build(attention=attention, optimizer=optimizer, **SIZES)
        for family, build in (("bert", Transformer.bert), ("gpt2", Transformer.gpt2))
        for attention in ("eager", "fused")
        for optimizer in ("adamw", "sgd")
    },
}
#: Position of the operand that is only looked up in, or only lends its shape.
NOT_READ = {"_embedding_bag": 0, "embedding": 0, "nll_loss_forward": 0, "nll_loss_backward": 1, "new_zeros": 0}


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


def touched(graph: Graph) -> np.ndarray:
    """Bytes by operation; a matrix multiplied with itself counts once."""
    out = graph.traffic.copy()
    for i in graph.kernels.get(("bmm", "nt"), ()):
        own = graph.accesses[(graph.accesses[:, 0] == i) & (graph.accesses[:, 3] == 0)]
        out[i] -= own[0, 2] if own[0, 1] == own[1, 1] else 0
    return out


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Graph, Counter, Any, Any]:
    """Graph, dispatch stream of one steady iteration, step and module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    workload = MODELS[request.param]
    step, module = build_step(workload)
    step()
    with Counter() as counter:
        step()
    torch.set_num_threads(threads)
    return workload.graphs()[0], counter, step, module


def test_the_same_operations_in_the_same_order(pair: tuple[Graph, Counter, Any, Any]) -> None:
    graph, counter, _, _ = pair
    assert [label[0] for label in graph.labels] == counter.names


def test_the_same_parameters(pair: tuple[Graph, Counter, Any, Any]) -> None:
    graph, _, _, module = pair
    assert graph.parameters == sum(p.numel() for p in module.parameters())


def test_bytes_within_five_percent(pair: tuple[Graph, Counter, Any, Any]) -> None:
    graph, counter, _, _ = pair
    ours, theirs = touched(graph), np.array(counter.nbytes)
    assert ours.sum() == pytest.approx(theirs.sum(), rel=0.05)
    assert graph.traffic.sum() == pytest.approx(theirs.sum(), rel=0.05), "what the platform prices"
    by_kind = {}
    for (kind, _), members in graph.kernels.items():
        own, other = by_kind.get(kind, (0.0, 0.0))
        by_kind[kind] = (own + ours[members].sum(), other + theirs[members].sum())
    assert all(own == pytest.approx(other, rel=0.25) for own, other in by_kind.values()), by_kind


def test_products_move_the_same_bytes_exactly(pair: tuple[Graph, Counter, Any, Any]) -> None:
    graph, counter, _, _ = pair
    ours, theirs = touched(graph), np.array(counter.nbytes)
    for (kind, variant), members in graph.kernels.items():
        if kind in ("gemm", "bmm", "attention"):
            assert ours[members].tolist() == theirs[members].tolist(), (kind, variant)


def test_flops_within_one_percent(pair: tuple[Graph, Counter, Any, Any]) -> None:
    graph, _, step, _ = pair
    with FlopCounterMode(display=False) as counter:
        step()
    counted = sum(counter.get_flop_counts()["Global"].values())
    names = {str(name).removeprefix("aten.") for name in counter.get_flop_counts()["Global"]}
    attention = {label[0] for label in graph.labels if label[1] == "attention"}
    if not names & attention:  # the counter knows the kernels of GPUs, not this one: Dao 2023, arXiv:2307.08691, 4.1
        for (kind, variant), members in graph.kernels.items():
            for i in members if kind == "attention" else ():
                s = graph[int(i)].features
                forward = 4 * s["batch"] * s["m"] * s["n"] * s["k"] / (2 if "causal" in variant else 1)
                counted += forward * (2.5 if variant.startswith("backward") else 1)
    assert graph.column("flops").sum() == pytest.approx(counted, rel=0.01)


def test_watching_does_not_change_the_result() -> None:
    """A timer that kept tensors alive, or ran something twice, would change gradients or their accumulation."""
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


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_other_dtypes_have_the_same_bytes(dtype: str) -> None:
    workload = DLRM(batch=64, sparse=True, dtype=dtype, **TABLES)
    step, _ = build_step(workload)
    step()
    with Counter() as counter:
        step()
    graph = workload.graphs()[0]
    assert [label[0] for label in graph.labels] == counter.names
    assert touched(graph).sum() == pytest.approx(sum(counter.nbytes), rel=0.05)


# Two ranks.

C10D = {"alltoall_base_": "all_to_all", "allreduce_": "all_reduce"}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("owners", [(0, 1, 1), (1, 1, 1)], ids=["imbalanced", "one-rank-empty"])
def test_hybrid_twins_run_what_their_graphs_say(owners: tuple[int, ...], overlap: bool) -> None:
    workload = DLRM(batch=32, sparse=True, overlap=overlap, **TABLES)
    plan = Plan.from_owners(owners, ranks=2)
    job = {"task": "iteration", "workload": samples.dump(workload), "owners": owners, "seconds": 0, "operations": 1}
    results = run_processes({**job, "minimum": 2}, ranks=2, timeout=60)
    for graph, result in zip(workload.graphs(2, plan), results, strict=True):
        assert [label[0] for label in graph.labels] == [C10D.get(name, name) for name in result["names"]]
        assert len(result["operation_seconds"]) == len(graph)
        assert result["n"] == 2
    assert os.environ.get("RANK") is None


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("overlap", [False, True])
def test_data_parallel_twins_run_what_their_graphs_say(overlap: bool) -> None:
    """Buckets of DistributedDataParallel: 1 MiB, then 25 MiB, gradients in the order in which they come."""
    sizes = {"layers": 3, "hidden": 512, "heads": 4, "vocabulary": 2000, "sequence": 8, "batch": 2}
    workload = Transformer.gpt2(**sizes, overlap=overlap)
    job = {"task": "iteration", "workload": samples.dump(workload), "seconds": 0, "operations": 1, "minimum": 2}
    results = run_processes(job, ranks=2, timeout=60)
    graphs = workload.graphs(2)
    for graph, result in zip(graphs, results, strict=True):
        assert [label[0] for label in graph.labels] == [C10D.get(name, name) for name in result["names"]]
        assert 0 <= result["idle"] <= 2 * result["q3"] and np.isfinite(result["operation_seconds"]).all()
        assert graph.waits is None or overlap
    sent = graphs[0].column("nbytes")[graphs[0].collectives]
    assert sent.sum() == 4 * graphs[0].parameters
    assert len(sent) == (3 if overlap else 1)


TWO_RANKS: dict[str, DLRM | Transformer] = {
    "exchanged": DLRM(batch=32, **TABLES),
    "exchanged-overlapped": DLRM(batch=32, overlap=True, **TABLES),
    "cross-overlapped": DLRM(
        batch=32, overlap=True, sparse=False, interaction="cross", cross=(2, 24), optimizer="adagrad", **TABLES
    ),
    "flat": Transformer.bert(**{**SIZES, "batch": 4}, overlap=False),
    "buckets": Transformer.gpt2(**{**SIZES, "batch": 4, "hidden": 192}),
}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("name", TWO_RANKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_captured_twins_are_what_their_graphs_say(name: str, rank: int) -> None:
    """Operations, sizes, bytes, collectives and where they are waited for, without a second process."""
    workload = TWO_RANKS[name]
    plan = Plan.from_owners([0, 1, 1], ranks=2) if isinstance(workload, DLRM) else None
    captured = capture(lambda: build_step(workload, plan=plan, rank=rank, ranks=2)[0], ranks=2, rank=rank)
    built = workload.graphs(2, plan)[rank]
    assert [label[:4] for label in captured.labels] == [label[:4] for label in built.labels]
    assert captured.traffic.tolist() == built.traffic.tolist()
    for key in ("flops", "elements", "rows", "m", "n", "k", "nbytes", "lookups", "bags", "dim", "group"):
        assert captured.column(key).tolist() == built.column(key).tolist(), key
    waits = [None if graph.waits is None else graph.waits.tolist() for graph in (captured, built)]
    assert waits[0] == waits[1]
