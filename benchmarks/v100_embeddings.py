"""Lookups and updates of tables on a V100, predicted with assumed shares of the bandwidth: nothing
was fitted to them.

python -m benchmarks.v100_embeddings

Fused kernels of Lin et al. (arXiv 2404.12674): those of DLRM-MLPerf at batch 2048, and 20 that were
profiled alone; in the second half of each kind of these, indices are in shared memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.tables import lay_out
from benchmarks.makers.gallery_v100 import read_trace
from perfkit.platform.gallery import load_platform
from perfkit.prediction.cost import price
from perfkit.workloads.dlrm import DLRM


class Case(NamedTuple):
    """A published kernel: its direction, its tables in words, the model that runs it, and its time
    [s]."""

    phase: str
    tables: str
    model: DLRM
    seconds: float


def _list_traced() -> Iterator[Case]:
    """Kernels of the trace of DLRM-MLPerf."""
    model = DLRM("dlrm-mlperf", batch=2048, embedding="fused")
    phases = {"LookupFunction": "forward", "LookupFunctionBackward": "backward"}
    for row in read_trace():
        if row["op"] in phases:
            yield Case(phases[row["op"]], "MLPerf", model, row["seconds"])


def _list_profiled() -> Iterator[Case]:
    """Kernels that were profiled alone."""
    for row in read_csv(find_shared_data("kernels_v100", "kernel_samples_v100_2020_counters.csv")):
        if not row["set"].startswith("EL"):
            continue
        rows = int(float(row["num_embeddings"]))
        tables = int(float(row["num_tables"]))
        pooling = int(float(row["bag_size"]))
        dim = int(float(row["embedding_dim"]))
        model = DLRM(
            batch=int(float(row["batch_size"])),
            rows=[rows for _ in range(tables)],
            pooling=pooling,
            dim=dim,
            embedding="fused",
        )
        phase = "forward" if "fwd" in row["set"] else "backward"
        words = f"{tables} of {rows} x {dim}, {pooling} each"
        yield Case(phase, words, model, 1e-6 * float(row["kernel_runtime"]))


def _predict(case: Case) -> float:
    """Time of the lookups or updates of a model on a V100 [s]."""
    (graph,) = case.model.graphs(1, accelerator=True)
    (costs,) = price([graph], load_platform("v100-sxm-8"))
    total = 0.0
    for seconds, label in zip(costs.seconds, graph.labels, strict=True):
        if label.kind == f"embedding_{case.phase}":
            total += float(seconds)
    return total


def predict_kernels() -> list[dict[str, Any]]:
    """Phase, tables, batch, measured and predicted time of every kernel [s]."""
    rows = []
    for case in (*_list_traced(), *_list_profiled()):
        predicted = _predict(case)
        rows.append(
            {
                "phase": case.phase,
                "tables": case.tables,
                "batch": case.model.batch,
                "measured_s": case.seconds,
                "predicted_s": predicted,
                "error": predicted / case.seconds - 1,
            }
        )
    return rows


_COLUMNS = {
    "phase": "{phase}",
    "tables": "{tables}",
    "batch": "{batch}",
    "measured": "{measured_s:time}",
    "predicted": "{predicted_s:time}",
    "error": "{error:+.0%}",
}


@command({})
def main(given: Any) -> None:
    """Lookups and updates on a V100 that nothing was fitted to."""
    rows = predict_kernels()
    near = [row for row in rows if abs(row["error"]) <= 0.15]
    print(lay_out(rows, _COLUMNS))
    print(f"{len(near)} of {len(rows)} within 15 %")
