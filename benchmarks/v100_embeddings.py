"""Lookups and updates of tables on a V100, predicted with assumed shares of the bandwidth: nothing
was fitted to them.

python -m benchmarks.v100_embeddings

Fused kernels of Lin et al. (arXiv 2404.12674): those of DLRM-MLPerf at batch 2048, and 20 that were
profiled alone; in the second half of each kind of these, indices are in shared memory.
"""

from typing import Any

from benchmarks.helpers.command import command
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.tables import lay_out
from benchmarks.makers.gallery_v100 import read_trace
from perfkit.platform.gallery import load_platform
from perfkit.prediction.cost import price
from perfkit.workloads.dlrm import DLRM


def predict_kernels() -> list[dict[str, Any]]:
    """Phase, tables, batch, measured and predicted time of every kernel [s]."""
    model = DLRM("dlrm-mlperf", batch=2048, embedding="fused")
    names = {"LookupFunction": "forward", "LookupFunctionBackward": "backward"}
    cases = [
        (names[row["op"]], "MLPerf", model, row["seconds"])
        for row in read_trace()
        if row["op"] in names
    ]
    for row in read_csv(find_shared_data("kernels_v100", "kernel_samples_v100_2020_counters.csv")):
        if row["set"].startswith("EL"):
            keys = ("batch_size", "num_embeddings", "num_tables", "bag_size", "embedding_dim")
            batch, rows, tables, pooling, dim = (int(float(row[key])) for key in keys)
            model = DLRM(
                batch=batch, rows=[rows] * tables, pooling=pooling, dim=dim, embedding="fused"
            )
            phase, text = (
                "forward" if "fwd" in row["set"] else "backward",
                f"{tables} of {rows} x {dim}",
            )
            cases.append(
                (phase, f"{text}, {pooling} each", model, 1e-6 * float(row["kernel_runtime"]))
            )
    found = []
    for phase, text, model, measured in cases:
        [graph] = model.graphs(1, accelerator=True)
        seconds = price([graph], load_platform("v100-sxm-8"))[0].seconds
        own = sum(
            s
            for s, label in zip(seconds, graph.labels, strict=True)
            if label.kind == f"embedding_{phase}"
        )
        about = {"phase": phase, "tables": text, "batch": model.batch}
        found.append(
            {
                **about,
                "measured_s": measured,
                "predicted_s": float(own),
                "error": float(own / measured - 1),
            }
        )
    return found


@command({})
def main(given: Any) -> None:
    """Lookups and updates on a V100 that nothing was fitted to."""
    rows = predict_kernels()
    heads = ("phase", "tables", "batch")
    columns = {
        "measured": "{measured_s:time}",
        "predicted": "{predicted_s:time}",
        "error": "{error:+.0%}",
    }
    print(lay_out(rows, {head: f"{{{head}}}" for head in heads} | columns))
    print(f"{sum(abs(row['error']) <= 0.15 for row in rows)} of {len(rows)} within 15 %")
