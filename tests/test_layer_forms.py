"""Forms of layers of a Transformer, each beside a twin in PyTorch, a published figure or a count by
hand."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import perfkit as pk
from benchmarks.strategies_beside import Drawn, compare
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.memory import measure_memory
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.graph import Graph
from perfkit.workloads.layer_kinds import has_experts, list_kinds
from perfkit.workloads.transformer import Transformer

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from perfkit.recording.steps import capture  # noqa: E402
from tests.layer_twins import build_twin  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

PLAIN = Transformer.preset(
    "llama-2-7b",
    batch=4,
    sequence=40,
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=2,
    inner=96,
    vocabulary=304,
    dtype="bf16",
    attention="flash2",
)
EXPERTS = {"experts": 4, "top_k": 2, "expert_width": 32, "fused_permutation": True}
LATENT = {
    "kv_lora_rank": 32,
    "head_width": 16,
    "rope_width": 8,
    "kv_heads": 4,
    "attention": "efficient",
}
#: Forms, as changes of a small Llama.
TWINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": EXPERTS,
    "shared experts": {**EXPERTS, "shared_experts": 2},
    "wide shared expert": {**EXPERTS, "shared_experts": 1, "shared_width": 80},
    "shared experts with a gate": {**EXPERTS, "shared_experts": 1, "shared_gate": True},
    "first dense layers": {**EXPERTS, "shared_experts": 1, "dense_layers": 2},
    "experts in every second layer": {**EXPERTS, "expert_interval": 2, "layers": 4},
    "norms of heads": {"qk_norm": True},
    "norms of all heads together": {"qk_norm": True, "qk_norm_of": "all"},
    "norms behind attention and MLP": {"norm_place": "after"},
    "norms on both sides": {"norm_place": "both"},
    "OLMo 2": {"norm_place": "after", "qk_norm": True, "qk_norm_of": "all"},
    "parallel MLP": {"parallel_mlp": True},
    "parallel MLP with a norm of its own": {"parallel_mlp": True, "parallel_norms": 2},
    "a part of heads rotated": {"rotary_width": 8},
    "biases as in Qwen2": {"qkv_bias": True},
    "biases of other products": {"output_bias": True, "mlp_bias": True},
    "capped logits": {"logit_cap": True},
    "multi-token prediction": {"mtp_layers": 1},
    "two further tokens": {"mtp_layers": 2},
    "DeepSeek-V3": {
        **{**LATENT, **EXPERTS, "q_lora_rank": 24, "shared_experts": 1},
        **{"dense_layers": 1, "mtp_layers": 1},
    },
    "latent attention": {**LATENT, "q_lora_rank": 24},
    "latent attention with whole queries": LATENT,
    "latent attention with wide values": {**LATENT, "value_width": 32},
    "latent attention and experts": {**LATENT, **EXPERTS, "shared_experts": 1, "dense_layers": 1},
}
PRODUCT = ("flops", "batch", "m", "n", "k")
#: Kernels of Transformer Engine, which the twin calls by names of its own.
PERMUTATIONS = ("moe_permute", "moe_unpermute")


def find_name(name: str) -> str:
    """The name of an operation without what differs by choice: attention has a name for each device,
    and permutations of tokens one for each pass."""
    for permutation in PERMUTATIONS:
        if name.startswith(permutation):
            return permutation
    return name.replace("_for_cpu", "").replace("_efficient", "_flash")


def list_operations(graph: Graph, angles: int) -> list[tuple[Any, ...]]:
    """Name, class, pass, sizes of products and bytes of each operation.

    Copies of the angles of positions are left out, which are conjugated for the backward pass: the
    builder has no copies as small as these.
    """
    sizes = np.stack([graph.column(name) for name in PRODUCT], axis=1).tolist()
    operations: list[tuple[Any, ...]] = []
    for place, label in enumerate(graph.labels):
        if label.name == "clone" and graph.column("elements")[place] == angles:
            continue
        name = find_name(label.name)
        kind, variant = label.kind, label.variant.removesuffix(".flash2").removesuffix(".efficient")
        of_product = sizes[place]
        if name == "_to_copy":
            kind = "elementwise"
        elif name in PERMUTATIONS:
            kind, variant, of_product = "copy", "", []
        nbytes = pytest.approx(float(graph.traffic[place]), rel=0.04)  # statistics of rows are fp32
        operations.append((name, kind, variant, label.phase, *of_product, nbytes))
    return operations


def measure(graph: Graph) -> float:
    """Bytes of the fullest moment, without the workspace of products."""
    memory = measure_memory([graph], pk.load_platform("h100-sxm-8"))
    return memory.total - memory.parts["workspace"]


@pytest.mark.filterwarnings("ignore:perfkit has no model of the work of moe")
@pytest.mark.filterwarnings("ignore:.*such as those of experts")
@pytest.mark.parametrize("name", TWINS)
def test_a_form_is_captured_as_it_is_built(name: str) -> None:
    model = replace(PLAIN, **TWINS[name])
    [built] = model.graphs(accelerator=True)
    captured = capture(partial(build_twin, model), device="cuda")
    assert captured.parameters == built.parameters
    turned = model.rope_width or model.rotary_width or model.width_of_head
    angles = model.sequence * turned // 2
    assert list_operations(captured, angles) == list_operations(built, angles)
    # angles, indices and statistics of rows in fp32
    assert measure(captured) == pytest.approx(measure(built), rel=0.006)


def count_mlp(hidden: int, inner: int) -> int:
    """Weights of a gated MLP."""
    return 3 * hidden * inner


def test_layers_with_experts_have_the_weights_of_their_parts() -> None:
    changes = {**TWINS["first dense layers"], "shared_width": 24, "shared_gate": True}
    model = replace(PLAIN, **changes)
    dense = replace(PLAIN, inner=96)
    router, gate = 4 * 64, 64
    routed = 4 * count_mlp(64, 32)
    shared = count_mlp(64, 24)
    of_experts = router + routed + shared + gate
    expected = dense.graphs()[0].parameters + of_experts - count_mlp(64, 96)
    assert model.graphs()[0].parameters == expected


#: Published sizes, and numbers: "total" and "activated" of arXiv:2412.19437, section 4.2 (671B, 37B), of
#: arXiv:2405.04434, section 3.1.2 (236B, 21B) and appendix B (15.7B, 2.4B), and of arXiv:2507.20534,
#: section 2.3 (1.04T, 32.6B). The configurations are those of their ``config.json``.
class Sizes(NamedTuple):
    """A published model with latent attention, and its parameters in billions."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    inner: int
    dense_layers: int
    experts: int
    top_k: int
    expert_width: int
    shared_experts: int
    q_lora_rank: int
    billions: float
    active: float


DEEPSEEK = {
    "deepseek-v3": Sizes(61, 7168, 128, 129280, 18432, 3, 256, 8, 2048, 1, 1536, 671, 37),
    "deepseek-v2": Sizes(60, 5120, 128, 102400, 12288, 1, 160, 6, 1536, 2, 1536, 236, 21),
    "deepseek-v2-lite": Sizes(27, 2048, 16, 102400, 10944, 1, 64, 6, 1408, 2, 0, 15.7, 2.4),
    "kimi-k2": Sizes(61, 7168, 64, 163840, 18432, 1, 384, 8, 2048, 1, 1536, 1030, 32.6),
}


def make_deepseek(name: str) -> Transformer:
    """A published model with latent attention."""
    sizes = DEEPSEEK[name]._asdict()
    del sizes["billions"], sizes["active"]
    return Transformer(
        name,
        causal=True,
        batch=16,
        sequence=4096,
        positions=4096,
        **sizes,
        kv_lora_rank=512,
        head_width=128,
        rope_width=64,
        **{"norm": "rms", "gated": True, "rotary": True, "tie": False, "bias": False},
        dtype="bf16",
    )


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek_has_its_published_parameters(name: str) -> None:
    model, published = make_deepseek(name), DEEPSEEK[name]
    parameters = model.graphs()[0].parameters
    assert parameters / 1e9 == pytest.approx(published.billions, rel=0.005)
    idle = (model.layers - model.dense_layers) * (model.experts - model.top_k)
    embeddings = model.vocabulary * model.hidden
    active = parameters - idle * count_mlp(model.hidden, model.expert_width)
    # two digits; some count the embedding, and some do not
    without = (active - embeddings) / 1e9
    assert without * 0.975 <= published.active <= active / 1e9 * 1.025


def test_the_parameters_of_deepseek_v3_to_the_last_one() -> None:
    """671,026,419,200 numbers are in the checkpoint of its main model; 256 of them in each of 58 layers are
    biases of the router, which no gradient trains."""
    [graph] = make_deepseek("deepseek-v3").graphs()
    assert graph.parameters == 671_026_419_200 - 58 * 256


#: Parameters beside the embedding of Gemma 2 (arXiv:2408.00118, table 2), by layers, width, heads, heads
#: of keys, width of a head, and width of its MLPs (table 1).
GEMMA = {
    2_024_517_888: (26, 2304, 8, 4, 256, 9216),
    8_324_201_984: (42, 3584, 16, 8, 256, 14336),
    26_047_480_320: (46, 4608, 32, 16, 128, 36864),
}


@pytest.mark.parametrize("published", GEMMA)
def test_gemma_2_has_its_published_parameters(published: int) -> None:
    layers, hidden, heads, kv_heads, head_width, inner = GEMMA[published]
    model = Transformer(
        "gemma-2",
        causal=True,
        batch=1,
        sequence=4096,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        inner=inner,
        vocabulary=256128,
        positions=8192,
        **{"norm": "rms", "gated": True, "activation": "gelu_tanh", "rotary": True, "bias": False},
        **{"norm_place": "both", "window": 4096, "global_interval": 2, "logit_cap": True},
    )
    assert model.graphs()[0].parameters - 256128 * hidden == published


@pytest.mark.parametrize(
    ("layers", "experts", "published"), [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)]
)
def test_gpt_oss_has_its_published_parameters(layers: int, experts: int, published: int) -> None:
    """Of its checkpoints, as its loader lays them out; arXiv:2508.10925, table 1, has 20.91B and 116.83B."""
    model = Transformer(
        "gpt-oss",
        causal=True,
        batch=1,
        sequence=4096,
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_width=64,
        inner=2880,
        experts=experts,
        top_k=4,
        expert_bias=True,
        vocabulary=201088,
        positions=131072,
        **{"norm": "rms", "gated": True, "rotary": True, "bias": True, "tie": False},
        **{"sinks": True, "window": 128, "global_interval": 2},
        dtype="bf16",
    )
    assert model.graphs()[0].parameters == published


def test_the_module_of_deepseek_v3_for_further_tokens_has_its_published_parameters() -> None:
    """11.5B of its own, without embedding and head, which it shares: README_WEIGHTS.md of the checkpoint."""
    model = make_deepseek("deepseek-v3")
    [without], [graph] = model.graphs(), replace(model, mtp_layers=1).graphs()
    assert (graph.parameters - without.parameters) / 1e9 == pytest.approx(11.5, rel=0.01)


def test_kinds_of_layers_hold_each_layer_once() -> None:
    model = replace(PLAIN, layers=8, **{**EXPERTS, "dense_layers": 3, "expert_interval": 2})
    with_experts = [layer for layer in range(8) if has_experts(model, layer)]
    # Llama 4: layers 1, 3, 5 and 7; the first three are dense
    assert with_experts == [3, 5, 7]
    kinds = list_kinds(model)
    assert sorted(layer for kind in kinds for layer in kind.layers) == list(range(8))
    assert [kind.model.experts for kind in kinds] == [0, 4], "most layers come first"


def count_pairs(sequence: int, window: int) -> float:
    """Pairs of a query and a key that it attends to, one by one; of a key and itself a half, as
    `attention_flops` has no diagonal."""
    query, key = np.meshgrid(range(sequence), range(sequence), indexing="ij")
    seen = (key <= query) & (key > query - window)
    return float(seen.sum()) - sequence / 2


@pytest.mark.parametrize(("sequence", "window"), [(64, 64), (64, 100), (256, 64), (1024, 128)])
def test_attention_in_a_window_computes_its_pairs(sequence: int, window: int) -> None:
    model = replace(PLAIN, layers=1, sequence=sequence, positions=4096, window=window)
    [graph] = model.graphs()
    [forward] = [row for row, label in enumerate(graph.labels) if is_attention(label, "forward")]
    [backward] = [row for row, label in enumerate(graph.labels) if is_attention(label, "backward")]
    of_one_product = 2 * 16 * 4 * 4 * count_pairs(sequence, window)
    flops = graph.column("flops")
    # a query that sees fewer keys than the window does not see half a key less
    assert flops[forward] == pytest.approx(2 * of_one_product, rel=0.6 / window)
    assert flops[backward] == pytest.approx(5 * of_one_product, rel=0.6 / window)


def is_attention(label: Any, phase: str) -> bool:
    """Whether an operation is the kernel of attention in a pass."""
    return bool(label.kind == "attention" and label.phase == phase)


def find_attention_flops(model: Transformer) -> list[float]:
    """Arithmetic of forward attention in each layer."""
    [graph] = model.graphs()
    flops = graph.column("flops")
    return [flops[row] for row, label in enumerate(graph.labels) if is_attention(label, "forward")]


@pytest.mark.parametrize(
    ("interval", "is_global"),
    [
        (0, [False] * 6),  # Mistral
        (2, [False, True] * 3),  # Gemma 2 and GPT-OSS
        (6, [*[False] * 5, True]),  # Gemma 3
    ],
)
def test_layers_with_and_without_a_window_take_turns(interval: int, is_global: list[bool]) -> None:
    model = replace(PLAIN, layers=6, window=8, global_interval=interval)
    whole = find_attention_flops(replace(PLAIN, layers=6))[0]
    assert [flops == whole for flops in find_attention_flops(model)] == is_global


def test_a_window_halves_attention_as_mistral_states() -> None:
    """Of 16,384 tokens with a window of 4,096 (arXiv:2310.06825, section 2): "a 2x speed improvement"."""
    long = replace(PLAIN, sequence=16384, positions=16384)
    windowed = replace(long, window=4096)
    assert find_attention_flops(long)[0] / find_attention_flops(windowed)[0] == pytest.approx(
        2, rel=0.15
    )


def test_masked_scores_are_computed() -> None:
    eager = replace(PLAIN, attention="eager")
    assert find_total(replace(eager, window=8)) == find_total(eager)


def find_total(model: Transformer) -> float:
    """Arithmetic of an iteration."""
    return float(model.graphs()[0].column("flops").sum())


def test_sinks_are_a_number_of_each_head() -> None:
    model = replace(PLAIN, sinks=True)
    [graph], [plain] = model.graphs(), PLAIN.graphs()
    assert graph.parameters == plain.parameters + 3 * 4
    assert find_total(model) == find_total(PLAIN)
    rows = [row for row, label in enumerate(graph.labels) if is_attention(label, "backward")]
    of_plain = [row for row, label in enumerate(plain.labels) if is_attention(label, "backward")]
    # sinks are read, and their gradient is written
    assert graph.traffic[rows[0]] - plain.traffic[of_plain[0]] == 2 * 4 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_interval": 2}, "global_interval is 2 and window 0; give window"),
        ({"window": 8, "global_interval": 1}, "give 2 or more, at most the layers"),
        ({"sinks": True, "attention": "eager"}, "sinks is True with attention 'eager'"),
        ({"score_cap": True}, "score_cap is True with attention 'flash2'.*take attention='eager'"),
        (
            {"rotary_width": 7},
            "rotary_width is 7; it must be even and at most the width of a head, 16",
        ),
        ({"qk_norm_of": "all"}, "qk_norm_of is 'all' and qk_norm False; give qk_norm=True"),
        ({"parallel_norms": 2}, "parallel_norms is 2 and parallel_mlp False"),
        ({"parallel_mlp": True, "norm_place": "both"}, "parallel_mlp is True with experts, latent"),
        (
            {**LATENT, "qkv_bias": True},
            "qkv_bias is True with latent attention, which has no biases",
        ),
        ({**LATENT, "kv_heads": 2}, "kv_heads is 2 with latent attention .*which nobody checked"),
        (
            {"mtp_layers": 1, "rotary": False},
            "rotary is False with mtp_layers 1, which nobody checked",
        ),
        ({"rope_width": 8}, "rope_width is 8 and kv_lora_rank 0, so that attention is not latent"),
    ],
)
def test_forms_that_nobody_checked_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_experts": 1}, "shared_experts is 1 and the model has no experts; give experts"),
        ({**EXPERTS, "dense_layers": 3}, "leave none of 3 layers with experts; take fewer"),
        ({**EXPERTS, "shared_width": 8}, "shared_width is 8 and shared_experts 0"),
        ({**EXPERTS, "shared_gate": True}, "shared_gate is True and shared_experts 0"),
        ({**EXPERTS, "expert_interval": 4}, "expert_interval is 4"),
        ({"expert_bias": True}, "expert_bias is True and the model has no experts"),
    ],
)
def test_what_only_experts_have_needs_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


#: Large enough that kernels take longer than their launches.
LARGE = Transformer.preset(
    "llama-2-7b",
    batch=32,
    sequence=2048,
    layers=8,
    hidden=2048,
    heads=16,
    kv_heads=8,
    inner=8192,
    vocabulary=32000,
    dtype="bf16",
    mixed=True,
    fused=True,
)
LARGE_EXPERTS = {"experts": 8, "top_k": 2, "expert_width": 2048, "shared_experts": 1}
FORMS: dict[str, dict[str, Any]] = {
    "first dense layers": {**LARGE_EXPERTS, "dense_layers": 2},
    "experts in every second layer": {**LARGE_EXPERTS, "expert_interval": 2},
    "latent attention": {
        "head_width": 128,
        "kv_heads": 16,
        "q_lora_rank": 1024,
        "kv_lora_rank": 512,
        "rope_width": 64,
        "attention": "flash2",
    },
    "windows": {"window": 512, "global_interval": 2, "sinks": True},
    "parallel MLP": {"parallel_mlp": True, "rotary_width": 64},
    "further token": {**LARGE_EXPERTS, "mtp_layers": 1, "dense_layers": 1},
    "Gemma 2": {"norm_place": "both", "window": 1024, "global_interval": 2, "logit_cap": True},
}
STRATEGIES = {
    "fsdp": pk.Strategy(dp=8, zero=3),
    "tensor": pk.Strategy(tp=4, dp=2, zero=1, sequence_parallel=True),
    "experts": pk.Strategy(dp=8, ep=4, zero=1),
    "experts on all ranks": pk.Strategy(tp=2, dp=4, ep=8, zero=1, sequence_parallel=True),
    "stages": pk.Strategy(tp=2, pp=2, dp=2, zero=1),
    "chunks": pk.Strategy(pp=2, dp=4, ep=2, schedule="interleaved", chunks=2, zero=1),
    "context": pk.Strategy(cp=2, pp=2, dp=2, checkpoint="selective", zero=1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_explore_and_predict_agree_on_a_form(form: str, name: str) -> None:
    model = replace(LARGE, **FORMS[form])
    strategy = STRATEGIES[name]
    if not model.experts:
        strategy = replace(strategy, ep=1)
    if name == "chunks" and model.dense_layers:
        strategy = replace(strategy, first_layers=5)
    drawn = Drawn(model, "h100-sxm-8", None, strategy, "eager")
    assert abs(compare(drawn).error) <= 0.03


@pytest.mark.parametrize("form", FORMS)
def test_memory_of_replicas_is_that_of_their_graph(form: str) -> None:
    model = replace(LARGE, **FORMS[form])
    platform = pk.load_platform("h100-sxm-8")
    strategy = pk.Strategy(dp=8, zero=3)
    with keep_quiet():
        needs = price_strategies(model, platform, pk.Strategy.stack([strategy]))["needs"][0]
        held = pk.predict(model, platform, strategy=strategy).memory().total
    assert needs == pytest.approx(held, rel=0.02)


def test_first_dense_layers_are_on_the_first_stage() -> None:
    model = replace(LARGE, **FORMS["first dense layers"], layers=8)
    refusal = (
        "cannot share dense_layers of the model, 2; the first chunk of the first stage, which has 2"
    )
    with pytest.raises(ValueError, match=refusal):
        pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(pp=4, dp=2))
