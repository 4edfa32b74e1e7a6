"""Random configurations: what `check` judges predictions by, and the small set that calibration learns from."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

__all__ = ["Sample", "draw_calibration", "draw_check", "dump", "load"]

_LARGEST_TABLES = {True: 4e9, False: 1e9}  # bytes of weights by gradient form: dense gradients need as much again


@dataclass(frozen=True)
class Sample:
    """One configuration to predict and measure.

    Parameters
    ----------
    name : str
        Short name, unique within a draw.
    family : str
        ``dlrm``, ``transformer`` or ``hybrid``.
    workload : DLRM or Transformer
        The iteration.
    plan : Plan or None
        Placement of the tables when several ranks run.
    """

    name: str
    family: str
    workload: DLRM | Transformer
    plan: Plan | None = None

    @property
    def ranks(self) -> int:
        """Ranks that run it [-]."""
        return self.plan.ranks if self.plan else 1


class _Draw:
    """Draws that fill each range evenly on a logarithmic scale over the `n` samples of a family."""

    def __init__(self, rng: np.random.Generator, n: int) -> None:
        self.rng, self.n = rng, n

    def spread(self, low: float, high: float) -> np.ndarray:
        positions = (self.rng.permutation(self.n) + self.rng.random(self.n)) / self.n
        return np.asarray(low * (high / low) ** positions)

    def choice(self, *values: object) -> list[object]:
        repeated = [values[i % len(values)] for i in range(self.n)]
        return [repeated[i] for i in self.rng.permutation(self.n)]


def _widths(rng: np.random.Generator, most: int, top: int) -> tuple[int, ...]:
    return tuple(int(w) // 8 * 8 for w in np.exp(rng.uniform(np.log(64), np.log(top + 8), rng.integers(1, most + 1))))


def _dlrms(rng: np.random.Generator, n: int, *, scale: float, tables: tuple[int, int] = (4, 26)) -> list[DLRM]:
    draw = _Draw(rng, n)
    counts = rng.integers(tables[0], tables[1] + 1, n)
    dims, batches = draw.spread(16, 128.5), draw.spread(64, 2048 * scale)
    poolings, exponents = draw.spread(1, 32.5), rng.permutation((np.arange(n) + rng.random(n)) / n * 1.2)
    models = []
    for count, dim, batch, pooling, exponent, sparse in zip(
        counts, dims, batches, poolings, exponents, draw.choice(True, False), strict=True
    ):
        width = max(16, int(dim) // 8 * 8)
        while True:
            rows = np.round(10 ** rng.uniform(3, 6, count)).astype(int)
            if rows.sum() * width * 4 <= _LARGEST_TABLES[bool(sparse)] * scale:
                break
        models.append(
            DLRM(
                rows=rows.tolist(), dim=width, pooling=int(pooling), exponent=round(float(exponent), 2),
                batch=int(batch) // 2 * 2, bottom=_widths(rng, 3, 1024), top=_widths(rng, 3, 1024),
                features=13, sparse=bool(sparse),
            )
        )  # fmt: skip
    return models


def _transformers(rng: np.random.Generator, n: int, *, scale: float) -> list[Transformer]:
    draw = _Draw(rng, n)
    layers = rng.integers(2, 7, n) if scale == 1 else rng.integers(2, 5, n)
    hidden, sequences = draw.spread(128, 544), draw.spread(32, 256.5)
    batches, vocabularies = draw.spread(2, 16.5), draw.spread(1e3, 1.4e4)
    families, attentions = draw.choice("bert", "gpt2"), draw.choice("fused", "eager")
    optimizers, widths = draw.choice("adamw", "adamw", "adamw", "sgd"), draw.choice(32, 64)
    models = []
    for i in range(n):
        width = int(widths[i])  # type: ignore[call-overload]
        heads = max(1, int(hidden[i]) // width)
        model = Transformer.bert if families[i] == "bert" else Transformer.gpt2
        batch = max(2, int(batches[i] * (1 if scale == 1 else min(1.0, 1536 / (batches[i] * sequences[i])))))
        sizes = {"layers": int(layers[i]), "hidden": heads * width, "heads": heads, "vocabulary": int(vocabularies[i])}
        options: dict[str, Any] = {"attention": attentions[i], "optimizer": optimizers[i]}
        models.append(model(batch=batch, sequence=int(sequences[i]), **sizes, **options))
    return models


def _hybrids(rng: np.random.Generator, n: int, *, scale: float) -> list[tuple[DLRM, Plan]]:
    pairs = []
    for model in _dlrms(rng, n, scale=scale):
        owners = rng.integers(0, 2, len(model.tables))
        owners[rng.choice(len(owners), 2, replace=False)] = (0, 1)  # no rank stays empty
        pairs.append((model, Plan.from_owners([int(o) for o in owners], ranks=2)))
    return pairs


def _samples(rng: np.random.Generator, counts: tuple[int, int, int], scale: float) -> list[Sample]:
    samples = [Sample(f"dlrm-{i}", "dlrm", m) for i, m in enumerate(_dlrms(rng, counts[0], scale=scale))]
    transformers = _transformers(rng, counts[1], scale=scale)
    samples += [Sample(f"{m.name}-{i}", "transformer", m) for i, m in enumerate(transformers)]
    return samples + [
        Sample(f"hybrid-{i}", "hybrid", m, p) for i, (m, p) in enumerate(_hybrids(rng, counts[2], scale=scale))
    ]


def draw_check(seed: int, *, dlrm: int = 14, transformer: int = 10, hybrid: int = 6) -> list[Sample]:
    """The configurations a check predicts and measures.

    DLRMs of 4–26 tables, 10³–10⁶ rows, 16–128 columns, batch 64–2,048, pooling 1–32, Zipf exponent 0–1.2, dense or
    sparse gradients and MLP widths of 64–1,024; BERTs and GPT-2s of 2–6 layers, width 128–512, sequence 32–256, batch
    2–16, vocabulary 10³–1.4·10⁴; DLRMs as above on two ranks with random placements.

    Parameters
    ----------
    seed : int
        Seed; calibration never draws from the same stream [-].
    dlrm, transformer, hybrid : int
        Number of configurations of each family [-].

    Returns
    -------
    samples : list of Sample
        The configurations.
    """
    return _samples(np.random.default_rng([1, seed]), (dlrm, transformer, hybrid), 1.0)


def draw_calibration(*, quick: bool = False, hybrid: bool = True) -> list[Sample]:
    """The small configurations that in-context calibration runs.

    Parameters
    ----------
    quick : bool
        Half as many.
    hybrid : bool
        Whether two-rank DLRMs are among them.

    Returns
    -------
    samples : list of Sample
        The configurations, always the same ones.
    """
    counts = (6, 4, 3) if quick else (14, 10, 8)
    return _samples(np.random.default_rng([0, 2024]), (*counts[:2], counts[2] if hybrid else 0), 0.5)


def dump(workload: DLRM | Transformer) -> dict[str, Any]:
    """A workload as plain JSON.

    Parameters
    ----------
    workload : DLRM or Transformer
        The iteration.

    Returns
    -------
    data : dict
        What `load` takes.
    """
    return asdict(workload)


def load(data: dict[str, Any]) -> DLRM | Transformer:
    """A workload from plain JSON.

    Parameters
    ----------
    data : dict
        What `dump` returned.

    Returns
    -------
    workload : DLRM or Transformer
        The iteration.
    """
    if data["family"] != "dlrm":
        return Transformer(**data)
    tables, same = data["tables"], {"name", "tables", "family"}
    columns: dict[str, Any] = {key: [t[key] for t in tables] for key in ("rows", "pooling", "exponent")}
    return DLRM(dim=tables[0]["dim"], **columns, **{key: value for key, value in data.items() if key not in same})
