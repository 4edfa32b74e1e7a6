"""What `benchmarks.gpu_survey` makes of its times: one file of all passes, and tables."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from benchmarks.helpers.errors import judge, widen
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import DTYPES
from perfkit.ground.targets import write_text
from perfkit.ground.units import Array, check_choice, format_table
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price
from perfkit.workloads.columns import Accesses, Features, OperationSizes
from perfkit.workloads.graph import Graph, Label

#: Facts of the machine in the first line of a pass.
_FACTS = ("device", "memory", "cache", "machine", "versions", "date")
#: Columns of the rows of a saved survey.
COLUMNS = ("section", "name", "dtype", "sizes", "median_s", "spread", "failed")


@dataclass(frozen=True)
class Timing:
    """A kernel of a survey with its times.

    Parameters
    ----------
    section, name, dtype : str
        Section of the survey, what ran, and the number format of its operands.
    sizes : mapping of str to float
        What decides the time [-].
    medians : tuple of float
        Median time of each pass [s]; empty if it failed.
    spreads : tuple of float
        Largest over smallest sample of each pass, minus one [-].
    failed : str
        Why it could not run; empty if it did.
    """

    section: str
    name: str
    dtype: str
    sizes: Mapping[str, float]
    medians: tuple[float, ...] = ()
    spreads: tuple[float, ...] = ()
    failed: str = ""

    @property
    def seconds(self) -> float:
        """Mean of the passes [s]."""
        return float(np.mean(self.medians))

    @property
    def noise(self) -> float:
        """Largest over smallest pass, minus one [-]."""
        return max(self.medians) / min(self.medians) - 1


@dataclass(frozen=True)
class Survey:
    """All kernels of a survey, and the facts of the machine: device, memory and cache [B], versions,
    date."""

    facts: Mapping[str, Any]
    timings: tuple[Timing, ...]


def _read_pass(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of the machine, and the kernels of a pass by what identifies them."""
    facts = dict[str, Any]()
    rows = dict[str, Any]()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "section" in row:
            identity = [row["section"], row["name"], row["dtype"], row["sizes"]]
            rows[json.dumps(identity)] = row
        elif not facts:
            facts = {name: row[name] for name in _FACTS if name in row}
    return facts, rows


def _join_kernel(identity: str, rows: Sequence[Mapping[str, Any]]) -> Timing:
    """A kernel with the times of all passes, or with the reason why it failed."""
    section, name, dtype, sizes = json.loads(identity)
    for row in rows:
        if "failed" in row:
            return Timing(section, name, dtype, sizes, failed=row["failed"])
    medians, spreads = list[float](), list[float]()
    for row in rows:
        samples = row["samples"]
        medians.append(float(f"{np.median(samples):.4g}"))
        spreads.append(round(max(samples) / min(samples) - 1, 4))
    return Timing(section, name, dtype, sizes, tuple(medians), tuple(spreads))


def join_survey(files: Sequence[Path]) -> Survey:
    """Join passes over the same kernels, each of which `benchmarks.helpers.gpu_survey_points.measure` wrote.

    A kernel counts if every pass has timed it. Facts are those of the first file.
    """
    read = [_read_pass(path) for path in files]
    facts = dict[str, Any]()
    for found, _ in read:
        facts = facts or found
    passes = [rows for _, rows in read]
    common = set.intersection(*map(set, passes))
    timings = []
    for identity in sorted(common):
        timings.append(_join_kernel(identity, [rows[identity] for rows in passes]))
    return Survey(facts, tuple(timings))


def write_survey(survey: Survey, path: Path) -> None:
    """Write a survey as JSON, a line for each kernel."""
    head = {"format": 1, **survey.facts, "columns": COLUMNS}
    rows = []
    for timing in survey.timings:
        fields: list[Any] = [timing.section, timing.name, timing.dtype, timing.sizes]
        fields += [timing.medians, timing.spreads, timing.failed]
        rows.append(json.dumps(fields, separators=(",", ":")))
    text = json.dumps(head, indent=1).removesuffix("\n}")
    write_text(path, text + ',\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n")


def read_survey(path: Path) -> Survey:
    """Read what `write_survey` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != 1 or tuple(data.get("columns", ())) != COLUMNS:
        raise ValueError(
            f"saved is {str(path)!r}, which is no survey; name a file that --convert wrote"
        )
    timings = []
    for section, name, dtype, sizes, medians, spreads, failed in data["rows"]:
        timings.append(Timing(section, name, dtype, sizes, tuple(medians), tuple(spreads), failed))
    facts = {name: data[name] for name in _FACTS if name in data}
    return Survey(facts, tuple(timings))


# What perfkit says of the same operations.


@dataclass(frozen=True)
class Work:
    """An operation as perfkit knows it.

    Parameters
    ----------
    kind, variant, dtype : str
        Its class and number format.
    sizes : OperationSizes
        How much it computes or copies.
    nbytes : float
        What it reads and writes, each operand once [B].
    """

    kind: str
    variant: str
    dtype: str
    sizes: OperationSizes
    nbytes: float


def _multiply(
    kind: str, variant: str, dtype: str, m: float, n: float, k: float, batch: float = 1
) -> Work:
    """A product in a format, with its result in the same, or in bf16 if that is wider."""
    read = DTYPES[dtype] * (m * k + k * n)
    written = max(DTYPES[dtype], 2) * m * n
    sizes = OperationSizes.of_product(m, n, k, batch=batch)
    return Work(kind, variant, dtype, sizes, batch * (read + written))


class _Product(NamedTuple):
    """Sizes of a product."""

    m: float
    n: float
    k: float


def _find_product(timing: Timing) -> _Product:
    """Sizes of the product that a kernel computes."""
    return _Product(timing.sizes["m"], timing.sizes["n"], timing.sizes["k"])


def _list_accumulation(timing: Timing) -> list[Work]:
    m, n, k = _find_product(timing)
    product = _multiply("gemm", "tn", "bf16", m, n, k)
    if timing.name == "product":
        return [product]
    if timing.name.startswith("added_after"):
        dtype = timing.name.rpartition("_")[2]
        nbytes = (2 + 2 * DTYPES[dtype]) * m * n  # the product, and the buffer read and written
        addition = Work("elementwise", "add_", dtype, OperationSizes(elements=m * n), nbytes)
        return [product, addition]
    return []


def _list_fp8(timing: Timing) -> list[Work]:
    formats = {"bf16": "bf16", "tensor": "fp8", "tensor_fast": "fp8"}
    if timing.name not in formats:
        return []
    return [_multiply("gemm", "nt", formats[timing.name], *_find_product(timing))]


def _list_attention(timing: Timing) -> list[Work]:
    backend, phase = timing.name.split("_")
    kernels = {"flash": "flash2", "cudnn": "flash3", "efficient": "efficient"}
    if backend not in kernels:
        return []
    heads = timing.sizes["batch"] * timing.sizes["heads"]
    sequence = timing.sizes["sequence"]
    width = timing.sizes["width"]
    is_causal = bool(timing.sizes["causal"])
    # two products; half of each if tiles above the diagonal are skipped
    passes = 1.0 if is_causal else 2.0
    tensors = 4.0
    if phase == "backward":
        passes *= 2.5
        tensors = 8.0
    sizes = OperationSizes.of_product(sequence, sequence, width, batch=heads, passes=passes)
    rows = heads * sequence
    mask = "_causal" if is_causal else ""
    nbytes = 2 * tensors * rows * width + 4 * rows
    return [Work("attention", f"{phase}{mask}.{kernels[backend]}", "bf16", sizes, nbytes)]


#: Products one by one that the host queues while the device waits [-]. With 64 and more it fell
#: behind: each took 9 to 12 us, whatever its size.
_QUEUED = 8


def _list_grouped(timing: Timing) -> list[Work]:
    m, n, k = _find_product(timing)
    batch = timing.sizes["batch"]
    if timing.name == "one_by_one":
        if batch > _QUEUED:
            return []
        return [_multiply("gemm", "nn", "bf16", m, n, k) for _ in range(int(batch))]
    if timing.name == "grouped_input_gradient":
        return [_multiply("bmm", "grouped.nt", "bf16", m, k, n, batch)]
    if timing.name == "grouped_weight_gradient":
        return [_multiply("bmm", "grouped.tn", "bf16", k, n, m, batch)]
    if timing.name == "batched":
        return [_multiply("bmm", "nn", "bf16", m, n, k, batch)]
    return [_multiply("bmm", "grouped.nn", "bf16", m, n, k, batch)]


def _list_batched(timing: Timing) -> list[Work]:
    m, n, k = _find_product(timing)
    return [_multiply("bmm", timing.name, timing.dtype, m, n, k, timing.sizes["batch"])]


def _list_rowwise(timing: Timing) -> list[Work]:
    name, _, phase = timing.name.rpartition("_")
    variant = {"layer_norm": "native_layer_norm", "rms_norm": "native_layer_norm"}.get(
        name, f"_{name}"
    )
    tensors = 2
    if phase == "backward":
        variant += "_backward_data" if "softmax" in name else "_backward"
        tensors = 3
    if name == "rms_norm":
        variant += ".rms"
    rows, n = timing.sizes["rows"], timing.sizes["n"]
    sizes = OperationSizes(elements=rows * n, rows=rows, n=n)
    nbytes = tensors * DTYPES[timing.dtype] * rows * n
    return [Work("rowwise", variant, timing.dtype, sizes, nbytes)]


#: By section: a kernel of the survey as operations of perfkit, none if it knows no such kernel.
_LISTS: Mapping[str, Callable[[Timing], list[Work]]] = {
    "accumulation": _list_accumulation,
    "fp8": _list_fp8,
    "attention": _list_attention,
    "grouped": _list_grouped,
    "batched": _list_batched,
    "rowwise": _list_rowwise,
}


def list_work(timing: Timing) -> list[Work]:
    """A kernel of the survey as operations of perfkit; none if it knows no such kernel."""
    known = _LISTS.get(timing.section)
    return known(timing) if known and not timing.failed else []


@dataclass(frozen=True)
class Priced:
    """Predicted times of kernels of a survey: `alone` and inside a training step, `in_step` [s],
    and `spread`, the standard deviation of the logarithm of the first [-]."""

    alone: Array
    in_step: Array
    spread: Array


def price_work(work: Sequence[Sequence[Work]], platform: Platform) -> Priced:
    """Price kernels, each of some operations that run one after another."""
    flat = [one for each in work for one in each]
    owner = np.repeat(np.arange(len(work)), [len(each) for each in work])
    features = Features.from_rows([one.sizes for one in flat])
    accesses = Accesses.from_rows([(i, i, one.nbytes, False) for i, one in enumerate(flat)])
    labels = tuple(Label(one.variant, one.kind, one.variant, "forward", "") for one in flat)
    dtypes = tuple(one.dtype for one in flat)
    with keep_quiet():
        (costs,) = price([Graph(labels, features, accesses, dtypes=dtypes)], platform, dtype="bf16")
    alone = costs.hot + costs.cold
    spreads = np.zeros(len(flat))
    for number, model in enumerate(costs.models):
        members = costs.classes == number
        spreads[members] = model.fit.spread_at(alone[members]) if model.fit else 1.0

    def add_up(values: Array) -> Array:
        return np.bincount(owner, weights=values).astype(float)

    spread = add_up(alone * spreads) / add_up(alone)
    return Priced(add_up(alone), add_up(costs.seconds), spread)


#: Platforms that are compared with a survey, by the device: one of the gallery, and a calibration.
_PLATFORMS = {"NVIDIA H200": ("h200-sxm-8", "h200-1")}
_FIGURES = {
    "geomean": "{:.1f}",
    "mean": "{:.1f}",
    "p95": "{:.0f}",
    "bias": "{:+.1f}",
    "inside": "{:.0f}",
    "in a step": "{:+.0f}",
}


#: Widths of rows that the gallery is fitted to; the others judge. They are every other one of the
#: survey.
FITTED_WIDTHS = (64, 256, 768, 1600, 4096, 8192, 16384, 32768, 50304, 128256)


#: Row-wise kernels of the survey that the gallery is fitted to.
ROWWISE_VARIANTS = (
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_layer_norm.rms",
    "native_layer_norm_backward.rms",
)
#: Lengths and widths of heads of attention that the gallery is fitted to; the others judge.
FITTED_LENGTHS, FITTED_HEADS = (512, 2048, 8192), (64, 128, 256)
#: Batches of batched products that the gallery is fitted to; the others judge.
FITTED_BATCHES = (64, 1024)


def is_fitted(timing: Timing) -> bool:
    """Whether the gallery is fitted to a kernel of the survey."""
    sizes = timing.sizes
    if timing.section == "rowwise":
        return sizes["n"] in FITTED_WIDTHS
    if timing.section == "attention":
        return sizes["sequence"] in FITTED_LENGTHS and sizes["width"] in FITTED_HEADS
    if timing.section == "batched":
        return timing.dtype == "fp32" and sizes["batch"] in FITTED_BATCHES
    return False


def list_rows(survey: Survey, variant: str) -> list[Timing]:
    """The kernels of one row-wise class that the gallery is fitted to."""
    return [
        timing
        for timing in survey.timings
        if timing.section == "rowwise"
        and timing.medians
        and is_fitted(timing)
        and list_work(timing)[0].variant == variant
    ]


def list_attention(survey: Survey, name: str) -> list[Timing]:
    """The kernels of attention of one backend and pass that the gallery is fitted to."""
    return [
        timing
        for timing in survey.timings
        if timing.section == "attention"
        and timing.medians
        and timing.name == name
        and is_fitted(timing)
    ]


def list_batched(survey: Survey, dtype: str) -> list[Timing]:
    """The batched products in a format that the gallery is fitted to."""
    return [
        timing
        for timing in survey.timings
        if timing.section == "batched"
        and timing.medians
        and timing.dtype == dtype
        and is_fitted(timing)
    ]


def _name_group(timing: Timing) -> str:
    """Name of a kernel in the table.

    Products with rows that are no multiple of 16 B stand apart, and so does what the gallery is
    fitted to.
    """
    is_odd = any(timing.sizes[name] % 4 for name in "mnk" if name in timing.sizes)
    if timing.section == "batched" and is_odd:
        ending = ", fitted" if is_fitted(timing) else ""
        return f"{timing.name}, odd rows{ending}"
    if timing.section == "attention" and timing.sizes["width"] % 8:
        return f"{timing.name}, heads of 108 and 150"
    if is_fitted(timing):
        return f"{timing.name}, fitted"
    return timing.name


def _load_compared(name: str) -> Platform:
    """A platform of ours that was measured, or one of the gallery."""
    measured = find_reference("measured") / f"{name}.toml"
    return pk.load_platform(measured if measured.exists() else name)


def _format_figures(timings: Sequence[Timing], priced: Priced, places: Sequence[int]) -> list[str]:
    """Cells of one platform for a group of kernels."""
    stated, in_step = [], []
    for place in places:
        seconds = timings[place].seconds
        stated.append(widen(priced.alone[place], priced.spread[place], seconds))
        in_step.append(priced.in_step[place] / seconds - 1)
    figures = judge(stated)
    figures["in a step"] = 100 * float(np.mean(in_step))
    return [form.format(figures[name]) for name, form in _FIGURES.items()]


def format_errors(survey: Survey) -> str:
    """Errors of the platforms of this device by section, kernel and format [%]."""
    timings, work = [], []
    for timing in survey.timings:
        operations = list_work(timing)
        if operations:
            timings.append(timing)
            work.append(operations)
    names = _PLATFORMS[check_choice("device", survey.facts["device"], _PLATFORMS)]
    priced = [price_work(work, _load_compared(name)) for name in names]
    groups = defaultdict[tuple[str, str, str], list[int]](list)
    for place, timing in enumerate(timings):
        groups[timing.section, _name_group(timing), timing.dtype].append(place)
    platforms = ["", "", "", "", ""]
    heads = ["section", "kernel", "format", "n", "floor"]
    for name in names:
        platforms += [name if number == 0 else "" for number in range(len(_FIGURES))]
        heads += _FIGURES
    lines: list[Sequence[str]] = [platforms, heads]
    for (section, kernel, dtype), places in sorted(groups.items()):
        noise = 100 * np.mean([timings[place].noise for place in places])
        line = [section, kernel, dtype, f"{len(places)}", f"{noise:.1f}"]
        for platform in priced:
            line += _format_figures(timings, platform, places)
        lines.append(line)
    return format_table(lines)


# What perfkit has no form for: ratios of measured times.


@dataclass(frozen=True)
class Ratio:
    """A ratio of times of kernels of equal sizes, to be printed by one of the sizes.

    Parameters
    ----------
    says : str
        What is divided by what, in words.
    above, below : tuple of str
        Names of the kernels, whose times are added.
    only : mapping, optional
        Sizes that the kernels must have.
    """

    says: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    only: Mapping[str, float] = field(default_factory=dict)

    def divide(self, timings: Sequence[Timing], by: str) -> dict[float, list[float]]:
        """Ratios by a size [-]."""
        times = defaultdict[str, dict[str, float]](dict)
        sizes = dict[str, Mapping[str, float]]()
        for timing in timings:
            if not timing.failed and all(timing.sizes.get(k) == v for k, v in self.only.items()):
                key = json.dumps(timing.sizes)
                sizes[key] = timing.sizes
                times[key][timing.name] = timing.seconds
        found = defaultdict[float, list[float]](list)
        for key, known in times.items():
            if known.keys() >= {*self.above, *self.below}:
                above, below = (sum(known[n] for n in part) for part in (self.above, self.below))
                found[sizes[key][by]].append(above / below)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class RatioTable:
    """Ratios of one section with a common size in the columns.

    Parameters
    ----------
    section, head : str
        Section of the survey, and what the table says.
    by, word : str
        The size that decides the column, and its name.
    ratios : tuple of Ratio
        Its rows.
    ranges : bool, optional
        Whether the smallest and the largest ratio are printed, too.
    """

    section: str
    head: str
    by: str
    word: str
    ratios: tuple[Ratio, ...]
    ranges: bool = True


def _compare_backends() -> Iterator[Ratio]:
    only = {"width": 128, "causal": 1}
    for backend, word in {"cudnn": "cuDNN", "efficient": "efficient", "math": "math"}.items():
        for phase in ("forward", "backward"):
            says = f"{word} over flash, {phase}"
            yield Ratio(says, (f"{backend}_{phase}",), (f"flash_{phase}",), only)


def _compare_updates() -> Iterator[Ratio]:
    fused = ("rowwise_adagrad_one_kernel",)
    for exponent, ids in ((0.0, "even ids"), (1.05, "ids by Zipf's law")):
        only = {"exponent": exponent}
        for name, word in {
            "rowwise_adagrad": "row-wise Adagrad",
            "adagrad": "Adagrad",
            "sgd": "SGD",
        }.items():
            yield Ratio(f"{word} over one kernel, {ids}", (name,), fused, only)
        yield Ratio(f"sort over one kernel, {ids}", ("sort",), fused, only)
        whole = "coalesce and row-wise Adagrad over sort and one kernel"
        yield Ratio(f"{whole}, {ids}", ("coalesce", "rowwise_adagrad"), ("sort", *fused), only)


_GROUPED = ("grouped",)
RATIOS = (
    RatioTable(
        "accumulation",
        "gradient of a weight, added to a buffer in the product or after it",
        "k",
        "tokens",
        (
            Ratio("inside over after, fp32", ("added_inside_fp32",), ("added_after_fp32",)),
            Ratio("inside over after, bf16", ("added_inside_bf16",), ("added_after_bf16",)),
            Ratio("inside, fp32, over no addition", ("added_inside_fp32",), ("product",)),
            Ratio("after, fp32, over no addition", ("added_after_fp32",), ("product",)),
        ),
    ),
    RatioTable(
        "fp8",
        "products in fp8, over one scale for a matrix",
        "m",
        "rows",
        (
            Ratio("bf16", ("bf16",), ("tensor",)),
            Ratio("fast accumulation", ("tensor_fast",), ("tensor",)),
            Ratio("a scale for a row", ("row",), ("tensor",)),
            Ratio("a scale for a row, fast accumulation", ("row_fast",), ("tensor",)),
            Ratio("1 x 128 by 128 x 128", ("block_1x128_by_128x128",), ("tensor",)),
            Ratio("1 x 128 by 1 x 128", ("block_1x128_by_1x128",), ("tensor",)),
        ),
    ),
    RatioTable(
        "fp8",
        "casts to fp8, eager over compiled",
        "rows",
        "rows",
        tuple(
            Ratio(f"scale of a {kind}", (f"cast_{kind}",), (f"cast_{kind}_compiled",))
            for kind in ("tensor", "row", "block")
        ),
    ),
    RatioTable(
        "attention",
        "backends of attention, causal, heads of 128",
        "sequence",
        "tokens",
        tuple(_compare_backends()),
        ranges=False,
    ),
    RatioTable(
        "grouped",
        "products of experts, one kernel for all (grouped) over others",
        "m",
        "rows of an expert",
        (
            Ratio("over batched", _GROUPED, ("batched",)),
            Ratio("over one by one, 8 experts", _GROUPED, ("one_by_one",), {"batch": 8}),
            Ratio("over one by one, 64 experts (host)", _GROUPED, ("one_by_one",), {"batch": 64}),
            Ratio("over one by one, 128 experts (host)", _GROUPED, ("one_by_one",), {"batch": 128}),
            Ratio("gradient of inputs over forward", ("grouped_input_gradient",), _GROUPED),
            Ratio("gradient of weights over forward", ("grouped_weight_gradient",), _GROUPED),
            Ratio("by Zipf's law over even", ("grouped_zipf",), _GROUPED),
        ),
        ranges=False,
    ),
    RatioTable(
        "adagrad",
        "updates of the rows of lookups, in PyTorch's operations over one kernel",
        "lookups",
        "lookups",
        tuple(_compare_updates()),
    ),
)


def format_ratios(survey: Survey, table: RatioTable) -> str:
    """Geometric means of ratios, with the smallest and the largest, by a size."""
    timings = [timing for timing in survey.timings if timing.section == table.section]
    found = [(ratio.says, ratio.divide(timings, table.by)) for ratio in table.ratios]
    sizes = sorted({size for _, each in found for size in each})
    lines: list[Sequence[str]] = [(table.word, *(f"{size:g}" for size in sizes))]
    for says, each in found:
        cells = (_summarize(each.get(size, ()), ranges=table.ranges) for size in sizes)
        lines.append((says, *cells))
    return f"{table.head}\n{format_table(lines)}"


def _summarize(ratios: Sequence[float], *, ranges: bool) -> str:
    """Geometric mean, and smallest and largest if they are asked for; nothing for none."""
    if not ratios:
        return ""
    mean = float(np.exp(np.mean(np.log(ratios))))
    if not ranges:
        return f"{mean:.2f}"
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def format_widths(survey: Survey) -> str:
    """Time of one FLOP of causal attention over 2048 tokens, relative to heads of 128 [-]."""
    only = {"sequence": 2048, "causal": 1}
    times = defaultdict[str, dict[float, float]](dict)
    for timing in survey.timings:
        fits = all(timing.sizes.get(name) == size for name, size in only.items())
        if timing.section == "attention" and fits and timing.name[:4] != "math":
            width = timing.sizes["width"]
            times[timing.name][width] = timing.seconds / width if timing.medians else np.nan
    widths = sorted({width for each in times.values() for width in each})
    lines: list[Sequence[str]] = [("width of a head", *(f"{width:g}" for width in widths))]
    for name, each in sorted(times.items()):
        ratios = (each[width] / each[128] for width in widths)
        lines.append((name.replace("_", ", "), *(f"{r:.2f}".replace("nan", "-") for r in ratios)))
    return f"time of one FLOP of attention over that with heads of 128, 2048 tokens\n{format_table(lines)}"


def format_casts(survey: Survey) -> str:
    """Compiled casts of a matrix to fp8, over the product of it with 4096 by 4096, by rows [-]."""
    casts, products = dict[tuple[str, float], float](), dict[float, float]()
    for timing in survey.timings:
        if timing.section != "fp8" or timing.sizes["n"] != 4096:
            continue
        if timing.name == "tensor" and timing.sizes["k"] == 4096:
            products[timing.sizes["m"]] = timing.seconds
        if timing.name.endswith("_compiled"):
            casts[timing.name, timing.sizes["rows"]] = timing.seconds
    lines: list[Sequence[str]] = [("rows", *(f"{rows:g}" for rows in sorted(products)))]
    for kind in ("tensor", "row", "block"):
        name = f"cast_{kind}_compiled"
        cells = (f"{casts[name, rows] / products[rows]:.2f}" for rows in sorted(products))
        lines.append((f"scale of a {kind}", *cells))
    return f"compiled cast of the first operand over the product with 4096 x 4096\n{format_table(lines)}"


#: Widths of rows in the table of rates.
_WIDTHS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 50257)


def format_rates(survey: Survey) -> str:
    """Share of the memory bandwidth that kernels over 2^25 numbers reach, by the width of a row
    [%]."""
    name = _PLATFORMS[check_choice("device", survey.facts["device"], _PLATFORMS)][0]
    bandwidth = pk.load_platform(name).device.main_bandwidth
    rates = defaultdict[tuple[str, str], dict[float, float]](dict)
    for timing in survey.timings:
        if timing.section == "rowwise" and timing.sizes["elements"] > 2**24:
            (work,) = list_work(timing)
            rate = 100 * work.nbytes / timing.seconds / bandwidth
            rates[timing.name, timing.dtype][timing.sizes["n"]] = rate
    lines: list[Sequence[str]] = [("width of a row", "", *(f"{width}" for width in _WIDTHS))]
    for (kernel, dtype), each in sorted(rates.items()):
        cells = (f"{each[width]:.0f}" if width in each else "" for width in _WIDTHS)
        lines.append((kernel, dtype, *cells))
    return f"operands of 2^25 numbers, read and written once, over the memory bandwidth, %\n{format_table(lines)}"


def print_tables(survey: Survey) -> None:
    """Print the errors of perfkit, then what it has no form for."""
    print(f"errors of kernels alone, and bias inside a step, %\n{format_errors(survey)}\n")
    print(f"{format_rates(survey)}\n")
    parts = [format_ratios(survey, table) for table in RATIOS]
    print(
        "\n\n".join([*parts[:3], format_casts(survey), parts[3], format_widths(survey), *parts[4:]])
    )
