"""Random configurations: those of `check`, and the small set that calibration measures."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

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

    def describe(self) -> dict[str, Any]:
        """Workload and owners of tables (None without a plan) as plain JSON."""
        return {
            "workload": dump(self.workload),
            "owners": list(self.plan.owners) if self.plan else None,
        }


def _spread(rng: Rng, n: int, low: float, high: float) -> np.ndarray:
    """Draw n numbers that fill a range evenly on a logarithmic scale."""
    return np.asarray(low * (high / low) ** ((rng.permutation(n) + rng.random(n)) / n))


def _mix(rng: Rng, n: int, *values: Any) -> list[Any]:
    """Repeat values equally often, in random order."""
    return [values[i % len(values)] for i in rng.permutation(n)]


def _widths(rng: Rng) -> tuple[int, ...]:
    """Draw the widths of up to three layers of an MLP."""
    return tuple(
        int(w) // 8 * 8 for w in np.exp(rng.uniform(np.log(64), np.log(1032), rng.integers(1, 4)))
    )


def _dlrms(rng: Rng, n: int, *, scale: float, overlap: bool = False) -> Iterator[DLRM]:
    counts = rng.integers(4, 27, n)
    dims, batches, poolings = (
        _spread(rng, n, *ends) for ends in ((16, 128.5), (64, 2048 * scale), (1, 32.5))
    )
    exponents = rng.permutation((np.arange(n) + rng.random(n)) / n * 1.2)
    drawn = zip(counts, dims, batches, poolings, exponents, _mix(rng, n, True, False), strict=True)
    for number, (count, dim, batch, pooling, exponent, sparse) in enumerate(drawn):
        width = max(16, int(dim) // 8 * 8)
        while True:
            rows = np.round(10 ** rng.uniform(3, 6, count)).astype(int)
            if rows.sum() * width * 4 <= _LARGEST_TABLES[sparse] * scale:
                break
        yield DLRM(
            rows=rows.tolist(),
            dim=width,
            pooling=int(pooling),
            exponent=round(float(exponent), 2),
            batch=int(batch) // 2 * 2,
            bottom=_widths(rng),
            top=_widths(rng),
            features=13,
            sparse=sparse,
            overlap=overlap and number % 2 == 0,
        )


def _transformers(rng: Rng, n: int, *, scale: float, ranks: int = 1) -> Iterator[Transformer]:
    layers = rng.integers(2, 7 if scale == 1 else 5, n)
    ranges = ((128, 544), (32, 256.5), (2, 16.5), (1e3, 1.4e4))
    hidden, sequences, batches, vocabularies = (_spread(rng, n, *ends) for ends in ranges)
    families, attentions = _mix(rng, n, "bert", "gpt2"), _mix(rng, n, "fused", "eager")
    optimizers, widths = _mix(rng, n, "adamw", "adamw", "adamw", "sgd"), _mix(rng, n, 32, 64)
    for i in range(n):
        heads = max(1, int(hidden[i]) // widths[i])
        most = 1.0 if scale == 1 else min(1.0, 1536 / (batches[i] * sequences[i]))
        yield getattr(Transformer, families[i])(
            batch=max(2, ranks * int(batches[i] * most)),
            sequence=int(sequences[i]),
            layers=int(layers[i]),
            hidden=heads * widths[i],
            heads=heads,
            vocabulary=int(vocabularies[i]),
            attention=attentions[i],
            optimizer=optimizers[i],
        )


#: Ranges of the convolutional nets: batch, size, width and depth, such that a training step takes
#: 20-1500 ms on a core.
_NETS = {
    "resnet": ((4, 16), (64, 112), (24, 40), (1, 2)),
    "vgg": ((3, 8), (64, 112), (24, 40), (1, 2)),
    "mobilenet": ((4, 12), (64, 96), (8, 24), (1, 3)),
    "densenet": ((8, 16), (64, 112), (16, 32), (1, 3)),
    "inception": ((4, 12), (64, 128), (24, 40), (1, 2)),
    "squeezenet": ((8, 16), (96, 160), (24, 48), (2, 3)),
    "xlnet": ((4, 8), (48, 160), (128, 384), (2, 5)),
}


def _nets(rng: Rng, names: Sequence[str], *, scale: float, ranks: int = 1) -> Iterator[Net]:
    """Draw one net of each name; a scale under 1 makes them smaller."""
    for name in names:
        ranges = [(low, low + scale * (high - low)) for low, high in _NETS[name]]
        batch, size, width, depth = (
            low * ((high + 0.5) / low) ** rng.random() for low, high in ranges
        )
        if xlnet := name == "xlnet":
            batch = max(4.0, min(batch, 640 / size))
        step = 64 if xlnet else 8
        sizes = {
            "size": int(size),
            "width": max(1, round(width / step)) * step,
            "depth": int(depth),
        }
        sizes["classes"] = int(10 ** (rng.uniform(3, 3.9) if xlnet else rng.uniform(1, 3)))
        optimizer = "adamw" if xlnet else str(rng.choice(["sgd", "adamw"]))
        yield Net(name, ranks * int(batch), **sizes, optimizer=optimizer)


def _samples(
    rng: Rng, counts: tuple[int, int, int], scale: float, *, overlap: bool = False
) -> list[Sample]:
    samples = [
        Sample(f"dlrm-{i}", "dlrm", m) for i, m in enumerate(_dlrms(rng, counts[0], scale=scale))
    ]
    others = enumerate(_transformers(rng, counts[1], scale=scale))
    samples += [Sample(f"{m.name}-{i}", "transformer", m) for i, m in others]
    for i, model in enumerate([*_dlrms(rng, counts[2], scale=scale, overlap=overlap)]):
        owners = rng.integers(0, 2, len(model.tables))
        owners[rng.choice(len(owners), 2, replace=False)] = (0, 1)  # each rank has a table
        samples.append(
            Sample(f"hybrid-{i}", "hybrid", model, Plan.from_owners(owners.tolist(), ranks=2))
        )
    return samples


def _more_samples(rng: Rng, nets: Sequence[str], ddp: int, scale: float) -> list[Sample]:
    """Draw nets, and `ddp` models that train data-parallel on two ranks, each with and without
    overlap."""
    samples = [
        Sample(f"{m.name}-{i}", m.family, m) for i, m in enumerate(_nets(rng, nets, scale=scale))
    ]
    models: list[Transformer | Net] = [*_transformers(rng, -(-ddp // 2), scale=scale, ranks=2)]
    models += _nets(rng, ["resnet"] * (ddp // 2), scale=scale, ranks=2)
    return samples + [
        Sample(f"ddp-{i}-{text}", "ddp", replace(model, overlap=text == "overlap"), ranks=2)
        for i, model in enumerate(models)
        for text in ("overlap", "blocking")
    ]


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
    every = check_choice("models", models, MODELS) == "all"
    samples = _samples(
        np.random.default_rng([1, seed]), (dlrm, transformer, hybrid), 1.0, overlap=every
    )
    return samples + (
        _more_samples(np.random.default_rng([2, seed]), list(NETS), ddp, 1.0) if every else []
    )


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
    every = check_choice("models", models, MODELS) == "all"
    # seeds with a wide range of sizes and no long iteration
    rng = np.random.default_rng([0, 2057 if every else 2024])
    if every:
        samples = _samples(rng, (3, 3, 2 if hybrid else 0), 0.5, overlap=True)
        nets = ("resnet", "mobilenet", "inception", "squeezenet", "xlnet")
        return samples + _more_samples(rng, nets, 1 if hybrid else 0, 0.5)
    counts = (6, 4, 3) if quick else (14, 10, 8)
    return _samples(rng, (*counts[:2], counts[2] if hybrid else 0), 0.5)


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
    data = {key: value for key, value in {"overlap": False, **data}.items() if key != "compiled"}
    if data["family"] in NETS.values():
        return Net(**{key: value for key, value in data.items() if key != "family"})
    if data["family"] != "dlrm":
        return Transformer(**data)
    # older files also have a ``loop``
    tables, same = data["tables"], {"name", "tables", "family", "loop"}
    columns: dict[str, Any] = {
        key: [t[key] for t in tables] for key in ("rows", "pooling", "exponent")
    }
    return DLRM(
        dim=tables[0]["dim"],
        **columns,
        **{key: value for key, value in data.items() if key not in same},
    )
