"""Transformers, from BERT with a masked-token head to Llama, and those that classify images, as one
training iteration."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.ground.number_formats import read_dtype
from perfkit.ground.records import set_fields
from perfkit.ground.units import check_choice, check_positive, check_type, show
from perfkit.models.checkpoints import EVERY_LAYER, Checkpoint, find_checkpoint
from perfkit.models.experts import Imbalance
from perfkit.models.optimizers import find_optimizer
from perfkit.workloads.activations import ACTIVATIONS
from perfkit.workloads.adapters import check_modules, list_adapted
from perfkit.workloads.attention_blocks import UNFUSED
from perfkit.workloads.blocks import PARALLEL, FSDPUnits, record_forward
from perfkit.workloads.fp8 import RECIPES
from perfkit.workloads.frozen_formats import FROZEN_FORMATS
from perfkit.workloads.graph import Graph
from perfkit.workloads.hub_config import read_hub_config
from perfkit.workloads.images import count_image_tokens, count_patches_of_edge
from perfkit.workloads.iteration import finish, update_in_backward
from perfkit.workloads.layer_kinds import has_experts, has_unlike_layers
from perfkit.workloads.layers import NORMS
from perfkit.workloads.operations import ATTENTION
from perfkit.workloads.placement import Plan
from perfkit.workloads.rank_share import RankShare
from perfkit.workloads.sizes import check_ranks, check_size, refuse_sizes
from perfkit.workloads.structure import OpenGraph, Structure, record_graphs, record_structure
from perfkit.workloads.tape import ITEMSIZE, Tape, check_switches
from perfkit.workloads.transformer_presets import TRANSFORMERS, find_preset

#: Fields of published models, by name.
PRESETS = {name: preset.fields for name, preset in TRANSFORMERS.items()}
#: Most tokens of a sequence where nobody says how many: the first pre-training of DeepSeek-V2 and V3,
#: Kimi K2, Qwen2.5, Qwen3 and Phi-4, whose positions are for later stages
#: (reference_data/published/training_sequences.csv) [-].
USUAL_SEQUENCE = 4096
#: Fields that make a model another one than its preset, which then loses its name.
SHAPE = (
    "layers",
    "hidden",
    "heads",
    "vocabulary",
    "patch",
    "classes",
    "kv_heads",
    "head_width",
    "inner",
    "norm",
    "gated",
    "activation",
    "joined",
    "rotary",
    "tie",
    "bias",
    "head_bias",
    "padded_positions",
    "token_types",
    "scaled_embeddings",
    "scaled_branches",
    "scaled_logits",
)
#: Fields of layers with experts: they need experts.
_OF_EXPERTS = {
    "expert_width": 0,
    "shared_experts": 0,
    "shared_width": 0,
    "shared_gate": False,
    "expert_bias": False,
    "dense_layers": 0,
    "expert_interval": 1,
    "expert_groups": 0,
    "top_groups": 0,
}
#: Fields that nobody checked in models of images, which have their defaults there.
_OF_LANGUAGE = (
    *("experts", "lora_rank", "kv_lora_rank", "rotary", "qk_norm", "mtp_layers", "loss_chunks"),
    *("window", "sinks", "score_cap", "logit_cap", "norm_place", "parallel_mlp"),
    *("head_bias", "padded_positions", "token_types"),
    *("scaled_embeddings", "scaled_branches", "scaled_logits"),
)
#: Most passes through layers in one direction: a graph has to fit into memory [-].
MOST_PASSES = 10_000
#: Most passes of layers that are recorded one by one, because some are computed again and others are
#: not: some seconds [-].
MOST_RECORDED = 1_000
#: Sizes that may be arrays over configurations.
SIZES = ("batch", "sequence", "hidden", "heads", "vocabulary", "positions")
#: Sizes that may differ between workloads of one structure.
_OPEN = ("batch", "sequence")
#: Positional arguments up to the number of layers [-].
_FIRST_SIZE = 5
#: Fields of a `perfkit.workloads.strategy.Strategy`, which people look for in a model.
_OF_STRATEGIES = ("zero", "shards", "tp", "pp", "cp", "dp", "ep", "micro_batch", "schedule")
_CHOICES = {
    "attention": (*UNFUSED, "fused", *ATTENTION),
    "dtype": (*ITEMSIZE, "fp8"),
    "parallel": PARALLEL,
    "norm": NORMS,
    "activation": ("", *ACTIVATIONS),
    "norm_place": ("before", "after", "both"),
    "qk_norm_of": ("head", "all"),
    "joined": ("", "none", "attention", "all"),
    "reduce_dtype": ("", *ITEMSIZE),
    "fp8_recipe": tuple(RECIPES),
    "frozen_format": ("", *FROZEN_FORMATS),
}
_SWITCHES = (
    "fused",
    "optimizer_in_backward",
    "mixed",
    "overlap",
    "gated",
    "rotary",
    "tie",
    "bias",
    "head_bias",
    "scaled_embeddings",
    "scaled_branches",
    "scaled_logits",
    "qk_norm",
    "shared_gate",
    "expert_bias",
    "sinks",
    "score_cap",
    "logit_cap",
    "parallel_mlp",
    "fused_accumulation",
    "fused_permutation",
    "keeps_fp8",
    "fp8_gathers",
)


@dataclass(frozen=True)
class Transformer:
    """One training iteration of a language model, or of one that classifies images: forward, cross
    entropy over all tokens or images, backward, optimizer.

    Build one with `preset`, `bert`, `gpt2` or `vit`. On several ranks it is data-parallel. Batch,
    sequence, hidden, heads, vocabulary and positions are numbers, or arrays with a number for each
    of several configurations.

    Weights are sharded as PyTorch's `fully_shard` does it: each layer is a unit, and the rest is
    another one. If `mixed`, weights are cast before they are gathered, and layers work in `dtype`.

    Parameters
    ----------
    name : str
        Preset or family name.
    causal : bool
        Whether it is like GPT and Llama (pre-norm, causal attention) or like BERT (post-norm, token
        types, masked-token head). With patches it is False, and like ViT (pre-norm, all patches
        attend to all).
    batch : int
        Sequences of one iteration over all ranks, or images [-].
    sequence : int
        Tokens of one sequence; of an image its patches and the vector of its class, (image /
        `patch`)² + 1 [-].
    layers : int
        Transformer layers [-].
    hidden : int
        Width [-].
    heads : int
        Attention heads; they divide the width, unless `head_width` is given [-].
    vocabulary : int
        Different tokens; 0 with patches [-].
    positions : int
        Rows of the position embedding, at least the sequence; with patches as many [-].
    attention : str
        ``fused``: one kernel, which PyTorch chooses for the device. ``flash3`` (also cuDNN's),
        ``flash2``, ``triton`` or ``efficient``: this kernel. ``eager`` or ``math``: scores are
        stored in memory.
    dtype : str
        Data type of products and, unless `mixed`, of weights, activations and gradients. With
        ``fp8`` the operands of products in layers are cast to fp8; attention, the head and all else
        are bf16.
    optimizer : str
        One that updates dense weights, as `perfkit.models.optimizers.list_optimizers` lists them:
        ``adamw``, ``adam``, ``adagrad``, ``sgd_momentum``, ``sgd``, or ``adamw_8bit``, that of
        bitsandbytes (arXiv:2110.02861), whose states are 8-bit numbers with a scale for each block.
        ``muon`` (`torch.optim.Muon`, arXiv:2502.16982) makes the momentum of each matrix of a layer
        orthogonal by products in bf16; ``adamw`` updates all other weights. ``adafactor``
        (`torch.optim.Adafactor`, arXiv:1804.04235) keeps a number for each row and column. Both
        update one weight after another, which ranks cannot share here.
    fused : bool
        Whether one kernel of the optimizer updates all weights.
    optimizer_in_backward : bool
        Whether each weight is updated as soon as its gradient is complete, by an optimizer of its own
        that a hook of the backward pass runs, so that gradients do not live together (torchtune's
        ``optimizer_in_bwd``). It needs one rank, and one micro-batch.
    mixed : bool
        Whether weights, gradients and optimizer states are fp32 while products run in `dtype`. On
        one rank and with ``ddp``, or a `Strategy` that shares nothing but the batch, this is
        autocast: norms, softmax, loss and the sum of all layers are fp32 too. Where weights are
        sharded, or a `Strategy` shares more, layers work in `dtype` and only the loss is fp32, as
        with FSDP's ``MixedPrecisionPolicy`` and Megatron. With buffers of gradients, as
        ``stack="megatron"`` on any ranks, weights are in `dtype` beside fp32 masters: 18 B a number
        with Adam, and 16 B with autocast. If False, weights, gradients and states are in `dtype`: 8 B
        in bf16. The scaling of an fp16 loss is not modelled.
    overlap : bool
        Whether gradients are reduced in buckets during the backward pass (DistributedDataParallel),
        or in one piece after it.
    checkpoint : bool or str
        What the backward pass computes again: True or ``full`` for all of a layer, which keeps only
        its input; else a name as `Strategy.checkpoint` takes it; False or ``none`` for nothing.
    checkpoint_layers : int
        Layers that do so, the first ones; by default all of them [-].
    checkpoint_group : int
        Layers that keep one input together and are computed again at once, see
        `Strategy.checkpoint_group` [-].
    accumulate : int
        Micro-batches of a rank, which together are its share of `batch`; their gradients are summed
        up before the optimizer runs [-].
    parallel : str
        What several ranks shard. ``ddp``: nothing, gradients are averaged. ``zero1`` and ``zero2``:
        states of the optimizer and sums of gradients, reduced with the last micro-batch or with
        each. ``fsdp``: weights too.
    kv_heads : int
        Heads of keys and values, which divide `heads`; 0 for as many [-].
    head_width : int
        Width of a head, as in Qwen3; 0 for `hidden` over `heads` [-].
    q_lora_rank, kv_lora_rank : int
        Numbers of each token from which multi-head latent attention makes queries, and keys with
        values (DeepSeek-V2, arXiv:2405.04434); 0 for queries without such a step, and for other
        attention [-]. Then `head_width` is that part of a head which positions do not rotate.
    rope_width : int
        That part of a head of latent attention which positions rotate [-].
    value_width : int
        Width of a head of values of latent attention; 0 for `head_width` [-].
    window : int
        Keys that a query attends to at most, itself and those before it (Mistral,
        arXiv:2310.06825); 0 for all before it. Fused kernels skip the others; with ``eager`` and
        ``math`` they are computed and masked [-].
    global_interval : int
        Layers of which the last one attends to all tokens and the others to those of the window: 2 in
        Gemma 2 and GPT-OSS, 6 in Gemma 3; 0 if all have the window [-].
    sinks : bool
        Whether each head has a trained number that the softmax of a row adds up with its scores
        (GPT-OSS), in the kernel of attention.
    score_cap, logit_cap : bool
        Whether a hyperbolic tangent keeps scores of attention, or logits, within a cap (Gemma 2,
        arXiv:2408.00118); scores only where they are stored in memory.
    mtp_layers : int
        Layers behind the others that predict further tokens, each with a projection of the layer before
        and of embeddings, and with the head of the model once more (multi-token prediction of
        DeepSeek-V3, arXiv:2412.19437, section 2.2); 0 for none [-].
    rotary_width : int
        Width of the part of each head that positions rotate, as in GPT-NeoX and Phi; 0 for all of it
        [-].
    qk_norm_of : str
        With `qk_norm`: ``head`` for a norm of each head, ``all`` for one of all heads together, as in
        OLMo 2.
    norm_place : str
        Where norms are in a causal model: ``before`` attention and MLP; ``after`` them, ahead of the
        sum (OLMo 2, arXiv:2501.00656); ``both`` (Gemma 2).
    parallel_mlp : bool
        Whether attention and MLP work on the same tokens, and their results are added together
        (GPT-J, Falcon, Phi).
    parallel_norms : int
        With `parallel_mlp`: 1 for one norm of both, 2 for one of each, as in GPT-NeoX [-].
    qkv_bias, output_bias, mlp_bias : bool, optional
        Whether products of queries, keys and values, that behind attention, and those of MLPs have a
        bias; by default as `bias` says.
    inner : int
        Width between the two products of a layer; 0 for four times `hidden`. Also that of experts,
        unless `expert_width` is given [-].
    dropout : float
        Share of numbers that are dropped: of embeddings, of scores in memory, after attention and
        after a layer [-].
    norm : str
        ``layer``, with a weight and a bias; ``layer_weight``, with a weight alone, as in Cohere's;
        ``layer_plain``, with neither, as in OLMo; or ``rms`` (one kernel, as GPUs run
        `torch.nn.RMSNorm`).
    gated : bool
        Whether a product with an activation gates a second product (SwiGLU, GeGLU).
    activation : str
        Between the two products of a layer: ``gelu``, ``gelu_tanh`` (GELU by a hyperbolic tangent),
        ``relu`` or ``silu``; empty for SiLU if `gated`, else for GELU, by a hyperbolic tangent if
        `causal`.
    joined : str
        What one product computes together: ``attention`` for queries, keys and values, as in
        GPT-NeoX; ``all`` for these, and for a gate with what it gates, as in Phi-3; ``none``. Empty
        for ``attention`` in models like GPT-2, which rotate nothing and have as many heads of keys
        as heads, and else for ``none``.
    rotary : bool
        Whether positions rotate queries and keys, as complex numbers, instead of a position
        embedding.
    qk_norm : bool
        Whether queries and keys are normed head by head, as in Qwen3.
    tie : bool
        Whether the head uses the weights of the word embedding.
    bias : bool
        Whether products have a bias.
    head_bias : bool
        Whether the head of a causal model has a bias, as in GPT-J; that of BERT has one.
    padded_positions : int
        Further rows of the position embedding that no token uses, 2 in OPT and RoBERTa [-].
    token_types : int
        Rows of the embedding of token types in models like BERT; 1 in RoBERTa [-].
    scaled_embeddings : bool
        Whether embeddings of words are multiplied by a number, as in Gemma.
    scaled_branches : bool
        Whether the results of attention and MLP are multiplied by a number, as in Granite.
    scaled_logits : bool
        Whether scores of words are multiplied by a number, as in Granite.
    experts : int
        Experts of each layer, which replace its two products (Switch Transformer,
        arXiv:2101.03961); 0 for none [-].
    top_k : int
        Experts that a router chooses for each token [-].
    expert_groups, top_groups : int
        Groups of experts that a router makes, and those of them from which the experts of a token are
        (node-limited routing of DeepSeek-V3, arXiv:2412.19437, section 2.1.2, whose groups lie on one
        node each); 0 for none. They change how many nodes a token is sent to with a `Strategy` of
        ``dispatch="once"`` [-].
    capacity : float
        Rows in the padded buffer of an expert over the tokens that it gets; 1 where nothing is
        dropped or padded (MegaBlocks, arXiv:2211.15841) [-].
    imbalance : float or sequence of float
        How tokens are spread over experts: 0 for equally, the exponent of Zipf's law, or the tokens
        that each expert got, as they were measured. An expert gets each token at most once, so at
        most 1 / `top_k` of all copies: larger shares of the law are cut there and spread over the
        other experts by the law, see `perfkit.models.experts.share_tokens`; larger measured shares
        are refused. The rank that gets most decides how long a layer takes, with a `Strategy` whose
        ranks share experts [-].
    expert_width : int
        Width between the two products of an expert; 0 for as many as `inner` [-].
    shared_experts : int
        Experts that each token goes to beside those that the router chooses (DeepSeekMoE,
        arXiv:2401.06066): one MLP that is as wide as all of them; 0 for none [-].
    shared_width : int
        Width between the two products of a shared expert; 0 for as many as `expert_width` [-].
    shared_gate : bool
        Whether a sigmoid of a product with each token weights what shared experts give, as in
        Qwen2-MoE.
    expert_bias : bool
        Whether the router and the products of experts have a bias, as in GPT-OSS.
    dense_layers : int
        First layers without experts, whose MLPs are `inner` wide; 0 for none [-].
    expert_interval : int
        Layers of which the last one has experts and the others are dense, as 2 in Llama 4 Maverick;
        1 for experts in all of them [-].
    fused_permutation : bool
        Whether the kernel that brings the results of experts into the order of tokens also weights
        and adds them, as Megatron's ``--moe-permute-fusion``; else the weights are a kernel of their
        own.
    reduce_dtype : str
        Data type in which gradients of sharded weights, or of a `Strategy`, are summed up over
        ranks, as that of PyTorch's ``MixedPrecisionPolicy``, which takes `dtype` unless told; here
        by default fp32 if `mixed`.
    fused_accumulation : bool
        Whether the product of a weight gradient adds it to that of earlier micro-batches, so that
        no kernel of its own does. Copies that autocast makes of weights cannot.
    keeps_fp8 : bool
        Whether weights are cast to fp8 once in an iteration, as Transformer Engine does if it is
        told which micro-batch is the first, and not for each micro-batch.
    fp8_recipe : str
        What of an operand of a product in fp8 has a scale of its own, see `Stack.fp8_recipe`; empty
        for known scales.
    lora_rank : int
        Columns of low-rank adapters (LoRA, arXiv:2106.09685); 0 for none. With adapters they alone
        are trained, and all other weights are frozen: these have no gradients and no states, are
        not reduced, and pass gradients on down to the first adapter. All weights are in `dtype`.
        The number by which adapters are scaled, alpha over the rank, changes no time [-].
    lora_modules : str or sequence of str
        The products of a layer that get an adapter: ``all-linear``, ``attention``, ``mlp``, or some
        of ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``gate_proj``, ``up_proj``,
        ``down_proj``. Where queries, keys and values are one product, as in GPT-2, it gets one
        adapter.
    frozen_format : str
        With adapters: how the frozen weights of products of layers are stored (QLoRA,
        arXiv:2305.14314). ``nf4``: 4 bits a number, and a scale in fp32 for 64; ``nf4-dq``: with
        double quantization, scales of 8 bits and one in fp32 for 256 of them, 4.127 bits in all. Each
        product expands its weight first, forward and backward. Embeddings, head, norms and biases
        stay in `dtype`. Empty for all in `dtype`.
    fp8_gathers : bool
        Whether ranks gather the weights of products in fp8 in this format, and cast their own shards
        alone, as torchao's `enable_fsdp_float8_all_gather`; those of experts are gathered as they are.
    loss_chunks : int
        Pieces of tokens in which the cross entropy of a causal model is computed, with its gradients:
        the logits of one piece live at a time, as with Liger's fused linear cross entropy [-].
    vocabulary_multiple : int
        The vocabulary is padded to a multiple of this on each rank that shares products, as
        Megatron-LM does with ``--make-vocab-size-divisible-by`` [-].
    patch : int
        Edge of the patches into which images of three channels are cut, as in ViT (arXiv:2010.11929):
        a convolution makes a vector of each; 0 for a model of language [-].
    classes : int
        Classes of images; 0 without patches [-].
    family : str
        Workload family; platforms are calibrated by family.

    Raises
    ------
    ValueError
        For unknown names, sizes that are not above zero, heads that do not divide the width, or a
        sequence longer than the positions.

    Examples
    --------
    >>> Transformer.bert("bert-base", batch=8, sequence=128).graphs()[0].parameters
    109514298
    """

    name: str
    causal: bool
    batch: int
    sequence: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    attention: str = "fused"
    dtype: str = "fp32"
    optimizer: str = "adamw"
    fused: bool = False
    optimizer_in_backward: bool = False
    mixed: bool = False
    overlap: bool = True
    checkpoint: bool | str = False
    checkpoint_layers: int = EVERY_LAYER
    checkpoint_group: int = 1
    accumulate: int = 1
    parallel: str = "ddp"
    kv_heads: int = 0
    head_width: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_width: int = 0
    value_width: int = 0
    window: int = 0
    global_interval: int = 0
    sinks: bool = False
    score_cap: bool = False
    logit_cap: bool = False
    mtp_layers: int = 0
    rotary_width: int = 0
    qk_norm_of: str = "head"
    norm_place: str = "before"
    parallel_mlp: bool = False
    parallel_norms: int = 1
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    inner: int = 0
    dropout: float = 0.0
    norm: str = "layer"
    gated: bool = False
    activation: str = ""
    joined: str = ""
    rotary: bool = False
    qk_norm: bool = False
    tie: bool = True
    bias: bool = True
    head_bias: bool = False
    padded_positions: int = 0
    token_types: int = 2
    scaled_embeddings: bool = False
    scaled_branches: bool = False
    scaled_logits: bool = False
    experts: int = 0
    top_k: int = 1
    expert_groups: int = 0
    top_groups: int = 0
    capacity: float = 1.0
    imbalance: float | Sequence[float] = 0.0
    expert_width: int = 0
    shared_experts: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    dense_layers: int = 0
    expert_interval: int = 1
    fused_permutation: bool = False
    reduce_dtype: str = ""
    fused_accumulation: bool = False
    keeps_fp8: bool = False
    fp8_recipe: str = ""
    lora_rank: int = 0
    lora_modules: str | Sequence[str] = "all-linear"
    frozen_format: str = ""
    fp8_gathers: bool = False
    loss_chunks: int = 1
    vocabulary_multiple: int = 1
    patch: int = 0
    classes: int = 0
    family: str = field(default="transformer", repr=False)

    def __new__(cls, *settings: Any, **fields: Any) -> "Transformer":
        """Refuse the name of a preset without sizes, in words that name `preset`."""
        name = settings[0] if settings else fields.get("name")
        if isinstance(name, str) and len(settings) < _FIRST_SIZE and "layers" not in fields:
            cure = "one of perfkit models, or Transformer.from_config(path) for a config.json"
            if name in PRESETS:
                cure = f"Transformer.preset({name!r}, batch=8), with what shall differ"
            raise ValueError(
                f"name is {show(name)}, without the sizes of a model; for a published one take {cure}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_images()
        self._check_experts()
        self._check_fp8()
        self._check_latent_attention()
        self._check_loss_chunks()
        self._check_window()
        self._check_branches()
        self._check_further_tokens()
        optimizer = find_optimizer(self.optimizer, dense=True)
        check_switches(self.dtype, **{key: getattr(self, key) for key in _SWITCHES})
        self._check_checkpoints()
        if self.fused:
            optimizer.operations("fused")  # an error if there is no such kernel
        _check_adapters(self)
        _check_update_by_shape(self)
        if self.optimizer_in_backward and self.accumulate > 1:
            raise ValueError(
                f"optimizer_in_backward is True and accumulate is {self.accumulate}; weights are updated with "
                "each micro-batch then; take accumulate=1"
            )
        self._check_heads_and_positions()

    def _check_numbers(self) -> None:
        """Check each size, count and share by itself; else a ValueError."""
        layers = check_positive("layers", self.layers, integer=True, maximum=MOST_PASSES)
        set_fields(self, layers=layers)
        for key in ("patch", "classes"):
            count = check_positive(key, getattr(self, key), integer=True, zero=True)
            set_fields(self, **{key: count})
        for key in SIZES:
            if key == "vocabulary" and self.patch:
                continue
            set_fields(self, **{key: check_size(key, getattr(self, key))})
        accumulate = check_positive(
            "accumulate", self.accumulate, integer=True, maximum=MOST_PASSES // layers
        )
        for key in (
            *("kv_heads", "head_width", "inner", "experts", "expert_width", "shared_experts"),
            *("shared_width", "dense_layers", "lora_rank", "padded_positions"),
            *("q_lora_rank", "kv_lora_rank", "rope_width", "value_width"),
            *("window", "global_interval", "rotary_width", "mtp_layers"),
            *("expert_groups", "top_groups"),
        ):
            count = check_positive(key, getattr(self, key), integer=True, zero=True)
            set_fields(self, **{key: count})
        top_k = check_positive("top_k", self.top_k, integer=True, maximum=self.experts or 1)
        for key, most in (
            ("token_types", 2**20),
            ("expert_interval", layers),
            ("vocabulary_multiple", 2**20),
            ("loss_chunks", 2**10),
        ):
            count = check_positive(key, getattr(self, key), integer=True, maximum=most)
            set_fields(self, **{key: count})
        capacity = check_positive("capacity", self.capacity, maximum=1e3)
        dropout = check_positive("dropout", self.dropout, maximum=1.0, zero=True)
        imbalance = _check_imbalance(self.imbalance, self.experts, top_k)
        set_fields(
            self,
            accumulate=accumulate,
            top_k=top_k,
            capacity=capacity,
            dropout=dropout,
            imbalance=imbalance,
            lora_modules=check_modules(self.lora_modules),
        )

    def _check_names(self) -> None:
        """Check what is one of several names; else a ValueError."""
        check_type("parallel", self.parallel, str)
        if self.parallel == "zero3":  # what FSDP does, by its other name
            set_fields(self, parallel="fsdp")
        if self.parallel == "hsdp":
            raise ValueError(
                "parallel is 'hsdp'; hybrid sharding is a strategy: "
                "take strategy=Strategy.hsdp(64, shards=8), with your numbers of ranks"
            )
        for key in ("dtype", "reduce_dtype"):
            set_fields(self, **{key: read_dtype(key, getattr(self, key), _CHOICES[key])})
        for key, names in _CHOICES.items():
            check_choice(key, getattr(self, key), names)

    def _check_fp8(self) -> None:
        """Check the recipe of products in fp8, and what needs them; else a ValueError."""
        _check_recipe(self.fp8_recipe, self.dtype)
        for key in ("fp8_gathers", "keeps_fp8"):
            if getattr(self, key) and self.dtype != "fp8":
                raise ValueError(
                    f"{key} is True and dtype {self.dtype!r}; take dtype='fp8', or leave {key} out"
                )
        recipe = RECIPES[self.fp8_recipe]
        if self.fp8_gathers and (recipe.casts_again or recipe.cast.copies > 1):
            raise ValueError(
                f"fp8_gathers is True and fp8_recipe {self.fp8_recipe!r}, whose scales differ along the two "
                "sides of a weight; take 'tensorwise' or 'delayed'"
            )

    def _check_loss_chunks(self) -> None:
        """Check what a loss in pieces goes with; else a ValueError."""
        changes_logits = self.head_bias or self.scaled_logits or self.logit_cap
        if self.loss_chunks > 1 and (not self.causal or changes_logits):
            raise ValueError(
                f"loss_chunks is {self.loss_chunks}, and the head of this model has a bias, or scales or caps "
                "its logits; pieces are priced for causal models without these; leave it out"
            )

    def _check_checkpoints(self) -> None:
        """Check what the backward pass computes again, and of which layers; else a ValueError."""
        checkpoint_layers = check_positive(
            "checkpoint_layers",
            self.checkpoint_layers,
            integer=True,
            zero=True,
            maximum=EVERY_LAYER,
        )
        group = check_positive(
            "checkpoint_group", self.checkpoint_group, integer=True, maximum=EVERY_LAYER
        )
        set_fields(self, checkpoint_layers=checkpoint_layers, checkpoint_group=group)
        set_fields(self, checkpoint=_check_checkpoint(self))
        _check_group(self)

    def _check_heads_and_positions(self) -> None:
        """Check that heads divide the width, and tokens have positions; else a ValueError."""
        heads_per_group = self.heads % (self.kv_heads or 1)
        refuse_sizes(
            heads_per_group != 0,
            lambda heads: (
                f"kv_heads is {self.kv_heads}; it must divide heads, {int(heads)}; change one of them"
            ),
            self.heads,
        )
        if not self.head_width:
            refuse_sizes(
                self.hidden % self.heads != 0,
                lambda heads, hidden: (
                    f"heads is {int(heads)}; it must divide hidden, {int(hidden)}; change one of them, or give head_width"
                ),
                self.heads,
                self.hidden,
            )
        refuse_sizes(
            self.sequence > self.positions,
            lambda sequence, positions: (
                f"sequence is {int(sequence)}; the model has {int(positions)} positions; shorten it or raise positions"
            ),
            self.sequence,
            self.positions,
        )

    def _check_images(self) -> None:
        """Check what models of images need, and what they have not; else a ValueError."""
        if not self.patch:
            if self.classes:
                raise ValueError(
                    f"classes is {self.classes} and patch 0; classes are those of images: give patch, or "
                    "leave classes out"
                )
            return
        if not self.classes:
            raise ValueError(
                f"classes is 0 and patch {self.patch}; give the classes of images, such as 1000"
            )
        defaults = {field.name: field.default for field in fields(Transformer)}
        wanted = {
            "causal": False,
            "vocabulary": 0,
            "tie": False,
            **{key: defaults[key] for key in _OF_LANGUAGE},
        }
        for key, only in wanted.items():
            value = getattr(self, key)
            if np.any(value != only):
                raise ValueError(
                    f"{key} is {show(value)} with patch {self.patch}; models of images are checked with "
                    f"{key} {show(only)} alone, as Transformer.vit makes them; leave {key} out, or capture "
                    "the model with pk.capture"
                )
        refuse_sizes(
            self.positions != self.sequence,
            lambda sequence, positions: (
                f"sequence is {int(sequence)} and positions {int(positions)}; an image has as many positions "
                "as patches, and one: take Transformer.vit with the edge of the image"
            ),
            self.sequence,
            self.positions,
        )
        patches_of_edge = count_patches_of_edge(self.sequence)
        has_patches = patches_of_edge >= 1.0
        is_square = patches_of_edge % 1.0 == 0.0
        refuse_sizes(
            np.logical_not(has_patches & is_square),
            lambda sequence: (
                f"sequence is {int(sequence)}; it must be the patches of a square image and one, as 197 of "
                "14 x 14 patches; take Transformer.vit with the edge of the image"
            ),
            self.sequence,
        )

    def _check_experts(self) -> None:
        """Check what only layers with experts have; else a ValueError."""
        for key, default in _OF_EXPERTS.items():
            value = getattr(self, key)
            if not self.experts and value != default:
                raise ValueError(
                    f"{key} is {show(value)} and the model has no experts; give experts, or leave {key} out"
                )
        if self.experts and not any(has_experts(self, layer) for layer in range(self.layers)):
            raise ValueError(
                f"dense_layers is {self.dense_layers} and expert_interval {self.expert_interval}, which leave "
                f"none of {self.layers} layers with experts; take fewer, or leave experts out"
            )
        self._check_expert_groups()
        for key in ("shared_width", "shared_gate"):
            if getattr(self, key) and not self.shared_experts:
                raise ValueError(
                    f"{key} is {show(getattr(self, key))} and shared_experts 0; give shared_experts"
                )

    def _check_expert_groups(self) -> None:
        """Check groups of experts from which routers choose; else a ValueError."""
        groups, taken = self.expert_groups, self.top_groups
        if groups == taken == 0:
            return
        if not groups or self.experts % groups:
            raise ValueError(
                f"expert_groups is {groups}; it must divide experts, {self.experts}, if top_groups is stated"
            )
        if not 0 < taken <= groups or taken * self.experts // groups < self.top_k:
            raise ValueError(
                f"top_groups is {taken}; of {groups} expert_groups take so many that they hold top_k, "
                f"{self.top_k}, of {self.experts} experts"
            )

    def _check_latent_attention(self) -> None:
        """Check what multi-head latent attention needs, and what it has not; else a ValueError."""
        if not self.kv_lora_rank:
            for key in ("q_lora_rank", "rope_width", "value_width"):
                if getattr(self, key):
                    raise ValueError(
                        f"{key} is {getattr(self, key)} and kv_lora_rank 0, so that attention is not "
                        f"latent; give kv_lora_rank, or leave {key} out"
                    )
            return
        if not self.rope_width or self.rope_width % 2:
            raise ValueError(
                f"rope_width is {self.rope_width} with latent attention; give the even part of a head that "
                "positions rotate, such as 64"
            )
        unknown = {
            "attention": self.attention in UNFUSED,
            "rotary": not self.rotary,
            "causal": not self.causal,
            "bias": self.bias,
            "qk_norm": self.qk_norm,
            "kv_heads": self.kv_heads not in (0, self.heads),
            "joined": self.joined in ("attention", "all"),
            "lora_rank": self.lora_rank > 0,
        }
        for key, is_unknown in unknown.items():
            if is_unknown:
                raise ValueError(
                    f"{key} is {getattr(self, key)!r} with latent attention (kv_lora_rank "
                    f"{self.kv_lora_rank}), which nobody checked; leave it as in DeepSeek-V3, or capture "
                    "the model with pk.capture"
                )

    def _check_window(self) -> None:
        """Check windows, sinks and caps of attention; else a ValueError."""
        if self.global_interval and not self.window:
            raise ValueError(
                f"global_interval is {self.global_interval} and window 0; give window, or leave it out"
            )
        if self.global_interval == 1 or self.global_interval > self.layers:
            raise ValueError(
                f"global_interval is {self.global_interval} of {self.layers} layers; give 2 or more, at most the "
                "layers, or 0 if all have the window"
            )
        stores_scores = self.attention in UNFUSED
        if self.window and not self.causal:
            raise ValueError(
                f"window is {self.window} in a model that is not causal; leave it out, or capture the model"
            )
        if self.sinks and (stores_scores or self.kv_lora_rank):
            raise ValueError(
                f"sinks is True with attention {self.attention!r} and kv_lora_rank {self.kv_lora_rank}, which "
                "nobody checked; take attention='fused' without latent attention, or capture the model"
            )
        if self.score_cap and not stores_scores:
            raise ValueError(
                f"score_cap is True with attention {self.attention!r}, whose time with a cap nobody "
                "published; take attention='eager', or capture the model"
            )

    def _check_branches(self) -> None:
        """Check rotations, norms and biases of attention and MLPs; else a ValueError."""
        for key in ("qkv_bias", "output_bias", "mlp_bias"):
            value = getattr(self, key)
            if value is not None:
                check_type(key, value, bool)
            if value is not None and self.kv_lora_rank and key != "mlp_bias":
                raise ValueError(
                    f"{key} is {value} with latent attention, which has no biases; leave it out"
                )
        if self.rotary_width:
            width = self.plain_width
            fits = np.all(self.rotary_width <= width) and self.rotary_width % 2 == 0
            if not fits or not self.rotary or self.kv_lora_rank:
                raise ValueError(
                    f"rotary_width is {self.rotary_width}; it must be even and at most the width of a head, "
                    f"{show(width)}, of a model with rotary=True that is not latent; give another one"
                )
        if self.qk_norm_of == "all" and not self.qk_norm:
            raise ValueError("qk_norm_of is 'all' and qk_norm False; give qk_norm=True")
        norms = check_positive("parallel_norms", self.parallel_norms, integer=True, maximum=2)
        set_fields(self, parallel_norms=norms)
        if self.parallel_norms == 2 and not self.parallel_mlp:
            raise ValueError("parallel_norms is 2 and parallel_mlp False; give parallel_mlp=True")
        if not self.causal:
            for key in ("norm_place", "parallel_mlp"):
                if getattr(self, key) not in (False, "before"):
                    raise ValueError(
                        f"{key} is {getattr(self, key)!r} in a model that is not causal; leave it out, or "
                        "capture the model"
                    )
        is_unknown = self.experts or self.kv_lora_rank or self.norm_place != "before"
        if self.parallel_mlp and (is_unknown or self.scaled_branches):
            raise ValueError(
                "parallel_mlp is True with experts, latent attention, scaled_branches or norms that are not before both, "
                "which nobody checked; leave one out, or capture the model"
            )

    def _check_further_tokens(self) -> None:
        """Check multi-token prediction; else a ValueError."""
        if not self.mtp_layers:
            return
        unknown = {
            "causal": not self.causal,
            "rotary": not self.rotary,
            "loss_chunks": self.loss_chunks > 1,
            "lora_rank": self.lora_rank > 0,
        }
        for key, is_unknown in unknown.items():
            if is_unknown:
                raise ValueError(
                    f"{key} is {getattr(self, key)!r} with mtp_layers {self.mtp_layers}, which nobody checked; "
                    "leave it as in DeepSeek-V3, or capture the model with pk.capture"
                )

    @classmethod
    def bert(
        cls, preset: str = "bert-base", *, batch: int = 8, sequence: int = 128, **changes: Any
    ) -> "Transformer":
        """A BERT with a masked-token head.

        Parameters
        ----------
        preset : str
            ``bert-base`` or ``bert-large``.
        batch : int
            Sequences over all ranks [-].
        sequence : int
            Tokens of one sequence [-].
        **changes : int or str
            Further fields of `Transformer` that differ from the preset [-].

        Returns
        -------
        workload : Transformer
            The iteration.
        """
        check_choice("preset", preset, [name for name in PRESETS if name.startswith("bert")])
        return cls.preset(preset, batch=batch, sequence=sequence, **changes)

    @classmethod
    def gpt2(
        cls, preset: str = "gpt2", *, batch: int = 8, sequence: int = 1024, **changes: Any
    ) -> "Transformer":
        """A GPT-2.

        Parameters
        ----------
        preset : str
            ``gpt2`` or ``gpt2-xl``.
        batch : int
            Sequences over all ranks [-].
        sequence : int
            Tokens of one sequence [-].
        **changes : int or str
            Further fields of `Transformer` that differ from the preset [-].

        Returns
        -------
        workload : Transformer
            The iteration.
        """
        check_choice("preset", preset, [name for name in PRESETS if name.startswith("gpt2")])
        return cls.preset(preset, batch=batch, sequence=sequence, **changes)

    @classmethod
    def vit(
        cls, preset: str = "vit-b16", *, batch: int = 8, image: int = 224, **changes: Any
    ) -> "Transformer":
        """A ViT that classifies images.

        Parameters
        ----------
        preset : str
            Such as ``vit-b16``, ``vit-l16`` or ``vit-h14``.
        batch : int
            Images over all ranks [-].
        image : int
            Edge of an image, a multiple of that of its patches [-].
        **changes : int or str
            Further fields of `Transformer` that differ from the preset [-].

        Returns
        -------
        workload : Transformer
            The iteration.

        Raises
        ------
        ValueError
            For patches that do not fill an image, and for `positions` of another one.

        Examples
        --------
        >>> vit = Transformer.vit("vit-b16", batch=256, image=384)
        >>> vit.sequence, vit.graphs()[0].parameters
        (577, 86859496)
        """
        of_images = [name for name in PRESETS if "patch" in PRESETS[name]]
        if not isinstance(preset, str) or preset not in of_images:
            raise ValueError(
                f"preset is {show(preset)}; models of images are {', '.join(of_images)}; "
                "Transformer.from_config reads the config.json of any other"
            )
        _check_changes(changes)
        patch = changes.get("patch", PRESETS[preset]["patch"])
        tokens = count_image_tokens(image, patch)
        positions = changes.pop("positions", tokens)
        if np.any(positions != tokens):
            raise ValueError(
                f"positions is {show(positions)} and image {image}, which has {tokens}; leave positions out, or "
                "change image"
            )
        return cls.preset(preset, batch=batch, positions=tokens, **changes)

    @classmethod
    def preset(
        cls, name: str, *, batch: int = 8, sequence: int | None = None, **changes: Any
    ) -> "Transformer":
        """A published model, such as GPT-3, Llama, Mixtral, Qwen3 or ViT.

        Parameters
        ----------
        name : str
            One of those that `perfkit models` lists, such as ``llama-3-8b``.
        batch : int
            Sequences over all ranks [-].
        sequence : int, optional
            Tokens of one sequence; by default those of its pre-training where they are published
            (reference_data/published/training_sequences.csv), as 8,192 of Llama 3.1 and 4,096 of
            DeepSeek-V3, else as many as the model has positions, 4,096 at most; 128 for BERT [-].
        **changes : int or str
            Further fields of `Transformer` that differ from the preset; images of another size take
            `vit` [-].

        Returns
        -------
        workload : Transformer
            The iteration.

        Examples
        --------
        >>> Transformer.preset("llama-2-7b").graphs()[0].parameters
        6738415616
        """
        preset = find_preset(name)
        _check_changes(changes)
        values = dict(preset.fields)
        usual = _find_usual_sequence(preset.causal, values, preset.sequence)
        plain = cls(name, preset.causal, 1, usual, **values)
        shape = changes.keys() & set(SHAPE)
        values |= changes
        for key in shape & {"layers", *SIZES}:
            if key == "vocabulary" and _has_patches(values):
                continue
            check_size(key, changes[key])
        if sequence is None:
            sequence = _find_usual_sequence(plain.causal, values, preset.sequence)
        values["sequence"] = sequence
        # compared once the model has checked them: other types answer no comparison
        model = cls(name, plain.causal, batch, **values)
        if any(np.any(getattr(model, key) != getattr(plain, key)) for key in shape):
            return replace(model, name=name.partition("-")[0])
        return model

    @classmethod
    def from_config(
        cls,
        config: str | Path | dict[str, Any],
        *,
        batch: int = 8,
        sequence: int | None = None,
        name: str | None = None,
        **changes: Any,
    ) -> "Transformer":
        """A model of the Hugging Face Hub, as its `config.json` describes it.

        It is recorded as perfkit writes such a model, with one kernel for each norm and activation;
        the modules of the transformers library may take more. The formats of numbers are `dtype` and
        `mixed`, whatever the file says of stored weights.

        Parameters
        ----------
        config : str, Path or dict
            A ``config.json`` of the transformers library, the folder that holds it, or what it holds.
        batch : int
            Sequences over all ranks [-].
        sequence : int, optional
            Tokens of one sequence; by default as many as the model has positions, 4,096 at most, as
            a file does not say what it was trained on; 128 for BERT [-].
        name : str, optional
            Name of the model; by default its ``model_type``.
        **changes : int or str
            Further fields of `Transformer` that differ from the file [-].

        Returns
        -------
        workload : Transformer
            The iteration.

        Raises
        ------
        ValueError
            For a file that cannot be read, a ``model_type`` or an architecture that is no language
            model that perfkit knows, a key that it does not know, and a value that changes the work
            and that no field of a `Transformer` says. The message names key, value, what is allowed
            and the next step.

        Examples
        --------
        >>> config = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
        ...           "intermediate_size": 14336, "max_position_embeddings": 8192}
        >>> Transformer.from_config(config, sequence=4096).graphs()[0].parameters
        8030261248
        >>> Transformer.from_config({**config, "hidden_act": "relu"})
        Traceback (most recent call last):
        ...
        perfkit.workloads.hub_parts.ConfigError: config: hidden_act is 'relu'; a Transformer can say "silu" or "swish"; for anything else build the model in PyTorch and take pk.capture
        """
        _check_changes(changes)
        read = read_hub_config(config, changes)
        values = {**read.fields, **changes}
        if sequence is None:
            sequence = _find_usual_sequence(read.causal, values)
        if name is None:
            name = read.model_type
        check_type("name", name, str)
        return cls(name, read.causal, batch, sequence, **values)

    @property
    def masks_words(self) -> bool:
        """Whether it is like BERT: norms behind sums, types of tokens, a masked-token head."""
        return not self.causal and not self.patch

    @property
    def all_layers(self) -> int:
        """Layers with those that predict further tokens [-]."""
        return self.layers + self.mtp_layers

    @property
    def plain_width(self) -> int:
        """Width of the part of a head of queries and keys that positions do not rotate, of latent
        attention; else that of a head [-]."""
        return self.head_width or self.hidden // self.heads

    @property
    def width_of_head(self) -> int:
        """Width of a head of queries and keys [-]."""
        return self.plain_width + self.rope_width

    @property
    def width_of_values(self) -> int:
        """Width of a head of values [-]."""
        return self.value_width or self.plain_width

    @property
    def width_of_mlp(self) -> int:
        """Width between the two products of a layer without experts [-]."""
        return self.inner or 4 * self.hidden

    @property
    def width_of_expert(self) -> int:
        """Width between the two products of an expert [-]."""
        return self.expert_width or self.width_of_mlp

    @property
    def width_of_shared(self) -> int:
        """Width between the two products of all shared experts together [-]."""
        return self.shared_experts * (self.shared_width or self.width_of_expert)

    @property
    def routed(self) -> float:
        """Rows of experts that are computed for each token, padding included [-]."""
        return self.top_k * self.capacity

    @property
    def computed_again(self) -> Checkpoint:
        """What the backward pass of a layer computes again."""
        return find_checkpoint(name_checkpoint(self.checkpoint))

    @property
    def joins_qkv(self) -> bool:
        """Whether queries, keys and values come from one product: as `joined` says, else in models like
        GPT-2."""
        if self.joined:
            return self.joined != "none"
        as_many_keys = np.all((self.kv_heads or self.heads) == self.heads)
        return bool(self.causal and not self.rotary and as_many_keys)

    @property
    def adapted(self) -> tuple[str, ...]:
        """The products of a layer that have an adapter."""
        if not self.lora_rank:
            return ()
        return list_adapted(self.lora_modules, gated=self.gated, joins_qkv=self.joins_qkv)

    @property
    def spread_of_tokens(self) -> Imbalance:
        """How tokens are spread over experts."""
        return Imbalance.read(self.imbalance)

    @property
    def description(self) -> str:
        """What is computed, in a few words."""
        said = [self.name, f"batch {self.batch}", f"sequence {self.sequence}"]
        if self.patch:
            image = self.patch * count_patches_of_edge(self.sequence)
            said[2] = f"image {show(image.astype(int).tolist())}"
        if self.dropout > 0:
            said.append(f"dropout {self.dropout:g}")
        if self.checkpoint:
            said.append(_describe_checkpoint(self))
        if self.experts > 0:
            said.append(f"{self.experts} experts, top {self.top_k}")
            if self.shared_experts > 0:
                said.append(f"{self.shared_experts} shared")
            if self.dense_layers > 0:
                said.append(f"{self.dense_layers} dense layers")
            if not self.spread_of_tokens.is_balanced:
                said.append(f"imbalance {show(self.imbalance)}")
        if self.mtp_layers > 0:
            said.append(f"{self.mtp_layers} MTP layers")
        if self.lora_rank > 0:
            said.append(f"LoRA rank {self.lora_rank} on {show(self.lora_modules)}")
        if self.frozen_format:
            said.append(f"frozen weights in {self.frozen_format}")
        if self.optimizer_in_backward:
            said.append("optimizer in backward")
        if self.accumulate > 1:
            said.append(f"accumulate {self.accumulate}")
        if self.parallel != "ddp":
            said.append(self.parallel)
        return ", ".join(said)

    def without_sharing(self) -> "Transformer":
        """The same model without what a `Strategy` replaces: sharding, checkpoints and
        micro-batches."""
        return replace(
            self,
            parallel="ddp",
            checkpoint=False,
            checkpoint_layers=EVERY_LAYER,
            checkpoint_group=1,
            accumulate=1,
            overlap=True,
        )

    def graphs(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False
    ) -> tuple[Graph, ...]:
        """What each rank computes in one iteration; all ranks do the same.

        Parameters
        ----------
        ranks : int
            Ranks [-].
        plan : None
            A Transformer has no tables to place.
        accelerator : bool
            Whether it runs on a GPU, where the optimizer updates lists of tensors.

        Returns
        -------
        graphs : tuple of Graph
            One per rank.

        Raises
        ------
        ValueError
            If the batch does not divide by the ranks or a plan is given.
        """
        ranks = check_ranks(self.batch, ranks, plan, self.accumulate)
        return record_graphs(_record, self, _OPEN, ranks, accelerator) * ranks

    def structure(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False
    ) -> Structure:
        """What all batches and sequences of this model have in common; its arrays are open sizes too.

        Parameters
        ----------
        ranks : int
            Ranks [-].
        plan : None
            A Transformer has no tables to place.
        accelerator : bool
            Whether it runs on a GPU, where the optimizer updates lists of tensors.

        Returns
        -------
        structure : Structure
            One graph, which all ranks share.
        """
        ranks = check_ranks(self.batch, ranks, plan, self.accumulate)
        return record_structure(_record, self, _OPEN, ranks, accelerator)


def _find_usual_sequence(causal: bool, values: dict[str, Any], published: int | None = None) -> Any:
    """Tokens of a sequence where nobody says it: as published, at most all positions; else 4,096 at
    most, of a BERT 128, of an image its patches [-]."""
    if _has_patches(values):
        return values["positions"]
    if not causal:
        return 128
    most = USUAL_SEQUENCE if published is None else published
    usual = np.minimum(values["positions"], most)
    return usual if usual.ndim else int(usual)


def _has_patches(values: dict[str, Any]) -> bool:
    """Whether fields are those of a model of images; a ValueError for patches of no size."""
    patch = check_positive("patch", values.get("patch", 0), integer=True, zero=True)
    return bool(patch > 0)


def _check_changes(changes: dict[str, Any]) -> None:
    """Refuse names that are no field which may differ from a published model."""
    for key in changes:
        if key in _OF_STRATEGIES:
            raise ValueError(
                f"{key} is given; it is a field of a strategy: take strategy=Strategy({key}={show(changes[key])}) of "
                "predict, with your numbers of ranks, or parallel='zero1', 'zero2' or 'fsdp' of the model"
            )
        check_choice("argument", key, [field.name for field in fields(Transformer)[2:-1]])


def _check_recipe(recipe: str, dtype: str) -> None:
    """Check that products run in fp8 if a recipe says how, and that this one is priced."""
    if recipe and dtype != "fp8":
        raise ValueError(
            f"fp8_recipe is {recipe!r} and dtype {dtype!r}; take dtype='fp8', or leave the recipe out"
        )
    if not RECIPES[recipe].is_priced:
        priced = ", ".join(name for name, known in RECIPES.items() if name and known.is_priced)
        raise ValueError(
            f"fp8_recipe is {recipe!r}, whose products in fp4 nothing that is known prices; priced are {priced}"
        )


def _name_form(model: Transformer, accelerator: bool) -> str:
    """The form in which PyTorch updates a weight: lists are usual on GPUs."""
    if model.fused:
        return "fused"
    return "for_each" if accelerator else "eager"


def _check_adapters(model: Transformer) -> None:
    """Check the products that get adapters, and refuse what was never checked with them."""
    if not model.lora_rank:
        for name, default in (("lora_modules", "all-linear"), ("frozen_format", "")):
            if getattr(model, name) != default:
                raise ValueError(
                    f"{name} is {getattr(model, name)!r} and lora_rank 0, so that there are no adapters; give "
                    f"lora_rank, such as 16, or leave {name} out"
                )
        return
    # an error for a product that the model does not have
    adapted = list_adapted(model.lora_modules, gated=model.gated, joins_qkv=model.joins_qkv)
    fault = f"lora_rank is {model.lora_rank}"
    _refuse_changes(
        model,
        {"experts": 0, "mixed": False, "fused_accumulation": False},
        fault=fault,
        subject="adapters",
        way_out="leave lora_rank out",
    )
    _refuse_arrays_of_widths(model, fault=fault, subject="adapters")
    for name in adapted:
        narrowest = min(_find_sides(model, name))
        if model.lora_rank > narrowest:
            raise ValueError(
                f"{fault} and the weight of {name} has {narrowest} rows or columns; a wider adapter says no "
                f"more than the weight; take at most {narrowest}, or leave {name} out of lora_modules"
            )
    if model.joined == "all":
        raise ValueError(
            f"{fault} and joined is 'all'; adapters of a product that is gate and value in one are not "
            "modelled; take joined='attention'"
        )
    if model.dtype == "fp8":
        raise ValueError(
            f"{fault} and dtype is 'fp8'; adapters are not modelled beside products in fp8; take "
            "dtype='bf16'"
        )


def _refuse_changes(
    model: Transformer, wanted: dict[str, Any], *, fault: str, subject: str, way_out: str
) -> None:
    """Raise a ValueError for a field that differs from the only value with which a subject is
    modelled."""
    for name, only in wanted.items():
        value = getattr(model, name)
        if value != only:
            raise ValueError(
                f"{fault} and {name} is {value!r}; {subject} are modelled with {name} {only!r} alone; take "
                f"this, or {way_out}"
            )


def _refuse_arrays_of_widths(model: Transformer, *, fault: str, subject: str) -> None:
    """Raise a ValueError for several shapes of a weight at once."""
    for name in ("hidden", "heads", "vocabulary", "positions"):
        if np.ndim(getattr(model, name)):
            raise ValueError(
                f"{fault} and {name} is an array; with {subject} only batch and sequence are arrays; take "
                f"one {name}"
            )


def _find_sides(model: Transformer, product: str) -> tuple[int, int]:
    """Inputs and outputs of a product of a layer that gets an adapter."""
    keys = model.kv_heads or model.heads
    queries, values = model.heads * model.width_of_head, keys * model.width_of_head
    sides = {
        "qkv_proj": (model.hidden, queries + 2 * values),
        "q_proj": (model.hidden, queries),
        "k_proj": (model.hidden, values),
        "v_proj": (model.hidden, values),
        "o_proj": (queries, model.hidden),
        "gate_proj": (model.hidden, model.width_of_mlp),
        "up_proj": (model.hidden, model.width_of_mlp),
        "down_proj": (model.width_of_mlp, model.hidden),
    }
    return sides[product]


def _check_update_by_shape(model: Transformer) -> None:
    """Refuse what was never checked with an optimizer whose updates depend on the shape of a weight."""
    optimizer = find_optimizer(model.optimizer)
    if not optimizer.by_shape:
        return
    fault = f"optimizer is {model.optimizer!r}"
    _refuse_changes(
        model,
        {"optimizer_in_backward": False, "lora_rank": 0, "experts": 0},
        fault=fault,
        subject="its updates",
        way_out="optimizer='adamw'",
    )
    _refuse_arrays_of_widths(model, fault=fault, subject="updates by shape")
    if model.optimizer == "muon" and model.dtype == "fp16" and not model.mixed:
        raise ValueError(
            "optimizer is 'muon' and dtype is 'fp16' for weights, too; its products are bf16; take "
            "dtype='bf16', or mixed=True"
        )


def name_checkpoint(checkpoint: bool | str) -> str:
    """Name what `Transformer.checkpoint` says, as `Strategy.checkpoint` does.

    Parameters
    ----------
    checkpoint : bool or str
        As the field holds it.

    Returns
    -------
    name : str
        ``full`` for True, ``none`` for False, else the name.
    """
    if checkpoint is True:
        return "full"
    if checkpoint is False:
        return "none"
    return checkpoint


def _describe_checkpoint(model: Transformer) -> str:
    """What is computed again, in a few words."""
    said = "checkpoint"
    if model.checkpoint is not True:
        said += f" {model.checkpoint}"
    if model.checkpoint_layers < model.layers:
        said += f" of {model.checkpoint_layers} layers"
    if model.checkpoint_group > 1:
        said += f" in groups of {model.checkpoint_group} layers"
    return said


def _check_checkpoint(model: Transformer) -> bool | str:
    """Check what the backward pass computes again; ``full`` is True, and ``none`` False."""
    check_type("checkpoint", model.checkpoint, bool | str)
    is_stated = 0 < model.checkpoint_layers < EVERY_LAYER
    if is_stated and model.checkpoint in (False, "none"):
        raise ValueError(
            f"checkpoint_layers is {model.checkpoint_layers} without a checkpoint, which computes nothing "
            "again; take checkpoint=True or a name, or leave checkpoint_layers out"
        )
    if is_stated and model.checkpoint_layers > model.layers:
        raise ValueError(
            f"checkpoint_layers is {model.checkpoint_layers} and layers {model.layers}; take at most these, "
            "or leave it out for all of them"
        )
    is_partial = model.checkpoint_layers < model.layers
    passes = model.layers * model.accumulate
    if model.checkpoint and is_partial and passes > MOST_RECORDED:
        raise ValueError(
            f"checkpoint_layers is {model.checkpoint_layers} of {model.layers} layers, in "
            f"{passes:,} passes; {MOST_RECORDED:,} are recorded at most; take a Strategy, or fewer "
            "micro-batches"
        )
    if isinstance(model.checkpoint, bool):
        return model.checkpoint
    checkpoint = check_checkpoint(model, model.checkpoint)
    if checkpoint.name == "none":
        return False
    if checkpoint.keeps_input_alone:
        return True
    return checkpoint.name


def _check_group(model: Transformer) -> None:
    """Check what layers that are computed again together go with; else a ValueError."""
    group = model.checkpoint_group
    if group == 1:
        return
    fault = f"checkpoint_group is {group}"
    if model.checkpoint is not True or model.checkpoint_layers < model.layers:
        raise ValueError(
            f"{fault} and not all of all layers is computed again, as groups are; take checkpoint=True "
            "without checkpoint_layers, or leave it out"
        )
    if group > model.layers:
        raise ValueError(f"{fault} and layers {model.layers}; take at most these")
    if model.parallel != "ddp":
        raise ValueError(
            f"{fault} and parallel {model.parallel!r}, which gathers weights layer by layer, of which nobody "
            "has published both; take parallel='ddp', or a Strategy of zero=1"
        )
    if model.mtp_layers or model.optimizer_in_backward:
        raise ValueError(
            f"{fault} with mtp_layers or optimizer_in_backward, of which nobody has published both; leave one "
            "of them out"
        )
    passes = model.layers * model.accumulate
    if passes > MOST_RECORDED:
        raise ValueError(
            f"{fault} and layers are passed {passes:,} times; {MOST_RECORDED:,} are recorded at most; take a "
            "Strategy, or fewer micro-batches"
        )


def can_compute_again(model: Transformer, name: str) -> bool:
    """Find out whether layers have what a checkpoint computes again, see `check_checkpoint`.

    Parameters
    ----------
    model : Transformer
        The model.
    name : str
        As `Strategy.checkpoint` names it.

    Returns
    -------
    can : bool
        False where `check_checkpoint` refuses it, and for ``selective`` of fused attention, which
        keeps no scores.
    """
    if name == "selective" and model.attention not in UNFUSED:
        return False
    try:
        check_checkpoint(model, name)
    except ValueError:
        return False
    return True


def check_checkpoint(model: Transformer, name: str) -> Checkpoint:
    """Find what layers compute again, and check that they have it.

    Parameters
    ----------
    model : Transformer
        The model.
    name : str
        As `Strategy.checkpoint` names it.

    Returns
    -------
    checkpoint : Checkpoint
        Its record.

    Raises
    ------
    ValueError
        For an unknown name, and for what no layer of the model has.
    """
    checkpoint = find_checkpoint(name)
    if checkpoint.keeps_input_alone:
        return checkpoint
    has_mlp = not model.experts or has_unlike_layers(model)
    fault = f"checkpoint is {checkpoint.name!r}"
    if "mlp" in checkpoint.parts and not has_mlp:
        raise ValueError(f"{fault} and the model has experts in place of an MLP; take 'experts'")
    if "experts" in checkpoint.parts and not model.experts:
        raise ValueError(f"{fault} and the model has no experts; take 'mlp'")
    if "norms" in checkpoint.parts and model.masks_words:
        raise ValueError(
            f"{fault} and the model norms what layers hand on, which is kept; take 'full' or 'mlp'"
        )
    if checkpoint.saves_products and (model.experts or model.bias or model.lora_rank):
        what = "biases"
        if model.experts:
            what = "experts"
        elif model.lora_rank:
            what = "adapters"
        raise ValueError(
            f"{fault} and the model has {what}, whose products are other operations than those that "
            "PyTorch's recipe saves; take 'full' or parts, as 'activation'"
        )
    return checkpoint


def _check_imbalance(imbalance: Any, experts: int, top_k: int) -> float | tuple[float, ...]:
    """Check how tokens are spread over experts: an exponent, or a count for each expert."""
    if isinstance(imbalance, np.ndarray):
        imbalance = imbalance.tolist()
    if isinstance(imbalance, str | bytes) or not isinstance(imbalance, Sequence):
        exponent: float = check_positive("imbalance", imbalance, zero=True, maximum=10.0)
        if exponent and not experts:
            raise ValueError(
                f"imbalance is {exponent:g} and the model has no experts; give experts, or leave imbalance out"
            )
        return exponent
    if len(imbalance) != experts:
        raise ValueError(
            f"imbalance has {len(imbalance)} counts and the model {experts} experts; "
            "give the tokens of each expert, or an exponent of Zipf's law"
        )
    counts = tuple(check_positive("imbalance", count, zero=True) for count in imbalance)
    if not sum(counts):
        raise ValueError("imbalance has no tokens; give the tokens that each expert got")
    most = max(counts) / sum(counts)
    if most > (1.0 + 1e-9) / top_k:
        raise ValueError(
            f"imbalance gives expert {counts.index(max(counts))} {most:.4g} of all copies of tokens; with "
            f"top_k {top_k} an expert gets each token at most once, which is 1/{top_k} of the copies; give "
            "counts of one layer with this top_k, or an exponent of Zipf's law"
        )
    return counts


def _record(model: Transformer, ranks: int, accelerator: bool) -> tuple[OpenGraph]:
    """Record the iteration of one rank: the first and the last layers, and one that represents all
    others; of unlike layers, and where some are computed again, all."""
    sharded = ranks > 1 and model.parallel != "ddp"
    if sharded and model.frozen_format:
        raise ValueError(
            f"frozen_format is {model.frozen_format!r} and parallel {model.parallel!r}, whose ranks hold parts of "
            "weights; gathers in fewer bits are not modelled; take parallel='ddp', or leave it out"
        )
    if sharded and find_optimizer(model.optimizer).by_shape:
        raise ValueError(
            f"optimizer is {model.optimizer!r} and parallel {model.parallel!r}, whose ranks hold parts of "
            "matrices; gathers for such updates are not modelled; take parallel='ddp', or "
            "optimizer='adamw'"
        )
    most = 4 if sharded else 3
    is_partial = model.checkpoint and model.checkpoint_layers < model.layers
    if has_unlike_layers(model) or is_partial or model.checkpoint_group > 1:
        most = model.layers
    overlap = model.overlap and ranks > 1 and (accelerator or not sharded)
    autocast = model.mixed and not sharded
    itemsize = ITEMSIZE.get(model.dtype, 2)
    tape = Tape(itemsize, mixed=autocast, overlap=overlap)
    tape.fuses_sums = model.fused_accumulation
    tape.keeps_fp8 = model.keeps_fp8 and not sharded
    tape.fp8_recipe = model.fp8_recipe
    tape.middle, tape.repeats = 1, max(model.layers - most + 1, 1)
    share = RankShare(model.batch // (ranks * model.accumulate), model.sequence)
    open_unit: Any = nullcontext
    if sharded:
        probe = Tape(itemsize, mixed=autocast, overlap=overlap)
        probe.gathers_fp8 = tape.gathers_fp8 = model.fp8_gathers and model.dtype == "fp8"
        record_forward(probe, model, share, most, nullcontext)
        wide = 4 if model.mixed else tape.itemsize
        summed = ITEMSIZE.get(model.reduce_dtype, wide)
        tape.adopt(probe.weights)
        open_unit = FSDPUnits(tape, ranks, model.parallel, wide, summed).open
    elif model.reduce_dtype and ranks > 1:
        fault = f"reduce_dtype is {model.reduce_dtype!r} and parallel 'ddp', whose gradients are summed up as they are"
        raise ValueError(f"{fault}; leave it out, or take parallel='fsdp'")
    for number in range(model.accumulate):
        if number:
            tape.backward()
            tape.start_micro_batch()
        tape.is_last_micro_batch = number + 1 == model.accumulate
        record_forward(tape, model, share, most, open_unit)
    if model.optimizer_in_backward:
        if ranks > 1:
            raise ValueError(
                f"optimizer_in_backward is True with {ranks} ranks; hooks of replicas are not modelled; "
                "take one rank, or leave it out"
            )
        form = _name_form(model, accelerator)
        tape.update_weight = partial(update_in_backward, tape, model.optimizer, form)
    if overlap and not sharded:
        for weight in tape.trained:
            weight.bucket = 0
    return (finish(tape, model, ranks=ranks, lists=accelerator),)
