"""Published training steps of `data/steps`, each as the arguments of `perfkit.predict`.

The rows are read from the folder that PERFKIT_SHARED_DATA names. A row has the sizes of its model,
how its ranks share it, and the time of a step as its source states it; MANIFEST.md there has the
columns. What a row does not state is said here, once for each file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import perfkit as pk
from benchmarks.helpers.files import find_shared_data, read_csv
from perfkit.platform.datasheets import HOP
from perfkit.platform.estimates import keep_quiet


class PublishedSet(NamedTuple):
    """A file of published steps.

    Parameters
    ----------
    name : str
        Name of the file, without its ending.
    source : str
        Who ran the steps: what is left out together if a whole source is.
    stack : str
        Software that ran them.
    """

    name: str
    source: str
    stack: str


#: Files of Transformer steps.
SETS = (
    PublishedSet("bloom_topologies_a100", "bigscience", "deepspeed"),
    PublishedSet("internevo_a100", "internevo", "internevo"),
    PublishedSet("zero_bubble_a100", "zero bubble", "megatron"),
    PublishedSet("megascale_a100", "megascale", "megatron"),
    PublishedSet("mlperf_gpt3", "mlperf", "megatron-te"),
    PublishedSet("mlperf_llama", "mlperf", "megatron-te"),
    PublishedSet("megatron_bridge", "megatron bridge", "megatron-te"),
    PublishedSet("simumax_b200", "simumax", "megatron-te"),
    PublishedSet("torchao_h100", "torchao", "fsdp-compiled"),
    PublishedSet("torchtune_a100", "torchtune", "ddp"),
    PublishedSet("maxtext_v5e", "maxtext", "maxtext"),
)
#: Files whose selective checkpoints save the results of every other product and of attention, as
#: their notes and torchtitan, which ran them, say.
_PER_OP = ("torchao_h100",)
#: Devices of a generation, which share scales.
_GENERATIONS = {
    "a100-sxm-8": "a100",
    "h100-sxm-8": "h100",
    "b200-sxm-8": "blackwell",
    "gb200-4": "blackwell",
    "tpu-v5e-256": "tpu",
}
#: GPUs of an NVLink domain of GB200 that jobs use: 64 of 72.
_NVLINK_DOMAIN = 64
#: Bandwidth between the NVLink domains of GB200, one way per GPU: an adapter of 400 Gb/s for each
#: (NVIDIA DGX GB200 user guide) [B/s].
_CONNECTX7 = 5e10
#: What the cards of torchao's steps differ in from an H100 SXM: a memory of HBM2e (2.4 TB/s), as
#: torchtitan's, which ran on the same cluster (arXiv:2410.06511, section 3: H100 with HBM2e) [B/s].
_HBM2E = 2.4e12
#: Their cap of power, as MANIFEST.md states it [W].
_POWER_CAP = 500.0
#: Sizes of a model whose fields have the names of columns.
_SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv": "kv_heads"}
_SIZES |= {"inner": "inner", "vocab": "vocabulary", "head_width": "head_width"}
_LLAMA: dict[str, Any] = {"norm": "rms", "gated": True, "rotary": True, "tie": False, "bias": False}


class PublishedStep(NamedTuple):
    """A published step and what was run.

    Parameters
    ----------
    set : PublishedSet
        Its file.
    name : str
        Its id there.
    group : str
        Steps that are fitted, or judged, together.
    generation : str
        Generation of the device.
    model : Transformer
        The model.
    platform : Platform
        The cluster.
    strategy : Strategy
        How ranks share the model.
    execution : str
        ``eager``, ``compiled`` or ``graphs``.
    stack : Stack
        Software that ran it, with the fp8 recipe that the row names.
    seconds : float
        Published time of a step [s].
    memory : float or None
        Published memory of a rank [B].
    """

    set: PublishedSet
    name: str
    group: str
    generation: str
    model: pk.Transformer
    platform: pk.Platform
    strategy: pk.Strategy
    execution: str
    stack: pk.Stack
    seconds: float
    memory: float | None

    @property
    def format(self) -> str:
        """Number format of products; fp16 and bf16 run at one rate."""
        return "fp8" if self.model.dtype == "fp8" else "bf16"


def list_published(names: tuple[str, ...] = ()) -> list[PublishedStep]:
    """List the steps of some files, or of all."""
    steps = []
    for published in SETS:
        if names and published.name not in names:
            continue
        for row in read_csv(find_shared_data("steps", f"{published.name}.csv")):
            steps.append(_read_step(published, row))
    return steps


def _read_step(published: PublishedSet, row: Mapping[str, str]) -> PublishedStep:
    stack = published.stack
    if stack == "ddp" and row["execution"] != "eager":
        stack = "ddp-compiled"
    return PublishedStep(
        set=published,
        name=row["id"],
        group=row["group"],
        generation=_GENERATIONS[row["device"]],
        model=_read_model(row),
        platform=_read_platform(published, row),
        strategy=_read_strategy(published, row),
        execution=row["execution"],
        stack=_state_facts(stack, row),
        seconds=float(row["measured_s"]),
        memory=float(row["mem_gib"]) * 2**30 if row["mem_gib"] else None,
    )


def _state_facts(name: str, row: Mapping[str, str]) -> pk.Stack:
    """The stack with the facts that a row states: the recipe of fp8 in its note or its id.

    The page of torchao's rows calls them "tensorwise with float8 all-gather" and "rowwise with bfloat16
    all-gather".

    NVIDIA's submissions to MLPerf are NeMo programs, whose scripts of fp8 runs reduce gradients in
    bf16 (`model.optim.grad_sync_dtype=bf16`; NeMo Framework user guide, communication overlap).
    """
    stack = pk.find_stack(name)
    if row["source"].startswith("mlcommons"):
        stack = replace(stack, reduce_dtype="bf16")
    for words, recipe in _RECIPES.items():
        if words in row["note"] or f"-{words}-" in row["id"]:
            gathers = name == "fsdp-compiled" and recipe == "tensorwise"
            return replace(stack, fp8_recipe=recipe, fp8_gathers=gathers)
    return stack


#: Recipes of fp8 by the words of rows.
_RECIPES = {"fp8 tensorwise": "tensorwise", "fp8 rowwise": "rowwise", "MXFP8": "mxfp8"}


def _read_model(row: Mapping[str, str]) -> pk.Transformer:
    """The model of a row; weights in half precision have copies in fp32, but for torchtune's."""
    settings: dict[str, Any] = {}
    for column, field in _SIZES.items():
        settings[field] = int(row[column] or 0)
    if row["llama"] == "1":
        settings |= _LLAMA
    if int(row["experts"]):
        settings |= {"experts": int(row["experts"]), "top_k": int(row["top_k"])}
    sequence = int(row["seq"])
    is_tune = row["id"].startswith("tune")
    if is_tune:
        settings["tie"] = True
    return pk.Transformer(
        row["group"].split(" ")[0],
        row["causal"] == "1",
        int(row["batch"]),
        sequence,
        positions=sequence,
        attention=row["attention"],
        dtype=row["dtype"],
        mixed=row["mixed"] == "1" or not is_tune,
        fused=row["fused"] == "1",
        dropout=float(row["dropout"]),
        qk_norm=row["qk"] == "1",
        reduce_dtype=row["reduce"],
        **settings,
    )


def _read_strategy(published: PublishedSet, row: Mapping[str, str]) -> pk.Strategy:
    counts: dict[str, Any] = {}
    for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "zero", "shards"):
        counts[name] = int(row[name])
    layers_of_ends = _count_layers_of_ends(row)
    checkpoint = row["checkpoint"]
    if checkpoint == "selective" and published.name in _PER_OP:
        checkpoint = "per_op"
    return pk.Strategy(
        micro_batch=int(row["micro"]),
        schedule=row["schedule"],
        first_layers=layers_of_ends,
        last_layers=layers_of_ends,
        checkpoint=checkpoint,
        sequence_parallel=row["sp"] == "1",
        cp_kind="ulysses" if row["ulysses"] == "1" else "ring",
        overlap=row["overlap"] == "1",
        tiled=row["tiled"] == "1",
        **counts,
    )


def _count_layers_of_ends(row: Mapping[str, str]) -> int:
    """Layers of the first and of the last stage, 0 for as many as the others have.

    Where chunks do not divide the layers, these are two fewer than all chunks would hold, and the
    notes say that both ends have one less.
    """
    stated = int(row["first"])
    layers = int(row["layers"])
    stages = int(row["pp"])
    slots = stages * int(row["chunks"])
    if stated or stages == 1 or layers % slots == 0 or (layers + 2) % slots:
        return stated
    return (layers + 2) // stages - 1


def _read_platform(published: PublishedSet, row: Mapping[str, str]) -> pk.Platform:
    """The cluster of a row, with the bandwidth between nodes that it states."""
    device = row["device"]
    ranks = int(row["ranks"])
    if device == "tpu-v5e-256":
        node = pk.Platform.from_datasheet(device)
    else:
        node = pk.load_platform(device)
    node = without_levels(node)
    per_node = node.network.ranks_per_node
    if device == "gb200-4":
        domain = min(ranks, _NVLINK_DOMAIN)
        node = _link_nodes(node, _CONNECTX7)
        node = node.with_nodes(1, ranks_per_node=domain)
        per_node = domain
    nodes = -(-ranks // per_node)
    if nodes > 1 and row["inter"]:
        node = _link_nodes(node, float(row["inter"]))
    cluster = node.with_nodes(nodes) if nodes > 1 else node
    if published.name == "torchao_h100":
        main = cluster.device.memory[-1].bandwidth
        assert main is not None
        cluster = cluster.with_scale(memory=_HBM2E / main.value).with_power(_POWER_CAP)
    return cluster


def without_levels(platform: pk.Platform) -> pk.Platform:
    """The platform without levels of software, which are fitted here."""
    return replace(platform, context=replace(platform.context, stacks={}))


def _link_nodes(node: pk.Platform, bandwidth: float) -> pk.Platform:
    """The node with a link to others; a latency that nobody stated is that of other adapters."""
    if "inter" in node.network.links:
        return node.with_link("inter", bandwidth=bandwidth)
    return node.with_link("inter", bandwidth=bandwidth, latency=HOP.value)


class Predicted(NamedTuple):
    """What perfkit says of a step.

    Parameters
    ----------
    time : float
        Time of a step [s].
    spread : float
        Standard deviation of its logarithm [-].
    """

    time: float
    spread: float


def predict_step(step: PublishedStep) -> Predicted:
    """Predict a step by the documented call."""
    with keep_quiet():
        prediction = pk.predict(
            step.model,
            step.platform,
            strategy=step.strategy,
            execution=step.execution,
            stack=step.stack,
        )
    return Predicted(prediction.time, prediction.spread)
