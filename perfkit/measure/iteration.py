"""Runnable twins of the workloads: the same training step in PyTorch, timed whole and operation by operation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfkit.measure.kernels import draw_rows
from perfkit.measure.reference import Reference
from perfkit.measure.runner import Timing
from perfkit.measure.twins import RecommendationModule, TransformerModule
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.modules import build_net_step
from perfkit.workloads.nets import Net
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import load
from perfkit.workloads.steps import assemble_step, share_gradients
from perfkit.workloads.transformer import Transformer
from perfkit.workloads.vocabulary import VIEWS

__all__ = ["OperationTimer", "build_step", "time_iteration"]

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

#: Time between two references [s]: machines change their speed within a second.
_BLOCK = 0.025

#: Settings of a workload that this module builds.
_BUILT = {"embedding": "separate", "loop": "lean", "fused": False, "mixed": False, "compiled": False}


def build_step(
    workload: DLRM | Transformer | Net,
    *,
    plan: Plan | None = None,
    rank: int = 0,
    ranks: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Callable[[], Any], nn.Module]:
    """The training step of a workload, ready to be called over and over.

    Parameters
    ----------
    workload : DLRM, Transformer or Net
        The iteration.
    plan : Plan, optional
        Placement of a DLRM's tables.
    rank : int
        This process's rank [-].
    ranks : int
        Ranks of the process group; those of the plan where there is one [-].
    device : str
        Torch device.
    seed : int
        Seed of weights and data; eight batches rotate [-].

    Returns
    -------
    step : callable
        Zeroes gradients, runs forward, backward and the optimizer.
    module : torch.nn.Module
        The model.

    Raises
    ------
    ValueError
        For what can be predicted, but is not built here.
    """
    for name, built in _BUILT.items():
        if (value := getattr(workload, name, built)) != built:
            raise ValueError(f"{name} is {value!r}; only {built!r} is measured, other values are predicted")
    if isinstance(workload, Net):
        return build_net_step(**asdict(workload), ranks=ranks, device=device, seed=seed + rank)
    torch.manual_seed(seed + rank)
    rng, dtype = np.random.default_rng(seed + 1000 * rank), _DTYPES[workload.dtype]
    ranks = plan.ranks if plan else ranks
    shared = share_gradients if ranks > 1 and getattr(workload, "overlap", False) else None
    if isinstance(workload, DLRM):
        placed = workload.place(plan, ranks)
        module: Any = RecommendationModule(workload, placed, rank).to(device, dtype)
        batches = [_dlrm_batch(workload, placed, rank, rng, device, dtype) for _ in range(8)]
        local = {id(p) for p in module.tables.parameters()}
        reduced = [p for p in module.parameters() if id(p) not in local]
        if shared:
            module.bottom, module.top = shared(module.bottom), shared(module.top)
        loss_of: Callable[[Tensor, Tensor], Tensor] = F.binary_cross_entropy_with_logits
    else:
        module = TransformerModule(workload).to(device, dtype)
        reduced, module = list(module.parameters()), shared(module) if shared else module
        shape = (workload.batch // ranks, workload.sequence)
        batches = []
        for _ in range(8):
            tokens = torch.from_numpy(rng.integers(0, workload.vocabulary, shape)).to(device)
            batches.append(((tokens, torch.zeros_like(tokens)), tokens))

        def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), tokens.view(-1))

    whole = [] if shared or ranks == 1 else reduced
    return assemble_step(module, batches, loss_of, optimizer=workload.optimizer, reduced=whole), module


def _dlrm_batch(model: DLRM, plan: Plan, rank: int, rng: np.random.Generator, device: str, dtype: torch.dtype) -> Any:
    batch = model.batch // plan.ranks
    indices, offsets = [], []
    for table in (model.tables[t] for t in plan.tables_of(rank)):
        lookups = round(model.batch * table.pooling)
        indices.append(torch.from_numpy(draw_rows(rng, table.rows, table.exponent, lookups)).to(device))
        bags = np.arange(model.batch) * lookups // model.batch
        offsets.append(torch.from_numpy(bags).to(device))
    x = torch.rand(batch, model.features, dtype=dtype, device=device)
    labels = torch.rand(batch, 1, dtype=dtype, device=device).round_()
    return (x, indices, offsets), labels


class OperationTimer(TorchDispatchMode):
    """Times every operation that runs under it, views aside.

    Keeps names, bytes and seconds, never tensors: a kept tensor would change what the autograd engine does.

    Parameters
    ----------
    synchronize : callable, optional
        Waits for the device before and after each operation.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes: list[float] = []
        self.seconds: list[float] = []
        self._synchronize = synchronize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in VIEWS or (name == "clone" and args[0].layout is torch.sparse_coo):
            return func(*args, **(kwargs or {}))
        if self._synchronize:
            self._synchronize()
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":  # it returns at once; the caller would wait right after
            dist.distributed_c10d.Work.unbox(out[-1] if isinstance(out, tuple | list) else out).wait()
        if self._synchronize:
            self._synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.names.append(name)
        self.nbytes.append(_nbytes((args, kwargs)) + _nbytes(out))
        return out


def _nbytes(tree: Any) -> float:
    """Bytes of the tensors of a tree, each counted once."""
    tensors = [t._values() if t.layout is torch.sparse_coo else t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    return float(sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}.values()))


def time_iteration(
    *,
    workload: dict[str, Any],
    owners: Sequence[int] | None = None,
    seconds: float = 2.0,
    operations: int = 0,
    device: str = "cpu",
    seed: int = 0,
    minimum: int = 6,
    synchronize: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Time a workload's iterations in this process, and then the operations inside some of them.

    Parameters
    ----------
    workload : dict
        From `perfkit.workloads.samples.dump`.
    owners : sequence of int, optional
        Rank of every table when several ranks run.
    seconds : float
        Time to spend on whole iterations [s].
    operations : int
        Iterations to run under the operation timer afterwards [-].
    device : str
        Torch device.
    seed : int
        Seed of weights and data [-].
    minimum : int
        Fewest iterations timed [-].
    synchronize : callable, optional
        Waits for the device.

    Returns
    -------
    result : dict
        Timing of one iteration; ``blocks``: medians of iterations in a row [s], and ``references`` before, between and
        after them, see `perfkit.measure.reference` [s]; ``core_share`` that the references got [-]; ``names``,
        ``nbytes`` [B] and median ``operation_seconds`` [s] in program order, and ``operation_references`` around them;
        of several ranks on a CPU also ``idle``: the median time of an iteration that this thread did not compute,
        because it waited for a collective or a collective had its core [s].
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    plan = Plan.from_owners(owners, ranks=ranks) if owners is not None else None
    step, _ = build_step(load(workload), plan=plan, rank=rank, ranks=ranks, device=device, seed=seed)
    wait, reference = synchronize or (lambda: None), Reference(device, synchronize)
    for _ in range(2):
        step()
    wait()
    once = _one(step, wait)
    plan_of_work = [max(minimum, min(400, int(seconds / max(once, 1e-5)))), max(1, min(50, round(_BLOCK / once)))]
    if ranks > 1:
        agreed = torch.tensor(plan_of_work, device=device)
        dist.broadcast(agreed, 0)
        plan_of_work = agreed.tolist()
    count, each = plan_of_work
    result, threads = _time_blocks(step, wait, reference, count, each)
    if ranks > 1 and device == "cpu":
        result["idle"] = float(np.median(threads))
    rows, paces = [], [_look(reference, each)]
    for _ in range(operations):
        with OperationTimer(synchronize) as timer:
            step()
        rows.append(timer.seconds)
        paces.append(_look(reference, each))
        result |= {"names": timer.names, "nbytes": timer.nbytes}
    result |= {"core_share": reference.core_share, "operation_seconds": []}
    if rows:
        result["operation_references"] = _round(paces)
        result["operation_seconds"] = np.median(np.array(rows), axis=0).tolist()
    return result


def _time_blocks(
    step: Callable[[], Any], wait: Callable[[], None], reference: Reference, count: int, each: int
) -> tuple[dict[str, Any], list[float]]:
    """Time iterations in blocks between references; also what of each this thread did not compute [s]."""
    samples: list[float] = []
    idle, shares, blocks, paces = [], [], [], [_look(reference, each)]
    for start in range(0, count, each):
        if each > 1:
            step()  # not timed: it brings back to the caches what the reference displaced
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(min(each, count - start)):
            thread = time.thread_time()
            samples.append(_one(step, wait))
            idle.append(samples[-1] - (time.thread_time() - thread))
        shares.append((time.process_time() - cpu) / (time.perf_counter() - begin))
        blocks.append(float(f"{np.median(samples[start:]):.5g}"))
        paces.append(_look(reference, each))
    timing = Timing.from_samples(samples, float(np.mean(shares)))
    return {**vars(timing), "blocks": blocks, "references": _round(paces)}, idle


def _look(reference: Reference, each: int) -> np.ndarray:
    """The references once, or three times after a step so long that there is time for it."""
    return np.asarray(np.median([reference() for _ in range(3 if each == 1 else 1)], axis=0))


def _round(paces: Sequence[np.ndarray]) -> list[list[float]]:
    """Times of the references; four digits are more than they are known to."""
    return [[float(f"{t:.4g}") for t in pace] for pace in paces]


def _one(step: Callable[[], Any], wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start
