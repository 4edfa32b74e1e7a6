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
from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import group_rows
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.strategy import Strategy


class Size(NamedTuple):
    """A DLRM: layers of each MLP and their width, columns and number of our tables, and what MAD-Max
    says of its own: their number, rows, columns and lookups [-]."""

    layers: int
    width: int
    dim: int
    tables: int
    their_tables: int
    their_rows: int
    their_columns: int
    their_lookups: int


MODELS = {
    "DLRM-A": Size(10, 3968, 3968, 11, 4096, 2_080_000, 94, 15),
    "DLRM-I": Size(22, 832, 896, 29, 512, 7_050_000, 92, 70),
    "DLRM-F": Size(4, 560, 640, 4, 64, 732_000_000, 256, 20),
}
PLATFORM = "a100-sxm-8x16"
_RANKS = 128
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
    size = MODELS[name]
    # numbers of a sample in all tables, theirs over ours
    share = size.their_tables * size.their_columns / (size.dim * size.tables)
    rows = round(size.their_rows * share)
    hidden = [size.width for _ in range(size.layers)]
    return DLRM(
        rows=[rows for _ in range(size.tables)],
        dim=size.dim,
        pooling=round(size.their_lookups * share),
        batch=batch,
        dtype="tf32",
        table_dtype="fp16",
        embedding="fused",
        fused=True,
        overlap=True,
        bottom=(*hidden[1:], size.dim),
        top=tuple(hidden),
        features=size.width,
    )


def compare(names: Iterable[str] = MODELS) -> list[dict[str, Any]]:
    """Rows of the reference file with perfkit's answers beside them [s]."""
    compared = list[dict[str, Any]]()
    for name in names:
        model = build(name)
        split = Placement("column_wise", tuple(range(_RANKS)))
        plan = Plan(_RANKS, tuple(split for _ in model.tables))
        rows = list[dict[str, Any]]()
        for row in group_rows("model", "published", "madmax_dlrm.csv")[name]:
            strategy = Strategy(
                tp=int(row["tp"]),
                dp=int(row["dp"]),
                zero=int(row["zero"]),
                shards=int(row["shards"]),
            )
            with keep_quiet():
                prediction = predict(
                    model,
                    PLATFORM,
                    ranks=_RANKS,
                    plan=replace(plan, mlps=strategy),
                    execution="graphs",
                )
            rows.append(
                {
                    "model": row["model"],
                    "strategy": row["strategy"],
                    "time": 1e3 * prediction.time,
                    "other": 1e3 * float(row["time"]),
                    "needs": prediction.memory().total / 1e9,
                }
            )
        for row in rows:  # the first one copies the MLPs
            row["relative"] = rows[0]["time"] / row["time"]
            row["relative_other"] = rows[0]["other"] / row["other"]
        compared += rows
    return compared


def count_pairs(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of strategies of one model that both put in the same order, and all pairs."""
    alike = 0
    pairs = 0
    for one, other in combinations(rows, 2):
        if one["model"] == other["model"]:
            pairs += 1
            alike += (one["time"] < other["time"]) == (one["other"] < other["other"])
    return alike, pairs


@command({})
def main(given: Any) -> None:
    """Strategies for MLPs beside MAD-Max."""
    rows = compare()
    print(lay_out(rows, _COLUMNS, numbers=True))
    alike, pairs = count_pairs(rows)
    print(f"pairs in the same order: {alike} of {pairs}")
