"""Runnable twins of the workloads: the same training step in PyTorch, timed whole and operation by operation."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfkit.measure.kernels import draw_rows
from perfkit.measure.runner import Timing
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import load
from perfkit.workloads.transformer import Transformer

__all__ = ["OperationTimer", "build_step", "time_iteration"]

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

#: Operations that only make views or bookkeeping, and copies that exist under a dispatch mode alone.
VIEWS = frozenset(
    "view t detach transpose expand _unsafe_view split slice unsqueeze as_strided alias select squeeze permute unbind "
    "_indices _values _local_scalar_dense _record_function_enter_new _record_function_exit set_ resize_ empty "
    "new_empty lift_fresh is_same_size split_with_sizes zeros".split()
)


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class _Exchange(torch.autograd.Function):
    """All_to_all of pooled rows: whole batch of local tables in, local batch of all tables out."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, widths: Sequence[int]) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        batch = send.shape[0] // ranks
        ctx.widths, ctx.shape = widths, send.shape
        received = send.new_empty(batch * sum(widths))
        dist.all_to_all_single(received, send.view(-1), [batch * w for w in widths], [batch * widths[rank]] * ranks)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ranks, rank, widths = dist.get_world_size(), dist.get_rank(), ctx.widths
        batch = ctx.shape[0] // ranks
        out = gradients[0].new_empty(ctx.shape)
        flat = gradients[0]
        dist.all_to_all_single(out.view(-1), flat, [batch * widths[rank]] * ranks, [batch * w for w in widths])
        return (out if out.numel() else None), None  # nothing came, so nothing is accumulated


#: Settings of a workload that this module builds.
_BUILT = {"embedding": "separate", "loop": "lean", "fused": False, "mixed": False}


class _DLRM(nn.Module):
    def __init__(self, model: DLRM, plan: Plan, rank: int) -> None:
        super().__init__()
        self.model, self.plan, self.rank = model, plan, rank
        dim, features = model.tables[0].dim, len(model.tables) + 1
        self.bottom = _mlp((model.features, *model.bottom), last_relu=True)
        tables = [model.tables[t] for t in plan.tables_of(rank)]
        self.tables = nn.ModuleList(nn.EmbeddingBag(t.rows, dim, mode="sum", sparse=model.sparse) for t in tables)
        for table, module in zip(tables, self.tables, strict=True):
            nn.init.uniform_(cast(Tensor, module.weight), -(table.rows**-0.5), table.rows**-0.5)
        self.top = _mlp((dim + features * (features - 1) // 2, *model.top), last_relu=False)
        i, j = torch.tril_indices(features, features, -1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)

    def forward(self, x: Tensor, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        x = self.bottom(x)
        batch, dim = x.shape
        pooled = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        if self.plan.ranks > 1:
            pooled = self._exchange(pooled, batch, dim)
        vectors = torch.cat([x, *pooled], 1).view(batch, -1, dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([x, products[:, cast(Tensor, self.i), cast(Tensor, self.j)]], 1))

    def _exchange(self, pooled: list[Tensor], batch: int, dim: int) -> list[Tensor]:
        widths = [dim * len(self.plan.tables_of(rank)) for rank in range(self.plan.ranks)]
        if pooled:
            send = torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]
        else:  # nothing to send, but the other ranks wait for this one in the backward exchange too
            weight = cast(nn.Linear, self.bottom[0]).weight
            send = weight.new_empty(batch * self.plan.ranks, 0).requires_grad_()
        received = _Exchange.apply(send, widths)
        parts = received.split([batch * w for w in widths])
        return [part.view(batch, w) for part, w in zip(parts, widths, strict=True) if w]


class _Attention(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h = model.hidden
        self.heads, self.causal, self.fused = model.heads, model.causal, model.attention == "fused"
        self.inputs = nn.ModuleList([nn.Linear(h, 3 * h)] if model.causal else [nn.Linear(h, h) for _ in range(3)])
        self.output = nn.Linear(h, h)
        mask = torch.triu(torch.full((model.sequence, model.sequence), float("-inf")), 1)
        self.register_buffer("mask", mask if model.causal and not self.fused else torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.inputs[0](x).split(h, 2) if self.causal else [layer(x) for layer in self.inputs]
        q, k, v = (part.view(b, s, self.heads, h // self.heads).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) * (h // self.heads) ** -0.5
            mixed = torch.softmax(scores + self.mask if self.causal else scores, -1) @ v
        return self.output(mixed.transpose(1, 2).reshape(b, s, h))


class _Layer(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h, self.causal = model.hidden, model.causal
        mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU("tanh" if model.causal else "none"), nn.Linear(4 * h, h))
        if self.causal:  # registered in the order of use, which is the order in which the optimizer updates
            self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(h), _Attention(model), nn.LayerNorm(h), mlp
        else:
            self.attention, self.norm1, self.mlp, self.norm2 = _Attention(model), nn.LayerNorm(h), mlp, nn.LayerNorm(h)

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class _Transformer(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h, self.causal = model.hidden, model.causal
        self.words, self.places = nn.Embedding(model.vocabulary, h), nn.Embedding(model.positions, h)
        if not model.causal:
            self.types, self.first_norm = nn.Embedding(2, h), nn.LayerNorm(h)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.layers))
        if not model.causal:
            self.transform = nn.Sequential(nn.Linear(h, h), nn.GELU())
        self.norm = nn.LayerNorm(h)
        self.decoder = nn.Linear(h, model.vocabulary, bias=not model.causal)
        self.decoder.weight = self.words.weight
        self.register_buffer("positions", torch.arange(model.sequence))
        for module in self.modules():  # as published: wider weights saturate the softmax, and denormals slow it down
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(self.positions)
        if not self.causal:
            x = self.first_norm(x + self.types(types))
        for layer in self.layers:
            x = layer(x)
        if not self.causal:
            x = self.transform(x)
        return self.decoder(self.norm(x))


def build_step(
    workload: DLRM | Transformer, *, plan: Plan | None = None, rank: int = 0, device: str = "cpu", seed: int = 0
) -> tuple[Callable[[], Any], nn.Module]:
    """The training step of a workload, ready to be called over and over.

    Parameters
    ----------
    workload : DLRM or Transformer
        The iteration.
    plan : Plan, optional
        Placement of a DLRM's tables; several ranks need a process group.
    rank : int
        This process's rank [-].
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
    torch.manual_seed(seed + rank)
    rng, dtype = np.random.default_rng(seed + 1000 * rank), _DTYPES[workload.dtype]
    ranks = plan.ranks if plan else 1
    if isinstance(workload, DLRM):
        placed = workload.place(plan, ranks)
        module: nn.Module = _DLRM(workload, placed, rank).to(device, dtype)
        batches = [_dlrm_batch(workload, placed, rank, rng, device, dtype) for _ in range(8)]
        local = {id(p) for p in module.tables.parameters()}  # type: ignore[union-attr]
        loss_of: Callable[[Tensor, Tensor], Tensor] = F.binary_cross_entropy_with_logits
    else:
        module, local = _Transformer(workload).to(device, dtype), set()
        shape = (workload.batch // ranks, workload.sequence)
        batches = []
        for _ in range(8):
            tokens = torch.from_numpy(rng.integers(0, workload.vocabulary, shape)).to(device)
            batches.append(((tokens, torch.zeros_like(tokens)), tokens))

        def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), tokens.view(-1))

    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[workload.optimizer]
    optimizer = make(module.parameters(), lr=1e-4)
    dense = [p for p in module.parameters() if id(p) not in local]
    count = 0

    def step() -> None:
        nonlocal count
        inputs, labels = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        loss_of(module(*inputs), labels).backward()
        if ranks > 1:
            _all_reduce(dense, ranks)
        optimizer.step()

    return step, module


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


def _all_reduce(parameters: Sequence[nn.Parameter], ranks: int) -> None:
    """Average gradients in one flat piece."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    flat.div_(ranks)
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


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
        Timing of one iteration, and ``names``, ``nbytes`` [B] and median ``operation_seconds`` [s] in program order.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    plan = Plan.from_owners(owners, ranks=ranks) if owners is not None else None
    step, _ = build_step(load(workload), plan=plan, rank=rank, device=device, seed=seed)
    wait = synchronize or (lambda: None)
    for _ in range(2):
        step()
    wait()
    once = _one(step, wait)
    count = max(minimum, min(400, int(seconds / max(once, 1e-5))))
    if ranks > 1:
        agreed = torch.tensor([count], device=device)
        dist.broadcast(agreed, 0)
        count = int(agreed)
    begin, cpu = time.perf_counter(), time.process_time()
    samples = [_one(step, wait) for _ in range(count)]
    share = (time.process_time() - cpu) / (time.perf_counter() - begin)
    result: dict[str, Any] = {**vars(Timing.from_samples(samples, share)), "operation_seconds": []}
    rows = []
    for _ in range(operations):
        with OperationTimer(synchronize) as timer:
            step()
        rows.append(timer.seconds)
        result |= {"names": timer.names, "nbytes": timer.nbytes}
    if rows:
        result["operation_seconds"] = np.median(np.array(rows), axis=0).tolist()
    return result


def _one(step: Callable[[], Any], wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start
