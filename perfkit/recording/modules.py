"""The workloads as training steps of PyTorch: modules, data, averaging of gradients over ranks,
optimizer."""

import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perfkit.ground.units import check_choice, show
from perfkit.models.optimizers import find_optimizer
from perfkit.recording.convolutions import Residual, build_net
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.transformer import Transformer

#: PyTorch's data types for the number formats of platforms.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: Settings of a workload for which only one value is built here; other values can only be
#: predicted.
_BUILT = {
    "embedding": "separate",
    "pipeline": "local",
    "fused": False,
    "checkpoint": False,
    "accumulate": 1,
    "parallel": "ddp",
    "kv_heads": 0,
    "head_width": 0,
    "q_lora_rank": 0,
    "kv_lora_rank": 0,
    "rope_width": 0,
    "value_width": 0,
    "window": 0,
    "global_interval": 0,
    "sinks": False,
    "score_cap": False,
    "logit_cap": False,
    "rotary_width": 0,
    "mtp_layers": 0,
    "qk_norm_of": "head",
    "norm_place": "before",
    "parallel_mlp": False,
    "parallel_norms": 1,
    "qkv_bias": None,
    "output_bias": None,
    "mlp_bias": None,
    "inner": 0,
    "dropout": 0.0,
    "norm": "layer",
    "gated": False,
    "activation": "",
    "joined": "",
    "rotary": False,
    "qk_norm": False,
    "tie": True,
    "bias": True,
    "head_bias": False,
    "padded_positions": 0,
    "token_types": 2,
    "scaled_embeddings": False,
    "scaled_branches": False,
    "scaled_logits": False,
    "experts": 0,
    "expert_width": 0,
    "shared_experts": 0,
    "shared_width": 0,
    "shared_gate": False,
    "expert_bias": False,
    "dense_layers": 0,
    "expert_interval": 1,
    "lora_rank": 0,
    "frozen_format": "",
    "optimizer_in_backward": False,
    "fused_accumulation": False,
    "vocabulary_multiple": 1,
    "keeps_fp8": False,
    "fp8_recipe": "",
    "fp8_gathers": False,
    "loss_chunks": 1,
    "patch": 0,
    "mlps": None,
    "separate_exchange": False,
    "reduction": "buckets",
    "delay_weights": False,
    "epilogues": False,
}


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Build PyTorch's optimizer.

    Parameters
    ----------
    name : str
        One of `perfkit.models.optimizers.OPTIMIZERS` that updates dense weights.
    parameters : iterable of tensor
        What it trains.

    Returns
    -------
    optimizer : torch.optim.Optimizer
        With PyTorch's settings beside those that the name stands for.

    Raises
    ------
    ValueError
        For an unknown name, and for an optimizer that PyTorch does not have.
    """
    optimizer = find_optimizer(name, dense=True)
    if optimizer.others:
        raise ValueError(
            f"optimizer is {name!r}, beside which {optimizer.others!r} updates embeddings, head, norms and "
            "biases; build both in a function that returns the step, and capture that"
        )
    if not optimizer.torch_class:
        raise ValueError(
            f"optimizer is {name!r}; torch.optim has no such class; "
            "build it in a function that returns the step, and capture that"
        )
    make = getattr(torch.optim, optimizer.torch_class)
    made: torch.optim.Optimizer = make(parameters, lr=1e-4, **optimizer.torch_arguments)
    return made


def _mlp(widths: Sequence[int], *, last_relu: bool) -> list[nn.Module]:
    """Layers of a multilayer perceptron."""
    layers: list[nn.Module] = []
    for pair in itertools.pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU()]
    return layers if last_relu else layers[:-1]


class _Cross(nn.Module):
    """Low-rank cross layers of DLRM-v2: x = x0 (W2 W1 x + b) + x, where W1 projects to a few
    columns."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList()
        for _ in range(layers):
            pair = nn.ModuleList(
                [nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)]
            )
            pair.bias = nn.Parameter(torch.zeros(width))
            self.layers.append(pair)

    def forward(self, first: Tensor) -> Tensor:
        x = first
        for layer in self.layers:
            narrow, wide = layer
            x = first * (wide(narrow(x)) + layer.bias) + x
        return x


class _Exchange(torch.autograd.Function):
    """All_to_all of pooled rows. With overlap, forward only starts it, and backward ends that of
    the gradients."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, widths: Sequence[int], flight: dict[str, Any]) -> Tensor:
        ctx.flight = flight
        ranks = dist.get_world_size()
        batch = send.shape[0] // ranks
        own_width = widths[dist.get_rank()]
        to_receive = [batch * width for width in widths]
        to_send = [batch * own_width for _ in range(ranks)]
        flight["shape"], flight["sizes"] = send.shape, (to_receive, to_send)
        received = send.new_empty(batch * sum(widths))
        out, given = flight["sizes"]
        flight["work"] = dist.all_to_all_single(
            received, send.view(-1), out, given, async_op=flight["overlap"]
        )
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.flight["overlap"]:
            ctx.flight["work"].wait()
        else:
            _send_back(gradients[0], ctx.flight)
        out = ctx.flight.pop("out")
        return (out if out.numel() else None), None, None  # a rank without tables has no gradient


class _Arrive(torch.autograd.Function):
    """The end of an overlapped all_to_all: forward waits for the rows, and backward starts to send
    their gradients."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: dict[str, Any]) -> Tensor:
        ctx.flight = flight
        flight["work"].wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _send_back(gradients[0], ctx.flight)
        return gradients[0], None


def _send_back(flat: Tensor, flight: dict[str, Any]) -> None:
    """Start the all_to_all of the gradients."""
    flight["out"] = flat.new_empty(flight["shape"])
    came, sent = flight["sizes"]
    flight["work"] = dist.all_to_all_single(
        flight["out"].view(-1), flat, sent, came, async_op=flight["overlap"]
    )


class _Recommendation(nn.Module):
    """The part of a DLRM that one rank holds: its tables, and both MLPs."""

    i: Tensor
    j: Tensor

    def __init__(self, model: DLRM, plan: Plan, rank: int) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self.dim = model.tables[0].dim
        self.widths = [self.dim * len(plan.tables_of(rank)) for rank in range(plan.ranks)]
        features = len(model.tables) + 1
        self.bottom = nn.Sequential(*_mlp((model.features, *model.bottom), last_relu=True))
        self.tables = nn.ModuleList()
        for table in (model.tables[t] for t in plan.tables_of(rank)):
            # its own first values would take as long again, and are not used
            weight = torch.empty(table.rows, table.dim)
            bag = nn.EmbeddingBag.from_pretrained(
                weight, freeze=False, mode="sum", sparse=model.sparse
            )
            self.tables.append(bag)
            nn.init.uniform_(bag.weight, -(table.rows**-0.5), table.rows**-0.5)
        width, first = self.dim + features * (features - 1) // 2, list[nn.Module]()
        if model.interaction == "cross":
            width = self.dim * features
            first = [_Cross(width, *model.cross)]
        self.top = nn.Sequential(*first, *_mlp((width, *model.top), last_relu=False))
        if not first:
            i, j = torch.tril_indices(features, features, -1)
            self.register_buffer("i", i)
            self.register_buffer("j", j)

    def forward(self, x: Tensor, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        batch, parallel = x.shape[0], self.plan.ranks > 1
        overlap = parallel and self.model.overlap
        if not overlap:
            x = self.bottom(x)
        pooled = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        if parallel:
            flight: dict[str, Any] = {"overlap": overlap}
            if pooled:
                send = torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]
            else:
                # the gradient of this empty tensor lets a rank without tables join the backward
                # exchange
                send = (
                    next(self.bottom.parameters())
                    .new_empty(batch * self.plan.ranks, 0)
                    .requires_grad_()
                )
            received = _Exchange.apply(send, self.widths, flight)
            if overlap:
                x = self.bottom(x)
                received = _Arrive.apply(received, flight)
            parts = received.split([batch * w for w in self.widths])
            pooled = [part.view(batch, w) for part, w in zip(parts, self.widths, strict=True) if w]
        joined = torch.cat([x, *pooled], 1)
        if self.model.interaction == "cross":
            return self.top(joined)
        vectors = joined.view(batch, -1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.i, self.j]], 1))


class _Attention(nn.Module):
    """Self-attention: one kernel where the workload says so, else products and a softmax."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h = model.hidden
        self.heads, self.causal = model.heads, model.causal
        self.fused = model.attention not in ("eager", "math")
        self.inputs = nn.ModuleList(
            [nn.Linear(h, 3 * h)] if model.causal else [nn.Linear(h, h) for _ in range(3)]
        )
        self.output = nn.Linear(h, h)
        mask = torch.triu(torch.full((model.sequence, model.sequence), float("-inf")), 1)
        self.register_buffer("mask", mask if model.causal and not self.fused else torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        if self.causal:
            parts = self.inputs[0](x).split(h, 2)
        else:
            parts = [layer(x) for layer in self.inputs]
        q, k, v = [part.view(b, s, self.heads, h // self.heads).transpose(1, 2) for part in parts]
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) * (h // self.heads) ** -0.5
            mixed = torch.softmax(scores + self.mask if self.causal else scores, -1) @ v
        return self.output(mixed.transpose(1, 2).reshape(b, s, h))


class _Embeddings(nn.Module):
    """Sum of the embeddings of words, of their positions and, in a BERT, of their types."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.words = nn.Embedding(model.vocabulary, model.hidden)
        self.places = nn.Embedding(model.positions, model.hidden)
        self.types = None if model.causal else nn.Embedding(2, model.hidden)
        self.register_buffer("positions", torch.arange(model.sequence))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, types = inputs
        x = self.words(tokens) + self.places(self.positions)
        return x + self.types(types) if self.types else x


def _find_loss_of_words(scores: Tensor, words: Tensor) -> Tensor:
    """Cross entropy of the scores of all words of a vocabulary, over all tokens."""
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), words.view(-1))


def _build_words(model: Transformer) -> nn.Module:
    """A BERT with a masked-token head, or a GPT-2; layers are registered in the order of use, for
    the optimizer."""
    h, causal = model.hidden, model.causal
    words = _Embeddings(model)
    layers: list[nn.Module] = [words] if causal else [words, nn.LayerNorm(h)]
    for _ in range(model.layers):
        mlp = nn.Sequential(
            nn.Linear(h, 4 * h), nn.GELU("tanh" if causal else "none"), nn.Linear(4 * h, h)
        )
        for body in (_Attention(model), mlp):
            norm = nn.LayerNorm(h)
            layers += [Residual(nn.Sequential(norm, body))] if causal else [Residual(body), norm]
    layers += [] if causal else [nn.Linear(h, h), nn.GELU()]
    module = nn.Sequential(
        *layers, nn.LayerNorm(h), nn.Linear(h, model.vocabulary, bias=not causal)
    )
    module[-1].weight = words.words.weight
    # as published: large weights would saturate the softmax and make slow denormals
    for each in module.modules():
        if isinstance(each, nn.Linear | nn.Embedding):
            nn.init.normal_(each.weight, std=0.02)
    return module


def draw_rows(rng: np.random.Generator, rows: int, exponent: float, n: int) -> np.ndarray:
    """Draw row numbers by a Zipf law; popular rows are scattered over the table.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of randomness.
    rows : int
        Rows of the table [-].
    exponent : float
        Zipf exponent, 0 for uniform [-].
    n : int
        Number of draws [-].

    Returns
    -------
    indices : array of int64
        Row numbers from 0 to ``rows - 1``.
    """
    if exponent == 0.0:
        return rng.integers(0, rows, n)
    cumulative, step = _cumulative(rows, exponent), max(1, round(rows * 0.6180339887))
    # find a multiplier near the golden section that reaches every row
    while np.gcd(step, rows) != 1:
        step += 1
    ranks = np.searchsorted(cumulative, rng.random(n) * cumulative[-1])
    return (ranks * step + rows // 3) % rows


@lru_cache(maxsize=32)
def _cumulative(rows: int, exponent: float) -> np.ndarray:
    """Cumulative weights of a Zipf law."""
    return np.cumsum(np.arange(1, rows + 1, dtype=float) ** -exponent)


def _draw_batch(
    model: Any, ranks: int, device: str, rng: np.random.Generator, tables: Sequence[EmbeddingTable]
) -> Any:
    """Inputs and labels of one iteration."""
    batch = model.batch // ranks

    def place(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    if isinstance(model, Transformer):
        tokens = place(rng.integers(0, model.vocabulary, (batch, model.sequence)))
        return ((tokens, torch.zeros_like(tokens)),), tokens
    if isinstance(model, DLRM):
        counts = [round(model.batch * table.pooling) for table in tables]
        drawn = [
            place(draw_rows(rng, t.rows, t.exponent, n))
            for t, n in zip(tables, counts, strict=True)
        ]
        offsets = [place(np.arange(model.batch) * n // model.batch) for n in counts]
        dtype = DTYPES[model.dtype]
        x = torch.rand(batch, model.features, dtype=dtype, device=device)
        y = torch.rand(batch, 1, dtype=dtype, device=device)
        return (x, drawn, offsets), y.round_()
    if model.name == "xlnet":
        tokens = torch.randint(model.classes, (batch, model.size), device=device)
        return (tokens,), tokens.view(-1)
    images = torch.randn(batch, 3, model.size, model.size, dtype=DTYPES[model.dtype], device=device)
    return (images,), torch.randint(model.classes, (batch,), device=device)


def _share_gradients(module: nn.Module) -> nn.Module:
    """Average gradients over ranks in buckets, during the backward pass."""
    if not any(p.requires_grad for p in module.parameters()):
        return module
    # in torch 2.13
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(module, **options)


def _all_reduce(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over ranks in one flat tensor."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for parameter, gradient in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = gradient.view_as(parameter)


def _check_tables(model: DLRM) -> None:
    """Check that tables have the data type of all other weights."""
    of_weights = "fp32" if model.mixed else model.dtype
    if any(DTYPES.get(table.number_format) != DTYPES[of_weights] for table in model.tables):
        raise ValueError(
            f"table_dtype is {show(model.table_dtype)}; only {of_weights!r}, that of other weights, is "
            "measured, other values are predicted"
        )
    for table in model.tables:
        if table.host_bytes:
            raise ValueError(
                f"kernel is {table.kernel!r}; only tables in device memory are measured, others are "
                "predicted"
            )
    if any(table.managed_collision for table in model.tables):
        raise ValueError(
            "managed_collision is given; only tables whose ids are rows are measured, others are "
            "predicted"
        )
    if any(table.num_features > 1 for table in model.tables):
        raise ValueError(
            "num_features is above 1; only tables of one feature are measured, others are predicted"
        )
    if any(table.weighted for table in model.tables):
        raise ValueError(
            "weighted is True; only lookups without weights are measured, others are predicted"
        )


def build_step(
    workload: Any,
    *,
    plan: Plan | None = None,
    rank: int = 0,
    ranks: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Callable[[], Any], nn.Module]:
    """Build the training step of a workload, which can be called repeatedly.

    Parameters
    ----------
    workload : DLRM, Transformer or Net
        The iteration.
    plan : Plan, optional
        Placement of a DLRM's tables.
    rank : int
        This process's rank [-].
    ranks : int
        Ranks of the process group; a plan brings its own number [-].
    device : str
        Torch device.
    seed : int
        Seed of weights and data; the step goes through eight batches in turn [-].

    Returns
    -------
    step : callable
        Sets gradients to zero, runs forward, backward and optimizer.
    module : torch.nn.Module
        The model.

    Raises
    ------
    ValueError
        For a setting that can be predicted but is not built here.
    """
    for name, built in _BUILT.items():
        value = getattr(workload, name, getattr(plan, name, built))
        if value != built:
            raise ValueError(
                f"{name} is {value!r}; only {built!r} is measured, other values are predicted"
            )
    if isinstance(workload, DLRM):
        _check_tables(workload)
    torch.manual_seed(seed + rank)
    rng, ranks = np.random.default_rng(seed + 1000 * rank), plan.ranks if plan else ranks
    tables: list[EmbeddingTable] = []
    module: Any
    loss_of: Callable[..., Tensor] = F.cross_entropy
    parts: Sequence[str] = ()  # submodules whose gradients are averaged; empty for the whole module
    if isinstance(workload, DLRM):
        placed = workload.place(plan, ranks)
        parts = ("bottom", "top")
        loss_of = F.binary_cross_entropy_with_logits
        module = _Recommendation(workload, placed, rank)
        tables = [workload.tables[table] for table in placed.tables_of(rank)]
    elif isinstance(workload, Transformer):
        module = _build_words(workload)
        loss_of = _find_loss_of_words
    else:
        module = build_net(workload)
    dtype = DTYPES[check_choice("dtype", workload.dtype, DTYPES)]
    mixed = getattr(workload, "mixed", False)
    module = module.to(device, torch.float32 if mixed else dtype)
    batches = itertools.cycle([_draw_batch(workload, ranks, device, rng, tables) for _ in range(8)])
    averaged: list[nn.Parameter] = []
    for part in parts or [""]:
        averaged += module.get_submodule(part).parameters()
    overlap = ranks > 1 and workload.overlap
    if overlap:
        for part in parts:
            setattr(module, part, _share_gradients(getattr(module, part)))
        module = module if parts else _share_gradients(module)
    name = workload.optimizer
    if name == "sgd" and not isinstance(workload, DLRM | Transformer):
        name = "sgd_momentum"  # as nets are trained
    optimizer = make_optimizer(name, module.parameters())

    def step() -> None:
        inputs, labels = next(batches)
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype, enabled=mixed):
            loss = loss_of(module(*inputs), labels)
        loss.backward()
        if ranks > 1 and not overlap:
            _all_reduce(averaged)
        optimizer.step()

    return step, module
