"""How ranks share the MLPs of three large DLRMs, beside the answers of MAD-Max.

    python -m benchmarks.dlrm_strategies

MAD-Max (arXiv:2310.02784) models DLRM-A, -I and -F on 128 A100 (ZionEX) and asks how to share their
MLPs, with tables split over all ranks. What it measured is not public in a form that we
could read; its model is, and reference_data/published/madmax_dlrm.csv holds its answers. It knows
neither start-up times nor the host, so perfkit's are those of graphs of launches. Widths are
rounded to whole shares. There are fewer and wider tables, with as many bytes in lookups and in
exchanges as MAD-Max counts; so the interaction is small, as there, where it is left out.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import group_rows
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.strategy import Strategy

#: Layers of each MLP and their width, columns and number of our tables, and what MAD-Max
#: says of its own: their number, rows, columns and lookups [-].
MODELS = {
    "DLRM-A": (10, 3968, 3968, 11, (4096, 2_080_000, 94, 15)),
    "DLRM-I": (22, 832, 896, 29, (512, 7_050_000, 92, 70)),
    "DLRM-F": (4, 560, 640, 4, (64, 732_000_000, 256, 20)),
}
PLATFORM = "a100-sxm-8x16"
_COLUMNS = {
    "model": "{model}",
    "mlps": "{strategy}",
    "perfkit [ms]": "{time:.1f}",
    "MAD-Max [ms]": "{other:.1f}",
    "relative to copies": "{relative:.2f}",
    "of MAD-Max": "{relative_other:.2f}",
    "needs [GB]": "{needs:.1f}",
}


def build(name: str, batch: int = 65536) -> DLRM:
    """A DLRM with the products of MAD-Max's, and as many bytes in lookups and in exchanges."""
    layers, width, dim, count, (tables, rows, columns, lookups) = MODELS[name]
    share = tables * columns / (dim * count)  # numbers of a sample in all tables, theirs over ours
    widths: dict[str, Any] = {
        "bottom": (width,) * (layers - 1) + (dim,),
        "top": (width,) * layers,
        "features": width,
    }
    return DLRM(
        rows=[round(rows * share)] * count,
        dim=dim,
        pooling=round(lookups * share),
        batch=batch,
        dtype="tf32",
        table_dtype="fp16",
        embedding="fused",
        fused=True,
        overlap=True,
        **widths,
    )


def compare(names: Iterable[str] = MODELS) -> list[dict[str, Any]]:
    """Rows of the reference file with perfkit's answers beside them [s]."""
    found = list[dict[str, Any]]()
    for name in names:
        model, first = build(name), dict[str, float]()
        plan = Plan(128, (Placement("column_wise", tuple(range(128))),) * len(model.tables))
        for row in group_rows("model", "published", "madmax_dlrm.csv")[name]:
            way = Strategy(**{key: int(row[key]) for key in ("tp", "dp", "zero", "shards")})
            with keep_quiet():
                one = predict(
                    model,
                    PLATFORM,
                    ranks=128,
                    plan=replace(plan, mlps=way),
                    execution="graphs",
                )
            times = {"time": 1e3 * one.time, "other": 1e3 * float(row["time"])}
            first = first or times
            relative = {
                "relative": first["time"] / times["time"],
                "relative_other": first["other"] / times["other"],
            }
            needs, about = (
                {"needs": one.memory().total / 1e9},
                {key: row[key] for key in ("model", "strategy")},
            )
            found.append({**about, **times, **relative, **needs})
    return found


def count_pairs(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of strategies of one model that both put in the same order, and all pairs."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if a["model"] == b["model"]]
    return sum((a["time"] < b["time"]) == (a["other"] < b["other"]) for a, b in pairs), len(pairs)


@command({})
def main(given: Any) -> None:
    """Strategies for MLPs beside MAD-Max."""
    rows = compare()
    print(lay_out(rows, _COLUMNS, numbers=True))
    print("pairs in the same order: {} of {}".format(*count_pairs(rows)))
