"""Random configurations: those of `check`, and the small set that calibration measures."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.records import set_fields
from perfkit.ground.units import check_choice
from perfkit.recording.nets import NETS, Net
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

Rng: TypeAlias = np.random.Generator
#: Sets of model families: DLRMs and Transformers; or also XLNets, convolutional nets and
#: data-parallel training.
MODELS = ("standard", "all")

#: Most weights of all tables with sparse and with dense gradients, which need the same memory again
#: [B].
_LARGEST_TABLES = {True: 4e9, False: 1e9}


@dataclass(frozen=True)
class Sample:
    """One configuration to predict and measure.

    Parameters
    ----------
    name : str
        Short name, unique within a draw.
    family : str
        ``dlrm``, ``transformer``, ``xlnet``, ``convolution``, ``hybrid`` or ``ddp``.
    workload : DLRM, Transformer or Net
        The iteration.
    plan : Plan or None
        Placement of a DLRM's tables when several ranks run.
    ranks : int
        Ranks that run it; where there is a plan, its ranks [-].
    """

    name: str
    family: str
    workload: DLRM | Transformer | Net
    plan: Plan | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.plan:
            set_fields(self, ranks=self.plan.ranks)

    @property
    def description(self) -> str:
        """What runs, in a few words."""
        words = self.workload.description
        if isinstance(self.workload, Transformer):
            words += f", {self.workload.layers} layers × {self.workload.hidden}"
        if self.ranks > 1:
            words += f", on {self.ranks} ranks"
        return words

    def describe(self) -> dict[str, Any]:
        """Workload and owners of tables (None without a plan) as plain JSON."""
        return {
            "workload": dump(self.workload),
            "owners": list(self.plan.owners) if self.plan else None,
        }


def _spread(rng: Rng, n: int, low: float, high: float) -> np.ndarray:
    """Draw n numbers that fill a range evenly on a logarithmic scale."""
    positions = (rng.permutation(n) + rng.random(n)) / n
    return np.asarray(low * (high / low) ** positions)


def _mix(rng: Rng, n: int, *values: Any) -> list[Any]:
    """Repeat values equally often, in random order."""
    return [values[i % len(values)] for i in rng.permutation(n)]


def _widths(rng: Rng) -> tuple[int, ...]:
    """Draw the widths of up to three layers of an MLP."""
    count = rng.integers(1, 4)
    widths = np.exp(rng.uniform(np.log(64), np.log(1032), count))
    return tuple(int(width) // 8 * 8 for width in widths)


def _dlrms(rng: Rng, n: int, *, scale: float, overlap: bool = False) -> Iterator[DLRM]:
    counts = rng.integers(4, 27, n)
    dims = _spread(rng, n, 16, 128.5)
    batches = _spread(rng, n, 64, 2048 * scale)
    poolings = _spread(rng, n, 1, 32.5)
    exponents = rng.permutation((np.arange(n) + rng.random(n)) / n * 1.2)
    gradients = _mix(rng, n, True, False)
    for i in range(n):
        sparse = gradients[i]
        dim = max(16, int(dims[i]) // 8 * 8)
        yield DLRM(
            rows=_draw_rows(rng, counts[i], 4 * dim, _LARGEST_TABLES[sparse] * scale),
            dim=dim,
            pooling=int(poolings[i]),
            exponent=round(float(exponents[i]), 2),
            batch=int(batches[i]) // 2 * 2,
            bottom=_widths(rng),
            top=_widths(rng),
            features=13,
            sparse=sparse,
            overlap=overlap and i % 2 == 0,
        )


def _draw_rows(rng: Rng, tables: int, row_bytes: int, most_bytes: float) -> list[int]:
    """Draw the rows of all tables of a model, again and again until they fit into memory."""
    while True:
        rows = np.round(10 ** rng.uniform(3, 6, tables)).astype(int)
        if rows.sum() * row_bytes <= most_bytes:
            return list(rows.tolist())


def _transformers(rng: Rng, n: int, *, scale: float, ranks: int = 1) -> Iterator[Transformer]:
    layers = rng.integers(2, 7 if scale == 1 else 5, n)
    hidden = _spread(rng, n, 128, 544)
    sequences = _spread(rng, n, 32, 256.5)
    batches = _spread(rng, n, 2, 16.5)
    vocabularies = _spread(rng, n, 1e3, 1.4e4)
    families = _mix(rng, n, "bert", "gpt2")
    attentions = _mix(rng, n, "fused", "eager")
    optimizers = _mix(rng, n, "adamw", "adamw", "adamw", "sgd")
    head_widths = _mix(rng, n, 32, 64)
    for i in range(n):
        heads = max(1, int(hidden[i]) // head_widths[i])
        share_of_batch = 1.0
        if scale != 1:
            share_of_batch = min(1.0, 1536 / (batches[i] * sequences[i]))
        build = Transformer.bert if families[i] == "bert" else Transformer.gpt2
        yield build(
            batch=max(2, ranks * int(batches[i] * share_of_batch)),
            sequence=int(sequences[i]),
            layers=int(layers[i]),
            hidden=heads * head_widths[i],
            heads=heads,
            vocabulary=int(vocabularies[i]),
            attention=attentions[i],
            optimizer=optimizers[i],
        )


class _NetRanges(NamedTuple):
    """Smallest and largest batch, size, width and depth of a net [-]."""

    batch: tuple[float, float]
    size: tuple[float, float]
    width: tuple[float, float]
    depth: tuple[float, float]

    def draw(self, rng: Rng, scale: float) -> "_NetShape":
        """Draw a shape; a scale under 1 makes it smaller."""
        return _NetShape(
            batch=_draw_part(rng, *self.batch, scale),
            size=_draw_part(rng, *self.size, scale),
            width=_draw_part(rng, *self.width, scale),
            depth=_draw_part(rng, *self.depth, scale),
        )


class _NetShape(NamedTuple):
    """Batch, size, width and depth of a net, not yet rounded [-]."""

    batch: float
    size: float
    width: float
    depth: float


def _draw_part(rng: Rng, low: float, high: float, scale: float) -> float:
    """Draw a number from the lower part of a range, evenly on a logarithmic scale."""
    largest = low + scale * (high - low) + 0.5
    return float(low * (largest / low) ** rng.random())


#: Ranges of the nets, such that a training step takes 20-1500 ms on a core.
_NETS = {
    "resnet": _NetRanges(batch=(4, 16), size=(64, 112), width=(24, 40), depth=(1, 2)),
    "vgg": _NetRanges(batch=(3, 8), size=(64, 112), width=(24, 40), depth=(1, 2)),
    "mobilenet": _NetRanges(batch=(4, 12), size=(64, 96), width=(8, 24), depth=(1, 3)),
    "densenet": _NetRanges(batch=(8, 16), size=(64, 112), width=(16, 32), depth=(1, 3)),
    "inception": _NetRanges(batch=(4, 12), size=(64, 128), width=(24, 40), depth=(1, 2)),
    "squeezenet": _NetRanges(batch=(8, 16), size=(96, 160), width=(24, 48), depth=(2, 3)),
    "xlnet": _NetRanges(batch=(4, 8), size=(48, 160), width=(128, 384), depth=(2, 5)),
}


def _nets(rng: Rng, names: Sequence[str], *, scale: float, ranks: int = 1) -> Iterator[Net]:
    """Draw one net of each name; a scale under 1 makes them smaller."""
    for name in names:
        shape = _NETS[name].draw(rng, scale)
        if name == "xlnet":
            batch = max(4.0, min(shape.batch, 640 / shape.size))
            step = 64
            classes = 10 ** rng.uniform(3, 3.9)
            optimizer = "adamw"
        else:
            batch = shape.batch
            step = 8
            classes = 10 ** rng.uniform(1, 3)
            optimizer = str(rng.choice(["sgd", "adamw"]))
        yield Net(
            name,
            ranks * int(batch),
            size=int(shape.size),
            width=max(1, round(shape.width / step)) * step,
            depth=int(shape.depth),
            classes=int(classes),
            optimizer=optimizer,
        )


@dataclass(frozen=True)
class _Counts:
    """How many configurations of each standard family to draw [-]."""

    dlrm: int
    transformer: int
    hybrid: int


def _samples(rng: Rng, counts: _Counts, scale: float, *, overlap: bool = False) -> list[Sample]:
    """Draw DLRMs, Transformers, and DLRMs on two ranks."""
    samples = []
    for i, dlrm in enumerate(_dlrms(rng, counts.dlrm, scale=scale)):
        samples.append(Sample(f"dlrm-{i}", "dlrm", dlrm))
    for i, transformer in enumerate(_transformers(rng, counts.transformer, scale=scale)):
        samples.append(Sample(f"{transformer.name}-{i}", "transformer", transformer))
    # all models are drawn before the first owners are
    hybrids = list(_dlrms(rng, counts.hybrid, scale=scale, overlap=overlap))
    for i, hybrid in enumerate(hybrids):
        owners = rng.integers(0, 2, len(hybrid.tables))
        owners[rng.choice(len(owners), 2, replace=False)] = (0, 1)  # each rank has a table
        plan = Plan.from_owners(owners.tolist(), ranks=2)
        samples.append(Sample(f"hybrid-{i}", "hybrid", hybrid, plan))
    return samples


def _more_samples(rng: Rng, nets: Sequence[str], ddp: int, scale: float) -> list[Sample]:
    """Draw nets, and `ddp` models that train data-parallel on two ranks, each with and without
    overlap."""
    samples = []
    for i, net in enumerate(_nets(rng, nets, scale=scale)):
        samples.append(Sample(f"{net.name}-{i}", net.family, net))
    resnets = ddp // 2
    models: list[Transformer | Net] = []
    models.extend(_transformers(rng, ddp - resnets, scale=scale, ranks=2))
    models.extend(_nets(rng, ["resnet"] * resnets, scale=scale, ranks=2))
    for i, model in enumerate(models):
        for overlap, label in ((True, "overlap"), (False, "blocking")):
            overlapped = replace(model, overlap=overlap)
            samples.append(Sample(f"ddp-{i}-{label}", "ddp", overlapped, ranks=2))
    return samples


def draw_check(
    seed: int,
    *,
    dlrm: int = 14,
    transformer: int = 10,
    hybrid: int = 6,
    models: str = "standard",
    ddp: int = 2,
) -> list[Sample]:
    """Draw the configurations that a check predicts and measures.

    DLRMs of 4–26 tables, 10³–10⁶ rows, 16–128 columns, batch 64–2,048, pooling 1–32, Zipf exponent
    0–1.2, dense or sparse gradients and MLP widths of 64–1,024; BERTs and GPT-2s of 2–6 layers,
    width 128–512, sequence 32–256, batch 2–16, vocabulary 10³–1.4·10⁴; DLRMs as above on two ranks
    with random placements. With ``models="all"`` also an XLNet, six convolutional nets of random
    size and data-parallel training; every other parallel DLRM then overlaps.

    Parameters
    ----------
    seed : int
        Seed; calibration draws from other random numbers [-].
    dlrm, transformer, hybrid : int
        Number of configurations of each family [-].
    models : str
        One of `MODELS`.
    ddp : int
        Models that train data-parallel on two ranks, with and without overlap; only with
        ``models="all"`` [-].

    Returns
    -------
    samples : list of Sample
        The configurations.
    """
    all_models = check_choice("models", models, MODELS) == "all"
    counts = _Counts(dlrm, transformer, hybrid)
    samples = _samples(np.random.default_rng([1, seed]), counts, 1.0, overlap=all_models)
    if all_models:
        samples += _more_samples(np.random.default_rng([2, seed]), list(NETS), ddp, 1.0)
    return samples


def draw_calibration(
    *, quick: bool = False, hybrid: bool = True, models: str = "standard"
) -> list[Sample]:
    """Draw the small configurations that calibration measures.

    Parameters
    ----------
    quick : bool
        Half as many of the standard models.
    hybrid : bool
        Whether to include iterations on two ranks.
    models : str
        One of `MODELS`; all families together have 15 configurations.

    Returns
    -------
    samples : list of Sample
        The same ones in every call.
    """
    all_models = check_choice("models", models, MODELS) == "all"
    # seeds with a wide range of sizes and no long iteration
    if all_models:
        rng = np.random.default_rng([0, 2057])
        samples = _samples(rng, _Counts(3, 3, 2 if hybrid else 0), 0.5, overlap=True)
        nets = ("resnet", "mobilenet", "inception", "squeezenet", "xlnet")
        return samples + _more_samples(rng, nets, 1 if hybrid else 0, 0.5)
    counts = _Counts(6, 4, 3) if quick else _Counts(14, 10, 8)
    if not hybrid:
        counts = replace(counts, hybrid=0)
    return _samples(np.random.default_rng([0, 2024]), counts, 0.5)


def dump(workload: DLRM | Transformer | Net) -> dict[str, Any]:
    """Write a workload as plain JSON.

    Parameters
    ----------
    workload : DLRM, Transformer or Net
        The iteration.

    Returns
    -------
    data : dict
        Input of `load`.
    """
    return {**asdict(workload), "family": workload.family}


def load(data: dict[str, Any]) -> DLRM | Transformer | Net:
    """Read a workload from plain JSON; the oldest files have no overlap, and old ones say that
    nothing was compiled.

    Parameters
    ----------
    data : dict
        Output of `dump`.

    Returns
    -------
    workload : DLRM, Transformer or Net
        The iteration.
    """
    fields = {"overlap": False, **data}
    fields.pop("compiled", None)
    family = fields.pop("family")
    if family in NETS.values():
        return Net(**fields)
    if family != "dlrm":
        return Transformer(**fields, family=family)
    tables = fields.pop("tables")
    fields.pop("name", None)
    fields.pop("loop", None)  # of older files
    return DLRM(
        dim=tables[0]["dim"],
        rows=[table["rows"] for table in tables],
        pooling=[table["pooling"] for table in tables],
        exponent=[table["exponent"] for table in tables],
        **fields,
    )
