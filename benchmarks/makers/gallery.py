"""Builds the GPU platforms of the gallery from their sources; `make gallery` writes them again.

    python -m benchmarks.makers.gallery [NAME ...]

Sources: reference_data/datasheets.csv, measurements of other people (PERFKIT_SHARED_DATA or beside
the checkout), and the package aiconfigurator-core (installed, or in PERFKIT_KERNEL_DATABASE).
"""

import math
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from benchmarks.gpu_context import GENERATION, read_scales
from benchmarks.gpu_forms import DATASHEETS, read_sweeps
from benchmarks.helpers.command import command
from benchmarks.helpers.files import AbsentError, find_shared_data
from benchmarks.helpers.gpu_scales import add_published
from benchmarks.helpers.gpu_survey_tables import (
    ROWWISE_VARIANTS,
    Survey,
    list_attention,
    list_batched,
    list_rows,
    list_work,
    read_survey,
)
from benchmarks.makers import gallery_v100
from perfkit.fitting import (
    Additive,
    CollectiveModel,
    Fit,
    KernelModel,
    RowwiseRoofline,
    TiledRoofline,
    fit_additive,
    fit_collective,
    fit_roofline,
)
from perfkit.fitting.parameters import Key
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import DTYPES, Device, Link, MemoryLevel, Network, Quantity
from perfkit.ground.targets import write_text
from perfkit.ground.units import check_choice
from perfkit.models.collectives import bus_factor
from perfkit.models.roofline import attention_work, gemm_flops, round_up
from perfkit.platform.datasheets import find_datasheet, read_datasheet
from perfkit.platform.file import format_toml
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernels import (
    CAUSAL_TILE,
    HEAD_MULTIPLES,
    find_softmax_width,
    find_stand_in,
)
from perfkit.platform.levels import read_levels
from perfkit.platform.lookup_kernels import make_lookup_kernels
from perfkit.platform.platform import Platform
from perfkit.platform.sources import (
    POOR,
    UNFITTED,
    add_tiles,
    assemble,
    fit_curves,
    fit_database,
    fit_gemms,
    fit_rails,
)
from perfkit.platform.whatif import DEVICE_SPREAD

#: Day on which the numbers were entered; the measurements have no date.
DATE = "2026-11-21"
#: Parts of a platform file with fits, and numbers that are rounded to three digits.
_FITS, _ROUGH = (
    ("kernels", "collectives", "context"),
    ("stderr", "spread", "bias", "spread_time", "latency"),
)
_DATABASE = "aiconfigurator-core 0.12.0 (Apache-2.0)"
#: The GPU whose steps perfkit has measured; classes that are taken from these steps; names of those
#: taken as a whole.
_OWN = "h100-1"
_FROM_STEPS = (
    "rowwise",
    "convolution",
    "pooling",
    "embedding_forward",
    "embedding_backward",
    "embedding_update",
)
_WHOLE = {
    "embedding_update": "embedding_update.sparse",
    "convolution": "convolution",
    "pooling": "pooling",
}
#: Fewest operations for a class in its own number format, and the smallest spread on another
#: generation [-].
_OFTEN, _ELSEWHERE = 10, 0.3
#: Survey of kernels of our own, and the generation of its GPU.
_SURVEY, _SURVEYED = "h200-2", 9.0
#: Passes of attention.
PHASES = ("forward", "backward")
#: A function that returns the fits of one source.
Part: TypeAlias = Callable[[Platform], Mapping[str, Fit]]


@dataclass(frozen=True)
class Recipe:
    """Datasheet, ranks of a node, sources of fits, nodes, and the platform of one node."""

    system: str
    ranks: int
    parts: Sequence[Part] = ()
    nodes: int = 1
    node: str = ""
    rails: int = 1
    fabric: str = ""


# -- sources
# ---------------------------------------------------------------------------------------------------------


def _shared_collectives(system: str, platform: Platform) -> Mapping[str, Fit]:
    """Fits of shared sweeps, of the newest library."""
    frame = read_sweeps(system)
    versions = set(frame["library_version"]) - {"unrecorded"}
    version = max(versions, key=lambda words: [int(word) for word in words.split(".")])
    tidy = frame.filter(pl.col("library_version") == version).with_columns(
        pl.col("dtype").replace("half", "fp16"), nodes=pl.lit(1, pl.Int64)
    )
    return fit_curves(
        tidy,
        source=f"{_DATABASE}, nccl {system}, NCCL {version}, medians over repeats",
        date=DATE,
        judged=False,
    )


def _shared_gemms(system: str, platform: Platform) -> Mapping[str, Fit]:
    """Fit of shared products with random data, as in training; a fifth is held out for tests."""
    frame = pl.read_csv(find_shared_data("gemm", f"gemm_bf16_{system}.csv")).filter(
        pl.col("split_random") == "train"
    )
    tidy = frame.select(
        "m", "n", "k", dtype=pl.lit("bf16"), seconds=pl.col("latency_us_sglang") * 1e-6
    )
    text = f"{_DATABASE}, {system}, collector sglang, split_random train"
    return fit_gemms(tidy, platform.device, source=text, date=DATE)


def read_products(name: str) -> pl.DataFrame:
    """Products in fp32 that sitar-lab/NeuSight timed on a device; most sizes are unaligned."""
    return pl.read_csv(find_shared_data("kernels_neusight", f"linear_{name}.csv")).select(
        "n",
        "k",
        m=pl.col("m") * pl.col("b"),
        dtype=pl.lit("fp32"),
        seconds=pl.col("latency_ms") * 1e-3,
    )


def _read_squares() -> pl.DataFrame:
    """Published products in fp32, most of them square, on an A100 whose power does not limit
    them."""
    seconds = gemm_flops(pl.col("m"), pl.col("n"), pl.col("k")) / pl.col("tflops") / 1e12
    return pl.read_csv(find_reference("published", "gemm_fp32.csv")).with_columns(
        dtype=pl.lit("fp32"), seconds=seconds
    )


def _products_fp32(
    read: Callable[[], pl.DataFrame], sheet: str, text: str, more: float, platform: Platform
) -> Mapping[str, Fit]:
    """Fit of products in fp32 without TF32 on the PCIe card of the same chip, with more spread."""
    text = f"{text}, shares of the datasheet {sheet}"
    fit = fit_gemms(read(), read_datasheet(sheet).device, source=text, date=DATE)["gemm.fp32"]
    note = f"a call of the framework took {fit['launch'] * 1e6:.0f} µs there; the launch is that of gemm"
    errors = {key: error for key, error in fit.stderr.items() if key != "launch"}
    return {
        "gemm.fp32": fit.with_values(
            {"launch": platform.kernels["gemm"]["launch"]},
            stderr=errors,
            spread=math.hypot(fit.spread, more),
            notes=(*fit.notes, note),
        )
    }


def _database(system: str, parts: Sequence[str], platform: Platform) -> Mapping[str, Fit]:
    """Fits of the kernel database, of all or some of its parts."""
    curves, kernels = fit_database(system, platform.device, parts=parts, label=_DATABASE, date=DATE)
    return {**curves, **kernels}


def _log(name: str, source: str, platform: Platform) -> Mapping[str, Fit]:
    """Fits of a log of nccl-tests, for collectives without a fit so far."""
    fits = fit_curves(_read_log(name), source=source, date=DATE, judged=False)
    known = {
        Key.parse(key).operation
        for key, fit in platform.collectives.items()
        if fit.kind == "fitted"
    }
    return {key: fit for key, fit in fits.items() if Key.parse(key).operation not in known}


def _read_log(name: str) -> pl.DataFrame:
    from perfkit.readers.nccl import read_nccl_tests

    with warnings.catch_warnings():
        # in one of them labels and busbw disagree; the reader corrects it
        warnings.simplefilter("ignore")
        return read_nccl_tests(find_shared_data("nccl_logs", name))


def _rail(name: str, source: str, platform: Platform) -> Mapping[str, Fit]:
    """Fits between nodes, from a log with one rank per node or, less the time inside nodes, from
    one of whole nodes."""
    frame = _read_log(name)
    fits = fit_curves(
        frame,
        ranks_per_node=platform.network.ranks_per_node,
        source=source,
        date=DATE,
        judged=False,
    )
    rails = {key: fit for key, fit in fits.items() if Key.parse(key).algorithm == "rail"}
    return rails or fit_rails(frame, platform, source=source, date=DATE)


def _volta_kernels(platform: Platform) -> Mapping[str, Fit]:
    """Kernels of a V100 at locked clocks, with shares of the bandwidth of the datasheet, not of the
    measured one."""
    kernels, locked = gallery_v100.fit_kernels(), gallery_v100.build("v100-locked-1").device
    scale = {"memory_efficiency": locked.main_bandwidth / platform.device.main_bandwidth}
    note = "measured at 1297 MHz; taken to reach the same share of the peak at the boost clock"

    def rescale(values: Mapping[str, float]) -> dict[str, float]:
        return {name: value * scale.get(name, 1.0) for name, value in values.items()}

    return {
        key: fit.with_values(
            rescale(fit),
            stderr=rescale(fit.stderr),
            spread=1.25 * fit.spread,
            notes=(*fit.notes, note),
        )
        for key, fit in kernels.items()
    }


def _volta_collectives(platform: Platform) -> Mapping[str, Fit]:
    """Curves of a paper: read off its plots for 4 ranks, and its published formula for 8 ranks."""
    paper = "arXiv 2404.12674, ml_perf_model (BSD-3)"
    folder = find_shared_data("nccl")
    frame = pl.read_csv(folder / "collectives_4xV100_dgx1_digitized.csv").filter(
        pl.col("kind") == "line"
    )
    names = {"all_gather_base": "all_gather", "all_gather": "all_gather_into_list"}
    tidy = frame.select(
        operation=pl.col("collective").replace(names),
        ranks=pl.lit(4, pl.Int64),
        nodes=pl.lit(1, pl.Int64),
        dtype=pl.lit("fp32"),
        nbytes=pl.col("size_B").cast(pl.Int64),
        seconds=pl.col("latency_us") * 1e-6,
    )
    source = f"{paper}, 4 V100 of a DGX-1, read off a plot (3 %)"
    fits = fit_curves(tidy, source=source, date=DATE, judged=False)
    published = pl.read_csv(folder / "collective_fit_params_v100.csv").filter(pl.col("n_gpus") == 8)
    for row in published.iter_rows(named=True):
        operation = row["collective"].removesuffix("v")
        exponents = np.arange(row["ln_p_log2B"], row["sats_p_log2B"] + 1.0)
        bend = (
            row["sig_L"] / (1.0 + np.exp(-row["sig_k"] * (exponents - row["sig_x0"])))
            + row["sig_b"]
        )
        nbytes = np.append(2.0**exponents, 2.0**28)
        busbw = (
            np.append(np.minimum(10.0**bend, row["max_bus_bw_GBps"]), row["max_bus_bw_GBps"]) * 1e9
        )
        seconds = np.maximum(nbytes * bus_factor(operation, 8) / busbw, row["overhead_us"] * 1e-6)
        fit = fit_collective(
            nbytes, seconds, source=f"{paper}, published curve of 8 V100, sampled", date=DATE
        )
        note = "not measurements but a published curve; the same kind is up to 25 % off the measurements on 4 ranks"
        fits[f"{operation}.8"] = replace(
            fit, spread=max(fit.spread, 0.25), notes=(*fit.notes, note)
        )
    return fits


# -- recipes
# ---------------------------------------------------------------------------------------------------------


def _from_shared(system: str, log: tuple[str, str], *more: str) -> Recipe:
    """A node with shared collectives and products; the other fits are from the database."""
    parts = [
        partial(_shared_collectives, system),
        partial(_log, *log),
        partial(_shared_gemms, system),
    ]
    if system == "a100_sxm":
        text = (
            "triton-lang/triton issue 2491 and Yinghan-Li/YHs_Sample issue 4, NVIDIA A100 80GB PCIe"
        )
        parts.append(partial(_products_fp32, _read_squares, "a100-pcie", text, DEVICE_SPREAD))
    return Recipe(DATASHEETS[system], 8, [*parts, partial(_database, system, more)])


_LOGS = "nccl-tests log of {}, {}"
_A100_LOG = _LOGS.format("8 A100-SXM4-40GB, one process", "microsoft/superbenchmark@700d650 (MIT)")
_H100_NODE = _LOGS.format("8 H100", "xxrjun/nccl-tests-cluster@455de4f (Apache-2.0)")
_H100_RAIL = _LOGS.format(
    "10 nodes with one H100 each", "xxrjun/nccl-tests-cluster@455de4f (Apache-2.0)"
)
_A100_PAIR = _LOGS.format(
    "2 p4de.24xlarge, EFA of 4 x 100 Gb/s a node",
    "aws-samples/awsome-distributed-training@9bfddb3 (MIT-0)",
)

_VOLTA_PRODUCTS = "sitar-lab/NeuSight (MIT), half of the rows of linear, tesla_v100_pcie_32gb"
#: Ranks of the nodes whose measurements are all in the kernel database.
_IN_DATABASE = {
    "h200_sxm": 8,
    "b200_sxm": 8,
    "b300_sxm": 8,
    "gb200": 4,
    "l40s": 8,
    "rtx_pro_6000_server": 8,
}
RECIPES: Mapping[str, Recipe] = {
    "a100-sxm-8": _from_shared(
        "a100_sxm", ("a100x8_nvswitch_broadcast.log", _A100_LOG), "attention"
    ),
    "h100-sxm-8": _from_shared(
        "h100_sxm", ("h100x8_1node_multi_collective.log", _H100_NODE), "attention", "elementwise"
    ),
    **{
        f"{DATASHEETS[system]}-{ranks}": Recipe(
            DATASHEETS[system], ranks, [partial(_database, system, ())]
        )
        for system, ranks in _IN_DATABASE.items()
    },
    "v100-sxm-8": Recipe(
        "v100-sxm",
        8,
        [
            _volta_collectives,
            _volta_kernels,
            partial(
                _products_fp32,
                partial(read_products, "tesla_v100_pcie_32gb"),
                "v100-pcie",
                _VOLTA_PRODUCTS,
                0.0,
            ),
        ],
    ),
    "a100-sxm-efa-8x8": Recipe(
        "a100-sxm",
        8,
        nodes=8,
        node="a100-sxm-8",
        rails=4,
        fabric="EFA, 4 x 100 Gb/s a node (AWS p4de)",
        parts=[partial(_rail, "a100x16_2node_p4de_efa_allreduce.log", _A100_PAIR)],
    ),
    "h100-sxm-8x8": Recipe(
        "h100-sxm",
        8,
        nodes=8,
        node="h100-sxm-8",
        rails=8,
        fabric="not stated, 400 Gb/s a GPU",
        parts=[partial(_rail, "h100x10_10node_g1_multi_collective.log", _H100_RAIL)],
    ),
}


#: All GPU platforms: those of the recipes, and those of a study with locked clocks.
NAMES = (*RECIPES, *gallery_v100.NAMES)
#: Fits for GPUs and classes without measurements, as a file outside the gallery.
TYPICAL = "../typical"


def _split(
    fits: Mapping[str, Fit],
) -> tuple[dict[str, KernelModel], dict[str, CollectiveModel]]:
    """Split fits into those of kernels and those of collectives."""
    kernels = {key: fit for key, fit in fits.items() if isinstance(fit, KernelModel)}
    curves = {key: fit for key, fit in fits.items() if isinstance(fit, CollectiveModel)}
    return kernels, curves


def read_parts(name: str) -> tuple[Platform, list[str]]:
    """A platform from the sources that are here, and messages about the missing ones."""
    recipe = RECIPES[check_choice("name", name, RECIPES)]
    missing: list[str] = []
    if recipe.node:
        platform, missing = read_parts(recipe.node)
    else:
        platform = Platform.from_datasheet(recipe.system, ranks=recipe.ranks)
        kernels: dict[str, KernelModel] = {}
        # without finer classes; `add_own_steps` adds them
        for key, fit in platform.kernels.items():
            kind, finer, _ = key.partition(".")
            if not (finer and kind in _FROM_STEPS):
                kernels[key] = replace(fit, transferred=())
        platform = replace(platform, kernels=kernels, collectives={})
    platform = replace(
        platform,
        name=name,
        network=replace(platform.network, nodes=recipe.nodes, rails=recipe.rails),
    )
    for part in recipe.parts:
        try:
            fits = part(platform)
        except (FileNotFoundError, AbsentError) as error:
            missing.append(str(error))
            continue
        kernels, curves = _split(fits)
        platform = assemble(platform, kernels=kernels, collectives=curves)
    if recipe.fabric and "inter" in (links := platform.network.links):
        links = {**links, "inter": replace(links["inter"], name=recipe.fabric)}
        platform = replace(platform, network=replace(platform.network, links=links))
    return platform, missing


def build(name: str) -> Platform:
    """A platform of the gallery; an error if a source is missing."""
    if name == TYPICAL:
        return _round(build_typical())
    if name in gallery_v100.NAMES:
        return _round(gallery_v100.build(name))
    platform, missing = read_parts(name)
    if missing:
        raise AbsentError(f"{name} cannot be built: {'; '.join(dict.fromkeys(missing))}")
    return finish(platform)


#: Classes without measurements, or with more variation than between devices: the class that each
#: follows, its smallest spread, and why; docs/formulas.md, table 2.3.
_FOLLOWS: Mapping[str, tuple[str, float, str]] = {
    "attention": (
        "attention",
        0.4,
        "FlashAttention-2 reaches 35 % of the peak of an H100 (arXiv 2407.08608)",
    ),
    "bmm": ("gemm", 0.35, "few or small products fill a device less"),
    "elementwise": ("elementwise", 0.3, "casts stand for all functions"),
    **dict.fromkeys(("rowwise", "copy"), ("elementwise", 0.35, "the same share of the bandwidth")),
    **dict.fromkeys(
        ("embedding_forward", "embedding_backward", "embedding_update"),
        ("gemm", 0.45, "random rows were not measured; they move in 32 B sectors"),
    ),
}
#: Forms whose parameters are shares or laws, so that those of other devices have a middle.
_IN_MIDDLE = ("roofline", "attention", "over_ranks")
#: Smallest spread of collectives on a link that was not measured; docs/formulas.md, table 2.3.
_WIDE = 0.5


def build_typical() -> Platform:
    """The median of the measured devices: shares of peak, bandwidth and link."""
    locked = "v100-sxm-8"  # measured at another clock
    nodes = {
        name: load_platform(name)
        for name, recipe in RECIPES.items()
        if not recipe.node and name != locked
    }
    wires, hops = (
        {name: getattr(node.network.links["intra"], end).value for name, node in nodes.items()}
        for end in ("bandwidth", "latency")
    )
    wire, hop = (float(np.median(list(values.values()))) for values in (wires, hops))
    groups: dict[str, dict[str, Fit]] = {}
    for name, node in nodes.items():
        for key, fit in {**node.kernels, **node.collectives}.items():
            if fit.kind == "fitted" and fit.form in _IN_MIDDLE:
                scale = {"beta0": wires[name] / wire, "beta1": wires[name] / wire}
                scaled = {part: value * scale.get(part, 1.0) for part, value in fit.items()}
                groups.setdefault(key, {})[name] = fit.with_values(scaled)
    found = {key: _take_middle(fits) for key, fits in sorted(groups.items()) if len(fits) > 2}
    for key, (model, least, why) in _FOLLOWS.items():
        fit = found[model]
        found[key] = replace(
            fit, spread=max(least, fit.spread), source=f"{fit.source}; as {model}: {why}"
        )
    gather = found["all_gather.any"]
    whole = {"beta0": gather["beta0"] + gather["beta1"], "beta1": 0.0}
    found["broadcast.any"] = gather.with_values(
        whole, source=f"{gather.source}; busbw of all_gather"
    )
    found["transfer"] = Additive.build(
        {"launch": 1e-6, "nbytes": 1 / 8.1e9},
        spread=0.5,
        units={"launch": "s", "nbytes": "s/B"},
        source="pageable memory over PCIe as on the V100 host of arXiv 2404.12674 (hw_params, pcie_gbps)",
        kind="assumed",
        date=DATE,
        notes=(UNFITTED,),
    )
    own, text = "a placeholder: every datasheet states its own", f"median over {', '.join(nodes)}"
    memory = MemoryLevel("memory", None, Quantity(1.0, "B/s", "assumed", own, DATE))
    link = Link(
        Quantity(wire, "B/s", "assumed", text, DATE), Quantity(hop, "s", "assumed", text, DATE)
    )
    device = Device("a device that nobody measured", "cuda", {}, (memory,))
    network = Network(8, links={"intra": link})
    return add_context(
        Platform("the middle of the measured GPUs", device, network, *_split(found)), "others"
    )


def _take_middle(fits: Mapping[str, Fit]) -> Fit:
    """The median of every parameter; the spread adds, in squares, the median spread, scatter and
    that of a transfer."""
    first = next(iter(fits.values()))
    table = {name: np.array([fit[name] for fit in fits.values()]) for name in first}
    scatters = [
        np.log(table[name]).std()
        for name in ("compute_efficiency", "memory_efficiency")
        if name in table
    ]
    # classes without arithmetic have no scatter of its share
    scatter = next((x for x in scatters if x > 0), _WIDE)
    spread = math.hypot(
        float(np.median([fit.spread for fit in fits.values()])), float(scatter), DEVICE_SPREAD
    )
    return first.build(
        {name: float(np.median(values)) for name, values in table.items()},
        spread=spread,
        kind="assumed",
        source=f"median over {', '.join(fits)}",
        date=DATE,
        notes=(UNFITTED,),
        units=first.units,
        dtypes=first.dtypes,
    )


def add_own_steps(platform: Platform) -> Platform:
    """Add classes from the steps that perfkit measured on an H100: docs/formulas.md, table 2.5.

    Only classes without a measurement of the platform are added. Layouts and convolutional nets are
    added only to GPUs of the same generation. Older generations get nothing, because their scales
    were fitted without these classes. The file for GPUs without measurements has no scales, so it
    gets them.
    """
    own, capability = (
        load_platform(find_reference("measured") / f"{_OWN}.toml"),
        platform.device.capability,
    )
    if own.device.capability is None or (
        capability and capability.value < own.device.capability.value
    ):
        return platform
    near, fits = capability is not None and capability.value == own.device.capability.value, {}
    if capability is not None and int(capability.value) in _CUBLAS_FP8:
        fits["gemm.fp8"] = _take_own_fp8(own, near=near)
    for key, scale in own.context.kernels.items():
        kind, *finer = key.split(".")
        dtype = finer.pop() if finer and finer[-1] in DTYPES else ""
        net = kind in ("convolution", "pooling") or "batch_norm" in key
        free = kind not in platform.kernels or platform.kernels[kind].kind == "assumed"
        enough = (finer or kind in _WHOLE) and (not dtype or scale.n >= _OFTEN)
        fit = find_stand_in(own.kernels, kind, variant=".".join(finer), dtype=dtype or "fp32")
        if (
            kind in _FROM_STEPS
            and free
            and enough
            and fit
            and scale.source == own.provenance["id"]
            and near >= net
        ):
            fits[_WHOLE.get(key, key)] = fit.with_values(
                _slow(fit, scale["scale"]),
                stderr={},
                ranges={},
                dtypes=(),
                at_bounds=(),
                notes=(UNFITTED,),
                spread=math.hypot(scale.spread, DEVICE_SPREAD if near else _ELSEWHERE),
                spread_time=None,
                quality="",
                n=scale.n,
                kind="fitted" if near else "assumed",
                date=scale.date,
                source=f"perfkit, {_OWN}: in its own steps",
                stands_for="",
                bias=0.0,
            )
    return replace(platform, kernels={**platform.kernels, **fits})


@dataclass(frozen=True)
class _Surveyed:
    """Where the kernels of our survey go: the survey, the bandwidth of its GPU [B/s], whether the
    device is of the same generation, and the spread that its fits get besides [-]."""

    survey: Survey
    bandwidth: float
    is_near: bool
    extra: float

    def mark(self, fit: KernelModel) -> KernelModel:
        """A fit as it goes into the platform of another device."""
        spread = math.hypot(fit.spread, self.extra)
        return fit.with_values(
            {},
            spread=spread,
            spread_time=None,
            kind="fitted" if self.is_near else "assumed",
            stderr={},
            ranges={},
            dtypes=(),
            notes=(UNFITTED,),
            quality="poor" if self.is_near and spread > POOR else "",
        )

    @property
    def about(self) -> dict[str, str]:
        """Source and date of its fits."""
        source = f"perfkit, {_SURVEY}: kernels alone"
        return {"source": source, "date": self.survey.facts["date"]}


#: Generations whose products in fp8 are those of cuBLAS, not those of inference: Hopper, and Blackwell
#: of data centres; docs/formulas.md, table 2.5.
_CUBLAS_FP8 = (9, 10)


def _take_own_fp8(own: Platform, *, near: bool) -> KernelModel:
    """Products in fp8 as cuBLAS computes them on our H100, as shares of the datasheet."""
    fit = replace(own.kernels["gemm.fp8"], source=f"perfkit, {_OWN}: cuBLAS as PyTorch calls it")
    if near:
        return fit
    spread = math.hypot(fit.spread, DEVICE_SPREAD)
    return replace(fit, kind="assumed", spread=spread, spread_time=None)


def add_own_kernels(platform: Platform) -> Platform:
    """Add kernels as perfkit timed them on an H200, alone and cold: docs/formulas.md, table 2.5.

    They go where classes of our own steps go: to GPUs of the same generation, and with a wide spread
    to later and unknown ones. Older generations get nothing, because their scales were fitted
    without them.
    """
    capability, rowwise = platform.device.capability, platform.kernels.get("rowwise")
    is_older = capability is not None and capability.value < _SURVEYED
    if is_older or rowwise is None or rowwise.kind != "assumed":
        return platform
    is_near = capability is not None and int(capability.value) == int(_SURVEYED)
    bandwidth = read_datasheet(DATASHEETS["h200_sxm"]).device.main_bandwidth
    extra = 0.0 if platform.device.main_bandwidth == bandwidth else DEVICE_SPREAD
    surveyed = _Surveyed(
        read_survey(find_reference("measured") / f"{_SURVEY}.survey.json"),
        bandwidth,
        is_near,
        extra if is_near else _ELSEWHERE,
    )
    kernels = {**platform.kernels, **_fit_rows(surveyed), **_fit_batched(platform, surveyed)}
    if capability is not None:
        kernels |= _fit_attention(platform, surveyed)
    return replace(platform, kernels=kernels)


def _fit_rows(surveyed: _Surveyed) -> dict[str, KernelModel]:
    """Softmax and norms by the rows and their width, each in both formats."""
    fits = dict[str, KernelModel]()
    for variant in ROWWISE_VARIANTS:
        for dtype in ("fp32", "bf16"):
            timings = [one for one in list_rows(surveyed.survey, variant) if one.dtype == dtype]
            terms = {
                "launch": np.ones(len(timings)),
                "rows": np.array([one.sizes["rows"] for one in timings]),
                "columns": np.array([one.sizes["n"] for one in timings]),
                "nbytes": np.array([list_work(one)[0].nbytes for one in timings]),
            }
            seconds = np.array([one.seconds for one in timings])
            found = fit_additive(terms, seconds)
            fit = RowwiseRoofline.build(
                {
                    "launch": found.get("launch", 0.0),
                    "memory_efficiency": 1.0 / (found["nbytes"] * surveyed.bandwidth),
                    "per_row": found.get("rows", 0.0),
                    "per_column": found.get("columns", 0.0),
                },
                spread=found.spread,
                bias=found.bias,
                n=found.n,
                source=surveyed.about["source"],
                date=surveyed.about["date"],
            )
            key = f"rowwise.{variant}.fp32" if dtype == "fp32" else f"rowwise.{variant}"
            fits[key] = surveyed.mark(fit)
    return fits


#: Tile of a batched product in fp32 [-]; docs/formulas.md, table 2.4.
_BATCHED_TILE = {"tile_m": 64.0, "tile_n": 64.0}


def _fit_batched(platform: Platform, surveyed: _Surveyed) -> dict[str, KernelModel]:
    """Batched products in fp32, which run in whole tiles without tensor cores."""
    peak = read_datasheet(DATASHEETS["h200_sxm"]).device.peaks["fp32"].value
    timings = list_batched(surveyed.survey, "fp32")
    work = [list_work(one)[0] for one in timings]
    sizes = {
        name: np.array([getattr(one.sizes, name) for one in work]) for name in ("m", "n", "flops")
    }
    whole = [round_up(sizes[side], _BATCHED_TILE[f"tile_{side}"]) for side in ("m", "n")]
    flops = sizes["flops"] * whole[0] * whole[1] / (sizes["m"] * sizes["n"])
    fit = fit_roofline(
        flops,
        np.array([one.nbytes for one in work]),
        np.array([one.seconds for one in timings]),
        peak=peak,
        bandwidth=surveyed.bandwidth,
        source=surveyed.about["source"],
        date=surveyed.about["date"],
    )
    about = {item.name: getattr(fit, item.name) for item in fields(Fit)}
    tiled = TiledRoofline.build({**fit, **_BATCHED_TILE}, **about)
    return {"bmm.fp32": replace(surveyed.mark(tiled), dtypes=("fp32",))}


#: Backend of the survey by kernel of attention; FlashAttention in Triton is taken as that in CUDA.
_BACKENDS = {
    "flash2": "flash",
    "flash3": "cudnn",
    "efficient": "efficient",
    "triton": "flash",
}
#: Spread of kernels of attention on a generation where they were not measured [-].
_OTHER_ATTENTION = 0.4


def _fit_attention(platform: Platform, surveyed: _Surveyed) -> dict[str, KernelModel]:
    """Kernels of attention, each forward and backward: docs/formulas.md, table 2.5.

    On Hopper they are those of the survey. On Blackwell the fastest kernel has the measured forward
    pass, and of the backward pass what the survey says of it relative to the forward; the others use
    no instruction of Blackwell, and are taken to be as fast as on Hopper.
    """
    fits = dict[str, KernelModel]()
    hopper = read_datasheet(DATASHEETS["h200_sxm"]).device
    rates = {
        "compute_efficiency": hopper.peaks["bf16"].value / platform.device.peaks["bf16"].value,
        "memory_efficiency": hopper.main_bandwidth / platform.device.main_bandwidth,
    }
    for kernel, backend in _BACKENDS.items():
        passes = {phase: _fit_pass(surveyed, backend, phase, kernel) for phase in PHASES}
        if not surveyed.is_near:
            passes = {phase: _slow_down(fit, rates) for phase, fit in passes.items()}
            if kernel == "flash3" and platform.kernels["attention"].kind == "fitted":
                passes = _carry_fastest(platform, surveyed, kernel, backend)
        for phase, fit in passes.items():
            if not surveyed.is_near or kernel == "triton":
                fit = replace(fit, kind="assumed", spread=max(fit.spread, _OTHER_ATTENTION))
            fits[f"attention.{phase}.{kernel}"] = fit
            masked = {"diagonal": CAUSAL_TILE}
            fits[f"attention.{phase}_causal.{kernel}"] = fit.with_values(masked, stderr={})
    return fits


def _fit_pass(surveyed: _Surveyed, backend: str, phase: str, kernel: str) -> KernelModel:
    """One pass of one kernel of attention, with and without a mask together."""
    timings = list_attention(surveyed.survey, f"{backend}_{phase}")
    work = [list_work(one)[0] for one in timings]
    device = read_datasheet(DATASHEETS["h200_sxm"]).device
    tiles = {
        "head_multiple": HEAD_MULTIPLES[kernel],
        "softmax_width": find_softmax_width(device),
        "diagonal": 0.0,
    }
    computed = [
        attention_work(
            one.sizes.flops,
            one.sizes.k,
            one.sizes.n,
            **{**tiles, "diagonal": CAUSAL_TILE * timing.sizes["causal"]},
        )
        for one, timing in zip(work, timings, strict=True)
    ]
    fit = fit_roofline(
        np.array(computed),
        np.array([one.nbytes for one in work]),
        np.array([one.seconds for one in timings]),
        peak=device.peaks["bf16"].value,
        bandwidth=surveyed.bandwidth,
        source=surveyed.about["source"],
        date=surveyed.about["date"],
    )
    return surveyed.mark(add_tiles(fit, tiles))


def _slow_down(fit: KernelModel, rates: Mapping[str, float]) -> KernelModel:
    """A kernel that is as fast as on the GPU of the survey, on one with other rates."""
    return fit.with_values({name: fit[name] * rate for name, rate in rates.items()}, stderr={})


def _carry_fastest(
    platform: Platform, surveyed: _Surveyed, kernel: str, backend: str
) -> dict[str, KernelModel]:
    """The fastest kernel of a later generation: its measured forward pass, and a backward pass that
    relates to it as on the GPU of the survey."""
    measured = platform.kernels["attention"]
    multiple = {"head_multiple": HEAD_MULTIPLES[kernel]}
    forward = measured.with_values(
        multiple,
        stderr={},
        kind="assumed",
        notes=(UNFITTED,),
        spread_time=None,
        ranges={},
        quality="",
    )
    passes = {phase: _fit_pass(surveyed, backend, phase, kernel) for phase in PHASES}
    ratios = {
        name: passes["backward"][name] / passes["forward"][name]
        for name in ("compute_efficiency", "memory_efficiency")
    }
    changed = {name: forward[name] * ratio for name, ratio in ratios.items()}
    changed["sharpness"] = passes["backward"]["sharpness"]
    source = f"{forward.source}; backward over forward as perfkit, {_SURVEY}"
    return {"forward": forward, "backward": forward.with_values(changed, stderr={}, source=source)}


def _slow(fit: Fit, scale: float) -> dict[str, float]:
    """Parameters of a roofline that takes `scale` times as long, with efficiencies of at most 1."""
    return {
        name: value * scale
        if name == "launch"
        else min(value / scale, 1.0)
        if "efficiency" in name
        else value
        for name, value in fit.items()
    }


def add_lookup_kernels(platform: Platform) -> Platform:
    """Add kernels that wait for rows of tables: docs/formulas.md, table 3.5."""
    sheet = find_datasheet(platform.device)
    capability = platform.device.capability
    if sheet is None or sheet.multiprocessors is None or capability is None:
        return platform
    fits = make_lookup_kernels(platform.kernels, sheet.multiprocessors.value, capability.value)
    return replace(platform, kernels={**platform.kernels, **fits})


def add_context(platform: Platform, default: str = "") -> Platform:
    """Add the scales of the generation of the device, which `benchmarks.gpu_context` fits to
    published steps."""
    platform = add_own_kernels(add_own_steps(platform))
    words = platform.device.name.lower().split()
    known = (GENERATION[word] for word in words if word in GENERATION)
    generation = next(known, default)
    if not generation:
        return platform
    source = "published steps, reference_data/published/gpu_steps.csv"
    found = add_published(platform, read_scales(), generation, source=source, date=DATE)
    kernels = dict(found.context.kernels)
    for key, fit in kernels.items():
        if key.endswith(".fused") and fit.kind == "fitted":
            kernels[key] = replace(fit, source=f"perfkit, {_OWN}: three compiled steps")
    levels = read_levels(generation)
    return replace(found, context=replace(found.context, kernels=kernels, stacks=levels))


def finish(platform: Platform) -> Platform:
    """A platform as in its file: numbers rounded, with its evidence and a list of poor fits."""
    platform = add_lookup_kernels(add_context(platform))
    fits = {**platform.kernels, **platform.collectives}
    poor = [
        f"{key} ({fit.spread:.0%})"
        for key, fit in fits.items()
        if fit.kind == "fitted" and fit.spread > POOR
    ]
    public = "datasheets, and public measurements by others of kernels and whole steps"
    bare = "datasheets and public measurements by others; nothing was calibrated in context"
    about = {
        "evidence": public if platform.context else bare,
        "terms": "figures are facts with their citation; the measurements themselves are not copied",
        "entered": DATE,
    }
    about |= {"poor_fits": f"measurements scatter widely around {', '.join(poor)}"} if poor else {}
    return _round(replace(platform, provenance=about))


def _round(platform: Platform) -> Platform:
    """Round fits and links to six digits, errors and latencies to three."""

    def shorten(value: Any, digits: int = 6) -> Any:
        if isinstance(value, Mapping):
            return {key: shorten(own, 3 if key in _ROUGH else digits) for key, own in value.items()}
        if isinstance(value, list):
            return [shorten(own, digits) for own in value]
        return float(f"{value:.{digits}g}") if isinstance(value, float) else value

    data = tomllib.loads(platform.to_toml())
    data["network"] |= {"links": shorten(data["network"].get("links", {}))}
    return Platform.from_toml(
        format_toml(data | {name: shorten(data[name]) for name in _FITS if name in data})
    )


def find_differences(new: Any, old: Any, place: str = "") -> Iterator[str]:
    """Places where two platform files differ by more than the rounding of another machine."""
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        for key in sorted({*new, *old}):
            yield from find_differences(new.get(key), old.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        for i, (one, other) in enumerate(zip(new, old, strict=True)):
            yield from find_differences(one, other, f"{place}[{i}]")
    elif isinstance(new, float) and isinstance(old, float):
        if not math.isclose(
            new, old, rel_tol=5e-3, abs_tol=2e-3 if place.endswith(("spread", "bias")) else 0.0
        ):
            yield f"{place}: {old} in the file, {new} from the sources"
    elif new != old:
        yield f"{place}: {old!r} in the file, {new!r} from the sources"


@command(
    {
        "names": {
            "nargs": "*",
            "metavar": "NAME",
            "help": f"platforms, all by default: {', '.join(NAMES)}",
        }
    }
)
def main(given: Any) -> None:
    """Build the GPU platforms of the gallery, list what differs from their files, and write
    those."""
    for name in given.names or (*NAMES, TYPICAL):
        path = find_reference() / "platforms" / f"{name}.toml"
        text = build(name).to_toml()
        old = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = list(find_differences(tomllib.loads(text), old))
        print(f"{name}: {len(found)} differences" if found else f"{name}: as committed")
        print("".join(f"  {line}\n" for line in found[:20]), end="")
        if found:
            write_text(path, text)
